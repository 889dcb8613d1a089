"""Fabric: the loader is one of the objects that ``fabric.save`` and ``fabric.load`` take.

``python examples/fabric_loop.py``
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
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


fabric = Fabric(accelerator="cpu")
with tempfile.TemporaryDirectory() as folder:
    loader = make()
    head = train(loader, 3)
    fabric.save(Path(folder) / "checkpoint", {"loader": loader})  # beside the model and the optimizer

    loader = make()  # a new process
    fabric.load(Path(folder) / "checkpoint", {"loader": loader})
    assert head + train(loader, 7) == train(make(), 10)
print("3 batches and the 7 after them are bit-equal to an epoch of 10")
