"""Loaders of sources of each kind, good and bad, for the law that compares them with the plain source in them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

import midepoch
from support import sources

SIZE, BATCH = 14, 3


def identify(batch: Any) -> list[Hashable]:
    """The first number of each row; of None, its name."""
    if not isinstance(batch, torch.Tensor):
        return [repr(batch)]
    return [int(row) for row in batch.reshape(len(batch) if batch.ndim else 1, -1)[:, 0]]


# --- sound sources ----------------------------------------------------------------------------------------------------


class Counting(sources.Indices):
    """Counts its reads and its epochs, where the program can see them."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.reads = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.tensor([super().__getitem__(index), random.random()], dtype=torch.float64)


class CountsPasses(sources.Sized):
    """Its order follows from the epoch that it was told; it counts how often it was asked."""

    epoch = passes = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.epoch).sample(range(self.size), self.size))


class AsksForItsWorker(CountsPasses):
    """As dynamic bucketing does."""

    def __iter__(self) -> Iterator[int]:
        seed = 1000 * self.epoch + sources.part_of_worker(SIZE).start
        return iter(random.Random(seed).sample(range(self.size), self.size))


class Restarts:
    def __iter__(self) -> Restarts:
        self.position = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.position == SIZE:
            raise StopIteration
        self.position += 1
        return torch.tensor([self.position])


class RestartsInLoader(Restarts, IterableDataset[torch.Tensor]):
    pass


class WithItsState(RestartsInLoader):
    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


Make = Callable[..., Any]


def loader_of(
    data: Make, num_workers: int = 0, rank: int = 0, world_size: int = 1, *, sampler: Make | None = None,
    batches: Make | None = None, shard: bool | None = None, divided: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """A DataLoader, wrapped. `sampler` and `batches` make its sampler or batch sampler of the dataset."""
    dataset = data()
    keywords: dict[str, Any] = {"batch_size": BATCH, **options}
    if divided:
        keywords["sampler"] = DistributedSampler(dataset, world_size, rank, **keywords.pop("division", {}))
    elif sampler is not None:
        keywords["sampler"] = sampler(dataset)
    elif batches is not None:
        del keywords["batch_size"]
        keywords["batch_sampler"] = batches(dataset)
    source = DataLoader(dataset, num_workers=num_workers, **keywords)
    return midepoch.wrap(source, seed=1, world=midepoch.World(rank, world_size), shard=shard)


def wrapped(make: Make, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    return midepoch.wrap(make(), seed=1, world=midepoch.World(rank, world_size), **options)


def random_with(dataset: Any, seed: int | None = None, **keywords: Any) -> Any:
    return RandomSampler(dataset, generator=None if seed is None else torch.Generator().manual_seed(seed), **keywords)


def a_list(dataset: Any) -> Any:
    return [*range(0, len(dataset), 2), 1, 1]


def own(kind: Any, dataset: Any) -> Any:
    return kind(len(dataset))


def in_batches(dataset: Any) -> Any:
    return BatchSampler(range(len(dataset)), BATCH, drop_last=False)


def exposing() -> Any:
    return sources.Exposing(SIZE, AsksForItsWorker(SIZE))


part = functools.partial
mapped = part(loader_of, Counting)
SOUND: dict[str, Make] = {
    "in order": mapped,
    "shuffled, the last batch left out": part(mapped, shuffle=True, drop_last=True),
    "one sample at a time": part(mapped, shuffle=True, batch_size=None),
    "a batch sampler as sampler": part(mapped, sampler=in_batches, batch_size=None),
    "a generator's order": part(mapped, sampler=part(random_with, seed=5)),
    "with replacement": part(mapped, sampler=part(random_with, replacement=True)),
    "fewer than there are": part(mapped, sampler=part(random_with, num_samples=5)),
    "a list as sampler": part(mapped, sampler=a_list),
    "divided over ranks": part(mapped, divided=True),
    "divided over ranks, what is left dropped": part(mapped, divided=True, division={"drop_last": True}),
    "an own sampler that is told the epoch": part(mapped, sampler=part(own, CountsPasses)),
    "an own batch sampler without a length": part(mapped, batches=part(own, sources.Buckets)),
    "exposes its sampler, three samples for some": part(loader_of, part(sources.Documents, {0: 3, 5: 3, 10: 3}, SIZE)),
    "exposes its sampler, none for some": part(loader_of, part(sources.Documents, {0: 0, 5: 0, 10: 0}, SIZE)),
    "exposes its sampler, flushes": part(loader_of, part(sources.Flushed, size=SIZE)),
    "exposes a sampler that asks for its worker": part(loader_of, exposing),
    "a stream divided by its workers": part(loader_of, part(sources.Stream, SIZE, by_worker=True), shard=False),
    "its own iterator": part(wrapped, Restarts, shard=True),
    "its own iterator, in a DataLoader": part(loader_of, RestartsInLoader, shard=True),
    "its own iterator with a state, in a DataLoader": part(loader_of, WithItsState),
    "a map-style dataset by itself": part(wrapped, Counting),
}
