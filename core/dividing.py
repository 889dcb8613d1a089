"""Detects samplers that shard the data over ranks by themselves, so that midepoch must not shard their list again."""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from .errors import UnsupportedSourceError, warn
from .world import World

__all__ = ["Division", "attributes_of", "check_division", "division_of", "is_rank", "is_world_size", "length_of"]

_MOST_OBJECTS = 1000  # looked at in one sampler, the nearest first
_LONGEST_CONTAINER = 256  # members; a longer one holds data
# Names of attributes, without leading underscores.
_RANKS = {
    "rank", "rank_id", "rank_index", "global_rank", "world_rank", "process_rank", "dist_rank", "ddp_rank", "dp_rank",
    "data_parallel_rank", "data_rank", "process_index", "process_id", "replica_id", "replica_rank", "shard_id",
    "shard_index", "shard_rank",
}  # fmt: skip
_WORLDS = {
    "num_replicas", "n_replicas", "world_size", "dist_world_size", "ddp_world_size", "dp_size", "dp_world_size",
    "dp_degree", "data_parallel_size", "data_parallel_world_size", "data_world_size", "num_ranks", "n_ranks",
    "num_processes", "n_processes", "process_count", "num_shards", "n_shards",
}  # fmt: skip
_STATED = (property, cached_property, MemberDescriptorType, int, np.integer)  # by a class, of its objects
_DATA = (Dataset, torch.Tensor, np.ndarray, torch.nn.Module, str, bytes, int, float, type(None))


def length_of(source: Any) -> int | None:
    """`len(source)`; None if there is none, whatever is raised to say so."""
    try:
        return len(source)
    except Exception:  # noqa: BLE001  # NotImplementedError, ValueError, AttributeError: as its author liked
        return None


def is_rank(name: str) -> bool:
    """Whether an attribute of this name may be a rank."""
    return name.rpartition("__")[2].lstrip("_") in _RANKS  # a name with two underscores has its class before them


def is_world_size(name: str) -> bool:
    """Whether an attribute of this name may be a number of ranks."""
    return name.rpartition("__")[2].lstrip("_") in _WORLDS


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
        f"{_for_one_process(sampler)} and let midepoch divide its list, or pass shard=False if it gives each rank a "
        "list of its own, or shard=True if all ranks have the same list"
    )
    name = type(sampler).__name__
    if division.certain:
        raise UnsupportedSourceError(
            f"{name} divides its list among ranks ({division.signs}), and midepoch would divide it again: {cure}"
        )
    warn(
        f"{name} may divide its list among ranks ({division.signs}), and midepoch divides it too. If it does: {cure}",
    )


def _for_one_process(sampler: Any) -> str:
    """How to have a sampler's list not divided, in words."""
    for path, held in _held(sampler):
        names = _parameters(type(held)) if isinstance(held, Iterable) else []
        rank, world_size = (next(filter(means, names), "") for means in (is_rank, is_world_size))
        if rank and world_size:
            which = "it" if held is sampler else path
            return f"build {which} for one process ({world_size}=1, {rank}=0)"
    return "leave it out if it does no more than that (the DataLoader itself can shuffle), or build it for one process,"


def _parameters(kind: type) -> list[str]:
    """The names of a class's arguments."""
    try:
        return list(inspect.signature(kind).parameters)
    except (TypeError, ValueError):  # of a class that is not python's
        return []


def division_of(sampler: Any, size: int | None, world_size: int = 1, gives_batches: bool = False) -> Division | None:
    """The signs that `sampler`, or one that it holds at any depth, shards `size` samples over several ranks.

    A DistributedSampler for several ranks is certain, and so is a `World` of several. So are two consistent signs: the
    name of a rank, the name of a number of ranks, a list as long as one rank's share. A number of ranks of 1 means that
    nothing is sharded.

    Args:
        sampler: as the user made it.
        size: samples in the dataset; None if unknown.
        world_size: ranks that share the data, as far as is known.
        gives_batches: it is a batch sampler.
    """
    rank: tuple[str, int] | None = None
    world: tuple[str, int] | None = None
    share = ""
    stated_alone = False
    for path, held in _held(sampler):
        if isinstance(held, DistributedSampler):
            if held.num_replicas > 1:
                return Division(True, f"{path} is a {type(held).__name__} for {held.num_replicas} ranks")
            stated_alone = True
            continue
        if isinstance(held, World):
            if held.world_size > 1:
                return Division(True, f"{path} is {held!r}")
            stated_alone = True
            continue
        if not isinstance(held, Iterable):
            continue  # a trainer, for example, which knows its rank and need not shard anything
        its_rank, its_world = _named(path, held, is_rank), _named(path, held, is_world_size)
        if its_world is not None and its_world[1] < 2:
            stated_alone = True
            continue
        rank, world = rank or its_rank, world or its_world
        if its_world is not None and size is not None and length_of(held) in _shares(size, its_world[1]):
            share = f"{path} has a length of {length_of(held)} for {size} samples"
    if not share and not stated_alone and size is not None and world_size > 1:
        share = _share_in(sampler, size, world_size, gives_batches)
    agree = rank is not None and world is not None and 0 <= rank[1] < world[1]
    signs = [f"{sign[0]}={sign[1]}" for sign in (rank, world) if sign is not None] + [share] * bool(share)
    return Division(agree or bool(share and (rank or world)), " and ".join(signs)) if signs else None


def _share_in(sampler: Any, size: int, world_size: int, gives_batches: bool) -> str:
    """In words, that a sampler, or the one in a batch sampler, is as long as one rank's share; empty if none is."""
    shares = _shares(size, world_size) - {0, size}
    name, inner = type(sampler).__name__, getattr(sampler, "sampler", None)
    if not gives_batches and length_of(sampler) in shares:
        return f"{name} has a length of {length_of(sampler)} for {size} samples and {world_size} ranks"
    if inner is not None and length_of(inner) in shares:
        return f"{name}.sampler has a length of {length_of(inner)} for {size} samples and {world_size} ranks"
    in_batch = _integer(getattr(sampler, "batch_size", None))
    if gives_batches and in_batch is not None and in_batch > 0:
        batches = {count for share in shares for count in _shares(share, in_batch)} - _shares(size, in_batch) - {0}
        if length_of(sampler) in batches:
            return f"{name} has a length of {length_of(sampler)} batches of {in_batch} for {size} samples"
    return ""


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
            members = [(f".{name}", each) for name, each in attributes_of(value)]
        queue.extend((path + step, each) for step, each in members if not isinstance(each, _DATA))


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes in an object's dict and in its slots."""
    yield from list(getattr(value, "__dict__", {}).items())
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, MemberDescriptorType) and hasattr(value, name):
                yield name, getattr(value, name)


def _named(path: str, held: Any, means: Callable[[str], bool]) -> tuple[str, int] | None:
    """The first attribute with one of these names and an integer, with its path: of the object, or of its class."""
    own = list(getattr(held, "__dict__", {}))
    stated = [name for base in type(held).__mro__ for name, each in vars(base).items() if isinstance(each, _STATED)]
    for name in (*own, *stated):
        if not means(name):
            continue
        with contextlib.suppress(Exception):  # a property may refer to what is made later
            if (value := _integer(getattr(held, name))) is not None:
                return f"{path}.{name}", value
    return None


def _integer(value: object) -> int | None:
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None


def _shares(size: int, world_size: int) -> set[int]:
    return {size // world_size, -(-size // world_size)}
