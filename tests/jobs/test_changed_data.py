"""A loop that changes the data, and data that remember: a resume is exact, or it is said that it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.changed_sources import ROWS
from support.places import TESTS

JOB = Path(__file__).with_name("changed_data_job.py")
WORKERS = (0, False), (2, False), (2, True)
CHAOS = bool(os.environ.get("MIDEPOCH_CHAOS"))


def done(tasks: list[Any], hash_seed: int) -> list[dict[str, Any]]:
    """What `changed_data_job.run` returns for each."""
    run = subprocess.run(
        [sys.executable, str(JOB)], input=json.dumps(tasks), stdout=subprocess.PIPE, text=True, check=True, timeout=900,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])},
    )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(run.stdout)
    assert all(found), [task for task, each in zip(tasks, found, strict=True) if not each]
    return found


def test_changed_data_resume_exactly_or_say_that_they_do_not() -> None:
    """Each row, in processes of its own, whose generators and hashes have other seeds in the run that resumes."""
    tasks = [[name, workers, kept, 1, None, 0] for name in ROWS for workers, kept in WORKERS]
    resumes: list[Any] = []
    before: list[Any] = []
    for number, ((name, workers, kept, *_), whole) in enumerate(zip(tasks, done(tasks, 1), strict=True)):
        assert not whole["refused"], (name, workers, kept, whole["refused"])
        assert len(whole["states"]) == 4
        for at, (cut, (state, step, batches, told)) in enumerate(whole["states"].items()):
            if not CHAOS and (number + at) % 2:
                continue  # every second cut of each row and number of workers
            resumes.append([name, workers, kept, 2, state, step])
            before.append((cut, told, whole["batches"][batches:]))
    wrong: list[Any] = []
    said: set[str] = set()
    for (name, workers, kept, *_), (cut, told, rest), resumed in zip(resumes, before, done(resumes, 2), strict=True):
        row = ROWS[name]
        says = row.says if workers or row.here is None else row.here
        heard = told if says else [*told, *resumed["told"], resumed["refused"]]
        is_said = any(says in each for each in heard) if says else any(heard)
        is_exact = resumed["batches"] == rest and not resumed["refused"]
        if not (is_exact and not is_said if not says else is_exact or is_said):
            wrong.append((name, workers, kept, cut, "exact" if is_exact else "other batches", heard))
        if is_said:
            said.add(says)
    assert not wrong
    assert said == {each for row in ROWS.values() for each in (row.says, row.here) if each}
