"""The world is read when iteration starts: trainers and launchers start their processes after `wrap`."""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

import midepoch
from midepoch import World
from support import forking, sources
from support.places import TESTS

# --- a loop that passes over bad samples ---

SALVAGING = """
import os, signal, sys
from pathlib import Path
from torch.utils.data import DataLoader
sys.path.insert(0, sys.argv[1])
import midepoch
from support import sources

log, kill_at = Path("log"), int(sys.argv[2])
loader = midepoch.wrap(DataLoader(sources.Failing(40, [3, 4, 17, 31], log.parent), 4, shuffle=True), seed=2)
snapshot = midepoch.Snapshot("snapshot.pt", every=1, data=loader)
for epoch in snapshot.epochs(2):
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except RuntimeError:
            kill_at -= 1
            if not kill_at:
                os.kill(os.getpid(), signal.SIGKILL)  # within the handler of an error: the batch is tried again
            continue
        except StopIteration:
            break
        kill_at -= 1
        if not kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with log.open("a") as file:
            file.write(f"{epoch} {batch[:, 0].int().tolist()}\\n")
        snapshot.step()
"""


def test_a_job_that_passes_over_bad_samples_is_killed(tmp_path: Path) -> None:
    def start(folder: Path, kill_at: int) -> int | None:
        folder.mkdir(exist_ok=True)
        job = forking.Program(["-c", SALVAGING, str(TESTS), str(kill_at)], cwd=folder)
        errors = job.communicate(120)[1]
        assert job.returncode in (0, -signal.SIGKILL), errors
        return job.returncode

    assert start(tmp_path / "whole", 0) == 0
    lives = 1
    while start(tmp_path / "killed", 4 + lives):
        lives += 1
    whole, killed = ((tmp_path / name / "log").read_text() for name in ("whole", "killed"))
    assert killed == whole
    assert lives > 2 and 10 < len(whole.splitlines()) < 20, "some batches are bad"


# --- a resumed loop whose number of the epoch is one too high ---

COUNTING = """
import json, os, signal, sys
from pathlib import Path
from torch.utils.data import DataLoader
sys.path.insert(0, sys.argv[1])
import midepoch
from support import sources

kill_at, log, checkpoint = int(sys.argv[2]), Path("log"), Path("checkpoint")
loader = midepoch.wrap(DataLoader(sources.Noisy(22), 4, shuffle=True), seed=2)
begun = 0
if checkpoint.exists():
    begun, state = json.loads(checkpoint.read_text())
    loader.load_state_dict(state)
while loader.epoch < 3:
    loader.sampler.set_epoch(begun)
    begun += 1
    for batch in loader:
        kill_at -= 1
        if not kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with log.open("a") as file:
            file.write(json.dumps(sources.plain(batch)) + "\\n")
        checkpoint.write_text(json.dumps([begun, loader.state_dict()]))  # the epochs that have begun
"""


def test_a_job_that_sets_an_epoch_too_high_is_killed(tmp_path: Path) -> None:
    def start(folder: Path, kill_at: int) -> str:
        folder.mkdir(exist_ok=True)
        job = forking.Program(["-c", COUNTING, str(TESTS), str(kill_at)], cwd=folder)
        errors = job.communicate(120)[1]
        assert job.returncode == (-signal.SIGKILL if kill_at else 0), errors
        return errors

    assert "MidepochWarning" not in start(tmp_path / "whole", 0)
    assert "MidepochWarning" not in start(tmp_path / "killed", 4)
    assert "set_epoch(1) is not followed: the loaded state is within epoch 0" in start(tmp_path / "killed", 0)
    whole, killed = ((tmp_path / name / "log").read_text() for name in ("whole", "killed"))
    assert killed == whole and len(whole.splitlines()) == 18


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


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_failing_rank_ends_with_its_workers(method: str, tmp_path: Path) -> None:
    """Workers outlive signals as long as their rank wants them; nothing of atexit's runs in such a process."""
    context: Any = multiprocessing.get_context(method)
    rank = context.Process(target=sources.fail_in_an_epoch, args=(str(tmp_path / "snapshot.pt"),))
    rank.start()
    rank.join(300)
    ended = rank.exitcode
    rank.kill()
    assert ended == 1


_KEPT: list[Any] = []  # until the process ends


def finish_an_epoch(path: str) -> None:
    loader = midepoch.wrap(
        DataLoader(sources.Indices(40), batch_size=4, num_workers=2, persistent_workers=True), seed=1
    )
    _KEPT.extend([loader, midepoch.Snapshot(path, data=loader)])
    list(loader)


def test_a_rank_ends_well_with_persistent_workers(tmp_path: Path) -> None:
    """torch takes a worker that dies of the signal that ends it for one that was killed."""
    codes = []
    for _ in range(8):
        rank = multiprocessing.get_context("fork").Process(target=finish_an_epoch, args=(str(tmp_path / "s.pt"),))
        rank.start()
        rank.join(300)
        codes.append(rank.exitcode)
        rank.kill()
    assert codes == [0] * 8


class Waiting(sources.Indices):
    """Waits for ever at one sample; `how`: in Python, or in C, where Python's handlers of signals are not run."""

    def __init__(self, how: str) -> None:
        super().__init__(40)
        self.how = how

    def __getitem__(self, index: int) -> int:
        while index == 20 and self.how == "in Python":
            time.sleep(10)
        if index == 20:
            libc = ctypes.CDLL(None)
            mutex = ctypes.create_string_buffer(64)
            libc.pthread_mutex_init(mutex, None)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)
        return index


def time_out(path: str, how: str, close: bool) -> None:
    loader = midepoch.wrap(DataLoader(Waiting(how), batch_size=4, num_workers=2, timeout=1), seed=1)
    _KEPT.extend([loader, midepoch.Snapshot(path, data=loader)])
    iterator = iter(loader)
    with pytest.raises(midepoch.SourceError, match="timed out"):
        _KEPT.extend([iterator, *iterator])
    if close:
        loader.close()
        assert not multiprocessing.active_children()


@pytest.mark.parametrize(("how", "close"), [("in Python", True), ("in C", False)])
def test_a_worker_that_waits_for_ever_is_ended(how: str, close: bool, tmp_path: Path) -> None:
    """By what ends its loader, and by its process's end."""
    rank = multiprocessing.get_context("fork").Process(target=time_out, args=(str(tmp_path / "s.pt"), how, close))
    rank.start()
    rank.join(300)
    ended = rank.exitcode
    rank.kill()
    assert ended == 0


def read_in_a_fork(loader: Any) -> None:
    assert len(list(loader)) == 10
    loader.close()


def test_a_forked_process_has_persistent_workers_of_its_own() -> None:
    source: Any = DataLoader(sources.Indices(40), batch_size=4, num_workers=1, persistent_workers=True)
    with midepoch.wrap(source, seed=0) as loader:
        assert len(list(loader)) == 10
        process = multiprocessing.get_context("fork").Process(target=read_in_a_fork, args=(loader,))
        process.start()
        process.join(300)
        assert process.exitcode == 0
        assert len(list(loader)) == 10


BLOCKED = """
import multiprocessing, signal, sys
from torch.utils.data import DataLoader
import midepoch

def tell(connection):
    connection.send(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    source = DataLoader(list(range(8)), batch_size=4, num_workers=1, multiprocessing_context=context)
    loader = midepoch.wrap(source, seed=0)
    snapshot = midepoch.Snapshot("s.pt", data=loader)
    list(loader)
    here, there = context.Pipe()
    process = context.Process(target=tell, args=(there,))
    process.start()
    print(here.recv(), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    process.join()
"""


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(each, marks=pytest.mark.long) for each in ("spawn", "forkserver"))]
)
def test_other_processes_have_no_signals_blocked(method: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(BLOCKED)
    command = [sys.executable, "job.py", method]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[0] == "[] []", done.stderr


def die(worker: int) -> None:
    if worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["DataLoader", "StatefulDataLoader"])
def test_a_worker_that_dies_while_it_starts_is_told_of(kind: str) -> None:
    loaders: Any = torch.utils.data
    if kind == "StatefulDataLoader":
        loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    source = getattr(loaders, kind)(sources.Indices(40), batch_size=4, num_workers=2, worker_init_fn=die)
    with midepoch.wrap(source, seed=0) as loader, pytest.raises(midepoch.SourceError, match=r"DataLoader worker .*use"):
        list(loader)


# --- a loader that is dropped ---


class Cycle:
    """Garbage that refers to itself, so that only the collector finds it."""

    def __init__(self, *kept: Any) -> None:
        self.kept, self.itself = kept, self


def workers_here() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def still_there(workers: set[int], seconds: float = 120.0) -> set[int]:
    until = time.monotonic() + seconds
    left = workers
    while left and time.monotonic() < until:
        time.sleep(0.01)
        left = {pid for pid in left if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"}
    return left


def read_whole(loader: Any) -> Any:
    return list(loader)


def read_to_its_middle(loader: Any) -> Any:
    iterator = iter(loader)
    return iterator, next(iterator)


def map_style(persistent: bool) -> Any:
    data = sources.Indices(40)
    return DataLoader(data, batch_size=4, num_workers=2, persistent_workers=persistent, shuffle=True)


def iterable(persistent: bool) -> Any:
    return DataLoader(sources.Stream(40), batch_size=4, num_workers=2, persistent_workers=persistent)


def stateful(persistent: bool) -> Any:
    dataloaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    data = sources.Indices(40)
    return dataloaders.StatefulDataLoader(data, batch_size=4, num_workers=2, persistent_workers=persistent)


@pytest.mark.parametrize("in_a_cycle", [False, True], ids=["by_itself", "in_a_cycle"])
@pytest.mark.parametrize(
    ("make", "persistent", "read"),
    [
        (map_style, True, read_whole),
        (map_style, True, read_to_its_middle),
        (iterable, True, read_to_its_middle),
        (stateful, True, read_to_its_middle),
    ],
)
def test_a_loader_that_is_dropped_ends_its_workers_at_once(
    make: Any, persistent: bool, read: Any, in_a_cycle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last reference, or by the collector, which may close the workers' queues before they are told to leave."""
    sources.be_patient(monkeypatch)
    gc.collect()
    before = workers_here()
    loader = midepoch.wrap(make(persistent), seed=0, shard=True if make is iterable else None)
    kept: Any = read(loader)
    started = workers_here() - before
    assert len(started) == 2
    kept = Cycle(loader, kept) if in_a_cycle else kept
    begin = time.monotonic()
    del loader, kept
    if in_a_cycle:
        gc.collect()
    assert time.monotonic() - begin < sources.PATIENCE / 2
    assert not still_there(started)
