"""Batches that are read in this process, each under its own random stream, at little cost where nothing draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midepoch.loader.adapter import Run
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["DrewAfterAllError", "keyed"]


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
    if streams is None:
        return advance
    key = derive_key(Purpose.BATCH, run.seed, run.epoch)
    place, step = run.position + run.world.rank, run.world.world_size
    looks, leaves = streams.look, streams.leave
    watches, first = False, not seeds

    def read() -> Any:
        nonlocal place, watches, first
        if watches:
            looks()
            try:
                batch = advance()
            except BaseException:
                leaves()
                raise
            if leaves():
                raise DrewAfterAllError(batch)
            return batch
        if first:
            streams.begin_pass()
        with streams as start:
            start(extend_key(key, place))
            batch = advance()
        place += step
        if first:
            first = False
            streams.made_late()
            watches = streams.unused
        return batch

    return read
