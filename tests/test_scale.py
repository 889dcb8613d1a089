"""benchmarks/scale.py: that its check of coverage finds what is broken, that its model is right, that it runs."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from midepoch import ResumableSampler, reseal
from midepoch.order import EpochOrder, Shuffled
from midepoch.reading import indexed
from midepoch.world import Share

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import scale

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


def lose_one(share: Share) -> Iterator[tuple[int, int]]:
    """As midepoch.reading.indexed.spans, but the last rank gets one position less of its second batch."""
    for step in range(share.steps):
        start, stop = share.span(step)
        yield start, stop - (step == 1 and share.world.rank == share.world.world_size - 1)


def swap_two(share: Share) -> Iterator[tuple[int, int]]:
    """As midepoch.reading.indexed.spans, but rank 3 gets in its third batch what rank 4 gets."""
    for step in range(share.steps):
        start, stop = share.span(step)
        more = stop - start if step == 2 and share.world.rank == 3 else 0
        yield start + more, stop + more


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


@pytest.mark.parametrize(("spans", "what"), [(lose_one, "unequal"), (swap_two, "not the indices")])
def test_a_wrong_share_is_found(spans: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "spans", spans)
    with pytest.raises(SystemExit, match=f"not covered.*{what}"):
        scale.check_window(Shuffled(SIZE), END, RANKS, False)


def test_a_wrong_tail_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Share, "_rest", lambda share: (0, 0))
    with pytest.raises(SystemExit, match="indices in place of"):
        scale.check_window(Shuffled(SIZE), END, RANKS, False)


def test_small_epochs_are_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ResumableSampler.load_state_dict

    def watched(sampler: ResumableSampler, state: scale.State) -> None:
        assert sampler.world is not None
        assert sampler.world.world_size != state["world_size"]
        load(sampler, state)

    monkeypatch.setattr(ResumableSampler, "load_state_dict", watched)
    counts = scale.check_small(12, 3, (1, 2))
    assert counts["epochs"] == 12 * 3 * 2 * 2
    assert counts["resumed"] > 100


def test_small_epochs_with_a_wrong_index_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "Shuffled", lambda size: Broken(size, 2, 4) if size == 5 else Shuffled(size))
    with pytest.raises(SystemExit, match="not covered: 5 samples: the order is no permutation"):
        scale.check_small(6, 2)


def test_small_epochs_with_a_wrong_share_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "spans", swap_two)
    with pytest.raises(SystemExit, match="not covered: 9 samples, 4 ranks, batches of 1, drop_last=False"):
        scale.check_small(16, 5)


def test_a_resume_at_the_wrong_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ResumableSampler.load_state_dict

    def one_late(sampler: ResumableSampler, state: scale.State) -> None:
        load(sampler, reseal({**state, "position": min(state["position"] + 1, state["size"])}))

    monkeypatch.setattr(ResumableSampler, "load_state_dict", one_late)
    with pytest.raises(SystemExit, match="cut at 1 and continued on"):
        scale.check_small(6, 3)
    with pytest.raises(SystemExit, match="not the indices"):
        scale.check_window(Shuffled(SIZE), SIZE // 2, RANKS, False)


# --- goodput ---


def simulated(failures_per_hour: float, interval: float, save: float, restart: float, times: int) -> list[float]:
    """Seconds from one checkpoint to the next, event by event."""
    generator, rate = random.Random(5), failures_per_hour / 3600
    durations = []
    for _ in range(times):
        clock, failure = 0.0, generator.expovariate(rate)
        end = interval + save
        while failure < end:
            clock = failure
            failure = clock + generator.expovariate(rate)
            end = clock + restart + interval + save
        durations.append(end)
    return durations


@pytest.mark.parametrize(
    ("failures_per_hour", "interval", "save", "restart"),
    [(0.5, 1800.0, 10.0, 60.0), (2.0, 1800.0, 30.0, 300.0), (10.0, 85.0, 10.0, 61.0), (1.0, 3600.0, 10.0, 1800.0)],
)
def test_the_model_is_what_a_simulation_gives(
    failures_per_hour: float, interval: float, save: float, restart: float
) -> None:
    durations = simulated(failures_per_hour, interval, save, restart, 40_000)
    error = statistics.stdev(durations) / math.sqrt(len(durations))
    expected = interval / scale.goodput(failures_per_hour, interval, save, restart)
    assert abs(statistics.mean(durations) - expected) < 3 * error
    assert error < 0.02 * expected  # so that the line above says something


def test_without_failures_only_saving_costs() -> None:
    assert scale.goodput(0, 1800, 10, 60) == 1800 / 1810
    assert scale.goodput(1e-9, 1800, 10, 60) == pytest.approx(1800 / 1810, rel=1e-6)


def test_few_failures_cost_the_restart_and_half_an_interval() -> None:
    per_failure = 60 + 1810 / 2
    assert 1810 / 1800 * scale.goodput(0.001, 1800, 10, 60) == pytest.approx(1 - per_failure * 0.001 / 3600, abs=1e-6)


def test_many_failures_do_not_overflow() -> None:
    assert scale.goodput(1e4, 1e6, 10, 1e6) == 0


@pytest.mark.parametrize("failures_per_hour", [0.01, 0.1, 1.0])
def test_youngs_interval_is_near_the_best(failures_per_hour: float) -> None:
    young = scale.optimum(failures_per_hour, 10)
    at_optimum = scale.goodput(failures_per_hour, young, 10, 60)
    best = max(scale.goodput(failures_per_hour, young * factor, 10, 60) for factor in np.geomspace(0.1, 10, 401))
    assert best - 2e-3 < at_optimum <= best
    assert scale.goodput(failures_per_hour, young / 3, 10, 60) < at_optimum - 2e-3


def test_a_loader_that_begins_its_epoch_anew_loses_half_an_epoch() -> None:
    job = scale.Job(restart=60, save=10, interval=1800, epoch=28800)
    again, exact = scale.Peer("again", None), scale.Peer("exact", 5.0)
    assert scale.goodput_of(again, 0.01, job, True) == scale.goodput_of(again, 0.01, job, False)
    assert scale.goodput_of(again, 0.01, job, True) == pytest.approx(1 - 0.01 * (28800 / 2 + 60) / 3600, abs=2e-3)
    assert scale.goodput_of(exact, 1, job, True) == scale.goodput(1, 1800, 10, 65)
    assert scale.goodput_of(exact, 1, job, False) == scale.goodput(1, math.sqrt(2 * 10 * 3600), 10, 65)


# --- measured resume times ---


def row(
    peer: str, progress: float, times: list[float], why: str = "", work: str = "jpeg", size: int = 1000, **more: int
) -> dict[str, Any]:
    return {"peer": peer, "work": work, "size": size, "progress": progress, "times": times, "why": why, **more}


def test_what_skipping_a_picture_costs_is_carried_on_to_half_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    rows = [
        row("skips", 0, [0.24, 0.25, 0.26]),
        row("skips", 0.9, [0.25 + 900 * 0.5]),  # too long to be measured more often
        row("skips", 0.9, [1e-6], work="integers", size=10**9),
        row("skips", 0, [1e-6], workers=2),
        row("skips", 0.9, [1e-6], workers=2),
        row("walks", 0, [0.10, 0.11, 0.12, 0.13]),
        row("walks", 0.9, [0.205, 0.215, 0.225, 0.235]),
        row("jumps", 0, [0.5, 0.5, 0.3, 0.5]),
        row("jumps", 0.9, [0.4, 0.6, 0.5, 0.6]),  # within the noise
        row("lucky", 0, [0.5, 0.6]),
        row("lucky", 0.9, [0.25, 0.35]),
        row("none", 0, [1.0]),
        row("none", 0.9, [], "it has no state"),
    ]
    path.write_text(json.dumps({"first_batch": rows, "other": 1}))
    found = scale.peers_in(path, 8000)
    assert [peer.label for peer in found] == [
        "skips: 2,000 s", "walks: 582 ms", "jumps: 500 ms", "lucky: 550 ms", "none: epoch again (it has no state)"
    ]  # fmt: skip
    expected = [0.25 + 4000 * 0.5, 0.115 + 4000 * 0.105 / 900, 0.5, 0.55, None]
    assert [peer.seconds for peer in found] == pytest.approx(expected)


def test_loaders_whose_lines_would_lie_on_each_other_share_one() -> None:
    def curve(label: str, seconds: float | None) -> dict[str, Any]:
        job, peer = scale.Job(restart=60, save=10, interval=1800, epoch=28800), scale.Peer(label, seconds)
        shares = [scale.goodput_of(peer, failures, job, False) for failures in scale.FAILURES]
        return {"label": label, "seconds": seconds, "optimum": shares}

    curves = [curve("again", None), curve("slow", 300), curve("fast", 0.02), curve("near", 0.4)]
    groups = [[each["label"] for each in group] for group in scale.alike(curves)]
    assert groups == [["fast", "near"], ["slow"], ["again"]]


@pytest.mark.parametrize("text", [None, "{}", '{"first_batch": []}'])
def test_without_measurements_times_are_assumed_and_say_so(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    peers = scale.peers_in(path, 10**6)
    assert [peer.seconds for peer in peers] == [0.01, 1, 10, 60, 600, 3600]
    assert all(peer.label.endswith(" (assumed)") for peer in peers)


# --- the script ---


def test_the_script_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times, figures, plot = (tmp_path / name for name in ("times.json", "figures.json", "goodput.png"))
    rows = [row("ours", 0, [0.5]), row("ours", 0.9, [0.5]), row("theirs", 0, [0.5]), row("theirs", 0.9, [], "no")]
    times.write_text(json.dumps({"first_batch": rows}))
    files = ["--json", str(figures), "--plot", str(plot), "--resume-times", str(times)]
    small = ["--rounds=1", "--indices=2000", "--ranks=16", "--windows=1", "--largest-size=5", "--largest-world=3"]
    scale.main([*small, *files])
    printed = capsys.readouterr().out
    assert "| 1,000,000,000,000 |" in printed
    assert "| 16,384 |" in printed
    assert "| theirs: epoch again (no) |" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(figures.read_text())
    assert set(report["environment"]) >= {"date", "python", "torch", "numpy", "midepoch", "cores", "memory_gibibytes"}
    assert {(case["size"], case["world_size"]) for case in report["cost"]["per_index"]} == {
        (10**4, 1), (10**6, 1), (10**9, 1), (10**12, 1), (10**12, 8), (10**12, 1024), (10**12, 16384)
    }  # fmt: skip
    assert all(len(case["nanoseconds"]) == 1 and case["kibibytes"] < 1024 for case in report["cost"]["per_index"])
    assert report["coverage"]["windows"]["windows"] == 4
    assert [peer["seconds"] for peer in report["goodput"]["peers"]] == [0.5, None]
