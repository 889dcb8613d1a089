"""Iterables that are driven by the samplers that they expose: a jump to a sample gives it the indices that it draws.

A jump is exact only if each sample draws a constant number of indices from each sampler. So the draws of the first
sample are counted before reading begins, and those of every later sample are compared with them. That a sample depends
on nothing else is believed.

The samplers are a way to jump, not the source's end: it is asked for one more before an epoch's last batch is handed
out. A sample that draws another number, a sampler that is begun again, an early end, or a sample after the last index
is an error, which names `shard`: with it, the source is read as one that exposes no samplers.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import MidepochError, SourceError, UnsupportedSourceError
from ..loader.adapter import Run
from ..order import Endless, EpochOrder, Order
from ..order.keys import derive_key, extend_key
from ..randomness.streams import Purpose, Start, Streams
from ..samplers import MaterializedEpoch, MaterializedOrder, length_of
from ..trying import Finding
from .exposed import Deviation, StandInPass
from .indexed import as_list, spans
from .units import UnitReader, Units

__all__ = ["DrivenReader", "DrivenRequest", "SamplerDriven", "driven_requests"]


class SamplerDriven:
    """An iterable dataset that exposes samplers, and the order that each of them stands for."""

    def __init__(self, dataset: Any, orders: Mapping[str, Order | MaterializedOrder]) -> None:
        self.dataset, self.orders = dataset, dict(orders)
        self._listed = [each for each in self.orders.values() if isinstance(each, MaterializedOrder)]

    @property
    def lists(self) -> bool:
        """Whether some sampler has to be listed."""
        return bool(self._listed)

    @property
    def findings(self) -> list[Finding]:
        """What trials of the samplers that are listed have shown."""
        return [order.finding for order in self._listed]

    def prepare(self, seed: int, epoch: int) -> None:
        """List the samplers whose order is not computed, for a pass that begins."""
        for order in self._listed:
            order.begin(seed, epoch)

    def moved(self) -> None:
        """The loader was led elsewhere: the next pass asks the samplers again."""
        for order in self._listed:
            order.moved("")

    def crc(self, seed: int, epoch: int) -> str:
        """Of all lists of an epoch together, in eight digits; empty if every order is computed."""
        crcs = [order.epoch(seed, epoch).crc for order in self._listed]
        return f"{zlib.crc32(','.join(crcs).encode()):08x}" if crcs else ""

    def lengths(self, seed: int, epoch: int) -> list[int]:
        """The number of draws from each sampler in one epoch."""
        return [
            order.length(seed, epoch) if isinstance(order, MaterializedOrder) else order.size
            for order in self.orders.values()
        ]

    def size(self, draws: tuple[int, ...], seed: int, epoch: int) -> int:
        """Samples in one epoch, given the draws of one sample from each sampler."""
        lengths = self.lengths(seed, epoch)
        return min(length // draw for length, draw in zip(lengths, draws, strict=True) if draw)

    def ends(self, draws: tuple[int, ...]) -> bool:
        """Whether a sampler that is drawn from has an end."""
        drawn = (order for order, draw in zip(self.orders.values(), draws, strict=True) if draw)
        return not all(isinstance(order, Endless) for order in drawn)

    def indices(self, seed: int, epoch: int) -> list[Iterator[Any]]:
        """All indices of each sampler in an epoch, as they are asked for."""
        return [_all_of(order.epoch(seed, epoch)) for order in self.orders.values()]


def _all_of(order: EpochOrder | MaterializedEpoch) -> Iterator[Any]:
    blocks = (as_list(order[at : min(at + _AHEAD, len(order))]) for at in range(0, len(order), _AHEAD))
    return _each(itertools.chain.from_iterable(blocks), _error_of(order))


def _each(indices: Iterable[Any], end: Exception | None) -> Iterator[Any]:
    yield from indices
    if end is not None:
        raise end


def _error_of(order: EpochOrder | MaterializedEpoch) -> Exception | None:
    return order.error if isinstance(order, MaterializedEpoch) else None


_AHEAD = 256  # indices that are computed at once


# --- requests ---------------------------------------------------------------------------------------------------------


Part = tuple[list[Any], Exception | None]
"""Some indices of a sampler, and what it raises after them; None if it ends."""


class DrivenRequest(NamedTuple):
    """A request for one batch of such an iterable: `units` positions from `start` on, out of `size`.

    Attributes:
        session, seed, epoch, start, units, size: as said; the first is the run's session number.
        before: samples before these that are read, too, and dropped: one where an epoch is continued, since the source
            may have more of it to give.
        draws: the indices that each sample draws from each sampler.
        parts: of each sampler, for all these samples.
        after: samples of the epoch after these, which nobody reads: they are read and dropped.
        rest: of each sampler, for those and for one more; None if the reader gets a further request in this session.
    """

    session: int
    seed: int
    epoch: int
    start: int
    units: int
    size: int
    before: int
    draws: tuple[int, ...]
    parts: tuple[Part, ...]
    after: int = 0
    rest: tuple[Part, ...] | None = None


def driven_requests(
    run: Run, unchanged: Callable[[], None], driven: SamplerDriven, draws: tuple[int, ...], readers: int
) -> Iterator[DrivenRequest]:
    """The requests of one session.

    Args:
        run: the session's.
        unchanged: called before each request; raises if the source has changed.
        driven: the source.
        draws: indices that each sample draws from each sampler.
        readers: that answer in turn.
    """
    share = run.share
    assert share is not None  # samplers have a length
    size, left, alone = share.size, share.steps, run.world.world_size * readers == 1
    orders = (order.epoch(run.seed, run.epoch) for order in driven.orders.values())
    slices = [_Slices(order, count) for order, count in zip(orders, draws, strict=True)]
    every = spans(share)
    if not left and not run.position:
        # Less than a batch is left out of an epoch; a source that gives more than its samplers may make one of it.
        every, left = iter([(0, 0)]), 1
    for start, stop in every:
        unchanged()
        left -= 1
        before = int(0 < start == run.position)
        padding = ((position % size, position % size + 1) for position in range(max(start, size), stop))
        samples = ((start - before, max(start, min(stop, size))), *padding)
        request = DrivenRequest(
            run.session, run.seed, run.epoch, start, stop - start, size, before, draws,
            tuple(each.part(samples) for each in slices),
        )  # fmt: skip
        if left < readers:
            after = max(size - stop, 0) if alone else 0
            rest = tuple(each.part([(size - after, size + 1)]) for each in slices)
            request = request._replace(after=after, rest=rest)
        yield request


class _Slices:
    """The parts of an order. A numpy call costs more than its work, so it is asked for many indices at once."""

    def __init__(self, order: EpochOrder | MaterializedEpoch, count: int) -> None:
        self._order, self._count, self._start, self._ahead = order, count, 0, list[Any]()

    def part(self, samples: Iterable[tuple[int, int]]) -> Part:
        """The indices of samples, given as (start, stop)."""
        order, count, indices, wanted = self._order, self._count, list[Any](), 0
        for start, stop in samples:
            first, last = min(start * count, len(order)), min(stop * count, len(order))
            if first < self._start or last > self._start + len(self._ahead):
                self._start, self._ahead = first, as_list(order[first : max(last, min(first + _AHEAD, len(order)))])
            indices += self._ahead[first - self._start : last - self._start]
            wanted += (stop - start) * count
        if len(indices) == wanted:
            return indices, Deviation(f"drew more than {count} indices from a sampler")
        return indices, _error_of(order)


# --- reading ----------------------------------------------------------------------------------------------------------


class DrivenReader(UnitReader):
    """Reads batches from an iterable that exposes its samplers.

    Args:
        driven: the dataset and its orders.
        collate, single, streams: as of a `UnitReader`.
    """

    request = DrivenRequest

    def __init__(self, driven: SamplerDriven, collate: Callable[[Any], Any], single: bool, streams: bool) -> None:
        super().__init__(driven.dataset, collate, single, streams)
        self._names = list(driven.orders)
        self._counted = False  # draws, in this dataset. If not, those of a request come from a state
        self._pass: Any = None

    def count(self, driven: SamplerDriven, seed: int) -> tuple[int, ...]:
        """The indices that a sample draws from each sampler: read the first one of epoch 0, and drop it.

        It is always epoch 0, so that every process that resumes comes to the same result.

        Raises:
            UnsupportedSourceError: no sample can be jumped to.
        """
        try:
            with self._streams or Streams(self.dataset) as start:  # of the caller's generators, nothing is consumed
                start(derive_key(Purpose.OPENING, seed, 0))
                source = StandInPass(self.dataset, self._names)
                for sampler, indices in zip(source.samplers, driven.indices(seed, 0), strict=True):
                    sampler.put(indices)
                start(derive_key(Purpose.SAMPLE, seed, 0, 0))
                next(source.iterator)  # leaves nothing in the dataset
        except StopIteration:
            draws = (1,) * len(self._names)
            if not driven.size(draws, seed, 0):
                return draws
            raise self._error("gave no sample where its samplers have indices, or takes one in its __iter__") from None
        except Deviation as deviation:
            raise self._error(str(deviation)) from None
        self._counted, draws = True, tuple(sampler.drawn for sampler in source.samplers)
        if not any(draws):
            raise self._error("drew no index for its first sample from the samplers that it exposes")
        size = driven.size(draws, seed, 0)
        if driven.ends(draws) and (stated := length_of(self.dataset)) not in (None, size):
            raise UnsupportedSourceError(
                f"{type(self.dataset).__name__} has a len() of {stated}, and its samplers are enough for {size} "
                "samples: correct its __len__, or wrap a function that reads it, as in midepoch.wrap(lambda: "
                "iter(loader))"
            )
        return draws

    def __call__(self, request: DrivenRequest) -> Any:
        """The batch.

        Raises:
            SourceError: a sample deviates from those before it, or the source does not end with its samplers.
        """
        try:
            if self._opened != request[:3]:
                self._open(request)
            batch = self._read(request)
            if self._streams is not None and self._streams.made_late(self._pass.iterator):
                batch = self._read(request)  # by a jump back, with the generators that the iterator has made
            if request.rest is not None:
                self._finish(request, request.rest)
            if not request.units:
                raise StopIteration
            return batch
        except BaseException as error:
            self._opened = None  # a generator cannot continue after an exception
            if isinstance(error, Deviation):
                raise self._error(str(error), request.draws) from None
            raise

    def _open(self, request: DrivenRequest) -> None:
        with self._under() as start:
            start(derive_key(Purpose.OPENING, request.seed, request.epoch))
            self._pass = StandInPass(self.dataset, self._names)
        if self._streams is not None:
            self._streams.begin_pass(self._pass.iterator)
        self._source, self._opened = Units(self._pass), request[:3]
        self._sample_key = derive_key(Purpose.SAMPLE, request.seed, request.epoch)

    def _read(self, request: DrivenRequest) -> Any:
        """The batch; None if there is no sample in it."""
        first, stop = request.start - request.before, request.start + request.units
        with self._under() as start:
            self._jump(request.parts)
            samples = [self._sample(request, first, position, start) for position in range(first, stop)]
            del samples[: request.before]
            if not samples:
                return None
            return self._collated(samples, derive_key(Purpose.BATCH, request.seed, request.epoch, request.start), start)

    def _finish(self, request: DrivenRequest, rest: tuple[Part, ...]) -> None:
        """Ask the source for one more, before the last batch of its epoch is handed out."""
        first = request.size - request.after
        with self._under() as start:
            self._jump(rest)
            for position in range(first, request.size):
                self._sample(request, first, position, start)
            self._opened = None  # it has ended
            start(extend_key(self._sample_key, request.size))
            with contextlib.suppress(StopIteration):
                self._source.next()
                raise Deviation("gave a sample after the last index of its samplers")

    def _jump(self, parts: tuple[Part, ...]) -> None:
        for sampler, (indices, end) in zip(self._pass.samplers, parts, strict=True):
            sampler.put(_each(indices, end))

    def _sample(self, request: DrivenRequest, first: int, position: int, start: Start) -> Any:
        """The next sample, which must draw as many indices as those before it; the jump led to the one at `first`."""
        start(extend_key(self._sample_key, position % request.size))
        try:
            sample = self._source.next()
        except StopIteration:
            why = f"ended after {position} samples, and its samplers are enough for {request.size}"
            raise Deviation(why) from None
        for sampler, count in zip(self._pass.samplers, request.draws, strict=True):
            drawn = sampler.drawn - (position - first) * count
            if drawn != count:
                each = f"{count} for each one before"
                raise Deviation(f"drew {drawn} indices from a sampler for sample {position}, and {each}")
        self._counted = True
        return sample

    def _error(self, why: str, saved: tuple[int, ...] = ()) -> MidepochError:
        """`why`: in words after the source's name. `saved`: the draws of a sample in a request; none while counting."""
        name = type(self.dataset).__name__
        if saved and not self._counted:  # of a resumed pass, this is the sample before the state's position
            return SourceError(
                f"{name} {why}, but the state was saved with {', '.join(map(str, saved))} per sample: restore the "
                "dataset that it was saved with, or start over"
            )
        return (SourceError if saved else UnsupportedSourceError)(
            f"{name} {why}, so its samples cannot be jumped to. Pass shard=True to midepoch.wrap in a new run: every "
            "process reads all of it and keeps its part, and a resume reads the epoch again; or shard=False if it "
            "divides itself"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pass": None}
