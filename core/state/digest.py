"""What a value consists of: one walk over any object, for checksums that are the same in each process.

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
import struct
import uuid
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple, cast

import numpy as np
import torch

__all__ = ["Part", "Unseen", "checksum_of", "data_of", "is_inert", "parts_of", "text_of"]

_DEEPEST = 8  # levels of containers; an object may contain itself
_FEW = 64  # members of a container, or rows of a table
_MOST_BYTES = 4096
_LARGEST_SET = 4096

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_INERT = _PLAIN | {torch.Tensor}
_PRINTED = (
    decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, uuid.UUID,
    range, slice, type, torch.dtype, torch.device, np.dtype, int, float, complex,
)  # fmt: skip


class Unseen:
    """Stands for an object of a type whose content cannot be seen."""

    def __init__(self, kind: str, item: Any = None) -> None:
        self.kind, self.item = kind, item


class Part(NamedTuple):
    """One part of a value: a number, a text, an array, or a container, whose members follow it.

    Its `value` is None, a number, text or bytes, a path, an array without objects, the list of a container's keys
    (empty for a sequence) or of a set's members, or `Unseen`.
    """

    path: str  # where in the value it is, as ``['image'][0]``; empty for the value itself
    kind: str  # its type; of an array also dtype and shape, of a container how much it holds
    value: Any


def parts_of(value: object, bounded: bool = False, opaque: bool = False) -> list[Part]:
    """All parts of a value, containers before their members, and members of a dict in the order of their keys.

    `bounded`: of an array or text some 4 KiB, of a container at most 64 members; the paths are left empty. `opaque`:
    objects of types that are not known are not looked into.
    """
    walk = _Walk(bounded, opaque)
    walk.into(value, "", 0)
    return walk.parts


def checksum_of(value: object, unseen: dict[str, None] | None = None) -> str:
    """Eight hexadecimal digits of a bounded part of a value, for every batch. They are no proof of equality.

    The names of types whose content cannot be seen are added to `unseen`.
    """
    crc = 0
    for _, kind, content in parts_of(value, bounded=True):
        data = data_of(content)
        crc = zlib.crc32(data, zlib.crc32(f"{kind} {len(data)}".encode(), crc))
        if unseen is not None and type(content) is Unseen:
            unseen[content.kind] = None
    return f"{crc:08x}"


def data_of(value: Any) -> bytes | memoryview:
    """The content of a part's `value`."""
    kind = type(value)
    if kind is str:
        return bytes(value.encode("utf-8", "surrogatepass"))
    if kind is float:
        return struct.pack(">d", value)
    if kind is bytes:
        return bytes(value)
    if kind is int or kind is bool:
        return b"%x" % value  # `repr` refuses integers of thousands of digits
    if kind is list:
        return data_of("\n".join(map(text_of, value)))
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.nbytes else b""
    if isinstance(value, os.PathLike):
        return os.fsencode(value)
    return b"" if kind is Unseen else repr(value).encode()


def text_of(member: Any) -> str:
    """A key's or a set's member's text, the same in each process. The `repr` of an object may contain its address."""
    kind = type(member).__name__
    if type(member) in _PLAIN:
        return f"{kind} {member!r}"
    if isinstance(member, tuple):
        return f"{kind}({','.join(map(text_of, member))})"
    return f"{kind} {checksum_of(member)}"


def is_inert(sample: object, depth: int = 0) -> bool:
    """Whether to look at a sample runs no code of its own: it is made of Python's, NumPy's and torch's types alone."""
    kind = type(sample)
    if kind in _INERT or isinstance(sample, np.generic):
        return True
    if isinstance(sample, np.ndarray):
        return kind is np.ndarray and not sample.dtype.hasobject
    if depth > _DEEPEST or kind not in (list, tuple, dict):
        return False
    members = itertools.chain.from_iterable(sample.items()) if isinstance(sample, dict) else cast(list[Any], sample)
    return all(is_inert(each, depth + 1) for each in members)


class _Walk:
    def __init__(self, bounded: bool, opaque: bool) -> None:
        self.parts: list[Part] = []
        self._bounded, self._opaque = bounded, opaque

    def into(self, item: Any, path: str, depth: int) -> None:
        """Append the parts of `item`."""
        if type(item) in _PLAIN:
            kind = type(item).__name__
            if self._bounded and isinstance(item, str | bytes) and len(item) > _MOST_BYTES:
                kind, item = f"{kind} of {len(item)}", item[:_MOST_BYTES]
            self.parts.append(Part(path, kind, item))
            return
        try:
            kind, value, members = self._opened(item, depth)
        except Exception:  # noqa: BLE001  # objects of other libraries raise what they like
            kind, value, members = _unseen(item)
        self.parts.append(Part(path, kind, value))
        for key, member in members:
            self.into(member, "" if self._bounded else f"{path}[{key}]", depth + 1)

    def _opened(self, item: Any, depth: int) -> _Opened:
        """The kind and the value of an item's own part, and its members."""
        kind = type(item).__name__
        if isinstance(item, torch.Tensor):
            return self._tensor(item.detach())
        if isinstance(item, enum.Enum):
            return kind, str(item.name), ()
        if isinstance(item, Unseen):
            return item.kind, item, ()
        if isinstance(item, str):
            return kind, str.__str__(item), ()
        if isinstance(item, np.ndarray | np.generic):
            return self._array(np.asarray(item), "")
        if isinstance(item, _PRINTED):
            return kind, repr(item), ()
        if isinstance(item, bytes | bytearray | memoryview):
            return kind, bytes(item), ()
        if isinstance(item, os.PathLike):
            return kind, item, ()
        if depth >= _DEEPEST:
            return _unseen(item)
        if isinstance(item, Mapping):
            return self._mapping(f"{kind} of {len(item)}", item.items())
        if isinstance(item, list | tuple | deque):
            return self._sequence(kind, item)
        if isinstance(item, Set):  # in any order, which differs between processes
            few = len(item) <= _LARGEST_SET or not self._bounded
            return f"{kind} of {len(item)}", sorted(item, key=text_of) if few else [], ()
        if dataclasses.is_dataclass(item):
            fields = [(field.name, getattr(item, field.name, None)) for field in dataclasses.fields(item)]
            return self._mapping(f"dataclass {kind}", fields)
        return _unseen(item) if self._opaque else self._object(item)

    def _mapping(self, kind: str, pairs: Iterable[tuple[Any, Any]]) -> _Opened:
        chosen = sorted(itertools.islice(pairs, _FEW) if self._bounded else pairs, key=lambda pair: text_of(pair[0]))
        members = [(_key_name(key, number), value) for number, (key, value) in enumerate(chosen)]
        return kind, [key for key, _ in chosen], members

    def _sequence(self, kind: str, members: Any) -> _Opened:
        count, rows = len(members), list(members)
        if count > _FEW and self._bounded:
            rows = rows[: _FEW // 2] + rows[-_FEW // 2 :]
        elif count > _FEW and len(kinds := set(map(type, rows))) == 1 and kinds <= {bool, int, float}:
            array = np.asarray(rows)
            if array.dtype.kind in "bif":  # no integers beyond 64 bits
                return f"{kind} of {count} {kinds.pop().__name__}", array, ()
        return f"{kind} of {count}", [], enumerate(rows)

    def _array(self, array: np.ndarray[Any, Any], kind: str) -> _Opened:
        dtype = array.dtype.str if array.dtype.names is None else array.dtype.descr
        if array.dtype.hasobject:
            kind, _, members = self._sequence("object numpy", array.reshape(-1).tolist())
            return f"{kind} {_shape(array)}", [], members
        kind = f"{kind}{dtype} numpy {_shape(array)}"
        return kind, array.reshape(-1)[:: max(1, array.nbytes // _MOST_BYTES)] if self._bounded else array, ()

    def _tensor(self, tensor: torch.Tensor) -> _Opened:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_nested:
            return f"nested {dtype} tensor", [], enumerate(tensor.unbind())
        kind = f"{dtype} tensor {_shape(tensor)}"
        if tensor.layout is not torch.strided:
            whole = tensor.to_sparse().coalesce()
            members = enumerate([whole.indices(), whole.values()])
            return f"{str(tensor.layout).removeprefix('torch.')} {kind}", [], members
        if tensor.is_quantized:  # the second tells the scale
            return f"quantized {kind}", [], [(0, tensor.int_repr()), (1, tensor.dequantize())]
        if tensor.device.type == "meta":
            return f"meta {kind}", None, ()
        if type(tensor) is not torch.Tensor:
            local = getattr(tensor, "to_local", None)  # a DTensor's own part
            tensor = local() if callable(local) else tensor.as_subclass(torch.Tensor)
        if self._bounded:
            tensor = tensor.reshape(-1)[:: max(1, tensor.numel() * tensor.element_size() // _MOST_BYTES)]
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        tensor = tensor.resolve_conj().resolve_neg()
        try:
            return kind, tensor.numpy(), ()
        except (TypeError, RuntimeError):  # a type that numpy has not: bfloat16, float8
            return kind, tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), ()

    def _object(self, item: Any) -> _Opened:
        """An object of another library: as an array or as rows, if it offers them; else its attributes."""
        kind = type(item)
        if _has_rows(kind):
            types = str(getattr(item, "schema", getattr(item, "type", "")))
            rows = [types, item.slice(0, _FEW).to_pylist()]
            if len(item) > _FEW:
                rows.append(Unseen(f"{kind.__name__} after its first {_FEW} rows"))
            return f"{kind.__name__} of {len(item)}", [], enumerate(rows)
        if hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"):  # an image, a data frame
            return self._array(np.asarray(item), f"{kind.__name__} ")
        attributes = _attributes_of(item)
        return self._mapping(kind.__name__, attributes.items()) if attributes else _unseen(item)


_Opened = tuple[str, Any, Iterable[tuple[Any, Any]]]


def _unseen(item: Any) -> _Opened:
    kind = type(item).__name__
    return kind, Unseen(kind, item), ()


def _key_name(key: Any, number: int) -> str:
    return repr(key) if type(key) in _PLAIN else f"{type(key).__name__} {number}"


def _shape(array: np.ndarray[Any, Any] | torch.Tensor) -> str:
    return "x".join(map(str, array.shape)) or "scalar"


def _has_rows(kind: type) -> bool:
    """Whether it is the type of an Arrow table or array."""
    return callable(getattr(kind, "to_pylist", None)) and callable(getattr(kind, "slice", None))


def _attributes_of(item: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for each in type(item).__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(item, name):
                attributes[name] = getattr(item, name)
    return {**attributes, **getattr(item, "__dict__", {})}
