"""The parts of webdataset and fsspec that midepoch uses and they do not promise. webdataset is checked on import.

webdataset makes each stage of a pipeline from a function with a private name, and only this name identifies the stage.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from midepoch.packages import Package

__all__ = ["BATCHED", "SAMPLEWISE", "SHUFFLE", "UNBATCH", "cat_files", "path_of"]

_WEBDATASET = Package("webdataset", ("webdataset",), ("1.0", "1.0"), "1.0")  # before, pipelines had other parts


def _filter(name: str) -> Any:
    return _WEBDATASET.part(f"webdataset.filters:{name}")


SAMPLEWISE = tuple(
    _filter(name)
    for name in (
        "_select", "_log_keys", "_decode", "_map", "_rename", "_associate", "_map_dict", "_to_tuple", "_map_tuple",
        "_rsample", "_extract_keys", "_rename_keys", "_xdecode",
    )
)  # fmt: skip
"""Stages that work on one sample or one batch, whatever came before."""

BATCHED = _filter("_batched")
SHUFFLE = _filter("_shuffle")
UNBATCH = (_filter("_unbatched"), _filter("_unlisted"))


def path_of(filesystem: Any, url: str) -> Any:
    """A url in the form that an fsspec file system takes."""
    return filesystem._strip_protocol(url)


def cat_files(filesystem: Any, calls: list[tuple[str, int, int, dict[str, Any]]]) -> list[Any]:
    """Read byte ranges, all at once if the file system is asynchronous. In place of one that fails, its exception.

    Args:
        filesystem: fsspec's.
        calls: for each range, path, start, stop and other arguments of `cat_file`.
    """
    if not filesystem.async_impl:
        paths, starts, stops, _ = map(list, zip(*calls, strict=True))
        return cast(list[Any], filesystem.cat_ranges(paths, starts, stops, on_error="return"))
    from fsspec.asyn import sync

    async def together() -> Any:
        reads = (filesystem._cat_file(path, start=start, end=stop, **more) for path, start, stop, more in calls)
        return await asyncio.gather(*reads, return_exceptions=True)

    return cast(list[Any], sync(filesystem.loop, together))
