"""How an iterable is read, everywhere: as torch reads it, so that it gives what it gives by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..randomness.streams import Start, Streams
from .collating import draws_nothing

__all__ = ["UnitReader", "Units", "no_start"]


def no_start(key: int) -> None:
    """Leaves the generators as they are."""


class Units:
    """The units of one pass: one `next` for each, one more at the end, and none after StopIteration.

    An iterator that is its own iterable may begin anew if it is asked again after its end, or asked for its `iter`.

    Attributes:
        read: units so far.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self.read = 0

    def next(self) -> Any:
        """The next unit. Raises StopIteration at the end, each time, and what the iterator raises."""
        if self._iterator is None:
            raise StopIteration
        try:
            unit = next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise
        self.read += 1
        return unit

    def take(self, count: int, begin: Callable[[int], None] | None = None) -> Iterator[Any]:
        """The next units, `count` of them unless it ends. `begin` is called with the number of each before it is read.

        They are read as they are asked for.
        """
        for _ in range(count):
            if self._iterator is None:
                return
            if begin is not None:
                begin(self.read)
            try:
                unit = self.next()
            except StopIteration:
                return
            yield unit


class UnitReader:
    """Reads an iterable's units in batches, each unit and each batch under its own stream.

    Args:
        dataset: the iterable, which ``get_worker_info().dataset`` shows.
        collate: from a list of units, or from one if `single`, to a batch.
        single: units are handed out one by one.
        streams: False lets the source draw from the caller's generators.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], single: bool, streams: bool) -> None:
        self.dataset, self._collate, self._single = dataset, collate, single
        self._plain_collate = draws_nothing(collate)
        self._streams = Streams(dataset, collate) if streams else None
        self._opened: tuple[int, int, int] | None = None  # session, seed and epoch of the pass
        self._source = Units(iter(()))
        self._sample_key = 0

    def _under(self) -> contextlib.AbstractContextManager[Start]:
        """A context in which a stream begins with each key that is given."""
        return contextlib.nullcontext(no_start) if self._streams is None else self._streams

    def _collated(self, units: list[Any], key: int, start: Start) -> Any:
        if not self._plain_collate:
            start(key)
        return self._collate(units[0] if self._single else units)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens its own.
        return {**self.__dict__, "_opened": None, "_source": Units(iter(()))}
