"""Batches that are finished in any order: `loader.ticket`, `finish`, `frontier`.

Histories of them, and the random numbers of what comes again, are in tests/unit/order; threads in tests/jobs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochError, StateCorruptError, StateError, StateMismatchError, UnsupportedSourceError, World
from midepoch.checkpoint.body_record import joined_records
from midepoch.loader.body import Record
from midepoch.order import Endless, Shuffled
from midepoch.state.parts import join_states
from support import sources
from support.left_out import Noisy, wrapped


def numbers(batch: Any) -> list[int]:
    return [index for index, _ in batch]


def begun(count: int, **options: Any) -> tuple[midepoch.Loader, Any, list[Any]]:
    """A loader of which so many batches were taken, its pass, and their tickets."""
    loader = wrapped(20, 2, shuffle=False, **options)
    this = iter(loader)
    return loader, this, [loader.ticket for _ in itertools.islice(this, count)]


def finish(loader: midepoch.Loader, tickets: Iterable[Any]) -> None:
    for ticket in tickets:
        loader.finish(ticket)


def saved(loader: midepoch.Loader) -> tuple[int, int, str]:
    """What matters here of a state: it has the epoch, the frontier in it, and what is done beyond."""
    state = loader.state_dict()
    return state["epoch"], state["position"], state["omit"]


def resumed(state: Any, **options: Any) -> Any:
    return sources.loaded(wrapped(20, 2, shuffle=False, **options), json.loads(json.dumps(state)))


def test_the_state_is_the_frontier_and_what_is_done_beyond_it() -> None:
    loader, _, tickets = begun(5)
    assert (loader.frontier, loader.position) == ((0, 0), 10)
    finish(loader, [tickets[3], tickets[1], tickets[0]])
    assert (saved(loader), loader.frontier) == ((0, 4, "done:2.3.1"), (0, 4))
    other = resumed(state := loader.state_dict())
    assert (other.state_dict(), other.frontier, other.batches_left, other.batches_done) == (state, (0, 4), 7, 3)
    assert [numbers(batch) for batch in other] == [[4, 5], [8, 9], *([p, p + 1] for p in range(10, 20, 2))]
    assert (other.epoch, len(other), other.state_dict()["omit"]) == (1, 10, "")
    other.load_state_dict(state)
    other.seek(0)
    assert len(list(other)) == 10


def test_a_ticket_is_small_and_goes_through_queues_and_pickle() -> None:
    loader, _, tickets = begun(3)
    there: Any = multiprocessing.get_context("spawn").SimpleQueue()
    there.put(tickets[0])
    assert [there.get(), pickle.loads(pickle.dumps(tickets[1]))] == tickets[:2]
    assert len({*tickets}) == 3 and len(pickle.dumps(tickets[0])) < 120
    loader.finish(pickle.loads(pickle.dumps(tickets[0])))
    assert loader.frontier == (0, 2)
    with pytest.raises(StateError, match="of another run"):
        pickle.loads(pickle.dumps(loader)).finish(tickets[1])


def test_what_was_taken_before_the_first_ticket_is_finished() -> None:
    loader, this, _ = begun(0)
    next(this), next(this), next(this)
    ticket = loader.ticket
    assert loader.frontier == (0, 4)
    next(this)
    loader.finish(ticket)
    assert saved(loader) == (0, 6, "")
    loader, this, _ = begun(0)
    list(this)
    ticket = loader.ticket  # of an epoch's last batch
    assert loader.frontier == (0, 18)
    loader.finish(ticket)
    assert loader.frontier == (1, 0)


def test_an_epoch_is_left_when_all_is_finished() -> None:
    loader, this, tickets = begun(3)
    told = "epoch 0 cannot be left: the batch at position 0 is not finished"
    with pytest.raises(MidepochError, match=told):
        next(iter(loader))
    assert (loader.epoch, loader.position) == (0, 6), "a pass that is broken off keeps its epoch"
    tickets += [loader.ticket for _ in this]
    finish(loader, tickets[1:])
    for leave in (lambda: next(iter(loader)), loader.peek, lambda: loader.set_epoch(2)):
        with pytest.raises(MidepochError, match=told):
            leave()
    assert [numbers(batch) for batch in resumed(loader.state_dict())] == [[0, 1]]
    loader.finish(tickets[0])
    assert saved(loader) == (1, 0, "")
    assert numbers(next(iter(loader))) == [0, 1]


def test_the_body_of_epochs_waits_for_what_is_open() -> None:
    loader = wrapped(4, 2, shuffle=False)
    epochs = loader.epochs(3)
    next(epochs)
    tickets = [loader.ticket for _ in loader]
    loader.finish(tickets[0])
    assert saved(loader) == (0, 2, "")
    loader.finish(tickets[1])
    assert saved(loader) == (0, 4, "")
    assert next(epochs) == 1
    _ = [loader.ticket for _ in loader]
    with pytest.raises(MidepochError, match="epoch 1 cannot be left"):
        next(epochs)


def test_a_ticket_that_is_not_open_here_is_refused() -> None:
    loader, this, tickets = begun(2)
    loader.finish(tickets[0])
    for at, ticket, why in (
        (loader, tickets[0], "finished already"), (loader, begun(1)[2][0], "of another run"),
        (loader, tickets[1]._replace(step=2), "not handed out"), (wrapped(20, 2), tickets[1], "of another run"),
    ):  # fmt: skip
        with pytest.raises(StateError, match=why):
            at.finish(ticket)
    with pytest.raises(TypeError, match=r"what loader\.ticket returned"):
        loader.finish(tuple(tickets[1]))  # type: ignore[arg-type]
    state = loader.state_dict()
    for leave in (loader.rollback, lambda: loader.load_state_dict(state), lambda: loader.seek(0, 4)):
        next(this)
        ticket = loader.ticket
        leave()
        with pytest.raises(StateError, match="a place that was left"):
            loader.finish(ticket)
    with pytest.raises(MidepochError, match="no batch was handed out"):
        loader.ticket  # noqa: B018  # a property


def test_a_batch_that_failed_to_be_read_does_not_end_the_steps(tmp_path: Path) -> None:
    dataset = sources.Failing(12, [4], tmp_path)
    loader = midepoch.wrap(DataLoader(dataset, 2), on_error="retry")
    this, tickets = iter(loader), list[Any]()
    for _ in range(5):
        try:
            next(this)
            tickets.append(loader.ticket)
        except RuntimeError:
            dataset.failing = frozenset()
    assert tickets[0].session != tickets[3].session
    finish(loader, [tickets[3], tickets[0]])
    assert saved(loader) == (0, 2, "done:2.3.1")


def ranks_at(count: int) -> tuple[list[midepoch.Loader], list[list[Any]]]:
    of_ranks = [begun(count, world=World(rank, 2)) for rank in range(2)]
    return [loader for loader, _, _ in of_ranks], [tickets for _, _, tickets in of_ranks]


def test_each_rank_of_a_larger_world_knows_its_own() -> None:
    loaders, tickets = ranks_at(3)
    assert not loaders[0].capabilities.rank_independent and wrapped(20, 2).capabilities.rank_independent
    finish(loaders[0], tickets[0][::2])
    finish(loaders[1], tickets[1][1:])
    assert [loader.frontier for loader in loaders] == [(0, 4), (0, 2)]
    states = [loader.state_dict() for loader in loaders]
    assert [(state["epoch"], state["position"]) for state in states] == [(0, 12)] * 2, "what was handed out"
    assert len(json.dumps(states[0])) <= 512
    for world in (World(), World(0, 2)):
        with pytest.raises(StateMismatchError, match=r"rank 0 of 2 .* midepoch\.gather"):
            resumed(states[0], world=world)
    united = [join_states(states, loader) for loader in loaders]
    assert united[0] == united[1]
    assert (united[0]["position"], united[0]["omit"], united[0]["detail"]) == (2, "done:6.1.1", "")
    assert [numbers(batch) for batch in resumed(united[0])][:3] == [[2, 3], [4, 5], [12, 13]]


def test_ranks_that_do_not_skip_or_take_tickets_alike_are_named() -> None:
    loaders, _ = ranks_at(2)
    loaders[1].skip(12, 14)
    with pytest.raises(MidepochError, match="rank 1 skips other positions"):
        join_states([loader.state_dict() for loader in loaders], loaders[0])
    loaders, _ = ranks_at(2)
    fresh = wrapped(20, 2, shuffle=False, world=World(1, 2))
    _two = list(itertools.islice(fresh, 2))
    with pytest.raises(MidepochError, match="rank 1 takes no tickets"):
        join_states([loaders[0].state_dict(), fresh.state_dict()], loaders[0])


def test_more_open_batches_than_a_state_holds_are_refused() -> None:
    loaders = [wrapped(4000, 2, world=World(rank, 2)) for rank in range(2)]
    for loader in loaders:
        for _ in zip(range(600), loader, strict=False):
            ticket = loader.ticket
            if loader is loaders[0]:
                loader.finish(ticket)
    assert len(json.dumps(loaders[1].state_dict())) <= 512
    with pytest.raises(StateError, match="finish the oldest batches first"):
        join_states([loader.state_dict() for loader in loaders], loaders[0])


def test_skips_and_what_is_finished_fill_a_state_together() -> None:
    loader = wrapped(4000, 1)
    finish(loader, [loader.ticket for _ in zip(range(600), loader, strict=False)][1::2])
    other = sources.loaded(wrapped(4000, 1), loader.state_dict())
    for start in range(1000, 1424, 2):  # 212 more
        other.skip(start, start + 1)
    state = other.state_dict()
    with pytest.raises(StateError, match="skip fewer, longer ranges"):
        other.skip(3000, 3001)
    assert other.state_dict() == state


def test_what_says_otherwise_which_batches_count_is_refused() -> None:
    loader, _, _ = begun(1)
    with pytest.raises(MidepochError, match="leave in_flight out"):
        loader.state_dict(in_flight=1)
    with pytest.raises(MidepochError, match=r"leave commit\(\) out"):
        loader.commit()
    with pytest.raises(UnsupportedSourceError, match=r"midepoch\.gather"):
        loader.reshard(World(0, 2))
    committed = wrapped(20, 2)
    next(iter(committed))
    committed.commit()
    with pytest.raises(MidepochError, match=r"leave commit\(\) out"):
        committed.ticket  # noqa: B018  # a property
    for other in (
        wrapped(20, 2, global_batch=4), wrapped(20, 2, then=list), midepoch.wrap(lambda: iter([1, 2, 3])),
        midepoch.combine([wrapped(20, 2)]),
    ):  # fmt: skip
        next(iter(other))
        with pytest.raises(UnsupportedSourceError, match="ticket: "):
            other.ticket  # noqa: B018  # a property


def test_damaged_texts_of_what_is_finished_are_refused() -> None:
    loader, _, tickets = begun(5)
    finish(loader, tickets[:4:3])
    state = loader.state_dict()
    assert saved(loader) == (0, 2, "done:2.3.1")
    for text in ("done:2.3.1 done:2.3.1", "done:2.3", "done:1.3.0", "0:1.1.1 done:2.3.1", "done:1.1.1", "done:1.i.3"):
        with pytest.raises(StateCorruptError, match="omit"):
            loader.load_state_dict(midepoch.reseal({**state, "omit": text}))
    for detail in ('{"rank":0}', '{"parts":[]}', "{"):
        with pytest.raises(StateCorruptError):
            loader.load_state_dict(midepoch.reseal({**state, "detail": detail}))
    assert loader.state_dict() == state


def test_an_order_without_an_end_has_tickets() -> None:
    def made() -> midepoch.Loader:
        sampler = midepoch.ResumableSampler(6, shuffle=Endless(Shuffled(6)))
        dataset: Any = Noisy(6)
        return midepoch.wrap(DataLoader(dataset, 2, sampler=sampler, collate_fn=list), seed=1)

    loader = made()
    given = [(batch, loader.ticket) for batch in itertools.islice(loader, 9)]
    finish(loader, [given[step][1] for step in (0, 1, 4, 8)])
    rest = itertools.islice(sources.loaded(made(), loader.state_dict()), 5)
    assert list(rest) == [given[step][0] for step in (2, 3, 5, 6, 7)]


@pytest.mark.parametrize("at", [4, 5, 6])
def test_what_is_open_when_a_signal_ends_an_epoch_comes_again(at: int, tmp_path: Path) -> None:
    """The pass has given all six batches, and two of them are not finished."""

    def life(signal_at: int = 0) -> list[int]:
        loader, done = midepoch.wrap(DataLoader(sources.Indices(12), batch_size=2), seed=0), list[int]()
        snapshot, waiting = midepoch.Snapshot(tmp_path / "snapshot.pt", data=loader), deque[Any]()

        def train() -> None:
            ticket, batch = waiting.popleft()
            loader.finish(ticket)
            done.extend(batch.tolist())
            if snapshot.steps + 1 == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            snapshot.step()

        with snapshot, contextlib.suppress(SystemExit):
            for _ in snapshot.epochs(2):
                for batch in loader:
                    waiting.append((loader.ticket, batch))
                    if len(waiting) == 3:
                        train()
                while waiting:
                    train()
        return done

    assert life(at) + life() == [*range(12)] * 2


def test_ranks_with_open_tickets_agree_on_the_body() -> None:
    over = Record(0, empty={"data": 1}, left=["data"])
    other = Record(0, empty={"data": 1}, lead="other", open=["other"])
    assert joined_records([over, over], {"data"}) == Record(0, empty={"data": 0}, open=["data"], lead="data")
    assert joined_records([over, over]) == over
    with pytest.warns(midepoch.MidepochWarning, match="other was read while tickets of data were open"):
        assert joined_records([other], {"data"}).unknown
