"""Drop-ins for ``fn.readers`` in midepoch's order: on any world size, and a resume is a jump.

Call one of them in a pipeline definition. None takes ``num_shards`` or ``shard_id``: midepoch shards the data by the
world it finds when iteration starts. The pipeline gets one thread more than its ``num_threads``, because DALI's own
readers would also use one.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from nvidia.dali import Pipeline, fn

from midepoch.adapters.dali import private
from midepoch.adapters.dali.feed import Data, Feed, Indices, as_written, current_feed
from midepoch.adapters.dali.sizes import Sizes
from midepoch.errors import SourceError, UnsupportedSourceError
from midepoch.order import Sequential, Shuffled
from midepoch.reading.stored import MOST_STORED, file_as_stored
from midepoch.reading.tar import TarIndex, compression, index_tar
from midepoch.world import World

__all__ = ["file", "numpy", "webdataset"]

_PathLike = str | PathLike[str]

_FILTERS = (
    "*.jpg", "*.jpeg", "*.png", "*.bmp", "*.tif", "*.tiff", "*.pnm", "*.ppm", "*.pgm", "*.pbm", "*.jp2", "*.webp",
    "*.flac", "*.ogg", "*.wav",
)  # fmt: skip


@as_written
def file(
    file_root: _PathLike | None = None,
    *,
    files: Sequence[_PathLike] | None = None,
    labels: Sequence[int] | None = None,
    file_list: _PathLike | None = None,
    file_filters: Sequence[str] | None = None,
    dir_filters: Sequence[str] | None = None,
    case_sensitive_filter: bool = False,
    random_shuffle: bool = False,
    drop_last: bool = False,
    world: World | None = None,
    name: str | None = None,
    **others: object,
) -> tuple[Any, Any]:
    """Replaces ``fn.readers.file``: the bytes of files, and their labels as int32 of shape (1,).

    It finds the files and labels that DALI finds: with ``file_root`` those of its folders in alphabetical order,
    labelled from 0; with ``file_list``, or ``files`` and ``labels``, as given.

    Args:
        file_root: a folder with one subfolder for each class. With ``files`` or ``file_list``: the folder to which
            their paths are relative.
        files: paths.
        labels: one for each of ``files``. Without them, a file's label is its index in the list.
        file_list: a text file with a path and a label on each line.
        file_filters: patterns. A file's name must match one of them; None for DALI's own (images and sound).
        dir_filters: the same for folders.
        case_sensitive_filter: whether the case of letters matters in the filters.
        random_shuffle: shuffle the whole data set in each epoch.
        drop_last: leave out a last batch that is not full.
        world: which ranks share the data; None for the current world.
        name: ignored, so that calls need not be changed.
        others: refused.

    Raises:
        UnsupportedSourceError: an argument of DALI's reader that this one does not take.
        ValueError: not exactly one of the three is given, or no files are found.
    """
    _refuse("readers.file", others)
    root = "" if file_root is None else os.fspath(file_root)
    if (files is not None) + (file_list is not None) + (files is None and file_list is None and bool(root)) != 1:
        raise ValueError("readers.file needs one of file_root=, files= (with labels=) and file_list=")
    if files is not None:
        paths = [os.path.join(root, os.fspath(path)) for path in files]  # noqa: PTH118  # a million Path objects are too slow
        numbers = list(range(len(paths))) if labels is None else [int(label) for label in labels]
        if len(numbers) != len(paths):
            raise ValueError(f"readers.file got {len(paths)} files and {len(numbers)} labels: give one for each")
    elif file_list is not None:
        base = root or os.fspath(Path(file_list).parent)
        paths, numbers = _listed(file_list, base)
    else:
        paths, numbers = _found(root, file_filters or _FILTERS, dir_filters, case_sensitive_filter)
    if not paths:
        raise ValueError(f"readers.file found no files in {root or file_list or 'files'!r}: check path and filters")
    base = root if files is None and file_list is None else ""
    data = _Files("file", paths, base, np.array(numbers, dtype=np.int32))
    feed, (path, label) = _connect("readers.file", data, random_shuffle, drop_last, world)
    encoded = fn.io.file.read(path, dont_use_mmap=True)
    feed.images = [(encoded, Sizes(data, 0))]
    return encoded, label


def _refuse(reader: str, others: Mapping[str, object]) -> None:
    if others:
        raise UnsupportedSourceError(
            f"dali.{reader} does not take {', '.join(f'{name}=' for name in others)}: midepoch shuffles the whole data "
            "set, divides it by ranks and reads ahead by itself, so leave out what tells DALI's reader how"
        )


@as_written
def numpy(
    file_root: _PathLike | None = None,
    *,
    files: Sequence[_PathLike] | None = None,
    file_filter: str = "*.npy",
    random_shuffle: bool = False,
    drop_last: bool = False,
    world: World | None = None,
    name: str | None = None,
    **others: object,
) -> Any:
    """Replaces ``fn.readers.numpy``: the arrays of .npy files.

    Args:
        file_root: a folder. Its files and those of its subfolders are read, in alphabetical order. With ``files``: the
            folder to which their paths are relative.
        files: paths.
        file_filter: a pattern that a file's name must match.
        random_shuffle, drop_last, world, name: as for `file`.

    Raises:
        ValueError: neither is given, or no files are found.
    """
    _refuse("readers.numpy", others)
    root = "" if file_root is None else os.fspath(file_root)
    if files is not None:
        paths = [os.path.join(root, os.fspath(path)) for path in files]  # noqa: PTH118
    elif root:
        paths = [path for path in sorted(_below(root)) if fnmatch.fnmatchcase(os.path.basename(path), file_filter)]  # noqa: PTH119
    else:
        raise ValueError("readers.numpy needs file_root= or files=")
    if not paths:
        raise ValueError(f"readers.numpy found no files in {root or 'files'!r}: check path and filter")
    data = _Files("numpy", paths, "" if files is not None else root, None)
    _, (path,) = _connect("readers.numpy", data, random_shuffle, drop_last, world)
    return fn.decoders.numpy(fn.io.file.read(path, dont_use_mmap=True))


@as_written
def webdataset(
    paths: _PathLike | Sequence[_PathLike],
    *,
    ext: str | Sequence[str],
    index_paths: Sequence[_PathLike] | None = None,
    case_sensitive_extensions: bool = True,
    missing_component_behavior: Literal["empty", "skip", "error"] = "empty",
    random_shuffle: bool = False,
    drop_last: bool = False,
    world: World | None = None,
    name: str | None = None,
    **others: object,
) -> Any:
    """Replaces ``fn.readers.webdataset``: components of samples in tar archives, as bytes.

    The archives are indexed when this is called: it reads their headers, 10 us each. The order is over the
    samples of all archives, so a shuffle mixes archives.

    Args:
        paths: of uncompressed archives.
        ext: one extension for each output, with alternatives separated by semicolons, as in ``"jpg;png"``.
        index_paths: ignored, so that calls need not be changed.
        case_sensitive_extensions: whether the case of letters matters in ``ext``.
        missing_component_behavior: for a sample that lacks a component: "empty" gives an empty array, "skip" leaves
            the sample out, "error" raises.
        random_shuffle, drop_last, world, name: as for `file`.

    Returns:
        One node, or a list with one for each of ``ext``.

    Raises:
        SourceError: an archive is damaged, or a component is missing under "error".
        ValueError: there are no samples, or the behavior is none of the three.
    """
    _refuse("readers.webdataset", others)
    if missing_component_behavior not in ("empty", "skip", "error"):
        raise ValueError(
            f"missing_component_behavior must be 'empty', 'skip' or 'error', got {missing_component_behavior!r}"
        )
    shards = [paths] if isinstance(paths, str | PathLike) else list(paths)
    wanted = [ext] if isinstance(ext, str) else list(ext)
    data = _Archives(
        [_Archive(os.fspath(path)) for path in shards],
        [[each if case_sensitive_extensions else each.lower() for each in one.split(";")] for one in wanted],
        case_sensitive_extensions,
        missing_component_behavior,
    )
    if not len(data):
        raise ValueError(f"readers.webdataset found no sample with {wanted} in {len(shards)} archives: check ext")
    feed, nodes = _connect("readers.webdataset", data, random_shuffle, drop_last, world)
    feed.images = [(node, Sizes(data, output)) for output, node in enumerate(nodes)]
    return nodes[0] if isinstance(ext, str) else nodes


def _connect(caller: str, data: Data, shuffle: bool, drop_last: bool, world: World | None) -> tuple[Feed, list[Any]]:
    feed = current_feed(f"dali.{caller}")
    if feed.data is not None:
        raise ValueError("a pipeline takes one of midepoch's readers, this one has two: build a pipeline for each")
    feed.data = data
    feed.order = Shuffled(len(data)) if shuffle else Sequential(len(data))
    feed.world, feed.drop_last = world, drop_last
    # In place of the thread in which DALI's own readers prefetch: the pipeline's threads also decode and resize.
    private.add_thread(Pipeline.current())
    return feed, feed.connect(data.outputs, lambda step: data.read(step.indices))


# --- files ------------------------------------------------------------------------------------------------------------


class _Files(Data):
    """Files by path. The paths are one array, because there may be a million. DALI's threads read the files."""

    def __init__(self, kind: str, paths: list[str], root: str, labels: npt.NDArray[np.int32] | None) -> None:
        self.kind, self.outputs, self._labels = kind, 1 if labels is None else 2, labels
        encoded = os.fsencode("\0".join(paths)).split(b"\0")  # all at once, because there may be a million
        if len(encoded) != len(paths):
            raise ValueError("a path contains a NUL character, which no file's path can: remove it")
        self._text = np.frombuffer(b"".join(encoded), np.uint8)
        self._bounds = np.cumsum([0, *map(len, encoded)])
        # The data may be moved to another folder. The root's own name and what is in it must stay.
        prefix = os.fsencode(root).rstrip(b"/")
        crc = zlib.crc32(os.path.basename(prefix))  # noqa: PTH119
        kept = [path.removeprefix(prefix) for path in encoded] if prefix else encoded
        crc = zlib.crc32(b"\n".join(kept) + b"\n", crc)
        self._crc = f"{zlib.crc32(b'' if labels is None else labels.astype('<i4').tobytes(), crc):08x}"

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def crc(self) -> str:
        return self._crc

    def _path(self, index: int) -> bytes:
        return self._text[self._bounds[index] : self._bounds[index + 1]].tobytes()

    def read(self, indices: Indices) -> tuple[Any, ...]:
        # One array: DALI takes 13 µs for each of a list. To the system, a path ends at its first NUL.
        starts, ends = self._bounds[indices], self._bounds[indices + 1]
        places = starts[:, np.newaxis] + np.arange((ends - starts).max())
        paths = self._text.take(places, mode="clip")
        paths[places >= ends[:, np.newaxis]] = 0
        return (paths,) if self._labels is None else (paths, self._labels[indices][:, np.newaxis])

    def content(self, index: int, output: int, most: int | None = None) -> bytes:
        with open(self._path(index), "rb", buffering=0) as file:  # noqa: PTH123  # a path of bytes
            return file.read(-1 if most is None else most)

    def stored(self, index: int) -> bytes:
        return file_as_stored(self._path(index))

    def name(self, index: int) -> str:
        return os.fsdecode(self._path(index))


def _listed(file_list: _PathLike, base: str) -> tuple[list[str], list[int]]:
    paths, numbers = [], []
    beginning = os.path.join(base, "")  # noqa: PTH118
    for number, line in enumerate(Path(file_list).read_text(encoding="utf-8").splitlines(), start=1):
        parts = line.rsplit(None, 1)
        if not parts:
            continue
        if len(parts) < 2 or not parts[1].lstrip("-").isdigit():
            raise ValueError(f"{os.fspath(file_list)}, line {number}: expected a path and a label, got {line!r:.80}")
        path = parts[0].strip()
        paths.append(path if path.startswith("/") else beginning + path)
        numbers.append(int(parts[1]))
    return paths, numbers


def _found(
    root: str, file_filters: Sequence[str], dir_filters: Sequence[str] | None, case_sensitive: bool
) -> tuple[list[str], list[int]]:
    def matcher(patterns: Sequence[str]) -> Callable[[str], object]:
        # One regular expression for all patterns, because it may be matched a million times. No pattern: no match.
        translated = [fnmatch.translate(each if case_sensitive else each.lower()) for each in patterns]
        return re.compile("|".join(translated) or "(?!)").match

    with os.scandir(root) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir())
    if dir_filters is not None:
        matches = matcher(dir_filters)
        folders = [folder for folder in folders if matches(folder if case_sensitive else folder.lower())]
    matches = matcher(file_filters)
    paths: list[str] = []
    numbers: list[int] = []
    for number, folder in enumerate(folders):
        beginning = f"{root.rstrip('/')}/{folder}/"
        with os.scandir(f"{root}/{folder}") as entries:
            names = sorted([entry.name for entry in entries if not entry.is_dir()])
        if case_sensitive:
            paths += [beginning + name for name in names if matches(name)]
        else:
            paths += [beginning + name for name in names if matches(name.lower())]
        numbers += [number] * (len(paths) - len(numbers))
    return paths, numbers


def _below(folder: str) -> Iterator[str]:
    for where, _, names in os.walk(folder):
        yield from (f"{where.rstrip('/')}/{name}" for name in names)


# --- archives ---------------------------------------------------------------------------------------------------------


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


class _Archive:
    """One undamaged archive."""

    def __init__(self, path: str) -> None:
        try:
            with open(path, "rb") as file:  # noqa: PTH123  # a path of any kind
                kind, self.stat = compression(file.read(6)), _identity(file.fileno())
        except OSError as error:
            raise SourceError(f"{path} cannot be read ({error.strerror}): check paths=, or restore the file") from error
        if kind is not None:
            raise SourceError(f"{path} is compressed ({kind}), so it cannot be read by offset: decompress it once")
        self.path, self.index = path, index_tar(path)
        if self.index.damage is not None:
            raise self.index.damage


class _Archives(Data):
    """Samples in tar archives. Each component of each sample has an archive, an offset and a size."""

    kind = "webdataset"

    def __init__(self, archives: list[_Archive], wanted: list[list[str]], case_sensitive: bool, missing: str) -> None:
        self.outputs = len(wanted)
        self._paths = [archive.path for archive in archives]
        self._stats = [archive.stat for archive in archives]
        self._files: dict[int, int] = {}
        crc = zlib.crc32(repr((wanted, missing)).encode())
        rows: list[list[tuple[int, int, int]]] = []
        self._names: list[tuple[int, str]] = []
        for shard, archive in enumerate(archives):
            index = archive.index
            crc = zlib.crc32(f"{os.path.basename(archive.path)}:{index.checksum:08x}".encode(), crc)  # noqa: PTH119
            for key, components in _samples(index, case_sensitive):
                chosen = [next((components[each] for each in one if each in components), None) for one in wanted]
                absent = [";".join(one) for one, found in zip(wanted, chosen, strict=True) if found is None]
                if absent and missing == "skip":
                    continue
                if absent and missing == "error":
                    raise SourceError(
                        f"{archive.path}: sample {key!r} has no {', '.join(absent)}; repair the archive, or pass "
                        "missing_component_behavior='skip'"
                    )
                rows.append(
                    [
                        (shard, 0, 0) if found is None else (shard, int(index.offsets[found]), int(index.sizes[found]))
                        for found in chosen
                    ]
                )
                self._names.append((shard, key))
        self._places = np.array(rows, dtype=np.int64).reshape(len(rows), self.outputs, 3)
        self._crc = f"{crc:08x}"

    def __len__(self) -> int:
        return len(self._places)

    @property
    def crc(self) -> str:
        return self._crc

    def read(self, indices: Indices) -> tuple[Any, ...]:
        places = self._places[indices]
        return tuple(
            [self._component(*place) for place in places[:, output].tolist()] for output in range(self.outputs)
        )

    def content(self, index: int, output: int, most: int | None = None) -> bytes:
        shard, offset, size = self._places[index, output].tolist()
        return self._component(shard, offset, size if most is None else min(size, most)).tobytes()

    def stored(self, index: int) -> bytes:
        places = self._places[index].tolist()
        return b"".join(
            self._component(shard, offset, min(size, MOST_STORED)).tobytes() for shard, offset, size in places
        )

    def _component(self, shard: int, offset: int, size: int) -> npt.NDArray[np.uint8]:
        if not size:
            return np.empty(0, np.uint8)
        opened = self._files.get(shard)
        if opened is None:
            opened = self._files[shard] = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC)
        if _identity(opened) != self._stats[shard]:
            raise SourceError(
                f"{self._paths[shard]} was changed after it was indexed: define the pipeline again, or restore the file"
            )
        content = os.pread(opened, size, offset)
        if len(content) < size:
            raise SourceError(
                f"{self._paths[shard]}, offset {offset}: expected {size} bytes as indexed, found {len(content)}: the "
                "archive was changed while it was read; define the pipeline again, or restore the file"
            )
        return np.frombuffer(content, np.uint8)

    def name(self, index: int) -> str:
        shard, key = self._names[index]
        return f"{self._paths[shard]}: {key}"

    def __del__(self) -> None:
        for opened in self.__dict__.get("_files", {}).values():
            os.close(opened)


# A key, which ends at the first dot of the path's last part, and an extension.
_NAME = re.compile(r"((?:.*/)?[^./]*)\.?(.*)", re.DOTALL)


def _samples(index: TarIndex, case_sensitive: bool) -> Iterator[tuple[str, dict[str, int]]]:
    """Group consecutive files with the same key, by extension."""
    names = [encoded.decode("utf-8", "surrogateescape") for encoded in index.names.tolist()]
    parts = [found.groups() for found in map(_NAME.match, names) if found is not None]  # each name has them
    for key, files in itertools.groupby(enumerate(parts), lambda file: file[1][0]):
        components: dict[str, int] = {}
        for place, (_, extension) in files:
            components.setdefault(extension if case_sensitive else extension.lower(), place)
        yield key, components
