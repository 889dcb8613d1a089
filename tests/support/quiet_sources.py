"""Sources that resume exactly, so nothing may be told of them: built as widely used loaders of other people are."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    WeightedRandomSampler,
)

import midepoch
from support import resuming, witness_sources

SIZE, BATCH = 24, 4


class Drawn(Dataset[Any]):
    """Sample i is (i, a number from each global generator)."""

    def __init__(self, size: int = SIZE, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.rand(3) + self.first + index, "y": index, "z": random.random(), "w": np.random.rand()}


# --- by index, under samplers and collate functions of many kinds ---


class Graph:
    """An object without equality, with tensors as attributes."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Graphs(Drawn):
    def __getitem__(self, index: int) -> Any:
        nodes = index % 5 + 1
        return Graph(x=torch.rand(nodes, 2), edges=torch.arange(nodes).repeat(2, 1), y=index)


class Together:
    """A collate function that is an object, which makes one graph of many."""

    def __init__(self, dataset: Any, follow: list[str] | None = None) -> None:
        self.dataset, self.follow = dataset, follow

    def __call__(self, graphs: list[Any]) -> Any:
        return Graph(x=torch.cat([each.x for each in graphs]), y=torch.tensor([each.y for each in graphs]))


class GraphLoader(DataLoader[Any]):
    """A DataLoader with a collate function of its own."""

    def __init__(self, dataset: Any, batch_size: int, **more: Any) -> None:
        super().__init__(dataset, batch_size, collate_fn=Together(dataset), **more)


class Augmentation(torch.nn.Module):
    """Keeps the parameters that it drew last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.params: dict[str, torch.Tensor] = {}

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.params = {"angle": torch.rand(1), "applied": torch.bernoulli(torch.tensor([0.5]))}
        return image * self.scale + self.params["angle"] * self.params["applied"]


class Pictures(Dataset[Any]):
    """Pictures from a list of files, with a transform that can be exchanged."""

    def __init__(self) -> None:
        self.samples = [(f"/data/class{number % 3}/{number}.jpg", number % 3) for number in range(SIZE)]
        self.transform = torch.nn.Sequential(Augmentation(), Augmentation())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        return self.transform(torch.full((3, 8, 8), float(index))), target, path


class NoDuplicates(Sampler[list[int]]):
    """Batches in which no two samples are of one kind; what does not fit waits for the next."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.generator.manual_seed(self.seed + self.epoch)
        remaining = dict.fromkeys(torch.randperm(len(self.dataset), generator=self.generator).tolist())
        while remaining:
            kinds: set[int] = set()
            batch: list[int] = []
            for index in remaining:
                if index % 7 not in kinds and len(batch) < BATCH:
                    kinds.add(index % 7)
                    batch.append(index)
            for index in batch:
                del remaining[index]
            yield batch

    def __len__(self) -> int:
        return len(self.dataset) // BATCH


class OfOneRank(Sampler[int]):
    """Knows ranks; built for one process. With two of them it is passed with ``shard=False``."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size, self.seed, self.epoch = rank, world_size, 7, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        return iter(order[self.rank :: self.world_size].tolist())

    def __len__(self) -> int:
        return SIZE // self.world_size


class Buckets(Sampler[Any]):
    """Gives whole batches of cuts, filled by their duration, to a dataset that reads batches."""

    def __init__(self) -> None:
        self.durations = {f"cut-{number}": 1 + number % 4 for number in range(SIZE)}
        self.rank, self.world_size, self.epoch = 0, 1, 0
        self.rng: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.rng = random.Random(self.epoch)
        cuts = list(self.durations)
        self.rng.shuffle(cuts)
        batch: list[str] = []
        for cut in cuts:
            batch.append(cut)
            if sum(self.durations[each] for each in batch) >= 8:
                yield batch
                batch = []
        if batch:
            yield batch


class Cuts(Dataset[Any]):
    def __getitem__(self, cuts: list[str]) -> Any:
        return {"cuts": cuts, "noise": torch.rand(len(cuts))}


# --- read from the start ---


class OnDevice:
    """An object around a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.seen = loader, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.seen += 1
            yield batch


def declared(source: Any, inside: str) -> Any:
    return midepoch.wrap(source, seed=3, inside=inside)


def rows_with_a_transform() -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"number": list(range(SIZE))})
    rows.set_transform(with_noise)
    return DataLoader(rows, BATCH, shuffle=True)


def with_noise(rows: Any) -> Any:
    return {"number": rows["number"], "noise": [random.random() for _ in rows["number"]]}


def enumerated() -> Any:
    loader = DataLoader(Drawn(), BATCH, shuffle=True)
    return lambda: enumerate(loader)


def weighted(replacement: bool = True) -> Any:
    return WeightedRandomSampler([1.0 + number % 3 for number in range(SIZE)], SIZE, replacement)


WILD: dict[str, Callable[[], Any]] = {
    "graphs with a loader of their own": lambda: GraphLoader(Graphs(), BATCH, shuffle=True),
    "modules that augment, in workers": lambda: DataLoader(Pictures(), BATCH, shuffle=True, num_workers=2),
    "rows with a transform": rows_with_a_transform,
    "batches without duplicates": lambda: DataLoader(Drawn(), batch_sampler=NoDuplicates(Drawn(), 3)),
    "weighted": lambda: DataLoader(Drawn(), BATCH, sampler=weighted()),
    "of one of two ranks": lambda: midepoch.wrap(
        DataLoader(Drawn(), 2, sampler=OfOneRank(1, 2)), seed=3, shard=False
    ),
    "buckets": lambda: midepoch.wrap(DataLoader(Cuts(), batch_size=None, sampler=Buckets()), seed=3, shard=False),
    "an object around a loader": lambda: declared(OnDevice(DataLoader(Drawn(), BATCH, shuffle=True)), "loader"),
    "a loader in a function": enumerated,
}
"""Rows of widely used loaders that are exact."""


def can_be_made(name: str) -> bool:
    """Whether the packages that a source needs are installed."""
    needed = {"rows": "datasets", "arrow": "pyarrow"}.get(name.split(maxsplit=1)[0])
    return needed is None or importlib.util.find_spec(needed) is not None


class Named(Dataset[Any]):
    """What differs between two processes or machines stands beside what matters."""

    def __init__(self, what: Callable[[], Any]) -> None:
        self.what = what

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.from_numpy(witness_sources.image_of(index)), "beside": self.what()}


def mounted() -> Any:
    return f"{os.environ.get('AS_MOUNT', '/mnt/a')}/pictures/1.png"


def host() -> Any:
    return os.environ.get("AS_HOST", socket.gethostname())


BESIDE: dict[str, tuple[Callable[[], Any], dict[str, str], str]] = {
    "paths on another mount": (mounted, {"AS_MOUNT": "/other/place"}, "exact"),
    "host names": (host, {"AS_HOST": "a-node-of-another-name"}, "refused"),
    "times": (time.time_ns, {}, "told"),
    "process numbers": (os.getpid, {}, "refused"),
    "objects without equality": (witness_sources.Nothing, {}, "exact"),
}
"""Name -> what stands beside each picture, the environment of the resume, and what comes of it."""


def over(module: str, table: str, name: str) -> Any:
    """A loader of another file's table."""
    return getattr(importlib.import_module(module), table)[name]()


def beside(name: str) -> Any:
    return DataLoader(Named(BESIDE[name][0]), BATCH, shuffle=True, collate_fn=witness_sources.as_it_is)


_LAWS = (
    "map_shuffled", "map_sequential_drop", "map_subset", "map_uneven", "map_listed", "map_windowed", "map_distributed",
    "map_batch_sampler", "map_single", "exposing_in_loader", "exposing_generator_in_loader", "exposing_plain",
    "inheriting", "batches_list", "generator_function", "stream_in_loader", "dividing_stream_in_loader", "carried",
)  # fmt: skip
_COMBINED = (
    "min_size", "max_size", "max_size_cycle", "sequential", "weighted", "nested", "of_unknown_length", "of_own_states",
)  # fmt: skip
_SAVED = (
    "shuffled", "shuffled in workers", "distributed", "listed", "listed batches", "exposing", "exposing in workers",
    "replayed", "sequence", "state of its own", "combined", "combined in turn", "combined by weights",
)  # fmt: skip


def called(module: str, name: str) -> Any:
    """A loader of another file's function."""
    return getattr(importlib.import_module(module), name)()


CORE: dict[str, Callable[[], Any]] = {
    **{f"laws: {name}": functools.partial(called, "support.law_sources", name) for name in _LAWS},
    **{f"combine: {name}": functools.partial(called, "support.combine_sources", name) for name in _COMBINED},
    **{f"saved: {name}": functools.partial(over, "support.saved_state_sources", "SOURCES", name) for name in _SAVED},
}
"""Sources of the tests that need no backend."""

OWN = (
    "torchdata StatefulDataLoader", "Hugging Face IterableDataset",
    "Hugging Face IterableDataset with a shuffle buffer", "Grain DataLoader", "Grain IterDataset",
    "LitData StreamingDataLoader",
)  # fmt: skip
BACKENDS: dict[str, Callable[[], Any]] = {
    **{f"own state: {name}": functools.partial(over, "support.own_state_sources", "WRAPPED", name) for name in OWN},
    **{
        f"webdataset: {name}": functools.partial(called, "support.webdataset_sources", name)
        for name in ("indexed", "indexed_sequential", "indexed_rebatched", "streamed", "piped")
    },
    "streaming": functools.partial(called, "support.streaming_sources", "make_loader"),
}
"""And those of backends, but DALI and FFCV, whose own tests do the same."""


def resume_all(saved: dict[str, list[dict[str, Any]]], seed: int) -> dict[str, list[resuming.Resumed]]:
    """What comes of the states of sources, in this process."""
    makes = WILD | CORE | BACKENDS | {name: functools.partial(beside, name) for name in BESIDE}
    changed = {name: each[1] for name, each in BESIDE.items()}
    return {name: resuming.resume(makes[name], states, seed, changed.get(name)) for name, states in saved.items()}
