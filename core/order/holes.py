"""Positions of an epoch that are left out. The others are numbered: these numbers are *places*.

A `Share` divides places as it divides positions, and each place leads back to its position, whose index and random
stream it has. So nothing else knows of holes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import gcd
from operator import sub

__all__ = ["MOST_HOLES", "Holes", "parse_omit", "pieces_of", "text_of_omit"]

MOST_HOLES = 512
"""Intervals in a state, of all epochs and of what is finished together."""

LONGEST = 3584
"""Characters of all of them in a state."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
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

    def __contains__(self, position: int) -> bool:
        i = bisect_right(self.starts, position)
        return i > 0 and position < self.stops[i - 1]

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
        return ".".join(map(_base_36, [unit, *(step // unit for step in steps)]))

    @classmethod
    def parse(cls, text: str) -> Holes:
        """The intervals of a text."""
        unit, *steps = (int(number, 36) for number in text.split("."))
        ends = list(accumulate((unit * step for step in steps), initial=0))
        return cls(zip(ends[1::2], ends[2::2], strict=True))


def _base_36(number: int) -> str:
    text = ""
    while number:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text or "0"


def text_of_omit(skips: dict[int, Holes], epoch: int, done: Holes | None = None) -> str:
    """What an epoch and later ones leave out, as text: ``done:HOLES EPOCH:HOLES EPOCH:HOLES``; empty without holes.

    What is finished is written by places, so that a skip within it makes no more intervals of it.

    Args:
        skips: by epoch.
        epoch: of the state; those before it are left out.
        done: what is finished beyond the state's position.

    Raises:
        ValueError: there are too many intervals for a state.
    """
    skipped = skips.get(epoch, Holes())
    places = Holes((skipped.place_of(start), skipped.place_of(stop)) for start, stop in done or ())
    kept = {each: holes for each, holes in sorted(skips.items()) if each >= epoch}
    parts = {name: holes for name, holes in (("done", places), *kept.items()) if holes.total}
    text, count = " ".join(f"{each}:{holes.text()}" for each, holes in parts.items()), sum(map(len, parts.values()))
    if count > MOST_HOLES or len(text) > LONGEST:
        raise ValueError(f"{count} intervals in {len(text)} characters, and a state holds {MOST_HOLES} in {LONGEST}")
    return text


def parse_omit(text: str, epoch: int) -> tuple[dict[int, Holes], Holes]:
    """The skips by epoch, and what is finished. Raises ValueError unless `text_of_omit` has written it."""
    skips, places = dict[int, Holes](), Holes()
    for part in text.split():
        if (match := _PART.fullmatch(part)) is None:
            raise ValueError(f"{part!r:.40} is not EPOCH:INTERVALS")
        if match[1] == "done":
            places = Holes.parse(match[2])
        else:
            skips[int(match[1])] = Holes.parse(match[2])
    spans = skips.get(epoch, Holes()).spans
    done = Holes(span for place in places for span in spans(*place))
    if text_of_omit(skips, epoch, done) != text:
        raise ValueError(f"{text!r:.40} is not as midepoch writes it")
    return skips, done


def pieces_of(start: int, stop: int, places: int, holes: Holes, skipped: Holes) -> list[tuple[int, int]]:
    """The positions of the places [start, stop), as intervals; those beyond the last one repeat the epoch's first.

    Args:
        start, stop: as `Share.span` has them.
        places: of the epoch, without `holes`.
        holes: what is left out: `skipped`, and what is finished, which may be repeated.
        skipped: see above.
    """
    whole = places + holes.total - skipped.total
    repeats = [skipped.position_of(place % whole) for place in range(max(start - places, 0), stop - places)]
    return holes.spans(start, min(stop, places)) + [(position, position + 1) for position in repeats]
