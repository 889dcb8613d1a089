"""torchtitan: its Trainer reads a wrapped loader, and its checkpoints keep the place, on any number of processes.

``python examples/torchtitan_feed.py`` builds what torchtitan's Trainer builds, on two ranks and then on three, and
reads there without a model, since that needs a GPU. With one, let `my_config` stand in your own config registry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import midepoch
from midepoch.adapters.trainers.torchtitan import feed

SAMPLES, LENGTH, GLOBAL_BATCH = 48, 8, 6


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        tokens = torch.cat([torch.tensor([index]), torch.randint(100, (LENGTH,))])
        return {"input": tokens[:-1]}, tokens[1:]


def make(world: midepoch.World, local_batch_size: int, **others: Any) -> Any:
    data = DataLoader(Texts(), batch_size=local_batch_size, shuffle=True)
    return midepoch.wrap(data, seed=0, world=world)


def my_config() -> Any:
    config = llama3_debugmodel()
    feed(config, make)
    return config


def train(ranks: int, steps: int, state: Any = None) -> tuple[list[Any], Any]:
    """The global batches of so many steps, and the state that a checkpoint then has."""
    loaders = [
        my_config().dataloader.build(dp_world_size=ranks, dp_rank=rank, local_batch_size=GLOBAL_BATCH // ranks)
        for rank in range(ranks)
    ]
    for loader in loaders:
        loader.load_state_dict(state or {})
    parts = [zip(range(steps), loader, strict=False) for loader in loaders]
    seen = [[row for _, (inputs, _) in batch for row in inputs["input"].tolist()] for batch in zip(*parts, strict=True)]
    return seen, loaders[0].state_dict()


whole, _ = train(ranks=1, steps=16)
before, state = train(ranks=2, steps=5)
after, _ = train(ranks=3, steps=11, state=state)
assert before + after == whole
print("5 steps of two ranks and 11 of three are bit-equal to 16 of one, over the end of an epoch")
