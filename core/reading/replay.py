"""Sources that can only be read from their start: a resume reads what was consumed again, and drops it."""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from ..copying import copy_apart
from ..errors import SourceError
from ..order.keys import derive_key, extend_key
from ..randomness.streams import Purpose, Streams
from ..state.digest import checksum_of
from ..trying import CallTrial, Finding
from ..world import Share, Tail, World
from .driven import RAW, raw_copy
from .indexed import draws_nothing, keeps_nothing
from .private import caught
from .trials import (
    Beginning,
    Trial,
    keeps_workers,
    of_kept_workers,
    passes_differ,
    reading_threads,
    standing,
    undisturbed,
    used_differs,
)
from .units import Units

__all__ = ["Chain", "End", "Found", "Open", "ReplayReader", "ReplayRequest", "Replayed"]


class Chain:
    """What a stream has given up to some unit, in eight digits.

    It covers the digests of units chosen by their number alone, and of the last one, so it is the same for everybody
    who reads the stream, however they share it. The chosen numbers are those with at most five significant bits: all up
    to 32, then 16 in each octave, so a million units cost some 270 digests.

    Attributes:
        next: the number of the next chosen unit, counted from 1.
    """

    _BITS = 5

    def __init__(self) -> None:
        self.next = 1
        self._crc = 0

    def add(self, digest: str) -> None:
        """Take the digest of unit `next`."""
        self._crc = zlib.crc32(digest.encode(), self._crc)
        self.next += 1 << max(self.next.bit_length() - self._BITS, 0)

    def up_to(self, digest: str) -> str:
        """The chain that ends with a unit of this digest."""
        return f"{zlib.crc32(digest.encode(), self._crc):08x}"


class Open:
    """Returns a new iterator over a source. A class, so that it can be sent to worker processes."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __call__(self, seed: int, epoch: int) -> Iterator[Any]:
        """A new iterator; the numbers are the streams'."""
        source = self._source
        if hasattr(type(source), RAW):
            return iter(raw_copy(source, {}))
        if not hasattr(source, "__iter__"):
            source = source()
        return iter(source)


class ReplayRequest(NamedTuple):
    """A request for one batch of a stream.

    Attributes:
        session: its number; a new one makes the reader start over.
        seed, epoch: of the random streams.
        start: units consumed by all ranks before the session.
        step: batches of the session before this one.
        expected: the chain up to `start`, or empty.
        rank, world_size, tail: how midepoch divides the units, if it does.
        size: units in the epoch; None if unknown.
        skip: read the batch and return only its digest.
        tries: try what the source promises.
        goes_on: the process that reads will read later passes over the same object.
    """

    session: int
    seed: int
    epoch: int
    start: int
    step: int
    expected: str
    rank: int
    world_size: int
    tail: Tail
    size: int | None
    skip: bool
    tries: bool = False
    goes_on: bool = True


class Found(NamedTuple):
    """What a reader has found out about its source by the first batch of a session, or at the end of its first pass.

    Attributes:
        unseen: the names of types whose content it cannot see.
        trial: None if it was not asked to try the source.
        collate: what came of calling the collate function again; None if that was not to be tried.
    """

    unseen: tuple[str, ...] = ()
    trial: Trial | None = None
    collate: Finding | None = None


class Replayed(NamedTuple):
    """The answer to a `ReplayRequest`.

    Attributes:
        batch: None if it was skipped.
        chain: up to the last unit of the global batch. If the stream is this process's own, the batch's digest.
        first: the digest of the stream's first unit, equal in all processes that read the same stream.
        missing: units by which the global batch is short.
        found: with a reader's first answer in a session, and at the end of its first pass.
        late: the error that the source raises after the last batch, in a worker as torch sends it; otherwise None.
    """

    batch: Any
    chain: str
    first: str
    missing: int
    found: Found | None = None
    late: Any = None


class End(NamedTuple):
    """The answer if the stream has no such batch for this rank.

    Attributes:
        first: as in `Replayed`.
        units: units of the last global batch that other ranks have received.
        found: as in `Replayed`.
        chain: up to these units.
    """

    first: str
    units: int = 0
    found: Found | None = None
    chain: str = ""


class ReplayReader:
    """Reads a stream from its start, and drops the units that were consumed before.

    Args:
        dataset: the source itself, which `get_worker_info().dataset` shows.
        open_source: returns a new iterator over the stream, given seed and epoch.
        batch_size: units in one rank's batch.
        collate: from a list of units to a batch; None if each unit is a batch.
        drop_last: leave out a last batch that is not full.
        shared: every process reads the same stream and keeps its part of each global batch. If not, each process (rank
            and worker) has a stream of its own and keeps all of it.
        streams: False lets the source draw from the caller's generators.
        opening: the kind of `open_source`, given a source; copies that are tried are opened by it.
    """

    request = ReplayRequest

    def __init__(
        self,
        dataset: Any,
        open_source: Callable[[int, int], Iterator[Any]],
        batch_size: int,
        collate: Callable[[Any], Any] | None,
        drop_last: bool,
        shared: bool,
        streams: bool,
        opening: Callable[[Any], Callable[[int, int], Iterator[Any]]] = Open,
    ) -> None:
        self.dataset = dataset
        self._open_source, self._opening = open_source, opening
        self._batch_size, self._collate, self._drop_last, self._shared = batch_size, collate, drop_last, shared
        self._plain_collate = collate is None or draws_nothing(collate)
        self._streams = Streams(dataset, collate) if streams else None
        self._start_stream: Callable[[int], None] | None = None
        self._opened: tuple[int, int, int] | None = None
        self._session: int | None = None
        self._source = Units(iter(()))
        self._late: Any = None  # the error in place of the source's end, as `Replayed` has it
        self._sample_key = 0
        self._first = ""
        self._chain = Chain()
        self._digested = (0, "")  # the unit whose digest was taken last
        self._unseen: dict[str, None] = {}
        # How the first pass began, and what the source kept then; None if that is not to be compared at its end.
        self._beginning: tuple[Beginning, str] | None = None
        self._found: Found | None = None  # at the end of the first pass, for the next answer
        self._threads: set[int | None] = set()  # that ran before the pass

    def __call__(self, request: ReplayRequest) -> Replayed | End:
        """The batch, or `End`.

        Raises:
            SourceError: the stream differs from the one consumed before, or its length from its len().
        """
        if self._session != request.session:
            return self._begin(request)
        if self._streams is None:
            return self._batch(request)
        self._start_stream = self._streams.begin(notes=True)
        try:
            return self._batch(request)
        finally:
            self._streams.end()

    def _begin(self, request: ReplayRequest) -> Replayed | End:
        """The first batch of a session in this process."""
        self._session = request.session
        if self._streams is not None:
            self._streams.begin_replay()
        # Before reading: an object that is being read can rarely be copied.
        copied = copy_apart(self.dataset) if request.tries else None
        kept = standing(self.dataset) if request.tries and request.goes_on else ""
        before = threading.enumerate() if request.tries else []
        answer, repeat = self._trying_collate(request)
        trial = None
        if copied is not None:
            threads = reading_threads(before) if self.drawn else ()
            if copied.value is None or threads:
                trial = Trial(copied.why or "threads of its own read it", threads=threads)
            else:
                opened = functools.partial(self._opening(copied.value), request.seed, request.epoch)
                own = self._own(request)
                attempt = functools.partial(passes_differ, copied, opened, request.seed, request.epoch, own)
                batch, (trial, beginning) = undisturbed(getattr(answer, "batch", None), attempt)
                answer = answer._replace(batch=batch) if isinstance(answer, Replayed) else answer
                if beginning is not None and request.goes_on and not self._source.ended:
                    self._beginning = beginning, kept
        return answer._replace(found=Found(tuple(self._unseen), trial, repeat))

    def _trying_collate(self, request: ReplayRequest) -> tuple[Replayed | End, Finding | None]:
        """The first batch, and what came of calling the collate function again if that is to be tried."""
        collate = self._collate
        if collate is None or not request.tries or keeps_nothing(getattr(collate, "of_one", collate)):
            return self(request), None
        self._collate = trial = CallTrial(collate, listed=True)
        try:
            answer = self(request)
        finally:
            self._collate = collate
        if not isinstance(answer, Replayed) or request.skip:
            return answer, None
        return answer, trial.finding(derive_key(Purpose.TRIAL, request.seed, request.epoch))

    @property
    def drawn(self) -> bool:
        """Whether the source has drawn from generators that are under a stream, or may have."""
        return self._streams is not None and self._streams.drawn

    def _own(self, request: ReplayRequest) -> tuple[int, ...]:
        """If the data stream is this process's own, so are the random streams."""
        worker = get_worker_info()
        return () if self._shared else (request.rank, 0 if worker is None else worker.id + 1)

    def _batch(self, request: ReplayRequest) -> Replayed | End:
        try:
            return self._shared_batch(request) if self._shared else self._own_batch(request)
        except BaseException:
            self._opened = None  # a generator cannot continue after an exception
            raise

    def _start(self, key: int) -> None:
        if self._start_stream is not None:
            self._start_stream(key)

    def _open(self, request: ReplayRequest) -> None:
        self._start(derive_key(Purpose.OPENING, request.seed, request.epoch))
        tell = getattr(self.dataset, "set_epoch", None)
        if callable(tell) and get_worker_info() is None:
            # As trainers do with samplers: the order may depend on it. Not in worker processes, which may share memory
            # that all of them would write to.
            tell(request.epoch)
        self._threads = {each.ident for each in threading.enumerate()}
        self._source = Units(self._open_source(request.seed, request.epoch))
        self._opened = request[:3]
        self._chain, self._digested = Chain(), (0, "")
        self._sample_key = derive_key(Purpose.SAMPLE, request.seed, request.epoch, *self._own(request))

    def _units(self, count: int) -> list[Any]:
        """The next `count` units, fewer at the end."""
        source, units = self._source, []
        for unit in source.take(count, None if self._start_stream is None else self._begin_unit):
            if self._shared and source.read == self._chain.next:
                digest = self._digest(unit)
                self._chain.add(digest)
                if source.read == 1:
                    self._first = digest
            units.append(unit)
        if source.ended and self._beginning is not None:
            self._try_used(*self._beginning)
        return units

    def _begin_unit(self, number: int) -> None:
        self._start(extend_key(self._sample_key, number))

    def _try_used(self, beginning: Beginning, kept: str) -> None:
        """At the end of the first pass: whether a later one begins alike, if the source keeps something else now."""
        self._beginning = None
        if standing(self.dataset) == kept:
            return
        copied = copy_apart(self.dataset)
        if copied.value is None:
            self._found = Found(trial=Trial(f"its later passes could not be tried: {copied.why}"))
            return
        opened = functools.partial(self._opening(copied.value), beginning.seed, beginning.epoch)
        trial = used_differs(copied, opened, beginning, kept)
        self._found = Found(trial=trial) if trial.differs or trial.untried else None

    def _end(self, end: End) -> End:
        """The answer that there is no such batch, with what was found out at the end of the pass."""
        found, self._found = self._found, None
        return end if found is None else end._replace(found=found)

    def _digest(self, unit: Any) -> str:
        """The digest of the unit that was read last."""
        number, digest = self._digested
        if number != self._source.read:
            digest = checksum_of(unit, self._unseen)
            self._digested = self._source.read, digest
        return digest

    def _chain_to(self, unit: Any) -> str:
        """The chain up to the unit that was read last."""
        return self._chain.up_to(self._digest(unit))

    def _collated(self, units: list[Any], key: int) -> Any:
        if self._collate is None:
            return units[0]
        if not self._plain_collate:
            self._start(key)
        return self._collate(units)

    def _shared_batch(self, request: ReplayRequest) -> Replayed | End:
        global_batch = self._batch_size * request.world_size
        begin = request.start + request.step * global_batch
        if self._opened != request[:3] or self._source.read > begin:
            self._open(request)
        while self._source.read < begin:
            reaches = request.start if self._source.read < request.start else begin
            last = self._units(min(reaches - self._source.read, 1))
            if not last:
                if (read := self._source.read) < request.start:
                    raise SourceError(
                        f"the source ended after {read} units, but the state stands at {request.start}: it "
                        "does not repeat itself; seed it, or start over with this data"
                    )
                return self._end(End(self._first))
            proved = request.expected if self._source.read == request.start else ""
            if proved and proved != self._chain_to(last[0]):
                raise SourceError(
                    f"the source does not repeat itself: what it gives up to unit {request.start - 1} of epoch "
                    f"{request.epoch} differs from what was consumed before the save; {self._instead}"
                )
        units = self._units(global_batch)
        self._check_length(request, begin + len(units), len(units) < global_batch)
        if not units:
            return self._end(End(self._first))
        chain = self._chain_to(units[-1])
        own = self._own_part(request, begin, units)
        if not own:
            # This rank has no part of an uneven last batch, or all ranks drop it.
            others = len(units) if request.tail == "uneven" and not self._drop_last else 0
            return self._end(End(self._first, others, chain=chain))
        key = derive_key(Purpose.BATCH, request.seed, request.epoch, begin + request.rank * self._batch_size)
        batch = self._collated(own, key)
        found = self._found
        if found is not None:  # the length is known, so nobody may ask for the end
            self._found = None
        late, self._late = self._late, None
        return Replayed(batch, chain, self._first, global_batch - len(units), found=found, late=late)

    @property
    def _instead(self) -> str:
        """What to write in place of a source that does not repeat itself."""
        if keeps_workers(self.dataset):
            return of_kept_workers(self.dataset).removeprefix("; ")
        running = [each.name for each in threading.enumerate() if each.ident not in self._threads]
        started = [each for each in running if each != "QueueFeederThread"]  # of a DataLoader inside: draws nothing
        apart = ""
        if started and self.drawn:
            apart = (
                f"what its threads ({', '.join(started[:4])}) draw differs from run to run: draw in then=, or in the "
                "thread that iterates. If they draw nothing, "
            )
        return (
            f"{apart}make it depend on midepoch's streams or a seed alone, and if it divides its data by rank or "
            f"worker itself, pass shard=False{of_kept_workers(self.dataset)}"
        )

    def _check_length(self, request: ReplayRequest, reached: int, ended: bool) -> None:
        if request.size is None:
            return
        if ended and reached < request.size:
            raise SourceError(
                f"the source ended after {reached} units, but its len() is {request.size}: if it divides its data by "
                "rank or worker itself, pass shard=False; otherwise wrap a function that reads it, as in "
                "midepoch.wrap(lambda: iter(loader)), or correct its __len__ if that is your own"
            )
        last = reached + self._batch_size * request.world_size > request.size
        left_out = request.size - reached if last and self._drop_last else 0
        if reached > request.size or (reached + max(left_out, 0) == request.size and self._more_than(left_out)):
            raise SourceError(
                f"the source has more than the {request.size} units that its len() states: wrap a function that reads "
                f"only these, as in midepoch.wrap(lambda: itertools.islice(loader, {request.size})), or all of them, "
                "as in midepoch.wrap(lambda: iter(loader)); if its __len__ is your own, you may correct that"
            )

    def _more_than(self, units: int) -> bool:
        """Whether so many and another one are left. An error in its place is raised after this batch."""
        try:
            return len(self._units(units + 1)) > units
        except Exception as error:  # noqa: BLE001  # raised where the plain loader raises it
            self._late = error if get_worker_info() is None else caught()
            return False

    def _own_part(self, request: ReplayRequest, begin: int, units: list[Any]) -> list[Any]:
        size, rank = self._batch_size, request.rank
        if len(units) == size * request.world_size:
            return units[rank * size : (rank + 1) * size]
        world = World(rank, request.world_size)
        share = Share(begin + len(units), begin, size, world, request.tail, self._drop_last)
        if not share.steps:
            return []
        start, stop = share.span(0)
        repeats = stop - max(start, share.size)
        own = units[start - begin : stop - begin]
        if repeats > 0:
            # Padding repeats the epoch's beginning, which has to be read again.
            self._open(request)
            beginning: list[Any] = []
            while len(beginning) < max(stop - share.size, 0):
                more = self._units(1)
                if not more:
                    self._open(request)
                    continue
                beginning += more
            own += beginning[max(start - share.size, 0) : stop - share.size]
            self._opened = None
        return own

    def _own_batch(self, request: ReplayRequest) -> Replayed | End:
        if self._opened != request[:3]:
            self._open(request)
        units = self._units(self._batch_size)
        if not units or (self._drop_last and len(units) < self._batch_size):
            return self._end(End(""))
        seen = self._digest(units[-1])
        if request.skip:
            return Replayed(None, seen, "", 0)
        key = extend_key(self._sample_key, self._source.read, Purpose.BATCH)
        return Replayed(self._collated(units, key), seen, "", 0)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens its own.
        return {**self.__dict__, "_opened": None, "_source": Units(iter(())), "_start_stream": None, "_beginning": None}
