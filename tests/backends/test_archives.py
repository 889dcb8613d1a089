"""Where the members of an archive are: against tarfile, for every kind of archive; and every kind of damage."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midepoch.reading.tar import TarError, index_tar, parse_members, walk

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def add(archive: tarfile.TarFile, name: str, data: bytes = b"", **attributes: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in attributes.items():
        setattr(info, key, value)
    archive.addfile(info, io.BytesIO(data))


def make(path: Path, kind: str, names: list[str], size: int = 700) -> None:
    generator = np.random.default_rng(0)
    with tarfile.open(path, "w", format=FORMATS[kind], encoding="utf-8") as archive:
        for name in names:
            add(archive, name, generator.bytes(int(generator.integers(0, size))), mtime=1.5 if kind == "pax" else 1)


def indexes(path: Path) -> tuple[Any, Any]:
    """By path, and by an open file."""
    return index_tar(path), index_tar(io.BytesIO(path.read_bytes()), path.name)


def check(path: Path) -> None:
    """The index by path and by open file, and what is read by it, are what tarfile has."""
    data = path.read_bytes()
    with tarfile.open(path, encoding="utf-8") as archive:
        expected = [(info.name, info.offset_data, info.size) for info in archive if info.isreg()]
    for index in indexes(path):
        assert index.damage is None
        names = [name.decode("utf-8", "surrogateescape") for name in index.names.tolist()]
        assert list(zip(names, index.offsets.tolist(), index.sizes.tolist(), strict=True)) == expected
        for header, (name, offset, size) in zip(index.headers.tolist(), expected, strict=True):
            assert parse_members(data[header : offset + size], "it", header) == [(name, data[offset : offset + size])]


NAMES = {
    "plain": [f"sample{i:04d}.{suffix}" for i in range(50) for suffix in ("cls", "jpg")],
    "one": ["a.b"],
    "long": [f"{'d' * 90}/{'e' * 60}{i}.x" for i in range(3)],
    "unicode": ["ä/ö.ü", "plain.txt", "日本.jpg"],
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_index_agrees_with_tarfile(tmp_path: Path, kind: str, names: list[str]) -> None:
    make(tmp_path / "x.tar", kind, names)
    check(tmp_path / "x.tar")


def test_what_is_no_file_is_passed_over_an_archive_is_one(tmp_path: Path) -> None:
    make(tmp_path / "inner.tar", "pax", [f"{i}.x" for i in range(20)])
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        add(archive, "folder", type=tarfile.DIRTYPE)
        add(archive, "folder/a.txt", b"a" * 600)
        add(archive, "link", type=tarfile.SYMTYPE, linkname="folder/a.txt")
        add(archive, "hard", type=tarfile.LNKTYPE, linkname="folder/a.txt")
        add(archive, "fifo", type=tarfile.FIFOTYPE)
        add(archive, "inner.tar", (tmp_path / "inner.tar").read_bytes())
        add(archive, "b.txt", b"")
    check(tmp_path / "x.tar")
    assert index_tar(tmp_path / "x.tar").names.tolist() == [b"folder/a.txt", b"inner.tar", b"b.txt"]


def overwrite(data: bytearray, header: int, place: int, content: bytes) -> None:
    """In a header, with a checksum that fits."""
    data[header + place : header + place + len(content)] = content
    data[header + 148 : header + 156] = b" " * 8
    data[header + 148 : header + 156] = b"%06o\0 " % sum(data[header : header + 512])


def test_a_name_ends_where_its_first_zero_is(tmp_path: Path) -> None:
    """Some archivers leave behind it what was there before."""
    make(tmp_path / "x.tar", "gnu", ["a.x", "b.x", "n" * 120])
    data = bytearray((tmp_path / "x.tar").read_bytes())
    index = index_tar(tmp_path / "x.tar")
    overwrite(data, int(index.headers[1]), 5, b"rest of another name")
    data[int(index.headers[2]) + 512 + 50] = 0  # in what the long name's header says
    (tmp_path / "rest.tar").write_bytes(data)
    check(tmp_path / "rest.tar")
    assert index_tar(tmp_path / "rest.tar").names.tolist() == [b"a.x", b"b.x", b"n" * 50]


@pytest.mark.parametrize("magic", [b"ustar\x0000", b"ustar  \0", bytes(8)])
def test_a_name_goes_on_in_the_prefix_field_in_every_format(tmp_path: Path, magic: bytes) -> None:
    """POSIX says so of its own format only; tarfile, by which webdataset reads, does so in all."""
    make(tmp_path / "x.tar", "ustar", ["a.x", "b.x"])
    data, index = bytearray((tmp_path / "x.tar").read_bytes()), index_tar(tmp_path / "x.tar")
    overwrite(data, int(index.headers[1]), 257, magic)
    overwrite(data, int(index.headers[1]), 345, b"folder")
    (tmp_path / "other.tar").write_bytes(data)
    check(tmp_path / "other.tar")
    assert index_tar(tmp_path / "other.tar").names.tolist() == [b"a.x", b"folder/b.x"]


def replaced(data: bytearray, at: int, content: bytes) -> bytearray:
    data[at : at + len(content)] = content
    return data


# What is done to an archive of ten members, and how many of them are sound after that.
DAMAGES: dict[str, tuple[Callable[[bytearray, Any], bytearray], int]] = {
    "cut in data": (lambda data, index: data[: int(index.offsets[7]) + 100], 7),
    "cut between members": (lambda data, index: data[: int(index.headers[7])], 7),
    "cut in a header": (lambda data, index: data[: int(index.headers[7]) + 300], 7),
    "no marker": (lambda data, index: data[: index.end], 10),
    "a hole of zeros": (lambda data, index: replaced(data, int(index.headers[7]), bytes(2048)), 7),
    "bad checksum": (lambda data, index: replaced(data, int(index.offsets[7]) - 500, b"\xff"), 7),
    "more after the checksum": (lambda data, index: replaced(data, int(index.offsets[7]) - 358, b"\xfa\x1f"), 7),
    "bad magic": (lambda data, index: replaced(data, int(index.offsets[7]) - 512, b"?" * 512), 7),
}


def only_the_first_is_found(path: Path) -> None:
    for index in indexes(path):
        assert index.damage is not None and index.names.tolist() == [b"a.x"]


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("kind", FORMATS)
def test_damage_is_told_with_its_place(tmp_path: Path, name: str, kind: str) -> None:
    make(tmp_path / "x.tar", kind, [f"{i}.x" for i in range(10)], 2000)
    whole = index_tar(tmp_path / "x.tar")
    damage, sound = DAMAGES[name]
    (tmp_path / "bad.tar").write_bytes(damage(bytearray((tmp_path / "x.tar").read_bytes()), whole))
    for index in indexes(tmp_path / "bad.tar"):
        end = whole.end if sound == 10 else int(whole.headers[sound])
        assert index.damage is not None and index.damage.offset == end
        assert index.headers.tolist() == whole.headers[:sound].tolist()
        assert "bad.tar" in str(index.damage) and f"byte {end}" in str(index.damage)


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_a_header_for_a_file_that_is_missing_is_damage(tmp_path: Path, kind: str) -> None:
    make(tmp_path / "x.tar", kind, ["a.x", "d" * 120])
    whole, data = index_tar(tmp_path / "x.tar"), (tmp_path / "x.tar").read_bytes()
    # Of the second file what was written before its own header is there, and then the end.
    (tmp_path / "bad.tar").write_bytes(data[: int(whole.offsets[1]) - 512] + bytes(1024))
    only_the_first_is_found(tmp_path / "bad.tar")
    assert {index.damage.offset for index in indexes(tmp_path / "bad.tar")} == {int(whole.headers[1])}


def test_a_header_for_all_files_may_stand_alone(tmp_path: Path) -> None:
    # So git archive writes a folder without files.
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "0" * 40}):
        pass
    assert (tmp_path / "x.tar").read_bytes()[156:157] == b"g"
    assert index_tar(tmp_path / "x.tar").damage is None


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_sizes_that_a_header_cannot_hold(tmp_path: Path, kind: str) -> None:
    # An archive of 8 GiB and more, without its bytes: a sparse file.
    path, size = tmp_path / "a.tar", (8 << 30) + 700
    info = tarfile.TarInfo("big")
    info.size = size
    form: Any = FORMATS[kind]
    header = info.tobuf(form)
    with path.open("wb") as file:
        file.write(header)
        file.seek(-(-(len(header) + size) // 512) * 512)
        file.write(tarfile.TarInfo("after").tobuf(form) + bytes(1024))
    with path.open("rb") as file:
        index = index_tar(file)
    assert index.damage is None
    assert (index.names.tolist(), index.sizes.tolist()) == ([b"big", b"after"], [size, 0])


SIZES_OF_64 = [b"000000000100", b"         100", b"00000000100 ", b"    100     ", b"100".ljust(12, b"\0")]


@pytest.mark.parametrize("field", SIZES_OF_64)
@pytest.mark.parametrize("last", [True, False])
def test_sizes_in_every_notation(tmp_path: Path, field: bytes, last: bool) -> None:
    """Some archivers fill a field to its last byte, so that no terminator stands behind the number."""
    header = bytearray(tarfile.TarInfo("a.x").tobuf(tarfile.USTAR_FORMAT))
    overwrite(header, 0, 124, field)
    member = bytes(header) + bytes(range(64)).ljust(512, b"\0")
    after = b"" if last else tarfile.TarInfo("b.x").tobuf(tarfile.USTAR_FORMAT)
    (tmp_path / "x.tar").write_bytes(member + after + bytes(1024))
    check(tmp_path / "x.tar")
    assert index_tar(tmp_path / "x.tar").sizes.tolist() == [64] + [0] * (not last)


def test_a_stretch_that_does_not_end_where_its_last_file_does(tmp_path: Path) -> None:
    make(tmp_path / "x.tar", "ustar", ["a.x", "b.x"])
    index, data = index_tar(tmp_path / "x.tar"), (tmp_path / "x.tar").read_bytes()
    end = int(index.offsets[0] + index.sizes[0])
    assert all(parse_members(data[:stop], "it", 0) for stop in (end, int(index.headers[1])))
    with pytest.raises(TarError, match="before where the index has it"):
        parse_members(data[: end + 1], "it", 0)


def before_the_next(kind: bytes, record: bytes) -> bytes:
    """A header that says something of the file behind it, or of all files."""
    info = tarfile.TarInfo("says")
    info.type, info.size = kind, len(record)
    return info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(-(-len(record) // 512) * 512, b"\0")


def sized(size: str) -> bytes:
    info = tarfile.TarInfo("b.x")
    info.pax_headers = {"size": size}
    return info.tobuf(tarfile.PAX_FORMAT)


IMPOSSIBLE: dict[str, bytes] = {
    **{f"size {size[:9]}, {len(size)} digits": sized(size) for size in ("-1", "1e3", "9" * 30, "9" * 5000, "")},
    "size -1536": sized("-1536"),  # which led back to its own header, again and again
    "a zero in a name": before_the_next(tarfile.XHDTYPE, b"014 path=b\0.x\n"),
    "a name beyond its header": before_the_next(tarfile.XHDTYPE, b"016 path=b.x\n"),  # tarfile takes what is behind it
    # tarfile gives it to each of them, which nobody can have meant
    "a name of all that follow": before_the_next(tarfile.XGLTYPE, b"13 path=b.xx\n"),
    "a size of all that follow": before_the_next(tarfile.XGLTYPE, b"10 size=9\n"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_a_header_cannot_mean_is_damage(tmp_path: Path, name: str) -> None:
    first, last = (tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT) for name in ("a.x", "c.x"))
    (tmp_path / "x.tar").write_bytes(first + IMPOSSIBLE[name] + last + bytes(1024))
    only_the_first_is_found(tmp_path / "x.tar")


def test_walking_a_stream_needs_no_seeking(tmp_path: Path) -> None:
    make(tmp_path / "x.tar", "pax", [f"{i}.x" for i in range(10)])
    index, stream = index_tar(tmp_path / "x.tar"), io.BytesIO((tmp_path / "x.tar").read_bytes())
    start = int(index.headers[4])
    stream.read(start)
    found = [member for member, _ in walk(stream.read, lambda count: (stream.read(count), None)[1], "it", start)]
    assert [member.offset for member in found] == index.offsets[4:].tolist()


def test_reading_what_is_no_member_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "x.tar", "pax", ["a.x", "b.x"])
    index, data = index_tar(tmp_path / "x.tar"), (tmp_path / "x.tar").read_bytes()
    with pytest.raises(TarError, match=r"it is damaged at byte"):
        parse_members(data[int(index.offsets[0]) :][:600], "it", int(index.offsets[0]))
    with pytest.raises(TarError, match="beyond where the index has it"):
        parse_members(data[int(index.headers[1]) : int(index.offsets[1])], "it", 0)


def test_other_files_have_another_checksum(tmp_path: Path) -> None:
    make(tmp_path / "x.tar", "gnu", ["a.x", "b.x"])
    make(tmp_path / "y.tar", "gnu", ["a.x", "c.x"])
    (by_path, opened), (other, _) = indexes(tmp_path / "x.tar"), indexes(tmp_path / "y.tar")
    assert by_path.checksum == opened.checksum != other.checksum
