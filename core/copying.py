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
_FLAT = {str, bytes, int, float, complex, bool, type(None)}
_LARGE = 1 << 20  # bytes of an array
_MOST_TEXTS = 64  # of a container that are searched for addresses
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)
_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]{1,15}://")


def private_copy(value: Any, most: int = LARGEST_COPY) -> Any | None:
    """A deep copy of `value`, or None if it holds more than `most` bytes or cannot be copied.

    Datasets and torch's generators are shared with the original: data, and what `Streams` puts back as it was. Nothing
    else that the copy changes is.
    """
    return _copied(value, lambda each: isinstance(each, Dataset | torch.Generator), _anything, most=most)[0]


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
        return isinstance(each, (*kinds, types.ModuleType)) or any(each is one for one in objects)

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


def copy_apart(value: Any, may_use_globals: bool = False) -> Apart:
    """A deep copy of an iterable, or of a function that returns one, to be read without moving the original.

    Map-style datasets and torch's generators are shared, and arrays of more than a megabyte if the copy would otherwise
    be too large. A function is copied with its closure.

    Args:
        value: the iterable or function.
        may_use_globals: copy it even if it, or a method of a class that belongs to no installed package, uses global
            variables. These belong to others too, and reading may change them.
    """
    if isinstance(value, types.FunctionType) and not may_use_globals and (name := _global_used_by(value, set())):
        return Apart(None, f"{value.__qualname__} uses the global variable {name}")
    forbids = _what_is_released if may_use_globals else _what_cannot_be_apart
    copied, why = None, ""
    for is_shared in (_is_data, _is_large_data):
        copied, why = _copied(value, is_shared, forbids, with_closures=True)
        if copied is not None:
            break
    loaders = tuple(each for each in _reached(copied, _is_large_data, True) if isinstance(each, DataLoader))
    return Apart(copied, why, loaders)


def _is_data(each: Any) -> bool:
    return isinstance(each, torch.Generator) or (isinstance(each, Dataset) and not isinstance(each, IterableDataset))


def _is_large_data(each: Any) -> bool:
    return _is_data(each) or (isinstance(each, torch.Tensor | np.ndarray) and _bytes_of(each) > _LARGE)


def _what_cannot_be_apart(each: Any) -> str:
    """Why reading a copy of `each` could change something that is not copied; empty if it could not."""
    for method in _own_methods(type(each)):
        if name := _global_used_by(method, set()):
            return f"{type(each).__name__} uses the global variable {name}"
    return _what_is_released(each)


def _what_is_released(each: Any) -> str:
    """Why what cleans up after itself (a file, a process) is not copied; empty if `each` does not."""
    if isinstance(each, types.FunctionType):
        return ""
    return f"it holds a {type(each).__name__}" if hasattr(type(each), "__del__") else _what_forbids(each)


def _own_methods(kind: type) -> tuple[types.FunctionType, ...]:
    """The methods of a class and its bases that belong to no installed package, whose globals nobody else changes."""
    own = [base for base in kind.__mro__ if not _is_installed(base.__module__)]
    return tuple(each for base in own for each in vars(base).values() if isinstance(each, types.FunctionType))


def _is_installed(module: str) -> bool:
    if module.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _global_used_by(function: types.FunctionType, seen: set[types.FunctionType]) -> str:
    """A global variable, no constant, that a function or another of its module that it calls uses; empty if none."""
    seen.add(function)
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__ and value not in seen:
            found = _global_used_by(value, seen)
            if found:
                return found
        elif not isinstance(value, (*_ATOMS, types.ModuleType)) and not callable(value):
            return name
    return ""


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _functions_anew(functions: list[types.FunctionType], memo: dict[int, Any]) -> None:
    """Put copies of functions, with copies of what their closures hold, into the memo of a deep copy."""
    cells: dict[int, tuple[types.CellType, types.CellType]] = {}
    for each in functions:
        for cell in each.__closure__ or ():
            cells.setdefault(id(cell), (cell, types.CellType()))
        anew = types.FunctionType(
            each.__code__, each.__globals__, each.__name__, copy.deepcopy(each.__defaults__, memo),
            tuple(cells[id(cell)][1] for cell in each.__closure__ or ()),
        )  # fmt: skip
        anew.__kwdefaults__, anew.__qualname__ = copy.deepcopy(each.__kwdefaults__, memo), each.__qualname__
        memo[id(each)] = anew
    for cell, other in cells.values():
        with contextlib.suppress(ValueError):  # an empty cell
            other.cell_contents = copy.deepcopy(cell.cell_contents, memo)


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


def _copied(
    value: Any,
    is_shared: Callable[[Any], bool],
    forbids: Callable[[Any], str],
    with_closures: bool = False,
    most: int = LARGEST_COPY,
) -> tuple[Any | None, str]:
    shared: list[Any] = []
    functions: list[types.FunctionType] = []
    flat: list[Any] = []
    size = 0
    for count, each in enumerate(_reached(value, is_shared, with_closures)):
        if is_shared(each):
            shared.append(each)
            continue
        size += _bytes_of(each)
        if size > most or count > _MOST_OBJECTS:
            return None, f"it holds more than {most >> 20} MB, or too many objects, to be copied"
        if why := forbids(each):
            return None, why
        if with_closures and isinstance(each, types.FunctionType):
            functions.append(each)
        elif _is_flat(each):
            flat.append(each)
    memo = {id(each): each for each in shared}
    memo.update((id(each), each.copy()) for each in flat)
    try:
        _functions_anew(functions, memo)
        return memo[id(value)] if id(value) in memo else copy.deepcopy(value, memo), ""
    except Exception as error:  # noqa: BLE001  # a user's object may hold what cannot be copied, such as a file
        return None, f"it cannot be copied ({type(error).__name__}: {error!s:.100})"


def _reached(value: Any, is_shared: Callable[[Any], bool], with_closures: bool) -> Iterator[Any]:
    """All objects that are copied with `value`, and those that are shared."""
    seen: dict[int, Any] = {}
    queue: deque[Any] = deque([value])
    while queue:
        each = queue.popleft()
        if id(each) in seen or isinstance(each, _ATOMS):
            continue
        seen[id(each)] = each
        yield each
        if with_closures and isinstance(each, types.FunctionType):
            queue.extend(_held_by(each))
        elif not is_shared(each) and not _is_flat(each):
            queue.extend(_members(each))


def _is_flat(value: Any) -> bool:
    """Whether it is a list or dict of what never changes, such as rows of text: copied in one step, however long."""
    members = value.values() if type(value) is dict else value if type(value) is list else ()
    kinds = set(map(type, members))
    if tuple in kinds:
        rows = (each for each in members if type(each) is tuple)
        kinds = kinds - {tuple} | set(map(type, itertools.chain.from_iterable(rows)))
    return bool(kinds) and kinds <= _FLAT


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
    elif isinstance(value, types.FunctionType):
        # Not copied, nor what they hold; but other functions may be looked at.
        yield from (each for each in _held_by(value) if isinstance(each, types.FunctionType | types.MethodType))
        return
    yield from getattr(value, "__dict__", {}).values()


def _held_by(value: Any) -> Iterator[Any]:
    """What a function's closure and its default arguments hold."""
    if isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return sys.getsizeof(value)
