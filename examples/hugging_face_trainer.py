"""Hugging Face Trainer: a run goes on from its checkpoint at the very batch.

``python examples/hugging_face_trainer.py``
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import midepoch
from midepoch.adapters.trainers.transformers import feed


class Noisy(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([index / 40]) + 0.1 * torch.randn(1)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(x.tolist())
        return {"loss": self.layer(x).square().mean()}


def train(folder: Path, steps: int, resume: bool = False) -> Model:
    model = Model()
    arguments = TrainingArguments(
        str(folder), max_steps=steps, save_steps=7, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model, arguments)
    feed(trainer, midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0))
    trainer.train(resume_from_checkpoint=resume)
    return model


with tempfile.TemporaryDirectory() as folder:
    whole = train(Path(folder) / "whole", 20)
    head = train(Path(folder) / "cut", 7)
    tail = train(Path(folder) / "cut", 20, resume=True)
assert head.seen + tail.seen == whole.seen
print("7 batches and the 13 after them are bit-equal to a run of 20")
