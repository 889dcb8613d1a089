"""The DataLoader inside a wrapper, and what stands in its place in a copy of the wrapper."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..samplers import length_of, repeated
from .private import gives_its_own, iterates_as_torch, plain_loader

__all__ = ["Feed", "Inside", "Length", "beginning_again", "held_in", "inside_of"]

_DEEPEST = 8  # wrappers in one another


class Inside(NamedTuple):
    """The DataLoader, or the iterator of another backend, inside a wrapper.

    Attributes:
        loader: as torch's own class would iterate it; or that iterator.
        chain: the wrapper, the one in it, and so on, each with the name of the attribute that leads on; the last name
            is empty if the wrapper itself is a DataLoader, with an ``__iter__`` of its own.
        idle: names of methods that do nothing while midepoch gives the batches, such as a reset at an epoch's end.
    """

    loader: Any
    chain: tuple[tuple[Any, str], ...]
    idle: frozenset[str] = frozenset()


def held_in(
    source: Any, is_wanted: Callable[[Any], bool], idle: frozenset[str] = frozenset(), depth: int = 0
) -> Inside | None:
    """The one object that `is_wanted` in an attribute of `source`, or of an object there; None if there is not one.

    `depth`: wrappers around this one.
    """
    attributes = getattr(source, "__dict__", {})
    if not attributes or depth == _DEEPEST or not callable(getattr(type(source), "__iter__", None)):
        return None
    found: dict[int, tuple[str, Inside]] = {}
    for name, each in attributes.items():
        if is_wanted(each):
            found[id(each)] = name, Inside(each, (), idle)
        elif not isinstance(each, type | Dataset | torch.nn.Module):
            further = held_in(each, is_wanted, idle, depth + 1)
            if further is not None:
                found[id(each)] = name, further
    if len(found) != 1:
        return None
    ((name, further),) = found.values()
    return further._replace(chain=((source, name), *further.chain))


def inside_of(source: Any, depth: int = 0) -> Inside | None:
    """The one DataLoader over a map-style dataset in an attribute of `source`, or `source` itself; None if none is.

    `depth`: wrappers around this one.
    """
    kind, attributes = type(source), getattr(source, "__dict__", {})
    if not attributes or depth == _DEEPEST or not callable(getattr(kind, "__iter__", None)):
        return None
    found: dict[int, tuple[str, Inside | None]] = {}
    for name, each in attributes.items():
        if iterates_as_torch(each):
            found[id(each)] = name, Inside(each, ()) if _is_mapped(each) else None
        elif isinstance(each, DataLoader) or not isinstance(each, type | Dataset | torch.nn.Module):
            further = inside_of(each, depth + 1)
            if further is not None or isinstance(each, DataLoader):
                found[id(each)] = name, further
    if isinstance(source, DataLoader) and "dataset" in attributes:
        seen = gives_its_own(source) and not found and _is_mapped(source)
        return Inside(_as_torch(source), ((source, ""),)) if seen else None
    if len(found) != 1:
        return None
    ((name, further),) = found.values()
    if further is None or length_of(source) not in (None, length_of(attributes[name])):
        return None
    return Inside(further.loader, ((source, name), *further.chain))


def _is_mapped(loader: DataLoader[Any]) -> bool:
    return not isinstance(loader.dataset, IterableDataset)


def _as_torch(loader: DataLoader[Any]) -> DataLoader[Any]:
    """`loader` as torch's own class would iterate it, over the samplers in those that begin again."""
    return plain_loader(loader, **{name: inside for name, _, inside in beginning_again(loader)})


def beginning_again(loader: DataLoader[Any]) -> list[tuple[str, Any, Any]]:
    """The attributes of a DataLoader with a sampler that begins again, that sampler, and the one in it."""
    samplers = ((name, vars(loader)[name]) for name in ("sampler", "batch_sampler"))
    found = ((name, sampler, repeated(sampler)) for name, sampler in samplers)
    return [(name, sampler, inside) for name, sampler, inside in found if inside is not None]


class _Batches(Protocol):
    """What a feed gives."""

    def begin(self) -> None: ...

    def ask(self) -> Any: ...


class Feed:
    """Stands for the DataLoader inside, or for an iterator of it.

    It refers weakly to all that it uses: whoever searches the wrapper for random generators finds nothing in it.
    """

    __slots__ = ("__weakref__", "_idle", "_loader", "iterator", "reading")

    def __init__(self, loader: Any = None, idle: frozenset[str] = frozenset()) -> None:
        self._loader, self._idle = None if loader is None else weakref.ref(loader), idle
        self.iterator = self if loader is None else Feed()
        self.reading: Callable[[], _Batches | None] = _nothing

    def __iter__(self) -> Feed:
        reading = self.reading()
        if reading is not None and self._loader is not None:
            reading.begin()
        return self.iterator

    def serve(self, reading: _Batches) -> None:
        """Give the batches of `reading`."""
        self.reading = self.iterator.reading = weakref.ref(reading)

    def __next__(self) -> Any:
        reading = self.reading()
        if reading is None:
            raise StopIteration
        return reading.ask()

    def __len__(self) -> int:
        return len(self._theirs())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing if name in self._idle else getattr(self._theirs(), name)

    def _theirs(self) -> Any:
        loader = None if self._loader is None else self._loader()
        if loader is None:
            raise AttributeError("an iterator of a DataLoader has batches only")
        return loader


class Length:
    """Stands for the sampler in a sampler that begins again: as long as what is left.

    Subclasses that keep one iterator for all passes ask for so many batches in each.
    """

    def __init__(self, original: Any, batches: int) -> None:
        self._original, self._batches = original, batches

    def __len__(self) -> int:
        return self._batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._original, name)


def _nothing() -> None:
    return None
