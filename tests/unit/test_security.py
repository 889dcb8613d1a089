"""What strangers may do: their states and snapshots run and open nothing; only one's own indexes are believed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import pwd
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochError, Snapshot, StateError
from support import fault_sources as faults
from support import forking, sources
from support.places import TESTS

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="files of another user can be made by root alone")

pytestmark = faults.QUIET


# --- states and snapshots ---


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def numbers() -> Any:
    return midepoch.wrap(DataLoader(list(range(20)), 2), seed=1)  # type: ignore[arg-type]


def test_a_bomb_in_a_snapshot_does_not_go_off(tmp_path: Path) -> None:
    marker, path = tmp_path / "went-off", tmp_path / "snapshot.pt"
    with Snapshot(path, model=torch.nn.Linear(2, 2), data=numbers(), signals=()) as snapshot:
        snapshot.save()
    content = torch.load(path, weights_only=True)
    for place in ("parts", "id", "generators"):
        torch.save({**content, place: Bomb(marker)}, path)
        with pytest.raises(MidepochError):
            Snapshot(path, model=torch.nn.Linear(2, 2), data=numbers(), signals=()).load()
        path.write_bytes(pickle.dumps(Bomb(marker)))
        with pytest.raises(MidepochError):
            Snapshot(path, model=torch.nn.Linear(2, 2), data=numbers(), signals=()).load()
        # In the text of a loader's state, where some sources keep states of their own.
        loader_state = {**numbers().state_dict(), "detail": pickle.dumps(Bomb(marker)).hex()}
        with pytest.raises(StateError):
            numbers().load_state_dict(midepoch.reseal(loader_state))
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "the bomb itself works"


# Python tells of every file, folder, process and connection that is asked for.
AUDITED = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = {here!r}
import midepoch, torch
from test_security import sources_for_audit
evil = {evil!r}
seen, watching = [], False
def hook(event, arguments):
    if watching and event.split(".")[0] in ("open", "os", "socket", "subprocess", "shutil", "glob", "pty", "exec"):
        seen.append((event, repr(arguments)))
sys.addaudithook(hook)
told, tried = [], 0
for name, loader in sources_for_audit({folder!r}):
    good = loader.state_dict()
    details = [str(good["detail"]), "", evil, "file://" + evil, "../" * 9 + evil, "pipe:touch " + evil]
    prints = [good["fingerprint"], evil, "file=" + evil + ";" + good["fingerprint"]]
    for detail in details:
        for fingerprint in prints:
            for adapter in (good["adapter"], evil):
                state = midepoch.reseal({{**good, "detail": detail, "fingerprint": fingerprint, "adapter": adapter}})
                watching = True
                try:
                    loader.load_state_dict(state)
                    refused = False
                except midepoch.StateError:
                    refused = True
                finally:
                    watching = False
                tried += 1
                told.append((name, refused))
print(json.dumps([tried, seen, told]))
"""


def sources_for_audit(folder: str) -> Any:
    """A name and a loader, for each kind of state."""
    yield "dataloader", numbers()
    yield "replay", midepoch.wrap(sources.Restartable(20))
    try:
        import webdataset as wds

        from support.webdataset_sources import compress, make_shards
    except ImportError:
        return
    urls = make_shards(Path(folder) / "shards", [4, 6])
    for name, given in (("indexed", urls), ("streamed", compress(urls))):
        dataset = wds.WebDataset(given, shardshuffle=False).batched(2, collation_fn=list)
        loader = midepoch.wrap(DataLoader(dataset, batch_size=None), seed=1, index_cache=folder)
        next(iter(loader))
        yield name, loader


def test_a_state_opens_nothing_whatever_it_names(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    program = AUDITED.format(here=[str(Path(__file__).parent), str(TESTS)], evil=str(evil), folder=str(tmp_path))
    run = forking.run(["-c", program])
    assert run.returncode == 0, run.stderr
    tried, seen, told = json.loads(run.stdout)
    assert tried >= 4 * 12 or len({name for name, _ in told}) < 4
    assert any(refused for _, refused in told) and not all(refused for _, refused in told)
    named = [each for each in seen if "evil" in each[1] or each[0] != "open"]
    assert not named, named
    # A replay or a stream may look at its own shards, as its own code names them.
    assert all(str(tmp_path / "shards") in arguments or "/proc/" in arguments for _, arguments in seen), seen
    assert not evil.exists()


def test_a_state_of_a_replay_without_its_detail_is_refused() -> None:
    loader = midepoch.wrap(sources.numbers, seed=0)
    next(iter(loader))
    for detail in ("", "varies;workers=0;digest="):
        with pytest.raises(midepoch.StateCorruptError):
            loader.load_state_dict(midepoch.reseal({**loader.state_dict(), "detail": detail}))


# --- indexes ---


@pytest.fixture
def urls(tmp_path: Path) -> Any:
    shards = pytest.importorskip("support.webdataset_sources", reason="webdataset is not installed")
    return shards.make_shards(tmp_path / "shards", [4, 6, 3])


def indexed(urls: list[str], cache: Path) -> list[Any]:
    import webdataset as wds

    dataset = wds.WebDataset(urls, shardshuffle=False).map(lambda sample: int(sample["cls"]))
    return list(midepoch.wrap(dataset.batched(2, collation_fn=list), seed=1, index_cache=cache))


def own_folder(cache: Path) -> Path:
    return cache / f"webdataset-{os.geteuid()}"


def test_indexes_are_the_user_s_alone_whatever_the_mask(urls: list[str], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        whole = indexed(urls, tmp_path / "cache")
    finally:
        os.umask(before)
    folder = own_folder(tmp_path / "cache")
    assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    assert len(list(folder.glob("*.index"))) == 3 == len(list(folder.iterdir()))
    assert indexed(urls, tmp_path / "cache") == whole


def planted(folder: Path, urls: list[str], tmp_path: Path) -> None:
    """An index that is sound in itself, and leaves samples out."""
    from midepoch.adapters.webdataset import index

    indexed(urls, tmp_path / "theirs")
    folder.mkdir(exist_ok=True)
    for each in own_folder(tmp_path / "theirs").glob("*.index"):
        line, _, body = each.read_bytes().partition(b"\n")
        head = json.loads(line)
        count = head["samples"]
        kept = body[: 8 * (count - 1)] + body[8 * count : 8 * (2 * count - 1)]
        head["samples"] = count - 1
        head["crc"] = index._crc(head, kept)
        (folder / each.name).write_bytes(json.dumps(head).encode() + b"\n" + kept)


@pytest.mark.parametrize("how", ["writable", "link", pytest.param("another's", marks=AS_ROOT)])
def test_a_folder_that_others_may_have_filled_is_not_believed(how: str, urls: Any, tmp_path: Path, caplog: Any) -> None:
    whole = indexed(urls, tmp_path / "good")
    cache = tmp_path / "shared"
    cache.mkdir()
    cache.chmod(0o1777)
    folder = own_folder(cache)
    planted(folder, urls, tmp_path)
    assert sum(map(len, indexed(urls, cache))) == 10, "in a folder of one's own it would be believed"
    if how == "writable":
        folder.chmod(0o770)
    elif how == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        os.chown(folder, 65534, 65534)
    content = {each.name: each.read_bytes() for each in folder.iterdir()}
    with caplog.at_level(logging.WARNING, "midepoch.webdataset"):
        assert indexed(urls, cache) == whole
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 1 and "set MIDEPOCH_CACHE or index_cache= to a folder" in told[0]
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == content, "nothing was written there"


@AS_ROOT
def test_users_who_share_a_folder_keep_indexes_apart(urls: list[str], tmp_path: Path) -> None:
    cache = tmp_path / "team"
    cache.mkdir()
    cache.chmod(0o777)
    whole = indexed(urls, cache)

    def work() -> None:
        assert indexed(urls, cache) == whole

    faults.as_nobody(tmp_path, work)
    owners = {each.name: each.stat().st_uid for each in cache.iterdir()}
    assert owners == {"webdataset-0": 0, "webdataset-65534": 65534}
    assert all(len(list(each.glob("*.index"))) == 3 for each in cache.iterdir())


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    from midepoch.adapters.webdataset.index import default_cache

    for name in ("MIDEPOCH_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])  # as in a container whose user has no entry
    assert default_cache().name == f"midepoch-{os.geteuid()}"
