"""Hugging Face's Trainer with feed: cut between steps, in a step by a signal, and by an exception."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers.trainer

import midepoch
from midepoch import MidepochWarning, StateError, StateMismatchError
from midepoch.trainers.transformers import feed
from support import jobs, sources


def make(batch_size: int = 2) -> midepoch.Loader:
    return midepoch.wrap(DataLoader(jobs.Rows(22), batch_size=batch_size, shuffle=True), seed=3)


def fed(
    folder: Path, seen: list[Any], loader: Any = None, at: int = -1, act: Callable[[Any], None] | None = None,
    **settings: Any,
) -> Any:  # fmt: skip
    """A Trainer. `act`: what it does when its model has seen `at` batches."""

    def see(batch: torch.Tensor) -> None:
        seen.append(batch.tolist())
        if act is not None and len(seen) == at:
            act(trainer)

    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False, learning_rate=0.1, save_strategy="no", **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(model=jobs.Layer(see), args=arguments)
    feed(trainer, loader or make())
    return trainer


class Stop(transformers.TrainerCallback):
    """Ends a run after so many steps, and has it saved; unlike max_steps, this leaves its learning rates alone."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step == self.steps:
            control.should_training_stop = control.should_save = True


def test_another_split_and_another_argument_are_refused(tmp_path: Path) -> None:
    first = fed(tmp_path, [])
    first.add_callback(Stop(5))
    first.train()
    with pytest.raises(StateMismatchError, match=r"an epoch had 11 batches .* but has 6 now"):
        fed(tmp_path, [], make(batch_size=4)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    with pytest.raises(TypeError, match="feed takes a Trainer and a wrapped loader"):
        feed(make(), make())  # type: ignore[arg-type]


def signalled(trainer: Any) -> None:
    """As by a cluster with enable_jit_checkpoint, without the pause that is meant for one."""
    managers = [getattr(each, "jit_manager", None) for each in trainer.callback_handler.callbacks]
    manager = next(each for each in managers if each is not None)
    signal.signal(signal.SIGTERM, lambda *_: manager._enable_checkpoint())
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("accumulate", "within"), [(3, False), (1, True), (3, True), pytest.param(1, False, marks=pytest.mark.long)]
)
def test_a_run_that_is_cut_goes_on(accumulate: int, within: bool, tmp_path: Path) -> None:
    """Between steps, or by a signal within one: what was read for it is given again."""
    whole, theirs = list[Any](), vars(transformers.trainer)["skip_first_batches"]
    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulate, "enable_jit_checkpoint": within}
    reference = fed(tmp_path, whole, **settings)
    reference.train()
    assert whole == [batch["x"].tolist() for loader in [make()] for _ in range(2) for batch in loader]
    steps = reference.state.global_step
    for cut in (2, 9, 14) if within else sorted({1, steps // 2 - 1, steps // 2, steps // 2 + 1, steps - 1}):
        seen, again, folder = list[Any](), list[Any](), tmp_path / f"at{cut}"
        first = fed(folder, seen, at=cut if within else -1, act=signalled, **settings)
        first.add_callback(Stop(-1 if within else cut))
        first.train()
        resumed = fed(folder, again, **settings)
        resumed.train(resume_from_checkpoint=str(next(folder.glob("checkpoint-*"))))
        rest = len(whole) - len(again)
        assert seen[:rest] + again == whole and (rest < len(seen)) is within, cut
        assert all(map(torch.equal, resumed.model.parameters(), reference.model.parameters())), cut
        assert resumed.state.global_step == steps, cut
        assert vars(transformers.trainer)["skip_first_batches"] is theirs


class Failing(sources.Counter):
    """A source with a state of its own, which fails at a batch."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return ({"x": torch.tensor([[0.0, float(each)]])} for each in super().__iter__())


def fail(trainer: Any) -> None:
    raise ValueError("the user's own")


def save_after(trainer: Any, error: Any, told: str) -> None:
    """By a program that calls what the Trainer itself calls to save."""
    with pytest.raises(error), pytest.warns(MidepochWarning, match=told):
        try:
            trainer.train()
        finally:
            trainer._save_checkpoint(trainer.model, trial=None)


def test_a_checkpoint_after_an_exception(tmp_path: Path) -> None:
    told = r"the state of 1 batches ago is not known .*The present state is saved.*pass remember=1"
    save_after(fed(tmp_path / "step", [], midepoch.wrap(Failing(5)), 3, fail), ValueError, told)
    seen: list[Any] = []
    fed(tmp_path / "step", seen, midepoch.wrap(Failing(5))).train(resume_from_checkpoint=True)
    assert [each[0][1] for each in seen] == [3, 4, 0, 1, 2, 3, 4], "all but the batch whose step failed"
    save_after(fed(tmp_path / "source", [], midepoch.wrap(Failing(5, 3))), RuntimeError, "no state of the Failing, bec")
    with pytest.raises(StateError, match="left the loader's state unknown: resume from an earlier one"):
        fed(tmp_path / "source", [], midepoch.wrap(Failing(5))).train(resume_from_checkpoint=True)
