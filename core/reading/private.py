"""What midepoch uses of torch's DataLoader that torch does not promise: the worker processes behind an iterator.

They are checked when this is imported. torch's versions are those that midepoch's own requirement names.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from typing_extensions import TypeIs

from midepoch.errors import UnsupportedSourceError

__all__ = [
    "alive",
    "end_when_collected",
    "iterates_as_torch",
    "keep_iterator",
    "kept_iterator",
    "show_dataset",
    "shut_down",
    "workers_of",
]

_LEAVING = 5.0  # seconds for which torch waits for a worker, too


def _check(part: str, there: bool) -> None:
    if not there:
        raise UnsupportedSourceError(
            f"torch {torch.__version__} has no {part}, a private part that midepoch uses: install another version of "
            "torch"
        )


_check("DataLoader._get_iterator", hasattr(DataLoader, "_get_iterator"))
_WorkersIterator: Any = getattr(torch.utils.data.dataloader, "_MultiProcessingDataLoaderIter", None)
_check("_MultiProcessingDataLoaderIter._shutdown_workers", hasattr(_WorkersIterator, "_shutdown_workers"))


def iterates_as_torch(source: object) -> TypeIs[DataLoader[Any]]:
    """Whether a DataLoader makes its iterators as torch's class does."""
    kind: Any = type(source)
    return (
        isinstance(source, DataLoader)
        and kind.__iter__ is DataLoader.__iter__
        and kind._get_iterator is DataLoader._get_iterator
    )


def workers_of(iterator: Any) -> Sequence[Any]:
    """The worker processes of a DataLoader's iterator; none if it reads in this process."""
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    return workers


def alive(iterator: Any) -> bool:
    """Whether a DataLoader's iterator has not been shut down, and all its worker processes run, here and not in the
    process from which this one was forked.
    """
    return not getattr(iterator, "_shutdown", False) and all(
        worker._parent_pid == os.getpid() and worker.is_alive() for worker in workers_of(iterator)
    )


def shut_down(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator, if it has any. May be called twice."""
    if workers_of(iterator):
        iterator._shutdown_workers()


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """The iterator whose persistent worker processes a DataLoader keeps; None where there is none."""
    return loader._iterator


def keep_iterator(loader: DataLoader[Any], iterator: Any) -> None:
    """Let a DataLoader go on with the persistent worker processes of an iterator; with None, start others."""
    loader._iterator = iterator


def show_dataset(dataset: Any) -> None:
    """Let ``get_worker_info().dataset`` be this one, in a worker process.

    WorkerInfo refuses assignment, to guard users against it. torch's documentation has them configure that dataset.
    """
    info = get_worker_info()
    if info is not None:
        object.__setattr__(info, "dataset", dataset)


def end_when_collected(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator before it is collected as garbage.

    The collector may close the queues first through which torch tells its workers to leave. torch then waits for five
    seconds for each. This keeps nothing alive that a user has made.
    """
    workers = workers_of(iterator)
    if not workers or iterator in _watched:
        return
    done, queues = getattr(iterator, "_workers_done_event", None), getattr(iterator, "_index_queues", None)
    if done is None or queues is None:
        return  # an iterator of somebody else's class: it ends its workers itself, if slowly
    finalizer = weakref.finalize(iterator, _let_leave, os.getpid(), workers, done, queues)
    finalizer.atexit = False  # torch ends them there
    _watched.add(iterator)


_watched: weakref.WeakSet[Any] = weakref.WeakSet()  # persistent workers give a pass after the other by one iterator


def _let_leave(process: int, workers: Sequence[Any], done: Any, queues: Sequence[Any]) -> None:
    """Tell workers to leave, and wait until they have; torch ends those that have not."""
    if os.getpid() != process or done.is_set():
        return  # a forked process has none of them; torch has told them
    done.set()
    for queue in queues:
        with contextlib.suppress(ValueError):  # it is closed
            queue.put(None)
    until = time.monotonic() + _LEAVING
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
