"""What a snapshot knows of the `epochs` loop in which it was saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import SnapshotError
from ..loader.body import Record

__all__ = ["BodyRecord"]

_MOST = 1 << 62


@dataclass(frozen=True)
class BodyRecord:
    """The place of an `epochs` loop.

    Attributes:
        epoch: whose body is running, or will be next; None without such a loop.
        passes: over the loaders, in this body.
        ends: without such a loop: the snapshot was saved after an epoch's last batch, by `step`.
    """

    epoch: int | None = None
    passes: Record = field(default_factory=Record)
    ends: bool = False

    @classmethod
    def joined(cls, of_ranks: Sequence[BodyRecord]) -> BodyRecord:
        """Combine the records of all ranks.

        An abandoned iterator may be freed later on one rank than on another.

        Raises:
            SnapshotError: they do not run the same body.
        """
        first = of_ranks[0]
        for rank, each in enumerate(of_ranks):
            if (each.epoch, each._begun) != (first.epoch, first._begun):
                raise SnapshotError(
                    f"the ranks do not run the same body of epochs(): rank 0 is {first}, rank {rank} is {each}; let "
                    "every rank make the same passes in an epoch"
                )
        every = sorted((each.passes for each in of_ranks), key=lambda each: -sum(each.empty.values()))
        left = {name for each in every for name in each.left}
        passes = replace(
            every[0],
            open=[name for name in every[0].open if name not in left],
            left=sorted(left),
            ahead=sorted({name for each in every for name in each.ahead}),
            unknown=next((each.unknown for each in every if each.unknown), ""),
        )
        return replace(first, passes=passes)

    @property
    def _begun(self) -> dict[str, int]:
        """By loader, how many passes that the body makes one after the other have begun."""
        passes = self.passes
        names = sorted({*passes.open, *passes.left})
        return {name: passes.empty.get(name, 0) + (name == passes.lead) for name in names}

    def as_content(self) -> dict[str, Any]:
        """Built-in types, which `read` takes."""
        return asdict(self)

    @classmethod
    def read(cls, content: Any, names: Iterable[str]) -> BodyRecord:
        """What was saved.

        Raises:
            SnapshotError: it is of another form, or says that nobody can tell what a run that resumes would read.
        """
        known = set(names)
        try:
            record = cls(**content | {"passes": Record(**content["passes"])})
            passes = record.passes
            lists = (passes.open, passes.left, passes.within, passes.ahead, [passes.lead] if passes.lead else [])
            sound = (
                (record.epoch is None or _is_count(record.epoch))
                and type(record.ends) is bool
                and type(passes.unknown) is str
                and all(type(each) is list and set(each) <= known for each in lists)
                and passes.empty.keys() <= known
                and all(map(_is_count, passes.empty.values()))
            )
        except (KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise SnapshotError(f"the snapshot's record of its epochs is damaged ({content!r:.200}): restore a copy")
        if passes.unknown:
            raise SnapshotError(
                f"the snapshot cannot be resumed: {passes.unknown}. Read the loaders as one, with midepoch.combine, "
                "and resume from a snapshot of an epoch's end"
            )
        return record

    def __str__(self) -> str:
        """For messages."""
        if self.epoch is None:
            return "outside a loop over epochs"
        begun = ", ".join(f"{name} ({count})" for name, count in self._begun.items())
        return f"in epoch {self.epoch}, {f'with passes over {begun}' if begun else 'before any pass'}"


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST
