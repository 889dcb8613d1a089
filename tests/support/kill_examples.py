"""Run examples of trainers to the end, and once more with SIGKILL in the middle of an epoch and another start.

``python tests/support/kill_examples.py FOLDER SCRIPT...`` prints, as JSON, what each script's batches were in each run,
by the names that it gives them. Scripts run in processes forked from this one, after ``--import`` of what many of them
need, since that costs seconds each time.
"""

from __future__ import annotations

import argparse
import contextlib
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

sys.path.insert(0, str(Path(__file__).parents[1]))

LINE = re.compile(r"^batch (.+?): (.*)\n", re.MULTILINE)
sleep = time.sleep

Run = tuple[dict[str, str], int]  # batches by their names, and the exit status


def kill_with_children(pid: int) -> None:
    """As a scheduler ends a job."""
    family = psutil.Process(pid)
    for process in [family, *family.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def files_of(folder: Path) -> dict[Path, int]:
    """When each was changed, but those in which a script says what it does."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.stat().st_mtime_ns
    return {path: changed for path, changed in found.items() if not path.name.startswith("batches-")}


def run(script: Path, folder: Path, kill_after: int | None = None, in_a_save: bool = False) -> Run:
    """The batches that a script says it has trained on, and how it ended.

    It says so on its standard output, or in files that it names batches-*. It is killed after so many batches, or
    `in_a_save`: when a file in its folder appears or changes after that.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    there: dict[Path, int] | None = None
    said = folder.with_suffix(f".{time.time_ns()}")
    before = {path: path.read_text() for path in folder.glob("batches-*")}
    child = os.fork()
    if not child:
        become(script, folder, said, in_haste=kill_after is None)
    status = None
    while status is None:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        files = [path for path in (said, *folder.glob("batches-*")) if path.exists()]
        found = LINE.findall("".join(path.read_text().removeprefix(before.get(path, "")) for path in files))
        assert len(found) == len(dict(found)), "two batches of one run have the same name"
        if status is None and kill_after is not None and len(found) >= kill_after:
            if in_a_save and there is None:
                there = files_of(folder)
            if not in_a_save or there != files_of(folder):
                kill_with_children(child)
                kill_after = None
        sleep(0.001 if there else 0.01)
    return dict(found), status


def become(script: Path, folder: Path, said: Path, in_haste: bool) -> None:
    status = 1
    try:
        with said.open("w") as output, folder.with_suffix(".log").open("a") as log:
            os.dup2(output.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if in_haste:
            time.sleep = lambda seconds: sleep(float(seconds) / 100)  # nobody is to kill it
        sys.argv = [str(script), str(folder)]
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except BaseException:  # noqa: BLE001  what a process forked from this one must not fall out of
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def assert_went_on(name: str, whole: Run, behind: int = 0, **parts: Run) -> None:
    """A run that was killed, and the one after it, are together the one that was not.

    Checkpoints are three batches apart, and may be on their way for so many batches more: `behind`.
    """
    expected = whole[0]
    assert whole[1] == 0, name
    for killed, resumed in (("killed", "resumed"), ("killed in a save", "resumed after that")):
        if killed not in parts:
            continue
        (head, died), (tail, ended) = parts[killed], parts[resumed]
        assert (died, ended) == (-signal.SIGKILL, 0), f"{name}, {killed}: ended with {died} and {ended}"
        assert head.items() <= expected.items(), f"{name} gave other batches before it was {killed}"
        assert {**head, **tail} == expected, f"{name} gave other batches or left some out after it was {killed}"
        done, next_one = (int(next(iter(each)).split()[0]) for each in (reversed(head), tail))
        least = done - behind - (2 if killed == "killed" else 5)
        went_on = next_one % 3 == 1 and max(2, least) <= next_one <= done + 1
        assert went_on, f"{name} was {killed} after batch {done} and went on with batch {next_one}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("scripts", nargs="+", type=Path)
    parser.add_argument("--import", nargs="*", dest="modules", default=[])
    parser.add_argument("--kill-after", type=int, default=7, help="batches")
    parser.add_argument("--in-a-save", action="store_true", help="kill it once more, in the next save but one")
    options = parser.parse_args()
    for module in options.modules:
        importlib.import_module(module)
    report = {}
    for script in options.scripts:
        folder = options.folder / script.stem
        runs = {"whole": run(script, folder / "whole")}
        runs["killed"] = run(script, folder / "killed", options.kill_after)
        runs["resumed"] = run(script, folder / "killed")
        if options.in_a_save:
            runs["killed in a save"] = run(script, folder / "saving", options.kill_after, in_a_save=True)
            runs["resumed after that"] = run(script, folder / "saving")
        report[script.name] = runs
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
