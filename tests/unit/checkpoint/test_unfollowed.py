"""Batches that no `step` followed: told once, and only where a resume would leave them out."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import midepoch
from midepoch import Snapshot
from support.sources import Indices


def plain(loader: Any, snapshot: Snapshot) -> None:
    for _ in loader:
        snapshot.step()


def reads_ahead(loader: Any, snapshot: Snapshot) -> None:
    batches = iter(loader)
    ahead = next(batches)
    while ahead is not None:
        ahead = next(batches, None)
        snapshot.step()


def reads_ahead_and_says_so(loader: Any, snapshot: Snapshot) -> None:
    batches: Iterator[Any] = iter(loader)
    ahead = next(batches)
    while ahead is not None:
        ahead = next(batches, None)
        snapshot.step(in_flight=int(ahead is not None))


def skips(loader: Any, snapshot: Snapshot) -> None:
    for number, _ in enumerate(loader):
        if number >= 4:
            snapshot.step()


def accumulates(loader: Any, snapshot: Snapshot) -> None:
    for number, _ in enumerate(loader):
        if number % 3 == 2:
            snapshot.step()


def accumulates_from_the_second_on(loader: Any, snapshot: Snapshot) -> None:
    for number, _ in enumerate(loader):
        if number and number % 3 == 0:
            snapshot.step()


def leaves_out_some(loader: Any, snapshot: Snapshot) -> None:
    for number, _ in enumerate(loader):
        if number not in (4, 5, 9):
            snapshot.step()


def reads_two(loader: Any, snapshot: Snapshot) -> None:
    batches = iter(loader)
    for _ in zip(batches, batches, strict=True):
        snapshot.step()


def trained(loop: Any, path: Path, every: int = 4, resumes: bool = False) -> list[str]:
    loader = midepoch.wrap(DataLoader(Indices(96), batch_size=4, shuffle=True), seed=0)
    with Snapshot(path, every=every, signals=(), data=loader) as snapshot, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if resumes:
            assert snapshot.load()
        loop(loader, snapshot)
        loop(loader, snapshot)
    return [str(each.message) for each in told]


@pytest.mark.parametrize(
    "loop",
    [plain, reads_ahead_and_says_so, accumulates, accumulates_from_the_second_on, leaves_out_some, reads_two],
)
@pytest.mark.parametrize("every", [1, 4, 1000])
def test_nothing_is_told_of_a_loop_that_trains_on_what_it_takes(loop: Any, every: int, tmp_path: Path) -> None:
    assert trained(loop, tmp_path / "snapshot.pt", every) == []


@pytest.mark.parametrize(("loop", "ahead"), [(reads_ahead, 1), (skips, 4)])
@pytest.mark.parametrize("every", [1, 4, 1000])
def test_what_no_step_follows_is_told_once(loop: Any, ahead: int, every: int, tmp_path: Path) -> None:
    (told,) = trained(loop, tmp_path / "snapshot.pt", every)
    assert f"no step() followed {ahead} of the batches taken from data" in told
    assert f"pass in_flight={ahead}" in told


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


def accumulates_seven(loader: Any, snapshot: Snapshot) -> None:
    for number, _ in enumerate(loader, loader.batches_done):
        if number % 7 == 6:
            snapshot.step()


def resumed(goes_on: Any, path: Path, batches: int, each: int = 1) -> list[str]:
    """What is told of `goes_on`, in a run that was cut after so many batches."""
    loader = midepoch.wrap(DataLoader(Indices(96), batch_size=4, shuffle=True), seed=0)
    with Snapshot(path, every=1, signals=(), data=loader) as snapshot:
        for number, _ in enumerate(itertools.islice(loader, batches), 1):
            if number % each == 0:
                snapshot.step()
    return trained(goes_on, path, resumes=True)


@pytest.mark.parametrize("done", [8, 16])  # 16: all that is left of the epoch is skipped
def test_a_skip_that_was_left_in_for_a_resume_is_told(done: int, tmp_path: Path) -> None:
    (told,) = resumed(skips_what_is_done, tmp_path / "snapshot.pt", done)
    assert f"no step() followed {8 if done == 8 else 24} of the batches" in told
    assert "the loader has skipped it" in told


@pytest.mark.parametrize(("loop", "done", "each"), [(leaves_at_the_top, 16, 1), (accumulates_seven, 21, 7)])
def test_a_rest_that_needs_no_step_is_not_told(loop: Any, done: int, each: int, tmp_path: Path) -> None:
    told = resumed(loop, tmp_path / "snapshot.pt", done, each)
    assert [each for each in told if "no step()" in each] == []


def test_a_batch_looked_at_before_the_loop_is_not_the_loops(tmp_path: Path) -> None:
    loader = midepoch.wrap(DataLoader(Indices(96), batch_size=4, shuffle=True), seed=0)
    with Snapshot(tmp_path / "snapshot.pt", every=1, signals=(), data=loader) as snapshot:
        next(iter(loader))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in snapshot.epochs(2):
                plain(loader, snapshot)
    assert [str(each.message) for each in told if "no step()" in str(each.message)] == []
