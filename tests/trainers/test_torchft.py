"""torchft: groups of ranks that die and come back, and weights that say which samples they have seen.

Real lighthouses, Managers and kills; `torchft_kills.py` has the jobs, `torchft_model.py` a model of torchft for more.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader

from support.places import ROOT, TESTS

pytest.importorskip("torchft", reason="torchft has wheels for Linux and some versions of Python only")

import torchft_kills as kills
import torchft_model as model
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import WorldSizeMode
from torchft.optim import OptimizerWrapper

import midepoch
from midepoch import MidepochError, UnsupportedSourceError, World
from midepoch.loader.loader import Loader
from midepoch.trainers.torchft import Feed, feed
from support import forking, jobs, sources

CHAOS = bool(os.environ.get("MIDEPOCH_CHAOS"))


# --- groups that are killed -------------------------------------------------------------------------------------------


JOBS: list[tuple[int, int, dict[str, Any]]] = [
    (2, 3, {"groups": 2, "ranks": 2, "workers": 2, "asynchronous": False}),
    (1, 2, {"groups": 2, "outages": 1, "asynchronous": False, "settle": 8}),
    (2, 3, {"workers": 2}),
    (2, 3, {"groups": 2, "ranks": 2, "workers": 2, "size": 1400, "together": 24}),
    *((6, seed, {"outages": 4, "asynchronous": bool(seed % 2), "size": 800, "settle": 8}) for seed in range(11, 17)),
]


@pytest.mark.parametrize(
    ("dead", "seed", "job"), [*JOBS[:2], *(pytest.param(*each, marks=pytest.mark.long) for each in JOBS[2:])]
)
def test_killed_groups_lose_and_repeat_no_sample(dead: int, seed: int, job: dict[str, Any], tmp_path: Path) -> None:
    """`dead`: groups; with `outages` the lighthouse is killed as often, too."""
    job = {"groups": 3, "ranks": 1, "size": 300, "settle": 4, **job}
    outcome = kills.run_job(tmp_path, dead, seed, limit=120, points=("chosen", "allreduce", "voted"), **job)
    assert not outcome.errors
    assert outcome.finished == job["groups"] * job["ranks"]
    assert (outcome.lost, outcome.repeated, outcome.wrong) == (0, 0, 0)
    assert outcome.outages >= 1 if "outages" in job else outcome.kills.total() >= 1


def example(folder: Path, group: int, address: str) -> tuple[forking.Program, list[str], threading.Thread]:
    """The example of one group, and its lines, which are read all the time: torchft says more than a pipe holds."""
    own = {"TORCHFT_LIGHTHOUSE": address, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    program = forking.Program(
        [ROOT / "examples" / "torchft_groups.py", folder, str(group)], env={**os.environ, **own}, modules=kills.MODULES,
        merged=True,
    )  # fmt: skip
    lines: list[str] = []

    def read() -> None:
        for line in program.stdout:
            lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    return program, lines, reader


def test_the_example_is_killed_and_goes_on(tmp_path: Path) -> None:
    # The survivor does not train to the end alone while the other starts, however long that takes: until the killed
    # group counts as dead, a quorum is two of the three.
    with kills.lighthouse(silence=100_000) as address:
        (survivor, told, _), (killed, lines, _) = (example(tmp_path, group, address) for group in range(2))
        # Not one step by its number: in the step in which a group joins, the other one counts alone.
        jobs.wait_for(lambda: re.search(r"step ([5-9]|\d\d+) of 2 groups", "".join(lines)), killed)
        killed.kill()
        killed.wait()
        back, lines, reader = example(tmp_path, 1, address)
        assert [survivor.wait(), back.wait()] == [0, 0], told[-20:]
    reader.join()
    assert "of 2 groups" in "".join(lines)
    state = torch.load(tmp_path / "saved.pt")
    # 57 steps of both groups alone would be all; steps of one are more. Saved at each tenth, which may be the last.
    assert state["manager"]["step"] >= 50
    assert (state["data"]["epoch"], state["data"]["position"] > 0) in ((2, True), (3, False))


def test_a_program_in_the_shape_of_train_ddp(tmp_path: Path) -> None:
    script = TESTS / "jobs" / "programs" / "torchft_ddp.py"
    stores, groups = [], []
    with kills.lighthouse(2, patience=5000) as address:
        for group in range(2):
            stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            own = {
                **os.environ, "TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": str(group), "RANK": "0",
                "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stores[-1].port),
                "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            groups.append(forking.Program([script], cwd=tmp_path, env=own, modules=kills.MODULES, merged=True))
        said = [each.communicate(100)[0] for each in groups]
    assert [each.wait() for each in groups] == [0, 0], said[0][-3000:]
    first, second = (torch.load(tmp_path / f"model_{group}.pt") for group in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all("[30] loss" in each and "2 groups" in each for each in said)


# --- Managers in this process -----------------------------------------------------------------------------------------


class Managers:
    """Managers of groups of one rank, with a lighthouse of their own that waits for all of them."""

    def __init__(self, address: str) -> None:
        self.address, self._made = address, list[Any]()
        self.patience = 5.0  # seconds of a process group

    def __call__(self, name: str = "alone", store: TCPStore | None = None, **settings: Any) -> Manager:
        store = store or TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        given: dict[str, Any] = {
            "min_replica_size": 1, "use_async_quorum": False, "init_sync": False, "timeout": timedelta(seconds=10),
            "rank": 0, "world_size": 1, **settings,
        }  # fmt: skip
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=self.patience)), load_state_dict=lambda state: None,
            state_dict=dict, quorum_timeout=timedelta(seconds=120), store_addr="127.0.0.1", store_port=store.port,
            lighthouse_addr=self.address, replica_id=name, hostname="127.0.0.1", **given,
        )  # fmt: skip
        self._made.append((manager, store))
        return manager

    def group(self, **settings: Any) -> list[Manager]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return [self("group", store, rank=rank, world_size=2, **settings) for rank in range(2)]

    def several(self, groups: int, **settings: Any) -> list[Manager]:
        return [self(f"group_{number}", **settings) for number in range(groups)]

    def are_asking(self, groups: int) -> bool:
        with urllib.request.urlopen(f"{self.address}/status", timeout=60) as page:
            return f"[{groups}/" in page.read().decode()

    def close(self) -> None:
        for manager, _ in self._made:
            manager.shutdown(wait=False)


def _managers(groups: int, patience: int = 200) -> Iterator[Managers]:
    logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
    with kills.lighthouse(groups, patience) as address:
        made = Managers(address)
        yield made
        made.close()


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    """A Manager lies in a cycle. A worker forked later would collect its process group, which waits there for ever."""
    yield
    gc.collect()


@pytest.fixture
def managers() -> Iterator[Managers]:
    yield from _managers(1)


@pytest.fixture
def pair() -> Iterator[Managers]:
    yield from _managers(2, patience=5000)


def wrapped(size: int = 20, batch: int = 4, drop_last: bool = False, **options: Any) -> Loader:
    source: Any = DataLoader(range(size), batch_size=batch, drop_last=drop_last)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"seed": 1, "world": World(), "tail": "uneven", **options}
    return midepoch.wrap(source, **settings)


def test_the_feed_begins_quorums_and_counts_votes(managers: Managers) -> None:
    for asynchronous in (False, True):
        manager = managers(use_async_quorum=asynchronous, init_sync=asynchronous)
        begun = manager.start_quorum = mock.Mock(side_effect=manager.start_quorum)
        batches = feed(manager, wrapped())
        optimizer = OptimizerWrapper(manager, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
        seen = []
        for batch in batches:
            optimizer.zero_grad()
            optimizer.zero_grad()
            seen.append((batch.tolist()[0], batches.weight, begun.call_count, batches.position))
            if len(seen) in (2, 3):
                manager.report_error(RuntimeError("a link broke"))
            optimizer.step()
            manager.start_quorum()
        # The second step failed twice: it is given again, and counts once.
        firsts = [0, 4, 4, 4, 8, 12, 16]
        assert seen == list(zip(firsts, [1.0] * 7, range(1, 8), firsts, strict=True))
        assert (batches.epoch, batches.position, manager.current_step()) == (1, 0, 5)
        assert [batch.tolist() for batch in itertools.islice(batches, 1)] == [[0, 1, 2, 3]]
        manager.shutdown(wait=False)


def test_a_step_is_one_vote(managers: Managers) -> None:
    manager = managers()
    batches = feed(manager, wrapped(tail=None, global_batch=8))
    each = iter(batches)
    with pytest.raises(MidepochError, match="for which no batch was taken"):
        manager.should_commit()
    next(each)
    assert not batches.step_due and batches.state_dict()["position"] == 0
    with pytest.raises(MidepochError, match="within a step"):
        batches.load_state_dict(batches.state_dict())
    with pytest.raises(MidepochError, match=r"only a part of the global batch.*until feed\.step_due"):
        manager.should_commit()
    assert next(each).tolist() == [4, 5, 6, 7]
    assert batches.step_due
    with pytest.raises(MidepochError, match=r"before the vote on the last one: call optimizer\.step"):
        next(each)
    assert manager.should_commit()
    saved = batches.state_dict()
    assert batches.position == saved["position"] == 8
    next(each)
    batches._manager.report_error(RuntimeError("a link broke"))
    next(each)
    assert not manager.should_commit() and batches.state_dict() == saved


@pytest.mark.parametrize(("kind", "sync_every"), [(LocalSGD, 1), (LocalSGD, 4), (DiLoCo, 1), (DiLoCo, 4)])
def test_what_trains_between_quorums_is_refused_by_name(managers: Managers, kind: Any, sync_every: int) -> None:
    manager = managers()
    batches = feed(manager, wrapped())
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    inner, outer = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    local = LocalSGD(manager, model, inner, sync_every) if kind is LocalSGD else DiLoCo(
        manager, [model], inner, outer, sync_every
    )  # fmt: skip
    each = iter(batches)
    with local:
        next(each)
        words = f"{kind.__name__} trains on several batches between two quorums|not every few steps, as LocalSGD"
        with pytest.raises(midepoch.MidepochError, match=words):
            inner.step()
            next(each)
    assert batches.position == 0


def test_what_cannot_be_fed_is_refused(managers: Managers) -> None:
    manager, fed_before = managers(), managers("fed")
    feed(fed_before, wrapped())
    spares = managers("spares", min_replica_size=2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
    kept: dict[str, Any] = {"tail": "uneven", "world": World()}
    own: Any = DataLoader(range(12), batch_size=2)  # type: ignore[arg-type]
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (fed_before, wrapped(), MidepochError, "call it once"),
        (manager, [[1], [2]], TypeError, "and a wrapped loader, got a Manager and a list"),
        ("manager", wrapped(), TypeError, "got a str and a Loader"),
        (manager, wrapped(tail=None), ValueError, r"tail='pad'.*pass tail='uneven'"),
        (manager, wrapped(on_error="next"), ValueError, "on_error='next'.*elsewhere than the other groups: leave on_e"),
        (manager, midepoch.wrap(sources.numbers, shard=True, **kept), UnsupportedSourceError, "length is not known"),
        (manager, midepoch.wrap(own, shard=False, **kept), UnsupportedSourceError, "cannot be shared by another numb"),
        (spares, wrapped(world=World(0, 3)), UnsupportedSourceError, "fewer ranks in a group than groups"),
    ]
    for whose, loader, error, told in cases:
        with pytest.raises(error, match=told):
            feed(whose, loader)


class Groups:
    """Groups of one rank, each in a thread of this process."""

    def __init__(self, managers: list[Manager], loaders: list[Loader]) -> None:
        self.managers, self.feeds = managers, [feed(*each) for each in zip(managers, loaders, strict=True)]
        self.rows: list[list[Any]] = [[] for _ in managers]
        self.errors: list[BaseException] = []

    def train(self, epochs: int, fails: bool = False) -> None:
        threads = [threading.Thread(target=self._train, args=(number, epochs)) for number in range(len(self.feeds))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
        assert bool(self.errors) is fails, self.errors

    def _train(self, number: int, epochs: int) -> None:
        batches: Feed = self.feeds[number]
        try:
            while batches.epoch < epochs:
                for batch in batches:
                    row = batch.tolist(), batches.weight
                    # A store that looks up a name may not answer in time; then the step is made again.
                    if self.managers[number].should_commit():
                        self.rows[number].append(row)
        except BaseException as error:  # noqa: BLE001  # told in the test's thread
            self.errors.append(error)


def trained(groups: Groups) -> list[int]:
    return sorted(sample for rows in groups.rows for batch, weight in rows if weight for sample in batch)


@pytest.mark.parametrize("options", [{}, {"tail": None, "global_batch": 8}])
def test_a_group_without_samples_gets_a_batch_of_no_weight(pair: Managers, options: Any) -> None:
    groups = Groups(pair.several(2), [wrapped(9, **options) for _ in range(2)])
    groups.train(2)
    first, second = sorted(groups.rows)
    assert first == [([0, 1, 2, 3], 1.0), ([8], 2.0)] * 2
    assert [second[0], second[2]] == [([4, 5, 6, 7], 1.0)] * 2
    assert [(len(batch), weight) for batch, weight in (second[1], second[3])] == [(4, 0.0)] * 2
    assert len(second) == 4


def test_drop_last_ends_the_epoch_for_all_groups(pair: Managers) -> None:
    groups = Groups(pair.several(2), [wrapped(21, drop_last=True) for _ in range(2)])
    groups.train(2)
    assert trained(groups) == sorted([*range(16)] * 2)


def test_spares_follow_and_do_not_count(pair: Managers) -> None:
    groups = Groups(pair.several(2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES), [wrapped(12) for _ in range(2)])
    groups.train(1)
    assert trained(groups) == list(range(12))
    assert {weight for rows in groups.rows for _, weight in rows} == {0.0, 1.0}


@pytest.mark.parametrize("differs", ["place", "batch size", "world", "place in one group"])
def test_other_places_are_told_before_anything_is_trained(pair: Managers, managers: Managers, differs: str) -> None:
    within = differs == "place in one group"
    world = World(0, 2) if differs == "world" else World()
    other = wrapped(batch=5 if differs == "batch size" else 4, world=world)
    loaders = [wrapped(world=World(rank, 2)) for rank in range(2)] if within else [wrapped(), other]
    if "place" in differs:
        loaders[0].seek(position=4)
    groups = Groups(managers.group() if within else pair.several(2), loaders)
    before = [(each.epoch, each.position) for each in groups.feeds]
    groups.train(1, fails=True)
    assert [type(error) for error in groups.errors] == [MidepochError] * 2
    who = "processes of this group" if within else "groups"
    assert all(f"the {who} do not stand at one place" in str(error) for error in groups.errors)
    assert [(each.epoch, each.position) for each in groups.feeds] == before and groups.rows == [[], []]


def test_the_place_and_weights_of_an_older_step_are_refused(managers: Managers) -> None:
    """torchft takes a process for healthy that was not healed with the rest of its group."""
    healthy, joins = (managers(name) for name in ("healthy", "joins"))
    batches, joined = feed(healthy, wrapped()), feed(joins, wrapped())
    before = joined.state_dict()
    given = batches._give_state()
    joined._take_state(given)
    joins.load_state_dict({"step": 3, "batches_committed": 3})
    with pytest.raises(MidepochError, match=r"has sent its weights to this one is at step 0, others are at 3"):
        joined._take_state(dict(given))
    assert joined.state_dict() == before


# --- the model --------------------------------------------------------------------------------------------------------


@settings(max_examples=100_000 if CHAOS else 120, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_history_of_the_model_trains_each_sample_once(chance: random.Random) -> None:
    """Groups that die at named points, err, come late and come back; checked after each vote, on each rank."""
    model.run(chance, 8)


@pytest.mark.parametrize(("seed", "outages", "what"), [
    # Quorums had the number and the size of older ones, of other members, as a lighthouse had come back.
    *((seed, 0.1, "commits") for seed in (300978, 302978, 307296)),
    # A quorum had the number of one whose vote failed, and the same members: gradients of two steps would meet.
    *((seed, 0.5, "commits") for seed in (155, 169, 232)),
    # A group that joined had its ranks at two places, so one that was not healed would heal another.
    *((seed, 0.1, "behind") for seed in (300, 1527, 2264)),
])  # fmt: skip
def test_histories_of_the_model_that_once_went_wrong(seed: int, outages: float, what: str) -> None:
    assert getattr(model.run(random.Random(seed), 8, outages), what)


# Each round: who takes part, who errs behind the all-reduce, who errs before it, and who dies before the vote.
HISTORY: list[tuple[set[int], set[int], set[int], set[int]]] = [
    ({0, 1}, set(), set(), set()), ({0, 1}, {0, 1}, set(), set()), ({0, 1, 2}, set(), set(), set()),
    ({0, 1, 2}, set(), set(), set()), ({0, 1, 2}, {1}, set(), set()), ({0, 1, 2}, set(), set(), set()),
    ({0, 1, 2}, set(), set(), set()), ({0, 2}, set(), set(), set()),
    ({0, 2, 3}, {2}, set(), set()), ({0, 2, 3}, {0, 2, 3}, set(), set()), ({0, 2, 3}, set(), {3}, {3}),
    ({0, 2}, set(), set(), set()),
]  # fmt: skip


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("init_sync", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_model_does_what_torchft_does(pair: Managers, asynchronous: bool, init_sync: bool) -> None:
    size, batch = 17, 2
    job = model.Job(random.Random(0))
    job.chance.random = lambda: 0.9  # type: ignore[method-assign]  # what may or may not happen does not
    job.groups.clear()
    job.ranks, job.size, job.batch, job.together, job.spares, job.least = 1, size, batch, None, False, 1
    job.asynchronous, job.init_sync, job.source = asynchronous, init_sync, shuffled(size, batch)
    made: dict[int, tuple[Manager, Feed]] = {}
    rows: list[Any] = []

    def act(number: int, errs: bool, silent: bool, dies: bool) -> None:
        manager, batches = made[number]
        for _ in range(2):
            if next(iter(batches), None) is not None:
                break
        if silent:
            manager.report_error(RuntimeError("a link broke"))
        manager.allreduce(torch.ones(1)).wait()  # with one that errs, the others wait in vain
        if errs:
            manager.report_error(RuntimeError("a link broke"))
        if dies:
            manager._pg.abort()  # which closes its connections, as a process that ends does
            return
        done = manager.should_commit()
        place = batches.epoch, batches.position
        who = manager.participating_rank(), manager.num_participants(), manager.current_step()
        rows.append((f"group_{number}", done, *who, *place))

    present: set[int] = set()
    for members, errs, silent, dead in HISTORY:
        for number in present - members:
            made[number][0].shutdown(wait=False)
        for number in members - present:
            job.groups.append(model.Group(job, f"group_{number}", None))
            manager = pair(f"group_{number}", use_async_quorum=asynchronous, init_sync=init_sync)
            loader = midepoch.wrap(shuffled(size, batch), seed=3, world=World(), tail="uneven")
            made[number] = manager, feed(manager, loader)
        job.groups = [group for group in job.groups if int(group.name[-1]) in members]
        job.trace.clear()
        job.take(job.groups, dict.fromkeys(names(dead), "behind the allreduce"), names(errs), names(silent))
        rows.clear()
        acts = {number: (number, number in errs, number in silent, number in dead) for number in members}
        threads = {number: threading.Thread(target=act, args=told) for number, told in acts.items()}
        order = sorted(members, key=lambda number: number in present)  # who joins asks first
        for asking, number in enumerate(order, 1):
            threads[number].start()
            while number not in present and asking < len(order) and not pair.are_asking(asking):
                time.sleep(0.01)
        for thread in threads.values():
            thread.join(300)
        assert sorted(rows) == sorted(job.trace), (members, errs)
        present = members


def names(numbers: set[int]) -> set[str]:
    return {f"group_{number}" for number in numbers}


def shuffled(size: int, batch: int) -> Any:
    return DataLoader(range(size), batch_size=batch, shuffle=True)  # type: ignore[arg-type]
