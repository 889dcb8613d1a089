"""One shard that is read from its start: its bytes, decompressed, and the samples that webdataset makes of them."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import io
import logging
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from webdataset.filters import reraise_exception

from midepoch.adapters.webdataset.index import Keys
from midepoch.adapters.webdataset.pipeline import Pipeline, grouped
from midepoch.errors import SourceError
from midepoch.reading.tar import TarError, padded, walk

__all__ = ["ShardReader"]

_LOG = logging.getLogger("midepoch.webdataset")
_PIECE = 1 << 16  # bytes read at once
_BEGINNING = 64 << 10  # bytes of a shard that its mark covers at most


class _Pieces(io.RawIOBase):
    """A stream of bytes, in whatever pieces its `read` gives them."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


_COMPRESSED: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
)
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)


class _Bytes:
    """The decompressed bytes of a stream.

    Attributes:
        beginning: those of the first `_BEGINNING` bytes that have been read.
    """

    def __init__(self, stream: Any) -> None:
        self.beginning = bytearray()
        self._raw = stream

    @functools.cached_property
    def _file(self) -> Any:
        file = io.BufferedReader(_Pieces(self._raw), _PIECE)
        head = file.peek(6)
        return next((decompress(file) for magic, decompress in _COMPRESSED if head.startswith(magic)), file)

    def read(self, count: int) -> bytes:
        """Read `count` bytes, fewer at the end."""
        data: bytes = self._file.read(count)
        if len(self.beginning) < _BEGINNING:
            self.beginning += data[: _BEGINNING - len(self.beginning)]
        return data

    def skip(self, count: int) -> None:
        """Skip `count` bytes."""
        while count > 0:
            data = self.read(min(count, _PIECE))
            if not data:
                return
            count -= len(data)

    def close(self) -> None:
        # A pipe's process may fail because nobody reads on. That is not an error.
        with contextlib.suppress(OSError):
            self._raw.close()


def _mark_of(beginning: bytearray, keys: Keys) -> int:
    """A checksum of a shard's first sample, as far as `beginning` goes: of the names, sizes and contents of its files.

    Not of their times and owners: a pipe may write the archive anew each time.
    """
    file, mark, first = io.BytesIO(beginning), 0, None

    def skip(count: int) -> None:
        file.seek(count, io.SEEK_CUR)

    with contextlib.suppress(TarError):  # the beginning may end anywhere
        for member, _ in walk(file.read, skip, ""):
            prefix = keys.prefix(member.name)
            first = prefix if first is None else first
            if prefix != first:
                break
            mark = zlib.crc32(f"{member.name}/{member.size}/".encode("utf-8", "surrogateescape"), mark)
            mark = zlib.crc32(beginning[member.offset : member.offset + member.size], mark)
    return mark


class ShardReader:
    """Reads the samples of shards one after another, as webdataset makes them.

    Attributes:
        marks: by the number of the shard, for those of which a sample was read here.
    """

    def __init__(self, pipeline: Pipeline, keys: Keys) -> None:
        self._urls, self._opener, self._keys = pipeline.urls, pipeline.opener, keys
        self._handler = pipeline.reading.get("handler", reraise_exception)
        self._grouping = pipeline.grouping
        self.marks: dict[int, int] = {}

    def samples(self, number: int, offset: int, ordinal: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Offset, ordinal and content of each sample, starting at a byte where one begins."""
        url = self._urls[number]
        source = self._open(url)
        if source is None:
            _LOG.warning("%s cannot be opened: the shard is lost", url)
            return
        data = _Bytes(source["stream"])
        try:
            found = self._grouped(data, url, source.get("local_path"), offset, ordinal)
            first = next(found, None)
            if first is not None:
                self.marks[number] = _mark_of(data.beginning, self._keys)
                yield first
            yield from found
        finally:
            data.close()

    def _open(self, url: str) -> dict[str, Any] | None:
        assert self._opener is not None  # understand() has found one
        try:
            source: dict[str, Any] | None = next(iter(self._opener([{"url": url}])), None)
        except Exception as error:
            raise SourceError(f"{url} cannot be opened ({error}): restore it, or leave it out of the urls") from error
        return source

    def _grouped(
        self, data: _Bytes, url: str, local: str | None, offset: int, ordinal: int
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        files: list[tuple[str, bytes]] = []
        prefix: str | None = None
        begin = sound = offset
        usual = 0  # the largest number of files in a sample so far
        walker = None
        try:
            data.skip(offset)
            walker = walk(data.read, data.skip, url, offset)
            member, _ = next(walker)
            while True:
                content = self._content(data, url, sound, member.name, member.size)
                sound = member.offset + padded(member.size)
                chosen = self._keys.chosen(member.name)
                key = None if chosen is None else self._keys.keys(chosen)[0]
                if chosen is not None and key is not None:
                    if files and key != prefix:
                        yield from self._whole(files, url, local, begin, ordinal)
                        usual, files, ordinal = max(usual, len(files)), [], ordinal + 1
                    if not files:
                        begin, prefix = member.header, key
                    files.append((chosen, content))
                member, _ = walker.send(True)
        except StopIteration:
            pass
        except (TarError, *_BROKEN) as error:
            damage = error
            if not isinstance(error, TarError):
                damage = TarError(url, sound, f"{type(error).__name__}: {error}", True)
                damage.__cause__ = error
            self._handler(damage)  # raises, or accepts the loss
            # The last sample may lack files, unless no other sample has more.
            if not usual or len(files) < usual:
                files = []
            _LOG.warning("%s: %d samples are kept, the rest from byte %d on is lost", url, ordinal + bool(files), sound)
        finally:
            if walker is not None:
                walker.close()
        if files:
            yield from self._whole(files, url, local, begin, ordinal)

    @staticmethod
    def _content(data: _Bytes, url: str, sound: int, name: str, size: int) -> bytes:
        try:
            content = data.read(padded(size))
        except (OverflowError, MemoryError):
            content = b""  # a damaged header asks for more memory than there is; the file is not that long either
        if len(content) < size:
            raise TarError(url, sound, f"{name!r} needs {size} bytes, {len(content)} are left", True)
        return content[:size]

    def _whole(
        self, files: list[tuple[str, bytes]], url: str, local: str | None, begin: int, ordinal: int
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        # The same files give the same sample. So an ordinal is used up even if a handler drops the sample.
        for sample in grouped(files, url, local, self._grouping):
            yield begin, ordinal, sample
