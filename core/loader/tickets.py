"""Tickets: batches that are finished in any order, of which a state says what is finished.

A rank knows which of its own steps are finished, as intervals of steps: by position, each batch of one rank among
several would be an interval of its own. From the steps of all ranks follow the positions that are finished.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ..errors import MidepochError, StateError
from ..order.holes import Holes
from ..world import Share, World
from .reading import Reading

__all__ = ["Ticket", "Tickets"]


class Ticket(NamedTuple):
    """One batch of one rank: hashable, small, and the same after a queue or pickle. `Loader.finish` takes it.

    Attributes:
        session: a random number, by which tickets of other runs and of places that were left are known.
        epoch, rank: of the batch.
        step: of the session, counted from 0.
    """

    session: int
    epoch: int
    rank: int
    step: int


class _Layout:
    """Steps of all ranks that divide the same places: a session, and those opened again after it, but for a skip.

    Attributes:
        share, holes: of the first session.
        start: its position.
        readings: the sessions, each with the step at which it begins.
        starts, stops: the steps that are finished, as intervals.
    """

    def __init__(self, reading: Reading, share: Share) -> None:
        self.share, self.holes, self.start = share, reading.run.holes or Holes(), reading.run.position
        self.readings = [(reading, 0)]
        self.starts, self.stops = list[int](), list[int]()

    @property
    def open(self) -> int:
        """Batches that were handed out and are not finished."""
        return sum(reading.steps for reading, _ in self.readings) - sum(self.stops) + sum(self.starts)

    def add(self, reading: Reading, share: Share) -> int | None:
        """The step at which a later session goes on; None if it divides other places."""
        steps, rest = divmod(share.start - self.share.start, share.global_batch)
        same = rest == 0 and list(reading.run.holes or ()) == list(self.holes) and share.world == self.share.world
        if not same:
            return None
        self.readings.append((reading, steps))
        return steps

    def finish(self, step: int) -> bool:
        """False if it is finished already."""
        starts, stops = self.starts, self.stops
        i = bisect_right(starts, step)
        if i and step < stops[i - 1]:
            return False
        after, before = i > 0 and stops[i - 1] == step, i < len(starts) and starts[i] == step + 1
        if after and before:
            del starts[i], stops[i - 1]
        elif after:
            stops[i - 1] += 1
        elif before:
            starts[i] -= 1
        else:
            starts.insert(i, step)
            stops.insert(i, step + 1)
        return True

    def positions(self, finished: Sequence[Holes]) -> Iterator[tuple[int, int]]:
        """The positions of the steps that are finished, by rank."""
        share, spans, places = self.share, self.holes.spans, self.share.size
        of_ranks = [replace(share, world=World(rank, len(finished))) for rank in range(len(finished))]
        full = share.full_steps
        for first, last in pairwise(sorted({full, *(end for each in finished for span in each for end in span)})):
            ranks = [rank for rank, each in enumerate(finished) if first in each]
            if len(ranks) == len(finished) and last <= full:  # in one piece
                yield from spans(*(share.start + step * share.global_batch for step in (first, last)))
                continue
            for rank in ranks:
                for start, stop in map(of_ranks[rank].span, range(first, last)):
                    yield from spans(start, min(stop, places))


class Tickets:
    """The tickets of a loader's epoch, from the first one that was asked for.

    Attributes:
        epoch: of the batches; None before the first one after a load.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """The loader goes elsewhere: no ticket is open."""
        with self._lock:
            self.epoch: int | None = None
            self._layouts: list[_Layout] = []
            self._sessions: dict[int, tuple[_Layout, int]] = {}

    def begin(self, reading: Reading, share: Share) -> None:
        """A session was opened. `share`: of its places."""
        if self.epoch != reading.run.epoch:
            self.clear()
        with self._lock:
            self.epoch, layouts = reading.run.epoch, self._layouts
            step = layouts[-1].add(reading, share) if layouts else None
            if step is None:
                if layouts and not any(each.steps for each, _ in layouts[-1].readings):
                    layouts.pop()  # a look at a batch alone
                layouts.append(_Layout(reading, share))
            self._sessions[reading.run.session] = layouts[-1], step or 0

    def finish(self, ticket: Ticket) -> None:
        """As `Loader.finish`."""
        with self._lock:
            layout, begins = self._sessions.get(ticket.session, (None, 0))
            if layout is not None and layout.finish(begins + ticket.step):
                return
        raise StateError(
            f"{ticket} is of another run, or of a place that was left: drop its result, its batch is given again"
            if layout is None
            else f"{ticket} is finished already: finish each ticket once"
        )

    def finish_before(self, step: int) -> None:
        """What was handed out of the only session before its first ticket was asked for is finished."""
        if step:
            (layout,) = self._layouts
            layout.starts, layout.stops = [0], [step]

    @property
    def open(self) -> int:
        """Batches that were handed out and are not finished."""
        return sum(layout.open for layout in self._layouts)

    @property
    def first(self) -> Reading:
        """The first session."""
        return self._layouts[0].readings[0][0]

    @property
    def last(self) -> tuple[Reading, int]:
        """The latest session, and the size of its epoch."""
        layout = self._layouts[-1]
        return layout.readings[-1][0], layout.share.size + layout.holes.total

    def text(self, ended: bool) -> str:
        """This rank's part of a state: whether all is done, and by the position of each layout the finished steps."""
        with self._lock:
            done = [(each.start, Holes(zip(each.starts, each.stops, strict=True))) for each in self._layouts]
            steps = [f"{start}:{steps.text()}" for start, steps in done if steps]
            return " ".join([str(int(ended and not self.open)), *steps])

    def finished(self, parts: Sequence[str]) -> Iterator[tuple[int, int]]:
        """The positions that are finished, from the texts of all ranks; without what was before the first session.

        Raises:
            MidepochError: a rank has other layouts.
        """
        of_ranks = [dict(each.split(":") for each in part.split()[1:]) for part in parts]
        known = {str(layout.start) for layout in self._layouts}
        for rank, each in enumerate(of_ranks):
            if not each.keys() <= known:
                raise MidepochError(f"rank {rank} skipped after another batch: call skip() on every rank alike")
        for layout in self._layouts:
            yield from layout.positions([Holes.parse(each.get(str(layout.start), "0")) for each in of_ranks])
