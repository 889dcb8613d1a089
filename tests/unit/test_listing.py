"""Samplers whose indices are listed when a pass begins: what a plain pass would show, and nothing else."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

import midepoch
from midepoch import MidepochError, StateMismatchError, UnsupportedSourceError, World
from midepoch.state.parts import join_states
from support import sources
from support.sources import taken

SIZE = 24
METHODS: dict[str, dict[str, Any]] = {"here": {}, "fork": {"num_workers": 1, "multiprocessing_context": "fork"}}


# --- a sampler that raises an error of its own ------------------------------------------------------------------------


class ExhaustedError(Exception):
    """Of a sampler of the user's."""


class Ends(Sampler[int]):
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


def ending(sampler: Any, **keywords: Any) -> DataLoader[int]:
    return DataLoader(range(SIZE), 2, sampler=sampler, **keywords)  # type: ignore[arg-type]


FAILING: dict[str, Callable[..., DataLoader[int]]] = {
    "after some": lambda **keywords: ending(Ends(7), **keywords),
    "at the first index": lambda **keywords: ending(Ends(0), **keywords),
    "before the first index": lambda **keywords: ending(Ends(6, True), **keywords),
    "in batches": lambda **keywords: DataLoader(range(SIZE), batch_sampler=EndsInBatches(6), **keywords),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("method", "name"), [*(("here", name) for name in FAILING), ("fork", "after some")])
def test_a_samplers_own_error_comes_after_its_batches(method: str, name: str) -> None:
    make: Callable[..., Any] = lambda: midepoch.wrap(FAILING[name](**METHODS[method]), seed=1)
    plain, error = until_error(FAILING[name]())
    with make() as loader:
        assert len(loader) == len(plain), "no length raises it"
        whole = []
        for epoch in range(2):
            batches, ours = until_error(loader)
            assert ours == error and list(map(len, batches)) == list(map(len, plain))
            assert loader.epoch == (epoch if plain else 0)
            whole.append(batches)
    for cut in range(1, len(plain) + 1):
        head, state = sources.heads(make, cut)
        with make() as resumed:
            resumed.load_state_dict(state)
            assert resumed.batches_left == len(plain) - cut
            rest, again = until_error(resumed)
            assert (head + rest, again) == (whole[0], error)
            assert until_error(resumed)[0] == whole[1] and resumed.epoch == 1, "the next pass is the next epoch"


def test_it_comes_through_then_and_a_peek() -> None:
    assert len(until_error(midepoch.wrap(ending(Ends(4)), seed=1, then=lambda batch: batch + 1))[0]) == 2
    loader = midepoch.wrap(ending(Ends(4)), seed=1)
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(ExhaustedError):
        loader.peek()
    with pytest.raises(ExhaustedError):
        next(batches)


# --- a sampler that sets something on the dataset ---------------------------------------------------------------------


class Sized(sources.Indices):
    width, epoch = 32, 0

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(self.width)


class Writes(BatchSampler):
    """Sets the size for each batch, before its first, after its last, or when it is asked for an iterator."""

    def __init__(self, dataset: Any, when: str) -> None:
        super().__init__(RandomSampler(dataset), 4, False)
        self.dataset, self.when, self.epoch = dataset, when, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = self.dataset.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self.when == "at its start":
            self.dataset.width = 64 + self.epoch
        return self.batches()

    def batches(self) -> Iterator[list[int]]:
        sizes = [96, 32, 64, 64, 128, 96]
        for number, batch in enumerate(super().__iter__()):
            if self.when == "before each" or (self.when == "before its first" and not number):
                self.dataset.width = sizes[number] + self.epoch
            yield batch
        if self.when == "after its last":
            self.dataset.width += 1


def sizes(loader: Any) -> list[int]:
    return [batch.shape[1] for batch in loader]


def written(when: str, workers: dict[str, Any], inside: bool = False) -> tuple[Sized, DataLoader[Any]]:
    dataset = Sized(SIZE)
    seen: Any = torch.utils.data.Subset(dataset, range(SIZE)) if inside else dataset
    return dataset, DataLoader(seen, batch_sampler=Writes(dataset, when), **workers)


@pytest.mark.parametrize(("method", "when", "inside"), [
    ("here", "before each", True), ("here", "before its first", False), ("here", "after its last", False),
    ("fork", "before each", False),
])  # fmt: skip
def test_one_that_sets_it_while_it_gives_batches_is_refused(method: str, when: str, inside: bool) -> None:
    dataset, source = written(when, METHODS[method], inside)
    loader = midepoch.wrap(source, seed=1)
    for _ in range(2):
        with pytest.raises(UnsupportedSourceError, match=r"Writes sets width of the dataset.*yield \[\(size, index\)"):
            next(iter(loader))
        assert dataset.width == 32


@pytest.mark.parametrize(("method", "asks"), [("here", True), ("fork", False)])
def test_what_one_sets_at_its_start_holds_for_the_pass(method: str, asks: bool) -> None:
    plain_data, plain = written("at its start", METHODS[method])
    our_data, source = written("at its start", METHODS[method])
    with midepoch.wrap(source, seed=1) as loader:
        for epoch in range(3):
            if asks:
                before = dict(vars(our_data))
                loader.state_dict(), len(loader)
                assert vars(our_data) == before, "a copy that is listed leaves no trace"
            source.batch_sampler.epoch = plain.batch_sampler.epoch = epoch  # type: ignore[union-attr]
            plain.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
            assert sizes(loader) == sizes(plain)
            assert vars(our_data) == vars(plain_data)


# --- what a training loop sets on a loader and its samplers -----------------------------------------------------------


class Mosaic(BatchSampler):
    mosaic = True

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield [(self.mosaic, index) for index in batch]


def weighted(**keywords: Any) -> DataLoader[Any]:
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(6), 6)  # type: ignore[arg-type]
    return DataLoader(range(6), 3, sampler=sampler, **keywords)  # type: ignore[arg-type]


def mosaic(**keywords: Any) -> DataLoader[Any]:
    return DataLoader(sources.Made(str, 6), batch_sampler=Mosaic(SequentialSampler(range(6)), 3, False), **keywords)


def in_order(**keywords: Any) -> DataLoader[Any]:
    return DataLoader(range(6), 2, **keywords)  # type: ignore[arg-type]


def distributed(**keywords: Any) -> DataLoader[Any]:
    return DataLoader(range(6), 2, sampler=DistributedSampler(range(6), 1, 0), **keywords)  # type: ignore[arg-type]


def times(batch: list[int]) -> torch.Tensor:
    return torch.tensor(batch) * 1000


def setting(path: str, value: Any) -> Callable[[Any], None]:
    """A function that sets an attribute of a loader, or of what it holds."""
    *names, last = path.split(".")

    def change(loader: Any) -> None:
        setattr(functools.reduce(getattr, names, loader), last, value)

    return change


set_weights = setting("sampler.weights", torch.tensor([0.0] * 5 + [1.0]))
set_collate = setting("collate_fn", times)


def set_drop_last(loader: Any) -> None:
    loader.batch_sampler.batch_size, loader.batch_sampler.drop_last = 4, True


SET_BY_LOOPS: dict[str, tuple[Callable[..., DataLoader[Any]], Callable[[Any], None]]] = {
    "weights": (weighted, set_weights),
    "weights in place": (weighted, lambda loader: loader.sampler.weights[:5].zero_()),
    "an attribute of a batch sampler": (mosaic, setting("batch_sampler.mosaic", False)),
    "a batch size": (in_order, setting("batch_sampler.batch_size", 4)),
    "drop_last": (in_order, set_drop_last),
    "another sampler": (in_order, setting("batch_sampler.sampler", [5, 4, 3])),
    "whether it shuffles": (distributed, setting("batch_sampler.sampler.shuffle", False)),
}


def torch_would(make: Callable[..., DataLoader[Any]], change: Callable[[Any], None]) -> list[Any]:
    change(plain := make())
    return taken(plain)


@pytest.mark.parametrize("name", SET_BY_LOOPS)
def test_what_a_loop_sets_between_passes_is_followed(name: str) -> None:
    make, change = SET_BY_LOOPS[name]
    expected = torch_would(make, change)
    source, other = make(), midepoch.wrap(make(), seed=0)
    loader, resumed = midepoch.wrap(source, seed=0), midepoch.wrap(make(), seed=0)
    for changed, on in ((loader, source), (other, other)):
        assert taken(changed) != expected
        change(on)
        assert len(changed) == changed.batches_left == len(expected)
        assert taken(changed) == expected
    if len(expected) > 1:
        change(resumed)
        resumed.load_state_dict(sources.heads(lambda: loader, 1)[1])
        assert taken(resumed) == expected[1:]


class Remembering(Sampler[int]):
    first = 0

    def __iter__(self) -> Iterator[int]:
        self.first += 1
        return iter(range(self.first, 6))


def test_one_that_remembers_is_asked_again_only_if_it_was_set() -> None:
    sampler = Remembering()
    loader = midepoch.wrap(DataLoader(sources.Indices(6), batch_size=6, sampler=sampler))
    whole = taken(loader)
    loader.seek(epoch=0)
    assert taken(loader) == whole
    sampler.first = 2
    loader.seek(epoch=0)
    assert taken(loader) == [whole[0][2:]]


@pytest.mark.parametrize("name", [name for name in SET_BY_LOOPS if "in place" not in name])  # which nobody sees
def test_what_a_loop_sets_within_a_pass_is_refused(name: str) -> None:
    make, change = SET_BY_LOOPS[name]
    loader, whole = midepoch.wrap(make(), seed=0), taken(midepoch.wrap(make(), seed=0))
    next(batches := iter(loader))
    with pytest.raises(MidepochError, match=r"loader\..* was set while a pass is read.*between two passes"):
        change(loader)
    assert taken(batches) == whole[1:], "the loader is unchanged"
    for _ in loader:
        break
    change(loader)  # a pass that was left is none
    assert taken(loader) == torch_would(make, change)
    loader.peek()
    with pytest.raises(MidepochError, match="between two passes"):
        change(loader)


@pytest.mark.parametrize(("method", "more"), [("here", {}), ("fork", {}), ("fork", {"persistent_workers": True})])
def test_another_collate_function_is_followed(method: str, more: dict[str, Any]) -> None:
    source = in_order(**METHODS[method], **more)
    others = set(multiprocessing.active_children())
    with midepoch.wrap(source, seed=0) as loader:
        assert taken(loader) == [[0, 1], [2, 3], [4, 5]]
        workers = set(multiprocessing.active_children()) - others
        set_collate(source)
        assert taken(loader) == torch_would(in_order, set_collate)
        assert loader.collate_fn is times
        for each in workers:
            each.join(60)  # torch ends them, and does not wait
            assert not each.is_alive(), "it had the other one"
        with pytest.raises(AttributeError, match="collate_fn of a wrapped loader"):
            set_collate(loader)


def test_a_seed_that_is_set_on_a_sampler_is_refused() -> None:
    loader = midepoch.wrap(distributed())
    list(loader)
    loader.sampler.seed = 5
    for _ in range(2):
        with pytest.raises(UnsupportedSourceError, match=r"seed was 0 .* and is 5 now: .*made with seed=5"):
            next(iter(loader))


def test_the_stand_ins_read_the_samplers_and_tell_the_epoch() -> None:
    loader = midepoch.wrap(mosaic(), seed=0)
    assert (loader.batch_sampler.mosaic, loader.batch_sampler.batch_size) == (True, 3)
    assert loader.batch_sampler.sampler.data_source == range(6)
    loader.batch_sampler.set_epoch(2)
    assert loader.epoch == 2
    loader.sampler.set_epoch(3)
    assert loader.epoch == 3
    with pytest.raises(UnsupportedSourceError, match="rebuilt from the parts"):
        iter(loader.batch_sampler)
    with pytest.raises(TypeError):
        iter(loader.sampler)
    with pytest.raises(AttributeError, match="nothing"):
        loader.batch_sampler.nothing  # noqa: B018
    for other, no in (
        (midepoch.wrap([1, 2]), "list has no sampler"),
        (midepoch.wrap(DataLoader(sources.Stream(4)), shard=True), "IterableDataset has no"),
    ):
        assert callable(other.sampler.set_epoch)
        for act in (lambda other=other: other.sampler.weights, lambda other=other: set_weights(other)):
            with pytest.raises(AttributeError, match=no):
                act()
    for stand_in in (copy.copy(loader.sampler), copy.deepcopy(loader.batch_sampler)):
        assert hasattr(stand_in, "set_epoch")


# --- shard=False leaves a sampler alone that shards by itself ---------------------------------------------------------


class Strided(Sampler[int]):
    """As detectron2's: every rank shuffles alike, and takes its part."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.rank, 100, self.world_size))

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(100).tolist()[self.rank :: self.world_size])


DIVIDING: dict[str, Callable[[int], Any]] = {
    "torch's": lambda rank: DistributedSampler(range(100), 3, rank),  # type: ignore[arg-type]
    "of torch's generator": lambda rank: Strided(rank, 3),
}


def of_rank(name: str, rank: int, batches: bool = False, **keywords: Any) -> midepoch.Loader:
    sampler: Any = DIVIDING[name](rank)
    kind = {"batch_sampler": OwnBatches(sampler, 4, False)} if batches else {"sampler": sampler, "batch_size": 4}
    return midepoch.wrap(DataLoader(range(100), **kind, **keywords), seed=0, shard=False, world=World(rank, 3))  # type: ignore[arg-type]


class OwnBatches(BatchSampler):
    """A user's own."""


@pytest.mark.parametrize(("name", "batches"), [*((name, False) for name in DIVIDING), ("torch's", True)])
def test_each_rank_gets_the_list_of_its_own_sampler(name: str, batches: bool) -> None:
    loaders = [of_rank(name, rank, batches) for rank in range(3)]
    first: list[list[Any]] = []
    for epoch in range(2):
        ranks = [taken(each) for each in loaders]
        first = first or ranks
        assert {index for given in ranks for index in sources.flat(given)} == set(range(100))
        for rank, given in enumerate(map(sources.flat, ranks)):
            sampler = DIVIDING[name](rank)
            sampler.set_epoch(epoch)
            assert len(given) == len(sampler), "33 or 34, as the plain one"
            if "generator" not in name:
                assert given == list(sampler)
    one = loaders[0].capabilities
    assert not one.elastic_world and not one.rank_independent and one.exact_order and one.constant_time_resume
    if batches:
        return
    states = [sources.heads(functools.partial(of_rank, name, rank), 2)[1] for rank in range(3)]
    assert len({state["detail"] for state in states}) == 3, "the CRC of each list"
    for saved in (states, [join_states(states)] * 3):
        for rank in range(3):
            resumed = of_rank(name, rank)
            resumed.load_state_dict(saved[rank])
            assert (resumed.position, resumed.batches_left) == (24, len(first[rank]) - 2)
            assert taken(resumed) == first[rank][2:]
    with pytest.raises(StateMismatchError, match="only the part of rank 1, and this is rank 0 of 3"):
        of_rank(name, 0).load_state_dict(states[1])


def test_a_state_of_another_list_is_refused() -> None:
    _, state = sources.heads(functools.partial(of_rank, "torch's", 0), 2)
    other: Any = DistributedSampler(range(100), 3, 0, seed=1)  # type: ignore[arg-type]
    for sampler, world, words in (
        (Strided(0, 2), World(0, 2), "the world size differs: the state was saved with 3, this loader has 2"),
        (other, None, "the list of epoch 0 differs"),
    ):
        source: Any = DataLoader(range(100), 4, sampler=sampler)  # type: ignore[arg-type]
        with pytest.raises(StateMismatchError, match=words):
            midepoch.wrap(source, seed=0, shard=False, world=world).load_state_dict(state)
