"""A DALI iterator as its user built it, resumed by DALI's own checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from midepoch.adapters.dali import private
from midepoch.adapters.dali.checkpointed import Checkpoint, CheckpointedAdapter, first_line
from midepoch.adapters.dali.graph import Graph, build, cure_with_our_reader, identity, settings_of
from midepoch.errors import SourceError, UnsupportedSourceError
from midepoch.loader.adapter import Options, Run
from midepoch.loader.capabilities import Capabilities, Capability
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


class NativeAdapter(CheckpointedAdapter):
    """DALIGenericIterator, DALIClassificationIterator or DALIRaggedIterator over any pipelines, or jax's iterator.

    The pipelines are serialized and rebuilt with checkpointing on, so the user's iterator is left as it was and not
    used. A factory's own iterator is used.
    """

    name: ClassVar[str] = "dali"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
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
            self.begin_with(template)
        self._batch_size = template.batch_size
        pipelines = private.pipelines_of(template)
        self._graphs = [Graph(private.serialize(pipeline)) for pipeline in pipelines]
        self._settings = [settings_of(pipeline) for pipeline in pipelines]
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
            **super().describe(),
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
        return self.promised(Capability(True, exact))

    def rank_part(self, detail: str, saved_world_size: int, world: World) -> str:
        """This rank's, in a world of the same size. The refusal says what lets midepoch feed the pipeline."""
        if saved_world_size != world.world_size and len(self._graphs) == 1:
            self.refuse_world(saved_world_size, world, cure_with_our_reader(self._graphs[0]))
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

    def stated_shards(self, world: World) -> tuple[int, ...]:
        """As `Checkpoint.shards`."""
        count, number = len(self._graphs), self._shards(world)
        readers = [(place, reader) for place, graph in enumerate(self._graphs) for reader in graph.readers]
        if number:
            own = [world.rank * count + place for place, _ in readers]
        else:
            number = max((reader.integer("num_shards", 1) for _, reader in readers), default=1)
            own = [reader.integer("shard_id", 0) for _, reader in readers]
        return (number,) if number == 1 else (number, *own)

    # --- iterators ---

    def make(self, checkpoint: Checkpoint, run: Run) -> Any:
        """An iterator over new pipelines."""
        serialized = self._serialized(run.world)  # refuses readers on another rank's shard
        if self._factory is not None:
            return self._factory(checkpoint.saved)
        pipelines = []
        for number, (graph, settings) in enumerate(zip(serialized, self._settings, strict=True)):
            if settings["seed"] is None or self.options.seed is not None:
                # DALI takes 63 bits. Each rank draws other numbers, as its readers give other samples.
                key = derive_key(run.seed, run.world.rank * len(serialized) + number)
                settings = {**settings, "seed": key >> 1}
            try:
                pipelines.append(build(graph, checkpoint.saved[number] if checkpoint.saved else None, settings))
            except RuntimeError as error:
                raise SourceError(
                    f"DALI cannot build this pipeline with checkpoints ({first_line(error)}): if an operator keeps "
                    "none, remove it, or feed the pipeline with midepoch's own readers (midepoch.adapters.dali.readers)"
                ) from error
        return private.with_pipelines(self._template, pipelines)

    def end(self, iterator: Any) -> None:
        """Stop the pipelines' threads now."""
        self._reader_metas  # noqa: B018  # cache it while a factory's pipelines can still answer
        for pipeline in private.pipelines_of(iterator):
            private.stop(pipeline)
