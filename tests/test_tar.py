"""The tar index, against python's tarfile."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from midepoch.errors import SourceError
from midepoch.tar import TarIndex, _Archive, index_tar, split_name


def write(path: Path, members: dict[str, bytes], form: int = tarfile.USTAR_FORMAT, **more: object) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if more:
                info.pax_headers = {key: str(value) for key, value in more.items()}
            tar.addfile(info, io.BytesIO(content))
    return path


def check(path: Path) -> TarIndex:
    """Equal to tarfile's; the content at each offset is the file's; a reader may start at each header."""
    index = index_tar(path)
    with tarfile.open(path) as tar:
        files = [member for member in tar if member.isreg()]
        assert index.names == [member.name for member in files]
        assert index.headers.tolist() == [member.offset for member in files]
        assert index.offsets.tolist() == [member.offset_data for member in files]
        assert index.sizes.tolist() == [member.size for member in files]
    for place, name in list(enumerate(index.names))[:5]:
        with path.open("rb") as file:
            file.seek(int(index.headers[place]))
            with tarfile.open(fileobj=file, mode="r|") as stream:
                assert next(iter(stream)).name == name
    return index


MEMBERS = {
    f"folder/{number:05}.{kind}": random.Random(number).randbytes(number * 37 % 1500)
    for number in range(60)
    for kind in ("jpg", "cls")
}


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_every_format(tmp_path: Path, form: int) -> None:
    names = MEMBERS if form == tarfile.USTAR_FORMAT else {**MEMBERS, "d/" * 60 + "long-ä" * 20 + ".jpg": b"x"}
    index = check(write(tmp_path / "a.tar", names, form))
    assert len(index) == len(names)


def test_a_pax_header_for_every_member_as_webdataset_writes_it(tmp_path: Path) -> None:
    check(write(tmp_path / "a.tar", MEMBERS, tarfile.PAX_FORMAT, mtime=1.5, comment="size=3"))


def test_an_archive_in_an_archive_is_one_file(tmp_path: Path) -> None:
    inner = write(tmp_path / "inner.tar", MEMBERS).read_bytes()
    assert len(check(write(tmp_path / "outer.tar", {"a.txt": b"1", "inner.tar": inner, "b.txt": b""}))) == 3


def test_folders_and_links_are_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        folder = tarfile.TarInfo("d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        tar.addfile(tarfile.TarInfo("d/a"), io.BytesIO())
        link = tarfile.TarInfo("d/b")
        link.type, link.linkname = tarfile.SYMTYPE, "a"
        tar.addfile(link)
    assert check(tmp_path / "a.tar").names == ["d/a"]


def test_no_end_mark_and_no_members(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.tar", {"a": b"1" * 512}).read_bytes()
    (tmp_path / "b.tar").write_bytes(whole[:1024])
    assert index_tar(tmp_path / "b.tar").names == ["a"]
    assert index_tar(write(tmp_path / "c.tar", {})).names == []


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_sizes_that_a_header_cannot_hold(tmp_path: Path, form: Literal[1, 2], monkeypatch: pytest.MonkeyPatch) -> None:
    # An archive of 8 GiB and more, without its bytes: a sparse file.
    path, size = tmp_path / "a.tar", (8 << 30) + 700
    info = tarfile.TarInfo("big")
    info.size = size
    header = info.tobuf(form)
    after = tarfile.TarInfo("after")
    with path.open("wb") as file:
        file.write(header)
        file.seek(-(-(len(header) + size) // 512) * 512)
        file.write(after.tobuf(form) + bytes(1024))
    monkeypatch.setattr(_Archive, "_scan", lambda self: None)  # it would read all of it
    index = index_tar(path)
    assert (index.names, index.sizes.tolist()) == (["big", "after"], [size, 0])


def test_the_scan_and_the_walk_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tar", MEMBERS, tarfile.PAX_FORMAT, mtime=1.5)
    assert _Archive(str(path), np.fromfile(path, np.uint8))._scan() is not None
    scanned = check(path)
    monkeypatch.setattr(_Archive, "_scan", lambda self: None)
    walked = check(path)
    assert scanned.crc == walked.crc
    assert scanned.crc != index_tar(write(tmp_path / "b.tar", dict(reversed(MEMBERS.items())))).crc


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"\x1f\x8b" + data, "compressed .gzip."),
        (lambda data: data[:700], "offset 0: .*cut off"),
        (lambda data: data[:1536] + data[1537:], r"offset 1536: there is no header"),
        (lambda data: data[: 1536 + 100], "offset 1536: the archive is cut off in a header"),
        (lambda data: b"junk" * 500, "offset 0: there is no header"),
    ],
)
def test_damage_names_archive_and_offset(tmp_path: Path, spoil: object, message: str) -> None:
    path = write(tmp_path / "shard-7.tar", {"a": b"1" * 600, "b": b"2" * 700})
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(SourceError, match=rf"shard-7\.tar.*{message}"):
        index_tar(path)


def test_random_damage_is_told_or_harmless(tmp_path: Path) -> None:
    good = write(tmp_path / "a.tar", dict(list(MEMBERS.items())[:20]), tarfile.PAX_FORMAT, mtime=1.5).read_bytes()
    path, generator = tmp_path / "b.tar", random.Random(0)
    told = 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data[: generator.choice((len(data), generator.randrange(1, len(data))))])
        try:
            index_tar(path)
        except SourceError as error:
            told += 1
            assert "b.tar" in str(error)
    assert told > 100


def test_names_are_cut_at_the_first_dot() -> None:
    assert split_name("a.b/c.d.e") == ("a.b/c", "d.e")
    assert split_name("c") == ("c", "")
