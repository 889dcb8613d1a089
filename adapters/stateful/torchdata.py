"""torchdata: StatefulDataLoader. The Loader of torchdata.nodes is refused, with what to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from midepoch.adapters.stateful import private
from midepoch.adapters.stateful.adapter import (
    NO_STREAMS,
    OF_THE_BATCH,
    StatefulAdapter,
    has_state,
    is_of,
    is_stream,
)
from midepoch.errors import UnsupportedSourceError
from midepoch.loader.adapter import Adapter, Options, Reach, Run
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.order.keys import TORCH_KEYS, derive_key
from midepoch.randomness.owned import find_generators
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.private import end_early_workers
from midepoch.samplers import length_of

__all__ = ["TorchdataAdapter"]


class TorchdataAdapter(StatefulAdapter):
    """torchdata's StatefulDataLoader.

    After a resume it starts the next epoch with another order, because it draws its sampler's seed from torch's global
    generator. It also does not restore what samples draw. So this adapter puts the start of each epoch under a random
    stream of its own, and each batch too if it is read in this process.
    """

    name: ClassVar[str] = "stateful-dataloader"
    how_to_divide = "Pass it a DistributedSampler, or a dataset that divides itself"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        batches = source.batch_sampler
        self._samplers = [source.sampler, batches, getattr(batches, "sampler", None)]
        self._beginning: Streams | None = None  # it and `streams` are made by `start`, under which they are used
        self.opening = None
        # A Hugging Face dataset is told of the epoch here too. Its beginning is known without reading.
        self._inside = source.dataset if is_of("datasets", source.dataset) and has_state(source.dataset) else None
        self._inside_first = None if self._inside is None else self._inside.state_dict()
        # Another dataset with a state of its own goes on from where it stands, so it has to be led back.
        # Its state is believed to restore its own generators.
        self._leaves_the_dataset = self._inside is None and has_state(source.dataset)
        self.reach = Reach.STATES if self._leaves_the_dataset else Reach.EPOCHS
        # What a shuffle buffer, or a worker process, has read ahead is not in the state of such a dataset.
        buffered = self._inside is not None and private.has_shuffle_buffer(self._inside) is not False
        self._reads_again = self._inside is not None and (buffered or private.has_workers(source))

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A StatefulDataLoader, or a Loader of torchdata.nodes."""
        return is_of("torchdata", source) and (isinstance(source, DataLoader) or hasattr(source, "root"))

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter:
        """A StatefulDataLoader."""
        if not isinstance(source, DataLoader):
            raise UnsupportedSourceError(
                "the state of a torchdata.nodes Loader has no generator, neither a sampler's nor those that its nodes "
                "draw from. Wrap a function that makes it, to have it read again from its start: "
                "midepoch.wrap(make_loader). If a Prefetcher reads a sampler that draws, pass that in the function "
                "generator=torch.Generator().manual_seed(random.getrandbits(31))"
            )
        return cls(source, options)

    def what_is_sent(self) -> Any:
        """The loader without its running iterator, which cannot be pickled: the loader's place says all."""
        return private.without_iterator(self.source)

    @property
    def divides(self) -> bool:
        """Whether its sampler or its dataset is for one rank of several."""
        return super().divides or (self._inside is not None and private.hugging_face_divides(self._inside))

    def drawing(self) -> tuple[object, ...]:
        """What the DataLoader calls."""
        return self.source.dataset, self.source.collate_fn

    def capabilities(self) -> Capabilities:
        """Those of torchdata, plus keyed streams where batches are read in this process."""
        stated, source = super().capabilities(), self.source
        order, listed = stated.exact_order, [] if source.num_workers or not self.options.streams else self._samplers
        at_once = [type(each).__name__ for each in _listed(listed) if not hasattr(each, "load_state_dict")]
        if source.num_workers and not getattr(source, "in_order", True):
            why = "in_order=False: torchdata's state counts what came, and not what that was: leave in_order out"
            order = Capability(False, why)
        elif at_once:
            why = f"{order.reason}; {at_once[0]} gives its whole order when an epoch begins"
            order = dataclasses.replace(order, reason=why)
        costs = "it skips through its sampler's list, or through its dataset"
        if self._reads_again:
            costs = "the dataset is read again from the epoch's start: its state lacks what is read ahead"
        return dataclasses.replace(
            stated,
            exact_order=order,
            exact_augmentations=self._augmentations(),
            constant_time_resume=Capability(False, costs),
        )

    def _augmentations(self) -> Capability:
        dataset = self.source.dataset
        if not self.options.streams:
            return NO_STREAMS
        if self.source.num_workers:
            plain = "a DataLoader with shard=False" if is_stream(dataset) else "a DataLoader"
            why = f"its workers' generators are not restored: wrap {plain} in its place"
            return Capability(False, f"{why}, or draw in then=, whose numbers are restored")
        if self._leaves_the_dataset and find_generators(dataset)[0]:
            why = "as exact as the dataset's own state, which is to restore its generators"
            return Capability(True, why, believed=True)
        return OF_THE_BATCH

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Start under the epoch's stream, which also seeds its own generators."""
        if self._beginning is None and self.options.streams:
            called = [self.source.collate_fn] if self._leaves_the_dataset else self.drawing()
            drawn_at_once = [] if self.source.num_workers else _listed(self._samplers)
            self._beginning = Streams(*called, *drawn_at_once)
            if not self.source.num_workers:  # whose batches are read in this process
                self.streams = Streams(*called)
        if state is not None and (self._reads_again or private.counts_only(state)):
            return self._read_again(run)
        if self._inside is not None and state is None:
            self._inside.load_state_dict(self._inside_first)
        end_early_workers(self.source)  # kept ones have the generators, and the dataset, of an earlier epoch
        return self._start_seeded(run, state)

    def told_epochs(self) -> list[Any]:
        """Samplers of the user's own, and a dataset that is only iterated."""
        streams = self._inside is None and is_stream(self.source.dataset)
        return [*private.own_samplers(self._samplers), *([self.source.dataset] if streams else [])]

    def tell_the_epoch(self, epoch: int) -> None:
        """Tell all that may be told: the loader that was wrapped is told in its place."""
        for each in (*self._samplers, self.source.dataset):
            if callable(tell := getattr(each, "set_epoch", None)):
                tell(epoch)

    def _start_seeded(self, run: Run, state: Any) -> Iterator[Any]:
        if self._beginning is None:
            return super().start(run, state)
        key = derive_key(Purpose.OPENING, run.seed, run.epoch, run.world.rank)
        with self._beginning as start:

            def seed() -> None:
                _seed_generators([self.source, *self._samplers], key)
                start(key)

            seed()
            iterator = super().start(run, state)
            if not self.source.num_workers:
                private.begin_sampler(iterator, seed)
        return iterator

    def _read_again(self, run: Run) -> Iterator[Any]:
        """Start the epoch, and read what was consumed.

        torchdata does the same for a dataset without a state, but counts it twice in the states that it gives later.
        """
        iterator = self.start(run, None)
        read = self.reading(dataclasses.replace(run, position=0), iterator)
        for _ in range(run.position // run.world.world_size):
            read()
        return iterator

    def current(self, iterator: Iterator[Any]) -> Any:
        """The loader's state; none where the epoch is read again from its start."""
        return {} if self._reads_again else super().current(iterator)


def _listed(samplers: list[Any]) -> list[Any]:
    """The user's own samplers whose order is drawn as a whole when an epoch begins: see `private.begin_sampler`."""
    return [each for each in private.own_samplers(samplers) if length_of(each) is not None]


def _seed_generators(holders: list[Any], key: int) -> None:
    """Seed the generator that a DataLoader or a sampler was given. Nothing else draws from it."""
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key & TORCH_KEYS)
