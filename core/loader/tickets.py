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
    """A session, of which the batches from `seen` on are not in `_open` yet. `share`: of its places."""

    def __init__(self, reading: Reading, share: Share, seen: int) -> None:
        self.reading, self.share, self._seen, self._open = reading, share, seen, set[int]()

    @property
    def open(self) -> set[int]:
        """The batches that were handed out and are not finished."""
        steps = self.reading.steps
        self._open.update(range(self._seen, steps))
        self._seen = steps
        return self._open


class Tickets:
    """The tickets of a loader's epoch, from the first one that was asked for.

    Attributes:
        taken: whether one was asked for, ever.
        epoch: of the batches; None before the first one after a load.
    """

    _lock = threading.Lock()  # of all loaders, so that they can be pickled

    def __init__(self) -> None:
        self.taken = False
        self.clear()

    def clear(self) -> None:
        """The loader goes elsewhere: no ticket is open."""
        self.epoch: int | None = None
        self._sessions: dict[int, _Session] = {}

    def begin(self, reading: Reading, share: Share, done: int = 0) -> None:
        """A session was opened. `done`: so many of its batches are finished."""
        if self.epoch != reading.run.epoch:
            self.clear()
        self.taken, self.epoch = True, reading.run.epoch
        self._sessions[reading.run.session] = self.last = _Session(reading, share, done)

    def finish(self, ticket: Ticket) -> None:
        """As `Loader.finish`."""
        with self._lock:
            session = self._sessions.get(ticket.session)
            if session is None:
                raise StateError(f"{ticket} is of another run, or of a place that was left: drop its result")
            if ticket.step not in session.open:
                raise StateError(f"{ticket} is finished already, or was not handed out: finish each ticket once")
            session.open.remove(ticket.step)

    @property
    def size(self) -> int:
        """Units in the epoch."""
        return self.last.share.size + self.last.reading.run.holes.total

    def open(self) -> Holes:
        """The positions of the batches that are open."""
        with self._lock:
            steps = [(each, step) for each in self._sessions.values() for step in each.open]
        return Holes(piece for each, step in steps for piece in each.reading.run.holes.spans(*each.share.span(step)))
