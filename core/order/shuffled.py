"""The dataset's own order, and one that shuffles all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .epochs import ComputedEpoch, EpochOrder, Indices, bounds, checked_epoch, checked_size
from .keys import derive_key
from .permutations import MAXIMUM_SORTED, Feistel, sortable, sorted_by_key

__all__ = ["Sequential", "Shuffled"]

# A constant for each kind of order, so that no two orders, nor a sample's random stream, ever share a key.
_SHUFFLED = int.from_bytes(b"shuffled", "big")


@dataclass(frozen=True)
class Sequential:
    """Sample p at position p, in every epoch.

    Attributes:
        size: number of samples, 0 to ``MAXIMUM_SIZE``.

    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", checked_size(self.size))

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        """The order of one epoch. Raises TypeError or ValueError if the seed or the epoch is invalid."""
        checked_epoch(seed, epoch)
        return _SequentialEpoch(self.size)

    def describe(self) -> str:
        """Kind and parameters, for the fingerprint."""
        return "sequential"


@dataclass(frozen=True)
class Shuffled:
    """Every sample once, in an order that looks random; another one in each epoch and for each seed.

    For up to 65536 samples, a table is built by sorting once per epoch. Above, each position is computed when it
    is asked for, so start-up time and memory are constant whatever the size.

    Attributes:
        size: number of samples, 0 to ``MAXIMUM_SIZE``.

    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", checked_size(self.size))

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        """The order of one epoch. Raises TypeError or ValueError if the seed or the epoch is invalid."""
        checked_epoch(seed, epoch)
        key = derive_key(_SHUFFLED, seed, epoch, self.size)
        return _SortedEpoch(self.size, key) if self.size <= MAXIMUM_SORTED else _FeistelEpoch(self.size, key)

    def describe(self) -> str:
        """Kind and parameters, for the fingerprint."""
        return "shuffled"


class _SequentialEpoch:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice, /) -> Indices:
        return np.arange(*bounds(positions, self._size), dtype=np.int64)

    def position_of(self, index: int) -> int:
        return index


class _SortedEpoch:
    """A shuffled order small enough for a table, which the first request builds."""

    def __init__(self, size: int, key: int) -> None:
        self._size, self._key = size, key
        self._table: Indices | None = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice, /) -> Indices:
        start, stop = bounds(positions, self._size)
        table = self._table
        if table is None:
            table = self._table = sorted_by_key(self._key, self._size)
        return table[start:stop]

    def position_of(self, index: int) -> int:
        words = sortable(self._key, np.arange(self._size, dtype=np.int64))
        return int(np.count_nonzero(words < words[index]))  # half the time of sorting them


class _FeistelEpoch(ComputedEpoch):
    """A shuffled order of any size."""

    def __init__(self, size: int, key: int) -> None:
        super().__init__(size, reach=size)
        self._permutation = Feistel(size, key)

    def _compute(self, positions: Indices) -> Indices:
        return self._permutation.at(positions)

    def position_of(self, index: int) -> int:
        return self._permutation.position_of(index)
