"""Runs a row of `support.changed_sources`, in a process of its own. Its argument is JSON: the arguments of `run`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from midepoch import MidepochError, MidepochWarning
from support import sources
from support.changed_sources import EPOCHS, ROWS, loader_of
from support.resuming import text_of

CUTS = (0, 2), (0, "end"), (1, 2), (2, 3)


def run(name: str, workers: int, kept: bool, seed: int, state: Any = None, step: int = 0) -> dict[str, Any]:
    """A run that resumes; without a state, one that is undisturbed, which saves its states at `CUTS`.

    Returns the batches, what was said and refused, and the states, each with the steps and what was said.
    """
    sources.under_other_seeds(seed)
    row, batches, states, refused = ROWS[name], list[str](), dict[str, Any](), ""
    descriptor, path = tempfile.mkstemp()  # workers write there too

    def show(message: Warning | str, category: type[Warning], *place: Any, **keywords: Any) -> None:
        if issubclass(category, MidepochWarning):
            os.write(descriptor, f"{message}\n".encode())

    def told() -> list[str]:
        return Path(path).read_text().splitlines()

    def save(epoch: int, done: int | str) -> None:
        if state is None and (epoch, done) in CUTS:
            states[f"{epoch} {done}"] = [loader.state_dict(), step, len(batches), told()]

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
    return {"batches": batches, "told": told(), "refused": refused, "states": states}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(*json.loads(sys.argv[1]))))
