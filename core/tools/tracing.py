"""What a step was trained on, and which steps were trained on a sample: computed from the entries of a ledger."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..checkpoint.entries import Entry
from ..errors import UnsupportedSourceError
from ..order import MAXIMUM_SIZE, Order
from ..order.described import order_of, positions_of
from ..world import MicroShare, Share
from .ledgers import Stretch

__all__ = ["Batch", "Listing", "Sight", "batches_at", "indices_of", "runs_of", "sights_of"]

_MOST = 10_000_000  # positions of one step, and epochs in which a sample is looked for


class Batch(NamedTuple):
    """A batch of one rank.

    Attributes:
        rank, epoch: whose, and of which epoch.
        step: in this epoch since its beginning, or since a resume within it.
        positions: of its samples, in order.
        weight: its loss counts for nothing if this is 0: the rank had no sample of a global batch left.
    """

    rank: int
    epoch: int
    step: int
    positions: list[int]
    weight: float


class Sight(NamedTuple):
    """A sample in a batch."""

    step: int
    rank: int
    epoch: int
    position: int


class Listing(Protocol):
    """What stands for an order that no description computes: the samples of a source's epochs."""

    def __call__(self, entry: Entry, epoch: int) -> list[list[Any]]:
        """The indices of the samples at each position."""


def batches_at(stretch: Stretch, step: int, rank: int) -> Iterator[Batch]:
    """The batches that a step took on a rank.

    Raises:
        ValueError: there is no such rank, or the entry cannot be true.
        UnsupportedSourceError: the samples cannot be computed.
    """
    entry = stretch.entry
    _check(entry)
    if not 0 <= rank < entry.world_size:
        raise ValueError(f"rank {rank} did not take part in step {step}: name one below {entry.world_size}")
    first = entry.given + (step - 1 - entry.step) * entry.each
    for number in range(first, first + entry.each):
        epoch, at = entry.locate(number)
        share, holes = entry.share(epoch, rank), entry.holes(epoch)
        if at < share.steps:
            places = np.arange(*share.span(at), dtype=np.int64) % share.size
            positions = list(map(holes.position_of, places.tolist())) if holes.total else places.tolist()
            yield Batch(rank, epoch, at, positions, share.weight(at))


def _check(entry: Entry) -> None:
    if entry.unknown:
        raise UnsupportedSourceError(
            f"the samples of {entry.loader} cannot be computed ({entry.unknown}): ask for another loader"
        )
    if max(entry.each * entry.batch_size, entry.world_size) > _MOST:
        raise ValueError(
            f"no run has steps of {entry.each} batches of {entry.batch_size} on {entry.world_size} ranks: restore the "
            "ledger"
        )


def _order(entry: Entry) -> Order | None:
    """The order, if the entry says enough to compute it."""
    try:
        described = json.loads(entry.fingerprint)
        return order_of(described["order"], entry.size) if described["unit"] != "batch" else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def indices_of(entry: Entry, epoch: int, positions: list[int], listing: Listing | None) -> list[Any]:
    """The indices of the samples at positions of an epoch, in order.

    Raises:
        UnsupportedSourceError: the order is not computed, and there is no listing.
    """
    order = _order(entry)
    if order is None:
        listed = _listed(entry, epoch, listing)
        return [index for position in positions for index in listed[position]]
    computed = order.epoch(entry.seed, epoch)
    return [index for first, last in runs_of(positions) for index in computed[first : last + 1].tolist()]


def runs_of(positions: list[int]) -> list[tuple[int, int]]:
    """The first and the last of positions that follow each other."""
    cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [(positions[first], positions[last - 1]) for first, last in itertools.pairwise(cuts) if first < last]


def _listed(entry: Entry, epoch: int, listing: Listing | None) -> list[list[Any]]:
    if listing is None:
        raise UnsupportedSourceError(
            f"the order of {entry.loader} is that of its sampler, and no ledger has it: pass --source MODULE:LOADER"
        )
    return listing(entry, epoch)


def sights_of(stretch: Stretch, index: int, listing: Listing | None) -> Iterator[Sight]:
    """The steps and ranks of a stretch that were given a sample, by steps.

    Raises:
        ValueError: the entry cannot be true.
        UnsupportedSourceError: the samples cannot be computed, or the order is not computed and there is no listing.
    """
    entry, order = stretch.entry, _order(stretch.entry)
    _check(entry)
    first, last = entry.given, entry.given + (stretch.last - entry.step) * entry.each
    if first == last:
        return
    (begin, at), (end, until) = entry.locate(first), entry.locate(last - 1)
    if end - begin > _MOST:
        raise ValueError(f"{end - begin} epochs are more than any run has: restore the ledger")
    for epoch in range(begin, end + 1):
        if order is None:
            listed = _listed(entry, epoch, listing)
            positions = [number for number, indices in enumerate(listed) if index in indices]
        else:
            share = entry.share(epoch)
            reach = (at * share.global_batch, (until + 1) * share.global_batch) if entry.size is None else None
            start, stop = (0, entry.size or MAXIMUM_SIZE) if reach is None else (share.start + each for each in reach)
            positions = list(positions_of(order, entry.seed, epoch, index, start, stop))
        found = [
            (entry.before(epoch) + step, rank, position)
            for position in positions
            for step, rank in _places_of(entry, epoch, position)
        ]
        for number, rank, position in sorted(found):
            if first <= number < last:
                yield Sight(entry.step + 1 + (number - first) // entry.each, rank, epoch, position)


def _places_of(entry: Entry, epoch: int, position: int) -> Iterator[tuple[int, int]]:
    """The steps of an epoch, and the ranks, that are given a position."""
    share, holes, before = entry.share(epoch), entry.holes(epoch), 0
    place = holes.place_of(position)
    if holes.position_of(place) != position:
        return  # left out
    if isinstance(share, MicroShare):
        number = (place - share.start) // share.together
        before = number * share.micro_steps
        if not 0 <= before < share.steps:
            return
        share = share.one(number)
    for step, rank in _in_share(share, place):
        mine = entry.share(epoch, rank * entry.copies)
        if before + step < mine.steps:
            yield from ((before + step, rank * entry.copies + copy) for copy in range(entry.copies))


def _in_share(share: Share, place: int) -> Iterator[tuple[int, int]]:
    """The steps and ranks that are given a place, if none of them leaves out what does not fill a batch."""
    step, offset = divmod(place - share.start, share.global_batch)
    if 0 <= step < share.full_steps:
        yield step, offset // share.batch_size
    base, end = share.span(share.full_steps)  # rank 0 has as many as any
    each = end - base
    last = share.size if share.tail == "uneven" else base + each * share.world.world_size
    # The first units are repeated, several times if there are fewer than ranks.
    for again in range(place + max(0, -(-(base - place) // share.size)) * share.size, last, share.size):
        yield share.full_steps, (again - base) // each
