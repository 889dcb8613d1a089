"""Reading a ledger: the batches that each step was trained on. What is sound is used, and damage is told."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint.files import find, read
from ..checkpoint.ledger import is_count, ledger_path, unseal
from ..errors import SnapshotError, UnsupportedSourceError
from ..order import MAXIMUM_SIZE
from ..order.holes import Holes, Omit, pieces_of
from ..world import MicroShare, Share, World

__all__ = ["Entry", "Ledger", "Stretch", "read_ledger"]


class Entry(dict[str, Any]):
    """A line of a ledger, with what its loader's lines before it have said: docs/format.md lists the keys."""

    @functools.cached_property
    def skipped(self) -> Holes:
        """What its epoch leaves out."""
        return Omit.parse(self["omit"], self["epoch"]).skips.get(self["epoch"], Holes())

    @functools.cached_property
    def holes(self) -> Holes:
        """The same, and what was finished before its session, too."""
        return Omit.parse(self["omit"], self["epoch"]).of(self["epoch"])

    def share(self, rank: int = 0) -> Share:
        """A rank's batches in the session, in places (`midepoch.order.holes`)."""
        world = World(rank // self["copies"], self["world_size"] // self["copies"])
        size = MAXIMUM_SIZE if self["size"] is None else self["size"]
        start, size = map(self.holes.place_of, (self["position"], size))
        fields = (size, start, self["batch_size"], world, self["tail"], self["drop_last"])
        return Share(*fields) if self["global_batch"] is None else MicroShare(*fields, self["global_batch"])

    def positions(self, rank: int, number: int) -> list[int] | None:
        """Of the units of a batch of the session, in order; None if the rank has no such batch."""
        share = self.share(rank)
        if not 0 <= number < share.steps:
            return None
        pieces = pieces_of(*share.span(number), share.size, self.holes, self.skipped)
        return [position for start, stop in pieces for position in range(start, stop)]


class Stretch(NamedTuple):
    """Steps `first` to `last`, counted from 1, of which an `entry` says how many batches of its loader each takes.

    The `chain` has the loader's entries since the run was started; this one is at `at`.
    """

    first: int
    last: int
    entry: Entry
    chain: list[Entry]
    at: int

    def taken(self, first: int, last: int) -> list[tuple[Entry, int, int]]:
        """What these steps took: the entries of the sessions, and the batches [start, stop) of each.

        Raises:
            UnsupportedSourceError: the ledger says why it does not know.
        """
        if "unknown" in self.entry:
            why = f"the samples of {self.entry['loader']} cannot be computed ({self.entry['unknown']})"
            raise UnsupportedSourceError(f"{why}: ask for another loader")
        begin = self.entry["batch"] + (first - 1 - self.entry["step"]) * self.entry["each"]
        stop, at, found = begin + (last + 1 - first) * self.entry["each"], self.at, []
        while begin < stop:
            each = self.chain[at]
            start = max(begin, each["begins"]) if at else begin
            if start < stop:
                found.append((each, start - each["begins"], stop - each["begins"]))
                stop = start
            at -= 1
        return found[::-1]


@dataclass(frozen=True)
class Ledger:
    """What a ledger says of the run of the snapshot at `path`, saved after `steps`.

    Attributes:
        starts: the steps after which the run was started, as far as is known.
        problems: what is damaged or missing.
    """

    path: Path
    steps: int
    stretches: tuple[Stretch, ...]
    starts: tuple[int, ...]
    problems: tuple[str, ...]

    def at(self, step: int) -> list[Stretch]:
        """The loaders that a step took batches of.

        Raises:
            ValueError: the run has made no such step.
            SnapshotError: the ledger does not say.
        """
        if not 1 <= step <= self.steps:
            raise ValueError(f"step {step} is not of this run: name one from 1 to {self.steps}")
        covered = [each for each in self.stretches if each.first <= step <= each.last]
        if not covered:
            why = "; ".join(self.problems) or f"it begins after step {min(self.starts, default=self.steps)}"
            raise SnapshotError(f"the ledger does not say what step {step} was trained on ({why}): name another step")
        return [each for each in covered if each.entry["each"] or "unknown" in each.entry]


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
    count, end = content.get("ledger"), content["steps"]
    if count is None or not is_count(count):
        raise SnapshotError(f"{newest.path} has no ledger: it was saved without Snapshot(..., ledger=True)")
    kept = path.suffix[1:].isdigit() and not ledger_path(path).exists()  # an older one, as snapshot.pt.2
    file, problems = ledger_path(path.with_suffix("") if kept else path), list(newest.damaged)
    try:
        lines = file.read_bytes().split(b"\n")[:-1] if count["lines"] else []
    except OSError as error:
        problems.append(f"{file} cannot be read ({error.strerror}); it belongs to this snapshot's run")
        lines, count = [], {**count, "lines": []}
    chains, stretches, starts = dict[str, list[Entry]](), list[Stretch](), set[int]()

    def hold(until: int, *some: list[Entry]) -> None:
        """The latest entry of each holds until a step."""
        for chain in some:
            if chain[-1]["step"] < until:
                stretches.append(Stretch(chain[-1]["step"] + 1, until, chain[-1], chain, len(chain) - 1))

    damaged, latest = 0, 0  # lines in a row; the step of the last one that is sound
    named = ((each, start) for a, z, start in count["lines"] for each in range(a, min(z, max(a, len(lines)) + 2)))
    for number, start in named:
        try:
            values = unseal(lines[number], start)
        except (IndexError, ValueError) as error:
            why = "it is missing" if number >= len(lines) else error
            problems += [f"{file}, line {number + 1} is damaged: {why}"] * (not damaged)
            damaged += 1
            continue
        before, name = values.pop("before"), values["loader"]
        if damaged:  # each line says when the one before it was written
            hold(before if damaged == 1 else latest, *chains.values())
            chains, damaged = {}, 0
        latest = values["step"]
        if "start" in values and values["start"] not in starts:
            hold(values["start"], *chains.values())
            chains = {}
        if name in chains:
            hold(values["step"], chains[name])
        if "start" in values:
            chains[name] = [Entry(values)]
            starts.add(values["start"])
        elif name in chains:  # otherwise one before it is damaged, and no more is known until the run is started again
            chains[name].append(Entry({**chains[name][-1], **values}))
    hold((end, count["step"], latest)[min(damaged, 2)], *chains.values())
    stretches.sort(key=lambda each: (each.first, each.last, each.entry["loader"]))
    return Ledger(newest.path, end, tuple(stretches), tuple(sorted(starts)), tuple(problems))
