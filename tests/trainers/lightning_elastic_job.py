"""A Lightning job with the callback, one of several processes: each rank writes down what it was given, and draws.

``python lightning_elastic_job.py FOLDER PHASE RANKS OPTIONS``, a JSON object with some of: the kind of the data; the
step after which it saves, and two steps later ends; a checkpoint; a seed for the global generators, to which each rank
adds its number.
"""

from __future__ import annotations

import json
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
from lightning_runs import QUIET, Recorder

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
    folder, phase, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    options = {"kind": "mapped", "stop": -10, "checkpoint": None, "seed": 0, **json.loads(sys.argv[4])}
    torch.manual_seed(options["seed"] + int(os.environ["LOCAL_RANK"]))
    path = folder / phase
    trainer = lightning.Trainer(
        **QUIET, devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=2, default_root_dir=folder,
        callbacks=[SaveAndStop(path.with_suffix(".ckpt"), options["stop"]), ExactResume()],
    )  # fmt: skip
    loader = make(options["kind"], ranks)
    trainer.fit(Drawing(path), loader, ckpt_path=options["checkpoint"], weights_only=False)


if __name__ == "__main__":
    main()
