"""Lightning without the callback: a warning names the callback as a run resumes."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed")


from lightning.pytorch.callbacks import Callback
from lightning_runs import TRAIN, Killed, Make, Peeking, Recorder, Saver, fit, mapped, unknown

from midepoch.trainers.lightning import ExactResume

NAMED = r"resumes this loader from .* by its own counts, which may not be exact: add .*ExactResume\(\) to the trainer's"


class Hooks(Recorder):
    def on_train_epoch_end(self) -> None:
        self.log_of.append(("end", self.trainer.current_epoch))


class HooksPeeking(Hooks, Peeking):
    pass


class StopsAt(Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *arguments: Any, **keywords: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


class Case:
    """One interruption and its resume, without the callback."""

    def __init__(self, folder: Path, train: Make, **settings: Any) -> None:
        self.path, self.log, self.told, self.whole = folder / "saved.ckpt", list[Any](), list[str](), list[Any]()
        self.settings = {"train": train, "module": Hooks, "exact": False, "told": [], **settings}
        self.fit(self.whole)

    def fit(self, log: list[Any], **more: Any) -> Any:
        return fit(log, **{**self.settings, **more})

    def cut(self, hook: str, at: int) -> None:
        """Save and stop at the n-th call of a hook, and go on."""
        self.log, self.told = [], []
        with pytest.raises(Killed):
            self.fit(self.log, callbacks=(Saver(hook, at, self.path),))
        self.fit(self.log, checkpoint=self.path, told=self.told)

    def stop(self, **settings: Any) -> None:
        """Let the run end by itself, save, and go on with the other settings."""
        self.fit(self.log, **settings).save_checkpoint(self.path)
        self.fit(self.log, checkpoint=self.path, told=self.told)

    @property
    def exact(self) -> bool:
        return self.log == self.whole

    @property
    def named(self) -> bool:
        return sum(bool(re.search(NAMED, each)) for each in self.told) == 1


@pytest.mark.parametrize("settings", [{}, {"limit_train_batches": 4}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_resume_within_an_epoch_is_exact_and_told_once(settings: dict[str, Any], tmp_path: Path) -> None:
    case = Case(tmp_path, mapped, **settings)
    batches = settings.get("limit_train_batches", 5)
    for at in (at for at in range(1, 2 * batches) if at % batches):
        case.cut("on_train_batch_end", at)
        assert case.exact and case.named and len(case.told) == 1, (at, case.told)


def test_nothing_is_told_where_nothing_resumes(tmp_path: Path) -> None:
    for kind in ("mapped", "unknown", "dict"):
        told: list[str] = []
        trainer = fit([], TRAIN[kind], exact=False, told=told, max_steps=3)
        trainer.fit_loop.epoch_loop.max_steps = -1
        trainer.fit(Recorder([]), TRAIN[kind]())
        assert not told


BY_STEPS, PEEKING = {"max_steps": 9, "max_epochs": -1}, {"module": HooksPeeking}

# What trains and how, and where the run is cut: at a call of a hook, or by settings that end it.
NEEDED: dict[str, tuple[Make, dict[str, Any], tuple[str, int] | dict[str, Any]]] = {
    "max_steps": (mapped, {}, {"max_steps": 3}),
    "max_steps in the last epoch": (mapped, {}, {"max_steps": 8}),
    "max_steps, and more of them": (mapped, BY_STEPS, {"max_steps": 3}),
    "max_steps at an epoch's end": (mapped, BY_STEPS, {"max_steps": 5}),
    "should_stop": (mapped, {}, {"callbacks": (StopsAt(3),)}),
    "unknown length": (unknown, {}, ("on_train_batch_end", 2)),
    "unknown length, at an epoch's end": (unknown, {}, ("on_train_epoch_end", 1)),
    "estimated_stepping_batches": (mapped, PEEKING, ("on_train_batch_end", 3)),
    "estimated_stepping_batches and max_steps": (mapped, PEEKING, {"max_steps": 8}),
    "max_size": (TRAIN["max_size mapped"], {}, ("on_train_batch_end", 4)),
    "max_size_cycle": (TRAIN["dict"], {}, ("on_train_epoch_end", 1)),
    "in the middle of a batch": (mapped, {}, ("on_train_batch_start", 3)),
    "before an epoch's first batch": (mapped, {}, ("on_train_epoch_start", 2)),
    "after an epoch's last batch": (mapped, {}, ("on_train_batch_end", 5)),
}


@pytest.mark.parametrize("name", NEEDED)
def test_it_is_named_where_it_is_needed_and_mends_it(name: str, tmp_path: Path) -> None:
    train, settings, where = NEEDED[name]
    case, mended = Case(tmp_path, train, **settings), Case(tmp_path, train, **{**settings, "exact": True})
    for each in (case, mended):
        each.stop(**where) if isinstance(where, dict) else each.cut(*where)
    assert not case.exact and case.named, case.told
    assert [each for each in mended.log if each[0] == "train"] == [each for each in case.whole if each[0] == "train"]
    assert not mended.told


def test_the_callback_is_found_where_it_is_one_of_the_users_own(tmp_path: Path) -> None:
    class Own(ExactResume):
        pass

    log, told = list[Any](), list[str]()
    run = functools.partial(fit, train=mapped, exact=False, told=told, max_epochs=2)
    run(log, max_steps=3, callbacks=(Own(),)).save_checkpoint(tmp_path / "saved.ckpt")
    run(log, checkpoint=tmp_path / "saved.ckpt", callbacks=(Own(),))
    assert len(log) == 10 and not told
