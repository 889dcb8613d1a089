"""DALI's own checkpoints, as a state keeps them, and an iterator that gives them."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from midepoch.errors import StateCorruptError, StateError, warn
from midepoch.state.codec import decode, encode

__all__ = ["Checkpoint", "LiveIterator", "check_way", "first_line"]

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


def check_way(at: Where, to: Where) -> None:
    """Raise StateError unless reading leads from one place to the other: the same, or the next epoch's beginning."""
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


def first_line(error: BaseException) -> str:
    """DALI's error message without its tracebacks."""
    lines = [line.strip() for line in str(error).replace("\0", "").splitlines() if line.strip()]
    for place, line in enumerate(lines):
        if line.startswith("encountered:") and place + 1 < len(lines):
            return lines[place + 1][:300]
    return (lines[-1] if lines else type(error).__name__)[:300]
