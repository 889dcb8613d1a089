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


def median_between(ratios: list[float]) -> str:
    """Their median and the interval that holds the true one in 95 of 100 runs, for times with a long tail, as of disks.

    The interval's ends are order statistics: how many of n values lie below the median is binomial.
    """
    ordered, half = sorted(ratios), 0.98 * math.sqrt(len(ratios))
    low, high = max(0, int(len(ratios) / 2 - half)), min(len(ratios) - 1, math.ceil(len(ratios) / 2 + half))
    return f"{statistics.median(ratios):.3f} ({ordered[low]:.3f} to {ordered[high]:.3f})"
