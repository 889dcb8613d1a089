"""Positions that are left out of an epoch, against lists: in any epoch, at any time, on any ranks, with any tail."""

from __future__ import annotations

import bisect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochError, StateCorruptError, StateError, StateMismatchError, UnsupportedSourceError, World
from midepoch.order.holes import MOST_HOLES, Holes, Omit
from midepoch.state.parts import join_states
from support import sources
from support.left_out import Plans, Shape, sample_of, shares, wrapped

Interval = tuple[int, int]
INTERVALS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=30)


def flat(spans: list[Interval]) -> list[int]:
    return [position for start, stop in spans for position in range(start, stop)]


@settings(max_examples=400, deadline=None)
@given(INTERVALS, st.integers(0, 300), st.integers(0, 60))
def test_places_are_the_positions_that_are_left(parts: list[Interval], first: int, count: int) -> None:
    holes = Holes((start, start + length) for start, length in parts)
    gone = {p for start, length in parts for p in range(start, start + length)}
    left = [p for p in range(1000) if p not in gone]
    assert flat(holes.spans(first, first + count)) == left[first : first + count]
    assert holes.position_of(first) == left[first]
    assert [holes.place_of(p) for p in range(400)] == [bisect.bisect_left(left, p) for p in range(400)]
    assert holes.total == 1000 - len(left)
    if parts:
        assert list(Holes.parse(holes.text())) == list(holes)
        omit = Omit.parse(Omit({3: holes}, {2: holes}).text(2), 2)
        assert list(omit.skips[3]) == list(omit.done[2]) == list(holes)
        beyond = [p for p in flat(list(holes)) if p not in range(10, 50)]
        omit = Omit({3: Holes([(10, 50)])}, {3: holes})
        assert flat(list(Omit.parse(omit.text(3), 3).done.get(3, ()))) == beyond
        assert flat(list(Omit.parse(omit.text(3, 100), 3).done.get(3, ()))) == [p for p in beyond if p >= 100]


EVENTS = ["next"] * 6 + ["skip", "skip later", "resume", "resume"]
OF_TICKETS = ["finish"] * 5 + ["fail"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_histories_against_lists(data: st.DataObject) -> None:
    """Each position is given and finished exactly once, or left out; what is not finished is given again."""
    draw: Any = data.draw
    size, shuffle = draw(st.integers(1, 40)), draw(st.booleans())
    sample = sample_of(size, shuffle)

    def shape(tickets: bool) -> Shape:
        together = None if tickets else draw(st.none() | st.integers(1, 12))
        tail = "uneven" if together else draw(st.sampled_from(["pad", "drop", "uneven"]))
        return draw(st.integers(1, 5)), draw(st.integers(1, 4)), tail, draw(st.booleans()), together

    def made(shape: Shape) -> list[midepoch.Loader]:
        batch_size, world, tail, drop_last, together = shape
        options = {"shuffle": shuffle, "global_batch": together, "tail": None if together else tail}
        return [wrapped(size, batch_size, drop_last, world=World(rank, world), **options) for rank in range(world)]

    tickets = draw(st.booleans())
    now = shape(tickets)
    loaders = made(now)
    passes = list(map(iter, loaders))
    epoch, given_out, finished, skips = 0, set[int](), set[int](), dict[int, set[int]]()
    waiting: list[tuple[int, Any, list[int]]] = []  # rank, ticket, positions of batches that are open
    failed: list[tuple[int, Any, list[int]]] = []

    def plan() -> Plans:
        unskipped = [p for p in range(size) if p not in skips.get(epoch, ())]
        return shares([p for p in unskipped if p not in given_out], unskipped, now)

    plans, at, rolls, fresh, handed = plan(), 0, False, False, False
    for _ in range(draw(st.integers(1, 35))):
        event = draw(st.sampled_from(EVENTS + OF_TICKETS * tickets))
        steps = max(map(len, plans))
        whole = now[4] is None or at == steps or at % -(-now[4] // (now[0] * now[1])) == 0
        if event == "next" and at >= steps and (waiting or failed):
            for rank, each in enumerate(passes):
                assert next(each, None) is None
                if any(rank == of for of, *_ in waiting + failed):
                    for _ in range(2):
                        with pytest.raises(MidepochError, match=f"epoch {epoch} cannot be left"):
                            next(iter(loaders[rank]))
        elif event == "next":
            for rank, each in enumerate(passes):
                if at >= steps:
                    assert next(each, None) is None
                elif at < len(plans[rank]):
                    own, repeats = plans[rank][at]
                    assert next(each) == [sample(epoch, position) for position in own + repeats]
                    handed = True
                    given_out.update(own)
                    if tickets:
                        waiting.append((rank, loaders[rank].ticket, own))
            at, rolls, fresh = at + 1, False, False
            if at > steps:
                epoch, given_out, finished = epoch + 1, set(), set()
                passes = list(map(iter, loaders))
                plans, at = plan(), 0
        elif event == "finish" and waiting:
            rank, ticket, own = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            loaders[rank].finish(pickle.loads(pickle.dumps(ticket)))
            finished.update(own)
            with pytest.raises(StateError, match="finished already"):
                loaders[rank].finish(ticket)
        elif event == "fail" and waiting:
            failed.append(waiting.pop(draw(st.integers(0, len(waiting) - 1))))
        elif event.startswith("skip"):
            later = 0 if event == "skip" else draw(st.integers(1, 2))
            if rolls or at >= steps or not whole:
                continue
            start = draw(st.integers(0, size - 1))
            stop = draw(st.integers(start + 1, size))
            for loader in loaders:
                loader.skip(start, stop, None if later == 0 else epoch + later)
            skips.setdefault(epoch + later, set()).update(range(start, stop))
            if later == 0:
                plans, at = plan(), 0
                if fresh and not any(plans):  # as a resumed pass that finds nothing left
                    epoch, given_out, finished, rolls = epoch + 1, set(), set(), True
                    plans = plan()
        elif event == "resume" and (tickets or (whole and 0 < at < steps and all(at <= len(each) for each in plans))):
            if rolls:
                continue
            if at >= steps:
                assert all(next(each, None) is None for each in passes)
            states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
            if len({loader.is_rank_independent for loader in loaders}) == 2:  # one never had a batch, so no ticket
                with pytest.raises(MidepochError, match=r"same place|take them on every rank"):
                    join_states(states, loaders[0])
                continue
            if tickets and now[1] > 1 and any(state["detail"] for state in states):
                with pytest.raises(StateMismatchError, match="says only which batches"):
                    made(now)[0].load_state_dict(states[0])
                states = [join_states(states, loader) for loader in loaders]
            for state in states:
                assert {name: state[name] for name in state if name not in ("witness", "checksum")} == {
                    name: states[0][name] for name in state if name not in ("witness", "checksum")}  # fmt: skip
            if not (tickets and at >= steps):
                assert loaders[0].skipped == {each: list(Holes((p, p + 1) for p in found))
                                              for each, found in sorted(skips.items()) if each >= epoch}  # fmt: skip
            if tickets:
                if at >= steps:
                    finished |= set(range(size)) - given_out  # what the tail has dropped
                held = finished | skips.get(epoch, set())
                frontier = next((p for p in range(size) if p not in held), size)
                if (at >= steps and not waiting and not failed) or (frontier == size and (finished or given_out)):
                    epoch, finished, frontier = epoch + 1, set(), 0
                assert states[0]["epoch"] == epoch
                position = states[0]["position"]
                # A skip right after a load leaves the position where it was.
                assert position == frontier or (not handed and held.issuperset(range(position)) and position < frontier)
                given_out = set(finished)
            void, tickets = waiting[:1], draw(st.booleans())
            waiting, failed, now = [], [], shape(tickets)
            loaders = made(now)
            for loader in loaders:
                loader.load_state_dict(states[0])
            for _, ticket, _ in void:
                with pytest.raises(StateError, match="of another run"):
                    loaders[0].finish(ticket)
            passes = list(map(iter, loaders))
            fresh = states[0]["position"] > 0 or "done" in states[0]["omit"]
            finished, plans, at, handed = set(given_out), plan(), 0, False
            if fresh and not any(plans):  # nothing is left, so each pass begins the next epoch
                epoch, given_out, finished, rolls = epoch + 1, set(), set(), True
                plans = plan()
    for loader in loaders:
        loader.close()


def loader_at(batches: int, **options: Any) -> tuple[midepoch.Loader, Any]:
    loader = wrapped(20, 2, shuffle=False, **options)
    this = iter(loader)
    sources.taken(this, batches)
    return loader, this


def indices_of(batch: Any) -> list[int]:
    return [index for index, _ in batch]


def test_a_skip_counts_for_what_was_loaded_and_committed() -> None:
    loader, this = loader_at(2)
    loader.commit()
    other = wrapped(20, 2, shuffle=False)
    other.load_state_dict(loader.state_dict())
    for each in (loader, other):
        each.skip(10, 12)
        assert (each.state_dict()["omit"], each.state_dict()["position"]) == ("0:2.5.1", 4)
    next(this)
    loader.rollback()
    assert indices_of(next(this)) == [4, 5]


def test_a_batch_that_fails_is_passed_over_around_holes(tmp_path: Path) -> None:
    loader = midepoch.wrap(DataLoader(sources.Failing(20, [9], tmp_path), 2), seed=5)
    loader.skip(3, 8)
    this = iter(loader)
    assert [next(this)[:, 0].tolist() for _ in range(2)] == [[0, 1], [2, 8]]
    with pytest.raises(RuntimeError, match="sample 9 cannot be read"):
        next(this)
    with pytest.warns(midepoch.MidepochWarning, match="passed over"):
        assert next(this)[:, 0].tolist() == [11, 12]


def test_reshard_shares_what_is_left() -> None:
    loader, this = loader_at(2)
    loader.skip(6, 12)
    loader.reshard(World(1, 2))
    assert list(map(indices_of, this)) == [[12, 13], [16, 17], [19]]


@pytest.mark.parametrize(("arguments", "error"), [
    *((bad, ValueError) for bad in ((3, 3), (5, 3), (-1, 3), (0, 21), (20, 21, 1), (0, 3, 0), (0, 3, -1))),
    ((0, 3, 10**19), ValueError),
    *((bad, TypeError) for bad in ((0.0, 3), (0, "3"), (0, 3, True))),
])  # fmt: skip
def test_bad_ranges_are_refused(arguments: Any, error: type[Exception]) -> None:
    loader = wrapped(20, 2)
    list(loader)
    state = loader.state_dict()
    with pytest.raises(error, match="skip"):
        loader.skip(*arguments)
    assert (loader.state_dict(), loader.skipped) == (state, {})


def test_an_epoch_whose_body_runs_on_has_ended() -> None:
    loader = wrapped(20, 2)
    for _ in loader.epochs(1):
        assert len(list(loader)) == 10 and loader.epoch == 0
        with pytest.raises(ValueError, match=r"epoch 0 has ended, .*: name epoch 1 or a later one"):
            loader.skip(0, 3)
        loader.skip(0, 3, epoch=1)
    assert loader.skipped == {1: [(0, 3)]}


def test_within_a_global_batch_it_is_refused() -> None:
    loader, _ = loader_at(1, global_batch=6)
    reading = loader._progress.reading
    with pytest.raises(MidepochError, match="within a global batch"):
        loader.skip(10, 12)
    loader.skip(10, 12, epoch=1)
    assert loader.skipped == {1: [(10, 12)]}
    assert loader._progress.reading is reading, "nothing of this epoch is divided anew"


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


@pytest.mark.parametrize("make", [
    lambda: midepoch.wrap(sources.numbers, seed=0),
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
    stream = midepoch.wrap(sources.numbers, seed=0)
    with pytest.raises(StateMismatchError, match="skips positions"):
        stream.load_state_dict(midepoch.reseal({**stream.state_dict(), "omit": "0:6.1.1"}))
