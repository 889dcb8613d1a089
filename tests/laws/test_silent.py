"""Ways to lose, repeat or change a sample in silence, each of which was possible once."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

import midepoch
from midepoch import ResumableSampler, SourceError, World, wrap
from support import sources


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


def test_what_a_loader_cannot_share_is_not_copied() -> None:
    loader = wrap(DataLoader(sources.Indices(24), batch_size=4), seed=0)
    with pytest.raises(TypeError, match=r"wrap the source again, and load this loader's state_dict\(\)"):
        copy.copy(loader)


def test_a_state_of_a_replay_without_its_detail_is_refused() -> None:
    loader = wrap(sources.numbers, seed=0)
    next(iter(loader))
    for detail in ("", "varies;workers=0;digest="):
        with pytest.raises(midepoch.StateCorruptError):
            wrap(sources.numbers, seed=0).load_state_dict(midepoch.reseal({**loader.state_dict(), "detail": detail}))
