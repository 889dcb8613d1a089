"""Reading a ledger: the batches that each step was trained on. What is sound is used, and damage is told."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.files import find, read
from ..checkpoint.ledger import ledger_of, unseal
from ..errors import SnapshotError, UnsupportedSourceError
from ..order import MAXIMUM_SIZE
from ..order.holes import NO_HOLES, Holes, Omit, pieces_of
from ..world import MicroShare, Share, World

__all__ = ["Ledger", "Row", "Stretch", "read_ledger"]

Row = dict[str, Any]


class Stretch(Row):
    """What some steps in a row took of one session of a loader: docs/format.md lists the keys."""

    def __missing__(self, key: str) -> Any:
        raise UnsupportedSourceError(f"{self['loader']} cannot be traced ({self['unknown']}): ask for another --loader")

    @functools.cached_property
    def omit(self) -> Omit:
        """What its epoch leaves out."""
        return Omit.parse(self["omit"], self["epoch"]) if self["omit"] else Omit()

    @functools.cached_property
    def holes(self) -> Holes:
        """The positions."""
        return self.omit.of(self["epoch"])

    def share(self, rank: int = 0) -> Share:
        """A rank's batches in the session, in places (`midepoch.order.holes`)."""
        world = World(rank // self["copies"], self["world_size"] // self["copies"])
        size = MAXIMUM_SIZE if self["size"] is None else self["size"]
        start, size = map(self.holes.place_of, (self["position"], size))
        fields = (size, start, self["batch_size"], world, self["tail"], self["drop_last"])
        return Share(*fields) if self["global_batch"] is None else MicroShare(*fields, self["global_batch"])

    def batches(self, step: int) -> range:
        """What a step took, by number in the session."""
        begin = self["batch"] + (step - self["first"]) * self["each"]
        return range(begin, begin + self["each"])

    def batches_at(self, position: int) -> set[int]:
        """The batches that may have a position, by number in the session. The last may repeat the epoch's first."""
        share = self.share()
        micro, together = getattr(share, "micro_steps", 1), getattr(share, "together", share.global_batch)
        begin = (self.holes.place_of(position) - share.start) // together * micro
        return {*range(begin, begin + micro), share.full_steps}

    def rows(self, batches: Iterable[int], rank: int | None = None) -> Iterator[Row]:
        """Those of these batches that the steps took, on one rank or on all."""
        skipped = self.omit.skips.get(self["epoch"], NO_HOLES)
        for each in range(self["world_size"]):
            share = self.share(each)
            for number in batches if rank in (None, each) else ():
                step = self["first"] + (number - self["batch"]) // self["each"]
                if self["first"] <= step <= self["last"] and number < share.steps and share.weight(number):
                    pieces = pieces_of(*share.span(number), share.size, self.holes, skipped)
                    row = {"loader": self["loader"], "step": step, "rank": each, "epoch": self["epoch"]}
                    yield row | {"positions": pieces}


@dataclass(frozen=True)
class Ledger:
    """What a ledger says of the run of the snapshot at `path`, saved after `steps`.

    Attributes:
        starts: the steps after which the run was started, from the first one with a ledger on.
        lines: of steps in a row: the first, the last, and what they took.
        problems: what is damaged or missing.
    """

    path: Path
    steps: int
    starts: list[int]
    lines: list[Row]
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
                return list(line["took"])
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
    told, problems = ledger_of(content, newest.path), list(newest.damaged)
    known: list[Row] = told["open"]
    for name, count, _ in told["files"]:
        file = path.parent / Path(told["folder"]).name / Path(name).name
        lines, damaged = list[str](), list[int]()
        with contextlib.suppress(OSError):
            lines = file.read_bytes().decode(errors="replace").split("\n")
        for number in range(1, count + 1):
            try:
                known.append(unseal("".join(lines[number - 1 : number]), f"{name} {number}"))
            except ValueError:
                damaged.append(number)
        if damaged:
            problems.append(f"{file}, line {damaged[0]}: {len(damaged)} of its {count} lines are damaged or missing")
    sessions = {each["session"]: each for each in known if "session" in each}
    of_steps = [each for each in known if "took" in each and all(session in sessions for session, _, _ in each["took"])]
    for line in of_steps:
        took = line.pop("took")
        line["took"] = [Stretch(sessions[session] | line, batch=batch, each=each) for session, batch, each in took]
    of_steps.sort(key=lambda line: line["first"])
    return Ledger(newest.path, content["steps"], [start for _, _, start in told["files"]], of_steps, problems)
