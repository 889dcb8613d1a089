"""Factories of combinations, for the laws. Parts tell their samples apart by the range of their numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

import midepoch
from support.law_sources import BATCH, SEED, Samples, identify, log_read, map_left_alone, sample

SHORT, LONG, FAR = 12, 21, 1000


class Apart(Samples):
    """Samples whose numbers begin somewhere else."""

    def __init__(self, size: int, first: int, read_log: str | None = None) -> None:
        super().__init__(size, read_log)
        self.first = first

    def __getitem__(self, index: int) -> torch.Tensor:
        log_read(self.read_log, self.first + index)
        return sample(self.first + index, self.generator)


def part(
    size: int, first: int, rank: int, world_size: int, num_workers: int, batch_size: int, read_log: str | None
) -> Any:
    loader = DataLoader(Apart(size, first, read_log), batch_size, shuffle=True, num_workers=num_workers)
    return midepoch.wrap(loader, seed=first, world=midepoch.World(rank, world_size))


def identify_short(batch: Any) -> list[int]:
    """Those of the part that is read from its beginning to its end."""
    return identify(batch["short"])


def weighted(
    rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = BATCH, seed: int | None = SEED,
    size: int = SHORT, read_log: str | None = None,
) -> Any:  # fmt: skip
    where = rank, world_size, num_workers, batch_size, read_log
    parts = {"short": part(size, 0, *where), "long": part(size + LONG - SHORT, FAR, *where)}
    return midepoch.combine(parts, "weighted", seed=seed, weights={"short": 1, "long": 3})


def left_alone(rank: int = 0, world_size: int = 1, size: int = SHORT) -> Any:
    """Parts whose states each rank knows alone: samplers that divide their data themselves."""
    parts = {name: map_left_alone(rank, world_size, size=size, seed=seed) for name, seed in (("short", 1), ("long", 2))}
    return midepoch.combine(parts, "min_size")
