"""Sources of other packages that keep their own state: Hugging Face's IterableDataset, Grain."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any, ClassVar, cast

from midepoch.adapters.stateful import private
from midepoch.adapters.stateful.adapter import NOT_RESTORED, StatefulAdapter, is_of
from midepoch.errors import UnsupportedSourceError
from midepoch.loader.adapter import Options, Reach, Run
from midepoch.loader.capabilities import Capabilities, Capability

__all__ = ["RESTORED_BY_GRAIN", "DatasetsAdapter", "GrainAdapter"]

RESTORED_BY_GRAIN = Capability(
    False,
    "Grain's state does not restore the global generators: draw from the generator that Grain hands to random_map and "
    "RandomMap, or in then=, whose numbers are restored",
)


class DatasetsAdapter(StatefulAdapter):
    """Hugging Face's IterableDataset.

    Once it has loaded a state, every later pass also starts there. The content of a shuffle buffer is not in its state,
    so a dataset with one is replayed instead.
    """

    name: ClassVar[str] = "datasets"
    reach = Reach.EPOCHS
    how_to_divide = "Divide it by datasets.distributed.split_dataset_by_node"

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A dataset without a shuffle buffer, as far as can be determined."""
        if not is_of("datasets", source) or not hasattr(source, "load_state_dict"):
            return False
        return private.has_shuffle_buffer(source) is False  # a replay is exact

    def describe(self) -> dict[str, str]:
        """The processing steps and the amount of data, as far as they can be determined."""
        described = f"{self.source.column_names} of {self.source.num_shards} shards "
        described += private.hugging_face_steps(self.source)
        return {**super().describe(), "data": f"{zlib.crc32(described.encode()):08x}"}

    def capabilities(self) -> Capabilities:
        """What its own state can restore. It does not cover what mapped functions draw."""
        return dataclasses.replace(super().capabilities(), exact_augmentations=NOT_RESTORED)

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self._first = source.state_dict()  # a copy of what it was made with: nothing is read

    @property
    def divides(self) -> bool:
        """Whether it came from `split_dataset_by_node`."""
        return private.hugging_face_divides(self.source)

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Start in the epoch's own shuffle of the shards. Without a state, it would start where it last did."""
        self.source.load_state_dict(self._first if state is None else state)
        return iter(self.source)

    def told_epochs(self) -> list[Any]:
        """The dataset."""
        return [self.source]


class GrainAdapter(StatefulAdapter):
    """Grain's DataLoader and IterDataset, whose iterators keep the state."""

    name: ClassVar[str] = "grain"
    reach = Reach.EPOCHS
    how_to_divide = "Pass ShardOptions to a sampler, or slice a MapDataset, as in dataset[rank::world_size]"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        if hasattr(source, "__next__"):
            raise UnsupportedSourceError(
                f"a {type(source).__name__} is an iterator of Grain's, which goes through its data once: wrap the "
                "dataset or the DataLoader that it was made from, whose iterators keep the same state"
            )
        if name := private.grain_names_an_address(source):
            raise UnsupportedSourceError(
                f"Grain's state names the {name} by its repr(), which has an address in it, so no other process could "
                f"load the state: give the {name} a __repr__ that says what it reads"
            )

    @classmethod
    def recognises(cls, source: object) -> bool:
        """An object whose iterators have ``get_state`` and ``set_state``."""
        return is_of("grain", source) and hasattr(source, "__iter__") and not hasattr(source, "__getitem__")

    def describe(self) -> dict[str, str]:
        """The transformations and the amount of data, as far as they can be determined."""
        described = private.grain_steps(self.source)
        return {**super().describe(), "data": f"{zlib.crc32(described.encode()):08x}"}

    def capabilities(self) -> Capabilities:
        """What Grain's state can restore: the generators given to its random transformations, and no others."""
        return dataclasses.replace(super().capabilities(), exact_augmentations=RESTORED_BY_GRAIN)

    @property
    def divides(self) -> bool:
        """Whether it has options for several shards, or a slice with a step."""
        return private.grain_divides(self.source)

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Grain's iterator, after its state is loaded."""
        iterator: Any = iter(self.source)
        if state is not None:
            iterator.set_state(state)
        return cast(Iterator[Any], iterator)

    def current(self, iterator: Any) -> Any:
        """The iterator's state."""
        return iterator.get_state()
