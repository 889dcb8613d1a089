"""The ledger of a run: what its lines say is what a job recorded, however it was killed, resumed and led elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from torch.utils.data import DataLoader, Dataset

import midepoch
from midepoch import MidepochWarning, Snapshot, SnapshotError
from midepoch.checkpoint.files import SnapshotFile
from midepoch.checkpoint.ledger import ledger_path
from midepoch.tools.ledgers import read_ledger
from support.ledger_jobs import Job, Seen, sights, told


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def source(size: int, batch_size: int, drop_last: bool, order: str) -> Any:
    data = Numbers(size)
    if order == "windowed":
        sampler: Any = midepoch.ResumableSampler(size, shuffle=midepoch.order.Windowed(size, 3, 2))
    elif order == "endless":
        sampler = midepoch.ResumableSampler(size, shuffle=midepoch.order.Endless(midepoch.order.Shuffled(size)))
    else:
        return DataLoader(data, batch_size, shuffle=order == "shuffled", drop_last=drop_last)
    return DataLoader(data, batch_size, sampler=sampler, drop_last=drop_last)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_it_says_what_any_history_of_a_run_has_seen(data: st.DataObject) -> None:
    draw = data.draw
    order = draw(st.sampled_from(["shuffled", "sequential", "windowed", "endless"]))
    size, drop_last = draw(st.integers(27, 60)), draw(st.booleans())
    options: dict[str, Any] = {"seed": draw(st.integers(0, 3)), "verify": "off"}
    if order != "endless" and draw(st.integers(0, 4)) == 0:
        options["global_batch"] = draw(st.integers(3, 8))
    else:
        options["tail"] = draw(st.sampled_from(["pad", "drop", "uneven"]))
    batches = 1 if draw(st.integers(0, 3)) else draw(st.integers(2, 3))
    in_flight = 0 if "global_batch" in options else draw(st.sampled_from([0, 0, 0, 1, 2]))
    with tempfile.TemporaryDirectory() as folder:
        path, seen, kept = Path(folder) / "snapshot.pt", Seen(), Seen()

        def start() -> Job:
            ranks, batch_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
            batch_size = min(batch_size, size // ranks)
            return Job(path, lambda: source(size, batch_size, drop_last, order), ranks, seen, **options)

        job = start()
        actions = st.sampled_from(["steps", "save", "kill", "skip", "leave", "reshard"])
        for action in draw(st.lists(actions, max_size=9)):
            if action == "steps":
                for _ in range(draw(st.integers(1, 15))):
                    job.step(batches, in_flight)
            elif action == "save":
                job.snapshot.save(in_flight=len(job._ahead))
                kept = dict(seen)
            elif action == "kill" and path.exists():
                job = start()
            elif action == "skip" and order != "endless" and not job.loader._progress.within:
                epoch = job.loader.epoch + draw(st.integers(0, 1))
                left = [each for each in range(size) if all(
                    not begin <= each < end for begin, end in job.loader.skipped.get(epoch, []))]  # fmt: skip
                begin = draw(st.integers(0, size - 1))
                end = draw(st.integers(begin + 1, size))
                if len([each for each in left if not begin <= each < end]) >= 27 and not job._ahead:
                    job.loader.skip(begin, end, epoch)
            elif action == "leave" and not job._ahead and order != "endless":
                job.leave()
            elif action == "reshard" and not job._ahead and not job.loader._progress.within:
                job.reshard(draw(st.integers(1, 3)))
        if not path.exists():
            job.snapshot.save(in_flight=len(job._ahead))
            kept = dict(seen)
        ledger = read_ledger(path)
        assert not ledger.problems
        assert told(ledger) == kept
        for index in range(0, size, 7):
            expected = [
                (step, rank)
                for step, ranks in kept.items()
                for rank, given in ranks.items()
                for batch in given
                for each in batch
                if each == index
            ]
            assert sorted(sights(ledger, index)) == sorted(expected), index


# --- a run with three starts, to be damaged ---


def shuffled(size: int = 22) -> DataLoader[int]:
    return DataLoader(Numbers(size), 4, shuffle=True)


def three_starts(path: Path) -> Seen:
    """A run on 1, 2 and 1 ranks, with a skip in the second start and 2 steps taken back in the first."""
    seen = Seen()
    for ranks, steps, more, skips in ((1, 7, 2, False), (2, 3, 0, True), (1, 4, 0, False)):
        job = Job(path, shuffled, ranks, seen, seed=1)
        for step in range(steps):
            if skips and step == 1:
                job.loader.skip(16, 19)
            job.step()
        job.snapshot.save()
        for _ in range(more):
            job.step()
    return seen


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in ledger_path(path).read_bytes().splitlines()]


def test_a_line_for_each_session_and_each_start(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    seen = three_starts(path)
    assert [line["step"] for line in lines_of(path)] == [0, 6, 7, 8, 9, 10], "less what was taken back"
    assert told(read_ledger(path)) == seen and len(seen) == 14
    assert read_ledger(tmp_path).path == path, "a folder will do"
    assert read_ledger(path).starts == (0, 7, 10)


def test_each_snapshot_names_its_own_lines(tmp_path: Path) -> None:
    """A run that is continued from an older snapshot, and then from a newer one that it had left."""
    path, seen = tmp_path / "snapshot.pt", Seen()

    def go_on(begin: str, ranks: int, steps: int, end: str) -> Seen:
        if begin:
            shutil.copy(tmp_path / begin, path)
        job = Job(path, shuffled, ranks, dict(seen), seed=1)
        while job.snapshot.steps < steps:
            job.step()
        job.snapshot.save()
        shutil.copy(path, tmp_path / end)
        assert told(read_ledger(path)) == job.seen and not read_ledger(path).problems
        return job.seen

    seen = go_on("", 1, 4, "a")
    older = dict(seen)
    seen = newer = go_on("", 2, 9, "b")
    seen = older
    go_on("a", 3, 12, "c")
    seen = newer
    go_on("b", 1, 14, "d")
    assert len(read_ledger(path).starts) == 3 and len(lines_of(path)) > 6


def test_an_epoch_takes_a_hundred_bytes(tmp_path: Path) -> None:
    loader = midepoch.wrap(shuffled(400), seed=1)
    with Snapshot(tmp_path / "snapshot.pt", every=500, data=loader, ledger=True) as snapshot:
        for _ in snapshot.epochs(20):
            for _ in loader:
                snapshot.step()
    assert snapshot.steps == 2000
    assert ledger_path(snapshot.path).stat().st_size < 2500
    assert [line.keys() for line in lines_of(snapshot.path)][19] == {
        "loader", "step", "batch", "begins", "epoch", "before", "crc"
    }  # fmt: skip


def test_a_kill_between_ledger_and_snapshot_takes_the_steps_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "snapshot.pt", Seen()
    job = Job(path, shuffled, 1, seen, seed=1)
    job.step()
    job.snapshot.save()
    job.leave()  # makes a line
    job.step()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(SnapshotFile, "write", killed)
        job.snapshot.save()
    with ledger_path(path).open("ab") as file:
        file.write(b'{"loader":"data","st')  # and within a line
    kept = {step: given for step, given in seen.items() if step == 1}
    assert told(read_ledger(path)) == kept and not read_ledger(path).problems
    job = Job(path, shuffled, 1, seen, seed=1)
    job.step()
    job.step()
    job.snapshot.save()
    assert told(read_ledger(path)) == seen and len(seen) == 3


def test_a_write_that_failed_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "snapshot.pt", shuffled, 1, {}, seed=1)
    job.step()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(SnapshotError, match=r"was not saved.*No space left"):
        patched.setattr(os, "fsync", full)
        job.snapshot.save()
    job.step()
    job.snapshot.save()
    assert told(read_ledger(job.snapshot.path)) == job.seen and not read_ledger(job.snapshot.path).problems


# --- damage ---


def agrees(path: Path, seen: Seen) -> int:
    """Compare all steps that a damaged ledger tells. Returns how many these are."""
    ledger, known = read_ledger(path), 0
    for step in range(1, ledger.steps + 1):
        try:
            ledger.at(step)
        except SnapshotError as error:
            assert ledger.problems and ledger.problems[0][:60] in str(error)
            continue
        known += 1
        assert told(ledger, only=step)[step] == seen[step]
    return known


@pytest.mark.parametrize(("line", "known"), [(1, 7), (2, 13), (3, 11), (4, 12), (5, 13), (6, 10)])
def test_damage_is_told_with_its_line_and_the_rest_is_used(line: int, known: int, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    seen, file = three_starts(path), ledger_path(path)
    lines = file.read_bytes().splitlines(keepends=True)
    for damaged in (lines[line - 1].replace(b'"step":', b'"step":1', 1), b"\xff\n", b"[]\n", b"\n"):
        file.write_bytes(b"".join([*lines[: line - 1], damaged, *lines[line:]]))
        (problem,) = read_ledger(path).problems
        assert f"{file}, line {line} is damaged" in problem
        assert agrees(path, seen) == known
    for rest in ([b"\n", b"\n", *lines[line + 1 :]], []):  # two lines in a row, and all from this one on
        file.write_bytes(b"".join([*lines[: line - 1], *rest]))
        assert f"line {line} is damaged" in read_ledger(path).problems[0]
        assert agrees(path, seen) <= known
    assert "it is missing" in read_ledger(path).problems[0]


def test_another_runs_ledger_is_told(tmp_path: Path) -> None:
    for run in "ab":
        three_starts(tmp_path / run / "snapshot.pt")
    shutil.copy(ledger_path(tmp_path / "b" / "snapshot.pt"), ledger_path(tmp_path / "a" / "snapshot.pt"))
    with pytest.raises(SnapshotError, match=r"does not say what step 3 .*line 1 is damaged: it has another CRC"):
        read_ledger(tmp_path / "a").at(3)
    ledger_path(tmp_path / "a" / "snapshot.pt").unlink()
    with pytest.raises(SnapshotError, match=r"does not say what step 3 .*cannot be read"):
        read_ledger(tmp_path / "a" / "snapshot.pt").at(3)


@pytest.mark.parametrize("kept", [None, 0, 1, 3])
def test_a_run_goes_on_where_its_ledger_has_lost_lines(kept: int | None, tmp_path: Path) -> None:
    """The file is gone, as where a snapshot was moved alone, or has so many lines."""
    path = tmp_path / "snapshot.pt"
    seen, file = three_starts(path), ledger_path(path)
    lines = file.read_bytes().splitlines(keepends=True)
    file.unlink()
    if kept is not None:
        file.write_bytes(b"".join(lines[:kept]))
    job = Job(path, shuffled, 1, seen, seed=1)
    job.step()
    with pytest.warns(MidepochWarning, match=f"has lost {len(lines) - (kept or 0)} lines"):
        job.snapshot.save()
    for _ in range(5):
        job.step()
        job.snapshot.save()
    job = Job(path, shuffled, 1, seen, seed=1)
    assert job.snapshot.steps == 20
    assert agrees(path, seen) >= 6
    assert told(read_ledger(path), only=20)[20] == seen[20]


def test_two_runs_that_went_on_from_one_snapshot(tmp_path: Path) -> None:
    """Each has lines in the other's places."""
    seen: dict[str, Seen] = {}
    three_starts(tmp_path / "a" / "snapshot.pt")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for ranks, name in enumerate("ab", 1):
        seen[name] = {}
        job = Job(tmp_path / name / "snapshot.pt", shuffled, ranks, seen[name], seed=1)
        for _ in range(4):
            job.step()
        job.snapshot.save()
    shutil.copy(tmp_path / "b" / "snapshot.pt.ledger", tmp_path / "a")
    ledger = read_ledger(tmp_path / "a")
    assert "it has another CRC, or is another run's" in ledger.problems[0]
    for step in range(15, 19):
        with pytest.raises(SnapshotError, match=f"does not say what step {step}"):
            ledger.at(step)


def test_a_start_without_a_ledger_says_that_it_ends(tmp_path: Path) -> None:
    three_starts(tmp_path / "snapshot.pt")
    with (
        Snapshot(tmp_path / "snapshot.pt", data=midepoch.wrap(shuffled(), seed=1), signals=()) as snapshot,
        pytest.warns(MidepochWarning, match=r"the ledger of .* ends here: pass ledger=True"),
    ):
        snapshot.load()


def test_a_snapshot_that_says_nonsense_of_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "snapshot.pt", shuffled, 1, {}, seed=1)
    said: list[Any] = [{"step": 0}, {"step": 0, "lines": [[2, 1, 0]]}, {"step": "0", "lines": []}, {"lines": [[0]]}, []]
    for count in said:
        monkeypatch.setattr(job.snapshot._ledger, "write", lambda: count)  # noqa: B023  # called at once
        job.snapshot.save()
        with pytest.raises(SnapshotError, match="has no ledger"):
            read_ledger(tmp_path / "snapshot.pt")
        with pytest.raises(SnapshotError, match=r"is damaged \(ledger\)"):
            Job(tmp_path / "snapshot.pt", shuffled, 1, {}, seed=1)


# --- which loaders ---


def trained(path: Path, body: Callable[..., None], **loaders: Any) -> dict[str, list[tuple[int, int, int]]]:
    """By loader: first step, last step, and batches of a step, as the ledger of a job has them."""
    with Snapshot(path, ledger=True, signals=(), parts=loaders) as snapshot:
        body(snapshot, **loaders)
        snapshot.save()
    found: dict[str, list[tuple[int, int, int]]] = {}
    for stretch in read_ledger(path).stretches:
        known, each = found.setdefault(stretch.entry["loader"], []), stretch.entry["each"]
        first = known.pop()[0] if known and known[-1][1:] == (stretch.first - 1, each) else stretch.first
        known.append((first, stretch.last, each))
    return found


@pytest.mark.parametrize(("together", "found"), [(4, [(1, 1, 4), (2, 2, 2)]), (8, [(1, 1, 6)])])
def test_a_step_after_the_pass_took_the_rest_of_it(together: int, found: Any, tmp_path: Path) -> None:
    """As the last one of accumulated gradients."""

    def body(snapshot: Snapshot, data: Any, validation: Any) -> None:
        for number, _ in enumerate(data, 1):
            if number % together == 0:
                snapshot.step()
        snapshot.step()

    loaders = {name: midepoch.wrap(shuffled(), seed=1) for name in ("data", "validation")}
    assert trained(tmp_path / "snapshot.pt", body, **loaders)["data"] == found


def test_what_is_validated_with_is_not_trained_on(tmp_path: Path) -> None:
    def body(snapshot: Snapshot, data: Any, validation: Any) -> None:
        for epoch in snapshot.epochs(3):
            for number, _ in enumerate(data):
                snapshot.step()
                if number == 2:
                    for looked, _ in enumerate(validation):
                        if looked == 1 and epoch == 1:
                            break  # and left

    loaders = {"data": midepoch.wrap(shuffled(), seed=1), "validation": midepoch.wrap(shuffled(), seed=2)}
    assert trained(tmp_path / "snapshot.pt", body, **loaders) == {"data": [(1, 18, 1)]}


def test_two_loaders_in_turn_and_together(tmp_path: Path) -> None:
    def body(snapshot: Snapshot, one: Any, two: Any) -> None:
        for _ in snapshot.epochs(1):
            for _ in one:
                snapshot.step()
            for _ in zip(one, two, strict=False):
                snapshot.step()

    loaders = {"one": midepoch.wrap(shuffled(), seed=1), "two": midepoch.wrap(shuffled(), seed=2)}
    found = trained(tmp_path / "snapshot.pt", body, **loaders)
    assert found == {"one": [(1, 12, 1)], "two": [(7, 12, 1)]}


def test_a_loader_that_a_later_start_does_not_read(tmp_path: Path) -> None:
    for read in (("one", "two"), ("two",)):
        loaders = {name: midepoch.wrap(shuffled(), seed=1) for name in ("one", "two")}
        with Snapshot(tmp_path / "snapshot.pt", ledger=True, signals=(), parts=loaders) as snapshot:
            snapshot.load()
            for _ in zip(range(3), *(loaders[name] for name in read), strict=False):
                snapshot.step()
            snapshot.save()
    told_of = [{each.entry["loader"] for each in read_ledger(tmp_path).at(step)} for step in range(1, 7)]
    assert told_of == [{"one", "two"}] * 3 + [{"two"}] * 3


def test_a_source_that_cannot_be_computed_is_told_at_once(tmp_path: Path) -> None:
    def body(snapshot: Snapshot, data: Any) -> None:
        for _ in snapshot.epochs(2):
            for _ in data:
                snapshot.step()

    loader = midepoch.wrap(lambda: iter(range(5)), seed=1)
    with pytest.warns(midepoch.MidepochWarning, match="ledger does not say which samples data gives") as caught:
        found = trained(tmp_path / "snapshot.pt", body, data=loader)
    assert len([each for each in caught if "ledger" in str(each.message)]) == 1
    assert len(found["data"]) == 1
    (stretch,) = read_ledger(tmp_path).at(7)
    assert stretch.entry["unknown"]
    with pytest.raises(midepoch.UnsupportedSourceError, match="cannot be computed"):
        told(read_ledger(tmp_path))


def test_a_step_of_more_batches_than_are_remembered_is_not_told(tmp_path: Path) -> None:
    def body(snapshot: Snapshot, data: Any) -> None:
        next(iter(data))
        snapshot.step()
        for _ in range(200):  # epochs of 6 batches
            for _ in data:
                pass
        next(batches := iter(data))
        snapshot.step()
        next(batches)

    loader = midepoch.wrap(shuffled(), seed=1)
    with pytest.warns(midepoch.MidepochWarning, match="step 2 took more batches than are remembered"):
        assert trained(tmp_path / "snapshot.pt", body, data=loader)["data"][0] == (1, 1, 1)
    assert read_ledger(tmp_path).at(2)[0].entry["unknown"]


def test_what_was_finished_out_of_order_is_left_out(tmp_path: Path) -> None:
    """Until then, steps are told what was handed out."""
    given: list[list[int]] = []
    for start in range(2):
        loader = midepoch.wrap(shuffled(), seed=1)
        with Snapshot(tmp_path / "snapshot.pt", ledger=True, signals=(), data=loader) as snapshot:
            assert snapshot.load() is bool(start)
            tickets, batches = [], iter(loader)
            for _ in range(4):
                given.append(next(batches).tolist())
                tickets.append(loader.ticket)
                snapshot.step()
            for number in (2, 0) if start == 0 else (0, 1, 2, 3):
                loader.finish(tickets[number])
            snapshot.save()
    seen = told(read_ledger(tmp_path))
    assert [seen[step][0] for step in range(1, 9)] == [[batch] for batch in given]
    assert given[4:6] == [given[1], given[3]], "what was not finished came again"
    assert read_ledger(tmp_path).stretches[1].entry["omit"]


def test_padding_repeats_what_was_finished_out_of_order(tmp_path: Path) -> None:
    loader = midepoch.wrap(DataLoader(Numbers(22), 1, shuffle=True), seed=1, tail="pad")
    with Snapshot(tmp_path / "snapshot.pt", ledger=True, signals=(), data=loader) as snapshot:
        tickets = []
        for _ in zip(range(2), loader, strict=False):
            tickets.append(loader.ticket)
            snapshot.step()
        loader.finish(tickets[1])
        snapshot.save()
    job = Job(tmp_path / "snapshot.pt", shuffled, 4, {}, seed=1, tail="pad")
    while job.loader.epoch == 0:
        job.step()
    job.snapshot.save()
    ledger = read_ledger(tmp_path)
    assert {step: each for step, each in told(ledger).items() if step > 2} == job.seen
    assert sum(len(batches[0]) for batches in job.seen[job.snapshot.steps].values()) == 8, "three are repeated"
    for index in range(22):
        given = [(step, rank) for step, ranks in job.seen.items() for rank, (batch,) in ranks.items() if index in batch]
        assert [each for each in sights(ledger, index) if each[0] > 2] == given


def test_a_ledger_may_begin_late_and_pause(tmp_path: Path) -> None:
    for keeps in (False, True, False, True):
        loader = midepoch.wrap(shuffled(), seed=1)
        with Snapshot(tmp_path / "snapshot.pt", ledger=keeps, signals=(), data=loader) as snapshot:
            snapshot.load()
            batches = iter(loader)
            for _ in range(2):
                next(batches)
                snapshot.step()
            snapshot.save()
    ledger = read_ledger(tmp_path)
    assert [(each.first, each.last) for each in ledger.stretches] == [(7, 8)]
    with pytest.raises(SnapshotError, match=r"does not say what step 6 .*it begins after step 6"):
        ledger.at(6)
    for step in (0, 9):
        with pytest.raises(ValueError, match=f"step {step} is not of this run: name one from 1 to 8"):
            ledger.at(step)


def test_without_one_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="has 0 ledgers"):
        read_ledger(tmp_path)
    with pytest.raises(SnapshotError, match="is missing"):
        read_ledger(tmp_path / "snapshot.pt")
    with Snapshot(tmp_path / "snapshot.pt", signals=(), data=midepoch.wrap(shuffled(), seed=1)) as snapshot:
        snapshot.save()
    with pytest.raises(SnapshotError, match="has no ledger"):
        read_ledger(tmp_path / "snapshot.pt")
