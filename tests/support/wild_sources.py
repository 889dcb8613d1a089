"""Samplers and wrappers as third-party packages have them: the same structure, written anew."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

# --- samplers without an end ---


def rounds(size: int, shuffle: bool, seed: int) -> Iterator[int]:
    generator = torch.Generator()
    generator.manual_seed(seed)
    while True:
        yield from torch.randperm(size, generator=generator).tolist() if shuffle else range(size)


class TrainingSampler(Sampler[int]):
    """As samplers for training by iterations: shuffled rounds without an end, which ranks take in turn."""

    def __init__(self, size: int, shuffle: bool = True) -> None:
        self._size, self._shuffle, self._seed, self._rank, self._world_size = size, shuffle, 3, 0, 1

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self._rounds(), self._rank, None, self._world_size)

    def _rounds(self) -> Iterator[int]:
        return rounds(self._size, self._shuffle, self._seed)


class Prepared(Sampler[int]):
    """The same with an iterator that is made at once, and the length of one round."""

    def __init__(self, dataset: Any, shuffle: bool = True) -> None:
        self.dataset, self.shuffle, self.size, self.rank, self.world_size = dataset, shuffle, len(dataset), 0, 1
        self.indices = rounds(self.size, shuffle, 3)

    def __iter__(self) -> Iterator[int]:
        yield from self.indices

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Means nothing without epochs."""


class RepeatFactorTrainingSampler(TrainingSampler):
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


# --- finite samplers ---


class Pretraining(Sampler[list[int]]):
    """As batch samplers for the pretraining of language models: len() in samples, and where to continue from outside.

    Args:
        total_samples: of all passes together.
        consumed_samples: where to continue.
        micro_batch_size: of one process.
        pad: the last batch with index -1, instead of leaving it out.
    """

    def __init__(
        self, total_samples: int, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int = 0,
        data_parallel_size: int = 1, pad: bool = False,
    ) -> None:  # fmt: skip
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size, self.data_parallel_rank = micro_batch_size, data_parallel_rank
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.pad = pad

    def __len__(self) -> int:
        return self.total_samples

    def order(self) -> list[int]:
        return list(range(self.consumed_samples, self.total_samples))

    def __iter__(self) -> Iterator[list[int]]:
        left, together = self.order(), self.micro_batch_times_data_parallel_size
        left += [-1] * (-len(left) % together if self.pad else 0)
        own = slice(self.data_parallel_rank * self.micro_batch_size, None)
        for first in range(0, len(left) - together + 1, together):
            self.count(together)
            yield left[first : first + together][own][: self.micro_batch_size]

    def count(self, samples: int) -> None:
        """Before each batch of all processes."""


class PretrainingAtRandom(Pretraining):
    """Its epoch, too, is that of what it has consumed, which it counts while it is read."""

    def order(self) -> list[int]:
        together = self.micro_batch_times_data_parallel_size
        each = self.total_samples - self.total_samples % together
        epoch, done = divmod(self.consumed_samples, each)
        generator = torch.Generator()
        generator.manual_seed(epoch)
        return [int(index) for index in torch.randperm(each, generator=generator)[done:]]

    def count(self, samples: int) -> None:
        self.consumed_samples += samples


class KeepsState(Sampler[Any]):
    """Its own iterator of batches of names, filled by duration, from a buffer; it counts, and keeps a state."""

    def __init__(self, durations: list[float], longest: float) -> None:
        self.durations, self.longest, self.rank, self.world_size = durations, longest, 0, 1
        self.epoch, self.just_restored = 0, False
        self.kept = {"batches": 0, "epoch": 0}
        self.names: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "kept": dict(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.kept, self.just_restored = state["epoch"], dict(state["kept"]), True

    def __iter__(self) -> KeepsState:
        if not self.just_restored:
            names = [str(number) for number in range(len(self.durations))]
            random.Random(self.epoch).shuffle(names)
            self.names, self.kept = iter(names), {"batches": 0, "epoch": self.epoch}
        self.just_restored = False
        return self

    def __next__(self) -> list[str]:
        batch: list[str] = []
        while sum(self.durations[int(name)] for name in batch) < self.longest - 2:
            name = next(self.names, None)
            if name is None:
                break
            batch.append(name)
        if not batch:
            raise StopIteration
        self.kept["batches"] += 1
        return batch


class ItsOwnIterator(Sampler[int]):
    """Is its own iterator, and begins again when it is asked behind its end."""

    def __init__(self, size: int) -> None:
        self.size, self.place = size, 0

    def __iter__(self) -> ItsOwnIterator:
        self.place = 0
        return self

    def __next__(self) -> int:
        self.place += 1
        if self.place > self.size:
            self.place = 0
            raise StopIteration
        return self.size - self.place


class GroupedBatchSampler(BatchSampler):
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
        raise NotImplementedError("len() of GroupedBatchSampler is not well-defined.")


# --- objects around a DataLoader ---


class Around:
    def __init__(self, loader: Any) -> None:
        self.loader = loader


class OnDevice(Around):
    device = "cpu"

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch.to(self.device)

    def __len__(self) -> int:
        return len(self.loader)


def erased(batch: Any) -> Any:
    """Draws from all three global generators for one batch in two."""
    return batch if random.random() > 0.5 else batch + torch.rand(()) + np.random.standard_normal()


class OneAhead(Around):
    """Works on the next batch before it hands out the one before, as prefetchers to a device do."""

    def __iter__(self) -> Iterator[Any]:
        first, batch = True, None
        for following in self.loader:
            following = erased(following.sub_(0.5))
            if not first:
                yield batch
            else:
                first = False
            batch = following
        if not first:
            yield batch

    def __len__(self) -> int:
        return len(self.loader)


class Fetcher(Around):
    """The same as its own iterator, which keeps the next two batches."""

    def __iter__(self) -> Fetcher:
        self.batches = iter(self.loader)
        self.following = [next(self.batches, None) for _ in range(2)]
        return self

    def __next__(self) -> Any:
        batch = self.following.pop(0)
        if batch is None:
            raise StopIteration
        self.following.append(next(self.batches, None))
        return batch * random.random()


class BeginsAgain:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class KeepsWorkers(DataLoader[Any]):
    """Keeps one iterator, and so its workers, for all passes, from its first pass on."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        object.__setattr__(self, "batch_sampler", BeginsAgain(self.batch_sampler))
        self.iterator: Any = None

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _ in range(len(self)):
            yield next(self.iterator)


class KeepsFromTheStart(KeepsWorkers):
    """The same from when it is made on."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.iterator = self._get_iterator()


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield 2 * batch + float(torch.rand(()))


class Neighbours(DataLoader[Any]):
    """As loaders of graphs: its collate function, a method, draws neighbours, and the main process finishes a batch."""

    def __init__(self, dataset: Any, batch_size: int, **keywords: Any) -> None:
        super().__init__(dataset, batch_size, collate_fn=self.sample, **keywords)

    def sample(self, samples: list[Any]) -> Any:
        drawn = torch.randint(len(samples), (len(samples),))
        return torch.stack(samples) + float(torch.rand(())), drawn

    def finish(self, batch: Any) -> Any:
        samples, drawn = batch
        return samples + samples[drawn] * float(torch.rand(()))

    def _get_iterator(self) -> Any:
        return map(self.finish, super()._get_iterator())


class ReadsByItself(Neighbours):
    """Makes batches without torch's iterator."""

    def _get_iterator(self) -> Any:
        indices: Any = self.batch_sampler
        return (self.finish(self.sample([self.dataset[index] for index in batch])) for batch in indices)


# --- objects around a DataLoader that do more than pass its batches on ---


class Counting(Around):
    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            yield batch * number


class ItsOwn(Around):
    def __iter__(self) -> ItsOwn:
        return self

    def __next__(self) -> Any:
        return next(self.loader)


class OneMore(Around):
    def __iter__(self) -> Iterator[Any]:
        yield from self.loader
        yield torch.zeros(1, 2)


class Mixing(Around):
    def __iter__(self) -> Iterator[Any]:
        before = None
        for batch in self.loader:
            yield batch if before is None else batch + before.mean()
            before = batch


class Pairs(Around):
    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        for batch in batches:
            yield torch.cat([batch, next(batches, batch)])


class Twice(Around):
    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch
            yield batch


class AllAtOnce(Around):
    def __iter__(self) -> Iterator[Any]:
        yield from list(self.loader)


class LooksFirst(Around):
    def __iter__(self) -> Iterator[Any]:
        self.shape = next(iter(self.loader)).shape
        yield from self.loader


class InAThread(Around):
    def __iter__(self) -> Iterator[Any]:
        batches: queue.Queue[Any] = queue.Queue(2)

        def read() -> None:
            for batch in self.loader:
                batches.put(batch)
            batches.put(None)

        threading.Thread(target=read, daemon=True).start()
        yield from iter(batches.get, None)


class WorksInAThread(Around):
    def __iter__(self) -> Iterator[Any]:
        with ThreadPoolExecutor(1) as pool:
            for batch in self.loader:
                yield pool.submit(torch.neg, batch).result()


class Locked(Around):
    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            with self.lock:
                yield batch


class Longer(Around):
    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader) + 1


class Skipping(Around):
    """Leaves out the batches with some sample: one for one only for a while."""

    def __init__(self, loader: Any, left_out: int = 0) -> None:
        super().__init__(loader)
        self.left_out = left_out

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.left_out not in batch[:, 0].tolist():
                yield batch


class Stopping(Skipping):
    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.left_out in batch[:, 0].tolist():
                return
            yield batch


class DrawingLate(Skipping):
    """Draws for the batch with some sample only."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch + random.random() if self.left_out in batch[:, 0].tolist() else batch


class OneBuffer(Around):
    """Hands out one and the same buffer, as graphs of a GPU need it."""

    def __iter__(self) -> Iterator[Any]:
        buffer = None
        for batch in self.loader:
            buffer = batch.clone() if buffer is None or buffer.shape != batch.shape else buffer.copy_(batch)
            yield buffer


class OfTwo(Around):
    def __init__(self, loader: Any, other: Any) -> None:
        super().__init__(loader)
        self.other = other

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class Unused(OfTwo):
    def __iter__(self) -> Iterator[Any]:
        yield from self.other


class HandingOn(Around):
    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        return (2 * batch for batch in self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class Keeping(Around):
    """Is one ahead, and keeps the last one to itself."""

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        ahead = next(batches)
        for following in batches:
            yield ahead
            ahead = following


class MakingAGenerator(Around):
    def __iter__(self) -> Iterator[Any]:
        self.generator = random.Random(3)
        for batch in self.loader:
            yield batch + self.generator.random()
