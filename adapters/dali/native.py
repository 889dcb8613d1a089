"""A DALI iterator as its user built it, resumed by DALI's own checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import nvidia.dali

from midepoch.adapters.dali import private
from midepoch.adapters.dali.checkpointed import Checkpoint, LiveIterator, check_way, first_line
from midepoch.adapters.dali.graph import Graph, build, cure_with_our_reader, identity, settings_of
from midepoch.errors import SourceError, StateMismatchError, UnsupportedSourceError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Reach, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.order.keys import derive_key
from midepoch.state.format import PIECES
from midepoch.world import World

__all__ = ["Factory", "NativeAdapter", "factory"]

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
        with private.left_unread():
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
        private.leave_unread(made)  # it may have been made before
        return made


def factory(make: Callable[..., Any], pipelines: int = 1) -> Factory:
    """A DALI iterator that midepoch builds itself. Use it for graphs with python functions or external sources.

        @dali.factory
        def make(checkpointing):
            return DALIGenericIterator([your_pipeline(**checkpointing)], ["data"], reader_name="Reader")

        loader = midepoch.wrap(make)

    Args:
        make: gets one dict for each pipeline, with the keywords ``enable_checkpointing`` and ``checkpoint`` to build
            it with, and returns the iterator. Called when wrapped, and again when a state is loaded.
        pipelines: number of pipelines of the iterator.
    """
    return Factory(make, pipelines)


class NativeAdapter(Adapter):
    """DALIGenericIterator, DALIClassificationIterator or DALIRaggedIterator over any pipelines, or jax's iterator.

    The pipelines are serialized and rebuilt with checkpointing on, so the user's iterator is left as it was and not
    used. A factory's own iterator is used.
    """

    name: ClassVar[str] = "dali"
    reach = Reach.STATES

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._live: LiveIterator | None = None
        self._latest: LiveIterator | None = None  # which a session may have
        self._factory = source if isinstance(source, Factory) else None
        if self._factory is not None:
            template = self._factory(())
        else:
            private.check(source)
            private.check_unused(source)
            template = source
        self._template = template
        private.refuse_own_code(template)
        if self._factory is not None:
            self._live = LiveIterator(template, (0, 0))
        self._batch_size = template.batch_size
        pipelines = private.pipelines_of(template)
        self._graphs = [Graph(private.serialize(pipeline)) for pipeline in pipelines]
        self._settings = [settings_of(pipeline) for pipeline in pipelines]
        self._check_callbacks()
        seed = None if pipelines[0].seed is None else pipelines[0].seed % (1 << 64)
        self.facts = Facts("batch", seed=seed, departs=frozenset({"order", "traces"}))

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
        meta = self._reader_meta
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
            rank_independent=Capability(False, "each rank's readers know only their part: use midepoch.gather(loader)"),
        )

    def rank_part(self, detail: str, saved_world_size: int, world: World) -> str:
        """This rank's, in a world of the same size. The refusal says what lets midepoch feed the pipeline."""
        if saved_world_size != world.world_size and len(self._graphs) == 1:
            self.refuse_world(saved_world_size, world, cure_with_our_reader(self._graphs[0]))
        return super().rank_part(detail, saved_world_size, world)

    # --- shards and lengths ---

    def _check_shards(self, world: World) -> None:
        """Raise UnsupportedSourceError unless all readers name this rank's shards."""
        if self.options.shard is False or (world.world_size == 1 and not self.options.shard):
            return
        shards = world.world_size * len(self._graphs)
        for shard, graph in enumerate(self._graphs, world.rank * len(self._graphs)):
            if not graph.readers:
                raise UnsupportedSourceError(
                    f"the pipeline has no reader, so nothing says which data rank {world.rank} of {world.world_size} "
                    "reads: pass shard=False if its source gives each rank its own part"
                )
            for reader in graph.readers:
                if reader.shard != (shards, shard):
                    stated, stated_shard = reader.shard
                    raise UnsupportedSourceError(
                        f"reader {reader.name} has num_shards={stated}, shard_id={stated_shard}, but this is rank "
                        f"{world.rank} of {world.world_size}: write num_shards={shards}, shard_id={shard}, or pass "
                        "shard=False if the ranks are meant to read these shards"
                    )

    @functools.cached_property
    def _reader_meta(self) -> dict[str, Any]:
        """The first pipeline's `reader_meta`, by reader name."""
        return private.pipelines_of(self._template)[0].reader_meta() if self._graphs[0].readers else {}

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
            self._check_shards(world)
            meta = self._reader_meta[name]
            samples, shards, padded = meta["epoch_size"], meta["number_of_shards"], meta["pad_last_batch"]
            least, most, divides = samples // shards, -(-samples // shards), samples % (shards * step) == 0
        policy = private.last_batch(template)
        return least // step if policy == "DROP" else -(-most // step), policy != "FILL" or bool(padded) or divides

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Batches of all ranks, if DALI gives as many in each epoch."""
        batches, always = self._length(world)
        return batches * world.world_size if batches is not None and always else None

    @property
    def stated_shards(self) -> tuple[int, ...]:
        """As `Checkpoint.shards`."""
        stated = [reader.shard for graph in self._graphs for reader in graph.readers]
        number = max((shards for shards, _ in stated), default=1)
        return (number,) if number == 1 else (number, *(shard for _, shard in stated))

    # --- states ---

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check the checkpoint's place and shards before DALI sees it."""
        checkpoint, shards = Checkpoint.of(detail), self.stated_shards
        check_way(checkpoint.at, (epoch, position))
        if detail and checkpoint.shards != shards:
            name, before, now = "num_shards", str(checkpoint.shards[0]), str(shards[0])
            if before == now:
                name, before, now = "shard_id", *(", ".join(map(str, each[1:])) for each in (checkpoint.shards, shards))
            raise StateMismatchError(
                f"{name} differs: the state was saved with {before}, this reader has {now}; build the reader as it "
                "was, or start over without the state"
            )

    def detail_at(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The same checkpoint: the rest of its epoch is read, and thrown away."""
        detail, live = here.detail, self._latest
        if not detail and live is not None and live.place[0] == here.epoch != there[0]:
            detail = Checkpoint(live.place, self.stated_shards, live.saved()).text()
        check_way(Checkpoint.of(detail).at, there)
        return detail

    # --- iterators ---

    def open(self, run: Run) -> Session:
        """Batches from the position on."""
        private.survive_forks()
        return _NativeSession(self, run)

    def lead_to(self, run: Run) -> LiveIterator:
        """An iterator at the run's checkpoint. The current one is used if it is there."""
        checkpoint, live = Checkpoint.of(run.detail), self._live
        if live is None or not live.is_at(checkpoint):
            self.close()  # frees its memory before another one is made
            live = LiveIterator(self._make(checkpoint, run), checkpoint.at, checkpoint.saved or None)
        self._live, self._latest = None, live
        return live

    def keep(self, live: LiveIterator) -> None:
        """Take back the iterator of a finished session."""
        self._live = live

    def _make(self, checkpoint: Checkpoint, run: Run) -> Any:
        """An iterator over new pipelines."""
        self._check_shards(run.world)
        if self._factory is not None:
            return self._factory(checkpoint.saved)
        pipelines = []
        for number, (graph, settings) in enumerate(zip(self._graphs, self._settings, strict=True)):
            if settings["seed"] is None or self.options.seed is not None:
                # DALI takes 63 bits. Each rank draws other numbers, as its readers give other samples.
                key = derive_key(run.seed, run.world.rank * len(self._graphs) + number)
                settings = {**settings, "seed": key >> 1}
            try:
                saved = checkpoint.saved[number] if checkpoint.saved else None
                pipelines.append(build(graph.serialized, saved, settings))
            except RuntimeError as error:
                raise SourceError(
                    f"DALI cannot build this pipeline with checkpoints ({first_line(error)}): if an operator keeps "
                    "none, remove it, or feed the pipeline with midepoch's own readers (midepoch.adapters.dali.readers)"
                ) from error
        return private.with_pipelines(self._template, pipelines)

    def end(self, iterator: Any) -> None:
        """Stop the pipelines' threads now."""
        self._reader_meta  # noqa: B018  # cache it while a factory's pipelines can still answer
        for pipeline in private.pipelines_of(iterator):
            private.stop(pipeline)

    def close(self) -> None:
        """End the iterator's threads and free its memory."""
        live, self._live, self._latest = self._live, None, None
        if live is not None:
            self.end(live.iterator)


class _NativeSession(Session):
    """Takes DALI's checkpoints before each batch, which costs about 0.1 ms and 300 bytes."""

    def __init__(self, adapter: NativeAdapter, run: Run) -> None:
        self._adapter, self._run = adapter, run
        self._live: LiveIterator | None = None
        self._left = None if run.share is None else run.share.steps

    def take(self) -> Any:
        """The next batch."""
        if self._left == 0:
            raise StopIteration
        live = self._live
        if live is None:
            live = self._live = self._adapter.lead_to(self._run)
        try:
            if live.place[0] != self._run.epoch:
                live.begin_next_epoch()
            batch = live.take(self._run.world.world_size)
        except StopIteration:
            if self._left is None:
                self._left = 0
                raise
            raise SourceError(
                f"DALI ended epoch {live.place[0]} at position {live.place[1]}, {self._left} batches early: load the "
                "last state and try again"
            ) from None
        except Exception as error:
            self._live = None
            self._adapter.end(live.iterator)
            raise SourceError(
                f"DALI failed in epoch {live.place[0]}, in the batch at position {live.place[1]} (counted in batches "
                f"of all ranks), or shortly after it without exec_dynamic: {first_line(error)}. Repair the data, and "
                "load the last state"
            ) from error
        if self._left is not None:
            self._left -= 1
        return batch

    def bookmark(self) -> Checkpoint | None:
        """DALI's checkpoints; None before the first batch."""
        live = self._live
        if live is None:
            return None
        return Checkpoint(live.place, self._adapter.stated_shards, live.saved())

    def detail(self, bookmark: Checkpoint | None) -> str:
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
