"""The saved state: a flat dict with a fixed set of keys, a few hundred bytes, built-in types only."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from ..errors import StateCorruptError, StateMismatchError, StateVersionError
from .witness import LONGEST

__all__ = ["FIELDS", "LONGEST_CHANGED", "PIECES", "VERSION", "State", "build", "check", "compare_fingerprints",
           "piece_of", "reseal"]  # fmt: skip

State = dict[str, Any]
"""What `state_dict()` returns: a dict of built-in types only, JSON-serialisable.

| key | meaning |
|---|---|
| version | of this format |
| adapter | name of the adapter that wrote it |
| epoch, position | where the training loops were |
| seed | of the order and of the random streams, in [0, 2**64) |
| size | units in the epoch, None if it is unknown |
| world_size, batch_size | of the run that saved it: informational; world_size is compared if not elastic |
| fingerprint | JSON text: what the positions mean (order, the user's own identity of the data, ...) |
| detail | the adapter's own part, as text: empty if the order is midepoch's |
| witness | what one sample looked like (`midepoch.state.witness`); empty where there is none |
| changed | JSON text: what the loop has changed in what the readers hold (`midepoch.state.changed`); empty if nothing |
| omit | text: the positions that epochs leave out (docs/format.md); empty if there are none |
| checksum | CRC-32 of all the others |
"""

VERSION = 1
LONGEST_CHANGED = 160
"""Characters of the key `changed`."""

PIECES = " in pieces"
"""Ends the name of a part of a fingerprint that says what another part consists of: "NAME=DIGEST NAME=DIGEST".

It is not compared. If the other part differs, the message names the pieces that do.
"""

_LARGEST_INTEGER = 1 << 62  # leaves room for the epoch after the largest one
_LARGEST_DETAIL = 64 << 20
_LARGEST_OMIT = 3584

# name: (accepted types, exclusive upper bound of integers or largest length of texts, lower bound)
_FIELDS: dict[str, tuple[tuple[type, ...], int, int]] = {
    "version": ((int,), _LARGEST_INTEGER, 0),
    "adapter": ((str,), 64, 1),
    "epoch": ((int,), _LARGEST_INTEGER, 0),
    "position": ((int,), _LARGEST_INTEGER, 0),
    "seed": ((int,), 1 << 64, 0),
    "size": ((int, type(None)), _LARGEST_INTEGER, 0),
    "world_size": ((int,), 1 << 31, 1),
    "batch_size": ((int,), _LARGEST_INTEGER, 1),
    "fingerprint": ((str,), 4096, 0),
    "detail": ((str,), _LARGEST_DETAIL, 0),
    "witness": ((str,), LONGEST, 0),
    "changed": ((str,), LONGEST_CHANGED, 0),
    "omit": ((str,), _LARGEST_OMIT, 0),
    "checksum": ((str,), 8, 8),
}

FIELDS = tuple(_FIELDS)
_SUMMED = FIELDS[:-1]  # all but the checksum
_compact = json.JSONEncoder(separators=(",", ":")).encode


def _checksum(state: Mapping[str, Any]) -> str:
    # A list in our own order, because a checkpoint library may return the keys in another one.
    return f"{zlib.crc32(_compact([state[name] for name in _SUMMED]).encode()):08x}"


def build(**fields: Any) -> State:
    """A state of these fields (all but `version` and `checksum`), with its checksum."""
    state = {"version": VERSION, **fields}
    state["checksum"] = _checksum(state)
    return state


def reseal(state: Mapping[str, Any]) -> State:
    """A copy of a hand-edited `state` with a new checksum. Its values are checked when it is loaded.

    Raises:
        StateCorruptError: it is not a mapping, or a key is missing or holds what JSON cannot.
    """
    _check_keys(state)
    copy = dict(state)
    try:
        copy["checksum"] = _checksum(copy)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateCorruptError(f"the state cannot be resealed ({error}): use built-in types") from error
    return copy


def _check_keys(state: object) -> None:
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise StateCorruptError(f"a state is a dict as state_dict() returned it, got {kind}: pass that dict")
    missing = [name for name in FIELDS if name not in state]
    # Python may lack the memory, or refuse, to print other keys.
    extra = [repr(name[:80]) if isinstance(name, str) else f"a {type(name).__name__}" for name in state
             if name not in _FIELDS]  # fmt: skip
    problems = [f"misses {', '.join(missing)}"] if missing else []
    if extra:
        problems.append(f"has unknown keys {', '.join(extra)[:200]}")
    if problems:
        raise StateCorruptError(f"the state {' and '.join(problems)}: pass all that state_dict() returned")


def check(state: object) -> State:
    """A copy of `state`, if it is complete and consistent. The loader checks whether it fits.

    Raises:
        StateVersionError: another format.
        StateCorruptError: a key, a type, a range or the checksum is wrong.
    """
    if isinstance(state, Mapping) and type(state.get("version")) is int and state["version"] != VERSION:
        raise StateVersionError(
            f"the state has format version {_shown(state['version'])}, this midepoch reads version {VERSION}: "
            "load it with the midepoch that wrote it"
        )
    _check_keys(state)
    assert isinstance(state, Mapping)  # by _check_keys
    copy = {name: state[name] for name in FIELDS}
    for name, (kinds, bound, least) in _FIELDS.items():
        value = copy[name]
        if type(value) not in kinds:
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            told = f"{name} must be {names}, the state has a {type(value).__name__}"
            raise StateCorruptError(f"{told}: use an undamaged state")
        measured, what = (len(value), "length") if isinstance(value, str) else (value, "value")
        if measured is not None and not least <= measured < bound + isinstance(value, str):
            raise StateCorruptError(f"{name} has an impossible {what}, {_shown(measured)}: use an undamaged state")
    if copy["size"] is not None and copy["position"] > copy["size"]:
        told = f"position {copy['position']} lies beyond the state's own size {copy['size']}"
        raise StateCorruptError(f"{told}: use an undamaged state")
    expected = _checksum(copy)
    if copy["checksum"] != expected:
        raise StateCorruptError(
            f"the state's checksum is {copy['checksum']}, but its content gives {expected}: it is "
            "damaged; use an older one, or midepoch.reseal(state) if it was edited on purpose"
        )
    return copy


def _shown(number: int) -> str:
    # Python refuses to print integers of thousands of digits.
    return str(number) if abs(number) < 1 << 128 else "an absurdly large number"


def _parsed(fingerprint: str) -> dict[str, str]:
    """The parts of a fingerprint. One that `Loader` did not write is a single part."""
    try:
        parsed = json.loads(fingerprint)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and all(isinstance(value, str) for value in parsed.values()):
        return parsed
    return {"fingerprint": fingerprint[:200]}


def compare_fingerprints(saved: str, current: str) -> None:
    """Raise a StateMismatchError that names the first part in which two fingerprints differ."""
    if saved == current:
        return
    before, now = _parsed(saved), _parsed(current)
    names = sorted(name for name in before.keys() | now.keys() if PIECES not in name)
    differing = [name for name in names if before.get(name) != now.get(name)]
    if not differing and len(names) < len(before.keys() | now.keys()):
        return
    name = differing[0] if differing else "fingerprint"
    # A name that only the state has may contain a stranger's terminal escapes.
    told = name if name in now or not differing else repr(name)[:80]
    raise StateMismatchError(
        f"{told} differs: the state was saved with {repr(before.get(name, 'none'))[:200]}, this loader has "
        f"{now.get(name, 'none')!r}{_differing_pieces(name, before, now)}; make the loader as in the run that saved "
        "it, or start over with this data"
    )


def piece_of(fingerprint: str, name: str) -> str:
    """The pieces of a part of a fingerprint; empty if it does not tell them."""
    return str(_parsed(fingerprint).get(f"{name}{PIECES}", ""))


def _differing_pieces(name: str, before: dict[str, str], now: dict[str, str]) -> str:
    """In which pieces a part of two fingerprints differs, where both tell them."""
    told = [each.get(f"{name}{PIECES}") for each in (before, now)]
    if None in told:
        return ""
    saved, here = (set(str(text).split()) for text in told)
    names = sorted({piece.partition("=")[0] for piece in saved ^ here})
    # What a state says may contain a stranger's terminal escapes.
    return f" (in {repr(', '.join(names))[1:-1][:400]})" if names else " (the same pieces, in another place)"
