"""The comparison with midepoch's peers: it runs, its answers are measured, and what has become worse is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.places import ROOT

pytest.importorskip("torchdata", reason="torchdata is not installed (pip install midepoch[torchdata])")
pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install midepoch[demo])")
pytest.importorskip("PIL", reason="pillow, which writes the images, is not installed (pip install midepoch[demo])")
sys.path.insert(0, str(ROOT / "benchmarks"))

import compare
import measuring
import peers
from measuring import Interval

from support import forking

PLAIN, OURS, TORCHDATA = NAMES = ("plain DataLoader", "midepoch DataLoader", "torchdata")
PUBLISHED: dict[str, Any] = json.loads((compare.OUTPUT / "results.json").read_text())


@pytest.mark.long  # it measures for half a minute what no other part of midepoch depends on
def test_what_is_measured_is_exact_sane_and_written(tmp_path: Path) -> None:
    script = Path(compare.__file__)
    code = f"import runpy, sys; sys.executable = {forking.executable()!r}; sys.argv[0] = {str(script)!r}; "
    code += f"sys.path.insert(0, {str(script.parent)!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
    command: list[str | Path] = ["-c", code, "--quick", "--only", ",".join(NAMES), "--output", tmp_path]
    for question in ("overhead", "resume", "state", "exactness"):
        command += ["--question", question]
    said = forking.run(command, modules=forking.IMPORTED, check=True, timeout=500).stdout
    assert (tmp_path / "results.md").read_text().strip() == said.strip()
    assert all((tmp_path / f"{name}.png").exists() for name in ("first_batch_progress", "first_batch_size", "overhead"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(0 < row["lowest"] <= row["microseconds"] <= row["highest"] for row in results["overhead"])
    assert all(0 < row["seconds"] < 5 and row["forged"] == (not row["workers"]) for row in results["first_batch"])
    size = {row["peer"]: row["bytes"] for row in results["state"]}
    assert size[PLAIN] < size[OURS] < size[TORCHDATA]
    ours = {row["question"]: row["verdict"] for row in results["exactness"] if row["peer"] == OURS}
    assert ours.pop("longer") == "refused: StateMismatchError" and set(ours.values()) == {"exact"}
    theirs = {row["question"]: row["verdict"] for row in results["exactness"] if row["peer"] == TORCHDATA}
    assert theirs["world 2 to 3"].startswith("loses ") and theirs["random"] == "other numbers"


def test_the_page_is_that_of_the_results() -> None:
    """If this fails: benchmarks/compare.py --render."""
    page = compare.OUTPUT / "index.md"
    assert page.read_text() == measuring.replaced(page, "comparison", compare.markdown(PUBLISHED))


def test_a_sentence_of_result_stands_over_each_chart() -> None:
    rows = PUBLISHED["overhead"]
    worst = max(float(row["ratio"]) for row in rows if row["peer"] == OURS and not row["workers"])
    said = compare.first_overhead(rows)
    assert f"{worst:.2g} for draws" in said and said.count(" for ") == 3
    assert "of the 10 others, 10 lose" in compare.first_exactness(PUBLISHED["exactness"])
    wrong = [{"peer": OURS, "question": "halved", "verdict": "loses 1, repeats 0 silently"}]
    assert compare.first_exactness(wrong).startswith("A wrapped loader is wrong; ")
    assert compare.first_resume([]) == compare.first_size([]) == compare.first_state([]) == ""


def test_a_verdict_counts_what_is_lost_and_repeated() -> None:
    assert compare.verdict([0, 1], [2, 3], [2, 3], 4) == "exact"
    assert compare.verdict([0, 1], [3, 2], [2, 3], 4) == "complete, another order"
    assert compare.verdict([0, 1], [3, 2], [2, 3], 4, block=2) == "exact"
    assert compare.verdict([0, 1], [1, 2], [2, 3], 4) == "loses 1, repeats 1 silently"


def test_a_wrong_forged_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    server = peers.Server(peers.Plain())
    assert server.check_forged(peers.Spec(size=320), 7)
    monkeypatch.setattr(peers.Plain, "forge", lambda self, spec, batches: {"epoch": 0, "batches": batches + 1})
    with pytest.raises(AssertionError, match="not what a real one is"):
        server.check_forged(peers.Spec(size=320), 7)


def changed(results: dict[str, Any], key: str, **values: Any) -> dict[str, Any]:
    """The same, with other values in midepoch's rows of one question."""
    return results | {key: [row | values if row["peer"] == OURS else row for row in results[key]]}


def test_what_has_become_worse_is_named() -> None:
    results, asked = PUBLISHED, ["overhead", "resume", "exactness"]
    assert compare.worse(results, results, [OURS], asked) == []
    slow = changed(results, "overhead", ratio=100.0, low=99.0, high=101.0)
    ours = [row for row in results["overhead"] if row["peer"] == OURS]
    assert len(compare.worse(results, slow, [OURS], asked)) == len(ours)
    assert compare.worse(slow, results, [OURS], asked) == []
    wrong = changed(results, "exactness", verdict="loses 1, repeats 0 silently")
    assert compare.worse(results, wrong, [OURS], ["exactness"])
    for key in ("overhead", "first_batch", "exactness"):
        missing = {**results, key: [row for row in results[key] if row["peer"] != OURS]}
        told = compare.worse(results, missing, [OURS], asked)
        assert told and all("not measured" in line for line in told), key


def test_a_ratio_has_grown_beyond_both_errors_and_a_tenth() -> None:
    exact, vague = Interval(1, 0.99, 1.01), Interval(1, 0.8, 1.25)
    assert compare.grown(Interval(1.12, 1.10, 1.14), exact)
    assert not compare.grown(Interval(1.09, 1.08, 1.10), exact)
    assert not compare.grown(Interval(1.12, 1.10, 1.14), vague)
    assert compare.grown(Interval(1.5, 1.4, 1.6), vague)
