"""A typical training script: DDP, a snapshot every few batches, and a loader that midepoch resumes.

    torchrun --nproc-per-node=2 -m demo.train --images=... --snapshot=... --records=...

Run it again after a crash, on any number of processes, and it continues. midepoch's part is one line to wrap the loader
(in backends.py), one to save its state and one to load it. In addition, each rank logs every batch that it trains on,
with a digest of each sample, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .backends import BACKENDS, paths_of
from .images import SIDE, label_of

__all__ = ["main"]


def train(options: argparse.Namespace) -> None:
    """Train on this rank until `options.epochs` are done, from the snapshot if there is one."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # After the first batch of each start, DDP rearranges its buckets, unless it has to look for unused parameters. With
    # three or more ranks, gradients would then be summed in another order than without the restart.
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    step = 0
    snapshot = torch.load(options.snapshot, weights_only=True) if options.snapshot.exists() else None

    asked = time.perf_counter()
    backend = BACKENDS[options.backend]
    loader = backend.load(options.images, options.global_batch // world_size, options.seed, options.num_workers)
    labels_of_all = torch.tensor([label_of(path) for path in paths_of(options.images)])
    if snapshot is not None:
        step = snapshot["step"]
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        if options.loader_state:
            loader.load_state_dict(snapshot["loader"])

    log = Log(options.records / f"rank-{rank}.jsonl")
    log.write(event="start", step=step, epoch=loader.epoch, position=loader.position, pid=os.getpid())
    for epoch in range(loader.epoch, options.epochs):
        for batch in loader:
            images, labels, indices = backend.unpack(batch, labels_of_all)
            waited = time.perf_counter() - asked
            loss = nn.functional.cross_entropy(model(images), labels)
            # This comes before backward(), where the ranks wait for each other. So every rank has logged a batch before
            # it is in a snapshot, whenever a rank is killed.
            log.write(
                event="batch",
                step=step,
                epoch=epoch,
                indices=indices.tolist(),
                digests=digests(images, labels),
                loss=loss.item(),
                waited=waited,
                time=time.time(),
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if rank == 0 and step % options.every == 0:
                save(
                    options.snapshot,
                    step=step,
                    model=model.module.state_dict(),
                    optimizer=optimizer.state_dict(),
                    loader=loader.state_dict(),
                )
            asked = time.perf_counter()
    weights = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        weights.update(parameter.detach().numpy().tobytes())
    log.write(event="end", step=step, weights=weights.hexdigest())
    loader.close()


def make_model() -> nn.Module:
    """A model from [batch, 1, SIDE, SIDE] to [batch, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (SIDE // 4) ** 2, 10),
    )


def digests(images: Tensor, labels: Tensor) -> list[str]:
    """For each sample, 16 hexadecimal digits: a hash of its exact pixels and its label."""
    return [
        hashlib.blake2b(image.tobytes() + bytes([label]), digest_size=8).hexdigest()
        for image, label in zip(images.numpy(), labels.tolist(), strict=True)
    ]


def save(path: Path, **snapshot: Any) -> None:
    """Replace the snapshot atomically. If the process is killed meanwhile, the old one remains."""
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Log:
    """Writes a JSON line for each event, directly to the kernel, so that it survives a SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)

    def write(self, **event: Any) -> None:
        """Append one line."""
        os.write(self._file, (json.dumps(event) + "\n").encode())


def main() -> None:
    """Read the options, and train."""
    parser = argparse.ArgumentParser(prog="demo.train", description="one rank of a training job")
    parser.add_argument("--images", type=Path, required=True, help="folder of JPEG files")
    parser.add_argument("--snapshot", type=Path, required=True, help="file to write, and to resume from if it exists")
    parser.add_argument("--records", type=Path, required=True, help="folder for one file of each rank")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="torch")
    parser.add_argument("--global-batch", type=int, default=24, help="samples of all ranks together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=4, help="batches between snapshots")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument(
        "--no-loader-state",
        dest="loader_state",
        action="store_false",
        help="resume without the loader's state",
    )
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    # In a function of its own, so that the model is freed before the process group. If the model held the last
    # reference to the group, it would wait for gloo's threads while holding the GIL, which these threads may need.
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
