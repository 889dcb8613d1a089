"""An open session, and how far it has been read; and the places before the latest batches."""

from __future__ import annotations

from collections import deque
from typing import Any

from ..errors import StateError
from ..world import MicroShare
from .adapter import MOST_IN_FLIGHT, Run, Session
from .place import Place

__all__ = ["History", "Reading", "new_history", "place_before"]

MORE = "pass remember=, the number of batches that may be in flight, to midepoch.wrap"


class Reading:
    """A session that is open, and the batches handed out of it. `Progress.open` makes it.

    Attributes:
        session, run: the session, and where and how it was opened.
        before: the place that holds until the first batch is handed out: that at which the session was opened, or that
            of batches that failed and are passed over.
        resumed: it was opened at a loaded state.
        steps: batches handed out of the session.
        position: the place's, after these batches.
        last_step: the step that ends the epoch on all ranks; None if unknown.
        share: this rank's batches in the session; None if only reading tells how large they are.
        peeked: at most one entry: the batch that `peek` returned, and the session's bookmark from before it.
        bookmarks: the session is asked for a bookmark before each batch.
        settled: the session has been asked for the next epoch's detail.
        closed: the session is.
    """

    def __init__(
        self, session: Session, run: Run, global_batch: int, before: Place, bookmarks: bool, resumed: bool
    ) -> None:
        share = run.share
        self.session, self.take, self.run, self.before, self.resumed = session, session.take, run, before, resumed
        self.steps, self.position, self.closed = 0, before.position, False
        self.settled = False
        self.last_step = None if share is None else share.global_steps
        self.share = None if session.varies else share
        self.peeked: list[tuple[Any, Any]] = []
        self.bookmarks = bookmarks and session.bookmark is not None
        self._global_batch = global_batch
        self._micro = share if isinstance(share, MicroShare) else None  # if several batches make a global one
        self._corrects = self.bookmarks or self._micro is not None

    @property
    def within(self) -> bool:
        """Whether a part of a global batch was handed out, and the rest of it was not."""
        return self._micro is not None and not self._micro.is_whole(self.steps)

    @property
    def steps_left(self) -> int | None:
        """Batches of this rank that are left; None if unknown, or if the session has corrected its position."""
        share = self.run.share
        known = share is not None and not self.session.position_correction and not self.session.varies
        return share.steps - self.steps if known and share is not None else None

    def bookmark(self) -> Any:
        """The session's bookmark, if it must be asked for one before each batch."""
        return self.bookmark_now() if self.bookmarks and self.steps else None

    def bookmark_now(self) -> Any:
        """The session's bookmark, whatever it costs."""
        return None if self.session.bookmark is None else self.session.bookmark()

    def count(self, history: History, bookmark: Any) -> None:
        """Count a batch that was handed out. `bookmark`: the session's bookmark from before it."""
        if self.steps:
            history.append((self.session, self.run.epoch, self.position, bookmark))
        else:
            history.append((None, self.run.epoch, self.position, self.before.detail))
            self.position = self.run.position
        self.steps += 1
        self.position += self._global_batch
        if self._corrects:
            self.correct()

    def correct(self) -> None:
        """Correct the position as the session says, and do not count a global batch before all of it is given."""
        if self.session.varies:
            self.share = self.last_step = None
        moved = self.steps * self._global_batch if self._micro is None else self._micro.moved(self.steps)
        self.position = self.run.position + moved + self.session.position_correction

    def place(self, bookmark: Any = None) -> Place:
        """Where it is. `bookmark`: taken before a batch that failed.

        Raises:
            StateError: the source cannot say.
        """
        if not self.steps:
            return self.before
        if bookmark is None:
            bookmark = self.peeked[0][1] if self.peeked else self.bookmark_now()
        return Place(self.run.epoch, self.position, self.session.detail(bookmark))

    def close(self) -> None:
        """Close the session."""
        self.peeked.clear()
        if not self.closed:
            self.closed = True
            self.session.close()


History = deque[tuple[Session | None, int, int, Any]]
"""The places before the latest batches: (session, epoch, position, bookmark), or (None, epoch, position, detail)."""


def new_history(batches: int = MOST_IN_FLIGHT) -> History:
    """An empty history of that many batches at most."""
    return deque(maxlen=batches)


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
    session, epoch, position, bookmark = history[-batches]
    return Place(epoch, position, bookmark if session is None else session.detail(bookmark))
