"""The subset of the protobuf wire format that DALI's serialized pipelines and checkpoints use.

DALI ships no classes for its messages. The field numbers are those of ``dali/pipeline/dali.proto`` and
``dali/pipeline/operator/checkpointing`` in its sources.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Field", "pack", "unpack"]

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


class Field(NamedTuple):
    """One field of a message. The value is an integer for wire type 0, otherwise bytes."""

    number: int
    kind: int
    value: int | bytes

    @classmethod
    def of(cls, number: int, value: int | bytes | str) -> Field:
        """A field with an integer or bytes; a str is encoded."""
        if isinstance(value, int):
            return cls(number, _VARINT, value)
        return cls(number, _BYTES, value.encode() if isinstance(value, str) else value)

    @property
    def integer(self) -> int:
        """The value of an integer field."""
        if isinstance(self.value, int):
            return self.value
        raise ValueError(f"field {self.number} is not an integer")

    @property
    def data(self) -> bytes:
        """The value of any other field."""
        if isinstance(self.value, bytes):
            return self.value
        raise ValueError(f"field {self.number} is an integer")

    @property
    def text(self) -> str:
        """The value of a string field."""
        return self.data.decode("utf-8", "surrogateescape")


def unpack(message: bytes) -> list[Field]:
    """The fields of a message, in its order. Raises ValueError if it cannot be parsed."""
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
        elif kind in (_FIXED_64, _FIXED_32):
            length = 8 if kind == _FIXED_64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if length > end - place:
            raise ValueError("a field ends after its message")
        fields.append(Field(number, kind, message[place : place + length]))
        place += length
    return fields


def pack(fields: list[Field]) -> bytes:
    """Serialize these fields."""
    message = bytearray()
    for number, kind, value in fields:
        message += _as_varint(number << 3 | kind)
        if isinstance(value, int):
            message += _as_varint(value)
        else:
            message += _as_varint(len(value)) if kind == _BYTES else b""
            message += value
    return bytes(message)


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(message) or shift > 63:
            raise ValueError("an integer is cut off")
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7


def _as_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
