"""Replica groups under torchft whose processes are killed at named points, until every epoch is trained on.

A real lighthouse, real Managers in real processes, real SIGKILL. `benchmarks/torchft_tally.py` makes many jobs of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchft.coordination import LighthouseServer

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

from support import forking, jobs

HERE = Path(__file__).parent
# torch.optim imports the third.
MODULES = ["torchft", "midepoch.trainers.torchft", "torch._dynamo", "support.jobs"]
POINTS = ("quorum", "chosen", "allreduce", "voted", "healing", "sending", "first quorum")

ENDS = (
    "it was not healed when the rest of its group was", "Connection closed by peer", "Connection reset by peer",
    "Connection was likely closed",
)  # fmt: skip
APART = "the groups do not stand at one place"


@dataclass
class Outcome:
    """What became of one job.

    Attributes:
        kills: by point.
        steps, failed: steps of all groups that were voted for, and that were not.
        launches: of groups.
        lost, repeated, wrong: samples that the weights of a rank have not seen or seen twice, and steps whose mean was
            not that over its samples; the most of any rank. Of torchft's own sampler, those of the best rank.
        finished: ranks that trained to the end.
        ended: groups that an error ended, as torchrun would start again: of the link to a process of the group that was
            killed, or because a process was not healed when the rest of its group was; or because groups that came
            back had begun a history of their own (see `_began_anew`), or one that asked a lighthouse first which had
            come back trained on alone, since it asks for one group only.
        outages: how often the lighthouse was killed.
    """

    kills: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    failed: int = 0
    launches: int = 0
    lost: int = 0
    repeated: int = 0
    wrong: int = 0
    finished: int = 0
    ended: int = 0
    outages: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


def lasting_port() -> int:
    """A free port that the system gives to no connection by itself, so that a server finds it free again."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise OSError("100 ports were in use")


@contextlib.contextmanager
def lighthouse(least: int = 1, patience: int = 200, silence: int = 800) -> Iterator[str]:
    """Its address. `least`: groups that make a quorum.

    In milliseconds: `patience`, for which it waits for others, and `silence`, after which a group counts as dead.
    """
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=least, join_timeout_ms=patience, quorum_tick_ms=10,
        heartbeat_timeout_ms=silence,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(
    bind=f"127.0.0.1:{sys.argv[1]}", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=10, heartbeat_timeout_ms=800
)
time.sleep(1000)
"""


class MortalLighthouse:
    """A lighthouse in a process of its own, which is killed and comes back under the same address."""

    def __init__(self) -> None:
        self.port, self.back = lasting_port(), 0.0
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process, self.back = forking.Program(["-c", LIGHTHOUSE, str(self.port)], modules=MODULES, merged=True), 0.0
        # What it says is more than a pipe holds.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def die(self, seconds: float) -> None:
        self.process.kill()
        self.back = time.monotonic() + seconds

    def poll(self) -> None:
        """Come back when it is time, or if another process had the port."""
        ended_by_itself = not self.back and self.process.poll() is not None
        if ended_by_itself or (self.back and time.monotonic() >= self.back):
            self.start()


_launches = itertools.count()


class Group:
    """The processes of one replica group, which live and die together, as torchrun's agent has it."""

    def __init__(self, number: int, ranks: int, common: dict[str, Any], die: tuple[int | None, Any] | None) -> None:
        store = Path(common["folder"], f"store-{number}-{next(_launches)}")
        self.number, self.began = number, time.monotonic()
        self.processes = []
        for rank in range(ranks):
            told = {**common, "group": number, "rank": rank, "ranks": ranks, "store": str(store)}
            if die is not None and die[0] in (None, rank):
                told["die"] = die[1]
            self.processes.append(forking.Program([HERE / "torchft_job.py", json.dumps(told)], modules=MODULES))

    def poll(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def said(self, folder: Path) -> str:
        """What its processes have said last, without what torchft's servers say."""
        lines: list[str] = []
        for process in self.processes:
            for path in folder.glob(f"said-{self.number}-*-{process.pid}"):
                lines += path.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if "[INFO]" not in line][-30:])


def run_job(
    folder: Path, kills: int, seed: int, *, groups: int = 3, ranks: int = 1, points: tuple[str, ...] = POINTS,
    limit: float = 300, settle: int = 2, outages: int = 0, sampler: bool = False, **job: Any,
) -> Outcome:  # fmt: skip
    """Train to the end, with so many kills on the way, as a seed has them.

    `outages`: how often the lighthouse dies. `sampler`: torchft's own in place of `feed`.
    """
    chance, outcome, began = random.Random(seed), Outcome(), time.monotonic()
    planned = 0

    def plan(joins: bool) -> tuple[int | None, Any] | None:
        """For a group that is launched: whether it will die, where and when."""
        nonlocal planned
        open_to = [each for each in points if joins or each != "healing"]
        if planned >= kills or not open_to or (not joins and chance.random() < 0.4):
            return None
        planned += 1
        point = chance.choice(open_to)
        count = 1 if point in ("healing", "first quorum", "sending") else chance.randint(settle, settle + 6)
        return (chance.choice([None, *range(ranks)]) if ranks > 1 else None), (point, count)

    server = MortalLighthouse()
    common = {"lighthouse": server.address, "folder": str(folder), "sampler": groups if sampler else None, **job}
    alive = {number: Group(number, ranks, common, plan(False)) for number in range(groups)}
    outcome.launches = groups
    back: dict[int, float] = {}
    apart: list[str] = []
    try:
        while (alive or back) and time.monotonic() - began < limit:
            for number, group in list(alive.items()):
                statuses = group.poll()
                if all(status == 0 for status in statuses):
                    del alive[number]
                elif any(status not in (None, 0) for status in statuses):
                    group.kill()
                    if not any(status == -9 for status in statuses):
                        said = group.said(folder)
                        if any(words in said for words in ENDS) and ranks > 1:
                            outcome.ended += 1
                        else:
                            told = apart if APART in said else outcome.errors
                            told.append(f"group {number} ended with {statuses}: {said}")
                    del alive[number]
                    back[number] = time.monotonic() + chance.uniform(0.1, 1.0)
            for number, due in list(back.items()):
                if time.monotonic() >= due:
                    del back[number]
                    alive[number] = Group(number, ranks, common, plan(True))
                    outcome.launches += 1
            server.poll()
            if outcome.outages < outages and not server.back and _steps(folder) > 20 * (outcome.outages + 1):
                server.die(chance.uniform(0.1, 1.5))
                outcome.outages += 1
            time.sleep(0.02)
    finally:
        server.process.kill()
        for group in alive.values():
            group.kill()
            if time.monotonic() - began >= limit:
                outcome.errors.append(f"group {group.number} was not done: {group.said(folder)}")
    # What each process has written down last is in its log: how groups came to two places.
    if _began_anew(folder) or outcome.outages:
        outcome.ended += len(apart)
    else:
        outcome.errors += apart
    outcome.kills = Counter(path.read_text() for path in folder.glob("died-*"))
    votes = [done for log in folder.glob("log-*") for _, done, *_ in jobs.noted(log)]
    outcome.steps, outcome.failed = sum(votes), len(votes) - sum(votes)
    weights = []
    for found in map(torch.load, folder.glob("counts-*.pt")):
        counts = found["counts"]
        weights.append((int((counts < 1).sum()), int((counts > 1).sum()), int(found["wrong"])))
    outcome.finished = len(weights)
    if sampler and weights:  # groups end one after the other: those that ended last have seen most
        outcome.lost, outcome.repeated, _ = min(weights)
    elif weights:
        outcome.lost, outcome.repeated, outcome.wrong = (max(each) for each in zip(*weights, strict=True))
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _began_anew(folder: Path) -> bool:
    """Whether the first step was voted for at two times.

    torchft lets more than half of the groups begin from nothing, while the only one that has weights is away, such as
    in a connection that times out. If it comes back when they have made as many steps, all have to be told.
    """
    logs = [jobs.noted(log) for log in folder.glob("log-*")]
    times = [when for log in logs for step, done, _, _, when in log if done and step == 1]
    return bool(times) and max(times) - min(times) > 0.5


def _steps(folder: Path) -> int:
    return max((len(log.read_bytes().splitlines()) for log in folder.glob("log-*")), default=0)
