"""webdataset pipelines, wrapped and plain, alternated; the medians go into docs/benchmarks/index.md.

python benchmarks/webdataset_shards.py [folder for 2 GB of shards]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from measuring import machine

import midepoch
from midepoch.adapters.webdataset.index import Keys, build_index
from midepoch.reading.tar import index_tar

SHARDS, SHARD_BYTES = 10, 100_000_000
JPEG_SHARDS, JPEG_SAMPLES = 4, 400
ROUNDS = 5


def write_shards(folder: Path, sample_bytes: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    content = np.random.default_rng(0).bytes(sample_bytes)
    urls = []
    for shard in range(SHARDS):
        path = folder / f"shard-{shard:02d}.tar"
        urls.append(str(path))
        if not path.exists():
            with wds.TarWriter(f"{path}.part") as writer:
                for index in range(SHARD_BYTES // (sample_bytes + 3584)):
                    writer.write({"__key__": f"{shard:02d}{index:06d}", "jpg": content, "cls": str(index).encode()})
            Path(f"{path}.part").rename(path)
    return urls


def write_images(folder: Path) -> list[str]:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    picture = io.BytesIO()
    Image.fromarray(noise).resize((224, 224), Image.Resampling.BICUBIC).save(picture, "JPEG", quality=90)
    urls = []
    for shard in range(JPEG_SHARDS):
        path = folder / f"images-{shard:02d}.tar"
        urls.append(str(path))
        with wds.TarWriter(str(path)) as writer:
            for index in range(JPEG_SAMPLES):
                writer.write({"__key__": f"{shard:02d}{index:06d}", "jpg": picture.getvalue(), "cls": b"1"})
    return urls


def first(samples: list[Any]) -> int:
    """A batch that costs nothing to make or to send: reading is what is measured."""
    return len(samples)


def pipeline(urls: list[str], decoded: bool) -> Any:
    dataset = wds.WebDataset(urls, shardshuffle=100).shuffle(1000)
    dataset = dataset.decode("torchrgb") if decoded else dataset
    return dataset.to_tuple("jpg", "cls").batched(32, collation_fn=first)


def loader(urls: list[str], decoded: bool, workers: int) -> Any:
    return wds.WebLoader(pipeline(urls, decoded), batch_size=None, num_workers=workers)


def rate(batches: Iterable[int], at_most: int, clock: Callable[[], float]) -> float:
    """Samples a second, the start of worker processes included, over one epoch or so many samples."""
    begun, samples = clock(), 0
    for batch in batches:
        samples += int(batch)
        if samples >= at_most:
            break
    return samples / (clock() - begun)


def alternated(variants: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """What each variant gave in each round; every other round runs backwards."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            found[name].append(variants[name]())
    return found


def ratio(times: list[float], base: list[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(times, base, strict=True))


def compare_rates(
    name: str, urls: list[str], decoded: bool, workers: int, at_most: int, clock: Callable[[], float], rounds: int
) -> None:
    def plain() -> float:
        return rate(loader(urls, decoded, workers), at_most, clock)

    def wrapped() -> float:
        with midepoch.wrap(loader(urls, decoded, workers), seed=0, progress=False) as made:
            return rate(made, at_most, clock)

    rates = alternated({"plain": plain, "wrapped": wrapped}, rounds)
    medians = {each: statistics.median(values) for each, values in rates.items()}
    print(
        f"| {name} | {workers} | {medians['plain']:.0f} | {medians['wrapped']:.0f} | "
        f"{ratio(rates['wrapped'], rates['plain']):.2f} |",
        flush=True,
    )


def seconds_to_first_batch(make: Callable[[], Any], state: dict[str, Any]) -> float:
    with make() as made:
        made.load_state_dict(state)
        begun = time.perf_counter()
        next(iter(made))
        return time.perf_counter() - begun


def measure_resume(urls: list[str]) -> None:
    def make() -> Any:
        return midepoch.wrap(pipeline(urls, False), seed=0, progress=False)

    states = {}
    with make() as made:
        for share in (0.0, 0.9):
            made.seek(epoch=0, position=int(share * len(made)) * 32)
            next(iter(made))  # only a loader that has read has a witness, which a resume compares
            states[share] = made.state_dict()
            assert states[share]["witness"]
    times = alternated(
        {f"{share:.0%}": partial(seconds_to_first_batch, make, state) for share, state in states.items()},
        rounds=15,
    )
    medians = {each: statistics.median(values) for each, values in times.items()}
    print(
        f"first batch, indexed: {1e3 * medians['0%']:.1f} ms at 0 %, {1e3 * medians['90%']:.1f} ms at 90 %, "
        f"{ratio(times['90%'], times['0%']):.2f} times; state {len(json.dumps(states[0.9]))} bytes",
        flush=True,
    )


def measure_streams(urls: list[str]) -> None:
    """Pipes in order: what a resume at 90 % of the epoch costs, against one shard's reading."""
    shards = [f"pipe:cat {url}" for url in urls]

    def make() -> Any:
        dataset = wds.WebDataset(shards, shardshuffle=False).to_tuple("jpg", "cls").batched(32, collation_fn=first)
        return midepoch.wrap(dataset, seed=0, streams=1)

    with make() as made:
        iterator, states = iter(made), []
        states.append(made.state_dict())
        for _ in iterator:
            states.append(made.state_dict())
    late = states[int(0.9 * len(states)) - 5]  # near the end of the ninth shard

    def read_shard() -> float:
        begun = time.perf_counter()
        for _ in wds.WebDataset(shards[8], shardshuffle=False).to_tuple("jpg", "cls"):
            pass
        return time.perf_counter() - begun

    times = alternated(
        {
            "0 %": lambda: seconds_to_first_batch(make, states[0]),
            "90 %": lambda: seconds_to_first_batch(make, late),
            "one shard": read_shard,
        }
    )
    told = ", ".join(f"{1e3 * statistics.median(seconds):.0f} ms {name}" for name, seconds in times.items())
    print(f"first batch, streamed: {told}; state {len(json.dumps(late))} bytes")


def measure_index(urls: list[str], sample_bytes: int) -> None:
    size = sum(Path(url).stat().st_size for url in urls)
    for url in urls:
        Path(url).read_bytes()  # into the system's cache

    def reraise(error: Exception) -> None:
        raise error

    def build() -> float:
        with tempfile.TemporaryDirectory() as cache:
            begun = time.perf_counter()
            build_index(urls, Keys(), {"opening": reraise, "reading": reraise}, Path(cache), False)
            return time.perf_counter() - begun

    def headers() -> float:
        begun = time.perf_counter()
        for url in urls:
            index_tar(url)
        return time.perf_counter() - begun

    times = alternated({"built": build, "headers": headers}, rounds=7)
    medians = {each: statistics.median(values) for each, values in times.items()}
    with tempfile.TemporaryDirectory() as cache:
        index = build_index(urls, Keys(), {"opening": reraise, "reading": reraise}, Path(cache), False)
    assert not isinstance(index, str)
    held = (index.starts.nbytes + index.lengths.nbytes) / index.size
    print(
        f"index of {size / 1e9:.2f} GB, {index.size} samples of {sample_bytes} bytes: {medians['built']:.2f} s "
        f"({medians['built'] / size * 1e9:.2f} s/GB, at best {min(times['built']) / size * 1e9:.2f}; headers alone, in "
        f"one thread: {medians['headers'] / size * 1e9:.2f}, at best {min(times['headers']) / size * 1e9:.2f}), "
        f"{held:.0f} bytes a sample"
    )


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=str(Path(tempfile.gettempdir()) / "midepoch-benchmark"))
    folder = Path(parser.parse_args().folder)
    os.environ["MIDEPOCH_CACHE"] = str(folder / "cache")
    print(
        f"{date.today()}, webdataset {wds.__version__}, torch {torch.__version__}, numpy {np.__version__}, Python "
        f"{platform.python_version()}, {machine()}"
    )
    for sample_bytes in (12_000, 116_000):
        measure_index(write_shards(folder / str(sample_bytes), sample_bytes), sample_bytes)
    print("| samples/s | workers | plain | wrapped | ratio |")
    print("|---|---|---|---|---|")
    for sample_bytes in (12_000, 116_000):
        urls = write_shards(folder / str(sample_bytes), sample_bytes)
        for workers in (0, 2):
            compare_rates(f"raw bytes, {sample_bytes} a sample", urls, False, workers, 8_000, time.perf_counter, ROUNDS)
    images = write_images(folder / "images")
    for workers in (0, 2):
        compare_rates("JPEG decoded, 224 x 224", images, True, workers, 640, time.perf_counter, 3 * ROUNDS)
    # Of this process alone, which other load on the machine hardly touches.
    compare_rates("the same, per second of processor time", images, True, 0, 640, time.process_time, 3 * ROUNDS)
    measure_resume(urls)
    measure_streams(urls)


if __name__ == "__main__":
    main()
