"""DALI loaders for the laws: module-level functions, for processes that are spawned."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, DALIGenericIterator, DALIRaggedIterator
from PIL import Image

import midepoch
from midepoch.adapters import dali

IMAGES = 40


def write_images(folder: Path, count: int = IMAGES) -> Path:
    """JPEG files of different sizes in three folders, the same as .npy of shape (1,), and in two archives."""
    generator = np.random.default_rng(0)
    for number in range(count):
        pixels = generator.integers(0, 255, (20 + number, 30, 3), dtype=np.uint8)
        path = folder / "jpeg" / f"class{number * 3 // count}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        (folder / "npy").mkdir(exist_ok=True)
        np.save(folder / "npy" / f"{number:03}.npy", np.array([number], np.int32))
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, count, 2):
                image = next((folder / "jpeg").glob(f"*/{number:03}.jpg")).read_bytes()
                for extension, content in (("jpg", image), ("cls", np.array([number], np.int32).tobytes())):
                    info = tarfile.TarInfo(f"{number:03}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return folder


def images(root: str, size: int) -> list[str]:
    """The first files as they were written, whether they are still there or not."""
    return [f"{root}/jpeg/class{number * 3 // IMAGES}/{number:03}.jpg" for number in range(size)]


def identify(batch: Any) -> list[int]:
    """Of all pipelines' dicts, the labels, which a graph may have negated."""
    return [abs(int(label)) for part in batch for label in torch.as_tensor(part["label"]).flatten()]


def draws(batch: Any) -> list[tuple[float, ...]]:
    return [tuple(row.tolist()) for part in batch for row in part["random"]]


def noisy(batch: Any) -> Any:
    for part in batch:
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        part["random"] = torch.tensor([[number, *drawn] for number in range(len(part["label"]))])
    return batch


KINDS = {"generic": DALIGenericIterator, "ragged": DALIRaggedIterator}


# --- native ----------------------------------------------------------------------------------------------------------


@pipeline_def(num_threads=2, device_id=None)
def native_pipeline(root: str, size: int, reader: str, shards: tuple[int, int], options: dict[str, Any]) -> Any:
    options = {"name": "Reader", "shard_id": shards[0], "num_shards": shards[1], **options}
    if reader == "numpy":
        label = fn.readers.numpy(files=[f"{root}/npy/{number:03}.npy" for number in range(size)], **options)
        return label, label + 1000, fn.random.uniform(shape=[2])
    if reader == "webdataset":
        encoded, raw = fn.readers.webdataset(paths=[f"{root}/0.tar", f"{root}/1.tar"], ext=["jpg", "cls"], **options)
        label = fn.reinterpret(raw, dtype=types.INT32)
    else:
        paths = images(root, size)
        encoded, label = fn.readers.file(files=paths, labels=list(range(len(paths))), **options)
    cut = fn.resize(fn.decoders.image_random_crop(encoded), resize_x=12, resize_y=12)
    return label, fn.crop_mirror_normalize(cut, crop=(8, 8), mirror=fn.random.coin_flip()), fn.random.uniform(shape=[2])


def native(
    rank: int = 0, world_size: int = 1, *, root: str = "", batch_size: int = 3, seed: int | None = None, size: int = 18,
    reader: str = "file", policy: str = "FILL", pipelines: int = 1, kind: str = "generic",
    auto_reset: bool = False, prepare: bool = True, pipeline: dict[str, Any] | None = None, then: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """A native DALI loader. ``options`` go to the reader, ``pipeline`` to the pipeline."""
    options = {"random_shuffle": True, "initial_fill": 7, **options}
    if options.get("shuffle_after_epoch"):
        del options["random_shuffle"], options["initial_fill"]
    made = []
    for number in range(pipelines):
        shards = (rank * pipelines + number, world_size * pipelines)
        settings = {"seed": 11 + number, **(pipeline or {})}
        made.append(native_pipeline(root, size, reader, shards, options, batch_size=batch_size, **settings))
    iterator = KINDS[kind](
        made, ["label", "data", "random"], reader_name="Reader", auto_reset=auto_reset, prepare_first_batch=prepare,
        last_batch_policy=LastBatchPolicy[policy],
    )  # fmt: skip
    return midepoch.wrap(iterator, seed=seed, world=midepoch.World(rank, world_size), then=then)


@pipeline_def(num_threads=1, device_id=None, seed=3)
def classification_pipeline(root: str) -> Any:
    encoded, label = fn.readers.file(file_root=f"{root}/jpeg", name="Reader", random_shuffle=True)
    return fn.resize(fn.decoders.image(encoded), resize_x=8, resize_y=8), label


def classification(root: str) -> Any:
    return DALIClassificationIterator([classification_pipeline(root, batch_size=5)], reader_name="Reader")


# --- graphs that call python -----------------------------------------------------------------------------------------


def numbered(info: Any) -> np.ndarray[Any, Any]:
    if info.idx_in_epoch >= 20:
        raise StopIteration
    return np.array([info.idx_in_epoch + 100 * info.epoch_idx], np.int32)


@pipeline_def(num_threads=1, device_id=None, seed=3, batch_size=4)
def callback_pipeline(kind: str, root: str) -> Any:
    if kind == "external":
        label = fn.external_source(source=numbered, batch=False)
    elif kind == "generator":
        label = fn.external_source(source=([np.zeros(1)] * 4 for _ in range(5)))
    else:
        read = fn.readers.numpy(file_root=f"{root}/npy", name="Reader", random_shuffle=True, initial_fill=7)
        label = fn.python_function(read, function=negated)
    return label, fn.random.uniform(shape=[2])


def negated(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return -array


class MakeCallback:
    """A factory that can be pickled."""

    def __init__(self, kind: str, root: str) -> None:
        self.arguments = (kind, root)

    def __call__(self, checkpointing: dict[str, Any]) -> Any:
        reader = {} if self.arguments[0] != "python" else {"reader_name": "Reader"}
        return DALIGenericIterator([callback_pipeline(*self.arguments, **checkpointing)], ["label", "random"], **reader)


def from_factory(kind: str = "external", root: str = "") -> Any:
    return midepoch.wrap(dali.factory(MakeCallback(kind, root)))


@pipeline_def(num_threads=1, device_id=None, batch_size=3)
def found_pipeline(root: str, reader: str) -> Any:
    if reader == "webdataset":
        return dali.readers.webdataset([f"{root}/0.tar", f"{root}/1.tar"], ext="cls", random_shuffle=True)
    return dali.readers.numpy(file_root=f"{root}/npy", random_shuffle=True)


def found(root: str, reader: str, rank: int = 0, world_size: int = 1) -> Any:
    iterator = DALIGenericIterator([found_pipeline(root, reader)], ["label"])
    return midepoch.wrap(iterator, seed=1, world=midepoch.World(rank, world_size))


def swap_contents(root: Path) -> None:
    """Give the files, and the members of the archives, each other's contents; names and sizes stay."""
    files = sorted((root / "npy").glob("*.npy"))
    for file, content in zip(files, [file.read_bytes() for file in reversed(files)], strict=True):
        file.write_bytes(content)
    for archive in root.glob("*.tar"):
        data = bytearray(archive.read_bytes())
        with tarfile.open(archive) as tar:
            places = [slice(each.offset_data, each.offset_data + 4) for each in tar if each.name.endswith(".cls")]
        for place, content in zip(places, [bytes(data[place]) for place in reversed(places)], strict=True):
            data[place] = content
        archive.write_bytes(data)


# --- fed by midepoch -------------------------------------------------------------------------------------------------


@pipeline_def(num_threads=2, device_id=None)
def sampled_pipeline(root: str, size: int, reader: str, options: dict[str, Any]) -> Any:
    if reader == "numpy":
        label = dali.readers.numpy(files=[f"{root}/npy/{number:03}.npy" for number in range(size)], **options)
        return label, label + 1000, dali.random.uniform(shape=2)
    if reader == "webdataset":
        encoded, raw = dali.readers.webdataset([f"{root}/0.tar", f"{root}/1.tar"], ext=["jpg", "cls"], **options)
        label = fn.reinterpret(raw, dtype=types.INT32)
    else:
        paths = images(root, size)
        encoded, label = dali.readers.file(files=paths, labels=list(range(len(paths))), **options)
    anchor, shape = dali.random.crop_window(encoded)
    cut = fn.decoders.image_slice(encoded, anchor, shape, axis_names="HW")
    cut = fn.resize(cut, resize_x=12, resize_y=12)
    mirrored = fn.crop_mirror_normalize(cut, crop=(8, 8), mirror=dali.random.coin_flip())
    return label, mirrored, dali.random.normal(shape=2)


def sampled(
    rank: int = 0, world_size: int = 1, *, root: str = "", batch_size: int = 3, seed: int | None = None, size: int = 18,
    reader: str = "file", tail: Any = None, pipeline: dict[str, Any] | None = None, kind: str = "generic",
    prepare: bool = True, then: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """A loader fed by midepoch. ``options`` go to the reader, ``pipeline`` to the pipeline."""
    options = {"random_shuffle": True, **options}
    made = sampled_pipeline(root, size, reader, options, batch_size=batch_size, **(pipeline or {}))
    iterator = KINDS[kind]([made], ["label", "data", "random"], prepare_first_batch=prepare)
    return midepoch.wrap(iterator, seed=seed, world=midepoch.World(rank, world_size), tail=tail, then=then)


# --- for jax -------------------------------------------------------------------------------------------------------


def of_jax(
    root: str, rank: int = 0, world_size: int = 1, batch_size: int = 2, seed: int | None = None, size: int = 12
) -> Any:
    """What jax's `data_iterator` makes, its batches as numpy's arrays."""
    from nvidia.dali.plugin.jax import data_iterator

    @data_iterator(output_map=["label", "random"], reader_name="Reader")
    def made() -> Any:
        options = {"random_shuffle": True, "initial_fill": 7, "shard_id": rank, "num_shards": world_size}
        files = [f"{root}/{number:03}.npy" for number in range(size)]
        return fn.readers.numpy(files=files, name="Reader", **options), fn.random.uniform(shape=[2])

    iterator = made(batch_size=batch_size, device_id=None, num_threads=1, seed=11)
    return midepoch.wrap(iterator, seed=seed, world=midepoch.World(rank, world_size), then=as_arrays)


def as_arrays(batch: Any) -> Any:
    return [{name: np.array(value) for name, value in batch.items()}]
