"""Whether a function of the user's gives the same when it is called again, tried on a copy that shares nothing.

A function that keeps something from one batch to the next (the batch before, a count of its calls) gives other batches
in a process that resumes, which has not seen what came before.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from .copying import copy_apart, private_copy
from .randomness.streams import Streams
from .state.witness import Look, look_at

__all__ = ["BatchTrial", "CollateTrial", "Repeat"]

_LARGEST_BATCH = 256 << 20  # bytes that are copied
_MOST_SAMPLES = 8  # that a collate function is tried with, at most half of a batch


class Repeat(NamedTuple):
    """What came of calling a function again.

    Attributes:
        untried: why it was not called again; empty if it was.
        differs: the parts in which the results differ; empty if they do not.
        most: these hold more than half of the bytes.
    """

    untried: str = ""
    differs: str = ""
    most: bool = False


class _Trial:
    """Made before the function is called for the first time, since it may keep something from then on."""

    def __init__(self, function: Callable[[Any], Any], devices: bool) -> None:
        self._copied, self._devices = copy_apart(function), devices

    def _repeat(self, argument: Any, between: Any, key: int) -> Repeat:
        """Call the copy with a copy of `argument`, with `between` (None: not), and with another copy of `argument`.

        `key`: of the random stream of each call.
        """
        function = self._copied.value
        if function is None:
            return Repeat(self._copied.why)
        streams = Streams(function, devices=self._devices)
        try:
            with warnings.catch_warnings(action="ignore"):  # the original has its own
                streams.begin_pass()
                one, other = self._called(streams, function, argument, between, key)
                if streams.made_late():
                    one, other = self._called(streams, function, argument, between, key)
        except Exception as error:  # noqa: BLE001  # the original has been called without
            return Repeat(f"a copy of it raised {type(error).__name__}: {error!s:.200}")
        if one.parts and all(part.content is None for part in one.parts):
            return Repeat(f"what it returns cannot be seen: {', '.join(one.unseen)}")
        differing = one.differing(other)
        return Repeat(differs=one.names(differing), most=one.holds_most(differing)) if differing else Repeat()

    def _called(self, streams: Streams, function: Any, argument: Any, between: Any, key: int) -> tuple[Look, Look]:
        one = self._call(streams, function, copy.deepcopy(argument), key)
        if between is not None:
            with contextlib.suppress(Exception):  # it stands in for a batch, and need not be a good one
                self._call(streams, function, copy.deepcopy(between), key)
        return one, self._call(streams, function, copy.deepcopy(argument), key)

    @staticmethod
    def _call(streams: Streams, function: Any, argument: Any, key: int) -> Look:
        with streams as start:
            start(key)
            return look_at(function(argument))


class CollateTrial(_Trial):
    """Takes the place of a collate function for one batch, to keep copies of its first samples and of its last.

    Args:
        collate: the user's.
        single: it is given one sample, not a list of them.
    """

    def __init__(self, collate: Callable[[Any], Any], single: bool = False) -> None:
        super().__init__(collate, devices=False)
        self._collate, self._single = collate, single
        self._one: Any = None
        self._other: Any = None

    def __call__(self, samples: Any) -> Any:
        """The batch."""
        if self._copied.value is not None:
            several = isinstance(samples, list) and bool(samples) and not self._single
            some = min(-(-len(samples) // 2), _MOST_SAMPLES) if several else 0
            self._one = private_copy(samples[:some] if several else samples, _LARGEST_BATCH)
            self._other = private_copy(samples[-some:], _LARGEST_BATCH) if several and len(samples) > 1 else None
        return self._collate(samples)

    def result(self, key: int) -> Repeat:
        """Call a copy of the function for the first samples, for the last, and for the first again."""
        if self._copied.value is not None and self._one is None:
            return Repeat("its samples cannot be copied")
        return self._repeat(self._one, self._other, key)


class BatchTrial(_Trial):
    """Tries a function of whole batches.

    Args:
        function: the user's.
        batch: the first that it will be given.
    """

    def __init__(self, function: Callable[[Any], Any], batch: Any) -> None:
        super().__init__(function, devices=True)
        self._batch = None if self._copied.value is None else private_copy(batch, _LARGEST_BATCH)

    def result(self, key: int) -> Repeat:
        """Call a copy of the function for the batch, for one whose rows are moved, and for the batch again."""
        if self._copied.value is not None and self._batch is None:
            return Repeat("its batches are too large to be copied, or cannot be")
        try:
            other = _with_rows_moved(self._batch)
        except Exception:  # noqa: BLE001  # a type that cannot be moved; the batch itself stands in for another
            other = self._batch
        return self._repeat(self._batch, other, key)


def _with_rows_moved(batch: Any) -> Any:
    """The batch with the rows of its arrays moved on by one: another batch of the same form."""
    if isinstance(batch, torch.Tensor):
        return batch.roll(1, 0) if batch.ndim and batch.layout is torch.strided and not batch.is_nested else batch
    if isinstance(batch, np.ndarray):
        return np.roll(batch, 1, 0) if batch.ndim else batch
    if type(batch) in (list, tuple):
        return type(batch)(map(_with_rows_moved, batch))
    if type(batch) is dict:
        return {key: _with_rows_moved(value) for key, value in batch.items()}
    return batch
