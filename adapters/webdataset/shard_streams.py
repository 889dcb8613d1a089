"""Streams of shards: in which order each one reads which samples, where it is, and the batches that it gives.

"Stream" means such a stream of shards here. Streams of random numbers are called random streams.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from midepoch.adapters.webdataset.archive import ShardReader
from midepoch.adapters.webdataset.drawn_shards import ShardDraws
from midepoch.adapters.webdataset.finish import Answer
from midepoch.adapters.webdataset.index import Keys
from midepoch.adapters.webdataset.pipeline import Pipeline, run_stages
from midepoch.errors import SourceError, StateCorruptError
from midepoch.order import Sequential, Shuffled
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["Cursor", "Cursors", "Layout", "StreamBatch", "StreamRequest", "StreamedReader", "parse_cursors"]

_FIRST_STRETCH = 128  # samples; the first stretches are short, so that a pass begins soon
# A constant for each use of a key, so that no two share one.
_SHARDS, _SHUFFLE = (int.from_bytes(word, "big") for word in (b"shards", b"stretch"))


class Cursor(NamedTuple):
    """The position of a stream.

    Attributes:
        passes: number of finished passes.
        place: number of shards of this pass before the one where the current stretch begins.
        offset: byte of the (decompressed) shard at which the stretch begins.
        ordinal: number of samples of that shard before the stretch.
        stretch: number of stretches of this pass before this one.
        done: number of its samples that were taken.
        mark: of the shard in which it begins, as `_mark_of` gives it; 0 if this shard has not been read.
    """

    passes: int
    place: int = 0
    offset: int = 0
    ordinal: int = 0
    stretch: int = 0
    done: int = 0
    mark: int = 0

    def __str__(self) -> str:
        return ".".join(map(str, self))


class Cursors(NamedTuple):
    """A rank's part of a state.

    Attributes:
        streams: number of streams.
        following: number of the next batch of all ranks, modulo the number of streams.
        size: batches of all ranks in an epoch of with_epoch; 0 for this world's own number.
        cursors: the position of each stream that has been read.
    """

    streams: int
    following: int = 0
    size: int = 0
    cursors: Mapping[int, Cursor] = MappingProxyType({})

    def __str__(self) -> str:
        cursors = ",".join(f"{stream}:{cursor}" for stream, cursor in sorted(self.cursors.items()))
        return f"streams={self.streams};next={self.following};size={self.size};{cursors}"


_CURSORS = re.compile(
    r"streams=([1-9]\d{0,3});next=(\d{1,9});size=(\d{1,18});((?:\d{1,4}:\d{1,18}(?:\.\d{1,18}){6}(?:,|$))*)"
)


def parse_cursors(detail: str) -> Cursors:
    """The reverse of `str`. Raises StateCorruptError if the text is not of this form."""
    match = _CURSORS.fullmatch(detail)
    if match is None:
        raise StateCorruptError("the state's detail is not from a streamed pipeline: load an undamaged state")
    cursors = {}
    for part in match[4].split(",") if match[4] else ():
        stream, _, cursor = part.partition(":")
        cursors[int(stream)] = Cursor(*map(int, cursor.split(".")))
    return Cursors(int(match[1]), int(match[2]), int(match[3]), cursors)


class Layout(NamedTuple):
    """What determines the samples of a stream and their order.

    Attributes:
        streams: number of streams.
        shards: number of shards.
        shuffles: whether shards are shuffled in each pass.
        buffer: number of samples in a stretch, which are shuffled together; 1 for no shuffle.
        draws: how shards are drawn with replacement; None if each of them comes once in a pass.
        fixed: whether a stream reads the same shards in each pass, as a worker of the plain pipeline does. So it has as
            many full batches.
    """

    streams: int
    shards: int
    shuffles: bool
    buffer: int
    draws: ShardDraws | None = None
    fixed: bool = False

    @property
    def places(self) -> int:
        """Shards in one pass."""
        return self.shards if self.draws is None else self.draws.length

    def dealt(self, seed: int, passes: int, stream: int) -> tuple[list[int], int, int]:
        """A stream's shards in one pass. If there are few shards, streams share one, and each has every n-th sample.

        Returns:
            numbers of the shards, n, and the remainder of its samples' ordinals modulo n.
        """
        order = list(range(self.shards)) if self.fixed else _pass(self._replace(streams=0), seed, passes)
        if len(order) < self.streams:
            own = stream % len(order)
            return order[own : own + 1], len(range(own, self.streams, len(order))), stream // len(order)
        dealt = order[stream :: self.streams]
        if self.fixed and self.shuffles:
            places = Shuffled(len(dealt)).epoch(derive_key(_SHARDS, seed, stream), passes)[:]
            dealt = [dealt[place] for place in places.tolist()]
        return dealt, 1, 0

    def stretch_length(self, number: int) -> int:
        """The number of samples in a stretch."""
        return min(self.buffer, _FIRST_STRETCH << min(number, 32))


@functools.lru_cache(maxsize=2)
def _pass(layout: Layout, seed: int, passes: int) -> list[int]:
    """The shards of all streams in one pass, by number. All of a process's streams ask for it."""
    if layout.draws is not None:
        numbers = layout.draws.numbers(layout.shards, seed, passes, 0, layout.draws.length)
    else:
        numbers = (Shuffled if layout.shuffles else Sequential)(layout.shards).epoch(seed, passes)[:]
    return list(map(int, numbers))


class Raw(NamedTuple):
    """A sample as stored in the shard, its position, and the shard's mark."""

    place: int
    offset: int
    ordinal: int
    shard: int
    mark: int
    sample: dict[str, Any]


class Stream:
    """Reads one stream from a cursor on. `last_pass`: where it ends, None for no end.

    Attributes:
        began: the url and the mark of the shard in which it began; 0 if no sample of it was read.
    """

    def __init__(
        self, shards: ShardReader, layout: Layout, seed: int, stream: int, cursor: Cursor, last_pass: int | None
    ) -> None:
        self._shards, self._layout, self._seed, self._stream = shards, layout, seed, stream
        self._last_pass = last_pass
        self.cursor = cursor
        self.began = ("", 0)
        self._stretch: list[Raw] = []
        self._order: list[int] = []
        self._source: Iterator[Raw] = iter(())
        self._ahead: Raw | None = None  # the first sample of the next stretch, if it has been read
        self._open_pass()

    def close(self) -> None:
        """Close the shard that is open."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    @property
    def ended(self) -> bool:
        """Whether the last pass is read."""
        return self._last_pass is not None and self.cursor.passes > self._last_pass

    def _open_pass(self) -> None:
        self.close()
        self._source = iter(()) if self.ended else self._read(self.cursor)
        self._ahead = None

    def _read(self, cursor: Cursor) -> Iterator[Raw]:
        numbers, every, remainder = self._layout.dealt(self._seed, cursor.passes, self._stream)
        offset, ordinal, marks, begins = cursor.offset, cursor.ordinal, self._shards.marks, bool(cursor.mark)
        for place in range(cursor.place, len(numbers)):
            number = numbers[place]
            for begin, count, sample in self._shards.samples(number, offset, ordinal):
                if begins and place == cursor.place:
                    self.began, begins = (sample["__url__"], marks[number]), False
                if count % every == remainder:
                    yield Raw(place, begin, count, number, marks[number], sample)
            offset = ordinal = 0

    def _fill(self) -> None:
        """Read the stretch at the cursor."""
        cursor = self.cursor
        length = self._layout.stretch_length(cursor.stretch)
        ahead = [] if self._ahead is None else [self._ahead]
        self._stretch = ahead + list(itertools.islice(self._source, length - len(ahead)))
        self._ahead = None
        if self._stretch:
            first = self._stretch[0]
            self.cursor = cursor._replace(
                place=first.place, offset=first.offset, ordinal=first.ordinal, mark=first.mark
            )
            key = derive_key(_SHUFFLE, self._seed, cursor.passes, self._stream, cursor.stretch)
            self._order = Shuffled(len(self._stretch)).epoch(key, 0)[:].tolist()
        if cursor.done >= len(self._stretch):
            self._settle()

    def _settle(self) -> None:
        """After a stretch: move the cursor to the next one, so that the end is known when it is reached."""
        self._stretch = []
        first = self._ahead = next(self._source, None)
        if first is not None:
            stretch = self.cursor.stretch + 1
            self.cursor = Cursor(self.cursor.passes, first.place, first.offset, first.ordinal, stretch, 0, first.mark)
        for _ in range(_MOST_EMPTY_PASSES):
            if self._ahead is not None or self.ended:
                return
            self.cursor = Cursor(self.cursor.passes + 1)
            self._open_pass()
            self._ahead = next(self._source, None)
        if self._ahead is None and not self.ended:
            raise SourceError(
                f"stream {self._stream} of {self._layout.streams} has no samples: check its shards, or let fewer "
                "ranks, workers or streams share them"
            )

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[int, dict[str, Any]]:
        """The key of the next sample's random stream, and the sample."""
        while not self._stretch:
            if self.ended:
                raise StopIteration
            self._fill()
        raw = self._stretch[self._order[self.cursor.done]]
        key = derive_key(Purpose.SAMPLE, self._seed, self.cursor.passes, raw.shard, raw.ordinal)
        if self._layout.draws is not None:  # the shard may come again in this pass
            key = extend_key(key, self._stream % self._layout.places + raw.place * self._layout.streams)
        self.cursor = self.cursor._replace(done=self.cursor.done + 1)
        if self.cursor.done == len(self._stretch):
            self._settle()
        return key, raw.sample


# If a stream's shard of a pass is empty, the next passes may give it others, because shards are shuffled.
_MOST_EMPTY_PASSES = 100


# --- batches ----------------------------------------------------------------------------------------------------------


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
        if self._random_streams is not None and self._refill:  # how far it reads may depend on what was drawn
            self._random_streams.warn_if_late()
        elif self._random_streams is not None and self._random_streams.made_late():
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
            return Answer(run_stages(self._batch_stages, survivors), keys[:1])
        with self._random_streams.under(extend_key(keys[0], Purpose.BATCH)):
            return Answer(run_stages(self._batch_stages, survivors), keys[:1])

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens its own streams.
        return {**self.__dict__, "_open": {}}
