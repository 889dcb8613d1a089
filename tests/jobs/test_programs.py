"""A program in the shape of pytorch/examples: how little changes in it, and that it survives being killed.

`tests/jobs/programs/NAME.py` is a program with midepoch, and `NAME.diff` what was changed in one as people write them.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import midepoch
from midepoch.testing import digest
from support import forking, jobs
from support.places import ROOT

PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "docs" / "trainers.md"


@pytest.mark.parametrize("name", ["imagenet", "torchft_ddp"])  # test_torchft.py runs the second one, with a lighthouse
def test_a_diff_of_six_lines_leads_to_the_program(name: str) -> None:
    """From one without midepoch. A line that replaces another counts once, as one that is added or taken away does."""
    after, diff = (PROGRAMS / f"{name}.py").read_text().splitlines(), (PROGRAMS / f"{name}.diff").read_text()
    before, reached = list[str](), 0
    for hunk in re.split(r"^@@ ", diff.rstrip("\n"), flags=re.MULTILINE)[1:]:
        header, *lines = hunk.splitlines()
        begins = int(header.partition("+")[2].partition(",")[0]) - 1
        new = [line[1:] for line in lines if line[:1] != "-"]
        assert after[begins : begins + len(new)] == new, hunk
        before += [*after[reached:begins], *(line[1:] for line in lines if line[:1] != "+")]
        reached = begins + len(new)
    text = "\n".join([*before, *after[reached:]])
    assert "midepoch" not in text
    assert list(difflib.unified_diff(text.splitlines(), after, n=1, lineterm=""))[2:] == diff.splitlines()
    compile(text, name, "exec")
    blocks = re.findall(r"(?:^[-+].*\n?)+", diff, re.MULTILINE)
    assert 3 <= sum(max(len(re.findall(rf"^\{sign}", each, re.MULTILINE)) for sign in "+-") for each in blocks) <= 6
    assert all(len(line) <= 121 and ";" not in line for line in diff.splitlines() if line.startswith("+"))
    assert f"```diff\n{diff}```\n" in PAGE.read_text(), f"{PAGE} should show:\n{diff}"


# SIGTERM before the last step of an epoch.
ENDED = """
import os, signal
from torch.optim.optimizer import register_optimizer_step_pre_hook
left = iter(range(7, -1, -1))
def before_a_step(*arguments):
    if next(left, None) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
register_optimizer_step_pre_hook(before_a_step)
"""


def test_the_body_of_the_docs_survives_an_empty_pass(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("### Variables of the loop")[2]
    body = section.partition("```python\n")[2].partition("```")[0]

    def said(code: str) -> list[str]:
        return forking.run(["-c", code], cwd=tmp_path, modules=jobs.MODULES, check=True).stdout.splitlines()

    assert said(ENDED + body) == []
    resumed = said(body)
    shutil.rmtree(tmp_path / "run")
    first, second = said(body)
    assert resumed == [first.partition("last")[0] + "last done before", second]


def test_a_run_that_begins_from_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    for done, expected in ((2, [2, 3]), (1, [4])):  # the second time, the snapshot counts
        loader = midepoch.wrap([[1], [2]], seed=0)
        loader.seek(epoch=done)
        with midepoch.Snapshot(tmp_path / "snapshot.pt", every=1, data=loader) as snapshot:
            seen = []
            for epoch in snapshot.epochs(max(expected) + 1):
                assert loader.epoch == epoch
                seen.append(epoch)
                for _ in loader:
                    snapshot.step()
        assert seen == expected


def trained(folder: Path, *killed_at: int) -> Any:
    """The last checkpoint of two ranks, which are killed with their agent when so many steps were saved, each time."""
    folder.mkdir()
    program = [str(PROGRAMS / "imagenet.py"), "--epochs=9"]  # 72 steps, so that it does not end before it is killed

    def saved() -> Any:
        path = folder / "run.pt"
        return torch.load(path, weights_only=True)["steps"] if path.exists() else 0

    for steps in killed_at:
        job = jobs.torchrun(2, program, cwd=folder, new_session=True)
        jobs.wait_for(lambda least=steps: saved() >= least, job)  # type: ignore[misc]
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    job = jobs.torchrun(2, program, ["--monitor-interval=0.05"], cwd=folder)
    said = job.communicate()[0]
    assert job.returncode == 0, said[-4000:]
    return torch.load(folder / "checkpoint.pth.tar", weights_only=False)


def test_a_program_is_killed_under_torchrun(tmp_path: Path) -> None:
    """In its first and second epoch; weights, momenta and learning rates are the same, bit for bit."""
    whole, killed = trained(tmp_path / "whole"), trained(tmp_path / "killed", 3, 9)
    assert whole["epoch"] == killed["epoch"] == 9
    for name in ("state_dict", "optimizer"):
        assert digest(killed[name]) == digest(whole[name]), name
