"""Loaders broken on purpose, each in one way that has been seen in the wild; each must fail exactly its law."""

from __future__ import annotations

import math
import os
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from midepoch.errors import StateCorruptError, StateMismatchError
from midepoch.state.format import reseal
from midepoch.world import World
from support import reference_loader
from support.reference_loader import ReferenceLoader, RigidLoader

BROKEN: dict[str, type[ReferenceLoader]] = {}
"""By the one law that each fails."""
BROKEN_OTHERWISE: list[tuple[str, type[ReferenceLoader]]] = []
"""What another part of a law is there for. Each is examined by its law alone, so it may be unsound in other ways."""


def breaks(law: str) -> Any:
    def note(kind: type[ReferenceLoader]) -> type[ReferenceLoader]:
        if BROKEN.setdefault(law, kind) is not kind:
            BROKEN_OTHERWISE.append((law, kind))
        return kind

    return note


def deviating(name: str, kind: type[ReferenceLoader] = ReferenceLoader, **deviations: Any) -> Any:
    """A loader that deviates in these attributes. It stands in this module by its name, so that it can be pickled."""
    globals()[name] = made = type(name, (kind,), {"__module__": __name__, **deviations})
    return made


def broken(law: str, name: str, kind: type[ReferenceLoader] = ReferenceLoader, **deviations: Any) -> Any:
    return breaks(law)(deviating(name, kind, **deviations))


Base = ReferenceLoader


@breaks("transparent")
class GivesOneSampleTwice(ReferenceLoader):
    """And another one never."""

    def order(self, epoch: int) -> list[int]:
        order = super().order(epoch)
        return order if self.items is not None else [4 if index == 5 else index for index in order]


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


@breaks("tail")
class ForgetsTheStream(ReferenceLoader):
    """The pass that goes on after a load draws other random columns."""

    salted = False

    def forgets(self, epoch: int) -> bool:
        return epoch == 0

    def begin(self) -> tuple[int, int]:
        epoch, position = super().begin()
        self.salted = self.passes_since_load == 1 and position > 0 and self.forgets(epoch)
        return epoch, position

    def key(self, epoch: int, position: int) -> list[int]:
        return [*super().key(epoch, position), int(self.salted)]


class OrdersByTheProcessSeed(ReferenceLoader):
    """Its order comes from the seed of the process; the state has epoch and position only."""

    def __init__(self, rank: int = 0, world_size: int = 1, **more: Any) -> None:
        super().__init__(rank, world_size, **more)
        self.base = torch.initial_seed()

    def order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.base + epoch)
        return [int(index) for index in torch.randperm(self.size, generator=generator)]


@breaks("next epoch")
class SkipsTheEpochAfterAResumedOne(ReferenceLoader):
    def begin(self) -> tuple[int, int]:
        if self.passes_since_load == 1:
            self.cursor = (self.cursor[0] + 1, 0)
        return super().begin()


@breaks("boundary")
class RepeatsTheEpochOnManyRanks(ReferenceLoader):
    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        if self.world_size > 1 and state["epoch"] and not state["position"]:
            self.cursor = (state["epoch"] - 1, 0)


@breaks("round trip")
class IsFreshUntilStarted(ReferenceLoader):
    """As two published loaders do: right after a load the state is that of a fresh loader."""

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        state = super().state_dict(in_flight)
        return state if self.passes_since_load else reseal(state | {"epoch": 0, "position": 0})


@breaks("observer")
class PeekTakes(ReferenceLoader):
    def peek(self) -> Any:
        epoch, position = self.cursor
        batch, after = next(self.fetch(epoch, position))
        self.deliver(epoch, after)
        return batch


@breaks("isolation")
class SharesItsState(ReferenceLoader):
    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        shared: dict[str, Any] = vars(self).setdefault("shared", {})
        shared.update(super().state_dict(in_flight))
        return shared


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


@breaks("chain")
class CountsFromTheResume(ReferenceLoader):
    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        state, base = super().state_dict(in_flight), self.loaded.get("position", 0)
        same = state["epoch"] == self.loaded.get("epoch", 0) and state["position"] > base
        return reseal(state | {"position": state["position"] - base}) if same else state


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


@breaks("topology")
class RepeatsOneSampleAfterAChange(ReferenceLoader):
    """The epoch after one that went on in another world."""

    changed_in: float = math.inf

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.changed_in = state["epoch"] if state["world_size"] != self.world_size else math.inf

    def order(self, epoch: int) -> list[int]:
        return [0] * self.size if epoch > self.changed_in else super().order(epoch)


@breaks("refusal")
class TakesOtherData(ReferenceLoader):
    """Whatever the fingerprint says."""

    def check(self, state: Any) -> None:
        self.check_shape(state)
        super().check(reseal(state | {"fingerprint": self.fingerprint()}))


broken("delivery", "IgnoresWhatIsInFlight", state_dict=lambda loader, in_flight=0: Base.state_dict(loader))
broken("cost", "ReplaysInSecret", replays=True)


@breaks("guest")
class DrawsABaseSeed(ReferenceLoader):
    """As torch's DataLoader does at each iter()."""

    def begin(self) -> tuple[int, int]:
        torch.empty((), dtype=torch.int64).random_()
        return super().begin()


@breaks("any item")
class StopsAtNone(ReferenceLoader):
    def fetch(self, epoch: int, position: int) -> Iterator[tuple[Any, int]]:
        for batch, after in super().fetch(epoch, position):
            if batch is None:
                return
            yield batch, after


broken("witness", "IgnoresTheWitness", verify=lambda loader: None)


@breaks("honesty")
class OwnsUpLate(ReferenceLoader):
    """Notices only after some batches that it cannot keep what it promised."""

    @property
    def capabilities(self) -> Any:
        declared = super().capabilities
        if len(self.history) > 3:
            declared.exact_augmentations.holds = False
        return declared


def skip_too_many(loader: ReferenceLoader, start: int, stop: int, epoch: int | None = None) -> None:
    Base.skip(loader, start, min(stop + 1, loader.size), epoch)


broken("reshard", "KeepsItsShare", reshard=lambda loader, world: None)
broken("holes", "SkipsOneTooMany", skip=skip_too_many)


@breaks("rollback")
class RollsBackToTheLoad(ReferenceLoader):
    def commit(self) -> None:
        origin = self.origin
        super().commit()
        self.origin = origin


class Ends(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()
        raise ValueError("all seen")


def plain_that_raises(rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    loader = reference_loader.plain(rank, world_size, **options)
    loader.__class__ = Ends
    return loader


def plain_that_is_fixed(rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    loader = reference_loader.plain(rank, world_size, **options)
    rows: Any = [torch.tensor([index, 0, 0], dtype=torch.float64) for index in range(len(loader.sampler))]
    return DataLoader(rows, loader.batch_size, sampler=loader.sampler)


def plain_that_drops(rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    loader = reference_loader.plain(rank, world_size, **options)
    if world_size == 1:
        return loader
    indices = list(loader.sampler)[rank : len(loader.sampler) // world_size * world_size : world_size]
    return DataLoader(loader.dataset, loader.batch_size, sampler=indices)


def without_length(loader: ReferenceLoader) -> int:
    raise TypeError("this cannot be known")


def take_and_count(loader: ReferenceLoader) -> int:
    """Asked for its length before a pass, it begins after the first batch."""
    loader.deliver(0, 3)
    return ReferenceLoader.__len__(loader)


def caller() -> int:
    """Differs once the program has drawn from python's generator."""
    return zlib.crc32(repr(random.getstate()).encode())


def refuse_without_names(loader: ReferenceLoader, state: dict[str, Any]) -> None:
    if state["detail"] != loader.detail():
        raise StateMismatchError("the state does not fit")


def change_before_checking(loader: ReferenceLoader, state: dict[str, Any]) -> None:
    if isinstance(state, dict) and type(state.get("position")) is int:
        loader.cursor = (loader.cursor[0], state["position"] % loader.size)
    ReferenceLoader.load_state_dict(loader, state)


def take_world(loader: ReferenceLoader, world: World) -> None:
    """Although it cannot share the rest."""
    loader.rank, loader.world_size = world.rank, world.world_size


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


@breaks("isolation")
class KeepsItsArgument(ReferenceLoader):
    kept: dict[str, Any] | None = None

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.kept = state

    def begin(self) -> tuple[int, int]:
        if self.kept is not None:
            self.cursor = (self.kept.get("epoch", 0), self.kept.get("position", 0))
        return super().begin()


@breaks("delivery")
class CountsWhatItPrefetched(ReferenceLoader):
    """While the training loop is busy, here with a second look at the state, the position moves on."""

    looks = 0

    def deliver(self, epoch: int, after: int) -> None:
        super().deliver(epoch, after)
        self.looks = 0

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        state = super().state_dict(in_flight)
        self.looks += 1
        return reseal(state | {"position": state["position"] + 1}) if self.looks > 1 and not in_flight else state


@breaks("chain")
class LosesABatchAtTheThirdResume(ReferenceLoader):
    resumes = 0

    def detail(self) -> str:
        return "r" * self.resumes

    def check_topology(self, state: dict[str, Any]) -> None:
        pass

    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        self.resumes = len(state["detail"]) + 1
        if self.resumes == 3:
            self.cursor = (state["epoch"], min(state["position"] + self.batch_size, self.size))


HasNoLength = broken("transparent", "HasNoLength", __len__=without_length)
broken("transparent", "TakesAnotherOrder", order=lambda loader, epoch: Base.order(loader, epoch + 1))
broken("transparent", "HidesAnError", plain=staticmethod(plain_that_raises))
broken("transparent", "ChangesWhatIsFixed", plain=staticmethod(plain_that_is_fixed))
broken("transparent", "DividesOtherwise", plain=staticmethod(plain_that_drops))
broken("transparent", "LeavesNoTrace", source=property(reference_loader.plain_of))
broken("determinism", "SameOrderInEachEpoch", order=lambda loader, epoch: Base.order(loader, 0))
broken("determinism", "SameDraws", key=lambda loader, epoch, position: [loader.seed, epoch])
broken("tail", "ForgetsInALaterEpoch", ForgetsTheStream, forgets=lambda loader, epoch: epoch == 1)
broken("tail", "ForgetsOnOtherRanks", ForgetsTheStream, forgets=lambda loader, epoch: loader.rank > 0)
broken("observer", "TakesAsItCounts", peek=None, __len__=take_and_count)
broken("transport", "SavesTheWholeOrder", detail=lambda loader: "-" * 20_000)
broken("partition", "LengthOfTheWorld", __len__=lambda loader: Base.__len__(loader) * loader.world_size)
broken("topology", "DiffersOnEachRank", detail=lambda loader: f"rank {loader.rank}")
broken("topology", "AugmentsByRank", key=lambda loader, *place: [*Base.key(loader, *place), loader.rank])
broken("topology", "RefusesWithoutNames", RigidLoader, check_topology=refuse_without_names)
broken("topology", "TakesWhatItDeclines", elastic=False, check_topology=lambda loader, state: None)
broken("refusal", "ChangesBeforeItChecks", load_state_dict=change_before_checking)
broken("refusal", "AdoptsAnySeed", stated_seed=property(lambda loader: None, lambda loader, seed: None))
broken("guest", "ListensToTheCaller", key=lambda loader, *place: [*Base.key(loader, *place), caller()])
broken("reshard", "AcceptsAnyWorld", RigidLoader, reshard=take_world)
broken("holes", "KeepsNoSkips", state_of_now=lambda *asked: reseal(Base.state_of_now(*asked) | {"omit": ""}))
broken("rollback", "GoesOnBehind", rollback=lambda loader: setattr(loader, "cursor", loader.origin))
# Twice the same place, without a batch between.
broken("rollback", "CommitsNothing", commit=lambda loader: setattr(loader, "committed", loader.state_of_now()))


# Not of one law: what the examination itself must survive.


def raise_an_error(*asked: Any) -> None:
    raise OSError("the disk is gone")


Hangs = deviating("Hangs", read=lambda *asked: time.sleep(3600))
Dies = deviating("Dies", read=lambda *asked: os._exit(7))
Raises = deviating("Raises", read=raise_an_error)


class NeverEnds(ReferenceLoader):
    def blocks(self, position: int) -> Iterator[tuple[range, int]]:
        while position:
            yield range(position, position + 1), position
        yield from super().blocks(position)
