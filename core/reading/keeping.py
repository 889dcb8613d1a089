"""What a wrapper keeps from one batch to the next: in its iterator and what that reads, and in its modules."""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import gc
import itertools
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..copying import reached
from ..dividing import attributes_of
from ..state.witness import Look, look_at
from .inside import Feed
from .private import not_saved

__all__ = ["Modules", "kept_by"]

_LARGEST_BUFFER = 1 << 20  # bytes; a larger one of a module is a table that does not change


def kept_by(iterator: Any, values: list[Any], wrappers: set[int]) -> dict[str, Any]:
    """What an iterator, and those that it reads, keep, and what counts in other values, by name.

    That are variables, attributes, counts of iterators, and what functions close over or have as default arguments.
    """
    kept: dict[str, Any] = {}

    def counting(value: Any) -> list[tuple[Any, bool]]:
        found = reached(value, lambda each: id(each) in wrappers or isinstance(each, DataLoader | Feed))
        return [(each, True) for each in found if isinstance(each, Iterator | types.FunctionType)]

    queue: deque[tuple[Any, bool]] = deque([(iterator, True)])
    for value in values:
        queue.extend(counting(value))
    seen: dict[int, Any] = {}
    while queue:
        each, counts = queue.popleft()
        if id(each) in seen or id(each) in wrappers or type(each) is Feed:
            continue
        seen[id(each)] = each
        frame = getattr(each, "gi_frame", None)
        if frame is not None:
            read = _read_by(frame.f_code)
            before = "" if each is iterator else f"{frame.f_code.co_qualname}."
            here = {f"{before}{name}": value for name, value in frame.f_locals.items() if name in read}
        elif isinstance(each, types.FunctionType):
            here = _held_in_function(each)
        else:
            here = {f"{type(each).__name__}.{name}": value for name, value in attributes_of(each)}
            if counts:
                here[type(each).__name__] = _counts_of(each)
        for name, value in here.items():
            if not isinstance(value, Iterator | types.FunctionType):
                while name in kept:
                    name += "'"  # of another object of the class
                kept[name] = value
            queue.extend(counting(value))
        # What a loop itself reads counts only in variables, which have been looked at.
        held = gc.get_referents(each)
        held += [member for value in held if type(value) is tuple for member in value]  # as map and zip hold theirs
        queue.extend(
            (value, frame is None or type(value) is itertools.islice)
            for value in held
            if isinstance(value, Iterator | types.FunctionType)
        )
    return kept


def _held_in_function(function: types.FunctionType) -> dict[str, Any]:
    """What a function closes over, and its default arguments."""
    code, defaults = function.__code__, function.__defaults__ or ()
    held = dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
    held |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            held[name] = cell.cell_contents
    return {f"{function.__qualname__}.{name}": value for name, value in held.items()}


def _counts_of(iterator: Any) -> list[int]:
    """The numbers in one of python's own iterators, such as enumerate."""
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return []
    try:
        with warnings.catch_warnings(action="ignore"):
            parts = iterator.__reduce__()[1:]
    except Exception:  # noqa: BLE001  # it has no numbers, or does not show them
        return []
    return [each for part in parts for each in (part if isinstance(part, tuple) else (part,)) if type(each) is int]


def _read_by(code: types.CodeType) -> set[str]:
    """The local variables that code reads. One with which a loop only counts says nothing of what follows."""
    read: set[str] = set()
    for each in dis.get_instructions(code):
        if "LOAD_" in each.opname and any(kind in each.opname for kind in ("FAST", "DEREF", "CLOSURE")):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            read.update(names[1:] if each.opname.startswith("STORE_") else names)
    return read


class Modules:
    """What modules hold besides their parameters, such as the running statistics of a BatchNorm, at one moment."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        own = [part for part in parts.values() if not isinstance(part, torch.jit.ScriptModule)]
        self._held = [(part, {**vars(part), "_buffers": dict(part._buffers)}) for part in own]
        self._containers = [
            (each, copy.copy(each))
            for part in own
            for name, each in vars(part).items()
            if name not in _of_torch() and type(each) in (list, dict, set, deque)
        ]
        self._buffers = [
            (f"{type(part).__name__}.{name}", buffer, buffer.detach().clone())
            for part in parts.values()
            for name, buffer in part.named_buffers(recurse=False)
            if buffer.nbytes <= _LARGEST_BUFFER
        ]

    def put_back(self) -> None:
        """Make them hold this again."""
        for part, held in self._held:
            vars(part).clear()
            vars(part).update({**held, "_buffers": dict(held["_buffers"])})
        for container, former in self._containers:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(former)
        with torch.no_grad():
            for _, buffer, value in self._buffers:
                buffer.copy_(value)

    def statistics(self) -> tuple[str, ...]:
        """The names of buffers that hold something else now. They are saved with a model."""
        names = dict.fromkeys(name for name, buffer, value in self._buffers if not torch.equal(buffer, value))
        for part, held in self._held:
            others = (name for name, buffer in held["_buffers"].items() if part._buffers.get(name) is not buffer)
            names.update(dict.fromkeys(f"{type(part).__name__}.{name}" for name in others))
        return tuple(names)

    def looks(self) -> dict[tuple[int, str], Look]:
        """What they hold now that is not saved with a model, by part and name."""
        return {
            (number, f"{type(part).__name__}.{name}"): look_at(each)
            for number, (part, _) in enumerate(self._held)
            for name, each in (*vars(part).items(), *part._buffers.items())
            if name not in (not_saved(part) ^ part._buffers.keys()) | _of_torch()
        }


@functools.cache
def _of_torch() -> frozenset[str]:
    """The attributes of every module."""
    return frozenset(vars(torch.nn.Module()))
