"""Split a webdataset pipeline into its parts.

Stages that choose, open and shuffle shards or samples are recognised and replaced. Stages for one sample or one batch
are kept, and run on one sample or batch at a time. So a stage that works on the whole stream is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, default_convert
from webdataset import compat, filters, shardlists
from webdataset.pipeline import DataPipeline

from midepoch.adapters.webdataset import private
from midepoch.adapters.webdataset.pipeline import (
    ENDLESS,
    Batched,
    Each,
    End,
    Limit,
    Pipeline,
    Step,
    arguments_of,
    function_of,
    refuse,
)
from midepoch.adapters.webdataset.shard_stages import note_shuffle, take_reading, take_shards
from midepoch.errors import UnsupportedSourceError

__all__ = ["understand"]


def understand(source: Any) -> Pipeline:
    """Split a pipeline into its parts.

    Raises:
        UnsupportedSourceError: midepoch cannot interpret a stage; the message names it.
    """
    found = Pipeline(dataset=source)
    steps = list(_flatten(source, found, late=False))
    steps = take_shards(steps, found)
    steps = take_reading(steps, found)
    _sample_steps(steps, found)
    return found


def _flatten(source: Any, found: Pipeline, late: bool) -> Iterator[Step]:
    """The stages of a pipeline, of the pipelines inside it, and of a DataLoader inside it, in order."""
    if isinstance(source, DataLoader):
        if found.loader is not None:
            raise refuse(source, "is a DataLoader inside a DataLoader", "keep one of them")
        if not isinstance(source.dataset, DataPipeline):
            raise refuse(
                source,
                f"reads a {type(source.dataset).__name__}, not a webdataset pipeline",
                "wrap it itself, with what comes after it as then=",
            )
        found.loader, found.dataset = source, source.dataset
        yield from (Step(_mark_worker(step.stage), False) for step in _flatten(source.dataset, found, False))
        collate = source.collate_fn
        if source.batch_size is None:
            yield Step(Each(collate), False)
        else:
            yield Step(Batched(source.batch_size, collate, source.drop_last), False)
        return
    stages = list(source.pipeline)
    for place, stage in enumerate(stages):
        if place == 0 and isinstance(stage, DataPipeline | DataLoader):
            yield from _flatten(stage, found, late)
            late = late or found.loader is not None
        else:
            yield Step(stage, late)
    if source.repetitions != 1 or source.nsamples > 0:
        if source.repetitions == 1:
            return  # webdataset uses nsamples only if it repeats
        yield Step(End(source.nsamples, source.repetitions, False), late)


def _mark_worker(stage: Any) -> Any:
    return stage._replace(in_worker=True) if isinstance(stage, End) else stage


@dataclass
class _Level:
    """The stages that work on samples, or on batches of `units` samples."""

    units: int
    stages: list[Step]


def _sample_steps(steps: list[Step], found: Pipeline) -> None:
    """Take the stages after the samples: those for one sample, and those for one batch."""
    levels = [_Level(1, [])]
    ends: list[tuple[End, int]] = []
    for stage, late in steps:
        level = levels[-1]
        function = function_of(stage)
        if isinstance(stage, End):
            ends.append((stage, level.units))
        elif function is private.BATCHED or isinstance(stage, Batched):
            batched = stage if isinstance(stage, Batched) else _as_batched(stage)
            levels.append(_Level(level.units * batched.size, [Step(batched, late)]))
            found.drop_last = batched.drop_last
        elif function in private.UNBATCH:
            _unbatch(levels, stage, late)
        elif function is compat.check_empty or function is shardlists.non_empty:
            found.must_have_samples = True
        elif note_shuffle(stage, found, level.units, None):
            pass
        elif function in private.SAMPLEWISE or isinstance(stage, Each):
            level.stages.append(Step(stage, late))
        else:
            raise refuse(stage, *_why(stage))
    found.drop_last = found.drop_last and len(levels) > 1
    found.batch_size = levels[-1].units if len(levels) > 1 else None
    _place_stages(levels, found)
    found.limit = _limit(ends, found)


def _why(stage: Any) -> tuple[str, str]:
    function = function_of(stage)
    if function is private.INFO:
        return "prints the first samples of a stream, which a resumed stream lacks", "remove it"
    if isinstance(stage, filters.Cached | filters.LMDBCached):
        return "caches the whole stream", "remove it"
    if getattr(function, "__name__", "") == "islice":
        return "takes part of a stream", "pass fewer urls, or use with_epoch"
    return (
        "may work on the stream as a whole, which midepoch cannot see",
        "write it as .map(function) or .select(predicate), which work on one sample",
    )


def _as_batched(stage: Any) -> Batched:
    arguments = arguments_of(stage, "batchsize", "collation_fn", "partial")
    collate = arguments.get("collation_fn", filters.default_collation_fn)
    size = arguments.get("batchsize", 20)
    if type(size) is not int or size < 1:
        raise UnsupportedSourceError(f"batched({size!r}): pass a batch size of at least 1")
    return Batched(size, collate, not arguments.get("partial", True))


def _unbatch(levels: list[_Level], stage: Any, late: bool) -> None:
    if len(levels) == 1:
        raise refuse(stage, "makes several samples of one", "store them as separate samples")
    level = levels.pop()
    batched = level.stages[0].stage
    for inner in level.stages[1:]:
        if not (isinstance(inner.stage, Each) and inner.stage.function is default_convert):
            raise refuse(
                inner.stage,
                f"works on batches of {level.units} that are split again",
                "put it before the first batched() or after the last",
            )
    # The values come out one at a time, as they would from a batch: numpy's numbers, for example.
    single = Step(Batched(1, batched.collate, False), level.stages[0].late)
    levels[-1].stages += [single, *level.stages[1:], Step(stage, late)]


def _place_stages(levels: list[_Level], found: Pipeline) -> None:
    """Decide which stages run where samples are read, and which in the main process."""
    samples = levels[0].stages
    batches = [step for level in levels[1:] for step in level.stages]
    plain = (Batched, Each)

    def is_own(step: Step) -> bool:
        return step.late and not isinstance(step.stage, plain) and function_of(step.stage) not in private.UNBATCH

    def divide(steps: list[Step], behind: bool) -> tuple[list[Any], list[Any]]:
        first = 0 if behind else next((place for place, step in enumerate(steps) if is_own(step)), len(steps))
        return [step.stage for step in steps[:first]], [step.stage for step in steps[first:]]

    found.sample_stages, found.late_sample_stages = divide(samples, False)
    found.batch_stages, found.late_batch_stages = divide(batches, bool(found.late_sample_stages))


def _limit(ends: list[tuple[End, int]], found: Pipeline) -> Limit | None:
    """The outermost end sets the length of an epoch. Inner ones start again and again."""
    if not ends:
        return found.limit
    end, units = ends[-1]
    passes = None if end.repetitions >= ENDLESS or found.limit is not None else end.repetitions
    if len(ends) > 1 and any(inner.repetitions >= ENDLESS for inner, _ in ends[:-1]):
        passes = None
    counted = end.samples * units if end.samples > 0 else None
    return Limit(counted, passes, end.in_worker)
