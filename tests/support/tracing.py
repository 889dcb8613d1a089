"""What thousands of drawn sequences of operations give, as data: an oracle for whoever rebuilds the inside.

``python tests/support/tracing.py`` writes tests/traces/ anew. A trace may change for a reason that is written down in
tests/traces/deviations.md, and for no other.

An operation gives ``EPOCH.POSITION`` of the loader after it; a batch also two digits of its digest; an error, its type.
Operations: n next, i iter, p peek, r read to the end of the pass, s state, f state with a batch in flight, l load in
place, m load into a new loader, k seek, e set_epoch, c close, x one sample fails, w reshard, y commit, b rollback.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import random
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[1]))

import midepoch
from midepoch import World
from support import sources

TRACES = Path(__file__).parents[1] / "traces"
SEQUENCES = 200  # of each source
BODIES = 300


class FailsOnceError(Exception):
    """A sample could not be read, this time."""


class Switch:
    on = False

    def pass_by(self) -> None:
        if self.on:
            self.on = False
            raise FailsOnceError


class Failing(sources.Noisy):
    def __init__(self, size: int, switch: Switch) -> None:
        super().__init__(size)
        self.switch = switch

    def __getitem__(self, index: int) -> Any:
        self.switch.pass_by()
        return super().__getitem__(index)


class Fetched(Failing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Seeds(Dataset[Any]):
    """Samples look at the generators themselves, as seeds for others are made, and then use each of them."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> Any:
        state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        known = zlib.crc32(repr(random.getstate()).encode())
        drawn = np.random.default_rng(int(np.random.randint(1 << 30))).random() if index % 3 == 0 else np.random.rand()
        return [index, torch.initial_seed(), state, known, float(drawn), random.random(), float(torch.rand(()))]


def noisy(switch: Switch, **options: Any) -> Any:
    return DataLoader(Failing(22, switch), **{"batch_size": 4, "shuffle": True} | options)


def mixed(switch: Switch, **_: Any) -> Any:
    parts = [midepoch.wrap(noisy(switch), seed=1), midepoch.wrap(sources.numbers, seed=2)]
    return midepoch.combine(parts, "weighted", weights=[2, 1], seed=3)


def jittered(batch: torch.Tensor) -> torch.Tensor:
    return batch + torch.rand(()) + random.random()


def on_two_ranks(switch: Switch) -> Any:
    data = Failing(23, switch)
    return DataLoader(data, 3, sampler=DistributedSampler(data, 2, 1, shuffle=True))


Sources = dict[str, tuple[Callable[[Switch], Any], dict[str, Any]]]

# Each: what is wrapped, and how, but for the world, which is one process's where nothing else is said.
SOURCES: Sources = {
    "shuffled": (noisy, {}),
    "in order, full batches": (functools.partial(noisy, shuffle=False, drop_last=True), {}),
    "on two ranks": (on_two_ranks, {"world": World(1, 2, 0)}),
    "whole batches, drawn for": (
        lambda switch: DataLoader(Fetched(22, switch), 4, collate_fn=sources.noisy_collate, shuffle=True), {}
    ),
    "batches of a sampler": (lambda switch: DataLoader(Failing(22, switch), batch_sampler=sources.Buckets(22)), {}),
    "a sampler": (lambda switch: DataLoader(Failing(22, switch), 4, sampler=sources.EverySecond(22)), {}),
    "one at a time": (functools.partial(noisy, batch_size=None), {}),
    "seeds": (lambda switch: DataLoader(Seeds(), 4, shuffle=True, collate_fn=list), {}),
    "then": (noisy, {"then": jittered}),
    "retried": (noisy, {"on_error": "retry"}),
    "exposed": (lambda switch: DataLoader(sources.Exposing(22), 4), {}),
    "inherited": (lambda switch: sources.Inheriting(11), {}),
    "stream": (lambda switch: DataLoader(sources.Stream(22), 4), {}),
    "generator": (lambda switch: sources.numbers, {}),
    "list": (lambda switch: list(range(11)), {}),
    "own state": (lambda switch: sources.Counter(9), {}),
    "mixed": (mixed, {}),
}
FEWER: Sources = {"in workers": (functools.partial(noisy, num_workers=1), {})}  # each takes a second


def wrapped(name: str, switch: Switch) -> Any:
    make, options = (SOURCES | FEWER)[name]
    made, options = make(switch), {"world": World(0, 1, 0), **options}
    return made if isinstance(made, midepoch.Loader) else midepoch.wrap(made, seed=5, **options)


TIMES = {"n": 30, "i": 6, "p": 4, "r": 3, "s": 8, "f": 2, "l": 4, "m": 3, "k": 4, "e": 3} | dict.fromkeys("cxwyb", 1)
OPERATIONS = "".join(each * times for each, times in TIMES.items())


def short(batch: Any) -> str:
    return f"{zlib.crc32(json.dumps(sources.plain(batch)).encode()) & 255:02x}"


class Run:
    """One sequence. Whatever it draws is drawn before the operation, so that all versions carry out the same."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.draw = name, random.Random(f"{name}/{number}")
        self.switch = Switch()
        self.loader = wrapped(name, self.switch)
        self.batches: Iterator[Any] | None = None
        self.states: list[Any] = []

    def trace(self) -> list[str]:
        sources.under_other_seeds(0)
        with self.loader:
            return [self.one(self.draw.choice(OPERATIONS)) for _ in range(self.draw.randint(6, 18))]

    def one(self, operation: str) -> str:
        chosen, epoch, position = self.draw.random(), self.draw.randrange(4), self.draw.randrange(0, 24, 2)
        try:
            given = self.carry_out(operation, chosen, epoch, position)
        except StopIteration:
            given = "end"
            if operation == "n" and chosen < 0.8:
                self.batches = None
        except Exception as error:  # noqa: BLE001  # any of them is an outcome
            given = type(error).__name__
        return f"{operation}{self.loader.epoch}.{self.loader.position}{given and ':' + given}"

    def carry_out(self, operation: str, chosen: float, epoch: int, position: int) -> str:
        loader = self.loader
        if operation == "n":
            self.batches = iter(loader) if self.batches is None else self.batches
            return short(next(self.batches))
        if operation == "i":
            self.batches = iter(loader)
        elif operation == "p":
            return short(loader.peek())
        elif operation == "r":
            self.batches = iter(loader) if self.batches is None else self.batches
            read = "".join(map(short, itertools.islice(self.batches, 40)))
            self.batches = None
            return read
        elif operation in "sf":
            self.states.append(json.loads(json.dumps(loader.state_dict(int(operation == "f")))))
        elif operation in "lm" and self.states:
            state = self.states[int(chosen * len(self.states))]
            if operation == "m":
                loader.close()
                self.loader, self.batches = wrapped(self.name, self.switch), None
            self.loader.load_state_dict(state)
        elif operation == "k":
            loader.seek(*[(epoch, position), (epoch, None), (None, position)][int(chosen * 3)])
        elif operation == "e":
            loader.set_epoch(epoch)
        elif operation == "c":
            loader.close()
        elif operation == "x":
            self.switch.on = True
        elif operation == "w":
            loader.reshard(World(0, 1 + int(chosen * 3), 0))
        elif operation == "y":
            loader.commit()
        elif operation == "b":
            loader.rollback()
        return ""


def trace(name: str, number: int) -> str:
    """A line: the sequence, and what it gave."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return " ".join(Run(name, number).trace())


def body(number: int) -> str:
    """A drawn program's log undisturbed, and as it is when ended by a signal at two of its steps: checksums."""
    from support.bodies import Body, live

    def run(path: Path, **how: Any) -> str | None:
        lines = live(made, path, epochs=2, **how)
        return None if lines is None else f"{zlib.crc32(json.dumps(lines).encode()):08x}"

    made = Body.random(number)
    draw, found = random.Random(number), []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.append(str(run(Path(folder, "whole.pt"))))
        for step in draw.sample(range(1, 6), 2):
            path = Path(folder, f"{step}.pt")
            try:
                ended = run(path, signal_at=step)  # it may be done before
                found.append(f"{step}:{ended or run(path)}")
            except Exception as error:  # noqa: BLE001  # any of them is an outcome
                found.append(f"{step}:{type(error).__name__}")
    return " ".join(found)


def file_of(name: str) -> Path:
    return TRACES / f"{name.replace(' ', '_').replace(',', '')}.txt"


def main() -> None:
    logging.disable(logging.WARNING)
    for name in sys.argv[1:] or [*SOURCES, *FEWER, "bodies"]:
        count = BODIES if name == "bodies" else SEQUENCES // 20 if name in FEWER else SEQUENCES
        one = body if name == "bodies" else functools.partial(trace, name)
        file_of(name).write_text("".join(f"{one(number)}\n" for number in range(count)), encoding="utf-8")
        print(name, file_of(name).stat().st_size, flush=True)


if __name__ == "__main__":
    main()
