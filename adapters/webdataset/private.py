"""The parts of webdataset and fsspec that midepoch uses and they do not promise. webdataset is checked on import.

webdataset makes each stage of a pipeline from a function with a private name, and only this name identifies the stage.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from midepoch.packages import Package

__all__ = ["BATCHED", "INFO", "SAMPLEWISE", "SHUFFLE", "UNBATCH", "cat_ranges", "path_of"]

_WEBDATASET = Package("webdataset", ("webdataset",), ("1.0", "1.0"))
_WEBDATASET.check_age("1.0")  # before, pipelines consisted of other parts


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
INFO = _filter("_info")
SHUFFLE = _filter("_shuffle")
UNBATCH = (_filter("_unbatched"), _filter("_unlisted"))


def path_of(filesystem: Any, url: str) -> Any:
    """A url in the form that an fsspec file system takes."""
    return filesystem._strip_protocol(url)


def cat_ranges(filesystem: Any, calls: list[tuple[Any, ...]]) -> list[list[Any]]:
    """Make several calls of ``cat_ranges`` of an asynchronous file system at once, and return their results.

    Args:
        filesystem: fsspec's.
        calls: for each call, paths, starts, stops and a dict of other arguments.
    """
    from fsspec.asyn import sync

    async def together() -> Any:
        return await asyncio.gather(
            *(filesystem._cat_ranges(*call[:3], on_error="return", **call[3]) for call in calls)
        )

    return cast(list[list[Any]], sync(filesystem.loop, together))
