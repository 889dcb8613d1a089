"""Iterables that expose samplers: the samplers are a way to jump, and the source says when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import midepoch
from midepoch import SourceError, StateMismatchError, UnsupportedSourceError, World
from support import sources

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
SIZE = 22


class Own(sources.Documents):
    def __iter__(self) -> Iterator[Any]:
        self.indices = iter(self.sampler)
        self.chunks: Iterator[Any] = iter(())
        return self

    def __next__(self) -> Any:
        while True:
            for sample in self.chunks:
                return sample
            self.chunks = self.chunks_of(next(self.indices))


class Stopped(sources.Documents):
    def __iter__(self) -> Iterator[Any]:
        for place, index in enumerate(self.sampler):
            if index == 7 and place:
                return
            yield self.sample(index)


class Twice(sources.Documents):
    def __iter__(self) -> Iterator[Any]:
        last = -1
        for last in self.sampler:
            yield self.sample(last)
        if last % 2:
            for index in self.sampler:
                yield self.sample(1000 + index)


KINDS = [sources.Documents, Own, sources.Flushed, Stopped, Twice]


@pytest.mark.parametrize(("drop_last", "batch_size"), [(False, None), (True, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_continues_exactly(kind: type[sources.Documents], drop_last: bool, batch_size: int | None) -> None:
    made = lambda: midepoch.wrap(DataLoader(kind(), batch_size, drop_last=drop_last), seed=3, shard=True)
    sources.every_place(made, read=sources.plain)


# Each kind here; where indices are divided, one that begins its sampler again.
@pytest.mark.parametrize(("kind", "workers", "ranks"), [
    *((kind, 0, 1) for kind in KINDS[1:]), (Twice, 2, 1), (Twice, 0, 2),
])  # fmt: skip
def test_a_deviation_is_an_error_that_names_shard(kind: type[sources.Documents], workers: int, ranks: int) -> None:
    """Kinds whose first samples, and whose last one, do not deviate. The first sample shows some before any batch."""
    loader = DataLoader(kind({5: 3} if kind is Own else {}), 4, num_workers=workers)
    world = World(0, ranks)
    found = 0
    for seed in range(12):
        with midepoch.wrap(loader, seed=seed, world=world) as wrapped:
            try:
                list(wrapped)
            except (SourceError, UnsupportedSourceError) as error:
                assert "so its samples cannot be jumped to. Pass shard=True" in str(error)
                found += 1
        if found == 2:
            return
    raise AssertionError("no seed deviates")


class Listed(IterableDataset[Any]):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        yield from self.sampler


class Given(sources.Sized):
    def __init__(self, order: list[int]) -> None:
        super().__init__(len(order))
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


def given(order: list[int]) -> Any:
    return midepoch.wrap(DataLoader(Listed(Given(order)), 3), seed=0)


def test_another_list_is_refused() -> None:
    order = list(range(SIZE))
    whole, (_, state) = sources.taken(given(order)), sources.heads(lambda: given(order), 1)
    assert sources.resumed(lambda: given(order), state) == whole[1:]
    other = given(order[::-1])
    with pytest.raises(StateMismatchError, match="the list of epoch 0 differs"):
        other.load_state_dict(state)
    assert next(iter(other)).tolist() == [SIZE - 1, SIZE - 2, SIZE - 3]


class Fails(sources.Sized):
    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE)
        raise KeyError("all seen")


@pytest.mark.parametrize(("batch_size", "workers"), [(None, 0), (3, 0), (SIZE, 0), (2, 2)])
def test_a_sampler_s_own_error_comes_where_the_plain_one_does(batch_size: int | None, workers: int) -> None:
    def until_the_error(loader: Any) -> list[Any]:
        got: list[Any] = []
        with pytest.raises(KeyError, match="all seen"):
            got.extend(sources.plain(batch) for batch in loader)
        return got

    plainly = until_the_error(DataLoader(Listed(Fails(SIZE)), batch_size))
    # Where indices are divided, wrap refuses it and names shard=.
    source, shard = DataLoader(Listed(Fails(SIZE)), batch_size, num_workers=workers), True if workers else None
    assert until_the_error(midepoch.wrap(source, seed=0, on_error="retry", shard=shard)) == plainly


def test_the_dataset_is_left_as_a_plain_pass_leaves_it() -> None:
    dataset, plainly = sources.Documents({}), sources.Documents({})
    loader = midepoch.wrap(DataLoader(dataset, 4), seed=3)
    for _ in range(3):
        list(loader), list(DataLoader(plainly, 4))
        assert (dataset.read, dataset.begun) == (plainly.read, plainly.begun)
        assert type(dataset.sampler) is RandomSampler


def test_a_deviation_in_less_than_a_batch_is_seen() -> None:
    """By itself, the source would fill one: what is dropped at the end is read, too."""
    loader = midepoch.wrap(DataLoader(sources.Documents({5: 4}), SIZE + 3, drop_last=True), seed=3)
    with pytest.raises(SourceError, match=r"Documents drew 0 indices .* shard=True"):
        list(loader)


def test_one_without_indices_is_empty() -> None:
    loader = midepoch.wrap(DataLoader(Listed(Given([])), 4), seed=3)
    assert (list(loader), len(loader), loader.epoch) == ([], 0, 1)


class Drawing(sources.Exposing):
    def __init__(self, draws: int) -> None:
        super().__init__(12)
        self.draws = draws

    def __next__(self) -> list[int]:
        return [next(self.sampler_iter) for _ in range(self.draws)]


def test_another_number_of_draws_than_the_states_is_named() -> None:
    _, state = sources.heads(lambda: midepoch.wrap(Drawing(2), seed=0), 1)
    with pytest.raises(SourceError, match=r"drew 1 indices .* saved with 2 per sample"):
        sources.resumed(lambda: midepoch.wrap(Drawing(1), seed=0), state)


class Unused(sources.Documents):
    def __iter__(self) -> Iterator[Any]:
        yield from range(SIZE)


class Silent(sources.Documents):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(("kind", "why", "workers"), [(Unused, "drew no index", 0), (Silent, "gave no sample", 2)])
def test_a_first_sample_that_tells_is_refused_in_each_pass(kind: Any, why: str, workers: int) -> None:
    loader = midepoch.wrap(DataLoader(kind(), 4, num_workers=workers), seed=3)
    for _ in range(2):
        with pytest.raises(UnsupportedSourceError, match=f"{kind.__name__} {why}.* shard=True"):
            next(iter(loader))


class Beside(sources.Documents):
    def __init__(self) -> None:
        super().__init__()
        self.others = [RandomSampler(range(SIZE))]

    def __iter__(self) -> Iterator[Any]:
        return zip(self.sampler, self.others[0], strict=True)


def test_one_that_no_jump_would_move_is_read_again() -> None:
    assert not midepoch.wrap(Beside(), seed=3).capabilities.constant_time_resume
    sources.every_place(lambda: midepoch.wrap(Beside(), seed=3), read=sources.plain)
