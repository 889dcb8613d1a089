"""Finds the random generators that a dataset or a collate function holds, and seeds them.

It looks here, and nowhere else (docs/guarantees.md shows what is not found):

* in the attributes and slots of objects, from the given ones on;
* in plain containers (dict, list, tuple, set, frozenset, deque) of at most `LONGEST_CONTAINER` members;
* in the parts of partials, bound methods and closures;
* in the attributes of the classes of objects so found, in the closures of their methods, and in the globals of the
  modules that define these classes and functions.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..order.keys import TORCH_KEYS, extend_key, mix

__all__ = ["LONGEST_CONTAINER", "MOST_OBJECTS", "OwnedGenerator", "find_generators", "global_generators"]

LONGEST_CONTAINER = 256
"""Members. A longer container holds data, which is not walked."""

MOST_OBJECTS = 10_000
"""The most objects that one search visits, the nearest first. This limits it to about 20 ms."""

_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator, random.Random)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), np.generic, np.ndarray, torch.Tensor,
          torch.dtype, torch.device, range, memoryview, types.BuiltinFunctionType, types.CodeType,
          types.ModuleType)  # fmt: skip
# Large packages that use no generators of their own.
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {"torch", "numpy", "midepoch"}
_ANY = "*"  # in a path: members without a name, such as those of a set; they share a stream


@dataclass(frozen=True)
class OwnedGenerator:
    """A generator that was found, and how to save, seed and restore it."""

    path: str  # that leads to it
    generator: Any  # itself; for numpy's the bit generator, which several Generators may share
    save: Callable[[], Any]
    restore: Callable[[Any], Any]
    start: Callable[[int], Any]  # given a sample's key; a hash of the path makes its stream differ from others'


def find_generators(*roots: object) -> tuple[list[OwnedGenerator], list[str]]:
    """The generators that `roots` hold, and the paths of those that cannot be seeded. The global ones are left out."""
    found: list[OwnedGenerator] = []
    hopeless: list[str] = []
    paths: set[str] = set()
    queue: deque[tuple[str, Any]] = deque()
    for root in roots:
        queue.append((type(root).__name__, root))
    seen: dict[int, Any] = {}  # keeps objects alive, so that no identity is used twice
    tops: dict[int, Any] = {}  # classes and modules whose attributes were looked at
    # Compare types: `isinstance` may run the object's own code (`__class__`), which may import a module.
    while queue and len(seen) < MOST_OBJECTS:
        path, value = queue.popleft()
        if issubclass(type(value), np.random.Generator):
            value = value.bit_generator
            if value is np.random.get_bit_generator():  # which is another one while samples are read
                hopeless.append(f"{path} (a Generator over numpy's global one)")
                continue
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if not issubclass(type(value), _GENERATORS):
            room = MOST_OBJECTS - len(seen) - len(queue)  # what is further away would not be visited
            queue.extend(itertools.islice(_children(path, value, tops), max(room, 0)))
        elif not any(value is each for each in global_generators()):
            controls = _controls(value)
            if controls is None:
                hopeless.append(f"{path} ({type(value).__name__})")
                continue
            path = _unique(path, paths)
            paths.add(path)
            save, restore, seed = controls
            start = functools.partial(_start, seed, zlib.crc32(path.encode()))
            found.append(OwnedGenerator(path, value, save, restore, start))
    return found, hopeless


def _start(seed: Callable[[int], Any], salt: int, key: int) -> None:
    seed(extend_key(key, salt))


def _unique(path: str, taken: set[str]) -> str:
    """The path, with a number if it is taken, for example by a class of the same name."""
    name, count = path, 2
    while name in taken and _ANY not in path:
        name, count = f"{path}~{count}", count + 1
    return name


def _children(path: str, value: Any, tops: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """What can be reached in one step, with its path. Never runs the object's own code, which might open files."""
    kind: Any = type(value)
    if issubclass(kind, functools.partial):
        steps = [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    elif kind is types.MethodType:
        steps = [(".__self__", value.__self__), (".__func__", value.__func__)]
    elif kind is types.BuiltinMethodType:
        steps = [(".__self__", value.__self__)]
    elif kind is types.FunctionType:
        steps = _closed_over(value) if value.__closure__ else []
        yield from _tops((value,), tops)
    elif issubclass(kind, type):
        steps = []
        yield from _tops(value.__mro__, tops)
    else:
        steps = list(_members(value, kind)) if issubclass(kind, _CONTAINERS) else []
        if kind not in _CONTAINERS:
            try:
                attributes = object.__getattribute__(value, "__dict__")
            except AttributeError:
                attributes = {}
            for name, child in list(attributes.items()) if isinstance(attributes, dict) else ():
                if not name.startswith("_midepoch"):  # what is ours, such as the loader of a `StatefulIterable`
                    steps.append((f".{name}", child))
            for name, slot in _slots(kind):
                with contextlib.suppress(AttributeError):
                    steps.append((f".{name}", slot.__get__(value)))
            yield from _tops(kind.__mro__, tops)
    for step, child in steps:
        if not issubclass(type(child), _ATOMS) or type(child) is types.BuiltinMethodType:
            yield path + step, child


def _closed_over(function: types.FunctionType) -> list[tuple[str, Any]]:
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            found.append((f".{name}", cell.cell_contents))
    return found


def _members(value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    own = next(each for each in _CONTAINERS if issubclass(kind, each))
    if own.__len__(value) > LONGEST_CONTAINER:
        return
    if own is dict:
        for key, child in list(dict.items(value)):
            yield f"[{_text(key)}]", child
    else:
        for place, child in enumerate(list(own.__iter__(value))):
            yield (f"{{{_ANY}}}" if own in (set, frozenset) else f"[{place}]"), child


def _text(key: object) -> str:
    """The name of a key, the same in each process."""
    if isinstance(key, tuple):
        return f"({', '.join(map(_text, key))})"
    return repr(key) if key is None or type(key) in (str, bytes, int, float, bool, complex) else _ANY


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> list[tuple[str, Any]]:
    slot = types.MemberDescriptorType
    return [item for base in kind.__mro__ for item in vars(base).items() if issubclass(type(item[1]), slot)]


def _tops(definitions: tuple[Any, ...], tops: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """What a class, the bases that follow it, and their modules hold; of a function, what its module holds."""
    for each in definitions if id(definitions[0]) not in tops else ():
        name, is_new = each.__module__ or "", id(each) not in tops
        # The program's own module has another name in each process.
        prefix = "" if name in ("", "__main__", "__mp_main__") else f"{name}."
        tops[id(each)] = each
        if not is_new or name.partition(".")[0] in _LIBRARIES:
            continue
        for attribute, member in list(vars(each).items()) if issubclass(type(each), type) else ():
            if issubclass(type(member), (staticmethod, classmethod)):
                member = member.__func__
            elif issubclass(type(member), property):
                member = member.fget
            if issubclass(type(member), _GENERATORS) or (type(member) is types.FunctionType and member.__closure__):
                yield f" -> {prefix}{each.__qualname__}.{attribute}", member
        module = sys.modules.get(name)
        if module is not None and id(module) not in tops:
            tops[id(module)] = module
            for attribute, member in list(vars(module).items()):
                if issubclass(type(member), _GENERATORS):
                    yield f" -> {prefix}{attribute}", member


def global_generators() -> tuple[Any, ...]:
    """Those of python, numpy and torch that `Streams` seeds by itself."""
    numpy: Any = np.random.mtrand._rand
    return torch.default_generator, numpy, numpy._bit_generator, random._inst


_Controls = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]


def _controls(found: Any) -> _Controls | None:
    """save, restore, start; None for what cannot be seeded."""
    if isinstance(found, np.random.BitGenerator):
        bits: Any = found
        start = functools.partial(_start_bit_generator, bits)
        return lambda: bits.state, functools.partial(setattr, bits, "state"), start
    if isinstance(found, np.random.RandomState):
        # A RandomState over another bit generator than MT19937 has no `seed`: the bit generator's state is set instead.
        state, save = found, functools.partial(found.get_state, legacy=False)
        if isinstance(found._bit_generator, np.random.MT19937):
            return save, found.set_state, lambda key: state.seed(key >> 32)  # as numpy's global generator
        return save, found.set_state, functools.partial(_start_bit_generator, found._bit_generator)
    if isinstance(found, torch.Generator):
        own = found
        if found.device.type == "cpu":
            return found.get_state, found.set_state, lambda key: own.manual_seed(key & TORCH_KEYS)
        return found.get_state, found.set_state, found.manual_seed
    if isinstance(found, random.Random) and not isinstance(found, random.SystemRandom):
        return found.getstate, found.setstate, found.seed
    return None


def _start_bit_generator(bits: Any, key: int) -> None:
    if isinstance(bits, np.random.PCG64 | np.random.PCG64DXSM):
        # Ten times cheaper than a SeedSequence, and pinned: an increment must be odd.
        state: Any = {"state": key << 64 | mix(key), "inc": mix(key + 1) << 64 | mix(key + 2) | 1}
        bits.state = {"bit_generator": type(bits).__name__, "state": state, "has_uint32": 0, "uinteger": 0}
    else:
        bits.state = type(bits)(key).state
