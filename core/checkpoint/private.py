"""Private parts of torch and Python that a snapshot uses. Those that it cannot do without are checked on import."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

__all__ = ["has_own_loading", "is_shared", "run_exit_functions", "timeout_of", "unwrapped"]

run_exit_functions = atexit._run_exitfuncs
_use_count = torch.Tensor._use_count  # type: ignore[attr-defined]  # as torch.utils.swap_tensors asks
_load_one = torch.nn.Module._load_from_state_dict


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether somebody else, such as a thread of gloo, still refers to a tensor."""
    return bool(_use_count(tensor) > 1)


def timeout_of(group: ProcessGroup | None) -> timedelta | None:
    """How long a group waits for a silent process; None if it does not say. `group`: None for that of all processes."""
    known: Any = torch.distributed.group.WORLD if group is None else group
    for device in getattr(known, "_device_types", ()):
        found = getattr(getattr(known._get_backend(device), "options", None), "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def has_own_loading(module: torch.nn.Module) -> bool:
    """Whether a module has its own code for loading, which may accept other names and shapes."""
    return any(
        each._load_state_dict_pre_hooks
        or (type(each)._load_from_state_dict is not _load_one and not type(each).__module__.startswith("torch."))
        for each in module.modules()
    )


def unwrapped(part: Any) -> Any:
    """The module inside DistributedDataParallel and torch.compile, whose wrappers change the names in its state."""
    while True:
        if isinstance(part, DistributedDataParallel):
            part = part.module
        elif isinstance(getattr(part, "_orig_mod", None), torch.nn.Module):
            part = part._orig_mod
        else:
            return part
