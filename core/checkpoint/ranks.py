"""The processes that train together: how they exchange values, and how they agree on a signal."""

from __future__ import annotations

import time
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from ..errors import MidepochError
from ..world import World
from .private import is_shared, timeout_of

__all__ = ["NEVER", "Agreement", "Ranks"]

NEVER = 1 << 62  # a step that no run reaches
_SECONDS_BETWEEN = 0.5
_MOST_STEPS_BETWEEN = 128
_PAUSE, _MOST_PAUSES = 50e-6, 10_000  # about a second in all, in case somebody else holds the tensor


class Ranks(NamedTuple):
    """This process among those that train together."""

    rank: int  # of this process in `group`
    size: int  # number of processes
    group: ProcessGroup | None  # can send what lies on the CPU; None: all processes, or this one alone

    def share(self, mine: Any) -> list[Any]:
        """Every rank's `mine`, in rank order, on every rank."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, mine, group=self.group)
        return found


class Agreement:
    """How the ranks of a group learn that one of them has received a signal: all ask twice a second, at one step."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group  # None: all processes
        self._sending: ProcessGroup | None = None  # made here if `group` cannot send CPU tensors
        self._last = (0, 0.0)  # step and time of the last question
        self.next_step = NEVER  # at which they ask again
        # Kept as long as this object, because gloo's threads may hold the last reference to a tensor of one call.
        self._numbers = torch.zeros(4, dtype=torch.float64)

    def ranks(self) -> Ranks:
        """The processes as they are now: torch.distributed may be initialised after this object is made.

        Raises:
            MidepochError: there are several processes, and no process group.
        """
        world = World.current()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            if world.world_size > 1:
                raise MidepochError(
                    f"this is one of {world.world_size} processes, and all of them would write the same snapshot: call "
                    "torch.distributed.init_process_group before load(), step() and save()"
                )
            return Ranks(0, 1, None)
        group = self._group
        size = torch.distributed.get_world_size(group)
        # The devices for which a group has a backend, such as ``cpu:gloo,cuda:nccl``.
        if size > 1 and "cpu" not in str(torch.distributed.get_backend_config(group)):
            if self._sending is None:
                # It does not inherit the timeout, and would wait half an hour for a machine that is given up.
                members = None if group is None else torch.distributed.get_process_group_ranks(group)
                self._sending = torch.distributed.new_group(
                    members, timeout=timeout_of(group), backend="gloo", use_local_synchronization=group is not None
                )
            group = self._sending
        return Ranks(torch.distributed.get_rank(group), size, group)

    def should_stop(self, ranks: Ranks, step: int, signalled: bool, where: str) -> bool:
        """Whether the ranks agree, after this step, that some rank was `signalled`. False between questions.

        `where`: this rank is, in the training loop. Raises MidepochError if the ranks are not at the same place.
        """
        if ranks.size == 1:
            return signalled  # and `next_step` stays as it is: nobody has to be asked again
        if self.next_step != NEVER and step < self.next_step:
            return False
        last, before = self._last
        seconds = (time.monotonic() - before) / (step - last) if before and step > last else 0.0  # per step
        some, seconds = self.meet(ranks, where, float(signalled), seconds)
        self._last = step, time.monotonic()
        # All ranks have the same numbers, so all choose the same step.
        apart = int(_SECONDS_BETWEEN / seconds) if seconds > 0 else 1
        self.next_step = step + min(max(apart, 1), _MOST_STEPS_BETWEEN)
        return bool(some)

    def meet(self, ranks: Ranks, where: str, first: float = 0.0, second: float = 0.0) -> tuple[float, float]:
        """The maximum over all ranks of each of two numbers. Every rank must call it, at the same place.

        Raises:
            MidepochError: some rank called it elsewhere. Raised on all of them.
        """
        if ranks.size == 1:
            return first, second
        numbers, place = self._numbers, float(zlib.crc32(where.encode()))
        numbers[0], numbers[1], numbers[2], numbers[3] = first, second, place, -place
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, ranks.group)
        _wait_until_released(numbers)
        if numbers[2] != -numbers[3]:
            places = ranks.share(where)
            other = next(rank for rank, each in enumerate(places) if each != places[0])
            raise MidepochError(
                f"the ranks are not at the same place of the training loop: rank 0 {places[0]}, rank {other} "
                f"{places[other]}. Let every rank make the same passes and the same calls of the snapshot in an epoch"
            )
        return float(numbers[0]), float(numbers[1])


def _wait_until_released(tensor: torch.Tensor) -> None:
    """Wait until gloo's thread has released a tensor, which is shortly after the call returns.

    The thread needs the interpreter's lock for that. A program that ends now frees its process group, which holds the
    lock and waits for the thread: neither would ever go on. At exit, the process would be aborted.
    """
    for _ in range(_MOST_PAUSES):
        if not is_shared(tensor):
            return
        time.sleep(_PAUSE)  # without the lock
