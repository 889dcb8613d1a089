"""The shape of timm's train.py: batches prepared ahead, accumulated gradients, schedules of both kinds."""

from __future__ import annotations

import argparse
import copy
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import midepoch
from synthetic import AverageMeter, Pictures

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("-b", "--batch-size", type=int, default=3, help="of each rank")
parser.add_argument("--grad-accum-steps", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--mixup", type=float, default=0.4)
parser.add_argument("--mixup-off-epoch", type=int, default=2)
parser.add_argument("-j", "--workers", type=int, default=0)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=4)


class Mixup:
    """Mixes a batch with its reverse, by a share drawn with numpy."""

    def __init__(self, mixup_alpha: float, num_classes: int) -> None:
        self.mixup_alpha, self.num_classes = mixup_alpha, num_classes

    def __call__(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lam = float(np.random.beta(self.mixup_alpha, self.mixup_alpha)) if self.mixup_alpha else 1.0
        soft = F.one_hot(target, self.num_classes).float()
        return x * lam + x.flip(0) * (1 - lam), soft * lam + soft.flip(0) * (1 - lam)


class Prepare:
    """Work on a whole batch: normalised, erased here and there, mixed."""

    def __init__(self, mixup_fn: Mixup | None) -> None:
        self.mixup_fn = mixup_fn

    def __call__(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = batch[0].sub(0.1).div(0.9), batch[1]
        if self.mixup_fn is None:
            return x, target
        if self.mixup_fn.mixup_alpha and torch.rand(()) < 0.25:
            x[:, :, int(torch.randint(8, ()))] = 0
        return self.mixup_fn(x, target)


class PrefetchLoader:
    """Gives batches that are prepared one ahead."""

    def __init__(self, loader: DataLoader[Any], prepare: Callable[[Any], Any]) -> None:
        self.loader, self.prepare, self.sampler = loader, prepare, loader.sampler

    def __iter__(self) -> Iterator[Any]:
        ready: list[Any] = []
        for batch in self.loader:
            ready.append(self.prepare(batch))
            if len(ready) == 2:
                yield ready.pop(0)
        yield from ready


def create_loader(dataset: Any, args: Any, is_training: Any, prepare: Any) -> Any:
    sampler: Any = DistributedSampler(dataset, shuffle=is_training) if args.distributed else None
    loader = DataLoader(
        dataset, batch_size=args.batch_size, shuffle=sampler is None and is_training, num_workers=args.workers,
        sampler=sampler, drop_last=is_training, persistent_workers=args.workers > 0,
    )  # fmt: skip
    return midepoch.wrap(loader, seed=args.seed, then=prepare)


class CosineLRScheduler:
    """Falls with each update; `step` tells it of epochs, and halves it where the loss does not fall any more."""

    def __init__(self, optimizer: torch.optim.Optimizer, lr: float, updates: int) -> None:
        self.optimizer, self.lr, self.updates = optimizer, lr, updates
        self.factor, self.best = 1.0, math.inf

    def step(self, epoch: int, metric: float) -> None:
        self.factor *= 1.0 if metric < self.best else 0.5
        self.best = min(self.best, metric)

    def step_update(self, num_updates: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.factor * self.lr * (1 + math.cos(math.pi * num_updates / self.updates)) / 2

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class ModelEma(nn.Module):
    """A slower copy of the model."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 1 - self.decay)


def main() -> None:
    args = parser.parse_args()
    args.world_size, args.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    args.distributed = args.world_size > 1
    torch.manual_seed(args.seed + args.rank)
    np.random.seed(args.seed + args.rank)
    if args.distributed:
        dist.init_process_group("gloo")
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    model = nn.parallel.DistributedDataParallel(net) if args.distributed else net
    ema = ModelEma(net)

    mixup_fn = Mixup(args.mixup, num_classes=10)
    loader = create_loader(Pictures(96, train=True), args, True, Prepare(mixup_fn))
    loader_eval = create_loader(Pictures(24, train=False), args, False, Prepare(None))
    updates_per_epoch = (len(loader) + args.grad_accum_steps - 1) // args.grad_accum_steps
    scheduler = CosineLRScheduler(optimizer, args.lr, args.epochs * updates_per_epoch)
    args.snapshot = midepoch.Snapshot("run.pt", every=3, model=net, opt=optimizer, lr=scheduler, ema=ema, data=loader)
    for epoch in args.snapshot.epochs(args.epochs):
        if args.distributed:
            loader.sampler.set_epoch(epoch)
        train_loss = train_one_epoch(epoch, model, loader, optimizer, args, scheduler, ema, mixup_fn)
        eval_loss = validate(ema.module, loader_eval, args)
        scheduler.step(epoch + 1, eval_loss)
        if args.rank == 0:
            torch.save({"epoch": epoch, "state_dict": net.state_dict()}, "last.pth.tar")
            print(f"epoch {epoch}: train {train_loss:.5f}, eval {eval_loss:.5f}")


def train_one_epoch(
    epoch: int, model: Any, loader: Any, optimizer: Any, args: Any, scheduler: Any, ema: Any, mixup_fn: Any
) -> float:
    if epoch >= args.mixup_off_epoch:
        mixup_fn.mixup_alpha = 0.0
    losses_m = AverageMeter()
    model.train()
    accum_steps = args.grad_accum_steps
    updates_per_epoch = (len(loader) + accum_steps - 1) // accum_steps
    last_batch_idx = len(loader) - 1
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader, loader.batches_done):
        need_update = batch_idx == last_batch_idx or (batch_idx + 1) % accum_steps == 0
        update_idx = batch_idx // accum_steps
        loss = F.cross_entropy(model(input), target) / accum_steps
        loss.backward()
        losses_m.update(loss.item() * accum_steps, input.size(0))
        if not need_update:
            continue
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
        if update_idx % args.log_interval == 0:
            print(f"Train: {epoch} [{update_idx}/{updates_per_epoch}] Loss: {losses_m.avg:.5f}")
        scheduler.step_update(num_updates=epoch * updates_per_epoch + update_idx + 1)
        args.snapshot.step()
    return losses_m.avg


@torch.no_grad()
def validate(model: Any, loader: Any, args: Any) -> float:
    losses_m = AverageMeter()
    model.eval()
    for input, target in loader:
        losses_m.update(F.cross_entropy(model(input), target).item(), input.size(0))
    if args.distributed:
        losses_m.all_reduce()
    return losses_m.avg


if __name__ == "__main__":
    main()
