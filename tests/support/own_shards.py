"""Shard lists, shuffles and readers of a user's own, built as the training programs in the wild build theirs."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import webdataset as wds
from torch.utils.data import IterableDataset, get_worker_info
from webdataset.filters import _shuffle
from webdataset.tariterators import tar_file_expander, url_opener


class SharedEpoch:
    """The number of an epoch, seen by worker processes too."""

    def __init__(self, epoch: int = 0) -> None:
        self._number = multiprocessing.Value("i", epoch)

    @property
    def number(self) -> int:
        with self._number.get_lock():
            return int(self._number.get_obj().value)

    @number.setter
    def number(self, epoch: int) -> None:
        self._number.value = epoch


def epoch_of(stage: Any) -> int:
    """The shared one, or its next."""
    if isinstance(stage.epoch, SharedEpoch):
        return stage.epoch.number
    stage.epoch += 1
    return int(stage.epoch)


def seed_here(epoch: int) -> int:
    """The worker's seed, moved by the epoch; outside of workers webdataset's own, of rank and worker."""
    info = get_worker_info()
    if info is None:
        return int(wds.utils.pytorch_worker_seed())
    return int(info.seed) + epoch * info.num_workers


class DrawnShards(IterableDataset[dict[str, str]]):
    """Draws shards with replacement, by weights if there are some, from a seed of worker and epoch."""

    draws = "with replacement"

    def __init__(
        self, urls: list[str], weights: Sequence[float] | None = None, nshards: int = sys.maxsize,
        epoch: SharedEpoch | int = -1,
    ) -> None:  # fmt: skip
        self.urls, self.weights, self.nshards = urls, weights, nshards
        self.epoch, self.rng = epoch, random.Random()

    def __iter__(self) -> Iterator[dict[str, str]]:
        self.rng.seed(seed_here(epoch_of(self)))
        for _ in range(self.nshards):
            yield {"url": self.rng.choices(self.urls, weights=self.weights)[0]}


class RepeatedShards(IterableDataset[dict[str, str]]):
    draws = "once"

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def __iter__(self) -> Iterator[dict[str, str]]:
        return itertools.cycle({"url": url} for url in self.urls)


class EpochShuffle(wds.PipelineStage):  # type: ignore[misc]  # webdataset has no types
    """A buffer's shuffle, seeded by the epoch, which may be shared; with a negative seed by the worker too."""

    draws = "once"

    def __init__(self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: SharedEpoch | int = -1) -> None:
        self.bufsize, self.initial, self.seed, self.epoch = bufsize, initial, seed, epoch

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        epoch = epoch_of(self)
        generator = random.Random(seed_here(epoch) if self.seed < 0 else self.seed + epoch)
        shuffled: Iterator[Any] = _shuffle(source, self.bufsize, self.initial, generator)
        return shuffled


def go_on(error: Exception) -> bool:
    return True


def samples_of_each_shard(source: Iterable[Any], handler: Any = go_on) -> Iterator[Any]:
    files = tar_file_expander(url_opener(source, handler=handler), handler=handler)
    yield from wds.tariterators.group_by_keys(files)


def own_split(source: Iterable[Any]) -> Iterator[Any]:
    """Divides shards by itself, or not: nothing shows."""
    yield from source
