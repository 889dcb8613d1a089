"""Ways to lose, repeat or change a sample in silence, each of which was possible once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

import midepoch
from midepoch import ResumableSampler, SourceError, UnsupportedSourceError, World, wrap
from support import silent_sources, sources
from support.resuming import Resumed, Saved
from support.silent_sources import ROWS


def numbers(size: int) -> Any:
    return TensorDataset(torch.arange(size))


class OwnBatchSampler(BatchSampler):
    pass


@pytest.mark.parametrize("own", [True, False])
def test_a_distributed_sampler_inside_another_sampler_is_found(own: bool) -> None:
    inner: Any = DistributedSampler(numbers(32), num_replicas=2, rank=0)
    source = (
        DataLoader(numbers(32), batch_sampler=OwnBatchSampler(inner, 4, False))
        if own
        else DataLoader(numbers(32), sampler=BatchSampler(inner, 4, False), batch_size=None)
    )
    with pytest.raises(UnsupportedSourceError, match="shard=False"):
        wrap(source)


class Estimating(Sampler[list[int]]):
    """Batches of four; its len is a bound, as that of samplers which fill batches with tokens."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(32).tolist()
        return iter([order[start : start + 4] for start in range(0, 32, 4)])


def test_a_sampler_whose_length_is_an_estimate_resumes_in_a_fresh_loader() -> None:
    loaders = [wrap(DataLoader(numbers(32), batch_sampler=Estimating()), seed=0) for _ in range(2)]
    iterator = iter(loaders[0])
    next(iterator), next(iterator)
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert len(loaders[1]) == 10, "its own, as before"
    assert [batch[0].tolist() for batch in loaders[1]] == [batch[0].tolist() for batch in iterator]


def test_a_sampler_that_was_touched_before_the_world_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ResumableSampler(64, seed=1, batch_size=4)
    sampler.set_epoch(0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = list(ResumableSampler(64, seed=1, batch_size=4, world=World(1, 2)))
    assert list(sampler) == expected


def test_set_epoch_in_the_middle_of_a_samplers_block_ends_the_pass() -> None:
    sampler = ResumableSampler(1000, seed=0)
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(3)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (3, 0)
    assert list(iterator) == []


def test_a_second_pass_over_a_sampler_ends_the_first_with_an_error() -> None:
    sampler = ResumableSampler(1000)
    first, second = iter(sampler), iter(sampler)
    next(first), next(second)
    with pytest.raises(midepoch.MidepochError, match="another pass"):
        next(first)


class Drawing(IterableDataset[list[int]]):
    def __init__(self, size: int, draws: int) -> None:
        self.sampler, self.draws = SequentialSampler(range(size)), draws

    def __iter__(self) -> Iterator[list[int]]:
        self.iterator = iter(self.sampler)
        return self

    def __next__(self) -> list[int]:
        return [next(self.iterator) for _ in range(self.draws)]


def test_another_number_of_draws_than_the_states_is_named() -> None:
    saved = wrap(Drawing(12, 2), seed=0)
    next(iter(saved))
    loader = wrap(Drawing(12, 1), seed=0)
    loader.load_state_dict(saved.state_dict())
    with pytest.raises(SourceError, match=r"drew 1 indices .* saved with 2 per sample"):
        next(iter(loader))


class MakesItsGeneratorLate(IterableDataset[Any]):
    def __init__(self) -> None:
        self.sampler = RandomSampler(range(40))

    def __iter__(self) -> Iterator[Any]:
        self.iterator, self.generator = iter(self.sampler), np.random.default_rng(7)
        return self

    def __next__(self) -> Any:
        return next(self.iterator), bool(self.generator.random() < 0.2)


def test_a_generator_made_when_iteration_starts_is_keyed() -> None:
    whole = list(wrap(MakesItsGeneratorLate(), seed=0))
    loader = wrap(MakesItsGeneratorLate(), seed=0)
    loader.seek(position=25)
    assert list(loader) == whole[25:]


def test_a_copy_of_a_loader_has_workers_of_its_own() -> None:
    with wrap(DataLoader(numbers(24), batch_size=4, num_workers=1, persistent_workers=True), seed=0) as loader:
        iterator = iter(loader)
        next(iterator)
        with copy.copy(loader) as twin:
            twin.load_state_dict(loader.state_dict())
            theirs = [batch[0].tolist() for batch in twin]
        assert theirs == [batch[0].tolist() for batch in iterator]


def test_a_rank_without_a_part_in_the_last_global_batch_moves_on() -> None:
    loader = wrap(DataLoader(numbers(10), batch_size=2), seed=0, tail="uneven", world=World(2, 3))
    state = wrap(DataLoader(numbers(10), batch_size=2), seed=0, tail="uneven", world=World(2, 3)).state_dict()
    loader.load_state_dict(midepoch.reseal({**state, "position": 8}))
    assert list(loader) == []
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


def ten() -> Iterator[int]:
    yield from range(10)


def test_ranks_agree_after_an_uneven_replay() -> None:
    loaders = [wrap(ten, seed=0, shard=True, tail="uneven", world=World(rank, 3)) for rank in range(3)]
    assert sorted(item for loader in loaders for item in loader) == list(range(10))
    assert {(loader.epoch, loader.position) for loader in loaders} == {(1, 0)}


def test_a_state_of_a_replay_without_its_detail_is_refused() -> None:
    loader = wrap(ten, seed=0)
    next(iter(loader))
    for detail in ("", "varies;workers=0;digest="):
        with pytest.raises(midepoch.StateCorruptError):
            wrap(ten, seed=0).load_state_dict(midepoch.reseal({**loader.state_dict(), "detail": detail}))


def test_a_cyclic_and_a_large_item_are_no_matter_to_a_replay() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)

    def items() -> Iterator[Any]:
        yield cyclic
        yield [0.0] * 1_000_000

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(wrap(items, seed=0))) == 2


# --- sources that are not what they seem, one by one ------------------------------------------------------------------
#
# Three more rows are elsewhere: a subclass of a DALI iterator (test_dali_fronts), a mesh (test_world,
# test_groups_and_meshes_of_real_processes), and sources with a state of their own (test_own_states).


@pytest.fixture(scope="module")
def rows() -> dict[str, tuple[Saved, list[Resumed]]]:
    """Each row: what this process has saved, and what another has made of it."""
    names = [name for name, row in ROWS.items() if row.outcome != "refused"]
    saved = {name: silent_sources.save(name) for name in names}
    states = {name: each.states for name, each in saved.items()}
    resumed = sources.in_processes(silent_sources.resume_all, (states, 7))[0]
    return {name: (saved[name], resumed[name]) for name in names}


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.outcome != "refused"])
def test_nothing_is_silent_in_a_new_process(name: str, rows: dict[str, tuple[Saved, list[Resumed]]]) -> None:
    saved, resumed = rows[name]
    row = ROWS[name]
    goes_on = [each.batches == rest for each, rest in zip(resumed, saved.following, strict=True)]
    assert len(resumed) == 3 and all(saved.following)
    if row.outcome == "told":
        assert len(saved.told) == 1 and row.no in saved.no, "before the first state can be used"
        assert not all(goes_on) or "thread" in name, "it is no false alarm"
        return
    if row.outcome == "believed" and "thread" in name and saved.told:
        return  # two passes may differ, as the threads run
    assert saved.told == [] and saved.no == []
    assert (row.outcome == "believed") <= ("exact_augmentations" in saved.believed)
    if row.outcome == "believed":
        assert not all(goes_on) or "thread" in name, "midepoch check finds it"
    elif row.outcome == "exact":
        assert goes_on == [True] * 3 and not any(each.error or each.told for each in resumed)
    elif row.outcome == "warned":
        assert not any(goes_on) and not any(each.error for each in resumed)
        assert all("not bit for bit" in told for each in resumed for told in each.told)
        assert all(len(each.told) == 1 for each in resumed)
    else:
        words = {"mismatch": "StateMismatchError: sample 0, the first", "chain": "SourceError: the source does not re"}
        # After a pass of unknown length the state is the next epoch's beginning, which no chain leads to. What a
        # witness says of the epoch before is at most a warning.
        within = resumed[::2]
        assert row.outcome == "chain" or "is another one than when" in resumed[1].told[0]
        assert all(each.error.startswith(words[row.outcome]) and not each.batches for each in within)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.outcome == "refused"])
def test_what_divides_is_refused_on_every_rank_alike(name: str) -> None:
    told = sources.in_processes(silent_sources.refusals, (name, 0), (name, 1))
    assert all("divides its list among ranks" in each and "for one process (" in each for each in told)
