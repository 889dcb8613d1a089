"""What the tests read: small sources whose samples show which they are and which random numbers they drew."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

import midepoch
from midepoch.loader.loader import Loader
from midepoch.testing import digest
from midepoch.testing.pool import Call, shared_pool

# --- what comes out ---


def plain(batch: Any) -> Any:
    """A batch as built-in values, so that == compares it bit for bit."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    return batch


def taken(loader: Any, count: int | None = None) -> list[Any]:
    """The next batches of a new pass, all of them without `count`; the pass is then given up without a word."""
    return [plain(batch) for batch in itertools.islice(iter(loader), count)]


def loaded(loader: Any, state: dict[str, Any]) -> Any:
    loader.load_state_dict(state)
    return loader


def resumed(make: Callable[[], Loader], state: dict[str, Any]) -> list[Any]:
    """The rest of the epoch, by a fresh loader."""
    with make() as loader:
        return taken(loaded(loader, state))


def heads(make: Callable[[], Loader], count: int) -> tuple[list[Any], dict[str, Any]]:
    """The first batches of a fresh loader, and the state after them."""
    with make() as loader:
        return taken(loader, count), loader.state_dict()


def flat(batches: Iterable[Any]) -> list[Any]:
    """The samples of some batches, one after the other."""
    return [sample for batch in batches for sample in batch]


def quiet_resume(make: Callable[[], Loader], state: dict[str, Any]) -> list[Any]:
    """`resumed`, where a replay is expected to say what it costs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", midepoch.MidepochWarning)
        return resumed(make, state)


def under_other_seeds(number: int) -> None:
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


@contextlib.contextmanager
def caller_undisturbed() -> Iterator[None]:
    """Fail unless the caller's generators go on as if nothing had drawn here, kept halves of normal pairs included."""

    def drawn() -> list[float]:
        numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]
        return [*numbers, torch.rand(()).item(), torch.randn(()).item()]

    under_other_seeds(3)
    expected = drawn()
    under_other_seeds(3)
    yield
    assert drawn() == expected


def every_place(
    make: Callable[[], Any], cuts: Iterable[int] = (), epochs: int = 2, read: Callable[[Any], Any] = digest
) -> list[list[Any]]:
    """What so many epochs give. New loaders have continued at each place, or at these numbers of batches."""
    under_other_seeds(0)
    with make() as loader:
        given, states = list[list[Any]](), [(0, loader.state_dict())]
        for _ in range(epochs):
            given.append([])
            for batch in loader:
                given[-1].append(read(batch))
                states.append((sum(map(len, given)), loader.state_dict()))
            states.append((sum(map(len, given)), loader.state_dict()))  # where the length is unknown, of the next epoch
    whole, chosen = flat(given), set(cuts)
    for cut, state in states:
        if not chosen or cut in chosen:
            under_other_seeds(1000 + cut)
            with make() as resumed:
                resumed.load_state_dict(json.loads(json.dumps(state)))
                rest = (batch for _ in range(epochs + 1) for batch in resumed)
                assert [read(batch) for batch in itertools.islice(rest, len(whole) - cut)] == whole[cut:], f"at {cut}"
    return given


def calls_of(action: Callable[[], object], *events: str) -> int:
    """How many functions it calls: "call" counts Python's, "c_call" those of C."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in events

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def forbidden(*_: Any) -> Any:
    raise AssertionError("the program's code was run")


class Untouchable:
    """Answers any question by an error."""

    __getattribute__ = __getattr__ = __array__ = __len__ = __iter__ = __eq__ = __hash__ = __repr__ = forbidden
    value = __class__ = property(forbidden)


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


# --- map-style datasets ---


class Indices(Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index


class Made(Indices):
    """Sample i is what a function makes of i."""

    def __init__(self, make: Callable[[Any], Any], size: int) -> None:
        super().__init__(size)
        self.make = make

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


class Noisy(Indices):
    """Sample i is (i, and one number from each of the global generators), as augmentations draw them."""

    def __getitem__(self, index: int) -> Any:
        numbers = [index, random.random(), np.random.standard_normal(), float(torch.rand(()))]
        return torch.tensor(numbers, dtype=torch.float64)


class Fetched(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Failing(Noisy):
    """Raises, or is killed, at some samples as long as a file is there."""

    def __init__(self, size: int, failing: Sequence[int], marker: str | Path, deadly: bool = False) -> None:
        super().__init__(size)
        self.failing, self.marker, self.deadly = frozenset(failing), str(marker), deadly

    def __getitem__(self, index: int) -> Any:
        if index in self.failing and Path(self.marker).exists():
            if self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"sample {index} cannot be read")
        return super().__getitem__(index)


class Configured(Indices):
    """Sample i is (i, what worker_init_fn told the worker's copy)."""

    told = -1

    def __getitem__(self, index: int) -> Any:
        return index, self.told


def tell_the_dataset(worker: int) -> None:
    """A worker_init_fn as torch's docs have it: it configures the worker's own copy of the dataset."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.told = 7  # type: ignore[attr-defined]


def noisy_collate(samples: list[Any]) -> Any:
    """Draws once for the batch, as mixup does."""
    return torch.stack(samples), random.random(), float(np.random.rand())


# --- iterable datasets ---


def part_of_worker(size: int) -> range:
    """The numbers that this worker process gives; all of them outside of workers."""
    info = torch.utils.data.get_worker_info()
    return range(size) if info is None else range(info.id, size, info.num_workers)


class RandomIterableDataset(IterableDataset[Any]):
    """The class of the design, as it stands there."""

    def __init__(self, size: int, length: int) -> None:
        self.data = torch.randn(length, size)
        self.sampler = RandomSampler(range(length))

    def __iter__(self) -> RandomIterableDataset:
        self.sampler_iter = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        return self.data[next(self.sampler_iter)]


class Exposing(IterableDataset[Any]):
    """The same pattern, with the index and an augmentation in the sample."""

    def __init__(self, length: int, sampler: Any = None) -> None:
        self.sampler = RandomSampler(range(length)) if sampler is None else sampler

    def __iter__(self) -> Exposing:
        self.sampler_iter = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        return torch.tensor([next(self.sampler_iter), random.random(), float(torch.rand(()))], dtype=torch.float64)


class Inheriting(midepoch.StatefulIterable, IterableDataset[Any]):
    """The same pattern, deriving from StatefulIterable."""

    def __init__(self, length: int) -> None:
        self.sampler = RandomSampler(range(length))

    def __iter__(self) -> Iterator[Any]:
        self.sampler_iter = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        return torch.tensor([next(self.sampler_iter), random.random()], dtype=torch.float64)


class Pairs(IterableDataset[Any]):
    """Two samplers: one sample draws twice from the first and once from the second."""

    def __init__(self, length: int) -> None:
        self.twice, self.once = RandomSampler(range(2 * length)), RandomSampler(range(length))

    def __iter__(self) -> Pairs:
        self.iterators = [iter(self.twice), iter(self.once)]
        return self

    def __next__(self) -> Any:
        first, second = self.iterators
        return torch.tensor([next(first), next(first), next(second)])


class Rejecting(Exposing):
    """Draws until an index pleases it, so samples draw unequally."""

    def __init__(self, length: int, rejected: Sequence[int]) -> None:
        super().__init__(length)
        self.rejected = frozenset(rejected)

    def __next__(self) -> int:
        index = next(self.sampler_iter)
        while index in self.rejected:
            index = next(self.sampler_iter)
        return int(index)


class Documents(IterableDataset[Any]):
    """Each index is a document, which gives one chunk, or as many as `long` says: (100 index + chunk, an augmentation).

    It counts the documents that were read, and its passes.
    """

    def __init__(self, long: dict[int, int] | None = None, size: int = 22) -> None:
        self.sampler = RandomSampler(range(size))
        self.long = {5: 3, 6: 2, 15: 2} if long is None else long
        self.read = self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        for index in self.sampler:
            self.read += 1
            yield from self.chunks_of(index)

    def chunks_of(self, index: int) -> Iterator[Any]:
        return (self.sample(100 * index + chunk) for chunk in range(self.long.get(index, 1)))

    def sample(self, number: int) -> Any:
        return torch.tensor([number, torch.rand(())], dtype=torch.float64)


class Flushed(Documents):
    """Gives what it has kept of one rare document at its end."""

    def __iter__(self) -> Iterator[Any]:
        kept = []
        for index in self.sampler:
            kept += [1000 + index] * (index == 7)
            yield self.sample(index)
        yield from map(self.sample, kept)


class Stream(IterableDataset[Any]):
    """No samplers: (number, an augmentation), shuffled by a buffer as streaming datasets do."""

    def __init__(self, length: int, by_worker: bool = False) -> None:
        self.length, self.by_worker = length, by_worker

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for number in part_of_worker(self.length) if self.by_worker else range(self.length):
            buffer.append(number)
            if len(buffer) == 4:
                yield self.sample(buffer.pop(random.randrange(4)))
        while buffer:
            yield self.sample(buffer.pop())

    def sample(self, number: int) -> Any:
        return torch.tensor([number, random.random(), float(np.random.rand())], dtype=torch.float64)


def numbers(count: int = 10) -> Iterator[Any]:
    """A generator function: (number, an augmentation)."""
    for number in range(count):
        yield [number, random.random()]


class Restartable:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return numbers(self.count)


class Counter:
    """A source with a state of its own: its batches are numbers, and it keeps count; it may fail at a batch."""

    def __init__(self, count: int = 6, bad: int = -1) -> None:
        self.count, self.given, self.resumes, self.bad = count, 0, False, bad

    def __iter__(self) -> Iterator[int]:
        if not self.resumes:
            self.given = 0
        self.resumes = False
        while self.given < self.count:
            self.given += 1
            if self.given - 1 == self.bad:
                raise RuntimeError("the disk is gone")
            yield self.given - 1
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.resumes = state["given"], True


# --- samplers ---


class Sized(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class EverySecond(Sized):
    """A user's own sampler: even indices first, the odd ones shuffled."""

    def __iter__(self) -> Iterator[int]:
        odd = list(range(1, self.size, 2))
        random.shuffle(odd)
        return iter([*range(0, self.size, 2), *odd])


class Buckets(Sampler[list[int]]):
    """A user's own batch sampler: batches of 1, 2, 3 and so on."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size).tolist()
        length = 1
        while order:
            yield order[:length]
            order = order[length:]
            length += 1


class Forgetful(Sized):
    """Does not repeat itself: its order depends on how often objects of its class were asked."""

    asked = 0

    def __iter__(self) -> Iterator[int]:
        Forgetful.asked += 1
        return iter([(index + self.asked) % self.size for index in range(self.size)])


# --- processes ---

PATIENCE = 180.0


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Let worker processes, and whoever waits for them, look around after 180 seconds, which is five otherwise.

    So the time that something took tells whether anybody has waited, on a busy machine too.
    """
    for module in ("torch.utils.data._utils", "torch.utils.data._utils.worker", "torchdata.stateful_dataloader.worker"):
        if module in sys.modules:
            patch.setattr(f"{module}.MP_STATUS_CHECK_INTERVAL", PATIENCE)


def in_processes(function: Callable[..., Any], *arguments: tuple[Any, ...]) -> list[Any]:
    """`function` in one spawned process for each tuple of arguments, all at once; they are kept for later calls."""
    return shared_pool().run([Call(number, function, each) for number, each in enumerate(arguments)], timeout=120)


def in_gloo_world(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """`function(rank, *arguments)` in spawned processes under torch.distributed with gloo."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        return in_processes(_one_rank, *((function, rank, world_size, store, arguments) for rank in range(world_size)))


def _one_rank(function: Callable[..., Any], rank: int, world_size: int, store: str, arguments: tuple[Any, ...]) -> Any:
    # In processes that had a group before, torch 2.13 fails to connect all ranks at once in one case of a hundred.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": "1"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        return function(rank, *arguments)
    finally:
        if torch.__version__.startswith("2.6."):
            # This call holds the interpreter's lock there, and waits for gloo's threads, which need it to let go of
            # the last tensors.
            time.sleep(1)
        torch.distributed.destroy_process_group()


# --- loaders that several files make ---


def noisy_loader(size: int = 22, **keywords: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(size), **{"batch_size": 4, "shuffle": True, **keywords})


def torch_batches(rank: int, world_size: int, size: int, batch_size: int, drop_last: bool, even: bool) -> list[Any]:
    """What torch's DistributedSampler and DataLoader give this rank; `even` is the sampler's own drop_last."""
    dataset = Indices(size)
    sampler: Sampler[int] = DistributedSampler(dataset, world_size, rank, shuffle=False, drop_last=even)
    return [batch.tolist() for batch in DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last)]


def two_batches(rank: int, loader: Loader) -> Any:
    """What a loader that was wrapped in another process says of its length, two batches, and where it then stands."""
    return len(loader), taken(loader, 2), loader.state_dict()


def fail_in_an_epoch(path: str) -> None:
    """One process of multiprocessing: an error while its workers are reading."""
    loader = midepoch.wrap(noisy_loader(num_workers=2), seed=1)
    with midepoch.Snapshot(path, data=loader) as snapshot:
        for _ in loader:
            snapshot.step()
            raise ValueError("out of order")


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random, "getrandbits": lambda: random.getrandbits(1), "gauss": lambda: random.gauss(0, 1),
    "624 words": lambda: [random.getrandbits(32) for _ in range(624)], "random.seed": lambda: random.seed(5),
    "rand": np.random.rand, "624 numpy words": lambda: np.random.bytes(4 * 624),
    "standard_normal": np.random.standard_normal, "numpy.seed": lambda: np.random.seed(5),
    "torch.rand": lambda: torch.rand(1), "624 torch words": lambda: torch.randint(0, 9, (624,), dtype=torch.int32),
    "torch.randn": lambda: torch.randn(1), "torch.randperm": lambda: torch.randperm(5),
    "manual_seed": lambda: torch.manual_seed(5), "sample_generator": midepoch.sample_generator,
}  # fmt: skip
