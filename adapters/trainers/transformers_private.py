"""The parts of Hugging Face's Trainer that midepoch uses and it does not promise. They are checked on import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers.trainer
from transformers import Trainer

from midepoch.loader.loader import Loader
from midepoch.packages import Package, Replacement

__all__ = ["SKIPS", "after_reading", "before_saving", "read_from"]

_TRANSFORMERS = Package("transformers", ("transformers",), ("5.23", "5.23"))
_TRANSFORMERS.part("transformers:Trainer._save_checkpoint")
_TRANSFORMERS.part("transformers:Trainer.get_batch_samples")
_TRANSFORMERS.part("transformers:Trainer.get_train_dataloader")


def read_from(trainer: Trainer, loader: Loader) -> None:
    """Make a trainer read from a loader, whatever data it was given."""
    given: Any = loader  # the Trainer's type for it is DataLoader
    trainer.get_train_dataloader = lambda: given  # type: ignore[method-assign]


def after_reading(trainer: Trainer, call: Callable[[int], None]) -> None:
    """Make a trainer call this with the number of batches that it has read for a step, before it trains on them."""
    read = trainer.get_batch_samples

    def called_after(*arguments: Any, **keywords: Any) -> Any:
        found = read(*arguments, **keywords)
        call(len(found[0]))
        return found

    trainer.get_batch_samples = called_after  # type: ignore[method-assign]


def before_saving(trainer: Trainer, call: Callable[[], None]) -> None:
    """Make a trainer call this on all processes before it saves a checkpoint. It has no event for that."""
    save = trainer._save_checkpoint

    def called_before(*arguments: Any, **keywords: Any) -> Any:
        call()
        return save(*arguments, **keywords)

    trainer._save_checkpoint = called_before  # type: ignore[method-assign]


_skip_first_batches = _TRANSFORMERS.part("transformers.trainer:skip_first_batches")


def _skip_none_of_ours(dataloader: Any, num_batches: int = 0) -> Any:
    return dataloader if isinstance(dataloader, Loader) else _skip_first_batches(dataloader, num_batches)


SKIPS = Replacement(transformers.trainer, "skip_first_batches", _skip_none_of_ours)
"""The Trainer skips the batches of an epoch that are done. A loader that is already past them must not skip any.

It skips in the first epoch after a resume, between ``on_epoch_begin`` and ``on_step_begin``.
"""
