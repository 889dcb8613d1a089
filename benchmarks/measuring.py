"""What the benchmarks have in common."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


def processor() -> str:
    """Its model, as the system names it; empty if it does not say."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def machine() -> str:
    """How many cores of what."""
    return f"{os.cpu_count()} cores" + (f" of {model}" if (model := processor()) else "")


class Interval(NamedTuple):
    """A figure, and between what the true one lies in 95 of 100 runs."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"


def between(ratios: Sequence[float]) -> Interval:
    """The geometric mean of the rounds' ratios, and its interval by Student's distribution."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.mean(logs)
    reach = student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def student(freedom: int) -> float:
    """What 97.5 % of Student's distribution lies below, to 1 % from three degrees of freedom on.

    M. Abramowitz, I. A. Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    x = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return x + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def median_between(ratios: Sequence[float]) -> Interval:
    """Their median and its interval, for times with a long tail, as of disks.

    The interval's ends are order statistics: how many of n values lie below the median is binomial.
    """
    ordered, half = sorted(ratios), 0.98 * math.sqrt(len(ratios))
    low, high = max(0, int(len(ratios) / 2 - half)), min(len(ratios) - 1, math.ceil(len(ratios) / 2 + half))
    return Interval(statistics.median(ratios), ordered[low], ordered[high])


def replaced(page: Path, name: str, text: str) -> str:
    """A page with other text between its two marks of this name."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    return f"{before}{begin}{text}{end}{after}"
