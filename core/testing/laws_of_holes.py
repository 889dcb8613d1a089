"""The law about what is left out of an epoch, or is finished in any order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .examine import Examination
from .law import law
from .live import need, refuses
from .record import Pass, Settings, open_loader, see, see_rest
from .report import HOLDS, Outcome
from .worlds import check_content

__all__ = ["holes"]


@law(
    "holes", "skips",
    cause="a range is counted in other numbers than positions, or a sample is keyed by its number among what is left",
    cure="number what is left, and lead each of these numbers back to its position, as midepoch.order.holes does",
)
def holes(examination: Examination) -> Outcome:
    """What is skipped, or finished, is not given again; all else is, once, in order, with its contents."""
    need(examination, "skip")
    declared, reason = examination.capability("skips")
    if declared is False:
        examination.investigate(refuses, "skip", 0, 1)
        return Outcome("refused clearly", reason)
    examination.need_promise()
    examination.need_names()
    whole = examination.observed().passes[0].batches
    if len(whole) < 3:
        return Outcome("not applicable", "an epoch has fewer than three batches")
    unit, finishes = examination.investigate(_unit_of)
    # What each position of the epoch gives, by batch.
    units = [[seen.ids] if unit == "batch" else [(name,) for name in seen.ids] for seen in whole]
    listed = [ids for each in units for ids in each]
    at, most = len(whole) // 3, max(len(seen.ids) for seen in whole)
    begins, last = sum(map(len, units[:at])), len(listed)
    middle = (begins + last) // 2
    for ranges in ([(begins, begins + 1)], [(0, 1), (middle, last)], [(begins, middle), (last - 1, last)]):
        gone = {place for start, stop in ranges for place in range(start, stop)}
        left = [ids for place, ids in enumerate(listed) if place >= begins and place not in gone]
        parts = examination.investigate(_skip, at, ranges)
        for part, what in zip(parts, ("goes on", "resumes"), strict=True):
            _compare(examination, left, part, most, f"a run that {what} after {at} batches and skips {ranges}", at)
    if finishes:
        taken = min(len(whole) - 1, at + 2)
        left = [ids for each in (*units[1:taken:2], *units[taken:]) for ids in each]
        part = examination.investigate(_finish, taken)
        _compare(examination, left, part, most, f"a resume after {taken} batches, every second of them finished", taken)
    return HOLDS


def _compare(
    examination: Examination, left: Sequence[Sequence[Any]], part: Pass, most: int, what: str, cut: int
) -> None:
    expected = [each for ids in left for each in ids]
    got = [each for seen in part.batches for each in seen.ids]
    both = max(len(expected), len(got))
    if examination.settings.drop_last and abs(len(expected) - len(got)) < most:  # other last batches are left out
        both = min(len(expected), len(got))
    if got[:both] != expected[:both]:
        raise examination.error(f"{what}: samples {expected[:12]}", f"{got[:12]}", 0, cut)
    check_content(examination, [part], 0, what)


def _unit_of(settings: Settings, options: Mapping[str, Any]) -> tuple[str, bool]:
    """What positions count, and whether there are tickets."""
    with open_loader(settings, options) as loader:
        return getattr(loader, "unit", "sample"), hasattr(type(loader), "ticket")


def _skip(settings: Settings, options: Mapping[str, Any], cut: int, ranges: Sequence[tuple[int, int]]) -> list[Pass]:
    """What follows a skip, in the same pass and after a resume."""
    with open_loader(settings, options) as loader:
        batches = iter(loader)
        for _ in itertools.islice(batches, cut):
            pass
        for start, stop in ranges:
            loader.skip(start, stop)
        state = loader.state_dict()
        on = Pass([see(settings, batch) for batch in batches])
    return [on, see_rest(settings, options, state)]


def _finish(settings: Settings, options: Mapping[str, Any], taken: int) -> Pass:
    """What follows after a resume: of so many batches every second one was finished, the latest first."""
    with open_loader(settings, options) as loader:
        tickets = [loader.ticket for _ in itertools.islice(iter(loader), taken)]
        for ticket in reversed(tickets[::2]):
            loader.finish(ticket)
        state = loader.state_dict()
    return see_rest(settings, options, state)
