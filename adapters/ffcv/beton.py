"""What can be known of a .beton file before it is read: that it is whole, and which one it is."""

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

__all__ = ["check_file", "describe", "pages_of"]

_SMALLEST_PAGE = 1 << 21  # bytes
_PROBES = 64  # places in the data that are looked at
_PROBE = 4096  # bytes at each


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise SourceError unless the .beton file at `path` is there and whole; says what is wrong, and where.

    FFCV's Loader reads a truncated file in its constructor, and fails there with an error that does not say so. What
    stands in the pixels is not looked at; damaged JPEG data is found when it is decoded.
    """
    path = Path(path)
    private = parts()
    if not path.is_file():
        raise SourceError(f"{path} is not there: give the path of a file that ffcv.writer.DatasetWriter has written")
    size = path.stat().st_size
    if size < private.HeaderType.itemsize:
        raise SourceError(f"{path} has {size} bytes, less than the header of a .beton file: copy or write it again")
    header = np.fromfile(path, dtype=private.HeaderType, count=1)[0]
    if header["version"] != 2:
        raise SourceError(
            f"{path} begins with format version {header['version']}, and FFCV reads version 2: it is no .beton file, "
            "or its header is damaged"
        )
    table = int(header["alloc_table_ptr"])
    if not 0 < table <= size:
        raise SourceError(
            f"{path} is cut off at byte {size}: its header says that a table begins at byte {table}; copy or write it "
            "again"
        )
    if header["num_samples"] > table:  # FFCV would ask for memory for all of them before it looks
        raise SourceError(
            f"{path}: its header names {header['num_samples']} samples, and their metadata would end beyond byte "
            f"{table}, where it says that a table begins; copy or write it again"
        )
    if header["page_size"] < _SMALLEST_PAGE or header["page_size"] & (header["page_size"] - np.uint32(1)):
        raise SourceError(
            f"{path}: its header says that pages have {header['page_size']} bytes, and FFCV's are of a power of two "
            f"from {_SMALLEST_PAGE} on: copy or write it again"
        )
    try:
        reader = private.Reader(str(path))
    except Exception as error:  # whatever FFCV and NumPy have for what they cannot make sense of
        raise SourceError(f"{path} cannot be read ({type(error).__name__}: {error}): write it again") from error
    check_tables(reader)


def check_tables(reader: Any) -> None:
    """Raise SourceError unless all that the tables of a file name lies within it; 0.2 seconds for a million samples."""
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
    # Not their sum, which of damaged entries may exceed 64 bits.
    beyond = np.flatnonzero((entries["ptr"] > table) | (entries["size"] > table - np.minimum(entries["ptr"], table)))
    if len(beyond):
        sample, first, length = map(int, entries[beyond[0]])
        raise SourceError(
            f"{path}: the data of sample {sample} is said to end at byte {first + length}, "
            f"but data ends at byte {table}; write the file again"
        )
    # FFCV copies as many bytes as an entry has, whatever room there is for them, and reads the pages of the sample that
    # an entry says it is of.
    samples = np.arange(reader.num_samples, dtype=np.uint64)
    for name, pointers, sizes in _data(reader):
        known, wanted = [entries["sample_id"], entries["ptr"]], [samples, pointers]
        if sizes is not None:
            known.append(entries["size"])
            wanted.append(sizes)
        missing = np.flatnonzero(~np.isin(_one_number(wanted), _one_number(known)))
        if len(missing):
            raise SourceError(
                f"{path} is damaged: the data of field {name!r} of sample {missing[0]} ({len(missing)} samples in all) "
                f"is in no entry of the table at byte {table}; copy or write it again"
            )
    if (entries["sample_id"] >= reader.num_samples).any():
        raise SourceError(
            f"{path} is damaged: the table at byte {table} has data of samples that are not there, of "
            f"{reader.num_samples}; copy or write it again"
        )


def _one_number(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    """Of each row one that hardly another has: it is to tell damage, of which a part of 2**64 would do."""
    mixed = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _data(reader: Any) -> list[tuple[str, npt.NDArray[Any], npt.NDArray[Any] | None]]:
    """Where the data of each sample begins and how many bytes it has, for the fields that have some elsewhere."""
    private = parts()
    found: list[tuple[str, npt.NDArray[Any], npt.NDArray[Any] | None]] = []
    for number, (name, field) in enumerate(reader.handlers.items()):
        column = reader.metadata[f"f{number}"]
        if isinstance(field, private.RGBImageField):
            found.append((name, column["data_ptr"], None))  # midepoch's kernels look at lengths when they decode
        elif isinstance(field, private.BytesField):
            found.append((name, column["ptr"], column["size"]))
        elif isinstance(field, private.NDArrayField):
            found.append((name, column, np.full(len(column), field.element_size, dtype=np.uint64)))
    return found


def describe(reader: Any) -> str:
    """The number of samples, and a CRC-32 of all tables and of 64 places in the data.

    So a file is known whatever its name and date. Two files differ in it unless they agree in every length, place and
    scalar, and in what is looked at of the rest.
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
        raise SourceError(f"{reader.file_name} could not be read ({error}): fix what it lies on") from error
    return f"{reader.num_samples}:{crc:08x}"


def pages_of(reader: Any) -> npt.NDArray[np.int64]:
    """The page in which the data of each sample lies; FFCV's writer never spreads a sample over two."""
    entries = reader.alloc_table
    pages = np.full(reader.num_samples, -1, dtype=np.int64)
    pages[entries["sample_id"].astype(np.int64)] = entries["ptr"] // np.uint64(reader.page_size)
    return pages
