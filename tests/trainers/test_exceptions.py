"""The user's exception is the user's: no callback and no snapshot replaces it, and what they save can be resumed."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("lightning", reason="Lightning is not installed")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

import exception_job
from exception_job import BadStepError
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning_runs import Recorder, fit, mapped

import midepoch
from midepoch import MidepochWarning, Snapshot, SnapshotError, StateError
from support import forking

LEFT_OUT = r"the state of 1 batches ago is not known .*The present state is saved.*pass remember=1"


# --- in real processes ------------------------------------------------------------------------------------------------


def run_job(trainer: str, folder: Path, fail_at: int, remember: int) -> str:
    command: list[str | Path] = [Path(exception_job.__file__), trainer, str(folder), str(fail_at), str(remember)]
    done = forking.run(command, modules=["lightning", "torchdata.stateful_dataloader"], cwd=folder)
    assert (done.returncode == 0) is (fail_at < 0), done.stderr[-3000:]
    return done.stderr


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


@pytest.mark.parametrize("trainer", ["lightning", "snapshot"])
def test_a_step_that_raises_on_a_source_with_a_state_of_its_own(trainer: str, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("whole", "remembering", "forgetful")}
    for folder in folders.values():
        folder.mkdir()
    run_job(trainer, folders["whole"], -1, 0)
    whole = lines(folders["whole"])
    for name, remember in (("remembering", 1), ("forgetful", 0)):
        printed = run_job(trainer, folders[name], 8, remember)
        assert printed.strip().splitlines()[-1].endswith("BadStepError: this step is the user's to mend")
        assert ("StateError" in printed) is False
        assert ("The present state is saved" in printed) is (name == "forgetful")
        run_job(trainer, folders[name], -1, remember)
    assert lines(folders["remembering"]) == whole
    assert lines(folders["forgetful"]) == whole[:8] + whole[9:], "all but the batch whose step failed"


# --- Lightning --------------------------------------------------------------------------------------------------------


class Keeping(OnExceptionCheckpoint):
    def teardown(self, *arguments: Any, **keywords: Any) -> None:
        """Lightning removes it at the end of a run."""


class Stream:
    """A source with a state of its own, which may fail; a subclass knows its length."""

    def __init__(self, size: int = 5, bad: int = -1) -> None:
        self.size, self.at, self.bad = size, 0, bad

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.size:
            self.at += 1
            if self.at - 1 == self.bad:
                raise RuntimeError("the disk is gone")
            yield torch.tensor([[0.0, self.at - 1.0]])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Sized(Stream):
    def __len__(self) -> int:
        return self.size


SOURCES: dict[str, Callable[[int], Any]] = {
    "StatefulDataLoader": exception_job.make,
    "known length": lambda remember: midepoch.wrap(Sized(), remember=remember),
    "unknown length": lambda remember: midepoch.wrap(Stream(), remember=remember and 2),
    "several": lambda remember: [exception_job.make(remember), mapped(12)],
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


@pytest.mark.parametrize("name", SOURCES)
def test_lightning_with_a_source_that_remembers(name: str, tmp_path: Path) -> None:
    make = functools.partial(SOURCES[name], 1)
    whole: list[Any] = []
    fit(whole, make, told=[])
    for fail_at in range(len(whole)):
        log, told = fail_and_resume(tmp_path, make, fail_at)
        assert log == whole and not told, fail_at


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "several"])
def test_lightning_with_a_source_that_does_not(name: str, tmp_path: Path) -> None:
    make = functools.partial(SOURCES[name], 0)
    whole: list[Any] = []
    fit(whole, make, told=[])
    for fail_at in range(1, len(whole)):
        log, told = fail_and_resume(tmp_path, make, fail_at)
        lost = len(whole) - len(log)
        # With a length unknown, Lightning has read a batch ahead.
        assert lost in ((0, 1, 2) if name == "unknown length" else (0, 1))
        assert log[:fail_at] == whole[:fail_at]
        # Where the batch was an epoch's first, its state is that of the boundary, which is known.
        assert bool(told) is bool(lost), (fail_at, told)
        assert log == whole[:fail_at] + whole[fail_at + lost :]


def test_lightning_with_a_source_that_fails(tmp_path: Path) -> None:
    """Its state is not known any more, unless it remembers; its error is raised all the same."""

    def make(bad: int, remember: int = 0) -> Any:
        return midepoch.wrap(Sized(bad=bad), remember=remember)

    whole: list[Any] = []
    fit(whole, functools.partial(make, -1), told=[])
    log, told = fail_and_resume(
        tmp_path, functools.partial(make, 3, 1), -1, functools.partial(make, -1), error=RuntimeError
    )
    assert log == whole and not told
    with pytest.raises(StateError, match="left the train loader's state unknown: resume from an earlier one"):
        fail_and_resume(tmp_path, functools.partial(make, 3), -1, functools.partial(make, -1), error=RuntimeError)


def test_a_validation_that_raises(tmp_path: Path) -> None:
    class Failing(Recorder):
        fails = True

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if self.fails and batch_idx == 2 and not self.trainer.sanity_checking:
                raise BadStepError
            super().validation_step(batch, batch_idx, dataloader_idx)

    class Mended(Failing):
        fails = False

    for remember in (1, 0):
        validation = functools.partial(exception_job.make, remember)
        whole: list[Any] = []
        fit(whole, mapped, validation, module=Mended, told=[])
        log: list[Any] = []
        told: list[str] = []
        (tmp_path / "on_exception.ckpt").unlink(missing_ok=True)
        keeping = (Keeping(tmp_path),)
        with pytest.raises(BadStepError):
            fit(log, mapped, validation, module=Failing, callbacks=keeping, told=told, enable_checkpointing=True)
        while log[-1][0] == "validation":
            log.pop()  # it is run from its start
        fit(log, mapped, validation, module=Mended, checkpoint=tmp_path / "on_exception.ckpt", told=[])
        assert log == whole and not told, remember


# --- Snapshot ---------------------------------------------------------------------------------------------------------


def snapshot_of(path: Path, loader: midepoch.Loader, **settings: Any) -> Snapshot:
    return Snapshot(path / "snapshot.pt", data=loader, signals=(), **settings)


def test_a_snapshot_in_a_finally_clause_that_cannot_be_saved(tmp_path: Path) -> None:
    """The source has failed, and does not know where it was."""
    snapshot = snapshot_of(tmp_path, loader := midepoch.wrap(Sized(bad=3)))
    snapshot.save()
    before = snapshot.path.read_bytes()
    with (
        pytest.raises(RuntimeError, match="the disk is gone"),
        pytest.warns(MidepochWarning, match="was not saved after the RuntimeError, and the previous snapshot is unch"),
    ):
        try:
            for _ in loader:
                pass
        finally:
            snapshot.save()
    assert snapshot.path.read_bytes() == before
    with pytest.raises(SnapshotError, match="already past it"):
        snapshot.save()  # no exception is being handled: it says so itself


def test_a_snapshot_of_batches_in_flight_is_refused(tmp_path: Path) -> None:
    snapshot = snapshot_of(tmp_path, loader := midepoch.wrap(Sized()))
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(SnapshotError, match="remember="):
        snapshot.save(in_flight=1)
    with pytest.raises(BadStepError), pytest.warns(MidepochWarning, match=LEFT_OUT):
        try:
            raise BadStepError
        finally:
            snapshot.save(in_flight=1)
    snapshot_of(tmp_path, again := midepoch.wrap(Sized())).load()
    assert again.position == 2


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


# --- Hugging Face's Trainer -------------------------------------------------------------------------------------------


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index), float(torch.rand(()))])}


class Net(torch.nn.Module):
    def __init__(self, seen: list[Any], at: int, what: Callable[[], None]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen, self.at, self.what = seen, at, what

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(x.tolist())
        if len(self.seen) == self.at:
            self.what()
        return {"loss": self.layer(x / 20).square().mean()}


def hugging_face(folder: Path, seen: list[Any], loader: Any, at: int = -1, what: Any = None, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs the extra trainers")
    from midepoch.trainers.transformers import feed

    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False, learning_rate=0.1, **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(model=Net(seen, at, what), args=arguments)
    feed(trainer, loader)
    return trainer


def rows() -> midepoch.Loader:
    return midepoch.wrap(DataLoader(Rows(), batch_size=2, shuffle=True), seed=3)


def at_once(trainer: Any) -> None:
    """Have a checkpoint that a signal asks for saved without the pause that is meant for a cluster."""
    managers = [getattr(each, "jit_manager", None) for each in trainer.callback_handler.callbacks]
    manager = next(each for each in managers if each is not None)
    signal.signal(signal.SIGTERM, lambda *_: manager._enable_checkpoint())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_checkpoint_in_the_middle_of_the_trainers_step(accumulate: int, tmp_path: Path) -> None:
    """As on SIGTERM, with enable_jit_checkpoint: what was read for this step is given again."""
    whole: list[Any] = []
    settings = {"gradient_accumulation_steps": accumulate, "enable_jit_checkpoint": True}
    reference = hugging_face(tmp_path, whole, rows(), **settings)
    reference.train()
    for at in (2, 9, 14):
        seen: list[Any] = []
        folder = tmp_path / f"at{at}"
        trainer = hugging_face(folder, seen, rows(), at, lambda: os.kill(os.getpid(), signal.SIGTERM), **settings)
        at_once(trainer)
        trainer.train()
        saved = next(folder.glob("checkpoint-*"))
        done = trainer.state.global_step
        assert int(saved.name.rpartition("-")[2]) < len(whole)
        again: list[Any] = []
        resumed = hugging_face(folder, again, rows(), **settings)
        resumed.train(resume_from_checkpoint=str(saved))
        assert seen[: len(whole) - len(again)] + again == whole, (at, done)
        for one, two in zip(resumed.model.parameters(), reference.model.parameters(), strict=True):
            assert torch.equal(one, two)


def test_a_checkpoint_of_the_trainer_after_an_exception(tmp_path: Path) -> None:
    """By a program that calls what the Trainer itself calls to save."""

    def fail() -> None:
        raise BadStepError

    class Dicts(Sized):
        def __iter__(self) -> Iterator[Any]:
            for each in super().__iter__():
                yield {"x": each}

    for bad, error, told in ((-1, BadStepError, LEFT_OUT), (3, RuntimeError, "has no state of the Dicts, because")):
        folder, seen = tmp_path / str(bad), list[Any]()
        trainer = hugging_face(folder, [], midepoch.wrap(Dicts(bad=bad)), 3, fail if bad < 0 else (lambda: None))
        with pytest.raises(error), pytest.warns(MidepochWarning, match=told):
            try:
                trainer.train()
            finally:
                trainer._save_checkpoint(trainer.model, trial=None)
        again = hugging_face(folder, seen, midepoch.wrap(Dicts()))
        if bad < 0:
            again.train(resume_from_checkpoint=True)
            assert [each[0][1] for each in seen] == [3, 4, 0, 1, 2, 3, 4], "all but the batch whose step failed"
        else:
            with pytest.raises(StateError, match="left the loader's state unknown: resume from an earlier one"):
                again.train(resume_from_checkpoint=True)
