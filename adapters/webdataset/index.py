"""Where each sample of each shard is: built once, kept in a cache beside what identifies the shard.

An index holds two 64-bit integers a sample, the first byte and the length of the stretch in which its files are. Their
names are read with them, so whatever webdataset makes of names, it makes of these too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import platformdirs
from tqdm import tqdm
from webdataset.tariterators import base_plus_ext

from midepoch.adapters.webdataset.shards import Shard, locate, open_shard
from midepoch.errors import MidepochError, SourceError
from midepoch.reading.tar import TarError, TarIndex, index_tar, padded

__all__ = ["Index", "Keys", "ShardIndex", "build_index", "default_cache"]

_LOG = logging.getLogger("midepoch.webdataset")
_FORMAT = 2  # of the files in the cache
_DRAFT = ".part"
_PATIENCE = 0.5  # seconds of building before a progress bar appears
_SKIPPED = re.compile(r"__[^/]*__($|/)")  # tar_file_iterator's own: what webdataset takes for metadata


class Keys(NamedTuple):
    """How files are grouped to samples: webdataset's arguments, where the user gave some."""

    keys: Callable[[str], tuple[str | None, str]] = base_plus_ext
    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None

    @property
    def plain(self) -> bool:
        """Nothing of the user's own, so an index can be kept."""
        return self == Keys()

    def chosen(self, name: str) -> str | None:
        """The name under which webdataset takes a file; None for one that it leaves out."""
        if name.startswith("__") and (_SKIPPED.match(name) or ("/" not in name and name.endswith("__"))):
            return None
        if self.rename_files is not None:
            name = self.rename_files(name)
        if self.select_files is not None and not self.select_files(name):
            return None
        return name

    def prefix(self, name: str) -> str | None:
        """The key of the sample that a file belongs to; None for one that belongs to none."""
        chosen = self.chosen(name)
        return None if chosen is None else self.keys(chosen)[0]


class ShardIndex(NamedTuple):
    """One shard's samples.

    Attributes:
        shard: what it was built from.
        starts, lengths: int64; the stretch of each sample.
        checksum: of the shard's headers.
        lost: what a handler allowed to be lost, in words; empty where nothing is.
    """

    shard: Shard
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    checksum: int
    lost: str = ""


@dataclass
class Index:
    """The samples of all shards, in the user's order of shards.

    Attributes:
        shards: those that can be read.
        counts: samples in each.
        firsts: number of the first sample of each.
        starts, lengths: int64; where each sample is in its shard.
        checksum: tells these shards from others: names, samples and headers.
        losses: what was lost, in words, one for each damaged shard.
    """

    shards: list[Shard]
    counts: list[int]
    firsts: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    checksum: str
    losses: list[str]

    @property
    def size(self) -> int:
        """Samples."""
        return len(self.starts)

    def ranges(self, samples: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """For each sample: its shard's number, its first byte and its length."""
        numbers = np.searchsorted(self.firsts, samples, side="right") - 1
        return list(zip(numbers.tolist(), self.starts[samples].tolist(), self.lengths[samples].tolist(), strict=True))


def default_cache() -> Path:
    """The folder in which a user's own folder of indexes is.

    ``$MIDEPOCH_CACHE``, else ``midepoch`` where the system keeps caches (``$XDG_CACHE_HOME``, ``~/.cache``), else, for
    a user who has no home, in the folder of temporary files.
    """
    own = os.environ.get("MIDEPOCH_CACHE")
    if own:
        return Path(own)
    with contextlib.suppress(RuntimeError):  # there is no home; older versions of platformdirs return a path with ~
        folder = platformdirs.user_cache_path("midepoch", appauthor=False)
        if folder.is_absolute():
            return folder
    return Path(tempfile.gettempdir()) / f"midepoch-{os.geteuid()}"


# --- one shard --------------------------------------------------------------------------------------------------------


def _group(members: TarIndex, keys: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The stretch of each sample, from its first file's header to its last file's end."""
    prefixes = _plain_prefixes(members.names) if keys.plain else None
    if prefixes is None:
        named = [keys.prefix(name.decode("utf-8", "surrogateescape")) for name in members.names.tolist()]
        kept = np.array([place for place, prefix in enumerate(named) if prefix is not None], dtype=np.int64)
        new = np.array(
            [at == 0 or named[place] != named[kept[at - 1]] for at, place in enumerate(kept.tolist())], dtype=bool
        )
    else:
        kept, new = prefixes
    if not kept.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = kept[new]
    last = kept[np.append(np.flatnonzero(new)[1:] - 1, kept.size - 1)]
    starts = members.headers[first]
    return starts, members.offsets[last] + members.sizes[last] - starts


def _plain_prefixes(names: npt.NDArray[np.bytes_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]] | None:
    """Which files belong to samples, and which of these begin one; None where a name needs a closer look.

    What base_plus_ext does, for all names at once: a key ends at the first dot behind the last slash.
    """
    if not names.size:
        return np.empty(0, np.int64), np.empty(0, bool)
    width = names.dtype.itemsize
    letters = names.view(np.uint8).reshape(names.size, width)
    longest = int(np.flatnonzero(letters.any(axis=0))[-1]) + 1 if letters.any() else 0
    letters = letters[:, :longest]
    # Names that may be metadata, and line breaks, which a regular expression's dot does not match.
    if not longest or (letters[:, 0] == ord("_")).any() or (letters == ord("\n")).any():
        return None
    slashes = letters == ord("/")
    base = np.zeros(names.size, np.int64)
    if slashes.any():
        base = np.where(slashes.any(axis=1), longest - slashes[:, ::-1].argmax(axis=1), 0)
    columns = np.arange(longest)
    dots = letters == ord(".")
    if base.any():
        dots &= columns >= base[:, np.newaxis]
    dot = dots.argmax(axis=1)
    # A name without a dot, or that begins with one, is of no sample.
    kept = np.flatnonzero(dots.any(axis=1) & (dot > base))
    if not kept.size:
        return kept, np.empty(0, bool)
    letters, dot = letters[kept], dot[kept]
    same = dot[1:] == dot[:-1]
    same &= ((letters[1:] == letters[:-1]) | (columns >= dot[1:, np.newaxis])).all(axis=1)
    return kept, np.concatenate([np.ones(1, bool), ~same])


def _index_shard(shard: Shard, keys: Keys, handler: Callable[[Exception], Any]) -> ShardIndex:
    """Read the shard's headers.

    Raises:
        SourceError: it is damaged, and the handler does not go on.
    """
    try:
        if shard.path:
            members = index_tar(shard.path, shard.url)
        else:
            with open_shard(shard) as file:
                members = index_tar(file, shard.url)
    except MidepochError:
        raise
    except Exception as error:  # a network has kinds of its own
        raise SourceError(
            f"{shard.url} could not be read ({type(error).__name__}: {error}): mend what it lies on, or leave the "
            "shard out of the urls"
        ) from error
    starts, lengths = _group(members, keys)
    lost = ""
    if members.damage is not None:
        handler(members.damage)  # raises, or the loss is accepted
        starts, lengths, lost = _without_partial(shard, members, keys, starts, lengths)
        _LOG.warning("%s", lost)
    return ShardIndex(shard, starts, lengths, members.checksum, lost)


def _without_partial(
    shard: Shard, members: TarIndex, keys: Keys, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], str]:
    """A damaged shard's samples, without the last one if it may miss files: if another one has more."""
    damage = members.damage
    assert isinstance(damage, TarError)  # the caller has seen to it
    whole = len(starts)
    if whole:
        files = np.searchsorted(members.offsets, starts + lengths) - np.searchsorted(members.headers, starts)
        if whole == 1 or files[-1] < files[:-1].max():
            whole -= 1
    lost = shard.size - (int(starts[whole - 1] + padded(int(lengths[whole - 1]))) if whole else 0)
    told = (
        f"{shard.url}: {whole} samples before byte {damage.offset} are kept, {lost} bytes behind them are lost "
        f"({damage.what})"
    )
    return starts[:whole], lengths[:whole], told


# --- the cache --------------------------------------------------------------------------------------------------------


def _crc(head: Mapping[str, Any], body: bytes) -> int:
    """Of all that is used of a file in the cache, the shard's own checksum in its head included."""
    return zlib.crc32(body, zlib.crc32(str([head["samples"], head["checksum"]]).encode()))


class _Cache:
    """A folder of indexes that is this user's alone; none where there can be no such folder, which is told once.

    Everything goes by a descriptor of the folder, so what was looked at is what is used, and nobody who may write to
    the folder around it can put another in its place. No link in it is followed.
    """

    def __init__(self, around: Path) -> None:
        self.folder = around / f"webdataset-{os.geteuid()}"
        self._warned = False
        self._descriptor: int | None = None
        try:
            self._descriptor = self._open()
            self._remove_drafts()
        except OSError as error:
            self._warn(f"indexes cannot be kept in {self.folder} ({error.strerror or error})")

    def _open(self) -> int | None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return descriptor
        os.close(descriptor)
        whose = f"belongs to user {found.st_uid}" if found.st_uid != os.geteuid() else "can be written by others"
        self._warn(f"indexes in {self.folder} are not believed: the folder {whose}")
        return None

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "%s; shards are indexed anew each time: let MIDEPOCH_CACHE or index_cache= name a folder with room, in "
                "which you may make a folder of your own",
                what,
            )

    def _remove_drafts(self) -> None:
        """Drafts of processes that were killed: nobody holds the lock under which they were written."""
        if self._descriptor is None:
            return
        for draft in os.listdir(self._descriptor):  # noqa: PTH208  # a Path is no descriptor
            if draft.endswith(_DRAFT):
                with contextlib.suppress(OSError), self._locked(draft.partition(".")[0], wait=False):
                    os.unlink(draft, dir_fd=self._descriptor)

    def _file(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._descriptor)

    def get(self, shard: Shard, build: Callable[[], ShardIndex]) -> ShardIndex:
        """The shard's index: as it was kept, else as it is built, by one process while the others wait for it."""
        if self._descriptor is None:
            return build()
        where = os.path.realpath(shard.path) if shard.path else shard.url
        key = hashlib.sha256(where.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        found = self._load(key, shard)
        if found is not None:
            return found
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # without locks each builds its own
                stack.enter_context(self._locked(key))
            found = self._load(key, shard)
            if found is None:
                found = build()
                if not found.lost:
                    self._save(key, found)
        return found

    def _load(self, key: str, shard: Shard) -> ShardIndex | None:
        """What is kept of this very shard; None for anything else, damaged files included."""
        name = f"{key}.index"
        try:
            with os.fdopen(self._file(name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                data = file.read()
            line, _, body = data.partition(b"\n")
            head = json.loads(line)
            if (head["format"], head["size"], head["stamp"]) != (_FORMAT, shard.size, shard.stamp):
                return None
            if _crc(head, body) != head["crc"] or len(body) != 16 * head["samples"]:
                raise ValueError("its content does not fit its checksum")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _LOG.warning("the index %s cannot be used and is built anew (%s)", self.folder / name, error)
            return None
        starts, lengths = np.frombuffer(body, "<i8").reshape(2, -1).astype(np.int64)
        return ShardIndex(shard, starts, lengths, head["checksum"])

    def _save(self, key: str, index: ShardIndex) -> None:
        """Write it whole or not at all; a cache that cannot be written costs time, nothing else."""
        body = np.stack([index.starts, index.lengths]).astype("<i8").tobytes()
        head = {
            "format": _FORMAT,
            "url": index.shard.url,
            "size": index.shard.size,
            "stamp": index.shard.stamp,
            "samples": len(index.starts),
            "checksum": index.checksum,
        }
        head["crc"] = _crc(head, body)
        draft = f"{key}.{secrets.token_hex(8)}{_DRAFT}"
        try:
            with os.fdopen(self._file(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(json.dumps(head).encode() + b"\n" + body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, f"{key}.index", src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=self._descriptor)
            self._warn(f"the index of {index.shard.url} cannot be kept in {self.folder} ({error.strerror or error})")

    @contextlib.contextmanager
    def _locked(self, key: str, wait: bool = True) -> Iterator[None]:
        descriptor = self._file(f"{key}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield
        finally:
            os.close(descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _cached(shard: Shard, keys: Keys, handler: Callable[[Exception], Any], cache: _Cache) -> ShardIndex:
    def build() -> ShardIndex:
        return _index_shard(shard, keys, handler)

    # Without a stamp nothing tells a replaced shard; with functions of the user's own the samples depend on them.
    return cache.get(shard, build) if keys.plain and shard.stamp else build()


# --- all shards -------------------------------------------------------------------------------------------------------


def build_index(
    urls: list[str],
    keys: Keys,
    handlers: Mapping[str, Callable[[Exception], Any]],
    cache: Path,
    progress: bool | None,
) -> Index | str:
    """The index of all shards, or why they can only be streamed.

    Args:
        urls: of the shards.
        keys: how files are grouped to samples.
        handlers: "opening" for shards that cannot be opened, "reading" for damaged ones: webdataset's.
        cache: folder of the cache.
        progress: show a bar on standard error; None: where that is a terminal.

    Raises:
        SourceError: a shard cannot be read, and the handler does not go on.
    """
    found: list[Shard | str | Exception] = []
    missing: list[str] = []
    with ThreadPoolExecutor(max_workers=_threads()) as pool:
        found = list(pool.map(_try_locate, urls))
    shards: list[Shard] = []
    for url, place in zip(urls, found, strict=True):
        if isinstance(place, str):
            return place
        if isinstance(place, Exception):
            error = SourceError(f"{url} cannot be opened ({place}): bring it back, or leave it out of the urls")
            error.__cause__ = place
            goes_on = handlers["opening"](error)
            missing.append(f"{url}: the shard is lost ({place})")
            _LOG.warning("%s", missing[-1])
            if not goes_on:
                break
            continue
        shards.append(place)
    with contextlib.closing(_Cache(cache)) as kept:
        indexes = _build_all(shards, keys, handlers["reading"], kept, progress)
    return _join(indexes, missing)


def _threads() -> int:
    return min(16, 2 * (os.cpu_count() or 1))


def _try_locate(url: str) -> Shard | str | Exception:
    try:
        return locate(url)
    except OSError as error:
        return error


class _Bar(tqdm):
    """A bar without tqdm's watching thread, which would outlive it: worker processes are forked later."""

    monitor_interval = 0


def _build_all(
    shards: list[Shard], keys: Keys, handler: Callable[[Exception], Any], cache: _Cache, progress: bool | None
) -> list[ShardIndex]:
    lock = threading.Lock()
    bar = _Bar(
        total=sum(shard.size for shard in shards),
        desc=f"midepoch: indexing {len(shards)} shards",
        unit="B",
        unit_scale=True,
        delay=_PATIENCE,
        disable=None if progress is None else not progress,  # None: shown on a terminal
    )

    def build(shard: Shard) -> ShardIndex:
        built = _cached(shard, keys, handler, cache)
        with lock:
            bar.update(shard.size)
        return built

    with bar, ThreadPoolExecutor(max_workers=_threads()) as pool:
        try:
            return list(pool.map(build, shards))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _join(indexes: list[ShardIndex], missing: list[str]) -> Index:
    counts = [len(index.starts) for index in indexes]
    checksum = 0
    for index, count in zip(indexes, counts, strict=True):
        # Of the path its last part: data that were moved are the same data.
        name = index.shard.url.rpartition("/")[2]
        checksum = zlib.crc32(f"{name}:{count}:{index.shard.size}:{index.checksum}".encode(), checksum)
    empty = np.empty(0, np.int64)
    return Index(
        shards=[index.shard for index in indexes],
        counts=counts,
        firsts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)[:-1]]) if counts else empty,
        starts=np.concatenate([index.starts for index in indexes]) if counts else empty,
        lengths=np.concatenate([index.lengths for index in indexes]) if counts else empty,
        checksum=f"{checksum:08x}",
        losses=missing + [index.lost for index in indexes if index.lost],
    )
