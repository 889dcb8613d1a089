"""Answer requests in this process or in worker processes, with the settings of a torch DataLoader.

The worker processes belong to a DataLoader of our own. Its "dataset" is a reader, and its "sampler" yields requests.
Workers have no progress to save, because a request contains everything its answer depends on. Answers come back in the
order of the requests.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from types import FrameType
from typing import Any, Protocol, Self

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from ..errors import SourceError, UnsupportedSourceError
from ..loader.adapter import Options, Run
from ..order.keys import TORCH_KEYS, derive_key
from ..randomness.streams import Purpose, no_other_reads
from ..summary import changed_paths, summarize
from .collating import as_it_is
from .private import alive, end_by_kill, end_when_collected, kept_iterator, show_dataset, shut_down, workers_of

__all__ = ["Server", "WorkerAnswers", "raise_if_worker_died", "signals_in_hand", "workers_outlive_signals"]

_logger = logging.getLogger("midepoch")

signals_in_hand: set[int] = set()
"""Signals that this process handles at its next batch. Its worker processes survive them."""


def _nothing() -> None:
    pass


class Reader(Protocol):
    """Answers requests, in any process.

    Attributes:
        dataset: the user's.
        request: the type of its requests: a named tuple.
    """

    dataset: Any
    request: Any

    def __call__(self, request: Any) -> Any:
        """The answer to one request."""
        ...


class Server:
    """Answers requests in this process or in worker processes, as the user's DataLoader is set up.

    Args:
        loader: the user's. Its dataset, sampler and collate function are not used.
        options: as given to `wrap`.
        workers: processes; None for as many as the loader has. None are started if it has none.
    """

    def __init__(self, loader: DataLoader[Any], options: Options, workers: int | None = None) -> None:
        self._loader, self._workers = loader, loader.num_workers if workers is None else workers
        self._streams = options.streams
        self._persistent: dict[int, _Kept] = {}  # by process: a forked one has no workers, and must not end these

    def __call__(self, reader: Reader, requests: Iterator[Any], run: Run) -> tuple[Iterator[Any], Callable[[], None]]:
        """The answers of `reader`, in the order of `requests` (of a generator), and a function that stops."""
        theirs = self._loader
        if theirs.num_workers == 0 and not (theirs.pin_memory and torch.accelerator.is_available()):
            return map(reader, requests), _nothing
        ours = self._kept(reader) if theirs.persistent_workers else self._make(reader)
        sampler = ours.sampler
        assert isinstance(sampler, _Requests)  # _make's
        sampler.asked = weakref.ref(requests)
        if self._streams and ours.generator is not None:
            # Worker processes take their base seed from it, not from the caller's generator.
            ours.generator.manual_seed(derive_key(Purpose.OPENING, run.seed, run.epoch) & TORCH_KEYS)
        with _starting(ours):
            answers = iter(ours)
        stop = _nothing if theirs.persistent_workers else functools.partial(shut_down, answers)
        return WorkerAnswers(answers, requests=requests), stop

    def _kept(self, reader: Reader) -> DataLoader[Any]:
        """A DataLoader whose workers stay. They start anew if one has died, or what they read has changed."""
        theirs, kept = self._loader, self._persistent.get(os.getpid())
        held = summarize(dataset=reader.dataset, collate_fn=theirs.collate_fn, worker_init_fn=theirs.worker_init_fn)
        if kept is not None:
            changed = changed_paths(kept.held, held)
            if kept.reader is reader and alive(kept_iterator(kept.loader)) and not changed:
                return kept.loader
            self.close()
            if changed:
                _logger.info(
                    "%s changed after the kept workers had started, so they start anew: what lies in shared memory "
                    "(torch.Tensor.share_memory_) may change",
                    f"{', '.join(changed[:3])}{' and more' * (len(changed) > 3)}",
                )
        ours = self._make(reader)
        self._persistent[os.getpid()] = _Kept(reader, ours, held)
        return ours

    def _make(self, reader: Reader) -> DataLoader[Any]:
        theirs = self._loader
        return DataLoader(
            _ReaderDataset(reader),
            batch_size=None,
            sampler=_Requests(),
            collate_fn=as_it_is,
            num_workers=self._workers,
            pin_memory=theirs.pin_memory,
            pin_memory_device=theirs.pin_memory_device,
            timeout=theirs.timeout,
            worker_init_fn=_WorkerInit(theirs, shows=True),
            multiprocessing_context=theirs.multiprocessing_context,
            generator=torch.Generator() if self._streams else theirs.generator,
            prefetch_factor=theirs.prefetch_factor,
            persistent_workers=theirs.persistent_workers,
        )

    def close(self) -> None:
        """End worker processes that outlive a session."""
        if (kept := self._persistent.pop(os.getpid(), None)) is not None:
            shut_down(kept_iterator(kept.loader))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_persistent": {}}


@dataclass
class _Kept:
    """Workers that outlive a session.

    Attributes:
        reader: that they have.
        loader: whose workers they are.
        held: the summary of what they read, as it was when they started.
    """

    reader: Reader
    loader: DataLoader[Any]
    held: dict[str, int]


class _WorkerError(SourceError, RuntimeError):
    """A worker process has died. It is a RuntimeError too, for loops that catch torch's."""


class WorkerAnswers:
    """A DataLoader's iterator whose errors say why a worker process died, and what to do.

    Args:
        iterator: torch's. Its worker processes end when it is dropped.
        tell: called with the reason of an error and the error; it may raise another one.
        requests: kept alive as long as this object.

    Attributes:
        failed: the iterator has raised an error other than StopIteration.

    For a dead worker torch raises a RuntimeError, as for many other things, without a cure. If a batch was on its way
    from that worker, torch raises whatever error the broken connection causes.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        tell: Callable[[str, Exception], None] | None = None,
        requests: Iterator[Any] | None = None,
    ) -> None:
        self._next, self._tell, self._requests = iterator.__next__, tell or raise_if_worker_died, requests
        self._workers = workers_of(iterator)
        self.failed = False
        end_when_collected(iterator)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._next()
        except StopIteration:
            raise
        except (RuntimeError, OSError, EOFError) as error:
            self.failed = True
            self._tell(self._reason(error), error)
            raise
        except BaseException:
            self.failed = True
            raise

    def end(self, instead: Callable[[], Any]) -> None:
        """End the worker processes. From now on, `next` calls `instead`."""
        iterator = getattr(self._next, "__self__", None)
        self._next, self._workers = instead, ()
        shut_down(iterator)

    def _reason(self, error: BaseException) -> str:
        """torch's message for a dead worker, even if torch noticed only the broken connection."""
        # torch rebuilds a worker's own error from a text that contains "Caught".
        if self._workers and not isinstance(error, RuntimeError) and "Caught " not in str(error):
            until = time.monotonic() + _DYING
            try:
                while time.monotonic() < until:
                    for worker in self._workers:
                        if not worker.is_alive() and worker.exitcode:  # exit code 0: it had finished
                            return f"DataLoader worker (pid {worker.pid}) exited unexpectedly"
                    time.sleep(0.01)
            except RuntimeError as told:  # raised by torch's signal handler
                return str(told)
        return str(error)


def raise_if_worker_died(reason: str, error: Exception) -> None:
    """Raise a _WorkerError with its cure if `reason` says that a worker has died."""
    reason = reason.strip().rstrip(".")
    cure = next((cure for told, cure in _CURES.items() if told.search(reason)), None)
    if cure is not None:
        raise _WorkerError(f"{reason}: {cure}; the next batch is the one that failed") from error


_DYING = 2.0  # seconds at most between a worker's connections closing and its end

# By torch's message. A worker's own error begins with other words.
_CURES = {
    re.compile(r"^DataLoader timed out"): "find what the dataset waits for, or give the DataLoader a longer timeout",
    re.compile(r"^DataLoader worker \(.*\) is killed by signal: (Bus error|.*shared memory)"): (
        "shared memory probably ran out; enlarge /dev/shm (docker run --shm-size), or use fewer workers or "
        "a smaller prefetch_factor"
    ),
    re.compile(r"^DataLoader worker \(.*\) (is killed by signal: (Killed|Aborted)|exited unexpectedly)"): (
        "the system kills processes that take too much memory (dmesg names them); use fewer workers, smaller batches "
        "or a smaller prefetch_factor"
    ),
    re.compile(r"^(DataLoader worker \(.*\) is killed|Pin memory thread exited)"): (
        "find what killed it in the output above or in dmesg"
    ),
}


class _Requests(Sampler[Any]):
    """The sampler of our DataLoader: the requests of the running session, which keeps them alive.

    It refers to them weakly. They may refer to the adapter, which holds our DataLoader and its persistent workers. In a
    cycle, these would run on after the adapter is dropped, until garbage is collected.
    """

    def __init__(self) -> None:
        self.asked: Callable[[], Iterator[Any] | None] = _nothing

    def __iter__(self) -> Iterator[Any]:
        return iter(functools.partial(_next_of, self.asked), None)


def _next_of(asked: Callable[[], Iterator[Any] | None]) -> tuple[Any, ...] | None:
    """The next request as a plain tuple, pickled in half the time of a named one; None once the session is gone."""
    requests = asked()
    return None if requests is None else (*next(requests),)


class _ReaderDataset(Dataset[Any]):
    """The dataset of our DataLoader: a reader that answers requests."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._made = functools.partial(tuple.__new__, reader.request)  # at a third of what the type itself takes

    def __getitem__(self, fields: tuple[Any, ...]) -> Any:
        return self.reader(self._made(fields))


# --- starting them, and signals that they outlive ---------------------------------------------------------------------


@contextlib.contextmanager
def _starting(loader: DataLoader[Any]) -> Iterator[None]:
    """Hold back signals while worker processes start, until these have handlers of their own.

    Also turns the error that torch's signal handler may raise here into one with a cure.
    """
    numbers = set(signals_in_hand) if threading.current_thread() is threading.main_thread() else set()
    method = _start_method(loader)
    if numbers and method != "fork":
        # multiprocessing starts these helpers once. They must not inherit blocked signals.
        resource_tracker.ensure_running()
        if method == "forkserver":
            forkserver.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ()) if numbers else None
    others = set(multiprocessing.active_children()) if signals_in_hand else set()
    try:
        if numbers:
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # new processes inherit the mask
        with no_other_reads() if method == "fork" else contextlib.nullcontext():
            yield
    except RuntimeError as error:
        raise_if_worker_died(str(error), error)
        raise
    finally:
        for process in set(multiprocessing.active_children()) - others if signals_in_hand else ():
            if process.daemon:  # as torch's are: another thread may have started one of its own
                end_by_kill(process)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_method(loader: DataLoader[Any]) -> str:
    method: str = (loader.multiprocessing_context or multiprocessing).get_start_method()
    return method


class _WorkerInit:
    """A ``worker_init_fn`` that lets the process survive signals, then calls the user's own.

    Args:
        loader: the user's.
        shows: the worker reads for a `Server`, and ``get_worker_info().dataset`` is to be the user's.
    """

    def __init__(self, loader: DataLoader[Any], shows: bool) -> None:
        self._then, self._shows = loader.worker_init_fn, shows
        # The expected parent process; None with a fork server, whose child the worker then is.
        self._main = None if _start_method(loader) == "forkserver" else os.getpid()
        self._held_back = tuple(signals_in_hand)
        # Processes of a user's own context die from signals.
        context = loader.multiprocessing_context
        self._outlives = context is None or type(context).__module__ == BaseContext.__module__

    def __call__(self, worker: int) -> None:
        if os.getpid() != self._main:
            self._become_a_worker()
        elif self._shows:
            raise UnsupportedSourceError(
                "the workers of this DataLoader are threads, which would seed each other's random generators: leave "
                "multiprocessing_context out, or set num_workers=0"
            )
        if self._shows:
            show_dataset(get_worker_info().dataset.reader.dataset)  # type: ignore[union-attr]
        if self._then is not None:
            self._then(worker)

    def _become_a_worker(self) -> None:
        for number in self._held_back if self._outlives else ():
            signal.signal(number, functools.partial(_outlive, os.getppid()))
        if os.getppid() != (self._main or os.getppid()):
            # torch's worker watches its parent only from here on, and would take the process that adopted it for that.
            os._exit(1)
        if self._held_back:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._held_back)


def _outlive(parent: int, number: int, frame: FrameType | None) -> None:
    """A worker's signal handler. It ignores the signal while the parent lives, which needs the worker for its batch."""
    if os.getppid() != parent:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def workers_outlive_signals(source: object) -> Iterator[None]:
    """Use it around ``iter()`` of a user's own loader. Workers that the loader starts later do not outlive signals."""
    if not isinstance(source, DataLoader) or not source.num_workers:
        yield
        return
    function = source.worker_init_fn
    if signals_in_hand:
        source.worker_init_fn = _WorkerInit(source, shows=False)
    try:
        with _starting(source):
            yield
    finally:
        source.worker_init_fn = function
