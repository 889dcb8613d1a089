"""A training job under Lightning's own launcher: each rank writes down what it was given, and may be killed.

Run as a script: ``python lightning_job.py FOLDER PHASE KILL_AT [CHECKPOINT]``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import midepoch
from support import sources

SIZE, BATCH_SIZE, RANKS, EPOCHS, SAVED_AT = 22, 2, 2, 2, 3


class Recorder(lightning.LightningModule):
    """Learns nothing; writes each batch to its rank's file before it is trained on."""

    def __init__(self, folder: Path, phase: str, kill_at: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder, self.phase, self.kill_at = folder, phase, kill_at

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        with (self.folder / f"{self.phase}-{self.global_rank}").open("a") as file:
            file.write(json.dumps(batch.tolist()) + "\n")
        loss: torch.Tensor = self.layer(batch[:, :1].float()).mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def main(folder: Path, phase: str, kill_at: int, checkpoint: str | None = None) -> None:
    """Trains for two epochs, or until it is killed; saves after the third batch."""
    # Wrapped here, where no world exists yet: Lightning starts the other process in fit().
    loader = midepoch.wrap(sources.noisy_loader(SIZE, batch_size=BATCH_SIZE), seed=5)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", max_epochs=EPOCHS, logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(Recorder(folder, phase, kill_at), loader, ckpt_path=checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
