"""Orders: which sample is read at which position of an epoch, a pure function of size, seed and epoch.

Nothing is drawn and nothing is kept: any slice of any epoch can be asked for at any time, at the same cost,
so resuming in the middle of an epoch is a jump. Everything is fixed-width integer arithmetic on keys of
:mod:`midepoch.keys`; golden vectors in the tests pin each order, because saved positions mean nothing under
another.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .keys import derive_key, derive_keys

__all__ = ["MAXIMUM_SIZE", "EpochOrder", "Order", "Sequential", "Shuffled", "Windowed"]

MAXIMUM_SIZE = 10**15
"""Positions in an epoch at most. Beyond it the products in ``_Feistel`` would not fit into 64 bits."""

Indices: TypeAlias = npt.NDArray[np.int64]
_Words: TypeAlias = npt.NDArray[np.uint64]

# One for each use of a key, so that no two of them, nor a sample's random stream, ever share one.
_SHUFFLED = int.from_bytes(b"shuffled", "big")
_WINDOWED = int.from_bytes(b"windowed", "big")

_CHUNK = 8192
"""Positions computed together: enough to spread numpy's cost per call, few enough for a core's cache."""

_MAXIMUM_SORTED = 1 << 16
"""Largest size that is sorted rather than computed."""

_OFFSET_MASK = np.uint64(_MAXIMUM_SORTED - 1)


class EpochOrder(Protocol):
    """The order of one epoch: sample indices by position."""

    def __len__(self) -> int:
        """Positions in the epoch."""
        ...

    def __getitem__(self, positions: slice, /) -> npt.NDArray[np.int64]:
        """Sample indices at positions ``start:stop``, as a one-dimensional int64 array that may be read-only.

        Raises IndexError unless ``0 <= start <= stop <= len(self)`` (either may be left out), ValueError
        for a step other than 1, and TypeError for anything but a slice of integers.
        """
        ...


class Order(Protocol):
    """A recipe for the order of every epoch; holds no progress."""

    @property
    def size(self) -> int:
        """Positions in one epoch."""
        ...

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        """The order of epoch ``epoch`` (0 or more) under ``seed`` (any integer, taken modulo 2**64)."""
        ...

    def describe(self) -> str:
        """Kind and parameters; with the same size, equal only for orders that agree everywhere."""
        ...


@dataclass(frozen=True)
class Sequential:
    """Sample p at position p, in every epoch.

    Attributes:
        size: number of samples, 0 to ``MAXIMUM_SIZE``.

    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _checked_size(self.size))

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        """The order of one epoch. Raises TypeError or ValueError for a seed or epoch that is none."""
        _checked_epoch(seed, epoch)
        return _SequentialEpoch(self.size)

    def describe(self) -> str:
        """Kind and parameters, for the fingerprint."""
        return "sequential"


@dataclass(frozen=True)
class Shuffled:
    """Every sample once, in an order that looks random; another one in each epoch and for each seed.

    Up to 65536 samples the order is sorted out once per epoch. Above, each position is computed when it is
    asked for, so that start-up time and memory are constant whatever the size.

    Attributes:
        size: number of samples, 0 to ``MAXIMUM_SIZE``.

    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _checked_size(self.size))

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        """The order of one epoch. Raises TypeError or ValueError for a seed or epoch that is none."""
        _checked_epoch(seed, epoch)
        key = derive_key(_SHUFFLED, seed, epoch, self.size)
        return _SortedEpoch(self.size, key) if self.size <= _MAXIMUM_SORTED else _FeistelEpoch(self.size, key)

    def describe(self) -> str:
        """Kind and parameters, for the fingerprint."""
        return "shuffled"


@dataclass(frozen=True)
class Windowed:
    """Shuffles for storage that reads neighbours faster: few blocks are open at any time.

    First the blocks are shuffled as wholes, in one sequence over the epoch. The sequence is then cut into
    half windows of ``max(1, window // 2)`` blocks, and the samples are shuffled twice: within each half
    window, and (where ``window > 1``) once more between the middles of neighbouring half windows. So a
    sample may leave its half window on either side, and its new place is uniform over the stretch from the
    middle of the half window before to the middle of the one after, where the half windows have equal
    lengths.

    At any time at most ``window`` blocks are open, that is, begun and not finished. A sample moves, against
    the sequence of shuffled blocks, by fewer positions than its own half window has and half of the
    neighbouring one that it moves into. With blocks of constant size and ``window > 1`` that is fewer than
    ``0.75 * window * block_size``.

    Start-up time and memory (a few megabytes at most) do not depend on ``size`` and ``window``; where blocks
    differ in size there is also a table of all blocks.

    Attributes:
        size: number of samples, 0 to ``MAXIMUM_SIZE``.
        block_size: samples per block (the last one may be shorter), 1 or more; or the sizes of all blocks, in
            the order of the samples, each 0 or more, with the sum ``size`` (shards of a tar archive, say).
        window: blocks that may be open at once, 1 or more. With 1 samples stay in their block's place.

    """

    size: int
    block_size: int | tuple[int, ...]
    window: int

    def __post_init__(self) -> None:
        size = _checked_size(self.size)
        object.__setattr__(self, "size", size)
        if isinstance(self.block_size, (tuple, list, np.ndarray)):
            sizes = tuple(_checked_integer("block_size", each, least=0) for each in self.block_size)
            if sum(sizes) != size:
                raise ValueError(
                    f"the block sizes sum to {sum(sizes)}, but size is {size}; give the size of every block"
                )
            object.__setattr__(self, "block_size", sizes)
        else:
            object.__setattr__(self, "block_size", _checked_integer("block_size", self.block_size, least=1))
        object.__setattr__(self, "window", _checked_integer("window", self.window, least=1))

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        """The order of one epoch. Raises TypeError or ValueError for a seed or epoch that is none."""
        _checked_epoch(seed, epoch)
        return _WindowedEpoch(self, derive_key(_WINDOWED, seed, epoch, self.size))

    def describe(self) -> str:
        """Kind and parameters, for the fingerprint; of variable block sizes their number and CRC32."""
        if isinstance(self.block_size, int):
            return f"windowed(block={self.block_size},window={self.window})"
        checksum = zlib.crc32(np.array(self.block_size, dtype="<i8").tobytes())
        return f"windowed(blocks={len(self.block_size)}:{checksum:08x},window={self.window})"


# ----------------------------------------------------------------------------------------------------
# Arguments


def _checked_integer(name: str, value: object, least: int) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
    return int(value)


def _checked_size(value: object) -> int:
    size = _checked_integer("size", value, least=0)
    if size > MAXIMUM_SIZE:
        raise ValueError(f"size must be at most {MAXIMUM_SIZE}, got {size}")
    return size


def _checked_epoch(seed: object, epoch: object) -> None:
    _checked_integer("epoch", epoch, least=0)
    if isinstance(seed, (bool, np.bool_)) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an integer, got {seed!r} of type {type(seed).__name__}")


def _bounds(positions: object, size: int) -> tuple[int, int]:
    if not isinstance(positions, slice):
        raise TypeError(f"an order is read by slices such as order[p:p + 1], got {positions!r}")
    start, stop, step = positions.start, positions.stop, positions.step
    # The common case first: this is called for every batch.
    if type(start) is not int or type(stop) is not int or step is not None:
        if step is not None and step != 1:
            raise ValueError(f"an order is read in steps of 1, got {positions!r}; slice the result instead")
        start = 0 if start is None else _checked_position(start)
        stop = size if stop is None else _checked_position(stop)
    if 0 <= start <= stop <= size:
        return start, stop
    raise IndexError(f"positions {start}:{stop} are not within the {size} positions of the epoch")


def _checked_position(value: object) -> int:
    if isinstance(value, (int, np.integer)):
        return int(value)
    raise TypeError(f"positions must be integers, got {value!r} of type {type(value).__name__}")


# ----------------------------------------------------------------------------------------------------
# Permutations of range(size) under a 64-bit key


class _Permutation(Protocol):
    def at(self, positions: Indices) -> Indices:
        """The values at positions in [0, size)."""
        ...

    def position_of(self, value: int) -> int:
        """The position of a value in [0, size)."""
        ...


def _permutation(size: int, key: int) -> _Permutation:
    return _Sorted(size, key) if size <= _MAXIMUM_SORTED else _Feistel(size, key)


class _Sorted:
    """Positions sorted by their keys: as uniform as the keys are, for any size up to 65536."""

    def __init__(self, size: int, key: int) -> None:
        self.table = _sorted_by_key(key, 0, size)

    def at(self, positions: Indices) -> Indices:
        return self.table[positions]

    def position_of(self, value: int) -> int:
        return int(np.flatnonzero(self.table == value)[0])


def _sorted_by_key(key: int, first: int, size: int) -> Indices:
    """A permutation of range(size), size 65536 at most, from the keys of positions first to first + size."""
    offsets = np.arange(size, dtype=np.uint64)
    words = _sortable(key, np.arange(first, first + size, dtype=np.int64), offsets)
    words.sort()
    words &= _OFFSET_MASK
    table = words.view(np.int64)
    table.setflags(write=False)
    return table


def _sortable(key: int, positions: Indices, offsets: _Words) -> _Words:
    """Keys with the offsets, below 65536, in their low 16 bits.

    So they are distinct and every sorting algorithm gives the same result; also, sorting values is several
    times faster than argsort. The 48 bits left of two keys are equal once in 2**17 epochs of the largest
    size.
    """
    words = derive_keys(key, positions)
    words &= ~_OFFSET_MASK
    words |= offsets
    return words


class _Feistel:
    """A permutation computed at any position in constant time and memory.

    A position is written as ``high * columns + low`` with ``high`` in [0, rows), ``low`` in [0, columns),
    where ``columns`` is a power of two near the square root of the size and ``rows`` the least that
    suffices. Each round adds a keyed function of one part to the other: to ``high`` modulo ``rows``, to
    ``low`` by exclusive or. The few results at or beyond the size (fewer than ``columns`` in all) are
    mapped again until they are below it ("cycle-walking"; Black and Rogaway, "Ciphers with arbitrary finite
    domains", CT-RSA 2002).
    """

    ROUNDS = 8
    # At 65537 samples, the hardest size, 4 rounds leave the distance between samples whose positions differ
    # by ``columns`` far from uniform; with 5 and more, no statistic over 2 * 10**7 pairs told the order
    # from a random one. Three more cost a third of the time and are the margin.

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
        return self._map(positions, self._forward)

    def position_of(self, value: int) -> int:
        return int(self._map(np.array([value], dtype=np.int64), self._backward)[0])

    def _map(self, positions: Indices, permute: Callable[[_Words], None]) -> Indices:
        values = positions.astype(np.uint64)
        for first in range(0, values.size, _CHUNK):
            chunk = values[first : first + _CHUNK]
            permute(chunk)
            outside = np.flatnonzero(chunk >= self.size)
            while outside.size:
                again = chunk[outside]
                permute(again)
                chunk[outside] = again
                outside = outside[again >= self.size]
        return values.view(np.int64)

    def _forward(self, values: _Words) -> None:
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

    def _backward(self, values: _Words) -> None:
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

    def _split(self, values: _Words) -> tuple[_Words, _Words, _Words, _Words]:
        low = values & self.low_mask
        values >>= self.low_bits
        return values, low, np.empty_like(values), np.empty_like(values)

    def _row_shift(self, i: int, low: _Words, scratch: _Words, other: _Words) -> _Words:
        """A function of ``low`` with values in [0, rows): 38 bits of hash, scaled."""
        self._hash(i, low, scratch, other)
        scratch >>= np.uint64(26)
        scratch *= self.rows
        scratch >>= np.uint64(38)
        return scratch

    def _column_flip(self, i: int, high: _Words, scratch: _Words, other: _Words) -> _Words:
        """A function of ``high`` with values in [0, columns): the topmost bits of a hash."""
        self._hash(i, high, scratch, other)
        scratch >>= self.low_shift
        return scratch

    def _hash(self, i: int, words: _Words, scratch: _Words, other: _Words) -> None:
        """Leaves a keyed hash of ``words`` in ``scratch``; its upper bits are the good ones."""
        np.multiply(words, self.multipliers[i], out=scratch)
        scratch += self.summands[i]
        np.right_shift(scratch, np.uint64(32), out=other)
        scratch ^= other
        scratch *= np.uint64(0xD6E8FEB86659FD93)


# ----------------------------------------------------------------------------------------------------
# One epoch's order


class _SequentialEpoch:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice, /) -> Indices:
        return np.arange(*_bounds(positions, self._size), dtype=np.int64)


class _SortedEpoch:
    """A shuffled order small enough to be sorted, which the first request does."""

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._key = key
        self._table: Indices | None = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice, /) -> Indices:
        start, stop = _bounds(positions, self._size)
        table = self._table
        if table is None:
            table = self._table = _sorted_by_key(self._key, 0, self._size)
        return table[start:stop]


class _Ahead(NamedTuple):
    """Values computed for one request and for those expected to follow it."""

    start: int
    stride: int
    """From one row of values to the next. Requests that touch share one row."""
    values: Indices
    """[rows, positions in a row]"""
    length: int
    """Positions in a request."""
    step: int
    """From one request to the next."""
    requests: int
    """Requests expected, the one made included."""


class _ComputedEpoch:
    """Computes ahead of requests that follow one another: a call of numpy costs as much as many values.

    Requests may follow at a distance: a rank asks for its part of each global batch.
    """

    def __init__(self, size: int, reach: int) -> None:
        self._size = size
        self._reach = reach  # greatest distance between positions computed together
        # Replaced as a whole and never changed, so that threads may share the order.
        self._ahead = _Ahead(0, 1, np.empty((0, 0), dtype=np.int64), length=0, step=1, requests=0)

    def _compute(self, positions: Indices) -> Indices:
        """The values at increasing positions of the epoch, ``_CHUNK`` at most."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice, /) -> Indices:
        start, stop = _bounds(positions, self._size)
        first, stride, values, _, _, _ = self._ahead
        row, column = divmod(start - first, stride)
        end = column + stop - start
        rows, columns = values.shape
        if 0 <= row < rows and end <= columns:
            return values[row, column:end]
        if stop - start > _CHUNK:
            return self._compute_range(start, stop)
        if start == stop:
            return np.empty(0, dtype=np.int64)
        self._ahead = self._compute_ahead(self._ahead, start, stop - start)
        return self._ahead.values[0, : stop - start]

    def _compute_range(self, start: int, stop: int) -> Indices:
        result = np.empty(stop - start, dtype=np.int64)
        for first in range(start, stop, _CHUNK):
            last = min(first + _CHUNK, stop)
            result[first - start : last - start] = self._compute(np.arange(first, last, dtype=np.int64))
        return result

    def _compute_ahead(self, last: _Ahead, start: int, length: int) -> _Ahead:
        step, count = self._expect(last, start, length)
        if step == length:
            stop = min(start + count * length, self._size)
            values = self._compute(np.arange(start, stop, dtype=np.int64)).reshape(1, stop - start)
            stride = stop - start
        else:
            requests = start + step * np.arange(count, dtype=np.int64)
            positions = requests[:, np.newaxis] + np.arange(length, dtype=np.int64)
            values = self._compute(positions.ravel()).reshape(count, length)
            stride = step
        values.setflags(write=False)
        return _Ahead(start, stride, values, length, step, count)

    def _expect(self, last: _Ahead, start: int, length: int) -> tuple[int, int]:
        """From one request to the next, and how many to expect: ever more as long as they do come."""
        distance = start - last.start
        if distance == last.step * last.requests and (length == last.length or last.step == last.length):
            step = length if last.step == last.length else last.step
            count = max(1, min(8 * last.requests * last.length, _CHUNK) // length)
        else:
            step = distance if last.length == length < distance else length
            count = 1
        if step > length:
            within = min(self._size - start - length, self._reach)
            count = min(count, within // step + 1)
        return step, count


class _FeistelEpoch(_ComputedEpoch):
    """A shuffled order of any size."""

    def __init__(self, size: int, key: int) -> None:
        super().__init__(size, reach=size)
        self._permutation = _Feistel(size, key)

    def _compute(self, positions: Indices) -> Indices:
        return self._permutation.at(positions)


class _WindowedEpoch(_ComputedEpoch):
    """The block shuffle and the two layers of window shuffles, from the position back to the sample."""

    def __init__(self, order: Windowed, key: int) -> None:
        # The windows between two positions are shuffled as wholes.
        super().__init__(order.size, reach=_MAXIMUM_SORTED)
        self._order = order
        self._key = key
        self._layers: tuple[_BlockSequence, list[_WindowLayer]] | None = None

    def _compute(self, positions: Indices) -> Indices:
        if self._layers is None:
            self._layers = self._build()
        blocks, layers = self._layers
        places = positions
        for layer in layers:
            places = layer.at(places)
        return blocks.samples_at(places)

    def _build(self) -> tuple[_BlockSequence, list[_WindowLayer]]:
        key, window = self._key, self._order.window
        blocks: _BlockSequence
        if isinstance(self._order.block_size, int):
            blocks = _ConstantBlocks(self._order.size, self._order.block_size, derive_key(key, 0))
        else:
            blocks = _VariableBlocks(self._order.block_size, derive_key(key, 0))
        halves = _HalfWindows(blocks, max(1, window // 2))
        within = _WindowLayer(derive_key(key, 1), halves.window_of, halves.start_of)
        if window == 1:
            return blocks, [within]
        return blocks, [_WindowLayer(derive_key(key, 2), halves.shifted_of, halves.shifted_start_of), within]


# ----------------------------------------------------------------------------------------------------
# The parts of a windowed order. A place is a position in the sequence of shuffled blocks; a slot, a block's
# number in that sequence.


class _BlockSequence(Protocol):
    count: int

    def starts(self, slots: Indices) -> Indices:
        """First places of slots in [0, count]; that of slot ``count`` is the number of samples."""
        ...

    def slots_at(self, places: Indices) -> Indices:
        """The slots that hold places."""
        ...

    def samples_at(self, places: Indices) -> Indices:
        """The samples at places."""
        ...


class _ConstantBlocks:
    """Blocks of one size, the last of which may be shorter; constant memory."""

    def __init__(self, size: int, block_size: int, key: int) -> None:
        block_size = min(block_size, size)
        self.count = -(-size // block_size)
        self._block_size = block_size
        self._permutation = _permutation(self.count, key)
        self._missing = self.count * block_size - size
        self._short_slot = self._permutation.position_of(self.count - 1)

    def starts(self, slots: Indices) -> Indices:
        return slots * self._block_size - self._missing * (slots > self._short_slot)

    def slots_at(self, places: Indices) -> Indices:
        slots = places // self._block_size
        # The short block moves all later ones forward, by less than one block.
        slots += places >= self.starts(slots + 1)
        return slots

    def samples_at(self, places: Indices) -> Indices:
        slots = self.slots_at(places)
        samples: Indices = self._permutation.at(slots) * self._block_size + (places - self.starts(slots))
        return samples


class _VariableBlocks:
    """Blocks of any sizes, in two tables."""

    def __init__(self, sizes: tuple[int, ...], key: int) -> None:
        self.count = len(sizes)
        table = np.array(sizes, dtype=np.int64)
        blocks = _permutation(self.count, key).at(np.arange(self.count, dtype=np.int64))
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(table[blocks])])
        self._sample_starts = (np.cumsum(table) - table)[blocks]

    def starts(self, slots: Indices) -> Indices:
        places: Indices = self._starts[slots]
        return places

    def slots_at(self, places: Indices) -> Indices:
        slots: Indices = np.searchsorted(self._starts, places, side="right") - 1
        return slots

    def samples_at(self, places: Indices) -> Indices:
        slots = self.slots_at(places)
        samples: Indices = self._sample_starts[slots] + (places - self._starts[slots])
        return samples


class _HalfWindows:
    """Half windows of ``width`` slots each, and the shifted ones between their middles.

    Shifted window k is the second half of half window k - 1 and the first half of half window k.
    """

    def __init__(self, blocks: _BlockSequence, width: int) -> None:
        self._blocks = blocks
        self._width = min(width, blocks.count)

    def window_of(self, places: Indices) -> Indices:
        return self._blocks.slots_at(places) // self._width

    def start_of(self, windows: Indices) -> Indices:
        """First places of half windows; any number beyond the last gives the number of samples."""
        return self._blocks.starts(np.clip(windows * self._width, 0, self._blocks.count))

    def shifted_of(self, places: Indices) -> Indices:
        windows = self.window_of(places)
        windows += places >= self.shifted_start_of(windows + 1)
        return windows

    def shifted_start_of(self, windows: Indices) -> Indices:
        """First places of shifted windows: the middles of half windows, and the ends of the sequence."""
        return (self.start_of(windows - 1) + self.start_of(windows)) // 2


class _WindowLayer:
    """Shuffles places within each of the windows that they are cut into."""

    def __init__(
        self, key: int, window_of: Callable[[Indices], Indices], start_of: Callable[[Indices], Indices]
    ) -> None:
        self._key = key
        self._window_of = window_of
        self._start_of = start_of
        self._tables: dict[int, Indices] = {}

    def at(self, places: Indices) -> Indices:
        windows = self._window_of(places)
        first, last = int(windows.min()), int(windows.max())
        bounds = self._start_of(np.arange(first, last + 2, dtype=np.int64))
        if np.diff(bounds).max() > _MAXIMUM_SORTED:
            return self._each(places, windows)
        if last - first < 8:
            shuffled = self._few(first, bounds)
        else:
            shuffled = self._many(bounds)
        result: Indices = shuffled[places - bounds[0]]
        return result

    def _each(self, places: Indices, windows: Indices) -> Indices:
        """Window by window: the long ones are computed and need no table."""
        result = np.empty_like(places)
        for window in np.unique(windows).tolist():
            start, stop = self._start_of(np.array([window, window + 1], dtype=np.int64)).tolist()
            chosen = np.flatnonzero(windows == window)
            if stop - start > _MAXIMUM_SORTED:
                values = _Feistel(stop - start, derive_key(self._key, window)).at(places[chosen] - start)
            else:
                values = _sorted_by_key(self._key, start, stop - start)[places[chosen] - start]
            result[chosen] = start + values
        return result

    def _few(self, first: int, bounds: Indices) -> Indices:
        """The new places of all from ``bounds[0]`` to ``bounds[-1]``; windows are kept for the next call."""
        kept, tables = self._tables, {}
        for window, (start, stop) in enumerate(pairwise(bounds.tolist()), first):
            if window in kept:
                tables[window] = kept[window]
            else:
                tables[window] = start + _sorted_by_key(self._key, start, stop - start)
        self._tables = tables
        return np.concatenate(list(tables.values()))

    def _many(self, bounds: Indices) -> Indices:
        """As ``_few``, with all windows sorted together: by window, then as ``_sorted_by_key`` does."""
        lengths = np.diff(bounds)
        places = np.arange(bounds[0], bounds[-1], dtype=np.int64)
        offsets = (places - np.repeat(bounds[:-1], lengths)).astype(np.uint64)
        windows = np.repeat(np.arange(lengths.size, dtype=np.int64), lengths)
        by_key = np.argsort(_sortable(self._key, places, offsets))
        shuffled: Indices = places[by_key[np.argsort(windows[by_key], kind="stable")]]
        return shuffled
