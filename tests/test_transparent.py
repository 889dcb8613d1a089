"""An undisturbed wrapped run is the plain one: each kind of source, and sources that are broken.

Sources of DALI, FFCV, webdataset, Streaming and packages with a state of their own have this law in their own files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the spawned processes take the import path over

import transparent_sources as sources

from midepoch.testing import check_resumable

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")

KNOWN: dict[str, str] = {
    "divided over ranks, by itself": "14 samples on each of two ranks, where each has 7",
    "an own sampler that is told the epoch": "the user's sampler is never iterated",
    "exposes its sampler, three samples for some": "the last 6 samples are lost",
    "exposes its sampler, none for some": "len() is made up, where torch knows none",
    "exposes its sampler, flushes": "what follows the last index is lost",
    "exposes a sampler that asks for its worker": "with two workers, samples are lost in each epoch",
    "two samplers": "the attribute that __iter__ sets is not in the dataset",
    "its own iterator with a state, in a DataLoader": "the first batch for ever",
    "stream: a length too low": "the samples past the length are lost",
    "sampler: raises at first": "len() raises the sampler's own error, where torch says TypeError",
    "sampler: raises later": "the same",
    "sampler: raises after its last": "the same",
    "sampler: a length too low": "len() is that of the list, not the sampler's",
    "sampler: a length too high": "the same",
    "batch sampler: writes to the dataset": "all batches have the size that was written last",
    "exposed sampler: read for ever": "ends after one round",
}
"""Rows that differ from the plain source today, and in what. One that no longer differs fails until it is taken out."""


def examine(make: Callable[..., Any], **how: Any) -> tuple[str, str]:
    report = check_resumable(
        make, laws=["transparent"], identify=sources.identify, timeout=60, raise_on_failure=False, **how
    )
    return report["transparent"].status, str(report)


@pytest.mark.parametrize("name", sources.SOUND)
def test_a_sound_source(name: str) -> None:
    """With and without workers as the platform starts them, on one rank and on two."""
    status, report = examine(sources.SOUND[name], quick=True, world_sizes=(1, 2))
    assert status == ("failed" if name in KNOWN else "holds"), report


@pytest.mark.long
@pytest.mark.parametrize("name", sources.SOUND)
def test_a_sound_source_in_spawned_workers_kept_and_not(name: str) -> None:
    status, report = examine(sources.SOUND[name], world_sizes=(1, 2, 3))
    assert status == ("failed" if name in KNOWN else "holds"), report


@pytest.mark.parametrize("name", sources.BAD)
def test_a_bad_source_is_as_by_itself_or_refused(name: str) -> None:
    status, report = examine(sources.BAD[name], quick=True, world_sizes=(1,))
    assert (status == "failed") == (name in KNOWN), report
    assert status != "not applicable", report


def test_no_row_is_known_that_does_not_exist() -> None:
    assert set(KNOWN) <= {*sources.SOUND, *sources.BAD}
