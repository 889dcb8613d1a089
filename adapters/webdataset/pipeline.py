"""What a webdataset pipeline means: its shards, their order, and what is done to each sample and batch.

Stages that choose, open and shuffle shards or samples are recognised and replaced. Stages for one sample or one batch
are kept, and run on one sample or batch at a time. So a stage that works on the whole stream is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, default_convert
from webdataset import cache, compat, filters, shardlists, tariterators
from webdataset.pipeline import DataPipeline

from midepoch.adapters.webdataset import private
from midepoch.errors import SourceError, UnsupportedSourceError

__all__ = ["Limit", "Pipeline", "run_stages", "understand"]

Stage = Callable[[Iterable[Any]], Iterable[Any]]


class Limit(NamedTuple):
    """The length of an epoch, if the user sets it.

    Attributes:
        units: number of samples of one rank; None for whole passes.
        passes: number of passes over the data; None for any number.
        of_worker: whether each worker process counts for itself.
    """

    units: int | None
    passes: int | None
    of_worker: bool


@dataclass
class Pipeline:
    """A pipeline, split into its parts.

    Attributes:
        urls: of the shards, in the user's order.
        splits: whether the pipeline shards over nodes, or refuses several nodes.
        shuffles: whether shards or samples are shuffled. `buffer` is the largest number of samples buffered for that,
            0 for none.
        opener: a stage from ``{"url": ...}`` to ``{"url": ..., "stream": ...}``.
        reading, grouping: the keywords of webdataset's tar_file_expander and group_by_keys.
        must_have_samples: whether a pass without samples is an error.
        sample_stages, batch_stages: stages for one sample, and for the list of a batch's samples, in the reading
            process.
        late_sample_stages, late_batch_stages: the same for the main process: what the user put behind a DataLoader.
        batch_size: number of samples in a batch; None if samples are handed out one by one.
        drop_last: whether a last batch that is not full is left out.
        limit: the length of an epoch, or None for one pass.
        seed: of a shuffle stage, or None.
        loader: the DataLoader whose workers read, or None.
        dataset: the value for `get_worker_info().dataset`.
    """

    dataset: Any
    loader: DataLoader[Any] | None = None
    urls: list[str] = field(default_factory=list)
    splits: bool = False
    shuffles: bool = False
    buffer: int = 0
    opener: Stage | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    grouping: dict[str, Any] = field(default_factory=dict)
    must_have_samples: bool = False
    sample_stages: list[Stage] = field(default_factory=list)
    batch_stages: list[Stage] = field(default_factory=list)
    late_sample_stages: list[Stage] = field(default_factory=list)
    late_batch_stages: list[Stage] = field(default_factory=list)
    batch_size: int | None = None
    drop_last: bool = False
    limit: Limit | None = None
    seed: int | None = None

    @property
    def stages(self) -> list[Stage]:
        """All that run code on samples, wherever they run."""
        return [*self.sample_stages, *self.batch_stages, *self.late_sample_stages, *self.late_batch_stages]


def run_stages(stages: Iterable[Stage], values: Iterable[Any]) -> list[Any]:
    """Pass values through the stages, one after another."""
    stream: Iterable[Any] = iter(values)
    for stage in stages:
        stream = stage(stream)
    return list(stream)


class _Step(NamedTuple):
    stage: Any
    late: bool  # behind a DataLoader


class _End(NamedTuple):
    """The end of a DataPipeline, which says how long an epoch is."""

    samples: int
    repetitions: int
    in_worker: bool


class _Batched:
    """A stage that collects samples into a batch, as webdataset or a DataLoader does."""

    def __init__(self, size: int, collate: Callable[[Any], Any] | None, drop_last: bool) -> None:
        self.size, self.collate, self.drop_last = size, collate, drop_last

    def __call__(self, samples: Iterable[Any]) -> Iterator[Any]:
        # Dropped samples make a batch short, but the others in it are kept. A last batch is left out by its position.
        return private.BATCHED(samples, self.size, self.collate, True)  # type: ignore[no-any-return]


class _Each:
    """Applies a DataLoader's collate function to each item, as a DataLoader without batches does."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        return map(self.function, items)


_SPLITS = (shardlists.split_by_node, shardlists.single_node_only)
_ENDLESS = sys.maxsize


def _function(stage: Any) -> Any:
    """The function that one of webdataset's stages applies; the stage itself if it is another kind."""
    return stage.f if isinstance(stage, filters.FilterFunction) else stage


def _arguments(stage: Any, *names: str) -> dict[str, Any]:
    """A stage's arguments by name. `names` are those of its positional arguments."""
    return {**dict(zip(names, stage.args, strict=False)), **stage.kw}


def _name(stage: Any) -> str:
    function = _function(stage)
    name = getattr(function, "__name__", None) or type(function).__name__
    return str(name).lstrip("_")


def _refuse(stage: Any, why: str, instead: str) -> UnsupportedSourceError:
    return UnsupportedSourceError(
        f"the stage {_name(stage)} {why}: {instead}, or pass replay=True, which reads again what was consumed"
    )


def understand(source: Any) -> Pipeline:
    """Split a pipeline into its parts.

    Raises:
        UnsupportedSourceError: midepoch cannot interpret a stage; the message names it.
    """
    found = Pipeline(dataset=source)
    steps = list(_flatten(source, found, late=False))
    steps = _shard_steps(steps, found)
    steps = _reading_steps(steps, found)
    _sample_steps(steps, found)
    return found


def _flatten(source: Any, found: Pipeline, late: bool) -> Iterator[_Step]:
    """The stages of a pipeline, of the pipelines inside it, and of a DataLoader inside it, in order."""
    if isinstance(source, DataLoader):
        if found.loader is not None:
            raise _refuse(source, "is a DataLoader inside a DataLoader", "keep one of them")
        if not isinstance(source.dataset, DataPipeline):
            raise _refuse(source, f"reads a {type(source.dataset).__name__}", "use a webdataset pipeline there")
        found.loader, found.dataset = source, source.dataset
        yield from (_Step(_mark_worker(step.stage), False) for step in _flatten(source.dataset, found, False))
        collate = source.collate_fn
        if source.batch_size is None:
            yield _Step(_Each(collate), False)
        else:
            yield _Step(_Batched(source.batch_size, collate, source.drop_last), False)
        return
    stages = list(source.pipeline)
    for place, stage in enumerate(stages):
        if place == 0 and isinstance(stage, DataPipeline | DataLoader):
            yield from _flatten(stage, found, late)
            late = late or found.loader is not None
        else:
            yield _Step(stage, late)
    if source.repetitions != 1 or source.nsamples > 0:
        if source.repetitions == 1:
            return  # webdataset uses nsamples only if it repeats
        yield _Step(_End(source.nsamples, source.repetitions, False), late)


def _mark_worker(stage: Any) -> Any:
    return stage._replace(in_worker=True) if isinstance(stage, _End) else stage


def _note_shuffle(stage: Any, found: Pipeline, units: int | None, own_seed: Any) -> bool:
    """Whether the stage shuffles. Records its settings. `units`: samples in each thing shuffled, None for shards."""
    if isinstance(stage, filters.detshuffle):
        size, seed = stage.bufsize, stage.seed or None
    elif _function(stage) is private.SHUFFLE:
        arguments = _arguments(stage, "bufsize", "initial", "rng", "seed")
        size, seed = arguments.get("bufsize", 1000), arguments.get("seed")
    else:
        return False
    if int(size or 0) > 1:
        found.shuffles = True
        if units is not None:
            found.buffer = max(found.buffer, int(size) * units)
        # Unless the user sets one, WebDataset gives its own shard shuffle a random seed.
        if type(seed) is int and seed is not own_seed and found.seed is None:
            found.seed = seed % (1 << 64)
    return True


def _shard_steps(steps: list[_Step], found: Pipeline) -> list[_Step]:
    """Take the stages up to the opener."""
    if not steps:
        raise UnsupportedSourceError("the pipeline has no stages: begin it with wds.SimpleShardList(urls)")
    endless = _take_urls(steps[0].stage, found)
    own_seed = getattr(_innermost(found.dataset), "seed", None)
    for place, (stage, _) in enumerate(steps[1:], 1):
        function = _function(stage)
        if function in _SPLITS:
            found.splits = True
        elif function is shardlists.split_by_worker or _note_shuffle(stage, found, None, own_seed):
            pass
        elif function is shardlists.resampled_:
            endless = True
        elif function is shardlists.non_empty:
            found.must_have_samples = True
        elif _is_opener(stage):
            if endless:
                found.limit = Limit(None, None, False)
            return steps[place:]
        elif isinstance(stage, _End):
            raise UnsupportedSourceError("with_epoch or repeat on a list of shards: put it behind the samples")
        else:
            raise _refuse(
                stage,
                "comes before the shards are opened, and midepoch cannot see how it chooses among them",
                "use wds.split_by_node and wds.split_by_worker, which midepoch replaces",
            )
    raise UnsupportedSourceError("the pipeline opens no shards: add wds.tarfile_to_samples()")


def _innermost(dataset: Any) -> Any:
    while isinstance(dataset, DataPipeline) and dataset.pipeline and isinstance(dataset.pipeline[0], DataPipeline):
        dataset = dataset.pipeline[0]
    return dataset


def _take_urls(stage: Any, found: Pipeline) -> bool:
    """Whether the shards are drawn endlessly, with repetition."""
    if type(stage) is shardlists.SimpleShardList:
        found.urls = list(stage.urls)
        if stage.seed is not None:
            found.shuffles = True
        return False
    if type(stage) is shardlists.ResampledShards and stage.nshards == _ENDLESS:
        found.urls = list(stage.urls)
        found.shuffles = found.splits = True
        return True
    raise _refuse(
        stage, "gives shards in an order that midepoch cannot compute", "begin with wds.SimpleShardList(urls)"
    )


def _is_opener(stage: Any) -> bool:
    return isinstance(stage, cache.StreamingOpen | cache.FileCache) or _function(stage) in (
        tariterators.url_opener,
        tariterators.tarfile_samples,
    )


class _GopenStage:
    """webdataset's url_opener with its handler."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def __call__(self, shards: Iterable[Any]) -> Iterator[Any]:
        return tariterators.url_opener(shards, **self.arguments)  # type: ignore[no-any-return]


def grouped(files: Iterable[dict[str, Any]], url: str, grouping: dict[str, Any]) -> list[dict[str, Any]]:
    """Group the files of one shard into webdataset's samples.

    Raises:
        SourceError: a sample has two files of one name, and the handler does not continue.
    """
    try:
        return list(tariterators.group_by_keys(iter(files), **grouping))
    except ValueError as error:
        if "duplicate file name" not in str(error):
            raise
        raise SourceError(
            f"{url}: a sample has two files of one name ({error.args[0]}); rename one of them, or pass a handler that "
            "continues"
        ) from error


def _reading_steps(steps: list[_Step], found: Pipeline) -> list[_Step]:
    """Take the stages that open shards and make samples from files."""
    first = steps[0].stage
    if _function(first) is tariterators.tarfile_samples:
        arguments = _arguments(first, "handler", "select_files", "rename_files")
        handler = {"handler": arguments["handler"]} if "handler" in arguments else {}
        found.opener, found.reading, found.grouping = _GopenStage(dict(handler)), arguments, dict(handler)
        rest = steps[1:]
    else:
        found.opener = first if callable(first) and not isinstance(first, filters.FilterFunction) else None
        if found.opener is None:
            found.opener = _GopenStage(_arguments(first, "handler"))
        wanted = (tariterators.tar_file_expander, tariterators.group_by_keys)
        if len(steps) < 3 or tuple(_function(step.stage) for step in steps[1:3]) != wanted:
            unexpected = steps[1].stage if len(steps) > 1 else first
            raise _refuse(unexpected, "comes between a shard and its samples", "use wds.tarfile_to_samples()")
        found.reading = _arguments(steps[1].stage, "handler", "select_files", "rename_files", "eof_value")
        found.grouping = _arguments(steps[2].stage, "keys", "lcase", "suffixes", "handler")
        if found.reading.pop("eof_value", {}) is None:
            raise _refuse(steps[1].stage, "lets a sample continue in the next shard", "leave out eof_value=None")
        rest = steps[3:]
    if rest and _function(rest[0].stage) is compat.check_empty:
        found.must_have_samples = True
        rest = rest[1:]
    return rest


@dataclass
class _Level:
    """The stages that work on samples, or on batches of `units` samples."""

    units: int
    stages: list[_Step]


def _sample_steps(steps: list[_Step], found: Pipeline) -> None:
    """Take the stages behind the samples: those for one sample, and those for one batch."""
    levels = [_Level(1, [])]
    ends: list[tuple[_End, int]] = []
    for stage, late in steps:
        level = levels[-1]
        function = _function(stage)
        if isinstance(stage, _End):
            ends.append((stage, level.units))
        elif function is private.BATCHED or isinstance(stage, _Batched):
            batched = stage if isinstance(stage, _Batched) else _as_batched(stage)
            levels.append(_Level(level.units * batched.size, [_Step(batched, late)]))
            found.drop_last = batched.drop_last
        elif function in private.UNBATCH:
            _unbatch(levels, stage, late)
        elif function is compat.check_empty or function is shardlists.non_empty:
            found.must_have_samples = True
        elif _note_shuffle(stage, found, level.units, None):
            pass
        elif function in private.SAMPLEWISE or isinstance(stage, _Each):
            level.stages.append(_Step(stage, late))
        else:
            raise _refuse(stage, *_why(stage))
    found.drop_last = found.drop_last and len(levels) > 1
    found.batch_size = levels[-1].units if len(levels) > 1 else None
    _place_stages(levels, found)
    found.limit = _limit(ends, found)


def _why(stage: Any) -> tuple[str, str]:
    function = _function(stage)
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


def _as_batched(stage: Any) -> _Batched:
    arguments = _arguments(stage, "batchsize", "collation_fn", "partial")
    collate = arguments.get("collation_fn", filters.default_collation_fn)
    size = arguments.get("batchsize", 20)
    if type(size) is not int or size < 1:
        raise UnsupportedSourceError(f"batched({size!r}): pass a batch size of at least 1")
    return _Batched(size, collate, not arguments.get("partial", True))


def _unbatch(levels: list[_Level], stage: Any, late: bool) -> None:
    if len(levels) == 1:
        raise _refuse(stage, "makes several samples of one", "store them as separate samples")
    level = levels.pop()
    batched = level.stages[0].stage
    for inner in level.stages[1:]:
        if not (isinstance(inner.stage, _Each) and inner.stage.function is default_convert):
            raise _refuse(
                inner.stage,
                f"works on batches of {level.units} that are split again",
                "put it before the first batched() or behind the last",
            )
    # The values come out one at a time, as they would from a batch: numpy's numbers, for example.
    single = _Step(_Batched(1, batched.collate, False), level.stages[0].late)
    levels[-1].stages += [single, *level.stages[1:], _Step(stage, late)]


def _place_stages(levels: list[_Level], found: Pipeline) -> None:
    """Decide which stages run where samples are read, and which in the main process."""
    samples = levels[0].stages
    batches = [step for level in levels[1:] for step in level.stages]
    plain = (_Batched, _Each)

    def is_own(step: _Step) -> bool:
        return step.late and not isinstance(step.stage, plain) and _function(step.stage) not in private.UNBATCH

    def divide(steps: list[_Step], behind: bool) -> tuple[list[Any], list[Any]]:
        first = 0 if behind else next((place for place, step in enumerate(steps) if is_own(step)), len(steps))
        return [step.stage for step in steps[:first]], [step.stage for step in steps[first:]]

    found.sample_stages, found.late_sample_stages = divide(samples, False)
    found.batch_stages, found.late_batch_stages = divide(batches, bool(found.late_sample_stages))


def _limit(ends: list[tuple[_End, int]], found: Pipeline) -> Limit | None:
    """The outermost end sets the length of an epoch. Inner ones start again and again."""
    if not ends:
        return found.limit
    end, units = ends[-1]
    passes = None if end.repetitions >= _ENDLESS or found.limit is not None else end.repetitions
    if len(ends) > 1 and any(inner.repetitions >= _ENDLESS for inner, _ in ends[:-1]):
        passes = None
    counted = end.samples * units if end.samples > 0 else None
    return Limit(counted, passes, end.in_worker)
