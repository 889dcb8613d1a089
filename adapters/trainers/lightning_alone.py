"""Lightning without `ExactResume`: in a run that resumes, one warning names the callback.

A loader sees little of Lightning: it is asked for an iterator when the loop of epochs is set up, and told the epoch
when an epoch begins. The loop is found in the frames of the calling code.
"""

from __future__ import annotations

import contextlib
import weakref
from types import FrameType
from typing import Any

from midepoch.errors import StateError, warn
from midepoch.loader.loader import Loader
from midepoch.loader.part import Part

__all__ = ["warn_unless_exact"]

_SET_UP, _BEGIN = "setup_data", "on_advance_start"  # methods of Lightning's loop of epochs
_DEPTH = 10  # frames between them and a loader, at most

_told: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()  # each trainer's checkpoint


def warn_unless_exact(loader: Loader, frame: FrameType) -> None:
    """Warn once of a run that Lightning resumes by itself."""
    method, loop = _loop_of_epochs(frame)
    trainer: Any = getattr(loop, "trainer", None)
    checkpoint = getattr(trainer, "ckpt_path", None)
    if checkpoint is None:
        return
    # Lightning's version is checked as this is imported, which only a resumed run needs.
    from midepoch.trainers.lightning import ExactResume

    if any(isinstance(each, ExactResume) for each in trainer.callbacks):
        return
    if _told.get(trainer) != checkpoint:
        _told[trainer] = checkpoint
        warn(
            f"Lightning resumes this loader from {checkpoint} by its own counts, which may not be exact: add "
            "midepoch.trainers.lightning.ExactResume() to the trainer's callbacks",
        )
    if method == _BEGIN and not getattr(loop, "is_resuming", True):
        # Give up what limit_train_batches left of a resumed epoch; the loader would warn that it is lost.
        with contextlib.suppress(StateError):  # of a source that cannot say where it is; its next pass does the same
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
