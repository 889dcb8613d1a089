"""Uncompressed tar archives: an index of their members, and a reader for archives that are not seekable.

Damage is never ignored. A truncated member, a corrupt header and a missing end-of-archive marker each give a `TarError`
that names the archive and the byte.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import SourceError

__all__ = ["Member", "TarError", "TarIndex", "compression", "index_tar", "parse_members", "walk"]

BLOCK = 512
_REST = 1 << 16  # bytes compared at once after the end marker

_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
# Links, devices, folders and pipes have no data, whatever their size field says.
_WITHOUT_DATA = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)
_LONG_NAME, _PAX, _PAX_SOLARIS = tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE
_LONGEST_NAME = 1 << 13  # bytes; twice Linux's limit for a path. An index uses the longest name's length for each name
_LARGEST_EXTENSION = 1 << 20  # bytes of an extended header; a larger one is damage, not a name


class TarError(SourceError):
    """An archive is damaged.

    Attributes:
        archive: its name.
        offset: the byte from which it cannot be read. Everything before is intact.
        truncated: whether it ends too early, as opposed to containing invalid data.
    """

    def __init__(self, archive: str, offset: int, what: str, truncated: bool = False) -> None:
        super().__init__(
            f"{archive} is damaged at byte {offset}: {what}; write the archive again, leave it out, or pass an error "
            "handler that continues, where the loader takes one"
        )
        self.archive, self.offset, self.what, self.truncated = archive, offset, what, truncated

    def __reduce__(self) -> tuple[type[TarError], tuple[Any, ...]]:
        return TarError, (self.archive, self.offset, self.what, self.truncated)


class Member(NamedTuple):
    """A regular file in an archive.

    Attributes:
        header: the byte at which it begins, including its extended headers.
        offset: the byte at which its data begins.
        size: number of bytes of data.
        name: as stored in the archive.
    """

    header: int
    offset: int
    size: int
    name: str


class TarIndex(NamedTuple):
    """The regular files of an archive, in its order, as four arrays of equal length.

    Attributes:
        headers, offsets, sizes: int64, as in `Member`.
        names: bytes, of numpy's type S.
        end: the byte at which the archive's last member ends.
        checksum: CRC-32 of the headers. It differs between archives with other files or other times.
        damage: what ended the archive early, or None.
    """

    headers: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    names: npt.NDArray[np.bytes_]
    end: int
    checksum: int
    damage: TarError | None


def index_tar(archive: str | os.PathLike[str] | BinaryIO, name: str | None = None) -> TarIndex:
    """Find the regular files of an archive.

    Args:
        archive: a path, or an open seekable file. Each header leads to the next, so of the data nothing is read.
        name: of the archive, for errors; None for its path.

    Raises:
        OSError: it cannot be read. Damage is not raised, but reported in `TarIndex.damage`.
    """
    if isinstance(archive, str | os.PathLike):
        name = name or os.fspath(archive)
        with Path(archive).open("rb") as file:
            return _collect(file, name)
    return _collect(archive, name or str(getattr(archive, "name", "the archive")))


def compression(beginning: bytes) -> str | None:
    """The compression of a file, from its first six bytes; None if it is not one of the known kinds."""
    return next((name for magic, name in _COMPRESSED.items() if beginning.startswith(magic)), None)


_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def padded(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


# --- one header -------------------------------------------------------------------------------------------------------


_ADLER = 65521  # what Adler-32 counts up to


class _Header(NamedTuple):
    name: bytes
    size: int  # of the data after it
    kind: bytes

    @property
    def is_file(self) -> bool:
        """Whether its data is a regular file's. A folder has a slash in an old archive, and a kind of its own since."""
        return self.kind in _REGULAR and not (self.kind == tarfile.AREGTYPE and self.name.endswith(b"/"))


def _parse_header(block: bytes) -> _Header | None:
    """Parse a header. None for a block of zeros, which is the end marker. Raises ValueError if it is not a header."""
    if not block[0] and block.count(0) == BLOCK:
        return None
    # The lower half of an Adler-32 is one more than the sum of the bytes, in a tenth of the time that `sum` takes.
    stated = block[148:156]
    if (_number(stated) - 256 + sum(stated) - (zlib.adler32(block) & 0xFFFF) + 1) % _ADLER:
        raise ValueError("a header's checksum is wrong")
    kind = block[156:157]
    size = 0 if kind in _WITHOUT_DATA else _number(block[124:136])
    if size < 0:
        raise ValueError("a header's size is negative")
    name = block[:100].partition(b"\0")[0]
    if block[345] and kind not in tarfile.GNU_TYPES:  # as tarfile does it, whatever the format
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    if kind == tarfile.GNUTYPE_SPARSE:
        raise ValueError(f"{name!r} is stored as a sparse file")
    return _Header(name, size, kind)


def _number(field: bytes) -> int:
    if field[0] in (0o200, 0o377):
        value = int.from_bytes(field[1:], "big")
        return value - (256 ** (len(field) - 1)) if field[0] == 0o377 else value
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        raise ValueError(f"a header holds {field!r} where a number should be") from None


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    records, place = {}, 0
    while place < len(data) and data[place]:
        length, space, _ = data[place : place + 20].partition(b" ")
        if not (space and length.isdigit() and len(length) + 1 < int(length) <= len(data) - place):
            raise ValueError("an extended header cannot be parsed")
        keyword, _, value = data[place + len(length) + 1 : place + int(length) - 1].partition(b"=")
        records[keyword] = value
        place += int(length)
    return records


class _Pending:
    """What extended headers say about the file that follows. Of several, the first counts, as in tarfile."""

    def __init__(self) -> None:
        self.of_one = False  # True if one is about the next file; global ones may also end an archive
        self.name: bytes | None = None
        self.size: int | None = None

    def add(self, kind: bytes, blocks: bytes, size: int) -> None:
        """Add an extended header of `size` bytes, padded to whole blocks, which tarfile reads in full."""
        self.of_one |= kind != tarfile.XGLTYPE
        first_name, first_size = self.name, self.size
        if kind == _LONG_NAME:
            self.name = blocks.partition(b"\0")[0]
        elif kind != tarfile.GNUTYPE_LONGLINK and any(word in blocks for word in (b"path=", b"size=", b"GNU.sparse")):
            records = _pax_records(blocks[:size])
            if kind == tarfile.XGLTYPE and (b"path" in records or b"size" in records):
                raise ValueError("a header sets the name or the size of all files that follow")
            if any(keyword.startswith(b"GNU.sparse") for keyword in records):
                raise ValueError("a file is stored as a sparse file")
            if b"path" in records:
                if b"\0" in records[b"path"]:
                    raise ValueError("an extended header holds a name with a zero byte")
                self.name = records[b"path"].rstrip(b"/")
            if b"size" in records:
                if not records[b"size"].isdigit():
                    raise ValueError(f"an extended header holds {records[b'size'][:20]!r} where a size should be")
                self.size = int(records[b"size"])
        self.name = self.name if first_name is None else first_name
        self.size = self.size if first_size is None else first_size
        if self.name is not None and len(self.name) > _LONGEST_NAME:
            raise ValueError(f"a name is longer than {_LONGEST_NAME} bytes")

    def applied(self, header: _Header) -> tuple[bytes, int]:
        """The name and the size of the file with this header."""
        return header.name if self.name is None else self.name, header.size if self.size is None else self.size


_EXTENSIONS = (_LONG_NAME, tarfile.GNUTYPE_LONGLINK, _PAX, _PAX_SOLARIS, tarfile.XGLTYPE)


# --- walking from header to header ------------------------------------------------------------------------------------


def walk(
    read: Callable[[int], bytes], skip: Callable[[int], None], archive: str, start: int = 0
) -> Generator[tuple[Member, bytes], bool | None, None]:
    """Yield the regular files of an archive with their header blocks, starting at the beginning of a member.

    After each, `skip` is called for the data. If the caller has already read all of it, including the padding, it must
    send True.

    Args:
        read: returns bytes from the current offset, fewer at the end.
        skip: advances the current offset.
        archive: its name, for errors.
        start: the current offset.

    Raises:
        TarError: the archive is damaged.
    """
    place, pending = start, None
    sound = start  # where the last complete member ended

    def damage(what: str, truncated: bool = False) -> TarError:
        return TarError(archive, sound, what, truncated)

    while True:
        block = read(BLOCK)
        if len(block) < BLOCK:
            if block or pending is not None:
                raise damage("it ends inside a header", True)
            raise damage("it ends without an end-of-archive marker, so its rest may be missing", True)
        try:
            header = _parse_header(block)
        except ValueError as error:
            raise damage(str(error)) from None
        if header is None:
            if any(block.strip(b"\0") for block in iter(lambda: read(_REST), b"")):
                raise damage("a block of zeros, which ends an archive, comes before more data")
            if pending is not None and pending.of_one:
                raise damage("it ends after an extended header, so the file that this belongs to is missing", True)
            return
        place += BLOCK
        if header.kind in _EXTENSIONS:
            if header.size > _LARGEST_EXTENSION:
                raise damage(f"an extended header is larger than {_LARGEST_EXTENSION} bytes")
            data = read(padded(header.size))
            if len(data) < padded(header.size):
                raise damage("it ends inside a header", True)
            place += len(data)
            pending = pending or _Pending()
            try:
                pending.add(header.kind, data, header.size)
            except ValueError as error:
                raise damage(str(error)) from None
            continue
        name, size = header.name, header.size
        if pending is not None:
            name, size = pending.applied(header)
        taken = None
        if header.is_file:
            taken = yield Member(sound, place, size, name.decode("utf-8", "surrogateescape")), block
        if not taken:
            skip(padded(size))
        place += padded(size)
        sound, pending = place, None


def parse_members(data: bytes, archive: str, start: int) -> list[tuple[str, bytes]]:
    """The names and contents of the regular files in a byte range that begins and ends with complete members.

    Args:
        data: all bytes of the range. Its last member need not be padded.
        archive: its name, for errors.
        start: the byte of the archive at which the range begins, for errors.

    Raises:
        TarError: it is not such a range.
    """
    found: list[tuple[str, bytes]] = []
    place, end, pending, length = 0, 0, None, len(data)
    while place < length:
        try:
            block = data[place : place + BLOCK]
            header = _parse_header(block) if len(block) == BLOCK else None
            if header is None:
                raise ValueError("no header where the index has one")
            name, size, kind = header
            place += BLOCK
            if kind in _EXTENSIONS:
                pending = pending or _Pending()
                pending.add(kind, data[place : place + padded(size)], size)
                place += padded(size)
                continue
        except ValueError as error:
            raise TarError(archive, start + place, str(error)) from None
        if pending is not None:
            (name, size), pending = pending.applied(header), None
        if header.is_file:
            if place + size > length:
                raise TarError(archive, start + place, "a file ends beyond where the index has it")
            found.append((name.decode("utf-8", "surrogateescape"), data[place : place + size]))
        end = place + size
        place += padded(size)
    if length not in (end, place):
        raise TarError(archive, start + end, "a file ends before where the index has it")
    return found


def _collect(file: BinaryIO, name: str) -> TarIndex:
    """Index by walking from header to header, which works for any seekable archive."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    members: list[Member] = []
    checksum, damage, end = 0, None, 0

    def skip(count: int) -> None:
        file.seek(min(count, length), os.SEEK_CUR)  # beyond the end suffices; systems refuse huge offsets

    walker = walk(file.read, skip, name)
    try:
        for member, block in walker:
            stop = member.offset + member.size
            if stop > length:
                damage = TarError(
                    name, end, f"{member.name!r} needs {member.size} bytes, {length - member.offset} are left", True
                )
                break
            members.append(member)
            checksum = zlib.crc32(block[:156], checksum)
            end = member.offset + padded(member.size)
    except TarError as error:
        damage = error
    headers, offsets, sizes = (np.array([member[field] for member in members], dtype=np.int64) for field in range(3))
    names = np.array([member.name.encode("utf-8", "surrogateescape") for member in members], dtype=np.bytes_)
    return TarIndex(headers, offsets, sizes, names, end, checksum, damage)
