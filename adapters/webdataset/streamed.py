"""Shards that can only be read from their start: pipes, compressed archives, servers without byte ranges.

The shards of a pass are dealt to a number of streams, which the user sets, or the world in which an epoch begins. Each
stream is read in order by one reader, and the streams take turns to give a batch. A stream's cursor says at which byte
of which shard its current stretch of samples begins, and how many samples of the stretch are done. So a resume reads
again at most one shard's beginning and one stretch for each stream.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

from midepoch.adapters.webdataset.finish import Finish
from midepoch.adapters.webdataset.index import Keys
from midepoch.adapters.webdataset.pipeline import Pipeline
from midepoch.adapters.webdataset.shard_streams import (
    Cursor,
    Cursors,
    Layout,
    StreamBatch,
    StreamedReader,
    StreamRequest,
    parse_cursors,
)  # fmt: skip
from midepoch.adapters.webdataset.shards import quick_identity
from midepoch.errors import StateCorruptError, StateMismatchError, UnsupportedSourceError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Reach, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.loader.states import Verify, tell_of_another
from midepoch.reading.workers import Server
from midepoch.state.parts import part_of, parts_in
from midepoch.world import World

__all__ = ["MOST_STREAMS", "StreamedAdapter"]

MOST_STREAMS = 4096

# The number of streams unless the user sets it. Any number of readers that divides it can share them.
_STREAMS = (12, 6, 4, 3, 2, 1)


class StreamedAdapter(Adapter):
    """A pipeline over shards that can only be read from their start. The unit is a batch."""

    name: ClassVar[str] = "webdataset-streams"

    def __init__(self, source: Any, options: Options, pipeline: Pipeline, keys: Keys, reason: str) -> None:
        super().__init__(source, options)
        self._pipeline, self._reason = pipeline, reason
        stated: int | None = options.settings.get("streams")
        self._is_stated = stated is not None
        # A stream leaves out what does not fill its last batch, and so does each worker of a plain pipeline. So there
        # are no more streams than readers, unless the user says so, and each keeps its shards.
        leaves_out = pipeline.drop_last and pipeline.limit is None and pipeline.draws is None
        self._usual = (1,) if leaves_out else _STREAMS
        layout = Layout(
            1, len(pipeline.urls), pipeline.shuffles, max(1, pipeline.buffer), pipeline.draws, fixed=leaves_out
        )
        self._layout = layout._replace(streams=stated or next(n for n in self._usual if n <= max(1, layout.places)))
        self._streams = self._layout.streams  # of the open session, or of the last one
        # Each stream batches by itself.
        self.facts = Facts("batch", seed=pipeline.seed, departs=frozenset({"order", "tail"}))
        # With with_epoch, an epoch begins where the one before has ended.
        self.reach = Reach.EPOCHS if pipeline.limit is None else Reach.STATES
        if pipeline.limit is not None and pipeline.limit.passes is not None:
            raise UnsupportedSourceError("repeat(n) on shards that are streamed: use with_epoch, or loop over epochs")
        refill = bool(options.settings.get("refill", False))
        self._reader = StreamedReader(pipeline, keys, self._layout, options.streams, refill)
        self._finish = Finish(pipeline, options.streams)
        self._server = Server(pipeline.loader, options)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """WebDatasetAdapter makes this adapter."""
        return False

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> None:
        """Unknown: only reading tells how many samples a shard has."""
        return

    def describe(self) -> dict[str, str]:
        """The shards, by name and by quick identities of local ones, and how they are dealt."""
        layout = self._layout
        lines = (f"{url.rpartition('/')[2]} {quick_identity(url)}" for url in self._pipeline.urls)
        names = zlib.crc32("\n".join(lines).encode())
        shuffle = f"{layout.buffer}" if layout.shuffles else "no"
        drawn = "" if layout.draws is None else f",{layout.draws.describe()}"
        described = {"order": f"streams(shuffle={shuffle}{drawn})", "shards": f"{layout.shards}:{names:08x}"}
        described["streams"] = f"{layout.streams}"
        described["epochs"] = "counted" if self._pipeline.limit is not None else "passes"
        return described

    def drawing(self) -> tuple[object, ...]:
        """The stages, wherever they run."""
        return tuple(self._pipeline.stages)

    def capabilities(self) -> Capabilities:
        """As in the README's table."""
        streams = self._streams
        where = f"where ranks x workers divides the {streams} streams"
        if not self._is_stated:
            where += ", whose number is chosen anew where an epoch begins in a world that cannot share them"
        order = self._pipeline.exact_order
        if self._pipeline.limit is None:
            order = replace(order, reason=f"{order.reason}; each stream ends with a batch of its own")
        alone = Capability(False, "there is one stream, which one process reads: pass streams=n, always the same")
        elastic = (
            Capability(True, f"{where}; with several ranks save midepoch.gather(loader)") if streams > 1 else alone
        )
        return Capabilities(
            exact_order=order,
            exact_augmentations=promises.augmentations(
                self.options, "numbers drawn for a whole batch are exact on the same split"
            ),
            constant_time_resume=Capability(
                True, f"each stream reads one shard again, up to its offset, and no stage runs ({self._reason})"
            ),
            elastic_world=elastic,
            elastic_workers=Capability(True, where) if streams > 1 else alone,
            rank_independent=Capability(False, "each rank knows only its own streams: use midepoch.gather(loader)"),
        )

    # --- the number of streams ---

    def _streams_for(self, world: World) -> int:
        """The number of streams of an epoch that begins in this world.

        Raises:
            UnsupportedSourceError: there are too many readers, or the user has set another number.
        """
        streams, readers = self._layout.streams, world.world_size * self._pipeline.workers
        if streams % readers == 0:
            return streams
        if readers > MOST_STREAMS:
            raise UnsupportedSourceError(
                f"{self._readers(world)} would read {readers} streams, and there are {MOST_STREAMS} at most: use fewer "
                "workers"
            )
        if self._is_stated:
            raise UnsupportedSourceError(
                f"{streams} streams cannot be shared by {self._readers(world)}: pass streams={readers} or a multiple "
                "of it, always the same for this data, or leave streams= out"
            )
        # As few worlds as possible need another number, and no shard is read by two streams, if that can be.
        most = min(MOST_STREAMS, self._layout.places)
        shared = (math.lcm(number, readers) for number in self._usual)
        return next((number for number in shared if number <= most), readers)

    def _beginning(self, streams: int) -> str:
        return "" if streams == self._layout.streams else str(Cursors(streams))

    # --- states ---

    def rank_part(self, detail: str, saved_world_size: int, world: World) -> str:
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
        if len({place.streams for place in places}) > 1:
            raise StateCorruptError("the parts of the ranks have other numbers of streams: load an undamaged state")
        cursors = {stream: cursor for place in places for stream, cursor in place.cursors.items()}
        following = max(place.following for place in places)
        return str(Cursors(places[0].streams, following, places[0].size, cursors))

    def detail_at(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The next epoch continues where with_epoch ended one. It keeps the number of streams.

        At other beginnings it is the number of streams, if that is another than the fingerprint states.
        """
        if not here.detail or there != (here.epoch + 1, 0):
            try:
                return self._beginning(self._streams_for(world))
            except UnsupportedSourceError:  # it is raised where the epoch is opened
                return ""
        place = parse_cursors(here.detail)
        if self._pipeline.limit is None:
            return self._beginning(place.streams)
        return str(place._replace(size=0))

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check that the cursors lie within the streams, and that this world can share the streams."""
        if not detail:
            if position:
                raise StateCorruptError(
                    f"the state stands at position {position} but lacks this rank's own part: load a complete state"
                )
            return
        place, layout = parse_cursors(detail), self._layout
        streams = place.streams
        if streams > MOST_STREAMS or (self._is_stated and streams != layout.streams):
            raise StateCorruptError(f"the state has {streams} streams, which it cannot have: load an undamaged state")
        for stream, cursor in place.cursors.items():
            sensible = stream < streams and cursor.place <= layout.places and max(cursor) < 1 << 60
            if self._pipeline.limit is None:
                sensible = sensible and epoch <= cursor.passes <= epoch + 1
            if not sensible or cursor.done > layout.buffer:
                raise StateCorruptError(f"the state's cursor of stream {stream} is invalid: load an undamaged state")
        if (position or place.cursors) and streams % (world.world_size * self._pipeline.workers):
            raise StateMismatchError(self._cannot_share(streams, world))

    # --- sessions ---

    def open(self, run: Run) -> Session:
        """Open a session at this rank's cursors."""
        world, limit = run.world, self._pipeline.limit
        place = parse_cursors(run.detail) if run.detail else Cursors(self._layout.streams)
        streams = self._shared_by(run, place)
        self._check_world(run)
        left = None
        size = place.size
        if limit is not None and limit.units is not None:
            workers = self._pipeline.workers if limit.of_worker else 1
            size = size or -(-limit.units // (self._pipeline.batch_size or 1)) * workers * world.world_size
            left = -(-max(0, size - run.position) // world.world_size)
        own = range((place.following + world.rank) % world.world_size, streams, world.world_size)
        cursors = {stream: place.cursors.get(stream, Cursor(run.epoch)) for stream in own}
        place = Cursors(streams, place.following, size, cursors)
        requests = _requests(run, place, run.epoch if limit is None else None, left)
        answers, close = self._server(self._reader, requests, run)
        self._finish.begin_pass()
        following = self._beginning(streams) if limit is None else None
        session = _StreamedSession(answers, close, self._finish, world, place, left, following)
        session.verify = self.options.verify
        return session

    def _shared_by(self, run: Run, place: Cursors) -> int:
        """The number of streams of the epoch.

        Raises:
            UnsupportedSourceError: the run's world cannot share them.
        """
        streams = place.streams
        if streams % (run.world.world_size * self._pipeline.workers):
            if run.position or place.cursors:
                raise UnsupportedSourceError(self._cannot_share(streams, run.world))
            streams = self._streams_for(run.world)
        if streams != self._streams:
            self._streams = streams
            self.learned()
        return streams

    def _cannot_share(self, streams: int, world: World) -> str:
        until = "" if self._pipeline.limit is not None else ", at least for the rest of this epoch"
        more = "; with streams=12 from the start, more numbers do" if self._layout.fixed and not self._is_stated else ""
        return (
            f"{streams} streams cannot be shared by {self._readers(world)}: run on numbers whose product divides "
            f"{streams}{until}{more}"
        )

    def _readers(self, world: World) -> str:
        return f"{world.world_size} ranks x {self._pipeline.workers} workers"

    def _check_world(self, run: Run) -> None:
        world, limit = run.world, self._pipeline.limit
        self._pipeline.check_shared(world, self.options.shard)
        if world.world_size > 1 and (limit is None or limit.units is None) and run.tail != "uneven":
            raise UnsupportedSourceError(
                f"only reading all shards tells how many batches each of {world.world_size} ranks gets "
                f"({self._reason}): use with_epoch(n), which gives each rank n; or pass tail='uneven' if your training "
                "loop allows ranks to end at different times"
            )

    def close(self) -> None:
        """End persistent worker processes."""
        self._server.close()


def _requests(run: Run, place: Cursors, last_pass: int | None, left: int | None) -> Iterator[StreamRequest]:
    world, streams = run.world, place.streams
    for step in itertools.count() if left is None else range(left):
        stream = (place.following + step * world.world_size + world.rank) % streams
        yield StreamRequest(run.session, streams, run.seed, stream, place.cursors[stream], last_pass)


class _StreamedSession(Session):
    """This rank's batches. A bookmark holds the cursors of its streams, and which stream is next.

    Attributes:
        verify: what to do if the shard in which a stream begins is another than when the cursor was made.
    """

    verify: Verify = "off"

    def __init__(
        self,
        answers: Iterator[StreamBatch],
        close: Callable[[], None],
        finish: Finish,
        world: World,
        place: Cursors,
        left: int | None,
        following: str | None,
    ) -> None:
        self._answers, self._close, self._finish, self._world = answers, close, finish, world
        self._streams, self._following, self._size, cursors = place
        self._cursors, self._left = dict(cursors), left
        self._next_epoch = following  # its detail; None if it continues where this one ends
        self._unseen = {stream: cursor.mark for stream, cursor in cursors.items() if cursor.mark}
        self._ended_in_a_row = 0

    def take(self) -> Any:
        """The next batch that is not empty."""
        while not (values := self._taken()):
            if self._left is not None:
                # An empty batch still counts in an epoch of with_epoch, so the position moves past it.
                self.position_correction += 1
        return values[0]

    def _taken(self) -> list[Any]:
        """The next batch; nothing if a stage after the DataLoader dropped it."""
        while True:
            if self._left == 0 or self._ended_in_a_row >= self._streams // self._world.world_size:
                raise StopIteration
            batch = next(self._answers)
            stream = (self._following + self._world.rank) % self._streams
            if self._unseen:
                self._compare(self._unseen.pop(stream, 0), *batch.began)
            self._following = (self._following + self._world.world_size) % self._streams
            self._cursors[stream] = batch.cursor
            if not batch.ended:
                break
            self._ended_in_a_row += 1
        self._ended_in_a_row = 0
        if self._left is not None:
            self._left -= 1
        return self._finish(batch.answer, self._world) if self._finish.needed else batch.answer.values

    def _compare(self, mark: int, url: str, now: int) -> None:
        """Raise StateMismatchError, or warn once, if the shard in which a stream began has another content now."""
        if self.verify != "off" and mark and now not in (0, mark):
            self._unseen.clear()
            tell_of_another(f"the beginning of {url}", self.verify)

    def bookmark(self) -> Cursors:
        """The cursors of this rank's streams."""
        return Cursors(self._streams, self._following, self._size, dict(self._cursors))

    def detail(self, bookmark: Cursors) -> str:
        """As text."""
        return str(bookmark)

    def next_epoch_detail(self) -> str:
        """Where the next epoch begins, with its own size, which follows from the world then."""
        return str(self.bookmark()._replace(size=0)) if self._next_epoch is None else self._next_epoch

    def close(self) -> None:
        self._answers = iter(())
        self._close()
