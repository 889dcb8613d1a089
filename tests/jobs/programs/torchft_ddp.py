"""The shape of torchft's train_ddp.py: a process of a replica group, its own sampler, a loop over steps."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torchft
from torch import nn, optim
from torch.utils.data import DataLoader

import midepoch.trainers.torchft
from synthetic import Pictures

GROUP = int(os.environ.get("REPLICA_GROUP_ID", 0))
GROUPS = int(os.environ.get("NUM_REPLICA_GROUPS", 2))


def main() -> None:
    trainset = Pictures(96, True)
    # So that groups read different samples, as long as all of them are there.
    trainloader: Any = midepoch.wrap(DataLoader(trainset, 4, shuffle=True, num_workers=2), seed=0, tail="uneven")

    def load_state_dict(state_dict: Any) -> None:
        model.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optim"])

    def state_dict() -> Any:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load_state_dict,
        state_dict=state_dict, replica_id=f"train_ddp_{GROUP}", timeout=timedelta(seconds=30),
    )  # fmt: skip
    trainloader = midepoch.trainers.torchft.feed(manager, trainloader)
    model = torchft.DistributedDataParallel(manager, nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
    optimizer = torchft.Optimizer(manager, optim.AdamW(model.parameters()))
    criterion = nn.CrossEntropyLoss()

    while True:
        for inputs, labels in trainloader:
            # At the beginning of each step: the quorum is begun here.
            optimizer.zero_grad()
            loss: Any = trainloader.weight * criterion(model(inputs), labels)
            # The all-reduce of the gradients overlaps with the backward pass.
            loss.backward()
            # At the end of each step. It steps only if no group has failed.
            optimizer.step()
            print(f"[{manager.current_step()}] loss = {loss.item()}, {manager.num_participants()} groups", flush=True)
            if manager.current_step() >= 30:
                torch.save(model.state_dict(), f"model_{GROUP}.pt")
                return


if __name__ == "__main__":
    main()
