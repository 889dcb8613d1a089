"""The demonstration's data: scikit-learn's scanned handwritten digits, as JPEG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

__all__ = ["AVAILABLE", "SIDE", "label_of", "write_images"]

AVAILABLE = 1797  # number of digits that scikit-learn ships
SIDE = 32  # side of the images in pixels; the scans have 8


def write_images(folder: Path, count: int) -> list[Path]:
    """Write the first `count` digits as grey JPEG files of SIDE x SIDE pixels, named by number and label.

    Raises:
        ValueError: `count` is not in [1, AVAILABLE].
    """
    if not 1 <= count <= AVAILABLE:
        raise ValueError(f"count must be in [1, {AVAILABLE}], got {count}")
    folder.mkdir(parents=True)
    digits = load_digits()
    paths = []
    for number, (scan, label) in enumerate(zip(digits.images[:count], digits.target[:count], strict=True)):
        # The scans' values are 0 to 16.
        image = Image.fromarray(np.round(scan * (255 / 16)).astype(np.uint8))
        path = folder / f"{number:04d}-{label}.jpg"
        image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path, quality=90)
        paths.append(path)
    return paths


def label_of(path: Path) -> int:
    """The digit in a file, in [0, 10), from its name."""
    return int(path.stem.rpartition("-")[2])
