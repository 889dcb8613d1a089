"""Loaders for the demonstration's images, one for each backend, written in that backend's own style.

A backend is imported when it is used, so that the others work without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import midepoch  # by its name, as in a user's script
from midepoch.loader.loader import Loader

from .images import SIDE, label_of

__all__ = ["BACKENDS", "Backend", "Digits"]

Batch = tuple[Tensor, Tensor, Tensor]
"""Images [batch, 1, SIDE, SIDE] of float32, labels [batch], numbers of the images [batch]."""


@dataclass(frozen=True)
class Backend:
    """How a backend reads the images.

    Attributes:
        needs: modules that must be installed.
        load: from (folder of images, batch size of one rank, seed, workers) to a wrapped loader.
        unpack: from (a batch of the loader, labels of all images) to a `Batch`.
        prepare: writes the backend's own data files beside the images, if it needs any.
    """

    needs: tuple[str, ...]
    load: Callable[[Path, int, int, int], Loader]
    unpack: Callable[[Any, Tensor], Batch] = lambda batch, labels: batch
    prepare: Callable[[Path], None] = lambda images: None


def paths_of(images: Path) -> list[Path]:
    """The image files, in the order of their numbers."""
    return sorted(images.glob("*.jpg"))


# --- torch ---


def augment(file: Path | BinaryIO) -> Tensor:
    """The randomly augmented pixels [1, SIDE, SIDE] of a JPEG file. Draws from the global generators."""
    with Image.open(file) as opened:
        image = opened.convert("L").rotate(random.uniform(-15, 15), Image.Resampling.BILINEAR)
    noise = np.random.normal(0, 0.05, (1, SIDE, SIDE))
    pixels = torch.from_numpy((np.asarray(image) / 255 + noise).astype(np.float32))
    return pixels * torch.empty(1).uniform_(0.8, 1.2)


class Digits(Dataset[tuple[Tensor, int, int]]):
    """Image [1, SIDE, SIDE] of float32, label, number."""

    def __init__(self, folder: Path) -> None:
        self.paths = paths_of(folder)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        path = self.paths[index]
        return augment(path), label_of(path), index


def torch_loader(images: Path, batch_size: int, seed: int, num_workers: int) -> Loader:
    """Read with torch's DataLoader."""
    return midepoch.wrap(DataLoader(Digits(images), batch_size, shuffle=True, num_workers=num_workers), seed=seed)


# --- DALI ---


def dali_loader(images: Path, batch_size: int, seed: int, num_workers: int) -> Loader:
    """Read with a DALI pipeline that midepoch feeds."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    from midepoch.adapters import dali

    files = [str(path) for path in paths_of(images)]

    @pipeline_def(batch_size=batch_size, num_threads=max(num_workers, 1), device_id=dali.device_id())  # type: ignore[untyped-decorator,unused-ignore]
    def train() -> Any:
        encoded, number = dali.readers.file(files=files, random_shuffle=True)
        pixels = fn.decoders.image(encoded, output_type=types.GRAY)
        pixels = fn.rotate(pixels, angle=dali.random.uniform(range=(-15, 15)), keep_size=True, fill_value=0)
        pixels = fn.brightness(pixels, brightness=dali.random.uniform(range=(0.8, 1.2)))
        return fn.crop_mirror_normalize(pixels, std=[255.0], dtype=types.FLOAT, output_layout="CHW"), number

    return midepoch.wrap(DALIGenericIterator([train()], ["pixels", "number"]), seed=seed)


def unpack_dali(batches: Any, labels: Tensor) -> Batch:
    """Take the batch of the only pipeline."""
    numbers = batches[0]["number"].flatten().long().cpu()
    return batches[0]["pixels"].cpu(), labels[numbers], numbers


# --- FFCV ---


class _Pixels:
    """Input of FFCV's writer: pixels [SIDE, SIDE, 3] of uint8, and the number."""

    def __init__(self, images: Path) -> None:
        self.paths = paths_of(images)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.paths[index]) as image:
            return np.asarray(image.convert("RGB")), index


def write_beton(images: Path) -> None:
    """Write FFCV's own file, with the images as JPEG."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"pixels": RGBImageField(write_mode="jpg"), "number": IntField()}
    writer = DatasetWriter(str(images / "digits.beton"), fields, num_workers=1, page_size=1 << 21)
    writer.from_indexed_dataset(_Pixels(images))


def ffcv_loader(images: Path, batch_size: int, seed: int, num_workers: int) -> Loader:
    """Read with FFCV's Loader."""
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader as FFCVLoader
    from ffcv.loader import OrderOption
    from ffcv.transforms import RandomBrightness, ToTensor, ToTorchImage

    cut = RandomResizedCropRGBImageDecoder((SIDE, SIDE), scale=(0.7, 1.0))
    pipelines = {
        "pixels": [cut, RandomBrightness(0.2), ToTensor(), ToTorchImage()],
        "number": [IntDecoder(), ToTensor()],
    }
    source = FFCVLoader(
        str(images / "digits.beton"),
        batch_size=batch_size,
        num_workers=max(num_workers, 1),
        order=OrderOption.RANDOM,
        pipelines=pipelines,
    )
    return midepoch.wrap(source, seed=seed)


def unpack_ffcv(batch: Any, labels: Tensor) -> Batch:
    """Keep one of three equal channels."""
    pixels, numbers = batch
    numbers = numbers.flatten().long()
    return pixels[:, :1].float() / 255, labels[numbers], numbers


# --- webdataset ---

_SHARDS = 4


def write_shards(images: Path) -> None:
    """Write tar archives with a file, a label and a number for each image."""
    import webdataset as wds

    for shard in range(_SHARDS):
        with wds.TarWriter(str(images / f"digits-{shard}.tar")) as writer:
            for number, path in list(enumerate(paths_of(images)))[shard::_SHARDS]:
                jpeg = path.read_bytes()
                writer.write({"__key__": path.stem, "jpg": jpeg, "cls": label_of(path), "number.id": number})


def read_sample(sample: dict[str, Any]) -> tuple[Tensor, int, int]:
    """Decode one sample of a shard."""
    return augment(BytesIO(sample["jpg"])), int(sample["cls"]), int(sample["number.id"])


def webdataset_loader(images: Path, batch_size: int, seed: int, num_workers: int) -> Loader:
    """Read with a webdataset pipeline in a WebLoader."""
    import webdataset as wds

    urls = [str(images / f"digits-{shard}.tar") for shard in range(_SHARDS)]
    dataset = wds.WebDataset(urls, shardshuffle=_SHARDS, nodesplitter=wds.split_by_node).shuffle(1000)
    dataset = dataset.map(read_sample).batched(batch_size)
    return midepoch.wrap(wds.WebLoader(dataset, batch_size=None, num_workers=num_workers), seed=seed)


BACKENDS = {
    "torch": Backend((), torch_loader),
    "dali": Backend(("nvidia.dali",), dali_loader, unpack_dali),
    "ffcv": Backend(("ffcv",), ffcv_loader, unpack_ffcv, write_beton),
    "webdataset": Backend(("webdataset",), webdataset_loader, prepare=write_shards),
}
"""The backends, by their ``--backend`` names."""
