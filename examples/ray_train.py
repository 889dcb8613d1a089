"""Ray Train: a run that stops in the middle of an epoch on two workers goes on at the very batch on one.

``python examples/ray_train.py FOLDER``
"""

from __future__ import annotations

import json
import sys
import tempfile
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
    batch_size = 4 // context.get_world_size()
    loader = midepoch.wrap(DataLoader(Noisy(), batch_size, shuffle=True), seed=0)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            loader.load_state_dict(torch.load(Path(folder) / "state.pt", weights_only=True)["loader"])
    for batch in loader:
        with Path(settings["log"], f"{loader.epoch}-{context.get_world_rank()}").open("a") as log:
            print(json.dumps(batch.tolist()), file=log)
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"loader": midepoch.gather(loader)}, Path(folder) / "state.pt")  # beside the model
            first = context.get_world_rank() == 0
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder) if first else None)
        if loader.batches_done == settings["stop"]:
            break


def fit(workers: int, stop: int) -> None:
    settings = {"log": sys.argv[1], "stop": stop}
    scaling = ray.train.ScalingConfig(num_workers=workers)
    where = ray.train.RunConfig(name="run", storage_path=f"{sys.argv[1]}/ray")
    ray.train.torch.TorchTrainer(train, train_loop_config=settings, scaling_config=scaling, run_config=where).fit()


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
fit(workers=2, stop=3)
fit(workers=1, stop=10)
lines = [line for path in Path(sys.argv[1]).glob("*-*") if path.is_file() for line in path.read_text().splitlines()]
samples = {str(sample) for line in lines for sample in json.loads(line)}
assert len(samples) == 40, len(samples)
print("each of 40 samples exactly once, on two workers and then on one")
