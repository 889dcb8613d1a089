"""`global_batch=`, `Loader.weight` and `Loader.step_due`: steps of one size in every world, and what a batch counts."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochError, StateError, UnsupportedSourceError, World
from midepoch.loader.loader import Loader
from midepoch.testing import ResumableTests
from support import sources

EXAMPLES = 4000 if os.environ.get("MIDEPOCH_CHAOS") else 60


def make(world: World, size: int, micro: int, together: int | None, **options: Any) -> Loader:
    source: Any = DataLoader(range(size), batch_size=micro, shuffle=True)  # type: ignore[arg-type]
    return midepoch.wrap(source, seed=5, world=world, global_batch=together, **options)


def wrapped(
    rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = 3, seed: int = 0, size: int = 41
) -> Loader:
    source: Any = DataLoader(sources.Noisy(size), batch_size=batch_size, shuffle=True, num_workers=num_workers)
    return midepoch.wrap(source, seed=seed, world=World(rank, world_size), global_batch=12)


class TestLaws(ResumableTests):
    make_loader = staticmethod(wrapped)
    tail = "uneven"
    shuffled = True
    quick = True


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, int]:
    micro = draw(st.integers(1, 5))
    return draw(st.integers(1, 60)), micro, draw(st.integers(1, 30))


class Job:
    """All ranks of a job in this process. Each step is checked as it is taken."""

    def __init__(self, size: int, micro: int, together: int) -> None:
        self.size, self.micro, self.together = size, micro, together
        self.loaders: list[Loader] = []
        self.passes: list[Iterator[Any]] = []

    def become(self, ranks: int) -> None:
        del self.loaders[ranks:], self.passes[ranks:]
        for rank, loader in enumerate(self.loaders):
            loader.reshard(World(rank, ranks))
        while len(self.loaders) < ranks:
            loader = make(World(len(self.loaders), ranks), self.size, self.micro, self.together)
            if self.loaders:
                loader.load_state_dict(self.loaders[0].state_dict())
            self.loaders.append(loader)
            self.passes.append(iter(loader))

    def micro_step(self) -> tuple[list[int], float] | None:
        """The samples that count and the sum of weights; None at the epoch's end, which is that of all ranks."""
        batches = [next(each, None) for each in self.passes]
        if None in batches:
            assert batches == [None] * len(batches)
            return None
        assert len({loader.step_due for loader in self.loaders}) == 1
        samples, weights = [], 0.0
        for batch, loader in zip(batches, self.loaders, strict=True):
            assert batch is not None
            assert 1 <= len(batch) <= self.micro
            weights += loader.weight
            if loader.weight:
                samples += batch.tolist()
            else:
                assert len(batch) == min(self.micro, self.size) or self.size < self.micro
        return samples, weights

    def step(self, stop_after: int | None = None) -> list[int] | None:
        """A global batch. `stop_after`: micro-steps after which it is given up, if it has more."""
        samples: list[int] = []
        weights, steps, ranks = 0.0, 0, len(self.loaders)
        position, epoch = self.loaders[0].position, self.loaders[0].epoch
        expected = min(self.together, self.size - position)
        while True:
            assert all(loader.position == position or steps == 0 for loader in self.loaders)
            got = self.micro_step()
            if got is None:
                assert not steps
                return None
            samples, weights, steps = samples + got[0], weights + got[1], steps + 1
            if self.loaders[0].step_due:
                break
            states = [loader.state_dict() for loader in self.loaders]
            assert {(state["epoch"], state["position"]) for state in states} == {(epoch, position)}
            if steps == stop_after:
                return samples
        assert len(samples) == expected
        assert steps == -(-expected // (self.micro * ranks))
        # The mean over ranks, of weighted means of equal values, is that value.
        assert abs(weights / ranks - 1) < 1e-9
        return samples


def whole_order(size: int, epoch: int) -> list[int]:
    loader = make(World(), size, 1, None)
    return [[int(batch) for batch in loader] for _ in range(epoch + 1)][epoch]


@settings(max_examples=EXAMPLES, deadline=None)
@given(jobs(), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_any_sequence_of_worlds_covers_the_epoch_in_steps_of_one_size(
    job: tuple[int, int, int], worlds: list[int], seed: int
) -> None:
    size, micro, together = job
    chance, ranks = random.Random(seed), Job(size, micro, together)
    orders = [whole_order(size, epoch) for epoch in range(2)]
    ranks.become(worlds[0])
    for epoch in range(2):
        trained: list[int] = []
        committed = 0
        while True:
            event = chance.random()
            if event < 0.3 and committed and ranks.step(stop_after=chance.randint(1, 3)) is not None:
                for loader in ranks.loaders:
                    loader.rollback()
            if event < 0.2 and committed:
                ranks.become(chance.choice(worlds))
            if ranks.loaders[0].epoch > epoch:
                break
            got = ranks.step()
            if got is None:
                break
            for loader in ranks.loaders:
                loader.commit()
            trained += got
            committed += 1
            # A step trains the next samples of the order, whoever reads them.
            assert sorted(trained) == sorted(orders[epoch][: len(trained)])
        assert sorted(trained) == list(range(size))
        ranks.passes = [iter(loader) for loader in ranks.loaders]


@settings(max_examples=EXAMPLES, deadline=None)
@given(jobs(), st.integers(1, 5))
def test_lengths_are_those_of_the_batches_that_come(job: tuple[int, int, int], world_size: int) -> None:
    size, micro, together = job
    for rank in range(world_size):
        loader = make(World(rank, world_size), size, micro, together)
        assert loader.batches_done == 0
        length = len(loader)
        for number, _ in enumerate(loader, start=1):
            if loader.epoch == 0:
                assert (loader.batches_done, loader.batches_left) == (number, length - number)
        assert number == length


def test_a_pass_of_two_ranks_is_as_written_down_by_hand() -> None:
    """Ten samples to a step, batches of two, twenty-three samples in their order."""
    got = []
    for rank in range(3):
        source: Any = DataLoader(range(23), batch_size=2)  # type: ignore[arg-type]
        loader = midepoch.wrap(source, world=World(rank, 3), global_batch=10)
        got.append([(batch.tolist(), round(loader.weight, 3), loader.step_due) for batch in loader])
    assert got == [
        [([0, 1], 0.6, False), ([6, 7], 0.6, True), ([10, 11], 0.6, False), ([16, 17], 0.6, True), ([20], 1.0, True)],
        [([2, 3], 0.6, False), ([8, 9], 0.6, True), ([12, 13], 0.6, False), ([18, 19], 0.6, True), ([21], 1.0, True)],
        [([4, 5], 0.6, False), ([0, 1], 0.0, True), ([14, 15], 0.6, False), ([0, 1], 0.0, True), ([22], 1.0, True)],
    ]


def test_weights_make_the_mean_over_ranks_that_over_samples() -> None:
    """The gradient of a linear model, on any number of ranks, is that of one rank with the whole global batch."""
    data = torch.randn(37, 3, generator=torch.Generator().manual_seed(1))
    for together, worlds in ((8, (1, 2, 3, 5)), (None, (1, 2, 3))):
        for world_size in worlds:
            parts: list[list[torch.Tensor]] = []
            for rank in range(world_size):
                source: Any = DataLoader(data, batch_size=2 if together else 6 // world_size)  # type: ignore[arg-type]
                loader = midepoch.wrap(
                    source, world=World(rank, world_size), global_batch=together, tail=None if together else "uneven"
                )
                gradients, gradient = [], torch.zeros(3)
                for batch in loader:
                    gradient = gradient + loader.weight * batch.mean(0)
                    if loader.step_due:
                        gradients.append(gradient)
                        gradient = torch.zeros(3)
                parts.append(gradients)
            length = max(map(len, parts))
            zero = torch.zeros(3)
            means = [sum((p[k] if k < len(p) else zero for p in parts), zero) / world_size for k in range(length)]
            step = together or 6
            for number, mean in enumerate(means):
                torch.testing.assert_close(mean, data[number * step : (number + 1) * step].mean(0))


def test_a_state_within_a_global_batch_is_that_of_its_beginning() -> None:
    loader = make(World(), 20, 2, 6)
    each = iter(loader)
    first = [next(each).tolist() for _ in range(3)]
    state = loader.state_dict()
    second = [next(each).tolist() for _ in range(2)]
    assert loader.state_dict() == state
    assert loader.state_dict(in_flight=2) == state
    assert loader.state_dict(in_flight=3)["position"] == 0
    resumed = make(World(), 20, 2, 6)
    resumed.load_state_dict(state)
    again = [batch.tolist() for batch in resumed]
    assert again[:2] == second
    assert sorted(sample for batch in first + again for sample in batch) == list(range(20))


def test_commit_within_a_global_batch_is_refused_and_changes_nothing() -> None:
    loader = make(World(), 20, 2, 6)
    each = iter(loader)
    next(each)
    before = loader.state_dict()
    with pytest.raises(MidepochError, match=r"within the global batch at position 0.*when loader\.step_due"):
        loader.commit()
    assert loader.state_dict() == before
    next(each)
    next(each)
    loader.commit()
    assert loader.state_dict()["position"] == 6


def test_a_rollback_or_a_reshard_within_a_global_batch_begins_it_anew() -> None:
    loader = make(World(), 20, 2, 6)
    each = iter(loader)
    first = next(each).tolist()
    loader.rollback()
    assert next(each).tolist() == first
    loader.reshard(World(0, 2))
    assert [next(each).tolist() for _ in range(2)] == [first, next(iter(make(World(), 20, 6, None))).tolist()[4:5]]
    assert loader.step_due
    assert loader.position == 6


def test_a_pass_given_up_within_the_first_global_batch_gives_up_its_epoch() -> None:
    loader = make(World(), 20, 2, 6)
    for _ in loader:
        break
    assert (loader.epoch, loader.position) == (0, 0)
    with pytest.warns(midepoch.MidepochWarning, match="given up after its first batch"):
        whole = [sample for batch in loader for sample in batch.tolist()]
    assert whole == whole_order(20, 1)
    other = make(World(), 20, 2, 6)
    told = []
    for epoch in other.epochs(2):
        told.append(epoch)
        for _ in other:
            break
    assert told == [0, 1]


def test_then_sees_batches_without_samples_too_and_draws_for_each_anew() -> None:
    def noise(batch: torch.Tensor) -> tuple[list[int], float]:
        return batch.tolist(), random.random()

    seen: dict[int, list[Any]] = {}
    for rank in range(3):
        for again in range(2):
            source: Any = DataLoader(range(24), batch_size=1)  # type: ignore[arg-type]
            loader = midepoch.wrap(source, seed=3, world=World(rank, 3), global_batch=4, then=noise)
            got = [(batch, loader.weight) for batch in loader]
            assert seen.setdefault(rank, got) == got, again
    drawn = [noise for got in seen.values() for (_, noise), weight in got if weight]
    assert len(set(drawn)) == len(drawn) == 24
    loader = midepoch.wrap(DataLoader(range(24), batch_size=1), seed=3, world=World(0, 3), global_batch=4, then=noise)  # type: ignore[arg-type]
    loader.seek(position=8)
    assert list(loader) == [batch for batch, _ in seen[0]][4:]


class Failing(torch.utils.data.Dataset[int]):
    broken = True

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5 and self.broken:
            raise RuntimeError("a bad sample")
        return index


def test_after_an_error_the_global_batch_is_begun_anew_or_passed_over_as_a_whole() -> None:
    for on_error, then in (("retry", [4, 5]), ("next", [8, 9])):
        data = Failing()
        loader = midepoch.wrap(DataLoader(data, batch_size=2), global_batch=4, on_error=on_error)  # type: ignore[arg-type]
        each = iter(loader)
        assert [next(each).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(RuntimeError, match="a bad sample"):
            next(each)
        assert loader.position == 4
        data.broken = False
        if on_error == "next":
            with pytest.warns(midepoch.MidepochWarning, match="positions 4 to 7 of epoch 0 were passed over"):
                assert next(each).tolist() == then
        else:
            assert next(each).tolist() == then


def test_drop_last_leaves_out_a_global_batch_that_is_not_full() -> None:
    for world_size in (1, 2, 3):
        samples = []
        for rank in range(world_size):
            source: Any = DataLoader(range(23), batch_size=2, drop_last=True)  # type: ignore[arg-type]
            loader = midepoch.wrap(source, world=World(rank, world_size), global_batch=10)
            samples += [sample for batch in loader if loader.weight for sample in batch.tolist()]
            assert (loader.epoch, loader.position) == (1, 0)
        assert sorted(samples) == list(range(20))


def test_batches_may_be_the_units() -> None:
    rows = [[number] for number in range(7)]
    got = []
    for rank in range(2):
        loader = midepoch.wrap(rows, world=World(rank, 2), global_batch=3)
        got.append([(batch, loader.weight) for batch in loader])
    assert got[0] == [([0], 2 / 3), ([2], 2 / 3), ([3], 2 / 3), ([5], 2 / 3), ([6], 2.0)]
    assert got[1] == [([1], 2 / 3), ([0], 0.0), ([4], 2 / 3), ([0], 0.0), ([0], 0.0)]


def test_the_weight_of_a_plain_loader_is_that_of_its_tail() -> None:
    loader = midepoch.wrap(DataLoader(range(11), batch_size=2), world=World(0, 2), tail="uneven")  # type: ignore[arg-type]
    other = midepoch.wrap(DataLoader(range(11), batch_size=2), world=World(1, 2), tail="uneven")  # type: ignore[arg-type]
    assert loader.weight == 1.0
    assert [loader.weight for _ in loader] == [1.0, 1.0, 4 / 3]
    assert [other.weight for _ in other] == [1.0, 1.0, 2 / 3]
    assert loader.peek().tolist() == [0, 1]
    assert loader.weight == 4 / 3  # of the batch that was handed out, not of that which was looked at
    assert loader.step_due
    padded = midepoch.wrap(DataLoader(range(11), batch_size=2), world=World(0, 2))  # type: ignore[arg-type]
    assert [padded.weight for _ in padded] == [1.0] * 3


def test_what_only_reading_tells_has_no_weight() -> None:
    loader = midepoch.wrap(sources.numbers, shard=True)
    next(iter(loader))
    with pytest.raises(UnsupportedSourceError, match=r"only reading tells.*divide by the sum"):
        _ = loader.weight


def test_what_cannot_be_is_refused() -> None:
    wrong = ((0, ValueError, "at least 1"), (2.0, TypeError, "must be an int"), (True, TypeError, "must be an int"))
    for value, kind, words in wrong:
        with pytest.raises(kind, match=f"global_batch.*{words}"):
            make(World(), 10, 2, value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave tail out"):
        make(World(), 10, 2, 4, tail="pad")
    with pytest.raises(UnsupportedSourceError, match="with shard=False"):
        make(World(), 10, 2, 4, shard=False)
    with pytest.raises(UnsupportedSourceError, match="use a source that can be indexed"):
        midepoch.wrap(sources.numbers, global_batch=4)
    with pytest.raises(UnsupportedSourceError, match=r"part 1 has global_batch=4.*over the combination's batches"):
        midepoch.combine([make(World(), 10, 2, None), make(World(), 10, 2, 4)])
    loader = make(World(), 10, 2, 4)
    with pytest.raises(StateError, match="only 0 batches"):
        loader.state_dict(in_flight=1)
