"""What a webdataset pipeline means: its shards, their order, and what is done to each sample and batch.

Stages that choose, open and shuffle shards or samples are recognised and replaced by midepoch's own order and reading.
Stages for one sample or one batch are kept, and run on one sample or batch at a time. So a stage that works on the
whole stream is refused.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, default_convert
from webdataset import cache, compat, filters, mix, shardlists, tariterators
from webdataset.pipeline import DataPipeline

from midepoch.adapters.webdataset import private
from midepoch.adapters.webdataset.drawn_shards import ShardDraws
from midepoch.errors import SourceError, UnsupportedSourceError
from midepoch.loader.capabilities import Capability
from midepoch.world import World

__all__ = ["MIXES", "Batched", "Each", "Limit", "Pipeline", "grouped", "recognise", "refuse_mix", "run_stages"]

_ENDLESS = sys.maxsize  # webdataset's number for no end
_AGAIN = "midepoch.wrap(lambda: make(seed=random.getrandbits(32)), shard=...)"
MIXES = (mix.RandomMix, mix.RoundRobin)

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
        draws: how shards are drawn with replacement; None if each of them comes once in a pass.
        declared: names of the user's own stages that are replaced by what they say of themselves.
        opener: a stage from ``{"url": ...}`` to ``{"url": ..., "stream": ...}``.
        reading, grouping: the keywords of webdataset's tar_file_expander and group_by_keys.
        must_have_samples: whether a pass without samples is an error.
        sample_stages, batch_stages: stages for one sample, and for the list of a batch's samples, in the reading
            process.
        late_sample_stages, late_batch_stages: the same for the main process: what the user put after a DataLoader. With
            late stages for samples, all those for batches are late.
        batch_size: number of samples in a batch; None if samples are handed out one by one.
        drop_last: whether a last batch that is not full is left out.
        limit: the length of an epoch, or None for one pass.
        seed: of a shuffle stage, or None.
        loader: the DataLoader whose processes read: the user's, otherwise one without workers.
        dataset: the value for `get_worker_info().dataset`.
    """

    dataset: Any
    loader: Any = None
    urls: list[str] = field(default_factory=list)
    splits: bool = False
    shuffles: bool = False
    buffer: int = 0
    draws: ShardDraws | None = None
    declared: list[str] = field(default_factory=list)
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
    def exact_order(self) -> Capability:
        """What is promised of the order."""
        replaced = " and ".join(f"{name}, by its `draws`" for name in self.declared)
        in_place = f", in place of {replaced}" if replaced else ""
        return Capability(True, f"the order is a function of seed and epoch{in_place}")

    def check_shared(self, world: World, shard: bool | None) -> None:
        """Raise UnsupportedSourceError if each of several ranks may already have its own urls."""
        if world.world_size > 1 and not self.splits and shard is None:
            raise UnsupportedSourceError(
                "the pipeline has no nodesplitter, so each rank may already have its own urls: pass shard=True to "
                "wrap() if every rank has the same urls (midepoch shards them), or world=midepoch.World() and a state "
                "for each rank if they differ"
            )

    @property
    def workers(self) -> int:
        """The number of processes of a rank that read."""
        return max(1, int(self.loader.num_workers))

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


@dataclass(frozen=True, eq=False)
class Batched:
    """A stage that collects samples into a batch, as webdataset or a DataLoader does."""

    size: int
    collate: Callable[[Any], Any] | None
    drop_last: bool

    def __call__(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Batches of these samples."""
        # Dropped samples make a batch short, but the others in it are kept. A last batch is left out by its position.
        return private.BATCHED(samples, self.size, self.collate, True)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Each:
    """Applies a DataLoader's collate function to each item, as a DataLoader without batches does."""

    function: Callable[[Any], Any]

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        """What the function makes of each."""
        return map(self.function, items)


def grouped(
    files: Iterable[tuple[str, bytes]], url: str, path: str | None, grouping: dict[str, Any]
) -> list[dict[str, Any]]:
    """Group the files of one shard, by name and content, into webdataset's samples. `path`: of a local copy.

    Raises:
        SourceError: a sample has two files of one name, and the handler does not continue.
    """
    more = {"__url__": url} if path is None else {"__url__": url, "__local_path__": path}
    named = ({"fname": name, "data": content, **more} for name, content in files)
    try:
        return list(tariterators.group_by_keys(named, **grouping))
    except ValueError as error:
        if "duplicate file name" not in str(error):
            raise
        raise SourceError(
            f"{url}: a sample has two files of one name ({error.args[0]}); rename one of them, or pass a handler that "
            "continues"
        ) from error


# --- recognition ------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A stage of a pipeline, and whether it comes after a DataLoader."""

    stage: Any
    late: bool


class _End(NamedTuple):
    """The end of a DataPipeline, which says how long an epoch is."""

    samples: int
    repetitions: int
    in_worker: bool


def recognise(source: Any) -> Pipeline:
    """Split a pipeline into its parts.

    Raises:
        UnsupportedSourceError: midepoch cannot interpret a stage; the message names it.
    """
    found = Pipeline(dataset=source)
    steps = list(_flatten(source, found, late=False))
    steps = _take_shards(steps, found)
    steps = _take_reading(steps, found)
    _take_samples(steps, found)
    if found.loader is None:
        found.loader = DataLoader(found.dataset, batch_size=None)
    return found


def _function_of(stage: Any) -> Any:
    """The function that one of webdataset's stages applies; the stage itself if it is another kind."""
    if isinstance(stage, filters.FilterFunction):
        return stage.f
    if isinstance(stage, functools.partial) and not stage.args:
        return stage.func
    return stage


def _arguments_of(stage: Any, *names: str) -> dict[str, Any]:
    """A stage's arguments by name; a bare function has none. `names` are those of its positional arguments."""
    if isinstance(stage, functools.partial):
        return dict(stage.keywords)
    if not isinstance(stage, filters.FilterFunction):
        return {}
    return {**dict(zip(names, stage.args, strict=False)), **stage.kw}


def _name_of(stage: Any) -> str:
    function = _function_of(stage)
    return str(getattr(function, "__name__", None) or type(function).__name__).lstrip("_")


def _refuse(stage: Any, why: str, instead: str) -> UnsupportedSourceError:
    """The error for a stage that midepoch cannot interpret."""
    return UnsupportedSourceError(
        f"the stage {_name_of(stage)} {why}: {instead}; or, to read the pipeline again from its start, wrap a function "
        f"that makes it, with all seeds drawn from python's random: {_AGAIN}"
    )


def refuse_mix(stage: Any) -> UnsupportedSourceError:
    """The error for webdataset's mixes of several pipelines."""
    return _refuse(
        stage,
        "takes samples of several pipelines in turn",
        "wrap each of them and give the loaders to midepoch.combine(loaders, 'weighted'), which mixes batches",
    )


def _flatten(source: Any, found: Pipeline, late: bool) -> Iterator[_Step]:
    """The stages of a pipeline, of the pipelines inside it, and of a DataLoader inside it, in order."""
    if isinstance(source, DataLoader):
        if found.loader is not None:
            raise _refuse(source, "is a DataLoader inside a DataLoader", "keep one of them")
        if not isinstance(source.dataset, DataPipeline):
            raise _refuse(
                source,
                f"reads a {type(source.dataset).__name__}, not a webdataset pipeline",
                "wrap it itself, with what comes after it as then=",
            )
        found.loader, found.dataset = source, source.dataset
        for stage, _ in _flatten(source.dataset, found, False):
            yield _Step(stage._replace(in_worker=True) if isinstance(stage, _End) else stage, False)
        collate = source.collate_fn
        if source.batch_size is None:
            yield _Step(Each(collate), False)
        else:
            yield _Step(Batched(source.batch_size, collate, source.drop_last), False)
        return
    for place, stage in enumerate(source.pipeline):
        if place == 0 and isinstance(stage, DataPipeline | DataLoader):
            yield from _flatten(stage, found, late)
            late = late or found.loader is not None
        else:
            yield _Step(stage, late)
    if source.repetitions != 1:  # webdataset uses nsamples only if it repeats
        yield _Step(_End(source.nsamples, source.repetitions, False), late)


# --- shards -----------------------------------------------------------------------------------------------------------


def _take_shards(steps: list[_Step], found: Pipeline) -> list[_Step]:
    """Take the stages up to the one that opens shards, and return the others."""
    if not steps:
        raise UnsupportedSourceError("the pipeline has no stages: begin it with wds.SimpleShardList(urls)")
    endless = _take_urls(steps, found)
    for place, (stage, _) in enumerate(steps[1:], 1):
        function = _function_of(stage)
        if function in (shardlists.split_by_node, shardlists.single_node_only):
            found.splits = True
        elif function is shardlists.split_by_worker:
            pass
        elif function is shardlists.resampled_:
            count = _arguments_of(stage, "n").get("n", _ENDLESS)
            endless = count == _ENDLESS
            if not endless:
                found.shuffles, found.draws = True, _draws(stage, count)
        elif function is shardlists.non_empty:
            found.must_have_samples = True
        elif _is_opener(stage):
            if endless:
                found.limit = Limit(None, None, False)
            return steps[place:]
        elif isinstance(stage, _End):
            raise UnsupportedSourceError("with_epoch or repeat on a list of shards: put it after the samples")
        elif not _note_shuffle(stage, found, None):
            if not any(_is_opener(step.stage) for step in steps[place:]):
                raise _own_reader(stage)
            raise _refuse(
                stage,
                "comes before the shards are opened, and midepoch cannot see how it chooses among them",
                "use wds.split_by_node and wds.split_by_worker, which midepoch replaces; or, if it is a shuffle, say "
                f"{_name_of(stage)}.draws = 'once'",
            )
    raise UnsupportedSourceError("the pipeline opens no shards: add wds.tarfile_to_samples() after the list of shards")


def _take_urls(steps: list[_Step], found: Pipeline) -> bool:
    """Take the list of shards. Whether it has no end."""
    stage = steps[0].stage
    if isinstance(stage, MIXES):
        raise refuse_mix(stage)
    drawn = _declared(stage, found, "once", "with replacement")
    if type(stage) is shardlists.SimpleShardList:
        found.shuffles = stage.seed is not None
    elif type(stage) is shardlists.ResampledShards:
        drawn = "with replacement"
    elif not drawn:
        raise _refuse(
            stage,
            "does not give shards in an order that midepoch can compute",
            f"begin with wds.SimpleShardList(urls), or say how it draws from its list .urls: {_name_of(stage)}.draws = "
            "'once', each shard once in a pass, or 'with replacement'",
        )
    elif not isinstance(getattr(stage, "urls", None), list | tuple):
        raise _refuse(stage, "shows no list of its shards as .urls", "give it one")
    found.urls = list(stage.urls)
    if not drawn:
        return False
    found.shuffles = True
    if drawn == "once" or not found.urls:
        return False
    found.splits = True  # each rank draws its own
    weights = _weights_of(stage, len(found.urls))
    count = getattr(stage, "nshards", _ENDLESS)
    if count != _ENDLESS:
        found.draws = _draws(stage, count, weights)
    elif weights is not None:
        found.draws = ShardDraws(len(found.urls), weights)  # in a pass
    return bool(count == _ENDLESS)


def _declared(stage: Any, found: Pipeline, *known: str) -> str:
    """How a list of shards or a shuffle of the user's own says that it draws, as `draws`; empty if it says nothing."""
    drawn = getattr(stage, "draws", None)
    if drawn is None:
        return ""
    if not isinstance(drawn, str) or drawn not in known:
        raise UnsupportedSourceError(f"{_name_of(stage)}.draws is {drawn!r:.40}: say {' or '.join(map(repr, known))}")
    found.declared.append(_name_of(stage))
    return drawn


def _draws(stage: Any, count: object, weights: tuple[float, ...] | None = None) -> ShardDraws:
    if type(count) is not int or count < 1:
        raise UnsupportedSourceError(f"{_name_of(stage)} draws {count!r} shards: pass a number of at least 1")
    return ShardDraws(count, weights)


def _weights_of(stage: Any, shards: int) -> tuple[float, ...] | None:
    weights = getattr(stage, "weights", None)
    if weights is None:
        return None
    try:
        numbers = tuple(map(float, weights))
    except (TypeError, ValueError):
        numbers = ()
    sound = len(numbers) == shards and all(math.isfinite(each) and each >= 0 for each in numbers) and sum(numbers) > 0
    if not sound:
        raise UnsupportedSourceError(
            f"{_name_of(stage)}.weights are not {shards} numbers of 0 or more, one for each of its urls, with a sum "
            f"above 0: got {weights!r:.80}; correct them"
        )
    return numbers


def _note_shuffle(stage: Any, found: Pipeline, units: int | None) -> bool:
    """Whether the stage shuffles. Records its settings. `units`: samples in each thing shuffled, None for shards."""
    if type(stage) is filters.detshuffle:
        size, seed = stage.bufsize, stage.seed or None
    elif _function_of(stage) is private.SHUFFLE:
        arguments = _arguments_of(stage, "bufsize", "initial", "rng", "seed")
        size, seed = arguments.get("bufsize", 1000), arguments.get("seed")
    elif units is None and _declared(stage, found, "once"):
        size, seed = 2, getattr(stage, "seed", None) or None
    else:
        return False
    if int(size or 0) > 1:
        found.shuffles = True
        if units is not None:
            found.buffer = max(found.buffer, int(size) * units)
        # Unless the user states one, WebDataset gives its own shuffle of shards a random seed.
        own = None if units else getattr(_innermost(found.dataset), "seed", None)
        if type(seed) is int and seed is not own and found.seed is None:
            found.seed = seed % (1 << 64)
    return True


def _innermost(dataset: Any) -> Any:
    while isinstance(dataset, DataPipeline) and dataset.pipeline and isinstance(dataset.pipeline[0], DataPipeline):
        dataset = dataset.pipeline[0]
    return dataset


# --- reading ----------------------------------------------------------------------------------------------------------


def _is_opener(stage: Any) -> bool:
    return isinstance(stage, cache.StreamingOpen | cache.FileCache) or _function_of(stage) in (
        tariterators.url_opener,
        tariterators.tarfile_samples,
    )


def _take_reading(steps: list[_Step], found: Pipeline) -> list[_Step]:
    """Take the stages that open shards and make samples of files, and return the others."""
    first = steps[0].stage
    function: Callable[..., Any] = _function_of(first)
    if function is tariterators.tarfile_samples:
        arguments = _arguments_of(first, "handler", "select_files", "rename_files")
        handler = {"handler": arguments["handler"]} if "handler" in arguments else {}
        found.opener = functools.partial(tariterators.url_opener, **handler)
        found.reading, found.grouping = arguments, handler
        return steps[1:]
    found.opener = first
    if function is tariterators.url_opener:
        found.opener = functools.partial(function, **_arguments_of(first, "handler"))
    for place, wanted in enumerate((tariterators.tar_file_expander, tariterators.group_by_keys), 1):
        if place == len(steps) or _function_of(steps[place].stage) is not wanted:
            raise _own_reader(steps[min(place, len(steps) - 1)].stage)
    found.reading = _arguments_of(steps[1].stage, "handler", "select_files", "rename_files", "eof_value")
    found.grouping = _arguments_of(steps[2].stage, "keys", "lcase", "suffixes", "handler")
    if found.reading.pop("eof_value", {}) is None:
        raise _refuse(steps[1].stage, "lets a sample continue in the next shard", "leave out eof_value=None")
    return steps[3:]


def _own_reader(stage: Any) -> UnsupportedSourceError:
    """The error for a stage from shards to samples, with the line to write."""
    given = str(getattr(_arguments_of(stage).get("handler"), "__name__", ""))
    return _refuse(
        stage,
        "makes samples of shards itself, and midepoch cannot see where in a shard one begins",
        f"write wds.tarfile_to_samples({f'handler={given}' if given.isidentifier() else ''}) in its place",
    )


# --- samples and batches ----------------------------------------------------------------------------------------------


_WHY = {
    "info": ("prints the first samples of a stream, which a resumed stream lacks", "remove it"),
    "Cached": ("caches the whole stream", "remove it"),
    "LMDBCached": ("caches the whole stream", "remove it"),
    "islice": ("takes part of a stream", "pass fewer urls, or use with_epoch"),
    "": (
        "may work on the stream as a whole, which midepoch cannot see",
        "write it as .map(function) or .select(predicate), which work on one sample",
    ),
}
"""By a stage's name, why it is refused, and what to write in its place; last, of those that have no row."""


@dataclass
class _Level:
    """The stages that work on samples, or on batches of `units` samples."""

    units: int
    stages: list[_Step]


def _take_samples(steps: list[_Step], found: Pipeline) -> None:
    """Take the stages after the samples: those for one sample, and those for one batch."""
    levels = [_Level(1, [])]
    ends: list[tuple[_End, int]] = []
    for stage, late in steps:
        level = levels[-1]
        function = _function_of(stage)
        if isinstance(stage, _End):
            ends.append((stage, level.units))
        elif function is private.BATCHED or isinstance(stage, Batched):
            batched = stage if isinstance(stage, Batched) else _as_batched(stage)
            levels.append(_Level(level.units * batched.size, [_Step(batched, late)]))
            found.drop_last = batched.drop_last
        elif function in private.UNBATCH:
            _unbatch(levels, stage, late)
        elif function is compat.check_empty or function is shardlists.non_empty:
            found.must_have_samples = True
        elif function in private.SAMPLEWISE or isinstance(stage, Each):
            level.stages.append(_Step(stage, late))
        elif not _note_shuffle(stage, found, level.units):
            raise _refuse(stage, *_WHY.get(_name_of(stage), _WHY[""]))
    found.drop_last = found.drop_last and len(levels) > 1
    found.batch_size = levels[-1].units if len(levels) > 1 else None
    _place_stages(levels, found)
    found.limit = _limit(ends, found)


def _as_batched(stage: Any) -> Batched:
    arguments = _arguments_of(stage, "batchsize", "collation_fn", "partial")
    collate = arguments.get("collation_fn", filters.default_collation_fn)
    size = arguments.get("batchsize", 20)
    if type(size) is not int or size < 1:
        raise UnsupportedSourceError(f"batched({size!r}): pass a batch size of at least 1")
    return Batched(size, collate, not arguments.get("partial", True))


def _unbatch(levels: list[_Level], stage: Any, late: bool) -> None:
    if len(levels) == 1:
        raise _refuse(stage, "makes several samples of one", "store them as separate samples")
    level = levels.pop()
    batched = level.stages[0].stage
    for inner in level.stages[1:]:
        if not (isinstance(inner.stage, Each) and inner.stage.function is default_convert):
            raise _refuse(
                inner.stage,
                f"works on batches of {level.units} that are split again",
                "put it before the first batched() or after the last",
            )
    # The values come out one at a time, as they would from a batch: numpy's numbers, for example.
    single = _Step(Batched(1, batched.collate, False), level.stages[0].late)
    levels[-1].stages += [single, *level.stages[1:], _Step(stage, late)]


def _place_stages(levels: list[_Level], found: Pipeline) -> None:
    """Decide which stages run where samples are read, and which in the main process."""
    samples = levels[0].stages
    batches = [step for level in levels[1:] for step in level.stages]

    def is_own(step: _Step) -> bool:
        stage, late = step
        return late and not isinstance(stage, Batched | Each) and _function_of(stage) not in private.UNBATCH

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
    if any(inner.repetitions >= _ENDLESS for inner, _ in ends[:-1]):
        passes = None
    return Limit(end.samples * units if end.samples > 0 else None, passes, end.in_worker)
