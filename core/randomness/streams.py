"""One random stream for each sample; the caller's generators are left as they were found.

Code inside a dataset draws from generators that it did not choose with resuming in mind: the global ones of python,
numpy and torch, or some that it owns. While a sample is read, all of them are put under a stream of that sample alone,
keyed by (seed, epoch, position). So the sample's augmentation does not depend on which process reads it, after which
others, or whether the epoch was interrupted before.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import enum
import functools
import gc
import itertools
import random
import sys
import threading
import types
import warnings
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from midepoch.errors import MidepochError, MidepochWarning
from midepoch.order.keys import derive_key, mix
from midepoch.state.digest import digest

from .globals import lend_globals

__all__ = ["OwnedGenerator", "Purpose", "Streams", "find_generators", "sample_generator", "warn_of_kept"]


class Purpose:
    """The first word of every key, so that no two uses of one (seed, epoch) share a stream."""

    SAMPLE = 1  # reading the sample at one position
    BATCH = 2  # __getitems__ and collate_fn
    LISTING = 3  # a torch Sampler giving one epoch's list
    OPENING = 4  # iter(dataset), and the base seed of worker processes
    MIXING = 5  # which of several loaders is read at a step


_MASK_32 = (1 << 32) - 1

# What `sample_generator` reads: the key of the sample that is being read, or the Streams that rest meanwhile; the
# generator that was made of the key; whether either was asked for.
_current = threading.local()


def process_seed() -> int:
    """torch's initial seed, read and not consumed: what a world of one uses where nobody states a seed."""
    key = getattr(_current, "key", None)
    if isinstance(key, Streams):
        key.asked = True  # a sample that depends on it has to be read under its key
    _current.used = True
    return torch.initial_seed() % (1 << 64)


def sample_generator() -> np.random.Generator:
    """The numpy Generator of the sample that is being read: the way to random numbers that needs no global generator.

    Call it inside ``__getitem__``, ``__next__``, ``__getitems__`` or ``collate_fn`` of what midepoch reads. Two calls
    for one sample return the same Generator, which goes on; it belongs to this sample, so do not keep it.

    Raises:
        MidepochError: no sample is being read in this thread.
    """
    key = getattr(_current, "key", None)
    if key is None:
        raise MidepochError(
            "no sample is being read here: call midepoch.sample_generator() inside the dataset or collate_fn of a "
            "loader made by midepoch.wrap, with randomness='sample'"
        )
    if isinstance(key, Streams):
        key.asked = True  # so that the sample will be read again, under its key
        return np.random.Generator(np.random.Philox(0))
    _current.used = True
    made: tuple[int, np.random.Generator] | None = _current.generator
    if made is None or made[0] != key:
        made = _current.generator = key, np.random.Generator(np.random.Philox(key=[key, Purpose.SAMPLE]))
    return made[1]


def warn_of_kept(reader: object, sample: object) -> None:
    """Say that `sample` drew random numbers when nobody was ready for that, and none when it was read again."""
    warnings.warn(
        f"{type(reader).__name__} drew random numbers for sample {sample} when it was first read, and none when it was "
        "read again: it keeps what it drew, which will not be the same after a resume; draw with "
        "midepoch.sample_generator(), or draw a number for every sample",
        MidepochWarning,
        stacklevel=3,
    )


# --- generators that a dataset owns ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnedGenerator:
    """A generator that code of the source can reach, and how to save, key and restore it.

    Attributes:
        path: that led to it when it was looked for the last time.
        name: by which its stream is told from others'; a path, too.
        generator: itself; the bit generator of numpy's, which several Generators may share.
        salt: a number made of the name.
    """

    path: str
    name: str
    generator: Any
    salt: int
    save: Callable[[], Any]
    restore: Callable[[Any], Any]
    start: Callable[[int], Any]


_Controls = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]


def _random_state(generator: np.random.RandomState) -> _Controls:
    return (
        lambda: generator.get_state(legacy=False),
        generator.set_state,
        # A RandomState on another bit generator than MT19937 cannot be seeded, only replaced in state.
        (lambda key: generator.seed(key & _MASK_32))
        if isinstance(generator._bit_generator, np.random.MT19937)
        else functools.partial(_start_bit_generator, generator._bit_generator),
    )


def _bit_generator(bits: Any) -> _Controls:
    return (
        lambda: bits.state,
        functools.partial(setattr, bits, "state"),
        functools.partial(_start_bit_generator, bits),
    )


def _start_bit_generator(bits: Any, key: int) -> None:
    if isinstance(bits, np.random.PCG64 | np.random.PCG64DXSM):
        # Ten times cheaper than a SeedSequence, and pinned: an increment must be odd.
        bits.state = {
            "bit_generator": type(bits).__name__,
            "state": {"state": key << 64 | mix(key), "inc": mix(key + 1) << 64 | mix(key + 2) | 1},
            "has_uint32": 0,
            "uinteger": 0,
        }
    else:
        bits.state = type(bits)(key).state


def _controls(found: object) -> _Controls | None:
    """save, restore, start for a generator object; None for anything that cannot be keyed."""
    if isinstance(found, np.random.BitGenerator):
        return _bit_generator(found)
    if isinstance(found, np.random.RandomState):
        return _random_state(found)
    if isinstance(found, torch.Generator):
        return found.get_state, found.set_state, found.manual_seed
    if isinstance(found, random.Random) and not isinstance(found, random.SystemRandom):
        return found.getstate, found.setstate, found.seed
    return None


_GENERATORS = (
    np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator, random.Random,
)  # fmt: skip
_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), np.generic, torch.Tensor, type, torch.dtype,
          torch.device, range, memoryview)  # fmt: skip
_LARGE = 1000  # children of one object
_LARGEST_SEARCH = 100_000  # objects visited; what a dataset of a million small objects may cost at its first batch


_Told = TypeVar("_Told")


def _for_each_type(function: Callable[[type], _Told]) -> Callable[[type], _Told]:
    """Keeps the answers."""
    return functools.lru_cache(maxsize=4096)(function)


@_for_each_type
def _role(kind: type) -> Literal["class", "module", "array", "atom", "seeds", "generator", "other"]:
    """What a search does with an object of this type; kept, since asking takes longer than all else of a search."""
    if issubclass(kind, type):
        return "class"
    if issubclass(kind, types.ModuleType):
        return "module"
    if issubclass(kind, np.ndarray):
        return "array"
    if issubclass(kind, _ATOMS):
        return "atom"
    if issubclass(kind, np.random.SeedSequence):
        return "seeds"
    return "generator" if issubclass(kind, _GENERATORS) else "other"


def _is_global(generator: object) -> bool:
    return (
        generator is torch.default_generator
        or generator is np.random.mtrand._rand
        or generator is np.random.mtrand._rand._bit_generator
        or generator is getattr(random, "_inst", None)
    )


def _text(key: object) -> str:
    """What a key of a dict is called, the same in each process; with a `_ANY` for what has no such name."""
    if isinstance(key, tuple):
        return f"({', '.join(map(_text, key))})"
    if isinstance(key, enum.Enum):
        return f"{_module(type(key).__module__)}{type(key).__qualname__}.{key.name}"
    if isinstance(key, type):
        return f"{_module(key.__module__)}{key.__qualname__}"
    if isinstance(key, PurePath):
        return repr(str(key))
    if isinstance(key, np.generic):
        key = key.item()  # equal to, and so the same key as, the plain number
    # The repr of anything else may hold an address.
    plain = key is None or type(key) in (str, bytes, int, float, bool, complex)
    return repr(key) if plain or isinstance(key, torch.dtype | torch.device) else _ANY


_ANY = "*"
"""In a path: any of several, whose places tell what was read before, or differ in each process. They share a stream."""


def _module(name: str | None) -> str:
    """A module's name in front of what it holds; that of the program itself depends on who runs it."""
    return f"{name}." if name not in (None, "__main__", "__mp_main__") else ""


_FROM_THE_TOP = " -> "
"""In front of a name that says by itself where something stands, whichever way led there."""


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """What can be reached from `value` in one step, with the text that names the step.

    By its type and the built-in types' own methods: what an object answers itself may open files, or draw.
    """
    kind = type(value)
    if issubclass(kind, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif kind is types.MethodType:
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif kind is types.BuiltinMethodType:
        yield ".__self__", value.__self__
    elif kind is types.GeneratorType:
        if value.gi_frame is not None:
            yield from ((f".{name}", local) for name, local in list(value.gi_frame.f_locals.items()))
        # An iterator that a loop goes through has no name.
        others = [each for each in gc.get_referents(value) if _iterates(type(each))]
        yield from ((f".<{place}>", each) for place, each in enumerate(others))
    elif _iterates(kind) or issubclass(kind, _VIEWS):
        # map, zip, itertools.cycle, iter(function, sentinel): they show what they hold to the garbage collector only.
        for place, child in enumerate(gc.get_referents(value)):
            yield f"<{place}>", child
    elif kind is types.FunctionType:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # a cell that is still empty
                content = cell.cell_contents
                if isinstance(content, types.ModuleType):
                    yield from _taken_from(content, list(_names(value.__code__)))
                else:
                    yield f".{name}", content
        yield ".__defaults__", value.__defaults__
        yield ".__kwdefaults__", value.__kwdefaults__
        yield from ((f".{name}", child) for name, child in list(value.__dict__.items()))
        yield from _globals_used(value)
    else:
        if issubclass(kind, _CONTAINERS):
            yield from _members(value, kind)
            if kind in _CONTAINERS:
                return
        yield from _attributes(value, kind)


_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_VIEWS: tuple[type, ...] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))


@_for_each_type
def _iterates(kind: type) -> bool:
    return issubclass(kind, types.GeneratorType) or (
        issubclass(kind, Iterator) and kind.__module__ in ("builtins", "itertools")
    )


def _members(value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """Of a container. A long one of data, such as a million file names, is told by its types, without a step each."""
    if issubclass(kind, dict):
        if dict.__len__(value) <= _SHORT or not _is_data(dict.values(value)):
            for key, child in list(dict.items(value)):
                text = _text(key)
                yield f"[{text}]", child
                if _ANY in text:
                    yield f"<{text}>", key
        if issubclass(kind, defaultdict):
            yield ".default_factory", value.default_factory
    elif issubclass(kind, set | frozenset):
        members = list(set.__iter__(value) if issubclass(kind, set) else frozenset.__iter__(value))
        if len(members) <= _SHORT or not _is_data(members):
            yield from ((f"{{{_ANY}}}", child) for child in members)
    else:
        own = next(each for each in (list, tuple, deque) if issubclass(kind, each))
        members = list(own.__iter__(value))
        if len(members) <= _SHORT or not _is_data(members):
            yield from ((f"[{place}]", child) for place, child in enumerate(members))


_SHORT = 64  # members


def _attributes(value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """Of any object, and its class."""
    attributes = None
    with contextlib.suppress(AttributeError):
        own = threading.local if issubclass(kind, threading.local) else object
        attributes = own.__getattribute__(value, "__dict__")
    if isinstance(attributes, dict):
        for name, child in list(attributes.items()):
            yield f".{name}", child
    for base in kind.__mro__:
        for name in _slots(base):
            with contextlib.suppress(AttributeError):
                yield f".{name}", object.__getattribute__(value, name)
    if issubclass(kind, functools._lru_cache_wrapper):
        for key, child in _cached(value):
            if isinstance(key, tuple | list):  # an object stands in front of arguments that were given by name
                key = tuple("=" if type(part) is object else part for part in key)
            yield f"({_text(key)})", child
    yield "", kind


def _cached(function: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and results of an lru_cache, which it shows to the garbage collector only."""
    shown = gc.get_referents(function)
    kept = next(place for place, each in enumerate(shown) if type(each) is dict)
    for key, result, link in zip(shown, shown[1:kept], shown[2:kept], strict=False):
        if link is not type(function) and isinstance(link, type) and link.__name__ == "_lru_list_elem":
            yield key, result
    yield from list(shown[kept].items())  # of results, where it has no largest size; else of the links


def _class_members(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class's own body holds: class attributes and methods, of code that is not a library's."""
    if _is_library(kind.__module__):
        return
    for name, member in list(vars(kind).items()):
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        elif isinstance(member, property):
            member = member.fget
        elif isinstance(member, functools.cached_property):
            member = member.func
        if isinstance(member, types.FunctionType) or not name.startswith("__") or name in _CALLED:
            yield f"{_FROM_THE_TOP}{_module(kind.__module__)}{kind.__qualname__}.{name}", member


_CALLED = {"__call__", "__getitem__", "__getitems__", "__iter__", "__next__", "__enter__", "__exit__"}


def _is_data(values: Any) -> bool:
    """Whether these are atoms alone, or tuples, lists and dicts of them, as the samples of an image folder."""
    for _ in range(_DEEPEST_DATA):
        kinds = set(map(type, values))
        nested = {kind for kind in kinds if kind in (tuple, list, dict) or _is_named_tuple(kind)}
        if not all(_role(kind) in ("atom", "array") for kind in kinds - nested):
            return False
        if not nested:
            return True
        values = list(itertools.chain.from_iterable(
            dict.values(each) if type(each) is dict else each for each in values if type(each) in nested
        ))  # fmt: skip
    return False


_DEEPEST_DATA = 6


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    # A private slot is known under the mangled name.
    names = tuple(
        f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
    )
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


_OURS_AND_THEIRS = sys.stdlib_module_names - {"__main__"} | {"torch", "numpy", "midepoch"}
"""Modules that are not searched: they are large, and draw from no generator but the global ones."""


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _OURS_AND_THEIRS


@functools.cache
def _is_installed(package: str) -> bool:
    """True for the code of installed packages, of which there is too much to follow all that it names."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _globals_used(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What stands at the top of the function's module and is named in it: ``rng``, ``transform``, a helper function.

    Of a module that is named, as in ``helpers.augment(x)``, what the function may take from it.
    """
    if _is_library(function.__module__):
        return
    installed = _is_installed((function.__module__ or "").partition(".")[0])
    names, module = list(_names(function.__code__)), _module(function.__module__)
    for name in names:
        # A module that the function imports itself is found where all modules are.
        found = function.__globals__.get(name, sys.modules.get(name))
        if installed:
            if isinstance(found, _GENERATORS):
                yield f"{_FROM_THE_TOP}{module}{name}", found
        elif isinstance(found, types.ModuleType):
            yield from _taken_from(found, names)
        elif found is not None and _may_hold(type(found)):
            yield f"{_FROM_THE_TOP}{module}{name}", found


def _taken_from(
    module: types.ModuleType, names: Sequence[str], taken: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """What code with these names may take from a module of the user's, and from those that this one holds."""
    if _is_library(module.__name__) or module.__name__ in taken:
        return
    top, held = f"{_FROM_THE_TOP}{_module(module.__name__)}", vars(module)
    for name in names:
        found = held.get(name)
        if isinstance(found, types.ModuleType):
            yield from _taken_from(found, names, taken | {module.__name__})
        elif found is not None:
            yield top + name, found


@_for_each_type
def _may_hold(kind: type) -> bool:
    """Whether an object of this type, at the top of a module, may hold a generator."""
    return issubclass(kind, _CARRIERS) or _iterates(kind) or not _is_library(kind.__module__)


_CARRIERS = (
    *_GENERATORS, *_CONTAINERS, *_VIEWS, type, types.FunctionType, types.MethodType, types.BuiltinMethodType,
    functools.partial, functools._lru_cache_wrapper, types.SimpleNamespace, threading.local, torch.nn.Module,
    np.ndarray,
)  # fmt: skip


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names and attributes that code uses, those of the functions defined in it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class Found(NamedTuple):
    """What `find_generators` found.

    Attributes:
        owned: generator objects.
        hopeless: the paths of those that cannot be keyed.
        reads_states: some code may look at the state of a global generator; or not all could be searched.
        lengths: of the lists that were searched, by their paths.
    """

    owned: list[OwnedGenerator]
    hopeless: list[str]
    reads_states: bool
    lengths: dict[str, int]


_STATES = {
    "fork_rng", "getstate", "get_state", "get_rng_state", "isolate_rng", "preserve_rng_state", "initial_seed",
    "clone_state", "graphsafe_get_state", "get_bit_generator", "default_generator", "_inst", "_rand", "__getstate__",
}  # fmt: skip
"""Names by which code gets at the state of a global generator, which then decides without a number being drawn."""


def _reads_states(value: Any) -> bool:
    """Whether this may be code that looks at the state of a global generator, by its name and those that it uses."""
    if type(value) is not types.FunctionType:
        return _is_called(type(value)) and value.__name__ in _STATES
    if not _STATES.isdisjoint(_names(value.__code__)):
        return True
    # How objects are pickled is written down in many classes, such as PIL's images, and has nothing to do with
    # generators where it gets at nothing but the object itself.
    return value.__name__ in _STATES and not (value.__name__ == "__getstate__" and _is_of_itself(value))


@_for_each_type
def _is_called(kind: type) -> bool:
    """Whether objects of this type have a `__name__` by nature, as built-in functions; others may be asked in vain."""
    return any(isinstance(vars(base).get("__name__"), types.GetSetDescriptorType) for base in kind.__mro__)


def _is_of_itself(function: types.FunctionType) -> bool:
    """True for code that takes all from its arguments, its closure and the built-in types."""
    codes = [function.__code__]
    for code in codes:
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
        for instruction in dis.get_instructions(code):
            kind, name = instruction.opname, instruction.argval
            if "IMPORT" in kind:
                return False
            if ("GLOBAL" in kind or kind.endswith("_NAME")) and (
                name in function.__globals__ or not isinstance(getattr(builtins, name, None), type)
            ):
                return False
    return True


def find_generators(*roots: object) -> Found:
    """The generator objects reachable from `roots`, and the paths of those that cannot be keyed.

    Follows attributes, slots, containers, closures, defaults, partials, bound methods, classes, and what methods and
    functions name at the top of their modules. The global generators are not listed: `Streams` has them anyway.
    """
    found: list[OwnedGenerator] = []
    hopeless: list[str] = []
    spawning: list[str] = []
    reads_states = False
    lengths: dict[str, int] = {}
    names: set[str] = set()
    modules: list[types.ModuleType] = []  # that some object holds
    used: dict[str, None] = {}  # names in all code
    queue: deque[tuple[str, Any]] = deque((f"{type(root).__name__}", root) for root in roots)
    later: deque[tuple[str, Any]] = deque()  # members of large containers: what is beside them is looked at first
    seen: dict[int, Any] = {}  # keeps what it has seen alive, so that no identity is used twice
    while queue or later or modules:
        if not (queue or later):
            # Which code takes what from them is not known.
            queue.extend(found for module in modules for found in _taken_from(module, list(used)))
            modules.clear()
            continue
        path, value = (queue or later).popleft()
        role = _role(type(value))
        if role == "atom" or id(value) in seen:
            continue
        if role == "class":
            for kind in value.__mro__:
                if id(kind) not in seen:
                    seen[id(kind)] = kind
                    queue.extend(_class_members(kind))
            continue
        if role == "module":
            seen[id(value)] = value
            modules += [] if _is_installed(value.__name__.partition(".")[0]) else [value]
            continue
        if role == "array":
            if not value.dtype.hasobject:
                continue
            seen[id(value)] = value
            value = value.ravel().tolist()
        if len(seen) >= _LARGEST_SEARCH:
            hopeless.append(f"{path} and what lies behind it (more than {_LARGEST_SEARCH} objects)")
            reads_states = True
            break
        if role == "generator" and isinstance(value, np.random.Generator):
            value = value.bit_generator  # several may share it, and then its stream
            if id(value) in seen:
                continue
        seen[id(value)] = value
        if role == "seeds":
            hopeless.append(f"{path} (SeedSequence, which counts what it has spawned)")
            continue
        if role == "generator":
            if _is_global(value):
                continue
            controls = _controls(value)
            if controls is None:
                hopeless.append(f"{path} ({type(value).__name__})")
            else:
                name = _not_taken(path, names)
                names.add(name)
                found.append(OwnedGenerator(path, name, value, zlib.crc32(name.encode()), *controls))
            continue
        try:
            children = list(_children(value))
            reads_states = reads_states or _reads_states(value)
        except Exception as error:  # noqa: BLE001  # whatever code of the user's raises
            # A proxy, say, of what is not there yet.
            hopeless.append(f"{path} (which cannot be searched: {type(error).__name__})")
            reads_states = True
            continue
        if type(value) is types.FunctionType:
            used |= dict.fromkeys(_names(value.__code__))
            if "spawn" in _names(value.__code__):
                spawning.append(f"{path} (which may spawn generators of others, counted by them)")
        if issubclass(type(value), list | deque):
            lengths[path] = len(children)
        into = later if len(children) > _LARGE else queue
        into.extend([(step if step.startswith(_FROM_THE_TOP) else path + step, child) for step, child in children])
    if any(isinstance(each.generator, np.random.BitGenerator) for each in found):
        hopeless += spawning
    return Found(found, hopeless, reads_states, lengths)


def _not_taken(path: str, names: set[str]) -> str:
    """A name for what stands there: another one where classes, say, are called alike."""
    if _ANY in path:
        return path  # one for all
    return next(name for name in itertools.chain([path], (f"{path}~{n}" for n in itertools.count(2)))
                if name not in names)  # fmt: skip


# --- all of them at once --------------------------------------------------------------------------------------------


_ORDER_TELLS = (
    "while samples are read, so what they draw may depend on which samples were read before, and be another after a "
    "resume: keep them in a dict by what tells them apart, make them in __init__, or use midepoch.sample_generator()"
)

_FIRST_GAP = 3  # batches from the first search of a pass, behind its first batch, to the next


def _warn(text: str) -> None:
    warnings.warn(text, MidepochWarning, stacklevel=5)


class Streams:
    """Every generator that reading a sample can draw from, put under one key at a time.

    Use: ``begin()``, then ``start(key)`` before each sample, then ``end()`` in a finally. In between, the global
    generators are ours; after it they are as they were. Not thread-safe, as the global generators are not.

    Seeding them takes six microseconds, which is a lot where nobody draws. So samples can be read after
    ``begin(rest=True)`` while nobody has ``touched()`` a generator; then follow ``wake()``, and the sample that has,
    once more, after ``start(key)``. Behind ``watch()`` ``touched()`` tells of the key that was started last.

    A generator of the dataset's own is told from others by the path that leads to it when a pass begins, which is where
    a process that starts anew finds it. What samples do to the paths does not count: one that is found elsewhere when
    a pass ends keeps its name. One that was moved between passes has a new one.

    Args:
        roots: objects whose own generators are looked for (a dataset, a collate_fn). The search runs at the first
            `begin`, at each `begin_pass`, and from `found_late`, in the process that reads.

    Attributes:
        can_rest: ``begin(rest=True)`` and `touched` work, as far as the last search can tell.
        batches: of which `found_late` was asked.
    """

    def __init__(self, *roots: object) -> None:
        self._roots = roots
        self._owned: list[OwnedGenerator] | None = None
        self._settled: dict[str, int] = {}  # lengths of lists when no sample of this pass had been read
        self._reading = False  # a pass has begun, and was not seen to end
        self._renewed: set[str] = set()  # paths of generators that are made anew for each sample, alike each time
        self._told: set[str] = set()  # of those of which there was a warning
        self._globals = lend_globals()
        # Looked up once: this is done for every sample. python's without the argument handling of random.seed.
        self._python_generator: Any = random._inst
        self._seed_python = super(random.Random, self._python_generator).seed
        self._start_numpy = np.random.seed
        self._start_torch = torch.default_generator.manual_seed
        self._saved: list[Any] | None = None
        self._outer: tuple[Any, ...] = (None, None, None)
        self._new: dict[str, str] = {}  # by paths, how those stood that the first batch of this pass made
        self.can_rest = False
        self.asked = False  # `sample_generator` was called since `begin`
        self.batches, self._next_search, self._gap, self._workers = 0, 1, 1, 1

    def begin_pass(self, *more: object) -> None:
        """Look for owned generators, behind `more` too, before the first sample of a pass is read in this process."""
        before = self._owned
        new = self._search(more)
        if before is not None and self._reading:
            # The last pass was left early, or this one is not the first of two that take turns. One that has taken
            # another's place is most likely the caller's doing, between passes.
            paths = {each.path for each in before}
            self._warn_of_late([each for each in new if each.path not in paths])
        self._reading = True
        self._next_search, self._gap = self.batches + 1, _FIRST_GAP
        worker = get_worker_info()
        self._workers = 1 if worker is None else worker.num_workers

    def begin_replay(self) -> None:
        """In place of `begin_pass`, for a source that is always read from its start, and for which nobody looks later.

        A generator that it makes while it is read draws what it drew the last time, if anything does: without a key,
        then, also in the next pass. One in the place of another was put there by the caller.
        """
        before = self._owned
        self._search(())
        if before is not None and self._owned is not None:
            known = {id(each.generator) for each in before}
            paths = {each.path for each in before}
            self._owned = [each for each in self._owned if id(each.generator) in known or each.path in paths]

    def found_late(
        self, more: Callable[[], tuple[object, ...]] = tuple, left: int | None = None, again: bool = True
    ) -> bool:
        """To be asked after each batch: whether generators were made meanwhile, from which it drew without a key.

        If so, they are known from now on, and the batch has to be read once more. They are looked for after the first
        batch of a pass, then ever more seldom, and after the last; behind what `more` gives, too.

        Args:
            more: what else to search.
            left: batches of this pass that are still to come, in all worker processes; None where nobody knows.
            again: the batch can be read once more. Where it cannot, there is a warning after the first one too.
        """
        self.batches += 1
        over = left is not None and left < self._workers
        if self.batches != self._next_search and not over:
            return False
        return self._look_late(more(), over, again)

    def read_again(self, more: Callable[[], tuple[object, ...]] = tuple) -> None:
        """To be called when a batch was read once more because of `found_late`.

        Those that were made anew by that, the same as the first time, are made for each sample, by its number, say:
        they need no stream. What is made from the system's entropy is another one.
        """
        before = self._new
        for each in self._search(more(), late=True):
            if each.path not in before:
                continue
            if digest(each.save()) == before[each.path]:
                self._renewed.add(each.path)
            elif each.path not in self._told:
                self._told.add(each.path)
                _warn(
                    f"{each.path.strip()} is a random generator that is made again and again, and not alike, so what "
                    "it draws will be another after a resume: make it in __init__, or use midepoch.sample_generator()"
                )

    def end_pass(self, *more: object) -> None:
        """Behind the last batch of a pass, where `found_late` was not told that it is the last."""
        if self._reading and self._owned is not None:
            self._look_late(more, True, False)

    def _look_late(self, more: tuple[object, ...], over: bool, again: bool) -> bool:
        exact = again and self._gap == _FIRST_GAP and self.batches == self._next_search
        if self.batches == self._next_search:
            self._next_search, self._gap = self._next_search + self._gap, self._gap * 4
        self._reading = self._reading and not over
        new = [each for each in self._search(more, late=True) if each.path not in self._renewed]
        if not exact:
            self._warn_of_late(new)
        elif new:
            self._new = {each.path: digest(each.save()) for each in new}
        return bool(new)

    def _search(self, more: tuple[object, ...], late: bool = False) -> list[OwnedGenerator]:
        """Those that were not known. `late`: samples were read since the last time."""
        known = {id(each.generator): each for each in self._owned or ()}
        found = find_generators(*self._roots, *more)
        holds = {each.path: each.generator for each in found.owned}
        owned, moved = [], []
        for each in found.owned:
            before = known.get(id(each.generator))
            if before is not None and before.name != each.name:
                alone = holds.get(before.name, each.generator) is each.generator
                if late or (alone and each.path == before.path):
                    owned.append(replace(each, name=before.name, salt=before.salt))
                    moved += [] if alone else owned[-1:]
                    continue
                # Moved by the caller, between passes; or by samples, in a pass that was left early.
                moved += [each] if self._reading else []
            owned.append(each)
        new = [each for each in owned if id(each.generator) not in known]
        if moved and moved[0].name not in self._told:
            self._told.add(moved[0].name)
            _warn(f"random generators change places ({moved[0].name.strip()} is another one) {_ORDER_TELLS}")
        if late:
            paths = {each.path for each in known.values()}
            self._warn_of_order(found.lengths, [each for each in new if each.path not in paths])
            # Whose name a moved one has kept is called otherwise: no two draw the same numbers.
            taken = {each.name for each in owned if id(each.generator) in known}
            for place, each in enumerate(owned):
                if id(each.generator) not in known and each.name in taken:
                    name = _not_taken(each.name, taken)
                    owned[place] = replace(each, name=name, salt=zlib.crc32(name.encode()))
        else:
            self._settled = found.lengths
        self._owned = owned
        self.can_rest = not owned and not found.reads_states and self._globals.rests
        return new

    def _warn_of_order(self, lengths: dict[str, int], new: Sequence[OwnedGenerator]) -> None:
        """Where several generators come into a list one by one: their places tell which samples were read before."""
        for path, length in lengths.items() if new else ():
            if path not in self._settled:
                continue  # a list that is new as a whole has its order from elsewhere
            places = tuple(f"{path}[{place}]" for place in range(length))
            filled = {place for place in places for each in new if each.path.startswith(place)}
            # Of one alone that is appended it is known where it stands.
            several = len(filled) > 1 or (filled and length == self._settled[path] and length > 1)
            if several and path not in self._told:
                self._told.add(path)
                _warn(f"{path} is filled with random generators {_ORDER_TELLS}")

    def _warn_of_late(self, late: Sequence[OwnedGenerator]) -> None:
        told = next((each.path for each in late if each.path not in self._told), None)
        if told is None:
            return
        self._told.add(told)
        _warn(
            f"{told.strip()} is a random generator that was made after the first batch, so samples before may "
            "not be drawn alike after a resume: make it in __init__, or use midepoch.sample_generator()"
        )

    def begin(self, rest: bool = False) -> None:
        """Remember the caller's generators. With `rest`, only where `can_rest`, see whether anybody draws from them."""
        if self._owned is None:
            self._search(())
        outer = _current.__dict__
        self._outer = outer.get("key"), outer.get("generator"), outer.get("used")
        _current.generator = None
        self._saved = [each.save() for each in self._owned] if self._owned else []
        if rest:
            _current.key = self
            self.asked = False
            self._globals.look()
        else:
            self._globals.borrow()

    def start(self, key: int) -> None:
        """Put every generator at the beginning of the stream of `key`, a 64-bit integer."""
        _current.key = key
        self._seed_python(key)
        self._python_generator.gauss_next = None
        # The upper half, since torch takes the lower one for a generator of the same kind: its words would be equal.
        self._start_numpy(key >> 32)
        self._start_torch(key)
        if self._owned:
            for each in self._owned:
                each.start(derive_key(key, each.salt))

    def wake(self) -> None:
        """After ``begin(rest=True)``: from here on as after ``begin()``."""
        self._globals.borrow_after_all()

    def watch(self) -> None:
        """Let `touched` tell what happens from here on. Only where `can_rest`."""
        self.asked = _current.used = False
        self._globals.watch()

    def touched(self) -> bool:
        """Whether anybody has drawn from a generator since `begin` or `watch`, or seeded it."""
        return self.asked or self._globals.touched()

    def drew(self) -> bool:
        """The same behind ``watch()``, for a sample under its key."""
        return self.touched() or _current.used

    def end(self) -> None:
        """Give the caller its generators back as `begin` found them."""
        saved = self._saved
        if saved is None:
            return
        self._saved = None
        self._globals.give_back()
        for each, state in zip(self._owned or (), saved, strict=False):
            each.restore(state)
        _current.key, _current.generator, _current.used = self._outer

    @contextlib.contextmanager
    def under(self, key: int) -> Iterator[None]:
        """All generators under one key, for code outside the path of a batch."""
        self.begin()
        try:
            self.start(key)
            yield
        finally:
            self.end()

    def __reduce__(self) -> tuple[type[Streams], tuple[object, ...]]:
        # A worker process looks for the generators of its own copy.
        return Streams, self._roots
