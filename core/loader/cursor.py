"""One pass over a loader's data: the session that it has open, and how far it has come."""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import StateError
from ..world import MicroShare, Share, World
from .adapter import MOST_IN_FLIGHT, Run, Session
from .place import Place

__all__ = ["Cursor", "History", "Phase", "new_history", "place_before"]

MORE = "pass remember=, the number of batches that may be in flight, to midepoch.wrap"


class Phase(enum.Enum):
    """What a pass answers when it is asked for its next batch."""

    RUNNING = "the next batch"
    GIVEN = "its end: the last batch has been handed out"
    EXHAUSTED = "its end, again and again"
    CLOSED = "an error: the loader was closed meanwhile"


class Cursor:
    """The position of a pass: its open session, and the batches handed out of it.

    With no open session, the loader's own place is the position of the pass.

    Attributes:
        phase: what the pass returns when it is asked for its next batch.
        user: the pass that uses this cursor, referred to weakly; None before one does. `peek` may create a cursor
            first; the next pass then takes it.
        ended: the cursor of the pass whose end `peek` has looked beyond with this one, until another pass takes it.
        resumed: the pass continues from a loaded state.
        steady: the next batch can be taken at once, without the checks of `Loader._next`.
        session, world, seed: the open session, and the world and the seed it was opened with. `session` is None while
            nothing is open.
        opened: the place at which the session was opened.
        before: the place that holds until the first batch is handed out: `opened`, or that of a batch that failed and
            was passed over.
        over: the position at the end of the epoch, while the epoch goes on after its last batch; otherwise None.
        steps: batches handed out of the session.
        epoch, position: the place after these batches.
        own_steps: batches of this rank in the session; None if unknown.
        last_step: the step that ends the epoch on all ranks; None if unknown.
        share: this rank's batches in the session; None if only reading tells how large they are.
        peeked: at most one entry: the batch that `peek` returned, and the session's mark from before it.
        marks: the session is asked for a mark before each batch.
    """

    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self.resumed = self.steady = False
        self.user: weakref.ref[Any] | None = None
        self.ended: Cursor | None = None
        self.session: Session | None = None
        self.world: World | None = None
        self.seed = 0
        self.opened = self.before = Place(0, 0)
        self.over: int | None = None
        self.steps = self.epoch = self.position = 0
        self.own_steps: int | None = None
        self.last_step: int | None = None
        self.share: Share | None = None
        self.peeked: list[tuple[Any, Any]] = []
        self.take: Callable[[], Any] = _nothing_open
        self._global_batch = 1
        self._micro: MicroShare | None = None  # if several batches make a global one
        self.marks = self._corrects = False

    @property
    def owned(self) -> bool:
        """Whether a pass uses this cursor, or has used it."""
        return self.user is not None

    @property
    def in_use(self) -> bool:
        """Whether that pass still exists."""
        return self.user is not None and self.user() is not None

    @property
    def within(self) -> bool:
        """Whether a part of a global batch was handed out, and the rest of it was not."""
        micro = self._micro
        return micro is not None and self.session is not None and not micro.is_whole(self.steps)

    def open(self, session: Session, run: Run, global_batch: int, before: Place | None, marks: bool) -> None:
        """Start at a session's beginning.

        Args:
            session: just opened for `run`.
            run: where it begins.
            global_batch: units by which each batch moves the position.
            before: the place that holds until the first batch is handed out; None for that at which it was opened.
            marks: ask for a mark before each batch, whether the session sets `marks` or not.
        """
        share = run.share
        self.session, self.take, self.world, self.seed = session, session.take, run.world, run.seed
        self.opened = Place(run.epoch, run.position, run.detail)
        self.before = self.opened if before is None else before
        self.epoch, self.position, self.steps, self.over = run.epoch, self.before.position, 0, None
        self.own_steps = None if share is None else share.steps
        self.last_step = None if share is None else share.global_steps
        self.share = None if session.varies else share
        self._micro = share if isinstance(share, MicroShare) else None
        self._global_batch, self.marks = global_batch, session.marks or marks
        self._corrects = self.marks or self._micro is not None

    def taken_over(self) -> Cursor:
        """A cursor for another pass, which continues with this one's open session."""
        other = Cursor()
        other.__dict__.update(self.__dict__)
        other.phase, other.user = Phase.RUNNING, None
        self.session, self.steady, self.take, self.peeked = None, False, _nothing_open, []
        return other

    def mark(self) -> Any:
        """The session's mark, if it must be asked for one before each batch."""
        return self.session.mark() if self.marks and self.steps and self.session is not None else None

    def handed_out(self, history: History, mark: Any) -> None:
        """Count a batch that was handed out. `mark`: the session's mark from before it."""
        if self.steps:
            history.append((self.session, self.epoch, self.position, mark))
        else:
            history.append((None, self.epoch, self.position, self.before.detail))
            self.position = self.opened.position
        self.steps += 1
        self.position += self._global_batch
        if self._corrects:
            self.catch_up()

    def catch_up(self) -> None:
        """Correct the position by the session's `drift`, and do not count a global batch before all of it is given."""
        if self.session is not None:
            if self.session.varies:
                self.share = self.own_steps = self.last_step = None
            moved = self.steps * self._global_batch if self._micro is None else self._micro.moved(self.steps)
            self.position = self.opened.position + moved + self.session.drift

    def place(self) -> Place:
        """Where the open session stands.

        Raises:
            StateError: the source cannot say.
        """
        session = self.session
        assert session is not None  # callers check first
        if self.phase is Phase.GIVEN:
            following = Place(self.epoch + 1, 0, session.following())
            return following if self.over is None else following.before(self.over)
        if not self.steps:
            return self.before
        mark = self.peeked[0][1] if self.peeked else session.mark()
        return Place(self.epoch, self.position, session.detail(mark))

    def place_of(self, mark: Any) -> Place:
        """Where the open session stood before a batch that failed. `mark`: taken before that batch."""
        if not self.steps or self.session is None:
            return self.place()
        return Place(self.epoch, self.position, self.session.detail(mark))

    def close(self) -> None:
        """Close the session. The phase stays."""
        self.steady = False  # first: if an exception is thrown in here, the pass must not go on with this session
        session, self.session = self.session, None
        self.take = _nothing_open
        self.peeked.clear()
        if session is not None:
            session.close()


def _nothing_open() -> Any:
    raise RuntimeError("midepoch: no session is open")  # pragma: no cover  # the loader opens one first


History = deque[tuple[Session | None, int, int, Any]]
"""The places before the latest batches: (session, epoch, position, mark), or (None, epoch, position, detail)."""


def new_history(batches: int = MOST_IN_FLIGHT) -> History:
    """An empty history of that many batches at most."""
    return deque(maxlen=batches)


def place_before(history: History, batches: int) -> Place:
    """Where the loader stood `batches` batches ago.

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
    session, epoch, position, mark = history[-batches]
    return Place(epoch, position, mark if session is None else session.detail(mark))
