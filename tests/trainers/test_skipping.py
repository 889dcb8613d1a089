"""Whatever skips batches by itself when it resumes: exact, or refused as it begins; each in real processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from support import forking, jobs

JOB = Path(__file__).parent / "skipping_job.py"
# All three have one process to be forked from. What transformers imports is much, and all of it is imported once.
LIBRARIES = ("ignite", "accelerate", "transformers")
MODULES = (*LIBRARIES, "ignite.engine", "transformers.trainer", "support.jobs")

# Looked for rather than imported: this process does not need them.
if missing := [each for each in LIBRARIES if importlib.util.find_spec(each) is None]:
    pytest.skip(f"{missing} are not installed", allow_module_level=True)


def run(library: str, folder: Path, stop: int, *options: str) -> tuple[list[Any], str]:
    """All batches so far, and what the process said as it ended; nothing if it did well."""
    folder.mkdir(exist_ok=True)
    done = forking.run([JOB, library, str(folder), str(stop), *options], modules=MODULES, cwd=folder)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    told = [line for line in done.stderr.splitlines() if "Midepoch" in line or "midepoch.errors" in line]
    return jobs.noted(folder / "log"), done.stderr if done.returncode else "\n".join(told)


IGNITE = ("ignite's DeterministicEngine is about to skip {} batches", "use ignite.engine.Engine")
ACCELERATE = ("the wrapped loader itself", "continues by itself")


@pytest.mark.parametrize(
    ("library", "cut", "before", "after", "told"),
    [
        ("ignite", 3, "", "loaded", IGNITE), ("ignite", 7, "", "unloaded", IGNITE),
        *(("accelerate", 3, kind, f"{kind} skip", ACCELERATE) for kind in ("map", "stream", "list", "function")),
    ],
)  # fmt: skip
def test_what_would_skip_is_refused_before_a_batch(
    library: str, cut: int, before: str, after: str, told: tuple[str, ...], tmp_path: Path
) -> None:
    head, said = run(library, tmp_path, cut, *before.split())
    assert len(head) == cut and (not said or library == "accelerate")
    again, said = run(library, tmp_path, 0, *after.split())
    assert again == head and all(each.format(cut % 5) in said for each in told)


@pytest.mark.parametrize(
    ("library", "option", "batches", "cuts"),
    [("ignite", "plain", 10, (3, 5, 8)), ("ignite", "deterministic", 10, (5,)), ("accelerate", "map", 5, (3,))],
)
def test_what_does_not_skip_is_exact(
    library: str, option: str, batches: int, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    whole, told = run(library, tmp_path / "whole", 0, option)
    assert len(whole) == batches and not told
    for cut in cuts:
        run(library, tmp_path / str(cut), cut, option)
        assert run(library, tmp_path / str(cut), 0, option) == (whole, ""), cut


def test_a_deterministic_engine_that_runs_again_is_refused(tmp_path: Path) -> None:
    """In one process, without any load: it would skip batches of the loader's next epoch."""
    found, told = run("ignite", tmp_path, 3, "again")
    assert len(found) == 3 and "about to skip 3 batches" in told


def test_hugging_faces_trainer_without_feed(tmp_path: Path) -> None:
    whole, told = run("transformers", tmp_path / "whole", 0)
    assert len(whole) == 10 and not told
    # At an epoch's beginning it skips nothing, and tells the loader the epoch.
    assert len(run("transformers", tmp_path / "boundary", 5)[0]) == 5
    assert run("transformers", tmp_path / "boundary", 0) == (whole, "")
    # Within an epoch it is refused before a batch is read.
    run("transformers", tmp_path / "middle", 7)
    after, told = run("transformers", tmp_path / "middle", 0)
    assert after == whole[:7]
    assert "UnsupportedSourceError" in told and "midepoch.trainers" in told
    # Told not to skip, it begins the epoch again, as its option says; a warning names what continues it.
    after, told = run("transformers", tmp_path / "middle", 0, "ignore")
    assert after[7:10] == whole[5:8] and told.count("MidepochWarning") == 1
    assert "resumes after 2 of 5 steps of an epoch" in told and "transformers.feed(trainer, loader)" in told
