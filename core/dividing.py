"""Detects samplers that shard the data over ranks by themselves, so that midepoch must not shard their list again."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from .errors import MidepochWarning, UnsupportedSourceError

__all__ = ["Division", "check_division", "division_of"]

_MOST_OBJECTS = 1000  # looked at in one sampler, the nearest first
_LONGEST_CONTAINER = 256  # members; a longer one holds data
# Names of attributes, without leading underscores.
_RANKS = {"rank", "rank_id", "global_rank", "dp_rank", "process_index", "replica_id", "shard_id", "shard_index"}
_WORLDS = {"num_replicas", "n_replicas", "world_size", "dp_size", "num_ranks", "num_processes", "num_shards"}
_DATA = (Dataset, torch.Tensor, np.ndarray, torch.nn.Module, str, bytes, int, float, type(None))


class Division(NamedTuple):
    """Signs that a sampler shards by itself.

    Attributes:
        certain: True: the sampler shards for sure. False: there is only one sign.
        signs: in words, such as "_rank=1 and _world_size=2".
    """

    certain: bool
    signs: str


def check_division(sampler: Any, division: Division | None) -> None:
    """Refuse a sampler that shards its list, and warn about one that may. For users who have not passed ``shard=``.

    Raises:
        UnsupportedSourceError: the sampler shards for sure.

    Warns:
        MidepochWarning: there is only one sign.
    """
    if division is None:
        return
    cure = (
        "build it for one process (num_replicas=1, rank=0) and let midepoch divide its list, or pass shard=False if it "
        "gives each rank a list of its own, or shard=True if all ranks have the same list"
    )
    name = type(sampler).__name__
    if division.certain:
        raise UnsupportedSourceError(
            f"{name} divides its list among ranks ({division.signs}), and midepoch would divide it again: {cure}"
        )
    warnings.warn(
        f"{name} may divide its list among ranks ({division.signs}), and midepoch divides it too. If it does: {cure}",
        MidepochWarning,
        stacklevel=6,
    )


def division_of(sampler: Any, size: int | None) -> Division | None:
    """The signs that `sampler`, or one that it holds at any depth, shards `size` samples over several ranks.

    A DistributedSampler for several ranks is certain. So are two consistent signs: the name of a rank, the name of a
    number of ranks, a list as long as one rank's share. A number of ranks of 1 means that nothing is sharded.
    """
    rank: tuple[str, int] | None = None
    world: tuple[str, int] | None = None
    share = ""
    for path, held in _held(sampler):
        if isinstance(held, DistributedSampler):
            if held.num_replicas > 1:
                return Division(True, f"{path} is a {type(held).__name__} for {held.num_replicas} ranks")
            continue
        if not isinstance(held, Iterable):
            continue  # a trainer, for example, which knows its rank and need not shard anything
        its_rank, its_world = _named(path, held, _RANKS), _named(path, held, _WORLDS)
        if its_world is not None and its_world[1] < 2:
            continue
        rank, world = rank or its_rank, world or its_world
        if its_world is not None and size is not None and _length(held) in _shares(size, its_world[1]):
            share = f"{path} has a length of {_length(held)} for {size} samples"
    agree = rank is not None and world is not None and 0 <= rank[1] < world[1]
    signs = [f"{sign[0]}={sign[1]}" for sign in (rank, world) if sign is not None] + [share] * bool(share)
    return Division(agree or bool(share), " and ".join(signs)) if signs else None


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
        members: Iterable[tuple[str, Any]]
        if isinstance(value, dict):
            members = [(f"[{key!r}]", each) for key, each in value.items()] if len(value) <= _LONGEST_CONTAINER else ()
        elif isinstance(value, list | tuple):
            members = [(f"[{at}]", each) for at, each in enumerate(value)] if len(value) <= _LONGEST_CONTAINER else ()
        else:
            members = [(f".{name}", each) for name, each in getattr(value, "__dict__", {}).items()]
        queue.extend((path + step, each) for step, each in members if not isinstance(each, _DATA))


def _named(path: str, held: Any, names: set[str]) -> tuple[str, int] | None:
    """The first attribute with one of these names and an integer, with its path."""
    for name, value in getattr(held, "__dict__", {}).items():
        if name.lstrip("_") in names and type(value) is int:
            return f"{path}.{name}", value
    return None


def _length(held: Any) -> int | None:
    try:
        return len(held)
    except (TypeError, NotImplementedError, ValueError):
        return None


def _shares(size: int, world_size: int) -> set[int]:
    return {size // world_size, -(-size // world_size)}
