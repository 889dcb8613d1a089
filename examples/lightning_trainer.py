"""Lightning: a run that ends in the middle of an epoch goes on at the very batch.

``python examples/lightning_trainer.py FOLDER``: kill it at any time, run it again, and it goes on at the very batch.
"""

from __future__ import annotations

import os
import sys
import time
import zipfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

import midepoch
from midepoch.trainers.lightning import ExactResume


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        print(f"batch {self.global_step + 1}: {batch.tolist()}, loss {loss.item()}", flush=True)
        time.sleep(0.1)  # so that there is time to kill it
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


# On this machine. Lightning takes settings of the Trainer that are not given from these.
os.environ.update(PL_TRAINER_ACCELERATOR="cpu", PL_TRAINER_LOGGER="False", PL_TRAINER_ENABLE_PROGRESS_BAR="False")
torch.manual_seed(0)
folder = sys.argv[1]
loader = midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)
# Not one that was being written: Lightning makes a file in TMPDIR, and moves it.
whole = [path for path in Path(folder).glob("*.ckpt") if zipfile.is_zipfile(path)]
newest = max(whole, key=lambda path: path.stat().st_mtime, default=None)
trainer = Trainer(max_epochs=2, callbacks=[ModelCheckpoint(folder, every_n_train_steps=3), ExactResume()])
trainer.fit(Module(), loader, ckpt_path=newest)
