"""A DALI iterator over a pipeline with one of midepoch's readers: on any world size, and a resume is a jump."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from midepoch.adapters.dali import private
from midepoch.adapters.dali.checkpointed import first_line
from midepoch.adapters.dali.feed import Feed, Schedule, feed_of
from midepoch.adapters.dali.graph import Graph
from midepoch.errors import MidepochError, SourceError, UnsupportedSourceError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Run, Session, WitnessReport
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.reading.sessions import WitnessRequest
from midepoch.reading.stored import seen_as_stored
from midepoch.world import Share, World

__all__ = ["SampledAdapter"]


class SampledAdapter(Adapter):
    """A DALIGenericIterator or a related class, over one pipeline that midepoch.adapters.dali.readers feeds."""

    name: ClassVar[str] = "dali-sampled"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        private.check(source)
        pipelines = private.pipelines_of(source)
        if len(pipelines) > 1:
            raise UnsupportedSourceError(
                f"midepoch's readers feed one pipeline for each iterator, this one has {len(pipelines)}: start a "
                "process for each device, or build an iterator for each"
            )
        pipeline = pipelines[0]
        feed = feed_of(pipeline)
        assert feed is not None  # recognises has checked it
        if feed.data is None or feed.order is None:
            raise UnsupportedSourceError(
                "the pipeline uses dali.random without one of dali.readers, so the samples have no positions: read "
                "with dali.readers, or draw with fn.random"
            )
        if (size := private.given_size(source)) > 0:
            raise UnsupportedSourceError(
                f"the iterator was given size={size}, but midepoch's reader sets the size: leave size out, and pass "
                "drop_last to the reader"
            )
        if options.shard is False:
            raise UnsupportedSourceError(
                "shard=False: midepoch's readers share the samples over the ranks; if each rank is to read everything, "
                "pass world=midepoch.World() and keep a state for each rank"
            )
        self._graph = Graph(private.serialize(pipeline))
        self._check_graph(pipeline, feed)
        private.refuse_own_code(source)
        self._stream = _Stream(source, feed)
        self._data, self._order = feed.data, feed.order
        self.facts = Facts(
            batch_size=pipeline.max_batch_size,
            drop_last=feed.drop_last,
            seed=None if pipeline.seed is None else pipeline.seed % (1 << 64),
            world=feed.world,
            departs=None,
            order=feed.order,
        )

    def _check_graph(self, pipeline: Any, feed: Feed) -> None:
        readers = [reader.name for reader in self._graph.readers]
        if readers:
            raise UnsupportedSourceError(
                f"the pipeline has DALI readers beside midepoch's ({', '.join(readers)}), each with its own order: "
                "build a pipeline for each"
            )
        foreign = [group for group in private.sources_of(pipeline) if group.callback not in feed.sources]
        if foreign:
            raise UnsupportedSourceError(
                "the pipeline has an external_source beside midepoch's reader, which a resume would not move: let one "
                "of the two give all the data"
            )

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A DALI iterator over a pipeline with a feed."""
        return private.is_iterator(source) and any(map(feed_of, private.pipelines_of(source)))

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int:
        """The number of samples."""
        return len(self._data)

    def describe(self) -> dict[str, str]:
        """The order, and the list of samples."""
        return {
            "order": self._order.describe(),
            "reader": self._data.kind,
            "data": f"{len(self._data)} samples:{self._data.crc}",
        }

    def capabilities(self) -> Capabilities:
        """All yes, unless the graph draws from DALI's own generators."""
        random = sorted({each.schema.replace("__", ".") for each in self._graph.operators if each.is_random})
        exact = Capability(True, "dali.random is keyed by (seed, epoch, position)")
        if random:
            exact = Capability(
                False,
                f"the graph draws from DALI's own generators ({', '.join(random)}): use dali.random instead, and in "
                "place of image_random_crop fn.decoders.image_slice with dali.random.crop_window",
            )
        return Capabilities(
            exact_order=promises.OUR_ORDER,
            exact_augmentations=exact,
            constant_time_resume=promises.CONSTANT_TIME,
            elastic_world=promises.POSITIONS,
            elastic_workers=promises.NO_WORKERS,
            rank_independent=promises.ONE_STATE,
        )

    def open(self, run: Run) -> Session:
        """Open a session at the run's position."""
        private.survive_forks()
        return _SampledSession(self, self._stream, run)

    def look(self, run: Run) -> WitnessReport | None:
        """The first sample of the epoch, read beside DALI."""
        request = None
        if run.looks and len(self._data):
            request = WitnessRequest.of(run, int(self._order.epoch(run.seed, run.epoch)[0:1][0]))
        return None if request is None else seen_as_stored(request, len(self._data), self._data.stored)

    def describe_batch(self, run: Run, step: int) -> str:
        """A batch's position and samples, for messages."""
        batch = Schedule(run.seed, run.epoch, _share(run), self._order).step(step)
        if batch is None:
            raise MidepochError("the batch lies beyond the epoch")  # pragma: no cover  # DALI gave one too many
        names = [self._data.name(index) for index in batch.indices[:3].tolist()]
        more = f" and {len(batch.indices) - 3} more" if len(batch.indices) > 3 else ""
        return (
            f"in epoch {batch.epoch}, in the batch at positions {batch.positions[0]} to {batch.positions[-1]} "
            f"({', '.join(names)}{more})"
        )


def _share(run: Run) -> Share:
    assert run.share is not None  # a reader knows its size
    return run.share


class _SampledSession(Session):
    def __init__(self, adapter: SampledAdapter, stream: _Stream, run: Run) -> None:
        self._adapter, self._stream, self._run = adapter, stream, run
        self._steps = _share(run).steps
        self._taken = 0
        self._begun = False

    def take(self) -> Any:
        """The next batch."""
        if self._taken == self._steps:
            raise StopIteration
        if not self._begun:
            self._stream.move_to(self._run, self._adapter._order)
            self._begun = True
            if (seen := self._adapter.look(self._run)) is not None:
                self._run.reports.append(seen)
        try:
            batch = self._stream.take()
        except Exception as error:
            run, share = self._run, _share(self._run)
            position = share.start + (self._taken + 1) * share.global_batch
            raise SourceError(
                f"DALI failed {self._adapter.describe_batch(run, self._taken)}"
                f"{'' if self._stream.survives else ', or, without exec_dynamic, shortly after it'}: "
                f"{first_line(error)}. Repair the data, or skip the batch: loader.seek(position="
                f"{min(position, share.size)})"
            ) from error
        self._taken += 1
        return batch


class _Stream:
    """A DALI iterator and what it will give next. It continues into the next epoch without a pause."""

    def __init__(self, iterator: Any, feed: Feed) -> None:
        self._iterator, self._feed = iterator, feed
        self._pipeline = private.pipelines_of(iterator)[0]
        self._seed = 0
        self._schedule: Schedule | None = None  # what the feed was given
        self._given = 0  # batches of the schedule that were taken
        self._failed = False
        self.survives = bool(self._pipeline.exec_dynamic)

    def move_to(self, run: Run, order: Any) -> None:
        """Make the next batch the run's first."""
        share = _share(run)
        if not self._failed and self._upcoming == (run.seed, run.epoch, share):
            return
        # Schedules only go forward, and prefetching is ahead of what was taken, so two are needed.
        self._restart(Schedule(run.seed, run.epoch, share, order))
        self._schedule, self._seed, self._given = Schedule(run.seed, run.epoch, share, order), run.seed, 0

    @property
    def _upcoming(self) -> tuple[int, int, Share] | None:
        """Seed, epoch and share of a run that would start with the next batch."""
        if self._schedule is None:
            return None
        epoch, step, share = self._schedule.locate(self._given)
        return self._seed, epoch, dataclasses.replace(share, start=share.start + step * share.global_batch)

    def _restart(self, schedule: Schedule) -> None:
        iterator, pipeline, feed = self._iterator, self._pipeline, self._feed
        private.drop_first_batch(iterator)
        if not private.has_run(iterator):
            feed.give(schedule)
            return
        feed.give(None)
        if not private.drain(pipeline):
            self._failed = True  # a prefetched batch failed
        if self._failed and not self.survives:
            raise SourceError(
                "a DALI pipeline without exec_dynamic cannot continue after an error: make and wrap the iterator "
                "again, and load the last state; or leave exec_dynamic at its default"
            )
        self._failed = False
        feed.give(schedule)
        iterator.reset()

    def take(self) -> Any:
        """The next batch."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            failure, self._failed = self._feed.failure, True
            if failure is not None:
                self._feed.failure = None
                raise failure[1] from None
            raise SourceError(
                "the pipeline ended before midepoch's reader did: take batches from the wrapped loader only"
            ) from None
        except Exception:
            self._failed = True
            raise
        self._given += 1
        return batch
