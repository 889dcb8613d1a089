"""Loaders of batches in the shapes that people's collate functions give them; nobody says which part names a sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import midepoch

SIZE, BATCH = 10, 3


class Samples(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        ids, mask = torch.tensor([1, 2, 3, index]), torch.ones(4, dtype=torch.long)
        match self.kind:
            case "tokens":
                return {"input_ids": ids, "attention_mask": mask}
            case "mask first":
                return {"attention_mask": mask, "input_ids": ids}
            case "padded" | "padded at the start":
                return [7] * (index % 4) + [index + 20]
            case "dicts":
                return {"id": index, "text": f"text {index}"}
            case "detection":
                return torch.full((3, 4, 4 + index % 3), float(index)), {"boxes": torch.zeros(index % 4, 4)}
            case "images":
                from PIL import Image

                return Image.new("L", (4, 4), index)
            case "not a number":
                return float("nan") if index % 5 == 0 else float(index)
            case "label first":
                return {"label": index % 2, "x": torch.rand(2)}
            case "random":
                return torch.rand(3, 4, 4)
            case _:
                return None


def pad(batch: list[list[int]], start: bool = False) -> torch.Tensor:
    width = max(map(len, batch))
    return torch.tensor([[0] * (width - len(row)) + row if start else row + [0] * (width - len(row)) for row in batch])


def as_tuples(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


COLLATE: dict[str, Callable[[list[Any]], Any]] = {
    "padded": pad, "padded at the start": functools.partial(pad, start=True), "dicts": list, "detection": as_tuples,
    "images": list, "nothing": list,
}  # fmt: skip
KINDS = (
    "tokens", "mask first", "padded", "padded at the start", "dicts", "detection", "images", "not a number",
    "label first", "random", "nothing",
)  # fmt: skip


class Forgetful(midepoch.Loader):
    """On two ranks it goes on from a state of one rank a batch too late."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.world.world_size > state["world_size"] and 0 < state["position"] < 6:
            self.seek(epoch=state["epoch"], position=state["position"] + 2)


def make(kind: str, shuffle: bool = True, rank: int = 0, world_size: int = 1, forgets: bool = False) -> Any:
    loader = DataLoader(Samples(kind), BATCH, shuffle=shuffle, collate_fn=COLLATE.get(kind))
    made = midepoch.wrap(loader, seed=0, world=midepoch.World(rank, world_size))
    made.__class__ = Forgetful if forgets else midepoch.Loader
    return made


class Unnamed:
    """Whatever is in its batches differs from run to run, and it says so."""

    class Capabilities:
        exact_order = constant_time_resume = elastic_world = elastic_workers = rank_independent = True
        exact_augmentations = False

    capabilities = Capabilities()

    def __init__(self, rank: int, world_size: int) -> None:
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


def make_unnamed(rank: int = 0, world_size: int = 1) -> Any:
    return Unnamed(rank, world_size)
