"""The ledger of a run: what its lines say is what a job recorded, however it was killed, resumed and led elsewhere."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochWarning, Snapshot, SnapshotError
from midepoch.checkpoint.files import SnapshotFile
from midepoch.checkpoint.ledger import seal
from midepoch.order import Endless, Shuffled, Windowed
from midepoch.tools.ledgers import read_ledger
from midepoch.tools.trace import as_text, trace
from support import sources
from support.ledger_jobs import Job, Seen, sights, told


def source(size: int, batch_size: int, drop_last: bool, order: str) -> Any:
    orders: dict[str, Any] = {"windowed": Windowed(size, 3, 2), "endless": Endless(Shuffled(size))}
    sampler: Any = midepoch.ResumableSampler(size, shuffle=orders[order]) if order in orders else None
    return DataLoader(sources.Indices(size), batch_size, order == "shuffled", sampler, drop_last=drop_last)


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
    in_flight = 0 if "global_batch" in options else draw(st.sampled_from([0, 0, 1, 2]))
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
            elif action == "skip" and order == "endless" and not job._ahead:
                begin = draw(st.integers(0, 4 * size))
                job.loader.skip(begin, begin + draw(st.integers(1, 2 * size)))
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
            assert sorted(sights(ledger, index)) == sightings(kept, index), index


def sightings(seen: Seen, index: int) -> list[tuple[int, int]]:
    """The steps and ranks that were given a sample, as recorded."""
    of_ranks = [(step, rank, batches) for step, ranks in seen.items() for rank, batches in ranks.items()]
    return sorted((step, rank) for step, rank, batches in of_ranks for each in sources.flat(batches) if each == index)


# --- a run with three starts, to be damaged ---


def shuffled(size: int = 22) -> DataLoader[int]:
    return DataLoader(sources.Indices(size), 4, shuffle=True)


def three_starts(path: Path) -> Seen:
    """A run on 1, 2 and 1 ranks, with a skip in the second start and 2 steps taken back in the first."""
    seen = Seen()
    for ranks, steps, more, skips in ((1, 13, 2, False), (2, 3, 0, True), (1, 4, 0, False)):
        job = Job(path, shuffled, ranks, seen, seed=1)
        if skips:
            job.step()
            job.loader.skip(16, 19)
        job.save_after(steps - skips)
        for _ in range(more):
            job.step()
    return seen


def lines_of(path: Path) -> list[Path]:
    """The files of a ledger, once for each of their lines, the oldest first."""
    files = sorted(Path(f"{path}.ledger").iterdir(), key=lambda each: each.stat().st_mtime_ns)
    return [file for file in files for _ in file.read_text().splitlines()]


def test_a_line_for_each_session_and_each_start(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    seen = three_starts(path)
    ledger = read_ledger(path)
    assert [line["last"] for line in ledger.lines] == [6, 12, 13, 14, 15, 16, 20], "less what was taken back"
    assert told(ledger) == seen and len(seen) == 20
    assert len(lines_of(path)) == 6 + 7, "of steps, the last of which the snapshot has, and of sessions"
    assert read_ledger(tmp_path).path == path, "a folder will do"
    assert ledger.starts == [0, 13, 16]


def test_each_snapshot_names_its_own_lines(tmp_path: Path) -> None:
    """A run that is continued from an older snapshot, and then from a newer one that it had left."""
    path, seen = tmp_path / "snapshot.pt", dict[str, Seen]({"": {}})
    for begin, ranks, steps, end in (("", 1, 4, "a"), ("a", 2, 9, "b"), ("a", 3, 12, "c"), ("b", 1, 14, "d")):
        if begin:
            shutil.copy(tmp_path / begin, path)
        job = Job(path, shuffled, ranks, dict(seen[begin]), seed=1)
        job.save_after(steps - job.snapshot.steps)
        shutil.copy(path, tmp_path / end)
        assert told(read_ledger(path)) == job.seen and not read_ledger(path).problems
        seen[end] = job.seen
    assert len(read_ledger(path).starts) == 3 and len(lines_of(path)) > 6


def written(path: Path) -> int:
    return sum(file.stat().st_size for file in Path(f"{path}.ledger").iterdir())


def test_an_epoch_takes_half_a_kilobyte(tmp_path: Path) -> None:
    loader = midepoch.wrap(shuffled(400), seed=1)
    with Snapshot(tmp_path / "snapshot.pt", every=500, data=loader, ledger=True) as snapshot:
        for _ in snapshot.epochs(20):
            for _ in loader:
                snapshot.step()
    assert snapshot.steps == 2000
    assert written(snapshot.path) < 20 * 512


def test_a_kill_between_ledger_and_snapshot_takes_the_steps_back(tmp_path: Path) -> None:
    path, seen = tmp_path / "snapshot.pt", Seen()
    job = Job(path, shuffled, 1, seen, seed=1)
    job.save_after(2)
    job.leave()  # makes a line
    with mock.patch.object(SnapshotFile, "write", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        job.save_after(1)
    with lines_of(path)[-1].open("ab") as file:
        file.write(b'00000000 {"first":2,"la')  # and within a line
    kept = {step: given for step, given in seen.items() if step <= 2}
    assert told(read_ledger(path)) == kept and not read_ledger(path).problems
    Job(path, shuffled, 1, seen, seed=1).save_after(2)
    assert told(read_ledger(path)) == seen and len(seen) == 4


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


def test_damage_is_told_with_its_line_and_the_rest_is_used(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    seen, files = three_starts(path), lines_of(tmp_path / "snapshot.pt")
    for line, known in ((0, 14), (1, 14), (2, 14), (4, 14), (5, 19), (7, 19), (10, 19), (12, 16)):
        file = files[line]
        number, lines = line - files.index(file), file.read_bytes().splitlines(keepends=True)
        for damaged in (lines[number].replace(b":", b":1", 1), b"\xff\n", b"[]\n", b"\n"):
            file.write_bytes(b"".join([*lines[:number], damaged, *lines[number + 1 :]]))
            (problem,) = read_ledger(path).problems
            assert problem == f"{file}, line {number + 1}: 1 of its {len(lines)} lines are damaged or missing"
            assert agrees(path, seen) == known
        # Two lines in a row, another line in its place, the next one slid into it, and all from this one on.
        for rest in ([b"\n", b"\n", *lines[number + 2 :]], [lines[number - 1], *lines[number + 1 :]] * (number > 0),
                     lines[number + 1 :], []):  # fmt: skip
            file.write_bytes(b"".join([*lines[:number], *rest]))
            assert f"line {number + 1}: " in read_ledger(path).problems[0]
            assert agrees(path, seen) <= known
        assert f": {len(lines) - number} of its {len(lines)} lines" in read_ledger(path).problems[0]
        file.write_bytes(b"".join(lines))


@pytest.mark.parametrize("kept", [0, 1])
def test_a_run_goes_on_where_its_ledger_has_lost_lines(kept: int, tmp_path: Path) -> None:
    """The folder is gone, as where a snapshot was moved alone, or has lines of the first start only."""
    path = tmp_path / "snapshot.pt"
    seen, files = three_starts(path), sorted({*lines_of(path)}, key=lambda each: each.stat().st_mtime_ns)
    for file in files[kept:]:
        file.unlink()
    job = Job(path, shuffled, 1, seen, seed=1)
    for _ in range(6):
        job.save_after(1)
    assert all(f"{file}, line 1: " in "".join(read_ledger(path).problems) for file in files[kept:])
    assert agrees(path, seen) == (18 if kept else 6)
    with pytest.raises(SnapshotError, match=r"does not say what step 15 .*lines are damaged or missing"):
        read_ledger(path).at(15)


@pytest.mark.parametrize("taken", ["its files' content", "the folder"])
def test_what_another_run_wrote_in_its_place_is_damaged(taken: str, tmp_path: Path) -> None:
    seen = {run: three_starts(tmp_path / run / "snapshot.pt") for run in "ab"}
    mine, other = (dict.fromkeys(lines_of(tmp_path / run / "snapshot.pt")) for run in "ab")
    if taken == "the folder":
        shutil.rmtree(tmp_path / "a" / "snapshot.pt.ledger")
        shutil.copytree(tmp_path / "b" / "snapshot.pt.ledger", tmp_path / "a" / "snapshot.pt.ledger")
        assert "missing" in read_ledger(tmp_path / "a").problems[0]
    else:
        for to, file in zip(mine, other, strict=True):
            shutil.copyfile(file, to)
        assert len(read_ledger(tmp_path / "a").problems) == len(mine)
    assert agrees(tmp_path / "a" / "snapshot.pt", seen["a"]) == 0


@pytest.mark.parametrize("fails", ["fsync of the file", "fsync of the folder"])
def test_a_write_that_failed_is_made_again(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (fails == "fsync of the folder"):
            raise OSError(errno.EINVAL, "Invalid argument")

    seen = Seen()
    job = Job(tmp_path / "snapshot.pt", shuffled, 1, seen, seed=1)
    for number in range(30):
        ends: Any = contextlib.nullcontext()
        with monkeypatch.context() as patched, warnings.catch_warnings(action="ignore"):
            if 10 < number < 25:
                patched.setattr(os, "fsync", fail)
                ends = pytest.raises(SnapshotError, match=r"was not saved.*Invalid argument")
            with ends if fails == "fsync of the file" else contextlib.suppress(SnapshotError):
                job.save_after(1)
    assert not read_ledger(job.snapshot.path).problems and agrees(job.snapshot.path, seen) == 30


def test_epochs_of_one_step_each_are_written_down(tmp_path: Path) -> None:
    job = Job(tmp_path / "snapshot.pt", lambda: shuffled(4), 1, Seen(), seed=1)
    job.save_after(200)
    assert agrees(job.snapshot.path, job.seen) == 200
    assert written(job.snapshot.path) < 200 * 512


def test_a_snapshot_that_says_nonsense_of_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "snapshot.pt", shuffled, 1, {}, seed=1)
    said: list[Any] = [{"files": []}, "", "00000000 {}", None, seal({"files": []})[:-1]]
    for nonsense in said:
        monkeypatch.setattr(job.snapshot._ledger, "write", lambda: nonsense)  # noqa: B023  # called at once
        job.snapshot.save()
        for read in (read_ledger, lambda path: Job(path, shuffled, 1, {}, seed=1)):
            with pytest.raises(SnapshotError, match=r"is damaged \(ledger\)"):
                read(tmp_path / "snapshot.pt")


# --- which loaders ---


def trained(path: Path, body: Callable[..., None], names: Any = True, **loaders: Any) -> dict[str, list[int]]:
    """By loader, how many batches each step took, as the ledger of a job has them."""
    with Snapshot(path, ledger=names, signals=(), parts=loaders) as snapshot:
        body(snapshot, **loaders)
        snapshot.save()
    ledger = read_ledger(path)
    found = {name: [0] * ledger.steps for name in loaders}
    for step in range(1, ledger.steps + 1):
        for stretch in ledger.at(step):
            found[stretch["loader"]][step - 1] += len(stretch.batches(step))
    return found


def accumulates(together: int) -> Callable[..., None]:
    """The last step, after the pass, takes the rest of it."""

    def body(snapshot: Snapshot, one: Any, two: Any) -> None:
        for number, _ in enumerate(one, 1):
            if number % together == 0:
                snapshot.step()
        snapshot.step()

    return body


def validates(snapshot: Snapshot, one: Any, two: Any) -> None:
    for epoch in snapshot.epochs(3):
        for number, _ in enumerate(one):
            snapshot.step()
            if number == 2:
                for looked, _ in enumerate(two):
                    if looked == 1 and epoch == 1:
                        break  # and left


def reads_both(snapshot: Snapshot, one: Any, two: Any) -> None:
    for _ in snapshot.epochs(1):
        for _ in one:
            snapshot.step()
        for _ in zip(one, two, strict=False):
            snapshot.step()


def takes_turns(snapshot: Snapshot, one: Any, two: Any) -> None:
    for _ in range(2):
        others = iter(two)
        for _ in one:
            snapshot.step()
            next(others)
            snapshot.step()


@pytest.mark.parametrize(("body", "names", "one", "two", "lines"), [
    (accumulates(4), "one", [4, 2], [0] * 2, 2),
    (accumulates(8), ["one", "two"], [6], [0], 1),
    (validates, "one", [1] * 18, [0] * 18, 3),
    (validates, ["two", "one"], [1] * 18, [0, 0, 0, 6, *[0] * 5, 2, *[0] * 5, 6, 0, 0], 9),
    (reads_both, ["one", "two"], [1] * 12, [0] * 6 + [1] * 6, 2),
    (takes_turns, ["one", "two"], [1, 0] * 12, [0, 1] * 12, 24),
])  # fmt: skip
def test_a_step_is_of_the_loaders_named(body: Any, names: Any, one: Any, two: Any, lines: int, tmp_path: Path) -> None:
    loaders = {name: midepoch.wrap(shuffled(), seed=1) for name in ("one", "two")}
    assert trained(tmp_path / "snapshot.pt", body, names, **loaders) == {"one": one, "two": two}
    assert len(read_ledger(tmp_path).lines) == lines
    sessions = {each["session"] for line in read_ledger(tmp_path).lines for each in line["took"]}
    assert written(tmp_path / "snapshot.pt") < 400 * len(sessions) + 80 * lines


@pytest.mark.parametrize("names", [True, "three", ["one", "three"], 1, None, [["one"]], ""])
def test_which_of_several_loaders_has_to_be_said(names: Any, tmp_path: Path) -> None:
    loaders = {name: midepoch.wrap(shuffled(), seed=1) for name in ("one", "two")}
    with pytest.raises(ValueError, match=r"ledger=.* does not say which loaders .one, two. .*ledger=.'one'"):
        Snapshot(tmp_path / "snapshot.pt", ledger=names, signals=(), parts=loaders)
    with pytest.raises(ValueError, match="none is given"):
        Snapshot(tmp_path / "snapshot.pt", ledger=True, signals=(), model=torch.nn.Linear(1, 1))


def test_a_source_that_cannot_be_computed_is_told_at_once(tmp_path: Path) -> None:
    def body(snapshot: Snapshot, data: Any) -> None:
        for _ in snapshot.epochs(2):
            for _ in data:
                snapshot.step()

    loader = midepoch.wrap(lambda: iter(range(5)), seed=1)
    with pytest.warns(midepoch.MidepochWarning, match="ledger does not say which samples data gives") as caught:
        found = trained(tmp_path / "snapshot.pt", body, data=loader)
    assert len([each for each in caught if "ledger" in str(each.message)]) == 1
    assert found["data"] == [1] * 10
    with pytest.raises(midepoch.UnsupportedSourceError, match="data cannot be traced"):
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
    with pytest.warns(midepoch.MidepochWarning, match="a step took more batches than are remembered"):
        trained(tmp_path / "snapshot.pt", body, data=loader)
    assert told(read_ledger(tmp_path), only=1)
    with pytest.raises(midepoch.UnsupportedSourceError, match="step took more batches than are remembered"):
        told(read_ledger(tmp_path), only=2)


def test_what_was_finished_out_of_order_is_left_out_or_repeated(tmp_path: Path) -> None:
    """Steps are told what was handed out to them, also where it is not finished, or where it pads."""
    loader = midepoch.wrap(DataLoader(sources.Indices(22), 1, shuffle=True), seed=1, tail="pad")
    tickets, seen = [], Seen()
    with Snapshot(tmp_path / "snapshot.pt", ledger=True, signals=(), data=loader) as snapshot:
        for batch in itertools.islice(loader, 4):
            tickets.append(loader.ticket)
            snapshot.step()
            seen[snapshot.steps] = {0: [batch.tolist()]}
        loader.finish(tickets[2])
        snapshot.save()
    job = Job(tmp_path / "snapshot.pt", shuffled, 4, seen, seed=1, tail="pad")
    while job.loader.epoch == 0:
        job.step()
    job.snapshot.save()
    ledger = read_ledger(tmp_path)
    assert told(ledger) == job.seen and ledger.at(5)[0]["omit"]
    assert [seen[step][0][0][0] for step in (1, 2, 4)] == seen[5][0][0][:3], "what was not finished came again"
    assert sum(len(batches[0]) for batches in job.seen[job.snapshot.steps].values()) == 8, "three are repeated"
    for index in range(22):
        assert sorted(sights(ledger, index)) == sightings(job.seen, index)


def test_a_ledger_may_begin_late_and_pause(tmp_path: Path) -> None:
    ends: list[Any] = [contextlib.nullcontext() for _ in range(4)]
    ends[2] = pytest.warns(MidepochWarning, match=r"the ledger of .* ends here: pass ledger=True")
    for keeps, warns in zip((False, True, False, True), ends, strict=True):
        loader = midepoch.wrap(shuffled(), seed=1)
        with Snapshot(tmp_path / "snapshot.pt", ledger=keeps, signals=(), data=loader) as snapshot, warns:
            snapshot.load()
            for _ in itertools.islice(loader, 2):
                snapshot.step()
            snapshot.save()
    ledger = read_ledger(tmp_path)
    assert [(line["first"], line["last"]) for line in ledger.lines] == [(7, 8)]
    assert next(as_text(trace(tmp_path))) == f"steps 7 to 8 of {tmp_path / 'snapshot.pt'}, started after steps 6"
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
