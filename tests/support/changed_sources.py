"""Programs whose loop changes the data, or whose data or samplers remember something: a `Row` each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

import midepoch
from midepoch import Loader
from support import sources

SIZE, BATCH, EPOCHS = 24, 4, 3


class Augmented(sources.Indices):
    """Each sample has its number, with probability `p` a number that was drawn, and one more."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.p, self.epoch = 0.9, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        drawn = random.random() if random.random() < self.p else 0.0
        return torch.tensor([index, drawn * (1 + self.epoch), float(np.random.rand())], dtype=torch.float64)


class TellsTheEpoch(sources.Sized):
    def __init__(self, dataset: Augmented) -> None:
        super().__init__(SIZE)
        self.dataset, self.epoch = dataset, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.dataset.set_epoch(self.epoch)
        return iter(torch.randperm(SIZE).tolist())


class StartsLater(Sampler[int]):
    def __init__(self, dataset: Augmented) -> None:
        self.start = 6

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        return iter(range(start, SIZE))

    def __len__(self) -> int:
        return SIZE - self.start


class Reseeds(Augmented):
    """Seeds python's generator where a process notices a new epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.now: torch.Tensor = torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]
        self.noticed = 0

    def set_epoch(self, epoch: int) -> None:
        self.now.fill_(epoch)

    def __getitem__(self, index: int) -> Any:
        if self.noticed < int(self.now):
            self.noticed = int(self.now)
            random.seed(self.noticed)
        return super().__getitem__(index)


class MakesLate(Augmented):
    """Makes a generator when a sample first needs it, from the second epoch on, in a pass's first batch."""

    generator: np.random.Generator | None = None

    def __getitem__(self, index: int) -> Any:
        if not self.epoch or index % 4 == 0:
            return torch.tensor([float(index), 0.0])
        if self.generator is None:
            self.generator = np.random.default_rng()
        return torch.tensor([float(index), self.generator.random()])


class DrawsInLoad(IterableDataset[Any]):
    """Saves the samples that it holds back as indices, and reads them again when it is loaded."""

    def __init__(self) -> None:
        self.at, self.held, self.resumed = 0, list[Any](), False

    def __iter__(self) -> Iterator[Any]:
        own = sources.part_of_worker(SIZE)
        if not self.resumed:
            self.at, self.held = own.start, []
        self.resumed = False
        while self.at < SIZE or self.held:
            while self.at < SIZE and len(self.held) < 3:
                self.held.append(read(self.at))
                self.at += own.step
            yield self.held.pop(0)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "held": [index for index, _ in self.held]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.held, self.resumed = state["at"], [read(index) for index in state["held"]], True


def read(index: int) -> tuple[int, float]:
    return index, round(random.random(), 6)


class Row(NamedTuple):
    make: Callable[..., Any]  # the source, with these keywords for its DataLoader
    before: Callable[[Loader, int], None] = lambda loader, epoch: None  # what the loop does before a pass
    after: Callable[[Loader, int], None] = lambda loader, step: None  # and after a batch, by its number in the run
    says: str = ""  # what is said by the save where a resume is not exact; empty: each is exact, and nothing is said
    here: str | None = None  # the same without worker processes, if that is another
    options: dict[str, Any] = {}  # noqa: RUF012  # for `midepoch.wrap`


def loading(kind: Callable[[], Any], sampler: Callable[[Any], Any] = RandomSampler) -> Callable[..., Any]:
    """A function that makes a DataLoader of such a dataset, in the order of such a sampler."""

    def make(**workers: Any) -> Any:
        dataset = kind()
        return DataLoader(dataset, BATCH, sampler=sampler(dataset), **workers)

    return make


def sets_the_epoch(loader: Loader, epoch: int) -> None:
    loader.dataset.set_epoch(epoch)


def follows_the_step(loader: Loader, step: int) -> None:
    loader.dataset.p = 0.9 - step / 40


ROWS = {
    "set_epoch": Row(loading(Augmented), sets_the_epoch),
    "a sampler tells the epoch": Row(loading(Augmented, TellsTheEpoch)),
    "a probability follows the step": Row(
        loading(Augmented), after=follows_the_step, here="",
        says="dataset.p changed after this epoch's workers started",
    ),
    "a sample reseeds": Row(loading(Reseeds), sets_the_epoch, says="two reads of sample"),
    "a start that is used once": Row(loading(Augmented, StartsLater)),
    "a load that draws": Row(
        lambda **workers: DataLoader(DrawsInLoad(), batch_size=None, **workers),
        says="load_state_dict of this DrawsInLoad draws", options={"shard": False},
    ),
    "a generator is made late": Row(loading(MakesLate), sets_the_epoch),
}


def loader_of(row: Row, workers: int, kept: bool) -> Loader:
    return midepoch.wrap(row.make(num_workers=workers, persistent_workers=kept), seed=3, **row.options)
