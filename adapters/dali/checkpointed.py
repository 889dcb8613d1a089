"""What DALI's own checkpoints lead to: a place within an epoch, and by reading on, the beginning of the next one.

Both adapters of DALI's own readers build on this. Each rank keeps its own checkpoints.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any, NamedTuple

import nvidia.dali

from midepoch.adapters.dali import private
from midepoch.errors import SourceError, StateCorruptError, StateError, StateMismatchError, warn
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Reach, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.state.codec import decode, encode
from midepoch.world import World

__all__ = ["Checkpoint", "CheckpointedAdapter", "CheckpointedSession", "Where", "first_line"]

Where = tuple[int, int]
"""(epoch, position), as in the state."""


class Checkpoint(NamedTuple):
    """What a session needs to begin at a place, or to reach it by reading.

    Attributes:
        at: where DALI's checkpoints were taken; after an epoch's last batch, that is still in this epoch.
        shards: the number of shards that the readers divide their data into, and the shard of each reader if there are
            several shards.
        saved: a checkpoint for each pipeline; none for a source that has not been read.
    """

    at: Where
    shards: tuple[int, ...]
    saved: tuple[bytes, ...]

    def text(self) -> str:
        """For a state's `detail`."""
        return encode([list(self.at), list(self.shards), list(self.saved)])

    @classmethod
    def of(cls, detail: str) -> Checkpoint:
        """The opposite of `text`. Nothing stands for the very beginning.

        Raises:
            StateCorruptError: it is no such text.
        """
        if not detail:
            return cls((0, 0), (), ())
        try:
            at, shards, saved = decode(detail)
            kinds = [*map(type, at)], {*map(type, shards)}, {*map(type, saved)}
            if kinds != ([int, int], {int}, {bytes}) or shards[0] < 1:
                raise ValueError("unexpected content")
        except (TypeError, ValueError, IndexError) as error:
            raise StateCorruptError(f"DALI's part of the state is invalid ({error}); load an older state") from error
        return cls((at[0], at[1]), tuple(shards), tuple(saved))


class CheckpointedAdapter(Adapter):
    """A source that DALI's checkpoints restore. The unit is one process's batch."""

    facts = Facts("batch", departs=frozenset({"order", "traces"}))
    reach = Reach.STATES

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._live: LiveIterator | None = None
        self._latest: LiveIterator | None = None  # which a session may have

    @abstractmethod
    def make(self, checkpoint: Checkpoint, run: Run) -> Any:
        """An iterator that continues where the checkpoint was taken.

        It has a ``__next__`` that raises StopIteration where an epoch ends, ``reset()``, which begins the next one, and
        ``checkpoints()``.
        """

    @abstractmethod
    def end(self, iterator: Any) -> None:
        """Stop its threads, and free its memory."""

    @abstractmethod
    def stated_shards(self, world: World) -> tuple[int, ...]:
        """As `Checkpoint.shards`."""

    def describe(self) -> dict[str, str]:
        """The unit, and the format of the checkpoints."""
        return {"unit": "batch", "dali": ".".join(nvidia.dali.__version__.split(".")[:2])}

    def promised(self, augmentations: Capability) -> Capabilities:
        """What DALI's checkpoints restore of the order, with this promise for what is drawn."""
        return Capabilities(
            exact_order=Capability(True, "DALI's checkpoint holds the state of each reader"),
            exact_augmentations=augmentations,
            constant_time_resume=Capability(True, "DALI replays indices, and reads and decodes nothing"),
            elastic_world=Capability(False, "DALI's checkpoint is for one number of shards: use dali.readers for more"),
            elastic_workers=promises.NO_WORKERS,
            rank_independent=Capability(False, "each rank's readers know only their part: use midepoch.gather(loader)"),
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check the checkpoint's place and shards before DALI sees it."""
        checkpoint, shards = Checkpoint.of(detail), self.stated_shards(world)
        _check_way(checkpoint.at, (epoch, position))
        if detail and checkpoint.shards != shards:
            name, before, now = "num_shards", str(checkpoint.shards[0]), str(shards[0])
            if before == now:
                name, before, now = "shard_id", *(", ".join(map(str, each[1:])) for each in (checkpoint.shards, shards))
            raise StateMismatchError(
                f"{name} differs: the state was saved with {before}, this reader has {now}; build the reader as it "
                "was, or start over without the state"
            )

    def detail_at(self, here: Place, there: Where, seed: int, world: World) -> str:
        """The same checkpoint: the rest of its epoch is read, and thrown away."""
        detail, live = here.detail, self._latest
        if not detail and live is not None and live.place[0] == here.epoch != there[0]:
            detail = Checkpoint(live.place, self.stated_shards(world), live.saved()).text()
        _check_way(Checkpoint.of(detail).at, there)
        return detail

    def open(self, run: Run) -> Session:
        """Batches from the position on."""
        private.survive_forks()
        return CheckpointedSession(self, run)

    def begin_with(self, iterator: Any) -> None:
        """An iterator that has not been read."""
        self._live = LiveIterator(iterator, (0, 0))

    def lead_to(self, run: Run) -> LiveIterator:
        """An iterator at the run's checkpoint. The current one is used if it is there."""
        checkpoint, live = Checkpoint.of(run.detail), self._live
        if live is None or not live.is_at(checkpoint):
            self.close()  # frees its memory before another one is made
            live = LiveIterator(self.make(checkpoint, run), checkpoint.at, checkpoint.saved or None)
        self._live, self._latest = None, live
        return live

    def keep(self, live: LiveIterator) -> None:
        """Take back the iterator of a finished session."""
        self._live = live

    def close(self) -> None:
        """End the iterator's threads and free its memory."""
        live, self._live, self._latest = self._live, None, None
        if live is not None:
            self.end(live.iterator)


def _check_way(at: Where, to: Where) -> None:
    if at != to and to != (at[0] + 1, 0):
        raise StateError(
            f"DALI's checkpoint of epoch {at[0]}, position {at[1]} does not lead to epoch {to[0]}, position {to[1]}: "
            "load a state that was saved there"
        )


class LiveIterator:
    """A running iterator, and its place: after an epoch's last batch, that is still in this epoch."""

    def __init__(self, iterator: Any, place: Where, saved: tuple[bytes, ...] | None = None) -> None:
        self.iterator, self.place = iterator, place
        self._saved = saved  # DALI's checkpoints at this place, once they are known

    def saved(self) -> tuple[bytes, ...]:
        """DALI's checkpoints. Where the end was looked for, those from before."""
        if self._saved is None:
            self._saved = tuple(self.iterator.checkpoints())
        return self._saved

    def is_at(self, checkpoint: Checkpoint) -> bool:
        """Whether it is where the checkpoint was taken."""
        return checkpoint.at == self.place and (not checkpoint.saved or checkpoint.saved == self.saved())

    def take(self, step: int) -> Any:
        """The next batch. It moves the place by `step`."""
        batch = next(self.iterator)
        self.place, self._saved = (self.place[0], self.place[1] + step), None
        return batch

    def begin_next_epoch(self) -> None:
        """Read the rest of the epoch, and throw it away."""
        epoch, position = self.place
        rest = 0
        with contextlib.suppress(StopIteration):
            while True:
                next(self.iterator)
                rest += 1
        self.iterator.reset()
        self.place, self._saved = (epoch + 1, 0), None
        if rest:
            warn(
                f"DALI has read the rest of epoch {epoch}, {rest} batches from position {position} on, and thrown it "
                f"away: only so does it get to epoch {epoch + 1}",
            )


class CheckpointedSession(Session):
    """Takes DALI's checkpoints before each batch, which costs about 0.1 ms and 300 bytes."""

    def __init__(self, adapter: CheckpointedAdapter, run: Run) -> None:
        self._adapter, self._run = adapter, run
        self._live: LiveIterator | None = None
        self._left = None if run.share is None else run.share.steps

    def take(self) -> Any:
        """The next batch."""
        if self._left == 0:
            raise StopIteration
        live = self._live
        if live is None:
            live = self._live = self._adapter.lead_to(self._run)
        try:
            if live.place[0] != self._run.epoch:
                live.begin_next_epoch()
            batch = live.take(self._run.world.world_size)
        except StopIteration:
            if self._left is None:
                self._left = 0
                raise
            raise SourceError(
                f"DALI ended epoch {live.place[0]} at position {live.place[1]}, {self._left} batches early: load the "
                "last state and try again"
            ) from None
        except Exception as error:
            self._live = None
            self._adapter.end(live.iterator)
            raise SourceError(
                f"DALI failed in epoch {live.place[0]}, in the batch at position {live.place[1]} (counted in batches "
                f"of all ranks), or shortly after it without exec_dynamic: {first_line(error)}. Repair the data, and "
                "load the last state"
            ) from error
        if self._left is not None:
            self._left -= 1
        return batch

    def bookmark(self) -> Checkpoint | None:
        """DALI's checkpoints; None before the first batch."""
        live = self._live
        if live is None:
            return None
        return Checkpoint(live.place, self._adapter.stated_shards(self._run.world), live.saved())

    def detail(self, bookmark: Checkpoint | None) -> str:
        """The checkpoints, and where they were taken."""
        if bookmark is None:
            raise StateError(
                "the reader only has its current state, not that of earlier batches: save when no batch is in flight, "
                "or pass remember=, the number of batches in flight, to midepoch.wrap"
            )
        return bookmark.text()

    def next_epoch_detail(self) -> str:
        """The checkpoints at the end of the epoch, from which the next one starts."""
        bookmark = self.bookmark()
        return self._run.detail if bookmark is None else bookmark.text()

    def close(self) -> None:
        """Hand the iterator back for the next session."""
        live, self._live = self._live, None
        if live is not None:
            self._adapter.keep(live)


def first_line(error: BaseException) -> str:
    """DALI's error message without its tracebacks."""
    lines = [line.strip() for line in str(error).replace("\0", "").splitlines() if line.strip()]
    for place, line in enumerate(lines):
        if line.startswith("encountered:") and place + 1 < len(lines):
            return lines[place + 1][:300]
    return (lines[-1] if lines else type(error).__name__)[:300]
