"""Sources with their own state. It is saved, checked and given to each rank like any other.

For sources whose state is known to be incomplete, the adapter adds what is missing, or leaves them to a replay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset

from midepoch.adapters.stateful import private
from midepoch.adapters.stateful.session import ENDED, Keyed, StatefulSession
from midepoch.errors import StateCorruptError, StateError, UnsupportedSourceError, warn
from midepoch.loader.adapter import Adapter, Facts, Options, Reach, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.order.keys import derive_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.exposed import RAW
from midepoch.reading.private import end_when_collected
from midepoch.reading.workers import workers_outlive_signals
from midepoch.samplers import length_of
from midepoch.sharding import sharding_of
from midepoch.state.codec import decode, encode
from midepoch.state.format import PIECES
from midepoch.state.witness import summary_of
from midepoch.trying import Copied, Finding, copy_of, tried_on_copy
from midepoch.world import World

__all__ = [
    "NOT_RESTORED", "NO_STREAMS", "OF_THE_BATCH", "StatefulAdapter", "has_state", "is_of", "is_stream", "state_of",
]  # fmt: skip

NOT_RESTORED = Capability(
    False, "the source's own state does not restore the global generators: draw in then=, whose numbers are restored"
)
OF_THE_BATCH = Capability(True, "numbers drawn while a batch is read are the batch's: exact on the same split")
NO_STREAMS = Capability(False, "randomness='none': nothing restores the generators that its code draws from")


class StatefulAdapter(Adapter):
    """Anything with ``__iter__``, ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader.

    The unit is a batch. The source shards itself, so its state is for this rank only.
    """

    name: ClassVar[str] = "stateful"
    facts = Facts("batch", remembers=False)
    reach = Reach.STATES  # `EPOCHS` where iterating the source begins an epoch, whatever was read before
    how_to_divide: ClassVar[str] = "Give each rank its own part"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self.opening = Streams() if isinstance(source, DataLoader) and options.streams else None
        self.streams: Streams | None = None  # of the code that makes a batch, if each has a stream of its own
        self.is_at = ""  # the state that it has reported at its end; empty once it is read again
        self._used = False
        self._read_epoch: int | None = None  # of the last session that has read
        self._first_state = ""  # of the very beginning, encoded; unknown until the source is first read
        self._copied: Copied | None = None  # as it was before it was read, until that is tried
        self._of_load: Finding | None = None  # what a load of this source's state has shown
        reasons = {
            "verify='off': it is not tried": options.verify == "off",
            "randomness='none': it is not tried": not options.streams,
            "it is not tried, since a copy would start worker processes of its own": private.has_workers(source),
        }
        self._never_tried = next((why for why, holds in reasons.items() if holds), "")
        self._untried = self._never_tried or "it is tried on a copy when an epoch is read from its beginning"
        if options.shard:
            raise UnsupportedSourceError(
                f"shard=True: {type(source).__name__} keeps its own state, which knows no ranks; shard the data that "
                "it reads, or wrap a plain loader"
            )

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Has the three methods, and is iterated for data. Modules and optimizers have them too."""
        if is_of("datasets", source):
            return False  # `DatasetsAdapter` takes it, or it is replayed
        methods = all(callable(getattr(source, name, None)) for name in ("__iter__", "state_dict", "load_state_dict"))
        # A subclass of StatefulIterable has midepoch's own methods.
        return methods and not hasattr(type(source), RAW)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Batches of all ranks in an epoch, if the source knows its own number, and that does not follow the epoch."""
        follows = any(length_of(part) is not None for part in self.told_epochs() if _is_told(part))
        length = None if follows else length_of(self.source)
        return None if length is None else length * world.world_size

    def describe(self) -> dict[str, str]:
        """The kind of source, since its state fits no other kind, and the settings a loader's state depends on."""
        described = {"source": f"{type(self.source).__module__}.{type(self.source).__qualname__}"}
        for name in ("batch_size", "drop_last", "num_workers"):
            value = getattr(self.source, name, None)
            if isinstance(value, int):
                described[name] = str(value)
        samples = length_of(getattr(self.source, "dataset", None))
        described |= self.described_package()
        return described if samples is None else {**described, "samples": str(samples)}

    def described_package(self) -> dict[str, str]:
        """The source's package with its version, which need not be the same; nothing if it is of none that is known."""
        for module, distribution in _PACKAGES.items():
            if is_of(module, self.source):
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    return {f"package{PIECES}": f"{distribution} {importlib.metadata.version(distribution)}"}
        return {}

    def capabilities(self) -> Capabilities:
        """What the source's own state can restore."""
        base = "as exact as the source's own state, which led a copy from an epoch's first batch to the next one"
        own = Capability(True, f"{base}; no other place is tried")
        if self._untried:
            base = f"as exact as the source's own state: {self._untried}"
            own = Capability(True, base, believed=True)
        # A trial, after the first batch, sees only what is drawn by then.
        drawn = Capability(True, f"{base}, if it restores all that later batches draw from", believed=True)
        return Capabilities(
            exact_order=own,
            exact_augmentations=NOT_RESTORED if isinstance(self.source, DataLoader) else drawn,
            constant_time_resume=Capability(True, "as fast as the source restores its own state"),
            elastic_world=Capability(False, "the source's own state is for one world size"),
            elastic_workers=Capability(False, "the source's own state decides; midepoch cannot see its workers"),
            rank_independent=Capability(False, "each rank's source knows only its part: use midepoch.gather(loader)"),
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check that the source's own state decodes. The source checks the rest when it loads it."""
        if detail:
            own = detail.removeprefix(ENDED)
            if own or own == detail:
                decode(own)
        elif position:
            raise StateCorruptError(
                f"the state stands at position {position} but lacks the source's own state: load a complete state"
            )
        elif (why := self.unreachable(Place(epoch, position))) and self._read_epoch != epoch - 1:
            raise StateError(f"{why}: load a state that was saved after a batch")

    def detail_at(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The source's own state at its end leads to the next epoch. No other one leads to a place not read."""
        ended = here.detail.startswith(ENDED) and there == (here.epoch + 1, 0)
        return here.detail.removeprefix(ENDED) if ended and self.reach is Reach.STATES else ""

    def open(self, run: Run) -> Session:
        """The source's own iterator, after its state is loaded."""
        ranks, first = run.world.world_size, self._read_epoch is None and run.world.rank == 0
        if first and ranks > 1 and self.options.shard is None and not self.divides:
            warn(
                f"{ranks} ranks read this {type(self.source).__name__}, and midepoch does not divide what keeps its "
                "own state: if the source does not divide its data by rank, each rank reads all of it. "
                f"{self.how_to_divide}; if it does, or all ranks are meant to read the same, pass shard=False",
            )
        return StatefulSession(self, run)

    @property
    def divides(self) -> bool:
        """Whether something in the source says that it divides its data among ranks."""
        found = (sharding_of(each, None) for each in (self.source, getattr(self.source, "dataset", None)))
        return any(each is not None and each.certain for each in found)

    def what_is_sent(self) -> Any:
        """The source as another process gets it."""
        return self.source

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": self.what_is_sent(), "_copied": None}

    # --- the epoch ---

    def begin(self, run: Run) -> None:
        """A session begins to read."""
        epoch, follows = run.epoch, 0 if self._read_epoch is None else self._read_epoch + 1
        is_told = self.reach is not Reach.STATES or any(map(_is_told, self.told_epochs()))
        if epoch not in (0, self._read_epoch, follows) and not (run.detail or is_told):
            warn(
                f"epoch {epoch} is the next pass of this {type(self.source).__name__}, whatever its number: it counts "
                "its passes itself, and has no set_epoch; load a state to go elsewhere",
            )
        if self._read_epoch is None and not self._never_tried:
            self._copied = copy_of(self.what_is_sent())
            if self._copied.why:
                self._cannot_try(self._copied.why)
        self._read_epoch = epoch

    def told_epochs(self) -> list[Any]:
        """What is the user's own in the source. Its length may follow the epoch, if it is told that."""
        return [self.source] if type(self) is StatefulAdapter else []

    def tell_the_epoch(self, epoch: int) -> None:
        """As a training loop does before each epoch."""
        for part in filter(_is_told, self.told_epochs()):
            part.set_epoch(epoch)

    # --- trying the source's own state ---

    def _cannot_try(self, why: str) -> None:
        self._copied, self._untried = None, f"it is not tried, since {why}"
        self.learned()

    def is_to_be_tried(self, run: Run) -> bool:
        """Whether the state of the first batch is tried, once a job: not within an epoch, which may take long."""
        return self._copied is not None and not run.position

    def try_state(self, run: Run, detail: str, batch: Any) -> None:
        """Lead a copy to the state after the first batch, and compare what follows with `batch`, which came next."""
        copied, self._copied = self._copied, None
        assert copied is not None
        run = dataclasses.replace(run, position=run.world.world_size, detail=detail)

        def follow(seeded: Any) -> Any:
            # Another copy than the one that is seeded: a new process finds the source's generators as they were made.
            clone = type(self)(copied.open(), dataclasses.replace(self.options, verify="off"))
            session = clone.open(run)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what it would say is noted below
                    return session.take()
            except StopIteration:
                return "the end"
            finally:
                self._of_load = clone._of_load
                session.close()

        key = derive_key(Purpose.TRIAL, run.seed, run.epoch, run.position)
        found = tried_on_copy(copied, follow, key, first=summary_of(batch))
        if found.untried:
            self._cannot_try(found.untried)
            return
        if self._of_load is not None:
            self.note(self._of_load)
        self._untried = "" if not found.order else self._untried
        what = "order" if found.order else "random numbers"
        differs = (
            f"the state of this {type(self.source).__name__} does not restore its {what} (its state after batch 1 of "
            f"epoch {run.epoch} was tried on a copy, which gave another {found.differs})"
        )
        self.note(dataclasses.replace(found, differs=differs if found.differs else "", cure=self.cure))

    @property
    def cure(self) -> str:
        """What to write where the state restores another order, or other random numbers."""
        return (
            "wrap a function that makes what it reads, as in midepoch.wrap(lambda: make()), to have it read again from "
            "the start, or let the state cover all that it draws and holds back"
        )

    # --- what differs between sources ---

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """The source's own iterator from `state` on; None starts the epoch."""
        goes_on = self.reach is Reach.STATES
        first = goes_on and not self._used
        if goes_on and self._used and state is None and run.epoch == 0:
            state = self.very_beginning()
        self._used = True
        if state is not None:
            if first:
                self._first_state = self._state_of_a_copy()
            self.load(self.source, state, self.opening)
        with workers_outlive_signals(self.source):
            iterator: Iterator[Any] = iter(self.source)
        if isinstance(self.source, DataLoader):
            end_when_collected(iterator)
        if first and state is None:
            self._first_state = state_of(self.source)
        return iterator

    def load(self, keeper: Any, state: Any, streams: Streams | None) -> None:
        """Load what `keeper` has saved, and note if that draws. `streams` have begun, and are at the place's stream."""

        def call() -> None:
            keeper.load_state_dict(state)

        if streams is None:
            call()
        elif streams.drawn_by(call):
            self._of_load = Finding.of_load(keeper)
            self.note(self._of_load)

    def _state_of_a_copy(self) -> str:
        """Of a source that was not read: one that is asked itself may ignore what it loads later."""
        copied = self._copied or copy_of(self.what_is_sent())
        with Streams().under(derive_key(Purpose.TRIAL)):  # it may draw its order for it
            return "" if copied.why else state_of(copied.open())

    def very_beginning(self) -> Any:
        """The state from which a source that was read begins again."""
        if not self._first_state:
            raise StateError(
                f"{type(self.source).__name__} has no state for its very beginning, so it cannot go back there: load "
                "this state into a source that has not been read"
            )
        return decode(self._first_state)

    def reading(self, run: Run, iterator: Iterator[Any]) -> Callable[[], Any]:
        """A function that returns the iterator's next batch, each under its stream if they have any."""
        advance = iterator.__next__
        return advance if self.streams is None else Keyed(self.streams, run, advance)

    def current(self, iterator: Iterator[Any]) -> Any:
        """The source's current state."""
        return self.source.state_dict()


def _is_told(part: Any) -> bool:
    return callable(getattr(part, "set_epoch", None))


_PACKAGES = {
    "torchdata": "torchdata", "datasets": "datasets", "grain": "grain", "litdata": "litdata",
    "megatron.energon": "megatron-energon",
}  # fmt: skip


def state_of(source: Any) -> str:
    """A source's state, encoded; empty if it has none now."""
    try:
        return encode(source.state_dict())
    except Exception:  # noqa: BLE001  # sources raise various errors here
        return ""


def is_stream(dataset: Any) -> bool:
    """Whether it is only iterated."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def has_state(source: Any) -> bool:
    """Whether it keeps a state of its own."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def is_of(package: str, source: object) -> bool:
    """Whether its class, or a base of it, is of that package."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(source).__mro__)
