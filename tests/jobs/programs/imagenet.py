"""The shape of pytorch/examples imagenet: one process or several, a schedule for each epoch, checkpoints of its own."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

import midepoch
from synthetic import AverageMeter, Pictures

parser = argparse.ArgumentParser()
parser.add_argument("-j", "--workers", default=0, type=int)
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("-b", "--batch-size", default=12, type=int, help="of all ranks together")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("-p", "--print-freq", default=2, type=int)
parser.add_argument("--seed", default=1, type=int)

best_acc1 = 0.0


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def main() -> None:
    global best_acc1
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.world_size, args.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    args.distributed = args.world_size > 1
    model: nn.Module = ConvNet()
    if args.distributed:
        dist.init_process_group("gloo")
        args.batch_size = int(args.batch_size / args.world_size)
        model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)

    train_dataset, val_dataset = Pictures(96, train=True), Pictures(24, train=False)
    train_sampler: Any = DistributedSampler(train_dataset) if args.distributed else None
    val_sampler: Any = DistributedSampler(val_dataset, shuffle=False, drop_last=True) if args.distributed else None
    train_loader: Any = DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None),
        num_workers=args.workers, sampler=train_sampler,
    )  # fmt: skip
    train_loader = midepoch.wrap(train_loader, seed=args.seed)
    val_loader = DataLoader(
        val_dataset, batch_size=args.batch_size, shuffle=False, num_workers=args.workers, sampler=val_sampler
    )

    args.snapshot = midepoch.Snapshot("run.pt", every=3, model=model, optim=optimizer, lr=scheduler, data=train_loader)
    for epoch in args.snapshot.epochs(args.epochs):
        if train_sampler is not None:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion, args)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if args.rank == 0:
            state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best_acc1}
            save_checkpoint({**state, "optimizer": optimizer.state_dict()}, is_best)


def train(train_loader: Any, model: Any, criterion: Any, optimizer: Any, epoch: Any, args: Any) -> None:
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    for i, (images, target) in enumerate(train_loader, train_loader.batches_done):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        args.snapshot.step()
        if i % args.print_freq == 0:
            print(f"Epoch: [{epoch}][{i + 1}/{len(train_loader)}] Loss {losses.avg:.4e} Acc@1 {top1.avg:6.2f}")


def validate(val_loader: Any, model: Any, criterion: Any, args: Any) -> float:
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target), images.size(0))
    if args.distributed:
        losses.all_reduce()
        top1.all_reduce()
    print(f" * Acc@1 {top1.avg:.3f} Loss {losses.avg:.4e}")
    return top1.avg


def save_checkpoint(state: Any, is_best: Any, filename: str = "checkpoint.pth.tar") -> None:
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    return 100.0 * float((output.argmax(1) == target).float().mean())


if __name__ == "__main__":
    main()
