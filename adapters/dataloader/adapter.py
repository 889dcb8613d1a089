"""torch's DataLoader: map-style datasets under any sampler, and iterable datasets.

The user's DataLoader is only read. A reader makes its batches (midepoch.reading.indexed, driven or replay), in this
process or in as many worker processes as the DataLoader specifies (midepoch.reading.workers).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from midepoch.attributes import appearance
from midepoch.errors import StateCorruptError, StateMismatchError, UnsupportedSourceError, warn
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Run, Session, Why
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.lending import LENDS
from midepoch.loader.place import Place
from midepoch.order import Endless
from midepoch.order.keys import derive_key
from midepoch.reading.exposed import exposed_samplers
from midepoch.reading.indexed import MapReader, Samples, map_requests, unchanged
from midepoch.reading.iterables import IterableAdapter
from midepoch.reading.private import iterates_as_torch
from midepoch.reading.sessions import IteratorSession, unwrapped
from midepoch.reading.workers import Server
from midepoch.samplers import MaterializedOrder, SamplerSpec, interpret_sampler, length_of
from midepoch.sharding import check_sharding
from midepoch.world import Share, World

__all__ = ["IterableDataLoaderAdapter", "MapDataLoaderAdapter"]

_logger = logging.getLogger("midepoch")

_OF_THIS, _OF_LAST = "crc=", "last="  # what a state's detail says a list is of: its own epoch, or the one before


class _Parts(NamedTuple):
    """What a training loop may replace in a DataLoader, or change in its batch sampler.

    Attributes:
        sampler: of samples; the batch sampler if it is the user's own.
        batch_size, drop_last: of torch's batch sampler.
        length: of the dataset; None if unknown.
    """

    sampler: Any
    batch_size: int
    drop_last: bool
    length: int | None


class MapDataLoaderAdapter(Adapter):
    """A DataLoader over a map-style dataset."""

    name: ClassVar[str] = "dataloader"

    def __init__(self, source: DataLoader[Any], options: Options) -> None:
        super().__init__(source, options)
        kind = type(source.dataset)
        if hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
            bases = "StatefulIterable and IterableDataset" if hasattr(kind, LENDS) else "IterableDataset"
            raise UnsupportedSourceError(
                f"a DataLoader reads {kind.__name__} by index, and it can only be iterated: derive it from {bases}"
            )
        if callable(getattr(source, "state_dict", None)):
            _logger.info(
                "%s has a state_dict of its own, which is not used: midepoch's also fits other numbers of workers and "
                "processes, and repeats random numbers",
                type(source).__name__,
            )
        # With shard=False each rank has its own data, or its own list, and so its own order.
        self._own = options.shard is False
        if self._own and options.global_batch is not None:
            raise UnsupportedSourceError(
                "global_batch= with shard=False: each rank has its own data, so no global batch can be shared; leave "
                "one of them out"
            )
        # torch lets nobody put another batch sampler into a DataLoader; what is in it may be replaced.
        batch_sampler = source.batch_sampler
        self._listed_batches = batch_sampler is not None and type(batch_sampler) is not BatchSampler
        self._parts = self._parts_now()
        self._spec = self._interpret(self._parts)
        seed = self._spec.seed
        if seed is None and isinstance(source.generator, torch.Generator):
            seed = source.generator.initial_seed() % (1 << 64)
        self.facts = Facts("batch" if self._listed_batches else "sample", seed=seed, reads_any_span=True)
        self._take_over()
        self._reader = self._make_reader()
        self._server = Server(source, options)
        self._opened: int | None = None  # the epoch that was opened last, unless the loader was led elsewhere since

    def _parts_now(self) -> _Parts:
        source = self.source
        length, inside = length_of(source.dataset), source.batch_sampler
        if inside is None:
            return _Parts(source.sampler, 1, False, length)
        if self._listed_batches:
            return _Parts(inside, 1, False, length)
        return _Parts(inside.sampler, inside.batch_size, inside.drop_last, length)

    def _interpret(self, parts: _Parts) -> SamplerSpec:
        sampler, _, _, size = parts
        spec = interpret_sampler(sampler, size, self.options.known_ranks, self._listed_batches, self._own)
        if self.options.shard is None:
            check_sharding(sampler, spec.sharding)
        return spec

    def _take_over(self) -> None:
        spec, parts = self._spec, self._parts
        self._order, self._unchanged = spec.order, unchanged(self.source.dataset, parts.length)
        self.facts = replace(
            self.facts, batch_size=parts.batch_size, drop_last=parts.drop_last, tail=spec.tail, world=spec.world
        )
        if isinstance(self._order, MaterializedOrder):
            self._order.dataset, self._looks = self.source.dataset, ()
            self.facts = replace(self.facts, stated_size=functools.partial(_stated_size, self._order, self._own))
        else:
            self._looks = appearance(self._parts.sampler)

    def _make_reader(self) -> MapReader:
        source, single = self.source, self.source.batch_sampler is None
        self._collate = source.collate_fn
        return MapReader(source.dataset, self._collate, single, self._listed_batches, self.options.streams)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A DataLoader that keeps torch's own iteration."""
        return iterates_as_torch(source) and not isinstance(source.dataset, IterableDataset)

    def _follow(self) -> None:
        """Take over what the training loop has changed in the DataLoader between epochs."""
        parts, known, order = self._parts_now(), self._parts, self._order
        same = parts.sampler is known.sampler
        # What is listed is asked again in each pass. Other orders follow from the sampler's attributes.
        looks = () if isinstance(order, MaterializedOrder) else appearance(parts.sampler)
        keeps = same and looks == self._looks
        if keeps and parts[1:] == known[1:]:
            return
        spec = self._spec
        if keeps and isinstance(order, MaterializedOrder):
            if parts.length != known.length:
                order.follow(parts.length)
        else:
            spec = self._interpret(parts)
            if same and spec.world is not None and spec.seed != self._spec.seed:
                raise UnsupportedSourceError(
                    f"the sampler's seed was {self._spec.seed} when it was wrapped, and is {spec.seed} "
                    f"now: wrap a DataLoader whose sampler is made with seed={spec.seed}"
                )
        self._parts, self._spec = parts, spec
        self._take_over()
        self.learned()

    def prepare(self, place: Place, seed: int, why: Why) -> None:
        """Follow the DataLoader, and list the sampler of a listed order: itself for a pass, otherwise a copy."""
        if why == "moved":
            self._opened = None
            if isinstance(self._order, MaterializedOrder):
                self._order.moved(place.detail.removeprefix(_OF_THIS) if place.detail.startswith(_OF_THIS) else "")
            return
        if place.epoch != self._opened or not place.position:  # an epoch that goes on has the order that it began with
            self._follow()
        order = self._order
        if why == "measured":
            if isinstance(order, MaterializedOrder):
                order.measure(self._listed_under(seed), place.epoch)
            return
        if self.source.collate_fn is not self._collate:
            self._server.close()  # workers that are kept have the other one
            self._reader = self._make_reader()
            self.learned()
        if isinstance(order, MaterializedOrder):
            order.begin(self._listed_under(seed), place.epoch)
            self.note(order.finding)
        self._opened = place.epoch

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Samples, or batches of a user's batch sampler, in one epoch; None if it does not end."""
        if epoch != self._opened:
            self._follow()
        order = self._order
        if isinstance(order, Endless):
            return None
        if isinstance(order, MaterializedOrder):
            size = order.length(self._listed_under(seed), epoch)
        else:
            size = order.size
        return size * world.world_size if self._own else size

    def share(self, seed: int, epoch: int, position: int, world: World, detail: str) -> Share | None:
        """Where the sampler ends by an error of its own, it has given only full batches before, as torch makes them."""
        size, order = self.size(seed, epoch, world, detail), self._order
        share = None if size is None else self._share_of(size, position, world)
        listed = order.known(self._listed_under(seed), epoch) if isinstance(order, MaterializedOrder) else None
        if share is None or listed is None or listed.error is None:
            return share
        given = len(listed) * (world.world_size if self._own else 1)
        start, step = min(share.start, given), self.options.global_batch or share.global_batch
        return replace(share, size=start + (given - start) // step * step, start=start, fails=True)

    def describe(self) -> dict[str, str]:
        """The order, and whether positions count batches or samples."""
        described = {"order": self._order.describe(), "unit": "batch" if self._listed_batches else "sample"}
        return {**described, "shard": "own"} if self._own else described

    def drawing(self) -> tuple[object, ...]:
        """The dataset and the collate function."""
        return self.source.dataset, self.source.collate_fn

    def capabilities(self) -> Capabilities:
        """All yes; with shard=False, not elastic, and each rank's list is its own."""
        exact = promises.augmentations(
            self.options,
            "numbers drawn in __getitems__ or collate_fn are the batch's: exact on the same split",
        )
        listed = isinstance(self._order, MaterializedOrder)
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
            rank_independent=Capability(False, "with shard=False each rank has its own list, whose CRC is in its state")
            if self._own and listed
            else promises.ONE_STATE,
            skips=Capability(False, "with shard=False each rank has its own data") if self._own else promises.SKIPS,
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Compare the CRC of a listed order's list: of this epoch, or at an epoch's beginning of the last one."""
        if not isinstance(self._order, MaterializedOrder):
            super().check_detail(detail, seed, epoch, position, world)
            return
        if not detail:
            return
        last = detail.startswith(_OF_LAST) and not position and epoch > 0
        if not last and not detail.startswith(_OF_THIS):
            raise StateCorruptError(f"{detail!r:.40} is not a CRC of a sampler's list: use an undamaged state")
        saved = detail.partition("=")[2]
        same, crc = self._order.saved_as(saved, self._listed_under(seed), epoch - last)
        if same:
            return
        differs = self._list_differs(epoch - last, saved, crc)
        if last:
            warn(
                f"{differs}. Unless you change the sampler between epochs yourself, it depends on something that "
                "differs between processes (the order of a set or of a folder's files, the system's entropy), so "
                f"epoch {epoch} is not the one that would have followed: sort what it is made of, and derive it from "
                "the epoch or from torch's, numpy's or python's generators",
            )
            return
        raise StateMismatchError(f"{differs}; {self._why_list_differs}")

    def _list_differs(self, epoch: int, saved: str, crc: str) -> str:
        return f"the list of epoch {epoch} differs: the state was saved with crc={saved}, this sampler gives crc={crc}"

    @property
    def _why_list_differs(self) -> str:
        order = self._order
        if isinstance(order, MaterializedOrder) and order.is_alone:
            return (
                f"{type(self._parts.sampler).__name__} keeps something from pass to pass, and its passes before this "
                "one are too many to be listed again: save what it keeps before each pass, and restore that before you "
                "load the state"
            )
        untried = order.untried if isinstance(order, MaterializedOrder) else ""
        copy = f". If it keeps something from pass to pass, no copy of it can be listed ({untried})" if untried else ""
        return (
            f"this is another sampler, it is not reproducible, its data has changed, or you change it between "
            f"epochs: restore what it was then before you load the state, or start over without the state{copy}"
        )

    def open(self, run: Run) -> Session:
        """Open a session at the run's position."""
        if run.share is None:
            run = replace(run, share=self.share_of(run))
        order, listed = self._order, None
        if isinstance(order, MaterializedOrder):
            listed = order.epoch(self._listed_under(run.seed), run.epoch)
        if self._own and run.world.world_size > 1:
            run = self._own_run(run)
        if isinstance(order, MaterializedOrder) and listed is not None:
            saved = run.detail.removeprefix(_OF_THIS)
            # It was changed since the state was loaded, and may be restored.
            if run.position and run.detail.startswith(_OF_THIS) and listed.crc != saved:
                order.forget()
                raise StateMismatchError(
                    f"{self._list_differs(run.epoch, saved, listed.crc)}; {self._why_list_differs}"
                )
        indices = order.epoch(run.seed, run.epoch) if listed is None else listed
        requests = map_requests(run, indices, self._unchanged, self._listed_batches)
        answers, close = self._server(self._reader, requests, run)
        answers = unwrapped(answers, run.reports.append) if run.looks else answers
        if listed is None:
            return IteratorSession(answers, close=close)
        return IteratorSession(answers, f"{_OF_THIS}{listed.crc}", f"{_OF_LAST}{listed.crc}", close, listed.error)

    def samples(self, seed: int, epoch: int) -> Samples | None:
        """The dataset's, in the sampler's order; None if that does not end."""
        if isinstance(self._order, Endless):
            return None
        key = self._listed_under(seed) if isinstance(self._order, MaterializedOrder) else seed
        return self._reader.samples(self._order.epoch(key, epoch), seed, epoch)

    def _listed_under(self, seed: int) -> int:
        """The seed of a list: of this rank where each has its own data, but the same for one that shards by itself."""
        if not self._own or self._spec.world is not None or self._spec.sharding is not None:
            return seed
        world = self.options.world or World.current()
        return derive_key(seed, world.rank) if world.world_size > 1 else seed

    def _own_run(self, run: Run) -> Run:
        """A run over this rank's data alone: positions divided by the number of ranks, and its own random streams."""
        world_size, share = run.world.world_size, run.share
        assert share is not None  # open's
        position, size = run.position // world_size, share.size // world_size
        alone = Share(size, position, self.facts.batch_size, World(), share.tail, self.facts.drop_last)
        return replace(run, position=position, share=alone, seed=derive_key(run.seed, run.world.rank), world=World())

    def close(self) -> None:
        """End persistent worker processes."""
        self._server.close()


def _stated_size(order: MaterializedOrder, own: bool, epoch: int, world: World) -> int | None:
    """Of an epoch, as the sampler says it. `own`: each rank has a list of its own."""
    length = order.own_length(epoch)
    return length if length is None or not own else length * world.world_size


class IterableDataLoaderAdapter(IterableAdapter):
    """A DataLoader over an IterableDataset."""

    name: ClassVar[str] = "iterable-dataloader"

    def __init__(self, source: DataLoader[Any], options: Options) -> None:
        dataset, why = source.dataset, ""
        own_state = callable(getattr(dataset, "load_state_dict", None)) and not hasattr(type(dataset), LENDS)
        if own_state and source.num_workers and not options.shard and not exposed_samplers(dataset):
            cure = "torchdata's StatefulDataLoader in place of the DataLoader carries it, without random numbers"
            why = f"its own state stays in the worker processes: {cure}"
        super().__init__(source, options, stream=dataset, loader=source, why=why)
        if why:
            self._tries, self._untried = False, "a pass over its copy would go on where the one before it was left"

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A DataLoader that keeps torch's own iteration."""
        return iterates_as_torch(source) and isinstance(source.dataset, IterableDataset)
