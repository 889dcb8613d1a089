"""The parts of Lightning's loops that midepoch uses and Lightning does not promise. They are checked as a fit begins.

Versions are checked on import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from midepoch.combine.adapter import Mode
from midepoch.packages import Package

__all__ = [
    "check", "fetcher_of", "has_read_all", "intercept", "mode_of", "no_longer_restarts", "spec_of",
    "train_made_in", "validated", "validation_made_in", "will_validate",
]  # fmt: skip

_DISTRIBUTIONS = ("lightning", "pytorch-lightning")
_LIGHTNING = Package(
    "Lightning",
    # Both may be installed. The program uses the one that `midepoch.trainers.lightning` imports.
    _DISTRIBUTIONS if "lightning" in sys.modules or "pytorch_lightning" not in sys.modules else _DISTRIBUTIONS[::-1],
    ("2.6", "2.6"),
)


def check(trainer: Any) -> None:
    """Raise UnsupportedSourceError unless a trainer has the parts that midepoch uses."""
    _LIGHTNING.check(
        trainer, "fit_loop._data_fetcher", "fit_loop._data_source.dataloader", "fit_loop._last_train_dl_reload_epoch",
        "fit_loop._restarting", "fit_loop.epoch_loop._batches_that_stepped",
        "fit_loop.epoch_loop._num_ready_batches_reached", "fit_loop.epoch_loop._should_accumulate",
        "fit_loop.epoch_loop._should_check_val_fx",
        "fit_loop.epoch_loop.val_loop._data_fetcher", "fit_loop.epoch_loop.val_loop._data_source.dataloader",
        "fit_loop.epoch_loop.val_loop._has_run", "fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch",
        "fit_loop.is_resuming",
    )  # fmt: skip


# --- loaders ----------------------------------------------------------------------------------------------------------


def intercept(loop: Any, take: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace the loaders that a loop's source returns by the result of `take`. Returns a function that undoes this.

    The source belongs to this trainer alone.
    """
    source = loop._data_source
    source.dataloader = lambda: take(type(source).dataloader(source))

    def restore() -> None:
        vars(source).pop("dataloader", None)

    return restore


def fetcher_of(loop: Any) -> Any:
    """The object that reads batches for a loop."""
    return loop._data_fetcher


def mode_of(combined: Any) -> Mode:
    """The mode of a CombinedLoader."""
    mode: Mode = combined._mode
    return mode


def spec_of(combined: Any) -> Any:
    """The container that a CombinedLoader's loaders were given in: a list, a dict."""
    return combined._spec


def train_made_in(trainer: Any) -> float:
    """The epoch in which train loaders were last made."""
    return float(trainer.fit_loop._last_train_dl_reload_epoch)


def validation_made_in(trainer: Any) -> float:
    """The epoch in which validation loaders were last made."""
    return float(trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch)


# --- progress ---------------------------------------------------------------------------------------------------------


def has_read_all(trainer: Any) -> bool:
    """Whether all batches of the epoch were handed over."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def will_validate(trainer: Any) -> bool:
    """Whether a validation follows the batch that was trained on last."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def validated(trainer: Any) -> None:
    """Mark a validation as done in the loop, and count the last step."""
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.val_loop._has_run = True
    epoch_loop._batches_that_stepped += not epoch_loop._should_accumulate()


def no_longer_restarts(trainer: Any) -> None:
    """End the restart of the loop of epochs, but not of its inner loops."""
    trainer.fit_loop._restarting = False
    trainer.fit_loop.reset_restart_stage()
