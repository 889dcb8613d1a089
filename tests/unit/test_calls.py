"""The path of a batch is hot: how many calls of Python functions midepoch makes in it."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
from support import sources, wild_sources

OWN = str(Path(midepoch.__file__).parent)


@pytest.fixture(autouse=True, scope="module")
def no_garbage_of_others() -> Iterator[None]:
    """Garbage calls what it has registered when it is collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def no_number_is_kept() -> None:
    """Half of a pair of numpy's normal numbers takes a call to be kept."""
    np.random.seed(0)


def calls_of(action: Callable[[], object], everyones: bool = False) -> Counter[str]:
    """Calls into midepoch's own files, by file and function; or everyone's but the action itself, C's too, by name."""
    counted: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if everyones and event in ("call", "c_call"):
            counted[code.co_name if event == "call" else argument.__name__] += 1
        elif event == "call" and code.co_filename.startswith(OWN):
            counted[f"{Path(code.co_filename).name}:{code.co_name}"] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return counted - Counter({action.__name__: 1, "setprofile": 1})


@pytest.mark.parametrize(("verify", "most"), [("off", 90), ("sample", 141)])
def test_a_steady_batch_takes_few_calls(verify: Any, most: int) -> None:
    loader = midepoch.wrap(DataLoader(sources.Indices(4000), batch_size=4, shuffle=True), seed=1, verify=verify)
    batches = iter(loader)
    first = calls_of(lambda: next(batches))
    sources.taken(batches, 35)
    steady = [calls_of(lambda: next(batches)) for _ in range(25)]
    assert sum(map(Counter.total, steady)) / len(steady) < 12.5, steady[0]
    # Commits, worlds that change and global batches of several steps cost a loader without them nothing.
    files = ("progress.py", "reading.py", "loader.py", "world.py")
    for each in steady:
        assert {name: each[name] for name in each if name.startswith(files)} == {"progress.py:__next__": 1}
    # The summary of what the user's objects hold has a bound of its own, in time: test_summary.
    walk = sum(count for name, count in first.items() if name.startswith(("summary.py", "loop_changes.py")))
    assert first.total() - walk <= most, first


def test_a_state_looks_again_only_where_something_moved() -> None:
    dataset = sources.Indices(4000)
    loader = midepoch.wrap(DataLoader(dataset, batch_size=4), seed=1)
    next(iter(loader))
    loader.state_dict()  # the witness is written once
    counted = calls_of(loader.state_dict)
    assert counted.total() <= 38 and not counted["summary.py:add"], counted
    dataset.size += 1
    assert calls_of(loader.state_dict)["summary.py:add"]
    assert not calls_of(loader.state_dict)["summary.py:add"]


def test_what_the_next_batch_follows_from_is_few_attributes() -> None:
    """Each has one meaning; what they refer to are values, or what says how to read. So no object is a bag of them."""
    loader = midepoch.wrap(DataLoader(sources.Indices(4000), batch_size=4), seed=1)
    for _ in loader.epochs(1):
        next(iter(loader))
        progress = loader._progress
        counted = [len(vars(each)) for each in (progress, progress.reading, progress.body)]
        assert sum(counted) <= 30, counted


@pytest.mark.parametrize(("in_flight", "most"), [(0, 1), (2, 18)])
def test_a_step_at_which_nothing_is_due_is_one_call(tmp_path: Path, in_flight: int, most: int) -> None:
    """It calls nothing, of C's neither, in a body of `epochs`, with `every` and with signals.

    Where something reads ahead, it looks at each loader's pass.
    """
    loader = midepoch.wrap(DataLoader(sources.Indices(4000), batch_size=4), seed=1)
    with midepoch.Snapshot(tmp_path / "snapshot.pt", every=900, data=loader) as snapshot:
        for _ in snapshot.epochs(1):
            for _ in loader:
                counted = calls_of(lambda: snapshot.step(in_flight), everyones=True)
                if snapshot.steps in (1, 2, 900):  # the second one tells how many batches a step takes
                    assert counted["_act"] == 1 and sum(counted.values()) > 5, "it looks whether something is due"
                else:
                    assert counted["step"] >= 1 and sum(counted.values()) <= most, counted
    assert snapshot.steps == 1000


@pytest.mark.parametrize("draw", [lambda: None, random.random, np.random.rand, lambda: torch.rand(())])
def test_then_adds_few_calls_to_a_steady_batch(draw: Callable[[], object]) -> None:
    """What seeding takes is the generators' own, in C."""

    def then(batch: Any) -> Any:
        draw()
        return batch

    def steady(**options: Any) -> Counter[str]:
        loader = midepoch.wrap(DataLoader(sources.Indices(4000), batch_size=4, shuffle=True), seed=1, **options)
        batches = iter(loader)
        sources.taken(batches, 35)
        return calls_of(lambda: [next(batches) for _ in range(25)])

    more = steady(then=then)
    more.subtract(steady())
    added = {name: count / 25 for name, count in more.items() if count}
    assert added["whole_batches.py:take"] == 1
    assert sum(added.values()) <= 10, added


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_a_steady_batch_of_shards_takes_few_calls(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    from support import webdataset_sources

    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "cache"))
    urls = webdataset_sources.make_shards(tmp_path / "shards", [100] * 4)
    shards = urls if kind == "indexed" else webdataset_sources.compress(urls)
    dataset = wds.WebDataset(shards, shardshuffle=9).shuffle(50).batched(4, collation_fn=list)
    batches = iter(midepoch.wrap(dataset, seed=1))
    sources.taken(batches, 10)
    mean = calls_of(lambda: [next(batches) for _ in range(50)]).total() / 50
    # Most of them read a sample's files.
    assert mean <= {"indexed": 245, "streamed": 390}[kind]


SOURCES: dict[str, Callable[[], Any]] = {
    "shuffled": sources.noisy_loader, "a state of its own": sources.Counter, "a list": lambda: [1, 2, 3],
    "with workers": lambda: sources.noisy_loader(num_workers=2, persistent_workers=True),
    "a sampler of somebody's": lambda: DataLoader(sources.Noisy(22), 4, sampler=sources.EverySecond(22)),
    "a batch sampler": lambda: DataLoader(sources.Noisy(22), batch_sampler=sources.Buckets(22)),
    "a sampler without an end": lambda: DataLoader(sources.Noisy(22), 4, sampler=wild_sources.TrainingSampler(22)),
    "a wrapper": lambda: wild_sources.OneAhead(sources.noisy_loader(num_workers=2)),
    "exposed samplers": lambda: sources.Exposing(22), "StatefulIterable": lambda: sources.Inheriting(22),
    "exposed samplers in a loader": lambda: DataLoader(sources.Pairs(22), 4),
    "a stream": lambda: DataLoader(sources.Stream(22), 4), "a generator function": lambda: sources.numbers,
    "a re-iterable": lambda: sources.Restartable(10),
    "a million samples": lambda: DataLoader(sources.Noisy(1_000_000), 4, shuffle=True),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_wrapping_takes_fifty_milliseconds_and_no_thread(name: str) -> None:
    made = [SOURCES[name]() for _ in range(3)]
    before = threading.enumerate()
    took = []
    for source in made:
        since = time.perf_counter()
        midepoch.wrap(source, seed=3)
        took.append(time.perf_counter() - since)
    assert min(took) < 0.05
    assert threading.enumerate() == before
