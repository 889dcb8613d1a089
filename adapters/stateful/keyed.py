"""Batches that are read in this process, each under its own random stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midepoch.loader.adapter import Run
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["keyed"]


def keyed(streams: Streams | None, run: Run, advance: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the next batch, each under its own stream if there are any.

    Args:
        streams: of the code that reads.
        run: of the session.
        advance: returns the next batch.
    """
    return advance if streams is None else _Keyed(streams, run, advance)


class _Keyed:
    """The function that `keyed` returns."""

    def __init__(self, streams: Streams, run: Run, advance: Callable[[], Any]) -> None:
        self._streams, self._advance = streams, advance
        self._key = derive_key(Purpose.BATCH, run.seed, run.epoch)
        self._place, self._step = run.position + run.world.rank, run.world.world_size
        self._first = True

    def __call__(self) -> Any:
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
        return batch
