"""Programs that nobody thought of, undisturbed: wrapped loaders and a Snapshot give what plain loaders and range give.

The law `transparent` compares one pass over a loader. Here loaders are read before, in, between and after loops over
epochs, in whole, in part, in step, within each other, and by iterators that live on.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.utils.data import DataLoader

import midepoch
from support import sources

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")

EPOCHS = (2, 4)  # of the loops, in all: two each


class Statement(NamedTuple):
    """What a program does once.

    Attributes:
        kind: a whole "pass"; a "part" of one, which is then left; a "zip" with another loader; "held": batches of an
            iterator that lives on, and is made again where it ends.
        loader, other: by number.
        batches: of a "part" or "held".
        steps: `snapshot.step` follows each batch.
        within: done after every second batch.
    """

    kind: str
    loader: int
    other: int
    batches: int
    steps: bool
    within: Statement | None


class Program:
    """A program: statements before, in, between and after two loops over epochs."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.batches = [self.draw.randint(1, 5) for _ in range(self.draw.randint(1, 3))]
        self.unknown = [self.draw.random() < 0.2 for _ in self.batches]
        self.before, self.between, self.after = (self.statements((0, 0, 1, 2), steps=False) for _ in range(3))
        self.bodies = [self.statements((1, 2, 3), steps=True) for _ in EPOCHS]

    def statements(self, counts: Sequence[int], steps: bool) -> list[Statement]:
        return [self.statement(list(range(len(self.batches))), steps) for _ in range(self.draw.choice(counts))]

    def statement(self, numbers: list[int], steps: bool, depth: int = 0) -> Statement:
        draw, (one, *others) = self.draw, self.draw.sample(numbers, len(numbers))
        kind = draw.choice(("pass", "pass", "part", "held", "zip") if others else ("pass", "pass", "part", "held"))
        inner = None
        if not depth and others and kind != "zip" and draw.random() < 0.35:
            inner = self.statement(others, steps=False, depth=1)
        steps = steps and draw.random() < 0.8
        return Statement(kind, one, others[0] if others else one, draw.randint(1, 4), steps, inner)

    def __call__(self, loaders: Sequence[Any], epochs: Callable[[int], Iterable[int]], step: Callable[[], None],
                 read: list[Any]) -> None:  # fmt: skip
        """Run it. `read` is what it has read, and where."""
        held: dict[int, Iterator[Any]] = {}

        def hold(number: int) -> Iterator[Any]:
            while True:
                if number not in held:
                    held[number] = iter(loaders[number])
                try:
                    yield next(held[number])
                except StopIteration:
                    del held[number]

        def do(place: Any, statements: Iterable[Statement]) -> None:
            for kind, one, other, batches, steps, within in statements:
                source: Iterable[Any] = hold(one) if kind == "held" else loaders[one]
                if kind == "zip":
                    source = zip(source, loaders[other], strict=False)
                for number, batch in enumerate(itertools.islice(source, batches if kind in ("part", "held") else None)):
                    read.append((place, one, sources.plain(batch)))
                    if within is not None and number % 2 == 0:
                        do(place, [within])
                    if steps:
                        step()

        do("before", self.before)
        for body, count in zip(self.bodies, EPOCHS, strict=True):
            for epoch in epochs(count):
                do(epoch, body)
            do("after a loop", self.between)
        do("after", self.after)

    def source(self, number: int) -> Any:
        """A function that makes a loader's source, or the source. Its order is that of its samples."""
        samples = range(100 * number, 100 * number + 2 * self.batches[number])
        return (lambda: iter(samples)) if self.unknown[number] else DataLoader(list(samples), batch_size=2)  # type: ignore[arg-type]


class Again:
    """What a function makes, as an iterable."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


@pytest.mark.parametrize("seed", range(1000 if os.environ.get("MIDEPOCH_CHAOS") else 160))
def test_a_program_reads_what_it_reads_without_midepoch(seed: int, tmp_path: Path) -> None:
    """Or is refused: of two iterators over one loader, only the newer one lives."""
    program, expected, got = Program(seed), list[Any](), list[Any]()
    made = [program.source(number) for number in range(len(program.batches))]
    plain = [each if isinstance(each, DataLoader) else Again(each) for each in made]
    program(plain, lambda n: range(n)[-2:], lambda: None, expected)
    loaders = [midepoch.wrap(each, seed=0) for each in made]
    parts = {f"loader_{number}": each for number, each in enumerate(loaders)}
    with midepoch.Snapshot(tmp_path / "snapshot.pt", signals=(), parts=parts) as snapshot:
        try:
            program(loaders, snapshot.epochs, snapshot.step, got)
        except midepoch.MidepochError as error:
            assert "this pass ended when another pass" in str(error)
            assert got == expected[: len(got)]
        else:
            assert got == expected
