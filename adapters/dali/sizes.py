"""The sizes of a reader's encoded images: each image's header is read once, when its first random window is chosen."""

from __future__ import annotations

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, pipeline_def

from midepoch.adapters.dali.checkpointed import first_line
from midepoch.adapters.dali.feed import Data, Indices
from midepoch.errors import SourceError

__all__ = ["Sizes", "jpeg_size"]

_HEAD = 1 << 14  # bytes in which most JPEG files have their size, after a thumbnail and a colour profile
_THREADS = 16  # that wait for files at the same time, where opening one takes long
_LONG = 2e-4  # seconds; on a local disk it takes 10 µs, and threads would only be in each other's way
_AT_ONCE = 64  # images whose sizes DALI is asked for together


class Sizes:
    """Height and width of every image of one of a reader's outputs, as they are after decoding.

    Args:
        data: the reader's.
        output: which of its outputs.
    """

    def __init__(self, data: Data, output: int) -> None:
        self._data, self._output = data, output
        self._known = np.zeros((len(data), 2), np.int32)  # 0: not read yet
        self._pool: ThreadPoolExecutor | None = None  # once a file has taken long
        self._pipeline: Any = None

    def of(self, indices: Indices) -> npt.NDArray[np.int32]:
        """Heights and widths in pixels, of shape (len(indices), 2)."""
        found = self._known[indices]
        if not found.all():
            self._read(np.unique(indices[found[:, 0] == 0]))
            found = self._known[indices]
        return found

    def _read(self, indices: Indices) -> None:
        start = time.perf_counter()
        if self._pool is None:
            sizes = self._from_headers(indices)
            if time.perf_counter() - start > _LONG * len(indices):
                self._pool = ThreadPoolExecutor(_THREADS, "midepoch-sizes")
        else:
            parts = np.array_split(indices, _THREADS)
            sizes = [size for part in self._pool.map(self._from_headers, parts) for size in part]
        others = [index for index, size in zip(indices.tolist(), sizes, strict=True) if size is None]
        for index, size in zip(indices.tolist(), sizes, strict=True):
            if size is not None:
                self._known[index] = size
        for start in range(0, len(others), _AT_ONCE):
            self._ask_dali(others[start : start + _AT_ONCE])

    def _from_headers(self, indices: Indices) -> list[tuple[int, int] | None]:
        return [jpeg_size(self._content(index, _HEAD)) for index in indices.tolist()]

    def _content(self, index: int, most: int | None = None) -> bytes:
        try:
            return self._data.content(index, self._output, most)
        except OSError as error:
            raise SourceError(f"sample {index} ({self._data.name(index)}) cannot be read: {error.strerror}") from error

    def _ask_dali(self, indices: list[int]) -> None:
        """The sizes of images of other formats, or whose header has a form of its own."""
        contents = [np.frombuffer(self._content(index), np.uint8) for index in indices]
        try:
            if self._pipeline is None:
                self._pipeline = _peek()
            self._pipeline.feed_input("encoded", contents)
            self._known[indices] = np.asarray(self._pipeline.run()[0].as_tensor())[:, :2]
        except Exception as error:
            self._pipeline = None
            if len(indices) > 1:  # which of them it is
                for index in indices:
                    self._ask_dali([index])
                return
            raise SourceError(
                f"DALI cannot tell the size of sample {indices[0]} ({self._data.name(indices[0])}): {first_line(error)}"
            ) from error


@pipeline_def(batch_size=_AT_ONCE, num_threads=1, device_id=None, prefetch_queue_depth=1)  # type: ignore[untyped-decorator]
def _peek() -> Any:
    return fn.peek_image_shape(fn.external_source(name="encoded"))


def jpeg_size(head: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG image that is turned as its Exif orientation says.

    None where `head` does not tell all that comes before the image data, or where DALI's own reading is needed: with
    several sizes or several Exif segments.

    Source: ITU-T T.81, annex B (markers); Exif 2.3, 4.5 and 4.6 (orientation).
    """
    if head[:2] != b"\xff\xd8":
        return None
    place, sizes, orientations = 2, list[tuple[int, int]](), list[int | None]()
    try:
        while head[place] == 0xFF and (marker := head[place + 1]) != _START_OF_SCAN:
            if marker == 0xFF:  # padding
                place += 1
                continue
            length = head[place + 2] << 8 | head[place + 3]
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                sizes.append(struct.unpack_from(">HH", head, place + 5))
            elif marker == 0xE1 and head[place + 4 : place + 10] == b"Exif\0\0":
                orientations.append(_orientation(head[place + 10 : place + 2 + length]))
            place += 2 + length
        if head[place] != 0xFF or len(sizes) != 1 or not all(sizes[0]) or len(orientations) > 1 or None in orientations:
            return None
    except (IndexError, struct.error):
        return None
    (height, width), turned = sizes[0], any(each is not None and each > 4 for each in orientations)
    return (width, height) if turned else (height, width)


_START_OF_SCAN = 0xDA


def _orientation(exif: bytes) -> int | None:
    """The orientation, from 1 to 8; None if DALI's own reading of it is needed."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return None
    (directory,) = struct.unpack_from(order + "I", exif, 4)
    (count,) = struct.unpack_from(order + "H", exif, directory)
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, entry)
        if tag == 0x0112:
            return value if kind == 3 and 1 <= value <= 8 else None
    return 1
