"""Comparing what loaders hand out, bit for bit, across processes.

An item is turned into `Leaf` values, which are small and picklable, and tell later where two items differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import math
import pickle
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..state.digest import Part, Unseen, data_of, parts_of

__all__ = [
    "Leaf", "combine", "digest", "first_difference", "identify", "is_digest", "is_plain", "leaves", "plain", "rows_of",
    "samples",
]  # fmt: skip

_SHOWN_VALUES = 64


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One part of an item: its path, its kind, its first values (at most 64, as text) and its digest."""

    path: str
    kind: str
    values: tuple[str, ...]
    digest: str

    def __str__(self) -> str:
        shown = ", ".join(self.values[:8]) + (", ..." if len(self.values) > 8 else "")
        return f"{self.kind}: {shown}" if shown else self.kind


def digest(item: Any) -> str:
    """32 hexadecimal digits that agree for two items if and only if they are equal bit for bit.

    Types, dtypes and shapes matter: ``1``, ``True`` and ``1.0`` differ, and a list is not a tuple. NaN equals the same
    NaN, and ``-0.0`` is not ``0.0``. The order of a dict's keys and a tensor's device do not matter. Tensors of every
    layout, numpy arrays, dicts, sequences, named tuples, dataclasses and scalars are compared by their parts, other
    objects by their pickle, in which sets have no order. Raises ``TypeError`` for what cannot be pickled.
    """
    return combine(leaves(item))


def is_digest(name: Hashable) -> bool:
    """Whether this is what `digest` returns, and so nothing that anyone can read."""
    return isinstance(name, str) and re.fullmatch("[0-9a-f]{32}", name) is not None


def leaves(item: Any) -> Iterator[Leaf]:
    """The parts of ``item`` in a fixed order, containers before their contents."""
    return map(_leaf, parts_of(item, opaque=True))


def first_difference(expected: Iterable[Leaf], got: Iterable[Leaf]) -> tuple[str, str]:
    """Two short texts, (expected, got), for the first place where two items differ."""
    for one, other in itertools.zip_longest(expected, got):
        if one is None or other is None:
            return (
                f"{one.path} {one}".strip() if one else "nothing more",
                f"{other.path} {other}".strip() if other else "nothing more",
            )
        if one == other:
            continue
        where = f"{one.path}: " if one.path else ""
        if one.path != other.path or one.kind != other.kind or len(one.values) <= 1:
            return f"{where}{one}", f"{other.path}: {other}" if other.path else str(other)
        for index, (value, other_value) in enumerate(zip(one.values, other.values, strict=False)):
            if value != other_value:
                return (
                    f"{where}{one.kind}, value {index}: {value}",
                    f"{where}{one.kind}, value {index}: {other_value}",
                )
        return (
            f"{where}{one.kind} with digest {one.digest}",
            f"{where}{other.kind} with digest {other.digest} (differs after its first {len(one.values)} values)",
        )
    return "(equal)", "(equal)"


def identify(batch: Any) -> list[Hashable]:
    """Derive the identities of a batch's samples from this batch alone: its first tensor, array or list of scalars.

    A tuple or list gives its first element, a dict its first value. A tensor of rows, such as tokens or images, gives
    one digest for each row. A batch without such a part counts as one sample, identified by its digest.
    """
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biuf":
        batch = torch.from_numpy(np.ascontiguousarray(batch))
    if isinstance(batch, torch.Tensor) and not is_plain(batch):
        return [digest(row) for row in rows_of(batch)]
    if isinstance(batch, torch.Tensor):
        if any(size != 1 for size in batch.shape[1:]):
            return [digest(row) for row in batch]
        return [plain(value) for value in batch.detach().reshape(-1).tolist()]
    if isinstance(batch, (str, int, float)):
        return [plain(batch)]
    if isinstance(batch, Mapping) and batch:
        return identify(next(iter(batch.values())))
    if isinstance(batch, Sequence) and not isinstance(batch, bytes) and batch:
        if all(isinstance(element, (str, int, float)) for element in batch):
            return [plain(element) for element in batch]
        return identify(batch[0])
    return [digest(batch)]


def plain(value: Hashable) -> Hashable:
    """A number or text as an identity. NaN gets a text, because it would not equal itself after pickling."""
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def samples(batch: Any, count: int) -> list[str] | None:
    """The digest of each of the ``count`` samples in ``batch``, or None if it cannot be split into that many.

    Columns (tensors, arrays, lists of ``count`` values, tuples and dicts of such) are split into rows. Any other
    sequence of ``count`` elements has one element for each sample.
    """
    columns = _columns(batch, count)
    if columns is not None:
        return [digest([column[index] for column in columns]) for index in range(count)]
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) and len(batch) == count:
        return [digest(element) for element in batch]
    return None


def _columns(batch: Any, count: int) -> list[Any] | None:
    if isinstance(batch, torch.Tensor) and not is_plain(batch):
        rows = rows_of(batch)
        return [rows] if len(rows) == count else None
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return [batch] if batch.ndim > 0 and batch.shape[0] == count else None
    if isinstance(batch, Mapping):
        parts: list[Any] = list(batch.values())
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        if len(batch) == count and all(isinstance(part, (str, bytes, int, float)) for part in batch):
            return [batch]
        parts = list(batch)
    else:
        return None
    columns: list[Any] = []
    for part in parts:
        found = _columns(part, count)
        if found is None:
            return [batch] if isinstance(batch, Sequence) and len(batch) == count else None
        columns.extend(found)
    return columns or None


def combine(parts: Iterable[Leaf]) -> str:
    """The `digest` of the item with these leaves."""
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(f"{part.path}\0{part.digest}\n".encode())
    return whole.hexdigest()


def _leaf(part: Part) -> Leaf:
    kind, value = part.kind, part.value
    opaque = isinstance(value, Unseen)
    kind, data = (f"object {kind}", _pickled(value.item, part.path)) if opaque else (kind, data_of(value))
    content = hashlib.blake2b(kind.encode() + b"\0", digest_size=16)
    content.update(data)
    return Leaf(part.path, kind, tuple(_shown(value)), content.hexdigest())


def _shown(value: Any) -> list[str]:
    if isinstance(value, np.ndarray):
        return [repr(each) for each in value.reshape(-1)[:_SHOWN_VALUES].tolist()]
    return [] if isinstance(value, (list, Unseen)) else [repr(value[:80] if isinstance(value, (str, bytes)) else value)]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are all stored, one after another: it is not sparse, nested, quantized or without data."""
    strided = not tensor.is_nested and tensor.layout is torch.strided
    return strided and not tensor.is_quantized and tensor.device.type != "meta"


def rows_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The rows of a tensor that is not plain; of one without dimensions, itself."""
    return list(tensor.detach().unbind()) if tensor.is_nested or tensor.ndim else [tensor]


class _Pickler(pickle.Pickler):
    """Writes a set as its items' sorted digests. Its own order depends on hashes, which differ between processes."""

    def persistent_id(self, item: Any) -> Any:
        return (type(item).__name__, sorted(map(digest, item))) if type(item) in (set, frozenset) else None


def _pickled(item: Any, path: str) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5).dump(item)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise TypeError(
            f"an item holds a {type(item).__module__}.{type(item).__name__} at '{path}', which cannot be compared "
            "because it cannot be pickled; let make_loader give batches of tensors, arrays, numbers, strings and "
            "containers of them"
        ) from error
    return file.getvalue()
