"""Where a loader stands."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Place"]


class Place(NamedTuple):
    """One place in the data. It is replaced, never changed.

    Attributes:
        epoch: counted from 0.
        position: units of this epoch that all ranks together have received.
        detail: the adapter's own part, if these two numbers are not enough to find the place; empty for most sources.
    """

    epoch: int
    position: int
    detail: str = ""
