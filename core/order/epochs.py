"""What an order is: a pure function from the positions of an epoch to sample indices, read by slices."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["CHUNK", "MAXIMUM_SIZE", "ComputedEpoch", "EpochOrder", "Indices", "Order", "bounds", "checked_epoch",
           "checked_integer", "checked_size"]  # fmt: skip

MAXIMUM_SIZE = 10**15
"""Positions in an epoch at most. Beyond it the products in ``permutations.Feistel`` would not fit into 64 bits."""

Indices: TypeAlias = npt.NDArray[np.int64]

CHUNK = 8192
"""Positions computed together: enough to spread numpy's cost per call, few enough for a core's cache."""


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


def checked_integer(name: str, value: object, least: int) -> int:
    """`value` as an int; TypeError or ValueError unless it is an integer of at least `least`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
    return int(value)


def checked_size(value: object) -> int:
    """`value` as a number of positions; TypeError or ValueError if it is not a valid one."""
    size = checked_integer("size", value, least=0)
    if size > MAXIMUM_SIZE:
        raise ValueError(f"size must be at most {MAXIMUM_SIZE}, got {size}")
    return size


def checked_epoch(seed: object, epoch: object) -> None:
    """Raise TypeError or ValueError if the seed or the epoch is invalid."""
    for name, value in (("epoch", epoch), ("seed", seed)):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
        if name == "epoch" and value < 0:
            raise ValueError(f"epoch must be 0 or more, got {value}")


def bounds(positions: object, size: int) -> tuple[int, int]:
    """Start and stop of a slice of ``range(size)``; raises as `EpochOrder.__getitem__` says."""
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


class _Ahead(NamedTuple):
    """Values computed for one request and for those expected to follow it."""

    start: int
    stride: int  # from one row of values to the next; requests that touch share one row
    values: Indices  # [rows, positions in a row]
    length: int  # positions in a request
    step: int  # from one request to the next
    requests: int  # expected, including the current one


class ComputedEpoch:
    """Computes values ahead for consecutive requests, because one numpy call costs as much as computing many values.

    Requests may be strided: a rank asks for its part of each global batch.
    """

    def __init__(self, size: int, reach: int) -> None:
        self._size = size
        self._reach = reach  # greatest distance between positions computed together
        # Replaced as a whole and never changed, so that threads may share the order.
        self._ahead = _Ahead(0, 1, np.empty((0, 0), dtype=np.int64), length=0, step=1, requests=0)

    def _compute(self, positions: Indices) -> Indices:
        """The values at increasing positions of the epoch, ``CHUNK`` at most."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice, /) -> Indices:
        start, stop = bounds(positions, self._size)
        first, stride, values, _, _, _ = self._ahead
        row, column = divmod(start - first, stride)
        end = column + stop - start
        rows, columns = values.shape
        if 0 <= row < rows and end <= columns:
            return values[row, column:end]
        if stop - start > CHUNK:
            return self._compute_range(start, stop)
        if start == stop:
            return np.empty(0, dtype=np.int64)
        self._ahead = self._compute_ahead(self._ahead, start, stop - start)
        return self._ahead.values[0, : stop - start]

    def _compute_range(self, start: int, stop: int) -> Indices:
        result = np.empty(stop - start, dtype=np.int64)
        for first in range(start, stop, CHUNK):
            last = min(first + CHUNK, stop)
            result[first - start : last - start] = self._compute(np.arange(first, last, dtype=np.int64))
        return result

    def _compute_ahead(self, last: _Ahead, start: int, length: int) -> _Ahead:
        step, count = self._expect(last, start, length)
        if step == length:
            stride = min(count * length, self._size - start)
            positions = np.arange(start, start + stride, dtype=np.int64)[np.newaxis]
        else:
            stride, requests = step, start + step * np.arange(count, dtype=np.int64)
            positions = requests[:, np.newaxis] + np.arange(length, dtype=np.int64)
        values = self._compute(positions.ravel()).reshape(positions.shape)
        values.setflags(write=False)
        return _Ahead(start, stride, values, length, step, count)

    def _expect(self, last: _Ahead, start: int, length: int) -> tuple[int, int]:
        """The stride between requests, and how many to compute ahead: ever more while the predictions hold."""
        distance = start - last.start
        if distance == last.step * last.requests and (length == last.length or last.step == last.length):
            step = length if last.step == last.length else last.step
            count = max(1, min(8 * last.requests * last.length, CHUNK) // length)
        else:
            step = distance if last.length == length < distance else length
            count = 1
        if step > length:
            within = min(self._size - start - length, self._reach)
            count = min(count, within // step + 1)
        return step, count
