"""No false alarm: of sources that resume exactly nothing is told, neither where they save nor where they resume."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import forking, quiet_sources, resuming, sources
from support.places import ROOT
from support.quiet_sources import BACKENDS, BESIDE, CORE, WILD


def all_of(makes: dict[str, Callable[[], Any]]) -> dict[str, tuple[resuming.Saved, list[resuming.Resumed]]]:
    """What this process saves of each source, and what comes of it in another one."""
    saved = {name: resuming.save(make, 2) for name, make in makes.items()}
    states = {name: each.states for name, each in saved.items()}
    resumed = sources.in_processes(quiet_sources.resume_all, (states, 7))[0]
    return {name: (saved[name], resumed[name]) for name in makes}


def check(saved: resuming.Saved, resumed: list[resuming.Resumed]) -> None:
    assert saved.told_in_all == [] and "exact_order" not in saved.no
    assert len(resumed) == 3 and all(saved.following)
    for each, rest in zip(resumed, saved.following, strict=True):
        assert not each.error and not each.told
        assert each.batches[: len(rest)] == rest


@pytest.fixture(scope="module")
def wild() -> dict[str, Any]:
    return all_of({name: make for name, make in WILD.items() if quiet_sources.can_be_made(name)})


@pytest.mark.parametrize("name", [name for name in WILD if quiet_sources.can_be_made(name)])
def test_nothing_is_told_of_what_widely_used_loaders_do(name: str, wild: dict[str, Any]) -> None:
    check(*wild[name])


@pytest.fixture(scope="module")
def core() -> dict[str, Any]:
    return all_of(CORE)


# The short form has each mechanism of reading in `WILD`; these are the sources of the laws, which resume exactly there.
@pytest.mark.long
@pytest.mark.parametrize("name", CORE)
def test_nothing_is_told_of_the_sources_of_the_tests(name: str, core: dict[str, Any]) -> None:
    check(*core[name])


@pytest.mark.long
@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_is_told_of_backends(name: str) -> None:
    import cpu_torchvision  # noqa: F401  # before those that import torchvision

    for module in ("litdata", "torchdata", "datasets", "grain", "webdataset", "streaming"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    check(*all_of({name: BACKENDS[name]})[name])


@pytest.mark.filterwarnings("ignore:two reads of sample")
def test_beside_a_sample_numbers_and_texts_are_refused_alone() -> None:
    found = all_of({name: functools.partial(quiet_sources.beside, name) for name in BESIDE})
    for name, (saved, resumed) in found.items():
        end = BESIDE[name][2]
        if end == "refused":
            assert all("(['beside'])" in each.error for each in resumed[::2]), name
            assert "(['beside'])" in resumed[1].told[0], "at an epoch's boundary it is a warning"
            continue
        assert not any(each.error for each in resumed), name
        assert end == "told" or not [*saved.told_in_all, *(told for each in resumed for told in each.told)], name
        assert all(len(each.batches) == len(rest) for each, rest in zip(resumed, saved.following, strict=True)), name


EXAMPLES = {
    "dataloader.py": (), "iterable.py": (), "several_loaders.py": (), "own_state.py": ("torchdata",),
    "grain_dataset.py": ("grain",), "hugging_face_dataset.py": ("datasets",),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_is_told_of_examples(name: str, tmp_path: Path) -> None:
    """Of all but those of trainers and of backends with tests of their own."""
    for module in EXAMPLES[name]:
        pytest.importorskip(module, reason=f"{module} is not installed")
    run = forking.run([ROOT / "examples" / name], cwd=tmp_path, check=True)
    told = [line for line in run.stderr.splitlines() if "MidepochWarning" in line]
    assert [line for line in told if not re.search(r"is read again from its start to position", line)] == []
