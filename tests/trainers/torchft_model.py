"""A model of torchft: a lighthouse, Managers and groups that die at named points, all in one thread.

A `Job` takes steps as a random generator has it, and checks after each vote that the weights of every rank have seen
what its place says. `tests/trainers/test_torchft.py` compares the model with torchft itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchft.manager import WorldSizeMode

import midepoch
from midepoch import MidepochError
from midepoch.trainers.torchft import Feed

POINTS = ("in the quorum", "between quorum and batch", "in the allreduce", "behind the allreduce", "behind the vote")


class Told(Exception):  # noqa: N818  # no error
    """What a rank tells the other groups, before any of them has told it; None: one of its own group has not told."""

    def __init__(self, values: list[int] | None) -> None:
        super().__init__()
        self.values = values


class Store:
    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def set(self, key: str, text: str) -> None:
        self._told[key] = text

    def get(self, key: str) -> bytes:
        return self._told[key].encode()

    def wait(self, keys: list[str], timeout: object) -> None:
        if not set(keys) <= set(self._told):
            raise Told(None)

    def delete_key(self, key: str) -> None:
        self._told.pop(key, None)


@dataclass
class Quorum:
    """What the lighthouse tells one rank of a group; the names are torchft's."""

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    max_step: int
    max_rank: int | None
    max_world_size: int
    source: str | None  # the group to be healed from
    replica_ids: tuple[str, ...]


@dataclass
class Lighthouse:
    """Numbers quorums, and says who heals from whom: `compute_quorum_results` of torchft's manager.rs."""

    quorum_id: int = 0
    before: tuple[str, ...] = ()

    def quorum(self, steps: dict[str, int], failures: bool, ranks: int, init_sync: bool) -> dict[str, list[Quorum]]:
        """For each rank of each member. `steps`: of the members. `failures`: a member's last vote failed."""
        members = tuple(sorted(steps))
        if members != self.before or failures:
            self.quorum_id += 1
        self.before = members
        highest = max(steps.values())
        counting = [member for member in members if steps[member] == highest]
        told: dict[str, list[Quorum]] = {member: [] for member in members}
        for rank in range(ranks):
            primary = counting[rank % len(counting)]
            forced = init_sync and highest == 0
            behind = [m for m in members if steps[m] != highest or (forced and m != primary)]
            sound = [m for m in members if m not in behind]
            sources = {m: sound[(number + rank) % len(sound)] for number, m in enumerate(behind)}
            for number, member in enumerate(members):
                place = counting.index(member) if member in counting else None
                found = (self.quorum_id, number, len(members), highest, place, len(counting), sources.get(member))
                told[member].append(Quorum(*found, members))
        return told


class Manager:
    """What `Feed` uses of a torchft.Manager, with torchft's order of events."""

    def __init__(self, job: Job, rank: int, store: Store) -> None:
        self._job, self._group_rank, self._group_world_size = job, rank, job.ranks
        self._store, self._timeout = store, None
        self._client: Any = self
        self._use_async_quorum, self._init_sync = job.asynchronous, job.init_sync
        self._min_replica_size, self._pg = job.least, self
        self._replica_world_size_mode = WorldSizeMode.FIXED_WITH_SPARES if job.spares else WorldSizeMode.DYNAMIC
        self._step, self._quorum_id, self._healing = 0, -1, False
        self._commit_failures = 0
        self._pending_state_dict: Any = None
        self._error: Exception | None = None
        self._participating: tuple[int | None, int] = (None, 0)
        self._load: dict[str, Callable[[Any], None]] = {}
        self._save: dict[str, Callable[[], Any]] = {}
        self.told: tuple[Quorum, Any] | None = None  # by the lighthouse, and the state that was sent
        self.members: tuple[str, ...] = ()  # of the process group; none if it could not be made
        self.calls = 0  # collective ones of the process group
        self.asked = False  # `Feed` has made one in this step
        self.former = -1  # the number of the quorum before; the feed may ask for this one several times
        self.unconfigured = False  # the process group could not be made
        self.result = False  # of the vote of all ranks of the group
        self.compared: list[int] | None = None  # what the ranks of all groups have told, once that is known

    def reaches(self, group: Group, number: int) -> bool:
        """Whether this rank's process group is also that of a rank of another group."""
        return group.ranks[number].manager.members == self.members

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "gloo"

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        self._load[key], self._save[key] = load, save

    def sent(self, feed: Feed) -> dict[str, Any]:
        """What `Manager` sends while a quorum forms. The feed has not noted its place yet, as it has in torchft."""
        feed._saved = feed.state_dict()
        return {"user": {key: save() for key, save in self._save.items()}, "step": self._step}

    def _quorum(self) -> Quorum:
        assert self.told is not None, "a second quorum in a step"
        return self.told[0]

    def start_quorum(self) -> None:
        self._error, self._healing, self.asked = None, False, False
        self._quorum_id = self.former
        quorum = self._client._quorum()
        assert self.told is not None
        state, self.told = self.told[1], None
        place, size = (
            (quorum.max_rank, quorum.max_world_size)
            if self._use_async_quorum
            else (quorum.replica_rank, quorum.replica_world_size)
        )
        if self._job.spares:
            size = min(size, self._min_replica_size)
            place = None if place is not None and place >= self._min_replica_size else place
        self._participating = place, size
        if quorum.quorum_id != self.former:
            self._quorum_id, self.members, self.calls = quorum.quorum_id, quorum.replica_ids, 0
            if self.unconfigured:
                self.members = ()
                self.report_error(RuntimeError("a member is dead"))
                return
        if quorum.source is not None:
            self._healing = True
            if state is None:
                self.report_error(RuntimeError("the source is dead"))
            else:
                self._pending_state_dict, self._step = state, quorum.max_step
        if not self._use_async_quorum and self._healing:
            self._apply()
            self._healing = False

    def _apply(self) -> None:
        if self._pending_state_dict is None:
            assert self._error is not None
            return
        for key, load in self._load.items():
            load(self._pending_state_dict["user"][key])
        self._pending_state_dict = None

    def participating_rank(self) -> int | None:
        return self._participating[0]

    def num_participants(self) -> int:
        return self._participating[1]

    def is_participating(self) -> bool:
        return self._participating[0] is not None and not self._healing

    def current_step(self) -> int:
        return self._step

    def errored(self) -> Exception | None:
        return self._error

    def report_error(self, error: Exception) -> None:
        self._error = error

    def allreduce(self, tensor: torch.Tensor, reduce_op: Any = None) -> Any:
        """Of what `Feed` compares. It is asked for it twice: what all ranks tell is known when all have told it."""
        if self._error is None:
            self.asked = True
            if self.compared is None:
                raise Told(tensor.tolist() if self.is_participating() else [0] * len(tensor))
            tensor.copy_(torch.tensor(self.compared))
        return self

    def wait(self) -> None:
        pass

    wait_quorum = wait

    def ready(self) -> bool:
        """What this rank votes for; before it, the state that was sent is loaded."""
        if self._healing:
            self._apply()
        return self.num_participants() >= self._min_replica_size and self._error is None

    def should_commit(self) -> bool:
        self._step += self.result
        self._commit_failures = 0 if self.result else self._commit_failures + 1
        return self.result


@dataclass
class Rank:
    """One process of a group. `counts`: how often each sample was trained on."""

    manager: Manager
    feed: Feed
    counts: list[int]
    each: Iterator[Any] = field(default_factory=lambda: iter(()))
    first: list[Any] = field(default_factory=list)  # the batch with which its step begins


class Group:
    def __init__(self, job: Job, name: str, saved: dict[str, Any] | None) -> None:
        self.name, self.failed = name, False
        self.ranks: list[Rank] = []
        store = Store()
        for rank in range(job.ranks):
            manager = Manager(job, rank, store)
            tail: Any = None if job.together else "uneven"
            loader = midepoch.wrap(
                job.source, seed=3, world=midepoch.World(rank, job.ranks), tail=tail, verify="off",
                randomness="none", global_batch=job.together,
            )  # fmt: skip
            one = Rank(manager, Feed(manager, loader), [0] * job.size)
            manager.register_state_dict_fn("counts", one.counts.__init__, one.counts.copy)  # type: ignore[misc]
            if saved is not None:
                one.counts[:] = saved["counts"]
                manager._step = saved["step"]
                one.feed.load_state_dict(saved["data"])
            one.each = iter(one.feed)
            self.ranks.append(one)

    def step(self, chance: random.Random) -> int:
        """As the Manager's server is told it by the rank that asks last."""
        return chance.choice(self.ranks).manager.current_step()

    def take(self, rank: Rank) -> Any:
        for _ in range(2):
            for batch in rank.each:
                return batch
            rank.each = iter(rank.feed)
        raise AssertionError("two passes without a batch")


class Job:
    """Groups that train step by step, under a model of torchft. `outages`: how likely the lighthouse dies in a step."""

    def __init__(self, chance: random.Random, outages: float = 0.1) -> None:
        self.chance, self.outages = chance, outages
        self.ranks = chance.choice([1, 1, 2])
        self.size, self.batch = chance.randint(1, 24), chance.randint(1, 3)
        self.together = chance.choice([None, None, chance.randint(1, 12)])
        self.asynchronous, self.init_sync = chance.random() < 0.5, chance.random() < 0.7
        self.spares = chance.random() < 0.2
        self.least = self.ranks if self.spares else chance.choice([1, 1, 2])
        self.source: Any = DataLoader(range(self.size), batch_size=self.batch, shuffle=True)  # type: ignore[arg-type]
        self.lighthouse, self.launched = Lighthouse(), 0
        self.orders: list[list[int]] = []
        self.groups: list[Group] = []
        self.disk: dict[str, Any] | None = None
        self.kills = self.commits = self.behind = 0
        self.trace: list[tuple[Any, ...]] = []
        for _ in range(chance.randint(1, 4)):
            self.launch()

    def launch(self, saved: dict[str, Any] | None = None) -> None:
        """Another group, which has loaded what was saved to disk, if anything."""
        self.launched += 1
        self.groups.append(Group(self, f"group_{self.chance.randint(0, 9)}:{self.launched}", saved))

    def order(self, epoch: int) -> list[int]:
        while len(self.orders) <= epoch:
            loader = midepoch.wrap(self.source, seed=3, verify="off", world=midepoch.World())
            loader.seek(epoch=len(self.orders))
            self.orders.append([sample for batch in loader for sample in batch.tolist()])
        return self.orders[epoch]

    # --- one step ---

    def step(self) -> None:
        """A step of the groups that are there, of which some die, and others come back."""
        chance = self.chance
        if chance.random() < self.outages:
            self.lighthouse = Lighthouse()  # it has died and come back
        if not self.groups:
            for _ in range(chance.randint(1, 3)):  # all have died
                self.launch(self.disk)
        elif len(self.groups) < 4 and chance.random() < 0.3:
            self.launch()
        # Some come too late for the quorum. torchft wants more than half of those that are alive; where these had none
        # of the newest weights among them, the weights of the others would be another history.
        joining = [group for group in self.groups if chance.random() < 0.9]
        newest = max(rank.manager.current_step() for group in self.groups for rank in group.ranks)
        if 2 * len(joining) <= len(self.groups) or not any(
            rank.manager.current_step() == newest for group in joining for rank in group.ranks
        ):
            joining = list(self.groups)
        dying = {group.name: chance.choice(POINTS) for group in joining if chance.random() < 0.12}
        breaks = {group.name for group in joining if chance.random() < 0.05}
        self.take(joining, dying, breaks)

    def take(
        self, joining: list[Group], dying: dict[str, str], breaks: Collection[str] = (), silent: Collection[str] = ()
    ) -> None:
        """A step of these groups.

        Some of them die at a point, some err behind the all-reduce (`breaks`), some before it (`silent`).
        """
        chance, dying = self.chance, dict(dying)
        told = self.lighthouse.quorum(
            {group.name: group.step(chance) for group in joining}, any(group.failed for group in joining), self.ranks,
            self.init_sync,
        )  # fmt: skip
        by_name = {group.name: group for group in joining}
        dead = {name for name, point in dying.items() if point == "in the quorum"}
        sent = {name: [rank.manager.sent(rank.feed) for rank in group.ranks] for name, group in by_name.items()}
        alive = [group for group in joining if group.name not in dead]
        ranks = [(group, number, rank) for group in alive for number, rank in enumerate(group.ranks)]
        orders = {}
        keeps = {  # by rank, who takes this quorum for the one before
            number: [group.name for group in joining
                     if group.ranks[number].manager._quorum_id == told[group.name][number].quorum_id]
            for number in range(self.ranks)
        }  # fmt: skip
        for group, number, rank in ranks:
            quorum = told[group.name][number]
            lost = quorum.source is None or (quorum.source in dead and chance.random() < 0.7)
            orders[group.name, number] = quorum, None if lost else sent[str(quorum.source)][number]
            rank.manager.former = rank.manager._quorum_id
            rank.manager.unconfigured = bool(keeps[number]) or (bool(dead) and chance.random() < 0.7)
        # Ranks are asked for a batch until all of them have heard what the others of their group and of all groups say.
        values: list[dict[str, list[int]]] = [{} for _ in range(self.ranks)]
        for attempt in range(4):
            for group, number, rank in ranks:
                if rank.first or (attempt and group.name in dying and dying[group.name] == POINTS[1]):
                    continue
                rank.manager.told, rank.manager.compared = orders[group.name, number], None
                if attempt > 1:
                    heard = [
                        said for name, said in values[number].items() if rank.manager.reaches(by_name[name], number)
                    ]
                    rank.manager.compared = [max(each) for each in zip(*heard, strict=True)] if heard else None
                try:
                    rank.first = [group.take(rank)]
                except Told as said:
                    if said.values is not None:
                        values[number][group.name] = said.values
                except MidepochError as error:
                    assert "it was not healed when the rest of its group was" in str(error)
                    dying[group.name] = POINTS[1]
                    self.behind += 1
        for group in alive:
            for rank in group.ranks if group.name in silent else ():
                rank.manager.report_error(RuntimeError("a link broke"))
        contributions: dict[str, list[dict[int, float]]] = {}
        for group in alive:
            if not all(rank.first for rank in group.ranks):
                continue
            whole: Any = Counter()
            for rank in group.ranks:
                due = False
                while not due:
                    batch = (rank.first.pop() if rank.first else group.take(rank)).tolist()
                    due = rank.feed.step_due
                    if rank.feed.weight:
                        whole.update(dict.fromkeys(batch, rank.feed.weight / len(batch) / self.ranks))
            contributions[group.name] = [whole if rank.manager.is_participating() else {} for rank in group.ranks]
        for group in alive:
            for rank in group.ranks:
                rank.manager.calls += rank.manager.asked + (rank.manager.errored() is None)
        early = dead | {n for n, point in dying.items() if point in ("between quorum and batch", "in the allreduce")}
        late = {n for n, point in dying.items() if point == "behind the allreduce"}
        # One that errs before it has contributed leaves all others of its process group waiting, also if it dies then.
        whole_groups = {
            group.name for group in alive
            if group.name not in early and not any(rank.manager.errored() for rank in group.ranks)
        }  # fmt: skip
        alive = [group for group in alive if group.name not in early | late]
        reduced = {}
        errs = set()
        mixed = set()  # groups whose calls meet those of others' former steps
        for group in alive:
            for number, rank in enumerate(group.ranks):
                total: Any = Counter()
                if not rank.manager.members:
                    errs.add(group.name)
                for name in rank.manager.members:
                    if name not in whole_groups or not rank.manager.reaches(by_name[name], number):
                        errs.add(group.name)
                        continue
                    if by_name[name].ranks[number].manager.calls != rank.manager.calls:
                        mixed.add(group.name)
                    total.update(contributions[name][number])
                reduced[group.name, number] = total
        for group in alive:
            for rank in group.ranks:
                if group.name in errs or group.name in breaks or (late and chance.random() < 0.5):
                    rank.manager.report_error(RuntimeError("a link broke"))
        for group in alive:
            totals = [reduced[group.name, number] for number in range(self.ranks)]
            self._vote(group, totals, dying.get(group.name) == "behind the vote")
            assert group.failed or group.name not in mixed, "gradients of two steps met"
        gone = set(dying)
        self.kills += len(gone)
        self.groups = [group for group in self.groups if group.name not in gone]
        for group in self.groups:
            # Otherwise no vote of the group could succeed any more, nor any of a group that it heals.
            stands = {(rank.manager.current_step(), rank.feed.epoch, rank.feed.position) for rank in group.ranks}
            assert len({step for step, _, _ in stands}) == len(stands), (group.name, stands)

    def _vote(self, group: Group, reduced: list[dict[int, float]], dies: bool) -> None:
        votes = [rank.manager.ready() for rank in group.ranks]
        result = all(votes)
        group.failed = not result
        for rank, total in zip(group.ranks, reduced, strict=True):
            rank.manager.result = result
            assert rank.feed._vote() == result
            if result:
                values = [value / rank.manager.num_participants() for value in total.values()]
                assert all(abs(value - 1 / len(values)) < 1e-9 for value in values), "not the mean over the samples"
                for sample in total:
                    rank.counts[sample] += 1
            if not dies:
                self.check(rank)
                self.trace.append(
                    (group.name, result, rank.manager.participating_rank(), rank.manager.num_participants(),
                     rank.manager.current_step(), rank.feed.epoch, rank.feed.position)
                )  # fmt: skip
        if result and not dies:
            self.commits += 1
            first = group.ranks[0]
            if first.manager.participating_rank() == 0 and self.chance.random() < 0.5:
                self.disk = {
                    "counts": list(first.counts), "step": first.manager.current_step(),
                    "data": first.feed.state_dict(),
                }  # fmt: skip

    def check(self, rank: Rank) -> None:
        """The weights have seen what the place says: all of the epochs before, and so much of this one."""
        epoch, position = rank.feed.epoch, rank.feed.position
        expected = [epoch] * self.size
        for sample in self.order(epoch)[:position]:
            expected[sample] += 1
        assert rank.counts == expected, (rank.counts, expected, epoch, position)


def run(chance: random.Random, steps: int, outages: float = 0.1) -> Job:
    job = Job(chance, outages)
    for _ in range(steps):
        job.step()
    return job
