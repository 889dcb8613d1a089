"""Where each file lies in an uncompressed tar archive, found without reading the files.

The headers are found by a vectorised scan for their magic and proven to be the whole chain of headers; where they are
not (an archive inside an archive, sizes that a header cannot hold), they are walked one by one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import SourceError

__all__ = ["TarIndex", "index_tar", "split_name"]

_BLOCK = 512
_MAGIC = b"ustar"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_FILES = b"0\x007"  # regular, regular in old archives, contiguous
_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"xgLK"
_LARGEST_EXTENSION = 1 << 20  # bytes of a PAX or GNU header; beyond it is garbage

_Integers = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TarIndex:
    """The regular files of one archive, in its order.

    Attributes:
        path: of the archive.
        names: of the files, one for each.
        headers: where a reader has to start for that file: at its first header, be it a PAX or GNU one. Bytes, int64.
        offsets: where its content starts. Bytes, int64.
        sizes: of its content. Bytes, int64.
    """

    path: str
    names: list[str]
    headers: _Integers
    offsets: _Integers
    sizes: _Integers

    def __len__(self) -> int:
        return len(self.names)

    @property
    def crc(self) -> str:
        """Eight hexadecimal digits of names and places: archives with the same files in the same order share them."""
        crc = zlib.crc32("\0".join(self.names).encode("utf-8", "surrogateescape"))
        for numbers in (self.offsets, self.sizes):
            crc = zlib.crc32(numbers.astype("<i8").tobytes(), crc)
        return f"{crc:08x}"


def split_name(name: str) -> tuple[str, str]:
    """(key of the sample, extension) as WebDataset has them: cut at the first dot of the last part of the path."""
    folder, slash, base = name.rpartition("/")
    key, _, extension = base.partition(".")
    return folder + slash + key, extension


def index_tar(path: str | PathLike[str]) -> TarIndex:
    """Index the archive at `path`, an uncompressed tar in ustar, PAX or GNU format.

    Raises:
        SourceError: it is compressed, damaged or cut off; the message names the archive and the offset.
        OSError: it cannot be opened.
    """
    name = fspath(path)
    if not Path(name).stat().st_size:
        raise SourceError(f"{name} is empty, which no tar archive is: write it again")
    data = np.memmap(name, np.uint8, "r").view(np.ndarray)
    start = data[:8].tobytes()
    for magic, kind in _COMPRESSED.items():
        if start.startswith(magic):
            raise SourceError(f"{name} is compressed ({kind}), so its files have no offsets: decompress it once")
    return _Archive(name, data).index()


class _Archive:
    def __init__(self, name: str, data: _Bytes) -> None:
        self._name = name
        self._data = data

    def index(self) -> TarIndex:
        chain = self._scan()
        names: list[str] = []
        places: list[tuple[int, int, int]] = []
        first: int | None = None  # header of the extensions that belong to the file to come
        renamed: str | None = None
        resized: int | None = None
        everywhere: dict[str, str] = {}
        for offset, size, kind in self._walk() if chain is None else chain:
            if kind in (_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK):
                first = offset if first is None else first
                content = self._extension(offset, size)
                if kind == _GNU_NAME:
                    renamed = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
                elif kind == _PAX_GLOBAL:
                    everywhere |= self._records(offset, content)
                elif kind == _PAX:
                    records = self._records(offset, content)
                    renamed = records.get("path", renamed)
                    resized = int(records["size"]) if "size" in records else resized
                continue
            if kind in _FILES:
                names.append(renamed or everywhere.get("path") or self._own_name(offset))
                header = offset if first is None else first
                places.append((header, offset + _BLOCK, size if resized is None else resized))
            first = renamed = resized = None
        table = np.array(places, dtype=np.int64).reshape(len(places), 3)
        return TarIndex(self._name, names, table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())

    def _scan(self) -> list[tuple[int, int, int]] | None:
        """(offset, size, type flag) of all headers, or None where they have to be walked."""
        count = len(self._data) // _BLOCK
        blocks = self._data[: count * _BLOCK].reshape(count, _BLOCK)
        found = np.flatnonzero(blocks[:, 257] == _MAGIC[0])
        for place in range(1, len(_MAGIC)):
            found = found[blocks[found, 257 + place] == _MAGIC[place]]
        if not len(found) or found[0] != 0:
            return None
        digits = blocks[found, 124:135].astype(np.int64) - ord("0")
        if ((digits < 0) | (digits > 7)).any():
            return None  # padded with spaces, or a number in base 256
        sizes = digits @ (8 ** np.arange(10, -1, -1, dtype=np.int64))
        following = found + 1 + (sizes + _BLOCK - 1) // _BLOCK
        kinds = blocks[found, 156]
        chained = (following[:-1] == found[1:]).all() and following[-1] <= count
        if not chained or not self._ends(int(following[-1])) or not self._sums_hold(blocks, found):
            return None
        if (kinds == _PAX).any() and self._resizes(found[kinds == _PAX], sizes[kinds == _PAX]):
            return None
        return list(zip((found * _BLOCK).tolist(), sizes.tolist(), kinds.tolist(), strict=True))

    def _ends(self, block: int) -> bool:
        """Nothing but the end of the archive is there."""
        return not self._data[block * _BLOCK : (block + 1) * _BLOCK].any()

    @staticmethod
    def _sums_hold(blocks: _Bytes, found: _Integers) -> bool:
        for start in range(0, len(found), 4096):
            headers = blocks[found[start : start + 4096]]
            sums = headers.sum(1, dtype=np.int64) - headers[:, 148:156].sum(1, dtype=np.int64) + 8 * ord(" ")
            if any(_octal(stated.tobytes()) != real for stated, real in zip(headers[:, 148:156], sums, strict=True)):
                return False
        return True

    def _resizes(self, found: _Integers, sizes: _Integers) -> bool:
        """A PAX header states a size, so the one in the header that follows may be another."""
        return any(
            " size=" in self._data[offset + _BLOCK : offset + _BLOCK + size].tobytes().decode("utf-8", "replace")
            for offset, size in zip((found * _BLOCK).tolist(), sizes.tolist(), strict=True)
        )

    def _walk(self) -> Iterator[tuple[int, int, int]]:
        offset, stated, length = 0, None, len(self._data)
        while offset < length:
            header = self._data[offset : offset + _BLOCK].tobytes()
            if len(header) < _BLOCK:
                raise self._error(offset, "the archive is cut off in a header")
            if not any(header):
                return
            if _octal(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
                raise self._error(offset, "there is no header, or a damaged one")
            size, kind = _number(header[124:136]), header[156]
            if size is None:
                raise self._error(offset, "the header states no size")
            yield offset, size, kind
            if kind == _PAX:
                records = self._records(offset, self._extension(offset, size))
                stated = int(records["size"]) if "size" in records else None
            elif kind not in (_PAX_GLOBAL, _GNU_NAME, _GNU_LINK):
                size, stated = size if stated is None else stated, None
                # Links and folders have no content, whatever size they state.
                size = 0 if kind in b"123456" else size
            if offset + _BLOCK + size > length:
                raise self._error(offset, f"a member of {size} bytes ends beyond the archive's {length}: it is cut off")
            offset += _BLOCK + -(-size // _BLOCK) * _BLOCK

    def _extension(self, offset: int, size: int) -> bytes:
        content = self._data[offset + _BLOCK : offset + _BLOCK + size].tobytes()
        if size > _LARGEST_EXTENSION or len(content) < size:
            raise self._error(offset, f"an extended header of {size} bytes is cut off or damaged")
        return content

    def _records(self, offset: int, content: bytes) -> dict[str, str]:
        """The ``length key=value\\n`` records of a PAX header."""
        records, start = {}, 0
        while start < len(content):
            digits, _, _ = content[start : start + 20].partition(b" ")
            length = int(digits) if digits.isdigit() else 0
            record = content[start + len(digits) + 1 : start + length - 1]
            key, equals, value = record.partition(b"=")
            if not equals or content[start + length - 1 : start + length] != b"\n":
                raise self._error(offset, "an extended header is damaged")
            records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
            start += length
        if not records.get("size", "0").isdigit():
            raise self._error(offset, "an extended header is damaged")
        return records

    def _own_name(self, offset: int) -> str:
        header = self._data[offset : offset + _BLOCK].tobytes()
        name = header[:100].partition(b"\0")[0]
        prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
        return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")

    def _error(self, offset: int, what: str) -> SourceError:
        return SourceError(f"{self._name}, offset {offset}: {what}; write the archive again")


def _octal(field: bytes) -> int | None:
    digits = field.partition(b"\0")[0].strip()
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        return None


def _number(field: bytes) -> int | None:
    """A size: octal digits, or, after a byte of 128, base 256."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    value: Any = _octal(field)
    return None if value is None or value < 0 else int(value)
