"""An order without an end: rounds over all samples, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .epochs import MAXIMUM_SIZE, EpochOrder, Indices, bounds, checked_epoch
from .keys import derive_key
from .shuffled import Sequential, Shuffled

__all__ = ["Endless"]

_ENDLESS = int.from_bytes(b"endless", "big")


@dataclass(frozen=True)
class Endless:
    """Round r of an epoch is an epoch of `round`: every sample once. A position may lie anywhere up to `size`.

    Attributes:
        round: the order of one round, of at least one sample.

    """

    round: Sequential | Shuffled

    def __post_init__(self) -> None:
        if not self.round.size:
            raise ValueError("a round must have at least one sample, got none")

    @property
    def size(self) -> int:
        """More positions than any run reaches."""
        return MAXIMUM_SIZE

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        """The rounds of one epoch. Raises TypeError or ValueError if the seed or the epoch is invalid."""
        return _EndlessEpoch(self.round, self.key(seed, epoch))

    def key(self, seed: int, epoch: int) -> int:
        """The seed of an epoch's rounds. Raises as `epoch`."""
        checked_epoch(seed, epoch)
        return derive_key(_ENDLESS, seed, epoch)

    def describe(self) -> str:
        """Kind and parameters, for the fingerprint. With the size of a round, because no state has it."""
        return f"endless {self.round.describe()} of {self.round.size}"


class _EndlessEpoch:
    def __init__(self, order: Sequential | Shuffled, key: int) -> None:
        self._order, self._key = order, key
        self._round = 0, order.epoch(key, 0)  # the one that was read last; replaced as a whole

    def __len__(self) -> int:
        return MAXIMUM_SIZE

    def __getitem__(self, positions: slice, /) -> Indices:
        start, stop = bounds(positions, MAXIMUM_SIZE)
        size, parts = self._order.size, []
        while start < stop:
            number, place = divmod(start, size)
            until = min(place + stop - start, size)
            if self._round[0] != number:
                self._round = number, self._order.epoch(self._key, number)
            parts.append(self._round[1][place:until])
            start += until - place
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
