"""The body of an `epochs` loop: an epoch ends with it, not with the last batch of a pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import warn
from .cursor import Cursor, Phase

__all__ = [
    "RUNNING",
    "Passes",
    "bring_together",
    "check_epochs",
    "no_pass_is_read",
    "only_the_rest_is_left",
    "tell_of_done",
    "tell_of_flight",
]

RUNNING = (
    "a loop over epochs is running already: leave it before the next one. If `break` or an exception has left it, "
    "something still holds its iterator (a variable, a progress bar): call close() on what epochs() has returned"
)

Places = list[tuple[Cursor, int]]
"""Passes, and the positions at which they stood."""


class Passes:
    """The passes over one loader since an epoch was yielded.

    A body that is run again after a resume makes its passes again, from the first one on. So those that had ended must
    be empty then. A pass that began within another one (a validation in the middle of training, the second loader of a
    zip) is not made again, because the outer pass goes on after it.

    Args:
        ended: `whole` when the resumed snapshot was saved; None if no pass had begun in the body then. A latest pass
            that had ended all the same is one that an earlier body had left.
        again: whether the latest pass, which had ended then, would be made again; None if it had not ended.
        alone: no one records the number of passes, so a resume knows of one pass only.
        ahead: the loader is one that is read ahead, as an earlier step has told.

    Attributes:
        alone, ahead: as given; a step in this body may tell of what is read ahead.
        stays: the body has ended, and its loader stands where the latest pass was left: the next one begins an epoch.
        spans: the loader is read by an iterator that is older than the body, so its passes belong to no body.
        empty: passes to be made that give nothing.
        whole: passes before the latest that would be made again.
        cursor: of the latest pass; None if all that have begun had been made when the resumed snapshot was saved.
    """

    def __init__(
        self,
        ended: int | None = None,
        again: bool | None = None,
        alone: bool = False,
        ahead: bool = False,
    ) -> None:
        self._recorded, self.alone, self.ahead = (ended, again), alone, ahead
        self.empty = (ended or 0) + bool(again)
        self._together: Sequence[Passes] = ()
        self._steps = 0  # that told of what is in flight, and at the latest one:
        self._in_flight = self._at = 0  # how many batches, and where the latest pass stood
        self._flying: int | None = None  # batches in flight after its end, as the latest step has told
        self.spans = self.stays = False
        self.whole = 0
        self._older: Cursor | None = None
        self._older_at = 0  # where it stood when the body began
        self._unread: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators that were made here, if `awaits`
        self.cursor: Cursor | None = None
        self._outer: Places = []  # the passes within which the latest began
        self._stood: int | None = None  # where, when the last of these came to its end
        self._stopped: Places | None = None  # the same when it came to its end or was left
        self._in_turns = False  # by then, these had all gone on
        self._drained: int | None = None  # it began and stopped after this step, while another one was drained
        self._others_began = False  # since it came to its end or was left, and was drained

    # --- what happens ---

    def leave_empty(self) -> bool:
        """Whether the pass that begins now had ended before the resume."""
        if not self.empty:
            return False
        self.empty -= 1
        self.whole += 1
        return True

    def enter(self, cursor: Cursor) -> None:
        """The body begins. `cursor`: of the loader's latest pass."""
        if _runs(cursor):
            self._older, self._older_at = cursor, cursor.position

    def begin(self, cursor: Cursor, continues: bool, older: bool) -> None:
        """A pass takes its first batch.

        Args:
            cursor: of the pass.
            continues: it is the rest of a pass that was interrupted, at a place where no other pass was within a step.
            older: its iterator was made before the body began.
        """
        if self.cursor is None:
            goes_on = continues and self._recorded[0] is None
            has_ended = self._older is not None and self._older.phase is Phase.EXHAUSTED
            self.spans = older or goes_on or has_ended
        if self.cursor is not None and (not self._is_within or _have_gone_on(self._turns)):
            self.whole += 1
            if self.alone and self.whole == 1:
                warn(
                    "this is a second pass over the loader in one body of loader.epochs, and a state does not say in "
                    "which pass it was saved: use midepoch.Snapshot and snapshot.epochs, or one pass an epoch",
                )
        self._follow(cursor)
        for each in self._together:
            if each is self or each.cursor is None:
                continue
            if each.runs:
                self._outer.append((each.cursor, -1 if continues else each.cursor.position))
            if each._is_drained:
                self._drained = self._steps
            elif not _runs(each.cursor):
                each._others_began = True

    def _follow(self, cursor: Cursor | None) -> None:
        """The latest pass is that of `cursor`, about which nothing is known."""
        self.cursor, self._outer, self._stood, self._stopped, self._in_turns = cursor, [], None, None, False
        self._drained = self._flying = None
        self._others_began, self._at = False, 0

    def end(self) -> None:
        """The latest pass is told that it has no more batches."""
        outer = [(cursor, position) for cursor, position in self._outer if _runs(cursor)]
        if not outer:
            self._outer = []  # it went on when the others had ended
        self._stop(outer)
        for each in self._together:
            if each.cursor is not None and not any(_runs(cursor) for cursor, _ in each._outer):
                each._stood = each.cursor.position if each._stood is None else each._stood

    def _stop(self, outer: Places) -> None:
        self._stopped, self._in_turns = _places(outer), _all_have_gone_on(outer)
        if self._drained != self._steps:
            self._drained = None

    def step(self, in_flight: int, others_lead: bool) -> None:
        """A batch was trained on, and so many others are in flight. Not called before a step has told of any.

        Args:
            in_flight: batches of the passes that are read.
            others_lead: a pass that began while others were drained goes on, so these were left.
        """
        self._others_began = self._others_began or (others_lead and self._has_ended)
        self._steps, self._in_flight = self._steps + 1, in_flight
        cursor = self.cursor
        if cursor is None:
            return
        self._at = cursor.position
        is_read = self.runs or not (self._others_began or self._is_within)
        self.ahead = self.ahead or (in_flight > 0 and is_read)
        if self._has_ended and not self._others_began:
            # What is in flight becomes less with each step; or else another pass is read, and this one was left.
            falls = self._flying is None or in_flight < self._flying
            self._flying = in_flight if falls else 0

    def watched(self, user: Any) -> weakref.ref[Any]:
        """A reference to a pass's iterator, which tells this object when that is freed."""
        passes = weakref.ref(self)  # a cycle would keep the cursor, and worker processes with it

        def leave(user: weakref.ref[Any]) -> None:
            self = passes()
            if self is not None and self._stopped is None and self.cursor is not None and self.cursor.user is user:
                self._stop(self._outer)

        return weakref.ref(user, leave)

    def forget(self) -> None:
        """The body has ended, or was left."""
        self._together, self._outer, self._stopped = (), [], None

    # --- what follows from it ---

    @property
    def _is_within(self) -> bool:
        """Whether the latest pass began within others, and was asked for nothing more when they had ended."""
        if self._drained is not None and (self._stopped is not None or self._drained == self._steps):
            return True
        if not self._outer or self.cursor is None:
            return False
        return self._stood is None or self.cursor.position == self._stood

    @property
    def runs(self) -> bool:
        """Whether the latest pass has begun, and neither has it come to its end nor was it left.

        One that began within others that have ended (the other loader of a zip) runs no more.
        """
        cursor = self.cursor
        if cursor is None or self.spans or not _runs(cursor):
            return False
        return not self._is_within or any(_runs(each) for each, _ in self._outer)

    @property
    def _has_ended(self) -> bool:
        """Whether the latest pass came to its end, or was left by a zip that did."""
        if self._is_within:
            return self._stopped is not None and self._in_turns
        return self.cursor is not None and self.cursor.phase is Phase.EXHAUSTED

    @property
    def _is_drained(self) -> bool:
        """Whether a prefetcher has read the latest pass to its end, and the loop has not come to its last batch."""
        cursor = self.cursor
        if cursor is None or not self._has_ended or not self.ahead or self._others_began:
            return False
        left = self._in_flight or cursor.position > self._at if self._flying is None else self._flying
        return bool(left)

    @property
    def leads_behind_others(self) -> bool:
        """Whether the latest pass began while another one was drained, after the last step, and goes on."""
        return self._drained == self._steps and self._stopped is None and self.going_on

    @property
    def _turns(self) -> Places:
        """Where the outer passes stood when the latest came to its end, if they had gone on meanwhile."""
        ended = self.cursor is not None and self.cursor.phase is Phase.EXHAUSTED and self._in_turns
        return (self._stopped or []) if ended else []

    @property
    def going_on(self) -> bool:
        """Whether the latest pass is in the middle of its epoch, and may go on."""
        return self.cursor is not None and _runs(self.cursor) and self.cursor.phase is Phase.RUNNING

    @property
    def leading(self) -> bool:
        """Whether the latest pass is in the middle of its epoch, and not within another one."""
        return self.going_on and not self._is_within and not self.spans

    @property
    def over(self) -> bool:
        """Whether the latest pass has handed out its last batch."""
        cursor = self.cursor
        return cursor is not None and cursor.over is not None and cursor.phase in (Phase.GIVEN, Phase.EXHAUSTED)

    @property
    def stopped(self) -> bool:
        """Whether the latest pass has handed out its last batch, or came to its end or was left in this body."""
        cursor = self.cursor
        if cursor is None:
            return self.whole > 0  # a pass that had ended before the resume gave nothing
        return self.over or not (self.spans or _runs(cursor))

    @property
    def outlives(self) -> bool:
        """Whether an iterator that was first read in this body is kept at its end, in the middle of an epoch."""
        return self.going_on and not self.spans

    @property
    def reads_on(self) -> bool:
        """Whether an iterator that an earlier body has read was read on in this one."""
        return self._older is not None and _has_gone_on(self._older, self._older_at)

    @property
    def awaits(self) -> bool:
        """Whether no pass has begun, although the latest one had not ended when the resumed snapshot was saved."""
        whole, again = self._recorded
        return self.cursor is None and whole is not None and again is None

    def made(self, user: Any) -> None:
        """An iterator was made in this body. `user`: the pass."""
        if self.awaits:
            self._unread.add(user)

    @property
    def kept(self) -> weakref.WeakSet[Any]:
        """Iterators that were made in this body, which has not read any, and which are kept at its end."""
        return self._unread if self.awaits else weakref.WeakSet()

    @property
    def ended(self) -> bool:
        """Whether the latest pass has come to its end or was left, so that the next one begins a new epoch."""
        if self.cursor is None:
            return self._recorded != (None, None)
        return not _runs(self.cursor)

    def is_read(self, in_flight: int) -> bool:
        """Whether a prefetcher that reads ahead may read the latest pass, or has read it to its end.

        Args:
            in_flight: the batches that it holds now. Behind the end of a pass, they become fewer with each step.
        """
        if self.cursor is None or self._others_began or (self._flying is not None and in_flight > self._flying):
            return False
        in_turns = _all_have_gone_on(self._outer) if self._stopped is None else self._in_turns
        return self.runs or not self._is_within or in_turns

    def record(self, interrupted: bool = False, in_flight: int = 0) -> tuple[int | None, bool | None]:
        """What a snapshot keeps: the first two arguments of the `Passes` of a run that resumes.

        Args:
            interrupted: the body was left, or is about to be; passes that were left with it go on in the next one.
            in_flight: batches that were taken and not trained on. A pass that is read goes on before them, even if it
                has come to its end.
        """
        if self.cursor is None:
            return self._recorded  # until a pass begins, a body that is run again stands where it stood
        goes_on = (interrupted and self._was_left and not self._is_behind) or (in_flight and self.is_read(in_flight))
        if _runs(self.cursor) or goes_on:
            return (None if self.spans else self.whole), None
        again = not self._is_within or _have_gone_on(self._turns) or any(_runs(cursor) for cursor, _ in self._turns)
        return self.whole, again

    @property
    def _was_left(self) -> bool:
        cursor = self.cursor
        if cursor is None or cursor.phase is Phase.EXHAUSTED:
            return False
        return cursor.phase is Phase.CLOSED or not cursor.in_use  # who leaves may have closed the loader first

    @property
    def _is_behind(self) -> bool:
        """Whether the body has gone on since the latest pass was left."""
        return self._others_began or _have_gone_on(self._stopped or [])

    @property
    def may_fly(self) -> bool:
        """Whether a prefetcher may have read all of the latest pass, before the first step that told of one.

        Another one began since, so nobody can tell.
        """
        ended = self.cursor is not None and self.cursor.phase is Phase.EXHAUSTED
        return ended and self._others_began and not self.ahead and self._steps == 1 and not self._is_within


def _runs(cursor: Cursor) -> bool:
    # One that was left by `break` or an exception keeps its phase, and is used no more.
    return cursor.in_use and cursor.phase in (Phase.RUNNING, Phase.GIVEN)


def _places(passes: Places) -> Places:
    return [(cursor, cursor.position) for cursor, _ in passes]


def _has_gone_on(cursor: Cursor, position: int) -> bool:
    """Whether this pass was asked for more, since it stood there."""
    return cursor.position > position or cursor.phase is Phase.EXHAUSTED


def _have_gone_on(places: Places) -> bool:
    return any(_has_gone_on(*place) for place in places)


def _all_have_gone_on(places: Places) -> bool:
    return bool(places) and all(_has_gone_on(*place) for place in places)


def only_the_rest_is_left(passes: Iterable[Passes]) -> bool:
    """Whether the passes of a body have come to their end, so that only the rest of the body is left."""
    passes = list(passes)
    return any(each.over for each in passes) and not any(each.leading for each in passes)


def no_pass_is_read(passes: Iterable[Passes], in_flight: int) -> bool:
    """Whether the passes of a body have come to their end or were left. Not if none has begun.

    `in_flight`: batches that were taken and not trained on. They may be those of a pass that has come to its end.
    """
    passes = list(passes)
    stopped = any(each.stopped and not (in_flight and each.over) for each in passes)
    return stopped and not any(each.leading for each in passes)


def tell_of_flight(passes: Iterable[Passes], in_flight: int) -> None:
    """A batch of a body with these passes was trained on, and so many others are in flight."""
    passes = list(passes)
    others_lead = any(each.leads_behind_others for each in passes)
    for each in passes:
        each.step(in_flight, others_lead)


def bring_together(passes: Sequence[Passes]) -> None:
    """Let the passes of one body know of each other."""
    for each in passes:
        each._together = passes


def check_epochs(n: object) -> None:
    """Raise TypeError or ValueError unless `n` is a number of epochs."""
    if type(n) is not int:
        raise TypeError(f"epochs takes the number of epochs in all, an int, got {n!r}")
    if n < 0:
        raise ValueError(f"epochs takes the number of epochs in all, at least 0, got {n}")


def tell_of_done(n: int, done: int) -> None:
    """Warn that more epochs are done than were asked for."""
    warn(
        f"epochs({n}) runs nothing, because {done} epochs are done: pass the number of epochs in all",
    )
