"""`midepoch inspect`: every kind of checkpoint, damaged and hostile files."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.format_utils
from torch.utils.data import DataLoader, TensorDataset

import midepoch
from midepoch.errors import MidepochError, SnapshotError
from midepoch.tools import inspection
from midepoch.tools.inspection import look
from support import commands, sources

dcp: Any = torch.distributed.checkpoint


def make() -> Any:
    return midepoch.wrap(DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True), seed=3)


def saved() -> Any:
    """A state after 3 batches."""
    loader = make()
    sources.taken(loader, 3)
    return loader.state_dict()


def inspect(*arguments: str | Path) -> commands.Done:
    return commands.run("inspect", *arguments)


def snapshot(path: Path) -> Any:
    """The state in a snapshot after 3 batches."""
    loader, model = make(), torch.nn.Linear(1, 1)
    saver = midepoch.Snapshot(path, model=model, data=loader, signals=())
    for _, _ in zip(range(3), loader, strict=False):
        saver.step()
    saver.save()
    return loader.state_dict()


def test_a_snapshot_as_a_person_and_as_a_program_read_it(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    state = snapshot(path)
    done = inspect(path)
    assert done.returncode == 0, done.stderr
    told = "snapshot, saved 20", "steps 3", "parts.data", "dataloader", "12 of 40 (30.0%)", "1 ranks"
    for words in (*told, "batch size 4", "holds"):
        assert words in done.stdout, words
    found = json.loads(inspect(path, "--json").stdout)
    assert found["kind"] == "snapshot" and found["steps"] == 3 and found["problems"] == []
    assert found["states"] == [{"file": str(path), "keys": ["parts", "data"], "problem": "", "state": state}]


def write_json(path: Path, state: Any) -> None:
    path.write_text(json.dumps({"step": 3, "callbacks": [{"loader": state}]}))


def write_torch(path: Path, state: Any) -> None:
    torch.save({"weights": torch.zeros(3), "loops": {"fit": (1, {"loader": state})}}, path)


def write_folder(path: Path, state: Any) -> None:
    path.mkdir()
    torch.save(state, path / "custom_checkpoint_0.pkl")
    torch.save({"x": torch.zeros(3)}, path / "model.pt")


@pytest.mark.parametrize(
    ("write", "name"), [(write_json, "callbacks.0.loader"), (write_torch, "loops.fit.1.loader"), (write_folder, "")]
)
def test_every_kind_of_checkpoint(write: Any, name: str, tmp_path: Path) -> None:
    write(tmp_path / "checkpoint", saved())
    (place,) = look(tmp_path / "checkpoint").states
    assert (place.name, place.state, place.problem) == (name, saved(), "")


class Evil:
    def __reduce__(self) -> Any:
        return (os.system, (f"touch {os.environ['EVIL']}",))


def test_no_code_of_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    for new in (True, False):
        torch.save({"loader": saved(), "x": Evil()}, tmp_path / f"{new}.pt", _use_new_zipfile_serialization=new)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    for name, told in (("True", r"posix\.system, which midepoch does not unpickle"), ("False", ""), ("plain", "")):
        with pytest.raises(SnapshotError, match=told):
            look(tmp_path / f"{name}.pt")
    assert not (tmp_path / "evil").exists()


def test_a_folder_of_distributed_checkpoint_names_the_cure(tmp_path: Path) -> None:
    loader, shards = make(), tmp_path / "shards"
    sources.taken(loader, 3)
    dcp.save({"loader": loader, "model": {"weight": torch.zeros(3)}}, checkpoint_id=str(shards))
    done = inspect(shards)
    assert done.returncode == 2
    module, file = f"dcp_to_torch {shards} FILE", tmp_path / "whole.pt"
    assert f"python -m torch.distributed.checkpoint.format_utils {module}" in done.stderr
    dcp.format_utils.dcp_to_torch_save(shards, file)
    (place,) = look(file).states
    assert (place.name, place.state, place.problem) == ("loader", loader.state_dict(), "")


@pytest.mark.parametrize(
    "content", [b"", b"PK", b"PK\x03\x04junk", b"[" * 100_000, b"\xff\xfe", b'{"a": NaN', b"1" * 5000]
)
def test_what_is_no_checkpoint_is_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    done = inspect(tmp_path / "file.pt")
    assert done.returncode == (1 if content[:2] == b"PK" else 2), done.stdout  # as files of torch.save begin
    assert done.stderr.startswith("midepoch: ") and "Traceback" not in done.stderr


def test_a_content_that_refers_to_itself(tmp_path: Path) -> None:
    content: dict[str, Any] = {"loader": saved()}
    content["self"] = content
    deep: Any = content
    for _ in range(150):
        deep = [deep]
    torch.save({"shallow": content, "deep": deep}, tmp_path / "checkpoint.pt")
    (place,) = look(tmp_path / "checkpoint.pt").states
    assert place.name == "shallow.loader"


def test_what_a_terminal_would_obey_is_shown(tmp_path: Path) -> None:
    write_json(tmp_path / "in", {"\x1b[2J\ud800\u202e": saved()})
    for options in ((), ("--json",)):
        done = inspect(tmp_path / "in", *options)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout and "\u202e" not in done.stdout
        assert "[2J" in done.stdout and "ud800" in done.stdout


def test_files_that_ask_for_memory_or_time_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And such as are not there, or are no files."""
    monkeypatch.setattr(inspection, "_MOST_CONTAINERS", 1000)
    nested: Any = [saved()]
    for _ in range(60):
        nested = [nested, nested]
    torch.save(nested, tmp_path / "references")
    with zipfile.ZipFile(tmp_path / "compressed", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("file/data.pkl", b"\x80\x02]" + b"]" * 100_000)
    (tmp_path / "endless").touch()
    os.truncate(tmp_path / "endless", 1 << 42)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    for path, status, told in (
        (tmp_path / "references", 2, "has more containers in it than any checkpoint"),
        (tmp_path / "compressed", 1, "is compressed or huge"),
        (tmp_path / "endless", 2, "it is larger than any state"),
        (tmp_path / "pipe", 2, "is not a regular file"),
        (Path("/dev/zero"), 2, "is not a regular file"),
        (tmp_path / "nothing", 2, "cannot be read"),
        (tmp_path / "empty", 2, "has no file that ends in"),
    ):
        done = inspect(path)
        assert done.returncode == status and told in done.stderr, (path, done)
        assert done.stderr.startswith(f"midepoch: {path} ")


def test_a_folder_with_a_file_that_is_not_unpickled(tmp_path: Path) -> None:
    """Such as that of Hugging Face's Trainer, with NumPy's generators beside its loader's state."""
    torch.save({"numpy": Evil()}, tmp_path / "rng_state.pth", pickle_module=HarmlessPickle)
    with pytest.raises(SnapshotError, match="does not unpickle"):
        look(tmp_path)
    torch.save({"loader": saved()}, tmp_path / "scheduler.pt")
    done = inspect(tmp_path)
    assert done.returncode == 0 and "12 of 40" in done.stdout and "damaged" not in done.stdout


class HarmlessPickle:
    """What torch.save asks of a module: here each Evil is pickled as a call that is not allowed, of nothing bad."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (os.getcwd, ()) if isinstance(value, Evil) else NotImplemented


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    snapshot(path)
    data = bytearray(path.read_bytes())
    where = data.index(torch.load(path, weights_only=True)["parts"]["model"]["weight"].numpy().tobytes())
    data[where] ^= 1
    path.write_bytes(data)
    done = inspect(path)
    assert done.returncode == 1 and "damaged: the checksum of" in done.stdout
    for kept in (0.99, 0.3):
        os.truncate(path, int(len(data) * kept))
        for options in ([], ["--json"]):
            done = inspect(path, *options)
            assert done.returncode == 1 and "snapshot.pt is damaged" in done.stderr and not done.stdout
    write_json(tmp_path / "edited", {**saved(), "position": 16})
    done = inspect(tmp_path / "edited")
    assert done.returncode == 1 and "use an older one" in " ".join(done.stdout.split())


@pytest.mark.parametrize("kind", ["snapshot", "json"])
def test_a_copy_that_skips_is_what_a_loader_that_skips_saves(kind: str, tmp_path: Path) -> None:
    path, out = tmp_path / "saved", tmp_path / "out"
    state = snapshot(path)
    if kind == "json":
        path.write_text(json.dumps({"loader": state}))
    before = path.read_bytes()
    done = inspect(path, out, "--skip", "0:16..24", "--skip", "2:0..8")
    assert done.returncode == 0, done.stderr
    assert "12 of 40" in done.stdout and path.read_bytes() == before
    (found,) = look(out).states
    loader, resumed = make(), make()
    loader.load_state_dict(state)
    loader.skip(16, 24)
    loader.skip(0, 8, epoch=2)
    assert found.state == loader.state_dict()
    if kind == "snapshot":
        assert midepoch.Snapshot(out, model=torch.nn.Linear(1, 1), data=resumed, signals=()).load()
    else:
        resumed.load_state_dict(found.state)
    assert resumed.skipped == {0: [(16, 24)], 2: [(0, 8)]}
    rest = [batch[0].tolist() for batch in resumed]
    assert rest == [batch[0].tolist() for batch in loader] and sum(map(len, rest)) == 40 - 12 - 8


@pytest.mark.parametrize(("arguments", "told"), [
    (["--skip", "0:16-24"], "is no range of positions"),
    (["--skip", "0:24..16"], "skip(24, 16): give a range of at least one position, within [0, 40]"),
    (["--skip", "0:16..41"], "skip(16, 41): give a range of at least one position, within [0, 40]"),
    (["--skip", "0:1..2", "--state", "parts.train"], "has 1 states of loaders (parts.data): name one of them"),
    (["--skip", "0:1..2"], "exists already"),
    ([], "belong together"),
])  # fmt: skip
def test_a_copy_that_cannot_skip_is_not_written(arguments: list[str], told: str, tmp_path: Path) -> None:
    path, out = tmp_path / "saved", tmp_path / "out"
    snapshot(path)
    before = path.read_bytes()
    if told == "exists already":
        out.write_text("another's")
    done = inspect(path, out, *arguments)
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert path.read_bytes() == before
    assert (out.read_text() == "another's") if told == "exists already" else not out.exists()


def test_what_cannot_be_edited_is_named(tmp_path: Path) -> None:
    path, out = tmp_path / "saved", tmp_path / "out"
    loader = make()
    list(loader)
    next(iter(loader))
    path.write_text(json.dumps([loader.state_dict(), loader.state_dict()]))
    for ranges, name, told in (
        (["0:1..2"], "0", "epoch 0 has ended, .*: name epoch 1 or a later one"),
        ([f"1:{2 * each}..{2 * each + 1}" for each in range(20)] * 2, "1", ""),
        (["1:0..1"], None, r"has 2 states of loaders \(0, 1\)"),
        ([f"{each}:{2 * part}..{2 * part + 1}" for each in range(1, 40) for part in range(20)], "0", "a state holds"),
    ):
        if not told:
            inspection.skip(path, ranges, tmp_path / "sound", name)
            continue
        with pytest.raises((ValueError, MidepochError), match=told):
            inspection.skip(path, ranges, out, name)
        assert not out.exists()
    assert [each.state["omit"] != "" for each in look(tmp_path / "sound").states] == [False, True]
    with pytest.raises(SnapshotError, match="is a folder: name the file"):
        inspection.skip(tmp_path, ["0:1..2"], out)
    path.write_text("{}")
    with pytest.raises(SnapshotError, match=r"has 0 states of loaders"):
        inspection.skip(path, ["0:1..2"], out)
    path.write_text(json.dumps({**loader.state_dict(), "seed": 99}))
    with pytest.raises(midepoch.StateError, match="checksum"):
        inspection.skip(path, ["1:1..2"], out)
