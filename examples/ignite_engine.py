"""ignite: the loader is one of the objects of a Checkpoint, beside the trainer.

``python examples/ignite_engine.py FOLDER``: kill it at any time, run it again, and it goes on at the very batch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch.utils.data import DataLoader, Dataset

import midepoch


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)


def update(engine: Engine, batch: torch.Tensor) -> None:
    loss: torch.Tensor = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    print(f"batch {engine.state.iteration}: {batch.tolist()}, loss {loss.item()}", flush=True)
    time.sleep(0.1)  # so that there is time to kill it


trainer = Engine(update)
parts = {"trainer": trainer, "model": model, "optimizer": optimizer, "loader": loader}
saver = DiskSaver(sys.argv[1], require_empty=False)  # which writes a file beside and renames it
# Two of them: ignite removes the oldest file before it writes the new one, so that of one there may be none.
trainer.add_event_handler(Events.ITERATION_COMPLETED(every=3), Checkpoint(parts, saver, n_saved=2))
checkpoints = sorted(Path(sys.argv[1]).glob("checkpoint_*.pt"), key=lambda path: int(path.stem.partition("_")[2]))
if checkpoints:
    Checkpoint.load_objects(parts, torch.load(checkpoints[-1], weights_only=True))
trainer.run(loader, max_epochs=2)
