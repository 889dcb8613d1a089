"""What a snapshot knows of the `epochs` loop in which it was saved: `Record`, of all ranks together, and read again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import SnapshotError, warn
from ..loader.body import Record

__all__ = ["joined_records", "read_record"]

_MOST = 1 << 62


def joined_records(of_ranks: Sequence[Record], unfinished: Iterable[str] = ()) -> Record:
    """Combine the records of all ranks.

    An abandoned iterator may be freed later on one rank than on another. Where batches of loaders are `unfinished` on
    some rank, the latest pass over each is not over: a run that resumes gives them again.

    Raises:
        SnapshotError: they do not run the same body.
    """
    first = of_ranks[0]
    for rank, each in enumerate(of_ranks):
        if (each.epoch, each.begun) != (first.epoch, first.begun):
            raise SnapshotError(
                f"the ranks do not run the same body of epochs(): rank 0 is {first}, rank {rank} is {each}; let every "
                "rank make the same passes in an epoch"
            )
    most = max(of_ranks, key=lambda each: sum(each.empty.values()))
    left = {name for each in of_ranks for name in each.left}
    for name in unfinished:
        if most.empty.get(name) and name not in most.open:
            empty = {**most.empty, name: most.empty[name] - 1}
            why = ""
            if most.lead is not None:
                why = f"{most.lead} was read while tickets of {name} were open (finish them before it)"
                warn(f"the snapshot that is saved now cannot be resumed: {why}")
            most, left = replace(most, empty=empty, open=[*most.open, name], lead=name, unknown=why), left - {name}
    return replace(
        most,
        open=[name for name in most.open if name not in left],
        left=sorted(left),
        ahead=sorted({name for each in of_ranks for name in each.ahead}),
        unknown=next((each.unknown for each in (*of_ranks, most) if each.unknown), ""),
        ends=first.ends,
    )


def read_record(content: Any, known: Iterable[str]) -> Record:
    """What was saved by `asdict`. `known`: the parts of the snapshot.

    Raises:
        SnapshotError: it is of another form, or says that nobody can tell what a run that resumes would read.
    """
    try:
        record = Record(**content)
        names = {*record.empty, *record.open, *record.left, *record.within, *record.ahead, record.lead}
        counts = [*record.empty.values(), 0 if record.epoch is None else record.epoch]
        sound = (
            content.keys() == vars(record).keys()
            and names <= {*known, None}
            and all(type(each) is int and 0 <= each < _MOST for each in counts)
            and (type(record.unknown), type(record.ends)) == (str, bool)
        )
    except (TypeError, AttributeError):
        sound = False
    if not sound:
        raise SnapshotError(f"the snapshot's record of its epochs is damaged ({content!r:.200}): restore a copy")
    if record.unknown:
        raise SnapshotError(
            f"the snapshot cannot be resumed: {record.unknown}. Read the loaders as one, with midepoch.combine, and "
            "resume from a snapshot of an epoch's end"
        )
    return record
