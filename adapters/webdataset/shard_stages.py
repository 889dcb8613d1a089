"""The stages from a list of shards to samples: recognised, and replaced by midepoch's own order and reading."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from webdataset import cache, compat, filters, mix, shardlists, tariterators
from webdataset.pipeline import DataPipeline

from midepoch.adapters.webdataset import private
from midepoch.adapters.webdataset.draws import Draws
from midepoch.adapters.webdataset.own import OwnShards, is_own_shuffle, own_shards
from midepoch.adapters.webdataset.pipeline import (
    ENDLESS,
    End,
    Limit,
    Pipeline,
    Step,
    arguments_of,
    function_of,
    refuse,
)
from midepoch.errors import UnsupportedSourceError

__all__ = ["folder_as_it_comes", "is_known", "note_shuffle", "take_reading", "take_shards"]

_SPLITS = (shardlists.split_by_node, shardlists.single_node_only)


def note_shuffle(stage: Any, found: Pipeline, units: int | None, own_seed: Any) -> bool:
    """Whether the stage shuffles. Records its settings. `units`: samples in each thing shuffled, None for shards."""
    if type(stage) is filters.detshuffle:
        size, seed = stage.bufsize, stage.seed or None
    elif function_of(stage) is private.SHUFFLE:
        arguments = arguments_of(stage, "bufsize", "initial", "rng", "seed")
        size, seed = arguments.get("bufsize", 1000), arguments.get("seed")
    elif not is_known(stage) and (units is None or _buffer(stage)) and is_own_shuffle(stage):
        found.tried.append(type(stage).__name__)
        size, seed = _buffer(stage) or 2, getattr(stage, "seed", None)
        seed = seed if type(seed) is int and seed > 0 else None
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


def is_known(stage: Any) -> bool:
    """Whether it is a stage of webdataset's, of midepoch's own, or the end of a pipeline."""
    module = getattr(function_of(stage), "__module__", None) or type(stage).__module__
    return module.partition(".")[0] in ("webdataset", "midepoch", "itertools")


def _buffer(stage: Any) -> int:
    size = getattr(stage, "bufsize", None)
    return size if type(size) is int else 0


def take_shards(steps: list[Step], found: Pipeline) -> list[Step]:
    """Take the stages up to the one that opens shards, and return the others."""
    if not steps:
        raise UnsupportedSourceError("the pipeline has no stages: begin it with wds.SimpleShardList(urls)")
    endless = _take_urls(steps, found)
    own_seed = getattr(_innermost(found.dataset), "seed", None)
    for place, (stage, _) in enumerate(steps[1:], 1):
        function = function_of(stage)
        if function in _SPLITS:
            found.splits = True
        elif function is shardlists.split_by_worker:
            pass
        elif function is shardlists.resampled_:
            count = arguments_of(stage, "n").get("n", ENDLESS)
            endless = count == ENDLESS
            if not endless:
                found.shuffles, found.draws = True, _draws(stage, count)
        elif function is shardlists.non_empty:
            found.must_have_samples = True
        elif _is_opener(stage):
            if endless:
                found.limit = Limit(None, None, False)
            return steps[place:]
        elif isinstance(stage, End):
            raise UnsupportedSourceError("with_epoch or repeat on a list of shards: put it after the samples")
        elif not note_shuffle(stage, found, None, own_seed):
            raise _not_understood(stage, steps[place + 1 :])
    raise UnsupportedSourceError("the pipeline opens no shards: add wds.tarfile_to_samples() after the list of shards")


def _not_understood(stage: Any, behind: list[Step]) -> UnsupportedSourceError:
    if any(_is_opener(step.stage) for step in behind):
        return refuse(
            stage,
            "comes before the shards are opened, and midepoch cannot see how it chooses among them",
            "use wds.split_by_node and wds.split_by_worker, which midepoch replaces",
        )
    return _own_expander(stage)


def _own_expander(stage: Any) -> UnsupportedSourceError:
    return refuse(
        stage,
        "makes samples of shards itself, and midepoch cannot see where in a shard one begins",
        f"write wds.tarfile_to_samples({_handler_of(stage)}) in its place{_from_outside(stage)}",
        "or, if it runs by itself with this webdataset, pass replay=True",
    )


def _from_outside(stage: Any) -> str:
    """How to replace a function of a module without a change of that module; empty where that does not help."""
    module, name = getattr(stage, "__module__", ""), getattr(stage, "__name__", "")
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not stage:
        return ""
    return f", by an assignment to {module}.{name} if that is not yours to change"


def _handler_of(stage: Any) -> str:
    """A stage's handler, as it is passed on; empty if it has none."""
    handler = arguments_of(stage).get("handler")
    if handler is None:
        try:
            handler = inspect.signature(function_of(stage)).parameters["handler"].default
        except (KeyError, TypeError, ValueError):
            return ""
    name = getattr(handler, "__name__", "")
    return f"handler={name}" if name.isidentifier() else ""


def _draws(stage: Any, count: object) -> Draws:
    if type(count) is not int or count < 1:
        raise UnsupportedSourceError(f"{type(stage).__name__} draws {count!r} shards: pass a number of at least 1")
    return Draws(count)


def _innermost(dataset: Any) -> Any:
    while isinstance(dataset, DataPipeline) and dataset.pipeline and isinstance(dataset.pipeline[0], DataPipeline):
        dataset = dataset.pipeline[0]
    return dataset


def _shards_in(stage: Any) -> OwnShards | str:
    """What a list of shards does, be it webdataset's or the user's own; or why that is not known.

    Raises:
        UnsupportedSourceError: it draws fewer shards than one, or its weights are invalid.
    """
    if type(stage) is shardlists.SimpleShardList:
        return OwnShards(list(stage.urls), False, stage.seed is not None, None)
    if type(stage) is shardlists.ResampledShards:
        endless = stage.nshards == ENDLESS
        return OwnShards(list(stage.urls), endless, True, None if endless else _draws(stage, stage.nshards))
    return own_shards(stage)


def folder_as_it_comes(stage: Any) -> UnsupportedSourceError:
    """The error for a list of shards that takes files out of a folder."""
    return UnsupportedSourceError(
        f"DirectoryShardList takes files out of {stage.path} as they come, so no run repeats another: give the files "
        "that are there, as wds.SimpleShardList(sorted(glob.glob(...)))"
    )


def _take_urls(steps: list[Step], found: Pipeline) -> bool:
    """Whether the list of shards has no end."""
    stage = steps[0].stage
    if isinstance(stage, mix.RandomMix | mix.RoundRobin):
        raise refuse(
            stage,
            "takes samples of several pipelines in turn",
            "wrap each of them and give the loaders to midepoch.combine(loaders, 'weighted'), which mixes batches",
        )
    if isinstance(stage, shardlists.DirectoryShardList):
        raise folder_as_it_comes(stage)
    shards = _shards_in(stage)
    if isinstance(shards, str):
        if any(_is_opener(step.stage) for step in steps[1:]):
            why = f"gives shards in an order that midepoch cannot compute ({shards})"
            raise refuse(stage, why, "begin with wds.SimpleShardList(urls)")
        raise refuse(stage, "gives samples and not shards", "store them in shards")
    if not is_known(stage):
        found.tried.append(type(stage).__name__)
    found.urls, found.draws = shards.urls, shards.draws
    found.shuffles = shards.shuffled
    found.splits = shards.draws is not None or (shards.endless and shards.shuffled)  # each rank draws its own
    return shards.endless


def _is_opener(stage: Any) -> bool:
    return isinstance(stage, cache.StreamingOpen | cache.FileCache) or function_of(stage) in (
        tariterators.url_opener,
        tariterators.tarfile_samples,
    )


class _GopenStage:
    """webdataset's url_opener with its handler."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def __call__(self, shards: Iterable[Any]) -> Iterator[Any]:
        return tariterators.url_opener(shards, **self.arguments)  # type: ignore[no-any-return]


def take_reading(steps: list[Step], found: Pipeline) -> list[Step]:
    """Take the stages that open shards and make samples of files, and return the others."""
    first = steps[0].stage
    function: Callable[..., Any] = function_of(first)
    if function is tariterators.tarfile_samples:
        arguments = arguments_of(first, "handler", "select_files", "rename_files")
        handler = {"handler": arguments["handler"]} if "handler" in arguments else {}
        found.opener, found.reading, found.grouping = _GopenStage(dict(handler)), arguments, dict(handler)
        rest = steps[1:]
    else:
        known = function is tariterators.url_opener
        found.opener = _GopenStage(arguments_of(first, "handler")) if known else first
        wanted = (tariterators.tar_file_expander, tariterators.group_by_keys)
        got = [function_of(step.stage) for step in steps[1:3]]
        for place, each in enumerate(wanted):
            if place >= len(got) or got[place] is not each:
                raise _own_expander(steps[min(place + 1, len(steps) - 1)].stage)
        found.reading = arguments_of(steps[1].stage, "handler", "select_files", "rename_files", "eof_value")
        found.grouping = arguments_of(steps[2].stage, "keys", "lcase", "suffixes", "handler")
        if found.reading.pop("eof_value", {}) is None:
            raise refuse(steps[1].stage, "lets a sample continue in the next shard", "leave out eof_value=None")
        rest = steps[3:]
    if rest and function_of(rest[0].stage) is compat.check_empty:
        found.must_have_samples = True
        rest = rest[1:]
    return rest
