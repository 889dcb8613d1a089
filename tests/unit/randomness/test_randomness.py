"""One random stream for each sample: pinned, found everywhere, and nobody else's generator is touched."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
import queue
import random
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import albumentations
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import midepoch
from midepoch import MidepochError
from midepoch.loader.loader import Loader
from midepoch.order.keys import derive_key, derive_keys, extend_key, mix
from midepoch.randomness import streams
from midepoch.randomness.globals import GlobalGenerators
from midepoch.randomness.streams import Streams
from midepoch.reading.collating import draws_nothing
from support import sources

MASK = (1 << 64) - 1

# --- pinned: a failure here means that augmentations saved by earlier versions have changed ---


def test_keys_are_those_of_splitmix64() -> None:
    # The published outputs of SplitMix64 from state 0, and from 1234567.
    assert [derive_key(word) for word in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    gamma = 0x9E3779B97F4A7C15
    assert [mix(1234567 + place * gamma) for place in (1, 2, 3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((), 0),
        ((0, 0), 0xA706DD2F4D197E6F),
        ((1, 2, 3), 0x27D1DADE99DDF6A4),
        ((5, 0, 12), 0xFE68374C9DF0F2FB),
        ((MASK,), 0),
        ((-1,), 0),
    ],
)
def test_keys_are_pinned(words: tuple[int, ...], key: int) -> None:
    assert derive_key(*words) == key
    assert extend_key(derive_key(*words[:1]), *words[1:]) == key


def test_many_keys_are_those_of_each() -> None:
    for key in (0, derive_key(1, 5, 0), MASK):
        positions = np.array([0, 1, 2, 1000, 2**40, 2**62])
        each = [extend_key(key, int(position)) for position in positions]
        assert derive_keys(key, positions).tolist() == each
        assert positions.tolist() == [0, 1, 2, 1000, 2**40, 2**62]
    assert len(set(derive_keys(7, np.arange(100_000)).tolist())) == 100_000


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


class Initial(sources.Indices):
    """Sample i is what torch's generators, the global one and its own, say that they were seeded with.

    It draws from the global one, which would be at rest otherwise.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.own = torch.Generator()

    def __getitem__(self, index: int) -> Any:
        torch.rand(())
        return torch.initial_seed(), self.own.initial_seed()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_torch_was_seeded_with_can_be_collated(num_workers: int) -> None:
    with midepoch.wrap(DataLoader(Initial(64), 16, num_workers=num_workers), seed=5) as loader:
        seeds = torch.cat([torch.stack(batch) for batch in loader], dim=1)
    assert seeds.dtype == torch.int64 and len(set(seeds.flatten().tolist())) == 128


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
    assert sources.taken(loader) == [list(sample) for sample in SAMPLE_GENERATOR]


SAMPLE_GENERATOR = [(0, 0.6042999354296875, 306), (1, 0.4694153079695942, 565)]


class Owning(sources.Indices):
    """Draws from generators of every kind that it owns."""

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
            index,
            self.new.standard_normal(),
            self.old.standard_normal(),
            self.philox.random(),
            self.legacy_philox.standard_normal(),
            self.python.gauss(0, 1),
            float(torch.rand((), generator=self.torch)),
        ]


def test_owned_generators_are_pinned() -> None:
    loader = midepoch.wrap(DataLoader(Owning(), batch_size=None), seed=5)
    assert sources.taken(loader, 2) == OWNED


OWNED = [
    [
        0, 1.6143694590179953, 2.2973970322813675, 0.5733146010219855, 0.4060083253993084, -1.094800685939368,
        0.4523416757583618,
    ],
    [
        1, 0.35456813920277624, -1.7670372390702833, 0.39055204801855226, -0.3229106986547045, 0.21793618858750977,
        0.17905539274215698,
    ],
]  # fmt: skip


# --- the caller's generators ---


def caller_draws() -> list[Any]:
    """From each global generator: whole numbers, and one of a pair of normal numbers, which is kept for the next."""
    return [
        random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.standard_normal()),
        float(torch.rand(())), float(torch.randn(())),
    ]  # fmt: skip


SOURCES: dict[str, Callable[[], Any]] = {
    "map": lambda: sources.noisy_loader(),
    "map, workers": lambda: sources.noisy_loader(num_workers=1),
    "map, batches": lambda: DataLoader(sources.Fetched(22), batch_size=4, collate_fn=sources.noisy_collate),
    "listed": lambda: DataLoader(sources.Noisy(22), batch_size=4, sampler=sources.EverySecond(22)),
    "driven": lambda: DataLoader(sources.Exposing(22), batch_size=4),
    "stream": lambda: DataLoader(sources.Stream(22), batch_size=4),
    "stream, worker": lambda: DataLoader(sources.Stream(22), batch_size=4, num_workers=1),
    "generator function": lambda: sources.numbers,
    "dataset": lambda: sources.Noisy(9),
    "owning": lambda: DataLoader(Owning(), batch_size=2),
}


def seed_everything() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
def test_the_caller_s_generators_are_as_they_were(name: str) -> None:
    """Whatever is done with a loader between the caller's draws, these are the same as without it."""
    seed_everything()
    expected = [caller_draws() for _ in range(6)]
    seed_everything()
    loader = midepoch.wrap(SOURCES[name](), seed=5)
    got, batches = [caller_draws()], iter(loader)
    for _ in range(2):
        next(batches)
        got.append(caller_draws())
    loader.load_state_dict(loader.state_dict())
    loader.peek()
    loader.capabilities  # noqa: B018
    got.append(caller_draws())
    list(batches)
    got.append(caller_draws())
    loader.close()
    got.append(caller_draws())
    assert got == expected


def test_an_error_in_a_sample_gives_the_generators_back(tmp_path: Path) -> None:
    marker = tmp_path / "failing"
    marker.touch()
    loader = midepoch.wrap(DataLoader(sources.Failing(22, [2], marker), batch_size=4), seed=5)
    seed_everything()
    expected = caller_draws()
    seed_everything()
    with pytest.raises(RuntimeError, match="cannot be read"):
        next(iter(loader))
    assert caller_draws() == expected
    with pytest.raises(MidepochError, match="no sample is being read"):
        midepoch.sample_generator()


def test_generators_shared_with_the_caller_are_as_they_were() -> None:
    shared = np.random.default_rng(7)

    class Sharing(sources.Indices):
        def __getitem__(self, index: int) -> Any:
            return shared.random()

    expected = np.random.default_rng(7).random()
    batches = midepoch.wrap(DataLoader(Sharing(8), batch_size=2), seed=5)
    first = sources.taken(batches)
    assert shared.random() == expected
    assert sources.taken(midepoch.wrap(DataLoader(Sharing(8), batch_size=2), seed=5)) == first


def test_without_streams_the_source_draws_from_the_caller() -> None:
    seed_everything()
    expected = [sources.plain(batch) for batch in DataLoader(sources.Noisy(8), batch_size=4)]
    seed_everything()
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


def test_the_sample_generator_is_the_sample_s() -> None:
    """The same on any batch size, world and number of workers; another in each epoch, and for each sample."""
    loader = midepoch.wrap(DataLoader(FromSampleGenerator(12), batch_size=None), seed=5)
    first, second = sources.taken(loader), sources.taken(loader)
    assert len({sample[1] for sample in first + second}) == 24
    for batch_size, num_workers, world_size in ((4, 0, 1), (3, 2, 1), (2, 0, 3)):
        ranks = []
        for rank in range(world_size):
            split = DataLoader(FromSampleGenerator(12), batch_size=batch_size, num_workers=num_workers, collate_fn=list)
            with midepoch.wrap(split, seed=5, world=midepoch.World(rank, world_size)) as wrapped:
                ranks.append(sources.taken(wrapped))
        assert [sample for step in zip(*ranks, strict=True) for batch in step for sample in batch] == first


class Nested(sources.Indices):
    """Reads another wrapped loader inside a sample, or none."""

    def __init__(self, inner: bool) -> None:
        super().__init__(3)
        self.inner = inner

    def __getitem__(self, index: int) -> Any:
        before = midepoch.sample_generator().random()
        if self.inner:
            sources.taken(midepoch.wrap(DataLoader(FromSampleGenerator(2), batch_size=None), seed=index))
        return before, midepoch.sample_generator().random(), random.random()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_may_read_loaders(num_workers: int) -> None:
    nested, flat = (
        midepoch.wrap(DataLoader(Nested(inner), None, num_workers=num_workers, collate_fn=list), seed=5)
        for inner in (True, False)
    )
    assert sources.taken(nested) == sources.taken(flat)


# --- generators that a dataset owns: test_generators.py has where they are found ---


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Drawing(sources.Indices):
    """Sample i is (i, two draws of some callable)."""

    def __init__(self, draw: Callable[[], float], size: int = 12) -> None:
        super().__init__(size)
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        return index, self.draw(), self.draw()


def _first_sample(kind: str) -> Any:
    if kind == "set":
        rngs: Any = {random.Random(1), random.Random(2), random.Random(3)}
        draw = lambda: sum(sorted(rng.random() for rng in rngs))
    else:
        rngs = {Holder(number): np.random.default_rng(number) for number in range(3)}
        draw = lambda: float(next(iter(rngs.values())).random())
    return sources.taken(midepoch.wrap(DataLoader(Drawing(draw), batch_size=2, collate_fn=list), seed=5), 1)


@pytest.mark.parametrize("kind", ["set", "objects as keys"])
def test_an_owned_generator_has_one_stream_in_every_process(kind: str) -> None:
    """Nothing in its name depends on addresses or on the order of a set."""
    here, padding = _first_sample(kind), [object() for _ in range(1000)]
    first, second = sources.in_processes(_first_sample, (kind,), (kind,))
    assert here == first == second == _first_sample(kind)
    assert padding


def test_a_sampler_s_own_generator_is_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(8)
    before = generator.get_state()

    def make() -> Loader:
        weighted = WeightedRandomSampler([1.0] * 12, 12, generator=generator)
        return midepoch.wrap(DataLoader(sources.Noisy(12), batch_size=3, sampler=weighted))

    whole = sources.taken(make())
    assert torch.equal(generator.get_state(), before)
    assert make().state_dict()["seed"] == 8
    assert sources.resumed(make, sources.heads(make, 2)[1]) == whole[2:]
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


def every_state() -> list[Any]:
    pair = np.random.get_state(legacy=False)
    return [random.getstate(), json.dumps(pair, default=lambda x: x.tolist()), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("odd", [0, 1], ids=["paired", "half a pair of normal numbers"])
@pytest.mark.parametrize("light", [True, False])
def test_the_caller_gets_every_bit_back_and_a_draw_is_seen(light: bool, odd: int) -> None:
    ours = GlobalGenerators(light)
    for _ in range(odd):
        random.gauss(0, 1), np.random.standard_normal(), torch.randn(1), torch.randn(1, dtype=torch.float64)
    before = every_state()
    for name, draw in sources.DRAWS.items():
        if name == "sample_generator":  # draws from no generator of the process
            continue
        ours.take_over(())
        assert ours.stamp() == ours.at
        draw()
        assert ours.stamp() != ours.at, name
        ours.restore()
        assert every_state() == before
    expected = [random.gauss(0, 1), np.random.standard_normal(), torch.randn(1).item()]
    random.setstate(before[0]), np.random.set_state(json.loads(before[1]))
    torch.set_rng_state(torch.tensor(before[2], dtype=torch.uint8))
    assert [random.gauss(0, 1), np.random.standard_normal(), torch.randn(1).item()] == expected


class Seldom(sources.Indices):
    """Draws for one sample in five, and fails by chance for another."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if index % 5 == 3:
            return index, sources.DRAWS["random"](), np.random.rand(), torch.rand(1).item()
        if index % 5 == 4:
            for _ in range(3):
                try:
                    if midepoch.sample_generator().random() < 2:
                        raise KeyError(index)
                except KeyError:
                    continue
            return index, midepoch.sample_generator().random()
        return index


def seldom(num_workers: int = 0, batch_size: int = 3, world: midepoch.World | None = None) -> Loader:
    source = DataLoader(Seldom(60), batch_size, shuffle=True, num_workers=num_workers, collate_fn=list)
    return midepoch.wrap(source, seed=8, world=world)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_draws_seldom_has_its_stream_anywhere(num_workers: int) -> None:
    whole, make = sources.flat(sources.taken(seldom())), functools.partial(seldom, num_workers)
    assert len({str(item) for item in whole}) == 60
    assert sources.flat(sources.taken(seldom(num_workers, 4))) == whole
    for cut in (1, 6, 12, 18):
        assert sources.flat(sources.resumed(make, sources.heads(make, cut)[1])) == whole[3 * cut :]


class Openly(sources.Indices):
    """One sample draws openly, the others by a function."""

    def __init__(self, size: int, draw: Callable[[], Any]) -> None:
        super().__init__(size)
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        return random.random() if index == 13 else self.draw()


def put_back() -> float:
    state = random.getstate()
    try:
        return random.random()
    finally:
        random.setstate(state)


def forked() -> float:
    with torch.random.fork_rng():
        return torch.rand(1).item()


def from_the_initial_seed() -> Any:
    return torch.Generator().manual_seed(torch.initial_seed() % 99).initial_seed()


def test_an_inner_loader_without_a_seed_has_the_sample_s() -> None:
    def inner() -> list[float]:
        return sources.flat(sources.taken(midepoch.wrap(DataLoader(Openly(3, random.random), 3, collate_fn=list))))

    def make() -> Loader:
        return midepoch.wrap(DataLoader(Openly(40, inner), batch_size=4, collate_fn=list), seed=1)

    whole = sources.taken(make())
    assert len({str(each) for each in sources.flat(whole)}) > 20
    for cut in (1, 4, 7):
        assert sources.resumed(make, sources.heads(make, cut)[1]) == whole[cut:]


TRACELESS: dict[str, Callable[[], Any]] = {
    "torch's, put back": forked,
    "a seed from torch's": from_the_initial_seed,
    "python's, put back": put_back,
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", TRACELESS)
def test_draws_that_leave_no_trace_are_told(name: str, num_workers: int) -> None:
    """No stamp sees them. But a sample's first read is under its key, and its second with the generators at rest."""
    dataset = Openly(40, TRACELESS[name])
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
        data = DataLoader(Openly(12, TRACELESS[name]), batch_size=2, num_workers=num_workers, collate_fn=list)
        with midepoch.wrap(data, seed=1, verify="off") as loader:
            return [sources.flat(sources.taken(loader)[max(1, num_workers) :]) for _ in range(2)]

    first, second = epochs(1), epochs(2)
    assert first == second and first[0] != first[1]
    assert all(len(set(epoch)) == 1 for epoch in first)


class InPlace(sources.Indices):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sums = torch.zeros(size)

    def __getitem__(self, index: int) -> Any:
        self.sums[index] += torch.rand(())
        return self.sums[index].item()


def test_a_dataset_that_draws_at_once_is_read_once() -> None:
    def read(num_workers: int) -> list[Any]:
        source: Any = DataLoader(InPlace(12), batch_size=2, num_workers=num_workers, collate_fn=list)
        return sources.flat(sources.taken(midepoch.wrap(source, seed=1)))

    assert read(0) == read(2)


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


class Box:
    def __init__(self, value: int) -> None:
        self.value = value


class Boxes(sources.Indices):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            random.random()
        return Box(index)


def test_a_registered_collate_function_has_the_batch_s_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(batch: list[Box], *, collate_fn_map: Any = None) -> list[Any]:
        return [(box.value, random.random()) for box in batch]

    monkeypatch.setitem(default_collate_fn_map, Box, collate)

    def make() -> Loader:
        return midepoch.wrap(DataLoader(Boxes(40), batch_size=4), seed=1)

    whole = sources.taken(make())
    for cut in (1, 2, 5):
        assert sources.resumed(make, sources.heads(make, cut)[1]) == whole[cut:]


def test_what_dali_registers_with_torch_draws_nothing() -> None:
    plugin = pytest.importorskip("nvidia.dali.plugin.pytorch", reason="needs the extra dali")
    assert any(each.__module__.startswith(plugin.__name__) for each in default_collate_fn_map.values())
    assert draws_nothing(default_collate)


class ByKey(sources.Indices):
    """Makes a generator for each kind of sample when the first of that kind is read."""

    def __init__(self, size: int, keys: list[Any]) -> None:
        super().__init__(size)
        self.keys, self.made = keys, dict[Any, random.Random]()

    def __getitem__(self, index: int) -> Any:
        key = self.keys[index % len(self.keys)]
        if key not in self.made:
            self.made[key] = random.Random()
        return index, self.made[key].random()


class Aliased(sources.Indices):
    """Takes a generator for its own when the first sample is read, so that two paths lead to it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.part = types.SimpleNamespace(part=types.SimpleNamespace(generator=random.Random()))
        self.generator: random.Random | None = None

    def __getitem__(self, index: int) -> Any:
        if self.generator is None:
            self.generator = self.part.part.generator
        return index, self.generator.random()


KEYED: dict[str, Callable[[], Dataset[Any]]] = {
    "by tuples": lambda: ByKey(40, [(32, 32), (64, 64), ("wide", None)]),
    "by objects": lambda: ByKey(40, [frozenset({1}), frozenset({2}), frozenset({3})]),
    "aliased": lambda: Aliased(40),
}


@pytest.mark.parametrize("kind", KEYED)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_does_not_tell_what_was_read_before(kind: str, num_workers: int) -> None:
    def make() -> Loader:
        return midepoch.wrap(DataLoader(KEYED[kind](), batch_size=4, num_workers=num_workers), seed=1)

    whole = sources.taken(make())
    for cut in (1, 2, 9):
        assert sources.resumed(make, sources.heads(make, cut)[1]) == whole[cut:]


# --- the real library ---


class Augmented(sources.Indices):
    """Images under a real Albumentations pipeline."""

    def __init__(self, seed: int | None) -> None:
        super().__init__(20)
        self.transform = albumentations.Compose(
            [
                albumentations.HorizontalFlip(p=0.5),
                albumentations.RandomBrightnessContrast(p=0.9),
                albumentations.GaussNoise(p=0.5),
                albumentations.OneOf([albumentations.Blur(p=1.0), albumentations.RandomRotate90(p=1.0)], p=0.8),
            ],
            seed=seed,
        )

    def __getitem__(self, index: int) -> Any:
        image = (np.arange(16 * 16 * 3) * (index + 1) % 256).astype(np.uint8).reshape(16, 16, 3)
        return torch.from_numpy(np.ascontiguousarray(self.transform(image=image)["image"]))


def augmented(seed: int | None, num_workers: int) -> Loader:
    dataset = Augmented(seed)
    return midepoch.wrap(DataLoader(dataset, batch_size=4, shuffle=True, num_workers=num_workers), seed=5)


@pytest.mark.parametrize("seed", [None, 137], ids=["unseeded", "seeded"])
def test_albumentations_continues_exactly(seed: int | None) -> None:
    """In a fresh object with fresh generators, with no and with two workers, and the same in both."""
    with augmented(seed, 0) as loader:
        whole, later = sources.taken(loader), sources.taken(loader)
    assert json.dumps(whole) != json.dumps(later)
    for before, after in itertools.product((0, 2), repeat=2):
        state = sources.heads(functools.partial(augmented, seed, before), 2)[1]
        assert sources.resumed(functools.partial(augmented, seed, after), state) == whole[2:]
    assert loader.capabilities.exact_augmentations


def test_a_collate_function_tried_in_a_worker_changes_no_stream() -> None:
    """A worker gives nothing back that a trial has borrowed, so what it reads next would seem to draw nothing."""
    source = DataLoader(sources.Noisy(24), 4, num_workers=1, collate_fn=lambda samples: default_collate(samples))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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

    def read(seed: int) -> list[Any]:
        return sources.taken(slow(seed))

    alone = [read(seed) for seed in range(3)]
    seed_everything()
    expected = caller_draws()
    seed_everything()
    switched = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            assert list(pool.map(read, range(3))) == alone
    finally:
        sys.setswitchinterval(switched)
    assert caller_draws() == expected


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
    with streams.no_other_reads():
        steps.append("forked")
        assert streams._owner == threading.get_ident()
    assert steps == ["read", "forked"]
    thread.join(60)


class Feeds(sources.Indices):
    """Samples come from another loader, which another thread reads."""

    def __init__(self, batches: queue.Queue[Any]) -> None:
        super().__init__(3)
        self.batches = batches

    def __getitem__(self, index: int) -> Any:
        return index, self.batches.get(timeout=60)


def test_a_loader_that_waits_for_another_thread_does_not_hang() -> None:
    batches: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        for batch in slow(0):
            batches.put(len(batch))

    outer = iter(midepoch.wrap(Feeds(batches), seed=0, verify="off"))
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
    turns: list[Any] = []
    wait = streams._wait

    def waited() -> Any:
        turns.append(wait())
        return turns[-1]

    monkeypatch.setattr(streams, "_SECONDS_TO_WAIT", 0)
    monkeypatch.setattr(streams, "_wait", waited)
    loader.seek(position=4)
    got += sources.taken(loader, 2)
    assert got == whole and turns and None not in turns
