"""midepoch and its peers, measured in one run: what they cost, how they resume, and what they then get wrong.

Run ``python benchmarks/compare.py``: figures, plots and a part of the page go to docs/benchmarks/. With ``--only`` or
``--question`` part of it is measured and, unless ``--output`` says where, only printed; in a folder with results of the
same versions, machine and plan, the answers to other questions and the rows of other peers stay. ``--render`` writes
the page and the plots again from results.json. ``--check`` measures midepoch's ratios again, and compares them with
those in results.json. benchmarks/peers.py has the peers, each of which runs in a process of its own.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib.metadata
import json
import math
import operator
import os
import platform
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import filterfalse, zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measuring import Interval, between, processor, replaced
from peers import PEERS, Peer

PLAIN, OURS = "plain DataLoader", "midepoch DataLoader"
OUTPUT = Path(__file__).parents[1] / "docs" / "benchmarks"
NOT_WRITTEN = "not written"
"""Of a data set in files that is larger than those that were made."""
Row = dict[str, Any]

# By default glibc gives memory back to the kernel, and takes it again, whenever the top of a heap happens to be free,
# and unmaps a thread's heap as soon as that is empty: by luck a decoding process has no page faults or 2,400 a batch,
# and the batch takes 10 ms or 15. So that this does not pass for a loader's cost, all peers keep what they have. The
# padding, of two of a thread's heaps, is what keeps these (heap_trim in malloc/arena.c). See mallopt(3); bytes.
ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 27),
}


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: of the overhead, each with processes of its own.
        stretches: that a process is measured for at most, in turn with the others.
        seconds: of a work after which a process has no further stretch.
        batches: for each work, how many are timed, and how many of the same epoch come before them, and after; of slow
            peers an eighth, but of pictures, which take all of them milliseconds.
        pictures: in the data set of which a resume at 0 and 90 % is measured too, without workers and with 2.
        limit: seconds for a first batch.
        memory: GiB of data that a process may have.
    """

    rounds: int = 5
    stretches: int = 15
    seconds: float = 1.5
    batches: tuple[tuple[str, int, int], ...] = (("integers", 400, 256), ("draws", 256, 256), ("jpeg", 48, 16))
    progress: tuple[float, ...] = (0, 0.25, 0.5, 0.75, 0.9, 0.99)
    memory_size: int = 10**6
    file_size: int = 10**5
    pictures: int = 10**4
    sizes: tuple[int, ...] = (10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
    state_sizes: tuple[int, ...] = (10**4, 10**6, 10**9)
    repeats: int = 5
    samples: int = 5760  # divides by 2 and by 3 ranks' batches, before the cut and after it
    boring: tuple[int, int] = (30, 300)
    limit: float = 60
    memory: float = 8


QUICK = Plan(
    rounds=2, stretches=2, batches=(("integers", 40, 4), ("draws", 20, 4), ("jpeg", 6, 3)),
    memory_size=10**4, file_size=1000, pictures=320,
    sizes=(10**3, 10**4), state_sizes=(10**3, 10**4), repeats=3, samples=1920, boring=(2, 30),
)  # fmt: skip


# --- servers ---------------------------------------------------------------------------------------------------------


class Unmanaged(Exception):  # noqa: N818  # an answer
    """A peer did not manage; says why."""


@functools.cache
def scratch() -> str:
    """A folder that all servers of this run share."""
    folder = tempfile.mkdtemp(prefix="midepoch-compare-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Server:
    """A process with one peer."""

    def __init__(self, name: str, plan: Plan, environment: dict[str, str] | None = None) -> None:
        self.name, self.plan, self.environment = name, plan, environment or {}
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns at once; the first question waits until it is ready."""
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peers.py")), self.name, "--memory", str(self.plan.memory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, start_new_session=True,
            env={**os.environ, "MIDEPOCH_BENCHMARKS_SCRATCH": scratch(), **self.environment},
        )  # fmt: skip
        self.ready = False

    def ask(self, do: str, spec: Row, limit: float = 600, **arguments: Any) -> Any:
        self.send(do, spec, **arguments)
        return self.receive(limit)

    def send(self, do: str, spec: Row, **arguments: Any) -> None:
        if self.process is None:
            self.start()
        assert self.process is not None and self.process.stdin is not None
        if not self.ready:
            self._line(600)
            self.ready = True
        with suppress(BrokenPipeError):
            print(json.dumps({"do": do, "spec": spec, **arguments}), file=self.process.stdin, flush=True)

    def receive(self, limit: float) -> Any:
        answer = self._line(limit)
        if "error" not in answer:
            return answer["value"]
        if answer["error"] == "MemoryError" or "allocate memory" in answer["message"]:
            raise Unmanaged(self._beyond_memory())
        raise Unmanaged(f"{answer['error']}: {answer['message'][:100]}")

    def _line(self, limit: float) -> Any:
        assert self.process is not None and self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], limit)[0]:
            self.stop(0)
            raise Unmanaged(f"more than {limit:.0f} s")
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.errors.seek(0)
        said = self.errors.read()[-2000:]
        code = self.process.wait()
        self.stop(0)
        if "bad_alloc" in said or "MemoryError" in said or code == -signal.SIGKILL:
            raise Unmanaged(self._beyond_memory())
        raise Unmanaged(f"ended with status {code}: {said.strip()[-200:]}")

    def _beyond_memory(self) -> str:
        return f"more than {self.plan.memory:g} GiB"

    def stop(self, patience: float = 10) -> None:
        """Lets it end by itself, since some peers have shared memory to remove; then ends its whole session."""
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        self.errors.close()


@contextmanager
def servers(names: Sequence[str], plan: Plan, environment: dict[str, str] | None = None) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        made = [Server(name, plan, environment) for name in names]
        for server in made:
            stack.callback(server.stop)
            server.start()
        yield made


@contextmanager
def world(name: str, size: int, plan: Plan) -> Iterator[list[Server]]:
    """The servers of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                  "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        ranks = [
            Server(name, plan, {key: str(value) for key, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()})
            for rank in range(size)
        ]
        for server in ranks:
            stack.callback(server.stop, 2)
            server.start()
        yield ranks


# --- overhead --------------------------------------------------------------------------------------------------------


def with_bases(names: Sequence[str]) -> list[str]:
    """The peers that these are compared with, too; in the order of all."""
    wanted = {*names, *(PEERS[name].base for name in names)}
    return [name for name in PEERS if name in wanted]


def overhead(names: Sequence[str], plan: Plan) -> list[Row]:
    """Short stretches of live loaders in turn, every other time backwards; the ratios are of the same round.

    Each round has processes of its own, since how a process's memory happens to lie makes all that it decodes faster or
    slower for as long as it lives: what varies between processes must be in the interval.
    """
    peers = with_bases(names)
    turns: dict[tuple[str, int, str], list[list[float]]] = {
        (work, workers, name): []
        for work, _, _ in plan.batches
        for workers in (0, 2)
        for name in peers
        if not workers or PEERS[name].workers
    }
    for number in range(plan.rounds):
        tell(f"overhead: round {number + 1} of {plan.rounds}")
        with servers(peers, plan, ALLOCATOR) as live:
            for work, timed, apart in plan.batches:
                for workers in (0, 2):
                    asked = [server for server in live if (work, workers, server.name) in turns]
                    how = {}
                    for server in asked:
                        part = 8 if PEERS[server.name].slow and work != "jpeg" and apart >= 8 else 1
                        size = 32 * (timed // part + 2 * (apart // part))
                        how[server.name] = {"work": work, "size": size, "workers": workers}, apart // part
                    for name, microseconds in stretches(asked, how, plan, number % 2).items():
                        turns[work, workers, name].append(microseconds)
    rows: list[Row] = []
    for (work, workers, name), taken in turns.items():
        if name not in names:
            continue  # nobody asked for this one: another is compared with it
        times = [statistics.median(each) for each in taken]
        row: Row = {"peer": name, "work": work, "workers": workers, "microseconds": statistics.median(times),
                    "lowest": min(times), "highest": max(times)}  # fmt: skip
        if (base := PEERS[name].base) is not None:
            pairs = zip(taken, turns[work, workers, base], strict=True)
            # What disturbs the machine for a moment disturbs both stretches of a turn, or is no median.
            ratio = between([statistics.median(map(operator.truediv, mine, theirs)) for mine, theirs in pairs])
            row |= {"base": base, "ratio": ratio.middle, "low": ratio.low, "high": ratio.high}
        rows.append(row)
    return rows


def stretches(
    live: Sequence[Server], how: Mapping[str, tuple[Row, int]], plan: Plan, backwards: int
) -> dict[str, list[float]]:
    """Microseconds a batch in each process, a figure a turn; a first stretch builds the loader and does not count."""
    times: dict[str, list[float]] = {server.name: [] for server in live}
    taken = dict.fromkeys(times, 0.0)
    for server in live:
        server.ask("prepare", how[server.name][0])
    for turn in range(plan.stretches + 1):
        for server in live[:: 1 if (turn + backwards) % 2 else -1]:
            if turn > 1 and taken[server.name] > plan.seconds:
                continue
            start = time.perf_counter()
            spec, apart = how[server.name]
            microseconds = server.ask("stretch", spec, apart=apart)
            taken[server.name] += time.perf_counter() - start
            if turn:
                times[server.name].append(microseconds)
    return times


# --- resume ----------------------------------------------------------------------------------------------------------


Cell = tuple[str, int, float, int]


def cells(peer: type[Peer], plan: Plan) -> list[Cell]:
    """Works, sizes, progresses and workers at which a resume is measured."""
    size = min(plan.file_size if peer.files else plan.memory_size, peer.limit)
    integers = dict.fromkeys([(size, each) for each in plan.progress] + [(each, 0.9) for each in plan.sizes])
    pictures = [(each, workers) for workers in ((0, 2) if peer.workers else (0,)) for each in (0, 0.9)]
    return [("integers", *each, 0) for each in integers] + [
        ("jpeg", plan.pictures, *each) for each in pictures if plan.pictures
    ]


def resume(names: Sequence[str], plan: Plan) -> list[Row]:
    """Seconds to the first batch, once, and again in turns where that is quick."""
    rows: list[Row] = []
    for name in names:
        with servers([name], plan) as (server,):
            forged = server.ask("check_forged", {"size": 640}, batches=10)
            tell(f"resume: {name}{'' if forged else ', whose states cannot be made up'}")
            states: dict[Cell, str] = {}
            found: dict[Cell, Row] = {}
            for cell in cells(PEERS[name], plan):
                work, size, progress, workers = cell
                made_up = forged and not workers
                row: Row = {"peer": name, "work": work, "size": size, "progress": progress, "workers": workers,
                            "forged": made_up, "times": [], "why": ""}  # fmt: skip
                found[cell] = row
                if size > PEERS[name].limit:
                    row["why"] = NOT_WRITTEN
                    continue
                if PEERS[name].hoards:
                    server.stop()
                try:
                    spec = {"work": work, "size": size, "workers": workers}
                    server.ask("prepare", spec)
                    batches = int(size * progress) // 32
                    state = server.ask("forge", spec, plan.limit if made_up else 600, batches=batches)
                    row["times"].append(server.ask("first_batch", spec, plan.limit, state=state))
                    states[cell] = state
                except Unmanaged as why:
                    row["why"] = str(why)
            for turn in range(1, plan.repeats):
                if PEERS[name].hoards:
                    server.stop()
                for cell, state in list(states.items())[:: 1 if turn % 2 else -1]:
                    times = found[cell]["times"]
                    if times[0] >= 1:
                        continue
                    try:
                        spec = {"work": cell[0], "size": cell[1], "workers": cell[3]}
                        times.append(server.ask("first_batch", spec, plan.limit, state=state))
                    except Unmanaged:
                        server.stop()  # the next question starts a new one
        rows += found.values()
    for row in rows:
        row["seconds"] = statistics.median(row["times"]) if row["times"] else None
    return rows


def of_integers(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("work", "integers") == "integers"]


def resume_ratio(rows: Sequence[Row], name: str) -> Interval | None:
    """First batch at 90 % of the progress's size to that at 0 %."""
    rows = of_integers(rows)
    size = next((row["size"] for row in rows if row["peer"] == name and row["progress"] == 0), None)
    times = {row["progress"]: row.get("times", []) for row in rows if (row["peer"], row["size"]) == (name, size)}
    early, late = times.get(0, []), times.get(0.9, [])
    pairs = [b / a for a, b in zip(early, late, strict=False)]
    return between(pairs) if len(pairs) > 1 else None


def begin_ratio(rows: Sequence[Row], name: str) -> Interval | None:
    """First batch at 0 % to that of what it is compared with, at the largest size that both have."""
    times = {(row["peer"], row["size"]): row.get("times", []) for row in of_integers(rows) if row["progress"] == 0}
    base = PEERS[name].base
    both = [size for peer, size in times if peer == name and times[name, size] and times.get((base, size))]
    if not both:
        return None
    mine, theirs = times[name, max(both)], times[base, max(both)]
    pairs = [a / b for a, b in zip(mine, theirs, strict=False)]
    return between(pairs) if len(pairs) > 1 else None


# --- state -----------------------------------------------------------------------------------------------------------


def measure_states(name: str, plan: Plan) -> tuple[list[Row], str]:
    """At each size, in one process; and why there are no more."""
    found: list[Row] = []
    with servers([name], plan) as (server,):
        for size in plan.state_sizes:
            if size > PEERS[name].limit:
                return found, NOT_WRITTEN
            try:
                server.ask("prepare", {"size": size})
                found.append(server.ask("measure_state", {"size": size}, plan.limit) | {"size": size})
            except Unmanaged as error:
                return found, str(error)
    return found, ""


def state(names: Sequence[str], plan: Plan) -> list[Row]:
    """Bytes and microseconds at the second size, and peak memory at each over that at the first."""
    rows: list[Row] = []
    for name in names:
        tell(f"state: {name}")
        measure_states(name, plan)  # some write an index of the data: what is measured is a job that starts again
        found, why = measure_states(name, plan)
        row: Row = {"peer": name, "bytes": None, "form": "", "microseconds": None, "more_mib": {}, "why": why}
        if found:
            row |= {key: found[:2][-1][key] for key in ("bytes", "form", "microseconds")}
            row["more_mib"] = {str(each["size"]): each["peak_mib"] - found[0]["peak_mib"] for each in found[1:]}
        rows.append(row)
    return rows


# --- exactness -------------------------------------------------------------------------------------------------------


QUESTIONS = {
    "random": "random numbers after a resume",
    "random workers": "random numbers, 2 workers",
    "workers 2 to 0": "workers 2 → 0",
    "workers 0 to 3": "workers 0 → 3",
    "world 2 to 3": "ranks 2 → 3",
    "longer": "10 % more samples",
    "halved": "batch size halved",
    "last batch": "state at an epoch's last batch",
}
Batches = list[tuple[list[int], str]]


def numbers(batches: Batches) -> list[int]:
    return [number for batch, _ in batches for number in batch]


def interleaved(ranks: Sequence[Batches]) -> list[int]:
    """What all ranks read, step by step."""
    return [number for step in zip_longest(*ranks) for batch in step if batch for number in batch[0]]


def blocks(found: list[int], size: int) -> list[list[int]]:
    return [sorted(found[start : start + size]) for start in range(0, len(found), size)]


def verdict(before: list[int], after: list[int], expected: list[int], everything: int, block: int = 1) -> str:
    """What became of an epoch's samples; `block` is how many are in no particular order."""
    if blocks(after, block) == blocks(expected, block):
        return "exact"
    counts = Counter(before + after)
    lost = sum(number not in counts for number in range(everything))
    repeated = sum(count - 1 for count in counts.values())
    if not lost and not repeated:
        return "complete, another order"
    return f"loses {lost:,}, repeats {repeated:,} silently"


def refused(answer: Row) -> str | None:
    """What an error of a resumed run says, if there is one."""
    if "error" not in answer:
        return None
    batches = sum(map(len, answer["passes"]))
    return f"refused: {answer['error']}" if not batches else f"{answer['error']} after {batches} batches"


class Exactness:
    """The questions for one peer; states are saved in one process and loaded in another."""

    def __init__(self, saving: Server, loading: Server) -> None:
        self.saving, self.loading = saving, loading
        self.name, self.plan, self.samples = saving.name, saving.plan, saving.plan.samples
        self.cut = self.samples * 2 // 5 // 32

    def ask(self, question: str) -> str:
        if "workers" in question and not PEERS[self.name].workers:
            return "has none"
        try:
            return str(getattr(self, "_" + question.replace(" ", "_"))())
        except Unmanaged as why:
            return "hangs" if str(why).startswith("more than") and str(why).endswith(" s") else str(why)

    def _run(self, server: Server, spec: Row, **arguments: Any) -> Row:
        spec = {"size": self.samples, **spec}
        if not server.environment:
            server.ask("prepare", spec)
        answer: Row = server.ask("run", spec, 2 * self.plan.limit, **arguments)
        return answer

    def _reference(self, spec: Row, save_at: int, passes: int = 1) -> Row:
        answer = self._run(self.saving, spec, save_at=save_at, passes=passes)
        if "error" in answer:
            raise Unmanaged(f"does not run: {answer['error']}: {answer['message'][:100]}")
        return answer

    def _cut_and_changed(self, saved: Row, loaded: Row) -> str:
        everything = loaded.get("size", self.samples)
        before = self._reference(saved, self.cut)
        after = self._run(self.loading, loaded, state=before["state"])
        whole = before["passes"][0]
        return refused(after) or verdict(
            numbers(whole[: self.cut]), numbers(after["passes"][0]), numbers(whole[self.cut :]), everything
        )

    def _random(self, workers: int = 0) -> str:
        spec = {"work": "draws", "workers": workers}
        before = self._reference(spec, self.cut)
        after = self._run(self.loading, spec, state=before["state"])
        whole, rest = before["passes"][0], after["passes"][0] if after["passes"] else []
        if "error" not in after and numbers(rest) == numbers(whole[self.cut :]):
            return "exact" if rest == whole[self.cut :] else "other numbers"
        return refused(after) or "other samples"

    def _random_workers(self) -> str:
        return self._random(workers=2)

    def _workers_2_to_0(self) -> str:
        return self._cut_and_changed({"workers": 2}, {"workers": 0})

    def _workers_0_to_3(self) -> str:
        return self._cut_and_changed({"workers": 0}, {"workers": 3})

    def _longer(self) -> str:
        return self._cut_and_changed({}, {"size": self.samples * 11 // 10})

    def _halved(self) -> str:
        return self._cut_and_changed({}, {"batch_size": 16})

    def _last_batch(self) -> str:
        before = self._reference({}, self.samples // 32, passes=2)
        after = self._run(self.loading, {}, state=before["state"], passes=2)
        if "error" in after:
            return str(refused(after))
        epochs = [numbers(each) for each in before["passes"]]
        first, second = (numbers(each) for each in after["passes"])
        found, prefix = (first, "") if first else (second, "0 batches, then ")
        if found == epochs[0] != epochs[1]:
            return f"{prefix}epoch 0 again"
        return prefix + verdict([], found, epochs[1], self.samples)

    def _world_2_to_3(self) -> str:
        self.saving.ask("prepare", {"size": self.samples})
        answers: list[list[Row]] = []
        for size in (2, 3):
            with world(self.name, size, self.plan) as ranks:
                for rank, server in enumerate(ranks):
                    arguments: Row = (
                        {"save_at": self.cut // 2} if size == 2 else {"state": answers[0][rank % 2]["state"]}
                    )
                    server.send("run", {"size": self.samples}, **arguments)
                answers.append([])
                for server in ranks:
                    answers[-1].append(server.receive(2 * self.plan.limit))
                    if "error" in answers[-1][-1]:
                        said = str(refused(answers[-1][-1]))  # the other ranks may wait for this one for ever
                        return said if size == 3 else f"does not run: {said}"
        two, three = ([answer["passes"][0] for answer in each] for each in answers)
        half = self.cut // 2
        before, expected = (interleaved([rank[part] for rank in two]) for part in (slice(half), slice(half, None)))
        return verdict(before, interleaved(three), expected, self.samples, 6 * 32)


def exactness(names: Sequence[str], plan: Plan) -> list[Row]:
    rows = []
    for name in names:
        with servers([name, name], plan) as (saving, loading):
            asked = Exactness(saving, loading)
            for question in QUESTIONS:
                rows.append({"peer": name, "question": question, "verdict": asked.ask(question)})
                tell(f"exactness: {name}, {question}: {rows[-1]['verdict']}")
    return rows


# --- what is told ----------------------------------------------------------------------------------------------------


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def label(name: str, resumed: bool = False) -> str:
    """A peer as tables and plots call it; in those about a resume with how it is resumed, if not by itself."""
    peer = PEERS[name]
    return ", ".join(filter(None, (peer.label or name, peer.by if resumed else "")))


def table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], *notes: str) -> str:
    rows = [head, ["---"] * len(head), *lines]
    drawn = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join([f"{title}:", drawn, *filter(None, notes)]) + "\n"


def told_reading(rows: Sequence[Row]) -> str:
    """How Grain read, which earlier rows do not say."""
    grain = [row for row in rows if row["peer"].startswith("Grain")]
    if not grain:
        return ""
    if all("settings" in row for row in grain):
        return "Grain reads integers without threads, as it recommends for data in memory, and decodes pictures in 16."
    return "Grain read with its default, 16 threads. For data in memory, it recommends none (`num_threads=0`)."


def pivot(
    rows: Sequence[Row], columns: Sequence[Any], column: Callable[[Row], Any], cell: Callable[[Row], str]
) -> list[list[str]]:
    """A line for each peer, under its name; "-" where nothing was measured."""
    found: dict[str, dict[Any, str]] = {}
    for row in rows:
        found.setdefault(row["peer"], {})[column(row)] = cell(row)
    return [[name, *(cells.get(each, "-") for each in columns)] for name, cells in found.items()]


def labelled(lines: Sequence[Sequence[str]], resumed: bool = True) -> list[list[str]]:
    return [[label(name, resumed), *rest] for name, *rest in lines]


def narrow(interval: Interval) -> bool:
    """Whether a ratio is known to 5 % either way."""
    return interval.high / interval.middle <= 1.05


def found_of(rows: Sequence[Row], name: str = OURS, **asked: Any) -> Row | None:
    """The first row of a peer in which these are so."""
    return next((row for row in rows if row["peer"] == name and asked.items() <= row.items()), None)


def first_overhead(rows: Sequence[Row]) -> str:
    """The result in a sentence, as that of the other charts."""
    said = [
        f"{row['ratio']:.2g} for {work}"
        for work in dict.fromkeys(row["work"] for row in rows)
        if (row := found_of(rows, work=work, workers=0))
    ]
    return f"A wrapped DataLoader takes so many times the plain one's time, without workers: {', '.join(said)}."


def first_resume(rows: Sequence[Row]) -> str:
    progressing = at_progress(rows)
    first = {row["progress"]: row for row in progressing if row["peer"] == OURS}
    if not first or not all(row["seconds"] for row in first.values()):
        return ""
    start, end = first[min(first)], first[max(first)]
    plain = found_of(progressing, PLAIN, progress=end["progress"])
    by_hand = f" A program that skips batches by hand takes {first_batch_cell(plain)} there." if plain else ""
    return (
        f"A wrapped DataLoader gives its first batch {duration(start['seconds'])} after a start, and "
        f"{duration(end['seconds'])} after a resume at {end['progress']:.0%} of {end['size']:,} samples.{by_hand}"
    )


def first_size(rows: Sequence[Row]) -> str:
    ours = [row for row in rows if row["peer"] == OURS and row["seconds"]]
    if not ours:
        return ""
    most = max(ours, key=lambda row: int(row["size"]))
    return f"It takes as long at any size: {duration(most['seconds'])} at 90 % of {most['size']:,} samples."


def first_state(rows: Sequence[Row]) -> str:
    if (row := found_of(rows)) is None:
        return ""
    return f"A wrapped DataLoader's state has {row['bytes']:,} bytes, and takes {row['microseconds']:.3g} µs to save."


def first_exactness(rows: Sequence[Row]) -> str:
    sound = ("exact", "has none", "refused")
    wrong = {row["peer"] for row in rows if not row["verdict"].startswith(sound)}
    others = {row["peer"] for row in rows if not is_ours(row["peer"])}
    ours = "A wrapped loader is wrong" if any(map(is_ours, wrong)) else "Each wrapped loader is exact, or refuses"
    return f"{ours}; of the {len(others)} others, {len(wrong & others)} lose, repeat or change something."


def told_overhead(rows: Sequence[Row]) -> str:
    def column(row: Row) -> tuple[str, int]:
        return row["work"], row["workers"]

    def compared(name: str) -> str | None:
        return PEERS[name].base if PEERS[name].base != name else None

    def cell(row: Row) -> str:
        ratio = ""
        if compared(row["peer"]) is not None:
            interval = Interval(row["ratio"], row["low"], row["high"])
            ratio = f"; {'' if narrow(interval) else '~'}{interval.middle:.3g}"
        return f"{row['microseconds']:,.0f}{ratio}"

    columns = list(dict.fromkeys(map(column, rows)))
    head = ["peer", *(f"{work}, {workers} workers" for work, workers in columns), "compared with"]
    lines = []
    for name, *cells in pivot(rows, columns, column, cell):
        base = compared(name)
        lines.append([label(name), *cells, "–" if base is None else label(base)])
    title = (
        "µs a batch of 32, and its ratio to what it is compared with in the same rounds; `~` marks one that is not "
        "known to 5 % either way. The first six read from memory, the others read files"
    )
    return table(title, head, lines, told_reading(rows))


def first_batch_cell(row: Row) -> str:
    return str(row["why"]) if row["seconds"] is None else duration(row["seconds"])


def at_progress(rows: Sequence[Row]) -> list[Row]:
    """The rows of integers of the size at which several progresses were measured."""
    rows = of_integers(rows)
    sizes = {row["peer"]: row["size"] for row in rows if row["progress"] == 0}
    return [row for row in rows if row["size"] == sizes.get(row["peer"])]


def told_resume(rows: Sequence[Row]) -> str:
    progressing = at_progress(rows)
    progress = [each for each in dict.fromkeys(row["progress"] for row in progressing) if each in (0, 0.5, 0.99)]
    samples = {row["peer"]: f"{row['size']:,}" for row in progressing}
    lines = pivot(progressing, progress, lambda row: row["progress"], first_batch_cell)
    lines = [[line[0], samples[line[0]], *line[1:]] for line in lines]
    return table(
        "Time to the first batch after a resume, at so much of the epoch",
        ["peer", "samples", *(f"{each:.0%}" for each in progress)], labelled(lines),
    )  # fmt: skip


def at_90(rows: Sequence[Row]) -> list[Row]:
    return [row for row in of_integers(rows) if row["progress"] == 0.9]


def told_sizes(rows: Sequence[Row]) -> str:
    sizes = sorted({row["size"] for row in at_90(rows)})
    sizes = sizes[:-1:2] + sizes[-1:]
    lines = labelled(pivot(at_90(rows), sizes, lambda row: row["size"], first_batch_cell))
    return table("The same at 90 %, of so many samples", ["peer", *(f"{each:,}" for each in sizes)], lines)


def told_state(rows: Sequence[Row]) -> str:
    sizes = sorted({size for row in rows for size in row["more_mib"]}, key=int)
    head = ["peer", "bytes", "µs to save", *(f"MiB more at {int(size):,}" for size in sizes)]
    lines = []
    for row in rows:
        why = row["why"] if row["why"] == NOT_WRITTEN else f"not measured: {row['why']}"
        measured = [f"{row['bytes']:,}", f"{row['microseconds']:.3g}"] if row["form"] else [why] * 2
        more = [f"{row['more_mib'][size]:.0f}" if size in row["more_mib"] else why for size in sizes]
        lines.append([label(row["peer"], resumed=True), *measured, *more])
    return table(
        "Size of a state, time to save it, and extra peak memory compared with the smallest data set",
        head,
        lines,
        "Accelerate writes its files, generators included.",
    )


def told_exactness(rows: Sequence[Row], samples: int) -> str:
    lines = pivot(rows, list(QUESTIONS), lambda row: row["question"], lambda row: str(row["verdict"]))
    title = f"What becomes of an epoch of {samples:,} samples, cut at 40 % and continued"
    return table(title, ["peer", *QUESTIONS.values()], labelled(lines))


def told_boring(rows: list[Row]) -> str:
    from loader import boring_table

    return f"{boring_table(rows)}\n"


def told_plan(made: Row) -> str:
    def told(value: Any) -> str:
        if isinstance(value, list):
            return (" and " if any(isinstance(each, list) for each in value) else " ").join(map(told, value))
        return f"{value:,}" if isinstance(value, int) else str(value)

    units = {"limit": " s", "memory": " GiB"}
    return "; ".join(
        f"{name.replace('_', ' ')} {told(value)}{units.get(name, '')}" for name, value in made["plan"].items()
    )


def told_made(made: Row) -> str:
    """With what, when, from which commit and by which plan each question was measured."""
    some = next(iter(made.values()))
    versions = {name: version for each in made.values() for name, version in each["versions"].items()}
    machine: Row = {name: value for each in made.values() for name, value in each["machine"].items()}
    model = f"{machine['processor']}, " if machine.get("processor") else ""
    lines = []
    for question, each in made.items():
        lines.append(f"| {question} | {each['date']} | {each['commit']} | {told_plan(each)} |")
        lines += [
            f"| {question}, {label(name)} | {later['date']} | {later['commit']} | the same |"
            for name, later in each.get("later", {}).items()
        ]
    said = [
        f"Python {some['python']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; {model}{machine['cores']} cores, {machine['memory_gib']} GiB of memory, {machine['gpu']}.",
        "\n".join(["| question | on | at commit | plan |", "| --- | --- | --- | --- |", *lines]),
    ]
    return "\n\n".join(said) + "\n"


def markdown(results: Row) -> str:
    """A sentence of result over each chart, and its table."""
    made = {question: results["made"][question] for question in MEASURED if question in results["made"]}
    said: list[str] = []

    def chapter(title: str, sentence: str, chart: str, *tables: str) -> None:
        picture = f"![{title}]({chart}.png)\n" if chart else ""
        said.extend([f"## {title}\n", *filter(None, (sentence and f"{sentence}\n", picture, *tables))])

    if rows := results.get("overhead"):
        chapter("What a batch costs", first_overhead(rows), "overhead", told_overhead(rows))
    if rows := results.get("first_batch"):
        chapter("Time to the first batch", first_resume(rows), "first_batch_progress", told_resume(rows))
        chapter("Any number of samples", first_size(at_90(rows)), "first_batch_size", told_sizes(rows))
    if rows := results.get("state"):
        chapter("States", first_state(rows), "", told_state(rows))
    if rows := results.get("exactness"):
        samples = made["exactness"]["plan"]["samples"]
        chapter("Exactness", first_exactness(rows), "", told_exactness(rows, samples))
    if rows := results.get("boring"):
        chapter("Lightning's BoringModel", "", "", told_boring(rows))
    return "\n".join([*said, "Measured with:\n", told_made(made)])


def is_ours(name: str) -> bool:
    return name.startswith("midepoch")


# --- plots -----------------------------------------------------------------------------------------------------------


def style(names: Sequence[str]) -> dict[str, Row]:
    """midepoch's lines in one strong colour, the others pale, each with a marker of its own."""
    import matplotlib

    pale = iter(matplotlib.colormaps["tab20"].colors[::2] * 2)  # type: ignore[attr-defined]
    markers = dict(zip(PEERS, "os^v<>PX^*Dpvho", strict=True))
    strong = {"color": "#c2185b", "linewidth": 2.5, "zorder": 3, "markersize": 8, "markerfacecolor": "white"}
    return {
        name: {"marker": markers[name], "label": label(name, resumed=True)}
        | (strong if is_ours(name) else {"color": next(pale), "linewidth": 1.2, "markersize": 5, "alpha": 0.7})
        for name in names
    }


def plot_lines(rows: Sequence[Row], key: str, limit: float, title: str, label: str, path: Path) -> None:
    """Where a peer first met a limit, that stands at the limit's height, with a dotted line to it."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    met: Counter[float] = Counter()
    for name, look in style(list(dict.fromkeys(row["peer"] for row in rows))).items():
        points = sorted((row[key], row["seconds"]) for row in rows if row["peer"] == name and row["seconds"])
        if points:
            axes.plot(*zip(*points, strict=True), **look)
        limits = [row for row in rows if row["peer"] == name and row["why"].startswith("more than")]
        if limits:
            first = min(limits, key=lambda row: float(row[key]))
            dotted = [*points[-1:], (first[key], limit)]
            axes.plot(*zip(*dotted, strict=True), ":", color=look["color"], linewidth=look["linewidth"])
            said, above = first["why"].replace("more than", ">"), 1.5 ** met[first[key]]  # what is said there already
            axes.text(first[key], limit * above, said, color=look["color"], ha="center", va="bottom", fontsize=8)
            met[first[key]] += 1
    if key == "size":
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set(yscale="log", xlabel=label, ylabel="seconds to the first batch", title=title)
    if met:
        axes.set_ylim(top=limit * 1.5 ** (max(met.values()) + 1))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_overhead(rows: Sequence[Row], path: Path) -> None:
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["peer"] for row in rows))[::-1]
    works = list(dict.fromkeys(row["work"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(works), figsize=(2 + 4 * len(works), 1.5 + 0.4 * len(names)), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, work in zip(panels[0], works, strict=True):
        for workers, shift, alpha in ((0, 0.2, 1.0), (2, -0.2, 0.5)):
            for row in (row for row in rows if (row["work"], row["workers"]) == (work, workers)):
                colour = "#c2185b" if is_ours(row["peer"]) else "#78909c"
                bar = axes.barh(names.index(row["peer"]) + shift, row["microseconds"], 0.38, color=colour, alpha=alpha)
                axes.bar_label(bar, fmt="{:,.0f}", padding=2, fontsize=7)
        values = [row["microseconds"] for row in rows if row["work"] == work]
        axes.set(
            xscale="log",
            xlim=(10 ** math.floor(math.log10(min(values))), 3 * max(values)),
            xlabel="µs a batch of 32",
            title=f"{work} (above: no workers; below, pale: 2)",
        )
        axes.set_yticks(range(len(names)), map(label, names))
        axes.xaxis.set_minor_formatter("")
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot(results: Row, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    if first_batch := results.get("first_batch"):
        limit = results["made"]["resume"]["plan"]["limit"]
        sizes = sorted({row["size"] for row in at_progress(first_batch)}, reverse=True)
        plot_lines(
            at_progress(first_batch), "progress", limit,
            f"First batch after a resume ({sizes[0]:,} samples; {sizes[-1]:,} where there are files)",
            "of the epoch", folder / "first_batch_progress.png",
        )  # fmt: skip
        plot_lines(
            [row for row in of_integers(first_batch) if row["progress"] == 0.9], "size", limit,
            "First batch after a resume at 90 %", "samples", folder / "first_batch_size.png",
        )  # fmt: skip
    if overhead := results.get("overhead"):
        plot_overhead(overhead, folder / "overhead.png")


# --- all of it -------------------------------------------------------------------------------------------------------


def boring(names: Sequence[str], plan: Plan) -> list[Row]:
    from loader import boring

    tell("boring")
    return boring(*plan.boring)


@dataclass(frozen=True)
class Question:
    """What can be measured by itself.

    Attributes:
        key: of the rows in results.json.
        plan: the parts of the plan that the answer depends on.
        distributions: whose versions it depends on; None for those of the peers that are asked.
    """

    key: str
    measure: Callable[[Sequence[str], Plan], list[Row]]
    plan: tuple[str, ...]
    distributions: tuple[str, ...] | None = None


LIMITS = ("limit", "memory")
LESS_TO_CHECK: Row = {"progress": (0, 0.9), "sizes": (), "pictures": 0}
"""What no ratio is made of."""
MEASURED: dict[str, Question] = {
    "overhead": Question("overhead", overhead, ("rounds", "stretches", "seconds", "batches")),
    "resume": Question(
        "first_batch", resume,
        ("repeats", "progress", "memory_size", "file_size", "pictures", "sizes", *LIMITS),
    ),
    "state": Question("state", state, ("state_sizes", *LIMITS)),
    "exactness": Question("exactness", exactness, ("samples", *LIMITS)),
    "boring": Question("boring", boring, ("boring",), ("torchdata", "lightning")),
}  # fmt: skip


def distributions(question: str, names: Sequence[str]) -> list[str]:
    theirs = MEASURED[question].distributions
    if theirs is None:
        theirs = tuple(each for name in names for each in PEERS[name].distributions)
    return list(dict.fromkeys(["torch", "midepoch", *theirs]))


def installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


def conditions(question: str, names: Sequence[str], plan: Plan) -> Row:
    """What must be alike in all answers of one page."""
    found: Row = {
        "python": platform.python_version(),
        "versions": {each: importlib.metadata.version(each) for each in distributions(question, names)},
        "machine": {
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "gpu": "a GPU" if shutil.which("nvidia-smi") else "no GPU",
            "processor": processor(),
        },
        "plan": {name: getattr(plan, name) for name in MEASURED[question].plan},
    }
    return dict(json.loads(json.dumps(found)))  # as it is read again


def commit() -> str:
    """Of this file's clone, and whether that has changes; "unknown" where it is none."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def measure(names: Sequence[str], questions: Sequence[str], plan: Plan) -> Row:
    """The rows of each question, and under "made" how each came about."""
    results: Row = {"made": {}}
    for question in (each for each in MEASURED if each in questions):
        when = {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
        results[MEASURED[question].key] = [settled(row) for row in MEASURED[question].measure(names, plan)]
        results["made"][question] = when | conditions(question, names, plan)
    return results


def settled(row: Row) -> Row:
    """A row, with the settings of its peer that are not the peer's defaults."""
    settings = PEERS[row["peer"]].settings if row["peer"] in PEERS else ""
    return row | {"settings": settings} if settings else row


class Unlike(Exception):  # noqa: N818  # an answer
    """What lies in a folder was not measured as what is to be measured now; says which, and in what they differ."""


def differing(made: Row, now: Row) -> list[str]:
    """In what two answers differ. Of versions and machines, what both name is compared: an older answer names less."""

    def alike(what: str) -> bool:
        mine, theirs = now[what], made.get(what)
        if what in ("versions", "machine") and theirs:
            return all(theirs.get(name, value) == value for name, value in mine.items())
        return bool(mine == theirs)

    return [what for what in now if not alike(what)]


def kept(folder: Path, questions: Sequence[str], names: Sequence[str], plan: Plan) -> Row:
    """The answers to other questions that are in a folder, all measured as these will be."""
    path = folder / "results.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    found: Row = {"made": {}}
    for question, kind in MEASURED.items():
        if question in questions or not before.get(kind.key):
            continue
        made, now = before.get("made", {}).get(question, {}), conditions(question, names, plan)
        if others := differing(made, now):
            raise Unlike(f"the answer to {question} in {path} was measured with another {', '.join(others)}")
        found[kind.key] = before[kind.key]
        found["made"][question] = made
    return found


def together(kept: Row, measured: Row) -> Row:
    """In the order of the questions, however they came about."""
    made = kept["made"] | measured["made"]
    return kept | measured | {"made": {question: made[question] for question in MEASURED if question in made}}


def merged(before: Row, measured: Row) -> Row:
    """The rows of some peers in place of those that there were; "later" has when each of them was measured."""
    places = {name: place for place, name in enumerate(PEERS)}
    found: Row = {"made": dict(measured["made"])}
    for question, made in measured["made"].items():
        key = MEASURED[question].key
        again = dict.fromkeys(row["peer"] for row in measured[key])
        others = [row for row in before.get(key, []) if row["peer"] not in again]
        found[key] = sorted([*others, *measured[key]], key=lambda row: places.get(row["peer"], 0))
        if others:
            then = before["made"][question]
            later = {name: {"date": made["date"], "commit": made["commit"]} for name in again}
            found["made"][question] = then | {"later": then.get("later", {}) | later}
    return together(before, found)


def grown(now: Interval, published: Interval) -> bool:
    """Whether a ratio is more than 10 % above the published one, and above it beyond the errors of both together."""
    growth = math.log(now.middle / published.middle)
    errors = (math.log(each.high / each.middle) for each in (now, published))
    return growth > max(math.log(1.1), math.hypot(*errors))


def ratios(results: Row, names: Sequence[str], questions: Sequence[str]) -> dict[str, Interval]:
    """All that there are of these peers, by what they are ratios of; results may be of an older form."""
    found: dict[str, Interval | None] = {}
    for row in results.get("overhead", []) if "overhead" in questions else ():
        if row["peer"] in names and {"base", "ratio", "low", "high"} <= row.keys():
            what = f"{row['peer']}, {row['work']}, {row['workers']} workers, time a batch to that of {row['base']}"
            found[what] = Interval(row["ratio"], row["low"], row["high"])
    for name in names if "resume" in questions else ():
        rows = results.get("first_batch", [])
        found[f"{name}, first batch at 90 % to that at 0 %"] = resume_ratio(rows, name)
        found[f"{name}, first batch at 0 % to that of {PEERS[name].base}"] = begin_ratio(rows, name)
    return {what: ratio for what, ratio in found.items() if ratio is not None}


def verdicts(results: Row, names: Sequence[str], questions: Sequence[str]) -> dict[str, str]:
    return {
        f"{row['peer']}, {QUESTIONS[row['question']]}": row["verdict"]
        for row in (results.get("exactness", []) if "exactness" in questions else ())
        if row["peer"] in names and row["question"] in QUESTIONS
    }


def worse(published: Row, now: Row, names: Sequence[str], questions: Sequence[str]) -> list[str]:
    """What midepoch does worse than published: ratios by more than 10 %, and other verdicts.

    What was published and could not be measured is worse, too.
    """
    found = []
    told, before = ratios(now, names, questions), ratios(published, names, questions)
    for what, old in before.items():
        if what not in told:
            found.append(f"{what}: not measured, published as {old}")
        elif grown(told[what], old):
            found.append(f"{what}: {told[what]}, published as {old}")
    answers = verdicts(now, names, questions)
    for what, answer in verdicts(published, names, questions).items():
        if answers.get(what) != answer:
            found.append(f"{what}: {answers.get(what, 'not measured')}, published as {answer}")
    return found


def beyond_comparison(published: Row, now: Row, names: Sequence[str], questions: Sequence[str]) -> list[str]:
    """What was measured and was not published, or was published with another plan."""
    found = []
    for question in questions:
        plan = published.get("made", {}).get(question, {}).get("plan")
        theirs = now["made"][question]["plan"]
        if plan is None:
            found.append(f"{question}: what was published does not say by which plan")
            continue
        alike = {"rounds", "repeats", *LESS_TO_CHECK}
        if differing := [name for name in theirs if name not in alike and plan.get(name) != theirs[name]]:
            found.append(f"{question}: published with another {', '.join(differing)}")
    for of in (ratios, verdicts):
        before = of(published, names, questions)
        found += [f"{what}: {told}, not published" for what, told in of(now, names, questions).items()
                  if what not in before]  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="peers, with commas between them")
    parser.add_argument("--question", action="append", choices=MEASURED, help="may be given several times")
    parser.add_argument("--rounds", type=int, help="of the overhead, at least 3")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it works, not how fast it is")
    parser.add_argument("--check", action="store_true", help="whether midepoch's ratios are as published")
    parser.add_argument("--render", action="store_true", help="the page and the plots, from the results that there are")
    parser.add_argument("--output", type=Path, help=f"folder, by default {OUTPUT}")
    parser.add_argument("--time-limit", type=float, help="seconds for a first batch")
    parser.add_argument("--memory-limit", type=float, help="GiB of data for a process")
    options = parser.parse_args()
    plan, names = QUICK if options.quick else Plan(), list(PEERS)
    if options.only:
        names = [name.strip() for name in options.only.split(",")]
    if unknown := set(names) - set(PEERS):
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    if options.rounds is not None and options.rounds < 3:
        parser.error("--rounds must be at least 3: fewer have no interval worth the name")
    published = (options.output or OUTPUT) / "results.json"
    if options.render:
        write(json.loads(published.read_text()), published.parent)
        return
    questions = options.question or (["overhead", "resume", "exactness"] if options.check else list(MEASURED))
    if options.check:
        if unchecked := set(questions) - {"overhead", "resume", "exactness"}:
            parser.error(f"--check has nothing to compare for {', '.join(sorted(unchecked))}")
        if not any(map(is_ours, names)):
            parser.error("--check compares what midepoch does: name one of its loaders with --only, or none")
        if not published.exists():
            parser.error(f"there is no {published} to compare with: make bench writes it")
        plan = replace(plan, repeats=min(plan.repeats, 5), **LESS_TO_CHECK)
    stated = {"rounds": options.rounds, "limit": options.time_limit, "memory": options.memory_limit}
    plan = replace(plan, **{key: value for key, value in stated.items() if value is not None})
    needed = {each for question in questions for each in distributions(question, with_bases(names))}
    if missing := sorted(filterfalse(installed, needed)):
        parser.error(f"not installed: {', '.join(missing)} (pip install midepoch[peers], or name others with --only)")
    if options.check:
        before, ours = json.loads(published.read_text()), [name for name in names if is_ours(name)]
        now = measure(ours, [each for each in questions if each != "resume"], plan)
        if "resume" in questions:
            now = together(now, measure(with_bases(ours), ["resume"], plan))
        for line in beyond_comparison(before, now, ours, questions):
            print(f"not compared: {line}")
        found = worse(before, now, ours, questions)
        print("\n".join(found) or "no ratio is worse than published")
        sys.exit(bool(found))
    complete = not (options.only or options.question or options.quick)
    folder = options.output or (OUTPUT if complete else None)
    join = merged if options.only else together
    try:
        before = {"made": {}}
        if folder is not None:
            before = kept(folder, () if options.only else questions, with_bases(names), plan)
    except Unlike as why:
        parser.error(f"{why}: choose an empty folder, or measure all of it again")
    results = join(before, measure(names, questions, plan))
    print(markdown(results))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        write(results, folder)


def write(results: Row, folder: Path) -> None:
    """Into the page of that folder, or where there is none into a file of its own."""
    page = folder / "index.md"
    if page.exists():
        page.write_text(replaced(page, "comparison", markdown(results)))
    else:
        (folder / "results.md").write_text(markdown(results))
    plot(results, folder)


if __name__ == "__main__":
    main()
