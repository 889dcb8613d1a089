"""``midepoch trace``: what a step was trained on, and which steps were trained on a sample."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.ledger import described
from ..errors import MidepochError, SourceError, StateMismatchError, UnsupportedSourceError
from ..loader.lending import loader_of
from ..loader.loader import Loader
from ..loader.part import Part
from ..order import Order
from ..order.described import order_of, positions_of
from ..state.format import reseal
from ..state.parts import seal_detail
from ..world import World
from ..wrapping import wrap
from .command import write_new
from .ledgers import Row, Stretch, read_ledger
from .targets import find_target

__all__ = ["as_text", "given", "taken", "trace"]


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
    stretches = [each for line in ledger.lines for each in line["took"]] if step is None else ledger.at(step)
    names = sorted({each["loader"] for each in stretches})
    if loader not in (None, *names) or (source is not None and loader is None and len(names) > 1):
        raise ValueError(f"batches of {', '.join(names) or 'no loader'} were trained on there: name one with --loader")
    stretches = [each for each in stretches if loader in (None, each["loader"])]
    listing = None if source is None else Source(source)
    if step is not None:
        rows = [row for each in stretches for row in taken(each, step, rank, listing)]
    elif sample is not None:
        rows = [row for each in stretches for row in given(each, sample, rank, listing)]
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
    order = _order(stretch, source)
    for row in stretch.rows(stretch.batches(step), rank):
        pieces = [slice(*piece) for piece in row["positions"]]
        if isinstance(order, list):
            indices = [index for piece in pieces for indices in order[piece] for index in indices]
        else:
            epoch = order.epoch(stretch["seed"], stretch["epoch"])
            indices = [index for piece in pieces for index in epoch[piece].tolist()]
        yield row | {"indices": indices}


def given(stretch: Stretch, index: int, rank: int | None, source: Source | None) -> Iterator[Row]:
    """The steps and ranks that were given a sample."""
    order, size, at = _order(stretch, source), stretch["size"], stretch["position"]
    if isinstance(order, list):
        positions = [number for number, indices in enumerate(order) if index in indices]
    else:
        taken = stretch["batch_size"] * stretch["world_size"] * stretch.batches(stretch["last"]).stop  # at most
        start, stop = (at, at + taken + stretch.holes.total) if size is None else (0, size)
        positions = list(positions_of(order, stretch["seed"], stretch["epoch"], index, start, stop))
    for position in positions:
        for row in stretch.rows(stretch.batches_at(position), rank):
            pieces = row.pop("positions")
            yield from (row | {"position": position} for start, stop in pieces if start <= position < stop)


def _order(stretch: Stretch, source: Source | None) -> Order | list[list[Any]]:
    """The order, if the ledger says enough to compute it. If not, the indices at each position, as the source says."""
    order = _described(stretch["fingerprint"], stretch["size"])
    if order is not None:
        return order
    if source is None:
        raise UnsupportedSourceError(f"no ledger has the order of {stretch['loader']}: pass --source MODULE:LOADER")
    return source.listed(stretch)


@functools.cache
def _described(fingerprint: str, size: int | None) -> Order | None:
    said = json.loads(fingerprint)
    return order_of(said["order"], size) if said.get("unit") in ("sample", "item") else None


def as_text(told: dict[str, Any]) -> Iterator[str]:
    """The same for people, line by line."""
    yield from (f"damaged: {problem}" for problem in told["problems"])
    begin = told["starts"][0] + 1
    yield f"steps {begin} to {told['steps']} of {told['path']}, started after steps {_shown(told['starts'])}"
    for row in told["rows"]:
        yield "  " + ", ".join(f"{name} {_shown(value)}" for name, value in row.items() if value not in (None, ""))


def _shown(value: Any) -> str:
    """A list with spaces in between, a range [start, stop) of positions as its first and its last."""
    if isinstance(value, tuple):
        return str(value[0]) if value[0] + 1 == value[1] else f"{value[0]}..{value[1] - 1}"
    return " ".join(map(_shown, value)) if isinstance(value, list) else str(value)


class Source:
    """A loader, or a function that builds one and may take rank, world_size, batch_size and seed.

    A function that wraps it states all that it was wrapped with. Otherwise the ledger has seed, tail and global batch.

    Args:
        target: ``package.module:name`` or ``file.py:name``.

    Raises:
        TargetError: it cannot be loaded.
    """

    def __init__(self, target: str) -> None:
        self._target, self._make = target, find_target(target)

    def _made(self, stretch: Stretch, rank: int) -> Loader:
        """The loader, as a rank of the run had it."""
        stated = {"rank": rank, **{name: stretch[name] for name in ("world_size", "batch_size", "seed")}}
        parameters = inspect.signature(self._make).parameters
        made = self._make(**{name: value for name, value in stated.items() if name in parameters})
        given, world, together = loader_of(made), World(rank, stretch["world_size"]), stretch["global_batch"]
        if given is not None:
            return wrap(given.source, **Part("", given).options | {"world": world})
        tail = stretch["tail"] if together is None else None
        return wrap(made, seed=stretch["seed"], tail=tail, global_batch=together, world=world)

    @contextlib.contextmanager
    def _open(self, stretch: Stretch, rank: int, start: int) -> Iterator[tuple[Loader, int]]:
        """The loader, open at its session's batch `start`, or so many batches before as are returned too.

        Raises:
            StateError: the run had another one.
            SourceError: it fails.
        """
        try:
            with self._made(stretch, rank) as loader:
                share = stretch.share(rank)
                groups, before = divmod(start, getattr(share, "micro_steps", 1))
                moved = groups * getattr(share, "together", share.global_batch)
                position = stretch.holes.position_of(share.start + moved)
                state = loader.state_dict() | {name: stretch[name] for name in ("epoch", "seed", "size", "fingerprint")}
                state |= {"position": position, "omit": stretch.omit.text(stretch["epoch"], position)}
                loader.load_state_dict(reseal({**state, "detail": seal_detail(stretch["detail"], 0, state)}))
                reading = loader._progress.open()
                here = {} if reading is None else described(loader, reading)
                for name in ("batch_size", "tail", "drop_last", "global_batch", "copies"):
                    if here.get(name) != stretch[name]:
                        told = f"{name} differs: the run had {stretch[name]}, {self._target} has {here.get(name)}"
                        raise StateMismatchError(f"{told}; build the loader as in the run")
                yield loader, before
        except MidepochError:
            raise
        except Exception as error:
            raise SourceError(f"{self._target} fails ({type(error).__name__}: {error}): correct it") from error

    def listed(self, stretch: Stretch) -> list[list[Any]]:
        """The indices of the samples at each position of an epoch. Raises as `_open`."""
        with self._open(stretch, 0, 0) as (loader, _):
            if (order := loader._adapter.facts.order) is not None:
                return [[index] for index in order.epoch(stretch["seed"], stretch["epoch"])[0 : order.size].tolist()]
            # What a ledger describes is read by index, and is listed only if it has an end.
            samples: Any = loader._adapter.samples(stretch["seed"], stretch["epoch"])
            return [samples.indices(unit) for unit in range(samples.units)]

    def read(self, stretch: Stretch, step: int, rank: int) -> list[Any]:
        """The batches that a step took of a session, on a rank, bit for bit. Raises as `_open`."""
        batches = stretch.batches(step)
        with self._open(stretch, rank, batches.start) as (loader, before):
            return list(itertools.islice(loader, before, before + len(batches)))
