"""What wrapping a StreamingDataLoader costs: throughput, and the first batch after a resume.

Run ``python benchmarks/streaming_overhead.py``. Alternated rounds of whole epochs in one run; reported are geometric
means of the rounds' ratios, with the interval that holds the true one in 95 of 100 runs. Prints Markdown;
docs/benchmarks/index.md has its figures.
"""

from __future__ import annotations

import argparse
import math
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import cpu_torchvision  # noqa: F401  # before streaming, which imports torchvision
import streaming
from measuring import between, machine
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

import midepoch

BATCH_SIZE = 32


def write(folder: Path, samples: int) -> None:
    with MDSWriter(out=str(folder), columns={"number": "int", "bytes": "bytes"}, size_limit=1 << 24) as writer:
        for number in range(samples):
            writer.write({"number": number, "bytes": bytes(64)})


def bare(folder: Path) -> Any:
    copy = tempfile.mkdtemp(dir=folder.parent)
    shutil.copytree(folder, copy, dirs_exist_ok=True)  # Streaming allows one dataset at a time on a folder
    dataset = StreamingDataset(local=copy, batch_size=BATCH_SIZE, shuffle=True)
    return StreamingDataLoader(dataset, batch_size=BATCH_SIZE)


def milliseconds(loader: Any) -> float:
    start, count = time.perf_counter(), 0
    for _ in loader:
        count += 1
    return (time.perf_counter() - start) / count * 1e3


def throughput(folder: Path, rounds: int) -> None:
    loaders = {"bare": bare(folder), "bare once more": bare(folder), "wrapped": midepoch.wrap(bare(folder))}
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(rounds + 1):
        for name in list(loaders)[:: 1 if turn % 2 else -1]:
            taken = milliseconds(loaders[name])
            if turn:
                times[name].append(taken)
    print("| | ms a batch | throughput, relative to the mean of the two bare runs (95 %) |\n|---|---|---|")
    base = [math.sqrt(a * b) for a, b in zip(times["bare"], times["bare once more"], strict=True)]
    for name, values in times.items():
        ratios = [theirs / mine for theirs, mine in zip(base, values, strict=True)]
        print(f"| {name} | {statistics.median(values):.3f} | {between(ratios)} |")


def first_batch(folder: Path, samples: int, rounds: int) -> None:
    loader = midepoch.wrap(bare(folder))
    times: dict[float, list[float]] = {0.0: [], 0.9: []}
    for turn in range(rounds):
        for progress in (0.0, 0.9) if turn % 2 else (0.9, 0.0):
            loader.seek(epoch=0, position=int(samples * progress) // BATCH_SIZE * BATCH_SIZE)
            start = time.perf_counter()
            next(iter(loader))
            times[progress].append((time.perf_counter() - start) * 1e3)
    ratios = [late / early for early, late in zip(times[0.0], times[0.9], strict=True)]
    early, late = (statistics.median(values) for values in times.values())
    print(f"\nFirst batch of {samples} samples: {early:.1f} ms at 0 %, {late:.1f} ms at 90 %, ratio {between(ratios)}.")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=31)
    arguments.add_argument("--samples", type=int, default=20_000)
    options = arguments.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch {torch.__version__}, streaming "
        f"{streaming.__version__}, {machine()}; {options.rounds} alternated rounds of {options.samples} "
        f"samples in batches of {BATCH_SIZE}, no workers\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write(data, options.samples)
        throughput(data, options.rounds)
        first_batch(data, options.samples, options.rounds)


if __name__ == "__main__":
    main()
