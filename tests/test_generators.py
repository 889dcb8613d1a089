"""Which generator is which: their names, by which streams are told apart, and warnings where a name cannot be told."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

sys.path.insert(0, str(Path(__file__).parent))  # the spawned processes take the import path over

import sources

import midepoch
import midepoch.randomness.streams
from midepoch.loader.loader import Loader
from midepoch.randomness.streams import Streams, find_generators


def wrapped(dataset: Any, num_workers: int = 0, batch_size: int = 4, **options: Any) -> Loader:
    source = DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, collate_fn=list, **options)
    return midepoch.wrap(source, seed=1)


def as_errors(worker: int) -> None:
    warnings.simplefilter("error", midepoch.MidepochWarning)


def holding(*held: Any, **named: Any) -> Any:
    return types.SimpleNamespace(held=held, **named)


def names(*roots: Any) -> list[str]:
    return [each.name for each in find_generators(*roots).owned]


class Drawing(sources.Indices):
    """Draws from whatever `choose` gives for an index."""

    def __init__(self, size: int, choose: Callable[[Any, int], Any], **held: Any) -> None:
        super().__init__(size)
        self.choose = choose
        for name, value in held.items():
            setattr(self, name, value)

    def __getitem__(self, index: int) -> Any:
        return index, self.choose(self, index).random()


# --- names ---


class Split(enum.Enum):
    TRAIN = 1


KEYS: dict[str, Any] = {
    "text": "a", "number": 3, "tuple": (1, ("x", None)), "enum": Split.TRAIN, "number of numpy's": np.int64(3),
    "path": Path("a/b"), "class": Split, "dtype": torch.float32, "tuple of all": (Split.TRAIN, np.int8(1), Path("c")),
}  # fmt: skip


def _named_by_key(name: str) -> str:
    return names({KEYS[name]: random.Random()})[0]


@pytest.mark.parametrize("name", KEYS)
def test_a_key_that_is_the_same_in_each_process_is_part_of_a_name(name: str) -> None:
    here = _named_by_key(name)
    assert "*" not in here and here != "dict[None]"
    assert here == sources.in_processes(_named_by_key, (name,))[0]
    other = {"x": random.Random(), KEYS[name]: random.Random()}
    assert names(other)[1] == here


def test_equal_keys_have_one_name() -> None:
    assert names({3: random.Random()}) == names({np.int64(3): random.Random()}) == ["dict[3]"]


class Shared:
    generator = np.random.default_rng(0)

    def draw(self) -> float:
        return float(self.generator.random())


class Deeper(Shared):
    pass


def test_what_a_class_holds_is_named_by_the_class_whoever_led_there() -> None:
    whole = {tuple(names(root)) for root in (Shared(), [Deeper()], {"a": Shared}, holding(Deeper(), 1), Shared().draw)}
    assert len(whole) == 1
    assert whole.pop()[0].endswith("test_generators.Shared.generator")


TOP = random.Random(3)


def draws_from_the_top() -> float:
    return TOP.random()


def test_what_a_module_holds_is_named_by_the_module() -> None:
    assert names(draws_from_the_top) == names(holding([draws_from_the_top])) == [f" -> {__name__}.TOP"]


def _in_main() -> list[str]:
    program = {"__name__": "__main__", "random": random}
    exec("generator = random.Random()\ndef draw(): return generator.random()\nclass A: own = random.Random()", program)
    return names(program["draw"], program["A"])


def test_the_program_s_own_module_has_no_name() -> None:
    """It is called otherwise in a worker process that was spawned, or where a launcher imports it."""
    assert _in_main() == [" -> generator", " -> A.own"]


def test_classes_that_are_called_alike_do_not_share_a_stream() -> None:
    def make() -> Any:
        class Own:
            generator = np.random.default_rng(1)

        return Own

    first, second = make(), make()
    streams = Streams([first, second])
    with streams.under(5):
        assert first.generator.random() != second.generator.random()
    assert len(set(names([first, second]))) == 2


# --- where generators may be ---


@functools.cache
def cached(kind: int) -> random.Random:
    return random.Random()


@functools.lru_cache(maxsize=5)
def bounded(kind: int, other: str = "") -> random.Random:
    return random.Random()


class Methods:
    @functools.lru_cache(None)  # noqa: B019
    def made(self, kind: int) -> Any:
        return random.Random()


def test_results_of_a_cached_method_are_told_by_their_other_arguments() -> None:
    first, second = Methods(), Methods()
    made = [first.made(1), first.made(2), second.made(2)]
    found = {id(each.generator): each.name for each in find_generators(first).owned}
    assert [found[id(each)].rpartition("made")[2] for each in made] == ["((*, 1))", "((*, 2))", "((*, 2))"]


class Counter(dict[str, int]):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random()


def delegating(generator: random.Random) -> Iterator[float]:
    yield from endless(generator)


def endless(generator: random.Random) -> Iterator[float]:
    mine = random.Random(generator.random())
    del generator
    while True:
        yield mine.random()


def begun() -> Iterator[float]:
    iterator = delegating(random.Random(1))
    next(iterator)
    return iterator


def shared(bits: Any) -> Any:
    return holding(np.random.Generator(bits), bits)


def attributed() -> None:
    pass


attributed.generator = random.Random()  # type: ignore[attr-defined]


def defaulted(module: Any = sys.modules[__name__]) -> Any:
    return module.TOP


LOCAL, SPACE, BOUND = threading.local(), types.SimpleNamespace(generator=random.Random()), random.Random(4).random
LOCAL.generator = random.Random()
LAYERS, CYCLE, FROZEN = torch.nn.Sequential(), itertools.cycle([random.Random()]), frozenset([random.Random()])
LAYERS.generator = random.Random()  # type: ignore[assignment]


def inner(generator: random.Random) -> Iterator[float]:
    while True:
        yield generator.random()


def outer() -> Iterator[float]:
    for each in inner(random.Random()):  # noqa: UP028  # not `yield from`
        yield each


def begun_outer() -> Iterator[float]:
    iterator = outer()
    next(iterator)
    return iterator


PLACES: dict[str, Callable[[], Any]] = {
    "an unbounded cache": lambda: (cached(1), cached)[1],
    "a bounded cache": lambda: (bounded(1), bounded(2, other="x"), bounded)[2],
    "a bare bit generator": lambda: holding(np.random.PCG64(1)),
    "a bit generator that is shared": lambda: shared(np.random.PCG64(1)),
    "a subclass of dict": Counter,
    "the factory of a defaultdict": lambda: collections.defaultdict(functools.partial(int, random.Random())),
    "behind yield from": begun,
    "an iterator that a loop goes through": begun_outer,
    "an attribute of a function": lambda: attributed,
    "a module in a default": lambda: defaulted,
    "a module that an object holds": lambda: holding(sys.modules[__name__], lambda: TOP),
    "keys of a dict": lambda: {functools.partial(int, random.Random()): 1},
    "values of a dict": lambda: {1: random.Random()}.values(),
    "a view of a dict": lambda: types.MappingProxyType({1: random.Random()}),
    "an array of objects": lambda: np.array([random.Random(), "x"], dtype=object),
    "at the top: a namespace": lambda: lambda: SPACE.generator,
    "at the top: a thread's own": lambda: lambda: LOCAL.generator,
    "at the top: layers": lambda: lambda: LAYERS.generator,
    "at the top: an iterator": lambda: lambda: CYCLE,
    "at the top: a frozen set": lambda: lambda: FROZEN,
    "at the top: a bound method": lambda: lambda: BOUND(),
}  # fmt: skip
EXPECTED = {"a bounded cache": 2, "behind yield from": 2}


@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found(place: str) -> None:
    found = find_generators(PLACES[place]())
    assert len(found.owned) == EXPECTED.get(place, 1), [each.path for each in found.owned]
    assert len({each.name for each in found.owned}) == len(found.owned)
    assert not any(each.name.endswith("(*)") for each in found.owned)


def test_a_bit_generator_is_put_under_streams_for_all_that_share_it() -> None:
    bits = np.random.PCG64(7)
    held = holding(np.random.Generator(bits), np.random.Generator(bits))
    streams = Streams(held)
    before = bits.state
    drawn = []
    for _ in range(2):
        with streams.under(3):
            drawn.append([each.random() for each in held.held])
    assert drawn[0] == drawn[1]
    assert bits.state == before


def no_answer(self: object, *arguments: Any) -> Any:
    raise RuntimeError("not yet")


class Lazy:
    """As a proxy that opens what it stands for when it is first asked."""

    __slots__ = ("held",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not yet")


ODD: dict[str, Any] = {
    "no attributes": type("Odd", (), {"__getattribute__": no_answer}),
    "no other attributes": Lazy,
    "no class": type("Odd", (), {"__class__": property(no_answer)}),
    "no order": type("Odd", (list,), {"__iter__": no_answer, "__len__": no_answer}),
    "no members": type("Odd", (dict,), {"items": no_answer, "__iter__": no_answer, "values": no_answer}),
    "no keys as attributes": type("Odd", (dict,), {"__getattr__": dict.__getitem__}),
    "no equality": type("Odd", (), {"__eq__": no_answer, "__hash__": no_answer, "__bool__": no_answer}),
}


@pytest.mark.parametrize("kind", ODD)
def test_objects_are_searched_without_being_asked(kind: str) -> None:
    """What they answer may open files, or draw."""
    odd = ODD[kind]()
    if "order" in kind:
        list.append(odd, random.Random())
    elif issubclass(ODD[kind], dict):
        dict.__setitem__(odd, "a", random.Random())
    else:
        object.__setattr__(odd, "held", random.Random())
    found = find_generators(odd)
    assert (len(found.owned), found.hopeless, found.reads_states) == (1, [], False)
    loader = wrapped(Drawing(8, lambda data, index: random, odd=odd))
    assert loader.capabilities.exact_augmentations
    assert len(sources.taken(loader)) == 2


def test_a_container_that_draws_when_it_is_read_leaves_the_caller_s_generators_alone() -> None:
    class Deck(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(random.sample(range(5), 5))

    state = random.getstate()
    assert len(sources.taken(wrapped(Drawing(8, lambda data, index: TOP, deck=Deck([1, 2, object()]))))) == 2
    assert random.getstate() == state


def test_what_cannot_be_searched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(value: Any) -> Any:
        if isinstance(value, set):
            raise RuntimeError("changed size")
        return children(value)

    children = midepoch.randomness.streams._children
    monkeypatch.setattr(midepoch.randomness, "_children", fails)
    found = find_generators([set(), random.Random()])
    assert found.hopeless == ["list[0] (which cannot be searched: RuntimeError)"]
    assert found.reads_states
    assert len(found.owned) == 1


class Row(NamedTuple):
    path: str
    box: tuple[int, int]


BIG: dict[str, Any] = {
    "annotations": [{"file": f"{n}.jpg", "box": (1, 2, 3, 4), "labels": ["a", "b"]} for n in range(60_000)],
    "by number": {n: [n, (n, "x")] for n in range(60_000)},
    "a set": set(range(200_000)),
    "named tuples": [Row(str(n), (n, n)) for n in range(60_000)],
    "objects": [[holding()] for _ in range(60_000)],
}


@pytest.mark.parametrize("name", BIG)
def test_what_stands_beside_large_containers_is_found(name: str) -> None:
    held = types.SimpleNamespace(first=BIG[name], then=holding(holding(random.Random())))
    found = find_generators(held)
    assert len(found.owned) == 1
    assert bool(found.hopeless) == (name == "objects")


def spawning(data: Any, index: int) -> Any:
    return data.generator.spawn(1)[0]


def test_generators_that_are_spawned_are_not_promised() -> None:
    loader = wrapped(Drawing(8, spawning, generator=np.random.default_rng(1)))
    assert not loader.capabilities.exact_augmentations
    assert "spawn" in loader.capabilities.exact_augmentations.reason
    loader = wrapped(Drawing(8, lambda data, index: data.generator, generator=np.random.default_rng(1)))
    assert loader.capabilities.exact_augmentations


# --- exact ---


def by_cache(data: Any, index: int) -> Any:
    return cached(index % 3)


def by_default(data: Any, index: int) -> Any:
    return data.made[index % 3]


def renewed(data: Any, index: int) -> Any:
    if data.made is None:
        data.made = np.random.default_rng()
    return data.made


EXACT: dict[str, Callable[[], Any]] = {
    "by an unbounded cache": lambda: Drawing(40, by_cache),
    "by a defaultdict": lambda: Drawing(40, by_default, made=collections.defaultdict(random.Random)),
    "made at the first sample": lambda: Drawing(40, renewed, made=None),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_generators_made_on_demand_are_exact(name: str, num_workers: int) -> None:
    def make() -> Loader:
        cached.cache_clear()
        return wrapped(EXACT[name](), num_workers)

    with warnings.catch_warnings():
        warnings.simplefilter("error", midepoch.MidepochWarning)
        with make() as loader:
            first, second = sources.taken(loader), sources.taken(loader)
        for cut in (1, 2, 6):
            assert sources.resumed(make, sources.heads(make, cut)[1]) == first[cut:]
        with make() as loader:
            loader.seek(epoch=1, position=8)
            assert sources.taken(loader) == second[2:]


def test_generators_that_change_places_between_passes_are_told_by_their_places() -> None:
    """As a process that begins with the later pass finds them."""

    def alternate(data: Any, index: int) -> Any:
        return data.pair[index % 2]

    def make() -> Any:
        return Drawing(16, alternate, pair=[random.Random(), random.Random()])

    data = make()
    loader = wrapped(data)
    sources.taken(loader)
    data.pair.reverse()
    later = sources.taken(loader)
    fresh = wrapped(make())
    fresh.seek(epoch=1)
    assert sources.taken(fresh) == later


class Augmentation:
    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)

    def random(self) -> float:
        return float(self.generator.random())


def by_epoch(data: Any, epoch: int) -> None:
    data.current = data.augmentations["strong" if epoch else "weak"]


def wrapped_in(data: Any, epoch: int) -> None:
    data.current = [data.current, None][0] if not epoch else types.SimpleNamespace(random=data.current.random)


def shorter(data: Any, epoch: int) -> None:
    if epoch:
        data.augmentations.pop("weak")
        data.current = next(iter(data.augmentations.values()))


@pytest.mark.parametrize("set_epoch", [by_epoch, wrapped_in, shorter])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_the_caller_moves_between_passes_is_found_where_it_is(
    set_epoch: Callable[[Any, int], None], num_workers: int
) -> None:
    def make() -> Any:
        augmentations = {"weak": Augmentation(), "strong": Augmentation()}
        return Drawing(
            16, lambda data, index: data.current, augmentations=augmentations, current=augmentations["weak"]
        )

    data = make()
    with wrapped(data, num_workers) as loader:
        for epoch in range(2):
            set_epoch(data, epoch)
            state = loader.state_dict()
            batches = sources.taken(loader)
    for workers in (0, 2):
        data = make()
        for epoch in range(2):
            set_epoch(data, epoch)
        with wrapped(data, workers) as loader:
            loader.load_state_dict(state)
            assert sources.taken(loader) == batches


class Endlessly(IterableDataset[Any]):
    """Makes a generator of its own when the first sample of a pass is read."""

    def __init__(self, size: int) -> None:
        self.sampler = RandomSampler(range(size), generator=torch.Generator().manual_seed(3))

    def __iter__(self) -> Iterator[Any]:
        generator = np.random.default_rng()
        for index in self.sampler:
            yield index, generator.random()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_s_generator_made_while_it_is_read_is_exact(num_workers: int) -> None:
    def make() -> Loader:
        return wrapped(Endlessly(24), num_workers)

    with warnings.catch_warnings():
        warnings.simplefilter("error", midepoch.MidepochWarning)
        with make() as loader:
            assert loader.capabilities.constant_time_resume
            first, second = sources.taken(loader), sources.taken(loader)
        assert sorted(index for index, _ in sources.flat(first)) == list(range(24))
        for cut in (1, 3, 5):
            assert sources.resumed(make, sources.heads(make, cut)[1]) == first[cut:]
        with make() as loader:
            loader.seek(epoch=1, position=8)
            assert sources.taken(loader) == second[2:]


class Reseeding(sources.Indices):
    """As albumentations' ``set_random_seed``: generators made anew, by the sample's number."""

    def __getitem__(self, index: int) -> Any:
        self.generators = [np.random.default_rng([index, each]) for each in range(3)]
        return [index, *(each.random() for each in self.generators)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_generators_that_are_made_for_each_sample_by_its_number_are_exact(num_workers: int) -> None:
    with warnings.catch_warnings(), wrapped(Reseeding(80), num_workers, worker_init_fn=as_errors) as loader:
        warnings.simplefilter("error", midepoch.MidepochWarning)
        epochs = [sources.taken(loader) for _ in range(2)]
        assert epochs[0] == epochs[1]
        list(itertools.islice(loader, 7))
        assert sources.taken(loader)


def test_generators_that_are_made_for_each_sample_by_chance_are_warned_of_once() -> None:
    def renews(data: Any, index: int) -> Any:
        data.made = np.random.default_rng()
        return data.made

    with warnings.catch_warnings(record=True) as told, wrapped(Drawing(80, renews)) as loader:
        warnings.simplefilter("always", midepoch.MidepochWarning)
        for _ in range(3):
            sources.taken(loader)
    assert [str(each.message).partition(",")[0] for each in told] == [
        "Drawing.made is a random generator that is made again and again"
    ]


class Replayed(IterableDataset[Any]):
    """Has no sampler; `reseed` gives it another generator, and it makes one while it is read."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def reseed(self, epoch: int) -> None:
        self.generator = np.random.default_rng(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.own = np.random.default_rng(7)
        for index in range(24):
            yield index, self.generator.random() if index % 4 == 1 else 0.0, self.own.random()


def replayed(data: Any, num_workers: int) -> Loader:
    source: Any = DataLoader(data, batch_size=4, num_workers=num_workers, collate_fn=list)
    return midepoch.wrap(source, seed=1, shard=True)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*from its start:midepoch.MidepochWarning")
def test_a_source_that_is_replayed_has_its_generators_exchanged_between_passes(num_workers: int) -> None:
    data = Replayed()
    with replayed(data, num_workers) as loader:
        states: list[list[Any]] = []
        epochs: list[list[Any]] = []
        for epoch in range(3):
            data.reseed(epoch)
            states.append([loader.state_dict()])
            epochs.append([])
            for batch in loader:
                epochs[-1].append(sources.plain(batch))
                states[-1].append(loader.state_dict())
    assert epochs[0] != epochs[1]
    for epoch, cut in itertools.product(range(3), range(6)):
        data = Replayed()
        data.reseed(epoch)
        with replayed(data, num_workers) as loader:
            loader.load_state_dict(states[epoch][cut])
            assert sources.taken(loader) == epochs[epoch][cut:]


class Behind(IterableDataset[Any]):
    """A generator of an inner iterator, which seldom draws."""

    def __init__(self) -> None:
        self.sampler = RandomSampler(range(24), generator=torch.Generator().manual_seed(3))

    def inner(self) -> Iterator[Any]:
        generator = np.random.default_rng(4)
        for index in self.sampler:
            yield index, generator.random() if index % 7 == 3 else 0.0

    def __iter__(self) -> Iterator[Any]:
        for each in self.inner():  # noqa: UP028  # not `yield from`
            yield each


def test_a_generator_of_an_inner_iterator_is_exact() -> None:
    def make() -> Loader:
        return wrapped(Behind())

    whole = sources.taken(make())
    for cut in range(1, 6):
        assert sources.resumed(make, sources.heads(make, cut)[1]) == whole[cut:]


# --- warned of ---


def lately(data: Any, index: int) -> Any:
    """A generator for the samples from the 24th on, made at the first of them."""
    if index < 24:
        return TOP
    data.made = data.made or np.random.default_rng()
    return data.made


def filled(data: Any, index: int) -> Any:
    place = data.places.setdefault(index % 3, len(data.places))
    data.slots[place] = data.slots[place] or random.Random()
    return data.slots[place]


def rotating(data: Any, index: int) -> Any:
    data.pool.rotate(1)
    return data.pool[0]


def pushed(data: Any, index: int) -> Any:
    if index % 3 not in data.known:
        data.known.add(index % 3)
        data.pool.appendleft(random.Random())
    return data.pool[-1]


def slots() -> Any:
    return Drawing(40, filled, places={}, slots=[None] * 5)


def one_slot() -> Any:
    return Drawing(40, filled, places={0: 3, 1: 3, 2: 3}, slots=[None] * 5)


def pool() -> Any:
    return Drawing(40, rotating, pool=collections.deque(random.Random(each) for each in range(3)))


def pushing() -> Any:
    return Drawing(40, pushed, known=set(), pool=collections.deque([random.Random()]))


def late() -> Any:
    return Drawing(40, lately, made=None)


WARNED = {
    "slots": (slots, "slots is filled with random generators while"),
    "one slot": (one_slot, "slots is filled with random generators while"),
    "a pool": (pool, r"random generators change places \(.*pool\[\d\] is another one\) while"),
    "a deque's other end": (pushing, "random generators change places|pool is filled with"),
    "late": (late, r"made is a random generator that was made after the first batch"),
}


@pytest.mark.parametrize("name", WARNED)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_generator_whose_name_may_tell_what_was_read_before_is_warned_of(name: str, num_workers: int) -> None:
    make, text = WARNED[name]
    if not num_workers:
        with wrapped(make()) as loader, pytest.warns(midepoch.MidepochWarning, match=text):
            assert len(sources.taken(loader)) == 10
        return
    with (
        wrapped(make(), num_workers, worker_init_fn=as_errors) as loader,
        pytest.raises(midepoch.MidepochWarning, match=text),
    ):
        sources.taken(loader)


@pytest.mark.parametrize("left_after", [7, 8])
def test_a_late_generator_of_a_pass_that_was_left_early_is_warned_of(left_after: int) -> None:
    with wrapped(late()) as loader:
        list(itertools.islice(loader, left_after))
        with pytest.warns(midepoch.MidepochWarning, match="made after the first batch"):
            next(iter(loader))


def test_generators_of_the_caller_s_are_exchanged_between_passes_without_a_word() -> None:
    data = Drawing(16, lambda data, index: data.generator, generator=random.Random())
    with wrapped(data) as loader, warnings.catch_warnings():
        warnings.simplefilter("error", midepoch.MidepochWarning)
        for count in (4, 2, 4):  # one of them left early
            list(itertools.islice(loader, count))
            setattr(data, "generator", random.Random())  # noqa: B010  # for mypy's sake
            if count == 4:
                setattr(data, "another", random.Random())  # noqa: B010


def test_a_new_generator_in_the_place_of_a_known_one_has_a_stream_of_its_own() -> None:
    class Pushing(sources.Indices):
        def __init__(self) -> None:
            super().__init__(8)
            self.pool = [random.Random()]

        def __getitem__(self, index: int) -> Any:
            if len(self.pool) == 1:
                self.pool.insert(0, random.Random())
            return [each.random() for each in self.pool]

    with wrapped(Pushing()) as loader, pytest.warns(midepoch.MidepochWarning, match="change places"):
        for one, other in sources.flat(sources.taken(loader)):
            assert one != other


def test_a_search_is_made_behind_the_first_batch_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ever more seldom in between, since it takes as long as the dataset has objects."""
    streams, found = Streams(), list[int]()

    def search(more: tuple[object, ...], late: bool = False) -> list[Any]:
        found.append(streams.batches)
        return []

    monkeypatch.setattr(streams, "_search", search)
    for _ in range(2):
        streams.begin_pass()
        for left in reversed(range(100)):
            streams.found_late(left=left)
    assert found == [0, 1, 4, 16, 64, 100, 100, 101, 104, 116, 164, 200]
