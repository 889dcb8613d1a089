"""Samplers that divide the data among ranks by themselves, and samplers that change while they are read."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler

import midepoch
from midepoch import MidepochWarning, StateMismatchError, UnsupportedSourceError, World
from support import sources

SIZE = 24


class Holding(Sampler[Any]):
    """A batch sampler over whatever it is given, which it holds where it likes."""

    def __init__(self, inner: Any, **held: Any) -> None:
        self.held = {"deep": [held, {"inner": inner}]}
        self._read = inner

    def __len__(self) -> int:
        return -(-len(self._read) // 4)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self._read, 4, False))


class Named(Sampler[int]):
    """Holds numbers under some names, and gives all indices."""

    def __init__(self, length: int = SIZE, **names: Any) -> None:
        self.__dict__.update(names)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def loader(sampler: Any = None, batch_sampler: Any = None) -> DataLoader[int]:
    if batch_sampler is not None:
        return DataLoader(range(SIZE), batch_sampler=batch_sampler)  # type: ignore[arg-type]
    return DataLoader(range(SIZE), batch_size=4, sampler=sampler)  # type: ignore[arg-type]


def distributed(replicas: int = 2, rank: int = 0) -> DistributedSampler[int]:
    return DistributedSampler(range(SIZE), replicas, rank)  # type: ignore[arg-type]


class OfAWorld(Sampler[int]):
    """Divides by midepoch's own description of the ranks."""

    def __init__(self, world: World) -> None:
        self.w = world

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.w.rank, SIZE, self.w.world_size))


class OnlyItsRank(Named):
    def __init__(self, rank: int) -> None:
        super().__init__(_rank=rank, _world_size=2)


class Hidden(Sampler[Any]):
    """One rank's list, or its batches, with no name that says so."""

    def __init__(self, r: int, n: int, batch_size: int = 0, **held: Any) -> None:
        self.r, self.n = r, n
        self.__dict__.update(held)
        if batch_size:
            self.batch_size = batch_size

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[Any]:
        own = range(self.r, SIZE, self.n)
        size = getattr(self, "batch_size", 0)
        return iter(BatchSampler(own, size, False) if size else own)


DIVIDING = {
    "numpy's integers": lambda: loader(Named(_rank=np.int64(1), _world_size=np.int32(2))),
    "names of data-parallel ranks": lambda: loader(Named(data_parallel_rank=0, data_parallel_size=2)),
    "a World": lambda: loader(OfAWorld(World(1, 2))),
    "a rank, with nothing to build it for one": lambda: loader(OnlyItsRank(1)),
    "a DistributedSampler under another name": lambda: loader(batch_sampler=Holding(distributed())),
    "names in two objects": lambda: loader(batch_sampler=Holding(Named(num_shards=3), sampler=Named(shard_id=2))),
}


@pytest.mark.parametrize("kind", DIVIDING)
def test_a_sampler_that_divides_is_refused_with_the_cure(kind: str) -> None:
    words = r"build it for one process \(world size 1, rank 0\).*leave it out"
    with pytest.raises(UnsupportedSourceError, match=f"divides its list among ranks .*{words}.*shard=False"):
        midepoch.wrap(DIVIDING[kind](), seed=1)
    assert midepoch.wrap(DIVIDING[kind](), seed=1, shard=False).capabilities.elastic_world.holds is False
    midepoch.wrap(DIVIDING[kind](), seed=1, shard=True)


@pytest.mark.parametrize("names", [{"_rank": 1}, {"world_size": 4}, {"rank": 5, "num_replicas": 2}])
def test_one_sign_warns(names: dict[str, int]) -> None:
    with pytest.warns(MidepochWarning, match="may divide its list among ranks .*for one process"):
        midepoch.wrap(loader(Named(**names)), seed=1)


ONE_RANK_S = {
    "a list": lambda: loader(list(range(0, SIZE, 2))),
    "a sampler": lambda: loader(Hidden(1, 2)),
    "torch's": lambda: loader(SubsetRandomSampler(range(1, SIZE, 2))),
    "in a batch sampler": lambda: loader(batch_sampler=Hidden(0, 1, sampler=range(0, SIZE, 2), batch_size=3)),
}


@pytest.mark.parametrize("kind", ONE_RANK_S)
def test_a_list_as_long_as_one_rank_s_share_is_one_sign(kind: str) -> None:
    with pytest.warns(MidepochWarning, match=r"may divide its list among ranks \(.* has a length of .* for 24 samples"):
        midepoch.wrap(ONE_RANK_S[kind](), seed=1, world=World(1, 2))
    with warnings.catch_warnings(action="error"):
        midepoch.wrap(ONE_RANK_S[kind](), seed=1, world=World(1, 2), shard=True)
        midepoch.wrap(ONE_RANK_S[kind](), seed=1, world=World(1, 3))
        midepoch.wrap(ONE_RANK_S[kind](), seed=1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sampler", [
    Named(), Named(num_replicas=1, rank=0), Named(seed=3), Named(rank=True), OfAWorld(World()),
    SubsetRandomSampler(range(SIZE)), RandomSampler(range(SIZE)), list(range(SIZE)),
])  # fmt: skip
def test_the_whole_list_is_no_alarm(sampler: Any) -> None:
    midepoch.wrap(loader(sampler), seed=1)
    midepoch.wrap(loader(sampler), seed=1, world=World(1, 2))
    for batches in (Holding(range(SIZE)), Holding(distributed(1)), Hidden(0, 1, 2)):
        midepoch.wrap(loader(batch_sampler=batches), seed=1, world=World(1, 2))


def test_a_distributed_sampler_with_a_state_is_understood() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader.sampler", reason="needs torchdata")
    ours = midepoch.wrap(loader(stateful.StatefulDistributedSampler(range(SIZE), 2, 1, seed=5)))
    plain = midepoch.wrap(loader(DistributedSampler(range(SIZE), 2, 1, seed=5)))  # type: ignore[arg-type]
    assert ours.capabilities.elastic_world
    assert sources.taken(ours) == sources.taken(plain)


# --- samplers that change ---------------------------------------------------------------------------------------------


class InPlace(Sampler[int]):
    def __init__(self) -> None:
        self.indices = list(range(SIZE))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices)


class Passes(Sampler[int]):
    """Orders by a seed of its own and the number of its passes."""

    passes = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(SIZE), SIZE))


class Seen(Sampler[int]):
    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        for index in random.sample(sorted(set(range(SIZE)) - self.seen), min(6, SIZE - len(self.seen))):
            self.seen.add(index)
            yield index


REMEMBERING = {"a list of its own": InPlace, "a count of passes": Passes, "what it has given": Seen}


@pytest.mark.parametrize("kind", REMEMBERING)
def test_a_sampler_that_remembers_resumes_in_any_epoch(kind: str) -> None:
    """The epochs before are listed first, in a process that has not read them."""
    make: Callable[..., Any] = lambda: midepoch.wrap(loader(REMEMBERING[kind]()), seed=1)
    epochs = sources.every_place(make, epochs=3, read=sources.plain)
    head = make()
    for epoch in range(2):
        next(iter(head))
        head.load_state_dict(head.state_dict())  # in this process, the pass goes on with its own list
        assert sources.taken(head) == epochs[epoch][1:]


class Counting(Passes):
    """Counts what is asked of it, where copies count too."""

    asked: ClassVar[dict[str, int]] = {"iter": 0}

    def __iter__(self) -> Iterator[int]:
        self.asked["iter"] += 1
        return super().__iter__()


def test_the_sampler_itself_is_iterated_once_an_epoch() -> None:
    sampler = Counting()
    ours = midepoch.wrap(loader(sampler), seed=1)
    Counting.asked["iter"] = 0
    assert (len(ours), ours.batches_left, ours.batches_done, len(ours.sampler)) == (6, 6, 0, SIZE)
    assert Counting.asked["iter"] == 0, "a length lists nothing"
    for epoch in range(3):
        list(ours)
        assert sampler.passes == epoch + 1
    assert Counting.asked["iter"] == 3 + 2, "one trial, two passes over a copy"
    state = sources.heads(lambda: midepoch.wrap(loader(Counting()), seed=1), 2)[1]
    sampler = Counting()
    ours = midepoch.wrap(loader(sampler), seed=1)
    ours.load_state_dict(state)
    assert sampler.passes == 0, "a copy is compared"
    next(_held := iter(ours))
    ours.load_state_dict(ours.state_dict())
    list(ours)
    assert sampler.passes == 1


class Uncopied(Passes):
    def __getstate__(self) -> Any:
        raise TypeError("not to be copied")


class Original(Passes):
    def __init__(self) -> None:
        super().__init__()
        self.me = id(self)

    def __iter__(self) -> Iterator[int]:
        if self.me != id(self):
            raise RuntimeError("a copy")
        return super().__iter__()


@pytest.mark.parametrize("kind", [Uncopied, Original])
def test_one_that_cannot_be_tried_is_believed(kind: Any) -> None:
    sampler = kind()
    ours = midepoch.wrap(loader(sampler), seed=1)
    assert not ours.capabilities.exact_order.believed
    list(ours), list(ours)
    assert sampler.passes == 2
    exact = ours.capabilities.exact_order
    why = {Uncopied: r"cannot be pickled \(TypeError: not to be", Original: "a copy of it raised RuntimeError: a copy"}
    assert exact.holds and exact.believed and re.search(f"repeats itself was not tried: .*{why[kind]}", exact.reason)
    assert not ours.capabilities.exact_augmentations.believed
    exposing = midepoch.wrap(sources.Exposing(SIZE, Uncopied()), seed=1)
    list(exposing)
    assert "repeats itself was not tried" in exposing.capabilities.exact_order.reason
    next(iter(ours))
    resumed = midepoch.wrap(loader(Uncopied()), seed=1)
    with pytest.raises(StateMismatchError, match=r"the list of epoch 2 differs.*no copy of it can be listed \(it"):
        resumed.load_state_dict(ours.state_dict())
