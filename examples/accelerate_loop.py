"""Accelerate: a loader that is registered is saved and loaded with everything else.

``python examples/accelerate_loop.py FOLDER``: kill it at any time, run it again, and it goes on at the very batch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

import midepoch


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
layer = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(layer, torch.optim.AdamW(layer.parameters(), lr=0.1))
loader = midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)
accelerator.register_for_checkpointing(loader)  # not prepare(): midepoch gives each process its part

folder, step = Path(sys.argv[1]), 0
if checkpoints := sorted(folder.glob("batch-*"), key=lambda path: int(path.name[6:])):
    accelerator.load_state(str(checkpoints[-1]))
    step = int(checkpoints[-1].name[6:])
for _ in loader.epochs(2):
    for batch in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        print(f"batch {step}: {batch.tolist()}, loss {loss.item()}", flush=True)
        if step % 3 == 0 or step == 2 * len(loader):
            accelerator.save_state(str(folder / "draft"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (folder / "draft").rename(folder / f"batch-{step}")  # whoever is killed in a save has those before
            accelerator.wait_for_everyone()
        time.sleep(0.1)  # so that there is time to kill it
