"""Jobs under torchrun: workers are killed, machines are lost and come back, and each batch is made once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrun_job

from midepoch.tools.trace import trace
from support import forking

MODULES = ("torch.distributed.run", "torch._dynamo")  # the first optimizer imports the second, for a second and a half


class Job:
    """torchrun on this machine, in a session of its own."""

    def __init__(self, folder: Path, processes: int, *options: str, launcher: tuple[str, ...] = ()) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        # Restarted workers must not find the addresses of those before them, as they would in the agent's store.
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment["PYTHON_EXEC"] = forking.executable(*MODULES)
        launcher = launcher or ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
        torchrun = ["-m", "torch.distributed.run", *launcher, f"--nproc-per-node={processes}"]
        command = [*torchrun, torchrun_job.__file__, str(folder), *options]
        self.folder = folder
        self.process = forking.Program(command, modules=MODULES, env=environment, merged=True, new_session=True)

    def wait(self) -> str:
        try:
            output: str = self.process.communicate(timeout=240)[0]
        finally:
            self.kill()
        return output

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def events(folder: Path) -> list[dict[str, Any]]:
    """What all processes wrote down, each file's lines in their order, files by age."""
    found = []
    for path in sorted(folder.glob("log-*"), key=lambda path: int(path.name.split("-")[1])):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return found


def wait_for(condition: Any, job: Job, seconds: float = 300) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        assert job.process.poll() is None, job.wait()
        time.sleep(0.02)
    job.kill()
    raise AssertionError(f"nothing happened: {job.wait()}")


def pids(folder: Path, world_size: int) -> dict[int, int]:
    """The processes of the last start on so many ranks, once all have trained on some batches."""
    started = [event for event in events(folder) if "pid" in event]
    last = {event["rank"]: event for event in started if event["world_size"] == world_size}
    return {rank: event["pid"] for rank, event in last.items()} if len(last) == world_size else {}


def global_batches(folder: Path) -> dict[int, list[Any]]:
    """What all ranks together had at each step, which must be the same each time that a step was made."""
    batches: dict[tuple[int, int], dict[int, Any]] = {}
    for number, path in enumerate(sorted(folder.glob("log-*"))):
        del number
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if "step" in event:
                ranks = batches.setdefault((event["step"], event["world_size"]), {})
                again = ranks.setdefault(event["rank"], event["batch"])
                assert again == event["batch"], f"step {event['step']} differs when it is made again"
    found: dict[int, list[Any]] = {}
    for (step, world_size), ranks in sorted(batches.items()):
        if len(ranks) == world_size:
            samples = [sample for rank in range(world_size) for sample in ranks[rank]]
            assert found.setdefault(step, samples) == samples, f"step {step} differs on another number of processes"
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """The batches of one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    forking.run([torchrun_job.__file__, folder, "--pause=0"], modules=MODULES, check=True)
    found = global_batches(folder)
    assert len(found) == 40
    return found


def test_a_signal_to_one_process_ends_all_after_the_same_batch(
    uninterrupted: dict[int, list[Any]], tmp_path: Path
) -> None:
    job = Job(tmp_path, 2, "--every=1000", "--pause=0.1")  # processes ask each other twice a second
    wait_for(lambda: sum("step" in each for each in events(tmp_path)) > 6, job)
    os.kill(pids(tmp_path, 2)[1], signal.SIGUSR1)
    output = job.wait()
    assert job.process.returncode == 0, output
    left = {event["rank"]: event["left"] for event in events(tmp_path) if "left" in event}
    assert left.keys() == {0, 1} and left[0] == left[1], left
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["steps"] == left[0]
    assert not any("finished" in event for event in events(tmp_path)), "it was early enough"
    # Three processes go on; the third has generators of its own.
    job = Job(tmp_path, 3)
    output = job.wait()
    assert job.process.returncode == 0, output
    assert global_batches(tmp_path) == uninterrupted
    draws = [event["own"] for event in events(tmp_path) if event.get("step") == left[0] + 1]
    assert len(draws) == 3 and len({tuple(draw) for draw in draws}) == 3


def test_a_ledger_says_what_killed_ranks_were_trained_on(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, "--every=3", "--pause=0.05")
    wait_for(lambda: sum("step" in each for each in events(tmp_path)) > 15, job)
    for pid in pids(tmp_path, 2).values():
        os.kill(pid, signal.SIGKILL)
    job.wait()
    job = Job(tmp_path, 3)
    output = job.wait()
    assert job.process.returncode == 0, output
    trained_on: dict[int, dict[int, Any]] = {}
    for event in events(tmp_path):
        if "step" in event:
            before = trained_on.get(event["step"], {})
            survives = event["world_size"] == 3 or event["step"] <= job_resumed_at(tmp_path)
            trained_on[event["step"]] = {**before, event["rank"]: event["batch"]} if survives else before
    assert len(trained_on) == 40 and 0 < job_resumed_at(tmp_path) < 12
    for step, expected in trained_on.items():
        (answer,) = trace(tmp_path, step)["loaders"]
        told = {rank["rank"]: [batch["indices"] for batch in rank["batches"]] for rank in answer["ranks"]}
        assert told == {rank: [[int(sample[0]) for sample in batch]] for rank, batch in expected.items()}, step
    source = f"{torchrun_job.__file__}:source"
    for step in (1, job_resumed_at(tmp_path) + 1, 40):
        trace(tmp_path, step, source=source, out=tmp_path / f"{step}.pt")
        found = torch.load(tmp_path / f"{step}.pt", weights_only=False)
        assert {rank: batch.tolist() for rank, (batch,) in found.items()} == trained_on[step], "bit for bit"


def job_resumed_at(folder: Path) -> int:
    """The steps after which the latest start has gone on."""
    found: int = [event["steps"] for event in events(folder) if "pid" in event][-1]
    return found


def test_a_state_of_which_each_rank_knows_its_part(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, "--own", "--every=1000", "--pause=0.1")
    wait_for(lambda: sum("step" in each for each in events(tmp_path)) > 6, job)
    os.kill(pids(tmp_path, 2)[0], signal.SIGTERM)
    output = job.wait()
    assert job.process.returncode == 0, output
    left = next(event["left"] for event in events(tmp_path) if "left" in event)
    before = [each for each in events(tmp_path) if "step" in each and each["step"] <= left]
    job = Job(tmp_path, 2, "--own", "--every=1000", "--epochs=1")
    output = job.wait()
    assert job.process.returncode == 0, output
    samples = [sample[0] for event in events(tmp_path) if "step" in event for sample in event["batch"]]
    assert len(before) == 2 * left
    assert sorted(samples) == list(range(torchrun_job.SIZE)), "each sample once"


@pytest.mark.long  # two agents of torchrun, each with its own ranks
def test_machines_that_come_and_go(uninterrupted: dict[int, list[Any]], tmp_path: Path) -> None:
    """Agents of three machines, here in one: two begin, a third joins, and then two of them are lost.

    The first agent looks late whether somebody wants to join: its rank has stopped for another's signal by then.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def start(first: bool) -> Job:
        launcher = (
            "--nnodes=1:3", "--rdzv-id=elastic", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}",
            "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8,join_timeout=120,"
            f"is_host={int(first)}",
            "--max-restarts=20", f"--monitor-interval={3 if first else 0.2}",
        )  # fmt: skip
        return Job(tmp_path, 1, "--every=2", "--pause=0.02", launcher=launcher)

    (tmp_path / "pause").write_text("0.8")  # until all have been there
    agents = [start(first=True), start(first=False)]
    try:
        wait_for(lambda: trained(tmp_path, 2), agents[0])
        agents.append(start(first=False))
        wait_for(lambda: trained(tmp_path, 3), agents[0], 150)
        # Two machines are gone in an instant: their agents and their processes.
        lost = [child for agent in agents[1:] for child in children(agent.process.pid)]
        for agent in agents[1:]:
            agent.kill()
        for child in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        before = len(starts(tmp_path))
        finish(agents[0])
    finally:
        for agent in agents:
            agent.kill()
    assert global_batches(tmp_path) == uninterrupted
    began = starts(tmp_path)
    assert {event["world_size"] for event in began[:before]} >= {2, 3}
    assert {event["world_size"] for event in began[before:]} == {1}
    assert began[-1]["resumed"] and began[-1]["steps"] > 0


def finish(agent: Job) -> None:
    """Let the batches of its job take no longer than they do, to the end."""
    (agent.folder / "pause").unlink()
    output = agent.wait()
    assert agent.process.returncode == 0, output


def starts(folder: Path) -> list[dict[str, Any]]:
    """What each process wrote down when it began."""
    return [event for event in events(folder) if "pid" in event]


def trained(folder: Path, world_size: int) -> bool:
    """Whether all of so many ranks have trained on a batch together, and a snapshot has been saved since."""
    steps = [event for event in events(folder) if event.get("world_size") == world_size and "step" in event]
    return len({event["rank"] for event in steps}) == world_size and len({event["step"] for event in steps}) > 3


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children(process: int) -> list[int]:
    """All processes below one."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children(child)]
    return found


@pytest.mark.long
def test_a_group_that_cannot_talk_about_what_is_on_the_cpu(uninterrupted: dict[int, list[Any]], tmp_path: Path) -> None:
    """As NCCL's: snapshots make a group of their own, which waits no longer than that does."""
    job = Job(tmp_path, 2, "--backend=cuda:gloo", "--timeout=7", "--every=4")
    wait_for(lambda: sum("step" in each for each in events(tmp_path)) > 12, job)
    silent, other = pids(tmp_path, 2).values()
    os.kill(silent, signal.SIGSTOP)
    since = time.monotonic()
    wait_for(lambda: ended(other), job)
    assert 5 < time.monotonic() - since < 200, "not half an hour"
    os.kill(silent, signal.SIGKILL)
    output = job.wait()
    assert job.process.returncode != 0 and "Timed out waiting 7000ms" in output, output
    job = Job(tmp_path, 2, "--backend=cuda:gloo")
    output = job.wait()
    assert job.process.returncode == 0, output
    assert global_batches(tmp_path) == uninterrupted
    assert starts(tmp_path)[-1]["resumed"]
