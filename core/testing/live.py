"""The laws about what a program asks for while it trains: another world, a place to go back to, what to leave out.

All ranks of a job are loaders in one process, which take turns step by step.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import MidepochError
from ..world import World
from . import items
from .examine import Examination
from .record import MOST_BATCHES, Failure, Pass, Seen, Settings, open_loader, see, see_rest, violation
from .report import HOLDS, InapplicableError, Outcome, law
from .worlds import check_content, check_cover, count, largest_batch, no_world

__all__ = ["holes", "reshard", "rollback"]

_UNSUPPORTED = "midepoch.errors.UnsupportedSourceError"
_STATE_ERROR = "midepoch.errors.StateError"


@law(
    "reshard",
    cause="what was read ahead for the old world is handed out, or a rank's share is computed in the old world",
    cure="drop what was read ahead, and compute every rank's share from the position and the new world",
)
def reshard(examination: Examination) -> Outcome:
    """Ranks that leave and join in mid-epoch share the rest of it, over any sequence of worlds."""
    _need(examination, "reshard")
    worlds = examination.worlds
    if len(worlds) == 1:
        return Outcome("not applicable", no_world(examination))
    for name, options, world_size in (
        ("elastic_world", examination.options(), worlds[-1]),
        ("rank_independent", examination.options(0, worlds[-1]), 1),  # another rank's part would be missing
    ):
        declared, reason = examination.capability(name)
        if declared is False:
            examination.investigate(_refuses, "reshard", World(0, world_size), options=options)
            return Outcome("refused clearly", reason)
    examination.need_promise()
    examination.need_names()
    compared, least, most = False, worlds[0], worlds[-1]
    # A world grows, shrinks, and does both in one epoch.
    sequences = dict.fromkeys([(least, most, least), (least, most), (most, least, most), worlds, worlds[::-1]])
    for workers in examination.with_workers(quick=examination.settings.quick):
        for sequence in sequences:
            if not (compared and examination.settings.quick):
                compared = _judge_sequence(examination, sequence, workers) or compared
    return HOLDS if compared else Outcome("not applicable", "an epoch is too short for a change of the world")


def _need(examination: Examination, *methods: str) -> None:
    """Raise `InapplicableError` if the loader lacks a method, or what is broken without it would be found once more."""
    if not examination.investigate(_has, methods):
        raise InapplicableError(f"the loader has no {' and '.join(methods)}")
    if examination.broken:
        raise InapplicableError(f"not compared, because the law '{examination.broken[0]}' is broken")


def _judge_sequence(examination: Examination, sequence: Sequence[int], workers: Mapping[str, int]) -> bool:
    """Whether the epoch was long enough to compare anything."""
    options = examination.options(**workers)
    passes = examination.investigate(_change_worlds, sequence, options=options, refusal=_UNSUPPORTED)
    what = " -> ".join(map(str, sequence)) + " ranks" + (f" with {workers}" if workers else "")
    if isinstance(passes, Failure):
        # The source is built for its rank, so its world cannot change in mid-epoch: it says so, and what to build.
        raise InapplicableError(passes.message, "refused clearly")
    alone = examination.observed()
    batch = max([largest_batch([alone]), *(len(ids) for part in passes for ids in part.ids)])
    for epoch, part in enumerate(passes):
        got, expected = count(part.ids), count(alone.passes[epoch].ids)
        check_cover(examination, expected, got, max(sequence), batch, epoch, None, f"an epoch that goes on with {what}")
        check_content(examination, [part], epoch, f"with {what}")
    return bool(passes)


def _has(settings: Settings, options: Mapping[str, Any], names: Sequence[str]) -> bool:
    with open_loader(settings, options) as loader:
        return all(callable(getattr(loader, name, None)) for name in names)


def _refuses(settings: Settings, options: Mapping[str, Any], method: str, *arguments: Any) -> None:
    """A loader that declares a method no must refuse it within a pass, and go on."""
    with open_loader(settings, options) as loader:
        whole = sum(1 for _ in loader)
    with open_loader(settings, options) as loader:
        batches = iter(loader)
        next(batches, None)
        try:
            getattr(loader, method)(*arguments)
        except MidepochError:
            got = 1 + sum(1 for _ in batches)
        else:
            raise violation("a MidepochError, as capabilities declare", f"{method} was accepted", 0, 1)
    if got != whole:
        raise violation(f"after a {method} that was refused: {whole} batches", f"{got} batches", 0, 1)


# --- a job whose world changes ---


def _change_worlds(settings: Settings, options: Mapping[str, Any], sequence: tuple[int, ...]) -> list[Pass]:
    """One step in each world but the last, then the rest of the epoch and the next one. Empty if an epoch is short."""
    loaders: list[Any] = []  # of the ranks
    passes: list[Iterator[Any]] = []  # one over each of these
    epochs = [Pass(), Pass()]

    def step(into: Pass) -> bool:
        """Every rank takes a batch. False if none has one."""
        before = len(into.batches)
        for each in passes:
            into.batches += [see(settings, batch) for batch in itertools.islice(each, 1)]
        return before < len(into.batches) < MOST_BATCHES

    with contextlib.ExitStack() as open_loaders:
        for number, world_size in enumerate(sequence):
            if number and (not step(epochs[0]) or loaders[0].state_dict()["epoch"] > 0):
                return []
            # The highest ranks leave, or others join, which load what the first one saves.
            del loaders[world_size:], passes[world_size:]
            state = loaders[0].state_dict() if loaders else None
            for rank, loader in enumerate(loaders):
                loader.reshard(World(rank, world_size))
            for rank in range(len(loaders), world_size):
                place = {"rank": rank, "world_size": world_size}
                loaders.append(open_loaders.enter_context(open_loader(settings, {**options, **place})))
                if state is not None:
                    loaders[-1].load_state_dict(state)
                passes.append(iter(loaders[-1]))
        for into in epochs:
            while step(into):
                pass
            passes = [iter(loader) for loader in loaders]
    return epochs


# --- commit and rollback ---


@law(
    "rollback",
    cause="the place of the last commit is not kept, or what was read ahead of it is handed out after going back",
    cure="keep the committed place, say it in state_dict(), and open the source there again",
)
def rollback(examination: Examination) -> Outcome:
    """What was handed out since the last commit is given again, once, and a state says what is committed."""
    _need(examination, "commit", "rollback")
    examination.need_promise()
    head = examination.observed()
    ends = len(head.passes[0].batches)
    if ends < 2:
        return Outcome("not applicable", "an epoch has no more than one batch")
    # After the first batch, in the middle, and with the epoch's end between commit and rollback.
    commits = sorted({1, ends - 1}) if examination.settings.quick else range(1, ends)
    for workers in examination.with_workers(quick=examination.settings.quick):
        whole, by_ids = head, False
        if workers:
            by_ids = examination.capability("exact_augmentations", **workers)[0] is False
            whole = examination.head_with("num_workers", workers["num_workers"])
        expected = [seen for part in whole.passes[:2] for seen in part.batches]
        for commit in commits:
            options = examination.options(**workers)
            done = examination.investigate(_commit_and_roll_back, commit, options=options, refusal=_STATE_ERROR)
            if isinstance(done, Failure):
                # One that refuses a load once it was read, as the law 'round trip' allows, cannot go back either.
                if not examination.investigate(_goes_back, head.passes[0].states[0], options=options):
                    return Outcome("refused clearly", done.message)
                raise examination.error("a rollback that leads to the last commit", done.whole, 0)
            again = [*expected[: commit + 2], *expected[commit:ends]]
            what = f"{commit} batches committed, two more given, and the rest after a rollback"
            examination.same(again, done, what, 0, by_ids=by_ids)
    return HOLDS


def _goes_back(settings: Settings, options: Mapping[str, Any], beginning: dict[str, Any]) -> bool:
    """Whether a loader that was read takes the state of its beginning."""
    with open_loader(settings, options) as loader:
        next(iter(loader))
        try:
            loader.load_state_dict(copy.deepcopy(beginning))
        except MidepochError:
            return False
    return True


def _commit_and_roll_back(settings: Settings, options: Mapping[str, Any], commit: int) -> list[Seen]:
    """All batches given until the first epoch ends: `commit` of them, two more, and after a rollback the rest."""
    got: list[Seen] = []

    def state_is(expected: dict[str, Any], what: str) -> None:
        if items.digest(loader.state_dict()) != items.digest(expected):
            raise violation(what, "another state", 0, len(got))

    with open_loader(settings, options) as loader:
        batches = iter(loader)

        def take() -> None:
            """The next batch, of the next epoch if this one has ended."""
            nonlocal batches
            for _ in range(2):
                for batch in batches:
                    got.append(see(settings, batch))
                    return
                batches = iter(loader)

        for _ in range(commit):
            take()
        before = loader.state_dict()
        loader.commit()
        committed = loader.state_dict()
        state_is(before, "commit() that publishes the state of now")
        with contextlib.suppress(MidepochError):
            loader.commit()
            raise violation("a MidepochError for a second commit without a batch between", "none", 0, commit)
        for _ in range(2):
            take()
            state_is(committed, "batches that are not committed: the committed state")
        loader.rollback()
        state_is(committed, "after a rollback: the committed state")
        rest = [see(settings, batch) for batch in batches]
        return [*got, *(rest or [see(settings, batch) for batch in loader])]  # that pass may have ended before


# --- holes ---


@law(
    "holes", "skips",
    cause="a range is counted in other numbers than positions, or a sample is keyed by its number among what is left",
    cure="number what is left, and lead each of these numbers back to its position, as midepoch.order.holes does",
)
def holes(examination: Examination) -> Outcome:
    """What is skipped, or finished, is not given again; all else is, once, in order, with its contents."""
    _need(examination, "skip")
    declared, reason = examination.capability("skips")
    if declared is False:
        examination.investigate(_refuses, "skip", 0, 1)
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
