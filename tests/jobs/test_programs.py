"""Programs in the shapes of pytorch/examples and timm: how little changes in them, and that they survive being killed.

`tests/jobs/programs/NAME.py` is a program with midepoch, and `NAME.diff` what was changed in one as people write them.
program_job.py runs the program, unchanged, and writes down all that it does.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import program_job
import pytest

import midepoch
from support import forking
from support.places import ROOT

PROGRAMS = Path(__file__).parent / "programs"
MODULES = ("torch._dynamo", "torch.distributed.fsdp")  # which the first optimizer imports, in a second and a half
PAGE = ROOT / "docs" / "trainers.md"
Event = list[Any]
Kill = tuple[str, int]


class Shape(NamedTuple):
    """How a program is run.

    Attributes:
        ranks: processes; 0 for a program that knows of one process only.
        end: the function, by its qualified name, that runs behind the passes of an epoch.
        arguments: for so many ranks. They keep the batch of all ranks together the same.
        kills: for the short form: where a job is killed, life by life.
    """

    ranks: int
    end: str
    arguments: dict[int, str]
    kills: tuple[Kill, ...]


SHAPES = {
    "mnist": Shape(0, "LRScheduler.step", {0: ""}, (("batch", 5), ("validation", 2), ("save", 9), ("end", 1))),
    "imagenet": Shape(
        2, "LRScheduler.step", {1: "", 2: "", 3: ""}, (("batch", 5), ("validation", 1), ("save", 9), ("end", 1))
    ),
    "multigpu_torchrun": Shape(
        2, "Trainer._save_snapshot", {ranks: f"3 1 --batch_size {12 // ranks}" for ranks in (1, 2, 3)},
        (("batch", 5), ("save", 9), ("end", 1)),
    ),
    "mingpt_ddp": Shape(
        2, "Trainer._save_snapshot", {ranks: f"--batch-size {12 // ranks}" for ranks in (1, 2, 3)},
        (("batch", 5), ("validation", 1), ("save", 9), ("end", 1)),
    ),
    "timm_train": Shape(
        2, "CosineLRScheduler.step", {ranks: f"-b {6 // ranks}" for ranks in (1, 2, 3)},
        (("batch", 9), ("validation", 2), ("save", 9), ("end", 1)),
    ),
}  # fmt: skip
NAMES = list(SHAPES)
FED = "torchft_ddp"  # test_torchft.py runs it, with a lighthouse


# --- how little changes ----------------------------------------------------------------------------------------------


def diff_of(name: str) -> str:
    return (PROGRAMS / f"{name}.diff").read_text().rstrip("\n")


@pytest.mark.parametrize("name", [*NAMES, FED])
def test_a_diff_leads_back_to_a_program_without_midepoch(name: str) -> None:
    after = (PROGRAMS / f"{name}.py").read_text().splitlines()
    before, reached = list[str](), 0
    for hunk in re.split(r"^@@ ", diff_of(name), flags=re.MULTILINE)[1:]:
        header, *lines = hunk.splitlines()
        begins = int(header.partition("+")[2].partition(",")[0]) - 1
        new = [line[1:] for line in lines if line[:1] != "-"]
        assert after[begins : begins + len(new)] == new, hunk
        before += [*after[reached:begins], *(line[1:] for line in lines if line[:1] != "+")]
        reached = begins + len(new)
    text = "\n".join([*before, *after[reached:]])
    assert "midepoch" not in text
    assert list(difflib.unified_diff(text.splitlines(), after, n=1, lineterm=""))[2:] == diff_of(name).splitlines()
    compile(text, name, "exec")


def changed_lines(name: str) -> int:
    """A line that replaces another one counts once; so does each line that is added or taken away."""
    count = 0
    for block in re.findall(r"(?:^[-+].*\n?)+", diff_of(name), re.MULTILINE):
        count += max(len(re.findall(rf"^\{sign}", block, re.MULTILINE)) for sign in "+-")
    return count


@pytest.mark.parametrize("name", [*NAMES, FED])
def test_six_lines_are_changed_at_most(name: str) -> None:
    assert 3 <= changed_lines(name) <= 6
    added = [line for line in diff_of(name).splitlines() if line.startswith("+")]
    assert all(len(line) <= 121 and ";" not in line for line in added)


@pytest.mark.parametrize("name", ["imagenet", FED])
def test_the_docs_show_the_changes(name: str) -> None:
    assert f"```diff\n{diff_of(name)}\n```\n" in PAGE.read_text(), f"{PAGE} should show:\n{diff_of(name)}"


# --- runs ------------------------------------------------------------------------------------------------------------


class Life(NamedTuple):
    """What each rank did until the program ended or was killed."""

    events: list[list[Event]]
    status: int


def run(name: str, folder: Path, ranks: int, kill: Kill = ("never", 1), rank: int = 0, options: str = "") -> Life:
    """Run a program on so many ranks. `rank` is the one that is killed; the others are killed after it."""
    folder.mkdir(exist_ok=True)
    where, number = (SHAPES[name].end, kill[1]) if kill[0] == "end" else kill
    log = folder / f"log-{time.time_ns()}"
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if ranks:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
        environment |= {"WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    processes: list[forking.Program] = []
    for at in range(max(ranks, 1)):
        of_rank = {"RANK": str(at), "LOCAL_RANK": str(at)} if ranks else {}
        told = [where, str(number)] if at == rank else ["never", "1"]
        command = [program_job.__file__, str(log), *told, str(PROGRAMS / f"{name}.py")]
        arguments = f"{SHAPES[name].arguments[ranks]} {options}".split()
        environment |= of_rank
        processes.append(
            forking.Program([*command, *arguments], modules=MODULES, cwd=folder, env=environment, merged=True)
        )
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
    logs = (log.with_name(f"{log.name}.{at}") for at in range(max(ranks, 1)))
    return Life([[json.loads(line) for line in each.read_text().splitlines()] for each in logs], status)


@functools.cache
def undisturbed(name: str, ranks: int, options: str) -> list[list[Event]]:
    with tempfile.TemporaryDirectory() as folder:
        return run(name, Path(folder), ranks, options=options).events


def happenings(events: list[Event]) -> dict[str, int]:
    """How often a rank may be killed in each place. Each save makes a dozen calls of the system's."""
    found = Counter(str(event[0]) for event in events)
    return {"batch": found["loss"], "validation": found["validate"], "save": 10 * found["saved"], "end": 3}


class Job:
    """A program's lives, one after the other, compared with one that nobody disturbs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.ranks = name, folder, SHAPES[name].ranks
        self.whole = undisturbed(name, self.ranks, "")
        self.reached = [0] * len(self.whole)
        self.saves = [number for number, event in enumerate(self.whole[0]) if event[0] == "saved"]
        self.begins = {0}  # where the next life may begin

    def live(self, kill: Kill = ("never", 1), rank: int = 0) -> bool:
        """Whether it was killed."""
        life = run(self.name, self.folder, self.ranks, kill, rank)
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


# --- they survive ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_program_does_what_an_undisturbed_one_does(name: str, tmp_path: Path) -> None:
    """Batches, learning rates, losses, weights and what the model gives, bit for bit."""
    job = Job(name, tmp_path / "job")
    learning_rates = {event[1][0] for event in job.whole[0] if event[0] == "step"}
    assert (len(learning_rates) > 1) == (name not in ("multigpu_torchrun", "mingpt_ddp"))
    for number, kill in enumerate(SHAPES[name].kills):
        assert job.live(kill, rank=0 if kill[0] in ("save", "end") else number % max(job.ranks, 1)), kill
    assert not job.live()


@pytest.mark.long
@pytest.mark.parametrize("where", ["batch", "validation", "save", "end"])
@pytest.mark.parametrize("name", NAMES)
def test_a_program_that_is_killed_twenty_times(name: str, where: str, tmp_path: Path) -> None:
    shape, draws = SHAPES[name], random.Random(f"{name} {where}")
    if where not in {kill[0] for kill in shape.kills}:
        pytest.skip(f"the shape of {name} has none")
    most = happenings(undisturbed(name, shape.ranks, "")[0])
    kills = jobs = lives = 0
    while kills < 20:
        job = Job(name, tmp_path / f"job{jobs}")
        jobs += 1
        killed = True
        while killed:
            kill = (where, draws.randint(1, most[where])) if kills < 20 else ("never", 1)
            rank = draws.randrange(max(shape.ranks, 1)) if where in ("batch", "validation") else 0
            killed = job.live(kill, rank)
            kills += killed
            lives += 1
        shutil.rmtree(job.folder)
    print(f"{name}: {kills} kills in {where}, {lives} lives, {jobs} jobs")


# Sums over another number of ranks are rounded otherwise, so samples are compared, not losses. Two samples that mixup
# has made one of cannot be told apart any more.
DISTRIBUTED = [name for name in NAMES if SHAPES[name].ranks]
OPTIONS = {"timm_train": "--mixup 0"}


def samples_of(events: Sequence[Event], first: int, last: float) -> dict[int, Counter[int]]:
    """The samples that a rank trained on, by the number of the optimizer step."""
    found: dict[int, Counter[int]] = {}
    step = first
    for event in events:
        if event[0] == "train" and step < last:
            found.setdefault(step, Counter()).update(event[1])
        step += event[0] == "step"
    return found


def together(ranks: Sequence[dict[int, Counter[int]]]) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = {}
    for each in ranks:
        for step, samples in each.items():
            found.setdefault(step, Counter()).update(samples)
    return found


def resumed_elsewhere(name: str, ranks: int, kill: Kill, folder: Path) -> None:
    """Two ranks are killed, and `ranks` go on: each step has the samples, augmented alike, that it has on two."""
    options = OPTIONS.get(name, "")
    whole = together([samples_of(events, 0, float("inf")) for events in undisturbed(name, 2, options)])
    for epoch in range(3):
        of_epoch = Counter[int]()
        for step in range(epoch * 8, epoch * 8 + 8):
            of_epoch += whole[step]
        assert len(of_epoch) == 96 and set(of_epoch.values()) == {1}, "each sample once"
    killed = run(name, folder, 2, kill, options=options)
    assert killed.status == -signal.SIGKILL
    saves = [0, *(event[1] for event in killed.events[0] if event[0] == "saved")]
    resumed = run(name, folder, ranks, options=options)
    begin = 24 - sum(event[0] == "step" for event in resumed.events[0])
    assert begin == saves[-1] or (kill[0] == "save" and begin == saves[-1] + 3)
    head = together([samples_of(events, 0, begin) for events in killed.events])
    tail = together([samples_of(events, begin, float("inf")) for events in resumed.events])
    assert head | tail == whole and not head.keys() & tail.keys()


@pytest.mark.parametrize(("name", "ranks"), [(name, 1 + 2 * (number % 2)) for number, name in enumerate(DISTRIBUTED)])
def test_a_program_goes_on_with_another_number_of_ranks(name: str, ranks: int, tmp_path: Path) -> None:
    number = 8 if name != "timm_train" else 17
    resumed_elsewhere(name, ranks, ("batch", number), tmp_path / "job")


@pytest.mark.long
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_a_program_goes_on_with_other_ranks_twenty_times(name: str, tmp_path: Path) -> None:
    draws, places = random.Random(name), sorted({kill[0] for kill in SHAPES[name].kills})
    most = happenings(undisturbed(name, 2, OPTIONS.get(name, ""))[0])
    for number in range(20):
        where = places[number % len(places)]
        ranks = 1 + 2 * (number // len(places) % 2)
        resumed_elsewhere(name, ranks, (where, draws.randint(1, most[where])), tmp_path / str(number))


@pytest.mark.parametrize("name", NAMES)
def test_a_body_survives_an_empty_pass(name: str, tmp_path: Path) -> None:
    """SIGTERM at the last batch of an epoch; also with other workers afterwards, where a program takes their number."""
    ranks = min(SHAPES[name].ranks, 1)
    whole = [event for event in undisturbed(name, ranks, "")[0] if event[0] != "saved"]
    ended = run(name, tmp_path / "job", ranks, ("signal", 8))
    resumed = run(name, tmp_path / "job", ranks, options="--workers 2" if name in ("mnist", "imagenet") else "")
    first, second = ([event for event in life.events[0] if event[0] != "saved"] for life in (ended, resumed))
    assert sum(event[0] == "step" for event in first) == 8
    assert first[-1][0] == "step" and second[0][0] == ("train" if name == "multigpu_torchrun" else "validate")
    assert first + second == whole


def test_the_body_of_the_docs_survives_an_empty_pass(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("### Variables of the loop")[2]
    (tmp_path / "body.py").write_text(section.partition("```python\n")[2].partition("```")[0])

    def said(log: str, *end: str) -> list[str]:
        command = [program_job.__file__, str(tmp_path / log), *end, str(tmp_path / "body.py")]
        return forking.run(command, cwd=tmp_path, modules=MODULES, check=True).stdout.splitlines()

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
    name = "mingpt_ddp"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    # Restarted workers must not find the addresses of those before them, as they would in the agent's store.
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHON_EXEC": forking.executable(*MODULES)}
    torchrun = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    torchrun += ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.05"]
    command = [*torchrun, program_job.__file__, str(tmp_path / "log"), "batch", "13", str(PROGRAMS / f"{name}.py")]
    forking.run(command, modules=MODULES, cwd=tmp_path, env=environment, check=True)
    for rank, whole in enumerate(undisturbed(name, 2, "")):
        events = [json.loads(line) for line in (tmp_path / f"log.{rank}").read_text().splitlines()]
        tails = [at for at in range(len(events)) if events[at:] == whole[at - len(events) :]]
        assert tails, f"rank {rank} did something else"
        head = events[: tails[0]]
        assert head == whole[: len(head)] and len(head) >= len(whole) - (len(events) - tails[0]) > 0
