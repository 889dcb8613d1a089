"""Sessions over an iterator of answers, the first of which may say what samples look like."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from ..loader.adapter import Run, Session, WitnessReport

__all__ = ["FirstBatch", "IteratorSession", "WitnessRequest", "unwrapped"]


def unwrapped(answers: Iterator[Any], report: Callable[[WitnessReport], None]) -> Iterator[Any]:
    """The answers, the first of which may be a `FirstBatch`: of that the batch alone. `report` gets the rest.

    The iterator does not refer to a session: worker processes in a cycle would outlive a loader that is dropped. Nor is
    it a generator: numpy's code, when it is called within one, leaves there what `except` is handling, and so would
    keep the frames of whoever begins a pass in `except StopIteration`.
    """
    # What follows the first is there once that was given. A sample of the user's may raise StopIteration itself.
    rest: list[Iterator[Any]] = []

    def begin(answer: Any) -> Any:
        rest.append(answers)
        if type(answer) is not FirstBatch:
            return answer
        report(answer.seen)
        return answer.batch

    return itertools.chain.from_iterable(itertools.chain((map(begin, itertools.islice(answers, 1)),), rest))


class IteratorSession(Session):
    """A session that hands out an iterator's batches as they are.

    Args:
        answers: the batches.
        detail: the same throughout the epoch: the CRC of the epoch's list, if the order is listed.
        following: the detail with which the next epoch begins.
        close: releases what the iterator holds.
        error: raised once after the batches, in place of their end.
    """

    def __init__(
        self,
        answers: Iterator[Any],
        detail: str = "",
        following: str = "",
        close: Callable[[], None] | None = None,
        error: Exception | None = None,
    ) -> None:
        answers = answers if error is None else itertools.chain(answers, map(_raised, (error,)))
        self.take = answers.__next__
        self._detail, self._following = detail, following
        self._close = close

    def detail(self, bookmark: Any) -> str:
        """The same throughout the epoch."""
        return self._detail

    def next_epoch_detail(self) -> str:
        """Known from the start."""
        return self._following

    def close(self) -> None:
        """Release what the iterator holds."""
        self.take = iter(()).__next__
        close, self._close = self._close, None
        if close is not None:
            close()


def _raised(error: Exception) -> NoReturn:
    raise error


def _like(index: Any, number: int) -> Any:
    """An index of the same type as another: a sample may hold the index that it was asked for."""
    with contextlib.suppress(OverflowError, RuntimeError, ValueError):  # an edited state names what that type has not
        if isinstance(index, np.integer):
            return type(index)(number)
        if isinstance(index, torch.Tensor):
            return torch.tensor(number, dtype=index.dtype)
    return number


class WitnessRequest(NamedTuple):
    """Samples to look at when a batch is read.

    Attributes:
        index: of the first sample of the epoch.
        twice: look at it before the batch and after.
        collate: try the collate function.
        expected: (epoch, index) of another epoch's first sample to look at; None if there is none.
    """

    index: Any
    twice: bool
    collate: bool
    expected: tuple[int, Any] | None

    @classmethod
    def of(cls, run: Run, index: Any) -> WitnessRequest | None:
        """What a run asks for; None if nothing. `index`: of the first sample of its epoch."""
        if not run.looks:
            return None
        expects = run.expects
        if expects is None or expects.index is None or (expects.epoch, expects.index) == (run.epoch, index):
            return cls(index, run.looks > 1, run.looks > 2, None)
        return cls(index, run.looks > 1, run.looks > 2, (expects.epoch, _like(index, expects.index)))


class FirstBatch(NamedTuple):
    """The answer to a request with a `WitnessRequest`."""

    batch: Any
    seen: WitnessReport
