"""What midepoch feeds into a pipeline, batch by batch: the samples to read, and their random parameters.

DALI asks with the number of the batch since its last reset. The feed computes the answer and keeps no progress.
"""

from __future__ import annotations

import dataclasses
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
from nvidia.dali import Pipeline, fn
from nvidia.dali.pipeline import do_not_convert

from midepoch.adapters.dali import private
from midepoch.order import EpochOrder, Order
from midepoch.order.keys import derive_key, derive_keys, extend_key, extend_keys
from midepoch.randomness.streams import Purpose
from midepoch.world import Share, World

__all__ = ["Data", "Feed", "Indices", "Keys", "Schedule", "as_written", "feed_of", "words"]

Indices = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


class Data(ABC):
    """A reader's data set: samples by index.

    Attributes:
        kind: "file", "numpy" or "webdataset".
        outputs: number of arrays in a sample.
    """

    kind: str
    outputs: int

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @property
    @abstractmethod
    def crc(self) -> str:
        """The CRC of the list of samples, as eight hexadecimal digits."""

    @abstractmethod
    def read(self, indices: Indices) -> tuple[Any, ...]:
        """A batch: for each output an array, or a list of arrays, with one row for each index."""

    @abstractmethod
    def content(self, index: int, output: int, most: int | None = None) -> bytes:
        """The bytes of one array of a sample, `most` of them at most."""

    @abstractmethod
    def stored(self, index: int) -> bytes:
        """A sample's bytes, or their beginning. May raise any error."""

    @abstractmethod
    def name(self, index: int) -> str:
        """The origin of a sample, for messages."""


class Step(NamedTuple):
    """One batch: its epoch, its positions in the order, its samples, and the keys of their random streams."""

    epoch: int
    positions: Indices
    indices: Indices
    keys: Keys


class Schedule:
    """The samples of each batch from a given position on, across epochs.

    Args:
        seed: of the order and of the random streams.
        epoch: of the first batch.
        share: this rank's part of what is left of that epoch. Later epochs are shared in the same way.
        order: over the samples of all ranks.
    """

    def __init__(self, seed: int, epoch: int, share: Share, order: Order) -> None:
        self._seed, self._order = seed, order
        self._epoch, self._share, self._first = epoch, share, 0  # first: the number of the batch at `share.start`
        self._known: tuple[int, EpochOrder] | None = None

    def locate(self, batch: int) -> tuple[int, int, Share]:
        """(epoch, step within the share, share) of a batch, counted from 0. Call it with increasing numbers only."""
        while batch - self._first >= self._share.steps > 0:
            if self._share.global_steps > self._share.steps:
                break  # other ranks still have a batch, so this rank must not start the next epoch
            self._first += self._share.steps
            self._epoch += 1
            self._share = dataclasses.replace(self._share, start=0)
        return self._epoch, batch - self._first, self._share

    def step(self, batch: int) -> Step | None:
        """The batch, or None if this rank has none."""
        epoch, number, share = self.locate(batch)
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
    """The external sources of one pipeline. They give nothing until they have a schedule.

    Attributes:
        data, order, world, drop_last: as given to the reader in the graph.
        images: the reader's outputs that can be encoded images, with what tells their sizes.
        draws: the kinds of random parameters, in the order of their calls in the graph.
        schedule: takes effect at DALI's next reset; None gives no batches.
        failure: (number of the batch, error) that ended the pass, if any.
    """

    def __init__(self) -> None:
        self.data: Data | None = None
        self.order: Order | None = None
        self.world: World | None = None
        self.drop_last = False
        self.images: list[tuple[Any, Any]] = []
        self.draws: list[str] = []
        self.sources: list[Callable[..., Any]] = []
        self.schedule: Schedule | None = None
        self.failure: tuple[int, Exception] | None = None
        self._last: tuple[int, Step | None] = (-1, None)

    def give(self, schedule: Schedule | None) -> None:
        """Set what to give after DALI's next reset."""
        self.schedule, self.failure, self._last = schedule, None, (-1, None)

    def _step(self, batch: int) -> Step:
        number, step = self._last
        if number != batch:
            step = None if self.schedule is None else self.schedule.step(batch)
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

    def draw(self, kind: str, outputs: int, values: Callable[[Keys, Indices], tuple[Any, ...]]) -> list[Any]:
        """The nodes of random parameters.

        Args:
            kind: says what is drawn.
            outputs: the number of nodes.
            values: gets one key a sample, different for each call in the graph, and the samples.
        """
        place = len(self.draws)
        self.draws.append(kind)
        word = np.array([extend_key(0, _PARAMETERS, place)], np.uint64)

        def drawn(step: Step) -> tuple[Any, ...]:
            return values(extend_keys(step.keys, word)[:, 0], step.indices)

        return self.connect(outputs, drawn)


# Separates the keys of these parameters from those of code that draws from a sample's own stream.
_PARAMETERS = int.from_bytes(b"dali", "big")

_FEEDS: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()


def feed_of(pipeline: Any) -> Feed | None:
    """The feed of a pipeline, or None if it has none."""
    return _FEEDS.get(pipeline)


def current_feed(caller: str) -> Feed:
    """The feed of the pipeline that is being defined.

    Raises:
        RuntimeError: no pipeline is being defined.
    """
    pipeline = Pipeline.current()
    if pipeline is None:
        raise RuntimeError(f"{caller} was called outside a pipeline: call it in a function marked with @pipeline_def")
    private.allow_empty(pipeline)  # it has no data until it is wrapped
    private.refuse_reader_name(pipeline)
    return _FEEDS.setdefault(pipeline, Feed())


_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_written(function: _Function) -> _Function:
    """Keep DALI from rewriting a function, and all that it calls, in pipelines with ``enable_conditionals``."""
    return cast(_Function, do_not_convert(function))


def words(keys: Keys, count: int) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1) for each key: multiples of 2**-53, of shape (len(keys), count)."""
    drawn = extend_keys(keys, np.arange(count))
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
