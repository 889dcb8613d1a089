"""Private parts of Streaming that midepoch uses, checked on import.

Streaming has no interface for what is needed here: to set a place without leaving files open, to hear of samples as
they are read, to tell a pass that has failed from one that has ended.
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
    "RETRIES",
    "check",
    "each_sample",
    "end_pass",
    "end_pass_by_itself",
    "free_barrier",
    "has_failed",
    "leaves_no_files",
    "lent",
    "nodes",
    "own_formats",
    "pass_of",
    "rank_world",
    "set_place",
    "work",
    "worker_world",
]

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
"""Streaming draws the delay before it retries a download from ``random.random()``, in a thread of its own.

From the caller's generator it would take numbers, and from a sample that draws at that time.
"""


def check(dataset: StreamingDataset) -> None:
    """Raise UnsupportedSourceError unless a dataset has the parts used here."""
    _STREAMING.check(
        dataset, "_parallel_rank_world.num_nodes", "_shared_barrier.flag", "_shared_barrier.num_enter",
        "_shared_barrier.num_exit", "_shm_prefix_int", "_unique_rank_world.rank", "_unique_rank_world.ranks_per_node",
        "next_epoch",
    )  # fmt: skip


# --- where a dataset stands -------------------------------------------------------------------------------------------


def rank_world(dataset: StreamingDataset) -> Any:
    """Streaming's place of this process among all ranks."""
    return dataset._unique_rank_world


def nodes(dataset: StreamingDataset) -> int:
    """The number of nodes that receive different samples."""
    return int(dataset._parallel_rank_world.num_nodes)


def worker_world(dataset: StreamingDataset) -> Any:
    """Streaming's place of this worker process, as of the last pass, among those that are given different samples."""
    return dataset._parallel_worker_world


def set_place(dataset: StreamingDataset, place: dict[str, Any]) -> None:
    """Make the next pass begin at a place, as ``load_state_dict`` does, without a new shared block for each pass."""
    # A pass checks both: it ignores the place if its epoch is not the next one.
    dataset.next_epoch = place["epoch"]
    if not hasattr(dataset, "_resume_shm"):
        dataset.load_state_dict(place)
        return
    data = json.dumps(place, sort_keys=True).encode() + b"\0"
    dataset._resume_shm.buf[: len(data)] = data


def _resume(dataset: StreamingDataset, world: Any, epoch: int) -> tuple[int, int]:
    """In place of ``_resume``, which leaves a shared block open at each pass, until the process ends."""
    try:
        memory = _SharedMemory(_path_of(dataset._shm_prefix_int, _RESUME), create=False, auto_cleanup=False)
    except FileNotFoundError:
        return _theirs(dataset, world, epoch)
    place = json.loads(bytes(memory.buf).partition(b"\0")[0])
    memory.cleanup()
    if place["epoch"] < epoch:
        return _theirs(dataset, world, epoch)
    dataset.num_canonical_nodes = place["num_canonical_nodes"]
    dataset.shuffle_seed = place["shuffle_seed"]
    dataset.initial_physical_nodes = place["initial_physical_nodes"]
    dataset._set_shuffle_block_size(world)
    return place["epoch"], place["sample_in_epoch"]


def _theirs(dataset: StreamingDataset, world: Any, epoch: int) -> tuple[int, int]:
    epoch, sample = type(dataset)._resume(dataset, world, epoch)
    return epoch, sample


def free_barrier(dataset: StreamingDataset) -> None:
    """Forget who has come to the barrier of a pass: where a worker died while it began, the next pass would wait.

    With other ranks on this node nothing is done: they may have come for the next pass already.
    """
    barrier = dataset._shared_barrier
    at_rest = barrier.num_enter == 0 and barrier.num_exit == -1
    if not at_rest and dataset._unique_rank_world.ranks_per_node == 1:
        barrier.num_enter, barrier.num_exit, barrier.flag = 0, -1, True


# --- replaced methods of a dataset ------------------------------------------------------------------------------------


@contextlib.contextmanager
def lent(dataset: StreamingDataset, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace these methods of a dataset. Copies that worker processes receive meanwhile keep them."""
    for name, method in methods.items():
        setattr(dataset, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(dataset, name)


def leaves_no_files(dataset: StreamingDataset) -> dict[str, Callable[..., Any]]:
    """The method with which a pass reads its place, to be lent."""
    return {"_resume": functools.partial(_resume, dataset)}


def work(dataset: StreamingDataset, epoch: int, sample_in_epoch: int) -> Any:
    """The result of its own ``_get_work``."""
    return type(dataset)._get_work(dataset, epoch, sample_in_epoch)


def each_sample(dataset: StreamingDataset, reading: Any) -> Iterator[int]:
    """The items of its own ``_each_sample_id``."""
    return type(dataset)._each_sample_id(dataset, reading)  # type: ignore[no-any-return]


LENT = ("_resume", "_get_work", "_each_sample_id")
"""The names of methods that may be replaced."""


# --- a pass -----------------------------------------------------------------------------------------------------------


def pass_of(dataset: StreamingDataset) -> Any:
    """What Streaming knows of the last pass in this process; None where there was none."""
    return getattr(dataset, "_iterator", None)


def has_failed(dataset: StreamingDataset) -> bool:
    """Whether a thread that reads ahead in this process has failed: Streaming begins no other pass after that."""
    event = getattr(dataset, "_event", None)
    return event is not None and bool(event.is_set())


def end_pass(dataset: StreamingDataset, reading: Any) -> None:
    """As Streaming's own ``exit`` of a pass, which waits for ever for a thread that has failed."""
    reading.non_blocking_exit()
    while reading._num_exited < reading._num_threads_to_exit and not has_failed(dataset):
        time.sleep(_TICK)
    with reading._lock:
        reading._state = _EXITED


def end_pass_by_itself(dataset: StreamingDataset, reading: Any) -> None:
    """Let the next pass, which ends this one, do it by `end_pass`; in worker processes too."""
    reading.exit = functools.partial(end_pass, dataset, weakref.proxy(reading))


# --- formats ----------------------------------------------------------------------------------------------------------


def own_formats() -> list[type]:
    """Classes that were registered with Streaming to decode a column, or to read a kind of shard."""
    kinds = [kind for registered in (*_ENCODINGS, _READERS) for kind in registered.values()]
    return [kind for kind in kinds if kind.__module__.partition(".")[0] != "streaming"]
