"""What midepoch adds on a GPU: DALI with its own and with midepoch's readers, FFCV, and a training step.

Run ``python benchmarks/gpu.py crops`` (or dali, ffcv, load, step; none for all). Loaders take alternated rounds of one
epoch in one process; reported are medians, and the mean of the rounds' ratios with its interval. Prints Markdown;
docs/benchmarks has its output with the date. Without a GPU it measures the processor.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import between, machine
from torch.utils.data import DataLoader, Dataset

import midepoch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
CORES = os.cpu_count() or 1


def ready() -> float:
    """The time, once the device has done all its work."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def pace(loader: Iterable[Any], use: Callable[[Any], object] = lambda batch: None, warm: int = 0) -> float:
    """Seconds that one batch of an epoch takes, without the first `warm`."""
    start, count = ready(), 0
    for number, batch in enumerate(loader, 1):
        use(batch)
        count += 1
        if number == warm:
            start, count = ready(), 0
    return (ready() - start) / count


def compare(
    loaders: dict[str, Any], batch: int, rounds: int, use: Callable[[Any], object] = lambda batch: None, warm: int = 0
) -> None:
    """Print a row for each loader. The first is what the others are compared with."""
    names = list(loaders)
    for loader in loaders.values():
        pace(loader, use, warm)
    paces: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else names[::-1]:
            paces[name].append(pace(loaders[name], use, warm))
    print("\n| | samples a second | ms a batch | speed, as a ratio to the first row (95 %) |")
    print("|---|---|---|---|")
    for name in names:
        middle = statistics.median(paces[name])
        ratio = between([bare / own for bare, own in zip(paces[names[0]], paces[name], strict=True)])
        compared = "1" if name == names[0] else str(ratio)
        print(f"| {name} | {batch / middle:,.0f} | {middle * 1e3:.2f} | {compared} |", flush=True)


# --- DALI -------------------------------------------------------------------------------------------------------------


def write_image(number: int, folder: Path, height: int, width: int) -> None:
    from PIL import Image

    drawn = np.random.default_rng(number)
    coarse = drawn.integers(0, 256, (height // 24 + 1, width // 24 + 1, 3), np.uint8)
    shapes = np.kron(coarse, np.ones((24, 24, 1), np.uint8))[:height, :width] // 2
    noise = drawn.integers(0, 128, (height, width, 3), np.uint8)
    Image.fromarray(shapes + noise).save(folder / str(number % 10) / f"{number:06}.jpg", quality=85)


def images(folder: Path, count: int, height: int, width: int) -> str:
    for number in range(10):
        (folder / str(number)).mkdir(parents=True)
    write = functools.partial(write_image, folder=folder, height=height, width=width)
    with multiprocessing.get_context("spawn").Pool(CORES) as pool:
        pool.map(write, range(count), chunksize=64)
    return str(folder)


def iterator(root: str, batch: int, kind: str) -> Any:
    """A DALI iterator: "theirs", "ours" with random windows, or midepoch's reader with "DALI's crop"."""
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    from midepoch.adapters import dali

    decode = {"device": "mixed" if GPU else "cpu"}
    options = {"batch_size": batch, "num_threads": max(2, CORES - 4), "device_id": dali.device_id()}

    @pipeline_def(seed=7, **options)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        if kind == "theirs":
            encoded, label = fn.readers.file(file_root=root, random_shuffle=True, name="Reader")
            mirror = fn.random.coin_flip()
        else:
            encoded, label = dali.readers.file(root, random_shuffle=True)
            mirror = dali.random.coin_flip()
        if kind == "ours":
            decoded = fn.decoders.image_slice(encoded, *dali.random.crop_window(encoded), axis_names="HW", **decode)
        else:
            decoded = fn.decoders.image_random_crop(encoded, **decode)
        resized = fn.resize(decoded, resize_x=256, resize_y=256)
        mean, deviation = [123.7, 116.3, 103.5], [58.4, 57.1, 57.4]
        image = fn.crop_mirror_normalize(resized, crop=(224, 224), mean=mean, std=deviation, mirror=mirror)
        return image, label.gpu() if GPU else label

    given = {"reader_name": "Reader", "auto_reset": True} if kind == "theirs" else {}
    return DALIGenericIterator([pipeline()], ["data", "label"], **given)


class Unread:
    """A loader with midepoch's windows, each of whose epochs reads the images' sizes, as the first one does."""

    def __init__(self, source: Any) -> None:
        from midepoch.adapters.dali.feed import feed_of

        feed = feed_of(source._pipes[0])
        assert feed is not None
        self.sizes, self.loader = feed.images[0][1], midepoch.wrap(source, seed=7)

    def __iter__(self) -> Any:
        self.sizes._known[:] = 0
        return iter(self.loader)


def crops(rounds: int, scale: float) -> None:
    """Random crop, resize, mirror: where midepoch's windows are fed, and where DALI chooses its own."""
    import nvidia.dali

    with tempfile.TemporaryDirectory() as folder:
        root = images(Path(folder, "large"), max(256, int(6144 * scale)), 375, 500)
        pace(iterator(root, 256, "theirs"))  # what the first use of the device costs is nobody's
        for batch in (256, 16):
            print(f"\nDALI {nvidia.dali.__version__}, 500 x 375 JPEG, random crop, resize, mirror, batches of {batch}:")
            compare(
                {
                    "DALI's reader and crop": iterator(root, batch, "theirs"),
                    "midepoch's reader and windows": midepoch.wrap(iterator(root, batch, "ours"), seed=7),
                    "the same, in the first epoch": Unread(iterator(root, batch, "ours")),
                    "midepoch's reader, DALI's crop": midepoch.wrap(iterator(root, batch, "DALI's crop"), seed=7),
                },
                batch,
                rounds,
            )


def dali(rounds: int, scale: float) -> None:
    """DALI iterators as they are, and small images, of which a batch takes a millisecond."""
    with tempfile.TemporaryDirectory() as folder:
        large = images(Path(folder, "large"), max(256, int(6144 * scale)), 375, 500)
        pace(iterator(large, 256, "theirs"))
        small = images(Path(folder, "small"), max(64, int(3072 * scale)), 96, 128)
        for name, root, batch in (("500 x 375", large, 256), ("128 x 96", small, 16)):
            print(f"\nDALI, {name} JPEG, random crop, resize, mirror, batches of {batch}:")
            compare(
                {
                    "DALI": iterator(root, batch, "theirs"),
                    "the same, wrapped": midepoch.wrap(iterator(root, batch, "theirs"), seed=7),
                    "midepoch's reader and windows": midepoch.wrap(iterator(root, batch, "ours"), seed=7),
                },
                batch,
                rounds,
            )


# --- FFCV -------------------------------------------------------------------------------------------------------------


class Squares:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[np.ndarray[Any, Any], int]:
        coarse = np.random.default_rng(number).integers(0, 256, (8, 10, 3), np.uint8)
        return np.kron(coarse, np.ones((32, 32, 1), np.uint8)), number


def ffcv(rounds: int, scale: float) -> None:
    """A random resized crop and a flip on the processor, then on the device."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToDevice, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/squares.beton"
        writer = DatasetWriter(path, {"image": RGBImageField(write_mode="jpg"), "label": IntField()}, num_workers=1)
        writer.from_indexed_dataset(Squares(max(128, int(8192 * scale))))

        def loader() -> Any:
            decode = RandomResizedCropRGBImageDecoder((128, 128))
            image = [decode, RandomHorizontalFlip(), ToTensor(), ToDevice(DEVICE, non_blocking=True), ToTorchImage()]
            label = [IntDecoder(), ToTensor(), ToDevice(DEVICE), Squeeze()]
            pipelines = {"image": image, "label": label}
            return Loader(
                path, 64, num_workers=max(2, CORES - 4), order=OrderOption.RANDOM, pipelines=pipelines, seed=4
            )

        print("\nFFCV, 320 x 256 JPEG, random resized crop, flip, to the device, batches of 64:")
        compare({"FFCV": loader(), "wrapped": midepoch.wrap(loader(), seed=4)}, 64, rounds)


# --- a training step --------------------------------------------------------------------------------------------------


class Decoded(Dataset[tuple[torch.Tensor, int]]):
    """Images in memory, cropped and flipped by torch."""

    def __init__(self, count: int) -> None:
        self.images, self.count = torch.randint(0, 255, (512, 3, 256, 256), dtype=torch.uint8), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        top, left = torch.randint(0, 33, (2,)).tolist()
        image = self.images[index % 512][:, top : top + 224, left : left + 224]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image).contiguous(), index % 1000


def load(rounds: int, scale: float) -> None:
    """A DataLoader whose batches are only moved to the device."""
    batch, workers = (256, CORES - 2) if GPU else (8, 2)
    print(f"\nLoading alone, batches of {batch}, {workers} workers, random crop and flip by torch:")
    _compare_loaders(batch, workers, int(60 * scale), rounds, lambda pair: pair[0].to(DEVICE, non_blocking=True))


def step(rounds: int, scale: float) -> None:
    """A DataLoader and a ResNet-50 in bfloat16."""
    torchvision: Any = importlib.import_module("torchvision")

    batch, workers = (256, CORES - 2) if GPU else (8, 2)
    model = torchvision.models.resnet50().to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.backends.cudnn.benchmark = True

    def train(pair: Any) -> None:
        image, label = (part.to(DEVICE, non_blocking=True) for part in pair)
        image = image.to(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    print(f"\nA ResNet-50 step, batches of {batch}, {workers} workers, random crop and flip by torch:")
    _compare_loaders(batch, workers, int(45 * scale), rounds, train)


def _compare_loaders(batch: int, workers: int, steps: int, rounds: int, use: Callable[[Any], object]) -> None:
    data = Decoded(batch * max(8, steps))

    def loader() -> Any:
        ahead: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4}
        return DataLoader(data, batch, shuffle=True, num_workers=workers, pin_memory=GPU, drop_last=True, **ahead)

    with midepoch.wrap(loader(), seed=0) as wrapped:
        compare({"DataLoader": loader(), "wrapped": wrapped}, batch, rounds, use, warm=5)


QUESTIONS = {"crops": crops, "dali": dali, "ffcv": ffcv, "load": load, "step": step}


def main() -> None:
    """Answer the questions that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="question", help=", ".join(QUESTIONS))
    parser.add_argument("--rounds", type=int, default=9, help="alternated epochs of each loader")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the data; 0.01 for a dry run")
    given = parser.parse_args()
    if unknown := set(given.questions) - set(QUESTIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(QUESTIONS)}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    card = torch.cuda.get_device_name(0) if GPU else "no GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    print(f"{card}, {machine()}, {versions}")
    for name in given.questions or QUESTIONS:
        QUESTIONS[name](given.rounds, given.scale)


if __name__ == "__main__":
    main()
