"""A loop that changes the data, and data that remember: a resume is exact, or it is said that it is not."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from midepoch import MidepochError, MidepochWarning
from support.changed_sources import EPOCHS, ROWS, loader_of
from support.resuming import text_of

CUTS = (0, 2), (0, "end"), (1, 2), (2, 3)
CHAOS = bool(os.environ.get("MIDEPOCH_CHAOS"))


class Saved(NamedTuple):
    """A state, the steps and batches before it, and what had been said."""

    state: Any
    step: int
    batches: int
    told: list[str]


class Ran(NamedTuple):
    batches: list[str]
    told: list[str]
    refused: str
    saved: list[Saved]


def run(log: Path, name: str, workers: int, kept: bool, seed: int, state: Any = None, step: int = 0) -> Ran:
    """One run, undisturbed or from a state. `log`: where each process, also a worker's, writes what it warns of."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    row, batches, saved = ROWS[name], list[str](), list[Saved]()

    def show(message: Warning | str, category: type[Warning], *place: Any, **keywords: Any) -> None:
        if issubclass(category, MidepochWarning):
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{message}\n")

    def told() -> list[str]:
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    def save(epoch: int, done: int | str) -> None:
        if (epoch, done) in CUTS:
            saved.append(Saved(loader.state_dict(), step, len(batches), told()))

    refused = ""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        loader = loader_of(row, workers, kept)
        try:
            if state is not None:
                loader.load_state_dict(state)
                row.after(loader, step)
            for epoch in loader.epochs(EPOCHS):
                row.before(loader, epoch)
                for done, batch in enumerate(loader, 1):
                    batches.append(text_of(batch))
                    step += 1
                    row.after(loader, step)
                    save(epoch, done)
                save(epoch, "end")
        except MidepochError as error:
            refused = str(error)
        loader.close()
    return Ran(batches, told(), refused, saved)


@pytest.mark.parametrize("name", ROWS)
def test_changed_data_resume_exactly_or_say_that_they_do_not(name: str, tmp_path: Path) -> None:
    """The run that resumes begins with other global generators."""
    row, said = ROWS[name], set[str]()
    for number, (workers, kept) in enumerate([(0, False), (2, False), (2, True)], [*ROWS].index(name)):
        whole = run(tmp_path / f"{number}", name, workers, kept, 1)
        assert not whole.refused and len(whole.saved) == len(CUTS)
        says = row.says if workers or row.here is None else row.here
        for at, saved in enumerate(whole.saved):
            if not CHAOS and at != number % len(CUTS):  # each in a few rows
                continue
            resumed = run(tmp_path / f"{number}.{at}", name, workers, kept, 2, saved.state, saved.step)
            heard = saved.told if says else [*saved.told, *resumed.told, resumed.refused]
            is_said = any(says in each for each in heard) if says else any(heard)
            is_exact = resumed.batches == whole.batches[saved.batches :] and not resumed.refused
            assert is_exact or (says and is_said), (workers, kept, CUTS[at], heard)
            assert says or not is_said, (workers, kept, CUTS[at], heard)
            said |= {says} if is_said else set()
    assert said == {each for each in (row.says, row.here) if each}
