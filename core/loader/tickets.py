"""Tickets: batches that are finished in any order. What a state says follows from those that are still open."""

from __future__ import annotations

import threading
from typing import NamedTuple

from ..errors import StateError
from ..order.holes import Holes
from ..world import Share
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


class _Session:
    """A session, whose batches before `done`, and those in `beyond`, are finished. `share`: of its places."""

    def __init__(self, reading: Reading, share: Share, done: int) -> None:
        self.reading, self.share, self.done, self.beyond = reading, share, done, set[int]()

    @property
    def open(self) -> list[int]:
        """The batches that were handed out and are not finished."""
        return [step for step in range(self.done, self.reading.steps) if step not in self.beyond]


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
        self._sessions: dict[int, _Session] = {}

    def begin(self, reading: Reading, share: Share, done: int = 0) -> None:
        """A session was opened. `done`: so many of its batches are finished."""
        if self.epoch != reading.run.epoch:
            self.clear()
        self.epoch = reading.run.epoch
        self._sessions[reading.run.session] = self.last = _Session(reading, share, done)

    def finish(self, ticket: Ticket) -> None:
        """As `Loader.finish`."""
        with self._lock:
            session, step = self._sessions.get(ticket.session), ticket.step
            if session is None:
                raise StateError(f"{ticket} is of another run, or of a place that was left: drop its result")
            if step >= session.reading.steps:
                raise StateError(f"{ticket} is of a batch that was not handed out: finish what loader.ticket gave")
            if step < session.done or step in session.beyond:
                raise StateError(f"{ticket} is finished already: finish each ticket once")
            session.beyond.add(step)
            while session.done in session.beyond:
                session.beyond.remove(session.done)
                session.done += 1

    @property
    def count(self) -> int:
        """How many batches are open."""
        return sum(len(each.open) for each in self._sessions.values())

    @property
    def size(self) -> int:
        """Units in the epoch."""
        return self.last.share.size + (self.last.reading.run.holes or Holes()).total

    def open(self) -> Holes:
        """The positions of the batches that are open."""
        with self._lock:
            steps = [(each, each.open) for each in self._sessions.values()]
        of = [((each.reading.run.holes or Holes()).spans, map(each.share.span, some)) for each, some in steps]
        return Holes(piece for spans, places in of for place in places for piece in spans(*place))
