"""Lightning: a run that ends in the middle of an epoch goes on at the very batch.

``python examples/lightning_trainer.py``
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

import midepoch
from midepoch.adapters.trainers.lightning import ExactResume


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        self.seen.append(batch.tolist())
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)


def fit(checkpoint: Path | None = None, save: Path | None = None, **settings: Any) -> Module:
    module = Module()
    trainer = Trainer(accelerator="cpu", callbacks=[ExactResume()], logger=False, **settings)
    trainer.fit(module, ckpt_path=checkpoint)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


with tempfile.TemporaryDirectory() as folder:
    whole = fit(max_epochs=2, enable_checkpointing=False)
    head = fit(save=Path(folder) / "middle.ckpt", max_steps=7, enable_checkpointing=False)
    tail = fit(Path(folder) / "middle.ckpt", max_epochs=2, enable_checkpointing=False)
assert head.seen + tail.seen == whole.seen
print("7 batches and the 13 after them are bit-equal to a run of 20")
