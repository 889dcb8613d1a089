"""DataLoaders without worker processes over IterableDatasets that keep a state of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset

from midepoch.adapters.stateful.adapter import (
    NO_STREAMS,
    OF_THE_BATCH,
    StatefulAdapter,
    has_state,
    is_of,
    state_of,
)
from midepoch.errors import UnsupportedSourceError
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.order.keys import derive_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.exposed import RAW, exposed_samplers
from midepoch.reading.private import iterates_as_torch, pinning
from midepoch.reading.units import Units

__all__ = ["StreamAdapter"]


def _carries(source: Any) -> bool:
    """Whether a DataLoader's dataset is a stream that says its state and loads one, without further arguments."""
    if not iterates_as_torch(source) or not isinstance(source.dataset, IterableDataset):
        return False
    dataset: Any = source.dataset
    if not has_state(dataset) or hasattr(type(dataset), RAW) or is_of("datasets", dataset) or exposed_samplers(dataset):
        return False  # read by its samplers; or its state lacks what it holds back
    try:
        inspect.signature(dataset.state_dict).bind()
        inspect.signature(dataset.load_state_dict).bind({})
    except (TypeError, ValueError):
        return False
    return True


class StreamAdapter(StatefulAdapter):
    """Such a DataLoader. Its dataset's state is asked for when somebody asks."""

    name: ClassVar[str] = "stateful-stream"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self.opening = None  # see `start`
        self.streams = Streams(source.dataset, source.collate_fn) if options.streams else None
        self._beginning = Streams(source.dataset, source.collate_fn) if options.streams else None
        self._ended = False  # shown by a last batch that was not full; the state may then be that of a new pass

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Without workers."""
        return isinstance(source, DataLoader) and not source.num_workers and _carries(source)

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter | None:
        """None where midepoch is to share the stream."""
        return None if options.shard or (options.known_ranks > 1 and options.shard is None) else cls(source, options)

    def open(self, run: Run) -> Session:
        """Its batches. Several ranks are refused here if nobody knew of them when it was wrapped."""
        if run.world.world_size > 1 and self.options.shard is None:
            raise UnsupportedSourceError(
                f"{type(self.source.dataset).__name__} would be read by {run.world.world_size} ranks: pass shard=False "
                "if it divides its data by rank, or shard=True to let midepoch divide it"
            )
        return super().open(run)

    def drawing(self) -> tuple[object, ...]:
        """What the DataLoader calls."""
        return self.source.dataset, self.source.collate_fn

    def capabilities(self) -> Capabilities:
        """As the dataset's state, and what is drawn is the batch's."""
        exact = NO_STREAMS if self.streams is None else OF_THE_BATCH
        if exact and self._untried:
            exact = Capability(True, f"{exact.reason}, if no load of a state draws: {self._untried}", believed=True)
        return dataclasses.replace(super().capabilities(), exact_augmentations=exact)

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """The dataset's own iterator, after its state is loaded, in batches."""
        dataset = self.source.dataset
        if state is None and not self._used:
            self._first_state = state_of(dataset)
        elif state is None and run.epoch == 0:
            state = [self.very_beginning(), False]
        self._used, self._ended = True, False
        key = derive_key(Purpose.OPENING, run.seed, run.epoch, run.world.rank)
        with contextlib.nullcontext() if self._beginning is None else self._beginning.under(key):
            if state is not None:
                self.load(dataset, state[0], self._beginning)
                if state[1] and run.position:
                    self._ended = True
                    return iter(())
            return self._batches(iter(dataset))

    def _batches(self, samples: Iterator[Any]) -> Iterator[Any]:
        source, collate = self.source, pinning(self.source)
        stream, size = Units(samples), source.batch_size
        while size is None:
            try:
                unit = stream.next()
            except StopIteration:
                return
            yield collate(unit)
        while units := list(stream.take(size)):
            self._ended = len(units) < size
            if self._ended and source.drop_last:
                return
            yield collate(units)

    def told_epochs(self) -> list[Any]:
        """The dataset."""
        return [self.source.dataset]

    def current(self, iterator: Iterator[Any]) -> Any:
        """The dataset's state, and whether it has ended."""
        return self.source.dataset.state_dict(), self._ended
