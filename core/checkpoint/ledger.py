"""The ledger of a run: what each of its steps was trained on. docs/format.md says how it is written.

Each start of the run appends to a file of its own beside the snapshot, and each snapshot names how many lines of which
files are its own, and has what no line says yet. So whenever a process is killed, what it wrote after its last
snapshot, and steps that are taken back, are lines of no snapshot.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import SnapshotError, warn
from ..loader.body import Body
from ..loader.lending import lends
from ..loader.loader import Loader
from ..loader.reading import Reading
from ..order.holes import Omit
from .files import sync_folder

__all__ = ["Ledger", "described", "ledger_of", "seal", "trained_loaders", "unseal"]


def seal(values: Mapping[str, Any], place: str = "") -> str:
    """A line of a ledger: a CRC-32, and JSON. `place`: of the line, so that it is damaged anywhere else."""
    return _sealed(json.dumps(values, separators=(",", ":")), place)


def _sealed(text: str, place: str) -> str:
    return f"{zlib.crc32(text.encode(), zlib.crc32(place.encode())):08x} {text}"


def unseal(line: object, place: str = "") -> dict[str, Any]:
    """What a line says. Raises ValueError if it is damaged."""
    text = str(line)[9:]
    if line != _sealed(text, place):
        raise ValueError("it has another CRC")
    return dict(json.loads(text))


def ledger_of(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the snapshot at `path` says of its run's ledger, if it has one. Raises SnapshotError if that is damaged."""
    try:
        return unseal(content["ledger"]) if "ledger" in content else {}
    except ValueError as error:
        raise SnapshotError(f"{path} is damaged (ledger): restore a copy") from error


def described(loader: Loader, reading: Reading) -> dict[str, Any]:
    """From what a session's batches follow: the state at its beginning, and how the ranks share the rest."""
    run, adapter = reading.run, loader._progress.context.adapter
    facts = adapter.facts
    if not (can := adapter.stated_promises.skips) and facts.order is None:
        return {"unknown": can.reason}
    return {
        "epoch": run.epoch, "position": run.position, "seed": run.seed,
        "size": None if run.share is None else run.share.size + run.holes.total,
        "world_size": run.world.world_size, "batch_size": facts.batch_size, "tail": run.tail,
        "drop_last": facts.drop_last, "global_batch": loader.global_batch, "copies": facts.copies,
        "fingerprint": loader._progress.states.fingerprint, "detail": reading.session.detail(None),
        "omit": Omit({run.epoch: run.skipped}, {run.epoch: run.holes}).text(run.epoch),
    }  # fmt: skip


def trained_loaders(ledger: Any, parts: Mapping[str, Any]) -> list[str]:
    """The names of the loaders that steps are trained on, as `Snapshot` was told. Raises ValueError."""
    loaders = [name for name, part in parts.items() if lends(part)]
    one = isinstance(ledger, str) or not isinstance(ledger, Iterable)
    names = loaders if ledger is True else [] if ledger is False else [ledger] if one else [*ledger]
    if not all(name in loaders for name in names) or (ledger is True and len(names) != 1):
        raise ValueError(
            f"ledger={ledger!r} does not say which loaders ({', '.join(loaders) or 'none is given'}) steps are trained "
            f"on: name those, as in ledger={loaders[:1]}"
        )
    return names


class Ledger:
    """The lines of this start of the run.

    A session has a line that says what its batches follow from, when the first of them was trained on. Another line
    says what some steps in a row took; the next one begins where a step takes of another session, or more or fewer
    batches than those before.

    Args:
        snapshot: the path of the newest snapshot; absolute.
        names: of the loaders that steps are trained on.
    """

    def __init__(self, snapshot: Path, names: Iterable[str]) -> None:
        self._folder, self._names = snapshot.with_name(f"{snapshot.name}.ledger"), list(names)
        self._warned: set[str] = set()
        self.begin({}, 0)

    def begin(self, told: Mapping[str, Any], step: int) -> None:
        """The run was started after a step. `told`: `ledger_of` the snapshot that was loaded."""
        self._files = [*told.get("files", ()), [os.urandom(8).hex(), 0, step]]
        self._pending: list[dict[str, Any]] = [*told.get("open", ())]  # lines to write
        self._bytes = 0  # of this start's file
        self._sessions: set[int | str] = set()  # those that have a line
        # By loader: the session of the last batch that a step was trained on, and how many of its batches steps were.
        self._marks: dict[str, tuple[Reading, int]] = {}
        self._open: list[dict[str, Any]] = []  # the line of the latest steps, to which the next one may be added
        self._next: list[list[Any]] | None = None  # what that takes if it is as the one before

    def look(self, loaders: Mapping[str, Loader], step: int, in_flight: int, body: Body | None) -> None:
        """See what a step took that was just counted. `in_flight`: as `Snapshot.step` has it."""
        took = []
        for name in (each for each in self._names if each in loaders):
            ahead = in_flight if body is None or not in_flight else body.in_flight_of(name, in_flight)
            took += self._taken(name, loaders[name], ahead)
        if took == self._next:
            self._open[0]["last"] = step
        else:
            self._pending += self._open
            self._open = [{"first": step, "last": step, "took": took}]
        self._next = [[session, batch + each, each] for session, batch, each in took]

    def _taken(self, name: str, loader: Loader, in_flight: int) -> list[list[Any]]:
        """The batches since the step before, but for those in flight: of a session, from which on, and how many.

        Those that a load or a seek has given up are in no history.
        """
        history, (mark, before) = loader._progress.history, self._marks.get(name, (None, 0))
        flying = Counter(history[-back][0] for back in range(1, min(in_flight, len(history)) + 1))
        readings: dict[Reading, None] = {}  # the latest first
        for reading, _, _ in reversed(history):
            readings[reading] = None
            if reading is mark:
                break
        lost, took = mark not in readings and len(history) == history.maxlen, []
        for reading in reversed(readings):
            start, stop = before if reading is mark else 0, reading.steps - flying[reading]
            if start < stop:
                took.append([self._session(name, loader, reading, lost), start, stop - start])
                self._marks[name] = reading, stop
        return took

    def _session(self, name: str, loader: Loader, reading: Reading, lost: bool) -> int | str:
        """What lines name a session by, which has a line of its own from now on."""
        session = f"lost of {name}" if lost else reading.run.session
        if session not in self._sessions:
            self._sessions.add(session)
            said = {"unknown": "a step took more batches than are remembered"} if lost else described(loader, reading)
            self._pending.append({"loader": name, **said, "session": session})
            if "unknown" in said and name not in self._warned and not reading.run.world.rank:
                self._warned.add(name)
                warn(f"the ledger does not say which samples {name} gives, nor can trace: {said['unknown']}")
        return session

    def write(self) -> str:
        """Write and sync what is new. Returns what the snapshot that is about to be saved says of the ledger.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._pending:
            name, count, _ = self._files[-1]
            lines = [seal(each, f"{name} {number}") for number, each in enumerate(self._pending, count + 1)]
            with (self._folder / name).open("ab") as file:
                file.truncate(self._bytes)  # what a write that failed has left
                file.write("".join(f"{line}\n" for line in lines).encode())
                file.flush()
                os.fsync(file.fileno())
                self._bytes = file.tell()
            self._files[-1][1] += len(lines)
            self._pending.clear()
            with contextlib.suppress(OSError):  # the snapshot's own folder tells of it
                sync_folder(self._folder)
        return seal({"folder": self._folder.name, "files": self._files, "open": self._open})
