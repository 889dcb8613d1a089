"""benchmarks/scale.py: that its check of coverage finds what is broken, that it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from midepoch import ResumableSampler, reseal
from midepoch.order import EpochOrder, Shuffled
from support.places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import scale

PAGE = ROOT / "docs" / "benchmarks" / "index.md"
SIZE = 10**12
RANKS = 16
GLOBAL_BATCH = RANKS * scale.BATCH_SIZE
END = SIZE - 3 * GLOBAL_BATCH - 5
"""Three full steps and a rest of five, to be padded or dropped."""

# --- coverage ---


@dataclass
class Mended:
    """An epoch in which one position has the index of another, or one that there is not."""

    epoch: EpochOrder
    position: int
    index: int

    def __len__(self) -> int:
        return len(self.epoch)

    def __getitem__(self, positions: slice, /) -> npt.NDArray[np.int64]:
        indices = self.epoch[positions].copy()
        if positions.start <= self.position < positions.stop:
            indices[self.position - positions.start] = self.index
        return indices


@dataclass(frozen=True)
class Broken(Shuffled):
    """A shuffled order with one wrong index: that of the position `like`, or `size` if that is none."""

    position: int = 0
    like: int = -1

    def epoch(self, seed: int, epoch: int) -> EpochOrder:
        right = super().epoch(seed, epoch)
        wrong = self.size if self.like < 0 else int(right[self.like : self.like + 1][0])
        return Mended(right, self.position, wrong)


@pytest.mark.parametrize("drop_last", [False, True])
def test_windows_are_covered(drop_last: bool) -> None:
    assert scale.check_window(Shuffled(SIZE), 7 * 10**11 + 1, RANKS, drop_last) == 4 * GLOBAL_BATCH
    # Worked out by hand: five are left for sixteen ranks.
    assert scale.check_window(Shuffled(SIZE), END, RANKS, drop_last) == 3 * GLOBAL_BATCH + (0 if drop_last else RANKS)


@pytest.mark.parametrize(
    ("like", "what"),
    [(SIZE // 2 + 3, "more than once"), (SIZE // 3, "inverse"), (-1, "out of range")],
    ids=["within the window", "from far away", "not in the data"],
)
def test_a_wrong_index_is_found(like: int, what: str) -> None:
    with pytest.raises(SystemExit, match=rf"not covered.*16 ranks from position 500,000,000,000.*{what}"):
        scale.check_window(Broken(SIZE, SIZE // 2 + 777, like), SIZE // 2, RANKS, False)


def test_a_resume_at_the_wrong_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ResumableSampler.load_state_dict

    def one_late(sampler: ResumableSampler, state: scale.State) -> None:
        load(sampler, reseal({**state, "position": min(state["position"] + 1, state["size"])}))

    monkeypatch.setattr(ResumableSampler, "load_state_dict", one_late)
    with pytest.raises(SystemExit, match="cut at 1 and continued on"):
        scale.check_small(6, 3)
    with pytest.raises(SystemExit, match="not the indices"):
        scale.check_window(Shuffled(SIZE), SIZE // 2, RANKS, False)


# --- the script ---


def test_the_page_is_that_of_the_figures() -> None:
    figures = json.loads((PAGE.parent / "scale.json").read_text())
    assert f"<!-- scale -->\n{scale.page(figures)}\n<!-- end of scale -->\n" in PAGE.read_text()


def test_the_script_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    (tmp_path / "index.md").write_text("before\n<!-- scale -->\nold\n<!-- end of scale -->\nbehind\n")
    small = ["--rounds=1", "--indices=2000", "--ranks=16", "--windows=1", "--largest-size=5", "--largest-world=3"]
    scale.main([*small, "--json", str(figures)])
    printed = capsys.readouterr().out
    assert "| 1,000,000,000,000 |" in printed
    assert "| 16,384 |" in printed
    told = f"before\n<!-- scale -->\n{printed}<!-- end of scale -->\nbehind\n"
    assert (tmp_path / "index.md").read_text() == told
    report = json.loads(figures.read_text())
    assert set(report["environment"]) >= {"date", "python", "torch", "numpy", "midepoch", "cores", "memory_gibibytes"}
    assert {(case["size"], case["world_size"]) for case in report["cost"]["per_index"]} == {
        (10**4, 1), (10**6, 1), (10**9, 1), (10**12, 1), (10**12, 8), (10**12, 1024), (10**12, 16384)
    }  # fmt: skip
    assert all(len(case["nanoseconds"]) == 1 and case["kibibytes"] < 1024 for case in report["cost"]["per_index"])
    assert report["coverage"]["windows"]["windows"] == 4
