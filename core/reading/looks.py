"""Looks at the samples of a source that can be indexed: alone, or on the way into a session's first batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..loader.adapter import WitnessReport
from ..randomness.streams import Start, Streams
from ..state.witness import SampleSummary, is_inert, summary_of
from .sessions import WitnessRequest

__all__ = ["Looks"]


class Looks:
    """Looks at samples of one dataset, each under its own stream.

    Args:
        dataset: as the user made it.
        whole: it is asked for whole batches.
        streams: of its code; None if it uses the caller's generators.
    """

    def __init__(self, dataset: Any, whole: bool, streams: Streams | None) -> None:
        self._dataset, self._whole, self._streams = dataset, whole, streams
        self._drew = False  # when a sample was last looked at

    def alone(self, key: int, index: Any) -> tuple[SampleSummary | None, Exception | None]:
        """What a sample looks like under the stream of `key`, or why it could not be read."""
        streams = self._streams

        def read(start: Start | None) -> SampleSummary:
            if start is not None:
                start(key)
            sample = self._dataset.__getitems__([index]) if self._whole else self._dataset[index]
            self._drew = streams is not None and streams.drew()
            return summary_of(sample)

        try:
            return read(None) if streams is None else streams.read(read, notes=True), None
        except Exception as error:  # noqa: BLE001  # it is raised where the sample is read for a batch
            return None, error

    def with_batch(
        self, read: Callable[..., Any], key: int, index: Any, is_first: bool
    ) -> tuple[Any, SampleSummary | None]:
        """A batch, and what a sample looks like. `read` reads it; its argument `see` gets the first sample.

        If the batch begins with that sample, it is looked at on the way; else it is read before. A sample whose own
        code would run at a look is not looked at on the way: it may draw then, or give its content only once.
        """
        streams, looks = self._streams, list[SampleSummary]()
        if streams is None or self._whole or not is_first:
            look = self.alone(key, index)[0]
            if streams is None:
                return read(None), look
            streams.first = True
            return streams.read(read), look

        def see(sample: Any) -> None:
            self._drew = streams.drew()
            if is_inert(sample):
                looks[:] = [summary_of(sample)]

        batch = streams.read(functools.partial(read, see=see), notes=True)
        return batch, looks[0] if looks else None

    def report(
        self, request: WitnessRequest, one: SampleSummary | None, key: int, key_of: Callable[[int], int]
    ) -> WitnessReport:
        """What was seen, after the batch was read.

        Args:
            request: says which samples.
            one: what the first one looked like; None if that is not known yet.
            key: of its stream.
            key_of: from an epoch to the key of its first sample.
        """
        if one is None:
            one = self.alone(key, request.index)[0]
        drew, again = self._drew, None
        if request.twice and one is not None:
            again = self.alone(key, request.index)[0]
        seen = WitnessReport(request.index, one, again, one, keeps=again is not None and drew and not self._drew)
        if request.expected is None:
            return seen
        epoch, index = request.expected
        expected, error = self.alone(key_of(epoch), index)
        text = "" if error is None else f"{type(error).__name__}: {error}"
        return replace(seen, expected=expected, error=text, missing=isinstance(error, IndexError))
