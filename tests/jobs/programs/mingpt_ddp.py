"""The shape of pytorch/examples minGPT-ddp: one function for both kinds of passes, epochs counted from 1."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import midepoch
from synthetic import Characters


@dataclass
class TrainerConfig:
    max_epochs: int
    batch_size: int
    grad_norm_clip: float = 1.0
    snapshot_path: str = "gpt_snapshot.pt"
    save_every: int = 1
    data_loader_workers: int = 0


class GPT(nn.Module):
    """Returns the loss along with what it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 16)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.drop(self.embedding(idx).cumsum(1)))
        return logits, F.cross_entropy(logits.view(-1, 16), targets.reshape(-1))


class Trainer:
    def __init__(self, trainer_config: Any, model: Any, optimizer: Any, train_dataset: Any, test_dataset: Any) -> None:
        self.config = trainer_config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.test_loader = self._prepare_dataloader(test_dataset)
        self.epochs_run = 0
        self.model = model
        self.optimizer = optimizer
        self._load_snapshot()
        self.model = DDP(self.model)
        self.snapshot = midepoch.Snapshot("run.pt", every=3, model=model, optim=optimizer, data=self.train_loader)

    def _prepare_dataloader(self, dataset: Any) -> Any:
        config, sampler = self.config, DistributedSampler[Any](dataset)
        workers = config.data_loader_workers
        return midepoch.wrap(DataLoader(dataset, config.batch_size, num_workers=workers, sampler=sampler), seed=0)

    def _load_snapshot(self) -> None:
        try:
            snapshot = torch.load(self.config.snapshot_path, map_location="cpu")
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch")
            return
        self.model.load_state_dict(snapshot["model_state"])
        self.optimizer.load_state_dict(snapshot["optimizer_state"])
        self.epochs_run = snapshot["finished_epoch"]
        print(f"Resuming training from snapshot at Epoch {self.epochs_run}")

    def _run_batch(self, source: Any, targets: Any, train: bool = True) -> float:
        with torch.set_grad_enabled(train):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
            self.snapshot.step()
        return float(loss.item())

    def _run_epoch(self, epoch: Any, dataloader: Any, train: bool = True) -> None:
        self.model.train(train)
        dataloader.sampler.set_epoch(epoch)
        for step, (source, targets) in enumerate(dataloader, dataloader.batches_done):
            step_type = "Train" if train else "Eval"
            batch_loss = self._run_batch(source, targets, train)
            if step % 2 == 0:
                print(f"[RANK{self.global_rank}] Epoch {epoch} | Iter {step} | {step_type} Loss {batch_loss:.5f}")

    def _save_snapshot(self, epoch: Any) -> None:
        snapshot = {
            "model_state": self.model.module.state_dict(),
            "optimizer_state": self.optimizer.state_dict(),
            "finished_epoch": epoch,
        }
        torch.save(snapshot, self.config.snapshot_path)

    def train(self) -> None:
        for epoch in self.snapshot.epochs(self.config.max_epochs):
            epoch += 1
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)
            self._run_epoch(epoch, self.test_loader, train=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=6, help="of each rank")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    init_process_group(backend="gloo")
    torch.manual_seed(1)
    config = TrainerConfig(args.max_epochs, args.batch_size, data_loader_workers=args.workers)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = Trainer(config, model, optimizer, Characters(96), Characters(24))
    trainer.train()
    destroy_process_group()


if __name__ == "__main__":
    main()
