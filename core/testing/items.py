"""Comparing what loaders hand out, bit for bit, across processes.

An item is turned into `Leaf` values, which are small and picklable, and tell later where two items differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import pickle
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import numpy as np

from ..state.digest import Part, Unseen, data_of, parts_of

__all__ = ["Leaf", "combine", "digest", "first_difference", "is_digest", "leaves"]

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
        if one == other:
            continue
        if one is None or other is None:
            first, second = (f"{each.path} {each}".strip() if each else "nothing more" for each in (one, other))
            return first, second
        where = f"{one.path}: " if one.path else ""
        if one.path != other.path or one.kind != other.kind or len(one.values) <= 1:
            return f"{where}{one}", f"{other.path}: {other}" if other.path else str(other)
        for index, values in enumerate(zip(one.values, other.values, strict=False)):
            if values[0] != values[1]:
                told = f"{where}{one.kind}, value {index}"
                return f"{told}: {values[0]}", f"{told}: {values[1]}"
        told = f"{where}{one.kind} with digest"
        return f"{told} {one.digest}", f"{told} {other.digest} (differs after its first {len(one.values)} values)"
    return "(equal)", "(equal)"


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
