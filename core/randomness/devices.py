"""The global random generators of CUDA devices, besides those of python, numpy and torch.

Each is a counter (Philox): its seed and its offset are all of its state, and reading them waits for no device. Before
CUDA is first used in a process there are none, and midepoch does not start it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .globals import LentGlobals, Touched

__all__ = ["LentDevices"]


def _generators_of_cuda() -> Sequence[Any]:
    return torch.cuda.default_generators


class LentDevices(LentGlobals):
    """The global generators, and those of all devices.

    Args:
        find: returns the devices' generators that exist now. None that it has returned may be missing later.

    Attributes:
        late: a generator that did not exist at the last `borrow` was used before the last `give_back`.
    """

    def __init__(self, find: Callable[[], Sequence[Any]] = _generators_of_cuda) -> None:
        super().__init__()
        self._find = find
        self._devices: Sequence[Any] = ()
        self._device_stamps: list[tuple[int, int]] = []
        self._devices_saved: list[tuple[int, int]] = []
        self.late = False

    def start(self, key: int) -> None:
        """Seed the devices' generators. All have the same stream, so a rank may continue on another device."""
        for each in self._devices:
            each.manual_seed(key)

    def borrow(self) -> None:
        """As `LentGlobals.borrow`."""
        super().borrow()
        self._devices = self._find()
        if self._devices:
            self._devices_saved = self._device_stamps = [_stamp(each) for each in self._devices]

    def give_back(self, touched: bool = True) -> Touched:
        """As `LentGlobals.give_back`. Generators that did not exist before are left as they were made."""
        used = super().give_back(touched)
        self.late = False
        found = self._find()
        if not found:
            return used
        for each, saved in zip(self._devices, self._devices_saved, strict=False):
            if _stamp(each) != saved:
                each.manual_seed(saved[0])
                each.set_offset(saved[1])
        for each in found[len(self._devices) :]:
            self.late = self.late or each.get_offset() > 0
            each.set_offset(0)
        return used

    def watch(self) -> None:
        """As `LentGlobals.watch`."""
        super().watch()
        self._device_stamps = [_stamp(each) for each in self._devices]

    def touched(self) -> bool:
        """As `LentGlobals.touched`."""
        if super().touched():
            return True
        return bool(self._devices) and self._device_stamps != [_stamp(each) for each in self._devices]


def _stamp(generator: Any) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()
