"""A loop that changes the data, and data that remember: a resume is exact, or it is said that it is not."""

from __future__ import annotations

import json
import os
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from support import forking
from support.changed_sources import ROWS

JOB = Path(__file__).with_name("changed_data_job.py")
WORKERS = (0, False), (2, False), (2, True)
CHAOS = bool(os.environ.get("MIDEPOCH_CHAOS"))


def done(task: list[Any]) -> Any:
    run = forking.run([JOB, json.dumps(task)], modules=["support.changed_sources"], check=True)
    return json.loads(run.stdout)


def test_changed_data_resume_exactly_or_say_that_they_do_not() -> None:
    """Each row, in processes of its own, whose generators have other seeds in the run that resumes."""
    tasks: list[Any] = [[name, workers, kept, 1] for name in ROWS for workers, kept in WORKERS]
    resumes, before, wrong, said = list[Any](), list[Any](), list[Any](), set[str]()
    with ThreadPool(2) as two:
        for number, ((name, *where, _), whole) in enumerate(zip(tasks, two.map(done, tasks), strict=True)):
            assert not whole["refused"] and len(whole["states"]) == 4, (name, where, whole["refused"])
            for at, (cut, (state, step, batches, told)) in enumerate(whole["states"].items()):
                if CHAOS or (number + at) % 2 == 0:  # every second cut of each row and number of workers
                    resumes.append([name, *where, 2, state, step])
                    before.append((cut, told, whole["batches"][batches:]))
        resumed_runs = two.map(done, resumes)
    for (name, workers, *_), (cut, told, rest), resumed in zip(resumes, before, resumed_runs, strict=True):
        row = ROWS[name]
        says = row.says if workers or row.here is None else row.here
        heard = told if says else [*told, *resumed["told"], resumed["refused"]]
        is_said = any(says in each for each in heard) if says else any(heard)
        is_exact = resumed["batches"] == rest and not resumed["refused"]
        if not (is_exact and not is_said if not says else is_exact or is_said):
            wrong.append((name, workers, cut, "exact" if is_exact else "other batches", heard))
        if is_said:
            said.add(says)
    assert not wrong
    assert said == {each for row in ROWS.values() for each in (row.says, row.here) if each}
