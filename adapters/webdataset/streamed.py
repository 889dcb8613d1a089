"""Shards that can only be read from their start: pipes, compressed archives, servers without byte ranges.

The shards of a pass are dealt to a fixed number of streams. Each stream is read in order by one reader, and the streams
take turns to give a batch. A stream's cursor says at which byte of which shard its current stretch of samples begins,
and how many samples of the stretch are done. So a resume reads again at most one shard's beginning and one stretch for
each stream.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from midepoch.adapters.webdataset.finish import Finish
from midepoch.adapters.webdataset.index import Keys
from midepoch.adapters.webdataset.pipeline import Pipeline
from midepoch.adapters.webdataset.shards import quick_identity
from midepoch.adapters.webdataset.stream_reader import StreamBatch, StreamedReader, StreamRequest
from midepoch.adapters.webdataset.streams import Cursor, Cursors, Layout, parse_cursors
from midepoch.errors import StateCorruptError, StateMismatchError, UnsupportedSourceError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.loader.verify import Verify, tell_of_another
from midepoch.order.keys import extend_key
from midepoch.randomness.streams import Purpose
from midepoch.reading.workers import Server
from midepoch.state.parts import part_of, parts_in
from midepoch.world import World

__all__ = ["StreamedAdapter"]

_nonces = itertools.count(1)


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
        self._layout = Layout(streams, len(pipeline.urls), pipeline.shuffles, max(1, pipeline.buffer))
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
        places = [parse_cursors(part) for part in parts.values() if part]
        if not places:
            return ""
        cursors = {stream: cursor for place in places for stream, cursor in place.cursors.items()}
        return str(Cursors(max(place.following for place in places), places[0].size, cursors))

    def lead(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The next epoch continues where with_epoch ended one."""
        if self._pipeline.limit is None or not here.detail or there != (here.epoch + 1, 0):
            return ""
        return str(parse_cursors(here.detail)._replace(size=0))

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check that the cursors lie within the streams, and that this world can share the streams."""
        if not detail:
            if position:
                raise StateCorruptError(
                    f"the state stands at position {position} but lacks this rank's own part: load a complete state"
                )
            return
        place, layout = parse_cursors(detail), self._layout
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
        place = parse_cursors(run.detail) if run.detail else Cursors(0, 0, {})
        limit = self._pipeline.limit
        left = None
        size = place.size
        if limit is not None and limit.units is not None:
            workers = self._workers if limit.of_worker else 1
            size = size or -(-limit.units // (self._pipeline.batch_size or 1)) * workers * world.world_size
            left = -(-max(0, size - run.position) // world.world_size)
        own = range((place.following + world.rank) % world.world_size, streams, world.world_size)
        cursors = {stream: place.cursors.get(stream, Cursor(run.epoch)) for stream in own}
        others = any(cursor.passes == run.epoch for cursor in place.cursors.values())
        place = Cursors(place.following, size, cursors)
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


def _requests(
    run: Run, place: Cursors, streams: int, last_pass: int | None, left: int | None
) -> Iterator[StreamRequest]:
    session, world = next(_nonces), run.world
    counts: dict[int, int] = {}
    for step in itertools.count() if left is None else range(left):
        stream = (place.following + step * world.world_size + world.rank) % streams
        count = counts.get(stream, 0)
        counts[stream] = count + 1
        yield StreamRequest(session, run.seed, stream, place.cursors[stream], count, last_pass)


class _Known:
    """Compares the shards in which streams began with the marks in their cursors, before a batch of them is given."""

    def __init__(self, urls: list[str], layout: Layout, seed: int, cursors: dict[int, Cursor], verify: Verify) -> None:
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
        self, finish: Finish, place: Cursors, streams: int, world: World, left: int | None, known: _Known
    ) -> None:
        self._finish, self._size, self._streams, self._world, self._left = finish, place.size, streams, world, left
        self._cursors = dict(place.cursors)
        self._following = place.following
        self._known = known
        self._ended_in_a_row = 0

    def begin(self, answers: Iterator[StreamBatch], close: Callable[[], None]) -> None:
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

    def mark(self) -> Cursors:
        """The cursors of this rank's streams."""
        return Cursors(self._following, self._size, dict(self._cursors))

    def detail(self, mark: Cursors) -> str:
        """As text."""
        return str(mark)

    def following(self) -> str:
        """The cursors at which the next epoch continues."""
        return str(self.mark())

    def close(self) -> None:
        self._answers = iter(())
        self._close()
