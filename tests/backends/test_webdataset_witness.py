"""Shards that changed between save and resume: indexed from files and from a server, and streamed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("webdataset", reason="webdataset is not installed")


import midepoch
from midepoch import StateCorruptError, StateMismatchError
from midepoch.state.parts import seal_detail
from support.object_server import nginx
from support.witness_sources import (
    Cases,
    check,
    found_in_new_process,
    labels_of,
    make_webdataset,
    state_after,
    write_shards,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PLACES = {"in mid-epoch": 4, "at the boundary": 10, "in a later epoch": 13}  # of 10 batches an epoch
STREAMED = {"in mid-epoch": 4, "at the boundary": 12, "in a later epoch": 15}  # of 12 batches


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards; the same elsewhere, copied and written anew; others of equal names and sizes; the same, renamed."""
    folder = tmp_path_factory.mktemp("shards")
    first = write_shards(f"{folder}/first")
    shutil.copytree(folder / "first", folder / "copied", copy_function=shutil.copyfile)
    write_shards(f"{folder}/changed", content=1)
    write_shards(f"{folder}/anew", time=None)
    (folder / "renamed").mkdir()
    for path, name in zip(first, reversed(first), strict=True):
        shutil.copyfile(path, folder / "renamed" / Path(name).name)
    return folder


def urls(folder: Path | str, before: str = "") -> list[str]:
    return [f"{before}{folder}/shard-{shard:04d}.tar" for shard in range(4)]


def saved(batches: int, where: list[str]) -> tuple[dict[str, Any], list[int]]:
    return state_after("webdataset", batches, urls=where)


# --- indexed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_shards_that_changed_are_told_in_a_new_process(place: str, folder: Path, tmp_path: Path) -> None:
    state, rest = saved(PLACES[place], urls(folder / "first"))
    changed = urls(folder / "changed")
    with nginx(tmp_path / "nginx", folder) as base:
        cases: Cases = {
            "nothing": ({"urls": urls(folder / "first")}, "exact"),
            "workers": ({"urls": urls(folder / "first"), "workers": 2}, "exact"),
            "batch size": ({"urls": urls(folder / "first"), "batch": 4}, "exact"),
            "world": ({"urls": urls(folder / "first"), "world": (1, 2)}, "exact"),
            "elsewhere, at other times": ({"urls": urls(folder / "copied")}, "exact"),
            "strictly": ({"urls": urls(folder / "copied"), "options": {"verify": "strict"}}, "exact"),
            "on a server": ({"urls": urls(f"{base}/first")}, "exact"),
            "on a server, workers": ({"urls": urls(f"{base}/first"), "workers": 2}, "exact"),
            "content": ({"urls": changed}, "StateMismatchError"),
            "content, workers": ({"urls": changed, "workers": 2}, "StateMismatchError"),
            "content, another world": ({"urls": changed, "world": (1, 2)}, "StateMismatchError"),
            "content, on a server": ({"urls": urls(f"{base}/changed")}, "StateMismatchError"),
            "content, strictly": ({"urls": changed, "options": {"verify": "strict"}}, "StateMismatchError"),
            "content, gone on with": ({"urls": changed, "options": {"verify": "warn"}}, "told"),
            "content, not looked at": ({"urls": changed, "options": {"verify": "off"}}, "exact"),
            "order of names": ({"urls": urls(folder / "renamed")}, "StateMismatchError"),
            "order of urls": ({"urls": urls(folder / "first")[::-1]}, "StateMismatchError"),
        }
        found = found_in_new_process(tmp_path, state, cases, "webdataset")
    # At the boundary the data may be meant to be others from epoch to epoch; the fingerprint has the order.
    told = [name for name, (_, end) in cases.items() if name.startswith("content") and end.endswith("Error")]
    others = {name: "told" for name in told if "strictly" not in name} if place == "at the boundary" else {}
    check(found, cases, **others)
    for name in ("nothing", "workers", "batch size", "elsewhere, at other times", "on a server"):
        assert found[name]["rest"] == rest, name
    # The message names the sample's place. Nothing of other data is handed out.
    said = found["content"]["error"] or found["content"]["warnings"][0]
    assert re.search(r"sample \d+, from byte \d+ of .*changed/shard-000\d\.tar on, is another one", said)
    if place != "at the boundary":
        assert found["content"]["batches"] == found["content, workers"]["batches"] == 0
    assert len(found["content, gone on with"]["warnings"]) == 1
    # Where there are workers, this process opens no shard.
    assert found["nothing"]["opened"] and not found["workers"]["opened"] and not found["content, workers"]["opened"]


def test_of_a_remote_shard_one_sample_s_range_is_asked_for(folder: Path, tmp_path: Path) -> None:
    """A resume of one batch, with the index in the cache: what it fetches with a witness and without."""
    state, _ = saved(4, urls(folder / "first"))
    with nginx(tmp_path / "nginx", folder) as base:
        log = tmp_path / "nginx" / "access.log"
        sent: dict[str, list[tuple[int, int]]] = {}
        for verify in ("indexing", "off", "sample"):
            before = len(log.read_text().splitlines())
            options = {"verify": "sample" if verify == "indexing" else verify}
            with make_webdataset(urls(f"{base}/first"), options=options) as loader:
                wrapped = len(log.read_text().splitlines())
                loader.load_state_dict(state)
                next(iter(loader))
            lines = log.read_text().splitlines()
            answers = [line.split('" ')[1].split()[:2] for line in lines[wrapped:]]
            sent[verify] = [(int(status), int(size)) for status, size in answers]
            assert wrapped > before
    # Two samples in a batch, and one more. Each has 6,656 bytes with its headers; a shard has 40 kB.
    assert (len(sent["off"]), len(sent["sample"])) == (2, 3)
    assert all(status == 206 and size < 8192 for status, size in [*sent["off"], *sent["sample"]]), sent


def test_a_first_sample_that_cannot_be_read_has_no_witness(folder: Path, tmp_path: Path) -> None:
    """Its shard goes when it has been indexed. The samples of other shards are read all the same."""
    where = urls(shutil.copytree(folder / "first", tmp_path / "first"))
    state, rest = saved(7, where)
    with make_webdataset(where) as loader:
        shard = Path(where[labels_of(next(iter(loader)))[0] // 5])
    assert not {label // 5 for label in rest} & {int(shard.stem[-4:])}
    with make_webdataset(where) as loader, make_webdataset(where, options={"verify": "strict"}) as strict:
        shard.unlink()
        loader.load_state_dict(state)
        with pytest.warns(midepoch.MidepochWarning, match="cannot be compared"):
            assert [label for batch in loader for label in labels_of(batch)] == rest
        strict.load_state_dict(state)
        with pytest.raises(StateMismatchError, match="cannot be compared"):
            next(iter(strict))
        loader.seek(epoch=0, position=0)
        with pytest.raises(midepoch.SourceError, match="cannot be opened"):
            next(iter(loader))


# --- streamed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", STREAMED)
def test_streamed_shards_that_changed_are_told_in_a_new_process(place: str, folder: Path, tmp_path: Path) -> None:
    state, rest = saved(STREAMED[place], urls(folder / "first", "pipe:cat "))
    assert state["witness"] == ""
    changed = urls(folder / "changed", "pipe:cat ")
    cases: Cases = {
        "nothing": ({"urls": urls(folder / "first", "pipe:cat ")}, "exact"),
        "workers": ({"urls": urls(folder / "first", "pipe:cat "), "workers": 2}, "exact"),
        "elsewhere": ({"urls": urls(folder / "copied", "pipe:cat ")}, "exact"),
        "written anew": ({"urls": urls(folder / "anew", "pipe:cat ")}, "exact"),
        "strictly": ({"urls": urls(folder / "anew", "pipe:cat "), "options": {"verify": "strict"}}, "exact"),
        "content": ({"urls": changed}, "StateMismatchError"),
        "content, workers": ({"urls": changed, "workers": 2}, "StateMismatchError"),
        "content, strictly": ({"urls": changed, "options": {"verify": "strict"}}, "StateMismatchError"),
        "content, gone on with": ({"urls": changed, "options": {"verify": "warn"}}, "told"),
        "content, not looked at": ({"urls": changed, "options": {"verify": "off"}}, "exact"),
        "order of names": ({"urls": urls(folder / "renamed", "pipe:cat ")}, "StateMismatchError"),
        "order of urls": ({"urls": urls(folder / "first", "pipe:cat ")[::-1]}, "StateMismatchError"),
    }
    found = found_in_new_process(tmp_path, state, cases, "webdataset")
    # At the boundary no stream stands in a shard, so none is known.
    unknown = [name for name in cases if name.startswith("content") or name == "order of names"]
    check(found, cases, **(dict.fromkeys(unknown, "exact") if place == "at the boundary" else {}))
    for name in ("nothing", "workers", "elsewhere", "written anew"):
        assert found[name]["rest"] == rest, name
    if place != "at the boundary":
        assert re.search(r"the beginning of pipe:cat .*changed/shard-000\d\.tar has", found["content"]["error"])
        assert len(found["content, gone on with"]["warnings"]) == 1
        # A stream that has not begun has no shard to be known by: in the later epoch the fourth is such a one.
        assert found["content"]["batches"] == (place == "in a later epoch")


def test_a_streams_shard_that_changed_is_told_before_its_batch(folder: Path, tmp_path: Path) -> None:
    """Streams take turns. Those before it give what they should."""
    shutil.copytree(folder / "first", tmp_path / "mixed")
    state, rest = saved(4, urls(tmp_path / "mixed", "pipe:cat "))
    after: list[int] = []
    for number in range(4):
        name = f"shard-{number:04d}.tar"
        shutil.copyfile(folder / "changed" / name, tmp_path / "mixed" / name)
        with make_webdataset(urls(tmp_path / "mixed", "pipe:cat ")) as loader:
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
        with make_webdataset(urls(tmp_path / "mixed", "pipe:cat ")) as loader:
            loader.load_state_dict(stopped)
            assert [label for batch in loader for label in labels_of(batch)] == rest[len(got) :]
    assert sorted(after) == [0, 2, 4, 6]


def test_a_state_without_marks_is_refused(folder: Path) -> None:
    """A mark that somebody took out would let changed shards pass."""
    state, _ = saved(4, urls(folder / "first", "pipe:cat "))
    part = json.loads(state["detail"])["part"]
    text = re.sub(r"(:\d+(?:\.\d+){5})\.\d+", r"\1", part[8:])
    assert text != part[8:]
    detail = json.dumps({"rank": 0, "part": seal_detail(text, 0, state)}, separators=(",", ":"))
    refused = pytest.raises(StateCorruptError, match="not from a streamed pipeline")
    with make_webdataset(urls(folder / "changed", "pipe:cat ")) as loader, refused:
        loader.load_state_dict(midepoch.reseal({**state, "detail": detail}))


