"""A DALI iterator as its user has it, wrapped: it is interrupted in the middle of an epoch and goes on bit for bit."""

from __future__ import annotations

import json
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

IMAGES = Path(tempfile.mkdtemp())


@pipeline_def(batch_size=8, num_threads=2, device_id=None, seed=12)
def train() -> Any:
    encoded, labels = fn.readers.file(file_root=str(IMAGES), random_shuffle=True, name="Reader")
    images = fn.decoders.image_random_crop(encoded)
    images = fn.resize(images, resize_x=32, resize_y=32)
    return fn.crop_mirror_normalize(images, crop=(28, 28), mirror=fn.random.coin_flip()), labels


def make_loader() -> midepoch.Loader:
    return midepoch.wrap(DALIGenericIterator([train()], ["data", "label"], reader_name="Reader"))


def main() -> None:
    for number in range(64):
        path = IMAGES / f"class{number % 4}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 4 * number, np.uint8)).save(path)

    whole = [batch[0]["data"] for batch in make_loader()]
    loader = make_loader()
    for number, _ in enumerate(loader, loader.batches_done + 1):
        checkpoint = json.dumps(loader.state_dict())
        if number == 5:
            break  # the job dies here

    loader = make_loader()
    loader.load_state_dict(json.loads(checkpoint))
    rest = [batch[0]["data"] for batch in loader]
    same = len(rest) == 3 and all(torch.equal(a, b) for a, b in zip(rest, whole[5:], strict=True))
    print(f"resumed at batch 6 of 8 from {len(checkpoint)} bytes; the rest is equal bit for bit: {same}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
