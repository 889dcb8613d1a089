"""Where a loader stands."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Place"]


class Place(NamedTuple):
    """One place in the data; never changed, only replaced.

    Attributes:
        epoch: counted from 0.
        position: units of this epoch that all ranks together have been handed.
        detail: what a state carries besides these two, for sources whose place is more than a number; else empty.
    """

    epoch: int
    position: int
    detail: str = ""
