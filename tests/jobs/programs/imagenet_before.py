"""The shape of pytorch/examples imagenet: meters, DistributedDataParallel, a schedule for each epoch, checkpoints."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import time
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from synthetic import Pictures

parser = argparse.ArgumentParser()
parser.add_argument("-j", "--workers", default=0, type=int)
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("-b", "--batch-size", default=12, type=int, help="of all ranks together")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("-p", "--print-freq", default=2, type=int)
parser.add_argument("--resume", default="", help="a checkpoint to begin with")
parser.add_argument("-e", "--evaluate", action="store_true")
parser.add_argument("--seed", default=1, type=int)

best_acc1 = 0.0


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def main() -> None:
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    args.world_size, args.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    args.distributed = args.world_size > 1
    main_worker(args)


def main_worker(args: Any) -> None:
    global best_acc1
    device = torch.device("cpu")
    model: nn.Module = ConvNet().to(device)
    if args.distributed:
        dist.init_process_group("gloo")
        args.batch_size = int(args.batch_size / args.world_size)
        model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        args.start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    train_dataset, val_dataset = Pictures(96, train=True), Pictures(28, train=False)
    train_sampler: Any = DistributedSampler(train_dataset) if args.distributed else None
    val_sampler: Any = DistributedSampler(val_dataset, shuffle=False, drop_last=True) if args.distributed else None
    train_loader: Any = DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None),
        num_workers=args.workers, sampler=train_sampler,
    )  # fmt: skip
    val_loader = DataLoader(
        val_dataset, batch_size=args.batch_size, shuffle=False, num_workers=args.workers, sampler=val_sampler
    )
    if args.evaluate:
        validate(val_loader, model, criterion, args)
        return

    for epoch in range(args.start_epoch, args.epochs):
        if train_sampler is not None:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, criterion, args)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if args.rank == 0:
            save_checkpoint({
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }, is_best)  # fmt: skip


def train(train_loader: Any, model: Any, criterion: Any, optimizer: Any, epoch: Any, device: Any, args: Any) -> None:
    batch_time, data_time = AverageMeter("Time", ":6.3f"), AverageMeter("Data", ":6.3f")
    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    progress = ProgressMeter(len(train_loader), [batch_time, data_time, losses, top1], prefix=f"Epoch: [{epoch}]")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        data_time.update(time.time() - end)
        images, target = images.to(device), target.to(device)
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            progress.display(i + 1)


def validate(val_loader: Any, model: Any, criterion: Any, args: Any) -> Any:
    def run_validate(loader: Any, base_progress: int = 0) -> None:
        with torch.no_grad():
            for i, (images, target) in enumerate(loader):
                i = base_progress + i
                output = model(images)
                losses.update(criterion(output, target).item(), images.size(0))
                top1.update(accuracy(output, target), images.size(0))
                if i % args.print_freq == 0:
                    progress.display(i + 1)

    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    rest = range(len(val_loader.sampler) * args.world_size if args.distributed else len(val_loader.dataset),
                 len(val_loader.dataset))  # fmt: skip
    progress = ProgressMeter(len(val_loader) + bool(rest), [losses, top1], prefix="Test: ")
    model.eval()
    run_validate(val_loader)
    if args.distributed:
        losses.all_reduce()
        top1.all_reduce()
    if rest:
        others = DataLoader(Subset(val_loader.dataset, rest), batch_size=args.batch_size, num_workers=args.workers)
        run_validate(others, len(val_loader))
    print(f" * Acc@1 {top1.avg:.3f}")
    return top1.avg


def save_checkpoint(state: Any, is_best: Any, filename: str = "checkpoint.pth.tar") -> None:
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


class AverageMeter:
    def __init__(self, name: str, fmt: str) -> None:
        self.name, self.fmt = name, fmt
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self) -> None:
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total)
        self.sum, self.count = float(total[0]), int(total[1])
        self.avg = self.sum / self.count

    def __str__(self) -> str:
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


class ProgressMeter:
    def __init__(self, num_batches: int, meters: list[AverageMeter], prefix: str = "") -> None:
        self.num_batches, self.meters, self.prefix = num_batches, meters, prefix

    def display(self, batch: int) -> None:
        print("\t".join([f"{self.prefix}[{batch}/{self.num_batches}]", *map(str, self.meters)]))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    return 100.0 * float((output.argmax(1) == target).float().mean())


if __name__ == "__main__":
    main()
