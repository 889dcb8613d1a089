"""What a value consists of: any object in plain terms, which can be compared across processes.

Never by pickle: equal objects may have different pickles.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import os
import uuid
import zlib
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch

__all__ = ["MOST_ITEMS", "MOST_MEMBERS", "Unseen", "has_more_rows", "may_read", "plain", "text_of"]

MOST_ITEMS = 64
"""Members of a table or a device's tensor rows that are looked at; the number of them always counts."""

MOST_MEMBERS = 1 << 12
"""Members of a set that `plain` looks at; of a larger one only the number counts."""

_MOST_BYTES = 1 << 16  # that are copied from a device
_PRINTED = (
    decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, uuid.UUID,
    range, slice, type, torch.dtype, torch.device, np.dtype,
)  # fmt: skip


class Unseen:
    """Stands for a value of a type whose content cannot be seen.

    Attributes:
        kind: the name of the type.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind


def plain(item: Any) -> Any:
    """`item` in plain terms.

    Returns:
        A number, text, bytes, None, a numpy array, a list, or a dict, whose members may be any objects; or `Unseen`. A
        set becomes two numbers, a table a list of rows, a tensor the arrays that it is stored in, another object
        the dict of its attributes.
    """
    if item is None or isinstance(item, str | int | float | complex | bytes | np.ndarray | np.generic | list | dict):
        return item
    if isinstance(item, torch.Tensor):
        return _arrays_of(item)
    if isinstance(item, bytearray | memoryview):
        return bytes(item)
    if isinstance(item, Mapping):
        return dict(item.items())
    if isinstance(item, tuple | deque):
        return list(item)
    if isinstance(item, Set):
        return _members_of(item)
    if isinstance(item, enum.Enum):
        return item.name
    if isinstance(item, os.PathLike):
        return os.fspath(item)
    if isinstance(item, _PRINTED):
        return repr(item)
    if dataclasses.is_dataclass(item):
        return {field.name: getattr(item, field.name, None) for field in dataclasses.fields(item)}
    return _other(item)


def _members_of(members: Any) -> list[Any]:
    """The number of members, and one number made of all in any order, which differs between processes."""
    texts = (text_of(member).encode("utf-8", "surrogatepass") for member in itertools.islice(members, MOST_MEMBERS))
    return [len(members), sum(map(zlib.crc32, texts)) & 0xFFFFFFFF if len(members) <= MOST_MEMBERS else 0]


def text_of(member: Any) -> str:
    """A key's or a set's member's text, the same in each process. The `repr` of an object may contain its address."""
    value = plain(member)
    if isinstance(value, list):
        return f"{type(member).__name__}({','.join(map(text_of, value))})"
    seen = value is None or isinstance(value, str | int | float | complex | bytes)
    return f"{type(member).__name__} {value!r}" if seen else type(member).__name__


def _arrays_of(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.device.type == "meta":
        return f"meta {tensor.dtype}"
    if type(tensor) is not torch.Tensor:
        local = getattr(tensor, "to_local", None)  # a DTensor's own part
        tensor = local() if callable(local) else tensor.as_subclass(torch.Tensor)
    if tensor.device.type != "cpu":
        # A bounded part, since copying waits for the device.
        flat = tensor.reshape(-1)
        step = max(1, flat.numel() * flat.element_size() // _MOST_BYTES)
        return [flat[::step].cpu(), str(tuple(tensor.shape))]
    tensor = tensor.resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):  # a type that numpy has not: bfloat16, float8
        return _as_integers(tensor)


def _as_integers(tensor: torch.Tensor) -> Any:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integers.get(tensor.element_size())
    return Unseen(str(tensor.dtype)) if kind is None else [tensor.contiguous().view(kind).numpy(), str(tensor.dtype)]


def has_more_rows(item: Any) -> bool:
    """Whether an item is a table of more rows than `plain` looks at."""
    return _has_rows(type(item)) and len(item) > MOST_ITEMS


def may_read(item: Any) -> bool:
    """Whether to see an item's content may read it from a file: a mapping or an array of another library."""
    if isinstance(item, dict | np.ndarray | torch.Tensor):
        return False
    kind = type(item)
    return isinstance(item, Mapping) or hasattr(kind, "__array__") or _has_rows(kind)


def _has_rows(kind: type) -> bool:
    """Whether it is the type of an Arrow table or array."""
    return callable(getattr(kind, "to_pylist", None)) and callable(getattr(kind, "slice", None))


def _other(item: Any) -> Any:
    """An object of another library: as an array or as rows, if it offers them; else its attributes."""
    kind = type(item)
    if _has_rows(kind):
        types = getattr(item, "schema", getattr(item, "type", ""))
        return [len(item), str(types), item.slice(0, MOST_ITEMS).to_pylist()]
    if hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"):  # an image, a data frame
        try:
            return np.asarray(item)
        except Exception:  # noqa: BLE001  # of another library
            return Unseen(kind.__name__)
    attributes = _attributes_of(item)
    return attributes or Unseen(kind.__name__)


def _attributes_of(item: Any) -> dict[str, Any]:
    attributes = {
        name: getattr(item, name)
        for each in type(item).__mro__
        for name in _slots_of(each)
        if hasattr(item, name)
    }  # fmt: skip
    return {**attributes, **getattr(item, "__dict__", {})}


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in slots if not name.startswith("__"))
