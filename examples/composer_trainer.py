"""Composer: a run goes on from its checkpoint at the very batch.

``python examples/composer_trainer.py FOLDER``: kill it at any time, run it again, and it goes on at the very batch.
"""

from __future__ import annotations

import os
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.models import ComposerModel
from torch.utils.data import DataLoader, Dataset

import midepoch
from midepoch.trainers.composer import ExactResume


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.layer(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Any:
        loss = outputs.square().mean()
        print(f"batch {int(trainer.state.timestamp.batch) + 1}: {batch.tolist()}, loss {loss.item()}", flush=True)
        time.sleep(0.1)  # so that there is time to kill it
        return loss


# Not one that was being written, which Composer does under a checkpoint's own name.
whole = [path for path in Path(sys.argv[1]).glob("ep*-rank0.pt") if zipfile.is_zipfile(path)]
newest = max(map(str, whole), key=os.path.getmtime, default=None)
torch.manual_seed(0)
model = Model()
loader = midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)
trainer = Trainer(
    model=model, optimizers=torch.optim.AdamW(model.parameters(), lr=0.1), device="cpu", max_duration="2ep",
    train_dataloader=loader, device_train_microbatch_size=4, callbacks=[ExactResume()],
    save_folder=sys.argv[1], save_interval="3ba", save_overwrite=True, save_latest_filename=None,
    load_path=newest,
)  # fmt: skip
trainer.fit()
