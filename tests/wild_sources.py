"""Samplers and wrappers as third-party packages have them: the same structure, written anew."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

# --- samplers without an end ---


class Rounds(Sampler[int]):
    """As samplers for training by iterations: shuffled rounds without an end, which ranks take in turn."""

    def __init__(self, size: int, shuffle: bool = True, seed: int = 3, rank: int = 0, world_size: int = 1) -> None:
        self._size, self._shuffle, self._seed = size, shuffle, seed
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        yield from itertools.islice(self._rounds(), self._rank, None, self._world_size)

    def _rounds(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        while True:
            if self._shuffle:
                yield from torch.randperm(self._size, generator=generator).tolist()
            else:
                yield from range(self._size)


class Prepared(Sampler[int]):
    """The same with an iterator that is made at once, and the length of one round."""

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 3, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.dataset, self.shuffle, self.seed, self.size = dataset, shuffle, seed, len(dataset)
        self.indices = self._of_rank()

    def _rounds(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.seed)
        while True:
            if self.shuffle:
                yield from torch.randperm(self.size, generator=generator).tolist()
            else:
                yield from range(self.size)

    def _of_rank(self) -> Iterator[int]:
        yield from itertools.islice(self._rounds(), self.rank, None, self.world_size)

    def __iter__(self) -> Iterator[int]:
        yield from self.indices

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Means nothing without epochs."""


class Weighted(Rounds):
    """Draws with replacement: no rounds."""

    def _rounds(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        while True:
            yield int(torch.randint(self._size, (1,), generator=generator))


class Rare(Rounds):
    """Gives some samples more often: rounds of another length than the data."""

    def __init__(self, size: int, factors: list[int]) -> None:
        super().__init__(size)
        self.factors = factors

    def _rounds(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        while True:
            repeated = [index for index, factor in enumerate(self.factors) for _ in range(factor)]
            yield from (repeated[place] for place in torch.randperm(len(repeated), generator=generator).tolist())


class SameRounds(Rounds):
    """Each round is the first one again."""

    def _rounds(self) -> Iterator[int]:
        while True:
            generator = torch.Generator().manual_seed(self._seed)
            yield from torch.randperm(self._size, generator=generator).tolist()


class Blocks(Rounds):
    """Ranks do not take turns: each has a block of every round."""

    def __iter__(self) -> Iterator[int]:
        part = self._size // self._world_size
        for place, index in enumerate(self._rounds()):
            if place % self._size // max(part, 1) == self._rank:
                yield index


class Staged(Rounds):
    """Rounds over all samples in its first stage only."""

    def __init__(self, size: int, stage: int) -> None:
        super().__init__(size)
        self.stage = stage


# --- finite samplers ---


class RepeatedAugmentation(Sampler[int]):
    """Each sample three times in a row, as many indices as there are samples, divided among ranks."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int, repeats: int = 3) -> None:
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.num_repeats, self.epoch = repeats, 0
        self.num_samples = math.ceil(len(dataset) * repeats / num_replicas)
        self.total_size = self.num_samples * num_replicas
        self.num_selected_samples = len(dataset) // num_replicas

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        indices = torch.randperm(len(self.dataset), generator=generator).repeat_interleave(self.num_repeats).tolist()
        indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas][: self.num_selected_samples])

    def __len__(self) -> int:
        return self.num_selected_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Grouped(BatchSampler):
    """Batches of one group each, from buffers that outlive a pass. Its length is not defined."""

    def __init__(self, sampler: Any, groups: list[int], batch_size: int) -> None:
        self.sampler, self.group_ids, self.batch_size = sampler, np.asarray(groups), batch_size
        self.buffers: dict[int, list[int]] = defaultdict(list)

    def __iter__(self) -> Iterator[list[int]]:
        for index in self.sampler:
            buffer = self.buffers[int(self.group_ids[index])]
            buffer.append(index)
            if len(buffer) == self.batch_size:
                yield buffer[:]
                del buffer[:]

    def __len__(self) -> int:
        raise NotImplementedError("len() of Grouped is not well-defined.")
