"""A DALI pipeline fed by midepoch: two ranks are interrupted, three go on, and every image is the same bit for bit."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from PIL import Image

import midepoch
from midepoch.adapters import dali


def augment(encoded: Any) -> Any:
    images = fn.decoders.image_slice(encoded, *dali.random.crop_window(encoded), axis_names="HW")
    return fn.crop_mirror_normalize(fn.resize(images, size=32), mirror=dali.random.coin_flip())


@pipeline_def(batch_size=4, num_threads=2, device_id=dali.device_id())
def train(paths: list[str]) -> Any:
    encoded, number = dali.readers.file(files=paths, random_shuffle=True)
    return augment(encoded), number


def make_loader(paths: list[str], world: midepoch.World | None = None) -> Any:  # in a job, leave world out
    return midepoch.wrap(DALIGenericIterator([train(paths)], ["data", "number"]), seed=0, world=world)


def read(loader: Any, into: dict[int, torch.Tensor], batches: int) -> None:
    for _, (batch,) in zip(range(batches), loader, strict=False):
        for number, image in zip(batch["number"].flatten().tolist(), batch["data"], strict=True):
            assert number not in into, f"image {number} came twice"
            into[number] = image


def main() -> None:
    generator, folder = np.random.default_rng(0), tempfile.mkdtemp()
    paths = [f"{folder}/{number:02}.jpg" for number in range(60)]
    for path in paths:
        Image.fromarray(generator.integers(0, 255, (40, 40, 3), np.uint8)).save(path)
    whole, elastic = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    read(make_loader(paths, midepoch.World(0, 1)), whole, 99)
    two = [make_loader(paths, midepoch.World(rank, 2)) for rank in range(2)]
    for loader in two:
        read(loader, elastic, 3)
    for loader in (make_loader(paths, midepoch.World(rank, 3)) for rank in range(3)):
        loader.load_state_dict(two[0].state_dict())  # any one rank's
        read(loader, elastic, 99)
    same = len(elastic) == 60 and all(torch.equal(whole[number], elastic[number]) for number in whole)
    print(f"{len(elastic)} images on 2 and then 3 ranks, each once, equal to those of one process bit for bit: {same}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
