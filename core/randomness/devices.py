"""The global random generators of CUDA devices, besides those of python, numpy and torch.

Each is a counter (Philox): its seed and its offset are all of its state, and reading them waits for no device. Before
CUDA is first used in a process there are none, and midepoch does not start it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["LentDevices"]


# Without a frame of python's, because it is called twice a batch.
_generators_of_cuda: Callable[[], Sequence[Any]] = functools.partial(getattr, torch.cuda, "default_generators")


class LentDevices:
    """`borrow` the generators of all devices, seed them as often as needed, then `give_back`.

    Args:
        find: returns the devices' generators that exist now. None that it has returned may be missing later.

    Attributes:
        held: those that existed at the last `borrow`.
        late: a generator that did not exist at the last `borrow` was used before the last `give_back`.
    """

    def __init__(self, find: Callable[[], Sequence[Any]] = _generators_of_cuda) -> None:
        self._find = find
        self.held: Sequence[Any] = ()
        self._stamps: list[tuple[int, int]] = []
        self._saved: list[tuple[int, int]] = []
        self.late = False

    def start(self, key: int) -> None:
        """Seed the devices' generators. All have the same stream, so a rank may continue on another device."""
        for each in self.held:
            each.manual_seed(key)

    def borrow(self) -> None:
        """Save the states of those that exist. From now on, `touched` reports whether one was used."""
        self.held = self._find()
        if self.held:
            self._saved = self._stamps = [_stamp(each) for each in self.held]

    def give_back(self) -> None:
        """Restore the states. Generators that did not exist before are left as they were made."""
        self.late = False
        found = self._find()
        if not found:
            return
        for each, saved in zip(self.held, self._saved, strict=False):
            if _stamp(each) != saved:
                each.manual_seed(saved[0])
                each.set_offset(saved[1])
        for each in found[len(self.held) :]:
            self.late = self.late or each.get_offset() > 0
            each.set_offset(0)

    def watch(self) -> None:
        """From now on, `touched` reports whether one was used."""
        self._stamps = [_stamp(each) for each in self.held]

    def touched(self) -> bool:
        """Whether one was used or seeded since `borrow` or `watch`."""
        return bool(self.held) and self._stamps != [_stamp(each) for each in self.held]


def _stamp(generator: Any) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()
