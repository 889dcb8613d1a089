"""What the sessions of a loader are opened with: the world and the seed, as they are now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import MidepochError, UnsupportedSourceError
from ..order.holes import Omit
from ..randomness.streams import process_seed
from ..world import World, warn_of_mesh
from .adapter import Adapter, Options, Run, Session
from .capabilities import Capability
from .tickets import Tickets
from .whole_batches import Then, WholeBatches

__all__ = ["RunContext"]


class RunContext:
    """The source and its options; which ranks share the data; the seed of their order and of all random streams."""

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self.adapter, self.options = adapter, options
        # Read, never consumed; used in a single process if no seed is given.
        self._process_seed = process_seed()
        self._seed = options.seed if options.seed is not None else adapter.facts.seed
        self._seed_is_private = options.seed is None and not adapter.facts.seed_is_shared
        self.resharded: World | None = None  # the last world given to `Loader.reshard`
        self.last: World | None = None  # of the last pass; None if any other may follow
        self.omit = Omit()  # the positions that epochs leave out
        self.tickets = Tickets()
        # Of a combination: a batch that fails is given again unless the user states otherwise, and the place stays at
        # the end of an epoch of unknown length until the next one begins.
        self.is_part = False
        self._then: Then | None = None  # made with the first session

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last": None, "_then": None, "tickets": Tickets()}

    @property
    def skips(self) -> Capability:
        """Whether positions can be left out."""
        alone = Capability(False, "the positions of a combination's part follow from the others: wrap it by itself")
        return alone if self.is_part else self.adapter.promises.skips

    def take_seed(self, seed: int) -> None:
        """Take over a loaded state's seed."""
        self._seed, self._seed_is_private, self.last = seed, False, None

    def enter(self) -> World:
        """The world for a session that is about to be opened.

        Raises:
            MidepochError: it is not that of the last pass.
        """
        world, last = self.world(), self.last
        if last is not None and (last.rank, last.world_size) != (world.rank, world.world_size):
            raise MidepochError(
                f"this process was rank {last.rank} of {last.world_size} in the previous pass and is rank "
                f"{world.rank} of {world.world_size} now: keep torch.distributed initialised while the loader is in "
                "use, or load a state to continue in another world"
            )
        if last is None and world.world_size > 1 and self.options.world is None and self.adapter.facts.world is None:
            warn_of_mesh()
        return world

    def check_reshard(self, world: World, epoch: int) -> None:
        """Raise an UnsupportedSourceError if this source cannot be shared by another world within this epoch."""
        adapter = self.adapter
        if not adapter.elastic:
            raise UnsupportedSourceError(
                f"this source cannot be shared by another number of ranks ({adapter.promises.elastic_world.reason}): "
                "stop all ranks, and start them again in a world that it supports"
            )
        if not adapter.rank_independent and self.world().world_size > 1:
            raise UnsupportedSourceError(
                f"each rank knows only its own part of this source ({adapter.promises.rank_independent.reason}): save "
                "midepoch.gather(loader), and load it on all ranks of the new world"
            )
        by_source = adapter.facts.world
        if by_source is not None:
            raise UnsupportedSourceError(
                f"the source's sampler is for rank {by_source.rank} of {by_source.world_size}: make it for one "
                "process (num_replicas=1, rank=0), and let midepoch shard"
            )
        if self.tickets.taken:
            raise UnsupportedSourceError("reshard() with tickets: load midepoch.gather(loader) on all new ranks")
        for part, _ in adapter.parts():
            part.check_reshard(world)
        adapter.size(self.seed(world), epoch, world)  # some sources are made for one world

    def session(self, run: Run) -> Session:
        """Open a session. The seed and the world are kept."""
        adapter = self.adapter
        session = adapter.open(run)
        if adapter.around is not None:
            session = adapter.around.session(session, run, adapter)
        if self.options.then is not None:
            self._then = self._then or Then(self.options.then, self.options)
            session = WholeBatches(self._then, session, run, adapter)
        self._seed, self.last = run.seed, run.world
        return session

    def world(self) -> World:
        """The world as it is now."""
        if self.resharded is not None:
            return self.resharded
        stated, by_source = self.options.world, self.adapter.facts.world
        world = stated if stated is not None else World.current()
        if by_source is None:
            return world
        if stated is None and world.world_size == 1:
            return replace(by_source, local_rank=world.local_rank)
        if (world.rank, world.world_size) != (by_source.rank, by_source.world_size):
            raise MidepochError(
                f"the source's sampler is for rank {by_source.rank} of {by_source.world_size}, but the world is rank "
                f"{world.rank} of {world.world_size}: make the sampler for this world, or leave it out (midepoch "
                "shards)"
            )
        return world

    def seed(self, world: World) -> int:
        """The seed in a world."""
        if self._seed_is_private and world.world_size > 1:
            raise MidepochError(
                f"the source drew its own seed, {self._seed} on this rank, and other ranks may have drawn others: "
                "pass seed= to midepoch.wrap, the same on every rank"
            )
        if self._seed is not None:
            return self._seed
        return self._process_seed if world.world_size == 1 else 0
