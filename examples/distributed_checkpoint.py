"""torch.distributed.checkpoint takes a loader as it takes a model, in the background and on other processes too.

``python examples/distributed_checkpoint.py``
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
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


with tempfile.TemporaryDirectory() as folder:
    loader = make()
    head = train(loader, 3)
    dcp.save({"loader": loader}, checkpoint_id=Path(folder) / "checkpoint")  # type: ignore[attr-defined]

    loader = make()  # a new process, or three where there were two
    dcp.load({"loader": loader}, checkpoint_id=Path(folder) / "checkpoint")  # type: ignore[attr-defined]
    assert head + train(loader, 7) == train(make(), 10)
print("3 batches and the 7 after them are bit-equal to an epoch of 10")
