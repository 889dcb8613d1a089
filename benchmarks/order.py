"""What an index costs: BatchSampler over RandomSampler against midepoch's orders; and what a start costs.

Run ``python benchmarks/order.py``. Each is iterated over a whole epoch in batches of 32, as lists of
integers, start included, in alternated rounds. Reported are the median of each and the median of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from midepoch.order import Order, Sequential, Shuffled, Windowed

BATCH_SIZE = 32


def torch_batches(size: int) -> Iterable[list[int]]:
    return BatchSampler(RandomSampler(range(size)), BATCH_SIZE, drop_last=False)


def batches(order: Order, seed: int, world_size: int) -> Iterator[list[int]]:
    """The batches of rank 0, in a world of more than one without the last, partial global batch."""
    epoch = order.epoch(seed, 0)
    end = order.size if world_size == 1 else order.size - BATCH_SIZE * world_size + 1
    for start in range(0, end, BATCH_SIZE * world_size):
        yield epoch[start : min(start + BATCH_SIZE, order.size)].tolist()


def nanoseconds_per_index(make: Callable[[], Iterable[list[int]]]) -> float:
    start = time.perf_counter()
    indices = 0
    for batch in make():
        indices += len(batch)
    return (time.perf_counter() - start) / indices * 1e9


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}"
    return f"{cpu}; {platform.system()}; {versions}"


def compare(size: int, rounds: int) -> None:
    orders: list[tuple[str, Order, int]] = [
        ("Sequential", Sequential(size), 1),
        ("Shuffled", Shuffled(size), 1),
        ("Shuffled, rank 0 of 8", Shuffled(size), 8),
        ("Windowed, blocks of 1024, window 16", Windowed(size, 1024, 16), 1),
    ]
    torch_costs: list[float] = []
    costs: dict[str, list[float]] = {name: [] for name, _, _ in orders}
    for seed in range(rounds):
        torch_costs.append(nanoseconds_per_index(partial(torch_batches, size)))
        for name, order, world_size in orders:
            costs[name].append(nanoseconds_per_index(partial(batches, order, seed, world_size)))
    print(f"\n{size:,} samples, {rounds} rounds: nanoseconds per index")
    print(f"  {'BatchSampler(RandomSampler)':<38}{statistics.median(torch_costs):8.1f}")
    for name, each in costs.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(each, torch_costs, strict=True))
        print(f"  {name:<38}{statistics.median(each):8.1f}   ratio {ratio:.2f}")


def start_up(size: int, rounds: int) -> None:
    print(f"\n{size:,} samples: from nothing to the first batch at 90 % of the epoch")
    for make in (Shuffled, lambda size: Windowed(size, 1024, 16)):
        durations = []
        for seed in range(rounds):
            start = time.perf_counter()
            order = make(size)
            position = size * 9 // 10
            order.epoch(seed, 0)[position : position + BATCH_SIZE].tolist()
            durations.append(time.perf_counter() - start)
        tracemalloc.start()
        epoch = order.epoch(0, 0)
        for position in range(0, 64_000, BATCH_SIZE):
            epoch[position : position + BATCH_SIZE]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        milliseconds = statistics.median(durations) * 1e3
        print(f"  {order.describe():<38}{milliseconds:8.2f} ms, {peak / 2**20:.1f} MiB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="alternated rounds (default: %(default)s)")
    rounds: int = parser.parse_args().rounds
    print(machine())
    for size in (10**4, 10**5, 10**6, 10**7):
        # At 10**7 samples a round takes seconds; three are enough for a median.
        compare(size, rounds if size < 10**7 else min(3, rounds))
    for size in (10**9, 10**12):
        start_up(size, rounds)


if __name__ == "__main__":
    main()
