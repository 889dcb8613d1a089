"""Lightning without `ExactResume`: where a resume may not be exact, a warning says so and names the callback.

A loader sees little of Lightning: it is asked for an iterator when the loop of epochs is set up, and told the epoch
when an epoch begins. So at these calls, in a run that resumes, Lightning's counts are compared with the loaders'
places. The loop is found in the frames of the calling code.
"""

from __future__ import annotations

import contextlib
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

from midepoch.errors import StateError, UnsupportedSourceError, warn
from midepoch.loader.lending import loader_of
from midepoch.loader.loader import Loader
from midepoch.loader.part import Part

if TYPE_CHECKING:
    from midepoch.adapters.trainers.lightning_private import Resumed

__all__ = ["warn_unless_exact"]

_SET_UP, _BEGIN = "setup_data", "on_advance_start"  # methods of Lightning's loop of epochs
_DEPTH = 10  # frames between them and a loader, at most
_INFINITE = float("inf")

_told: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()  # each trainer's checkpoint


def warn_unless_exact(loader: Loader, frame: FrameType) -> None:
    """Warn once if the run that Lightning resumes may not go on exactly."""
    method, loop = _loop_of_epochs(frame)
    trainer: Any = getattr(loop, "trainer", None)
    checkpoint = getattr(trainer, "ckpt_path", None)
    if checkpoint is None:
        return
    # Lightning's version is checked as this is imported, which only a resumed run needs.
    from midepoch.adapters.trainers import lightning_private as private
    from midepoch.adapters.trainers.lightning import ExactResume

    try:
        private.check(trainer)
    except UnsupportedSourceError:
        return  # another version of Lightning, which a warning has named
    if any(isinstance(each, ExactResume) for each in trainer.callbacks):
        return
    resumed = private.resumed(trainer)
    if resumed is None:
        if method == _BEGIN:
            _begin_epoch(loader)
        return
    if _told.get(trainer) == checkpoint:
        return
    why = _why_inexact(trainer, resumed)
    if not why and method == _BEGIN and _owes_validation(trainer, resumed):
        why = "it was saved before the end of a validation, which Lightning leaves out or begins again"
    if why:
        _told[trainer] = checkpoint
        warn(
            f"the run may not go on exactly where {checkpoint} was saved: {why}. Add "
            "midepoch.adapters.trainers.lightning.ExactResume() to the trainer's callbacks",
        )


def _begin_epoch(loader: Loader) -> None:
    """Give up what limit_train_batches left of a resumed epoch; the loader would warn that it is lost."""
    with contextlib.suppress(StateError):  # of a source that cannot say where it stands; its next pass does the same
        Part("", loader).leave_epoch()


def _loop_of_epochs(frame: FrameType | None) -> tuple[str, Any]:
    for _ in range(_DEPTH):
        if frame is None:
            break
        if (method := frame.f_code.co_name) in (_SET_UP, _BEGIN):
            loop = frame.f_locals.get("self")
            return (method, loop) if hasattr(loop, "epoch_loop") else ("", None)
        frame = frame.f_back
    return "", None


def _why_inexact(trainer: Any, resumed: Resumed) -> str:
    """Why other batches may follow than without the interruption; empty if the same ones do."""
    from midepoch.adapters.trainers import lightning_private as private

    combined = private.combined_of(trainer.fit_loop)
    loaders = [each for each in map(loader_of, combined.flattened) if each is not None]
    limits = private.limits_of(combined)
    number = min(limits) if private.mode_of(combined) == "min_size" else max(limits)
    epochs, batches = resumed.epochs, resumed.batches
    begins = epochs["started"] < epochs["ready"]
    counted = epochs["started"] == epochs["ready"] == epochs["processed"]
    done = 0 if begins else batches["processed"]
    ended = 0 < done == batches["ready"] and (resumed.read_all or done >= number)
    following = epochs["processed"] + (ended and not counted)  # the epoch that comes next
    if 0 <= trainer.max_steps <= resumed.steps:
        return ""  # nothing is left to do
    if ended and not counted and batches["completed"] < done:
        return "it was saved as an epoch's last batch ended, and Lightning leaves out what follows it in that epoch"
    if ended and 0 <= (trainer.max_epochs or -1) <= following:
        return ""  # nothing is left to train on
    if _INFINITE in limits:
        return "the length of a loader is unknown, so Lightning had read a batch ahead, which is lost"
    if begins and batches["ready"]:
        return "it was saved as an epoch began, but Lightning still counts the batches of the epoch before"
    if counted and done and not ended:
        return (
            f"the run ended after {done} of {number:.0f} batches of an epoch, which Lightning takes for a whole epoch"
        )
    if counted and done and trainer.max_steps != -1:
        return "it was saved at the end of an epoch, and with max_steps Lightning trains on one batch more of it"
    if ended:
        places = [(each.epoch, each.position) for each in loaders]
        if resumed.waiting:  # these states are not loaded, but the loaders are told the epoch
            places = [(state["epoch"] + (state["position"] > 0), 0) for state in resumed.waiting]
        exact = all(place == (following, 0) for place in places)
    else:
        exact = all(each.batches_done == done for each in loaders)
        exact = exact and all(state["epoch"] == following for state in resumed.waiting)
    if exact:
        return ""
    if batches["ready"] > done:
        return "it was saved in the middle of a batch, which is lost"
    if resumed.waiting and not ended:
        return "the loaders were made before the checkpoint was read (estimated_stepping_batches), and begin again"
    if len(loaders) > 1:
        return "it does not say which of several loaders had come to their ends before the others"
    return f"Lightning counts {done} batches of this epoch, but the loader {loaders[0].batches_done}"


def _owes_validation(trainer: Any, resumed: Resumed) -> bool:
    """Whether it was saved before the end of a validation that was due in the epoch that goes on."""
    from midepoch.adapters.trainers import lightning_private as private

    epochs, batches = resumed.epochs, resumed.batches
    if not batches["processed"] or not epochs["processed"] < epochs["started"] == epochs["ready"]:
        return False
    return private.will_validate(trainer) and (
        batches["completed"] < batches["processed"] or not private.has_validated(trainer)
    )
