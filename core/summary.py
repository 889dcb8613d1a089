"""A bounded summary of a user's objects, which runs none of their code and reads none of their data.

It tells whether a program has changed what a reader holds. Bounds are counts, so that the same objects give the same
summary on each machine; what they cut off lies deepest.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import operator
import os
import pathlib
import random
import re
import sys
import types
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["CUT_OFF", "HERE", "Watch", "changed_paths", "summarize"]

HERE = "#"
"""Ends a path whose value means something in this process alone: an address, a version, the length of a cache."""

CUT_OFF = "..." + HERE
"""In a summary that has met a bound."""

_MOST_OBJECTS = 600  # that are entered
_AS_LONG = 8  # members of a container take as long as an object
_MOST_PATHS = 800
_MOST_BYTES = 1 << 20  # of texts and arrays that are read
_MOST_ATTRIBUTES = 1024  # of an object whose attributes are entered
_DEEPEST = 10
_SMALL = 64  # members of a container whose members are entered
_WIDEST = 8  # of a tuple in a large container
_PLACES = 32  # of a larger one, or of an array, that are read
_SMALL_ARRAY = 1 << 14  # bytes that are read whole
_LONGEST_TEXT = 4096  # characters that are read whole
_LONGEST_NAME = 256  # of a key, or of the last part of a path
_LARGEST_INT = 1 << 24  # larger ones are seeds, hashes or addresses

_SCALARS = (bool, int, float, complex, str, bytes)  # not None: it is what is filled when it is first needed
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_ARRAYS = (np.ndarray, torch.Tensor, torch.nn.Parameter)
_WITHOUT_CLASS = (
    dict, list, tuple, set, frozenset, deque, type, types.FunctionType, types.MethodType, *_ARRAYS,
)  # fmt: skip
_LEFT_OUT = frozenset({"_parameters", "_buffers", "_abc_impl"})  # training and reading move them
_STANDARD = sys.stdlib_module_names - {"__main__"}
_CLOSED = _STANDARD | {__name__.partition(".")[0]}  # a source that is a StatefulIterable holds its loader
_ENTERED = (dict, OrderedDict, defaultdict, functools.partial, types.SimpleNamespace)  # of the standard library
_PLAIN_BASES = frozenset({"builtins", "abc", "typing", "collections", "enum", "functools", "dataclasses", "types"})
_MAY_MOVE = _STANDARD - _PLAIN_BASES
_OF_ONE_MACHINE = re.compile(r"~|[0-9a-fA-F-]{16,}\Z")  # a path of the user's, an address, a hash
_TIMES = 1.5e9, 4e9  # seconds since 1970

# Read as C reads them, so that no metaclass is asked.
_mro, _dict, _name = (type.__dict__[each].__get__ for each in ("__mro__", "__dict__", "__name__"))


def summarize(**roots: Any) -> dict[str, int]:
    """The CRC of each number, text and truth value that the roots hold, and of their objects' types, by path.

    Args:
        roots: by the names that begin their paths.
    """
    return _Walk(roots).found


class Watch:
    """The summary of the same roots, asked for again and again: it is made anew where something has moved."""

    def __init__(self, roots: dict[str, Any]) -> None:
        self._roots = roots
        self._walk: _Walk | None = _Walk(roots)

    def __getstate__(self) -> dict[str, Any]:
        # A walk holds code, which cannot be pickled; another process walks by itself.
        return {"_roots": self._roots, "_walk": None}

    def _anew(self) -> _Walk:
        self._walk = _Walk(self._roots)
        return self._walk

    def summary(self) -> dict[str, int]:
        """As of `summarize`; the same object as the last time if nothing has moved."""
        walk = self._walk or self._anew()
        for value, number, members in walk.parts:
            now, held = _parts_of(value)
            if now != number or len(held) != len(members) or not all(map(operator.is_, held, members)):
                walk = self._anew()
                break
        return walk.found

    def rest(self) -> None:
        """Hold nothing that the program may drop until the summary is asked for again."""
        self._walk = None

    @property
    def values(self) -> dict[str, Any]:
        """The numbers, texts and truth values in the latest summary, by path."""
        return (self._walk or self._anew()).values


def changed_paths(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """The paths whose values differ, sorted."""
    paths = {path for path, value in after.items() if before.get(path) != value} | (before.keys() - after.keys())
    return sorted(path.removesuffix(HERE) for path in paths - {CUT_OFF})


class _Layout(NamedTuple):
    """How to read the instances of a class.

    Attributes:
        opaque: not at all.
        own: the descriptor of their ``__dict__``, or None.
        slots: descriptors.
        classes: of the program's own, bases first: what they set themselves may change.
    """

    opaque: bool
    own: Any
    slots: list[Any]
    classes: list[type]

    def own_of(self, value: Any) -> Any:
        return {} if self.own is None else self.own.__get__(value) or {}


class _Walk:
    """One walk in breadth.

    Attributes:
        found: the summary so far.
        values: the numbers, texts and truth values in it.
        parts: `_parts_of` each object that was entered and may change.
        waiting: (path, object, depth) still to be entered.
        entered: how many objects were, or what takes as long.
        read: bytes of texts and arrays.
        is_full: no more objects can be entered than wait.
        is_cut: an object has too many attributes.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self.found: dict[str, int] = {}
        self.values: dict[str, Any] = {}
        self.parts: list[tuple[Any, Any, list[Any]]] = []
        self.waiting: deque[tuple[str, Any, int]] = deque()
        self.entered = self.read = 0
        self.is_full = self.is_cut = False
        self._seen: set[int] = set()
        self._of_class: dict[type, dict[str, Any]] = {}
        for name, root in roots.items():
            self.add(name, root, 0)
        waiting, found = self.waiting, self.found
        while waiting and self.entered < _MOST_OBJECTS and len(found) < _MOST_PATHS and self.read < _MOST_BYTES:
            self.enter(*waiting.popleft())
        if waiting or self.is_full or self.is_cut:
            found[CUT_OFF] = 0

    def add(self, path: str, value: Any, depth: int) -> None:
        """Note a value, or enter it later if it holds others."""
        kind = type(value)
        if kind not in _SCALARS and (value is None or self.is_full):
            return
        if issubclass(kind, np.generic):
            value = np.generic.item(value)
            kind = type(value)
        if kind in _SCALARS:
            if kind is str or kind is bytes:
                self.read += min(len(value), _LONGEST_TEXT)
            self.values[path] = value
            self.found[path if _is_steady(path, value) else path + HERE] = _crc(value)
        elif issubclass(kind, enum.Enum):
            self.found[path] = _crc(value._name_)
        elif issubclass(kind, _GENERATORS):
            self.found[path] = _crc(f"generator {_name(kind)}")
        elif depth < _DEEPEST and id(value) not in self._seen:
            self._seen.add(id(value))
            self.waiting.append((path, value, depth + 1))
            self.is_full = self.entered + len(self.waiting) >= _MOST_OBJECTS

    def enter(self, path: str, value: Any, depth: int) -> None:
        """Note what an object holds."""
        kind = type(value)
        self.entered += 1
        number, members = _parts_of(value)
        if kind is not tuple and (number is not None or members):
            self.parts.append((value, number, members))
        if kind in _ARRAYS:
            found, size = number
            self.found |= {path + name: crc for name, crc in found.items()}
            self.read += size
        elif issubclass(kind, dict):
            self._mapping(path, number, members, depth)
        elif issubclass(kind, (list, tuple)):
            self._sequence(path, value, number, members, depth)
        elif issubclass(kind, (set, frozenset)):  # whose order differs from process to process
            scalars = [each for each in members[:number] if type(each) in _SCALARS]
            self.read += sum(min(len(each), _LONGEST_TEXT) for each in scalars if type(each) in (str, bytes))
            self.entered += len(scalars) // _AS_LONG
            self.found[path] = sum(map(_crc, scalars)) & 0xFFFFFFFF
        elif issubclass(kind, deque):
            self.found[path + HERE] = number
        elif kind is types.FunctionType:
            self._function(path, value, members, depth)
        elif kind is types.MethodType:
            self.add(f"{path}.__self__", value.__self__, depth)
            self.add(f"{path}.__func__", value.__func__, depth)
        elif issubclass(kind, type):
            self.found[path] = _crc(f"class {_name(value)}")
        self._attributes(path, value, kind, depth)

    def _mapping(self, path: str, size: int, members: list[Any], depth: int) -> None:
        keys, values = members[:size], members[size : 2 * size]
        if size > _SMALL or any(type(key) is not str for key in keys):
            self.found[path + HERE] = size  # a cache or an index
            return
        self.entered += size // _AS_LONG
        for key, held in zip(keys, values, strict=True):
            if key not in _LEFT_OUT and len(key) <= _LONGEST_NAME and not _is_of_one_machine(key):
                self.add(f"{path}[{key!r}]", held, depth)

    def _sequence(self, path: str, value: Any, size: int, members: list[Any], depth: int) -> None:
        self.found[f"{path}.len"] = size
        if size <= _SMALL:
            self.entered += size // _AS_LONG
            for place, held in enumerate(members[:size]):  # its attributes follow
                self.add(f"{path}[{place}]", held, depth)
            return
        members = members[:_PLACES]
        widest = max((len(each) for each in members if type(each) is tuple), default=1)
        self.entered += 4 * max(1, min(widest, _WIDEST))  # it takes as long as that many objects
        self.found[f"{path}[*]"] = zlib.crc32(b",".join(map(_item, members)))
        self.found[f"{path}[*]{HERE}"] = id(value)

    def _function(self, path: str, value: types.FunctionType, members: list[Any], depth: int) -> None:
        code, defaults, *cells = members  # and its attributes
        constants = b"".join(map(_item, code.co_consts[1:_SMALL]))  # the first may be the docstring
        self.found[path] = zlib.crc32(constants, _crc(f"{value.__module__}.{value.__qualname__}"))
        for name, held in zip(code.co_freevars, cells, strict=False):
            self.add(f"{path}.{name}", held, depth)
        self.add(f"{path}.defaults", defaults, depth)

    def _attributes(self, path: str, value: Any, kind: type, depth: int) -> None:
        layout = _layout(kind)
        if layout.opaque:
            return
        if not issubclass(kind, _WITHOUT_CLASS):
            self.found[path] = _crc(_name(kind))
        if kind not in self._of_class:
            self.parts.extend((each, *_parts_of(each)) for each in layout.classes)
            members = itertools.chain.from_iterable(map(_first_members, layout.classes))
            self._of_class[kind] = {name: member for name, member in members if type(member) in _SCALARS}
        attributes = self._of_class[kind] | {
            slot.__name__: each for slot in layout.slots for each in _held(slot, value)
        }
        own = layout.own_of(value)
        if len(own) > _MOST_ATTRIBUTES:
            self.found[path + HERE], self.is_cut = len(own), True
            return
        attributes |= own
        names = sorted(each for each in attributes if type(each) is str)
        for name in names[: 4 * _SMALL]:
            if name not in _LEFT_OUT and not name.startswith("__"):
                self.add(f"{path}.{name}", attributes[name], depth)


def _parts_of(value: Any) -> tuple[Any, list[Any]]:
    """What an object holds: what can be compared, None without any, and members, which are the same until replaced."""
    kind: type = type(value)
    number: Any = None
    members: list[Any] = []
    if kind in _ARRAYS:
        number = _array(value)
    elif issubclass(kind, dict):
        number = dict.__len__(value)
        if number <= _SMALL:
            members = [*dict.keys(value), *dict.values(value)]
    elif issubclass(kind, (list, tuple)):
        base: Any = list if issubclass(kind, list) else tuple
        number = size = base.__len__(value)
        places = range(size) if size <= _SMALL else (each * (size - 1) // (_PLACES - 1) for each in range(_PLACES))
        members = [base.__getitem__(value, each) for each in places]
    elif issubclass(kind, (set, frozenset)):
        number = len(value) if kind in (set, frozenset) else 0
        members = list(value) if 0 < number <= _SMALL else []
    elif issubclass(kind, deque):
        number = deque.__len__(value)
    elif kind is types.FunctionType:
        cells = (next(_held(types.CellType.cell_contents, each), None) for each in value.__closure__ or ())
        members = [value.__code__, value.__defaults__, *cells]
    elif issubclass(kind, type):
        return None, [*_dict(value), *_dict(value).values()]
    layout = _layout(kind)
    if not layout.opaque:
        own = layout.own_of(value)
        members += (kind, *own, *own.values(), *(each for slot in layout.slots for each in _held(slot, value)))
    return number, members


def _array(value: Any) -> tuple[dict[str, int], int]:
    """By what to add to its path, what tells of an array; and how many of its bytes were read for it."""
    if type(value) is not np.ndarray and value.is_nested:  # it has no shape
        return {"": _crc("nested")}, 0
    crc, here, size = _crc(f"{value.dtype} {tuple(value.shape)}"), dict[str, int](), 0
    if type(value) is np.ndarray:
        owner = value
        while type(owner.base) is np.ndarray:
            owner = owner.base
        read = owner.base is None and not value.dtype.hasobject  # else a file that is mapped, or objects
        here = {HERE: value.__array_interface__["data"][0]}
    else:
        # What lies in shared memory is the same in every process at each moment.
        read = value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad
        read = read and not value.is_shared()
        if read:
            version = None if value.is_inference() else value._version
            here = {HERE: _crc(repr((value.data_ptr(), version)))}
    if read and value.nbytes:
        some = value
        if value.nbytes > _SMALL_ARRAY and value.ndim:
            count = math.prod(value.shape)
            places = [each * (count - 1) // (_PLACES - 1) for each in range(min(_PLACES, count))]
            some = value[np.unravel_index(places, tuple(value.shape))]
        size, crc = some.nbytes, zlib.crc32(some.tobytes() if type(value) is np.ndarray else _bytes_of(some), crc)
    return {"": crc, **here}, size


@functools.lru_cache(maxsize=4096)
def _layout(kind: type) -> _Layout:
    classes = [(each, str(_dict(each).get("__module__", "builtins")).partition(".")[0]) for each in _mro(kind)]
    of_library = classes[0][1] in _CLOSED or issubclass(kind, types.ModuleType)
    # An iterator moves as it is read.
    moves = any(module in _MAY_MOVE or "__next__" in _dict(each) for each, module in classes)
    own, slots, programs = None, [], []
    for each, module in reversed(classes):
        for name, member in _first_members(each):
            if name == "__dict__" and type(member) in (types.GetSetDescriptorType, types.MemberDescriptorType):
                own = member
            elif type(member) is types.MemberDescriptorType and not name.startswith("__"):
                slots.append(member)
        if module not in _CLOSED and module != "torch" and each is not types.FunctionType:
            programs.append(each)
    return _Layout(kind not in _ENTERED and (of_library or moves), own, slots, programs)


def _first_members(kind: type) -> Iterator[tuple[str, Any]]:
    return itertools.islice(_dict(kind).items(), _MOST_ATTRIBUTES)


def _held(descriptor: Any, holder: Any) -> Iterator[Any]:
    """What a slot or a cell holds: one value, or none."""
    try:
        yield descriptor.__get__(holder)
    except (AttributeError, ValueError):
        return


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy())


def _is_steady(path: str, value: Any) -> bool:
    """Whether a value may be the same in another process elsewhere: no path, seed, time, pid, address or hash."""
    if type(value) is int:
        is_ours = value in (os.getpid(), os.getppid())
        return abs(value) < _LARGEST_INT and not is_ours and not path.rstrip("']").endswith("seed")
    if type(value) is str:
        return not _is_of_one_machine(value[:_LONGEST_TEXT])
    return not (type(value) is float and _TIMES[0] < value < _TIMES[1])


def _is_of_one_machine(text: str) -> bool:
    return "/" in text or "\\" in text or _OF_ONE_MACHINE.match(text) is not None


def _item(value: Any, depth: int = 0) -> bytes:
    """Of a long list's member only numbers and texts count, of a path its last part."""
    if type(value) is tuple and depth < _DEEPEST:
        return b"".join(_item(each, depth + 1) for each in value[:_WIDEST])
    if issubclass(type(value), pathlib.PurePath) and type(value).__module__.startswith("pathlib"):
        value = value.name
    if type(value) is str:
        return value[-_LONGEST_NAME:].replace("\\", "/").rpartition("/")[2].encode(errors="surrogatepass")
    return repr(_short(value)).encode() if type(value) in (bool, int, float) else b"."


def _crc(value: Any) -> int:
    """Of a number or text; of a long text, of its length and its ends."""
    if type(value) in (str, bytes):
        size, crc = len(value), zlib.crc32(b"t" if type(value) is str else b"b")
        if size > _LONGEST_TEXT:
            value, crc = value[: _LONGEST_TEXT // 2] + value[-_LONGEST_TEXT // 2 :], zlib.crc32(str(size).encode(), crc)
        return zlib.crc32(value.encode(errors="surrogatepass") if type(value) is str else value, crc)
    return zlib.crc32(repr(_short(value)).encode())


def _short(value: Any) -> Any:
    """A number. Of an integer that python does not write, the last digits."""
    return value if type(value) is not int or value.bit_length() <= _LONGEST_TEXT else value % _LARGEST_INT
