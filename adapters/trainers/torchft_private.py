"""The parts of torchft's Manager that midepoch uses and torchft does not promise. They are checked for each Manager."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.distributed import DistStoreError

from midepoch.errors import MidepochError
from midepoch.packages import Package

__all__ = [
    "asked_by_local", "check", "device_of", "fail_mistaken_quorums", "first_step_is_the_primarys",
    "groups_that_count", "is_fed", "quorum_of", "ranks_of", "replace", "state_on_its_way", "told_in_group",
]  # fmt: skip

_TORCHFT = Package("torchft", ("torchft", "torchft-nightly"), ("0.2", "0.2"))
_TORCHFT.part("torchft.local_sgd:LocalSGD")
_TORCHFT.part("torchft.local_sgd:DiLoCo")
_TORCHFT.part("torchft.manager:WorldSizeMode.FIXED_WITH_SPARES")


def check(manager: Any) -> None:
    """Raise UnsupportedSourceError if a Manager lacks one of the parts."""
    _TORCHFT.check(
        manager, "_client", "_commit_failures", "_group_rank", "_group_world_size", "_healing", "_init_sync",
        "_min_replica_size", "_pending_state_dict", "_pg", "_quorum_id", "_replica_world_size_mode", "_store",
        "_timeout", "_use_async_quorum", "start_quorum",
    )  # fmt: skip


def replace(manager: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a Manager call `function` in place of its method of that name, which is returned."""
    theirs: Callable[..., Any] = getattr(manager, name)
    setattr(manager, name, function)
    return theirs


class _Client:
    """In place of a Manager's client of its lighthouse. It knows the members of the Manager's process group."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._client = manager, manager._client
        self._members: list[str] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, *arguments: Any, **keywords: Any) -> Any:
        manager, quorum = self._manager, self._client._quorum(*arguments, **keywords)
        if quorum.quorum_id != manager._quorum_id:
            self._members = quorum.replica_ids  # of the process group that the Manager makes now
            return quorum
        if self._members not in (None, quorum.replica_ids):
            what = "other members than the process group of this number"
        elif manager._commit_failures:
            what = "the number of the last one, in which the vote failed"
        else:
            return quorum
        manager.report_error(
            MidepochError(
                f"quorum {quorum.quorum_id} has {what}, as happens when a lighthouse comes back: this step is given "
                "again in the next quorum"
            )
        )
        return quorum


def is_fed(manager: Any) -> bool:
    """Whether `fail_mistaken_quorums` was called for a Manager."""
    return isinstance(manager._client, _Client)


def fail_mistaken_quorums(manager: Any) -> None:
    """Let a step fail if a Manager takes its quorum for the one before, because it has the same number.

    A lighthouse that comes back counts from the beginning. If the number is the same, a Manager keeps its process
    group. The gradients of a group that has joined are then missing, and the others would vote for the step. If the
    last vote failed, the groups may have made different numbers of collective calls in it, so gradients of two steps
    would be added. After a vote that failed, the lighthouse gives another number.
    """
    manager._client = _Client(manager)


def quorum_of(manager: Any) -> int:
    """The number of the quorum that is known.

    It changes with the members, and after a vote that failed. `fail_mistaken_quorums` has the exception.
    """
    return int(manager._quorum_id)


def state_on_its_way(manager: Any, key: str) -> Any:
    """What a healthy group has sent to this one under `key`, until the Manager loads it; None if nothing was sent."""
    pending = manager._pending_state_dict if manager._healing else None
    return None if pending is None else pending["user"].get(key)


def first_step_is_the_primarys(manager: Any) -> bool:
    """Whether the gradients of all groups but one are zero in this step, because they are given that one's weights.

    It is so in the first step, with ``init_sync`` and an asynchronous quorum. The one is another for each rank of a
    group.
    """
    return bool(manager._init_sync and manager._use_async_quorum and not manager.current_step())


def groups_that_count(manager: Any) -> int | None:
    """The number of groups that take part, if the others are spares; otherwise None."""
    from torchft.manager import WorldSizeMode

    spares = manager._replica_world_size_mode == WorldSizeMode.FIXED_WITH_SPARES
    return int(manager._min_replica_size) if spares else None


def asked_by_local(frame: FrameType) -> str:
    """The class of LocalSGD's or DiLoCo's code that makes a call; empty if other code does."""
    asks = frame.f_globals.get("__name__") == "torchft.local_sgd"
    return type(frame.f_locals.get("self")).__name__ if asks else ""


def ranks_of(manager: Any) -> int:
    """The number of processes in this one's group."""
    return int(manager._group_world_size)


def told_in_group(manager: Any, about: str, before: str, text: str) -> list[str] | None:
    """What each process of this one's group says about something, in the order of their ranks.

    `before`: what was told last, which all of them know by now.

    None if one of them did not say anything within the Manager's timeout. It may be healing, which may take as long.
    """
    store, rank = manager._store, manager._group_rank
    store.set(f"{about}/{rank}", text)
    if before:
        store.delete_key(f"{before}/{rank}")
    keys = [f"{about}/{other}" for other in range(manager._group_world_size)]
    try:
        store.wait(keys, manager._timeout)
    except DistStoreError:
        return None
    return [store.get(key).decode() for key in keys]


def device_of(manager: Any) -> torch.device:
    """Where a tensor has to be for the Manager's collective calls."""
    name = manager._pg.getBackendName().lower()
    return next((torch.device(kind) for backend, kind in _DEVICES if backend in name), torch.device("cpu"))


_DEVICES = (("nccl", "cuda"), ("xccl", "xpu"))
