"""Reading the rest of one epoch: a thread runs the steps ahead, and a session hands the batches out.

FFCV's own EpochIterator is not used, for three reasons: an exception in its thread leaves the consumer waiting forever,
a ``break`` leaves the thread behind, and it takes the list of indices for the whole epoch at once.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba.np.ufunc.parallel import NUM_THREADS

from midepoch.adapters.ffcv.pages import Pages
from midepoch.adapters.ffcv.pipeline import Batch, Damage, Step, StepGraph
from midepoch.adapters.ffcv.private import parts
from midepoch.errors import MidepochError, SourceError
from midepoch.loader.adapter import Session
from midepoch.randomness.streams import Streams

__all__ = ["Reading", "Request", "Work"]

_LONGEST_WAIT = 30.0  # seconds that closing waits for the thread, which may be compiling
_SECONDS_BETWEEN_CHECKS = 1.0  # of the file, while it is read
_NAME = "midepoch-ffcv"


class Request(NamedTuple):
    """One batch to read; the attributes are those of `Batch`."""

    indices: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint64]
    key: int
    first: int
    stop: int


class Work(NamedTuple):
    """What a session needs to know about its Loader.

    Attributes:
        loader: FFCV's.
        build_graph: returns the steps. It is called in the session's thread, because it compiles.
        file: the file's inode, size and time of change, which `stat` must still return.
        epoch: for messages.
        copies: whether batches are copied out of FFCV's buffers.
        streams: random streams for the steps that run in the consumer's thread; None leaves their generators alone.
    """

    loader: Any
    build_graph: Callable[[], StepGraph]
    file: tuple[int, int, int]
    epoch: int
    copies: bool
    streams: Streams | None


class _Ready(NamedTuple):
    slot: int
    batch: Batch


class _Failed(NamedTuple):
    error: BaseException


_END = None


class Reading(Session):
    """This rank's batches from one position on. Its thread starts at the first `take` and ends at `close`.

    The thread holds no reference to the session. So it also ends when an unclosed session is collected.
    """

    def __init__(
        self, work: Work, requests: Iterator[Request], count: int, look: Callable[[], None] | None = None
    ) -> None:
        self._work, self._count, self._look = work, count, look
        self._production = _Production(work, requests)
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._production.stop)
        self._held: int | None = None  # the slot of the previous batch
        self._ended = not count

    def take(self) -> Any:
        """The next batch, a tuple with one item for each field. Valid until the next call, unless copies are made."""
        if self._ended:
            raise StopIteration
        production = self._production
        if self._thread is None:
            self._thread = threading.Thread(target=production.run, name=_NAME, daemon=True)
            self._thread.start()
            if self._look is not None:
                self._look()  # while the thread reads, or compiles
        ready = production.next()
        if ready is _END:
            self._ended = True
            raise StopIteration
        if isinstance(ready, _Failed):
            self._ended = True
            raise ready.error
        production.release(self._held)
        self._held = ready.slot
        return self._finish(ready)

    def _finish(self, ready: _Ready) -> Any:
        production, batch, graph = self._production, ready.batch, self._production.graph
        if production.device is not None:
            torch.cuda.current_stream(production.device).wait_stream(production.cuda_streams[ready.slot])
        if production.deferred:
            _run_deferred(self._work, production, ready)
        result = tuple(batch.values[node] for node in graph.outputs)
        return tuple(_copied(value) for value in result) if self._work.copies else result

    def close(self) -> None:
        """End the thread."""
        self._finalizer()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LONGEST_WAIT)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _run_deferred(work: Work, production: _Production, ready: _Ready) -> None:
    streams, batch = work.streams, ready.batch
    if streams is None:
        raise MidepochError("a step was deferred but has no random stream: please report this")
    cuda = nullcontext() if production.device is None else _cuda_generator(production.device, batch.key)
    with streams.under(batch.key), cuda:
        for step in production.deferred:
            _run(step, batch, production.memory_of(step, ready.slot, batch), work)


@contextmanager
def _cuda_generator(device: torch.device, key: int) -> Iterator[None]:
    """Put the default generator of a GPU under the batch's stream, and then restore the caller's state."""
    before = torch.cuda.get_rng_state(device)
    torch.cuda.default_generators[device.index or 0].manual_seed(key & ((1 << 63) - 1))
    try:
        yield
    finally:
        torch.cuda.set_rng_state(before, device)


def _run(step: Step, batch: Batch, memory: tuple[Any, Any], work: Work) -> None:
    value = None if step.parent is None else batch.values[step.parent]
    try:
        if step.start is not None:
            step.start(memory[1])
        shared = () if step.shared is None else (memory[1],)
        batch.values[step.node] = step.call(batch, value, memory[0], shared)
    except Damage as damage:
        position = batch.first + damage.place
        raise SourceError(
            f"sample {batch.indices[damage.place]} of {work.loader.fname}, at position {position} of epoch "
            f"{work.epoch}, cannot be read: {damage.what}; write the file again, or leave the sample out with indices="
        ) from None
    except MidepochError:
        raise
    except Exception as error:
        raise SourceError(
            f"{step.name} failed on positions {batch.first} to {batch.stop - 1} of epoch {work.epoch} "
            f"(samples {_shown(batch.indices)} of {work.loader.fname}): {_first_line(error)}; fix the "
            "operation or the data, then continue: the next batch is this one again"
        ) from error


def _first_line(error: Exception) -> str:
    """Numba's errors are pages long. The traceback has all of it."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def _shown(indices: npt.NDArray[np.uint64]) -> str:
    listed = ", ".join(str(index) for index in indices[:8])
    return f"{listed}, ..." if len(indices) > 8 else listed


class _Production:
    """The thread's work. It holds no reference to the session, so that an abandoned session can be collected."""

    def __init__(self, work: Work, requests: Iterator[Request]) -> None:
        self._work, self._requests = work, requests
        self._ahead = work.loader.batches_ahead + 1
        # One slot for the batch that the consumer holds, and one for the batch that it has peeked at.
        self._slots = self._ahead + 2
        self._free = threading.Semaphore(self._ahead)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopped = False
        self._next_check = 0.0
        self._events: list[Any] = [None] * self._slots
        self._memory: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.graph = StepGraph((), ())
        self.deferred: tuple[Step, ...] = ()
        self.device: torch.device | None = None
        self.cuda_streams: list[Any] = []

    # --- for the consumer ---

    def next(self) -> _Ready | _Failed | None:
        item: _Ready | _Failed | None = self._queue.get()
        if item is not _END:
            self._free.release()
        return item

    def release(self, slot: int | None) -> None:
        """Free a slot: the consumer has requested another batch, so it submits no more work on the one in `slot`."""
        if slot is not None and self.device is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self._events[slot] = event

    def stop(self) -> None:
        self._stopped = True
        self._free.release()

    def memory_of(self, step: Step, slot: int, batch: Batch) -> tuple[Any, Any]:
        """A step's memory and shared memory, cut to the batch's number of samples."""
        memory, shared = self._memory[step.node, slot]
        count = len(batch.indices)
        if count < self._work.loader.batch_size and not step.scratch:
            return _first(memory, count), _first(shared, count)
        return memory, shared

    # --- the thread ---

    def run(self) -> None:
        """Produce until the requests end, the session closes, or something fails."""
        try:
            self._prepare()
            self._produce()
        except Exception as error:  # noqa: BLE001  # every error must reach the consumer
            self._queue.put(_Failed(self._as_source_error(error)))
        finally:
            self._requests = iter(())

    def _as_source_error(self, error: Exception) -> BaseException:
        if isinstance(error, MidepochError):
            return error
        told = SourceError(
            f"reading {self._work.loader.fname} in epoch {self._work.epoch} failed: {_first_line(error)}; "
            "see the error above this one"
        )
        told.__cause__ = error
        return told

    def _prepare(self) -> None:
        loader = self._work.loader
        numba.set_num_threads(loader.num_workers)  # for this thread only
        self.graph = self._work.build_graph()
        self.deferred = tuple(step for step in self.graph.steps if step.deferred)
        for step in self.graph.steps:
            kept, scratch = step.allocation, None
            if step.scratch:
                # FFCV has room to decode the images of all prefetched batches. Less room stays in the CPU's caches.
                kept, query = step.allocation
                scratch = parts().allocate_query(query, _most_threads(), 1)[0]
            both = [self._allocate(kept), self._allocate(step.shared)]
            for slot in range(self._slots):
                memory = _at(both[0], slot)
                self._memory[step.node, slot] = (memory if scratch is None else (memory, scratch), _at(both[1], slot))
        self.device = next(filter(None, (_cuda_device(step.allocation) for step in self.graph.steps)), None)
        if self.device is not None:
            self.cuda_streams = [
                torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
                for _ in range(self._slots)
            ]

    def _allocate(self, query: Any) -> Any:
        private, loader = parts(), self._work.loader
        if isinstance(query, private.AllocationQuery):
            return private.allocate_query(query, loader.batch_size, self._slots)
        if isinstance(query, Sequence):
            return tuple(private.allocate_query(each, loader.batch_size, self._slots) for each in query)
        return None

    def _produce(self) -> None:
        work, requests = self._work, self._requests
        manager = work.loader.memory_manager
        if isinstance(manager, parts().ProcessCacheManager):
            # FFCV schedules in advance which pages are in memory for which batch.
            listed = list(requests)
            requests, memory = iter(listed), Pages(manager, [request.indices for request in listed])
        else:
            memory = manager.schedule_epoch(())
        steps = tuple(step for step in self.graph.steps if not step.deferred)
        memory.__enter__()
        try:
            storage = memory.state
            for number, request in enumerate(requests):
                self._free.acquire()
                if self._stopped:
                    return
                self._check_file()
                slot = number % self._slots
                memory.start_batch(number)
                self._queue.put(_Ready(slot, self._run_steps(steps, request, slot, storage)))
            self._queue.put(_END)
        finally:
            memory.__exit__(None, None, None)

    def _check_file(self) -> None:
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _SECONDS_BETWEEN_CHECKS
            check_file(self._work.loader.fname, self._work.file)

    def _run_steps(self, steps: tuple[Step, ...], request: Request, slot: int, storage: Any) -> Batch:
        batch = Batch(request.indices, request.keys, request.key, request.first, request.stop, storage, {})
        event = self._events[slot]
        if event is not None:
            # The CPU must wait too, not only the CUDA stream: the steps write to the memory that is being copied.
            event.synchronize()
        stream: AbstractContextManager[Any] = nullcontext()
        if self.device is not None:
            stream = torch.cuda.stream(self.cuda_streams[slot])
        with stream:
            for step in steps:
                _run(step, batch, self.memory_of(step, slot, batch), self._work)
        return batch


def _most_threads() -> int:
    """The number of threads that numba found on import; its configuration may have changed since."""
    return int(NUM_THREADS)


def _at(memory: Any, slot: int) -> Any:
    if isinstance(memory, tuple):
        return tuple(each[slot] for each in memory)
    return None if memory is None else memory[slot]


def _first(memory: Any, count: int) -> Any:
    if isinstance(memory, tuple):
        return tuple(each[:count] for each in memory)
    return None if memory is None else memory[:count]


def _cuda_device(allocation: Any) -> torch.device | None:
    device = getattr(allocation, "device", None)
    return device if isinstance(device, torch.device) and device.type == "cuda" else None


def identity_of(path: str) -> tuple[int, int, int]:
    """The file's inode, size and time of change, which distinguish it from a replacement.

    Raises:
        SourceError: there is no file.
    """
    try:
        found = Path(path).stat()
    except OSError as error:
        raise SourceError(f"{path} no longer exists ({error.strerror}): restore it") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def check_file(path: str, expected: tuple[int, int, int]) -> None:
    """Raise SourceError unless the file is the one whose header the Loader read."""
    found = identity_of(path)
    if found != expected:
        raise SourceError(
            f"{path} has changed since its Loader was wrapped (it had {expected[1]} bytes, now {found[1]}): "
            "make a new Loader"
        )
