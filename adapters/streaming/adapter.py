"""mosaicml-streaming: a StreamingDataLoader, counted and positioned by midepoch.

Streaming's own order is a function of its shuffle seed, the epoch and the number of canonical nodes, so its state is a
position. midepoch sets this position in full before each pass, and so avoids three faults of Streaming's loader: a live
process ignores a state of the current or an earlier epoch, a resume at the end of an epoch yields nothing, and the
batch size is guessed from the first field.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, NoReturn, cast

from streaming import Stream, StreamingDataLoader, StreamingDataset
from torch.utils.data import DataLoader, get_worker_info

from midepoch.adapters.streaming import private
from midepoch.adapters.streaming.stored import Stored
from midepoch.errors import MidepochError, SourceError, StateCorruptError, StateMismatchError, UnsupportedSourceError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Run, Session, WitnessReport
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.collating import draws_nothing
from midepoch.reading.private import alive, keep_iterator, kept_iterator, shut_down
from midepoch.reading.sessions import FirstBatch, unwrapped
from midepoch.reading.workers import WorkerAnswers, raise_if_worker_died, workers_outlive_signals
from midepoch.world import World

__all__ = ["StreamingAdapter"]


class _OrderParameters(NamedTuple):
    """What Streaming's order depends on, besides seed, epoch and data.

    Attributes:
        canonical: the number of canonical nodes: the samples are divided over them, whatever the real number of nodes.
        nodes: the number of machines when the run began.
        batch: the number of samples in one step of all ranks.
    """

    canonical: int
    nodes: int
    batch: int

    def __str__(self) -> str:
        return f"canonical={self.canonical};nodes={self.nodes};batch={self.batch}"

    @classmethod
    def parsed(cls, detail: str) -> _OrderParameters:
        found = re.fullmatch(r"canonical=(\d{1,9});nodes=(\d{1,9});batch=(\d{1,12})", detail, re.ASCII)
        parameters = None if found is None else cls(*map(int, found.groups()))
        if parameters is None or not all(parameters):
            raise StateCorruptError(f"the detail of a streaming state says {detail[:80]!r}: load an undamaged state")
        return parameters


class StreamingAdapter(Adapter):
    """A DataLoader over a StreamingDataset: Streaming's own loader or torch's."""

    name: ClassVar[str] = "streaming"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        dataset = source.dataset
        private.check(dataset)
        if options.shard:
            raise UnsupportedSourceError(
                "shard=True: a StreamingDataset shards itself over ranks and workers; leave shard out"
            )
        if options.tail not in (None, "pad"):
            raise UnsupportedSourceError(
                f"tail={options.tail!r}: Streaming repeats samples until all ranks have equally many; leave tail out"
            )
        if type(dataset.batch_size) is not int or dataset.batch_size != source.batch_size:
            raise UnsupportedSourceError(
                f"batch_size is {dataset.batch_size} for the StreamingDataset and {source.batch_size} for its loader: "
                "pass the same number to both, since Streaming's order depends on it"
            )
        self.facts = Facts(
            batch_size=source.batch_size,
            drop_last=source.drop_last,
            seed=dataset.shuffle_seed,
            copies=int(dataset.replication or 1),
            departs=frozenset({"order", "ranks", "traces"}),
        )
        self._opening = Streams()
        self._stored = None if options.verify == "off" or not options.streams else Stored(dataset)
        self._reads, self._draws = _CheckedPass(dataset, self._stored), _KeyedPass(dataset, self._stored)
        self._kept_workers: Any = None  # the iterator with persistent workers
        self._last: _StreamingSession | None = None

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Any loader of a StreamingDataset, and the dataset by itself, to refuse it with advice."""
        return isinstance(getattr(source, "dataset", source), StreamingDataset)

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter | None:
        """The adapter, if the loader keeps Streaming's or torch's own iteration."""
        if isinstance(source, StreamingDataset):
            raise UnsupportedSourceError(
                "a StreamingDataset has no batches: wrap StreamingDataLoader(dataset, batch_size=...) over it"
            )
        own = type(source).__iter__ if isinstance(source, DataLoader) else None
        if own not in (StreamingDataLoader.__iter__, DataLoader.__iter__):
            raise UnsupportedSourceError(
                f"{type(source).__name__} has its own way to iterate a StreamingDataset, so its batches cannot be "
                "counted: wrap a StreamingDataLoader"
            )
        if type(source.dataset).__iter__ is not StreamingDataset.__iter__:
            raise UnsupportedSourceError(
                f"{type(source.dataset).__name__} has its own __iter__, so its samples cannot be counted: move what it "
                "does to a sample into __getitem__"
            )
        return cls(source, options)

    # --- worlds ---

    def _check_world(self, world: World) -> None:
        """Streaming's dataset has its ranks from the environment in which it was made."""
        theirs = private.rank_world(self.source.dataset)
        if (theirs.rank, theirs.num_ranks) != (world.rank, world.world_size):
            raise MidepochError(
                f"the StreamingDataset was made for rank {theirs.rank} of {theirs.num_ranks}, but this is rank "
                f"{world.rank} of {world.world_size}: make it after RANK and WORLD_SIZE are set, as torchrun does"
            )

    def _order_parameters(self, world: World, detail: str = "") -> _OrderParameters:
        if detail:
            return _OrderParameters.parsed(detail)
        dataset = self.source.dataset
        nodes = private.nodes(dataset)
        canonical = dataset.num_canonical_nodes
        if not canonical:  # the default that Streaming fills in at the first pass
            canonical = 64 * nodes if dataset.shuffle_algo in ("py1s", "py2s") else nodes
        return _OrderParameters(canonical, dataset.initial_physical_nodes or nodes, self.units_per_step(world))

    # --- description ---

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Samples in one epoch, including those that Streaming repeats to fill the canonical nodes."""
        self._check_world(world)
        dataset = self.source.dataset
        if dataset.batching_method != "random":
            return None  # only partitioning the epoch tells
        canonical = self._order_parameters(world, detail).canonical
        each = -(-int(dataset.epoch_size) // canonical)
        nodes = private.nodes(dataset)
        if canonical < nodes:
            each += -each % max(1, nodes // canonical)
        return canonical * each

    def describe(self) -> dict[str, str]:
        """The data and all that determines its shuffle. What may change with the nodes is in `detail`."""
        dataset = self.source.dataset
        streams = [(stream.choose, stream.split) for stream in dataset.streams]
        shards = [shard.samples for shard in dataset.shards]
        content = zlib.crc32(repr((streams, shards)).encode())
        return {
            "samples": f"{dataset.epoch_size} of {dataset.num_samples}:{content:08x}",
            "shuffle": f"{dataset.shuffle_algo},{self._block_size()}" if dataset.shuffle else "no",
            "partition": dataset.partition_algo,
            "sampling": f"{dataset.sampling_method},{dataset.sampling_granularity}",
            "batching": dataset.batching_method,
            "replication": str(self.facts.copies),
        }

    def _block_size(self) -> str:
        dataset = self.source.dataset
        stated, canonical = dataset.shuffle_block_size, dataset.num_canonical_nodes
        # Streaming fills it in at the first pass, from the number of canonical nodes.
        by_itself = stated is None or (canonical and stated == max(4_000_000 // canonical, 1 << 18))
        return "default" if by_itself else str(stated)

    def drawing(self) -> tuple[object, ...]:
        """Code that is not Streaming's own."""
        dataset, collate = self.source.dataset, self.source.collate_fn
        return type(dataset), _parts(dataset), () if draws_nothing(collate) else collate

    def capabilities(self) -> Capabilities:
        """What Streaming can restore."""
        dataset, collate = self.source.dataset, self.source.collate_fn
        exact = Capability(True, "samples are read as they were written")
        if not draws_nothing(collate):
            split = "what collate_fn draws, on the same batch size and world size"
            exact = promises.augmentations(self.options, split)
        elif _has_own_code(dataset):
            exact = promises.augmentations(self.options)
        return Capabilities(
            exact_order=Capability(True, "Streaming's order is a function of seed, epoch and canonical nodes"),
            exact_augmentations=exact,
            constant_time_resume=Capability(True, "at any progress; Streaming partitions the whole epoch each time"),
            elastic_world=Capability(
                True,
                "Streaming deals one sequence of samples out to all ranks, one by one"
                if _deals_one_by_one(dataset)
                else "as in Streaming: if a step of all ranks keeps its number of samples",
            ),
            elastic_workers=Capability(True, "Streaming hands out batches in its own order for any number of workers"),
            rank_independent=promises.ONE_STATE,
        )

    # --- states ---

    def detail_at(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The parameters of the order."""
        if there != here[:2]:
            self._check_position(*there, world, here.detail)
        return here.detail or str(self._order_parameters(world))

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check that this run can follow the saved order."""
        saved, here, dataset = _OrderParameters.parsed(detail), self._order_parameters(world), self.source.dataset
        if saved.batch != here.batch and not _deals_one_by_one(dataset):
            raise StateMismatchError(
                f"the global batch size differs: the state was saved with {saved.batch}, this loader has {here.batch}; "
                f"batching_method={dataset.batching_method!r} needs the same: change batch_size with the number of "
                f"ranks, so that their product is {saved.batch}"
            )
        nodes = private.nodes(dataset)
        if saved.canonical % nodes and nodes % saved.canonical:
            raise StateMismatchError(
                f"the number of nodes differs: the state's order is over {saved.canonical} canonical nodes, "
                f"and this run has {nodes} nodes; run on a number of nodes that divides {saved.canonical} or is a "
                "multiple of it"
            )
        self._check_position(epoch, position, world, detail)

    def _check_position(self, epoch: int, position: int, world: World, detail: str) -> None:
        dataset = self.source.dataset
        nodes, step = private.nodes(dataset), self.units_per_step(world)
        if position % nodes:
            raise StateMismatchError(
                f"{position} samples of the epoch are done, and Streaming would repeat {position % nodes} of them on "
                f"{nodes} nodes: run on a number of nodes that divides {position}, or seek to a multiple of {nodes}"
            )
        if not _deals_one_by_one(dataset):
            if position % step:
                raise StateMismatchError(
                    f"{position} samples of the epoch are done, and Streaming would repeat {position % step} of them, "
                    f"since batching_method={dataset.batching_method!r} makes whole batches: seek to a multiple of the "
                    f"{step} samples in a step of all ranks"
                )
            return
        begin = self._begin(epoch, position, world, detail)
        if begin < 0 or begin % nodes:
            raise StateMismatchError(
                f"{position} samples of the epoch are done. Those from {dataset.epoch_size} on only fill the canonical "
                f"nodes, and Streaming cannot start among them, nor a number of whole steps before: continue with the "
                f"next epoch, loader.seek(epoch={epoch + 1})"
            )

    def _begin(self, epoch: int, position: int, world: World, detail: str) -> int:
        """Where Streaming starts to read: whole steps earlier, if the position is among what fills canonical nodes."""
        dataset, step = self.source.dataset, self.units_per_step(world)
        size, beyond = self.size(dataset.shuffle_seed, epoch, world, detail), position - int(dataset.epoch_size)
        return position if size is None or beyond <= 0 or position >= size else position - step * -(-beyond // step)

    # --- sessions ---

    def open(self, run: Run) -> Session:
        """Open a session at the run's position."""
        self._check_world(run.world)
        parameters = self._order_parameters(run.world, run.detail)
        loader, dataset = self.source, self.source.dataset
        begin = self._begin(run.epoch, run.position, run.world, run.detail)
        if (reading := _sessions.get(_here(dataset))) is not None:
            reading.give_way()
        if private.has_failed(dataset):
            _raise_thread_failed()
        if self._last is not None and self._last.failed and self._kept_workers is not None:
            # A failed worker may stay broken as long as it lives.
            shut_down(self._kept_workers)
        if not _can_go_on(self._kept_workers):
            private.free_barrier(dataset)
        private.set_place(
            dataset,
            {
                "epoch": run.epoch,
                "sample_in_epoch": begin,
                "num_canonical_nodes": parameters.canonical,
                "shuffle_seed": run.seed,
                "initial_physical_nodes": parameters.nodes,
            },
        )
        own_code = _has_own_code(dataset) or not draws_nothing(loader.collate_fn)
        reads = self._draws if own_code and self.options.streams else self._reads
        # torch draws the workers' seed here, which must not change the caller's generator.
        key = derive_key(Purpose.OPENING, run.seed, run.epoch)
        drawn = self._opening.under(key) if self.options.streams else contextlib.nullcontext()
        # Persistent workers keep the overridden methods they were started with, so each kind needs its own workers.
        theirs = kept_iterator(loader)
        keep_iterator(loader, self._kept_workers if _can_go_on(self._kept_workers) else None)
        try:
            with drawn, reads.attached(loader), workers_outlive_signals(loader):
                iterator = self._begun()
        finally:
            self._kept_workers = kept_iterator(loader)
            keep_iterator(loader, theirs)
        back = (run.position - begin) // self.units_per_step(run.world)
        self._last = _StreamingSession(loader, iterator, str(parameters), reads, back, run)
        return self._last

    def _begun(self) -> Iterator[Any]:
        """torch's iterator, without Streaming's guess of the number of samples in a batch."""
        loader = self.source
        generator = loader.generator
        if self.options.streams:
            loader.generator = None  # torch would draw from the caller's generator
        try:
            return cast(Iterator[Any], DataLoader.__iter__(loader))
        finally:
            loader.generator = generator


def _can_go_on(iterator: Any) -> bool:
    """Whether all workers of torch's iterator are alive, if it is one."""
    return iterator is not None and alive(iterator)


def _has_own_code(dataset: StreamingDataset) -> bool:
    """Whether code other than `StreamingDataset`'s makes samples: a subclass's, as for images, or a format's."""
    kind = type(dataset)
    return (
        kind.__getitem__ is not StreamingDataset.__getitem__
        or kind.get_item is not StreamingDataset.get_item
        or "get_item" in vars(dataset)
        or bool(private.own_formats())
    )


def _deals_one_by_one(dataset: StreamingDataset) -> bool:
    """Whether all nodes, and in turn their ranks, take their samples from one sequence.

    Streaming's ``get_partitions_orig`` does so for all numbers of nodes that `check_detail` accepts. The other methods
    make each batch of parts of all of Streaming's streams.
    """
    return bool(dataset.batching_method == "random")


def _parts(dataset: StreamingDataset) -> dict[str, Any]:
    """The dataset's attributes, except shards, Streaming's own `Stream` objects, its pass, and overridden methods."""
    parts = {name: part for name, part in vars(dataset).items() if name not in _NOT_PARTS}
    parts["streams"] = [stream for stream in dataset.streams if type(stream) is not Stream]
    parts["formats"] = formats = private.own_formats()
    parts["readers"] = [shard for shard in dataset.shards if type(shard) in formats]
    return parts


_NOT_PARTS = ("streams", "shards", "_iterator", *private.OVERRIDABLE)


class _CheckedPass:
    """Reads all samples of Streaming's partition, or raises an error that says why not.

    Streaming ends silently if one of its threads fails or another pass over the dataset begins. To detect this, a
    method of the dataset is overridden while a pass begins. Copies of the dataset in worker processes keep it.

    The first batch of a pass comes with what `stored` sees, if there is one. In a worker process that persists, later
    passes do the same without being asked.
    """

    def __init__(self, dataset: StreamingDataset, stored: Stored | None) -> None:
        self.dataset, self.stored = dataset, stored
        self._looks = False  # at the next batch
        self._collate: Callable[[Any], Any]

    @contextlib.contextmanager
    def attached(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Overrides the methods while the loader's iterator is made, or takes its first batch."""
        self._collate, loader.collate_fn = loader.collate_fn, self._collated
        try:
            with private.overridden(self.dataset, _each_sample_id=self._each, **private.resume_override(self.dataset)):
                yield
        finally:
            loader.collate_fn = self._collate

    def _collated(self, samples: list[Any]) -> Any:
        """Replaces ``collate_fn``."""
        batch = self._collate(samples)
        return self._looking(batch) if self._looks else batch

    def _looking(self, batch: Any) -> Any:
        """The pass's first batch in this process. That of the first worker is the first of all."""
        self._looks = False
        worker = get_worker_info()
        if self.stored is None or (worker is not None and worker.id):
            return batch
        return FirstBatch(batch, self.stored.see())

    def _each(self, it: Any) -> Iterator[int]:
        """Replaces ``_each_sample_id``."""
        self._looks = self.stored is not None
        needed = private.RETRIES.needed()  # in worker processes too
        private.use_own_end_pass(self.dataset, it)
        yield from private.each_sample(self.dataset, it)
        needed.close()
        if it.yield_index < it.total:
            _raise_ended_by_other_pass() if it.should_exit() else _raise_thread_failed()

    def end(self) -> None:
        """Call this after each batch."""


class _KeyedPass(_CheckedPass):
    """Puts what a dataset's own code draws for a sample, and `collate_fn` for a batch, under a random stream each.

    Streaming asks for the number of each sample right before it reads it. Before each pass, in each worker process, it
    asks for the pass's starting point. Both methods are overridden, as in `_CheckedPass`.

    If all ranks take their samples from one sequence, a sample is keyed by its position there. Otherwise it is keyed by
    the step of all ranks and its number, so a sample that occurs twice in a step gets the same random numbers twice.
    Both are the same on other numbers of ranks, workers and nodes.
    """

    def __init__(self, dataset: StreamingDataset, stored: Stored | None) -> None:
        super().__init__(dataset, stored)
        self.streams = Streams(type(dataset))
        self._plain_collate = False
        self._sample_key = self._batch_key = 0
        self._start = self._stride = 0  # position of this process's first step, and distance to its next
        self._offset = 0  # of this rank's batch in a step
        self._turn = self._turns = 0  # this rank's turn to get a sample, and the number of turns
        self._batches = 0  # of this pass, in this process
        self._read: list[tuple[int, int]] = []  # keys and numbers of the samples of the batch being read
        self._put_under: Callable[[int], None]  # switches to the stream of a key, in the batch being read

    @contextlib.contextmanager
    def attached(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Overrides the methods while the loader's iterator is made, or takes its first batch."""
        self._plain_collate = draws_nothing(loader.collate_fn)
        with super().attached(loader), private.overridden(self.dataset, _get_work=self._begin):
            yield

    def end(self) -> None:
        """Restore the caller's generators, also after a sample has failed."""
        self.streams.end()

    def _begin(self, epoch: int, sample_in_epoch: int) -> Any:
        """Replaces ``_get_work``."""
        dataset = self.dataset
        work = private.work(dataset, epoch, sample_in_epoch)
        self.stand(epoch, sample_in_epoch, private.worker_world(dataset))
        self._batches = 0
        self._read.clear()
        self.streams.begin_pass(*self._roots())
        return work

    def _roots(self) -> tuple[object, ...]:
        """The objects that may hold generators."""
        return _parts(self.dataset), self._collate

    def stand(self, epoch: int, sample_in_epoch: int, world: Any) -> None:
        """Start after this many samples of an epoch, in a process whose place is Streaming's `world`."""
        dataset = self.dataset
        self._sample_key = derive_key(Purpose.SAMPLE, dataset.shuffle_seed, epoch)
        self._batch_key = derive_key(Purpose.BATCH, dataset.shuffle_seed, epoch)
        step = dataset.batch_size * world.num_ranks
        self._start = sample_in_epoch + world.worker_of_rank * step
        self._stride = world.workers_per_rank * step
        self._offset = world.rank * dataset.batch_size
        self._turn, self._turns = world.rank_of_node * world.num_nodes + world.node, world.num_ranks

    def words(self, index: int, number: int) -> tuple[int, ...]:
        """The words of a sample's key. The process reads this sample after `index` others of the pass."""
        step, place = divmod(index, self.dataset.batch_size)
        start = self._start + step * self._stride
        if _deals_one_by_one(self.dataset):
            return (start + place * self._turns + self._turn,)
        return start, number

    def _each(self, it: Any) -> Iterator[int]:
        """Replaces ``_each_sample_id``."""
        read = self._read
        for number in super()._each(it):
            if not read:
                self._put_under = self.streams.begin()
            key = extend_key(self._sample_key, *self.words(it.yield_index, int(number)))
            read.append((key, number))
            self._put_under(key)
            yield number

    def _collated(self, samples: list[Any]) -> Any:
        """Replaces ``collate_fn``."""
        streams = self.streams
        key = extend_key(self._batch_key, self._start + self._batches * self._stride + self._offset, Purpose.BATCH)
        self._batches += 1
        try:
            batch = self._collated_under(key, samples)
        finally:
            streams.end()
        if streams.made_late(*self._roots()):
            self._put_under = streams.begin()
            try:
                batch = self._collated_under(key, self._read_again())
            finally:
                streams.end()
        self._read.clear()
        return self._looking(batch) if self._looks else batch

    def _collated_under(self, key: int, samples: list[Any]) -> Any:
        if not self._plain_collate:
            self._put_under(key)
        return self._collate(samples)

    def _read_again(self) -> list[Any]:
        samples = []
        for key, number in self._read:
            self._put_under(key)
            samples.append(self.dataset[number])
        return samples


class _StreamingSession(Session):
    """This rank's batches, without the first `back`. A dataset has one session at a time, as Streaming requires."""

    def __init__(
        self, loader: DataLoader[Any], iterator: Iterator[Any], detail: str, reads: _CheckedPass, back: int, run: Run
    ) -> None:
        # torch's own iterator, without Streaming's guess of the number of samples in a batch.
        self._loader, self._detail, self._reads = loader, detail, reads
        self._answers = WorkerAnswers(iterator, _raise_for_worker)
        self._batches = unwrapped(self._answers, functools.partial(_report, run, reads.stored))
        self.failed = False  # whether a worker that may be persistent has failed
        self._began, self._back = False, back
        self._reading: Any = None  # Streaming's own record of a pass in this process
        self._needed = private.RETRIES.needed()
        if loader.num_workers and not back:
            self.take = self._batches.__next__  # type: ignore[method-assign]
        _sessions[_here(loader.dataset)] = self

    def take(self) -> Any:
        """The next batch, if it is read in this process or some are left out."""
        while self._back:
            self._back -= 1
            self._take_one()
        return self._take_one()

    def _take_one(self) -> Any:
        try:
            if self._began:
                return next(self._batches)
            self._began = True
            try:
                with self._reads.attached(self._loader):
                    return next(self._batches)
            finally:
                self._reading = private.pass_of(self._loader.dataset)
        except RuntimeError:  # Streaming's own, before it reads the next sample
            if private.has_failed(self._loader.dataset):
                _raise_thread_failed()
            raise
        finally:
            self._reads.end()

    def detail(self, bookmark: Any) -> str:
        """The parameters of the order."""
        return self._detail

    def next_epoch_detail(self) -> str:
        """The parameters of the order."""
        return self._detail

    def give_way(self) -> None:
        """End for another pass over the dataset. The next `take` raises an error that says so."""
        self._answers.end(_raise_ended_by_other_pass)
        self._end_threads()

    def close(self) -> None:
        """End the threads that prefetch. torch ends its worker processes."""
        self.failed = self.failed or self._answers.failed
        self.take, self._answers = _nothing_left, WorkerAnswers(iter(()))  # type: ignore[method-assign]
        self._batches = iter(())
        self._end_threads()
        self._needed.close()
        if _sessions.get(here := _here(self._loader.dataset)) is self:
            del _sessions[here]

    def _end_threads(self) -> None:
        if self._reading is not None:
            private.end_pass(self._loader.dataset, self._reading)


def _report(run: Run, stored: Stored | None, seen: WitnessReport) -> None:
    """Take over what the process that read the first batch saw of the data."""
    if stored is not None and run.looks:
        run.reports.append(stored.compared(seen, run.expects))


_sessions: weakref.WeakValueDictionary[tuple[int, int], _StreamingSession] = weakref.WeakValueDictionary()
"""The session that reads a dataset. A forked process ignores sessions of its parent."""


def _here(dataset: StreamingDataset) -> tuple[int, int]:
    return os.getpid(), id(dataset)


def _raise_ended_by_other_pass() -> NoReturn:
    raise SourceError(
        "another pass over this StreamingDataset has begun, which ends the previous one: give each loader its own "
        "StreamingDataset; the next batch is the one that was not given"
    )


def _raise_for_worker(reason: str, error: Exception) -> None:
    if "Background thread failed" in reason:  # Streaming's message, from a worker
        _raise_thread_failed()
    raise_if_worker_died(reason, error)


def _raise_thread_failed() -> NoReturn:
    raise SourceError(
        "one of Streaming's prefetching threads has failed and ended this pass (its error is in the output above): "
        "fix its cause, make the StreamingDataset again, and load the last state"
    )


def _nothing_left() -> NoReturn:
    raise StopIteration
