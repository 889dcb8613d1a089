"""How an iterable is read: one `next` a unit, one more at the end, and none after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from midepoch.reading.units import Units


class BeginsAgain:
    """An iterator that gives its numbers anew when it is asked after its end, as some datasets do."""

    def __init__(self, count: int) -> None:
        self.count, self.given, self.asked = count, 0, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.asked += 1
        if self.given == self.count:
            self.given = 0
            raise StopIteration
        self.given += 1
        return self.given


def test_an_ended_iterator_is_not_asked_again() -> None:
    iterator = BeginsAgain(5)
    units = Units(iterator)
    assert list(units.take(3)) == [1, 2, 3] and list(units.take(3)) == [4, 5] and list(units.take(3)) == []
    with pytest.raises(StopIteration):
        units.next()
    assert (iterator.asked, units.read) == (6, 5)
