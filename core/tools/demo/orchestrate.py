"""Starts training jobs under torchrun, kills their processes with SIGKILL, and starts them again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from .backends import BACKENDS
from .compare import Comparison, Run, Segment, read_events, read_segment
from .images import AVAILABLE, write_images

__all__ = ["DemoError", "Kill", "Result", "Schedule", "Settings", "Watch", "execute", "make_schedules", "prepare"]

_MARKER = ".midepoch-demo"
_TOKEN = "MIDEPOCH_DEMO_JOB"  # an environment variable by which all processes of one job are found
_LONGEST_SILENCE = 180.0  # seconds without a new batch; a start on a loaded machine takes some tens
_LONGEST_GOODBYE = 20.0  # seconds until processes whose training is complete are gone by themselves
_LONGEST_DEATH = 60.0  # seconds until torchrun has noticed that one of its processes is gone
_POLL = 0.005  # seconds; a batch takes longer
_GLOBAL_BATCH = 24  # samples, or the next larger number that all world sizes divide
_BETWEEN_KILLS = 3  # steps at least, and before the first
_AFTER_KILLS = 15  # steps at least after the last: the job runs on until the signal is there, and must not finish


class DemoError(Exception):
    """The demonstration could not be carried out. This says nothing about midepoch."""


@dataclass(frozen=True)
class Settings:
    """What to demonstrate.

    Args:
        output: folder for images, logs, snapshots and results.
        backend: a name in `BACKENDS`.
        kills: in each run that is not the uninterrupted one.
        world_sizes: processes of each segment of a run, over and over.
        epochs: to train for.
        seed: of order, augmentations, weights and kills.
        num_workers: worker processes of each loader.
        every: batches between two snapshots.
        images: wanted; `image_count` is how many there are.
        loader_state: False leaves the loader's state out when a run goes on, to see what is found then.

    Raises:
        ValueError: an argument is out of range.
    """

    output: Path
    backend: str = "torch"
    kills: int = 3
    world_sizes: tuple[int, ...] = (2, 3, 1)
    epochs: int = 2
    seed: int = 0
    num_workers: int = 2
    every: int = 4
    images: int = 1440
    loader_state: bool = True

    def __post_init__(self) -> None:
        if not self.world_sizes or not all(1 <= size <= 16 for size in self.world_sizes):
            raise ValueError(f"world sizes must be in [1, 16], got {self.world_sizes}")
        for name, least in (("kills", 0), ("epochs", 1), ("seed", 0), ("num_workers", 0), ("every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.global_batch <= self.images <= AVAILABLE:
            raise ValueError(f"images must be in [{self.global_batch}, {AVAILABLE}], got {self.images}")
        needed = (_BETWEEN_KILLS + 1) * self.kills + _AFTER_KILLS
        if self.kills and self.steps < needed:
            raise ValueError(f"{self.kills} kills need {needed} batches, there are {self.steps}: add epochs or images")

    @property
    def global_batch(self) -> int:
        """Samples of all ranks together at one step; every world size divides it."""
        least = math.lcm(*self.world_sizes)
        return least * -(-_GLOBAL_BATCH // least)

    @property
    def image_count(self) -> int:
        """A multiple of the global batch, so that an epoch is every image once on any number of processes."""
        return self.images // self.global_batch * self.global_batch

    @property
    def steps(self) -> int:
        """Of the optimizer, in all epochs."""
        return self.image_count // self.global_batch * self.epochs


@dataclass(frozen=True)
class Kill:
    """When and whom.

    Attributes:
        step: as soon as rank 0 has read the batch of this step.
        rank: one process; None for torchrun and all of its processes at once.
    """

    step: int
    rank: int | None

    @property
    def whom(self) -> str:
        """In words."""
        return "all processes" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class Schedule:
    """A run: its kills, and the number of processes before the first kill and after each."""

    name: str
    world_sizes: tuple[int, ...]
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        sizes = " -> ".join(map(str, self.world_sizes))
        kills = ", ".join(f"{kill.whom} at batch {kill.step}" for kill in self.kills)
        return f"{self.name}: processes {sizes}; SIGKILL to {kills or 'nobody'}"


def make_schedules(settings: Settings) -> list[Schedule]:
    """The uninterrupted run, one killed on the same number of processes, and one killed on changing numbers.

    The kills follow from the seed.
    """
    generator = random.Random(settings.seed)
    first, segments = settings.world_sizes[0], settings.kills + 1
    schedules = [Schedule("uninterrupted", (first,), ())]
    cycled = tuple(settings.world_sizes[segment % len(settings.world_sizes)] for segment in range(segments))
    for name, sizes in (("same world", (first,) * segments), ("other worlds", cycled)):
        if sizes != schedules[-1].world_sizes:
            schedules.append(Schedule(name, sizes, _random_kills(settings, sizes, generator)))
    return schedules


def _random_kills(settings: Settings, world_sizes: Sequence[int], generator: random.Random) -> tuple[Kill, ...]:
    if not settings.kills:
        return ()
    free = settings.steps - _AFTER_KILLS - _BETWEEN_KILLS * settings.kills
    steps = sorted(generator.sample(range(free), settings.kills))
    return tuple(
        Kill(
            step + _BETWEEN_KILLS * (place + 1),
            generator.choice((None, generator.randrange(world_sizes[place]))),
        )
        for place, step in enumerate(steps)
    )


@dataclass(frozen=True)
class Result:
    """A schedule and what came of it."""

    schedule: Schedule
    run: Run
    comparison: Comparison


@dataclass(frozen=True)
class Watch:
    """Callbacks: `step(schedule, step)` when a batch has begun, `say(text)` for a line of text."""

    step: Callable[[Schedule, int], None]
    say: Callable[[str], None]


def prepare(settings: Settings) -> None:
    """Make the output folder, clear it of an earlier demonstration, and write the images.

    Raises:
        DemoError: it holds something else.
    """
    if not Path("/proc/self/environ").exists():
        raise DemoError("the demonstration finds its processes through /proc: run it on Linux")
    output = settings.output
    marker = output / _MARKER
    if output.exists() and not marker.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DemoError(f"{output} holds something that is not of this demonstration: choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    marker.touch()
    for name in ("images", "runs"):
        if (output / name).exists():
            shutil.rmtree(output / name)
    for name in ("result.json", "loss.png"):
        (output / name).unlink(missing_ok=True)
    write_images(output / "images", settings.image_count)
    BACKENDS[settings.backend].prepare(output / "images")


def execute(settings: Settings, schedules: Sequence[Schedule], watch: Watch) -> list[Result]:
    """Carry out the schedules one after the other and compare each run with the first.

    Raises:
        DemoError: a job ended by itself, or came to nothing within its time.
    """
    folders = [settings.output / "runs" / str(place) for place in range(len(schedules))]
    runs = [_carry_out(settings, *each, watch) for each in zip(schedules, folders, strict=True)]
    return [
        Result(schedule, run, Comparison(run, runs[0], settings.image_count, settings.epochs))
        for schedule, run in zip(schedules, runs, strict=True)
    ]


def _carry_out(settings: Settings, schedule: Schedule, folder: Path, watch: Watch) -> Run:
    segments: list[Segment] = []
    for place, world_size in enumerate(schedule.world_sizes):
        kill = schedule.kills[place] if place < len(schedule.kills) else None
        log = folder / f"segment-{place}"
        log.mkdir(parents=True)
        with _Job(settings, folder / "snapshot.pt", log, world_size) as job:
            remark = job.run(kill, lambda step: watch.step(schedule, step))
        if remark is not None:
            watch.say(f"{schedule.name}: {remark}; see {log / 'torchrun.log'}")
        segment = read_segment(log, world_size, job.started)
        segments.append(segment)
        if kill is not None:
            step = segment.reached
            watch.say(
                f"{schedule.name}: SIGKILL to {kill.whom} of {world_size} at batch {step} of {settings.steps}; "
                f"going on with {schedule.world_sizes[place + 1]}"
            )
    return Run(segments)


class _Job:
    """One torchrun and all that it starts. Leaving the context ends all of it."""

    def __init__(self, settings: Settings, snapshot: Path, log: Path, world_size: int) -> None:
        self._log, self._world_size = log, world_size
        self._token = uuid.uuid4().hex
        self._output = log / "torchrun.log"
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={world_size}"),
            # Not --standalone, nor torchrun's own store: gloo does not find its peers again after a restart there.
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_free_port()}", f"--rdzv-id={self._token}"),
            *("--local-addr=127.0.0.1", "--max-restarts=0", "-m", f"{__package__}.train"),
            *(f"--images={settings.output / 'images'}", f"--snapshot={snapshot}", f"--records={log}"),
            *(f"--backend={settings.backend}", f"--global-batch={settings.global_batch}"),
            *(f"--epochs={settings.epochs}", f"--seed={settings.seed}", f"--every={settings.every}"),
            f"--num-workers={settings.num_workers}",
            *(() if settings.loader_state else ("--no-loader-state",)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.started = 0.0  # seconds since 1970

    def start(self) -> subprocess.Popen[bytes]:
        """Start torchrun."""
        left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment |= {
            _TOKEN: self._token,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        self.started = time.time()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: we end it
            )
        return self._process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill_all()

    def run(self, kill: Kill | None, progress: Callable[[int], None]) -> str | None:
        """Start, and wait until the training is complete, or until it is time to kill it, and do so.

        Returns:
            How the processes ended, if they did not do so as they should after the training was complete: gloo takes
            itself down in the background, which is no part of the training.
        """
        process = self.start()
        read = _Follower(self._log / "rank-0.jsonl")
        heard = time.monotonic()
        while process.poll() is None:
            step = read.newest_step()
            if step is not None:
                heard = time.monotonic()
                progress(step)
                if kill is not None and step >= kill.step:
                    self._kill(kill, process)
                    return None
            silence = time.monotonic() - heard
            if read.ended and silence > _LONGEST_GOODBYE and self._complete():
                return f"the processes were still there {_LONGEST_GOODBYE:.0f} s after the training was complete"
            if silence > _LONGEST_SILENCE:
                raise DemoError(f"no batch for {_LONGEST_SILENCE:.0f} s; {self._last_words()}")
            time.sleep(_POLL)
        step = read.newest_step()
        if step is not None:
            progress(step)
        if not self._complete():
            raise DemoError(f"torchrun ended with status {process.returncode}; {self._last_words()}")
        if kill is not None:
            raise DemoError(f"the job was over before batch {kill.step}, at which it was to be killed: add epochs")
        if process.returncode != 0:
            return f"torchrun ended with status {process.returncode} after the training was complete"
        return None

    def _complete(self) -> bool:
        """Every rank has written that it came to the end."""
        logs = [read_events(self._log / f"rank-{rank}.jsonl") for rank in range(self._world_size)]
        return all(log and log[-1]["event"] == "end" for log in logs)

    def _kill(self, kill: Kill, process: subprocess.Popen[bytes]) -> None:
        if kill.rank is None:
            self._kill_all()
            return
        started = read_events(self._log / f"rank-{kill.rank}.jsonl")[0]
        os.kill(started["pid"], signal.SIGKILL)
        try:
            # torchrun notices, and ends the other ranks.
            process.wait(_LONGEST_DEATH)
        except subprocess.TimeoutExpired:
            raise DemoError(
                f"torchrun did not notice within {_LONGEST_DEATH:.0f} s that rank {kill.rank} was killed; "
                f"{self._last_words()}"
            ) from None

    def _kill_all(self) -> None:
        """SIGKILL every process of this job until none is left: the next job must be the only writer."""
        deadline = time.monotonic() + _LONGEST_DEATH
        while left := _processes_with(self._token):
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise DemoError(f"processes {left} do not die: look at them with ps, and kill them by hand")
            time.sleep(_POLL)
        if self._process is not None:
            self._process.wait()

    def _last_words(self) -> str:
        text = self._output.read_text(encoding="utf-8", errors="replace")
        return f"the end of {self._output} says:\n{text[-3000:]}"


class _Follower:
    """Reads a growing log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.ended = False  # there will be no more batches

    def newest_step(self) -> int | None:
        """Of the batches written since the last call; None if there is none."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return None
        if not whole:
            return None
        self._offset += len(whole) + 1
        events = [json.loads(line) for line in whole.split(b"\n")]
        self.ended = events[-1]["event"] == "end"
        return max((int(event["step"]) for event in events if event["event"] == "batch"), default=None)


def _processes_with(token: str) -> list[int]:
    """Processes with the token in their environment, which children inherit even if they are orphaned."""
    entry = f"{_TOKEN}={token}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            environment = (process / "environ").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # gone, or somebody else's
        if entry in environment.split(b"\0"):
            found.append(int(process.name))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
