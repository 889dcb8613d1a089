"""Sources that are elastic by themselves, and stay so: Grain's ElasticIterator, LitData's StreamingDataLoader."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterator
from typing import Any, ClassVar

from midepoch.adapters.stateful import private
from midepoch.adapters.stateful.adapter import StatefulAdapter, is_of
from midepoch.adapters.stateful.packages import RESTORED_BY_GRAIN
from midepoch.adapters.stateful.session import ENDED
from midepoch.errors import StateMismatchError, UnsupportedSourceError, warn
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.order import MAXIMUM_SIZE
from midepoch.reading.sessions import IteratorSession
from midepoch.state.codec import decode
from midepoch.state.parts import parts_in
from midepoch.world import World

__all__ = ["ElasticGrainAdapter", "LitDataAdapter"]


class ElasticGrainAdapter(Adapter):
    """Grain's ElasticIterator. Its state is a position: the number of samples that all ranks have received."""

    name: ClassVar[str] = "grain-elastic"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._global_batch, self._shard, samples = private.elastic_parts(source)
        departs = frozenset({"order", "ranks"})
        self.facts = Facts("sample", self._global_batch // self._shard[1], drop_last=True, tail="drop", departs=departs)
        self._size = None if samples > MAXIMUM_SIZE else samples  # one that repeats itself for ever has no end
        if options.shard:
            raise UnsupportedSourceError("shard=True: an ElasticIterator divides its data itself; leave shard out")
        if options.tail not in (None, "drop"):
            raise UnsupportedSourceError(
                f"tail={options.tail!r}: Grain leaves out a last global batch that is not full; leave tail out"
            )

    @classmethod
    def recognises(cls, source: object) -> bool:
        """An ElasticIterator."""
        return is_of("grain", source) and type(source).__name__ == "ElasticIterator"

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Samples; None if it repeats itself for ever."""
        self._check_world(world)
        return self._size

    def describe(self) -> dict[str, str]:
        """The transformations and their seeds, as far as they can be determined."""
        text = private.elastic_steps(self.source)
        return {"order": "Grain's own", "data": f"{zlib.crc32(text.encode()):08x}"}

    def capabilities(self) -> Capabilities:
        """As elastic as Grain."""
        place = Capability(True, "Grain goes to any sample, and shares what follows among any number of shards")
        return Capabilities(
            exact_order=Capability(True, "Grain's order is a function of the sample's number"),
            exact_augmentations=RESTORED_BY_GRAIN,
            constant_time_resume=place,
            elastic_world=place,
            elastic_workers=place,
            rank_independent=promises.ONE_STATE,
        )

    def open(self, run: Run) -> Session:
        """Grain's own iterator from the position on."""
        return IteratorSession(_batches(self.source, run))

    def _check_world(self, world: World) -> None:
        """An ElasticIterator is made for its shard."""
        shard = self._shard
        if self.options.shard is None and shard != (world.rank, world.world_size):
            raise UnsupportedSourceError(
                f"the ElasticIterator has ShardOptions(shard_index={shard[0]}, shard_count={shard[1]}), but this is "
                f"rank {world.rank} of {world.world_size}: make it with ShardOptions(shard_index={world.rank}, "
                f"shard_count={world.world_size}), or pass shard=False if the ranks are meant to read these shards"
            )


def _batches(source: Any, run: Run) -> Iterator[Any]:
    """Those of a session: Grain is asked when the first one is."""
    yield from itertools.islice(
        private.elastic_iterator(source, run.position), None if run.share is None else run.share.steps
    )


class LitDataAdapter(StatefulAdapter):
    """LitData's StreamingDataLoader. One rank's state continues the epoch on any number of ranks and workers.

    The length is unknown for the rest of an epoch that another number of ranks or workers, or another batch size, has
    begun.
    """

    name: ClassVar[str] = "litdata"

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A StreamingDataLoader over one StreamingDataset. Combined datasets are not elastic."""
        return is_of("litdata", source) and type(getattr(source, "dataset", None)).__name__ == "StreamingDataset"

    def describe(self) -> dict[str, str]:
        """The kind of source, and its chunks with the numbers of their samples; not what follows from the ranks."""
        samples, chunks = private.litdata_chunks(self.source)
        data = f"{samples} samples:{zlib.crc32(chunks.encode()):08x}"
        return {"source": super().describe()["source"], "data": data, **self.described_package()}

    def capabilities(self) -> Capabilities:
        """As elastic as LitData."""
        own = Capability(True, "LitData divides what is left among them: exact where their global batch divides it")
        return dataclasses.replace(
            super().capabilities(),
            elastic_world=own,
            elastic_workers=own,
            rank_independent=Capability(False, "each rank asks its own source; any one rank's state will do for all"),
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Compare what LitData itself would compare when the first batch is read."""
        super().check_detail(detail, seed, epoch, position, world)
        saved = self._saved(detail)
        for name in ("shuffle", "seed", "drop_last"):
            here = getattr(self.source.dataset, name, None)
            if saved.get(name, here) == here:
                continue
            cure = f"write StreamingDataset({name}={saved[name]!r})"
            if name == "drop_last":
                cure += ", since LitData's own value is another on one rank than on several"
            raise StateMismatchError(
                f"{name} differs: the state was saved with {saved[name]!r}, this StreamingDataset has {here!r}; {cure}"
            )

    def rank_part(self, detail: str, saved_world_size: int, world: World) -> str:
        """Any rank's part: they are equal."""
        return next(iter(parts_in(detail).values()))

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Batches of all ranks; None if others have begun the epoch."""
        if self._was_begun_by_others(detail, world):
            return None
        return super().size(seed, epoch, world, detail)

    @property
    def divides(self) -> bool:
        """Yes: LitData divides its chunks among ranks."""
        return True

    def _saved(self, detail: str) -> dict[str, Any]:
        return private.litdata_saved(decode(detail.removeprefix(ENDED))) if detail else {}

    def _was_begun_by_others(self, detail: str, world: World) -> bool:
        """Whether other processes than these have begun the epoch."""
        saved, source = self._saved("" if detail.startswith(ENDED) else detail), self.source
        here = {"world_size": world.world_size, "num_workers": source.num_workers or 1, "batch_size": source.batch_size}
        differs = any(saved.get(name, each) != each for name, each in here.items())
        return differs or saved.get("resume_mode") == "elastic"

    def open(self, run: Run) -> Session:
        """Its own iterator, if it takes this process for the same rank."""
        rank = private.litdata_rank(self.source)
        if self.options.shard is None and rank != (run.world.rank, run.world.world_size):
            raise UnsupportedSourceError(
                f"LitData takes this process for rank {rank[0]} of {rank[1]}, and midepoch for rank {run.world.rank} "
                f"of {run.world.world_size}: initialize torch.distributed before the StreamingDataset is made, or pass "
                "shard=False if the ranks are meant to read the same"
            )
        if run.position and self._was_begun_by_others(run.detail, run.world):
            global_batch = self.source.batch_size * run.world.world_size
            again = self._saved(run.detail).get("sample_in_epoch", 0) % global_batch
            if again and run.world.rank == 0:
                warn(
                    f"LitData goes on at a multiple of its new global batch: the last {again} samples that were "
                    "read come again. A global batch that divides what was read repeats none",
                )
        return super().open(run)
