"""Loaders broken on purpose, each in one way that has been seen in the wild; each must fail exactly its law."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from midepoch.errors import StateCorruptError, StateMismatchError
from midepoch.world import World
from support import reference_loader
from support.reference_loader import ReferenceLoader, RigidLoader, reseal

BROKEN: list[tuple[str, type[ReferenceLoader]]] = []
BROKEN_WIDELY: list[tuple[str, type[ReferenceLoader]]] = []  # whose fault shows in other laws as well


def breaks(law: str, *, widely: bool = False) -> Any:
    def note(kind: type[ReferenceLoader]) -> type[ReferenceLoader]:
        (BROKEN_WIDELY if widely else BROKEN).append((law, kind))
        return kind

    return note


# Transparent: the plain loader gives something else. `plain` makes another one than the usual.


@breaks("transparent")
class GivesOneSampleTwice(ReferenceLoader):
    """And another one never."""

    def order(self, epoch: int) -> list[int]:
        order = super().order(epoch)
        return order if self.items is not None else [4 if index == 5 else index for index in order]


@breaks("transparent")
class HasNoLength(ReferenceLoader):
    def __len__(self) -> int:
        raise TypeError("this cannot be known")

    @property
    def batches_done(self) -> int:
        return len(self)


class Ends:
    """A plain loader that ends by an error."""

    def __init__(self, inside: Any) -> None:
        self.inside, self.sampler = inside, inside.sampler

    def __len__(self) -> int:
        return len(self.inside)

    def __iter__(self) -> Iterator[Any]:
        yield from self.inside
        raise ValueError("all seen")


@breaks("transparent")
class SwallowsTheErrorAtTheEnd(ReferenceLoader):
    @staticmethod
    def plain(rank: int = 0, world_size: int = 1, **options: Any) -> Any:
        return Ends(reference_loader.plain(rank, world_size, **options))


@breaks("transparent")
class TakesAnotherOrder(ReferenceLoader):
    """Although it says that its order is that of the plain loader."""

    def order(self, epoch: int) -> list[int]:
        return super().order(epoch + 1)


@breaks("transparent")
class ChangesWhatIsFixed(ReferenceLoader):
    """The plain loader draws nothing, so that a sample is always the same."""

    @staticmethod
    def plain(rank: int = 0, world_size: int = 1, **options: Any) -> Any:
        loader = reference_loader.plain(rank, world_size, **options)
        rows = [torch.tensor([index, 0, 0], dtype=torch.float64) for index in range(len(loader.sampler))]
        return DataLoader(rows, loader.batch_size, sampler=loader.sampler)  # type: ignore[arg-type]


class HasASource(ReferenceLoader):
    """Has the plain loader as its source."""

    def __init__(self, rank: int = 0, world_size: int = 1, **more: Any) -> None:
        super().__init__(rank, world_size, **more)
        self.source = reference_loader.plain_of(self)

    def begin(self) -> tuple[int, int]:
        if self.items is None:
            self.leave_traces()
        return super().begin()

    def leave_traces(self) -> None:
        """As reading it once would."""
        self.source.sampler.passes += 1
        self.source.dataset.reads += self.size


@breaks("transparent")
class ReadsLessThanItGives(HasASource):
    """Some other place has the samples."""

    def leave_traces(self) -> None:
        super().leave_traces()
        self.source.dataset.reads -= 1


@breaks("transparent")
class DividesOtherwise(ReferenceLoader):
    """The plain loader leaves out what does not fill all ranks, and it repeats."""

    @staticmethod
    def plain(rank: int = 0, world_size: int = 1, **options: Any) -> Any:
        loader = reference_loader.plain(rank, world_size, **options)
        if world_size == 1:
            return loader
        indices = list(loader.sampler)[rank : len(loader.sampler) // world_size * world_size : world_size]
        return DataLoader(loader.dataset, loader.batch_size, sampler=indices)


# Determinism.


@breaks("determinism")
class SeedsFromTheProcess(ReferenceLoader):
    """From the second epoch on the random columns depend on the process; the state carries that along."""

    def __init__(self, rank: int = 0, world_size: int = 1, **more: Any) -> None:
        super().__init__(rank, world_size, **more)
        self.salt = os.getpid() if world_size == 1 else 0

    def key(self, epoch: int, position: int) -> list[int]:
        return [*super().key(epoch, position), self.salt if epoch else 0]

    def detail(self) -> str:
        return str(self.salt)

    def check_topology(self, state: dict[str, Any]) -> None:
        if not state["detail"].isdigit():
            raise StateCorruptError("the detail is a process's number")

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.salt = int(state["detail"])


@breaks("determinism")
class SameOrderInEachEpoch(ReferenceLoader):
    plain = None  # from which it differs as well

    def order(self, epoch: int) -> list[int]:
        return super().order(0)


@breaks("determinism")
class SameDrawsForEachSample(ReferenceLoader):
    """As when every worker seeds numpy with the same number."""

    def key(self, epoch: int, position: int) -> list[int]:
        return [self.seed, epoch]


# Tail.


class ForgetsTheStream(ReferenceLoader):
    """The pass that goes on after a load draws other random columns."""

    loaded = salted = False

    def forgets(self, epoch: int, position: int) -> bool:
        raise NotImplementedError

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.loaded = True

    def begin(self) -> tuple[int, int]:
        epoch, position = super().begin()
        self.salted = self.loaded and self.forgets(epoch, position)
        self.loaded = False
        return epoch, position

    def key(self, epoch: int, position: int) -> list[int]:
        return [*super().key(epoch, position), int(self.salted)]


@breaks("tail")
class ForgetsTheStreamInTheFirstEpoch(ForgetsTheStream):
    def forgets(self, epoch: int, position: int) -> bool:
        return epoch == 0 and position > 0


@breaks("tail")
class ForgetsTheStreamInALaterEpoch(ForgetsTheStream):
    def forgets(self, epoch: int, position: int) -> bool:
        return epoch == 1 and position > 0


@breaks("tail")
class ForgetsTheStreamOnOtherRanks(ForgetsTheStream):
    def forgets(self, epoch: int, position: int) -> bool:
        return self.rank > 0 and position > 0


@breaks("tail")
class GoesOnUnderTheProcessSeed(ForgetsTheStream):
    """Resumed, it draws from what the process was seeded with, which another process need not share."""

    def forgets(self, epoch: int, position: int) -> bool:
        return position > 0

    def key(self, epoch: int, position: int) -> list[int]:
        return [*ReferenceLoader.key(self, epoch, position), torch.initial_seed() if self.salted else 0]


@breaks("tail", widely=True)
class OrdersByTheProcessSeed(ReferenceLoader):
    """Its order comes from the seed of the process; the state has epoch and position only."""

    def __init__(self, rank: int = 0, world_size: int = 1, **more: Any) -> None:
        super().__init__(rank, world_size, **more)
        self.base = torch.initial_seed()

    def order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.base + epoch)
        return [int(index) for index in torch.randperm(self.size, generator=generator)]


# Next epoch, boundary, round trip.


@breaks("next epoch")
class SkipsTheEpochAfterAResumedOne(ReferenceLoader):
    passes_since_load: float = -math.inf

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.passes_since_load = 0

    def begin(self) -> tuple[int, int]:
        self.passes_since_load += 1
        if self.passes_since_load == 2:
            self.cursor = (self.cursor[0] + 1, 0)
        return super().begin()


class ReversesTheEpochAfterAResumedOne(ReferenceLoader):
    resumed_in: float = math.inf

    def reverses(self, state: dict[str, Any]) -> bool:
        raise NotImplementedError

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.resumed_in = state["epoch"] if state["position"] and self.reverses(state) else math.inf

    def order(self, epoch: int) -> list[int]:
        order = super().order(epoch)
        return order[::-1] if epoch > self.resumed_in else order


@breaks("next epoch")
class ReversesItOnManyRanks(ReversesTheEpochAfterAResumedOne):
    def reverses(self, state: dict[str, Any]) -> bool:
        return bool(self.world_size > 1 and self.world_size == state["world_size"])


@breaks("boundary")
class RepeatsTheEpochOnManyRanks(ReferenceLoader):
    """From the state at an epoch's end, where there is more than one rank."""

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        if self.world_size > 1 and state["epoch"] and not state["position"]:
            self.cursor = (state["epoch"] - 1, 0)


@breaks("boundary")
class KeepsTheFullPosition(ReferenceLoader):
    """'Finished' is the full position of the old epoch, so a resume from there finds an empty epoch."""

    def deliver(self, epoch: int, after: int) -> None:
        self.history.append(self.cursor)
        self.cursor = (epoch, after)

    def peek(self) -> Any:
        epoch, position = self.cursor
        if position == self.size:
            return next(self.fetch(epoch + 1, 0))[0]
        return super().peek()


@breaks("round trip")
class IsFreshUntilStarted(ReferenceLoader):
    """As two published loaders do: right after a load the state is that of a fresh loader."""

    pending = False

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.pending = True

    def begin(self) -> tuple[int, int]:
        self.pending = False
        return super().begin()

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        state = super().state_dict(in_flight)
        return reseal(state | {"epoch": 0, "position": 0}) if self.pending else state


@breaks("round trip")
class GoesOnWithTheOldPass(ReferenceLoader):
    """Loaded within a pass, it gives back the state, but iterates what it had prefetched before."""

    stale = False

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.stale = bool(self.cursor[1]) and self.passes > 1

    def read(self, epoch: int, positions: Sequence[int], order: list[int]) -> Any:
        if self.stale:
            self.stale, positions = False, [0 for _ in positions]
        return super().read(epoch, positions, order)


# Observer, isolation, transport, chain.


@breaks("observer")
class PeekTakes(ReferenceLoader):
    def peek(self) -> Any:
        epoch, position = self.cursor
        batch, after = next(self.fetch(epoch, position))
        self.deliver(epoch, after)
        return batch


@breaks("observer")
class StateStartsThePass(ReferenceLoader):
    """Asked for between iter() and the first next(), state_dict() costs a batch."""

    waiting = loses = False

    def __iter__(self) -> Iterator[Any]:
        self.waiting, self.loses = True, False
        return self.run()

    def run(self) -> Iterator[Any]:
        self.waiting = False
        batches = super().__iter__()
        if self.loses:
            next(batches)
        yield from batches

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        self.loses = self.loses or self.waiting
        return super().state_dict(in_flight)


@breaks("isolation")
class SharesItsState(ReferenceLoader):
    def __init__(self, rank: int = 0, world_size: int = 1, **more: Any) -> None:
        super().__init__(rank, world_size, **more)
        self.shared: dict[str, Any] = {}

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        self.shared.update(super().state_dict(in_flight))
        return self.shared


@breaks("isolation")
class KeepsItsArgument(ReferenceLoader):
    """Reads the loaded state only when the pass begins."""

    kept: dict[str, Any] | None = None

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.kept = state

    def begin(self) -> tuple[int, int]:
        if self.kept is not None:
            self.cursor = (self.kept.get("epoch", 0), self.kept.get("position", 0))
            self.kept = None
        return super().begin()


@breaks("transport")
class SavesATuple(ReferenceLoader):
    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        return reseal(super().state_dict(in_flight) | {"detail": ("",)})

    def check_shape(self, state: Any) -> None:
        if isinstance(state, dict) and "detail" in state:
            if state["detail"] != ("",) or reseal(state) != state:
                raise StateCorruptError("the detail is another tuple, or the checksum does not fit")
            state = reseal(state | {"detail": ""})
        super().check_shape(state)

    def check_topology(self, state: dict[str, Any]) -> None:
        super().check_topology(state | {"detail": ""})


@breaks("transport")
class SavesTheWholeOrder(ReferenceLoader):
    def detail(self) -> str:
        return "-".join(map(str, range(5000)))

    def check_topology(self, state: dict[str, Any]) -> None:
        if state["detail"] != self.detail():
            raise StateCorruptError("the order is another")


@breaks("chain")
class CountsFromTheResume(ReferenceLoader):
    base = (0, 0)

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.base = self.cursor

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        state = super().state_dict(in_flight)
        epoch, position = self.base
        if state["epoch"] == epoch and state["position"] > position:
            return reseal(state | {"position": state["position"] - position})
        return state


@breaks("chain")
class LosesABatchAtTheThirdResume(ReferenceLoader):
    """Its states count the resumes after which a batch was given."""

    begun, resumes = (0, 0), 0

    def detail(self) -> str:
        return "r" * (self.resumes + (self.cursor != self.begun))

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.resumes, self.begun = len(state["detail"]), self.cursor
        if self.resumes == 3:
            self.cursor = self.begun = (state["epoch"], min(state["position"] + self.batch_size, self.size))

    def check_topology(self, state: dict[str, Any]) -> None:
        if state["detail"].strip("r"):
            raise StateCorruptError("the detail counts no resumes")


# Partition and topology.


@breaks("partition")
class GivesTheTailToOneRank(ReferenceLoader):
    def blocks(self, position: int) -> Iterator[tuple[range, int]]:
        for positions, after in super().blocks(position):
            start = positions.start - self.rank * len(positions)
            if after - start == self.world_size * self.batch_size:
                yield positions, after
            elif self.rank == 0:
                yield range(start, after), after

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        epoch, position = self.cursor
        self.cursor = (epoch + bool(position), 0)


@breaks("partition")
class LengthOfTheWorld(ReferenceLoader):
    """Its length is that of all ranks together."""

    def __len__(self) -> int:
        return super().__len__() * self.world_size


@breaks("topology")
class RepeatsOneSampleAfterAChange(ReferenceLoader):
    """The epoch after one that went on in another world."""

    changed_in: float = math.inf

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.changed_in = state["epoch"] if state["world_size"] != self.world_size else math.inf

    def order(self, epoch: int) -> list[int]:
        return [0] * self.size if epoch > self.changed_in else super().order(epoch)


@breaks("topology")
class DiffersOnEachRank(ReferenceLoader):
    """Declares that any rank's state will do, but its states differ."""

    def detail(self) -> str:
        return f"rank {self.rank}"

    def check_topology(self, state: dict[str, Any]) -> None:
        if not state["detail"].startswith("rank "):
            raise StateCorruptError("the detail names a rank")


@breaks("topology")
class AugmentsByRank(ReferenceLoader):
    def key(self, epoch: int, position: int) -> list[int]:
        return [*super().key(epoch, position), self.rank]


@breaks("topology")
class RefusesWithoutNames(RigidLoader):
    def check_topology(self, state: dict[str, Any]) -> None:
        try:
            super().check_topology(state)
        except StateMismatchError:
            raise StateMismatchError("the state does not fit") from None


@breaks("topology")
class TakesWhatItDeclines(ReferenceLoader):
    """Declares that it goes on only in the same world, but does not check."""

    elastic = False

    def check_topology(self, state: dict[str, Any]) -> None:
        if state["detail"]:
            raise StateCorruptError("the detail is empty")


# Refusal, delivery, cost, guest, any item.


@breaks("refusal")
class TakesAnyPosition(ReferenceLoader):
    def check(self, state: Any) -> None:
        self.check_shape(state)
        super().check(reseal(state | {"position": max(0, state["position"])}))


@breaks("refusal")
class ChangesBeforeItChecks(ReferenceLoader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(state, dict) and type(state.get("position")) is int:
            self.cursor = (self.cursor[0], state["position"] % self.size)
        super().load_state_dict(state)


@breaks("refusal")
class AdoptsAnySeed(ReferenceLoader):
    def check(self, state: Any) -> None:
        stated, self.stated_seed = self.stated_seed, None
        try:
            super().check(state)
        finally:
            self.stated_seed = stated


@breaks("delivery")
class IgnoresWhatIsInFlight(ReferenceLoader):
    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        return super().state_dict(0)


@breaks("delivery")
class CountsWhatItPrefetched(ReferenceLoader):
    """While the training loop is busy, a prefetcher goes on and takes the position with it."""

    delivered_at = math.inf

    def deliver(self, epoch: int, after: int) -> None:
        super().deliver(epoch, after)
        self.delivered_at = time.monotonic()

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        state = super().state_dict(in_flight)
        if time.monotonic() - self.delivered_at < 0.2:
            return state
        return reseal(state | {"position": state["position"] + self.batch_size})


@breaks("cost")
class ReplaysInSecret(ReferenceLoader):
    replays = True


@breaks("guest")
class DrawsABaseSeed(ReferenceLoader):
    """As torch's DataLoader does at each iter()."""

    def begin(self) -> tuple[int, int]:
        torch.empty((), dtype=torch.int64).random_()
        return super().begin()


@breaks("guest")
class ListensToTheCaller(ReferenceLoader):
    """Whoever draws from python's generator between two passes changes their content."""

    def __init__(self, rank: int = 0, world_size: int = 1, **more: Any) -> None:
        super().__init__(rank, world_size, **more)
        self.undisturbed = random.getstate()

    def key(self, epoch: int, position: int) -> list[int]:
        return [*super().key(epoch, position), int(random.getstate() != self.undisturbed)]


@breaks("any item")
class StopsAtNone(ReferenceLoader):
    def fetch(self, epoch: int, position: int) -> Iterator[tuple[Any, int]]:
        for batch, after in super().fetch(epoch, position):
            if batch is None:
                return
            yield batch, after


# Witness.


@breaks("witness")
class IgnoresTheWitness(ReferenceLoader):
    def verify(self) -> None:
        pass


# Honesty.


@breaks("honesty")
class OwnsUpLate(ReferenceLoader):
    """Notices only after some batches that it cannot keep what it promised."""

    @property
    def capabilities(self) -> Any:
        declared = super().capabilities
        if len(self.history) > 3:
            declared.exact_augmentations.holds = False
        return declared


# Ranks that leave and join.


@breaks("reshard")
class KeepsItsShare(ReferenceLoader):
    def reshard(self, world: World) -> None:
        pass


@breaks("reshard")
class SharesTheWholeEpochAgain(ReferenceLoader):
    def reshard(self, world: World) -> None:
        super().reshard(world)
        self.cursor = (self.cursor[0], 0)


@breaks("reshard")
class HandsOutWhatWasReadAhead(ReferenceLoader):
    """It has been read for the old world."""

    def __init__(self, rank: int = 0, world_size: int = 1, *, num_workers: int = 0, **more: Any) -> None:
        super().__init__(rank, world_size, num_workers=max(num_workers, 1), **more)

    def reshard(self, world: World) -> None:
        super().reshard(world)
        self.moved = False


@breaks("reshard")
class AcceptsAnyWorld(RigidLoader):
    """Although it cannot share the rest."""

    def reshard(self, world: World) -> None:
        self.rank, self.world_size = world.rank, world.world_size


@breaks("holes")
class SkipsOneTooMany(ReferenceLoader):
    def skip(self, start: int, stop: int, epoch: int | None = None) -> None:
        super().skip(start, min(stop + 1, self.size), epoch)


@breaks("holes")
class KeepsNoSkips(ReferenceLoader):
    """In its state."""

    def state_of_now(self, in_flight: int = 0) -> dict[str, Any]:
        return reference_loader.reseal(super().state_of_now(in_flight) | {"omit": ""})


@breaks("rollback")
class RollsBackToTheLoad(ReferenceLoader):
    def commit(self) -> None:
        origin = self.origin
        super().commit()
        self.origin = origin


@breaks("rollback")
class GoesOnBehindTheRollback(ReferenceLoader):
    def rollback(self) -> None:
        self.cursor = self.origin


@breaks("rollback")
class CommitsNothing(ReferenceLoader):
    """Twice the same place, without a batch between."""

    def commit(self) -> None:
        self.committed, self.origin = self.state_of_now(), self.cursor


# Not of one law: what the examination itself must survive.


class Hangs(ReferenceLoader):
    def read(self, epoch: int, positions: Sequence[int], order: list[int]) -> Any:
        time.sleep(3600)


class Dies(ReferenceLoader):
    def read(self, epoch: int, positions: Sequence[int], order: list[int]) -> Any:
        os._exit(7)


class Raises(ReferenceLoader):
    def read(self, epoch: int, positions: Sequence[int], order: list[int]) -> Any:
        raise OSError("the disk is gone")


class NeverEnds(ReferenceLoader):
    """Resumed, its epoch has no end."""

    def blocks(self, position: int) -> Iterator[tuple[range, int]]:
        while position:
            yield range(position, position + 1), position
        yield from super().blocks(position)
