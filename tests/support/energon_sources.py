"""Loaders of Megatron-Energon, which `make wild` installs into a folder of its own: its training and its validation."""

from __future__ import annotations

import contextlib
import os
import random
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import cpu_torchvision  # noqa: F401  # before energon, which imports torchvision
import numpy as np
import torch

import midepoch

SIZE, SHARDS, BATCH, SEED = 24, 2, 2, 7


def prepared(folder: Path, size: int = SIZE) -> Path:
    """A folder of texts, each its own number, in two archives with Energon's index, for training and validation."""
    from megatron.energon.flavors import BaseWebdatasetFactory

    if (folder / ".nv-meta" / "dataset.yaml").exists():
        return folder
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    each = size // SHARDS
    for part in ("train", "val"):
        for shard in range(SHARDS):
            with tarfile.open(draft / f"{part}{shard}.tar", "w") as archive:
                for number in range(each * shard, each * shard + each):
                    content = str(number).encode()
                    member = tarfile.TarInfo(f"{part}{number:04}.txt")
                    member.size = len(content)
                    archive.addfile(member, BytesIO(content))
    names = [f"{part}{shard}.tar" for part in ("train", "val") for shard in range(SHARDS)]
    BaseWebdatasetFactory.prepare_dataset(
        draft, names, split_parts_patterns=[("train", "train.*"), ("val", "val.*")], split_parts_ratio=None, workers=1
    )
    kind = "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
    (draft / ".nv-meta" / "dataset.yaml").write_text(kind)
    with contextlib.suppress(OSError):  # another process was faster
        draft.rename(folder)
    return folder


def kept(size: int = SIZE) -> Path:
    """A folder that stays, since preparing it starts processes."""
    return prepared(Path(tempfile.gettempdir()) / f"midepoch-energon-{os.getuid()}-{size}", size)


def training(
    folder: Path, rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = BATCH, length: int = 0
) -> Any:
    """`length`: batches of an epoch; 0: without an end, as it comes."""
    from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

    dataset = get_train_dataset(
        folder, batch_size=batch_size, shuffle_buffer_size=8, max_samples_per_sequence=5,
        worker_config=WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers),
        virtual_epoch_length=length,
    )  # fmt: skip
    return get_savable_loader(dataset)


def validation(folder: Path, rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = BATCH) -> Any:
    from megatron.energon import WorkerConfig, get_savable_loader, get_val_dataset

    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers)
    return get_savable_loader(get_val_dataset(folder, batch_size=batch_size, worker_config=config))


def texts(batch: Any) -> list[int]:
    """The numbers of a batch's samples, also of one behind `drawn`."""
    return list(map(int, batch[:, 0] if isinstance(batch, torch.Tensor) else batch.text))


def drawn(batch: Any) -> Any:
    """For `then=`: each sample's number, and one from each global generator."""
    rows = [[int(text), random.random(), float(np.random.rand()), float(torch.rand(()))] for text in batch.text]
    return torch.tensor(rows, dtype=torch.float64)


# --- for the laws ---


def wrapped_training(rank: int = 0, world_size: int = 1, num_workers: int = 0, seed: int | None = SEED) -> Any:
    source = training(kept(), rank, world_size, num_workers, length=5)
    return midepoch.wrap(source, seed=seed, world=midepoch.World(rank, world_size))


def wrapped_validation(rank: int = 0, world_size: int = 1, num_workers: int = 0, seed: int | None = SEED) -> Any:
    source = validation(kept(), rank, world_size, num_workers)
    return midepoch.wrap(source, seed=seed, world=midepoch.World(rank, world_size))


def wrapped_drawing(rank: int = 0, world_size: int = 1, seed: int | None = SEED) -> Any:
    """What is drawn in `then=` is the batch's."""
    source = validation(kept(), rank, world_size)
    return midepoch.wrap(source, seed=seed, world=midepoch.World(rank, world_size), then=drawn)
