"""Sources with their own state. It is saved, checked and given to each rank like any other.

For sources whose state is known to be incomplete, the adapter adds what is missing, or leaves them to a replay.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from midepoch.adapters.stateful import private
from midepoch.adapters.stateful.trial import Outcome, compare, read_from
from midepoch.copying import stateful_copy
from midepoch.errors import MidepochWarning, SourceError, StateCorruptError, StateError, UnsupportedSourceError
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.driven import RAW
from midepoch.reading.private import end_when_collected
from midepoch.reading.workers import workers_outlive_signals
from midepoch.samplers import length_of
from midepoch.state.codec import decode, encode
from midepoch.world import World

__all__ = ["DatasetsAdapter", "GrainAdapter", "StatefulAdapter", "TorchdataAdapter"]


_ENDED = "ended:"  # before the detail of a pass that was read to its end; a source would begin anew from its own state
_TRIALS = 2  # in two epochs, since a source may count its passes and not say so in its state
_HOLDS_BACK = "what the dataset's shuffle buffer holds is not in its state: wrap the dataset itself, which is replayed"
_NOT_RESTORED = Capability(False, "the source's own state does not restore the global generators of samples")


class StatefulAdapter(Adapter):
    """Anything with ``__iter__``, ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader.

    The unit is a batch. The source shards itself, so its state is for this rank only.
    """

    name: ClassVar[str] = "stateful"
    unit = "batch"
    seals_detail = True
    remembers = False
    rewinds: bool = False  # iterating the source starts an epoch, whatever others have read from it

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self.opening = Streams() if isinstance(source, DataLoader) and options.streams else None
        self._used = False
        self._first_state: Any = None  # of the very beginning; unknown until the source is first read
        self._pristine: Any = None  # a copy of the source as it was before it was read
        self._begun = False  # a session has been opened
        self._tried_in: list[int] = []  # epochs
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
        if _is_of("datasets", source):
            return False  # `DatasetsAdapter` takes it, or it is replayed
        methods = all(callable(getattr(source, name, None)) for name in ("__iter__", "state_dict", "load_state_dict"))
        # A subclass of StatefulIterable has midepoch's own methods.
        return methods and not hasattr(type(source), RAW)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Batches of all ranks, if the source knows its own number."""
        length = length_of(self.source)
        return None if length is None else length * world.world_size

    def describe(self) -> dict[str, str]:
        """The kind of source, since its state fits no other kind, and the settings a loader's state depends on."""
        described = {"source": f"{type(self.source).__module__}.{type(self.source).__qualname__}"}
        for name in ("batch_size", "drop_last", "num_workers"):
            value = getattr(self.source, name, None)
            if isinstance(value, int):
                described[name] = str(value)
        samples = length_of(getattr(self.source, "dataset", None))
        return described if samples is None else {**described, "samples": str(samples)}

    def capabilities(self) -> Capabilities:
        """What the source's own state can restore."""
        own = Capability(True, "as exact as the source's own state, which led a copy to the batch that came next")
        if self._untried:
            own = Capability(True, f"as exact as the source's own state: {self._untried}", believed=True)
        return Capabilities(
            exact_order=own,
            exact_augmentations=_NOT_RESTORED if isinstance(self.source, DataLoader) else own,
            constant_time_resume=Capability(True, "as fast as the source restores its own state"),
            elastic_world=Capability(False, "the source's own state is for one world size"),
            elastic_workers=Capability(False, "the source's own state decides; midepoch cannot see its workers"),
            rank_independent=Capability(False, "each rank's source knows only its part: use midepoch.gather(loader)"),
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check that the source's own state decodes. The source checks the rest when it loads it."""
        if detail:
            own = detail.removeprefix(_ENDED)
            if own or own == detail:
                decode(own)
        elif position:
            raise StateCorruptError(
                f"the state stands at position {position} but lacks the source's own state: load a complete state"
            )

    def open(self, run: Run) -> Session:
        """The source's own iterator, after its state is loaded."""
        return _StatefulSession(self, run)

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

    def begin(self) -> None:
        """The first session begins."""
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
        if self._pristine is None or run.position or run.epoch in self._tried_in:
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
            self._pristine = None
        if threading.active_count() > threads:
            gc.collect()  # ends those of the copy
        return outcome

    def _read_copy(self, run: Run) -> Outcome | None:
        copy = self._copied(self._pristine)[0]
        if copy is None:
            return None
        options = dataclasses.replace(self.options, verify="off")
        return read_from(lambda run: type(self)(copy, options).open(run), self.source, copy, run)

    def conclude(self, outcome: Outcome, batch: Any, run: Run, batches: int) -> None:
        """Compare the copy's batch with the source's own, and say what follows."""
        finding = compare(outcome, batch)
        if finding.unseen:
            self.cannot_see(finding.unseen)
        if not finding.order:
            self._untried = ""
            self.learned()
        if not finding.differs:
            return
        self._pristine = None
        what = "order" if finding.order else "random numbers"
        why = f"its state after batch {batches} of epoch {run.epoch} was tried on a copy: {finding.differs}"
        self._tell(why, finding.order, f"does not restore its {what}")

    def _tell(self, why: str, order: bool, what: str) -> None:
        self.found(why, order)
        warnings.warn(
            f"the state of this {type(self.source).__name__} {what} ({why}), so a resumed run gets other data: wrap a "
            "function that makes what it reads, as in midepoch.wrap(lambda: make()), to have it read again from the "
            "start, or let the state cover all that it draws and holds back. loader.capabilities says what still holds",
            MidepochWarning,
            stacklevel=8,
        )

    # --- what differs between sources ---

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """The source's own iterator from `state` on; None starts the epoch."""
        first = not self._used and not self.rewinds
        if state is None and self._used and run.epoch == 0 and not self.rewinds:
            state = self._first_state  # go back to the very beginning after the source was read
            if state is None:
                raise StateError(
                    f"{type(self.source).__name__} has no state for its very beginning, so it cannot go back there: "
                    "load this state into a source that has not been read"
                )
        if first and state is not None:
            # Of a copy: a torchdata.nodes.Loader that was asked for a state ignores one that is loaded later.
            self._first_state = _state_of(self._copied(self.source)[0])
        self._used = True
        if state is not None:
            self.source.load_state_dict(state)
        with workers_outlive_signals(self.source):
            iterator: Iterator[Any] = iter(self.source)
        private.forget_end(iterator)
        if isinstance(self.source, DataLoader):
            end_when_collected(iterator)
        if first and state is None:
            self._first_state = _state_of(self.source)
        return iterator

    def restore(self, state: Any) -> None:
        """Load a state from which the next epoch begins, and read nothing."""
        if not self._used:
            self._first_state = _state_of(self._copied(self.source)[0])
        self._used = True
        self.source.load_state_dict(state)

    def reading(self, run: Run, iterator: Iterator[Any]) -> Callable[[], Any]:
        """A function that returns the iterator's next batch."""
        return iterator.__next__

    def current(self, iterator: Iterator[Any]) -> Any:
        """The source's current state."""
        return self.source.state_dict()


class TorchdataAdapter(StatefulAdapter):
    """torchdata's StatefulDataLoader.

    After a resume it starts the next epoch with another order, because it draws its sampler's seed from torch's global
    generator. It also does not restore what samples draw. So this adapter puts the start of each epoch under a random
    stream of its own, and each batch too if it is read in this process.
    """

    name: ClassVar[str] = "stateful-dataloader"
    rewinds = True

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._streams = Streams(source.dataset, source.collate_fn) if options.streams else None
        self.opening = None  # see `start`
        # A Hugging Face dataset is told of the epoch here too. Its beginning is known without reading.
        self._inside = source.dataset if _is_of("datasets", source.dataset) and _has_state(source.dataset) else None
        self._inside_first = None if self._inside is None else self._inside.state_dict()
        # Another dataset with a state of its own goes on from where it stands, so it has to be led back.
        self.rewinds = self._inside is not None or not _has_state(source.dataset)
        self._holds_back = self._inside is not None and private.has_shuffle_buffer(self._inside)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A StatefulDataLoader, or an instance of a subclass."""
        return _is_of("torchdata", source) and isinstance(source, DataLoader)

    def drawing(self) -> tuple[object, ...]:
        """What the DataLoader calls."""
        return self.source.dataset, self.source.collate_fn

    def capabilities(self) -> Capabilities:
        """Those of torchdata, plus keyed streams where batches are read in this process."""
        keyed = self._streams is not None and self.source.num_workers == 0
        exact = "numbers drawn while a batch is read are the batch's: exact on the same split"
        if not keyed:
            exact = "its workers' generators are not restored; wrap a DataLoader to have them restored"
            if self._streams is None:
                exact = "randomness='none': nothing restores the generators that samples draw from"
        stated = super().capabilities()
        return dataclasses.replace(
            stated,
            exact_order=Capability(False, _HOLDS_BACK) if self._holds_back else stated.exact_order,
            exact_augmentations=Capability(keyed, exact),
            constant_time_resume=Capability(False, "it skips through its sampler's list, or through its dataset"),
        )

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Start under the epoch's stream, which also seeds its own generators."""
        if state is not None and private.counts_only(state):
            return self._read_again(run)
        if self._inside is not None:
            self._inside.set_epoch(run.epoch)
            if state is None:
                self._inside.load_state_dict(self._inside_first)
        if self._streams is None:
            return super().start(run, state)
        key = derive_key(Purpose.OPENING, run.seed, run.epoch, run.world.rank)
        for holder in (self.source, self.source.sampler, getattr(self.source.batch_sampler, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(key)
        with self._streams.under(key):
            return super().start(run, state)

    def _read_again(self, run: Run) -> Iterator[Any]:
        """Start the epoch, and read what was consumed.

        torchdata does the same for a dataset without a state, but counts it twice in the states that it gives later.
        """
        iterator = self.start(run, None)
        read = self.reading(dataclasses.replace(run, position=0), iterator)
        for _ in range(run.position // run.world.world_size):
            read()
        return iterator

    def before_first_read(self) -> None:
        """Say what is known of a dataset inside; else as every source."""
        if self._holds_back:
            self._tell(_HOLDS_BACK, True, "does not restore its order")
        else:
            super().before_first_read()

    def _copied(self, source: Any) -> tuple[Any, str]:
        by_index = () if hasattr(source.dataset, "load_state_dict") or _is_stream(source.dataset) else (source.dataset,)
        return stateful_copy(source, (*private.shared_kinds(), *by_index))

    def reading(self, run: Run, iterator: Iterator[Any]) -> Callable[[], Any]:
        """Read each batch under its stream, if it is read in this process."""
        streams, advance = self._streams, iterator.__next__
        if streams is None or self.source.num_workers:
            return advance
        key = derive_key(Purpose.BATCH, run.seed, run.epoch)
        place, step = run.position + run.world.rank, run.world.world_size

        def read() -> Any:
            nonlocal place
            with streams as start:
                start(extend_key(key, place))
                batch = advance()
            place += step
            return batch

        return read


class DatasetsAdapter(StatefulAdapter):
    """Hugging Face's IterableDataset.

    Once it has loaded a state, every later pass also starts there. The content of a shuffle buffer is not in its state,
    so a dataset with one is replayed instead.
    """

    name: ClassVar[str] = "datasets"

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A dataset without a shuffle buffer, as far as can be determined."""
        if not _is_of("datasets", source) or not hasattr(source, "load_state_dict"):
            return False
        return private.has_shuffle_buffer(source) is False  # a replay is exact

    def describe(self) -> dict[str, str]:
        """The processing steps and the amount of data, as far as they can be determined."""
        described = f"{self.source.column_names} of {self.source.num_shards} shards "
        described += private.hugging_face_steps(self.source)
        return {**super().describe(), "data": f"{zlib.crc32(described.encode()):08x}"}

    def capabilities(self) -> Capabilities:
        """What its own state can restore. It does not cover what mapped functions draw."""
        return dataclasses.replace(super().capabilities(), exact_augmentations=_NOT_RESTORED)

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._first_state = source.state_dict()  # a copy of what it was made with: nothing is read

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Start in the epoch's own shuffle of the shards."""
        self.source.set_epoch(run.epoch)
        if state is None:
            state = self._first_state
        self._used = True
        self.source.load_state_dict(state)
        return iter(self.source)


class GrainAdapter(StatefulAdapter):
    """Grain's DataLoader and IterDataset, whose iterators keep the state."""

    name: ClassVar[str] = "grain"
    rewinds = True

    @classmethod
    def recognises(cls, source: object) -> bool:
        """An object whose iterators have ``get_state`` and ``set_state``."""
        return _is_of("grain", source) and hasattr(source, "__iter__") and not hasattr(source, "__getitem__")

    def describe(self) -> dict[str, str]:
        """The transformations and the amount of data, as far as they can be determined."""
        described = private.grain_steps(self.source)
        return {**super().describe(), "data": f"{zlib.crc32(described.encode()):08x}"}

    def capabilities(self) -> Capabilities:
        """What Grain's state can restore: the generators given to its random transformations, and no others."""
        return dataclasses.replace(super().capabilities(), exact_augmentations=_NOT_RESTORED)

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Grain's iterator, after its state is loaded."""
        iterator: Any = iter(self.source)
        if state is not None:
            iterator.set_state(state)
        return cast(Iterator[Any], iterator)

    def current(self, iterator: Any) -> Any:
        """The iterator's state."""
        return iterator.get_state()


def _state_of(source: Any) -> Any:
    """A copy of a source's state; None if it has none now."""
    try:
        return decode(encode(source.state_dict()))
    except Exception:  # noqa: BLE001  # sources raise various errors here
        return None


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _has_state(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _is_of(package: str, source: object) -> bool:
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(source).__mro__)


class _StatefulSession(Session):
    def __init__(self, adapter: StatefulAdapter, run: Run) -> None:
        self._adapter, self._run = adapter, run
        self._steps = None if run.share is None else run.share.steps
        self._iterator: Any = None
        self._next: Callable[[], Any] | None = None
        self._advance: Callable[[], Any] | None = None
        self._trial: Callable[[str, int], Outcome | None] | None = None
        self._handed_out = 0
        self._failed = self._finished = False
        self._over = run.detail.startswith(_ENDED)  # the source has ended
        self._asked = (0, run.detail)  # batches handed out so far, and the source's state at that point

    def take(self) -> Any:
        """The source's next batch."""
        if self._over:
            if self._next is None:
                self._begin_at_the_end()
            raise StopIteration
        try:
            batch = self._first() if self._next is None else self._next()
        except StopIteration:
            self._over = self._finished = True
            raise
        except BaseException:
            self._failed = True
            raise
        self._handed_out += 1
        return batch

    def _first(self) -> Any:
        adapter, run = self._adapter, self._run
        if adapter.opening is None:
            advance = self._started()
            batch = advance()
        else:
            # torch's loaders draw the workers' seed here, which must not change the caller's generator.
            with adapter.opening.under(derive_key(Purpose.OPENING, run.seed, run.epoch, run.world.rank)):
                advance = self._started()
                batch = advance()
        self._trial, self._advance = adapter.trial(run), advance
        self._next = advance if self._trial is None else self._second
        return batch

    def _begin_at_the_end(self) -> None:
        """Stand where the source had ended: it begins the next epoch from its own state, if it has any."""
        own = self._run.detail.removeprefix(_ENDED)
        if own:
            self._adapter.begin()
            self._loading(lambda: self._adapter.restore(decode(own)))

    def _second(self) -> Any:
        """The next batch, behind a trial of the state before it."""
        try:
            self.mark()
        except Exception:  # noqa: BLE001  # whoever asks for the state will be told
            self._trial = None
        if self._next == self._second:
            self._next = self._advance
        assert self._next is not None
        return self._next()

    def _try(self) -> None:
        """Compare the batch that comes next with the one that a copy of the source gives from the state on."""
        trial, self._trial = self._trial, None
        advance, self._next = self._advance, self._advance
        assert trial is not None and advance is not None
        outcome = trial(self._asked[1], self._handed_out)
        if outcome is None:
            return
        try:
            batch = advance()
        except Exception as error:  # noqa: BLE001  # raised where the batch is asked for
            self._next = functools.partial(self._held, Outcome(error=error))
            return
        self._next = functools.partial(self._held, Outcome(batch))
        self._adapter.conclude(outcome, batch, self._run, self._handed_out)

    def _held(self, held: Outcome) -> Any:
        self._next = self._advance
        if held.error is not None:
            raise held.error
        return held.batch

    def _started(self) -> Callable[[], Any]:
        adapter, run = self._adapter, self._run
        adapter.begin()
        if not run.detail:
            self._iterator = adapter.start(run, None)
        else:
            self._iterator = self._loading(lambda: adapter.start(run, decode(run.detail)))
        return adapter.reading(run, self._iterator)

    def _loading(self, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except Exception as error:
            raise StateError(
                f"{type(self._adapter.source).__name__} refused its own state ({type(error).__name__}: {error}): "
                "make the source as it was when the state was saved"
            ) from error

    def mark(self) -> str:
        """The source's current state."""
        if self._over and self._steps is None:
            return _ENDED + self.following()
        if self._asked[0] != self._handed_out:
            if self._failed:
                raise StateError(
                    "a batch failed, and the source's state is already past it: load an older state to continue"
                )
            self._asked = (self._handed_out, encode(self._adapter.current(self._iterator)))
            if self._trial is not None:
                self._try()
        return self._asked[1]

    def detail(self, mark: str | None) -> str:
        """The source's own state, if `mark` was called then. It is not called after each batch."""
        if mark is None:
            raise StateError(
                "the source only has its current state, not that of earlier batches: save when no batch is in flight, "
                "or pass remember=, the number of batches in flight, to midepoch.wrap"
            )
        return mark

    def following(self) -> str:
        """The source's own state at its end; nothing if a source of unknown length begins anew by itself."""
        if self._steps is None and self._adapter.rewinds:
            return ""
        if self._over and self._iterator is None:
            return self._run.detail.removeprefix(_ENDED)
        self._finish()
        return encode(self._adapter.current(self._iterator))

    def _finish(self) -> None:
        """Read past the last batch. Until then, the source's state says that nothing is left, not that it has ended."""
        if self._finished:
            return
        self._finished = True
        try:
            next(self._iterator)
        except StopIteration:
            return
        raise SourceError(
            f"{type(self._adapter.source).__name__} continues after the {self._steps} batches that its len() leaves: "
            "fix its __len__"
        )
