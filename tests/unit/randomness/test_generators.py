"""Where generators of the dataset's own are looked for, when, and at what cost."""

from __future__ import annotations

import functools
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochWarning
from midepoch.loader.loader import Loader
from midepoch.randomness import globals as globals_of
from midepoch.randomness import owned
from midepoch.randomness.owned import LONGEST_CONTAINER, MOST_OBJECTS, find_generators
from midepoch.randomness.streams import Streams
from support import sources


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def told(self) -> Any:
        return self.held


class Slotted:
    __slots__ = ("__private", "rng")

    def __init__(self, rng: Any) -> None:
        self.rng = self.__private = rng


class SlottedChild(Slotted):
    __slots__ = ("other",)


class OfTheClass:
    rng = random.Random(4)


def closed_over(rng: Any) -> Callable[[], float]:
    return lambda: float(rng.random())


def in_a_method(rng: Any) -> Any:
    class Drawer:
        @property
        def number(self) -> float:
            return float(rng.random())

    return Drawer()


def made() -> np.random.Generator:
    return np.random.default_rng(3)


def in_a_module(rng: Any) -> Holder:
    layer: Any = torch.nn.Identity()
    layer.rng = rng
    return Holder(torch.nn.Sequential(layer))


PLACES: dict[str, Callable[[Any], Any]] = {
    "an attribute": Holder, "a slot": Slotted, "a slot of a parent": SlottedChild,
    "a list": lambda rng: Holder([1, [rng]]), "a dict": lambda rng: Holder({"a": {("b", 2): rng}}),
    "a set": lambda rng: Holder({rng}), "a tuple in a deque": lambda rng: Holder(deque([(rng,)])),
    "a subclass of dict": lambda rng: Holder(type("Mine", (dict,), {})(a=rng)),
    "a namespace": lambda rng: types.SimpleNamespace(rng=rng),
    "a closure": closed_over, "a method's closure": in_a_method, "a module of torch's": in_a_module,
    "a partial": lambda rng: functools.partial(closed_over, rng),
    "a partial of a partial": lambda rng: functools.partial(functools.partial(closed_over), rng),
    "a partial's keyword": lambda rng: functools.partial(closed_over, rng=rng),
    "a bound method": lambda rng: Holder(Holder(rng).told), "one of its own": lambda rng: Holder(rng.random),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [made, lambda: random.Random(3), lambda: np.random.RandomState(3)])
def test_the_promised_places_are_searched(place: str, make: Callable[[], Any]) -> None:
    rng = make()
    found, hopeless = find_generators(PLACES[place](rng))
    assert [getattr(rng, "bit_generator", rng)] == [each.generator for each in found]
    assert hopeless == []


def test_classes_lend_their_names_whoever_leads_there() -> None:
    """The top of this module would be searched too; the name says where, not the way."""
    names = [{each.path for each in find_generators(root)[0]} for root in (OfTheClass(), Holder([OfTheClass]))]
    assert names[0] == names[1]
    assert any(name.endswith("OfTheClass.rng") and " -> " in name for name in names[0])


def test_a_module_that_defines_what_was_found_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "augments.py").write_text(
        "import numpy as np\nrng = np.random.default_rng(1)\n"
        "class Augment:\n    def __call__(self):\n        return rng.random()\n"
        "def draw():\n    return rng.random()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import augments  # type: ignore[import-not-found]

    try:
        for held in (augments.Augment(), augments.draw, [augments.Augment()]):
            assert " -> augments.rng" in [each.path for each in find_generators(Holder(held))[0]]
    finally:
        del sys.modules["augments"]


def test_a_name_is_the_same_in_each_process() -> None:
    held = {key: made() for key in (None, 3, "a", (1, "b"), frozenset({"c"}))}
    names = {each.path.removeprefix("Holder.held") for each in find_generators(Holder(held))[0]}
    assert names == {"[None]", "[3]", "['a']", "[(1, 'b')]", "[*]"}


def test_a_stream_belongs_to_one_source_of_bits() -> None:
    bits = np.random.PCG64(5)
    shared = [np.random.Generator(bits), np.random.Generator(bits), bits]
    assert [each.generator for each in find_generators(Holder(shared))[0]] == [bits]
    first, second = Holder(made()), Holder(made())  # of one name
    with Streams(first, second).under(7):
        assert first.held.random() != second.held.random()


def test_a_generator_that_cannot_be_keyed_is_named_at_the_start() -> None:
    dataset = sources.Indices(4)
    dataset.inner = {"entropy": random.SystemRandom()}  # type: ignore[attr-defined]
    with pytest.warns(MidepochWarning, match=r"Indices.inner\['entropy'\] \(SystemRandom\).*sample_generator"):
        next(iter(midepoch.wrap(DataLoader(dataset), seed=5)))


# --- at what cost ---


class Records(sources.Indices):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.records = [Holder(number) for number in range(size)]
        self.by_name = {str(each.held): each for each in self.records}


def test_long_containers_hold_data(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    children = owned._children

    def noted(path: str, value: Any, tops: dict[int, Any]) -> Any:
        looked.append(value)
        return children(path, value, tops)

    monkeypatch.setattr(owned, "_children", noted)
    find_generators(Records(40_000))
    assert len(looked) < 20
    assert find_generators(Holder([made()] * LONGEST_CONTAINER))[0]
    assert not find_generators(Holder([made()] * (LONGEST_CONTAINER + 1)))[0]


def test_a_search_has_a_bound() -> None:
    near = Holder([[Holder(None) for _ in range(200)] for _ in range(200)])
    near.rng = made()  # type: ignore[attr-defined]
    assert len(find_generators(near)[0]) == 1, "the nearest are looked at first"
    calls = sources.calls_of(lambda: find_generators(near), "call")
    assert calls < 10 * MOST_OBJECTS < 400_000, "of 40,000 objects, a quarter is looked at, and no more entered"


# --- when ---


def wrapped(dataset: Any, num_workers: int = 0) -> Loader:
    return midepoch.wrap(DataLoader(dataset, 4, num_workers=num_workers, collate_fn=list), seed=1)


class OfTwoKinds(sources.Indices):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.parts: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        kind = index % 2
        if kind not in self.parts:
            self.parts[kind] = np.random.default_rng()
        return index, self.parts[kind].random()


class Later(sources.Indices):
    """Makes a generator when a sample of an epoch first needs one, which is not the first sample."""

    epoch = needed_in = 0

    def __getitem__(self, index: int) -> Any:
        if self.epoch >= self.needed_in and index >= 11 and not hasattr(self, "rng"):
            self.rng = np.random.default_rng()
        return index, self.rng.random() if hasattr(self, "rng") else 0.0


class Reseeding(sources.Indices):
    def __getitem__(self, index: int) -> Any:
        self.rng = np.random.default_rng(index)
        return index, self.rng.random()


@pytest.mark.parametrize("kind", [OfTwoKinds, Reseeding])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_generators_made_by_the_first_batch_are_exact(kind: type[sources.Indices], num_workers: int) -> None:
    with warnings.catch_warnings(action="error"):  # code that makes one anew seeds it itself
        sources.every_place(lambda: wrapped(kind(32), num_workers), (1, 8, 11), read=sources.plain)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_made_by_a_later_batch_is_warned_of(num_workers: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Also in a worker process, which ends with the pass."""
    said = tmp_path / "said"

    def say(message: Any, *_: Any) -> None:
        with said.open("a") as file:
            print(message, file=file)

    monkeypatch.setattr(warnings, "showwarning", say)
    with wrapped(Later(32), num_workers) as loader:
        sources.taken(loader)
    (line,) = said.read_text().splitlines()
    assert line.startswith("a random generator (Later.rng) was made after a pass had begun")


class Moving(sources.Indices):
    """Puts its generator elsewhere whenever a sample is read."""

    def __init__(self, size: int, moves: bool) -> None:
        super().__init__(size)
        self.places, self.moves, self.reads = [random.Random(4), None], moves, 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.moves:
            self.places.reverse()
        return index, (self.places[0] or self.places[1]).random()  # type: ignore[union-attr]


def test_a_generator_that_samples_move_keeps_its_stream() -> None:
    still, moving = Moving(32, moves=False), Moving(32, moves=True)
    assert sources.taken(wrapped(still)) == sources.taken(wrapped(moving))
    assert still.reads == moving.reads == 32 + 1  # the first sample once more


# --- looking on where nobody draws ---


class Seldom(sources.Indices):
    """Draws for some samples, and may keep what it drew."""

    def __init__(self, size: int, keeps: bool = False) -> None:
        super().__init__(size)
        self.reads, self.keeps, self.cache = 0, keeps, dict[int, float]()

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if index in self.cache:
            return index, self.cache[index]
        drawn = random.random() if index % 9 == 8 else 0.0
        if self.keeps:
            self.cache[index] = drawn
        return index, drawn


def test_what_is_kept_from_a_first_look_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OfTheClass, "rng")  # with a generator at hand nobody only looks on
    loader = wrapped(Seldom(40, keeps=True))
    with pytest.warns(MidepochWarning, match="drew random numbers for a batch when it was first read, and none"):
        sources.taken(loader)


def test_only_the_batch_that_draws_first_is_read_again() -> None:
    loader = wrapped(Seldom(36))
    whole = sources.taken(loader)
    assert loader.source.dataset.reads == 40 + 1  # the first sample once more
    assert len({drawn for batch in whole for _, drawn in batch}) == 5
    assert sources.every_place(lambda: wrapped(Seldom(36)), read=sources.plain)[0] == whole


def every_state() -> list[Any]:
    return [random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()]


def reads(streams: Streams, draw: Callable[[], Any]) -> list[str]:
    """How often, and how, one batch of two samples is read."""
    calls: list[str] = []

    def call(start: Callable[[int], None] | None) -> None:
        calls.append("without keys" if start is None else "with keys")
        for key in (3, 4):
            if start is not None:
                start(key)
            draw()

    streams.read(call)
    return calls


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", sources.DRAWS)
def test_a_draw_is_seen(name: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by public calls alone, where CPython or numpy keeps a generator otherwise."""
    monkeypatch.setattr(globals_of, "_is_known", lambda: known)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    draw = sources.DRAWS[name]
    for _ in range(2):
        before = every_state()
        looking = Streams()
        looking.begin_pass()
        assert reads(looking, lambda: None) == ["with keys"], "the first batch"
        assert reads(looking, lambda: None) == ["without keys"] and not looking.drawn
        assert reads(looking, draw) == ["without keys", "with keys"] and looking.drawn
        assert reads(looking, draw) == ["with keys"]
        assert every_state() == before
        drawing = Streams()
        drawing.begin_pass()
        assert reads(drawing, draw) == reads(drawing, draw) == ["with keys"] and drawing.drawn
        assert every_state() == before
        # Now with half a pair of normal numbers in each.
        random.gauss(0, 1), np.random.standard_normal(), torch.randn(1), torch.randn(1, dtype=torch.float64)


class Lazy(types.ModuleType):
    """Imports what it stands for as soon as anybody asks, as the modules of six do."""

    __getattribute__ = sources.forbidden


def test_a_search_asks_no_object_and_enters_no_library() -> None:
    held: list[Any] = [random.random, np.random.rand, np.random.mtrand._rand, torch.default_generator]
    held += [held, Holder(held), sources.Untouchable(), Lazy("lazy")]
    assert find_generators(Holder(held)) == ([], []), "global generators are nobody's, and a cycle is one place"
    found, hopeless = find_generators(Holder([random, np, torch, sys.modules[__name__]]))
    assert not hopeless
    assert all(each.path.startswith("Holder") and __name__ in each.path for each in found)


def test_a_generator_over_numpys_global_one_cannot_be_seeded() -> None:
    """Which is another one while samples are read."""
    dataset = sources.Indices(12)
    dataset.generator = np.random.Generator(np.random.get_bit_generator())  # type: ignore[attr-defined]
    exact = midepoch.wrap(DataLoader(dataset, batch_size=4), seed=0).capabilities.exact_augmentations
    assert not exact and "Indices.generator (a Generator over numpy's global one)" in exact.reason


def test_a_generator_made_in_a_later_pass_is_warned_of_once() -> None:
    dataset, told_by = Later(12), list[int]()
    dataset.needed_in = 1
    loader = midepoch.wrap(DataLoader(dataset, 2), seed=0)
    with warnings.catch_warnings(record=True, action="always") as told:
        for epoch in range(4):
            dataset.epoch = epoch
            for _ in loader:
                loader.state_dict()
                told_by.append(len(told))
    assert told_by == [0] * 12 + [1] * 12, "with the next epoch's first batch, before a state of it is written"
    assert "rng) was made after a pass had begun" in str(told[0].message)
