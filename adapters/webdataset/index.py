"""Where each sample of each shard is. Built once, and cached beside what identifies the shard.

An index holds two 64-bit integers a sample: the first byte and the length of the range with its files. The names are
read with the samples, so webdataset's own rules for names apply.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import platformdirs
from webdataset.tariterators import base_plus_ext

from midepoch.adapters.webdataset.progress import Bar
from midepoch.adapters.webdataset.shards import Shard, locate, open_shard
from midepoch.errors import MidepochError, SourceError
from midepoch.reading.tar import TarError, TarIndex, index_tar, padded

__all__ = ["Index", "Keys", "ShardIndex", "build_index", "default_cache"]

_LOG = logging.getLogger("midepoch.webdataset")
_FORMAT = 2  # of the cached files
_SKIPPED = re.compile(r"__[^/]*__($|/)")  # webdataset's metadata, as in its tar_file_iterator


class Keys(NamedTuple):
    """How files are grouped into samples: webdataset's arguments, if the user gave any."""

    keys: Callable[[str], tuple[str | None, str]] = base_plus_ext
    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None

    @property
    def plain(self) -> bool:
        """Whether there is no function of the user's own, so that an index can be cached."""
        return self == Keys()

    def chosen(self, name: str) -> str | None:
        """The name that webdataset gives a file; None for a file that it leaves out."""
        if name.startswith("__") and (_SKIPPED.match(name) or ("/" not in name and name.endswith("__"))):
            return None
        if self.rename_files is not None:
            name = self.rename_files(name)
        if self.select_files is not None and not self.select_files(name):
            return None
        return name

    def prefix(self, name: str) -> str | None:
        """The key of the sample that a file belongs to; None if it belongs to none."""
        chosen = self.chosen(name)
        return None if chosen is None else self.keys(chosen)[0]


class ShardIndex(NamedTuple):
    """One shard's samples.

    Attributes:
        shard: the shard it was built from.
        starts, lengths: int64; the byte range of each sample.
        checksum: of the shard's headers.
        lost: a text that says what was lost with a handler's permission; empty if nothing was.
    """

    shard: Shard
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    checksum: int
    lost: str = ""


@dataclass
class Index:
    """The samples of all shards, in the order of the user's shards.

    Attributes:
        shards: those that can be read.
        counts: number of samples in each shard.
        firsts: number of the first sample of each shard.
        starts, lengths: int64; where each sample is in its shard.
        checksum: identifies the shards by names, samples and headers.
        losses: one text for each damaged shard, which says what was lost.
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
    """The folder that contains each user's own folder of indexes.

    It is ``$MIDEPOCH_CACHE``, or ``midepoch`` in the system's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``), or, for
    a user without a home, in the folder of temporary files.
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
    """The byte range of each sample, from its first file's header to its last file's end."""
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
    """Which files belong to samples, and which of these begin one; None if a name needs the general method.

    It does what base_plus_ext does, for all names at once: a key ends at the first dot after the last slash.
    """
    if not names.size:
        return np.empty(0, np.int64), np.empty(0, bool)
    width = names.dtype.itemsize
    letters = names.view(np.uint8).reshape(names.size, width)
    longest = int(np.flatnonzero(letters.any(axis=0))[-1]) + 1 if letters.any() else 0
    letters = letters[:, :longest]
    # Such names may be metadata, or have a line break, which the dot of a regular expression does not match.
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
    # A name without a dot, or with a leading one, belongs to no sample.
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
        SourceError: it is damaged, and the handler does not continue.
    """
    try:
        if shard.path:
            members = index_tar(shard.path, shard.url)
        else:
            with open_shard(shard) as file:
                members = index_tar(file, shard.url)
    except MidepochError:
        raise
    except Exception as error:  # network file systems have their own kinds of errors
        raise SourceError(
            f"{shard.url} could not be read ({type(error).__name__}: {error}): check its disk or server, or leave the "
            "shard out of the urls"
        ) from error
    starts, lengths = _group(members, keys)
    lost = ""
    if members.damage is not None:
        handler(members.damage)  # raises, or accepts the loss
        starts, lengths, lost = _without_partial(shard, members, keys, starts, lengths)
        _LOG.warning("%s", lost)
    return ShardIndex(shard, starts, lengths, members.checksum, lost)


def _without_partial(
    shard: Shard, members: TarIndex, keys: Keys, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], str]:
    """A damaged shard's samples, without the last one if it may lack files, that is, if another sample has more."""
    damage = members.damage
    assert isinstance(damage, TarError)  # checked by the caller
    whole = len(starts)
    if whole:
        files = np.searchsorted(members.offsets, starts + lengths) - np.searchsorted(members.headers, starts)
        if whole == 1 or files[-1] < files[:-1].max():
            whole -= 1
    lost = shard.size - (int(starts[whole - 1] + padded(int(lengths[whole - 1]))) if whole else 0)
    told = (
        f"{shard.url}: {whole} samples before byte {damage.offset} are kept, {lost} bytes after them are lost "
        f"({damage.what})"
    )
    return starts[:whole], lengths[:whole], told


# --- the cache --------------------------------------------------------------------------------------------------------


def _crc(head: Mapping[str, Any], body: bytes) -> int:
    """A CRC of all that is used of a cached file, including the shard's own checksum in the head."""
    return zlib.crc32(body, zlib.crc32(str([head["samples"], head["checksum"]]).encode()))


class _Cache:
    """This user's own folder of indexes, one file a shard. Without such a folder, one warning says so."""

    def __init__(self, around: Path) -> None:
        self.folder = around / f"webdataset-{os.geteuid()}"
        self._warned = self._usable = False
        try:
            self._usable = self._is_own()
        except OSError as error:
            self._warn(f"indexes cannot be kept in {self.folder} ({error.strerror or error})")

    def _is_own(self) -> bool:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            what = "is no folder"
        elif found.st_uid != os.geteuid():
            what = f"belongs to user {found.st_uid}"
        elif found.st_mode & 0o022:
            what = "can be written by others"
        else:
            return True
        self._warn(f"indexes in {self.folder} are not trusted: it {what}")
        return False

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "%s; shards are indexed again each time: set MIDEPOCH_CACHE or index_cache= to a folder with space, in "
                "which you may create a folder of your own",
                what,
            )

    def get(self, shard: Shard, build: Callable[[], ShardIndex]) -> ShardIndex:
        """The shard's index, from the cache or built. Two processes at once both build it."""
        if not self._usable:
            return build()
        where = os.path.realpath(shard.path) if shard.path else shard.url
        file = self.folder / f"{hashlib.sha256(where.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.index"
        found = self._load(file, shard)
        if found is None:
            found = build()
            if not found.lost:
                self._save(file, found)
        return found

    def _load(self, file: Path, shard: Shard) -> ShardIndex | None:
        """The cached index of exactly this shard; None for anything else, including damaged files."""
        try:
            line, _, body = file.read_bytes().partition(b"\n")
            head = json.loads(line)
            if (head["format"], head["size"], head["stamp"]) != (_FORMAT, shard.size, shard.stamp):
                return None
            if _crc(head, body) != head["crc"] or len(body) != 16 * head["samples"]:
                raise ValueError("its content does not match its checksum")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _LOG.warning("the index %s cannot be used and is built again (%s)", file, error)
            return None
        starts, lengths = np.frombuffer(body, "<i8").reshape(2, -1).astype(np.int64)
        return ShardIndex(shard, starts, lengths, head["checksum"])

    def _save(self, file: Path, index: ShardIndex) -> None:
        """Write it whole or not at all. If it cannot be written, it only has to be built again."""
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
        draft = file.with_suffix(f".{secrets.token_hex(8)}.part")
        try:
            draft.write_bytes(json.dumps(head).encode() + b"\n" + body)
            draft.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            self._warn(f"the index of {index.shard.url} cannot be kept in {self.folder} ({error.strerror or error})")


def _cached(shard: Shard, keys: Keys, handler: Callable[[Exception], Any], cache: _Cache) -> ShardIndex:
    def build() -> ShardIndex:
        return _index_shard(shard, keys, handler)

    # Without a stamp, a replaced shard is not noticed. With functions of the user's own, samples depend on them.
    return cache.get(shard, build) if keys.plain and shard.stamp else build()


# --- all shards -------------------------------------------------------------------------------------------------------


def build_index(
    urls: list[str],
    keys: Keys,
    handlers: Mapping[str, Callable[[Exception], Any]],
    cache: Path,
    progress: bool | None,
) -> Index | str:
    """The index of all shards, or the reason why they can only be streamed.

    Args:
        urls: of the shards.
        keys: how files are grouped into samples.
        handlers: webdataset's handlers: "opening" for shards that cannot be opened, "reading" for damaged ones.
        cache: folder of the cache.
        progress: whether to show a bar on standard error; None shows it if that is a terminal.

    Raises:
        SourceError: a shard cannot be read, and the handler does not continue.
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
            error = SourceError(f"{url} cannot be opened ({place}): restore it, or leave it out of the urls")
            error.__cause__ = place
            goes_on = handlers["opening"](error)
            missing.append(f"{url}: the shard is lost ({place})")
            _LOG.warning("%s", missing[-1])
            if not goes_on:
                break
            continue
        shards.append(place)
    return _join(_build_all(shards, keys, handlers["reading"], _Cache(cache), progress), missing)


def _threads() -> int:
    return min(16, 2 * (os.cpu_count() or 1))


def _try_locate(url: str) -> Shard | str | Exception:
    try:
        return locate(url)
    except OSError as error:
        return error


def _build_all(
    shards: list[Shard], keys: Keys, handler: Callable[[Exception], Any], cache: _Cache, progress: bool | None
) -> list[ShardIndex]:
    lock = threading.Lock()
    bar = Bar(sum(shard.size for shard in shards), f"indexing {len(shards)} shards", "B", progress)

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
        # Only the path's last part counts: data that was moved is the same data.
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
