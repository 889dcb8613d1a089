"""Which samples the ranks received before and after a cut, to be drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from .examine import Examination
from .record import Recording
from .report import LawError

__all__ = ["Picture", "take_pictures"]

_MOST_CUTS = 24  # cuts drawn for one epoch
Samples = tuple[Hashable, ...]


@dataclass(frozen=True)
class Picture:
    """What happened to one epoch that was cut and continued, perhaps on another number of ranks."""

    epoch: int
    cut: int  # batches of each rank before it
    worlds: tuple[int, int]  # number of ranks before the cut, and after it
    order: Samples  # the epoch's, in an uninterrupted run on one rank
    before: Samples  # that the ranks gave before the cut
    after: Samples  # the same after the cut; empty if `problem` is set
    problem: str = ""  # what went wrong, or why the loader refused

    @property
    def lost(self) -> Samples:
        """Samples of the epoch that no rank received."""
        given = {*self.before, *self.after}
        return tuple(sample for sample in self.order if sample not in given)

    @property
    def repeated(self) -> Samples:
        """Samples that were given more often than the epoch has them."""
        return tuple(Counter((*self.before, *self.after)) - Counter(self.order))


def take_pictures(examination: Examination, *, few: bool = False) -> Iterator[list[Picture]]:
    """For each possible change of the number of ranks and each epoch that can be cut: one picture for each cut inside.

    If an epoch can be cut in very many places, some are chosen, evenly spaced. ``few``: only one rank before and after.
    """
    examination.begin("picture")
    sizes = (1,) if few else examination.worlds
    for worlds in [(one, other) for one in sizes for other in sizes]:
        for epoch in range(examination.settings.epochs):
            order: Samples = ()
            try:
                order = _samples(examination.whole(), epoch)
                heads = examination.heads(worlds[0])
                inside = examination.interior(heads[0], epoch)
                cuts = inside[:: -(-len(inside) // _MOST_CUTS) or 1]
                resumed = examination.resume_world(heads, [(epoch, cut) for cut in cuts], worlds[1])
            except LawError as error:
                if order:
                    yield [Picture(epoch, 0, worlds, order, (), (), error.got.splitlines()[0])]
                continue
            taken = []
            for number, cut in enumerate(cuts):
                before = tuple(sample for head in heads for sample in _samples(head, epoch, cut))
                failures = [str(each[number].failure) for each in resumed if each[number].failure is not None]
                after = () if failures else tuple(sample for each in resumed for sample in _samples(each[number], 0))
                taken.append(Picture(epoch, cut, worlds, order, before, after, next(iter(failures), "")))
            if taken:
                yield taken


def _samples(recording: Recording, epoch: int, batches: int | None = None) -> Samples:
    return tuple(sample for batch in recording.passes[epoch].ids[:batches] for sample in batch)
