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
    rank, world_size = (context := ray.train.get_context()).get_world_rank(), context.get_world_size()
    loader = midepoch.wrap(DataLoader(Noisy(), batch_size=4 // world_size, shuffle=True), seed=0)
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as saved:
            for part, state in zip((model, optimizer, loader), torch.load(f"{saved}/state.pt"), strict=True):
                part.load_state_dict(state)
    for epoch in loader.epochs(2):
        for step, batch in enumerate(loader, epoch * len(loader) + loader.batches_done + 1):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with Path(settings["at"], f"batches-{rank}.txt").open("a") as log:
                print(f"batch {step} of rank {rank}: {batch.tolist()}, loss {loss.item()}", file=log)
            if step % 3 == 0 or step == 2 * len(loader):
                states = model.state_dict(), optimizer.state_dict(), midepoch.gather(loader)  # on every worker
                with tempfile.TemporaryDirectory() as draft:
                    torch.save(states, f"{draft}/state.pt")
                    ray.train.report({}, ray.train.Checkpoint.from_directory(draft) if rank == 0 else None)
            time.sleep(0.1)  # so that there is time to kill it


(folder := Path(sys.argv[1]).absolute()).mkdir(parents=True, exist_ok=True)  # workers have another directory
ray.init(num_cpus=2, include_dashboard=False)
scaling = ray.train.ScalingConfig(num_workers=2)
where = ray.train.RunConfig(name="run", storage_path=str(folder / "ray"))  # whose checkpoints the next run looks for
ray.train.torch.TorchTrainer(train, train_loop_config={"at": folder}, scaling_config=scaling, run_config=where).fit()
