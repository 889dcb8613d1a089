"""Datasets that are what they seem, and others that have changed when they are read again."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import midepoch

SIZE = 32


def image_of(number: int, side: int = 16) -> Any:
    """A picture: smooth, so that its resized form is of the same picture, with values from 0 to 255."""
    coarse = np.random.default_rng(number).normal(size=(3, 4, 4))
    fine = np.kron(coarse, np.ones((1, side // 4, side // 4))) * 50 + 120
    return (fine + np.random.default_rng(number + 10_000).normal(0, 6, fine.shape)).clip(0, 255).astype(np.uint8)


class Files(Dataset[Any]):
    """Pictures in a folder: as their names are listed, with a random shift of brightness.

    Args:
        order: of the names.
        strength: of the augmentation.
        rounding: the last bit of each value comes out another way, as from another decoder.
        side: in pixels; may be changed between epochs.
        mount: a folder in front of each name.
        extra: what else comes with each picture, by name.
        form: "float", "int" or "names".
    """

    def __init__(
        self, order: str = "sorted", strength: float = 10.0, rounding: bool = False, side: int = 16,
        mount: str = "/mnt/a", extra: str = "", form: str = "float", size: int = SIZE,
    ) -> None:  # fmt: skip
        numbers = list(range(size))
        self.numbers = numbers if order == "sorted" else random.Random(order).sample(numbers, len(numbers))
        self.strength, self.rounding, self.side, self.mount = strength, rounding, side, mount
        self.extra, self.form, self.reads = extra, form, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        number = self.numbers[index]
        item: dict[str, Any] = {"label": number}
        if self.form == "names":
            item["path"] = f"{self.mount}/{number:05d}.png"
        else:
            image = image_of(number, self.side)
            if self.rounding:
                image = image ^ np.random.default_rng(index).integers(0, 2, image.shape, dtype=np.uint8)
            item["image"] = torch.from_numpy(image)
            if self.form == "float":
                item["image"] = item["image"].float() / 255 + random.random() * self.strength / 255
        if self.extra:
            item[self.extra] = EXTRAS[self.extra]()
        return item


class Nothing:
    """An object without equality."""

    __slots__ = ()


EXTRAS: dict[str, Callable[[], Any]] = {
    "host": lambda: os.environ.get("AS_HOST", socket.gethostname()),
    "time": time.time_ns,
    "process": os.getpid,
    "object": Nothing,
}


def as_it_is(items: list[Any]) -> list[Any]:
    return items


def make(workers: int = 0, batch: int = 4, options: dict[str, Any] | None = None, **source: Any) -> Any:
    """A wrapped loader of `Files`."""
    loader = DataLoader(Files(**source), batch, shuffle=True, num_workers=workers, collate_fn=as_it_is)
    return midepoch.wrap(loader, seed=3, **(options or {}))


def resume(state: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """What comes of the state in this process: the rest's labels, or the error, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make(**arguments) as loader:
            loader.load_state_dict(state)
            try:
                rest, error = [item["label"] for batch in loader for item in batch], ""
            except midepoch.MidepochError as raised:
                rest, error = [], f"{type(raised).__name__}: {raised}"
    told = [str(each.message) for each in caught if issubclass(each.category, midepoch.MidepochWarning)]
    return {"rest": rest, "error": error, "warnings": told}


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([resume(each["state"], each["arguments"]) for each in asked]))
