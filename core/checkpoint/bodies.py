"""What a snapshot knows of the `epochs` loop that it was saved in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import SnapshotError
from ..loader.bodies import Passes

__all__ = ["Bodies"]

_MOST = 1 << 62


class Bodies(NamedTuple):
    """Where an `epochs` loop stands.

    Attributes:
        epoch: whose body is running, or will be next; None without such a loop.
        whole: for each loader over which a pass had begun, the passes that had ended and would be made again.
        left: the loaders whose latest pass had come to its end or was left, so that the next one begins a new epoch,
            and whether that pass would be made again.
        ends: without such a loop: the snapshot was saved after an epoch's last batch, by `step`.
        ahead: the loaders that are read ahead. A run that resumes may do so before its first step.
    """

    epoch: int | None = None
    whole: Mapping[str, int] = {}  # a mappingproxy cannot be sent to another rank
    left: Mapping[str, bool] = {}
    ends: bool = False
    ahead: Sequence[str] = ()

    @classmethod
    def of(
        cls, epoch: int | None, passes: Mapping[str, Passes], interrupted: bool = False, in_flight: int = 0
    ) -> Bodies:
        """Those of a loop in whose body there were these passes. `interrupted`, `in_flight`: as in `Passes.record`."""
        recorded = {name: each.record(interrupted, in_flight) for name, each in passes.items()}
        return cls(
            epoch,
            {name: whole for name, (whole, _) in recorded.items() if whole is not None},
            {name: again for name, (_, again) in recorded.items() if again is not None},
            ahead=[name for name, each in passes.items() if each.ahead],
        )

    @classmethod
    def joined(cls, of_ranks: Sequence[Bodies]) -> Bodies:
        """Combine the bodies of all ranks.

        An abandoned pass is noticed only when python frees its iterator, which may be later on one rank than another.

        Raises:
            SnapshotError: they do not run the same body.
        """
        first = of_ranks[0]
        for rank, each in enumerate(of_ranks):
            if (each.epoch, dict(each.whole)) != (first.epoch, dict(first.whole)):
                raise SnapshotError(
                    f"the ranks do not run the same body of epochs(): rank 0 is {first}, rank {rank} is {each}; let "
                    "every rank make the same passes in an epoch"
                )
        return first._replace(
            left={name: again for each in of_ranks for name, again in each.left.items()},
            ahead=sorted({name for each in of_ranks for name in each.ahead}),
        )

    def passes(self, name: str) -> Passes:
        """The passes over a loader in a body that is run again."""
        return Passes(self.whole.get(name), self.left.get(name), ahead=name in self.ahead)

    def as_content(self) -> dict[str, Any]:
        """Built-in types, which `read` takes."""
        return self._asdict() | {"whole": dict(self.whole), "left": dict(self.left), "ahead": list(self.ahead)}

    @classmethod
    def read(cls, content: Any, names: Iterable[str]) -> Bodies | None:
        """What was saved; None in a snapshot from before there were such loops.

        Raises:
            SnapshotError: it is of another form.
        """
        if content is None:
            return None
        known = set(names)
        try:
            epoch, whole, left, ends = content["epoch"], content["whole"], content["left"], content["ends"]
            ahead = list(content.get("ahead", ()))  # older ones do not say
            sound = (
                (epoch is None or _is_count(epoch))
                and whole.keys() | left.keys() <= known
                and all(map(_is_count, whole.values()))
                and all(each in known for each in ahead)
                and all(type(each) is bool for each in (ends, *left.values()))
            )
        except (KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise SnapshotError(f"the snapshot's record of its epochs is damaged ({content!r:.200}): restore a copy")
        return cls(epoch, dict(whole), dict(left), ends, ahead)

    def __str__(self) -> str:
        """For messages."""
        if self.epoch is None:
            return "outside a loop over epochs"
        begun = ", ".join(f"{name} ({count + 1})" for name, count in sorted(self.whole.items()))
        return f"in epoch {self.epoch}, {f'with passes over {begun}' if begun else 'before any pass'}"


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST
