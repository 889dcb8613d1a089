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

from midepoch.adapters.dali.feed import Indices, Keys, as_written, current_feed, words
from midepoch.errors import UnsupportedSourceError

__all__ = ["coin_flip", "crop_window", "normal", "uniform"]

_Numbers = npt.NDArray[np.float64]


@as_written
def uniform(range: tuple[float, float] = (-1.0, 1.0), shape: int | Sequence[int] = ()) -> Any:  # as DALI
    """As ``fn.random.uniform``: float32 in [range[0], range[1]), of this shape for each sample."""
    low, high = map(float, range)
    if not low < high:
        raise ValueError(f"range must be two numbers in increasing order, got {range!r}; swap or correct them")
    dimensions = _dimensions(shape)

    def values(keys: Keys, _: Indices) -> tuple[Any, ...]:
        drawn = words(keys, math.prod(dimensions)).astype(np.float32) * np.float32(high - low) + np.float32(low)
        # Rounding may give the upper bound itself.
        return (np.minimum(drawn, np.nextafter(np.float32(high), np.float32(low))).reshape(len(keys), *dimensions),)

    return current_feed("dali.random.uniform").draw("uniform", 1, values)[0]


@as_written
def normal(mean: float = 0.0, stddev: float = 1.0, shape: int | Sequence[int] = ()) -> Any:
    """As ``fn.random.normal``: float32, of this shape for each sample."""
    dimensions = _dimensions(shape)
    count = math.prod(dimensions)

    def values(keys: Keys, _: Indices) -> tuple[Any, ...]:
        # Box and Muller, "A note on the generation of random normal deviates", 1958. 1 - u is never 0.
        drawn = words(keys, 2 * count).reshape(len(keys), count, 2)
        radius = np.sqrt(-2.0 * np.log(1.0 - drawn[..., 0]))
        found = mean + stddev * radius * np.cos(2.0 * np.pi * drawn[..., 1])
        return (found.astype(np.float32).reshape(len(keys), *dimensions),)

    return current_feed("dali.random.normal").draw("normal", 1, values)[0]


@as_written
def coin_flip(probability: float = 0.5) -> Any:
    """As ``fn.random.coin_flip``: int32, 1 with this probability, otherwise 0."""
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be in [0, 1], got {probability!r}")

    def values(keys: Keys, _: Indices) -> tuple[Any, ...]:
        return ((words(keys, 1)[:, 0] < probability).astype(np.int32),)

    return current_feed("dali.random.coin_flip").draw("coin_flip", 1, values)[0]


@as_written
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

    The windows are chosen in Python from the images' sizes. A size is read from the image's header when its first
    window is chosen, so in the first epoch after a start each file is opened twice. A file that is replaced by an image
    of another size, while the process runs, keeps the size that it had.

    Args:
        encoded: what one of midepoch's readers gave.
        random_area: bounds of the area, in (0, 1].
        random_aspect_ratio: bounds of the aspect ratio, greater than 0.
        num_attempts: in [1, 1000]. Another number gives other windows.

    Raises:
        UnsupportedSourceError: `encoded` comes from elsewhere.
        ValueError: another argument is out of its range.
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
    feed = current_feed("dali.random.crop_window")
    sizes = next((sizes for node, sizes in feed.images if node is encoded), None)
    if sizes is None:
        raise UnsupportedSourceError(
            "crop_window knows the sizes of what midepoch's readers give, and this is another node: pass it the first "
            "output of dali.readers.file, or an output of dali.readers.webdataset, as it is"
        )

    def values(keys: Keys, indices: Indices) -> tuple[Any, ...]:
        drawn = words(keys, 2 * num_attempts + 2)
        area = least + (most - least) * drawn[:, :num_attempts]
        log_ratio = math.log(narrow) + math.log(wide / narrow) * drawn[:, num_attempts:-2]
        shape = _first_that_fits(area, log_ratio, sizes.of(indices))
        return (drawn[:, -2:] * (1.0 - shape)).astype(np.float32), shape.astype(np.float32)

    anchor, shape = feed.draw("crop_window", 2, values)
    return anchor, shape


def _first_that_fits(area: _Numbers, log_ratio: _Numbers, sizes: npt.NDArray[np.int32]) -> _Numbers:
    """For each of n images, the first of its windows that fits into it; if none does, the last, cut to the image.

    Args:
        area: of each attempt, a fraction of the image's, of shape (n, attempts).
        log_ratio: of each attempt, the logarithm of width to height, of shape (n, attempts).
        sizes: heights and widths of the images, of shape (n, 2).

    Returns:
        Heights and widths as fractions of the image's, of shape (n, 2).
    """
    # A window has height sqrt(area / skew) and width sqrt(area * skew), where skew is its ratio over the image's.
    log_skew = log_ratio - np.log(sizes[:, 1] / sizes[:, 0])[:, np.newaxis]
    fits = np.log(area) + np.abs(log_skew) <= 0
    rows, first = np.arange(len(area)), fits.argmax(axis=1)
    first[~fits[rows, first]] = area.shape[1] - 1
    chosen, skew = area[rows, first], np.exp(log_skew[rows, first])
    sides = np.sqrt(np.stack([chosen / skew, chosen * skew], axis=1))
    whole: _Numbers = np.clip(sides, 1.0 / sizes, 1.0)  # a pixel at least
    return whole


def _dimensions(shape: int | Sequence[int]) -> tuple[int, ...]:
    dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(type(size) is not int or size < 1 for size in dimensions):
        raise ValueError(f"shape must be a positive integer or a sequence of them, got {shape!r}")
    return dimensions
