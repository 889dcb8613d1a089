"""Composer: a run goes on from its checkpoint at the very batch.

``python examples/composer_trainer.py FOLDER``
"""

from __future__ import annotations

import sys
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
        self.seen: list[Any] = []

    def forward(self, batch: torch.Tensor) -> Any:
        self.seen.append(batch.tolist())
        return self.layer(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Any:
        return outputs.square().mean()


def train(duration: str, checkpoint: str | None = None) -> Any:
    model = Model()
    loader = midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)
    where = {"save_folder": sys.argv[1], "save_overwrite": True, "save_filename": "last.pt", "load_path": checkpoint}
    Trainer(model=model, train_dataloader=loader, max_duration=duration, device_train_microbatch_size=4,
            callbacks=[ExactResume()], device="cpu", **where).fit()  # fmt: skip
    return model.seen


whole = train("20ba")
assert train("7ba") + train("20ba", f"{sys.argv[1]}/last.pt") == whole
print("7 batches and the 13 after them are bit-equal to a run of 20")
