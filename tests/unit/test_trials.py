"""What a job tries of users' code, once, on a copy; and what only `midepoch check` finds."""

from __future__ import annotations

import collections
import functools
import queue
import random
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import midepoch
from midepoch import MidepochWarning
from midepoch.loader.loader import Loader
from midepoch.testing.diagnosis import diagnose
from midepoch.testing.examine import Examination
from midepoch.testing.record import Settings
from midepoch.testing.report import Report, Verdict
from midepoch.testing.trials import TRIALS, stand, try_promises
from midepoch.trying import LARGEST_COPY, copy_of
from support import said, sources
from support.wild_sources import Around

# --- sources that do not repeat themselves ---


def by_the_system() -> Iterator[bytes]:
    entropy = random.SystemRandom()
    for _ in range(6):
        yield entropy.randbytes(8)


class MakesItsGeneratorLate:
    generator: Any = None

    def __iter__(self) -> Iterator[float]:
        self.generator = self.generator or np.random.default_rng()
        for _ in range(6):
            yield self.generator.random()


class Entropy(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return (int.from_bytes(each[:7]) for each in by_the_system())


WANDERING: dict[str, tuple[Callable[[], Any], bool | None]] = {
    "a generator made late": (MakesItsGeneratorLate, None),
    "seeded by the system, in workers": (lambda: DataLoader(Entropy(), batch_size=2, num_workers=1), True),
}


@pytest.mark.parametrize("name", WANDERING)
def test_a_source_that_does_not_repeat_itself_is_told_at_once(name: str) -> None:
    """Others are in the table of what is said."""
    make, shard = WANDERING[name]
    with midepoch.wrap(make(), seed=5, shard=shard) as loader:
        assert loader.capabilities.exact_augmentations.believed, "not tried yet"
        batches = iter(loader)
        with pytest.warns(MidepochWarning, match="two passes over .* differ in their first unit") as told:
            next(batches)
        assert len([each for each in told if "gets other data" in str(each.message)]) == 1
        assert not loader.capabilities.exact_order and not loader.capabilities.exact_augmentations
        assert loader.state_dict()["position"] > 0, "a save never fails for it"
        with warnings.catch_warnings(action="error"):
            next(batches)
            loader.seek(0, 0)
            next(iter(loader))


@pytest.mark.filterwarnings("error")
def test_a_function_is_believed() -> None:
    loader = midepoch.wrap(by_the_system, seed=5)
    list(loader)
    told = loader.capabilities
    assert told.exact_order.believed and told.exact_augmentations.believed
    assert "two passes were not compared: a function cannot be copied" in told.exact_order.reason


# --- no false alarms, and nothing disturbed ---


class Logged:
    log: ClassVar[list[int]] = []

    def __iter__(self) -> Iterator[int]:
        for number in range(8):
            self.log.append(number)
            yield number


def test_a_trial_reads_one_unit_in_each_of_two_passes_once() -> None:
    Logged.log.clear()
    loader, off = midepoch.wrap(Logged(), seed=5), midepoch.wrap(Logged(), seed=5, verify="off")
    list(loader), list(loader)
    assert Logged.log == [0, 0, *range(8), *range(8)]
    Logged.log.clear()
    list(off)
    assert Logged.log == list(range(8))
    assert off.capabilities.exact_order.believed


class Once:
    def __init__(self) -> None:
        self.me = id(self)

    def __iter__(self) -> Iterator[int]:
        if id(self) != self.me:
            raise RuntimeError("a copy")
        yield from range(3)


def test_no_error_is_hidden_and_none_of_a_copy_is_told() -> None:
    def failing() -> Iterator[int]:
        raise ValueError("the user's own")
        yield 0

    loader = midepoch.wrap(Once(), seed=5)
    assert list(loader) == [0, 1, 2]
    assert loader.capabilities.exact_order.believed
    assert "a copy of it raised RuntimeError" in loader.capabilities.exact_order.reason
    with pytest.raises(ValueError, match="the user's own"):
        next(iter(midepoch.wrap(failing, seed=5)))


# --- collate functions, and work on whole batches ---


def tensor_of(samples: Any, calls: int) -> Any:
    return torch.tensor(samples)


def times_calls(samples: Any, calls: int) -> Any:
    return torch.tensor(samples) * calls


def with_calls(samples: Any, calls: int) -> Any:
    return samples * 9, calls


class Collate:
    def __init__(self, give: Callable[[Any, int], Any] = tensor_of) -> None:
        self.give, self.calls = give, 0

    def __call__(self, samples: Any) -> Any:
        self.calls += 1
        return self.give(samples, self.calls)


class Own:
    """Draws from generators of its own, one of them made late."""

    def __init__(self) -> None:
        self.early, self.late = np.random.default_rng(5), None

    def __call__(self, samples: list[int]) -> Any:
        self.late = self.late or random.Random(random.random())  # type: ignore[assignment]
        return torch.tensor(samples) + self.early.random() + self.late.random()  # type: ignore[attr-defined]


def drawing(samples: list[int], calls: int = 0) -> Any:
    own = midepoch.sample_generator().random()
    return torch.tensor(samples) + random.random() + np.random.rand() + torch.rand(()) + own


def in_place(samples: list[Any], calls: int = 0) -> Any:
    samples.sort()
    return [samples.pop() for _ in range(len(samples))]


PURE: dict[str, Callable[[], Any]] = {
    "counts": Collate, "draws": lambda: Collate(drawing), "generators of its own": Own,
    "in place": lambda: Collate(in_place),
}  # fmt: skip


def of_numbers(collate: Any, workers: int = 0, **settings: Any) -> Loader:
    data: Any = range(24)
    return midepoch.wrap(DataLoader(data, 4, shuffle=True, collate_fn=collate, num_workers=workers), seed=3, **settings)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


def of_a_stream(collate: Any, **settings: Any) -> Loader:
    return midepoch.wrap(DataLoader(Stream(), 4, collate_fn=collate), seed=3, **settings)


def in_then(function: Any, **settings: Any) -> Loader:
    batches = [list(range(first, first + 4)) for first in range(0, 24, 4)]
    return midepoch.wrap(batches, seed=3, then=function, **settings)


NAMED: dict[Callable[..., Loader], str] = {
    of_numbers: "the collate function", of_a_stream: "the collate function", in_then: "then=",
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("kind", "make"),
    # What is read once does not seed what is made late.
    [(kind, make) for make in NAMED for kind in PURE if kind != "generators of its own" or make is of_numbers],
)
def test_a_collate_function_that_keeps_nothing_is_no_alarm(kind: str, make: Callable[..., Loader]) -> None:
    loader = make(PURE[kind]())
    batches = list(loader)
    promised = loader.capabilities
    in_thread = kind == "draws" and make is of_a_stream  # that a replay draws where it is read is believed
    assert promised.exact_augmentations and promised.exact_augmentations.believed is in_thread
    assert repr(batches) == repr(list(make(PURE[kind](), verify="off"))), "trying it changes nothing"


@pytest.mark.parametrize(("make", "workers"), [*((make, {}) for make in NAMED), (of_numbers, {"workers": 1})])
@pytest.mark.parametrize("give", [times_calls, with_calls])
def test_a_collate_function_that_keeps_something_is_told(make: Any, workers: dict[str, int], give: Any) -> None:
    loader = make(Collate(give), **workers)
    with loader, pytest.warns(MidepochWarning, match=f"two calls of {NAMED[make]} for the same ") as told:
        sources.taken(loader, 3)
    assert len(told) == 1
    promised = loader.capabilities
    assert not promised.exact_augmentations and "two calls" in promised.exact_augmentations.reason


class Holding:
    """Holds something that makes it hard to copy."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, samples: Any) -> Any:
        return samples


class Unreadable(Holding):
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ValueError("not here")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("make", "collate", "why"), [
    *((make, in_place, "a function cannot be copied") for make in NAMED),
    (in_then, Unreadable(0), "a copy of it raised ValueError: not here"),
    (of_a_stream, Holding(bytes(65 << 20)), "it holds more than 64 MB"),
    (of_numbers, Holding(threading.Lock()), "it cannot be pickled (TypeError"),
])  # fmt: skip
def test_a_collate_function_that_cannot_be_tried_is_believed(make: Any, collate: Any, why: str) -> None:
    loader = make(collate)
    assert len(list(loader)) == 6
    told = loader.capabilities.exact_augmentations
    assert told.holds and told.believed and re.search(f"{NAMED[make]} was not tried: .*{re.escape(why)}", told.reason)


# --- samples ---


KEPT: dict[int, float] = {}


class Keeps(sources.Indices):
    """Draws for each sample when it is first read, and keeps that: by the process's generators or by the index."""

    def __init__(self, by_the_index: bool) -> None:
        super().__init__(24)
        self.by_the_index = by_the_index

    def __getitem__(self, index: int) -> Any:
        if index not in KEPT:
            KEPT[index] = np.random.default_rng(index).random() if self.by_the_index else index + np.random.rand()
        return KEPT[index]


@pytest.mark.parametrize(("by_the_index", "workers"), [(True, 0), (False, 0), (False, 1)])
def test_a_sample_that_keeps_its_first_random_numbers_is_told(workers: int, by_the_index: bool) -> None:
    KEPT.clear()
    loader = midepoch.wrap(DataLoader(Keeps(by_the_index), 4, shuffle=True, num_workers=workers), seed=3)
    with loader, warnings.catch_warnings(record=True, action="always") as caught:
        sources.taken(loader, 2)
    assert bool(loader.capabilities.exact_augmentations) is by_the_index
    assert ["it keeps what it drew" in str(each.message) for each in caught] == [True] * (not by_the_index)
    assert not (workers and KEPT), "the main process reads nothing where there are workers"


class Blank:
    __slots__ = ()


BLANK: list[Any] = [[1, Blank()]] * 8


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("source", [DataLoader(BLANK, 4, collate_fn=list), lambda: iter(BLANK)])  # type: ignore[arg-type]
def test_objects_that_cannot_be_compared_are_named(source: Any) -> None:
    loader = midepoch.wrap(source, seed=3)
    list(loader)
    exact = loader.capabilities.exact_order
    assert exact.holds and exact.reason.endswith("never compared, since unknown: Blank")


# --- copies that share nothing that changes ---


class OnItsClass:
    queue: ClassVar = collections.deque(range(100))

    def __iter__(self) -> Iterator[int]:
        while self.queue:
            yield self.queue.popleft()


def test_a_trial_that_takes_from_what_all_copies_share_is_told() -> None:
    """Pickling copies no attribute of a class, so two units of it are lost: docs/guarantees.md."""
    OnItsClass.queue = collections.deque(range(100))
    off = iter(midepoch.wrap(OnItsClass(), seed=5, verify="off"))
    assert [next(off) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.warns(MidepochWarning, match="if it takes what it reads from a queue, pass verify='off'"):
        next(iter(midepoch.wrap(OnItsClass(), seed=5)))


def test_what_cannot_be_copied_is_not_read_for_a_trial() -> None:
    helds: list[Any] = [iter(DataLoader(sources.Indices(8))), sources.numbers(), queue.Queue(), threading.Lock()]
    for held in helds:
        assert copy_of(Around(held)).why.startswith("it cannot be pickled")
    for large in (torch.zeros(LARGEST_COPY), torch.zeros(LARGEST_COPY)[:1], np.zeros(LARGEST_COPY), bytes(65 << 20)):
        assert copy_of(Around(large)).why == "it holds more than 64 MB"
    small = Around(torch.zeros(1 << 21))
    assert torch.equal(copy_of(small).open().loader, small.loader) and copy_of(small).open().loader is not small.loader


# --- what check tries at length ---------------------------------------------------------------------------------------


def tried(make: Callable[..., Any], seconds: float = 30.0) -> tuple[Examination, dict[str, Verdict]]:
    examination = Examination(Settings(make, world_sizes=(1,), num_workers=(0,)))
    return examination, {verdict.law: verdict for verdict in try_promises(examination, seconds)}


@pytest.mark.parametrize("name", said.FOUND)
def test_check_finds_what_a_job_does_not_try(name: str) -> None:
    trial, words = said.ROWS[name].trial, said.ROWS[name].words
    with warnings.catch_warnings(action="error", category=MidepochWarning), said.make(name) as loader:
        for _ in range(1 if trial == "lists" else 2):
            for _batch in loader:
                loader.state_dict()
        promised = loader.capabilities
        assert promised.exact_order and promised.exact_augmentations, "a job finds nothing"
    examination, verdicts = tried(functools.partial(said.make, name))
    assert verdicts[trial].status == "failed", verdicts
    found = verdicts[trial].error
    assert found is not None and found.law == "honesty"
    told = f"{found.expected} {found.got} {found.place}"
    assert re.search(words, told), told
    failed = [verdict.law for verdict in verdicts.values() if verdict.status == "failed"]
    assert failed[0] == trial or trial in ("passes", "states", "threads"), "the most telling trial comes first"
    for report in (Report((), tuple(verdicts.values())), Report((), (verdicts[trial],))):
        assert diagnose(examination, report).tone == "bad"
    promises = {promise.name: promise for promise in stand(examination, list(verdicts.values()), [])}
    assert "not kept" in {promises["exact_order"].standing, promises["exact_augmentations"].standing}


def test_what_check_tries_of_a_sound_loader_is_said_and_how_much() -> None:
    examination, verdicts = tried(said.sound)
    assert list(verdicts) == [trial.name for trial in TRIALS]
    assert {name: verdict.status for name, verdict in verdicts.items()} == {
        "lists": "holds", "samples": "holds", "passes": "holds", "states": "holds", "threads": "not applicable",
    }  # fmt: skip
    assert verdicts["samples"].reason == "54 samples of 8 epochs, 216 reads in 2 processes"
    assert "14 of 14 states" in verdicts["states"].reason
    standing = {promise.name: promise.standing for promise in stand(examination, list(verdicts.values()), [])}
    assert standing == {
        "same data": "proved at each resume", "exact_order": "tried", "exact_augmentations": "tried",
        "constant_time_resume": "believed", "elastic_world": "believed", "elastic_workers": "believed",
        "rank_independent": "believed", "skips": "believed",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["shuffles seeded anew in each pass", "generators made from entropy"])
def test_what_was_not_promised_is_not_held_against_a_loader(name: str) -> None:
    """The job has said no already: a shuffle seeded anew in each pass, and a sample that is drawn from the system."""
    found = {verdict.status for verdict in tried(functools.partial(said.make, name))[1].values()}
    assert "failed" not in found and "not promised" in found
