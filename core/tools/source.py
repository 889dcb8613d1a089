"""The source of a traced run, built anew: its samplers' lists, and its batches as a rank was given them."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

from ..checkpoint.ledger import described
from ..errors import MidepochError, SourceError, StateMismatchError, UnsupportedSourceError
from ..loader.lending import loader_of
from ..loader.loader import Loader
from ..loader.part import Part
from ..loader.place import Place
from ..order.holes import Omit
from ..state.format import compare_fingerprints
from ..world import MicroShare, World
from ..wrapping import wrap
from .ledgers import Entry
from .targets import find_target

__all__ = ["Source"]


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
        self._listed: tuple[Any, list[list[Any]]] = (), []  # of the latest session

    def _made(self, entry: Entry, rank: int) -> Loader:
        """The loader, as a rank of the run had it."""
        stated = {"rank": rank, **{name: entry[name] for name in ("world_size", "batch_size", "seed")}}
        taken = inspect.signature(self._make).parameters
        try:
            made = self._make(**{name: value for name, value in stated.items() if name in taken})
        except Exception as error:
            raise SourceError(f"{self._target} fails ({type(error).__name__}: {error}): correct it") from error
        given, world, together = loader_of(made), World(rank, entry["world_size"]), entry["global_batch"]
        if given is not None:
            return wrap(given.source, **Part("", given).options | {"world": world})
        tail = entry["tail"] if together is None else None
        return wrap(made, seed=entry["seed"], tail=tail, global_batch=together, world=world)

    def _open(self, entry: Entry, rank: int, start: int = 0) -> tuple[Loader, int]:
        """The loader, open at its session's batch `start`, or so many batches before as are returned too.

        Raises:
            StateMismatchError: the run had another one.
        """
        loader, share, before = self._made(entry, rank), entry.share(rank), 0
        moved = start * share.global_batch
        if isinstance(share, MicroShare):
            whole, before = divmod(start, share.micro_steps)
            moved = whole * share.together
        position = entry.holes.position_of(share.start + moved) if start else entry["position"]
        context, progress, epoch = loader._context, loader._progress, entry["epoch"]
        if loader._options.seed is None:
            context.take_seed(entry["seed"])
        context.omit = Omit({epoch: entry.skipped}, epoch, entry.holes)
        progress.put(Place(epoch, position, entry["detail"]))
        compare_fingerprints(entry["fingerprint"], progress.states.fingerprint)
        reading = progress.reading if progress.open() else None
        here = {} if reading is None else described(loader, reading) | {"position": entry["position"]}
        for name, value in here.items():
            if value != entry.get(name):
                raise StateMismatchError(
                    f"{name} differs: the run had {entry.get(name)}, {self._target} has {value}: build the loader as "
                    "in the run"
                )
        return loader, before

    def listed(self, entry: Entry) -> list[list[Any]]:
        """The indices of the samples at each position of an epoch.

        Raises:
            MidepochError: the run had another source, or its samples have no indices.
        """
        if self._listed[0] is not entry:
            self._listed = entry, self._list(entry)
        return self._listed[1]

    def _list(self, entry: Entry) -> list[list[Any]]:
        with self._open(entry, 0)[0] as loader:
            if (order := loader._adapter.facts.order) is not None:
                epoch = order.epoch(entry["seed"], entry["epoch"])
                return [[index] for index in epoch[0 : order.size].tolist()]
            samples = loader._adapter.samples(entry["seed"], entry["epoch"])
            if samples is None:
                raise UnsupportedSourceError(f"the samples of {self._target} have no indices: name another loader")
            return [samples.indices(unit) for unit in range(samples.units)]

    def read(self, taken: list[tuple[Entry, int, int]], rank: int) -> list[Any]:
        """Batches of a rank, bit for bit. `taken`: as `Stretch.taken` returns it.

        Raises:
            MidepochError: the run had another source, or it cannot be read.
        """
        found = []
        for entry, start, stop in taken:
            loader, before = self._open(entry, rank, start)
            with loader:
                try:
                    found += list(itertools.islice(loader, before, before + stop - start))
                except MidepochError:
                    raise
                except Exception as error:
                    raise SourceError(f"{self._target} cannot be read ({type(error).__name__}: {error})") from error
        return found
