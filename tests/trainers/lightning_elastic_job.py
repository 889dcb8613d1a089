"""A Lightning job on any number of processes, with the callback or without: each rank writes down what it was given.

``python lightning_elastic_job.py FOLDER PHASE RANKS --kind mapped --stop 7 [--checkpoint PATH] [--bare]``, or
``--max-steps 7`` in place of ``--stop``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, IterableDataset

import midepoch
from midepoch.trainers.lightning import ExactResume

SIZE, GLOBAL_BATCH = 72, 12


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])


class Stream(IterableDataset[torch.Tensor]):
    """Somebody's iterable, which knows nothing of ranks."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(SIZE):
            yield torch.tensor([float(index), float(torch.rand(()))])


class Recorder(lightning.LightningModule):
    def __init__(self, folder: Path, phase: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder, self.phase = folder, phase

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        with (self.folder / f"{self.phase}-{self.global_rank}").open("a") as file:
            file.write(json.dumps([self.trainer.current_epoch, batch_index, batch.tolist()]) + "\n")
        with (self.folder / f"drawn-{self.phase}-{self.global_rank}").open("a") as file:
            file.write(f"{self.global_rank} {torch.rand(()).item()}\n")
        loss: torch.Tensor = self.layer(batch[:, :1]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class SaveAndStop(lightning.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("phase")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--kind", default="mapped")
    parser.add_argument("--stop", type=int, default=-1)
    parser.add_argument("--max-steps", type=int, default=-1, help="end by this option of Lightning's, and save then")
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the global generators; each rank adds its number")
    options = parser.parse_args()
    torch.manual_seed(options.seed + int(os.environ.get("LOCAL_RANK", "0")))
    batch_size = GLOBAL_BATCH // options.ranks
    if options.kind == "mapped":
        loader = midepoch.wrap(DataLoader(Numbers(), batch_size=batch_size, shuffle=True), seed=3)
    elif options.kind == "smaller":  # another global batch: each rank has six samples whatever the number of ranks
        loader = midepoch.wrap(DataLoader(Numbers(), batch_size=6, shuffle=True), seed=3)
    else:
        loader = midepoch.wrap(DataLoader(Stream(), batch_size=batch_size), seed=3, shard=True)
    callbacks: list[Any] = [SaveAndStop(options.folder / f"{options.phase}.ckpt", options.stop)]
    if not options.bare:
        callbacks.append(ExactResume())
    trainer = lightning.Trainer(
        accelerator="cpu", devices=options.ranks, strategy="ddp" if options.ranks > 1 else "auto", max_epochs=2,
        logger=False, default_root_dir=options.folder, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=callbacks, max_steps=options.max_steps,
    )  # fmt: skip
    module = Recorder(options.folder, options.phase)
    trainer.fit(module, loader, ckpt_path=options.checkpoint, weights_only=False)
    if options.max_steps != -1:
        trainer.save_checkpoint(options.folder / f"{options.phase}.ckpt")


if __name__ == "__main__":
    main()
