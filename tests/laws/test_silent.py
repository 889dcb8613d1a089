"""Ways to lose, repeat or change a sample in silence, each of which was possible once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import midepoch
from midepoch import ResumableSampler, SourceError, World, wrap
from support import silent_sources, sources
from support.resuming import Resumed, Saved
from support.silent_sources import ROWS


def numbers(size: int) -> Any:
    return TensorDataset(torch.arange(size))


def test_a_sampler_that_was_touched_before_the_world_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ResumableSampler(64, seed=1, batch_size=4)
    sampler.set_epoch(0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = list(ResumableSampler(64, seed=1, batch_size=4, world=World(1, 2)))
    assert list(sampler) == expected


def test_set_epoch_within_a_samplers_block_ends_the_pass() -> None:
    sampler = ResumableSampler(1000, seed=0)
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(3)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (3, 0)
    assert list(iterator) == []


def test_a_second_pass_over_a_sampler_ends_the_first() -> None:
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


def test_a_copy_of_a_loader_has_workers_of_its_own() -> None:
    with wrap(DataLoader(numbers(24), batch_size=4, num_workers=1, persistent_workers=True), seed=0) as loader:
        iterator = iter(loader)
        next(iterator)
        with copy.copy(loader) as twin:
            twin.load_state_dict(loader.state_dict())
            theirs = [batch[0].tolist() for batch in twin]
        assert theirs == [batch[0].tolist() for batch in iterator]


def ten() -> Iterator[int]:
    yield from range(10)


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
