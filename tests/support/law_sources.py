"""Factories of loaders over every source of the core, for the laws. Each sample says who it is and what it drew."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler

import midepoch
from support import sources

SIZE, BATCH, SEED = 14, 3, 7


def identify(batch: Any) -> list[int]:
    rows = batch if batch.ndim == 2 else batch[None]
    return [int(value) for value in rows[:, 0]]


def draws(batch: Any) -> list[tuple[float, ...]]:
    rows = batch if batch.ndim == 2 else batch[None]
    return [tuple(row[1:].tolist()) for row in rows]


def log_read(path: str | None, index: int) -> None:
    if path is not None:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{index}\n".encode())
        os.close(descriptor)


def sample(index: int, owned: np.random.Generator) -> torch.Tensor:
    """The index, and a number from every generator that code in a dataset draws from."""
    numbers = (random.random(), np.random.rand(), float(torch.rand(())), owned.random())
    return torch.tensor([index, *numbers, midepoch.sample_generator().random()], dtype=torch.float64)


class Samples(sources.Indices):
    def __init__(self, size: int, read_log: str | None = None) -> None:
        super().__init__(size)
        self.read_log, self.generator = read_log, np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        log_read(self.read_log, index)
        return sample(index, self.generator)


class ExposingGenerator(IterableDataset[torch.Tensor]):
    """Two samplers, of which one gives two indices a sample; a generator method instead of an iterator attribute."""

    def __init__(self, size: int, read_log: str | None = None) -> None:
        self.samples = Samples(size, read_log)
        self.sampler = RandomSampler(range(size))
        self.pairs = torch.utils.data.SequentialSampler(range(2 * size))

    def __iter__(self) -> Iterator[torch.Tensor]:
        pairs = iter(self.pairs)
        for index in self.sampler:
            read = self.samples[index]
            yield torch.cat([read, torch.tensor([next(pairs) + next(pairs)], dtype=read.dtype)])


class Inheriting(midepoch.StatefulIterable, IterableDataset[torch.Tensor]):
    """The pattern of a dataset that exposes its sampler and its iterator, as a subclass."""

    def __init__(self, size: int, read_log: str | None = None) -> None:
        self.samples = Samples(size, read_log)
        self.sampler = RandomSampler(range(size))

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.sampler_iter = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        return self.samples[next(self.sampler_iter)]


class Stream(IterableDataset[torch.Tensor]):
    """Exposes nothing. With ``rank`` it divides itself, by rank and worker, as torch's docs teach."""

    def __init__(self, size: int, rank: int = 0, world_size: int = 1, divides: bool = False) -> None:
        self.samples, self.rank, self.world_size, self.divides = Samples(size), rank, world_size, divides

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, step = 0, 1
        if self.divides:
            own = sources.part_of_worker(len(self.samples))
            first, step = self.rank * own.step + own.start, self.world_size * own.step
        for index in range(first, len(self.samples), step):
            yield self.samples[index]


class Groups(Sampler[list[int]]):
    """A user's own batch sampler: so many batches, of 1, 2, 3, 1, ... indices."""

    def __init__(self, batches: int) -> None:
        self.lengths = [place % 3 + 1 for place in range(batches)]

    def __iter__(self) -> Iterator[list[int]]:
        indices = torch.randperm(sum(self.lengths)).tolist()
        for length in self.lengths:
            yield indices[:length]
            indices = indices[length:]

    def __len__(self) -> int:
        return len(self.lengths)


def as_it_is(value: Any) -> Any:
    return value


def _wrap(source: Any, rank: int, world_size: int, seed: int | None, **options: Any) -> Any:
    return midepoch.wrap(source, **{"seed": seed, "world": midepoch.World(rank, world_size), **options})


def map_shuffled(
    rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = BATCH, seed: int | None = SEED,
    size: int = SIZE, read_log: str | None = None, items: list[Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    if items is not None:
        loader = DataLoader(cast(Any, items), batch_size=None, num_workers=num_workers, collate_fn=as_it_is)
    else:
        loader = DataLoader(Samples(size, read_log), batch_size=batch_size, shuffle=True, num_workers=num_workers)
    return _wrap(loader, rank, world_size, seed, **options)


class Drawing:
    """Works one batch ahead, and writes a number that it draws into a batch's last column."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        ahead = None
        for batch in self.loader:
            batch[:, -1] = batch[:, -1] + random.random() + np.random.rand() + torch.rand(len(batch))
            if ahead is not None:
                yield ahead
            ahead = batch
        if ahead is not None:
            yield ahead


def inheriting(rank: int = 0, world_size: int = 1, size: int = SIZE, read_log: str | None = None) -> Any:
    return Inheriting(size, read_log)


def batches_list(
    rank: int = 0, world_size: int = 1, seed: int | None = SEED, size: int = SIZE, items: list[Any] | None = None
) -> Any:
    return _wrap([torch.tensor([[index]]) for index in range(size)] if items is None else items, rank, world_size, seed)


class GeneratorFunction:
    """A generator function; as a class so that processes can be sent one."""

    def __init__(self, size: int, items: list[Any] | None) -> None:
        self.size, self.items = size, items

    def __call__(self) -> Iterator[Any]:
        if self.items is not None:
            yield from self.items
            return
        owned = np.random.default_rng(random.getrandbits(64))
        for index in range(self.size):
            yield sample(index, owned)


def generator_function(
    rank: int = 0, world_size: int = 1, seed: int | None = SEED, size: int = SIZE, items: list[Any] | None = None
) -> Any:
    return _wrap(GeneratorFunction(size, items), rank, world_size, seed, shard=True)


class Carried:
    """A source with a state of its own, that is exact: batches of one rank, counted."""

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        self.batches = list(range(rank, size - size % world_size, world_size))
        self.next = self.epoch = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.next >= len(self.batches):
            self.next, self.epoch = 0, self.epoch + 1
        return self._rest(self.next)

    def _rest(self, start: int) -> Iterator[torch.Tensor]:
        for place in range(start, len(self.batches)):
            self.next = place + 1
            yield torch.tensor([[self.batches[place], self.epoch]])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.epoch = state["next"], state["epoch"]


def carried(rank: int = 0, world_size: int = 1, seed: int | None = SEED, size: int = SIZE) -> Any:
    return _wrap(Carried(size, rank, world_size), rank, world_size, seed)


# --- a DataLoader, or what is around one ------------------------------------------------------------------------------


def _arguments(kind: str, size: int, read_log: str | None, rank: int, world_size: int, seed: int) -> dict[str, Any]:
    """Those of the DataLoader, but the size of a batch."""
    samples, groups = Samples(size, read_log), Groups(size)
    replicas: dict[str, Any] = {"num_replicas": world_size, "rank": rank}
    kinds: dict[str, dict[str, Any]] = {
        "sequential": {"dataset": samples, "drop_last": True},
        "listed": {"dataset": samples, "sampler": torch.utils.data.SubsetRandomSampler(range(size))},
        "left alone": {"dataset": samples, "sampler": DistributedSampler(samples, **replicas, seed=seed)},
        "batches": {"dataset": Samples(sum(groups.lengths), read_log), "batch_sampler": groups},
        "exposing by a generator": {"dataset": ExposingGenerator(size, read_log)},
        "stream": {"dataset": Stream(size)},
        "dividing stream": {"dataset": Stream(size, rank, world_size, divides=True)},
    }
    return kinds.get(kind, {"dataset": samples, "shuffle": True})


def _in_loader(
    kind: str, options: dict[str, Any], rank: int = 0, world_size: int = 1, num_workers: int = 0,
    batch_size: int | None = BATCH, seed: int | None = SEED, size: int = SIZE, read_log: str | None = None,
) -> Any:  # fmt: skip
    arguments = _arguments(kind, size, read_log, rank, world_size, seed or 0)
    if "batch_sampler" not in arguments:
        arguments = {"batch_size": batch_size or BATCH, **arguments}
    loader: DataLoader[Any] = DataLoader(**arguments, num_workers=num_workers)
    return _wrap(Drawing(loader) if kind == "wrapped" else loader, rank, world_size, seed, **options)


def _of(kind: str, **options: Any) -> Any:
    return functools.partial(_in_loader, kind, options)


map_sequential_drop = _of("sequential", tail="drop")
map_uneven = _of("shuffled", tail="uneven")
map_listed = _of("listed")
map_left_alone = functools.partial(_of("left alone", shard=False), batch_size=None)  # None: which no law changes
map_batch_sampler = functools.partial(_of("batches"), batch_size=None, size=7)
map_wrapped = _of("wrapped", inside="loader")
exposing_generator_in_loader = _of("exposing by a generator")
divided_stream_in_loader = _of("stream", shard=True)
dividing_stream_in_loader = functools.partial(_of("dividing stream", shard=False), batch_size=None)


# --- a combination ----------------------------------------------------------------------------------------------------


def combined(rank: int = 0, world_size: int = 1, size: int = 12) -> Any:
    """Parts whose states each rank knows alone: samplers that divide their data themselves."""
    parts = {name: map_left_alone(rank, world_size, size=size, seed=seed) for name, seed in (("short", 1), ("long", 2))}
    return midepoch.combine(parts, "min_size")


def identify_short(batch: Any) -> list[int]:
    """Those of the part that is read from its beginning to its end."""
    return identify(batch["short"])
