"""Objects around a DataLoader, and subclasses of it: driven by the DataLoader inside where that is declared."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import MidepochWarning, SourceError, World
from support import sources
from support import wild_sources as wild

SIZE, BATCH, BATCHES = 22, 4, 6


def loader(kind: Any = DataLoader, **keywords: Any) -> Any:
    return kind(sources.Noisy(SIZE), BATCH, shuffle=True, **keywords)


SEEN: dict[str, tuple[Callable[..., Any], str]] = {
    "on a device": (lambda **keywords: wild.OnDevice(loader(**keywords)), "loader"),
    "one ahead": (lambda **keywords: wild.OneAhead(loader(**keywords)), "loader"),
    "two ahead": (lambda **keywords: wild.Fetcher(loader(**keywords)), "loader"),
    "all ahead": (lambda **keywords: wild.AllAtOnce(loader(**keywords)), "loader"),
    "a subclass": (lambda **keywords: loader(wild.Doubling, **keywords), ""),
    "works in its collate function": (lambda **keywords: loader(wild.Neighbours, **keywords), ""),
    "keeps its workers": (lambda **keywords: loader(wild.KeepsWorkers, **keywords), ""),
    "keeps an iterator from the start": (lambda **keywords: loader(wild.KeepsFromTheStart, **keywords), ""),
    "in one another": (lambda **keywords: wild.OneAhead(wild.OnDevice(loader(**keywords))), "loader.loader"),
    "one buffer": (lambda **keywords: wild.OneBuffer(loader(**keywords)), "loader"),
    "draws late": (lambda **keywords: wild.DrawingLate(loader(**keywords), 7), "loader"),
    "cannot be copied": (lambda **keywords: wild.Locked(loader(**keywords)), "loader"),
    "works in a thread": (lambda **keywords: wild.WorksInAThread(loader(**keywords)), "loader"),
}  # fmt: skip


def declared(name: str, **keywords: Any) -> midepoch.Loader:
    make, inside = SEEN[name]
    return midepoch.wrap(make(**keywords), seed=3, inside=inside)


@pytest.mark.parametrize("name", SEEN)
def test_it_jumps_and_goes_on_bit_for_bit(name: str) -> None:
    with warnings.catch_warnings(action="error", category=MidepochWarning):
        first, second = sources.every_place(lambda: declared(name))
    assert len(first) == len(second) == BATCHES == len(declared(name)) and first != second
    capabilities = declared(name).capabilities
    assert all((capabilities.constant_time_resume, capabilities.elastic_world, capabilities.elastic_workers))
    assert f"inside={SEEN[name][1]!r} is declared, and watched" in capabilities.constant_time_resume.reason


@pytest.mark.parametrize("name", ["one ahead", "keeps its workers", "works in its collate function"])
@pytest.mark.parametrize("persistent", [True, False])
def test_with_workers_it_gives_the_same(name: str, persistent: bool) -> None:
    whole, state = sources.heads(lambda: declared(name), 2)
    rest = sources.resumed(lambda: declared(name), state)
    with declared(name, num_workers=1, persistent_workers=persistent) as working:
        batches = [sources.taken(working) for _ in range(2)]
        assert batches[0] == whole + rest
        working.load_state_dict(state)
        assert sources.taken(working) == rest
        assert sources.taken(working) == batches[1]


NOT_ONE_FOR_ONE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "gives one more": (wild.OneMore, "gives a batch behind those of the loader inside"),
    "two in one": (wild.Pairs, "has handed out 2 batches, and asked for 4 inside"),
    "each twice": (wild.Twice, "has handed out 2 batches, and asked for 1 inside"),
    "looks at one first": (wild.LooksFirst, "begins to iterate the loader inside more than once"),
    "reads in a thread": (wild.InAThread, "in a thread of its own"),
    "keeps some to itself": (wild.Keeping, "has asked for 6 batches inside, and handed out 5"),
    "reads another loader": (lambda inside: wild.Unused(inside, loader()), "handed out 1 batches, and asked for 0"),
}


@pytest.mark.parametrize("name", NOT_ONE_FOR_ONE)
def test_one_that_is_not_one_for_one_is_an_error(name: str) -> None:
    kind, what = NOT_ONE_FOR_ONE[name]
    around = midepoch.wrap(kind(loader()), seed=3, inside="loader")
    words = f"{what}.*inside='loader' declares .*Leave inside= out"
    with pytest.raises(SourceError, match=words):
        sources.taken(around)


def test_a_subclass_that_leaves_out_torchs_iterator() -> None:
    with pytest.raises(SourceError, match=r"handed out 1 batches, and asked for 0 inside.*Leave inside= out"):
        next(iter(midepoch.wrap(loader(wild.ReadsByItself), seed=3, inside="")))
    with warnings.catch_warnings(action="ignore", category=MidepochWarning):
        sources.every_place(lambda: midepoch.wrap(loader(wild.ReadsByItself), seed=3))


def sample_in_batch(number: int) -> int:
    """A sample of the first epoch's batch of this number."""
    return int(sources.taken(midepoch.wrap(loader(), seed=3))[number][0][0])


LATER = {
    wild.Skipping: "has handed out . batches, and asked for . inside",
    wild.Stopping: "ended after . batches, and the loader inside has more|has asked for . batches inside",
}


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize("cut", [0, 2])
def test_one_that_does_more_later_is_an_error(kind: Any, cut: int) -> None:
    def make() -> midepoch.Loader:
        return midepoch.wrap(kind(loader(), sample_in_batch(4)), seed=3, inside="loader")

    around = make()
    around.load_state_dict(sources.heads(make, cut)[1])
    given: list[Any] = []
    with pytest.raises(SourceError, match=LATER[kind]):
        given.extend(around)
    assert len(given) == 4 - cut


def test_a_generator_that_is_made_in_the_first_batch_is_told() -> None:
    around = midepoch.wrap(wild.MakingAGenerator(loader()), seed=3, inside="loader")
    with pytest.warns(MidepochWarning, match=r"your code made a random generator \(.*\) for a batch that is read once"):
        sources.taken(around, 1)


# --- not declared -----------------------------------------------------------------------------------------------------


UNDECLARED: dict[str, Callable[[], Any]] = {
    "on a device": lambda: wild.OnDevice(loader()),
    "hands attributes on": lambda: wild.HandingOn(loader()),
    "numbers its batches": lambda: wild.Counting(loader()),
    "mixes with the batch before": lambda: wild.Mixing(loader()),
    "cannot be copied": lambda: wild.Locked(loader()),
    "a stream inside": lambda: wild.OnDevice(DataLoader(sources.Stream(SIZE), BATCH)),
}


@pytest.mark.parametrize("name", UNDECLARED)
def test_without_a_declaration_it_is_read_again_and_told_once(name: str) -> None:
    def make() -> midepoch.Loader:
        with pytest.warns(MidepochWarning) as told:
            around = midepoch.wrap(UNDECLARED[name](), seed=3)
        assert 'write midepoch.wrap(loader, inside="loader"), which jumps' in str(told[0].message)
        assert len(told) == 1 and told[0].filename == __file__
        return around

    with warnings.catch_warnings(action="error", category=MidepochWarning):
        first, _ = sources.every_place(make, read=sources.plain)
    assert first == sources.taken(make())
    told = make().capabilities
    assert not told.constant_time_resume and 'inside="loader"' in told.constant_time_resume.reason


def test_a_subclass_and_a_path_are_named_as_they_are_written() -> None:
    for kind in (wild.Doubling, wild.Neighbours):
        with pytest.warns(MidepochWarning, match='write midepoch.wrap\\(loader, inside=""\\)'):
            assert not midepoch.wrap(loader(kind), seed=3).capabilities.constant_time_resume
    with pytest.warns(MidepochWarning, match='inside="loader.loader"'):
        midepoch.wrap(wild.OneAhead(wild.OnDevice(loader())), seed=3)


def test_ranks_are_told_to_declare_it() -> None:
    with pytest.warns(MidepochWarning, match="inside="):
        around = midepoch.wrap(wild.OnDevice(loader()), seed=3, world=World(0, 2))
    with pytest.raises(midepoch.UnsupportedSourceError, match=r'shard=True.*shard=False.*write .*inside="loader"'):
        next(iter(around))


KEPT = {"num_workers": 1, "persistent_workers": True}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "kept workers": (lambda: wild.OnDevice(loader(**KEPT)), r'persistent_workers=True.*Write .*inside="loader"'),
    "a subclass with kept workers": (lambda: loader(wild.Doubling, **KEPT), r'persistent_workers=True.*inside=""'),
    "a loader of graphs with kept workers": (lambda: loader(wild.Neighbours, **KEPT), r'_workers=True.*inside=""'),
    "an iterator from the start": (lambda: loader(wild.KeepsFromTheStart), r'reads an iterator of .*inside=""'),
    "a function of kept workers": (lambda: function_around(**KEPT), "persistent_workers=True.*Wrap the DataLoader"),
    "an iterator alone": (lambda: wild.OnDevice(iter(loader())), "reads an iterator of .*Wrap the DataLoader"),
    "its own iterator": (lambda: wild.ItsOwn(iter(loader())), "reads an iterator of .*Wrap the DataLoader"),
    "a function of an iterator": (lambda: function_of_an_iterator(iter(loader())), "reads an iterator of .*as then="),
}


def test_what_fabric_returns_is_to_be_wrapped_before() -> None:
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu")
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"leave that out, .* then=fabric\.to_device"):
        midepoch.wrap(fabric.setup_dataloaders(loader()), seed=3)
    sources.every_place(lambda: midepoch.wrap(loader(), seed=3, then=fabric.to_device))


@pytest.mark.parametrize("stateful", [False, True])
def test_what_accelerate_returns_is_to_be_wrapped_before(stateful: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    config = accelerate.DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"accelerator\.prepare, .* leave that out, .* then="):
        midepoch.wrap(accelerator.prepare(loader()), seed=3)


def function_of_an_iterator(batches: Any) -> Any:
    return lambda: map(torch.neg, batches)


def function_around(**keywords: Any) -> Any:
    inside = loader(**keywords)
    return lambda: enumerate(inside)


@pytest.mark.parametrize("name", REFUSED)
def test_what_goes_on_where_it_stands_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(midepoch.UnsupportedSourceError, match=words):
        midepoch.wrap(make(), seed=3)


WRONG_NAMES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "no such attribute": (lambda: wild.OnDevice(loader()), "loder", "has no loader there: write inside='loader'"),
    "another attribute": (lambda: wild.OnDevice(loader()), "device", "has no loader there: write inside='loader'"),
    "one of two": (
        lambda: wild.OfTwo(loader(), loader()), "first", "has no loader there: write inside='loader' or inside='other'"
    ),
    "too deep": (lambda: wild.OnDevice(loader()), "loader.loader", "has no loader there: write inside='loader'"),
    "not deep enough": (
        lambda: wild.OneAhead(wild.OnDevice(loader())), "loader", "has no loader there: write inside='loader.loader'"
    ),
    "none at all": (lambda: wild.OnDevice([1]), "loader", "has no loader there: leave inside= out"),
    "a list": (lambda: [1, 2], "loader", "has no loader there: leave inside= out"),
    "an object, as a subclass": (lambda: wild.OnDevice(loader()), "", "is for a DataLoader subclass .*inside='loader'"),
    "a plain DataLoader": (loader, "", "is for a DataLoader subclass .*not for a DataLoader: leave inside= out"),
    "another length": (lambda: wild.Longer(loader()), "loader", "is 7, and that of the loader inside 6"),
    "cannot be iterated": (lambda: wild.Around(loader()), "loader", "Around cannot be iterated"),
    "a function": (lambda: function_around(), "loader", "this function has no loader there: leave inside= out"),
    "no name": (lambda: wild.OnDevice(loader()), True, "inside must be the name of an attribute or None, got True"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_wrong_name_is_refused_with_those_that_are_right(name: str) -> None:
    make, inside, words = WRONG_NAMES[name]
    with pytest.raises(TypeError, match=words):  # as UnsupportedSourceErrors are
        midepoch.wrap(make(), seed=3, inside=inside)


# --- beside other keywords --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["on a device", "one ahead", "keeps its workers"])
def test_with_shard_false_each_rank_reads_its_own(name: str) -> None:
    make, inside = SEEN[name]

    def rank(number: int) -> midepoch.Loader:
        return midepoch.wrap(make(), seed=3, inside=inside, shard=False, world=World(number, 2))

    for number in range(2):
        (whole,) = sources.every_place(functools.partial(rank, number), (2,), epochs=1)
        assert len(whole) == BATCHES


@pytest.mark.parametrize("kind", [wild.OnDevice, wild.OneAhead])
def test_a_batch_that_cannot_be_read_is_passed_over_alone(kind: Any, tmp_path: Path) -> None:
    (marker := tmp_path / "failing").touch()
    whole = sources.taken(midepoch.wrap(kind(loader()), seed=3, inside="loader"))
    for number in (0, 1, 3, BATCHES - 1):
        dataset = sources.Failing(SIZE, [sample_in_batch(number)], marker)
        source = kind(DataLoader(dataset, BATCH, shuffle=True))
        batches, got, failed = iter(midepoch.wrap(source, seed=3, inside="loader")), [], 0
        with warnings.catch_warnings(action="ignore", category=MidepochWarning):
            for _ in range(BATCHES + 1):
                try:
                    got.append(sources.plain(next(batches)))
                except RuntimeError:
                    failed += 1
                except StopIteration:
                    break
        assert got == whole[:number] + whole[number + 1 :], number
        assert failed == 1


OTHER_LOADERS: dict[str, Callable[[], Any]] = {
    "a stream": lambda: DataLoader(sources.Stream(SIZE), BATCH),
    "a stream with samplers": lambda: DataLoader(sources.Exposing(SIZE), BATCH),
    "a StatefulDataLoader": lambda: loader(StatefulDataLoader),
    "a StatefulDataLoader over a stream": lambda: StatefulDataLoader(sources.Stream(SIZE), BATCH),
    "an endless sampler": lambda: DataLoader(sources.Noisy(SIZE), BATCH, sampler=midepoch.ResumableSampler(SIZE)),
}


@pytest.mark.parametrize("kind", [wild.OnDevice, wild.Fetcher])
@pytest.mark.parametrize("name", OTHER_LOADERS)
@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
def test_around_any_loader_it_goes_on_as_that_one(name: str, kind: Any) -> None:
    def make() -> midepoch.Loader:
        return midepoch.wrap(kind(OTHER_LOADERS[name]()), seed=3, inside="loader")

    sources.every_place(make)
    inside = midepoch.wrap(OTHER_LOADERS[name](), seed=3).capabilities
    assert bool(make().capabilities.constant_time_resume) == bool(inside.constant_time_resume)


def test_wrapping_reads_nothing_and_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(make(num_workers=0), inside) for make, inside in SEEN.values()]
    read: list[int] = []
    monkeypatch.setattr(sources.Noisy, "__getitem__", lambda dataset, index: read.append(index))
    before = threading.enumerate()
    for source, inside in made:
        midepoch.wrap(source, seed=3, inside=inside)
    assert threading.enumerate() == before and not read
