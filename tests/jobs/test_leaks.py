"""Files, threads, processes, shared memory and memory are counted before and after many epochs: none may leak."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import midepoch
from support import fault_sources as faults

CHAOS = bool(os.environ.get("MIDEPOCH_CHAOS"))
MEMORY = 24 << 20  # bytes that allocators may keep; of 1,000 epochs a batch of 64 KiB each is more

# How many epochs go before those counted, where more than a few fill allocators: DALI's take 25 MB in 300 epochs, which
# make 100 pipelines, and 4 to 6 MB in the next 2,700.
BEFORE = {"dali": 300 if CHAOS else 30}
# What is left open once an epoch shows after six. Memory shows where batches of a hundred epochs are kept.
EPOCHS = dict.fromkeys(("dataloader", "replayed", "webdataset"), 100)

pytestmark = [*faults.QUIET, pytest.mark.usefixtures("cache")]

Maker = Callable[[], Any]


def tensors(**options: Any) -> Maker:
    data = TensorDataset(torch.arange(48.0).repeat_interleave(2048).reshape(48, 2048))  # 8 KiB a sample
    return lambda: midepoch.wrap(DataLoader(data, 8, shuffle=True, **options), seed=1)


def replayed(folder: Path) -> Maker:
    return lambda: midepoch.wrap(lambda: iter([torch.zeros(2048, 4) for _ in range(6)]))


def shards(folder: Path, kind: str = "", workers: int = 0) -> Maker:
    sources = pytest.importorskip("support.webdataset_sources", reason="webdataset is not installed")
    urls: list[str] = sources.make_shards(folder / "shards", [12, 12, 12, 12], size=4000)
    urls = sources.compress(urls) if kind == "streamed" else [f"pipe:cat {url}" for url in urls] if kind else urls

    def make() -> Any:
        dataset = sources.wds.WebDataset(urls, shardshuffle=9).shuffle(20).to_tuple("bin")
        loader = DataLoader(dataset.batched(8, collation_fn=list), batch_size=None, num_workers=workers)
        return midepoch.wrap(loader, seed=1)

    return make


def streaming(folder: Path) -> Maker:
    sources = pytest.importorskip("support.streaming_sources", reason="mosaicml-streaming is not installed")
    # Streaming keeps files of shared memory for each of its data sets until the process ends, so there is one.
    source = sources.bare(24)
    return lambda: midepoch.wrap(source)


def dali(folder: Path) -> Maker:
    sources = pytest.importorskip("support.dali_sources", reason="DALI is not installed")
    options = {"root": str(sources.write_images(folder)), "reader": "numpy", "batch_size": 8}
    return lambda: sources.native(**options, pipeline={"enable_checkpointing": True})


def ffcv(folder: Path) -> Maker:
    sources = pytest.importorskip("support.ffcv_sources", reason="ffcv is not installed")
    source = sources.make(path=sources.file("raw"), os_cache=False)  # compiling another takes seconds
    return lambda: midepoch.wrap(source, seed=1)


def combined(folder: Path) -> Maker:
    first, second = tensors(num_workers=1), tensors()
    return lambda: midepoch.combine({"first": first(), "second": second()}, "min_size")


class Saved:
    def __init__(self, folder: Path) -> None:
        self.loader = tensors()()
        model = torch.nn.Linear(300, 300)
        self.snapshot = midepoch.Snapshot(folder / "snapshot.pt", model=model, data=self.loader, signals=())
        self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict
        self.snapshot.load()

    def __iter__(self) -> Any:
        yield from self.loader
        self.snapshot.save()

    def close(self) -> None:
        self.snapshot.close()
        self.loader.close()


SOURCES: dict[str, Callable[[Path], Maker]] = {
    "dataloader": lambda folder: tensors(), "workers": lambda folder: tensors(num_workers=2),
    "persistent workers": lambda folder: tensors(num_workers=2, persistent_workers=True),
    "replayed": replayed, "webdataset": shards, "webdataset with workers": lambda folder: shards(folder, workers=2),
    "webdataset streamed": lambda folder: shards(folder, "streamed"),
    "webdataset piped": lambda folder: shards(folder, "piped"),
    "streaming": streaming, "dali": dali, "ffcv": ffcv, "combined": combined,
    "snapshot": lambda folder: lambda: Saved(folder),
}  # fmt: skip


def live(make: Maker, epochs: int) -> None:
    """Whole epochs, epochs that are left in the middle, and loaders that are made again and go on from a state."""
    loader = make()
    for epoch in range(epochs):
        batches = iter(loader)
        for number, _ in enumerate(batches):
            if epoch % 3 == 1 and number == 2:
                break
        del batches
        if epoch % 3 == 2:
            batches = iter(loader)
            next(batches)
            state = loader.state_dict()
            if epoch % 2:
                loader.close()  # else it is dropped as it is, workers and all
            del batches
            loader = make()
            loader.load_state_dict(state)
    loader.close()


# FFCV compiles its pipelines for ten seconds; test_ffcv counts its threads and buffers.
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name == "ffcv")) for name in SOURCES])
def test_epochs_leak_nothing(name: str, tmp_path: Path) -> None:
    make, epochs = SOURCES[name](tmp_path), 1000 if CHAOS else EPOCHS.get(name, 6)
    # What is made once: pools of threads, caches, processes that track resources.
    live(make, BEFORE.get(name, 6 if CHAOS else 3))
    before = faults.quiet()
    live(make, epochs)
    after = faults.settled(before)
    print(f"{name}: {epochs} epochs: {before} -> {after}")
    for kind, most in (("files", 0), ("threads", 0), ("children", 0), ("shared", 0), ("memory", MEMORY)):
        assert getattr(after, kind) <= getattr(before, kind) + most, f"{kind}: {before} before, {after} after"
