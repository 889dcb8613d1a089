"""DALI's dynamic mode (nvidia.dali.experimental.dynamic): a reader's epochs, resumed by DALI's own `Checkpoint`.

loader = midepoch.wrap(functools.partial(reader.next_epoch, batch_size=32), then=decode_and_augment)
"""

from __future__ import annotations

import functools
import sys
import types
from dataclasses import replace
from typing import Any, ClassVar

from midepoch.adapters.dali import private
from midepoch.adapters.dali.checkpointed import Checkpoint, CheckpointedAdapter, CheckpointedSession
from midepoch.adapters.dali.graph import crc_of_data, material, short
from midepoch.errors import UnsupportedSourceError
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.order.keys import derive_key
from midepoch.randomness.streams import Purpose
from midepoch.state.format import PIECES
from midepoch.world import World

__all__ = ["DynamicAdapter"]

_DYNAMIC = "nvidia.dali.experimental.dynamic"


def _cure(reader: str) -> str:
    return (
        f"wrap its epochs, midepoch.wrap(functools.partial({reader}.next_epoch, batch_size=...)), and pass what is "
        "done with its batches as then="
    )


def _is_reader(value: object) -> bool:
    return _DYNAMIC in sys.modules and isinstance(value, private.dynamic_reader())


def _reader_of(source: Any) -> Any:
    """The reader whose epochs a function returns; None if it is another function."""
    method = source.func if isinstance(source, functools.partial) else source
    if not isinstance(method, types.MethodType) or not _is_reader(method.__self__):
        return None
    return method.__self__ if method.__name__ == "next_epoch" else None


class DynamicAdapter(CheckpointedAdapter):
    """A partial of a dynamic reader's `next_epoch`."""

    name: ClassVar[str] = "dali-dynamic"
    facts = replace(CheckpointedAdapter.facts, remembers=False)

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        keywords = source.keywords if isinstance(source, functools.partial) else {}
        batch_size = keywords.get("batch_size")
        if type(batch_size) is not int or keywords.get("capture"):
            why = "capture=True, of which DALI keeps no checkpoints" if keywords.get("capture") else "no batch_size"
            raise UnsupportedSourceError(f"{why}: {_cure('reader')}")
        self._epochs = private.DynamicEpochs(_reader_of(source), keywords)  # refuses a reader that was read

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A dynamic reader, or whatever reads one."""
        held = private.named_in(source).values() if _DYNAMIC in sys.modules else ()
        return _is_reader(source) or _reader_of(source) is not None or any(map(_is_reader, held))

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter | None:
        """Refused unless midepoch sees where the reader's epochs begin and end."""
        if _reader_of(source) is None:
            name = getattr(source, "__name__", type(source).__name__)
            held = {"reader": source} if _is_reader(source) else private.named_in(source)
            variable, reader = next((each, value) for each, value in held.items() if _is_reader(value))
            raise UnsupportedSourceError(
                f"{name} reads {type(reader).__name__}, a reader of DALI's dynamic mode, and each pass goes on where "
                f"the reader stands: {_cure(variable)}"
            )
        return cls(source, options)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Batches of all ranks."""
        return self._epochs.batches(epoch) * world.world_size

    def describe(self) -> dict[str, str]:
        """The reader, how it is set up, what it reads, and the batch size."""
        arguments, texts = self._epochs.arguments, self._epochs.texts
        settings = [(name, repr(value)) for name, value in material(arguments, is_reader=True)]
        return {
            **super().describe(),
            "reader": type(_reader_of(self.source)).__name__,
            "settings": short(repr(settings)),
            f"settings{PIECES}": " ".join(f"{name}={short(value)}" for name, value in settings),
            "data": f"{crc_of_data(arguments, texts):08x}",
            "batch_size": str(self._epochs.batch_size),
        }

    def capabilities(self) -> Capabilities:
        """What DALI's Checkpoint restores, and what is drawn from DALI's default generator."""
        drawn = Capability(
            True,
            "DALI's default generator is seeded for each batch; make a generator of your own in then=, for each batch: "
            "ndd.random.RNG(random.getrandbits(64))",
            believed=True,
        )
        if not self.options.streams:
            drawn = Capability(False, "randomness='none': nothing restores DALI's generators")
        return self.promised(drawn)

    def stated_shards(self, world: World) -> tuple[int, ...]:
        """The number of shards, and the reader's."""
        shard, shards = self._epochs.shard
        return (shards,) if shards == 1 else (shards, shard)

    def open(self, run: Run) -> Session:
        """The reader's batches from the position on."""
        (shard, shards), world = self._epochs.shard, run.world
        if self.options.shard is not False and (shard, shards) != (world.rank, world.world_size):
            raise UnsupportedSourceError(
                f"the reader has num_shards={shards}, shard_id={shard}, but this is rank {world.rank} of "
                f"{world.world_size}: write num_shards={world.world_size}, shard_id={world.rank}, or pass shard=False "
                "if the ranks are meant to read these shards"
            )
        return _DynamicSession(self, run)

    def make(self, checkpoint: Checkpoint, run: Run) -> Any:
        """The reader's epochs from the checkpoint on."""
        (epoch, position), saved = checkpoint.at, next(iter(checkpoint.saved), None)
        return private.DynamicIterator(self._epochs, epoch, position // run.world.world_size, saved)

    def end(self, iterator: Any) -> None:
        """A reader ends when nobody holds it."""
        iterator.close()


class _DynamicSession(CheckpointedSession):
    """DALI waits for the reader to say where it is, so that it is asked only when somebody asks for a state."""

    def take(self) -> Any:
        """The next batch, with DALI's default generator under its stream."""
        batch, live = super().take(), self._live
        if live is not None and self._adapter.options.streams:
            private.seed_dynamic(derive_key(Purpose.BATCH, self._run.seed, self._run.world.rank, *live.place))
        return batch
