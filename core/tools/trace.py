"""``midepoch trace``: what it answers, as a dict for programs and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import SnapshotError
from .ledgers import Stretch, read_ledger
from .source import Source
from .tracing import batches_at, indices_of, runs_of, sights_of

__all__ = ["Answer", "as_text", "trace"]

Answer = dict[str, Any]


def trace(
    path: Path, step: int | None = None, rank: int | None = None, sample: int | None = None, loader: str | None = None,
    source: str | None = None, out: Path | None = None,
) -> Answer:  # fmt: skip
    """What the ledger beside a snapshot says of a step, of a sample, or of the whole run.

    Args:
        path: of the snapshot, or of its folder.
        step, rank: counted from 1 and 0; no rank stands for all.
        sample: an index.
        loader: its name in the snapshot; None for all.
        source: see `Source`.
        out: a file for the step's batches, which does not exist yet.

    Raises:
        ValueError: there is no such step, rank or loader.
        MidepochError: the ledger cannot be read, does not say it, or is another source's.
        TargetError: the source cannot be loaded.
    """
    ledger = read_ledger(path)
    answer: Answer = {"path": str(ledger.path), "steps": ledger.steps, "problems": list(ledger.problems)}
    stretches = _chosen(ledger.stretches if step is None else ledger.at(step), loader)
    listing = None if source is None else Source(source)
    if listing is not None and len(names := sorted({each.entry.loader for each in stretches})) > 1:
        raise ValueError(f"the run trained on {', '.join(names)}: say with --loader which of them the source is")
    if step is not None:
        return answer | {"step": step, "loaders": [_at(each, step, rank, listing, out) for each in stretches]}
    if sample is None:
        entries = [asdict(each.entry) | {"first": each.first, "last": each.last} for each in stretches]
        return answer | {"starts": sorted(ledger.starts), "entries": entries}
    seen = [
        {"loader": stretch.entry.loader, **sight._asdict()}
        for stretch in stretches
        for sight in sights_of(stretch, sample, listing)
        if rank in (None, sight.rank)
    ]
    return answer | {"sample": sample, "seen": sorted(seen, key=lambda each: (each["step"], each["rank"]))}


def _chosen(stretches: Any, loader: str | None) -> list[Stretch]:
    chosen = [each for each in stretches if loader in (None, each.entry.loader)]
    if not chosen and loader is not None:
        names = ", ".join(sorted({each.entry.loader for each in stretches})) or "none"
        raise ValueError(f"no batch of {loader!r} was trained on there: name another loader, of {names}")
    return chosen


def _at(stretch: Stretch, step: int, rank: int | None, source: Source | None, out: Path | None) -> Answer:
    entry, ranks, read = stretch.entry, [], dict[int, list[Any]]()
    for each in range(entry.world_size) if rank is None else (rank,):
        batches = list(batches_at(stretch, step, each))
        told = [
            {
                "epoch": batch.epoch,
                "positions": batch.positions,
                "indices": indices_of(entry, batch.epoch, batch.positions, source),
                "weight": batch.weight,
            }
            for batch in batches
        ]
        ranks.append({"rank": each, "batches": told})
        if source is not None and out is not None:
            read[each] = source.read(entry, batches)
    if out is not None:
        _write(out, read)
    return {
        "loader": entry.loader, "seed": entry.seed, "world_size": entry.world_size, "batch_size": entry.batch_size,
        "ranks": ranks,
    }  # fmt: skip


def _write(out: Path, batches: dict[int, list[Any]]) -> None:
    """Write batches by rank."""
    try:
        with out.open("xb") as file:
            torch.save(batches, file)
    except FileExistsError:
        raise SnapshotError(f"{out} exists already: name a file that does not") from None
    except Exception as error:
        out.unlink(missing_ok=True)
        raise SnapshotError(f"{out} cannot be written ({str(error)[:200]}): name another place") from error


def as_text(answer: Answer) -> Iterator[str]:
    """The same for people, line by line."""
    yield from (f"damaged: {problem}" for problem in answer["problems"])
    run = f"of {answer['steps']:,} steps of {answer['path']}"
    if "step" in answer:
        for loader in answer["loaders"]:
            yield (
                f"step {answer['step']:,} {run}: {loader['loader']}, seed {loader['seed']}, "
                f"{_many(loader['world_size'], 'rank')}, batch size {loader['batch_size']}"
            )
            for rank in loader["ranks"]:
                for batch in rank["batches"]:
                    weight = "" if batch["weight"] else ", of weight 0"
                    where = f"epoch {batch['epoch']}, positions {_ranges(batch['positions'])}{weight}"
                    yield f"  rank {rank['rank']}: {where}: {' '.join(map(str, batch['indices']))}"
    elif "sample" in answer:
        yield f"sample {answer['sample']} was given {_many(len(answer['seen']), 'time')} in {run[3:]}"
        for each in answer["seen"]:
            yield "  step {step}, rank {rank}: {loader}, epoch {epoch}, position {position}".format(**each)
    else:
        yield f"{run[3:]}, started after steps {', '.join(map(str, answer['starts']))}"
        for each in answer["entries"]:
            yield (
                f"  steps {each['first']} to {each['last']}: {each['loader']} from epoch {each['epoch']}, position "
                f"{each['position']}, {_many(each['each'], 'batch', 'es')} a step, {_many(each['world_size'], 'rank')}"
                f", batch size {each['batch_size']}, seed {each['seed']}"
                + (f", without {each['omit']}" if each["omit"] else "")
                + (f"; its samples cannot be computed ({each['unknown']})" if each["unknown"] else "")
            )


def _many(number: int, name: str, plural: str = "s") -> str:
    return f"{number:,} {name}{plural * (number != 1)}"


def _ranges(positions: list[int]) -> str:
    """Positions that follow each other, as FIRST..LAST."""
    return " ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs_of(positions))
