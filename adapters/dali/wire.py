"""The subset of the protobuf wire format that DALI's serialized pipelines and checkpoints use.

DALI ships no classes for its messages. The field numbers are those of ``dali/pipeline/dali.proto`` and
``dali/pipeline/operator/checkpointing`` in its sources.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Field", "unpack"]

_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}  # bytes


class Field(NamedTuple):
    """One field of a message. The value is an integer for wire type 0, otherwise bytes."""

    number: int
    kind: int
    value: Any

    @property
    def text(self) -> str:
        """The value of a string field."""
        return str(self.value, "utf-8", "surrogateescape")


def unpack(message: bytes) -> list[Field]:
    """The fields of a message, in its order."""
    fields, place, end = [], 0, len(message)
    while place < end:
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            fields.append(Field(number, kind, value))
            continue
        if kind == _BYTES:
            length, place = _varint(message, place)
        else:
            length = _FIXED[kind]
        fields.append(Field(number, kind, message[place : place + length]))
        place += length
    return fields


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
