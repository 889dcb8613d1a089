"""Sources that once gave other data after a resume without a word: one or more of each kind."""

from __future__ import annotations

import importlib
import importlib.util
import os
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

import midepoch
from support import resuming, sources

SIZE, BATCH = 32, 4


class Popped(Dataset[int]):
    """What comes depends on what has been read."""

    def __init__(self) -> None:
        self.queue = deque(range(1000))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return self.queue.popleft()


class OfTheSeed(Dataset[Any]):
    """Derives a generator for each sample from the seed of the process, and draws from no other."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return index, float(np.random.default_rng(torch.initial_seed() + index).random())


class Entropy(Dataset[Any]):
    """Noise from a generator that the operating system seeds, as those in C++ libraries are."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.full((64,), float(index)), np.random.default_rng().normal(size=3)


class Private(Sampler[int]):
    """One rank's list, under names of its own."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return SIZE // self._world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._rank, SIZE, self._world_size))


class Holding(Sampler[list[int]]):
    """A batch sampler that holds a sampler under another name than ``sampler``."""

    def __init__(self, inner: Any) -> None:
        self.order = inner

    def __len__(self) -> int:
        return len(self.order) // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self.order, BATCH, True))


def rank_and_world() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "2"))


def private_names() -> Any:
    return DataLoader(sources.Indices(SIZE), BATCH, sampler=Private(*rank_and_world()))


def distributed_inside() -> Any:
    rank, world_size = rank_and_world()
    inner: Any = DistributedSampler(range(SIZE), world_size, rank)  # type: ignore[arg-type]
    return DataLoader(sources.Indices(SIZE), batch_sampler=Holding(inner))


def built_for_one() -> Any:
    """The cure that the message names."""
    inner: Any = DistributedSampler(range(SIZE), num_replicas=1, rank=0)  # type: ignore[arg-type]
    return DataLoader(sources.Indices(SIZE), batch_sampler=Holding(inner))


class Around:
    """An object around a loader, such as one that moves batches to a device."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


def around() -> Any:
    return Around(DataLoader(sources.Indices(SIZE), BATCH, shuffle=True, num_workers=1, persistent_workers=True))


def declared(make: Callable[[], Any], inside: str) -> Callable[..., Any]:
    return lambda **more: midepoch.wrap(make(), seed=3, inside=inside, **more)


class SeededAnew:
    """Shuffles by a counter of its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from random.Random(self.passes).sample(range(SIZE), SIZE)


class SameLast:
    """Another order in each process, but each fourth unit, the last before a state, is always the same.

    Args:
        alike: how many units are always the same at the beginning.
    """

    def __init__(self, alike: int) -> None:
        self.alike = alike

    def __iter__(self) -> Iterator[int]:
        entropy = int.from_bytes(os.urandom(4))
        for number in range(SIZE):
            yield number if number < self.alike or number % 4 == 3 else entropy + number


class ReadsAhead:
    """A thread reads ahead of the one that iterates, and draws meanwhile."""

    def __iter__(self) -> Iterator[Any]:
        items: queue.Queue[Any] = queue.Queue(2)

        def fill(numbers: Iterator[Any]) -> None:
            for each in numbers:
                items.put(each)
            items.put(None)

        numbers = ((number, random.random()) for number in range(SIZE))
        threading.Thread(target=fill, args=(numbers,), daemon=True).start()
        while (item := items.get()) is not None:
            yield item


class Unlike:
    """Batches of a kind, whose content is another one in each pass and process."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        entropy = int.from_bytes(os.urandom(2))
        for number in range(12):
            yield self.make(entropy + number)


def image(number: int) -> Any:
    from PIL import Image

    pixels = np.full((4, 4), number % 251, np.uint8)
    pixels[0, 0] = number // 251 % 251  # so that two numbers hardly ever give the same image
    return Image.fromarray(pixels)


class Files(Dataset[Any]):
    """Pictures in a folder. What differs in the process that resumes is in its environment.

    MIDEPOCH_LISTED: the names come in another order, as ``glob`` without ``sorted`` has them on another machine.
    MIDEPOCH_CHANGED: the augmentation ("code"), or what the files hold ("files").
    """

    def __init__(self) -> None:
        self.names = list(range(SIZE))
        if "MIDEPOCH_LISTED" in os.environ:
            random.Random(1).shuffle(self.names)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        number, changed = self.names[index], os.environ.get("MIDEPOCH_CHANGED", "")
        drawn = np.random.default_rng(number + 999 * (changed == "files")).integers(0, 256, (8, 8))
        picture = torch.from_numpy(drawn.astype(np.uint8)).float()
        return picture / 255 + random.random() * (0.11 if changed == "code" else 0.1)


class NamedFiles(Files):
    """The same with the files' names, and with other names where the files are others."""

    def __getitem__(self, index: int) -> Any:
        number = self.names[index] + SIZE * (os.environ.get("MIDEPOCH_CHANGED") == "files")
        return super().__getitem__(index), f"/data/{number:05d}.png"


class BatchBefore:
    """Adds half of the batch before, as some mixups do."""

    def __init__(self) -> None:
        self.before: Any = None

    def __call__(self, batch: Any) -> Any:
        batch = batch if isinstance(batch, torch.Tensor) else torch.tensor(batch, dtype=torch.float64)
        before, self.before = self.before, batch
        return batch if before is None or len(before) != len(batch) else (batch + before) / 2


def from_entropy(samples: list[int]) -> Any:
    return torch.tensor(samples) + torch.from_numpy(np.random.default_rng().normal(size=len(samples)))


def collated_by(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: DataLoader(range(SIZE), BATCH, shuffle=True, collate_fn=make())  # type: ignore[arg-type]


def worked_on_by(make: Callable[[], Any]) -> Callable[..., Any]:
    data: Any = range(SIZE)
    return lambda **more: midepoch.wrap(DataLoader(data, BATCH, shuffle=True), seed=3, then=make(), **more)


class Row(NamedTuple):
    """A source, and what is expected of it.

    Attributes:
        make: the source.
        outcome: "exact"; "told", by a warning before the first state can be used; "refused" by `wrap`; "believed":
            capabilities say so, and `midepoch check` finds it; or what comes of a resume: "mismatch" (an error) or
            "warned"; "chain": an error of the replay.
        no: the capability that answers no where it is told.
        changed: environment of the process that resumes.
        wraps: `make` gives a wrapped loader, and takes other keywords of `wrap`.
    """

    make: Callable[..., Any]
    outcome: str
    no: str = ""
    changed: dict[str, str] = {}  # noqa: RUF012
    wraps: bool = False


def over(dataset: type[Dataset[Any]]) -> Callable[[], Any]:
    return lambda: DataLoader(dataset(), BATCH)


def unlike(make: Callable[[int], Any]) -> Row:
    return Row(lambda: Unlike(make), "told", "exact_order")


ROWS: dict[str, Row] = {
    "a queue that is popped": Row(over(Popped), "told", "exact_order"),
    "generators made from entropy": Row(over(Entropy), "told", "exact_augmentations"),
    "generators made from the seed of the process": Row(over(OfTheSeed), "told", "exact_augmentations"),
    "a sampler that divides under private names": Row(private_names, "refused"),
    "a batch sampler that holds a DistributedSampler": Row(distributed_inside, "refused"),
    "a sampler built for one process": Row(built_for_one, "exact"),
    "around workers that are kept": Row(declared(around, "loader"), "exact", wraps=True),
    "shuffles seeded anew in each pass": Row(SeededAnew, "told", "exact_order"),
    "a thread that reads ahead": Row(ReadsAhead, "believed"),
    "a replay with the same last unit": Row(lambda: SameLast(0), "told", "exact_order"),
    "a replay that begins and ends alike": Row(lambda: SameLast(2), "chain"),
    "a collate function that adds the batch before": Row(collated_by(BatchBefore), "told", "exact_augmentations"),
    "a collate function seeded by the system": Row(collated_by(lambda: from_entropy), "believed"),
    "work on batches that adds the batch before": Row(
        worked_on_by(BatchBefore), "told", "exact_augmentations", wraps=True
    ),
    "images": unlike(image),
    "files as glob lists them": Row(over(NamedFiles), "mismatch", changed={"MIDEPOCH_LISTED": "1"}),
    "other augmentation code": Row(over(Files), "warned", changed={"MIDEPOCH_CHANGED": "code"}),
    "other files": Row(over(NamedFiles), "mismatch", changed={"MIDEPOCH_CHANGED": "files"}),
}


if importlib.util.find_spec("PIL") is None:
    del ROWS["images"]


def save(name: str) -> resuming.Saved:
    """What this process saves of a row."""
    return resuming.save(ROWS[name].make, 4)


def resume_all(saved: dict[str, list[dict[str, Any]]], seed: int) -> dict[str, list[resuming.Resumed]]:
    """What comes of the states of each row, in this process."""
    return {name: resuming.resume(ROWS[name].make, states, seed, ROWS[name].changed) for name, states in saved.items()}


def refusals(name: str, rank: int) -> str:
    """What `wrap` says on a rank of two."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)})
    try:
        midepoch.wrap(ROWS[name].make(), seed=3)
    except midepoch.UnsupportedSourceError as error:
        return str(error)
    finally:
        for each in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[each]
    return ""
