"""Shards that can only be read from their start: pipes, compressed archives, servers without byte ranges.

The shards of a pass are dealt to a fixed number of streams. Each stream is read in order by one reader, and the streams
take turns to give a batch. A stream's cursor says at which byte of which shard its current stretch of samples begins,
and how many samples of the stretch are done. So a resume reads again at most one shard's beginning and one stretch for
each stream.

"Stream" means such a stream of shards here. Streams of random numbers are called random streams.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import itertools
import logging
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from webdataset.filters import reraise_exception

from midepoch.adapters.webdataset.finish import Answer, Finish
from midepoch.adapters.webdataset.index import Keys
from midepoch.adapters.webdataset.pipeline import Pipeline, grouped, run_stages
from midepoch.adapters.webdataset.shards import quick_identity
from midepoch.errors import SourceError, StateCorruptError, StateMismatchError, UnsupportedSourceError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.loader.verify import Verify, tell_of_another
from midepoch.order import Sequential, Shuffled
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.tar import TarError, padded, walk
from midepoch.reading.workers import Server
from midepoch.state.parts import part_of, parts_in
from midepoch.world import World

__all__ = ["StreamedAdapter"]

_LOG = logging.getLogger("midepoch.webdataset")
_FIRST_STRETCH = 128  # samples; the first stretches are short, so that a pass begins soon
_SHUFFLE = int.from_bytes(b"stretch", "big")
_PIECE = 1 << 20  # bytes read at once when skipping
_BEGINNING = 64 << 10  # bytes of a shard that its mark covers at most

_nonces = itertools.count(1)


class _Cursor(NamedTuple):
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


# --- one shard --------------------------------------------------------------------------------------------------------


class _Bytes:
    """Reads exactly as many decompressed bytes of a stream as requested, in whatever pieces they come.

    Attributes:
        beginning: those of the first `_BEGINNING` bytes that have been read.
    """

    def __init__(self, stream: Any) -> None:
        self.beginning = bytearray()
        self._raw = stream
        self._head = b""
        self._head = self._exactly(stream.read, 6)
        self._stream: Any = self
        for magic, open_file in _DECOMPRESSORS:
            if self._head.startswith(magic):
                self._stream = open_file(_Prefixed(self._take_head(), stream))
                break
        self._decompressed = self._stream is not self

    @staticmethod
    def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
        data = read(count)
        if len(data) == count or not data:
            return data
        parts, missing = [data], count - len(data)
        while missing and (data := read(missing)):
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    def read(self, count: int) -> bytes:
        """Read `count` bytes, fewer at the end."""
        data = self._take(count)
        if len(self.beginning) < _BEGINNING:
            self.beginning += data[: _BEGINNING - len(self.beginning)]
        return data

    def _take(self, count: int) -> bytes:
        if self._decompressed:
            return self._exactly(self._stream.read, count)
        if self._head:
            head, self._head = self._head[:count], self._head[count:]
            return head + (self._exactly(self._raw.read, count - len(head)) if count > len(head) else b"")
        return self._exactly(self._raw.read, count)

    def skip(self, count: int) -> None:
        """Skip `count` bytes."""
        while count > 0:
            data = self.read(min(count, _PIECE))
            if not data:
                return
            count -= len(data)

    def close(self) -> None:
        # A pipe's process may fail because nobody reads on. That is not an error.
        with contextlib.suppress(OSError):
            self._raw.close()


def _mark_of(beginning: bytearray, keys: Keys) -> int:
    """A checksum of a shard's first sample, as far as `beginning` goes: of the names, sizes and contents of its files.

    Not of their times and owners: a pipe may write the archive anew each time.
    """
    file, mark, first = io.BytesIO(beginning), 0, None

    def skip(count: int) -> None:
        file.seek(count, io.SEEK_CUR)

    with contextlib.suppress(TarError):  # the beginning may end anywhere
        for member, _ in walk(file.read, skip, ""):
            prefix = keys.prefix(member.name)
            first = prefix if first is None else first
            if prefix != first:
                break
            mark = zlib.crc32(f"{member.name}/{member.size}/".encode("utf-8", "surrogateescape"), mark)
            mark = zlib.crc32(beginning[member.offset : member.offset + member.size], mark)
    return mark


class _Prefixed:
    """A byte stream with some bytes put back before it."""

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head, self._stream = head, stream

    def read(self, count: int = -1) -> bytes:
        if self._head:
            count = len(self._head) if count < 0 else count
            head, self._head = self._head[:count], self._head[count:]
            return head
        data: bytes = self._stream.read(count)
        return data

    def seekable(self) -> bool:
        return False


_DECOMPRESSORS: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
)
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)


class _Raw(NamedTuple):
    """A sample as stored in the shard, its position, and the shard's mark."""

    place: int
    offset: int
    ordinal: int
    shard: int
    mark: int
    sample: dict[str, Any]


class _Shards:
    """Reads the samples of shards one after another, as webdataset makes them.

    Attributes:
        marks: by the number of the shard, for those of which a sample was read here.
    """

    def __init__(self, pipeline: Pipeline, keys: Keys) -> None:
        self._urls, self._opener, self._keys = pipeline.urls, pipeline.opener, keys
        self._handler = pipeline.reading.get("handler", reraise_exception)
        self._grouping = pipeline.grouping
        self.marks: dict[int, int] = {}

    def samples(self, number: int, offset: int, ordinal: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Offset, ordinal and content of each sample, starting at a byte where one begins."""
        url = self._urls[number]
        source = self._open(url)
        if source is None:
            _LOG.warning("%s cannot be opened: the shard is lost", url)
            return
        try:
            data = _Bytes(source["stream"])
        except _BROKEN as error:
            with contextlib.suppress(OSError):
                source["stream"].close()
            damage = TarError(url, 0, f"{type(error).__name__}: {error}", True)
            damage.__cause__ = error
            self._handler(damage)  # raises, or accepts the loss
            _LOG.warning("%s: the shard is lost", url)
            return
        try:
            found = self._grouped(data, source, url, offset, ordinal)
            first = next(found, None)
            if first is not None:
                self.marks[number] = _mark_of(data.beginning, self._keys)
                yield first
            yield from found
        finally:
            data.close()

    def _open(self, url: str) -> dict[str, Any] | None:
        assert self._opener is not None  # understand() has found one
        try:
            source: dict[str, Any] | None = next(iter(self._opener([{"url": url}])), None)
        except Exception as error:
            raise SourceError(
                f"{url} cannot be opened ({error}): restore it, or leave it out of the urls"
            ) from error
        return source

    def _grouped(
        self, data: _Bytes, source: dict[str, Any], url: str, offset: int, ordinal: int
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        files: list[dict[str, Any]] = []
        prefix: str | None = None
        begin = sound = offset
        usual = 0  # the largest number of files in a sample so far
        walker = None
        try:
            data.skip(offset)
            walker = walk(data.read, data.skip, url, offset)
            member, _ = next(walker)
            while True:
                content = self._content(data, url, sound, member.name, member.size)
                sound = member.offset + padded(member.size)
                chosen = self._keys.chosen(member.name)
                key = None if chosen is None else self._keys.keys(chosen)[0]
                if key is not None:
                    if files and key != prefix:
                        yield from self._whole(files, begin, ordinal)
                        usual, files, ordinal = max(usual, len(files)), [], ordinal + 1
                    if not files:
                        begin, prefix = member.header, key
                    file = {"fname": chosen, "data": content, "__url__": url}
                    if "local_path" in source:
                        file["__local_path__"] = source["local_path"]
                    files.append(file)
                member, _ = walker.send(True)
        except StopIteration:
            pass
        except (TarError, *_BROKEN) as error:
            damage = error
            if not isinstance(error, TarError):
                damage = TarError(url, sound, f"{type(error).__name__}: {error}", True)
                damage.__cause__ = error
            self._handler(damage)  # raises, or accepts the loss
            # The last sample may lack files, unless no other sample has more.
            if not usual or len(files) < usual:
                files = []
            _LOG.warning("%s: %d samples are kept, the rest from byte %d on is lost", url, ordinal + bool(files), sound)
        finally:
            if walker is not None:
                walker.close()
        if files:
            yield from self._whole(files, begin, ordinal)

    @staticmethod
    def _content(data: _Bytes, url: str, sound: int, name: str, size: int) -> bytes:
        try:
            content = data.read(padded(size))
        except (OverflowError, MemoryError):
            content = b""  # a damaged header asks for more memory than there is; the file is not that long either
        if len(content) < size:
            raise TarError(url, sound, f"{name!r} needs {size} bytes, {len(content)} are left", True)
        return content[:size]

    def _whole(
        self, files: list[dict[str, Any]], begin: int, ordinal: int
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        # The same files give the same sample. So an ordinal is used up even if a handler drops the sample.
        url = files[0]["__url__"] if files else ""
        for sample in grouped(files, url, self._grouping):
            yield begin, ordinal, sample


# --- one stream -------------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """What determines the samples of a stream and their order.

    Attributes:
        streams: number of streams.
        shards: number of shards.
        shuffles: whether shards are shuffled in each pass.
        buffer: number of samples in a stretch, which are shuffled together; 1 for no shuffle.
    """

    streams: int
    shards: int
    shuffles: bool
    buffer: int

    def dealt(self, seed: int, passes: int, stream: int) -> tuple[list[int], int, int]:
        """A stream's shards in one pass. If there are few shards, streams share one, and each has every n-th sample.

        Returns:
            numbers of the shards, n, and the remainder of its samples' ordinals modulo n.
        """
        order = (Shuffled if self.shuffles else Sequential)(self.shards).epoch(seed, passes)
        if self.shards >= self.streams:
            return order[:].tolist()[stream :: self.streams], 1, 0
        own = stream % self.shards
        sharing = len(range(own, self.streams, self.shards))
        return order[own : own + 1].tolist(), sharing, stream // self.shards

    def stretch_length(self, number: int) -> int:
        """The number of samples in a stretch."""
        return min(self.buffer, _FIRST_STRETCH << min(number, 32))


class _Stream:
    """Reads one stream from a cursor on. `last_pass`: where it ends, None for no end.

    Attributes:
        began: the mark of the shard in which it began; 0 if no sample of it was read.
    """

    def __init__(
        self, shards: _Shards, layout: _Layout, seed: int, stream: int, cursor: _Cursor, last_pass: int | None
    ) -> None:
        self._shards, self._layout, self._seed, self._stream = shards, layout, seed, stream
        self._last_pass = last_pass
        self.cursor = cursor
        self.began = 0
        self._stretch: list[_Raw] = []
        self._order: list[int] = []
        self._source: Iterator[_Raw] = iter(())
        self._ahead: _Raw | None = None  # the first sample of the next stretch, if it has been read
        self._open_pass()

    def close(self) -> None:
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    @property
    def ended(self) -> bool:
        return self._last_pass is not None and self.cursor.passes > self._last_pass

    def _open_pass(self) -> None:
        self.close()
        self._source = iter(()) if self.ended else self._read(self.cursor)
        self._ahead = None

    def _read(self, cursor: _Cursor) -> Iterator[_Raw]:
        numbers, every, remainder = self._layout.dealt(self._seed, cursor.passes, self._stream)
        offset, ordinal, marks, begins = cursor.offset, cursor.ordinal, self._shards.marks, bool(cursor.mark)
        for place in range(cursor.place, len(numbers)):
            number = numbers[place]
            for begin, count, sample in self._shards.samples(number, offset, ordinal):
                if begins and place == cursor.place:
                    self.began, begins = marks[number], False
                if count % every == remainder:
                    yield _Raw(place, begin, count, number, marks[number], sample)
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
            self.cursor = _Cursor(self.cursor.passes, first.place, first.offset, first.ordinal, stretch, 0, first.mark)
        for _ in range(_MOST_EMPTY_PASSES):
            if self._ahead is not None or self.ended:
                return
            self.cursor = _Cursor(self.cursor.passes + 1)
            self._open_pass()
            self._ahead = next(self._source, None)
        if self._ahead is None and not self.ended:
            raise SourceError(
                f"stream {self._stream} of {self._layout.streams} has no samples: pass fewer streams, or check its "
                "shards"
            )

    def __next__(self) -> tuple[int, dict[str, Any]]:
        """The key of the next sample's random stream, and the sample."""
        while not self._stretch:
            if self.ended:
                raise StopIteration
            self._fill()
        raw = self._stretch[self._order[self.cursor.done]]
        key = derive_key(Purpose.SAMPLE, self._seed, self.cursor.passes, raw.shard, raw.ordinal)
        self.cursor = self.cursor._replace(done=self.cursor.done + 1)
        if self.cursor.done == len(self._stretch):
            self._settle()
        return key, raw.sample


# If a stream's shard of a pass is empty, the next passes may give it others, because shards are shuffled.
_MOST_EMPTY_PASSES = 100


# --- in a reading process ---------------------------------------------------------------------------------------------


class _Request(NamedTuple):
    """A request for a stream's next batch.

    Attributes:
        session: identifies the session.
        seed: of the order and of the random streams.
        stream: number of the stream.
        cursor: its position when the session began.
        batches: number of earlier batches in the session from this stream.
        last_pass: the pass with which it ends; None for none.
    """

    session: int
    seed: int
    stream: int
    cursor: _Cursor
    batches: int
    last_pass: int | None


class _Batch(NamedTuple):
    """The answer to a request, and the stream's position after it.

    Attributes:
        ended: nothing was left.
        began: the mark of the shard in which the stream began.
    """

    answer: Answer
    cursor: _Cursor
    ended: bool
    began: int


class StreamedReader:
    """Reads batches stream by stream. Streams stay open between requests."""

    def __init__(
        self, pipeline: Pipeline, keys: Keys, layout: _Layout, randomness: bool, batches: bool, refill: bool
    ) -> None:
        self.dataset = pipeline.dataset
        self._shards, self._layout = _Shards(pipeline, keys), layout
        self._sample_stages = pipeline.sample_stages
        self._batch_stages = pipeline.batch_stages if batches else []
        self._batch_size, self._drop_last = pipeline.batch_size or 1, pipeline.drop_last
        self._refill = refill
        self._random_streams = Streams(self._sample_stages, self._batch_stages, keys) if randomness else None
        self._open: dict[int, tuple[int, int, _Stream]] = {}  # session, batches taken, the stream
        self._session: int | None = None

    def __call__(self, request: _Request) -> _Batch:
        """Read the batch."""
        if self._random_streams is not None and self._session != request.session:
            self._session = request.session
            self._random_streams.begin_pass()
        session, count, stream = self._open.pop(request.stream, (0, 0, None))
        if stream is None or session != request.session or count > request.batches:
            if stream is not None:
                stream.close()
            count = 0
            stream = _Stream(
                self._shards, self._layout, request.seed, request.stream, request.cursor, request.last_pass
            )
        while True:
            batch = self._next(stream)
            count += 1
            if count > request.batches or batch.ended:
                break
        self._open[request.stream] = (request.session, count, stream)
        return batch

    def _next(self, stream: _Stream) -> _Batch:
        survivors: list[Any] = []
        keys: list[int] = []
        read: list[tuple[int, dict[str, Any]]] = []
        while True:
            # Reading shards may draw random numbers, so it comes before any random stream begins.
            raws = list(itertools.islice(_Rest(stream), self._batch_size - (len(survivors) if self._refill else 0)))
            if not raws:
                break
            if len(raws) < self._batch_size and self._drop_last and not self._refill:
                return _Batch(Answer([], []), stream.cursor, True, stream.began)
            self._run(raws, survivors, keys)
            read += raws
            if survivors and (not self._refill or len(survivors) >= self._batch_size):
                break
        if not survivors:
            return _Batch(Answer([], []), stream.cursor, True, stream.began)
        answer = self._batched(survivors, keys)
        if self._random_streams is not None and self._random_streams.made_late():
            if self._refill:  # how far it reads may depend on what was drawn
                self._random_streams.warn_of_late()
            else:
                survivors, keys = [], []
                self._run(read, survivors, keys)
                answer = self._batched(survivors, keys)
        return _Batch(answer, stream.cursor, False, stream.began)

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


class _Rest:
    """A stream as an iterator that can be paused and continued."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def __iter__(self) -> _Rest:
        return self

    def __next__(self) -> tuple[int, dict[str, Any]]:
        return next(self._stream)


# --- the adapter ------------------------------------------------------------------------------------------------------


class _Cursors(NamedTuple):
    """A rank's part of a state.

    Attributes:
        following: number of the next batch of all ranks, modulo the number of streams.
        size: batches of all ranks in an epoch of with_epoch; 0 for this world's own number.
        cursors: the position of each stream that has been read.
    """

    following: int
    size: int
    cursors: dict[int, _Cursor]

    def __str__(self) -> str:
        cursors = ",".join(f"{stream}:{cursor}" for stream, cursor in sorted(self.cursors.items()))
        return f"next={self.following};size={self.size};{cursors}"


# Cursors of older states have no mark.
_PLACE = re.compile(r"next=(\d{1,9});size=(\d{1,18});((?:\d{1,3}:\d{1,18}(?:\.\d{1,18}){5,6}(?:,|$))*)")


def _parse_cursors(detail: str) -> _Cursors:
    match = _PLACE.fullmatch(detail)
    if match is None:
        raise StateCorruptError("the state's detail is not from a streamed pipeline: load an undamaged state")
    cursors = {}
    for part in match[3].split(",") if match[3] else ():
        stream, _, cursor = part.partition(":")
        cursors[int(stream)] = _Cursor(*map(int, cursor.split(".")))
    return _Cursors(int(match[1]), int(match[2]), cursors)


class StreamedAdapter(Adapter):
    """A pipeline over shards that can only be read from their start. The unit is a batch."""

    name: ClassVar[str] = "webdataset-streams"
    unit = "batch"
    seals_detail = True

    def __init__(
        self, source: Any, options: Options, pipeline: Pipeline, keys: Keys, streams: int, reason: str
    ) -> None:
        super().__init__(source, options)
        self._pipeline, self._reason = pipeline, reason
        self._layout = _Layout(streams, len(pipeline.urls), pipeline.shuffles, max(1, pipeline.buffer))
        self.seed = pipeline.seed
        self._refill = bool(options.settings.get("refill", False))
        self.leads = pipeline.limit is not None
        whole = not pipeline.late_sample_stages
        if pipeline.limit is not None and pipeline.limit.passes is not None:
            raise UnsupportedSourceError("repeat(n) on shards that are streamed: use with_epoch, or loop over epochs")
        self._reader = StreamedReader(pipeline, keys, self._layout, options.streams, whole, self._refill)
        self._finish = Finish(pipeline, options.streams, whole)
        self._server = None if pipeline.loader is None else Server(pipeline.loader, options)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """WebDatasetAdapter makes this adapter."""
        return False

    @property
    def _workers(self) -> int:
        loader = self._pipeline.loader
        return max(1, loader.num_workers) if loader is not None else 1

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> None:
        """Unknown: only reading tells how many samples a shard has."""
        return

    def describe(self) -> dict[str, str]:
        """The shards, by name and by quick identities of local ones, and how they are dealt."""
        layout = self._layout
        lines = (f"{url.rpartition('/')[2]} {quick_identity(url)}" for url in self._pipeline.urls)
        names = zlib.crc32("\n".join(lines).encode())
        shuffle = f"{layout.buffer}" if layout.shuffles else "no"
        described = {"order": f"streams(shuffle={shuffle})", "shards": f"{layout.shards}:{names:08x}"}
        described["streams"] = f"{layout.streams}"
        described["epochs"] = "counted" if self._pipeline.limit is not None else "passes"
        return described

    def drawing(self) -> tuple[object, ...]:
        """The stages, wherever they run."""
        return tuple(self._pipeline.stages)

    def capabilities(self) -> Capabilities:
        """As in the README's table."""
        streams = self._layout.streams
        where = f"where ranks x workers divides the {streams} streams"
        elastic = Capability(True, f"{where}; with several ranks save midepoch.gather(loader)")
        if self._refill:
            elastic = Capability(False, "refill=True was stated")
        return Capabilities(
            exact_order=Capability(True, "the order of shards and of each stretch is a function of seed and pass"),
            exact_augmentations=promises.augmentations(
                self.options, "numbers drawn for a whole batch are exact on the same split"
            ),
            constant_time_resume=Capability(
                True, f"each stream reads one shard again, up to its offset, and no stage runs ({self._reason})"
            ),
            elastic_world=elastic,
            elastic_workers=Capability(True, where),
            rank_independent=Capability(False, "each rank knows only its own streams: use midepoch.gather(loader)"),
        )

    # --- states ---

    def part(self, detail: str, saved_world_size: int, world: World) -> str:
        """The cursors of this rank's streams: its own part, or all parts together in another world."""
        if saved_world_size == world.world_size and saved_world_size > 1:
            return part_of(detail, world.rank, world.world_size)
        parts = parts_in(detail)
        if len(parts) < saved_world_size:
            raise StateMismatchError(
                f"this state holds only the part of rank {', '.join(map(str, parts))} of {saved_world_size}, but this "
                f"is a world of {world.world_size}: save what midepoch.gather(loader) returns (call it on every rank)"
            )
        places = [_parse_cursors(part) for part in parts.values() if part]
        if not places:
            return ""
        cursors = {stream: cursor for place in places for stream, cursor in place.cursors.items()}
        return str(_Cursors(max(place.following for place in places), places[0].size, cursors))

    def lead(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The next epoch continues where with_epoch ended one."""
        if self._pipeline.limit is None or not here.detail or there != (here.epoch + 1, 0):
            return ""
        return str(_parse_cursors(here.detail)._replace(size=0))

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check that the cursors lie within the streams, and that this world can share the streams."""
        if not detail:
            if position:
                raise StateCorruptError(
                    f"the state stands at position {position} but lacks this rank's own part: load a complete state"
                )
            return
        place, layout = _parse_cursors(detail), self._layout
        for stream, cursor in place.cursors.items():
            sensible = stream < layout.streams and cursor.place <= layout.shards and max(cursor) < 1 << 60
            if self._pipeline.limit is None:
                sensible = sensible and epoch <= cursor.passes <= epoch + 1
            if not sensible or cursor.done > layout.buffer:
                raise StateCorruptError(f"the state's cursor of stream {stream} is invalid: load an undamaged state")
        readers = world.world_size * self._workers
        if layout.streams % readers:
            raise StateMismatchError(
                f"{layout.streams} streams cannot be shared by {world.world_size} ranks x {self._workers} workers: run "
                f"on numbers whose product divides {layout.streams}"
            )

    # --- sessions ---

    def open(self, run: Run) -> Session:
        """Open a session at this rank's cursors."""
        streams, world = self._layout.streams, run.world
        self._check_world(run)
        place = _parse_cursors(run.detail) if run.detail else _Cursors(0, 0, {})
        limit = self._pipeline.limit
        left = None
        size = place.size
        if limit is not None and limit.units is not None:
            workers = self._workers if limit.of_worker else 1
            size = size or -(-limit.units // (self._pipeline.batch_size or 1)) * workers * world.world_size
            left = -(-max(0, size - run.position) // world.world_size)
        own = range((place.following + world.rank) % world.world_size, streams, world.world_size)
        cursors = {stream: place.cursors.get(stream, _Cursor(run.epoch)) for stream in own}
        others = any(cursor.passes == run.epoch for cursor in place.cursors.values())
        place = _Cursors(place.following, size, cursors)
        known = _Known(self._pipeline.urls, self._layout, run.seed, place.cursors, self.options.verify)
        session = _StreamedSession(self._finish, place, streams, world, left, known)
        session.others_go_on = limit is None and others
        self._finish.begin_pass()
        requests = _requests(run, place, streams, run.epoch if limit is None else None, left)
        if self._server is None:
            session.begin(map(self._reader, requests), _nothing)
        else:
            session.begin(*self._server(self._reader, requests, run))
        return session

    def _check_world(self, run: Run) -> None:
        world, streams, limit = run.world, self._layout.streams, self._pipeline.limit
        readers = world.world_size * self._workers
        if streams % readers:
            raise UnsupportedSourceError(
                f"{streams} streams cannot be shared by {world.world_size} ranks x {self._workers} workers: pass "
                f"streams={readers} or a multiple of it, always the same for this data"
            )
        if world.world_size == 1:
            return
        if not self._pipeline.splits and self.options.shard is None:
            raise UnsupportedSourceError(
                "the pipeline has no nodesplitter, so each rank may already have its own urls: pass shard=True to "
                "wrap() if every rank has the same urls (midepoch shards them), or world=midepoch.World() and a state "
                "for each rank if they differ"
            )
        if (limit is None or limit.units is None) and run.tail != "uneven":
            raise UnsupportedSourceError(
                f"only reading all shards tells how many batches each of {world.world_size} ranks gets "
                f"({self._reason}): use with_epoch(n), which gives each rank n; or pass tail='uneven' if your training "
                "loop allows ranks to end at different times"
            )

    def close(self) -> None:
        """End persistent worker processes."""
        if self._server is not None:
            self._server.close()


def _nothing() -> None:
    pass


def _requests(run: Run, place: _Cursors, streams: int, last_pass: int | None, left: int | None) -> Iterator[_Request]:
    session, world = next(_nonces), run.world
    counts: dict[int, int] = {}
    for step in itertools.count() if left is None else range(left):
        stream = (place.following + step * world.world_size + world.rank) % streams
        count = counts.get(stream, 0)
        counts[stream] = count + 1
        yield _Request(session, run.seed, stream, place.cursors[stream], count, last_pass)


class _Known:
    """Compares the shards in which streams began with the marks in their cursors, before a batch of them is given."""

    def __init__(
        self, urls: list[str], layout: _Layout, seed: int, cursors: dict[int, _Cursor], verify: Verify
    ) -> None:
        self._urls, self._layout, self._seed, self._verify = urls, layout, seed, verify
        marked = {} if verify == "off" else cursors
        self.left = {stream: cursor for stream, cursor in marked.items() if cursor.mark}
        self._told = False

    def compare(self, stream: int, began: int) -> None:
        """Raise StateMismatchError, or warn once, if the stream's shard has another content now."""
        cursor = self.left.get(stream)
        if cursor is not None and began not in (0, cursor.mark) and not self._told:
            number = self._layout.dealt(self._seed, cursor.passes, stream)[0][cursor.place]
            tell_of_another(f"the beginning of {self._urls[number]}", self._verify)
            self._told = True
        self.left.pop(stream, None)


class _StreamedSession(Session):
    """This rank's batches. A mark holds the cursors of its streams, and which stream is next."""

    marks = True

    def __init__(
        self, finish: Finish, place: _Cursors, streams: int, world: World, left: int | None, known: _Known
    ) -> None:
        self._finish, self._size, self._streams, self._world, self._left = finish, place.size, streams, world, left
        self._cursors = dict(place.cursors)
        self._following = place.following
        self._known = known
        self._ended_in_a_row = 0

    def begin(self, answers: Iterator[_Batch], close: Callable[[], None]) -> None:
        """Set the reader's answers to hand out."""
        self._answers, self._close = answers, close

    def take(self) -> Any:
        """The next batch that is not empty."""
        while not (values := self._taken()):
            if self._left is not None:
                # An empty batch still counts in an epoch of with_epoch, so the position moves past it.
                self.drift += 1
        return values[0]

    def _taken(self) -> list[Any]:
        """The next batch; nothing if a stage behind the DataLoader dropped it."""
        while True:
            if self._left == 0 or self._ended_in_a_row >= self._streams // self._world.world_size:
                raise StopIteration
            batch = next(self._answers)
            stream = (self._following + self._world.rank) % self._streams
            if self._known.left:
                self._known.compare(stream, batch.began)
            self._following = (self._following + self._world.world_size) % self._streams
            self._cursors[stream] = batch.cursor
            if not batch.ended:
                break
            self._ended_in_a_row += 1
        self._ended_in_a_row = 0
        if self._left is not None:
            self._left -= 1
        values = batch.answer.values
        if self._finish.needed:
            first = batch.answer.keys[0] if batch.answer.keys else 0
            values = self._finish(batch.answer, extend_key(first, Purpose.BATCH, 1))
            self._finish.check(values, self._world)
        return values

    def mark(self) -> _Cursors:
        """The cursors of this rank's streams."""
        return _Cursors(self._following, self._size, dict(self._cursors))

    def detail(self, mark: _Cursors) -> str:
        """As text."""
        return str(mark)

    def following(self) -> str:
        """The cursors at which the next epoch continues."""
        return str(self.mark())

    def close(self) -> None:
        self._answers = iter(())
        self._close()
