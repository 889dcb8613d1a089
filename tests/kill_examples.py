"""Run examples of trainers to the end, and once more with SIGKILL in the middle of an epoch and another start.

``python tests/kill_examples.py FOLDER SCRIPT...`` prints, as JSON, what each script's batches were in each run, by the
names that it gives them. Scripts run in processes forked from this one, after ``--import`` of what many of them need,
since that costs seconds each time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

import psutil

LINE = re.compile(r"^batch (.+?): (.*)\n", re.MULTILINE)
sleep = time.sleep

Run = tuple[dict[str, str], int]  # batches by their names, and the exit status


def run(script: Path, folder: Path, kill_after: int | None) -> Run:
    """The batches that a script says it has trained on, up to some number of them, and how it ended.

    It says so on its standard output, or in files that it names batches-*.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = folder.with_suffix(".resumed" if any(folder.iterdir()) else ".begun")
    before = {path: path.read_text() for path in folder.glob("batches-*")}
    child = os.fork()
    if not child:
        become(script, folder, said, in_haste=kill_after is None)
    status = None
    while status is None:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        files = [path for path in (said, *folder.glob("batches-*")) if path.exists()]
        text = "".join(path.read_text().removeprefix(before.get(path, "")) for path in files)
        found = LINE.findall(text)
        assert len(found) == len(dict(found)), "two batches of one run have the same name"
        if status is None and kill_after is not None and len(found) >= kill_after:
            family = psutil.Process(child)
            for process in [family, *family.children(recursive=True)]:
                process.send_signal(signal.SIGKILL)
            kill_after = None
        sleep(0.01)
    return dict(found), status


def become(script: Path, folder: Path, said: Path, in_haste: bool) -> None:
    status = 1
    try:
        with said.open("w") as output, folder.with_suffix(".log").open("a") as log:
            os.dup2(output.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if in_haste:
            time.sleep = lambda seconds: None  # nobody is to kill it
        sys.argv = [str(script), str(folder)]
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except BaseException:  # noqa: BLE001  what a process forked from this one must not fall out of
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def assert_went_on(name: str, whole: Run, killed: Run, resumed: Run) -> None:
    (expected, _), (head, died), (tail, _) = whole, killed, resumed
    assert (whole[1], died, resumed[1]) == (0, -signal.SIGKILL, 0), name
    assert {**head, **tail} == expected, f"{name} gave other batches or left some out after it was killed"
    assert head.items() <= expected.items(), f"{name} gave other batches before it was killed"
    assert 0 < len(head) < len(expected), name
    assert next(iter(expected)) not in tail, f"{name} began anew"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("scripts", nargs="+", type=Path)
    parser.add_argument("--import", nargs="*", dest="modules", default=[])
    parser.add_argument("--kill-after", type=int, default=7, help="batches")
    options = parser.parse_args()
    for module in options.modules:
        importlib.import_module(module)
    report = {}
    for script in options.scripts:
        folder = options.folder / script.stem
        runs = {"whole": run(script, folder / "whole", None)}
        runs["killed"] = run(script, folder / "killed", options.kill_after)
        runs["resumed"] = run(script, folder / "killed", None)
        report[script.name] = runs
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
