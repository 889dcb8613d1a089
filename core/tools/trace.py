"""``midepoch trace``: what a step was trained on, and which steps were trained on a sample."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedSourceError
from ..order import Order
from ..order.described import order_of, positions_of
from ..world import MicroShare
from .command import write_new
from .ledgers import Entry, Stretch, read_ledger
from .source import Source

__all__ = ["Answer", "as_text", "at_step", "given_to", "trace"]

Answer = dict[str, Any]

_INNER = ("start", "step", "batch", "begins", "first", "last")


def trace(
    path: Path, step: int | None = None, rank: int | None = None, sample: int | None = None, loader: str | None = None,
    source: str | None = None, out: Path | None = None,
) -> Answer:  # fmt: skip
    """What the ledger beside a snapshot says of a step, of a sample, or of the whole run. As the command has them.

    Raises:
        ValueError: there is no such step, rank or loader.
        MidepochError: the ledger cannot be read, does not say it, or is another source's.
        TargetError: the source cannot be loaded.
    """
    ledger = read_ledger(path)
    answer: Answer = {"path": str(ledger.path), "steps": ledger.steps, "problems": list(ledger.problems)}
    stretches = list(ledger.stretches) if step is None else ledger.at(step)
    names = sorted({each.entry["loader"] for each in stretches})
    if loader is not None and loader not in names:
        raise ValueError(f"no batch of {loader!r} was trained on there: name another loader, of {', '.join(names)}")
    if source is not None and loader is None and len(names) > 1:
        raise ValueError(f"the run trained on {', '.join(names)}: say with --loader which of them the source is")
    stretches = [each for each in stretches if loader in (None, each.entry["loader"])]
    listing = None if source is None else Source(source)
    if step is not None:
        answer |= {"step": step, "loaders": [at_step(each, step, rank, listing) for each in stretches]}
        if out is not None and listing is not None:
            ranks = [each["rank"] for each in answer["loaders"][0]["ranks"]]
            batches = {each: listing.read(stretches[0].taken(step, step), each) for each in ranks}
            write_new(out, functools.partial(torch.save, batches))
        return answer
    if sample is None:
        entries = [each.entry | {"first": each.first, "last": each.last} for each in stretches]
        return answer | {"starts": list(ledger.starts), "entries": entries}
    seen = [seen for each in stretches for seen in given_to(each, sample, listing) if rank in (None, seen["rank"])]
    return answer | {"sample": sample, "seen": sorted(seen, key=lambda each: (each["step"], each["rank"]))}


def at_step(stretch: Stretch, step: int, rank: int | None, source: Source | None) -> Answer:
    """What a step took of a loader, by rank."""
    entry, ranks, taken = stretch.entry, [], stretch.taken(step, step)
    if rank is not None and not 0 <= rank < entry["world_size"]:
        raise ValueError(f"rank {rank} did not take part in step {step}: name one below {entry['world_size']}")
    for each in range(entry["world_size"]) if rank is None else (rank,):
        batches = [
            {
                "epoch": session["epoch"],
                "positions": positions,
                "indices": _indices(session, positions, source),
                "weight": session.share(each).weight(number),
            }
            for session, start, stop in taken
            for number in range(start, stop)
            if (positions := session.positions(each, number)) is not None
        ]
        ranks.append({"rank": each, "batches": batches})
    told = {name: entry[name] for name in ("loader", "seed", "world_size", "batch_size")}
    return {**told, "ranks": ranks}


def _order(entry: Entry, source: Source | None) -> Order | None:
    """The order, if the entry says enough to compute it. If not, the source has to be there."""
    try:
        described = json.loads(entry["fingerprint"])
        order = order_of(described["order"], entry["size"]) if described["unit"] != "batch" else None
    except (ValueError, TypeError, KeyError, RecursionError):
        order = None
    if order is None and source is None:
        raise UnsupportedSourceError(
            f"the order of {entry['loader']} is its sampler's or its source's, which no ledger has: pass --source "
            "MODULE:LOADER"
        )
    return order


def _indices(entry: Entry, positions: list[int], source: Source | None) -> list[Any]:
    """Of the samples at positions, in order."""
    if (order := _order(entry, source)) is None:
        assert source is not None  # `_order` has seen to it
        listed = source.listed(entry)
        return [index for position in positions for index in listed[position]]
    epoch = order.epoch(entry["seed"], entry["epoch"])
    return [index for first, last in _runs(positions) for index in epoch[first : last + 1].tolist()]


def given_to(stretch: Stretch, index: int, source: Source | None) -> Iterator[Answer]:
    """The steps and ranks that were given a sample."""
    entry = stretch.entry
    for session, start, stop in stretch.taken(stretch.first, stretch.last):
        if (order := _order(session, source)) is None:
            assert source is not None  # `_order` has seen to it
            positions = [at for at, indices in enumerate(source.listed(session)) if index in indices]
        else:
            ends = (session.share().start + step * session.share().global_batch for step in (start, stop))
            reach = (0, session["size"]) if session["size"] is not None else map(session.holes.position_of, ends)
            positions = list(positions_of(order, session["seed"], session["epoch"], index, *reach))
        for position in positions:
            for number, rank in _batches_with(session, position):
                if start <= number < stop:
                    step = entry["step"] + 1 + (session["begins"] + number - entry["batch"]) // entry["each"]
                    told = {"loader": entry["loader"], "step": step, "rank": rank, "epoch": session["epoch"]}
                    yield {**told, "position": position}


def _batches_with(entry: Entry, position: int) -> Iterator[tuple[int, int]]:
    """The batches of a session that have a position, each with its rank."""
    share, before = entry.share(), 0
    place, ranks = entry.holes.place_of(position), range(share.world.world_size)
    if isinstance(share, MicroShare):
        number = (place - share.start) // share.together
        before, share = number * share.micro_steps, share.one(number)
    step, offset = divmod(place - share.start, share.global_batch)
    # The full step that has it; or the last one, which may repeat the first positions of the epoch.
    tries = {step: ranks[offset // share.batch_size :][:1]} if step < share.full_steps else {step: ranks}
    if entry.skipped.place_of(position) < len(ranks):
        tries[share.full_steps] = ranks
    for step, some in tries.items():
        for rank in (each * entry["copies"] + copy for each in some for copy in range(entry["copies"])):
            positions = entry.positions(rank, before + step)
            if positions is not None and entry.share(rank).weight(before + step):
                yield from [(before + step, rank)] * positions.count(position)


def _runs(positions: list[int]) -> list[tuple[int, int]]:
    """The first and the last of positions that follow each other."""
    cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [(positions[first], positions[last - 1]) for first, last in itertools.pairwise(cuts) if first < last]


def as_text(answer: Answer) -> Iterator[str]:
    """The same for people, line by line."""
    yield from (f"damaged: {problem}" for problem in answer["problems"])
    run = f"{answer['steps']:,} steps of {answer['path']}"
    if "step" in answer:
        for loader in answer["loaders"]:
            yield (
                f"step {answer['step']:,} of {run}: {loader['loader']}, seed {loader['seed']}, "
                f"{_many(loader['world_size'], 'rank')}, batch size {loader['batch_size']}"
            )
            for rank, batch in ((each["rank"], batch) for each in loader["ranks"] for batch in each["batches"]):
                where = " ".join(str(a) if a == z else f"{a}..{z}" for a, z in _runs(batch["positions"]))
                weight = "" if batch["weight"] else ", of weight 0"
                indices = " ".join(map(str, batch["indices"]))
                yield f"  rank {rank}: epoch {batch['epoch']}, positions {where}{weight}: {indices}"
    elif "sample" in answer:
        yield f"sample {answer['sample']} was given {_many(len(answer['seen']), 'time')} in {run}"
        for each in answer["seen"]:
            yield "  step {step}, rank {rank}: {loader}, epoch {epoch}, position {position}".format(**each)
    else:
        yield f"{run}, started after steps {', '.join(map(str, answer['starts']))}"
        for each in answer["entries"]:
            told = (f"{name} {value}" for name, value in each.items() if name not in _INNER and value not in (None, ""))
            yield f"  steps {each['first']} to {each['last']}: {', '.join(told)}"


def _many(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"
