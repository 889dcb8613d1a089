"""The saved state: a flat dict with a fixed set of keys, a few hundred bytes, built-in types only.

| key | meaning |
|---|---|
| version | of this format |
| adapter | name of the adapter that wrote it |
| epoch, position | where the training loops stood |
| seed | what the order and the random streams start from, in [0, 2**64) |
| size | units in the epoch, None where it is unknown |
| world_size, batch_size | of the run that saved it; they inform and, where the order is ours, are not compared |
| fingerprint | JSON text: what the positions mean (order, the user's own identity of the data, ...) |
| detail | text of the adapter: empty where the order is ours |
| checksum | CRC-32 of all the others |
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch.distributed

from .errors import MidepochError, StateCorruptError, StateMismatchError, StateVersionError
from .protocol import State, StatefulIterable

__all__ = [
    "FIELDS",
    "VERSION",
    "build",
    "check",
    "compare_fingerprints",
    "from_values",
    "gather",
    "join_parts",
    "part_of",
    "parts_in",
    "reseal",
    "seal_detail",
    "single_part",
    "unseal_detail",
    "values_of",
]

VERSION = 1

_LARGEST_INTEGER = 1 << 62  # room for the epoch after the largest
_LARGEST_DETAIL = 64 << 20

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
    "checksum": ((str,), 8, 8),
}

FIELDS = tuple(_FIELDS)


def _checksum(state: Mapping[str, Any]) -> str:
    # A list rather than a dict: the order of keys is ours, whatever order a checkpoint library brings them back in.
    text = json.dumps([state[name] for name in _FIELDS if name != "checksum"], separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def build(**fields: Any) -> State:
    """A state of these fields (all but `version` and `checksum`), with its checksum."""
    state = {"version": VERSION, **fields}
    state["checksum"] = _checksum(state)
    return state


def reseal(state: Mapping[str, Any]) -> State:
    """A copy of `state`, edited by hand, with its checksum recomputed. What it says is checked when it is loaded.

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


def values_of(state: Mapping[str, Any]) -> list[Any]:
    """What a state says, without its keys."""
    return [state[name] for name in _FIELDS]


def from_values(values: list[Any]) -> State:
    """The state of which `values_of` gave the values; `check` tells whether it is whole."""
    return dict(zip(_FIELDS, values, strict=True))


def _check_keys(state: object) -> None:
    if not isinstance(state, Mapping):
        raise StateCorruptError(
            f"a state is a dict as state_dict() returned it, got {type(state).__name__}: pass that dict"
        )
    missing = [name for name in _FIELDS if name not in state]
    # Other keys may have no text that Python is able, or has the memory, to make.
    extra = [repr(name[:80]) if isinstance(name, str) else f"a {type(name).__name__}" for name in state
             if name not in _FIELDS]  # fmt: skip
    if missing or extra:
        problems = [f"misses {', '.join(missing)}"] * bool(missing) + [
            f"has unknown keys {', '.join(extra)[:200]}"
        ] * bool(extra)
        raise StateCorruptError(f"the state {' and '.join(problems)}: pass what state_dict() returned, whole")


def check(state: object) -> State:
    """A copy of `state` if it is whole and makes sense by itself; whose it is, the loader compares.

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
    assert isinstance(state, Mapping)  # _check_keys has seen to it
    copy = dict(state)
    for name, (kinds, bound, least) in _FIELDS.items():
        value = copy[name]
        if type(value) not in kinds:
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise StateCorruptError(
                f"{name} must be {names}, the state has a {type(value).__name__}: use an undamaged state"
            )
        measured = len(value) if isinstance(value, str) else value
        if measured is not None and not least <= measured < bound + isinstance(value, str):
            what = "length" if isinstance(value, str) else "value"
            raise StateCorruptError(f"{name} has an impossible {what}, {_shown(measured)}: use an undamaged state")
    if copy["size"] is not None and copy["position"] > copy["size"]:
        raise StateCorruptError(
            f"position {copy['position']} lies beyond the state's own size {copy['size']}: use an undamaged state"
        )
    expected = _checksum(copy)
    if copy["checksum"] != expected:
        raise StateCorruptError(
            f"the state's checksum is {copy['checksum']}, its content gives {expected}: it was damaged; use an older "
            "one, or midepoch.reseal(state) if it was edited on purpose"
        )
    return copy


def _shown(number: int) -> str:
    # Python refuses to write out integers of thousands of digits.
    return str(number) if abs(number) < 1 << 128 else "an absurdly large number"


def _parsed(fingerprint: str) -> dict[str, str]:
    """The parts of a fingerprint; all of it as one part where it is not what `Loader` writes."""
    try:
        parsed = json.loads(fingerprint)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and all(isinstance(value, str) for value in parsed.values()):
        return parsed
    return {"fingerprint": fingerprint[:200]}


def compare_fingerprints(saved: str, current: str) -> None:
    """Raise StateMismatchError naming the first part in which two fingerprints differ."""
    if saved == current:
        return
    before, now = _parsed(saved), _parsed(current)
    differing = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    name = differing[0] if differing else "fingerprint"
    # A name that only the state has may be a stranger's, with what a terminal obeys.
    told = name if name in now or not differing else repr(name)[:80]
    raise StateMismatchError(
        f"{told} differs: the state was saved with {repr(before.get(name, 'none'))[:200]}, this loader has "
        f"{now.get(name, 'none')!r}; make the loader as it was, or start this data anew"
    )


# --- states of which each rank knows only its part -------------------------------------------------------------------


def single_part(rank: int, part: str) -> str:
    """The detail of a state that holds one rank's part."""
    return json.dumps({"rank": rank, "part": part}, separators=(",", ":"))


def join_parts(parts: list[str]) -> str:
    """The detail of a state that holds the parts of all ranks, in rank order."""
    return json.dumps({"parts": parts}, separators=(",", ":"))


def part_of(detail: str, rank: int, world_size: int) -> str:
    """This rank's part of a detail made by `single_part` or `join_parts` in a world of the same size.

    Raises:
        StateMismatchError: it holds another rank's part only.
        StateCorruptError: it does not parse.
    """
    try:
        parsed = json.loads(detail)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and parsed.keys() == {"parts"}:
        parts = parsed["parts"]
        if isinstance(parts, list) and len(parts) == world_size and all(isinstance(part, str) for part in parts):
            return str(parts[rank])
    elif isinstance(parsed, dict) and parsed.keys() == {"rank", "part"}:
        saved, part = parsed["rank"], parsed["part"]
        if type(saved) is int and 0 <= saved < world_size and isinstance(part, str):
            if saved != rank:
                raise StateMismatchError(
                    f"this state holds the part of rank {saved} only, this is rank {rank} of {world_size}: save what "
                    "midepoch.gather(loader) returns (call it on every rank), or one state for each rank"
                )
            return part
    raise StateCorruptError("the state's detail does not hold the parts of the ranks: use an undamaged state")


def parts_in(detail: str) -> dict[int, str]:
    """All parts that a detail made by `single_part` or `join_parts` holds, by rank.

    Raises:
        StateCorruptError: it does not parse.
    """
    try:
        parsed = json.loads(detail)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        parts = parsed.get("parts") if parsed.keys() == {"parts"} else None
        if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
            return dict(enumerate(parts))
        rank, part = parsed.get("rank"), parsed.get("part")
        if parsed.keys() == {"rank", "part"} and type(rank) is int and isinstance(part, str):
            return {rank: part}
    raise StateCorruptError("the state's detail does not hold the parts of the ranks: use an undamaged state")


# --- details that say a place of their own ---------------------------------------------------------------------------

_SEAL = 8  # hexadecimal digits
_SEALED_WITH = ("fingerprint", "epoch", "position", "seed")  # what a detail belongs to


def _seal_of(text: str, rank: int, state: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps([text, rank, *(state[name] for name in _SEALED_WITH)]).encode()):08x}"


def seal_detail(text: str, rank: int, state: Mapping[str, Any]) -> str:
    """A detail with a checksum that `reseal` does not renew: else a place edited by hand would not be where it leads.

    Empty at the very beginning, where nothing has been read that it could tell of.
    """
    return _seal_of(text, rank, state) + text if text or state["epoch"] or state["position"] else ""


def unseal_detail(state: Mapping[str, Any], rank_independent: bool) -> str:
    """The detail of a state, or of each rank, without the checksums of `seal_detail`.

    Raises:
        StateCorruptError: one does not fit, so the detail is damaged or of another place.
    """
    detail: str = state["detail"]

    def opened(sealed: str, rank: int) -> str:
        epoch, position, text = state["epoch"], state["position"], sealed[_SEAL:]
        if not sealed and not epoch and not position:
            return ""
        if not sealed or sealed[:_SEAL] != _seal_of(text, rank, state):
            raise StateCorruptError(
                "the source's own part of the state was damaged, or is not of the state's place (epoch "
                f"{epoch}, position {position}): use an undamaged state, or loader.seek to go elsewhere"
            )
        return text

    if rank_independent or not detail:
        return opened(detail, 0)
    parts = {rank: opened(part, rank) for rank, part in parts_in(detail).items()}
    if "parts" in json.loads(detail):
        return join_parts(list(parts.values()))
    return single_part(*next(iter(parts.items())))


def gather(loader: StatefulIterable, group: torch.distributed.ProcessGroup | None = None, in_flight: int = 0) -> State:
    """One state that suits every rank. The one collective call: every rank must make it, after the same batch.

    Where the state is the same on every rank anyway, nothing is exchanged and this is ``loader.state_dict()``.

    Args:
        loader: what `midepoch.wrap` returned.
        group: the ranks that share the data; None for all of them.
        in_flight: as in ``state_dict``: batches taken but not yet trained on.

    Raises:
        MidepochError: the ranks do not stand at the same place, or torch.distributed has not been initialised.
    """
    state = loader.state_dict(in_flight) if in_flight else loader.state_dict()  # type: ignore[call-arg]
    return gather_state(loader, state, group)


def gather_state(loader: object, state: State, group: torch.distributed.ProcessGroup | None = None) -> State:
    """`gather`, of a state that `loader` gave."""
    if is_rank_independent(loader) or state["world_size"] == 1:
        return state
    if not torch.distributed.is_initialized():
        raise MidepochError(
            f"each of {state['world_size']} ranks knows only its own part of the state: call "
            "torch.distributed.init_process_group before midepoch.gather, or save one state for each rank"
        )
    states: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(states, state, group=group)
    return join_states(states)


def is_rank_independent(loader: object) -> bool:
    """Whether any rank's state of a loader will do for all."""
    return bool(getattr(getattr(loader, "capabilities", None), "rank_independent", True))


def join_states(states: list[State]) -> State:
    """One state that suits every rank, of the states of all ranks, each of which knows only its own part.

    Raises:
        MidepochError: the ranks do not stand at the same place.
    """
    place = [(each["epoch"], each["position"], each["world_size"]) for each in states]
    if len(set(place)) > 1 or place[0][2] != len(states):
        raise MidepochError(
            f"the ranks do not stand at the same place (epoch, position, world size): {place}; call midepoch.gather on "
            "every rank after the same batch"
        )
    if all(not each["detail"] for each in states):
        return states[0]
    parts = [part_of(each["detail"], rank, len(states)) if each["detail"] else "" for rank, each in enumerate(states)]
    return reseal({**states[0], "detail": join_parts(parts)})
