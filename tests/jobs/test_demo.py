"""`make demo`: real jobs, really killed; and that the demonstration can fail."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from support.places import ROOT

sys.path.insert(0, str(ROOT / "examples"))

# Looked for rather than imported: each process that collects would import it.
if importlib.util.find_spec("sklearn") is None or importlib.util.find_spec("typer") is None:
    pytest.skip("needs midepoch[demo]", allow_module_level=True)

from demo.__main__ import main
from demo.backends import BACKENDS
from demo.compare import Comparison, Run, Segment, read_segment
from demo.orchestrate import DemoError, Settings, prepare
from PIL import Image

from support import forking
from support.jobs import MODULES

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "examples")}
_SMALL = ("--images=288", "--num-workers=1", "--every=3", "--seed=5")


def run_demo(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Torchrun's processes and the ranks are forked; what is to be interrupted, below, is as users start it."""
    python = forking.executable(*MODULES)
    code = f"import sys; sys.executable = {python!r}; from demo.__main__ import main; main()"
    command, env = ["-c", code, f"--output={output}", *_SMALL, *options], {**ENVIRONMENT, "PYTHON_EXEC": python}
    return forking.run(command, modules=MODULES, env=env, timeout=500)


def processes_of(output: Path) -> list[str]:
    """Command lines of the processes that work in this folder."""
    lines = (" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(output) in line]


def test_killed_runs_lose_repeat_and_change_nothing(tmp_path: Path) -> None:
    output = tmp_path / "output"
    finished = run_demo(output, "--kills=1", "--world-sizes=1,2")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads((output / "result.json").read_text())
    assert result["exact"] is True
    runs = {run["name"]: run for run in result["runs"]}
    assert list(runs) == ["uninterrupted", "same world", "other worlds"]
    for run in runs.values():
        assert (run["samples_lost"], run["samples_repeated"], run["batches_done_again_differing"]) == (0, 0, 0)
        assert run["batches_equal"] == run["batches"] == 24  # 2 epochs of 288 images in batches of 24
        assert run["problems"] == []
    for name, sizes in (("same world", [1, 1]), ("other worlds", [1, 2])):
        first, second = runs[name]["segments"]
        assert [first["world_size"], second["world_size"]] == sizes
        assert second["kill"] is None and second["first_step"] <= first["kill"]["reached_step"] + 1 < 24
        assert second["first_step"] % 3 == 0  # a snapshot every 3 batches, 12 an epoch
        assert (second["epoch"], second["position"]) == (second["first_step"] // 12, second["first_step"] % 12 * 24)
        assert second["loader_seconds"] < second["start_seconds"]
    same, other, losses = runs["same world"], runs["other worlds"], runs["uninterrupted"]["losses"]
    assert same["losses"] == losses and len(losses) == same["losses_equal"] == 24
    assert same["one_world"] and same["weights_equal"] and not other["one_world"]
    assert other["losses_equal"] == other["losses_comparable"] == other["segments"][1]["first_step"]
    assert other["losses"] == pytest.approx(losses, abs=1e-3) and losses[-1] < losses[0]

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
    command = [sys.executable, "-m", "demo", f"--output={output}", *_SMALL, "--kills=1", "--world-sizes=2"]
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


def write_log(folder: Path, world_size: int, first_step: int, batches: str) -> Segment:
    """A segment of batches such as "ab cd", each letter a sample; 'a' is image 0. Its ranks share them equally."""
    folder.mkdir(parents=True)
    for rank in range(world_size):
        events: list[dict[str, Any]] = [{"event": "start", "step": first_step, "epoch": 0, "position": 0, "pid": 1}]
        for step, samples in enumerate(batches.split(), first_step):
            part = samples[len(samples) * rank // world_size : len(samples) * (rank + 1) // world_size]
            events.append({
                "event": "batch", "step": step, "epoch": 0, "indices": [ord(each.lower()) - ord("a") for each in part],
                "digests": list(part), "loss": float(step), "waited": 0.1, "time": 1.0,
            })  # fmt: skip
        lines = [*map(json.dumps, events), '{"event": "batch", "st']  # cut off by the kill
        (folder / f"rank-{rank}.jsonl").write_text("\n".join(lines))
    return read_segment(folder, world_size, started=0.0)


@pytest.mark.parametrize(("first", "second_from", "second", "problems"), [
    ("ab cd", 1, "cd", []),  # a batch after the snapshot does not count twice
    ("ab", 1, "cc", ["1 samples lost", "1 samples repeated", "1 global batches that differ"]),
    ("ab", 1, "dc", ["1 global batches that differ"]),
    ("ab", 1, "cD", ["1 global batches that differ"]),  # image 3 with other pixels
    ("ab", 1, "", ["2 samples lost", "1 global batches that differ"]),
    ("ab", 2, "cd", ["2 global batches that differ", "1 losses that differ"]),
    ("ab cD", 1, "cd", ["1 batches that were not the same when they were done again"]),
    ("ab", 1, "cd ab", ["2 samples repeated", "1 global batches that differ"]),
])  # fmt: skip
def test_what_went_wrong_is_named(
    tmp_path: Path, first: str, second_from: int, second: str, problems: list[str]
) -> None:
    """Against an uninterrupted run of two batches and four images."""
    segments = [write_log(tmp_path / "0", 1, 0, first), write_log(tmp_path / "1", 2, second_from, second)]
    found = Comparison(Run(segments), Run([write_log(tmp_path / "reference", 1, 0, "ab cd")]), images=4, epochs=1)
    assert len(found.problems) == len(problems)
    assert all(text.startswith(start) for text, start in zip(found.problems, problems, strict=True))
    if not problems:
        assert [batch.step for batch in found.run.done_again] == [1]
        assert (found.comparable_losses, found.equal_losses) == (1, 1)


@pytest.mark.long  # each backend's own tests resume it exactly
@pytest.mark.parametrize("name", ["webdataset", "dali", "ffcv"])
def test_every_backend_is_killed_and_exact(name: str, tmp_path: Path) -> None:
    for module in BACKENDS[name].needs:
        pytest.importorskip(module, reason=f"needs midepoch[{name}]")
    finished = run_demo(tmp_path / "output", f"--backend={name}", "--kills=1", "--world-sizes=2")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert json.loads((tmp_path / "output" / "result.json").read_text())["exact"] is True


@pytest.mark.parametrize(("option", "missing", "named"), [
    ("--backend=nonsense", "", "torch"), ("--world-sizes=2,x", "", "2,x"), ("--world-sizes=0", "", "world sizes"),
    ("--kills=-1", "", "kills"), ("--kills=1000", "", "1000 kills need"), ("--images=2000", "", "1797"),
    *(("", name, f"midepoch: this command needs {name}: pip install 'midepoch[demo]'")
      for name in ("rich", "matplotlib", "PIL", "sklearn")),
])  # fmt: skip
def test_what_cannot_begin_is_refused_by_name(
    option: str, missing: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["demo", f"--output={tmp_path / 'output'}", *filter(None, [option])])
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
