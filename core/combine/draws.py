"""Weighted mixing: which part is drawn at each step, a function of seed, epoch and step."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from ..order.keys import derive_key, derive_keys
from ..randomness.streams import Purpose

__all__ = ["DRAWN_TOGETHER", "Draws", "Until"]

Until = Literal["all", "first", "cycle"]
"""What ends an epoch of weighted mixing."""

DRAWN_TOGETHER = 256  # steps drawn in one numpy call, which costs more than its work


class Draws:
    """The part drawn at each step of one epoch: a function of seed, epoch, step, weights, and which parts are left."""

    def __init__(self, seed: int, epoch: int, weights: list[float]) -> None:
        self._key, self._weights = derive_key(Purpose.MIXING, seed, epoch), weights

    def _drawn(self, first: int, count: int, alive: list[int]) -> npt.NDArray[np.int64]:
        """Indices into `alive`."""
        keys = derive_keys(self._key, np.arange(first, first + count))
        numbers = (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53
        bounds = np.cumsum([self._weights[number] for number in alive])
        places: npt.NDArray[np.int64] = np.searchsorted(bounds, numbers * bounds[-1], side="right")
        return np.minimum(places, len(alive) - 1)  # rounding may reach the upper end

    def block(self, first: int, alive: list[int]) -> list[int]:
        """The parts drawn at the steps from `first` on, out of those alive."""
        drawn: list[int] = np.array(alive)[self._drawn(first, DRAWN_TOGETHER, alive)].tolist()
        return drawn

    def steps_until(self, first: int, lefts: list[int], until: Until) -> int:
        """Steps until one part ("first"), or every part, has been drawn `lefts` times. Weights of 0 do not count."""
        alive = [number for number, weight in enumerate(self._weights) if weight]
        wanted = np.array(lefts)
        enough = np.any if until == "first" else np.all
        counts, step, length = np.zeros(len(alive), np.int64), first, DRAWN_TOGETHER
        while not enough(counts >= wanted):
            drawn = self._drawn(step, length, alive)
            more = counts + np.bincount(drawn, minlength=len(alive))
            if enough(more >= wanted):
                # It happens in this block: at the first or the last step at which a part has been drawn often enough.
                within = counts[:, np.newaxis] + np.cumsum(drawn == np.arange(len(alive))[:, np.newaxis], axis=1)
                return step + 1 + int(np.argmax(enough(within >= wanted[:, np.newaxis], axis=0))) - first
            counts, step, length = more, step + length, min(2 * length, 1 << 16)
        return 0
