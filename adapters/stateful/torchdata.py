"""torchdata: StatefulDataLoader, and the Loader of torchdata.nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from midepoch.adapters.stateful import private
from midepoch.adapters.stateful.adapter import StatefulAdapter, has_state, is_of, is_stream
from midepoch.copying import stateful_copy
from midepoch.loader.adapter import Options, Run
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["TorchdataAdapter"]

_HOLDS_BACK = "what the dataset's shuffle buffer holds is not in its state: wrap the dataset itself, which is replayed"


class TorchdataAdapter(StatefulAdapter):
    """torchdata's StatefulDataLoader.

    After a resume it starts the next epoch with another order, because it draws its sampler's seed from torch's global
    generator. It also does not restore what samples draw. So this adapter puts the start of each epoch under a random
    stream of its own, and each batch too if it is read in this process.
    """

    name: ClassVar[str] = "stateful-dataloader"
    rewinds = True

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._streams = Streams(source.dataset, source.collate_fn) if options.streams else None
        self.opening = None  # see `start`
        # A Hugging Face dataset is told of the epoch here too. Its beginning is known without reading.
        self._inside = source.dataset if is_of("datasets", source.dataset) and has_state(source.dataset) else None
        self._inside_first = None if self._inside is None else self._inside.state_dict()
        # Another dataset with a state of its own goes on from where it stands, so it has to be led back.
        self.rewinds = self._inside is not None or not has_state(source.dataset)
        self._holds_back = self._inside is not None and private.has_shuffle_buffer(self._inside)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A StatefulDataLoader, or an instance of a subclass."""
        return is_of("torchdata", source) and isinstance(source, DataLoader)

    def drawing(self) -> tuple[object, ...]:
        """What the DataLoader calls."""
        return self.source.dataset, self.source.collate_fn

    def capabilities(self) -> Capabilities:
        """Those of torchdata, plus keyed streams where batches are read in this process."""
        keyed = self._streams is not None and self.source.num_workers == 0
        exact = "numbers drawn while a batch is read are the batch's: exact on the same split"
        if not keyed:
            exact = "its workers' generators are not restored; wrap a DataLoader to have them restored"
            if self._streams is None:
                exact = "randomness='none': nothing restores the generators that samples draw from"
        stated = super().capabilities()
        return dataclasses.replace(
            stated,
            exact_order=Capability(False, _HOLDS_BACK) if self._holds_back else stated.exact_order,
            exact_augmentations=Capability(keyed, exact),
            constant_time_resume=Capability(False, "it skips through its sampler's list, or through its dataset"),
        )

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Start under the epoch's stream, which also seeds its own generators."""
        if state is not None and private.counts_only(state):
            return self._read_again(run)
        if self._inside is not None:
            self._inside.set_epoch(run.epoch)
            if state is None:
                self._inside.load_state_dict(self._inside_first)
        if self._streams is None:
            return super().start(run, state)
        key = derive_key(Purpose.OPENING, run.seed, run.epoch, run.world.rank)
        for holder in (self.source, self.source.sampler, getattr(self.source.batch_sampler, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(key)
        with self._streams.under(key):
            return super().start(run, state)

    def _read_again(self, run: Run) -> Iterator[Any]:
        """Start the epoch, and read what was consumed.

        torchdata does the same for a dataset without a state, but counts it twice in the states that it gives later.
        """
        iterator = self.start(run, None)
        read = self.reading(dataclasses.replace(run, position=0), iterator)
        for _ in range(run.position // run.world.world_size):
            read()
        return iterator

    def before_first_read(self) -> None:
        """Say what is known of a dataset inside; else as every source."""
        if self._holds_back:
            self._tell(_HOLDS_BACK, True, "does not restore its order")
        else:
            super().before_first_read()

    def _copied(self, source: Any) -> tuple[Any, str]:
        by_index = () if hasattr(source.dataset, "load_state_dict") or is_stream(source.dataset) else (source.dataset,)
        return stateful_copy(source, (*private.shared_kinds(), *by_index))

    def reading(self, run: Run, iterator: Iterator[Any]) -> Callable[[], Any]:
        """Read each batch under its stream, if it is read in this process."""
        streams, advance = self._streams, iterator.__next__
        if streams is None or self.source.num_workers:
            return advance
        key = derive_key(Purpose.BATCH, run.seed, run.epoch)
        place, step = run.position + run.world.rank, run.world.world_size

        def read() -> Any:
            nonlocal place
            with streams as start:
                start(extend_key(key, place))
                batch = advance()
            place += step
            return batch

        return read
