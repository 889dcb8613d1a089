"""A bar on standard error while something has to be read before the first batch comes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

__all__ = ["Bar", "counted"]

_PATIENCE = 0.5  # seconds before a bar appears


class Bar(tqdm):
    """A bar without tqdm's monitor thread, which would outlive it: worker processes are forked later.

    Args:
        total: of the units.
        what: is done.
        unit: what is counted.
        progress: whether to show it; None shows it if standard error is a terminal.
    """

    monitor_interval = 0

    def __init__(self, total: int, what: str, unit: str, progress: bool | None) -> None:
        super().__init__(
            total=total,
            desc=f"midepoch: {what}",
            unit=unit,
            unit_scale=unit == "B",
            delay=_PATIENCE,
            disable=None if progress is None else not progress,  # None: shown on a terminal
        )


def counted(given: Iterator[Any], count: int, what: str, unit: str, progress: bool | None) -> Iterator[Any]:
    """The same items, the first `count` of which a bar counts. Those after them cost nothing more."""
    if count <= 0 or progress is False:
        return given
    return itertools.chain(_first(given, count, what, unit, progress), given)


def _first(given: Iterator[Any], count: int, what: str, unit: str, progress: bool | None) -> Iterator[Any]:
    with Bar(count, what, unit, progress) as bar:
        for item in itertools.islice(given, count):
            bar.update()
            yield item
