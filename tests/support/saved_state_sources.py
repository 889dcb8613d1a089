"""Sources of which states were saved by earlier code: tests/saved_states/ has them, with what came next.

``python tests/support/saved_state_sources.py FOLDER`` writes them again; only public names are used, so that any
version can.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import data
from torch.utils.data import DataLoader

import midepoch


class Drawing(data.Dataset[Any]):
    """Sample i with a number of each global generator and of one of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.rng = size, np.random.default_rng()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.random()), float(torch.rand(1)), float(self.rng.random())


class Exposing(data.IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.data, self.sampler = Drawing(size), data.RandomSampler(range(size))

    def __iter__(self) -> Iterator[Any]:
        for index in self.sampler:
            yield self.data[index]


def stream() -> Iterator[Any]:
    for number in range(23):
        yield number, random.random()


def loader(size: int = 50, **keywords: Any) -> DataLoader[Any]:
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "collate_fn": list} | keywords
    return DataLoader(Drawing(size), **settings)


def weighted() -> Any:
    return data.WeightedRandomSampler([1.0 + n % 3 for n in range(40)], 40, generator=torch.Generator().manual_seed(4))


def parts() -> list[Any]:
    return [midepoch.wrap(loader(24), seed=1), midepoch.wrap(loader(40), seed=2), midepoch.wrap(stream, seed=3)]


def torchdata_loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return midepoch.wrap(StatefulDataLoader(Drawing(30), batch_size=4, collate_fn=list), seed=6)


SOURCES: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: midepoch.wrap(loader(), seed=7),
    "shuffled in workers": lambda: midepoch.wrap(loader(num_workers=2), seed=7),
    "large": lambda: midepoch.wrap(loader(100_000, batch_size=32), seed=7),
    "distributed": lambda: midepoch.wrap(
        loader(shuffle=False, sampler=data.DistributedSampler(Drawing(50), 2, 1, seed=5)), world=midepoch.World(1, 2)
    ),
    "listed": lambda: midepoch.wrap(loader(40, shuffle=False, sampler=weighted())),
    "listed batches": lambda: midepoch.wrap(
        DataLoader(Drawing(40), batch_sampler=data.BatchSampler(weighted(), 4, True), collate_fn=list), seed=1
    ),
    "collate function": lambda: midepoch.wrap(loader(collate_fn=lambda rows: (rows, random.random())), seed=7),
    "exposing": lambda: midepoch.wrap(Exposing(30), seed=7),
    "exposing in workers": lambda: midepoch.wrap(
        DataLoader(Exposing(30), batch_size=4, num_workers=2, collate_fn=list), seed=7
    ),
    "replayed": lambda: midepoch.wrap(stream, seed=8),
    "replayed, shared": lambda: midepoch.wrap(stream, seed=8, shard=True, world=midepoch.World(1, 2)),
    "sequence": lambda: midepoch.wrap([[n, n + 1] for n in range(20)]),
    "sampler": lambda: midepoch.ResumableSampler(30, seed=4),
    "state of its own": torchdata_loader,
    "combined": lambda: midepoch.combine(parts(), "max_size_cycle", seed=1),
    "combined in turn": lambda: midepoch.combine(parts(), "sequential", seed=1),
    "combined by weights": lambda: midepoch.combine(parts(), "weighted", weights=[1, 2, 1], seed=1, until="cycle"),
}


def following(source: Any) -> str:
    """A digest, to the last bit, of the next six batches, over the end of the epoch if need be."""
    batches = itertools.islice((batch for _ in itertools.count() for batch in source), 6)
    return hashlib.sha256(repr(list(batches)).encode()).hexdigest()[:32]


def file_of(name: str) -> str:
    return f"{name.replace(' ', '_').replace(',', '')}.json"


def write(folder: Path) -> None:
    """A file for each source: states after 3 batches, and at the second epoch's beginning, with what comes next."""
    for name, make in SOURCES.items():
        saved = []
        for batches in (3, None):
            source = make()
            if name == "large" and batches is None:
                continue
            for _ in itertools.islice(source, batches):
                pass
            state = source.state_dict()
            fresh = make()
            fresh.load_state_dict(state)
            saved.append({"state": state, "following": following(fresh)})
        (folder / file_of(name)).write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
