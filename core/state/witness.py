"""What one sample looked like, in at most 200 characters: enough to tell another sample from other bits of the same.

A witness is compared in another process, perhaps on another machine with another decoder. So each part of the sample is
described as suits its kind: integers and text exactly, a path by what follows its mount, measured values (floating
point, 8-bit pixels, 16-bit sound) by two coarse numbers. One checksum of all parts tells whether the bits are the same.

    epoch/index/bits/parts left out/part,part,...
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import zlib
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from ..errors import StateCorruptError
from ..order.keys import derive_keys
from .contents import MOST_ITEMS, MOST_MEMBERS, Unseen, has_more_rows, plain, text_of

__all__ = ["LONGEST", "Difference", "Look", "Witness", "is_inert", "look_at", "of_another_sample"]

LONGEST = 200
"""Characters of a witness."""

_MOST_PARTS = 8  # of a sample that the witness tells; the checksum covers the others
_DEEPEST = 8  # levels of containers; an object may contain itself
_MOST_LEFT_OUT = 6  # parts by number; where more vary, no checksum is kept
_LARGEST_NUMBER = 1 << 16  # of a part that is told or left out
_SAMPLED = 1 << 16  # elements of an array from which the coarse numbers are made
_FEW = 64  # 8-bit and 16-bit arrays of fewer elements are labels or masks rather than measured values

_NUMBERS = {int, bool, float, complex, type(None)}
_INERT = {str, bytes, int, float, complex, bool, type(None), torch.Tensor}

_TEXT = re.compile(
    r"(\d{1,19})/(-?\d{0,19})/([0-9a-f]{0,8})/([0-9a-f.]{0,40})/([0-9A-Za-z_,:=~+-]{0,160})", re.ASCII
)
_PART = re.compile(
    r"([0-9a-f]{1,4}):([0-9A-Za-z_-]{2})([0-9A-Za-z_-]{2})(?:=([0-9A-Za-z_-]{4})|~(z|[+-]\d{1,5})([+-]\d{1,6}))",
    re.ASCII,
)


class _Coarse(NamedTuple):
    """Two numbers of an array that another decoder's rounding hardly changes.

    Attributes:
        level: the root mean square, in steps of 1/50 octave; None for zero.
        pattern: in hundredths, how strongly the values, less their mean, follow a fixed pattern of signs. Over all
            arrays it is spread like a standard normal number, so another sample is likely to have another.
    """

    level: int | None
    pattern: int


_LEVEL_TOLERANCE = 4  # 6 %
_PATTERN_TOLERANCE = 10
_FLAT = 0.05  # where the values' spread is a smaller part of their level, rounding decides the pattern


class _Part(NamedTuple):
    """One part of a sample.

    Attributes:
        name: where it stands in the sample, for messages.
        size: in bytes.
        kind, shape: two letters each, of their checksums.
        content: four letters of its checksum, or coarse numbers; None if the type's content cannot be seen.
        bits: the checksum of its bytes.
        slack: hundredths by which rounding to integers may move `pattern`.
        keys: bytes of a container's keys. A key stands for its member, so they count where they differ, and only there.
    """

    name: str
    size: int
    kind: str
    shape: str
    content: str | _Coarse | None
    bits: int
    slack: float = 0.0
    keys: int = 0


@dataclass(frozen=True)
class Look:
    """What a sample looks like.

    Attributes:
        parts: of the sample, in order.
        unseen: names of types whose content cannot be seen.
    """

    parts: tuple[_Part, ...]
    unseen: tuple[str, ...] = ()

    def differing(self, other: Look) -> frozenset[int]:
        """The numbers of the parts whose bits differ."""
        if self.parts == other.parts:
            return frozenset()
        pairs = enumerate(itertools.zip_longest(self.parts, other.parts))
        return frozenset(number for number, (one, two) in pairs if one is None or two is None or not _alike(one, two))

    def holds_most(self, numbers: frozenset[int]) -> bool:
        """Whether these parts hold more than half of the sample's bytes."""
        chosen = [self.parts[number] for number in numbers if number < len(self.parts)]
        keys = sum(part.keys for part in chosen)
        return 2 * (sum(part.size for part in chosen) + keys) > sum(part.size for part in self.parts) + keys

    def named(self, numbers: frozenset[int]) -> frozenset[str]:
        """The names of these parts."""
        return frozenset(self.parts[number].name for number in numbers if number < len(self.parts))

    def numbers(self, names: frozenset[str]) -> frozenset[int]:
        """The numbers of the parts with these names."""
        return frozenset(number for number, part in enumerate(self.parts) if names and part.name in names)

    def names(self, numbers: frozenset[int]) -> str:
        """The parts by name, for a message."""
        names = [self.parts[number].name or "the sample" for number in sorted(numbers) if number < len(self.parts)]
        return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "") or "its structure"


def _alike(one: _Part, other: _Part) -> bool:
    return (one.kind, one.shape, one.bits) == (other.kind, other.shape, other.bits)


@dataclass(frozen=True)
class Difference:
    """How a sample differs from its witness.

    Attributes:
        another: it is another sample; otherwise the same one with other bits.
        shapes: arrays differ in shape, and nothing else was compared of them.
        names: the parts that differ.
    """

    another: bool
    shapes: bool
    names: str


@dataclass(frozen=True)
class Witness:
    """The witness of an epoch.

    Attributes:
        epoch: of which it is the first sample.
        index: of the sample in the dataset; None if only the order says it.
        look: what it looked like; without names and sizes if it was read from a state.
        left_out: the parts that differ from one read to the next.
        bits: the checksum of all other parts; empty if too many vary.
        told: the parts that are told one by one: (number, part).
    """

    epoch: int
    index: int | None
    bits: str
    left_out: frozenset[int]
    told: tuple[tuple[int, _Part], ...] = field(default=())

    @classmethod
    def of(cls, epoch: int, index: Any, look: Look, left_out: frozenset[int] = frozenset()) -> Witness:
        """The witness of a sample that looks like `look`."""
        kept = [number for number in range(len(look.parts)) if number not in left_out]
        seen = [number for number in kept if look.parts[number].content is not None]
        largest = sorted(sorted(seen, key=lambda each: -look.parts[each].size - look.parts[each].keys)[:_MOST_PARTS])
        few = len(left_out) <= _MOST_LEFT_OUT and max(left_out, default=0) < _LARGEST_NUMBER
        bits = _bits_of(look, left_out) if few else ""
        whole = _whole(index)
        number = whole if whole is not None and abs(whole) < 1 << 60 else None
        left = left_out if bits else frozenset()
        told = tuple((each, look.parts[each]) for each in largest if each < _LARGEST_NUMBER)
        return cls(epoch, number, bits, left, told)

    def __str__(self) -> str:
        return self.text()

    def text(self, longest: int = LONGEST) -> str:
        """For a state, in at most so many characters: the smaller parts are left out."""
        index = "" if self.index is None else str(self.index)
        head = f"{self.epoch}/{index}/{self.bits}/{'.'.join(f'{number:x}' for number in sorted(self.left_out))}/"
        parts = [_part_text(number, part) for number, part in self.told]
        while len(head) + len(",".join(parts)) > longest and parts:
            parts.pop()
        return head + ",".join(parts)

    @classmethod
    def parse(cls, text: str) -> Witness | None:
        """The witness in a state; None for an empty text.

        Raises:
            StateCorruptError: the text is not one that `str` gives.
        """
        if not text:
            return None
        match = _TEXT.fullmatch(text) if len(text) <= LONGEST else None
        parts = [_PART.fullmatch(each) for each in match[5].split(",")] if match and match[5] else []
        if match is None or not all(parts):
            raise StateCorruptError("the state's witness has another form: use an undamaged state")
        try:
            index = int(match[2]) if match[2] else None
            left_out = frozenset(int(each, 16) for each in match[4].split(".") if match[4])
        except ValueError as error:
            raise StateCorruptError("the state's witness has another form: use an undamaged state") from error
        return cls(int(match[1]), index, match[3], left_out, tuple(_told(each) for each in parts if each))

    def compare(self, look: Look, at_boundary: bool) -> Difference | None:
        """How the sample that was read now differs; None if it is the same, bit for bit.

        Args:
            look: at the sample that was read now.
            at_boundary: it is of an epoch that has ended. Its shape may have been meant for that epoch only.
        """
        differing, shapes, names, total = 0, False, [], 0
        for number, saved in self.told:
            if number >= len(look.parts):
                names.append("a part that is missing now")
                differing, total = differing + 1, total + 1
                continue
            now = look.parts[number]
            total += now.size
            if at_boundary and saved.kind == now.kind and saved.shape != now.shape:
                shapes = True
            elif not _same(saved, now):
                differing += now.size + now.keys
                total += now.keys
                names.append(now.name or "all of it")
        if 2 * differing > total:
            return Difference(True, shapes, ", ".join(names[:4]))
        if names or shapes or (self.bits and self.bits != _bits_of(look, self.left_out)):
            return Difference(False, shapes, ", ".join(names[:4]))
        return None


def _whole(index: Any) -> int | None:
    """An index as Python's integer; None if it is none of Python's, NumPy's or torch's."""
    if isinstance(index, torch.Tensor) and not index.ndim:
        index = index.item()
    return int(index) if type(index) is int or isinstance(index, np.integer) else None


def of_another_sample(witness: Witness) -> Witness:
    """A witness that no sample with `witness` has: what a state of other data would hold."""
    return replace(witness, told=tuple((number, _changed(part)) for number, part in witness.told))


def _changed(part: _Part) -> _Part:
    content = part.content
    if isinstance(content, _Coarse):
        return part._replace(content=_Coarse((content.level or 0) + 500, -content.pattern - 500))
    return part._replace(content=_letters(f"not {content}", 4))


def _bits_of(look: Look, left_out: frozenset[int]) -> str:
    crc = 0
    for number, part in enumerate(look.parts):
        if number not in left_out:
            crc = zlib.crc32(_bits_as_text(part).encode(), crc)
    return f"{crc:08x}"


def _bits_as_text(part: _Part) -> str:
    return f"{part.kind}{part.shape}{part.bits:08x}"


def _same(saved: _Part, now: _Part) -> bool:
    """Whether a part is of the same sample."""
    if (saved.kind, saved.shape) != (now.kind, now.shape):
        return False
    one, other = saved.content, now.content
    if not isinstance(one, _Coarse) or not isinstance(other, _Coarse):
        return one == other
    if one.level is None or other.level is None:
        return one.level == other.level or now.slack > 0
    return (
        abs(one.level - other.level) <= _LEVEL_TOLERANCE + now.slack / 4
        and abs(one.pattern - other.pattern) <= _PATTERN_TOLERANCE + now.slack
    )


# --- looking at a sample ----------------------------------------------------------------------------------------------


def look_at(sample: object) -> Look:
    """What a sample looks like. Its whole content is read once; nothing of it is kept."""
    parts: list[_Part] = []
    unseen: dict[str, None] = {}
    _look_into(sample, "", 0, parts, unseen)
    return Look(tuple(parts), tuple(unseen))


def is_inert(sample: object, depth: int = 0) -> bool:
    """Whether to look at a sample runs no code of its own: it is made of Python's, NumPy's and torch's types alone."""
    kind = type(sample)
    if kind in _INERT or isinstance(sample, np.generic):
        return True
    if kind is np.ndarray:
        return not cast(np.ndarray[Any, Any], sample).dtype.hasobject
    if depth > _DEEPEST or kind not in (list, tuple, dict):
        return False
    members = cast(Any, sample)
    if kind is dict:
        members = itertools.chain.from_iterable(members.items())
    return all(is_inert(each, depth + 1) for each in members)


def _look_into(item: Any, name: str, depth: int, parts: list[_Part], unseen: dict[str, None]) -> None:
    """Append the parts of `item` to `parts`, and the types whose content cannot be seen to `unseen`."""
    kind = type(item).__name__
    value = item if type(item) in _NUMBERS else plain(item)
    if value is not item and has_more_rows(item):
        unseen[f"{kind} after its first {MOST_ITEMS} rows"] = None
    if isinstance(value, Unseen) or depth > _DEEPEST:
        seen = value.kind if isinstance(value, Unseen) else kind
        unseen[seen] = None
        parts.append(_Part(name, 1, _letters(seen), _NO_SHAPE, None, 0))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        parts.append(_array(value, name))
    elif isinstance(value, np.ndarray | list | dict):
        _look_into_members(item, value, name, depth, parts, unseen)
    else:
        parts.append(_single(value, name, isinstance(item, os.PathLike)))


def _look_into_members(
    item: Any, value: Any, name: str, depth: int, parts: list[_Part], unseen: dict[str, None]
) -> None:
    kind = type(item).__name__
    members: list[tuple[str, Any]]
    rest: list[Any]
    if isinstance(value, dict):
        pairs = list(value.items())
        members = [(f"{name}[{key!r:.40}]", each) for key, each in pairs[:MOST_ITEMS]]
        rest = [each for _, each in pairs[MOST_ITEMS:]]
    else:
        rows = value.reshape(-1) if isinstance(value, np.ndarray) else value
        if len(rows) > MOST_ITEMS and all(type(each) in (int, float) for each in rows):
            dtype = float if any(type(each) is float for each in rows) else object
            parts.append(_array(np.asarray(rows, dtype=dtype), name))
            return
        half = MOST_ITEMS // 2
        chosen = rows if len(rows) <= MOST_ITEMS else [*rows[:half], *rows[-half:]]
        members = [(f"{name}[{number}]", each) for number, each in enumerate(chosen)]
        rest = list(rows[half:-half]) if len(rows) > MOST_ITEMS else []
    untold: list[_Part] = []
    for each in rest:
        _look_into(each, "", depth + 1, untold, unseen)
    parts.append(_container(item, kind, len(value), name, untold))
    for path, each in members:
        _look_into(each, path, depth + 1, parts, unseen)


def _container(item: Any, kind: str, count: int, name: str, rest: list[_Part]) -> _Part:
    """The container itself: its type, how much it holds, and its keys. `rest`: of its members, which count as bits."""
    text = f"{kind}{count}"
    empty = _Part(name, 1, _letters(kind), _NO_SHAPE, _letters(text, 4), zlib.crc32(text.encode()))
    keys: list[str] = []
    if isinstance(item, Mapping):
        keys = [_key_text(key) for key in item]
    elif isinstance(item, Set) and len(item) > MOST_MEMBERS:
        keys = [text_of(member) for member in item]
    if not keys and not rest:
        return empty
    # In any order, which may be that of hashes.
    text += f" {sum(zlib.crc32(key.encode('utf-8', 'surrogatepass')) for key in keys)}" if keys else ""
    bits = zlib.crc32("".join(map(_bits_as_text, rest)).encode(), zlib.crc32(text.encode()))
    size = sum(8 + len(key) for key in keys)
    return empty._replace(content=_letters(text, 4), bits=bits, keys=size)


def _key_text(key: Any) -> str:
    is_path = isinstance(key, os.PathLike)
    path = os.fspath(key) if is_path else key
    return _behind_mount(path)[0] if isinstance(path, str) and (is_path or _is_path(path)) else text_of(key)


def _single(value: Any, name: str, is_path: bool) -> _Part:
    """A number, a text or bytes. `is_path`: the text is a path by its type."""
    if isinstance(value, float | np.floating):
        return _array(np.asarray(value), name, type(value).__name__)
    kind = type(value).__name__
    if not isinstance(value, str):
        return _exact(value, name, kind)
    identity, seen = _behind_mount(value) if is_path or _is_path(value) else (value, value)
    return _exact(identity, name, kind)._replace(bits=zlib.crc32(f"{seen!r}".encode("utf-8", "surrogatepass")))


def _exact(value: Any, name: str, kind: str) -> _Part:
    data = value if isinstance(value, bytes) else f"{value!r}".encode("utf-8", "surrogatepass")
    size = 8 if isinstance(value, int | complex | np.generic) else len(data)
    crc = zlib.crc32(data)
    return _Part(name, max(size, 1), _letters(kind), _NO_SHAPE, _letters_of(crc, 4), crc)


# Longer text is none: a picture as base64 may begin with a slash, and end as any other picture does.
_LONGEST_PATH = 512
_PATH = re.compile(r'(?:/|[A-Za-z][A-Za-z0-9+.-]*://|[A-Za-z]:[\\/])(?! )(?:[^\x00-\x20<>"|*{}]| (?! ))*')
_NAME_WITH_SPACE = re.compile(r".*\.\w{1,8}")
_NUMBERED = re.compile(r"\d+|(?:.*\d){3}.*", re.DOTALL)


def _is_path(text: str) -> bool:
    """Whether a text is nothing but an absolute path or an address. What only contains a slash is none."""
    if len(text) > _LONGEST_PATH or not _PATH.fullmatch(text):
        return False
    return " " not in text or bool(_NAME_WITH_SPACE.fullmatch(text))


def _behind_mount(path: str) -> tuple[str, str]:
    """What of a path tells which sample it is, and what is compared as bits. Both are the same on another mount.

    A file's name is enough if it is numbered. Others may be the same in the folder of each sample (``7/image.png``), so
    a numbered folder counts too. Where neither is numbered, names in front may be of samples or of the mount, and only
    count as bits.
    """
    names = [name for name in (path.replace("\\", "/") if path[1:2] == ":" else path).split("/") if name]
    last, folder, outer = ["/".join(names[-count:]) for count in (1, 2, 3)]
    numbered = [bool(_NUMBERED.fullmatch(name.rpartition(".")[0] or name)) for name in reversed(names[-3:])]
    if True in numbered[:2]:
        identity = last if numbered[0] else folder
        return identity, identity
    return last, outer if True in numbered else folder


def _array(array: np.ndarray[Any, Any], name: str, kind: str = "") -> _Part:
    data: Any
    if array.dtype.hasobject:  # a list of python's integers
        data = repr(array.tolist()).encode()
    else:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    crc = zlib.crc32(data)
    measured = array.dtype.kind == "f" or (array.dtype.str[1:] in ("u1", "i2") and array.size >= _FEW)
    content: str | _Coarse = _letters_of(crc, 4)
    slack = 0.0
    if measured and array.size:
        content, slack = _coarse(array)
    kind, shape = _letters(kind or f"array {array.dtype}"), _letters(str(array.shape))
    return _Part(name, max(len(data), 1), kind, shape, content, crc, slack)


def _coarse(array: np.ndarray[Any, Any]) -> tuple[_Coarse, float]:
    """The coarse numbers of an array, and by how many hundredths rounding may move the pattern."""
    flat = array.reshape(-1)
    flat = flat[:: max(1, flat.size // _SAMPLED)][:_SAMPLED].astype(np.float64)
    flat = np.nan_to_num(flat, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    peak = float(np.abs(flat).max())
    if not peak:
        return _Coarse(None, 0), 0.0
    level = float(np.sqrt(np.mean((flat / peak) ** 2)))
    if flat.size == 1:
        return _Coarse(round(50 * math.log2(peak)), 100 if flat[0] > 0 else -100), 0.0
    spread = float((flat / peak).std())
    pattern = 0
    if spread > _FLAT * level:
        signs = np.where(derive_keys(0, np.arange(flat.size)) >> np.uint64(63), 1.0, -1.0)
        centred = flat / peak - np.mean(flat / peak)
        pattern = round(100 * float(centred @ signs) / (spread * math.sqrt(flat.size)))
    # Another decoder's integers may differ by one.
    slack = 400.0 / (spread * peak) if array.dtype.kind in "ui" and spread else 0.0
    return _Coarse(round(50 * (math.log2(peak) + math.log2(level))), pattern), min(slack, 1e4)


# --- as text ----------------------------------------------------------------------------------------------------------

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
_PAIRS = [low + high for high in _ALPHABET for low in _ALPHABET]


@functools.lru_cache(maxsize=4096)
def _letters(text: str, count: int = 2) -> str:
    """A checksum as `count` letters, 2 or 4, of six bits each. For names and shapes, which recur."""
    return _letters_of(zlib.crc32(text.encode("utf-8", "surrogatepass")), count)


def _letters_of(crc: int, count: int) -> str:
    pair = _PAIRS[crc & 0xFFF]
    return pair if count == 2 else pair + _PAIRS[crc >> 12 & 0xFFF]


_NO_SHAPE = _letters("")


def _part_text(number: int, part: _Part) -> str:
    content = part.content
    if isinstance(content, _Coarse):
        level = "z" if content.level is None else f"{content.level:+d}"
        return f"{number:x}:{part.kind}{part.shape}~{level}{content.pattern:+d}"
    return f"{number:x}:{part.kind}{part.shape}={content}"


def _told(match: re.Match[str]) -> tuple[int, _Part]:
    content: str | _Coarse = match[4] or _Coarse(None if match[5] == "z" else int(match[5]), int(match[6]))
    return int(match[1], 16), _Part("", 0, match[2], match[3], content, 0)
