"""What a sample looks like as it is stored, for sources whose own code reads and decodes it."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..loader.adapter import WitnessReport
from ..state.witness import SampleSummary, summary_of
from .sessions import WitnessRequest

__all__ = ["MOST_STORED", "file_as_stored", "seen_as_stored"]

MOST_STORED = 1 << 20
"""Bytes of a sample that are read at most. It begins with them, so they tell it from others."""


def seen_as_stored(
    request: WitnessRequest, size: int, stored: Callable[[int], bytes], name: Callable[[int], str] | None = None
) -> WitnessReport:
    """Look at samples before any code has a part in them. Each is read once, since what is stored stays the same.

    Args:
        request: says which.
        size: number of samples that there are.
        stored: from an index to the sample's bytes, all as one: any difference makes it another sample, since nothing
            in a file varies by itself. May raise any error.
        name: from an index to where the sample is stored, for messages.
    """

    def look(index: int) -> tuple[SampleSummary | None, Exception | None]:
        try:
            if not 0 <= index < size:
                raise IndexError(f"there are {size} samples")
            return summary_of(stored(index)), None
        except Exception as failure:  # noqa: BLE001  # of another library
            return None, failure

    compared, failure = request.index, None
    expected = one = look(compared)[0]  # an error is raised where the sample is read for a batch
    if request.expected is not None:
        compared = request.expected[1]
        expected, failure = look(compared)
    error = "" if failure is None else f"{type(failure).__name__}: {failure}"
    missing = isinstance(failure, IndexError)
    what = name(compared) if name is not None and not missing else ""
    return WitnessReport(request.index, one, one, expected, error, missing, what=what)


def file_as_stored(path: str | bytes) -> bytes:
    """A file's beginning, and its size; not its name or times, which a copy changes."""
    with open(path, "rb") as file:  # noqa: PTH123  # a path of bytes
        return file.read(MOST_STORED) + b"%d" % os.fstat(file.fileno()).st_size
