"""torchdata, Hugging Face datasets, Grain, LitData: carried through the uniform calls, their faults mended or told."""

from __future__ import annotations

import collections
import functools
import importlib.metadata
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import StateError, StateMismatchError, wrap
from midepoch.loader.loader import Loader
from midepoch.testing import ResumableTests, digest
from support import own_state_sources as own
from support import sources
from support.places import TESTS
from support.sources import Counter

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")

def need(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed (pip install midepoch[{package}])")


def made(name: str) -> Callable[..., Loader]:
    need("datasets" if name.startswith("Hugging Face") else name.split()[0].lower())
    make: Callable[..., Loader] = own.WRAPPED[name]
    return make


def taken(loader: Loader, count: int | None = None) -> list[list[int]]:
    return [own.identify(batch) for batch in itertools.islice(iter(loader), count)]


def wrapped(make: Callable[[], Any]) -> Loader:
    source = make()
    return source if isinstance(source, Loader) else wrap(source, seed=1)


# exact order, exact augmentations, constant-time resume, elastic world, elastic workers, rank-independent, skips
TOLD = {
    "torchdata StatefulDataLoader": "yes yes no no no no no",
    "Hugging Face IterableDataset": "yes no yes no no no no",
    "Hugging Face IterableDataset with a shuffle buffer": "yes yes no no no yes no",
    "Grain DataLoader": "yes no yes no no no no",
    "Grain IterDataset": "yes no yes no no no no",
    "LitData StreamingDataLoader": "yes no yes yes yes no no",
}


@pytest.mark.parametrize("name", own.WRAPPED)
def test_capabilities_are_told_truthfully(name: str) -> None:
    told = made(name)().capabilities
    assert " ".join("yes" if answer else "no" for answer in vars(told).values()) == TOLD[name], str(told)


# --- what is said to write instead ---


def drawn_here(batch: Any) -> Any:
    return repr(batch), random.random(), np.random.rand(), float(torch.rand(()))


def grain_drawing() -> Any:
    import grain

    class Noise(grain.transforms.RandomMap):  # type: ignore[misc,unused-ignore]
        def random_map(self, element: Any, rng: np.random.Generator) -> Any:
            return element + rng.random() / 2

    return own.grain_loader(operations=[Noise(), grain.transforms.Batch(own.BATCH)])


def grain_random_map() -> Any:
    import grain

    rows = grain.MapDataset.range(own.SIZE).shuffle(seed=3).seed(5)
    return rows.random_map(lambda number, rng: number + rng.random() / 2).batch(own.BATCH).to_iter_dataset()


def with_noise(row: Any) -> Any:
    return {**row, "noise": random.random()}


def rows_in_workers(kind: Any = DataLoader) -> Any:
    return kind(own.rows(4).map(with_noise), own.BATCH, num_workers=2, multiprocessing_context="fork")


THEN: dict[str, Any] = {"then": drawn_here}
# Which package; what is told; what it says to write; what is passed to `wrap`.
CURES: dict[str, tuple[str, Callable[[], Any], str, Callable[[], Any], dict[str, Any]]] = {
    "Hugging Face, then=": ("datasets", own.datasets_stream, "draw in then=", own.datasets_stream, THEN),
    "Grain DataLoader, then=": ("grain", own.grain_loader, "or in then=", own.grain_loader, THEN),
    "Grain DataLoader, RandomMap": ("grain", own.grain_loader, "RandomMap", grain_drawing, {}),
    "Grain IterDataset, random_map": ("grain", own.grain_dataset, "random_map", grain_random_map, {}),
    "Grain ElasticIterator, then=": ("grain", own.grain_elastic, "or in then=", own.grain_elastic, THEN),
    "LitData, then=": ("litdata", own.litdata_loader, "draw in then=", own.litdata_loader, THEN),
    "workers of a StatefulDataLoader": (
        "datasets", lambda: rows_in_workers(StatefulDataLoader),
        "wrap a DataLoader with shard=False in its place, or draw in then=", rows_in_workers, {"shard": False},
    ),
}


@pytest.mark.parametrize("name", CURES)
def test_what_is_said_to_write_instead_is_exact(name: str) -> None:
    package, told, words, cure, options = CURES[name]
    need(package)
    said = wrap(told(), seed=1).capabilities.exact_augmentations
    assert not said and re.search(words, said.reason)

    sources.every_place(lambda: wrap(cure(), seed=1, **options), (1, 2), epochs=1, read=repr)


# --- tried, not believed ---


@pytest.mark.parametrize("name", own.TOLD)
def test_a_wrong_state_is_told_before_a_resume(name: str) -> None:
    loader = wrap(own.TOLD[name](), seed=own.SEED)
    batches = iter(loader)
    next(batches)
    with pytest.warns(midepoch.MidepochWarning, match="does not restore its (order|random numbers)"):
        state = loader.state_dict()
    promised, rest = loader.capabilities, list(map(digest, batches))
    assert not promised.exact_augmentations
    assert "draw" in name or "generator" in name or not promised.exact_order
    resumed = wrap(own.TOLD[name](), seed=own.SEED)
    resumed.load_state_dict(state)
    random.seed(1)
    assert list(map(digest, resumed)) != rest


class Watched(own.Stream):
    def __init__(self) -> None:
        super().__init__()
        self.asked: collections.Counter[str] = collections.Counter()

    def __getstate__(self) -> dict[str, Any]:
        self.asked["copy"] += 1
        return {**self.__dict__, "asked": collections.Counter()}

    def state_dict(self) -> dict[str, Any]:
        self.asked["state"] += 1
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked["load"] += 1
        super().load_state_dict(state)


@pytest.mark.parametrize(("options", "copies"), [({}, 1), ({"verify": "off"}, 0), ({"randomness": "none"}, 0)])
def test_a_source_is_copied_once_and_asked_for_little(options: dict[str, Any], copies: int) -> None:
    loader = wrap(source := Watched(), **options)
    loader.load_state_dict(loader.state_dict())
    assert not source.asked
    next(iter(loader))
    assert source.asked["state"] == 1  # that of the very beginning
    assert [len(list(loader)) for _ in range(4)] == [own.SIZE] * 4
    assert source.asked["copy"] == copies and not source.asked["load"]


class Silent(own.Stream):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state today")


def test_a_save_does_not_fail_of_the_batch_behind_it() -> None:
    batches = iter(loader := wrap(Counter(bad=1)))
    next(batches)
    state = loader.state_dict()
    assert loader.state_dict() == state and (state["epoch"], state["position"]) == (0, 1)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        next(batches)


class FailsOnce(Counter):
    """An iterator that goes on after an error, at the same place."""

    failed = False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.given == self.count:
            raise StopIteration
        if self.given == 4 and not self.failed:
            self.failed = True
            raise OSError("network")
        self.given += 1
        return self.given


@pytest.mark.parametrize("remember", [0, 1])
def test_a_source_that_survives_its_errors_needs_remember(remember: int) -> None:
    loader = wrap(FailsOnce(), seed=1, remember=remember)
    batches = iter(loader)
    assert list(itertools.islice(batches, 4)) == [1, 2, 3, 4]
    with pytest.raises(OSError, match="network"):
        next(batches)
    if remember:
        assert list(batches) == [5, 6]
        return
    with pytest.raises(StateError, match=r"already past it: .*, or pass remember=1 to midepoch\.wrap"):
        next(batches)


class Drawing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(8):
            yield number + torch.rand(())


class Holding(own.Stream):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


BELIEVED: list[tuple[Callable[[], Any], str]] = [
    (lambda: Holding(threading.Lock()), "cannot be pickled"),
    (lambda: Holding(np.zeros(9 << 20)), "more than 64 MB"),
    (lambda: Holding(lambda: 0), "cannot be pickled"),
    (Silent, "when an epoch is read from its beginning"),
    (lambda: own.torchdata(2), "worker processes"),
]


@pytest.mark.parametrize(("make", "why"), BELIEVED)
def test_what_cannot_be_tried_is_believed_and_says_why(make: Callable[[], Any], why: str) -> None:
    with wrap(make()) as loader:
        assert len(list(loader)) in (own.SIZE, 5)
        answer = loader.capabilities.exact_order
    assert answer.holds and answer.believed and why in answer.reason


def test_batches_that_come_out_of_order_are_not_promised() -> None:
    source = StatefulDataLoader(range(12), 2, num_workers=2, in_order=False)
    order = wrap(source, seed=1).capabilities.exact_order
    assert not order and "in_order=False" in order.reason


def test_nodes_of_torchdata_are_refused_with_what_to_write() -> None:
    """Read again from their start: two epochs, cut everywhere, under other global generators."""
    import torchdata.nodes as parts

    def make_loader() -> Any:
        sampler: Any = torch.utils.data.RandomSampler(range(own.SIZE))
        draws = parts.Mapper(parts.SamplerWrapper(sampler), lambda number: (number, random.random()))
        return parts.Loader(parts.Batcher(draws, own.BATCH, drop_last=False))

    with pytest.raises(midepoch.UnsupportedSourceError, match=r"nodes Loader has no generator.*wrap\(make_loader\)"):
        wrap(make_loader())
    with pytest.warns(midepoch.MidepochWarning, match="read again from its start"):
        given = sources.flat(sources.every_place(lambda: wrap(make_loader, seed=1)))
    assert len(set(given)) == len(given) == 10
    assert not wrap(make_loader, seed=1).capabilities.constant_time_resume


class _Own(ResumableTests):
    identify: ClassVar[Any] = staticmethod(own.identify)
    world_sizes: ClassVar[tuple[int, ...]] = (1,)  # they divide themselves, by what each takes for the world
    quick = True


class TestDatasets(_Own):
    make_loader = staticmethod(own.wrapped_datasets_stream)


class TestLitData(_Own):
    make_loader = staticmethod(own.wrapped_litdata_loader)
    shuffled = True


class _OnRanks(_Own):
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2)


class TestTorchdata(_OnRanks):
    """Each rank has its own state, so another world is refused by name."""

    make_loader = staticmethod(own.wrapped_torchdata_of_rank)
    shuffled = True
    elastic_content = False  # numbers are those of the batch, and of the worker


class TestGrainElastic(_OnRanks):
    make_loader = staticmethod(own.wrapped_grain_elastic)
    shuffled = False  # Grain's order is the same in each epoch
    tail = "drop"
    drop_last = True

    @classmethod
    def setup_class(cls) -> None:
        need("grain")


BEGINNINGS: dict[str, Callable[[], Loader]] = {
    **{name: functools.partial(lambda name: made(name)(), name) for name in own.WRAPPED},
    "Grain ElasticIterator": lambda: grain_elastic(),
    "an object": lambda: wrap(own.Stream()),
    "StatefulDataLoader of a stream": lambda: wrap(own.EXACT["StatefulDataLoader of a stream"](), seed=1),
    "StatefulDataLoader of rows": lambda: wrap(own.rows_inside(buffer=True), seed=1),
    "DataLoader of a stream": lambda: counting(0),
    "DataLoader of a stream, two workers": lambda: counting(2),
}
ONLY_ON = ("LitData", "an object", "StatefulDataLoader of a stream", "DataLoader of a stream")
"""Of these, no state leads to an epoch behind one that was left."""


@pytest.mark.parametrize("name", BEGINNINGS)
def test_an_epoch_behind_one_that_was_left(name: str) -> None:
    """By reading on, in the loader itself, it is reached by all."""
    refused = name.startswith(ONLY_ON) and "two workers" not in name
    with BEGINNINGS[name]() as loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", midepoch.MidepochWarning)
        for epoch in loader.epochs(2):
            if epoch == 1:
                state = loader.state_dict()
                following = taken(loader)
                break
            taken(loader, 2)
        told = [str(each.message) for each in caught if "beginning of epoch 1" in str(each.message)]
    assert (state["epoch"], state["position"]) == (1, 0)
    assert bool(told) == refused and all("Save after a batch" in each for each in told)
    with BEGINNINGS[name]() as resumed:
        if refused:
            before = resumed.state_dict()
            with pytest.raises(StateError, match=r"beginning of epoch 1, .*epoch 0 was not read to its end"):
                resumed.load_state_dict(state)
            assert resumed.state_dict() == before
        else:
            resumed.load_state_dict(state)
            assert taken(resumed) == following


# --- what is elastic by itself stays elastic ---


def grain_elastic(rank: int = 0, world_size: int = 1, *, together: int = 6, size: int = 41) -> Loader:
    need("grain")
    return wrap(own.grain_elastic(rank, world_size, together, size), world=midepoch.World(rank, world_size))


def test_grains_elastic_iterator_made_otherwise() -> None:
    whole, (_, state) = taken(grain_elastic()), sources.heads(grain_elastic, 2)
    assert len(whole) == len(grain_elastic()) == 6  # the last 5 of 41 do not fill a global batch
    loader = grain_elastic()
    loader.seek(position=12)
    assert taken(loader) == whole[2:]
    smaller = grain_elastic(together=4)
    smaller.load_state_dict(state)
    assert sources.flat(taken(smaller)) == sources.flat(whole[2:]) + sources.flat(taken(grain_elastic(together=4)))[36:]
    with pytest.raises(StateError, match=r"size differs.*41.*30"):
        grain_elastic(size=30).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="data differs"):
        wrap(own.grain_elastic(seed=4)).load_state_dict(state)
    wrong = wrap(grain_elastic(0, 2).source, world=midepoch.World(1, 2))
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"shard_index=0.*rank 1 of 2.*shard_index=1"):
        next(iter(wrong))


@pytest.mark.parametrize(("batches", "again"), [(3, 0), (2, 3)])
def test_litdata_goes_on_in_another_world(batches: int, again: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made("LitData StreamingDataLoader")
    size = 54

    def at(rank: int, world_size: int) -> Loader:
        for name, number in (("WORLD_SIZE", world_size), ("GLOBAL_RANK", rank), ("RANK", rank), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(number))
        monkeypatch.setenv("NNODES", "1")
        return wrap(own.litdata_loader(size=size), seed=own.SEED)

    head, states = [], []
    for rank in range(2):
        loader = at(rank, 2)
        head.append(taken(loader, batches))
        states.append(loader.state_dict())
    rest = []
    for rank in range(3):
        loader = at(rank, 3)
        loader.load_state_dict(states[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", midepoch.MidepochWarning)
            rest.append(taken(loader))
        told = [str(each.message) for each in caught if "come again" in str(each.message)]
        assert len(told) == (again > 0 and rank == 0) and all(f"the last {again} samples" in each for each in told)
    given = collections.Counter(sources.flat(sources.flat(head + rest)))
    assert set(given) == set(range(size)) and given.total() == size + again
    assert not [each for part in rest for each in part if len(each) != own.BATCH]
    monkeypatch.setenv("WORLD_SIZE", "1")
    alone = wrap(own.litdata_loader(size=size), world=midepoch.World(1, 2))
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"rank \d of \d, and midepoch for rank 1 of 2"):
        next(iter(alone))


def test_litdatas_settings_are_compared_at_the_load() -> None:
    """LitData compares it when the first batch is read."""
    made("LitData StreamingDataLoader")
    import litdata

    def make(**options: Any) -> Loader:
        settings = {"shuffle": True, "seed": 1, "drop_last": True, **options}
        dataset = litdata.StreamingDataset(own.written_by_litdata(own.SIZE), **settings)
        return wrap(litdata.StreamingDataLoader(dataset, batch_size=2), seed=1)

    state = sources.heads(make, 2)[1]
    for name, value in (("shuffle", False), ("seed", 2), ("drop_last", False)):
        with pytest.raises(StateError, match=rf"{name} differs: .*this StreamingDataset has {value}.*{name}="):
            make(**{name: value}).load_state_dict(state)
    make().load_state_dict(state)


# --- what a state leads to ---


class Skips(Counter):
    """Loads its state by reading up to its place."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        numbers = iter(range(self.count))
        for _ in range(state["given"]):
            next(numbers)
        super().load_state_dict(state)


class SkipsInALoader(Skips, IterableDataset[Any]):
    pass


@pytest.mark.parametrize(
    "made_of",
    [Skips, lambda size: DataLoader(SkipsInALoader(size), 4), lambda size: StatefulDataLoader(SkipsInALoader(size), 4)],
)
def test_a_state_beyond_the_end_of_a_source_is_refused(made_of: Any) -> None:
    state = sources.heads(lambda: wrap(made_of(40)), 6)[1]
    assert len(sources.resumed(lambda: wrap(made_of(40)), state)) == len(list(wrap(made_of(40)))) - 6
    with pytest.raises(StateError, match=r"refused its own state \(StopIteration"):
        sources.resumed(lambda: wrap(made_of(3)), state)


# --- streams in a DataLoader ---


class Plain(IterableDataset[Any]):
    """Numbers from its place on, which is its state."""

    size = 60

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.size:
            self.place += 1
            yield self.sample(self.place)
        self.place = 0

    def sample(self, number: int) -> Any:
        return number

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Counting(Plain):
    """Numbers from its place on, divided among workers; it draws, and says its place."""

    def __init__(self, size: int = 20, held: int = 0) -> None:
        super().__init__()
        self.size, self.held = size, held

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        own, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while (number := self.place * workers + own) < self.size:
            self.place += 1
            yield torch.tensor([number, random.random(), np.random.rand(), torch.rand(())])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "held": list(np.random.RandomState(0).bytes(self.held))}


def counting(workers: int, kind: Any = Counting, batch_size: int | None = 3, **options: Any) -> Loader:
    source = DataLoader(kind(**options), batch_size, num_workers=workers)
    return wrap(source, seed=1, shard=False if workers > 1 else None)


class IsTold(Plain):
    """Its order follows from the epoch that it is told. What it knows of the epoch is not in its state."""

    size, epoch = own.SIZE, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample(self, number: int) -> Any:
        return int(np.random.RandomState(self.epoch).permutation(self.size)[number - 1])


@pytest.mark.parametrize(("kind", "said"), [(DataLoader, 1), (StatefulDataLoader, 0)])
def test_a_state_in_workers_is_a_replay_that_names_the_cure(kind: Any, said: int) -> None:
    def make() -> Loader:
        return wrap(kind(Counting(), 3, num_workers=1), seed=1)

    given, state = sources.heads(make, 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        given += sources.resumed(make, state)
    assert [sample[0] for sample in sources.flat(given)] == list(range(20))
    cure = "torchdata's StatefulDataLoader in place of the DataLoader carries it, without random numbers"
    assert [cure in str(each.message) for each in told if each.category is midepoch.MidepochWarning] == [True] * said


def test_a_state_of_another_version_of_a_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which version is installed is said to be another one; `make wild` has a real one, below."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0.9.7")
        state = sources.heads(own.wrapped_torchdata, 2)[1]
    with pytest.warns(midepoch.MidepochWarning, match=r"saved with 'torchdata 0\.9\.7', and 'torchdata 0\.11\.0' is"):
        own.wrapped_torchdata().load_state_dict(state)


OLDER = Path(sys.prefix) / "wild" / "torchdata_010"


@pytest.mark.skipif(not OLDER.is_dir(), reason="torchdata 0.10.1 is installed by make wild, which runs this test")
def test_states_of_an_older_torchdata_are_refused_or_told(tmp_path: Path) -> None:
    """It takes them for other places, and gives more than was left."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from support import own_state_sources as own\n"
        "loader = own.wrapped_torchdata(); batches = iter(loader); next(batches), next(batches)\n"
        "print(json.dumps(loader.state_dict()))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(TESTS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OLDER), *sys.path])}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    loader = own.wrapped_torchdata()
    versions = r"'torchdata 0\.10\.1', and 'torchdata 0\.11\.0' is installed"
    with pytest.warns(midepoch.MidepochWarning, match=versions):
        loader.load_state_dict(json.loads(said))
    with pytest.raises(midepoch.SourceError, match=r"more|continues after the 3 batches"):
        taken(loader)


class _Pins:
    """A batch that knows whether it was put into pinned memory."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.is_pinned = numbers, False

    def pin_memory(self) -> _Pins:
        self.is_pinned = True
        return self


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_stream_s_batches_are_pinned_where_there_is_a_device(
    batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for pins in (True, False):
        loader = wrap(DataLoader(IsTold(), batch_size, collate_fn=_Pins, pin_memory=pins), seed=1)
        assert [batch.is_pinned for batch in loader] == [pins] * len(list(loader))


def test_an_iterator_of_grain_s_is_refused_with_the_cure() -> None:
    need("grain")
    iterator = iter(own.grain_dataset())
    with pytest.raises(midepoch.UnsupportedSourceError, match="goes through its data once: wrap the dataset"):
        wrap(iterator)


def test_a_grain_source_known_by_its_address_is_refused() -> None:
    need("grain")
    told = r"the Indices by its repr\(\).*give the Indices a __repr__"
    with pytest.raises(midepoch.UnsupportedSourceError, match=told):
        wrap(own.grain_loader(rows=sources.Indices(own.SIZE)))
    make = functools.partial(own.grain_loader, rows=range(own.SIZE))
    assert len(sources.every_place(lambda: wrap(make()), epochs=1)[0]) == 5


# --- the epoch ---


def test_a_source_that_cannot_be_told_the_epoch_says_so() -> None:
    loader = wrap(own.Stream())
    loader.set_epoch(2)
    with pytest.warns(midepoch.MidepochWarning, match="epoch 2 is the next pass of this Stream, whatever its number"):
        next(iter(loader))


# --- several ranks ---


class OfRank0(own.Stream):
    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world_size = 0, 2


def of_node_0() -> Any:
    distributed = pytest.importorskip("datasets.distributed")
    return distributed.split_dataset_by_node(own.datasets_stream(), 0, 2)


def with_sampler(sampler: Any) -> Any:
    return StatefulDataLoader(range(own.SIZE), 2, sampler=sampler)


# Read whole, and divided.
SEVERAL: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "an object": (own.Stream, OfRank0),
    "Hugging Face": (own.datasets_stream, of_node_0),
    "StatefulDataLoader": (
        lambda: with_sampler(own.EpochOrder()),
        lambda: with_sampler(DistributedSampler(sources.Noisy(own.SIZE), 2, 0)),
    ),
    "Grain": (
        own.grain_dataset,
        lambda: pytest.importorskip("grain").MapDataset.range(own.SIZE)[0::2].batch(2).to_iter_dataset(),
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_source_that_ranks_read_whole_is_told(name: str) -> None:
    two, (whole, divided) = midepoch.World(0, 2), SEVERAL[name]
    with pytest.warns(midepoch.MidepochWarning, match=r"2 ranks read this .* each rank reads all of it.*shard=False"):
        next(iter(wrap(whole(), world=two)))
    with warnings.catch_warnings(action="error", category=midepoch.MidepochWarning):
        next(iter(wrap(divided(), world=two)))
        next(iter(wrap(whole(), world=two, shard=False)))
        next(iter(wrap(whole(), world=midepoch.World(1, 2))))  # the first rank says it for all


class DrawsSeldom(Counting):
    def __iter__(self) -> Iterator[Any]:
        while self.place < self.size:
            self.place += 1
            number = self.place - 1
            yield torch.tensor([number, random.random() if number > 9 and number % 2 else 0.5])
        self.place = 0


class EndsOnceMore(Counter, IterableDataset[Any]):
    """From the state of its end it gives an empty pass, as torchdata's tests have it. It may draw for one number."""

    def __init__(self, draws_at: int = 0) -> None:
        super().__init__(10)
        self.draws_at = draws_at

    def __iter__(self) -> Iterator[Any]:
        self.given = self.given if self.resumes else 0
        self.resumes = False
        while self.given < self.count:
            self.given += 1
            yield self.given + (random.random() if self.given == self.draws_at else 0.0)


class Blocks:
    """A sampler that shuffles blocks of five indices when it reaches them, but not the first one."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        for start in range(0, 20, 5):
            yield from (start + number for number in (torch.randperm(5).tolist() if start else range(5)))


class AtOnce:
    """A sampler that draws its order when it is asked for an iterator, from a generator of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.numbers, self.generator = np.random.default_rng(3), torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        if self.kind == "numpy":
            return iter(self.numbers.permutation(20).tolist())
        return iter(torch.randperm(20, generator=self.generator if self.kind == "torch" else None).tolist())


# --- every place ------------------------------------------------------------------------------------------------------


def of_sampler(form: str, make: Callable[[], Any]) -> Any:
    sampler = make()
    if form == "in batches":
        return StatefulDataLoader(range(20), batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False))
    return StatefulDataLoader(range(20), None if form == "one by one" else 2, sampler=sampler)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "that draws within an epoch": Blocks,
    **{f"that draws at once, {kind}": functools.partial(AtOnce, kind) for kind in ("numpy", "torch", "global")},
    "that is told the epoch": lambda: DistributedSampler(sources.Noisy(20), 1, 0, seed=3),
}
TOLD_THE_EPOCH: dict[str, Callable[[], Any]] = {
    "told the epoch": IsTold,
    "told the epoch, DataLoader": lambda: DataLoader(IsTold(), 2),
    "told the epoch, DataLoader, a worker": lambda: DataLoader(IsTold(), 2, num_workers=1),
    "told the epoch, StatefulDataLoader": lambda: StatefulDataLoader(IsTold(), 2),
    "told the epoch, StatefulDataLoader, workers": lambda: StatefulDataLoader(IsTold(), 2, num_workers=1),
    "rows, DataLoader, replayed": lambda: DataLoader(own.rows(buffer=5), 2),
    "rows, DataLoader, a worker, replayed": lambda: DataLoader(own.rows(buffer=5), 2, num_workers=1),
}
PLACES: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(lambda name: made(name)(), name) for name in own.WRAPPED},
    **own.EXACT,
    **{f"sampler {name}, {form}": functools.partial(of_sampler, form, make)
       for name, make in SAMPLERS.items() for form in ("by itself", "one by one", "in batches")},
    **TOLD_THE_EPOCH,
    "rows with a buffer, StatefulDataLoader, workers": lambda: own.rows_inside(buffer=True, num_workers=2),
    "samples that draw, StatefulDataLoader": lambda: StatefulDataLoader(sources.Noisy(14), 3, shuffle=True),
    "kept worker, StatefulDataLoader, workers": lambda: StatefulDataLoader(
        range(8), 2, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "a stream without a state, StatefulDataLoader": lambda: StatefulDataLoader(Drawing(), 4),
    "a stream that draws seldom, StatefulDataLoader": lambda: StatefulDataLoader(DrawsSeldom(), 2),
    "a stream that draws seldom, DataLoader": lambda: DataLoader(DrawsSeldom(), 2),
    "a stream, DataLoader": lambda: counting(0),
    "a stream, DataLoader, one by one": lambda: counting(0, batch_size=None),
    "a stream, DataLoader, a worker": lambda: counting(1),
    "a stream with a large state, DataLoader, two workers": lambda: counting(2, held=9000),
    "ends once more": EndsOnceMore,
    "ends once more, DataLoader": lambda: DataLoader(EndsOnceMore(), 4),
    "ends once more, DataLoader of whole batches": lambda: DataLoader(EndsOnceMore(), 5),
    "ends once more, DataLoader, a worker": lambda: DataLoader(EndsOnceMore(), 4, num_workers=1),
    "ends once more, and draws late, DataLoader": lambda: DataLoader(EndsOnceMore(7), 2),
}
BELIEVED_PLACES = r".*StatefulDataLoader, workers|Grain DataLoader"


DIES: dict[str, Callable[[], Any]] = {
    "without a state": lambda: StatefulDataLoader(Drawing(), 2),
    "without a state, a worker": lambda: StatefulDataLoader(Drawing(), 2, num_workers=1),
    "a chain without a state": lambda: StatefulDataLoader(torch.utils.data.ChainDataset([Drawing(), Drawing()]), 2),
    "right by itself": own.Stream,
}


@pytest.mark.parametrize("name", DIES)
def test_a_job_that_dies_after_each_batch_loses_nothing(name: str) -> None:
    read: Callable[[Any], Any] = own.identify if "worker" in name else digest  # a worker's numbers are not promised
    with wrapped(DIES[name]) as loader:
        epochs = [list(map(read, loader)) for _ in range(2)]
    whole, got, state = [*epochs[0], *epochs[1]], list[Any](), None
    while len(got) < len(whole):
        with wrapped(DIES[name]) as resumed:
            if state is not None:
                resumed.load_state_dict(state)
            batches = iter(resumed)
            got.append(read(next(batches)))
            if len(got) == len(epochs[0]):
                assert next(batches, None) is None  # it is told that the epoch has ended
            state = resumed.state_dict()
    assert got == whole


AROUND_ENDS = (1, 4, 5, 6, 7, 8, 10, 11, 14, 15, 20, 21)
"""Places at the beginning, and around the end of an epoch of 5, 7, 10, 14 or 20 batches."""


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.filterwarnings("error::midepoch.MidepochWarning", "ignore:.*is read again from its start")
def test_every_place_of_two_epochs_is_continued_from(name: str) -> None:
    """Without a word: what is promised is so."""
    cuts = (1, 3, 4) if "worker" in name else AROUND_ENDS
    given = sources.flat(sources.every_place(lambda: wrapped(PLACES[name]), cuts))
    assert len(set(given)) > 1
    with wrapped(PLACES[name]) as loader:
        list(loader)
        order = loader.capabilities.exact_order
    assert order and ("read again" in order.reason or order.believed == bool(re.match(BELIEVED_PLACES, name))), order


@pytest.mark.parametrize("name", TOLD_THE_EPOCH)
def test_a_source_is_told_the_epoch(name: str) -> None:
    with wrapped(TOLD_THE_EPOCH[name]) as loader:
        epochs = [taken(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    with wrapped(TOLD_THE_EPOCH[name]) as fresh:
        fresh.set_epoch(2)
        assert taken(fresh) == epochs[2]


@pytest.mark.parametrize("name", ["StatefulDataLoader of a stream", "right by itself"])
def test_a_used_source_goes_back_to_its_very_beginning(name: str) -> None:
    loader = wrapped(own.EXACT[name])
    beginning = loader.state_dict()
    whole = [digest(batch) for _ in range(2) for batch in loader]
    for _ in range(2):
        loader.load_state_dict(beginning)
        assert [digest(batch) for _ in range(2) for batch in loader] == whole
    resumed = wrapped(own.EXACT[name])
    resumed.load_state_dict(sources.heads(lambda: wrapped(own.EXACT[name]), 1)[1])
    next(iter(resumed))
    resumed.load_state_dict(beginning)
    assert [digest(batch) for _ in range(2) for batch in resumed] == whole


# --- what follows from the rank and the worker ---


def test_ranks_that_read_whole_draw_each_its_own() -> None:
    def make(rank: int) -> Loader:
        return wrap(StatefulDataLoader(Drawing(), 2), seed=1, shard=False, world=midepoch.World(rank, 2))

    epochs = [sources.every_place(functools.partial(make, rank), (2,), epochs=1) for rank in range(2)]
    assert epochs[0] != epochs[1]


class DrawsFirst(Counting):
    def __iter__(self) -> Iterator[Any]:
        drawn = random.random()
        return (torch.tensor([each[0], drawn]) for each in super().__iter__())


def test_workers_begin_under_streams_of_their_own() -> None:
    with counting(2, DrawsFirst, None) as loader:
        assert len({float(sample[1]) for sample in loader}) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_that_nobody_knew_of_are_refused_when_read(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = counting(workers)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"read by 2 ranks.* pass shard=.* or shard="):
        next(iter(loader))


# --- loads that draw ---


class RereadsLate(Plain):
    """From its eighth sample on it holds one back, of which its state says the index alone: a load reads it again."""

    size = 24

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = None

    def __iter__(self) -> Iterator[Any]:
        for read in super().__iter__():
            given, self.held = (read, None) if self.place < 8 else (self.held, read)
            if given is not None:
                yield given

    def sample(self, number: int) -> Any:
        return torch.tensor([number, torch.rand(())])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.held = None if self.place < 8 else self.sample(self.place)


def test_a_load_that_draws_late_is_told_at_the_resume() -> None:
    """The trial before the first save cannot see it. What it draws follows from the state alone, and moves nobody."""

    def make() -> Loader:
        return wrap(DataLoader(RereadsLate(), batch_size=None), seed=0)

    loader = make()
    batches = iter(loader)
    list(itertools.islice(batches, 12))
    state, following = loader.state_dict(), next(batches)
    firsts = []
    for seed in (3, 4):
        again = make()
        again.load_state_dict(state)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with pytest.warns(midepoch.MidepochWarning, match=r"put the samples themselves into the state"):
            firsts.append(next(iter(again)))
        assert torch.equal(torch.get_rng_state(), before)
        assert again.capabilities.exact_order and not again.capabilities.exact_augmentations
    assert torch.equal(*firsts) and firsts[0][0] == following[0]


class SaysMore(Counter):
    def __len__(self) -> int:
        return 9


def test_a_source_that_ends_before_its_len_is_refused() -> None:
    with pytest.raises(midepoch.SourceError, match=r"after 6 of the 9 batches .*lambda: iter"):
        list(wrap(SaysMore()))
    assert len(list(wrap(lambda: iter(SaysMore())))) == 6, "as the message says"


def test_random_numbers_are_believed_where_no_load_was_tried() -> None:
    for collate, believed in ((None, False), (lambda batch: batch, True)):  # a lambda cannot be pickled
        loader = midepoch.wrap(DataLoader(IsTold(), 2, collate_fn=collate), seed=0)
        assert len(list(loader)) == 7
        answer = loader.capabilities.exact_augmentations
        assert answer and (answer.believed, "no load of a state draws" in answer.reason) == (believed, believed)


# --- grain's own test of checkpoints ---


class _Iterating:
    """An iterator with grain's two methods over a wrapped loader."""

    def __init__(self, loader: Loader) -> None:
        self.batches, self.get_state, self.set_state = iter(loader), loader.state_dict, loader.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.batches)


class _Iterated:
    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> _Iterating:
        return _Iterating(wrap(self.source()))


GRAINS: dict[str, Callable[[], Any]] = {
    "by index": lambda: DataLoader(sources.Noisy(own.SIZE), own.BATCH, shuffle=True, collate_fn=np.stack),
    "replayed": lambda: lambda: map(np.float64, range(5)),
    "its own state": own.grain_dataset,
}


@pytest.mark.parametrize("name", GRAINS)
def test_grains_own_test_of_checkpoints_passes(name: str) -> None:
    need("grain")
    from grain._src.python.testing.experimental import assert_equal_output_after_checkpoint

    assert_equal_output_after_checkpoint(_Iterated(GRAINS[name]))
