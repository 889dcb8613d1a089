"""Runs of libraries that skip batches by themselves: ``python skipping_job.py LIBRARY FOLDER STOP [OPTION...]``.

The run goes on from what FOLDER has, writes each batch to FOLDER/log, and saves and ends when STOP batches were trained
on in all; 0 for its end. Options: ``unloaded`` leaves the loader's own state out; others are named where they are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import midepoch
from support import jobs

SIZE = 10


def ignite_run(folder: Path, stop: int, options: list[str], see: Callable[[Any], None]) -> None:
    from ignite.engine import DeterministicEngine, Engine, Events

    loader = midepoch.wrap(DataLoader(jobs.Noisy(SIZE), batch_size=2, shuffle=True), seed=3)
    kind = Engine if "plain" in options else DeterministicEngine
    engine = kind(lambda engine, batch: see(batch))
    path = folder / "saved.pt"
    if path.exists():
        saved = torch.load(path, weights_only=False)
        engine.load_state_dict(saved["engine"])
        if "unloaded" not in options:
            loader.load_state_dict(saved["loader"])

    @engine.on(Events.ITERATION_COMPLETED)
    def _save() -> None:
        if engine.state.iteration == stop:
            torch.save({"engine": engine.state_dict(), "loader": loader.state_dict()}, path)
            engine.terminate()

    # A state of ignite's has max_epochs; within a run that goes on they may not be stated again.
    engine.run(loader, max_epochs=None if path.exists() else 2)
    if "again" in options:
        engine.run(loader)


def accelerate_run(folder: Path, stop: int, options: list[str], see: Callable[[Any], None]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
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


def transformers_run(folder: Path, stop: int, options: list[str], see: Callable[[Any], None]) -> None:
    import transformers

    class Fed(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return midepoch.wrap(DataLoader(jobs.Rows(SIZE), batch_size=2, shuffle=True), seed=3)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, max_steps=stop or -1, save_steps=stop or 100, report_to=[],
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, ignore_data_skip="ignore" in options,
    )  # fmt: skip
    resumes = any(folder.glob("checkpoint-*"))
    trainer = Fed(model=jobs.Layer(see), args=arguments, train_dataset=jobs.Rows(SIZE))
    trainer.train(resume_from_checkpoint=resumes or None)


def main(library: str, folder: Path, stop: int, options: list[str]) -> None:
    run = {"ignite": ignite_run, "accelerate": accelerate_run, "transformers": transformers_run}[library]
    run(folder, stop, options, lambda batch: jobs.note(folder / "log", batch.tolist()))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
