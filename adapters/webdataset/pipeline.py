"""What a webdataset pipeline means: its shards, their order, and what is done to each sample and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import DataLoader
from webdataset import tariterators

from midepoch.adapters.webdataset import private
from midepoch.adapters.webdataset.drawn_shards import ShardDraws
from midepoch.errors import SourceError, UnsupportedSourceError
from midepoch.loader.capabilities import Capability
from midepoch.world import World

__all__ = ["Batched", "Each", "Limit", "Pipeline", "grouped", "run_stages"]

Stage = Callable[[Iterable[Any]], Iterable[Any]]


class Limit(NamedTuple):
    """The length of an epoch, if the user sets it.

    Attributes:
        units: number of samples of one rank; None for whole passes.
        passes: number of passes over the data; None for any number.
        of_worker: whether each worker process counts for itself.
    """

    units: int | None
    passes: int | None
    of_worker: bool


@dataclass
class Pipeline:
    """A pipeline, split into its parts.

    Attributes:
        urls: of the shards, in the user's order.
        splits: whether the pipeline shards over nodes, or refuses several nodes.
        shuffles: whether shards or samples are shuffled. `buffer` is the largest number of samples buffered for that,
            0 for none.
        draws: how shards are drawn with replacement; None if each of them comes once in a pass.
        declared: names of the user's own stages that are replaced by what they say of themselves.
        opener: a stage from ``{"url": ...}`` to ``{"url": ..., "stream": ...}``.
        reading, grouping: the keywords of webdataset's tar_file_expander and group_by_keys.
        must_have_samples: whether a pass without samples is an error.
        sample_stages, batch_stages: stages for one sample, and for the list of a batch's samples, in the reading
            process.
        late_sample_stages, late_batch_stages: the same for the main process: what the user put after a DataLoader.
        batch_size: number of samples in a batch; None if samples are handed out one by one.
        drop_last: whether a last batch that is not full is left out.
        limit: the length of an epoch, or None for one pass.
        seed: of a shuffle stage, or None.
        loader: the DataLoader whose workers read, or None.
        dataset: the value for `get_worker_info().dataset`.
    """

    dataset: Any
    loader: DataLoader[Any] | None = None
    urls: list[str] = field(default_factory=list)
    splits: bool = False
    shuffles: bool = False
    buffer: int = 0
    draws: ShardDraws | None = None
    declared: list[str] = field(default_factory=list)
    opener: Stage | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    grouping: dict[str, Any] = field(default_factory=dict)
    must_have_samples: bool = False
    sample_stages: list[Stage] = field(default_factory=list)
    batch_stages: list[Stage] = field(default_factory=list)
    late_sample_stages: list[Stage] = field(default_factory=list)
    late_batch_stages: list[Stage] = field(default_factory=list)
    batch_size: int | None = None
    drop_last: bool = False
    limit: Limit | None = None
    seed: int | None = None

    @property
    def exact_order(self) -> Capability:
        """What is promised of the order."""
        replaced = " and ".join(f"{name}, by its `draws`" for name in self.declared)
        in_place = f", in place of {replaced}" if replaced else ""
        return Capability(True, f"the order is a function of seed and epoch{in_place}")

    def check_shared(self, world: World, shard: bool | None) -> None:
        """Raise UnsupportedSourceError if each of several ranks may already have its own urls."""
        if world.world_size > 1 and not self.splits and shard is None:
            raise UnsupportedSourceError(
                "the pipeline has no nodesplitter, so each rank may already have its own urls: pass shard=True to "
                "wrap() if every rank has the same urls (midepoch shards them), or world=midepoch.World() and a state "
                "for each rank if they differ"
            )

    @property
    def stages(self) -> list[Stage]:
        """All that run code on samples, wherever they run."""
        return [*self.sample_stages, *self.batch_stages, *self.late_sample_stages, *self.late_batch_stages]


def run_stages(stages: Iterable[Stage], values: Iterable[Any]) -> list[Any]:
    """Pass values through the stages, one after another."""
    stream: Iterable[Any] = iter(values)
    for stage in stages:
        stream = stage(stream)
    return list(stream)


class Batched:
    """A stage that collects samples into a batch, as webdataset or a DataLoader does."""

    def __init__(self, size: int, collate: Callable[[Any], Any] | None, drop_last: bool) -> None:
        self.size, self.collate, self.drop_last = size, collate, drop_last

    def __call__(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Batches of these samples."""
        # Dropped samples make a batch short, but the others in it are kept. A last batch is left out by its position.
        return private.BATCHED(samples, self.size, self.collate, True)  # type: ignore[no-any-return]


class Each:
    """Applies a DataLoader's collate function to each item, as a DataLoader without batches does."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        """What the function makes of each."""
        return map(self.function, items)


def grouped(files: Iterable[dict[str, Any]], url: str, grouping: dict[str, Any]) -> list[dict[str, Any]]:
    """Group the files of one shard into webdataset's samples.

    Raises:
        SourceError: a sample has two files of one name, and the handler does not continue.
    """
    try:
        return list(tariterators.group_by_keys(iter(files), **grouping))
    except ValueError as error:
        if "duplicate file name" not in str(error):
            raise
        raise SourceError(
            f"{url}: a sample has two files of one name ({error.args[0]}); rename one of them, or pass a handler that "
            "continues"
        ) from error
