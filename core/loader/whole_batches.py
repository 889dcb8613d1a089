"""`then`: sessions that pass another session's batches through the user's function.

The function runs in this process, under a stream of the batch: a key of (seed, epoch, the batch's first position). What
it returns is handed out, and only then does a state count the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import SourceError, StateError, warn
from ..order.keys import derive_key, derive_keys
from ..randomness.streams import Purpose, Streams
from ..trying import CallTrial
from ..world import MicroShare
from .adapter import Adapter, Options, Run, Session

__all__ = ["Then"]

_KEYS = 64  # made by one call of numpy's


class Then:
    """What `wrap` got as `then`. A loader keeps one, and with it whether the function draws.

    Attributes:
        function: from a batch to what is handed out.
        streams: the generators that the function may draw from; None if it uses the caller's.
        tries: the function has not been called again yet, to see whether it repeats itself, and is to be.
    """

    def __init__(self, function: Callable[[Any], Any], streams: Streams | None, tries: bool) -> None:
        self.function, self.streams, self.tries = function, streams, tries

    @classmethod
    def of(cls, options: Options) -> Then | None:
        """None if there is no such function."""
        if options.then is None:
            return None
        streams = Streams(options.then, devices=True) if options.streams else None
        return cls(options.then, streams, options.streams and options.verify != "off")

    def around(self, session: Session, run: Run, adapter: Adapter) -> Session:
        """A session of the function's results. `session`: of `adapter`, opened for `run`."""
        return _WholeBatches(self, session, run, adapter)


class _WholeBatches(Session):
    """Each result is made when it is asked for.

    If the function uses a generator that was not seeded for it, the batch is read again, since it may have been changed
    in place, and the function is called again. Where reading a batch again is not a jump, all generators are seeded for
    every batch.
    """

    def __init__(self, then: Then, inner: Session, run: Run, adapter: Adapter) -> None:
        self.bookmark = None if inner.bookmark is None else self._bookmark
        self._then, self._function, self._streams = then, then.function, then.streams
        self._inner, self._take = inner, inner.take
        self._run, self._adapter = run, adapter
        self._micro = run.share if isinstance(run.share, MicroShare) else None
        # In the middle of a global batch no session can be opened.
        jumps = adapter.facts.remembers and adapter.stated_promises.constant_time_resume.holds
        self._rereads = jumps and self._micro is None
        self._key = derive_key(Purpose.WHOLE, run.seed, run.epoch)
        self._global_batch = adapter.units_per_step(run.world)
        # Of this rank's part of a global batch.
        self._offset = adapter.sharing(run.world).rank * adapter.facts.batch_size
        self._keys: dict[int, int] = {}  # by position
        self._made = 0
        self._correction_before = 0  # of the sessions before `inner`
        self._failed = False

    # --- the inner session's answers ---

    @property
    def position_correction(self) -> int:  # type: ignore[override]
        """The inner session's."""
        return self._correction_before + self._inner.position_correction

    @property
    def varies(self) -> bool:  # type: ignore[override]
        """The inner session's."""
        return self._inner.varies

    def _bookmark(self) -> Any:
        """The inner session and its bookmark."""
        if self._failed and not self._adapter.facts.remembers:
            raise StateError(
                "then= failed for a batch, and the source's state is already past it: load an older state to continue"
            )
        assert self._inner.bookmark is not None  # as of each session of this source
        return self._inner, self._inner.bookmark()

    def detail(self, bookmark: Any) -> str:
        """The inner session's."""
        inner, own = (self._inner, None) if bookmark is None else bookmark
        return str(inner.detail(own))

    def next_epoch_detail(self) -> str:
        """The inner session's."""
        return self._inner.next_epoch_detail()

    def close(self) -> None:
        """Close the inner session."""
        self._take = _closed
        self._inner.close()

    # --- making a result ---

    def take(self) -> Any:
        """The function's result for the next batch."""
        streams, made, inner = self._streams, self._made, self._inner
        if streams is None:
            result = self._made_of(self._take(), 0, None)
            self._made = made + 1
            return result
        if not made:
            streams.begin_pass(rest=derive_key(Purpose.REST, self._run.seed, self._run.epoch))
        bookmark, correction = None, inner.position_correction
        if self._rereads and made and inner.bookmark is not None:
            bookmark = inner.bookmark()
        batch = self._take()
        at = self._run.position + made * self._global_batch + self._correction_before + correction
        if self._micro is not None:
            at = self._micro.span(made)[0] - self._offset
        trial = CallTrial(self._function, devices=True) if self._then.tries else None
        if trial is not None:
            trial.keep(batch)
        if self._rereads:
            again = functools.partial(self._read_again, at, bookmark)
            result = streams.read(functools.partial(self._made_of, batch, at), again)
        else:
            with streams as start:
                result = self._made_of(batch, at, start)
            if streams.made_late():
                self._warn("made a random generator when it was first called, and its batch cannot be read again")
        self._made = made + 1
        if streams.kept:
            streams.kept = False
            self._warn("drew random numbers for a batch, and none when it was called for the same batch again")
        if trial is not None:
            self._then.tries = False
            finding = trial.finding(self._key_of(at)).of_calls("then=", "the same batch")
            self._adapter.note(replace(finding, order=False))
        return result

    def _key_of(self, at: int) -> int:
        """The key of the batch at position `at` of all ranks; kept with the next ones', which cost little more."""
        positions = np.arange(at, at + _KEYS * self._global_batch, self._global_batch)
        keys = derive_keys(self._key, positions + self._offset)
        self._keys = dict(zip(positions.tolist(), keys.tolist(), strict=True))
        return self._keys[at]

    def _made_of(self, batch: Any, at: int, start: Callable[[int], None] | None) -> Any:
        """The result for the batch at position `at` of all ranks."""
        if start is not None:
            start(self._keys[at] if at in self._keys else self._key_of(at))
        try:
            return self._function(batch)
        except BaseException as error:
            self._tell_of_failed(error)
            raise

    def _tell_of_failed(self, error: BaseException) -> None:
        """Note that the function failed. Raise SourceError for what would end the epoch."""
        self._failed = True
        if isinstance(error, StopIteration):
            raise SourceError("then= raised StopIteration: return a result, or raise another error") from error

    def _read_again(self, at: int, bookmark: Any) -> Callable[[Callable[[int], None] | None], Any]:
        """What makes the result for the batch at position `at` once more, with the batch from a new inner session.

        `bookmark`: the inner session's from before this batch.
        """
        run, adapter, inner = self._run, self._adapter, self._inner
        detail = inner.detail(bookmark) if self._made else run.detail
        self._failed = False
        self._correction_before = at - run.position - self._made * self._global_batch
        inner.close()
        share = adapter.share(run.seed, run.epoch, at, run.world, detail)
        self._inner = adapter.session(Run(run.epoch, at, run.seed, run.world, share, run.tail, detail))
        self._take = self._inner.take
        try:
            return functools.partial(self._made_of, self._take(), at)
        except StopIteration:
            raise SourceError(
                f"the source ended at position {at} of epoch {run.epoch}, where it gave a batch before: it does not "
                "repeat itself; make it depend on midepoch's streams or a seed alone"
            ) from None

    def _warn(self, what: str) -> None:
        warn(
            f"the function passed as then= {what}, so its random numbers may differ after a resume: draw the numbers "
            "of each batch anew, make generators before the loader is iterated, or use midepoch.sample_generator()",
        )


def _closed() -> Any:
    raise RuntimeError("midepoch: the session is closed")  # pragma: no cover  # the loader opens another one
