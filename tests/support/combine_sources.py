"""A combination for the laws."""

from __future__ import annotations

from typing import Any

import midepoch
from support.law_sources import identify, map_left_alone


def identify_short(batch: Any) -> list[int]:
    """Those of the part that is read from its beginning to its end."""
    return identify(batch["short"])


def left_alone(rank: int = 0, world_size: int = 1, size: int = 12) -> Any:
    """Parts whose states each rank knows alone: samplers that divide their data themselves."""
    parts = {name: map_left_alone(rank, world_size, size=size, seed=seed) for name, seed in (("short", 1), ("long", 2))}
    return midepoch.combine(parts, "min_size")
