"""What failures cost a job that starts again, one whose ranks leave and join, and one under torchft's own sampler.

Run ``python benchmarks/live.py``. Prints a Markdown table. Three groups of one process train on an epoch, on
CPUs, with gloo. Each failure kills one of them, at moments that a seed draws, the same for all three ways:

* **restarts**: all processes end when one dies, and start again from the last checkpoint, as under torchrun;
* **live**: torchft and `midepoch.trainers.torchft.feed`;
* **torchft's sampler**: torchft, its DistributedSampler, and torchdata's StatefulDataLoader whose state is saved after
  each step, as torchft's documentation has it.

Failures come as they came to Llama 3 405B: 419 unexpected interruptions in 54 days ("The Llama 3 Herd of Models", 2024,
section 3.3.4). Time is compressed: what is real is the time of a step and of torchft's quorums; the times of a start
and between checkpoints are those of a large job, compressed alike. The model is a count for each sample.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DataLoader, TensorDataset

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "trainers")]  # for forking: starts that take no time of a core

import torchft_kills

import midepoch
from support import forking

WAYS = ("restarts", "live", "torchft's sampler")
BETWEEN = 54 * 24 * 3600 / 419  # seconds between failures
START = 600.0  # seconds until a process that has died takes a step again: to be found, scheduled, compiled, loaded
SAVE = 600.0  # seconds between checkpoints, where steps are not kept by others
GROUPS, BATCH = 3, 4

_kept: list[Any] = []


@dataclass
class Job:
    """What a process is told. `pause`: seconds of a step. `save`: seconds between checkpoints."""

    way: str
    group: int
    folder: str
    address: str
    size: int
    pause: float
    save: float


# --- a process --------------------------------------------------------------------------------------------------------


def train(job: Job) -> None:
    folder = Path(job.folder)
    counts = torch.zeros(job.size)
    steps = {"restarts": restarts, "live": live, "torchft's sampler": sampler}[job.way](job, folder, counts)
    with (folder / f"log-{job.group}-{os.getpid()}").open("w", buffering=1) as log:
        for done in steps:
            print(time.time(), int(done), file=log)
    torch.save(counts, folder / f"counts-{job.group}.pt")
    time.sleep(0.5)  # others may still ask for what this group's servers know
    os._exit(0)


def restarts(job: Job, folder: Path, counts: torch.Tensor) -> Iterator[bool]:
    """Each step, and whether it counts."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{job.address}", rank=job.group, world_size=GROUPS, timeout=timedelta(seconds=60)
    )
    loader = loader_of(job)
    saved, when = folder / "saved.pt", time.monotonic()
    if saved.exists():
        state = torch.load(saved)
        counts.copy_(state["counts"])
        loader.load_state_dict(state["loader"])
    while loader.epoch == 0:
        for (ids,) in loader:
            time.sleep(job.pause)
            gradient = torch.zeros(job.size)
            gradient[ids] = 1.0
            torch.distributed.all_reduce(gradient)
            counts += gradient
            if job.group == 0 and time.monotonic() - when > job.save:
                torch.save({"counts": counts, "loader": loader.state_dict()}, folder / "draft.pt")
                (folder / "draft.pt").replace(saved)
                when = time.monotonic()
            yield True


def live(job: Job, folder: Path, counts: torch.Tensor) -> Iterator[bool]:
    from midepoch.trainers.torchft import feed

    manager = manager_of(job, counts)
    batches = feed(manager, loader_of(job, midepoch.World()))
    while batches.epoch == 0:
        for (ids,) in batches:
            gradient = torch.zeros(job.size)
            gradient[ids] = float(batches.weight > 0)
            yield step(job, manager, counts, gradient)


def sampler(job: Job, folder: Path, counts: torch.Tensor) -> Iterator[bool]:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchft import DistributedSampler

    data, kept = TensorDataset(torch.arange(job.size)), folder / f"loader-{job.group}.pt"
    theirs: Any = DistributedSampler(
        data, replica_rank=job.group, num_replica_groups=GROUPS, group_rank=0, num_replicas=1, shuffle=True, seed=0
    )
    loader: Any = StatefulDataLoader(data, batch_size=BATCH, sampler=theirs)
    if kept.exists():
        loader.load_state_dict(torch.load(kept, weights_only=False))
    manager = manager_of(job, counts)
    for (ids,) in loader:
        manager.start_quorum()
        gradient = torch.zeros(job.size)
        gradient[ids] = 1.0
        yield step(job, manager, counts, gradient)
        torch.save(loader.state_dict(), kept.with_suffix(f".{os.getpid()}"))
        kept.with_suffix(f".{os.getpid()}").replace(kept)


def loader_of(job: Job, world: midepoch.World | None = None) -> midepoch.Loader:
    source: Any = DataLoader(TensorDataset(torch.arange(job.size)), batch_size=BATCH, shuffle=True)
    return midepoch.wrap(source, seed=0, tail="uneven", world=world)


def manager_of(job: Job, counts: torch.Tensor) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, ProcessGroupGloo

    def load(state: dict[str, torch.Tensor]) -> None:
        counts.copy_(state["counts"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _kept.append(store)  # it ends when it is freed
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=2)), load_state_dict=load,
        state_dict=lambda: {"counts": counts.clone()}, min_replica_size=1, timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=30), rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        quorum_retries=20, lighthouse_addr=job.address, replica_id=f"group_{job.group}", init_sync=False,
        hostname="127.0.0.1",
    )  # fmt: skip


def step(job: Job, manager: Any, counts: torch.Tensor, gradient: torch.Tensor) -> bool:
    """The time of a step, and whether the groups voted for it."""
    time.sleep(job.pause)
    manager.allreduce(gradient).wait()
    groups = manager.num_participants()
    done: bool = manager.should_commit()
    if done:
        counts += torch.round(gradient * groups)  # the mean over groups
    return done


# --- the job ----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        seconds: from the first step to the last.
        step: the median of a step's seconds, which is that of most steps where a failure is rare.
        trained, lost, repeated: samples.
    """

    way: str
    seed: int
    failures: int
    seconds: float
    step: float
    trained: int
    lost: int
    repeated: int

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.trained / self.seconds

    @property
    def share(self) -> float:
        """Of the samples that all groups would have trained on with steps of this length, and nothing between them.

        A machine that is slower in one run than in another makes both slower alike.
        """
        return self.rate * self.step / (GROUPS * BATCH)


def run(way: str, seed: int, size: int, pause: float, compressed: float, failures: bool) -> Outcome:
    chance, limit = random.Random(seed), time.monotonic() + 900
    with tempfile.TemporaryDirectory(prefix="midepoch-live-") as name, torchft_kills.lighthouse() as address:
        folder, starts, struck = Path(name), 0, 0
        alive: dict[int, forking.Program] = {}
        due = dict.fromkeys(range(GROUPS), 0.0)  # when groups that are dead start
        done: set[int] = set()
        next_failure: float | None = None
        while len(done) < GROUPS and (alive or due):
            now = time.monotonic()
            if now > limit:
                raise RuntimeError(f"{way}, seed {seed}: not done in time")
            if way != "restarts" or all(when <= now for when in due.values()):
                starting = [group for group, when in due.items() if when <= now]
                starts += bool(starting)
                for group in starting:
                    where = f"{folder}/store-{starts}" if way == "restarts" else address
                    job = Job(way, group, name, where, size, pause, SAVE / compressed)
                    program: list[str | Path] = [Path(__file__), json.dumps(asdict(job))]
                    alive[group] = forking.Program(program, modules=torchft_kills.MODULES)
                    del due[group]
            for group, program_of in list(alive.items()):
                status = program_of.poll()
                if status == 0:
                    del alive[group]
                    done.add(group)
                elif status is not None:
                    raise RuntimeError(f"{way}, seed {seed}: group {group} ended with {status}: {said(folder, group)}")
            if way == "live" and done:
                due.clear()  # the epoch is over for all
            if next_failure is None and len(list(folder.glob("log-*"))) == GROUPS:
                next_failure = now + chance.expovariate(compressed / BETWEEN)
            if failures and next_failure is not None and now >= next_failure and not done:
                next_failure += chance.expovariate(compressed / BETWEEN)
                victim = chance.randrange(GROUPS)
                if victim in alive:
                    struck += 1
                    for group in list(alive) if way == "restarts" else [victim]:
                        program_of = alive.pop(group)
                        program_of.kill()
                        program_of.wait()
                        due[group] = time.monotonic() + START / compressed
            time.sleep(0.01)
        logs = [[float(line.split()[0]) for line in log.read_text().splitlines()] for log in folder.glob("log-*")]
        took = statistics.median(after - before for log in logs for before, after in itertools.pairwise(log))
        times = [when for log in logs for when in log]
        counts = max((torch.load(path) for path in folder.glob("counts-*")), key=lambda each: float(each.sum()))
        return Outcome(
            way, seed, struck, max(times) - min(times), took, int((counts > 0).sum()), int((counts == 0).sum()),
            int((counts > 1).sum()),
        )  # fmt: skip


def said(folder: Path, group: int) -> str:
    lines = [line for path in folder.glob(f"said-{group}-*") for line in path.read_text().splitlines()]
    return "\n".join([line for line in lines if "[INFO]" not in line][-12:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--size", type=int, default=15000, help="samples of the epoch")
    parser.add_argument("--pause", type=float, default=0.04, help="seconds of a step's computation")
    parser.add_argument("--compressed", type=float, default=800.0, help="by how much time is compressed")
    given = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {}
    for seed in range(given.seeds + 1):
        for way in WAYS:
            outcome = run(way, seed, given.size, given.pause, given.compressed, failures=seed > 0)
            outcomes.setdefault(way, []).append(outcome)
            print(outcome, f"{outcome.rate:.1f} a second, share {outcome.share:.3f}", file=sys.stderr, flush=True)
    columns: dict[str, Callable[[Outcome], str]] = {
        "failures": lambda o: str(o.failures), "samples a second": lambda o: f"{o.rate:.0f}",
        "ms of a step": lambda o: f"{o.step * 1000:.0f}", "share": lambda o: f"{o.share:.1%}",
        f"lost of {given.size:,}": lambda o: str(o.lost), "trained on again": lambda o: str(o.repeated),
    }  # fmt: skip
    print(f"| way | share, undisturbed | {' | '.join(columns)} |")
    print("|---|---|" + "---|" * len(columns))
    for way, (base, *others) in outcomes.items():
        cells = [", ".join(column(each) for each in others) for column in columns.values()]
        print(f"| {way} | {base.share:.1%} | {' | '.join(cells)} |")


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        logging.disable(logging.INFO)
        torch.set_num_threads(1)
        job = Job(**json.loads(sys.argv[1]))
        # torchft says more than a pipe holds that nobody reads.
        said_there = os.open(Path(job.folder) / f"said-{job.group}-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said_there, 1)
        os.dup2(said_there, 2)
        train(job)
    else:
        main()
