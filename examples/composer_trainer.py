"""Composer: a run goes on from its checkpoint at the very batch.

``python examples/composer_trainer.py FOLDER``: kill it at any time, run it again, and it goes on at the very batch.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from composer import Trainer
from composer.models import ComposerModel
from torch.utils.data import DataLoader, Dataset

import midepoch
from midepoch.adapters.trainers.composer import ExactResume


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


torch.manual_seed(0)
model = Model()
trainer = Trainer(
    model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", max_duration="2ep",
    train_dataloader=midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0),
    device_train_microbatch_size=4, callbacks=[ExactResume()],
    run_name="example", save_folder=sys.argv[1], save_interval="3ba", autoresume=True,
)  # fmt: skip
trainer.fit()
