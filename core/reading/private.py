"""Private parts of torch's DataLoader that midepoch uses: the worker processes behind an iterator.

They are checked on import. The versions of torch are those that midepoch itself requires.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, get_worker_info

from ..errors import UnsupportedSourceError

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # in Python's own typing from 3.13 on

__all__ = [
    "alive", "attributes_of_torch", "end_by_kill", "end_early_workers", "end_when_collected", "gives_its_own",
    "is_iterator", "is_place_holder", "iterates_as_torch", "iterating_by", "keep_iterator", "kept_iterator", "pinning",
    "plain_loader", "show_dataset", "shut_down", "workers_of",
]  # fmt: skip

_LEAVING = 5.0  # seconds; torch waits as long for a worker


def _part(path: str, of: Any = torch.utils.data) -> Any:
    try:
        return operator.attrgetter(path)(of)
    except AttributeError:
        raise UnsupportedSourceError(
            f"torch {torch.__version__} has no {path}, a private part that midepoch uses: install another version of "
            "torch"
        ) from None


_part("DataLoader._get_iterator")
_part("dataloader._MultiProcessingDataLoaderIter._shutdown_workers")
_Iterator = _part("dataloader._BaseDataLoaderIter")
_pin_memory = _part("_utils.pin_memory.pin_memory")
_PlaceHolder: Any = getattr(torch.utils.data.dataloader, "_InfiniteConstantSampler", ())


def is_place_holder(sampler: object) -> bool:
    """Whether it is what a DataLoader over a stream has in place of a sampler."""
    return isinstance(sampler.sampler if type(sampler) is BatchSampler else sampler, _PlaceHolder)


def iterates_as_torch(source: object) -> TypeIs[DataLoader[Any]]:
    """Whether `source` is a DataLoader that creates its iterators as torch's class does."""
    kind: Any = type(source)
    return (
        isinstance(source, DataLoader)
        and kind.__iter__ is DataLoader.__iter__
        and kind._get_iterator is DataLoader._get_iterator
    )


def gives_its_own(loader: DataLoader[Any]) -> bool:
    """Whether a subclass has a way of its own to make iterators, over those that torch's class creates.

    One that makes iterators with a state of its own, as torchdata's, does not use torch's.
    """
    kind: Any = type(loader)
    if kind._get_iterator is DataLoader._get_iterator:
        return kind.__iter__ is not DataLoader.__iter__
    return getattr(kind, "load_state_dict", None) is getattr(DataLoader, "load_state_dict", None)


@functools.cache
def attributes_of_torch() -> frozenset[str]:
    """The attributes of every DataLoader."""
    return frozenset(vars(DataLoader([0])))  # type: ignore[arg-type]


def plain_loader(loader: DataLoader[Any], **instead: Any) -> DataLoader[Any]:
    """A DataLoader of torch's own class with the attributes of `loader`, but for some. It has no iterator."""
    plain = object.__new__(DataLoader)
    known = attributes_of_torch()
    plain.__dict__.update({name: value for name, value in vars(loader).items() if name in known})
    plain.__dict__.update(instead, _iterator=None)
    return plain


def iterating_by(begin: Callable[[], Any], loader: DataLoader[Any]) -> dict[str, Any]:
    """The attributes with which ``super().__iter__()`` in a loader's class returns what `begin` does.

    Where the class has a ``_get_iterator`` of its own, ``super()._get_iterator()`` there does.
    """
    kind: Any = type(loader)
    make = begin
    if kind._get_iterator is not DataLoader._get_iterator:
        fed = type("Fed", (DataLoader,), {"_get_iterator": lambda self: begin()})
        clone: Any = object.__new__(type(kind.__name__, (kind, fed), {}))  # `super()` finds `fed` before torch's class
        object.__setattr__(clone, "__dict__", vars(loader))
        make = functools.partial(kind._get_iterator, clone)
    return {"_get_iterator": make, "_iterator": None, "persistent_workers": False}


def is_iterator(value: object) -> bool:
    """Whether it is an iterator of a DataLoader, or of torchdata's, whose classes derive from torch's."""
    return issubclass(type(value), _Iterator)


def workers_of(iterator: Any) -> Sequence[Any]:
    """The worker processes of a DataLoader's iterator; none if it reads in this process."""
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    return workers


def alive(iterator: Any) -> bool:
    """Whether a DataLoader's iterator is open, and all its worker processes are running children of this process."""
    return not getattr(iterator, "_shutdown", False) and all(
        getattr(worker, "_parent_pid", None) == os.getpid() and worker.is_alive() for worker in workers_of(iterator)
    )


def shut_down(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator, if it has any. May be called twice."""
    if workers_of(iterator):
        iterator._shutdown_workers()


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """The iterator with which a DataLoader keeps persistent worker processes; None if there is none."""
    return loader._iterator


def keep_iterator(loader: DataLoader[Any], iterator: Any) -> None:
    """Give a DataLoader an iterator's persistent worker processes; None makes it start new ones."""
    loader._iterator = iterator


def end_early_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes that a DataLoader has from before it was wrapped: their data and seeds are older."""
    kept = kept_iterator(loader)
    if workers_of(kept) and alive(kept):
        shut_down(kept)
        keep_iterator(loader, None)


def show_dataset(dataset: Any) -> None:
    """In a worker process, make ``get_worker_info().dataset`` return `dataset`.

    torch's documentation tells users to configure that dataset. WorkerInfo itself refuses assignment.
    """
    info = get_worker_info()
    if info is not None:
        object.__setattr__(info, "dataset", dataset)


def end_by_kill(process: Any) -> None:
    """Have a process that survives signals be killed where torch, or an exit of this process, would terminate it."""
    begun = process._popen

    def leave() -> None:
        with contextlib.suppress(ValueError):  # in another thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise here, uncaught
        begun.kill()

    process.terminate, begun.terminate = process.kill, leave


def end_when_collected(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator before it is collected as garbage.

    The collector may first close the queues through which torch tells its workers to exit. torch then waits five
    seconds for each worker. This keeps no object of the user alive.
    """
    workers = workers_of(iterator)
    if not workers or iterator in _watched:
        return
    done, queues = getattr(iterator, "_workers_done_event", None), getattr(iterator, "_index_queues", None)
    if done is None or queues is None:
        return  # a foreign class: it ends its workers by itself, if slowly
    finalizer = weakref.finalize(iterator, _let_leave, os.getpid(), workers, done, queues)
    finalizer.atexit = False  # at exit torch ends them
    _watched.add(iterator)


_watched: weakref.WeakSet[Any] = weakref.WeakSet()  # with persistent workers one iterator serves every pass


def _let_leave(process: int, workers: Sequence[Any], done: Any, queues: Sequence[Any]) -> None:
    """Tell workers to exit and wait for them; torch ends those that do not."""
    if os.getpid() != process or done.is_set():
        return  # they belong to the parent process, or torch has told them
    done.set()
    for queue in queues:
        with contextlib.suppress(ValueError):  # it is closed
            queue.put(None)
    until = time.monotonic() + _LEAVING
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))


def pinning(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """The collate function of a loader without workers, with what follows it: pinned memory, if the loader says so."""
    collate: Callable[[Any], Any] = loader.collate_fn
    if not (loader.pin_memory and torch.accelerator.is_available()):
        return collate
    return lambda samples: _pin_memory(collate(samples))
