"""PyTorch's fault-tolerance tutorial, going on at the very batch: ``torchrun --nproc-per-node 2 examples/torchrun.py``.

Kill it at any time, start it again on another number of processes, or let torchrun do so (docs/trainers.md).
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import midepoch


class Trainer:
    def __init__(self, model: torch.nn.Module, data: DataLoader[Any], save_every: int, path: str) -> None:
        self.data, self.rank = midepoch.wrap(data, seed=0), torch.distributed.get_rank()
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.snapshot = midepoch.Snapshot(
            path, every=save_every, model=self.model, optimizer=self.optimizer, data=self.data
        )

    def _run_batch(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss: torch.Tensor = torch.nn.functional.mse_loss(self.model(features), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def train(self, epochs: int) -> None:
        for epoch in self.snapshot.epochs(epochs):
            print(f"epoch {epoch} from position {self.data.position}", flush=True)
            for features, targets in self.data:
                self._run_batch(features, targets)
                self.snapshot.step()
                print(f"batch {self.snapshot.steps} of rank {self.rank}: {targets.tolist()}", flush=True)
        self.snapshot.close()


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    Trainer(torch.nn.Linear(4, 1), data, options.save_every, options.snapshot).train(options.epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("snapshot", nargs="?", default="snapshot.pt")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=5, help="batches")
    torch.distributed.init_process_group("gloo")
    train(parser.parse_args())
    gc.collect()  # DDP lies in cycles, and gloo aborts some processes that end before it is gone (docs/trainers.md)
    torch.distributed.destroy_process_group()
