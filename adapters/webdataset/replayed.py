"""Pipelines that are read again from their start, with webdataset's own random choices keyed.

webdataset seeds its shuffles and draws by process and time, or by a number that it draws when the pipeline is made. So
each pass is read from a copy of the pipeline in which these stages have generators that follow from seed and epoch,
and, where each rank and worker process has a stream of its own, from rank and worker.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from webdataset import filters, mix, shardlists
from webdataset.pipeline import DataPipeline

from midepoch.adapters.webdataset import private
from midepoch.adapters.webdataset.draws import Draws
from midepoch.adapters.webdataset.own import OwnShards, is_own_shuffle, own_shards
from midepoch.adapters.webdataset.pipeline import ENDLESS, arguments_of, function_of
from midepoch.adapters.webdataset.progress import counted
from midepoch.adapters.webdataset.shard_stages import folder_as_it_comes, is_known
from midepoch.errors import UnsupportedSourceError
from midepoch.loader.adapter import Options, Run, Session
from midepoch.order.keys import derive_key, extend_key
from midepoch.reading.iterables import IterableAdapter, IterableLoaderAdapter

__all__ = ["replayed"]

# A constant for each use of a key, so that no two share one.
_REPLAYED = int.from_bytes(b"replayed", "big")


class _Divided(NamedTuple):
    """Whether shards are divided among ranks, and among workers."""

    nodes: bool = False
    workers: bool = False

    def and_by(self, stage: Any) -> _Divided:
        """The same, with what this stage does."""
        function = function_of(stage)
        return _Divided(
            self.nodes or function is shardlists.split_by_node, self.workers or function is shardlists.split_by_worker
        )


_NOT = _Divided()


# --- stages that get their generator in each pass ---------------------------------------------------------------------


class _Keyed:
    """A stage in place of one that seeds itself.

    Attributes:
        generator: of this pass.
        behind: what comes after it. What is divided later has to be in the same order everywhere.
    """

    generator: random.Random
    behind: _Divided

    def with_generator(self, generator: random.Random) -> _Keyed:
        """The stage of one pass."""
        twin = copy.copy(self)
        twin.generator = generator
        return twin


class _Shuffle(_Keyed):
    """In place of webdataset's `shuffle` and `detshuffle`, and of the user's own shuffles."""

    def __init__(self, size: int, initial: int) -> None:
        self._size, self._initial = size, initial

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        return private.SHUFFLE(iter(items), self._size, self._initial, self.generator)  # type: ignore[no-any-return]


class _Resampled(_Keyed):
    """In place of webdataset's `resampled`."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        given = list(items)
        for _ in range(self._count):
            yield self.generator.choice(given)


class _List(_Keyed):
    """In place of a list of shards that shuffles them or draws from them.

    Attributes:
        draws: whether it draws.
    """

    def __init__(self, shards: OwnShards) -> None:
        self._shards = shards
        self.draws = shards.endless or shards.draws is not None

    def __call__(self) -> Iterator[dict[str, str]]:
        shards = self._shards
        if not self.draws:
            yield from ({"url": url} for url in self.generator.sample(shards.urls, len(shards.urls)))
            return
        draws = shards.draws
        count = sys.maxsize if draws is None or shards.endless else draws.length
        weights = None if draws is None else draws.weights
        reached = None if weights is None else list(itertools.accumulate(weights))
        for _ in range(count):
            yield {"url": self.generator.choices(shards.urls, cum_weights=reached)[0]}


class _Specified(_Keyed):
    """In place of webdataset's `MultiShardSample`."""

    def __init__(self, shards: Any) -> None:
        self._shards = shards

    def __call__(self) -> Iterator[dict[str, str]]:
        shards = copy.copy(self._shards)
        shards.rng = self.generator
        return iter(shards)


def _prepared(source: Any, behind: _Divided = _NOT) -> Any:
    """A copy of a pipeline, or of what holds pipelines, with stages that seed themselves replaced.

    It has to be the user's own: stages are recognised by their functions, which a deep copy may replace.
    """
    if isinstance(source, mix.RandomMix | mix.RoundRobin):
        twin = copy.copy(source)
        twin.datasets = [_prepared(dataset, behind) for dataset in source.datasets]
        return twin
    if isinstance(source, DataLoader) and isinstance(source.dataset, DataPipeline):
        return _with_dataset(source, _prepared(source.dataset, behind))
    if not isinstance(source, DataPipeline):
        return source
    stages = []
    for place, stage in reversed(list(enumerate(source.pipeline))):
        prepared = _prepared_stage(stage, getattr(source, "seed", None), not place, behind)
        if isinstance(prepared, _Keyed):
            prepared.behind = behind
        stages.append(prepared)
        behind = behind.and_by(stage)
    twin = copy.copy(source)
    twin.pipeline = stages[::-1]
    return twin


def _prepared_stage(stage: Any, own_seed: Any, first: bool, behind: _Divided) -> Any:
    if function_of(stage) is private.SHUFFLE:
        arguments = arguments_of(stage, "bufsize", "initial", "rng", "seed")
        seed = arguments.get("seed")
        if type(seed) is int and seed is not own_seed:
            return stage  # the user's; it repeats itself
        return _Shuffle(arguments.get("bufsize", 1000), arguments.get("initial", 100))
    if type(stage) is filters.detshuffle:
        return _Shuffle(stage.bufsize, stage.initial)
    if function_of(stage) is shardlists.resampled_:
        return _Resampled(arguments_of(stage, "n").get("n", ENDLESS))
    if first:
        return _prepared_list(stage, behind)
    if not is_known(stage) and is_own_shuffle(stage):
        size = getattr(stage, "bufsize", None)
        everything = 1 << 60
        return (
            _Shuffle(size, getattr(stage, "initial", size)) if type(size) is int else _Shuffle(everything, everything)
        )
    return stage


def _prepared_list(stage: Any, behind: _Divided) -> Any:
    if isinstance(stage, shardlists.DirectoryShardList):
        raise folder_as_it_comes(stage)
    if type(stage) is shardlists.SimpleShardList:
        by_time = stage.seed is not None and type(stage.seed) is not int
        return _List(OwnShards(stage.urls, False, True, None)) if by_time else stage
    if type(stage) is shardlists.ResampledShards:
        draws = None if stage.nshards == ENDLESS else Draws(stage.nshards)
        return _List(OwnShards(stage.urls, draws is None, True, draws))
    if type(stage) is shardlists.MultiShardSample:
        return _Specified(stage)
    if isinstance(stage, DataPipeline | DataLoader | mix.RandomMix | mix.RoundRobin):
        return _prepared(stage, behind)
    if not hasattr(stage, "urls"):
        return stage
    shards = own_shards(stage)
    return stage if isinstance(shards, str) or not shards.shuffled else _List(shards)


def _with_dataset(loader: Any, dataset: Any) -> Any:
    """A copy of a DataLoader with another dataset, and with workers of its own."""
    twin = copy.copy(loader)
    twin.__dict__.update(dataset=dataset, _iterator=None)
    return twin


# --- opening a pass ---------------------------------------------------------------------------------------------------


class _Opening:
    """How passes are opened.

    Attributes:
        own: each rank and worker process has a stream of its own.
        rank: this process's.
        progress: as in `wrap`.
        again: an epoch, and the number of units that are read again when it is resumed.
    """

    def __init__(self, own: bool, progress: bool | None) -> None:
        self.own, self.progress = own, progress
        self.rank, self.again = 0, (0, 0)

    def __call__(self, source: Any) -> _Open:
        return _Open(source, self)


class _Open:
    """Returns a new iterator over a pipeline. A class, so that it can be sent to worker processes."""

    def __init__(self, source: Any, how: _Opening) -> None:
        self._source, self._how = source, how

    def __call__(self, seed: int, epoch: int) -> Iterator[Any]:
        how, info = self._how, get_worker_info()
        pipeline = _keyed(self._source, derive_key(_REPLAYED, seed, epoch), how.rank if how.own else None)
        begun: Iterator[Any] = iter(pipeline)
        if how.again[0] != epoch or (info is not None and info.id):
            return begun
        return counted(begun, how.again[1], f"reading epoch {epoch} again", "unit", how.progress)


class _Inside(IterableDataset[Any]):
    """A pipeline inside a DataLoader that the main process iterates: its generators are made in the worker."""

    def __init__(self, source: Any, key: int, rank: int | None) -> None:
        self._source, self._arguments = source, (key, rank)

    def __iter__(self) -> Iterator[Any]:
        return iter(_keyed(self._source, *self._arguments))


def _keyed(source: Any, key: int, rank: int | None) -> Any:
    """A prepared pipeline with the generators of one pass.

    Args:
        source: as `_prepared` returns it.
        key: of the pass.
        rank: this process's, if each rank and worker has a stream of its own; otherwise None.
    """
    if isinstance(source, mix.RandomMix | mix.RoundRobin):
        twin = copy.copy(source)
        twin.datasets = [_keyed(dataset, extend_key(key, place), rank) for place, dataset in enumerate(source.datasets)]
        return twin
    if isinstance(source, DataLoader) and isinstance(source.dataset, DataPipeline):
        return _with_dataset(source, _Inside(source.dataset, key, rank))
    if not isinstance(source, DataPipeline):
        return source
    info = get_worker_info()
    worker = 0 if info is None else info.id + 1
    twin = copy.copy(source)
    twin.pipeline = list(source.pipeline)
    for place, stage in enumerate(source.pipeline):
        if isinstance(stage, _Keyed):
            own = () if rank is None else (0 if stage.behind.nodes else rank, 0 if stage.behind.workers else worker)
            twin.pipeline[place] = stage.with_generator(random.Random(extend_key(key, place, *own)))
        elif place == 0:
            twin.pipeline[0] = _keyed(stage, extend_key(key, place), rank)
    return twin


# --- the adapters -----------------------------------------------------------------------------------------------------


def replayed(source: Any, options: Options) -> IterableAdapter:
    """The adapter that replays a pipeline, alone or in a DataLoader.

    Raises:
        UnsupportedSourceError: it takes files as they come, or `shard` does not suit it.
    """
    if isinstance(source, DataLoader):
        return _ReplayedLoader(source, options)
    return _ReplayedPipeline(source, options)


def _opening(options: Options) -> _Opening:
    return _Opening(options.shard is False, options.settings.get("progress"))


def _divided(source: Any) -> _Divided:
    """How a pipeline, with those inside it, divides its shards."""
    if isinstance(source, DataLoader):
        return _divided(source.dataset)
    inner = source.datasets if isinstance(source, mix.RandomMix | mix.RoundRobin) else ()
    divided = _NOT
    if isinstance(source, DataPipeline):
        inner = source.pipeline[:1]
        for stage in source.pipeline:
            divided = divided.and_by(stage)
    for each in map(_divided, inner):
        divided = _Divided(divided.nodes or each.nodes, divided.workers or each.workers)
    return divided


def _draws(source: Any) -> bool:
    """Whether a prepared pipeline draws its shards, so that no two readers get the same."""
    if not isinstance(source, DataPipeline):
        return False
    return _draws(source.pipeline[0]) or any(
        isinstance(stage, _Resampled) or (isinstance(stage, _List) and stage.draws) for stage in source.pipeline
    )


class _Replayed(IterableAdapter):
    """What both adapters have in common."""

    opening: _Opening
    _divided: _Divided

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Never: WebDatasetAdapter makes this adapter."""
        return False

    def open(self, run: Run) -> Session:
        """A session that reads again what is before the run's position."""
        world, shard = run.world, self.options.shard
        if world.world_size > 1 and shard is not False:
            if self._divided.nodes:
                raise UnsupportedSourceError(
                    f"wds.split_by_node divides the shards among {world.world_size} ranks by itself: pass shard=False "
                    "to wrap(), so that midepoch does not divide each rank's part again"
                )
            if shard is None:
                raise UnsupportedSourceError(
                    f"the pipeline would be read by {world.world_size} ranks and does not divide its shards among "
                    "them: pass shard=True to wrap(), so that every rank reads all of it and keeps its part; or put "
                    "wds.split_by_node after the list of shards and pass shard=False"
                )
        units = run.position
        if self.opening.own:
            units = run.position // world.world_size * (self._samples_in_batch or 1) // max(self._workers, 1)
        self.opening.rank, self.opening.again = world.rank, (run.epoch, units)
        return super().open(run)


class _ReplayedPipeline(_Replayed):
    """A pipeline that this process reads."""

    name: ClassVar[str] = "iterable"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options, stream=_prepared(source))
        self.opening, self._divided = _opening(options), _divided(source)


class _ReplayedLoader(_Replayed, IterableLoaderAdapter):
    """A pipeline in a DataLoader."""

    name: ClassVar[str] = "iterable-dataloader"

    def __init__(self, source: DataLoader[Any], options: Options) -> None:
        workers, divided, stream = source.num_workers, _divided(source), _prepared(source.dataset)
        if workers > 1 and divided.workers and options.shard:
            raise UnsupportedSourceError(
                f"shard=True with replay=True: wds.split_by_worker divides the shards among {workers} workers by "
                "itself, and midepoch would divide each worker's part again: pass shard=False"
            )
        if workers > 1 and options.shard is None:
            if not divided.workers and not _draws(stream):
                raise UnsupportedSourceError(
                    f"the pipeline would be read by {workers} worker processes, and no wds.split_by_worker divides its "
                    "shards among them: put that after the list of shards, or pass shard=True to wrap(), so that "
                    "every worker reads all of it and keeps its part; pass shard=False if a stage of your own divides"
                )
            options = replace(options, shard=False)
        super().__init__(source, options, stream=stream)
        self.opening, self._divided = _opening(options), divided
