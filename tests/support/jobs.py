"""What job programs and the tests that start them share: data, logs that outlive a kill, ranks, torchrun, waiting."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from support import forking

# What jobs import sooner or later; the first optimizer imports the second, in a second and a half. With one list for
# all, jobs of several files are forked from one process.
MODULES = ("torch.distributed.run", "torch._dynamo", "torch.distributed.fsdp", "support.sources")


def drawn(index: int) -> torch.Tensor:
    return torch.tensor([float(index), float(torch.rand(()))])


class Noisy(Dataset[Any]):
    """Sample i is (i, a number that torch draws), and takes so many seconds."""

    def __init__(self, size: int, seconds: float = 0.0) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return drawn(index)


class Rows(Noisy):
    """The same, under the name that a model takes it by."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": super().__getitem__(index)}


class Stream(IterableDataset[torch.Tensor]):
    """The same, by somebody's iterable, which knows nothing of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(drawn, range(self.size))


class Layer(torch.nn.Module):
    """A model that Hugging Face's Trainer takes; `see` gets each batch."""

    def __init__(self, see: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.see = see

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.see(x)
        return {"loss": self.layer(x / 20).square().mean()}


def note(path: Path, event: Any) -> None:
    """Add a line to a file, in the kernel at once: it is there even if the next instruction is a kill."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, (json.dumps(event) + "\n").encode())
    os.close(file)


def noted(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events(folder: Path, *keys: str, world_size: int | None = None) -> list[dict[str, Any]]:
    """What all processes wrote down that has these keys, by the names of files; of a world of so many, if it is given.

    The files are log-*. A batch that is trained on is an event with its step, rank, world_size and batch.
    """
    found = [event for path in sorted(folder.glob("log-*")) for event in noted(path)]
    return [event for event in found if {*keys} <= event.keys() and world_size in (None, event.get("world_size"))]


def global_batches(folder: Path, ordered: bool = True) -> dict[int, list[Any]]:
    """What all ranks together had at each step, which must be the same each time that a step was made.

    Of a step to which a rank did not come nothing is told. `ordered`: samples have their order among the ranks.
    """
    batches: dict[tuple[int, int], dict[int, Any]] = {}
    for event in events(folder, "step", "batch"):
        again = batches.setdefault((event["step"], event["world_size"]), {}).setdefault(event["rank"], event["batch"])
        assert again == event["batch"], f"step {event['step']} differs when it is made again"
    found: dict[int, list[Any]] = {}
    for (step, world_size), ranks in sorted(batches.items()):
        if len(ranks) == world_size:
            samples = [sample for rank in range(world_size) for sample in ranks[rank]]
            samples = samples if ordered else sorted(samples)
            assert found.setdefault(step, samples) == samples, f"step {step} differs on another number of processes"
    return found


def environment(**own: str) -> dict[str, str]:
    """This process's, without a world, and with gloo on this machine."""
    common = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**common, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **own}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def ranks(command: Sequence[str | Path], count: int, **options: Any) -> list[forking.Program]:
    """So many processes, which are the ranks of one world, as if a launcher had started them."""
    world = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": str(count)}
    owns = ({**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count))
    return [forking.Program(command, env=environment(**own), **{"modules": MODULES, **options}) for own in owns]


def torchrun(
    processes: int, command: Sequence[str | Path], options: Sequence[str] = (), **settings: Any
) -> forking.Program:
    """torchrun on this machine, whose workers are forked too."""
    # Restarted workers must not find the addresses of those before them, as they would in the agent's store.
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    own["PYTHON_EXEC"] = forking.executable(*MODULES)
    meets = () if any("rdzv-endpoint" in each for each in options) else ("--rdzv-endpoint=localhost:0",)
    launcher = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", *meets, *options, f"--nproc-per-node={processes}"]
    return forking.Program([*launcher, *command], modules=MODULES, env=environment(**own), merged=True, **settings)


def wait_for(condition: Callable[[], Any], process: Any, seconds: float = 300) -> Any:
    """What `condition` returns once that is true. Raises AssertionError where the process has ended before."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None, f"it has ended: {process.communicate(30)}"
        assert time.monotonic() < until, f"nothing happened in {seconds} s"
        time.sleep(0.01)
    return found
