"""Snapshots: what is restored, what damage does, and whoever is killed at whatever instant."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import midepoch
from midepoch import MidepochError, MidepochWarning, Snapshot, SnapshotError, StateMismatchError
from midepoch.checkpoint import files
from midepoch.state.codec import decode, encode
from support import forking, own_state_sources, sources
from support.places import TESTS

CHAOS = bool(os.environ.get("MIDEPOCH_CHAOS"))


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


class Run:
    """A small training run whose every number depends on data, augmentations and the process's generators."""

    def __init__(self, path: Path, seed: int = 5, size: int = 40, width: int = 3, **settings: Any) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
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


@pytest.mark.parametrize("cut", [1, 9, 10, 11, 23])
def test_a_run_goes_on_as_if_nothing_had_happened(cut: int, tmp_path: Path) -> None:
    whole = Run(tmp_path / "other.pt").train(30)
    first = Run(tmp_path / "run" / "snapshot.pt")
    assert not first.snapshot.load()
    head = first.train(cut)
    first.snapshot.save()
    second = Run(tmp_path / "run" / "snapshot.pt")
    assert second.snapshot.load()
    assert second.snapshot.steps == cut
    assert head + second.train(30 - cut) == whole


def test_every_so_many_batches_also_counted_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    for start, steps, saved in ((0, 9, 8), (8, 3, 8), (8, 5, 12)):
        run = Run(path, every=4)
        run.snapshot.load()
        assert run.snapshot.steps == start
        run.train(steps)
        assert torch.load(path, weights_only=True)["steps"] == saved


def test_what_is_in_the_file_can_be_read_without_midepoch(tmp_path: Path) -> None:
    run = Run(tmp_path / "snapshot.pt")
    run.train(3)
    run.snapshot.save()
    content = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    torch.nn.Linear(3, 1).load_state_dict(content["parts"]["model"])
    assert content["parts"]["data"] == run.loader.state_dict()
    assert names(tmp_path) == ["snapshot.pt"]


def test_batches_in_flight_come_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "snapshot.pt")
    batches = iter(run.loader)
    taken = [next(batches) for _ in range(5)]
    run.snapshot.save(in_flight=2)
    again = Run(tmp_path / "snapshot.pt")
    again.snapshot.load()
    assert [batch[0].tolist() for batch, _ in zip(again.loader, range(2), strict=False)] == [
        batch[0].tolist() for batch in taken[3:]
    ]


def test_a_model_fits_inside_distributed_data_parallel_compiled_and_plain(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    Snapshot(tmp_path / "snapshot.pt", signals=(), model=torch.compile(model)).save()
    plain = torch.nn.Linear(2, 1)
    Snapshot(tmp_path / "snapshot.pt", signals=(), model=plain).load()
    assert torch.equal(plain.weight, model.weight)


def test_a_dataset_that_has_the_two_methods_itself(tmp_path: Path) -> None:
    class Samples(midepoch.StatefulIterable):
        def __init__(self) -> None:
            self.sampler = torch.utils.data.SequentialSampler(range(9))

        def __iter__(self) -> Iterator[int]:
            return iter(self.sampler)

    samples = Samples()
    batches = iter(samples)
    assert [next(batches) for _ in range(4)] == [0, 1, 2, 3]
    Snapshot(tmp_path / "snapshot.pt", signals=(), data=samples).save(in_flight=1)
    other = Samples()
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


def test_arguments_that_make_no_sense() -> None:
    for arguments, message in REFUSED:
        with pytest.raises((TypeError, ValueError), match=message):
            Snapshot("x.pt", signals=(), **arguments)


def test_what_does_not_fit_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    run = Run(path)
    run.train(7)
    run.snapshot.save()
    others: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"seed": 6}, StateMismatchError, "the seed differs: the state was saved with 5, this loader has 6"),
        ({"size": 41}, StateMismatchError, "size"),
        ({"width": 4}, SnapshotError, r"model differs at 'weight': the snapshot has shape \(1, 3\), this model shape"),
    ]
    for settings, error, message in others:
        other = Run(path, **settings)
        before = [each.clone() for each in other.model.state_dict().values()], random.getstate(), torch.get_rng_state()
        with pytest.raises(error, match=message):
            other.snapshot.load()
        after = list(other.model.state_dict().values()), random.getstate(), torch.get_rng_state()
        assert all(torch.equal(one, two) for one, two in zip(before[0], after[0], strict=True))
        assert before[1] == after[1] and torch.equal(before[2], after[2])
        assert other.loader.position == 0 and other.snapshot.steps == 0
        assert not other.optimizer.state_dict()["state"]
    with pytest.raises(
        SnapshotError, match="the snapshot has data, model, optimizer, schedule, but this Snapshot has"
    ):
        Snapshot(path, signals=(), model=run.model, data=run.loader).load()
    two_groups = torch.optim.Adam([{"params": [each]} for each in run.model.parameters()], lr=0.1)
    with pytest.raises(SnapshotError, match=r"optimizer differs: the snapshot has groups of \[2\] parameters"):
        Snapshot(path, signals=(), model=run.model, optimizer=two_groups, schedule=run.schedule, data=run.loader).load()


@pytest.mark.parametrize("name", ["path", "every", "keep", "signals", "exit_status", "group", "parts", "keywords"])
def test_a_part_may_have_the_name_of_a_keyword(name: str, tmp_path: Path) -> None:
    path, one, other = tmp_path / "snapshot.pt", torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    Snapshot(path, signals=(), model=one, parts={name: other}).save()
    assert torch.load(path, weights_only=True)["parts"].keys() == {"model", name}
    weight = other.weight.detach().clone()
    with torch.no_grad():
        other.weight.add_(1)
    assert Snapshot(path, signals=(), parts={"model": one, name: other}).load()
    assert torch.equal(other.weight, weight)


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    class Counter:
        value: Any = np.float64(3)

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    counter = Counter()
    snapshot = Snapshot(tmp_path / "snapshot.pt", signals=(), counter=counter)
    with pytest.raises(SnapshotError, match="could not be loaded with weights_only=True"):
        snapshot.save()
    assert names(tmp_path) == []
    counter.value = 3.0
    snapshot.save()
    counter.value = lambda: 0  # cannot even be written
    with pytest.raises(SnapshotError, match="the previous snapshot is unchanged"):
        snapshot.save()
    fresh = Counter()
    assert Snapshot(tmp_path / "snapshot.pt", signals=(), counter=fresh).load()
    assert fresh.value == 3.0
    assert names(tmp_path) == ["snapshot.pt"]


# --- whose file it is ---


def test_a_run_does_not_write_over_one_that_it_has_not_loaded(tmp_path: Path) -> None:
    run = Run(tmp_path / "snapshot.pt")
    run.train(2)
    run.snapshot.save()
    fresh = Run(tmp_path / "snapshot.pt")
    with pytest.raises(SnapshotError, match=r"call load\(\) before the first batch"):
        fresh.snapshot.save()
    other = Run(tmp_path / "snapshot.pt")
    other.snapshot.load()
    other.snapshot.save()
    with pytest.raises(SnapshotError, match="another process writes to the same path"):
        run.snapshot.save()


def test_any_other_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    part = torch.nn.Linear(1, 1)
    torch.save(part.state_dict(), path)
    with pytest.raises(SnapshotError, match="not a snapshot of midepoch"):
        Snapshot(path, signals=(), model=part).load()
    path.write_bytes(b"")
    with pytest.raises(SnapshotError, match="no snapshot is sound"):
        Snapshot(path, signals=(), model=part).load()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "snapshot.pt")
    run.snapshot.save()
    content = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    torch.save({**content, "midepoch_snapshot": 2}, tmp_path / "snapshot.pt")
    with pytest.raises(SnapshotError, match="has format 2, this midepoch reads 1"):
        run.snapshot.load()
    for name in ("id", "steps", "generators", "parts", "seed", "world_size"):
        others: tuple[Any, ...] = (None, -1, [1], {})
        for wrong in others:
            torch.save({**content, name: wrong}, tmp_path / "snapshot.pt")
            if name == "parts" and wrong == {}:
                continue  # a snapshot of nothing
            with pytest.raises(SnapshotError, match="is damaged"):
                run.snapshot.load()


def test_edited_generators_are_refused_with_everything_as_it_was(tmp_path: Path) -> None:
    run = Run(tmp_path / "snapshot.pt")
    run.train(3)
    run.snapshot.save()
    content = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    good = decode(content["generators"][0])
    wrong = [{}, {**good, "python": (3, (1, 2), None)}, {**good, "numpy": {}}, {**good, "torch": torch.zeros(3)}]
    twister = good["numpy"]["state"]
    for change in ({"pos": (1 << 31) - 8}, {"pos": -1}, {"pos": 625}, {"pos": True}, {"key": np.zeros(700, np.uint32)}):
        wrong.append({**good, "numpy": {**good["numpy"], "state": {**twister, **change}}})
    for text in ("", "junk", *map(encode, wrong)):
        torch.save({**content, "generators": [text]}, tmp_path / "snapshot.pt")
        fresh = Run(tmp_path / "snapshot.pt")
        before = (
            fresh.model.weight.clone(),
            random.getstate(),
            np.random.get_state(legacy=False)["state"]["key"].tolist(),
        )
        with pytest.raises(MidepochError):
            fresh.snapshot.load()
        assert torch.equal(before[0], fresh.model.weight) and fresh.loader.position == 0
        assert before[1:] == (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist())


@pytest.mark.parametrize(
    "value", [3, torch.zeros(1, 3).to_sparse(), torch.zeros(1, 3, device="meta"), torch.zeros(3, 1), "weight"]
)
def test_what_a_model_cannot_be_filled_with_is_refused_with_everything_as_it_was(tmp_path: Path, value: Any) -> None:
    run = Run(tmp_path / "snapshot.pt")
    run.train(3)
    run.snapshot.save()
    content = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    assert content["parts"]["model"]["weight"].shape == (1, 3)
    content["parts"]["model"]["weight"] = value
    torch.save(content, tmp_path / "snapshot.pt")
    fresh = Run(tmp_path / "snapshot.pt")
    before = {name: each.clone() for name, each in fresh.model.state_dict().items()}
    with pytest.raises(SnapshotError, match="'weight'"):
        fresh.snapshot.load()
    assert fresh.loader.position == 0
    assert all(torch.equal(each, before[name]) for name, each in fresh.model.state_dict().items())


def test_a_snapshot_that_was_packed_is_refused(tmp_path: Path) -> None:
    """Its records may take a thousand times its bytes; torch.save packs nothing."""
    run = Run(tmp_path / "snapshot.pt")
    run.snapshot.save()
    with zipfile.ZipFile(tmp_path / "snapshot.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "snapshot.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data + bytes(1 << 20) * name.endswith("data.pkl"))
    with pytest.raises(SnapshotError, match="is compressed"):
        Run(tmp_path / "snapshot.pt").snapshot.load()


# --- damage ---


def two_snapshots(path: Path) -> tuple[Any, Any]:
    """One after 3 steps, beside one after 6, and the runs that go on from there."""
    run = Run(path)
    run.train(3)
    run.snapshot.save()
    older = run.loader.state_dict()
    run.train(3)
    run.snapshot.save()
    return older, run.loader.state_dict()


def test_a_record_that_claims_to_be_a_folder_is_damage(tmp_path: Path) -> None:
    """For such a one torch gives what happens to lie in memory, whatever its checksum."""
    path = tmp_path / "snapshot.pt"
    two_snapshots(path)
    path.with_name("snapshot.pt.1").unlink()
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data/0"))
    data[entry + 38] |= 0x10  # of its attributes
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match="/data/0 is marked as a folder"):
        Run(path).snapshot.load()


def test_the_one_before_is_kept_and_taken_where_the_newest_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    older, newer = two_snapshots(path)
    assert names(tmp_path) == ["snapshot.pt", "snapshot.pt.1"]
    whole = path.read_bytes()
    generator = random.Random(0)
    cuts = [b"", whole[:1], whole[: len(whole) // 2], whole[:-1000], whole[:-1]]
    flips = []
    for _ in range(400 if CHAOS else 60):
        place = generator.randrange(len(whole))
        flips.append(whole[:place] + bytes([whole[place] ^ 1 << generator.randrange(8)]) + whole[place + 1 :])
    fell_back = 0
    for damaged in (*cuts, *flips):
        path.write_bytes(damaged)
        run = Run(path)
        with warnings_as_list() as warned:
            assert run.snapshot.load()
        # A bit that nothing depends on, in the padding between tensors, may be flipped without harm.
        assert run.loader.state_dict() == (older if warned else newer)
        assert run.snapshot.steps == (3 if warned else 6)
        fell_back += bool(warned)
    assert fell_back > (len(cuts) + len(flips)) // 2

    # What is written then leaves the sound one alone, and takes the damaged one's place.
    path.write_bytes(cuts[2])
    run = Run(path)
    with pytest.warns(MidepochWarning, match=r"damaged.*loading the previous snapshot, .*snapshot.pt.1"):
        run.snapshot.load()
    run.train(1)
    run.snapshot.save()
    assert torch.load(path, weights_only=True)["steps"] == 4
    assert torch.load(tmp_path / "snapshot.pt.1", weights_only=True)["steps"] == 3

    for each in (path, tmp_path / "snapshot.pt.1"):
        each.write_bytes(cuts[3])
    with pytest.raises(SnapshotError, match="no snapshot is sound"):
        Run(path).snapshot.load()


@contextlib.contextmanager
def warnings_as_list() -> Iterator[list[Any]]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    caught[:] = [each for each in caught if issubclass(each.category, MidepochWarning)]


def test_checksums_are_written_where_torch_was_told_not_to(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        run = Run(tmp_path / "snapshot.pt")
        run.snapshot.save()
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert Run(tmp_path / "snapshot.pt").snapshot.load()


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_so_many_are_kept(keep: int, tmp_path: Path) -> None:
    run = Run(tmp_path / "snapshot.pt", keep=keep, every=1)
    run.train(6)
    kept = ["snapshot.pt", *(f"snapshot.pt.{back}" for back in range(1, keep))]
    assert names(tmp_path) == kept
    assert [torch.load(tmp_path / name, weights_only=True)["steps"] for name in kept] == list(range(6, 6 - keep, -1))


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    older, _ = two_snapshots(tmp_path / "snapshot.pt")
    assert names(tmp_path) == ["snapshot.pt", "snapshot.pt.1"]
    # Killed between the two renames.
    (tmp_path / "snapshot.pt").unlink()
    run = Run(tmp_path / "snapshot.pt")
    assert run.snapshot.load()
    assert run.loader.state_dict() == older
    run.snapshot.save()
    assert names(tmp_path) == ["snapshot.pt", "snapshot.pt.1"]


def in_a_child(work: Any) -> int:
    """Run `work` in a forked process, and return its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_full_disk_leaves_the_snapshot_before(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    two_snapshots(path)
    before = path.read_bytes()

    def write() -> None:
        run = Run(path, every=1)
        run.snapshot.load()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # the kernel refuses to write more, as on a full disk
        with pytest.raises(SnapshotError, match="was not saved, and the previous snapshot is unchanged"):
            run.train(1)

    assert in_a_child(write) == 0
    assert path.read_bytes() == before
    assert names(tmp_path) == ["snapshot.pt", "snapshot.pt.1"]


@pytest.mark.parametrize("error", [OSError(22, "Invalid argument"), KeyboardInterrupt()])
def test_what_goes_wrong_after_the_renaming(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "snapshot.pt")
    run.train(2)
    run.snapshot.save()

    def fails(folder: Path) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_folder", fails)
        run.train(1)
        if isinstance(error, OSError):
            with pytest.warns(MidepochWarning, match=r"was saved, but its folder could not be synced \(Invalid"):
                run.snapshot.save()
        else:
            with pytest.raises(KeyboardInterrupt):
                run.snapshot.save()
    again = Run(tmp_path / "snapshot.pt")
    again.snapshot.load()
    assert again.snapshot.steps == 3
    run.train(1)
    run.snapshot.save()  # the file is known to be its own
    again.snapshot.load()
    assert again.snapshot.steps == 4


def test_a_process_that_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(Path("snapshot.pt"), every=1)
    run.train(1)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    run.train(1)
    assert names(tmp_path / "other") == []
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["steps"] == 2


def test_a_gap_among_older_snapshots(tmp_path: Path) -> None:
    """As a kill between two renames leaves it."""
    run = Run(tmp_path / "snapshot.pt", every=1, keep=3)
    run.train(3)
    (tmp_path / "snapshot.pt.1").unlink()
    (tmp_path / "snapshot.pt").write_bytes(b"damaged")
    again = Run(tmp_path / "snapshot.pt")
    with pytest.warns(MidepochWarning, match=r"snapshot\.pt is damaged.*: loading the previous snapshot, .*\.2"):
        assert again.snapshot.load()
    assert again.snapshot.steps == 1
    (tmp_path / "snapshot.pt").unlink()
    with pytest.warns(MidepochWarning, match=r"snapshot\.pt is missing"):
        assert again.snapshot.load()


def test_another_kind_of_optimizer_or_scaler_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    def make(optimizer: Any, scaler: Any) -> tuple[Any, Snapshot]:
        model = torch.nn.Linear(2, 1)
        parts = {"model": model, "optimizer": optimizer(model.parameters(), lr=0.1), "scaler": scaler}
        return model, Snapshot(tmp_path / "snapshot.pt", signals=(), **parts)

    class Scaler:
        def __init__(self, enabled: bool) -> None:
            self.enabled = enabled

        def state_dict(self) -> dict[str, Any]:
            return {"scale": 2.0} if self.enabled else {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.enabled and not state:
                raise RuntimeError("an empty state")

    make(torch.optim.Adam, Scaler(False))[1].save()
    others: list[tuple[Any, Any, str]] = [
        (torch.optim.SGD, Scaler(False), "is a SGD, but the snapshot has the state of a Adam"),
        (torch.optim.AdamW, Scaler(False), "is a AdamW, but the snapshot has the state of a Adam"),
        (torch.optim.Adam, Scaler(True), "scaler differs: its saved state is empty"),
    ]
    for optimizer, scaler, message in others:
        model, other = make(optimizer, scaler)
        before = model.weight.clone()
        with pytest.raises(SnapshotError, match=message):
            other.load()
        assert torch.equal(model.weight, before)


def test_whoever_is_killed_at_any_instant_of_a_save_leaves_a_sound_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    generator = random.Random(3)
    steps = 0
    saved, typical = 0, 0.02  # saves that were done for certain; seconds that one takes here and now
    for kill in range(500 if CHAOS else 40):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                model = torch.nn.Linear(64, 64 * 8)  # 128 KiB
                snapshot = Snapshot(path, every=1, keep=3, signals=(), model=model)
                snapshot.load()
                while True:
                    with torch.no_grad():
                        model.weight.fill_(snapshot.steps + 1)
                        model.bias.fill_(snapshot.steps + 1)
                    os.write(tell, b".")
                    snapshot.step()
            finally:
                os._exit(1)
        os.close(tell)
        # Before its first save, or anywhere in that or a later one: counted in saves, which take as long as they take.
        for save in range(generator.choice((0, 1, 1, 2, 4))):
            since = time.monotonic()
            assert os.read(told, 1), f"kill {kill}: it ended by itself"
            if save:
                saved, typical = saved + 1, time.monotonic() - since
        time.sleep(generator.random() * typical)
        os.kill(child, signal.SIGKILL)
        os.close(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, f"kill {kill}"
        if not path.exists() and not steps:
            continue
        model = torch.nn.Linear(64, 64 * 8)
        snapshot = Snapshot(path, signals=(), model=model)
        with warnings_as_list() as warned:
            snapshot.load()
        assert not warned, f"kill {kill}: the newest file must be whole, not only an older one"
        assert snapshot.steps >= steps, f"kill {kill}"
        steps = snapshot.steps
        assert bool((model.weight == steps).all()) and bool((model.bias == steps).all()), f"kill {kill}"
        # Drafts of the killed are removed by the next who saves.
        assert len(names(tmp_path)) <= 5, names(tmp_path)
    assert steps >= saved > 20


def test_a_draft_that_somebody_writes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    with files._locked_draft(path) as (draft, _):
        assert draft.exists()
        left = tmp_path / "snapshot.pt.0123456789ab.draft"
        left.write_bytes(b"of a process that was killed")
        Run(path).snapshot.save()
        assert draft.exists() and not left.exists()
    assert names(tmp_path) == ["snapshot.pt"]


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


def test_of_two_snapshots_each_hears_and_a_closed_one_passes_on(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        one = Run(tmp_path / "one.pt", signals=(signal.SIGUSR1,))
        two = Run(tmp_path / "two.pt", signals=(signal.SIGUSR1,))
        os.kill(os.getpid(), signal.SIGUSR1)
        for run in (one, two):
            with pytest.raises(SystemExit):
                run.train(1)
        assert heard == []
        one.snapshot.close()
        two.snapshot.close()  # which gives the signal back to the one that is closed already
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def living(group: int) -> list[str]:
    """Processes of a group, but for those that nobody has waited for."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group = status.read_text().rpartition(") ")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                found.append((status.parent / "cmdline").read_text())
    return found


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
    from support import streaming_apart
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
    with MDSWriter(out="data", columns={"number": "int"}) as writer:
        for number in range(4000):
            writer.write({"number": number})
    class Data(StreamingDataset):
        def __getitem__(self, at):
            time.sleep(0.005)
            return super().__getitem__(at)
    return StreamingDataLoader(Data(local="data", batch_size=4), batch_size=4, **workers)

def stateful(workers):
    from torchdata.stateful_dataloader import StatefulDataLoader
    return StatefulDataLoader(Slow(), batch_size=4, **workers)

if __name__ == "__main__":
    workers = {"num_workers": 2, "multiprocessing_context": sys.argv[2]}
    make = {"Streaming": streaming, "StatefulDataLoader": stateful}.get(sys.argv[4])
    source = make(workers) if make else DataLoader(Slow(), batch_size=4, **workers)
    loader = midepoch.wrap(source, seed=0)
    snapshot = midepoch.Snapshot(sys.argv[1], data=loader)
    if sys.argv[3] == "start":
        os.register_at_fork(before=lambda: print(3, flush=True), after_in_child=lambda: time.sleep(1))
        if sys.argv[2] == "spawn":
            print(3, flush=True)
    for batch in loader:
        time.sleep(0.02)
        snapshot.step()
        print(snapshot.steps, flush=True)
        if sys.argv[3] == "raise" and snapshot.steps == 3:
            raise RuntimeError("a fault of the script's")
"""


@pytest.mark.parametrize(
    ("context", "number", "kind"),
    [
        ("fork", signal.SIGTERM, "DataLoader"),
        ("fork", signal.SIGUSR1, "DataLoader"),
        pytest.param("spawn", signal.SIGTERM, "DataLoader", marks=pytest.mark.long),
        ("fork", None, "DataLoader"),
        ("fork", signal.SIGTERM, "StatefulDataLoader"),
        ("fork", None, "StatefulDataLoader"),
        ("fork", signal.SIGTERM, "Streaming"),
        ("fork", None, "Streaming"),
    ],
)
def test_a_signal_to_all_processes_with_their_workers(
    context: str, number: signal.Signals | None, kind: str, tmp_path: Path
) -> None:
    """As schedulers send it. And workers do not outlive a process that ends for another reason."""
    needed = {"Streaming": "streaming", "StatefulDataLoader": "torchdata"}.get(kind, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed (pip install midepoch[streaming,torchdata])")
    (tmp_path / "job.py").write_text(WITH_WORKERS)
    command = ["job.py", "snapshot.pt", context, "raise" if number is None else "wait", kind]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    job: Any
    if context == "fork":
        job = forking.Program(command, cwd=tmp_path, env=environment, new_session=True)
    else:  # which starts interpreters
        job = subprocess.Popen(
            [sys.executable, *command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env=environment,
        )  # fmt: skip
    for line in job.stdout:
        if line.strip() == "3":
            break
    if number is not None:
        os.killpg(job.pid, number)
    # Lines that came with the one that was waited for are in the file's own buffer.
    output, errors = job.stdout.read(), job.stderr.read()
    job.wait(300)
    if number is None:
        assert job.returncode == 1 and "a fault of the script's" in errors
    else:
        assert job.returncode == 0, errors
        steps = torch.load(tmp_path / "snapshot.pt", weights_only=True)["steps"]
        assert steps == int((["3", *output.split()])[-1]) or steps == int((["3", *output.split()])[-1]) + 1
    deadline = time.monotonic() + 120
    while (left := living(job.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "workers that outlive their process"


@pytest.mark.parametrize("signals", [(signal.SIGUSR1, wrong) for wrong in (signal.SIGKILL, "SIGTERM", 99999)])
def test_signals_that_cannot_be_received_are_refused(signals: Any, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ValueError, match=r"cannot be received .*: pass signals such as signal\.SIGTERM"):
        Run(tmp_path / "snapshot.pt", signals=signals)
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("kind", "method"), [("DataLoader", "fork"), ("StatefulDataLoader", "fork"), ("DataLoader", "spawn")]
)
def test_a_signal_to_all_processes_while_workers_start(kind: str, method: str, tmp_path: Path) -> None:
    """Before a worker knows that it outlives signals."""
    if kind == "StatefulDataLoader":
        pytest.importorskip("torchdata", reason="torchdata is not installed (pip install midepoch[torchdata])")
    job = starting(kind, tmp_path, method)
    os.killpg(job.pid, signal.SIGTERM)
    _, errors = job.communicate(timeout=300)
    assert job.returncode == 0, errors
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["steps"] == 1


def test_workers_whose_process_is_killed_while_they_start_end_too(tmp_path: Path) -> None:
    """torch's look out for the process that has adopted them, then."""
    job = starting("DataLoader", tmp_path)
    job.kill()
    job.wait()
    deadline = time.monotonic() + 120
    while (left := living(job.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGKILL) if left else None
    assert not left


def starting(kind: str, folder: Path, method: str = "fork") -> subprocess.Popen[str]:
    """A job whose workers have been forked and have done nothing yet."""
    (folder / "job.py").write_text(WITH_WORKERS)
    job = subprocess.Popen(
        [sys.executable, "job.py", "snapshot.pt", method, "start", kind], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert job.stdout is not None and job.stdout.readline().strip() == "3"
    time.sleep(0.3 if method == "fork" else 1.0)
    return job


def test_handlers_are_given_back_but_not_those_of_others(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Run(tmp_path / "snapshot.pt", signals=(signal.SIGUSR1,)).snapshot:
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before
    run = Run(tmp_path / "snapshot.pt", signals=(signal.SIGUSR1,))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    run.snapshot.close()
    run.snapshot.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, before)


def test_forked_children_can_still_be_ended(tmp_path: Path) -> None:
    run = Run(tmp_path / "snapshot.pt", signals=(signal.SIGTERM,))
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            time.sleep(60)
        os._exit(3)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    run.snapshot.close()


@pytest.mark.parametrize("thread", [False, True])
def test_a_snapshot_that_nobody_has_gives_signals_back_and_lets_its_model_go(thread: bool, tmp_path: Path) -> None:
    """After the function that trained, say: what follows it must end when it is told to."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        run = [Run(tmp_path / "snapshot.pt", signals=(signal.SIGUSR1,))]
        model = weakref.ref(run[0].model)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not received
        if thread:  # which may not give signals back
            dropping = threading.Thread(target=run.clear)
            dropping.start()
            dropping.join()
        run.clear()
        gc.collect()
        assert model() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_are_for_the_main_thread(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            Snapshot(tmp_path / "snapshot.pt", model=torch.nn.Linear(1, 1))
        except MidepochError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "make the Snapshot there, or pass signals=()" in str(caught[0])


# --- several processes ---


def test_without_a_process_group_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MidepochError, match="init_process_group before"):
        Snapshot(tmp_path / "snapshot.pt", signals=(), model=torch.nn.Linear(1, 1)).save()


# --- what a save costs ---


@dataclass
class Record:
    number: int
    words: list[str]


class Records(Dataset[int]):
    """As many samples, with and without an object for each."""

    def __init__(self, objects: bool) -> None:
        count = 45_000
        self.records: Any = [Record(number, [str(number)]) for number in range(count)] if objects else range(count)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> int:
        return index


def calls(action: Callable[[], object]) -> int:
    """Of functions, python's and C's."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what other tests have left is none of the action's calls
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_a_step_between_saves_calls_nothing(tmp_path: Path) -> None:
    """So it costs what a comparison costs: benchmarks/snapshot.py says how much."""
    loader = midepoch.wrap(DataLoader(Records(False), batch_size=4, shuffle=True), seed=0)
    with Snapshot(tmp_path / "snapshot.pt", every=1000, data=loader) as snapshot:
        for epoch in snapshot.epochs(2):
            for number, _ in enumerate(itertools.islice(loader, 4)):
                # Itself, and the end of the count. The first step of a pass looks at the passes of the body, and the
                # second one of a loop tells how many batches a step takes.
                assert calls(snapshot.step) == 2 or number == 0 or snapshot.steps == 2, epoch


@pytest.mark.parametrize("taken", [pytest.param(0, marks=pytest.mark.long), 2])
def test_gather_and_save_cost_no_more_with_objects_in_the_dataset(taken: int, tmp_path: Path) -> None:
    counted: dict[str, list[int]] = {"gather": [], "save": []}
    for objects in (False, False, True):  # the first one pays for what a process does once
        loader = midepoch.wrap(DataLoader(Records(objects), batch_size=4, shuffle=True), seed=0)
        for _ in itertools.islice(loader, taken):
            pass
        snapshot = Snapshot(tmp_path / str(len(counted['save'])) / "snapshot.pt", signals=(), data=loader)
        actions: dict[str, Callable[[], object]] = {"gather": lambda: midepoch.gather(loader), "save": snapshot.save}  # noqa: B023
        for name, action in actions.items():
            counted[name].append(calls(action))
    for name in counted:
        _, without, many = counted[name]
        # The summary of what the loop has changed reads 32 places of a long list.
        assert many <= without + 200, f"{name}: {without} calls without objects, {many} with 45,000"


class Stateless:
    """A part that has lost its state on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self.rank == 1:
            raise RuntimeError("it is gone")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to load."""


def _save_apart(rank: int, path: str) -> str:
    loader = midepoch.wrap(DataLoader(range(16), batch_size=2), seed=1)  # type: ignore[arg-type]
    batches = iter(loader)
    for _ in range(1 + rank):
        next(batches)
    told = []
    for parts in ({"data": loader}, {"lost": Stateless(rank)}):
        try:
            Snapshot(path, signals=(), parts=parts).save()
        except SnapshotError as error:
            told.append(str(error))
    return "; ".join(told)


def test_ranks_that_stand_apart_are_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    for told in sources.in_gloo_world(_save_apart, 2, str(path)):
        assert "the ranks do not stand at the same place of data (epoch, position)" in told
        assert "rank 0 at (0, 4), rank 1 at (0, 8)" in told
        assert "after the same batch" in told
        assert "on rank 1, lost gave no state: RuntimeError: it is gone" in told
    assert not path.exists()


def _skip_alone(rank: int, path: str) -> str:
    loader = midepoch.wrap(DataLoader(range(16), batch_size=2), seed=1)  # type: ignore[arg-type]
    next(iter(loader))
    if rank == 1:
        loader.skip(8, 12)
    try:
        Snapshot(path, signals=(), data=loader).save()
    except SnapshotError as error:
        return str(error)
    return "saved"


def test_a_rank_that_skipped_alone_is_named(tmp_path: Path) -> None:
    for told in sources.in_gloo_world(_skip_alone, 2, str(tmp_path / "snapshot.pt")):
        assert "rank 1 skips other positions of data than rank 0 ('0:4.2.1', not '')" in told
        assert "call skip() on every rank" in told
    assert names(tmp_path) == []


def _save_with_tickets(rank: int, path: str) -> dict[str, Any]:
    loader = midepoch.wrap(DataLoader(range(16), batch_size=2), seed=1)  # type: ignore[arg-type]
    tickets, batches = [], iter(loader)
    for _ in range(2):
        next(batches)
        tickets.append(loader.ticket)
    loader.finish(tickets[1 - rank])  # of rank 0 positions 4 and 5, of rank 1 positions 2 and 3
    Snapshot(path, signals=(), data=loader).save()
    return midepoch.gather(loader)


def test_what_ranks_have_finished_is_united(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    first, second = sources.in_gloo_world(_save_with_tickets, 2, str(path))
    assert first == second and (first["position"], first["omit"], first["detail"]) == (0, "done:2.1.2", "")
    loader = midepoch.wrap(DataLoader(range(16), batch_size=2), seed=1)  # type: ignore[arg-type]
    assert Snapshot(path, signals=(), data=loader).load()
    assert loader.state_dict() == first
    assert [batch.tolist() for batch in loader] == [[0, 1], *([p, p + 1] for p in range(6, 16, 2))]


def _files(rank: int) -> DataLoader[Any]:
    numbers = list(range(16)) if rank == 0 else list(range(15, -1, -1))  # as another node lists them
    files: Any = [torch.full((8,), number) for number in numbers]
    return DataLoader(files, batch_size=2)


def _save_other_files(rank: int, path: str) -> str:
    loader = midepoch.wrap(_files(rank), seed=0)
    snapshot = Snapshot(path, signals=(), data=loader)
    next(iter(loader))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
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
    snapshot = Snapshot(path, signals=(), data=midepoch.wrap([[1], [2]]))
    found = []
    for _ in range(50):
        snapshot.poll()
        found.append(snapshot._agreement._numbers._use_count() - 1)  # type: ignore[attr-defined]
    return found


def test_no_thread_waits_for_the_interpreter_after_an_exchange(tmp_path: Path) -> None:
    """A program that frees its process group then would never end."""
    assert sources.in_gloo_world(_held_after_an_exchange, 2, str(tmp_path / "snapshot.pt")) == [[0] * 50] * 2


def _save_other_files_in_parts(rank: int, path: str) -> list[str]:
    """Told of a combination, of one with a part of which each rank has its own state, and when it is gathered."""
    same = midepoch.wrap(_files(0), seed=0)
    combined = midepoch.combine([same, midepoch.wrap(_files(rank), seed=0)], mode="max_size")
    own = midepoch.wrap(own_state_sources.Stream(), seed=0, remember=1)
    with_own = midepoch.combine([midepoch.combine([midepoch.wrap(_files(rank), seed=0)]), own])
    found = []
    for loader in (combined, with_own):
        next(iter(loader))
    saves: list[Callable[[], object]] = [
        Snapshot(path, signals=(), data=combined).save, Snapshot(f"{path}.own", signals=(), data=with_own).save,
        functools.partial(midepoch.gather, with_own),
    ]  # fmt: skip
    for save in saves:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save()
        found.append("; ".join(str(each.message) for each in caught if "do not see" in str(each.message)))
    return found


def test_parts_of_a_combination_of_which_ranks_see_other_files_are_told(tmp_path: Path) -> None:
    first, second = sources.in_gloo_world(_save_other_files_in_parts, 2, str(tmp_path / "snapshot.pt"))
    names = ("part 1 of data", "part 0.0 of data", "part 0.0 of the loader")
    for told, name in zip(first, names, strict=True):
        assert told.count("rank 0 and rank 1 do not see the same data in ") == 1 and f"in {name}:" in told
    assert second == [""] * 3
