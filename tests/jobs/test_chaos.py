"""Training jobs of each backend, killed until they are done, 500 times in the long form: see chaos.py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import chaos
import pytest

LONG = bool(os.environ.get("MIDEPOCH_CHAOS"))
# The others resume as this one does. Parts of a state that only their rank knows are killed in test_processes, and what
# killed processes leave in shared memory in test_faults.
SHORT = ("dataloader",)
NEEDED = {"stateful": "torchdata", "webdataset": "webdataset", "streaming": "streaming", "dali": "nvidia.dali",
          "dali-native": "nvidia.dali", "ffcv": "ffcv"}  # fmt: skip


def survived(backend: str, kills: int, folder: Path) -> dict[str, Any]:
    needed = NEEDED.get(backend)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    command = [sys.executable, chaos.__file__, "--backend", backend, "--kills", str(kills), "--seed", "1"]
    done = subprocess.run(
        [*command, "--json", str(folder / "counts.json")], capture_output=True, text=True, timeout=60 + 10 * kills
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (counts,) = json.loads((folder / "counts.json").read_text())
    return dict(counts)


@pytest.mark.parametrize(
    "backend", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in chaos.BACKENDS]
)
def test_a_job_killed_until_it_is_done_misses_nothing(backend: str, tmp_path: Path) -> None:
    kills = 500 if LONG else 3
    counts = survived(backend, kills, tmp_path)
    assert counts["kills"] >= kills and counts["samples"] >= chaos.SIZE * chaos.EPOCHS


