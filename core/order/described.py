"""Orders by their description, as fingerprints have it; and at which positions they have a sample."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from .endless import Endless
from .epochs import Order
from .shuffled import Sequential, Shuffled
from .windows import Windowed

__all__ = ["order_of", "positions_of"]

_ENDLESS = re.compile(r"endless (sequential|shuffled) of ([1-9]\d{0,15})")
_WINDOWED = re.compile(r"windowed\(block=([1-9]\d{0,15}),window=([1-9]\d{0,15})\)")


_PLAIN: dict[str, type[Sequential | Shuffled]] = {"sequential": Sequential, "shuffled": Shuffled}


def order_of(description: str, size: int | None) -> Order | None:
    """The order that describes itself so; None if that is not enough to compute it. `size`: None without an end.

    Raises:
        ValueError: there is no such order.
    """
    if match := _ENDLESS.fullmatch(description):
        return Endless(cast(Sequential | Shuffled, order_of(match[1], int(match[2]))))
    if size is None:
        return None
    if match := _WINDOWED.fullmatch(description):
        return Windowed(size, int(match[1]), int(match[2]))
    return _PLAIN[description](size) if description in _PLAIN else None


def positions_of(order: Order, seed: int, epoch: int, index: int, start: int, stop: int) -> Iterator[int]:
    """The positions in [start, stop) of an epoch at which such an order has a sample."""
    rounds, each = range(1), order
    if isinstance(order, Endless):
        seed, each = order.key(seed, epoch), order.round
        rounds = range(start // each.size, -(-stop // each.size))
    for number in rounds if 0 <= index < each.size else ():
        found: Any = each.epoch(seed, number if isinstance(order, Endless) else epoch)  # has each sample once
        position = number * each.size + found.position_of(index)
        if start <= position < stop:
            yield position
