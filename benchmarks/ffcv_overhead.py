"""What wrapping an FFCV Loader costs, and what a resume costs.

Run ``python benchmarks/ffcv_overhead.py``. Whole epochs of the bare and of the wrapped Loader, alternated in one run,
after one epoch of each in which they compile; reported are medians, and geometric means of the rounds' ratios, with the
interval that holds the true one in 95 of 100 runs. Prints Markdown; docs/benchmarks/index.md has its figures.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numba
import numpy as np
import torch
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import (
    CenterCropRGBImageDecoder,
    IntDecoder,
    RandomResizedCropRGBImageDecoder,
    SimpleRGBImageDecoder,
)
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import Cutout, RandomHorizontalFlip, RandomTranslate, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from measuring import between, machine

import midepoch


class Images:
    """Smooth images, as JPEG likes them: of a side, or of sides from 0.7 to 1.3 times it."""

    def __init__(self, size: int, side: int, varied: bool) -> None:
        self.size, self.side, self.varied = size, side, varied

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        generator = np.random.default_rng(index)
        scale = generator.uniform(0.7, 1.3, 2) if self.varied else (1, 1)
        coarse = generator.integers(0, 256, (16, 16, 3)).astype(np.uint8)
        sides = (int(self.side * scale[0]), int(self.side * scale[1]))
        return cv2.resize(coarse, sides, interpolation=cv2.INTER_CUBIC), index


def write(path: str, kind: str) -> None:
    images = Images(1024, 256, True) if kind == "jpeg" else Images(RAW, 32, False)
    field = RGBImageField(write_mode="jpg" if kind == "jpeg" else "raw")
    DatasetWriter(path, {"image": field, "label": IntField()}, num_workers=2).from_indexed_dataset(images)


RAW = 50_000  # as many as CIFAR-10 has

CASES: dict[str, tuple[str, int, Callable[[], list[Any]]]] = {
    "JPEG to 224 px, random resized crop and flip": (
        "jpeg", 64, lambda: [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip()],
    ),
    "JPEG to 224 px, nothing random": ("jpeg", 64, lambda: [CenterCropRGBImageDecoder((224, 224), 0.875)]),
    "raw 32 px, flip, translate and cutout": (
        "raw", 512, lambda: [SimpleRGBImageDecoder(), RandomHorizontalFlip(), RandomTranslate(2), Cutout(8)],
    ),
    "raw 32 px, nothing random": ("raw", 512, lambda: [SimpleRGBImageDecoder()]),
}  # fmt: skip


def make(path: str, batch_size: int, images: list[Any], workers: int) -> Any:
    pipelines = {"image": [*images, ToTensor(), ToTorchImage()], "label": [IntDecoder(), ToTensor()]}
    return Loader(
        path, batch_size, num_workers=workers, order=OrderOption.RANDOM, seed=0, pipelines=pipelines, drop_last=False
    )


def milliseconds(loader: Any) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return (time.perf_counter() - start) * 1e3


def overhead(files: dict[str, str], rounds: int, only: str) -> None:
    print("| pipeline | workers | bare, ms an epoch | wrapped | ratio (95 %) | bare to itself |")
    print("|---|---|---|---|---|---|")
    for name, (kind, batch_size, images) in CASES.items():
        if only not in name:
            continue
        for workers in (1, 2):
            loaders = {
                "bare": make(files[kind], batch_size, images(), workers),
                "wrapped": midepoch.wrap(make(files[kind], batch_size, images(), workers)),
                "again": make(files[kind], batch_size, images(), workers),
            }
            times: dict[str, list[float]] = {each: [] for each in loaders}
            count = rounds if kind == "jpeg" else 3 * rounds
            for turn in range(count + 1):
                # None comes twice running: it would find its memory in the processor's caches.
                for each in ("bare", "wrapped", "again") if turn % 2 else ("bare", "again", "wrapped"):
                    taken = milliseconds(loaders[each])
                    if turn:  # in the first they compile
                        times[each].append(taken)
            base = [math.sqrt(a * b) for a, b in zip(times["bare"], times["again"], strict=True)]
            bare, wrapped = (statistics.median(times[each]) for each in ("bare", "wrapped"))
            ratios = (
                between([mine / theirs for mine, theirs in zip(times["wrapped"], base, strict=True)]),
                between([mine / theirs for mine, theirs in zip(times["again"], times["bare"], strict=True)]),
            )
            print(f"| {name} | {workers} | {bare:.0f} | {wrapped:.0f} | {ratios[0]} | {ratios[1]} |", flush=True)


def resume(path: str, rounds: int) -> None:
    name, progress = "raw 32 px, flip, translate and cutout", (0.0, 0.9)
    _, batch_size, images = CASES[name]
    loader = midepoch.wrap(make(path, batch_size, images(), 1))
    milliseconds(loader)
    times: dict[float, list[float]] = {each: [] for each in progress}
    for turn in range(rounds):
        for each in progress if turn % 2 else progress[::-1]:
            loader.seek(position=int(RAW * each) // batch_size * batch_size)
            start = time.perf_counter()
            next(iter(loader))
            times[each].append((time.perf_counter() - start) * 1e3)
    ratios = [late / early for early, late in zip(times[0.0], times[0.9], strict=True)]
    early, late = (statistics.median(values) for values in times.values())
    print(
        f"\nFirst batch ({name}): {early:.2f} ms at 0 % of an epoch, {late:.2f} ms at 90 %, ratio "
        f"{statistics.median(ratios):.2f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--write", nargs=2, metavar=("KIND", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write[1], arguments.write[0])
        return
    print(
        f"Python {platform.python_version()}, FFCV 1.0.2, numba {numba.__version__}, numpy {np.__version__}, torch "
        f"{torch.__version__}, {platform.machine()}, {machine()}; medians of {arguments.rounds} alternated "
        "rounds\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: str(Path(folder) / f"{kind}.beton") for kind in ("jpeg", "raw")}
        for kind, path in files.items():  # FFCV's writer forks
            subprocess.run([sys.executable, __file__, "--write", kind, path], check=True, stderr=subprocess.DEVNULL)
        overhead(files, arguments.rounds, arguments.only)
        resume(files["raw"], arguments.rounds)


if __name__ == "__main__":
    main()
