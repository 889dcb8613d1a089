"""What the witness costs: the first batch of a pass with it and without, and a state.

Run ``python benchmarks/witness.py``. Datasets of several kinds, read in this process; alternated rounds; medians.
With ``--stored``, shards of webdataset (on disk, behind nginx, compressed) and Streaming's format, whose samples are
looked at as they are stored. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import midepoch

BATCH_SIZE = 32
torch.set_num_threads(1)  # the samples are what is measured, not how threads share two cores


class Made(Dataset[Any]):
    """Samples that a function makes of their index."""

    def __init__(self, make: Callable[[int], Any], size: int = 1_000_000_000) -> None:
        self.make, self.size = make, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def picture(index: int) -> Any:
    return torch.full((3, 224, 224), index % 251, dtype=torch.uint8), index


def normalised(index: int) -> Any:
    return torch.full((3, 224, 224), index % 251 / 251), index


def tokens(index: int) -> Any:
    return torch.from_numpy(np.arange(index % 1000, index % 1000 + 4096))


def number(index: int) -> Any:
    return index


KINDS: dict[str, Callable[[int], Any]] = {
    "an integer": number,
    "4,096 tokens": tokens,
    "a picture of 224 x 224 bytes": picture,
    "a picture of 224 x 224 floats": normalised,
}


def first_batch(make: Callable[[int], Any], verify: Any) -> tuple[float, midepoch.Loader]:
    """Milliseconds from `iter` to the first batch of a fresh loader, and the loader."""
    source = DataLoader(Made(make), BATCH_SIZE, shuffle=True)
    loader = midepoch.wrap(source, seed=1, verify=verify)
    start = time.perf_counter()
    next(iter(loader))
    return (time.perf_counter() - start) * 1e3, loader


def state_of(loader: midepoch.Loader, times: int = 2000) -> float:
    """Microseconds of `state_dict`."""
    start = time.perf_counter()
    for _ in range(times):
        loader.state_dict()
    return (time.perf_counter() - start) / times * 1e6


# --- stored samples ---------------------------------------------------------------------------------------------------


def write_stored(folder: Path, sample_bytes: int = 100_000, samples: int = 640, shards: int = 4) -> None:
    """The same samples as archives, as compressed archives and in Streaming's format."""
    import webdataset as wds
    from streaming import MDSWriter

    for name in ("tar", "gz"):
        (folder / name).mkdir()
    data = [np.random.default_rng(number).bytes(sample_bytes) for number in range(samples)]
    for shard in range(shards):
        path = folder / "tar" / f"shard-{shard}.tar"
        with wds.TarWriter(str(path)) as writer:
            for number in range(shard, samples, shards):
                writer.write({"__key__": f"{number:06d}", "jpg": data[number], "cls": str(number).encode()})
        (folder / "gz" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    for verify in ("off", "sample"):  # Streaming allows one dataset at a time on a folder
        columns = {"jpg": "bytes", "cls": "int"}
        with MDSWriter(out=str(folder / f"mds-{verify}"), columns=columns, size_limit=1 << 24) as stream:
            for number in range(samples):
                stream.write({"jpg": data[number], "cls": number})


def of_shards(urls: list[str], verify: Any) -> midepoch.Loader:
    import webdataset as wds

    dataset = wds.WebDataset(urls, shardshuffle=9).shuffle(100).to_tuple("jpg", "cls").batched(BATCH_SIZE)
    return midepoch.wrap(dataset, seed=1, verify=verify, progress=False)


def of_streaming(local: Path, verify: Any) -> midepoch.Loader:
    import streaming

    dataset = streaming.StreamingDataset(local=str(local), batch_size=BATCH_SIZE, shuffle=True)
    return midepoch.wrap(streaming.StreamingDataLoader(dataset, batch_size=BATCH_SIZE), verify=verify)


def a_pass(loader: midepoch.Loader) -> tuple[float, float, int]:
    """Milliseconds to the first batch of a pass, and for each of the others; bytes of the state between them."""
    start = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    first = (time.perf_counter() - start) * 1e3
    size = len(json.dumps(loader.state_dict()))
    start = time.perf_counter()
    count = sum(1 for _ in iterator)
    return first, (time.perf_counter() - start) / count * 1e3, size


def stored(rounds: int) -> None:
    """Print the table of sources whose samples are looked at as they are stored."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import cpu_torchvision  # noqa: F401  # before streaming, which imports torchvision

    from midepoch.adapters.webdataset import archive
    from support.object_server import nginx

    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, webdataset {version('webdataset')}, streaming "
        f"{version('mosaicml-streaming')}; batches of {BATCH_SIZE}, samples of 100 kB\n\n"
        "| source | first batch without, ms | with, ms | other batches without, ms | with, ms | bytes of the state |\n"
        "|---|---:|---:|---:|---:|---:|"
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["MIDEPOCH_CACHE"] = str(folder / "cache")
        write_stored(folder)
        (folder / "nginx").mkdir()
        base = stack.enter_context(nginx(folder / "nginx" / "server", folder / "tar"))
        names = [f"shard-{shard}.tar" for shard in range(4)]
        marked = archive._BEGINNING
        kinds: dict[str, Callable[[Any], midepoch.Loader]] = {
            "webdataset, indexed": lambda verify: of_shards([f"{folder}/tar/{name}" for name in names], verify),
            "the same, from a server": lambda verify: of_shards([f"{base}/{name}" for name in names], verify),
            "webdataset, streamed": lambda verify: of_shards([f"{folder}/gz/{name}.gz" for name in names], verify),
            "Streaming": lambda verify: of_streaming(folder / f"mds-{verify}", verify),
        }
        for name, make in kinds.items():
            times: dict[str, list[tuple[float, float, int]]] = {"off": [], "sample": []}
            epochs = itertools.count()
            # Streaming keeps shared memory for each dataset until the process ends, so it has one of each kind.
            kept = {verify: make(verify) for verify in times} if name == "Streaming" else {}
            for turn in range(rounds + 1):
                for verify in list(times)[:: 1 if turn % 2 else -1]:
                    # Marks of streamed shards are made in any case; to compare, they are left out.
                    archive._BEGINNING = 0 if verify == "off" else marked
                    loader = kept.get(verify) or make(verify)
                    if kept:
                        loader.seek(epoch=next(epochs))
                    taken = a_pass(loader)
                    if turn:  # the first warms up
                        times[verify].append(taken)
            off, with_it = ([statistics.median(each) for each in zip(*times[verify], strict=True)] for verify in times)
            print(f"| {name} | {off[0]:.1f} | {with_it[0]:.1f} | {off[1]:.2f} | {with_it[1]:.2f} | {with_it[2]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="of which the median is taken")
    parser.add_argument("--stored", action="store_true", help="measure sources that are looked at as they are stored")
    arguments = parser.parse_args()
    if arguments.stored:
        stored(arguments.rounds)
        return
    rounds = arguments.rounds
    print(f"torch {torch.__version__}, Python {platform.python_version()}; batches of {BATCH_SIZE}, 10^9 samples\n")
    print("| sample | first batch without, ms | with, ms | `state_dict` without, us | with, us | bytes of the state |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, make in KINDS.items():
        times: dict[str, list[float]] = {"off": [], "sample": []}
        states: dict[str, list[float]] = {"off": [], "sample": []}
        size = 0
        for _ in range(rounds):
            for verify in times:
                taken, loader = first_batch(make, verify)
                times[verify].append(taken)
                states[verify].append(state_of(loader))
                size = len(json.dumps(loader.state_dict()))
        row = [statistics.median(found[verify]) for found in (times, states) for verify in times]
        print(f"| {name} | {row[0]:.2f} | {row[1]:.2f} | {row[2]:.1f} | {row[3]:.1f} | {size} |")


if __name__ == "__main__":
    main()
