"""Plain python: lists and tuples of batches, other indexable objects, iterables, and functions that return them."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from midepoch.attributes import directly_held
from midepoch.errors import UnsupportedSourceError, warn
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.order import Sequential
from midepoch.reading.around import loaders_in
from midepoch.reading.collating import as_it_is
from midepoch.reading.indexed import MapReader, Samples, map_requests, unchanged
from midepoch.reading.iterables import IterableAdapter
from midepoch.reading.private import is_iterator
from midepoch.reading.sessions import IteratorSession, unwrapped
from midepoch.samplers import length_of
from midepoch.world import World

__all__ = ["PlainIterableAdapter", "SequenceAdapter"]


class SequenceAdapter(Adapter):
    """A list or tuple of batches, or a map-style dataset by itself: its items in order."""

    name: ClassVar[str] = "sequence"
    facts = Facts("batch", reads_any_span=True)

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        if options.shard is False:
            raise UnsupportedSourceError(
                "shard=False on a sequence: midepoch shares its items over the ranks; to give each rank its own items, "
                "pass world=midepoch.World() and keep a state for each rank"
            )
        kind: Any = next((each for each in (list, tuple) if isinstance(source, each)), None)
        if kind is not None and kind.__len__(source) != len(source):
            raise UnsupportedSourceError(
                f"this {type(source).__name__} holds {kind.__len__(source)} items, but its len() is {len(source)}: "
                f"correct its __len__, or wrap {kind.__name__}(it)"
            )
        # A list's items exist already, so reading them draws nothing.
        streams = options.streams and not isinstance(source, list | tuple)
        self._reader = MapReader(source, as_it_is, True, False, streams)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """An object with a length and an index that is not text."""
        if isinstance(source, str | bytes | bytearray | memoryview | IterableDataset):
            return False
        indexed = isinstance(source, Sequence) or (isinstance(source, Dataset) and hasattr(source, "__getitem__"))
        return indexed and length_of(source) is not None

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int:
        """Items."""
        return len(self.source)

    def describe(self) -> dict[str, str]:
        """In order."""
        return {"order": "sequential", "unit": "item"}

    def drawing(self) -> tuple[object, ...]:
        """The sequence, which may make its items as they are read."""
        return (self.source,)

    def capabilities(self) -> Capabilities:
        """All yes."""
        return Capabilities(
            exact_order=promises.OUR_ORDER,
            exact_augmentations=Capability(True, "the items exist already")
            if isinstance(self.source, list | tuple)
            else promises.augmentations(self.options),
            constant_time_resume=promises.CONSTANT_TIME,
            elastic_world=promises.POSITIONS,
            elastic_workers=promises.NO_WORKERS,
            rank_independent=promises.ONE_STATE,
            skips=promises.SKIPS,
        )

    def open(self, run: Run) -> Session:
        """Items from the position on."""
        order = Sequential(len(self.source)).epoch(run.seed, run.epoch)
        requests = map_requests(run, order, unchanged(self.source, len(self.source)))
        return IteratorSession(unwrapped(map(self._reader, requests), run.reports.append))

    def samples(self, seed: int, epoch: int) -> Samples:
        """The items, in order."""
        return self._reader.samples(Sequential(len(self.source)).epoch(seed, epoch), seed, epoch)


class PlainIterableAdapter(IterableAdapter):
    """An iterable read in this process, or a function without arguments that returns one."""

    name: ClassVar[str] = "iterable"

    def __init__(self, source: Any, options: Options) -> None:
        _refuse_what_cannot_restart(source)
        self._undeclared = _how_to_declare(source)
        why = f"if it passes batches on one for one, {self._undeclared} jumps" if self._undeclared else ""
        super().__init__(source, options, stream=source, why=why)
        self._warned = bool(self._undeclared)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Anything that can be iterated or called. This adapter is asked last."""
        return hasattr(type(source), "__iter__") or (callable(source) and not isinstance(source, type))

    def _instead(self, gain: str) -> str:
        return f"; {gain}, write {self._undeclared}" if self._undeclared else super()._instead(gain)

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter:
        """Warns of an object around a DataLoader that was not declared."""
        adapter = cls(source, options)
        if adapter._undeclared:
            warn(
                f"{type(source).__name__} is read again from its start at each resume. If it passes the batches of its "
                f"DataLoader on one for one, write {adapter._undeclared}, which jumps"
            )
        return adapter


def _how_to_declare(source: Any) -> str:
    """What to write if `source` passes on the batches of the DataLoader that it is or holds; empty if there is none."""
    paths = loaders_in(source, lambda each: issubclass(type(each), DataLoader))
    return f'midepoch.wrap(loader, inside="{next(iter(paths))}")' if len(paths) == 1 else ""


def _refuse_what_cannot_restart(source: Any) -> None:
    kind = type(source).__name__
    if isinstance(source, str | bytes | bytearray | memoryview | dict):
        raise UnsupportedSourceError(f"a {kind} is not a source of batches: wrap a loader, or a list of batches")
    if isinstance(source, set | frozenset):
        raise UnsupportedSourceError(f"the items of a {kind} come in another order in another process: wrap sorted(it)")
    iterates = getattr(type(source), "__iter__", None)
    # A user's class that returns itself may restart in __iter__. Built-in iterators do not.
    if isinstance(source, Iterator) and not isinstance(iterates, types.FunctionType):
        raise UnsupportedSourceError(
            f"a {kind} is an iterator, which cannot be restarted: its past items are gone; wrap the function that "
            "makes it, as in midepoch.wrap(make_batches) or midepoch.wrap(lambda: make_batches(path))"
        )
    held, name = directly_held(source), getattr(source, "__qualname__", None) or kind
    loaders = [each for each in (source, *held.values()) if issubclass(type(each), DataLoader)]
    declare = _how_to_declare(source)
    cure = f"Write {declare} if it passes the batches on one for one; otherwise wrap" if declare else "Wrap"
    iterator = next((name for name, each in held.items() if is_iterator(each)), None)
    if iterator is not None:
        instead = "" if loaders else f", or give {name} the DataLoader in its place"
        raise UnsupportedSourceError(
            f"{name} reads an iterator of a DataLoader ({iterator}), which gives one pass and cannot go back. {cure} "
            f"the DataLoader itself, and pass what is done with its batches as then={instead}"
        )
    if any(each.persistent_workers for each in loaders):
        raise UnsupportedSourceError(
            f"{name} reads a DataLoader with persistent_workers=True, which begins later epochs in another way than "
            f"the first. {cure} the DataLoader itself, and pass what is done with its batches as then=, or leave "
            "persistent_workers out"
        )
