"""States for a checkpoint that is saved by itself, perhaps while an exception of the user's is on its way."""

from __future__ import annotations

import sys

from ..errors import StateError, warn
from ..state.format import State
from .loader import Loader

__all__ = ["state_for_checkpoint", "state_or_that_of_now"]


def state_or_that_of_now(loader: Loader, in_flight: int) -> tuple[State, int]:
    """The state of `in_flight` batches ago; where that is not known, the present state, with a warning.

    After many hours, a checkpoint that leaves out a batch is better than none.

    Returns:
        The state, and how many of the batches in flight it leaves out.

    Raises:
        StateError: the present state is not known either.
    """
    try:
        return loader.state_dict(in_flight), 0
    except StateError as error:
        if not in_flight:
            raise
        unknown = str(error)
    state = loader.state_dict()
    warn(
        f"the state of {in_flight} batches ago is not known ({unknown}). The present state is saved, so a run that "
        f"resumes leaves these batches out: pass remember={in_flight} to midepoch.wrap",
    )
    return state, in_flight


def state_for_checkpoint(loader: Loader, in_flight: int = 0) -> tuple[State | None, int]:
    """As `state_or_that_of_now`, but None, with a warning, if an exception is being handled and no state is known.

    An error of midepoch's would take the place of that exception.
    """
    handled = sys.exception()
    try:
        return state_or_that_of_now(loader, in_flight)
    except StateError as error:
        if handled is None:
            raise
        unknown = str(error)
    warn(
        f"this checkpoint has no state of the {type(loader.source).__name__}, because it is not known after the "
        f"{type(handled).__name__} ({unknown}): resume from an earlier checkpoint, or pass remember=1 to midepoch.wrap",
    )
    return None, 0
