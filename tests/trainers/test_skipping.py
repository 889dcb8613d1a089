"""Whatever skips batches by itself when it resumes: exact, or refused as it begins."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
from support import jobs

ignite = pytest.importorskip("ignite.engine", reason="ignite is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZE = 10
See = Callable[[Any], None]

# Each run goes on from what the folder has, and saves and ends when `stop` batches were trained on in all; 0 for its
# end. Options: "unloaded" leaves the loader's own state out; others are named where they are read.


def ignite_run(folder: Path, stop: int, options: list[str], see: See) -> None:
    loader = midepoch.wrap(DataLoader(jobs.Noisy(SIZE), batch_size=2, shuffle=True), seed=3)
    kind = ignite.Engine if "plain" in options else ignite.DeterministicEngine
    engine = kind(lambda engine, batch: see(batch))
    path = folder / "saved.pt"
    if path.exists():
        saved = torch.load(path, weights_only=False)
        engine.load_state_dict(saved["engine"])
        if "unloaded" not in options:
            loader.load_state_dict(saved["loader"])

    @engine.on(ignite.Events.ITERATION_COMPLETED)  # type: ignore[untyped-decorator]
    def _save() -> None:
        if engine.state.iteration == stop:
            torch.save({"engine": engine.state_dict(), "loader": loader.state_dict()}, path)
            engine.terminate()

    # A state of ignite's has max_epochs; within a run that goes on they may not be stated again.
    engine.run(loader, max_epochs=None if path.exists() else 2)
    if "again" in options:
        engine.run(loader)


def accelerate_run(folder: Path, stop: int, options: list[str], see: See) -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    sources: dict[str, Any] = {
        "map": lambda: DataLoader(jobs.Noisy(SIZE), batch_size=2, shuffle=True),
        "stream": lambda: DataLoader(jobs.Stream(SIZE), batch_size=2),
        "list": lambda: [torch.tensor([float(index)]) for index in range(5)],
        "function": lambda: lambda: iter(jobs.Stream(SIZE)),
    }
    (kind,) = (each for each in options if each in sources)
    loader = accelerator.prepare(midepoch.wrap(sources[kind](), seed=3))
    accelerator.register_for_checkpointing(loader)
    if (folder / "saved").exists():
        accelerator.load_state(str(folder / "saved"))
        # As its documentation has it for loaders without a state.
        if "skip" in options:
            loader = accelerator.skip_first_batches(loader, 3)
    for done, batch in enumerate(loader, 1):
        see(batch)
        if done == stop:
            accelerator.save_state(str(folder / "saved"))
            return


def transformers_run(folder: Path, stop: int, options: list[str], see: See) -> None:
    class Fed(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return midepoch.wrap(DataLoader(jobs.Rows(SIZE), batch_size=2, shuffle=True), seed=3)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, max_steps=stop or -1, save_steps=stop or 100, report_to=[],
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, ignore_data_skip="ignore" in options,
    )  # fmt: skip
    resumes = any(folder.glob("checkpoint-*"))
    trainer = Fed(model=jobs.Layer(see), args=arguments, train_dataset=jobs.Rows(SIZE))
    trainer.train(resume_from_checkpoint=resumes or None)


RUNS = {"ignite": ignite_run, "accelerate": accelerate_run, "transformers": transformers_run}


def run(library: str, folder: Path, stop: int, *options: str) -> tuple[list[Any], str]:
    """All batches so far, and what midepoch told in this run."""
    folder.mkdir(exist_ok=True)
    log, failed = folder / "log", ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            RUNS[library](folder, stop, list(options), lambda batch: jobs.note(log, batch.tolist()))
        except Exception as error:  # noqa: BLE001  # told
            failed = "".join(traceback.format_exception_only(error))
    told = [str(each.message) for each in caught if issubclass(each.category, midepoch.MidepochWarning)]
    return jobs.noted(log), "\n".join([*told, failed]).strip()


IGNITE = ("ignite's DeterministicEngine is about to skip {} batches", "use ignite.engine.Engine")
ACCELERATE = ("the wrapped loader itself", "continues by itself")


@pytest.mark.parametrize(("library", "cut", "before", "after", "told"), [
    ("ignite", 3, "", "loaded", IGNITE), ("ignite", 7, "", "unloaded", IGNITE),
    *(("accelerate", 3, kind, f"{kind} skip", ACCELERATE) for kind in ("map", "stream", "list", "function")),
])  # fmt: skip
def test_what_would_skip_is_refused_before_a_batch(
    library: str, cut: int, before: str, after: str, told: tuple[str, ...], tmp_path: Path
) -> None:
    head, said = run(library, tmp_path, cut, *before.split())
    assert len(head) == cut and (not said or library == "accelerate")
    again, said = run(library, tmp_path, 0, *after.split())
    assert again == head and all(each.format(cut % 5) in said for each in told)


@pytest.mark.parametrize(
    ("library", "option", "batches", "cuts"),
    [("ignite", "plain", 10, (3, 5, 8)), ("ignite", "deterministic", 10, (5,)), ("accelerate", "map", 5, (3,))],
)
def test_what_does_not_skip_is_exact(
    library: str, option: str, batches: int, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    whole, told = run(library, tmp_path / "whole", 0, option)
    assert len(whole) == batches and not told
    for cut in cuts:
        run(library, tmp_path / str(cut), cut, option)
        assert run(library, tmp_path / str(cut), 0, option) == (whole, ""), cut


def test_a_deterministic_engine_that_runs_again_is_refused(tmp_path: Path) -> None:
    """In one process, without any load: it would skip batches of the loader's next epoch."""
    found, told = run("ignite", tmp_path, 3, "again")
    assert len(found) == 3 and "about to skip 3 batches" in told


def test_hugging_faces_trainer_without_feed(tmp_path: Path) -> None:
    whole, told = run("transformers", tmp_path / "whole", 0)
    assert len(whole) == 10 and not told
    # At an epoch's beginning it skips nothing, and tells the loader the epoch.
    assert len(run("transformers", tmp_path / "boundary", 5)[0]) == 5
    assert run("transformers", tmp_path / "boundary", 0) == (whole, "")
    # Within an epoch it is refused before a batch is read.
    run("transformers", tmp_path / "middle", 7)
    after, told = run("transformers", tmp_path / "middle", 0)
    assert after == whole[:7]
    assert "UnsupportedSourceError" in told and "midepoch.trainers" in told
    # Told not to skip, it begins the epoch again, as its option says; a warning names what continues it.
    after, told = run("transformers", tmp_path / "middle", 0, "ignore")
    assert after[7:10] == whole[5:8] and told.count("\n") == 0
    assert "resumes after 2 of 5 steps of an epoch" in told and "transformers.feed(trainer, loader)" in told
