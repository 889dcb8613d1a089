"""What is examined: the loader as it was given, wrapped with one line, or bare, as programs resume it by counting.

A subject is a picklable function that builds a fresh loader, like the user's own; it also takes the parameters that the
user's function lacks and a DataLoader shows how to vary: ranks, workers, batch size.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from ..errors import UnsupportedSourceError
from ..loader.lending import loader_of
from ..loader.loader import Loader
from ..loader.part import Part
from ..world import Tail, World
from ..wrapping import wrap
from .record import Settings, open_loader

__all__ = ["ByCount", "Imported", "Nature", "Side", "Subject", "possible_variations", "rebuilt", "recognise"]

Side = Literal["given", "wrapped", "bare"]
_WORLD = ("rank", "world_size")


@dataclass(frozen=True)
class Imported:
    """The object ``name`` of a module that is executed anew at each call, as in a new process."""

    module: str
    folder: str  # where Python finds it first
    name: str  # dotted, from the module on

    def __call__(self) -> Any:
        """The object, made anew."""
        sys.path[:] = [self.folder, *(path for path in sys.path if path != self.folder)]
        specification = importlib.util.find_spec(self.module)
        if specification is None or specification.loader is None:
            raise ModuleNotFoundError(f"there is no module {self.module!r} in {self.folder}")
        found: Any = importlib.util.module_from_spec(specification)
        sys.modules[self.module] = found
        specification.loader.exec_module(found)
        return operator.attrgetter(self.name)(found)


class ByCount:
    """A source without a state, resumed as programs do that save a number of batches: begin anew, and skip so many.

    ``set_epoch`` of the source or its sampler is called before each pass, as trainers do.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._epoch = self._done = 0

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        for part in (self._source, getattr(self._source, "sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self._epoch)
        batches = iter(self._source() if inspect.isfunction(self._source) else self._source)
        for _ in itertools.islice(batches, self._done):
            pass
        for batch in batches:
            self._done += 1
            yield batch
        self._epoch, self._done = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were handed out."""
        return {"epoch": self._epoch, "batches": self._done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Skip so many batches at the next pass."""
        self._epoch, self._done = state["epoch"], state["batches"]


@dataclass(frozen=True)
class Subject:
    """A function that builds one side of what a user gave.

    The side is "given" as it is, "wrapped" by ``midepoch.wrap(..., seed=0)``, or "bare", without midepoch.
    """

    origin: Callable[..., Any]  # the user's function, or an `Imported`
    side: Side = "given"
    derived: tuple[tuple[str, int], ...] = ()  # parameter -> default, for those that the user's function lacks
    samples: int = 0  # so many of a DataLoader's dataset, its first ones; 0 for all

    @property
    def __signature__(self) -> inspect.Signature:
        own = list(inspect.signature(self.origin).parameters.values())
        end = next((index for index, each in enumerate(own) if each.kind is each.VAR_KEYWORD), len(own))
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in self.derived]
        return inspect.Signature([*own[:end], *more, *own[end:]])

    def __call__(self, **options: Any) -> Any:
        """A fresh loader of this side."""
        derived = dict(self.derived)
        made = self.origin(**{name: value for name, value in options.items() if name not in derived})
        loader = made if isinstance(made, Loader) else None
        source = made if loader is None else loader.source
        if self.samples:
            source = _beginning_of(source, self.samples)
        varied = {name: options.get(name, default) for name, default in derived.items() if name not in _WORLD}
        if type(source) is DataLoader and any(getattr(source, name) != value for name, value in varied.items()):
            source = rebuilt(source, **varied)
        if self.side == "bare":
            return source if _has_state(source) else ByCount(source)
        stated: dict[str, Any] = {"seed": 0} if loader is None else Part("", loader).options
        if "rank" in derived:
            stated["world"] = World(options.get("rank", 0), options.get("world_size", 1))
        if self.side == "given" and (loader is None or (source is loader.source and "rank" not in derived)):
            return made
        return wrap(source, **stated)


_MOST_BATCHES = 40
"""Of a DataLoader with more, `_FEW` and the incomplete last one are examined: each cut costs another epoch."""
_FEW = 20


def _enough_of(loader: DataLoader[Any]) -> int:
    """How many samples of its dataset to examine; 0 for all: it is small, or a sampler of the user's decides."""
    sampler: Any = loader.sampler
    batch_size = loader.batch_size
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if not (plain and batch_size and type(loader.batch_sampler) is BatchSampler):
        return 0
    size = len(loader.dataset)  # type: ignore[arg-type]  # what these samplers read has a length
    if len(sampler) != size or size <= _MOST_BATCHES * batch_size:
        return 0
    return _FEW * batch_size + size % batch_size


def _beginning_of(loader: DataLoader[Any], samples: int) -> DataLoader[Any]:
    """The same DataLoader over the first samples of its dataset."""
    part = Subset(loader.dataset, range(samples))
    given: Any = loader.sampler
    shuffled = type(given) is RandomSampler
    sampler = RandomSampler(part, generator=given.generator) if shuffled else SequentialSampler(part)
    return rebuilt(loader, loader.num_workers, dataset=part, sampler=sampler)


def rebuilt(loader: DataLoader[Any], num_workers: int, batch_size: int | None = None, **other: Any) -> DataLoader[Any]:
    """The same DataLoader with so many workers, and if given another batch size, dataset, sampler or kept workers."""
    names = ["dataset", "collate_fn", "pin_memory", "worker_init_fn", "generator"]
    if num_workers:
        names += ["timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"]
    listed = not isinstance(loader.dataset, IterableDataset)
    if listed and loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        names.append("batch_sampler")
    else:
        names += ["batch_size", "drop_last", *["sampler"] * listed]
    keywords = {name: getattr(loader, name) for name in names} | {"num_workers": num_workers, **other}
    return DataLoader(**keywords if batch_size is None else keywords | {"batch_size": batch_size})


def _has_state(made: Any) -> bool:
    return all(callable(getattr(made, name, None)) for name in ("__iter__", "state_dict", "load_state_dict"))


@dataclass(frozen=True)
class Nature:
    """What a user's function builds."""

    kind: str  # the name of its class, and what of it is examined if not all is
    side: Side  # the one to examine: "given" if it has a state
    other: Side | None  # the one to compare it with
    refusal: str = ""  # why midepoch does not wrap it; then only the bare side can be examined
    derived: tuple[tuple[str, int], ...] = ()  # as of `Subject`, for both sides; none have been tried
    drop_last: bool = False  # its DataLoader leaves out an incomplete last batch
    tail: Tail | None = None  # how midepoch shares its last samples; None if it does not
    works_on_batches: bool = False  # ``then=`` may mix samples: on another split no part of a batch names them
    samples: int = 0  # as of `Subject`


def recognise(settings: Settings, options: Mapping[str, Any]) -> Nature:
    """What ``settings.make_loader`` builds, without reading from it."""
    taken = inspect.signature(settings.make_loader).parameters
    with open_loader(settings, options) as made:
        loader = loader_of(made)
        source = made.source if isinstance(made, Loader) else made
        plain, own_state = type(source) is DataLoader, loader is None and _has_state(made)
        kind, samples = type(source).__name__, _enough_of(source) if plain and "size" not in taken else 0
        if samples:
            kind = f"{kind}; of its {len(source.dataset):,} samples the first {samples:,}"
        derived: list[tuple[str, int]] = []
        if plain and "num_workers" not in taken:
            derived.append(("num_workers", 0))
            if type(source.batch_sampler) is BatchSampler and "batch_size" not in taken:
                derived.append(("batch_size", source.batch_sampler.batch_size))
        ranks = loader is None or (isinstance(made, Loader) and Part("", made).context.options.world is None)
        if ranks and not own_state and not taken.keys() & set(_WORLD):
            derived += [("rank", 0), ("world_size", 1)]
        drop_last = isinstance(source, DataLoader) and source.drop_last
        nature = Nature(kind, "given", None, derived=tuple(derived), drop_last=drop_last, samples=samples)
        if loader is not None:
            iterable = isinstance(made, Loader) and (hasattr(type(source), "__iter__") or inspect.isfunction(source))
            part = Part("", loader)
            then, tail = part.options["then"] is not None, part.adapter.tail_in_use
            return replace(nature, other="bare" if iterable else None, tail=tail, works_on_batches=then)
        try:
            wrapped = wrap(made, seed=0)
        except UnsupportedSourceError as error:
            return replace(nature, side="given" if own_state else "bare", refusal=str(error))
        if own_state:
            return Nature(kind, "given", "wrapped")
        return replace(nature, side="wrapped", other="bare", tail=Part("", wrapped).adapter.tail_in_use)


def possible_variations(settings: Settings, subject: Subject) -> Subject:
    """The subject with those of its derived parameters with which it gives a batch, or at least ends."""
    kept = dict(subject.derived)
    for options in (
        {"rank": 1, "world_size": 2},
        {"num_workers": max(settings.num_workers, default=0)},
        {"batch_size": kept.get("batch_size", 0) + 1},
    ):
        if not kept.keys() >= options.keys():
            continue
        try:
            with open_loader(replace(settings, make_loader=subject), options) as loader:
                next(iter(loader), None)
        except Exception:  # noqa: BLE001 - whatever it is: the loader is then examined without this variation
            # A DataLoader that fails with workers would be built anew for another batch size, too.
            failed = {"num_workers", "batch_size"} if "num_workers" in options else options.keys()
            kept = {name: value for name, value in kept.items() if name not in failed}
    return replace(subject, derived=tuple(kept.items()))
