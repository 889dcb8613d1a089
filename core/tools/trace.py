"""``midepoch trace``: what a step was trained on, and which steps were trained on a sample."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import UnsupportedSourceError
from ..order import Order
from ..order.described import order_of, positions_of
from .command import write_new
from .ledgers import Stretch, read_ledger
from .source import Source

__all__ = ["Row", "as_text", "given", "taken", "trace"]

Row = dict[str, Any]


def trace(
    path: Path, step: int | None = None, rank: int | None = None, sample: int | None = None, loader: str | None = None,
    source: str | None = None, out: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What the ledger beside a snapshot says of a step, of a sample, or of the whole run. As the command has them.

    Raises:
        ValueError: there is no such step, rank or loader.
        MidepochError: the ledger cannot be read, does not say it, or is another source's.
        TargetError: the source cannot be loaded.
    """
    ledger = read_ledger(path)
    stretches = [each for line in ledger.lines for each in line["stretches"]] if step is None else ledger.at(step)
    names = sorted({each["loader"] for each in stretches})
    if loader is not None and loader not in names:
        raise ValueError(f"no batch of {loader!r} was trained on there: name another loader, of {', '.join(names)}")
    if source is not None and loader is None and len(names) > 1:
        raise ValueError(f"the run trained on {', '.join(names)}: say with --loader which of them the source is")
    stretches = [each for each in stretches if loader in (None, each["loader"])]
    listing = None if source is None else Source(source)
    if step is not None:
        rows = [row for each in stretches for row in taken(each, step, rank, listing)]
    elif sample is not None:
        rows = [row for each in stretches for row in given(each, sample, listing) if rank in (None, row["rank"])]
        rows.sort(key=lambda row: (row["step"], row["rank"]))
    else:
        rows = [dict(each) for each in stretches]
    if out is not None and step is not None and listing is not None:
        ranks = dict.fromkeys(row["rank"] for row in rows)
        batches = {each: [batch for part in stretches for batch in listing.read(part, step, each)] for each in ranks}
        write_new(out, functools.partial(torch.save, batches))
    told = {"path": str(ledger.path), "steps": ledger.steps, "starts": ledger.starts, "problems": ledger.problems}
    return told | {"rows": rows}


def taken(stretch: Stretch, step: int, rank: int | None, source: Source | None) -> Iterator[Row]:
    """The batches that a step took of a session, by rank."""
    if rank is not None and not 0 <= rank < stretch["world_size"]:
        raise ValueError(f"rank {rank} did not take part in step {step}: name one below {stretch['world_size']}")
    for each in range(stretch["world_size"]) if rank is None else (rank,):
        for number in stretch.batches(step):
            if positions := stretch.pieces(each, number):
                yield {
                    "loader": stretch["loader"], "step": step, "rank": each, "epoch": stretch["epoch"],
                    "positions": positions, "weight": stretch.share(each).weight(number),
                    "indices": _indices(stretch, positions, source),
                }  # fmt: skip


def given(stretch: Stretch, index: int, source: Source | None) -> Iterator[Row]:
    """The steps and ranks that were given a sample."""
    order, size = _order(stretch, source), stretch["size"]
    if isinstance(order, list):
        positions = [at for at, indices in enumerate(order) if index in indices]
    else:
        share, last = stretch.share(), stretch.batches(stretch.steps[-1]).stop
        ends = (share.start + number * share.global_batch for number in (stretch["batch"], last))
        reach = map(stretch.holes.position_of, ends) if size is None else (0, size)
        positions = list(positions_of(order, stretch["seed"], stretch["epoch"], index, *reach))
    for position in positions:
        for step, rank in stretch.given(position):
            told = {"loader": stretch["loader"], "step": step, "rank": rank, "epoch": stretch["epoch"]}
            yield told | {"position": position}


def _order(stretch: Stretch, source: Source | None) -> Order | list[list[Any]]:
    """The order, if the ledger says enough to compute it. If not, the indices at each position, as the source says."""
    said = json.loads(stretch["fingerprint"])
    order = order_of(said["order"], stretch["size"]) if said.get("unit") in ("sample", "item") else None
    if order is not None:
        return order
    if source is None:
        raise UnsupportedSourceError(
            f"the order of {stretch['loader']} is its sampler's or its source's, which no ledger has: pass --source "
            "MODULE:LOADER"
        )
    return source.listed(stretch)


def _indices(stretch: Stretch, positions: list[tuple[int, int]], source: Source | None) -> list[Any]:
    """Of the samples at positions, in order."""
    order = _order(stretch, source)
    if isinstance(order, list):
        return [index for start, stop in positions for indices in order[start:stop] for index in indices]
    epoch = order.epoch(stretch["seed"], stretch["epoch"])
    return [index for start, stop in positions for index in epoch[start:stop].tolist()]


def as_text(answer: dict[str, Any]) -> Iterator[str]:
    """The same for people, line by line."""
    yield from (f"damaged: {problem}" for problem in answer["problems"])
    yield f"{answer['steps']:,} steps of {answer['path']}, started after steps {_shown(answer['starts'])}"
    for row in answer["rows"]:
        yield "  " + ", ".join(f"{name} {_shown(value)}" for name, value in row.items() if value not in (None, ""))


def _shown(value: Any) -> str:
    """A list with spaces in between, a range [start, stop) of positions as its first and its last."""
    if isinstance(value, tuple):
        return str(value[0]) if value[0] + 1 == value[1] else f"{value[0]}..{value[1] - 1}"
    return " ".join(map(_shown, value)) if isinstance(value, list) else str(value)
