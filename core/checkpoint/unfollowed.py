"""Batches that were taken from a loader and that no `step` followed: a loop that reads ahead, or still skips."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import warn
from ..loader.body import Body
from ..loader.loader import Loader
from ..loader.reading import Reading

__all__ = ["Unfollowed"]


class Unfollowed:
    """Compares the first step of this process with the next one, if that is in the same pass.

    Two steps tell how many batches the loop takes for one step. What the first step had taken beyond that is either
    read ahead, so a snapshot counts it as trained on, or left out by a loop that skips what the loader has skipped. If
    it is less than that many, it may be what a loop takes that steps after some batches, and not after the first ones.
    """

    def __init__(self) -> None:
        # By loader, at the first step: the reading, the batches taken from it, and those that the loop has taken.
        self._first: dict[str, tuple[Reading, int, int]] | None = None
        self._before: dict[Reading, int] = {}  # the batches that were taken before the loop
        self.is_due = False  # the next step is to be looked at

    @property
    def is_first(self) -> bool:
        """Whether the next step is the first one of a loop."""
        return self._first is None

    def begin(self, loaders: Mapping[str, Loader]) -> None:
        """The next step is the first one of a loop. What was taken before the loop is not its own."""
        self._first = None
        read = [each for loader in loaders.values() for each, _, _ in loader._progress.history]
        self._before = {each: each.steps for each in read}

    def look(self, loaders: Mapping[str, Loader], in_flight: int, body: Body | None) -> None:
        """Look after a step, and warn once. `in_flight`: as `Snapshot.step` has it in this body."""
        if self._first == {}:
            return
        first, self._first, self.is_due = self._first, {}, False
        for name, loader in loaders.items():
            progress = loader._progress
            if (reading := progress.reading) is None or progress.context.tickets.taken:
                continue
            taken = reading.steps - (body.in_flight_of(name, in_flight) if body else in_flight)
            if first is None:
                context, ahead = progress.context, reading.steps - taken
                if ahead > context.options.remember and not context.adapter.facts.remembers:
                    warn(
                        f"{name} keeps no state of earlier batches, so no save succeeds while {ahead} are in flight, "
                        f"not even on a signal: pass remember={ahead} to midepoch.wrap"
                    )
                skipped = self._rest_before(reading, loader)
                self._first[name] = reading, taken, taken + skipped - self._before.get(reading, 0)
                self.is_due = True
                continue
            then, earlier, of_loop = first.get(name, (None, 0, 0))
            each = taken - earlier
            if reading is then and each and of_loop - each >= each:
                warn(
                    f"no step() followed {of_loop - each} of the batches taken from {name}, and a resume would leave "
                    f"them out: if the loop reads ahead, pass in_flight={of_loop - each}; if it skips what was done "
                    "before a resume, do not: the loader has skipped it"
                )
        self._before = {}  # which keeps readings alive

    def _rest_before(self, reading: Reading, loader: Loader) -> int:
        """How many batches a resumed pass of this loop has given before this one, if it has come to its end."""
        passes = {each for each, _, _ in loader._progress.history if each is not reading and each.run.position}
        ended = [each for each in passes if each.share is not None and each.steps == each.share.steps]
        return sum(each.steps - self._before.get(each, 0) for each in ended)
