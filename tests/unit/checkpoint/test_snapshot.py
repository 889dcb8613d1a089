"""Snapshots: what is restored, what damage does, and whoever is killed at whatever instant."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import os
import random
import re
import signal
import sys
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import MidepochError, MidepochWarning, Snapshot, SnapshotError, StateMismatchError
from midepoch.checkpoint import files
from midepoch.state.codec import decode, encode
from support import fault_sources, forking, sources
from support.places import TESTS


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


class Run:
    """A small training run whose every number depends on data, augmentations and the process's generators."""

    def __init__(self, path: Path, seed: int = 5, size: int = 40, width: int = 3, **settings: Any) -> None:
        sources.under_other_seeds(1)
        self.model = torch.nn.Linear(width, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        data = TensorDataset(torch.arange(float(size * width)).reshape(size, width))
        self.loader = midepoch.wrap(DataLoader(data, batch_size=4, shuffle=True), seed=seed)
        self.batches = iter(self.loader)
        self.snapshot = Snapshot(
            path, model=self.model, optimizer=self.optimizer, schedule=self.schedule, data=self.loader,
            **{"signals": (), **settings},
        )  # fmt: skip

    def train(self, steps: int) -> list[Any]:
        """What each step saw."""
        seen: list[Any] = []
        while True:
            for (batch,) in self.batches:
                noise = [random.random(), float(np.random.standard_normal()), float(torch.rand(()))]
                loss = (self.model(batch / 100) - sum(noise)).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.schedule.step()
                seen.append([batch.tolist(), noise, float(loss.detach())])
                self.snapshot.step()
                if len(seen) == steps:
                    return seen
            self.batches = iter(self.loader)


@pytest.mark.parametrize("cut", [9, 10])
def test_a_run_goes_on_as_if_nothing_had_happened(cut: int, tmp_path: Path) -> None:
    path, whole = tmp_path / "run" / "snapshot.pt", Run(tmp_path / "other.pt").train(12)
    first = Run(path)
    assert not first.snapshot.load()
    head = first.train(cut)
    first.snapshot.save()
    second = Run(path)
    assert second.snapshot.load() and second.snapshot.steps == cut
    assert head + second.train(12 - cut) == whole


def test_a_dataset_that_has_the_two_methods_itself(tmp_path: Path) -> None:
    class Samples(midepoch.StatefulIterable):
        def __init__(self) -> None:
            self.sampler = torch.utils.data.SequentialSampler(range(9))

        def __iter__(self) -> Iterator[int]:
            return iter(self.sampler)

    samples, other = Samples(), Samples()
    assert sources.taken(samples, 4) == [0, 1, 2, 3]
    Snapshot(tmp_path / "snapshot.pt", signals=(), data=samples).save(in_flight=1)
    try:
        raise KeyError
    except KeyError:  # the whole run is in this clause, and nothing is on its way out
        with pytest.raises(SnapshotError, match="in_flight=99"):
            Snapshot(tmp_path / "other.pt", signals=(), data=samples).save(in_flight=99)
    Snapshot(tmp_path / "snapshot.pt", signals=(), data=other).load()
    assert list(other) == [3, 4, 5, 6, 7, 8]


# --- what does not fit ---


MODEL = torch.nn.Linear(1, 1)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "there is nothing to save"),
    ({"parts": {}}, "there is nothing to save"),
    ({"data": [1, 2]}, "data is a list without state_dict"),
    ({"parts": {"keep": 3}}, "keep is a int without state_dict"),
    ({"parts": {3: MODEL}}, "the names in parts must be str, got 3"),
    ({"parts": MODEL}, r"parts must be a mapping .* got a Linear: .* parts=\{'parts': \.\.\.\}"),
    ({"model": MODEL, "parts": {"model": MODEL}}, "model is both in parts and a keyword: pass each part once"),
    *[({"model": MODEL, name: value}, "must be an int of at least 1")
      for name, value in (("every", 0), ("every", 1.5), ("every", True), ("keep", 0))],
]  # fmt: skip


@pytest.mark.parametrize("remember", [0, 1])
def test_what_no_save_could_know_is_told_at_the_first_step(remember: int, tmp_path: Path) -> None:
    """A validation of the same kind, of which no batch is in flight, is none of its business."""
    made = [StatefulDataLoader(list(range(8)), batch_size=2) for _ in range(2)]
    data, other = midepoch.wrap(made[0], remember=remember), midepoch.wrap(made[1])
    told = pytest.warns(MidepochWarning, match="data keeps no state .* while 1 are in flight, .* pass remember=1 to")
    with Snapshot(tmp_path / "snapshot.pt", signals=(), data=data, other=other) as snapshot:
        for _ in snapshot.epochs(1):
            list(other)
            next(_held := iter(data))
            with warnings.catch_warnings(action="error") if remember else told:
                snapshot.step(1)


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    """Of a step not only when a save is due: that of a preempted run would be lost."""
    for arguments, message in REFUSED:
        with pytest.raises((TypeError, ValueError), match=message):
            Snapshot("x.pt", signals=(), **arguments)
    run = Run(tmp_path / "snapshot.pt")
    run.train(3)
    wrong: list[Any] = [True, False, -1, 2.0, 0.0, None, "1", 1025]
    for in_flight in wrong:
        with pytest.raises(ValueError, match=rf"in_flight must be .*, got {re.escape(repr(in_flight))}$"):
            run.snapshot.step(in_flight)
        assert run.snapshot.steps == 3


def check_refused(path: Path, match: str, error: type[Exception] = SnapshotError, **settings: Any) -> None:
    """Fail unless a fresh run refuses the file, and everything is as it was."""

    def standing(run: Run) -> list[Any]:
        weights = [each.tolist() for each in run.model.state_dict().values()]
        numpys = np.random.get_state(legacy=False)["state"]["key"].tolist()
        place = run.loader.position, run.snapshot.steps, dict(run.optimizer.state)
        return [weights, random.getstate(), numpys, torch.get_rng_state().tolist(), place]

    run = Run(path, **settings)
    before = standing(run)
    with pytest.raises(error, match=match):
        run.snapshot.load()
    assert standing(run) == before


def saved(path: Path, steps: int = 3) -> Any:
    """What a run has saved after so many steps."""
    run = Run(path)
    run.train(steps)
    run.snapshot.save()
    return torch.load(path, weights_only=True)


def test_what_does_not_fit_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    saved(path)
    check_refused(path, "the seed differs: the state was saved with 5, this loader has 6", StateMismatchError, seed=6)
    check_refused(path, "size", StateMismatchError, size=41)
    check_refused(path, r"model differs at 'weight': the snapshot has shape \(1, 3\), this run shape", width=4)
    run, optim = Run(path), torch.optim
    weights, weight = list(run.model.parameters()), run.model.weight.clone()
    parts: dict[str, Any] = {"model": run.model, "data": run.loader}
    with pytest.raises(SnapshotError, match="the snapshot has data, model, optimizer, schedule, but this Snapshot has"):
        Snapshot(path, signals=(), parts=parts).load()
    grouped = optim.Adam([{"params": [each]} for each in weights])
    for optimizer, message in (
        (grouped, r"differs at 'param_groups': the snapshot has groups of \[2\] parameters"),
        (optim.SGD(weights), "is a SGD, but the snapshot has the state of a Adam"),
        (optim.AdamW(weights), "is a AdamW, but the snapshot has the state of a Adam"),
    ):
        with pytest.raises(SnapshotError, match=f"optimizer {message}"):
            Snapshot(path, signals=(), optimizer=optimizer, schedule=run.schedule, parts=parts).load()
    assert torch.equal(run.model.weight, weight)


def test_a_part_may_have_the_name_of_a_keyword(tmp_path: Path) -> None:
    names = ["path", "every", "keep", "signals", "exit_status", "group", "parts", "keywords"]
    path, one, other = tmp_path / "snapshot.pt", sources.Counter(), sources.Counter()
    other.given = 3
    Snapshot(path, signals=(), model=one, parts=dict.fromkeys(names, other)).save()
    assert torch.load(path, weights_only=True)["parts"].keys() == {"model", *names}
    other.given = 4
    assert Snapshot(path, signals=(), parts={"model": one, **dict.fromkeys(names, other)}).load()
    assert (one.given, other.given) == (0, 3)


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    counter: Any = sources.Counter()
    counter.given = np.float64(3)
    snapshot = Snapshot(tmp_path / "snapshot.pt", signals=(), counter=counter)
    with pytest.raises(SnapshotError, match="could not be loaded with weights_only=True"):
        snapshot.save()
    assert names(tmp_path) == []
    counter.given = 3.0
    snapshot.save()
    counter.given = lambda: 0  # cannot even be written
    with pytest.raises(SnapshotError, match="the previous snapshot is unchanged"):
        snapshot.save()
    fresh = sources.Counter()
    assert Snapshot(tmp_path / "snapshot.pt", signals=(), counter=fresh).load()
    assert fresh.given == 3.0
    assert names(tmp_path) == ["snapshot.pt"]


# --- whose file it is ---


def test_a_run_does_not_write_over_one_that_it_has_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    run, other = Run(path), Run(path)
    run.snapshot.save()
    with pytest.raises(SnapshotError, match=r"call load\(\) before the first batch"):
        other.snapshot.save()
    other.snapshot.load()
    other.snapshot.save()
    with pytest.raises(SnapshotError, match="another process writes to the same path"):
        run.snapshot.save()


def test_another_or_an_edited_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    torch.save(torch.nn.Linear(1, 1).state_dict(), path)
    check_refused(path, "not a snapshot of midepoch")
    path.unlink()
    content = saved(path)
    good = decode(content["generators"][0])
    wrong = [{}, {**good, "python": (3, (1, 2), None)}, {**good, "numpy": {}}, {**good, "torch": torch.zeros(3)}]
    twister = good["numpy"]["state"]
    for change in ({"pos": (1 << 31) - 8}, {"pos": -1}, {"pos": 625}, {"pos": True}, {"key": np.zeros(700, np.uint32)}):
        wrong.append({**good, "numpy": {**good["numpy"], "state": {**twister, **change}}})
    zeros, damage = torch.zeros(1, 3), list[Any]([None, -1, [1], {}])
    names = "id", "steps", "generators", "seed", "world_size"
    weights = 3, zeros.to_sparse(), zeros.to("meta"), zeros.T, "weight"
    models = [{**content["parts"]["model"], "weight": value} for value in weights]
    edits: list[tuple[str, Any, str]] = [
        ("midepoch_snapshot", 2, "has format 2, this midepoch reads 1"),
        *[(name, value, "is damaged") for name in names for value in damage],
        *[("parts", value, "is damaged") for value in damage[:3]],
        *[("generators", [text], ".") for text in ("", "junk", *map(encode, wrong))],
        *[("parts", {**content["parts"], "model": each}, "'weight'") for each in models],
    ]
    for name, value, message in edits:
        torch.save({**content, name: value}, path)
        check_refused(path, message, MidepochError)


def test_a_packed_snapshot_or_a_folder_in_it_is_refused(tmp_path: Path) -> None:
    """Packed records may take a thousand times their bytes. For a folder torch gives what happens to lie in memory."""
    path = tmp_path / "snapshot.pt"
    saved(path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, record in records.items():
            archive.writestr(name, record + bytes(1 << 20) * name.endswith("data.pkl"))
    check_refused(path, "is compressed")
    data[data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data/0")) + 38] |= 0x10  # of its attributes
    path.write_bytes(data)
    check_refused(path, "/data/0 is marked as a folder")


def test_a_scaler_that_was_off_is_refused_by_one_that_is_on(tmp_path: Path) -> None:
    class Scaler(sources.Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"scale": 2.0} if self.count else {}

    Snapshot(tmp_path / "snapshot.pt", signals=(), scaler=Scaler(0)).save()
    with pytest.raises(SnapshotError, match="scaler differs: its saved state is empty"):
        Snapshot(tmp_path / "snapshot.pt", signals=(), scaler=Scaler(1)).load()


# --- damage ---


def two_snapshots(path: Path) -> Any:
    """One after 3 steps, whose state is returned, beside one after 6."""
    run = Run(path, every=3)
    run.train(3)
    older = run.loader.state_dict()
    run.train(3)
    return older


def test_the_one_before_is_taken_where_the_newest_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    older = two_snapshots(path)
    assert names(tmp_path) == ["snapshot.pt", "snapshot.pt.1"]
    whole = path.read_bytes()
    cuts = [b"", whole[:1], whole[: len(whole) // 2], whole[:-1000], whole[:-1]]
    for damaged in cuts:  # bits that are flipped are in tests/fuzz
        path.write_bytes(damaged)
        run = Run(path)
        with pytest.warns(MidepochWarning, match=r"damaged.*loading the previous snapshot, .*snapshot.pt.1"):
            assert run.snapshot.load()
        assert (run.loader.state_dict(), run.snapshot.steps) == (older, 3)

    # What is written then leaves the sound one alone, and takes the damaged one's place.
    run.train(1)
    run.snapshot.save()
    assert torch.load(path, weights_only=True)["steps"] == 4
    assert torch.load(tmp_path / "snapshot.pt.1", weights_only=True)["steps"] == 3

    for each in (path, tmp_path / "snapshot.pt.1"):
        each.write_bytes(cuts[3])
    with pytest.raises(SnapshotError, match="no snapshot is sound"):
        Run(path).snapshot.load()


def test_checksums_are_written_where_torch_was_told_not_to(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        Run(tmp_path / "snapshot.pt").snapshot.save()
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert Run(tmp_path / "snapshot.pt").snapshot.load()


@pytest.mark.parametrize("keep", [1, 4])
def test_so_many_are_kept(keep: int, tmp_path: Path) -> None:
    Run(tmp_path / "snapshot.pt", keep=keep, every=1).train(6)
    kept = ["snapshot.pt", *(f"snapshot.pt.{back}" for back in range(1, keep))]
    assert names(tmp_path) == kept
    assert [torch.load(tmp_path / name, weights_only=True)["steps"] for name in kept] == list(range(6, 6 - keep, -1))


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "hardlink_to", mock.Mock(side_effect=PermissionError("no links here")))
    older = two_snapshots(tmp_path / "snapshot.pt")
    assert names(tmp_path) == ["snapshot.pt", "snapshot.pt.1"]
    (tmp_path / "snapshot.pt").unlink()  # killed between the two renames
    run = Run(tmp_path / "snapshot.pt")
    assert run.snapshot.load() and run.loader.state_dict() == older
    run.snapshot.save()
    assert names(tmp_path) == ["snapshot.pt", "snapshot.pt.1"]


@pytest.mark.parametrize(("error", "told"), [
    (OSError(22, "Invalid argument"),
     pytest.warns(MidepochWarning, match=r"was saved, but its folder could not be synced \(Invalid")),
    (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt)),
])  # fmt: skip
def test_what_goes_wrong_after_the_renaming(error: Any, told: Any, tmp_path: Path) -> None:
    run, again = Run(tmp_path / "snapshot.pt", every=1), Run(tmp_path / "snapshot.pt")
    run.train(2)
    with mock.patch.object(files, "sync_folder", side_effect=error), told:
        run.train(1)
    for steps in (3, 4):
        again.snapshot.load()
        assert again.snapshot.steps == steps
        run.train(1)  # the file is known to be its own


def test_a_process_that_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, other = Run(Path("snapshot.pt"), every=1), tmp_path / "other"
    run.train(1)
    other.mkdir()
    monkeypatch.chdir(other)
    run.train(1)
    assert names(other) == []
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["steps"] == 2


def test_a_gap_among_older_snapshots(tmp_path: Path) -> None:
    """As a kill between two renames leaves it."""
    path = tmp_path / "snapshot.pt"
    Run(path, every=1, keep=3).train(3)
    (tmp_path / "snapshot.pt.1").unlink()
    path.write_bytes(b"damaged")
    again = Run(path)
    with pytest.warns(MidepochWarning, match=r"snapshot\.pt is damaged.*: loading the previous snapshot, .*\.2"):
        assert again.snapshot.load()
    assert again.snapshot.steps == 1
    path.unlink()
    with pytest.warns(MidepochWarning, match=r"snapshot\.pt is missing"):
        assert again.snapshot.load()


def save_until_call(path: Path, number: int) -> bool:
    """Load and save in a process that dies at one of the save's calls of the system; whether it did."""
    child = os.fork()
    if not child:
        calls = itertools.count()

        def die(event: str, arguments: Any) -> None:
            if event.partition(".")[0] in ("open", "os", "fcntl", "shutil") and next(calls) == number:
                os._exit(9)

        with contextlib.suppress(BaseException):
            model = torch.nn.Linear(64, 64)
            snapshot = Snapshot(path, keep=3, signals=(), model=model)
            snapshot.load()
            snapshot.steps += 1
            torch.nn.init.constant_(model.weight, snapshot.steps)
            sys.addaudithook(die)
            snapshot.save()
            os._exit(0)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), number
    return status == 9


@pytest.mark.filterwarnings("error")  # the newest file is whole, not only an older one
def test_a_kill_at_any_call_of_a_save_leaves_a_sound_one(tmp_path: Path) -> None:
    path, steps, number = tmp_path / "snapshot.pt", 0, 0
    for _ in range(3):
        assert not save_until_call(path, 1000)
    while save_until_call(path, number):
        model = torch.nn.Linear(64, 64)
        snapshot = Snapshot(path, signals=(), model=model)
        assert snapshot.load() and snapshot.steps >= max(steps, 3), number
        steps, number = snapshot.steps, number + 1
        assert bool((model.weight == steps).all()), number
        # Drafts of the killed are removed by the next who saves.
        assert len(names(tmp_path)) <= 5, names(tmp_path)
    assert number > 8 and names(tmp_path) == ["snapshot.pt", "snapshot.pt.1", "snapshot.pt.2"]


def test_a_draft_of_another_process_cannot_become_the_snapshot(tmp_path: Path) -> None:
    """Two processes write at once: one of them is told, and the other's file is whole."""
    path, save = tmp_path / "snapshot.pt", torch.save
    run, other = Run(path), Run(path)

    def meanwhile(content: Any, file: Any) -> None:
        save(content, file)
        with mock.patch.object(torch, "save", save):
            other.snapshot.save()

    with mock.patch.object(torch, "save", meanwhile), pytest.raises(SnapshotError, match="was not saved"):
        run.snapshot.save()
    assert names(tmp_path) == ["snapshot.pt"]
    other.train(2)
    other.snapshot.save()  # the file is its own
    assert Run(path).snapshot.load()


def test_the_draft_of_a_snapshot_with_a_longer_name_is_left(tmp_path: Path) -> None:
    other = tmp_path / f"run.large.{'0' * 12}.draft"
    other.touch()
    Snapshot(tmp_path / "run", signals=(), model=torch.nn.Linear(1, 1)).save()
    assert other.exists()


class WithState(torch.nn.Linear):
    """Keeps more than tensors, or a buffer whose name sounds like it."""

    def __init__(self, buffer: int | None) -> None:
        super().__init__(2, 2)
        if buffer is not None:
            self.register_buffer("my_extra_state", torch.zeros(buffer))

    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state["calls"] == 1


@pytest.mark.parametrize(("before", "after"), [
    (WithState(1), WithState(2)), (WithState(1), WithState(None)),
    (WithState(None), torch.nn.Linear(2, 2)), (torch.nn.Linear(2, 2), WithState(None)),
])  # fmt: skip
def test_extra_state_that_does_not_fit_changes_nothing(before: Any, after: Any, tmp_path: Path) -> None:
    def parts(model: Any) -> dict[str, Any]:
        return {"loader": midepoch.wrap(DataLoader(sources.Indices(9)), seed=0), "model": model}

    saved = parts(before)
    next(iter(saved["loader"]))
    Snapshot(tmp_path / "run", signals=(), parts=saved).save()
    loaded, weight = parts(after), after.weight.clone()
    with pytest.raises(SnapshotError, match="model differs at"):
        Snapshot(tmp_path / "run", signals=(), parts=loaded).load()
    assert loaded["loader"].position == 0 and torch.equal(after.weight, weight)
    Snapshot(tmp_path / "run", signals=(), parts=parts(before)).load()


# --- signals ---


@pytest.mark.parametrize(("number", "taken"), [(signal.SIGTERM, 5), (signal.SIGUSR1, 0)])
def test_a_signal_saves_and_exits_after_the_batch(number: signal.Signals, taken: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    whole = Run(tmp_path / "other.pt").train(12)
    run = Run(tmp_path / "snapshot.pt", every=1000, signals=(signal.SIGTERM, signal.SIGUSR1), exit_status=75)
    run.snapshot.load()
    head = run.train(taken) if taken else []
    os.kill(os.getpid(), number)
    with pytest.raises(SystemExit) as left:
        run.train(5)
    assert left.value.code == 75
    os.kill(os.getpid(), number)  # again, while it leaves: there is nothing more to do
    run.snapshot.close()
    assert signal.getsignal(number) == before, "handlers are given back"
    resumed = Run(tmp_path / "snapshot.pt")
    resumed.snapshot.load()
    assert resumed.snapshot.steps == taken + 1
    assert head == whole[:taken]
    assert resumed.train(11 - taken) == whole[taken + 1 :]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What a handler of the program's own receives of SIGUSR1."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def test_of_two_snapshots_each_hears_and_a_closed_one_passes_on(heard: list[int], tmp_path: Path) -> None:
    one, two, three = (Run(tmp_path / f"{number}.pt", signals=(signal.SIGUSR1,)) for number in range(3))
    os.kill(os.getpid(), signal.SIGUSR1)
    for run in (one, two):
        with pytest.raises(SystemExit):
            run.train(1)
    assert heard == []
    for run in (one, two, three):
        run.snapshot.close()  # which gives the signal back to one that is closed already
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    run = Run(tmp_path / "4.pt", signals=(signal.SIGUSR1,))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    run.snapshot.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, "a handler of somebody else's stays"


def ends(group: int) -> bool:
    """Whether all processes of a group end, but for those that nobody has waited for; the rest is killed."""

    def lives(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
        return False

    if fault_sources.wait_until(lambda: not any(map(lives, psutil.process_iter())), 120):
        return True
    os.killpg(group, signal.SIGKILL)
    return False


WITH_WORKERS = """
import os, sys, time, torch
from torch.utils.data import DataLoader
import midepoch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.005)
        return index

def streaming(workers):
    from support.witness_sources import write_mds
    local = write_mds("data")  # which prepares the import of streaming
    from streaming import StreamingDataLoader, StreamingDataset
    class Data(StreamingDataset):
        def __getitem__(self, at):
            time.sleep(0.1)
            return super().__getitem__(at)
    return StreamingDataLoader(Data(local=local, batch_size=1), batch_size=1, **workers)

def stateful(workers):
    from torchdata.stateful_dataloader import StatefulDataLoader
    return StatefulDataLoader(Slow(), batch_size=4, **workers)

if __name__ == "__main__":
    path, way, kind = sys.argv[1:]
    make = {"Streaming": streaming, "StatefulDataLoader": stateful}.get(kind)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = midepoch.wrap(make(workers) if make else DataLoader(Slow(), batch_size=4, **workers), seed=0)
    snapshot = midepoch.Snapshot(path, data=loader)
    if way == "start":
        os.register_at_fork(after_in_child=lambda: (os.write(1, b"forked\\n"), time.sleep(1)))  # a line at once
    for batch in loader:
        time.sleep(0.02)
        snapshot.step()
        print(snapshot.steps, flush=True)
"""


def started(kind: str, way: str, folder: Path, until: str) -> forking.Program:
    """A job of which this line was read."""
    needed = {"Streaming": "streaming", "StatefulDataLoader": "torchdata"}.get(kind, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed (pip install midepoch[streaming,torchdata])")
    (folder / "job.py").write_text(WITH_WORKERS)
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    job = forking.Program(["job.py", "snapshot.pt", way, kind], cwd=folder, env=environment, new_session=True)
    assert any(line.strip() == until for line in job.stdout)
    return job


@pytest.mark.parametrize(("number", "kind"), [
    (signal.SIGTERM, "DataLoader"), (signal.SIGUSR1, "StatefulDataLoader"), (signal.SIGTERM, "Streaming"),
])  # fmt: skip
def test_a_signal_to_all_processes_with_their_workers(number: signal.Signals, kind: str, tmp_path: Path) -> None:
    """As schedulers send it."""
    job = started(kind, "wait", tmp_path, "3")
    os.killpg(job.pid, number)
    # Lines that came with the one that was waited for are in the file's own buffer.
    output, errors = job.stdout.read(), job.stderr.read()
    assert job.wait() == 0, errors
    told = int(["3", *output.split()][-1])
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["steps"] in (told, told + 1)
    assert ends(job.pid)


@pytest.mark.parametrize("wrong", [signal.SIGKILL, "SIGTERM", 99999])
def test_signals_that_cannot_be_received_are_refused(wrong: Any, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ValueError, match=r"cannot be received .*: pass signals such as signal\.SIGTERM"):
        Run(tmp_path / "snapshot.pt", signals=(signal.SIGUSR1, wrong))
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_to_all_processes_while_workers_start(tmp_path: Path) -> None:
    """Before a worker knows that it outlives signals."""
    job = started("DataLoader", "start", tmp_path, "forked")
    os.killpg(job.pid, signal.SIGTERM)
    errors = job.stderr.read()
    assert job.wait() == 0, errors
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["steps"] == 1


def test_workers_end_whose_process_is_killed_as_they_start(tmp_path: Path) -> None:
    """torch's look out for the process that has adopted them, then."""
    job = started("DataLoader", "start", tmp_path, "forked")
    job.kill()
    job.wait()
    assert ends(job.pid)


def test_forked_children_can_still_be_ended(tmp_path: Path) -> None:
    run = Run(tmp_path / "snapshot.pt", signals=(signal.SIGTERM,))
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell, b".")
            signal.pause()
        finally:
            os._exit(3)
    os.read(told, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    run.snapshot.close()


def in_thread(function: Callable[[], object]) -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(function).result()


@pytest.mark.parametrize("where", [in_thread, lambda function: function()], ids=["in a thread", "here"])
def test_a_snapshot_that_nobody_has_lets_go(where: Any, heard: list[int], tmp_path: Path) -> None:
    """After the function that trained, say: what follows it must end when it is told to."""
    run = [Run(tmp_path / "snapshot.pt", signals=(signal.SIGUSR1,))]
    model = weakref.ref(run[0].model)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not heard
    where(run.clear)  # a thread may not give signals back
    gc.collect()
    assert model() is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_signals_are_for_the_main_thread(tmp_path: Path) -> None:
    with pytest.raises(MidepochError, match=r"make the Snapshot there, or pass signals=\(\)"):
        in_thread(lambda: Snapshot(tmp_path / "snapshot.pt", model=torch.nn.Linear(1, 1)))


# --- several processes ---


def test_without_a_process_group_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MidepochError, match="init_process_group before"):
        Snapshot(tmp_path / "snapshot.pt", signals=(), model=torch.nn.Linear(1, 1)).save()


class Stateless(sources.Counter):
    def state_dict(self) -> dict[str, Any]:
        if self.count == 1:
            raise RuntimeError("it is gone")
        return {}


def _save_apart(rank: int, path: str) -> str:
    loaders = [midepoch.wrap(DataLoader(sources.Indices(16), batch_size=2), seed=1) for _ in range(2)]
    passes = [iter(loader) for loader in loaders]
    for loader in (0, 1, *[0] * rank):
        next(passes[loader])
    if rank:
        loaders[1].skip(8, 12)
    told = []
    for parts in ({"data": loaders[0]}, {"data": loaders[1]}, {"lost": Stateless(rank)}):
        try:
            Snapshot(path, signals=(), parts=parts).save()
        except SnapshotError as error:
            told.append(str(error))
    return "; ".join(told)


def test_ranks_that_stand_apart_are_not_saved(tmp_path: Path) -> None:
    for told in sources.in_gloo_world(_save_apart, 2, str(tmp_path / "snapshot.pt")):
        assert "the ranks do not stand at the same place of data (epoch, position)" in told
        assert "rank 0 at (0, 4), rank 1 at (0, 8)" in told
        assert "after the same batch" in told
        assert "rank 1 skips other positions of data than rank 0: call skip()" in told
        assert "call skip() on every rank" in told
        assert "on rank 1, lost gave no state: RuntimeError: it is gone" in told
    assert names(tmp_path) == []


def _save_other_files(rank: int, path: str) -> str:
    files: Any = [torch.full((8,), number) for number in range(16)][:: -1 if rank else 1]  # as another node lists them
    loader = midepoch.wrap(DataLoader(files, batch_size=2), seed=0)
    snapshot = Snapshot(path, signals=(), data=loader)
    next(iter(loader))
    with warnings.catch_warnings(record=True, action="always") as caught:
        snapshot.save()
        snapshot.save()
    return "; ".join(str(each.message) for each in caught)


def test_ranks_that_see_other_files_are_told_once_and_saved(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    first, second = sources.in_gloo_world(_save_other_files, 2, str(path))
    assert first.count("rank 0 and rank 1 do not see the same data in data") == 1 and "sort them" in first
    assert second == "" and path.exists()


def _held_after_an_exchange(rank: int, path: str) -> list[int]:
    """How many others hold the tensor of an exchange when the call returns."""
    snapshot, found = Snapshot(path, signals=(), data=midepoch.wrap([[1], [2]])), []
    for _ in range(50):
        snapshot.poll()
        found.append(snapshot._agreement._numbers._use_count() - 1)  # type: ignore[attr-defined]
    return found


def test_no_thread_waits_for_the_interpreter_after_an_exchange(tmp_path: Path) -> None:
    """A program that frees its process group then would never end."""
    assert sources.in_gloo_world(_held_after_an_exchange, 2, str(tmp_path / "snapshot.pt")) == [[0] * 50] * 2
