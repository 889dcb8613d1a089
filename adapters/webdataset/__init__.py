"""webdataset: pipelines over tar shards, by themselves, in a WebLoader or in a torch DataLoader.

| module | holds |
|---|---|
| pipeline | what a pipeline means: the recognition of its stages |
| drawn_shards | shards that are drawn with replacement |
| shards | where shards are, and how to read their bytes |
| index | where each sample of a shard is |
| finish | the stages that run in the main process |
| indexed, indexed_reader | shards whose samples can be read in any order |
| archive | one shard that is read from its start |
| streams | streams of such shards, where they are, and their batches |
| streamed | pipelines over such shards |
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from webdataset.cache import FileCache
from webdataset.filters import reraise_exception
from webdataset.pipeline import DataPipeline

from midepoch.adapters.webdataset.index import Index, Keys, build_index, default_cache
from midepoch.adapters.webdataset.indexed import IndexedAdapter
from midepoch.adapters.webdataset.pipeline import MIXES, Pipeline, recognise, refuse_mix
from midepoch.adapters.webdataset.shards import local_path
from midepoch.adapters.webdataset.streamed import MOST_STREAMS, StreamedAdapter
from midepoch.errors import SourceError, UnsupportedSourceError
from midepoch.loader.adapter import Adapter, Options

__all__ = ["WebDatasetAdapter"]


class WebDatasetAdapter(Adapter):
    """Chooses how a pipeline is read: by position if its shards can be indexed, otherwise as streams."""

    name = "webdataset"

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A DataPipeline (WebDataset, WebLoader, ...), a mix of several, or a DataLoader over one of these."""
        if isinstance(source, DataLoader):
            return type(source).__iter__ is DataLoader.__iter__ and isinstance(source.dataset, (DataPipeline, *MIXES))
        return type(source) in MIXES or (
            isinstance(source, DataPipeline) and type(source).__iter__ is DataPipeline.__iter__
        )

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter:
        """An IndexedAdapter or a StreamedAdapter.

        Raises:
            UnsupportedSourceError: midepoch cannot interpret a stage.
            SourceError: a shard cannot be read, or there are no samples.
        """
        _check(options.settings)
        whole = getattr(source, "dataset", source)
        if isinstance(whole, MIXES):
            raise refuse_mix(whole)
        pipeline = recognise(source)
        if options.shard is False:
            raise UnsupportedSourceError(
                "shard=False on a webdataset pipeline: midepoch shards its samples over the ranks; to give each rank "
                "its own urls, pass world=midepoch.World() and keep a state for each rank"
            )
        if not pipeline.urls:
            raise SourceError("the pipeline has no shards: check its urls")
        given = {**pipeline.reading, **pipeline.grouping}
        keys = Keys(**{name: given[name] for name in Keys._fields if given.get(name) is not None})
        index = _index(pipeline, keys, options.settings)
        if isinstance(index, str):
            return StreamedAdapter(source, options, pipeline, keys, index)
        if not index.size and (pipeline.must_have_samples or pipeline.limit is not None):
            unless = ", or pass empty_check=False to WebDataset" if pipeline.limit is None else ""
            raise SourceError(f"no samples in {len(pipeline.urls)} shards: check the urls{unless}")
        return IndexedAdapter(source, options, pipeline, keys, index)


def _check(settings: Mapping[str, Any]) -> None:
    refill, progress, streams = settings.get("refill", False), settings.get("progress"), settings.get("streams")
    if not isinstance(refill, bool):
        raise TypeError(f"refill must be True or False, got {refill!r}")
    if progress not in (None, True, False):
        raise TypeError(f"progress must be True, False or None, got {progress!r}")
    if streams is not None and (type(streams) is not int or not 1 <= streams <= MOST_STREAMS):
        raise ValueError(f"streams must be an int in [1, {MOST_STREAMS}] or None, got {streams!r}")


def _index(pipeline: Pipeline, keys: Keys, settings: Mapping[str, Any]) -> Index | str:
    """The index of the pipeline's shards, or the reason why they are streamed."""
    if settings.get("refill"):
        return "refill=True was stated"
    opener, cache = pipeline.opener, settings.get("index_cache")
    if isinstance(opener, FileCache) and any(local_path(url) is None for url in pipeline.urls):
        return "remote shards are read through webdataset's own cache of files"
    keywords = opener.keywords if isinstance(opener, partial) else vars(opener)
    handlers = {
        "opening": keywords.get("handler", reraise_exception),
        "reading": pipeline.reading.get("handler", reraise_exception),
    }
    folder = default_cache() if cache is None else Path(cache)
    return build_index(pipeline.urls, keys, handlers, folder, settings.get("progress"))
