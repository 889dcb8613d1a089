"""A session over a source with a state of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from midepoch.errors import SourceError, StateError
from midepoch.loader.adapter import Run, Session
from midepoch.order.keys import derive_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.state.codec import decode, encode

__all__ = ["ENDED", "StatefulSession"]

ENDED = "ended:"
"""Before the detail of a pass that was read to its end; a source would begin anew from its own state."""


class _Adapter(Protocol):
    """What a session asks of its adapter, which outlives it."""

    source: Any
    rewinds: bool
    opening: Streams | None
    was_put_at_its_end: bool
    stands_at: str

    def begin(self, run: Run) -> None: ...
    def start(self, run: Run, state: Any) -> Iterator[Any]: ...
    def restore(self, state: Any) -> None: ...
    def reading(self, run: Run, iterator: Iterator[Any]) -> Callable[[], Any]: ...
    def current(self, iterator: Iterator[Any]) -> Any: ...
    def is_to_be_tried(self, run: Run) -> bool: ...
    def try_state(self, run: Run, detail: str, batch: Any) -> None: ...


class _Error(NamedTuple):
    error: Exception


class StatefulSession(Session):
    """Batches of a source with a state of its own, which is asked for only when somebody asks."""

    def __init__(self, adapter: _Adapter, run: Run) -> None:
        self._adapter, self._run = adapter, run
        self._steps = None if run.share is None else run.share.steps
        self._iterator: Any = None
        self._next: Callable[[], Any] | None = None
        self._advance: Callable[[], Any] | None = None
        self._is_to_be_tried = False
        self._ahead: list[Any] = []  # the batch, or the error, that was read after the state before it was asked for
        self._handed_out = 0
        self._failed = self._finished = False
        self._over = run.detail.startswith(ENDED)  # the source has ended
        self._end = ""  # its state at the end of a pass of unknown length
        self._asked = (0, run.detail)  # batches handed out so far, and the source's state at that point

    def take(self) -> Any:
        """The source's next batch."""
        if self._over:
            if self._next is None:
                self._begin_at_the_end()
            raise StopIteration
        try:
            batch = self._first() if self._next is None else self._next()
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
        if adapter.opening is None:
            self._advance, batch = self._begun()
        else:
            # torch's loaders draw the workers' seed here, which must not change the caller's generator.
            with adapter.opening.under(derive_key(Purpose.OPENING, run.seed, run.epoch, run.world.rank)):
                self._advance, batch = self._begun()
        self._is_to_be_tried = adapter.is_to_be_tried(run)
        self._next = self._second if self._is_to_be_tried else self._advance
        return batch

    def _begun(self) -> tuple[Callable[[], Any], Any]:
        adapter, run = self._adapter, self._run
        at_its_end = not run.position and (bool(run.detail) or adapter.was_put_at_its_end)
        adapter.was_put_at_its_end = False
        advance = self._started()
        try:
            return advance, advance()
        except StopIteration:
            if not at_its_end:
                raise
        # Some sources end once more from the state of their end, and begin anew in the pass after it.
        self._iterator = adapter.start(run, None)
        advance = adapter.reading(run, self._iterator)
        return advance, advance()

    def _begin_at_the_end(self) -> None:
        """Stand where the source had ended: it begins the next epoch from its own state, if it has any."""
        own = self._run.detail.removeprefix(ENDED)
        if own:
            self._adapter.begin(self._run)
            self._loading(lambda: self._adapter.restore(decode(own)))
            self._adapter.was_put_at_its_end = True

    def _second(self) -> Any:
        """The second batch. The state before it is tried, unless somebody has asked for it, and so has had it tried."""
        with contextlib.suppress(Exception):  # whoever asks for the state will be told
            self.bookmark()
        self._is_to_be_tried, self._next = False, self._advance
        if not self._ahead:
            assert self._advance is not None
            return self._advance()
        batch = self._ahead.pop()
        if isinstance(batch, _Error):
            raise batch.error
        return batch

    def _try(self) -> None:
        """Read the batch after the state that was asked for, and compare it with what that state leads a copy to."""
        assert self._advance is not None
        self._is_to_be_tried = False
        try:
            batch = self._advance()
        except Exception as error:  # noqa: BLE001  # raised where the batch is asked for
            self._ahead.append(_Error(error))
            return
        self._ahead.append(batch)
        self._adapter.try_state(self._run, self._asked[1], batch)

    def _started(self) -> Callable[[], Any]:
        adapter, run = self._adapter, self._run
        adapter.begin(run)
        # A source that stands there goes on as in a plain pass: nothing is loaded.
        stands_there, adapter.stands_at = bool(run.detail) and run.detail == adapter.stands_at, ""
        if not run.detail or (stands_there and not run.position):
            self._iterator = adapter.start(run, None)
        else:
            state = decode(run.detail)
            self._iterator = self._loading(lambda: adapter.start(run, state))
        return adapter.reading(run, self._iterator)

    def _loading(self, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except StateError:
            raise
        except Exception as error:  # of a `load_state_dict` that reads up to its place, StopIteration too
            raise StateError(
                f"{type(self._adapter.source).__name__} refused its own state ({type(error).__name__}: {error}): make "
                "the source as it was when the state was saved"
            ) from error

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
                self._try()
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
        if self._adapter.rewinds:
            if self._steps is not None and self._iterator is not None:
                self._finish()
            return ""
        if self._over and self._iterator is None:
            return self._run.detail.removeprefix(ENDED)
        self._finish()
        if self._steps is not None:
            return encode(self._adapter.current(self._iterator))
        if not self._end:
            self._end = self._adapter.stands_at = encode(self._adapter.current(self._iterator))
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
