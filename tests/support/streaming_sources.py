"""Loaders over mosaicml-streaming's format, written once for each size, and opened from a folder of their own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import json
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import cpu_torchvision  # noqa: F401  # before streaming, which imports torchvision
import numpy as np
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.shared import SharedMemory

import midepoch
from support import streaming_apart  # noqa: F401
from support.law_sources import log_read

SIZE, BATCH, SEED = 14, 3, 7

# Streaming keeps some ten files of shared memory open for each dataset, until the process ends.
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


_blocks: list[SharedMemory] = []
_open = SharedMemory.__init__


def _open_and_remember(memory: SharedMemory, *arguments: Any, **keywords: Any) -> None:
    _open(memory, *arguments, **keywords)
    _blocks.append(memory)


SharedMemory.__init__ = _open_and_remember


def let_go() -> None:
    """Close what Streaming keeps open until the process ends, for tests: data sets must not be in use any more.

    Else a process with many of them runs out of files, since each new one opens those of all others, and those that
    killed processes have left, to find a name that is free.
    """
    gc.collect()
    for memory in _blocks:
        atexit.unregister(memory.cleanup)
        for block in memory.created_shms:
            with contextlib.suppress(FileNotFoundError):
                block.unlink()
        for block in (*memory.created_shms, *memory.opened_shms):
            with contextlib.suppress(BufferError):
                block.close()
    _blocks.clear()


def new_folder() -> str:
    """Removed when the process that asked for it ends."""
    folder, process = tempfile.mkdtemp(prefix="midepoch-mds-"), os.getpid()

    @atexit.register
    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    return folder


@functools.cache
def written(size: int) -> str:
    """A folder with samples (name, number), some shards of them."""
    folder = new_folder()
    with MDSWriter(out=f"{folder}/data", columns={"name": "str", "number": "int"}, size_limit=200) as writer:
        for number in range(size):
            writer.write({"name": f"s{number:03}", "number": number})
    return f"{folder}/data"


def a_copy(size: int) -> str:
    """Streaming takes two datasets in one folder for a mistake."""
    folder = new_folder()
    shutil.copytree(written(size), folder, dirs_exist_ok=True)
    return folder


class Failing(StreamingDataset):
    """Fails at one sample as long as a file is there."""

    def __init__(self, failing: tuple[int, str], **keywords: Any) -> None:
        super().__init__(**keywords)
        self.failing = failing

    def __getitem__(self, at: Any) -> Any:
        number, marker = self.failing
        if int(at) == number and Path(marker).exists():
            raise RuntimeError("out of order")
        return super().__getitem__(at)


class Drawing(StreamingDataset):
    """Draws for each sample from every kind of generator; one is its own, and one is made when the first is read."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.generator = np.random.default_rng()
        self.late: random.Random | None = None

    def __getitem__(self, at: Any) -> Any:
        if self.late is None:
            self.late = random.Random()
        drawn = [random.random(), np.random.rand(), float(torch.rand(())), self.generator.random(), self.late.random()]
        return {**super().__getitem__(at), "drawn": np.array(drawn)}


class Logging(Drawing):
    def __init__(self, read_log: str, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.read_log = read_log

    def __getitem__(self, at: Any) -> Any:
        log_read(self.read_log, int(at))
        return super().__getitem__(at)


def mix(samples: list[Any]) -> Any:
    return {**torch.utils.data.default_collate(samples), "mixed": np.random.rand(3)}


def drawn(batch: Any) -> dict[str, list[Any]]:
    """What a batch consists of that was drawn, with the numbers of its samples."""
    return {name: np.asarray(batch[name]).tolist() for name in ("number", "drawn", "mixed") if name in batch}


def numbers(batches: list[Any]) -> list[list[int]]:
    return [batch["number"].tolist() for batch in batches]


def identify(batch: Any) -> list[int]:
    return [int(number) for number in batch["number"]]


def bare(
    size: int = SIZE, batch_size: int = BATCH, num_workers: int = 0, seed: int = SEED, read_log: str | None = None,
    drop_last: bool = False, kind: Callable[..., StreamingDataset] = StreamingDataset,
    loading: dict[str, Any] | None = None, **options: Any,
) -> StreamingDataLoader:  # fmt: skip
    options = {"local": a_copy(size), "batch_size": batch_size, "shuffle": True, "shuffle_seed": seed, **options}
    dataset = kind(**options) if read_log is None else Logging(read_log, **options)
    return StreamingDataLoader(
        dataset, batch_size=batch_size, num_workers=num_workers, drop_last=drop_last, **loading or {}
    )


def draws(batch: Any) -> list[tuple[float, ...]]:
    return [tuple(row) for row in batch["drawn"].tolist()]


def make_loader(
    num_workers: int = 0, seed: int | None = SEED, size: int = SIZE, read_log: str | None = None,
    batch_size: int = BATCH,
) -> midepoch.StatefulIterable:  # fmt: skip
    """For the laws, in a world of one: Streaming takes its world from the environment."""
    seed_of_it = SEED if seed is None else seed
    source = bare(size, batch_size, num_workers=num_workers, seed=seed_of_it, read_log=read_log, kind=Drawing)
    return midepoch.wrap(source, seed=seed)


def main() -> None:
    """One rank: ``python streaming_sources.py OUT STATE STEPS SIZE BATCH REPLICATION``."""
    out, state, count, _, batch_size, replication = sys.argv[1:]
    options = {} if replication == "1" else {"replication": int(replication)}
    rank, os.environ["LOCAL_WORLD_SIZE"] = os.environ["RANK"], os.environ["WORLD_SIZE"]
    folder = f"{out}/local"  # shared by all ranks, as on one machine, which wait for each other
    dataset = Drawing(local=folder, batch_size=int(batch_size), shuffle=True, shuffle_seed=SEED, **options)
    loader = midepoch.wrap(StreamingDataLoader(dataset, batch_size=int(batch_size)))
    if state != "-":
        loader.load_state_dict(json.loads(Path(state).read_text()))
    left, steps = loader.batches_left, None if count == "-1" else int(count)
    given = [drawn(batch) for batch in itertools.islice(loader, steps)]
    batches, draws = ([batch[name] for batch in given] for name in ("number", "drawn"))
    done = {"batches": batches, "draws": draws, "state": loader.state_dict(), "left": left}
    Path(f"{out}/rank{rank}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
