"""Batches that are read in this process, each under its own random stream, at little cost where nothing draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midepoch.loader.adapter import Run
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["DrewAfterAllError", "keyed", "steady"]


class DrewAfterAllError(Exception):
    """A batch drew random numbers that were not those of its stream. It has been read, and is the argument."""


def keyed(streams: Streams | None, run: Run, advance: Callable[[], Any], seeds: bool = False) -> Callable[[], Any]:
    """Returns the next batch, each under its own stream if there are any.

    After a first batch that drew nothing, the generators are only watched.

    Args:
        streams: of the code that reads.
        run: of the session.
        advance: returns the next batch.
        seeds: each batch, whether earlier ones drew or not.

    Raises:
        DrewAfterAllError: by the function, if a batch draws while the generators are only watched.
    """
    return advance if streams is None else _Keyed(streams, run, advance, seeds)


def steady(read: Callable[[], Any]) -> Callable[[], Any]:
    """What to call in place of `read` after its first batch."""
    return read if not isinstance(read, _Keyed) or read.watched is None else read.watched


class _Keyed:
    """The function that `keyed` returns."""

    def __init__(self, streams: Streams, run: Run, advance: Callable[[], Any], seeds: bool) -> None:
        self._streams, self._advance = streams, advance
        self._key = derive_key(Purpose.BATCH, run.seed, run.epoch)
        self._place, self._step = run.position + run.world.rank, run.world.world_size
        self._first = not seeds
        self.watched: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        if self.watched is not None:
            return self.watched()
        streams = self._streams
        if self._first:
            streams.begin_pass()
        with streams as start:
            start(extend_key(self._key, self._place))
            batch = self._advance()
        self._place += self._step
        if self._first:
            self._first = False
            streams.made_late()
            if streams.unused:
                self.watched = streams.watched(self._advance, _drew)
        return batch


def _drew(batch: Any) -> Any:
    raise DrewAfterAllError(batch)
