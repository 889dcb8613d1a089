"""Sources with their own state. It is saved, checked and given to each rank like any other.

For sources whose state is known to be incomplete, the adapter adds what is missing, or leaves them to a replay.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import pickle
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset

from midepoch.adapters.stateful import private
from midepoch.adapters.stateful.session import ENDED, StatefulSession
from midepoch.errors import StateCorruptError, StateError, UnsupportedSourceError, warn
from midepoch.loader.adapter import Adapter, Facts, Options, Reach, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.order.keys import derive_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.driven import RAW
from midepoch.reading.private import end_when_collected
from midepoch.reading.workers import workers_outlive_signals
from midepoch.samplers import length_of
from midepoch.sharding import sharding_of
from midepoch.state.codec import decode, encode
from midepoch.state.format import PIECES
from midepoch.state.witness import summary_of
from midepoch.trying import Copied, copy_of, tried_on_copy
from midepoch.world import World

__all__ = ["NOT_RESTORED", "StatefulAdapter", "has_state", "is_of", "is_stream", "state_of"]


_MAY_REORDER = (
    "which may give the next epoch another order after a resume, or after an epoch that was left early: wrap that "
    "loader, or let its sampler's order follow from the epoch"
)
NOT_RESTORED = Capability(
    False, "the source's own state does not restore the global generators: draw in then=, whose numbers are restored"
)


class StatefulAdapter(Adapter):
    """Anything with ``__iter__``, ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader.

    The unit is a batch. The source shards itself, so its state is for this rank only.
    """

    name: ClassVar[str] = "stateful"
    facts = Facts("batch", remembers=False)
    reach = Reach.STATES  # `EPOCHS` where epochs follow from their number, and not from what was read before
    rewinds: bool = False  # iterating the source starts an epoch, whatever others have read from it
    how_to_divide: ClassVar[str] = "Give each rank its own part"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self.opening = Streams() if isinstance(source, DataLoader) and options.streams else None
        self.was_put_at_its_end = False  # by a state, and not read since
        self.stands_at = ""  # the state that it has reported at its end; empty once it is read again
        self._used = False
        self._read_epoch: int | None = None  # of the last session that has read
        self._first_state: Any = None  # of the very beginning; unknown until the source is first read
        self._copied: Copied | None = None  # as it was before it was read, until that is tried
        self._untried = "it is tried on a copy when an epoch is read from its beginning"
        self._tries = options.verify != "off" and options.streams and not private.has_workers(source)
        if options.verify == "off" or not options.streams:
            self._untried = ("verify='off'" if options.verify == "off" else "randomness='none'") + ": it is not tried"
        elif not self._tries:
            self._untried = "it is not tried, since a copy would start worker processes of its own"
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
        length = None if any(map(_has_other_epochs, self.told_epochs())) else length_of(self.source)
        return None if length is None else length * world.world_size

    def told_epochs(self) -> list[Any]:
        """The parts of the source whose ``set_epoch`` may change its length."""
        return [self.source] if self.is_of_unknown_kind else []

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
        """The source's package with its version, which need not be the same."""
        package = _package_of(self.source)
        return {f"{_PACKAGE}{PIECES}": package} if package else {}

    def capabilities(self) -> Capabilities:
        """What the source's own state can restore."""
        base = "as exact as the source's own state, which led a copy from an epoch's first batch to the next one"
        own = Capability(True, f"{base}; no other place is tried")
        if self._untried:
            base = f"as exact as the source's own state: {self._untried}"
            own = Capability(True, base, believed=True)
        held_by = self.source.dataset if isinstance(self.source, DataLoader) else self.source
        if private.holds_a_shuffling_loader(held_by):
            base = f"as exact as the StatefulDataLoader that it holds, {_MAY_REORDER}"
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

    def state_in(self, detail: str) -> Any:
        """The source's own state in a detail."""
        return decode(detail.removeprefix(ENDED))

    def open(self, run: Run) -> Session:
        """The source's own iterator, after its state is loaded."""
        if run.world.world_size > 1 and self.options.shard is None and self._read_epoch is None:
            self._tell_of_undivided(run.world)
        return StatefulSession(self, run)

    def _tell_of_undivided(self, world: World) -> None:
        if world.rank or self.divides:
            return
        warn(
            f"{world.world_size} ranks read this {type(self.source).__name__}, and midepoch does not divide what keeps "
            f"its own state: if the source does not divide its data by rank, each rank reads all of it. "
            f"{self.how_to_divide}; if it does, or all ranks are meant to read the same, pass shard=False",
        )

    @property
    def divides(self) -> bool:
        """Whether something in the source says that it divides its data among ranks."""
        found = (sharding_of(each, None) for each in (self.source, getattr(self.source, "dataset", None)))
        return any(each is not None and each.certain for each in found)

    def what_is_sent(self) -> Any:
        """The source as another process gets it."""
        return self.source

    def __getstate__(self) -> dict[str, Any]:
        source = self.what_is_sent()
        try:
            pickle.Pickler(_Nowhere()).dump(source)
        except Exception as error:
            raise UnsupportedSourceError(
                f"this {type(self.source).__name__} cannot be pickled, so its loader cannot be sent to another process "
                f"({type(error).__name__}: {error!s:.150}): make and wrap the source there, and load a state into it"
            ) from error
        return {**self.__dict__, "source": source, "_copied": None}

    def __copy__(self) -> Adapter:
        """Refused: two loaders over one source would move each other."""
        raise UnsupportedSourceError(
            f"{type(self.source).__name__} keeps its own state, which two loaders cannot share: make another source "
            "and wrap it, instead of copying this loader"
        )

    # --- trying the source's own state ---

    def begin(self, run: Run) -> None:
        """A session begins to read."""
        epoch, follows = run.epoch, 0 if self._read_epoch is None else self._read_epoch + 1
        follows_its_number = self.reach is not Reach.STATES or self._set_epoch is not None
        if epoch not in (0, self._read_epoch, follows) and not (run.detail or follows_its_number):
            warn(
                f"epoch {epoch} is the next pass of this {type(self.source).__name__}, whatever its number: it counts "
                "its passes itself, and has no set_epoch; load a state to go elsewhere",
            )
        if self._read_epoch is None and self._tries:
            self._copied = copy_of(self.what_is_sent())
            if self._copied.why:
                self._cannot_try(self._copied.why)
        self._read_epoch = epoch

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
            session = type(self)(copied.open(), dataclasses.replace(self.options, verify="off")).open(run)
            try:
                return session.take()
            except StopIteration:
                return "the end"
            finally:
                session.close()

        key = derive_key(Purpose.TRIAL, run.seed, run.epoch, run.position)
        found = tried_on_copy(copied, follow, key, first=summary_of(batch))
        if found.untried:
            self._cannot_try(found.untried)
            return
        self._untried = "" if not found.order else self._untried
        what = "order" if found.order else "random numbers"
        differs = (
            f"the state of this {type(self.source).__name__} does not restore its {what} (its state after batch 1 of "
            f"epoch {run.epoch} was tried on a copy, which gave another {found.differs})"
        )
        self.note(dataclasses.replace(found, differs=differs if found.differs else "", cure=self.instead(found.order)))

    def instead(self, order: bool) -> str:
        """What to write where the state restores another `order`, or other random numbers."""
        return (
            "wrap a function that makes what it reads, as in midepoch.wrap(lambda: make()), to have it read again from "
            "the start, or let the state cover all that it draws and holds back"
        )

    # --- what differs from one epoch to the next ---

    @property
    def _set_epoch(self) -> Callable[[int], Any] | None:
        """The ``set_epoch`` of what keeps the state, if nobody else calls that."""
        tell = getattr(self.keeper, "set_epoch", None) if self.is_of_unknown_kind else None
        return tell if callable(tell) else None

    def tell_the_epoch(self, epoch: int) -> None:
        """As a training loop does before each epoch. A state that is loaded then has the last word."""
        if self._set_epoch is not None:
            self._set_epoch(epoch)

    @property
    def keeper(self) -> Any:
        """What keeps the state."""
        return self.source

    @property
    def is_of_unknown_kind(self) -> bool:
        """Whether it is of no package that an adapter is written for."""
        return type(self) is StatefulAdapter

    # --- what differs between sources ---

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """The source's own iterator from `state` on; None starts the epoch."""
        first = not self._used and not self.rewinds
        self.tell_the_epoch(run.epoch)
        if state is None and self._used and run.epoch == 0 and not self.rewinds:
            state = self.very_beginning()
        if state is not None:
            self.restore(state)
        self._used = True
        with workers_outlive_signals(self.source):
            iterator: Iterator[Any] = iter(self.source)
        private.forget_end(iterator)
        if isinstance(self.source, DataLoader):
            end_when_collected(iterator)
        if first and state is None:
            self._first_state = state_of(self.source)
        return iterator

    def _state_of_a_copy(self) -> Any:
        """Of a source that was not read: a torchdata.nodes.Loader that is asked itself ignores what it loads later."""
        copied = self._copied or copy_of(self.what_is_sent())
        with Streams().under(derive_key(Purpose.TRIAL)):  # it may draw its order for it
            return None if copied.why else state_of(copied.open())

    def very_beginning(self) -> Any:
        """The state from which a source that was read begins again. A copy, since the source may keep and change it."""
        if self._first_state is None:
            raise StateError(
                f"{type(self.source).__name__} has no state for its very beginning, so it cannot go back there: load "
                "this state into a source that has not been read"
            )
        return copy.deepcopy(self._first_state)

    def restore(self, state: Any) -> None:
        """Load a state, and read nothing."""
        if not self._used and not self.rewinds:
            self._first_state = self._state_of_a_copy()
        self._used = True
        self.keeper.load_state_dict(state)

    def reading(self, run: Run, iterator: Iterator[Any]) -> Callable[[], Any]:
        """A function that returns the iterator's next batch."""
        return iterator.__next__

    def current(self, iterator: Iterator[Any]) -> Any:
        """The source's current state."""
        return self.source.state_dict()


def _has_other_epochs(part: Any) -> bool:
    return callable(getattr(part, "set_epoch", None)) and length_of(part) is not None


_PACKAGE = "package"
_PACKAGES = {
    "torchdata": "torchdata", "datasets": "datasets", "grain": "grain", "litdata": "litdata",
    "megatron.energon": "megatron-energon",
}  # fmt: skip


def _package_of(source: object) -> str:
    """The package that a source is of, with its version; empty if it is of none that is known."""
    for module, distribution in _PACKAGES.items():
        if is_of(module, source):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return f"{distribution} {importlib.metadata.version(distribution)}"
    return ""


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


def state_of(source: Any) -> Any:
    """A copy of a source's state; None if it has none now."""
    try:
        return decode(encode(source.state_dict()))
    except Exception:  # noqa: BLE001  # sources raise various errors here
        return None


def is_stream(dataset: Any) -> bool:
    """Whether it is only iterated."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def has_state(source: Any) -> bool:
    """Whether it keeps a state of its own."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def is_of(package: str, source: object) -> bool:
    """Whether its class, or a base of it, is of that package."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(source).__mro__)
