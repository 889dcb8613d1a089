"""Lists, generator functions, re-iterables, sources with a state of their own, streams in workers."""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import MidepochError, MidepochWarning, SourceError, StateError, UnsupportedSourceError, World
from midepoch.loader.loader import Loader
from support import law_sources, sources, transparent_sources

pytestmark = pytest.mark.filterwarnings("ignore:.*naively fast-forwarding.*")


class Stated(IterableDataset[Any]):
    """Eleven samples, and a length that need not be true."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(11))

    def __len__(self) -> int:
        return self.length


class StatedSamplers(Stated):
    """The same, exposing its sampler."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.sampler = SequentialSampler(range(11))

    def __iter__(self) -> Iterator[int]:
        yield from self.sampler


class StatedState(sources.Counter, IterableDataset[Any]):
    """The same, with a state of its own."""

    def __init__(self, length: int) -> None:
        super().__init__(11)
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("kind", [Stated, StatedSamplers, StatedState])
@pytest.mark.parametrize("length", [8, 11, 14])
@pytest.mark.parametrize(("workers", "shard"), [(0, None), (0, False), (0, True), (1, None), (2, True), (2, False)])
@pytest.mark.parametrize(("batch_size", "drop_last"), [(4, False), (4, True), (None, False)])
def test_the_length_of_a_dataloader_over_a_stream_is_torch_s_own(
    kind: Any, length: int, workers: int, shard: bool | None, batch_size: int | None, drop_last: bool
) -> None:
    loader: Any = DataLoader(kind(length), batch_size, num_workers=workers, drop_last=drop_last)
    if kind is StatedSamplers and shard is None and length != 11:
        with pytest.raises(UnsupportedSourceError, match=f"len.. of {length}, .* 11 samples: correct its __len__"):
            len(midepoch.wrap(loader, seed=0))
        return
    assert len(midepoch.wrap(loader, seed=0, shard=shard)) == len(loader)


class Alone(midepoch.StatefulIterable):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


# --- lists and tuples of batches ---


def test_a_resume_of_a_sequence_reads_nothing_that_was_consumed() -> None:
    read: list[int] = []

    class Watched(list[int]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    loader = midepoch.wrap(Watched(range(1000)), seed=5, verify="off")
    loader.seek(position=990)
    assert sources.taken(loader) == read == list(range(990, 1000))


def test_other_sequences_and_datasets() -> None:
    for source, size in ((range(5), 5), (deque([0, 1]), 2), (sources.Indices(4), 4)):
        make = functools.partial(midepoch.wrap, source, seed=5)
        assert sources.every_place(make, read=int) == [list(range(size))] * 2
    with pytest.raises(UnsupportedSourceError, match="shard=False"):
        midepoch.wrap([1, 2], shard=False)


# --- what is replayed ---


def seeded_numbers() -> Iterator[Any]:
    """Draws from everything, before and between its items."""
    offset = random.random()
    for number in range(9):
        yield [number, offset, random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(()))]


class Randomized:
    """A re-iterable with a generator of its own, which each pass makes anew from the one before."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __iter__(self) -> Iterator[float]:
        self.rng = random.Random(self.rng.random())
        for _ in range(9):
            yield self.rng.random()


REPLAYED: dict[str, Callable[[], Any]] = {
    "re-iterable with a generator made anew": Randomized,
    "generator function": lambda: seeded_numbers,
    "lambda": lambda: lambda: seeded_numbers(),
    "function that returns a list": lambda: lambda: [1, 2, 3, 4, 5],
    "re-iterable": lambda: sources.Restartable(9),
    "array": lambda: np.arange(12).reshape(6, 2),
    "stream": lambda: sources.Stream(9),
    "stream in a loader, one by one": lambda: DataLoader(sources.Stream(9), batch_size=None),
    "stream in a loader, drop_last": lambda: DataLoader(sources.Stream(9), batch_size=2, drop_last=True),
    "stream in a loader, collated": lambda: DataLoader(sources.Stream(9), 2, collate_fn=sources.noisy_collate),
    "stream in one worker": lambda: DataLoader(sources.Stream(9), batch_size=2, num_workers=1),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_is_exact_at_every_cut(name: str) -> None:
    def make() -> Loader:
        return midepoch.wrap(REPLAYED[name](), seed=5)

    with pytest.warns(MidepochWarning, match="read again from its start to position"):
        sources.every_place(make, (1, 3) if "worker" in name else ())
    with make() as loader:
        list(loader)
        promised = loader.capabilities
    assert not promised.constant_time_resume and "read again" in promised.constant_time_resume.reason
    assert promised.exact_order and promised.rank_independent


def test_a_replay_warns_once() -> None:
    loader = midepoch.wrap(sources.numbers, seed=5)
    sources.taken(loader, 3)
    state = loader.state_dict()
    with pytest.warns(MidepochWarning) as told:
        for _ in range(3):
            loader.load_state_dict(state)
            sources.taken(loader)
    assert len(told) == 1


def test_a_chain_is_the_same_on_every_split() -> None:
    def at(position: int, world_size: int, num_workers: int, rank: int = 0) -> str:
        source = DataLoader(sources.Stream(120), batch_size=2, num_workers=num_workers)
        make = lambda: midepoch.wrap(source, seed=5, shard=True, world=World(rank, world_size))
        return str(sources.heads(make, position // 2 // world_size)[1]["detail"]).rpartition("chain=")[2]

    chains = {position: at(position, 1, 0) for position in (12, 60, 96)}
    assert len(set(chains.values())) == 3
    for position, chain in chains.items():
        assert {len(chain), at(position, 2, 0), at(position, 3, 0, 2)} == {8, chain}
    assert at(60, 2, 2, 1) == at(60, 1, 3) == chains[60]


class Parts(IterableDataset[int]):
    """Takes a rank's part of a list that is shuffled when the pass begins; its end may fail."""

    def __init__(self, rank: int = 0, world_size: int = 1, fails: bool = False) -> None:
        self.rank, self.world_size, self.fails = rank, world_size, fails

    def __len__(self) -> int:
        return 8 // self.world_size

    def __iter__(self) -> Iterator[int]:
        files = list(range(8))
        random.shuffle(files)
        yield from files[self.rank :: self.world_size]
        if self.fails:
            raise OSError("connection lost")


def test_ranks_that_take_parts_of_a_shuffled_list_shuffle_alike() -> None:
    found = []
    for rank in range(2):
        loader = DataLoader(Parts(rank, 2), batch_size=2)
        found += sources.taken(midepoch.wrap(loader, seed=0, shard=False, world=World(rank, 2)))
    assert sorted(number for batch in found for number in batch) == list(range(8))


def test_the_error_at_the_end_of_one_pass_is_not_anothers() -> None:
    dataset = Parts(fails=True)
    loader = midepoch.wrap(DataLoader(dataset, batch_size=2), seed=0, shard=True)
    state = loader.state_dict()
    assert len(list(itertools.islice(loader, 4))) == 4
    dataset.fails = False
    loader.load_state_dict(state)
    assert len(list(loader)) == 4


def test_a_generator_that_has_become_shorter_is_named() -> None:
    items = [1, 2, 3, 4, 5]

    def shrinking() -> Iterator[int]:
        yield from items

    state = sources.heads(lambda: midepoch.wrap(shrinking, seed=5), 4)[1]
    del items[2:]
    with pytest.raises(SourceError, match="ended after 2 units, but the state stands at 4"):
        sources.quiet_resume(lambda: midepoch.wrap(shrinking, seed=5), state)


@pytest.mark.parametrize(("says", "expected"), [(9, "ended after 6 units"), (4, "more than the 4")])
def test_a_stream_that_gives_other_than_its_length_is_named(says: int, expected: str) -> None:
    class Wrong(sources.Restartable):
        def __len__(self) -> int:
            return says

    with pytest.raises(SourceError, match=expected):
        sources.taken(midepoch.wrap(Wrong(6), seed=5))


# --- what is refused ---


def test_what_cannot_be_restarted_is_refused_with_the_cure() -> None:
    for one_way in (iter([1]), (n for n in [1]), map(int, "12"), zip([1], [2], strict=True), reversed([1])):
        with pytest.raises(UnsupportedSourceError, match=r"wrap the function that makes it.*lambda"):
            midepoch.wrap(one_way)
    with Path(__file__).open() as file, pytest.raises(UnsupportedSourceError, match="wrap the function"):
        midepoch.wrap(file)
    loader = midepoch.wrap(transparent_sources.Restarts(), seed=5)  # which has __next__, and is no one-way iterator
    assert sources.taken(loader) == sources.taken(loader) == [[number] for number in range(1, 15)]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("text", "str"), (b"bytes", "bytes"), ({"a": 1}, "dict"), ({1, 2}, r"sorted"), (7, "int"), (None, "NoneType"),
        (torch.nn.Linear(1, 1), "Linear"), (torch.nn.Sequential(), "Sequential"), (list, "list"),
        (torch.optim.SGD([torch.zeros(1)], lr=1), "SGD"), (sources.Stream, "Stream"),
        (DataLoader(Alone()), "Alone by index.*derive it from StatefulIterable and IterableDataset$"),  # type: ignore[arg-type]
        (DataLoader(sources.Restartable(4)), "Restartable by index.*derive it from IterableDataset$"),  # type: ignore[arg-type]
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_no_source_is_refused(source: Any, named: str) -> None:
    with pytest.raises(UnsupportedSourceError, match=named):
        midepoch.wrap(source)
    with pytest.raises(TypeError):
        midepoch.wrap(source)


# --- who divides a stream ---


def test_shard_has_to_be_said_where_there_is_something_to_divide() -> None:
    for make in (
        lambda: midepoch.wrap(DataLoader(sources.Stream(9), num_workers=2)),
        lambda: sources.taken(midepoch.wrap(sources.numbers, world=World(0, 2))),
        lambda: sources.taken(midepoch.wrap(DataLoader(sources.Stream(9)), world=World(1, 2))),
    ):
        with pytest.raises(UnsupportedSourceError, match=r"shard=True.*shard=False"):
            make()


def test_one_worker_reads_what_is_divided_by_midepoch() -> None:
    """So a stream that divides itself among workers is not divided twice."""
    source = DataLoader(sources.Stream(20, by_worker=True), batch_size=2, num_workers=2)
    alone = DataLoader(sources.Stream(20, by_worker=True), batch_size=2)
    with midepoch.wrap(source, seed=5, shard=True) as loader:
        assert sources.taken(loader) == sources.taken(midepoch.wrap(alone, seed=5, shard=True))
        assert loader.capabilities.elastic_workers


def test_a_stream_divided_twice_among_ranks_is_named() -> None:
    """Found at once where the stream has a length, and else when one state reaches all ranks."""

    class Sized(law_sources.Stream):
        def __len__(self) -> int:
            return len(self.samples)

    def make(rank: int, kind: type[law_sources.Stream] = law_sources.Stream) -> Loader:
        return midepoch.wrap(kind(16, rank, 2, divides=True), seed=5, shard=True, world=World(rank, 2))

    with pytest.raises(SourceError, match=r"ended after 8 units, but its len\(\) is 16.*shard=False"):
        sources.taken(make(0, Sized))
    state = sources.heads(functools.partial(make, 0), 2)[1]
    sources.quiet_resume(functools.partial(make, 0), state)
    with pytest.raises(SourceError, match=r"does not repeat itself.*shard=False"):
        sources.quiet_resume(functools.partial(make, 1), state)


# --- sources with a state of their own ---


def stateful_at(rank: int, world_size: int) -> Loader:
    """Each rank's loader reads its own samples, as a user's DistributedSampler would have it."""
    source = StatefulDataLoader(list(range(rank * 100, rank * 100 + 12)), batch_size=2)
    return midepoch.wrap(source, world=World(rank, world_size))


def _gather(rank: int) -> dict[str, Any]:
    """What one of two ranks finds when it gathers, in mid-epoch, at its start and at its end."""
    found: dict[str, Any] = {}
    loader = stateful_at(rank, 2)
    found["fresh"] = midepoch.gather(loader)
    found["head"] = sources.taken(loader, 2)
    found["own"] = loader.state_dict()
    found["gathered"] = midepoch.gather(loader)
    ended = stateful_at(rank, 2)
    sources.taken(ended)
    found["ended"] = midepoch.gather(ended)
    ours = midepoch.wrap(sources.noisy_loader(), seed=5)
    sources.taken(ours, 2)
    found["of ours"] = midepoch.gather(ours) == ours.state_dict()
    return found


@pytest.fixture(scope="module")
def gathered() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = sources.in_gloo_world(_gather, 2)
    return found


def test_gather_makes_one_state_for_all_ranks(gathered: list[dict[str, Any]]) -> None:
    assert gathered[0]["head"] == [[0, 1], [2, 3]]
    assert gathered[1]["head"] == [[100, 101], [102, 103]]
    assert gathered[0]["gathered"] == gathered[1]["gathered"]
    assert all(each["of ours"] for each in gathered)
    for name, expected in (("fresh", 0), ("gathered", 2), ("ended", 0)):
        for rank in range(2):
            loader = stateful_at(rank, 2)
            loader.load_state_dict(gathered[0][name])
            batches = sources.taken(loader)
            assert batches == [[rank * 100 + 2 * n, rank * 100 + 2 * n + 1] for n in range(expected, 6)], name


def test_a_state_of_another_rank_or_world_is_refused(gathered: list[dict[str, Any]]) -> None:
    loader = stateful_at(0, 2)
    loader.load_state_dict(gathered[0]["own"])
    assert sources.taken(loader) == [[4, 5], [6, 7], [8, 9], [10, 11]]
    with pytest.raises(StateError, match=r"only the part of rank 1, and this is rank 0 of 2.*midepoch\.gather"):
        stateful_at(0, 2).load_state_dict(gathered[1]["own"])
    for state in (gathered[0]["gathered"], gathered[0]["own"]):
        for world_size in (1, 3):
            with pytest.raises(StateError, match=rf"world size differs.*2.*{world_size}"):
                stateful_at(0, world_size).load_state_dict(state)


def test_gather_without_torch_distributed_says_so() -> None:
    loader = stateful_at(0, 2)
    next(iter(loader))
    with pytest.raises(MidepochError, match="init_process_group"):
        midepoch.gather(loader)
    alone = stateful_at(0, 1)
    next(iter(alone))
    assert midepoch.gather(alone) == alone.state_dict()


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"size": 15}, r"samples differs.*'16'.*'15'"),
        ({"batch_size": 5, "size": 20}, r"batch_size differs.*'4'.*'5'"),
        ({"num_workers": 1}, r"num_workers differs.*'0'.*'1'"),
    ],
    ids=str,
)
def test_another_stateful_dataloader_is_refused(keywords: dict[str, Any], named: str) -> None:
    def make(size: int = 16, batch_size: int = 4, num_workers: int = 0) -> Loader:
        return midepoch.wrap(StatefulDataLoader(sources.Indices(size), batch_size=batch_size, num_workers=num_workers))

    state = sources.heads(make, 2)[1]
    with pytest.raises(StateError, match=named):
        make(**keywords).load_state_dict(state)
