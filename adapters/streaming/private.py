"""The parts of Streaming that midepoch uses and Streaming does not promise. They are checked on import.

Streaming has no interface for three things midepoch needs: setting a position without leaving files open, observing
samples as they are read, and telling a failed pass from a finished one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import streaming.base.util
from streaming import StreamingDataset

from midepoch.packages import Package, Replacement

__all__ = [
    "RETRIES", "check", "each_sample", "end_pass", "free_barrier", "has_failed", "nodes", "overridden",
    "own_formats", "pass_of", "rank_world", "resume_override", "set_place", "use_own_end_pass", "work",
    "worker_world",
]  # fmt: skip

_STREAMING = Package("Streaming", ("mosaicml-streaming",), ("0.13", "0.13"))

_ENCODINGS = [_STREAMING.part(f"streaming.base.format.{kind}.encodings:_encodings") for kind in ("mds", "json", "xsv")]
_READERS = _STREAMING.part("streaming.base.format:_readers")
_EXITED = _STREAMING.part("streaming.base.dataset:_IterState.EXITED")
_RESUME = _STREAMING.part("streaming.base.constant:RESUME")
_TICK = _STREAMING.part("streaming.base.constant:TICK")
_SharedMemory = _STREAMING.part("streaming.base.shared:SharedMemory")
_path_of = _STREAMING.part("streaming.base.shared.prefix:_get_path")
for _name in ("_each_sample_id", "_get_work", "_resume", "_set_shuffle_block_size"):
    _STREAMING.part(f"streaming:StreamingDataset.{_name}")
_STREAMING.part("streaming.base.util:random")

RETRIES = Replacement(streaming.base.util, "random", random.Random())
"""Streaming draws the time before it retries a download from ``random.random()``, in a thread of its own.

This would take numbers from the caller's generator, and from a sample that draws at the same time.
"""


def check(dataset: StreamingDataset) -> None:
    """Raise UnsupportedSourceError unless a dataset has the parts that midepoch uses."""
    _STREAMING.check(
        dataset, "_parallel_rank_world.num_nodes", "_shared_barrier.flag", "_shared_barrier.num_enter",
        "_shared_barrier.num_exit", "_shm_prefix_int", "_unique_rank_world.rank", "_unique_rank_world.ranks_per_node",
        "next_epoch",
    )  # fmt: skip


# --- a dataset's position ---------------------------------------------------------------------------------------------


def rank_world(dataset: StreamingDataset) -> Any:
    """Streaming's record of this process's rank."""
    return dataset._unique_rank_world


def nodes(dataset: StreamingDataset) -> int:
    """The number of nodes that get different samples."""
    return int(dataset._parallel_rank_world.num_nodes)


def worker_world(dataset: StreamingDataset) -> Any:
    """Streaming's record of this worker process, as of the last pass, among those that get different samples."""
    return dataset._parallel_worker_world


def set_place(dataset: StreamingDataset, place: dict[str, Any]) -> None:
    """Make the next pass begin at a position: ``load_state_dict`` without a new shared memory block for each pass."""
    # A pass reads both, and treats the position as stale if its epoch is not the next one.
    dataset.next_epoch = place["epoch"]
    if not hasattr(dataset, "_resume_shm"):
        dataset.load_state_dict(place)
        return
    data = json.dumps(place, sort_keys=True).encode() + b"\0"
    dataset._resume_shm.buf[: len(data)] = data


def _resume(dataset: StreamingDataset, world: Any, epoch: int) -> tuple[int, int]:
    """Replaces ``_resume``, which leaves a shared memory block open at each pass, until the process ends."""
    try:
        memory = _SharedMemory(_path_of(dataset._shm_prefix_int, _RESUME), create=False, auto_cleanup=False)
    except FileNotFoundError:
        return _original_resume(dataset, world, epoch)
    place = json.loads(bytes(memory.buf).partition(b"\0")[0])
    memory.cleanup()
    if place["epoch"] < epoch:
        return _original_resume(dataset, world, epoch)
    dataset.num_canonical_nodes = place["num_canonical_nodes"]
    dataset.shuffle_seed = place["shuffle_seed"]
    dataset.initial_physical_nodes = place["initial_physical_nodes"]
    dataset._set_shuffle_block_size(world)
    return place["epoch"], place["sample_in_epoch"]


def _original_resume(dataset: StreamingDataset, world: Any, epoch: int) -> tuple[int, int]:
    epoch, sample = type(dataset)._resume(dataset, world, epoch)
    return epoch, sample


def free_barrier(dataset: StreamingDataset) -> None:
    """Reset the barrier at the start of a pass. If a worker died there, the next pass would wait forever.

    Does nothing if this node has other ranks, which may already be waiting for the next pass.
    """
    barrier = dataset._shared_barrier
    at_rest = barrier.num_enter == 0 and barrier.num_exit == -1
    if not at_rest and dataset._unique_rank_world.ranks_per_node == 1:
        barrier.num_enter, barrier.num_exit, barrier.flag = 0, -1, True


# --- overridden methods -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def overridden(dataset: StreamingDataset, **methods: Callable[..., Any]) -> Iterator[None]:
    """Override these methods of a dataset. Copies that worker processes get meanwhile keep the overrides."""
    for name, method in methods.items():
        setattr(dataset, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(dataset, name)


def resume_override(dataset: StreamingDataset) -> dict[str, Callable[..., Any]]:
    """The override with which a pass reads its position."""
    return {"_resume": functools.partial(_resume, dataset)}


def work(dataset: StreamingDataset, epoch: int, sample_in_epoch: int) -> Any:
    """The result of its own ``_get_work``."""
    return type(dataset)._get_work(dataset, epoch, sample_in_epoch)


def each_sample(dataset: StreamingDataset, reading: Any) -> Iterator[int]:
    """The result of its own ``_each_sample_id``."""
    return type(dataset)._each_sample_id(dataset, reading)  # type: ignore[no-any-return]


OVERRIDABLE = ("_resume", "_get_work", "_each_sample_id")
"""The names of methods that may be overridden."""


# --- a pass -----------------------------------------------------------------------------------------------------------


def pass_of(dataset: StreamingDataset) -> Any:
    """Streaming's record of the last pass in this process; None if there was none."""
    return getattr(dataset, "_iterator", None)


def has_failed(dataset: StreamingDataset) -> bool:
    """Whether a prefetching thread in this process has failed. Streaming begins no other pass after that."""
    event = getattr(dataset, "_event", None)
    return event is not None and bool(event.is_set())


def end_pass(dataset: StreamingDataset, reading: Any) -> None:
    """Replaces a pass's own ``exit``, which waits forever for a thread that has failed."""
    reading.non_blocking_exit()
    while reading._num_exited < reading._num_threads_to_exit and not has_failed(dataset):
        time.sleep(_TICK)
    with reading._lock:
        reading._state = _EXITED


def use_own_end_pass(dataset: StreamingDataset, reading: Any) -> None:
    """Make the next pass, which ends this one, use `end_pass` for it, in worker processes too."""
    reading.exit = functools.partial(end_pass, dataset, weakref.proxy(reading))


# --- formats ----------------------------------------------------------------------------------------------------------


def own_formats() -> list[type]:
    """Classes that were registered with Streaming to decode a column or to read a kind of shard."""
    kinds = [kind for registered in (*_ENCODINGS, _READERS) for kind in registered.values()]
    return [kind for kind in kinds if kind.__module__.partition(".")[0] != "streaming"]
