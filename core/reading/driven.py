"""Iterables that expose their samplers: to jump within an epoch, set the positions at which the samplers continue.

The pattern is that of a dataset which keeps ``self.sampler`` and, in ``__iter__``, ``self.sampler_iter =
iter(self.sampler)``.
midepoch iterates a copy of the dataset in which the samplers are its own. A jump is exact only if each sample draws a
constant number of indices from each sampler. So draws are counted, first by `probe` and then at every sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import Sampler, get_worker_info

from midepoch.copying import copy_apart
from midepoch.errors import SourceError
from midepoch.loader.adapter import Run
from midepoch.order import EpochOrder, Order
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.samplers import Listed, ListedEpoch, length_of
from midepoch.state.checksum import checksum_of

from .indexed import as_list, draws_nothing, spans
from .private import is_place_holder, let_go

__all__ = [
    "RAW",
    "Driven",
    "DrivenReader",
    "DrivenRequest",
    "Path",
    "Probed",
    "driven_requests",
    "exposed_samplers",
    "probe",
    "raw_copy",
]

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
    """

    _AHEAD = 256  # positions taken from the order at once

    def __init__(self, original: Any, order: EpochOrder | ListedEpoch) -> None:
        self._original = original
        self._order = order
        self._length = len(order)
        self._error = order.error if isinstance(order, ListedEpoch) else None
        self._chunk: list[Any] = []
        self._chunk_start = 0
        self.position = 0
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        if self.passes > 1:
            self.position = 0  # as a sampler does; `probe` and the reader notice
        return _Draws(self.draw)

    def draw(self) -> Any:
        """The next index."""
        position = self.position
        if position >= self._length:
            raise StopIteration if self._error is None else self._error
        place = position - self._chunk_start
        if not 0 <= place < len(self._chunk):
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

    def __init__(self, dataset: Any, orders: Mapping[Path, Order | Listed]) -> None:
        self.dataset = dataset
        self.orders = dict(orders)

    def open(self, seed: int, epoch: int) -> tuple[Iterator[Any], list[_Driven]]:
        """A new iterator over the dataset, and the samplers that drive it, at the epoch's start."""
        samplers = exposed_samplers(self.dataset)
        driven = {path: _Driven(samplers[path], order.epoch(seed, epoch)) for path, order in self.orders.items()}
        return iter(raw_copy(self.dataset, driven)), list(driven.values())

    def lengths(self, seed: int, epoch: int) -> list[int]:
        """The number of draws from each sampler in one epoch."""
        return [
            order.length(seed, epoch) if isinstance(order, Listed) else order.size for order in self.orders.values()
        ]

    def size(self, draws: tuple[int, ...], seed: int, epoch: int) -> int:
        """Samples in one epoch, given the draws of one sample from each sampler."""
        lengths = self.lengths(seed, epoch)
        return min(length // draw for length, draw in zip(lengths, draws, strict=True) if draw)


class Probed(NamedTuple):
    """What `probe` has found.

    Attributes:
        draws: of one sample from each sampler; None if a jump would not be exact.
        why: the reason.
        unseen: the names of types whose content could not be compared.
    """

    draws: tuple[int, ...] | None
    why: str
    unseen: tuple[str, ...] = ()


def probe(driven: Driven, seed: int) -> Probed:
    """The draws of one sample from each sampler, if a jump is exact.

    Reads samples 0, 1 and 2 in a row, and sample 1 again after a jump, all from a copy: the dataset itself may hold an
    iterator that has begun. If the counts are constant and both samples 1 are equal, the dataset is believed to depend
    on its samplers alone. Later samples are counted as they are read. The caller's generators stay unchanged.
    """
    copied = copy_apart(driven.dataset, may_use_globals=True)
    if copied.value is None:
        return Probed(None, f"its samplers cannot be tried on a copy: {copied.why}")
    try:
        return _probe(Driven(copied.value, driven.orders), seed)
    finally:
        for loader in copied.loaders:
            let_go(loader)


def _probe(driven: Driven, seed: int) -> Probed:
    guard = Streams(driven.dataset)
    reader = _Counting(driven, guard, seed)
    first = reader.read(0)
    if first is None:
        return Probed(None, "it is empty")
    draws = first.draws
    if not any(draws):
        return Probed(None, "it does not use the samplers that it exposes")
    size = driven.size(draws, seed, 0)
    if length_of(driven.dataset) not in (None, size):
        why = f"its len() is {length_of(driven.dataset)}, but its samplers are enough for {size} samples"
        return Probed(None, why)
    following = [reader.read(position) for position in range(1, min(size, 3))]
    for sample in following:
        if sample is None or sample.draws != draws or sample.restarted:
            return Probed(None, "its samples do not draw a constant number of indices from its samplers")
    if following:
        jumped = _Counting(driven, guard, seed).read(1, draws)
        in_a_row = following[0]
        assert in_a_row is not None  # by the loop above
        if jumped is None or jumped.draws != draws or jumped.digest != in_a_row.digest:
            return Probed(None, "it counts on its own, besides its samplers")
        for name, value in in_a_row.places.items():
            if jumped.places.get(name, value) != value:
                return Probed(None, f"it counts on its own, besides its samplers, in {name}")
    told = f"each sample draws {', '.join(map(str, draws))} indices from its samplers"
    return Probed(draws, told, first.unseen)


class _Counted(NamedTuple):
    draws: tuple[int, ...]
    restarted: bool
    digest: str
    places: dict[str, str]  # values with which the iterator may count, after the sample
    unseen: tuple[str, ...]


class _Counting:
    """Reads single samples of epoch 0 and counts their draws."""

    def __init__(self, driven: Driven, guard: Streams, seed: int) -> None:
        self._guard, self._key = guard, derive_key(Purpose.SAMPLE, seed, 0)
        with guard.under(derive_key(Purpose.OPENING, seed, 0)):
            self._iterator, self._samplers = driven.open(seed, 0)
        guard.begin_pass(self._iterator)

    def read(self, position: int, jump: tuple[int, ...] | None = None) -> _Counted | None:
        if jump is not None:
            for sampler, draws in zip(self._samplers, jump, strict=True):
                sampler.position = position * draws
        before = [sampler.position for sampler in self._samplers]
        counted = self._count(position, before)
        if counted is None or not self._guard.made_late(self._iterator):
            return counted
        for sampler, start in zip(self._samplers, before, strict=True):
            sampler.position = start
        return self._count(position, before)

    def _count(self, position: int, before: list[int]) -> _Counted | None:
        with self._guard.under(extend_key(self._key, position)):
            try:
                item = next(self._iterator)
            except StopIteration:
                return None
        drawn = tuple(sampler.position - start for sampler, start in zip(self._samplers, before, strict=True))
        restarted = any(sampler.passes > 1 for sampler in self._samplers)
        unseen: dict[str, None] = {}
        return _Counted(drawn, restarted, checksum_of(item, unseen), _places(self._iterator), tuple(unseen))


def _places(iterator: Any) -> dict[str, str]:
    """The plain values that an iterator keeps between samples: its attributes, or a generator's variables.

    A jump does not update such a value, for instance a count of samples, on which a much later sample may depend.
    """
    frame = getattr(iterator, "gi_frame", None)
    kept = {} if frame is None else dict(frame.f_locals)
    holder = kept.pop("self", iterator)
    kept |= {f"self.{name}": value for name, value in getattr(holder, "__dict__", {}).items()}
    plain = bool | int | float | str | bytes | None
    return {name: repr(value) for name, value in kept.items() if isinstance(value, plain)}


class DrivenRequest(NamedTuple):
    """A request for one batch of such an iterable: `units` positions from `start` on, out of `size`.

    `session` and `left` are those of a `MapRequest`.
    """

    session: int
    seed: int
    epoch: int
    start: int
    units: int
    size: int
    left: int


def driven_requests(run: Run, unchanged: Callable[[], None]) -> Iterator[DrivenRequest]:
    """The requests of one session."""
    share = run.share
    assert share is not None  # samplers have a length
    left = share.steps
    for start, stop in spans(share):
        unchanged()
        left -= 1
        yield DrivenRequest(run.session, run.seed, run.epoch, start, stop - start, share.size, left)


class DrivenReader:
    """Reads batches from an iterable that exposes its samplers, each sample under its own random stream.

    Args:
        driven: the dataset and its orders.
        draws: indices that each sample draws from each sampler.
        collate: from a list of samples, or from one if `single`, to a batch.
        single: samples are handed out one by one.
        streams: False lets the dataset draw from the caller's generators.
        alone: no other process reads this epoch. Then the rest can still be read in a row after a sample that draws
            another number.
        proved: samples of this dataset have been counted. If not, `draws` comes from a state.
    """

    request = DrivenRequest

    def __init__(
        self,
        driven: Driven,
        draws: tuple[int, ...],
        collate: Callable[[Any], Any],
        single: bool,
        streams: bool,
        alone: bool,
        proved: bool,
    ) -> None:
        self.dataset = driven.dataset
        self._driven, self._draws, self._collate, self._single, self._alone = driven, draws, collate, single, alone
        self._plain_collate = draws_nothing(collate)
        self._streams = Streams(driven.dataset, collate) if streams else None
        self._opened: tuple[int, int, int] | None = None  # session, seed, epoch
        self._iterator: Iterator[Any] = iter(())
        self._samplers: list[_Driven] = []
        self._proved = proved
        self.varies = False

    def __call__(self, request: DrivenRequest) -> Any:
        """The batch. Raises StopIteration if an epoch that `varies` ends early."""
        streams = self._streams
        if self._opened != request[:3]:
            if streams is None:
                self._open(request)
            else:
                with streams.under(derive_key(Purpose.OPENING, request.seed, request.epoch)):
                    self._open(request)
                streams.begin_pass(self._iterator)
        if streams is None:
            return self._read(request, None)
        batch = self._read_under(request, streams)
        # If the iterator made a generator while it read, the batch is read again, after a jump back.
        if streams.made_late(self._iterator) and not self.varies:
            batch = self._read_under(request, streams)
        return batch

    def _read_under(self, request: DrivenRequest, streams: Streams) -> Any:
        try:
            with streams as start:
                return self._read(request, start)
        except BaseException:
            self._opened = None  # a generator cannot continue after an exception
            raise

    def _read(self, request: DrivenRequest, start: Callable[[int], None] | None) -> Any:
        sample_key = derive_key(Purpose.SAMPLE, request.seed, request.epoch)
        samples = []
        for place in range(request.start, request.start + request.units):
            position = place % request.size
            if start is not None:
                start(extend_key(sample_key, position))
            try:
                samples.append(self._sample(position))
            except StopIteration:
                if self.varies:
                    break
                raise SourceError(
                    f"{type(self.dataset).__name__} ended at sample {position} of {request.size}, before its samplers: "
                    "let it read until they end, give it a __len__, or wrap a generator function that reads it"
                ) from None
        if not samples:
            raise StopIteration
        if start is not None and not self._plain_collate:
            start(derive_key(Purpose.BATCH, request.seed, request.epoch, request.start))
        return self._collate(samples[0] if self._single else samples)

    def _open(self, request: DrivenRequest) -> None:
        self._iterator, self._samplers = self._driven.open(request.seed, request.epoch)
        self._opened = request[:3]
        self.varies = False

    def _sample(self, position: int) -> Any:
        samplers, draws = self._samplers, self._draws
        if not self.varies:
            for sampler, count in zip(samplers, draws, strict=True):
                sampler.position = position * count
        item = next(self._iterator)
        for sampler, count in zip(samplers, draws, strict=True):
            if sampler.position != (position + 1) * count or sampler.passes > 1:
                self._broken(position, sampler.position - position * count, count)
                return item
        self._proved = True
        return item

    def _broken(self, position: int, drawn: int, count: int) -> None:
        # After a load: either this sample differs from the others, or the whole dataset has changed.
        if not self._proved and (self._opened is None or probe(self._driven, self._opened[1]).draws != self._draws):
            raise SourceError(
                f"{type(self.dataset).__name__} drew {drawn} indices from a sampler for sample {position}, but the "
                f"state was saved with {count} per sample: restore the dataset that it was saved with, or start over"
            )
        self._proved = True
        if self._alone:
            self.varies = True
            return
        worker = get_worker_info()
        raise SourceError(
            f"{type(self.dataset).__name__} drew {drawn} indices from a sampler for sample {position}, and {count} for "
            f"each one before{'' if worker is None else f' (in worker {worker.id})'}: if it divides its samplers among "
            "workers or ranks itself, leave that to midepoch or pass shard=False; if its samples draw different "
            "numbers, wrap a generator function that reads it, with shard=True"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens its own.
        return {**self.__dict__, "_opened": None, "_iterator": None, "_samplers": []}
