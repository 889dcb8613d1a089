"""Samplers whose indices are listed when a pass begins: what a plain pass would show, and nothing else."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, Subset

sys.path.insert(0, str(Path(__file__).parent))

import sources

import midepoch
from midepoch import UnsupportedSourceError, World

SIZE = 24
METHODS: dict[str, dict[str, Any]] = {
    "here": {},
    "fork": {"num_workers": 1, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
}


# --- a sampler that raises an error of its own ------------------------------------------------------------------------


class ExhaustedError(Exception):
    """Of a sampler of the user's."""


class Ends(Sampler[int]):
    """Ends by an error, after so many indices."""

    def __init__(self, count: int, at_once: bool = False) -> None:
        self.count, self.at_once = count, at_once

    def __iter__(self) -> Iterator[int]:
        if self.at_once:
            raise ExhaustedError("asked for an iterator")
        return self.indices()

    def indices(self) -> Iterator[int]:
        yield from random.sample(range(SIZE), self.count)
        raise ExhaustedError("all seen")


class EndsInBatches(Ends):
    """The same, of batches."""

    def indices(self) -> Iterator[Any]:
        yield from BatchSampler(SequentialSampler(range(self.count)), 2, False)
        raise ExhaustedError("all seen")


def until_error(loader: Any) -> tuple[list[Any], str]:
    batches, error = [], ""
    iterator = iter(loader)
    try:
        for batch in iterator:
            batches.append(torch.as_tensor(batch).tolist())
    except ExhaustedError as raised:
        error = str(raised)
        assert next(iterator, None) is None, "the pass has ended"
    return batches, error


FAILING: dict[str, Callable[..., DataLoader[int]]] = {
    "after some": lambda **keywords: DataLoader(range(SIZE), 2, sampler=Ends(7), **keywords),  # type: ignore[arg-type]
    "at the first index": lambda **keywords: DataLoader(range(SIZE), 2, sampler=Ends(0), **keywords),  # type: ignore[arg-type]
    "before the first index": lambda **keywords: DataLoader(range(SIZE), 2, sampler=Ends(6, True), **keywords),  # type: ignore[arg-type]
    "in batches": lambda **keywords: DataLoader(range(SIZE), batch_sampler=EndsInBatches(6), **keywords),  # type: ignore[arg-type]
    "one by one": lambda **keywords: DataLoader(range(SIZE), None, sampler=Ends(3), **keywords),  # type: ignore[arg-type]
}


WORKERS = [("here", name) for name in FAILING] + [("fork", "after some"), ("fork", "before the first index")]


@pytest.mark.parametrize(("method", "name"), [*WORKERS, ("spawn", "after some")])
def test_a_samplers_own_error_comes_after_its_batches(method: str, name: str) -> None:
    plain, error = until_error(FAILING[name]())
    workers = METHODS[method]
    with midepoch.wrap(FAILING[name](**workers), seed=1) as loader:
        assert len(loader) == len(plain), "no length raises it"
        for epoch in range(2):
            batches, ours = until_error(loader)
            assert (len(batches), ours) == (len(plain), error)
            assert [torch.tensor(batch).shape for batch in batches] == [torch.tensor(batch).shape for batch in plain]
            assert loader.epoch == (epoch if plain else 0)
    if len(workers) or not plain:
        return
    for cut in range(1, len(plain) + 1):
        head, state = sources.heads(lambda: midepoch.wrap(FAILING[name](), seed=1), cut)
        resumed = midepoch.wrap(FAILING[name](), seed=1)
        resumed.load_state_dict(state)
        assert resumed.batches_left == len(plain) - cut
        rest, again = until_error(resumed)
        whole = until_error(midepoch.wrap(FAILING[name](), seed=1))[0]
        assert (head + rest, again) == (whole, error)
        assert len(until_error(resumed)[0]) == len(plain) and resumed.epoch == 1, "the next pass is the next epoch"


def test_ranks_give_their_full_batches_before_it() -> None:
    def make(rank: int) -> midepoch.Loader:
        return midepoch.wrap(DataLoader(range(SIZE), 2, sampler=Ends(11)), seed=1, world=World(rank, 2))  # type: ignore[arg-type]

    ranks = [until_error(make(rank)) for rank in range(2)]
    assert [(len(batches), error) for batches, error in ranks] == [(2, "all seen")] * 2
    with midepoch.wrap(DataLoader(range(SIZE), 2, sampler=Ends(11)), seed=1) as alone:  # type: ignore[arg-type]
        whole = until_error(alone)[0]
    assert [batch for pair in zip(*(batches for batches, _ in ranks), strict=True) for batch in pair] == whole[:4]


def test_it_comes_through_then_and_a_peek() -> None:
    source: Any = DataLoader(range(SIZE), 2, sampler=Ends(4))
    for prefetch in (0, 3):
        loader = midepoch.wrap(source, seed=1, then=lambda batch: batch + 1, prefetch=prefetch)
        assert len(until_error(loader)[0]) == 2
    loader = midepoch.wrap(source, seed=1)
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(ExhaustedError):
        loader.peek()
    with pytest.raises(ExhaustedError):
        next(batches)


# --- a sampler that sets something on the dataset ---------------------------------------------------------------------


class Sized(Dataset[Any]):
    """Samples of a size that a sampler may set."""

    size, epoch = 32, 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(self.size)


class Writes(BatchSampler):
    """Sets the size for each batch, before its first, or when it is asked for an iterator."""

    def __init__(self, dataset: Any, when: str) -> None:
        super().__init__(RandomSampler(dataset), 4, False)
        self.dataset, self.when, self.epoch = dataset, when, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = self.dataset.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self.when == "at its start":
            self.dataset.size = 64 + self.epoch
        return self.batches()

    def batches(self) -> Iterator[list[int]]:
        sizes = [96, 32, 64, 64, 128, 96]
        for number, batch in enumerate(super().__iter__()):
            if self.when == "before each" or (self.when == "before its first" and not number):
                self.dataset.size = sizes[number] + self.epoch
            yield batch


def sizes(loader: Any) -> list[int]:
    return [batch.shape[1] for batch in loader]


def written(when: str, workers: dict[str, Any], inside: bool = False) -> tuple[Sized, DataLoader[Any]]:
    dataset = Sized()
    seen: Any = Subset(dataset, range(SIZE)) if inside else dataset
    return dataset, DataLoader(seen, batch_sampler=Writes(dataset, when), **workers)


@pytest.mark.parametrize("inside", [False, True])
def test_one_that_sets_it_for_each_batch_is_refused_with_the_cure(inside: bool) -> None:
    dataset, source = written("before each", {}, inside)
    loader = midepoch.wrap(source, seed=1)
    for _ in range(2):
        with pytest.raises(UnsupportedSourceError, match=r"Writes sets size of the dataset.*yield \[\(size, index\)"):
            next(iter(loader))
        assert "size" not in vars(dataset) or dataset.size == 32


@pytest.mark.parametrize("when", ["at its start", "before its first"])
@pytest.mark.parametrize("asks", [False, True])
def test_what_one_sets_before_its_first_batch_holds_for_the_pass(when: str, asks: bool) -> None:
    plain_data, plain = written(when, {})
    our_data, source = written(when, {})
    loader = midepoch.wrap(source, seed=1)
    for epoch in range(3):
        if asks:
            before = dict(vars(our_data))
            loader.state_dict(), len(loader)
            assert vars(our_data) == before, "a copy that is listed leaves no trace"
        source.batch_sampler.epoch = plain.batch_sampler.epoch = epoch  # type: ignore[union-attr]
        plain.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        assert sizes(loader) == sizes(plain)
        assert vars(our_data) == vars(plain_data)


SET = [("fork", "before each"), ("fork", "before its first"), ("fork", "at its start"), ("spawn", "before each")]


@pytest.mark.parametrize(("method", "when"), SET)
def test_workers_see_what_was_set_when_they_started(method: str, when: str) -> None:
    plain_data, plain = written(when, METHODS[method])
    our_data, source = written(when, METHODS[method])
    with midepoch.wrap(source, seed=1) as loader:
        for epoch in range(1 if method == "spawn" else 2):
            plain.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
            assert sizes(loader) == sizes(plain)
            assert vars(our_data) == vars(plain_data)


def test_an_index_that_holds_the_size_is_the_cure() -> None:
    class Pairs(Writes):
        def batches(self) -> Iterator[Any]:
            for number, batch in enumerate(BatchSampler.__iter__(self)):
                yield [(32 * number, index) for index in batch]

    class Reads(Sized):
        def __getitem__(self, index: Any) -> Any:
            return torch.zeros(index[0])

    dataset = Reads()
    loader = midepoch.wrap(DataLoader(dataset, batch_sampler=Pairs(dataset, "never")), seed=1)
    assert sizes(loader) == [0, 32, 64, 96, 128, 160]
