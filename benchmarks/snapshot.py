"""What a Snapshot costs: a save beside plain torch.save, and the training loop between saves.

Run ``python benchmarks/snapshot.py``. Alternated rounds in one run; reported are medians of the rounds' ratios for
saves, whose times have a long tail, and geometric means for steps, each with the interval that holds the true one in 95
of 100 runs. Prints Markdown; docs/benchmarks/index.md has its figures.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
from measuring import between, machine, median_between
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import midepoch


def timed(call: Callable[[], object]) -> float:
    os.sync()  # what one call has left to the system to write is not to be waited for by the next
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def saving(folder: Path, rounds: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(25)))  # 100 MiB
    loader = midepoch.wrap(DataLoader(TensorDataset(torch.arange(64)), batch_size=4), seed=0)
    snapshot = midepoch.Snapshot(folder / "snapshot.pt", signals=(), model=model, data=loader)
    calls: dict[str, Callable[[], object]] = {
        "torch.save": lambda: torch.save(model.state_dict(), folder / "plain.pt"),
        "torch.save once more": lambda: torch.save(model.state_dict(), folder / "again.pt"),
        "Snapshot.save": snapshot.save,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        # None comes twice running: it would meet what it has left to the disk.
        plain, again, ours = calls
        for name in (plain, ours, again) if turn % 2 else (plain, again, ours):
            taken = timed(calls[name])
            if turn > 1:
                times[name].append(taken)
    print("| a model of 100 MiB | ms | ratio to torch.save (95 %) |\n|---|---|---|")
    base = [(one * two) ** 0.5 for one, two in zip(times["torch.save"], times["torch.save once more"], strict=True)]
    for name, values in times.items():
        ratio = median_between([mine / theirs for mine, theirs in zip(values, base, strict=True)])
        print(f"| {name} | {statistics.median(values):.0f} | {ratio} |")


def looping(folder: Path, rounds: int) -> None:
    """Steps of a model that takes some milliseconds, with and without `step()`, in short alternated runs."""
    distributed = torch.distributed.is_initialized()
    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    trained = DistributedDataParallel(model) if distributed else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    snapshot = midepoch.Snapshot(folder / "loop.pt", every=1 << 40, model=model)
    data = torch.randn(64, 256)

    inside = 0.0  # seconds

    def run(stepping: bool) -> None:
        nonlocal inside
        # The time of the runs before, in which it was not called, is none between its steps.
        snapshot._agreement._last = snapshot.steps, time.monotonic()
        for _ in range(100):
            optimizer.zero_grad()
            trained(data).square().mean().backward()
            optimizer.step()
            if stepping and not distributed:
                snapshot.step()
            elif stepping:
                began = time.perf_counter()
                snapshot.step()
                inside += time.perf_counter() - began

    ours = "with `step()`"
    times: dict[str, list[float]] = {"without": [], ours: [], "without, once more": []}
    for turn in range(rounds + 1):
        for name in list(times)[:: 1 if turn % 2 else -1]:
            taken = timed(lambda name=name: run(name == ours)) / 100  # type: ignore[misc]
            if not turn:
                inside = 0.0
            else:
                times[name].append(taken)
    # Far below what the loops can tell apart, so it is timed by itself too, and where it stands: there it waits for the
    # other process as well, which the next step would else do.
    share = inside / (sum(times[ours]) / 1e3 * 100)
    calls = 200_000

    def step_only() -> None:
        for _ in range(calls):
            snapshot.step()

    alone = timed(step_only) / calls
    asking = snapshot._agreement
    agreement = timed(lambda: [asking.meet(asking.ranks(), "here") for _ in range(1000)]) / 1000
    snapshot.close()
    if distributed and torch.distributed.get_rank():
        return
    processes = torch.distributed.get_world_size() if distributed else 1
    head = f"| a step, {processes} process{'es' * (processes > 1)} | µs | ratio to a loop without `step()` (95 %) |"
    print(f"\n{head}\n|---|---|---|")
    base = [(one * two) ** 0.5 for one, two in zip(times["without"], times["without, once more"], strict=True)]
    for name, values in times.items():
        ratio = between([mine / plain for mine, plain in zip(values, base, strict=True)])
        print(f"| {name} | {statistics.median(values) * 1e3:.0f} | {ratio} |")
    step = statistics.median(base)
    if distributed:
        print(f"| time inside `step()` | {share * step * 1e3:.1f} | {share:.4f} of it |")
        more = agreement * 2e-3  # some two a second, so this share of a second
        print(f"| one exchange between the processes, twice a second | {agreement * 1e3:.0f} | {more:.4f} more |")
    else:
        print(f"| `step()` by itself | {alone * 1e3:.2f} | {alone / step:.5f} more |")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(
            f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch {torch.__version__}, "
            f"{machine()}; medians of {options.rounds} alternated rounds\n"
        )
        saving(Path(folder), options.rounds)
        looping(Path(folder), options.rounds)
        spawn(beside, (options.rounds, folder), nprocs=2)  # type: ignore[no-untyped-call]


def beside(rank: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    looping(Path(folder), rounds)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
