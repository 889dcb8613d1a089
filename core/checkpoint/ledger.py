"""The ledger of a run: what each of its steps was trained on, in a few lines, however many steps that are.

Each start of the run has a *segment*, a file beside the snapshot, to which only rank 0 of it appends. A snapshot
says how many lines of which segment are its own, and a segment's first line says the same of the snapshot that was
loaded. So from any snapshot a chain leads back to the first step. Lines that no snapshot counts, of a process killed
between the two, and steps that were taken back, are on no chain.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import warn
from ..loader.body import Body
from ..loader.loader import Loader
from ..loader.reading import History, Reading
from .entries import Entry, seal
from .files import sync_folder

__all__ = ["FORMAT", "Ledger", "is_count", "segment_path"]

FORMAT = 1  # the value of "ledger" in a segment's first line


def segment_path(snapshot: Path, segment: str) -> Path:
    """The file of a segment of a snapshot's ledger."""
    return snapshot.with_name(f"{snapshot.name}.ledger") / f"{segment}.jsonl"


def is_count(value: Any) -> bool:
    """Whether this is what a snapshot says of its ledger, as `Ledger.write` returns it; or None."""
    if value is None:
        return True
    if not isinstance(value, dict) or value.keys() - {"continues"} != {"segment", "lines", "step", "start"}:
        return False
    segment = value["segment"]
    named = isinstance(segment, str) and len(segment) == 12 and not set(segment) - set("0123456789abcdef")
    counted = all(type(value[name]) is int and 0 <= value[name] < 1 << 62 for name in ("lines", "step", "start"))
    return named and counted and ("continues" not in value or is_count(value["continues"]))


def _alone(count: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if count is None else {name: value for name, value in count.items() if name != "continues"}


@dataclass
class _Course:
    """Where a loader is in the course of its last entry.

    Attributes:
        entry: that was written last.
        reading: the session that was trained on last.
        begins: batches of the course before this session.
        number: batches of the course up to the latest step.
    """

    entry: Entry
    reading: Reading
    begins: int = 0
    number: int = 0

    def begin_of(self, fresh: Entry, reading: Reading, done: int) -> int | None:
        """Batches of the course before a session that goes on with it; None if the session is elsewhere.

        Args:
            fresh: the course that begins with the session.
            reading, done: the session, and its batches up to the latest step.
        """
        last = self.reading
        begins = self.entry.number_at(fresh.epoch, fresh.position) if self.entry.agrees(fresh) else None
        if begins is None or begins == self.begins + last.steps:
            return begins
        # Whole epochs may lie in between, if the step took as many batches as the others.
        regular = last.steps == last.last_step and begins + done == self.number + self.entry.each
        return begins if regular else None


def _trained_on(history: History, in_flight: int) -> tuple[Reading | None, int]:
    """The session of the last batch that was trained on, and its batches up to this one; None without a batch."""
    if not history:
        return None, 0
    taken = list(history)[-in_flight:] if in_flight else []
    reading = taken[0][0] if taken else history[-1][0]
    return reading, reading.steps - sum(each[0] is reading for each in taken)


class Ledger:
    """The segment of this start of the run. A change that cannot be computed makes a line; a snapshot has them written.

    Args:
        snapshot: the path of the newest snapshot; absolute.
    """

    def __init__(self, snapshot: Path) -> None:
        self._snapshot = snapshot
        self.begin(None, 0)

    def begin(self, before: dict[str, Any] | None, step: int) -> None:
        """Begin a segment. `before`: what the snapshot that was loaded says of the ledger; None if nothing."""
        self._segment = uuid.uuid4().hex[:12]
        self._known: dict[str, _Course] = {}
        self._lines = self._bytes = self._step = 0  # of all lines; of those written; of the last one
        self._pending: list[str] = []
        self._start, self._before = step, before
        self._add({"ledger": FORMAT, "segment": self._segment, "step": step, "continues": before})

    def _add(self, values: dict[str, Any]) -> None:
        # With the step of the line before, a damaged line leaves it known until when the one before it held.
        self._pending.append(seal({**values, "before": self._step}))
        self._lines, self._step = self._lines + 1, values["step"]

    def look(self, loaders: Mapping[str, Loader], steps: int, in_flight: int, body: Body | None) -> None:
        """See what the step took that was just counted. `in_flight`: as `Snapshot.step` has it."""
        for name, loader in loaders.items():
            known, progress = self._known.get(name), loader._progress
            if known is not None and known.entry.unknown:
                continue
            ahead = in_flight if body is None or not in_flight else body.in_flight_of(name, in_flight)
            reading, done = _trained_on(progress.history, ahead)
            if reading is not None and (known is None or reading is not known.reading):
                is_open = reading in (progress.reading, progress.spent) and progress.latest() is not None
                if not (is_open or ahead or len(loaders) == 1):
                    reading = None  # it was read between two steps, and left: a validation
            course, last = known, None if known is None else known.entry
            if reading is not None and (known is None or reading is not known.reading):
                course = self._turn(name, loader, reading, done, steps)
            if course is None:
                continue
            more = 0 if reading is None else max(0, course.begins + done - course.number)
            if course is not known or more != course.entry.each:
                course.entry = replace(course.entry, step=steps - 1, each=more, given=course.number)
                self._add(course.entry.changes(last))
            course.number += more

    def _turn(self, name: str, loader: Loader, reading: Reading, done: int, steps: int) -> _Course:
        """The course of a session that the step is the first to take batches of."""
        known, fresh = self._known.get(name), Entry.of(name, loader, reading, steps - 1)
        first = loader._progress.history[0][0]
        if known is None and first is not reading and first.run.position and not fresh.unknown:
            known = _Course(Entry.of(name, loader, first, steps - 1), first)  # the rest of the resumed epoch
        begins = None if known is None else known.begin_of(fresh, reading, done)
        if known is not None and begins is not None:
            known.reading, known.begins = reading, begins
            self._known[name] = known
            return known
        if fresh.unknown and not reading.run.world.rank:
            warn(
                f"the ledger does not say which samples {name} gives, because {fresh.unknown}; trace will say so too"
            )
        self._known[name] = course = _Course(fresh, reading)
        return course

    # --- writing ---

    def write(self) -> dict[str, Any]:
        """Write and sync what is new.

        Returns:
            What the snapshot that is about to be saved says of the ledger: the segment, its lines, the step of the last
            one, and that at which the segment starts; and the same of the segment that it continues, in case that its
            own first line, which says this too, is damaged.

        Raises:
            OSError: it cannot be written.
        """
        if self._pending:
            path = segment_path(self._snapshot, self._segment)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            with path.open("r+b") as file:
                file.truncate(self._bytes)  # what an attempt has left that failed
                file.seek(self._bytes)
                file.write("".join(self._pending).encode())
                file.flush()
                os.fsync(file.fileno())
                self._bytes = file.tell()
            with contextlib.suppress(OSError):  # the snapshot's own folder is synced with a warning
                sync_folder(path.parent)
            self._pending.clear()
        count = {"segment": self._segment, "lines": self._lines, "step": self._step, "start": self._start}
        return {**count, "continues": _alone(self._before)}
