"""Jobs under torchrun: workers are killed, machines are lost and come back, and each batch is made once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torchrun_job

from midepoch.tools.trace import trace
from support import forking, jobs


class Job:
    def __init__(self, folder: Path, processes: int, *options: str, launcher: Sequence[str] = ()) -> None:
        command = [torchrun_job.__file__, str(folder), *options]
        self.process = jobs.torchrun(processes, command, launcher, new_session=True)

    def wait(self) -> str:
        try:
            return self.process.communicate(timeout=240)[0]
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self) -> None:
        output = self.wait()
        assert self.process.returncode == 0, output

    def until(self, condition: Callable[[], Any]) -> Any:
        return jobs.wait_for(condition, self.process)


def pids(folder: Path, world_size: int) -> dict[int, int]:
    """The processes of the last start on so many ranks, once all have begun."""
    last = {event["rank"]: event["pid"] for event in jobs.events(folder, "pid", world_size=world_size)}
    return last if len(last) == world_size else {}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    folder = tmp_path_factory.mktemp("whole")
    command = [torchrun_job.__file__, str(folder), "--pause=0"]
    forking.run(command, modules=jobs.MODULES, env=jobs.environment(), check=True)
    found = jobs.global_batches(folder)
    assert len(found) == 40
    return found


def test_killed_ranks_and_one_signal_lose_no_step(uninterrupted: dict[int, list[Any]], tmp_path: Path) -> None:
    """Two ranks are killed; of three that go on, one receives a signal; one finishes. The ledger says so."""
    job = Job(tmp_path, 2, "--every=3", "--pause=0.05")
    job.until(lambda: len(jobs.events(tmp_path, "step")) > 15)
    for pid in pids(tmp_path, 2).values():
        os.kill(pid, signal.SIGKILL)
    job.wait()
    job = Job(tmp_path, 3, "--every=1000", "--pause=0.1")  # processes ask each other twice a second
    job.until(lambda: len(jobs.events(tmp_path, "step", world_size=3)) > 9)
    os.kill(pids(tmp_path, 3)[1], signal.SIGUSR1)
    job.finish()
    left = {event["rank"]: event["left"] for event in jobs.events(tmp_path, "left")}
    assert left.keys() == {0, 1, 2} and len(set(left.values())) == 1, left
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["steps"] == left[0]
    assert not jobs.events(tmp_path, "finished"), "it was early enough"
    (resumed_at,) = {event["steps"] for event in jobs.events(tmp_path, "pid", world_size=3)}
    draws = [event["own"] for event in jobs.events(tmp_path, "step", world_size=3) if event["step"] == resumed_at + 1]
    assert len(draws) == 3 and len({tuple(draw) for draw in draws}) == 3, "the third has generators of its own"
    Job(tmp_path, 1, "--pause=0").finish()
    assert jobs.global_batches(tmp_path) == uninterrupted

    trained_on: dict[int, dict[int, Any]] = {}
    for world_size in (2, 3, 1):  # what a later start has made again takes the place of what was lost
        again = jobs.events(tmp_path, "step", world_size=world_size)
        for event in again:
            trained_on[event["step"]] = {}
        for event in again:
            trained_on[event["step"]][event["rank"]] = event["batch"]
    assert len(trained_on) == 40 and 0 < resumed_at < 12
    for step, expected in trained_on.items():
        told = [(row["rank"], row["indices"]) for row in trace(tmp_path, step)["rows"]]
        assert told == [(rank, [int(sample[0]) for sample in batch]) for rank, batch in sorted(expected.items())], step
    for step in (1, resumed_at + 1, 40):
        trace(tmp_path, step, source=f"{torchrun_job.__file__}:source", out=tmp_path / f"{step}.pt")
        found = torch.load(tmp_path / f"{step}.pt", weights_only=False)
        assert {rank: batch.tolist() for rank, (batch,) in found.items()} == trained_on[step], "bit for bit"


def test_a_state_of_which_each_rank_knows_its_part(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, "--own", "--every=1000", "--pause=0.1")
    job.until(lambda: len(jobs.events(tmp_path, "step")) > 6)
    os.kill(pids(tmp_path, 2)[0], signal.SIGTERM)
    job.finish()
    left = jobs.events(tmp_path, "left")[0]["left"]
    assert len([each for each in jobs.events(tmp_path, "step") if each["step"] <= left]) == 2 * left
    Job(tmp_path, 2, "--own", "--every=1000", "--epochs=1", "--pause=0").finish()
    samples = [sample[0] for event in jobs.events(tmp_path, "step") for sample in event["batch"]]
    assert sorted(samples) == list(range(torchrun_job.SIZE)), "each sample once"


@pytest.mark.long  # two agents of torchrun, each with its own ranks
def test_machines_that_come_and_go(uninterrupted: dict[int, list[Any]], tmp_path: Path) -> None:
    """Agents of three machines, here in one: two begin, a third joins, and then two of them are lost.

    The first agent looks late whether somebody wants to join: its rank has stopped for another's signal by then.
    """
    port = jobs.free_port()

    def start(first: bool) -> Job:
        launcher = (
            "--nnodes=1:3", "--rdzv-id=elastic", f"--rdzv-endpoint=localhost:{port}",
            "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8,join_timeout=120,"
            f"is_host={int(first)}",
            "--max-restarts=20", f"--monitor-interval={3 if first else 0.2}",
        )  # fmt: skip
        return Job(tmp_path, 1, "--every=2", "--pause=0.02", launcher=launcher)

    def trained(world_size: int) -> bool:
        """Whether all of so many ranks have trained on batches together, and a snapshot has been saved since."""
        steps = jobs.events(tmp_path, "step", world_size=world_size)
        return len({event["rank"] for event in steps}) == world_size and len({event["step"] for event in steps}) > 3

    (tmp_path / "pause").write_text("0.8")  # until all have been there
    agents = [start(first=True), start(first=False)]
    try:
        agents[0].until(lambda: trained(2))
        agents.append(start(first=False))
        agents[0].until(lambda: trained(3))
        # Two machines are gone in an instant: their agents and their processes.
        lost = [child for agent in agents[1:] for child in psutil.Process(agent.process.pid).children(recursive=True)]
        for agent in agents[1:]:
            agent.kill()
        for child in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        before = len(jobs.events(tmp_path, "pid"))
        (tmp_path / "pause").unlink()
        agents[0].finish()
    finally:
        for agent in agents:
            agent.kill()
    assert jobs.global_batches(tmp_path) == uninterrupted
    began = jobs.events(tmp_path, "pid")
    assert {event["world_size"] for event in began[:before]} >= {2, 3}
    assert {event["world_size"] for event in began[before:]} == {1}
    assert began[-1]["resumed"] and began[-1]["steps"] > 0


@pytest.mark.long
def test_a_group_that_cannot_talk_about_what_is_on_the_cpu(uninterrupted: dict[int, list[Any]], tmp_path: Path) -> None:
    """As NCCL's: snapshots make a group of their own, which waits no longer than that does."""
    job = Job(tmp_path, 2, "--backend=cuda:gloo", "--timeout=7", "--every=4")
    job.until(lambda: len(jobs.events(tmp_path, "step")) > 12)
    silent, other = pids(tmp_path, 2).values()
    os.kill(silent, signal.SIGSTOP)
    since = time.monotonic()
    job.until(lambda: not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE)
    assert 5 < time.monotonic() - since < 200, "not half an hour"
    os.kill(silent, signal.SIGKILL)
    output = job.wait()
    assert job.process.returncode != 0 and "Timed out waiting 7000ms" in output, output
    Job(tmp_path, 2, "--backend=cuda:gloo").finish()
    assert jobs.global_batches(tmp_path) == uninterrupted
    assert jobs.events(tmp_path, "pid")[-1]["resumed"]
