"""Work for the main process: the stages that the user put after a DataLoader."""

from __future__ import annotations

from typing import Any, NamedTuple

from midepoch.adapters.webdataset.pipeline import Pipeline, run_stages
from midepoch.errors import SourceError
from midepoch.order.keys import extend_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.world import World

__all__ = ["Answer", "Finish"]


class Answer(NamedTuple):
    """A reader's answer to a request: a batch with its first sample's key, or samples with their keys, or nothing."""

    values: list[Any]
    keys: list[int]


class Finish:
    """Runs those stages, each sample and each batch under its own random stream.

    Args:
        pipeline: the pipeline with the stages.
        streams: False lets the stages draw from the caller's generators.
    """

    def __init__(self, pipeline: Pipeline, streams: bool) -> None:
        self._sample_stages, self._batch_stages = pipeline.late_sample_stages, pipeline.late_batch_stages
        self.needed = bool(self._sample_stages or self._batch_stages)
        self._streams = Streams(self._sample_stages, self._batch_stages) if streams and self.needed else None

    def begin_pass(self) -> None:
        """Call this before the first answer of a session."""
        if self._streams is not None:
            self._streams.begin_pass()

    def __call__(self, answer: Answer, world: World) -> list[Any]:
        """Run the stages on a reader's answer.

        Raises:
            SourceError: only this rank is left without a batch, or one batch has become several.
        """
        streams = self._streams
        if streams is None:
            values = run_stages(self._batch_stages, run_stages(self._sample_stages, answer.values))
        else:
            values = self._under_streams(answer, streams)
            streams.warn_if_late()  # the stages may have changed their input
        if not values and world.world_size > 1:
            raise SourceError(
                f"a stage after the DataLoader dropped a whole batch on rank {world.rank} of {world.world_size}, and "
                "the other ranks would wait for it: drop samples before they are batched"
            )
        if len(values) > 1:
            raise SourceError(f"one batch became {len(values)}: the stages after batched() must keep the number")
        return values

    def _under_streams(self, answer: Answer, streams: Streams) -> list[Any]:
        with streams as start:
            survivors = answer.values
            if self._sample_stages:
                survivors = []
                for key, value in zip(answer.keys, answer.values, strict=True):
                    start(extend_key(key, Purpose.SAMPLE))
                    survivors += run_stages(self._sample_stages, [value])
            if not survivors or not self._batch_stages:
                return survivors
            start(extend_key(answer.keys[0], Purpose.BATCH, 1))  # beside the batch's in the reader
            return run_stages(self._batch_stages, survivors)
