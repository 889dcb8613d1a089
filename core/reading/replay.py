"""Sources that can only be read from their start: a resume reads what was consumed again, and drops it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from ..errors import SourceError
from ..loader.adapter import Session
from ..order.keys import derive_key, extend_key
from ..randomness.streams import Purpose, Start
from ..state.digest import checksum_of
from ..trying import CallTrial, Finding, copy_of, tried_on_copy
from ..world import Share, Tail, World
from .collating import keeps_nothing
from .exposed import RAW, raw_copy
from .units import UnitReader, Units, no_start

__all__ = [
    "PrefixDigest", "ReplayReader", "ReplayRequest", "ReplaySession", "Replayed",
]  # fmt: skip

_CURE = (
    "make it depend on midepoch's streams or a seed alone, and draw in the thread that iterates, or in then=. If it "
    "divides its data by rank or worker itself, pass shard=False; if it reads a DataLoader, wrap that"
)


class PrefixDigest:
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
        """What the stream has given up to a unit of this digest."""
        return f"{zlib.crc32(digest.encode(), self._crc):08x}"


def _iterator_of(source: Any) -> Iterator[Any]:
    """A new iterator over a source."""
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
        ends: all batches that follow from the source's length have been asked for.
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
    skip: bool = False
    tries: bool = False
    ends: bool = False


class Replayed(NamedTuple):
    """The answer to a `ReplayRequest`.

    Attributes:
        batch: None if it was skipped, or if the stream has no such batch for this rank.
        digest: of all up to the last unit of the global batch. If the stream is this process's own, of the batch.
        correction: to the position that follows from the number of batches: negative if the global batch is short,
            positive at the end, if other ranks have received units of a last one.
        ended: there is no batch.
        fails: the source ends by an error of its own after this last batch; the next request raises it.
        passes: of comparing two passes, if the request asked for that.
        findings: what else has been found out about the source by a session's first batch.
    """

    batch: Any
    digest: str
    correction: int = 0
    ended: bool = False
    fails: bool = False
    passes: Finding | None = None
    findings: tuple[Finding, ...] = ()


class ReplayReader(UnitReader):
    """Reads a stream from its start, and drops the units that were consumed before.

    Args:
        dataset, collate, single, streams: as of a `UnitReader`.
        batch_size: units in one rank's batch.
        drop_last: leave out a last batch that is not full.
        shared: every process reads the same stream and keeps its part of each global batch. If not, each process (rank
            and worker) has a stream of its own and keeps all of it.
    """

    request = ReplayRequest

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        single: bool,
        streams: bool,
        *,
        batch_size: int,
        drop_last: bool,
        shared: bool,
    ) -> None:
        super().__init__(dataset, collate, single, streams)
        self._batch_size, self._drop_last, self._shared = batch_size, drop_last, shared
        self._start: Start = no_start  # while a batch is read
        self._session: int | None = None
        self._late: Exception | None = None  # in place of the source's end
        self._first_key = 0  # of the first unit's stream
        self._prefix = PrefixDigest()
        self._unseen: dict[str, None] = {}

    def __call__(self, request: ReplayRequest) -> Replayed:
        """The batch.

        Raises:
            SourceError: the stream differs from the one consumed before, or its length from its len().
        """
        if self._session == request.session:
            return self._answer(request)
        self._session, self._late = request.session, None
        if self._streams is not None:
            self._streams.begin_replay()
        answer = self._try(request) if request.tries else self._answer(request)
        if self._unseen:
            answer = answer._replace(findings=(*answer.findings, Finding(unseen=tuple(self._unseen))))
        return answer

    def _answer(self, request: ReplayRequest) -> Replayed:
        if request.ends:
            late, self._late = self._late, None
            if late is not None:
                raise late
            return Replayed(None, "", ended=True)
        if self._streams is not None:
            self._start = self._streams.begin(notes=True)
        try:
            return self._shared_batch(request) if self._shared else self._own_batch(request)
        except BaseException:
            self._opened = None  # a generator cannot continue after an exception
            raise
        finally:
            if self._streams is not None:
                self._streams.end()

    def _try(self, request: ReplayRequest) -> Replayed:
        """The first batch that is read, and what trials find out with it."""
        copied = copy_of(self.dataset)  # before it is read
        collate, trial = self._collate, None
        if not keeps_nothing(collate):
            self._collate = trial = CallTrial(collate, listed=not self._single)
        try:
            answer = self._answer(request)
        finally:
            self._collate = collate
        key = derive_key(Purpose.TRIAL, request.seed, request.epoch)

        def first_unit(copy: Any) -> Any:
            _tell_the_epoch(copy, request.epoch)
            return next(_iterator_of(copy), ())

        # A process that resumes begins with a first pass.
        passes = tried_on_copy(copied, first_unit, key, rereads=False)
        findings = []
        if trial is not None and not answer.ended and not request.skip:
            findings.append(trial.finding(key).of_calls("the collate function", "the same samples"))
        if self.drawn:
            findings.append(Finding(untried="that it draws its numbers in the thread that iterates is believed"))
        return answer._replace(passes=passes, findings=tuple(findings))

    @property
    def drawn(self) -> bool:
        """Whether the source has drawn from generators that are under a stream, or may have."""
        return self._streams is not None and self._streams.drawn

    def _open(self, request: ReplayRequest) -> None:
        # If the data stream is this process's own, so are the random streams of its samples. What begins it, which a
        # generator does with its first one, draws alike on all ranks, as where they seed alike: each may take its part
        # of one shuffled list.
        worker = get_worker_info()
        number = () if self._shared else (0 if worker is None else worker.id + 1,)
        own = () if self._shared else (request.rank, *number)
        self._start(derive_key(Purpose.OPENING, request.seed, request.epoch, *number))
        _tell_the_epoch(self.dataset, request.epoch)
        self._source = Units(_iterator_of(self.dataset))
        self._opened = request[:3]
        self._prefix = PrefixDigest()
        self._first_key = derive_key(Purpose.SAMPLE, request.seed, request.epoch, *number)
        self._sample_key = derive_key(Purpose.SAMPLE, request.seed, request.epoch, *own)

    def _units(self, count: int, start: Start) -> Iterator[Any]:
        """The next units, each under its own stream."""
        return self._source.take(
            count, lambda number: start(extend_key(self._sample_key if number else self._first_key, number))
        )

    def _digested(self, count: int) -> list[Any]:
        """The next `count` units, fewer at the end. Those that the prefix digest covers are added to it."""
        units = []
        for unit in self._units(count, self._start):
            if self._shared and self._source.read == self._prefix.next:
                self._prefix.add(self._digest(unit))
            units.append(unit)
        return units

    def _digest(self, unit: Any) -> str:
        return checksum_of(unit, self._unseen)

    def _digest_up_to(self, unit: Any) -> str:
        """What the stream has given up to the unit that was read last."""
        return self._prefix.up_to(self._digest(unit))

    def _shared_batch(self, request: ReplayRequest) -> Replayed:
        global_batch = self._batch_size * request.world_size
        begin = request.start + request.step * global_batch
        if self._opened != request[:3] or self._source.read > begin:
            self._open(request)
        while self._source.read < begin:
            reaches = request.start if self._source.read < request.start else begin
            last = self._digested(min(reaches - self._source.read, 1))
            if not last:
                if (read := self._source.read) < request.start:
                    raise SourceError(
                        f"the source ended after {read} units, but the state stands at {request.start}: it "
                        "does not repeat itself; seed it, or start over with this data"
                    )
                return Replayed(None, "", ended=True)
            proved = request.expected if self._source.read == request.start else ""
            if proved and proved != self._digest_up_to(last[0]):
                raise SourceError(
                    f"the source does not repeat itself: what it gives up to unit {request.start - 1} of epoch "
                    f"{request.epoch} differs from what was consumed before the save; {_CURE}"
                )
        units = self._digested(global_batch)
        self._check_length(request, begin + len(units), len(units) < global_batch)
        if not units:
            return Replayed(None, "", ended=True)
        digest = self._digest_up_to(units[-1])
        own = self._own_part(request, begin, units)
        if not own:
            # This rank has no part of an uneven last batch, or all ranks drop it.
            others = len(units) if request.tail == "uneven" and not self._drop_last else 0
            return Replayed(None, digest, others, ended=True)
        key = derive_key(Purpose.BATCH, request.seed, request.epoch, begin + request.rank * self._batch_size)
        batch = self._collated(own, key, self._start)
        return Replayed(batch, digest, len(units) - global_batch, fails=self._late is not None)

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
            return len(self._digested(units + 1)) > units
        except Exception as error:  # noqa: BLE001  # raised where the plain loader raises it
            self._late = error
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
        own = units[start - begin : stop - begin]
        if stop > share.size:
            self._open(request)  # padding repeats the epoch's beginning, which has to be read again
            beginning = self._digested(min(stop - share.size, share.size))
            own += [beginning[position % share.size] for position in range(max(start, share.size), stop)]
            self._opened = None
        return own

    def _own_batch(self, request: ReplayRequest) -> Replayed:
        if self._opened != request[:3]:
            self._open(request)
        units = self._digested(self._batch_size)
        if not units or (self._drop_last and len(units) < self._batch_size):
            return Replayed(None, "", ended=True)
        seen = self._digest(units[-1])
        if request.skip:
            return Replayed(None, seen)
        key = extend_key(self._sample_key, self._source.read, Purpose.BATCH)
        return Replayed(self._collated(units, key, self._start), seen)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_start": no_start}


def _tell_the_epoch(source: Any, epoch: int) -> None:
    """As trainers do with samplers: the order may depend on it.

    Not in worker processes, which may share memory that all of them would write to.
    """
    tell = getattr(source, "set_epoch", None)
    if callable(tell) and get_worker_info() is None:
        tell(epoch)


# --- sessions ---------------------------------------------------------------------------------------------------------


class ReplaySession(Session):
    """A session whose bookmark is the digest of what was consumed.

    If every process reads the same stream, it is of the stream's units, and readers prove it. If each has a stream of
    its own, their batches alternate, as in a DataLoader; the digest is of this process's batches, and proved here.

    Args:
        answers: of the readers, in turn.
        close: releases them.
        learn: called with an answer that has findings.
        prefix: of the detail.
        readers: streams that end by themselves.
        consumed: batches before the session's place, which are read and dropped.
        expected: their digest, or empty.
        chain: of this process's batches; None if every process reads the same stream.
        saves: the digest is saved.
    """

    def __init__(
        self, answers: Iterator[Replayed], close: Callable[[], None], learn: Callable[[Replayed], None], prefix: str,
        readers: int = 1, consumed: int = 0, expected: str = "", chain: PrefixDigest | None = None, saves: bool = True,
    ) -> None:  # fmt: skip
        self._answers, self._close, self._learn, self._prefix = answers, close, learn, prefix
        self._readers, self._consumed, self._expected = readers, consumed, expected
        self._chain, self._saves = chain, saves
        self._digest = ""
        self._ended_in_a_row = self._batches = 0

    def take(self) -> Any:
        """The next batch."""
        while self._ended_in_a_row < self._readers:
            answer = next(self._answers)
            if answer.findings or answer.passes is not None:
                self._learn(answer)
            if not answer.ended or answer.correction:  # units that other ranks have received
                self._consume(answer)
            if answer.ended:
                self._ended_in_a_row += 1
                continue
            self._ended_in_a_row = 0
            if self._consumed:
                self._consumed -= 1
                if not self._consumed and self._expected not in ("", self._digest):
                    raise SourceError(
                        "the source does not repeat itself: the batches consumed before the save differ now; make it "
                        "depend on midepoch's streams or a seed alone"
                    )
                continue
            self.varies = answer.fails  # it is asked for one more, and ends by the source's error
            return answer.batch
        if self._consumed:
            raise SourceError(
                f"the source ended {self._consumed} batches before the state's position: it does not repeat itself; "
                "seed it, or start over with this data"
            )
        raise StopIteration

    def _consume(self, answer: Replayed) -> None:
        self._digest, self.position_correction = answer.digest, answer.correction
        if self._chain is not None:
            self._batches += 1
            if self._batches == self._chain.next:
                self._chain.add(answer.digest)
            self._digest = self._chain.up_to(answer.digest)

    def bookmark(self) -> str:
        """The digest of what was consumed."""
        return self._digest if self._saves else ""

    def detail(self, bookmark: str) -> str:
        """The number of workers, and the digest, which is called the chain."""
        return self._prefix + bookmark

    def close(self) -> None:
        """End the readers."""
        self._answers = iter(())
        self._close()
