"""The user's exception is the user's: no callback and no snapshot replaces it, and what they save can be resumed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

from lightning_runs import Keeping, Recorder, fit, mapped
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import MidepochWarning, Snapshot, SnapshotError, StateError
from support import jobs, sources

LEFT_OUT = r"the state of 1 batches ago is not known .*The present state is saved.*pass remember=1"


class BadStepError(Exception):
    """The user's own."""


def make(remember: int) -> midepoch.Loader:
    source = StatefulDataLoader(jobs.Noisy(12), 2, shuffle=True, generator=torch.Generator().manual_seed(3))
    return midepoch.wrap(source, remember=remember)


# --- Lightning --------------------------------------------------------------------------------------------------------


class Stream(sources.Counter):
    """A source with a state of its own, which may fail; a subclass knows its length."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([[0.0, float(each)]]) for each in super().__iter__())


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


SOURCES: dict[str, Callable[[int], Any]] = {
    "StatefulDataLoader": make,
    "known length": lambda remember: midepoch.wrap(Sized(5), remember=remember),
    "unknown length": lambda remember: midepoch.wrap(Stream(5), remember=remember and 2),
}


def fail_and_resume(
    folder: Path, make: Callable[[], Any], fail_at: int, again: Callable[[], Any] | None = None, error: Any = ValueError
) -> tuple[list[Any], list[str]]:
    """The log of both runs, and what the first was told."""
    log: list[Any] = []
    told: list[str] = []
    failing = functools.partial(Recorder, fail_at=fail_at)
    (folder / "on_exception.ckpt").unlink(missing_ok=True)  # Lightning would resume from it by itself
    with pytest.raises(error):
        fit(log, make, callbacks=(Keeping(folder),), module=failing, told=told, enable_checkpointing=True)
    fit(log, again or make, checkpoint=folder / "on_exception.ckpt", told=[])
    return log, told


@pytest.mark.parametrize("remember", [1, 0])
@pytest.mark.parametrize("name", SOURCES)
def test_lightning_with_a_source_with_its_own_state(name: str, remember: int, tmp_path: Path) -> None:
    make = functools.partial(SOURCES[name], remember)
    whole: list[Any] = []
    fit(whole, make, told=[])
    # Where the batch was an epoch's first, its state is that of the boundary, which is known.
    for fail_at in range(1 - remember, len(whole)):
        log, told = fail_and_resume(tmp_path, make, fail_at)
        lost = len(whole) - len(log)
        # With a length unknown, Lightning has read a batch ahead.
        assert lost <= (0 if remember else 2 if name == "unknown length" else 1)
        assert bool(told) is bool(lost), (fail_at, told)
        assert log == whole[:fail_at] + whole[fail_at + lost :]


def test_lightning_with_several_of_which_one_has_its_own_state() -> None:
    with pytest.raises(midepoch.UnsupportedSourceError, match="part 0 keeps its own state"):
        fit([], lambda: [make(1), mapped(12)], told=[])


def test_lightning_with_a_source_that_fails(tmp_path: Path) -> None:
    """Its state is not known any more, unless it remembers; its error is raised all the same."""

    def make(bad: int, remember: int = 0) -> Any:
        return midepoch.wrap(Sized(5, bad), remember=remember)

    whole: list[Any] = []
    sound = functools.partial(make, -1)
    fit(whole, sound, told=[])
    log, told = fail_and_resume(tmp_path, functools.partial(make, 3, 1), -1, sound, error=RuntimeError)
    assert log == whole and not told
    with pytest.raises(StateError, match="left the train loader's state unknown: resume from an earlier one"):
        fail_and_resume(tmp_path, functools.partial(make, 3), -1, sound, error=RuntimeError)


class Validating(Recorder):
    """Its third batch of validation fails, unless it is mended."""

    mended = False

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not self.mended and batch_idx == 2 and not self.trainer.sanity_checking:
            raise BadStepError
        super().validation_step(batch, batch_idx, dataloader_idx)


@pytest.mark.parametrize("remember", [1, 0])
def test_a_validation_that_raises(remember: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = functools.partial(fit, train=mapped, validation=functools.partial(make, remember), module=Validating)
    log, told, whole = list[Any](), list[str](), list[Any]()
    with pytest.raises(BadStepError):
        run(log, callbacks=(Keeping(tmp_path),), told=told, enable_checkpointing=True)
    while log[-1][0] == "validation":
        log.pop()  # it is run from its start
    monkeypatch.setattr(Validating, "mended", True)
    run(log, checkpoint=tmp_path / "on_exception.ckpt", told=[])
    run(whole, told=[])
    assert log == whole and not told


# --- Snapshot ---------------------------------------------------------------------------------------------------------


def snapshot_of(path: Path, loader: midepoch.Loader, **settings: Any) -> Snapshot:
    return Snapshot(path / "snapshot.pt", data=loader, signals=(), **settings)


@pytest.mark.parametrize("remember", [1, 0])
@pytest.mark.filterwarnings("error::midepoch.MidepochWarning")
def test_a_snapshot_of_a_step_that_raises(remember: int, tmp_path: Path) -> None:
    """The batch whose step failed is in flight; it is lost where the source does not remember it."""

    def run(folder: Path, fail_at: int = -1) -> None:
        snapshot = snapshot_of(folder, loader := make(remember))
        for _ in snapshot.epochs(2):
            for batch in loader:
                try:
                    if len(log) == fail_at:
                        raise BadStepError
                except BadStepError:
                    snapshot.save(in_flight=1)
                    raise
                log.append(sources.plain(batch))
                snapshot.step()

    log: list[Any] = []
    run(tmp_path / "whole")
    whole, log = log, []
    told: Any = contextlib.nullcontext() if remember else pytest.warns(MidepochWarning, match=LEFT_OUT)
    with pytest.raises(BadStepError), told:
        run(tmp_path / "failed", 8)
    run(tmp_path / "failed")
    assert log == (whole if remember else whole[:8] + whole[9:])


def test_a_snapshot_in_a_finally_clause_that_cannot_be_saved(tmp_path: Path) -> None:
    """The source has failed, and does not know where it was."""
    snapshot = snapshot_of(tmp_path, loader := midepoch.wrap(Sized(5, 3)))
    snapshot.save()
    before = snapshot.path.read_bytes()
    told = pytest.warns(MidepochWarning, match="was not saved after the RuntimeError, and the previous snapshot is un")
    with pytest.raises(RuntimeError, match="the disk is gone"), told:
        try:
            for _ in loader:
                pass
        finally:
            snapshot.save()
    assert snapshot.path.read_bytes() == before
    with pytest.raises(SnapshotError, match="already past it"):
        snapshot.save()  # no exception is being handled: it says so itself


def test_a_snapshot_of_batches_in_flight_is_refused(tmp_path: Path) -> None:
    snapshot = snapshot_of(tmp_path, loader := midepoch.wrap(Sized(5)))
    sources.taken(loader, 2)
    with pytest.raises(SnapshotError, match="remember="):
        snapshot.save(in_flight=1)


def test_an_exception_behind_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    """The end of the body never comes, so what is put off to it is not written. The exception is raised."""
    told = pytest.warns(MidepochWarning, match=r"not written if an exception leaves the body.*after the loop")
    with pytest.raises(BadStepError), told:
        snapshot = snapshot_of(tmp_path, loader := midepoch.wrap([1, 2, 3]), every=2)
        for _ in snapshot.epochs(2):
            try:
                for _ in loader:
                    snapshot.step()
                raise BadStepError
            finally:
                snapshot.save()
    snapshot = snapshot_of(tmp_path, loader := midepoch.wrap([1, 2, 3]))
    assert [(epoch, list(loader)) for epoch in snapshot.epochs(2)] == [(0, [3]), (1, [1, 2, 3])]
    assert snapshot.steps == 2
