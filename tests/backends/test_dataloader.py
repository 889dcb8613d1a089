"""torch's DataLoader, with all of its settings, resumed in the middle of an epoch."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import MidepochError, MidepochWarning, ResumableSampler, SourceError, StateError, World
from midepoch import UnsupportedSourceError as Unsupported
from midepoch.loader.loader import Loader
from support import sources, wild_sources

SIZE = 22


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("data", [sources.Noisy(SIZE), sources.Stream(SIZE)], ids=["indexed", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_of_a_loader_is_refused(kind: Any, data: Any, workers: int) -> None:
    iterator = iter(kind(data, 4, num_workers=workers))
    with pytest.raises(Unsupported, match=f"{type(iterator).__name__}.*wrap the DataLoader itself"):
        midepoch.wrap(iterator, seed=0)


def test_an_iterator_of_a_wrapped_loader_is_refused() -> None:
    loader = midepoch.wrap(DataLoader(sources.Noisy(SIZE), 4), seed=0)
    with pytest.raises(Unsupported, match="iterate the wrapped loader itself"):
        midepoch.wrap(iter(loader))
    assert midepoch.wrap(loader) is loader


def of_the_design() -> Any:
    torch.manual_seed(0)
    return sources.RandomIterableDataset(3, 20)


NOISY, FETCHED = sources.Noisy(SIZE), sources.Fetched(SIZE)
# Samplers and batch samplers of every kind are in test_transparent.
LOADERS: dict[str, Callable[[], Any]] = {
    "the class of the design": of_the_design,
    "the class of the design in a loader": lambda: DataLoader(of_the_design(), 4),
    "the class of the design in workers": lambda: DataLoader(of_the_design(), 3, num_workers=2),
    "shuffled": sources.noisy_loader,
    "batch sampler": lambda: DataLoader(NOISY, batch_sampler=BatchSampler(sources.EverySecond(SIZE), 5, False)),
    "resumable sampler": lambda: DataLoader(NOISY, 4, sampler=ResumableSampler(SIZE, seed=3)),
    "collate": lambda: sources.noisy_loader(collate_fn=sources.noisy_collate),
    "getitems": lambda: DataLoader(FETCHED, 4, True),
    "tensors": lambda: DataLoader(torch.utils.data.TensorDataset(torch.arange(SIZE)), 4, True),
    "list": lambda: DataLoader(list(range(SIZE)), 4, True),  # type: ignore[arg-type]
    "pinned": lambda: sources.noisy_loader(pin_memory=True),
    "workers": lambda: sources.noisy_loader(num_workers=2, prefetch_factor=3),
    "one worker, pinned": lambda: DataLoader(
        NOISY, batch_sampler=sources.Buckets(SIZE), num_workers=1, pin_memory=True
    ),
    "persistent workers": lambda: sources.noisy_loader(num_workers=2, persistent_workers=True, timeout=60),
    "getitems in workers": lambda: DataLoader(FETCHED, 4, True, num_workers=2, collate_fn=sources.noisy_collate),
}


def wrapped(name: str, **keywords: Any) -> Loader:
    return midepoch.wrap(LOADERS[name](), **{"seed": 5, **keywords})


def missing(loader: Loader) -> list[str]:
    return [name for name, promise in vars(loader.capabilities).items() if not promise]


@pytest.mark.parametrize("name", LOADERS)
def test_every_setting_resumes_exactly(name: str) -> None:
    make = functools.partial(wrapped, name)
    first, _ = sources.every_place(make, (0, 2, 3) if "worker" in name else ())
    assert len(make()) == len(first)
    assert missing(make()) == (["skips"] if "design" in name else [])


def test_workers_that_are_spawned_give_the_same() -> None:
    whole = sources.taken(wrapped("shuffled"))
    source = sources.noisy_loader(SIZE, num_workers=1, multiprocessing_context="spawn", persistent_workers=True)
    with midepoch.wrap(source, seed=5) as loader:
        assert sources.taken(loader, 2) == whole[:2]
        loader.load_state_dict({**wrapped("shuffled").state_dict()})
        assert sources.taken(loader) == whole


def test_worker_init_fn_sees_the_user_s_dataset() -> None:
    settings: dict[str, Any] = {"num_workers": 2, "worker_init_fn": sources.tell_the_dataset, "collate_fn": list}
    for dataset, expected in ((sources.Configured(6), [[index, 7] for index in range(6)]), (Told(6), [7] * 6)):
        with midepoch.wrap(DataLoader(dataset, 2, **settings), seed=5) as loader:
            assert sources.flat(sources.taken(loader)) == expected


class Told(sources.Exposing):
    told = -1

    def __next__(self) -> Any:
        super().__next__()
        return self.told


class WorkerSeed(sources.Indices):
    def __getitem__(self, index: int) -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return info.id, info.seed


def test_the_seeds_of_workers_repeat_themselves() -> None:
    source = DataLoader(WorkerSeed(4), batch_size=2, num_workers=2, collate_fn=list)
    with midepoch.wrap(source, seed=5) as first, midepoch.wrap(source, seed=5) as second:
        seeds = sources.taken(first)
        assert sources.taken(second) == seeds
        assert sources.taken(first) != seeds  # another epoch


# --- several ranks ---


def test_with_shard_false_each_rank_reads_and_draws_its_own() -> None:
    def make(rank: int, shuffle: bool = True) -> Loader:
        source = DataLoader(sources.Noisy(SIZE), 4, shuffle=shuffle)
        return midepoch.wrap(source, seed=5, shard=False, world=World(rank, 2))

    epochs = [sources.every_place(functools.partial(make, rank)) for rank in range(2)]
    assert epochs[0] != epochs[1] and [len(epoch) for rank in epochs for epoch in rank] == [6] * 4
    first = [sources.flat(sources.taken(make(rank, shuffle=False))) for rank in range(2)]
    for one, other in zip(*first, strict=True):
        assert one[0] == other[0] and one[1:] != other[1:]


class FailsAtTheEnd(sources.EverySecond):
    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)
        raise OSError("the list is cut off")


def test_a_list_of_a_rank_that_fails_gives_its_full_batches() -> None:
    source = DataLoader(sources.Indices(10), 4, sampler=FailsAtTheEnd(10))
    batches = iter(midepoch.wrap(source, seed=5, shard=False, world=World(1, 2)))
    assert [sources.plain(next(batches)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(OSError, match="cut off"):
        next(batches)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_sample_that_fills_an_epoch_up_is_the_first_again(batch_size: int | None) -> None:
    one, other = (midepoch.wrap(DataLoader(sources.Noisy(3), batch_size), seed=5, world=World(r, 2)) for r in range(2))
    firsts, seconds = (list(map(torch.atleast_2d, loader)) for loader in (one, other))
    assert torch.equal(torch.cat(seconds)[1], torch.cat(firsts)[0])


def test_a_distributed_sampler_of_another_world_is_refused() -> None:
    sampler: Sampler[int] = DistributedSampler(sources.Indices(SIZE), 2, 0)
    loader = midepoch.wrap(DataLoader(sources.Noisy(SIZE), batch_size=4, sampler=sampler), world=World(0, 3))
    with pytest.raises(MidepochError, match=r"0 of 2.*0 of 3"):
        len(loader)


# --- ResumableSampler ---


def test_a_resumable_sampler_alone() -> None:
    """In place of RandomSampler, with a state after any index."""

    def make(**keywords: Any) -> ResumableSampler:
        return ResumableSampler(700, seed=3, **keywords)

    sampler = make()
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(700)) and first != second and len(sampler) == 700
    for cut in (0, 1, 511, 512, 513, 699, 700):
        running = make()
        indices = iter(running)
        assert list(itertools.islice(indices, cut)) == first[:cut]
        state = running.state_dict()
        assert (state["epoch"], state["position"]) == ((0, cut) if cut < 700 else (1, 0))
        fresh = make()
        fresh.load_state_dict(state)
        assert list(fresh) == (first[cut:] if cut < 700 else second)
        running.load_state_dict(state)
        if cut < 700:
            assert list(indices) == first[cut:], "a pass that runs goes on from the state"
    assert list(ResumableSampler(5, shuffle=False)) == [0, 1, 2, 3, 4]


def test_resumable_samplers_share_the_indices() -> None:
    for drop_last in (False, True):
        options: dict[str, Any] = {"batch_size": 4, "drop_last": drop_last, "shuffle": False}
        ranks = [ResumableSampler(23, world=World(rank, 2), **options) for rank in range(2)]
        given = [list(sampler) for sampler in ranks]
        assert [len(sampler) for sampler in ranks] == [len(each) for each in given]
        assert given[0][:8] == [0, 1, 2, 3, 8, 9, 10, 11]
        assert Counter(sources.flat(given)) == Counter(range(22) if drop_last else [*range(23), 0])
        assert ranks[0].state_dict() == ranks[1].state_dict()


def test_a_resumable_sampler_checks_its_arguments() -> None:
    for wrong in ({"seed": -1}, {"seed": 1.5}, {"batch_size": 0}, {"size": -1}, {"shuffle": 7}):
        with pytest.raises((ValueError, TypeError)):
            ResumableSampler(**{"size": 5, **wrong})  # type: ignore[arg-type]


# --- iterable datasets that expose samplers ---


def test_a_subclass_in_a_loader() -> None:
    """Unwrapped without workers it knows where it stands; with workers it refuses, and says what to do."""
    torch.manual_seed(4)
    dataset = sources.Inheriting(12)
    unwrapped = iter(DataLoader(dataset, batch_size=4))
    next(unwrapped)
    assert dataset.state_dict()["position"] == 4

    def make(workers: int) -> Loader:
        torch.manual_seed(4)
        return midepoch.wrap(DataLoader(sources.Inheriting(12), batch_size=4, num_workers=workers), seed=5)

    whole = sources.taken(make(0))
    state = sources.heads(functools.partial(make, 2), 1)[1]
    assert sources.resumed(functools.partial(make, 1), state) == whole[1:]
    with pytest.raises(StateError, match=r"use wrap\(DataLoader\(dataset\)\)"):
        next(iter(DataLoader(sources.Inheriting(12), num_workers=1)))


# --- what goes wrong ---


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("deadly", [False, True], ids=["raises", "is killed"])
def test_a_worker_that_raises_or_is_killed(persistent: bool, deadly: bool, tmp_path: Path) -> None:
    """The error reaches the loop, the state is that of the last batch received, and it resumes: here and elsewhere."""
    marker = tmp_path / "failing"
    marker.touch()
    whole = sources.taken(wrapped("shuffled"))
    index = int(whole[3][0][0])
    dataset = sources.Failing(SIZE, [index], marker, deadly)
    source = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, persistent_workers=persistent)
    with midepoch.wrap(source, seed=5, on_error="retry") as loader:
        batches, got, state = iter(loader), [], loader.state_dict()
        words = "exited unexpectedly|killed" if deadly else f"sample {index} cannot be read"
        with pytest.raises(RuntimeError, match=words) as failure:
            for batch in batches:
                got.append(sources.plain(batch))
                state = loader.state_dict()
        assert isinstance(failure.value, SourceError) == deadly
        assert loader.state_dict() == state and state["position"] == 4 * len(got)
        assert got == whole[: len(got)] and (len(got) == 3 or deadly)
        marker.unlink()
        assert sources.resumed(functools.partial(wrapped, "shuffled"), state) == whole[len(got) :]
        assert [sources.plain(batch) for batch in batches] == whole[len(got) :]


def test_a_sampler_that_does_not_repeat_itself_is_named() -> None:
    source = DataLoader(sources.Indices(8), batch_size=2, sampler=sources.Forgetful(8))
    with pytest.raises(SourceError, match="Forgetful does not repeat itself"):
        next(iter(midepoch.wrap(source, seed=5)))


class ByAttribute(Sampler[int]):
    """Shuffles by numbers that the training loop sets."""

    set_epoch = None

    def __init__(self, salt: int = 0) -> None:
        self.epoch, self.salt = 0, salt

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.salt + self.epoch).sample(range(12), 12))

    def __len__(self) -> int:
        return 12


def weighted(salt: int = 0) -> Sampler[int]:
    return torch.utils.data.WeightedRandomSampler([1.0, 2.0, 3.0 + salt], 12)


@pytest.mark.parametrize("make", [ByAttribute, weighted])
def test_a_sampler_that_differs_is_told_at_the_beginning(make: Callable[..., Any]) -> None:
    def loader(salt: int = 0) -> Loader:
        return midepoch.wrap(DataLoader(range(12), 4, sampler=make(salt)), seed=0)  # type: ignore[arg-type]

    ended = loader()
    list(ended)
    state, following = ended.state_dict(), sources.taken(ended)
    assert (state["epoch"], state["position"]) == (1, 0)
    with warnings.catch_warnings(action="error", category=MidepochWarning):
        assert sources.resumed(loader, state) == following
    with pytest.warns(MidepochWarning, match="the list of epoch 0 differs.*differs between processes"):
        loader(1).load_state_dict(state)


class Drawing(IterableDataset[Any]):
    """Draws its order, and a number for each sample, from the global generators of its worker."""

    def __iter__(self) -> Iterator[Any]:
        return ((index, random.random()) for index in random.sample(range(12), 12))


@pytest.mark.parametrize("kind", ["indexed", "stream", "stateful", "around"])
def test_workers_kept_before_the_wrap_are_ended(kind: str) -> None:
    def passes(early: bool) -> list[Any]:
        data: Any = sources.Noisy(12) if kind in ("indexed", "around") else Drawing()
        settings: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
        source: Any = (StatefulDataLoader if kind == "stateful" else DataLoader)(data, 3, **settings)
        workers = []
        if early:
            next(iter(source))
            workers = [psutil.Process(worker.pid) for worker in source._iterator._workers]
        shard = None if kind in ("indexed", "around") else False
        inside = "loader" if kind == "around" else None
        source = wild_sources.OnDevice(source) if inside else source
        with midepoch.wrap(source, seed=0, shard=shard, inside=inside) as loader:
            assert not psutil.wait_procs(workers, timeout=60)[1]  # torch waits for them 5 seconds, and ends them
            return [sources.taken(loader) for _ in range(2)]

    assert passes(True) == passes(False)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_dict_of_torchs_own_dataloader_is_not_used(
    workers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As pytorch#166732 proposes."""

    def make() -> Any:
        return midepoch.wrap(sources.noisy_loader(12, num_workers=workers), seed=1)

    whole = [sources.plain(batch) for batch in make()]
    calls: list[Any] = []
    for name in ("state_dict", "load_state_dict"):
        monkeypatch.setattr(DataLoader, name, lambda *arguments: calls.append(arguments), raising=False)
    with caplog.at_level("INFO", logger="midepoch"):
        loader = make()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "DataLoader has a state_dict of its own, which is not used: midepoch's also fits" in caplog.text
    head = sources.taken(loader, 1)
    assert head + sources.resumed(make, loader.state_dict()) == whole
    assert calls == []
