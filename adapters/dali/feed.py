"""The external inputs of a pipeline: the samples and their random parameters, batch by batch.

DALI asks by the number of the batch since its last reset; the feed answers by arithmetic, so it keeps no progress.
"""

from __future__ import annotations

import dataclasses
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from nvidia.dali import Pipeline, fn

from midepoch.adapters.dali import private
from midepoch.order import EpochOrder, Order
from midepoch.order.keys import derive_key, derive_keys, extend_key, extend_keys
from midepoch.randomness.streams import Purpose
from midepoch.world import Share, World

__all__ = ["Data", "Feed", "Plan", "add_a_thread", "feed_of", "words"]

Indices = npt.NDArray[np.int64]


class Data(ABC):
    """The data of a reader: samples by index.

    Attributes:
        kind: "file", "numpy" or "webdataset".
        outputs: how many arrays a sample has.
    """

    kind: str
    outputs: int

    @abstractmethod
    def __len__(self) -> int:
        """Samples."""

    @property
    @abstractmethod
    def crc(self) -> str:
        """Eight hexadecimal digits of the list of samples."""

    @abstractmethod
    def read(self, indices: Indices) -> tuple[Any, ...]:
        """A batch: for each output an array, or a list of them, with one row for each index."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Where a sample comes from, for messages."""


class Step(NamedTuple):
    """One batch: its place in the order, the samples, and the keys of their random streams."""

    epoch: int
    positions: Indices
    indices: Indices
    keys: npt.NDArray[np.uint64]


class Plan:
    """The batches from a place on, epoch after epoch, and the samples in each.

    Args:
        seed: of the order and of the streams.
        epoch: of the first batch.
        share: this rank's part of what is left of that epoch; later epochs are shared likewise.
        order: of all ranks together.
    """

    def __init__(self, seed: int, epoch: int, share: Share, order: Order) -> None:
        self._seed, self._order = seed, order
        self._epoch, self._share, self._first = epoch, share, 0  # first: the number of the batch at `share.start`
        self._known: tuple[int, EpochOrder] | None = None

    def place(self, batch: int) -> tuple[int, int, Share]:
        """(epoch, step within the share, share) of a batch, counted from 0. Asked in increasing order."""
        while batch - self._first >= self._share.steps > 0:
            if self._share.global_steps > self._share.steps:
                break  # other ranks have another batch, so this rank must not begin the next epoch
            self._first += self._share.steps
            self._epoch += 1
            self._share = dataclasses.replace(self._share, start=0)
        return self._epoch, batch - self._first, self._share

    def step(self, batch: int) -> Step | None:
        """The batch, or None if this rank has none."""
        epoch, number, share = self.place(batch)
        if number >= share.steps:
            return None
        start, stop = share.span(number)
        positions = np.arange(start, stop)
        positions %= share.size
        if self._known is None or self._known[0] != epoch:
            self._known = (epoch, self._order.epoch(self._seed, epoch))
        order = self._known[1]
        if stop <= share.size:
            indices = order[start:stop]
        else:
            indices = np.concatenate([order[int(position) : int(position) + 1] for position in positions])
        key = derive_key(Purpose.SAMPLE, self._seed, epoch)
        return Step(epoch, positions, indices, derive_keys(key, positions))


class Feed:
    """The external sources of one pipeline. They are empty until they have a plan.

    Attributes:
        data, order, world, drop_last: as the reader in the graph stated them.
        draws: the kinds of random parameters, in the order in which the graph asks for them.
        plan: what to give, from DALI's next reset on; None for nothing.
        failure: (number of the batch, error) that ended the pass, if one did.
    """

    def __init__(self) -> None:
        self.data: Data | None = None
        self.order: Order | None = None
        self.world: World | None = None
        self.drop_last = False
        self.draws: list[str] = []
        self.sources: list[Callable[..., Any]] = []
        self.plan: Plan | None = None
        self.failure: tuple[int, Exception] | None = None
        self._last: tuple[int, Step | None] = (-1, None)

    def give(self, plan: Plan | None) -> None:
        """Follow `plan` from DALI's next reset on."""
        self.plan, self.failure, self._last = plan, None, (-1, None)

    def _step(self, batch: int) -> Step:
        number, step = self._last
        if number != batch:
            step = None if self.plan is None else self.plan.step(batch)
            self._last = (batch, step)
        if step is None or self.failure is not None:
            raise StopIteration
        return step

    def connect(self, outputs: int, values: Callable[[Step], tuple[Any, ...]], **options: Any) -> list[Any]:
        """The nodes of an external source that gives `values` of each batch."""

        def source(info: Any) -> tuple[Any, ...]:
            step = self._step(info.iteration)
            try:
                return values(step)
            except Exception as error:  # raised when the batch is handed out, not when it is prefetched
                self.failure = (info.iteration, error)
                raise StopIteration from error

        self.sources.append(source)
        nodes = fn.external_source(source=source, num_outputs=outputs, batch=True, batch_info=True, **options)
        return list(nodes)

    def draw(self, kind: str, outputs: int, values: Callable[[npt.NDArray[np.uint64]], tuple[Any, ...]]) -> list[Any]:
        """The nodes of random parameters. `values` gets the samples' keys, which differ for each call in the graph."""
        place = len(self.draws)
        self.draws.append(kind)
        word = extend_key(0, _PARAMETERS, place)

        def drawn(step: Step) -> tuple[Any, ...]:
            return values(extend_keys(step.keys, np.array([word], np.uint64))[:, 0])

        return self.connect(outputs, drawn)


# Keeps the parameters' keys apart from those of a sample's own stream.
_PARAMETERS = int.from_bytes(b"dali", "big")

_FEEDS: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()


def feed_of(pipeline: Any) -> Feed | None:
    """The feed of a pipeline that has one."""
    return _FEEDS.get(pipeline)


def current_feed(caller: str) -> Feed:
    """The feed of the pipeline that is being defined.

    Raises:
        RuntimeError: none is.
    """
    pipeline = Pipeline.current()
    if pipeline is None:
        raise RuntimeError(f"{caller} was called outside a pipeline: call it in a function marked with @pipeline_def")
    private.let_be_empty(pipeline)  # it is empty until it is wrapped
    return _FEEDS.setdefault(pipeline, Feed())


def add_a_thread() -> None:
    """Add a thread to the pipeline that is being defined, in place of the one in which DALI's readers prefetch.

    What a feed names is read by the pipeline's own threads, between two operators that decode and resize.
    """
    pipeline = Pipeline.current()
    if pipeline is not None:
        private.add_a_thread(pipeline)


def words(keys: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1) for each key: multiples of 2**-53, of shape (len(keys), count)."""
    drawn = extend_keys(keys, np.arange(count))
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
