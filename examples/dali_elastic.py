"""A DALI pipeline fed by midepoch: two ranks are interrupted, three go on, and every image is the same bit for bit."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from PIL import Image

import midepoch
from midepoch.adapters import dali

IMAGES = Path(tempfile.mkdtemp())


@pipeline_def(batch_size=4, num_threads=2, device_id=dali.device_id())
def train(paths: list[str]) -> Any:
    encoded, number = dali.readers.file(files=paths, random_shuffle=True)
    images = fn.decoders.image_slice(encoded, *dali.random.crop_window(encoded), axis_names="HW")
    images = fn.resize(images, resize_x=32, resize_y=32)
    return fn.crop_mirror_normalize(images, mirror=dali.random.coin_flip()), number


def make_loader(rank: int, world_size: int) -> Any:
    source = DALIGenericIterator([train(sorted(map(str, IMAGES.glob("*.jpg"))))], ["data", "number"])
    return midepoch.wrap(source, seed=0, world=midepoch.World(rank, world_size))  # in a job, leave world out


def read(loader: Any, into: dict[int, torch.Tensor], batches: int) -> None:
    for _, (batch,) in zip(range(batches), loader, strict=False):
        for number, image in zip(batch["number"].flatten().tolist(), batch["data"], strict=True):
            assert number not in into, f"image {number} came twice"
            into[number] = image


def main() -> None:
    generator = np.random.default_rng(0)
    for number in range(60):
        Image.fromarray(generator.integers(0, 255, (40, 40, 3), np.uint8)).save(IMAGES / f"{number:02}.jpg")
    whole, elastic = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    read(make_loader(0, 1), whole, 99)
    two = [make_loader(rank, 2) for rank in range(2)]
    for loader in two:
        read(loader, elastic, 3)
    for loader in (make_loader(rank, 3) for rank in range(3)):
        loader.load_state_dict(two[0].state_dict())  # any one rank's
        read(loader, elastic, 99)
    same = len(elastic) == 60 and all(torch.equal(whole[number], elastic[number]) for number in whole)
    print(f"{len(elastic)} images on 2 and then 3 ranks, each once, equal to those of one process bit for bit: {same}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
