"""Reading a ledger: the batches that each step was trained on. What is sound is used, and damage is told."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.files import find, read
from ..checkpoint.ledger import unseal
from ..errors import SnapshotError, UnsupportedSourceError
from ..order import MAXIMUM_SIZE
from ..order.holes import Holes, Omit, pieces_of
from ..world import MicroShare, Share, World

__all__ = ["Ledger", "Stretch", "read_ledger"]


class Stretch(dict[str, Any]):
    """What some steps took of one session of a loader: docs/format.md lists the keys."""

    def __missing__(self, key: str) -> Any:
        raise UnsupportedSourceError(
            f"the samples of {self['loader']} cannot be computed ({self['unknown']}): ask for another loader"
        )

    @functools.cached_property
    def steps(self) -> range:
        """The steps, counted from 1."""
        return range(self["first"], self["last"] + 1, self["every"] or self["last"])

    @functools.cached_property
    def omit(self) -> Omit:
        """What its epoch leaves out."""
        return Omit.parse(self["omit"], self["epoch"])

    @functools.cached_property
    def holes(self) -> Holes:
        """The positions."""
        return self.omit.of(self["epoch"])

    def batches(self, step: int) -> range:
        """What a step took, by number in the session."""
        begin = self["batch"] + self.steps.index(step) * self["each"]
        return range(begin, begin + self["each"])

    def share(self, rank: int = 0) -> Share:
        """A rank's batches in the session, in places (`midepoch.order.holes`)."""
        world = World(rank // self["copies"], self["world_size"] // self["copies"])
        size = MAXIMUM_SIZE if self["size"] is None else self["size"]
        start, size = map(self.holes.place_of, (self["position"], size))
        fields = (size, start, self["batch_size"], world, self["tail"], self["drop_last"])
        return Share(*fields) if self["global_batch"] is None else MicroShare(*fields, self["global_batch"])

    def pieces(self, rank: int, number: int) -> list[tuple[int, int]]:
        """The positions of a batch of the session, in order, as intervals; empty if the rank has no such batch."""
        share, skipped = self.share(rank), self.omit.skips.get(self["epoch"], Holes())
        return pieces_of(*share.span(number), share.size, self.holes, skipped) if 0 <= number < share.steps else []

    def given(self, position: int) -> Iterator[tuple[int, int]]:
        """The steps and ranks that were given a position."""
        share = self.share()
        micro, together = getattr(share, "micro_steps", 1), getattr(share, "together", share.global_batch)
        begin = (self.holes.place_of(position) - share.start) // together * micro
        for number in {*range(begin, begin + micro), share.full_steps}:  # the last may repeat the epoch's first
            times = (number - self["batch"]) // self["each"]
            for rank in range(self["world_size"]) if 0 <= times < len(self.steps) else ():
                for start, stop in self.pieces(rank, number):
                    if start <= position < stop and self.share(rank).weight(number):
                        yield self.steps[times], rank


@dataclass(frozen=True)
class Ledger:
    """What a ledger says of the run of the snapshot at `path`, saved after `steps`.

    Attributes:
        starts: the steps after which the run was started, as far as is known.
        lines: of steps in a row: the first, the last, and what they took.
        problems: what is damaged or missing.
    """

    path: Path
    steps: int
    starts: list[int]
    lines: list[dict[str, Any]]
    problems: list[str]

    def at(self, step: int) -> list[Stretch]:
        """What a step took.

        Raises:
            ValueError: the run has made no such step.
            SnapshotError: the ledger does not say.
        """
        if not 1 <= step <= self.steps:
            raise ValueError(f"step {step} is not of this run: name one from 1 to {self.steps}")
        for line in self.lines:
            if line["first"] <= step <= line["last"]:
                return [each for each in line["stretches"] if step in each.steps]
        why = "; ".join(self.problems) or f"it begins after step {self.starts[0]}"
        raise SnapshotError(f"the ledger does not say what step {step} was trained on ({why}): name another step")


def read_ledger(path: Path) -> Ledger:
    """The ledger of a snapshot. `path`: of the newest snapshot of a run, or of a folder with one that has a ledger.

    Raises:
        SnapshotError: there is none, or no snapshot can be read.
    """
    if path.is_dir():
        found = list(path.glob("*.ledger"))
        if len(found) != 1:
            raise SnapshotError(f"{path} has {len(found)} ledgers: name the snapshot of a run with ledger=True")
        path = found[0].with_suffix("")
    if (newest := find(path, check=False)) is None:
        raise SnapshotError(f"{path} is missing, and only a snapshot says how much of a ledger holds: restore one")
    content = read(newest.path, mapped=True)
    if "ledger" not in content:
        raise SnapshotError(f"{newest.path} has no ledger: it was saved without Snapshot(..., ledger=True)")
    try:
        told = unseal(content["ledger"])
    except ValueError as error:
        raise SnapshotError(f"{newest.path} is damaged (ledger): restore a copy") from error
    known, problems = [] if told["open"] is None else [told["open"]], list(newest.damaged)
    for name, count, _ in told["files"]:
        file = path.parent / Path(told["folder"]).name / Path(name).name
        try:
            lines = file.read_bytes().decode(errors="replace").split("\n")[:-1] if count else []
        except OSError as error:
            problems.append(f"{file} cannot be read ({error.strerror}): restore it")
            continue
        damaged = list[str]()
        for number in range(count):
            try:
                known.append(unseal(lines[number], f"{name} {number + 1}"))
            except (IndexError, ValueError) as error:
                damaged.append(f"line {number + 1} is damaged: {error if number < len(lines) else 'it is missing'}")
        if damaged:
            problems.append(f"{file}, {damaged[0]}; of {count} lines {len(damaged)} are damaged")
    for line in known:
        line["stretches"] = [Stretch(each, last=line["last"]) for each in line["stretches"]]
    known.sort(key=lambda line: line["first"])
    return Ledger(newest.path, content["steps"], [start for _, _, start in told["files"]], known, problems)
