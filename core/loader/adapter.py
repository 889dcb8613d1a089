"""The base class of adapters: the one class to write for a new backend.

An adapter holds only what its backend knows: the size, the batch size, the fingerprint, the capabilities, and how to
open a session at a place. The rules of iteration (the end of an epoch, loading, peeking, refusing) are in
`progress.py`.
"""

from __future__ import annotations

import enum
import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NoReturn, Protocol, final

from ..errors import StateCorruptError, StateMismatchError, warn
from ..order import MAXIMUM_SIZE, Order
from ..order.holes import NO_HOLES, Holes
from ..randomness.owned import find_generators
from ..state.format import State
from ..state.parts import part_of
from ..state.witness import SampleSummary, Witness
from ..trying import Finding
from ..world import MicroShare, Share, Tail, World
from .capabilities import Capabilities, Capability, with_findings, with_then
from .options import MOST_IN_FLIGHT, Options
from .place import Place

__all__ = [
    "MOST_IN_FLIGHT", "Adapter", "Around", "Facts", "Options", "Reach", "Run", "Samples", "Session", "Why",
    "WitnessReport",
]  # fmt: skip

_NOT_WHOLE = Capability(False, "then= and inside= work on whole batches, each of which is keyed by its position")

@dataclass(frozen=True)
class Facts:
    """What is fixed about a source, or stated by it."""

    unit: Literal["sample", "batch", "step"] = "sample"  # what positions count; a "step" is one of all ranks
    batch_size: int = 1  # units in one batch of one rank; 1 if the unit is a batch
    drop_last: bool = False  # the source leaves out a last batch that is not full
    tail: Tail | None = None  # as the source itself states it, in a DistributedSampler
    seed: int | None = None  # likewise, in a generator
    seed_is_shared: bool = True  # False if each process's source may have drawn its own: several ranks must state one
    world: World | None = None  # as the source itself states it, in a DistributedSampler
    copies: int = 1  # how many ranks, one after the other, get the same data
    remembers: bool = True  # a session still knows its detail of earlier batches
    reads_any_span: bool = False  # sessions follow `Share.span` step by step, as ``global_batch=`` asks
    # What an undisturbed epoch may have in another way than the source by itself, for the law `transparent`: the
    # "order" of its samples if that is drawn; the "tail", where batches that are not full lie; the "ranks" that get a
    # sample; the "traces" that its package leaves in it. None: it cannot be read by itself.
    departs: frozenset[str] | None = frozenset({"order"})
    order: Order | None = None  # of positions, for a source that cannot skip; None if it can, or has no such order
    # Of an epoch in a world, as the source's own len() says it, which trainers count by. None, or if it returns that:
    # as many as there are.
    stated_size: Callable[[int, World], int | None] | None = None


class Reach(enum.Enum):
    """Where a session can be opened that no state was saved at."""

    ANYWHERE = "at any place"
    EPOCHS = "at the beginning of any epoch"
    STATES = "nowhere: only reading, or a state, leads to a place"


@dataclass(frozen=True)
class WitnessReport:
    """What a reader saw of the samples that a run asked to look at."""

    index: Any  # of the first sample of the epoch; None if no single sample was looked at
    look: SampleSummary | None  # what this sample looked like when it was first read; None if it could not be read
    again: SampleSummary | None = None  # the same, after the first batch; None if not asked for
    expected: SampleSummary | None = None  # the sample of the run's `expects`; None if it could not be read
    error: str = ""  # why a sample could not be read; empty if it was read
    missing: bool = False  # the source has no such sample
    # What was looked at, for messages; empty for the first sample of an epoch, which its index names. Without an index,
    # it is the same in every epoch.
    what: str = ""
    collate: Finding | None = None  # of calling the collate function again; None if that was not to be tried
    keeps: bool = False  # the sample drew random numbers when it was first read, and none when it was read again


@dataclass(frozen=True)
class Run:
    """Where a session starts, for whom, and under which seed."""

    epoch: int
    position: int
    seed: int
    world: World  # this process among those that share the data
    share: Share | None  # this rank's batches in the rest of the epoch; None if the epoch's length is unknown
    tail: Tail  # what to do with the last samples, for sources of unknown length
    detail: str  # of a state at this place
    looks: int = 0  # at the first sample of the epoch; 2: compare two; 3: and call the collate function twice
    expects: Witness | None = None  # of a loaded state, to be compared
    # Whoever looks adds what it saw, before the first batch is handed out.
    reports: list[WitnessReport] = field(default_factory=list, compare=False)
    holes: Holes = NO_HOLES  # what is left out; the share is then one of places (`midepoch.order.holes`)
    skipped: Holes = NO_HOLES  # what no padding repeats: the holes but for what is finished
    # A random number, different for each session in any process. Readers tell sessions apart by it.
    session: int = field(default_factory=functools.partial(random.SystemRandom().getrandbits, 62))

    @property
    def start(self) -> int:
        """The place of the first batch."""
        return self.holes.place_of(self.position) if self.holes.total else self.position


class Samples(Protocol):
    """The samples of one epoch, each to be looked at alone, in any order."""

    units: int  # in the epoch: samples, or batches
    listed: str  # the CRC of the epoch's list; empty if the order is computed

    def indices(self, unit: int) -> list[Any]:
        """The indices of the samples in a unit."""

    def look(self, unit: int, place: int) -> SampleSummary | None:
        """What the sample at this place of a unit looks like; None if it could not be read."""


class Session:
    """This rank's batches from one place on. After an error it is closed and not used again."""

    # Returns the next batch; raises StopIteration at the end, each time it is called. It may be an attribute that holds
    # an iterator's own ``__next__``: every batch passes here.
    take: Callable[[], Any]
    # Returns a snapshot of the current position, in any form that `detail` accepts; raises StateError if the source
    # cannot say. None where `detail` is constant or computed. If `Facts.remembers`, it is called before each batch.
    bookmark: Callable[[], Any] | None = None
    # To the position that follows from the number of batches, of sessions with a `bookmark`: positive after steps that
    # had no batch, negative after a short last global batch.
    position_correction: int = 0
    varies: bool = False  # only reading tells how many batches there are, even where the source has a length

    def detail(self, bookmark: Any) -> str:
        """The adapter's own part of a state at `bookmark`, which is None at the session's beginning.

        May be called after `close`.

        Raises:
            StateError: it is not known.
        """
        return ""

    def next_epoch_detail(self) -> str:
        """The detail with which the next epoch begins. Called after the last batch of this epoch."""
        return ""

    def close(self) -> None:
        """Release threads, processes and files, and whatever `detail` does not need. May be called twice."""


class Around(Protocol):
    """An object around the source, as declared by ``inside=``: it passes the source's batches on."""

    source: Any  # the object

    def session(self, inner: Session, run: Run, adapter: Adapter) -> Session:
        """A session of the object's batches. `inner`: of `adapter`, opened for `run`."""

    def drawing(self) -> tuple[object, ...]:
        """As `Adapter.drawing`, but for the source."""

    def promises(self, inner: Capabilities) -> Capabilities:
        """Those of the source, in the object's name."""


Why = Literal["opened", "moved", "measured"]
"""Why an adapter is to prepare for a place."""


class Adapter(ABC):
    """One source of one backend."""

    name: ClassVar[str]  # appears in states and messages: never change it once states have it
    facts: Facts = Facts()  # they may change between epochs
    reach: Reach = Reach.ANYWHERE
    _changes = 0  # of all adapters: what a combination promises follows from its parts

    def __init__(self, source: Any, options: Options) -> None:
        self.source = source
        self.options = options
        self.changes = 0  # how often it has learned something
        self.around: Around | None = None  # what passes the source's batches on; set by `wrap`
        self._findings: list[Finding] = []
        self._stated: Capabilities | None = None
        self._promises: Capabilities | None = None
        self._known_at = 0

    # --- what each adapter says ---

    @classmethod
    @abstractmethod
    def recognises(cls, source: object) -> bool:
        """Whether `source` is of this backend. Must not change or iterate it."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Named properties that define what a position means. They form the fingerprint.

        A state with another fingerprint is refused.
        """

    @abstractmethod
    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Units in one epoch of all ranks together; None if unknown.

        `detail` is that of the state that is being opened or loaded, for sources whose size depends on it.
        """

    @abstractmethod
    def open(self, run: Run) -> Session:
        """A session whose first batch is the one at ``run.position``. Expensive work waits for its first `take`."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this source can promise, with reasons, as far as is known now. Reads no data of the source."""

    # --- what some say besides ---

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter | None:
        """The adapter for a recognised source; None leaves the source to a less specific adapter."""
        return cls(source, options)

    def drawing(self) -> tuple[object, ...]:
        """The objects whose code uses random numbers: a dataset, a collate function, the stages of a pipeline."""
        return ()

    def share(self, seed: int, epoch: int, position: int, world: World, detail: str) -> Share | None:
        """This rank's batches from a position on; None if the epoch's length is unknown."""
        size = self.size(seed, epoch, world, detail)
        return None if size is None else self._share_of(size, position, world)

    def prepare(self, place: Place, seed: int, why: Why) -> None:  # noqa: B027  # most adapters need nothing
        """The place to follow what the training loop has changed, and to build what the epoch's `size` depends on.

        Args:
            place: (epoch, position) and the detail, as far as it is known.
            seed: of the epoch's order.
            why: "opened": a session is about to be opened there. "moved": a load or a seek has led the loader there.
                "measured": a state is built or checked; the source is left as it is, and so is an epoch that is read.
        """

    def detail_at(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The detail of a place that no session has reached: after a `seek` or a ``break``, or in a later epoch.

        Called again right before a session is opened at an epoch's beginning, if that place has no detail.

        Args:
            here: the loader's place. Its detail is empty if only an expensive bookmark could say it, and `Unknown` if
                the source cannot.
            there: (epoch, position), before or after `here`, or the same.
            seed: that of a session opened there.
            world: likewise.

        Raises:
            StateError: only a state of the source can reach that place.
        """
        return ""

    def rank_part(self, detail: str, saved_world_size: int, world: World) -> str:
        """This rank's part of a saved detail. Called only if the state is not the same on every rank.

        Raises:
            StateError: the state does not have it, or was saved in another world.
        """
        if saved_world_size != world.world_size:
            self.refuse_world(saved_world_size, world)
        return part_of(detail, world.rank, world.world_size)

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Raise a StateError if no session can be opened with this detail. By default it must be empty."""
        if detail:
            raise StateCorruptError(f"a state of {self.name} has no detail, but this one does: use an undamaged state")

    def samples(self, seed: int, epoch: int) -> Samples | None:
        """The samples of an epoch, for trials that a job cannot afford; None if they cannot be read one by one."""
        return None

    def close(self) -> None:  # noqa: B027  # most adapters hold nothing
        """Release what outlives sessions, such as persistent worker processes."""

    def parts(self, state: State | None = None) -> list[tuple[Any, State | None]]:
        """For a combination, the `Part` of each loader, and its state in a `state` of any rank, which is checked."""
        return []

    # --- what follows, for all of them ---

    def _share_of(self, size: int, position: int, world: World) -> Share:
        start, facts, together = min(position, size), self.facts, self.options.global_batch
        world = world if facts.copies == 1 else self.sharing(world)
        if together is None:
            return Share(size, start, facts.batch_size, world, self.tail_in_use, facts.drop_last)
        return MicroShare(size, start, facts.batch_size, world, "uneven", facts.drop_last, together)

    @final
    def share_of(self, run: Run) -> Share:
        """A session's batches, in places (`midepoch.order.holes`), also where the order has no end."""
        return self._share_of(MAXIMUM_SIZE, run.start, run.world) if run.share is None else run.share

    @final
    @property
    def tail_in_use(self) -> Tail:
        """What to do with the last samples: as passed to `wrap`, otherwise as the source does it, otherwise "pad".

        Global batches of several steps are always shared as they are.
        """
        if self.options.global_batch is not None:
            return "uneven"
        return self.options.tail or self.facts.tail or "pad"

    @final
    def units_per_step(self, world: World) -> int:
        """Units by which the position moves when each rank receives a batch: with ``global_batch=``, all of one."""
        if self.options.global_batch is not None:
            return self.options.global_batch
        return 1 if self.facts.unit == "step" else self.facts.batch_size * self.sharing(world).world_size

    @final
    def sharing(self, world: World) -> World:
        """The processes that receive different data."""
        copies = self.facts.copies
        return world if copies == 1 else World(world.rank // copies, world.world_size // copies)

    @final
    @property
    def stated_promises(self) -> Capabilities:
        """`capabilities`, cached until `learned`."""
        if self._stated is None or self._known_at != Adapter._changes:
            self._known_at, self._promises = Adapter._changes, None
            self._stated = self.capabilities()
        return self._stated

    @final
    @property
    def promises(self) -> Capabilities:
        """`capabilities`, less what reading has shown to be wrong and generators that cannot be seeded.

        Cached until `learned`.
        """
        promises, then, around = self.stated_promises, self.options.then, self.around
        if self._promises is not None:
            return self._promises
        drawing = [*self.drawing()]
        if around is not None:
            promises = replace(around.promises(promises), skips=_NOT_WHOLE)
            drawing += around.drawing()
        if then is not None:
            exact = with_then(promises.exact_augmentations, self.options.streams)
            promises = replace(promises, exact_augmentations=exact, skips=_NOT_WHOLE)
            drawing.append(then)
        if promises.exact_augmentations and self.options.streams:
            _, hopeless = find_generators(*drawing)
            if hopeless:
                why = f"these generators cannot be seeded: {', '.join(hopeless)}; use midepoch.sample_generator()"
                promises = replace(promises, exact_augmentations=Capability(False, why))
        self._promises = with_findings(promises, self._findings)
        return self._promises

    @final
    def note(self, finding: Finding) -> None:
        """Take over what a trial, or reading, has shown of the source, and warn of what breaks a promise."""
        if finding not in self._findings:
            self._findings.append(finding)
        if finding.differs and finding.cure:
            warn(
                f"{finding.differs}, so a resumed run gets other data: {finding.cure}. loader.capabilities says what "
                "still holds"
            )
        self.learned()

    @final
    def learned(self) -> None:
        """Call it when a fact that `capabilities` or `describe` depends on has changed or become known."""
        self.changes += 1
        Adapter._changes += 1

    @final
    @property
    def elastic(self) -> bool:
        """Whether a state may be loaded on another world size."""
        return self.stated_promises.elastic_world.holds

    @final
    @property
    def rank_independent(self) -> bool:
        """Whether the state is the same on every rank. If not, each rank's `detail` is its own part."""
        return self.stated_promises.rank_independent.holds

    @final
    @property
    def jumps(self) -> bool:
        """Whether a session can be opened anywhere in an epoch without reading what is before."""
        return self.reach is Reach.ANYWHERE and self.stated_promises.constant_time_resume.holds

    @final
    def refuse_world(self, saved_world_size: int, world: World, cure: str = "") -> NoReturn:
        """Say that the source cannot continue in a world of another size. `cure`: what else can be done."""
        raise StateMismatchError(
            f"the world size differs: the state was saved with {saved_world_size}, this loader has {world.world_size}; "
            f"run on {saved_world_size} processes ({self.promises.elastic_world.reason}){cure}"
        )

    @final
    def unreachable(self, place: Place) -> str:
        """Why no state leads to a place where this loader is; empty if one does."""
        if self.facts.remembers or self.reach is not Reach.STATES or place.position or place.detail or not place.epoch:
            return ""
        return (
            f"the state is of the beginning of epoch {place.epoch}, before its first batch, and epoch "
            f"{place.epoch - 1} was not read to its end: {type(self.source).__name__} gets there by reading on, in the "
            "same process, and by no state"
        )
