"""`global_batch=`, `Loader.weight` and `Loader.step_due`: steps of one size in every world, and what a batch counts."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochError, StateError, UnsupportedSourceError, World
from midepoch.loader.loader import Loader
from support import sources

EXAMPLES = 4000 if os.environ.get("MIDEPOCH_CHAOS") else 30
Sizes = tuple[int, int, int]  # of the data, a micro-batch and a global batch


def make(world: World, size: int, micro: int, together: int | None, **options: Any) -> Loader:
    source = DataLoader(sources.Indices(size), batch_size=micro, shuffle=options.pop("shuffle", True))
    return midepoch.wrap(source, seed=5, world=world, global_batch=together, **options)


JOBS = st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(1, 30))


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
    loader.seek(epoch)
    return list(map(int, loader))


@settings(max_examples=EXAMPLES, deadline=None)
@given(JOBS, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_any_sequence_of_worlds_covers_the_epoch_in_equal_steps(job: Sizes, worlds: list[int], seed: int) -> None:
    chance, ranks, size = random.Random(seed), Job(*job), job[0]
    ranks.become(worlds[0])
    for epoch in range(2):
        order, trained, committed = whole_order(size, epoch), list[int](), 0
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
            assert sorted(trained) == sorted(order[: len(trained)])
        assert sorted(trained) == list(range(size))
        ranks.passes = [iter(loader) for loader in ranks.loaders]


@settings(max_examples=EXAMPLES, deadline=None)
@given(JOBS, st.integers(1, 5))
def test_lengths_are_those_of_the_batches_that_come(job: Sizes, world_size: int) -> None:
    for rank in range(world_size):
        loader = make(World(rank, world_size), *job)
        assert loader.batches_done == 0
        length = len(loader)
        for number, _ in enumerate(loader, start=1):
            if loader.epoch == 0:
                assert (loader.batches_done, loader.batches_left) == (number, length - number)
        assert number == length


def test_a_pass_of_three_ranks_is_as_written_down_by_hand() -> None:
    """Ten samples to a step, batches of two, twenty-three samples in their order."""
    got = []
    for rank in range(3):
        loader = make(World(rank, 3), 23, 2, 10, shuffle=False)
        got.append([(batch.tolist(), round(loader.weight, 3), loader.step_due) for batch in loader])
    assert got == [
        [([0, 1], 0.6, False), ([6, 7], 0.6, True), ([10, 11], 0.6, False), ([16, 17], 0.6, True), ([20], 1.0, True)],
        [([2, 3], 0.6, False), ([8, 9], 0.6, True), ([12, 13], 0.6, False), ([18, 19], 0.6, True), ([21], 1.0, True)],
        [([4, 5], 0.6, False), ([0, 1], 0.0, True), ([14, 15], 0.6, False), ([0, 1], 0.0, True), ([22], 1.0, True)],
    ]


def test_a_state_within_a_global_batch_is_that_of_its_beginning() -> None:
    loader = make(World(), 20, 2, 6)
    each = iter(loader)
    first = [next(each).tolist() for _ in range(3)]
    state = loader.state_dict()
    second = [next(each).tolist() for _ in range(2)]
    assert loader.state_dict() == loader.state_dict(in_flight=2) == state
    assert loader.state_dict(in_flight=3)["position"] == 0
    with pytest.raises(MidepochError, match=r"within the global batch at position 6.*when loader\.step_due"):
        loader.commit()
    assert loader.state_dict() == state
    next(each)
    loader.commit()
    assert loader.state_dict()["position"] == 12
    again = sources.resumed(lambda: make(World(), 20, 2, 6), state)
    assert again[:2] == second
    assert sorted(sources.flat(first + again)) == list(range(20))


def test_a_rollback_or_a_reshard_begins_a_global_batch_anew() -> None:
    loader = make(World(), 20, 2, 6)
    each = iter(loader)
    first = next(each).tolist()
    loader.rollback()
    assert next(each).tolist() == first
    loader.reshard(World(0, 2))
    assert [next(each).tolist() for _ in range(2)] == [first, next(iter(make(World(), 20, 6, None))).tolist()[4:5]]
    assert loader.step_due
    assert loader.position == 6


def test_a_pass_given_up_in_its_first_global_batch_is_over() -> None:
    loader = make(World(), 20, 2, 6)
    for _ in loader:
        break
    assert (loader.epoch, loader.position) == (0, 0)
    with pytest.warns(midepoch.MidepochWarning, match="given up after its first batch"):
        assert sources.flat(sources.taken(loader)) == whole_order(20, 1)
    other = make(World(), 20, 2, 6)
    assert [(epoch, len(sources.taken(other, 1))) for epoch in other.epochs(2)] == [(0, 1), (1, 1)]


def test_then_sees_batches_without_samples_too() -> None:
    """And draws for each anew."""
    noise = lambda batch: (batch.tolist(), random.random())
    seen: dict[int, list[Any]] = {}
    for rank in range(3):
        for again in range(2):
            loader = make(World(rank, 3), 24, 1, 4, then=noise)
            got = [(batch, loader.weight) for batch in loader]
            assert seen.setdefault(rank, got) == got, again
    drawn = [noise for got in seen.values() for (_, noise), weight in got if weight]
    assert len(set(drawn)) == len(drawn) == 24
    loader = make(World(0, 3), 24, 1, 4, then=noise)
    loader.seek(position=8)
    assert list(loader) == [batch for batch, _ in seen[0]][4:]


@pytest.mark.parametrize(("on_error", "following"), [("retry", [4, 5]), ("next", [8, 9])])
def test_after_an_error_a_global_batch_is_begun_anew_or_left(on_error: Any, following: Any, tmp_path: Path) -> None:
    data = sources.Failing(12, [5], tmp_path)
    loader = midepoch.wrap(DataLoader(data, batch_size=2), global_batch=4, on_error=on_error)
    each = iter(loader)
    assert [next(each)[:, 0].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="cannot be read"):
        next(each)
    assert loader.position == 4
    data.failing = frozenset()
    with warnings.catch_warnings(record=True, action="always") as told:
        assert next(each)[:, 0].tolist() == following
    passed_over = ["positions 4 to 7 of epoch 0 were passed over" in str(each.message) for each in told]
    assert passed_over == [True] * (on_error == "next")


def test_the_weight_of_a_plain_loader_is_that_of_its_tail() -> None:
    loader, other = (make(World(rank, 2), 11, 2, None, tail="uneven", shuffle=False) for rank in range(2))
    assert loader.weight == 1.0
    assert [loader.weight for _ in loader] == [1.0, 1.0, 4 / 3]
    assert [other.weight for _ in other] == [1.0, 1.0, 2 / 3]
    assert loader.peek().tolist() == [0, 1]
    assert loader.weight == 4 / 3  # of the batch that was handed out, not of that which was looked at
    assert loader.step_due
    padded = make(World(0, 2), 11, 2, None)
    assert [padded.weight for _ in padded] == [1.0] * 3


def test_what_cannot_be_is_refused() -> None:
    wrong: Any = (0, ValueError, "at least 1"), (2.0, TypeError, "must be an int"), (True, TypeError, "must be an int")
    for value, kind, words in wrong:
        with pytest.raises(kind, match=f"global_batch.*{words}"):
            make(World(), 10, 2, value)
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
