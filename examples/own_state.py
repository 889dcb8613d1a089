"""torchdata's StatefulDataLoader has a state of its own; midepoch carries it, with what it leaves out: augmentations.

``python examples/own_state.py``
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


def make() -> Any:
    return midepoch.wrap(StatefulDataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)


def read(loader: Any, batches: int) -> list[Any]:
    return [batch.tolist() for batch in itertools.islice(loader, batches)]


loader = make()
head = read(loader, 3)
checkpoint = json.dumps(loader.state_dict())

loader = make()  # a new process
loader.load_state_dict(json.loads(checkpoint))
assert head + read(loader, 7) == read(make(), 10)
print("3 batches and the 7 after them are bit-equal to an epoch of 10")
print(loader.capabilities)  # what it cannot do: another number of processes, a constant time
