"""A short checksum of any item."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .contents import Unseen, may_read, plain

__all__ = ["checksum_of"]

_SAMPLED_BYTES = 4096


def checksum_of(item: object, unseen: dict[str, None] | None = None, held: bool = False) -> str:
    """Eight hexadecimal digits of an item: of its structure, types, shapes, and up to 4 KiB of each array.

    It can be taken of every batch: of tensors, arrays, texts and containers it reads a bounded part. It is no proof of
    equality.

    Args:
        item: anything.
        unseen: the names of types whose content cannot be seen are added to it.
        held: the item is what a source keeps, no sample. What another library may have to read from a file first, such
            as an `h5py.Dataset`, is not looked into: it may be the whole data set.
    """
    return f"{_Checksum(unseen, held).of(item, 0, 0):08x}"


_SAMPLED_ITEMS = 64
_DEEPEST_ITEM = 8  # levels of containers; an object may contain itself


class _Checksum:
    def __init__(self, unseen: dict[str, None] | None, held: bool) -> None:
        self._unseen, self._held = unseen, held

    def of(self, item: Any, crc: int, depth: int) -> int:
        kind = type(item).__name__
        if isinstance(item, torch.Tensor):
            return self._tensor(item, kind, crc, depth)
        if isinstance(item, np.ndarray):
            return self._array(item, zlib.crc32(f"{kind}{item.dtype}{item.shape}".encode(), crc), depth)
        if isinstance(item, bytes | bytearray):
            return zlib.crc32(item[:_SAMPLED_BYTES], zlib.crc32(f"{kind}{len(item)}".encode(), crc))
        if item is None or isinstance(item, str | int | float | complex | np.generic):
            return zlib.crc32(f"{kind}{item!r}"[:_SAMPLED_BYTES].encode("utf-8", "surrogatepass"), crc)
        crc = zlib.crc32(kind.encode(), crc)
        if depth == _DEEPEST_ITEM or (self._held and may_read(item)):
            return crc
        parts: Any = None
        if isinstance(item, Mapping):
            parts = [part for pair in itertools.islice(item.items(), _SAMPLED_ITEMS) for part in pair]
        elif isinstance(item, list | tuple):
            half = _SAMPLED_ITEMS // 2
            parts = item if len(item) <= _SAMPLED_ITEMS else (*item[:half], *item[-half:])
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            parts = [getattr(item, field.name) for field in dataclasses.fields(item)]
        else:
            value = self._plain(item)
            if not isinstance(value, dict):
                return self.of(value, crc, depth + 1)
            parts = list(value.items())[:_SAMPLED_ITEMS]
        crc = zlib.crc32(str(len(item) if isinstance(item, Mapping | list | tuple) else len(parts)).encode(), crc)
        for part in parts:
            crc = self.of(part, crc, depth + 1)
        return crc

    def _tensor(self, tensor: torch.Tensor, kind: str, crc: int, depth: int) -> int:
        if not tensor.is_nested:
            crc = zlib.crc32(f"{kind}{tensor.dtype}{tuple(tensor.shape)}".encode(), crc)
            if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.dtype != torch.bfloat16:
                try:
                    return self._array(tensor.detach().numpy(), crc, depth)
                except (TypeError, RuntimeError):  # float8, quantized, conjugated
                    pass
        if depth == _DEEPEST_ITEM:
            return crc
        value = self._plain(tensor)
        return self._array(value, crc, depth) if isinstance(value, np.ndarray) else self.of(value, crc, depth + 1)

    def _array(self, array: np.ndarray[Any, Any], crc: int, depth: int) -> int:
        if array.dtype.hasobject:
            return self.of(array.reshape(-1)[:_SAMPLED_ITEMS].tolist(), crc, depth + 1)
        flat = array.reshape(-1)
        step = max(1, flat.nbytes // _SAMPLED_BYTES)
        return zlib.crc32(np.ascontiguousarray(flat[::step]).tobytes(), crc)

    def _plain(self, item: Any) -> Any:
        """The item in plain terms; empty where nothing can be seen."""
        try:
            value = plain(item)
        except Exception:  # noqa: BLE001  # objects of other libraries raise what they like
            value = Unseen(type(item).__name__)
        if not isinstance(value, Unseen):
            return value
        if self._unseen is not None:
            self._unseen[value.kind] = None
        return {}
