"""What a sampler costs from ten thousand samples to a million millions, and that it misses none.

Run ``python benchmarks/scale.py``. Prints a part of docs/benchmarks/index.md, which ``--json`` also writes there:

* **Cost**: time for each index that one rank gets, time to the first index, and memory, by size and by world size.
* **Coverage**: at 10**12 samples and 16,384 ranks, what all ranks together get in stretches of the epoch; at small
  sizes, all of the epoch, interrupted and continued on another world size. Ends with an error where anything is not
  covered.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import random
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).parent))

from measuring import processor, replaced

from midepoch import ResumableSampler, World, reseal
from midepoch.order import Order, Shuffled
from midepoch.order.keys import derive_key
from midepoch.order.permutations import Feistel
from midepoch.order.shuffled import _SHUFFLED

SIZES = (10**4, 10**6, 10**9, 10**12)
WORLD_SIZES = (1, 8, 1024, 16384)
BATCH_SIZE = 32
SEED = 2026
SMALL = 1000
"""Samples of the sampler that memory is compared with."""
STEPS = 4
"""In a window of the epoch: from the third on, an order has computed ahead for the rank that asks."""
FIRST_INDICES = 20
"""Times that the first index is measured in each round, since that is short."""
Indices = npt.NDArray[np.int64]
State = dict[str, Any]

# ----------------------------------------------------------------------------------------------------
# Cost


def sampler_of(
    order: Order, world: World, batch_size: int = BATCH_SIZE, drop_last: bool = False, state: State | None = None
) -> ResumableSampler:
    """The sampler of one rank, at its start or where the state says."""
    sampler = ResumableSampler(
        order.size, seed=SEED, shuffle=order, world=world, batch_size=batch_size, drop_last=drop_last
    )
    if state is not None:
        sampler.load_state_dict(state)
    return sampler


def state_at(order: Order, position: int) -> State:
    """The state of a run that has come to a position of its first epoch."""
    return reseal({**sampler_of(order, World()).state_dict(), "position": position})


def take(size: int, world_size: int, indices: int) -> None:
    """So many indices of the rank in the middle of the world, from as many epochs as that takes."""
    sampler = sampler_of(Shuffled(size), World(world_size // 2, world_size))
    passes = itertools.chain.from_iterable(itertools.repeat(sampler))
    deque(itertools.islice(passes, indices), maxlen=0)


def nanoseconds_per_index(size: int, world_size: int, indices: int) -> float:
    start = time.perf_counter()
    take(size, world_size, indices)
    return (time.perf_counter() - start) / indices * 1e9


def first_index(size: int, progress: float) -> float:
    """Milliseconds from nothing to the first index of a sampler that goes on there."""
    state = state_at(Shuffled(size), int(size * progress))
    start = time.perf_counter()
    next(iter(sampler_of(Shuffled(size), World(), state=state)))
    return (time.perf_counter() - start) * 1e3


def peak_kibibytes(size: int, world_size: int, indices: int) -> float:
    """The most memory that Python and numpy held while indices were taken.

    By tracemalloc, which sees every array: a sampler's share in the memory of a process that has loaded torch is too
    small to be told by the pages that the process has in use.
    """
    tracemalloc.start()
    take(size, world_size, indices)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1024


def spread(values: Sequence[float], digits: int) -> str:
    """The median, and in brackets the quartiles: the machine's other work makes the highest meaningless."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def measure_cost(rounds: int, indices: int) -> dict[str, Any]:
    """In alternated rounds, every other one backwards."""
    cases = [(size, 1) for size in SIZES] + [(SIZES[-1], world_size) for world_size in WORLD_SIZES[1:]]
    starts = list(itertools.product(SIZES, (0.0, 0.9)))
    for case in cases:  # what is done once in a process is done here
        take(*case, min(indices, 1000))
    small = peak_kibibytes(SMALL, 1, indices)
    memory = {case: peak_kibibytes(*case, indices) - small for case in cases}
    costs: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    firsts: dict[tuple[int, float], list[float]] = {start: [] for start in starts}
    for turn in range(rounds):
        direction = 1 if turn % 2 else -1
        for case in cases[::direction]:
            costs[case].append(nanoseconds_per_index(*case, indices))
        for start in starts[::direction]:
            firsts[start].extend(first_index(*start) for _ in range(FIRST_INDICES))
    return {
        "indices": indices,
        "per_index": [
            {"size": size, "world_size": world_size, "nanoseconds": costs[size, world_size], "kibibytes": kibibytes}
            for (size, world_size), kibibytes in memory.items()
        ],
        "first_index": [
            {"size": size, "progress": progress, "milliseconds": values} for (size, progress), values in firsts.items()
        ],
    }


# ----------------------------------------------------------------------------------------------------
# Coverage


def handed_out(left: int, world_size: int, drop_last: bool) -> int:
    """Positions that all ranks together get of so many, repeats included: as many for each rank."""
    return (left // world_size if drop_last else -(-left // world_size)) * world_size


def expected(order: Order, start: int, count: int) -> Indices:
    """The order's indices at so many positions; those beyond its end repeat its beginning."""
    epoch = order.epoch(SEED, 0)
    parts = [epoch[start : min(start + count, order.size)]]
    while (missing := count - sum(map(len, parts))) > 0:
        parts.append(epoch[0 : min(missing, order.size)])
    return np.concatenate(parts)


def require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise SystemExit(f"not covered: {where}: {what}")


def check_window(order: Order, position: int, world_size: int, drop_last: bool) -> int:
    """All ranks' batches from a position on, for some steps, or to the end of the epoch if that is not farther.

    Checks that in the order of ranks they are what the order has there, that all are distinct, and that the inverse of
    the shuffled order, where it is computed, leads from each index back to its position.

    Returns:
        The number of indices.
    """
    size, global_batch, left = order.size, world_size * BATCH_SIZE, order.size - position
    where = f"{size:,} samples, {world_size:,} ranks from position {position:,}, drop_last={drop_last}"
    state, last = state_at(order, position), left <= STEPS * global_batch
    shares = []
    for rank in range(world_size):
        sampler = sampler_of(order, World(rank, world_size), drop_last=drop_last, state=state)
        shares.append(np.fromiter(itertools.islice(sampler, None if last else STEPS * BATCH_SIZE), dtype=np.int64))
    require(len(set(map(len, shares))) == 1, where, "ranks get unequal numbers of indices")
    table = np.stack(shares)
    steps = [table[:, first : first + BATCH_SIZE].ravel() for first in range(0, table.shape[1], BATCH_SIZE)]
    indices = np.concatenate(steps)
    count = handed_out(left, world_size, drop_last) if last else STEPS * global_batch
    require(indices.size == count, where, f"{indices.size:,} indices in place of {count:,}")
    require(np.array_equal(indices, expected(order, position, count)), where, "not the indices that the order has")
    once = indices[:left]  # the others are repeats
    require(once.min() >= 0 and once.max() < size, where, "an index is out of range")
    require(np.unique(once).size == once.size, where, "an index comes more than once")
    permutation = Feistel(size, derive_key(_SHUFFLED, SEED, 0, size))
    positions = permutation._map(once, permutation._backward)
    back = np.array_equal(positions, np.arange(position, position + once.size))
    require(back, where, "the inverse of the order does not lead back to the positions")
    return int(indices.size)


def check_windows(size: int, world_size: int, windows: int) -> dict[str, int]:
    """The beginning of the epoch, its end under both tails, and so many windows at random between them."""
    generator, global_batch, order = random.Random(SEED), world_size * BATCH_SIZE, Shuffled(size)
    end = size - (STEPS - 1) * global_batch - generator.randrange(1, global_batch)
    places = [0, *sorted(generator.randrange(end) for _ in range(windows))]
    checked = [check_window(order, position, world_size, False) for position in places]
    checked += [check_window(order, end, world_size, drop_last) for drop_last in (False, True)]
    return {"windows": len(checked), "ranks": world_size, "size": size, "indices": sum(checked)}


def check_small(largest_size: int, largest_world: int, batch_sizes: Sequence[int] = (1, 3, 8)) -> dict[str, Any]:
    """Every size, every world size, some batch sizes, both tails: whole epochs, and epochs that go on in another world.

    A run is cut after its first step, at its half, and after its last full one, and continued from the state that one
    of its ranks saves, on a world size drawn at random. The two runs together must have handed out every sample once,
    but for those that the tail of the second repeats or leaves out: fewer than its world has ranks. Where these are all
    that is left, the epoch is over, and there is nothing to continue.
    """
    generator, worlds, epochs, resumed, indices = random.Random(SEED), range(1, largest_world + 1), 0, 0, 0
    for size in range(1, largest_size + 1):
        order = Shuffled(size)
        require(sorted(expected(order, 0, size)) == list(range(size)), f"{size} samples", "the order is no permutation")
        cases = itertools.product(worlds, batch_sizes, (False, True))
        for world_size, batch_size, drop_last in cases:
            where = f"{size} samples, {world_size} ranks, batches of {batch_size}, drop_last={drop_last}"
            shares = [
                list(sampler_of(order, World(rank, world_size), batch_size, drop_last)) for rank in range(world_size)
            ]
            check_counts(order, itertools.chain(*shares), 0, world_size, drop_last, where)
            epochs, indices = epochs + 1, indices + sum(map(len, shares))
            global_batch = world_size * batch_size
            full = size // global_batch
            for step in sorted({1, full // 2, full} & set(range(1, full + 1))):
                position = step * global_batch
                left = size - position
                others = [each for each in worlds if each != world_size and handed_out(left, each, drop_last)]
                if not others or not handed_out(left, world_size, drop_last):
                    continue
                another = generator.choice(others)
                saver = sampler_of(order, World(generator.randrange(world_size), world_size), batch_size, drop_last)
                deque(itertools.islice(saver, step * batch_size), maxlen=0)
                state = saver.state_dict()
                rest = [
                    list(sampler_of(order, World(rank, another), batch_size, drop_last, state))
                    for rank in range(another)
                ]
                parts = [share[: step * batch_size] for share in shares] + rest
                then = f"{where}, cut at {position} and continued on {another} ranks"
                check_counts(order, itertools.chain(*parts), position, another, drop_last, then)
                resumed, indices = resumed + 1, indices + sum(map(len, parts))
    return {
        "sizes": largest_size, "world_sizes": largest_world, "batch_sizes": batch_sizes,
        "epochs": epochs, "resumed": resumed, "indices": indices,
    }  # fmt: skip


def check_counts(
    order: Order, indices: Iterator[int], position: int, world_size: int, drop_last: bool, where: str
) -> None:
    """That these are all up to a position, and what so many ranks get of the rest, each as often as it should come."""
    count = position + handed_out(order.size - position, world_size, drop_last)
    same = sorted(indices) == sorted(expected(order, 0, count))
    require(same, where, "not every sample comes as often as the tail says")


# ----------------------------------------------------------------------------------------------------
# The page


def page(report: dict[str, Any]) -> str:
    """What was measured and checked, as Markdown."""
    facts, cost, coverage = report["environment"], report["cost"], report["coverage"]
    costs = {(case["size"], case["world_size"]): case for case in cost["per_index"]}
    firsts = {(case["size"], case["progress"]): case["milliseconds"] for case in cost["first_index"]}
    sizes = sorted({size for size, _ in costs})
    nanoseconds = [float(np.median(costs[size, 1]["nanoseconds"])) for size in sizes]
    milliseconds = [float(np.median(values)) for values in firsts.values()]
    model = f", {facts['processor']}" if facts.get("processor") else ""
    lines = [
        f"An index takes {min(nanoseconds):.0f} to {max(nanoseconds):.0f} ns, and the first one "
        f"{min(milliseconds):.2f} to {max(milliseconds):.2f} ms, from {sizes[0]:,} to {sizes[-1]:,} samples.\n",
        f"{facts['date']}: Python {facts['python']}, torch {facts['torch']}, numpy {facts['numpy']}, midepoch "
        f"{facts['midepoch']}; {facts['machine']}{model}, {facts['cores']} cores, {facts['memory_gibibytes']} GiB of "
        "memory",
        f"\nShuffled, {cost['indices']:,} indices in each of {len(costs[sizes[0], 1]['nanoseconds'])} "
        f"alternated rounds, batches of {BATCH_SIZE}. Medians, in brackets the quartiles. Memory is what Python and "
        f"numpy held at most, over a sampler of {SMALL:,} samples.",
        "\n| samples | ns an index | first index at 0 %, ms | at 90 %, ms | memory, KiB more |\n|---|---|---|---|---|",
    ]
    for size in sizes:
        first, late = (spread(firsts[size, progress], 2) for progress in (0.0, 0.9))
        case = costs[size, 1]
        lines.append(f"| {size:,} | {spread(case['nanoseconds'], 0)} | {first} | {late} | {case['kibibytes']:.0f} |")
    lines.append(f"\nOne rank of many, at {sizes[-1]:,} samples:\n")
    lines.append("| world size | ns an index | memory, KiB more |\n|---|---|---|")
    for world_size in sorted(world_size for size, world_size in costs if size == sizes[-1]):
        case = costs[sizes[-1], world_size]
        lines.append(f"| {world_size:,} | {spread(case['nanoseconds'], 0)} | {case['kibibytes']:.0f} |")
    large, small = coverage["windows"], coverage["small"]
    *batch_sizes, last = map(str, small["batch_sizes"])
    lines.append(
        f"\nAt {large['size']:,} samples and {large['ranks']:,} ranks, {large['windows']} windows of "
        f"{STEPS} steps of {BATCH_SIZE} were checked, among them the beginning and the end, padded and dropped. In "
        f"each window, the ranks together got exactly the expected stretch of the order. The {large['indices']:,} "
        "indices were distinct within each window, and the inverse led each back to its position."
    )
    lines.append(
        f"\nFor every size up to {small['sizes']}, every world size up to {small['world_sizes']}, batch sizes "
        f"{', '.join(batch_sizes)} and {last}, and both tails: {small['epochs']:,} whole epochs, and "
        f"{small['resumed']:,} cut and continued on another world size. Each gave every sample exactly once, except "
        "for samples that the tail repeats or drops."
    )
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "midepoch": importlib.metadata.version("midepoch"),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gibibytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    numbers: list[tuple[str, int, str]] = [
        ("--rounds", 9, "of the measurements of cost"),
        ("--indices", 500_000, "in each"),
        ("--ranks", WORLD_SIZES[-1], "of the windows whose coverage is checked"),
        ("--windows", 4, "at random places"),
        ("--largest-size", 300, "of which all epochs are checked"),
        ("--largest-world", 20, "of these"),
    ]
    for name, default, meaning in numbers:
        parser.add_argument(name, type=int, default=default, help=f"{meaning} (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report = {
        "environment": environment(),
        "cost": measure_cost(chosen.rounds, chosen.indices),
        "coverage": {
            "windows": check_windows(SIZES[-1], chosen.ranks, chosen.windows),
            "small": check_small(chosen.largest_size, chosen.largest_world),
        },
    }
    print(page(report))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
        if (index := chosen.json.with_name("index.md")).exists():
            index.write_text(replaced(index, "scale", f"{page(report)}\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
