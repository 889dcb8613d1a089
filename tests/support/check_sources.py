"""Functions that `midepoch check` is pointed at."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import midepoch
from support import sources


def good(rank: int = 0, world_size: int = 1, num_workers: int = 0) -> Any:
    data = DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True, num_workers=num_workers)
    return midepoch.wrap(data, seed=0, world=midepoch.World(rank, world_size))


def alone() -> Any:
    return midepoch.wrap(DataLoader(TensorDataset(torch.arange(12)), batch_size=4, shuffle=True), seed=0)


class Forgetful:
    """Counts batches, but shuffles without a seed; each rank takes every other sample and forgets two on a resume."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.done = rank, world_size, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in torch.arange(24)[self.rank :: self.world_size].reshape(-1, 2)[self.done :]:
            self.done += 1
            yield batch
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"] + 2 * (state["done"] > 0)


def forgetful(rank: int = 0, world_size: int = 1) -> Any:
    return Forgetful(rank, world_size)


def empty() -> Any:
    return midepoch.wrap([], seed=0)


def raises() -> Any:
    raise RuntimeError("no data here")


def needs(path: str) -> Any:
    return midepoch.wrap([path], seed=0)


number = 3
loader = DataLoader(TensorDataset(torch.arange(24)), batch_size=4, shuffle=True)


def in_steps() -> Any:
    return midepoch.wrap(loader, seed=0, global_batch=8)


dropping = DataLoader(TensorDataset(torch.arange(22)), batch_size=4, shuffle=True, drop_last=True)


def built_for_its_rank(rank: int = 0, world_size: int = 1) -> Any:
    data = TensorDataset(torch.arange(24))
    sampler: Any = DistributedSampler(data, num_replicas=world_size, rank=rank)
    return DataLoader(data, batch_size=4, sampler=sampler)


class Failing(sources.Indices):
    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise OSError("seven is damaged")
        return index


failing = DataLoader(Failing(12), batch_size=4)


class EndsEarly(midepoch.Loader):
    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), len(self) - 1)


def ends_early(rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = 2) -> Any:
    source = DataLoader(TensorDataset(torch.arange(10)), batch_size, num_workers=num_workers)
    loader = midepoch.wrap(source, seed=0, world=midepoch.World(rank, world_size))
    loader.__class__ = EndsEarly
    return loader


class Unseeded(sources.Sized):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(24).tolist())


def unseeded() -> Any:
    return midepoch.wrap(DataLoader(TensorDataset(torch.arange(24)), batch_size=4, sampler=Unseeded(24)), seed=0)


class Drifting(Forgetful):
    """Has a state of its own, which says nothing of the random numbers in its batches."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = np.random.default_rng()
        while self.done < 10:
            self.done += 1
            yield torch.tensor([self.done, int(generator.integers(1 << 40))])
        self.done = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def drifting() -> Any:
    return Drifting(0, 1)


def once() -> Any:
    return iter(range(12))


class Entropy(sources.Indices):
    def __getitem__(self, index: int) -> Any:
        return index, int.from_bytes(os.urandom(6))


def entropic() -> Any:
    return DataLoader(Entropy(24), batch_size=4, shuffle=True)
