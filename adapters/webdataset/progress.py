"""A bar on standard error while shards are indexed."""

from __future__ import annotations

from tqdm import tqdm

__all__ = ["Bar"]

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
