"""Reads batches by position from shards whose samples can be read one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from midepoch.adapters.webdataset.drawn_shards import Drawn
from midepoch.adapters.webdataset.finish import Answer
from midepoch.adapters.webdataset.index import Index, Keys
from midepoch.adapters.webdataset.pipeline import Pipeline, grouped, run_stages
from midepoch.adapters.webdataset.shards import RangeReader, Shard
from midepoch.loader.adapter import Run, WitnessReport
from midepoch.order import EpochOrder, Order, Sequential, Shuffled, Windowed
from midepoch.order.keys import derive_key, derive_keys
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.sessions import FirstBatch, WitnessRequest
from midepoch.reading.stored import seen_as_stored
from midepoch.reading.tar import parse_members

__all__ = ["IndexedReader", "IndexedRequest", "order_of"]

_FEWEST_SHARDS = 16  # mixed at a time: more than most loaders have workers, each of which mixes one
_WIDER = 4  # times webdataset's buffer, so that samples move at least as far
_MOST_LOOKED_AT = 256 << 10  # bytes of a sample, which may come over a network: they tell it from others


def order_of(pipeline: Pipeline, counts: list[int]) -> Order:
    """The order that replaces a pipeline's shuffles, over shards with these numbers of samples."""
    size, filled = sum(counts), sum(1 for count in counts if count)
    window = max(_FEWEST_SHARDS, -(-_WIDER * pipeline.buffer * filled // max(size, 1)))
    if pipeline.draws is not None:
        return Drawn(tuple(counts), pipeline.draws, window)
    if not pipeline.shuffles:
        return Sequential(size)
    return Shuffled(size) if window >= filled else Windowed(size, tuple(counts), window)


class IndexedRequest(NamedTuple):
    """One batch: positions `start` to `stop` of an epoch.

    Attributes:
        seed: of the order and of the random streams.
        base: number of samples in earlier epochs, through all passes.
        size: number of positions in the epoch. Positions from there on repeat its beginning.
        first, last: the positions of all ranks at this step, for a rank left without a sample.
        session: identifies the run.
        run: that asks to look at the first sample of its epoch; None for all but its first request.
    """

    seed: int
    base: int
    size: int
    start: int
    stop: int
    first: int
    last: int
    session: int
    run: Run | None = None


class IndexedReader:
    """Reads batches by position, each sample under its own random stream.

    Args:
        index: of the shards.
        order: of the samples in one pass.
        pipeline: with the stages to run.
        keys: how files are grouped into samples.
        streams: False lets the stages draw from the caller's generators.
    """

    request = IndexedRequest

    def __init__(self, index: Index, order: Order, pipeline: Pipeline, keys: Keys, streams: bool) -> None:
        self.dataset = pipeline.dataset
        self._index, self._order = index, order
        self._keys, self._grouping = keys, pipeline.grouping
        self._sample_stages, self._batch_stages = pipeline.sample_stages, pipeline.batch_stages
        self._batches = not pipeline.late_sample_stages  # otherwise the main process makes the batches
        self._ranges = RangeReader(index.shards)
        self._streams = Streams(self._sample_stages, self._batch_stages, keys) if streams else None
        self._orders: dict[tuple[int, int], EpochOrder] = {}
        self._session: int | None = None

    def __call__(self, request: IndexedRequest) -> Answer | FirstBatch:
        """Read a batch. The answer has no value if the stages dropped all of it."""
        answer = self._answer(request)
        return answer if request.run is None else FirstBatch(answer, self._seen(request, request.run))

    def _seen(self, request: IndexedRequest, run: Run) -> WitnessReport:
        """The first sample of the epoch as it is stored, read by its range: never more of a shard than that."""
        index, ranges = self._index, self._ranges

        def stored(sample: int) -> bytes:
            number, start, length = index.ranges(np.array([sample]))[0]
            (read,) = ranges.reads([(number, start, min(length, _MOST_LOOKED_AT))])
            return read() + b"%d" % length

        def name(sample: int) -> str:
            number, start, _ = index.ranges(np.array([sample]))[0]
            return f"sample {sample}, from byte {start} of {index.shards[number].url} on,"

        look = WitnessRequest.of(run, int(self._places(request, 0, 1)[0][0]))
        assert look is not None  # a request has a run only if that looks
        return seen_as_stored(look, index.size, stored, name)

    def _answer(self, request: IndexedRequest) -> Answer:
        streams = self._streams
        if streams is not None and self._session != request.session:
            self._session = request.session
            streams.begin_pass(rest=derive_key(Purpose.REST, request.seed, request.base))
        answer = self._read(request, request.start, request.stop)
        if answer.values or request.last - request.first <= request.stop - request.start or not self._batches:
            return answer
        # Every sample of this rank was dropped. Perhaps other ranks have some, and would wait for this one, so it reads
        # one of theirs. A batch that is empty on all ranks is skipped by all.
        for position in range(request.first, request.last):
            if not request.start <= position < request.stop:
                answer = self._read(request, position, position + 1)
                if answer.values:
                    return answer
        return answer

    def close(self) -> None:
        """Close this process's open shards. Reading opens them again."""
        self._ranges.close()

    def _places(self, request: IndexedRequest, start: int, stop: int) -> tuple[npt.NDArray[np.int64], list[int]]:
        """The numbers of the samples at these positions, and the keys of their random streams."""
        positions = request.base + np.arange(start, stop, dtype=np.int64) % request.size
        passes, places = np.divmod(positions, self._order.size)
        samples = np.empty(len(positions), np.int64)
        keys: list[int] = []
        cuts = np.flatnonzero((np.diff(positions) != 1) | (np.diff(passes) != 0)) + 1
        for first, last in pairwise([0, *cuts.tolist(), len(positions)]):
            number = int(passes[first])
            begin = int(places[first])
            samples[first:last] = self._order_of(request.seed, number)[begin : begin + last - first]
            key = derive_key(Purpose.SAMPLE, request.seed, number)
            keys += cast(list[int], derive_keys(key, places[first:last]).tolist())
        return samples, keys

    def _order_of(self, seed: int, number: int) -> EpochOrder:
        order = self._orders.get((seed, number))
        if order is None:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            order = self._orders[seed, number] = self._order.epoch(seed, number)
        return order

    def _read(self, request: IndexedRequest, start: int, stop: int) -> Answer:
        samples, keys = self._places(request, start, stop)
        ranges = self._index.ranges(samples)
        # This comes before any random stream begins, because a network file system may draw random numbers.
        reads = self._ranges.reads(ranges)
        run = functools.partial(self._run, request, start, ranges, reads, keys)
        answer: Answer = run(None) if self._streams is None else self._streams.read(run)
        return answer

    def _run(
        self,
        request: IndexedRequest,
        start: int,
        ranges: list[tuple[int, int, int]],
        reads: list[Callable[[], bytes]],
        keys: list[int],
        begin: Callable[[int], None] | None,
    ) -> Answer:
        shards, stages = self._index.shards, self._sample_stages
        survivors: list[Any] = []
        kept: list[int] = []
        for (number, first, _), read, key in zip(ranges, reads, keys, strict=True):
            if begin is not None:
                begin(key)
            shard = shards[number]
            values = run_stages(stages, self._samples(read(), shard, first))
            survivors += values
            kept += [key] * len(values)
        if not survivors or not self._batch_stages:
            return Answer(survivors, kept)
        if begin is not None:
            begin(derive_key(Purpose.BATCH, request.seed, request.base + start))
        return Answer(run_stages(self._batch_stages, survivors), kept[:1])


    def _samples(self, data: bytes, shard: Shard, start: int) -> list[dict[str, Any]]:
        """The sample of which a shard has `data` from byte `start` on; none if a handler drops it."""
        named = ((self._keys.chosen(name), content) for name, content in parse_members(data, shard.url, start))
        files = ((name, content) for name, content in named if name is not None)
        return grouped(files, shard.url, shard.path or None, self._grouping)
