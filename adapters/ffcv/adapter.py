"""FFCV's Loader: its order, its share of an epoch, and its capabilities."""

from __future__ import annotations

import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from midepoch.adapters.ffcv import beton
from midepoch.adapters.ffcv.epoch import Reading, Request, Work, check_file, identity_of
from midepoch.adapters.ffcv.pipeline import StepGraph, build_graph, chains, draws, kind_in_use, operation_of
from midepoch.adapters.ffcv.private import FROM_THE_FILE, check_loader, parts
from midepoch.errors import SourceError, UnsupportedSourceError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.order import EpochOrder, Order, Sequential, Shuffled, Windowed
from midepoch.order.keys import derive_key, derive_keys, extend_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.indexed import spans
from midepoch.reading.sessions import WitnessRequest
from midepoch.reading.stored import seen_as_stored
from midepoch.world import World

__all__ = ["FFCVAdapter", "hand_out_copies", "on_local_device"]

_TOGETHER = 4096  # number of positions whose keys are computed at once
_OPEN_BYTES = 1 << 30  # size of the pages that a quasi-random order draws from at any time

_copied: weakref.WeakSet[Any] = weakref.WeakSet()


def hand_out_copies(loader: Any) -> Any:
    """Make `loader`, once wrapped, copy its batches out of FFCV's buffers, so that they stay valid.

    Otherwise a batch is valid until the next one is requested, as with FFCV itself.

    Returns:
        The same `loader`: ``midepoch.wrap(hand_out_copies(Loader(...)))``.
    """
    _copied.add(loader)
    return loader


def on_local_device(pipelines: Mapping[str, Any], world: World | None = None) -> dict[str, Any]:
    """Copy the `pipelines` for a Loader, with each ``ToDevice`` directed to this process's own device.

    ``Loader(..., pipelines=on_local_device(pipelines))``. A device written into the pipeline is the same for every
    process of a machine (``ToDevice(0)``), and FFCV accepts neither numbers nor strings (``ToDevice("cuda:0")``).

    Args:
        pipelines: as for a Loader. They and their operations are not changed.
        world: whose device to use; None for the current world. Without a GPU, the device is the CPU.
    """
    device = (world or World.current()).device
    private = parts()

    def moved(operation: Any) -> Any:
        if not isinstance(operation, private.ToDevice):
            return operation
        clone = copy(operation)
        clone.device = device
        return clone

    mapped: dict[str, Any] = {}
    for name, pipeline in pipelines.items():
        if isinstance(pipeline, private.PipelineSpec):
            mapped[name] = copy(pipeline)
            mapped[name].transforms = [moved(operation) for operation in pipeline.transforms]
        elif isinstance(pipeline, Sequence):
            mapped[name] = [moved(operation) for operation in pipeline]
        else:
            mapped[name] = pipeline
    return mapped


class FFCVAdapter(Adapter):
    """A Loader of FFCV 1.0.2."""

    name: ClassVar[str] = "ffcv"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        check_loader(source)
        if options.shard is False and source.distributed:
            raise UnsupportedSourceError(
                "shard=False with distributed=True: midepoch reads the Loader's file itself; leave shard out"
            )
        beton.check_tables(source.reader)
        self._file = identity_of(source.fname)
        self._content = beton.describe(source.reader)
        self._order = _order_of(source)
        self.facts = Facts(
            batch_size=source.batch_size,
            drop_last=source.drop_last,
            seed=source.seed % (1 << 64),
            # With these arguments FFCV itself needs the same seed on every rank. Otherwise it may have drawn one.
            seed_is_shared=source.distributed and isinstance(source.traversal_order, parts().Random),
            departs=frozenset({"order", "traces"}),
            order=self._order,
        )
        self._kinds = {kind_in_use(operation) for operation in self._operations()}
        self._mixes = "mix" in self._kinds
        self._draws = any(map(draws, self._operations()))
        self._first_graph: StepGraph | None = None
        drawing = (each for each in self._operations() if kind_in_use(each) in ("module", "unknown"))
        self._drawing = list(map(_without_file_parts, drawing))
        self._streams = Streams(*self._drawing) if options.streams else None

    def _operations(self) -> list[Any]:
        return [operation_of(node) for chain in chains(self.source).values() for node in chain]

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A Loader that keeps FFCV's own iteration."""
        loader = parts().Loader
        return isinstance(source, loader) and type(source).__iter__ is loader.__iter__

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int:
        """The number of samples in one epoch."""
        return self._order.size

    def describe(self) -> dict[str, str]:
        """The order and the file. With mixup also the batch size, because mixing depends on it."""
        described = {"order": self._order.describe(), "file": self._content}
        return described if not self._mixes else {**described, "mixed in batches of": str(self.facts.batch_size)}

    def capabilities(self) -> Capabilities:
        """All yes; not elastic if the pipeline mixes samples."""
        mixed = Capability(False, "this pipeline mixes the samples of a batch, and another world has other batches")
        return Capabilities(
            exact_order=promises.OUR_ORDER,
            exact_augmentations=self._exact_augmentations(),
            constant_time_resume=promises.CONSTANT_TIME,
            elastic_world=mixed if self._mixes else promises.POSITIONS,
            elastic_workers=Capability(True, "the threads share the samples of a batch, each with its own stream"),
            rank_independent=promises.ONE_STATE,
        )

    def drawing(self) -> tuple[object, ...]:
        """Operations of the user's own."""
        return tuple(self._drawing)

    def _exact_augmentations(self) -> Capability:
        if not self.options.streams:
            return Capability(False, "randomness='none': FFCV's threads draw from generators that are never seeded")
        operations = self._operations()
        batchwise = sorted(
            {type(each).__name__ for each in operations if kind_in_use(each) in ("mix", "module", "unknown")}
        )
        reason = "each sample has its own random stream, keyed by (seed, epoch, position)"
        if not batchwise:
            return Capability(True, reason)
        return Capability(
            True,
            f"{reason}; {', '.join(batchwise)}: numbers are the batch's, exact on the same split (declare what an "
            "Operation of your own draws with midepoch.adapters.ffcv.declare)",
        )

    def open(self, run: Run) -> Session:
        """Open a session at the run's position."""
        share = run.share
        assert share is not None  # a file has a size
        check_file(self.source.fname, self._file)
        order = self._order.epoch(run.seed, run.epoch)
        copies = self.source in _copied
        work = Work(self.source, self._graph, self._file, run.epoch, copies, self._streams)
        return Reading(work, _requests(run, order, self._draws), share.steps, self._look(run, order))

    def _look(self, run: Run, order: EpochOrder) -> Callable[[], None] | None:
        reader = self.source.reader
        request = WitnessRequest.of(run, int(order[0:1][0])) if run.looks and len(order) else None
        if request is None:
            return None
        size, stored = int(reader.num_samples), functools.partial(beton.stored, reader)
        return lambda: run.reports.append(seen_as_stored(request, size, stored))

    def _graph(self) -> StepGraph:
        """The steps: of the current operations with recompile=True, otherwise of those in the first epoch."""
        graph = build_graph(self.source, self.options.streams, None if self.source.recompile else self._first_graph)
        self._first_graph = self._first_graph or graph
        return graph


def _requests(run: Run, order: EpochOrder, drawing: bool) -> Iterator[Request]:
    """The batches of a session; without keys if nothing is `drawing` random numbers."""
    share = run.share
    assert share is not None  # checked in `open`
    size, most = share.size, max(1, _TOGETHER // share.batch_size)
    sample_key = derive_key(Purpose.SAMPLE, run.seed, run.epoch)
    batch_key = derive_key(Purpose.BATCH, run.seed, run.epoch)
    rest = spans(share)
    # Several batches at once, because the overhead of numpy's calls dominates.
    while block := list(itertools.islice(rest, most)):
        whole = slice(block[0][0], block[-1][1])
        if share.world.world_size == 1 and whole.stop <= size:
            positions, indices = np.arange(whole.start, whole.stop), order[whole]
        else:
            positions = np.concatenate([np.arange(first, stop) for first, stop in block]) % size
            indices = np.concatenate(
                [order[first:stop] if stop <= size else _one_by_one(order, first, stop) for first, stop in block]
            )
        samples = indices.astype(np.uint64)
        keys = derive_keys(sample_key, positions) if drawing else samples
        begin = 0
        for first, stop in block:
            end = begin + stop - first
            yield Request(samples[begin:end], keys[begin:end], extend_key(batch_key, first), first, stop)
            begin = end


def _one_by_one(order: EpochOrder, first: int, stop: int) -> npt.NDArray[np.int64]:
    """The indices of a range that wraps around from an epoch's end to its beginning."""
    size = len(order)
    return np.concatenate([order[place % size : place % size + 1] for place in range(first, stop)])


def _without_file_parts(operation: Any) -> Any:
    """An operation without what FFCV told it about the file. What is left may hold generators of its own."""
    copied = copy(operation)
    for name in FROM_THE_FILE:
        vars(copied).pop(name, None)
    return copied


# --- orders ---------------------------------------------------------------------------------------------------------


class _Chosen:
    """An order over a subset of a file's samples: the table maps the order's numbers to samples."""

    def __init__(self, order: Order, table: npt.NDArray[np.int64], name: str) -> None:
        self._order, self._table, self._name = order, table, name

    @property
    def size(self) -> int:
        return self._order.size

    def describe(self) -> str:
        crc = zlib.crc32(np.ascontiguousarray(self._table, dtype="<i8").tobytes())
        return f"{self._order.describe()} of {self._name}={crc:08x}"

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        return _ChosenEpoch(self._order.epoch(seed, epoch), self._table)


class _ChosenEpoch:
    def __init__(self, order: EpochOrder, table: npt.NDArray[np.int64]) -> None:
        self._order, self._table = order, table

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, positions: slice, /) -> npt.NDArray[np.int64]:
        chosen: npt.NDArray[np.int64] = self._table[self._order[positions]]
        return chosen


def _order_of(loader: Any) -> Order:
    private, kind = parts(), type(loader.traversal_order)
    indices = _checked_indices(loader)
    whole = len(indices) == loader.reader.num_samples and bool((indices == np.arange(len(indices))).all())
    if kind is private.QuasiRandom:
        pages = beton.pages_of(loader.reader)[indices]
        table = indices[np.argsort(pages, kind="stable")]
        sizes = tuple(np.unique(pages, return_counts=True)[1].tolist())
        window = max(2, _OPEN_BYTES // int(loader.reader.page_size))
        return _Chosen(Windowed(len(indices), sizes, window), table, "pages")
    if kind is private.Random:
        order: Order = Shuffled(len(indices))
    elif kind is private.Sequential:
        order = Sequential(len(indices))
    else:
        raise UnsupportedSourceError(
            f"{kind.__name__} is a traversal order of your own, which cannot resume in mid-epoch: give the Loader its "
            "indices= in your order and OrderOption.SEQUENTIAL"
        )
    return order if whole else _Chosen(order, indices, "indices")


def _checked_indices(loader: Any) -> npt.NDArray[np.int64]:
    indices, samples = np.asarray(loader.indices), loader.reader.num_samples
    if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
        raise SourceError(
            f"indices= must be a list of integers, this one has shape {indices.shape} and type {indices.dtype}: give "
            "the samples' numbers"
        )
    wrong = np.flatnonzero((indices < 0) | (indices >= samples))
    if len(wrong):
        raise SourceError(
            f"indices[{wrong[0]}] is {indices[wrong[0]]}, but {loader.fname} has samples 0 to {int(samples) - 1} "
            f"({len(wrong)} such indices): FFCV would crash the process; remove them"
        )
    return indices.astype(np.int64)
