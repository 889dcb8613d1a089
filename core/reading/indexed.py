"""Sources that can be indexed: requests for batches, and the reader that answers them.

A session sends requests. A reader answers them, in the main process or in a worker process that holds a copy of it. A
request contains everything that its batch depends on. So a reader has no progress to save, and whichever worker gets a
request, the batch is the same.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
from torch.utils.data import StackDataset, Subset

from ..errors import SourceError
from ..loader.adapter import Run
from ..order import EpochOrder
from ..order.holes import Holes, pieces_of
from ..order.keys import derive_key, derive_keys, extend_key
from ..randomness.streams import Purpose, Start, Streams
from ..samplers import MaterializedEpoch
from ..state.witness import SampleSummary, is_inert, summary_of
from ..trying import CallTrial
from ..world import MicroShare, Share
from .collating import draws_nothing, keeps_nothing
from .looks import Looks
from .sessions import FirstBatch, WitnessRequest

__all__ = ["MapReader", "MapRequest", "Samples", "as_list", "map_requests", "reads_whole_batches", "spans", "unchanged"]

_KEY_BLOCK = 8192  # keys that are derived at once, at most
_NO_KEYS = np.empty(0, np.uint64)
_MOST_AHEAD = 2048  # indices of requests that are made in a row


class MapRequest(NamedTuple):
    """A request for one batch of a source that can be indexed.

    Attributes:
        seed, epoch: of the random streams.
        start: position of the batch's first unit.
        size: positions in the epoch. Positions beyond it repeat the epoch's beginning.
        indices: for the dataset, in order.
        session: the run's session number.
        left: requests of this run that are still to come.
        look: samples to look at; None for all but the first request of a session.
        positions: of the units; None if they follow each other from `start` on.
    """

    seed: int
    epoch: int
    start: int
    size: int
    indices: list[Any]
    session: int
    left: int
    look: WitnessRequest | None = None
    positions: list[int] | None = None


class Samples:
    """The samples of one epoch. Each can be looked at alone, in any order, as often as one likes.

    Attributes:
        units: in the epoch: samples, or batches of a user's batch sampler.
        listed: the CRC of the epoch's list; empty if the order is computed.
    """

    def __init__(
        self,
        order: EpochOrder | MaterializedEpoch,
        listed_batches: bool,
        look: Callable[[Any, int, int], SampleSummary | None],
    ) -> None:
        self.units = len(order)
        self.listed = order.crc if isinstance(order, MaterializedEpoch) else ""
        self._order, self._listed_batches, self._look = order, listed_batches, look

    def indices(self, unit: int) -> list[Any]:
        """The indices of the samples in a unit."""
        (index,) = as_list(self._order[unit : unit + 1])
        return list(index) if self._listed_batches else [index]

    def look(self, unit: int, place: int) -> SampleSummary | None:
        """What the sample at this place of a unit looks like; None if it could not be read."""
        return self._look(self.indices(unit)[place], unit, place)


def spans(share: Share) -> Iterator[tuple[int, int]]:
    """``share.span(step)`` for every step, at a fraction of the cost."""
    if isinstance(share, MicroShare):
        return map(share.span, range(share.steps))
    full, global_batch = min(share.full_steps, share.steps), share.global_batch
    start = share.start + share.world.rank * share.batch_size
    starts = range(start, start + full * global_batch, global_batch)
    stops = range(start + share.batch_size, start + share.batch_size + full * global_batch, global_batch)
    return itertools.chain(zip(starts, stops, strict=True), map(share.span, range(full, share.steps)))


def map_requests(
    run: Run, order: EpochOrder | MaterializedEpoch, unchanged: Callable[[], None], listed_batches: bool = False
) -> Iterator[MapRequest]:
    """The requests of one session. `unchanged` is called before each, and raises if the source has changed.

    With `listed_batches` each unit of the order is one batch's list of indices.
    """
    share = run.share
    assert share is not None  # what can be indexed has a size
    places, holes = share.size, run.holes
    seed, epoch, session, left, size = run.seed, run.epoch, run.session, share.steps, places
    batches = _in_a_row
    if holes.total:
        size, batches = places + holes.total, functools.partial(_around, holes, run.skipped)
    looks = bool(run.looks and places)
    # Several are made in a row: between two batches of a loader with workers, code and data leave the processor's
    # caches, and each line takes ten times as long.
    made = functools.partial(tuple.__new__, MapRequest)  # at a third of what the type itself takes
    every, count = spans(share), 1
    while block := list(itertools.islice(every, count)):
        requests = []
        for start, indices, positions in batches(order, places, block):
            left -= 1
            look = None
            if looks:
                index = indices[0] if start == 0 else as_list(order[0:1])[0]
                if listed_batches:  # looks at nothing where the first one is empty
                    index = next(iter(index), None)
                look, looks = None if index is None else WitnessRequest.of(run, index), False
            batch = list(indices[0]) if listed_batches else indices
            requests.append(made((seed, epoch, start, size, batch, session, left, look, positions)))
        for request in requests:
            unchanged()
            yield request
        count = min(2 * count, max(1, _MOST_AHEAD // share.batch_size))


_Batch = tuple[int, list[Any], list[int] | None]
"""Position of a batch's first unit, indices of its units, and their positions; None if they follow each other."""


def _in_a_row(order: EpochOrder | MaterializedEpoch, size: int, block: list[tuple[int, int]]) -> list[_Batch]:
    """The batches with these spans. Positions beyond the epoch repeat its beginning."""
    first, last = block[0][0], min(block[-1][1], size)
    # Without other ranks' positions between them, one slice of the order has all of them.
    near = as_list(order[first:last]) if 0 < last - first <= _MOST_AHEAD else None
    batches: list[_Batch] = []
    for start, stop in block:
        if near is not None:
            indices = near[start - first : stop - first]
        else:
            indices = as_list(order[start : min(stop, size)]) if start < size else []
        for position in range(max(start, size), stop) if stop > size else ():
            indices.extend(as_list(order[position % size : position % size + 1]))
        batches.append((start, indices, None))
    return batches


def _around(
    holes: Holes, skipped: Holes, order: EpochOrder | MaterializedEpoch, places: int, block: list[tuple[int, int]]
) -> list[_Batch]:
    """The same around positions that are left out: the spans are of places."""
    cut = [pieces_of(start, stop, places, holes, skipped) for start, stop in block]  # each batch, in pieces
    row = _listed(order, [piece for pieces in cut for piece in pieces])
    batches: list[_Batch] = []
    for (start, _), pieces in zip(block, cut, strict=True):
        positions = [position for first, stop in pieces for position in range(first, stop)]
        indices = list(itertools.islice(row, len(positions)))
        batches.append((positions[0] if start < places else start + holes.total, indices, positions))
    return batches


def _listed(order: EpochOrder | MaterializedEpoch, pieces: list[tuple[int, int]]) -> Iterator[Any]:
    """The indices at some positions. One slice costs less than several, so it may have others in between."""
    first, row = 0, list[Any]()
    for start, stop in pieces:
        if not first <= start < stop <= first + len(row):
            near = [end for begin, end in pieces if start <= begin and end - start <= _MOST_AHEAD]
            first, row = start, as_list(order[start : max([stop, *near])])
        yield from row[start - first : stop - first]


def as_list(indices: Any) -> list[Any]:
    """A slice of an order as a list of Python objects."""
    return indices if isinstance(indices, list) else cast(list[Any], indices.tolist())


class MapReader:
    """Reads batches through ``__getitem__``, with all generators seeded for each sample.

    Args:
        dataset: as the user made it.
        collate: from a list of samples to a batch.
        single: a request is one sample, not a list of them (``DataLoader(batch_size=None)``).
        listed_batches: the unit is a whole batch; a sample's stream depends on its place in the batch.
        streams: False lets the dataset use the caller's generators, as without midepoch.
    """

    request = MapRequest

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], single: bool, listed_batches: bool, streams: bool
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._single = single
        self._listed_batches = listed_batches
        self._whole = reads_whole_batches(dataset) and not single
        self._plain_collate = draws_nothing(collate)
        self._streams = Streams(dataset, *(() if self._plain_collate else (collate,))) if streams else None
        self._looks = Looks(dataset, self._whole, self._streams)
        self._session: int | None = None
        self._key_block = _NO_KEYS  # of consecutive positions: a numpy call costs more than its work
        self._key_block_start = 0

    def __call__(self, request: MapRequest) -> Any:
        """The batch."""
        streams = self._streams
        if streams is not None and self._session != request.session:
            self._session, self._key_block = request.session, _NO_KEYS
            streams.begin_pass(rest=derive_key(Purpose.REST, request.seed, request.epoch))
        if request.look is not None:
            return self._first_batch(request, request.look)
        if streams is None:
            return self._read(request, None)
        return streams.read(functools.partial(self._read, request))

    def _first_batch(self, request: MapRequest, look: WitnessRequest) -> FirstBatch:
        """The session's first batch, and what was seen of samples and of the collate function with it."""
        collate, looks = self._collate, self._looks
        key = self._key_at(request.seed, request.epoch)
        keeps = not keeps_nothing(collate)
        trial = CallTrial(collate, listed=not self._single) if look.collate and keeps else None
        self._collate = trial or collate
        try:
            read = functools.partial(self._read, request)
            batch, one = looks.with_batch(read, key, look.index, not request.start)
        finally:
            self._collate = collate
        finding = None
        if trial is not None:
            finding = trial.finding(derive_key(Purpose.TRIAL, request.seed, request.epoch))
            finding = finding.of_calls("the collate function", "the same samples")
        copied = None
        if (self._single or keeps) and is_inert(batch):  # otherwise the samples were copied
            with contextlib.suppress(Exception):  # of torch's, for one: nested tensors cannot be copied
                copied = copy.deepcopy(batch)  # a dataset may fill one buffer at each read, and hand that out
        seen = looks.report(look, one, key, lambda epoch: self._key_at(request.seed, epoch))
        if copied is not None and summary_of(copied).differing(summary_of(batch)):
            batch = copied
        return FirstBatch(batch, replace(seen, collate=finding))

    def samples(self, order: EpochOrder | MaterializedEpoch, seed: int, epoch: int) -> Samples:
        """The samples of an epoch, one by one, as this reader reads them."""
        if self._streams is not None:
            self._streams.begin_pass(rest=derive_key(Purpose.REST, seed, epoch))
        return Samples(order, self._listed_batches, functools.partial(self._look_alone, seed, epoch))

    def _look_alone(self, seed: int, epoch: int, index: Any, position: int, place: int) -> SampleSummary | None:
        return self._looks.alone(self._key_at(seed, epoch, position, place), index)[0]

    def _key_at(self, seed: int, epoch: int, position: int = 0, place: int = 0) -> int:
        """Of the stream of a sample that is read alone. `place`: in its batch, if the position is a batch's."""
        key = derive_key(Purpose.BATCH if self._whole else Purpose.SAMPLE, seed, epoch, position)
        if self._listed_batches and not self._whole:
            return int(derive_keys(key, np.arange(place + 1))[place])
        return key

    def _read(self, request: MapRequest, start: Start | None, see: Callable[[Any], None] | None = None) -> Any:
        """Read the batch.

        Args:
            request: for it.
            start: seeds the generators with each sample's key; None if they stay as they are.
            see: called with the first sample, as read.
        """
        dataset, indices = self.dataset, request.indices
        if self._whole:
            if start is not None:
                start(derive_key(Purpose.BATCH, request.seed, request.epoch, request.start))
            samples = dataset.__getitems__(indices)
        elif start is None:
            samples = list(map(operator.getitem, itertools.repeat(dataset), indices))
            if len(samples) < len(indices):  # a StopIteration of the dataset's own ends `map`
                raise StopIteration
        else:
            samples = []
            for key, index in zip(self._keys(request), indices, strict=True):
                start(key)
                samples.append(dataset[index])
                if see is not None:
                    see(samples[0])
                    see = None
        if start is not None and not self._plain_collate:
            start(derive_key(Purpose.BATCH, request.seed, request.epoch, request.start, Purpose.BATCH))
        return self._collate(samples[0] if self._single else samples)

    def _keys(self, request: MapRequest) -> list[int]:
        start, count, positions = request.start, len(request.indices), request.positions
        place, derived = start - self._key_block_start, self._key_block
        if positions is not None or not 0 <= place <= len(derived) - count:
            key = derive_key(Purpose.SAMPLE, request.seed, request.epoch)
            if self._listed_batches:
                return cast(list[int], derive_keys(extend_key(key, start % request.size), np.arange(count)).tolist())
            if positions is not None:
                return cast(list[int], derive_keys(key, np.array(positions)).tolist())
            # One of many ranks reads a few positions in every so many: then fewer than four batches would need them.
            ahead = min(_KEY_BLOCK, request.size - start) if 0 <= place <= _KEY_BLOCK // 4 else 0
            derived = derive_keys(key, np.arange(start, start + max(count, ahead)) % max(request.size, 1))
            self._key_block, self._key_block_start, place = derived, start, 0
        return cast(list[int], derived[place : place + count].tolist())


def reads_whole_batches(dataset: Any) -> bool:
    """Whether ``__getitems__`` does more than call ``__getitem__`` for each index, and so must be called.

    torch's Subset and StackDataset only pass the indices on. Read one by one, each sample keeps its own stream.
    """
    passed_on = getattr(type(dataset), "__getitems__", None)
    if passed_on is Subset.__getitems__:
        return reads_whole_batches(dataset.dataset)
    if passed_on is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(map(reads_whole_batches, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


def unchanged(source: Any, expected: int | None) -> Callable[[], None]:
    """A check for before each request: it raises SourceError once the length of `source` is not `expected`."""
    return functools.partial(_check_length, source, expected)


def _check_length(source: Any, expected: int | None) -> None:
    try:
        length = None if expected is None else len(source)
    except Exception:  # noqa: BLE001  # as in `length_of`, written out where batches lead through
        length = None
    if length != expected:
        raise SourceError(
            f"the source had {expected} items when this pass began and has {length} now: change it only between epochs"
        )
