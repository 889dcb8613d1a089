"""Objects around a DataLoader, and subclasses of it: driven by the DataLoader inside where that is exact."""

from __future__ import annotations

import copy
import functools
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parent))  # the worker processes take the import path over

import sources
import wild_sources as wild

import midepoch
from midepoch import MidepochWarning, SourceError, World
from midepoch.testing import ResumableTests

SIZE, BATCH, BATCHES = 22, 4, 6


def loader(kind: Any = DataLoader, **keywords: Any) -> Any:
    return kind(sources.Noisy(SIZE), BATCH, shuffle=True, **keywords)


SEEN: dict[str, Callable[..., Any]] = {
    "on a device": lambda **keywords: wild.OnDevice(loader(**keywords)),
    "one ahead": lambda **keywords: wild.OneAhead(loader(**keywords)),
    "two ahead": lambda **keywords: wild.Fetcher(loader(**keywords)),
    "a subclass": lambda **keywords: loader(wild.Doubling, **keywords),
    "keeps its workers": lambda **keywords: loader(wild.KeepsWorkers, **keywords),
    "keeps an iterator from the start": lambda **keywords: loader(wild.KeepsFromTheStart, **keywords),
    "one ahead of one that keeps its workers": lambda **keywords: wild.OneAhead(loader(wild.KeepsWorkers, **keywords)),
    "in one another": lambda **keywords: wild.OneAhead(wild.OnDevice(loader(wild.Doubling, **keywords))),
    "one buffer": lambda **keywords: wild.OneBuffer(loader(**keywords)),
    "calls itself a dataset": lambda **keywords: wild.AsIterableDataset(loader(**keywords)),
    "draws late": lambda **keywords: wild.DrawingLate(loader(**keywords), 7),
    "mixed by its collate function": lambda **keywords: wild.OfParts(
        loader(collate_fn=sources.noisy_collate, **keywords)
    ),
}
seen = pytest.mark.parametrize("name", SEEN)


def under_other_seeds(number: int) -> None:
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


def assert_exact_at_every_cut(make: Callable[[], midepoch.Loader], epochs: int = 2) -> list[Any]:
    with make() as first:
        states, batches = [first.state_dict()], []
        for _ in range(epochs):
            for batch in first:
                batches.append(sources.plain(batch))
                states.append(first.state_dict())
    each = len(batches) // epochs
    for cut, state in enumerate(states[:-1]):
        under_other_seeds(cut)
        assert sources.resumed(make, state) == batches[cut : cut - cut % each + each], cut
    return batches


@seen
def test_it_jumps_and_goes_on_bit_for_bit(name: str) -> None:
    def make() -> midepoch.Loader:
        return midepoch.wrap(SEEN[name](), seed=3)

    with warnings.catch_warnings():
        warnings.simplefilter("error", MidepochWarning)
        batches = assert_exact_at_every_cut(make)
    assert len(batches) == 2 * BATCHES
    bare = make()
    if hasattr(type(bare.source), "__len__"):
        assert len(bare) == BATCHES
    else:  # as the wrapper itself
        with pytest.raises(TypeError, match="has no length"):
            len(bare)
    assert batches[:BATCHES] != batches[BATCHES:]
    capabilities = make().capabilities
    assert all((capabilities.constant_time_resume, capabilities.elastic_world, capabilities.elastic_workers))


@pytest.mark.parametrize("name", ["one ahead", "keeps its workers"])
@pytest.mark.parametrize("persistent", [True, False])
def test_with_workers_it_gives_the_same(name: str, persistent: bool) -> None:
    def make(**keywords: Any) -> midepoch.Loader:
        return midepoch.wrap(SEEN[name](**keywords), seed=3)

    whole, state = sources.heads(make, 2)
    rest = sources.resumed(make, state)
    with make(num_workers=1, persistent_workers=persistent) as working:
        batches = [sources.taken(working) for _ in range(2)]
        assert batches[0] == whole + rest
        working.load_state_dict(state)
        assert sources.taken(working) == rest
        assert sources.taken(working) == batches[1]


def test_the_dataloader_inside_gives_what_it_gives_by_itself() -> None:
    around = midepoch.wrap(wild.OnDevice(loader()), seed=3)
    assert sources.taken(around) == sources.taken(midepoch.wrap(loader(), seed=3))


def test_a_resume_reads_nothing_that_was_consumed() -> None:
    read: list[int] = []

    class Reading(sources.Noisy):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    def make() -> midepoch.Loader:
        return midepoch.wrap(wild.OneAhead(DataLoader(Reading(SIZE), BATCH, shuffle=True)), seed=3, verify="off")

    state = sources.heads(make, 5)[1]
    read.clear()
    sources.resumed(make, state)
    assert len(read) == SIZE - 5 * BATCH


def test_ranks_share_it_and_may_become_more() -> None:
    def make(rank: int = 0, world_size: int = 1) -> midepoch.Loader:
        return midepoch.wrap(wild.OnDevice(loader()), seed=3, world=World(rank, world_size))

    whole = sources.flat(sources.taken(make()))
    first, state = sources.heads(make, 2)
    rest = [sources.flat(sources.resumed(lambda rank=rank: make(rank, 2), state)) for rank in range(2)]  # type: ignore[misc]
    assert sorted(sources.flat(first) + rest[0] + rest[1]) == sorted(whole)


def test_a_distributed_sampler_inside_says_which_rank_it_is() -> None:
    sampler: Any = DistributedSampler(range(SIZE), 2, 1)  # type: ignore[arg-type]
    around = midepoch.wrap(wild.OnDevice(DataLoader(sources.Indices(SIZE), BATCH, sampler=sampler)))
    assert len(around) == 3
    next(iter(around))
    assert around.state_dict()["world_size"] == 2


@seen
def test_the_callers_generators_stay_where_they_are(name: str) -> None:
    batches = iter(midepoch.wrap(SEEN[name](), seed=3))
    for _ in range(BATCHES):
        before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
        next(batches)
        assert before == (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())
        random.random(), np.random.rand(), torch.rand(())


def test_the_wrapper_itself_is_left_alone() -> None:
    source = loader(wild.KeepsFromTheStart)
    before = dict(vars(source))
    sources.taken(midepoch.wrap(source, seed=3))
    assert vars(source) == before
    assert len(list(source)) == BATCHES, "its own iterator has given nothing away"


NOT_SEEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "numbers its batches": (wild.Counting, "makes something else of a batch"),
    "counts in an attribute": (wild.CountingForLater, "keeps something of earlier batches, in CountingForLater.steps"),
    "counts in a loop": (wild.CountingInALoop, "keeps something of earlier batches, in number"),
    "counts in a map": (wild.CountingInAMap, "keeps something of earlier batches, in enumerate"),
    "counts in another generator": (wild.CountingBelow, "in CountingBelow.numbered.number"),
    "counts by an iterator": (wild.CountingByItself, "keeps something of earlier batches, in count"),
    "counts in a slot": (wild.CountingInASlot, "in SlottedIterator.number"),
    "draws from its own generator": (wild.OwnGenerator, "makes a generator of random numbers in each pass"),
    "counts in a module": (
        lambda inside: wild.Normalizing(inside, wild.CountingModule()),
        "keeps something of earlier batches, in CountingModule.calls",
    ),
    "keeps in a module": (
        lambda inside: wild.Normalizing(inside, wild.CountingModule(keeps=True)),
        "keeps something of earlier batches, in CountingModule.batches",
    ),
    "a running mean": (
        lambda inside: wild.Normalizing(inside, wild.RunningMean()),
        "makes something else of a batch",
    ),
    "gives one more": (wild.OneMore, "goes on after the last batch inside"),
    "counts to the end of a whole pass": (wild.CountingAhead, "after a jump, a copy of it raised RuntimeError"),
    "mixes with the batch before": (wild.Mixing, "makes something else of a batch"),
    "remembers batches": (wild.Remembering, "keeps something of earlier batches, in Remembering.memory"),
    "two in one": (wild.Pairs, "for 2 batches it asks for 4"),
    "each twice": (wild.Twice, "for 2 batches it asks for 1"),
    "all at once": (wild.AllAtOnce, "for 2 batches it asks for 6"),
    "looks at one first": (wild.LooksFirst, "more than once"),
    "works in a thread": (wild.WorksInAThread, "in threads of its own"),
    "reads in a thread": (wild.InAThread, "in a thread of its own"),
    "cannot be copied": (wild.Locked, "cannot be copied"),
}


@pytest.mark.parametrize("name", NOT_SEEN)
@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
def test_one_that_does_more_is_replayed(name: str) -> None:
    kind, why = NOT_SEEN[name]

    def make() -> midepoch.Loader:
        return midepoch.wrap(kind(loader()), seed=3)

    first = make()
    assert first.capabilities.constant_time_resume, "not known before it is read"
    given = sources.taken(first)
    assert why in str(first.capabilities.constant_time_resume)
    assert not first.capabilities.constant_time_resume
    assert "then=" in first.capabilities.constant_time_resume.reason
    if "thread" not in name:
        around = kind(loader())
        assert given == sources.taken(midepoch.wrap(lambda: around, seed=3)), "as any iterable"
        # A module keeps for its next pass what it has kept in this one, which is told.
        assert_exact_at_every_cut(make, epochs=1 + (not hasattr(around, "module")))
        assert bool(first.capabilities.exact_order) != hasattr(around, "module")


@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
def test_a_function_that_counts_is_replayed() -> None:
    def make() -> midepoch.Loader:
        return midepoch.wrap(wild.CountingInAFunction(loader()), seed=3)

    first = make()
    assert sources.taken(first) == sources.taken(midepoch.wrap(lambda: wild.CountingInAFunction(loader()), seed=3))
    assert "in counting.<locals>.work.number" in first.capabilities.constant_time_resume.reason
    assert_exact_at_every_cut(make, epochs=1)


COUNTING_DEEPER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "in an object's function": (
        lambda inside: wild.Working(inside, wild.Calls(wild.counting())), "counting.<locals>.work.number"
    ),
    "in a partial": (
        lambda inside: wild.Working(inside, functools.partial(wild.counting())), "counting.<locals>.work.number"
    ),
    "in a default argument": (
        lambda inside: wild.Working(inside, wild.counting_by_default), "counting_by_default.count"
    ),
    "in an iterator that it holds": (wild.InTurn, "in list_iterator"),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTING_DEEPER)
@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
def test_what_counts_further_inside_is_replayed(name: str) -> None:
    kind, where = COUNTING_DEEPER[name]

    def make() -> midepoch.Loader:
        return midepoch.wrap(kind(loader()), seed=3)

    first = make()
    sources.taken(first, 1)
    assert where in first.capabilities.constant_time_resume.reason
    if "default" not in name:  # that count belongs to the process
        assert_exact_at_every_cut(make, epochs=1)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_one_that_counts_its_passes_is_told(at_the_end: bool) -> None:
    around = midepoch.wrap(wild.CountingPasses(loader(), at_the_end), seed=3)
    with pytest.warns(MidepochWarning, match="two passes under the same random numbers begin differently"):
        sources.taken(around)
    assert "something else of a batch in each pass" in around.capabilities.constant_time_resume.reason
    assert not around.capabilities.exact_order


def test_what_its_copies_share_is_believed() -> None:
    around = midepoch.wrap(wild.CountingInItsClass(loader()), seed=3)
    sources.taken(around)
    said = around.capabilities
    assert said.constant_time_resume
    assert said.exact_augmentations.believed
    assert "CountingInItsClass.count belongs to the class" in said.exact_augmentations.reason


def test_generators_that_what_it_works_with_closes_over_follow_from_the_batch() -> None:
    def make() -> midepoch.Loader:
        generator = random.Random(5)
        return midepoch.wrap(wild.Working(loader(), wild.Calls(lambda batch: batch + generator.random())), seed=3)

    assert_exact_at_every_cut(make)
    around = make()
    sources.taken(around, 1)
    assert around.capabilities.constant_time_resume


@pytest.mark.parametrize("source", [lambda: wild.CountingInAFunction(loader()), lambda: counting_around(loader())])
def test_a_closure_that_counts_through_all_passes_is_told(source: Callable[[], Any]) -> None:
    around = midepoch.wrap(source(), seed=3)
    batches = iter(around)
    sources.taken(batches, BATCHES)
    assert around.capabilities.exact_order and not around.capabilities.exact_order.believed
    with pytest.warns(MidepochWarning, match="two passes under the same random numbers begin differently"):
        list(batches)
    assert not around.capabilities.exact_order


def counting_around(inside: Any, most: int = 4) -> Any:
    work = wild.counting(most)
    return lambda: map(work, inside)


def test_a_closure_whose_count_shows_late_is_believed() -> None:
    around = midepoch.wrap(counting_around(loader(), 9), seed=3)
    sources.taken(around)
    assert around.capabilities.exact_order.believed
    assert "counts its units through all passes" in around.capabilities.exact_order.reason


@pytest.mark.parametrize("kind", [wild.Normalizing, wild.NormalizingAhead])
def test_the_statistics_of_its_modules_see_each_batch_once(kind: Any) -> None:
    def saved(around: Any) -> Any:
        return copy.deepcopy(around.module.state_dict())

    bare = kind(loader())
    list(bare)
    around = kind(loader())
    batches = midepoch.wrap(around, seed=3)
    whole, states = [], []
    for batch in batches:
        whole.append(sources.plain(batch))
        states.append((batches.state_dict(), saved(around)))
    assert around.module.num_batches_tracked == bare.module.num_batches_tracked == BATCHES
    final = saved(around)
    said = batches.capabilities.exact_augmentations
    assert said.believed and "BatchNorm1d.running_mean" in said.reason and "save them with the model" in said.reason
    ahead = kind is wild.NormalizingAhead
    assert ("has seen 1 batches more than were handed out" in said.reason) == ahead
    for cut, (state, model) in enumerate(states[:-1], 1):
        around = kind(loader())
        around.module.load_state_dict(model)
        batches = midepoch.wrap(around, seed=3)
        batches.load_state_dict(state)
        assert sources.taken(batches) == whole[cut:]
        if not ahead:
            assert all(torch.equal(value, around.module.state_dict()[name]) for name, value in final.items())


HOLDING_AN_ITERATOR: dict[str, Callable[[], Any]] = {
    "an object": lambda: wild.OnDevice(iter(loader())),
    "its own iterator": lambda: wild.ItsOwn(iter(loader())),
    "a generator": lambda: wild.ItsOwn(2 * batch for batch in loader()),
    "a function": lambda: function_of_an_iterator(iter(loader())),
}


def function_of_an_iterator(batches: Any) -> Any:
    return lambda: map(torch.neg, batches)


@pytest.mark.parametrize("name", HOLDING_AN_ITERATOR)
def test_one_that_holds_an_iterator_alone_is_refused_with_the_cure(name: str) -> None:
    source = HOLDING_AN_ITERATOR[name]()
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"reads an iterator of a DataLoader .*as then="):
        midepoch.wrap(source, seed=3)


OTHER_LOADERS: dict[str, Callable[[], Any]] = {
    "a stream": lambda: DataLoader(sources.Stream(SIZE), BATCH),
    "a stream with samplers": lambda: DataLoader(sources.Exposing(SIZE), BATCH),
    "a StatefulDataLoader": lambda: stateful(),
}


def stateful(**keywords: Any) -> Any:
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
    return loader(stateful_dataloader.StatefulDataLoader, **keywords)


@pytest.mark.parametrize("name", OTHER_LOADERS)
@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
def test_around_a_loader_that_does_not_jump_it_is_replayed(name: str) -> None:
    def make() -> midepoch.Loader:
        return midepoch.wrap(wild.OnDevice(OTHER_LOADERS[name]()), seed=3)

    assert_exact_at_every_cut(make)
    assert not make().capabilities.constant_time_resume


def test_around_a_stateful_loader_with_workers_that_are_kept_it_is_told() -> None:
    around = midepoch.wrap(wild.OnDevice(stateful(num_workers=1, persistent_workers=True)), seed=3)
    with pytest.warns(MidepochWarning, match="wrap that DataLoader itself, with what is done to its batches as then="):
        next(iter(around))
    assert not around.capabilities.exact_order


@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
def test_one_that_begins_again_without_an_end_goes_on() -> None:
    def make() -> midepoch.Loader:
        return midepoch.wrap(wild.ForEver(loader()), seed=3)

    whole = sources.taken(make(), 3 * BATCHES)
    assert len(whole) == 3 * BATCHES
    for cut in (1, BATCHES, 2 * BATCHES + 1):
        assert sources.taken(resumed_after(make, cut), 2) == whole[cut : cut + 2]


def resumed_after(make: Callable[[], midepoch.Loader], cut: int) -> midepoch.Loader:
    state = sources.heads(make, cut)[1]
    around = make()
    around.load_state_dict(state)
    return around


@pytest.mark.parametrize("kind", [wild.Twice, wild.OneMore])
@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
def test_one_that_makes_two_of_an_epochs_only_batch_is_replayed(kind: Any) -> None:
    def make() -> midepoch.Loader:
        return midepoch.wrap(kind(DataLoader(sources.Noisy(SIZE), SIZE, shuffle=True)), seed=3)

    assert len(sources.taken(make())) == 2
    assert_exact_at_every_cut(make)


def test_a_replay_of_it_says_why_and_what_to_pass() -> None:
    make = lambda: midepoch.wrap(wild.Mixing(loader()), seed=3)
    state = sources.heads(make, 2)[1]
    with pytest.warns(MidepochWarning, match="is read again from its start .* with then=, to jump"):
        sources.resumed(make, state)


def function_around() -> Any:
    inside = loader()
    return lambda: enumerate(inside)


@pytest.mark.parametrize("make", [function_around, lambda: wild.OfTwo(loader(), loader()), lambda: reads_a_global])
def test_what_is_not_seen_through_is_told_what_to_pass(make: Callable[[], Any]) -> None:
    around = midepoch.wrap(make(), seed=3)
    sources.taken(around, 2)
    with pytest.warns(MidepochWarning, match="to jump, wrap the DataLoader that it reads, and pass .* as then="):
        sources.resumed(
            lambda: midepoch.wrap(make(), seed=3), sources.heads(lambda: midepoch.wrap(make(), seed=3), 2)[1]
        )
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"shard=True.*shard=False.*as then="):
        next(iter(midepoch.wrap(make(), seed=3, world=World(0, 2))))


INSIDE = loader()


def reads_a_global() -> Any:
    yield from INSIDE


@pytest.mark.parametrize("options", [{"shard": False}, {"randomness": "none"}])
def test_what_divides_itself_or_draws_by_itself_is_replayed(options: dict[str, Any]) -> None:
    around = midepoch.wrap(wild.OnDevice(loader()), seed=3, **options)
    sources.taken(around, 1)
    assert not around.capabilities.constant_time_resume


@pytest.mark.parametrize("make", [wild.Longer, lambda inside: wild.OfTwo(inside, loader())])
def test_what_is_no_wrapper_of_one_is_replayed(make: Any) -> None:
    assert not midepoch.wrap(make(loader()), seed=3).capabilities.constant_time_resume


def sample_in_batch(number: int) -> int:
    """A sample of the first epoch's batch of this number."""
    return int(sources.taken(midepoch.wrap(loader(), seed=3))[number][0][0])


LATER = {
    wild.Skipping: "one for one, 0 ahead; after . batches it has asked for .",
    wild.Stopping: "ended after . batches",
}


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize("cut", [0, 2])
def test_one_that_does_more_later_is_an_error(kind: Any, cut: int) -> None:
    def make() -> midepoch.Loader:
        return midepoch.wrap(kind(loader(), sample_in_batch(4)), seed=3)

    around = make()
    around.load_state_dict(sources.heads(make, cut)[1])
    given = []
    with pytest.raises(SourceError, match=f"{LATER[kind]}.*then="):
        for batch in around:
            given.append(sources.plain(batch))
    assert len(given) == 4 - cut


def test_one_that_begins_twice_later_is_an_error() -> None:
    source = wild.LookingLater(loader())
    around = midepoch.wrap(source, seed=3)
    assert len(sources.taken(around)) == BATCHES
    source.left_out = 1
    with pytest.raises(SourceError, match=r"no longer one for one: it begins to iterate the DataLoader .*then="):
        next(iter(around))


def test_a_jump_whose_wrapper_is_another_now_is_an_error() -> None:
    state = sources.heads(lambda: midepoch.wrap(wild.OnDevice(loader()), seed=3), 2)[1]
    with pytest.raises(SourceError, match="when the state was saved, and does not now"):
        sources.resumed(lambda: midepoch.wrap(wild.Mixing(loader()), seed=3), state)


@pytest.mark.parametrize("kind", [wild.OnDevice, wild.OneAhead])
def test_a_batch_that_cannot_be_read_is_passed_over_alone(kind: Any, tmp_path: Path) -> None:
    marker = tmp_path / "failing"
    marker.touch()
    whole = sources.taken(midepoch.wrap(kind(loader()), seed=3))
    for number in (0, 1, 3, BATCHES - 1):
        dataset = sources.Failing(SIZE, [sample_in_batch(number)], marker)
        batches, got, failed = iter(midepoch.wrap(kind(DataLoader(dataset, BATCH, shuffle=True)), seed=3)), [], 0
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


def test_wrapping_reads_nothing_and_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [make(num_workers=0) for make in SEEN.values()]
    read: list[int] = []
    monkeypatch.setattr(sources.Noisy, "__getitem__", lambda dataset, index: read.append(index))
    before = threading.enumerate()
    for source in made:
        midepoch.wrap(source, seed=3)
    assert threading.enumerate() == before and not read


def test_a_copy_of_a_loader_goes_on_by_itself() -> None:
    around = midepoch.wrap(wild.OneAhead(loader()), seed=3)
    whole = sources.taken(around)
    around = midepoch.wrap(wild.OneAhead(loader()), seed=3)
    sources.taken(around, 2)
    twin = copy.copy(around)
    twin.load_state_dict(around.state_dict())
    assert sources.taken(twin) == whole[2:]


def test_then_works_on_what_the_wrapper_gives() -> None:
    make = lambda: midepoch.wrap(wild.OneAhead(loader()), seed=3, then=wild.Erasing(1.0))
    assert_exact_at_every_cut(make)


class Adding(wild.Around):
    """Draws for each batch, and leaves the indices as they are."""

    def __iter__(self) -> Any:
        for batch in self.loader:
            yield batch + torch.rand(1, dtype=torch.float64) * torch.tensor([0, 1, 1, 1])


def adding(
    rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = 3, seed: int = 0, size: int = 41
) -> midepoch.Loader:
    source: Any = wild.KeepsWorkers(sources.Noisy(size), batch_size, shuffle=True, num_workers=num_workers)
    return midepoch.wrap(Adding(source), seed=seed, world=World(rank, world_size))


def indices_of(batch: Any) -> list[int]:
    return [int(sample[0]) for sample in batch]


@pytest.mark.long
class TestLaws(ResumableTests):
    make_loader = staticmethod(adding)
    identify = staticmethod(indices_of)
    elastic_content = False  # the wrapper draws for a batch
    shuffled = True
    quick = True


@pytest.mark.long
def test_passing_on_costs_few_microseconds_a_batch() -> None:
    def cost(around: Any) -> float:
        best = 1.0
        for _ in range(5):
            batches = iter(midepoch.wrap(around(DataLoader(range(4000), 4, collate_fn=list)), seed=3))  # type: ignore[arg-type]
            sources.taken(batches, 10)
            since = time.thread_time()
            count = sum(1 for _ in batches)
            best = min(best, (time.thread_time() - since) / count)
        return best

    assert cost(PassingOn) - cost(lambda inside: inside) < 20e-6


class PassingOn(wild.Around):
    """Nothing but that."""

    def __iter__(self) -> Any:
        for batch in self.loader:  # noqa: UP028  # as most are written
            yield batch


class Holding(wild.Around):
    """Draws by a method of numpy's global generator that it holds."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.draw: Any = np.random.rand

    def __iter__(self) -> Any:
        for batch in self.loader:
            yield batch, self.draw.__self__ is np.random.mtrand._rand, self.draw()


def test_a_global_generator_stays_the_one_that_it_is() -> None:
    """A copy of it would be saved and restored with each batch, at 90 microseconds."""
    loader = midepoch.wrap(Holding(DataLoader(range(12), 2, collate_fn=list)), seed=3)  # type: ignore[arg-type]
    assert loader.capabilities.constant_time_resume
    given = list(loader)
    assert all(is_global for _, is_global, _ in given) and len({number for *_, number in given}) == 6


class Pairing:
    """Gives two batches of the loader inside as one, and has no length."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        yield from zip(batches, batches, strict=False)


def test_a_wrapper_has_no_length_but_its_own_before_it_is_tried() -> None:
    loader = midepoch.wrap(Pairing(DataLoader(sources.Indices(12), batch_size=2)), seed=1)
    with pytest.raises(TypeError, match="has no length"):
        len(loader)
    assert len(list(loader)) == 3
    with pytest.raises(TypeError, match="has no length"):
        len(loader)
