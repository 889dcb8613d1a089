"""An FFCV Loader that is interrupted in the middle of an epoch; another one goes on, with the same pixels."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import Cutout, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter

import midepoch


class Images:
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        return np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8), index


def make_loader(path: str) -> midepoch.StatefulIterable:
    image = [RandomResizedCropRGBImageDecoder((24, 24)), Cutout(6), ToTensor(), ToTorchImage()]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor()]}
    source = Loader(path, batch_size=8, num_workers=1, order=OrderOption.RANDOM, pipelines=pipelines)
    return midepoch.wrap(source, seed=0)


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    path, checkpoint = str(folder / "images.beton"), folder / "data.json"
    writer = DatasetWriter(path, {"image": RGBImageField(), "label": IntField()}, num_workers=1, page_size=1 << 21)
    writer.from_indexed_dataset(Images())

    # A batch lies in buffers that FFCV uses again: clone what is to be kept.
    whole = [image.clone() for image, _ in make_loader(path)]

    loader = make_loader(path)
    for _ in zip(range(2), loader, strict=False):
        checkpoint.write_text(json.dumps(loader.state_dict()))
    # The job dies here.
    loader = make_loader(path)
    loader.load_state_dict(json.loads(checkpoint.read_text()))
    rest = [image.clone() for image, _ in loader]
    same = len(rest) == 4 and all(torch.equal(a, b) for a, b in zip(rest, whole[2:], strict=True))
    print(f"resumed at batch 3 of 6; the other 4 are {'bit-equal' if same else 'DIFFERENT'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
