"""The world is read when iteration starts: trainers and launchers start their processes after `wrap`."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parent))  # the spawned processes take the import path over

import lightning_job
import sources

import midepoch
from midepoch import World

# --- Lightning ---


def run_lightning(folder: Path, phase: str, kill_at: int, *checkpoint: str) -> int:
    """One job of two processes; returns the exit code of the one that was started here."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    environment["OMP_NUM_THREADS"] = "1"
    script = str(Path(lightning_job.__file__))
    command = [sys.executable, "-W", "ignore", script, str(folder), phase, str(kill_at), *checkpoint]
    # A session of its own, so that what a killed job has left can be ended with it.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=180)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if kill_at < 0:
        assert process.returncode == 0, output
    return process.returncode


def received(folder: Path, phase: str) -> list[list[Any]]:
    """The batches of each rank."""
    return [
        [json.loads(line) for line in (folder / f"{phase}-{rank}").read_text().splitlines()]
        for rank in range(lightning_job.RANKS)
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[Any]]:
    """What an uninterrupted run gives each rank in two epochs, without Lightning."""
    ranks = []
    for rank in range(lightning_job.RANKS):
        source = sources.noisy_loader(lightning_job.SIZE, batch_size=lightning_job.BATCH_SIZE)
        loader = midepoch.wrap(source, seed=5, world=World(rank, lightning_job.RANKS))
        ranks.append([batch for _ in range(lightning_job.EPOCHS) for batch in sources.taken(loader)])
    return ranks


def test_a_lightning_job_is_killed_and_continued_by_its_own_checkpoint(
    expected: list[list[Any]], tmp_path: Path
) -> None:
    killed_at, saved_at = 5, lightning_job.SAVED_AT
    assert run_lightning(tmp_path, "killed", killed_at) != 0
    before = received(tmp_path, "killed")
    assert before == [batches[:killed_at] for batches in expected], "each rank sees its part"
    assert [len(batches) for batches in expected] == [12, 12]
    run_lightning(tmp_path, "resumed", -1, str(tmp_path / f"step={saved_at}.ckpt"))
    after = received(tmp_path, "resumed")
    assert after == [batches[saved_at:] for batches in expected], "the rest of the epoch, and the next one"


# --- torch.multiprocessing.spawn ---


def test_a_loader_wrapped_before_the_processes_are_spawned(tmp_path: Path) -> None:
    loader = midepoch.wrap(sources.noisy_loader(), seed=5)
    assert len(loader) == 6  # a world of one, here and now
    spawn(sources.spawned_rank, args=(loader, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    found = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    for rank, each in enumerate(found):
        there = midepoch.wrap(sources.noisy_loader(), seed=5, world=World(rank, 2))
        assert each["length"] == 3
        assert each["batches"] == sources.taken(there, 2)
    assert found[0]["state"] == found[1]["state"]
    assert (found[0]["state"]["world_size"], found[0]["state"]["position"]) == (2, 16)
    # The state of two processes continues in this one.
    loader.load_state_dict(found[1]["state"])
    whole = sources.flat(sources.taken(midepoch.wrap(sources.noisy_loader(), seed=5)))
    assert sources.flat(sources.taken(loader)) == whole[16:]


# --- processes that multiprocessing started ---


def fail_in_an_epoch(path: str) -> None:
    loader = midepoch.wrap(sources.noisy_loader(num_workers=2), seed=1)
    with midepoch.Snapshot(path, data=loader) as snapshot:
        for _ in loader:
            snapshot.step()
            raise ValueError("out of order")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_rank_that_multiprocessing_started_ends_with_its_workers_when_it_fails(method: str, tmp_path: Path) -> None:
    """Workers outlive signals as long as their rank wants them; nothing of atexit's runs in such a process."""
    context: Any = multiprocessing.get_context(method)
    rank = context.Process(target=fail_in_an_epoch, args=(str(tmp_path / "snapshot.pt"),))
    rank.start()
    rank.join(60)
    ended = rank.exitcode
    rank.kill()
    assert ended == 1
