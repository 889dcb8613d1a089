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


@pytest.mark.parametrize("loop", [plain, reads_ahead_and_says_so, accumulates, leaves_out_some, reads_two])
@pytest.mark.parametrize("every", [1, 4])
def test_nothing_is_told_of_a_loop_that_trains_on_what_it_takes(loop: Any, every: int, tmp_path: Path) -> None:
    assert trained(loop, tmp_path / "snapshot.pt", every) == []


@pytest.mark.parametrize(("loop", "ahead"), [(reads_ahead, 1), (skips, 4)])
def test_what_no_step_follows_is_told_once(loop: Any, ahead: int, tmp_path: Path) -> None:
    (told,) = trained(loop, tmp_path / "snapshot.pt")
    assert f"no step() followed {ahead} of the batches taken from data" in told
    assert f"pass in_flight={ahead}" in told


def test_a_skip_that_was_left_in_for_a_resume_is_told(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"

    def dies(loader: Any, snapshot: Snapshot) -> None:
        for _ in itertools.islice(loader, 8):
            snapshot.step()

    def goes_on(loader: Any, snapshot: Snapshot) -> None:
        done = snapshot.steps % 24
        for number, _ in enumerate(loader):
            if number < done:
                continue
            snapshot.step()

    loader = midepoch.wrap(DataLoader(Indices(96), batch_size=4, shuffle=True), seed=0)
    with Snapshot(path, every=4, signals=(), data=loader) as snapshot:
        dies(loader, snapshot)
    (told,) = trained(goes_on, path, resumes=True)
    assert "no step() followed 8 of the batches" in told
    assert "the loader has skipped it" in told


def test_a_batch_that_was_looked_at_before_the_loop_is_not_the_loops(tmp_path: Path) -> None:
    loader = midepoch.wrap(DataLoader(Indices(96), batch_size=4, shuffle=True), seed=0)
    with Snapshot(tmp_path / "snapshot.pt", every=1, signals=(), data=loader) as snapshot:
        next(iter(loader))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in snapshot.epochs(2):
                plain(loader, snapshot)
    assert [str(each.message) for each in told if "no step()" in str(each.message)] == []
