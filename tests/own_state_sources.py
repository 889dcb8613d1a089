"""Loaders that keep a state of their own, bare and wrapped, for the laws and for the table of them in docs/."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from law_sources import Samples
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch

SIZE, BATCH, SEED = 14, 3, 7


def identify(batch: Any) -> list[int]:
    """The numbers of a batch's samples, whatever its form."""
    if isinstance(batch, dict):
        batch = batch["number"]
    found = np.atleast_1d(np.asarray(batch))
    return [int(number) for number in (found[:, 0] if found.ndim == 2 else found)]


# --- bare ---


def torchdata(num_workers: int = 0, seed: int | None = SEED, size: int = SIZE) -> Any:
    generator = torch.Generator().manual_seed(seed or 0)
    return StatefulDataLoader(
        Samples(size), BATCH, shuffle=True, num_workers=num_workers, generator=generator,
        multiprocessing_context="fork" if num_workers else None,
    )  # fmt: skip


def datasets_stream(seed: int | None = SEED, size: int = SIZE) -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"number": list(range(size))})
    return rows.to_iterable_dataset(num_shards=3).batch(BATCH)


def datasets_buffered(seed: int | None = SEED, size: int = SIZE) -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"number": list(range(size))})
    return rows.to_iterable_dataset(num_shards=3).shuffle(seed=seed or 0, buffer_size=5).batch(BATCH)


def grain_loader(seed: int | None = SEED, size: int = SIZE) -> Any:
    logging.getLogger("absl").setLevel(logging.ERROR)
    import grain

    sampler = grain.samplers.IndexSampler(
        size, shuffle=True, seed=seed or 0, num_epochs=1, shard_options=grain.sharding.NoSharding()
    )
    return grain.DataLoader(
        data_source=list(range(size)), sampler=sampler, operations=[grain.transforms.Batch(BATCH)], worker_count=0
    )


def grain_dataset(seed: int | None = SEED, size: int = SIZE) -> Any:
    logging.getLogger("absl").setLevel(logging.ERROR)
    import grain

    return grain.MapDataset.range(size).shuffle(seed=seed or 0).batch(BATCH).to_iter_dataset()


@functools.cache
def written_by_litdata(size: int) -> str:
    """A folder in LitData's format, kept on disk since writing it starts processes."""
    folder = Path(tempfile.gettempdir()) / f"midepoch-litdata-{os.getuid()}-{size}"
    if not (folder / "index.json").exists():
        code = (
            "import litdata, sys\n"
            "def sample(number): return {'number': number}\n"
            "if __name__ == '__main__':\n"
            "    litdata.optimize(fn=sample, inputs=list(range(int(sys.argv[2]))), output_dir=sys.argv[1],\n"
            "                     chunk_bytes='64MB', num_workers=1)\n"
        )
        script = Path(tempfile.mkdtemp()) / "write.py"
        script.write_text(code)
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        wrapper = (
            "import cpu_torchvision, runpy, sys; sys.argv = sys.argv[1:]; "
            "runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        subprocess.run(
            [sys.executable, "-c", wrapper, str(script), str(folder), str(size)],
            env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, timeout=120,
        )  # fmt: skip
    return str(folder)


def litdata_loader(num_workers: int = 0, seed: int | None = SEED, size: int = SIZE) -> Any:
    import cpu_torchvision  # noqa: F401  # before litdata, which imports torchvision
    import litdata

    dataset = litdata.StreamingDataset(written_by_litdata(size), shuffle=True, seed=seed or 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=num_workers)


BARE: dict[str, Callable[..., Any]] = {
    "torchdata StatefulDataLoader": torchdata,
    "Hugging Face IterableDataset": datasets_stream,
    "Hugging Face IterableDataset with a shuffle buffer": datasets_buffered,
    "Grain DataLoader": grain_loader,
    "Grain IterDataset": grain_dataset,
    "LitData StreamingDataLoader": litdata_loader,
}

# --- wrapped ---


def wrapped_torchdata(num_workers: int = 0, seed: int | None = SEED, size: int = SIZE) -> Any:
    return midepoch.wrap(torchdata(num_workers, seed, size), seed=seed)


def wrapped_datasets_stream(seed: int | None = SEED, size: int = SIZE) -> Any:
    return midepoch.wrap(datasets_stream(seed, size), seed=seed)


def wrapped_datasets_buffered(seed: int | None = SEED, size: int = SIZE) -> Any:
    return midepoch.wrap(datasets_buffered(seed, size), seed=seed)


def wrapped_grain_loader(seed: int | None = SEED, size: int = SIZE) -> Any:
    return midepoch.wrap(grain_loader(seed, size), seed=seed)


def wrapped_grain_dataset(seed: int | None = SEED, size: int = SIZE) -> Any:
    return midepoch.wrap(grain_dataset(seed, size), seed=seed)


def wrapped_litdata_loader(num_workers: int = 0, seed: int | None = SEED, size: int = SIZE) -> Any:
    return midepoch.wrap(litdata_loader(num_workers, seed, size), seed=seed)


WRAPPED: dict[str, Callable[..., Any]] = {
    "torchdata StatefulDataLoader": wrapped_torchdata,
    "Hugging Face IterableDataset": wrapped_datasets_stream,
    "Hugging Face IterableDataset with a shuffle buffer": wrapped_datasets_buffered,
    "Grain DataLoader": wrapped_grain_loader,
    "Grain IterDataset": wrapped_grain_dataset,
    "LitData StreamingDataLoader": wrapped_litdata_loader,
}
