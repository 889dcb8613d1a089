"""An entry of a ledger: the numbers from which a loader's batches follow from one step on, and which these are."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from ..loader.loader import Loader
from ..loader.reading import Reading
from ..order import MAXIMUM_SIZE
from ..order.holes import Holes, parse_omit, text_of_omit
from ..world import MicroShare, Share, Tail, World

__all__ = ["Entry", "seal", "unseal"]

_MOST = 1 << 62
# What may not change within an entry.
_FIXED = (
    "seed", "world_size", "copies", "batch_size", "size", "tail", "drop_last", "together", "fingerprint", "detail",
    "unknown",
)  # fmt: skip
_LEAST = {"step": 0, "each": 0, "epoch": 0, "position": 0, "given": 0, "world_size": 1, "copies": 1, "batch_size": 1}


@dataclass(frozen=True)
class Entry:
    """A loader's *course*: its batches from one place on, epoch after epoch. Each step takes the next few of them.

    Attributes:
        loader: its name in the snapshot.
        step: the steps of the run that were made before.
        each: batches that each step takes on each rank; 0 while the loader is not read.
        epoch, position: where the course begins.
        given: batches of it that were given before the step.
        seed, size, batch_size, fingerprint, detail, omit: as in a state; `detail` and `omit` are those of `position`.
            `size` is None for an order without an end.
        world_size: ranks.
        copies, tail, drop_last: see `Facts`.
        together: the units of a global batch, as given to `wrap`; None if each batch is a step.
        unknown: why the samples cannot be computed; empty if they can.
    """

    loader: str
    step: int
    each: int
    epoch: int
    position: int
    given: int
    seed: int
    world_size: int
    copies: int
    batch_size: int
    size: int | None
    tail: Tail
    drop_last: bool
    together: int | None
    fingerprint: str
    detail: str
    omit: str
    unknown: str

    @classmethod
    def of(cls, name: str, loader: Loader, reading: Reading, step: int) -> Entry:
        """The course that begins with a session, before its first batch."""
        run, context = reading.run, loader._progress.context
        adapter, holes = context.adapter, run.holes
        facts, can = adapter.facts, adapter.stated_promises.skips
        share, unknown = (run.share, "") if can else (None, can.reason)
        try:
            omit = text_of_omit({**context.skips, run.epoch: holes or Holes()}, run.epoch)
        except ValueError as error:  # what was finished out of order is left out here, in ranges of positions
            omit, unknown = "", str(error)
        return cls(
            loader=name,
            step=step,
            each=0,
            epoch=run.epoch,
            position=run.position,
            given=0,
            seed=run.seed,
            world_size=run.world.world_size,
            copies=facts.copies,
            batch_size=facts.batch_size,
            size=None if share is None else share.size + (holes.total if holes is not None else 0),
            tail=adapter.tail_in_use,
            drop_last=facts.drop_last,
            together=context.options.global_batch,
            fingerprint=loader._progress.states.fingerprint,
            detail=reading.session.detail(None) if can else "",
            omit=omit,
            unknown=unknown,
        )

    # --- the course ---

    @functools.cached_property
    def skips(self) -> dict[int, Holes]:
        """What epochs leave out."""
        return parse_omit(self.omit, self.epoch)[0]

    def holes(self, epoch: int) -> Holes:
        """What an epoch leaves out."""
        return self.skips.get(epoch) or Holes()

    def share(self, epoch: int, rank: int = 0) -> Share:
        """A rank's batches in an epoch of the course, in places (`midepoch.order.holes`)."""
        size, holes = MAXIMUM_SIZE if self.size is None else self.size, self.holes(epoch)
        start = self.position if epoch == self.epoch else 0
        places, begin = holes.place_of(size), holes.place_of(min(start, size))
        world = World(rank // self.copies, self.world_size // self.copies)
        if self.together is None:
            return Share(places, begin, self.batch_size, world, self.tail, self.drop_last)
        return MicroShare(places, begin, self.batch_size, world, self.tail, self.drop_last, self.together)

    @functools.cached_property
    def _plain(self) -> int:
        """Batches of a later epoch that leaves nothing out."""
        return self.share(max([self.epoch, *self.skips]) + 1).steps

    def before(self, epoch: int) -> int:
        """Batches of the course in the epochs before one."""
        if epoch == self.epoch:
            return 0
        others = [each for each in self.skips if self.epoch < each < epoch]
        plain = epoch - self.epoch - 1 - len(others)
        return sum(self.share(each).steps for each in (self.epoch, *others)) + plain * self._plain

    def locate(self, number: int) -> tuple[int, int]:
        """The epoch of a batch of the course, counted from 0, and its step in this epoch.

        Raises:
            ValueError: the course has no such batch.
        """
        epoch = self.epoch
        for other in (self.epoch, *sorted(each for each in self.skips if each > self.epoch)):
            skipped = min((other - epoch), number // self._plain if self._plain else other - epoch)
            epoch, number = epoch + skipped, number - skipped * self._plain
            if epoch < other:
                return epoch, number
            if number < (steps := self.share(other).steps):
                return other, number
            epoch, number = other + 1, number - steps
        if not self._plain:
            raise ValueError(f"no epoch after {epoch - 1} has a batch")
        return epoch + number // self._plain, number % self._plain

    def number_at(self, epoch: int, position: int) -> int | None:
        """How many batches of the course lie before a place; None if none begins there."""
        share = self.share(epoch)
        together, steps = share.global_batch, 1
        if isinstance(share, MicroShare):
            together, steps = share.together, share.micro_steps
        times, rest = divmod(self.holes(epoch).place_of(position) - share.start, together)
        return None if rest or times < 0 else self.before(epoch) + times * steps

    def agrees(self, other: Entry) -> bool:
        """Whether a course that begins later is a part of this one, as far as its numbers say."""
        later = {each: list(holes) for each, holes in self.skips.items() if each >= other.epoch}
        same = later == {each: list(holes) for each, holes in other.skips.items()}
        return same and other.epoch >= self.epoch and all(getattr(self, it) == getattr(other, it) for it in _FIXED)

    # --- as it is written ---

    def changes(self, last: Entry | None) -> dict[str, Any]:
        """The fields that differ from those of the loader's last entry, and its name and step."""
        mine, known = asdict(self), {} if last is None else asdict(last)
        named = {name: mine[name] for name in ("loader", "step")}
        return named | {name: value for name, value in mine.items() if name not in known or known[name] != value}

    @classmethod
    def read(cls, changes: Mapping[str, Any], last: Entry | None) -> Entry:
        """The entry of such fields. Raises ValueError unless it is one."""
        found = {} if last is None else asdict(last)
        found |= {each.name: changes[each.name] for each in fields(cls) if each.name in changes}
        numbers = {**found, **{name: found.get(name) or 0 for name in ("size", "together")}}
        try:
            entry = cls(**found)
            texts = (entry.loader, entry.fingerprint, entry.detail, entry.omit, entry.unknown)
            sound = (
                all(isinstance(each, str) for each in texts)
                and type(entry.drop_last) is bool
                and entry.tail in get_args(Tail)
                and type(entry.seed) is int
                and 0 <= entry.seed < 1 << 64
                and all(type(numbers[name]) is int and numbers[name] < _MOST for name in (*_LEAST, "size", "together"))
                and all(numbers[name] >= least for name, least in _LEAST.items())
                and entry.position <= numbers["size"] + (entry.size is None) * MAXIMUM_SIZE <= MAXIMUM_SIZE
                and (entry.together is None or (entry.together > 0 and entry.tail == "uneven"))
                and entry.world_size % entry.copies == 0
                and all(not holes.total or holes.stops[-1] <= MAXIMUM_SIZE for holes in entry.skips.values())
            )
        except (TypeError, KeyError):
            sound = False
        if not sound:
            raise ValueError("it is no entry")
        return entry


def seal(values: Mapping[str, Any]) -> str:
    """A line of a ledger: JSON, whose last key is the CRC-32 of the JSON without it."""
    text = json.dumps(values, separators=(",", ":"))
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}\n'


def unseal(line: bytes) -> dict[str, Any]:
    """What a line says. Raises ValueError if it is damaged."""
    text, _, crc = line.rpartition(b',"crc":"')
    if crc != b'%08x"}' % zlib.crc32(text + b"}"):
        raise ValueError("its CRC is another one")
    values = json.loads(text + b"}")
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    return values
