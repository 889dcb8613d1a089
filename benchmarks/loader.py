"""What wrapping a DataLoader costs: per batch, per sample, to the first batch after a resume, and in memory.

Run ``python benchmarks/loader.py``. Alternated rounds in one run; reported are medians, and the median of the rounds'
ratios to the plain loader with its interval. Prints Markdown; docs/benchmarks/index.md has its figures.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from measuring import Interval, median_between, processor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import midepoch
from midepoch.summary import summarize

BATCH_SIZE = 32


def microseconds_per_batch(batches: Iterable[Any]) -> float:
    start = time.perf_counter()
    count = sum(1 for _ in batches)
    return (time.perf_counter() - start) / count * 1e6


class Drawing(Dataset[int]):
    """Integers, each of which draws a random number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        random.random()
        return index


def plain(batches: int, batch_size: int, workers: int, draws: bool) -> DataLoader[int]:
    size = batches * batch_size
    return DataLoader(Drawing(size) if draws else range(size), batch_size, shuffle=True, num_workers=workers)  # type: ignore[arg-type]


def alternate(makers: dict[str, Callable[[], Iterable[Any]]], rounds: int) -> dict[str, list[float]]:
    """Microseconds a batch, of each maker in each round; every other round runs backwards."""
    times: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(rounds):
        for name in list(makers)[:: 1 if turn % 2 else -1]:
            times[name].append(microseconds_per_batch(makers[name]()))
    return times


def between(times: list[float], base: list[float]) -> Interval:
    """The median of the rounds' ratios, and its interval, which assumes nothing of how times are spread."""
    return median_between([mine / theirs for mine, theirs in zip(times, base, strict=True)])


TURNS = 30  # for each round
BLOCK, WARM = 100, 10  # batches of one turn that are timed, and those before, which workers have read ahead
IDLE = 0.004  # seconds in which the other loaders' workers finish what they read ahead


def take_turns(makers: dict[str, Callable[[], Iterable[Any]]], turns: int) -> dict[str, list[float]]:
    """Microseconds a batch, of each maker in each turn. All are open at once, so a turn follows the others' at once.

    With worker processes, whole passes differ by more than what is to be measured: two processes and their parent
    share two cores, and are placed on them anew with every start.
    """
    iterators = {name: iter(make()) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(turns):
        for name in list(makers)[:: 1 if turn % 2 else -1]:
            batches = iterators[name]
            time.sleep(IDLE)
            for _ in range(WARM):
                next(batches)
            times[name].append(microseconds_per_batch(itertools.islice(batches, BLOCK)))
    return times


def beginnings(makers: dict[str, Callable[[], Iterable[Any]]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds to the first batch of a pass, of each maker in each round."""
    times: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(rounds):
        for name in list(makers)[:: 1 if turn % 2 else -1]:
            loader = makers[name]()
            start = time.perf_counter()
            batches = iter(loader)
            next(batches)
            times[name].append((time.perf_counter() - start) * 1e3)
            del batches
    return times


def overhead(rounds: int, batches: int) -> None:
    print("| batch size | workers | samples draw | plain, µs a batch | `randomness='none'` | streams |")
    print("|---|---|---|---|---|---|")
    said, ratios = [], []
    for draws in (False, True):
        extra = {}
        for batch_size, workers in ((BATCH_SIZE, 0), (1, 0), (BATCH_SIZE, 2)):

            turns = TURNS * rounds
            count = turns * (BLOCK + WARM) if workers else batches

            def make(
                count: int = count, batch_size: int = batch_size, workers: int = workers, draws: bool = draws
            ) -> DataLoader[int]:
                return plain(count, batch_size, workers, draws)

            makers: dict[str, Callable[[], Iterable[Any]]] = {
                "plain": make,
                "none": lambda make=make: midepoch.wrap(make(), randomness="none"),  # type: ignore[misc]
                "sample": lambda make=make: midepoch.wrap(make()),  # type: ignore[misc]
            }
            times = take_turns(makers, turns) if workers else alternate(makers, rounds)
            if workers and not draws:
                begun = {name: statistics.median(each) for name, each in beginnings(makers, rounds).items()}
            median = {name: statistics.median(values) for name, values in times.items()}
            extra[batch_size, workers] = median["sample"] - median["none"]
            ratios.append(between(times["sample"], times["plain"]).middle)
            print(
                f"| {batch_size} | {workers} | {'yes' if draws else 'no'} | {median['plain']:.1f} | "
                f"{median['none']:.1f}; {between(times['none'], times['plain'])} | "
                f"{median['sample']:.1f}; {between(times['sample'], times['plain'])} |"
            )
        each = (extra[BATCH_SIZE, 0] - extra[1, 0]) / (BATCH_SIZE - 1)
        said.append(f"{each:.1f} µs a sample and {extra[1, 0] - each:.1f} µs a batch")
    print(f"\nStreams: {said[1]} where samples draw random numbers, {said[0]} where none does.")
    print(f"\nThe worst case takes {max(ratios):.1f} times as long as the plain DataLoader.")
    print(
        f"\nWith workers, all three are open at once, and read {TURNS * rounds} turns of {BLOCK} batches. Starting two "
        f"workers and reading the first batch takes {begun['plain']:.0f} ms, {begun['none']:.0f} without streams and "
        f"{begun['sample']:.0f} with them."
    )


def resume(rounds: int) -> None:
    print("\n| samples | first batch at 0 %, ms | at 90 %, ms | ratio (95 %) | 0 % once more |\n|---|---|---|---|---|")
    for size in (10**5, 10**6, 10**7, 10**8, 10**9):
        times: dict[str, list[float]] = {"0": [], "0.9": [], "0.0": []}
        for turn in range(rounds):
            for progress in list(times)[:: 1 if turn % 2 else -1]:
                times[progress].append(first_batch(size, float(progress)))
        print(
            f"| {size:,} | {statistics.median(times['0']):.2f} | {statistics.median(times['0.9']):.2f} | "
            f"{between(times['0.9'], times['0'])} | {between(times['0.0'], times['0'])} |"
        )


def first_batch(size: int, progress: float) -> float:
    """Milliseconds from nothing to the first batch of a loader that goes on there."""
    loader = midepoch.wrap(DataLoader(range(size), BATCH_SIZE, shuffle=True), seed=0)  # type: ignore[arg-type]
    loader.seek(position=int(size * progress) // BATCH_SIZE * BATCH_SIZE)
    state = loader.state_dict()
    start = time.perf_counter()
    loader = midepoch.wrap(DataLoader(range(size), BATCH_SIZE, shuffle=True), seed=0)  # type: ignore[arg-type]
    loader.load_state_dict(state)
    next(iter(loader))
    return (time.perf_counter() - start) * 1e3


_MEMORY = r"""
import re, sys
from pathlib import Path
from torch.utils.data import DataLoader
import midepoch
# Not getrusage: its maximum begins with that of the process that started this one.
def peak(): return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
size = int(sys.argv[1])
small = midepoch.wrap(DataLoader(range(1000), 32, shuffle=True), seed=0)
for _ in zip(range(20), small): pass
before = peak()
loader = midepoch.wrap(DataLoader(range(size), 32, shuffle=True), seed=0)
loader.seek(position=size // 2)
for _ in zip(range(2000), loader): pass
print(peak() - before)
"""


def memory() -> None:
    run = subprocess.run([sys.executable, "-c", _MEMORY, str(10**9)], capture_output=True, text=True, check=True)
    print(f"\nMemory: at 1,000,000,000 samples a loader takes {float(run.stdout):.1f} MiB more than at 1,000.")


def state() -> None:
    loader = midepoch.wrap(DataLoader(range(10**9), BATCH_SIZE, shuffle=True), seed=0)  # type: ignore[arg-type]
    next(iter(loader))
    micro = min(timeit.repeat(loader.state_dict, number=2000, repeat=7)) / 2000 * 1e6
    print(
        f"\nState: `state_dict()` takes {micro:.1f} µs and gives {len(json.dumps(loader.state_dict()))} bytes of JSON."
    )


class Transform:
    """As one of a pipeline: numbers, small containers, a function."""

    def __init__(self, number: int) -> None:
        self.p, self.size, self.mean, self.name = 0.5, (224, 224), [0.1, 0.2, 0.3], f"transform {number}"
        self.inner = functools.partial(pow, exp=number)


class Files:
    """100,000 paths with their labels, and 20 transforms."""

    def __init__(self) -> None:
        self.samples = [(f"/data/{number % 1000}/{number}.jpg", number % 1000) for number in range(100_000)]
        self.transforms = [Transform(number) for number in range(20)]


def summary(rounds: int) -> None:
    """What a look at the dataset takes, once a pass and in each state."""
    def took(dataset: Any) -> float:
        return min(timeit.repeat(lambda: summarize(dataset=dataset), number=1, repeat=100 * rounds)) * 1e3

    ours, worst = took(Files()), took([[Transform(number) for number in range(64)] for _ in range(64)])
    print(
        f"\nA look at what the loop has changed takes {ours:.2f} ms for a dataset of 100,000 paths and 20 "
        f"transforms, and {worst:.2f} ms for one of 4,096 objects, most of which are left out."
    )


def nothing(batch: Any) -> Any:
    """A function that draws no random numbers: the work of `then=` itself is left."""
    return batch


_FIRST = 2  # batches that begin a pass, or try the function

DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(()),
}


def one_number(*generators: str) -> Callable[[Any], Any]:
    """A function that draws one random number from each generator."""
    draws = [DRAWS[generator] for generator in generators]

    def function(batch: Any) -> Any:
        for draw in draws:
            draw()
        return batch

    return function


def generators_alone() -> dict[str, float]:
    """What cannot be saved, in microseconds: seeding a generator, its first number, and giving back the caller's."""
    python, of_torch, numpy = random.Random(0), torch.Generator(), np.random.RandomState(0)
    state, state_of_torch, bits = python.getstate(), of_torch.get_state(), np.random.get_bit_generator()

    def in_python() -> None:
        python.seed(1 << 63)
        python.random()
        python.setstate(state)

    def in_numpy() -> None:
        numpy.seed(1 << 31)
        numpy.random_sample()
        np.random.set_bit_generator(bits)

    def in_torch() -> None:
        of_torch.manual_seed(1 << 62)
        torch.rand((), generator=of_torch)
        of_torch.set_state(state_of_torch)

    def took(call: Callable[[], object]) -> float:
        return min(timeit.repeat(call, number=200, repeat=800)) / 200 * 1e6

    number: dict[str, Callable[[], object]] = {
        "python": python.random,
        "numpy": numpy.random_sample,
        "torch": lambda: torch.rand((), generator=of_torch),
    }
    whole: dict[str, Callable[[], object]] = {"python": in_python, "numpy": in_numpy, "torch": in_torch}
    return {name: took(whole[name]) - took(number[name]) for name in whole}


def microseconds_of_each(batches: Iterable[Any]) -> Any:
    """Of every batch by itself."""
    clock, times = time.perf_counter, [time.perf_counter()]
    for _ in batches:
        times.append(clock())
    return np.diff(times) * 1e6


def fastest_of_each(makers: dict[str, Callable[[], Iterable[Any]]], rounds: int, batches: int) -> dict[str, Any]:
    """Microseconds of every batch in the fastest of the rounds, of each maker."""
    times = {name: np.full(batches, np.inf) for name in makers}
    for turn in range(rounds):
        for name in list(makers)[:: 1 if turn % 2 else -1]:
            times[name] = np.minimum(times[name], microseconds_of_each(makers[name]()))
    return times


class Images(Dataset[Any]):
    """Small images in memory, with their labels, half of them flipped; with torch's numbers they are cropped too.

    Args:
        draws: from which generator: "python", "numpy" or "torch".
        seeds: the generator is seeded for each image, by the call that takes least.
    """

    def __init__(self, draws: str, seeds: bool) -> None:
        self.images = torch.randint(0, 256, (100 * 64, 3, 32, 32), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (len(self.images),)).tolist()
        self.draw, self.crops = DRAWS[draws], draws == "torch"
        python: Any = super(random.Random, random._inst)
        numpy: Any = np.random.mtrand._rand
        seeding = {"python": python.seed, "numpy": numpy.seed, "torch": torch.default_generator.manual_seed}
        self.seed: Callable[[int], object] | None = seeding[draws] if seeds else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        if self.seed is not None:
            self.seed(index)
        image = self.images[index]
        if self.crops:
            top, left = torch.randint(0, 5, (2,)).tolist()
            image = image[:, top : top + 28, left : left + 28]
        return image.flip(-1) if self.draw() < 0.5 else image, self.labels[index]  # type: ignore[operator]


def the_same(dataset: Images) -> DataLoader[Any]:
    """In each round, so that no round has the fastest of a batch by having flipped less of it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return DataLoader(dataset, 64, shuffle=True)


def images(rounds: int) -> None:
    """What seeding costs, beside what it cannot cost less than: the bare calls, made in the dataset itself."""
    print(f"\nImages in memory, each of 100 batches of 64 in the fastest of {4 * rounds} rounds:\n")
    print("| | plain, µs a batch | wrapped / plain | plain, with the bare call for each image / plain |")
    print("|---|---|---|---|")
    for draws in DRAWS:
        dataset, seeded = Images(draws, False), Images(draws, True)
        makers: dict[str, Callable[[], Iterable[Any]]] = {
            "plain": lambda dataset=dataset: the_same(dataset),  # type: ignore[misc]
            "wrapped": lambda dataset=dataset: midepoch.wrap(the_same(dataset)),  # type: ignore[misc]
            "bare": lambda seeded=seeded: the_same(seeded),  # type: ignore[misc]
        }
        times = fastest_of_each(makers, 4 * rounds, 100)
        took = {name: float(each[_FIRST:].mean()) for name, each in times.items()}
        wrapped, bare = (took[name] / took["plain"] for name in ("wrapped", "bare"))
        name = "cropped and flipped" if draws == "torch" else "flipped"
        print(f"| {name} by {draws} | {took['plain']:.0f} | {wrapped:.3f} | {bare:.3f} |")


def then(rounds: int, batches: int) -> None:
    """What `then=` costs, over calling the same function in the loop."""
    inside = functools.partial(plain, batches, 4, 0, False)

    def as_then(function: Callable[[Any], Any]) -> Iterable[Any]:
        return midepoch.wrap(plain(batches, 4, 0, False), then=function)

    makers: dict[str, Callable[[], Iterable[Any]]] = {
        "nothing, in the loop": lambda: in_the_loop(inside, nothing),
        "nothing": lambda: as_then(nothing),
    }
    for name, drawn in [*((each, [each]) for each in DRAWS), ("all", list(DRAWS))]:
        makers[f"{name}, in the loop"] = functools.partial(in_the_loop, inside, one_number(*drawn))
        makers[name] = functools.partial(as_then, one_number(*drawn))
    times = fastest_of_each(makers, rounds, batches)

    def more(name: str, base: str) -> float:
        return float(times[name][_FIRST:].mean() - times[base][_FIRST:].mean())

    same = "the same function in the loop"
    rows = [
        ("nothing", "nothing", same, "nothing, in the loop"),
        *((f"a number from {name}'s generator", name, same, f"{name}, in the loop") for name in DRAWS),
        ("a number from each", "all", "a loop that draws nothing", "nothing, in the loop"),
    ]
    print(f"\n`then=`, each of {batches} batches in the fastest of {rounds} rounds:\n")
    print("| the function draws | µs a batch more than | |\n|---|---|---|")
    for draws, name, than, base in rows:
        print(f"| {draws} | {than} | {more(name, base):.1f} |")
    *others, last = (f"{took:.1f} µs for {name}'s generator" for name, took in generators_alone().items())
    print(f"\nBesides the draw, seeding and restoring takes {', '.join(others)} and {last}.")


class Around:
    """Passes the batches of a DataLoader on, and calls a function for each."""

    def __init__(self, loader: Any, function: Callable[[Any], Any]) -> None:
        self.loader, self.function = loader, function

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self.function(batch)


class AroundAhead(Around):
    """The same, one batch ahead."""

    def __iter__(self) -> Iterator[Any]:
        ahead = None
        for batch in self.loader:
            following = self.function(batch)
            if ahead is not None:
                yield ahead
            ahead = following
        yield ahead


def in_the_loop(inside: Callable[[], Any], function: Callable[[Any], Any]) -> Iterable[Any]:
    return (function(batch) for batch in midepoch.wrap(inside()))


def wrapped_around(kind: type[Around], inside: Callable[[], Any], function: Callable[[Any], Any]) -> Iterable[Any]:
    return midepoch.wrap(kind(inside(), function), inside="loader")


def wrappers(rounds: int, batches: int) -> None:
    """What an object around a DataLoader costs, over the DataLoader inside; the numbers that it draws included."""
    functions = {"nothing": nothing} | {name: one_number(name) for name in DRAWS} | {"all": one_number(*DRAWS)}
    inside = functools.partial(plain, batches, 4, 0, False)
    makers: dict[str, Callable[[], Iterable[Any]]] = {"inside": lambda: in_the_loop(inside, nothing)}
    for name, function in functions.items():
        makers[name] = functools.partial(wrapped_around, Around, inside, function)
        makers[f"{name}, ahead"] = functools.partial(wrapped_around, AroundAhead, inside, function)
    times = fastest_of_each(makers, rounds, batches)

    def more(name: str) -> str:
        return f"{float(times[name][_FIRST:].mean() - times['inside'][_FIRST:].mean()):.1f}"

    print(
        f"\nObjects around a DataLoader, with inside=: {more('nothing')} µs a batch more than the DataLoader "
        f"inside, {more('nothing, ahead')} one batch ahead; where they draw a number for each batch, "
        + ", ".join(f"{more(name)} from {name}'s generator" for name in DRAWS)
        + f", {more('all')} from all three, {more('all, ahead')} one batch ahead. (Each of {batches} batches in the "
        + f"fastest of {rounds} rounds.)"
    )


def sampler(rounds: int) -> None:
    size = 10**6
    makers: dict[str, Callable[[], Iterable[Any]]] = {
        "torch": lambda: BatchSampler(RandomSampler(range(size)), BATCH_SIZE, False),
        "midepoch": lambda: BatchSampler(midepoch.ResumableSampler(size), BATCH_SIZE, False),
    }
    times = alternate(makers, rounds)
    theirs, ours = (statistics.median(times[name]) / BATCH_SIZE * 1e3 for name in ("torch", "midepoch"))
    print(
        f"\nSampler: `BatchSampler(RandomSampler)` {theirs:.0f} ns an index, `BatchSampler(ResumableSampler)` "
        f"{ours:.0f} ns, ratio {between(times['midepoch'], times['torch'])}."
    )


def boring(rounds: int, batches: int) -> list[dict[str, Any]]:
    """An epoch of Lightning's BoringModel: batches of one, a linear layer; the worst case that was published.

    Microseconds a step of each loader, and the interval of its ratio to the plain DataLoader.
    """
    import logging
    import warnings

    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    def epoch(loader: Any) -> float:
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        model = BoringModel()
        start = time.perf_counter()
        trainer.fit(model, loader)
        return time.perf_counter() - start

    dataset = RandomDataset(32, batches)
    makers: dict[str, Callable[[], Any]] = {
        "plain DataLoader": lambda: DataLoader(dataset),
        "midepoch without streams": lambda: midepoch.wrap(DataLoader(dataset), randomness="none"),
        "midepoch": lambda: midepoch.wrap(DataLoader(dataset)),
        "torchdata StatefulDataLoader": lambda: StatefulDataLoader(dataset),
        "plain DataLoader once more": lambda: DataLoader(dataset),
    }
    for make in makers.values():
        epoch(make())
    times: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(rounds):
        for name in list(makers)[:: 1 if turn % 2 else -1]:
            times[name].append(epoch(makers[name]()) / batches * 1e6)
    found = []
    for name, values in times.items():
        middle, low, high = between(values, times["plain DataLoader"])
        row = {"peer": name, "microseconds": statistics.median(values), "ratio": middle, "low": low, "high": high}
        found.append(row | {"rounds": rounds, "steps": batches})
    return found


def boring_table(rows: list[dict[str, Any]]) -> str:
    lines = [f"Lightning's BoringModel, batch size 1, {rows[0]['rounds']} rounds of {rows[0]['steps']} steps:", ""]
    lines += ["| loader | µs a step | ratio to the plain one (95 %) |", "|---|---|---|"]
    for row in rows:
        ratio = "–" if row is rows[0] else Interval(row["ratio"], row["low"], row["high"])
        lines.append(f"| {row['peer']} | {row['microseconds']:.0f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=3000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gigabytes = resource.getpagesize() * _pages() / 2**30
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, {platform.machine()} "
        f"({processor()}), {gigabytes:.0f} GiB of memory; medians of {arguments.rounds} alternated rounds\n"
    )
    overhead(arguments.rounds, arguments.batches)
    images(arguments.rounds)
    resume(20 * arguments.rounds)
    state()
    summary(arguments.rounds)
    memory()
    sampler(arguments.rounds)
    then(arguments.rounds, arguments.batches)
    wrappers(arguments.rounds, arguments.batches)


def _pages() -> int:
    import os

    return os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    main()
