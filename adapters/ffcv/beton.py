"""Checks of a .beton file before it is read: that it is complete, and that it is the expected one."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.adapters.ffcv.private import parts
from midepoch.errors import SourceError
from midepoch.reading.stored import MOST_STORED

__all__ = ["check_file", "describe", "pages_of", "stored"]

_SMALLEST_PAGE = 1 << 21  # bytes
_PROBES = 64  # places in the data that are compared
_PROBE = 4096  # bytes at each


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise SourceError unless the .beton file at `path` exists and is complete. The error says what is wrong.

    FFCV's Loader reads the file in its constructor, and its error for a truncated file does not say so. Pixels are not
    checked. Damaged JPEG data is found when it is decoded.
    """
    path = Path(path)
    private = parts()
    if not path.is_file():
        raise SourceError(f"{path} does not exist: give the path of a file written by ffcv.writer.DatasetWriter")
    size = path.stat().st_size
    if size < private.HeaderType.itemsize:
        raise SourceError(f"{path} has {size} bytes, less than a .beton file's header: copy or write it again")
    header = np.fromfile(path, dtype=private.HeaderType, count=1)[0]
    if header["version"] != 2:
        raise SourceError(
            f"{path} begins with format version {header['version']}, but FFCV reads version 2: it is not a .beton "
            "file, or its header is damaged; check the path, or copy or write the file again"
        )
    table = int(header["alloc_table_ptr"])
    if not 0 < table <= size:
        raise SourceError(
            f"{path} is cut off at byte {size}: its header says that a table begins at byte {table}; copy or write it "
            "again"
        )
    if header["num_samples"] > table:  # FFCV would allocate memory for all of them before it checks
        raise SourceError(
            f"{path}: its header says {header['num_samples']} samples, whose metadata would end beyond byte {table}, "
            "where the header says that a table begins; copy or write it again"
        )
    if header["page_size"] < _SMALLEST_PAGE or header["page_size"] & (header["page_size"] - np.uint32(1)):
        raise SourceError(
            f"{path}: its header says that pages have {header['page_size']} bytes, but FFCV's have a power of two of "
            f"at least {_SMALLEST_PAGE}: copy or write it again"
        )
    try:
        reader = private.Reader(str(path))
    except Exception as error:  # FFCV and NumPy raise various errors for data they cannot parse
        raise SourceError(f"{path} cannot be read ({type(error).__name__}: {error}): write it again") from error
    check_tables(reader)


def check_tables(reader: Any) -> None:
    """Raise SourceError unless all that a file's tables point to lies within it. Takes 0.2 s for a million samples."""
    path, size = reader.file_name, Path(reader.file_name).stat().st_size
    table, entries = int(reader.header["alloc_table_ptr"]), reader.alloc_table
    if len(reader.metadata) != reader.num_samples:
        raise SourceError(
            f"{path} is cut off at byte {size}: it has the metadata of {len(reader.metadata)} of {reader.num_samples} "
            "samples; copy or write it again"
        )
    if (size - table) % parts().ALLOC_TABLE_TYPE.itemsize or size - table != entries.nbytes:
        raise SourceError(
            f"{path} is cut off at byte {size}, in the middle of an entry of the table that begins at byte {table}; "
            "copy or write it again"
        )
    # Compare by subtraction: with damaged entries, the sum may exceed 64 bits.
    beyond = np.flatnonzero((entries["ptr"] > table) | (entries["size"] > table - np.minimum(entries["ptr"], table)))
    if len(beyond):
        sample, first, length = map(int, entries[beyond[0]])
        raise SourceError(
            f"{path}: the tables say that the data of sample {sample} ends at byte {first + length}, "
            f"but the data ends at byte {table}; write the file again"
        )
    # FFCV copies as many bytes as an entry says, whatever room there is, and reads the pages of the sample that the
    # entry names.
    samples = np.arange(reader.num_samples, dtype=np.uint64)
    for name, pointers, sizes in _data(reader):
        known, wanted = [entries["sample_id"], entries["ptr"]], [samples, pointers]
        if sizes is not None:
            known.append(entries["size"])
            wanted.append(sizes)
        missing = np.flatnonzero(~np.isin(_hash_rows(wanted), _hash_rows(known)))
        if len(missing):
            raise SourceError(
                f"{path} is damaged: the data of field {name!r} of sample {missing[0]} ({len(missing)} samples in all) "
                f"has no entry in the table at byte {table}; copy or write it again"
            )
    if (entries["sample_id"] >= reader.num_samples).any():
        raise SourceError(
            f"{path} is damaged: the table at byte {table} has data of samples beyond the last of "
            f"{reader.num_samples}; copy or write it again"
        )


def _hash_rows(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    """A hash of each row. Damage need not be detected with more than 64 bits."""
    mixed = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _data(reader: Any) -> list[tuple[str, npt.NDArray[Any], npt.NDArray[Any] | None]]:
    """For each field whose data lies outside the metadata: where each sample's data begins, and its number of bytes."""
    private = parts()
    found: list[tuple[str, npt.NDArray[Any], npt.NDArray[Any] | None]] = []
    for number, (name, field) in enumerate(reader.handlers.items()):
        column = reader.metadata[f"f{number}"]
        if isinstance(field, private.RGBImageField):
            found.append((name, column["data_ptr"], None))  # midepoch's kernels check the length when they decode
        elif isinstance(field, private.BytesField):
            found.append((name, column["ptr"], column["size"]))
        elif isinstance(field, private.NDArrayField):
            found.append((name, column, np.full(len(column), field.element_size, dtype=np.uint64)))
    return found


def describe(reader: Any) -> str:
    """The number of samples, and a CRC-32 of all tables and of 64 places in the data.

    It identifies a file independently of name and date. Two files have the same only if they agree in every length,
    offset and scalar, and in the bytes at the 64 places.
    """
    crc = 0
    for part in (reader.header, reader.field_descriptors, reader.metadata, reader.alloc_table):
        crc = zlib.crc32(np.ascontiguousarray(part).tobytes(), crc)
    entries = reader.alloc_table
    places = np.sort(entries["ptr"])[np.linspace(0, len(entries) - 1, min(_PROBES, len(entries)), dtype=np.int64)]
    try:
        with Path(reader.file_name).open("rb", buffering=_PROBE) as file:
            for place in places.tolist():
                file.seek(place)
                crc = zlib.crc32(file.read(_PROBE), crc)
    except OSError as error:
        raise SourceError(f"{reader.file_name} could not be read ({error}): check the disk or network") from error
    return f"{reader.num_samples}:{crc:08x}"


def stored(reader: Any, sample: int) -> bytes:
    """A sample's bytes as they are in the file: its metadata and the beginning of its data."""
    entries = reader.alloc_table
    own = entries[entries["sample_id"] == sample]
    pieces, left = [reader.metadata[sample].tobytes()], MOST_STORED
    with Path(reader.file_name).open("rb", buffering=0) as file:
        for place, size in zip(own["ptr"].tolist(), own["size"].tolist(), strict=True):
            file.seek(place)
            pieces.append(file.read(min(size, left)))
            left -= min(size, left)
    return b"".join(pieces)


def pages_of(reader: Any) -> npt.NDArray[np.int64]:
    """The page with the data of each sample. FFCV's writer never splits a sample over two pages."""
    entries = reader.alloc_table
    pages = np.full(reader.num_samples, -1, dtype=np.int64)
    pages[entries["sample_id"].astype(np.int64)] = entries["ptr"] // np.uint64(reader.page_size)
    return pages
