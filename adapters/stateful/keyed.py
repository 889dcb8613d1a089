"""Batches that are read in this process, each under its own random stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midepoch.loader.adapter import Run
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["keyed"]


def keyed(streams: Streams | None, run: Run, advance: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the next batch, each under its own stream if there are any."""
    if streams is None:
        return advance
    key = derive_key(Purpose.BATCH, run.seed, run.epoch)
    place, step = run.position + run.world.rank, run.world.world_size

    def read() -> Any:
        nonlocal place
        with streams as start:
            start(extend_key(key, place))
            batch = advance()
        place += step
        return batch

    return read
