"""Composer: `ExactResume` keeps the place of a wrapped train loader in Composer's own checkpoints."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import reproducibility

from midepoch.errors import MidepochWarning
from midepoch.loader import Loader, loader_of
from midepoch.state import gather

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
        self._loaded: dict[str, Any] | None = None
        self._length: Any = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """The loader goes to its place. TypeError where it was not wrapped."""
        self._loader = loader_of(state.dataloader)
        if self._loader is None:
            raise TypeError(
                f"ExactResume keeps the place of a train loader that was wrapped, and this is a "
                f"{type(state.dataloader).__name__}: Trainer(train_dataloader=midepoch.wrap(loader), ...)"
            )
        begun = int(state.timestamp.batch_in_epoch)
        if self._loaded is None:
            if begun or int(state.timestamp.epoch):
                warnings.warn(
                    "this checkpoint of Composer's was saved without ExactResume: the train loader begins its first "
                    "epoch, whatever was read before. Resume one that was saved with it, or load weights alone",
                    MidepochWarning,
                    stacklevel=2,
                )
            return
        self._loader.load_state_dict(self._loaded["loader"])
        # Nothing is to be read again: that is what Composer takes from a data set which can resume by itself.
        state.dataset_resumption["train"] = True
        if begun and state.dataloader_len is not None:
            # Composer would give the rest of this epoch as many batches as a whole one has.
            self._length = state.dataloader_len
            state.dataloader_len = self._left(self._loader, int(self._length), begun)

    @staticmethod
    def _left(loader: Loader, length: int, begun: int) -> int:
        """How many batches Composer's epoch still has, of which `begun` are behind on the world that saved."""
        if not loader.position:
            return 0  # the loader's epoch is over, Composer's is not yet
        with contextlib.suppress(TypeError):  # of a source whose length is not known
            begun = loader.batches_done
        if begun >= length:  # train_subset_num_batches gives up the rest of the loader's epoch
            loader.load_state_dict(loader._state_at(loader.state_dict(), loader.epoch + 1))
        return max(length - begun, 0)

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """The first batch after a resume is about to be read, and Composer knows by now how many follow."""
        if self._loaded is None:
            return
        if int(state.timestamp.batch_in_epoch):
            reproducibility.load_rng_state(self._loaded["generators"])
        if self._length is not None:
            state.dataloader_len = self._length
        self._loaded = self._length = None

    def state_dict(self) -> dict[str, Any]:
        """Asked for on every process. Empty before the loader is known."""
        if self._loader is None:
            return self._loaded or {}
        return {"loader": gather(self._loader), "generators": reproducibility.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Kept until the loader is known."""
        self._loaded = state or None
