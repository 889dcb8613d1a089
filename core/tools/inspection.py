"""What is in a checkpoint: the states of loaders. Also writes an edited copy. Nothing in a file is run or followed.

It reads files of torch.save (a `Snapshot`, a trainer's checkpoint, and all that ``weights_only=True`` loads), folders
of torch.distributed.checkpoint, other folders of such files, and JSON.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import json
import os
import pickle
import stat
import time
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar

import torch

from ..checkpoint.files import checksums, damage_in
from ..errors import SnapshotError, StateError
from ..state.format import FIELDS, State, check, reseal

__all__ = ["Contents", "DamagedError", "FoundState", "limited_memory", "look", "seek"]

_LARGEST_TEXT = 16 << 20  # bytes of JSON, or of one state; once parsed it takes a hundred times that at worst
_LARGEST_PICKLE = 256 << 20  # bytes of a checkpoint's pickle, which refers to its tensors
_MOST_CONTAINERS = 2_000_000  # to search; containers that refer to each other can make the number of paths explode
_MOST_STATES = 20_000  # in one file: one of each loader of each rank
_OVERHEAD = 1 << 30  # bytes of memory that a file may take besides its own size
_DEEPEST = 100
_SUFFIXES = (".ckpt", ".json", ".pkl", ".pt", ".pth")
_MOST_FILES = 1000
Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class FoundState:
    """A loader's state in a checkpoint.

    Attributes:
        file: that contains it.
        keys: that lead to it in the file.
        state: as saved.
        problem: why it cannot be loaded; empty if its checksum holds and every key is valid.
    """

    file: Path
    keys: Keys
    state: State
    problem: str

    @property
    def name(self) -> str:
        """The keys, joined by dots."""
        return ".".join(map(str, self.keys))


@dataclass(frozen=True)
class Contents:
    """What a file or folder contains.

    Attributes:
        path: of the file or folder.
        kind: what it is, as text.
        saved: time in seconds since 1970, from the file's content, otherwise from the file system.
        states: the states of loaders.
        facts: what else it says about itself, such as steps.
        problems: what is damaged, besides the states.
    """

    path: Path
    kind: str
    saved: float
    states: tuple[FoundState, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def look(path: str | os.PathLike[str]) -> Contents:
    """Find all states of loaders in a file or folder.

    Raises:
        DamagedError: it is damaged. A damaged file in a folder is among the problems instead.
        SnapshotError: it cannot be read, is of an unknown kind, or contains what weights_only refuses.
    """
    path = Path(path)
    if path.is_dir():
        return _look_into_shards(path) if (path / ".metadata").exists() else _look_into_folder(path)
    content = _content(path)
    saved = _time_of(path)
    facts: dict[str, Any] = {}
    problems: tuple[str, ...] = ()
    kind = "JSON" if not _is_archive(path) else "checkpoint of torch.save"
    if kind != "JSON" and isinstance(content, dict) and type(content.get("midepoch_snapshot")) is int:
        kind = "snapshot"
        facts = {name: content[name] for name in ("steps", "world_size") if type(content.get(name)) is int}
        if isinstance(parts := content.get("parts"), dict):
            facts["parts"] = [str(name)[:100] for name in parts][:100]
        if type(content.get("time")) is float:
            saved = content["time"]
    if kind != "JSON":
        problems = _damage(path)
    return Contents(path, kind, saved, tuple(_find(path, content)), facts, problems)


def seek(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    epoch: int | None = None,
    position: int | None = None,
    name: str | None = None,
) -> FoundState:
    """Write a copy of a checkpoint with one loader moved. Everything else is unchanged.

    Only a state without a ``detail`` can be moved, because then its source needs only the epoch and position. At the
    very beginning, states of other sources have no detail either. If such a source cannot start at the new position,
    ``load_state_dict`` refuses the copy.

    If several keys of the file refer to one state, as when a trainer and its callback both save it, it is moved in all
    of them. Tensors that were saved on a GPU are on the CPU in the copy.

    Args:
        path: a file that `look` can read, not a folder.
        out: the copy's path, which must not exist.
        epoch: where to start; None keeps it.
        position: number of units of that epoch that are done; None: 0 if `epoch` is given, otherwise unchanged.
        name: of the state, as in `FoundState.name`; None if there is only one.

    Returns:
        The new state, found in the copy.

    Raises:
        SnapshotError: the file cannot be read, or the copy cannot be written.
        StateError: there is no such state, it is damaged, or it has a detail, which fixes its position.
        ValueError: the epoch or the position is impossible.
    """
    path, out = Path(path), Path(out)
    if path.is_dir():
        raise SnapshotError(f"{path} is a folder: name a file in it, or use loader.seek in the training script")
    if out.exists():
        raise SnapshotError(f"{out} already exists: name a new file")
    content = _content(path)
    found = list(_find(path, content))
    entry = _chosen(path, found, name)
    state = _moved(entry, epoch, position)
    for each in found:
        if each.state is entry.state:
            each.state.update(state)  # this dict is part of the file's content, under all its keys
    archive = _is_archive(path)
    if archive and isinstance(content, dict) and "midepoch_snapshot" in content:
        content["id"] = uuid.uuid4().hex  # a new identity, for processes that compare what they found
    draft = out.with_name(f"{out.name}.{uuid.uuid4().hex[:12]}.draft")
    try:
        if archive:
            with checksums():
                torch.save(content, draft)
        else:
            draft.write_text(json.dumps(content, indent=1) + "\n")
        os.link(draft, out)  # fails if another process has created it meanwhile
    except Exception as error:
        raise SnapshotError(f"{out} was not written ({type(error).__name__}: {error}): choose another place") from error
    finally:
        draft.unlink(missing_ok=True)
    return FoundState(out, entry.keys, state, "")


def _chosen(path: Path, states: list[FoundState], name: str | None) -> FoundState:
    found = [entry for entry in states if name is None or entry.name == name]
    if not found or any(entry.state is not found[0].state for entry in found):
        names = ", ".join(repr(entry.name) for entry in states) or "none"
        raise StateError(f"{path} has these states: {names}; name one of them")
    if found[0].problem:
        raise StateError(f"the state {found[0].name!r} is damaged ({found[0].problem})")
    return found[0]


def _moved(entry: FoundState, epoch: int | None, position: int | None) -> State:
    state, size = dict(entry.state), entry.state["size"]
    for what, value in (("epoch", epoch), ("position", position)):
        if value is not None and not (type(value) is int and 0 <= value < 1 << 62):
            raise ValueError(f"{what} must be an integer from 0, got {value!r}")
    if state["detail"]:
        raise StateError(
            f"the state {entry.name!r} (adapter {state['adapter']}) has a detail, so only its source can move it: call "
            "loader.seek in the training script"
        )
    if position is None:
        position = state["position"] if epoch is None else 0
    epoch = state["epoch"] if epoch is None else epoch
    if size is not None and position > size:
        raise ValueError(f"position must be in [0, {size}], the size of an epoch, got {position}")
    if size is not None and position == size:
        epoch, position = epoch + 1, 0
    return reseal({**state, "epoch": epoch, "position": position})


# --- reading -------------------------------------------------------------------------------------------------------


def _is_archive(path: Path) -> bool:
    """Whether a file has the format of torch.save."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SnapshotError(f"{path} is not a regular file: name one, or a folder")
        with path.open("rb") as file:
            return file.read(2) == b"PK"
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read ({error.strerror}): name a file or a folder") from error


def _content(path: Path) -> Any:
    if _is_archive(path):
        _check_records(path, path)
        return _loaded(path, path)
    try:
        with path.open("rb") as file:
            beginning = file.read(64)
            if beginning.startswith(b"\x80") and b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19" in beginning:
                raise ValueError("it is in torch.save's format from before torch 1.6: save it again with a newer torch")
            if os.fstat(file.fileno()).st_size > _LARGEST_TEXT:
                raise ValueError("it is larger than any state")
            return json.loads(beginning + file.read())
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise SnapshotError(
            f"{path} is neither a checkpoint of torch.save nor JSON ({str(error)[:200]}): name one of these"
        ) from error


def _check_records(source: Path | io.BytesIO, path: Path) -> None:
    """Refuse compressed records. torch.save writes none, so no record takes more memory than its file has bytes."""
    try:
        with zipfile.ZipFile(source) as archive:
            for record in archive.infolist():
                name = record.filename.rpartition("/")[2]
                is_pickle = name == "data.pkl"
                if record.compress_type != zipfile.ZIP_STORED or (is_pickle and record.file_size > _LARGEST_PICKLE):
                    raise ValueError(f"not of torch.save: {name[:100]!r} is compressed or huge")
    except Exception as error:
        raise DamagedError(f"{path} is damaged ({type(error).__name__}: {str(error)[:200]}): use another") from error


def _loaded(source: Path | io.BytesIO, path: Path) -> Any:
    try:
        # Tensors stay on disk.
        return torch.load(source, weights_only=True, map_location="cpu", mmap=isinstance(source, Path) or None)
    except Exception as error:
        names = ""
        if isinstance(source, Path):
            with contextlib.suppress(Exception):  # the first error is the reason
                names = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        if names:
            raise _NotUnpickledError(
                f"{path} contains {names[:300]}, which midepoch does not unpickle: save the loaders' states in a file "
                "of tensors and built-in types"
            ) from error
        raise DamagedError(f"{path} is damaged ({type(error).__name__}: {str(error)[:200]}): use another") from error


class DamagedError(SnapshotError):
    """A file that is of a kind that can be read, and cannot be read."""


class _NotUnpickledError(SnapshotError):
    """An undamaged file with more than midepoch unpickles."""


@contextlib.contextmanager
def limited_memory(path: str | os.PathLike[str]) -> Iterator[None]:
    """Limit this process's memory to little more than the files' size: a few bytes can ask for any amount of it.

    Raises:
        SnapshotError: this system cannot.
    """
    try:
        import resource
    except ModuleNotFoundError as error:
        raise SnapshotError(
            "this system cannot limit the memory that a file may take: inspect it on Linux, or load it with "
            "torch.load(path, weights_only=True)"
        ) from error
    path = Path(path)
    files = [path] if not path.is_dir() else [each for each in path.rglob("*") if each.is_file()]
    largest = max((each.stat().st_size for each in files[: 10 * _MOST_FILES] if each.is_file()), default=0)
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = taken + 2 * largest + _OVERHEAD
    if before[0] != resource.RLIM_INFINITY:
        limit = min(limit, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _damage(path: Path) -> tuple[str, ...]:
    """Find a record that was changed after it was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            problem = damage_in(archive)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        return (f"its records cannot be checked ({str(error)[:200]})",)
    return (problem,) if problem else ()


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _is_inside(file: Path) -> bool:
    """Whether it is a regular file. Links are refused, because they may lead anywhere."""
    return file.is_file() and not file.is_symlink()


def _look_into_folder(path: Path) -> Contents:
    """Read checkpoints of trainers that write several files."""
    files = sorted(each for each in path.rglob("*") if each.suffix in _SUFFIXES and _is_inside(each))
    states: list[FoundState] = []
    problems: list[str] = []
    passed_over: list[SnapshotError] = []  # for example NumPy generators that a trainer pickled
    read = 0
    for file in files[:_MOST_FILES]:
        try:
            states += _find(file, _content(file))
            read += 1
        except _NotUnpickledError as error:
            passed_over.append(error)
        except SnapshotError as error:
            problems.append(str(error))
    if passed_over and not states and not problems:
        raise passed_over[0]
    if not read and not problems:
        raise SnapshotError(f"{path} has no file that ends in {', '.join(_SUFFIXES)}: name a checkpoint")
    saved = max([_time_of(entry.file) for entry in states], default=_time_of(path))
    return Contents(path, "folder", saved, tuple(states), {"files": read}, tuple(problems))


class _ShardsUnpickler(pickle._Unpickler):
    """Builds the plain records of torch.distributed.checkpoint and nothing else, as weights_only=True would.

    torch's own unpickler for weights_only=True supports an older protocol than theirs. This class derives from the
    unpickler in Python, because the one in C takes as much memory as a file asks for.
    """

    def find_class(self, module: str, name: str) -> Any:
        from torch.distributed.checkpoint import filesystem, metadata

        if module == metadata.__name__ and name in (*metadata.__all__, "_MEM_FORMAT_ENCODING"):
            return vars(metadata)[name]
        if module == filesystem.__name__ and name in ("_StorageInfo", "_StoragePrefix"):
            return vars(filesystem)[name]
        if module == "pathlib" and name.endswith("Path"):
            return PurePosixPath
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return {"Size": torch.Size, "_get_layout": vars(torch.serialization)["_get_layout"]}[name]
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which midepoch does not unpickle")

    def _build(self) -> None:
        """Change records only. To change a class or a function would change it for the whole process."""
        from torch.distributed.checkpoint import filesystem, metadata

        unpickler: Any = self
        built = type(unpickler.stack[-2])
        if built.__module__ not in (metadata.__name__, filesystem.__name__) or issubclass(built, enum.Enum):
            raise pickle.UnpicklingError(f"it would change a {built.__name__}")
        unpickler.load_build()

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}


def _opened(file: Path) -> BinaryIO:
    """Open a regular file that is not a link, so that it neither leads out of the checkpoint's folder nor blocks."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    return os.fdopen(descriptor, "rb")


def _look_into_shards(path: Path) -> Contents:
    """Read a checkpoint of torch.distributed.checkpoint, where each key of a state is a separate entry."""
    file = path / ".metadata"
    try:
        with _opened(file) as opened:
            data = opened.read(_LARGEST_TEXT + 1)
        if len(data) > _LARGEST_TEXT:
            raise ValueError("it is larger than any checkpoint's")
        described = _ShardsUnpickler(io.BytesIO(data)).load()
        stored = {index.fqn: info for index, info in described.storage_data.items()}
        names = [name for name in described.state_dict_metadata if isinstance(name, str)]
    except OSError as error:
        raise SnapshotError(f"{file} cannot be read ({error.strerror}): use another checkpoint") from error
    except Exception as error:
        raise DamagedError(
            f"{file} is damaged, or from another version of torch ({type(error).__name__}: {str(error)[:200]}): use "
            "another checkpoint"
        ) from error
    states = []
    for name in names:
        prefix, dot, last = name.rpartition(".")
        if last == "checksum" and all(f"{prefix}{dot}{field}" in stored for field in FIELDS):
            names = [each for each in FIELDS if f"{prefix}{dot}{each}" in stored]
            values = {each: _entry(path, stored[f"{prefix}{dot}{each}"]) for each in names}
            states.append(_checked(path, tuple(prefix.split(".")) if dot else (), values))
    return Contents(path, "checkpoint of torch.distributed.checkpoint", _time_of(file), tuple(states))


def _entry(folder: Path, info: Any) -> Any:
    """Read one value. The names in a checkpoint are those of files beside it. Nothing else is opened."""
    name, offset, length = (getattr(info, each, None) for each in ("relative_path", "offset", "length"))
    plain = isinstance(name, str) and name not in ("", ".", "..") and not any(each in name for each in "/\0")
    if not isinstance(name, str) or not plain or (folder / name).is_symlink():
        raise SnapshotError(f"{folder} names a file outside of itself ({str(name)[:200]!r}): use another checkpoint")
    if not (type(offset) is int and type(length) is int and 0 <= offset < 1 << 62 and 0 <= length <= _LARGEST_TEXT):
        raise DamagedError(f"{folder} is damaged (an entry of impossible length): use another checkpoint")
    try:
        with _opened(folder / name) as file:
            file.seek(offset)
            entry = io.BytesIO(file.read(length))
    except OSError as error:
        raise SnapshotError(f"{folder / name} cannot be read ({error.strerror}): use another checkpoint") from error
    _check_records(entry, folder / name)
    entry.seek(0)
    return _loaded(entry, folder / name)


# --- finding -------------------------------------------------------------------------------------------------------


def _find(file: Path, content: Any) -> Iterator[FoundState]:
    """Find every dict with the keys of a state, even in containers that contain themselves."""
    above: set[int] = set()  # containers around this one
    waiting: list[tuple[Keys, Any, bool]] = [((), content, False)] if isinstance(content, _CONTAINERS) else []
    looked_through = found = 0
    while waiting:
        keys, value, left = waiting.pop()
        if left:
            above.discard(id(value))
            continue
        if id(value) in above or len(keys) > _DEEPEST:
            continue
        looked_through += 1
        if looked_through > _MOST_CONTAINERS or found > _MOST_STATES:
            raise SnapshotError(f"{file} has more containers in it than any checkpoint: use another")
        if isinstance(value, dict) and value.keys() >= {"adapter", "epoch", "position", "fingerprint", "checksum"}:
            found += 1
            yield _checked(file, keys, value)
            continue
        above.add(id(value))
        waiting.append((keys, value, True))
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        held = [(key, each) for key, each in inside if isinstance(key, str | int) and isinstance(each, _CONTAINERS)]
        waiting += [((*keys, key), each, False) for key, each in reversed(held)]


_CONTAINERS = (dict, list, tuple)


def _checked(file: Path, keys: Keys, state: State) -> FoundState:
    try:
        check(state)
    except StateError as error:
        return FoundState(file, keys, state, str(error))
    return FoundState(file, keys, state, "")
