"""Copies of a user's objects to try things on, which share the data and nothing that changes."""

from __future__ import annotations

import copy
import dis
import enum
import functools
import itertools
import logging
import pathlib
import random
import re
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

__all__ = ["LARGEST_COPY", "Apart", "copy_apart", "private_copy"]

LARGEST_COPY = 64 << 20
"""Bytes. A larger object is not copied."""

_MOST_OBJECTS = 200_000  # to be copied: some tenths of a second
# Data; and generators, which `Streams` puts back as they were.
_SHARED = (Dataset, torch.Generator)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)


def private_copy(value: Any) -> Any | None:
    """A deep copy of `value`, or None if it is too large or cannot be copied.

    Datasets and torch's generators are shared with the original. Nothing else that the copy changes is.
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


# --- iterables, and functions that make them --------------------------------------------------------------------------


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
    """A deep copy of an iterable, or of a function that returns one, to be read without moving the original.

    What a function refers to, in its closure and among the globals of its module, is copied with it. torch's generators
    are shared. If the copy would be too large, it shares data: map-style datasets, arrays, and long lists. What cleans
    up after itself (a file, a socket, an iterator that has begun, a process), or refuses to be copied, is left alone.
    """
    why = ""
    for sharing in (False, True):
        apart = _Copying(value, sharing)
        why = apart.walk()
        if not why:
            try:
                return Apart(apart.copied(), loaders=tuple(apart.loaders()))
            except Exception as error:  # noqa: BLE001  # a user's object may hold what cannot be copied, such as a lock
                return Apart(None, f"it holds what cannot be copied ({error})")
        if why != _TOO_LARGE:
            break
    return Apart(None, why)


_TOO_LARGE = f"it holds more than {LARGEST_COPY >> 20} MB"
_LONG = 10_000  # members of a container that holds data
_LARGE = 1 << 20  # bytes of an array that holds data
_FLAT = {str, bytes, int, float, complex, bool, type(None)}
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_NEVER_COPIED = (
    *_ATOMS, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.MethodDescriptorType, re.Pattern,
    pathlib.PurePath, logging.Logger, enum.Enum, range, np.generic, np.dtype,
)  # fmt: skip
# As the value of a global, they are data, or belong to the random streams.
_STILL = (
    *_NEVER_COPIED, np.ndarray, torch.Tensor, torch.Generator, np.random.Generator, np.random.RandomState,
    np.random.BitGenerator, random.Random,
)  # fmt: skip


class _Copying:
    def __init__(self, root: Any, sharing: bool) -> None:
        self._root, self._sharing = root, sharing
        self._memo: dict[int, Any] = {}  # of `copy.deepcopy`: the copy of each object that is known beforehand
        self._seen: dict[int, Any] = {}
        self._functions: dict[int, types.FunctionType] = {}  # to be made anew
        self._making_anew: dict[int, bool] = {}

    def walk(self) -> str:
        """Look at all that would be copied. Returns why it cannot be; empty if it can."""
        queue: deque[Any] = deque([self._root])
        size = 0
        while queue:
            each = queue.popleft()
            if id(each) in self._seen or isinstance(each, _NEVER_COPIED):
                continue
            self._seen[id(each)] = each
            kind = type(each)
            if isinstance(each, types.FunctionType):
                if self._refers(each):
                    queue.extend(value for _, value in _referred(each))
                continue
            if isinstance(each, DataLoader) and _is_data(each.dataset) and hasattr(type(each.dataset), "__del__"):
                self._memo[id(each.dataset)] = each.dataset
            if id(each) in self._memo:
                continue
            if _is_flat(each):
                self._memo[id(each)] = each.copy()
                continue
            if isinstance(each, torch.Generator) or self._is_shared(each):
                self._memo[id(each)] = each
                continue
            if hasattr(kind, "__del__"):
                return f"it holds a {kind.__name__}"
            size += _bytes_of(each)
            if size > LARGEST_COPY or len(self._seen) > _MOST_OBJECTS:
                return _TOO_LARGE
            if name := _global_that_changes(kind):
                return f"{kind.__name__} refers to the variable {name}"
            queue.extend(_parts_of(each))
        return ""

    def _is_shared(self, each: Any) -> bool:
        if not self._sharing or each is self._root:
            return False
        if isinstance(each, torch.Tensor | np.ndarray):
            return _bytes_of(each) > _LARGE
        return _is_data(each) or (isinstance(each, _CONTAINERS) and len(each) > _LONG)

    def _refers(self, function: types.FunctionType) -> bool:
        """Whether a function refers to what changes, and so has to be made anew for the copy."""
        known = self._making_anew.get(id(function))
        if known is None:
            self._making_anew[id(function)] = False  # while its own functions are asked
            known = bool(_rebound(function))
            for _, value in _referred(function):
                if isinstance(value, types.FunctionType):
                    known = self._refers(value) or known
                else:
                    known = known or _changes(value)
            self._making_anew[id(function)] = known
            if known:
                self._functions[id(function)] = function
        return known

    def copied(self) -> Any:
        """The copy."""
        cells: dict[int, types.CellType] = {}
        variables: dict[int, dict[str, Any]] = {}
        for function in self._functions.values():
            for cell in function.__closure__ or ():
                cells.setdefault(id(cell), types.CellType())
            own = variables.setdefault(id(function.__globals__), dict(function.__globals__))
            anew = types.FunctionType(
                function.__code__, own, function.__name__, function.__defaults__,
                tuple(cells[id(cell)] for cell in function.__closure__ or ()),
            )  # fmt: skip
            anew.__kwdefaults__, anew.__qualname__ = function.__kwdefaults__, function.__qualname__
            anew.__module__ = function.__module__
            self._memo[id(function)] = anew
        for function in self._functions.values():
            for cell in function.__closure__ or ():
                if _is_filled(cell):
                    cells[id(cell)].cell_contents = self._copy(cell.cell_contents)
            if _is_own(function.__module__):
                own = variables[id(function.__globals__)]
                for name, value in _named_globals(function):
                    if _changes(value) or id(value) in self._memo:
                        own[name] = self._copy(value)
        return self._copy(self._root)

    def loaders(self) -> Iterator[DataLoader[Any]]:
        """The copies of DataLoaders."""
        for each in self._seen.values():
            copied = self._memo.get(id(each))
            if isinstance(copied, DataLoader) and copied is not each:
                yield copied

    def _copy(self, value: Any) -> Any:
        return self._memo[id(value)] if id(value) in self._memo else copy.deepcopy(value, self._memo)


def _is_data(value: Any) -> bool:
    return isinstance(value, Dataset) and not isinstance(value, IterableDataset)


def _is_flat(value: Any) -> bool:
    """Whether it is a plain container of what never changes: one step copies it, however long."""
    members = value.values() if type(value) is dict else value if type(value) in (list, set) else None
    if members is None:
        return False
    kinds, inner = set(map(type, members)), set()
    if tuple in kinds:
        kinds.remove(tuple)
        inner = set(map(type, itertools.chain.from_iterable(each for each in members if type(each) is tuple)))
    return kinds <= _FLAT and inner <= _FLAT


def _parts_of(value: Any) -> Iterator[Any]:
    kind = type(value)
    if hasattr(kind, "__deepcopy__"):  # it says itself what its copy shares
        return
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    yield from getattr(value, "__dict__", {}).values()
    for base in kind.__mro__:
        for member in vars(base).values():
            if isinstance(member, types.MemberDescriptorType):  # a slot
                try:
                    yield member.__get__(value)
                except AttributeError:
                    continue


# --- what functions refer to ------------------------------------------------------------------------------------------


def _referred(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function refers to: the contents of its closure, and globals if it is not of a library."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if _is_filled(cell):
            yield name, cell.cell_contents
    if _is_own(function.__module__):
        yield from _named_globals(function)


def _named_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    variables = function.__globals__
    for name in _loaded(function.__code__) | _stored(function.__code__):
        if name in variables:
            yield name, variables[name]


def _changes(value: Any) -> bool:
    """Whether reading may change a value that a function refers to: containers, iterables, a user's own objects."""
    if isinstance(value, (*_STILL, types.FunctionType)):
        return False
    if isinstance(value, tuple | frozenset):
        return any(map(_changes, value))
    kind = type(value)
    return (
        isinstance(value, functools.partial | types.MethodType)
        or any(hasattr(kind, name) for name in ("__iter__", "__next__", "get"))
        or _is_own(kind.__module__)
    )


@functools.lru_cache(maxsize=4096)
def _functions_of(kind: type) -> tuple[types.FunctionType, ...]:
    found = []
    for base in kind.__mro__:
        if _is_own(base.__module__):
            for member in vars(base).values():
                if isinstance(member, staticmethod | classmethod):
                    member = member.__func__
                elif isinstance(member, property):
                    member = member.fget
                if isinstance(member, types.FunctionType):
                    found.append(member)
    return tuple(found)


def _global_that_changes(kind: type) -> str:
    """A variable that the methods of a class, or functions that they call, may change; empty if there is none."""
    queue, seen = deque(_functions_of(kind)), set()
    while queue:
        function = queue.popleft()
        if function in seen:
            continue
        seen.add(function)
        if rebound := _rebound(function):
            return min(rebound)
        for name, value in _referred(function):
            if isinstance(value, types.FunctionType):
                queue.append(value)
            elif _changes(value):
                return name
    return ""


def _rebound(function: types.FunctionType) -> frozenset[str]:
    """The variables outside of a function to which it assigns."""
    code = function.__code__
    outer = _names_in(code, ("STORE_DEREF", "DELETE_DEREF")).intersection(code.co_freevars)
    return outer | _stored(code) if _is_own(function.__module__) else outer


@functools.lru_cache(maxsize=4096)
def _loaded(code: types.CodeType) -> frozenset[str]:
    return _names_in(code, ("LOAD_GLOBAL", "LOAD_NAME"))


@functools.lru_cache(maxsize=4096)
def _stored(code: types.CodeType) -> frozenset[str]:
    return _names_in(code, ("STORE_GLOBAL", "DELETE_GLOBAL"))


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType, operations: tuple[str, ...]) -> frozenset[str]:
    names = {each.argval for each in dis.get_instructions(code) if each.opname in operations}
    inner = [_names_in(each, operations) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(names.union(*inner))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _is_own(module: str | None) -> bool:
    """Whether a module is a user's own, not one of a library: its globals may hold what changes from pass to pass."""
    top = (module or "").partition(".")[0]
    if not top or (top in sys.stdlib_module_names and top != "__main__") or top in ("torch", "numpy", "midepoch"):
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file
