"""Lightning with the callback: a run goes on exactly from any checkpoint, whatever the loaders and the options."""

from __future__ import annotations

import functools
import json
import os
import random
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="Lightning is not installed")

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_runs import TRAIN, VALIDATION, Killed, Make, Noisy, Peeking, Recorder, Saver, fit, mapped, plain, unknown

from midepoch import MidepochWarning, StateError
from midepoch.trainers.lightning import ExactResume
from support import forking


def check_every_cut(
    tmp_path: Path, hook: str, train: Make, validation: Make | None = None, most: int = 50, **settings: Any
) -> int:
    """Cut at every call of `hook`; returns how many there were."""
    whole: list[Any] = []
    fit(whole, train, validation, **settings)
    for at in range(1, most):
        log: list[Any] = []
        path = tmp_path / f"{at}.ckpt"
        try:
            fit(log, train, validation, callbacks=(Saver(hook, at, path),), **settings)
        except Killed:
            pass
        else:
            return at - 1
        while hook.startswith("on_validation_batch") and log[-1][0] == "validation":
            log.pop()  # it is run from its start
        fit(log, train, validation, checkpoint=path, **settings)
        assert log == whole, f"cut at call {at} of {hook}"
    raise AssertionError(f"{hook} was called more often than expected")


@pytest.mark.parametrize("kind", TRAIN)
def test_every_batch(kind: str, tmp_path: Path) -> None:
    assert check_every_cut(tmp_path, "on_train_batch_end", TRAIN[kind]) >= 6


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start", "on_train_batch_start"])
@pytest.mark.parametrize("kind", ["mapped", "unknown", "max_size mixed", "max_size_cycle unknown"])
def test_every_moment(hook: str, kind: str, tmp_path: Path) -> None:
    assert check_every_cut(tmp_path, hook, TRAIN[kind]) >= 2


OPTIONS: dict[str, dict[str, Any]] = {
    "limit": {"limit_train_batches": 3},
    "more than there are": {"limit_train_batches": 7},
    "share": {"limit_train_batches": 0.6},
    "accumulate": {"accumulate_grad_batches": 1},
    "max_steps": {"max_steps": 8, "max_epochs": -1},
    "estimated_stepping_batches": {"module": Peeking},
}


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
@pytest.mark.parametrize(
    ("option", "kind"),
    # Of an unknown length Lightning takes no share.
    [
        (option, kind)
        for option in OPTIONS
        for kind in ("mapped", "unknown", "dict")
        if (option, kind) != ("share", "unknown")
    ],
)
def test_every_option(option: str, kind: str, hook: str, tmp_path: Path) -> None:
    check_every_cut(tmp_path, hook, TRAIN[kind], **OPTIONS[option])


class Drawing(Recorder):
    """Draws in its steps, as dropout does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_of.append((random.random(), np.random.rand(), torch.rand(()).item()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log_of.append(torch.rand(()).item())
        super().validation_step(batch, batch_idx, dataloader_idx)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_end"])
def test_what_the_steps_draw_goes_on(hook: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"module": Drawing, "val_check_interval": 2, "num_sanity_val_steps": 0}
    data = (TRAIN["mapped"], VALIDATION["one"])
    whole: list[Any] = []
    seed(1)
    fit(whole, *data, **settings)
    for at in range(1, 50):
        log: list[Any] = []
        seed(1)
        try:
            fit(log, *data, callbacks=(Saver(hook, at, tmp_path / "cut.ckpt"),), **settings)
        except Killed:
            pass
        else:
            assert at > 2
            break
        seed(100 + at)
        fit(log, *data, checkpoint=tmp_path / "cut.ckpt", **settings)
        assert log == whole, at


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
    expected = torch.rand(3).tolist()
    log.clear()
    seed(5)
    fit(log, mapped, callbacks=(ExactResume(generators=False),), checkpoint=path, module=Unseeded, exact=False)
    assert [each for each in log if isinstance(each, float)][:3] == expected


class Unseeded(Recorder):
    def __init__(self, log: list[Any]) -> None:
        super().__init__(log)
        seed(5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_of.append(torch.rand(()).item())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", ["mapped", "unknown", "dict"])
def test_max_steps_in_mid_epoch_and_then_more(kind: str, tmp_path: Path) -> None:
    whole: list[Any] = []
    fit(whole, TRAIN[kind], max_epochs=2)
    for steps in (1, 4, 5, 6, 8):
        log: list[Any] = []
        path = tmp_path / "last.ckpt"
        fit(log, TRAIN[kind], max_epochs=2, max_steps=steps).save_checkpoint(path)
        fit(log, TRAIN[kind], checkpoint=path, max_epochs=2, max_steps=100 if steps > 4 else -1)
        assert log == whole, steps


def test_an_exception_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    class SaveOnException(Callback):
        def on_exception(self, trainer: Any, *rest: Any) -> None:
            trainer.save_checkpoint(tmp_path / "failed.ckpt")

    runs: list[tuple[str, str | None, dict[str, Any]]]
    runs = [("mapped", None, {}), ("unknown", None, {}), ("dict", None, {})]
    runs += [("mapped", "two", {"val_check_interval": 2}), ("unknown", "one", {})]
    for kind, of_validation, settings in runs:
        validation = None if of_validation is None else VALIDATION[of_validation]
        whole: list[Any] = []
        fit(whole, TRAIN[kind], validation, **settings)
        for at in [number for number, each in enumerate(whole) if each[0] == "train"]:
            log: list[Any] = []
            with pytest.raises(ValueError, match="a bad batch"):
                failing = functools.partial(Recorder, fail_at=at)
                fit(log, TRAIN[kind], validation, callbacks=(SaveOnException(),), module=failing, **settings)
            assert len(log) == at
            fit(log, TRAIN[kind], validation, checkpoint=tmp_path / "failed.ckpt", **settings)
            assert log == whole, (kind, at)


# --- validation ---


@pytest.mark.parametrize(
    "hook",
    # The start of a batch is the end of the one before, but for the first.
    ["on_validation_batch_end", pytest.param("on_validation_batch_start", marks=pytest.mark.long), "on_validation_end"],
)
@pytest.mark.parametrize("kind", VALIDATION)
def test_a_validation_that_was_interrupted(kind: str, hook: str, tmp_path: Path) -> None:
    count = check_every_cut(tmp_path, hook, mapped, VALIDATION[kind], max_epochs=2, val_check_interval=2)
    assert count >= (4 if hook == "on_validation_end" else 9)


@pytest.mark.parametrize(
    "settings",
    [
        {"val_check_interval": 0.5},
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
        {"limit_val_batches": 2},
        {"num_sanity_val_steps": 0},
        {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_end"])
def test_validation_options(settings: dict[str, Any], hook: str, tmp_path: Path) -> None:
    check_every_cut(tmp_path, hook, mapped, VALIDATION["two"], **settings)


@pytest.mark.parametrize("exact", [False, True])
def test_a_wrapped_loader_outside_of_fit(exact: bool) -> None:
    class Model(Recorder):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log_of.append(plain(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_of.append(plain(batch))

    expected = [plain(batch) for batch in mapped(6, 7)]
    for name in ("validate", "test", "predict"):
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, callbacks=[ExactResume()] if exact else [],
        )  # fmt: skip
        log: list[Any] = []
        getattr(trainer, name)(Model(log), mapped(6, 7))
        assert [each[3] if name == "validate" else each for each in log] == expected, name


def test_a_checkpoint_after_a_validation_by_hand(tmp_path: Path) -> None:
    whole: list[Any] = []
    fit(whole, mapped)
    log: list[Any] = []
    trainer = fit(log, mapped, max_steps=3)
    trainer.validate(Recorder([]), DataLoader(Noisy(6, 7), batch_size=2), verbose=False)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    fit(log, mapped, checkpoint=tmp_path / "middle.ckpt")
    assert log == whole


def test_a_validation_of_unwrapped_loaders_begins_anew(tmp_path: Path) -> None:
    bare = lambda: DataLoader(Noisy(6, 7), batch_size=2)
    whole: list[Any] = []
    fit(whole, mapped, bare)
    log: list[Any] = []
    with pytest.raises(Killed):
        fit(log, mapped, bare, callbacks=(Saver("on_train_batch_end", 7, tmp_path / "a.ckpt"),))
    fit(log, mapped, bare, checkpoint=tmp_path / "a.ckpt")
    trained = [[each for each in part if each[0] == "train"] for part in (log, whole)]
    assert trained[0] == trained[1]


# --- where loaders come from ---


class WithLoaders(Recorder):
    def train_dataloader(self) -> Any:
        return {"a": mapped(6, 1), "b": unknown(5, 2)}

    def val_dataloader(self) -> Any:
        return [mapped(4, 7)]


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return mapped()


@pytest.mark.parametrize("where", ["module", "data module", "made again"])
def test_loaders_made_by_the_module(where: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"module": WithLoaders, "limit_val_batches": 1.0}
    train: Make = lambda: None
    if where == "data module":
        settings, train = {}, Data
    elif where == "made again":
        settings["reload_dataloaders_every_n_epochs"] = 1
    for hook in ("on_train_batch_end", "on_train_epoch_end"):
        check_every_cut(tmp_path, hook, train, **settings)


def test_model_checkpoint(tmp_path: Path) -> None:
    whole: list[Any] = []
    fit(whole, mapped)
    log: list[Any] = []
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(log, mapped, callbacks=(saving,), enable_checkpointing=True)
    assert log == whole
    for step in range(2, len(whole), 2):
        log = []
        fit(log, mapped, checkpoint=tmp_path / f"step={step}.ckpt")
        assert log == whole[step:]


# --- what is told ---


def test_an_unwrapped_loader_is_named() -> None:
    with pytest.raises(MidepochWarning, match="train loaders of type DataLoader are not wrapped"):
        fit([], lambda: DataLoader(Noisy(4, 0)))


def test_gradients_that_a_checkpoint_leaves_out_are_named(tmp_path: Path) -> None:
    with pytest.raises(MidepochWarning, match="saved after 1 of 2 batches whose gradients are accumulated"):
        fit([], mapped, callbacks=(Saver("on_train_batch_end", 3, tmp_path / "a.ckpt"),), accumulate_grad_batches=2)
    with pytest.raises(Killed):
        fit([], mapped, callbacks=(Saver("on_train_batch_end", 4, tmp_path / "a.ckpt"),), accumulate_grad_batches=2)
    log: list[Any] = []
    fit(log, mapped, checkpoint=tmp_path / "a.ckpt", accumulate_grad_batches=2)
    whole: list[Any] = []
    fit(whole, mapped, accumulate_grad_batches=2)
    assert log == whole[4:]


def test_other_loaders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit([], mapped, VALIDATION["two"], callbacks=(Saver("on_train_batch_end", 3, tmp_path / "a.ckpt"),))
    with pytest.raises(StateError, match="size"):
        fit([], lambda: mapped(12), VALIDATION["two"], checkpoint=tmp_path / "a.ckpt")
    with pytest.raises(StateError, match="2 validation loaders, but 1 are wrapped"):
        fit([], mapped, VALIDATION["one"], checkpoint=tmp_path / "a.ckpt")
    with pytest.raises(StateError, match="adapter differs"):
        fit([], TRAIN["dict"], VALIDATION["two"], checkpoint=tmp_path / "a.ckpt")


# --- on several processes, and another number of them ---


def job(folder: Path, phase: str, ranks: int, *options: str) -> str:
    """A job whose processes something else starts, as test_processes has Lightning do it; returns what they printed."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [str(Path(__file__).parent / "lightning_elastic_job.py"), str(folder), phase, str(ranks), *options]
    started = [
        forking.Program(command, modules=["lightning"], env=environment | {"LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=180)[1] for process in started]
    assert not any(process.returncode for process in started), printed
    return "".join(printed)


def steps_of(folder: Path, phase: str) -> list[Any]:
    """For each step: Lightning's epoch and batch number, and the samples of all ranks together."""
    ranks = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob(f"{phase}-[0-9]"))
    ]
    return [
        [step[0][0], step[0][1], [sample for rank in step for sample in rank[2]]] for step in zip(*ranks, strict=True)
    ]


def test_another_number_of_processes(tmp_path: Path) -> None:
    job(tmp_path, "whole", 1)
    whole = steps_of(tmp_path, "whole")
    assert len(whole) == 12
    job(tmp_path, "two", 2, "--stop", "4")
    job(tmp_path, "three", 3, "--stop", "8", "--checkpoint", str(tmp_path / "two.ckpt"))
    job(tmp_path, "one", 1, "--checkpoint", str(tmp_path / "three.ckpt"))
    parts = [steps_of(tmp_path, phase) for phase in ("two", "three", "one")]
    assert [len(part) for part in parts] == [4, 4, 4]
    assert [step for part in parts for step in part] == whole, "data, and Lightning's epochs and batch numbers"


def test_each_process_gets_its_part_of_somebodys_iterable(tmp_path: Path) -> None:
    job(tmp_path, "two", 2, "--kind", "stream", "--stop", "4")
    job(tmp_path, "three", 3, "--kind", "stream", "--checkpoint", str(tmp_path / "two.ckpt"))
    steps = steps_of(tmp_path, "two") + steps_of(tmp_path, "three")
    assert [step[:2] for step in steps] == [[epoch, batch] for epoch in (0, 1) for batch in range(6)]
    for epoch in (0, 1):
        samples = sorted(sample[0] for step in steps if step[0] == epoch for sample in step[2])
        assert samples == [float(number) for number in range(72)]


def test_another_global_batch(tmp_path: Path) -> None:
    job(tmp_path, "two", 2, "--kind", "smaller", "--stop", "4")  # 48 of 72 samples: four of six batches
    printed = job(tmp_path, "one", 1, "--kind", "smaller", "--checkpoint", str(tmp_path / "two.ckpt"))
    assert "counts batches" not in printed
    first, second = steps_of(tmp_path, "two"), steps_of(tmp_path, "one")
    assert [step[:2] for step in second] == [[0, batch] for batch in range(8, 12)] + [[1, batch] for batch in range(12)]
    samples = [sample[0] for step in first + second if step[0] == 0 for sample in step[2]]
    assert sorted(samples) == [float(number) for number in range(72)]


def test_a_run_that_max_steps_ended_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    job(tmp_path, "whole", 1)
    for phase, options in (("bare", ["--bare"]), ("exact", [])):
        job(tmp_path, phase, 1, "--max-steps", "4", *options)
        printed = job(tmp_path, f"{phase}-rest", 1, "--checkpoint", str(tmp_path / f"{phase}.ckpt"), *options)
        batches = steps_of(tmp_path, phase) + steps_of(tmp_path, f"{phase}-rest")
        assert (batches == steps_of(tmp_path, "whole")) is (phase == "exact")
        told = "by its own counts" in printed and "ExactResume()" in printed
        assert told is (phase == "bare")


