"""Nothing is silent, and nothing a false alarm: each source of the table, saved here and resumed in another process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import forking, said, sources
from support.places import ROOT
from support.resuming import Resumed, Saved, save
from support.said import ROWS

RESUMED = [name for name, row in ROWS.items() if row.outcome != "found"]


@pytest.fixture(scope="module")
def rows() -> dict[str, tuple[Saved, list[Resumed]]]:
    """Each source: what this process has saved, and what another has made of it."""
    saved = {name: save(ROWS[name].make, 4) for name in RESUMED}
    states = {name: each.states for name, each in saved.items()}
    resumed = sources.in_processes(said.resume_all, (states, 7))[0]
    return {name: (saved[name], resumed[name]) for name in RESUMED}


@pytest.mark.parametrize("name", RESUMED)
def test_what_is_said_of_a_source_in_a_new_process(name: str, rows: dict[str, tuple[Saved, list[Resumed]]]) -> None:
    saved, resumed = rows[name]
    row = ROWS[name]
    goes_on = [each.batches == rest for each, rest in zip(resumed, saved.following, strict=True)]
    assert len(resumed) == 3 and all(saved.following)
    if row.outcome == "told":
        assert len(saved.told) == 1 and saved.answers[row.no] == "no", "before the first state can be used"
        assert not all(goes_on), "it is no false alarm"
        return
    if row.outcome == "believed" and "thread" in name and saved.told:
        return  # two passes may differ, as the threads run
    assert saved.told == [] and "no" not in saved.answers.values()
    if row.outcome == "exact":
        assert saved.told_in_all == [] and all(goes_on) and not any(each.error or each.told for each in resumed)
    elif row.outcome == "believed":
        assert saved.answers["exact_augmentations"] == "believed"
        assert not all(goes_on) or "thread" in name, "midepoch check finds it"
    else:
        # After a pass of unknown length the state is the next epoch's beginning, which no chain leads to.
        for each in resumed[::2]:
            assert each.error.startswith("SourceError: the source does not") and not each.batches


EXAMPLES = {
    "dataloader.py": "", "iterable.py": "", "several_loaders.py": "", "own_state.py": "torchdata",
    "grain_dataset.py": "grain", "hugging_face_dataset.py": "datasets", "litdata_loader.py": "litdata",
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_exact_and_nothing_is_said_of_them(name: str, tmp_path: Path) -> None:
    """Of all but those of trainers and of backends with tests of their own."""
    if EXAMPLES[name]:
        pytest.importorskip(EXAMPLES[name], reason=f"{EXAMPLES[name]} is not installed")
    run = forking.run([ROOT / "examples" / name, "data"], cwd=tmp_path, check=True)
    assert re.search("are bit-equal|each exactly once|none lost", run.stdout)
    told = [line for line in run.stderr.splitlines() if "MidepochWarning" in line]
    assert [line for line in told if not re.search(r"is read again from its start to position", line)] == []
