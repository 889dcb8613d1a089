"""Positions that are left out of an epoch, against lists: in any epoch, at any time, on any ranks, with any tail."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochError, StateCorruptError, StateError, StateMismatchError, UnsupportedSourceError, World
from midepoch.order.holes import MOST_HOLES, Holes, parse_skips, text_of_skips

Interval = tuple[int, int]
Shape = tuple[int, int, str, bool, int | None]  # batch size, world size, tail, drop_last, global_batch
Plans = list[list[tuple[list[int], list[int]]]]  # by rank and step, the batch's own positions, and repeats
INTERVALS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=30)


def flat(spans: list[Interval]) -> list[int]:
    return [position for start, stop in spans for position in range(start, stop)]


@settings(max_examples=400, deadline=None)
@given(INTERVALS, st.integers(0, 300), st.integers(0, 60))
def test_places_are_the_positions_that_are_left(parts: list[Interval], first: int, count: int) -> None:
    holes = Holes((start, start + length) for start, length in parts)
    left = [p for p in range(1000) if not any(start <= p < start + length for start, length in parts)]
    assert flat(holes.spans(first, first + count)) == left[first : first + count]
    assert holes.position_of(first) == left[first]
    assert [holes.place_of(p) for p in range(400)] == [sum(each < p for each in left) for p in range(400)]
    assert holes.total == 1000 - len(left)
    if parts:
        assert list(Holes.parse(holes.text())) == list(holes)
        assert list(parse_skips(text_of_skips({3: holes}, 0))[3]) == list(holes)


class Noisy:
    """Each sample is its index and a random number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index, random.random()


def wrapped(size: int, batch_size: int, drop_last: bool = False, **options: Any) -> midepoch.Loader:
    kinds = {"shuffle": options.pop("shuffle", True), "num_workers": options.pop("num_workers", 0)}
    if sampler := options.pop("sampler", None):
        kinds |= {"sampler": sampler, "shuffle": None}
    dataset: Any = Noisy(size)
    source: Any = DataLoader(dataset, batch_size, drop_last=drop_last, collate_fn=list, **kinds)
    return midepoch.wrap(source, seed=5, **options)


def sample_of(size: int, shuffle: bool = True) -> Any:
    """From (epoch, position) to the sample there, as an undisturbed run gives it."""
    known: dict[int, list[Any]] = {}

    def at(epoch: int, position: int) -> Any:
        if epoch not in known:
            loader = wrapped(size, max(size, 1), shuffle=shuffle)
            loader.seek(epoch)
            known[epoch] = next(iter(loader), [])
        return known[epoch][position]

    return at


def shares(rest: list[int], unskipped: list[int], shape: Shape) -> Plans:
    """What each rank gets of a list of positions. `unskipped`: of the epoch. Written without `Share`."""
    batch_size, world, tail, drop_last, together = shape
    found: Plans = [[] for _ in range(world)]
    units = together or max(len(rest), 1)
    for whole_at in range(0, len(rest), units):
        whole = rest[whole_at : whole_at + units]
        if together and drop_last and len(whole) < together:
            break
        for at in range(0, len(whole), batch_size * world):
            part = whole[at : at + batch_size * world]
            each = len(part) // world if tail == "drop" else -(-len(part) // world)
            each = batch_size if len(part) == batch_size * world else each
            for rank in range(world):
                own = part[rank * each : (rank + 1) * each]
                lack, beyond = 0, 0
                if together and not own:
                    lack = batch_size
                elif tail == "pad" and not together:
                    lack, beyond = each - len(own), max(0, rank * each - len(part))
                repeats = [unskipped[(beyond + i) % len(unskipped)] for i in range(lack)]
                if (count := len(own) + lack) and (together or not drop_last or count == batch_size):
                    found[rank].append((own, repeats))
    return found


FIGURES = {"histories": 0, "batches": 0, "skips": 0, "resumes": 0, "epochs": 0}


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_histories_against_lists(data: st.DataObject) -> None:
    draw: Any = data.draw
    size, shuffle = draw(st.integers(1, 40)), draw(st.booleans())
    sample = sample_of(size, shuffle)

    def shape() -> Shape:
        together = draw(st.none() | st.integers(1, 12))
        tail = "uneven" if together else draw(st.sampled_from(["pad", "drop", "uneven"]))
        return draw(st.integers(1, 5)), draw(st.integers(1, 4)), tail, draw(st.booleans()), together

    def made(shape: Shape) -> list[midepoch.Loader]:
        batch_size, world, tail, drop_last, together = shape
        options = {"shuffle": shuffle, "global_batch": together, "tail": None if together else tail}
        return [wrapped(size, batch_size, drop_last, world=World(rank, world), **options) for rank in range(world)]

    now = shape()
    loaders = made(now)
    passes = list(map(iter, loaders))
    epoch, given_out, skips = 0, set[int](), dict[int, set[int]]()

    def plan() -> Plans:
        unskipped = [p for p in range(size) if p not in skips.get(epoch, ())]
        return shares([p for p in unskipped if p not in given_out], unskipped, now)

    plans, at, rolls, fresh = plan(), 0, False, False
    FIGURES["histories"] += 1
    for _ in range(draw(st.integers(1, 25))):
        event = draw(st.sampled_from(["next"] * 6 + ["skip", "skip later", "resume", "resume"]))
        steps = max(map(len, plans))
        whole = now[4] is None or at == steps or at % -(-now[4] // (now[0] * now[1])) == 0
        if event == "next":
            for rank, each in enumerate(passes):
                expected = plans[rank][at] if at < len(plans[rank]) else None
                if expected is None:
                    if at >= steps:
                        assert next(each, None) is None
                else:
                    own, repeats = expected
                    assert next(each) == [sample(epoch, position) for position in own + repeats]
                    FIGURES["batches"] += 1
                    given_out.update(own)
            at, rolls, fresh = at + 1, False, False
            if at > steps:
                epoch, given_out, FIGURES["epochs"] = epoch + 1, set(), FIGURES["epochs"] + 1
                passes = list(map(iter, loaders))
                plans, at = plan(), 0
        elif event.startswith("skip"):
            later = 0 if event == "skip" else draw(st.integers(1, 2))
            if rolls or at == steps or not whole:
                continue
            start = draw(st.integers(0, size - 1))
            stop = draw(st.integers(start + 1, size))
            for loader in loaders:
                loader.skip(start, stop, None if later == 0 else epoch + later)
            skips.setdefault(epoch + later, set()).update(range(start, stop))
            FIGURES["skips"] += 1
            if later == 0:
                plans, at = plan(), 0
                if fresh and not any(plans):  # as a resumed pass that finds nothing left
                    epoch, given_out, rolls = epoch + 1, set(), True
                    plans = plan()
        elif event == "resume" and whole and 0 < at < steps and all(at <= len(each) for each in plans):
            states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
            for state in states:
                assert {name: state[name] for name in state if name not in ("witness", "checksum")} == {
                    name: states[0][name] for name in state if name not in ("witness", "checksum")}  # fmt: skip
            assert loaders[0].skipped == {
                each: list(Holes((p, p + 1) for p in found)) for each, found in sorted(skips.items()) if each >= epoch
            }
            now = shape()
            loaders = made(now)
            for loader in loaders:
                loader.load_state_dict(states[0])
            passes, FIGURES["resumes"] = list(map(iter, loaders)), FIGURES["resumes"] + 1
            plans, at, fresh = plan(), 0, True
            if not any(plans):  # nothing is left, so each pass begins the next epoch
                epoch, given_out, rolls = epoch + 1, set(), True
                plans = plan()
    for loader in loaders:
        loader.close()


def loader_at(batches: int, **options: Any) -> tuple[midepoch.Loader, Any]:
    loader = wrapped(20, 2, shuffle=False, **options)
    this = iter(loader)
    for _ in range(batches):
        next(this)
    return loader, this


def taken(loader: Any) -> list[list[int]]:
    return [[index for index, _ in batch] for batch in loader]


def test_a_skip_in_a_running_epoch_keeps_what_was_handed_out() -> None:
    loader, this = loader_at(3)
    loader.skip(2, 9)
    assert loader.skipped == {0: [(2, 9)]}
    assert (loader.position, loader.batches_left, loader.batches_done, len(loader)) == (6, 6, 1, 7)
    assert taken(this) == [[9, 10], [11, 12], [13, 14], [15, 16], [17, 18], [19]]
    assert (loader.epoch, loader.position, loader.skipped) == (1, 0, {})
    assert len(taken(loader)) == 10


def test_a_skip_ahead_of_time_travels_in_the_state() -> None:
    loader, _ = loader_at(3)
    loader.skip(0, 15, epoch=1)
    loader.skip(17, 18, epoch=1)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["omit"] == "1:1.0.f.2.1"
    other = wrapped(20, 2, shuffle=False, num_workers=2)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert len(taken(other)) == 7
    assert taken(other) == [[15, 16], [18, 19]]
    assert other.state_dict()["omit"] == ""


def test_all_of_an_epoch_can_be_left_out() -> None:
    loader, this = loader_at(3)
    loader.skip(0, 20)
    assert taken(this) == []
    assert loader.epoch == 1
    loader.skip(0, 20, epoch=2)
    assert [len(taken(loader)) for _ in range(3)] == [10, 0, 10]


def test_a_skip_counts_for_what_was_loaded_and_committed() -> None:
    loader, this = loader_at(2)
    loader.commit()
    loader.skip(10, 12)
    assert loader.state_dict()["omit"] == "0:2.5.1"
    next(this)
    loader.rollback()
    assert taken(this)[0] == [4, 5]
    other = wrapped(20, 2, shuffle=False)
    other.load_state_dict(loader_at(2)[0].state_dict())
    other.skip(10, 12)
    assert (other.state_dict()["omit"], other.state_dict()["position"]) == ("0:2.5.1", 4)


def test_a_batch_that_fails_is_passed_over_around_holes() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> tuple[int, float]:
            if index == 9:
                raise OSError("no such sample")
            return super().__getitem__(index)

    dataset: Any = Broken(20)
    loader = midepoch.wrap(DataLoader(dataset, 2, collate_fn=list), seed=5)
    loader.skip(3, 8)
    this = iter(loader)
    assert [index for index, _ in next(this)] == [0, 1]
    assert [index for index, _ in next(this)] == [2, 8]
    with pytest.raises(OSError, match="no such sample"):
        next(this)
    with pytest.warns(midepoch.MidepochWarning, match="passed over"):
        assert [index for index, _ in next(this)] == [11, 12]


def test_reshard_shares_what_is_left() -> None:
    loader, this = loader_at(2)
    loader.skip(6, 12)
    loader.reshard(World(1, 2))
    assert taken(this) == [[12, 13], [16, 17], [19]]


@pytest.mark.parametrize(("start", "stop", "epoch"), [
    (3, 3, None), (5, 3, None), (-1, 3, None), (0, 21, None), (20, 21, 1), (0, 3, 0), (0, 3, -1),
])  # fmt: skip
def test_bad_ranges_are_refused(start: int, stop: int, epoch: int | None) -> None:
    loader = wrapped(20, 2)
    list(loader)
    state = loader.state_dict()
    with pytest.raises(ValueError, match="skip"):
        loader.skip(start, stop, epoch)
    assert (loader.state_dict(), loader.skipped) == (state, {})


def test_what_is_no_number_is_refused() -> None:
    for arguments in ((0.0, 3), (0, "3"), (0, 3, True)):
        with pytest.raises(TypeError, match="must be an int"):
            wrapped(20, 2).skip(*arguments)


def test_within_a_global_batch_it_is_refused() -> None:
    loader = wrapped(20, 2, global_batch=6)
    this = iter(loader)
    next(this)
    with pytest.raises(MidepochError, match="within a global batch"):
        loader.skip(10, 12)
    loader.skip(10, 12, epoch=1)
    assert loader.skipped == {1: [(10, 12)]}


def test_more_holes_than_a_state_holds_are_refused() -> None:
    loader = wrapped(4000, 2)
    for number in range(MOST_HOLES):
        loader.skip(3 * number, 3 * number + 1)
    state = loader.state_dict()
    assert len(json.dumps(state)) <= 4096
    with pytest.raises(StateError, match="skip fewer, longer ranges"):
        loader.skip(3999, 4000)
    assert loader.state_dict() == state
    loader.skip(0, 3999)
    assert loader.skipped == {0: [(0, 3999)]}


def numbers() -> Any:
    yield from range(20)


@pytest.mark.parametrize("make", [
    lambda: midepoch.wrap(numbers, seed=0),
    lambda: wrapped(20, 2, then=list),
    lambda: wrapped(20, 2, shard=False),
    lambda: midepoch.combine([wrapped(20, 2), wrapped(20, 2)]),
])  # fmt: skip
def test_sources_that_cannot_skip_say_so(make: Any) -> None:
    loader = make()
    assert not loader.capabilities.skips
    with pytest.raises(UnsupportedSourceError, match="skip"):
        loader.skip(0, 3)


def test_damaged_texts_are_refused() -> None:
    loader, _ = loader_at(2)
    loader.skip(6, 12, epoch=1)
    state = loader.state_dict()
    texts = ["1:1.6", "1:6.1.1 ", "x", "1:1.6.0", "1:0.6.6", "1:6.1.1.", "1:3.2.2", "2:6.1.1 1:6.1.1", "1:1.6.6.0.3",
             "1:6.01.1", "-1:6.1.1", "1:6.1.1\n", "1:6.1.1 1:3.3.1", "0:3.7.1"]  # fmt: skip
    for text in texts:
        with pytest.raises(StateCorruptError, match="omit"):
            loader.load_state_dict(midepoch.reseal({**state, "omit": text}))
    assert loader.state_dict() == state
    stream = midepoch.wrap(numbers, seed=0)
    with pytest.raises(StateMismatchError, match="skips positions"):
        stream.load_state_dict(midepoch.reseal({**stream.state_dict(), "omit": "0:6.1.1"}))


def test_listed_batches_and_lists_skip() -> None:
    batches = [[4 * number + place for place in range(4)] for number in range(5)]
    dataset: Any = Noisy(20)
    loader = midepoch.wrap(DataLoader(dataset, batch_sampler=batches, collate_fn=list), seed=5)
    whole = list(loader)
    loader.seek(0)
    loader.skip(1, 3)
    assert list(loader) == [whole[0], *whole[3:]]
    listed = midepoch.wrap(["a", "b", "c", "d"])
    listed.skip(1, 2)
    assert list(listed) == ["a", "c", "d"]
