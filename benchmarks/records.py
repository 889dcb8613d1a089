"""What streams cost over a dataset of many records: in an epoch, in `gather` and in `Snapshot.save`.

Run ``python benchmarks/records.py``. Each record is a dataclass, so a search that walked the data would pay for each.
Alternated rounds; medians. Prints Markdown.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import midepoch
from midepoch.checkpoint.snapshot import Snapshot

BATCH_SIZE = 64


@dataclass
class Record:
    text: str
    label: int


class Records(Dataset[int]):
    """Records of a list, which draw nothing."""

    def __init__(self, size: int, read: int) -> None:
        self.records = [Record(str(index), index) for index in range(size)]
        self.read = read

    def __len__(self) -> int:
        return self.read

    def __getitem__(self, index: int) -> int:
        return self.records[index].label


def loader(records: int, read: int, workers: int, **settings: Any) -> midepoch.Loader:
    source = DataLoader(Records(records, read), BATCH_SIZE, shuffle=True, num_workers=workers)
    return midepoch.wrap(source, seed=1, **settings)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def epochs(records: int, workers: int, rounds: int) -> tuple[float, float]:
    """Median seconds of an epoch with streams, and without."""
    with loader(records, records, workers) as streams, loader(records, records, workers, randomness="none") as none:
        for each in (streams, none):
            list(each)
        pairs = [(seconds(lambda: list(streams)), seconds(lambda: list(none))) for _ in range(rounds)]
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)


def saves(records: int, rounds: int) -> tuple[float, float]:
    """Median milliseconds of `gather` and of `Snapshot.save`, in mid-epoch, with that many records in the dataset."""
    with loader(records, 4096, 0) as each, tempfile.TemporaryDirectory() as folder:
        snapshot = Snapshot(Path(folder) / "snapshot.pt", loader=each)
        batches = iter(each)
        gathered, saved = [], []
        for _ in range(rounds):
            next(batches)
            gathered.append(seconds(lambda: midepoch.gather(each)))
            saved.append(seconds(snapshot.save))
    return statistics.median(gathered) * 1e3, statistics.median(saved) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, python {platform.python_version()}, {torch.get_num_threads()} threads\n")
    print(f"An epoch of {options.records:,} records, in seconds:\n")
    print("| workers | with streams | `randomness=\"none\"` | ratio | more, ms |\n|---|---|---|---|---|")
    for workers in (0, 2):
        streams, none = epochs(options.records, workers, options.rounds)
        more = (streams - none) * 1e3
        print(f"| {workers} | {streams:.3f} | {none:.3f} | {streams / none:.2f} | {more:.0f} |")
    print("\n| records in the dataset | `gather`, ms | `Snapshot.save`, ms |\n|---|---|---|")
    for records in (4096, 45_000):
        gathered, saved = saves(records, 5 * options.rounds)
        print(f"| {records:,} | {gathered:.2f} | {saved:.2f} |")


if __name__ == "__main__":
    main()
