"""Reading a ledger, from the newest snapshot back to the first step. What is sound is used, and damage is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint.entries import Entry, unseal
from ..checkpoint.files import find, read
from ..checkpoint.ledger import FORMAT, is_count, segment_path
from ..errors import SnapshotError

__all__ = ["Ledger", "Stretch", "read_ledger"]


class Stretch(NamedTuple):
    """Steps of a loader that follow from one entry: those from `first` to `last`, counted from 1."""

    first: int
    last: int
    entry: Entry


@dataclass(frozen=True)
class Ledger:
    """What the ledger says of the run of one snapshot.

    Attributes:
        path: of the snapshot.
        steps: that it was saved after.
        stretches: sorted by their first steps.
        starts: the steps from which on the run was started, the latest first, as far as is known.
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
            why = "; ".join(self.problems) or f"it begins after step {self.starts[-1] if self.starts else self.steps}"
            raise SnapshotError(f"the ledger does not say what step {step} was trained on ({why}): name another step")
        return [each for each in covered if each.entry.each or each.entry.unknown]


def read_ledger(path: Path) -> Ledger:
    """The ledger of a snapshot. `path`: of the newest snapshot of a run, or of a folder with one that has a ledger.

    Raises:
        SnapshotError: there is none, or no snapshot can be read.
    """
    if path.is_dir():
        found = [each for each in path.glob("*.ledger") if each.is_dir()]
        if len(found) != 1:
            raise SnapshotError(
                f"{path} has {len(found)} ledgers: name the snapshot, which was saved by Snapshot(..., ledger=True)"
            )
        path = found[0].with_suffix("")
    newest = find(path, check=False)
    if newest is None:
        raise SnapshotError(f"{path} is missing, and only a snapshot says how much of a ledger holds: restore one")
    content = read(newest.path, mapped=True)
    count, end = content.get("ledger"), content["steps"]
    if count is None or not is_count(count):
        raise SnapshotError(f"{newest.path} has no ledger: it was saved without Snapshot(..., ledger=True)")
    stretches: list[Stretch] = []
    starts: list[int] = []
    problems, seen = list(newest.damaged), set[str]()
    while count is not None and count["segment"] not in seen:
        seen.add(count["segment"])
        segment = _Segment(segment_path(path, count["segment"]), count, end)
        stretches += segment.stretches()
        problems += segment.problems
        end = count["start"]
        starts.append(end)
        count = count.get("continues") if segment.header is None else segment.header["continues"]
    stretches.sort(key=lambda each: (each.first, each.last, each.entry.loader))
    return Ledger(newest.path, content["steps"], tuple(stretches), tuple(starts), tuple(problems))


class _Segment:
    """One segment, as far as it is sound.

    Args:
        path: of its file.
        count: what a snapshot says of it.
        end: the steps at which that snapshot was saved.

    Attributes:
        header: what its first line says; None if that is damaged.
        entries: of the other lines.
        until: the steps to which the entries hold.
        problems: the first line that is damaged, if there is one.
    """

    def __init__(self, path: Path, count: dict[str, Any], end: int) -> None:
        self.header: dict[str, Any] | None = None
        self.entries: list[Entry] = []
        self.until, self.problems = end, list[str]()
        try:
            lines = path.read_bytes().split(b"\n")[:-1]
        except OSError as error:
            self.problems.append(f"{path} cannot be read ({error.strerror}); it belongs to this snapshot's run")
            return
        number = 0
        try:
            for number in range(count["lines"]):
                if number >= len(lines):
                    raise ValueError("it is missing")
                self._take(unseal(lines[number]), number, path.stem, count["start"], end)
        except ValueError as error:
            # The line after it says at which step it was written.
            following = lines[number + 1 : number + 2] if number + 1 < count["lines"] else []
            step = count["step"] if number + 1 == count["lines"] else _before(following)
            known = self.entries[-1].step if self.entries else count["start"]
            self.until = max(known, min(step, end))
            self.problems.append(
                f"{path}, line {number + 1} is damaged: {error}. Steps {self.until + 1} to {end} are unknown"
            )

    def _take(self, values: dict[str, Any], number: int, name: str, start: int, end: int) -> None:
        if number == 0:
            step, before = values.get("step"), values.get("continues")
            if values.get("ledger") != FORMAT or values.get("segment") != name:
                raise ValueError("it is another run's, or of another format")
            if step != start or not is_count(before):
                raise ValueError("it does not say where the run was started")
            self.header = values
            return
        last = next((each for each in reversed(self.entries) if each.loader == values.get("loader")), None)
        entry = Entry.read(values, last)
        if not (self.entries[-1].step if self.entries else start) <= entry.step < end:
            raise ValueError("its step is out of sequence")
        self.entries.append(entry)

    def stretches(self) -> Iterator[Stretch]:
        """The steps that are known."""
        ends: dict[str, int] = {}
        for entry in reversed(self.entries):
            last = ends.get(entry.loader, self.until)
            ends[entry.loader] = entry.step
            if entry.step < last:
                yield Stretch(entry.step + 1, last, entry)


def _before(lines: list[bytes]) -> int:
    """What a line says of the step of the line before; 0 if it is damaged too."""
    try:
        before = unseal(lines[0])["before"]
        return before if type(before) is int else 0
    except (ValueError, KeyError, IndexError):
        return 0
