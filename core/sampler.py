"""torch Samplers: what order they stand for, lists of those that cannot be computed, and one that resumes."""

from __future__ import annotations

import collections
import copy
import itertools
import zlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from operator import length_hint
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

from .encoding import digest
from .errors import SourceError
from .keys import derive_key
from .order import Order, Sequential, Shuffled
from .randomness import Purpose, Streams
from .state import reseal
from .world import Share, Tail, World

__all__ = ["Listed", "ListedEpoch", "ResumableSampler", "Understood", "sized", "understand"]

_INDEX_BLOCK = 512
_LONGEST_LIST = 50_000_000  # of a sampler without a length; a longer list would not fit a process anyway


class ListedEpoch:
    """One epoch of a `Listed` order, as the sampler gave it."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        plain = all(type(item) is int for item in items)
        self.crc = f"{zlib.crc32(repr(items).encode()):08x}" if plain else digest(items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, positions: slice) -> list[Any]:
        return self._items[positions]


class Listed:
    """The order that some iterable of indices gives for one epoch: a WeightedRandomSampler, a user's own BatchSampler.

    Built once an epoch, under a random stream keyed by (seed, epoch), so that it is a function of these. A sampler that
    keeps state of its own from epoch to epoch is none, and is refused when that shows.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._streams = Streams(sampler)
        self._lists: dict[tuple[int, int], ListedEpoch] = {}
        # torch's own repeat themselves; the others have to show it once.
        self._trusted = _is_pure(sampler)

    def length(self, seed: int, epoch: int) -> int:
        """Exact for an epoch that was built, else what the sampler's ``len`` says."""
        known = self._lists.get((seed, epoch))
        if known is not None:
            return len(known)
        try:
            return len(self._sampler)
        except TypeError:
            return len(self.epoch(seed, epoch))

    def describe(self) -> str:
        """For the fingerprint. What the list holds is compared by its CRC."""
        return "listed"

    def epoch(self, seed: int, epoch: int) -> ListedEpoch:
        """The list of one epoch; the last two are kept.

        Raises:
            SourceError: the sampler does not end, or does not repeat itself.
        """
        listed = self._lists.get((seed, epoch))
        if listed is None:
            listed = self._build(seed, epoch)
            if not self._trusted:
                again = self._build(seed, epoch)
                if again.crc != listed.crc:
                    raise SourceError(
                        f"{type(self._sampler).__name__} does not repeat itself: two lists for epoch {epoch} under "
                        "one seed differ; derive its order from its epoch (set_epoch) or from torch's, numpy's or "
                        "python's generators, and keep nothing from the epoch before"
                    )
                self._trusted = True
            while len(self._lists) > 1:
                del self._lists[next(iter(self._lists))]
            self._lists[seed, epoch] = listed
        return listed

    def _build(self, seed: int, epoch: int) -> ListedEpoch:
        sampler = _at_epoch(self._sampler, epoch)
        try:
            limit = 2 * len(sampler) + 1000
        except TypeError:
            limit = _LONGEST_LIST
        with self._streams.under(derive_key(Purpose.LISTING, seed, epoch)):
            items = list(itertools.islice(iter(sampler), limit + 1))
        if len(items) > limit:
            raise SourceError(
                f"{type(self._sampler).__name__} gave more than {limit} indices and does not end: give it an end, "
                "one for each epoch, or wrap a generator function that reads it"
            )
        return ListedEpoch(items)

    def __getstate__(self) -> dict[str, Any]:
        return {"_sampler": self._sampler, "_streams": self._streams, "_lists": {}, "_trusted": self._trusted}


def _is_pure(sampler: object) -> bool:
    if type(sampler) is BatchSampler:
        return _is_pure(sampler.sampler)
    pure = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    return type(sampler) in (*pure, list, tuple, range)


def _at_epoch(sampler: Any, epoch: int) -> Any:
    """A copy of `sampler`, and of the one inside it, that has been told the epoch; the user's own stays as it was."""
    inner = getattr(sampler, "sampler", None)
    told, inner_told = hasattr(sampler, "set_epoch"), hasattr(inner, "set_epoch")
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
    """What a torch Sampler means.

    Attributes:
        order: of all ranks together.
        seed, tail, world: as the sampler states them, or None.
        shards: it looks as if the sampler gave each rank a list of its own, so that its list must not be shared again.
    """

    order: Order | Listed
    seed: int | None = None
    tail: Tail | None = None
    world: World | None = None
    shards: bool = False


def understand(sampler: Any) -> Understood:
    """The order that `sampler` stands for: computed where it can be, listed otherwise."""
    kind = type(sampler)
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
    if kind is ResumableSampler:
        return Understood(sampler.order, seed=sampler.seed, tail=sampler.tail, world=sampler.world)
    ranked = isinstance(sampler, DistributedSampler) or any(hasattr(sampler, name) for name in ("num_replicas", "rank"))
    return Understood(Listed(sampler), seed=_seed_of(getattr(sampler, "generator", None)), shards=ranked)


def _seed_of(generator: object) -> int | None:
    return generator.initial_seed() % (1 << 64) if isinstance(generator, torch.Generator) else None


class ResumableSampler(Sampler[int]):
    """Indices in place of RandomSampler and DistributedSampler, with a state.

    Each rank's indices are its part of the global batches, so give it the loader's `batch_size` where the world is
    larger than one. In a loader that prefetches, ask ``midepoch.wrap(loader)`` for the state: this sampler can only say
    what it has given out.

    Args:
        size: of the dataset.
        seed: of the order.
        shuffle: in a new order each epoch; False for the dataset's own. An `Order` of midepoch.order is taken as it is.
        world: which ranks share the indices; None for the world as it is when iteration starts.
        batch_size: of one rank's batches.
        drop_last: as DistributedSampler's: leave out what does not divide by the world size, rather than repeat.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        shuffle: bool | Order = True,
        world: World | None = None,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        if type(seed) is not int or not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be an int in [0, 2**64), got {seed!r}")
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size must be an int of at least 1, got {batch_size!r}")
        order = (Shuffled(size) if shuffle else Sequential(size)) if isinstance(shuffle, bool) else shuffle
        if not callable(getattr(order, "epoch", None)):
            raise TypeError(f"shuffle must be True, False or an order of midepoch.order, got {shuffle!r}")
        if order.size != size:
            raise ValueError(f"the order is over {order.size} positions, size is {size}: make them equal")
        self.order, self.seed, self.world, self.batch_size = order, seed, world, batch_size
        self.tail: Tail = "drop" if drop_last else "pad"
        self._resumable: Any = None
        self._partial = False  # the state may lie inside a block
        self._block_length = 0
        self._rest: Iterator[int] = iter(())

    def _loader(self) -> Any:
        # Built at first need: a sampler is made before a trainer starts its processes.
        if self._resumable is None:
            from .adapter import Options
            from .indexed import IndexAdapter
            from .loader import Loader

            options = Options(seed=self.seed, world=self.world, tail=self.tail)
            alone = (self.world or World.current()).world_size == 1
            # Alone, the batch size does not matter to the order, and long blocks make an index cheap.
            block = max(self.batch_size, _INDEX_BLOCK) if alone else self.batch_size
            self._resumable = Loader(IndexAdapter(self, options, block), options)
            self._partial = alone
        return self._resumable

    def __iter__(self) -> Iterator[int]:
        for block in self._loader():
            self._block_length = len(block)
            self._rest = iter(block)
            yield from self._rest

    def __len__(self) -> int:
        """Indices of one full epoch on this rank."""
        world = self.world or World.current()
        share = Share(self.order.size, 0, 1, world, self.tail, False)
        return share.steps

    def set_epoch(self, epoch: int) -> None:
        """As `DistributedSampler.set_epoch`; not needed: each pass is a new epoch."""
        self._loader().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands: after the last index given out, or, in a larger world, after its batch."""
        loader, rest = self._loader(), length_hint(self._rest)
        if not rest or not self._partial:
            return cast(dict[str, Any], loader.state_dict())
        state = loader.state_dict(in_flight=1)
        return reseal({**state, "position": state["position"] + self._block_length - rest})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state` at the next index; see `midepoch.loader.Loader.load_state_dict`."""
        self._loader().load_state_dict(state)
        collections.deque(self._rest, maxlen=0)  # a pass that runs goes on from the state too


def sized(source: object) -> bool:
    """True if `len(source)` is defined and works."""
    if not isinstance(source, Sized):
        return False
    try:
        len(source)
    except (TypeError, NotImplementedError):
        return False
    return True
