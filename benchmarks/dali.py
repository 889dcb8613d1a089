"""What wrapping a DALI iterator costs, in both modes: throughput, the first batch after a resume, the size of a state.

Run ``python benchmarks/dali.py``. Alternated rounds in one run; reported are medians, and the median of the rounds'
ratios. Prints Markdown; docs/benchmarks/index.md has its figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import nvidia.dali
import torch
from measuring import between, machine
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from PIL import Image

import midepoch
from midepoch.adapters import dali
from midepoch.adapters.dali.feed import feed_of

BATCH_SIZE = 32
SIDE = 256


def write_images(folder: Path, count: int) -> Path:
    generator = np.random.default_rng(0)
    for number in range(count):
        coarse = generator.integers(0, 255, (24, 32, 3), np.uint8)
        path = folder / f"class{number % 8}" / f"{number:05}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(coarse).resize((SIDE + 64, SIDE)).save(path, quality=90)
    return folder


def repeat(folder: Path, count: int) -> None:
    """Give the images other names too, until there are `count`: links, so that they take no space."""
    images = sorted(folder.rglob("*.jpg"))
    for number in range(len(images), count):
        image = images[number % len(images)]
        os.link(image, image.with_name(f"{number:06}.jpg"))


def write_many(folder: Path, count: int) -> Path:
    """`count` names of one small image: links, so that they take little space."""
    for number in range(count):
        path = folder / f"class{number // 1000:03}" / f"{number:06}.jpg"
        if number % 1000 == 0:
            path.parent.mkdir()
            first = path
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
        else:
            os.link(first, path)
    return folder


def augmented(images: Any, mirror: Any) -> Any:
    images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
    return fn.crop_mirror_normalize(images, crop=(224, 224), std=[255.0, 255.0, 255.0], mirror=mirror)


@pipeline_def(batch_size=BATCH_SIZE, num_threads=2, device_id=dali.device_id(), seed=1)
def theirs(root: str, random: bool) -> Any:
    encoded, labels = fn.readers.file(file_root=root, random_shuffle=True, name="Reader")
    if not random:
        return augmented(fn.decoders.image(encoded), 0), labels
    return augmented(fn.decoders.image_random_crop(encoded), fn.random.coin_flip()), labels


@pipeline_def(batch_size=BATCH_SIZE, num_threads=2, device_id=dali.device_id(), seed=1)
def ours(root: str, random: bool) -> Any:
    encoded, labels = dali.readers.file(root, random_shuffle=True)
    if not random:
        return augmented(fn.decoders.image(encoded), 0), labels
    images = fn.decoders.image_slice(encoded, *dali.random.crop_window(encoded), axis_names="HW")
    return augmented(images, dali.random.coin_flip()), labels


@pipeline_def(batch_size=BATCH_SIZE, num_threads=2, device_id=dali.device_id(), seed=1)
def undecoded(root: str, fed: bool) -> Any:
    if fed:
        encoded, labels = dali.readers.file(root, random_shuffle=True)
    else:
        encoded, labels = fn.readers.file(file_root=root, random_shuffle=True, name="Reader")
    return encoded, labels


def bare(root: str, random: bool = True) -> Any:
    return DALIGenericIterator([theirs(root, random)], ["data", "label"], reader_name="Reader", auto_reset=True)


IDLE = 0.15  # seconds in which a loader's threads finish what they have read ahead
WARM, TIMED = 4, 20  # batches of one turn: before the clock runs, and while it does
TURNS = 3  # of each loader, before all are made again
PAIRS = 20  # of turns of one pipeline
GRAPHS = {True: "random crop, resize, mirror", False: "decode, resize"}


def pace(batches: Iterator[Any]) -> tuple[float, float]:
    """Milliseconds a batch takes in the steady state, by the clock, and of all the process's threads."""
    time.sleep(IDLE)
    for _ in range(WARM):
        next(batches)
    start, worked = time.perf_counter(), time.process_time()
    for _ in range(TIMED):
        next(batches)
    return (time.perf_counter() - start) / TIMED * 1e3, (time.process_time() - worked) / TIMED * 1e3


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def fed(root: str, random: bool = True) -> Any:
    return midepoch.wrap(DALIGenericIterator([ours(root, random)], ["data", "label"]))


def throughput(root: str, rounds: int, random: bool) -> None:
    """In each round all loaders are made again, in another order, and take short turns.

    New ones, since a pipeline with luckier memory than others stays faster for as long as it lives; short turns, since
    the machine is not the same from one second to the next. Ratios are to the geometric mean of two bare iterators.
    """
    makers: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare(root, random),
        "bare once more": lambda: bare(root, random),
        "native": lambda: midepoch.wrap(bare(root, random)),
        "fed by midepoch": lambda: fed(root, random),
    }
    paces: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    shuffled = Random(0)
    for _ in range(rounds):
        loaders = {name: makers[name]() for name in shuffled.sample(list(makers), len(makers))}
        batches = {name: endless(loader) for name, loader in loaders.items()}
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
        for turn in range(TURNS + 1):
            for name in shuffled.sample(list(makers), len(makers)):
                taken = pace(batches[name])
                if turn:  # the first one is of another speed
                    turns[name].append(taken)
        for name, values in turns.items():
            paces[name].append((statistics.mean(v[0] for v in values), statistics.mean(v[1] for v in values)))
        for name in ("native", "fed by midepoch"):
            batches[name].close()  # type: ignore[attr-defined]
            loaders[name].close()
    print(f"\nImages a second, {SIDE} x {SIDE + 64} JPEG, {GRAPHS[random]}, batches of {BATCH_SIZE}:\n")
    print("| | images a second | ratio to the mean of both bare runs (95 %) | the same, by processor time (95 %) |")
    print("|---|---|---|---|")
    bares = list(zip(paces["bare"], paces["bare once more"], strict=True))
    for name, values in paces.items():
        rate = BATCH_SIZE * 1e3 / statistics.median(value[0] for value in values)
        ratios = [
            between([math.sqrt(a[clock] * b[clock]) / v[clock] for (a, b), v in zip(bares, values, strict=True)])
            for clock in (0, 1)
        ]
        print(f"| {name} | {rate:.0f} | {ratios[0]} | {ratios[1]} |")
    sys.stdout.flush()


def inside(root: str, rounds: int, random: bool) -> None:
    """What native mode adds to the DALI iterator that it reads: turns through midepoch and past it, of one pipeline.

    How the memory of a pipeline happens to lie makes it faster or slower than another by more than midepoch's part, for
    as long as it lives. Here both turns have the same one. What DALI's checkpoints cost is in both.
    """
    ratios: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        loader = midepoch.wrap(bare(root, random))
        batches: Any = iter(loader)
        next(batches)
        live: Any = loader._progress.reading.session  # type: ignore[union-attr]
        iterator = live._live.iterator
        for turn in range(PAIRS + 1):
            order = (batches, iterator) if turn % 2 else (iterator, batches)
            taken = {id(each): pace(each) for each in order}
            if turn:  # the first one is of another speed
                for clock in (0, 1):
                    ratios[clock].append(taken[id(iterator)][clock] / taken[id(batches)][clock])
        loader.close()
    print(f"| {GRAPHS[random]} | {len(ratios[0])} | {between(ratios[0])} | {between(ratios[1])} |")
    sys.stdout.flush()


def first_batch(root: str, count: int, rounds: int) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "native": lambda: DALIGenericIterator([undecoded(root, False)], ["data", "label"], reader_name="Reader"),
        "fed by midepoch": lambda: DALIGenericIterator([undecoded(root, True)], ["data", "label"]),
    }
    print(f"\nFirst batch after a load, {count} files; the clock starts before the iterator is made:\n")
    print("| | at 0 %, ms | at 90 %, ms | ratio | state, bytes |\n|---|---|---|---|---|")
    for name, make in makers.items():
        loader = midepoch.wrap(make())
        start = loader.state_dict()
        for _ in zip(range(len(loader) * 9 // 10 + 1), loader, strict=False):
            pass  # only reading leads DALI's own reader there
        late = loader.state_dict()
        loader.close()
        times: dict[str, list[float]] = {"start": [], "late": []}
        for turn in range(rounds):
            for place in ("start", "late")[:: 1 if turn % 2 else -1]:
                gc.collect()  # the iterators of the turn before
                began = time.perf_counter()
                fresh = midepoch.wrap(make())
                fresh.load_state_dict(start if place == "start" else late)
                next(iter(fresh))
                times[place].append(time.perf_counter() - began)
                fresh.close()
        ratio = statistics.median(a / b for a, b in zip(times["late"], times["start"], strict=True))
        medians = [1000 * statistics.median(values) for values in times.values()]
        print(f"| {name} | {medians[0]:.1f} | {medians[1]:.1f} | {ratio:.2f} | {len(json.dumps(late))} |")


def bookkeeping(root: str, rounds: int) -> None:
    """The same as `throughput` where next to nothing is done for a batch, so that what wrapping adds shows."""
    loaders = {
        "bare": DALIGenericIterator([undecoded(root, False)], ["data", "label"], reader_name="Reader", auto_reset=True),
        "native": midepoch.wrap(
            DALIGenericIterator([undecoded(root, False)], ["data", "label"], reader_name="Reader", auto_reset=True)
        ),
        "fed by midepoch": midepoch.wrap(DALIGenericIterator([undecoded(root, True)], ["data", "label"])),
    }
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(rounds + 1):
        for name in list(loaders)[:: 1 if turn % 2 else -1]:
            loader: Any = loaders[name]
            began, count = time.perf_counter(), sum(1 for _ in loader)
            if turn:  # the first one finds the files
                times[name].append((time.perf_counter() - began) / count * 1e6)
    print("\nTiny files, not decoded:\n\n| | µs a batch | more than bare |\n|---|---|---|")
    for name, values in times.items():
        more = statistics.median(value - base for base, value in zip(times["bare"], values, strict=True))
        print(f"| {name} | {statistics.median(values):.0f} | {more:.0f} |")
    for name in ("native", "fed by midepoch"):
        loaders[name].close()


def states(root: str) -> None:
    print("\n| | `state_dict()`, µs | note kept for `in_flight`, µs a batch |\n|---|---|---|")
    loader = midepoch.wrap(bare(root))
    next(iter(loader))
    live: Any = loader._progress.reading.session  # type: ignore[union-attr]
    iterator = live._live.iterator
    for name, wrapped, note in (
        ("native", loader, iterator.checkpoints),
        ("fed by midepoch", fed(root), None),
    ):
        next(iter(wrapped)) if note is None else None
        costs = []
        for call in (wrapped.state_dict, note):
            if call is None:
                costs.append("-")
                continue
            began = time.perf_counter()
            for _ in range(500):
                call()
            costs.append(f"{(time.perf_counter() - began) / 500 * 1e6:.0f}")
        print(f"| {name} | {costs[0]} | {costs[1]} |")


def windows(root: str) -> None:
    """What choosing the random windows of a batch of 256 takes, of sizes that are known."""
    many = 256

    @pipeline_def(batch_size=many, num_threads=2, device_id=None)
    def pipeline() -> Any:
        encoded, _ = dali.readers.file(root, random_shuffle=True)
        return dali.random.crop_window(encoded)

    made = pipeline()
    for _ in midepoch.wrap(DALIGenericIterator([made], ["anchor", "shape"])):
        pass
    feed = feed_of(made)
    assert feed is not None and feed.schedule is not None
    reading, choosing = feed.sources
    feed.give(feed.schedule)
    taken = []
    for number in range(1000):
        batch = SimpleNamespace(iteration=number + 10)
        reading(batch)
        began = time.perf_counter()
        choosing(batch)
        taken.append((time.perf_counter() - began) * 1e6)
    print(f"the windows of {many} images: {statistics.median(taken):.0f} µs")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=31)
    arguments.add_argument("--images", type=int, default=2048)
    arguments.add_argument("--files", type=int, default=100_000)
    arguments.add_argument("--inside", type=int, metavar="ROUNDS", help="only what native mode adds to its iterator")
    arguments.add_argument("--windows", action="store_true", help="only what choosing random windows takes")
    options = arguments.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch {torch.__version__}, DALI "
        f"{nvidia.dali.__version__}, {machine()}, "
        f"{'a GPU' if torch.cuda.is_available() else 'no GPU'}"
        f"{'' if options.inside or options.windows else f'; medians of {options.rounds} alternated rounds'}.\n"
    )
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        root = str(write_images(Path(folder), options.images))
        if options.windows:
            windows(root)
            return
        if options.inside:
            repeat(Path(root), 2 * (PAIRS + 2) * (WARM + TIMED) * BATCH_SIZE)
            print("| | turns | through midepoch, to past it (95 %) | by processor time (95 %) |\n|---|---|---|---|")
            for random in (True, False):
                inside(root, options.inside, random)
            return
        for random in (True, False):
            throughput(root, options.rounds, random)
        states(root)
    with tempfile.TemporaryDirectory() as folder:
        many = str(write_many(Path(folder), options.files))
        bookkeeping(many, min(options.rounds, 5))
        first_batch(many, options.files, min(options.rounds, 21))


if __name__ == "__main__":
    main()
