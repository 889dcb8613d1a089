"""Copies of a user's objects to try things on, which share the data and nothing that changes."""

from __future__ import annotations

import contextlib
import copy
import dis
import enum
import functools
import itertools
import re
import sys
import types
import typing
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import sharedctypes
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

__all__ = [
    "LARGEST_COPY", "Apart", "copy_apart", "directly_held", "private_copy", "stateful_copy",
]  # fmt: skip

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
        has functions that hold iterators, or code of its own that changes what is not copied: see `_Own`.
    """
    kinds = tuple(each for each in shared if isinstance(each, type))
    objects = [each for each in shared if not isinstance(each, type)]

    def is_shared(each: Any) -> bool:
        if isinstance(each, Dataset):
            return not isinstance(each, IterableDataset) and not hasattr(each, "load_state_dict")
        return isinstance(each, (*kinds, types.ModuleType)) or any(each is one for one in objects)

    copied, why = _copied(value, is_shared, functools.partial(_what_is_shared, _Own()))
    return (None, "it is its own copy") if copied is value else (copied, why)


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
        may_use_globals: copy it even if its own code, or code that this calls, uses what a copy shares with the
            original: see `_Own`.
    """
    copied, why = None, ""
    for is_shared in (_is_data, _is_large_data):
        forbids = _what_is_released if may_use_globals else functools.partial(_what_cannot_be_apart, _Own())
        copied, why = _copied(value, is_shared, forbids, with_closures=True)
        if copied is not None:
            break
    loaders = tuple(each for each in _reached(copied, _is_large_data, True) if isinstance(each, DataLoader))
    return Apart(copied, why, loaders)


def _is_data(each: Any) -> bool:
    return isinstance(each, torch.Generator) or (isinstance(each, Dataset) and not isinstance(each, IterableDataset))


def _is_large_data(each: Any) -> bool:
    return _is_data(each) or (isinstance(each, torch.Tensor | np.ndarray) and _bytes_of(each) > _LARGE)


def _what_cannot_be_apart(own: _Own, each: Any) -> str:
    """Why reading a copy of `each` could change something that is not copied; empty if it could not."""
    if isinstance(each, types.FunctionType):
        return own.why_function(each)
    return own.why_class(type(each), getattr(each, "__dict__", {})) or _what_is_released(each)


def _what_is_shared(own: _Own, each: Any) -> str:
    """The same of a source that keeps a state. An installed package cleans up after itself with care."""
    if isinstance(each, types.FunctionType):
        return own.why_function(each) or _what_forbids(each)
    if hasattr(type(each), "__del__") and not _is_installed(type(each).__module__):
        return f"it holds a {type(each).__name__}, which cleans up after itself"
    return own.why_class(type(each), getattr(each, "__dict__", {})) or _what_forbids(each)


def _what_is_released(each: Any) -> str:
    """Why what cleans up after itself (a file, a process) is not copied; empty if `each` does not."""
    if isinstance(each, types.FunctionType):
        return ""
    return f"it holds a {type(each).__name__}" if hasattr(type(each), "__del__") else _what_forbids(each)


class _Own:
    """Looks through code that belongs to no installed package, and all such code that it calls by name.

    A copy of an object shares with it the global variables and the attributes of classes, and both share the world
    outside: files, sockets, servers. So code that changes any of these, or may, gives a copy what the original would
    have been given. What it does through installed packages is known by the names of `_CONSUMING` alone.

    Whatever has been looked at without a finding is not looked at again.
    """

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def why_class(self, kind: type, hidden: Any = ()) -> str:
        """Why an object of this class cannot be read apart. `hidden`: names of attributes that it has itself."""
        if kind in self._seen:
            return ""
        self._seen.add(kind)
        own = [base for base in kind.__mro__ if not _is_installed(base.__module__)]
        shared = {name for base in own for name, value in vars(base).items() if _function_of(value) is None}
        for name, value in itertools.chain.from_iterable(vars(base).items() for base in own):
            function = _function_of(value)
            if function is not None:
                why = self.why_function(function, kind.__name__)
                stored, names = _stored_and_used(function)
                if not why and (isinstance(value, classmethod) or {"type", "__class__"} & names) and shared & stored:
                    why = f"{kind.__name__}.{min(shared & stored)} belongs to the class"
            elif name.startswith("__") or name in hidden or name == "_abc_impl" or _is_fixed(value):
                continue
            else:
                why = f"{kind.__name__}.{name} belongs to the class"
            if why:
                return why
        return ""

    def why_function(self, function: types.FunctionType, name: str = "") -> str:
        """Why a function cannot be called apart. `name`: of what it belongs to."""
        if function in self._seen or _is_installed(function.__module__):
            return ""
        self._seen.add(function)
        name = name or function.__qualname__
        for code in _codes_in(function.__code__):
            for each in dis.get_instructions(code):
                if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                    return f"{name} uses the global variable {each.argval}"
            for text in code.co_consts:
                if why := _address(text):
                    return why
        stored, names = _stored_and_used(function)
        if consuming := _CONSUMING.intersection(part for each in names for part in each.split(".")):
            return f"{name} uses {min(consuming)}, which may consume what it reads"
        for used in sorted(_globals_of(function)):
            value = function.__globals__.get(used, sys.modules.get(used))  # some are imported in the function
            if value is not None and (why := self._why_shared(f"{name} uses the global variable {used}", value)):
                return why
            if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
                # Which of its variables, only the code that runs knows: all that have a name in the code.
                for part in sorted((names | stored) & vars(value).keys()):
                    uses = f"{name} uses the global variable {used}.{part}"
                    if why := uses if part in stored else self._why_shared(uses, vars(value)[part]):
                        return why
            if isinstance(value, type) and not _is_installed(value.__module__) and stored & vars(value).keys():
                return f"{value.__name__}.{min(stored & vars(value).keys())} belongs to the class"
        return ""

    def _why_shared(self, uses: str, value: Any) -> str:
        """Why code that uses a global variable cannot run apart: `uses`, or what the variable's own code does."""
        if isinstance(value, str):
            return _address(value)
        while isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        where = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
        if callable(value) and _CONSUMING.intersection((*where.split("."), getattr(value, "__name__", ""))):
            return f"{uses}, which may consume what it reads"
        function = _function_of(value)
        if function is not None:
            if _is_installed(function.__module__):
                return ""
            held = (self._why_shared(uses, each) for each in _held_by(function))
            return self.why_function(function) or next((why for why in held if why), "")
        if isinstance(value, type):
            return "" if _is_installed(value.__module__) else self.why_class(value)
        known = callable(value) and _is_installed(type(value).__module__)
        return "" if known or _is_fixed(value) else uses


def _stored_and_used(function: types.FunctionType) -> tuple[set[str], set[str]]:
    """The names of attributes to which code assigns, and all names that it uses."""
    codes = list(_codes_in(function.__code__))
    instructions = itertools.chain.from_iterable(map(dis.get_instructions, codes))
    stored = {each.argval for each in instructions if each.opname in ("STORE_ATTR", "DELETE_ATTR")}
    return stored, set(itertools.chain.from_iterable(code.co_names for code in codes))


def _globals_of(function: types.FunctionType) -> set[str]:
    """The names of global variables, and of modules imported inside, that code uses; attributes may share a name."""
    instructions = itertools.chain.from_iterable(map(dis.get_instructions, _codes_in(function.__code__)))
    return {each.argval for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")}


# Names in code. Each may mean something harmless too; then a source that could be tried is believed.
_CONSUMING = frozenset(
    (
        "remove", "unlink", "rename", "rmdir", "rmtree", "removedirs", "truncate", "shutil", "mkfifo", "stdin", "input",
        "socket", "create_connection", "connect", "recv", "recvfrom", "recv_into", "accept", "urllib", "urlopen",
        "urlretrieve", "http", "ftplib", "requests", "httpx", "aiohttp", "websockets", "subprocess", "Popen", "popen",
        "boto3", "botocore", "get_object", "paramiko", "redis", "zmq", "pika", "kafka", "KafkaConsumer", "pubsub",
        "lseek", "consume", "subscribe", "lpop", "rpop", "blpop", "brpop", "ack", "commit",
    )
)  # fmt: skip


def _address(text: object) -> str:
    """That it is an address; empty if it is not."""
    if isinstance(text, str) and (found := _ADDRESS.match(text)):
        return f"it reads from {found[0]}..., which is not read twice"
    return ""


def _function_of(value: Any) -> types.FunctionType | None:
    """The function in an attribute of a class or a global variable; None if it is something else."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif isinstance(value, classmethod | staticmethod | types.MethodType):
        value = value.__func__
    return value if isinstance(value, types.FunctionType) else None


def _is_fixed(value: Any) -> bool:
    """Whether a value that is shared never changes."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_fixed, value))
    fixed = (*_ATOMS, types.ModuleType, types.BuiltinFunctionType, types.MemberDescriptorType, types.FunctionType)
    return isinstance(value, (*fixed, enum.Enum, re.Pattern, Path, range, slice, property, typing.TypeVar)) or (
        type(value).__module__ in ("typing", "types", "dataclasses", "abc", "_abc")
    )


def _is_installed(module: str) -> bool:
    if module.partition(".")[0] in (*sys.stdlib_module_names, "midepoch") and module != "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes_in(inner)


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
        if why := _address(text):
            return why
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
    numbers: list[Any] = []  # that processes share, such as a multiprocessing.Value
    size = 0
    try:
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
            elif isinstance(each, sharedctypes.SynchronizedBase):
                numbers.append(each)
            elif _is_flat(each):
                flat.append(each)
        memo = {id(each): each for each in shared}
        memo.update((id(each), each.copy()) for each in flat)
        memo.update((id(each), sharedctypes.synchronized(sharedctypes.copy(each.get_obj()))) for each in numbers)
        _functions_anew(functions, memo)
        return memo[id(value)] if id(value) in memo else copy.deepcopy(value, memo), ""
    except Exception as error:  # noqa: BLE001  # a file cannot be copied; an object may refuse to show its attributes
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


def directly_held(source: Any) -> dict[str, Any]:
    """What an object has in its attributes, or a function in variables that it uses, and what generators there use."""
    held: dict[str, Any] = dict(getattr(source, "__dict__", {}))
    function = source.func if isinstance(source, functools.partial) else source
    if isinstance(function, types.FunctionType):
        code = function.__code__
        defaults = function.__defaults__ or ()
        held |= zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False)
        held |= function.__kwdefaults__ or {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                held[name] = cell.cell_contents
        held |= {name: function.__globals__.get(name) for name in code.co_names}
    for name, each in list(held.items()):
        if isinstance(each, types.GeneratorType) and each.gi_frame is not None:
            held |= {f"{name}.{inner.strip('.')}": value for inner, value in each.gi_frame.f_locals.items()}
    return held


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
