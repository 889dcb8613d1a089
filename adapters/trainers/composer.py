"""Composer: `ExactResume` keeps the position of a wrapped train loader in Composer's own checkpoints."""

from __future__ import annotations

from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import reproducibility

from midepoch.errors import warn
from midepoch.loader.lending import loader_of
from midepoch.loader.loader import Loader
from midepoch.loader.part import Part
from midepoch.loader.saving import state_for_checkpoint
from midepoch.state.parts import gather_state

__all__ = ["ExactResume"]


class ExactResume(Callback):
    """Makes a Composer run resume at the exact batch: ``Trainer(..., callbacks=[ExactResume()])``.

    The train loader must be wrapped. Pass it to the Trainer as ``train_dataloader``, directly or in a DataSpec.
    To resume, Composer reads the past batches of an epoch again; with this callback it need not. Composer restores its
    random generators only when it does so; the callback restores them too. ``spin_dataloaders`` need not be changed.

    Saving is collective, as it is in Composer.
    """

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._state: State | None = None
        self._loaded: dict[str, Any] | None = None
        self._shortened: int | None = None  # dataloader_len before it was shortened; -1 for an unknown length
        self._given = -1  # Composer's count of batches when the last one was handed over

    def fit_start(self, state: State, logger: Logger) -> None:
        """Load the state into the loader. Raises TypeError if the loader is not wrapped."""
        loader = loader_of(state.dataloader)
        if loader is None:
            raise TypeError(
                f"ExactResume needs a wrapped train loader, but this one is a "
                f"{type(state.dataloader).__name__}: Trainer(train_dataloader=midepoch.wrap(loader), ...)"
            )
        before, self._loader, self._state = self._loader, loader, state
        begun = int(state.timestamp.batch_in_epoch)
        if self._loaded is not None:
            loader.load_state_dict(self._loaded["loader"])
        elif before is loader:  # another fit of the same Trainer, which continues where the previous one ended
            now = state_for_checkpoint(loader, self._in_flight())[0]
            if now is not None:
                loader.load_state_dict(now)
        else:
            if before is None and (begun or int(state.timestamp.epoch)):
                warn(
                    "this Composer checkpoint was saved without ExactResume, so the train loader starts its first "
                    "epoch, whatever was read before. Resume from one saved with it, or load only the weights",
                )
            return
        self._given = -1
        # Composer skips nothing if a data set says that it can resume by itself.
        state.dataset_resumption["train"] = True
        length = None if state.dataloader_len is None else int(state.dataloader_len)
        left = _batches_left(loader, length, begun) if begun else None
        if left is not None:
            # Composer would give the rest of this epoch as many batches as a whole epoch has.
            self._shortened = -1 if length is None else length
            state.dataloader_len = left

    def _in_flight(self) -> int:
        """Batches that were handed over but not counted by Composer, because of an exception in between."""
        return int(self._state is not None and int(self._state.timestamp.batch) == self._given)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Called when a batch has been handed over."""
        self._given = int(state.timestamp.batch)

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Called before a batch is read. At the first one after a resume, Composer knows how many follow."""
        if self._loaded is not None and int(state.timestamp.batch_in_epoch):
            reproducibility.load_rng_state(self._loaded["generators"])
        if self._shortened is not None:
            state.dataloader_len = self._shortened
        self._loaded = self._shortened = None

    def state_dict(self) -> dict[str, Any]:
        """Called on every process. Empty before the loader is known, and where its state is not."""
        if self._loader is None or self._loaded is not None:
            return self._loaded or {}
        state = state_for_checkpoint(self._loader, self._in_flight())[0]
        if state is None:
            return {}
        return {"loader": gather_state(self._loader, state), "generators": reproducibility.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until the loader is known."""
        self._loaded = state or None


def _batches_left(loader: Loader, length: int | None, begun: int) -> int | None:
    """The number of batches that Composer's epoch still has; None for all that the loader has.

    Args:
        loader: at the position where the epoch continues.
        length: of a whole epoch in Composer, None if unknown.
        begun: batches of it that are done, counted in the world that saved.
    """
    if not loader.position:
        return 0  # the loader's epoch has ended, Composer's has not
    try:
        _ = loader.batches_left  # raises where only reading tells, and `batches_done` is then a bound
        begun = loader.batches_done
    except TypeError:  # only reading tells whether anything is left
        try:
            loader.peek()
        except StopIteration:
            Part("", loader).leave_epoch()
            return 0
    if length is None:
        return None
    if begun >= length:  # train_subset_num_batches gives up the rest of the loader's epoch
        Part("", loader).leave_epoch()
    return max(length - begun, 0)
