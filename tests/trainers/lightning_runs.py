"""Runs of Lightning for the tests: loaders, a module that writes down what it is given, and what ends a run."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import registry
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochWarning
from midepoch.trainers.lightning import ExactResume
from support import sources

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # it says more than the tests
# Each Trainer reads what every installed package registers: 20 ms, a fifth of a short fit.
vars(registry)["entry_points"] = functools.cache(vars(registry)["entry_points"])

CHAOS = bool(os.environ.get("MIDEPOCH_CHAOS"))


class Killed(BaseException):
    """What ends a run in its middle."""


class Noisy(sources.Indices):
    def __init__(self, size: int, name: float) -> None:
        super().__init__(size)
        self.name = name

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.name, index, float(torch.rand(()))])


def mapped(size: int = 10, name: float = 0, **settings: Any) -> Any:
    return midepoch.wrap(DataLoader(Noisy(size, name), batch_size=2, shuffle=True, **settings), seed=3)


def unknown(batches: int = 5, name: float = 0) -> Any:
    def generate() -> Iterator[torch.Tensor]:
        for index in range(batches):
            yield torch.tensor([[name, index, float(torch.rand(()))]])

    return midepoch.wrap(generate, seed=3, shard=True)


class Recorder(LightningModule):
    def __init__(self, log: list[Any], fail_at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.log_of, self.fail_at = log, fail_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(self.log_of) == self.fail_at:
            raise ValueError("a bad batch")
        self.log_of.append(("train", self.trainer.current_epoch, batch_idx, sources.plain(batch)))
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not self.trainer.sanity_checking:
            self.log_of.append(("validation", dataloader_idx, batch_idx, sources.plain(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Peeking(Recorder):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Saver(Callback):
    """Saves at the n-th call of a hook, and ends the run there; 0 only counts them."""

    def __init__(self, hook: str, at: int, path: Path) -> None:
        self.at, self.path, self.calls = at, path, 0
        setattr(self, hook, self._called)

    def _called(self, trainer: Any, *arguments: Any, **keywords: Any) -> None:
        if trainer.sanity_checking:
            return
        self.calls += 1
        if self.calls == self.at:
            trainer.save_checkpoint(self.path)
            raise Killed


class Keeping(OnExceptionCheckpoint):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)

    def teardown(self, *arguments: Any, **keywords: Any) -> None:
        """Lightning removes it at the end of a run."""


Make = Callable[[], Any]


QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False,
}  # fmt: skip


def fit(
    log: list[Any], train: Make, validation: Make | None = None, callbacks: tuple[Callback, ...] = (),
    checkpoint: Path | None = None, module: Callable[[list[Any]], Any] = Recorder, exact: bool = True,
    told: list[str] | None = None, **settings: Any,
) -> Any:  # fmt: skip
    """Run a fit. What midepoch warns of is added to `told`; without one, it is an error."""
    epochs = {"max_epochs": 3 if CHAOS else 2, "limit_val_batches": 1.0 if validation else 0}
    callbacks = (*([ExactResume()] if exact else []), *callbacks)
    trainer = Trainer(**{**QUIET, **epochs, **settings}, callbacks=list(callbacks))
    with warnings.catch_warnings(record=told is not None) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("error" if told is None else "always", MidepochWarning)
        warnings.filterwarnings("ignore", "resuming an iterable", MidepochWarning)
        warnings.filterwarnings("ignore", ".*read again from its start", MidepochWarning)
        validation_loaders = None if validation is None else validation()
        try:
            trainer.fit(module(log), train(), validation_loaders, ckpt_path=checkpoint, weights_only=False)
        finally:
            if told is not None:
                told += [str(each.message) for each in caught or ()]
    return trainer


TRAIN: dict[str, Make] = {
    "mapped": mapped,
    "workers": functools.partial(mapped, num_workers=1),
    "unknown": unknown,
    "list of one": lambda: [mapped()],
    "dict": lambda: {"a": mapped(6, 1), "b": mapped(10, 2)},
    "nested": lambda: {"a": [mapped(6, 1), unknown(3, 2)], "b": (mapped(10, 3),)},
    **{
        f"{mode} {kind}": functools.partial(lambda mode, two: CombinedLoader(two(), mode), mode, two)
        for mode in ("min_size", "max_size", "max_size_cycle")
        for kind, two in {
            "mapped": lambda: {"a": mapped(6, 1), "b": mapped(10, 2)},
            "unknown": lambda: [unknown(3, 1), unknown(5, 2)],
            "mixed": lambda: [unknown(5, 1), mapped(6, 2)],
        }.items()
    },
}


VALIDATION: dict[str, Make] = {
    "one": lambda: mapped(6, 7),
    "two": lambda: [mapped(6, 7), mapped(4, 8)],
    "unknown": lambda: unknown(3, 7),
    "two unknown": lambda: [unknown(3, 7), unknown(2, 8)],
    "together": lambda: CombinedLoader([mapped(6, 7), mapped(4, 8)], "max_size"),
}
