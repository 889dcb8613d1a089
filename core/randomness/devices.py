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
        late: one had been used, at the last look, that did not exist when they were taken over.
    """

    def __init__(self, find: Callable[[], Sequence[Any]] = _generators_of_cuda) -> None:
        self.find = find
        self.held: Sequence[Any] = ()
        self._saved: list[tuple[int, int]] = []
        self._at: list[tuple[int, int]] = []
        self.late = False

    def take_over(self, key: int) -> None:
        """Save the states of those that exist, and seed them with the key at rest."""
        self.held = self.find()
        if self.held:
            self._saved = [_state(each) for each in self.held]
            self.seed(key)

    def seed(self, key: int) -> None:
        """Seed those that were taken over. All have the same stream, so a rank may continue on another device."""
        if self.held:
            for each in self.held:
                each.manual_seed(key)
            self._at = [_state(each) for each in self.held]

    def used(self) -> bool:
        """Whether one was used since it was seeded, or one that was not taken over."""
        self.late = any(each.get_offset() for each in self.find()[len(self.held) :])
        return self.late or [_state(each) for each in self.held] != self._at

    def restore(self) -> bool:
        """Restore the states. Generators that did not exist before are left as they were made. Returns `used`."""
        used = self.used()
        for each, (seed, offset) in zip(self.held, self._saved, strict=False):
            each.manual_seed(seed)
            each.set_offset(offset)
        for each in self.find()[len(self.held) :]:
            each.set_offset(0)
        return used


def _state(generator: Any) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()
