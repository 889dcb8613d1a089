"""`then`: work on whole batches, under their streams, counted where its result is handed out."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochWarning, SourceError, StateError
from midepoch.loader.loader import Loader
from midepoch.order.keys import derive_key
from midepoch.randomness.devices import DeviceGenerators
from support import sources

# --- a state counts what was handed out ------------------------------------------------------------------------------


def batches_of_unknown_number() -> Iterator[int]:
    """Ends by itself; how many there are is known only then."""
    for number in range(7):
        yield number + (random.random() < 0.5)


def webdataset_dropping(**options: Any) -> Loader:
    """Steps without a batch move the position, so the session corrects it."""
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    from support import webdataset_sources

    urls = webdataset_sources.law_shards("indexed", [4, 0, 5, 1, 3])
    dataset = wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node)
    dataset = dataset.select(dropped).map(webdataset_sources.Reading()).batched(2, collation_fn=torch.stack)
    return midepoch.wrap(DataLoader(dataset, batch_size=None), seed=5, **options)


def dropped(sample: dict[str, Any]) -> bool:
    return int(sample["cls"]) not in (2, 3, 6, 7, 12)


def drawing(batch: Any) -> Any:
    """What the batch is, and a number of its stream."""
    return sources.plain(batch), random.random()


class Seldom:
    """Draws for some batches only, from a generator of its own too, and changes each in place."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, batch: torch.Tensor) -> Any:
        number = int(batch.reshape(-1)[0])
        batch += 100
        if number % 4 == 0:
            return batch, random.random(), torch.rand(()).item()
        if number % 4 == 1:
            return batch, midepoch.sample_generator().random()
        return (batch, float(torch.rand((), generator=self.generator)), 0, 0) if number % 4 == 2 else (batch,)


def wrapping(make: Callable[[], Any], **settings: Any) -> Callable[..., Loader]:
    return lambda **options: midepoch.wrap(make(), seed=5, **settings, **options)


def combined(then: Any) -> Loader:
    made = sources.noisy_loader(), list(range(4)), sources.numbers
    return midepoch.combine([midepoch.wrap(each, seed=1, then=then) for each in made], "max_size_cycle")


PLACED: dict[str, Callable[..., Loader]] = {
    "by index": wrapping(sources.noisy_loader),
    "by index, second of two ranks": wrapping(sources.noisy_loader, world=midepoch.World(1, 2), tail="uneven"),
    "by index, in workers": wrapping(lambda: sources.noisy_loader(num_workers=2)),
    "exposing its sampler": wrapping(lambda: DataLoader(sources.Exposing(14), batch_size=4)),
    "replayed, of unknown length": wrapping(lambda: batches_of_unknown_number),
    "replayed in workers": wrapping(lambda: DataLoader(sources.Stream(13), batch_size=2, num_workers=2), shard=True),
    "a state of its own": wrapping(lambda: sources.Counter(7)),
    "webdataset, with steps that have no batch": webdataset_dropping,
    "parts of a combination": combined,
}
# For which batches are tensors.
SELDOM = ["by index", "by index, in workers", "exposing its sampler", "webdataset, with steps that have no batch"]


@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
@pytest.mark.parametrize(("name", "seldom"), [*((name, False) for name in PLACED), *((name, True) for name in SELDOM)])
def test_a_resume_at_every_place(name: str, seldom: bool) -> None:
    """Also at the end, where the length is unknown or steps have no batch; whether it draws for each batch or not."""
    cuts = range(0, 99, 3) if "workers" in name else ()
    epochs = sources.every_place(lambda: PLACED[name](then=Seldom() if seldom else drawing), cuts, read=sources.plain)
    assert (len({len(batch) for batch in sources.flat(epochs)}) > 1) is seldom


def test_the_callers_generators_are_left_as_they_were() -> None:
    with sources.caller_undisturbed():
        draw = lambda batch: (random.random(), np.random.standard_normal(), torch.rand(()).item())
        assert len({*midepoch.wrap(list(range(4)), seed=5, then=draw)}) == 4


# --- the streams -----------------------------------------------------------------------------------------------------


def test_the_stream_is_pinned() -> None:
    """States saved by one version go on in the next: the key is that of (7, seed, epoch, the first position)."""
    source = DataLoader(sources.Indices(20), batch_size=3)
    loader = midepoch.wrap(source, seed=11, world=midepoch.World(1, 2), then=lambda _: random.random())
    for epoch in range(2):
        for step, number in enumerate(itertools.islice(loader, 3)):
            assert number == random.Random(derive_key(7, 11, epoch, step * 6 + 3)).random()


ALONE: dict[str, tuple[Callable[[], float], Callable[[int], float]]] = {
    "python": (random.random, lambda key: random.Random(key).random()),
    # The upper half of the key, or torch's numbers would be the same.
    "numpy": (np.random.standard_normal, lambda key: np.random.RandomState(key >> 32).standard_normal()),
    "torch": (lambda: float(torch.randn(())),
              lambda key: float(torch.randn((), generator=torch.Generator().manual_seed(key)))),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_the_numbers_are_those_of_a_generator_seeded_by_the_key(name: str) -> None:
    """Of each batch, in the middle of a pass too, where only the generator is seeded that was used before."""
    draw, alone = ALONE[name]
    loader = midepoch.wrap(list(range(150)), seed=11, then=lambda batch: (batch, draw()))
    for epoch in range(2):
        assert list(loader) == [(place, alone(derive_key(7, 11, epoch, place))) for place in range(150)]
    loader.seek(epoch=0, position=77)
    assert next(iter(loader)) == (77, alone(derive_key(7, 11, 0, 77)))


class Late:
    def __init__(self) -> None:
        self.generator: random.Random | None = None

    def __call__(self, batch: Any) -> float:
        if self.generator is None:
            self.generator = random.Random()
        return self.generator.random()


@pytest.mark.parametrize("name", ["by index", "webdataset, with steps that have no batch"])
def test_a_generator_made_by_the_first_call(name: str) -> None:
    with pytest.warns(MidepochWarning, match="made a random generator"):
        once, again = (list(PLACED[name](then=Late())) for _ in range(2))
    assert once[1:] == again[1:] and once[0] != again[0]


def test_a_device_that_a_later_call_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Counter] = []
    monkeypatch.setattr(DeviceGenerators.__init__, "__defaults__", (lambda: tuple(devices),))

    def then(batch: int) -> float:
        devices[:] = [Counter(1)] if batch == 3 else devices
        return batch + sum(each.draw() for each in devices)

    def read() -> list[float]:
        devices.clear()
        return list(midepoch.wrap(list(range(6)), seed=1, then=then, verify="off"))

    with pytest.warns(MidepochWarning, match="first drew on a device") as told:
        assert read() == read()
    assert len(told) == 2


def test_without_streams_it_draws_from_the_caller() -> None:
    loader = midepoch.wrap([0] * 4, then=lambda batch: random.random(), randomness="none")
    random.seed(1)
    numbers = list(loader)
    random.seed(1)
    assert numbers == [random.random() for _ in range(4)]
    assert not loader.capabilities.exact_augmentations
    assert "then=" in loader.capabilities.exact_augmentations.reason


# --- errors ----------------------------------------------------------------------------------------------------------


class Failing:
    def __init__(self, at: int, times: int = 1, error: type[BaseException] = ZeroDivisionError) -> None:
        self.at, self.times, self.error = at, times, error

    def __call__(self, batch: int) -> Any:
        if batch == self.at and self.times:
            self.times -= 1
            raise self.error(batch)
        return batch, random.random()


@pytest.mark.parametrize(("error", "on_error"), [(ZeroDivisionError, "retry"), (KeyboardInterrupt, None)])
def test_an_error_comes_with_its_batch(error: type[BaseException], on_error: Any) -> None:
    make: Callable[..., Any] = lambda then: midepoch.wrap(list(range(9)), seed=1, then=then, on_error=on_error)
    whole, loader = list(make(Failing(-1))), make(Failing(5, 1, error))
    batches = iter(loader)
    assert [next(batches) for _ in range(5)] == whole[:5]
    state = loader.state_dict()
    with pytest.raises(error):
        next(batches)
    assert (loader.position, loader.state_dict()) == (5, state)
    assert list(sources.loaded(make(Failing(-1)), state)) == list(batches) == whole[5:]


def test_a_source_with_its_own_state_passes_over_no_batch() -> None:
    """It has moved past a batch for which the function fails. What is not known is refused."""
    loader = midepoch.wrap(sources.Counter(8), then=Failing(3), on_error="retry")
    batches = iter(loader)
    with pytest.raises(ZeroDivisionError):
        list(batches)
    assert loader.position == 3
    with pytest.raises(StateError, match="already past it"):
        loader.state_dict()


@pytest.mark.parametrize("source", [[0, 1, 2, 3], lambda: iter(range(4))], ids=["list", "function"])
def test_a_stop_iteration_does_not_end_the_epoch(source: Any) -> None:
    with pytest.raises(SourceError, match="then= raised StopIteration"):
        list(midepoch.wrap(source, then=Failing(2, 1, StopIteration)))


# --- what else a loader does -----------------------------------------------------------------------------------------


def test_capabilities_say_what_holds() -> None:
    def told(source: Any, then: Any) -> Any:
        return midepoch.wrap(source, then=then).capabilities.exact_augmentations

    exact, of_a_list = told(sources.noisy_loader(), drawing), told([1], drawing)
    answer = told([1], functools.partial(drawing, random.SystemRandom()))
    assert exact and of_a_list and not answer and "SystemRandom" in answer.reason
    assert "numbers drawn in then= are the batch's: exact on the same split" in exact.reason


# --- devices; the numbers drawn on one are in tests/backends/test_gpu.py ----------------------------------------------


@dataclass
class Counter:
    """A generator that counts, as those of CUDA do. It stands for one, because this test runs where there is none."""

    seed: int
    offset: int = 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def draw(self) -> float:
        self.offset += 4
        return random.Random(f"{self.seed} {self.offset}").random()


def test_generators_of_devices_are_lent_as_the_others() -> None:
    devices = [Counter(1), Counter(2, offset=4)]
    ours = DeviceGenerators(lambda: tuple(devices))
    ours.take_over()
    devices.append(Counter(3))  # the function uses a device for the first time
    ours.seed(77)
    assert len({each.draw() for each in devices[:2]}) == 1  # a rank may go on on another device
    ours.restore()
    assert not ours.late
    assert devices == [Counter(1), Counter(2, offset=4), Counter(3)]
    ours.take_over()
    devices.append(Counter(4, offset=8))
    ours.restore()
    assert ours.late, "one was used that was not taken over"
    assert devices[3].offset == 0
