"""A plain torchrun script that can be killed at any time: ``torchrun --nproc-per-node 2 examples/torchrun.py``.

Start it again with another ``--nproc-per-node``: it goes on where the last checkpoint was.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import midepoch

EPOCHS = 2


def main(checkpoint: Path) -> None:
    torch.distributed.init_process_group("gloo")
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = midepoch.wrap(DataLoader(dataset, batch_size=4, shuffle=True), seed=0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])

    while loader.epoch < EPOCHS:
        for features, target in loader:
            optimizer.zero_grad()
            loss: torch.Tensor = torch.nn.functional.mse_loss(model(features), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if torch.distributed.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}
                torch.save(state, beside := checkpoint.with_suffix(".tmp"))
                os.replace(beside, checkpoint)  # noqa: PTH105  # the atomic rename is the point
    if torch.distributed.get_rank() == 0:
        print(f"finished at epoch {loader.epoch}, position {loader.position}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoint.pt"))
