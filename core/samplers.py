"""torch Samplers: the order that each stands for, computed where possible, listed otherwise."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .attributes import DatasetAttributes, appearance
from .backends import SAMPLERS_LIKE_THEIR_PARENT
from .errors import SourceError, UnsupportedSourceError
from .order import Endless, Order, Sequential, Shuffled
from .order.keys import derive_key
from .randomness.streams import Purpose, Streams
from .sharding import ShardingSigns, length_of, sharding_of
from .state.digest import checksum_of
from .state.witness import summary_of
from .trying import Copied, Finding, copy_of, tried_on_copy
from .world import Tail, World

__all__ = [
    "MaterializedEpoch", "MaterializedOrder", "OrderedSampler", "SamplerSpec", "interpret_sampler", "length_of",
]  # fmt: skip

_MANY, _TIMES = 1_000_000, 4  # a sampler that gave more indices than so many, and so many for each sample, does not end
_LONGEST = 50_000_000  # indices; a longer list would not fit into memory, and takes ten seconds
_LOOKED_AT = 16  # of the first indices, and of each following doubling: each has a look at the dataset after it


class MaterializedEpoch:
    """One epoch of a `MaterializedOrder` order, as the sampler gave it.

    Attributes:
        error: of the sampler's own, which ended its list; None if it came to its end.
    """

    def __init__(self, items: list[Any], error: Exception | None = None) -> None:
        self._items, self.error = items, error

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


class MaterializedOrder:
    """The order of any iterable of indices, such as a WeightedRandomSampler or a user's own BatchSampler.

    A pass lists the sampler itself, once, as a plain pass iterates it. What is asked before (a length, a state) lists a
    copy. The list is built with generators seeded by (seed, epoch). A sampler that keeps something from pass to pass is
    listed for the epochs in between first, so that its list is a function of both all the same.

    Args:
        sampler: as the user made it.
        size: of the dataset, if known.

    Attributes:
        dataset: that the sampler may know. What a copy of the sampler sets on it is set back.
        untried: why it was not tried on a copy whether it repeats itself; empty if it was.
        is_alone: it keeps something from pass to pass, and the passes before this one are too many to be listed.
    """

    def __init__(self, sampler: Any, size: int | None = None) -> None:
        self._sampler, self._size = sampler, size
        self.dataset: Any = None
        self.untried = ""
        self._begun: dict[tuple[int, int], MaterializedEpoch] = {}  # by seed and epoch, of the last two passes
        self._ahead: tuple[tuple[Any, ...], MaterializedEpoch] | None = None  # from a copy, and what it depends on
        self._looks: tuple[Any, ...] = ()  # of the sampler, after its last pass
        self._next = 0  # the epoch after the last one that the sampler itself has given
        self._remembers = self.is_alone = False  # it keeps something from pass to pass
        self._indices = 0  # of its last list
        self._pure = self._trusted = _is_pure(sampler)  # torch's own end and repeat themselves; others are tested once
        self._consumed = _consumed_before(sampler)

    def measure(self, seed: int, epoch: int) -> None:
        """List a copy, unless the length of an epoch is known for sure.

        The len of another sampler than torch's may be an estimate, for instance if it fills batches with tokens.
        """
        if not self._pure or length_of(self._sampler) is None:
            self.epoch(seed, epoch)

    def length(self, seed: int, epoch: int) -> int:
        """Indices in one epoch; as the sampler's own len says it, while it has not been listed."""
        listed = self.known(seed, epoch)
        if listed is None:
            stated = self.own_length(epoch)
            if stated is not None:
                return stated
            listed = self.epoch(seed, epoch)
        return listed.units

    def own_length(self, epoch: int) -> int | None:
        """Of an epoch, as the sampler's own len says it, listed or not; None if it has none."""
        if self._pure:
            return length_of(self._sampler)
        with DatasetAttributes(self.dataset):
            sampler = _shallow_copy(self._sampler)  # its length may follow from the epoch
            _set_epoch(sampler, epoch)
            return length_of(sampler)

    def describe(self) -> str:
        """For the fingerprint. The content of the list is compared by its CRC.

        A sampler that a trainer has built to continue by itself has another one, so that a state of a run from the
        beginning does not skip a second time.
        """
        return f"listed, built with consumed_samples={self._consumed}" if self._consumed else "listed"

    @property
    def finding(self) -> Finding:
        """Why it is believed that the sampler repeats its list; empty if that was tried, or has not been yet."""
        why = f"that the sampler repeats itself was not tried: {self.untried}"
        return Finding(untried=why if self.untried else "", order=True)

    def known(self, seed: int, epoch: int) -> MaterializedEpoch | None:
        """The list of one epoch, if a pass has begun it, or a copy was listed and the sampler looks the same since."""
        listed = self._begun.get((seed, epoch))
        if listed is None and self._ahead is not None and self._ahead[0] == (seed, epoch, *appearance(self._sampler)):
            return self._ahead[1]
        return listed

    def epoch(self, seed: int, epoch: int) -> MaterializedEpoch:
        """The list of one epoch: of its pass if that has begun, otherwise of a copy of the sampler.

        Raises:
            SourceError: the sampler does not end, or does not repeat itself.
        """
        listed = self.known(seed, epoch)
        if listed is None:
            looks = seed, epoch, *appearance(self._sampler)
            listed = self._of_copy(seed, epoch)
            if not self._trusted:
                self._try(listed, copy_of(self._sampler, Dataset), seed, epoch)
                if self._remembers:
                    listed = self._of_copy(seed, epoch)
            self._ahead = looks, listed
        return listed

    def begin(self, seed: int, epoch: int) -> MaterializedEpoch:
        """The list of a pass that begins, from the sampler itself. A pass that goes on has the same list.

        Raises:
            SourceError: as `epoch`.
            UnsupportedSourceError: the sampler sets something on the dataset while it gives its indices.
        """
        listed = self._begun.get((seed, epoch))
        # One that failed at its first index is asked again: no batch of it was handed out.
        if listed is None or (listed.error is not None and not len(listed)):
            if not self._trusted and epoch > self._next:
                self.epoch(seed, epoch)  # whether it remembers is tried before
            copied = Copied() if self._trusted else copy_of(self._sampler, Dataset)
            for earlier in self._earlier(epoch):
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

    def _try(self, listed: MaterializedEpoch, copied: Copied, seed: int, epoch: int) -> None:
        """Learn from two passes over a copy whether the sampler repeats itself, and keeps something from pass to pass.

        Args:
            listed: by the sampler, or by another copy.
            copied: made before.
            seed, epoch: of the list.
        """
        if self._trusted:
            return

        def crc_of(again: Any) -> str:
            first, second = (self._list(again, seed, epoch) for _ in range(2))
            if first.error is not None and listed.error is None:
                raise first.error  # the copy is not what it should be
            self._remembers = second.crc != first.crc
            return first.crc

        with DatasetAttributes(self.dataset):
            key = derive_key(Purpose.LISTING, seed, epoch)
            finding = tried_on_copy(copied, crc_of, key, first=summary_of(listed.crc))
        if finding.differs:
            raise SourceError(
                f"{type(self._sampler).__name__} does not repeat itself: two lists for epoch {epoch} under one seed "
                "differ; derive its order from the epoch (set_epoch) or from torch's, numpy's or python's generators"
            )
        self._trusted, self.untried = True, finding.untried

    def _earlier(self, epoch: int) -> range:
        """The epochs to list before this one; none if that takes too long. A CRC then tells whether it was needed."""
        earlier = range(self._next, epoch if self._remembers else 0)
        self.is_alone = len(earlier) * self._indices > _LONGEST
        return range(0) if self.is_alone else earlier

    def _of_copy(self, seed: int, epoch: int) -> MaterializedEpoch:
        """The list of a copy, after those of the epochs that the sampler has not given, if it keeps something."""
        copied = Copied() if self._pure else copy_of(self._sampler, Dataset)  # which shares the dataset
        self.untried = self.untried or copied.why
        sampler = copied.open() if copied.data else _shallow_copy(self._sampler)
        with DatasetAttributes(self.dataset):
            for earlier in self._earlier(epoch):
                self._list(sampler, seed, earlier)
            return self._list(sampler, seed, epoch)

    def _of_itself(self, seed: int, epoch: int) -> MaterializedEpoch:
        """The list of the sampler itself."""
        before, began = DatasetAttributes(self.dataset), list[DatasetAttributes]()

        def look() -> None:
            if not began:
                began.append(DatasetAttributes(self.dataset))  # as it was asked for its iterator
            if names := began[0].changed():
                before.set_back()
                raise UnsupportedSourceError(
                    f"{type(self._sampler).__name__} sets {', '.join(names[:4])} of the dataset while it gives "
                    "indices, which are listed before the first batch: set it when the sampler is asked for its "
                    "iterator, or put it into the index, as in yield [(size, index) for index in batch], which "
                    "__getitem__ takes apart"
                )

        return self._list(self._sampler, seed, epoch, look)

    def _list(self, sampler: Any, seed: int, epoch: int, look: Callable[[], None] = lambda: None) -> MaterializedEpoch:
        """What the sampler, or a copy, gives for an epoch, under the epoch's stream.

        `look`: called when the sampler was asked for an iterator, after its first index, now and then, and at its end.

        Raises:
            SourceError: it does not end.
        """
        _set_epoch(sampler, epoch)
        items: list[Any] = []
        error, indices, length = None, 0, length_of(sampler) or 0
        most = min(_MANY + _TIMES * (self._size or 0), _LONGEST)
        with Streams(sampler).under(derive_key(Purpose.LISTING, seed, epoch)):
            source = _each(sampler, look)
            while error is None:
                given = len(items)
                error = _extend(items, itertools.islice(source, max(1, given // _LOOKED_AT)))
                look()
                if len(items) == given:
                    break
                indices += sum(map(len, items[given:])) if isinstance(items[0], list | tuple) else len(items) - given
                if indices > most and (len(items) > length or indices > _LONGEST) and not self._pure:
                    raise SourceError(self._too_many(items, most, len(items) <= length))
        self._indices = indices
        return MaterializedEpoch(items, error)

    def _too_many(self, items: list[Any], most: int, ends: bool) -> str:
        """What to write in place of a sampler that does not end, or, if it says that it does, is too long to list."""
        batches, size = isinstance(items[0], list | tuple), self._size or 0
        gave = f"{type(self._sampler).__name__} gave more than {_LONGEST if ends else most:,} indices"
        if ends:
            first = list(itertools.chain.from_iterable(items[:_LOOKED_AT])) if batches else items[:_LOOKED_AT]
            return (
                f"{gave}, too many to list: put {'batch_size=, drop_last= and sampler=' * batches}midepoch."
                f"ResumableSampler(len(dataset), shuffle={first != list(range(len(first)))}) in its place, which "
                "computes them"
            )
        kind = "Sequential" if size and items[: 2 * size] == 2 * list(range(size)) else "Shuffled"
        rounds = (
            "for rounds over all samples, put midepoch.ResumableSampler(len(dataset), shuffle=midepoch.order."
            f"Endless(midepoch.order.{kind}(len(dataset)))) in its place"
        )
        return (
            f"{gave} and does not end: {'build it over a sampler that ends' if batches else rounds}; otherwise wrap a "
            "function that makes what reads it, as in midepoch.wrap(lambda: make()), which is read again up to a "
            "resume's position. If it ends, let its len() say where"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_begun": {}, "_ahead": None}


def _each(sampler: Any, look: Callable[[], None]) -> Iterator[Any]:
    items = iter(sampler)
    look()
    yield from items  # some begin again when they are asked after their end; this does not


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


def _consumed_before(sampler: Any) -> int:
    """After how many samples a sampler was built to continue, as those of language-model trainers count them."""
    for each in (sampler, getattr(sampler, "sampler", None)):
        with contextlib.suppress(TypeError):  # a checkpoint's number may be numpy's or torch's
            if number := operator.index(getattr(each, "consumed_samples", 0)):
                return number
    return 0


def _shallow_copy(sampler: Any) -> Any:
    """A copy whose attributes, and those of the sampler inside it, can be set. The sampler itself if there is none."""
    if isinstance(sampler, list | tuple | range):
        return sampler
    try:
        clone, inner = copy.copy(sampler), getattr(sampler, "sampler", None)
        if callable(getattr(inner, "set_epoch", None)):
            clone.sampler = copy.copy(inner)
    except Exception:  # noqa: BLE001  # whatever its author has not thought of
        return sampler
    return clone


@dataclass(frozen=True)
class SamplerSpec:
    """The meaning of a torch Sampler.

    Attributes:
        order: of all ranks together.
        seed, tail, world: as the sampler states them, or None.
        sharding: signs that the sampler shards its list by itself; None if there are none.
    """

    order: Order | MaterializedOrder
    seed: int | None = None
    tail: Tail | None = None
    world: World | None = None
    sharding: ShardingSigns | None = None


class OrderedSampler(Sampler[int]):
    """A sampler that states its own order."""

    @abstractmethod
    def spec(self) -> SamplerSpec:
        """The order, and what else the sampler states."""


def interpret_sampler(
    sampler: Any, size: int | None = None, world_size: int = 1, gives_batches: bool = False, left_alone: bool = False
) -> SamplerSpec:
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
    if (kind.__module__, kind.__qualname__) in SAMPLERS_LIKE_THEIR_PARENT:
        kind = kind.__mro__[1]
    if kind is SequentialSampler:
        return SamplerSpec(Sequential(len(sampler.data_source)))
    if kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return SamplerSpec(Shuffled(len(sampler.data_source)), seed=_seed_of(sampler.generator))
    stated: SamplerSpec | None = None
    if kind is DistributedSampler:
        count = len(sampler.dataset)
        stated = SamplerSpec(
            Shuffled(count) if sampler.shuffle else Sequential(count),
            seed=sampler.seed % (1 << 64),
            tail="drop" if sampler.drop_last else "pad",
            world=World(sampler.rank, sampler.num_replicas),
        )
    elif isinstance(sampler, OrderedSampler) and "spec" in vars(kind):  # its subclass may have another order
        stated = sampler.spec()
    if stated is not None:
        if left_alone and isinstance(stated.order, Endless):
            raise UnsupportedSourceError(
                f"shard=False: the order of this {kind.__name__} does not end, and cannot be listed for each rank: "
                "leave shard= out, and midepoch divides it"
            )
        return replace(stated, order=MaterializedOrder(sampler, size), tail=None) if left_alone else stated
    return SamplerSpec(
        MaterializedOrder(sampler, size),
        seed=_seed_of(getattr(sampler, "generator", None)),
        sharding=sharding_of(sampler, size, world_size, gives_batches),
    )


def _seed_of(generator: object) -> int | None:
    return generator.initial_seed() % (1 << 64) if isinstance(generator, torch.Generator) else None
