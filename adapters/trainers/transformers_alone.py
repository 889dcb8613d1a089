"""Hugging Face Trainer without `feed`: what it resumes by itself, of a loader that its get_train_dataloader returns.

At an epoch's beginning it tells the loader the epoch, which is exact. Within an epoch it makes a loader of the wrapped
one's parts to skip batches, which is refused when it is read. With ``ignore_data_skip`` it skips nothing: the warning
here is for a loader that has not been led to its place by a state.
"""

from __future__ import annotations

import weakref
from types import FrameType

from midepoch.errors import warn
from midepoch.loader.loader import Loader

__all__ = ["warn_unless_exact"]

_told: weakref.WeakSet[Loader] = weakref.WeakSet()


def warn_unless_exact(loader: Loader, frame: FrameType) -> None:
    """Warn, once for a loader, if the Trainer resumes within an epoch and the loader begins it again."""
    found = frame.f_locals
    steps = found.get("num_update_steps_per_epoch", 0)
    state = getattr(found.get("self"), "state", None)
    resumes = found.get("resume_from_checkpoint") is not None and found.get("epoch") == found.get("epochs_trained")
    if not resumes or not steps or loader.position or loader in _told:
        return
    done = getattr(state, "global_step", 0) % steps
    if not done:
        return
    _told.add(loader)
    warn(
        f"the Trainer resumes after {done} of {steps} steps of an epoch, but with ignore_data_skip the loader begins "
        "it again: call midepoch.trainers.transformers.feed(trainer, loader), which continues it",
    )
