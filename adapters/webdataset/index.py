"""Where each sample of each shard is. Built once, and cached beside what identifies the shard.

An index holds two 64-bit integers a sample: the first byte and the length of the range with its files. The names are
read with the samples, so webdataset's own rules for names apply.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import tempfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import platformdirs
from tqdm import tqdm
from webdataset.tariterators import base_plus_ext

from midepoch.adapters.webdataset.shards import Shard, locate, open_shard
from midepoch.errors import MidepochError, SourceError
from midepoch.reading.tar import TarIndex, index_tar, padded

__all__ = ["Index", "Keys", "ShardIndex", "build_index", "default_cache"]

_LOG = logging.getLogger("midepoch.webdataset")
_FORMAT = 2  # of the cached files
_PATIENCE = 0.5  # seconds before a bar appears
_THREADS = min(16, 2 * (os.cpu_count() or 1))  # that look for shards, and index them
_SKIPPED = re.compile(r"__[^/]*__($|/)")  # webdataset's metadata, as in its tar_file_iterator
_PLAIN = re.compile(rb"((?:.*/|)[^.]+)[.][^/]*$")  # a key and an extension, as in its base_plus_ext


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
        damaged: whether some of it was lost, with a handler's permission.
    """

    shard: Shard
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    checksum: int
    damaged: bool = False


class Index:
    """The samples of all shards, in the order of the user's shards.

    Attributes:
        shards: those that can be read.
        kept: their numbers in the list of urls.
        counts: number of samples in each shard.
        firsts: number of the first sample of each shard.
        starts, lengths: int64; where each sample is in its shard.
        size: number of samples.
        checksum: identifies the shards by names, samples and headers.
    """

    def __init__(self, indexes: list[ShardIndex], kept: list[int]) -> None:
        self.kept = kept
        none = np.empty(0, np.int64)
        self.shards = [index.shard for index in indexes]
        self.counts = [len(index.starts) for index in indexes]
        self.firsts = np.cumsum([0, *self.counts[:-1]], dtype=np.int64)
        self.starts = np.concatenate([none, *(index.starts for index in indexes)])
        self.lengths = np.concatenate([none, *(index.lengths for index in indexes)])
        self.size = len(self.starts)
        checksum = 0
        for index, count in zip(indexes, self.counts, strict=True):
            # Only the path's last part counts: data that was moved is the same data.
            name = index.shard.url.rpartition("/")[2]
            checksum = zlib.crc32(f"{name}:{count}:{index.shard.size}:{index.checksum}".encode(), checksum)
        self.checksum = f"{checksum:08x}"

    def ranges(self, samples: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """For each sample: its shard's number, its first byte and its length."""
        numbers = np.searchsorted(self.firsts, samples, side="right") - 1
        return list(zip(numbers.tolist(), self.starts[samples].tolist(), self.lengths[samples].tolist(), strict=True))


def default_cache() -> Path:
    """The folder with each user's own folder of indexes: ``$MIDEPOCH_CACHE``, or one in the system's cache folder.

    For a user without a home, one in the folder of temporary files.
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
    prefixes = np.array(_prefixes(members.names.tolist(), keys), dtype=object)
    kept = np.flatnonzero(prefixes != None)  # noqa: E711  # of each
    if not kept.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    begins = np.flatnonzero(np.append(True, prefixes[kept[1:]] != prefixes[kept[:-1]]))
    first, last = kept[begins], kept[np.append(begins[1:], kept.size) - 1]
    starts = members.headers[first]
    return starts, members.offsets[last] + members.sizes[last] - starts


def _prefixes(names: list[bytes], keys: Keys) -> list[Any]:
    """`Keys.prefix` of each name."""
    if keys.plain and not any(name.startswith(b"__") for name in names):
        # The same, in a fifth of the time.
        return [match and match[1] for match in map(_PLAIN.match, names)]
    return [keys.prefix(name.decode("utf-8", "surrogateescape")) for name in names]


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
    damage = members.damage
    if damage is not None:
        handler(damage)  # raises, or accepts the loss
        starts, lengths = _without_partial(members, starts, lengths)
        lost = shard.size - (int(starts[-1] + padded(int(lengths[-1]))) if len(starts) else 0)
        _LOG.warning(
            "%s: %d samples before byte %d are kept, %d bytes after them are lost (%s)",
            shard.url, len(starts), damage.offset, lost, damage.what,
        )  # fmt: skip
    return ShardIndex(shard, starts, lengths, members.checksum, damage is not None)


def _without_partial(
    members: TarIndex, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """A damaged shard's samples, without the last one if it may lack files, that is, if another sample has more."""
    files = np.searchsorted(members.offsets, starts + lengths) - np.searchsorted(members.headers, starts)
    partial = len(files) == 1 or (len(files) > 1 and files[-1] < files[:-1].max())
    return (starts[:-1], lengths[:-1]) if partial else (starts, lengths)


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
        own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if not own:
            self._warn(f"indexes in {self.folder} are not trusted: it is not a folder that you alone can write to")
        return own

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "%s; shards are indexed again each time: set MIDEPOCH_CACHE or index_cache= to a folder with space, in "
                "which you may create a folder of your own",
                what,
            )

    def get(self, shard: Shard, keys: Keys, handler: Callable[[Exception], Any]) -> ShardIndex:
        """The shard's index, from the cache or built. Two processes at once both build it."""
        # Without a stamp, a replaced shard is not noticed. With functions of the user's own, samples depend on them.
        if not (self._usable and shard.stamp and keys.plain):
            return _index_shard(shard, keys, handler)
        where = os.path.realpath(shard.path) if shard.path else shard.url
        file = self.folder / f"{hashlib.sha256(where.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.index"
        found = self._load(file, shard)
        if found is None:
            found = _index_shard(shard, keys, handler)
            if not found.damaged:
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


# --- all shards -------------------------------------------------------------------------------------------------------


# Without tqdm's monitor thread, which would outlive the bar: worker processes are forked later.
_Bar: Any = type("_Bar", (tqdm,), {"monitor_interval": 0})


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
    shards: list[Shard] = []
    kept: list[int] = []
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        found = list(pool.map(_try_locate, urls))
    for number, (url, place) in enumerate(zip(urls, found, strict=True)):
        if isinstance(place, str):
            return place
        if isinstance(place, Shard):
            shards.append(place)
            kept.append(number)
            continue
        error = SourceError(f"{url} cannot be opened ({place}): restore it, or leave it out of the urls")
        error.__cause__ = place
        continues = handlers["opening"](error)
        _LOG.warning("%s: the shard is lost (%s)", url, place)
        if not continues:
            break
    indexes: list[ShardIndex] = []
    get = functools.partial(_Cache(cache).get, keys=keys, handler=handlers["reading"])
    bar = _Bar(
        total=sum(shard.size for shard in shards), desc=f"midepoch: indexing {len(shards)} shards", unit="B",
        unit_scale=True, delay=_PATIENCE, disable=None if progress is None else not progress,
    )  # fmt: skip
    with bar, ThreadPoolExecutor(max_workers=_THREADS) as pool:
        for index in pool.map(get, shards):  # which cancels the others if one fails
            bar.update(index.shard.size)
            indexes.append(index)
    return Index(indexes, kept)


def _try_locate(url: str) -> Shard | str | OSError:
    try:
        return locate(url)
    except OSError as error:
        return error
