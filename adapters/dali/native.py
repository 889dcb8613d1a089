"""A DALI iterator as its user built it, resumed by DALI's own checkpoints. Each rank keeps its own."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import nvidia.dali

from midepoch.adapters.dali import private
from midepoch.adapters.dali.checkpoint import Checkpoint, Where, advanced
from midepoch.adapters.dali.graph import Graph, build, can_be_built, identity, lines_of_ours, settings_of
from midepoch.adapters.dali.subclass import OwnCode, promised
from midepoch.errors import SourceError, StateCorruptError, StateError, StateMismatchError, UnsupportedSourceError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.order.keys import derive_key
from midepoch.state.format import PIECES
from midepoch.world import World

__all__ = ["Factory", "NativeAdapter", "factory"]

_MOST_EPOCHS = 100_000  # the most epochs by which a checkpoint is advanced, one at a time

_WRITE_A_FACTORY = (
    "wrap a function that makes it: midepoch.wrap(dali.factory(make)) from midepoch.adapters.dali, where "
    "make(checkpointing) builds the pipeline with your_pipeline(**checkpointing) and returns its DALIGenericIterator"
)


class Factory:
    """The result of `factory`."""

    def __init__(self, make: Callable[..., Any], pipelines: int = 1) -> None:
        if not callable(make):
            raise TypeError(f"factory needs a function that returns a DALI iterator, got {make!r}")
        if type(pipelines) is not int or pipelines < 1:
            raise ValueError(f"pipelines must be an int of at least 1, got {pipelines!r}")
        self._make, self.pipelines = make, pipelines

    def __call__(self, checkpoints: tuple[bytes, ...]) -> Any:
        """Make an iterator whose pipelines keep checkpoints, restored from these if there are any."""
        restored = checkpoints or (None,) * self.pipelines
        with private.without_auto_reset():  # the adapter decides when an epoch ends
            made = self._make(*({"enable_checkpointing": True, "checkpoint": checkpoint} for checkpoint in restored))
        if (
            not private.is_iterator(made)
            or len(private.pipelines_of(made)) != self.pipelines
            or not private.keeps_checkpoints(made)
        ):
            raise UnsupportedSourceError(
                f"the factory must return a DALIGenericIterator over {self.pipelines} pipelines, built with the "
                f"arguments it was given, got {type(made).__name__}; write: def make(checkpointing): return "
                'DALIGenericIterator([your_pipeline(**checkpointing)], ["data"], reader_name="Reader")'
            )
        if checkpoints and not all(pipeline.is_restored_from_checkpoint for pipeline in private.pipelines_of(made)):
            raise UnsupportedSourceError(
                "the factory's pipelines were not built with the checkpoints it was given: pass **checkpointing to "
                "each pipeline, in the order of the arguments"
            )
        private.disable_auto_reset(made)  # it may have been made before
        return made


def factory(make: Callable[..., Any], pipelines: int = 1) -> Factory:
    """A DALI iterator that midepoch builds itself. Use it for graphs with python functions or external sources.

        @dali.factory
        def make(checkpointing):
            return DALIGenericIterator([your_pipeline(**checkpointing)], ["data"], reader_name="Reader")

        loader = midepoch.wrap(make)

    Args:
        make: gets one dict for each pipeline, with the keywords ``enable_checkpointing`` and ``checkpoint`` to build
            it with, and returns the iterator. Called when wrapped, and again when a state is loaded, unless it
            returned an iterator that has not run (``prepare_first_batch=False``).
        pipelines: number of pipelines of the iterator.
    """
    return Factory(make, pipelines)


class NativeAdapter(Adapter):
    """DALIGenericIterator, DALIClassificationIterator or DALIRaggedIterator over any pipelines, or jax's iterator.

    The unit is one process's batch. The pipelines are serialized and rebuilt with checkpointing on, so the user's
    iterator is left as it was and not used. The exception is pipelines that keep checkpoints and have not run: these
    are taken from the user's iterator, because building a reader of a long list takes as long as restoring one.
    """

    name: ClassVar[str] = "dali"
    departs: ClassVar[frozenset[str] | None] = frozenset({"order", "traces"})
    unit = "batch"
    leads = True
    can_seek = True

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._factory = source if isinstance(source, Factory) else None
        self._live: _LiveIterator | None = None
        if self._factory is not None:
            template = self._factory(())
        else:
            private.check(source)
            private.check_unused(source)
            template = copy.copy(source)  # keeps the pipelines when they are taken from the user's iterator
        self._template = template
        self._own = OwnCode.of(template, options, self.learned)
        if self._factory is not None:
            self._live = _LiveIterator(template, (0, 0), False, self._own)
        self._batch_size = template.batch_size
        pipelines = private.pipelines_of(template)
        self._graphs = [Graph(private.serialize(pipeline)) for pipeline in pipelines]
        self._settings = [settings_of(pipeline) for pipeline in pipelines]
        if any(pipeline.exec_separated for pipeline in pipelines):
            raise UnsupportedSourceError(
                f"DALI keeps no checkpoints of a pipeline with separated queues: write prefetch_queue_depth="
                f"{max(pipelines[0].cpu_queue_size, pipelines[0].gpu_queue_size)} in place of "
                f"{self._settings[0]['prefetch_queue_depth']}, or feed the pipeline with midepoch's own readers "
                "(midepoch.adapters.dali.readers)"
            )
        self._check_callbacks()
        self._epochs: dict[tuple[int, int], private.Epochs] = {}
        if pipelines[0].seed is not None:
            self.seed = pipelines[0].seed % (1 << 64)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A DALI iterator for torch or jax, or a factory of one."""
        return isinstance(source, Factory) or private.is_iterator(source)

    def _check_callbacks(self) -> None:
        callbacks = [each.name for graph in self._graphs for each in graph.operators if each.has_callback]
        if callbacks and self._factory is None:
            raise UnsupportedSourceError(
                f"the pipeline calls python ({', '.join(callbacks[:5])}), so it cannot be rebuilt from its graph: "
                + _WRITE_A_FACTORY
            )
        for pipeline in private.pipelines_of(self._template):
            for group in private.sources_of(pipeline):
                described = group.source_desc
                if described.kind.name != "CALLABLE" or not described.has_inputs:
                    raise UnsupportedSourceError(
                        f"an external_source of the pipeline is {described.kind.name.lower()} without an argument, and "
                        "no checkpoint can restore it: give it a function of one argument (SampleInfo, BatchInfo, or "
                        "the number of the batch)"
                    )

    def describe(self) -> dict[str, str]:
        """What DALI itself does not check: the data, the reader's order, the graph and the checkpoint format."""
        template = self._template
        described = {
            "unit": "batch",
            "dali": ".".join(nvidia.dali.__version__.split(".")[:2]),
            "pipelines": str(len(self._graphs)),
            "batch_size": str(self._batch_size),
            "last_batch": private.last_batch(template).lower(),
            "graph": "/".join(sorted({graph.digest for graph in self._graphs})),
        }
        if pieces := self._graphs[0].pieces:
            described[f"graph{PIECES}"] = pieces
        meta = self._reader_metas[0]
        for reader in self._graphs[0].readers:
            name = reader.name
            described[f"{name}.data"] = identity(reader, meta.get(name, {}).get("epoch_size", 0))
            for flag in ("random_shuffle", "shuffle_after_epoch", "pad_last_batch", "stick_to_shard"):
                described[f"{name}.{flag}"] = str(reader.flag(flag))
            described[f"{name}.initial_fill"] = str(reader.integer("initial_fill", 1024))
        return described

    def capabilities(self) -> Capabilities:
        """What DALI's checkpoints can restore."""
        exact = "DALI's checkpoint holds the state of each random operator"
        if self._factory is not None:
            exact += "; python functions and sources must depend only on their arguments"
        return Capabilities(
            exact_order=Capability(True, "DALI's checkpoint holds the state of each reader"),
            exact_augmentations=promised(Capability(True, exact), self._template, self.options, self._own),
            constant_time_resume=Capability(True, "DALI replays indices, and reads and decodes nothing"),
            elastic_world=Capability(False, "DALI's checkpoint is for one number of shards: use dali.readers for more"),
            elastic_workers=promises.NO_WORKERS,
            rank_independent=Capability(False, "each rank's pipeline knows only its part: use midepoch.gather(loader)"),
        )

    @property
    def elsewhere(self) -> str:
        """The lines that let midepoch feed the pipeline."""
        if len(self._graphs) > 1:
            return ""
        return lines_of_ours(self._graphs[0], private.reader_name(self._template))

    def drawing(self) -> tuple[object, ...]:
        """The iterator, if its class is the user's own."""
        return private.own_parts(self._template)

    # --- shards and lengths ---

    def _shards(self, world: World) -> int:
        """The number of shards that the readers must use; 0 keeps the number they were built with."""
        if self.options.shard is False or (world.world_size == 1 and not self.options.shard):
            return 0
        return world.world_size * len(self._graphs)

    def _serialized(self, world: World) -> list[bytes]:
        """The graphs, with every reader on this rank's shard.

        Raises:
            UnsupportedSourceError: their readers name other shards, or their shards cannot be determined.
        """
        shards = self._shards(world)
        if not shards:
            return [graph.serialized for graph in self._graphs]
        serialized = []
        for place, graph in enumerate(self._graphs):
            shard = world.rank * len(self._graphs) + place
            wrong = [
                (reader.name, reader.integer("num_shards", 1), reader.integer("shard_id", 0))
                for reader in graph.readers
                if (reader.integer("num_shards", 1), reader.integer("shard_id", 0)) != (shards, shard)
            ]
            unsharded = all(stated == 1 for _, stated, _ in wrong)
            if not graph.readers:
                raise UnsupportedSourceError(
                    f"the pipeline has no reader, so nothing says which data rank {world.rank} of {world.world_size} "
                    "reads: pass shard=False if its source gives each rank its own part"
                )
            if wrong and (self._factory is not None or not (unsharded or self.options.shard)):
                name, stated, stated_shard = wrong[0]
                raise UnsupportedSourceError(
                    f"reader {name} has num_shards={stated}, shard_id={stated_shard}, but this is rank {world.rank} of "
                    f"{world.world_size}: write num_shards={shards}, shard_id={shard}, or pass shard=False if the "
                    "ranks are meant to read these shards"
                )
            serialized.append(graph.on_shard(shard, shards) if wrong else graph.serialized)
        return serialized

    def _epochs_of(self, world: World) -> private.Epochs:
        key = (world.rank, world.world_size)
        if key not in self._epochs:
            self._epochs[key] = private.Epochs(self._template, self._metas(world))
        return self._epochs[key]

    @functools.cached_property
    def _reader_metas(self) -> list[dict[str, Any]]:
        """Each pipeline's `reader_meta`, by reader name."""
        pairs = zip(private.pipelines_of(self._template), self._graphs, strict=True)
        return [pipeline.reader_meta() if graph.readers else {} for pipeline, graph in pairs]

    def _metas(self, world: World) -> list[dict[str, Any]]:
        """What `Pipeline.reader_meta` will return for the main reader of each pipeline."""
        name = private.reader_name(self._template)
        if not name:
            return [{} for _ in self._graphs]
        metas = [dict(meta[name]) for meta in self._reader_metas]
        shards = self._shards(world)
        if shards:
            self._serialized(world)  # refuses readers on another rank's shard
            for place, meta in enumerate(metas):
                meta["number_of_shards"], meta["shard_id"] = shards, world.rank * len(metas) + place
                meta["epoch_size_padded"] = -(-meta["epoch_size"] // shards) * shards
        return metas

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Batches of all ranks, if DALI knows their number."""
        batches = self._epochs_of(world).batches(epoch)
        return None if batches is None else batches * world.world_size

    # --- states ---

    def _stated_shards(self, world: World) -> tuple[int, ...]:
        """As `Checkpoint.shards`."""
        count, number = len(self._graphs), self._shards(world)
        readers = [(place, reader) for place, graph in enumerate(self._graphs) for reader in graph.readers]
        if number:
            own = [world.rank * count + place for place, _ in readers]
        else:
            number = max((reader.integer("num_shards", 1) for _, reader in readers), default=1)
            own = [reader.integer("shard_id", 0) for _, reader in readers]
        return (number,) if number == 1 else (number, *own)

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check the checkpoint's own checksum, place, seed and rank before DALI sees it."""
        if not detail:
            if (epoch, position) != (0, 0):
                raise StateCorruptError(
                    f"the state stands at position {position} of epoch {epoch} but lacks DALI's own checkpoint: load "
                    "a complete state"
                )
            return
        checkpoint = Checkpoint.opened(detail, (epoch, position), seed, world)
        shards = self._stated_shards(world)
        saved = checkpoint.shards
        if saved != shards[: len(saved)]:
            name, before, now = "num_shards", str(saved[0]), str(shards[0])
            if before == now:
                name, before, now = "shard_id", *(", ".join(map(str, each[1:])) for each in (saved, shards))
            raise StateMismatchError(
                f"{name} differs: the state was saved with {before}, this pipeline has {now}; build the reader as it "
                "was, or start over without the state"
            )
        _check_reach(checkpoint.at, checkpoint.to)

    def lead(self, here: Place, there: Where, seed: int, world: World) -> str:
        """Advance the checkpoint: readers skip without reading, random operators continue from their last state."""
        known = Checkpoint.opened(here.detail, here[:2], seed, world) if here.detail else None
        if known is None or there < known.at:
            known = Checkpoint((0, 0), there, False, self._stated_shards(world), ())
        _check_reach(known.at, there)
        return dataclasses.replace(known, to=there).sealed(seed, world)

    # --- iterators ---

    def open(self, run: Run) -> Session:
        """Batches from the position on."""
        private.survive_forks()
        return _NativeSession(self, run)

    def reach(self, run: Run) -> _LiveIterator:
        """An iterator whose next batch is the run's first. The current one is used if it is at that place."""
        place = (run.epoch, run.position)
        shards = self._stated_shards(run.world)
        checkpoint = Checkpoint((0, 0), place, False, shards, ())
        if run.detail:
            checkpoint = Checkpoint.opened(run.detail, place, run.seed, run.world)
        live, self._live = self._live, None
        if self._own is not None:
            self._own.begin_pass(run.seed, run.world.rank, self._template if live is None else live.iterator)
        if live is None:
            live = self._taken_over(run)
        if live is None or not live.stands(checkpoint):
            live = self._moved(live, checkpoint.checkpoints, checkpoint.at, checkpoint.ended, run)
        while live.place < place:
            live = self._skipped(live, place, run)
        return live

    def keep(self, live: _LiveIterator) -> None:
        """Take back the iterator of a finished session."""
        self._live = live

    def _taken_over(self, run: Run) -> _LiveIterator | None:
        """The user's own pipelines, if rebuilt ones would be the same; None if not, or if they were taken before."""
        source, template = self.source, self._template
        if self._factory is not None or not private.keeps_checkpoints(template) or not private.is_new(source):
            return None
        if any(settings["seed"] is None for settings in self._settings) or self.options.seed is not None:
            return None
        if self._serialized(run.world) != [graph.serialized for graph in self._graphs]:
            return None
        pipelines = private.take_pipelines(source)
        return _LiveIterator(private.with_pipelines(template, pipelines), (0, 0), False, self._own)

    def _moved(
        self, live: _LiveIterator | None, checkpoints: tuple[bytes, ...], place: Where, ended: bool, run: Run
    ) -> _LiveIterator:
        """An iterator restored from these checkpoints, over the current pipelines if they have not run, or new ones."""
        if live is not None and checkpoints and private.is_new(live.iterator):
            pipelines = private.pipelines_of(live.iterator)
            try:
                for pipeline, checkpoint in zip(pipelines, checkpoints, strict=True):
                    private.restore(pipeline, checkpoint)
            except RuntimeError as error:
                self._end(live)
                raise _cannot_build(error) from error
            return _LiveIterator(private.with_pipelines(self._template, pipelines), place, ended, self._own)
        if live is not None:
            self._end(live)  # frees its memory before another one is made
        return self._make(checkpoints, place, ended, run)

    def _make(self, checkpoints: tuple[bytes, ...], place: Where, ended: bool, run: Run) -> _LiveIterator:
        if self._factory is not None:
            self._serialized(run.world)  # refuses readers on another rank's shard
            return _LiveIterator(self._factory(checkpoints), place, ended, self._own)
        pipelines = []
        for number, (serialized, settings) in enumerate(zip(self._serialized(run.world), self._settings, strict=True)):
            if settings["seed"] is None or self.options.seed is not None:
                # DALI takes 63 bits. Each rank draws other numbers, as its readers give other samples.
                settings = {
                    **settings,
                    "seed": derive_key(run.seed, run.world.rank * len(self._settings) + number) >> 1,
                }
            checkpoint = checkpoints[number] if checkpoints else None
            try:
                pipelines.append(build(serialized, checkpoint, settings))
            except RuntimeError as error:
                if checkpoints or not can_be_built(serialized, settings):
                    raise _cannot_build(error) from error
                raise UnsupportedSourceError(
                    f"DALI cannot keep checkpoints of this pipeline ({first_line(error)}): remove that operator, or "
                    "feed the pipeline with midepoch's own readers (midepoch.adapters.dali.readers)"
                ) from error
        return _LiveIterator(private.with_pipelines(self._template, pipelines), place, ended, self._own)

    def _skipped(self, live: _LiveIterator, place: Where, run: Run) -> _LiveIterator:
        """An iterator at `place`, or at the end of the current epoch if `place` is in a later one."""
        epoch, position = live.place
        ranks = run.world.world_size
        batches = self._epochs_of(run.world).batches(epoch)
        wanted = (place[1] - position) // ranks if place[0] == epoch else None
        if batches is None or not any(graph.readers for graph in self._graphs):
            live.run(wanted, ranks)
            return live
        left = batches - position // ranks
        skipped = left if wanted is None else min(wanted, left)
        # A checkpoint cannot express the end of a padded epoch, so its last batch is run.
        padded = skipped == left and any(reader.flag("pad_last_batch") for reader in self._graphs[0].readers)
        skipped -= padded
        if skipped:
            live.settle()
            size = self._batch_size
            counted = skipped * size * (1 if private.reader_name(self._template) else len(self._graphs))
            checkpoints = tuple(
                advanced(checkpoint, {reader.name: skipped * size for reader in graph.readers}, skipped, counted)
                for checkpoint, graph in zip(live.iterator.checkpoints(), self._graphs, strict=True)
            )
            over = wanted is None and not padded
            reached = (epoch + 1, 0) if over else (epoch, position + skipped * ranks)
            live = self._moved(live, checkpoints, reached, over, run)
        if padded:
            live.run(1, ranks)
        if live.place[0] == epoch and wanted is None:
            live.place, live.ended = (epoch + 1, 0), True
        return live

    def close(self) -> None:
        """End the pipelines' threads and free their memory."""
        live, self._live = self._live, None
        if live is not None:
            self._end(live)

    def _end(self, live: _LiveIterator) -> None:
        self._reader_metas  # noqa: B018  # cache it while these pipelines can still answer
        live.end()


class _LiveIterator:
    """A running iterator, and its place.

    Attributes:
        place: of its next batch.
        ended: `place` is the beginning of an epoch, and DALI has not been reset after the previous one.
    """

    def __init__(self, iterator: Any, place: Where, ended: bool, own: OwnCode | None) -> None:
        self.iterator, self.place, self.ended, self._own = iterator, place, ended, own
        self.untouched = not ended and place == (0, 0)

    def stands(self, checkpoint: Checkpoint) -> bool:
        """Whether it is where the checkpoint was taken."""
        if checkpoint.at != self.place:
            return False
        if not checkpoint.checkpoints:
            return self.untouched
        return tuple(self.iterator.checkpoints()) == checkpoint.checkpoints

    def take(self) -> Any:
        """The next batch."""
        self.untouched = False
        if not self.ended:
            return self._next()
        try:
            batch = self._next()  # immediately, if the iterator reset itself while it was restored
        except StopIteration:
            self.iterator.reset()
            batch = self._next()
        self.ended = False
        return batch

    def _next(self) -> Any:
        return next(self.iterator) if self._own is None else self._own.take(self.iterator, *self.place)

    def end(self) -> None:
        """Stop the pipelines' threads now."""
        for pipeline in private.pipelines_of(self.iterator):
            private.stop(pipeline)

    def settle(self) -> None:
        """Reset DALI after the end of the previous epoch, if that has not been done."""
        if self.ended:
            with contextlib.suppress(StopIteration):
                self._next()
                raise StateError("DALI continued past the end of its epoch: load a state instead of skipping")
            self.iterator.reset()
            self.ended = False

    def run(self, batches: int | None, ranks: int) -> None:
        """Run and discard this many batches, or the rest of the epoch."""
        epoch, position = self.place
        while batches is None or batches > 0:
            try:
                self.take()
            except StopIteration:
                self.place, self.ended = (epoch + 1, 0), True
                return
            position += ranks
            batches = None if batches is None else batches - 1
        self.place = (epoch, position)


def _check_reach(at: Where, to: Where) -> None:
    if to[0] - at[0] > _MOST_EPOCHS:
        raise StateMismatchError(
            f"epoch {to[0]} is {to[0] - at[0]} epochs after DALI's own checkpoint, and each must be skipped in turn: "
            f"load a state that is at most {_MOST_EPOCHS} epochs before it"
        )


class _Mark(NamedTuple):
    """DALI's state before a batch: the place, whether a reset is due, and a checkpoint for each pipeline."""

    place: Where
    ended: bool
    checkpoints: tuple[bytes, ...]


class _NativeSession(Session):
    """Takes DALI's checkpoints before each batch, which costs about 0.1 ms and 300 bytes."""

    marks = True

    def __init__(self, adapter: NativeAdapter, run: Run) -> None:
        self._adapter, self._run = adapter, run
        self._live: _LiveIterator | None = None
        self._ended = False
        self._marked: _Mark | None = None
        self._left = None if run.share is None else run.share.steps

    def take(self) -> Any:
        """The next batch."""
        live = self._live
        if live is None:
            live = self._live = self._adapter.reach(self._run)
        if self._ended or self._left == 0:
            raise StopIteration
        place = live.place
        try:
            batch = live.take()
        except StopIteration:
            self._ended = True
            live.place, live.ended = (place[0] + 1, 0), True
            if self._left is None:
                raise
            raise SourceError(
                f"DALI ended epoch {place[0]} at position {place[1]}, {self._left} batches early: load the last state "
                "and try again"
            ) from None
        except UnsupportedSourceError:  # the code of a subclass
            self._live = None
            self._adapter._end(live)
            raise
        except Exception as error:
            self._live = None
            self._adapter._end(live)
            raise SourceError(
                f"DALI failed in epoch {place[0]}, in the batch at position {place[1]} (counted in batches of all "
                f"ranks), or shortly after it without exec_dynamic: {first_line(error)}. Repair the data, or skip the "
                f"batch: loader.seek(position={place[1] + self._run.world.world_size})"
            ) from error
        live.place = (place[0], place[1] + self._run.world.world_size)
        if self._left is not None:
            self._left -= 1
            if not self._left:
                live.place, live.ended = (place[0] + 1, 0), True
        return batch

    def mark(self) -> _Mark | None:
        """DALI's checkpoints. At the end of an epoch of unknown length, those from before the end was found."""
        live = self._live
        if live is not None and not self._ended:
            self._marked = _Mark(live.place, live.ended, tuple(live.iterator.checkpoints()))
        return self._marked

    def detail(self, mark: _Mark | None) -> str:
        """The checkpoints, with their place and a checksum."""
        run = self._run
        if mark is None:
            return run.detail
        shards = self._adapter._stated_shards(run.world)
        return Checkpoint(mark.place, mark.place, mark.ended, shards, mark.checkpoints).sealed(run.seed, run.world)

    def following(self) -> str:
        """The checkpoints at the end of the epoch, from which the next one starts."""
        return self.detail(self.mark())

    def close(self) -> None:
        """Hand the iterator back for the next session."""
        live, self._live = self._live, None
        if live is not None:
            self._adapter.keep(live)


def _cannot_build(error: RuntimeError) -> SourceError:
    return SourceError(f"DALI cannot build the pipeline: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """DALI's error message without its tracebacks."""
    lines = [line.strip() for line in str(error).replace("\0", "").splitlines() if line.strip()]
    for place, line in enumerate(lines):
        if line.startswith("encountered:") and place + 1 < len(lines):
            return lines[place + 1][:300]
    return (lines[-1] if lines else type(error).__name__)[:300]
