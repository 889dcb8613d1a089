"""What an adapter is: the one class to write for a new backend.

An adapter holds what only its backend knows: its size, batch size and fingerprint, what it is capable of, and how to
open an iterator at a cursor. How iteration behaves (epochs that roll over, loading, peeking, refusing) is in
`loader.py`, once.
"""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from midepoch.errors import StateCorruptError
from midepoch.randomness.owned import find_generators
from midepoch.state.parts import part_of
from midepoch.world import Share, Tail, World, check_tail

from .capabilities import Capabilities, Capability
from .place import Place

__all__ = ["Adapter", "Options", "Run", "Session"]


@dataclass(frozen=True)
class Options:
    """What the user told `midepoch.wrap`. `settings` are those that only some adapters know, and check themselves.

    Raises:
        ValueError, TypeError: something is out of range.
    """

    seed: int | None = None
    world: World | None = None
    shard: bool | None = None
    randomness: Literal["sample", "none"] = "sample"
    tail: Tail | None = None
    fingerprint: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seed, fingerprint = self.seed, self.fingerprint
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
            raise ValueError(f"seed must be an int in [0, 2**64) or None, got {seed!r}")
        if self.world is not None and not isinstance(self.world, World):
            raise TypeError(f"world must be a midepoch.World or None, got {self.world!r}")
        if self.shard is not None and not isinstance(self.shard, bool):
            raise TypeError(f"shard must be True, False or None, got {self.shard!r}")
        if self.randomness not in ("sample", "none"):
            raise ValueError(f"randomness must be 'sample' or 'none', got {self.randomness!r}")
        check_tail(self.tail)
        if fingerprint is not None and (not isinstance(fingerprint, str) or len(fingerprint) > 64):
            raise ValueError(
                f"fingerprint must be a str of at most 64 characters or None, got {fingerprint!r}: pass a hash of "
                "longer ones"
            )

    @property
    def streams(self) -> bool:
        """True where each sample has a random stream of its own."""
        return self.randomness == "sample"


@dataclass(frozen=True)
class Run:
    """Where a session starts, for whom, and under which seed.

    Attributes:
        epoch, position, seed: as in the state.
        world: this process among those that share the data.
        share: this rank's batches in the rest of the epoch; None where the epoch's length is unknown.
        tail: how a rest is shared, for sources whose length is unknown.
        detail: as a state has it that stands there.
        session: another number for each, also in different processes; what a reader tells passes apart by.
    """

    epoch: int
    position: int
    seed: int
    world: World
    share: Share | None
    tail: Tail
    detail: str
    session: int = field(default_factory=functools.partial(random.SystemRandom().getrandbits, 62))


class Session:
    """This rank's batches, opened at one place. After an error it is closed and not used again.

    Attributes:
        take: gives the next batch; raises StopIteration at the end, again and again. In the path of each batch, so it
            may be a method, or an attribute that holds an iterator's own ``__next__``.
        marks: it is asked for its `mark` before each batch, since neither arithmetic nor a constant gives its detail.
        drift: units by which the place lies further on than the batches handed out make it, where only reading can
            tell: more than 0 where steps were passed over that had nothing to give, less where the last global batch
            was short. Only of sessions that have `marks`.
        others_go_on: where this rank has nothing left of an epoch of unknown length, some other rank has.
        varies: it may end before the number of batches that its share has.
    """

    take: Callable[[], Any]
    marks: bool = False
    drift: int = 0
    others_go_on: bool = False

    @property
    def varies(self) -> bool:
        """False, unless only reading can tell how many batches there are, whatever the source's length."""
        return False

    def mark(self) -> Any:
        """Where it stands now, in whatever form `detail` understands later. Takes microseconds where `marks` is set.

        Raises:
            StateError: the source cannot say.
        """
        return None

    def detail(self, mark: Any) -> str:
        """What a state must carry besides epoch and position, as it was at a mark; None where none was taken.

        Also asked after `close`.

        Raises:
            StateError: it is not known.
        """
        return ""

    def following(self) -> str:
        """The detail with which the next epoch begins, once the last batch of this one has been handed out."""
        return ""

    def close(self) -> None:
        """Let go of threads, processes and files, and of all that `detail` does not need. May be called twice."""


class Adapter(ABC):
    """One source of one backend.

    Attributes:
        name: in states and messages; never changes once states carry it.
        unit: what positions count: samples, or whole batches where these have no constant size.
        batch_size: units in one batch of one rank; 1 where the unit is a batch.
        drop_last: the source leaves out a last batch that is not full.
        tail, seed, world: as stated by the source itself (a DistributedSampler, a generator), or None.
        seed_is_shared: False where each process's source may have drawn a `seed` of its own. In a world of more than
            one the user must then state one.
        remembers: a session knows its detail of some batches ago.
        seals_detail: the detail says a place of its own, which must be the state's. It is sealed with that, so that a
            state that was edited by hand is refused rather than continued where the detail leads.
        leads: `lead` needs to know the detail from which it is to lead on, not the place alone.
        settings: names of the keywords of `wrap` that only this adapter knows; it checks their values itself.
    """

    name: ClassVar[str]
    settings: ClassVar[frozenset[str]] = frozenset()
    unit: Literal["sample", "batch"] = "sample"
    seed_is_shared: bool = True
    seals_detail: bool = False
    remembers: bool = True
    leads: bool = False

    def __init__(self, source: Any, options: Options) -> None:
        self.source = source
        self.options = options
        self.batch_size = 1
        self.drop_last = False
        self.tail: Tail | None = None
        self.seed: int | None = None
        self.world: World | None = None
        self._stated: Capabilities | None = None
        self._promises: Capabilities | None = None

    @classmethod
    @abstractmethod
    def recognises(cls, source: object) -> bool:
        """True for a source of this backend. Must not change or iterate it."""

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter | None:
        """The adapter for a recognised source; None leaves it to a less specific backend."""
        return cls(source, options)

    @abstractmethod
    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Units in one epoch of all ranks together; None where it cannot be known.

        `detail` is that of a state which is about to be opened or loaded, for sources whose size depends on it.
        """

    def share(self, seed: int, epoch: int, position: int, world: World, detail: str) -> Share | None:
        """This rank's batches from a position on; None where the epoch's length is unknown."""
        size = self.size(seed, epoch, world, detail)
        if size is None:
            return None
        world = self.sharing(world)
        return Share(size, min(position, size), self.batch_size, world, self.tail_in_use, self.drop_last)

    @property
    def tail_in_use(self) -> Tail:
        """How a rest is shared: as stated, else as the source has it."""
        return self.options.tail or self.tail or "pad"

    def units_per_step(self, world: World) -> int:
        """By how much the position moves when each rank is handed a batch."""
        return self.batch_size * self.sharing(world).world_size

    def sharing(self, world: World) -> World:
        """The processes that are given different data; all of them, but where a source gives some the same."""
        return world

    def twin(self) -> Adapter:
        """Another adapter of the same source, which shares no worker processes with this one."""
        return type(self)(self.source, self.options)

    def refresh(self) -> None:  # noqa: B027  # most adapters ask the source each time
        """Called between epochs: the place to see that the source has another length."""

    def prepare(self, seed: int, epoch: int) -> None:  # noqa: B027  # most adapters need nothing
        """Called before an epoch is opened: the place to build what its `size` depends on."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """What the positions mean, part by part, for the fingerprint: sources that differ are not exchangeable."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this source can promise, with reasons, as far as it is known now. Reads nothing of the source's data."""

    def drawing(self) -> tuple[object, ...]:
        """The objects whose code draws under random streams: a dataset, a collate function, stages of a pipeline."""
        return ()

    @property
    def promises(self) -> Capabilities:
        """`capabilities`, less what a generator prevents that cannot be seeded. Made again after `learned`."""
        if self._promises is None:
            self._promises = self.stated_promises
            if self._promises.exact_augmentations and self.options.streams:
                _, hopeless = find_generators(*self.drawing())
                if hopeless:
                    names = ", ".join(hopeless)
                    why = f"no stream can be set in these generators: {names}; use midepoch.sample_generator()"
                    self._promises = replace(self._promises, exact_augmentations=Capability(False, why))
        return self._promises

    @property
    def stated_promises(self) -> Capabilities:
        """`capabilities`, made once, and again after `learned`."""
        if self._stated is None:
            self._stated = self.capabilities()
        return self._stated

    def learned(self) -> None:
        """To be called when something has come to light that `capabilities` depends on."""
        self._stated = self._promises = None

    @property
    def elastic(self) -> bool:
        """A state may be loaded on another world size."""
        return self.stated_promises.elastic_world.holds

    @property
    def rank_independent(self) -> bool:
        """The state is the same on every rank. Otherwise each rank's `detail` is its own part."""
        return self.stated_promises.rank_independent.holds

    @property
    def can_seek(self) -> bool:
        """Whether `lead` knows the way to any place; otherwise only a state leads into an epoch."""
        return self.rank_independent

    @abstractmethod
    def open(self, run: Run) -> Session:
        """A session whose first batch is the one at ``run.position``. Costs nothing before its first `next`."""

    def beginning(self, epoch: int, world: World) -> str:
        """What a state carries that was saved before anything of its epoch was opened."""
        return ""

    def lead(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The detail of a place that iterating has not led to: after a seek, a break, or in a later epoch.

        Args:
            here: where the loader stands; its detail is empty unless `leads` is set.
            there: (epoch, position), on either side of `here`.
            seed, world: as a session that is opened there would have them.

        Raises:
            StateError: nothing leads there but a state.
        """
        return ""

    def part(self, detail: str, saved_world_size: int, world: World) -> str:
        """What this rank needs of a saved detail, where the state is not the same on every rank.

        Raises:
            StateError: the state does not hold it.
        """
        return part_of(detail, world.rank, world.world_size)

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Raise a StateError if a session could not be opened with this detail. Default: there must be none."""
        if detail:
            raise StateCorruptError(f"a state of {self.name} has no detail, this one has: use an undamaged state")

    def close(self) -> None:  # noqa: B027  # most adapters hold nothing
        """Let go of what outlives sessions, such as persistent worker processes."""
