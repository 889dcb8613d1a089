"""A session over a source with a state of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from midepoch.errors import SourceError, StateError
from midepoch.loader.adapter import Reach, Run, Session
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.state.codec import decode, encode

__all__ = ["ENDED", "Keyed", "StatefulSession"]

ENDED = "ended:"
"""Before the detail of a pass that was read to its end; a source would begin anew from its own state."""


class _Adapter(Protocol):
    """What a session asks of its adapter, which outlives it."""

    source: Any
    reach: Reach
    opening: Streams | None
    is_at: str

    def begin(self, run: Run) -> None: ...
    def tell_the_epoch(self, epoch: int) -> None: ...
    def start(self, run: Run, state: Any) -> Iterator[Any]: ...
    def reading(self, run: Run, iterator: Iterator[Any]) -> Callable[[], Any]: ...
    def current(self, iterator: Iterator[Any]) -> Any: ...
    def is_to_be_tried(self, run: Run) -> bool: ...
    def try_state(self, run: Run, detail: str, batch: Any) -> None: ...


class StatefulSession(Session):
    """Batches of a source with a state of its own, which is asked for only when somebody asks."""

    def __init__(self, adapter: _Adapter, run: Run) -> None:
        self._adapter, self._run = adapter, run
        self._steps = None if run.share is None else run.share.steps
        self._iterator: Any = None
        self._advance: Callable[[], Any] = self._first  # reads the source's next batch
        self._next: Callable[[], Any] = self._first  # returns the next batch, which may have been read before
        self._is_to_be_tried = False
        self._handed_out = 0
        self._failed = self._finished = False
        self._over = run.detail.startswith(ENDED)  # the source has ended
        self._end: str | None = None  # its state at its end
        self._asked = (0, run.detail)  # batches handed out so far, and the source's state at that point

    def take(self) -> Any:
        """The source's next batch."""
        if self._over:
            raise StopIteration
        try:
            batch = self._next()
        except StopIteration:
            self._over = self._finished = True
            raise
        except BaseException:
            self._failed = True
            raise
        self._handed_out += 1
        return batch

    def _first(self) -> Any:
        adapter, run = self._adapter, self._run
        adapter.begin(run)
        # torch's loaders draw the workers' seed here, which must not change the caller's generator.
        opening: Any = contextlib.nullcontext()
        if adapter.opening is not None:
            opening = adapter.opening.under(derive_key(Purpose.OPENING, run.seed, run.epoch, run.world.rank))
        with opening:
            try:
                self._start(run.detail)
                batch = self._advance()
            except StopIteration:
                if run.position or not run.detail:
                    raise
                # Some sources end once more from the state of their end, and begin anew in the pass after it.
                self._start("")
                batch = self._advance()
        self._is_to_be_tried = adapter.is_to_be_tried(run)
        self._next = self._second if self._is_to_be_tried else self._advance
        return batch

    def _start(self, detail: str) -> None:
        adapter, run = self._adapter, self._run
        # A source that has just reported this state at its end goes on as in a plain pass: nothing is loaded.
        is_there, adapter.is_at = bool(detail) and detail == adapter.is_at and not run.position, ""
        adapter.tell_the_epoch(run.epoch)  # a state that is loaded then has the last word
        if not detail or is_there:
            self._iterator = adapter.start(run, None)
        else:
            try:
                self._iterator = adapter.start(run, decode(detail))
            except StateError:
                raise
            except Exception as error:  # of a `load_state_dict` that reads up to its place, StopIteration too
                raise StateError(
                    f"{type(adapter.source).__name__} refused its own state ({type(error).__name__}: {error}): make "
                    "the source as it was when the state was saved"
                ) from error
        self._advance = adapter.reading(run, self._iterator)

    def _second(self) -> Any:
        """The second batch, which is read where the state before it is tried."""
        self._next = self._advance
        with contextlib.suppress(Exception):  # whoever asks for the state will be told
            self.bookmark()
        self._is_to_be_tried = False
        return self._next()

    def _try(self, state: str) -> None:
        """Read the second batch, and compare it with what the state before it leads a copy to."""
        self._is_to_be_tried = False
        try:
            batch = self._advance()
        except Exception as error:  # noqa: BLE001  # raised where the batch is asked for
            self._next = functools.partial(self._give, None, error)
            return
        self._next = functools.partial(self._give, batch)
        self._adapter.try_state(self._run, state, batch)

    def _give(self, batch: Any, error: Exception | None = None) -> Any:
        """What was read before it was asked for."""
        self._next = self._advance
        if error is not None:
            raise error
        return batch

    def bookmark(self) -> str:
        """The source's current state."""
        if self._over and self._steps is None:
            return ENDED + self.next_epoch_detail()
        if self._asked[0] != self._handed_out:
            if self._failed:
                raise StateError(
                    "a batch failed, and the source's state is already past it: load an older state to continue, or "
                    "pass remember=1 to midepoch.wrap, which keeps the state that the source had before the batch"
                )
            self._asked = (self._handed_out, encode(self._adapter.current(self._iterator)))
            if self._is_to_be_tried:
                self._try(self._asked[1])
        return self._asked[1]

    def detail(self, bookmark: str | None) -> str:
        """The source's own state, if `bookmark` was called then. It is not called after each batch."""
        if bookmark is None:
            raise StateError(
                "the source only has its current state, not that of earlier batches: save when no batch is in flight, "
                "or pass remember=, the number of batches in flight, to midepoch.wrap"
            )
        return bookmark

    def next_epoch_detail(self) -> str:
        """The source's own state at its end; nothing if iterating it begins an epoch."""
        if self._iterator is None:
            return self._run.detail.removeprefix(ENDED)
        if self._end is None:
            self._finish()
            self._end = "" if self._adapter.reach is Reach.EPOCHS else encode(self._adapter.current(self._iterator))
            self._adapter.is_at = self._end
        return self._end

    def _finish(self) -> None:
        """Read past the last batch. Until then, the source's state says that nothing is left, not that it has ended."""
        if self._finished:
            return
        self._finished = True
        try:
            next(self._iterator)
        except StopIteration:
            return
        raise SourceError(
            f"{type(self._adapter.source).__name__} continues after the {self._steps} batches that its len() leaves: "
            "fix its __len__, or install the version of its package that the state was saved with"
        )


class Keyed:
    """Returns the next batch, each under its own random stream.

    Args:
        streams: of the code that reads.
        run: of the session.
        advance: returns the next batch.
    """

    def __init__(self, streams: Streams, run: Run, advance: Callable[[], Any]) -> None:
        self._streams, self._advance = streams, advance
        self._key = derive_key(Purpose.BATCH, run.seed, run.epoch)
        self._place, self._step = run.position + run.world.rank, run.world.world_size
        self._first = True

    def __call__(self) -> Any:
        """The next batch."""
        streams = self._streams
        if self._first:
            streams.begin_pass()
        with streams as start:
            start(extend_key(self._key, self._place))
            batch = self._advance()
        self._place += self._step
        if self._first:
            self._first = False
            streams.made_late()
        return batch
