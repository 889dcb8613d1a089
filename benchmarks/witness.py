"""What the witness costs: the first batch of a pass with it and without, and a state.

Run ``python benchmarks/witness.py``. Datasets of several kinds, read in this process; alternated rounds; medians.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import midepoch

BATCH_SIZE = 32
torch.set_num_threads(1)  # the samples are what is measured, not how threads share two cores


class Made(Dataset[Any]):
    """Samples that a function makes of their index."""

    def __init__(self, make: Callable[[int], Any], size: int = 1_000_000_000) -> None:
        self.make, self.size = make, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def picture(index: int) -> Any:
    return torch.full((3, 224, 224), index % 251, dtype=torch.uint8), index


def normalised(index: int) -> Any:
    return torch.full((3, 224, 224), index % 251 / 251), index


def tokens(index: int) -> Any:
    return torch.from_numpy(np.arange(index % 1000, index % 1000 + 4096))


def number(index: int) -> Any:
    return index


KINDS: dict[str, Callable[[int], Any]] = {
    "an integer": number,
    "4,096 tokens": tokens,
    "a picture of 224 x 224 bytes": picture,
    "a picture of 224 x 224 floats": normalised,
}


def first_batch(make: Callable[[int], Any], verify: Any) -> tuple[float, midepoch.Loader]:
    """Milliseconds from `iter` to the first batch of a fresh loader, and the loader."""
    source = DataLoader(Made(make), BATCH_SIZE, shuffle=True)
    loader = midepoch.wrap(source, seed=1, verify=verify)
    start = time.perf_counter()
    next(iter(loader))
    return (time.perf_counter() - start) * 1e3, loader


def state_of(loader: midepoch.Loader, times: int = 2000) -> float:
    """Microseconds of `state_dict`."""
    start = time.perf_counter()
    for _ in range(times):
        loader.state_dict()
    return (time.perf_counter() - start) / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="of which the median is taken")
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, Python {platform.python_version()}; batches of {BATCH_SIZE}, 10^9 samples\n")
    print("| sample | first batch without, ms | with, ms | `state_dict` without, us | with, us | bytes of the state |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, make in KINDS.items():
        times: dict[str, list[float]] = {"off": [], "sample": []}
        states: dict[str, list[float]] = {"off": [], "sample": []}
        size = 0
        for _ in range(rounds):
            for verify in times:
                taken, loader = first_batch(make, verify)
                times[verify].append(taken)
                states[verify].append(state_of(loader))
                size = len(json.dumps(loader.state_dict()))
        row = [statistics.median(found[verify]) for found in (times, states) for verify in times]
        print(f"| {name} | {row[0]:.2f} | {row[1]:.2f} | {row[2]:.1f} | {row[3]:.1f} | {size} |")


if __name__ == "__main__":
    main()
