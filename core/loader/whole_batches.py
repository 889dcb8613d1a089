"""`then`: sessions that pass another session's batches through the user's function.

The function runs in this process, under a stream of the batch: a key of (seed, epoch, the batch's first position). What
it returns is handed out, and only then does a state count the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import SourceError, StateError
from ..order.keys import derive_key, extend_key
from ..randomness.streams import Purpose, Streams
from ..trying import CallTrial
from ..world import MicroShare
from .adapter import Adapter, Options, Run, Session

__all__ = ["Then", "WholeBatches"]


class Then:
    """What `wrap` got as `then`. A loader keeps one.

    Attributes:
        function: from a batch to what is handed out.
        streams: the generators that the function may draw from; None if it uses the caller's.
        tries: the function is to be called again, once, to see whether it repeats itself.
    """

    def __init__(self, function: Callable[[Any], Any], options: Options) -> None:
        self.function = function
        self.streams = Streams(function, devices=True) if options.streams else None
        self.tries = options.streams and options.verify != "off"


class WholeBatches(Session):
    """A session of the function's results. Each is made when it is asked for.

    The function may change its batch in place, so it is called once, with all generators seeded. `inner`: the session
    of its batches, of `adapter`, opened for `run`.
    """

    def __init__(self, then: Then, inner: Session, run: Run, adapter: Adapter) -> None:
        self._then, self._inner, self._run, self._adapter = then, inner, run, adapter
        self.bookmark = None if inner.bookmark is None else self._bookmark
        self._micro = run.share if isinstance(run.share, MicroShare) else None
        self._key = derive_key(Purpose.WHOLE, run.seed, run.epoch)
        self._global_batch = adapter.units_per_step(run.world)
        # Of the first batch of this rank.
        self._position = run.position + adapter.sharing(run.world).rank * adapter.facts.batch_size
        self._made = 0
        self._failed = False

    # --- the inner session's answers ---

    @property
    def position_correction(self) -> int:  # type: ignore[override]
        """The inner session's."""
        return self._inner.position_correction

    @property
    def varies(self) -> bool:  # type: ignore[override]
        """The inner session's."""
        return self._inner.varies

    def _bookmark(self) -> Any:
        if self._failed and not self._adapter.facts.remembers:
            raise StateError(
                "then= failed for a batch, and the source's state is already past it: load an older state to continue"
            )
        assert self._inner.bookmark is not None  # otherwise this session has none
        return self._inner.bookmark()

    def detail(self, bookmark: Any) -> str:
        """The inner session's."""
        return self._inner.detail(bookmark)

    def next_epoch_detail(self) -> str:
        """The inner session's."""
        return self._inner.next_epoch_detail()

    def close(self) -> None:
        """Close the inner session."""
        self._inner.close()

    # --- making a result ---

    def take(self) -> Any:
        """The function's result for the next batch."""
        then, streams, run, made = self._then, self._then.streams, self._run, self._made
        if streams is not None and not made:
            streams.begin_pass(rest=derive_key(Purpose.REST, run.seed, run.epoch))
        position = self._position + made * self._global_batch + self._inner.position_correction
        if self._micro is not None:
            position = self._micro.span(made)[0]
        batch = self._inner.take()
        trial = CallTrial(then.function, devices=True) if then.tries else None
        if trial is not None:
            trial.keep(batch)
        key = extend_key(self._key, position)
        try:
            if streams is None:
                result = then.function(batch)
            else:
                with streams as start:
                    start(key)
                    result = then.function(batch)
        except BaseException as error:
            self._failed = True
            if isinstance(error, StopIteration):  # it would end the epoch
                raise SourceError("then= raised StopIteration: return a result, or raise another error") from error
            raise
        self._made = made + 1
        if streams is not None and streams.first:
            streams.warn_if_late()
        if trial is not None:
            then.tries = False
            self._adapter.note(replace(trial.finding(key).of_calls("then=", "the same batch"), order=False))
        return result
