"""One rank of a replica group that trains under torchft: a count for each sample, so that weights say what they saw.

``python torchft_job.py ARGUMENTS`` with a JSON object: see `Job`. It may be told to kill itself at a named point. What
it trains on comes from `feed` or, to be compared with, from torchft's own sampler.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, TensorDataset
from torchft import Manager, ProcessGroupGloo
from torchft.optim import OptimizerWrapper

import midepoch
from midepoch.trainers.torchft import Feed, feed
from support import jobs


@dataclass
class Job:
    """What a process is told.

    Attributes:
        group, rank, ranks: the replica group, and this process in it.
        store: the path of a file in which its first rank says on which port the group's store is.
        lighthouse: its address.
        folder: where results go.
        asynchronous: the quorum.
        workers: of the DataLoader.
        size, batch, together: the data, the batch of a rank, and ``global_batch=``.
        die: a point, and how often it is passed before this process dies there; None for never.
        sampler: None, or the number of groups for torchft's own DistributedSampler in place of `feed`.
    """

    group: int
    rank: int
    ranks: int
    store: str
    lighthouse: str
    folder: str
    asynchronous: bool = True
    workers: int = 0
    size: int = 600
    batch: int = 4
    together: int | None = None
    die: tuple[str, int] | None = None
    sampler: int | None = None


class Counts(torch.optim.Optimizer):
    """Adds one to the count of each sample that the mean gradient speaks of, and checks its weight."""

    def __init__(self, counts: torch.nn.Parameter, wrong: torch.Tensor, before: Callable[[], None]) -> None:
        super().__init__([counts], {})
        self._counts, self._wrong, self._before = counts, wrong, before

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._before()
        gradient = self._counts.grad
        assert gradient is not None
        seen = gradient > 0
        if not seen.any():
            self._wrong += 1
            return
        # The mean over N samples: 1 / N for each.
        share = 1 / int(seen.sum())
        self._wrong += int((gradient[seen] - share).abs().max() > 1e-4)
        self._counts.add_(torch.round(gradient / gradient[seen].min()))


class Death:
    def __init__(self, die: tuple[str, int] | None) -> None:
        self.point, self.left = die if die is not None else ("", 0)

    def __call__(self, point: str, delay: float = 0.0) -> None:
        if point != self.point:
            return
        self.left -= 1
        if self.left:
            return
        (Path(job.folder) / f"died-{os.getpid()}").write_text(point)
        if delay:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def group_store(job: Job) -> TCPStore:
    """The group's store. It is in the first rank, on a port that the system gives it."""
    told, options = Path(job.store), dict[str, Any](wait_for_workers=False, timeout=timedelta(seconds=20))
    if not job.rank:
        store = TCPStore("127.0.0.1", 0, is_master=True, **options)
        jobs.note(told, store.port)
        return store
    until = time.monotonic() + 20
    while not jobs.noted(told) and time.monotonic() < until:
        time.sleep(0.005)
    (port,) = jobs.noted(told)
    return TCPStore("127.0.0.1", port, is_master=False, **options)


def train(job: Job) -> None:
    folder, death = Path(job.folder), Death(job.die)
    store = group_store(job)
    if job.ranks > 1:
        torch.distributed.init_process_group(
            "gloo", store=PrefixStore("group", store), rank=job.rank, world_size=job.ranks,
            timeout=timedelta(seconds=20),
        )  # fmt: skip
    counts = torch.nn.Parameter(torch.zeros(job.size))
    wrong = torch.zeros(1)

    def state() -> dict[str, Any]:
        death("sending")
        return {"counts": counts.detach().clone(), "wrong": wrong.clone()}

    def load(given: dict[str, Any]) -> None:
        death("healing")
        with torch.no_grad():
            counts.copy_(given["counts"])
        wrong.copy_(given["wrong"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=2)), load_state_dict=load, state_dict=state,
        min_replica_size=1, use_async_quorum=job.asynchronous, timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=30), rank=job.rank, world_size=job.ranks, store_addr="127.0.0.1",
        store_port=store.port, lighthouse_addr=job.lighthouse, replica_id=f"group_{job.group}", hostname="127.0.0.1",
        quorum_retries=20,
    )  # fmt: skip
    optimizer = OptimizerWrapper(manager, Counts(counts, wrong, lambda: death("voted")))
    log = folder / f"log-{job.group}-{job.rank}-{os.getpid()}"
    for gradient, where in (_fed if job.sampler is None else _sampled)(job, manager, optimizer, death):
        time.sleep(0.02)
        if job.ranks > 1:
            torch.distributed.all_reduce(gradient)
            gradient /= job.ranks
        counts.grad = gradient
        work = manager.allreduce(counts.grad)
        death("allreduce", 0.001)
        work.wait()
        step = manager.current_step()
        optimizer.step()
        done = manager.current_step() > step
        place = where()
        who = manager.participating_rank(), manager.num_participants()
        jobs.note(log, [manager.current_step(), done, who, [place["epoch"], place["position"]], time.time()])
    torch.save({"counts": counts.detach(), "wrong": wrong}, folder / f"counts-{job.group}-{job.rank}.pt")


Steps = Iterator[tuple[torch.Tensor, Callable[[], Any]]]
"""The gradient of each step, and a function that says behind it where the data stand."""


def _fed(job: Job, manager: Manager, optimizer: Any, death: Death) -> Steps:
    data: Any = DataLoader(
        TensorDataset(torch.arange(job.size)), batch_size=job.batch, shuffle=True, num_workers=job.workers
    )
    world = midepoch.World(job.rank, job.ranks)
    tail: Any = None if job.together else "uneven"
    batches = feed(manager, midepoch.wrap(data, seed=7, world=world, tail=tail, global_batch=job.together))
    _watch(batches, death)
    while not batches.epoch:
        gradient = None
        for (ids,) in batches:
            if gradient is None:
                optimizer.zero_grad()
                gradient = torch.zeros(job.size)
            gradient[ids] += batches.weight / len(ids)  # of the mean over the batch
            if batches.step_due:
                yield gradient, batches.state_dict
                gradient = None


def _sampled(job: Job, manager: Manager, optimizer: Any, death: Death) -> Steps:
    """The steps of torchft's own sampler in a StatefulDataLoader, whose state is saved behind each, as torchft says."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchft import DistributedSampler

    data, kept = TensorDataset(torch.arange(job.size)), Path(job.folder) / f"loader-{job.group}.pt"
    sampler: Any = DistributedSampler(
        data, replica_rank=job.group, num_replica_groups=job.sampler or 0, group_rank=job.rank,
        num_replicas=job.ranks, shuffle=True, seed=7,
    )  # fmt: skip
    loader: Any = StatefulDataLoader(data, batch_size=job.batch, sampler=sampler, num_workers=job.workers)
    if kept.exists():
        loader.load_state_dict(torch.load(kept, weights_only=False))
    point = "first quorum"
    for number, (ids,) in enumerate(loader):
        death(point, 0.003)
        point = "quorum"
        optimizer.zero_grad()  # begins the quorum
        manager.wait_quorum()
        death("chosen")
        gradient = torch.zeros(job.size)
        gradient[ids] += 1
        yield gradient, functools.partial(dict, epoch=0, position=number)
        if job.rank == 0:  # the loaders of a group count alike
            torch.save(loader.state_dict(), draft := kept.with_suffix(f".{os.getpid()}"))
            draft.replace(kept)


def _watch(batches: Feed, death: Death) -> None:
    """Die within a quorum, or when it is known and no batch was chosen."""
    quorum, take, points = batches._start_quorum, batches._take, iter(["first quorum"])

    def start_quorum() -> None:
        death(next(points, "quorum"), 0.003)
        quorum()

    def chosen() -> Any:
        death("chosen")
        return take()

    batches._start_quorum, batches._take = start_quorum, chosen  # type: ignore[method-assign]


if __name__ == "__main__":
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    job = Job(**json.loads(sys.argv[1]))
    # torchft says more than a pipe holds that nobody reads.
    said = os.open(Path(job.folder) / f"said-{job.group}-{job.rank}-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    train(job)
    sys.stdout.flush()
    time.sleep(0.5)  # others may still ask for what this group's servers know
    os._exit(0)
