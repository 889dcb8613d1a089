"""Training jobs that are killed again and again, to the end, and then compared with one that nobody disturbed.

``python tests/jobs/chaos.py --backend dataloader --kills 500 --seed 1`` trains under torchrun's own agent, launched
from a process that has imported everything, so that a start takes half a second. Each launch has another number of
ranks and of workers; whoever is hit, how and when, is drawn. What each rank received is written down step by step. A
job must end with every sample of every epoch exactly once, with the same bits as in the undisturbed run, and with the
same sum over all of them in the model that went through the snapshots.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import mmap
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
os.environ.setdefault("NUMBA_NUM_THREADS", "2")  # a process that has imported numba refuses another number
# Restarted workers must not find the addresses of those before them, as they would in the agent's store.
os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}

import numpy as np
import psutil
import torch
import torch.distributed
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader, DistributedSampler

import midepoch
from support import jobs, sources

SIZE, GLOBAL_BATCH, EPOCHS, EVERY = 480, 12, 3, 3
STEPS = SIZE // GLOBAL_BATCH * EPOCHS


Samples = list[tuple[int, int]]  # number and checksum of each


def rows(numbers: Any, *parts: Any) -> Samples:
    arrays = [np.ascontiguousarray(torch.as_tensor(part).numpy()) for part in parts]
    return [
        (int(number), zlib.crc32(b"".join(array[row].tobytes() for array in arrays)))
        for row, number in enumerate(torch.as_tensor(numbers).flatten().tolist())
    ]


@dataclass(frozen=True)
class Backend:
    source: Callable[[Path, int, int], Any]  # for a folder with data, a batch of each rank and a number of workers
    samples: Callable[[Any], Samples]  # of a batch
    prepare: Callable[[Path], None] | None = None  # writes the data into a folder, in a process of its own
    worlds: tuple[int, ...] = (1, 2, 3)  # what is drawn from
    workers: tuple[int, ...] = (0, 1, 2)
    seed: int | None = 5  # of the wrapped loader; None for the source's own
    compiled: bool = False  # whether sources compile, which is then done once, before anything is forked


def of_rows(batch: torch.Tensor) -> Samples:
    return rows(batch[:, 0], batch)


def stateful(folder: Path, batch: int, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler: Any = DistributedSampler(range(SIZE), seed=3)  # type: ignore[arg-type]
    return StatefulDataLoader(range(SIZE), batch, sampler=sampler, num_workers=workers)


def write_shards(folder: Path) -> None:
    from support import webdataset_sources

    webdataset_sources.make_shards(folder, [SIZE // 6] * 6, 512)


def webdataset(folder: Path, batch: int, workers: int) -> Any:
    from support import webdataset_sources as shards

    dataset = shards.plain(sorted(map(str, folder.glob("*.tar"))), shardshuffle=6).shuffle(100).map(shards.Reading())
    return shards.in_workers(dataset.batched(batch, collation_fn=shards.stack), workers)


def write_mds(folder: Path) -> None:
    from support import streaming_sources

    shutil.copytree(streaming_sources.written(SIZE), folder / "data")


def streaming(folder: Path, batch: int, workers: int) -> Any:
    import cpu_torchvision  # noqa: F401  # before streaming, which imports torchvision
    from streaming import StreamingDataLoader

    from support.streaming_sources import Drawing

    dataset = Drawing(local=str(folder / "data"), batch_size=batch, shuffle=True, shuffle_seed=7)
    return StreamingDataLoader(dataset, batch_size=batch, num_workers=workers)


def write_pictures(folder: Path) -> None:
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(SIZE):
        Image.fromarray(generator.integers(0, 255, (24, 24, 3), np.uint8)).save(folder / f"{number:03}.jpg")


def dali_iterator(folder: Path, batch: int, workers: int, native: bool = False) -> Any:
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    from midepoch.adapters import dali

    files: dict[str, Any] = {"files": [str(folder / f"{number:03}.jpg") for number in range(SIZE)]}
    files, world = {**files, "labels": list(range(SIZE)), "random_shuffle": True}, midepoch.World.current()

    @pipeline_def(batch_size=batch, num_threads=1, device_id=None, seed=12)
    def pipeline() -> Any:
        if native:
            encoded, number = fn.readers.file(**files, name="Reader", shard_id=world.rank, num_shards=world.world_size)
            return fn.crop_mirror_normalize(fn.decoders.image(encoded), mirror=fn.random.coin_flip()), number
        encoded, number = dali.readers.file(**files)
        images = fn.decoders.image_slice(encoded, *dali.random.crop_window(encoded), axis_names="HW")
        images = fn.resize(images, resize_x=12, resize_y=12)
        return fn.crop_mirror_normalize(images, mirror=dali.random.coin_flip()), number

    reader = {"reader_name": "Reader"} if native else {}
    return DALIGenericIterator([pipeline()], ["data", "number"], **reader)


def of_dali(batch: Any) -> Samples:
    return [sample for part in batch for sample in rows(part["number"], part["data"])]


def write_beton(folder: Path) -> None:
    from ffcv.fields import IntField, RGBImageField

    from support import ffcv_sources

    fields = {"image": RGBImageField(), "label": IntField()}
    ffcv_sources.write(folder / "data.beton", ffcv_sources.Images(SIZE, 16), fields)


@functools.cache
def ffcv(folder: Path, batch: int, workers: int) -> Any:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor

    pipelines = {"image": [RandomResizedCropRGBImageDecoder((12, 12)), ToTensor()], "label": [IntDecoder(), ToTensor()]}
    return Loader(
        str(folder / "data.beton"), batch, num_workers=1, order=OrderOption.RANDOM, seed=4, pipelines=pipelines,
    )  # fmt: skip


BACKENDS = {
    "dataloader": Backend(
        lambda _, batch, workers: DataLoader(sources.Noisy(SIZE), batch, shuffle=True, num_workers=workers), of_rows
    ),
    "iterable": Backend(
        lambda _, batch, workers: DataLoader(sources.Exposing(SIZE), batch, num_workers=workers), of_rows
    ),
    "stateful": Backend(stateful, lambda batch: rows(batch, batch), worlds=(2,), workers=(1,), seed=None),
    "webdataset": Backend(webdataset, of_rows, write_shards),
    "streaming": Backend(streaming, lambda batch: rows(batch["number"], batch["drawn"]), write_mds, seed=None),
    "dali": Backend(dali_iterator, of_dali, write_pictures, workers=(0,)),
    "dali-native": Backend(
        functools.partial(dali_iterator, native=True), of_dali, write_pictures, worlds=(2,), workers=(0,), seed=None
    ),
    "ffcv": Backend(ffcv, lambda batch: rows(batch[1], batch[0]), write_beton, workers=(0,), compiled=True),
}  # fmt: skip


_RANKS = max(max(backend.worlds) for backend in BACKENDS.values())


def new_board() -> Any:
    """What ranks tell whoever hits them, in memory that all share: each its process and its step, 0 as it starts."""
    return np.frombuffer(mmap.mmap(-1, 8 * 2 * _RANKS), np.int64).reshape(_RANKS, 2)


class Model(torch.nn.Module):
    """Sums up all samples it sees, step by step, in integers that wrap around: equal on every number of ranks."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))

    def learn(self, samples: Samples, step: int) -> None:
        gradient = torch.tensor(sum((number + 1) * checksum for number, checksum in samples) % (1 << 60))
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(gradient)
        self.total += gradient * step


def train(backend: Backend, data: Path, folder: Path, workers: int, board: Any) -> None:
    """One rank, until the last epoch ends or it is asked to leave."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's own is inherited by what is forked
    torch.set_num_threads(1)
    world = midepoch.World.current()
    rank = world.rank
    board[rank] = os.getpid(), 0
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        torch.distributed.init_process_group("gloo")
    log = folder / f"log-{time.time_ns()}-{os.getpid()}"
    loader = midepoch.wrap(backend.source(data, GLOBAL_BATCH // world.world_size, workers), seed=backend.seed)
    model = Model()
    snapshot = midepoch.Snapshot(folder / "snapshot.pt", every=EVERY, model=model, data=loader)
    try:
        snapshot.load()
        while loader.epoch < EPOCHS:
            for batch in loader:
                step = snapshot.steps + 1
                board[rank] = os.getpid(), step
                samples = backend.samples(batch)
                jobs.note(log, {"step": step, "rank": rank, "world_size": world.world_size, "batch": samples})
                time.sleep(0.003)
                model.learn(samples, step)
                snapshot.step()
        jobs.note(log, {"total": int(model.total), "steps": snapshot.steps})
    except SystemExit:
        # Torchrun's processes just end. A function that returns waits for what the agent says, and no signal ends that.
        os._exit(0 if not distributed else 3)
    snapshot.close()
    loader.close()
    if distributed:
        torch.distributed.destroy_process_group()


def in_a_child(function: Callable[[], object], output: Path) -> Any:
    """A process that runs this, in a session of its own, with all that it prints in a file."""

    def run() -> None:
        os.setsid()
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(printed, stream)
        function()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


# Who is hit, with what, and how often; a machine is all processes of the job at once.
FAULTS = {
    "SIGKILL to a rank": 6, "SIGTERM to a rank": 3, "SIGSTOP, then SIGKILL to a rank": 3,
    "SIGKILL to a worker of a loader": 3, "SIGKILL to the agent, later to its ranks": 2, "SIGTERM to the agent": 2,
    "SIGKILL to the machine": 3,
}  # fmt: skip


def hit(fault: str, agent: int, rank: int, generator: random.Random) -> str:
    """Returns what was done in truth: a rank without workers is killed itself."""
    workers: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        workers = psutil.Process(rank).children()
    if fault == "SIGKILL to a worker of a loader" and not workers:
        fault = "SIGKILL to a rank"
    who = agent if "agent" in fault else generator.choice(workers).pid if "worker" in fault else rank
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        if "machine" not in fault:
            os.kill(who, signal.Signals[fault[: len("SIGKILL")]])  # the name that it begins with
        if "later" in fault or "then" in fault:
            time.sleep(generator.uniform(0, 0.2))
        if "then" in fault:
            os.kill(rank, signal.SIGKILL)
        elif "later" in fault or "machine" in fault:
            os.killpg(agent, signal.SIGKILL)
    return fault


class Wrong(AssertionError):  # noqa: N818  # a verdict
    """A sample was lost, repeated or different, or a job did not end."""


def end_of(folder: Path, first: int = 0) -> str:
    return (folder / "output").read_bytes()[first:].decode(errors="replace")[-3000:]


_LOST_SIGNAL = re.compile(r"^Exception ignored in.*?SignalException", re.MULTILINE | re.DOTALL)


class Chaos:
    """Jobs of one backend in a folder that is removed at the end."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.backend, self.random = BACKENDS[name], random.Random(seed)
        self.folder, self.data, self.board = folder, folder / "data", new_board()
        self.faults, self.jobs = Counter[str](), 0
        self.data.mkdir()
        os.environ["MIDEPOCH_CACHE"] = str(folder / "cache")
        if self.backend.prepare is not None:
            # Writers fork and start threads, which must not be in the process that everything is forked from.
            command = [sys.executable, __file__, "--prepare", str(self.data), "--backend", name]
            subprocess.run(command, check=True, timeout=300)
        if self.backend.compiled:
            for size in self.backend.worlds:
                source = self.backend.source(self.data, GLOBAL_BATCH // size, 0)
                deque(midepoch.wrap(source, seed=self.backend.seed), 0)
        whole = folder / "whole"
        whole.mkdir()
        self.whole: dict[int, Samples] = {}
        self.total: int | None = None
        if len(self.backend.worlds) > 1:
            run = functools.partial(train, self.backend, self.data, whole, 0, self.board)
            undisturbed = in_a_child(run, whole / "output")
            undisturbed.join()
            if undisturbed.exitcode:
                raise Wrong(f"the undisturbed run failed: {end_of(whole)}")
        else:
            self.wait(self.launch(whole, self.backend.worlds[0], self.backend.workers[0], 0), whole)
        self.whole, self.total = self.read(whole)
        if len(self.whole) != STEPS or self.total is None:
            raise Wrong(f"the undisturbed run made {len(self.whole)} steps: {end_of(whole)}")
        for epoch in range(EPOCHS):
            steps = range(epoch * STEPS // EPOCHS + 1, (epoch + 1) * STEPS // EPOCHS + 1)
            if sorted(number for step in steps for number, _ in self.whole[step]) != list(range(SIZE)):
                raise Wrong(f"the undisturbed run does not give each sample once in epoch {epoch}")

    def launch(self, folder: Path, ranks: int, workers: int, restarts: int) -> Any:
        self.board = new_board()
        output = folder / "output"
        self.said = output.stat().st_size if output.exists() else 0
        configuration = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id="chaos", rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=restarts, monitor_interval=0.02, start_method="fork",
        )  # fmt: skip
        launched = functools.partial(
            elastic_launch(configuration, train), self.backend, self.data, folder, workers, self.board
        )
        return in_a_child(launched, output)

    def wait(self, agent: Any, folder: Path, seconds: float | None = None) -> None:
        """Until its launch is over; what is left of it is killed, after so many seconds, or as a fault after 60."""
        agent.join(seconds or 60.0)
        has_ended = agent.exitcode is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.join()
        # Torch's agent raises what ends it from its handler of signals; while Python runs the functions that frame a
        # fork, an exception is printed and dropped, and the agent goes on, perhaps with a lock held.
        if not has_ended and seconds is None and not _LOST_SIGNAL.search(said := end_of(folder, self.said)):
            raise Wrong(f"a launch did not end within a minute: {said}")

    def job(self, kills: int) -> None:
        """From nothing to the end, hit as often as that takes, and at most so many times."""
        folder = self.folder / f"job{self.jobs}"
        folder.mkdir()
        idle, before = 0, -1
        while True:
            done, total = self.read(folder)
            if total is not None:
                break
            idle = idle + 1 if len(done) == before else 0
            before = len(done)
            if idle > 60:
                raise Wrong(f"no progress in {idle} launches: {end_of(folder)}")
            if self.random.random() < 0.3:
                shutil.rmtree(self.folder / "cache", ignore_errors=True)
            ranks, workers = self.random.choice(self.backend.worlds), self.random.choice(self.backend.workers)
            restarts = 2 if self.random.random() < 0.1 else 0
            agent = self.launch(folder, ranks, workers, restarts)
            for _ in range(1 + restarts):
                if self.faults.total() < kills:
                    self.disturb(agent)
            # Whoever is left is killed after a moment, as most schedulers do it, or notices by itself. A rank's worker
            # processes keep its connections open for some seconds after it.
            if not restarts and self.random.random() < 0.75 and self.faults.total() < kills:
                self.wait(agent, folder, self.random.uniform(0.01, 0.5))
            else:
                self.wait(agent, folder)
        if total != self.total or done != self.whole:
            raise Wrong(f"a job ended with {total}, and not with {self.total}")
        self.jobs += 1
        shutil.rmtree(folder)

    def steps(self) -> dict[int, int]:
        """Of each process that has begun."""
        return {pid: step for pid, step in self.board.tolist() if pid and Path(f"/proc/{pid}").exists()}

    def disturb(self, agent: Any) -> None:
        """Hits a rank, the agent or all, as they start or after some steps, at any instant of one."""
        fault = self.random.choices([*FAULTS], [*FAULTS.values()])[0]
        steps = self.random.choice((0, *range(1, 20, 3)))
        delay = self.random.uniform(0, 0.02 if steps else 0.3)
        first, until = None, time.monotonic() + 30
        while agent.is_alive() and time.monotonic() < until:
            found = self.steps()
            at = max(found.values(), default=0)
            first = at if first is None and at else first
            if found and (not steps or (first is not None and at >= first + steps)):
                time.sleep(delay)
                pid = self.random.choice(list(self.steps() or found))
                self.faults[hit(fault, agent.pid, pid, self.random)] += 1
                return
            time.sleep(0.0003)

    def read(self, folder: Path) -> tuple[dict[int, Samples], int | None]:
        """What all ranks together had at each step, and the model's total at the end, if it came to that."""
        ends = {(event["total"], event["steps"]) for event in jobs.events(folder, "total")}
        if len(ends) > 1 or any(steps != STEPS for _, steps in ends):
            raise Wrong(f"ranks end with {ends}")
        for event in jobs.events(folder, "batch"):
            whole = self.whole.get(event["step"], [])
            if self.whole and not all(tuple(sample) in whole for sample in event["batch"]):
                raise Wrong(f"{event} has other samples, or other bits, than undisturbed")
        found = jobs.global_batches(folder, ordered=False)
        return {step: list(map(tuple, samples)) for step, samples in found.items()}, next(iter(ends), (None, 0))[0]


def run(name: str, kills: int, seed: int) -> dict[str, Any]:
    """Jobs until so many kills were survived.

    Raises:
        Wrong: a sample was lost, repeated or different, or a launch hung.
    """
    folder, started = Path(tempfile.mkdtemp(prefix=f"midepoch-chaos-{name}-")), time.monotonic()
    chaos = Chaos(name, seed, folder)
    while chaos.faults.total() < kills:
        chaos.job(kills)
        minutes = (time.monotonic() - started) / 60
        print(f"{chaos.jobs} jobs, {chaos.faults.total()} kills, {minutes:.0f} min", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    return {
        "backend": name, "seed": seed, "kills": chaos.faults.total(), "jobs": chaos.jobs,
        "samples": chaos.jobs * SIZE * EPOCHS, "lost": 0, "repeated": 0, "different": 0, "faults": dict(chaos.faults),
        "seconds": round(time.monotonic() - started),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=[*BACKENDS], required=True)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file to which the counts are added, in place of earlier ones")
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare and (prepare := BACKENDS[options.backend].prepare):
        prepare(options.prepare)
        return
    try:
        counts = run(options.backend, options.kills, options.seed)
    except AssertionError as wrong:
        told = f"--backend {options.backend} --kills {options.kills} --seed {options.seed}"
        sys.exit(f"{wrong}\nAgain: python tests/jobs/chaos.py {told}")
    print(json.dumps(counts))
    if options.json:
        rows = json.loads(options.json.read_text()) if options.json.exists() else []
        others = [row for row in rows if (row["backend"], row["seed"]) != (options.backend, options.seed)]
        options.json.write_text(json.dumps([*others, counts], indent=1) + "\n")


if __name__ == "__main__":
    main()
