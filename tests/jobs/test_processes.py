"""Processes around a loader: killed jobs, ranks that multiprocessing starts, workers that die, wait, or are dropped."""

from __future__ import annotations

import ctypes
import functools
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader

import midepoch
from midepoch import World
from support import fault_sources as faults
from support import sources


def test_a_loader_wrapped_before_the_processes_are_started() -> None:
    """The world is read when iteration begins: trainers and launchers start their processes after `wrap`."""
    loader = midepoch.wrap(sources.noisy_loader(), seed=5)
    assert len(loader) == 6  # a world of one, here and now
    found = sources.in_gloo_world(sources.two_batches, 2, loader)
    for rank, (length, batches, _) in enumerate(found):
        assert length == 3
        assert batches == sources.taken(midepoch.wrap(sources.noisy_loader(), seed=5, world=World(rank, 2)), 2)
    state = found[0][2]
    assert state == found[1][2] and (state["world_size"], state["position"]) == (2, 16)
    # The state of two processes continues in this one.
    loader.load_state_dict(state)
    whole = sources.flat(sources.taken(midepoch.wrap(sources.noisy_loader(), seed=5)))
    assert sources.flat(sources.taken(loader)) == whole[16:]


_KEPT: list[Any] = []  # until the process ends


def loading(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, **{"batch_size": 4, "num_workers": 2} | options)


def finish_an_epoch(path: str) -> None:
    loader = midepoch.wrap(loading(sources.Indices(40), persistent_workers=True), seed=1)
    _KEPT.extend([loader, midepoch.Snapshot(path, data=loader)])
    list(loader)


class Waiting(sources.Indices):
    """Waits for ever at one sample; `how`: in Python, or in C, where Python's handlers of signals are not run."""

    def __init__(self, how: str) -> None:
        super().__init__(40)
        self.how = how

    def __getitem__(self, index: int) -> int:
        while index == 20 and self.how == "in Python":
            time.sleep(10)
        if index == 20:
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            libc.pthread_mutex_init(mutex, None)
            for _ in range(2):
                libc.pthread_mutex_lock(mutex)
        return index


def time_out(how: str, close: bool, path: str) -> None:
    loader = midepoch.wrap(loading(Waiting(how), timeout=1), seed=1)
    _KEPT.extend([loader, midepoch.Snapshot(path, data=loader)])
    iterator = iter(loader)
    with pytest.raises(midepoch.SourceError, match="timed out"):
        _KEPT.extend([iterator, *iterator])
    if close:
        loader.close()
        assert not multiprocessing.active_children()


def end_of(method: str, *targets: Callable[[str], None], folder: Path) -> list[int | None]:
    context: Any = multiprocessing.get_context(method)
    ranks = [context.Process(target=each, args=(str(folder / f"{at}.pt"),)) for at, each in enumerate(targets)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_ranks_end_with_their_workers(method: str, tmp_path: Path) -> None:
    """Workers outlive signals as long as their rank wants them; nothing of atexit's runs in such a process.

    Of ranks that end well: torch takes a worker that dies of the signal that ends it for one that was killed. Workers
    that wait for ever are ended by what ends their loader, and by their process's end.
    """
    waiting = [functools.partial(time_out, "in Python", True), functools.partial(time_out, "in C", False)]
    assert end_of(method, sources.fail_in_an_epoch, *[finish_an_epoch] * 5, *waiting, folder=tmp_path) == [1, *[0] * 7]


def read_in_a_fork(loader: Any, path: str) -> None:
    assert len(list(loader)) == 10
    loader.close()


def test_a_forked_process_has_persistent_workers_of_its_own(tmp_path: Path) -> None:
    with midepoch.wrap(loading(sources.Indices(40), num_workers=1, persistent_workers=True), seed=0) as loader:
        assert len(list(loader)) == 10
        assert end_of("fork", functools.partial(read_in_a_fork, loader), folder=tmp_path) == [0]
        assert len(list(loader)) == 10


def tell_what_is_blocked(connection: Any) -> None:
    connection.send(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(each, marks=pytest.mark.long) for each in ("spawn", "forkserver"))]
)
def test_other_processes_have_no_signals_blocked(method: str, tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context(method)
    source = loading(sources.Indices(8), num_workers=1, multiprocessing_context=context)
    with midepoch.wrap(source, seed=0) as loader, midepoch.Snapshot(tmp_path / "s.pt", data=loader):
        assert len(list(loader)) == 2
        here, there = context.Pipe()
        process = context.Process(target=tell_what_is_blocked, args=(there,))
        process.start()
        assert here.recv() == sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())) == []
        process.join()


def die(worker: int) -> None:
    if worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def loader_class(name: str) -> Any:
    module = "torch.utils.data" if name == "DataLoader" else "torchdata.stateful_dataloader"
    return getattr(pytest.importorskip(module, reason="torchdata is not installed"), name)


@pytest.mark.parametrize("kind", ["DataLoader", "StatefulDataLoader"])
def test_a_worker_that_dies_while_it_starts_is_told_of(kind: str) -> None:
    source = loader_class(kind)(sources.Indices(40), batch_size=4, num_workers=2, worker_init_fn=die)
    with midepoch.wrap(source, seed=0) as loader, pytest.raises(midepoch.SourceError, match=r"DataLoader worker .*use"):
        list(loader)


class Cycle:
    """Garbage that refers to itself, so that only the collector finds it."""

    def __init__(self, *kept: Any) -> None:
        self.kept, self.itself = kept, self


def workers_here() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def read_to_its_middle(loader: Any) -> Any:
    iterator = iter(loader)
    return iterator, next(iterator)


@pytest.mark.parametrize("in_a_cycle", [False, True], ids=["by_itself", "in_a_cycle"])
@pytest.mark.parametrize(("kind", "read"), [
    ("map-style", list), ("map-style", read_to_its_middle), ("iterable", read_to_its_middle),
    ("stateful", read_to_its_middle),
])  # fmt: skip
def test_a_loader_that_is_dropped_ends_its_workers_at_once(
    kind: str, read: Any, in_a_cycle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last reference, or by the collector, which may close the workers' queues before they are told to leave."""
    make = loader_class("StatefulDataLoader" if kind == "stateful" else "DataLoader")
    sources.be_patient(monkeypatch)
    gc.collect()
    before = workers_here()
    data = sources.Stream(40) if kind == "iterable" else sources.Indices(40)
    source = make(data, batch_size=4, num_workers=2, persistent_workers=True)
    loader = midepoch.wrap(source, seed=0, shard=True if kind == "iterable" else None)
    del source
    kept: Any = read(loader)
    started = workers_here() - before
    assert len(started) == (1 if kind == "iterable" else 2)
    kept = Cycle(loader, kept) if in_a_cycle else kept
    begin = time.monotonic()
    del loader, kept
    if in_a_cycle:
        gc.collect()
    assert time.monotonic() - begin < sources.PATIENCE / 2
    assert faults.wait_until(lambda: all(map(gone, started)), 120)
