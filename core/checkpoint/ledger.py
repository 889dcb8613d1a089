"""The ledger of a run: what each of its steps was trained on. docs/format.md says how it is written.

Each start of the run appends to a file of its own beside the snapshot, and each snapshot names how many lines of which
files are its own, and has what no line says yet. So whenever a process is killed, what it wrote after its last
snapshot, and steps that are taken back, are lines of no snapshot.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import StateError, warn
from ..loader.body import Body
from ..loader.lending import lends
from ..loader.loader import Loader
from ..loader.reading import History, Reading
from ..order.holes import Holes, Omit
from .files import sync_folder

__all__ = ["NO_LEDGER", "Ledger", "described", "ledger_path", "seal", "trained_loaders", "unseal"]


_MOST_STRETCHES = 64
"""Of a line: one of epochs of a single step each would not end."""


def ledger_path(snapshot: Path) -> Path:
    """The folder of the ledger of a snapshot's run."""
    return snapshot.with_name(f"{snapshot.name}.ledger")


def seal(values: Mapping[str, Any], place: str = "") -> str:
    """A line of a ledger: a CRC-32, and JSON. `place`: of the line, so that it is damaged anywhere else."""
    text = json.dumps(values, separators=(",", ":"))
    return f"{_crc(place, text)} {text}"


def unseal(line: str, place: str = "") -> dict[str, Any]:
    """What a line says. Raises ValueError if it is damaged."""
    crc, _, text = str(line).partition(" ")
    if crc != _crc(place, text):
        raise ValueError("it has another CRC")
    values: dict[str, Any] = json.loads(text)
    return values


def _crc(place: str, text: str) -> str:
    return f"{zlib.crc32(text.encode(), zlib.crc32(place.encode())):08x}"


NO_LEDGER = seal({"files": [], "open": None})
"""What a snapshot says whose run has none."""


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


def trained_loaders(ledger: bool | str | Iterable[str], parts: Mapping[str, Any]) -> list[str]:
    """The names of the loaders that steps are trained on, as `Snapshot` was told. Raises ValueError."""
    loaders = [name for name, part in parts.items() if lends(part)]
    names = loaders if ledger is True else [ledger] if isinstance(ledger, str) else list(ledger or ())
    if not set(names) <= set(loaders) or (ledger is True and len(names) != 1):
        raise ValueError(
            f"ledger={ledger!r} does not say which loaders ({', '.join(loaders) or 'none is given'}) steps are trained "
            f"on: name those, as in ledger={loaders[:1]}"
        )
    return names


_Mark = tuple[Reading | None, int]
"""The session of the last batch that a step was trained on, and how many of its batches steps were trained on."""


def _taken(history: History, mark: _Mark, in_flight: int) -> dict[Reading, tuple[int, int]] | None:
    """The batches after a mark, but for those in flight: numbers [start, stop) of sessions, the latest first.

    Those that a load or a seek has given up are in no history. None if the mark is not, for want of space.
    """
    flying = Counter(reading for reading, _, _ in itertools.islice(reversed(history), in_flight))
    found: dict[Reading, tuple[int, int]] = {}
    for reading, _, _ in reversed(history):
        start, stop = mark[1] if reading is mark[0] else 0, reading.steps - flying[reading]
        if start < stop:
            found[reading] = start, stop
        if reading is mark[0]:
            return found
    return None if len(history) == history.maxlen else found


class Ledger:
    """The lines of this start of the run.

    A line says of some steps in a row what they took. The next one begins where a session ends or begins, or a step
    takes more or fewer batches than those before.

    Args:
        snapshot: the path of the newest snapshot; absolute.
        names: of the loaders that steps are trained on.
    """

    def __init__(self, snapshot: Path, names: Iterable[str]) -> None:
        self._folder, self._names = ledger_path(snapshot), list(names)
        self._warned: set[str] = set()
        self.begin(NO_LEDGER, 0)

    def begin(self, text: str, step: int) -> None:
        """The run was started after a step. `text`: what `write` has returned for the loaded snapshot."""
        told = unseal(text)
        self._files = [*told["files"], [f"{random.SystemRandom().getrandbits(64):016x}", 0, step]]
        self._pending: list[dict[str, Any]] = [] if told["open"] is None else [told["open"]]  # lines to write
        self._bytes = 0  # of this start's file
        self._marks: dict[str, _Mark] = {}  # by loader
        self._first, self._last = step + 1, step  # of the steps that no line has
        self._stretches: dict[Reading, dict[str, Any]] = {}  # what they took

    def look(self, loaders: Mapping[str, Loader], step: int, in_flight: int, body: Body | None) -> None:
        """See what a step took that was just counted. `in_flight`: as `Snapshot.step` has it."""
        taken: dict[Reading, tuple[int, int]] = {}
        names: dict[Reading, tuple[str, str]] = {}  # of the loader, and why the ledger does not know the batches
        for name in self._names:
            if name not in loaders or not (history := loaders[name]._progress.history):
                continue
            newest, mark = history[-1][0], self._marks.get(name, (None, 0))
            ahead = in_flight if body is None or not in_flight else body.in_flight_of(name, in_flight)
            found, why = _taken(history, mark, ahead), ""
            if found is None:
                found, why = {newest: (0, newest.steps)}, "a step took more batches than are remembered"
            self._marks[name] = next(((reading, stop) for reading, (_, stop) in found.items()), mark)
            taken |= dict(reversed(found.items()))
            names |= dict.fromkeys(found, (name, why))
        if not self._goes_on(step, taken) or len(self._stretches) >= _MOST_STRETCHES:
            self._pending += [self._line()] if self._first < step else []
            self._first, self._stretches = step, {}
        for reading, (start, stop) in taken.items():
            if (known := self._stretches.get(reading)) is not None:
                known["every"] = known["every"] or step - known["first"]
                continue
            name, why = names[reading]
            session = {"unknown": why} if why else described(loaders[name], reading)
            counted = {"first": step, "every": 0, "batch": start, "each": stop - start}
            self._stretches[reading] = {"loader": name, **session, **counted}
            if "unknown" in session and name not in self._warned and not reading.run.world.rank:
                self._warned.add(name)
                warn(
                    f"the ledger does not say which samples {name} gives, because {session['unknown']}; trace will say "
                    "so too"
                )
        self._last = step

    def _goes_on(self, step: int, taken: Mapping[Reading, tuple[int, int]]) -> bool:
        """Whether a step takes what the steps before let expect. A loader may be read at every second step, or so."""
        for reading, known in self._stretches.items():
            steps = step - known["first"]
            times, rest = divmod(steps, known["every"] or steps)
            if reading in taken:
                batch = known["batch"] + times * known["each"]
                if rest or taken[reading] != (batch, batch + known["each"]):
                    return False
            elif known["every"] and not rest:
                return False
        return True

    def _line(self) -> dict[str, Any]:
        return {"first": self._first, "last": self._last, "stretches": list(self._stretches.values())}

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
        still_open = self._line() if self._first <= self._last else None
        return seal({"folder": self._folder.name, "files": self._files, "open": still_open})
