"""States that consist of per-rank parts, and checksums that tie a detail to its position."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch.distributed

from ..errors import MidepochError, StateCorruptError, StateMismatchError, warn
from .changed import share_changed
from .format import State, reseal

__all__ = [
    "check_skips", "gather", "gather_state", "is_rank_independent", "join_parts", "join_states", "part_of", "parts_in",
    "seal_detail", "single_part", "unseal_detail", "warn_of_witnesses",
]  # fmt: skip


def single_part(rank: int, part: str) -> str:
    """The detail of a state with one rank's part."""
    return json.dumps({"rank": rank, "part": part}, separators=(",", ":"))


def join_parts(parts: list[str]) -> str:
    """The detail of a state with all ranks' parts, in rank order."""
    return json.dumps({"parts": parts}, separators=(",", ":"))


def part_of(detail: str, rank: int, world_size: int) -> str:
    """This rank's part of a detail made by `single_part` or `join_parts` in a world of the same size.

    Raises:
        StateMismatchError: it holds another rank's part only.
        StateCorruptError: it does not parse.
    """
    parts = parts_in(detail, world_size)
    if rank not in parts:
        raise StateMismatchError(
            f"this state has only the part of rank {next(iter(parts))}, and this is rank {rank} of {world_size}: save "
            "what midepoch.gather(loader) returns (call it on every rank), or one state for each rank"
        )
    return parts[rank]


def parts_in(detail: str, world_size: int | None = None) -> dict[int, str]:
    """All parts in a detail made by `single_part` or `join_parts`, by rank. `world_size`: if it is known.

    Raises:
        StateCorruptError: it does not parse.
    """
    try:
        parsed = json.loads(detail)
    except (ValueError, RecursionError):
        parsed = None
    match parsed:
        case {"parts": list(parts), **others} if not others and all(isinstance(part, str) for part in parts):
            if world_size in (None, len(parts)):
                return dict(enumerate(parts))
        case {"rank": int(rank), "part": str(part), **others} if not others and type(rank) is int:
            if world_size is None or 0 <= rank < world_size:
                return {rank: part}
    raise StateCorruptError("the state's detail does not hold the parts of the ranks: use an undamaged state")


# --- details that contain a place of their own ------------------------------------------------------------------------

_SEAL = 8  # hexadecimal digits
_SEALED_WITH = ("fingerprint", "epoch", "position", "seed")  # the place and the data that a detail belongs to


def _seal_of(text: str, rank: int, state: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps([text, rank, *(state[name] for name in _SEALED_WITH)]).encode()):08x}"


def seal_detail(text: str, rank: int, state: Mapping[str, Any]) -> str:
    """A detail with a checksum that `reseal` does not renew, so that it cannot be moved to another place."""
    return _seal_of(text, rank, state) + text if text else ""


def unseal_detail(state: Mapping[str, Any], rank_independent: bool) -> str:
    """The detail of a state, or of each rank, without the checksums of `seal_detail`.

    Raises:
        StateCorruptError: one does not fit, so the detail is damaged or belongs to another position.
    """
    detail: str = state["detail"]

    def opened(sealed: str, rank: int) -> str:
        epoch, position, text = state["epoch"], state["position"], sealed[_SEAL:]
        if sealed and sealed[:_SEAL] != _seal_of(text, rank, state):
            raise StateCorruptError(
                "the source's own part of the state was damaged, or does not belong to the state's position (epoch "
                f"{epoch}, position {position}): use an undamaged state, or loader.seek to go elsewhere"
            )
        return text

    if rank_independent or not detail:
        return opened(detail, 0)
    parts = {rank: opened(part, rank) for rank, part in parts_in(detail).items()}
    if "parts" in json.loads(detail):
        return join_parts(list(parts.values()))
    return single_part(*next(iter(parts.items())))


def gather(loader: Any, group: torch.distributed.ProcessGroup | None = None, in_flight: int = 0) -> State:
    """One state for all ranks. It is a collective call: every rank must make it, after the same batch.

    If the state is the same on every rank anyway, nothing is exchanged and this is ``loader.state_dict()``.

    Args:
        loader: what `midepoch.wrap` returned.
        group: the ranks that share the data; None for all of them.
        in_flight: as in ``state_dict``: batches taken but not yet trained on.

    Raises:
        MidepochError: the ranks do not stand at the same place, or torch.distributed has not been initialised.
    """
    state = loader.state_dict(in_flight) if in_flight else loader.state_dict()
    return gather_state(loader, state, group)


def gather_state(loader: object, state: State, group: torch.distributed.ProcessGroup | None = None) -> State:
    """`gather`, given the state of `loader`."""
    if is_rank_independent(loader) or state["world_size"] == 1:
        return state
    if not torch.distributed.is_initialized():
        raise MidepochError(
            f"each of {state['world_size']} ranks knows only its own part of the state: call "
            "torch.distributed.init_process_group before midepoch.gather, or save one state for each rank"
        )
    states: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(states, state, group=group)
    joined = join_states(states, loader)
    if torch.distributed.get_rank(group) == 0:
        warn_of_witnesses("the loader", loader, states)
    return joined


def is_rank_independent(loader: object) -> bool:
    """Whether one rank's state of a loader is enough for all ranks. Assumed of objects that do not say."""
    return bool(getattr(loader, "is_rank_independent", True))


def join_states(states: list[State], loader: Any = None) -> State:
    """One state for all ranks, from their states by rank, each of which has only its own part.

    The tickets of `loader`, this rank's, say what the parts mean.

    Raises:
        MidepochError: the ranks do not stand at the same place.
    """
    place = [(each["epoch"], each["position"], each["world_size"]) for each in states]
    if len(set(place)) > 1 or place[0][2] != len(states):
        raise MidepochError(
            f"the ranks do not stand at the same place (epoch, position, world size): {place}; call midepoch.gather on "
            "every rank after the same batch"
        )
    check_skips("the loader", states)
    united = loader.united(states) if hasattr(loader, "united") else None
    joined = states[0] if united is None else united
    if united is None and any(each["detail"] for each in states):
        of_ranks = [each["detail"] and part_of(each["detail"], rank, len(states)) for rank, each in enumerate(states)]
        joined = reseal({**joined, "detail": join_parts(of_ranks)})
    return share_changed(joined, states)


def check_skips(name: str, states: list[State]) -> None:
    """Raise a MidepochError if a rank's state of the loader `name` leaves out other positions."""
    alone = [f"rank {rank}" for rank, each in enumerate(states) if each["omit"] != states[0]["omit"]]
    if alone:
        raise MidepochError(f"{alone[0]} skips other positions of {name} than rank 0: call skip() on every rank alike")


# --- the witnesses of all ranks ---------------------------------------------------------------------------------------


def warn_of_witnesses(name: str, loader: Any, states: list[State], told: set[str] | None = None) -> None:
    """Warn if the ranks, at the same place by their `states`, do not read the same first sample.

    The whole or a combination's part. `told`: names that were warned of before; those of now are added.
    """
    told = set() if told is None else told
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, state in enumerate(states):
        for part, witness in loader.witnesses_in(state).items() if hasattr(loader, "witnesses_in") else ():
            what = f"part {part} of {name}" if part else name
            # Ranks may be in different epochs of a part, and then see different samples.
            epoch = witness.partition("/")[0]
            other, seen = first.setdefault((part, epoch), (rank, witness))
            if seen == witness or what in told:
                continue
            told.add(what)
            warn(
                f"rank {other} and rank {rank} do not see the same data in {what}: each has read the first sample of "
                "the epoch, and they differ. If a rank lists its files in another order (glob and os.listdir do not "
                "sort), samples are lost and repeated: sort them. If only bits differ (another decoder, a host's name "
                "in the sample), samples depend on the rank that reads them",
            )
