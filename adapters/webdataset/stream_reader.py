"""Reads the batches of streams in one process."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple

from midepoch.adapters.webdataset.archive import ShardReader
from midepoch.adapters.webdataset.finish import Answer
from midepoch.adapters.webdataset.index import Keys
from midepoch.adapters.webdataset.pipeline import Pipeline, run_stages
from midepoch.adapters.webdataset.streams import Cursor, Layout, Stream
from midepoch.errors import SourceError
from midepoch.order.keys import extend_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["StreamBatch", "StreamRequest", "StreamedReader"]


class StreamRequest(NamedTuple):
    """A request for a stream's next batch.

    Attributes:
        session: identifies the session.
        streams: number of streams.
        seed: of the order and of the random streams.
        stream: number of the stream.
        cursor: its position when the session began.
        last_pass: the pass with which it ends; None for none.
    """

    session: int
    streams: int
    seed: int
    stream: int
    cursor: Cursor
    last_pass: int | None


class StreamBatch(NamedTuple):
    """The answer to a request, and the stream's position after it.

    Attributes:
        ended: nothing was left.
        began: as of the stream.
    """

    answer: Answer
    cursor: Cursor
    ended: bool
    began: tuple[str, int]


class StreamedReader:
    """Reads batches stream by stream. Streams stay open between requests."""

    request = StreamRequest

    def __init__(self, pipeline: Pipeline, keys: Keys, layout: Layout, randomness: bool, refill: bool) -> None:
        self.dataset = pipeline.dataset
        self._shards, self._layout = ShardReader(pipeline, keys), layout
        self._sample_stages, self._batch_stages = pipeline.sample_stages, pipeline.batch_stages
        self._batch_size, self._drop_last = pipeline.batch_size or 1, pipeline.drop_last
        self._refill = refill
        self._random_streams = Streams(self._sample_stages, self._batch_stages, keys) if randomness else None
        self._open: dict[int, tuple[int, Stream]] = {}  # with its session
        self._session: int | None = None

    def __call__(self, request: StreamRequest) -> StreamBatch:
        """Read the batch."""
        if self._random_streams is not None and self._session != request.session:
            self._session = request.session
            self._random_streams.begin_pass()
        session, stream = self._open.pop(request.stream, (0, None))
        if stream is None or session != request.session:
            if stream is not None:
                stream.close()
            layout = self._layout._replace(streams=request.streams)
            stream = Stream(self._shards, layout, request.seed, request.stream, request.cursor, request.last_pass)
        batch = self._next(stream)
        self._open[request.stream] = (request.session, stream)  # unless reading fails, which ends the session
        return batch

    def _next(self, stream: Stream) -> StreamBatch:
        survivors: list[Any] = []
        keys: list[int] = []
        read: list[tuple[int, dict[str, Any]]] = []
        passes, enough = stream.cursor.passes, self._batch_size if self._refill else 1
        while len(survivors) < enough:
            missing = self._batch_size - len(survivors)
            # Reading shards may draw random numbers, so it comes before any random stream begins.
            raws = list(itertools.islice(stream, missing))
            if self._drop_last and len(raws) < missing:
                survivors = []
                break
            if not raws:
                break
            self._run(raws, survivors, keys)
            read += raws
            if not survivors and stream.cursor.passes > passes + 1:
                raise SourceError("the stages dropped every sample of a whole pass: make them keep some")
        if not survivors:
            return StreamBatch(Answer([], []), stream.cursor, True, stream.began)
        answer = self._batched(survivors, keys)
        if self._random_streams is not None and self._random_streams.made_late():
            if self._refill:  # how far it reads may depend on what was drawn
                self._random_streams.warn_of_late()
            else:
                survivors, keys = [], []
                self._run(read, survivors, keys)
                answer = self._batched(survivors, keys)
        return StreamBatch(answer, stream.cursor, False, stream.began)

    def _run(self, raws: list[tuple[int, dict[str, Any]]], survivors: list[Any], keys: list[int]) -> None:
        with self._random_streams or contextlib.nullcontext() as start:
            for key, sample in raws:
                if start is not None:
                    start(key)
                values = run_stages(self._sample_stages, [dict(sample)])  # a stage may change its input
                survivors += values
                keys += [key] * len(values)

    def _batched(self, survivors: list[Any], keys: list[int]) -> Answer:
        if not self._batch_stages or not survivors:
            return Answer(survivors, keys)
        if self._random_streams is None:
            return Answer(run_stages(self._batch_stages, survivors), [])
        with self._random_streams.under(extend_key(keys[0], Purpose.BATCH)):
            return Answer(run_stages(self._batch_stages, survivors), keys[:1])

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens its own streams.
        return {**self.__dict__, "_open": {}}
