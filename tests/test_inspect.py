"""`midepoch inspect`: every kind of checkpoint, edited copies, damaged and hostile files."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

import forking

import midepoch
from midepoch.errors import MidepochError, SnapshotError, StateError
from midepoch.tools.inspection import look, seek

dcp: Any = torch.distributed.checkpoint


def make(size: int = 40, seed: int = 3) -> Any:
    return midepoch.wrap(DataLoader(TensorDataset(torch.arange(size)), batch_size=4, shuffle=True), seed=seed)


def after(batches: int) -> Any:
    loader = make()
    for _, _ in zip(range(batches), loader, strict=False):
        pass
    return loader


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forking.run(["-m", "midepoch", "inspect", *arguments], timeout=120)


def snapshot(path: Path, batches: int = 3) -> Any:
    loader, model = make(), torch.nn.Linear(1, 1)
    saver = midepoch.Snapshot(path, model=model, data=loader, signals=())
    for _, _ in zip(range(batches), loader, strict=False):
        saver.step()
    saver.save()
    return loader.state_dict()


def test_a_snapshot_as_a_person_reads_it(tmp_path: Path) -> None:
    snapshot(tmp_path / "snapshot.pt")
    done = inspect(str(tmp_path / "snapshot.pt"))
    assert done.returncode == 0, done.stderr
    told = "snapshot, saved 20", "just now", "steps 3", "parts.data", "dataloader", "12 of 40 (30.0%)", "1 ranks"
    for words in (*told, "batch size 4", "holds"):
        assert words in done.stdout, words


def test_for_programs(tmp_path: Path) -> None:
    state = snapshot(tmp_path / "snapshot.pt")
    found = json.loads(inspect(str(tmp_path / "snapshot.pt"), "--json").stdout)
    assert found["kind"] == "snapshot" and found["steps"] == 3 and found["problems"] == []
    assert found["states"] == [
        {"file": str(tmp_path / "snapshot.pt"), "keys": ["parts", "data"], "problem": "", "state": state}
    ]


def write_json(path: Path, state: Any) -> None:
    path.write_text(json.dumps({"step": 3, "callbacks": [{"loader": state}]}))


def write_bare(path: Path, state: Any) -> None:
    path.write_text(json.dumps(state))


def write_torch(path: Path, state: Any) -> None:
    torch.save({"weights": torch.zeros(3), "loops": {"fit": (1, {"loader": state})}}, path)


def write_folder(path: Path, state: Any) -> None:
    path.mkdir()
    torch.save(state, path / "custom_checkpoint_0.pkl")
    torch.save({"x": torch.zeros(3)}, path / "model.pt")


def write_shards(path: Path, state: Any) -> None:
    dcp.save({"loader": dict(state), "model": {"weight": torch.zeros(3)}}, checkpoint_id=str(path))


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_json, "callbacks.0.loader"),
        (write_bare, ""),
        (write_torch, "loops.fit.1.loader"),
        (write_folder, ""),
        (write_shards, "loader"),
    ],
)
def test_every_kind_of_checkpoint(write: Any, name: str, tmp_path: Path) -> None:
    state = after(3).state_dict()
    write(tmp_path / "checkpoint", state)
    (place,) = look(tmp_path / "checkpoint").states
    assert (place.name, place.state, place.problem) == (name, state, "")


def test_a_checkpoint_of_lightnings(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

    class Model(BoringModel):
        def train_dataloader(self) -> Any:
            return midepoch.wrap(DataLoader(RandomDataset(32, 40), batch_size=4, shuffle=True), seed=3)

        def val_dataloader(self) -> Any:
            return []

    trainer = lightning.Trainer(
        max_steps=3, logger=False, accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Model())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    contents = look(tmp_path / "last.ckpt")
    assert [place.state["position"] for place in contents.states] == [12]
    assert "combined_loader" in contents.states[0].name


# --- edited copies ------------------------------------------------------------------------------------------------


def test_a_copy_of_lightnings_in_which_the_loader_stands_elsewhere(tmp_path: Path) -> None:
    """The checkpoint has the state twice, and each of both is read by somebody."""
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel

    from midepoch.adapters.trainers.lightning import ExactResume

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0].tolist())
            return super().training_step(torch.zeros(1, 32), batch_idx)

    def fit(steps: int, checkpoint: Path | None = None, **settings: Any) -> list[Any]:
        seen.clear()
        trainer = lightning.Trainer(
            max_steps=steps, logger=False, accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path,
            enable_model_summary=False, enable_checkpointing=False, limit_val_batches=0, **settings,
        )  # fmt: skip
        trainer.fit(Model(), make(), ckpt_path=checkpoint, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return list(seen)

    seen: list[Any] = []
    whole = [batch.tolist() for epoch in (0, 1) for (batch,) in chosen(epoch)]
    variants: list[dict[str, Any]] = [{}, {"callbacks": [ExactResume()]}]
    for number, settings in enumerate(variants):
        assert fit(3, **settings) == whole[:3]
        out = tmp_path / f"out{number}.ckpt"
        assert seek(tmp_path / "3.ckpt", out, epoch=1, position=20).problem == ""
        assert {place.state["position"] for place in look(out).states} == {20}
        assert len(look(out).states) == 1 + number
        assert fit(5, out, **settings)[:2] == whole[15:17]


def chosen(epoch: int) -> Any:
    loader = make()
    loader.seek(epoch=epoch)
    return loader


def test_one_state_in_several_places_and_several_states(tmp_path: Path) -> None:
    state, other = after(3).state_dict(), after(3).state_dict()
    torch.save({"a": state, "b": {"c": [(state,)]}, "other": other}, tmp_path / "in.pt")
    assert [place.name for place in look(tmp_path / "in.pt").states] == ["a", "b.c.0.0", "other"]
    with pytest.raises(StateError, match=r"'a', 'b\.c\.0\.0', 'other'; name one"):
        seek(tmp_path / "in.pt", tmp_path / "out.pt", epoch=1)
    seek(tmp_path / "in.pt", tmp_path / "out.pt", epoch=1, name="b.c.0.0")
    assert [place.state["epoch"] for place in look(tmp_path / "out.pt").states] == [1, 1, 0]


class Own:
    """A source with a state of its own, which midepoch carries as the detail of its states."""

    def __init__(self) -> None:
        self.epoch = self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch, self.given = self.epoch + (self.given == 10), self.given % 10
        while self.given < 10:
            self.given += 1
            yield self.epoch, self.given

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize("to", [(2, 0), (0, 4), (1, 8)])
@pytest.mark.parametrize(
    "source",
    [lambda: DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True), lambda: [[i] for i in range(40)],
     lambda: range(40).__iter__, lambda: DataLoader(Counting(), batch_size=4), Own],
    ids=["DataLoader", "list", "function", "iterable dataset", "own state"],
)  # fmt: skip
def test_a_copy_leads_where_seek_does_or_is_refused(
    source: Callable[[], Any], to: tuple[int, int], behind: int, tmp_path: Path
) -> None:
    """Whatever the source: a state without a detail is moved, and loading it is what tells."""

    def batches(loader: Any) -> str:
        return str(list(itertools.islice(loader, 3)))

    loader = midepoch.wrap(source(), seed=3)
    for _ in itertools.islice(loader, behind):
        pass
    state = loader.state_dict()
    write_json(tmp_path / "in", state)
    if state["detail"]:
        with pytest.raises(StateError, match="only its source can move it"):
            seek(tmp_path / "in", tmp_path / "out", epoch=to[0], position=to[1])
        return
    moved = seek(tmp_path / "in", tmp_path / "out", epoch=to[0], position=to[1]).state
    loader, other = midepoch.wrap(source(), seed=3), midepoch.wrap(source(), seed=3)
    try:
        loader.load_state_dict(moved)
    except StateError:
        # Only of the very beginning: a state from within an epoch shows that its place is enough.
        assert behind == 0 and (isinstance(loader.source, Own) or (to[1] and "iterable" in moved["adapter"]))
        assert (loader.epoch, loader.position) == (0, 0)
        return
    other.seek(*to)
    assert batches(loader) == batches(other)


def test_a_copy_in_which_the_loader_stands_elsewhere(tmp_path: Path) -> None:
    snapshot(tmp_path / "in.pt")
    done = inspect("--seek", "epoch=2,position=20", str(tmp_path / "in.pt"), str(tmp_path / "out.pt"))
    assert done.returncode == 0, done.stderr
    assert "20 of 40 (50.0%)" in done.stdout
    loader, model = make(), torch.nn.Linear(1, 1)
    with midepoch.Snapshot(tmp_path / "out.pt", model=model, data=loader, signals=()) as saver:
        assert saver.load()
        assert saver.steps == 3
    assert (loader.epoch, loader.position) == (2, 20)
    expected = make()
    expected.seek(2, 20)
    assert [batch[0].tolist() for batch in loader] == [batch[0].tolist() for batch in expected]
    before, now = (torch.load(tmp_path / name, weights_only=True) for name in ("in.pt", "out.pt"))
    for key in before.keys() - {"id", "parts"}:
        assert str(before[key]) == str(now[key])
    assert torch.equal(before["parts"]["model"]["weight"], now["parts"]["model"]["weight"])


@pytest.mark.parametrize(
    ("epoch", "position", "place"), [(2, None, (2, 0)), (None, 8, (0, 8)), (None, 40, (1, 0)), (0, 0, (0, 0))]
)
def test_one_of_both(epoch: int | None, position: int | None, place: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "in", after(3).state_dict())
    seek(tmp_path / "in", tmp_path / "out", epoch=epoch, position=position)
    (found,) = look(tmp_path / "out").states
    assert found.problem == ""
    loader = make()
    loader.load_state_dict(found.state)
    assert (loader.epoch, loader.position) == place


def test_what_cannot_be_sought_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    state = after(3).state_dict()
    path.write_text(json.dumps([state, state]))
    with pytest.raises(StateError, match=r"has these states: '0', '1'; name one of them"):
        seek(path, out, epoch=1)
    assert seek(path, tmp_path / "named", epoch=1, name="1").keys == (1,)
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"position must be in \[0, 40\]"):
        seek(path, out, position=41)
    with pytest.raises(ValueError, match="epoch must be an integer from 0"):
        seek(path, out, epoch=-1)
    with pytest.raises(SnapshotError, match="already exists"):
        seek(path, path, epoch=1)
    path.write_text(json.dumps({**state, "epoch": 7}))
    with pytest.raises(StateError, match=r"is damaged .*checksum"):
        seek(path, out, epoch=1)
    path.write_text(json.dumps(midepoch.reseal({**state, "detail": "its own"})))
    with pytest.raises(StateError, match=r"call loader\.seek in the training script"):
        seek(path, out, epoch=1)
    streamed = midepoch.wrap(range(5).__iter__, seed=0)
    next(iter(streamed))
    path.write_text(json.dumps(streamed.state_dict()))
    with pytest.raises(StateError, match=r"adapter iterable\) has a detail, so only its .*call loader\.seek"):
        seek(path, out, position=2)
    with pytest.raises(SnapshotError, match="is a folder"):
        seek(tmp_path, out, epoch=1)
    with pytest.raises(SnapshotError, match=r"was not written .*choose another place"):
        write_bare(path, state)
        seek(path, tmp_path / "nowhere" / "out", epoch=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "named"]
    for wrong in ("epoch=first", "epoch=1,epoch=2", "epoch=1,"):
        done = inspect(str(path), "--seek", wrong, str(out))
        assert done.returncode == 2 and "epoch=2,position=100000" in done.stderr
    assert inspect(str(path), "--seek", "epoch=1").returncode == 2


# --- damaged and hostile files --------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return (os.system, (f"touch {os.environ['EVIL']}",))


def test_no_code_of_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    state = after(3).state_dict()
    torch.save({"loader": state, "x": Evil()}, tmp_path / "new.pt")
    torch.save({"loader": state, "x": Evil()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("new.pt", "old.pt", "plain.pt"):
        with pytest.raises(SnapshotError):
            look(tmp_path / name)
    with pytest.raises(SnapshotError, match=r"posix\.system, which midepoch does not unpickle"):
        look(tmp_path / "new.pt")
    write_shards(tmp_path / "shards", state)
    entry = next((tmp_path / "shards").glob("*.distcp"))
    metadata = (tmp_path / "shards" / ".metadata").read_bytes()
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(SnapshotError, match="damaged, or from another version"):
        look(tmp_path / "shards")
    (tmp_path / "shards" / ".metadata").write_bytes(metadata)
    entry.unlink()
    with pytest.raises(SnapshotError, match="cannot be read"):
        look(tmp_path / "shards")
    entry.symlink_to("/etc/passwd")
    with pytest.raises(SnapshotError, match="outside of itself"):
        look(tmp_path / "shards")
    (tmp_path / "shards" / ".metadata").write_bytes(
        metadata.replace(entry.name.encode(), b"../" + entry.name[3:].encode())
    )
    with pytest.raises(SnapshotError, match="outside of itself"):
        look(tmp_path / "shards")
    assert not (tmp_path / "evil").exists()


def test_what_a_checkpoint_of_many_files_names_stays_inside(tmp_path: Path) -> None:
    """Also where it would first change the class by which names are told from paths."""
    state = after(3).state_dict()
    write_shards(tmp_path / "shards", state)
    entry = next((tmp_path / "shards").glob("*.distcp"))
    entry.rename(tmp_path / entry.name)
    file = tmp_path / "shards" / ".metadata"
    content = pickle.loads(file.read_bytes())
    for info in content.storage_data.values():
        info.relative_path = f"../{entry.name}"
    outside = f"../{entry.name}".encode()
    named = b"X" + struct.pack("<I", len(outside)) + outside
    changes = b"\x80\x02cpathlib\nPurePosixPath\nN}X\x04\0\0\0name" + named + b"s\x86b0"
    others = b"\x80\x02ctorch.serialization\n_get_layout\n}X\x05\0\0\0cacheK\x01sb0"
    for before in (b"\x80\x02", changes, others):
        file.write_bytes(before + pickle.dumps(content, 2)[2:])
        with pytest.raises(SnapshotError, match=r"outside of itself|it would change a"):
            look(tmp_path / "shards")
    assert PurePosixPath("/a/b").name == "b"
    assert vars(torch.serialization)["_get_layout"].cache != 1


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_folder_with_a_pipe_in_it_is_not_waited_for(name: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", after(3).state_dict())
    (tmp_path / "shards" / name).unlink()
    os.mkfifo(tmp_path / "shards" / name)
    done = inspect(str(tmp_path / "shards"))
    assert done.returncode == 2 and "not a regular file" in done.stderr


def test_a_link_out_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    torch.save({"loader": after(3).state_dict()}, tmp_path / "other.pt")
    (tmp_path / "folder").mkdir()
    torch.save({"loader": after(5).state_dict()}, tmp_path / "folder" / "own.pt")
    (tmp_path / "folder" / "link.pt").symlink_to("../other.pt")
    assert [place.file.name for place in look(tmp_path / "folder").states] == ["own.pt"]


@pytest.mark.parametrize(
    "content", [b"", b"PK", b"PK\x03\x04junk", b"[" * 100_000, b"\xff\xfe", b'{"a": NaN', b"1" * 5000]
)
def test_what_is_no_checkpoint_is_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    done = inspect(str(tmp_path / "file.pt"))
    assert done.returncode == (1 if content[:2] == b"PK" else 2), done.stdout  # as files of torch.save begin
    assert done.stderr.startswith("midepoch: ") and "Traceback" not in done.stderr


def test_a_file_that_is_not_there_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot be read"):
        look(tmp_path / "nothing")
    with pytest.raises(SnapshotError, match="has no file that ends in"):
        look(tmp_path)


def test_a_content_that_refers_to_itself(tmp_path: Path) -> None:
    content: dict[str, Any] = {"loader": after(3).state_dict()}
    content["self"] = content
    deep: Any = content
    for _ in range(150):
        deep = [deep]
    torch.save({"shallow": content, "deep": deep}, tmp_path / "checkpoint.pt")
    (place,) = look(tmp_path / "checkpoint.pt").states
    assert place.name == "shallow.loader"


def test_what_a_terminal_would_obey_is_shown(tmp_path: Path) -> None:
    state = after(3).state_dict()
    write_json(tmp_path / "in", {"\x1b[2J\ud800\u202e": state})
    for options in ((), ("--json",), ("--seek", "epoch=1", str(tmp_path / "out"))):
        done = inspect(str(tmp_path / "in"), *options)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout and "\u202e" not in done.stdout
        assert "[2J" in done.stdout and "ud800" in done.stdout


@pytest.mark.parametrize("kind", ["bytearray", "compressed", "JSON", "references", "pipe", "device"])
def test_files_that_ask_for_memory_or_time_without_end(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "bytearray":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("file/data.pkl", b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.")
            archive.writestr("file/version", b"3\n")
            archive.writestr("file/byteorder", b"little")
    elif kind == "compressed":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("file/data.pkl", b"\x80\x02]" + b"]" * (300 << 20))
    elif kind == "JSON":
        path.write_text("[" + "[]," * (20 << 20) + "[]]")
    elif kind == "references":
        nested: Any = [after(3).state_dict()]
        for _ in range(60):
            nested = [nested, nested]
        torch.save(nested, path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = Path("/dev/zero")
    code = """
import resource, sys
from midepoch.tools.cli import main
sys.argv = sys.argv[1:]
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = forking.run(["-c", code, "midepoch", "inspect", str(path)], timeout=60)
    assert done.returncode == (1 if kind in ("bytearray", "compressed") else 2), done.stdout + done.stderr
    assert done.stderr.startswith(f"midepoch: {path} ") and "Traceback" not in done.stderr
    assert int(done.stdout.split()[-1]) < 4 << 20, "KiB"


def test_a_folder_with_a_file_that_is_not_unpickled(tmp_path: Path) -> None:
    """Such as that of Hugging Face's Trainer, with NumPy's generators beside its loader's state."""
    torch.save({"numpy": Evil()}, tmp_path / "rng_state.pth", pickle_module=HarmlessPickle)
    with pytest.raises(SnapshotError, match="does not unpickle"):
        look(tmp_path)
    torch.save({"loader": after(3).state_dict()}, tmp_path / "scheduler.pt")
    done = inspect(str(tmp_path))
    assert done.returncode == 0 and "12 of 40" in done.stdout and "damaged" not in done.stdout


class HarmlessPickle:
    """What torch.save asks of a module: here each Evil is pickled as a call that is not allowed, of nothing bad."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (os.getcwd, ()) if isinstance(value, Evil) else NotImplemented


def test_the_format_of_old_is_named(tmp_path: Path) -> None:
    torch.save(after(3).state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(SnapshotError, match=r"torch\.save's format from before torch 1\.6: save it again"):
        look(tmp_path / "old.pt")


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    snapshot(path)
    data = bytearray(path.read_bytes())
    where = data.index(torch.load(path, weights_only=True)["parts"]["model"]["weight"].numpy().tobytes())
    data[where] ^= 1
    path.write_bytes(data)
    done = inspect(str(path))
    assert done.returncode == 1
    assert "damaged: the checksum of" in done.stdout
    write_json(tmp_path / "edited", {**after(3).state_dict(), "position": 16})
    done = inspect(str(tmp_path / "edited"))
    assert done.returncode == 1
    assert "use an older one" in " ".join(done.stdout.split())


@pytest.mark.parametrize("kept", [0.3, 0.99])
def test_a_file_that_was_cut_off_is_damaged(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    snapshot(path)
    os.truncate(path, int(path.stat().st_size * kept))
    for options in ([], ["--json"]):
        done = inspect(str(path), *options)
        assert done.returncode == 1 and "snapshot.pt is damaged" in done.stderr and not done.stdout
    done = inspect(str(path), "--seek", "epoch=1", str(tmp_path / "moved.pt"))
    assert done.returncode == 2 and "snapshot.pt is damaged" in done.stderr


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    """Whatever became of a file: what is in it, or an error of midepoch's."""
    import random

    generator = random.Random(5)
    snapshot(tmp_path / "snapshot.pt")
    write_shards(tmp_path / "shards", after(3).state_dict())
    write_json(tmp_path / "state.json", after(3).state_dict())
    files = [tmp_path / "snapshot.pt", tmp_path / "shards" / ".metadata", tmp_path / "state.json"]
    refused = 0
    for file in files:
        whole = file.read_bytes()
        for _ in range(1000 if os.environ.get("MIDEPOCH_CHAOS") else 80):
            data = bytearray(whole)
            for _ in range(generator.choice((1, 1, 4))):
                data[generator.randrange(len(data))] = generator.randrange(256)
            if generator.random() < 0.2:
                del data[generator.randrange(len(data)) :]
            file.write_bytes(data)
            try:
                look(tmp_path / "shards" if file.name == ".metadata" else file)
            except MidepochError:
                refused += 1
        file.write_bytes(whole)
    assert refused > 20
