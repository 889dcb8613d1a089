"""A dataset that exposes its sampler: resumed at once, and shared by ranks that are more than before."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import midepoch


class RandomIterableDataset(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.data = torch.arange(length)
        self.sampler = RandomSampler(range(length))

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.sampler_iter = iter(self.sampler)
        return self

    def __next__(self) -> torch.Tensor:
        return self.data[next(self.sampler_iter)]


def make_loader(rank: int, world_size: int) -> midepoch.StatefulIterable:
    world = midepoch.World(rank, world_size)  # torchrun's environment says this by itself
    return midepoch.wrap(DataLoader(RandomIterableDataset(24), batch_size=2), seed=0, world=world)


def main() -> None:
    seen: list[int] = []
    two = [make_loader(rank, 2) for rank in range(2)]
    for _, *batches in zip(range(3), *two, strict=False):
        seen += [int(index) for batch in batches for index in batch]
    state = two[1].state_dict()  # any rank's will do

    for rank in range(3):
        loader = make_loader(rank, 3)
        loader.load_state_dict(state)
        seen += [int(index) for batch in loader for index in batch]
    exact = sorted(seen) == list(range(24))
    print(f"12 samples on 2 ranks, 12 on 3: {'each exactly once' if exact else 'NOT each once'}")
    sys.exit(not exact)


if __name__ == "__main__":
    main()
