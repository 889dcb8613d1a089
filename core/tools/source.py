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
from ..state.format import reseal
from ..state.parts import seal_detail
from ..world import World
from ..wrapping import wrap
from .ledgers import Stretch
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

    def _made(self, stretch: Stretch, rank: int) -> Loader:
        """The loader, as a rank of the run had it."""
        stated = {"rank": rank, **{name: stretch[name] for name in ("world_size", "batch_size", "seed")}}
        parameters = inspect.signature(self._make).parameters
        try:
            made = self._make(**{name: value for name, value in stated.items() if name in parameters})
        except Exception as error:
            raise SourceError(f"{self._target} fails ({type(error).__name__}: {error}): correct it") from error
        given, world, together = loader_of(made), World(rank, stretch["world_size"]), stretch["global_batch"]
        if given is not None:
            return wrap(given.source, **Part("", given).options | {"world": world})
        tail = stretch["tail"] if together is None else None
        return wrap(made, seed=stretch["seed"], tail=tail, global_batch=together, world=world)

    def _open(self, stretch: Stretch, rank: int, start: int) -> tuple[Loader, int]:
        """The loader, open at its session's batch `start`, or so many batches before as are returned too.

        Raises:
            StateError: the run had another one.
        """
        loader, share = self._made(stretch, rank), stretch.share(rank)
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
                raise StateMismatchError(
                    f"{name} differs: the run had {stretch[name]}, {self._target} has {here.get(name)}: build the "
                    "loader as in the run"
                )
        return loader, before

    def listed(self, stretch: Stretch) -> list[list[Any]]:
        """The indices of the samples at each position of an epoch.

        Raises:
            MidepochError: the run had another source, or its samples have no indices.
        """
        if self._listed[0] is not stretch:
            self._listed = stretch, self._list(stretch)
        return self._listed[1]

    def _list(self, stretch: Stretch) -> list[list[Any]]:
        with self._open(stretch, 0, 0)[0] as loader:
            if (order := loader._adapter.facts.order) is not None:
                return [[index] for index in order.epoch(stretch["seed"], stretch["epoch"])[0 : order.size].tolist()]
            samples = loader._adapter.samples(stretch["seed"], stretch["epoch"])
            if samples is None:
                raise UnsupportedSourceError(f"the samples of {self._target} have no indices: name another loader")
            return [samples.indices(unit) for unit in range(samples.units)]

    def read(self, stretch: Stretch, step: int, rank: int) -> list[Any]:
        """The batches that a step took of a session, on a rank, bit for bit.

        Raises:
            MidepochError: the run had another source, or it cannot be read.
        """
        batches = stretch.batches(step)
        loader, before = self._open(stretch, rank, batches.start)
        with loader:
            try:
                return list(itertools.islice(loader, before, before + len(batches)))
            except MidepochError:
                raise
            except Exception as error:
                raise SourceError(f"{self._target} cannot be read ({type(error).__name__}: {error})") from error
