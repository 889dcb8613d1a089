"""DALI's dynamic mode (nvidia.dali.experimental.dynamic): a reader's epochs, resumed by DALI's own `Checkpoint`.

loader = midepoch.wrap(functools.partial(reader.next_epoch, batch_size=32), then=decode_and_augment)
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import nvidia.dali

from midepoch.adapters.dali import private
from midepoch.adapters.dali.graph import crc_of_data, material, short
from midepoch.errors import SourceError, StateCorruptError, StateError, StateMismatchError, UnsupportedSourceError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.state.codec import decode, encode
from midepoch.state.format import PIECES
from midepoch.world import World

__all__ = ["DynamicAdapter"]


def _instead(reader: str = "reader") -> str:
    return (
        f"wrap its epochs, midepoch.wrap(functools.partial({reader}.next_epoch, batch_size=...)), and pass what is "
        "done with its batches as then="
    )


def _readers() -> Any:
    """The class of dynamic readers; None as long as nobody has imported them."""
    dynamic = sys.modules.get("nvidia.dali.experimental.dynamic")
    return None if dynamic is None else private.dynamic_readers()


def _is_reader(value: object) -> bool:
    kind = _readers()
    return kind is not None and isinstance(value, kind)


def _reader_of(source: Any) -> Any:
    """The reader whose epochs a function returns; None if it is another function."""
    method = source.func if isinstance(source, functools.partial) else source
    if not isinstance(method, types.MethodType) or not _is_reader(method.__self__):
        return None
    return method.__self__ if method.__name__ == "next_epoch" else None


class DynamicAdapter(Adapter):
    """A partial of a dynamic reader's `next_epoch`. The unit is one process's batch."""

    name: ClassVar[str] = "dali-dynamic"
    facts = Facts("batch", remembers=False, departs=frozenset({"order", "traces"}))
    seals_detail = True

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._reader = _reader_of(source)
        keywords = source.keywords if isinstance(source, functools.partial) else {}
        batch_size = keywords.get("batch_size")
        if type(batch_size) is not int or keywords.get("capture"):
            why = "capture=True, of which DALI keeps no checkpoints" if keywords.get("capture") else "no batch_size"
            raise UnsupportedSourceError(f"{why}: {_instead()}")
        self._samples = batch_size
        self._state = private.DynamicState(self._reader, batch_size)  # refuses a reader that was read
        self._shard = self._state.shard
        self._place = (0, 0)  # of the reader
        self._running: Iterator[Any] | None = None  # an epoch that was begun

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A dynamic reader, or whatever reads one."""
        if _readers() is None:
            return False
        held = private.read_by(source)
        return _is_reader(source) or _reader_of(source) is not None or any(map(_is_reader, held))

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter | None:
        """Refused unless midepoch sees where the reader's epochs begin and end."""
        if _reader_of(source) is None:
            name = getattr(source, "__name__", type(source).__name__)
            held = {"reader": source} if _is_reader(source) else private.named_in(source)
            variable, reader = next((each, value) for each, value in held.items() if _is_reader(value))
            raise UnsupportedSourceError(
                f"{name} reads {type(reader).__name__}, a reader of DALI's dynamic mode, and each pass goes on where "
                f"the reader stands: {_instead(variable)}"
            )
        return cls(source, options)

    def _batches(self, epoch: int) -> int:
        """Of this process."""
        return -(-self._state.samples(epoch) // self._samples)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Batches of all ranks."""
        return self._batches(epoch) * world.world_size

    def describe(self) -> dict[str, str]:
        """The reader, how it is set up, what it reads, and the batch size."""
        settings = [(name, repr(value)) for name, value in material(self._state.arguments, is_reader=True)]
        return {
            "unit": "batch",
            "dali": ".".join(nvidia.dali.__version__.split(".")[:2]),
            "reader": type(self._reader).__name__,
            "settings": short(repr(settings)),
            f"settings{PIECES}": " ".join(f"{name}={short(value)}" for name, value in settings),
            "data": f"{crc_of_data(self._state.arguments, self._state.texts):08x}",
            "batch_size": str(self._samples),
        }

    def capabilities(self) -> Capabilities:
        """What DALI's Checkpoint restores: the reader's place."""
        return Capabilities(
            exact_order=Capability(True, "DALI's checkpoint holds the state of the reader"),
            exact_augmentations=Capability(
                False,
                "numbers of ndd.random are not restored; those that then= draws from python's, numpy's or torch's "
                "generators are",
            ),
            constant_time_resume=Capability(True, "DALI replays indices, and reads and decodes nothing"),
            elastic_world=Capability(False, "DALI's checkpoint is for one number of shards: use dali.readers for more"),
            elastic_workers=promises.NO_WORKERS,
            rank_independent=Capability(False, "each rank's reader knows only its part: use midepoch.gather(loader)"),
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """The text of DALI's checkpoint, and the reader's shard."""
        if not detail:
            if epoch or position:
                raise StateCorruptError("the state lacks DALI's own checkpoint: load a complete state")
            return
        found = decode(detail)
        if type(found) is not list or [*map(type, found)] != [str, int, int]:
            raise StateCorruptError(
                "the state's detail is not a checkpoint of DALI's dynamic mode: use an undamaged state"
            )
        for name, before, now in zip(("shard_id", "num_shards"), found[1:], self._shard, strict=True):
            if before != now:
                raise StateMismatchError(
                    f"{name} differs: the state was saved with {before}, this reader has {now}; make the reader as it "
                    "was, or start over without the state"
                )

    def open(self, run: Run) -> Session:
        """The reader's batches from the position on."""
        shard, shards = self._shard
        world = run.world
        if self.options.shard is not False and (shard, shards) != (world.rank, world.world_size):
            raise UnsupportedSourceError(
                f"the reader has num_shards={shards}, shard_id={shard}, but this is rank {world.rank} of "
                f"{world.world_size}: write num_shards={world.world_size}, shard_id={world.rank}, or pass shard=False "
                "if the ranks are meant to read these shards"
            )
        return _DynamicSession(self, run)

    # --- the reader ---

    def reach(self, run: Run) -> Iterator[Any]:
        """An epoch of the reader whose next batch is the run's first."""
        place, running = (run.epoch, run.position // run.world.world_size), self._running
        self._running = None
        if run.detail or place == (0, 0):
            if run.detail or self._place != place:
                self._state.load(str(decode(run.detail)[0]) if run.detail else "", run.epoch)
        else:
            while running is not None or self._place < place:  # after a break: only reading leads on
                for _ in running if running is not None else self._epoch():
                    pass
                running, self._place = None, (self._place[0] + 1, 0)
            if self._place != place:
                raise StateError("a dynamic reader of DALI goes forward only: load a state instead")
        self._place = place
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        return iter(self._state.reader.next_epoch(**self.source.keywords))

    def stood(self, place: tuple[int, int], running: Iterator[Any] | None) -> None:
        """A session has left the reader here. `running`: the epoch, if it has not ended."""
        self._place, self._running = place, running

    def ended(self, whole: bool) -> None:
        """An epoch has ended. Not `whole`: it was restored, and DALI counts from the place where that was."""
        if not whole:
            self._state.next_shard()

    def now(self) -> str:
        """The reader's state, and its shard."""
        return encode([self._state.text(), *self._shard])


class _DynamicSession(Session):
    def __init__(self, adapter: DynamicAdapter, run: Run) -> None:
        self._adapter, self._run = adapter, run
        assert run.share is not None  # its size is known
        self._left, self._taken = run.share.steps, 0
        self._batches: Iterator[Any] | None = None

    def take(self) -> Any:
        """The next batch."""
        if not self._left:
            raise StopIteration
        if self._batches is None:
            self._batches = self._adapter.reach(self._run)
        try:
            batch = next(self._batches)
        except StopIteration:
            raise SourceError(
                f"DALI ended epoch {self._run.epoch} {self._left} batches early: load the last state"
            ) from None
        self._left, self._taken = self._left - 1, self._taken + 1
        if not self._left:
            whole = not self._run.position
            if whole:
                for _ in self._batches:  # lets DALI count the epoch
                    pass
            self._adapter.ended(whole)
        return batch

    def bookmark(self) -> str:
        """The reader's state."""
        return self._run.detail if self._batches is None else self._adapter.now()

    def detail(self, bookmark: str | None) -> str:
        """The reader's state, if `bookmark` was called then."""
        if bookmark is None:
            raise StateError(
                "the reader only has its current state, not that of earlier batches: save when no batch is in flight, "
                "or pass remember=, the number of batches in flight, to midepoch.wrap"
            )
        return bookmark

    def next_epoch_detail(self) -> str:
        """The reader's state at the epoch's end."""
        return self.bookmark()

    def close(self) -> None:
        """Leave the reader where it stands."""
        batches, self._batches = self._batches, None
        if batches is None:
            return
        run = self._run
        if self._left:
            self._adapter.stood((run.epoch, run.position // run.world.world_size + self._taken), batches)
        else:
            self._adapter.stood((run.epoch + 1, 0), None)
