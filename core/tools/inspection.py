"""What is in a checkpoint: the states of loaders inside, and an edited copy. Nothing in a file is run or followed.

Reads what torch.save wrote (a `Snapshot`, a checkpoint of Lightning's, whatever can be loaded with
``weights_only=True``), a folder of torch.distributed.checkpoint's, any other folder of such files, and JSON.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import json
import os
import pickle
import resource
import stat
import time
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar

import torch

from midepoch.checkpoint.files import checksums, damage_in
from midepoch.checkpoint.pickles import check_pickle
from midepoch.errors import SnapshotError, StateError
from midepoch.state.format import FIELDS, State, check, reseal

__all__ = ["Contents", "StateInFile", "look", "modest", "seek"]

_LARGEST_TEXT = 16 << 20  # bytes of JSON, or of one state; parsed, it takes up to a hundred times as much memory
_LARGEST_PICKLE = 256 << 20  # bytes of the pickle that describes a checkpoint's tensors
_MOST_CONTAINERS = 2_000_000  # to look through; containers that share others have exponentially many paths
_MOST_STATES = 20_000  # in one file: one of each loader of each rank
_OVERHEAD = 1 << 30  # bytes of memory that reading a file may take, beyond twice its size
_DEEPEST = 100
_SUFFIXES = (".ckpt", ".json", ".pkl", ".pt", ".pth")
_MOST_FILES = 1000
Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class StateInFile:
    """A loader's state in a checkpoint.

    Attributes:
        file: the file that holds it.
        keys: the keys and indices that lead to it in the file.
        state: as it was saved.
        problem: why it cannot be loaded; empty where its checksum holds and every field is valid.
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
    """What was found.

    Attributes:
        path: of the file or folder.
        kind: what it is, in words.
        saved: when, in seconds since 1970; as the file says, else as the file system says.
        found: the states of loaders in it.
        facts: what else it says about itself, such as steps.
        problems: what is damaged, besides the states.
    """

    path: Path
    kind: str
    saved: float
    found: tuple[StateInFile, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def look(path: str | os.PathLike[str]) -> Contents:
    """All states of loaders in a file or folder.

    Raises:
        SnapshotError: it cannot be read, is of no known kind, or holds objects that weights_only refuses.
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
    return Contents(path, kind, saved, tuple(_places(path, content)), facts, problems)


def seek(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    epoch: int | None = None,
    position: int | None = None,
    name: str | None = None,
) -> StateInFile:
    """Write a copy of a checkpoint in which a loader stands elsewhere; all else in it is as it was.

    Only a state without a ``detail`` can be moved: then its epoch and position say all that its source needs. At the
    very beginning, states of other sources have no detail either. Where such a source cannot begin at the new place,
    ``load_state_dict`` refuses the copy.

    A state to which several places of the file refer, as of those that Lightning and `ExactResume` both save, is moved
    in all of them. Tensors that were saved on a GPU are on the CPU in the copy.

    Args:
        path: a file that `look` reads, not a folder.
        out: the copy's path, which must not be there yet.
        epoch: the new epoch, from 0; None: as it is.
        position: the new position, in units of the epoch, from 0; None: 0 where `epoch` is given, else as it is.
        name: which state, as in `StateInFile.name`; None where there is only one.

    Returns:
        The new state and its place in the copy.

    Raises:
        SnapshotError: the file cannot be read, or the copy not written.
        StateError: there is no such state, it is damaged, or it has a detail, which leads to its own place alone.
        ValueError: the epoch or the position is out of range.
    """
    path, out = Path(path), Path(out)
    if path.is_dir():
        raise SnapshotError(f"{path} is a folder: name a file in it, or use loader.seek in the training script")
    if out.exists():
        raise SnapshotError(f"{out} is there already: name a file that is not")
    content = _content(path)
    found = list(_places(path, content))
    place = _chosen(path, found, name)
    state = _moved(place, epoch, position)
    for each in found:
        if each.state is place.state:
            each.state.update(state)  # it is the file's own dict, wherever that refers to it
    archive = _is_archive(path)
    if archive and isinstance(content, dict) and "midepoch_snapshot" in content:
        content["id"] = uuid.uuid4().hex  # another file, for processes that compare what they found
    draft = out.with_name(f"{out.name}.{uuid.uuid4().hex[:12]}.draft")
    try:
        if archive:
            with checksums():
                torch.save(content, draft)
        else:
            draft.write_text(json.dumps(content, indent=1) + "\n")
        os.link(draft, out)  # fails where somebody else has made it by now
    except Exception as error:
        raise SnapshotError(f"{out} was not written ({type(error).__name__}: {error}): choose another place") from error
    finally:
        draft.unlink(missing_ok=True)
    return StateInFile(out, place.keys, state, "")


def _chosen(path: Path, places: list[StateInFile], name: str | None) -> StateInFile:
    found = [place for place in places if name is None or place.name == name]
    if not found or any(place.state is not found[0].state for place in found):
        names = ", ".join(repr(place.name) for place in places) or "none"
        raise StateError(f"{path} has these states: {names}; name one of them")
    if found[0].problem:
        raise StateError(f"the state {found[0].name!r} is damaged ({found[0].problem})")
    return found[0]


def _moved(place: StateInFile, epoch: int | None, position: int | None) -> State:
    state, size = dict(place.state), place.state["size"]
    for what, value in (("epoch", epoch), ("position", position)):
        if value is not None and not (type(value) is int and 0 <= value < 1 << 62):
            raise ValueError(f"{what} must be an integer from 0, got {value!r}")
    if state["detail"]:
        raise StateError(
            f"the state {place.name!r} is of {state['adapter']}, and only its source can tell what it needs to begin "
            "elsewhere: call loader.seek in the training script, which asks it"
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
    """Whether a file is what torch.save writes."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SnapshotError(f"{path} is no regular file: name one, or a folder")
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
                raise ValueError("it is in the format that torch.save had before torch 1.6: save it again, in today's")
            if os.fstat(file.fileno()).st_size > _LARGEST_TEXT:
                raise ValueError("it is larger than any state")
            return json.loads(beginning + file.read())
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise SnapshotError(
            f"{path} is neither a checkpoint of torch.save nor JSON ({str(error)[:200]}): name one of these"
        ) from error


def _check_records(source: Path | io.BytesIO, path: Path) -> None:
    """Refuse compressed records, which torch.save never writes: they could take more memory than the file has bytes."""
    try:
        with zipfile.ZipFile(source) as archive:
            for record in archive.infolist():
                name = record.filename.rpartition("/")[2]
                is_pickle = name == "data.pkl"
                if record.compress_type != zipfile.ZIP_STORED or (is_pickle and record.file_size > _LARGEST_PICKLE):
                    raise ValueError(f"not of torch.save: {name[:100]!r} is compressed or huge")
                if is_pickle:
                    check_pickle(archive.read(record))
    except Exception as error:
        raise SnapshotError(f"{path} is damaged ({type(error).__name__}: {str(error)[:200]}): use another") from error


def _loaded(source: Path | io.BytesIO, path: Path) -> Any:
    try:
        # Tensors stay on the disk.
        return torch.load(source, weights_only=True, map_location="cpu", mmap=isinstance(source, Path) or None)
    except Exception as error:
        names = ""
        if isinstance(source, Path):
            try:
                names = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
            except Exception:  # noqa: BLE001  # the reason then is the first error
                names = ""
        if names:
            raise _NotUnpickledError(
                f"{path} holds {names[:300]}, which midepoch does not unpickle: save loaders' states in a file of "
                "tensors and built-in types"
            ) from error
        raise SnapshotError(f"{path} is damaged ({type(error).__name__}: {str(error)[:200]}): use another") from error


class _NotUnpickledError(SnapshotError):
    """A sound file that holds objects which are not unpickled here."""


@contextlib.contextmanager
def modest(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, limit this process's memory by the files' sizes: a damaged file could ask for any amount."""
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
    """The first record that is not as it was written; empty where all are."""
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
    """True for a regular file that is no link: a link could lead out of the folder."""
    return file.is_file() and not file.is_symlink()


def _look_into_folder(path: Path) -> Contents:
    """Checkpoints of trainers that write several files."""
    files = sorted(each for each in path.rglob("*") if each.suffix in _SUFFIXES and _is_inside(each))
    places: list[StateInFile] = []
    problems: list[str] = []
    passed_over: list[SnapshotError] = []  # files with other objects, such as NumPy generators that a trainer pickled
    read = 0
    for file in files[:_MOST_FILES]:
        try:
            places += _places(file, _content(file))
            read += 1
        except _NotUnpickledError as error:
            passed_over.append(error)
        except SnapshotError as error:
            problems.append(str(error))
    if passed_over and not places and not problems:
        raise passed_over[0]
    if not read and not problems:
        raise SnapshotError(f"{path} has no file that ends in {', '.join(_SUFFIXES)}: name a checkpoint")
    saved = max([_time_of(place.file) for place in places], default=_time_of(path))
    return Contents(path, "folder", saved, tuple(places), {"files": read}, tuple(problems))


class _ShardsUnpickler(pickle._Unpickler):
    """Builds the plain records of torch.distributed.checkpoint and nothing else, as weights_only=True would.

    torch's unpickler for weights_only=True does not know the pickle protocol that they are written in. This one derives
    from the unpickler in Python: the one in C allocates whatever size a file states.
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
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which midepoch does not unpickle")

    def _build(self) -> None:
        """Set the state of records only. Setting that of a class or function would change it for the whole process."""
        from torch.distributed.checkpoint import filesystem, metadata

        unpickler: Any = self
        built = type(unpickler.stack[-2])
        if built.__module__ not in (metadata.__name__, filesystem.__name__) or issubclass(built, enum.Enum):
            raise pickle.UnpicklingError(f"it would change a {built.__name__}")
        unpickler.load_build()

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}


def _opened(file: Path) -> BinaryIO:
    """Open a regular file that is no link: a link could lead out of the folder, and a pipe could block."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    return os.fdopen(descriptor, "rb")


def _look_into_shards(path: Path) -> Contents:
    """A checkpoint of torch.distributed.checkpoint, in which each key of a state is an entry of its own."""
    file = path / ".metadata"
    try:
        with _opened(file) as opened:
            data = opened.read(_LARGEST_TEXT + 1)
        if len(data) > _LARGEST_TEXT:
            raise ValueError("it is larger than any")
        check_pickle(data)
        described = _ShardsUnpickler(io.BytesIO(data)).load()
        stored = {index.fqn: info for index, info in described.storage_data.items()}
        names = [name for name in described.state_dict_metadata if isinstance(name, str)]
    except Exception as error:
        raise SnapshotError(
            f"{file} is damaged, or of another version of torch ({type(error).__name__}: {str(error)[:200]}): use "
            "another checkpoint"
        ) from error
    places = []
    for name in names:
        prefix, dot, last = name.rpartition(".")
        if last == "checksum" and all(f"{prefix}{dot}{field}" in stored for field in FIELDS):
            values = {each: _entry(path, stored[f"{prefix}{dot}{each}"]) for each in FIELDS}
            places.append(_place(path, tuple(prefix.split(".")) if dot else (), values))
    return Contents(path, "checkpoint of torch.distributed.checkpoint", _time_of(file), tuple(places))


def _entry(folder: Path, info: Any) -> Any:
    """One value. Only files in the checkpoint's own folder are opened."""
    name, offset, length = (getattr(info, each, None) for each in ("relative_path", "offset", "length"))
    plain = isinstance(name, str) and name not in ("", ".", "..") and not any(each in name for each in "/\0")
    if not isinstance(name, str) or not plain or (folder / name).is_symlink():
        raise SnapshotError(f"{folder} names a file outside of itself ({str(name)[:200]!r}): use another checkpoint")
    if not (type(offset) is int and type(length) is int and 0 <= offset < 1 << 62 and 0 <= length <= _LARGEST_TEXT):
        raise SnapshotError(f"{folder} is damaged (an entry of impossible length): use another checkpoint")
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


def _places(file: Path, content: Any) -> Iterator[StateInFile]:
    """Every dict that has the keys of a state. Containers may refer to themselves."""
    above: set[int] = set()  # ids of the containers that hold the current one
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
            raise SnapshotError(f"{file} has more in it than any checkpoint has: use another")
        if isinstance(value, dict) and value.keys() >= {"adapter", "epoch", "position", "fingerprint", "checksum"}:
            found += 1
            yield _place(file, keys, value)
            continue
        above.add(id(value))
        waiting.append((keys, value, True))
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        held = [(key, each) for key, each in inside if isinstance(key, str | int) and isinstance(each, _CONTAINERS)]
        waiting += [((*keys, key), each, False) for key, each in reversed(held)]


_CONTAINERS = (dict, list, tuple)


def _place(file: Path, keys: Keys, state: State) -> StateInFile:
    try:
        check(state)
    except StateError as error:
        return StateInFile(file, keys, state, str(error))
    return StateInFile(file, keys, state, "")
