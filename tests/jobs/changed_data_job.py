"""Runs rows of `support.changed_sources`, each in a process of its own. Standard input: a JSON list of tasks.

A task is [name, workers, kept, seed, state, step]: without a state the run is undisturbed, and says its states at
`CUTS` too; with one it is a run that resumes. Standard output: a JSON list of what `run` returns for each.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midepoch import MidepochError, MidepochWarning
from support.changed_sources import EPOCHS, ROWS, loader_of
from support.resuming import text_of

CUTS = (0, 2), (0, "end"), (1, 2), (2, 3)
AT_ONCE = 2


def run(log: Path, name: str, workers: int, kept: bool, seed: int, state: Any, step: int) -> dict[str, Any]:
    """The batches, what was said and refused, and the states at the cuts, each with the steps and what was said.

    `log`: where each process, those of workers too, writes what it warns of.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    row, batches, states = ROWS[name], list[str](), dict[str, Any]()
    resumes, refused = state is not None, ""

    def show(message: Warning | str, category: type[Warning], *place: Any, **keywords: Any) -> None:
        if issubclass(category, MidepochWarning):
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{message}\n")

    def told() -> list[str]:
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    def save(epoch: int, done: int | str) -> None:
        if not resumes and (epoch, done) in CUTS:
            states[f"{epoch} {done}"] = [loader.state_dict(), step, len(batches), told()]

    warnings.simplefilter("always")
    warnings.showwarning = show
    loader = loader_of(row, workers, kept)
    try:
        if resumes:
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


def start(task: Any, result: Path) -> None:
    """A process that runs a task."""
    if os.fork():
        return
    try:
        result.write_text(json.dumps(run(result.with_suffix(".log"), *task)))
    except BaseException:  # noqa: BLE001  # the process ends here
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    tasks = json.load(sys.stdin)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / str(number) for number in range(len(tasks))]
        for number, (task, result) in enumerate(zip(tasks, results, strict=True)):
            if number >= AT_ONCE:
                os.wait()
            start(task, result)
        for _ in results[-AT_ONCE:]:
            os.wait()
        print(json.dumps([json.loads(each.read_text()) if each.exists() else None for each in results]))


if __name__ == "__main__":
    main()
