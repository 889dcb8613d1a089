"""Spawned processes that run functions. They are kept for all laws of a session, because a start takes seconds.

Each process is a separate interpreter with its own hash seed and random generators, as after a restart. Every call has
a time limit. A process that dies is named in the error and replaced. All processes end with this one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import itertools
import logging
import multiprocessing
import pickle
import pickletools
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

__all__ = ["Call", "ProcessError", "ProcessPool", "shared_pool"]

_FIRST_CALL_ALLOWANCE = 120.0  # seconds that a new process may need to import torch on a busy machine
_GRACE = 5.0  # seconds that a process has to end before it is killed


class ProcessError(RuntimeError):
    """A spawned process raised, died, or did not answer in time."""


@dataclass(frozen=True)
class Call:
    """``function(*arguments)``, to be run in process number ``process`` of a pool. All of it must be picklable."""

    process: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = field(default=())


class ProcessPool:
    """Processes numbered from 0, each started when it is first called."""

    def __init__(self) -> None:
        self._servers: dict[int, _Server] = {}
        self._lock = threading.Lock()

    def run(self, calls: Sequence[Call], *, timeout: float) -> list[Any]:
        """The results of ``calls``, in their order. Calls to one process run in sequence, others in parallel.

        ``timeout`` is in seconds for each call. Raises `ProcessError` for a call that raises, dies or takes longer, and
        ends the processes that are still working.
        """
        payloads = [_pack(call) for call in calls]
        results: list[Any] = [None] * len(calls)

        def answer(process: int) -> None:
            for number, call in enumerate(calls):
                if call.process == process:
                    results[number] = self._servers[process].answer(call, payloads[number], timeout)

        processes = sorted({call.process for call in calls})
        with self._lock, ThreadPoolExecutor(len(processes) or 1) as threads:
            for process in processes:
                if process not in self._servers or not self._servers[process].process.is_alive():
                    self._servers[process] = _Server(process)
            waiting = {threads.submit(answer, process): process for process in processes}
            try:
                for done in as_completed(waiting):
                    done.result()
            finally:
                for future, process in waiting.items():
                    if not future.done():
                        self._servers[process].kill()
        return results

    def close(self) -> None:
        """End all processes. The next `run` starts new ones."""
        with self._lock:
            servers, self._servers = list(self._servers.values()), {}
        for server in servers:
            with contextlib.suppress(OSError):  # it has already ended
                server.connection.send_bytes(b"")
        deadline = time.monotonic() + _GRACE
        for server in servers:
            server.process.join(max(0.0, deadline - time.monotonic()))
            server.kill()


@functools.cache
def shared_pool() -> ProcessPool:
    """The only pool of this session, closed at exit."""
    pool = ProcessPool()
    atexit.register(pool.close)
    return pool


class _Server:
    """One spawned process and the pipe to it."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._number, self._allowance = number, _FIRST_CALL_ALLOWANCE
        # How this process starts others: as set, or the platform's default. Asking does not fix the choice.
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        # Not a daemon: daemons must not have children, but loaders start workers.
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, method), daemon=False)
        self.process.start()
        theirs.close()

    def answer(self, call: Call, payload: bytes, timeout: float) -> Any:
        """The result of a call. A process that does not give one in time is killed."""
        name = getattr(call.function, "__name__", "a call")
        try:
            self.connection.send_bytes(payload)
            if not self.connection.poll(timeout + self._allowance):
                self.kill()
                raise ProcessError(
                    f"process {self._number} did not finish '{name}' within {timeout:.0f} s; the loader hangs or its "
                    "epoch is endless. Give make_loader a smaller epoch, or raise timeout="
                )
            succeeded, result, trace = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.process.join(_GRACE)
            code = self.process.exitcode
            self.kill()
            raise ProcessError(
                f"process {self._number} died with exit code {code} in '{name}'. "
                f"If it never started: a script that checks a loader needs `if __name__ == '__main__':` around the call"
            ) from error
        self._allowance = 0.0
        if not succeeded:
            raise ProcessError(f"process {self._number}: {result}\n{trace}".rstrip())
        return result

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(_GRACE)


def _pack(call: Call) -> bytes:
    try:
        payload = pickle.dumps((call.function, call.arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"make_loader and everything given with it must be picklable, because loaders are resumed in other "
            f"processes ({error}); define it at module level, or use functools.partial of such a function"
        ) from error
    return pickle.dumps((_module_files(payload), payload))


def _module_files(payload: bytes) -> dict[str, str]:
    """Module name -> file, for the modules a pickle refers to. A test module is seldom on the import path."""
    files: dict[str, str] = {}
    for _, argument, _ in pickletools.genops(payload):
        if isinstance(argument, str) and argument in sys.modules and argument != "__main__":
            file = getattr(sys.modules[argument], "__file__", None)
            if file is not None:
                files[argument] = file
    return files


def _provide_modules(files: dict[str, str]) -> None:
    for name, file in files.items():
        if _is_importable(name):
            continue
        for parent in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
            if not _is_importable(parent):
                sys.modules[parent] = types.ModuleType(parent)
        specification = importlib.util.spec_from_file_location(name, file)
        if specification is None or specification.loader is None:
            continue
        sys.modules[name] = module = importlib.util.module_from_spec(specification)
        try:
            specification.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise


def _is_importable(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _serve(connection: Connection, start_method: str) -> None:
    import torch

    # What a loader logs of its resumes is no finding: thousands are tried here. A handler keeps it from standard error.
    logging.getLogger("midepoch").addHandler(logging.NullHandler())
    # A spawned process would spawn its own, which takes seconds for each worker. Use the caller's start method instead.
    multiprocessing.set_start_method(start_method, force=True)

    torch.set_num_threads(1)  # several ranks share the machine
    # An interrupt reaches the whole process group. The calling process ends this one by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        if not message:
            return
        connection.send_bytes(_answer(message))


def _answer(message: bytes) -> bytes:
    try:
        files, payload = pickle.loads(message)
        _provide_modules(files)
        function, arguments = pickle.loads(payload)
        return pickle.dumps((True, function(*arguments), ""))
    except Exception as error:  # noqa: BLE001 - it is sent back and raised in the caller
        return pickle.dumps((False, f"{type(error).__name__}: {error}", traceback.format_exc()))
