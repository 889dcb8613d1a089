"""Signals that a training loop handles at its next batch; and how to leave on one."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ..errors import MidepochError
from ..reading.workers import signals_in_hand
from .private import run_exit_functions

__all__ = ["Signals", "end_process"]


class Signals:
    """Receives signals for an object. It refers to the object weakly, because a handler must not keep it alive.

    `told` is called when one of these `numbers` is received, as long as its object exists.

    Raises:
        MidepochError: this is not the main thread.
        ValueError: one of them cannot be received.
    """

    def __init__(self, numbers: Iterable[signal.Signals], told: Callable[[], None]) -> None:
        self.received = 0  # number of the last signal
        self.kept = False  # `drop` leaves the handlers in place, so that a later signal is received and ignored
        self._told, self._process, self._closed = weakref.WeakMethod(told), os.getpid(), False
        self._handlers: dict[int, Any] = {}  # by signal: the previous handler
        wanted = list(numbers)
        if wanted and threading.current_thread() is not threading.main_thread():
            raise MidepochError("only the main thread can receive signals: make the Snapshot there, or pass signals=()")
        for number in wanted:
            try:
                self._handlers[number] = signal.signal(number, self._receive)
                signals_in_hand.add(int(number))
            except (ValueError, OSError, TypeError) as error:
                self.close()
                cure = "pass signals such as signal.SIGTERM"
                raise ValueError(f"{number!r} cannot be received ({error}): {cure}") from None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # In a forked child, such as a worker, the signal must have its default effect. A later handler may have
        # restored this one after `close`.
        before = self._handlers.get(number) if os.getpid() == self._process else None
        if os.getpid() != self._process or (self._closed and not callable(before)):
            signal.signal(number, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), number)
            return
        if callable(before) and (self._closed or isinstance(getattr(before, "__self__", None), Signals)):
            before(number, frame)
        if self._closed:
            return
        self.received = number
        if (told := self._told()) is not None:
            told()

    def wait(self, seconds: float) -> None:
        """Wait for a signal, or for this many seconds."""
        until = time.monotonic() + seconds
        while not self.received and time.monotonic() < until:
            time.sleep(0.02)

    def close(self) -> None:
        """Restore the previous handlers. May be called twice, and from any thread."""
        self._closed = True
        for number, before in self._handlers.items():
            if signal.getsignal(number) == self._receive:
                try:
                    signal.signal(number, signal.SIG_DFL if before is None else before)
                except ValueError:  # not the main thread: `_receive` restores the handler when the signal comes
                    return

    def drop(self) -> None:
        """Close unless `kept` is set, because the object that would answer is gone."""
        if not self.kept:
            self.close()


def end_process(status: int) -> None:
    """Run the remaining atexit functions, then end the process without the interpreter's own shutdown.

    The model in DistributedDataParallel and the process group still exist then. When C++ destroys them, gloo's threads
    may abort the process ("terminate called without an active exception"), and torchrun would report a failed job.
    """
    atexit.unregister(end_process)
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
