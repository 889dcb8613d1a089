"""Snapshots as files: written completely or not at all, earlier ones kept, the newest sound one found.

A draft is written beside the snapshot, synced, and renamed over it. Whoever is killed in between leaves the old one.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import traceback
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import SnapshotError, warn

__all__ = ["FORMAT", "Found", "SnapshotFile", "checksums", "cure_of", "damage_in", "find", "read", "release_files",
           "sync_folder"]  # fmt: skip

FORMAT = 1  # the value of "midepoch_snapshot"
_DRAFT = ".draft"
_FOLDER = 0x10  # among the attributes of a record in a zip archive
_FIELDS = {"id": str, "steps": int, "world_size": int, "seed": int, "generators": list, "parts": dict, "kinds": dict}
_Identity = tuple[int, int, int]


class SnapshotFile:
    """The newest snapshot of one run, at an absolute path. Only rank 0 writes there, and keeps so many."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path, keep
        self.claimed = False  # this run may replace what is at `path`: it has loaded that, or saved there itself
        self._own: set[_Identity | None] = {None}  # the files that this run has written or loaded
        self._newest_is_sound = True

    def write(self, content: dict[str, Any]) -> None:
        """Write a snapshot, and keep the previous one as ``PATH.1``.

        Raises:
            SnapshotError: another run's snapshot is there, or the new one cannot be loaded.
            OSError, RuntimeError: it cannot be written. What was there is unchanged.
        """
        self.check_owner()
        with _draft_of(self.path) as draft:
            with checksums():
                torch.save(content, draft)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            try:
                torch.load(draft, weights_only=True, mmap=True, map_location="cpu")
            except Exception as error:
                raise SnapshotError(
                    f"it could not be loaded with weights_only=True ({str(error)[:300]}): let state_dict() of the part "
                    "return tensors and built-in types only"
                ) from error
            self.check_owner()
            self._own.add(_identity(draft))
            _rotate(self.path, self._keep if self._newest_is_sound else 1)
            draft.replace(self.path)
            self._newest_is_sound = True
        try:
            sync_folder(self.path.parent)
        except OSError as error:
            warn(
                f"{self.path} was saved, but its folder could not be synced ({error.strerror}): after a power failure "
                "the previous snapshot may be found instead",
            )

    def take_over(self, found: Found) -> None:
        """Continue the run of `found`, whose file may then be replaced."""
        self._own.add(_identity(self.path))
        self.claimed, self._newest_is_sound = True, not found.damaged

    def check_owner(self) -> None:
        """Raise SnapshotError if another run's snapshot is at the path."""
        if _identity(self.path) in self._own:
            return
        if not self.claimed:
            cure = "call load() before the first batch to continue that run, or move it away"
            raise SnapshotError(f"it holds another run's snapshot: {cure}")
        raise SnapshotError(
            "this run has neither written nor loaded the file that is there now: another process writes to the same "
            "path, perhaps one left over from before a restart; end it, or choose another path"
        )


# --- reading ---------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A sound snapshot, and what is wrong with newer ones."""

    path: Path
    id: str
    damaged: list[str]


def find(path: Path, check: bool = True) -> Found | None:
    """The newest sound snapshot; None if there is no snapshot at all. `check`: as of `read`.

    Raises:
        SnapshotError: there are some, and all are damaged.
    """
    damaged: list[str] = []
    # A kill between two renames leaves a gap in the numbers.
    names = [each.name.removeprefix(f"{path.name}.") for each in path.parent.glob(f"{glob.escape(path.name)}.*")]
    older = sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)) != "0")
    for back in (0, *older):
        candidate = _older(path, back)
        try:
            return Found(candidate, read(candidate, check, mapped=True)["id"], damaged)
        except FileNotFoundError:
            if older:
                damaged.append(f"{candidate} is missing")
        except SnapshotError as error:
            damaged.append(str(error))
    if damaged:
        cure = "restore a copy, or move them away to start over"
        raise SnapshotError(f"no snapshot is sound: {'; '.join(damaged)}; {cure}")
    return None


def read(path: Path, check: bool = False, mapped: bool = False) -> dict[str, Any]:
    """The content of a snapshot. `mapped`: leave tensors on the disk.

    `check`: compare every byte with the checksums (CRC-32) that torch.save wrote.

    Raises:
        FileNotFoundError: there is none.
        SnapshotError: it is damaged, or no snapshot.
    """
    try:
        if check:
            with zipfile.ZipFile(path) as archive:
                problem = damage_in(archive)
            if problem:
                raise SnapshotError(f"{path} is damaged ({problem})")
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)
    except (FileNotFoundError, SnapshotError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
        raise SnapshotError(f"{path} is damaged or not a snapshot ({problem})") from error
    if not (isinstance(content, dict) and type(content.get("midepoch_snapshot")) is int):
        raise SnapshotError(f"{path} is not a snapshot of midepoch: choose another path")
    if (format := content["midepoch_snapshot"]) != FORMAT:
        cure = "load it with the version that wrote it"
        raise SnapshotError(f"{path} has format {format}, this midepoch reads {FORMAT}: {cure}")
    for name, kind in _FIELDS.items():
        value = content.get(name)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 64):
            raise SnapshotError(f"{path} is damaged ({name} is missing or of another type)")
    if not content["generators"] or not all(isinstance(each, str) for each in content["generators"]):
        raise SnapshotError(f"{path} is damaged (generators)")
    return content


def damage_in(archive: zipfile.ZipFile) -> str:
    """What is wrong with a file that torch.save wrote, or ''. Compares every byte with its checksum."""
    # torch.save does not compress. A compressed record could take far more memory and time than the file's size.
    if packed := [record.filename for record in archive.infolist() if record.compress_type != zipfile.ZIP_STORED]:
        return f"the record {packed[0][:200]} is compressed"
    assert archive.fp is not None
    if sum(record.file_size for record in archive.infolist()) > archive.fp.seek(0, os.SEEK_END):
        return "its records have more bytes than the file"
    for record in archive.infolist():
        # torch does not check a record that claims to be a folder, and returns uninitialised memory for it.
        if record.external_attr & _FOLDER or record.is_dir():
            return f"the record {record.filename[:200]} is marked as a folder"
    if wrong := archive.testzip():
        return f"the checksum of {wrong[:200]} is wrong"
    return ""


# --- writing ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checksums() -> Iterator[None]:
    """Make torch.save write a CRC-32 of each record, whatever the process has set."""
    wanted = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(wanted)


@contextlib.contextmanager
def _draft_of(path: Path) -> Iterator[Path]:
    """A new file beside `path`, removed on exit if it is still there.

    So are all other drafts: their processes were killed, or have no business here, and cannot rename them any more.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 12}{_DRAFT}"):
        with contextlib.suppress(OSError):
            left.unlink()
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{_DRAFT}")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _rotate(path: Path, keep: int) -> None:
    """Make room for a new snapshot at `path`. `find` finds the newest sound one even if this is interrupted."""
    if keep == 1 or not path.exists():
        return
    for back in range(keep - 1, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            _older(path, back - 1).replace(_older(path, back))
    link = path.with_name(f"{path.name}.link")
    try:
        link.unlink(missing_ok=True)
        link.hardlink_to(path)
        link.replace(_older(path, 1))
    except OSError:  # no hard links on this file system: for an instant `path` does not exist
        path.replace(_older(path, 1))


def _older(path: Path, back: int) -> Path:
    return path if back == 0 else path.with_name(f"{path.name}.{back}")


def _identity(path: Path) -> _Identity | None:
    """What distinguishes a file from another at the same path; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def sync_folder(folder: Path) -> None:
    """Have a folder's names on the disk. Raises OSError if its file system cannot."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- errors ----------------------------------------------------------------------------------------------------------


def cure_of(error: BaseException, folder: Path) -> str:
    """What to do if a snapshot could not be written. torch's own errors do not say why."""
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"let this process write to {folder}, or choose another path"
    free = ""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        free = f" ({found.f_bavail * found.f_frsize >> 20} MiB are free)"
    return f"make sure that {folder} is writable and has room{free} for one more snapshot than it keeps"


def release_files(error: BaseException) -> None:
    """Clear an error's frames, which keep torch.save's file open: a full disk has room again once it is closed."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__context__
