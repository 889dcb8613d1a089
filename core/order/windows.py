"""An order for storage that reads neighbours faster: blocks are shuffled, then samples within windows of blocks.

Terms: a *place* is a sample's position in the sequence of shuffled blocks; a *slot* is a block's index in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from .epochs import ComputedEpoch, EpochOrder, Indices, checked_epoch, checked_integer, checked_size
from .keys import derive_key, derive_keys, extend_key
from .permutations import MAXIMUM_SORTED, permutation, sortable, sorted_by_key

__all__ = ["Windowed"]

# A constant for each kind of order, so that no two orders, nor a sample's random stream, ever share a key.
_WINDOWED = int.from_bytes(b"windowed", "big")


@dataclass(frozen=True)
class Windowed:
    """Shuffles for storage that reads neighbours faster: few blocks are open at any time.

    First the blocks are shuffled as wholes, in one sequence over the epoch. The sequence is then cut into
    half windows of ``max(1, window // 2)`` blocks, and the samples are shuffled twice: within each half
    window, and (if ``window > 1``) once more between the middles of neighbouring half windows. So a sample may
    move into either neighbouring half window. If all half windows are equally long, its new place is uniform
    between the middle of the previous one and the middle of the next one.

    At any time at most ``window`` blocks are open, that is, begun and not finished. Relative to the sequence of
    shuffled blocks, a sample moves by less than the length of its half window plus half the length of the
    neighbouring one that it moves into. With blocks of constant size and ``window > 1`` that is less than
    ``0.75 * window * block_size``.

    Start-up time and memory (a few megabytes at most) do not depend on ``size`` and ``window``. If blocks differ
    in size, there is also a table of all blocks.

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
        size = checked_size(self.size)
        object.__setattr__(self, "size", size)
        if isinstance(self.block_size, (tuple, list, np.ndarray)):
            sizes = tuple(checked_integer("block_size", each, least=0) for each in self.block_size)
            if sum(sizes) != size:
                told = f"the block sizes sum to {sum(sizes)}, but size is {size}"
                raise ValueError(f"{told}; give the size of every block")
            object.__setattr__(self, "block_size", sizes)
        else:
            object.__setattr__(self, "block_size", checked_integer("block_size", self.block_size, least=1))
        object.__setattr__(self, "window", checked_integer("window", self.window, least=1))

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        """The order of one epoch. Raises TypeError or ValueError if the seed or the epoch is invalid."""
        checked_epoch(seed, epoch)
        return _WindowedEpoch(self, derive_key(_WINDOWED, seed, epoch, self.size))

    def describe(self) -> str:
        """Kind and parameters, for the fingerprint; of variable block sizes their number and CRC32."""
        if isinstance(self.block_size, int):
            return f"windowed(block={self.block_size},window={self.window})"
        checksum = zlib.crc32(np.array(self.block_size, dtype="<i8").tobytes())
        return f"windowed(blocks={len(self.block_size)}:{checksum:08x},window={self.window})"


class _WindowedEpoch(ComputedEpoch):
    """The block shuffle and the two layers of window shuffles, from the position back to the sample."""

    def __init__(self, order: Windowed, key: int) -> None:
        # The windows between two positions are shuffled as wholes.
        super().__init__(order.size, reach=MAXIMUM_SORTED)
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

    def position_of(self, index: int) -> int:
        blocks, layers = self._build()
        place = blocks.place_of(index)
        for layer in reversed(layers):
            place = layer.position_of(place)
        return place

    def _build(self) -> tuple[_BlockSequence, list[_WindowLayer]]:
        key, window = self._key, self._order.window
        blocks: _BlockSequence
        if isinstance(self._order.block_size, int):
            blocks = _ConstantBlocks(self._order.size, self._order.block_size, extend_key(key, 0))
        else:
            blocks = _VariableBlocks(self._order.block_size, extend_key(key, 0))
        halves = _HalfWindows(blocks, max(1, window // 2))
        within = _WindowLayer(extend_key(key, 1), halves.window_of, halves.start_of)
        if window == 1:
            return blocks, [within]
        return blocks, [_WindowLayer(extend_key(key, 2), halves.shifted_of, halves.shifted_start_of), within]


class _ConstantBlocks:
    """Blocks of one size, the last of which may be shorter; constant memory."""

    def __init__(self, size: int, block_size: int, key: int) -> None:
        block_size = min(block_size, size)
        self.count = -(-size // block_size)
        self._block_size = block_size
        self._permutation = permutation(self.count, key)
        self._missing = self.count * block_size - size
        self._short_slot = self._permutation.position_of(self.count - 1)

    def starts(self, slots: Indices) -> Indices:
        """First places of slots in [0, count]; for slot ``count``, the number of samples."""
        return slots * self._block_size - self._missing * (slots > self._short_slot)

    def slots_at(self, places: Indices) -> Indices:
        """The slots that hold places."""
        slots = places // self._block_size
        # The short block moves all later ones forward, by less than one block.
        slots += places >= self.starts(slots + 1)
        return slots

    def samples_at(self, places: Indices) -> Indices:
        slots = self.slots_at(places)
        samples: Indices = self._permutation.at(slots) * self._block_size + (places - self.starts(slots))
        return samples

    def place_of(self, sample: int) -> int:
        block, offset = divmod(sample, self._block_size)
        return int(self.starts(np.array(self._permutation.position_of(block)))) + offset


class _VariableBlocks:
    """Blocks of any sizes, in two tables."""

    def __init__(self, sizes: tuple[int, ...], key: int) -> None:
        self.count = len(sizes)
        table = np.array(sizes, dtype=np.int64)
        blocks = permutation(self.count, key).at(np.arange(self.count, dtype=np.int64))
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

    def place_of(self, sample: int) -> int:
        offsets = sample - self._sample_starts
        slot = np.flatnonzero((offsets >= 0) & (offsets < np.diff(self._starts)))[0]
        return int(self._starts[slot] + offsets[slot])


_BlockSequence: TypeAlias = _ConstantBlocks | _VariableBlocks


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


_PlacesOf: TypeAlias = Callable[[Indices], Indices]


class _WindowLayer:
    """Shuffles places within each of the windows that they are cut into."""

    def __init__(self, key: int, window_of: _PlacesOf, start_of: _PlacesOf) -> None:
        self._key, self._window_of, self._start_of = key, window_of, start_of
        self._tables: dict[int, Indices] = {}

    def at(self, places: Indices) -> Indices:
        windows = self._window_of(places)
        first, last = int(windows.min()), int(windows.max())
        bounds = self._start_of(np.arange(first, last + 2, dtype=np.int64))
        if np.diff(bounds).max() > MAXIMUM_SORTED:
            return self._each(places, windows)
        shuffled = self._few(first, bounds) if last - first < 8 else self._many(first, bounds)
        result: Indices = shuffled[places - bounds[0]]
        return result

    def position_of(self, place: int) -> int:
        """Undoes ``at``: where a place comes from."""
        window = int(self._window_of(np.array([place]))[0])
        start, stop = map(int, self._start_of(np.array([window, window + 1])))
        return start + permutation(stop - start, extend_key(self._key, window)).position_of(place - start)

    def _each(self, places: Indices, windows: Indices) -> Indices:
        """Window by window: the long ones are computed and need no table."""
        result = np.empty_like(places)
        for window in np.unique(windows).tolist():
            start, stop = self._start_of(np.array([window, window + 1], dtype=np.int64)).tolist()
            chosen = np.flatnonzero(windows == window)
            result[chosen] = start + permutation(stop - start, extend_key(self._key, window)).at(places[chosen] - start)
        return result

    def _few(self, first: int, bounds: Indices) -> Indices:
        """The new places of all from ``bounds[0]`` to ``bounds[-1]``; windows are kept for the next call."""
        kept, tables = self._tables, {}
        for window, (start, stop) in enumerate(pairwise(bounds.tolist()), first):
            if window in kept:
                tables[window] = kept[window]
            else:
                tables[window] = start + sorted_by_key(extend_key(self._key, window), stop - start)
        self._tables = tables
        return np.concatenate(list(tables.values()))

    def _many(self, first: int, bounds: Indices) -> Indices:
        """As ``_few``, with all windows sorted together: by window, then as ``sorted_by_key`` does."""
        lengths = np.diff(bounds)
        places = np.arange(bounds[0], bounds[-1], dtype=np.int64)
        offsets = places - np.repeat(bounds[:-1], lengths)
        windows = np.arange(first, first + lengths.size, dtype=np.int64)
        keys = np.repeat(derive_keys(self._key, windows), lengths)
        by_key = np.argsort(sortable(keys, offsets))
        shuffled: Indices = places[by_key[np.argsort(np.repeat(windows, lengths)[by_key], kind="stable")]]
        return shuffled
