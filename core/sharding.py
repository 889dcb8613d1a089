"""Detects samplers that shard the data over ranks by themselves, so that midepoch must not shard their list again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from .errors import UnsupportedSourceError, warn
from .world import World

__all__ = ["ShardingSigns", "check_sharding", "length_of", "sharding_of"]

_MOST_OBJECTS = 1000  # looked at in one sampler, the nearest first
_LONGEST_CONTAINER = 256  # members; a longer one holds data
# Names of attributes, without leading underscores.
_RANKS = {
    "rank", "rank_id", "rank_index", "global_rank", "world_rank", "process_rank", "dist_rank", "ddp_rank", "dp_rank",
    "data_parallel_rank", "data_rank", "process_index", "process_id", "replica_id", "replica_rank", "shard_id",
    "shard_index", "shard_rank",
}  # fmt: skip
_WORLD_SIZES = {
    "num_replicas", "n_replicas", "world_size", "dist_world_size", "ddp_world_size", "dp_size", "dp_world_size",
    "dp_degree", "data_parallel_size", "data_parallel_world_size", "data_world_size", "num_ranks", "n_ranks",
    "num_processes", "n_processes", "process_count", "num_shards", "n_shards",
}  # fmt: skip
_DATA = (Dataset, torch.Tensor, np.ndarray, torch.nn.Module, str, bytes, int, float, type(None))


def length_of(source: Any) -> int | None:
    """`len(source)`; None if there is none, whatever is raised to say so."""
    try:
        return len(source)
    except Exception:  # noqa: BLE001  # NotImplementedError, ValueError, AttributeError: as its author liked
        return None


class ShardingSigns(NamedTuple):
    """Signs that a sampler shards by itself.

    Attributes:
        certain: True: the sampler shards for sure. False: there is only one sign.
        signs: in words, such as "_rank=1 and _world_size=2".
    """

    certain: bool
    signs: str


def check_sharding(sampler: Any, signs: ShardingSigns | None) -> None:
    """Refuse a sampler that shards its list, and warn about one that may. For users who have not passed ``shard=``.

    Raises:
        UnsupportedSourceError: the sampler shards for sure.

    Warns:
        MidepochWarning: there is only one sign.
    """
    if signs is None:
        return
    cure = (
        "build it for one process (world size 1, rank 0) and let midepoch divide its list, or leave it out if it does "
        "no more than that; or pass shard=False if it gives each rank a list of its own, shard=True if all ranks have "
        "the same list"
    )
    name = type(sampler).__name__
    if signs.certain:
        raise UnsupportedSourceError(
            f"{name} divides its list among ranks ({signs.signs}), and midepoch would divide it again: {cure}"
        )
    warn(f"{name} may divide its list among ranks ({signs.signs}), and midepoch divides it too. If it does: {cure}")


def sharding_of(
    sampler: Any, size: int | None, world_size: int = 1, gives_batches: bool = False
) -> ShardingSigns | None:
    """The signs that `sampler`, or one that it holds at any depth, shards `size` samples over several ranks.

    A DistributedSampler for several ranks is certain, and so are a `World` of several, and the attributes of a rank and
    of a number of ranks that fit. One of these alone is a sign, and so is a list as long as one rank's share. A number
    of ranks of 1 means that nothing is sharded.

    Args:
        sampler: as the user made it.
        size: samples in the dataset; None if unknown.
        world_size: ranks that share the data, as far as is known.
        gives_batches: it is a batch sampler.
    """
    rank: tuple[str, int] | None = None
    world: tuple[str, int] | None = None
    alone = False
    for path, held in _held(sampler):
        if isinstance(held, DistributedSampler | World):
            ranks = held.world_size if isinstance(held, World) else held.num_replicas
            if ranks > 1:
                what = repr(held) if isinstance(held, World) else f"a {type(held).__name__} for {ranks} ranks"
                return ShardingSigns(True, f"{path} is {what}")
            alone = True
        elif isinstance(held, Iterable):  # not a trainer, for example, which knows its rank and need not shard anything
            its_rank, its_world = _named(path, held, _RANKS), _named(path, held, _WORLD_SIZES)
            if its_world is not None and its_world[1] < 2:
                alone = True
            else:
                rank, world = rank or its_rank, world or its_world
    signs = [f"{sign[0]}={sign[1]}" for sign in (rank, world) if sign is not None]
    listed = getattr(sampler, "sampler", None) if gives_batches else sampler
    if size is not None and world_size > 1 and not alone:
        length, shares = length_of(listed), {size // world_size, -(-size // world_size)} - {0, size}
        if length in shares:
            name = f"{type(sampler).__name__}{'.sampler' * gives_batches}"
            signs.append(f"{name} has a length of {length} for {size} samples and {world_size} ranks")
    agree = rank is not None and world is not None and 0 <= rank[1] < world[1]
    return ShardingSigns(agree, " and ".join(signs)) if signs else None


def _held(sampler: Any) -> Iterator[tuple[str, Any]]:
    """The sampler and the objects that it holds, except data, each with its path."""
    queue: deque[tuple[str, Any]] = deque([(type(sampler).__name__, sampler)])
    seen: dict[int, Any] = {}
    while queue and len(seen) < _MOST_OBJECTS:
        path, value = queue.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        if isinstance(value, dict | list | tuple):
            few = value if len(value) <= _LONGEST_CONTAINER else ()
            members = [(f"[{key!r}]", each) for key, each in (few.items() if isinstance(few, dict) else enumerate(few))]
        else:
            members = [(f".{name}", each) for name, each in getattr(value, "__dict__", {}).items()]
        queue.extend((path + step, each) for step, each in members if not isinstance(each, _DATA))


def _named(path: str, held: Any, names: set[str]) -> tuple[str, int] | None:
    """The first attribute with one of these names and an integer, with its path.

    Of a product, such as `micro_batch_times_data_parallel_size`, the factor of that name.
    """
    integers = {
        name: int(value)
        for name, value in getattr(held, "__dict__", {}).items()
        if isinstance(value, int | np.integer) and not isinstance(value, bool)
    }
    for name, value in integers.items():
        other, times, factor = name.rpartition("_times_")
        # A name with two underscores has its class before them.
        if factor.rpartition("__")[2].lstrip("_") in names and not (times and integers.get(f"{other}_size", 0) < 1):
            return f"{path}.{name}", value // integers[f"{other}_size"] if times else value
    return None
