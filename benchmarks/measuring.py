"""What the benchmarks have in common."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def between(ratios: Sequence[float]) -> str:
    """The geometric mean of the rounds' ratios, and the interval that holds the true one in 95 of 100 runs."""
    logs = [math.log(ratio) for ratio in ratios]
    middle, reach = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(middle):.3f} ({math.exp(middle - reach):.3f} to {math.exp(middle + reach):.3f})"
