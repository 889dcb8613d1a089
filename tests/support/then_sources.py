"""Loaders with `then`, over every way of reading, for the laws and for tests in other processes."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

import midepoch
from support.law_sources import BATCH, SEED, SIZE, GeneratorFunction, Samples, as_it_is


class Work(torch.nn.Module):
    """Work on a batch of rows: a number for each row from every generator that a function may draw from."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.generators: dict[str, Any] = {"torch": torch.Generator().manual_seed(3), "python": random.Random(4)}
        self.register_buffer("scale", torch.ones(()))

    def forward(self, batch: Any) -> Any:
        if not isinstance(batch, torch.Tensor) or batch.ndim != 2 or not len(batch):
            return batch
        rows = len(batch)
        drawn = [
            torch.rand(rows, dtype=torch.float64),
            torch.rand(rows, dtype=torch.float64, generator=self.generators["torch"]),
            *(
                torch.tensor([draw() for _ in range(rows)], dtype=torch.float64)
                for draw in (random.random, np.random.rand, self.generators["python"].random)
            ),
            torch.from_numpy(midepoch.sample_generator().random(rows)),
        ]
        return torch.cat([batch * self.scale, torch.stack(drawn, 1)], 1)


def _wrap(source: Any, rank: int, world_size: int, seed: int | None, **options: Any) -> Any:
    world = midepoch.World(rank, world_size)
    return midepoch.wrap(source, seed=seed, world=world, then=Work(), **options)


def map_style(
    rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = BATCH, seed: int | None = SEED,
    size: int = SIZE, read_log: str | None = None, items: list[Any] | None = None,
) -> Any:  # fmt: skip
    if items is not None:
        loader = DataLoader(cast(Any, items), batch_size=None, num_workers=num_workers, collate_fn=as_it_is)
    else:
        loader = DataLoader(Samples(size, read_log), batch_size=batch_size, shuffle=True, num_workers=num_workers)
    return _wrap(loader, rank, world_size, seed)


class Rows(GeneratorFunction):
    """Each unit is a batch of one row."""

    def __call__(self) -> Any:
        units = super().__call__()
        return units if self.items is not None else (unit[None] for unit in units)
