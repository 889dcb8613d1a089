"""Ranks leave and join in mid-epoch: `reshard`, `commit` and `rollback`, over any sequence of worlds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import MidepochError, UnsupportedSourceError, World
from midepoch.loader.loader import Loader
from midepoch.testing import digest
from support import sources


def by_index(world: World, **settings: Any) -> Loader:
    return midepoch.wrap(sources.noisy_loader(61, batch_size=3, **settings), seed=3, world=world, tail="uneven")


def replayed(world: World) -> Loader:
    numbers = functools.partial(sources.numbers, 23)
    return midepoch.wrap(numbers, seed=3, world=world, shard=True, tail="uneven")


def begun(loader: Loader, count: int = 1, commits: bool = False) -> Iterator[Any]:
    """A pass of which so many batches were taken, each of them committed or none."""
    batches = iter(loader)
    for _ in range(count):
        next(batches)
        if commits:
            loader.commit()
    return batches


@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_outlive_a_change_of_the_world(persistent: bool) -> None:
    children: Callable[..., Any] = lambda: {child.pid for child in psutil.Process().children()} - before
    before = set[int]()
    before |= children()
    loader = by_index(World(0, 2), num_workers=2, persistent_workers=persistent)
    each, workers = begun(loader), children()
    assert len(workers) == 2
    for world in (World(0, 3), World(), World(1, 2)):
        loader.reshard(world)
        next(each)
        loader.rollback()
        next(each)
        now = children()
        assert now == workers if persistent else len(now) == 2 and not now & workers
    loader.close()
    assert not children()


@pytest.mark.parametrize("beside", ["nothing", "a rollback before", "a rollback behind"])
def test_a_pass_that_the_new_world_has_no_batch_for_has_ended(beside: str) -> None:
    loader = midepoch.wrap(DataLoader(sources.Indices(10), batch_size=2), world=World(), tail="drop")
    each = begun(loader, 4, commits=beside != "nothing")
    if beside != "nothing":
        next(each)
    if beside == "a rollback before":
        loader.rollback()
    loader.reshard(World(1, 3))
    if beside != "nothing":
        loader.rollback()
    assert list(each) == []
    assert (loader.epoch, loader.position) == (1, 0)
    assert [batch.tolist() for batch in loader] == [[2, 3], [7]]


@pytest.mark.parametrize("resharded", [False, True])
def test_a_rank_that_joins_where_nothing_is_left_ends_the_epoch(resharded: bool) -> None:
    """Where the others do: of 21 samples, 16 are done and drop_last leaves out the rest in a world of two."""

    def make(world: World) -> Loader:
        source = DataLoader(sources.Indices(21), batch_size=4, drop_last=True)
        return midepoch.wrap(source, seed=0, world=world, tail="uneven")
    stays, joins = make(World()), make(World() if resharded else World(1, 2))
    bodies = [stays.epochs(2), joins.epochs(2)]
    next(bodies[0])
    each = begun(stays, 4, commits=True)
    joins.load_state_dict(stays.state_dict())
    if resharded:
        joins.reshard(World(1, 2))
    stays.reshard(World(0, 2))
    next(bodies[1])
    assert (next(each, None), next(iter(joins), None)) == (None, None)
    assert (joins.epoch, joins.position) == (stays.epoch, stays.position) == (0, 21)
    stays.commit()
    joins.commit()
    assert [(each.state_dict()["epoch"], each.state_dict()["position"]) for each in (stays, joins)] == [(0, 21)] * 2
    assert [next(body) for body in bodies] == [1, 1]
    assert [next(iter(loader)).tolist() for loader in (stays, joins)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
def test_states_of_ranks_without_a_part_of_the_last_batches() -> None:
    loaders = [replayed(World(rank, 3)) for rank in range(3)]
    passes = list(map(iter, loaders))
    for each in passes:
        _eight = [next(each, None) for _ in range(8)]
    # A rank that has been told the end is at the next epoch's beginning; one that has not is right before it.
    states = [loader.state_dict() for loader in loaders]
    assert {(state["epoch"], state["position"]) for state in states} == {(0, 23), (1, 0)}
    resumed = [sources.loaded(replayed(World(0, 3)), state) for state in states]
    # One that finds nothing left ends: with tail="uneven" others may have more.
    following = [sources.taken(loader) or sources.taken(loader) for loader in resumed]
    assert following[0] and following == following[:1] * 3
    assert [next(each, None) for each in passes] == [None] * 3
    assert len({str(loader.state_dict()) for loader in loaders}) == 1


class Mute(sources.Counter):
    def state_dict(self) -> dict[str, Any]:
        if self.given > 3:
            raise ValueError("a state was lost")
        return super().state_dict()


def test_a_source_that_cannot_say_its_state_is_not_committed() -> None:
    loader = midepoch.wrap(Mute(6), seed=1, world=World())
    each = begun(loader, 2)
    loader.commit()
    committed = loader.state_dict()
    assert [next(each) for _ in range(2)] == [2, 3]
    with pytest.raises(ValueError, match="a state was lost"):
        loader.commit()
    assert (loader.state_dict(), loader.position) == (committed, 4)
    loader.rollback()
    assert list(each) == [2, 3, 4, 5]


def test_what_is_refused_leaves_the_loader_as_it_was() -> None:
    loader = by_index(World(0, 2))
    _each = begun(loader)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\)"):
        loader.reshard(World(2, 2))
    with pytest.raises(TypeError, match=r"reshard takes a midepoch\.World"):
        loader.reshard(2)  # type: ignore[arg-type]
    loader.commit()
    with pytest.raises(MidepochError, match=r"nothing to commit.*once after each step"):
        loader.commit()
    with pytest.raises(MidepochError, match="leave in_flight out"):
        loader.state_dict(1)
    assert loader.state_dict() == before
    counted = by_index(World())
    for _ in counted.epochs(1):
        next(iter(counted))
        with pytest.raises(MidepochError, match=r"rollback\(\) in the body of epochs\(\), which counts its passes"):
            counted.rollback()
        assert counted.position == 3
    own = midepoch.wrap(StatefulDataLoader(sources.Noisy(12), batch_size=3), seed=1, world=World(0, 2))
    next(iter(own))
    with pytest.raises(UnsupportedSourceError, match="cannot be shared by another number of ranks"):
        own.reshard(World(0, 3))


def built_for_its_rank() -> Loader:
    pytest.importorskip("grain", reason="Grain has wheels for some versions of Python only")
    from support import own_state_sources as own

    return midepoch.wrap(own.grain_elastic(0, 2), world=World(0, 2))


def of_an_uneven_part() -> Loader:
    return midepoch.combine({"a": midepoch.wrap(sources.noisy_loader(20), seed=0, world=World(), tail="uneven")})


def of_a_part_that_divides() -> Loader:
    theirs = sources.noisy_loader(40, shuffle=False, sampler=DistributedSampler(range(40), 2, 0))  # type: ignore[arg-type]
    parts = {"a": sources.noisy_loader(40), "b": theirs}
    return midepoch.combine({name: midepoch.wrap(part, seed=0, world=World(0, 2)) for name, part in parts.items()})


@pytest.mark.parametrize(("make", "world", "words"), [
    (built_for_its_rank, World(0, 1), "make it with ShardOptions"),
    (of_an_uneven_part, World(0, 2), r"tail='uneven'.*tail='pad' or 'drop'"),
    (of_a_part_that_divides, World(0, 1), "sampler is for rank 0 of 2"),
])  # fmt: skip
def test_a_world_that_cannot_be_changes_nothing(make: Callable[[], Loader], world: World, words: str) -> None:
    loader = make()
    first = next(each := iter(loader))
    with pytest.raises(UnsupportedSourceError, match=words):
        loader.reshard(world)
    assert digest([first, *each]) == digest(list(make()))


class Told(sources.Indices):
    """Is told the epoch, as datasets are whose samples change with it."""

    epoch = 0

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch


@pytest.mark.parametrize(("before", "leads"), [("reshard", "load"), ("rollback", "seek")])
def test_behind_a_load_the_dataset_is_read_as_it_is(before: str, leads: str) -> None:
    data = Told(10)
    loader = midepoch.wrap(DataLoader(data, 2, num_workers=1), world=World(), verify="off")
    each = begun(loader)
    state = loader.state_dict()
    if before == "reshard":
        loader.reshard(World())
    else:
        next(each)
        loader.rollback()
    data.epoch = 7
    if leads == "load":
        loader.load_state_dict(state)
    else:
        loader.seek(position=2)
    assert [sources.plain(batch) for batch in each] == [[[at, at + 1], [7, 7]] for at in (2, 4, 6, 8)]
    loader.close()


def test_a_rollback_to_a_committed_end_gives_nothing_again() -> None:
    loader = midepoch.wrap([[1], [2]], world=World())
    each = begun(loader, 2, commits=True)
    loader.rollback()
    assert list(each) == []
    assert list(loader) == [[1], [2]] and loader.epoch == 2


@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
def test_a_rollback_begins_workers_streams_again() -> None:
    source = DataLoader(sources.Stream(16, by_worker=True), batch_size=2, num_workers=2)
    loader = midepoch.wrap(source, world=World(), shard=False, verify="off", seed=1)
    whole = sources.taken(loader)
    loader.seek(epoch=0)
    each = begun(loader, 3, commits=True)
    next(each)
    loader.rollback()
    assert [batch.tolist() for batch in each] == whole[3:]
    loader.close()


def test_a_bad_batch_is_not_passed_over_in_another_world(tmp_path: Path) -> None:
    """A rank that joins stands at the state of before it, and cannot know."""
    data = sources.Failing(24, [5], tmp_path)
    loader = midepoch.wrap(DataLoader(data, batch_size=2), world=World(), tail="uneven")
    each = begun(loader, 2, commits=True)
    state = loader.state_dict()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be read"):
            next(each)
        with pytest.raises(MidepochError, match=r"reshard\(\) after a batch that could not be read, at position 4"):
            loader.reshard(World(1, 2))
        loader.rollback()  # it is tried again
    assert (loader.state_dict(), loader.position) == (state, 4)
    loader.reshard(World(1, 2))
    assert next(each)[:, 0].tolist() == [6, 7]


# --- a training loop that begins again in its process -----------------------------------------------------------------


class NotLoadedError(BaseException):
    pass


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_begins_again_gets_no_batch_before_a_state(workers: int) -> None:
    whole = [sources.plain(batch) for batch in by_index(World())]
    loader = by_index(World(), num_workers=workers)
    left: Any = loader.epochs(2)
    next(left)
    each = begun(loader)
    saved = loader.state_dict()
    next(each)
    loader._progress.begin_again(NotLoadedError, "load the state")
    assert loader.position == 6
    with pytest.raises(NotLoadedError, match="load the state"):
        next(each)
    asks: list[Callable[[], Any]] = [lambda: next(iter(loader)), loader.peek]
    for call in (list, lambda: loader.set_epoch(5), loader.rollback):  # as trainers do
        call()
        for ask in asks:
            with pytest.raises(NotLoadedError, match="load the state"):
                ask()
    loader.load_state_dict(saved)
    got: list[Any] = []
    for epoch in loader.epochs(1):
        left.close()  # freed late
        got += [sources.plain(batch) for batch in loader]
        assert loader.epoch == epoch
    assert got == whole[1:]
    loader._progress.begin_again(NotLoadedError, "load the state")
    loader.seek(epoch=0)  # the weights begin anew, too
    assert [sources.plain(batch) for batch in loader] == whole
    loader.close()
