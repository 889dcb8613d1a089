"""Positions of an epoch that are left out. The others are numbered: these numbers are *places*.

A `Share` divides places as it divides positions, and each place leads back to its position, whose index and random
stream it has. So nothing else knows of holes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import gcd
from operator import sub

import numpy as np

from ..errors import StateCorruptError, StateError

__all__ = ["MOST_HOLES", "NO_HOLES", "Holes", "Omit", "pieces_of"]

MOST_HOLES = 512
"""Intervals in a state, of all epochs and of what is finished together."""

_LONGEST = 3584  # characters of all of them in a state
_PART = re.compile(r"(done|\d{1,19}):([0-9a-z]{1,12}(?:\.[0-9a-z]{1,12}\.[0-9a-z]{1,12})+)")


class Holes:
    """Sorted, disjoint intervals of positions that do not touch. Frozen; made of any intervals, in any order."""

    __slots__ = ("_before", "_places", "starts", "stops", "total")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self.starts, self.stops = list[int](), list[int]()
        for start, stop in sorted(each for each in intervals if each[0] < each[1]):
            if self.stops and start <= self.stops[-1]:
                self.stops[-1] = max(stop, self.stops[-1])
            else:
                self.starts.append(start)
                self.stops.append(stop)
        # Positions left out before each interval, and places before each, which increase strictly.
        self._before: list[int] = [0, *accumulate(map(sub, self.stops, self.starts))]
        self._places: list[int] = list(map(sub, self.starts, self._before))
        self.total = self._before[-1]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.stops, strict=True)

    def __len__(self) -> int:
        return len(self.starts)

    def position_of(self, place: int) -> int:
        """The position of a place."""
        return place + self._before[bisect_right(self._places, place)]

    def place_of(self, position: int) -> int:
        """How many places lie before a position."""
        i = bisect_right(self.starts, position)
        inside = max(0, self.stops[i - 1] - position) if i else 0
        return position - self._before[i] + inside

    def spans(self, first: int, last: int) -> list[tuple[int, int]]:
        """The positions of the places [first, last), as intervals."""
        i, found, places = bisect_right(self._places, first), [], self._places
        while first < last:
            until = min(last, places[i]) if i < len(places) else last
            found.append((first + self._before[i], until + self._before[i]))
            first, i = until, i + 1
        return found

    def text(self) -> str:
        """A unit; then, in units, the distance of each interval from the end of the one before, and its length."""
        ends = [0, *(end for interval in self for end in interval)]
        steps = list(map(sub, ends[1:], ends))
        unit = gcd(*steps) or 1
        return ".".join(np.base_repr(number, 36).lower() for number in [unit, *(step // unit for step in steps)])

    @classmethod
    def parse(cls, text: str) -> Holes:
        """The intervals of a text."""
        unit, *steps = (int(number, 36) for number in text.split("."))
        ends = list(accumulate((unit * step for step in steps), initial=0))
        return cls(zip(ends[1::2], ends[2::2], strict=True))


NO_HOLES = Holes()


@dataclass(frozen=True)
class Omit:
    """What epochs leave out.

    Attributes:
        skips: what was skipped, by epoch.
        done: what is finished beyond the position of a state, by epoch: its own.
    """

    skips: Mapping[int, Holes] = field(default_factory=dict)
    done: Mapping[int, Holes] = field(default_factory=dict)

    def of(self, epoch: int) -> Holes:
        """What an epoch leaves out."""
        skipped, done = self.skips.get(epoch, NO_HOLES), self.done.get(epoch)
        return skipped if done is None else Holes([*skipped, *done])

    def with_skip(self, start: int, stop: int, epoch: int, now: int, size: int | None) -> Omit:
        """The same, less positions [start, stop) of an epoch.

        Args:
            start, stop, epoch: what to leave out.
            now: the first epoch that has not ended.
            size: positions in an epoch; None if it has no end.

        Raises:
            ValueError: the range is empty or reversed, beyond the epoch, or in an epoch that has ended.
        """
        if not 0 <= start < stop or (size is not None and stop > size):
            raise ValueError(f"skip({start}, {stop}): give a range of at least one position, within [0, {size}]")
        if not now <= epoch < 1 << 62:  # a state has no room for others
            raise ValueError(f"skip: epoch {epoch} has ended, or is never reached: name epoch {now} or a later one")
        return replace(self, skips={**self.skips, epoch: Holes([*self.skips.get(epoch, ()), (start, stop)])})

    def text(self, epoch: int, position: int = 0) -> str:
        """Of a state at a place: ``done:HOLES EPOCH:HOLES EPOCH:HOLES``; empty without holes.

        What is finished is written by places, so that a skip within it makes no more intervals of it.

        Raises:
            StateError: there are too many intervals for a state.
        """
        if not (self.skips or self.done):
            return ""
        place_of = self.skips.get(epoch, NO_HOLES).place_of
        done = Holes((place_of(max(start, position)), place_of(stop)) for start, stop in self.done.get(epoch, ()))
        kept = {str(each): holes for each, holes in sorted(self.skips.items()) if each >= epoch}
        parts = {name: holes for name, holes in {"done": done, **kept}.items() if holes}
        text, count = " ".join(f"{name}:{holes.text()}" for name, holes in parts.items()), sum(map(len, parts.values()))
        if count > MOST_HOLES or len(text) > _LONGEST:
            raise StateError(
                f"{count} intervals in {len(text)} characters, and a state holds {MOST_HOLES} in {_LONGEST}: skip "
                "fewer, longer ranges, or finish the oldest batches first"
            )
        return text

    @classmethod
    def parse(cls, text: str, epoch: int, position: int = 0, size: int | None = None) -> Omit:
        """What a state at a place has as text. `size`: of the epoch, if known. Raises StateError unless it fits."""
        parts = [_PART.fullmatch(part) for part in text.split()]
        holes = {match[1]: Holes.parse(match[2]) for match in parts if match is not None}
        places = holes.pop("done", NO_HOLES)
        skips = {int(each): kept for each, kept in holes.items()}
        spans = skips.get(epoch, NO_HOLES).spans
        done = Holes(span for place in places for span in spans(*place))
        omit = cls(skips, {epoch: done} if done else {})
        if omit.text(epoch, position) != text or (size is not None and max(omit.of(epoch).stops, default=0) > size):
            raise StateCorruptError(f"omit is damaged ({text!r:.40}, at {position} of {size}): use another state")
        return omit


def pieces_of(start: int, stop: int, places: int, holes: Holes, skipped: Holes) -> list[tuple[int, int]]:
    """The positions of the places [start, stop) of an epoch with so many, as intervals.

    Places beyond the last one repeat the epoch's first. They are not `skipped`, but may be finished: other `holes`.
    """
    whole = places + holes.total - skipped.total
    repeats = [skipped.position_of(place % whole) for place in range(max(start - places, 0), stop - places)]
    return holes.spans(start, min(stop, places)) + [(position, position + 1) for position in repeats]
