"""One rank of a job under NVIDIA's in-process restart: a count for each sample, so that weights say what they saw.

``python inprocess_job.py FOLDER RANKS ARGUMENTS`` with a JSON object, see `Job`, starts all ranks and a store for them,
and prints their statuses.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.store import TCPStore
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader

import midepoch
from midepoch.trainers.inprocess import feed
from support import jobs

SIZE, EPOCHS, BATCH = 90, 2, 2


@dataclass
class Job:
    """What a process is told.

    Attributes:
        folder: where results go, and the checkpoint.
        workers: of the DataLoader.
        persistent: these outlive a pass.
        outside: the loader is made once, not at each start.
        faults: by start of the function and rank at the beginning: the step at which that rank dies or fails, and how.
        forgets: the loader is not led back.
        snapshot: a Snapshot saves and loads.
    """

    folder: str
    workers: int = 0
    persistent: bool = False
    outside: bool = False
    faults: tuple[tuple[int, int, int, str], ...] = ()
    forgets: bool = False
    snapshot: bool = False


class Model(torch.nn.Module):
    counts: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(SIZE))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))


class Store(TCPStore):
    """A store that no rank has, so that each of them may die."""

    TCP_STORE_HOST_RANK = -1


def make(job: Job) -> midepoch.Loader:
    workers: dict[str, Any] = {"num_workers": job.workers, "persistent_workers": job.persistent}
    source = DataLoader(jobs.Noisy(SIZE, 0.005), batch_size=BATCH, shuffle=True, **workers)
    return midepoch.wrap(source, seed=3, global_batch=12)


def train(job: Job, kept: dict[str, Any], call: inprocess.CallWrapper) -> None:
    rank, ranks, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(job.folder)
    faults = {
        step: kind for start, who, step, kind in job.faults if start == call.iteration and who == kept["initial rank"]
    }
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    torch.distributed.init_process_group(
        "gloo", store=PrefixStore(f"training {call.iteration}", store), rank=rank, world_size=ranks,
        timeout=timedelta(seconds=20),
    )  # fmt: skip
    loader = kept.setdefault("loader", make(job)) if job.outside else make(job)
    feed(call, loader)
    model, saved, snapshot = Model(), folder / "saved.pt", None
    if job.snapshot:
        loader.seek(epoch=0)  # unless the snapshot says more
        snapshot = midepoch.Snapshot(folder / "snapshot.pt", every=3, model=model, data=loader)
    elif saved.exists():
        states = torch.load(saved)
        model.load_state_dict(states["model"])
        if not job.forgets:
            loader.load_state_dict(states["loader"])
    elif call.iteration and not job.forgets:
        loader.seek(epoch=0)
    log = folder / f"log-{kept['initial rank']}-{call.iteration}-{os.getpid()}"
    gradient = torch.zeros(SIZE)
    for epoch in (snapshot or loader).epochs(EPOCHS):
        for batch in loader:
            ids = batch[:, 0].long()
            gradient[ids] += loader.weight / len(ids)
            jobs.note(log, [epoch, int(model.steps), rank, loader.weight, batch.tolist()])
            if loader.step_due:
                kind = faults.get(int(model.steps))
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "raise":
                    raise RuntimeError("a fault")
                torch.distributed.all_reduce(gradient)
                model.counts += torch.round(gradient / gradient[gradient > 0].min())
                model.steps += 1
                gradient.zero_()
                if rank == 0 and snapshot is None and model.steps % 3 == 0:
                    draft = saved.with_suffix(f".{os.getpid()}")
                    torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, draft)
                    if kind == "kill in a save":
                        os.kill(os.getpid(), signal.SIGKILL)
                    draft.replace(saved)
            if snapshot is not None:
                snapshot.step()
    torch.distributed.barrier()
    torch.save(model.counts, folder / f"counts-{kept['initial rank']}.pt")


def train_rank() -> None:
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    job = Job(sys.argv[1], **json.loads(sys.argv[3]))
    second, kept = timedelta(seconds=1), {"initial rank": int(os.environ["RANK"])}
    wrapper = inprocess.Wrapper(
        store_factory=Store, store_kwargs={"timeout": 60 * second, "wait_for_workers": False},
        initialize=inprocess.initialize.RetryController(max_iterations=len(job.faults) + 2),
        monitor_thread_interval=0.1 * second, monitor_process_interval=0.1 * second, heartbeat_interval=0.2 * second,
        heartbeat_timeout=10 * second, soft_timeout=30 * second, hard_timeout=40 * second, barrier_timeout=60 * second,
        last_call_wait=0.2 * second, progress_watchdog_interval=0.2 * second,
    )  # fmt: skip

    def function(call: inprocess.CallWrapper = None) -> None:  # the Wrapper understands no other annotation
        train(job, kept, call)

    wrapper(function)()
    torch.distributed.destroy_process_group()


def launch(ranks: int) -> list[int]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        environment = jobs.environment(**own)
        with Path(sys.argv[1], f"said-{rank}").open("w") as said:
            processes.append(subprocess.Popen([sys.executable, *sys.argv], env=environment, stdout=said, stderr=said))
    try:
        return [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_rank()
    else:
        print(json.dumps(launch(int(sys.argv[2]))))
