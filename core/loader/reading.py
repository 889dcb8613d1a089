"""An open session, and how far it has been read; and the places before the latest batches."""

from __future__ import annotations

from collections import deque
from typing import Any

from ..errors import StateError
from ..world import MicroShare, Share
from .adapter import Run, Session
from .place import Place

__all__ = ["History", "Reading", "check_in_flight", "place_before"]

MORE = "pass remember=, the number of batches that may be in flight, to midepoch.wrap"


class Reading:
    """A session that is open, and the batches handed out of it. `Progress.open` makes it.

    Args:
        session, run: the session, and where and how it was opened.
        global_batch: units by which a batch moves the position.
        bookmarks: the session is asked for a bookmark before each batch, and for its correction after it.
    """

    def __init__(self, session: Session, run: Run, global_batch: int, bookmarks: bool) -> None:
        share = run.share
        self.session, self.run = session, run
        self.steps = 0  # batches handed out of the session; until the first one, the place is the loader's
        self.global_batch = global_batch
        # Of the place after these batches; with holes, a place's number (`midepoch.order.holes`).
        self.position = run.position if not run.holes.total else run.start
        self.last_step = None if share is None else share.global_steps  # which ends the epoch on all ranks
        # At most one: the batch that `peek` returned, and the session's bookmark from before it.
        self.peeked: list[tuple[Any, Any]] = []
        self.bookmarks = (bookmarks and session.bookmark is not None) or isinstance(share, MicroShare)

    @property
    def share(self) -> Share | None:
        """This rank's batches in the session; None if only reading tells how many there are."""
        return None if self.session.varies else self.run.share

    @property
    def within(self) -> bool:
        """Whether a part of a global batch was handed out, and the rest of it was not."""
        share = self.run.share
        return isinstance(share, MicroShare) and not share.is_whole(self.steps)

    def correct(self) -> None:
        """Correct the position as the session says, and do not count a global batch before all of it is given."""
        share, moved = self.run.share, self.steps * self.global_batch
        if isinstance(share, MicroShare):
            moved = share.moved(self.steps)
        self.position = self.run.start + moved + self.session.position_correction
        if self.session.varies:
            self.last_step = None

    def bookmark(self) -> Any:
        """The session's bookmark, from before the batch that comes next."""
        if self.peeked:
            return self.peeked[0][1]
        return None if self.session.bookmark is None else self.session.bookmark()

    def place(self, bookmark: Any = None) -> Place:
        """Where it is after its first batch. `bookmark`: if it was taken before a batch that failed.

        Raises:
            StateError: the source cannot say.
        """
        bookmark = self.bookmark() if bookmark is None else bookmark
        return Place(self.run.epoch, self.original(self.position), self.session.detail(bookmark))

    def original(self, position: int) -> int:
        """The position of the epoch, holes included, where this session's is `position`."""
        return self.run.holes.position_of(position) if self.run.holes.total else position

    def close(self) -> None:
        """Close the session."""
        self.peeked.clear()
        self.session.close()


History = deque[tuple[Reading, int, Any]]
"""Of the latest batches: the reading, the position before the batch, and the bookmark; of a first batch, the place."""


def check_in_flight(in_flight: object) -> None:
    """Raise ValueError unless this is a number of batches: whether one is in flight says nothing of how many are."""
    if type(in_flight) is not int or in_flight < 0:
        raise ValueError(f"in_flight must be an int of at least 0, got {in_flight!r}")


def place_before(history: History, batches: int) -> Place:
    """Where the loader was `batches` batches ago.

    Raises:
        StateError: the history does not reach back so far, or the source cannot say what its state was.
    """
    if batches > len(history):
        if len(history) == history.maxlen:
            raise StateError(f"in_flight={batches}, but the states of {len(history)} batches are kept: {MORE}")
        raise StateError(
            f"in_flight={batches}, but only {len(history)} batches have been handed out since the start or the last "
            "load: pass the number of batches that were taken and not yet trained on"
        )
    reading, position, bookmark = history[-batches]
    if isinstance(bookmark, Place):
        return bookmark
    return Place(reading.run.epoch, reading.original(position), reading.session.detail(bookmark))
