"""Batches that are read in this process, each under its own random stream, at little cost where nothing draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midepoch.loader.adapter import Run
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["SEEDED_BATCHES", "DrewAfterAllError", "keyed", "watching"]

SEEDED_BATCHES = 100
"""Of a session, in any case: a millisecond and a half in all. Most code that draws at all does so in one of them."""


class DrewAfterAllError(Exception):
    """A batch drew random numbers that were not those of its stream. It has been read, and is the argument."""


def keyed(streams: Streams | None, run: Run, advance: Callable[[], Any], seeds: bool = False) -> Callable[[], Any]:
    """Returns the next batch, each under its own stream if there are any.

    Args:
        streams: of the code that reads.
        run: of the session.
        advance: returns the next batch.
        seeds: `watching` is not to change that.
    """
    return advance if streams is None else _Keyed(streams, run, advance, seeds)


def watching(read: Callable[[], Any]) -> Callable[[], Any]:
    """What to call in place of `read`: it only watches the generators if no batch has drawn yet.

    Raises:
        DrewAfterAllError: by the function, if a batch draws after all.
    """
    if not isinstance(read, _Keyed) or read.seeds or not read.streams.unused:
        return read
    return read.streams.watched(read.advance, _drew)


class _Keyed:
    """The function that `keyed` returns."""

    def __init__(self, streams: Streams, run: Run, advance: Callable[[], Any], seeds: bool) -> None:
        self.streams, self.advance, self.seeds = streams, advance, seeds
        self._key = derive_key(Purpose.BATCH, run.seed, run.epoch)
        self._place, self._step = run.position + run.world.rank, run.world.world_size
        self._first = True

    def __call__(self) -> Any:
        streams = self.streams
        if self._first:
            streams.begin_pass()
        with streams as start:
            start(extend_key(self._key, self._place))
            batch = self.advance()
        self._place += self._step
        if self._first:
            self._first = False
            streams.made_late()
        return batch


def _drew(batch: Any) -> Any:
    raise DrewAfterAllError(batch)
