"""DALI's checkpoints: how a state stores them, and how to advance one without running the pipeline."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from midepoch.adapters.dali.wire import Field, pack, unpack
from midepoch.errors import StateCorruptError, StateError
from midepoch.state.codec import decode, encode
from midepoch.world import World

__all__ = ["Checkpoint", "Where", "advanced"]

Where = tuple[int, int]
"""(epoch, position), as in the state."""


@dataclass(frozen=True)
class Checkpoint:
    """What a session needs to start at a given place.

    Attributes:
        at: where the checkpoints were taken.
        to: where the session starts: at `at` or after it.
        ended: the checkpoints were taken after the last batch of the previous epoch, before DALI was reset.
        shards: the number of shards that the readers divide their data into, and the shard of each reader if there are
            several shards. Earlier states have only the number.
        checkpoints: one for each pipeline; empty for a source that has not been read.
    """

    at: Where
    to: Where
    ended: bool
    shards: tuple[int, ...]
    checkpoints: tuple[bytes, ...]

    def sealed(self, seed: int, world: World) -> str:
        """The text for a state's `detail`, with a checksum that `midepoch.reseal` does not recompute."""
        shards = list(self.shards) if len(self.shards) > 1 else self.shards[0]
        text = encode([list(self.at), list(self.to), self.ended, shards, list(self.checkpoints)])
        return _seal(text, self.to, seed, world) + text

    @classmethod
    def opened(cls, detail: str, place: Where, seed: int, world: World) -> Checkpoint:
        """Read what `sealed` wrote, if it belongs to this place, seed and rank.

        Raises:
            StateCorruptError: it does not, or it is damaged. DALI would crash, hang, or read other data.
        """
        text = detail[_SEAL:]
        if detail[:_SEAL] != _seal(text, place, seed, world):
            raise StateCorruptError(
                f"the checksum of DALI's own checkpoint is wrong: the checkpoint was damaged, or the state around it "
                f"was edited (epoch {place[0]}, position {place[1]}); load an older state"
            )
        found = decode(text)
        try:
            at, to, ended, shards, checkpoints = found
            shards = tuple(shards) if type(shards) is list and shards else (shards,)
            sound = [*map(type, (*at, *to, ended))] == [int] * 4 + [bool] and {*map(type, shards)} == {int}
            snapshot = cls((at[0], at[1]), (to[0], to[1]), ended, shards, tuple(checkpoints))
            if not sound or shards[0] < 1 or any(type(each) is not bytes for each in checkpoints):
                raise ValueError("unexpected content")
        except (TypeError, ValueError, IndexError) as error:
            raise StateCorruptError(f"DALI's part of the state is invalid ({error}); load an older state") from error
        return snapshot


_SEAL = 16  # hexadecimal digits


def _seal(text: str, place: Where, seed: int, world: World) -> str:
    sealed = json.dumps([text, *place, seed, world.rank, world.world_size])
    return hashlib.blake2b(sealed.encode(), digest_size=_SEAL // 2).hexdigest()


# --- advancing -------------------------------------------------------------------------------------------------------

# A checkpoint holds the operators and the external context. An operator holds its name and state. A reader's state
# holds that of its loader: the generator as it was at the start of the epoch, the epoch, and the samples given so far.
_OPERATORS, _CONTEXT = 1, 2
_NAME, _STATE = 1, 2
_LOADER = 1
_AGE = 3
_PIPELINE_DATA, _ITERATOR_DATA = 1, 2


def advanced(checkpoint: bytes, readers: dict[str, int], batches: int, counted: int) -> bytes:
    """Advance a checkpoint by `batches`, as far as it determines what is read next.

    Random operators are not advanced: they continue with the numbers that the skipped batches would have drawn.

    Args:
        checkpoint: of one pipeline.
        readers: reader's name -> number of samples that it skips.
        batches: number of batches to skip.
        counted: number of samples by which the iterator's own counter advances.

    Raises:
        StateError: this version of DALI uses another checkpoint format.
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
                    inner = [_advance_reader(each, readers[name]) if each.number == _STATE else each for each in inner]
            elif field.number == _CONTEXT:
                inner = [_advance_counter(each, batches, counted) for each in inner]
            fields.append(Field.of(field.number, pack(inner)))
        if found != readers.keys():
            raise ValueError(f"no state for {', '.join(sorted(readers.keys() - found))}")
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise StateError(
            f"this DALI's checkpoint cannot be advanced ({error}): resume from a saved state instead of skipping"
        ) from error
    return pack(fields)


def _advance_reader(state: Field, samples: int) -> Field:
    parts = unpack(state.data)
    if [part.number for part in parts] != [_LOADER]:
        raise ValueError("unknown format of a reader's state")
    loader = unpack(parts[0].data)
    if [part.number for part in loader] != [1, 2, _AGE]:
        raise ValueError("unknown format of a reader's state")
    loader[2] = Field.of(_AGE, loader[2].integer + samples)
    return Field.of(state.number, pack([Field.of(_LOADER, pack(loader))]))


def _advance_counter(data: Field, batches: int, counted: int) -> Field:
    if not data.data or data.number not in (_PIPELINE_DATA, _ITERATOR_DATA):
        return data
    counts: dict[str, Any] = json.loads(data.data)
    counts["iter" if data.number == _PIPELINE_DATA else "_counter"] += (
        batches if data.number == _PIPELINE_DATA else counted
    )
    return Field.of(data.number, json.dumps(counts))
