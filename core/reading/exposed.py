"""Iterables that expose samplers: where they hold them, and a pass in which others stand for them.

The pattern is that of a dataset which keeps ``self.sampler`` and, in ``__iter__``, ``self.sampler_iter =
iter(self.sampler)``. midepoch iterates a shallow copy of the dataset, whose samplers give the indices that they are
told to give.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from .private import is_place_holder

__all__ = ["RAW", "Deviation", "StandIn", "StandInPass", "exposed_samplers", "raw_copy"]

RAW = "_midepoch_raw"
"""Set on a copy of a dataset to use the class's own ``__iter__`` instead of that of `StatefulIterable`."""


_LONGEST_CONTAINER = 1000  # members of an attribute that is searched for samplers; longer ones hold data


def exposed_samplers(dataset: Any) -> dict[str, Any]:
    """The torch Samplers in attributes of `dataset`, by name. None if a container holds one: no jump would move it."""
    found: dict[str, Any] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, Sampler):
            if not is_place_holder(value):
                found[name] = value
        elif isinstance(value, list | tuple | dict) and len(value) <= _LONGEST_CONTAINER:
            for member in value.values() if isinstance(value, dict) else value:
                if isinstance(member, Sampler):
                    return {}
    return found


def raw_copy(dataset: Any, replace: Mapping[str, Any]) -> Any:
    """A shallow copy of `dataset` with other attributes. `dataset` itself is unchanged."""
    copied = copy.copy(dataset)
    marked: dict[str, Any] = {RAW: True} if hasattr(type(dataset), RAW) else {}
    for name, value in {**marked, **replace}.items():
        object.__setattr__(copied, name, value)
    return copied


class Deviation(Exception):  # noqa: N818  # caught here
    """A sample does not follow from the samplers as those before it, for a reason in words after the source's name."""


class StandIn(Sampler[Any]):
    """Stands for a user's sampler in one pass: gives the indices that are `put`.

    Attributes:
        drawn: indices since the last `put`.
    """

    def __init__(self, original: Any) -> None:
        self._original, self._begun = original, False
        self.put(iter(()))

    def put(self, indices: Iterator[Any]) -> None:
        """Give these from now on."""
        self.drawn, self._next = 0, indices.__next__

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            raise Deviation("began a sampler again")
        self._begun = True
        return _Indices(self._draw)

    def _draw(self) -> Any:
        index = self._next()
        self.drawn += 1
        return index

    def __len__(self) -> int:
        return len(self._original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_original":
            raise AttributeError(name)
        return getattr(self._original, name)


class _Indices:
    """A pass over a `StandIn`, which a dataset may keep among its attributes. Its ``iter()`` begins no other pass."""

    __slots__ = ("_draw",)

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Any:
        return self._draw()


class StandInPass:
    """One pass over a copy of a dataset in which other samplers stand for its own.

    What reading sets on the copy is set on the dataset, too, as a plain pass leaves it.

    Args:
        dataset: the user's.
        names: of its samplers.
    """

    def __init__(self, dataset: Any, names: Iterable[str]) -> None:
        original = exposed_samplers(dataset)
        stand_ins = {name: StandIn(original[name]) for name in names}
        self._dataset, self.samplers = dataset, list(stand_ins.values())
        copied = raw_copy(dataset, stand_ins)
        self._read: dict[str, Any] = getattr(copied, "__dict__", {})
        self._known = dict(self._read)  # as the dataset has it
        self.iterator = iter(copied)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.iterator)
        finally:
            known = self._known
            for name, value in self._read.items():
                if name not in known or value is not known[name]:
                    known[name] = value
                    if type(value) is not _Indices:
                        object.__setattr__(self._dataset, name, value)
