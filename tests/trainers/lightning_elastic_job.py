"""A Lightning job with the callback, one of several processes: each rank writes down what it was given, and draws.

``python lightning_elastic_job.py FOLDER PHASE RANKS --kind mapped [--stop 4] [--checkpoint PATH] [--seed 1]``.
It saves after step STOP, and ends two steps later.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

import midepoch
from midepoch.trainers.lightning import ExactResume

sys.path.insert(0, str(Path(__file__).parents[1]))
from lightning_runs import Recorder

from support import jobs

SIZE, GLOBAL_BATCH = 72, 12


def make(kind: str, ranks: int) -> midepoch.Loader:
    if kind == "stream":
        return midepoch.wrap(DataLoader(jobs.Stream(SIZE), batch_size=GLOBAL_BATCH // ranks), seed=3, shard=True)
    # "smaller": another global batch, as each rank has six samples whatever the number of ranks.
    batch_size = 6 if kind == "smaller" else GLOBAL_BATCH // ranks
    return midepoch.wrap(DataLoader(jobs.Noisy(SIZE), batch_size=batch_size, shuffle=True), seed=3)


class Drawing(Recorder):
    def __init__(self, path: Path) -> None:
        super().__init__([])
        self.path = path

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        step = [*self.log_of[-1][1:], float(torch.rand(()))]
        jobs.note(self.path.with_name(f"{self.path.name}-{self.global_rank}"), step)
        return loss


class SaveAndStop(lightning.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
        trainer.should_stop = trainer.global_step == self.step + 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("phase")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--kind", default="mapped")
    parser.add_argument("--stop", type=int, default=-10)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--seed", type=int, default=0, help="of the global generators; each rank adds its number")
    options = parser.parse_args()
    torch.manual_seed(options.seed + int(os.environ["LOCAL_RANK"]))
    path = options.folder / options.phase
    trainer = lightning.Trainer(
        accelerator="cpu", devices=options.ranks, strategy="ddp" if options.ranks > 1 else "auto", max_epochs=2,
        logger=False, default_root_dir=options.folder, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[SaveAndStop(path.with_suffix(".ckpt"), options.stop), ExactResume()],
    )  # fmt: skip
    loader = make(options.kind, options.ranks)
    trainer.fit(Drawing(path), loader, ckpt_path=options.checkpoint, weights_only=False)


if __name__ == "__main__":
    main()
