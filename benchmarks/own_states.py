"""What midepoch adds to a batch of sources with a state of their own, and jax's DALI iterator beside itself.

Run ``python benchmarks/own_states.py``; ``--only jax`` or another word of a name runs a part. Added is the fastest of
many short rounds, less the fastest of the bare source's, since other processes only ever make a round slower. Sources
that `make wild` installs (Energon, jax) are measured where their folders are. Prints Markdown. Ends with 1 if a source
whose batches draw nothing is above two microseconds, or jax's iterator below 0.98 of itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import math
import platform
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
APART = [ROOT / ".venv" / "wild" / name for name in ("energon", "jax")]

import numpy as np
import torch
from measuring import between, machine
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from support import own_state_sources as own

PACKAGES = ("torch", "torchdata", "datasets", "grain", "litdata", "megatron-energon", "nvidia-dali-cuda120", "jax")
MANY = 1 << 20
BATCHES = 100  # of a round
UNSURE = 0.5  # µs; where two bare sources differ by more, two cannot be told


class Still(Dataset[int]):
    """Draws nothing."""

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> int:
        return index


class Drawing(Still):
    """Draws a number from each generator named."""

    def __init__(self, *generators: str) -> None:
        self.draws = [DRAWS[name] for name in generators]

    def __getitem__(self, index: int) -> int:
        for draw in self.draws:
            draw()
        return index


DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(()),
}


def energon() -> Any:
    import wild_backends

    return wild_backends.energon()


SOURCES: dict[str, Callable[[], Any]] = {
    "an object with the two methods": lambda: own.Stream(MANY),
    "DataLoader over a stream with a state": lambda: DataLoader(
        own.StreamDataset(own.Stream(MANY)), None, collate_fn=own.same
    ),
    "torchdata StatefulDataLoader": lambda: StatefulDataLoader(Still(), None, collate_fn=own.same),
    "the same over a stream with a state": lambda: StatefulDataLoader(
        own.StreamDataset(own.Stream(MANY)), None, collate_fn=own.same
    ),
    "Hugging Face IterableDataset": lambda: own.datasets_stream(size=3 * 20_000),
    "Grain DataLoader": lambda: own.grain_loader(size=MANY),
    "Grain IterDataset": lambda: own.grain_dataset(size=MANY),
    "Grain ElasticIterator": lambda: own.grain_elastic(size=6 * MANY),
    "LitData StreamingDataLoader": lambda: own.litdata_loader(size=30_000),
    "megatron-energon get_savable_loader": energon,
    **{
        f"torchdata StatefulDataLoader, draws from {name}'s generator": lambda name=name: StatefulDataLoader(  # type: ignore[misc]
            Drawing(name), None, collate_fn=own.same
        )
        for name in DRAWS
    },
    "torchdata StatefulDataLoader, draws from all three": lambda: StatefulDataLoader(
        Drawing(*DRAWS), None, collate_fn=own.same
    ),
}


class Added(NamedTuple):
    """Microseconds of a batch of the bare source, what wrapping adds, and by how much two bare ones differ."""

    bare: float
    more: float
    unsure: float


def added(make: Callable[[], Any], seconds: float) -> Added:
    """The fastest rounds of each."""
    # Two of each, since one may have luckier memory than another for as long as it lives.
    sources = [make(), midepoch.wrap(make(), seed=1), make(), midepoch.wrap(make(), seed=1)]
    passes = [_begun(source) for source in sources]
    best = [math.inf] * len(sources)
    gc.collect()
    gc.disable()  # what the process holds otherwise is looked through for nothing
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for number, source in enumerate(sources):
                try:
                    best[number] = min(best[number], _round(passes[number]))
                except StopIteration:
                    passes[number] = _begun(source)
    finally:
        gc.enable()
    micro = [each / BATCHES * 1e6 for each in best]
    bare, wrapped = min(micro[::2]), min(micro[1::2])
    return Added(bare, wrapped - bare, abs(micro[0] - micro[2]))


def _begun(source: Any) -> Iterator[Any]:
    """A pass after its first batches, in which it is begun and the source's state is tried."""
    batches: Iterator[Any] = iter(source)
    for _ in range(5):
        next(batches)
    return batches


def _round(batches: Iterator[Any]) -> float:
    take, clock = batches.__next__, time.perf_counter
    began = clock()
    for _ in range(BATCHES):
        take()
    return clock() - began


def overhead(names: list[str], seconds: float) -> bool:
    """Print what wrapping adds. Whether all that draws nothing stays below two microseconds, where that can be told."""
    print("| source | bare, µs a batch | midepoch adds, µs | two bare ones differ by |\n|---|---|---|---|")
    most = 0.0
    for name in names:
        if not _is_here(name):
            print(f"| {name} | not installed | - | - |")
            continue
        with contextlib.redirect_stdout(sys.stderr):  # packages say what they write
            found = added(SOURCES[name], seconds)
        print(f"| {name} | {found.bare:.2f} | {found.more:.2f} | {found.unsure:.2f} |", flush=True)
        if "draws" not in name and found.unsure <= UNSURE:
            most = max(most, found.more)
    print(f"\nAt most {most:.2f} µs where a batch draws nothing and two bare ones differ by {UNSURE} µs or less.")
    if any("draws" in name for name in names):
        alone = ", ".join(f"{took:.1f} µs for {name}'s" for name, took in alone_of().items())
        print(
            "Where it draws, each batch has a stream of its own. By themselves, seeding a generator and giving back "
            f"the caller's take {alone}."
        )
    return most <= 2.0


def _is_here(name: str) -> bool:
    needed = {"Hugging": "datasets", "Grain": "grain", "LitData": "litdata", "megatron-energon": "megatron.energon"}
    package = needed.get(name.split()[0])
    if package == "litdata" or package == "megatron.energon":
        import cpu_torchvision  # noqa: F401
    with contextlib.suppress(ModuleNotFoundError):
        return package is None or importlib.util.find_spec(package) is not None
    return False


def alone_of() -> dict[str, float]:
    """Microseconds that no program saves which gives a batch a stream of its own: by public calls, and nothing else."""
    import loader

    return loader.generators_alone()


# --- jax --------------------------------------------------------------------------------------------------------------


def jax_iterator(root: str) -> Any:
    """Decodes, crops and mirrors pictures, as benchmarks/dali.py does."""
    import dali
    from nvidia.dali import fn
    from nvidia.dali.plugin.jax import data_iterator

    def graph() -> Any:
        encoded, labels = fn.readers.file(file_root=root, random_shuffle=True, name="Reader", seed=1)
        pictures = fn.decoders.image_random_crop(encoded, seed=2)
        return dali.augmented(pictures, fn.random.coin_flip(seed=3)), labels

    made = data_iterator(graph, output_map=["data", "label"], reader_name="Reader", auto_reset=True)
    return made(batch_size=dali.BATCH_SIZE, num_threads=2, device_id=None)


def jax(rounds: int) -> bool:
    """Print how fast the wrapped iterator is, beside two bare ones. Whether it is at least 0.98 of them."""
    import dali

    makers: dict[str, Callable[[str], Any]] = {
        "bare": jax_iterator,
        "bare once more": jax_iterator,
        "wrapped": lambda root: midepoch.wrap(jax_iterator(root)),
    }
    paces: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    shuffled = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        root = str(dali.write_images(Path(folder), 512))
        for _ in range(rounds):
            made = {name: makers[name](root) for name in shuffled.sample(list(makers), len(makers))}
            batches = {name: dali.endless(each) for name, each in made.items()}
            turns: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
            for turn in range(dali.TURNS + 1):
                for name in shuffled.sample(list(makers), len(makers)):
                    taken = dali.pace(batches[name])
                    if turn:  # the first one is of another speed
                        turns[name].append(taken)
            for name, values in turns.items():
                paces[name].append((min(each[0] for each in values), min(each[1] for each in values)))
            batches["wrapped"].close()  # type: ignore[attr-defined]
            made["wrapped"].close()
    bares = list(zip(paces["bare"], paces["bare once more"], strict=True))
    print("\n| jax data_iterator | ms a batch | of the bare ones (95 %) | by processor time (95 %) |")
    print("|---|---|---|---|")
    enough = True
    for name, values in paces.items():
        ratios = [
            between([math.sqrt(a[clock] * b[clock]) / mine[clock] for (a, b), mine in zip(bares, values, strict=True)])
            for clock in (0, 1)
        ]
        print(f"| {name} | {min(value[0] for value in values):.1f} | {ratios[0]} | {ratios[1]} |")
        enough = name != "wrapped" or ratios[1].middle >= 0.98
    return enough


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="for a source")
    parser.add_argument("--jax-rounds", type=int, default=12, help="in each of which all iterators are made anew")
    parser.add_argument("--only", nargs="+", default=[], help="sources whose name has one of these words in it")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path += [str(folder) for folder in APART if folder.is_dir()]
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in PACKAGES
        if any(importlib.metadata.distributions(name=name))
    ]  # fmt: skip
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {machine()},", end=" ")
    print(f"{', '.join(versions)}\n")

    def asked(name: str) -> bool:
        return not options.only or any(word.lower() in name.lower() for word in options.only)

    names, kept = [name for name in SOURCES if asked(name)], True
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # Energon's data lie in the current one
        kept = overhead(names, options.seconds) if names else True
        if asked("jax data_iterator"):
            if importlib.util.find_spec("jax") is None:
                print("\njax is not installed: `make wild` does so.")
            else:
                kept = jax(options.jax_rounds) and kept
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
