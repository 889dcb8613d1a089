"""torchft: replica groups leave and join at any step, and `feed` gives them each sample of an epoch once.

The groups share an epoch as they are in each step's quorum. What a failed step was given is given again.
"""

from __future__ import annotations

import copy
import json
import sys
import zlib
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.distributed import ReduceOp
from torchft import Manager

from midepoch.errors import MidepochError, UnsupportedSourceError
from midepoch.loader.lending import loader_of
from midepoch.loader.loader import Loader
from midepoch.loader.part import Part
from midepoch.state.format import State
from midepoch.trainers import torchft_private as private
from midepoch.world import World

__all__ = ["Feed", "feed"]

_KEY = "midepoch"
_MOST = 1 << 31
_END = object()


def feed(manager: Manager, loader: Loader) -> Feed:
    """Batches for a job of torchft, in place of its sampler and a loader with a state of its own:

        batches = feed(manager, midepoch.wrap(DataLoader(dataset, batch_size=64, shuffle=True), seed=0, tail="uneven"))
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = batches.weight * criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()

    Call it once, when the Manager and the loader are made, in every process of every group.

    From then on, a request for the first batch of a step begins the step's quorum. Nothing else does: `zero_grad` and
    `start_quorum` begin none. The Manager sends the place in the data along with the weights to a group that joins.

    Args:
        manager: of this process.
        loader: the result of `midepoch.wrap`, with ``tail="uneven"`` or ``global_batch=``. Its world is the ranks of
            this group that share data: by default those of RANK and WORLD_SIZE, as torchrun sets them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the loader would repeat or leave out samples at the end of an epoch, or after a bad one.
        UnsupportedSourceError: the loader's source cannot be shared by another number of ranks, or torchft lacks a
            private part that midepoch uses.
        MidepochError: it was called for this Manager before.
    """
    found = loader_of(loader)
    if not isinstance(manager, Manager) or found is None:
        raise TypeError(
            f"feed takes a torchft.Manager and a wrapped loader, got a {type(manager).__name__} and a "
            f"{type(loader).__name__}: feed(manager, midepoch.wrap(loader))"
        )
    return Feed(manager, found)


class Feed:
    """What `feed` returns. Each pass is an epoch; a group that joins begins with what is left of the others'.

    A pass ends for all groups after the same step. A group that is healed into a later epoch ends its pass too.

    Attributes:
        loader: as given to `feed`. Do not iterate it. Save the feed's state, not the loader's.
    """

    def __init__(self, manager: Any, loader: Loader) -> None:
        private.check(manager)
        if private.is_fed(manager):
            raise MidepochError("feed was called for this Manager before: call it once, and loop over what it returned")
        self.loader, self._manager, self._part = loader, manager, Part("of torchft", loader)
        self._group = self._part.loader.world
        if (tail := self._part.adapter.tail_in_use) != "uneven":
            raise ValueError(
                f"the loader has tail={tail!r}, so that some samples would be trained on twice or not at "
                "all whenever groups leave or join: pass tail='uneven' to midepoch.wrap"
            )
        if self._part.options["on_error"] == "next":
            raise ValueError(
                "the loader has on_error='next', so that a group which cannot read a batch would go on after it, and "
                "stand elsewhere than the other groups: leave on_error out, and let the dataset pass over bad samples"
            )
        participants = private.groups_that_count(manager)
        if participants is not None and self._group.world_size > participants:
            raise UnsupportedSourceError(
                f"with FIXED_WITH_SPARES, {participants} groups of {self._group.world_size} ranks: in the first step "
                "torchft takes the gradients of some ranks from a spare, which has none; use fewer ranks in a group "
                "than groups"
            )
        if self._part.length(loader.epoch) is None:
            raise UnsupportedSourceError(
                "the source's length is not known, so groups cannot tell that only others have samples left: use a "
                "source that has a length"
            )
        loader.reshard(self._group)  # raises if its source cannot be shared anew
        self._batches = iter(loader)
        self._epoch = loader.epoch  # of the step that is under way
        self._world = self._group
        self._saved: State = loader.state_dict()  # before the step that is under way
        self._healed: Any = None  # the state that this quorum has brought
        self._agreed: tuple[int, int, bool] | None = None
        self._told = ""  # about what the processes of this group have last told each other where they stand
        self._begun = self._failed = self._given = self._filled = False
        self._factor = 1.0
        manager.register_state_dict_fn(_KEY, self._take_state, self._give_state)
        private.fail_mistaken_quorums(manager)
        self._start_quorum = private.replace(manager, "start_quorum", self._begin_none)
        self._should_commit = private.replace(manager, "should_commit", self._vote)

    # --- where it stands ---

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return int(self.state_dict()["epoch"])

    @property
    def position(self) -> int:
        """Units of this epoch that were trained on, by all groups together."""
        return int(self.state_dict()["position"])

    @property
    def weight(self) -> float:
        """A factor for the mean loss of the batch handed out last; 0.0 if this group does not count.

        torchft's mean over the groups that take part is then the mean over the samples of the step; `Loader.weight`
        has the formula.
        """
        return 0.0 if self._filled else self._factor * self.loader.weight

    @property
    def step_due(self) -> bool:
        """As `Loader.step_due`: whether the optimizer is to step after the batch handed out last."""
        return self._filled or self.loader.step_due

    def state_dict(self) -> State:
        """Where the next step begins. The last step that the Manager has committed counts; a later one does not."""
        return dict(self._saved) if self._begun or self._failed else self.loader.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue from a state that was saved to disk. Load that of the Manager too, in every group.

        Raises:
            MidepochError: a step is under way.
            StateError: as `Loader.load_state_dict`. The feed is unchanged.
        """
        if self._begun:
            raise MidepochError("a state was loaded within a step: load it before the first batch, or after the vote")
        self.loader.load_state_dict(state)
        self._failed = False

    # --- steps ---

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self)

    def next_batch(self, epoch: int | None) -> tuple[Any, int]:
        """The next batch and its epoch. `epoch`: of the pass, if it has begun. Raises StopIteration at its end."""
        if self._given and self.step_due:
            raise MidepochError(
                "the next batch was asked for before the vote on the last one: call optimizer.step(), or "
                "manager.should_commit(), for each step, and not every few steps, as LocalSGD and DiLoCo do"
            )
        if not self._given:
            if not self._begun:
                if epoch is not None and epoch != self.epoch:
                    raise StopIteration
                self._begin_step()
            if epoch is not None and epoch != self._epoch:
                raise StopIteration  # the next pass takes the step that has begun
        return self._take(), self._epoch

    def _begin_step(self) -> None:
        """Form a quorum, go where it says, and share what follows among its groups."""
        manager, loader = self._manager, self.loader
        self._saved, self._healed = self.state_dict(), None
        self._start_quorum()
        manager.wait_quorum()
        # Sent to this group, but loaded only at the vote, after the batch; a synchronous quorum has loaded it.
        coming = private.state_on_its_way(manager, _KEY)
        if coming is not None:
            self._take_state(coming)
        if self._failed and self._healed is None:
            loader.rollback()
        self._failed = False
        rank, groups, group = manager.participating_rank(), manager.num_participants(), self._group
        primarys = private.first_step_is_the_primarys(manager)
        self._agree(groups, primarys)
        self._begun = True
        if primarys:
            # All read the primary's batch, so that it does not matter whose gradients are taken.
            world, self._factor = group, float(groups)
        else:
            # Who does not count reads what the first group reads, to go on with the others.
            place = (rank or 0) * group.world_size + group.rank
            world = World(place, groups * group.world_size, group.local_rank)
            self._factor = 0.0 if rank is None else 1.0
        if world != self._world:
            loader.reshard(world)
            self._world = world
        if not self._part.anyone_has_more():  # less is left than a global batch, and drop_last leaves it out
            self._part.begin_epoch()
            self._batches = iter(loader)
            if not self._part.anyone_has_more():
                raise MidepochError(
                    f"an epoch has less than one global batch of {groups} groups, and drop_last leaves that out, so "
                    "nothing would ever be trained on: use smaller batches or fewer groups, or drop_last=False"
                )
        self._epoch = loader.epoch

    def _take(self) -> Any:
        """A batch of this step."""
        loader = self.loader
        self._filled = False
        while True:
            before = loader.epoch, loader.position
            batch = next(self._batches, _END)
            if batch is not _END:
                self._given = True
                return batch
            self._batches = iter(loader)
            if (loader.epoch, loader.position) != before:  # only other ranks have samples
                self._given = self._filled = True
                return self._filler()

    def _filler(self) -> Any:
        """A batch of the usual shape, which does not count."""
        try:
            batch = self.loader.peek()
        except StopIteration:  # the source is too small for so many ranks
            self._world = World(0, self._world.world_size)
            self.loader.reshard(self._world)
            batch = self.loader.peek()
        return copy.deepcopy(batch)  # it will be handed out to be trained on

    def _vote(self, *arguments: Any, **keywords: Any) -> bool:
        """In place of `Manager.should_commit`."""
        _refuse_local(private.asked_by_local(sys._getframe(1)))
        if not self._given or not self.step_due:
            what = "no batch was taken" if not self._given else "only a part of the global batch was taken"
            raise MidepochError(f"a vote on a step for which {what}: take batches from the feed until feed.step_due")
        self._begun = self._given = False
        self._failed = True  # unless it is counted
        if self._should_commit(*arguments, **keywords):
            self.loader.commit()
            self._failed = False
        return not self._failed

    def _begin_none(self, *arguments: Any, **keywords: Any) -> None:
        """In place of `Manager.start_quorum`: the feed begins one where a batch is asked for."""
        _refuse_local(private.asked_by_local(sys._getframe(1)))

    # --- what groups tell each other ---

    def _give_state(self) -> dict[str, Any]:
        """For a group that joins. Called by the Manager, in a thread of its own, while a quorum forms."""
        return {"step": self._manager.current_step(), "data": dict(self._saved)}

    def _take_state(self, given: dict[str, Any]) -> None:
        """What a healthy group has given. The Manager calls this once more at the vote, if that is asynchronous.

        Raises:
            MidepochError: it is of an older step. torchft asks a group for one step, so a process of it that was not
                healed with the rest is taken for healthy, and gives old weights as those of the newest step.
        """
        if given is self._healed:
            return
        if given["step"] != (step := self._manager.current_step()):
            raise _not_healed("the process that has sent its weights to this one", given["step"], step)
        self.loader.load_state_dict(given["data"])
        self._saved, self._healed = given["data"], given

    def _agree(self, groups: int, primarys: bool) -> None:
        """Compare the place and the size of a step with all other processes', whenever the groups have changed.

        A group that is behind, such as one that was late for a quorum of a lighthouse that died, fails the step.

        Raises:
            MidepochError: they differ, or this process was not healed when the rest of its group was.
        """
        manager, quorum = self._manager, (private.quorum_of(self._manager), groups, primarys)
        if quorum == self._agreed:
            return
        loader, state, step = self.loader, self.loader.state_dict(), manager.current_step()
        names = ("adapter", "epoch", "position", "seed", "size", "batch_size", "fingerprint")
        told = [step, *(state[name] for name in names), loader.global_batch, self._group.world_size]
        value = zlib.crc32(json.dumps(told).encode()) % _MOST
        if not self._same_in_group(f"{_KEY}/{quorum[0]}/{groups}", value, step):
            manager.report_error(MidepochError("another process of this group has failed, or was not healed"))
        # The greatest and, as the greatest of what is missing to _MOST, the least of both.
        most = torch.tensor([value, _MOST - value, step, _MOST - step], device=private.device_of(manager))
        manager.allreduce(most, reduce_op=ReduceOp.MAX).wait()
        value, rest, highest, behind = most.tolist()
        if manager.errored() is None and manager.is_participating() and value + rest != _MOST:
            if highest + behind == _MOST:
                raise self._elsewhere("groups")
            # All processes of the group that is behind are at this step, so the next quorum heals them.
            manager.report_error(
                MidepochError(
                    f"a group is at step {_MOST - behind}, others are at {highest}: this step is given again in the "
                    "next quorum, which heals that group"
                )
            )
        self._agreed = quorum if manager.errored() is None else None

    def _same_in_group(self, about: str, value: int, step: int) -> bool:
        """Whether all processes of this group stand where this one stands, and none has failed in this step yet.

        `about`: the same in all of them, and another one in another quorum.

        Raises:
            MidepochError: none has failed, and one stands elsewhere. Another step would not bring them together.
        """
        manager = self._manager
        if private.ranks_of(manager) == 1 or about == self._told:
            return True
        failed = manager.errored() is not None
        told = private.told_in_group(manager, about, self._told, json.dumps([failed, value, step]))
        self._told = about
        if told is None:
            return False
        failures, values, steps = zip(*map(json.loads, told), strict=True)
        if any(failures):
            return False
        if step < max(steps):
            raise _not_healed("this process", step, max(steps))
        if len(set(steps)) == 1 and len(set(values)) > 1:
            raise self._elsewhere("processes of this group")
        return len(set(values)) == 1

    def _elsewhere(self, who: str) -> MidepochError:
        loader, state = self.loader, self.loader.state_dict()
        return MidepochError(
            f"the {who} do not stand at one place, or do not take steps of one size (this one: epoch {state['epoch']}, "
            f"position {state['position']}, batch size {state['batch_size']}, global_batch {loader.global_batch}): "
            "load the same state in all groups, that of the Manager included, and wrap the same data alike"
        )


def _not_healed(who: str, step: int, highest: int) -> MidepochError:
    return MidepochError(
        f"{who} is at step {step}, others are at {highest}: it was not healed when the rest of its group was, so these "
        "weights are old; start this group again"
    )


class _Epoch:
    """One pass over a feed."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._epoch: int | None = None
        self._over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        try:
            batch, self._epoch = self._feed.next_batch(self._epoch)
        except StopIteration:
            self._over = True
            raise
        return batch


def _refuse_local(name: str) -> None:
    """Refuse what trains on several batches between two quorums. `name`: of its class; empty if there is none."""
    if name:
        raise UnsupportedSourceError(
            f"{name} trains on several batches between two quorums, and a group that dies loses those since the last "
            "one: use torchft's Optimizer and DistributedDataParallel, or keep the loader's state by hand"
        )
