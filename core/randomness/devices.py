"""The global random generators of CUDA devices, besides those of python, numpy and torch.

Each is a counter (Philox): its seed and its offset are all of its state, and reading them waits for no device. Before
CUDA is first used in a process there are none, and midepoch does not start it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["DeviceGenerators"]


# Without a frame of python's, because it is called several times a batch.
_generators_of_cuda: Callable[[], Sequence[Any]] = functools.partial(getattr, torch.cuda, "default_generators")


class DeviceGenerators:
    """`take_over` the generators of all devices, seed them as often as needed, then `restore` them.

    Args:
        find: returns the devices' generators that exist now. None that it has returned may be missing later.

    Attributes:
        held: those that were taken over.
        late: when they were last restored, one had been used that did not exist when they were taken over.
    """

    def __init__(self, find: Callable[[], Sequence[Any]] = _generators_of_cuda) -> None:
        self.find = find
        self.held: Sequence[Any] = ()
        self._saved: list[tuple[int, int]] = []
        self.late = False

    def take_over(self) -> None:
        """Save the states of those that exist."""
        self.held = self.find()
        self._saved = [(each.initial_seed(), each.get_offset()) for each in self.held]

    def seed(self, key: int) -> None:
        """Seed those that were taken over. All have the same stream, so a rank may continue on another device."""
        for each in self.held:
            each.manual_seed(key)

    def restore(self) -> None:
        """Restore the states. Generators that did not exist before are left as they were made."""
        for each, (seed, offset) in zip(self.held, self._saved, strict=False):
            each.manual_seed(seed)
            each.set_offset(offset)
        new = self.find()[len(self.held) :]
        self.late = any(each.get_offset() for each in new)
        for each in new:
            each.set_offset(0)
