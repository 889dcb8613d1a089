"""The shards of webdataset pipelines: their index, damage, servers of objects, and what changed since a save."""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import DataLoader

import midepoch
from midepoch import SourceError, StateCorruptError, StateMismatchError
from midepoch.adapters.webdataset import index as index_of
from midepoch.reading.tar import index_tar
from midepoch.state.parts import seal_detail
from midepoch.testing import digest

wds = pytest.importorskip("webdataset", reason="webdataset is not installed")


from support import webdataset_sources as sources  # noqa: E402
from support import witness_sources  # noqa: E402
from support.object_server import nginx, requests  # noqa: E402
from support.sources import flat, heads  # noqa: E402
from support.webdataset_sources import compress, make_shards, number, numbers, plain, write_shard  # noqa: E402
from support.witness_sources import Cases, check, found_in, labels_of, make_webdataset, state_after  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("cache")]


def rest_after(loader: Any, state: dict[str, Any]) -> list[Any]:
    with loader:
        loader.load_state_dict(state)
        return list(loader)


# --- the index --------------------------------------------------------------------------------------------------------


def index_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("webdataset-*/*.index"))


def test_an_index_is_built_anew_where_a_shard_has_changed(
    urls: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_of, "index_tar", scans := mock.Mock(side_effect=index_tar))
    for _ in range(2):
        assert flat(midepoch.wrap(numbers(urls))) == list(range(20))
        assert sorted(call.args[1] for call in scans.call_args_list) == sorted(urls) and len(index_files(cache)) == 5
    write_shard(Path(urls[1]), range(100, 103))
    assert flat(midepoch.wrap(numbers(urls))) == [*range(4), 100, 101, 102, *range(10, 20)]
    assert [call.args[1] for call in scans.call_args_list[5:]] == [urls[1]]
    assert not list(cache.glob("webdataset-*/*.part"))


@pytest.mark.parametrize("damage", ["cut", "garbage", "flipped", "empty", "other version"])
def test_an_unreadable_index_is_built_anew(urls: list[str], cache: Path, damage: str) -> None:
    midepoch.wrap(numbers(urls))
    for file in index_files(cache):
        data = file.read_bytes()
        flipped = data[:-1] + bytes([data[-1] ^ 1]) if data[-1:] != b"\n" else data
        older = data.replace(b'"format": 1', b'"format": 0')
        changed = {"cut": data[:-5], "garbage": b"garbage", "flipped": flipped, "empty": b"", "other version": older}
        file.write_bytes(changed[damage])
    assert flat(midepoch.wrap(numbers(urls))) == list(range(20))
    before = [file.stat().st_mtime_ns for file in index_files(cache)]
    assert flat(midepoch.wrap(numbers(urls))) == list(range(20))
    assert [file.stat().st_mtime_ns for file in index_files(cache)] == before


# --- shards that change while they are read, and damaged ones ---------------------------------------------------------


def test_shards_added_removed_or_replaced_are_refused(urls: list[str], tmp_path: Path) -> None:
    head, state = heads(lambda: midepoch.wrap(numbers(urls)), 4)
    extra = make_shards(tmp_path / "extra", [2])
    for changed in ([*urls, *extra], urls[:-1], [*urls[:-1], *extra], urls[::-1]):
        with pytest.raises(StateMismatchError, match=r"shards differs.*5 shards of 20 samples"):
            midepoch.wrap(numbers(changed)).load_state_dict(state)
    # Moved elsewhere they are the same data; as many samples of the same sizes, but other files, are not.
    moved = shutil.copytree(tmp_path / "shards", tmp_path / "moved")
    again = [f"{moved}/{Path(url).name}" for url in urls]
    assert flat([*head, *rest_after(midepoch.wrap(numbers(again)), state)]) == list(range(20))
    write_shard(Path(urls[0]), range(6, 10))
    with pytest.raises(StateMismatchError, match="shards differs"):
        midepoch.wrap(numbers(urls)).load_state_dict(state)


def test_a_shard_that_changes_while_it_is_read_is_an_error(urls: list[str]) -> None:
    loader = midepoch.wrap(numbers(urls))
    write_shard(Path(urls[3]), range(100, 120))
    batches = []
    with pytest.raises(SourceError, match=f"{urls[3]} has changed since it was indexed"):
        batches += list(loader)
    assert loader.position == 10
    loader = midepoch.wrap(numbers(urls))
    Path(urls[3]).unlink()
    with pytest.raises(SourceError, match="cannot be opened"):
        list(loader)


def test_a_compressed_shard_with_a_wrong_checksum_is_an_error(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", range(10))
    data = bytearray(gzip.compress((tmp_path / "a.tar").read_bytes(), mtime=0))
    data[-6] ^= 255
    (tmp_path / "a.tgz").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.tgz"):
        list(midepoch.wrap(numbers(str(tmp_path / "a.tgz"))))


def test_a_missing_shard_is_an_error_unless_the_handler_goes_on(
    urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path(urls[1]).unlink()
    with pytest.raises(SourceError, match=f"{urls[1]} cannot be opened"):
        midepoch.wrap(numbers(urls))
    with caplog.at_level(logging.WARNING, "midepoch"):
        loader = midepoch.wrap(numbers(urls, handler=wds.ignore_and_continue))
    assert flat(loader) == [*range(4), *range(10, 20)]
    assert f"{urls[1]}: the shard is lost" in caplog.text


# Of a shard that is damaged at its fifth sample, and how many of its samples are known to be whole; each has two files.
DAMAGED: dict[str, tuple[Callable[[bytes, Any], bytes], int]] = {
    "truncated in the data": (lambda data, index: data[: int(index.offsets[8]) + 1], 4),
    "cut between files": (lambda data, index: data[: int(index.headers[9])], 4),
    "cut between samples": (lambda data, index: data[: int(index.headers[8])], 4),
    "corrupt header": (
        lambda data, index: data[: int(index.headers[8]) + 12] + bytes(100) + data[int(index.headers[8]) + 112 :], 4
    ),
    "no end marker": (lambda data, index: data[: index.end], 7),
}  # fmt: skip


@pytest.mark.parametrize("way", ["indexed", "streamed", "piped"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_an_error_or_loses_the_shards_rest(
    tmp_path: Path, kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    urls = make_shards(tmp_path / "bad", [4, 7, 3], size=40)
    damage, whole = DAMAGED[kind]
    Path(urls[1]).write_bytes(damage(Path(urls[1]).read_bytes(), index_tar(urls[1])))
    shards = {"indexed": urls, "streamed": compress(urls), "piped": [f"pipe:cat {url}" for url in urls]}[way]
    settings: dict[str, Any] = {} if way == "indexed" else {"streams": 1}
    with caplog.at_level(logging.WARNING, "midepoch"):
        samples = list(midepoch.wrap(plain(shards, handler=wds.ignore_and_continue), **settings))
    assert [number(sample) for sample in samples] == [*range(4), *range(4, 4 + whole), *range(11, 14)]
    assert all(len(sample["bin"]) == 40 for sample in samples)
    assert "shard-0001" in caplog.text and "lost" in caplog.text
    with pytest.raises(SourceError, match=r"shard-0001.* is damaged at byte \d+"):  # nothing was kept for others
        list(midepoch.wrap(plain(shards), **settings))


# --- servers of objects -----------------------------------------------------------------------------------------------


_read = itertools.count()


def collected(sample: Any) -> Any:
    if next(_read) % 5 == 0:
        gc.collect()  # as it happens in any worker process sooner or later
    return sample


def remote(base: str, urls: list[str], workers: int, **arguments: Any) -> Any:
    shards = [f"{base}/{Path(url).name}" for url in urls]
    dataset = wds.WebDataset(shards, shardshuffle=5, **arguments).shuffle(9).map(collected).map(sources.Reading())
    loader = DataLoader(dataset.batched(3, collation_fn=sources.stack), batch_size=None, num_workers=workers)
    return midepoch.wrap(loader, seed=4)


@pytest.fixture
def served(tmp_path: Path) -> list[str]:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    return make_shards(tmp_path / "shards", [5, 0, 6, 4], size=3000)


def test_shards_in_an_object_store_are_read_by_range(tmp_path: Path, served: list[str], cache: Path) -> None:
    """By workers too, which leave their parent's connections alone."""
    with nginx(tmp_path / "nginx", tmp_path / "shards") as base:
        with remote(base, served, 0) as loader:
            assert loader.capabilities.rank_independent
            whole = list(loader)
        assert sorted(flat(map(sources.identify, whole))) == list(range(15))
        digests = list(map(digest, whole))
        assert len(index_files(cache)) == 4
        log = requests(tmp_path / "nginx", base)
        for before, after in ((0, 2), (2, 0)):
            with remote(base, served, before) as loader:
                head = list(itertools.islice(loader, 2))
                state = loader.state_dict()
            assert list(map(digest, [*head, *rest_after(remote(base, served, after), state)])) == digests
        # The local files give the same, so a state may move with the data.
        with remote(str(tmp_path / "shards"), served, 0) as local:
            assert list(map(digest, local)) == digests
        # No shard was fetched whole.
        assert len([line for line in log if " 206 " in line]) > 15


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(tmp_path: Path, served: list[str]) -> None:
    """By one of the same size, so that nothing but its etag tells."""
    with nginx(tmp_path / "nginx", tmp_path / "shards") as base:
        loader, whole = remote(base, served, 0), list(map(digest, remote(base, served, 0)))
        batches = iter(loader)
        got = [next(batches)]
        state = loader.state_dict()
        kept = {Path(url): Path(url).read_bytes() for url in served}
        for path, content in kept.items():
            path.write_bytes(bytes(len(content)))
            os.utime(path, (1, 1))  # nginx makes an etag of this and the size
        with pytest.raises(SourceError, match=r"\d\.tar has changed since it was indexed: wrap the pipeline again"):
            got.extend(batches)
        assert list(map(digest, got)) == whole[: len(got)]
        assert loader.state_dict()["position"] >= state["position"]
        for path, content in kept.items():
            path.write_bytes(content)
        assert list(map(digest, rest_after(remote(base, served, 0), state))) == whole[1:]


def test_a_server_that_gives_no_parts_is_streamed(tmp_path: Path, served: list[str]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl, with which webdataset reads http, is not installed")
    with nginx(tmp_path / "nginx", tmp_path / "shards", ranges=False) as base:
        with remote(base, served, 0) as loader:
            assert not loader.capabilities.rank_independent
            batches = list(itertools.islice(loader, 2))
            state = loader.state_dict()
        batches += rest_after(remote(base, served, 0), state)
        assert sorted(flat(map(sources.identify, batches))) == list(range(15))


# --- what changed since the save: indexed -----------------------------------------------------------------------------


PLACES = {"in mid-epoch": 4, "at the boundary": 10, "in a later epoch": 13}  # of 10 batches an epoch
PIPE = "pipe:cat "
STREAMED = {"in mid-epoch": 4, "at the boundary": 12, "in a later epoch": 15}  # of 12 batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards; the same elsewhere, copied and written anew; others of equal names and sizes; the same, renamed."""
    folder = tmp_path_factory.mktemp("shards")
    first = witness_sources.write_shards(f"{folder}/first")
    shutil.copytree(folder / "first", folder / "copied", copy_function=shutil.copyfile)
    witness_sources.write_shards(f"{folder}/changed", content=1)
    witness_sources.write_shards(f"{folder}/anew", time=None)
    (folder / "renamed").mkdir()
    for path, name in zip(first, reversed(first), strict=True):
        shutil.copyfile(path, folder / "renamed" / Path(name).name)
    return folder


def urls_in(folder: Path | str, before: str = "") -> list[str]:
    return [f"{before}{folder}/shard-{shard:04d}.tar" for shard in range(4)]


def saved(batches: int, where: list[str]) -> tuple[dict[str, Any], list[int]]:
    return state_after("webdataset", batches, urls=where)


def common(folder: Path, before: str = "") -> Cases:
    first, changed, copied, renamed = (urls_in(folder / n, before) for n in ("first", "changed", "copied", "renamed"))
    return {
        "nothing": ({"urls": first}, "exact"),
        "workers": ({"urls": first, "workers": 2}, "exact"),
        "elsewhere": ({"urls": copied}, "exact"),  # written at other times
        "content": ({"urls": changed}, "StateMismatchError"),
        "content, workers": ({"urls": changed, "workers": 2}, "StateMismatchError"),
        "order of names": ({"urls": renamed}, "StateMismatchError"),
        "order of urls": ({"urls": first[::-1]}, "StateMismatchError"),
    }


@pytest.mark.parametrize("place", PLACES)
def test_shards_that_changed_are_told(place: str, folder: Path, tmp_path: Path) -> None:
    first = urls_in(folder / "first")
    state, rest = saved(PLACES[place], first)
    with nginx(tmp_path / "nginx", folder) as base:
        cases: Cases = {
            **common(folder),
            "world": ({"urls": first, "world": (1, 2)}, "exact"),
            "on a server": ({"urls": urls_in(f"{base}/first")}, "exact"),
            "on a server, workers": ({"urls": urls_in(f"{base}/first"), "workers": 2}, "exact"),
            "content, another world": ({"urls": urls_in(folder / "changed"), "world": (1, 2)}, "StateMismatchError"),
            "content, on a server": ({"urls": urls_in(f"{base}/changed")}, "StateMismatchError"),
        }
        found = found_in(state, cases, "webdataset")
    # At the boundary the data may be meant to be others from epoch to epoch; the fingerprint has the order.
    told = [name for name in cases if name.startswith("content")]
    check(found, cases, **(dict.fromkeys(told, "told") if place == "at the boundary" else {}))
    assert all(found[name]["rest"] == rest for name in ("nothing", "workers", "elsewhere", "on a server"))
    # The message names the sample's place. Nothing of other data is handed out.
    said = found["content"]["error"] or found["content"]["warnings"][0]
    assert re.search(r"sample \d+, from byte \d+ of .*changed/shard-000\d\.tar on, is another one", said)
    if place != "at the boundary":
        assert found["content"]["batches"] == found["content, workers"]["batches"] == 0
    # Where there are workers, this process opens no shard.
    assert found["nothing"]["opened"] and not found["workers"]["opened"] and not found["content, workers"]["opened"]


def test_of_a_remote_shard_one_sample_s_range_is_asked_for(folder: Path, tmp_path: Path) -> None:
    """A resume of one batch, with the index in the cache: what it fetches with a witness and without."""
    state, _ = saved(4, urls_in(folder / "first"))
    with nginx(tmp_path / "nginx", folder) as base:
        where = urls_in(f"{base}/first")
        make_webdataset(where).close()  # which makes the index
        for verify, answers in (("off", 2), ("sample", 3)):  # two samples in a batch, and one more
            with make_webdataset(where, options={"verify": verify}) as loader:
                before = len(requests(tmp_path / "nginx", base))
                loader.load_state_dict(state)
                next(iter(loader))
            sent = [line.split('" ')[1].split()[:2] for line in requests(tmp_path / "nginx", base)[before:]]
            assert len(sent) == answers
            # Each has 6,656 bytes with its headers; a shard has 40 kB.
            assert all(status == "206" and int(size) < 8192 for status, size in sent), sent


def test_a_first_sample_that_cannot_be_read_has_no_witness(folder: Path, tmp_path: Path) -> None:
    """Its shard goes when it has been indexed. The samples of other shards are read all the same."""
    where = urls_in(shutil.copytree(folder / "first", tmp_path / "first"))
    state, rest = saved(7, where)
    with make_webdataset(where) as loader:
        shard = Path(where[labels_of(next(iter(loader)))[0] // 5])
    assert not {label // 5 for label in rest} & {int(shard.stem[-4:])}
    with make_webdataset(where) as loader, make_webdataset(where, options={"verify": "strict"}) as strict:
        shard.unlink()
        loader.load_state_dict(state)
        with pytest.warns(midepoch.MidepochWarning, match="cannot be compared"):
            assert flat(map(labels_of, loader)) == rest
        strict.load_state_dict(state)
        with pytest.raises(StateMismatchError, match="cannot be compared"):
            next(iter(strict))
        loader.seek(epoch=0, position=0)
        with pytest.raises(midepoch.SourceError, match="cannot be opened"):
            next(iter(loader))


# --- the same, streamed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", STREAMED)
def test_streamed_shards_that_changed_are_told(place: str, folder: Path, tmp_path: Path) -> None:
    state, rest = saved(STREAMED[place], urls_in(folder / "first", PIPE))
    assert state["witness"] == ""
    anew, changed = urls_in(folder / "anew", PIPE), urls_in(folder / "changed", PIPE)
    cases: Cases = {
        **common(folder, PIPE),
        "written anew": ({"urls": anew}, "exact"),
        "strictly": ({"urls": anew, "options": {"verify": "strict"}}, "exact"),
        "content, strictly": ({"urls": changed, "options": {"verify": "strict"}}, "StateMismatchError"),
        "content, gone on with": ({"urls": changed, "options": {"verify": "warn"}}, "told"),
        "content, not looked at": ({"urls": changed, "options": {"verify": "off"}}, "exact"),
    }
    found = found_in(state, cases, "webdataset")
    # At the boundary no stream stands in a shard, so none is known.
    unknown = [name for name in cases if name.startswith("content") or name == "order of names"]
    check(found, cases, **(dict.fromkeys(unknown, "exact") if place == "at the boundary" else {}))
    assert all(found[name]["rest"] == rest for name in ("nothing", "workers", "elsewhere", "written anew"))
    if place != "at the boundary":
        assert re.search(r"the beginning of pipe:cat .*changed/shard-000\d\.tar has", found["content"]["error"])
        assert len(found["content, gone on with"]["warnings"]) == 1
        # A stream that has not begun has no shard to be known by: in the later epoch the fourth is such a one.
        assert found["content"]["batches"] == (place == "in a later epoch")


def test_a_streams_shard_that_changed_is_told_before_its_batch(folder: Path, tmp_path: Path) -> None:
    """Streams take turns. Those before it give what they should."""
    shutil.copytree(folder / "first", tmp_path / "mixed")
    state, rest = saved(4, urls_in(tmp_path / "mixed", PIPE))
    after: list[int] = []
    for shard in range(4):
        name = f"shard-{shard:04d}.tar"
        shutil.copyfile(folder / "changed" / name, tmp_path / "mixed" / name)
        with make_webdataset(urls_in(tmp_path / "mixed", PIPE)) as loader:
            loader.load_state_dict(state)
            got: list[int] = []
            with pytest.raises(StateMismatchError, match=name):
                for batch in loader:
                    got += labels_of(batch)
            assert got == rest[: len(got)]
            after.append(len(got))
            stopped = loader.state_dict()
            loader.load_state_dict(stopped)
            with pytest.raises(StateMismatchError, match=name):  # it comes again
                next(iter(loader))
        shutil.copyfile(folder / "first" / name, tmp_path / "mixed" / name)
        with make_webdataset(urls_in(tmp_path / "mixed", PIPE)) as loader:
            loader.load_state_dict(stopped)
            assert flat(map(labels_of, loader)) == rest[len(got) :]
    assert sorted(after) == [0, 2, 4, 6]


def test_a_state_without_marks_is_refused(folder: Path) -> None:
    """A mark that somebody took out would let changed shards pass."""
    state, _ = saved(4, urls_in(folder / "first", PIPE))
    part = json.loads(state["detail"])["part"]
    text = re.sub(r"(:\d+(?:\.\d+){5})\.\d+", r"\1", part[8:])
    assert text != part[8:]
    detail = json.dumps({"rank": 0, "part": seal_detail(text, 0, state)}, separators=(",", ":"))
    refused = pytest.raises(StateCorruptError, match="not from a streamed pipeline")
    with make_webdataset(urls_in(folder / "changed", PIPE)) as loader, refused:
        loader.load_state_dict(midepoch.reseal({**state, "detail": detail}))
