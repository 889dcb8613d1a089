"""Datasets that are what they seem, and others that have changed when they are read again."""

from __future__ import annotations

import functools
import json
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import midepoch

SIZE = 32


def image_of(number: int) -> Any:
    """A picture: smooth, so that its resized form is of the same picture, with values from 0 to 255."""
    coarse = np.random.default_rng(number).normal(size=(3, 4, 4))
    fine = np.kron(coarse, np.ones((1, 4, 4))) * 50 + 120
    return (fine + np.random.default_rng(number + 10_000).normal(0, 6, fine.shape)).clip(0, 255).astype(np.uint8)


class Files(Dataset[Any]):
    """Pictures in a folder: as their names are listed, with a random shift of brightness.

    Args:
        order: of the names.
        strength: of the augmentation.
        rounding: the last bit of each value comes out another way, as from another decoder.
    """

    def __init__(self, order: str = "sorted", strength: float = 10.0, rounding: bool = False, size: int = SIZE) -> None:
        numbers = list(range(size))
        self.numbers = numbers if order == "sorted" else random.Random(order).sample(numbers, len(numbers))
        self.strength, self.rounding = strength, rounding
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        number = self.numbers[index]
        image = image_of(number)
        if self.rounding:
            image = image ^ np.random.default_rng(index).integers(0, 2, image.shape, dtype=np.uint8)
        return {"label": number, "image": torch.from_numpy(image).float() / 255 + random.random() * self.strength / 255}


def make(workers: int = 0, batch: int = 4, options: dict[str, Any] | None = None, **source: Any) -> Any:
    loader = DataLoader(Files(**source), batch, shuffle=True, num_workers=workers, collate_fn=list)
    return midepoch.wrap(loader, seed=3, **(options or {}))


# --- shards -----------------------------------------------------------------------------------------------------------


def write_shards(folder: str, content: int = 0, time: float | None = 1, count: int = 4, size: int = 3000) -> list[str]:
    """Tar archives of five samples each. Other contents have equal names and sizes. `time` None: of now."""
    import webdataset as wds

    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [f"{folder}/shard-{shard:04d}.tar" for shard in range(count)]
    for shard, path in enumerate(paths):
        with wds.TarWriter(path, mtime=time) as writer:
            for number in range(5 * shard, 5 * shard + 5):
                data = np.random.default_rng([content, number]).bytes(size)
                writer.write({"__key__": f"s{number:04d}", "bin": data, "cls": f"{number}".encode()})
    return paths


def of_shard(sample: dict[str, Any]) -> dict[str, Any]:
    return {"label": int(sample["cls"])}


def make_webdataset(
    urls: list[str], workers: int = 0, batch: int = 2, world: Any = (0, 1), options: dict[str, Any] | None = None
) -> Any:
    import webdataset as wds

    dataset = wds.WebDataset(urls, shardshuffle=9, nodesplitter=wds.split_by_node).shuffle(9).map(of_shard)
    loader = DataLoader(dataset.batched(batch, collation_fn=list), batch_size=None, num_workers=workers)
    return midepoch.wrap(loader, seed=3, world=midepoch.World(*world), tail="uneven", progress=False, **(options or {}))


def write_mds(folder: str, content: int = 0, **keywords: Any) -> str:
    """Streaming's own format, 24 samples in many shards. Other contents have equal sizes."""
    import cpu_torchvision  # noqa: F401  # before streaming, which imports torchvision
    from streaming import MDSWriter

    from support import streaming_apart  # noqa: F401

    with MDSWriter(out=folder, columns={"label": "int", "data": "bytes"}, size_limit=600, **keywords) as writer:
        for number in range(24):
            writer.write({"label": number, "data": np.random.default_rng([content, number]).bytes(100)})
    return folder


def make_streaming(
    local: str | None = None, remote: str | None = None, workers: int = 0, batch: int = 2, shuffle: bool = True,
    persistent: bool = False, options: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    from streaming import StreamingDataLoader, StreamingDataset

    from support import streaming_sources  # noqa: F401

    dataset = StreamingDataset(local=local, remote=remote, batch_size=batch, shuffle=shuffle, shuffle_seed=3)
    loader = StreamingDataLoader(dataset, batch_size=batch, num_workers=workers, persistent_workers=persistent)
    return midepoch.wrap(loader, **(options or {}))


def labels_of(batch: Any) -> list[int]:
    return batch["label"].tolist() if isinstance(batch, dict) else [item["label"] for item in batch]


MAKERS: dict[str, Callable[..., Any]] = {"files": make, "webdataset": make_webdataset, "streaming": make_streaming}


def state_after(kind: str, batches: int, **arguments: Any) -> tuple[dict[str, Any], list[int]]:
    """A state, and the labels of the rest of its pass; of the next pass if nothing is left."""
    with MAKERS[kind](**arguments) as loader:
        iterator = iter(loader)
        for _ in range(batches):
            if next(iterator, None) is None:
                iterator = iter(loader)
                next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [label for batch in iterator for label in labels_of(batch)]
        return state, rest or [label for batch in loader for label in labels_of(batch)]


# --- by a fresh loader ------------------------------------------------------------------------------------------------

_opened: list[str] = []


@functools.cache
def _watch() -> None:
    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith((".tar", ".mds")):
            _opened.append(str(arguments[0]))

    sys.addaudithook(note)


def resume(state: dict[str, Any], arguments: dict[str, Any], kind: str = "files") -> dict[str, Any]:
    """What comes of the state.

    Returns:
        rest: labels; error; warnings; batches: that were given before the error; opened: shards that this process, not
        a worker, opened while it read.
    """
    _watch()
    rest: list[int] = []
    error, batches = "", 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with MAKERS[kind](**arguments) as loader:
            try:
                loader.load_state_dict(state)
                _opened.clear()
                for batch in loader:
                    rest, batches = rest + labels_of(batch), batches + 1
            except midepoch.MidepochError as raised:
                rest, error = [], f"{type(raised).__name__}: {raised}"
            opened = sorted(set(_opened))
    told = [str(each.message) for each in caught if issubclass(each.category, midepoch.MidepochWarning)]
    return {"rest": rest, "error": error, "warnings": told, "batches": batches, "opened": opened}


Cases = dict[str, tuple[dict[str, Any], str]]
"""Name -> the arguments of a maker, and what comes of the state."""


def found_in(state: dict[str, Any], cases: Cases, kind: str) -> dict[str, dict[str, Any]]:
    """What comes of one state in each case."""
    return {name: resume(state, arguments, kind) for name, (arguments, _) in cases.items()}


def check(found: dict[str, dict[str, Any]], cases: Cases, **others: str) -> None:
    """That each case has ended as it says, or as `others` do."""
    assert {name: outcome(each) for name, each in found.items()} == {
        name: others.get(name, end) for name, (_, end) in cases.items()
    }


def outcome(found: dict[str, Any]) -> str:
    """The error's name, "told" or "exact"."""
    if found["error"]:
        return str(found["error"]).partition(":")[0]
    return "told" if found["warnings"] else "exact"
