"""64-bit keys: from (seed, epoch, position) to the number that starts a random stream or an order.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) with its published
constants. It is written out here rather than taken from a library because orders and streams must never change with
somebody else's release: the tests pin golden vectors.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["TORCH_KEYS", "derive_key", "derive_keys", "extend_key", "extend_keys", "mix"]

TORCH_KEYS = (1 << 63) - 1
"""A mask for keys that a torch generator is seeded with: code may collate what ``initial_seed()`` returns to an int64.

Generators of the CPU draw the same numbers without the highest bit: they use the lower 32. Those of devices use all 64
bits, so they get whole keys.
"""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def mix(value: int) -> int:
    """SplitMix64's output function: a bijection of the integers in [0, 2**64)."""
    return extend_key(value - _GAMMA, 0)


def extend_key(key: int, *words: int) -> int:
    """``derive_key(*before, *words)`` where ``key == derive_key(*before)``."""
    for word in words:
        key = (key + (word + 1) * _GAMMA) & _MASK
        key = ((key ^ (key >> 30)) * _MULTIPLIER_1) & _MASK
        key = ((key ^ (key >> 27)) * _MULTIPLIER_2) & _MASK
        key ^= key >> 31
    return key


derive_key = functools.partial(extend_key, 0)
"""``derive_key(*words)``: one 64-bit key from any number of integers, each taken modulo 2**64.

For fixed other words it is a bijection of each word, so two epochs of one seed never share a key.
"""


def derive_keys(key: int | npt.NDArray[np.uint64], positions: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """``[derive_key(*words, p) for p in positions]`` where ``key == derive_key(*words)``, as uint64 of the same shape.

    An array of keys has one for each of the positions. Distinct positions give distinct keys.
    """
    keys = positions.astype(np.uint64, order="C")
    keys += np.uint64(1)
    keys *= np.uint64(_GAMMA)
    keys += np.uint64(key) if isinstance(key, int) else key
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(_MULTIPLIER_1)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(_MULTIPLIER_2)
    keys ^= keys >> np.uint64(31)
    return keys


def extend_keys(keys: npt.NDArray[np.uint64], words: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """``[[extend_key(key, word) for word in words] for key in keys]`` as uint64 of shape (len(keys), len(words))."""
    return derive_keys(keys[:, np.newaxis], np.broadcast_to(words, (len(keys), len(words))))
