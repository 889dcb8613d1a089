"""Signals that a training loop answers at its next batch, in place of their default action; and leaving on one."""

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

from midepoch.errors import MidepochError
from midepoch.reading.workers import signals_in_hand

__all__ = ["Signals", "end_process"]


class Signals:
    """Receives signals for an object, which it refers to weakly: a handler outlives the object, and must not keep it.

    Args:
        numbers: the signals to receive; none to leave all of them alone.
        told: a method to call when one is received, as long as its object exists.

    Attributes:
        received: number of the last signal, or 0.
        kept: `drop` leaves the handlers in place, so that a later signal is received and ignored.

    Raises:
        MidepochError: this is not the main thread.
        ValueError: one of them cannot be received.
    """

    def __init__(self, numbers: Iterable[signal.Signals], told: Callable[[], None]) -> None:
        self.received, self.kept = 0, False
        self._told, self._process, self._closed = weakref.WeakMethod(told), os.getpid(), False
        self._handlers: dict[int, Any] = {}  # by signal: the handler that was there before
        wanted = list(numbers)
        if wanted and threading.current_thread() is not threading.main_thread():
            raise MidepochError(
                "signals can be received in the main thread alone: make the Snapshot there, or pass signals=()"
            )
        for number in wanted:
            try:
                self._handlers[number] = signal.signal(number, self._receive)
                signals_in_hand.add(int(number))
            except (ValueError, OSError, TypeError) as error:
                self.close()
                raise ValueError(
                    f"{number!r} cannot be received ({error}): pass signals such as signal.SIGTERM"
                ) from None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked child, such as a worker: the signal must end it, as it would have without this handler.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        before = self._handlers.get(number)
        if self._closed and not callable(before):
            # A handler that was installed after this one has restored it, after `close`.
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
        """Wait until a signal has been received, or for this many seconds."""
        until = time.monotonic() + seconds
        while not self.received and time.monotonic() < until:
            time.sleep(0.02)

    def close(self) -> None:
        """Restore the handlers that were there before. May be called twice, and in any thread."""
        self._closed = True
        for number, before in self._handlers.items():
            if signal.getsignal(number) == self._receive:
                try:
                    signal.signal(number, signal.SIG_DFL if before is None else before)
                except ValueError:  # not the main thread: `_receive` restores it when the signal comes
                    return

    def drop(self) -> None:
        """Close, because nobody is left to answer, unless `kept` is set."""
        if not self.kept:
            self.close()


def end_process(status: int) -> None:
    """Run the remaining functions of atexit, then end the process without the interpreter's own shutdown.

    The model in DistributedDataParallel and the process group still exist then. When C++ destroys them, gloo's threads
    may abort the process ("terminate called without an active exception"), and torchrun would report a failed job.
    """
    atexit.unregister(end_process)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
