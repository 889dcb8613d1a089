"""Tickets: batches that are finished in any order, of which a state says what is finished.

A rank knows which of its own steps are finished, as intervals of steps: by position, each batch of one rank among
several would be an interval of its own. From the steps of all ranks follow the positions that are finished.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    """Steps of all ranks that divide the same places: of a session, and of those opened after it, but for a skip.

    Attributes:
        share, holes: of the first session.
        start: its position.
        readings: the sessions.
        done: the steps before this one are finished, and those in `beyond`.
    """

    def __init__(self, reading: Reading, share: Share) -> None:
        self.share, self.holes, self.start = share, reading.run.holes or Holes(), reading.run.position
        self.readings = list[Reading]()
        self.done, self.beyond = 0, set[int]()

    @property
    def handed(self) -> int:
        """Batches that were handed out."""
        return sum(reading.steps for reading in self.readings)

    def finish(self, step: int) -> bool:
        """False if it is finished already."""
        if step < self.done or step in self.beyond:
            return False
        self.beyond.add(step)
        while self.done in self.beyond:
            self.beyond.remove(self.done)
            self.done += 1
        return True

    @property
    def finished(self) -> Holes:
        """The steps that are finished."""
        return Holes([(0, self.done), *((step, step + 1) for step in self.beyond)])

    def positions(self, finished: Sequence[Holes]) -> Iterator[tuple[int, int]]:
        """The positions of the steps that are finished, by rank."""
        share, spans = self.share, self.holes.spans
        common = min(share.full_steps, *(steps.stops[0] if 0 in steps else 0 for steps in finished))
        yield from spans(share.start, share.start + common * share.global_batch)  # in one piece
        for rank, steps in enumerate(finished):
            mine = replace(share, world=World(rank, len(finished)))
            for start, stop in (mine.span(step) for a, z in steps for step in range(max(a, common), z)):
                yield from spans(start, min(stop, share.size))


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
        self.epoch: int | None = None
        self._layouts: list[_Layout] = []
        self._sessions: dict[int, tuple[_Layout, int]] = {}

    def begin(self, reading: Reading, share: Share) -> None:
        """A session was opened. `share`: of its places."""
        if self.epoch != reading.run.epoch:
            self.clear()
        self.epoch = reading.run.epoch
        if not self._layouts or list(self._layouts[-1].holes) != list(reading.run.holes or ()):
            # One without a batch was a look alone.
            self._layouts = [*(each for each in self._layouts if each.handed), _Layout(reading, share)]
        layout = self._layouts[-1]
        layout.readings.append(reading)
        self._sessions[reading.run.session] = layout, (share.start - layout.share.start) // share.global_batch

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
        self._layouts[0].done = step

    @property
    def open(self) -> int:
        """Batches that were handed out and are not finished."""
        return sum(each.handed - each.done - len(each.beyond) for each in self._layouts)

    @property
    def first(self) -> Reading:
        """The first session."""
        return self._layouts[0].readings[0]

    @property
    def last(self) -> tuple[Reading, int]:
        """The latest session, and the size of its epoch."""
        layout = self._layouts[-1]
        return layout.readings[-1], layout.share.size + layout.holes.total

    def text(self, ended: bool) -> str:
        """This rank's part of a state: whether all is done, and by the position of each layout the finished steps."""
        with self._lock:
            done = {each.start: each.finished for each in self._layouts}
            steps = [f"{start}:{steps.text()}" for start, steps in done.items() if steps.total]
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
