"""Lightning without the callback: a resume is exact, or a warning names the callback as it begins."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("lightning", reason="Lightning is not installed")

import sys

from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader

sys.path.insert(0, str(Path(__file__).parent))

from lightning_runs import TRAIN, Killed, Make, Peeking, Recorder, Saver, fit, mapped, unknown

import midepoch
from midepoch.adapters.trainers.lightning import ExactResume

NAMED = r"may not go on exactly where .*%s.*ExactResume\(\) to the trainer's callbacks"


class Plain(Dataset[torch.Tensor]):
    """Nothing random, so that it needs no wrapping."""

    def __init__(self, name: float, size: int = 6) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.name, float(index)])


def bare(name: float = 7, size: int = 6) -> Any:
    return DataLoader(Plain(name, size), batch_size=2)


class Hooks(Recorder):
    """Writes down when epochs end, too."""

    def on_train_epoch_end(self) -> None:
        self.log_of.append(("end", self.trainer.current_epoch))


class HooksPeeking(Hooks, Peeking):
    pass


class StopsAt(Callback):
    """As a user's callback that has seen enough."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *arguments: Any, **keywords: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


class Case:
    """One interruption and its resume, without the callback."""

    def __init__(self, folder: Path, train: Make, validation: Make | None = None, **settings: Any) -> None:
        self.path, self.train, self.validation = folder / "saved.ckpt", train, validation
        self.settings = {"module": Hooks, "exact": False, **settings}
        self.whole: list[Any] = []
        self.log: list[Any] = []
        self.told: list[str] = []
        self._fit(self.whole)

    def _fit(self, log: list[Any], **settings: Any) -> Any:
        return fit(log, self.train, self.validation, **{"told": [], **self.settings, **settings})

    def cut(self, hook: str, at: int) -> bool:
        """Save and stop at the n-th call of a hook; False if it is not called as often."""
        self.log = []
        try:
            self._fit(self.log, callbacks=(Saver(hook, at, self.path),))
        except Killed:
            self._resume()
            return True
        return False

    def stop(self, **settings: Any) -> None:
        """Let the run end by itself, save, and go on with the other settings."""
        self.log = []
        self._fit(self.log, **settings).save_checkpoint(self.path)
        self._resume()

    def _resume(self) -> None:
        self.told = []
        self._fit(self.log, checkpoint=self.path, told=self.told)

    @property
    def exact(self) -> bool:
        return self.log == self.whole

    @property
    def named(self) -> bool:
        return any(re.search(NAMED % "", each) for each in self.told)


# --- no false alarms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"limit_train_batches": 4}, {"accumulate_grad_batches": 2}, {"val_check_interval": 2}],
    ids=str,
)
def test_nothing_is_told_in_the_middle_of_an_epoch(settings: dict[str, Any], tmp_path: Path) -> None:
    case = Case(tmp_path, mapped, bare if "val_check_interval" in settings else None, **settings)
    batches = settings.get("limit_train_batches", 5)
    # Where a validation is due after a batch, it is saved behind the validation.
    every = settings.get("val_check_interval", batches)
    cuts = [at for at in range(1, 2 * batches) if at % batches % every]
    for at in cuts:
        assert case.cut("on_train_batch_end", at)
        assert case.exact and not case.told, (at, case.told)
    assert len(cuts) >= 4


def test_nothing_is_told_at_the_end_of_epochs_and_validations(tmp_path: Path) -> None:
    for hook, settings in (("on_train_epoch_end", {}), ("on_validation_end", {"val_check_interval": 2})):
        case = Case(tmp_path, mapped, bare, **settings)
        at = 1
        while case.cut(hook, at):
            # A checkpoint at the end of an epoch is saved before the module's own hook.
            done = [each for each in case.log if each[0] != "end"]
            assert done == [each for each in case.whole if each[0] != "end"] and not case.told, (hook, at, case.told)
            at += 1
        assert at > 2


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_nothing_is_told_while_no_loader_of_several_has_ended(mode: Any, tmp_path: Path) -> None:
    case = Case(tmp_path, lambda: CombinedLoader([mapped(8, 1), mapped(10, 2)], mode))
    for at in (1, 3):
        assert case.cut("on_train_batch_end", at)
        assert case.exact and not case.told, case.told


def test_nothing_is_told_of_a_run_that_has_ended(tmp_path: Path) -> None:
    for kind in ("mapped", "unknown", "dict"):
        case = Case(tmp_path, TRAIN[kind])
        case.stop()  # a resume of a finished run
        assert case.exact and not case.told, (kind, case.told)
    case = Case(tmp_path, mapped, max_steps=3)
    case.stop()
    assert case.exact and not case.told


def test_nothing_is_told_where_nothing_resumes(tmp_path: Path) -> None:
    for kind in ("mapped", "unknown", "dict"):
        told: list[str] = []
        trainer = fit([], TRAIN[kind], exact=False, told=told, max_steps=3)
        trainer.fit_loop.epoch_loop.max_steps = -1
        trainer.fit(Recorder([]), TRAIN[kind]())
        assert not told


# --- each case in which it is needed ----------------------------------------------------------------------------------


def saved_as(hook: str, at: int) -> Callable[[Case], None]:
    def play(case: Case) -> None:
        assert case.cut(hook, at)

    return play


def ended_by(callback: Callable[[], Callback] | None = None, **settings: Any) -> Callable[[Case], None]:
    return lambda case: case.stop(callbacks=() if callback is None else (callback(),), **settings)


class Ends(Timer):
    """A Timer whose time is over after so many batches, however fast they are."""

    def __init__(self, batches: int) -> None:
        super().__init__(duration={"hours": 1})
        self.batches = batches

    def time_elapsed(self, stage: Any = "train") -> float:
        self.batches -= 1
        return 0.0 if self.batches >= 0 else 7200.0


BY_STEPS = {"max_steps": 9, "max_epochs": -1}

NEEDED: dict[str, tuple[Make, dict[str, Any], Callable[[Case], None], str]] = {
    "max_steps": (mapped, {}, ended_by(max_steps=3), "ended after 3 of 5 batches"),
    "max_steps in the last epoch": (mapped, {}, ended_by(max_steps=8), "ended after 3 of 5 batches"),
    "max_steps, and more of them": (mapped, BY_STEPS, ended_by(max_steps=3), "ended after 3"),
    "max_steps at an epoch's end": (mapped, BY_STEPS, ended_by(max_steps=5), "one batch more"),
    "should_stop": (mapped, {}, ended_by(lambda: StopsAt(3)), "ended after 3 of 5 batches"),
    "Timer": (mapped, {}, ended_by(lambda: Ends(3)), "ended after . of 5 batches"),
    "unknown length": (unknown, {}, saved_as("on_train_batch_end", 2), "length of a loader is unknown"),
    "unknown length, at an epoch's end": (unknown, {}, saved_as("on_train_epoch_end", 1), "length of a loader"),
    "estimated_stepping_batches": (
        mapped, {"module": HooksPeeking}, saved_as("on_train_batch_end", 3), "made before the checkpoint was read"
    ),
    "estimated_stepping_batches and max_steps": (
        mapped, {"module": HooksPeeking}, ended_by(max_steps=8), "ended after 3 of 5 batches"
    ),
    "max_size": (TRAIN["max_size mapped"], {}, saved_as("on_train_batch_end", 4), "which of several loaders had come"),
    "max_size_cycle": (TRAIN["dict"], {}, saved_as("on_train_epoch_end", 1), "which of several loaders had come"),
    "in the middle of a batch": (mapped, {}, saved_as("on_train_batch_start", 3), "in the middle of a batch"),
    "before an epoch's first batch": (mapped, {}, saved_as("on_train_epoch_start", 2), "as an epoch began"),
    "after an epoch's last batch": (mapped, {}, saved_as("on_train_batch_end", 5), "leaves out what follows it"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_it_is_named_where_it_is_needed_and_mends_it(name: str, tmp_path: Path) -> None:
    train, settings, play, reason = NEEDED[name]
    case = Case(tmp_path, train, **settings)
    play(case)
    assert not case.exact
    assert [each for each in case.told if re.search(NAMED % reason, each)], case.told
    play(mended := Case(tmp_path, train, **{**settings, "exact": True}))
    assert [each for each in mended.log if each[0] == "train"] == [each for each in case.whole if each[0] == "train"]
    assert not mended.told


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_that_ended_before_its_first_batch(exact: bool, tmp_path: Path) -> None:
    case = Case(tmp_path, mapped, exact=exact)
    case.stop(callbacks=(Ends(0),))
    assert case.exact and not case.told


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_end", "on_train_batch_end"])
def test_a_validation_that_would_be_left_out_is_told(hook: str, tmp_path: Path) -> None:
    case = Case(tmp_path, mapped, bare, val_check_interval=2)
    assert case.cut(hook, 2)  # within the first validation, or before it
    assert not case.exact
    assert re.search(NAMED % "before the end of a validation", case.told[0])


class RestoresLate(SingleDeviceStrategy):
    """As the strategies of sharded models, which read a checkpoint when the optimizers have been made."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


def test_loaders_that_were_made_before_a_late_checkpoint(tmp_path: Path) -> None:
    class Late(Case):
        def _fit(self, log: list[Any], **settings: Any) -> Any:
            return super()._fit(log, strategy=RestoresLate(device="cpu"), **settings)

    case = Late(tmp_path, mapped, module=HooksPeeking)
    assert case.cut("on_train_batch_end", 3)
    assert not case.exact and re.search(NAMED % "made before the checkpoint was read", case.told[0])


def test_it_is_told_once(tmp_path: Path) -> None:
    case = Case(tmp_path, TRAIN["dict"])
    case.stop(max_steps=3)
    assert len([each for each in case.told if "ExactResume" in each]) == 1


# --- every moment of a run --------------------------------------------------------------------------------------------


HOOKS = ("on_train_batch_end", "on_train_batch_start", "on_train_epoch_end", "on_train_epoch_start")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limit": {"limit_train_batches": 3},
    "accumulate": {"accumulate_grad_batches": 2},
    "max_steps": {"max_steps": 100},
    "max_steps only": {"max_steps": 8, "max_epochs": -1},
    "estimated_stepping_batches": {"module": Peeking},
}
SHORT = {("mapped", "plain"), ("mapped", "max_steps"), ("dict", "plain"), ("unknown", "plain")}


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        pytest.param(kind, option, marks=() if (kind, option) in SHORT else pytest.mark.long)
        for kind in ("mapped", "dict", "max_size mapped", "min_size mapped", "unknown", "max_size_cycle unknown")
        for option in OPTIONS
    ],
)
def test_every_moment_is_exact_or_told(kind: str, option: str, tmp_path: Path) -> None:
    case = Case(tmp_path, TRAIN[kind], **{"module": Recorder, **OPTIONS[option]})
    found = {True: 0, False: 0}
    for hook in HOOKS:
        at = 1
        while case.cut(hook, at):
            assert case.exact or case.named, (hook, at, case.told)
            found[case.exact] += 1
            at += 1
    for steps in (1, 4, 5, 6):
        ways: list[dict[str, Any]] = [{"max_steps": steps}, {"callbacks": (StopsAt(steps),)}]
        for way in ways:
            case.stop(**way)
            assert case.exact or case.named, (way, case.told)
            found[case.exact] += 1
    assert all(found.values()), "some of each"


@pytest.mark.parametrize("every", [2, 1.0])
@pytest.mark.parametrize("sanity", [0, pytest.param(2, marks=pytest.mark.long)])
def test_every_moment_of_validations_is_exact_or_told(every: Any, sanity: int, tmp_path: Path) -> None:
    case = Case(tmp_path, mapped, bare, module=Recorder, val_check_interval=every, num_sanity_val_steps=sanity)
    for hook in ("on_train_batch_end", "on_validation_start", "on_validation_batch_end", "on_validation_end"):
        at = 1
        while case.cut(hook, at):
            assert case.exact or case.named, (hook, at, case.told)
            at += 1
        assert at > 2


# --- the scenarios of Lightning's own test of loaders that are saved and restored -------------------------------------


def numbers(batch: Any) -> Any:
    """The first sample of each loader's batch."""
    return [numbers(each) for each in batch] if isinstance(batch[0][0], list) else batch[0][:2]


LOADERS: dict[str, tuple[Make, int]] = {
    "single": (lambda: mapped(name=1), 0),
    "single of unknown length": (lambda: unknown(name=1), 0),
    "combined": (lambda: CombinedLoader(mapped(name=1)), 0),
    "several": (lambda: [mapped(12, 1), mapped(10, 2)], 0),
    "several of unknown length": (lambda: CombinedLoader([unknown(name=1), unknown(6, 2)]), 0),
    "one, not wrapped": (lambda: CombinedLoader(bare(1, 10)), 1),
    "mixed": (lambda: CombinedLoader([bare(1, 10), mapped(10, 2), bare(3, 10)]), 2),
    "mixed, two wrapped": (lambda: [bare(1, 10), mapped(10, 2), mapped(10, 3)], 1),
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", LOADERS)
def test_two_steps_and_then_two_more(name: str, exact: bool, tmp_path: Path) -> None:
    make, not_wrapped = LOADERS[name]
    run = functools.partial(fit, train=make, exact=exact, limit_val_batches=0, max_epochs=-1)
    whole: list[Any] = []
    run(whole, told=[], max_steps=4)
    log: list[Any] = []
    told: list[str] = []
    run(log, told=told, max_steps=2).save_checkpoint(tmp_path / "saved.ckpt")
    run(log, told=told, max_steps=4, checkpoint=tmp_path / "saved.ckpt")
    assert len(log) == 4
    found, expected = [each[3] for each in log], [each[3] for each in whole]
    if not not_wrapped:
        assert found == expected or not exact
        assert bool(told) is not exact
    elif name == "one, not wrapped":
        assert found == expected[:2] * 2
    else:  # each wrapped loader goes on, and the others start again, as with Lightning's own
        for place in range(3):
            names = [batch[place] for batch in found]
            is_wrapped = len(names[0][0]) == 3
            assert names == [batch[place] for batch in (expected if is_wrapped else expected[:2] * 2)], place
    if exact and not_wrapped:
        assert any("DataLoader are not wrapped" in each for each in told)
    elif name != "one, not wrapped":
        assert exact or any("ExactResume" in each for each in told)


def test_a_checkpoint_without_the_callback_of_loaders_not_all_wrapped(tmp_path: Path) -> None:
    """The callback leaves them to Lightning, which had saved them."""
    make = LOADERS["mixed"][0]
    whole: list[Any] = []
    fit(whole, make, told=[], exact=False, max_steps=4)
    log: list[Any] = []
    fit(log, make, told=[], exact=False, max_steps=2).save_checkpoint(tmp_path / "saved.ckpt")
    fit(log, make, told=[], exact=True, max_steps=4, checkpoint=tmp_path / "saved.ckpt")
    assert [each[3][1] for each in log] == [each[3][1] for each in whole]


def test_the_callback_is_found_where_it_is_one_of_the_users_own(tmp_path: Path) -> None:
    class Own(ExactResume):
        pass

    log: list[Any] = []
    told: list[str] = []
    run = functools.partial(fit, train=mapped, exact=False, told=told, max_epochs=2)
    run(log, max_steps=3, callbacks=(Own(),)).save_checkpoint(tmp_path / "saved.ckpt")
    run(log, checkpoint=tmp_path / "saved.ckpt", callbacks=(Own(),))
    assert len(log) == 10 and not told


def test_a_loader_of_ours_is_asked_for_nothing_else() -> None:
    """What is looked at belongs to Lightning's loop of epochs; others with methods of these names are left alone."""

    class Loop:
        def setup_data(self) -> Any:
            from lightning.pytorch.utilities.combined_loader import CombinedLoader

            return iter(CombinedLoader([midepoch.wrap(bare())]))

    assert Loop().setup_data() is not None
