"""Runs of libraries that skip batches by themselves: ``python skipping_job.py LIBRARY FOLDER STOP [OPTION...]``.

The run goes on from what FOLDER has, writes each batch to FOLDER/log, and saves and ends when STOP batches were trained
on in all; 0 for its end. Options: ``unloaded`` leaves the loader's own state out; others are named where they are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import midepoch


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])


class Rows(Noisy):
    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index)}


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(10):
            yield torch.tensor([float(index), float(torch.rand(()))])


class Log:
    """The batches of all runs, in a file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log"

    def __len__(self) -> int:
        return len(self.path.read_text().splitlines()) if self.path.exists() else 0

    def add(self, batch: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(batch.tolist()) + "\n")


def ignite_run(folder: Path, stop: int, options: list[str], log: Log) -> None:
    from ignite.engine import DeterministicEngine, Engine, Events

    loader = midepoch.wrap(DataLoader(Noisy(), batch_size=2, shuffle=True), seed=3)
    kind = Engine if "plain" in options else DeterministicEngine
    engine = kind(lambda engine, batch: log.add(batch))
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


def accelerate_run(folder: Path, stop: int, options: list[str], log: Log) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    sources: dict[str, Any] = {
        "map": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True),
        "stream": lambda: DataLoader(Stream(), batch_size=2),
        "list": lambda: [torch.tensor([float(index)]) for index in range(5)],
        "function": lambda: lambda: iter(Stream()),
    }
    kind = next((each for each in options if each in sources), "map")
    loader = accelerator.prepare(midepoch.wrap(sources[kind](), seed=3))
    accelerator.register_for_checkpointing(loader)
    if (folder / "saved").exists():
        accelerator.load_state(str(folder / "saved"))
        # As its documentation has it for loaders without a state.
        for batch in accelerator.skip_first_batches(loader, len(log)) if "skip" in options else loader:
            log.add(batch)
        return
    for batch in loader:
        log.add(batch)
        if len(log) == stop:
            accelerator.save_state(str(folder / "saved"))
            return


def transformers_run(folder: Path, stop: int, options: list[str], log: Log) -> None:
    import transformers

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> Any:
            log.add(x)
            return {"loss": self.layer(x).mean()}

    class Fed(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return midepoch.wrap(DataLoader(Rows(), batch_size=2, shuffle=True), seed=3)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, max_steps=stop or -1, save_steps=stop or 100, report_to=[],
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, ignore_data_skip="ignore" in options,
    )  # fmt: skip
    resumes = any(folder.glob("checkpoint-*"))
    Fed(model=Model(), args=arguments, train_dataset=Rows()).train(resume_from_checkpoint=resumes or None)


def main(library: str, folder: Path, stop: int, options: list[str]) -> None:
    run = {"ignite": ignite_run, "accelerate": accelerate_run, "transformers": transformers_run}[library]
    run(folder, stop, options, Log(folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
