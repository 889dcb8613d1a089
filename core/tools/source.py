"""The source of a traced run, built anew: its samplers' lists, and its batches as a rank was given them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

from ..checkpoint.entries import Entry
from ..errors import MidepochError, SourceError, StateMismatchError, UnsupportedSourceError
from ..loader.lending import loader_of
from ..loader.loader import Loader
from ..loader.part import Part
from ..order.holes import text_of_omit
from ..state.format import compare_fingerprints, reseal
from ..state.parts import seal_detail
from ..world import MicroShare, World
from ..wrapping import wrap
from .targets import find_target
from .tracing import Batch

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

    def _loader(self, entry: Entry, rank: int) -> Loader:
        """As a rank of the run had it.

        Raises:
            StateMismatchError: the run had another one.
        """
        stated = {"rank": rank, "world_size": entry.world_size, "batch_size": entry.batch_size, "seed": entry.seed}
        taken = inspect.signature(self._make).parameters
        try:
            made = self._make(**{name: value for name, value in stated.items() if name in taken})
        except Exception as error:
            raise SourceError(f"{self._target} fails ({type(error).__name__}: {error}): correct it") from error
        given, world = loader_of(made), World(rank, entry.world_size)
        if given is not None:
            loader = wrap(given.source, **Part("", given).options | {"world": world})
        else:
            tail = entry.tail if entry.together is None else None
            loader = wrap(made, seed=entry.seed, tail=tail, global_batch=entry.together, world=world)
        facts, adapter = loader._adapter.facts, loader._adapter
        compare_fingerprints(entry.fingerprint, loader._progress.states.fingerprint)
        for name, here in (
            ("batch_size", facts.batch_size), ("drop_last", facts.drop_last), ("tail", adapter.tail_in_use),
            ("together", loader.global_batch), ("copies", facts.copies),
        ):  # fmt: skip
            if here != getattr(entry, name):
                raise StateMismatchError(
                    f"{name.replace('together', 'global_batch')} differs: the run had {getattr(entry, name)}, "
                    f"{self._target} has {here}: build the loader as in the run"
                )
        return loader

    def __call__(self, entry: Entry, epoch: int) -> list[list[Any]]:
        """The indices of the samples at each position of an epoch.

        Raises:
            MidepochError: the run had another source, or its samples have no indices.
        """
        with self._loader(entry, 0) as loader:
            samples = loader._adapter.samples(entry.seed, epoch)
            if samples is None:
                raise UnsupportedSourceError(f"the samples of {self._target} have no indices: name another loader")
            if entry.detail and entry.detail != f"crc={samples.listed}":
                raise StateMismatchError(
                    f"the list of epoch {epoch} differs: the run had {entry.detail}, {self._target} gives "
                    f"crc={samples.listed}: build the sampler as in the run"
                )
            return [samples.indices(unit) for unit in range(samples.units)]

    def read(self, entry: Entry, batches: Sequence[Batch]) -> list[Any]:
        """The batches of one rank, bit for bit.

        Raises:
            MidepochError: the run had another source, or it cannot be read.
        """
        found = []
        for epoch, some in itertools.groupby(batches, key=lambda each: each.epoch):
            wanted, share = list(some), entry.share(epoch)
            together, steps = share.global_batch, 1
            if isinstance(share, MicroShare):
                together, steps = share.together, share.micro_steps
            whole, before = divmod(wanted[0].step, steps)
            with self._loader(entry, wanted[0].rank) as loader:
                state = {
                    **loader.state_dict(),
                    "epoch": epoch,
                    "position": entry.holes(epoch).position_of(share.start + whole * together),
                    "seed": entry.seed,
                    "size": entry.size,
                    "omit": text_of_omit(entry.skips, epoch),
                }
                state["detail"] = seal_detail(entry.detail, 0, state)
                loader.load_state_dict(reseal(state))
                try:
                    found += list(itertools.islice(loader, before, before + len(wanted)))
                except MidepochError:
                    raise
                except Exception as error:
                    raise SourceError(f"{self._target} cannot be read ({type(error).__name__}: {error})") from error
        return found
