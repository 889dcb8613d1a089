"""Training programs in the shapes that people write, whose log holds all that they did: to be killed anywhere."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

import midepoch
from support import sources

Make = Callable[..., midepoch.Snapshot]


class KilledError(Exception):
    """In place of SIGKILL: nothing more is saved."""


class Log:
    """Stands for the model: what it has seen is its state."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.counts: dict[str, int] = {}  # what a program counts for itself
        self.fails: set[str] = set()  # loops that are to be left together with the loop over epochs
        self.limit: int | None = None  # lines of this process, until it is killed

    def __call__(self, *line: Any) -> None:
        if self.limit is not None:
            if not self.limit:
                raise KilledError
            self.limit -= 1
        self.lines.append([sources.plain(each) for each in line])

    def state_dict(self) -> dict[str, str]:
        return {"lines": json.dumps(self.lines), "counts": json.dumps(self.counts)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.lines, self.counts = json.loads(state["lines"]), json.loads(state["counts"])


def loader(size: int, batch_size: int = 4, seed: int = 1, **settings: Any) -> Any:
    return midepoch.wrap(DataLoader(sources.Noisy(size), batch_size=batch_size, shuffle=True, **settings), seed=seed)


def cycle(source: Any) -> Iterator[Any]:
    while True:
        yield from source


def accumulated(make: Make, log: Log, epochs: int) -> None:
    """A step for each two batches, which are prepared by work that the loop changes."""
    mixed = {"share": 0.5}
    train = loader(18)
    train = midepoch.wrap(train.source, seed=1, then=lambda batch: batch + mixed["share"] * torch.rand(()))
    snapshot = make(log=log, train=train)
    for epoch in snapshot.epochs(epochs):
        if epoch:
            mixed["share"] = 0.0
        for number, batch in enumerate(train, train.batches_done):
            log("train", epoch, batch)
            if number % 2:
                snapshot.step()


def parts_of_its_own_state(make: Make, log: Log, epochs: int) -> None:
    train = midepoch.wrap(StatefulDataLoader(sources.Noisy(14), batch_size=4, shuffle=True), seed=2)
    second = midepoch.wrap(StatefulDataLoader(sources.Noisy(6), batch_size=3, shuffle=True), seed=3)
    first = loader(6, 2)
    snapshot = make(log=log, train=train, first=first, second=second)
    for epoch in snapshot.epochs(epochs):
        for batch in first:
            log("first", epoch, batch)
            snapshot.step()
        if epoch != 1:
            for pair in zip(second, train, strict=False):
                log("zip", epoch, pair)
                snapshot.step()
        log("schedule", epoch)


def read_ahead(make: Make, log: Log, epochs: int) -> None:
    """With validations before, between and behind the batches."""
    train, validation = loader(18), loader(6, 3, 2)
    snapshot = make(log=log, train=train, validation=validation)
    for epoch in snapshot.epochs(epochs):
        for other in validation:
            log("before", epoch, other)
        for batch, in_flight in ahead(train, 2):
            number = log.counts[str(epoch)] = log.counts.get(str(epoch), 0) + 1
            log("train", epoch, batch)
            for _ in range(number % 3):
                for other in validation:
                    log("middle", epoch, other)
            snapshot.step(in_flight)
        for other in validation:
            log("after", epoch, other)


def a_loop_that_drops_what_it_has_read_ahead(make: Make, log: Log, epochs: int) -> None:
    first, second = loader(18), loader(22, 4, 2)
    snapshot = make(log=log, first=first, second=second)
    for epoch in snapshot.epochs(epochs):
        for batch, in_flight in ahead(first, 2):
            if not in_flight:
                break
            log("first", epoch, batch)
            snapshot.step(in_flight)
        for batch, in_flight in ahead(second, 2):
            log("second", epoch, batch)
            snapshot.step(in_flight)
        log("schedule", epoch)


def in_functions_and_generators(make: Make, log: Log, epochs: int) -> None:
    train, validation = loader(18), loader(6, 3, 2)
    snapshot = make(log=log, train=train, validation=validation)

    def moved(source: Iterable[Any]) -> Iterator[Any]:
        yield from map(sources.plain, source)

    def one_epoch(epoch: int) -> None:
        for number, batch in enumerate(moved(train), train.batches_done):
            log("train", epoch, number, batch)
            snapshot.step()

    def evaluate(epoch: int) -> None:
        for batch in itertools.islice(moved(validation), 1):
            log("validate", epoch, batch)

    for epoch in snapshot.epochs(epochs):
        one_epoch(epoch)
        evaluate(epoch)


def ahead(source: Iterable[Any], count: int) -> Iterator[tuple[Any, int]]:
    """Each batch, and how many behind it have been taken, as a prefetcher does in a thread."""
    batches, taken = iter(source), list[Any]()
    while True:
        taken += itertools.islice(batches, count + 1 - len(taken))
        if not taken:
            return
        yield taken.pop(0), len(taken)


def never_asked_for_its_end(make: Make, log: Log, epochs: int) -> None:
    train = loader(18)
    snapshot = make(log=log, train=train)
    for epoch in snapshot.epochs(epochs):
        batches = iter(train)
        for _ in range(train.batches_done, len(train)):
            log(epoch, next(batches))
            snapshot.step()


def saved_in_except(make: Make, log: Log, epochs: int) -> None:
    """A body that goes on after each exception: of a step, out of a pass, and behind the passes."""
    train, second, validation = loader(14), loader(10, 4, 2), loader(6, 3, 3)
    snapshot = make(log=log, train=train, second=second, validation=validation)
    for epoch in snapshot.epochs(epochs):
        for number, batch in enumerate(train, train.batches_done):
            try:
                log("train", epoch, batch)
                if number in (1, 3):
                    raise LeftError
            except LeftError:
                snapshot.save()
                continue
            snapshot.step()
        try:
            for number, batch in enumerate(second, second.batches_done):
                log("second", epoch, batch)
                if number == 1:
                    raise LeftError
                snapshot.step()
        except LeftError:
            snapshot.save()
        log("schedule", epoch)
        try:
            for batch in validation:
                log("validate", epoch, batch)
            raise LeftError
        except LeftError:
            snapshot.save()
        log("end", epoch)


class LeftError(Exception):
    """A step that fails, in a loop that is then left."""


class OutError(Exception):
    """A step that fails, and the loop over epochs is left."""


class Restarted:
    """An iterator for ever, as people write it inside a loop over another loader."""

    def __init__(self, source: Any) -> None:
        self.source, self.batches = source, iter(source)

    def __iter__(self) -> Restarted:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.source)
            return next(self.batches)


FOREVER: dict[str, Callable[[Any], Iterator[Any]]] = {"cycle": cycle, "restarted": Restarted}


class Loop(NamedTuple):
    """One loop of a body, over one loader or several in step."""

    loaders: tuple[int, ...]  # by number, in the order in which they are asked
    forever: Mapping[int, str] = MappingProxyType({})  # of these, those that are begun again where they end, and how
    longest: bool = False  # it ends with the longest loader, not with the shortest
    steps: bool = True  # it calls `snapshot.step`
    # After so many batches in an epoch, how: "break", "raise" (an exception that is caught behind the loop), "out" (one
    # that is caught behind the loop over epochs, which then begins again).
    leaves: tuple[int, str] | None = None
    within: tuple[int, Loop] | None = None  # a loop that is run after every so many batches


@dataclasses.dataclass
class Body:
    batches: Sequence[int]  # of each loader
    loops: Sequence[Loop]  # of the body of its loop over epochs, one after the other
    unknown: Collection[int] = ()  # the loaders whose length is not known
    outside: int | None = None  # a loader read by one iterator during the run, a batch for each of `loops`' batches
    skips: int | None = None  # in epoch 1, the loops from this one on
    # What each process reads before the loop over epochs: a loader, and at most so many batches.
    looks: Sequence[tuple[int, int]] = ()

    @classmethod
    def random(cls, seed: int) -> Body:
        draw = random.Random(seed)
        count = draw.randint(2, 4)
        outside = count - 1 if draw.random() < 0.2 else None
        numbers, loops = list(range(count if outside is None else count - 1)), list[Loop]()
        while numbers and len(loops) < 3 and (not loops or draw.random() < 0.7):
            loops.append(_random_loop(draw, numbers))
            # Whoever resumes behind a zip's last batch cannot know whether the others' passes are to be gone on with.
            numbers = [each for each in numbers if each not in loops[-1].loaders[1:]]
        if not any(loop.steps for loop in loops):
            loops[0] = loops[0]._replace(steps=True)
        skips = draw.randrange(1, len(loops)) if len(loops) > 1 and draw.random() < 0.2 else None
        batches = [draw.choice((1, 2, 2, 3, 3, 4, 5)) for _ in range(count)]
        unknown = [each for each in range(count) if draw.random() < 0.2]
        looks = [(draw.randrange(count), draw.choice((1, 2, 9))) for _ in range(draw.choice((0, 0, 1, 2)))]
        return cls(batches, loops, unknown, outside, skips, looks)

    def __call__(self, make: Make, log: Log, epochs: int) -> None:
        """Train. A loop that is left together with the loop over epochs is gone on with."""
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        loaders = [self.loader(number) for number in range(len(self.batches))]
        parts = {f"loader_{number}": each for number, each in enumerate(loaders)}
        snapshot = make(log=log, optimizer=optimizer, schedule=schedule, **parts)
        for number, most in self.looks:
            list(itertools.islice(loaders[number], most))
        endless = None if self.outside is None else Restarted(loaders[self.outside])
        while True:
            try:
                for epoch in snapshot.epochs(epochs):
                    for number, loop in enumerate(self.loops):
                        if epoch == 1 and number == self.skips:
                            break
                        rate = float(schedule.get_last_lr()[0])
                        self.run(loop, f"{epoch}.{number}", loaders, endless, snapshot, log, rate)
                    log("schedule", epoch, snapshot.steps)
                    optimizer.step()
                    schedule.step()
                return
            except OutError:
                continue

    def loader(self, number: int) -> Any:
        count = self.batches[number]
        if number in self.unknown:
            return midepoch.wrap(lambda: ((each, random.random()) for each in range(count)), seed=number)
        return loader(2 * count, 2, number)

    def run(
        self, loop: Loop, name: str, loaders: Any, endless: Any, snapshot: midepoch.Snapshot, log: Log, rate: float
    ) -> None:
        sources: list[Iterable[Any]] = [
            FOREVER[loop.forever[each]](loaders[each]) if each in loop.forever else loaders[each]
            for each in loop.loaders
        ]
        batches: Iterable[Any] = sources[0]
        if len(sources) > 1:
            batches = itertools.zip_longest(*sources) if loop.longest else zip(*sources, strict=False)
        limit, how = loop.leaves or (None, "")
        try:
            for batch in batches:
                done = log.counts.get(name, 0)
                if done == limit and how == "break":
                    break
                if done == limit and how == "raise":
                    raise LeftError  # as a step that fails would do
                log(name, rate, batch, None if endless is None else next(endless))
                log.counts[name] = done + 1
                if loop.within is not None and done % loop.within[0] == 0:
                    self.run(loop.within[1], f"{name}.{done}", loaders, None, snapshot, log, rate)
                if loop.steps:
                    snapshot.step()
                if done + 1 == limit and how == "out" and name in log.fails:
                    log.fails.remove(name)
                    raise OutError
        except LeftError:
            pass


def _random_loop(draw: random.Random, numbers: Sequence[int], steps: bool | None = None) -> Loop:
    chosen = draw.sample(numbers, min(len(numbers), draw.choice((1, 1, 1, 2, 2, 3))))
    rest = [each for each in numbers if each not in chosen]
    # The first one ends: whoever asks an endless one first takes a batch more than is used, each time.
    forever = {each: draw.choice(list(FOREVER)) for each in chosen[1:] if draw.random() < 0.3}
    longest = not forever and draw.random() < 0.2
    leaves = None
    # A zip_longest that was left would ask the others when it is made again.
    if not longest and draw.random() < 0.25:
        leaves = draw.randint(1, 4), draw.choice(("break", "raise", "out"))
    within = None
    if steps is None:
        steps = draw.random() < 0.8
        if rest and draw.random() < 0.4:
            within = draw.randint(1, 3), _random_loop(draw, rest, steps=False)
    return Loop(tuple(chosen), forever, longest, steps, leaves, within)


SHAPES: dict[str, Body] = {
    "a zip, the longer first": Body([5, 3], [Loop((0, 1))]),
    "a zip, the shorter first": Body([3, 5], [Loop((0, 1))]),
    "a zip of unknown lengths": Body([5, 3], [Loop((0, 1))], unknown=(0, 1)),
    "three in step, the shortest in the middle": Body([5, 3, 4], [Loop((0, 1, 2))]),
    "the longest counts": Body([3, 5, 2], [Loop((0, 1, 2), longest=True), Loop((0,))]),
    "a validation behind the shorter one's end": Body(
        [2, 5, 3], [Loop((0, 1), longest=True, within=(1, Loop((2,), steps=False))), Loop((2,))]
    ),
    "a cycle in a zip": Body([5, 2, 1], [Loop((0, 1, 2), {1: "cycle", 2: "cycle"})]),
    "begun again by hand": Body([6, 2], [Loop((0, 1), {1: "restarted"}), Loop((0,))]),
    "a validation in a zip": Body([5, 4, 2], [Loop((0, 1), within=(2, Loop((2,), steps=False))), Loop((2,))]),
    "a zip in a loop": Body([3, 2, 4], [Loop((0,), within=(1, Loop((1, 2), steps=False)))]),
    "a validation that is left": Body([5, 4], [Loop((0,), within=(2, Loop((1,), steps=False, leaves=(2, "break"))))]),
    "break": Body([5, 4, 3], [Loop((0, 1), leaves=(2, "break")), Loop((2,)), Loop((0,), leaves=(1, "break"))]),
    "an exception": Body([5, 4, 3], [Loop((0, 1), leaves=(2, "raise")), Loop((2,)), Loop((0,))]),
    "an exception out of the loop over epochs": Body([5, 4], [Loop((0,), leaves=(2, "out")), Loop((1,))]),
    "an exception out of it, between validations": Body(
        [6, 4], [Loop((0,), leaves=(4, "out"), within=(2, Loop((1,), steps=False, leaves=(2, "break"))))]
    ),
    "continue": Body([3, 2], [Loop((0,)), Loop((1,))], skips=1),
    "an iterator for the whole run": Body([3, 5], [Loop((0,))], outside=1),
    "an iterator over several loops over epochs": Body([3, 1], [Loop((0,), leaves=(1, "out")), Loop((0,))], outside=1),
}


BODIES: dict[str, Callable[[Make, Log, int], None]] = {
    each.__name__: each
    for each in (
        accumulated, parts_of_its_own_state, read_ahead, a_loop_that_drops_what_it_has_read_ahead,
        in_functions_and_generators, never_asked_for_its_end, saved_in_except,
    )
}  # fmt: skip


NEVER = 1_000_000
Train = Callable[[Make, Log, int], None]


def live(
    body: Train, path: Path, every: int = NEVER, killed_at: int | None = None, signal_at: int | None = None,
    fails: bool = False, epochs: int = 3,
) -> list[Any] | None:  # fmt: skip
    """The log of one process, with a snapshot at `path`; None if it ends before its time.

    It is killed before line `killed_at` of its log, or receives SIGTERM before this call of `step`. `fails`: the loops
    that are to be left together with the loop over epochs are.
    """
    log, made = Log(), list[midepoch.Snapshot]()
    log.limit = killed_at
    if fails and isinstance(body, Body):
        log.fails = {f"{epoch}.{number}" for epoch in range(3) for number in range(len(body.loops))}

    def make(**parts: Any) -> midepoch.Snapshot:
        snapshot = midepoch.Snapshot(path, every=every, signals=(signal.SIGTERM,) if signal_at else (), **parts)
        made.append(snapshot)
        if signal_at:
            step, left = snapshot.step, iter(range(signal_at - 1, -1, -1))

            def signalled(in_flight: int = 0) -> None:
                asked = next(left, None) == 0
                if asked:
                    os.kill(os.getpid(), signal.SIGTERM)
                step(in_flight)
                assert not asked, "the signal is not answered at its step"

            snapshot.step = signalled  # type: ignore[method-assign]
        return snapshot

    try:
        body(make, log, epochs)
    except (KilledError, SystemExit):
        return None
    finally:
        for each in made:
            each.close()
    found: list[Any] = json.loads(json.dumps(log.lines))
    return found
