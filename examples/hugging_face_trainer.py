"""Hugging Face Trainer: a run goes on from its checkpoint at the very batch.

``python examples/hugging_face_trainer.py FOLDER``: kill it at any time, run it again, and it goes on at the very batch.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import midepoch
from midepoch.trainers.transformers import feed


class Noisy(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([index / 40]) + 0.1 * torch.randn(1)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        loss = self.layer(x).square().mean()
        print(f"batch {trainer.state.global_step + 1}: {x.tolist()}, loss {loss.item()}", flush=True)
        time.sleep(0.1)  # so that there is time to kill it
        return {"loss": loss}


def is_whole(checkpoint: Path) -> bool:
    """Not one that was being written: this is the file that the Trainer writes last."""
    try:
        return bool(json.loads((checkpoint / "trainer_state.json").read_text()))
    except (FileNotFoundError, ValueError):
        return False


torch.manual_seed(0)
arguments = TrainingArguments(
    sys.argv[1], num_train_epochs=2, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True
)
trainer = Trainer(Model(), arguments)
feed(trainer, midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0))
checkpoints = sorted(Path(sys.argv[1]).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
newest = next((str(path) for path in reversed(checkpoints) if is_whole(path)), None)
trainer.train(resume_from_checkpoint=newest)
