"""A job whose step raises, on a source with a state of its own.

``python exception_job.py TRAINER FOLDER FAIL_AT REMEMBER``. It resumes from what the folder has, writes each batch that
it has trained on to FOLDER/log, and keeps a checkpoint where it fails: FAIL_AT counts this process's batches; -1 for
none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])


def make(remember: int) -> midepoch.Loader:
    source = StatefulDataLoader(Noisy(), 2, shuffle=True, generator=torch.Generator().manual_seed(3))
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
        with self.path.open("a") as file:
            file.write(json.dumps(batch.tolist()) + "\n")


def lightning_run(folder: Path, steps: Steps, loader: midepoch.Loader) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    from midepoch.trainers.lightning import ExactResume

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            steps.take(batch)
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Keeping(OnExceptionCheckpoint):
        def teardown(self, *arguments: Any, **keywords: Any) -> None:
            """Lightning removes it where the run has gone on to its end."""

    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ExactResume(), Keeping(folder, "failed")],
    )  # fmt: skip
    checkpoint = folder / "failed.ckpt"
    trainer.fit(Module(), loader, ckpt_path=checkpoint if checkpoint.exists() else None, weights_only=False)


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
