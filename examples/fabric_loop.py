"""Fabric: the loader is one of the objects that ``fabric.save`` and ``fabric.load`` take.

``python examples/fabric_loop.py FOLDER``: kill it at any time, run it again, and it goes on at the very batch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset

import midepoch


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


fabric = Fabric(accelerator="cpu")
fabric.launch()
torch.manual_seed(0)
layer = torch.nn.Linear(1, 1)
model, optimizer = fabric.setup(layer, torch.optim.AdamW(layer.parameters(), lr=0.1))
loader = midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)
state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}

checkpoint, draft = Path(sys.argv[1], "checkpoint.pt"), Path(sys.argv[1], "draft.pt")
if checkpoint.exists():
    fabric.load(checkpoint, state)
for _ in loader.epochs(2):
    for batch in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        state["step"] += 1
        print(f"batch {state['step']}: {batch.tolist()}, loss {loss.item()}", flush=True)
        if state["step"] % 3 == 0 or state["step"] == 2 * len(loader):
            fabric.save(draft, state)
            fabric.barrier()
            if fabric.is_global_zero:
                draft.replace(checkpoint)  # whoever is killed in a save has the one before
        time.sleep(0.1)  # so that there is time to kill it
