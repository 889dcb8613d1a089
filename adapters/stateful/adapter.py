"""Sources with their own state. It is saved, checked and given to each rank like any other.

For sources whose state is known to be incomplete, the adapter adds what is missing, or leaves them to a replay.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import importlib.metadata
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset

from midepoch.adapters.stateful import private
from midepoch.adapters.stateful.session import ENDED, StatefulSession
from midepoch.adapters.stateful.trial import Loaded, Report, read_from
from midepoch.copying import stateful_copy
from midepoch.dividing import division_of
from midepoch.errors import StateCorruptError, StateError, UnsupportedSourceError, warn
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.order.keys import derive_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.driven import RAW
from midepoch.reading.private import end_when_collected
from midepoch.reading.trials import Outcome, compare
from midepoch.reading.workers import workers_outlive_signals
from midepoch.samplers import length_of
from midepoch.state.codec import decode, encode
from midepoch.state.format import PIECES, piece_of
from midepoch.state.witness import look_at
from midepoch.trying import Finding
from midepoch.world import World

__all__ = ["NOT_RESTORED", "StatefulAdapter", "has_state", "is_of", "is_stream", "state_of"]


_TRIALS = 2  # in two epochs, since a source may count its passes and not say so in its state
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
    unit = "batch"
    seals_detail = True
    remembers = False
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
        self._pristine: Any = None  # a copy of the source as it was before it was read
        self._measured: Any = None  # a copy whose length is asked, where that may follow from the epoch
        self._begun = False  # a session has begun to read
        self._opened = False
        self._tried_in: list[int] = []  # epochs
        self.report: Report | None = None  # of the latest load, if the source reports another state since
        self.is_doubted = False  # what follows the latest load shows whether it was applied
        self._copies_report = False  # another state than they load
        self._excuse: Report | None = None  # that of a copy which has read on rightly
        self._after_first = ""  # the state of a copy after its first batch
        self.saved_with = ""  # another version of the source's package, of the state that was checked last
        self._untried = "it is tried on a copy when an epoch is read from its beginning"
        if options.verify == "off" or not options.streams:
            self._untried = "verify='off'" if options.verify == "off" else "randomness='none'"
            self._untried += ": it is not tried"
        elif private.has_workers(source):
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
        """Batches of all ranks in an epoch, if the source knows its own number."""
        length = length_of(self.source)
        if length is not None and any(_calls_of(self.measures(self.source))):
            length = self._length_in(epoch, length)
        return None if length is None else length * world.world_size

    def measures(self, source: Any) -> list[Any]:
        """The parts of `source`, this one or a copy of it, whose ``set_epoch`` may change its length."""
        return [source] if self.is_of_unknown_kind else []

    def _length_in(self, epoch: int, now: int) -> int:
        """That of a copy that is told the epoch, since the source may be in another one. `now`: the source's own."""
        if self._measured is None:
            self._measured = self._copied_to_measure()
        if self._measured is None:
            return now
        for tell in _calls_of(self.measures(self._measured)):
            tell(epoch)
        length = length_of(self._measured)
        return now if length is None else length

    def _copied_to_measure(self) -> Any:
        source = private.without_iterator(self.source) if isinstance(self.source, DataLoader) else self.source
        return self._copied(source)[0]

    def refresh(self) -> None:
        """The user may still change what an epoch's length comes from."""
        if self._measured is not None:
            anew = self._copied_to_measure()
            self._measured = self._measured if anew is None else anew

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

    def note_saved_with(self, fingerprint: str) -> None:
        """Say it where the source's package is of another version than the one that has made its state."""
        saved, here = piece_of(fingerprint, _PACKAGE), _package_of(self.source)
        self.saved_with = f"{saved!r:.80}, and {here!r} is installed" if saved and here and saved != here else ""
        if self.saved_with:
            warn(
                f"the state of this {type(self.source).__name__} was saved with {self.saved_with}: another version may "
                "read it differently; install that version, or compare the first batches",
            )

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
        elif (why := self.unreachable(epoch, position, detail)) and self._read_epoch != epoch - 1:
            raise StateError(f"{why}: load a state that was saved after a batch")

    def lead(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The source's own state at its end leads to the next epoch. No other one leads to a place not read."""
        ended = here.detail.startswith(ENDED) and there == (here.epoch + 1, 0)
        return here.detail.removeprefix(ENDED) if ended and not self.begins_anew else ""

    def unreachable(self, epoch: int, position: int, detail: str) -> str:
        """Why nothing leads to the beginning of an epoch that follows one left early."""
        if not epoch or position or detail or self.begins_anew:
            return ""
        return (
            f"the state is of the beginning of epoch {epoch}, before its first batch, and epoch {epoch - 1} was not "
            f"read to its end: {type(self.source).__name__} gets there by reading on, in the same process, and by no "
            "state"
        )

    @property
    def begins_anew(self) -> bool:
        """Whether its epochs follow from their number, and not from what was read before."""
        return self.rewinds

    def state_in(self, detail: str) -> Any:
        """The source's own state in a detail."""
        return decode(detail.removeprefix(ENDED))

    def open(self, run: Run) -> Session:
        """The source's own iterator, after its state is loaded."""
        if run.world.world_size > 1 and self.options.shard is None and not self._opened:
            self._tell_of_undivided(run.world)
        self._opened = True
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
        found = (division_of(each, None) for each in (self.source, getattr(self.source, "dataset", None)))
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
        return {**self.__dict__, "source": source}

    def twin(self) -> Adapter:
        """Refused: two loaders over one source would move each other."""
        raise UnsupportedSourceError(
            f"{type(self.source).__name__} keeps its own state, which two loaders cannot share: make another source "
            "and wrap it, instead of copying this loader"
        )

    # --- trying the source's own state ---

    @property
    def _tries(self) -> bool:
        return self.options.verify != "off" and self.options.streams and not private.has_workers(self.source)

    def begin(self, run: Run) -> None:
        """A session begins to read."""
        epoch, follows = run.epoch, 0 if self._read_epoch is None else self._read_epoch + 1
        if epoch not in (0, self._read_epoch, follows) and not (run.detail or self.begins_anew or self._set_epoch):
            warn(
                f"epoch {epoch} is the next pass of this {type(self.source).__name__}, whatever its number: it counts "
                "its passes itself, and has no set_epoch; load a state to go elsewhere",
            )
        self._read_epoch = epoch
        if not self._begun:
            self._begun = True
            self.before_first_read()

    def before_first_read(self) -> None:
        """Copy the source while it is as another process would make it."""
        if not self._tries:
            return
        self._pristine, why = self._copied(self.source)
        if self._pristine is None:
            self._cannot_try(f"it is not tried, since {why}")

    def _copied(self, source: Any) -> tuple[Any, str]:
        return stateful_copy(source, private.shared_kinds())

    def _cannot_try(self, why: str) -> None:
        self._pristine, self._untried = None, why
        self.learned()

    def trial(self, run: Run) -> Callable[[str, int], Outcome | None] | None:
        """What gives the batch to which the source's state leads a copy; None if nothing is to be tried in this run.

        A session that begins within an epoch is not tried: a source may read all that was consumed to get there.
        """
        done = self._pristine is None or len(self._tried_in) >= _TRIALS
        if done or run.position or run.epoch in self._tried_in:
            return None
        return lambda detail, batches: self._attempt(run, detail, batches)

    def _attempt(self, run: Run, detail: str, batches: int) -> Outcome | None:
        """The copy's batch. None if the copy, and not the state, is at fault."""
        self._tried_in.append(run.epoch)
        threads = threading.active_count()
        position = run.position + batches * run.world.world_size
        outcome: Outcome | None = self._read_copy(dataclasses.replace(run, position=position, detail=detail))
        if outcome and outcome.error is not None and not outcome.ended:
            fresh = self._read_copy(dataclasses.replace(run, epoch=0, position=0, detail=""))
            if fresh is None or fresh.error is not None:
                outcome = None
        if outcome is None:
            self._cannot_try("it is not tried, since a copy of it cannot be read")
        elif len(self._tried_in) == _TRIALS:
            self._end_trials()
        if threading.active_count() > threads:
            gc.collect()  # ends those of the copy
        return outcome

    def _end_trials(self) -> None:
        self._tried_in = [-1] * _TRIALS
        if not self._copies_report:  # they are asked again when the source does
            self._pristine = None

    def _read_copy(self, run: Run) -> Outcome | None:
        return self._ask_copy(lambda adapter, run: adapter.open(run), run)

    def _ask_copy(self, ask: Callable[[StatefulAdapter, Run], Session], run: Run) -> Outcome | None:
        """What a session over a copy gives. `ask` opens it. None if there is no copy."""
        copy = None if self._pristine is None else self._copied(self._pristine)[0]
        if copy is None:
            return None
        adapter = type(self)(copy, dataclasses.replace(self.options, verify="off"))
        outcome = read_from(lambda run: ask(adapter, run), self._pristine, copy, run)
        self._copies_report = self._copies_report or adapter.report is not None
        return outcome

    def conclude(self, outcome: Outcome, batch: Any, run: Run, batches: int) -> None:
        """Compare the copy's batch with the source's own, and say what follows."""
        finding = compare(outcome, look_at(batch))
        if finding.unseen:
            self.note(Finding(unseen=finding.unseen))
        if not finding.order:
            self._untried = ""
            self.learned()
        if not finding.differs:
            return
        self._end_trials()
        if finding.order:
            self._pristine = None
        what = "order" if finding.order else "random numbers"
        why = f"its state after batch {batches} of epoch {run.epoch} was tried on a copy: {finding.differs}"
        self._tell(why, finding.order, f"does not restore its {what}")

    def instead(self, order: bool) -> str:
        """What to write where the state restores another `order`, or other random numbers."""
        return (
            "wrap a function that makes what it reads, as in midepoch.wrap(lambda: make()), to have it read again from "
            "the start, or let the state cover all that it draws and holds back"
        )

    def _tell(self, why: str, order: bool, what: str) -> None:
        broken = f"the state of this {type(self.source).__name__} {what} ({why})"
        self.note(Finding(broken, order, self.instead(order)))

    # --- what differs from one epoch to the next, and from one load to another ---

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
        """Whether nobody has tried how such a source reports what it has loaded."""
        return type(self) is StatefulAdapter

    def load(self, state: Any, before: Any) -> Loaded | None:
        """Load a state. `before`: what a source that was not read reports; None if it cannot say."""
        keeper = self.keeper
        used, self._used = self._used, True
        if not self.is_of_unknown_kind:
            keeper.load_state_dict(state)
            return None
        loaded = decode(encode(state))  # the source may keep what it is given, and change it
        before = state_of(keeper) if used else before
        keeper.load_state_dict(state)
        return Loaded(loaded, before, Report.of(loaded, before, state_of(keeper)))

    def compare_report(self, loaded: Loaded | None, state: Any) -> None:
        """Compare what the source reports with what was loaded, now that it has begun to read.

        Args:
            loaded: the keeper's state.
            state: all of it, as `start` was given it.

        Raises:
            StateError: it reports another state, and no copy of it has shown that it stands at the loaded place.
        """
        self.report, self.is_doubted = None, False
        if loaded is None or loaded.report is None:
            return
        self.report = loaded.report
        reports = state_of(self.keeper)
        now = Report.of(loaded.state, loaded.before, reports)
        if now is None:
            return
        self.report = self.report.merged(now)
        if self.options.verify == "off":
            return
        if self._is_excused(now, state):
            self.is_doubted = True
            return
        if reports is None and self._pristine is None:
            return  # it says nothing, and nothing can be tried
        name = type(self.keeper).__name__
        untried = ""
        if self._pristine is None and not self._tried_in:
            untried = f" Whether that matters could not be seen in a copy ({self._untried})."
        raise StateError(
            f"{name} reports another state than was loaded: {now.words}, so it may stand at another place."
            f"{untried} Let state_dict() return what load_state_dict() was given, or leave out what does not belong to "
            "the place, such as a count of resumes; verify='off' takes the source at its word"
        )

    def _is_excused(self, now: Report, state: Any) -> bool:
        """Whether a copy reports as the source does `now`, and reads on rightly: from its beginning, or from `state`.

        Some sources report otherwise only where another epoch than the first one has been loaded.
        """
        if self._excuse is not None and now.is_excused_by(self._excuse):
            return True
        for epoch, begins_at in ((0, None), (self._read_epoch or 0, state)):
            excuse = self._read_behind_a_load(Run(epoch, 0, 0, World(), None, "pad", ""), begins_at)
            if excuse is not None and now.is_excused_by(excuse):
                self._excuse = excuse
                return True
        return False

    def _read_behind_a_load(self, run: Run, state: Any) -> Report | None:
        """How a copy reports what it loads: `state`, and the one after the first batch from there.

        None if nothing can be tried, as with less than two batches left, or the copy reads on wrongly.
        """
        read = self._ask_copy(lambda adapter, run: _Twice(adapter, run, state), run)
        if read is None or read.error is not None:
            return None
        own, reports, behind, expected = read.batch
        if state is None:
            self._after_first = reports
        given = self._ask_copy(lambda adapter, run: _Behind(adapter, run, behind), dataclasses.replace(run, position=1))
        if given is None or given.error is not None:
            return None
        report, batch = given.batch
        return None if compare(Outcome(batch), look_at(expected)).order else own.merged(report)

    def check_begun(self) -> None:
        """Raise a StateError if the source stands, after its first batch, where it would after its very first one.

        A source that reports another state than it was given may apply that when it is read.
        """
        if self._after_first and encode(state_of(self.keeper)) == self._after_first:
            raise StateError(
                f"{type(self.keeper).__name__} reports another state than was loaded, that of its very beginning: its "
                "load_state_dict does not lead to the loaded place; fix it, or wrap a function that makes what the "
                "source reads"
            )

    def tell_of_its_end(self, run: Run, iterator: Iterator[Any], batches: int, detail: str) -> None:
        """Say it where a state saved after the last batch does not show that nothing is left, now that this is known.

        No copy tries it: a source may read all of an epoch to get to its end.
        """
        if not self.is_of_unknown_kind or self.shows_its_end(decode(detail)):
            return
        try:
            moved = encode(self.current(iterator)) != detail
        except Exception:  # noqa: BLE001  # of the source's code; whoever asks for the state will be told
            return
        if not moved:
            warn(
                f"a state was saved after batch {batches - 1} of epoch {run.epoch}, the last one, and "
                f"{type(self.keeper).__name__} reports the same state at its end: if it begins anew from that, a run "
                f"resumed there reads its next pass as the rest of epoch {run.epoch}. Give it a __len__, which says "
                "where it ends, or load another state",
            )

    def shows_its_end(self, state: Any) -> bool:
        """Whether a state says that nothing is left of its pass."""
        return False

    # --- what differs between sources ---

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """The source's own iterator from `state` on; None starts the epoch."""
        first = not self._used and not self.rewinds
        self.tell_the_epoch(run.epoch)
        if state is None and self._used and run.epoch == 0 and not self.rewinds:
            state = self.very_beginning()
        loaded = None if state is None else self._load(state, first)
        self._used = True
        with workers_outlive_signals(self.source):
            iterator: Iterator[Any] = iter(self.source)
        self.compare_report(loaded, state)
        private.forget_end(iterator)
        if isinstance(self.source, DataLoader):
            end_when_collected(iterator)
        if first and state is None:
            self._first_state = state_of(self.source)
        return iterator

    def _load(self, state: Any, first: bool) -> Loaded | None:
        if first:
            # Of a copy: a torchdata.nodes.Loader that was asked for a state ignores one that is loaded later.
            self._first_state = self._state_of_a_copy()
        return self.load(state, self._first_state if first else None)

    def _state_of_a_copy(self) -> Any:
        copy = self._copied(self.source)[0]
        with Streams().under(derive_key(Purpose.TRIAL)):  # it may draw its order for it
            return None if copy is None else state_of(copy)

    def very_beginning(self) -> Any:
        """The state from which a source that was read begins again. A copy, since the source may keep and change it."""
        if self._first_state is None:
            raise StateError(
                f"{type(self.source).__name__} has no state for its very beginning, so it cannot go back there: load "
                "this state into a source that has not been read"
            )
        return copy.deepcopy(self._first_state)

    def restore(self, state: Any) -> None:
        """Load a state from which the next epoch begins, and read nothing."""
        self.compare_report(self._load(state, not self._used), state)

    def reading(self, run: Run, iterator: Iterator[Any]) -> Callable[[], Any]:
        """A function that returns the iterator's next batch."""
        return iterator.__next__

    def current(self, iterator: Iterator[Any]) -> Any:
        """The source's current state."""
        return self.source.state_dict()


def _calls_of(parts: list[Any]) -> list[Callable[[int], Any]]:
    found = [getattr(part, "set_epoch", None) for part in parts]
    return [tell for tell in found if callable(tell)]


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


class _Twice(Session):
    """Gives how a copy reports the state that it loads, what it does after a batch, its state then, and what follows.

    Args:
        state: None to begin at the epoch's beginning.
    """

    def __init__(self, adapter: StatefulAdapter, run: Run, state: Any) -> None:
        self._adapter, self._run, self._state = adapter, run, state

    def take(self) -> tuple[Report, str, Any, Any]:
        """Reads two batches."""
        adapter, run = self._adapter, self._run
        iterator = adapter.start(run, self._state)
        report = adapter.report or Report({}, False)
        read = adapter.reading(run, iterator)
        try:
            read()
        except StopIteration:
            if self._state is None:
                raise
            # The state is that of an epoch's end.
            iterator = adapter.start(dataclasses.replace(run, epoch=run.epoch + 1), None)
            read = adapter.reading(run, iterator)
            read()
        reports = encode(state_of(adapter.keeper))
        return report, reports, decode(encode(adapter.current(iterator))), read()


class _Behind(Session):
    """Gives how a copy reports a state that it loads, and the batch that follows."""

    def __init__(self, adapter: StatefulAdapter, run: Run, state: Any) -> None:
        self._adapter, self._run, self._state = adapter, run, state

    def take(self) -> tuple[Report, Any]:
        """Reads a batch."""
        adapter = self._adapter
        iterator = adapter.start(self._run, self._state)
        return adapter.report or Report({}, False), adapter.reading(self._run, iterator)()


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
