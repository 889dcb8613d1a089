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

__all__ = ["DemoError", "Kill", "Result", "Scenario", "Settings", "Watch", "execute", "make_scenarios", "prepare"]

_MARKER = ".midepoch-demo"
_ABOVE = str(Path(__file__).parents[1])
_TOKEN = "MIDEPOCH_DEMO_JOB"  # an environment variable that identifies all processes of one job
_LONGEST_SILENCE = 180.0  # seconds without a new batch; a start on a loaded machine takes some tens
_LONGEST_GOODBYE = 20.0  # seconds for processes to end by themselves after the training is complete
_LONGEST_DEATH = 60.0  # seconds for torchrun to notice that one of its processes was killed
_POLL = 0.005  # seconds; a batch takes longer
_GLOBAL_BATCH = 24  # samples, or the next larger number that all world sizes divide
_BETWEEN_KILLS = 3  # least number of steps between kills, and before the first
_AFTER_KILLS = 15  # least number of steps after the last kill: the job runs on for a moment, and must not finish


class DemoError(Exception):
    """The demonstration could not be carried out. This says nothing about its outcome."""


@dataclass(frozen=True)
class Settings:
    """What to demonstrate.

    Args:
        output: folder for images, logs, snapshots and results.
        backend: a name in `BACKENDS`.
        kills: number of kills in each interrupted run.
        world_sizes: number of processes of each segment of a run, repeated in a cycle.
        epochs: number of epochs to train.
        seed: of order, augmentations, weights and kills.
        num_workers: worker processes of each loader.
        every: batches between two snapshots.
        images: number of images wanted; `image_count` is the actual number.
        loader_state: False does not load the loader's state after a kill, to show what goes wrong.

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
        """Number of samples of all ranks together at one step. Every world size divides it."""
        least = math.lcm(*self.world_sizes)
        return least * -(-_GLOBAL_BATCH // least)

    @property
    def image_count(self) -> int:
        """A multiple of the global batch, so that an epoch has every image once on any number of processes."""
        return self.images // self.global_batch * self.global_batch

    @property
    def steps(self) -> int:
        """Number of optimizer steps in all epochs."""
        return self.image_count // self.global_batch * self.epochs


@dataclass(frozen=True)
class Kill:
    """When to kill, and whom.

    Attributes:
        step: kill as soon as rank 0 has read the batch of this step.
        rank: one process; None for torchrun and all of its processes at once.
    """

    step: int
    rank: int | None

    @property
    def whom(self) -> str:
        """As text."""
        return "all processes" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class Scenario:
    """A run to demonstrate. After each kill it continues with the next number of processes."""

    name: str
    world_sizes: tuple[int, ...]
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        sizes = " -> ".join(map(str, self.world_sizes))
        kills = ", ".join(f"{kill.whom} at batch {kill.step}" for kill in self.kills)
        return f"{self.name}: processes {sizes}; SIGKILL to {kills or 'nobody'}"


def make_scenarios(settings: Settings) -> list[Scenario]:
    """An uninterrupted run, one killed on a fixed number of processes, and one killed on changing numbers.

    The seed determines the kills.
    """
    generator = random.Random(settings.seed)
    first, segments = settings.world_sizes[0], settings.kills + 1
    scenarios = [Scenario("uninterrupted", (first,), ())]
    cycled = tuple(settings.world_sizes[segment % len(settings.world_sizes)] for segment in range(segments))
    for name, sizes in (("same world", (first,) * segments), ("other worlds", cycled)):
        if sizes != scenarios[-1].world_sizes:
            scenarios.append(Scenario(name, sizes, _random_kills(settings, sizes, generator)))
    return scenarios


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
    """A scenario and its outcome."""

    scenario: Scenario
    run: Run
    comparison: Comparison


@dataclass(frozen=True)
class Watch:
    """Callbacks: `step` gets the step of each batch that has begun, `say` a line of text."""

    step: Callable[[Scenario, int], None]
    say: Callable[[str], None]


def prepare(settings: Settings) -> None:
    """Create the output folder, clear it of an earlier demonstration, and write the images.

    Raises:
        DemoError: it contains other files.
    """
    if not Path("/proc/self/environ").exists():
        raise DemoError("the demonstration finds its processes through /proc: run it on Linux")
    output = settings.output
    marker = output / _MARKER
    if output.exists() and not marker.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DemoError(f"{output} contains files that are not of this demonstration: choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    marker.touch()
    for name in ("images", "runs"):
        if (output / name).exists():
            shutil.rmtree(output / name)
    for name in ("result.json", "loss.png"):
        (output / name).unlink(missing_ok=True)
    write_images(output / "images", settings.image_count)
    BACKENDS[settings.backend].prepare(output / "images")


def execute(settings: Settings, scenarios: Sequence[Scenario], watch: Watch) -> list[Result]:
    """Run the scenarios one after another and compare each run with the first.

    Raises:
        DemoError: a job ended by itself, or did not finish in time.
    """
    runs = [
        _carry_out(settings, scenario, settings.output / "runs" / str(number), watch)
        for number, scenario in enumerate(scenarios)
    ]
    return [
        Result(scenario, run, Comparison(run, runs[0], settings.image_count, settings.epochs))
        for scenario, run in zip(scenarios, runs, strict=True)
    ]


def _carry_out(settings: Settings, scenario: Scenario, folder: Path, watch: Watch) -> Run:
    segments: list[Segment] = []
    for place, world_size in enumerate(scenario.world_sizes):
        kill = scenario.kills[place] if place < len(scenario.kills) else None
        log = folder / f"segment-{place}"
        log.mkdir(parents=True)
        with _Job(settings, folder / "snapshot.pt", log, world_size) as job:
            remark = job.run(kill, lambda step: watch.step(scenario, step))
        if remark is not None:
            watch.say(f"{scenario.name}: {remark}; see {log / 'torchrun.log'}")
        segment = read_segment(log, world_size, job.started)
        segments.append(segment)
        if kill is not None:
            step = segment.reached
            watch.say(
                f"{scenario.name}: SIGKILL to {kill.whom} of {world_size} at batch {step} of {settings.steps}; "
                f"resuming with {scenario.world_sizes[place + 1]}"
            )
    return Run(segments)


class _Job:
    """One torchrun and all that it starts. Leaving the context ends all of its processes."""

    def __init__(self, settings: Settings, snapshot: Path, log: Path, world_size: int) -> None:
        self._log, self._world_size = log, world_size
        self._token = uuid.uuid4().hex
        self._output = log / "torchrun.log"
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={world_size}"),
            # Neither --standalone nor torchrun's own store works: gloo does not find its peers again after a restart.
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
            "PYTHONPATH": os.pathsep.join(filter(None, (_ABOVE, os.environ.get("PYTHONPATH")))),
        }
        self.started = time.time()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the job
            )
        return self._process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill_all()

    def run(self, kill: Kill | None, progress: Callable[[int], None]) -> str | None:
        """Start, wait until the training is complete or until it is time to kill it, and kill it.

        Returns:
            How the processes ended, if they did not end properly after the training was complete. gloo shuts down in
            the background, which is not part of the training.
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
                return f"the processes were still running {_LONGEST_GOODBYE:.0f} s after the training was complete"
            if silence > _LONGEST_SILENCE:
                raise DemoError(f"no batch for {_LONGEST_SILENCE:.0f} s; {self._last_words()}")
            time.sleep(_POLL)
        step = read.newest_step()
        if step is not None:
            progress(step)
        if not self._complete():
            raise DemoError(f"torchrun ended with status {process.returncode}; {self._last_words()}")
        if kill is not None:
            raise DemoError(f"the job ended before batch {kill.step}, at which it was to be killed: add epochs")
        if process.returncode != 0:
            return f"torchrun ended with status {process.returncode} after the training was complete"
        return None

    def _complete(self) -> bool:
        """Whether every rank has logged that it reached the end."""
        logs = [read_events(self._log / f"rank-{rank}.jsonl") for rank in range(self._world_size)]
        return all(log and log[-1]["event"] == "end" for log in logs)

    def _kill(self, kill: Kill, process: subprocess.Popen[bytes]) -> None:
        if kill.rank is None:
            self._kill_all()
            return
        started = read_events(self._log / f"rank-{kill.rank}.jsonl")[0]
        os.kill(started["pid"], signal.SIGKILL)
        try:
            # torchrun notices it, and ends the other ranks.
            process.wait(_LONGEST_DEATH)
        except subprocess.TimeoutExpired:
            raise DemoError(
                f"torchrun did not notice within {_LONGEST_DEATH:.0f} s that rank {kill.rank} was killed; "
                f"{self._last_words()}"
            ) from None

    def _kill_all(self) -> None:
        """SIGKILL every process of this job until none is left, so that the next job has the files to itself."""
        deadline = time.monotonic() + _LONGEST_DEATH
        while left := _processes_with(self._token):
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise DemoError(f"processes {left} do not end: look at them with ps, and kill them by hand")
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
        self.ended = False  # whether there will be no more batches

    def newest_step(self) -> int | None:
        """The last step written since the previous call; None if there is none."""
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
    """Processes with the token in their environment. Children inherit it, even if another process adopts them."""
    entry = f"{_TOKEN}={token}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            environment = (process / "environ").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it has ended, or belongs to another user
        if entry in environment.split(b"\0"):
            found.append(int(process.name))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
