"""Ranks leave and join in mid-epoch: `reshard`, `commit` and `rollback`, over any sequence of worlds."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import MidepochError, MidepochWarning, UnsupportedSourceError, World
from midepoch.loader.loader import Loader
from midepoch.loader.part import Part
from midepoch.testing import digest
from support import sources

SIZE = 61


class Exposing(IterableDataset[Any]):
    def __init__(self) -> None:
        self.sampler = RandomSampler(range(SIZE))

    def __iter__(self) -> Exposing:
        self.indices = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        return next(self.indices), random.random()


def by_index(world: World, **settings: Any) -> Loader:
    source = DataLoader(sources.Noisy(SIZE), batch_size=3, shuffle=True, **settings)
    return midepoch.wrap(source, seed=3, world=world, tail="uneven")


def driven(world: World, **settings: Any) -> Loader:
    return midepoch.wrap(DataLoader(Exposing(), batch_size=3, **settings), seed=3, world=world, tail="uneven")


def batches(world: World) -> Loader:
    return midepoch.wrap([[number] for number in range(23)], seed=3, world=world, tail="uneven")


def replayed(world: World) -> Loader:
    return midepoch.wrap(_stream, seed=3, world=world, shard=True, tail="uneven")


def _stream() -> Iterator[Any]:
    for number in range(23):
        yield [number, random.random()]


def samples(batch: Any) -> list[str]:
    if isinstance(batch, torch.Tensor):
        return [str(row) for row in batch.tolist()]
    if isinstance(batch[0], torch.Tensor):
        return [str(each) for each in zip(*sources.plain(batch), strict=True)]
    return [str(batch)]


def begun(loader: Loader, count: int = 1, commits: bool = False) -> Iterator[Any]:
    """A pass of which so many batches were taken, each of them committed or none."""
    batches = iter(loader)
    for _ in range(count):
        next(batches)
        if commits:
            loader.commit()
    return batches


class Group:
    """Some ranks in one process that train, lose steps, leave and join as a seed has it."""

    def __init__(self, make: Callable[[World], Loader], seed: int) -> None:
        self.make, self.random = make, random.Random(seed)
        self.loaders: list[Loader] = []
        self.passes: list[Iterator[Any]] = []
        self.ended: list[bool] = []
        self.become(self.random.randint(1, 3))
        self.trained: list[str] = []
        self.pending: list[str] = []
        self.worlds = 0

    def become(self, ranks: int) -> None:
        """Ranks leave, or join with a state of a rank that is there."""
        while len(self.loaders) > ranks:
            self.loaders.pop().close()
            self.passes.pop()
            self.ended.pop()
        for rank, loader in enumerate(self.loaders):
            loader.reshard(World(rank, ranks))
        while len(self.loaders) < ranks:
            loader = self.make(World(len(self.loaders), ranks))
            if self.loaders:
                loader.load_state_dict(self.loaders[0].state_dict())
            self.loaders.append(loader)
            self.passes.append(iter(loader))
            self.ended.append(False)

    def roll_back(self) -> None:
        for rank, loader in enumerate(self.loaders):
            before = loader.position
            loader.rollback()
            if loader.position != before and self.ended[rank]:
                self.passes[rank], self.ended[rank] = iter(loader), False
        self.pending.clear()

    def step(self) -> bool:
        """A step of all ranks; False at the end of the epoch."""
        got = []
        for rank, each in enumerate(self.passes):
            try:
                got += samples(next(each))
            except StopIteration:
                self.ended[rank] = True
        self.pending += got
        if got and (self.random.random() < 0.7 or not self.loaders[0].position):
            for loader in self.loaders:
                loader.commit()
            states = [loader.state_dict() for loader in self.loaders]
            assert len({(state["epoch"], state["position"]) for state in states}) == 1
            self.trained += self.pending
            self.pending.clear()
        return bool(got)

    def epoch(self) -> list[str]:
        self.passes, self.ended = [iter(loader) for loader in self.loaders], [False] * len(self.loaders)
        while self.step():
            chance = self.random.random() if self.loaders[0].position else 1.0
            if chance < 0.4:
                self.roll_back()
            if chance < 0.25:
                self.become(self.random.randint(1, 4))
                self.worlds += 1
        assert not self.pending
        trained, self.trained = self.trained, []
        return sorted(trained)

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


MAKERS: dict[str, tuple[Callable[..., Loader], dict[str, Any]]] = {
    "by index": (by_index, {}),
    "by index, workers": (by_index, {"num_workers": 2}),
    "by index, persistent workers": (by_index, {"num_workers": 2, "persistent_workers": True}),
    "driven by samplers": (driven, {}),
    "driven by samplers, workers": (driven, {"num_workers": 2}),
    "list of batches": (batches, {}),
}


@pytest.mark.parametrize(
    "kind",
    # Workers that persist are those that a reshard leaves alive.
    [pytest.param(each, marks=pytest.mark.long if each == "by index, workers" else ()) for each in MAKERS],
)
def test_any_sequence_of_worlds_trains_each_sample_once_with_its_random_numbers(kind: str) -> None:
    make, settings = MAKERS[kind]
    whole = make(World())
    expected = [sorted(each for batch in whole for each in samples(batch)) for _ in range(2)]
    rounds, worlds = (3 if settings else 40) * (20 if os.environ.get("MIDEPOCH_CHAOS") else 1), 0
    for seed in range(rounds):
        group = Group(functools.partial(make, **settings) if settings else make, seed)
        assert [group.epoch() for _ in range(2)] == expected, seed
        worlds += group.worlds
        group.close()
    assert worlds >= rounds


@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_worker_processes_outlive_a_change_of_the_world(persistent: bool) -> None:
    before = {child.pid for child in psutil.Process().children()}
    loader = by_index(World(0, 2), num_workers=2, persistent_workers=persistent)
    each = begun(loader)
    workers = {child.pid for child in psutil.Process().children()} - before
    assert len(workers) == 2
    for world in (World(0, 3), World(), World(1, 2)):
        loader.reshard(world)
        next(each)
        loader.rollback()
        next(each)
        now = {child.pid for child in psutil.Process().children()} - before
        assert now == workers if persistent else len(now) == 2 and not now & workers
    loader.close()
    assert not {child.pid for child in psutil.Process().children()} - before


class Noting(Dataset[int]):
    """Writes down what is read, in this process or in others. Nothing is while somebody has the lock."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, multiprocessing.Lock()

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        with self.lock, self.path.open("a") as noted:
            noted.write(f"{index} {os.getpid()}\n")
        return index


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_first_batch_behind_a_reshard_waits_for_one_batch_at_most(workers: int, tmp_path: Path) -> None:
    """In the worker process that reads it, for the rest of the batch that it was reading."""
    options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 20} if workers else {}
    source: Any = DataLoader(data := Noting(tmp_path / "read"), batch_size=5, **options)
    loader = midepoch.wrap(source, world=World(0, 2), verify="off")
    each = begun(loader)
    for world in (World(0, 3), World(1, 2), World()):
        with data.lock:
            before = len((tmp_path / "read").read_text().splitlines())
        loader.reshard(world)
        batch = next(each).tolist()
        lines = [line.split() for line in (tmp_path / "read").read_text().splitlines()[before:]]
        reads = [[int(index) for index, process in lines if process == each] for _, each in lines]
        until = min(max(map(read.index, batch)) + 1 for read in reads if set(batch) <= set(read))
        assert until <= 5 * (1 + bool(workers))
    loader.close()


def test_a_pass_that_the_new_world_has_no_batch_for_has_ended() -> None:
    loader = midepoch.wrap(DataLoader(range(10), batch_size=2), world=World(), tail="drop")  # type: ignore[arg-type]
    each = begun(loader, 4)
    loader.reshard(World(1, 3))
    assert list(each) == []
    assert (loader.epoch, loader.position) == (1, 0)
    assert [batch.tolist() for batch in loader] == [[2, 3], [7]]


def test_a_pass_of_unknown_length_ends_where_a_reshard_finds_nothing_left() -> None:
    def numbers() -> Iterator[int]:
        yield from range(4)

    loader = midepoch.wrap(numbers, seed=0, shard=True, world=World())
    batches = iter(loader)
    first = [next(batches) for _ in range(4)]
    loader.reshard(World())
    assert [*first, *batches] == [0, 1, 2, 3] and (loader.epoch, loader.position) == (1, 0)
    assert list(loader) == [0, 1, 2, 3] and loader.epoch == 2


@pytest.mark.parametrize("resharded", [False, True])
def test_a_rank_that_joins_where_nothing_is_left_ends_the_epoch_where_the_others_do(resharded: bool) -> None:
    """Of 21 samples, 16 are done and drop_last leaves out the rest in a world of two."""

    def make(world: World) -> Loader:
        source: Any = DataLoader(range(21), batch_size=4, drop_last=True)  # type: ignore[arg-type]
        return midepoch.wrap(source, seed=0, world=world, tail="uneven")

    stays, joins = make(World()), make(World() if resharded else World(1, 2))
    bodies = [stays.epochs(2), joins.epochs(2)]
    next(bodies[0])
    each = iter(stays)
    for _ in range(4):
        next(each)
        stays.commit()
    joins.load_state_dict(stays.state_dict())
    if resharded:
        joins.reshard(World(1, 2))
    stays.reshard(World(0, 2))
    next(bodies[1])
    assert (next(each, None), next(iter(joins), None)) == (None, None)
    states = [loader.state_dict() for loader in (stays, joins)]
    assert (joins.epoch, joins.position) == (stays.epoch, stays.position) == (0, 21)
    stays.commit()
    joins.commit()
    states = [loader.state_dict() for loader in (stays, joins)]
    assert [(state["epoch"], state["position"]) for state in states] == [(0, 21)] * 2
    assert [next(body) for body in bodies] == [1, 1]
    assert [next(iter(loader)).tolist() for loader in (stays, joins)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_replay_is_shared_anew() -> None:
    whole = [samples(batch)[0] for batch in replayed(World())]
    loaders = [replayed(World(rank, 2)) for rank in range(2)]
    passes = [iter(loader) for loader in loaders]
    got = [samples(next(each))[0] for _ in range(3) for each in passes]
    newcomer = replayed(World(2, 3))
    newcomer.load_state_dict(loaders[0].state_dict())
    for rank, loader in enumerate(loaders):
        loader.reshard(World(rank, 3))
    with pytest.warns(midepoch.MidepochWarning, match="read again from its start"):
        got += [samples(batch)[0] for each in (*passes, iter(newcomer)) for batch in each]
    assert sorted(got) == sorted(whole)


@pytest.mark.parametrize("ranks", [2, 3])
def test_states_of_ranks_without_a_part_of_a_replay_s_last_batches_lead_where_the_others_do(ranks: int) -> None:
    loaders = [replayed(World(rank, ranks)) for rank in range(ranks)]
    passes = [iter(loader) for loader in loaders]
    for each in passes:
        for _ in range(-(-23 // ranks)):
            next(each, None)
    # A rank that has been told the end is at the next epoch's beginning; one that has not is right before it.
    states = [loader.state_dict() for loader in loaders]
    assert {(state["epoch"], state["position"]) for state in states} == {(0, 23), (1, 0)}
    following = []
    for state in states:
        resumed = replayed(World(0, ranks))
        resumed.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MidepochWarning)
            # One that finds nothing left ends: with tail="uneven" others may have more.
            following.append([samples(batch) for batch in resumed] or [samples(batch) for batch in resumed])
    assert following[0]
    assert all(each == following[0] for each in following)
    for each in passes:
        assert next(each, None) is None
    assert len({str(loader.state_dict()) for loader in loaders}) == 1


def test_states_say_what_is_committed() -> None:
    loader = by_index(World())
    each = iter(loader)
    first = sources.plain(next(each))
    assert loader.state_dict()["position"] == 3
    loader.rollback()  # nothing was committed: to the beginning
    assert sources.plain(next(each)) == first
    loader.commit()
    committed = loader.state_dict()
    second = sources.plain(next(each))
    assert loader.position == 6
    assert loader.state_dict() == committed
    with pytest.raises(MidepochError, match="leave in_flight out"):
        loader.state_dict(1)
    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.append(loader.state_dict()))
    thread.start()
    thread.join()
    assert told == [committed]
    loader.rollback()
    assert loader.position == 3
    assert sources.plain(next(each)) == second
    resumed = by_index(World())
    resumed.load_state_dict(committed)
    assert sources.plain(next(iter(resumed))) == second


def test_after_a_load_or_a_seek_states_go_on_saying_what_is_committed() -> None:
    """A rank that was healed is asked for its state, to heal others or to save it, while it trains on a batch."""
    loader = by_index(World())
    each = begun(loader)
    loader.commit()
    healed = loader.state_dict()
    for _ in range(2):
        next(each)
        loader.commit()
    loader.load_state_dict(healed)
    next(each)
    assert (loader.state_dict(), loader.position) == (healed, 6)
    loader.rollback()
    next(each)
    loader.commit()
    assert loader.state_dict()["position"] == 6
    loader.seek(position=30)
    next(each)
    assert (loader.state_dict()["position"], loader.position) == (30, 33)
    loader.set_epoch(1)
    next(iter(loader))
    state = loader.state_dict()
    assert (state["epoch"], state["position"], loader.position) == (1, 0, 3)


def test_before_its_first_commit_a_rank_that_joins_says_what_was_handed_out() -> None:
    """As any loader that is resumed does; so it keeps what it has loaded, to send that."""
    first, joins = by_index(World(0, 2)), by_index(World(1, 2))
    next(iter(first))
    first.commit()
    joins.load_state_dict(first.state_dict())
    next(iter(joins))
    assert joins.state_dict()["position"] == 12
    assert joins.state_dict(in_flight=1)["position"] == 6
    joins.commit()
    assert joins.state_dict()["position"] == 12


@pytest.mark.parametrize("leads", ["rollback", "load", "seek"])
def test_a_pass_goes_on_after_a_look_beyond_its_end(leads: str) -> None:
    whole = [sources.plain(batch) for batch in by_index(World())]
    loader = by_index(World())
    each = begun(loader, 20, commits=True)
    saved = loader.state_dict()
    assert sources.plain(next(each)) == whole[20]
    with pytest.raises(StopIteration):
        loader.peek()
    if leads == "rollback":
        loader.rollback()
    elif leads == "load":
        loader.load_state_dict(saved)
    else:
        loader.seek(epoch=0, position=60)
    assert [sources.plain(batch) for batch in each] == whole[20:]
    following = sources.plain(loader.peek())
    loader.commit()
    loader.rollback()  # of nothing: the pass has ended all the same
    assert next(each, None) is None
    assert sources.plain(next(iter(loader))) == following


def test_a_rollback_leads_to_the_latest_commit_and_never_past_it() -> None:
    """One place is kept, however often it is asked for."""
    loader = by_index(World())
    each = begun(loader, 2, commits=True)
    committed, third = loader.state_dict(), sources.plain(next(each))
    for _ in range(3):
        loader.rollback()
        assert (loader.state_dict(), loader.position) == (committed, 6)
    assert sources.plain(next(each)) == third
    loader.load_state_dict(committed)
    next(iter(loader))
    loader.rollback()  # behind a load, what was committed before is not kept
    loader.rollback()
    assert (loader.state_dict(), loader.position) == (committed, 6)


class Mute(IterableDataset[int]):
    """Cannot say its state from the fourth sample on."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Mute:
        return self

    def __next__(self) -> int:
        if self.at == 12:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        if self.at > 3:
            raise ValueError("a state was lost")
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_source_that_cannot_say_where_it_stands_is_not_committed_and_goes_back() -> None:
    loader = midepoch.wrap(StatefulDataLoader(Mute(), batch_size=2), seed=1, world=World())
    each = begun(loader)
    loader.commit()
    committed = loader.state_dict()
    assert [next(each).tolist() for _ in range(2)] == [[2, 3], [4, 5]]
    with pytest.raises(ValueError, match="a state was lost"):
        loader.commit()
    assert (loader.state_dict(), loader.position) == (committed, 3)
    loader.rollback()
    assert [batch.tolist() for batch in each] == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_what_cannot_be_is_refused_with_the_loader_as_it_was() -> None:
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
    part: Any = DataLoader(range(20), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    return midepoch.combine({"a": midepoch.wrap(part, seed=0, world=World(), tail="uneven")})


def of_a_part_that_divides() -> Loader:
    indexed: Any = DataLoader(range(40), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    theirs: Any = DataLoader(range(40), batch_size=2, sampler=DistributedSampler(range(40), 2, 0))  # type: ignore[arg-type]
    parts = {"a": indexed, "b": theirs}
    return midepoch.combine({name: midepoch.wrap(part, seed=0, world=World(0, 2)) for name, part in parts.items()})


@pytest.mark.parametrize(
    ("make", "world", "words"),
    [
        (built_for_its_rank, World(0, 1), "make it with ShardOptions"),
        (of_an_uneven_part, World(0, 2), r"tail='uneven'.*tail='pad' or 'drop'"),
        (of_a_part_that_divides, World(0, 1), "sampler is for rank 0 of 2"),
    ],
)
def test_a_world_that_cannot_be_is_refused_before_anything_changes(
    make: Callable[[], Loader], world: World, words: str
) -> None:
    loader = make()
    each = iter(loader)
    first = next(each)
    with pytest.raises(UnsupportedSourceError, match=words):
        loader.reshard(world)
    assert digest([first, *each]) == digest(list(make()))


class Told(Dataset[Any]):
    """Is told the epoch, as datasets are whose samples change with it."""

    epoch = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch


@pytest.mark.parametrize("falls", ["after the last batch", "where nothing is left", "before a break"])
def test_after_a_reshard_the_next_epoch_is_read_from_the_dataset_as_it_is_then(falls: str) -> None:
    """Worker processes have a copy of it, with the last epoch."""
    data = Told()
    loader = midepoch.wrap(DataLoader(data, batch_size=2, num_workers=1), world=World(), tail="drop", verify="off")
    each = iter(loader)
    for _ in range({"after the last batch": 5, "where nothing is left": 4, "before a break": 2}[falls]):
        next(each)
    loader.reshard(World(0, 3))
    assert falls == "before a break" or next(each, None) is None
    data.epoch = 1
    assert [batch[1].tolist() for batch in loader] == [[1, 1], [1]]
    loader.close()


@pytest.mark.parametrize("before", ["reshard", "rollback"])
@pytest.mark.parametrize("leads", ["load", "seek"])
def test_behind_a_load_the_dataset_is_read_as_it_is_then_whatever_came_before(before: str, leads: str) -> None:
    data = Told()
    loader = midepoch.wrap(DataLoader(data, batch_size=2, num_workers=1), world=World(), verify="off")
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


class Divided(IterableDataset[int]):
    """Divides its data among worker processes by itself."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        return iter(range(worker.id, 16, worker.num_workers))


class DividedWithState(Divided):
    """The same with a state of its own, in which a worker process stands when it is read."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        for number in list(super().__iter__())[self.at :]:
            self.at += 1
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.filterwarnings("ignore:Divided is read again")
@pytest.mark.parametrize("kind", [Divided, DividedWithState])
@pytest.mark.parametrize("committed", [0, 3])
def test_worker_processes_with_streams_of_their_own_begin_after_a_rollback_as_before(
    kind: type[Divided], committed: int
) -> None:
    source: Any = DataLoader(kind(), batch_size=2, num_workers=2)
    loader = midepoch.wrap(source, world=World(), shard=False, verify="off")
    whole = [batch.tolist() for batch in loader]
    loader.seek(epoch=0)
    each = begun(loader, committed, commits=True)
    next(each)
    loader.rollback()
    assert [batch.tolist() for batch in each] == whole[committed:]
    loader.close()


def test_after_a_rollback_of_nothing_the_next_pass_goes_on_too() -> None:
    """What fails after the commit, a checkpoint for instance, must not cost the rest of the epoch."""
    loader = by_index(World())
    whole = [sources.plain(batch) for batch in by_index(World())]
    for number, _ in enumerate(loader):
        loader.commit()
        if number == 2:
            break
    loader.rollback()
    assert [sources.plain(batch) for batch in loader] == whole[3:]
    loader.commit()
    loader.rollback()  # the epoch is over: the next pass begins the next one
    assert sources.plain(next(iter(loader))) not in whole


@pytest.mark.parametrize("first", ["rollback", "reshard"])
def test_a_pass_ends_where_nothing_is_left_whichever_of_rollback_and_reshard_comes_first(first: str) -> None:
    loader = midepoch.wrap(DataLoader(range(10), batch_size=2), world=World(), tail="drop")  # type: ignore[arg-type]
    each = begun(loader, 4, commits=True)
    next(each)
    if first == "rollback":
        loader.rollback()
    loader.reshard(World(1, 3))
    loader.rollback()
    assert list(each) == []
    assert (loader.epoch, loader.position) == (1, 0)


class Bad(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("damaged")
        return index


def test_a_batch_that_one_rank_passes_over_is_not_passed_over_in_another_world() -> None:
    """A rank that joins stands at the state of before it, and cannot know."""
    loader = midepoch.wrap(DataLoader(Bad(), batch_size=2), world=World(), tail="uneven")
    each = iter(loader)
    assert [next(each).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    loader.commit()
    state = loader.state_dict()
    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            next(each)
        with pytest.raises(MidepochError, match=r"reshard\(\) after a batch that could not be read, at position 4"):
            loader.reshard(World(1, 2))
        loader.rollback()  # it is tried again
    assert (loader.state_dict(), loader.position) == (state, 4)
    loader.reshard(World(1, 2))
    assert next(each).tolist() == [6, 7]


def test_a_loader_that_was_never_loaded_may_be_resharded_before_its_first_batch() -> None:
    loader = by_index(World())
    loader.reshard(World(1, 2))
    assert sources.plain(next(iter(loader))) == sources.plain(next(iter(by_index(World(1, 2)))))


# --- ranks that get the same batches ----------------------------------------------------------------------------------


def _in_meshes(rank: int) -> list[tuple[Any, bool, list[str]]]:
    """What one of four ranks trains on while the mesh changes: its shape, whether peers got the same, and samples."""
    loader = by_index(World(), num_workers=rank % 2)  # peers read with and without a worker process
    trained: list[tuple[Any, bool, list[str]]] = []
    each: Iterator[Any] = iter(())
    for shape in ((2, 2), (4, 1), (1, 4), (2, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        loader.reshard(World.from_mesh(mesh["dp"]))
        each = iter(loader) if not trained else each
        last = len(trained) == 6
        for step in itertools.count():
            batch = next(each, None)
            if batch is not None and step == 1:
                loader.rollback()  # the step fails once
                batch = next(each)
            peers: list[Any] = [None] * shape[1]
            torch.distributed.all_gather_object(peers, sources.plain(batch), group=mesh["tp"].get_group())
            if batch is None:
                break
            same = all(peer == peers[0] for peer in peers)
            trained.append((shape, same, samples(batch) if mesh["tp"].get_local_rank() == 0 else []))
            loader.commit()
            if step == 1 and not last:
                break
    loader.close()
    return trained


def test_tensor_parallel_peers_get_equal_batches_through_every_reshard() -> None:
    ranks = sources.in_gloo_world(_in_meshes, 4)
    assert all(same for trained in ranks for _, same, _ in trained)
    assert [shape for shape, _, _ in ranks[0]][:6] == [(2, 2)] * 2 + [(4, 1)] * 2 + [(1, 4)] * 2
    got = sorted(each for trained in ranks for _, _, batch in trained for each in batch)
    assert got == sorted(each for batch in by_index(World()) for each in samples(batch))


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
    Part("", loader).begin_again(NotLoadedError, "load the state")
    assert loader.position == 6
    with pytest.raises(NotLoadedError, match="load the state"):
        next(each)
    calls: list[Callable[[], Any]] = [list, lambda: loader.set_epoch(5), loader.rollback]  # as trainers do
    asks: list[Callable[[], Any]] = [lambda: next(iter(loader)), loader.peek]
    for call in calls:
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
    Part("", loader).begin_again(NotLoadedError, "load the state")
    loader.seek(epoch=0)  # the weights begin anew, too
    assert [sources.plain(batch) for batch in loader] == whole
    loader.close()


def test_a_loop_that_begins_again_in_another_world_gets_its_part_of_the_rest() -> None:
    passes = [iter(driven(World(rank, 2))) for rank in range(2)]
    first = [each for batch in (next(each) for each in passes) for each in samples(batch)]
    os.environ.update(RANK="1", WORLD_SIZE="3")
    try:
        loader = midepoch.wrap(DataLoader(Exposing(), batch_size=3), seed=3, tail="uneven")
        next(iter(loader))
        saved = midepoch.wrap(DataLoader(Exposing(), batch_size=3), seed=3, tail="uneven")
        saved.seek(position=6)
        os.environ.update(RANK="0", WORLD_SIZE="1")
        Part("", loader).begin_again(NotLoadedError, "load the state")
        loader.load_state_dict(saved.state_dict())
        rest = [each for batch in loader for each in samples(batch)]
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert sorted(first + rest) == sorted(each for batch in driven(World()) for each in samples(batch))
