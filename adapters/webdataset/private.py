"""Private parts of webdataset and fsspec that midepoch uses. webdataset is checked on import.

webdataset makes each stage of a pipeline of a function with a private name, and only by these can a stage be told.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from midepoch.packages import Package

__all__ = ["BATCHED", "INFO", "SAMPLEWISE", "SHUFFLE", "UNBATCH", "cat_ranges", "path_of"]

_WEBDATASET = Package("webdataset", ("webdataset",), ("1.0", "1.0"))


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
    """A url as a file system of fsspec's takes it."""
    return filesystem._strip_protocol(url)


def cat_ranges(filesystem: Any, calls: list[tuple[Any, ...]]) -> list[list[Any]]:
    """The answers to each call of ``cat_ranges`` of an asynchronous file system, which all run at once.

    Args:
        filesystem: fsspec's.
        calls: for each, paths, starts, stops and a dict of more arguments.
    """
    from fsspec.asyn import sync

    async def together() -> Any:
        return await asyncio.gather(
            *(filesystem._cat_ranges(*call[:3], on_error="return", **call[3]) for call in calls)
        )

    return cast(list[list[Any]], sync(filesystem.loop, together))
