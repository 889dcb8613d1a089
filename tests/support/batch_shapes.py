"""Loaders of batches in the shapes that people's collate functions give them; nobody says which part names a sample."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import midepoch

SIZE, BATCH = 10, 3


def tokens(index: int) -> torch.Tensor:
    return torch.tensor([1, 2, 3, index])


def padding(index: int) -> list[int]:
    return [7] * (index % 4) + [index + 20]


def picture(index: int) -> Any:
    from PIL import Image

    return Image.new("L", (4, 4), index)


def pad(batch: list[list[int]], start: bool = False) -> torch.Tensor:
    width = max(map(len, batch))
    return torch.tensor([[0] * (width - len(row)) + row if start else row + [0] * (width - len(row)) for row in batch])


def as_tuples(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


MASK = torch.ones(4, dtype=torch.long)
# Each: a sample, and what makes a batch of some; None is torch's own.
KINDS: dict[str, tuple[Callable[[int], Any], Callable[[list[Any]], Any] | None]] = {
    "tokens": (lambda index: {"input_ids": tokens(index), "attention_mask": MASK}, None),
    "mask first": (lambda index: {"attention_mask": MASK, "input_ids": tokens(index)}, None),
    "padded": (padding, pad),
    "padded at the start": (padding, functools.partial(pad, start=True)),
    "dicts": (lambda index: {"id": index, "text": f"text {index}"}, list),
    "detection": (
        lambda index: (torch.full((3, 4, 4 + index % 3), float(index)), {"boxes": torch.zeros(index % 4, 4)}), as_tuples
    ),
    "images": (picture, list),
    "not a number": (lambda index: float("nan") if index % 5 == 0 else float(index), None),
    "label first": (lambda index: {"label": index % 2, "x": torch.rand(2)}, None),
    "random": (lambda index: torch.rand(3, 4, 4), None),
    "nothing": (lambda index: None, list),
}


class Samples(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return KINDS[self.kind][0](index)


class Forgetful(midepoch.Loader):
    """On two ranks it goes on from a state of one rank a batch too late."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.world.world_size > state["world_size"] and 0 < state["position"] < 6:
            self.seek(epoch=state["epoch"], position=state["position"] + 2)


def make(kind: str, shuffle: bool = True, rank: int = 0, world_size: int = 1, forgets: bool = False) -> Any:
    loader = DataLoader(Samples(kind), BATCH, shuffle=shuffle, collate_fn=KINDS[kind][1])
    made = midepoch.wrap(loader, seed=0, world=midepoch.World(rank, world_size))
    made.__class__ = Forgetful if forgets else midepoch.Loader
    return made


class Unnamed:
    """Whatever is in its batches differs from run to run, and it says so."""

    exact = dict.fromkeys(("exact_order", "constant_time_resume", "elastic_world", "elastic_workers"), True)
    capabilities = types.SimpleNamespace(**exact, rank_independent=True, exact_augmentations=False)

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.world_size, self.epoch, self.done = world_size, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.done < 12:
            self.done += 2 * self.world_size
            yield torch.rand(2, 3)
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch + (self.done == 12), "done": self.done % 12}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]
