"""Iterables that expose their samplers: to jump within an epoch, set the positions at which the samplers continue.

The pattern is that of a dataset which keeps ``self.sampler`` and, in ``__iter__``, ``self.sampler_iter =
iter(self.sampler)``.
midepoch iterates a shallow copy of the dataset in which the samplers are its own. A jump is exact only if each sample
draws a constant number of indices from each sampler. So the draws of the first sample are counted when reading begins,
and those of every later sample are compared with them. That a sample depends on nothing else is believed.

The samplers are a way to jump, not the source's end: it is asked for one more before an epoch's last batch is handed
out. Where one process reads all of it, it may deviate: draw another number, begin a sampler again, end early, or go on
after the last index. The pass then goes on with what the source gives.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Sampler, get_worker_info

from ..errors import SourceError
from ..loader.adapter import Run
from ..order import Endless, EpochOrder, Order
from ..order.keys import derive_key, extend_key
from ..randomness.streams import Purpose, Streams
from ..samplers import MaterializedEpoch, MaterializedOrder
from ..trying import Finding
from .collating import draws_nothing
from .indexed import as_list, spans
from .private import is_place_holder
from .units import Units

__all__ = [
    "RAW", "AloneReader", "Driven", "DrivenReader", "DrivenRequest", "Path", "Sent", "driven_requests",
    "exposed_samplers", "raw_copy",
]  # fmt: skip

RAW = "_midepoch_raw"
"""Set on a copy of a dataset to use the class's own ``__iter__`` instead of that of `StatefulIterable`."""

Path = tuple[str, ...] | tuple[str, Any]
"""Where a dataset holds a sampler: in an attribute, or at a key or index of an attribute."""


def exposed_samplers(dataset: Any) -> dict[Path, Any]:
    """The torch Samplers in attributes of `dataset`, or in a list, tuple or dict that is an attribute."""
    found: dict[Path, Any] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, Sampler):
            if not is_place_holder(value):
                found[(name,)] = value
            continue
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list | tuple) and len(value) <= _LONGEST_CONTAINER:
            items = enumerate(value)
        found.update({(name, key): item for key, item in items if isinstance(item, Sampler)})
    return found


_LONGEST_CONTAINER = 1000  # members of an attribute that is searched for samplers; longer ones hold data


def raw_copy(dataset: Any, replace: Mapping[Path, Any]) -> Any:
    """A shallow copy of `dataset` with some samplers replaced. `dataset` itself is unchanged."""
    twin = copy.copy(dataset)
    attributes: dict[str, Any] = {RAW: True} if hasattr(type(dataset), RAW) else {}
    for path, value in replace.items():
        name = path[0]
        if len(path) == 1:
            attributes[name] = value
            continue
        container: Any = attributes.get(name)
        if container is None:
            original = getattr(dataset, name)
            container = attributes[name] = dict(original) if isinstance(original, dict) else list(original)
        container[path[1]] = value
    for name, value in attributes.items():
        object.__setattr__(twin, name, value)
    return twin


class _Driven(Sampler[Any]):
    """Replaces a user's sampler: returns the indices of our order from any position.

    Its iterators share its position, so the position can be set between two samples.

    Args:
        original: the user's.
        length: indices in the epoch.
        order: of each pass over it, the first one's number being 0; None if the indices of each sample are `put`.
        error: of the sampler's own, which comes after its indices; None if it ends.
    """

    _AHEAD = 256  # positions taken from the order at once

    def __init__(
        self,
        original: Any,
        length: int,
        order: Callable[[int], EpochOrder | MaterializedEpoch] | None,
        error: Exception | None = None,
    ) -> None:
        self._original, self._length, self._orders, self._error = original, length, order, error
        self._order = None if order is None else order(0)
        if isinstance(self._order, MaterializedEpoch):
            self._error = self._order.error
        self._chunk: list[Any] = []
        self._chunk_start = 0
        self.position = 0
        self.passes = 0
        self.exceeded = False  # more was drawn than was put

    def put(self, position: int, indices: list[Any]) -> None:
        """The indices from this position on, until the next ones are put."""
        self._chunk_start, self._chunk = position, indices

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        if self.passes > 1:
            self.position = 0  # as a sampler does; the reader notices
            if self._orders is not None:
                self._order, self._chunk = self._orders(self.passes - 1), []
        return _Draws(self.draw)

    def draw(self) -> Any:
        """The next index."""
        position = self.position
        if position >= self._length:
            raise StopIteration if self._error is None else self._error
        place = position - self._chunk_start
        if not 0 <= place < len(self._chunk):
            if self._order is None:
                self.exceeded = True
                raise StopIteration
            self._chunk_start, place = position, 0
            self._chunk = as_list(self._order[position : min(position + self._AHEAD, self._length)])
        self.position = position + 1
        return self._chunk[place]

    def __len__(self) -> int:
        return len(self._original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_original":
            raise AttributeError(name)
        return getattr(self._original, name)


class _Draws:
    """One pass over a `_Driven`. Calling `iter()` on it does not count as a second pass."""

    __slots__ = ("_draw",)

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __iter__(self) -> _Draws:
        return self

    def __next__(self) -> Any:
        return self._draw()


class Driven:
    """An iterable dataset with our samplers: opens it at the beginning of any sample's draws.

    Args:
        dataset: as the user made it.
        orders: the order that each exposed sampler stands for.

    """

    def __init__(self, dataset: Any, orders: Mapping[Path, Order | MaterializedOrder]) -> None:
        self.dataset = dataset
        self.orders = dict(orders)
        self._read: dict[str, Any] = {}  # the attributes of the copy that is being read
        self._known: dict[str, Any] = {}  # the same, as they were when the dataset got them last
        self._before: dict[str, Any] = {}  # the dataset's own when the copy was made

    def open(
        self, seed: int, epoch: int, sent: Sequence[Sent | None] | None = None
    ) -> tuple[Iterator[Any], list[_Driven]]:
        """A new iterator over the dataset, and the samplers that drive it, at the epoch's start.

        `sent`: for each sampler what the main process has sent of its list; None where it is computed here.
        """
        samplers, driven = exposed_samplers(self.dataset), {}
        for (path, order), part in zip(self.orders.items(), sent or (None,) * len(self.orders), strict=True):
            if part is None:
                orders = functools.partial(_order_of_pass, order, seed, epoch)
                driven[path] = _Driven(samplers[path], len(orders(0)), orders)
            else:
                driven[path] = _Driven(samplers[path], part.length, None, part.error)
        copied, self._before = raw_copy(self.dataset, driven), dict(getattr(self.dataset, "__dict__", {}))
        self._read = getattr(copied, "__dict__", {})
        self._known = dict(self._read)
        return iter(copied), list(driven.values())

    def leave(self) -> None:
        """Let the dataset have what reading has set on its copy, as a plain pass leaves it."""
        known = self._known
        for name, value in self._read.items():
            if name not in known or value is not known[name]:
                known[name] = value
                if type(value) is not _Draws:  # of our samplers
                    object.__setattr__(self.dataset, name, value)

    @property
    def is_current(self) -> bool:
        """Whether the dataset's attributes are those with which it was opened."""
        now, before = getattr(self.dataset, "__dict__", {}), self._before
        return now.keys() == before.keys() and all(value is before[name] for name, value in now.items())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read": {}, "_known": {}, "_before": {}}

    @property
    def lists(self) -> bool:
        """Whether some sampler has to be listed."""
        return any(isinstance(order, MaterializedOrder) for order in self.orders.values())

    def prepare(self, seed: int, epoch: int) -> None:
        """List the samplers whose order is not computed, for a pass that begins."""
        for order in self.orders.values():
            if isinstance(order, MaterializedOrder):
                order.begin(seed, epoch)

    def moved(self) -> None:
        """The loader was led elsewhere: the next pass asks the samplers again."""
        for order in self.orders.values():
            if isinstance(order, MaterializedOrder):
                order.moved("")

    def listed(self, seed: int, epoch: int) -> list[MaterializedEpoch | None]:
        """The list of each sampler in an epoch; None where the order is computed."""
        orders = self.orders.values()
        return [each.epoch(seed, epoch) if isinstance(each, MaterializedOrder) else None for each in orders]

    def crc(self, seed: int, epoch: int) -> str:
        """Of all lists of an epoch together, in eight digits; empty if every order is computed."""
        crcs = [each.crc for each in self.listed(seed, epoch) if each is not None]
        return f"{zlib.crc32(','.join(crcs).encode()):08x}" if crcs else ""

    def lengths(self, seed: int, epoch: int) -> list[int]:
        """The number of draws from each sampler in one epoch."""
        return [
            order.stated_length(seed, epoch) if isinstance(order, MaterializedOrder) else order.size
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

    @property
    def findings(self) -> list[Finding]:
        """What trials of the samplers that are listed have shown."""
        return [order.finding for order in self.orders.values() if isinstance(order, MaterializedOrder)]


def _order_of_pass(
    order: Order | MaterializedOrder, seed: int, epoch: int, number: int
) -> EpochOrder | MaterializedEpoch:
    """What a sampler gives when it is iterated again within one pass over its dataset; a list is kept as it is."""
    return order.epoch(seed if isinstance(order, MaterializedOrder) or not number else derive_key(seed, number), epoch)


class Sent(NamedTuple):
    """What a worker process gets of one sampler's list.

    Attributes:
        length: indices in the epoch.
        indices: those of each sample of the request, and of the one before if it resumes.
        error: of the sampler's own, which comes after its indices.
    """

    length: int
    indices: list[list[Any]]
    error: Exception | None


class DrivenRequest(NamedTuple):
    """A request for one batch of such an iterable: `units` positions from `start` on, out of `size`.

    Attributes:
        session: the run's session number.
        seed, epoch, start, units, size: as said.
        resumes: the epoch is continued here: the sample before is read, too, since it may not have been at its end.
        last: the reader gets no further one in this session.
        sent: for each sampler, what a worker cannot compute of its list; None if nothing has to be sent.
    """

    session: int
    seed: int
    epoch: int
    start: int
    units: int
    size: int
    resumes: bool
    last: bool
    sent: tuple[Sent | None, ...] | None = None


def driven_requests(
    run: Run,
    unchanged: Callable[[], None],
    draws: tuple[int, ...],
    lists: Sequence[MaterializedEpoch | None],
    readers: int,
    goes_on: Callable[[], bool],
) -> Iterator[DrivenRequest]:
    """The requests of one session.

    Args:
        run: the session's.
        unchanged: called before each request; raises if the source has changed.
        draws: indices that each sample draws from each sampler.
        lists: those whose indices are to be sent to workers; empty if none are.
        readers: that answer in turn.
        goes_on: whether there is another batch after those of the samplers.
    """
    share = run.share
    assert share is not None  # samplers have a length
    left, sends = share.steps, any(each is not None for each in lists)
    if not left and not run.position:
        # Less than a batch is left out of an epoch; a source that gives more than its samplers may make one of it.
        yield DrivenRequest(run.session, run.seed, run.epoch, 0, 0, share.size, False, True)
    for start, stop in spans(share):
        unchanged()
        left -= 1
        resumes = 0 < start == run.position
        request = DrivenRequest(
            run.session, run.seed, run.epoch, start, stop - start, share.size, resumes, left < readers
        )
        if sends:
            sent = (_part(each, count, request) for each, count in zip(lists, draws, strict=True))
            request = request._replace(sent=tuple(sent))
        yield request
    start = run.position + share.steps * share.batch_size
    while goes_on():
        yield DrivenRequest(run.session, run.seed, run.epoch, start, share.batch_size, share.size, False, False)
        start += share.batch_size


def _part(listed: MaterializedEpoch | None, count: int, request: DrivenRequest) -> Sent | None:
    if listed is None:
        return None
    positions = [*range(request.start, request.start + request.units), *([request.start - 1] * request.resumes)]
    places = [position % request.size * count for position in positions]
    return Sent(len(listed), [listed[place : place + count] for place in places], listed.error)


_COUNTING = -1  # the session of `DrivenReader.count`


class _Deviation(Exception):  # noqa: N818  # caught here
    """A sample did not follow from the samplers' positions as those before it.

    Attributes:
        why: in words that follow the source's name.
        items: the sample, if there was one.
    """

    def __init__(self, why: str, *items: Any) -> None:
        super().__init__(why)
        self.why, self.items = why, items


class DrivenReader:
    """Reads batches from an iterable that exposes its samplers, each sample after a jump and under its own stream.

    Args:
        driven: the dataset and its orders.
        collate: from a list of samples, or from one if `single`, to a batch.
        single: samples are handed out one by one.
        streams: False lets the dataset draw from the caller's generators.
        draws: indices that each sample draws from each sampler.
        proved: samples of this dataset have been counted. If not, `draws` comes from a state.
    """

    request = DrivenRequest

    def __init__(
        self,
        driven: Driven,
        collate: Callable[[Any], Any],
        single: bool,
        streams: bool,
        draws: tuple[int, ...] = (),
        proved: bool = False,
    ) -> None:
        self.dataset = driven.dataset
        self._driven, self._collate, self._single, self.draws, self._proved = driven, collate, single, draws, proved
        self._plain_collate = draws_nothing(collate)
        self._streams = Streams(driven.dataset, collate) if streams else None
        self._opened: tuple[int, int, int] | None = None  # session, seed, epoch
        self._source = Units(iter(()))
        self._iterator: Iterator[Any] | None = None
        self._samplers: list[_Driven] = []
        self._first: list[Any] = []  # the epoch's first sample, if `count` has read it and it has not been handed out

    def __call__(self, request: DrivenRequest) -> Any:
        """The batch.

        Raises:
            SourceError: a sample deviates from those before it, or the source does not end with its samplers.
        """
        try:
            if self._opened != request[:3]:
                self._begin(request)
            return self._batch(request)
        except BaseException:
            self._opened = None  # a generator cannot continue after an exception
            raise
        finally:
            self._driven.leave()

    def count(self, seed: int) -> str:
        """Read the first sample of epoch 0, and keep it for a pass that begins there. Sets `draws`.

        It is always epoch 0, so that every process that resumes comes to the same result.

        Returns:
            Why no sample can be jumped to; empty if it draws from a sampler.
        """
        request = DrivenRequest(_COUNTING, seed, 0, 0, 0, 0, False, False)
        try:
            self._begin(request)
            with self._under() as start:
                _put(start, request, 0)
                self._first = [self._source.next()]
        except StopIteration:
            return "it is empty"
        except BaseException:
            self._opened = None
            raise
        self.draws, self._proved = tuple(sampler.position for sampler in self._samplers), True
        if not any(self.draws):
            return "it does not use the samplers that it exposes"
        return "it begins a sampler again" if any(sampler.passes > 1 for sampler in self._samplers) else ""

    def _under(self) -> contextlib.AbstractContextManager[Callable[[int], None] | None]:
        return contextlib.nullcontext() if self._streams is None else self._streams

    def goes_on(self) -> bool:
        """Whether there may be batches after those that the samplers suffice for."""
        return False

    def _begin(self, request: DrivenRequest) -> None:
        counted = self._opened == (_COUNTING, request.seed, request.epoch) and self._driven.is_current
        if counted and not request.start:
            self._opened = request[:3]
            return
        with self._under() as start:
            if start is not None:
                start(derive_key(Purpose.OPENING, request.seed, request.epoch))
            self._open(request)
        if self._streams is not None:
            self._streams.begin_pass(self._iterator)

    def _open(self, request: DrivenRequest) -> None:
        self._iterator, self._samplers = self._driven.open(request.seed, request.epoch, request.sent)
        self._source = Units(self._iterator)
        self._opened = request[:3]
        self._first = []

    def _batch(self, request: DrivenRequest) -> Any:
        with self._under() as start:
            samples = self._samples(request, start)
        # If the iterator made a generator while it read, the batch is read again, after a jump back.
        if self._streams is not None and self._streams.made_late(self._iterator) and self._jumps:
            self._first = []
            with self._under() as start:
                samples = self._samples(request, start)
        if request.last:
            with self._under() as start:
                self._finish(request, samples, start)
        if not samples:
            raise StopIteration
        argument = samples[0] if self._single else samples
        if self._plain_collate:
            return self._collate(argument)
        with self._under() as start:
            if start is not None:
                start(derive_key(Purpose.BATCH, request.seed, request.epoch, request.start))
            return self._collate(argument)

    @property
    def _jumps(self) -> bool:
        return True

    def _samples(self, request: DrivenRequest, start: Callable[[int], None] | None) -> list[Any]:
        """Those of a request, in order."""
        try:
            if request.resumes:
                self._sample(request, -1, start)
            return [self._sample(request, number, start) for number in range(request.units)]
        except _Deviation as deviation:
            raise self._divided(deviation.why) from None

    def _finish(self, request: DrivenRequest, samples: list[Any], start: Callable[[int], None] | None) -> None:
        """Ask the source for one more, before the last batch of its epoch is handed out."""
        self._jump(request.size)
        self._opened = None  # it has ended
        try:
            self._one_more(request, start)
        except _Deviation as deviation:
            raise self._divided(deviation.why) from None

    def _jump(self, position: int) -> None:
        for sampler, count in zip(self._samplers, self.draws, strict=True):
            sampler.position = position * count

    def _sample(self, request: DrivenRequest, number: int, start: Callable[[int], None] | None) -> Any:
        """One sample of a request, after a jump to it."""
        position = (request.start + number) % request.size
        if self._first and not position:
            return self._first.pop()
        _put(start, request, position)
        self._jump(position)
        if request.sent is not None:
            for sampler, count, sent in zip(self._samplers, self.draws, request.sent, strict=True):
                if sent is not None:
                    sampler.put(position * count, sent.indices[number])
        return self._counted(position, request.size)

    def _counted(self, position: int, size: int) -> Any:
        """The sample that follows, if it draws as many indices as those before it."""
        samplers = self._samplers
        try:
            items: tuple[Any, ...] = (self._source.next(),)
        except StopIteration:
            if not any(sampler.exceeded for sampler in samplers):
                raise _Deviation(f"ended after {position} samples, and its samplers are enough for {size}") from None
            items = ()
        for sampler, count in zip(samplers, self.draws, strict=True):
            if sampler.position != (position + 1) * count or sampler.passes > 1 or not items:
                drawn = f"{sampler.position - position * count}" if items else f"more than {count}"
                if not self._proved:  # of a resumed pass, this is the sample before the state's position
                    raise SourceError(
                        f"{type(self.dataset).__name__} drew {drawn} indices from a sampler for sample {position}, but "
                        f"the state was saved with {count} per sample: restore the dataset that it was saved with, or "
                        "start over"
                    )
                drew = f"drew {drawn} indices from a sampler for sample {position}, and {count} for each one before"
                raise _Deviation("began a sampler again" if sampler.passes > 1 else drew, *items)
        self._proved = True
        return items[0]

    def _one_more(self, request: DrivenRequest, start: Callable[[int], None] | None) -> None:
        _put(start, request, request.size)
        try:
            item = self._source.next()
        except StopIteration:
            return
        raise _Deviation("gave a sample after the last index of its samplers", item)

    def _divided(self, why: str) -> SourceError:
        worker = get_worker_info()
        return SourceError(
            f"{type(self.dataset).__name__} {why}{'' if worker is None else f' (in worker {worker.id})'}, but its "
            "indices are divided among ranks or workers: pass shard=True, with which every process reads all of it and "
            "keeps its part, or shard=False if it divides itself"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens its own.
        own: dict[str, Any] = {"_opened": None, "_iterator": None, "_samplers": [], "_first": []}
        return {**self.__dict__, **own, "_source": Units(iter(()))}


class AloneReader(DrivenReader):
    """The same where one process reads the whole epoch, itself: it goes on after a deviation, without jumps.

    Args:
        batch_size: samples in a batch.
        drop_last: leave out a last batch that is not full.
        tell: called with the reason when a sample deviates, before the sample is handed out.
        arguments: of a `DrivenReader`.

    Attributes:
        varies: a sample of this pass has deviated.
        missing: samples by which its last batch was short.
    """

    def __init__(self, batch_size: int, drop_last: bool, tell: Callable[[str], None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._batch_size, self._drop_last, self._tell = batch_size, drop_last, tell
        self.varies, self.missing = False, 0
        self._jumped = False  # this pass began within its epoch
        self._read = 0  # samples of the epoch before the one that comes next
        self._held: list[Any] = []  # samples that were read and not handed out

    def _open(self, request: DrivenRequest) -> None:
        super()._open(request)
        self.varies, self.missing, self._held = False, 0, []
        self._jumped, self._read = request.start > 0, request.start

    def goes_on(self) -> bool:
        """After a deviation."""
        return self.varies

    @property
    def _jumps(self) -> bool:
        return not self.varies

    def _samples(self, request: DrivenRequest, start: Callable[[int], None] | None) -> list[Any]:
        """Those of a request; after a deviation, a full batch of what follows. StopIteration if there is none."""
        samples: list[Any] = []
        if request.resumes and not self.varies:
            self._sample(request, -1, start)
        for number in range(0 if self.varies else request.units):
            self._read = request.start + number
            try:
                samples.append(self._sample(request, number, start))
            except _Deviation as deviation:
                self._deviate(request, deviation, start)
                break
            self._read += 1
        if self.varies:
            self._fill(request, samples, start)
        return samples

    def _finish(self, request: DrivenRequest, samples: list[Any], start: Callable[[int], None] | None) -> None:
        """Ask for one more; with `drop_last`, after the samples that no batch is made of."""
        if self.varies:
            return
        left_out: list[Any] = []
        try:
            for number in range(request.units, request.size - request.start):
                left_out.append(self._sample(request, number, start))
                self._read += 1
            self._one_more(request, start)
        except _Deviation as deviation:
            self._deviate(request, deviation, start)
            self._held = left_out + self._held
            self._fill(request, samples, start)

    def _deviate(self, request: DrivenRequest, deviation: _Deviation, start: Callable[[int], None] | None) -> None:
        """Go on without jumps. A pass that has jumped is read again from its start up to here."""
        if self._jumped:
            read = self._read
            if start is not None:
                start(derive_key(Purpose.OPENING, request.seed, request.epoch))
            self._open(request)
            self._read = 0
            for _ in range(read):
                if not self._next(request, start):
                    raise SourceError(
                        f"{type(self.dataset).__name__} ended after {self._read} samples, and gave {read} before: it "
                        "does not repeat itself; seed it, or start over with this data"
                    )
                self._held.clear()
            self._jumped = False
        else:
            self._held.extend(deviation.items)
            self._read += len(deviation.items)
        self.varies = True
        self._tell(deviation.why)

    def _next(self, request: DrivenRequest, start: Callable[[int], None] | None) -> bool:
        """Read one more sample, wherever the samplers are. False at the end."""
        _put(start, request, self._read)
        try:
            self._held.append(self._source.next())
        except StopIteration:
            return False
        self._read += 1
        return True

    def _fill(self, request: DrivenRequest, samples: list[Any], start: Callable[[int], None] | None) -> None:
        """Let `samples` be a full batch, as far as the source goes."""
        while len(samples) < self._batch_size and (self._held or self._next(request, start)):
            samples.append(self._held.pop(0))
        self.missing = self._batch_size - len(samples)
        if not samples or (self._drop_last and self.missing):
            raise StopIteration


def _put(start: Callable[[int], None] | None, request: DrivenRequest, position: int) -> None:
    """Begin the random stream of a sample."""
    if start is not None:
        start(extend_key(derive_key(Purpose.SAMPLE, request.seed, request.epoch), position))
