"""Jobs killed until they are done, many times in the long form: see chaos.py, and ticket_job.py for tickets."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import chaos
import pytest
import ticket_job

from support import forking
from support.jobs import MODULES

LONG = bool(os.environ.get("MIDEPOCH_CHAOS"))
# The others resume as this one does. Parts of a state that only their rank knows are killed in test_torchrun.
SHORT = ("dataloader",)
NEEDED = {"stateful": "torchdata", "webdataset": "webdataset", "streaming": "streaming", "dali": "nvidia.dali",
          "dali-native": "nvidia.dali", "ffcv": "ffcv"}  # fmt: skip


def survived(kills: int, job: str, *options: str) -> Any:
    """What a job's program counts; it ends with an error where a sample was lost, repeated or different."""
    return json.loads(forking.run([job, *options], modules=MODULES, timeout=120 + 10 * kills, check=True).stdout)


@pytest.mark.parametrize(
    "backend", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in chaos.BACKENDS]
)
def test_a_job_killed_until_it_is_done_misses_nothing(backend: str, tmp_path: Path) -> None:
    if (needed := NEEDED.get(backend)) is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    kills = 500 if LONG else 3
    counts = survived(kills, chaos.__file__, "--backend", backend, "--kills", str(kills), "--seed", "1")
    assert counts["kills"] >= kills and counts["samples"] >= chaos.SIZE * chaos.EPOCHS


def test_killed_jobs_train_once_on_what_ends_out_of_order() -> None:
    kills = 100 if LONG else 5
    counts = survived(kills, ticket_job.__file__, str(kills), "1")
    assert counts["kills"] >= kills and counts["beyond"] > 0, "some were saved with batches finished out of order"
