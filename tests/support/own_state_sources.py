"""Loaders that keep a state of their own, bare and wrapped, for the laws and for the table of them in docs/."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from support.sources import Noisy

SIZE, BATCH, SEED = 14, 3, 7


def identify(batch: Any) -> list[int]:
    """The numbers of a batch's samples, whatever its form."""
    if isinstance(batch, dict):
        batch = batch["number"]
    found = np.atleast_1d(np.asarray(batch))
    return [int(number) for number in (found[:, 0] if found.ndim == 2 else found)]


# --- bare ---


def torchdata(num_workers: int = 0, seed: int | None = SEED, size: int = SIZE) -> Any:
    return StatefulDataLoader(
        Noisy(size), BATCH, shuffle=True, num_workers=num_workers, generator=torch.Generator().manual_seed(seed or 0),
        multiprocessing_context="fork" if num_workers else None,
    )  # fmt: skip


def rows(num_shards: int = 3, buffer: int = 0, seed: int | None = SEED, size: int = SIZE) -> Any:
    """Hugging Face's stream of numbers, shuffled if there is a buffer."""
    import datasets

    found = datasets.Dataset.from_dict({"number": list(range(size))}).to_iterable_dataset(num_shards=num_shards)
    return found.shuffle(seed=seed or 0, buffer_size=buffer) if buffer else found


def datasets_stream(buffer: int = 0, seed: int | None = SEED, size: int = SIZE) -> Any:
    return rows(buffer=buffer, seed=seed, size=size).batch(BATCH)


def grain_loader(seed: int | None = SEED, size: int = SIZE, rows: Any = None, operations: Any = None) -> Any:
    logging.getLogger("absl").setLevel(logging.ERROR)
    import grain

    sampler = grain.samplers.IndexSampler(size, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=seed or 0)
    given = {"data_source": list(range(size)) if rows is None else rows, "sampler": sampler, "worker_count": 0}
    return grain.DataLoader(**given, operations=operations or [grain.transforms.Batch(BATCH)])


def grain_dataset(seed: int | None = SEED, size: int = SIZE) -> Any:
    logging.getLogger("absl").setLevel(logging.ERROR)
    import grain

    return grain.MapDataset.range(size).shuffle(seed=seed or 0).batch(BATCH).to_iter_dataset()


def grain_elastic(rank: int = 0, world_size: int = 1, together: int = 6, size: int = 41, seed: int = 3) -> Any:
    logging.getLogger("absl").setLevel(logging.ERROR)
    import grain
    from grain.experimental import ElasticIterator

    shard = grain.sharding.ShardOptions(shard_index=rank, shard_count=world_size)
    return ElasticIterator(grain.MapDataset.range(size).shuffle(seed=seed), together, shard)


@functools.cache
def written_by_litdata(size: int) -> str:
    """A folder in LitData's format, by the writer of its `optimize`, which would start processes for it."""
    import cpu_torchvision  # noqa: F401  # before litdata, which imports torchvision
    from litdata.streaming.writer import BinaryWriter

    folder = Path(tempfile.gettempdir()) / f"midepoch-litdata-{os.getuid()}-{size}"
    if not folder.exists():
        draft = Path(tempfile.mkdtemp())
        with mock.patch.dict(os.environ):
            for name in ("WORLD_SIZE", "GLOBAL_RANK", "RANK", "LOCAL_RANK", "NNODES"):
                os.environ.pop(name, None)  # it waits for what other ranks have written
            writer = BinaryWriter(str(draft), chunk_bytes="64MB")
            for number in range(size):
                writer[number] = {"number": number}
            writer.done()
            writer.merge()
        with contextlib.suppress(OSError):  # another process was faster
            draft.rename(folder)
    return str(folder)


def litdata_loader(num_workers: int = 0, seed: int | None = SEED, size: int = SIZE) -> Any:
    import cpu_torchvision  # noqa: F401  # before litdata, which imports torchvision
    import litdata

    dataset = litdata.StreamingDataset(written_by_litdata(size), shuffle=True, seed=seed or 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=num_workers)


BARE: dict[str, Callable[..., Any]] = {
    "torchdata StatefulDataLoader": torchdata,
    "Hugging Face IterableDataset": datasets_stream,
    "Hugging Face IterableDataset with a shuffle buffer": functools.partial(datasets_stream, buffer=5),
    "Grain DataLoader": grain_loader,
    "Grain IterDataset": grain_dataset,
    "LitData StreamingDataLoader": litdata_loader,
}

# --- wrapped ---


def _wrapped(make: Callable[..., Any], seed: int | None = SEED, size: int = SIZE) -> Any:
    return midepoch.wrap(make(seed=seed, size=size), seed=seed)


def _in_workers(make: Callable[..., Any], num_workers: int = 0, seed: int | None = SEED, size: int = SIZE) -> Any:
    return midepoch.wrap(make(num_workers, seed, size), seed=seed)


WRAPPED: dict[str, Callable[..., Any]] = {
    name: functools.partial(_in_workers if make in (torchdata, litdata_loader) else _wrapped, make)
    for name, make in BARE.items()
}
(
    wrapped_torchdata, wrapped_datasets_stream, wrapped_datasets_buffered, wrapped_grain_loader, wrapped_grain_dataset,
    wrapped_litdata_loader,
) = WRAPPED.values()  # fmt: skip

# --- wrapped, on several ranks ---


def wrapped_torchdata_of_rank(rank: int = 0, world_size: int = 1, num_workers: int = 0, seed: int | None = SEED) -> Any:
    sampler: Any = DistributedSampler(Noisy(SIZE), world_size, rank, shuffle=True, seed=seed or 0)
    source = StatefulDataLoader(
        Noisy(SIZE), BATCH, sampler=sampler, num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )  # fmt: skip
    return midepoch.wrap(source, seed=seed, world=midepoch.World(rank, world_size))


def wrapped_grain_elastic(
    rank: int = 0, world_size: int = 1, batch_size: int = 2, seed: int | None = SEED, size: int = 26
) -> Any:
    source = grain_elastic(rank, world_size, batch_size * world_size, size)
    return midepoch.wrap(source, seed=seed, world=midepoch.World(rank, world_size))


# --- states that are tried ---


class Stream:
    """Numbers, and whatever its state lacks: the base of the sources below, right by itself."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.given, self.epoch, self.goes_on = size, 0, 0, False

    def order(self) -> list[int]:
        return [int(number) for number in np.random.RandomState(self.epoch).permutation(self.size)]

    def value(self, number: int) -> Any:
        return number

    def __iter__(self) -> Any:
        if not self.goes_on:
            self.given = 0
        self.goes_on = False
        for number in self.order()[self.given :]:
            self.given += 1
            yield {"number": np.array([number]), "value": self.value(number)}
        self.given, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.epoch, self.goes_on = state["given"], state["epoch"], True


class StartsOver(Stream):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ReadsAhead(Stream):
    """Its state is that of what it has read, which is two samples more than it has handed out."""

    def state_dict(self) -> dict[str, Any]:
        return {"given": min(self.given + 2, self.size), "epoch": self.epoch}


class Draws(Stream):
    """Augments with the global generator, which its state does not cover."""

    def value(self, number: int) -> Any:
        return random.random()


class OwnGenerator(Stream):
    """Augments with a generator of its own, which its state does not cover."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(5)

    def value(self, number: int) -> Any:
        return self.generator.random()


class SavesGenerator(OwnGenerator):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]
        super().load_state_dict(state)


class StreamDataset(torch.utils.data.IterableDataset[Any]):
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Any:
        return iter(self.stream)

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)


class EpochOrder:
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(np.random.RandomState(self.epoch).permutation(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


def same(batch: Any) -> Any:
    return batch


def rows_inside(buffer: bool, num_workers: int = 0) -> Any:
    return StatefulDataLoader(rows(buffer=5 if buffer else 0), BATCH, num_workers=num_workers)


EXACT: dict[str, Callable[[], Any]] = {
    "right by itself": Stream,
    "saves its generator": SavesGenerator,
    "StatefulDataLoader, a sampler without a generator": lambda: StatefulDataLoader(
        Noisy(SIZE), BATCH, sampler=torch.utils.data.WeightedRandomSampler([1.0] * SIZE, SIZE)
    ),
    "StatefulDataLoader, batches of a sampler without one": lambda: StatefulDataLoader(
        Noisy(SIZE), batch_sampler=BatchSampler(RandomSampler(range(SIZE)), BATCH, False)
    ),
    "StatefulDataLoader of shuffled rows": functools.partial(rows_inside, buffer=True),
    "StatefulDataLoader of rows": functools.partial(rows_inside, buffer=False),
    "StatefulDataLoader of a stream": lambda: StatefulDataLoader(StreamDataset(Stream()), batch_size=None),
}
"""Nothing to tell: each resumes exactly."""

TOLD: dict[str, Callable[[], Any]] = {
    "starts over": StartsOver,
    "reads ahead": ReadsAhead,
    "draws": Draws,
    "own generator": OwnGenerator,
    "StatefulDataLoader of a stream that reads ahead": lambda: StatefulDataLoader(
        StreamDataset(ReadsAhead()), batch_size=None
    ),
    "DataLoader of a stream that reads ahead": lambda: DataLoader(StreamDataset(ReadsAhead()), batch_size=None),
}
"""Each resumes wrongly after its first batch, by a fault of its own: the job's trial finds it."""
