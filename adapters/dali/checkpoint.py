"""DALI's checkpoints: how a state contains them, and how to advance one without running the pipeline."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from midepoch.adapters.dali.wire import Field, pack, unpack
from midepoch.errors import StateCorruptError, StateError
from midepoch.state.codec import decode, encode
from midepoch.world import World

__all__ = ["Checkpoint", "Where", "moved_on"]

Where = tuple[int, int]
"""(epoch, position), as in the state."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to open a session at a place.

    Attributes:
        at: where the checkpoints were taken.
        to: where the session starts: there, or further on.
        ended: the checkpoints were taken after the last batch of the epoch before, and DALI has not been reset.
        shards: the number of shards that the readers divide their data into.
        checkpoints: one for each pipeline; none for a source that has not been read.
    """

    at: Where
    to: Where
    ended: bool
    shards: int
    checkpoints: tuple[bytes, ...]

    def sealed(self, seed: int, world: World) -> str:
        """As the text of a state's detail, with a checksum that `midepoch.reseal` does not renew."""
        text = encode([list(self.at), list(self.to), self.ended, self.shards, list(self.checkpoints)])
        return _seal(text, self.to, seed, world) + text

    @classmethod
    def opened(cls, detail: str, place: Where, seed: int, world: World) -> Checkpoint:
        """The sealed checkpoint, if it belongs to this place, seed and rank.

        Raises:
            StateCorruptError: it does not, or was damaged: DALI would crash, hang, or go on with other data.
        """
        text = detail[_SEAL:]
        if detail[:_SEAL] != _seal(text, place, seed, world):
            raise StateCorruptError(
                f"the checksum of DALI's own checkpoint does not fit: it was damaged, or the state was edited around "
                f"it (epoch {place[0]}, position {place[1]}); use an older state"
            )
        found = decode(text)
        try:
            at, to, ended, shards, checkpoints = found
            sound = [*map(type, (*at, *to, ended, shards))] == [int] * 4 + [bool, int] and shards > 0
            snapshot = cls((at[0], at[1]), (to[0], to[1]), ended, shards, tuple(checkpoints))
            if not sound or any(type(each) is not bytes for each in checkpoints):
                raise ValueError("it holds something else")
        except (TypeError, ValueError, IndexError) as error:
            raise StateCorruptError(f"DALI's own part of the state is none ({error}); use an older state") from error
        return snapshot


_SEAL = 16  # hexadecimal digits


def _seal(text: str, place: Where, seed: int, world: World) -> str:
    sealed = json.dumps([text, *place, seed, world.rank, world.world_size])
    return hashlib.blake2b(sealed.encode(), digest_size=_SEAL // 2).hexdigest()


# --- moving on -------------------------------------------------------------------------------------------------------

# Checkpoint: operators and external context; operator: name and state; reader's state: the loader's; that one's: a
# generator as it was when the reader's epoch began, the reader's epoch, and the samples it has given of it.
_OPERATORS, _CONTEXT = 1, 2
_NAME, _STATE = 1, 2
_LOADER = 1
_AGE = 3
_PIPELINE_DATA, _ITERATOR_DATA = 1, 2


def moved_on(checkpoint: bytes, readers: dict[str, int], batches: int, counted: int) -> bytes:
    """The checkpoint as it would be `batches` later, as far as the readers are concerned.

    Random operators stay where they are: they go on with the numbers that the skipped batches would have had.

    Args:
        checkpoint: of one pipeline.
        readers: name -> the samples that this reader gives until then.
        batches: to skip.
        counted: samples by which the iterator's own counter moves.

    Raises:
        StateError: this DALI writes its checkpoints in another way.
    """
    try:
        fields = []
        found = set()
        for field in unpack(checkpoint):
            inner = unpack(field.data)
            if field.number == _OPERATORS:
                name = next(each.text for each in inner if each.number == _NAME)
                if name in readers:
                    found.add(name)
                    inner = [_aged(each, readers[name]) if each.number == _STATE else each for each in inner]
            elif field.number == _CONTEXT:
                inner = [_counted(each, batches, counted) for each in inner]
            fields.append(Field.of(field.number, pack(inner)))
        if found != readers.keys():
            raise ValueError(f"no state of {', '.join(sorted(readers.keys() - found))}")
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise StateError(
            f"this DALI's checkpoint cannot be moved on ({error}): go on from a saved state instead of skipping"
        ) from error
    return pack(fields)


def _aged(state: Field, samples: int) -> Field:
    parts = unpack(state.data)
    if [part.number for part in parts] != [_LOADER]:
        raise ValueError("a reader's state of another kind")
    loader = unpack(parts[0].data)
    if [part.number for part in loader] != [1, 2, _AGE]:
        raise ValueError("a reader's state of another kind")
    loader[2] = Field.of(_AGE, loader[2].integer + samples)
    return Field.of(state.number, pack([Field.of(_LOADER, pack(loader))]))


def _counted(data: Field, batches: int, counted: int) -> Field:
    if not data.data or data.number not in (_PIPELINE_DATA, _ITERATOR_DATA):
        return data
    counts: dict[str, Any] = json.loads(data.data)
    counts["iter" if data.number == _PIPELINE_DATA else "_counter"] += (
        batches if data.number == _PIPELINE_DATA else counted
    )
    return Field.of(data.number, json.dumps(counts))
