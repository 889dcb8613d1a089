"""What a snapshot holds: collected from all ranks, joined by rank 0, and read, checked and applied by each of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from ..errors import SnapshotError, StateError
from ..loader.body import Record
from ..loader.lending import loader_of
from ..loader.saving import state_or_that_of_now
from ..state.changed import share_changed
from ..state.parts import check_skips, is_rank_independent, join_states, warn_of_witnesses
from .body_record import joined_records, read_record
from .epoch_loop import EpochLoop
from .files import FORMAT, Found, read
from .fitting import check_fits, kinds_of, sharded
from .generators import check_generators, save_generators
from .ledger import ledger_of

__all__ = ["Contribution", "apply", "contribute", "joined", "read_fitting"]


class Contribution(NamedTuple):
    """One rank's contribution to a snapshot: its loaders' states, generators and passes, or why there is none."""

    loaders: dict[str, Any]
    generators: str
    body: Record
    unfinished: list[str]  # loaders of which batches are not finished: tickets of them are open
    problem: str


def contribute(
    parts: Mapping[str, Any], loop: EpochLoop, in_flight: int, by_step: bool, is_exact: bool
) -> tuple[dict[str, Any], Contribution]:
    """The states of all parts, and this rank's contribution. `is_exact`: a state that is not known is an error."""
    states: dict[str, Any] = {}
    loaders: dict[str, Any] = {}
    unfinished: list[str] = []
    name, body, at_start = "the process", loop.body, False
    is_exact = is_exact and not (body is not None and body.kept.unknown)
    try:
        for name, part in parts.items():
            loader = loader_of(part)
            if loader is None:
                states[name] = part.state_dict()
                continue
            # In a body, a loader that is not being read, such as that of a validation, has no batch in flight.
            taken = in_flight if body is None else body.in_flight_of(name, in_flight)
            state = loader.state_dict(taken) if is_exact else state_or_that_of_now(loader, taken)[0]
            states[name] = loaders[name] = state
            unfinished += [name] if loader._progress.context.tickets.open() else []
            at_start = at_start or bool(state["epoch"] and not (state["position"] or (not taken and loader.position)))
        ends = by_step and at_start
        return states, Contribution(loaders, save_generators(), loop.record(ends), unfinished, "")
    except Exception as error:  # noqa: BLE001  # the other ranks wait for this one, and must hear of it
        problem = f"{name} gave no state: {type(error).__name__}: {error}"
        return states, Contribution({}, "", Record(), [], problem)


def joined(
    parts: Mapping[str, Any], states: dict[str, Any], offers: Sequence[Contribution], steps: int, told: set[str]
) -> dict[str, Any]:
    """The content that rank 0 writes, from its own states and all ranks' contributions.

    `told`: the loaders whose ranks were found to see other data; those found now are added.

    Raises:
        SnapshotError: a rank has no states, or the ranks are not at the same place, or a part lies on several ranks.
    """
    for rank, offer in enumerate(offers):
        if offer.problem:
            raise SnapshotError(f"on rank {rank}, {offer.problem}")
    body = joined_records([offer.body for offer in offers], {name for offer in offers for name in offer.unfinished})
    for name in offers[0].loaders:
        loader, of_all = loader_of(parts[name]), [offer.loaders[name] for offer in offers]
        places = [(each["epoch"], each["position"]) for each in of_all]
        if not is_rank_independent(loader) or any(each["detail"].startswith("{") for each in of_all):  # of tickets
            states[name] = join_states(of_all, loader) if len(offers) > 1 else of_all[0]
        elif len(set(places)) > 1:
            other = next(rank for rank, place in enumerate(places) if place != places[0])
            raise SnapshotError(
                f"the ranks do not stand at the same place of {name} (epoch, position): rank 0 at {places[0]}, "
                f"rank {other} at {places[other]}; call step() or save() on every rank after the same batch"
            )
        check_skips(name, of_all)
        states[name] = share_changed(states[name], of_all)
        warn_of_witnesses(name, loader, of_all, told)
    for name, state in states.items():
        if path := sharded(state, name):
            raise SnapshotError(
                f"{path} is sharded over the ranks, and rank 0 has only its part: save it with "
                "torch.distributed.checkpoint, which takes loaders too (docs/trainers.md), or gather it first"
            )
    return {
        "midepoch_snapshot": FORMAT,
        "id": uuid.uuid4().hex,
        "time": time.time(),
        "steps": steps,
        "world_size": len(offers),
        "seed": torch.initial_seed() % (1 << 64),
        "generators": [offer.generators for offer in offers],
        "body": asdict(body),
        "parts": states,
        "kinds": kinds_of(parts),
    }


def read_fitting(found: Found, parts: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The content of the snapshot that rank 0 has found, its body as a `Record`. Changes nothing.

    Its generators are this rank's; None if the snapshot does not know the rank.

    Raises:
        SnapshotError, StateError: this rank sees another file, or a part does not fit.
    """
    try:
        content = read(found.path)
    except FileNotFoundError:
        content = {"id": None}
    if content["id"] != found.id:
        raise SnapshotError(
            f"{found.path} is missing, or another file than rank 0 sees: put it on storage that all processes share"
        )
    check_fits(parts, content["parts"], content["kinds"])
    content["ledger"] = ledger_of(content, found.path)
    content["body"], of_ranks = read_record(content.get("body"), content["parts"]), content["generators"]
    content["generators"] = check_generators(of_ranks[rank]) if rank < len(of_ranks) else None
    return content


def apply(content: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Load the states into all parts, loaders first: they check everything before they change anything.

    Raises:
        SnapshotError, StateError: a part did not take its state.
    """
    for name, part in sorted(parts.items(), key=lambda item: loader_of(item[1]) is None):
        try:
            part.load_state_dict(content["parts"][name])
        except StateError:
            raise
        except Exception as error:
            raise SnapshotError(
                f"{name} did not take its state ({type(error).__name__}: {error}): make it as in the run that saved "
                "it, and start this process again"
            ) from error
