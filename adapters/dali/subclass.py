"""A subclass of DALI's iterators: what its own code draws for a batch, under the batch's random stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midepoch.adapters.dali import private
from midepoch.loader.adapter import Options
from midepoch.loader.capabilities import Capability
from midepoch.order.keys import derive_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["OwnCode", "promised"]


class OwnCode:
    """Takes batches from an iterator whose class is not DALI's own.

    What it draws is keyed by seed, epoch and position, so it is the same on the same split.

    Args:
        learned: called when `made_late` has changed.

    Attributes:
        made_late: it has made a generator while it was read, so the first batch of a process has other numbers.
    """

    def __init__(self, learned: Callable[[], None]) -> None:
        self._streams, self._learned = Streams(), learned
        self._seed = self._rank = 0
        self.made_late = False

    @classmethod
    def of(cls, iterator: Any, options: Options, learned: Callable[[], None]) -> OwnCode | None:
        """None for DALI's own classes, and where code draws from the caller's generators."""
        return cls(learned) if options.streams and private.own_parts(iterator) else None

    def begin_pass(self, seed: int, rank: int, iterator: Any) -> None:
        """Call it before the first batch of a pass. `rank`: added to positions; 0 where each rank has its own."""
        self._seed, self._rank = seed, rank
        self._streams.begin_pass(*private.own_parts(iterator))

    def take(self, iterator: Any, epoch: int, position: int) -> Any:
        """The iterator's next batch."""
        streams = self._streams
        with streams as start:
            start(derive_key(Purpose.BATCH, self._seed, epoch, position + self._rank))
            batch = next(iterator)
        if streams.made_late(*private.own_parts(iterator)):
            streams.warn_of_late()
            self.made_late = True
            self._learned()
        return batch


def promised(exact: Capability, iterator: Any, options: Options, own: OwnCode | None) -> Capability:
    """`exact`, if it holds for the code of the iterator's class too."""
    if not exact.holds or not private.own_parts(iterator):
        return exact
    name = type(iterator).__name__
    if not options.streams:
        return Capability(False, f"randomness='none': {name} may draw from the caller's generators")
    if own is not None and own.made_late:
        return Capability(
            False, f"{name} makes a random generator while the first batch is read, unseeded: make it in __init__"
        )
    kept = f"if {name} keeps nothing from one batch to the next, what it draws for a batch is exact on the same split"
    return Capability(True, f"{exact.reason}; {kept}", believed=True)
