"""Replica groups under torchft whose processes are killed at named points, until every epoch is trained on.

``python tests/trainers/torchft_kills.py --kills 100 --seed 1 --asynchronous --ranks 2 --workers 2`` adds a row to the
tally in docs/reliability-torchft.json, and prints it. A real lighthouse, real Managers in real processes, real SIGKILL.
With ``--sampler``, torchft's own sampler trains, under the same plan of kills.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchft.coordination import LighthouseServer

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

from support import forking

HERE = Path(__file__).parent
MODULES = ["torchft", "midepoch.trainers.torchft", "torch._dynamo"]  # torch.optim imports the last one
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
def lighthouse(least: int = 1, patience: int = 200) -> Iterator[str]:
    """Its address. `least`: groups that make a quorum. `patience`: milliseconds for which it waits for others."""
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=least, join_timeout_ms=patience, quorum_tick_ms=10, heartbeat_timeout_ms=800
    )
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
        if planned >= kills:
            return None
        open_to = [each for each in points if joins or each != "healing"]
        if not open_to or (not joins and chance.random() < 0.4):
            return None
        planned += 1
        point = chance.choice(open_to)
        count = 1 if point in ("healing", "first quorum") else chance.randint(settle, settle + 6)
        if point == "sending":
            count = 1
        return (chance.choice([None, *range(ranks)]) if ranks > 1 else None), (point, count)

    with contextlib.ExitStack() as servers:
        mortal = MortalLighthouse() if outages else None
        address = servers.enter_context(lighthouse()) if mortal is None else mortal.address
        common = {"lighthouse": address, "folder": str(folder), "sampler": groups if sampler else None, **job}
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
                if mortal is not None:
                    mortal.poll()
                    if outcome.outages < outages and not mortal.back and _steps(folder) > 20 * (outcome.outages + 1):
                        mortal.die(chance.uniform(0.1, 1.5))
                        outcome.outages += 1
                time.sleep(0.02)
        finally:
            if mortal is not None:
                mortal.process.kill()
            for group in alive.values():
                group.kill()
                if time.monotonic() - began >= limit:
                    outcome.errors.append(f"group {group.number} was not done: {group.said(folder)}")
    if _began_anew(folder) or outcome.outages:
        outcome.ended += len(apart)
    else:
        outcome.errors += [f"{each}\n{_last_steps(folder)}" for each in apart]
    outcome.kills = Counter(path.read_text() for path in folder.glob("died-*"))
    for path in folder.glob("log-*"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut by a kill
                done = json.loads(line)[1]
                outcome.steps += done
                outcome.failed += not done
    epochs = job.get("epochs", 1)
    weights = []
    for found in map(torch.load, folder.glob("counts-*.pt")):
        counts = found["counts"]
        weights.append((int((counts < epochs).sum()), int((counts > epochs).sum()), int(found["wrong"])))
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
    times = []
    for path in folder.glob("log-*"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut by a kill
                step, done, _, _, when = json.loads(line)
                if done and step == 1:
                    times.append(when)
    return bool(times) and max(times) - min(times) > 0.5


def _last_steps(folder: Path) -> str:
    """What each process has written down last, to tell how groups came to two places."""
    logs = ((log.name, log.read_text().splitlines()[-8:]) for log in sorted(folder.glob("log-*")))
    return "\n".join(f"{name}: {' '.join(lines)}" for name, lines in logs)


def _steps(folder: Path) -> int:
    """The most steps that a process has written down."""
    return max((len(log.read_bytes().splitlines()) for log in folder.glob("log-*")), default=0)


TALLY = HERE.parents[1] / "docs" / "reliability-torchft.json"


def draw(folder: Path, batch: int, path: Path) -> None:
    """Which group trained on which positions of the epoch when, and where it was killed. Groups of one rank."""
    from matplotlib import pyplot

    rows = []
    for log in folder.glob("log-*"):
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut by a kill
                rows.append((int(log.name.split("-")[1]), *json.loads(line)))
    began = min(row[-1] for row in rows)
    ends = {row[1]: row[4][1] for row in rows if row[2] and row[4][0] == 0}
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for group in sorted({row[0] for row in rows}):
        color, bars = f"C{group}", []
        for _, step, done, (rank, _), _, when in (row for row in rows if row[0] == group):
            if done and rank is not None and step in ends:
                start = ends.get(step - 1, 0) + rank * batch
                bars.append((when - began, min(start, ends[step]), min(start + batch, ends[step])))
        times, lows, highs = zip(*bars, strict=True)
        axes.vlines(times, lows, highs, colors=color, linewidth=5, label=f"group {group}")
        pids = {log.name.split("-")[3] for log in folder.glob(f"log-{group}-*")}
        deaths = [each.stat().st_mtime - began for each in folder.glob("died-*") if each.name[5:] in pids]
        axes.plot(deaths, [-12 - 12 * group] * len(deaths), "x", color=color, markersize=9, markeredgewidth=2)
    axes.set_xlabel("seconds; a cross is a SIGKILL")
    axes.set_ylabel("positions of the epoch trained on")
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--size", type=int, default=1200, help="samples of an epoch")
    parser.add_argument("--together", type=int, help="global_batch=")
    parser.add_argument("--point", action="append", choices=POINTS)
    parser.add_argument("--each", type=int, default=10, help="kills in one job")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one job")
    parser.add_argument("--sampler", action="store_true", help="torchft's own, in place of midepoch")
    parser.add_argument("--draw", type=Path, help="a picture of the first job, and no row")
    given = parser.parse_args()
    total, jobs, errors = Outcome(), 0, list[str]()
    while not jobs or total.kills.total() < given.kills:
        jobs += 1
        with tempfile.TemporaryDirectory(prefix="midepoch-torchft-") as folder:
            outcome = run_job(
                Path(folder), given.each, given.seed * 1000 + jobs, groups=given.groups, ranks=given.ranks,
                workers=given.workers, asynchronous=given.asynchronous, size=given.size, together=given.together,
                points=tuple(given.point or POINTS), limit=given.limit, sampler=given.sampler,
            )  # fmt: skip
            if given.draw is not None:
                draw(Path(folder), 4, given.draw)
                return
        expected = given.groups * given.ranks
        found = () if given.sampler else (outcome.lost, outcome.repeated, outcome.wrong)
        if outcome.errors or outcome.finished != expected or any(found):
            errors.append(f"job {jobs}: {outcome}")
        total.kills += outcome.kills
        for name in ("steps", "failed", "launches", "lost", "repeated", "wrong", "finished", "ended", "seconds"):
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
        print(jobs, outcome, flush=True)
    row = {
        "quorum": "asynchronous" if given.asynchronous else "synchronous", "ranks": given.ranks,
        "workers": given.workers, "steps of": "a batch each" if given.together is None else f"{given.together} samples",
        "kills": dict(total.kills), "jobs": jobs, "launches": total.launches, "steps": total.steps,
        "failed": total.failed, "ended": total.ended, "lost": total.lost, "repeated": total.repeated,
        "wrong weights": total.wrong,
        "seconds": round(total.seconds), "seed": given.seed, "groups": given.groups, "size": given.size,
        "errors": errors, **({"sampler": "torchft"} if given.sampler else {}),
    }  # fmt: skip
    rows = json.loads(TALLY.read_text()) if TALLY.exists() else []
    rows.append(row)
    TALLY.write_text("[\n" + ",\n".join(json.dumps(each) for each in rows) + "\n]\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
