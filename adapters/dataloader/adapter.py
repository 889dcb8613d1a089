"""torch's DataLoader: map-style datasets under any sampler, and iterable datasets.

The user's DataLoader is only read. A reader makes its batches (midepoch.reading.indexed, driven or replay), in this
process or in as many worker processes as the DataLoader specifies (midepoch.reading.workers).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from midepoch.dividing import check_division
from midepoch.errors import StateCorruptError, StateMismatchError, UnsupportedSourceError, warn
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.lending import LENDS
from midepoch.order import MAXIMUM_SIZE, Endless
from midepoch.order.keys import derive_key
from midepoch.reading.indexed import IteratorSession, MapReader, Samples, map_requests, unchanged
from midepoch.reading.iterables import IterableLoaderAdapter
from midepoch.reading.private import iterates_as_torch
from midepoch.reading.workers import Server
from midepoch.samplers import Listed, ListedEpoch, length_of, understand
from midepoch.world import Share, World

__all__ = ["IterableDataLoaderAdapter", "MapDataLoaderAdapter"]


_OF_THIS, _OF_LAST = "crc=", "last="  # what a state's detail says a list is of: its own epoch, or the one before


class MapDataLoaderAdapter(Adapter):
    """A DataLoader over a map-style dataset."""

    name: ClassVar[str] = "dataloader"
    reads_any_span = True

    def __init__(self, source: DataLoader[Any], options: Options) -> None:
        super().__init__(source, options)
        kind = type(source.dataset)
        if hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
            bases = "StatefulIterable and IterableDataset" if hasattr(kind, LENDS) else "IterableDataset"
            raise UnsupportedSourceError(
                f"a DataLoader reads {kind.__name__} by index, and it can only be iterated: derive it from {bases}"
            )
        batch_sampler = source.batch_sampler
        self._listed_batches = batch_sampler is not None and type(batch_sampler) is not BatchSampler
        if batch_sampler is None:
            sampler: Any = source.sampler
        elif isinstance(batch_sampler, BatchSampler) and not self._listed_batches:
            sampler, self.batch_size, self.drop_last = (
                batch_sampler.sampler,
                batch_sampler.batch_size,
                batch_sampler.drop_last,
            )
        else:
            sampler = batch_sampler
        self.unit = "batch" if self._listed_batches else "sample"
        self._sampler = sampler
        self._understand()
        # With shard=False each rank has its own data, and so its own order.
        self._own = options.shard is False
        if self._own and options.global_batch is not None:
            raise UnsupportedSourceError(
                "global_batch= with shard=False: each rank has its own data, so no global batch can be shared; leave "
                "one of them out"
            )
        single = batch_sampler is None
        self._reader = MapReader(source.dataset, source.collate_fn, single, self._listed_batches, options.streams)
        self._server = Server(source, options)

    def _understand(self) -> None:
        size = length_of(self.source.dataset)
        understood = understand(self._sampler, size, self.options.known_ranks, self._listed_batches)
        if self.options.shard is None:
            check_division(self._sampler, understood.division)
        self._order, self._length = understood.order, size
        self.tail, self.world = understood.tail, understood.world
        own = self.source.generator
        self.seed = understood.seed
        if self.seed is None and isinstance(own, torch.Generator):
            self.seed = own.initial_seed() % (1 << 64)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A DataLoader that keeps torch's own iteration."""
        return iterates_as_torch(source) and not isinstance(source.dataset, IterableDataset)

    def refresh(self) -> None:
        """Follow a dataset that has changed between epochs."""
        if length_of(self.source.dataset) != self._length:
            self._understand()

    def prepare(self, seed: int, epoch: int) -> None:
        """The same, and build the list of a listed order."""
        self.refresh()
        if isinstance(self._order, Listed):
            self._order.epoch(seed, epoch)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Samples, or batches of a user's batch sampler, in one epoch; None if it does not end."""
        order = self._order
        if isinstance(order, Endless):
            return None
        size = order.length(seed, epoch) if isinstance(order, Listed) else order.size
        return size * world.world_size if self._own else size

    def describe(self) -> dict[str, str]:
        """The order, and whether positions count batches or samples."""
        described = {"order": self._order.describe(), "unit": "batch" if self._listed_batches else "sample"}
        return {**described, "shard": "own"} if self._own else described

    def drawing(self) -> tuple[object, ...]:
        """The dataset and the collate function."""
        return self.source.dataset, self.source.collate_fn

    def capabilities(self) -> Capabilities:
        """All yes; with shard=False, not elastic."""
        exact = promises.augmentations(
            self.options,
            "numbers drawn in __getitems__ or collate_fn are the batch's: exact on the same split",
        )
        listed = isinstance(self._order, Listed)
        return Capabilities(
            exact_order=Capability(True, "each epoch's list is built under its own stream, and its CRC is compared")
            if listed
            else promises.OUR_ORDER,
            exact_augmentations=exact,
            constant_time_resume=Capability(True, "a jump, once the sampler has given the epoch's list")
            if listed
            else promises.CONSTANT_TIME,
            elastic_world=Capability(False, "with shard=False each rank has its own data")
            if self._own
            else promises.POSITIONS,
            elastic_workers=promises.POSITIONS,
            rank_independent=promises.ONE_STATE,
        )

    @property
    def sized_by(self) -> str:
        """The sampler, if it is not one of torch's that follow from the data."""
        if not isinstance(self._order, Listed):
            return "data"
        return "batch sampler" if self._listed_batches else "sampler"

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Compare the CRC of a listed order's list: of this epoch, or at an epoch's beginning of the last one."""
        if not isinstance(self._order, Listed):
            super().check_detail(detail, seed, epoch, position, world)
            return
        if not detail:
            return
        last = detail.startswith(_OF_LAST) and not position and epoch > 0
        if not last and not detail.startswith(_OF_THIS):
            raise StateCorruptError(f"{detail!r:.40} is not a CRC of a sampler's list: use an undamaged state")
        listed = self._order.epoch(seed, epoch - last)
        saved = detail.partition("=")[2]
        if listed.has(saved):
            return
        self._order.forget()  # the user may repair the sampler
        differs = (
            f"the list of epoch {epoch - last} differs: the state was saved with crc={saved}, this sampler gives "
            f"crc={listed.crc}"
        )
        if last:
            warn(
                f"{differs}. Unless you change the sampler between epochs yourself, it depends on something that "
                "differs between processes (the order of a set or of a folder's files, the system's entropy), so "
                f"epoch {epoch} is not the one that would have followed: sort what it is made of, and derive it from "
                "the epoch or from torch's, numpy's or python's generators",
            )
            return
        raise StateMismatchError(
            f"{differs}; this is another {self.sized_by}, it is not reproducible, its data has changed, or you change "
            "it between epochs: restore what it was then before you load the state, or start over without the state"
        )

    def open(self, run: Run) -> Session:
        """Open a session at the run's position."""
        if run.share is None:
            run = replace(run, share=self._share_of(MAXIMUM_SIZE, run.position, run.world))
        if self._own and run.world.world_size > 1:
            run = self._own_run(run)
        order = self._order.epoch(run.seed, run.epoch)
        requests = map_requests(run, order, unchanged(self.source.dataset, self._length), self._listed_batches)
        answers, close = self._server(self._reader, requests, run)
        # With shard=False each rank has its own list. Its CRC would tie the state to one rank.
        crc = order.crc if isinstance(order, ListedEpoch) and not self._own else ""
        return IteratorSession(answers, f"{_OF_THIS}{crc}" if crc else "", f"{_OF_LAST}{crc}" if crc else "", close)

    def samples(self, seed: int, epoch: int) -> Samples | None:
        """The dataset's, in the sampler's order; None if that does not end."""
        if isinstance(self._order, Endless):
            return None
        return self._reader.samples(self._order.epoch(seed, epoch), seed, epoch)

    def _own_run(self, run: Run) -> Run:
        """A run over this rank's data alone: positions divided by the number of ranks, and its own random streams."""
        world_size, share = run.world.world_size, run.share
        assert share is not None  # open's
        position, size = run.position // world_size, share.size // world_size
        alone = Share(size, position, self.batch_size, World(), share.tail, self.drop_last)
        return replace(run, position=position, share=alone, seed=derive_key(run.seed, run.world.rank), world=World())

    def holding(self) -> AbstractContextManager[None]:
        """Leave worker processes to the next session."""
        return self._server.holding()

    def let_go(self) -> None:
        """End the workers that were left."""
        self._server.let_go()

    def close(self) -> None:
        """End persistent worker processes."""
        self._server.close()


class IterableDataLoaderAdapter(IterableLoaderAdapter):
    """A DataLoader over an IterableDataset."""

    name: ClassVar[str] = "iterable-dataloader"

    def __init__(self, source: DataLoader[Any], options: Options) -> None:
        super().__init__(source, options, stream=source.dataset)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A DataLoader that keeps torch's own iteration."""
        return iterates_as_torch(source) and isinstance(source.dataset, IterableDataset)
