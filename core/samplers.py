"""torch Samplers: the order that each stands for, computed where possible, listed otherwise."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import time
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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

from .attributes import PlainAttributes, appearance, changed, plain_attributes, set_back
from .copying import private_copy
from .dividing import Division, division_of, is_rank, is_world_size, length_of
from .errors import SourceError, UnsupportedSourceError, warn
from .order import Endless, Order, Sequential, Shuffled
from .order.keys import derive_key
from .randomness.streams import Purpose, Streams
from .state.checksum import checksum_of
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
_LOOKED_AT = 16  # of the first indices, and of each following doubling: each has a look at the dataset after it
_FEW = 5  # samples of the dataset on which a sampler is tried
_TRIED = 100  # rounds that one without an end must give of them; some end after a few
_DIFFERENT = 40  # of these rounds at least, if it shuffles all samples: of 120 orders, about 68 come up
_MORE = 600  # samples on which it must not shuffle within blocks


class ListedEpoch:
    """One epoch of a `Listed` order, as the sampler gave it.

    Attributes:
        error: of the sampler's own, which ended its list; None if it came to its end.
        wrote: what the dataset looked like when the sampler was asked for an iterator, if it has set something since.
    """

    def __init__(self, items: list[Any], error: Exception | None = None, wrote: PlainAttributes | None = None) -> None:
        self._items, self.error, self.wrote = items, error, wrote

    @property
    def units(self) -> int:
        """How many indices; the one where an error came counts too, so that a place before it is not the end."""
        return len(self._items) + (self.error is not None)

    @functools.cached_property
    def crc(self) -> str:
        """Of the items, as in a state."""
        plain = all(type(item) is int for item in self._items)
        return f"{zlib.crc32(repr(self._items).encode()):08x}" if plain else checksum_of(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, positions: slice) -> list[Any]:
        return self._items[positions]


class Listed:
    """The order of any iterable of indices, such as a WeightedRandomSampler or a user's own BatchSampler.

    A pass lists the sampler itself, once, as a plain pass iterates it. What is asked before (a length, a state) lists a
    copy. The list is built with generators seeded by (seed, epoch). A sampler that keeps something from pass to pass is
    listed for the epochs in between first, so that its list is a function of both all the same.

    Args:
        sampler: as the user made it.
        size: of the dataset, if known.

    Attributes:
        dataset: that the sampler may know. What a copy of the sampler sets on it is set back.
        in_workers: the dataset is read in worker processes, which see it as it is when they start.
        untried: no copy could be made, or read, to try whether it repeats itself.
    """

    def __init__(self, sampler: Any, size: int | None = None) -> None:
        self._sampler, self._size = sampler, size
        self.dataset: Any = None
        self.in_workers = False
        self.untried = False
        self._begun: dict[tuple[int, int], ListedEpoch] = {}  # by seed and epoch, of the last two passes
        self._ahead: tuple[tuple[Any, ...], ListedEpoch] | None = None  # from a copy, and what it depends on
        self._looks: tuple[Any, ...] = ()  # of the sampler, after its last pass
        self._next = 0  # the epoch after the last one that the sampler itself has given
        self._remembers = False  # it keeps something from pass to pass
        # torch's own samplers end and repeat themselves; others are tested once.
        self._pure = self._trusted = self._ends = _is_pure(sampler)

    def length(self, seed: int, epoch: int) -> int:
        """Indices in one epoch."""
        # The len of another sampler may be an estimate, for instance if it fills batches with tokens.
        length = length_of(self._sampler) if self._pure else None
        return self.epoch(seed, epoch).units if length is None else length

    def stated_length(self, seed: int, epoch: int) -> int:
        """The same, as the sampler's own len says while it has not been listed. Lists nothing if it has one."""
        listed = self.known(seed, epoch)
        if listed is None:
            sampler = self._sampler
            told = (sampler, getattr(sampler, "sampler", None))
            if not self._pure and any(hasattr(each, "set_epoch") for each in told):
                sampler = _shallow_copy(sampler)  # its length may follow from the epoch
                _set_epoch(sampler, epoch)
            length = length_of(sampler)
        else:
            length = listed.units
        return self.length(seed, epoch) if length is None else length

    def describe(self) -> str:
        """For the fingerprint. The content of the list is compared by its CRC."""
        return "listed"

    def known(self, seed: int, epoch: int) -> ListedEpoch | None:
        """The list of one epoch, if a pass has begun it, or a copy was listed and the sampler looks the same since."""
        listed = self._begun.get((seed, epoch))
        if listed is None and self._ahead is not None and self._ahead[0] == (seed, epoch, *appearance(self._sampler)):
            return self._ahead[1]
        return listed

    def epoch(self, seed: int, epoch: int) -> ListedEpoch:
        """The list of one epoch: of its pass if that has begun, otherwise of a copy of the sampler.

        Raises:
            SourceError: the sampler does not end, or does not repeat itself.
        """
        listed = self.known(seed, epoch)
        if listed is None:
            looks = seed, epoch, *appearance(self._sampler)
            listed = self._of_copy(seed, epoch)
            if not self._trusted:
                self._try(listed, private_copy(self._sampler), seed, epoch)
                if self._remembers:
                    listed = self._of_copy(seed, epoch)
            self._ahead = looks, listed
        return listed

    def begin(self, seed: int, epoch: int) -> ListedEpoch:
        """The list of a pass that begins, from the sampler itself. A pass that goes on has the same list.

        Raises:
            SourceError: as `epoch`.
            UnsupportedSourceError: the sampler sets something on the dataset from one index to the next.
        """
        listed = self._begun.get((seed, epoch))
        # One that failed at its first index is asked again: no batch of it was handed out.
        if listed is None or (listed.error is not None and not len(listed)):
            if not self._trusted and (epoch > self._next or length_of(self._sampler) is None):
                self.epoch(seed, epoch)  # whether it remembers, and ends, is tried before
            copied = None if self._trusted else private_copy(self._sampler)
            for earlier in range(self._next, epoch if self._remembers else 0):
                self._list(self._sampler, seed, earlier)
            listed = self._of_itself(seed, epoch)
            self._try(listed, copied, seed, epoch)
            while len(self._begun) > 1:
                del self._begun[next(iter(self._begun))]
            self._begun[seed, epoch], self._ahead, self._next = listed, None, epoch + 1
            self._looks = appearance(self._sampler)
        return listed

    def saved_as(self, crc: str, seed: int, epoch: int) -> tuple[bool, str]:
        """Whether the list of a saved CRC is that of a pass, or what the sampler gives now; and the CRC of this one."""
        listed = self._begun.get((seed, epoch))
        if listed is None or listed.crc != crc:
            listed = self._of_copy(seed, epoch) if listed is not None else self.epoch(seed, epoch)
        if listed.crc != crc:
            self._ahead = None  # the user may repair the sampler
        return listed.crc == crc, listed.crc

    def moved(self, crc: str) -> None:
        """The loader was led elsewhere, into the epoch of the list with this CRC; empty: to an epoch's beginning.

        The sampler is asked again in the next pass: the training loop may have changed it. One that keeps something
        from pass to pass, and was not changed, would then give another list.
        """
        if crc and any(each.crc == crc for each in self._begun.values()):
            return
        if not self._remembers or self._looks != appearance(self._sampler):
            self._begun.clear()

    def follow(self, size: int | None) -> None:
        """The dataset has another size now."""
        self._size = size
        self.forget()

    def forget(self) -> None:
        """Drop the lists: the next pass asks the sampler again."""
        self._begun.clear()
        self._ahead = None

    @contextlib.contextmanager
    def as_it_began(self, listed: ListedEpoch) -> Iterator[None]:
        """A context in which the dataset looks as worker processes see it that a plain pass starts.

        They start before the sampler gives its first index, and see nothing of what it sets from then on.
        """
        if listed.wrote is None:
            yield
            return
        with self._set_back():
            set_back(self.dataset, listed.wrote)
            yield

    def twin(self) -> Listed:
        """The same order for another loader of the same source, which may go on with a pass that was begun here."""
        twin = copy.copy(self)
        twin._begun = dict(self._begun)
        return twin

    def _try(self, listed: ListedEpoch, copied: Any, seed: int, epoch: int) -> None:
        """Learn from two passes over a copy whether the sampler repeats itself, and keeps something from pass to pass.

        Args:
            listed: by the sampler, or by another copy.
            copied: made before; None if it could not be.
            seed, epoch: of the list.
        """
        if self._trusted:
            return
        tried = copied is not None
        if tried:
            with self._set_back():
                again, second = (self._list(copied, seed, epoch) for _ in range(2))
            tried = again.error is None or listed.error is not None  # else the copy is not what it should be
        if tried:
            if again.crc != listed.crc:
                raise SourceError(
                    f"{type(self._sampler).__name__} does not repeat itself: two lists for epoch {epoch} under one "
                    "seed differ; derive its order from the epoch (set_epoch) or from torch's, numpy's or python's "
                    "generators"
                )
            self._remembers = second.crc != again.crc
        self._trusted, self.untried = True, not tried

    def _of_copy(self, seed: int, epoch: int) -> ListedEpoch:
        """The list of a copy, after those of the epochs that the sampler has not given, if it keeps something."""
        copied = None if self._pure else private_copy(self._sampler)
        copied = _shallow_copy(self._sampler) if copied is None else copied
        with self._set_back():
            try:
                for earlier in range(self._next, epoch if self._remembers else 0):
                    self._list(copied, seed, earlier)
                return self._list(copied, seed, epoch)
            except _NotKeptError:  # it is known to end now
                return self._of_copy(seed, epoch)

    def _of_itself(self, seed: int, epoch: int) -> ListedEpoch:
        """The list of the sampler itself."""
        before, looks = plain_attributes(self.dataset), list[PlainAttributes]()
        try:
            listed = self._list(self._sampler, seed, epoch, looks)
        except _NotKeptError:  # it gives more than its len says, and more than fits
            listed = self._list(self._sampler, seed, epoch, looks := [])
        after = plain_attributes(self.dataset)
        names = changed(looks[1], looks[2]) or changed(looks[1], after) if len(looks) > 1 else []
        if names and not self.in_workers:
            set_back(self.dataset, before)
            raise UnsupportedSourceError(
                f"{type(self._sampler).__name__} sets {', '.join(names[:4])} of the dataset between its indices, which "
                "are listed before the first batch: put what changes into the index, as in yield [(size, index) for "
                "index in batch], which __getitem__ takes apart"
            )
        if looks and changed(looks[0], after):
            listed.wrote = looks[0]
        return listed

    @contextlib.contextmanager
    def _set_back(self) -> Iterator[None]:
        """Set back what is set on the dataset meanwhile, such as by a copy of the sampler, which shares the dataset."""
        before = plain_attributes(self.dataset)
        try:
            yield
        finally:
            set_back(self.dataset, before)

    def _list(self, sampler: Any, seed: int, epoch: int, looks: list[PlainAttributes] | None = None) -> ListedEpoch:
        """What the sampler, or a copy, gives for an epoch, under the epoch's stream.

        `looks`: gets what the dataset looks like when the sampler was asked for an iterator, after its first index, and
        after a later one, if that is something else.
        """
        _set_epoch(sampler, epoch)
        items: list[Any] = []
        with Streams(sampler).under(derive_key(Purpose.LISTING, seed, epoch)):
            try:
                source = _each(sampler) if looks is None else self._each_seen(sampler, looks)
                error = _extend(items, source) if self._ends else self._to_its_end(sampler, source, items)
            except _NotKeptError:
                self._ends = True
                raise
        self._ends = True
        return ListedEpoch(items, error)

    def _each_seen(self, sampler: Any, looks: list[PlainAttributes]) -> Iterator[Any]:
        items = iter(sampler)
        looks.append(plain_attributes(self.dataset))
        following = 0
        for number, item in enumerate(items):
            if number == following:
                following = number + max(1, number // _LOOKED_AT)
                look = plain_attributes(self.dataset)
                if len(looks) == 1:
                    looks += look, look
                elif changed(looks[1], look):
                    looks[2] = look
            yield item

    def _to_its_end(self, sampler: Any, source: Iterator[Any], items: list[Any]) -> Exception | None:
        """Append all that `sampler` gives to `items`.

        Returns:
            The sampler's own error, which ended it; None if it came to its end.

        Raises:
            SourceError: it does not end.
            _NotKeptError: it ends, but has given more than is kept before that is known.

        Warns:
            MidepochWarning: it may not end, and waits: whether a slow one ends cannot be known before it does.
        """
        length, since, began = length_of(sampler), time.thread_time(), time.perf_counter()
        told, error, size = False, None, 1
        given = indices = 0
        different = 0.0
        some: list[Any] = [None]
        while error is None and some:
            some = []
            error = _extend(some, itertools.islice(source, size))
            if not some:
                break
            size = min(2 * size, _PART)
            given += len(some)
            indices += sum(map(len, some)) if isinstance(some[0], list | tuple) else len(some)
            if indices <= _KEPT or (length is not None and given <= length):
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
        if len(items) < given:
            raise _NotKeptError
        return error

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
        return {**self.__dict__, "_begun": {}, "_ahead": None}


def _most_different(items: list[Any]) -> float:
    """More different indices than these there cannot be, if they count from 0."""
    flat = itertools.chain.from_iterable(items) if isinstance(items[0], list | tuple) else items
    return max((each + 1 if type(each) is int else math.inf for each in flat), default=0)


class _NotKeptError(Exception):
    """Of a sampler that was not known to end."""


def _each(sampler: Any) -> Iterator[Any]:
    # Some begin again when they are asked for an iterator or after their end; this one does not.
    yield from sampler


def _extend(items: list[Any], more: Iterable[Any]) -> Exception | None:
    """Append what `more` gives; the error with which it ended, if it did not come to its end."""
    try:
        items.extend(more)
    except Exception as error:  # noqa: BLE001  # it is raised where a plain pass comes to it
        return error.with_traceback(None if error.__traceback__ is None else error.__traceback__.tb_next)
    return None


def _is_pure(sampler: object) -> bool:
    if type(sampler) is BatchSampler:
        return _is_pure(sampler.sampler)
    pure = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    return type(sampler) in (*pure, list, tuple, range)


def _set_epoch(sampler: Any, epoch: int) -> None:
    """Tell a sampler, and the one inside it, the epoch, as a training loop does."""
    told: tuple[Any, ...] = getattr(sampler, "sampler", None), sampler
    for each in told:
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)


def _shallow_copy(sampler: Any) -> Any:
    """A copy whose attributes, and those of the sampler inside it, can be set. The sampler itself if there is none."""
    if isinstance(sampler, list | tuple | range):
        return sampler
    try:
        twin, inner = copy.copy(sampler), getattr(sampler, "sampler", None)
        if callable(getattr(inner, "set_epoch", None)):
            twin.sampler = copy.copy(inner)
    except Exception:  # noqa: BLE001  # whatever its author has not thought of
        return sampler
    return twin


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


def understand(
    sampler: Any, size: int | None = None, world_size: int = 1, gives_batches: bool = False, left_alone: bool = False
) -> Understood:
    """The order that `sampler` stands for: computed where possible, listed otherwise.

    Args:
        sampler: as the user made it.
        size: of the dataset, if known; a list that is shorter may be one rank's share.
        world_size: ranks that share the data, as far as is known.
        gives_batches: it is a batch sampler.
        left_alone: one that shards by itself is to do so: its order is the list that it gives this rank.

    Raises:
        UnsupportedSourceError: `left_alone`, of one without an end.
    """
    kind = type(sampler)
    if (kind.__module__, kind.__qualname__) in _as_parent:
        kind = kind.__mro__[1]
    if kind is SequentialSampler:
        return Understood(Sequential(len(sampler.data_source)))
    if kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return Understood(Shuffled(len(sampler.data_source)), seed=_seed_of(sampler.generator))
    stated: Understood | None = None
    if kind is DistributedSampler:
        count = len(sampler.dataset)
        stated = Understood(
            Shuffled(count) if sampler.shuffle else Sequential(count),
            seed=sampler.seed % (1 << 64),
            tail="drop" if sampler.drop_last else "pad",
            world=World(sampler.rank, sampler.num_replicas),
        )
    elif "understood" in vars(kind):  # not a subclass of such a class, which may have another order
        stated = cast(OrderedSampler, sampler).understood()
    if stated is not None:
        return replace(stated, order=Listed(sampler, size), tail=None) if left_alone else stated
    if size and not gives_batches and (endless := _endless(sampler, size)) is not None:
        if left_alone and endless.world is not None:
            raise UnsupportedSourceError(
                f"shard=False: {kind.__name__} divides an order without an end, which cannot be listed: leave shard= "
                "out, and midepoch divides it as the sampler does"
            )
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
