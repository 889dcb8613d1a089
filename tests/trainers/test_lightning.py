"""Lightning with the callback: a run goes on exactly from any checkpoint, whatever the loaders and the options."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="Lightning is not installed")

import lightning_elastic_job as elastic_job
import lightning_runs
from lightning.pytorch import LightningDataModule, Trainer
from lightning_runs import CHAOS, TRAIN, VALIDATION, Killed, Make, Noisy, Peeking, Recorder, Saver, fit, mapped, unknown

from midepoch import MidepochWarning, StateError, UnsupportedSourceError
from midepoch.trainers.lightning import ExactResume
from support import forking, jobs
from support.sources import plain


def chosen(calls: int) -> Iterable[int]:
    """At which of so many calls in two epochs a run is cut: around the boundary, at the first, at the last but one."""
    middle = calls // 2
    few = {1, middle - 1, middle, middle + 1, calls - 1}
    return range(1, calls + 1) if CHAOS else sorted(each for each in few if 0 < each <= calls)


def seed(number: int) -> None:
    for each in (random.seed, np.random.seed, torch.manual_seed):
        each(number)


def check_cuts(folder: Path, hook: str, train: Make, validation: Make | None = None, **settings: Any) -> int:
    """Cut at calls of `hook`, and go on; returns how many calls there are."""
    whole, counter = list[Any](), Saver(hook, 0, folder)
    seed(1)
    fit(whole, train, validation, callbacks=(counter,), **settings)
    for at in chosen(counter.calls):
        log: list[Any] = []
        path = folder / f"{at}.ckpt"
        seed(1)
        with pytest.raises(Killed):
            fit(log, train, validation, callbacks=(Saver(hook, at, path),), **settings)
        seed(100 + at)
        while hook.startswith("on_validation_batch") and log[-1][0] == "validation":
            log.pop()  # it is run from its start
        fit(log, train, validation, checkpoint=path, **settings)
        assert log == whole, f"cut at call {at} of {hook}"
    return counter.calls


# --- loaders and moments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRAIN)
def test_every_batch(kind: str, tmp_path: Path) -> None:
    assert check_cuts(tmp_path, "on_train_batch_end", TRAIN[kind]) >= 6


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start", "on_train_batch_start"])
@pytest.mark.parametrize("kind", ["mapped", "unknown", "max_size mixed", "max_size_cycle unknown"])
def test_every_moment(hook: str, kind: str, tmp_path: Path) -> None:
    assert check_cuts(tmp_path, hook, TRAIN[kind]) >= 2


OPTIONS: dict[str, dict[str, Any]] = {
    "limit": {"limit_train_batches": 3},
    "more than there are": {"limit_train_batches": 7},
    "share": {"limit_train_batches": 0.6},
    "max_steps": {"max_steps": 8, "max_epochs": -1},
    "estimated_stepping_batches": {"module": Peeking},
}


class WithLoaders(Recorder):
    def train_dataloader(self) -> Any:
        return {"a": mapped(6, 1), "b": unknown(5, 2)}

    def val_dataloader(self) -> Any:
        return [mapped(4, 7)]


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return mapped()


BY_THE_MODULE: dict[str, Any] = {"module": WithLoaders, "limit_val_batches": 1.0}
RUNS: dict[str, tuple[Make, dict[str, Any]]] = {
    # Of an unknown length Lightning takes no share.
    **{f"{kind}, {option}": (TRAIN[kind], settings) for option, settings in OPTIONS.items()
       for kind in ("mapped", "unknown", "dict") if (option, kind) != ("share", "unknown")},
    "made by the module": (lambda: None, BY_THE_MODULE),
    "made by a data module": (Data, {}),
    "made again": (lambda: None, {**BY_THE_MODULE, "reload_dataloaders_every_n_epochs": 1}),
}  # fmt: skip


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
@pytest.mark.parametrize("name", RUNS)
def test_every_option(name: str, hook: str, tmp_path: Path) -> None:
    train, settings = RUNS[name]
    check_cuts(tmp_path, hook, train, **settings)


# --- exceptions, and what the steps draw ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "of_validation", "settings"),
    [("mapped", None, {}), ("unknown", None, {}), ("dict", None, {}), ("mapped", "two", {"val_check_interval": 2}),
     ("unknown", "one", {})],
)  # fmt: skip
def test_an_exception_in_the_middle_of_a_batch(
    kind: str, of_validation: str | None, settings: dict[str, Any], tmp_path: Path
) -> None:
    data = (TRAIN[kind], None if of_validation is None else VALIDATION[of_validation])
    whole, checkpointing = list[Any](), {**settings, "enable_checkpointing": True}
    fit(whole, *data, **settings)
    trained = [number for number, each in enumerate(whole) if each[0] == "train"]
    for at in (trained[each - 1] for each in chosen(len(trained))):
        log: list[Any] = []
        failing = functools.partial(Recorder, fail_at=at)
        (tmp_path / "on_exception.ckpt").unlink(missing_ok=True)  # Lightning would resume from it by itself
        with pytest.raises(ValueError, match="a bad batch"):
            fit(log, *data, callbacks=(lightning_runs.Keeping(tmp_path),), module=failing, **checkpointing)
        assert len(log) == at
        fit(log, *data, checkpoint=tmp_path / "on_exception.ckpt", **settings)
        assert log == whole, at


class Drawing(Recorder):
    """Draws in its steps, as dropout does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_of.append((random.random(), np.random.rand(), torch.rand(()).item()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log_of.append(torch.rand(()).item())
        super().validation_step(batch, batch_idx, dataloader_idx)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_end"])
def test_what_the_steps_draw_goes_on(hook: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"module": Drawing, "val_check_interval": 2, "num_sanity_val_steps": 0}
    assert check_cuts(tmp_path, hook, TRAIN["mapped"], VALIDATION["one"], **settings) >= 2


def test_generators_are_left_alone_or_refused(tmp_path: Path) -> None:
    path, log = tmp_path / "cut.ckpt", list[Any]()
    with pytest.raises(Killed):
        fit(log, mapped, callbacks=(Saver("on_train_batch_end", 2, path),))
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["midepoch"]["generators"] = ["damaged"]
    torch.save(checkpoint, path)
    with pytest.raises(StateError, match=r"random generators are damaged .*: resume from another one, or leave them"):
        fit(log, mapped, checkpoint=path)
    seed(5)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    log.clear()
    again = functools.partial(fit, log, mapped, checkpoint=path, module=Reseeding, exact=False)
    again(callbacks=(ExactResume(generators=False),))
    assert log[0] == expected


class Reseeding(Drawing):
    def __init__(self, log: list[Any]) -> None:
        super().__init__(log)
        seed(5)


# --- validation -------------------------------------------------------------------------------------------------------


# The start of a batch is the end of the one before, but for the first.
AT_START = pytest.param("on_validation_batch_start", marks=pytest.mark.long)


@pytest.mark.parametrize("hook", ["on_validation_batch_end", AT_START, "on_validation_end"])
@pytest.mark.parametrize("kind", VALIDATION)
def test_a_validation_that_was_interrupted(kind: str, hook: str, tmp_path: Path) -> None:
    count = check_cuts(tmp_path, hook, mapped, VALIDATION[kind], max_epochs=2, val_check_interval=2)
    assert count >= (4 if hook == "on_validation_end" else 9)


VALIDATED: list[dict[str, Any]] = [
    {"val_check_interval": 0.5}, {"val_check_interval": 3, "check_val_every_n_epoch": None}, {"limit_val_batches": 2},
    {"num_sanity_val_steps": 0}, {"check_val_every_n_epoch": 2},
]  # fmt: skip


@pytest.mark.parametrize("settings", VALIDATED, ids=str)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_end"])
def test_validation_options(settings: dict[str, Any], hook: str, tmp_path: Path) -> None:
    check_cuts(tmp_path, hook, mapped, VALIDATION["two"], **settings)


class Testing(Recorder):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)

    predict_step = test_step


@pytest.mark.parametrize("exact", [False, True])
def test_a_wrapped_loader_outside_of_fit(exact: bool) -> None:
    expected = [plain(batch) for batch in mapped(6, 7)]
    for name in ("validate", "test", "predict"):
        log: list[Any] = []
        trainer = Trainer(**lightning_runs.QUIET, callbacks=[ExactResume()] if exact else [])
        getattr(trainer, name)(Testing(log), mapped(6, 7))
        assert [batch for *_, batch in log] == expected, name


def test_a_checkpoint_after_a_validation_by_hand(tmp_path: Path) -> None:
    whole, log = list[Any](), list[Any]()
    fit(whole, mapped)
    trainer = fit(log, mapped, max_steps=3)
    trainer.validate(Recorder([]), DataLoader(Noisy(6, 7), batch_size=2), verbose=False)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    fit(log, mapped, checkpoint=tmp_path / "middle.ckpt")
    assert log == whole


def test_a_validation_of_unwrapped_loaders_begins_anew(tmp_path: Path) -> None:
    run = functools.partial(fit, train=mapped, validation=lambda: DataLoader(Noisy(6, 7), batch_size=2))
    whole, log = list[Any](), list[Any]()
    run(whole)
    with pytest.raises(Killed):
        run(log, callbacks=(Saver("on_train_batch_end", 7, tmp_path / "a.ckpt"),))
    run(log, checkpoint=tmp_path / "a.ckpt")
    assert [each for each in log if each[0] == "train"] == [each for each in whole if each[0] == "train"]


# --- what is told -----------------------------------------------------------------------------------------------------


def test_an_unwrapped_loader_is_named() -> None:
    with pytest.raises(UnsupportedSourceError, match="those of type DataLoader are not"):
        fit([], lambda: DataLoader(Noisy(4, 0)))


def test_gradients_that_a_checkpoint_leaves_out_are_named(tmp_path: Path) -> None:
    two = functools.partial(fit, train=mapped, accumulate_grad_batches=2)
    with pytest.raises(MidepochWarning, match="saved after 1 of 2 batches whose gradients are accumulated"):
        two([], callbacks=(Saver("on_train_batch_end", 3, tmp_path / "a.ckpt"),))
    with pytest.raises(Killed):
        two([], callbacks=(Saver("on_train_batch_end", 4, tmp_path / "a.ckpt"),))
    log, whole = list[Any](), list[Any]()
    two(log, checkpoint=tmp_path / "a.ckpt")
    two(whole)
    assert log == whole[4:]


def test_other_loaders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit([], mapped, VALIDATION["two"], callbacks=(Saver("on_train_batch_end", 3, tmp_path / "a.ckpt"),))
    refused: list[tuple[Make, str, str]] = [
        (lambda: mapped(12), "two", "size"),
        (mapped, "one", "2 validation loaders, but 1 are wrapped"),
        (TRAIN["dict"], "two", "adapter differs"),
    ]
    for train, validation, told in refused:
        with pytest.raises(StateError, match=told):
            fit([], train, VALIDATION[validation], checkpoint=tmp_path / "a.ckpt")


# --- on several processes, and another number of them -----------------------------------------------------------------

Steps = list[Any]


def job(folder: Path, phase: str, ranks: int, after: str = "", **options: Any) -> tuple[Steps, list[list[float]]]:
    """Start processes as torchrun does.

    Returns for each step Lightning's epoch and batch number, and the samples of all ranks; and what each rank drew.
    """
    options |= {"checkpoint": str(folder / f"{after}.ckpt")} if after else {}
    command = [elastic_job.__file__, str(folder), phase, str(ranks), json.dumps(options)]
    started = jobs.ranks(command, ranks, modules=forking.IMPORTED)
    printed = [process.communicate(timeout=180)[1] for process in started]
    assert not any(process.returncode for process in started), printed
    assert "counts batches" not in "".join(printed)
    logs = [jobs.noted(folder / f"{phase}-{rank}") for rank in range(ranks)]
    steps = [[*step[0][:2], [sample for rank in step for sample in rank[2]]] for step in zip(*logs, strict=True)]
    return steps, [[step[3] for step in log] for log in logs]


def test_another_number_of_processes(tmp_path: Path) -> None:
    two, drawn = job(tmp_path, "two", 2, stop=3)
    same, again = job(tmp_path, "same", 2, stop=5, seed=7, after="two")
    assert [each[3:] for each in drawn] == [each[:2] for each in again], "each rank has its own generators back"
    three, _ = job(tmp_path, "three", 3, stop=8, after="same")
    one, _ = job(tmp_path, "one", 1, after="three")
    assert [len(part) for part in (two, same, three, one)] == [5, 4, 5, 4]
    loader = elastic_job.make("mapped", 1)
    whole = [[epoch, number, batch.tolist()] for epoch in range(2) for number, batch in enumerate(loader)]
    # The last two steps of each were not in its checkpoint.
    assert two == whole[:5] and same == whole[3:7] and three == whole[5:10] and one == whole[8:]


# Of 72 samples 48 are done, which is eight batches of six.
@pytest.mark.parametrize(("kind", "ranks", "done", "batches"), [("stream", 3, 4, 6), ("smaller", 1, 8, 12)])
def test_somebodys_iterable_and_another_global_batch(
    kind: str, ranks: int, done: int, batches: int, tmp_path: Path
) -> None:
    first, _ = job(tmp_path, "two", 2, kind=kind, stop=4)
    second, _ = job(tmp_path, "other", ranks, kind=kind, after="two")
    assert [step[:2] for step in second] == [[each // batches, each % batches] for each in range(done, 2 * batches)]
    steps = [*first[:4], *second]
    for epoch in (0, 1):
        samples = sorted(sample[0] for step in steps if step[0] == epoch for sample in step[2])
        assert samples == [float(number) for number in range(elastic_job.SIZE)]
