"""ignite: the loader is one of the objects of a Checkpoint, beside the trainer.

``python examples/ignite_engine.py``
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

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


def make() -> Any:
    return midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)


def engine(loader: Any, seen: list[Any], folder: str, stop: int) -> Engine:
    made = Engine(lambda engine, batch: seen.append(batch.tolist()))
    save = Checkpoint({"trainer": made, "loader": loader}, DiskSaver(folder), filename_pattern="checkpoint.pt")

    @made.on(Events.ITERATION_COMPLETED(once=stop))
    def _save() -> None:
        save(made)
        made.terminate()

    return made


seen: list[Any] = []
with tempfile.TemporaryDirectory() as folder:
    loader = make()
    engine(loader, seen, folder, stop=3).run(loader, max_epochs=1)

    loader = make()  # a new process
    again = Engine(lambda engine, batch: seen.append(batch.tolist()))
    saved = torch.load(Path(folder) / "checkpoint.pt", weights_only=True)
    Checkpoint.load_objects({"trainer": again, "loader": loader}, saved)
    again.run(loader)
assert seen == [batch.tolist() for batch in make()]
print("3 batches and the 7 after them are bit-equal to an epoch of 10")
