"""Permutations of range(size), given by a 64-bit key: small ones are sorted, large ones computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .epochs import CHUNK, Indices
from .keys import derive_keys

__all__ = ["MAXIMUM_SORTED", "Feistel", "permutation", "sortable", "sorted_by_key"]

Words: TypeAlias = npt.NDArray[np.uint64]

MAXIMUM_SORTED = 1 << 16
"""Largest size that is sorted rather than computed."""

_OFFSET_MASK = np.uint64(MAXIMUM_SORTED - 1)


def permutation(size: int, key: int) -> Sorted | Feistel:
    """The permutation of range(size) that `key` stands for. It is read by `at`, and inverted by `position_of`."""
    return Sorted(size, key) if size <= MAXIMUM_SORTED else Feistel(size, key)


class Sorted:
    """Positions sorted by their keys: as uniform as the keys are, for any size up to 65536."""

    def __init__(self, size: int, key: int) -> None:
        self.table = sorted_by_key(key, size)

    def at(self, positions: Indices) -> Indices:
        return self.table[positions]

    def position_of(self, value: int) -> int:
        return int(np.flatnonzero(self.table == value)[0])


def sorted_by_key(key: int, size: int) -> Indices:
    """The permutation of range(size), size 65536 at most, that `key` stands for."""
    words = sortable(key, np.arange(size, dtype=np.int64))
    words.sort()
    words &= _OFFSET_MASK
    table = words.view(np.int64)
    table.setflags(write=False)
    return table


def sortable(key: int | Words, offsets: Indices) -> Words:
    """The keys of offsets below 65536, with the offsets in their low 16 bits. `key`: one for all, or one for each.

    So all words are distinct, and every sorting algorithm gives the same result. Also, sorting values is several
    times faster than argsort. Two positions have equal upper 48 bits about once in 2**17 epochs of the largest
    size.
    """
    words = derive_keys(key, offsets)
    words &= ~_OFFSET_MASK
    words |= offsets.view(np.uint64)
    return words


class Feistel:
    """A permutation computed at any position in constant time and memory.

    A position is written as ``high * columns + low`` with ``high`` in [0, rows), ``low`` in [0, columns),
    where ``columns`` is a power of two near the square root of the size and ``rows`` the least that
    suffices. Each round adds a keyed function of one part to the other: to ``high`` modulo ``rows``, to
    ``low`` by exclusive or. The few results at or beyond the size (fewer than ``columns`` in all) are
    mapped again until they are below it ("cycle-walking"; Black and Rogaway, "Ciphers with arbitrary finite
    domains", CT-RSA 2002).
    """

    ROUNDS = 8
    # At 65537 samples, the hardest size, samples whose positions differ by ``columns`` have visibly non-uniform
    # distances after 4 rounds. After 5 or more, no statistic over 2 * 10**7 pairs distinguished the order from a
    # random one. The three extra rounds are a safety margin and take a third of the time.

    def __init__(self, size: int, key: int) -> None:
        bits = (size - 1).bit_length() // 2
        self.size = np.uint64(size)
        self.low_bits = np.uint64(bits)
        self.low_mask = np.uint64((1 << bits) - 1)
        self.low_shift = np.uint64(64 - bits)
        self.rows = np.uint64(-(-size >> bits))
        words = derive_keys(key, np.arange(2 * self.ROUNDS))
        self.multipliers = words[: self.ROUNDS] | np.uint64(1)
        self.summands = words[self.ROUNDS :]

    def at(self, positions: Indices) -> Indices:
        """The values at positions in [0, size)."""
        return self._map(positions, self._forward)

    def position_of(self, value: int) -> int:
        """The position of a value in [0, size)."""
        return int(self._map(np.array([value], dtype=np.int64), self._backward)[0])

    def _map(self, positions: Indices, permute: Callable[[Words], None]) -> Indices:
        values = positions.astype(np.uint64)
        for first in range(0, values.size, CHUNK):
            chunk = values[first : first + CHUNK]
            permute(chunk)
            outside = np.flatnonzero(chunk >= self.size)
            while outside.size:
                again = chunk[outside]
                permute(again)
                chunk[outside] = again
                outside = outside[again >= self.size]
        return values.view(np.int64)

    def _forward(self, values: Words) -> None:
        """Permutes numbers in [0, rows * columns), in place."""
        high, low, scratch, other = self._split(values)
        for i in range(self.ROUNDS):
            # Positions that are read together differ in their low part, so that goes first.
            if i % 2 == 0:
                high += self._row_shift(i, low, scratch, other)
                np.subtract(high, self.rows, out=scratch)
                # Below zero wraps round to a huge number.
                np.minimum(high, scratch, out=high)
            else:
                low ^= self._column_flip(i, high, scratch, other)
        high <<= self.low_bits
        high |= low

    def _backward(self, values: Words) -> None:
        """Undoes ``_forward``, in place."""
        high, low, scratch, other = self._split(values)
        for i in reversed(range(self.ROUNDS)):
            if i % 2 == 0:
                high -= self._row_shift(i, low, scratch, other)
                np.add(high, self.rows, out=scratch)
                np.minimum(high, scratch, out=high)
            else:
                low ^= self._column_flip(i, high, scratch, other)
        high <<= self.low_bits
        high |= low

    def _split(self, values: Words) -> tuple[Words, Words, Words, Words]:
        low = values & self.low_mask
        values >>= self.low_bits
        return values, low, np.empty_like(values), np.empty_like(values)

    def _row_shift(self, i: int, low: Words, scratch: Words, other: Words) -> Words:
        """A function of ``low`` with values in [0, rows): 38 bits of hash, scaled."""
        self._hash(i, low, scratch, other)
        scratch >>= np.uint64(26)
        scratch *= self.rows
        scratch >>= np.uint64(38)
        return scratch

    def _column_flip(self, i: int, high: Words, scratch: Words, other: Words) -> Words:
        """A function of ``high`` with values in [0, columns): the topmost bits of a hash."""
        self._hash(i, high, scratch, other)
        scratch >>= self.low_shift
        return scratch

    def _hash(self, i: int, words: Words, scratch: Words, other: Words) -> None:
        """Leaves a keyed hash of ``words`` in ``scratch``. Use its upper bits, which are better mixed."""
        np.multiply(words, self.multipliers[i], out=scratch)
        scratch += self.summands[i]
        np.right_shift(scratch, np.uint64(32), out=other)
        scratch ^= other
        scratch *= np.uint64(0xD6E8FEB86659FD93)
