"""Sources that do not keep what they promise, each in a place where a job does not look. `midepoch check` does."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

import midepoch
from support import own_state_sources as own

SIZE, BATCH = 24, 4


class Numbers(Dataset[Any]):
    """Sample i is (i, a random number)."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "value": random.random()}


class SometimesEntropy(Numbers):
    """A few samples, never the first of an epoch that is read in order, draw from the operating system."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        return {**item, "value": int.from_bytes(os.urandom(6))} if index % 7 == 5 else item


class MixesNeighbours(Numbers):
    """Each sample holds something of the one before, if they are neighbours."""

    def __init__(self) -> None:
        self.before = -1

    def __getitem__(self, index: int) -> Any:
        mixed = index + (self.before if self.before == index - 1 and index % 5 == 4 else 0)
        self.before = index
        return {"index": index, "value": mixed}


class KeepsAugmentations(Numbers):
    """Keeps what was drawn when a sample was first read, in whichever epoch that was."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        return self.kept.setdefault(index, super().__getitem__(index))


class KnowsItsProcess(Numbers):
    """Looks like a function of its index within one process."""

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "value": os.getpid()}


class WandersLater(Sampler[int]):
    """Its list repeats in the first epoch, which is tried, and not in later ones."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.Random(0 if not self.epoch else os.urandom(8)).shuffle(order)
        return iter(order)


class InHashOrder(Sampler[int]):
    """Its list follows a set of names, whose order is another one in each process."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return (int(name) for name in {str(index) for index in range(SIZE)})


class RepeatsItsBeginning:
    """Each pass begins alike; behind the fourth unit it follows a counter of passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        for number in range(12):
            yield number if number < 4 else 100 * self.passes + number


class CountsAtTheEnd(IterableDataset[int]):
    """Shuffles by a count of its passes, which it raises at the end of each."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.epoch).permutation(SIZE).tolist()
        self.epoch += 1


class ReadsAheadLater(IterableDataset[Any]):
    """A thread reads ahead, and draws, from the fourth unit on."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(4):
            yield {"number": number, "value": random.random()}
        items: queue.Queue[Any] = queue.Queue(1)
        ready = threading.Event()

        def fill(numbers: Iterator[Any]) -> None:
            for each in numbers:
                items.put(each)
                ready.wait(0.001)
            items.put(None)

        rest = ({"number": number, "value": random.random()} for number in range(4, 12))
        threading.Thread(target=fill, args=(rest,), daemon=True).start()
        while (item := items.get()) is not None:
            yield item


class CountsBesidesItsSampler(IterableDataset[Any]):
    """Grows harder with every tenth sample, by a count of its own, which no jump moves."""

    def __init__(self) -> None:
        self.sampler = RandomSampler(range(SIZE))

    def __iter__(self) -> Iterator[Any]:
        return ((index, place // 10) for place, index in enumerate(self.sampler))


class WrongLater(own.Stream):
    """Its state is right after the first batch, which is tried, and too far on after the fifth."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self.given != 5 else {**state, "given": 6}


def loader_of(dataset: Callable[[], Any], sampler: Callable[[], Any] | None = None) -> Any:
    return DataLoader(dataset(), BATCH, sampler=None if sampler is None else sampler())


SOURCES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a few samples draw entropy": (lambda: loader_of(SometimesEntropy), "samples", r"two reads of sample \d+ differ"),
    "samples mix with their neighbours": (lambda: loader_of(MixesNeighbours), "samples", r"\['value'\]"),
    "augmentations are kept": (lambda: loader_of(KeepsAugmentations), "samples", "between processes"),
    "samples know their process": (lambda: loader_of(KnowsItsProcess), "samples", "between processes"),
    "a list wanders later": (lambda: loader_of(Numbers, WandersLater), "lists", "does not repeat itself"),
    "a list follows a set": (lambda: loader_of(Numbers, InHashOrder), "lists", "begins with"),
    "passes differ after their beginning": (RepeatsItsBeginning, "passes", "pass 2 over epoch 0"),
    "the end of a pass changes a count": (CountsAtTheEnd, "passes", "pass 2 over epoch 0"),
    "samples count besides their sampler": (CountsBesidesItsSampler, "states", "after 1[0-9] batches"),
    "a state is wrong in the middle": (WrongLater, "states", "after 5 batches"),
    "threads begin to read later": (ReadsAheadLater, "threads", "threads go on reading"),
}
"""Name -> the source, the trial that finds it, and words of the finding."""


def make(name: str) -> Any:
    np.random.seed(0)
    return midepoch.wrap(SOURCES[name][0](), seed=5)


def sound() -> Any:
    """Keeps everything: two epochs of augmented samples under a sampler of its own."""
    return midepoch.wrap(loader_of(Numbers, lambda: torch.utils.data.WeightedRandomSampler([1.0] * SIZE, SIZE)), seed=5)


class CountsPasses:
    """Shuffles by a counter of its own passes."""

    def __init__(self) -> None:
        self.settings = {"passes": [0]}

    def __iter__(self) -> Iterator[int]:
        self.settings["passes"][0] += 1
        order = random.Random(self.settings["passes"][0])
        for _ in range(20):
            yield order.randrange(1 << 30)


def own_up_order() -> Any:
    """A source that a job tells of: its order follows a counter of passes from the first unit on."""
    return midepoch.wrap(CountsPasses(), seed=5)


class AllEntropy(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {"index": np.full(8, index), "value": os.urandom(4)}


def own_up_augmentations() -> Any:
    """A source that a job tells of: a part of each sample is drawn from the operating system."""
    return midepoch.wrap(loader_of(AllEntropy), seed=5)
