"""Shards that are drawn with replacement: with weights, or so many of them in an epoch."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.order import EpochOrder, Windowed
from midepoch.order.keys import derive_key, derive_keys

__all__ = ["Drawn", "ShardDraws"]

# A constant for each use of a key, so that no two share one.
_DRAWN = int.from_bytes(b"drawn", "big")


class ShardDraws(NamedTuple):
    """How shards are drawn.

    Attributes:
        length: number of draws in one pass.
        weights: for each shard, 0 or more, with a sum above 0; None if all are equal.
    """

    length: int
    weights: tuple[float, ...] | None = None

    def numbers(self, shards: int, seed: int, passes: int, first: int, last: int) -> npt.NDArray[np.int64]:
        """The numbers of the shards at draws `first` to `last` of a pass, in [0, shards)."""
        keys = derive_keys(derive_key(_DRAWN, seed, passes), np.arange(first, last, dtype=np.int64))
        drawn = (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
        if self.weights is None:
            return (drawn * shards).astype(np.int64)
        reached = np.cumsum(self.weights)
        return np.searchsorted(reached / reached[-1], drawn, side="right").astype(np.int64)

    def among(self, kept: list[int]) -> ShardDraws:
        """The same draws where only some of the shards can be read, those with these numbers."""
        return self if self.weights is None else self._replace(weights=tuple(self.weights[number] for number in kept))

    def describe(self) -> str:
        """For the fingerprint: the number of draws, and a checksum of the weights."""
        if self.weights is None:
            return f"draws={self.length}"
        return f"draws={self.length},weights={zlib.crc32(np.array(self.weights, '<f8').tobytes()):08x}"


@dataclass(frozen=True)
class Drawn:
    """An order over shards that are drawn. A pass has as many samples as its draws give on average.

    So every pass is equally long, and a position follows by arithmetic. The last shard that is drawn is cut where the
    pass ends. Samples are shuffled as in `Windowed`.

    Attributes:
        counts: number of samples in each shard.
        draws: how they are drawn.
        window: shards that may be open at once.
        size: number of samples in a pass; 0 if no shard that can be drawn has any.
    """

    counts: tuple[int, ...]
    draws: ShardDraws
    window: int
    size: int = field(init=False)

    def __post_init__(self) -> None:
        weights = np.ones(len(self.counts)) if self.draws.weights is None else np.array(self.draws.weights)
        total = float(weights.sum())
        mean = float(weights @ np.array(self.counts, np.float64)) / total if total else 0.0
        object.__setattr__(self, "size", max(1, round(self.draws.length * mean)) if mean else 0)

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        """The order of one pass."""
        return _DrawnEpoch(self, seed, epoch)

    def describe(self) -> str:
        """Kind and parameters, for the fingerprint."""
        checksum = zlib.crc32(np.array(self.counts, "<i8").tobytes())
        return f"drawn(blocks={len(self.counts)}:{checksum:08x},{self.draws.describe()},window={self.window})"


class _DrawnEpoch:
    """One pass, as a `Windowed` order over the shards that were drawn, one after the other."""

    def __init__(self, order: Drawn, seed: int, epoch: int) -> None:
        counts = np.array(order.counts, np.int64)
        drawn, lengths = np.empty(0, np.int64), np.empty(0, np.int64)
        while lengths.sum() < order.size:
            more = order.draws.numbers(len(counts), seed, epoch, len(drawn), len(drawn) + max(order.draws.length, 64))
            drawn = np.append(drawn, more)
            lengths = counts[drawn]
        ends = np.cumsum(lengths)
        last = int(np.searchsorted(ends, order.size))
        self._begins = ends[: last + 1] - lengths[: last + 1]  # in the pass
        lengths = lengths[: last + 1]
        lengths[-1] = order.size - self._begins[-1]
        # What has to be added to a place of the pass to get the sample's number.
        self._shifts = (np.cumsum(counts) - counts)[drawn[: last + 1]] - self._begins
        self._within = Windowed(order.size, tuple(lengths.tolist()), order.window).epoch(seed, epoch)

    def __len__(self) -> int:
        return len(self._within)

    def __getitem__(self, positions: slice, /) -> npt.NDArray[np.int64]:
        places = self._within[positions]
        shifts: npt.NDArray[np.int64] = self._shifts[np.searchsorted(self._begins, places, side="right") - 1]
        return places + shifts
