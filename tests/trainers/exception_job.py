"""A job whose step raises, on a source with a state of its own.

``python exception_job.py TRAINER FOLDER FAIL_AT REMEMBER``. It resumes from what the folder has, writes each batch that
it has trained on to FOLDER/log, and keeps a checkpoint where it fails: FAIL_AT counts this process's batches; -1 for
none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from support import jobs


def make(remember: int) -> midepoch.Loader:
    source = StatefulDataLoader(jobs.Noisy(12), 2, shuffle=True, generator=torch.Generator().manual_seed(3))
    return midepoch.wrap(source, remember=remember)


class BadStepError(Exception):
    """The user's own."""


class Steps:
    """What is trained: each batch is written down when its step is done."""

    def __init__(self, folder: Path, fail_at: int) -> None:
        self.path, self.fail_at, self.count = folder / "log", fail_at, 0

    def take(self, batch: torch.Tensor) -> None:
        if self.count == self.fail_at:
            raise BadStepError("this step is the user's to mend")
        self.count += 1
        jobs.note(self.path, batch.tolist())


def lightning_run(folder: Path, steps: Steps, loader: midepoch.Loader) -> None:
    from lightning_runs import Keeping, Recorder, fit

    class Module(Recorder):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            steps.take(batch)
            return super().training_step(batch, batch_idx)

    checkpoint, told = folder / "on_exception.ckpt", list[str]()
    try:
        fit(
            [], lambda: loader, callbacks=(Keeping(folder),), checkpoint=checkpoint if checkpoint.exists() else None,
            module=Module, told=told, enable_checkpointing=True,
        )  # fmt: skip
    finally:
        print("\n".join(told), file=sys.stderr)


def snapshot_run(folder: Path, steps: Steps, loader: midepoch.Loader) -> None:
    snapshot = midepoch.Snapshot(folder / "snapshot.pt", data=loader)
    for _ in snapshot.epochs(2):
        for batch in loader:
            try:
                steps.take(batch)
            except BadStepError:
                snapshot.save(in_flight=1)
                raise
            snapshot.step()


def main(trainer: str, folder: Path, fail_at: int, remember: int) -> None:
    steps = Steps(folder, fail_at)
    {"lightning": lightning_run, "snapshot": snapshot_run}[trainer](folder, steps, make(remember))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
