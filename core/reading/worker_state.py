"""Streams that keep a state of their own, read in worker processes: their states come back with the batches.

A worker sends the dataset's state with a batch, not with every one if states are large. What lies between a state and
the place that is saved is read again at a resume. It is at least one batch, which must be the one that was given: so
each resume proves that the dataset's state leads where it says.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, get_worker_info

from ..errors import (
    SourceError,
    StateCorruptError,
    StateError,
    StateMismatchError,
    UnsupportedSourceError,
    warn,
)
from ..loader import promises
from ..loader.adapter import Adapter, Facts, Options, Reach, Run, Session
from ..loader.capabilities import Capabilities, Capability
from ..order.keys import derive_key, extend_key
from ..randomness.streams import Purpose, Start, Streams
from ..samplers import length_of
from ..state.codec import decode, encode
from ..state.digest import checksum_of
from ..trying import Copied, Finding, copy_of
from ..world import World
from .units import UnitReader, Units
from .workers import Server

__all__ = ["WorkerStateAdapter", "refuse_undivided"]

_BYTES_A_BATCH = 4096  # that states may have, on average

_CURE = (
    "let the state cover all that it draws and holds back, or wrap a function that makes the DataLoader, to have it "
    "read again from the start; if samples hold something that differs at each read, such as the time, pass "
    "verify='warn' to midepoch.wrap to go on all the same"
)


class _Position(NamedTuple):
    """Where one worker stands.

    Attributes:
        state: of the dataset, as text; empty for the beginning of the epoch.
        read, batches: samples and batches that the worker had read at that state.
        since: batches after it; at least one, unless the worker has read none.
        digest: of the last batch; empty if nothing is to be compared.
        ended: the stream has ended.
    """

    state: str = ""
    read: int = 0
    batches: int = 0
    since: int = 0
    digest: str = ""
    ended: bool = False


class _Request(NamedTuple):
    """One batch.

    Attributes:
        start: where the worker begins; None for a worker that has nothing to do.
    """

    session: int
    seed: int
    epoch: int
    rank: int
    start: _Position | None


class _Answer(NamedTuple):
    """A batch, its digest, and the dataset's state before it if that is sent; or that there is none.

    Attributes:
        fresh: (state, samples read, batches read) before this batch.
        unknown: why the dataset's state before this batch, which was to be sent, is not known.
        differs: the batch before, which was read again, is another one than was given.
        load_draws: a copy of the dataset drew when it loaded that state, which is the first one that is sent.
    """

    batch: Any = None
    digest: str = ""
    fresh: tuple[str, int, int] | None = None
    unknown: str = ""
    differs: bool = False
    load_draws: bool = False
    ended: bool = False
    idle: bool = False


class _Reader(UnitReader):
    """Reads a dataset in one worker process."""

    request = _Request

    def __init__(self, loader: DataLoader[Any], streams: bool, proves: bool) -> None:
        super().__init__(loader.dataset, loader.collate_fn, loader.batch_size is None, streams)
        self._size, self._drop_last = loader.batch_size or 1, loader.drop_last
        self._proves = proves
        self._batches = 0
        self._copied: Copied | None = None  # as it was before it was read, until a load is tried
        self._last, self._every = 0, 1  # the batch before which a state was sent, and after how many the next one is

    def __call__(self, request: _Request) -> _Answer:
        """The next batch of this worker's stream."""
        if request.start is None:
            return _Answer(idle=True)
        with self._under() as start:
            differs = False
            if self._opened != request[:3]:
                self._opened = request[:3]
                differs = self._open(request, request.start, start)
            return _Answer(ended=True) if request.start.ended else self._next(start)._replace(differs=differs)

    def _open(self, request: _Request, position: _Position, start: Start) -> bool:
        """Go to `position`. Returns whether the batch before it is another one than was given."""
        worker = get_worker_info()
        own = (request.rank, 0 if worker is None else worker.id + 1)
        start(derive_key(Purpose.OPENING, request.seed, request.epoch, *own))
        if self._proves and not position.state and request.epoch == 0:
            self._copied = copy_of(self.dataset)
        if position.state:
            try:
                self.dataset.load_state_dict(decode(position.state))
            except Exception as error:
                raise StateError(
                    f"{type(self.dataset).__name__} refused its own state ({type(error).__name__}: {error}): make the "
                    "dataset as it was when the state was saved"
                ) from error
        self._sample_key = derive_key(Purpose.SAMPLE, request.seed, request.epoch, *own)
        self._source, self._batches = Units(iter(self.dataset), position.read), position.batches
        self._last, self._every = position.batches, max(len(position.state) // _BYTES_A_BATCH, 1)
        digest = position.digest
        for _ in range(0 if position.ended else position.since):
            digest = self._read_batch(start).digest
        return self._proves and bool(position.digest) and digest != position.digest

    def _next(self, start: Start) -> _Answer:
        fresh, unknown, load_draws = None, "", False
        if self._batches - self._last >= self._every:
            try:
                fresh = encode(self.dataset.state_dict()), self._source.read, self._batches
            except Exception as error:  # noqa: BLE001  # raised where a state is asked for; the next batch tries again
                unknown = self._why_unknown(error)
            else:
                self._last, self._every = self._batches, max(len(fresh[0]) // _BYTES_A_BATCH, 1)
                load_draws = self._load_draws(fresh[0])
        return self._read_batch(start)._replace(fresh=fresh, unknown=unknown, load_draws=load_draws)

    def _load_draws(self, state: str) -> bool:
        """Whether a copy of the dataset draws when it loads a state; tried once."""
        copied, self._copied = self._copied, None
        if copied is None or copied.why:
            return False
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):  # a resume raises it
            copy = copied.open()
            streams = Streams(copy)
            with streams.under(derive_key(Purpose.TRIAL)):
                return streams.drawn_by(lambda: copy.load_state_dict(decode(state)))
        return False

    def _why_unknown(self, error: Exception) -> str:
        if isinstance(error, StateError):
            return str(error)  # of what it holds
        return (
            f"the state_dict() of {type(self.dataset).__name__} raised {type(error).__name__}: {error!s:.200}: let it "
            "return a state after each batch, or ask after another batch"
        )

    def _read_batch(self, start: Start) -> _Answer:
        units = list(self._units(self._size, start))
        if not units or (self._drop_last and len(units) < self._size):
            return _Answer(ended=True)
        self._batches += 1
        digest = ""
        if self._proves:
            digest = f"{zlib.crc32(''.join(map(checksum_of, units)).encode()):08x}"
        key = extend_key(self._sample_key, self._source.read, Purpose.BATCH)
        return _Answer(self._collated(units, key, start), digest)


class WorkerStateAdapter(Adapter):
    """A DataLoader whose worker processes each read a stream with a state of its own. The unit is a batch.

    Args:
        source: the DataLoader.
        options: as given to `wrap`.
    """

    facts = Facts("batch")
    reach = Reach.EPOCHS

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._workers = source.num_workers
        proves = options.streams and options.verify != "off"  # otherwise a batch that is read again may differ
        self._reader = _Reader(source, options.streams, proves)
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
        as_exact = "as exact as the dataset's own state"
        augmentations = promises.augmentations(self.options)
        if not self.options.streams:
            order = Capability(True, f"{as_exact}: with randomness='none', no resume proves it", believed=True)
        elif self.options.verify == "off":
            order = Capability(True, f"{as_exact}: with verify='off', no resume proves it", believed=True)
            augmentations = replace(augmentations, believed=True)
        else:
            order = Capability(True, f"{as_exact}, which is proved at each resume by the batch before it")
        return Capabilities(
            exact_order=order,
            exact_augmentations=augmentations,
            constant_time_resume=Capability(True, "the dataset's state, and the batches after it, which are few"),
            elastic_world=Capability(False, "each process has a stream of its own"),
            elastic_workers=Capability(False, "each worker process has a stream of its own"),
            rank_independent=Capability(False, "each rank knows only its own part: use midepoch.gather(loader)"),
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """One position for each worker."""
        if not detail:
            if position:
                raise StateCorruptError(
                    f"the state stands at position {position} but lacks the dataset's own states: load a complete state"
                )
            return
        _, positions = _read(detail)
        if len(positions) != self._workers:
            raise StateMismatchError(
                f"num_workers differs: the state was saved with {len(positions)}, this loader has {self._workers}; "
                "restore num_workers for the rest of this epoch"
            )

    def open(self, run: Run) -> Session:
        """The workers' batches in turn."""
        refuse_undivided(self.source.dataset, self.options, run.world)
        if callable(tell := getattr(self.source.dataset, "set_epoch", None)):
            tell(run.epoch)  # worker processes start with the dataset as it is now
        first, positions = _read(run.detail) if run.detail else (0, [_Position()] * self._workers)
        answers, close = self._server(self._reader, self._requests(run, first, positions), run)
        return _Session(answers, close, first, positions, self)

    def _requests(self, run: Run, first: int, positions: list[_Position]) -> Iterator[_Request]:
        request = _Request(run.session, run.seed, run.epoch, run.world.rank, None)
        for _ in range(first):
            yield request  # torch gives each worker one request in turn, from the first worker on
        turns = [*positions[first:], *positions[:first]]
        for position in turns:
            yield request._replace(start=position)
        # The workers have their states now.
        yield from itertools.cycle([request._replace(start=position._replace(state="")) for position in turns])

    def tell_of_another_batch(self) -> None:
        """A state did not lead to the batch that was given.

        Raises:
            SourceError: unless a warning was asked for.
        """
        kind = type(self.source.dataset).__name__
        why = f"the state of this {kind} does not lead to the batch that was given when it was saved"
        if self.options.verify != "warn":
            raise SourceError(f"{why}: {_CURE}")
        self.note(Finding(why, True))
        warn(f"{why}: {_CURE}")

    def close(self) -> None:
        """End worker processes."""
        self._server.close()


class _Session(Session):
    def __init__(
        self,
        answers: Iterator[Any],
        close: Callable[[], None],
        first: int,
        positions: list[_Position],
        adapter: WorkerStateAdapter,
    ) -> None:
        self._answers, self._close, self._adapter = answers, close, adapter
        self._next, self._positions = first, list(positions)
        self._unknown = [""] * len(positions)  # why a worker's state is not known here

    def take(self) -> Any:
        """The next batch."""
        positions = self._positions
        while not all(position.ended for position in positions):
            answer: _Answer = next(self._answers)
            if answer.idle:
                continue
            if answer.differs:
                self._adapter.tell_of_another_batch()
            if answer.load_draws:
                self._adapter.note(Finding.of_load(self._adapter.source.dataset))
            number, self._next = self._next, (self._next + 1) % len(positions)
            position = positions[number]
            self._unknown[number] = "" if answer.ended else answer.unknown
            if answer.ended:
                positions[number] = position._replace(ended=True)
                continue
            if answer.fresh is not None:
                position = _Position(*answer.fresh)
            positions[number] = position._replace(since=position.since + 1, digest=answer.digest)
            return answer.batch
        raise StopIteration

    def bookmark(self) -> tuple[int, tuple[_Position, ...], str]:
        """Where the workers stand; and why a state cannot be saved there."""
        return self._next, tuple(self._positions), next(filter(None, self._unknown), "")

    def detail(self, bookmark: tuple[int, tuple[_Position, ...], str] | None) -> str:
        """The same as text.

        Raises:
            StateError: a dataset did not say its state.
        """
        first, positions, unknown = self.bookmark() if bookmark is None else bookmark
        if unknown:
            raise StateError(unknown)
        return json.dumps((first, positions), separators=(",", ":"))

    def close(self) -> None:
        """End the worker processes."""
        self._answers = iter(())
        self._close()


def _read(detail: str) -> tuple[int, list[_Position]]:
    try:
        first, found = json.loads(detail)
        positions = [_Position(*each) for each in found]
        kinds = [tuple(map(type, position)) for position in positions]
        numbers = [number for position in positions for number in (position.read, position.batches, position.since)]
        if set(kinds) != {(str, int, int, int, str, bool)} or not 0 <= first < len(positions) or min(numbers) < 0:
            raise ValueError("unexpected content")
    except (ValueError, TypeError, RecursionError) as error:
        raise StateCorruptError(f"the dataset's part of the state is invalid ({error}): use an older state") from error
    for position in positions:
        if position.state:
            decode(position.state)
    return first, positions


def refuse_undivided(dataset: Any, options: Options, world: World) -> None:
    """Raise an UnsupportedSourceError where several ranks read one stream, and nobody has said who divides it."""
    if world.world_size > 1 and options.shard is None:
        raise UnsupportedSourceError(
            f"{type(dataset).__name__} would be read by {world.world_size} ranks: pass shard=False if it divides its "
            "data by rank, or shard=True to let midepoch divide it"
        )
