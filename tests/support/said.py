"""What is said of a source, and where: one table, of sources that are not what they seem and of those that are."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

import midepoch
from support import own_state_sources as own
from support import resuming, sources, wild_sources

SIZE, BATCH = 32, 4


# --- samples ----------------------------------------------------------------------------------------------------------


class Popped(sources.Indices):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.queue = deque(range(1000))

    def __getitem__(self, index: int) -> int:
        return self.queue.popleft()


class Entropy(sources.Indices):
    """Noise from a generator that the operating system seeds, as those in C++ libraries are."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((64,), float(index)), np.random.default_rng().normal(size=3)


class SometimesEntropy(sources.Indices):
    """A few samples, never the first of an epoch that is read in order, draw from the operating system."""

    def __getitem__(self, index: int) -> Any:
        return index, int.from_bytes(os.urandom(6)) if index % 7 == 5 else random.random()


class MixesNeighbours(sources.Indices):
    """Each sample holds something of the one before, if they are neighbours."""

    before = -1

    def __getitem__(self, index: int) -> Any:
        mixed = index + (self.before if self.before == index - 1 and index % 5 == 4 else 0)
        self.before = index
        return {"index": index, "value": mixed}


class KeepsAugmentations(sources.Noisy):
    """Keeps what was drawn when a sample was first read, in whichever epoch that was."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        return self.kept.setdefault(index, super().__getitem__(index))


# --- orders -----------------------------------------------------------------------------------------------------------


class WandersLater(Sampler[int]):
    """Its list repeats in the first epoch, which is tried, and not in later ones."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.Random(0 if not self.epoch else os.urandom(8)).shuffle(order)
        return iter(order)


class InHashOrder(Sampler[int]):
    """Its list follows a set of names, whose order is another one in each process."""

    def __iter__(self) -> Iterator[int]:
        return (int(name) for name in {str(index) for index in range(SIZE)})


# --- streams ----------------------------------------------------------------------------------------------------------


class SeededAnew:
    """Shuffles by a counter of its passes."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(1 << 30), SIZE))


class SameLast:
    """Another order in each process. Its first two units, and each fourth, the last before a state, are the same."""

    def __iter__(self) -> Iterator[int]:
        entropy = int.from_bytes(os.urandom(4))
        for number in range(SIZE):
            yield number if number < 2 or number % 4 == 3 else entropy + number


class ReadsAhead:
    """A thread reads ahead of the one that iterates, and draws meanwhile: from a unit on.

    Args:
        alone: how many units come before it.
        paced: it waits a little behind each.
    """

    def __init__(self, alone: int = 0, paced: bool = False) -> None:
        self.alone, self.paced = alone, paced

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.alone):
            yield number, random.random()
        items: queue.Queue[Any] = queue.Queue(1 if self.paced else 2)

        def fill(numbers: Iterator[Any]) -> None:
            for each in numbers:
                items.put(each)
                threading.Event().wait(0.001 * self.paced)
            items.put(None)

        numbers = ((number, random.random()) for number in range(self.alone, SIZE))
        threading.Thread(target=fill, args=(numbers,), daemon=True).start()
        while (item := items.get()) is not None:
            yield item


class CountsAtTheEnd:
    """Each pass begins alike. Behind the fourth unit it follows a count, which is raised at the end of each."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        yield from np.random.default_rng(self.passes).permutation(SIZE).tolist()
        self.passes += 1


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


# --- collate functions ------------------------------------------------------------------------------------------------


class BatchBefore:
    """Adds half of the batch before, as some mixups do."""

    before: Any = None

    def __call__(self, samples: Any) -> Any:
        batch = torch.as_tensor(samples, dtype=torch.float64)
        before, self.before = self.before, batch
        return batch if before is None or len(before) != len(batch) else (batch + before) / 2


def from_entropy(samples: list[int]) -> Any:
    return torch.tensor(samples) + torch.from_numpy(np.random.default_rng().normal(size=len(samples)))


# --- the table --------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A source, and what is expected of it.

    Attributes:
        make: the source, or a wrapped loader.
        outcome: "exact"; "told", by a warning before the first state can be used; "believed": capabilities say so, and
            `midepoch check` finds it; "found": promised, and `midepoch check` finds it; "chain": an error of the replay
            when it is resumed.
        no: the capability that answers no where it is told.
        trial, words: of what is found.
    """

    make: Callable[..., Any]
    outcome: str
    no: str = ""
    trial: str = ""
    words: str = ""


def over(dataset: Callable[[int], Any], sampler: Callable[[], Any] = lambda: None) -> Callable[[], Any]:
    return lambda: DataLoader(dataset(SIZE), BATCH, sampler=sampler())


def found(make: Callable[[], Any], trial: str, words: str) -> Row:
    return Row(make, "found", trial=trial, words=words)


def collated_by(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: DataLoader(range(SIZE), BATCH, shuffle=True, collate_fn=make())  # type: ignore[arg-type]


def worked_on() -> Any:
    data: Any = range(SIZE)
    return midepoch.wrap(DataLoader(data, BATCH, shuffle=True), seed=3, then=BatchBefore())


def around_kept_workers() -> Any:
    loader = DataLoader(sources.Indices(SIZE), BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    return midepoch.wrap(wild_sources.OnDevice(loader), seed=3, inside="loader")


def sound() -> Any:
    """Keeps everything: two epochs of augmented samples under a sampler of its own."""
    return midepoch.wrap(DataLoader(sources.Noisy(24), BATCH, sampler=WeightedRandomSampler([1.0] * 24, 24)), seed=5)


ORDER, AUGMENTATIONS = "exact_order", "exact_augmentations"
ROWS: dict[str, Row] = {
    "a queue that is popped": Row(over(Popped), "told", ORDER),
    "generators made from entropy": Row(over(Entropy), "told", AUGMENTATIONS),
    "around workers that are kept": Row(around_kept_workers, "exact"),
    "shuffles seeded anew in each pass": Row(SeededAnew, "told", ORDER),
    "a thread that reads ahead": Row(ReadsAhead, "believed"),
    "a replay that begins and ends alike": Row(SameLast, "chain"),
    "a collate function that adds the batch before": Row(collated_by(BatchBefore), "told", AUGMENTATIONS),
    "work on batches that adds the batch before": Row(worked_on, "told", AUGMENTATIONS),
    "a collate function seeded by the system": Row(collated_by(lambda: from_entropy), "believed"),
    # What a job does not try.
    "a few samples draw entropy": found(over(SometimesEntropy), "samples", r"two reads of sample \d+ differ"),
    "samples mix with their neighbours": found(over(MixesNeighbours), "samples", r"\['value'\]"),
    "augmentations are kept": found(over(KeepsAugmentations), "samples", "between processes"),
    "a list wanders later": found(over(sources.Noisy, WandersLater), "lists", "does not repeat itself"),
    "a list follows a set": found(over(sources.Noisy, InHashOrder), "lists", "begins with"),
    "the end of a pass changes a count": found(CountsAtTheEnd, "passes", "pass 2 over epoch 0"),
    "samples count besides their sampler": found(CountsBesidesItsSampler, "states", "after 1[0-9] batches"),
    "a state is wrong in the middle": found(WrongLater, "states", "after 5 batches"),
    "threads begin to read later": found(lambda: ReadsAhead(4, paced=True), "threads", "threads go on reading"),
}
FOUND = [name for name, row in ROWS.items() if row.outcome == "found"]


def make(name: str) -> Any:
    np.random.seed(0)
    return midepoch.wrap(ROWS[name].make(), seed=5)


def resume_all(saved: dict[str, list[dict[str, Any]]], seed: int) -> dict[str, list[resuming.Resumed]]:
    """What comes of the states of each row, in this process."""
    return {name: resuming.resume(ROWS[name].make, states, seed) for name, states in saved.items()}
