"""benchmarks/scale.py: that its check of coverage finds what is broken, that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from midepoch import ResumableSampler, reseal
from midepoch.order import Shuffled
from support.places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import scale

PAGE = ROOT / "docs" / "benchmarks" / "index.md"
SIZE = 10**12
RANKS = 16


def test_a_resume_at_the_wrong_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ResumableSampler.load_state_dict

    def one_late(sampler: ResumableSampler, state: scale.State) -> None:
        load(sampler, reseal({**state, "position": min(state["position"] + 1, state["size"])}))

    monkeypatch.setattr(ResumableSampler, "load_state_dict", one_late)
    with pytest.raises(SystemExit, match="cut at 1 and continued on"):
        scale.check_small(6, 3)
    with pytest.raises(SystemExit, match="not the indices"):
        scale.check_window(Shuffled(SIZE), SIZE // 2, RANKS, False)


def test_the_page_is_that_of_the_figures() -> None:
    figures = json.loads((PAGE.parent / "scale.json").read_text())
    assert f"<!-- scale -->\n{scale.page(figures)}\n<!-- end of scale -->\n" in PAGE.read_text()


def test_the_script_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    (tmp_path / "index.md").write_text("before\n<!-- scale -->\nold\n<!-- end of scale -->\nbehind\n")
    small = ["--rounds=1", "--indices=2000", "--ranks=16", "--windows=1", "--largest-size=5", "--largest-world=3"]
    scale.main([*small, "--json", str(figures)])
    printed = capsys.readouterr().out
    assert "| 1,000,000,000,000 |" in printed and "| 16,384 |" in printed
    assert (tmp_path / "index.md").read_text() == f"before\n<!-- scale -->\n{printed}<!-- end of scale -->\nbehind\n"
    report = json.loads(figures.read_text())
    assert set(report["environment"]) >= {"date", "python", "torch", "numpy", "midepoch", "cores", "memory_gibibytes"}
    assert {(case["size"], case["world_size"]) for case in report["cost"]["per_index"]} == {
        (10**4, 1), (10**6, 1), (10**9, 1), (10**12, 1), (10**12, 8), (10**12, 1024), (10**12, 16384)
    }  # fmt: skip
    assert all(len(case["nanoseconds"]) == 1 and case["kibibytes"] < 1024 for case in report["cost"]["per_index"])
    assert report["coverage"]["windows"]["windows"] == 4
