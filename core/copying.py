"""Private copies of a user's objects, to iterate without side effects."""

from __future__ import annotations

import copy
import sys
from collections import deque
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

__all__ = ["LARGEST_COPY", "private_copy"]

LARGEST_COPY = 64 << 20
"""Bytes. A larger object is not copied."""

_MOST_OBJECTS = 200_000  # to be copied: takes some tenths of a second
# Data; and generators, which `Streams` restores.
_SHARED = (Dataset, torch.Generator)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)


def private_copy(value: Any) -> Any | None:
    """A deep copy of `value`, or None if it is too large or cannot be copied.

    Datasets and torch's generators are shared with the original; no other mutable object is.
    """
    kept = _shared(value)
    if kept is None:
        return None
    try:
        return copy.deepcopy(value, {id(each): each for each in kept})
    except Exception:  # noqa: BLE001  # a user's object may hold what cannot be copied, such as a file
        return None


def _shared(value: Any) -> list[Any] | None:
    """What `value` shares with its copy; None if the rest is too large to be copied."""
    shared: list[Any] = []
    seen: dict[int, Any] = {}
    queue: deque[Any] = deque([value])
    size = 0
    while queue:
        each = queue.popleft()
        if id(each) in seen or isinstance(each, _ATOMS):
            continue
        seen[id(each)] = each
        if isinstance(each, _SHARED):
            shared.append(each)
            continue
        size += _bytes_of(each)
        if size > LARGEST_COPY or len(seen) > _MOST_OBJECTS:
            return None
        if isinstance(each, dict):
            queue.extend(each.values())
        elif isinstance(each, list | tuple | set | frozenset | deque):
            queue.extend(member for member in each if not isinstance(member, _ATOMS))
        queue.extend(getattr(each, "__dict__", {}).values())
    return shared


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return sys.getsizeof(value)
