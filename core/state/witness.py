"""What one sample looked like, in at most 128 characters: enough to tell another sample from other bits of the same.

A witness is compared in another process, perhaps on another machine with another decoder. So what no decoder computes
is *exact*: types, dtypes and shapes, text, Python's integers and booleans, arrays of booleans and of 32- or 64-bit
integers with at most one dimension, and of paths the last component. It says which sample this is. One checksum of all
parts says whether the bits are the same.

    epoch/index/bits/exact/

`exact` has four digits of each part's checksum.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import StateCorruptError
from .digest import Part, Unseen, data_of, is_inert, parts_of, text_of

__all__ = ["LONGEST", "SampleSummary", "Witness", "is_inert", "of_another_sample", "summary_of"]

LONGEST = 128
"""Characters of a witness."""

_MOST_PARTS = 256  # of a sample; the last stands for all further ones
_MOST_CODES = 12  # the last stands for all further parts

_TEXT = re.compile(r"(\d{1,19})/(-?\d{1,19})?/([0-9a-f]{8})/((?:[0-9a-f]{4}){0,12})/", re.ASCII)


class _PartSummary(NamedTuple):
    """Of one part of a sample."""

    name: str  # where it is in the sample
    size: int  # in bytes; of a container, of its keys; 0 if its content cannot be seen
    container: bool  # a key stands for its member, so its size counts where it differs, and only there
    exact: int  # the checksum of what no decoder computes
    bits: int  # the checksum of all


@dataclass(frozen=True)
class SampleSummary:
    """What a sample looks like: its parts in order, and the names of types whose content cannot be seen."""

    parts: tuple[_PartSummary, ...]
    unseen: tuple[str, ...] = ()

    def differing(self, other: SampleSummary) -> tuple[str, ...]:
        """The names of the parts that differ."""
        differ = {part.name for part in {*self.parts} ^ {*other.parts}}
        return tuple(dict.fromkeys(part.name for part in (*self.parts, *other.parts) if part.name in differ))

    def holds_most(self, names: tuple[str, ...]) -> bool:
        """Whether the parts with these names hold more than half of the sample's bytes."""
        chosen = sum(part.size for part in self.parts if part.name in names)
        return 2 * chosen > sum(part.size for part in self.parts if part.name in names or not part.container)

    @staticmethod
    def names(names: tuple[str, ...]) -> str:
        """Parts by name, for a message."""
        shown = [f"{name:.60}" or "the sample" for name in names[:4]]
        return ", ".join([*shown, "..."] if len(names) > 4 else shown)


def summary_of(sample: object) -> SampleSummary:
    """What a sample looks like. Its whole content is read once; nothing of it is kept."""
    parts = parts_of(sample)
    unseen = dict.fromkeys(part.value.kind for part in parts if isinstance(part.value, Unseen))
    found = [*map(_summary, parts)]
    if len(found) > _MOST_PARTS:
        found[_MOST_PARTS - 1 :] = [_joined("further parts", found[_MOST_PARTS - 1 :])]
    return SampleSummary(tuple(found), tuple(unseen))


def _summary(part: Part) -> _PartSummary:
    container = isinstance(part.value, list)
    if container:
        value = "\n".join(_last_component(key) or text_of(key) for key in part.value)
    else:
        value = _last_component(part.value) or part.value
    data = data_of(value)
    kind = zlib.crc32(part.kind.encode("utf-8", "surrogatepass"))
    bits = zlib.crc32(data, kind)
    size = 0 if isinstance(value, Unseen) else max(1, len(data))
    return _PartSummary(part.path, size, container, bits if container or _is_exact(value) else kind, bits)


def _joined(name: str, parts: list[_PartSummary]) -> _PartSummary:
    """One for several parts."""
    exact, bits = (zlib.crc32(repr([getattr(part, of) for part in parts]).encode()) for of in ("exact", "bits"))
    return _PartSummary(name, sum(part.size for part in parts), False, exact, bits)


def _is_exact(value: Any) -> bool:
    """Whether any difference in a part's value makes it another sample."""
    if isinstance(value, np.ndarray):
        kind = value.dtype.kind
        return value.ndim <= 1 and (kind in "bUSMm" or (kind in "iu" and value.dtype.itemsize >= 4))
    return not isinstance(value, float | complex)


# Without spaces, or with the ending of a file: "/imagine cats and/or dogs" is a sentence. Longer text is none: a
# picture as base64 may begin with a slash, and end as any other picture does.
_PATH = re.compile(
    r'(?:/|[A-Za-z][A-Za-z0-9+.-]*://|[A-Za-z]:[\\/])'
    r'(?:[^\x00-\x20<>"|*{}]{0,512}|[^\x00-\x1f<>"|*{}]{0,504}\.\w{1,8})'
)


def _last_component(value: Any) -> str:
    """Of a path by its type, and of a text that is nothing but an absolute path or an address; empty for others."""
    text = os.fsdecode(value) if isinstance(value, os.PathLike) else value
    if type(text) is not str:
        return ""
    if text is value and not _PATH.fullmatch(text):
        return ""
    return re.split(r"[/\\]" if text[1:2] == ":" else "/", text.rstrip("/\\"))[-1]


# --- as text ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Witness:
    """The witness of an epoch."""

    epoch: int  # of which it is the first sample
    index: int | None  # of the sample in the dataset; None if only the order says it
    bits: str  # the checksum of all parts
    told: tuple[str, ...]  # of each part, four digits of the checksum of what is exact

    @classmethod
    def of(cls, epoch: int, index: Any, summary: SampleSummary) -> Witness:
        """The witness of a sample that looks like `summary`."""
        whole = _whole(index)
        number = whole if whole is not None and abs(whole) < 1 << 60 else None
        return cls(epoch, number, _bits(summary), tuple(_code(part.exact) for part in _few(summary)))

    def __str__(self) -> str:
        index = "" if self.index is None else str(self.index)
        return f"{self.epoch}/{index}/{self.bits}/{''.join(self.told)}/"

    @classmethod
    def parse(cls, text: str) -> Witness | None:
        """The witness in a state; None for an empty text.

        Raises:
            StateCorruptError: the text is not one that `str` gives.
        """
        if not text:
            return None
        match = _TEXT.fullmatch(text)
        if match is None:
            raise StateCorruptError("the state's witness has another form: use an undamaged state")
        return cls(int(match[1]), int(match[2]) if match[2] else None, match[3], tuple(re.findall("....", match[4])))

    def differs(self, summary: SampleSummary) -> tuple[str, ...]:
        """The names of the parts that make the sample that was read now another one."""
        pairs = itertools.zip_longest(self.told, _few(summary))
        differing = [part for code, part in pairs if part is None or _code(part.exact) != code]
        return tuple("a part that is missing now" if part is None else part.name for part in differing)

    def has_other_bits(self, summary: SampleSummary) -> bool:
        """Whether any part has."""
        return self.bits != _bits(summary)


def _few(summary: SampleSummary) -> list[_PartSummary]:
    """The parts, as many as are told."""
    parts, last = list(summary.parts), _MOST_CODES - 1
    return parts if len(parts) <= _MOST_CODES else [*parts[:last], _joined("a part after the first 11", parts[last:])]


def _bits(summary: SampleSummary) -> str:
    return f"{_joined('', list(summary.parts)).bits:08x}"


def _code(crc: int) -> str:
    return f"{crc & 0xFFFF:04x}"


def _whole(index: Any) -> int | None:
    """An index as Python's integer; None if it is none of Python's, NumPy's or torch's."""
    if isinstance(index, torch.Tensor) and not index.ndim:
        index = index.item()
    return int(index) if type(index) is int or isinstance(index, np.integer) else None


def of_another_sample(witness: Witness) -> Witness:
    """A witness that no sample with `witness` has: what a state of other data would hold."""
    return replace(witness, told=tuple(_code(~int(code, 16)) for code in witness.told))
