"""A DALI iterator as its user built it, resumed by DALI's own checkpoints. Each rank keeps its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import nvidia.dali

from midepoch.adapters.dali import private
from midepoch.adapters.dali.graph import Graph, build, can_be_built, identity, lines_of_ours, settings_of
from midepoch.errors import SourceError, StateCorruptError, StateError, StateMismatchError, UnsupportedSourceError, warn
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.order.keys import derive_key
from midepoch.state.codec import decode, encode
from midepoch.state.format import PIECES
from midepoch.world import World

__all__ = ["Factory", "NativeAdapter", "factory"]

Where = tuple[int, int]
"""(epoch, position), as in the state."""

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


class _Checkpoint(NamedTuple):
    """What a session needs to begin at a place, or to reach it by reading.

    Attributes:
        at: where DALI's checkpoints were taken.
        ended: they were taken after the last batch of the epoch before, and DALI has not been reset since.
        shards: the number of shards that the readers divide their data into, and the shard of each reader if there are
            several shards.
        pipelines: a checkpoint for each; none for a source that has not been read.
    """

    at: Where
    ended: bool
    shards: tuple[int, ...]
    pipelines: tuple[bytes, ...]

    def text(self) -> str:
        """For a state's `detail`."""
        return encode([list(self.at), self.ended, list(self.shards), list(self.pipelines)])

    @classmethod
    def of(cls, detail: str) -> _Checkpoint:
        """The opposite of `text`. Nothing stands for the very beginning.

        Raises:
            StateCorruptError: it is no such text.
        """
        if not detail:
            return cls((0, 0), False, (), ())
        try:
            at, ended, shards, pipelines = decode(detail)
            kinds = [*map(type, (*at, ended))], {*map(type, shards)}, {*map(type, pipelines)}
            if kinds != ([int, int, bool], {int}, {bytes}) or shards[0] < 1:
                raise ValueError("unexpected content")
        except (TypeError, ValueError, IndexError) as error:
            raise StateCorruptError(f"DALI's part of the state is invalid ({error}); load an older state") from error
        return cls((at[0], at[1]), ended, tuple(shards), tuple(pipelines))


class NativeAdapter(Adapter):
    """DALIGenericIterator, DALIClassificationIterator or DALIRaggedIterator over any pipelines, or jax's iterator.

    The unit is one process's batch. The pipelines are serialized and rebuilt with checkpointing on, so the user's
    iterator is left as it was and not used. The exception is pipelines that keep checkpoints and have not run: these
    are taken from the user's iterator, because building a reader of a long list takes as long as restoring one.
    """

    name: ClassVar[str] = "dali"
    facts = Facts("batch", departs=frozenset({"order", "traces"}))
    seals_detail = True  # DALI would crash, hang or read other data
    needs_detail = True

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
        private.refuse_own_code(template)
        if self._factory is not None:
            self._live = _LiveIterator(template, (0, 0), False)
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
        if pipelines[0].seed is not None:
            self.facts = replace(self.facts, seed=pipelines[0].seed % (1 << 64))

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
            exact_augmentations=Capability(True, exact),
            constant_time_resume=Capability(True, "DALI replays indices, and reads and decodes nothing"),
            elastic_world=Capability(False, "DALI's checkpoint is for one number of shards: use dali.readers for more"),
            elastic_workers=promises.NO_WORKERS,
            rank_independent=Capability(False, "each rank's pipeline knows only its part: use midepoch.gather(loader)"),
        )

    def rank_part(self, detail: str, saved_world_size: int, world: World) -> str:
        """This rank's, in a world of the same size. The refusal has the lines that let midepoch feed the pipeline."""
        if saved_world_size != world.world_size and len(self._graphs) == 1:
            cure = lines_of_ours(self._graphs[0], private.reader_name(self._template))
            self.refuse_world(saved_world_size, world, cure)
        return super().rank_part(detail, saved_world_size, world)

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

    @functools.cached_property
    def _reader_metas(self) -> list[dict[str, Any]]:
        """Each pipeline's `reader_meta`, by reader name."""
        pairs = zip(private.pipelines_of(self._template), self._graphs, strict=True)
        return [pipeline.reader_meta() if graph.readers else {} for pipeline, graph in pairs]

    def _length(self, world: World) -> tuple[int | None, bool]:
        """The first epoch's batches on this rank, as DALI counts them, and whether all epochs have as many.

        With FILL, DALI takes an epoch's last batch partly from the next epoch, which may then have fewer.
        """
        template, name, step = self._template, private.reader_name(self._template), self._batch_size
        if name is None:
            samples, step, padded = private.given_size(template), step * len(self._graphs), private.is_padded(template)
            if samples < 0:
                return None, False
            least, most, divides = samples, samples, samples % step == 0
        else:
            self._serialized(world)  # refuses readers on another rank's shard
            meta = self._reader_metas[0][name]
            samples, shards, padded = meta["epoch_size"], self._shards(world), meta["pad_last_batch"]
            shards = shards or meta["number_of_shards"]
            least, most, divides = samples // shards, -(-samples // shards), samples % (shards * step) == 0
        policy = private.last_batch(template)
        return least // step if policy == "DROP" else -(-most // step), policy != "FILL" or bool(padded) or divides

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Batches of all ranks, if DALI gives as many in each epoch."""
        batches, always = self._length(world)
        return batches * world.world_size if batches is not None and always else None

    def stated_length(self) -> int | None:
        """Batches of the first epoch, as the iterator's own ``__len__`` says."""
        return self._length(World(0, self.options.known_ranks) if self.options.world is None else self.options.world)[0]

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
        """Check the checkpoint's place and shards before DALI sees it."""
        saved, shards = _Checkpoint.of(detail), self._stated_shards(world)
        self._check_way(saved.at, (epoch, position))
        if detail and saved.shards != shards:
            name, before, now = "num_shards", str(saved.shards[0]), str(shards[0])
            if before == now:
                name, before, now = "shard_id", *(", ".join(map(str, each[1:])) for each in (saved.shards, shards))
            raise StateMismatchError(
                f"{name} differs: the state was saved with {before}, this pipeline has {now}; build the reader as it "
                "was, or start over without the state"
            )

    def detail_at(self, here: Place, there: Where, seed: int, world: World) -> str:
        """The same checkpoint: the rest of its epoch is read, and thrown away."""
        self._check_way(_Checkpoint.of(here.detail).at, there)
        return here.detail

    def _check_way(self, at: Where, to: Where) -> None:
        if at != to and to != (at[0] + 1, 0):
            raise StateError(
                f"DALI's checkpoint of epoch {at[0]}, position {at[1]} does not lead to epoch {to[0]}, position "
                f"{to[1]}: load a state that was saved there"
            )

    # --- iterators ---

    def open(self, run: Run) -> Session:
        """Batches from the position on."""
        private.survive_forks()
        return _NativeSession(self, run)

    def reach(self, run: Run) -> _LiveIterator:
        """An iterator whose next batch is the run's first. The current one is used if it is at that place."""
        place, checkpoint = (run.epoch, run.position), _Checkpoint.of(run.detail)
        live, self._live = self._live, None
        if live is None:
            live = self._taken_over(run)
        if live is None or not live.stands(checkpoint):
            live = self._moved(live, checkpoint, run)
        if live.place != place:
            live.read_to_the_end()
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
        return _LiveIterator(private.with_pipelines(template, pipelines), (0, 0), False)

    def _moved(self, live: _LiveIterator | None, checkpoint: _Checkpoint, run: Run) -> _LiveIterator:
        """An iterator restored from a checkpoint, over the current pipelines if they have not run, or new ones."""
        if live is not None and checkpoint.pipelines and private.is_new(live.iterator):
            pipelines = private.pipelines_of(live.iterator)
            try:
                for pipeline, each in zip(pipelines, checkpoint.pipelines, strict=True):
                    private.restore(pipeline, each)
            except RuntimeError as error:
                self._end(live)
                raise _cannot_build(error) from error
            made = private.with_pipelines(self._template, pipelines)
        else:
            if live is not None:
                self._end(live)  # frees its memory before another one is made
            made = self._make(checkpoint.pipelines, run)
        return _LiveIterator(made, checkpoint.at, checkpoint.ended)

    def _make(self, checkpoints: tuple[bytes, ...], run: Run) -> Any:
        if self._factory is not None:
            self._serialized(run.world)  # refuses readers on another rank's shard
            return self._factory(checkpoints)
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
        return private.with_pipelines(self._template, pipelines)

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
        last: the checkpoint before that epoch's end was found, if nobody knew where it is.
    """

    def __init__(self, iterator: Any, place: Where, ended: bool) -> None:
        self.iterator, self.place, self.ended = iterator, place, ended
        self.untouched = not ended and place == (0, 0)
        self.last: _Checkpoint | None = None

    def stands(self, checkpoint: _Checkpoint) -> bool:
        """Whether it is where the checkpoint was taken, or at the end that followed it."""
        if self.ended and checkpoint == self.last:
            return True
        if checkpoint.at != self.place:
            return False
        if not checkpoint.pipelines:
            return self.untouched
        return tuple(self.iterator.checkpoints()) == checkpoint.pipelines

    def take(self) -> Any:
        """The next batch."""
        self.untouched = False
        if not self.ended:
            return next(self.iterator)
        try:
            batch = next(self.iterator)  # immediately, if the iterator reset itself while it was restored
        except StopIteration:
            self.iterator.reset()
            batch = next(self.iterator)
        self.ended = False
        return batch

    def end(self) -> None:
        """Stop the pipelines' threads now."""
        for pipeline in private.pipelines_of(self.iterator):
            private.stop(pipeline)

    def read_to_the_end(self) -> None:
        """Read the rest of the epoch, and throw it away."""
        epoch, position = self.place
        read = 0
        while True:
            try:
                self.take()
            except StopIteration:
                break
            read += 1
        self.place, self.ended = (epoch + 1, 0), True
        if read:
            warn(
                f"DALI has read the rest of epoch {epoch}, {read} batches from position {position} on, and thrown it "
                f"away: only so does it get to epoch {epoch + 1}",
            )


class _NativeSession(Session):
    """Takes DALI's checkpoints before each batch, which costs about 0.1 ms and 300 bytes."""

    bookmarks = True

    def __init__(self, adapter: NativeAdapter, run: Run) -> None:
        self._adapter, self._run = adapter, run
        self._live: _LiveIterator | None = None
        self._ended = False
        self._marked: _Checkpoint | None = None
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
            live.last = self._marked or _Checkpoint.of(self._run.detail)
            if self._left is None:
                raise
            raise SourceError(
                f"DALI ended epoch {place[0]} at position {place[1]}, {self._left} batches early: load the last state "
                "and try again"
            ) from None
        except Exception as error:
            self._live = None
            self._adapter._end(live)
            raise SourceError(
                f"DALI failed in epoch {place[0]}, in the batch at position {place[1]} (counted in batches of all "
                f"ranks), or shortly after it without exec_dynamic: {first_line(error)}. Repair the data, and load the "
                "last state"
            ) from error
        live.place = (place[0], place[1] + self._run.world.world_size)
        if self._left is not None:
            self._left -= 1
            if not self._left:
                live.place, live.ended = (place[0] + 1, 0), True
        return batch

    def bookmark(self) -> _Checkpoint | None:
        """DALI's checkpoints. At the end of an epoch of unknown length, those from before the end was found."""
        live = self._live
        if live is not None and not self._ended:
            shards = self._adapter._stated_shards(self._run.world)
            self._marked = _Checkpoint(live.place, live.ended, shards, tuple(live.iterator.checkpoints()))
        return self._marked

    def detail(self, bookmark: _Checkpoint | None) -> str:
        """The checkpoints, and where they were taken."""
        return self._run.detail if bookmark is None else bookmark.text()

    def next_epoch_detail(self) -> str:
        """The checkpoints at the end of the epoch, from which the next one starts."""
        return self.detail(self.bookmark())

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
