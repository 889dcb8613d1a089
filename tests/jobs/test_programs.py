"""A program in the shape of pytorch/examples: how little changes in it, and that it survives being killed.

`tests/jobs/programs/NAME.py` is a program with midepoch, and `NAME.diff` what was changed in one as people write them.
program_job.py runs the program, unchanged, and writes down all that it does.
"""

from __future__ import annotations

import difflib
import re
import shutil
from pathlib import Path
from typing import Any

import program_job
import pytest

import midepoch
from support import forking, jobs
from support.places import ROOT

PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "docs" / "trainers.md"
Event = list[Any]
FED = "torchft_ddp"  # test_torchft.py runs it, with a lighthouse


# --- how little changes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["imagenet", FED])
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


# --- it survives -----------------------------------------------------------------------------------------------------


def test_the_body_of_the_docs_survives_an_empty_pass(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("### Variables of the loop")[2]
    (tmp_path / "body.py").write_text(section.partition("```python\n")[2].partition("```")[0])

    def said(log: str, *end: str) -> list[str]:
        command = [program_job.__file__, str(tmp_path / log), *end, str(tmp_path / "body.py")]
        return forking.run(command, cwd=tmp_path, modules=jobs.MODULES, check=True).stdout.splitlines()

    assert said("first", "signal", "8") == []
    resumed = said("second", "never", "1")
    shutil.rmtree(tmp_path / "run")
    first, second = said("whole", "never", "1")
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


def trained(folder: Path, where: str, number: int) -> list[list[Event]]:
    """What each of two ranks did, of which the first is killed, if that is where, and started again."""
    folder.mkdir()
    command = [program_job.__file__, str(folder / "log"), where, str(number), str(PROGRAMS / "imagenet.py")]
    process = jobs.torchrun(2, command, ["--max-restarts=1", "--monitor-interval=0.05"], cwd=folder)
    said = process.communicate()[0]
    assert process.returncode == 0, said[-4000:]
    return [jobs.noted(folder / f"log.{rank}") for rank in range(2)]


def test_a_program_is_killed_under_torchrun(tmp_path: Path) -> None:
    """Batches, learning rates, losses, weights and what the model gives, bit for bit."""
    undisturbed = trained(tmp_path / "whole", "never", 1)
    assert len({event[1][0] for event in undisturbed[0] if event[0] == "step"}) > 1, "learning rates"
    for rank, (events, whole) in enumerate(zip(trained(tmp_path / "killed", "batch", 13), undisturbed, strict=True)):
        tails = [at for at in range(len(events)) if events[at:] == whole[at - len(events) :]]
        assert tails, f"rank {rank} did something else"
        head = events[: tails[0]]
        assert head == whole[: len(head)] and len(head) >= len(whole) - (len(events) - tails[0]) > 0
