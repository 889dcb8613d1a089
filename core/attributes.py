"""A bounded look at the attributes of a user's objects, which runs none of their code."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset

__all__ = ["PlainAttributes", "appearance", "changed", "directly_held", "plain_attributes", "set_back"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SIZED = (list, tuple, dict, set, frozenset, deque, bytearray)
_DATA = (Dataset, torch.nn.Module, torch.Tensor, np.ndarray, type)
_MOST = 1000  # attributes that are looked at
_MOST_INSIDE = 64  # inside one another


def appearance(value: Any) -> tuple[Any, ...]:
    """What an object and the objects that it holds look like: equal unless one of their attributes has changed.

    What changes within an array goes unnoticed, and what datasets and modules hold is not looked at.
    """
    found: list[Any] = [len(value) if type(value) in _SIZED else 0]
    seen, waiting = {id(value)}, deque([value])
    while waiting and len(found) < _MOST:
        for name, held in list(_dict_of(waiting.popleft()).items()):
            if type(held) in _PLAIN:
                found.append((name, held))
                continue
            version = held._version if type(held) is torch.Tensor else 0
            found.append((name, id(held), len(held) if type(held) in _SIZED else version))
            if id(held) not in seen and not isinstance(held, _DATA):
                seen.add(id(held))
                waiting.append(held)
    return tuple(found)


PlainAttributes = dict[tuple[int, str], tuple[dict[str, Any], Any]]
"""By the `id` of the dict that has an attribute, and its name: this dict and the value."""


def plain_attributes(dataset: Any) -> PlainAttributes:
    """The numbers, texts and tuples of them in the attributes of a dataset, and of those inside it."""
    found: PlainAttributes = {}
    for each in _with_inner(dataset):
        holder = _dict_of(each)
        found.update({(id(holder), name): (holder, held) for name, held in holder.items() if _is_plain(held)})
        if len(found) > _MOST:
            break
    return found


def _is_plain(value: Any) -> bool:
    members = value if type(value) is tuple and len(value) <= _MOST_INSIDE else ()
    return type(value) in _PLAIN or (bool(members) and all(type(each) in _PLAIN for each in members))


def set_back(dataset: Any, look: PlainAttributes) -> None:
    """Let these attributes be as they were when `plain_attributes` looked."""
    for key, (holder, _) in plain_attributes(dataset).items():
        if key not in look:
            del holder[key[1]]
    for (_, name), (holder, value) in look.items():
        if holder.get(name, look) is not value:
            holder[name] = value


def changed(before: PlainAttributes, after: PlainAttributes) -> list[str]:
    """The names of attributes that have other values, or are new."""
    return sorted({key[1] for key, (_, value) in after.items() if key not in before or _differ(before[key][1], value)})


def _differ(one: Any, other: Any) -> bool:
    return one is not other and (type(one) is not type(other) or one != other)


def _with_inner(dataset: Any) -> Iterator[Any]:
    """A dataset, and those that it holds as torch's Subset and ConcatDataset do."""
    waiting, seen = deque([dataset]), 0
    while waiting and seen < _MOST_INSIDE:
        each = waiting.popleft()
        seen += 1
        yield each
        holder = _dict_of(each)
        if (inside := holder.get("dataset")) is not None:
            waiting.append(inside)
        if isinstance(each, ConcatDataset):
            waiting.extend(each.datasets)


def directly_held(source: Any) -> dict[str, Any]:
    """What an object has in its attributes, or a function in variables that it uses, by their names."""
    function = source.func if isinstance(source, functools.partial) else source
    if not isinstance(function, types.FunctionType):
        return dict(getattr(source, "__dict__", {}))
    code, defaults = function.__code__, function.__defaults__ or ()
    held = {name: function.__globals__.get(name) for name in code.co_names}
    held |= zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    held |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            held[name] = cell.cell_contents
    return held


def _dict_of(value: Any) -> dict[str, Any]:
    """The attributes of an object itself; empty if it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}
