"""A bounded look at the attributes of a user's objects, which runs none of their code."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

__all__ = ["DatasetAttributes", "appearance", "directly_held"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SIZED = (list, tuple, dict, set, frozenset, deque, bytearray)
_DATA = (Dataset, torch.nn.Module, torch.Tensor, np.ndarray, type)
_MOST = 1000  # attributes that are looked at
_MOST_INSIDE = 64  # members of a tuple


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


class DatasetAttributes:
    """The attributes of a dataset, and of the one inside it, if there is one, as they are when this is made.

    Only numbers, texts and tuples of them count. As a context it sets them back.
    """

    def __init__(self, dataset: Any) -> None:
        own = _dict_of(dataset)
        self._held = [(now, dict(now)) for now in (own, _dict_of(own.get("dataset")))]

    def changed(self) -> list[str]:
        """The names of those that have other values now, or are new."""
        return sorted({name for now, before in self._held for name in _changed(now, before)})

    def __enter__(self) -> DatasetAttributes:
        return self

    def __exit__(self, *error: object) -> None:
        self.set_back()

    def set_back(self) -> None:
        """Let them be as they were."""
        for now, before in self._held:
            for name in _changed(now, before):
                if name in before:
                    now[name] = before[name]
                else:
                    del now[name]


def _changed(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    return [name for name, value in now.items() if _is_plain(value) and _differ(before.get(name, now), value)]


def _is_plain(value: Any) -> bool:
    members = value if type(value) is tuple and len(value) <= _MOST_INSIDE else ()
    return type(value) in _PLAIN or (bool(members) and all(type(each) in _PLAIN for each in members))


def _differ(one: Any, other: Any) -> bool:
    return one is not other and (type(one) is not type(other) or one != other)


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
