"""`make demo`: real jobs, really killed; and that the demonstration can fail."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.places import ROOT

sys.path.insert(0, str(ROOT / "examples"))

# Looked for rather than imported: each process that collects would import it.
if importlib.util.find_spec("sklearn") is None or importlib.util.find_spec("typer") is None:
    pytest.skip("needs midepoch[demo]", allow_module_level=True)

from demo.__main__ import main
from demo.backends import BACKENDS
from demo.compare import Comparison, Run, Segment, read_segment
from demo.images import SIDE, label_of, write_images
from demo.orchestrate import DemoError, Settings, prepare
from PIL import Image

from support import forking

# What every rank imports, the second when it makes its optimizer.
MODULES = ("torch.distributed.run", "torch._dynamo", "sklearn.datasets", "PIL.Image")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "examples")}
_SMALL = ("--images=480", "--num-workers=1", "--every=3", "--seed=5")


def run_demo(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Torchrun's processes and the ranks are forked; what is to be interrupted, below, is as users start it."""
    python = forking.executable(*MODULES)
    code = f"import sys; sys.executable = {python!r}; from demo.__main__ import main; main()"
    return forking.run(
        ["-c", code, f"--output={output}", *_SMALL, *options],
        modules=MODULES,
        env={**ENVIRONMENT, "PYTHON_EXEC": python},
        timeout=500,
    )


def processes_of(output: Path) -> list[str]:
    """Command lines of the processes that work in this folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [line for line in lines if str(output) in line]


# --- the real thing -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    output = tmp_path_factory.mktemp("demo") / "output"
    return output, run_demo(output, "--kills=1", "--world-sizes=1,2")


@pytest.fixture(scope="module")
def runs(shown: tuple[Path, subprocess.CompletedProcess[str]]) -> dict[str, dict[str, Any]]:
    output, finished = shown
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads((output / "result.json").read_text())
    assert result["exact"] is True
    return {run["name"]: run for run in result["runs"]}


def test_nothing_is_lost_repeated_or_different(runs: dict[str, dict[str, Any]]) -> None:
    assert list(runs) == ["uninterrupted", "same world", "other worlds"]
    for run in runs.values():
        assert (run["samples_lost"], run["samples_repeated"], run["batches_done_again_differing"]) == (0, 0, 0)
        assert run["batches_equal"] == run["batches"] == 40  # 2 epochs of 480 images in batches of 24
        assert run["problems"] == []


def test_each_run_was_killed_and_went_on(runs: dict[str, dict[str, Any]]) -> None:
    for name, sizes in (("same world", [1, 1]), ("other worlds", [1, 2])):
        segments = runs[name]["segments"]
        assert [segment["world_size"] for segment in segments] == sizes
        assert [segment["kill"] is None for segment in segments] == [False, True]
        for before, after in pairwise(segments):
            assert after["first_step"] <= before["kill"]["reached_step"] + 1 < 40
            assert after["first_step"] % 3 == 0  # a snapshot every 3 batches
            # 20 batches an epoch
            assert (after["epoch"], after["position"]) == (
                after["first_step"] // 20,
                after["first_step"] % 20 * 24,
            )
            assert after["loader_seconds"] < after["start_seconds"]


def test_with_one_world_size_losses_and_weights_are_equal(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["same world"]
    assert run["losses"] == runs["uninterrupted"]["losses"]
    assert len(run["losses"]) == run["losses_equal"] == 40
    assert run["one_world"] and run["weights_equal"]


def test_with_other_world_sizes_the_losses_stay_close(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["other worlds"]
    assert not run["one_world"]
    assert run["losses_equal"] == run["losses_comparable"] == run["segments"][1]["first_step"]
    assert run["losses"] == pytest.approx(runs["uninterrupted"]["losses"], abs=1e-3)
    assert run["losses"][-1] < run["losses"][0] / 2  # it learns


def test_the_plot_and_the_table_are_there_and_no_process_is_left(
    shown: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    output, finished = shown
    with Image.open(output / "loss.png") as plot:
        assert plot.format == "PNG"
        red, green, blue = np.asarray(plot.convert("RGB")).transpose(2, 0, 1)
    assert np.sum((red > 180) & (green < 80) & (blue < 80)) > 250  # two dashed lines, one for each kill
    assert "samples lost" in finished.stdout
    assert finished.stdout.count("SIGKILL to rank") + finished.stdout.count("SIGKILL to all") >= 2
    assert processes_of(output) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_interrupting_takes_all_processes_with_it(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "output"
    command = [sys.executable, "-m", "demo", f"--output={output}", *_SMALL, "--world-sizes=2"]
    # What a shell starts in the background ignores the interrupt, and so does what that starts.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=nowhere, stderr=nowhere, preexec_fn=heed) as demo:
        try:
            deadline = time.monotonic() + 300
            # The demonstration, torchrun and two ranks.
            while len(processes_of(output)) < 4:
                assert demo.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            demo.send_signal(number)
            assert demo.wait(300) == 128 + number
        finally:
            demo.kill()
    assert processes_of(output) == []


# --- what the comparison finds --------------------------------------------------------------------------------------


def write_log(folder: Path, world_size: int, first_step: int, batches: list[list[str]]) -> Segment:
    """A segment whose batches hold these samples, a letter each; 'a' is image 0. Its ranks share them equally."""
    folder.mkdir(parents=True)
    for rank in range(world_size):
        events: list[dict[str, Any]] = [{"event": "start", "step": first_step, "epoch": 0, "position": 0, "pid": 1}]
        for step, samples in enumerate(batches, first_step):
            size = len(samples) // world_size
            part = samples[rank * size : (rank + 1) * size]
            events.append(
                {
                    "event": "batch",
                    "step": step,
                    "epoch": 0,
                    "indices": [ord(sample[0].lower()) - ord("a") for sample in part],
                    "digests": part,
                    "loss": float(step),
                    "waited": 0.1,
                    "time": 1.0,
                }
            )
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (folder / f"rank-{rank}.jsonl").write_text(lines + '{"event": "batch", "st')  # cut off by the kill
    return read_segment(folder, world_size, started=0.0)


def compare(tmp_path: Path, first: list[list[str]], second_from: int, second: list[list[str]]) -> Comparison:
    """A run in two segments, of one rank and of two, against an uninterrupted one of two batches and four images."""
    reference = Run([write_log(tmp_path / "reference", 1, 0, [["a", "b"], ["c", "d"]])])
    run = Run([write_log(tmp_path / "0", 1, 0, first), write_log(tmp_path / "1", 2, second_from, second)])
    return Comparison(run, reference, images=4, epochs=1)


def test_batches_after_the_snapshot_do_not_count_twice(tmp_path: Path) -> None:
    comparison = compare(tmp_path, [["a", "b"], ["c", "d"]], 1, [["c", "d"]])
    assert comparison.problems == []
    assert [batch.step for batch in comparison.run.done_again] == [1]
    assert (comparison.comparable_losses, comparison.equal_losses) == (1, 1)


@pytest.mark.parametrize(
    ("first", "second_from", "second", "problems"),
    [
        (
            [["a", "b"]],
            1,
            [["c", "c"]],
            ["1 samples lost", "1 samples repeated", "1 global batches that differ"],
        ),
        ([["a", "b"]], 1, [["d", "c"]], ["1 global batches that differ"]),
        ([["a", "b"]], 1, [["c", "D"]], ["1 global batches that differ"]),  # image 3 with other pixels
        ([["a", "b"]], 1, [], ["2 samples lost", "1 global batches that differ"]),
        ([["a", "b"]], 2, [["c", "d"]], ["2 global batches that differ", "1 losses that differ"]),
        (
            [["a", "b"], ["c", "D"]],
            1,
            [["c", "d"]],
            ["1 batches that were not the same when they were done again"],
        ),
        ([["a", "b"]], 1, [["c", "d"], ["a", "b"]], ["2 samples repeated", "1 global batches that differ"]),
    ],
)
def test_what_went_wrong_is_named(
    tmp_path: Path, first: list[list[str]], second_from: int, second: list[list[str]], problems: list[str]
) -> None:
    found = compare(tmp_path, first, second_from, second).problems
    assert len(found) == len(problems)
    for text, start in zip(found, problems, strict=True):
        assert text.startswith(start)


def test_a_batch_that_a_rank_left_out_was_not_trained_on(tmp_path: Path) -> None:
    reference = Run([write_log(tmp_path / "reference", 2, 0, [["a", "b"], ["c", "d"]])])
    segment = write_log(tmp_path / "0", 2, 0, [["a", "b"], ["c", "d"]])
    log = tmp_path / "0" / "rank-1.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().split("\n")[:2]))
    assert segment.reached == 1
    torn = read_segment(tmp_path / "0", 2, started=0.0)
    assert torn.reached == 0
    assert Comparison(Run([torn]), reference, images=4, epochs=1).lost == 2


# One backend for the way of the images; each backend's own tests resume it exactly.
@pytest.mark.parametrize(
    "name", ["webdataset", *(pytest.param(name, marks=pytest.mark.long) for name in ("dali", "ffcv"))]
)
def test_every_backend_reads_the_images_and_goes_on_exactly(name: str, tmp_path: Path) -> None:
    """All that the demonstration asks of a backend; the jobs themselves are the same for each."""
    backend = BACKENDS[name]
    for module in backend.needs:
        pytest.importorskip(module, reason=f"needs midepoch[{name}]")
    size = 48
    folder = tmp_path / "images"
    labels = torch.tensor([label_of(path) for path in write_images(folder, size)])
    # In a process of its own, as in the demonstration: writers fork.
    prepare = "from pathlib import Path; from demo.backends import BACKENDS as found; import sys; "
    prepare += "found[sys.argv[1]].prepare(Path(sys.argv[2]))"
    forking.run(["-c", prepare, name, str(folder)], modules=MODULES, env=ENVIRONMENT, check=True)
    with backend.load(folder, 12, 5, 1) as loader:
        first = [backend.unpack(batch, labels) for batch in loader]
        second = [backend.unpack(batch, labels) for batch in loader]
    for epoch in (first, second):
        assert sorted(number for *_, numbers in epoch for number in numbers.tolist()) == list(range(size))
        for pixels, found, numbers in epoch:
            assert pixels.shape == (12, 1, SIDE, SIDE) and pixels.dtype == torch.float32
            assert torch.equal(found, labels[numbers])
    with backend.load(folder, 12, 5, 1) as loader:
        head = list(itertools.islice(loader, 2))
        state = loader.state_dict()
    assert len(head) == 2
    with backend.load(folder, 12, 5, 1) as loader:
        loader.load_state_dict(state)
        rest = [backend.unpack(batch, labels) for _ in range(2) for batch in loader]
    assert len(rest) == 6
    for batch, expected in zip(rest, first[2:] + second, strict=True):
        assert all(torch.equal(part, other) for part, other in zip(batch, expected, strict=True))


# --- settings, scenarios, folders -----------------------------------------------------------------------------------


def test_every_world_size_divides_the_global_batch(tmp_path: Path) -> None:
    for sizes, expected in (((2, 3, 1), 24), ((1,), 24), ((5,), 25), ((4, 6), 24), ((7, 5), 35), ((16,), 32)):
        settings = Settings(tmp_path, world_sizes=sizes, images=1000)
        assert settings.global_batch == expected
        assert settings.image_count == 1000 - 1000 % expected


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--backend=nonsense", "torch"),
        ("--world-sizes=2,x", "2,x"),
        ("--world-sizes=0", "world sizes"),
        ("--kills=-1", "kills"),
        ("--kills=1000", "1000 kills need"),
        ("--images=2000", "1797"),
    ],
)
def test_wrong_options_are_refused_by_name(
    tmp_path: Path,
    option: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", f"--output={tmp_path / 'output'}", option])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert named in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "output").exists()


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(DemoError, match="--output"):
        prepare(Settings(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


@pytest.mark.parametrize("module", ["rich", "matplotlib", "PIL", "sklearn"])
def test_a_missing_package_is_named_with_the_cure(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["demo", f"--output={tmp_path / 'output'}"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"midepoch: this command needs {module}: pip install 'midepoch[demo]'\n"
    assert not (tmp_path / "output").exists()


