"""One pass over a loader's data: the session that it has open, and how far it has come."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Any

from midepoch.errors import StateError
from midepoch.world import World

from .adapter import Run, Session
from .place import Place

__all__ = ["Cursor", "History", "Phase", "new_history", "place_before"]

_REMEMBERED = 1024  # batches that may be in flight


class Phase(enum.Enum):
    """What a pass answers when it is asked for its next batch."""

    RUNNING = "the next batch"
    GIVEN = "its end: the last batch has been handed out"
    EXHAUSTED = "its end, again and again"
    CLOSED = "an error: the loader was closed meanwhile"


class Cursor:
    """Where a pass stands. While a session is open, the cursor counts; without one, the loader's place holds.

    Attributes:
        phase: what the pass answers next.
        owned: some pass has this cursor. One that only `peek` has needed waits for the next pass.
        resumed: the pass goes on from a state that was loaded.
        steady: nothing is to be done before the session is asked for the next batch.
        session, world, seed: what is open, in which world and under which seed it was opened. None: nothing is.
        opened: the place at which the session was opened.
        steps: batches that the session has handed out.
        epoch, position: where these have led.
        own_steps: batches that this rank has in the session; None where nobody knows.
        last_step: the step whose batch ends the epoch for all ranks; None where nobody knows.
        peeked: the batch that `peek` has shown, if any; and the session's mark from before it.
    """

    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self.owned = self.resumed = self.steady = False
        self.session: Session | None = None
        self.world: World | None = None
        self.seed = 0
        self.opened = Place(0, 0)
        self.steps = self.epoch = self.position = 0
        self.own_steps: int | None = None
        self.last_step: int | None = None
        self.peeked: list[tuple[Any, Any]] = []
        self.take: Callable[[], Any] = _nothing_open
        self._global_batch = 1
        self._marks = False

    def open(self, session: Session, run: Run, global_batch: int) -> None:
        """Stand at the beginning of a session. `global_batch`: units by which each batch moves the position."""
        share = run.share
        self.session, self.take, self.world, self.seed = session, session.take, run.world, run.seed
        self.opened = Place(run.epoch, run.position, run.detail)
        self.epoch, self.position, self.steps = run.epoch, run.position, 0
        self.own_steps = None if share is None else share.steps
        self.last_step = None if share is None else share.global_steps
        self._global_batch, self._marks = global_batch, session.marks

    def taken_over(self) -> Cursor:
        """A cursor of another pass, which stands here and goes on with the open session."""
        other = Cursor()
        other.__dict__.update(self.__dict__)
        other.phase = Phase.RUNNING
        self.session, self.steady, self.take, self.peeked = None, False, _nothing_open, []
        return other

    def mark(self) -> Any:
        """The session's mark, where it needs one before each batch."""
        return self.session.mark() if self._marks and self.steps and self.session is not None else None

    def handed_out(self, history: History, mark: Any) -> None:
        """A batch has been handed out. `mark`: the session's, from before it."""
        if self.steps:
            history.append((self.session, self.epoch, self.position, mark))
        else:
            history.append((None, self.epoch, self.position, self.opened.detail))
        self.steps += 1
        self.position += self._global_batch
        if self._marks:
            self.catch_up()

    def catch_up(self) -> None:
        """Let the position follow a session that was led elsewhere than its batches tell."""
        if self.session is not None:
            self.position = self.opened.position + self.steps * self._global_batch + self.session.drift

    def place(self) -> Place:
        """Where the open session stands.

        Raises:
            StateError: the source cannot say.
        """
        session = self.session
        assert session is not None  # callers look before they ask
        if self.phase is Phase.GIVEN:
            return Place(self.epoch + 1, 0, session.following())
        if not self.steps:
            return self.opened
        mark = self.peeked[0][1] if self.peeked else session.mark()
        return Place(self.epoch, self.position, session.detail(mark))

    def place_of(self, mark: Any) -> Place:
        """Where the open session stood before a batch that could not be read. `mark`: from before it."""
        if not self.steps or self.session is None:
            return self.place()
        return Place(self.epoch, self.position, self.session.detail(mark))

    def close(self) -> None:
        """Let go of the session. The cursor stays in its phase."""
        session, self.session = self.session, None
        self.steady, self.take = False, _nothing_open
        self.peeked.clear()
        if session is not None:
            session.close()


def _nothing_open() -> Any:
    raise RuntimeError("midepoch: no session is open")  # pragma: no cover  # the loader opens one first


History = deque[tuple[Session | None, int, int, Any]]
"""Places before the batches that were handed out last: a session with its mark, or None with a detail as it stands."""


def new_history() -> History:
    """An empty one, as long as batches may be in flight."""
    return deque(maxlen=_REMEMBERED)


def place_before(history: History, batches: int) -> Place:
    """Where the loader stood so many batches ago.

    Raises:
        StateError: it is not remembered, or the source does not know its own state so far back.
    """
    if batches > len(history):
        raise StateError(
            f"in_flight={batches}, but {len(history)} batches are remembered since the start or the last load: pass "
            "the number of batches that were taken and not yet trained on"
        )
    session, epoch, position, mark = history[-batches]
    return Place(epoch, position, mark if session is None else session.detail(mark))
