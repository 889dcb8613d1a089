"""Copies of a user's objects to try things on, which share the data and nothing that changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

__all__ = ["LARGEST_COPY", "private_copy", "stateful_copy"]

LARGEST_COPY = 64 << 20
"""Bytes. A larger object is not copied."""

_MOST_OBJECTS = 200_000  # to be copied: some tenths of a second
_MOST_TEXTS = 64  # of a container that are searched for addresses
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)
_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]{1,15}://")


def private_copy(value: Any) -> Any | None:
    """A deep copy of `value`, or None if it is too large or cannot be copied.

    Datasets and torch's generators are shared with the original: data, and what `Streams` puts back as it was. Nothing
    else that the copy changes is.
    """
    return _copied(value, lambda each: isinstance(each, Dataset | torch.Generator), _anything)[0]


def stateful_copy(value: Any, shared: tuple[Any, ...] = ()) -> tuple[Any | None, str]:
    """A deep copy of a source that keeps a state, which can be read while the source is read too.

    Only datasets that are read by index and have no state are shared, and what functions refer to.

    Args:
        value: the source.
        shared: types and objects to be shared besides.

    Returns:
        The copy, and an empty text; or None and the reason: it is too large, cannot be copied, reads from an address,
        or has functions that hold iterators.
    """
    kinds = tuple(each for each in shared if isinstance(each, type))
    objects = [each for each in shared if not isinstance(each, type)]

    def is_shared(each: Any) -> bool:
        if isinstance(each, Dataset):
            return not isinstance(each, IterableDataset) and not hasattr(each, "load_state_dict")
        return isinstance(each, kinds) or any(each is one for one in objects)

    return _copied(value, is_shared, _what_forbids)


def _anything(each: Any) -> str:
    return ""


def _what_forbids(each: Any) -> str:
    """Why reading a copy of what holds `each` would cost or change something elsewhere; empty if it would not."""
    if any(isinstance(held, Iterator) for held in _held_by(each)):
        return f"{each.__qualname__} holds an iterator, which a copy would share"
    if isinstance(each, types.BuiltinMethodType) and isinstance(each.__self__, list | dict | set | deque | Iterator):
        return f"{each.__qualname__} changes an object that a copy would share"
    members = each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else ()
    for text in (*itertools.islice(members, _MOST_TEXTS), *getattr(each, "__dict__", {}).values()):
        if isinstance(text, str) and (found := _ADDRESS.match(text)):
            return f"it reads from {found[0]}..., which is not read twice"
    return ""


def _copied(value: Any, is_shared: Callable[[Any], bool], forbids: Callable[[Any], str]) -> tuple[Any | None, str]:
    shared: list[Any] = []
    seen: dict[int, Any] = {}
    queue: deque[Any] = deque([value])
    size = 0
    while queue:
        each = queue.popleft()
        if id(each) in seen or isinstance(each, _ATOMS):
            continue
        seen[id(each)] = each
        if is_shared(each):
            shared.append(each)
            continue
        size += _bytes_of(each)
        if size > LARGEST_COPY or len(seen) > _MOST_OBJECTS:
            return None, f"it holds more than {LARGEST_COPY >> 20} MB, or too many objects, to be copied"
        if why := forbids(each):
            return None, why
        queue.extend(_members(each))
    try:
        return copy.deepcopy(value, {id(each): each for each in shared}), ""
    except Exception as error:  # noqa: BLE001  # a user's object may hold what cannot be copied, such as a file
        return None, f"it cannot be copied ({type(error).__name__}: {error!s:.100})"


def _members(value: Any) -> Iterator[Any]:
    """What is copied with `value`."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from (member for member in value if not isinstance(member, _ATOMS))
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType | types.ModuleType):
        # Not copied, nor what they hold; but other functions may be looked at.
        yield from (each for each in _held_by(value) if isinstance(each, types.FunctionType | types.MethodType))
        return
    yield from getattr(value, "__dict__", {}).values()


def _held_by(value: Any) -> Iterator[Any]:
    """What a function's closure holds."""
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return sys.getsizeof(value)
