"""Sources that keep a state of their own, which midepoch's state carries.

Where such a state is known to be incomplete, midepoch adds what it lacks, or replays the source instead.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch.utils.data import DataLoader

from midepoch.adapters.stateful import private
from midepoch.errors import SourceError, StateCorruptError, StateError, UnsupportedSourceError
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


_NOT_RESTORED = Capability(False, "what samples draw from global generators is not in the source's own state")


class StatefulAdapter(Adapter):
    """Anything with ``__iter__``, ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader.

    The unit is a batch. The source shards itself, as it always did, so its state is this rank's alone.
    """

    name: ClassVar[str] = "stateful"
    unit = "batch"
    seals_detail = True
    remembers = False
    rewinds: ClassVar[bool] = False  # each new iterator starts an epoch, whatever earlier ones did

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self.opening = Streams() if isinstance(source, DataLoader) and options.streams else None
        self._used = False
        self._first_state = None if self.rewinds else self._state_now()
        if options.shard:
            raise UnsupportedSourceError(
                f"shard=True: {type(source).__name__} keeps a state of its own, which knows no ranks; shard what it "
                "reads, or wrap a plain loader"
            )

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Whether it is an iterable with the two methods. Modules and optimizers are not iterable."""
        if _is_of("datasets", source):
            return False  # replayed, unless `DatasetsAdapter` takes it
        methods = all(callable(getattr(source, name, None)) for name in ("__iter__", "state_dict", "load_state_dict"))
        # Classes derived from StatefulIterable have our own methods.
        return methods and not hasattr(type(source), RAW)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Batches of all ranks, if the source knows its own number."""
        length = length_of(self.source)
        return None if length is None else length * world.world_size

    def describe(self) -> dict[str, str]:
        """The class of the source, and whatever its state depends on."""
        described = {"source": f"{type(self.source).__module__}.{type(self.source).__qualname__}"}
        for name in ("batch_size", "drop_last", "num_workers"):
            value = getattr(self.source, name, None)
            if isinstance(value, int):
                described[name] = str(value)
        samples = length_of(getattr(self.source, "dataset", None))
        return described if samples is None else {**described, "samples": str(samples)}

    def capabilities(self) -> Capabilities:
        """Those of the source's own state."""
        own = Capability(True, "as exact as the source's own state")
        return Capabilities(
            exact_order=own,
            exact_augmentations=_NOT_RESTORED if isinstance(self.source, DataLoader) else own,
            constant_time_resume=Capability(True, "as fast as the source restores its own state"),
            elastic_world=Capability(False, "the source's own state knows one world size"),
            elastic_workers=Capability(False, "the source's own state decides; midepoch cannot see its workers"),
            rank_independent=Capability(False, "each rank's source knows its own part: use midepoch.gather(loader)"),
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check that the source's own state can be decoded. Whether it fits, the source says when it is loaded."""
        if detail:
            decode(detail)
        elif position:
            raise StateCorruptError(
                f"the state stands at position {position} but lacks the source's own part: use an undamaged state"
            )

    def open(self, run: Run) -> Session:
        """The source's own iterator, after its own load."""
        return _StatefulSession(self, run)

    def twin(self) -> Adapter:
        """Refuse: two loaders over one source would move each other."""
        raise UnsupportedSourceError(
            f"{type(self.source).__name__} keeps a state of its own, which two loaders cannot share: make another "
            "source and wrap it, instead of copying this loader"
        )

    def _state_now(self) -> Any:
        """A copy of the source's state; None if it has none before it is read."""
        try:
            return decode(encode(self.source.state_dict()))
        except Exception:  # noqa: BLE001  # such a source may raise anything
            return None

    # --- what differs from source to source ---

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """The source's own iterator, from `state` on, or from the epoch's beginning for None."""
        if state is None and self._used and run.epoch == 0 and not self.rewinds:
            state = self._first_state  # a state of the very beginning was loaded after the source had been read
            if state is None:
                raise StateError(
                    f"{type(self.source).__name__} has no state before its first batch, so it cannot go back there: "
                    "load this state into a source that has not been read"
                )
        self._used = True
        if state is not None:
            self.source.load_state_dict(state)
        with workers_outlive_signals(self.source):
            iterator: Iterator[Any] = iter(self.source)
        if isinstance(self.source, DataLoader):
            end_when_collected(iterator)
        return iterator

    def reading(self, run: Run, iterator: Iterator[Any]) -> Callable[[], Any]:
        """A function that returns the iterator's next batch."""
        return iterator.__next__

    def current(self, iterator: Iterator[Any]) -> Any:
        """The source's current state."""
        return self.source.state_dict()


class TorchdataAdapter(StatefulAdapter):
    """torchdata's StatefulDataLoader.

    By itself it begins the epoch after a resume with another order, since it draws its sampler's seed from torch's
    global generator, and nothing restores what samples draw. So each epoch is begun, and in this process each batch is
    read, under a stream of its own.
    """

    name: ClassVar[str] = "stateful-dataloader"
    rewinds = True

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._streams = Streams(source.dataset, source.collate_fn) if options.streams else None
        self.opening = None  # see `start`

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Its class, or one derived from it."""
        return _is_of("torchdata", source) and isinstance(source, DataLoader)

    def drawing(self) -> tuple[object, ...]:
        """What the DataLoader calls."""
        return self.source.dataset, self.source.collate_fn

    def capabilities(self) -> Capabilities:
        """Those of torchdata, plus keyed streams where batches are read in this process."""
        keyed = self._streams is not None and self.source.num_workers == 0
        exact = "numbers drawn while a batch is read are those of the batch: exact on the same split"
        if not keyed:
            exact = "its worker processes draw on from where they were started; wrap a DataLoader to have them restored"
            if self._streams is None:
                exact = "randomness='none': nothing restores the generators that samples draw from"
        return dataclasses.replace(
            super().capabilities(),
            exact_augmentations=Capability(keyed, exact),
            constant_time_resume=Capability(False, "it skips through its sampler's list, or through its dataset"),
        )

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Start under the epoch's random stream, which also covers its own generators."""
        if self._streams is None:
            return super().start(run, state)
        key = derive_key(Purpose.OPENING, run.seed, run.epoch, run.world.rank)
        for holder in (self.source, self.source.sampler, getattr(self.source.batch_sampler, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(key)
        with self._streams.under(key):
            return super().start(run, state)

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

    By itself a state that was loaded is where every later pass begins too, and what its shuffle buffer held is lost:
    with one it is read again from the start instead.
    """

    name: ClassVar[str] = "datasets"

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Take only datasets that are known to have no shuffle buffer."""
        if not _is_of("datasets", source) or not hasattr(source, "load_state_dict"):
            return False
        return private.has_shuffle_buffer(source) is False  # a replay is exact

    def describe(self) -> dict[str, str]:
        """The processing steps and the size of their inputs, as far as known."""
        described = f"{self.source.column_names} of {self.source.num_shards} shards "
        described += private.hugging_face_steps(self.source)
        return {**super().describe(), "data": f"{zlib.crc32(described.encode()):08x}"}

    def capabilities(self) -> Capabilities:
        """Those of its own state, which does not cover what mapped functions draw."""
        return dataclasses.replace(super().capabilities(), exact_augmentations=_NOT_RESTORED)

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Start with the epoch's shuffle of the shards."""
        self.source.set_epoch(run.epoch)
        return super().start(run, self._first_state if state is None else state)


class GrainAdapter(StatefulAdapter):
    """Grain's DataLoader and IterDataset, whose iterators keep the state."""

    name: ClassVar[str] = "grain"
    rewinds = True

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Whether its iterators have ``get_state`` and ``set_state``."""
        return _is_of("grain", source) and hasattr(source, "__iter__") and not hasattr(source, "__getitem__")

    def describe(self) -> dict[str, str]:
        """The transformations and the size of their inputs, as far as known."""
        described = private.grain_steps(self.source)
        return {**super().describe(), "data": f"{zlib.crc32(described.encode()):08x}"}

    def capabilities(self) -> Capabilities:
        """Those of Grain's own state, which covers only the seeds that Grain passes to random transformations."""
        return dataclasses.replace(super().capabilities(), exact_augmentations=_NOT_RESTORED)

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Grain's iterator, after its own load."""
        iterator: Any = iter(self.source)
        if state is not None:
            iterator.set_state(state)
        return cast(Iterator[Any], iterator)

    def current(self, iterator: Any) -> Any:
        """The iterator's state."""
        return iterator.get_state()


def _is_of(package: str, source: object) -> bool:
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(source).__mro__)


class _StatefulSession(Session):
    def __init__(self, adapter: StatefulAdapter, run: Run) -> None:
        self._adapter, self._run = adapter, run
        self._steps = None if run.share is None else run.share.steps
        self._iterator: Any = None
        self._next: Callable[[], Any] | None = None
        self._handed_out = 0
        self._failed = self._finished = False
        self._asked = (0, run.detail)  # batches handed out, and the source's state then

    def take(self) -> Any:
        """The source's next batch."""
        try:
            batch = self._first() if self._next is None else self._next()
        except StopIteration:
            raise
        except BaseException:
            self._failed = True
            raise
        self._handed_out += 1
        return batch

    def _first(self) -> Any:
        adapter, run = self._adapter, self._run
        if adapter.opening is None:
            self._next = self._started()
            return self._next()
        # torch's loaders draw a seed for worker processes, which must not move the caller's generator.
        with adapter.opening.under(derive_key(Purpose.OPENING, run.seed, run.epoch, run.world.rank)):
            self._next = self._started()
            return self._next()

    def _started(self) -> Callable[[], Any]:
        adapter, run = self._adapter, self._run
        if not run.detail:
            self._iterator = adapter.start(run, None)
        else:
            try:
                self._iterator = adapter.start(run, decode(run.detail))
            except Exception as error:
                raise StateError(
                    f"{type(adapter.source).__name__} refused its own state ({type(error).__name__}: {error}): "
                    "make the source as it was when the state was saved"
                ) from error
        return adapter.reading(run, self._iterator)

    def mark(self) -> str:
        """The source's own state, as it is now."""
        if self._asked[0] != self._handed_out:
            if self._failed:
                raise StateError(
                    "the source only knows its current state, which is after a batch that failed: load an older state"
                )
            self._asked = (self._handed_out, encode(self._adapter.current(self._iterator)))
        return self._asked[1]

    def detail(self, mark: str | None) -> str:
        """The source's own state at the mark, if it was asked for there; it is not asked after every batch."""
        if mark is None:
            raise StateError(
                "the source only knows its current state, not that of earlier batches: save when no batch is in flight"
            )
        return mark

    def following(self) -> str:
        """The source's own state at its end."""
        self._finish()
        return encode(self._adapter.current(self._iterator))

    def _finish(self) -> None:
        """Let the source reach its end. Before that, its state says that nothing is left, not that it is finished."""
        if self._finished:
            return
        self._finished = True
        try:
            next(self._iterator)
        except StopIteration:
            return
        raise SourceError(
            f"{type(self._adapter.source).__name__} has more than the {self._steps} batches that its len() leaves: "
            "correct its __len__"
        )
