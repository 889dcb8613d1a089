"""Composer: `ExactResume` keeps the place of a wrapped train loader in Composer's own checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import reproducibility

from midepoch.errors import MidepochWarning
from midepoch.loader.lending import loader_of
from midepoch.loader.loader import Loader
from midepoch.loader.part import Part
from midepoch.state.parts import gather

__all__ = ["ExactResume"]


class ExactResume(Callback):
    """Let a Composer run go on at the very batch: ``Trainer(..., callbacks=[ExactResume()])``.

    The train loader is one that was wrapped, given to the Trainer as ``train_dataloader`` as it is or in a DataSpec.
    Composer resumes by reading again what an epoch has behind it, which this callback makes needless, and forgets its
    random generators where it does not: the callback puts these back too. ``spin_dataloaders`` may be left as it is.

    Saving is collective, as Composer's own.
    """

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._state: State | None = None
        self._loaded: dict[str, Any] | None = None
        self._shortened: int | None = None  # what dataloader_len was before it was shortened; -1 for an unknown length
        self._given = -1  # Composer's count of batches when the last one was handed over

    def fit_start(self, state: State, logger: Logger) -> None:
        """The loader goes to its place. TypeError where it was not wrapped."""
        loader = loader_of(state.dataloader)
        if loader is None:
            raise TypeError(
                f"ExactResume keeps the place of a train loader that was wrapped, and this is a "
                f"{type(state.dataloader).__name__}: Trainer(train_dataloader=midepoch.wrap(loader), ...)"
            )
        before, self._loader, self._state = self._loader, loader, state
        begun = int(state.timestamp.batch_in_epoch)
        if self._loaded is not None:
            loader.load_state_dict(self._loaded["loader"])
        elif before is loader:  # another fit of the same Trainer, which goes on where the one before ended
            loader.load_state_dict(loader.state_dict(self._in_flight()))
        else:
            if before is None and (begun or int(state.timestamp.epoch)):
                warnings.warn(
                    "this checkpoint of Composer's was saved without ExactResume: the train loader begins its first "
                    "epoch, whatever was read before. Resume one that was saved with it, or load weights alone",
                    MidepochWarning,
                    stacklevel=2,
                )
            return
        self._given = -1
        # Nothing is to be read again: that is what Composer takes from a data set which can resume by itself.
        state.dataset_resumption["train"] = True
        length = None if state.dataloader_len is None else int(state.dataloader_len)
        left = _batches_left(loader, length, begun) if begun else None
        if left is not None:
            # Composer would give the rest of this epoch as many batches as a whole one has.
            self._shortened = -1 if length is None else length
            state.dataloader_len = left

    def _in_flight(self) -> int:
        """Batches that were handed over, but that Composer has not counted: an exception came between."""
        return int(self._state is not None and int(self._state.timestamp.batch) == self._given)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """A batch was handed over."""
        self._given = int(state.timestamp.batch)

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """The first batch after a resume is about to be read, and Composer knows by now how many follow."""
        if self._loaded is not None and int(state.timestamp.batch_in_epoch):
            reproducibility.load_rng_state(self._loaded["generators"])
        if self._shortened is not None:
            state.dataloader_len = self._shortened
        self._loaded = self._shortened = None

    def state_dict(self) -> dict[str, Any]:
        """Asked for on every process. Empty before the loader is known."""
        if self._loader is None or self._loaded is not None:
            return self._loaded or {}
        state = gather(self._loader, in_flight=self._in_flight())
        return {"loader": state, "generators": reproducibility.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Kept until the loader is known."""
        self._loaded = state or None


def _batches_left(loader: Loader, length: int | None, begun: int) -> int | None:
    """How many batches Composer's epoch still has; None for all that the loader has.

    Args:
        loader: stands where the epoch goes on.
        length: of a whole epoch of Composer's, None where it is not known.
        begun: batches of it that are behind, counted on the world that saved.
    """
    if not loader.position:
        return 0  # the loader's epoch is over, Composer's is not yet
    try:
        begun = len(loader) - loader.batches_left
    except TypeError:  # only reading tells whether something is left
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
