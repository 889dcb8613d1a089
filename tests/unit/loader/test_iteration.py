"""The rules of iteration, one by one."""

from __future__ import annotations

import functools
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import MidepochError, MidepochWarning, SourceError, StateError, World
from midepoch.loader.loader import Loader
from support import sources


def shuffled(size: int = 22, batch_size: int = 4, **keywords: Any) -> Loader:
    """Six batches an epoch."""
    return midepoch.wrap(sources.noisy_loader(size, batch_size=batch_size), **{"seed": 5, **keywords})


def stream(count: int = 7) -> Loader:
    """Seven batches an epoch, of unknown length."""
    return midepoch.wrap(functools.partial(sources.numbers, count), seed=5)


MAKERS: dict[str, Callable[[], Loader]] = {
    "shuffled": shuffled,
    "stream": stream,
    "driven": lambda: midepoch.wrap(DataLoader(sources.Exposing(22), batch_size=4), seed=5),
    "list": lambda: midepoch.wrap([[10], [20], [30], [40], [50]], seed=5),
    "stream of its own": lambda: midepoch.wrap(DataLoader(sources.Stream(22), batch_size=4), seed=5, shard=False),
    "stream in batches": lambda: midepoch.wrap(DataLoader(sources.Stream(22), batch_size=4), seed=5),
    "state of its own": lambda: midepoch.wrap(sources.Counter(6)),
    "workers": lambda: midepoch.wrap(sources.noisy_loader(num_workers=2, prefetch_factor=2), seed=5),
}

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def epochs(make: Callable[[], Loader], count: int) -> list[list[Any]]:
    with make() as loader:
        return [sources.taken(loader) for _ in range(count)]


def place(loader: Loader) -> tuple[int, int]:
    return loader.epoch, loader.position


# --- 1. the state says what was received ---


@maker
def test_every_cut_continues_exactly_and_into_the_next_epoch(make: Callable[[], Loader]) -> None:
    first, second = epochs(make, 2)
    with make() as loader:
        batches, states = iter(loader), [loader.state_dict()]
        for expected, batch in zip(first, batches, strict=True):
            assert sources.plain(batch) == expected  # asking has no effect
            states.append(loader.state_dict())
            assert place(loader) == (states[-1]["epoch"], states[-1]["position"])
    assert [state["position"] for state in states[:3]] == [number * states[1]["position"] for number in range(3)]
    for cut in {0, 1, 2, len(first) - 1, len(first)}:
        with make() as loader:
            loader.load_state_dict(states[cut])
            iter(loader)
            assert loader.state_dict() == states[cut]
            assert place(loader) == (states[cut]["epoch"], states[cut]["position"])
            expected = [first[cut:], second] if cut < len(first) else [second]
            assert [sources.taken(loader) for _ in expected] == expected, cut


@pytest.mark.parametrize("kind", ["shuffled", "stream", "workers"])
def test_batches_in_flight_resume_exactly_across_epochs(kind: str) -> None:
    make, seen, states = MAKERS[kind], [], []
    trained = itertools.cycle([0, 1, 3])
    with make() as loader:
        for _ in range(2):
            for batch in loader:
                seen.append(sources.plain(batch))
                back = min(next(trained), len(seen))
                states.append((len(seen) - back, loader.state_dict(in_flight=back)))
    for done, state in states:
        rest = sources.resumed(make, state)
        assert rest and (rest == seen[done : done + len(rest)] or done + len(rest) > len(seen))


def test_a_reset_is_an_error_that_says_what_to_do() -> None:
    loader = shuffled()
    list(loader)
    before = loader.state_dict()
    with pytest.raises(AttributeError, match=r"no reset\(\).*leave the call out.*loader\.seek\(epoch=0\)"):
        loader.reset()
    assert not hasattr(loader, "reset")  # a trainer that asks first has nothing to do
    assert loader.state_dict() == before


def test_more_in_flight_than_known_is_refused() -> None:
    loader = shuffled()
    with pytest.raises(StateError, match="in_flight=1"):
        loader.state_dict(in_flight=1)
    batches = iter(loader)
    next(batches)
    loader.state_dict(in_flight=1)
    with pytest.raises(StateError, match="in_flight=2"):
        loader.state_dict(in_flight=2)
    loader.load_state_dict(loader.state_dict())
    assert loader.state_dict(in_flight=0)
    with pytest.raises(StateError, match="in_flight=1"):
        loader.state_dict(in_flight=1)
    for wrong in (-1, 1.0, True, "1", None):
        with pytest.raises(ValueError, match="in_flight"):
            loader.state_dict(in_flight=wrong)  # type: ignore[arg-type]


# --- 2. passes ---


@maker
def test_iter_has_no_side_effect(make: Callable[[], Loader]) -> None:
    with make() as loader, make() as other:
        expected = sources.taken(other)
        iterators = [iter(loader) for _ in range(3)]
        assert place(loader) == (0, 0)
        first = next(iterators[1])
        iter(loader)
        rest = [sources.plain(batch) for batch in iterators[1]]
        assert [sources.plain(first), *rest] == expected


@maker
def test_a_pass_after_a_break_is_a_new_epoch(make: Callable[[], Loader]) -> None:
    first, second, third = epochs(make, 3)
    with make() as loader, warnings.catch_warnings():
        warnings.simplefilter("error", MidepochWarning)
        assert sources.taken(loader, 2) == first[:2]
        assert sources.taken(loader, 2) == second[:2]
        assert loader.epoch == 1
        assert sources.taken(loader) == third


def test_passes_given_up_at_their_first_batch_are_told_once() -> None:
    """So Python shows it once, as long as one line does it."""
    with shuffled() as loader, pytest.warns(MidepochWarning) as told:
        assert [sources.taken(loader, 1) for _ in range(3)] == [each[:1] for each in epochs(shuffled, 3)]
    words = {str(each.message) for each in told}
    assert len(told) == 2 and len(words) == 1
    assert "after its first batch" in str(words) and "loader.peek()" in str(words)


def test_what_a_load_had_continued_is_not_given_up_in_silence() -> None:
    _, state = sources.heads(shuffled, 2)
    loader = shuffled()
    loader.load_state_dict(state)
    sources.taken(loader, 1)
    with pytest.warns(MidepochWarning, match=r"epoch 0.*position 12.*keep the iterator"):
        assert sources.taken(loader, 2) == epochs(shuffled, 2)[1][:2]
    with warnings.catch_warnings():
        warnings.simplefilter("error", MidepochWarning)
        sources.taken(loader, 1)  # once is enough: this epoch was not continued by a load


@maker
def test_peek_gives_nothing_up(make: Callable[[], Loader]) -> None:
    whole = epochs(make, 2)
    with make() as loader:
        got: list[Any] = []
        for _ in range(2):
            batches = iter(loader)
            for expected in whole[len(got) > 0]:
                if loader.epoch == 0 and len(got) >= len(whole[0]):
                    # Of unknown length: the state still stands at the end of the epoch before.
                    got.append(sources.plain(next(batches)))
                    continue
                before = loader.state_dict()
                assert sources.plain(loader.peek()) == expected
                assert sources.plain(loader.peek()) == expected
                assert loader.state_dict() == before
                got.append(sources.plain(next(batches)))
            got += [sources.plain(batch) for batch in batches]
        assert got == whole[0] + whole[1]


def test_peek_after_the_end_of_a_pass_shows_the_next_epoch() -> None:
    first, second = epochs(shuffled, 2)
    loader = shuffled()
    batches = iter(loader)
    assert [sources.plain(next(batches)) for _ in range(6)] == first
    with pytest.raises(StopIteration):
        loader.peek()  # of the pass that has given its last batch
    assert place(loader) == (1, 0)
    assert next(batches, None) is None
    assert sources.plain(loader.peek()) == second[0]
    assert place(loader) == (1, 0)
    assert sources.taken(loader) == second


def test_a_pass_that_had_ended_is_no_error_later() -> None:
    """A trainer that counts batches never asks for StopIteration; the older iterator still has one to give."""
    loader = shuffled()
    older = iter(loader)
    for _ in range(6):
        next(older)
    newer = iter(loader)
    next(newer)
    assert next(older, "over") == "over"
    next(newer)
    assert place(loader) == (1, 8)


@maker
def test_an_exhausted_iterator_stays_exhausted(make: Callable[[], Loader]) -> None:
    with make() as loader:
        batches = iter(loader)
        list(batches)
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(batches)
        at_the_end = place(loader)
        sources.taken(loader, 1)
        with pytest.raises(StopIteration):
            next(batches)
        assert at_the_end in ((1, 0), (0, loader.position), (0, 7), (0, 22), (0, 6))


# --- 3. the end of an epoch ---


@pytest.mark.parametrize("peeks", [False, True])
def test_the_first_batch_may_be_the_last(peeks: bool) -> None:
    """In an epoch of one batch, or after a load that leaves one."""
    short, resumed = shuffled(4), shuffled()
    resumed.load_state_dict(sources.heads(shuffled, 5)[1])
    for loader in (short, resumed):
        batches = iter(loader)
        if peeks:
            loader.peek()
        next(batches)
        assert place(loader) == (1, 0)
        assert loader.state_dict()["epoch"] == 1
        assert next(batches, None) is None
        next(iter(loader))
        assert loader.epoch == (2 if loader is short else 1)


def test_of_unknown_length_the_state_stays_until_the_end() -> None:
    first, second = epochs(stream, 2)
    loader = stream()
    states = [loader.state_dict() for _ in loader]
    assert [(state["epoch"], state["position"]) for state in states[-2:]] == [(0, 6), (0, 7)]
    assert place(loader) == (1, 0) and loader.peek() == second[0]
    for state in (states[-1], loader.state_dict()):
        fresh = stream()
        fresh.load_state_dict(state)
        assert sources.taken(fresh) == second != first
        assert place(fresh) == (2, 0)


@pytest.mark.parametrize(
    ("tail", "drop_last", "over"), [("drop", False, True), ("pad", True, True), ("pad", False, False)]
)
def test_a_load_that_leaves_too_little_starts_the_next_epoch(tail: Any, drop_last: bool, over: bool) -> None:
    """Of 22 samples 21 are behind: too little for two ranks under drop, enough under pad."""

    def make() -> Loader:
        return midepoch.wrap(sources.noisy_loader(drop_last=drop_last), seed=5, tail=tail, world=World(0, 2))

    _, state = sources.heads(shuffled, 1)
    loader = make()
    loader.load_state_dict(midepoch.reseal({**state, "position": 21}))
    batches = sources.taken(loader)
    assert (batches == epochs(make, 2)[1]) == over
    assert over or len(batches) == 1


def test_an_empty_source_ends_at_once() -> None:
    for loader in (midepoch.wrap([], seed=0), midepoch.wrap(DataLoader(sources.Indices(0), batch_size=4))):
        assert len(loader) == 0
        assert sources.taken(loader) == []
        assert sources.taken(loader) == []
    short = midepoch.wrap(sources.noisy_loader(3, drop_last=True), seed=0)
    assert len(short) == 0
    assert sources.taken(short) == sources.taken(short) == []


# --- 4. loading ---


@maker
def test_loading_works_at_any_time(make: Callable[[], Loader]) -> None:
    whole = epochs(make, 1)[0]
    _, state = sources.heads(make, 3)
    with make() as loader:
        batches = iter(loader)
        for _ in range(2):  # before the first batch, and in mid-epoch: the pass that runs goes on from there
            loader.load_state_dict(state)
            assert sources.plain(next(batches)) == whole[3]
        loader.load_state_dict(state)
        loader.load_state_dict(state)
        assert [sources.plain(batch) for batch in batches] == whole[3:]
        loader.load_state_dict(state)  # behind the end
        assert sources.taken(loader) == whole[3:]


# --- 5. set_epoch ---


def test_the_same_epoch_changes_nothing() -> None:
    whole = epochs(shuffled, 1)[0]
    _, state = sources.heads(shuffled, 2)
    loader = shuffled()
    loader.set_epoch(0)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(0)
    loader.sampler.set_epoch(0)
    assert [sources.plain(batch) for batch in batches] == whole[1:]
    loaded = shuffled()
    loaded.load_state_dict(state)
    loaded.set_epoch(0)
    assert sources.taken(loaded) == whole[2:]


def test_a_later_epoch_ends_what_was_begun_or_loaded() -> None:
    whole = epochs(shuffled, 4)
    _, state = sources.heads(shuffled, 2)
    fresh, begun, loaded = shuffled(), shuffled(), shuffled()
    fresh.set_epoch(3)
    assert place(fresh) == (3, 0)
    assert sources.taken(fresh) == whole[3]
    batches = iter(begun)
    next(batches)
    begun.set_epoch(3)
    assert place(begun) == (3, 0)
    assert begun.state_dict()["epoch"] == 3
    assert next(batches, None) is None
    assert sources.taken(begun) == whole[3]
    loaded.load_state_dict(state)
    sources.taken(loaded, 0)
    assert place(loaded) == (0, 8)


@pytest.mark.parametrize("apart", [1, -1, 5])
def test_set_epoch_drops_nothing_of_a_loaded_epoch(apart: int) -> None:
    whole = epochs(shuffled, 5)
    loader = shuffled()
    loader.seek(epoch=1, position=8)
    state = loader.state_dict()
    loader = shuffled()
    loader.load_state_dict(state)
    told = rf"set_epoch\({1 + apart}\) is not followed.*epoch 1.*{abs(apart)} too {'high' if apart > 0 else 'low'}"
    with pytest.warns(MidepochWarning, match=told + r".*loader\.seek"):
        loader.sampler.set_epoch(1 + apart)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MidepochWarning)
        loader.set_epoch(1 + apart)  # who is told once need not be told again
        assert place(loader) == (1, 8)
        assert sources.taken(loader) == whole[1][2:]
        # The caller's epochs follow one another: so do ours.
        loader.set_epoch(2 + apart)
        assert place(loader) == (2, 0)
        assert sources.taken(loader) == whole[2]
        loader.set_epoch(3 + apart)
        assert sources.taken(loader) == whole[3]
        loader.set_epoch(4 + apart)
        assert place(loader) == (4, 0)
        loader.set_epoch(4)  # the numbers agree again
        assert place(loader) == (4, 0)
        assert sources.taken(loader) == whole[4]
        loader.set_epoch(6)
        assert place(loader) == (6, 0)


def test_an_earlier_epoch_is_ignored_once_there_is_progress() -> None:
    whole = epochs(shuffled, 4)
    fresh = shuffled()
    fresh.set_epoch(3)
    fresh.set_epoch(1)  # nothing was loaded or begun: it counts
    assert sources.taken(fresh) == whole[1]
    fresh.set_epoch(0)  # rolled
    assert place(fresh) == (2, 0)
    state = fresh.state_dict()
    loaded = shuffled()
    loaded.load_state_dict(state)
    loaded.set_epoch(1)
    assert place(loaded) == (2, 0)
    batches = iter(loaded)
    next(batches)
    loaded.set_epoch(1)
    assert place(loaded) == (2, 4)
    assert [sources.plain(batch) for batch in batches] == whole[2][1:]


# --- seek, counts, close, copies ---


def test_seek_skips_and_goes_back() -> None:
    whole = epochs(shuffled, 3)
    loader = shuffled()
    loader.seek(position=8)
    assert loader.state_dict()["position"] == 8
    assert sources.taken(loader) == whole[0][2:]
    loader.seek(epoch=2)
    batches = iter(loader)
    assert sources.plain(next(batches)) == whole[2][0]
    loader.seek(epoch=0, position=4)
    assert [sources.plain(batch) for batch in batches] == whole[0][1:]
    loader.seek(epoch=1, position=22)  # its end
    assert sources.taken(loader) == whole[2]
    loader.seek()
    assert place(loader) == (3, 0)


@pytest.mark.parametrize("epoch", [-1, 1.0, True, "1", None])
def test_set_epoch_checks_its_argument(epoch: Any) -> None:
    with pytest.raises(ValueError, match="epoch"):
        shuffled().set_epoch(epoch)


@pytest.mark.parametrize("to", [{"position": -1}, {"position": 23}, {"position": 2.0}, {"epoch": -1}, {"epoch": "1"}])
def test_seek_checks_its_arguments(to: dict[str, Any]) -> None:
    loader = shuffled()
    sources.taken(loader, 1)
    with pytest.raises(ValueError, match="must be"):
        loader.seek(**to)
    assert place(loader) == (0, 4)


def test_a_source_with_a_state_of_its_own_is_not_sought() -> None:
    with pytest.raises(StateError, match="load a state instead"):
        midepoch.wrap(sources.Counter(6)).seek(position=2)


def test_the_batches_done_and_left() -> None:
    loader = shuffled()
    assert (len(loader), loader.batches_done, loader.batches_left) == (6, 0, 6)
    done = [(loader.batches_done, loader.batches_left) for _ in loader]
    assert done == [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1), (0, 6)]
    _, state = sources.heads(shuffled, 3)
    # 12 of 22 samples are behind: on 2 ranks, 10 are left for global batches of 8, so 2 batches of 3.
    for world_size, batch_size, expected in ((2, 4, (1, 2)), (1, 3, (4, 4)), (3, 2, (2, 2)), (1, 20, (1, 1))):
        elsewhere = shuffled(batch_size=batch_size, world=World(0, world_size))
        elsewhere.load_state_dict(state)
        assert (elsewhere.batches_done, elsewhere.batches_left) == expected
        assert len(sources.taken(elsewhere)) == expected[1]


@pytest.mark.parametrize("ask", [len, lambda loader: loader.batches_left], ids=["len", "batches_left"])
def test_a_length_that_is_unknown_is_a_type_error(ask: Callable[[Any], int]) -> None:
    with pytest.raises(TypeError, match="length"):
        ask(stream())


@maker
def test_closing_keeps_the_state(make: Callable[[], Loader]) -> None:
    whole = epochs(make, 2)
    with make() as loader:
        loader.close()  # before anything
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    assert loader.state_dict() == state
    with pytest.raises(MidepochError, match="closed"):
        next(batches)
    loader.close()
    assert sources.resumed(make, loader.state_dict()) == whole[0][1:]
    if loader.capabilities.rank_independent:
        assert sources.taken(loader) == whole[1]  # a new pass is a new epoch
    loader.close()


@pytest.mark.parametrize("kind", ["driven", "stream"])
def test_a_pickled_loader_stands_where_it_stood(kind: str) -> None:
    loader = MAKERS[kind]()
    sources.taken(loader, 1)
    there = pickle.loads(pickle.dumps(loader))
    assert there.state_dict() == loader.state_dict()
    assert sources.taken(there) == epochs(MAKERS[kind], 2)[1]


# --- 7. what goes wrong in the source ---


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_sample_keeps_the_state(num_workers: int, tmp_path: Path) -> None:
    marker = tmp_path / "failing"
    marker.touch()
    whole = epochs(shuffled, 2)
    index = int(whole[0][2][1][0])
    dataset = sources.Failing(22, [index], marker)
    source = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=num_workers)
    loader = midepoch.wrap(source, seed=5, on_error="retry")
    batches = iter(loader)
    assert [sources.plain(next(batches)) for _ in range(2)] == whole[0][:2]
    state = loader.state_dict()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"sample {index} cannot be read"):
            next(batches)
        assert loader.state_dict() == state
    marker.unlink()
    assert [sources.plain(batch) for batch in batches] == whole[0][2:]
    assert sources.taken(loader) == whole[1]
    loader.close()
    assert sources.resumed(shuffled, state) == whole[0][2:]


def test_who_asks_again_for_a_bad_batch_of_a_stream_is_told() -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)
        raise ValueError("a bad sample")

    batches = iter(midepoch.wrap(numbers))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error", MidepochWarning)
        with pytest.raises(ValueError, match="a bad sample"):
            next(batches)
    told = pytest.warns(MidepochWarning, match="position 3 of epoch 0 has failed again.*pass over bad samples")
    with told, pytest.raises(ValueError, match="a bad sample"):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("bad", [[0], [2, 3], [4, 5]], ids=str)
def test_who_goes_on_after_an_error_gets_the_batch_behind(bad: list[int], num_workers: int, tmp_path: Path) -> None:
    marker = tmp_path / "failing"
    marker.touch()
    whole = epochs(shuffled, 2)
    dataset = sources.Failing(22, [int(whole[0][number][1][0]) for number in bad], marker)
    loader = midepoch.wrap(DataLoader(dataset, batch_size=4, shuffle=True, num_workers=num_workers), seed=5)
    batches, states, got = iter(loader), [loader.state_dict()], []
    with pytest.warns(MidepochWarning) as told:
        for _ in range(7):
            try:
                got.append(sources.plain(next(batches)))
            except StopIteration:
                break
            except RuntimeError as error:
                assert "cannot be read" in str(error)
                assert loader.state_dict() == states[-1]  # a restart tries it again
            else:
                states.append(loader.state_dict())
    assert got == [batch for number, batch in enumerate(whole[0]) if number not in bad]
    (passed_over,) = [str(each.message) for each in told]
    first, last = 4 * bad[0], min(4 * bad[-1] + 4, 22) - 1
    assert f"positions {first} to {last} of epoch 0 were passed over" in passed_over
    assert "cannot be read" in passed_over
    assert place(loader) == (1, 0)
    marker.unlink()
    assert sources.taken(loader) == whole[1]
    loader.close()
    assert sources.resumed(shuffled, states[bad[0]]) == whole[0][bad[0] :]


def test_in_a_larger_world_a_failed_batch_is_given_again(tmp_path: Path) -> None:
    marker = tmp_path / "failing"
    marker.touch()
    dataset = sources.Failing(22, range(8), marker)
    for on_error, following in ((None, 1), ("retry", 1), ("next", 2)):
        settings: Any = {"on_error": on_error, "world": midepoch.World(1, 2), "seed": 5}
        loader = midepoch.wrap(DataLoader(dataset, batch_size=2), **settings)
        whole = sources.taken(midepoch.wrap(DataLoader(sources.Noisy(22), batch_size=2), **settings))
        batches = iter(loader)
        marker.touch()
        with pytest.raises(RuntimeError):
            next(batches)
        marker.unlink()
        assert sources.plain(next(batches)) == whole[following - 1]


def test_on_error_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"on_error='next'.*leave on_error out"):
        midepoch.wrap(lambda: iter(range(3)), on_error="next")


def own_state(remember: int) -> Loader:
    source = StatefulDataLoader(sources.Noisy(22), batch_size=4, shuffle=True)
    return midepoch.wrap(source, seed=5, remember=remember)


def test_a_source_with_its_own_state_remembers_batches() -> None:
    whole = epochs(functools.partial(own_state, 0), 1)[0]
    loader = own_state(2)
    batches = iter(loader)
    for count in range(1, 5):
        next(batches)
        for in_flight in range(min(count, 2) + 1):
            state = loader.state_dict(in_flight)
            assert state["position"] == count - in_flight
            assert sources.resumed(functools.partial(own_state, 0), state) == whole[count - in_flight :]
    with pytest.raises(StateError, match="in_flight=3, but the states of 2 batches are kept: pass remember="):
        loader.state_dict(3)
    forgetful = own_state(0)
    batches = iter(forgetful)
    next(batches)
    next(batches)
    with pytest.raises(StateError, match="remember="):
        forgetful.state_dict(1)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("kind", ["list", "dataset", "iterable"])
def test_a_length_that_changes_in_mid_epoch_is_named(kind: str, change: int) -> None:
    items = list(range(22))
    source = {"list": items, "dataset": DataLoader(items, batch_size=4), "iterable": Measured(items)}[kind]  # type: ignore[arg-type]
    loader = midepoch.wrap(source, seed=0)
    batches = iter(loader)
    next(batches)
    before = place(loader)
    items[:] = items[:-1] if change < 0 else [*items, 22]
    with pytest.raises(SourceError, match=rf"22.*{22 + change}"):
        next(batches)
    assert place(loader) == before


class Measured(sources.Exposing):
    """With a length."""

    def __init__(self, items: list[int]) -> None:
        super().__init__(len(items))
        self.items = items

    def __len__(self) -> int:
        return len(self.items)


class Ending(sources.Indices):
    """Raises StopIteration at a sample, as ``next(iterator)`` in __getitem__ does when the iterator is over."""

    def __getitem__(self, index: int) -> int:
        if index == 9:
            raise StopIteration
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("first", [0, 8])
def test_a_sample_that_ends_the_iteration_loses_no_batch(first: int, workers: int) -> None:
    loader = midepoch.wrap(DataLoader(Ending(22), batch_size=4, num_workers=workers), seed=0, verify="off")
    loader.seek(position=first)
    batches = iter(loader)
    for _ in range(2 - first // 4):
        next(batches)
    for _ in range(3):
        with pytest.raises(SourceError, match="ended"):
            next(batches)
        assert place(loader) == (0, 8)
    loader.close()


def test_the_world_must_not_change_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    loader = midepoch.wrap(sources.noisy_loader(), seed=5)
    sources.taken(loader, 2)
    state = loader.state_dict()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MidepochError, match=r"0 of 1.*1 of 2"):
        sources.taken(loader)
    # After a load it may.
    loader.load_state_dict(state)
    assert loader.batches_left == 2
    there = shuffled(world=World(1, 2))
    there.load_state_dict(state)
    assert sources.taken(loader) == sources.taken(there)


@pytest.mark.parametrize(
    ("keywords", "kind"),
    [
        ({"seed": -1}, ValueError),
        ({"seed": 1 << 64}, ValueError),
        ({"seed": 1.0}, ValueError),
        ({"seed": True}, ValueError),
        ({"world": (0, 1)}, TypeError),
        ({"shard": 1}, TypeError),
        ({"randomness": "batch"}, ValueError),
        ({"tail": "cut"}, ValueError),
        ({"fingerprint": "f" * 65}, ValueError),
        ({"fingerprint": 7}, ValueError),
        ({"remember": -1}, ValueError),
        ({"remember": 1025}, ValueError),
        ({"remember": 1.0}, TypeError),
        ({"remember": True}, TypeError),
        ({"then": 3}, TypeError),
        ({"verify": "always"}, ValueError),
        ({"on_error": "skip"}, ValueError),
        ({"on_error": 1}, ValueError),
    ],
    ids=str,
)
def test_wrap_checks_its_arguments(keywords: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(keywords))):
        midepoch.wrap([1, 2], **keywords)


def test_a_loader_is_true_unless_it_is_known_to_be_empty() -> None:
    assert midepoch.wrap(sources.numbers) and midepoch.wrap([1]) and not midepoch.wrap([])
