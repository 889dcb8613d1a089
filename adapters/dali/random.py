"""Random parameters for each sample, keyed by (seed, epoch, position): the same on any world size, and after a resume.

Give them to DALI's operators in place of ``fn.random`` and of operators that draw by themselves:
``fn.crop_mirror_normalize(images, mirror=dali.random.coin_flip())``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn
from nvidia.dali import math as dali_math

from midepoch.adapters.dali.feed import current_feed, words

__all__ = ["coin_flip", "crop_window", "normal", "uniform"]

_Keys = npt.NDArray[np.uint64]


def uniform(range: tuple[float, float] = (-1.0, 1.0), shape: int | Sequence[int] = ()) -> Any:  # as DALI
    """As ``fn.random.uniform``: float32 in [range[0], range[1]), of this shape for each sample."""
    low, high = map(float, range)
    if not low < high:
        raise ValueError(f"range must be two numbers, the first the smaller one; got {range!r}")
    dimensions = _dimensions(shape)

    def values(keys: _Keys) -> tuple[Any, ...]:
        drawn = words(keys, math.prod(dimensions)).astype(np.float32) * np.float32(high - low) + np.float32(low)
        # Rounding may reach the upper end.
        return (np.minimum(drawn, np.nextafter(np.float32(high), np.float32(low))).reshape(len(keys), *dimensions),)

    return current_feed("dali.random.uniform").draw("uniform", 1, values)[0]


def normal(mean: float = 0.0, stddev: float = 1.0, shape: int | Sequence[int] = ()) -> Any:
    """As ``fn.random.normal``: float32, of this shape for each sample."""
    dimensions = _dimensions(shape)
    count = math.prod(dimensions)

    def values(keys: _Keys) -> tuple[Any, ...]:
        # Box and Muller, "A note on the generation of random normal deviates", 1958; 1 - u is never 0.
        drawn = words(keys, 2 * count).reshape(len(keys), count, 2)
        radius = np.sqrt(-2.0 * np.log(1.0 - drawn[..., 0]))
        found = mean + stddev * radius * np.cos(2.0 * np.pi * drawn[..., 1])
        return (found.astype(np.float32).reshape(len(keys), *dimensions),)

    return current_feed("dali.random.normal").draw("normal", 1, values)[0]


def coin_flip(probability: float = 0.5) -> Any:
    """As ``fn.random.coin_flip``: int32, 1 with this probability, else 0."""
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be in [0, 1], got {probability!r}")

    def values(keys: _Keys) -> tuple[Any, ...]:
        return ((words(keys, 1)[:, 0] < probability).astype(np.int32),)

    return current_feed("dali.random.coin_flip").draw("coin_flip", 1, values)[0]


def crop_window(
    encoded: Any,
    random_area: tuple[float, float] = (0.08, 1.0),
    random_aspect_ratio: tuple[float, float] = (0.75, 4 / 3),
) -> tuple[Any, Any]:
    """A random window of encoded images, as ``fn.decoders.image_random_crop`` cuts: (anchor, shape) of the decoder's.

    Use: ``fn.decoders.image_slice(encoded, *dali.random.crop_window(encoded), axis_names="HW")``.

    Area (of the image's, uniformly) and aspect ratio (width by height, on a logarithmic scale) are drawn up to ten
    times, until the window fits into the image; a tenth that does not is cut to it.

    Args:
        encoded: a node of encoded images, whose sizes are looked up in their headers.
        random_area: bounds, in (0, 1].
        random_aspect_ratio: bounds, more than 0.
    """
    (least, most), (narrow, wide) = random_area, random_aspect_ratio
    if not 0 < least <= most <= 1:
        raise ValueError(f"random_area must be two numbers in (0, 1], in order, got {random_area!r}")
    if not 0 < narrow <= wide:
        raise ValueError(f"random_aspect_ratio must be two positive numbers in order, got {random_aspect_ratio!r}")

    def values(keys: _Keys) -> tuple[Any, ...]:
        drawn = words(keys, 2 * _ATTEMPTS + 2)
        area = least + (most - least) * drawn[:, :_ATTEMPTS]
        ratio = np.exp(np.log(narrow) + (np.log(wide) - np.log(narrow)) * drawn[:, _ATTEMPTS:-2])
        # Height and width of windows in a square image of side 1.
        sides = np.stack([np.sqrt(area / ratio), np.sqrt(area * ratio)], axis=2)
        return sides.astype(np.float32), drawn[:, -2:].astype(np.float32)

    sides, place = current_feed("dali.random.crop_window").draw("crop_window", 2, values)
    found = fn.peek_image_shape(encoded)
    height, width = found[0], found[1]
    windows = sides * dali_math.sqrt(fn.stack(width, height) / fn.stack(height, width))
    # The first that fits has the highest score; the last one's is never 0.
    scores = dali_math.max((fn.reductions.max(windows, axes=1) <= 1.0) * _RANKS, _LAST)
    chosen = fn.reductions.max(windows * (fn.expand_dims(scores, axes=1) == fn.reductions.max(scores)), axes=0)
    shape = dali_math.min(chosen, 1.0)
    return place * (1.0 - shape), shape


_ATTEMPTS = 10
_RANKS = np.arange(_ATTEMPTS, 0, -1, dtype=np.float32)
_LAST = np.array([0.0] * (_ATTEMPTS - 1) + [0.5], dtype=np.float32)


def _dimensions(shape: int | Sequence[int]) -> tuple[int, ...]:
    dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(type(size) is not int or size < 1 for size in dimensions):
        raise ValueError(f"shape must be positive integers, got {shape!r}")
    return dimensions
