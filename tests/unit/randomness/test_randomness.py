"""One random stream for each sample: pinned, found everywhere, and nobody else's generator is touched."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import os
import queue
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import albumentations
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler, default_collate

import midepoch
from midepoch import MidepochError
from midepoch.loader.loader import Loader
from midepoch.order.keys import derive_key, derive_keys, extend_key, mix
from midepoch.randomness import streams
from midepoch.randomness.streams import Streams
from support import sources

MASK = (1 << 64) - 1

# --- pinned: a failure here means that augmentations saved by earlier versions have changed ---


def test_keys_are_those_of_splitmix64() -> None:
    # The published outputs of SplitMix64 from state 0, and from 1234567.
    assert [derive_key(word) for word in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix(1234567 + place * 0x9E3779B97F4A7C15) for place in (1, 2, 3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


def test_keys_are_pinned() -> None:
    pinned = {(0, 0): 0xA706DD2F4D197E6F, (1, 2, 3): 0x27D1DADE99DDF6A4, (5, 0, 12): 0xFE68374C9DF0F2FB}
    for words, key in [*pinned.items(), ((), 0), ((MASK,), 0), ((-1,), 0)]:
        assert derive_key(*words) == extend_key(derive_key(*words[:1]), *words[1:]) == key


FIRST_EPOCH = [
    [0.0, 0.5048652420649379, 0.26594357024604315, 0.15531247854232788],
    [1.0, 0.09629571713891649, 1.1564644976316916, 0.15668857097625732],
    [2.0, 0.06084134166802069, -1.2429641438232046, 0.8792851567268372],
]
SECOND_EPOCH = [
    [0.0, 0.2642892745075829, 1.5551486824671403, 0.7314257025718689],
    [1.0, 0.9167360259883156, 0.518160454775654, 0.7610909938812256],
    [2.0, 0.6827211179764605, -0.9015550218839665, 0.010368108749389648],
]


@pytest.mark.parametrize(("batch_size", "num_workers"), [(3, 0), (1, 0), (2, 2)])
def test_sample_streams_are_pinned(batch_size: int, num_workers: int) -> None:
    loader = DataLoader(sources.Noisy(3), batch_size=batch_size, num_workers=num_workers)
    with midepoch.wrap(loader, seed=5) as wrapped:
        assert sources.flat(sources.taken(wrapped)) == FIRST_EPOCH
        assert sources.flat(sources.taken(wrapped)) == SECOND_EPOCH


@pytest.mark.parametrize("key", [0, 5, 1 << 63, (1 << 63) + 5, derive_key(5, 0, 12), MASK])
def test_a_torch_generator_draws_what_the_whole_key_gives(key: int) -> None:
    own = torch.Generator()
    with Streams([own]) as start:
        start(key)
        drawn = torch.rand(3), torch.randn(3)
        watched = own.initial_seed()
    whole = torch.Generator().manual_seed(key)
    assert all(map(torch.equal, drawn, (torch.rand(3, generator=whole), torch.randn(3, generator=whole))))
    assert 0 <= watched < 1 << 63


class FromSampleGenerator(sources.Indices):
    """Sample i draws from the sample's own generator, asking for it twice."""

    def __getitem__(self, index: int) -> Any:
        first = midepoch.sample_generator().random()
        return index, first, int(midepoch.sample_generator().integers(0, 1000))


def test_the_sample_generator_is_pinned() -> None:
    loader = midepoch.wrap(DataLoader(FromSampleGenerator(2), batch_size=None), seed=5)
    assert sources.taken(loader) == [[0, 0.6042999354296875, 306], [1, 0.4694153079695942, 565]]


class Owning(sources.Indices):
    def __init__(self) -> None:
        super().__init__(6)
        self.new = np.random.default_rng(1)
        self.old = np.random.RandomState(1)
        self.philox = np.random.Generator(np.random.Philox(1))
        self.legacy_philox = np.random.RandomState(np.random.Philox(1))
        self.python = random.Random(1)
        self.torch = torch.Generator().manual_seed(1)

    def __getitem__(self, index: int) -> Any:
        return [
            index, self.new.standard_normal(), self.old.standard_normal(), self.philox.random(),
            self.legacy_philox.standard_normal(), self.python.gauss(0, 1), float(torch.rand((), generator=self.torch)),
        ]  # fmt: skip


def test_owned_generators_are_pinned() -> None:
    loader = midepoch.wrap(DataLoader(Owning(), batch_size=None), seed=5)
    first = [1.6143694590179953, 2.2973970322813675, 0.5733146010219855, 0.4060083253993084, -1.094800685939368]
    second = [0.35456813920277624, -1.7670372390702833, 0.39055204801855226, -0.3229106986547045, 0.21793618858750977]
    assert sources.taken(loader, 2) == [[0, *first, 0.4523416757583618], [1, *second, 0.17905539274215698]]


# --- the caller's generators ---


def test_an_error_in_a_sample_gives_the_generators_back(tmp_path: Path) -> None:
    marker = tmp_path / "failing"
    marker.touch()
    loader = midepoch.wrap(DataLoader(sources.Failing(22, [2], marker), batch_size=4), seed=5)
    with sources.caller_undisturbed(), pytest.raises(RuntimeError, match="cannot be read"):
        next(iter(loader))
    with pytest.raises(MidepochError, match="no sample is being read"):
        midepoch.sample_generator()


def test_without_streams_the_source_draws_from_the_caller() -> None:
    sources.under_other_seeds(3)
    expected = sources.taken(DataLoader(sources.Noisy(8), batch_size=4))
    sources.under_other_seeds(3)
    # DataLoader itself draws a base seed when it is iterated.
    torch.empty((), dtype=torch.int64).random_()
    loader = midepoch.wrap(DataLoader(sources.Noisy(8), batch_size=4), randomness="none", seed=5)
    assert sources.taken(loader) == expected
    assert not loader.capabilities.exact_augmentations
    assert "randomness='none'" in loader.capabilities.exact_augmentations.reason


# --- the sample's own generator ---


def test_outside_of_a_sample_there_is_no_generator() -> None:
    for _ in range(2):
        with pytest.raises(MidepochError, match=r"inside the dataset.*randomness='sample'"):
            midepoch.sample_generator()
        sources.taken(midepoch.wrap(DataLoader(FromSampleGenerator(2), batch_size=None), seed=5))
    with pytest.raises(MidepochError, match="no sample is being read"):
        sources.taken(midepoch.wrap(DataLoader(FromSampleGenerator(2), batch_size=None), randomness="none"))


class Nested(sources.Indices):
    """Reads another wrapped loader, without a seed, inside a sample, or none."""

    def __init__(self, inner: bool) -> None:
        super().__init__(12)
        self.inner = inner

    def __getitem__(self, index: int) -> Any:
        before, read = midepoch.sample_generator().random(), list[Any]()
        if self.inner:
            read = sources.taken(midepoch.wrap(DataLoader(sources.Noisy(3), batch_size=3)))
        return (before, midepoch.sample_generator().random(), random.random()), read


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_may_read_loaders(num_workers: int) -> None:
    """Their numbers follow from the sample, and the sample's own are those that it has without them."""

    def make(inner: bool = True) -> Loader:
        return midepoch.wrap(DataLoader(Nested(inner), 2, num_workers=num_workers, collate_fn=list), seed=5)

    whole, flat = sources.every_place(make, (1, 4), epochs=1, read=sources.plain)[0], sources.taken(make(False))
    assert [[own for own, _ in batch] for batch in whole] == [[own for own, _ in batch] for batch in flat]
    assert len({str(read) for batch in whole for _, read in batch}) == 12


# --- generators that a dataset owns: test_generators.py has where they are found ---


def test_a_sampler_s_own_generator_is_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(8)
    before = generator.get_state()

    def make() -> Loader:
        weighted = WeightedRandomSampler([1.0] * 12, 12, generator=generator)
        return midepoch.wrap(DataLoader(sources.Noisy(12), batch_size=3, sampler=weighted))

    assert make().state_dict()["seed"] == 8
    sources.every_place(make, read=sources.plain)
    assert torch.equal(generator.get_state(), before)


def test_the_global_generators_draw_unlike_numbers() -> None:
    """Torch's and NumPy's are of one kind: under equal seeds their flips would fall alike in every sample."""
    ours, drawn = Streams(), []
    for key in derive_keys(derive_key(1), np.arange(500)).tolist():
        with ours.under(key):
            drawn.append((random.getrandbits(1), np.random.randint(2), int(torch.randint(2, (1,)))))
    for first, second in itertools.combinations(zip(*drawn, strict=True), 2):
        assert 200 < sum(a == b for a, b in zip(first, second, strict=True)) < 300


# --- what draws nothing needs no stream ---


def openly(size: int, draw: Callable[[], Any]) -> sources.Made:
    """One sample draws openly, the others by a function."""
    return sources.Made(lambda index: random.random() if index == 13 else draw(), size)


def put_back() -> float:
    state = random.getstate()
    try:
        return random.random()
    finally:
        random.setstate(state)


def forked() -> float:
    with torch.random.fork_rng():
        return torch.rand(1).item()


TRACELESS: dict[str, Callable[[], Any]] = {
    "torch's, put back": forked,
    "a seed from torch's": lambda: torch.Generator().manual_seed(torch.initial_seed() % 99).initial_seed(),
    "python's, put back": put_back,
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", TRACELESS)
def test_draws_that_leave_no_trace_are_told(name: str, num_workers: int) -> None:
    """No stamp sees them. But a sample's first read is under its key, and its second with the generators at rest."""
    dataset = openly(40, TRACELESS[name])
    loader = midepoch.wrap(DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=list), seed=1)
    with loader, pytest.warns(midepoch.MidepochWarning, match="two reads of sample 0 differ"):
        sources.taken(loader)
    assert not loader.capabilities.exact_order and not loader.capabilities.exact_augmentations


@pytest.mark.parametrize("name", ["torch's, put back", "a seed from torch's"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_at_rest_they_follow_from_the_seed_and_the_epoch(name: str, num_workers: int) -> None:
    """From a process's second batch on."""

    def epochs(noise: int) -> list[list[float]]:
        torch.manual_seed(noise)
        data = DataLoader(openly(12, TRACELESS[name]), batch_size=2, num_workers=num_workers, collate_fn=list)
        with midepoch.wrap(data, seed=1, verify="off") as loader:
            return [sources.flat(sources.taken(loader)[max(1, num_workers) :]) for _ in range(2)]

    first, second = epochs(1), epochs(2)
    assert first == second and first[0] != first[1]
    assert all(len(set(epoch)) == 1 for epoch in first)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_interrupt_in_a_sample_that_has_drawn_is_not_lost(error: type[BaseException]) -> None:
    class Interrupted(sources.Indices):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                random.random()
                raise error
            return index

    with pytest.raises(error):
        sources.taken(midepoch.wrap(DataLoader(Interrupted(8), batch_size=4), seed=1))


# --- the real library ---


class Augmented(sources.Indices):
    def __init__(self, seed: int | None) -> None:
        super().__init__(20)
        either = albumentations.OneOf([albumentations.Blur(p=1.0), albumentations.RandomRotate90(p=1.0)], p=0.8)
        several = [albumentations.HorizontalFlip(p=0.5), albumentations.GaussNoise(p=0.5), either]
        self.transform = albumentations.Compose(several, seed=seed)

    def __getitem__(self, index: int) -> Any:
        image = (np.arange(16 * 16 * 3) * (index + 1) % 256).astype(np.uint8).reshape(16, 16, 3)
        return torch.from_numpy(np.ascontiguousarray(self.transform(image=image)["image"]))


@pytest.mark.parametrize("seed", [None, 137], ids=["unseeded", "seeded"])
def test_albumentations_continues_exactly(seed: int | None) -> None:
    """In a fresh object with fresh generators, and with workers as without."""

    def make(workers: int = 0) -> Loader:
        return midepoch.wrap(DataLoader(Augmented(seed), batch_size=4, shuffle=True, num_workers=workers), seed=5)

    with make() as loader:
        whole, later = sources.taken(loader), sources.taken(loader)
    assert whole != later
    assert sources.resumed(make, sources.heads(lambda: make(2), 2)[1]) == whole[2:]
    assert loader.capabilities.exact_augmentations


def test_a_collate_function_tried_in_a_worker_changes_no_stream() -> None:
    """A worker gives nothing back that a trial has borrowed, so what it reads next would seem to draw nothing."""
    source = DataLoader(sources.Noisy(24), 4, num_workers=1, collate_fn=lambda samples: default_collate(samples))
    with warnings.catch_warnings(action="error"):
        got = sources.taken(midepoch.wrap(source, seed=3))
    assert got == sources.taken(midepoch.wrap(DataLoader(sources.Noisy(24), 4), seed=3))


class DrawsFromAll(sources.Noisy):
    """Samples that give other threads a turn."""

    def __getitem__(self, index: int) -> Any:
        first = super().__getitem__(index)
        time.sleep(0)
        return first, super().__getitem__(index)


def slow(seed: int) -> Loader:
    return midepoch.wrap(DataLoader(DrawsFromAll(40), batch_size=4), seed=seed)


def test_loaders_read_by_several_threads_give_what_each_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_SECONDS_TO_WAIT", 60)  # on a busy machine too
    read = lambda seed: sources.taken(slow(seed))
    alone = list(map(read, range(3)))
    switched = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with sources.caller_undisturbed(), concurrent.futures.ThreadPoolExecutor(3) as pool:
            assert list(pool.map(read, range(3))) == alone
    finally:
        sys.setswitchinterval(switched)


def test_no_process_is_forked_while_a_thread_has_the_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have numpy's without its words, and torch's worker processes seed it first."""
    monkeypatch.setattr(streams, "_SECONDS_TO_WAIT", 60)
    reading, forking, steps = threading.Event(), threading.Event(), list[str]()

    def read() -> None:
        with Streams():
            reading.set()
            forking.wait(60)
            steps.append("read")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    reading.wait(60)
    forking.set()
    with streams.no_other_reads(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        steps.append("forked")
        assert not pool.submit(streams._turns[os.getpid()].acquire, blocking=False).result(60)
    assert steps == ["read", "forked"]
    thread.join(60)


def test_a_forked_process_waits_for_no_thread_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_SECONDS_TO_WAIT", 0)
    with Streams():
        forked = multiprocessing.get_context("fork").Process(target=has_its_turn)
        forked.start()
    forked.join(60)
    assert forked.exitcode == 0


def test_a_forked_process_reads_while_a_thread_reads() -> None:
    """The thread's turn is not the child's to end."""
    read, forked_there = Streams(), threading.Event()

    def hold() -> None:
        with read:
            forked_there.wait(60)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        while read._turn is None:
            time.sleep(0.001)
        forked = multiprocessing.get_context("fork").Process(target=reads, args=(read,))
        forked.start()
        forked_there.set()
        held.result(60)
    forked.join(60)
    assert forked.exitcode == 0


def reads(read: Streams) -> None:
    with read as start:
        start(1)


def has_its_turn() -> None:
    def read() -> bool:
        with (ours := Streams()):
            return ours._turn is not None

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(read).result(60)


def test_a_loader_that_waits_for_another_thread_does_not_hang() -> None:
    batches: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        for batch in slow(0):
            batches.put(len(batch))

    fed = sources.Made(lambda index: (index, batches.get(timeout=60)), 3)
    outer = iter(midepoch.wrap(fed, seed=0, verify="off"))
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert [index for index, _ in outer] == [0, 1, 2]
    thread.join(60)


def test_an_interrupt_within_a_batch_makes_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, whole = slow(0), sources.taken(slow(0), 3)
    batches = iter(loader)
    got = [sources.plain(next(batches))]

    def interrupted(ours: Streams) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(Streams, "_leave", interrupted)
        next(batches)
    loader.seek(position=4)
    got += sources.taken(loader, 2)
    assert got == whole
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(streams._turns[os.getpid()].acquire, blocking=False).result(60)
        pool.submit(streams._turns[os.getpid()].release).result(60)
