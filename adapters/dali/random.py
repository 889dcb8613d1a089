"""Random parameters for each sample, keyed by (seed, epoch, position): the same on any world size and after a resume.

Pass them to DALI's operators in place of ``fn.random`` and of operators that draw by themselves:
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
_Numbers = npt.NDArray[np.float64]


def uniform(range: tuple[float, float] = (-1.0, 1.0), shape: int | Sequence[int] = ()) -> Any:  # as DALI
    """As ``fn.random.uniform``: float32 in [range[0], range[1]), of this shape for each sample."""
    low, high = map(float, range)
    if not low < high:
        raise ValueError(f"range must be two numbers in increasing order, got {range!r}; swap or correct them")
    dimensions = _dimensions(shape)

    def values(keys: _Keys) -> tuple[Any, ...]:
        drawn = words(keys, math.prod(dimensions)).astype(np.float32) * np.float32(high - low) + np.float32(low)
        # Rounding may give the upper bound itself.
        return (np.minimum(drawn, np.nextafter(np.float32(high), np.float32(low))).reshape(len(keys), *dimensions),)

    return current_feed("dali.random.uniform").draw("uniform", 1, values)[0]


def normal(mean: float = 0.0, stddev: float = 1.0, shape: int | Sequence[int] = ()) -> Any:
    """As ``fn.random.normal``: float32, of this shape for each sample."""
    dimensions = _dimensions(shape)
    count = math.prod(dimensions)

    def values(keys: _Keys) -> tuple[Any, ...]:
        # Box and Muller, "A note on the generation of random normal deviates", 1958. 1 - u is never 0.
        drawn = words(keys, 2 * count).reshape(len(keys), count, 2)
        radius = np.sqrt(-2.0 * np.log(1.0 - drawn[..., 0]))
        found = mean + stddev * radius * np.cos(2.0 * np.pi * drawn[..., 1])
        return (found.astype(np.float32).reshape(len(keys), *dimensions),)

    return current_feed("dali.random.normal").draw("normal", 1, values)[0]


def coin_flip(probability: float = 0.5) -> Any:
    """As ``fn.random.coin_flip``: int32, 1 with this probability, otherwise 0."""
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be in [0, 1], got {probability!r}")

    def values(keys: _Keys) -> tuple[Any, ...]:
        return ((words(keys, 1)[:, 0] < probability).astype(np.int32),)

    return current_feed("dali.random.coin_flip").draw("coin_flip", 1, values)[0]


def crop_window(
    encoded: Any,
    random_area: tuple[float, float] = (0.08, 1.0),
    random_aspect_ratio: tuple[float, float] = (0.75, 4 / 3),
    num_attempts: int = 10,
) -> tuple[Any, Any]:
    """A random window of encoded images, as ``fn.decoders.image_random_crop`` chooses it: (anchor, shape).

    Use: ``fn.decoders.image_slice(encoded, *dali.random.crop_window(encoded), axis_names="HW")``.

    The area (a fraction of the image's, uniform) and the aspect ratio (width to height, log-uniform) are drawn up to
    `num_attempts` times, until the window fits into the image. If the last does not fit, it is cut to the image.

    Args:
        encoded: a node of encoded images. Their sizes are read from their headers.
        random_area: bounds of the area, in (0, 1].
        random_aspect_ratio: bounds of the aspect ratio, greater than 0.
        num_attempts: in [1, 1000]. Another number gives other windows.
    """
    (least, most), (narrow, wide) = random_area, random_aspect_ratio
    if not 0 < least <= most <= 1:
        raise ValueError(f"random_area must be two numbers in (0, 1], in increasing order, got {random_area!r}")
    if not 0 < narrow <= wide:
        raise ValueError(
            f"random_aspect_ratio must be two positive numbers in increasing order, got {random_aspect_ratio!r}"
        )

    if type(num_attempts) is not int or not 1 <= num_attempts <= 1000:
        raise ValueError(f"num_attempts must be an int in [1, 1000], got {num_attempts!r}")

    def values(keys: _Keys) -> tuple[Any, ...]:
        drawn = words(keys, 2 * num_attempts + 2)
        area = least + (most - least) * drawn[:, :num_attempts]
        ratio = np.exp(np.log(narrow) + (np.log(wide) - np.log(narrow)) * drawn[:, num_attempts:-2])
        bounds, sides = _first_that_fit(area, ratio)
        return sides.astype(np.float32), bounds.astype(np.float32), drawn[:, -2:].astype(np.float32)

    # A DALI operator costs 70 µs a batch even on arrays as small as these, so as few as possible are used.
    sides, bounds, place = current_feed("dali.random.crop_window").draw("crop_window", 3, values)
    found = fn.peek_image_shape(encoded)
    proportion = found[1] / found[0]
    counts = np.arange(1, 2 * num_attempts + 1, dtype=np.int32)
    chosen = sides[fn.reductions.max((proportion > bounds) * counts)]  # indexed by the number of bounds below
    shape = dali_math.min(chosen * dali_math.pow(proportion, _TO_SIDES), 1.0)
    return place * (1.0 - shape), shape


_TO_SIDES = np.array([0.5, -0.5], dtype=np.float32)


def _first_that_fit(area: _Numbers, ratio: _Numbers) -> tuple[_Numbers, _Numbers]:
    """For each sample, the first window that fits, as a function of the image's proportion (width to height).

    A window fits into an image of proportion q if area * ratio <= q <= ratio / area. So between two consecutive bounds
    the first window that fits is always the same. Where none fits, the last window is used.

    Returns:
        Bounds of shape (n, 2 * attempts), in increasing order; and the height and width of the window below the first
        bound, between the first and the second, ..., above the last, for an image of side 1, of shape
        (n, 2 * attempts + 1, 2).
    """
    lower, upper = area * ratio, ratio / area
    bounds = np.sort(np.concatenate([lower, upper], axis=1), axis=1)
    between = np.concatenate([bounds[:, :1] / 2, np.sqrt(bounds[:, :-1] * bounds[:, 1:]), bounds[:, -1:] * 2], axis=1)
    fits = (lower[:, np.newaxis] <= between[:, :, np.newaxis]) & (between[:, :, np.newaxis] <= upper[:, np.newaxis])
    first = np.where(fits.any(axis=2), fits.argmax(axis=2), area.shape[1] - 1)
    of_each = np.stack([np.sqrt(area / ratio), np.sqrt(area * ratio)], axis=2)
    return bounds, np.take_along_axis(of_each, first[:, :, np.newaxis], axis=1)


def _dimensions(shape: int | Sequence[int]) -> tuple[int, ...]:
    dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(type(size) is not int or size < 1 for size in dimensions):
        raise ValueError(f"shape must be a positive integer or a sequence of them, got {shape!r}")
    return dimensions
