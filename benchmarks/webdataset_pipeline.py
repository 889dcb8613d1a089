"""webdataset pipelines, wrapped and plain, alternated; the medians go into docs/webdataset.md.

python benchmarks/webdataset_pipeline.py [folder for 2 GB of shards]
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds

import midepoch
from midepoch.adapters.webdataset.index import Keys, build_index
from midepoch.tar import index_tar

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


def rate(batches: Iterable[int], at_most: int) -> float:
    """Samples a second, the start of worker processes included, over one epoch or so many samples."""
    begun, samples = time.perf_counter(), 0
    for batch in batches:
        samples += int(batch)
        if samples >= at_most:
            break
    return samples / (time.perf_counter() - begun)


def alternated(variants: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """The median of each variant, their runs alternated."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            found[name].append(run())
    return {name: statistics.median(values) for name, values in found.items()}


def compare_rates(name: str, urls: list[str], decoded: bool, workers: int, at_most: int) -> None:
    def wrapped() -> float:
        with midepoch.wrap(loader(urls, decoded, workers), seed=0, progress=False) as made:
            return rate(made, at_most)

    medians = alternated({"plain": lambda: rate(loader(urls, decoded, workers), at_most), "wrapped": wrapped})
    print(
        f"{name}, {workers} workers: {medians['wrapped']:.0f} samples/s wrapped, {medians['plain']:.0f} plain, "
        f"{medians['wrapped'] / medians['plain']:.2f} times"
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
            states[share] = made.state_dict()
    medians = alternated(
        {f"{share:.0%}": (lambda state=state: seconds_to_first_batch(make, state)) for share, state in states.items()},
        rounds=15,
    )
    print(
        f"first batch, indexed: {1e3 * medians['0%']:.1f} ms at 0 %, {1e3 * medians['90%']:.1f} ms at 90 %, "
        f"{medians['90%'] / medians['0%']:.2f} times; state {len(json.dumps(states[0.9]))} bytes"
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

    medians = alternated(
        {
            "0 %": lambda: seconds_to_first_batch(make, states[0]),
            "90 %": lambda: seconds_to_first_batch(make, late),
            "one shard": read_shard,
        }
    )
    told = ", ".join(f"{1e3 * seconds:.0f} ms {name}" for name, seconds in medians.items())
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

    def scan() -> float:
        begun = time.perf_counter()
        for url in urls:
            index_tar(url)
        return time.perf_counter() - begun

    medians = alternated({"built": build, "scanned": scan})
    with tempfile.TemporaryDirectory() as cache:
        index = build_index(urls, Keys(), {"opening": reraise, "reading": reraise}, Path(cache), False)
    assert not isinstance(index, str)
    held = (index.starts.nbytes + index.lengths.nbytes) / index.size
    print(
        f"index of {size / 1e9:.2f} GB, {index.size} samples of {sample_bytes} bytes: {medians['built']:.2f} s "
        f"({medians['built'] / size * 1e9:.2f} s/GB; one thread, headers only: {medians['scanned']:.2f} s), "
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
        f"{platform.python_version()}, {os.cpu_count()} cores"
    )
    for sample_bytes in (12_000, 116_000):
        urls = write_shards(folder / str(sample_bytes), sample_bytes)
        measure_index(urls, sample_bytes)
        for workers in (0, 2):
            compare_rates(f"raw bytes, {sample_bytes} a sample", urls, False, workers, 20_000)
    measure_resume(urls)
    measure_streams(urls)
    images = write_images(folder / "images")
    for workers in (0, 2):
        compare_rates("JPEG decoded", images, True, workers, 1_600)


if __name__ == "__main__":
    main()
