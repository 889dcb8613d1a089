"""torchtitan: its Trainer reads a wrapped loader, and its checkpoints keep the place, on any number of processes.

``python examples/torchtitan_feed.py FOLDER``: kill it at any time, run it again, and it goes on at the very batch, on
three ranks rather than two. It builds what torchtitan's Trainer builds and reads there without a model, since that
needs a GPU. With one, let `my_config` stand in your own config registry.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import midepoch
from midepoch.trainers.torchtitan import feed

GLOBAL_BATCH = 6


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        tokens = torch.cat([torch.tensor([index]), torch.randint(100, (8,))])
        return {"input": tokens[:-1]}, tokens[1:]


def make(world: midepoch.World, local_batch_size: int, **others: Any) -> Any:
    return midepoch.wrap(DataLoader(Texts(), batch_size=local_batch_size, shuffle=True), seed=0, world=world)


def my_config() -> Any:
    config = llama3_debugmodel()
    feed(config, make)
    return config


checkpoint = Path(sys.argv[1], "checkpoint.pt")
checkpoint.parent.mkdir(parents=True, exist_ok=True)
saved: Any = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else {"step": 0, "loader": {}}
world_size = 3 if checkpoint.exists() else 2
sizes = {"dp_world_size": world_size, "local_batch_size": GLOBAL_BATCH // world_size}
ranks = [my_config().dataloader.build(dp_rank=rank, **sizes) for rank in range(world_size)]
for rank in ranks:
    rank.load_state_dict(saved["loader"])
for step, *parts in zip(range(saved["step"] + 1, 21), *ranks, strict=False):
    print(f"batch {step}: {[row for inputs, _ in parts for row in inputs['input'].tolist()]}", flush=True)
    if step % 3 == 0:
        torch.save({"step": step, "loader": ranks[0].state_dict()}, checkpoint.with_suffix(".draft"))
        checkpoint.with_suffix(".draft").replace(checkpoint)  # whoever is killed in a save has the one before
    time.sleep(0.1)  # so that there is time to kill it
