"""A program in the shape of pytorch/examples: how little changes in it, and that it survives being killed.

`tests/jobs/programs/NAME.py` is a program with midepoch, and `NAME.diff` what was changed in one as people write them.
program_job.py runs the program, unchanged, and writes down all that it does.
"""

from __future__ import annotations

import difflib
import functools
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import program_job
import pytest

import midepoch
from support import forking, jobs
from support.places import ROOT

PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "docs" / "trainers.md"
Event = list[Any]
Kill = tuple[str, int]


NAME = "imagenet"
END = "LRScheduler.step"  # runs after the passes of an epoch
KILLS = (("batch", 5), ("validation", 1), ("save", 9), ("end", 1))  # of the short form, life by life
FED = "torchft_ddp"  # test_torchft.py runs it, with a lighthouse


# --- how little changes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [NAME, FED])
def test_a_diff_of_six_lines_leads_to_the_program(name: str) -> None:
    """From one without midepoch. A line that replaces another counts once, as one that is added or taken away does."""
    after, diff = (PROGRAMS / f"{name}.py").read_text().splitlines(), (PROGRAMS / f"{name}.diff").read_text()
    before, reached = list[str](), 0
    for hunk in re.split(r"^@@ ", diff.rstrip("\n"), flags=re.MULTILINE)[1:]:
        header, *lines = hunk.splitlines()
        begins = int(header.partition("+")[2].partition(",")[0]) - 1
        new = [line[1:] for line in lines if line[:1] != "-"]
        assert after[begins : begins + len(new)] == new, hunk
        before += [*after[reached:begins], *(line[1:] for line in lines if line[:1] != "+")]
        reached = begins + len(new)
    text = "\n".join([*before, *after[reached:]])
    assert "midepoch" not in text
    assert list(difflib.unified_diff(text.splitlines(), after, n=1, lineterm=""))[2:] == diff.splitlines()
    compile(text, name, "exec")
    blocks = re.findall(r"(?:^[-+].*\n?)+", diff, re.MULTILINE)
    assert 3 <= sum(max(len(re.findall(rf"^\{sign}", each, re.MULTILINE)) for sign in "+-") for each in blocks) <= 6
    assert all(len(line) <= 121 and ";" not in line for line in diff.splitlines() if line.startswith("+"))
    assert f"```diff\n{diff}```\n" in PAGE.read_text(), f"{PAGE} should show:\n{diff}"


# --- runs ------------------------------------------------------------------------------------------------------------


class Life(NamedTuple):
    """What each rank did until the program ended or was killed."""

    events: list[list[Event]]
    status: int


def run(folder: Path, ranks: int, kill: Kill = ("never", 1), rank: int = 0, options: str = "") -> Life:
    """Run the program on so many ranks; 0: in one process that knows of no world. The global batch is always the same.

    `rank` is the one that is killed; the others are killed after it.
    """
    folder.mkdir(exist_ok=True)
    where, number = (END, kill[1]) if kill[0] == "end" else kill
    log = folder / f"log-{time.time_ns()}"
    numbers = range(max(ranks, 1))
    told = [[where, str(number)] if at == rank else ["never", "1"] for at in numbers]
    program = [str(PROGRAMS / f"{NAME}.py"), *options.split()]
    commands = [[program_job.__file__, str(log), *each, *program] for each in told]
    processes = jobs.ranks(commands, distributed=ranks > 0, cwd=folder, merged=True)
    until = time.monotonic() + 300
    while any(each.poll() is None for each in processes):
        if any(each.returncode for each in processes) or time.monotonic() > until:
            for each in processes:
                each.kill()
            break
        time.sleep(0.002)
    said = "\n".join(each.communicate(300)[0] for each in processes)
    status = processes[rank].wait()
    assert status in ((0, -signal.SIGKILL) if kill[0] not in ("never", "signal") else (0,)), said[-4000:]
    return Life([jobs.noted(log.with_name(f"{log.name}.{at}")) for at in numbers], status)


@functools.cache
def undisturbed(ranks: int) -> list[list[Event]]:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), ranks).events


def happenings(events: list[Event]) -> dict[str, int]:
    """How often a rank may be killed in each place. Each save makes a dozen calls of the system's."""
    found = Counter(str(event[0]) for event in events)
    return {"batch": found["loss"], "validation": found["validate"], "save": 10 * found["saved"], "end": 3}


class Job:
    """The program's lives on two ranks, one after the other, compared with one that nobody disturbs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole = undisturbed(2)
        self.reached = [0] * len(self.whole)
        self.saves = [number for number, event in enumerate(self.whole[0]) if event[0] == "saved"]
        self.begins = {0}  # where the next life may begin

    def live(self, kill: Kill = ("never", 1), rank: int = 0) -> bool:
        """Whether it was killed."""
        life = run(self.folder, 2, kill, rank)
        for number, (events, whole) in enumerate(zip(life.events, self.whole, strict=True)):
            if not events:
                continue
            begins = [at for at in range(len(whole)) if whole[at : at + len(events)] == events]
            assert begins, f"rank {number} did something else after {self.reached[number]} events: {events[:3]}"
            # A process that is killed when it has saved cannot say so any more.
            left_out = [event for event in whole[self.reached[number] : begins[0]] if event[0] != "saved"]
            assert not left_out, f"rank {number} left out {left_out[:3]}"
            assert number or begins[0] in self.begins, f"it went on at event {begins[0]}, not at {self.begins}"
            self.reached[number] = begins[0] + len(events)
        done = [at + 1 for at in self.saves if at < self.reached[0]]
        coming = [at + 1 for at in self.saves if at >= self.reached[0]]
        # A save that was interrupted may have been done.
        self.begins = {done[-1] if done else 0, *coming[:1]} if life.status else {len(self.whole[0])}
        if not life.status:
            ends = zip(self.whole, self.reached, strict=True)
            assert all(event[0] == "saved" for whole, reached in ends for event in whole[reached:])
        return bool(life.status)


# --- it survives ----------------------------------------------------------------------------------------------------


def test_a_killed_program_does_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    """Batches, learning rates, losses, weights and what the model gives, bit for bit."""
    job = Job(tmp_path / "job")
    assert len({event[1][0] for event in job.whole[0] if event[0] == "step"}) > 1, "learning rates"
    for number, kill in enumerate(KILLS):
        assert job.live(kill, rank=0 if kill[0] in ("save", "end") else number % 2), kill
    assert not job.live()


@pytest.mark.long
@pytest.mark.parametrize("where", ["batch", "validation", "save", "end"])
def test_a_program_that_is_killed_twenty_times(where: str, tmp_path: Path) -> None:
    draws, most = random.Random(where), happenings(undisturbed(2)[0])
    kills = count = lives = 0
    while kills < 20:
        job = Job(tmp_path / f"job{count}")
        count += 1
        killed = True
        while killed:
            kill = (where, draws.randint(1, most[where])) if kills < 20 else ("never", 1)
            killed = job.live(kill, draws.randrange(2) if where in ("batch", "validation") else 0)
            kills += killed
            lives += 1
        shutil.rmtree(job.folder)
    print(f"{kills} kills in {where}, {lives} lives, {count} jobs")


def samples_of(ranks: Sequence[Sequence[Event]], first: int, last: float) -> dict[int, Counter[int]]:
    """The samples that the ranks trained on, by the number of the optimizer step."""
    found: dict[int, Counter[int]] = {}
    for events in ranks:
        step = first
        for event in events:
            if event[0] == "train" and step < last:
                found.setdefault(step, Counter()).update(event[1])
            step += event[0] == "step"
    return found


def resumed_elsewhere(ranks: int, kill: Kill, folder: Path) -> None:
    """Two ranks are killed, and `ranks` go on: each step has the samples, augmented alike, that it has on two.

    Not its losses: sums over another number of ranks are rounded otherwise.
    """
    whole = samples_of(undisturbed(2), 0, float("inf"))
    for epoch in range(3):
        of_epoch = sum((whole[step] for step in range(epoch * 8, epoch * 8 + 8)), Counter[int]())
        assert len(of_epoch) == 96 and set(of_epoch.values()) == {1}, "each sample once"
    killed = run(folder, 2, kill)
    assert killed.status == -signal.SIGKILL
    saves = [0, *(event[1] for event in killed.events[0] if event[0] == "saved")]
    resumed = run(folder, ranks)
    begin = 24 - sum(event[0] == "step" for event in resumed.events[0])
    assert begin == saves[-1] or (kill[0] == "save" and begin == saves[-1] + 3)
    head, tail = samples_of(killed.events, 0, begin), samples_of(resumed.events, begin, float("inf"))
    assert head | tail == whole and not head.keys() & tail.keys()


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_program_continues_on_another_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    resumed_elsewhere(ranks, ("batch", 8), tmp_path / "job")


@pytest.mark.long
def test_a_program_goes_on_with_other_ranks_twenty_times(tmp_path: Path) -> None:
    draws, most = random.Random(NAME), happenings(undisturbed(2)[0])
    for number in range(20):
        where, ranks = sorted(most)[number % 4], (0, 3)[number // 4 % 2]
        resumed_elsewhere(ranks, (where, draws.randint(1, most[where])), tmp_path / str(number))


def test_a_body_survives_an_empty_pass(tmp_path: Path) -> None:
    """SIGTERM at the last batch of an epoch; and with other workers afterwards."""
    whole = [event for event in undisturbed(0)[0] if event[0] != "saved"]
    ended = run(tmp_path / "job", 0, ("signal", 8))
    resumed = run(tmp_path / "job", 0, options="--workers 2")
    first, second = ([event for event in life.events[0] if event[0] != "saved"] for life in (ended, resumed))
    assert sum(event[0] == "step" for event in first) == 8
    assert first[-1][0] == "step" and second[0][0] == "validate"
    assert first + second == whole


def test_the_body_of_the_docs_survives_an_empty_pass(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("### Variables of the loop")[2]
    (tmp_path / "body.py").write_text(section.partition("```python\n")[2].partition("```")[0])

    def said(log: str, *end: str) -> list[str]:
        command = [program_job.__file__, str(tmp_path / log), *end, str(tmp_path / "body.py")]
        return forking.run(command, cwd=tmp_path, modules=jobs.MODULES, check=True).stdout.splitlines()

    assert said("first", "signal", "8") == []
    resumed = said("second", "never", "1")
    shutil.rmtree(tmp_path / "run")
    first, second = said("whole", "never", "1")
    assert resumed == [first.partition("last")[0] + "last done before", second]


def test_a_run_that_begins_from_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    for done, expected in ((2, [2, 3]), (1, [4])):  # the second time, the snapshot counts
        loader = midepoch.wrap([[1], [2]], seed=0)
        loader.seek(epoch=done)
        with midepoch.Snapshot(tmp_path / "snapshot.pt", every=1, data=loader) as snapshot:
            seen = []
            for epoch in snapshot.epochs(max(expected) + 1):
                assert loader.epoch == epoch
                seen.append(epoch)
                for _ in loader:
                    snapshot.step()
        assert seen == expected


def test_a_program_is_killed_under_torchrun(tmp_path: Path) -> None:
    """Its agent ends the other rank, and starts both again."""
    command = [program_job.__file__, str(tmp_path / "log"), "batch", "13", str(PROGRAMS / f"{NAME}.py")]
    options = ["--max-restarts=1", "--monitor-interval=0.05"]
    process = jobs.torchrun(2, command, options, cwd=tmp_path)
    said = process.communicate()[0]
    assert process.returncode == 0, said[-4000:]
    for rank, whole in enumerate(undisturbed(2)):
        events = jobs.noted(tmp_path / f"log.{rank}")
        tails = [at for at in range(len(events)) if events[at:] == whole[at - len(events) :]]
        assert tails, f"rank {rank} did something else"
        head = events[: tails[0]]
        assert head == whole[: len(head)] and len(head) >= len(whole) - (len(events) - tails[0]) > 0
