"""The body of an `epochs` loop: an epoch ends with it, not with the last batch of a pass."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from midepoch.errors import MidepochWarning

from .cursor import Cursor, Phase

__all__ = ["RUNNING", "Passes", "all_over", "bring_together", "check_epochs", "tell_of_done"]

RUNNING = "a loop over epochs is running already: leave it before the next one"


class Passes:
    """The passes over one loader since an epoch was yielded.

    A body that is run again after a resume begins with its first pass, whatever pass was interrupted. So the passes
    that had come to their end must be empty when they are made again. A pass that ran within one step of another one
    (a validation in the middle of a training pass) is not repeated: the outer pass continues after it.

    Args:
        ended: `whole` when the resumed snapshot was saved; None if no pass had begun then.
        again: `inner` or not of a pass that had been left then: whether it would be made again; None if none was.
        alone: no one records the number of passes, so a resume knows of one pass only.

    Attributes:
        alone: as given.
        whole: passes that came to their end, or were left, and that would be made again.
        inner: the latest pass ran within one step of another.
        begun: a pass has begun that had not been made when the resumed snapshot was saved.
        cursor: of the latest pass.
    """

    def __init__(self, ended: int | None = None, again: bool | None = None, alone: bool = False) -> None:
        self._recorded, self.alone = (ended, again), alone
        self._empty = (ended or 0) + bool(again)  # passes to be made that give nothing
        self._together: Sequence[Passes] = ()
        self._around: list[tuple[Cursor, int]] = []  # passes that ran when the latest began, and how far they were
        self.inner = False
        self.whole = 0
        self.begun = False
        self.cursor: Cursor | None = None

    def leave_empty(self) -> bool:
        """Whether the pass that begins now had come to its end before the resume."""
        if not self._empty:
            return False
        self._empty -= 1
        self.whole += 1
        return True

    def begin(self, cursor: Cursor) -> None:
        """A pass with `cursor` takes its first batch."""
        if self.begun and not self.inner:
            self.whole += 1
            if self.alone and self.whole == 1:
                warnings.warn(
                    "this is a second pass over the loader in one body of loader.epochs, and a state does not say in "
                    "which pass it was saved: use midepoch.Snapshot and snapshot.epochs, or one pass an epoch",
                    MidepochWarning,
                    stacklevel=6,
                )
        self.begun, self.cursor = True, cursor
        running = (each.cursor for each in self._together if each is not self and each.begun)
        self._around = [(each, each.steps) for each in running if each is not None and _runs(each)]
        self.inner = bool(self._around)

    def end(self) -> bool:
        """The latest pass has handed out its last batch. Returns whether its epoch ends only with the body."""
        # Passes that take turns, as those of a zip, are made again together.
        self.inner = any(cursor.steps == steps and _runs(cursor) for cursor, steps in self._around)
        return not self.inner

    def record(self) -> tuple[int | None, bool | None]:
        """What a snapshot keeps: the first two arguments of the `Passes` of a run that resumes."""
        if not self.begun:
            return self._recorded  # until a pass begins, a body that is run again stands where it stood
        return self.whole, not self.inner if self.left else None

    @property
    def left(self) -> bool:
        """Whether the latest pass was left before its end: the next one begins a new epoch."""
        cursor = self.cursor
        if cursor is None:
            return self._recorded[0] is not None
        return cursor.steps > 0 and (
            cursor.phase is Phase.CLOSED or (cursor.phase is Phase.RUNNING and not cursor.in_use)
        )

    @property
    def going_on(self) -> bool:
        """Whether the latest pass is in the middle of its epoch, and may go on."""
        cursor = self.cursor
        return cursor is not None and cursor.phase is Phase.RUNNING and cursor.in_use

    @property
    def over(self) -> bool:
        """Whether the latest pass has handed out its last batch, and its epoch ends only with the body."""
        cursor = self.cursor
        return cursor is not None and cursor.over is not None and cursor.phase in (Phase.GIVEN, Phase.EXHAUSTED)


def all_over(passes: Sequence[Passes]) -> bool:
    """Whether the passes of a body have come to their end, so that only the rest of the body is left."""
    over = [each for each in passes if each.over]
    given = any(each.cursor is not None and each.cursor.phase is Phase.GIVEN for each in over)
    return given or (bool(over) and not any(each.going_on for each in passes))


def bring_together(passes: Sequence[Passes]) -> None:
    """Let the passes of one body know of each other."""
    for each in passes:
        each._together = passes


def _runs(cursor: Cursor) -> bool:
    # One that was left by `break` or an exception keeps its phase, and is used no more.
    return cursor.in_use and cursor.steps > 0 and cursor.phase in (Phase.RUNNING, Phase.GIVEN)


def check_epochs(n: object) -> None:
    """Raise TypeError or ValueError unless `n` is a number of epochs."""
    if type(n) is not int:
        raise TypeError(f"epochs takes the number of epochs in all, an int, got {n!r}")
    if n < 0:
        raise ValueError(f"epochs takes the number of epochs in all, at least 0, got {n}")


def tell_of_done(n: int, done: int) -> None:
    """Warn that more epochs are done than were asked for."""
    warnings.warn(
        f"epochs({n}) runs nothing, because {done} epochs are done: pass the number of epochs in all",
        MidepochWarning,
        stacklevel=4,
    )
