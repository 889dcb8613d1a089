"""The ranks that share the data, and each rank's share.

The batches of all ranks at one step form the **global batch**. Rank r's batch is the r-th contiguous block of it, so
the ranks' batches in rank order are the global batch, and the order of samples does not depend on the world size.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed

from .errors import MidepochError, warn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MicroShare", "Share", "Tail", "World", "check_tail", "warn_of_mesh"]

Tail = Literal["pad", "drop", "uneven"]
"""What to do with the last samples if their number is not divisible by the world size.

Repeat some, leave some out, or give ranks unequal numbers.
"""


def check_tail(tail: object) -> None:
    """Raise ValueError unless `tail` is one of the rules of `Tail`, or None."""
    if tail is not None and tail not in get_args(Tail):
        raise ValueError(f"tail must be one of {', '.join(map(repr, get_args(Tail)))} or None, got {tail!r}")


@dataclass(frozen=True)
class World:
    """One process among those that share the data.

    Args:
        rank: this process, in [0, world_size).
        world_size: the number of processes that share the data.
        local_rank: this process among those of its machine; its device follows from it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "world_size", "local_rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"World.{name} must be an int, got {value!r}")
        if self.world_size < 1:
            raise ValueError(f"World.world_size must be at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"World.rank must be in [0, {self.world_size}), got {self.rank}")
        if self.local_rank < 0:
            raise ValueError(f"World.local_rank must not be negative, got {self.local_rank}")

    @property
    def device(self) -> torch.device:
        """The GPU of the local rank, or the CPU if there is none."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    @classmethod
    def current(cls) -> World:
        """The world of torch.distributed if it is initialized, otherwise that of RANK, WORLD_SIZE and LOCAL_RANK.

        Without these, a single process.

        Raises:
            MidepochError: the environment is half set, does not parse, or contradicts torch.distributed.
        """
        environment = _from_environment(os.environ)
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            missing = {"RANK", "WORLD_SIZE"} - environment.keys()
            if len(missing) == 1 and environment.get("WORLD_SIZE") != 1:
                raise MidepochError(
                    f"the environment sets a world but not {missing.pop()} ({_shown(environment)}): set both RANK and "
                    "WORLD_SIZE (torchrun does), call torch.distributed.init_process_group before the first "
                    "batch, or pass world=midepoch.World(rank, world_size)"
                )
            environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0} | environment
            try:
                return cls(environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"])
            except ValueError as error:
                raise MidepochError(
                    f"the environment sets an invalid world ({_shown(environment)}: {error}): set RANK, WORLD_SIZE "
                    "and LOCAL_RANK as torchrun does, or pass world=midepoch.World(rank, world_size)"
                ) from None
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
            if environment.get(name, value) != value:
                raise MidepochError(
                    f"torch.distributed says {name.lower()} {value}, the environment says {name}="
                    f"{environment[name]}: pass world=midepoch.World(...) to say which ranks share the data"
                )
        return cls(rank, world_size, environment.get("LOCAL_RANK", _local_rank(rank)))

    @classmethod
    def from_group(cls, group: ProcessGroup) -> World:
        """The ranks of one process group, such as the data-parallel one under tensor or pipeline parallelism.

        Raises:
            MidepochError: this process is not in the group.
        """
        rank = torch.distributed.get_rank(group)
        if rank < 0:
            raise MidepochError("this process is not in the group given to World.from_group: pass its own data group")
        local_rank = _from_environment(os.environ).get("LOCAL_RANK", _local_rank(torch.distributed.get_rank()))
        return cls(rank, torch.distributed.get_world_size(group), local_rank)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> World:
        """The ranks of a one-dimensional device mesh: ``World.from_mesh(mesh["dp"])``.

        Raises:
            ValueError: the mesh has more than one dimension.
        """
        if mesh.ndim != 1:
            raise ValueError(f"World.from_mesh needs one dimension, got {mesh.ndim}: index the mesh, as in mesh['dp']")
        return cls.from_group(mesh.get_group())


def warn_of_mesh() -> None:
    """Warn if tensor-parallel peers would receive different batches because no world was stated."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    groups = getattr(getattr(torch.distributed.distributed_c10d, "_world", None), "pg_names", ())
    parts = (group for group in groups if 1 < group.size() < torch.distributed.get_world_size())
    names = [group.group_desc.removeprefix("mesh_") for group in parts if group.group_desc.startswith("mesh_")]
    if names:
        warn(
            f"a DeviceMesh with dimensions {', '.join(names)} is in use, and this loader gives every rank other "
            "batches. Where ranks share a batch (tensor, pipeline or context parallelism), pass "
            f"world=midepoch.World.from_mesh(mesh[{names[0]!r}]) to midepoch.wrap; where all dimensions are "
            "data-parallel, pass world=midepoch.World.current()",
        )


def _from_environment(environment: Mapping[str, str]) -> dict[str, int]:
    values = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = environment.get(name)
        if text is None:
            continue
        try:
            values[name] = int(text)
        except ValueError:
            raise MidepochError(
                f"the environment has {name}={text!r}, which is not an integer: unset it, or let torchrun set it"
            ) from None
    return values


def _local_rank(rank: int) -> int:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return rank % devices if devices else 0


def _shown(environment: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in environment.items())


@dataclass(frozen=True)
class Share:
    """The batches of one rank in the rest of one epoch, from a position on.

    Gives the same numbers of samples and the same coverage as a DistributedSampler in a DataLoader, applied to what is
    left of the epoch. `tail` corresponds to DistributedSampler's ``drop_last``, `drop_last` to DataLoader's.

    Args:
        size: units in the whole epoch.
        start: the position to continue from, in [0, size].
        batch_size: units in one rank's batch.
        world: the rank whose share it is.
        tail: what to do with the last units if their number is not divisible by the world size.
        drop_last: leave out a last batch that is not full.
        fails: an error of the source's own follows these batches, in place of the epoch's end.
    """

    size: int
    start: int
    batch_size: int
    world: World
    tail: Tail
    drop_last: bool
    fails: bool = field(default=False, kw_only=True)

    @functools.cached_property
    def global_batch(self) -> int:
        """Units that all ranks consume in one step."""
        return self.batch_size * self.world.world_size

    @functools.cached_property
    def full_steps(self) -> int:
        """Steps in which every rank's batch is full and nothing is repeated."""
        return (self.size - self.start) // self.global_batch

    def _rest(self) -> tuple[int, int]:
        """(offset, count): this rank's units in the last, incomplete step."""
        rest = (self.size - self.start) % self.global_batch
        world_size = self.world.world_size
        share = rest // world_size if self.tail == "drop" else -(-rest // world_size)
        first = self.world.rank * share
        if self.tail == "uneven":
            share = max(0, min(share, rest - first))
        return first, share

    @functools.cached_property
    def steps(self) -> int:
        """This rank's batches."""
        last = self._rest()[1]
        return self.full_steps + (last == self.batch_size or (last > 0 and not self.drop_last))

    @functools.cached_property
    def global_steps(self) -> int:
        """The most batches that any rank has, and one step more where an error follows.

        Otherwise it differs from `steps` only if shares are uneven.
        """
        if self.tail != "uneven":
            return self.steps + self.fails
        return replace(self, world=World(0, self.world.world_size)).steps + self.fails

    def span(self, step: int) -> tuple[int, int]:
        """Positions [start, stop) of this rank's batch at `step`, counted from 0.

        Positions from `size` on are repeats: position ``size + i`` stands for ``i % size``.
        """
        base = self.start + step * self.global_batch
        if step < self.full_steps:
            start = base + self.world.rank * self.batch_size
            return start, start + self.batch_size
        first, share = self._rest()
        return base + first, base + first + share

    def weight(self, step: int) -> float:
        """What makes a mean over ranks, each of which has the mean of its own batch, the mean over all samples.

        With n samples on this rank, N on all ranks together and W ranks it is n * W / N: 1.0 if all have as many.
        """
        if step < self.full_steps or self.tail != "uneven":
            return 1.0
        start, stop = self.span(step)
        rest = (self.size - self.start) % self.global_batch
        delivered = rest // self.batch_size * self.batch_size if self.drop_last else rest
        return (stop - start) * self.world.world_size / delivered


@dataclass(frozen=True)
class MicroShare(Share):
    """The same, where several steps make one global batch. Every rank has equally many; some have no samples.

    Each global batch is shared as an epoch of its own is, with the tail "uneven": rank r's part of a step is the r-th
    block of it. A step in which a rank has no samples repeats the first ones of the epoch there, with weight 0.
    `batch_size` is that of a step, and `drop_last` leaves out a last global batch that is not full.

    Args:
        together: units in one global batch, of all ranks in all its steps.
    """

    together: int

    def one(self, number: int) -> Share:
        """This rank's part of the global batch of that number, counted from the start."""
        start = self.start + number * self.together
        return Share(min(self.size, start + self.together), start, self.batch_size, self.world, "uneven", False)

    @functools.cached_property
    def micro_steps(self) -> int:
        """Steps in which a global batch is read that is full."""
        return -(-self.together // self.global_batch)

    @functools.cached_property
    def full_steps(self) -> int:
        """Steps of the global batches that are full, in some of which a rank may have fewer samples than in others."""
        return (self.size - self.start) // self.together * self.micro_steps

    @functools.cached_property
    def steps(self) -> int:
        """Steps of every rank."""
        rest = 0 if self.drop_last else (self.size - self.start) % self.together
        return self.full_steps + -(-rest // self.global_batch)

    def is_whole(self, steps: int) -> bool:
        """Whether so many steps from the start on make whole global batches."""
        return steps % self.micro_steps == 0 or steps == self.steps

    def moved(self, steps: int) -> int:
        """Units in the global batches that so many steps have completed. The epoch's last counts as a full one."""
        return steps // self.micro_steps * self.together

    def span(self, step: int) -> tuple[int, int]:
        """As for `Share`. Without samples, a span beyond the epoch's end."""
        number, inner = divmod(step, self.micro_steps)
        one = self.one(number)
        return one.span(inner) if inner < one.steps else (self.size, self.size + self.batch_size)

    def weight(self, step: int) -> float:
        """The same, for the sum over the steps of a global batch. N are the samples of that whole one."""
        number, inner = divmod(step, self.micro_steps)
        one = self.one(number)
        if inner >= one.steps:
            return 0.0
        start, stop = one.span(inner)
        return (stop - start) * self.world.world_size / (one.size - one.start)
