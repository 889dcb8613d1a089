"""torch's DataLoader: map-style datasets under any sampler, and iterable datasets.

The user's DataLoader is only read. Its batches are made by a reader (midepoch.indexed, midepoch.driven,
midepoch.replay),
in this process or in the worker processes of a DataLoader of ours with the same settings, whose "dataset" is the
reader and
whose "sampler" gives requests. So worker processes hold no progress, and nothing but batches comes back through their
queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from typing_extensions import TypeIs

from midepoch import promises
from midepoch.adapter import Adapter, Options, Run, Session
from midepoch.errors import SourceError, StateMismatchError, UnsupportedSourceError
from midepoch.indexed import IteratorSession, MapReader, length_of, map_requests
from midepoch.iterables import IterableAdapter
from midepoch.keys import derive_key
from midepoch.protocol import Capabilities, Capability
from midepoch.randomness import Purpose
from midepoch.sampler import Listed, understand
from midepoch.world import Share, World

__all__ = ["IterableDataLoaderAdapter", "MapDataLoaderAdapter"]


class MapDataLoaderAdapter(Adapter):
    """A DataLoader over a map-style dataset."""

    name: ClassVar[str] = "dataloader"

    def __init__(self, source: DataLoader[Any], options: Options) -> None:
        super().__init__(source, options)
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
        self._sampler = sampler
        self._understand()
        # With shard=False each rank's data is its own, and so is its order.
        self._own = options.shard is False
        self.elastic = not self._own
        single = batch_sampler is None
        self._reader = MapReader(source.dataset, source.collate_fn, single, self._listed_batches, options.streams)
        self._server = _Server(source, options)

    def _understand(self) -> None:
        understood = understand(self._sampler)
        if understood.shards and self.options.shard is None:
            raise UnsupportedSourceError(
                f"{type(self._sampler).__name__} seems to give each rank a list of its own (it has a rank or "
                "num_replicas): pass shard=False to leave that to it, or shard=True if it gives every rank the same "
                "list"
            )
        self._order, self._length = understood.order, length_of(self.source.dataset)
        self.tail, self.world = understood.tail, understood.world
        own = self.source.generator
        self.seed = understood.seed
        if self.seed is None and isinstance(own, torch.Generator):
            self.seed = own.initial_seed() % (1 << 64)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A DataLoader that iterates as torch's does."""
        return _is_plain(source) and not isinstance(source.dataset, IterableDataset)

    def prepare(self, seed: int, epoch: int) -> None:
        """Follow a dataset that changed between epochs; build the list of a listed order."""
        if length_of(self.source.dataset) != self._length:
            self._understand()
        if isinstance(self._order, Listed):
            self._order.epoch(seed, epoch)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int:
        """Samples, or batches of a user's batch sampler, in one epoch."""
        order = self._order
        size = order.length(seed, epoch) if isinstance(order, Listed) else order.size
        return size * world.world_size if self._own else size

    def describe(self) -> dict[str, str]:
        """The order, and whether batches or samples are counted."""
        described = {"order": self._order.describe(), "unit": "batch" if self._listed_batches else "sample"}
        return {**described, "shard": "own"} if self._own else described

    def capabilities(self) -> Capabilities:
        """All yes; with shard=False, not elastic."""
        collate = self.source.collate_fn
        exact = promises.augmentations(
            self.options,
            self.source.dataset,
            collate,
            same_split="numbers drawn in __getitems__ or collate_fn are those of the batch: exact on the same split",
        )
        listed = isinstance(self._order, Listed)
        return Capabilities(
            exact_order=Capability(True, "each epoch's list is built under its own stream, and its CRC is compared")
            if listed
            else promises.OUR_ORDER,
            exact_augmentations=exact,
            constant_time_resume=Capability(True, "a jump, after the sampler has given the epoch's list once")
            if listed
            else promises.CONSTANT_TIME,
            elastic_world=Capability(False, "with shard=False each rank's data is its own")
            if self._own
            else promises.POSITIONS,
            elastic_workers=promises.POSITIONS,
            rank_independent=promises.ONE_STATE,
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """The CRC of a listed order's list, where the state stands inside its epoch."""
        if not isinstance(self._order, Listed):
            super().check_detail(detail, seed, epoch, position, world)
        elif detail:
            crc = self._order.epoch(seed, epoch).crc
            if detail != f"crc={crc}":
                raise StateMismatchError(
                    f"the list of epoch {epoch} differs: the state was saved with {detail}, this sampler gives "
                    f"crc={crc}; it does not repeat itself, or its data has changed: make it as it was, or start "
                    "this data anew"
                )

    def open(self, run: Run) -> Session:
        """Batches from the position on."""
        if self._own and run.world.world_size > 1:
            run = self._own_run(run)
        order = self._order.epoch(run.seed, run.epoch)
        requests = map_requests(run, order, self._unchanged(), self._listed_batches)
        answers, close = self._server(self._reader, requests, run)
        own_list = self._own and run.world.world_size == 1
        detail = f"crc={order.crc}" if isinstance(self._order, Listed) and not own_list else ""  # type: ignore[union-attr]
        return IteratorSession(answers, detail, close)

    def _own_run(self, run: Run) -> Run:
        """This rank's data by itself: positions of all ranks divided by their number, and streams of its own."""
        world_size, share = run.world.world_size, run.share
        assert share is not None  # what can be indexed has a size
        position, size = run.position // world_size, share.size // world_size
        alone = Share(size, position, self.batch_size, World(), share.tail, self.drop_last)
        return replace(run, position=position, share=alone, seed=derive_key(run.seed, run.world.rank), world=World())

    def _unchanged(self) -> Callable[[], None]:
        dataset, expected = self.source.dataset, self._length
        if expected is None:
            return _nothing

        def check() -> None:
            if len(dataset) != expected:
                raise SourceError(
                    f"the dataset had {expected} samples when this pass began and has {len(dataset)} now: let it "
                    "change between epochs only"
                )

        return check

    def close(self) -> None:
        """Persistent worker processes."""
        self._server.close()


class IterableDataLoaderAdapter(IterableAdapter):
    """A DataLoader over an IterableDataset."""

    name: ClassVar[str] = "iterable-dataloader"

    def __init__(self, source: DataLoader[Any], options: Options) -> None:
        super().__init__(
            source,
            options,
            stream=source.dataset,
            workers=source.num_workers,
            collate=source.collate_fn,
            batch_size=source.batch_size,
            drop_last=source.drop_last,
        )
        self._server = _Server(source, options)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A DataLoader that iterates as torch's does."""
        return _is_plain(source) and isinstance(source.dataset, IterableDataset)

    def serve(self, reader: Any, requests: Iterator[Any], run: Run) -> tuple[Iterator[Any], Callable[[], None]]:
        """By the loader's worker processes."""
        return self._server(reader, requests, run)

    def close(self) -> None:
        """Persistent worker processes."""
        self._server.close()


def _nothing() -> None:
    pass


def _is_plain(source: object) -> TypeIs[DataLoader[Any]]:
    return isinstance(source, DataLoader) and type(source).__iter__ is DataLoader.__iter__


class _Server:
    """Answers requests with the settings of the user's DataLoader: in this process, or in its number of workers."""

    def __init__(self, loader: DataLoader[Any], options: Options) -> None:
        self._loader = loader
        self._streams = options.streams
        self._persistent: dict[int, DataLoader[Any]] = {}

    def __call__(self, reader: Any, requests: Iterator[Any], run: Run) -> tuple[Iterator[Any], Callable[[], None]]:
        theirs = self._loader
        if theirs.num_workers == 0 and not (theirs.pin_memory and torch.accelerator.is_available()):
            return map(reader, requests), _nothing
        ours = self._persistent.get(id(reader))
        if ours is not None and not all(worker.is_alive() for worker in getattr(ours._iterator, "_workers", ())):
            _Shutdown(ours._iterator)()
            ours = None
        if ours is None:
            ours = self._make(reader)
            if theirs.persistent_workers:
                self._persistent[id(reader)] = ours
        sampler = ours.sampler
        assert isinstance(sampler, _Requests)  # _make's
        sampler.requests = requests
        if self._streams and ours.generator is not None:
            # The base seed of the worker processes comes from it, not from the caller's generator.
            ours.generator.manual_seed(derive_key(Purpose.OPENING, run.seed, run.epoch))
        answers = iter(ours)
        return answers, _nothing if theirs.persistent_workers else _Shutdown(answers)

    def _make(self, reader: Any) -> DataLoader[Any]:
        theirs = self._loader
        return DataLoader(
            _Remote(reader),
            batch_size=None,
            sampler=_Requests(),
            collate_fn=_as_it_is,
            num_workers=theirs.num_workers,
            pin_memory=theirs.pin_memory,
            pin_memory_device=theirs.pin_memory_device,
            timeout=theirs.timeout,
            worker_init_fn=_WorkerInit(theirs.worker_init_fn),
            multiprocessing_context=theirs.multiprocessing_context,
            generator=torch.Generator() if self._streams else theirs.generator,
            prefetch_factor=theirs.prefetch_factor,
            persistent_workers=theirs.persistent_workers,
        )

    def close(self) -> None:
        for ours in self._persistent.values():
            _Shutdown(ours._iterator)()
        self._persistent.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_persistent": {}}


class _Shutdown:
    """Ends the worker processes of a DataLoader's iterator now, not when the garbage is collected."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __call__(self) -> None:
        shutdown = getattr(self._iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


class _Requests(Sampler[Any]):
    """The sampler of our DataLoader: the requests of the session that runs."""

    def __init__(self) -> None:
        self.requests: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.requests)


class _Remote(Dataset[Any]):
    """The dataset of our DataLoader: a reader, which answers requests."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __getitem__(self, request: Any) -> Any:
        return self.reader(request)


class _WorkerInit:
    """Shows code in a worker process the user's dataset where it looks for it, then runs the user's own function."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None:
            # WorkerInfo refuses assignment, so that users do not; torch's docs have them configure info.dataset.
            object.__setattr__(info, "dataset", info.dataset.reader.dataset)  # type: ignore[attr-defined]
        if self._then is not None:
            self._then(worker)


def _as_it_is(value: Any) -> Any:
    return value
