"""Batches that no `step` followed: told once, and only where a resume would leave them out."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import midepoch
from midepoch import Snapshot
from support import bodies
from support.sources import Indices

Loop = Callable[[Any, Snapshot], None]


def stepping(steps: Callable[[int], bool]) -> Loop:
    """A loop that steps after certain batches of an epoch, by their number."""

    def loop(loader: Any, snapshot: Snapshot) -> None:
        for number, _ in enumerate(loader, loader.batches_done):
            if steps(number):
                snapshot.step()

    return loop


def reading_ahead(says_so: bool) -> Loop:
    def loop(loader: Any, snapshot: Snapshot) -> None:
        for _, in_flight in bodies.ahead(loader, 1):
            snapshot.step(in_flight * says_so)

    return loop


# The loop, and how many batches it has taken that no step follows.
LOOPS: dict[str, tuple[Loop, int]] = {
    "each": (stepping(lambda number: True), 0), "read ahead": (reading_ahead(says_so=False), 1),
    "read ahead, and said": (reading_ahead(says_so=True), 0),
    "the first ones skipped": (stepping(lambda number: number >= 4), 4),
    "accumulated": (stepping(lambda number: number % 3 == 2), 0),
    "accumulated from the second on": (stepping(lambda number: number > 0 and number % 3 == 0), 0),
    "some left out": (stepping(lambda number: number not in (4, 5, 9)), 0),
}  # fmt: skip


def made(folder: Path, every: int) -> tuple[midepoch.Loader, Snapshot]:
    """A loader of 24 batches, and its Snapshot."""
    loader = midepoch.wrap(DataLoader(Indices(96), batch_size=4, shuffle=True), seed=0)
    return loader, Snapshot(folder / "snapshot.pt", every=every, signals=(), data=loader)


def trained(loop: Loop, folder: Path, every: int = 4, resumes: bool = False, looks: bool = False) -> list[str]:
    loader, snapshot = made(folder, every)
    with snapshot, warnings.catch_warnings(record=True, action="always") as told:
        if resumes:
            assert snapshot.load()
        if looks:
            next(iter(loader))
        for _ in snapshot.epochs(2) if looks else range(2):
            loop(loader, snapshot)
    return [str(each.message) for each in told if not looks or "no step()" in str(each.message)]


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("every", [1, 1000])
def test_what_no_step_follows_is_told_once(name: str, every: int, tmp_path: Path) -> None:
    loop, ahead = LOOPS[name]
    told = trained(loop, tmp_path, every)
    assert len(told) == (ahead > 0)
    for each in told:
        assert f"no step() followed {ahead} of the batches taken from data" in each
        assert f"pass in_flight={ahead}" in each


def test_a_batch_looked_at_before_the_loop_is_not_the_loops(tmp_path: Path) -> None:
    assert trained(LOOPS["each"][0], tmp_path, every=1, looks=True) == []


def skips_what_is_done(loader: Any, snapshot: Snapshot) -> None:
    done = snapshot.steps % 24
    for number, _ in enumerate(loader):
        if number >= done:
            snapshot.step()


def leaves_at_the_top(loader: Any, snapshot: Snapshot) -> None:
    for number, _ in enumerate(loader, loader.batches_done):
        if number == 16:
            break
        snapshot.step()


@pytest.mark.parametrize(("loop", "done", "each", "followed"), [
    (skips_what_is_done, 8, 1, 8),
    (skips_what_is_done, 16, 1, 24),  # all that is left of the epoch is skipped
    (leaves_at_the_top, 16, 1, 0),
    (stepping(lambda number: number % 7 == 6), 21, 7, 0),
])  # fmt: skip
def test_a_loop_that_resumes(loop: Loop, done: int, each: int, followed: int, tmp_path: Path) -> None:
    """A run that was cut after so many batches, of which each so many had a step."""
    loader, snapshot = made(tmp_path, every=1)
    with snapshot:
        for number, _ in enumerate(itertools.islice(loader, done), 1):
            if number % each == 0:
                snapshot.step()
    told = [one for one in trained(loop, tmp_path, resumes=True) if "no step()" in one]
    assert len(told) == (followed > 0)
    assert all(f"no step() followed {followed} of the batches" in one for one in told)
    assert all("the loader has skipped it" in one for one in told)


@pytest.mark.parametrize("every", [1, 30])
@pytest.mark.parametrize("left_at", [None, 1, 9])
def test_a_second_loop_after_a_resume(every: int, left_at: int | None, tmp_path: Path) -> None:
    """What a loop had taken, or a resumed pass before it, is not the next loop's, whose first step is looked at."""
    loader, snapshot = made(tmp_path, every=5)
    with snapshot:
        for _ in itertools.islice(loader, 5):
            snapshot.step()
    loader, snapshot = made(tmp_path, every)
    with snapshot, warnings.catch_warnings(action="error"):
        for epochs in (1, 3):
            for _ in snapshot.epochs(epochs):
                for number, _ in enumerate(loader):
                    snapshot.step()
                    if epochs == 1 and number == left_at:
                        break
                if epochs == 1 and left_at is not None:
                    break
    assert loader.epoch == 3
