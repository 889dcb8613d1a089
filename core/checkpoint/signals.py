"""Signals that a training loop answers at its next batch, in place of what they would do at once."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from midepoch.errors import MidepochError
from midepoch.reading.workers import signals_in_hand

__all__ = ["Signals"]

class Signals:
    """Notes signals for somebody whom it does not keep: handlers stay, a model that a handler held would stay too.

    Args:
        numbers: of the signals; none to leave all alone.
        told: a method that is called when one is received, as long as its object is there.

    Attributes:
        received: number of the last one, or 0.
        kept: whether they are still noted when nobody is left to answer them.

    Raises:
        MidepochError: this is not the main thread.
        ValueError: one of them cannot be received.
    """

    def __init__(self, numbers: Iterable[signal.Signals], told: Callable[[], None]) -> None:
        self.received, self.kept = 0, False
        self._told, self._process, self._closed = weakref.WeakMethod(told), os.getpid(), False
        self._handlers: dict[int, Any] = {}  # of others, by signal
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
            # A child that was forked, a worker say: what would have ended it must end it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        before = self._handlers.get(number)
        if self._closed and not callable(before):
            # Somebody who was installed later gave it back.
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
        """Until one has been received, but no longer than so many seconds."""
        until = time.monotonic() + seconds
        while not self.received and time.monotonic() < until:
            time.sleep(0.02)

    def close(self) -> None:
        """Give the signals back to whom they belonged. May be called twice, and in any thread."""
        self._closed = True
        for number, before in self._handlers.items():
            if signal.getsignal(number) == self._receive:
                try:
                    signal.signal(number, signal.SIG_DFL if before is None else before)
                except ValueError:  # another thread may not; it is given back when it is received
                    return

    def drop(self) -> None:
        """Close, because nobody is left to answer, unless they are kept."""
        if not self.kept:
            self.close()
