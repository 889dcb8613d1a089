"""The ledger of a run: what each of its steps was trained on. docs/format.md says how it is written.

Rank 0 appends lines to one file beside the snapshot, and each snapshot names the lines that are its own. So whenever a
process is killed, what it wrote after its last snapshot, and steps that are taken back, are lines of no snapshot.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import StateError, warn
from ..loader.body import Body
from ..loader.loader import Loader
from ..loader.reading import History, Reading
from ..order.holes import Holes, Omit

__all__ = ["Ledger", "described", "is_count", "ledger_path", "seal", "unseal"]


def ledger_path(snapshot: Path) -> Path:
    """The ledger of a snapshot's run."""
    return snapshot.with_name(f"{snapshot.name}.ledger")


def is_count(value: Any) -> bool:
    """Whether this is what a snapshot says of its ledger, as `Ledger.write` returns it; or None."""
    try:
        ends = [0, *(end for first, stop, _ in value["lines"] for end in (first, stop))]
        kinds = {type(each) is int for each in (value["step"], *ends, *(start for _, _, start in value["lines"]))}
        return kinds == {True} and ends == sorted(ends) and value.keys() == {"lines", "step"}
    except (TypeError, KeyError, ValueError):
        return value is None


def seal(values: Mapping[str, Any], start: int) -> str:
    """A line of a ledger: JSON, whose last key is the CRC-32 of the JSON without it, begun with the number of a start.

    So the lines of two runs that went on from one snapshot are not taken for each other.
    """
    text = json.dumps(values, separators=(",", ":"))
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode(), start):08x}"}}\n'


def unseal(line: bytes, start: int) -> dict[str, Any]:
    """What a line of a start says. Raises ValueError if it is damaged, or another start's."""
    text, _, crc = line.rpartition(b',"crc":"')
    values = json.loads(text + b"}") if crc == b'%08x"}' % zlib.crc32(text + b"}", start) else None
    if not isinstance(values, dict):
        raise ValueError("it has another CRC, or is another run's")
    return values


@dataclass
class _Course:
    """How far a loader is. Its batches are counted from this start of the run on.

    Attributes:
        line: what its lines have said.
        reading: the latest session that was seen.
        begins: the number of this session's first batch.
        number: of the first batch after the latest step.
    """

    line: dict[str, Any] = field(default_factory=dict)
    reading: Reading | None = None
    begins: int = 0
    number: int = 0

    def later(self, history: History, reading: Reading | None) -> Iterator[Reading]:
        """Go on to the sessions that were not seen yet, one by one, up to `reading`."""
        if reading is None or reading is self.reading:
            return
        readings = list(dict.fromkeys(each for each, _, _ in history))
        seen = readings.index(self.reading) + 1 if self.reading in readings else 0
        for each in readings[seen : readings.index(reading) + 1]:
            self.begins += 0 if self.reading is None else self.reading.steps
            if self.reading not in readings:  # what was left of it, a load or a seek has given up
                self.number = self.begins
            self.reading = each
            yield each


def _trained_on(history: History, in_flight: int) -> tuple[Reading | None, int]:
    """The session of the last batch that was trained on, and its batches up to this one; None without a batch."""
    if not history:
        return None, 0
    taken = list(history)[-in_flight:] if in_flight else []
    reading = taken[0][0] if taken else history[-1][0]
    return reading, reading.steps - sum(each[0] is reading for each in taken)


def described(loader: Loader, reading: Reading) -> dict[str, Any]:
    """From what a session's batches follow: the state at its beginning, and how the ranks share the rest."""
    run, adapter = reading.run, loader._progress.context.adapter
    facts, skipped, holes = adapter.facts, run.skipped or Holes(), run.holes or Holes()
    if not (can := adapter.stated_promises.skips) and facts.order is None:
        return {"unknown": can.reason}
    try:
        omit = Omit({run.epoch: skipped}, run.epoch, holes).text(run.epoch)
    except StateError as error:
        return {"unknown": str(error)}
    return {
        "epoch": run.epoch, "position": run.position, "seed": run.seed,
        "size": None if run.share is None else run.share.size + holes.total, "world_size": run.world.world_size,
        "batch_size": facts.batch_size, "fingerprint": loader._progress.states.fingerprint,
        "detail": reading.session.detail(None), "omit": omit, "tail": run.tail, "drop_last": facts.drop_last,
        "global_batch": loader.global_batch, "copies": facts.copies,
    }  # fmt: skip


class Ledger:
    """The lines of this start of the run: one for each session, and where a step begins to take more or fewer batches.

    Args:
        snapshot: the path of the newest snapshot; absolute.
    """

    def __init__(self, snapshot: Path) -> None:
        self._path = ledger_path(snapshot)
        self.begin(None, 0)

    def begin(self, count: dict[str, Any] | None, step: int) -> None:
        """The run was started. `count`: what the loaded snapshot says of the ledger; None if nothing."""
        self._count: dict[str, Any] = count or {"lines": [], "step": step}
        self._number = random.SystemRandom().getrandbits(32)  # of this start
        self._start, self._last = step, self._count["step"]
        self._courses: dict[str, _Course] = {}
        self._pending: list[str] = []
        self._bytes: int | None = None  # of the file, as this start has left it, and
        self._lines = 0  # its lines

    def look(self, loaders: Mapping[str, Loader], steps: int, in_flight: int, body: Body | None) -> None:
        """See what the step took that was just counted. `in_flight`: as `Snapshot.step` has it."""
        still_read = {name for name, loader in loaders.items() if loader._progress.latest() is not None}
        for name, loader in loaders.items():
            course, progress = self._courses.setdefault(name, _Course()), loader._progress
            if "unknown" in course.line:
                continue
            ahead = in_flight if body is None or not in_flight else body.in_flight_of(name, in_flight)
            history = progress.history
            reading, done = _trained_on(history, ahead)
            is_new = reading is not None and reading is not course.reading and len(history) == history.maxlen
            forgotten = is_new and all(each is not course.reading for each, _, _ in history)
            lines = [{"begins": course.begins, **described(loader, each)} for each in course.later(history, reading)]
            if lines and forgotten and steps - 1 > self._start:
                lines = [{"unknown": f"step {steps} took more batches than are remembered"}]
            # Otherwise it was read between two steps, and left: a validation.
            trained = name in still_read or not still_read or ahead > 0 or not lines
            number = course.begins + done if reading is course.reading and reading is not None else course.number
            each = max(0, number - course.number) if trained else 0
            if (lines and trained) or each != course.line.get("each", 0):
                for line in lines or [{}]:
                    self._add(name, course, {"each": each, "batch": course.number, **line}, steps - 1)
            course.number = number

    def _add(self, name: str, course: _Course, values: dict[str, Any], step: int) -> None:
        if "unknown" in values and course.reading is not None and not course.reading.run.world.rank:
            warn(
                f"the ledger does not say which samples {name} gives, because {values['unknown']}; trace will say so "
                "too"
            )
        values = {"start": self._start, **values}
        new = {key: value for key, value in values.items() if course.line.get(key, ...) != value}
        course.line |= values
        # With the step of the line before, a damaged line leaves it known until when the one before it held.
        self._pending.append(seal({"loader": name, "step": step, **new, "before": self._last}, self._number))
        self._last = step

    def write(self) -> dict[str, Any]:
        """Write and sync what is new.

        Returns:
            What the snapshot that is about to be saved says of the ledger: the `lines` of the file that are its own, as
            [first, after the last, the number of the start that wrote them], and the `step` of the last of them.

        Raises:
            OSError: it cannot be written.
        """
        if self._pending:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            lines = self._count["lines"]
            with self._path.open("r+b") as file:
                if self._bytes is None:
                    known = file.read()
                    self._bytes = known.rfind(b"\n") + 1  # a process that was killed may have left a part of a line
                    self._lines = known.count(b"\n")
                if (missing := max(0, (lines[-1][1] if lines else 0) - self._lines)):
                    warn(f"{self._path} has lost {missing} lines, so trace cannot tell their steps: restore the file")
                file.truncate(self._bytes)
                file.seek(self._bytes)
                file.write(b"\n" * missing + "".join(self._pending).encode())
                file.flush()
                os.fsync(file.fileno())
                self._bytes = file.tell()
            begin = self._lines + missing
            self._lines = begin + len(self._pending)
            *others, (first, _, _) = lines if lines and lines[-1][2] == self._number else [*lines, (begin, begin, 0)]
            self._count = {"lines": [*others, [first, self._lines, self._number]], "step": self._last}
            self._pending.clear()
        return self._count
