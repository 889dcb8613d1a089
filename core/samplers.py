"""torch Samplers: the order that each stands for, computed where possible, listed otherwise."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import time
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, GeneratorType
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .copying import private_copy
from .dividing import Division, division_of, is_rank, is_world_size, length_of
from .errors import SourceError, warn
from .order import Endless, Order, Sequential, Shuffled
from .order.keys import derive_key
from .randomness.streams import Purpose, Streams
from .state.checksum import checksum_of, former_checksum_of
from .world import Tail, World

__all__ = [
    "Listed", "ListedEpoch", "OrderedSampler", "Understood", "length_of", "repeated", "understand",
    "understand_as_parent",
]  # fmt: skip

_LONGEST_LIST = 50_000_000  # indices of a sampler without a length; a longer list would not fit into memory
_KEPT = 1_000_000  # indices of a sampler that is not known to end: 40 MB
_ROUNDS, _LONG = 4, 0.5  # who has given each index so often, and worked so many seconds for it, does not end
_SLOW = 10  # seconds after which one that has given as many, but waits rather than works, is told
_PART = 1024  # indices that are taken at once; fewer at first, since a slow one may never give as many
_FEW = 5  # samples of the dataset on which a sampler is tried
_TRIED = 100  # rounds that one without an end must give of them; some end after a few
_DIFFERENT = 40  # of these rounds at least, if it shuffles all samples: of 120 orders, about 68 come up
_MORE = 600  # samples on which it must not shuffle within blocks


class ListedEpoch:
    """One epoch of a `Listed` order, as the sampler gave it."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._plain = all(type(item) is int for item in items)
        self.crc = f"{zlib.crc32(repr(items).encode()):08x}" if self._plain else checksum_of(items)

    def has(self, crc: str) -> bool:
        """Whether this is the list of a saved CRC."""
        return crc == self.crc or (not self._plain and crc == former_checksum_of(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, positions: slice) -> list[Any]:
        return self._items[positions]


class Listed:
    """The order of any iterable of indices, such as a WeightedRandomSampler or a user's own BatchSampler.

    The list is built once an epoch, with generators seeded by (seed, epoch), from a copy of the sampler. So it is a
    function of both, even if the sampler changes in a pass, for instance by shuffling a list in place. A sampler is
    refused if its list does not repeat, or if its epochs differ only by the number of passes.

    Args:
        sampler: as the user made it.
        size: of the dataset, if known.
    """

    def __init__(self, sampler: Any, size: int | None = None) -> None:
        self._sampler, self._size = sampler, size
        self._lists: dict[tuple[int, int], ListedEpoch] = {}
        self._counted: tuple[tuple[int, int], int] | None = None  # (seed, epoch), and how many indices it had
        # torch's own samplers end and repeat themselves; others are tested once.
        self._pure = self._trusted = self._ends = _is_pure(sampler)

    def length(self, seed: int, epoch: int) -> int:
        """Indices in one epoch."""
        # The len of another sampler may be an estimate, for instance if it fills batches with tokens.
        length = length_of(self._sampler) if self._pure else None
        if length is not None:
            return length
        listed = self._lists.get((seed, epoch))
        if listed is not None:
            return len(listed)
        # Until an epoch is begun, its list is not kept: the user may change the sampler for it.
        if self._counted is None or self._counted[0] != (seed, epoch):
            self._counted = (seed, epoch), len(self._build(seed, epoch)[0])
        return self._counted[1]

    def describe(self) -> str:
        """For the fingerprint. The content of the list is compared by its CRC."""
        return "listed"

    def epoch(self, seed: int, epoch: int) -> ListedEpoch:
        """The list of one epoch; the last two are kept.

        Raises:
            SourceError: the sampler does not end, or does not repeat itself.
        """
        listed = self._lists.get((seed, epoch))
        if listed is None:
            listed = self._build(seed, epoch)[0]
            if not self._trusted:
                if not self._repeats(listed, seed, epoch):
                    raise SourceError(
                        f"{type(self._sampler).__name__} does not repeat itself: two lists for epoch {epoch} under "
                        "one seed differ; derive its order from the epoch (set_epoch) or from torch's, numpy's or "
                        "python's generators, and keep nothing from the previous epoch"
                    )
                self._trusted = True
            while len(self._lists) > 1:
                del self._lists[next(iter(self._lists))]
            self._lists[seed, epoch], self._counted = listed, None
        return listed

    def forget(self) -> None:
        """Drop the lists; they are built again when needed."""
        self._lists.clear()

    def _repeats(self, listed: ListedEpoch, seed: int, epoch: int) -> bool:
        """Whether another copy gives the same list, and more than a count of passes tells epochs apart."""
        again, second = self._build(seed, epoch, passes=2)
        if again.crc != listed.crc:
            return False
        # A sampler that changes itself in each pass, without random numbers, would give the same list in every epoch,
        # because each list starts from a fresh copy.
        return second.crc == again.crc or self._build(seed, epoch + 1)[0].crc != listed.crc

    def _build(self, seed: int, epoch: int, passes: int = 1) -> list[ListedEpoch]:
        """The lists of so many passes over one copy, each under the epoch's stream."""
        sampler, lists = self._at_epoch(epoch), []
        streams, key = Streams(sampler), derive_key(Purpose.LISTING, seed, epoch)
        for _ in range(passes):
            with streams.under(key):
                items = list(iter(sampler)) if self._ends else self._to_its_end(sampler)
            if items is None:
                sampler = self._at_epoch(epoch)
                with Streams(sampler).under(key):
                    items = list(iter(sampler))  # not list(sampler), which asks for its length
            self._ends = True
            lists.append(ListedEpoch(items))
        return lists

    def _at_epoch(self, epoch: int) -> Any:
        """A copy of the sampler, set to the epoch."""
        copied = None if self._pure else private_copy(self._sampler)
        return _at_epoch(self._sampler if copied is None else copied, epoch)

    def _to_its_end(self, sampler: Any) -> list[Any] | None:
        """All that `sampler` gives; None if it ends, but gives more than is kept before that is known.

        Raises:
            SourceError: it does not end.

        Warns:
            MidepochWarning: it may not end, and waits: whether a slow one ends cannot be known before it does.
        """
        length, since, began = length_of(sampler), time.thread_time(), time.perf_counter()
        told = False
        items: list[Any] = []
        given = indices = 0
        different = 0.0
        for some in _in_parts(iter(sampler)):
            given += len(some)
            indices += sum(map(len, some)) if isinstance(some[0], list | tuple) else len(some)
            if indices <= _KEPT:
                items += some
            elif items:
                items.clear()
            if self._size is None and length is None:
                different = max(different, _most_different(some))
            enough = indices > _ROUNDS * (self._size or different) if length is None else given > length
            worked = time.thread_time() - since > _LONG if length is None else given > 2 * length + 1000
            if indices > _LONGEST_LIST or (enough and worked):
                raise SourceError(
                    f"{self._gave(indices, length)} and does not end, and what comes at a position cannot be computed: "
                    f"{self._instead}"
                )
            if enough and not told and time.perf_counter() - began > _SLOW:
                told = True
                warn(
                    f"{self._gave(indices, length)} in {_SLOW} seconds, and goes on: all that it gives in an epoch is "
                    f"listed before the first batch. If it does not end, {self._instead}",
                )
        return items if indices <= _KEPT else None

    def _gave(self, indices: int, length: int | None) -> str:
        """What it has given, in words that are the same in each run, unlike the number of indices."""
        most = f"{_ROUNDS} indices for each sample" if length is None else f"the {length} of its len()"
        if indices > _LONGEST_LIST:
            most = f"{_LONGEST_LIST:,} indices"
        return f"{type(self._sampler).__name__} gave more than {most}"

    @property
    def _instead(self) -> str:
        """What to write in place of a sampler that does not end."""
        inside = getattr(self._sampler, "sampler", None)
        ends = "take a sampler that gives one epoch and ends"
        if isinstance(inside, Sampler) and not _is_pure(inside):
            ends = f"build it over a sampler that gives one epoch and ends, in place of {type(inside).__name__}"
        return (
            "wrap a function that makes what reads it, as in midepoch.wrap(lambda: make()), which is read again up to "
            f"a resume's position, or {ends}"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lists": {}}


def _most_different(items: list[Any]) -> float:
    """More different indices than these there cannot be, if they count from 0."""
    flat = itertools.chain.from_iterable(items) if isinstance(items[0], list | tuple) else items
    return max((each + 1 if type(each) is int else math.inf for each in flat), default=0)


def _in_parts(iterator: Iterator[Any]) -> Iterator[list[Any]]:
    # Some begin again when they are asked for an iterator or after their end; a generator around them is not.
    items, size = (item for item in iterator), 1
    while some := list(itertools.islice(items, size)):
        yield some
        size = min(2 * size, _PART)


def _is_pure(sampler: object) -> bool:
    if type(sampler) is BatchSampler:
        return _is_pure(sampler.sampler)
    pure = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    return type(sampler) in (*pure, list, tuple, range)


def _at_epoch(sampler: Any, epoch: int) -> Any:
    """A copy of `sampler`, and of the one inside it, set to the epoch. The user's own stays unchanged."""
    inner = getattr(sampler, "sampler", None)
    told, inner_told = (callable(getattr(each, "set_epoch", None)) for each in (sampler, inner))
    if not told and not inner_told:
        return sampler
    sampler = copy.copy(sampler)
    if inner_told:
        sampler.sampler = copy.copy(inner)
        sampler.sampler.set_epoch(epoch)
    if told:
        sampler.set_epoch(epoch)
    return sampler


@dataclass(frozen=True)
class Understood:
    """The meaning of a torch Sampler.

    Attributes:
        order: of all ranks together.
        seed, tail, world: as the sampler states them, or None.
        division: signs that the sampler shards its list by itself; None if there are none.
    """

    order: Order | Listed
    seed: int | None = None
    tail: Tail | None = None
    world: World | None = None
    division: Division | None = None


class OrderedSampler(Sampler[int]):
    """A sampler that states its own order."""

    @abstractmethod
    def understood(self) -> Understood:
        """The order, and what else the sampler states."""


_as_parent: set[tuple[str, str]] = set()


def understand_as_parent(module: str, name: str) -> None:
    """Declare that a subclass of one of torch's samplers has the same order as its parent."""
    _as_parent.add((module, name))


def understand(sampler: Any, size: int | None = None, world_size: int = 1, gives_batches: bool = False) -> Understood:
    """The order that `sampler` stands for: computed where possible, listed otherwise.

    Args:
        sampler: as the user made it.
        size: of the dataset, if known; a list that is shorter may be one rank's share.
        world_size: ranks that share the data, as far as is known.
        gives_batches: it is a batch sampler.
    """
    kind = type(sampler)
    if (kind.__module__, kind.__qualname__) in _as_parent:
        kind = kind.__mro__[1]
    if kind is SequentialSampler:
        return Understood(Sequential(len(sampler.data_source)))
    if kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return Understood(Shuffled(len(sampler.data_source)), seed=_seed_of(sampler.generator))
    if kind is DistributedSampler:
        size = len(sampler.dataset)
        return Understood(
            Shuffled(size) if sampler.shuffle else Sequential(size),
            seed=sampler.seed % (1 << 64),
            tail="drop" if sampler.drop_last else "pad",
            world=World(sampler.rank, sampler.num_replicas),
        )
    if "understood" in vars(kind):  # not a subclass of such a class, which may have another order
        return cast(OrderedSampler, sampler).understood()
    if size and not gives_batches and (endless := _endless(sampler, size)) is not None:
        return endless
    seed = _seed_of(getattr(sampler, "generator", None))
    return Understood(Listed(sampler, size), seed=seed, division=division_of(sampler, size, world_size, gives_batches))


def _seed_of(generator: object) -> int | None:
    return generator.initial_seed() % (1 << 64) if isinstance(generator, torch.Generator) else None


# --- samplers without an end ------------------------------------------------------------------------------------------


def _endless(sampler: Any, size: int) -> Understood | None:
    """The order of a sampler that gives all samples again and again, each time shuffled anew or never; None for others.

    It is known by its attributes: each is a seed, a rank, a number of ranks, a switch, the data, or their number. What
    it does is tried on a copy that has few samples, in one process and in two: rounds without an end, which ranks take
    in turn. So nothing of it is listed, and a position is an order's round and a place in it.
    """
    few: dict[str, Any] = {}
    seed: int | None = None
    rank, world_size = ("", 0), ("", 1)
    for name, value in getattr(sampler, "__dict__", {}).items():
        integer = type(value) is int
        if integer and name.lstrip("_") == "seed":
            seed = value % (1 << 64)
        elif integer and is_rank(name):
            rank = name, value
        elif integer and is_world_size(name):
            world_size = name, value
        elif integer and value == size:
            few[name] = _FEW
        elif value is None or isinstance(value, bool):
            pass
        elif isinstance(value, GeneratorType) and (method := _method_that_made(value, sampler)):
            few[name] = method
        elif not isinstance(value, int | Sampler) and length_of(value) == size:
            few[name] = range(_FEW)
        else:
            return None
    if not few or bool(rank[0]) != bool(world_size[0]):
        return None
    alone = {rank[0]: 0, world_size[0]: 1} if rank[0] else {}
    items = _first_of(sampler, few | alone)
    rounds = [items[start : start + _FEW] for start in range(0, len(items), _FEW)]
    if len(items) != _TRIED * _FEW or any(sorted(each) != list(range(_FEW)) for each in rounds):
        return None
    shuffles = items != _TRIED * list(range(_FEW))
    if shuffles and (len(set(map(tuple, rounds))) < _DIFFERENT or _is_local(sampler, few, alone)):
        return None
    second = items[1::2]
    if world_size[1] > 1 and _first_of(sampler, few | {rank[0]: 1, world_size[0]: 2})[: len(second)] != second:
        return None
    return Understood(
        Endless(Shuffled(size) if shuffles else Sequential(size)),
        seed=seed,
        world=World(rank[1], world_size[1]) if world_size[1] > 1 else None,
    )


def _is_local(sampler: Any, few: dict[str, Any], alone: dict[str, int]) -> bool:
    """Whether samples stay near their places, or beside their neighbours, in the first round over more of them."""
    larger = {int: _MORE, range: range(_MORE)}
    more = {name: larger.get(type(value), value) for name, value in few.items()}
    items = _first_of(sampler, more | alone, _MORE)
    if sorted(items) != list(range(_MORE)):
        return True
    moved = sum(abs(place - index) for place, index in enumerate(items)) / _MORE  # a third of them, if none stays near
    beside = sum(abs(second - first) == 1 for first, second in itertools.pairwise(items))  # two, if none stays beside
    return bool(moved < _MORE / 4 or beside > 30)


def repeated(sampler: Any) -> Any | None:
    """The sampler inside an object that holds nothing else and gives its items again and again; None if it is none.

    It is tried on a copy that holds a few objects in place of the sampler.
    """
    held = getattr(sampler, "__dict__", {})
    if len(held) != 1 or isinstance(sampler, BatchSampler):
        return None
    ((name, inside),) = held.items()
    items = tuple(object() for _ in range(_FEW))
    return inside if _first_of(sampler, {name: items}) == list(items) * _TRIED else None


def _method_that_made(generator: Any, owner: Any) -> FunctionType | None:
    """The method without arguments that has made a generator which has not begun; None if there is none."""
    methods = (each for base in type(owner).__mro__ for each in vars(base).values() if isinstance(each, FunctionType))
    made = next((each for each in methods if each.__code__ is generator.gi_code), None)
    begun = inspect.getgeneratorstate(generator) != inspect.GEN_CREATED
    return None if made is None or begun or len(inspect.signature(made).parameters) != 1 else made


def _first_of(sampler: Any, attributes: dict[str, Any], count: int = _TRIED * _FEW) -> list[Any]:
    """The first indices that a copy with other attributes gives; none if it cannot be read."""
    twin = copy.copy(sampler)
    twin.__dict__.update(attributes)
    try:
        for name, value in attributes.items():
            if isinstance(value, FunctionType):
                twin.__dict__[name] = value(twin)
        with Streams().under(derive_key(Purpose.LISTING, 0, 0)):
            return list(itertools.islice(iter(twin), count))
    except Exception:  # noqa: BLE001  # it is the user's code, on data that it was not made for
        return []
