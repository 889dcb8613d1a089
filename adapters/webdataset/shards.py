"""Where shards are: local files, and objects on a server that answers requests for byte ranges."""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlparse
from urllib.request import url2pathname

from midepoch.adapters.webdataset import private
from midepoch.errors import SourceError
from midepoch.reading.tar import compression

__all__ = ["RangeReader", "Shard", "local_path", "locate", "open_shard", "quick_identity"]

_OPEN_FILES = 128  # at a time in one process; the usual limit is 1024


class Shard(NamedTuple):
    """One shard, and what shows that it has not changed.

    Attributes:
        url: as the user wrote it.
        path: of the local file; empty for a remote shard.
        size: bytes.
        stamp: modification time or etag; empty if the server gives none.
    """

    url: str
    path: str
    size: int
    stamp: str


def local_path(url: str) -> str | None:
    """The path of a local file, as webdataset reads urls; None for anything else."""
    parsed = urlparse(url)
    if parsed.scheme == "file":
        return url2pathname(parsed.path)
    return url if parsed.scheme == "" else None


def locate(url: str) -> Shard | str:
    """The shard, or the reason why it can only be streamed.

    Raises:
        OSError: it is local and cannot be read, or it is remote and does not answer now.
    """
    path = local_path(url)
    if path is None:
        return _locate_remote(url)
    with Path(path).open("rb") as file:
        state = os.fstat(file.fileno())
        if not file.seekable():
            return f"{url} is not seekable"
        if compression(file.read(6)):
            return f"{url} is compressed"
    return Shard(url, path, state.st_size, str(state.st_mtime_ns))


def quick_identity(url: str) -> str:
    """A quick identity of a local file, without reading all of it; empty for anything else.

    It consists of the size and the first and last bytes. Compressed files end in a checksum of their content.

    Raises:
        SourceError: it exists and cannot be read. To ignore that would change the fingerprint of the shards.
    """
    path = local_path(url)
    try:
        if path is None or not Path(path).is_file():
            return ""
        with Path(path).open("rb") as file:
            first = file.read(_QUICK_BYTES)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _QUICK_BYTES))
            return f"{size}:{zlib.crc32(file.read(), zlib.crc32(first)):08x}"
    except OSError as error:
        raise SourceError(f"{url} could not be read ({error}): check its disk, or leave it out") from error


_QUICK_BYTES = 512  # bytes


def _locate_remote(url: str) -> Shard | str:
    scheme = urlparse(url).scheme
    if scheme == "pipe":
        return "a pipe can only be read from its start"
    try:
        filesystem, path = _filesystem(url)
        info = filesystem.info(path)
        beginning = filesystem.cat_file(path, start=0, end=512)
    except ImportError as error:
        return f"reading parts of {scheme}: urls needs more packages ({error}): pip install 'midepoch[webdataset]'"
    except (ValueError, NotImplementedError) as error:
        return f"{url} cannot be read in parts ({error})"
    except Exception as error:
        # Streaming has another order. A temporary failure must not lead to it, perhaps on one rank only.
        if _may_pass(error):
            raise OSError(f"{type(error).__name__}: {error}") from error
        if not isinstance(error, OSError):
            raise
        return f"{url} could not be read in parts ({type(error).__name__}: {error})"
    size = info.get("size")
    if type(size) is not int or len(beginning) != min(512, size):
        return f"the server of {url} does not serve byte ranges"
    if compression(beginning):
        return f"{url} is compressed"
    stamp = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
    return Shard(url, "", size, stamp)


def _may_pass(error: BaseException) -> bool:
    """Whether an error may be temporary: a broken connection, or a server's fault, not the object's."""
    each: BaseException | None = error
    while each is not None:
        status = getattr(each, "status", None)
        if isinstance(status, int):
            return status >= 500 or status in (408, 425, 429)
        if isinstance(each, ConnectionError | TimeoutError) or type(each).__module__.startswith("aiohttp."):
            return True
        each = each.__cause__
    return False


# What fsspec's file systems call an object's identity, the most reliable first.
_STAMPS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "Last-Modified", "last_modified", "mtime")


def open_shard(shard: Shard) -> BinaryIO:
    """The shard as a seekable file."""
    if shard.path:
        return Path(shard.path).open("rb")
    filesystem, path = _filesystem(shard.url)
    # Headers of small files are close together, so reading ahead fetches several at once.
    file: BinaryIO = filesystem.open(path, "rb", block_size=1 << 20, cache_type="readahead", size=shard.size)
    return file


def _filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system for a url, and the path in it. Not cached, because a forked process gets its own.

    Raises:
        ImportError: fsspec, or a package it needs for such urls, is not installed.
        ValueError: fsspec has none for such urls.
    """
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(url)
    _kept[id(filesystem)] = filesystem
    return filesystem, path


def _condition(filesystem: Any, shard: Shard) -> dict[str, Any]:
    """The argument of fsspec's HTTP file system that ties a read to the shard's etag. The user's own headers are kept.

    Weak etags do not begin with a quote. They can be equal for different bytes, so they do not qualify (RFC 9110,
    13.1.1).
    """
    if urlparse(shard.url).scheme not in ("http", "https") or not shard.stamp.startswith('"'):
        return {}
    return {"headers": {**filesystem.kwargs.get("headers", {}), "If-Match": shard.stamp}}


# A forked process gets copies of its parent's file systems. If fsspec dropped one, it would close its connections. That
# would remove the sockets from the epoll instance, which is still shared with the parent, and the parent would wait
# forever. Therefore file systems that were used here are never dropped.
_kept: dict[int, Any] = {}


def _pread(file: int, count: int, start: int) -> bytes:
    """Read `count` bytes, fewer only at the file's end. One system call may return fewer, and 2 GiB at most."""
    data = os.pread(file, count, start)
    while len(data) < count and (more := os.pread(file, count - len(data), start + len(data))):
        data += more
    return data


class RangeReader:
    """Reads byte ranges of shards in one process. A copy in another process opens its own files.

    Args:
        shards: the shards to read, by number.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._files: OrderedDict[int, int] = OrderedDict()

    def reads(self, ranges: Sequence[tuple[int, int, int]]) -> list[Callable[[], bytes]]:
        """For each range (a shard's number, a first byte, a length) a function that returns its bytes.

        Remote ranges are fetched here, all at once. Local ones are read when they are asked for.

        Raises:
            SourceError: a shard has changed since it was indexed, or cannot be read.
        """
        remote = [each for each in ranges if not self._shards[each[0]].path]
        fetched = iter(self._read_remote(remote) if remote else ())
        return [
            partial(self._read_local, *each)
            if self._shards[each[0]].path
            else partial(self._whole, next(fetched), *each)
            for each in ranges
        ]

    def _whole(self, data: bytes, number: int, start: int, length: int) -> bytes:
        if len(data) != length:
            raise SourceError(
                f"{self._shards[number].url} gave {len(data)} of {length} bytes from byte {start} on: it has changed "
                "since it was indexed; wrap the pipeline again"
            )
        return data

    def _read_local(self, number: int, start: int, length: int) -> bytes:
        file = self._files.get(number)
        if file is None:
            file = self._open(number)
        try:
            data = _pread(file, length, start)
        except OSError as error:
            raise SourceError(
                f"{self._shards[number].url} could not be read at byte {start} ({error}): check its disk, then "
                "continue: the next batch is this one again"
            ) from error
        state, shard = os.fstat(file), self._shards[number]
        if (state.st_size, str(state.st_mtime_ns)) != (shard.size, shard.stamp):
            raise SourceError(
                f"{shard.url} has changed since it was indexed ({shard.size} bytes then, {state.st_size} now, or "
                "another modification time): wrap the pipeline again"
            )
        return self._whole(data, number, start, length)

    def _open(self, number: int) -> int:
        shard = self._shards[number]
        try:
            file = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{shard.url} cannot be opened ({error}): restore it, or wrap without it") from error
        self._files[number] = file
        if len(self._files) > _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return file

    def _read_remote(self, ranges: list[tuple[int, int, int]]) -> list[bytes]:
        filesystem, _ = _filesystem(self._shards[ranges[0][0]].url)
        calls = []
        for number, start, length in ranges:
            shard = self._shards[number]
            path = private.path_of(filesystem, shard.url)
            calls.append((path, start, start + length, _condition(filesystem, shard)))
        answers = private.cat_files(filesystem, calls)
        for answer, (number, start, _) in zip(answers, ranges, strict=True):
            if not isinstance(answer, BaseException):
                continue
            url = self._shards[number].url
            if getattr(answer, "status", None) == HTTPStatus.PRECONDITION_FAILED:
                raise SourceError(f"{url} has changed since it was indexed: wrap the pipeline again") from answer
            raise SourceError(
                f"{url} could not be read at byte {start} ({type(answer).__name__}: {answer}): if it has changed, wrap "
                "the pipeline again"
            ) from answer
        return answers

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close the files of this process. At the interpreter's end `os` has gone before, so its function is kept."""
        while self._files:
            close(self._files.popitem()[1])

    __del__ = close  # a forked process has descriptors of its own

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}
