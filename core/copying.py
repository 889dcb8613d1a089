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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

__all__ = ["LARGEST_COPY", "Apart", "copy_apart", "private_copy", "stateful_copy"]

LARGEST_COPY = 64 << 20
"""Bytes. A larger object is not copied."""

_MOST_OBJECTS = 200_000  # to be copied: some tenths of a second
_LARGE = 1 << 20  # bytes of an array
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


class Apart(NamedTuple):
    """A copy by `copy_apart`.

    Attributes:
        value: the copy; None if there is none.
        why: there is none.
        loaders: the copies of DataLoaders in it.
    """

    value: Any
    why: str = ""
    loaders: tuple[DataLoader[Any], ...] = ()


def copy_apart(value: Any) -> Apart:
    """A deep copy of an iterable, to be read without moving the original.

    Map-style datasets and torch's generators are shared, and arrays of more than a megabyte if the copy would otherwise
    be too large. A function is not copied: what it refers to, in its closure
    and among the globals of its module, belongs to others too.
    """
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return Apart(None, "what a function refers to cannot be copied")
    copied, why = None, ""
    for is_shared in (_is_data, _is_large_data):
        copied, why = _copied(value, is_shared, _what_holds_a_resource)
        if copied is not None:
            break
    loaders = tuple(each for each in _reached(copied, _is_large_data) if isinstance(each, DataLoader))
    return Apart(copied, why, loaders)


def _is_data(each: Any) -> bool:
    return isinstance(each, torch.Generator) or (isinstance(each, Dataset) and not isinstance(each, IterableDataset))


def _is_large_data(each: Any) -> bool:
    return _is_data(each) or (isinstance(each, torch.Tensor | np.ndarray) and _bytes_of(each) > _LARGE)


def _what_holds_a_resource(each: Any) -> str:
    """Why what cleans up after itself (a file, a process) is not copied; empty if `each` does not."""
    return f"it holds a {type(each).__name__}" if hasattr(type(each), "__del__") else _what_forbids(each)


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
    size = 0
    for count, each in enumerate(_reached(value, is_shared)):
        if is_shared(each):
            shared.append(each)
            continue
        size += _bytes_of(each)
        if size > LARGEST_COPY or count > _MOST_OBJECTS:
            return None, f"it holds more than {LARGEST_COPY >> 20} MB, or too many objects, to be copied"
        if why := forbids(each):
            return None, why
    try:
        return copy.deepcopy(value, {id(each): each for each in shared}), ""
    except Exception as error:  # noqa: BLE001  # a user's object may hold what cannot be copied, such as a file
        return None, f"it cannot be copied ({type(error).__name__}: {error!s:.100})"


def _reached(value: Any, is_shared: Callable[[Any], bool]) -> Iterator[Any]:
    """All objects that are copied with `value`, and those that are shared."""
    seen: dict[int, Any] = {}
    queue: deque[Any] = deque([value])
    while queue:
        each = queue.popleft()
        if id(each) in seen or isinstance(each, _ATOMS):
            continue
        seen[id(each)] = each
        yield each
        if not is_shared(each):
            queue.extend(_members(each))


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
