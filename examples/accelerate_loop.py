"""Accelerate: a loader that is registered is saved and loaded with everything else.

``python examples/accelerate_loop.py``
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

import midepoch


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


def make() -> Any:
    return midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)


def train(loader: Any, batches: int) -> list[Any]:
    """What the next so many batches of the epoch hold."""
    return [batch.tolist() for batch in itertools.islice(loader, batches)]


def prepare() -> tuple[Accelerator, Any]:
    accelerator, loader = Accelerator(cpu=True), make()
    accelerator.register_for_checkpointing(loader)  # not prepare(): midepoch gives each process its part
    return accelerator, loader


with tempfile.TemporaryDirectory() as folder:
    accelerator, loader = prepare()
    head = train(loader, 3)
    accelerator.save_state(str(Path(folder) / "checkpoint"))

    accelerator, loader = prepare()  # a new process
    accelerator.load_state(str(Path(folder) / "checkpoint"))
    assert head + train(loader, 7) == train(make(), 10)
print("3 batches and the 7 after them are bit-equal to an epoch of 10")
