"""Sessions over an iterator of answers, the first of which may say what samples look like."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from ..loader.adapter import Run, Session, WitnessReport

__all__ = ["FirstBatch", "IteratorSession", "SeeingSession", "WitnessRequest"]


class SeeingSession(Session):
    """A session whose first answer may be a `FirstBatch`."""

    def __init__(self) -> None:
        self._seen: list[WitnessReport] = []

    def unwrapped(self, answers: Iterator[Any]) -> Iterator[Any]:
        """The answers; of a `FirstBatch` the batch alone, while `seen` keeps the rest.

        The iterator does not refer to the session: worker processes in a cycle would outlive a loader that is dropped.
        Nor is it a generator: numpy's code, when it is called within one, leaves there what `except` is handling, and
        so would keep the frames of whoever begins a pass in `except StopIteration`.
        """
        # What follows the first is there once that was given. A sample of the user's may raise StopIteration itself.
        rest: list[Iterator[Any]] = []
        first = map(functools.partial(_unwrapped, self._seen, rest, answers), itertools.islice(answers, 1))
        return itertools.chain.from_iterable(itertools.chain((first,), rest))

    @property
    def seen(self) -> WitnessReport | None:  # type: ignore[override]
        """What the reader saw of the samples that the run asked to look at."""
        return self._seen[0] if self._seen else None


class IteratorSession(SeeingSession):
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
        super().__init__()
        answers = answers if error is None else itertools.chain(answers, map(_raised, (error,)))
        self.take = self.unwrapped(answers).__next__
        self._detail, self._following = detail, following
        self._close, self._error = close, error

    @property
    def raises(self) -> Exception | None:
        """The sampler's own, if it ended by one."""
        return self._error

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


def _unwrapped(seen: list[WitnessReport], rest: list[Iterator[Any]], answers: Iterator[Any], answer: Any) -> Any:
    rest.append(answers)
    if type(answer) is FirstBatch:
        seen.append(answer.seen)
        return answer.batch
    return answer


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
        expected: (epoch, index) of another epoch's first sample to look at; None if there is none.
    """

    index: Any
    twice: bool
    expected: tuple[int, Any] | None

    @classmethod
    def of(cls, run: Run, index: Any) -> WitnessRequest | None:
        """What a run asks for; None if nothing. `index`: of the first sample of its epoch."""
        if not run.looks:
            return None
        expects = run.expects
        if expects is None or expects.index is None or (expects.epoch, expects.index) == (run.epoch, index):
            return cls(index, run.looks > 1, None)
        return cls(index, run.looks > 1, (expects.epoch, _like(index, expects.index)))


class FirstBatch(NamedTuple):
    """The answer to a request with a `WitnessRequest`."""

    batch: Any
    seen: WitnessReport
