"""Training programs in the shapes that people write, whose log holds all that they did: to be killed anywhere."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).parent))

import sources

import midepoch

Make = Callable[..., midepoch.Snapshot]


class Log:
    """Stands for the model: what it has seen is its state."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.limit: int | None = None  # lines of this process, until it is killed
        self.kill: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, *line: Any) -> None:
        if self.limit is not None:
            if not self.limit:
                self.kill()
            self.limit -= 1
        self.lines.append([sources.plain(each) for each in line])

    def state_dict(self) -> dict[str, str]:
        return {"lines": json.dumps(self.lines)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.lines = json.loads(state["lines"])


def loader(size: int, batch_size: int = 4, seed: int = 1, **settings: Any) -> Any:
    return midepoch.wrap(DataLoader(sources.Noisy(size), batch_size=batch_size, shuffle=True, **settings), seed=seed)


def cycle(source: Any) -> Iterator[Any]:
    while True:
        yield from source


def usual(make: Make, log: Log, epochs: int, workers: int = 0) -> None:
    train, validation = loader(18, num_workers=workers), loader(6, 3, 2)
    snapshot = make(log=log, train=train, validation=validation)
    for epoch in snapshot.epochs(epochs):
        for batch in train:
            log("train", epoch, batch)
            snapshot.step()
        for batch in validation:
            log("validate", epoch, batch)
        log("schedule", epoch)


def usual_with_workers(make: Make, log: Log, epochs: int) -> None:
    usual(make, log, epochs, workers=2)


def validation_first(make: Make, log: Log, epochs: int) -> None:
    train, validation = loader(18), loader(6, 3, 2)
    snapshot = make(log=log, train=train, validation=validation)
    for epoch in snapshot.epochs(epochs):
        for batch in validation:
            log("before", epoch, batch)
        for batch in train:
            log("train", epoch, batch)
            snapshot.step()
        for batch in validation:
            log("after", epoch, batch)


def validation_in_the_middle(make: Make, log: Log, epochs: int) -> None:
    train, validation = loader(18), loader(6, 3, 2)
    snapshot = make(log=log, train=train, validation=validation)
    for epoch in snapshot.epochs(epochs):
        for number, batch in enumerate(train, train.batches_done):
            log("train", epoch, number, batch)
            if number % 2:
                for other in validation:
                    log("middle", epoch, other)
            snapshot.step()
        for other in validation:
            log("end", epoch, other)


def zipped(make: Make, log: Log, epochs: int) -> None:
    first, second = loader(18), loader(18, 4, 2)
    snapshot = make(log=log, first=first, second=second)
    for epoch in snapshot.epochs(epochs):
        for pair in zip(first, second, strict=False):
            log(epoch, pair)
            snapshot.step()
        log("schedule", epoch)


def zipped_with_a_cycle(make: Make, log: Log, epochs: int) -> None:
    labelled, unlabelled = loader(18), loader(6, 2, 2)
    snapshot = make(log=log, labelled=labelled, unlabelled=unlabelled)
    for epoch in snapshot.epochs(epochs):
        for pair in zip(labelled, cycle(unlabelled), strict=False):
            log(epoch, pair)
            snapshot.step()
        log("schedule", epoch)


def a_cycle_over_all_epochs(make: Make, log: Log, epochs: int) -> None:
    labelled, unlabelled = loader(18), loader(30, 2, 2)
    snapshot = make(log=log, labelled=labelled, unlabelled=unlabelled)
    endless = cycle(unlabelled)
    for epoch in snapshot.epochs(epochs):
        for batch in labelled:
            log(epoch, batch, next(endless))
            snapshot.step()
        log("schedule", epoch)


def several_passes(make: Make, log: Log, epochs: int) -> None:
    train, validation = loader(10), loader(6, 3, 2)
    snapshot = make(log=log, train=train, validation=validation)
    for epoch in snapshot.epochs(epochs):
        for _ in range(3):
            for batch in train:
                log("train", epoch, batch)
                snapshot.step()
        for batch in validation:
            log("validate", epoch, batch)


def two_loaders(make: Make, log: Log, epochs: int) -> None:
    first, second = loader(10), loader(14, 4, 2)
    snapshot = make(log=log, first=first, second=second)
    for epoch in snapshot.epochs(epochs):
        for batch in first:
            log("first", epoch, batch)
            snapshot.step()
        for batch in second:
            log("second", epoch, batch)
            snapshot.step()
        log("schedule", epoch)


def part_of_an_epoch(make: Make, log: Log, epochs: int) -> None:
    first, second = loader(18), loader(14, 4, 2)
    snapshot = make(log=log, first=first, second=second)
    for epoch in snapshot.epochs(epochs):
        for batch in itertools.islice(first, 3 - first.batches_done):
            log("first", epoch, batch)
            snapshot.step()
        if epoch == 1:
            continue
        for batch in itertools.islice(second, 2 - second.batches_done):
            log("second", epoch, batch)
            snapshot.step()
        log("schedule", epoch)


def a_part_and_a_whole_pass(make: Make, log: Log, epochs: int) -> None:
    first, second = loader(18), loader(14, 4, 2)
    snapshot = make(log=log, first=first, second=second)
    for epoch in snapshot.epochs(epochs):
        for batch in itertools.islice(first, 3 - first.batches_done):
            log("first", epoch, batch)
            snapshot.step()
        for batch in second:
            log("second", epoch, batch)
            snapshot.step()
        log("schedule", epoch)


def two_validations_within_a_pass(make: Make, log: Log, epochs: int) -> None:
    train, val = loader(22), loader(9, 4, 2)
    snapshot = make(log=log, train=train, val=val)
    for epoch in snapshot.epochs(epochs):
        for number, batch in enumerate(train, train.batches_done):
            log("train", epoch, batch)
            if number in (0, 3):
                for other in val:
                    log("val", epoch, other)
            snapshot.step()
        log("schedule", epoch)


def loops_in_loops(make: Make, log: Log, epochs: int) -> None:
    tasks, inner = loader(6, 2), loader(10, 4, 2)
    snapshot = make(log=log, tasks=tasks, inner=inner)
    for epoch in snapshot.epochs(epochs):
        for task in tasks:
            for batch in inner:
                log(epoch, task, batch)
            snapshot.step()
        log("schedule", epoch)


def unknown_length(make: Make, log: Log, epochs: int) -> None:
    train = midepoch.wrap(_numbers, seed=2)
    snapshot = make(log=log, train=train)
    for epoch in snapshot.epochs(epochs):
        for batch in train:
            log("train", epoch, batch)
            snapshot.step()
        log("schedule", epoch)


def _numbers() -> Iterator[Any]:
    for index in range(7):
        yield index, random.random()


def its_own_state(make: Make, log: Log, epochs: int) -> None:
    train = midepoch.wrap(StatefulDataLoader(sources.Noisy(14), batch_size=4, shuffle=True), seed=2)
    snapshot = make(log=log, train=train)
    for epoch in snapshot.epochs(epochs):
        for batch in train:
            log("train", epoch, batch)
            snapshot.step()
        log("schedule", epoch)


BODIES: dict[str, Callable[[Make, Log, int], None]] = {
    each.__name__: each
    for each in (
        usual, usual_with_workers, validation_first, validation_in_the_middle, zipped, zipped_with_a_cycle,
        a_cycle_over_all_epochs, several_passes, two_loaders, part_of_an_epoch,
        a_part_and_a_whole_pass, two_validations_within_a_pass, loops_in_loops, unknown_length, its_own_state,
    )
}  # fmt: skip


if __name__ == "__main__":
    # bodies.py NAME PATH EVERY LIMIT: train, and be killed by SIGKILL before line LIMIT; print the log at the end.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", midepoch.MidepochWarning)
    name, path, every, limit = sys.argv[1:]
    log = Log()
    log.limit = int(limit)
    BODIES[name](lambda **parts: midepoch.Snapshot(path, every=int(every), signals=(), **parts), log, 3)
    Path(path).with_suffix(".json").write_text(json.dumps(log.lines), encoding="utf-8")
