"""The comparison with midepoch's peers: it runs, its answers are measured, and what has become worse is found."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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

BATCHES = compare.QUICK.batches
EVERYTHING = {each for question in compare.MEASURED for each in compare.distributions(question, list(peers.PEERS))}
PLAIN, OURS, TORCHDATA = NAMES = ("plain DataLoader", "midepoch DataLoader", "torchdata")


measured = pytest.mark.long  # it measures for half a minute what no other part of midepoch depends on


def started(*options: str) -> forking.Program:
    """The comparison, whose servers are forked too."""
    script = Path(compare.__file__)
    code = f"import runpy, sys; sys.executable = {forking.executable()!r}; sys.argv[0] = {str(script)!r}; "
    code += f"sys.path.insert(0, {str(script.parent)!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
    return forking.Program(["-c", code, "--quick", *options], modules=["matplotlib.pyplot"])


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Times in one folder; what becomes of an epoch, measured beside it, in a folder in that one."""
    folder = tmp_path_factory.mktemp("benchmarks")
    times = [part for each in ("overhead", "resume", "state") for part in ("--question", each)]
    calls = [
        ("--only", ",".join(NAMES), "--output", str(folder), *times),
        ("--only", f"{OURS},{TORCHDATA}", "--output", str(folder / "exactness"), "--question", "exactness"),
    ]
    running = [started(*call) for call in calls]
    for process, place in zip(running, (folder, folder / "exactness"), strict=True):
        said, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors[-3000:]
        assert (place / "results.md").read_text().strip() == said.strip()
    return folder


@pytest.fixture(scope="module")
def results(output: Path) -> dict[str, Any]:
    times, others = (json.loads((output / name).read_text()) for name in ("results.json", "exactness/results.json"))
    return {**times, "exactness": others["exactness"]}


@measured
def test_markdown_and_plots_are_written(output: Path) -> None:
    said = (output / "results.md").read_text()
    assert all(f"| {compare.label(name)} |" in said for name in NAMES)
    assert said.count("A wrapped DataLoader") == 3, "a sentence of result over each chart"
    for name in ("first_batch_progress", "first_batch_size", "overhead"):
        assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((compare.OUTPUT / "results.json").read_text())
    return found


def test_the_page_is_that_of_the_results() -> None:
    """If this fails: benchmarks/compare.py --render."""
    page = compare.OUTPUT / "index.md"
    said = compare.markdown(published())
    assert said in page.read_text()
    assert page.read_text() == measuring.replaced(page, "comparison", said)


def test_a_sentence_of_result_stands_over_each_chart() -> None:
    rows = published()
    worst = max(float(row["ratio"]) for row in rows["overhead"] if row["peer"] == OURS and not row["workers"])
    said = compare.first_overhead(rows["overhead"])
    assert f"{worst:.2g} for draws" in said and said.count(" for ") == 3
    assert "of the 10 others, 10 lose" in compare.first_exactness(rows["exactness"])
    wrong = [{"peer": OURS, "question": "halved", "verdict": "loses 1, repeats 0 silently"}]
    assert compare.first_exactness(wrong).startswith("A wrapped loader is wrong; ")
    assert compare.first_resume([]) == compare.first_size([]) == compare.first_state([]) == ""


def test_the_page_and_the_plots_are_written_again_from_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = published()
    results["first_batch"] = [row | {"seconds": 0.0123} if row["seconds"] else row for row in results["first_batch"]]
    (tmp_path / "results.json").write_text(json.dumps(results))
    plotted: list[Path] = []
    monkeypatch.setattr(compare, "plot", lambda results, folder: plotted.append(folder))
    monkeypatch.setattr(sys, "argv", [compare.__file__, "--render", "--output", str(tmp_path)])
    compare.main()
    said = (tmp_path / "results.md").read_text()
    assert "its first batch 12.3 ms after a start, and 12.3 ms after a resume at 99% of 1,000,000 samples" in said
    assert plotted == [tmp_path]


def cells_of(page: str, name: str) -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [row[1:] for row in rows if row[0] == name]


def overhead_row(peer: str, **changed: Any) -> dict[str, Any]:
    row = {"peer": peer, "work": "integers", "workers": 0, "microseconds": 10.0, "lowest": 9.0, "highest": 11.0}
    return row | {"base": PLAIN, "ratio": 1.0, "low": 0.99, "high": 1.01} | changed


def test_each_ratio_is_printed_and_a_vague_one_is_marked() -> None:
    vague = overhead_row(TORCHDATA, ratio=1.006, low=0.9, high=1.1)
    page = compare.told_overhead([overhead_row(PLAIN), overhead_row(OURS, ratio=1.006, high=1.02), vague])
    assert cells_of(page, PLAIN) == [["10", "–"]]
    assert cells_of(page, OURS) == [["10; 1.01", PLAIN]]
    assert cells_of(page, "torchdata StatefulDataLoader") == [["10; ~1.01", PLAIN]]


@pytest.mark.parametrize("name", ["LitData", "Streaming", "DALI", "FFCV", "WebDataset"])
def test_a_loader_of_files_is_not_compared_with_one_in_memory(name: str) -> None:
    """Not even where a row was measured when it was."""
    page = compare.told_overhead([overhead_row(PLAIN), overhead_row(name)])
    assert cells_of(page, compare.label(name)) == [["10", "–"]]
    assert compare.with_bases([name]) == [name]


def test_tables_about_a_resume_say_who_is_resumed_by_hand() -> None:
    by_hand = {name for name in peers.PEERS if compare.label(name, resumed=True).endswith(", skipped by hand")}
    assert by_hand == {PLAIN, "FFCV", "WebDataset"}
    assert compare.label("Accelerate", resumed=True) == "Accelerate, skip_first_batches"
    assert not any("," in compare.label(name) for name in peers.PEERS)
    rows = [{"peer": name, "question": "halved", "verdict": "exact"} for name in (PLAIN, OURS)]
    page = compare.told_exactness(rows, 192)
    assert cells_of(page, f"{PLAIN}, skipped by hand") and cells_of(page, OURS)


def test_a_page_says_how_grain_read() -> None:
    grain = overhead_row("Grain MapDataset")
    assert "threads" not in compare.told_overhead([overhead_row(PLAIN)])
    assert "Grain read with its default, 16 threads." in compare.told_overhead([grain])
    assert "Grain reads integers without threads" in compare.told_overhead([compare.settled(grain)])
    assert compare.settled(overhead_row(PLAIN)) == overhead_row(PLAIN)


def test_rows_of_some_peers_take_the_place_of_theirs() -> None:
    before: dict[str, Any] = {
        "overhead": [overhead_row(PLAIN), overhead_row(OURS), overhead_row(TORCHDATA)],
        "state": [],
        "made": {"overhead": {"date": "2026-01-01", "commit": "before", "plan": {}}, "state": {}},
    }
    made = {"overhead": {"date": "2026-01-02", "commit": "now", "plan": {}}}
    again = [overhead_row(OURS, microseconds=20.0), overhead_row(OURS, workers=2)]
    found = compare.merged(before, {"overhead": again, "made": made})
    assert found["overhead"] == [overhead_row(PLAIN), *again, overhead_row(TORCHDATA)]
    later = {OURS: {"date": "2026-01-02", "commit": "now"}}
    assert found["made"] == before["made"] | {"overhead": {**before["made"]["overhead"], "later": later}}
    whole = {"overhead": [*before["overhead"]], "made": made}
    assert compare.merged({"made": {}}, whole) == whole
    twice = compare.merged(found, {"overhead": [overhead_row(PLAIN)], "made": made})
    assert set(twice["made"]["overhead"]["later"]) == {PLAIN, OURS}
    facts = {"versions": {}, "machine": {"cores": 2, "memory_gib": 24, "gpu": "no GPU"}, "python": "3.11"}
    page = compare.told_made({"overhead": twice["made"]["overhead"] | facts})
    assert f"| overhead, {OURS} | 2026-01-02 | now | the same |" in page


def test_an_older_answer_that_does_not_name_the_processor_is_alike() -> None:
    now = compare.conditions("state", NAMES, compare.QUICK)
    assert now["machine"]["processor"] == measuring.processor()
    older = {name: value for name, value in now["machine"].items() if name != "processor"}
    assert compare.differing(now | {"machine": older}, now) == []
    assert compare.differing(now | {"machine": older | {"processor": "another"}}, now) == ["machine"]
    assert compare.differing(now | {"machine": older | {"cores": 0}}, now) == ["machine"]
    assert compare.differing(now | {"plan": {}}, now) == ["plan"]
    more = now | {"versions": now["versions"] | {"webdataset": "1"}}
    assert compare.differing(more, now) == []


def test_questions_that_were_not_asked_again_keep_their_answers(tmp_path: Path) -> None:
    made = {
        question: {"date": "2026-01-01", "commit": "before"} | compare.conditions(question, NAMES, compare.QUICK)
        for question in compare.MEASURED
    }
    answers = {kind.key: [f"{question} before"] for question, kind in compare.MEASURED.items()}

    def write(made: dict[str, Any]) -> None:
        (tmp_path / "results.json").write_text(json.dumps(answers | {"made": made}))

    def together(questions: list[str], plan: compare.Plan = compare.QUICK) -> dict[str, Any]:
        measured = {compare.MEASURED[question].key: ["now"] for question in questions}
        before = compare.kept(tmp_path, questions, NAMES, plan)
        return compare.together(before, measured | {"made": dict.fromkeys(questions, "now")})

    write(made)
    assert together(["overhead"]) == answers | {"overhead": ["now"], "made": made | {"overhead": "now"}}
    assert list(together(["overhead"])["made"]) == list(compare.MEASURED)
    assert compare.kept(tmp_path / "empty", ["overhead"], NAMES, compare.QUICK) == {"made": {}}
    more = replace(compare.QUICK, samples=3840)
    with pytest.raises(compare.Unlike, match=r"answer to exactness .* another plan$"):
        together(["overhead"], more)
    together(["exactness"], more)  # the others do not depend on it
    others: list[dict[str, Any]] = [{"python": "3.0"}, {"machine": {}}, {"versions": {"torch": "3"}}]
    for other in others:
        write(made | {"state": made["state"] | other})
        with pytest.raises(compare.Unlike, match=f"answer to state .* another {next(iter(other))}$"):
            together(["overhead"])
        together(["overhead", "state"])
    write({})
    with pytest.raises(compare.Unlike, match="another python, versions, machine, plan"):
        together(["overhead"])


@measured
def test_it_is_said_when_from_what_and_by_which_plan_a_question_was_measured(output: Path) -> None:
    made = json.loads((output / "results.json").read_text())["made"]
    assert list(made) == ["overhead", "resume", "state"]
    batches = [list(each) for each in BATCHES]
    assert made["overhead"]["plan"] == {"rounds": 2, "stretches": 2, "seconds": 1.5, "batches": batches}
    assert set(made["overhead"]["versions"]) == {"torch", "midepoch", "torchdata"}
    row = next(line for line in (output / "results.md").read_text().splitlines() if line.startswith("| overhead |"))
    assert f"| {made['overhead']['date']} | {made['overhead']['commit']} | rounds 2; stretches 2; seconds 1.5; " in row
    assert "lightning" in compare.conditions("boring", NAMES, compare.QUICK)["versions"]


@measured
def test_times_and_sizes_are_sane(results: dict[str, Any]) -> None:
    assert len(results["overhead"]) == 3 * 3 * 2
    assert all(0 < row["lowest"] <= row["microseconds"] <= row["highest"] for row in results["overhead"])
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in results["overhead"])
    assert all(0 < row["seconds"] < 5 and not row["why"] for row in results["first_batch"])
    progress = {row["progress"] for row in results["first_batch"]}
    assert progress == {0, 0.25, 0.5, 0.75, 0.9, 0.99}
    pictures = [(row["peer"], row["workers"]) for row in results["first_batch"] if row["work"] == "jpeg"]
    assert sorted(pictures) == sorted(2 * [(name, workers) for name in NAMES for workers in (0, 2)])
    size = {row["peer"]: row["bytes"] for row in results["state"]}
    assert size[PLAIN] < size[OURS] < size[TORCHDATA]


def test_processes_that_need_the_same_files_write_them_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    monkeypatch.setattr(peers, "CACHE", tmp_path / "cache")
    with ThreadPoolExecutor(3) as together:
        asked = [together.submit(peers.PEERS["WebDataset"]().folder, peers.Spec()) for _ in range(3)]
        folder = {each.result() for each in asked}.pop()
    assert sorted(path.suffix for path in folder.iterdir()) == [".tar"] * peers.SHARDS
    assert {path.name for path in folder.parent.iterdir()} <= {folder.name, f"{folder.name}.lock"}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["webdataset"]  # no draft


def test_students_distribution() -> None:
    """Printed in every table of it: 3, 6 and 14 degrees of freedom, and many."""
    found = [measuring.student(freedom) for freedom in (3, 6, 14, 10**6)]
    assert found == pytest.approx([3.182, 2.447, 2.145, 1.960], rel=1e-2)


def verdicts(results: dict[str, Any], name: str) -> dict[str, str]:
    return {row["question"]: row["verdict"] for row in results["exactness"] if row["peer"] == name}


@measured
def test_midepoch_is_exact_or_refuses(results: dict[str, Any]) -> None:
    found = verdicts(results, OURS)
    assert found.pop("longer") == "refused: StateMismatchError"
    assert set(found.values()) == {"exact"} and len(found) == len(compare.QUESTIONS) - 1


@measured
def test_what_others_lose_is_found_by_measuring(results: dict[str, Any]) -> None:
    found = verdicts(results, TORCHDATA)
    assert found["world 2 to 3"].startswith("loses ") and found["longer"].startswith("loses ")
    assert found["last batch"].startswith("0 batches, then ")
    assert found["random"] == found["random workers"] == "other numbers"


def test_a_verdict_counts_what_is_lost_and_repeated() -> None:
    assert compare.verdict([0, 1], [2, 3], [2, 3], 4) == "exact"
    assert compare.verdict([0, 1], [3, 2], [2, 3], 4) == "complete, another order"
    assert compare.verdict([0, 1], [3, 2], [2, 3], 4, block=2) == "exact"
    assert compare.verdict([0, 1], [1, 2], [2, 3], 4) == "loses 1, repeats 1 silently"


@measured
def test_forged_states_equal_real_ones(results: dict[str, Any]) -> None:
    """A server refuses to go on where one does not; with workers none is made up."""
    assert all(row["forged"] == (not row["workers"]) for row in results["first_batch"])


def test_a_wrong_forged_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    server = peers.Server(peers.Plain())
    assert server.check_forged(peers.Spec(size=320), 7)
    monkeypatch.setattr(peers.Plain, "forge", lambda self, spec, batches: {"epoch": 0, "batches": batches + 1})
    with pytest.raises(AssertionError, match="not what a real one is"):
        server.check_forged(peers.Spec(size=320), 7)


def scaled(results: dict[str, Any], factor: float) -> dict[str, Any]:
    """The same, with ratios of midepoch's that are so many times as high."""
    changed: dict[str, Any] = json.loads(json.dumps(results))
    for row in changed["overhead"]:
        row |= {key: row[key] * factor for key in ("ratio", "low", "high")}
    for row in changed["first_batch"]:
        row["times"] = [time * factor if row["progress"] == 0.9 else time for time in row["times"]]
    return changed


@measured
def test_what_has_become_worse_is_named(results: dict[str, Any], tmp_path: Path) -> None:
    asked = ["overhead", "resume", "exactness"]
    generous = scaled(results, 100)
    assert compare.worse(generous, results, [OURS], asked) == []
    row = next(row for row in generous["overhead"] if (row["peer"], row["work"], row["workers"]) == (OURS, "jpeg", 0))
    row |= {"ratio": 0.01, "low": 0.01, "high": 0.01}
    (tmp_path / "results.json").write_text(json.dumps(generous))
    call = ("--check", "--question", "overhead", "--only", OURS, "--rounds", "4", "--output", str(tmp_path))
    job = started(*call)
    said, errors = job.communicate(timeout=300)
    assert job.returncode == 1, errors[-3000:]
    assert said.startswith(f"{OURS}, jpeg, 0 workers, ") and said.count("\n") == 1
    named = {line.split(":")[0] for line in compare.worse(scaled(results, 0.001), results, [OURS], asked)}
    assert f"{OURS}, first batch at 90 % to that at 0 %" in named


def test_one_that_is_compared_with_another_than_the_plain_loader_can_be_measured_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextlib.contextmanager
    def servers(names: list[str], *_: Any) -> Iterator[list[SimpleNamespace]]:
        yield [SimpleNamespace(name=name) for name in names]

    monkeypatch.setattr(compare, "servers", servers)
    monkeypatch.setattr(compare, "stretches", lambda live, *_: {s.name: [1.0 + s.name.startswith("m")] for s in live})
    rows = compare.overhead(["midepoch Streaming"], compare.QUICK)
    assert {(row["peer"], row["base"], row["ratio"]) for row in rows} == {("midepoch Streaming", "Streaming", 2.0)}


@measured
def test_each_kind_of_worsening_is_named(results: dict[str, Any]) -> None:
    asked = ["overhead", "resume", "exactness"]
    # Without what the machine did meanwhile: times that hardly differ, then some that are 30 times longer.
    steady: dict[str, Any] = json.loads(json.dumps(results))
    for row in steady["first_batch"]:
        row["times"] = [1 + place / 1000 for place in range(len(row["times"]))]
    slow: dict[str, Any] = json.loads(json.dumps(steady))
    for row in slow["first_batch"]:
        row["times"] = [30 * time for time in row["times"]] if row["peer"] == OURS else row["times"]
    assert [line.split(":")[0] for line in compare.worse(steady, slow, [OURS], asked)] == [
        f"{OURS}, first batch at 0 % to that of {PLAIN}"
    ]
    wrong: dict[str, Any] = json.loads(json.dumps(results))
    next(row for row in wrong["exactness"] if row["peer"] == OURS)["verdict"] = "loses 1, repeats 0 silently"
    assert len(compare.worse(results, wrong, [OURS], asked)) == 1
    for key in ("overhead", "first_batch", "exactness"):
        missing = {**results, key: [row for row in results[key] if row["peer"] != OURS]}
        told = compare.worse(results, missing, [OURS], asked)
        assert told and all("not measured" in line for line in told), key


def without(results: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Results whose rows do not have these yet."""
    return {
        name: [{key: value for key, value in row.items() if key not in keys} for row in rows]
        for name, rows in results.items()
        if name not in keys
    }


@measured
def test_what_was_not_published_is_named_and_not_called_worse(results: dict[str, Any]) -> None:
    asked = ["overhead", "resume", "exactness"]
    now = {**results, "made": {each: {"plan": {"limit": 60, "rounds": 5}} for each in asked}}
    assert compare.beyond_comparison(now, now, [OURS], asked) == []
    fewer = {**now, "overhead": [row for row in results["overhead"] if row["work"] != "draws"]}
    assert compare.worse(fewer, now, [OURS], asked) == []
    told = compare.beyond_comparison(fewer, now, [OURS], asked)
    assert [line.split(", time")[0] for line in told] == [f"{OURS}, draws, {workers} workers" for workers in (0, 2)]
    made = {**now["made"], "resume": {"plan": {"limit": 10, "rounds": 7}}}
    assert compare.beyond_comparison({**now, "made": made}, now, [OURS], asked) == [
        "resume: published with another limit"
    ]
    formers: list[dict[str, Any]] = [{}, without(results, "made", "low", "times"), {"overhead": [], "first_batch": []}]
    for older in formers:
        assert compare.worse({**older, "exactness": []}, now, [OURS], asked) == []
        told = compare.beyond_comparison({**older, "exactness": []}, now, [OURS], asked)
        assert told[0] == "overhead: what was published does not say by which plan"
        assert len(told) == 3 + 6 + 2 + len(compare.QUESTIONS)


def test_limits_that_were_met_are_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib.axes import Axes

    said: list[tuple[float, float, str]] = []
    monkeypatch.setattr(Axes, "text", lambda axes, x, y, text, **keywords: said.append((x, y, text)))

    def row(peer: str, size: int, seconds: float | None, why: str = "") -> dict[str, Any]:
        return {"peer": peer, "size": size, "seconds": seconds, "why": why}

    rows = [
        row(PLAIN, 10, 1.0), row(PLAIN, 100, None, "more than 60 s"), row(PLAIN, 1000, None, "more than 60 s"),
        row(TORCHDATA, 10, 2.0), row(TORCHDATA, 100, None, "more than 8 GiB"), row(OURS, 100, None, "not written"),
    ]  # fmt: skip
    compare.plot_lines(rows, "size", 60, "", "", tmp_path / "plot.png")
    assert said == [(100, 60, "> 60 s"), (100, 90, "> 8 GiB")]


def test_a_ratio_has_grown_beyond_both_errors_and_a_tenth() -> None:
    exact, vague = Interval(1, 0.99, 1.01), Interval(1, 0.8, 1.25)
    assert compare.grown(Interval(1.12, 1.10, 1.14), exact)
    assert not compare.grown(Interval(1.09, 1.08, 1.10), exact)
    assert not compare.grown(Interval(1.12, 1.10, 1.14), vague)
    assert compare.grown(Interval(1.5, 1.4, 1.6), vague)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rounds", "1"], "at least 3"),
        (["--check", "--only", "torchdata"], "name one of its loaders"),
        (["--check", "--question", "boring"], "nothing to compare for boring"),
        (["--check", "--output", "nowhere"], "there is no nowhere"),
        (["--only", "plain"], "no such peer"),
        pytest.param(
            ["--only", "torchdata", "--output", str(compare.OUTPUT)], "choose an empty folder",
            marks=pytest.mark.skipif(not all(map(compare.installed, EVERYTHING)), reason="a peer is not installed"),
        ),
        pytest.param(
            ["--question", "state", "--output", str(compare.OUTPUT)], "choose an empty folder",
            marks=pytest.mark.skipif(not all(map(compare.installed, EVERYTHING)), reason="a peer is not installed"),
        ),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [compare.__file__, "--quick", *options])
    with pytest.raises(SystemExit) as end:
        compare.main()
    assert end.value.code == 2 and said in capsys.readouterr().err
