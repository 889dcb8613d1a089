"""Several loaders as one: every mode, cut anywhere, on other worlds, with parts that end or fail."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import MidepochError, SourceError, StateMismatchError, combine, wrap
from midepoch.loader.loader import Loader
from midepoch.testing import ResumableTests
from support import law_sources, sources

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")

ALL = bool(os.environ.get("MIDEPOCH_CHAOS"))


def noisy(size: int, seed: int, batch_size: int = 4, **options: Any) -> Loader:
    loader = DataLoader(sources.Noisy(size), batch_size, shuffle=True, collate_fn=sources.plain)
    return wrap(loader, seed=seed, **options)


def two(mode: Any, **options: Any) -> Loader:
    """The example of a fault-tolerance FAQ: range(8) and range(16), batches of 4; here they draw random numbers too."""
    return combine({"a": noisy(8, 1), "b": noisy(16, 2)}, mode, seed=3, **options)


def of_unknown(mode: Any, **options: Any) -> Loader:
    return combine([wrap(unknown(3), seed=1), noisy(9, 2), wrap(unknown(5), seed=3)], mode, seed=4, **options)


def nested(mode: Any, **options: Any) -> Loader:
    return combine([two("max_size_cycle"), noisy(10, 5), two("weighted")], mode, seed=6, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in ("min_size", "max_size", "max_size_cycle", "sequential")},
    "all": {"mode": "weighted"}, "first": {"mode": "weighted", "until": "first"},
    "cycle": {"mode": "weighted", "until": "cycle"}, "steps": {"mode": "weighted", "steps": 7},
}  # fmt: skip
KINDS: dict[str, Callable[..., Loader]] = {"two": two, "unknown lengths": of_unknown, "nested": nested}


def passes(loader: Loader, count: int) -> list[list[Any]]:
    return [sources.taken(loader) for _ in range(count)]


def unknown(size: int) -> Callable[[], Iterator[Any]]:
    return functools.partial(sources.numbers, size)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_cut_anywhere_it_goes_on_as_if_it_had_not_been(kind: str, options: str) -> None:
    """With batches in flight too. Where lengths are known, the batches left are counted anywhere."""
    make = functools.partial(KINDS[kind], **OPTIONS[options])
    epochs = passes(make(), 3)
    assert all(epochs)
    walking = make()
    for number, epoch in enumerate(epochs[:2]):
        batches = iter(walking)
        for cut in range(len(epoch) + 1):
            for in_flight in {0} if number else range(min(cut, 4) + 1) if ALL else {0, min(cut, 1), min(cut, 4)}:
                state = json.loads(json.dumps(walking.state_dict(in_flight)))
                fresh = sources.loaded(make(), state)
                assert in_flight or fresh.state_dict() == state
                if kind != "unknown lengths" and cut < len(epoch) and not in_flight:
                    counts = len(epoch), cut, len(epoch) - cut
                    for loader in (walking, fresh):
                        assert (len(loader), loader.batches_done, loader.batches_left) == counts
                rest: list[Any] = []
                expected = epoch[cut - in_flight :] + epochs[number + 1]
                if in_flight or (not ALL and cut % 5):
                    expected = expected[: 3 + in_flight]  # where a cut is at fault, its first batches are
                while len(rest) < len(expected):
                    rest += sources.taken(fresh, len(expected) - len(rest))
                assert rest == expected, f"cut at {cut} of epoch {number}, {in_flight} in flight"
            next(batches, None)


IN_STEPS = [{"x": "2.0", "y": "3.0"}, {"x": "2.1", "y": "3.1"}]
GIVEN: dict[Any, list[Any]] = {
    "min_size": IN_STEPS, "max_size": [*IN_STEPS, {"x": None, "y": "3.2"}],
    "max_size_cycle": [*IN_STEPS, {"x": "2.0", "y": "3.2"}], "sequential": ["2.0", "2.1", "3.0", "3.1", "3.2"],
}  # fmt: skip


@pytest.mark.parametrize("mode", [*GIVEN, "weighted"])
def test_what_a_mode_gives(mode: Any) -> None:
    parts = {name: wrap([f"{size}.{number}" for number in range(size)]) for name, size in (("x", 2), ("y", 3))}
    for epoch in passes(combine(parts, mode, seed=1), 2):
        assert sorted(epoch) == GIVEN["sequential"] if mode == "weighted" else epoch == GIVEN[mode]


def test_a_cycle_counts_each_part_s_own_epochs() -> None:
    loader = combine([noisy(4, 1), noisy(20, 2)], "max_size_cycle")
    for _ in range(2):
        list(loader)
    assert [part.epoch for part in loader.source] == [10, 2]
    (first, second), alone = passes(loader, 2), noisy(4, 1)
    alone.seek(epoch=10)
    assert [batch[0] for batch in first + second] == [batch for epoch in passes(alone, 10) for batch in epoch]
    sources.taken(loader, 4)  # and leave the epoch
    next(iter(loader))
    assert [part.epoch for part in loader.source] == [25, 5]


def test_forms() -> None:
    Pair = namedtuple("Pair", ["left", "right"])
    parts: Callable[..., Any] = lambda: [wrap([1, 2]), wrap([3, 4])]
    assert list(combine(Pair(*parts()), "min_size")) == [Pair(1, 3), Pair(2, 4)]
    assert list(combine(tuple(parts()), "min_size")) == [(1, 3), (2, 4)]
    assert list(combine(parts(), "min_size")) == [[1, 3], [2, 4]]
    labelled = combine({"x": wrap([1, 2]), "y": wrap([3])}, "sequential", labelled=True)
    assert list(labelled) == [("x", 1), ("x", 2), ("y", 3)]
    assert list(combine(parts(), "sequential", labelled=True)) == [(0, 1), (0, 2), (1, 3), (1, 4)]
    assert midepoch.wrap(labelled) is labelled


# --- weighted mixing ---


def test_draws_are_pinned() -> None:
    for seed, epoch, names in ((0, 0, "210200200101"), (1, 5, "012121221212")):
        parts = [wrap([0]), wrap([0]), wrap([0])]
        loader = combine(parts, "weighted", weights=[1, 2, 3], steps=12, labelled=True, seed=seed)
        loader.seek(epoch=epoch)
        assert "".join(str(name) for name, _ in loader) == names


@settings(max_examples=60, deadline=None)
@example(sizes=[400, 3], weights=[1] * 4, until="cycle", seed=1)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 50),
    weights=st.lists(st.integers(0, 5), min_size=4, max_size=4), until=st.sampled_from(["all", "first", "cycle"]),
)  # fmt: skip
def test_an_epoch_s_length_is_counted_as_drawn(sizes: list[int], weights: list[int], until: Any, seed: int) -> None:
    chosen = weights[: len(sizes)]
    chosen[0] += not any(chosen)
    parts = [wrap(list(range(size))) for size in sizes]
    loader = combine(parts, "weighted", weights=chosen, until=until, seed=seed, labelled=True)
    for _ in range(2):
        length, drawn = len(loader), [number for number, _ in loader]
        assert len(drawn) == length
        enough = [drawn.count(number) >= size for number, size in enumerate(sizes) if chosen[number]]
        assert any(enough) if until == "first" else all(enough)


# --- worlds ---


def test_worlds_that_do_not_agree() -> None:
    here, there = midepoch.World(0, 2), midepoch.World(1, 2)
    with pytest.raises(MidepochError, match="part 1 is rank 1 of 2, but the combination is rank 0 of 2"):
        next(iter(combine([noisy(8, 1, world=here), noisy(8, 1, world=there)])))
    loader = combine([noisy(8, 1, world=here), noisy(8, 1, world=here)], world=there)
    with pytest.raises(MidepochError, match="rank 0 of 2"):
        next(iter(loader))
    uneven = combine([noisy(8, 1, world=here, tail="uneven"), noisy(8, 1, world=here)])
    with pytest.raises(midepoch.UnsupportedSourceError, match="uneven"):
        len(uneven)


# --- iteration ---


def test_a_pickle_stands_where_the_loader_stands() -> None:
    loader, whole = two("max_size_cycle"), sources.taken(two("max_size_cycle"))
    assert sources.taken(pickle.loads(pickle.dumps(two("max_size_cycle")))) == whole
    sources.taken(loader, 3)
    twin = pickle.loads(pickle.dumps(loader))
    assert twin.source["a"] is not loader.source["a"]
    assert twin.state_dict() == loader.state_dict()
    assert sources.taken(sources.loaded(two("max_size_cycle"), twin.state_dict())) == whole[3:]


def varying() -> Loader:
    return combine([wrap(["a0", "a1"]), wrap(["b0", "b1", "b2"])], "weighted", until="first", seed=46)


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
def test_a_part_whose_epochs_vary_is_counted_in_its_own_epoch(mode: Any) -> None:
    """Also where an epoch was left; the cuts above have it in nested ones."""
    make: Callable[..., Any] = lambda: combine([varying(), wrap([0, 1, 2])], mode)
    assert [len(epoch) for epoch in passes(varying(), 6)] == [3, 4, 2, 4, 4, 3]
    first, second = passes(make(), 2)
    broken = make()
    assert len(broken) == len(first)
    sources.taken(broken, 1)
    assert sources.taken(broken, 1) == second[:1]
    assert len(broken) == len(second)


# --- failures ---


class Breaking(sources.Indices):
    def __init__(self, at: int) -> None:
        super().__init__(6)
        self.at, self.reads = at, 0

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise RuntimeError("out of order")
        self.reads += 1
        return index, random.random()


@pytest.mark.parametrize(("at", "first"), [(0, False), (2, True), (5, False)])
def test_a_part_that_fails_leaves_nothing_half_consumed(at: int, first: bool) -> None:
    def make(failing: Breaking, steady: Breaking) -> Loader:
        parts = [
            wrap(DataLoader(failing, 1, collate_fn=list), seed=1),
            wrap(DataLoader(steady, 1, collate_fn=list), seed=2, verify="off"),
            wrap(unknown(6)),
        ]
        return combine(parts if first else parts[::-1], "min_size")

    whole = sources.taken(make(Breaking(-1), Breaking(-1)))
    failing, steady = Breaking(at), Breaking(-1)
    loader = make(failing, steady)
    batches = iter(loader)
    got = [sources.plain(next(batches)) for _ in range(at)]
    before = loader.state_dict()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of order"):
            next(batches)
        assert loader.state_dict() == before
    assert sources.taken(sources.loaded(make(Breaking(-1), Breaking(-1)), before)) == whole[at:]
    failing.at = -1
    assert got + [sources.plain(batch) for batch in batches] == whole
    assert steady.reads == 6, "what was received before the failure is handed out, not read again"


@pytest.mark.parametrize("options", [{"mode": "max_size_cycle"}, {"mode": "weighted", "steps": 9}])
@pytest.mark.parametrize("empty", [lambda: wrap([]), lambda: wrap(unknown(0))], ids=["no batches", "nothing comes"])
def test_a_part_without_batches_cannot_begin_again(options: dict[str, Any], empty: Callable[[], Loader]) -> None:
    loader = combine([empty(), wrap([1, 2, 3])], seed=1, **options)
    with pytest.raises(SourceError, match="part 0 has no batches"):
        list(loader)


@pytest.mark.parametrize("mode", ["max_size", "sequential", "weighted"])
def test_a_part_without_batches_is_passed_over(mode: Any) -> None:
    for empty in (wrap([]), wrap(unknown(0))):
        assert [len(epoch) for epoch in passes(combine([empty, wrap([1, 2, 3])], mode), 2)] == [3, 3]
    assert list(combine([wrap([]), wrap([1])], "min_size")) == []


# --- what does not fit ---


def test_states_of_other_parts_are_refused() -> None:
    def make(*keys: str, mode: Any = "max_size", sizes: tuple[int, ...] = (8, 16, 12)) -> Loader:
        return combine({key: noisy(size, 1) for key, size in zip(keys, sizes, strict=False)}, mode)

    loader = make("a", "b")
    sources.taken(loader, 1)
    state = loader.state_dict()
    rest = sources.taken(sources.loaded(make("a", "b"), state))
    for other, told in [
        (make("a", "b", "c"), "parts"), (make("a"), "parts"), (make("b", "a"), "parts"), (make("a", "x"), "parts"),
        (make("a", "b", mode="min_size"), "mode"), (make("a", "b", sizes=(16, 8)), "part 'a'"),
        (make("a", "b", sizes=(8, 18)), "part 'b'"), (noisy(8, 1), "adapter"),
    ]:  # fmt: skip
        place = other.state_dict()
        with pytest.raises(StateMismatchError, match=told):
            other.load_state_dict(state)
        assert other.state_dict() == place
    assert sources.taken(sources.loaded(make("a", "b"), state)) == rest
    drawn = combine([wrap([1]), wrap([2])], "weighted", until="first")
    with pytest.raises(StateMismatchError, match="mode differs: the state was saved with 'weighted until first'"):
        combine([wrap([1]), wrap([2])], "weighted").load_state_dict(drawn.state_dict())
    with pytest.raises(StateMismatchError, match="part 'b': the seed"):
        combine({"a": noisy(8, 1), "b": noisy(16, 5)}, "max_size").load_state_dict(state)


WRONG: list[dict[str, Any]] = [
    {"weights": [1]}, {"weights": [1, -1]}, {"weights": [0, 0]}, {"weights": [1, float("nan")]}, {"weights": {"a": 1}},
    {"weights": ["x", 1]}, {"until": "never"}, {"until": "all", "steps": 3}, {"steps": 0}, {"seed": -1},
    {"fingerprint": "x" * 65}, {"mode": "min_size", "weights": [1, 2]},
]  # fmt: skip


def test_arguments_that_make_no_sense() -> None:
    wrong: Any = (
        ([], "min_size", "at least one"), ([wrap([1])], "zip", "mode must be"), ([[1, 2]], "min_size", "wrap it first"),
        (wrap([1]), "min_size", "a dict, a list or a tuple"),
    )  # fmt: skip
    for parts, mode, told in wrong:
        with pytest.raises((TypeError, ValueError), match=told):
            combine(parts, mode)
    for options in WRONG:
        with pytest.raises((TypeError, ValueError)):
            combine([wrap([1]), wrap([2])], **{"mode": "weighted", **options})


def test_a_part_with_its_own_state_is_refused_with_the_cure() -> None:
    own = StatefulDataLoader(range(4), batch_size=2)
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"part 1 keeps its own state.*wrap a torch DataLoader"):
        combine([wrap([1, 2]), wrap(own, remember=1)])
    assert sources.taken(combine([wrap([1]), wrap(DataLoader(sources.Indices(4), batch_size=2))])) == [[1, [0, 1]]]


def test_capabilities_are_those_of_all_parts() -> None:
    told = two("min_size").capabilities
    assert all(each for name, each in vars(told).items() if name != "skips")
    mixed = of_unknown("min_size").capabilities
    assert not mixed.constant_time_resume and "part 0" in mixed.constant_time_resume.reason
    own = law_sources.combined()
    assert not own.capabilities.elastic_world and not own.capabilities.rank_independent
    next(iter(own))
    with pytest.raises(StateMismatchError, match="world size"):
        law_sources.combined(0, 2).load_state_dict(own.state_dict())


# --- the laws ---


def test_draws_by_weight_go_on_in_other_worlds() -> None:
    def drawn(rank: int = 0, ranks: int = 1) -> Loader:
        world = midepoch.World(rank, ranks)
        parts = {"short": noisy(12, 1, world=world), "long": noisy(21, 2, world=world)}
        return combine(parts, "weighted", seed=3, weights={"short": 1, "long": 3})
    rows: Callable[..., Any] = lambda batches: [tuple(row) for batch in batches for row in batch]
    alone, loader = rows(drawn()), drawn()
    head, rest = rows(itertools.islice(loader, 3)), list[Any]()
    for rank in range(2):
        rest += rows(sources.loaded(drawn(rank, 2), loader.state_dict()))
    assert {*head, *rest} == {*alone}, "with the numbers that they drew"
    assert len(head) + len(rest) - len(alone) in (0, 1, 2), "each part is padded"


# test_cut_anywhere_it_goes_on_as_if_it_had_not_been has every mode with every kind of part. The laws have what differs
# in processes: parts whose states each rank knows alone.


class TestLeftAlone(ResumableTests):
    make_loader = staticmethod(law_sources.combined)
    identify: ClassVar[Any] = staticmethod(law_sources.identify_short)
    tail = "drop"
    parts = 2
    quick = True
    state_bytes = 2048
