"""torch.distributed.checkpoint takes a loader as it takes a model, in the background and on other processes too.

``python examples/distributed_checkpoint.py FOLDER``: kill it at any time, run it again, and it goes on at the very
batch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch.utils.data import DataLoader, Dataset

import midepoch

dcp: Any = torch.distributed.checkpoint


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)
state = {"model": model, "optimizer": optimizer, "loader": loader}

folder = Path(sys.argv[1])
if checkpoints := sorted(folder.glob("batch-*")):
    dcp.load(state, checkpoint_id=checkpoints[-1])
while loader.epoch < 2:
    for batch in loader:
        loss: torch.Tensor = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step = loader.epoch * len(loader) + loader.batches_done
        print(f"batch {step}: {batch.tolist()}, loss {loss.item()}", flush=True)
        if step % 3 == 0:
            dcp.save(state, checkpoint_id=folder / "draft")
            (folder / "draft").rename(folder / f"batch-{step:06}")  # whoever is killed in a save has those before
        time.sleep(0.1)  # so that there is time to kill it
