"""One line for each trainer, and a real run of it that is cut and continued."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint
import torch.multiprocessing
from torch.utils.data import DataLoader

import midepoch
from support import jobs, sources
from support.kill_examples import assert_went_on
from support.places import ROOT, TESTS

dcp: Any = torch.distributed.checkpoint  # which does not say what it exports


EXAMPLES = ROOT / "examples"


def make(size: int = 22, batch_size: int = 2) -> midepoch.Loader:
    return midepoch.wrap(DataLoader(jobs.Rows(size), batch_size=batch_size, shuffle=True), seed=3)


def rest(loader: midepoch.Loader, epochs: int = 2) -> list[Any]:
    found: list[Any] = []
    while loader.epoch < epochs:
        found += [batch["x"].tolist() for batch in loader]
    return found


def whole(epochs: int = 2, **settings: Any) -> list[Any]:
    return rest(make(**settings), epochs)


def head(loader: midepoch.Loader, batches: int) -> list[Any]:
    endless = (batch for _ in itertools.count() for batch in loader)
    return [batch["x"].tolist() for batch in itertools.islice(endless, batches)]


# --- torch's distributed checkpoint -----------------------------------------------------------------------------------

def saved_in_the_background(folder: Path, loader: midepoch.Loader) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        saving = dcp.async_save({"loader": loader}, checkpoint_id=str(folder / "checkpoint"))
        head(loader, 2)  # training goes on meanwhile
        saving.result()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("cut", [0, 1, 11, 14])
@pytest.mark.parametrize("in_the_background", [False, True])
def test_distributed_checkpoint(in_the_background: bool, cut: int, tmp_path: Path) -> None:
    loader, resumed = make(), make()
    before = head(loader, cut)
    if in_the_background:
        saved_in_the_background(tmp_path, loader)
    else:
        dcp.save({"loader": loader}, checkpoint_id=str(tmp_path / "checkpoint"))
    dcp.load({"loader": resumed}, checkpoint_id=str(tmp_path / "checkpoint"))
    assert before + rest(resumed) == whole()


def checkpointed(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Two batches and a save in a world of two; a load and the rest of the epoch in one of three."""
    loader = midepoch.wrap(DataLoader(jobs.Rows(24), batch_size=6 // world_size, shuffle=True), seed=3)
    if world_size == 2:
        batches = head(loader, 2)
        dcp.save({"loader": loader}, checkpoint_id=str(folder / "checkpoint"))
        return batches
    dcp.load({"loader": loader}, checkpoint_id=str(folder / "checkpoint"))
    return rest(loader, 1)


def test_distributed_checkpoint_on_another_number_of_processes(tmp_path: Path) -> None:
    found = [rank for size in (2, 3) for rank in sources.in_gloo_world(checkpointed, size, size, tmp_path)]
    samples = [sample for batches in found for batch in batches for sample in batch]
    assert sorted(samples) == sorted(sample for batch in whole(1, size=24) for sample in batch)


# --- trainers that are installed apart, by `make trainers` ------------------------------------------------------------


def run_apart(trainer: str, job: str, folder: Path, processes: int | None, *arguments: str) -> str:
    """Run a job, under torchrun on so many processes, beside a trainer that lies in a folder of its own."""
    apart = Path(sys.prefix) / "trainers" / trainer
    if not apart.exists():
        pytest.skip(f"{trainer} is not installed: `make trainers` installs it, in a folder of its own, and runs this")
    path = os.pathsep.join(map(str, (apart, TESTS, *filter(None, [os.environ.get("PYTHONPATH")]))))
    environment = jobs.environment(PYTHONPATH=path, NODE_RANK="0", RAY_USAGE_STATS_ENABLED="0")
    command = [sys.executable]
    if processes is not None:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += [str(Path(__file__).parent / job), str(folder), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("trainer", ["composer", "ray", "torchtitan"])
def test_examples_are_killed_and_go_on(trainer: str, tmp_path: Path) -> None:
    name = {"composer": "composer_trainer.py", "ray": "ray_train.py", "torchtitan": "torchtitan_feed.py"}[trainer]
    options = {"composer": ["--import", "cpu_torchvision"], "ray": ["--kill-after", "14"]}.get(trainer, [])
    killed = [str(EXAMPLES / name), "--in-a-save", *options]  # the batches are those of two workers
    output = run_apart(trainer, "../support/kill_examples.py", tmp_path, None, *killed)
    # Ray's controller learns of a checkpoint some time after it was reported.
    assert_went_on(trainer, behind=3 if trainer == "ray" else 0, **json.loads(output)[name])


def test_composer_cut_at_every_batch(tmp_path: Path) -> None:
    """Also with fewer batches an epoch than there are; random numbers of the model and Composer's counts included."""
    run_apart("composer", "composer_job.py", tmp_path, 1, "--every-cut")
    cuts = json.loads((tmp_path / "cuts").read_text())
    assert [name for name, exact in cuts.items() if not exact] == []
    assert len(cuts) == 21 + 9 + 5 + 5 + 3 + 3


def test_composer_on_another_number_of_processes(tmp_path: Path) -> None:
    for processes, arguments in ((2, "--stop 5ba"), (3, "--resume 5 --stop 13ba"), (1, "--resume 11")):
        run_apart("composer", "composer_job.py", tmp_path, processes, *arguments.split())
    assert [*jobs.global_batches(tmp_path).items()] == [*enumerate(whole(size=66, batch_size=6), 1)]
    for processes, count in ((2, [0, 5]), (3, [1, 13]), (1, [2, 22])):
        counts = [event["count"] for event in jobs.events(tmp_path, "count", world_size=processes)]
        assert counts == [count] * processes, "Composer's own count of epochs and batches"


def test_torchtitan(tmp_path: Path) -> None:
    """1 -> 2 -> 3 processes, cut in three epochs; then four, of which two read the same since tensors are divided."""
    for processes, steps in ((1, 5), (2, 15), (3, 27)):
        run_apart("torchtitan", "torchtitan_job.py", tmp_path, processes, f"--steps={steps}")
    (tmp_path / "divided").mkdir()
    run_apart("torchtitan", "torchtitan_job.py", tmp_path / "divided", 4, "--steps=5", "--tensor-parallel=2")
    expected = json.loads((tmp_path / "expected").read_text())
    assert [*jobs.global_batches(tmp_path).items()] == [*enumerate(expected[:27], 1)]
    logs = [[event["batch"] for event in jobs.noted(tmp_path / "divided" / f"log-4-{rank}")] for rank in range(4)]
    assert logs[0] == logs[1] and logs[2] == logs[3]
    assert [one + two for one, two in zip(logs[0], logs[2], strict=True)] == expected[:5]


def ray_steps(folder: Path) -> set[int]:
    """The numbers of workers in a run, whose steps are those of an undisturbed run."""
    assert [*jobs.global_batches(folder).items()] == [*enumerate(whole(size=72, batch_size=6), 1)]
    return {event["world_size"] for event in jobs.events(folder, "step")}


def test_ray_train(tmp_path: Path) -> None:
    """A worker kills itself in the middle of an epoch, Ray starts all again, and three go on where two have stopped."""
    run_apart("ray", "ray_job.py", tmp_path, None)
    assert (tmp_path / "killed").exists()
    assert ray_steps(tmp_path) == {2, 3}


def test_rays_elastic_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine joins, Ray starts three workers in place of two; it is lost, and two go on."""
    monkeypatch.setenv("RAY_health_check_period_ms", "2000")  # it is missed sooner than in half a minute
    monkeypatch.setenv("RAY_health_check_failure_threshold", "4")
    run_apart("ray", "ray_job.py", tmp_path, None, "elastic")
    assert ray_steps(tmp_path) == {2, 3}
    last = max(tmp_path.glob("log-*"), key=lambda path: path.stat().st_mtime)
    assert last.name.startswith("log-2")


def restarts(folder: Path, ranks: int, **job: Any) -> list[int]:
    """The statuses of a job's ranks. Each step that all of them have read is compared with a job of one rank."""
    output = run_apart("inprocess", "inprocess_job.py", folder, None, str(ranks), json.dumps(job))
    statuses: list[int] = json.loads(output)
    reference = midepoch.wrap(DataLoader(jobs.Rows(90), batch_size=12, shuffle=True), seed=3, world=midepoch.World())
    expected = [sorted(map(tuple, batch["x"].tolist())) for _ in range(2) for batch in reference]
    steps: dict[tuple[int, int], list[Any]] = {}
    for log in folder.glob("log-*"):
        for line in log.read_text().splitlines():
            _, step, _, weight, batch = json.loads(line)
            steps.setdefault((int(log.name.split("-")[2]), step), []).extend(map(tuple, batch if weight else []))
    for (_, step), rows in steps.items():
        assert set(rows) <= set(expected[step])
        assert len(set(rows)) == len(rows)
    last = max(start for start, _ in steps)
    assert all(sorted(rows) == expected[step] for (start, step), rows in steps.items() if start == last)
    return statuses


@pytest.mark.parametrize(("options", "faults", "dead"), [
    ({}, [(0, 1, 4, "raise")], []),
    ({"workers": 2}, [(0, 1, 4, "raise"), (1, 2, 6, "kill"), (2, 0, 8, "kill in a save")], [0, 2]),
    ({"workers": 2, "outside": True, "persistent": True}, [(0, 2, 1, "kill"), (1, 0, 8, "raise")], [2]),
    ({"workers": 1, "outside": True, "snapshot": True}, [(0, 1, 0, "raise"), (1, 2, 11, "kill")], [2]),
])  # fmt: skip
def test_in_process_restarts(options: dict[str, Any], faults: list[Any], dead: list[int], tmp_path: Path) -> None:
    """Ranks die or fail, all others begin the function again, and the counts of samples say what was trained on."""
    statuses = restarts(tmp_path, 3, faults=faults, **options)
    assert statuses == [-9 if rank in dead else 0 for rank in range(3)], (tmp_path / "said-0").read_text()[-3000:]
    for rank in set(range(3)) - set(dead):
        assert torch.load(tmp_path / f"counts-{rank}.pt").unique().tolist() == [2]
    starts = {int(log.name.split("-")[2]) for log in tmp_path.glob("log-*")}
    assert starts == set(range(len(faults) + 1))


def test_an_in_process_restart_without_a_state_ends_the_job(tmp_path: Path) -> None:
    statuses = restarts(tmp_path, 2, faults=[(0, 1, 4, "raise")], forgets=True)
    assert statuses == [1, 1]
    told = "started again (restart 1), so the weights went back, but this loader did not"
    assert told in (tmp_path / "said-0").read_text()
    assert not list(tmp_path.glob("log-*-2-*"))  # not a restart without end


def test_the_example_of_in_process_restarts(tmp_path: Path) -> None:
    """A rank is killed. The second start goes back to the checkpoint at 120, and trains on all that is left."""
    if not (apart := Path(sys.prefix) / "trainers" / "inprocess").exists():
        pytest.skip("nvidia-resiliency-ext is not installed: `make trainers` installs it, and runs this")
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": jobs.free_port(), "PYTHONPATH": str(apart)}
    processes, said = [], [tmp_path / f"said-{rank}" for rank in range(3)]
    for rank, path in enumerate(said):
        command = [sys.executable, "-u", str(EXAMPLES / "inprocess_restart.py"), str(tmp_path)]
        with path.open("w") as file:
            environment = jobs.environment(**world, RANK=str(rank))
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
    jobs.wait_for(lambda: "up to 192" in said[1].read_text(), processes[1])
    processes[1].kill()
    assert [process.wait(300) for process in processes] == [0, -9, 0], said[0].read_text()[-3000:]
    steps: dict[tuple[int, int, int], list[int]] = {}
    for path in said:
        for found in re.finditer(r"start (\d), epoch (\d), up to (\d+): rank \d took (.*)", path.read_text()):
            start, epoch, position = map(int, found.groups()[:3])
            steps.setdefault((start, epoch, position), []).extend(json.loads(found[4]))
    for epoch, before in ((0, range(24, 121, 24)), (1, range(0))):
        after = range(24 * len(before) + 24, 601, 24)
        parts = [steps[0, epoch, each] for each in before] + [steps[1, epoch, each] for each in after]
        assert sorted(itertools.chain(*parts)) == list(range(600))


def test_feed_of_in_process_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for NVIDIA's package, which lies in a folder of its own: the adapter's own logic."""
    abort = type("RestartAbort", (BaseException,), {})
    modules: dict[str, dict[str, Any]] = {
        "": {}, ".inprocess": {"CallWrapper": types.SimpleNamespace, "FrozenState": object},
        ".inprocess.exception": {"RestartAbort": abort}, ".inprocess.finalize": {"Finalize": object},
    }  # fmt: skip
    for name, found in modules.items():
        module = types.ModuleType(f"nvidia_resiliency_ext{name}")
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "midepoch.trainers.inprocess", raising=False)
    from midepoch.trainers.inprocess import feed

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    finalize = mock.Mock(side_effect=lambda state: state)
    wrapper = types.SimpleNamespace(finalize=finalize)
    call: Any = types.SimpleNamespace(iteration=0, wrapper=wrapper)
    others = set(multiprocessing.active_children())
    loader = midepoch.wrap(DataLoader(jobs.Rows(12), batch_size=1, num_workers=1), seed=3)
    feed(call, loader)
    each = iter(loader)
    assert next(each)["x"][0, 0] == 1
    state = loader.state_dict()
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 1
    assert wrapper.finalize("state") == "state" and finalize.call_count == 1
    assert not workers & set(multiprocessing.active_children())

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    call.iteration = 1
    feed(call, loader)
    with pytest.raises(abort, match=r"restart 1\), so the weights went back, but this loader did not"):
        next(iter(loader))
    loader.load_state_dict(state)
    assert next(iter(loader))["x"][0, 0] == 3
    assert wrapper.finalize("state") == "state" and finalize.call_count == 2  # not once for each start

    call.iteration = 2
    feed(call, loader, world=midepoch.World())  # as of a mesh with two ranks in it that get the same batches
    loader.load_state_dict(state)
    assert [int(batch["x"][0, 0]) for batch in loader] == list(range(3, 12))
    loader.close()
    # Nothing but a RestartAbort ends the restarts.
    with pytest.raises(abort, match="feed takes a CallWrapper and a wrapped loader, got a NoneType and a Loader"):
        feed(None, loader)
    stated = midepoch.wrap(DataLoader(jobs.Rows(12), batch_size=1), seed=3, world=midepoch.World(0, 4))
    with pytest.raises(abort, match=r"wrapped with world= rank 0 of 4, and this process is rank 0 of the 2.*pass"):
        feed(call, stated)
    assert next(iter(stated))["x"][0, 0] == 0
    feed(call, stated, world=midepoch.World(1, 2))
    stated.load_state_dict(state)
    assert next(iter(stated))["x"][0, 0] == 4


# --- contracts --------------------------------------------------------------------------------------------------------


def test_whatever_asks_for_torchs_stateful() -> None:
    from torch.distributed.checkpoint.stateful import Stateful

    loader = make()
    assert isinstance(loader, Stateful) and isinstance(loader, midepoch.StatefulIterable)
    fresh, later = loader.state_dict(), make()
    head(later, 3)
    assert fresh.keys() == later.state_dict().keys(), "DCP loads by the keys of a fresh object"
