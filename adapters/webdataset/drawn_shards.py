"""Shards that are drawn with replacement: with weights, or so many of them in an epoch."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.order.keys import derive_key, derive_keys

__all__ = ["ShardDraws"]

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

    def describe(self) -> str:
        """For the fingerprint: the number of draws, and a checksum of the weights."""
        if self.weights is None:
            return f"draws={self.length}"
        return f"draws={self.length},weights={zlib.crc32(np.array(self.weights, '<f8').tobytes()):08x}"
