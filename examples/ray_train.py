"""Ray Train: a run goes on from its checkpoint at the very batch, on as many workers as there are now.

``python examples/ray_train.py FOLDER``: kill it at any time, run it again, and it goes on at the very batch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train.torch
import torch
from torch.utils.data import DataLoader, Dataset

import midepoch


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


def train(settings: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    loader = midepoch.wrap(DataLoader(Noisy(), batch_size=4 // world_size, shuffle=True), seed=0)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            loader.load_state_dict(torch.load(Path(folder, "state.pt"), weights_only=True)["loader"])
    with Path(settings["folder"], f"batches-{rank}.txt").open("a", buffering=1) as log:
        while loader.epoch < 2:
            for batch in loader:
                step = loader.epoch * len(loader) + loader.batches_done
                print(f"batch {step} of rank {rank}: {batch.tolist()}", file=log)
                with tempfile.TemporaryDirectory() as folder:
                    torch.save({"loader": midepoch.gather(loader)}, Path(folder, "state.pt"))  # beside the model
                    saved = ray.train.Checkpoint.from_directory(folder) if rank == 0 and step % 3 == 0 else None
                    ray.train.report({}, checkpoint=saved)
                time.sleep(0.1)  # so that there is time to kill it


ray.init(num_cpus=2, include_dashboard=False)
trainer = ray.train.torch.TorchTrainer(
    train,
    train_loop_config={"folder": sys.argv[1]},
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(name="run", storage_path=str(Path(sys.argv[1], "ray").absolute())),
)
trainer.fit()  # which looks for checkpoints of a run of this name
