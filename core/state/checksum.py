"""A short checksum of any item."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["checksum_of"]

_SAMPLED_BYTES = 4096


def checksum_of(item: object) -> str:
    """Eight hexadecimal digits of an item: of its structure, types, shapes, and up to 4 KiB of each array.

    Its cost is bounded whatever the item's size, so it can be taken of every batch. It is no proof of equality.
    """
    return f"{_crc(item, 0, 0):08x}"


_SAMPLED_ITEMS = 64
_DEEPEST_ITEM = 8  # levels of containers; an object may contain itself


def _crc(item: Any, crc: int, depth: int) -> int:
    kind = type(item).__name__
    if isinstance(item, torch.Tensor):
        crc = zlib.crc32(f"{kind}{item.dtype}{tuple(item.shape)}".encode(), crc)
        if item.device.type != "cpu" or item.layout is not torch.strided or item.dtype == torch.bfloat16:
            return crc
        return _crc_of_array(item.detach().numpy(), crc, depth)
    if isinstance(item, np.ndarray):
        return _crc_of_array(item, zlib.crc32(f"{kind}{item.dtype}{item.shape}".encode(), crc), depth)
    if isinstance(item, bytes | bytearray):
        return zlib.crc32(item[:_SAMPLED_BYTES], zlib.crc32(f"{kind}{len(item)}".encode(), crc))
    if item is None or isinstance(item, str | int | float | complex | np.generic):
        return zlib.crc32(f"{kind}{item!r}"[:_SAMPLED_BYTES].encode("utf-8", "surrogatepass"), crc)
    crc = zlib.crc32(kind.encode(), crc)
    if depth == _DEEPEST_ITEM:
        return crc
    parts: Any = None
    if isinstance(item, Mapping):
        parts = [part for pair in itertools.islice(item.items(), _SAMPLED_ITEMS) for part in pair]
    elif isinstance(item, list | tuple):
        half = _SAMPLED_ITEMS // 2
        parts = item if len(item) <= _SAMPLED_ITEMS else (*item[:half], *item[-half:])
    elif dataclasses.is_dataclass(item):
        parts = [getattr(item, field.name) for field in dataclasses.fields(item)]
    else:
        # For any other object, use the type: its repr may contain an address.
        parts = list(getattr(item, "__dict__", {}).items())[:_SAMPLED_ITEMS]
    crc = zlib.crc32(str(len(item) if isinstance(item, Mapping | list | tuple) else len(parts)).encode(), crc)
    for part in parts:
        crc = _crc(part, crc, depth + 1)
    return crc


def _crc_of_array(array: np.ndarray[Any, Any], crc: int, depth: int) -> int:
    if array.dtype.hasobject:
        return _crc(array.reshape(-1)[:_SAMPLED_ITEMS].tolist(), crc, depth + 1)
    flat = array.reshape(-1)
    step = max(1, flat.nbytes // _SAMPLED_BYTES)
    return zlib.crc32(np.ascontiguousarray(flat[::step]).tobytes(), crc)
