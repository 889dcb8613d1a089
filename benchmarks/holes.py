"""What positions that are left out cost a batch, and what finishing a batch costs.

Run ``python benchmarks/holes.py``. A shuffled order of a billion samples that draw nothing, in batches of 32, with 512
ranges left out: between batches, or so close that they cut a batch into 33 pieces and more. Alternated rounds, medians
of the differences from a loader that leaves nothing out. Tickets are finished in an order that is drawn within
windows of 64. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from typing import Any

from torch.utils.data import DataLoader, Dataset

import midepoch

SIZE, BATCH_SIZE, HOLES = 1_000_000_000, 32, 512


class Numbers(Dataset[int]):
    """Draws nothing."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


def loader_with(ranges: list[tuple[int, int]], batch_size: int = BATCH_SIZE) -> midepoch.Loader[Any]:
    loader = midepoch.wrap(DataLoader(Numbers(), batch_size, shuffle=True, collate_fn=len), seed=1)
    for start, stop in ranges:
        loader.skip(start, stop)
    return loader


def between(batches: int) -> list[tuple[int, int]]:
    """Ranges spread over the first batches, and over the rest of the epoch."""
    apart = max(BATCH_SIZE, batches * BATCH_SIZE // (HOLES // 2))
    near = [(number * apart + 7, number * apart + 9) for number in range(HOLES // 2)]
    return near + [(SIZE // 2 + number * 1000, SIZE // 2 + number * 1000 + 9) for number in range(HOLES - len(near))]


def in_pieces() -> list[tuple[int, int]]:
    """One position of every two is left out, as far as a state can say so."""
    return [(2 * number, 2 * number + 1) for number in range(HOLES)]


def microseconds_per_batch(loader: midepoch.Loader[Any], batches: int) -> float:
    """Of the batches after the first, which opens the session."""
    this = iter(loader)
    next(this)
    gc.collect()
    start = time.process_time()
    for _ in range(batches):
        next(this)
    return (time.process_time() - start) / batches * 1e6


def microseconds_to_finish(tickets: int) -> float:
    loader = loader_with([])
    held = []
    for _ in loader:
        held.append(loader.ticket)
        if len(held) == tickets:
            break
    draws = random.Random(0)
    windows = [held[start : start + 64] for start in range(0, tickets, 64)]
    for window in windows:
        draws.shuffle(window)
    mixed = [ticket for window in windows for ticket in window]
    start = time.process_time()
    for ticket in mixed:
        loader.finish(ticket)
    return (time.process_time() - start) / tickets * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="alternated rounds (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=2000, help="batches of a round (default: %(default)s)")
    options = parser.parse_args()
    in_row = HOLES // 34 - 1  # batches of 34 that lie among the ranges
    added: dict[str, list[float]] = {"512 ranges, among the batches": [], "512 ranges, a batch in 34 pieces": []}
    finishing = []
    for _ in range(options.rounds):
        plain = microseconds_per_batch(loader_with([]), options.batches)
        spread = microseconds_per_batch(loader_with(between(options.batches)), options.batches)
        added["512 ranges, among the batches"].append(spread - plain)
        plain = microseconds_per_batch(loader_with([], 34), in_row)
        cut = microseconds_per_batch(loader_with(in_pieces(), 34), in_row)
        added["512 ranges, a batch in 34 pieces"].append(cut - plain)
        finishing.append(microseconds_to_finish(options.batches))
    print("| what | microseconds more a batch | at most |\n|---|---|---|")
    for (name, each), most in zip(added.items(), (20, 100), strict=True):
        print(f"| {name} | {statistics.median(each):.1f} | {most} |")
    print(f"| `finish` | {statistics.median(finishing):.2f} | 3 |")


if __name__ == "__main__":
    main()
