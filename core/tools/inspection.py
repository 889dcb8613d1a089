"""What is in a checkpoint: the states of loaders; and a copy in which one leaves out more. No file is run or followed.

It reads files of torch.save (a `Snapshot`, a trainer's checkpoint, and all that ``weights_only=True`` loads), folders
of such files, and JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.files import checksums, damage_in
from ..errors import SnapshotError, StateError
from ..order.holes import Omit
from ..state.format import State, check, reseal
from .command import write_new

__all__ = ["Contents", "DamagedError", "FoundState", "find_states", "look", "skip"]

_RANGE = re.compile(r"(\d{1,18}):(\d{1,18})\.\.(\d{1,18})")
_LARGEST_TEXT = 16 << 20  # bytes of JSON, or of one state; once parsed it takes a hundred times that at worst
_LARGEST_PICKLE = 256 << 20  # bytes of a checkpoint's pickle, which refers to its tensors
_MOST_CONTAINERS = 500_000  # to search; containers that refer to each other can make the number of paths explode
_DEEPEST = 100
_SUFFIXES = (".ckpt", ".json", ".pkl", ".pt", ".pth")
_MOST_FILES = 1000
Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class FoundState:
    """A loader's state in a checkpoint."""

    file: Path  # that contains it
    keys: Keys  # that lead to it in the file
    state: State  # as saved
    problem: str  # why it cannot be loaded; empty if its checksum holds and every key is valid

    @property
    def name(self) -> str:
        """The keys, joined by dots."""
        return ".".join(map(str, self.keys))


@dataclass(frozen=True)
class Contents:
    """What a file or folder contains."""

    path: Path
    kind: str  # what it is, as text
    saved: float  # time in seconds since 1970, from the file's content, otherwise from the file system
    states: tuple[FoundState, ...]  # of loaders
    facts: dict[str, Any] = field(default_factory=dict)  # what else it says about itself, such as steps
    problems: tuple[str, ...] = ()  # what is damaged, besides the states


def look(path: str | os.PathLike[str]) -> Contents:
    """Find all states of loaders in a file or folder.

    Raises:
        DamagedError: it is damaged. A damaged file in a folder is among the problems instead.
        SnapshotError: it cannot be read, is of an unknown kind, or contains what weights_only refuses.
    """
    path = Path(path)
    if path.is_dir():
        return _look_into_folder(path)
    content, saved = content_of(path), path.stat().st_mtime
    states = tuple(find_states(path, content))
    if not is_archive(path):
        return Contents(path, "JSON", saved, states)
    facts: dict[str, Any] = {}
    kind = "checkpoint of torch.save"
    if isinstance(content, dict) and type(content.get("midepoch_snapshot")) is int:
        kind = "snapshot"
        facts = {name: content[name] for name in ("steps", "world_size") if type(content.get(name)) is int}
        if isinstance(parts := content.get("parts"), dict):
            facts["parts"] = [str(name)[:100] for name in parts][:100]
        if type(content.get("time")) is float:
            saved = content["time"]
    try:
        with zipfile.ZipFile(path) as archive:
            changed = damage_in(archive)  # a record, after it was written
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        changed = f"its records cannot be checked ({str(error)[:200]})"
    return Contents(path, kind, saved, states, facts, (changed,) if changed else ())


# --- reading -------------------------------------------------------------------------------------------------------


def is_archive(path: Path) -> bool:
    """Whether a file has the format of torch.save."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SnapshotError(f"{path} is not a regular file: name one, or a folder")
        with path.open("rb") as file:
            return file.read(2) == b"PK"
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read ({error.strerror}): name a file or a folder") from error


def content_of(path: Path) -> Any:
    """What a file holds. Raises as `look`."""
    if is_archive(path):
        return _loaded(path)
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_TEXT + 1)
        if len(text) > _LARGEST_TEXT:
            raise ValueError("it is larger than any state")
        return json.loads(text)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise SnapshotError(
            f"{path} is neither a checkpoint of torch.save nor JSON ({str(error)[:200]}): name one of these"
        ) from error


def _loaded(path: Path) -> Any:
    names, is_bounded = "", False
    try:
        # torch.save compresses no record, so none that it has written takes more memory than its file has bytes.
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                name = record.filename.rpartition("/")[2]
                is_huge = name == "data.pkl" and record.file_size > _LARGEST_PICKLE
                if record.compress_type != zipfile.ZIP_STORED or is_huge:
                    raise ValueError(f"not of torch.save: {name[:100]!r} is compressed or huge")
        is_bounded = True
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True)  # tensors stay on disk
    except Exception as error:
        with contextlib.suppress(Exception):  # the first error is the reason
            names = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path)) if is_bounded else ""
        if not names:
            told = f"{path} is damaged ({type(error).__name__}: {str(error)[:200]}): use another"
            raise DamagedError(told) from error
        raise _NotUnpickledError(
            f"{path} contains {names[:300]}, which midepoch does not unpickle: save the loaders' states in a file "
            "of tensors and built-in types"
        ) from error


class DamagedError(SnapshotError):
    """A file that is of a kind that can be read, and cannot be read."""


class _NotUnpickledError(SnapshotError):
    """An undamaged file with more than midepoch unpickles."""


def _look_into_folder(path: Path) -> Contents:
    """Read checkpoints of trainers that write several files."""
    if (path / ".metadata").exists():
        raise SnapshotError(
            f"{path} is a folder of torch.distributed.checkpoint, whose index is a pickle: make one file of it with "
            f"`python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} FILE`, and name that"
        )
    found = (each for each in path.rglob("*") if each.suffix in _SUFFIXES)
    files = sorted(each for each in found if each.is_file() and not each.is_symlink())  # a link may lead anywhere
    states: list[FoundState] = []
    problems: list[str] = []
    passed_over: list[SnapshotError] = []  # for example NumPy generators that a trainer pickled
    files = files[:_MOST_FILES]
    for file in files:
        try:
            states += find_states(file, content_of(file))
        except _NotUnpickledError as error:
            passed_over.append(error)
        except SnapshotError as error:
            problems.append(str(error))
    if passed_over and not states and not problems:
        raise passed_over[0]
    if not files:
        raise SnapshotError(f"{path} has no file that ends in {', '.join(_SUFFIXES)}: name a checkpoint")
    saved = max([entry.file.stat().st_mtime for entry in states], default=path.stat().st_mtime)
    facts = {"files": len(files) - len(passed_over) - len(problems)}
    return Contents(path, "folder", saved, tuple(states), facts, tuple(problems))


# --- finding -------------------------------------------------------------------------------------------------------


def find_states(file: Path, content: Any) -> Iterator[FoundState]:
    """Find every dict with the keys of a state, even in containers that contain themselves."""
    above: set[int] = set()  # containers around this one
    searched = itertools.count(1)

    def search(keys: Keys, value: Any) -> Iterator[FoundState]:
        if not isinstance(value, dict | list | tuple) or id(value) in above or len(keys) > _DEEPEST:
            return
        if next(searched) > _MOST_CONTAINERS:
            raise SnapshotError(f"{file} has more containers in it than any checkpoint: use another")
        if isinstance(value, dict) and value.keys() >= {"adapter", "epoch", "position", "fingerprint", "checksum"}:
            problem = ""
            try:
                check(value)
            except StateError as error:
                problem = str(error)
            yield FoundState(file, keys, value, problem)
            return
        above.add(id(value))
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str | int):
                yield from search((*keys, key), inner)
        above.discard(id(value))

    return search((), content)


# --- a copy that leaves out more --------------------------------------------------------------------------------------


def skip(path: Path, ranges: Sequence[str], out: Path, name: str | None = None) -> None:
    """Write a copy of a checkpoint, in which a loader leaves out ranges of positions, as after `Loader.skip`.

    Args:
        path: a file of torch.save, or JSON.
        ranges: each as ``EPOCH:START..STOP``, START included, STOP not.
        out: a file that does not exist yet.
        name: of the state, as `look` tells it; None if there is one.

    Raises:
        ValueError: a range is none, lies in an epoch that has ended, or beyond its epoch.
        StateError: the state is damaged, or would have too many ranges.
        SnapshotError: the checkpoint cannot be read, has no such state, or the copy cannot be written.
    """
    if path.is_dir():
        raise SnapshotError(f"{path} is a folder: name the file in it that has the loader's state")
    content = content_of(path)
    states = {each.name: each for each in find_states(path, content)}
    chosen = [each for key, each in states.items() if name in (None, key)]
    if len(chosen) != 1:
        raise SnapshotError(
            f"{path} has {len(states)} states of loaders ({', '.join(states)[:200]}): name one of them with --state"
        )
    state = chosen[0].state
    if problem := chosen[0].problem:
        raise StateError(f"{chosen[0].name or path}: {problem}")
    omit, now = Omit.parse(state["omit"], state["epoch"]), state["epoch"]
    for each in ranges:
        if (match := _RANGE.fullmatch(each)) is None:
            raise ValueError(f"{each!r:.60} is no range of positions: write EPOCH:START..STOP, such as 0:1280..1920")
        epoch, start, stop = map(int, match.groups())
        omit = omit.with_skip(start, stop, epoch, now, state["size"] or 0)
    state.update(reseal({**state, "omit": omit.text(now)}))
    text = None if is_archive(path) else json.dumps(content).encode()
    with checksums():
        write_new(out, lambda file: torch.save(content, file) if text is None else file.write(text))
