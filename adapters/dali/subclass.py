"""A subclass of DALI's iterators: one batch of DALI for each of its own, and its draws under the batch's stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midepoch.adapters.dali import private
from midepoch.errors import UnsupportedSourceError
from midepoch.loader.adapter import Options
from midepoch.loader.capabilities import Capability
from midepoch.order.keys import derive_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["OwnCode", "promised"]

_INSTEAD = (
    "wrap the DALI iterator itself, read ahead or put batches together around the loader, and pass other work on whole "
    "batches as then="
)


class OwnCode:
    """Takes batches from an iterator whose class is not DALI's own.

    What it draws is keyed by seed, epoch and position, so it is the same on the same split. DALI's place is that of the
    training loop only if each call of its ``__next__`` reads one batch of DALI, so these are counted.

    Args:
        draws: False leaves the caller's generators to it.
        learned: called when `made_late` has changed.

    Attributes:
        made_late: it has made a generator while it was read, so the first batch of a process has other numbers.
    """

    def __init__(self, draws: bool, learned: Callable[[], None]) -> None:
        self._streams, self._learned = Streams() if draws else None, learned
        self._seed = self._rank = 0
        self.made_late = False

    @classmethod
    def of(cls, iterator: Any, options: Options, learned: Callable[[], None]) -> OwnCode | None:
        """None for DALI's own classes.

        Raises:
            UnsupportedSourceError: the class has an ``__iter__`` that makes something else of the batches.
        """
        if not private.own_parts(iterator):
            return None
        if not private.iterates_itself(iterator):
            raise UnsupportedSourceError(
                f"{type(iterator).__name__}.__iter__ does not return the iterator itself, and midepoch takes batches "
                f"from __next__: {_INSTEAD}"
            )
        return cls(options.streams, learned)

    def begin_pass(self, seed: int, rank: int, iterator: Any) -> None:
        """Call it before the first batch of a pass. `rank`: added to positions; 0 where each rank has its own."""
        self._seed, self._rank = seed, rank
        if self._streams is not None:
            self._streams.begin_pass(*private.own_parts(iterator))

    def take(self, iterator: Any, epoch: int, position: int) -> Any:
        """The iterator's next batch.

        Raises:
            UnsupportedSourceError: for it, the class's code has not read one batch of DALI, but none or several.
        """
        streams = self._streams
        if streams is None:
            return _one_for_one(iterator)
        with streams as start:
            start(derive_key(Purpose.BATCH, self._seed, epoch, position + self._rank))
            batch = _one_for_one(iterator)
        if streams.made_late(*private.own_parts(iterator)):
            streams.warn_of_late()
            self.made_late = True
            self._learned()
        return batch


def _one_for_one(iterator: Any) -> Any:
    with private.counted(iterator) as reads:
        batch = next(iterator)
    if reads.number != 1:
        raise UnsupportedSourceError(
            f"{type(iterator).__name__}.__next__ has read {reads.number} batches of DALI in this thread for one of its "
            f"own, so DALI does not stand where the training loop does: {_INSTEAD}"
        )
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
