"""A job for torchrun with a Snapshot: each process writes down every batch before it is trained on.

``torchrun ... torchrun_job.py FOLDER [--epochs 2] [--every 4] [--pause 0.02] [--own] [--timeout 5]
[--backend cuda:gloo]``
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import midepoch
from support import jobs, sources

SIZE, GLOBAL_BATCH = 240, 12


def source(batch_size: int, own: bool = False) -> Any:
    """A DataLoader, or a loader with a state of its own, of which each rank knows only its part."""
    data = sources.Noisy(SIZE)
    if not own:
        return DataLoader(data, batch_size=batch_size, shuffle=True)
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler: Any = DistributedSampler(data, seed=3) if torch.distributed.is_initialized() else None
    return StatefulDataLoader(data, batch_size=batch_size, sampler=sampler)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that a collective may take")
    options = parser.parse_args()

    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        torch.distributed.init_process_group(options.backend, timeout=timedelta(seconds=options.timeout))
    # In a function of its own, so that the model is gone before the group.
    train(options, distributed)
    if distributed:
        torch.distributed.destroy_process_group()
        # Gloo's threads may still hold tensors of the last step, and abort a process that ends while they let go.
        os._exit(0)


def train(options: argparse.Namespace, distributed: bool) -> None:
    world = midepoch.World.current()
    torch.set_num_threads(1)
    sources.under_other_seeds(world.rank)
    loader = midepoch.wrap(source(GLOBAL_BATCH // world.world_size, options.own), seed=5)
    model: torch.nn.Module = torch.nn.Linear(3, 1, dtype=torch.float64)
    torch.nn.init.ones_(model.weight)  # type: ignore[arg-type]
    # With buckets as they are after the first batch, ranks add up gradients in the same order after a restart.
    # A group without a backend for the CPU can share no gradients here.
    shared = distributed and options.backend == "gloo"
    trained = DistributedDataParallel(model, find_unused_parameters=True) if shared else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    snapshot = midepoch.Snapshot(
        options.folder / "snapshot.pt", every=options.every, ledger=not options.own, model=trained,
        optimizer=optimizer, data=loader,
    )  # fmt: skip
    log = options.folder / f"log-{time.time_ns()}-{os.getpid()}"
    who = {"rank": world.rank, "world_size": world.world_size}
    jobs.note(log, {**who, "pid": os.getpid(), "resumed": snapshot.load(), "steps": snapshot.steps})
    try:
        while loader.epoch < options.epochs:
            for batch in loader:
                time.sleep(options.pause + longer(options.folder / "pause"))
                own = [random.random(), float(np.random.rand()), float(torch.rand(()))]
                jobs.note(log, {**who, "step": snapshot.steps + 1, "batch": batch.tolist(), "own": own})
                loss = (trained(batch[:, 1:]) - batch[:, :1] / SIZE).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                snapshot.step()
    except SystemExit:
        jobs.note(log, {**who, "left": snapshot.steps})
        raise
    jobs.note(log, {**who, "finished": snapshot.steps})


def longer(path: Path) -> float:
    """How many seconds more each batch takes for as long as there is such a file."""
    with contextlib.suppress(FileNotFoundError):
        return float(path.read_text() or 0)
    return 0


if __name__ == "__main__":
    main()
