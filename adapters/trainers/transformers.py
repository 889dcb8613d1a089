"""Hugging Face Trainer: `feed` gives it a wrapped loader, and its checkpoints keep the loader's state."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from midepoch.errors import StateError, StateMismatchError
from midepoch.loader.lending import loader_of
from midepoch.loader.loader import Loader
from midepoch.loader.saving import state_for_checkpoint
from midepoch.state.format import State
from midepoch.state.parts import gather_state
from midepoch.trainers import transformers_private as private

__all__ = ["feed"]


def feed(trainer: Trainer, loader: Loader) -> None:
    """Make `trainer` train on `loader`, and save and resume it. Call this once, before ``trainer.train``.

    Nothing else changes: ``trainer.train(resume_from_checkpoint=True)`` continues at the exact batch, with the right
    count of steps. The state is in each checkpoint's trainer_state.json.

    The Trainer counts epochs in steps, so a resumed epoch must have the same number of batches for each process. On
    another number of processes, change ``per_device_train_batch_size`` so that the product stays the same.

    Args:
        trainer: must not have begun to train.
        loader: the result of `midepoch.wrap` or `midepoch.combine`. Its batches are mappings that the model takes.

    Raises:
        TypeError: an argument has the wrong type.
    """
    found = loader_of(loader)
    if not isinstance(trainer, Trainer) or found is None:
        raise TypeError(
            f"feed takes a Trainer and a wrapped loader, got a {type(trainer).__name__} and a "
            f"{type(loader).__name__}: feed(trainer, midepoch.wrap(loader))"
        )
    fed: Loader = found
    gathered: list[State | None] = []
    read = (-1, 0)  # the steps done when batches were read, and how many were
    skips: list[Any] = []  # holds one while the Trainer might skip batches

    class MidepochState(TrainerCallback, ExportableState):
        """Saved by the Trainer in its own state, under the name of this class."""

        def state(self) -> dict[str, Any]:
            state = gathered.pop() if gathered else state_now()
            return {"args": {}, "attributes": {"loader": state, "batches": _length(fed)}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            if state.global_step:
                _load(fed, state.stateful_callbacks.get(type(self).__name__))

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            skips[:] = [private.SKIPS.needed()]

        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            skips.clear()

        def on_train_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            skips.clear()

    def state_now() -> State | None:
        # An exception or a signal may come when batches have been read whose step is not done: they are given again.
        in_flight = read[1] if read[0] == trainer.state.global_step else 0
        return state_for_checkpoint(fed, in_flight)[0]

    def has_read(batches: int) -> None:
        nonlocal read
        read = trainer.state.global_step, batches

    def collect() -> None:
        # The Trainer asks for states on one process only.
        state = state_now()
        gathered[:] = [None if state is None else gather_state(fed, state)]

    private.read_from(trainer, fed)
    private.after_reading(trainer, has_read)
    private.before_saving(trainer, collect)
    trainer.add_callback(MidepochState())


def _load(loader: Loader, saved: Any) -> None:
    if not isinstance(saved, dict):
        raise StateError(
            "the checkpoint has no loader state, because it was saved without midepoch's feed(): resume from one that "
            "was saved with it, or train without feed()"
        )
    found = saved["attributes"]
    if found["loader"] is None:
        raise StateError(
            "the checkpoint was saved after an exception that left the loader's state unknown: resume from an earlier "
            "one"
        )
    if found["batches"] != _length(loader):
        raise StateMismatchError(
            f"an epoch had {found['batches']} batches for each process when the checkpoint was saved, but has "
            f"{_length(loader)} now, and the Trainer counts epochs in steps: choose the batch size so that batch size "
            "times number of processes is as it was"
        )
    loader.load_state_dict(found["loader"])


def _length(loader: Loader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
