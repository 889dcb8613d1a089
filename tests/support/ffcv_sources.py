"""Small .beton files, FFCV Loaders over them, and factories for the laws. Each process compiles a pipeline once."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before numba is imported: it refuses more threads than it was started with, and the machine may have two cores.
os.environ.setdefault("NUMBA_NUM_THREADS", "4")

import cv2
import numpy as np
import numpy.typing as npt
import torch
from ffcv.fields import BytesField, IntField, NDArrayField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.pipeline.operation import Operation
from ffcv.transforms import Cutout, ImageMixup, LabelMixup, RandomResizedCrop, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter

sys.path.insert(0, str(Path(__file__).parents[1]))

import midepoch
from midepoch.world import Tail
from support import forking

SIZE, BATCH = 22, 4
_FOLDER = "MIDEPOCH_FFCV_FILES"  # where this process and those that it spawns find the files

ORDERS = {"random": OrderOption.RANDOM, "sequential": OrderOption.SEQUENTIAL, "quasi": OrderOption.QUASI_RANDOM}


class Images:
    """Images of one size or of several, with their number."""

    def __init__(self, size: int, side: int, varied: bool = False, content: int = 0) -> None:
        self.size, self.side, self.varied, self.content = size, side, varied, content

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        generator = np.random.default_rng([self.content, index])
        sides = generator.integers(self.side, self.side + 9, 2) if self.varied else (self.side, self.side)
        coarse = generator.integers(0, 256, (4, 4, 3)).astype(np.uint8)
        image = cv2.resize(coarse, (int(sides[0]), int(sides[1])), interpolation=cv2.INTER_CUBIC)
        return np.asarray(image, dtype=np.uint8), index


def write(path: Path, dataset: Any, fields: dict[str, Any]) -> Path:
    DatasetWriter(str(path), fields, num_workers=1, page_size=1 << 21).from_indexed_dataset(dataset)
    return path


def folder() -> Path:
    if _FOLDER not in os.environ:
        made = tempfile.mkdtemp(prefix="midepoch-ffcv-")
        os.environ[_FOLDER] = made
        atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(os.environ[_FOLDER])


@functools.cache
def file(kind: str = "jpeg") -> str:
    """The path of a file, written by the first process that asks."""
    path = folder() / f"{kind}.beton"
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}")
        # FFCV's writer forks, which a process that has run compiled code on several threads may not survive.
        forking.run([__file__, kind, draft], modules=forking.IMPORTED, check=True)
        draft.replace(path)
    return str(path)


def write_kind(kind: str, path: Path) -> None:
    texts = [(np.full(1 + (7 * index) % 23, index + 1, dtype=np.uint8), index) for index in range(SIZE)]
    arrays = [(np.full(6, index, dtype=np.float32), index) for index in range(SIZE)]
    found: tuple[Any, str, Any] = {
        "jpeg": (Images(SIZE, 16, varied=True), "image", RGBImageField(write_mode="jpg")),
        "text": (texts, "text", BytesField()),
        "arrays": (arrays, "array", NDArrayField(np.dtype("<f4"), (6,))),
        "pages": (Images(40, 590), "image", RGBImageField()),  # each image is half a page
        "other": (Images(SIZE, 16, content=1), "image", RGBImageField()),
        "raw": (Images(SIZE, 16), "image", RGBImageField()),
    }[kind]
    dataset, name, field = found
    write(path, dataset, {name: field, "label": IntField()})


def readme_pipelines() -> dict[str, Any]:
    """FFCV's readme, without its ToDevice."""
    image = [RandomResizedCropRGBImageDecoder((12, 12)), Cutout(3), ToTensor(), ToTorchImage()]
    return {"image": image, "label": [IntDecoder(), ToTensor()]}


def plain_pipelines() -> dict[str, Any]:
    return {"image": [SimpleRGBImageDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]}


PIPELINES: dict[str, Callable[[], dict[str, Any]]] = {
    "readme": readme_pipelines,
    "plain": plain_pipelines,
    "mixed": lambda: {
        "image": [SimpleRGBImageDecoder(), ImageMixup(0.4, False), ToTensor()],
        "label": [IntDecoder(), LabelMixup(0.4, False), ToTensor()],
    },
    # One random operation, compiled in a third of the time that those take which draw arrays.
    "light": lambda: {
        "image": [SimpleRGBImageDecoder(), RandomResizedCrop((0.5, 1.0), (0.75, 1.3), 12), ToTensor(), ToTorchImage()],
        "label": [IntDecoder(), ToTensor()],
    },
}


def make(pipelines: dict[str, Any] | None = None, path: str | None = None, **options: Any) -> Any:
    options = {"batch_size": BATCH, "num_workers": 1, "order": OrderOption.RANDOM, "drop_last": False, **options}
    return Loader(path or file("raw"), pipelines=plain_pipelines() if pipelines is None else pipelines, **options)


@functools.cache
def shared(pipelines: str, kind: str, order: str, subset: bool, **options: Any) -> Any:
    """The same Loader again: constructing one costs a quarter of a second, and wrapping leaves it as it is."""
    indices = [index for index in range(SIZE) if index % 5] if subset else None
    return make(PIPELINES[pipelines](), file(kind), order=ORDERS[order], seed=5, indices=indices, **options)


def load(
    rank: int = 0, world_size: int = 1, num_workers: int = 1, batch_size: int = BATCH, seed: int = 3, *,
    pipelines: str = "readme", kind: str = "jpeg", order: str = "random", os_cache: bool = True,
    drop_last: bool = False, subset: bool = False, tail: Tail | None = None,
) -> Any:  # fmt: skip
    loader = shared(
        pipelines, kind, order, subset, os_cache=os_cache, drop_last=drop_last, num_workers=num_workers,
        batch_size=batch_size, batches_ahead=2,
    )  # fmt: skip
    return midepoch.wrap(loader, seed=seed, world=midepoch.World(rank, world_size), tail=tail)


plain_load = functools.partial(load, pipelines="plain", kind="raw")
quick_load = functools.partial(load, pipelines="light", kind="raw")


def identify(batch: Any) -> list[int]:
    return [int(label) for label in batch[1].reshape(len(batch[1]), -1)[:, 0]]


# --- operations of a user's own ---


class Noise(Operation):  # type: ignore[misc]
    """Adds noise from both of the generators that compiled code has."""

    def generate_code(self) -> Callable[..., Any]:
        import random

        def noise(images: Any, memory: Any) -> Any:
            for i in range(images.shape[0]):
                memory[i] = images[i] // 2 + np.random.randint(60) + int(random.random() * 60)
            return memory

        return noise

    def declare_state_and_memory(self, previous_state: Any) -> Any:
        from ffcv.pipeline.allocation_query import AllocationQuery

        return previous_state, AllocationQuery(previous_state.shape, previous_state.dtype)


class UndeclaredNoise(Noise):
    """The same, which nobody declares."""


class Fails(Operation):  # type: ignore[misc]
    """Raises at the batch that holds one sample, as long as it is asked to."""

    def __init__(self, sample: int) -> None:
        super().__init__()
        self.sample, self.fails = sample, True

    def generate_code(self) -> Callable[..., Any]:
        def fail(labels: Any, memory: Any) -> Any:
            if self.fails and (labels == self.sample).any():
                raise OSError("the network is gone")
            return labels

        return fail

    def declare_state_and_memory(self, previous_state: Any) -> Any:
        return previous_state, None


class Jitter(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float() + torch.rand(len(images), 1, 1, 1)


if __name__ == "__main__":
    write_kind(sys.argv[1], Path(sys.argv[2]))
