"""What combining loaders costs a batch, over reading its parts by themselves.

Run ``python benchmarks/combine.py``. Batches are small lists that exist already, so that nothing but the loaders is
timed. Alternated rounds in one run; reported are medians of the rounds' differences. Prints Markdown;
docs/benchmarks/index.md has its figures.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from typing import Any

import torch
from measuring import machine

import midepoch

CASES: dict[str, dict[str, Any]] = {
    "min_size": {"mode": "min_size"},
    "max_size": {"mode": "max_size"},
    "max_size_cycle": {"mode": "max_size_cycle"},
    "sequential": {"mode": "sequential"},
    "weighted": {"mode": "weighted"},
    "weighted, labelled, for a number of steps": {"mode": "weighted", "labelled": True},
}


def part(batches: int) -> midepoch.StatefulIterable:
    return midepoch.wrap([[number] for number in range(batches)], seed=0)


def seconds(loader: Any) -> tuple[float, int]:
    start, count = time.perf_counter(), 0
    for _ in loader:
        count += 1
    return time.perf_counter() - start, count


def measured(options: dict[str, Any], parts: int, batches: int, rounds: int) -> tuple[float, float]:
    """Microseconds a batch of the combination, and over its parts."""
    if options.get("labelled"):
        options = {**options, "steps": parts * batches}
    taken, more = [], []
    for turn in range(rounds):
        loaders = [part(batches) for _ in range(parts)]
        combined: Any = midepoch.combine({str(number): each for number, each in enumerate(loaders)}, seed=0, **options)  # type: ignore[misc]
        alone = [part(batches) for _ in range(parts)]
        if turn % 2:
            together, steps = seconds(combined)
        by_themselves = sum(seconds(each)[0] for each in alone)
        if not turn % 2:
            together, steps = seconds(combined)
        taken.append(together / steps * 1e6)
        more.append((together - by_themselves) / steps * 1e6)
    return statistics.median(taken), statistics.median(more)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=31)
    arguments.add_argument("--batches", type=int, default=20_000)
    options = arguments.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{machine()}; medians of {options.rounds} alternated rounds of {options.batches} batches a part\n"
    )
    print("| mode | parts | µs a batch | over its parts |\n|---|---|---|---|")
    for name, case in CASES.items():
        for parts in (2, 4):
            taken, more = measured(case, parts, options.batches, options.rounds)
            print(f"| {name} | {parts} | {taken:.2f} | {more:.2f} |", flush=True)


if __name__ == "__main__":
    main()
