"""Samplers that third-party packages bring: without an end, with a len() that raises, repeated, grouped."""

from __future__ import annotations

import itertools
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

import midepoch
from midepoch import ResumableSampler, SourceError, StateMismatchError, UnsupportedSourceError, World
from midepoch import samplers as listing
from midepoch.order import Endless, Sequential, Shuffled
from midepoch.reading.units import Units
from support import sources
from support import wild_sources as wild

SIZE, BATCH = 22, 4


def endless(shuffle: bool = True, **keywords: Any) -> ResumableSampler:
    return ResumableSampler(SIZE, shuffle=Endless(Shuffled(SIZE) if shuffle else Sequential(SIZE)), **keywords)


def wrapped(sampler: Any, world: World | None = None, **keywords: Any) -> midepoch.Loader:
    return midepoch.wrap(DataLoader(sources.Noisy(SIZE), BATCH, sampler=sampler, **keywords), world=world)


def indices(batches: list[Any]) -> list[int]:
    return [int(sample[0]) for batch in batches for sample in batch]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_declared_order_without_an_end_resumes_anywhere(num_workers: int) -> None:
    make: Callable[..., Any] = lambda: wrapped(endless(), num_workers=num_workers)
    with make() as loader:
        batches, states = [], []
        for batch in itertools.islice(loader, 20):
            batches.append(sources.plain(batch))
            states.append(loader.state_dict())
    assert {state["size"] for state in states} == {None}
    for cut in (0, 4, 5, 13):  # within the first round, across two, in the third
        with make() as loader:
            loader.load_state_dict(states[cut])
            assert sources.taken(loader, 6) == batches[cut + 1 : cut + 7]
            loader.seek(position=10**12)  # to count so far would take longer than any test may
            assert len(sources.taken(loader, 2)) == 2 and loader.position == 10**12 + 2 * BATCH
    with pytest.raises(TypeError, match="no length"):
        len(loader)


def test_ranks_take_what_one_takes_alone() -> None:
    alone = indices(sources.taken(wrapped(endless()), 12))
    two = [sources.taken(wrapped(endless(), World(rank, 2)), 6) for rank in range(2)]
    assert indices([batch for pair in zip(*two, strict=True) for batch in pair]) == alone
    _, state = sources.heads(lambda: wrapped(endless(world=World(1, 2)), World(1, 2)), 1)
    resumed = wrapped(endless())
    resumed.load_state_dict(state)
    assert indices(sources.taken(resumed, 10)) == alone[2 * BATCH :]


@pytest.mark.parametrize("in_order", [False, True])
def test_the_line_that_the_refusal_gives_works(in_order: bool) -> None:
    dataset = sources.Noisy(SIZE)
    undeclared: Any = wild.Prepared(range(SIZE), shuffle=False) if in_order else wild.TrainingSampler(SIZE)
    with pytest.raises(SourceError, match="gave more than 1,000,088 indices and does not end") as refusal:
        next(iter(wrapped(undeclared)))
    line = re.search(r"put (midepoch\.ResumableSampler\(.*\)) in its place", str(refusal.value))
    assert line is not None

    def make() -> midepoch.Loader:
        sampler = eval(line[1], {"midepoch": midepoch, "dataset": dataset})  # as it is pasted
        return midepoch.wrap(DataLoader(dataset, BATCH, sampler=sampler))

    first_round = indices(sources.taken(make(), 6))[:SIZE]
    assert Counter(first_round) == Counter(range(SIZE))
    assert (first_round == list(range(SIZE))) is in_order


def test_one_of_another_order_is_refused_before_memory_is_full() -> None:
    loader = wrapped(wild.RepeatFactorTrainingSampler(SIZE, [2] * SIZE))
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match=r"does not end.*midepoch.wrap\(lambda: make\(\)\).*let its len"):
            next(iter(loader))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20


def test_an_iterable_that_exposes_a_declared_one_jumps() -> None:
    make: Callable[..., Any] = lambda: midepoch.wrap(sources.Exposing(SIZE, endless()))
    whole = sources.taken(make(), 3 * SIZE)
    state = sources.heads(make, 30)[1]
    assert (state["position"], state["size"]) == (30, None)
    resumed = make()
    resumed.load_state_dict(state)
    assert sources.taken(resumed, 3 * SIZE - 30) == whole[30:]
    with pytest.raises(TypeError, match="no length"):
        len(resumed)
    assert resumed.capabilities.constant_time_resume


class Without(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(itertools.repeat(range(SIZE), self.count))


class Declared(Without):
    def __len__(self) -> int:
        return self.count * SIZE


def test_finite_ones_are_listed_up_to_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_MANY", 1000)  # and four for each of 22 samples
    assert len(wrapped(Without(49))) == 1078 // BATCH + 1
    with pytest.raises(SourceError, match=r"Without gave more than 1,088 indices and does not end.*let its len"):
        len(wrapped(Without(50)))
    assert len(sources.taken(wrapped(Declared(300)))) == 300 * SIZE // BATCH
    monkeypatch.setattr(listing, "_LONGEST", 5000)
    with pytest.raises(SourceError, match="Declared gave more than 5,000 indices"):
        next(iter(wrapped(Declared(300))))
    torchs = wrapped(RandomSampler(range(SIZE), replacement=True, num_samples=6000))
    assert torchs.peek() is not None, "torch's own end"


def test_one_that_begins_again_at_its_end_is_asked_no_further() -> None:
    assert len(wrapped(wild.ItsOwnIterator(SIZE))) == -(-SIZE // BATCH)
    assert indices(sources.taken(wrapped(wild.ItsOwnIterator(SIZE)))) == list(reversed(range(SIZE)))
    units = Units(iter(wild.ItsOwnIterator(5)))
    assert [list(units.take(3)) for _ in range(3)] == [[4, 3, 2], [1, 0], []]
    with pytest.raises(StopIteration):
        units.next()
    many = midepoch.wrap(DataLoader(sources.Indices(3000), 1000, sampler=wild.ItsOwnIterator(3000)))
    assert sources.flat(sources.taken(many)) == list(reversed(range(3000)))


DURATIONS = [1.0 + index % 3 for index in range(SIZE)]


def test_one_that_keeps_its_own_state_is_elastic_and_left_alone() -> None:
    """As lhotse has them."""
    made = [wild.KeepsState(DURATIONS, 8.0)]

    def make(rank: int = 0, world_size: int = 1) -> midepoch.Loader:
        made.append(wild.KeepsState(DURATIONS, 8.0))
        named = sources.Made(lambda names: [int(name) for name in names], SIZE)
        loader = DataLoader(named, sampler=made[-1], batch_size=None)
        return midepoch.wrap(loader, seed=1, world=World(rank, world_size))

    whole, following = sources.every_place(make, read=sources.plain)
    assert sorted(sources.flat(whole)) == list(range(SIZE)) == sorted(sources.flat(following))
    assert whole != following
    cut = len(whole) - 1
    state = sources.heads(make, cut)[1]
    rest = [sources.resumed(lambda rank=rank: make(rank, 2), state) for rank in range(2)]  # type: ignore[misc]
    assert {index for part in rest for index in sources.flat(part)} >= set(sources.flat(whole[cut:]))  # one is padded
    for epoch in range(2):
        made[0].set_epoch(epoch)
        list(made[0])
    assert made[0].state_dict() == made[1].state_dict(), "as plain passes leave it"


class Unknown(sources.Buckets):
    def __len__(self) -> int:
        raise NotImplementedError("not well-defined")


def test_whatever_a_length_raises_is_an_unknown_length() -> None:
    source: Any = sources.Indices(SIZE)
    made = lambda: midepoch.wrap(DataLoader(source, batch_sampler=Unknown(SIZE)), seed=1, world=World(0, 2))
    sources.every_place(made, read=sources.plain)


PRETRAINING: dict[str, Any] = {"in order": wild.Pretraining, "at random": wild.PretrainingAtRandom}


def pretraining(name: str, consumed: Any = 0, **keywords: Any) -> DataLoader[Any]:
    return DataLoader(sources.Noisy(SIZE), batch_sampler=PRETRAINING[name](SIZE, consumed, BATCH, **keywords))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PRETRAINING)
def test_those_of_language_models_are_exact(name: str) -> None:
    def make(rank: int = 0, world_size: int = 1) -> midepoch.Loader:
        return midepoch.wrap(pretraining(name), seed=1, world=World(rank, world_size))

    plain = pretraining(name)
    assert len(make()) == len(plain) == SIZE, "in samples, as they say"
    epochs = sources.every_place(make, epochs=3, read=sources.plain)
    assert [indices(epoch) for epoch in epochs] == [indices(list(plain)) for _ in range(3)]
    state, batches = sources.heads(make, 2)[1], len(epochs[0])
    ranks = [sources.resumed(lambda rank=rank: make(rank, 2), state) for rank in range(2)]  # type: ignore[misc]
    assert [ranks[place % 2][place // 2] for place in range(batches - 2)] == epochs[0][2:]


@pytest.mark.parametrize("name", PRETRAINING)
@pytest.mark.parametrize("cut", [2, None])  # None: at the boundary
def test_one_built_to_continue_does_not_skip_twice(name: str, cut: int | None) -> None:
    make: Callable[..., Any] = lambda consumed=0: midepoch.wrap(pretraining(name, consumed), seed=1)
    with make() as loader:
        batches = sources.taken(loader, cut)
        state, consumed = loader.state_dict(), BATCH * len(batches)
    told = rf"order differs: .*'listed, built with consumed_samples={consumed}'; make the loader as in the run that sav"
    for number in (consumed, np.int64(consumed), torch.tensor(consumed)):
        with make(number) as skips, pytest.raises(StateMismatchError, match=told):
            skips.load_state_dict(state)
    make().load_state_dict(state)
    # Without a state it continues in its own way, and a run that began so resumes so.
    whole = sources.taken(make(8))
    assert sources.resumed(lambda: make(8), sources.heads(lambda: make(8), 1)[1]) == whole[1:]


@pytest.mark.parametrize("name", PRETRAINING)
def test_those_that_divide_their_list_name_the_cure(name: str) -> None:
    told = r"_rank=1 and .*micro_batch_times_data_parallel_size=2\), .*: build it for one process \(world size 1"
    with pytest.raises(UnsupportedSourceError, match=told):
        midepoch.wrap(pretraining(name, data_parallel_rank=1, data_parallel_size=2), world=World(1, 2))


@pytest.mark.parametrize("name", ["in order", "at random"])
def test_one_too_long_to_be_listed_names_what_computes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_LONGEST", 10)
    told = rf"too many to list: put batch_size=, .* shuffle={name == 'at random'}\) in its place"
    with pytest.raises(SourceError, match=told):
        next(iter(midepoch.wrap(pretraining(name))))
    cure = ResumableSampler(SIZE, shuffle=name != "in order")
    cured = midepoch.wrap(DataLoader(sources.Noisy(SIZE), BATCH, drop_last=True, sampler=cure))
    assert len(sources.taken(cured)) == len(cured) == 5


def test_one_that_was_touched_before_the_world_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ResumableSampler(64, seed=1, batch_size=4)
    sampler.set_epoch(0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(sampler) == list(ResumableSampler(64, seed=1, batch_size=4, world=World(1, 2)))


def test_another_epoch_and_another_pass_end_a_samplers_pass() -> None:
    sampler = ResumableSampler(1000, seed=0)
    next(first := iter(sampler))
    sampler.set_epoch(3)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (3, 0)
    assert list(first) == []
    second, third = iter(sampler), iter(sampler)
    next(second), next(third)
    with pytest.raises(midepoch.MidepochError, match="another pass"):
        next(second)


def test_the_order_is_pinned() -> None:
    """One that changes would lose the positions of saved states."""
    assert Endless(Sequential(3)).epoch(0, 0)[1:8].tolist() == [1, 2, 0, 1, 2, 0, 1]
    assert Endless(Shuffled(5)).epoch(1, 0)[0:10].tolist() == [3, 0, 2, 1, 4, 0, 1, 4, 2, 3]
    with pytest.raises(ValueError, match="at least one sample"):
        Endless(Sequential(0))


class SaysLess(Sampler[list[int]]):
    """Gives six batches. Its length is an estimate: three."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * number, 2 * number + 1] for number in range(6)])

    def __len__(self) -> int:
        return 3


def test_a_length_that_trainers_stop_at_is_kept_over_a_resume() -> None:
    make: Callable[..., Any] = lambda: midepoch.wrap(DataLoader(sources.Indices(12), batch_sampler=SaysLess()), seed=1)
    def lengths(loader: midepoch.Loader, batches: int) -> list[int]:
        passed = iter(loader)
        return [len(loader), *(len(loader) for _ in itertools.islice(passed, batches))]

    loader = make()
    assert lengths(loader, 2) == [3, 3, 3]
    state = loader.state_dict()
    assert (loader.batches_done, loader.batches_left) == (2, 4)
    other = make()
    other.load_state_dict(state)
    assert lengths(other, 5) == [3] * 5, "four are left"
    assert sources.taken(make()) == [[2 * number, 2 * number + 1] for number in range(6)]
