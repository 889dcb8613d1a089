"""The rules of iteration, as far as drawn sequences of operations (test_traces) and their table have them not."""

from __future__ import annotations

import re
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


pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")


def epochs(make: Callable[[], Loader], count: int) -> list[list[Any]]:
    with make() as loader:
        return [sources.taken(loader) for _ in range(count)]


def place(loader: Loader) -> tuple[int, int]:
    return loader.epoch, loader.position


def test_a_reset_is_an_error_that_says_what_to_do() -> None:
    loader = shuffled()
    with pytest.raises(AttributeError, match=r"no reset\(\).*leave the call out.*loader\.seek\(epoch=0\)"):
        loader.reset()
    assert not hasattr(loader, "reset")  # a trainer that asks first has nothing to do


# --- passes ---


def test_passes_given_up_at_their_first_batch_are_told_once() -> None:
    """So Python shows it once, as long as one line does it."""
    with shuffled() as loader, pytest.warns(MidepochWarning) as told:
        assert [sources.taken(loader, 1) for _ in range(3)] == [each[:1] for each in epochs(shuffled, 3)]
    words = {str(each.message) for each in told}
    assert len(told) == 2 and len(words) == 1
    assert "after its first batch" in str(words) and "loader.peek()" in str(words)


def test_what_a_load_had_continued_is_not_given_up_in_silence() -> None:
    loader = sources.loaded(shuffled(), sources.heads(shuffled, 2)[1])
    sources.taken(loader, 1)
    with pytest.warns(MidepochWarning, match=r"epoch 0.*position 12.*keep the iterator"):
        assert sources.taken(loader, 2) == epochs(shuffled, 2)[1][:2]
    with warnings.catch_warnings(action="error"):
        sources.taken(loader, 1)  # once is enough: this epoch was not continued by a load


def test_a_pass_that_had_ended_is_no_error_later() -> None:
    """A trainer that counts batches never asks for StopIteration; the older iterator still has one to give."""
    loader = shuffled()
    older = iter(loader)
    sources.taken(older, 6)
    next(newer := iter(loader))
    assert [next(older, "over") for _ in range(2)] == ["over"] * 2
    next(newer)
    assert place(loader) == (1, 8)


# --- set_epoch ---


@pytest.mark.parametrize("apart", [1, -1])
def test_set_epoch_drops_nothing_of_a_loaded_epoch(apart: int) -> None:
    whole, loader = epochs(shuffled, 5), shuffled()
    loader.set_epoch(3)
    loader.set_epoch(1)
    assert place(loader) == (1, 0), "before anything was read, an earlier one counts"
    loader.seek(epoch=1, position=8)
    loader = sources.loaded(shuffled(), loader.state_dict())
    told = rf"set_epoch\({1 + apart}\) is not followed.*epoch 1.*{abs(apart)} too {'high' if apart > 0 else 'low'}"
    with pytest.warns(MidepochWarning, match=told + r".*loader\.seek"):
        loader.sampler.set_epoch(1 + apart)
    with warnings.catch_warnings(action="error"):
        loader.set_epoch(1 + apart)  # who is told once need not be told again
        assert place(loader) == (1, 8)
        assert sources.taken(loader) == whole[1][2:]
        # The caller's epochs follow one another, and so do ours; in the end the numbers agree again.
        for epoch, said in ((2, 2 + apart), (3, 3 + apart), (4, 4)):
            loader.set_epoch(said)
            assert place(loader) == (epoch, 0)
            assert sources.taken(loader) == whole[epoch]
        loader.set_epoch(6)
        assert place(loader) == (6, 0)


# --- counts, and calls that make no sense ---


NUMBERS = (-1, 1.0, True, "1", None)
PLACES: tuple[dict[str, Any], ...] = (
    {"position": -1}, {"position": 23}, {"position": 2.0}, {"epoch": -1}, {"epoch": "1"},
)  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *(("set_epoch", {"epoch": number}, ValueError, "epoch") for number in NUMBERS),
    *(("seek", place, ValueError, "must be") for place in PLACES),
    *(("state_dict", {"in_flight": number}, ValueError, "in_flight") for number in NUMBERS),
    ("state_dict", {"in_flight": 2}, StateError, "in_flight=2"),
]


def test_calls_that_make_no_sense_change_nothing() -> None:
    loader = shuffled()
    sources.taken(loader, 1)
    for name, arguments, kind, words in REFUSED:
        with pytest.raises(kind, match=words):
            getattr(loader, name)(**arguments)
        assert place(loader) == (0, 4) and loader.state_dict(in_flight=1)["position"] == 0
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="in_flight=1"):
        loader.state_dict(in_flight=1)


def test_what_a_source_cannot_say_is_an_error() -> None:
    with pytest.raises(StateError, match="load a state instead"):
        midepoch.wrap(sources.Counter(6)).seek(position=2)
    for ask in (len, lambda loader: loader.batches_left):
        with pytest.raises(TypeError, match="length"):
            ask(midepoch.wrap(sources.numbers))


def test_the_batches_done_and_left() -> None:
    loader = shuffled()
    assert (len(loader), loader.batches_done, loader.batches_left) == (6, 0, 6)
    done = [(loader.batches_done, loader.batches_left) for _ in loader]
    assert done == [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1), (0, 6)]
    _, state = sources.heads(shuffled, 3)
    # 12 of 22 samples are behind: on 2 ranks, 10 are left for global batches of 8, so 2 batches of 3.
    for world_size, batch_size, expected in ((2, 4, (1, 2)), (1, 3, (4, 4)), (3, 2, (2, 2)), (1, 20, (1, 1))):
        elsewhere = sources.loaded(shuffled(batch_size=batch_size, world=World(0, world_size)), state)
        assert (elsewhere.batches_done, elsewhere.batches_left) == expected
        assert len(sources.taken(elsewhere)) == expected[1]


# --- what goes wrong in the source ---


def test_who_asks_again_for_a_bad_batch_of_a_stream_is_told() -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)
        raise ValueError("a bad sample")

    batches = iter(midepoch.wrap(numbers))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with warnings.catch_warnings(action="error"), pytest.raises(ValueError, match="a bad sample"):
        next(batches)
    told = pytest.warns(MidepochWarning, match="position 3 of epoch 0 has failed again.*pass over bad samples")
    with told, pytest.raises(ValueError, match="a bad sample"):
        next(batches)


@pytest.mark.parametrize(("bad", "num_workers"), [([0], 0), ([2, 3], 1), ([4, 5], 0)], ids=str)
def test_who_goes_on_after_an_error_gets_the_batch_behind(bad: list[int], num_workers: int, tmp_path: Path) -> None:
    marker, whole = tmp_path / "failing", epochs(shuffled, 2)
    marker.touch()
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
    assert re.search(f"positions {first} to {last} of epoch 0 were passed over.*cannot be read", passed_over)
    assert place(loader) == (1, 0)
    marker.unlink()
    assert sources.taken(loader) == whole[1]
    loader.close()
    assert sources.resumed(shuffled, states[bad[0]]) == whole[0][bad[0] :]


def test_in_a_larger_world_a_failed_batch_is_given_again(tmp_path: Path) -> None:
    marker = tmp_path / "failing"
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


def own_state(remember: int = 0) -> Loader:
    source = StatefulDataLoader(sources.Noisy(22), batch_size=4, shuffle=True)
    return midepoch.wrap(source, seed=5, remember=remember)


def test_a_source_with_its_own_state_remembers_batches() -> None:
    whole, loader, forgetful = epochs(own_state, 1)[0], own_state(2), own_state()
    batches = iter(loader)
    for count in range(1, 5):
        next(batches)
        for in_flight in range(min(count, 2) + 1):
            state = loader.state_dict(in_flight)
            assert state["position"] == count - in_flight
            assert sources.resumed(own_state, state) == whole[count - in_flight :]
    with pytest.raises(StateError, match="in_flight=3, but the states of 2 batches are kept: pass remember="):
        loader.state_dict(3)
    sources.taken(forgetful, 2)
    with pytest.raises(StateError, match="remember="):
        forgetful.state_dict(1)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("kind", ["list", "dataset", "iterable"])
def test_a_length_that_changes_in_mid_epoch_is_named(kind: str, change: int) -> None:
    items = list(range(22))
    source = {"list": items, "dataset": DataLoader(items, batch_size=4), "iterable": Measured(items)}[kind]  # type: ignore[arg-type]
    loader = midepoch.wrap(source, seed=0)
    next(batches := iter(loader))
    before = place(loader)
    items[:] = items[:-1] if change < 0 else [*items, 22]
    with pytest.raises(SourceError, match=rf"22.*{22 + change}"):
        next(batches)
    assert place(loader) == before


class Measured(sources.Exposing):
    def __init__(self, items: list[int]) -> None:
        super().__init__(len(items))
        self.items = items

    def __len__(self) -> int:
        return len(self.items)


@pytest.mark.parametrize(("first", "workers"), [(0, 0), (8, 0), (8, 1)])
def test_a_sample_that_ends_the_iteration_loses_no_batch(first: int, workers: int) -> None:
    ending = sources.Made(lambda index: next(iter(())) if index == 9 else index, 22)
    loader = midepoch.wrap(DataLoader(ending, batch_size=4, num_workers=workers), seed=0, verify="off")
    loader.seek(position=first)
    batches = iter(loader)
    sources.taken(batches, 2 - first // 4)
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
    assert sources.loaded(loader, state).batches_left == 2
    assert sources.taken(loader) == sources.taken(sources.loaded(shuffled(world=World(1, 2)), state))


WRONG: dict[str, tuple[type[Exception], list[Any]]] = {
    "seed": (ValueError, [-1, 1 << 64, 1.0, True]), "world": (TypeError, [(0, 1)]), "shard": (TypeError, [1]),
    "randomness": (ValueError, ["batch"]), "tail": (ValueError, ["cut"]), "fingerprint": (ValueError, ["f" * 65, 7]),
    "remember": (ValueError, [-1, 1025]), "then": (TypeError, [3]), "verify": (ValueError, ["always"]),
    "on_error": (ValueError, ["skip", 1]),
}  # fmt: skip


def test_wrap_checks_its_arguments() -> None:
    for name, (kind, values) in [*WRONG.items(), ("remember", (TypeError, [1.0, True]))]:
        for value in values:
            with pytest.raises(kind, match=name):
                midepoch.wrap([1, 2], **{name: value})
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"on_error='next'.*leave on_error out"):
        midepoch.wrap(sources.numbers, on_error="next")


def test_a_loader_is_true_unless_it_is_known_to_be_empty() -> None:
    assert midepoch.wrap(sources.numbers) and midepoch.wrap([1]) and not midepoch.wrap([])
