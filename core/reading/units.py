"""How an iterable is read, everywhere: as torch reads it, so that it gives what it gives by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Units"]


class Units:
    """The units of one pass: one `next` for each, one more at the end, and none after StopIteration.

    An iterator that is its own iterable may begin anew if it is asked again after its end, or asked for its `iter`.

    Attributes:
        read: units so far, those that were read before `iterator` was made included.
    """

    def __init__(self, iterator: Iterator[Any], read: int = 0) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self.read = read

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
