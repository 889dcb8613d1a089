"""Whatever skips batches by itself when it resumes: exact, or refused as it begins; each in real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import forking

JOB = Path(__file__).parent / "skipping_job.py"


# What transformers imports is much, and all of it is imported once.
MODULES = {"transformers": ["transformers", "transformers.trainer"]}


def run(library: str, folder: Path, stop: int, *options: str) -> tuple[list[Any], str]:
    """All batches so far, and what the process said as it ended; nothing if it did well."""
    pytest.importorskip(library, reason=f"{library} is not installed")
    folder.mkdir(exist_ok=True)
    modules = MODULES.get(library, [library])
    done = forking.run([JOB, library, str(folder), str(stop), *options], modules=modules, cwd=folder)
    log = folder / "log"
    batches = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    assert done.returncode in (0, 1), done.stderr[-2000:]
    told = [line for line in done.stderr.splitlines() if "Midepoch" in line or "midepoch.errors" in line]
    return batches, done.stderr if done.returncode else "\n".join(told)


# --- ignite -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [3, 7])
@pytest.mark.parametrize("state", ["loaded", "unloaded"])
def test_a_deterministic_engine_that_would_skip_is_refused(cut: int, state: str, tmp_path: Path) -> None:
    before, told = run("ignite", tmp_path, cut)
    assert len(before) == cut and not told
    after, told = run("ignite", tmp_path, 0, state)
    assert after == before, "not one batch"
    assert f"DeterministicEngine is about to skip {cut % 5} batches" in told and "use ignite.engine.Engine" in told


@pytest.mark.parametrize("kind", ["plain", "deterministic"])
def test_engines_that_do_not_skip_are_exact(kind: str, tmp_path: Path) -> None:
    whole, told = run("ignite", tmp_path / "whole", 0, kind)
    assert len(whole) == 10 and not told
    for cut in (3, 5, 8) if kind == "plain" else (5,):
        folder = tmp_path / str(cut)
        _, told = run("ignite", folder, cut, kind)
        found, later = run("ignite", folder, 0, kind)
        assert found == whole and not told and not later, cut


def test_a_deterministic_engine_that_runs_again_is_refused(tmp_path: Path) -> None:
    """In one process, without any load: it would skip batches of the loader's next epoch."""
    found, told = run("ignite", tmp_path, 3, "again")
    assert len(found) == 3 and "about to skip 3 batches" in told


# --- Accelerate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["map", "stream", "list", "function"])
def test_skip_first_batches_is_refused(kind: str, tmp_path: Path) -> None:
    before, told = run("accelerate", tmp_path, 3, kind)
    assert len(before) == 3
    after, told = run("accelerate", tmp_path, 0, kind, "skip")
    assert after == before
    assert "the wrapped loader itself" in told and "continues by itself" in told


def test_without_it_the_run_is_exact(tmp_path: Path) -> None:
    whole, told = run("accelerate", tmp_path / "whole", 0)
    assert len(whole) == 5 and not told
    run("accelerate", tmp_path / "cut", 3)
    assert run("accelerate", tmp_path / "cut", 0) == (whole, "")


# --- Hugging Face's Trainer without feed ------------------------------------------------------------------------------


def test_the_trainer_without_feed(tmp_path: Path) -> None:
    whole, told = run("transformers", tmp_path / "whole", 0)
    assert len(whole) == 10 and not told
    # At an epoch's beginning it skips nothing, and tells the loader the epoch.
    assert len(run("transformers", tmp_path / "boundary", 5)[0]) == 5
    assert run("transformers", tmp_path / "boundary", 0) == (whole, "")
    # Within an epoch it is refused before a batch is read.
    before, _ = run("transformers", tmp_path / "middle", 7)
    after, told = run("transformers", tmp_path / "middle", 0)
    assert after == before == whole[:7]
    assert "UnsupportedSourceError" in told and "midepoch.trainers" in told
    # Told not to skip, it begins the epoch again, as its option says; a warning names what continues it.
    after, told = run("transformers", tmp_path / "middle", 0, "ignore")
    assert after[7:10] == whole[5:8] and told.count("MidepochWarning") == 1
    assert "resumes after 2 of 5 steps of an epoch" in told and "transformers.feed(trainer, loader)" in told
