"""Streams that keep a state of their own, read in worker processes: their states come back with the batches.

A worker sends the dataset's state with a batch, not with every one if states are large. What lies between a state and
the place that is saved is read again at a resume. It is at least one batch, which must be the one that was given: so
each resume proves that the dataset's state leads where it says.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, get_worker_info

from midepoch.errors import SourceError, StateCorruptError, StateError, StateMismatchError, UnsupportedSourceError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.samplers import length_of
from midepoch.state.checksum import checksum_of
from midepoch.state.codec import decode, encode
from midepoch.world import World

from .workers import Server

__all__ = ["CarriedAdapter", "refuse_undivided"]

_BYTES_A_BATCH = 4096  # of states, on average


class _Slot(NamedTuple):
    """Where one worker stands.

    Attributes:
        state: of the dataset, as text; empty for the beginning of the epoch.
        read, batches: samples and batches that the worker had read at that state.
        since: batches after it; at least one, unless the worker has read none.
        digest: of the last batch.
        ended: the stream has ended.
    """

    state: str = ""
    read: int = 0
    batches: int = 0
    since: int = 0
    digest: str = ""
    ended: bool = False


class _Request(NamedTuple):
    """One batch. `start`: where the worker begins; None for a worker that has nothing to do."""

    session: int
    seed: int
    epoch: int
    rank: int
    start: _Slot | None


class _Answer(NamedTuple):
    """A batch, its digest, and the dataset's state before it if that is sent; or that there is none.

    Attributes:
        fresh: (state, samples read, batches read) before this batch.
    """

    batch: Any = None
    digest: str = ""
    fresh: tuple[str, int, int] | None = None
    ended: bool = False
    idle: bool = False


class _Reader:
    """Reads a dataset in one worker process."""

    request = _Request

    def __init__(self, loader: DataLoader[Any], streams: bool) -> None:
        self.dataset: Any = loader.dataset
        self._collate, self._size, self._drop_last = loader.collate_fn, loader.batch_size, loader.drop_last
        self._streams = Streams(loader.dataset, loader.collate_fn) if streams else None
        self._session: int | None = None
        self._samples: Iterator[Any] = iter(())
        self._read = self._batches = 0
        self._last = 0  # the batch before which a state was sent
        self._every = 1
        self._key = 0
        self._unseen: dict[str, None] = {}

    def __call__(self, request: _Request) -> _Answer:
        """The next batch of this worker's stream."""
        if request.start is None:
            return _Answer(idle=True)
        if self._streams is None:
            return self._answer(request, _nothing)
        with self._streams as start:
            return self._answer(request, start)

    def _answer(self, request: _Request, start: Callable[[int], None]) -> _Answer:
        assert request.start is not None
        if self._session != request.session:
            self._session = request.session
            self._open(request, request.start, start)
        if request.start.ended:
            return _Answer(ended=True)
        return self._next(start)

    def _open(self, request: _Request, slot: _Slot, start: Callable[[int], None]) -> None:
        worker = get_worker_info()
        own = (request.rank, 0 if worker is None else worker.id + 1)
        start(derive_key(Purpose.OPENING, request.seed, request.epoch, *own))
        if slot.state:
            try:
                self.dataset.load_state_dict(decode(slot.state))
            except Exception as error:
                raise StateError(
                    f"{type(self.dataset).__name__} refused its own state ({type(error).__name__}: {error}): make the "
                    "dataset as it was when the state was saved"
                ) from error
        self._key = derive_key(Purpose.SAMPLE, request.seed, request.epoch, *own)
        self._samples, self._read, self._batches, self._every = iter(self.dataset), slot.read, slot.batches, 1
        self._last = -1
        if slot.ended:
            return
        for number in range(slot.since):
            again = self._next(start)
            if number == slot.since - 1 and again.digest != slot.digest:
                raise SourceError(
                    f"the state of this {type(self.dataset).__name__} does not lead to the batch that was given when "
                    "it was saved: let the state cover all that it draws and holds back, or wrap a function that makes "
                    "the DataLoader, to have it read again from the start"
                )

    def _next(self, start: Callable[[int], None]) -> _Answer:
        fresh = None
        if self._last < 0 or self._batches - self._last >= self._every:
            text = encode(self.dataset.state_dict()) if self._batches else ""
            fresh, self._last = (text, self._read, self._batches), self._batches
            self._every = max(len(text) // _BYTES_A_BATCH, 1)
        units: list[Any] = []
        while len(units) < (self._size or 1):
            start(extend_key(self._key, self._read))
            try:
                units.append(next(self._samples))
            except StopIteration:
                self._samples = iter(())  # one that is its own dataset may begin anew if it is asked again
                break
            self._read += 1
        if not units or (self._drop_last and len(units) < (self._size or 1)):
            return _Answer(ended=True)
        self._batches += 1
        digest = checksum_of(units[-1], self._unseen)
        start(extend_key(self._key, self._read, Purpose.BATCH))
        batch = self._collate(units if self._size is not None else units[0])
        return _Answer(batch, digest, fresh)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens its own.
        return {**self.__dict__, "_session": None, "_samples": iter(())}


class CarriedAdapter(Adapter):
    """A DataLoader whose worker processes each read a stream with a state of its own. The unit is a batch."""

    unit = "batch"
    seals_detail = True

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._workers = source.num_workers
        self._reader = _Reader(source, options.streams)
        self._server = Server(source, options)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Unknown: the workers may divide the data as they like."""
        return None

    def describe(self) -> dict[str, str]:
        """The kind of dataset, and what its batches are made of."""
        kind, dataset = type(self.source.dataset), self.source.dataset
        described = {"order": "its own", "source": f"{kind.__module__}.{kind.__qualname__}"}
        described |= {name: str(getattr(self.source, name)) for name in ("batch_size", "drop_last", "num_workers")}
        length = length_of(dataset)
        return described if length is None else {**described, "samples": str(length)}

    def drawing(self) -> tuple[object, ...]:
        """The dataset and the collate function."""
        return self.source.dataset, self.source.collate_fn

    def capabilities(self) -> Capabilities:
        """What the dataset's own state can restore."""
        order = "as exact as the dataset's own state, which is proved at each resume by the batch before it"
        return Capabilities(
            exact_order=Capability(True, order),
            exact_augmentations=promises.augmentations(self.options),
            constant_time_resume=Capability(True, "the dataset's state, and the batches after it, which are few"),
            elastic_world=Capability(False, "each process has a stream of its own"),
            elastic_workers=Capability(False, "each worker process has a stream of its own"),
            rank_independent=Capability(False, "each rank knows only its own part: use midepoch.gather(loader)"),
        )

    @property
    def begins_anew(self) -> bool:
        """Yes: worker processes are new in each epoch."""
        return True

    def lead(self, here: Any, there: tuple[int, int], seed: int, world: World) -> str:
        """Nothing at the beginning of an epoch."""
        return ""

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """One slot for each worker."""
        if not detail:
            if position:
                raise StateCorruptError(
                    f"the state stands at position {position} but lacks the dataset's own states: load a complete state"
                )
            return
        _, slots = _read(detail)
        if len(slots) != self._workers:
            raise StateMismatchError(
                f"num_workers differs: the state was saved with {len(slots)}, this loader has {self._workers}; restore "
                "num_workers for the rest of this epoch"
            )

    def open(self, run: Run) -> Session:
        """The workers' batches in turn."""
        refuse_undivided(self.source.dataset, self.options, run.world)
        if callable(tell := getattr(self.source.dataset, "set_epoch", None)):
            tell(run.epoch)  # worker processes start with the dataset as it is now
        first, slots = _read(run.detail) if run.detail else (0, [_Slot()] * self._workers)
        answers, close = self._server(self._reader, self._requests(run, first, slots), run)
        return _CarriedSession(answers, close, first, slots)

    def _requests(self, run: Run, first: int, slots: list[_Slot]) -> Iterator[_Request]:
        request = _Request(run.session, run.seed, run.epoch, run.world.rank, None)
        for _ in range(first):
            yield request  # torch gives each worker one request in turn, from the first worker on
        for number in itertools.count(first):
            yield request._replace(start=slots[number % self._workers])

    def close(self) -> None:
        """End worker processes."""
        self._server.close()


class _CarriedSession(Session):
    marks = True

    def __init__(self, answers: Iterator[Any], close: Callable[[], None], first: int, slots: list[_Slot]) -> None:
        self._answers, self._close = answers, close
        self._idle, self._next, self._slots = first, first, list(slots)

    def take(self) -> Any:
        """The next batch."""
        slots = self._slots
        while not all(slot.ended for slot in slots):
            answer: _Answer = next(self._answers)
            if answer.idle:
                continue
            number, self._next = self._next, (self._next + 1) % len(slots)
            slot = slots[number]
            if answer.ended:
                slots[number] = slot._replace(ended=True)
                continue
            if answer.fresh is not None:
                slot = _Slot(*answer.fresh)
            slots[number] = slot._replace(since=slot.since + 1, digest=answer.digest)
            return answer.batch
        raise StopIteration

    def mark(self) -> tuple[int, tuple[_Slot, ...]]:
        """Where the workers stand."""
        return self._next, tuple(self._slots)

    def detail(self, mark: tuple[int, tuple[_Slot, ...]] | None) -> str:
        """The same as text."""
        return json.dumps(self.mark() if mark is None else mark, separators=(",", ":"))

    def close(self) -> None:
        """End the worker processes."""
        self._answers = iter(())
        self._close()


def _read(detail: str) -> tuple[int, list[_Slot]]:
    try:
        first, found = json.loads(detail)
        slots = [_Slot(*each) for each in found]
        kinds = [tuple(map(type, slot)) for slot in slots]
        numbers = [number for slot in slots for number in (slot.read, slot.batches, slot.since)]
        if set(kinds) != {(str, int, int, int, str, bool)} or not 0 <= first < len(slots) or min(numbers) < 0:
            raise ValueError("unexpected content")
    except (ValueError, TypeError, RecursionError) as error:
        raise StateCorruptError(f"the dataset's part of the state is invalid ({error}): use an older state") from error
    for slot in slots:
        if slot.state:
            decode(slot.state)
    return first, slots


def refuse_undivided(dataset: Any, options: Options, world: World) -> None:
    """Raise an UnsupportedSourceError where several ranks read one stream, and nobody has said who divides it."""
    if world.world_size > 1 and options.shard is None:
        raise UnsupportedSourceError(
            f"{type(dataset).__name__} would be read by {world.world_size} ranks: pass shard=False if it divides its "
            "data by rank, or shard=True to let midepoch divide it"
        )


def _nothing(key: int) -> None:
    pass
