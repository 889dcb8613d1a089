"""The laws about ranks that leave and join while training goes on: `reshard`, `commit` and `rollback`.

All ranks of a job are loaders in one process, which take turns step by step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import MidepochError
from ..world import World
from . import items
from .examine import Examination
from .law import law
from .record import MOST_BATCHES, Failure, Pass, Seen, Settings, open_loader, see, violation
from .report import HOLDS, InapplicableError, Outcome
from .worlds import check_content, check_cover, count, largest_batch, no_world

__all__ = ["need", "refuses", "reshard", "rollback"]


_UNSUPPORTED = "midepoch.errors.UnsupportedSourceError"
_STATE_ERROR = "midepoch.errors.StateError"


@law(
    "reshard",
    cause="what was read ahead for the old world is handed out, or a rank's share is computed in the old world",
    cure="drop what was read ahead, and compute every rank's share from the position and the new world",
)
def reshard(examination: Examination) -> Outcome:
    """Ranks that leave and join in mid-epoch share the rest of it, over any sequence of worlds."""
    need(examination, "reshard")
    worlds = examination.worlds
    if len(worlds) == 1:
        return Outcome("not applicable", no_world(examination))
    for name, options, world_size in (
        ("elastic_world", examination.options(), worlds[-1]),
        ("rank_independent", examination.options(0, worlds[-1]), 1),  # another rank's part would be missing
    ):
        declared, reason = examination.capability(name)
        if declared is False:
            examination.investigate(refuses, "reshard", World(0, world_size), options=options)
            return Outcome("refused clearly", reason)
    examination.need_promise()
    examination.need_names()
    compared = False
    quick = examination.settings.quick
    for workers in examination.with_workers()[: 1 if quick else 2]:
        for sequence in _sequences(worlds, quick):
            if not (compared and quick):
                compared = _judge_sequence(examination, sequence, workers) or compared
    return HOLDS if compared else Outcome("not applicable", "an epoch is too short for a change of the world")


def need(examination: Examination, *methods: str) -> None:
    """Raise `InapplicableError` if the loader lacks a method, or what is broken without it would be found once more."""
    if not examination.investigate(_has, methods):
        raise InapplicableError(f"the loader has no {' and '.join(methods)}")
    if examination.broken:
        raise InapplicableError(f"not compared, because the law '{examination.broken[0]}' is broken")


def _judge_sequence(examination: Examination, sequence: Sequence[int], workers: Mapping[str, int]) -> bool:
    """Whether the epoch was long enough to compare anything."""
    options = examination.options(**workers)
    passes = examination.investigate(_change_worlds, tuple(sequence), options=options, refusal=_UNSUPPORTED)
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


def _sequences(worlds: Sequence[int], quick: bool) -> list[tuple[int, ...]]:
    """A world grows, shrinks, and does both in one epoch."""
    least, most = worlds[0], worlds[-1]
    if quick:
        return [(least, most, least), (least, most)]  # the second for short epochs
    return [(least, most), (most, least), (most, least, most), tuple(worlds), tuple(reversed(worlds))]


def _has(settings: Settings, options: Mapping[str, Any], names: Sequence[str]) -> bool:
    with open_loader(settings, options) as loader:
        return all(callable(getattr(loader, name, None)) for name in names)


def refuses(settings: Settings, options: Mapping[str, Any], method: str, *arguments: Any) -> None:
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


class _Job:
    """The ranks of a job, one loader each, and one pass over each of these."""

    def __init__(self, settings: Settings, options: Mapping[str, Any], open_loaders: contextlib.ExitStack) -> None:
        self._settings, self._options, self._open = settings, options, open_loaders
        self.loaders: list[Any] = []
        self.passes: list[Iterator[Any]] = []

    def join(self, rank: int, world_size: int, state: dict[str, Any] | None) -> None:
        """Add a rank, which loads what another one saved."""
        place = {name: value for name, value in (("rank", rank), ("world_size", world_size)) if name in self._options}
        loader = self._open.enter_context(open_loader(self._settings, {**self._options, **place}))
        if state is not None:
            loader.load_state_dict(state)
        self.loaders.append(loader)
        self.passes.append(iter(loader))

    def change(self, world_size: int) -> None:
        """The highest ranks leave, or others join."""
        del self.loaders[world_size:], self.passes[world_size:]
        state = self.loaders[0].state_dict()
        for rank, loader in enumerate(self.loaders):
            loader.reshard(World(rank, world_size))
        for rank in range(len(self.loaders), world_size):
            self.join(rank, world_size, state)

    def step(self, into: Pass) -> bool:
        """Every rank takes a batch. False if none has one."""
        took = False
        for each in self.passes:
            for batch in each:
                into.batches.append(see(self._settings, batch))
                took = True
                break
        return took

    def finish(self, into: Pass) -> None:
        """Every rank goes on to the end of its pass, and begins another one."""
        while self.step(into):
            if len(into.batches) > MOST_BATCHES:
                raise RuntimeError(f"a pass of more than {MOST_BATCHES} batches")
        self.passes = [iter(loader) for loader in self.loaders]


def _change_worlds(settings: Settings, options: Mapping[str, Any], sequence: tuple[int, ...]) -> list[Pass]:
    """One step in each world but the last, then the rest of the epoch and the next one. Empty if an epoch is short."""
    first, second = Pass(), Pass()
    with contextlib.ExitStack() as open_loaders:
        job = _Job(settings, options, open_loaders)
        for rank in range(sequence[0]):
            job.join(rank, sequence[0], None)
        for world_size in sequence[1:]:
            if not job.step(first) or job.loaders[0].state_dict()["epoch"] > 0:
                return []
            job.change(world_size)
        job.finish(first)
        job.finish(second)
    return [first, second]


# --- commit and rollback ---


@law(
    "rollback",
    cause="the place of the last commit is not kept, or what was read ahead of it is handed out after going back",
    cure="keep the committed place, say it in state_dict(), and open the source there again",
)
def rollback(examination: Examination) -> Outcome:
    """What was handed out since the last commit is given again, once, and a state says what is committed."""
    need(examination, "commit", "rollback")
    examination.need_promise()
    head = examination.observed()
    batches = [seen for part in head.passes[:2] for seen in part.batches]
    if len(head.passes[0].batches) < 2:
        return Outcome("not applicable", "an epoch has no more than one batch")
    # After the first batch, in the middle, and with the epoch's end between commit and rollback.
    ends = len(head.passes[0].batches)
    commits = sorted({1, ends - 1}) if examination.settings.quick else list(range(1, ends))
    for workers in examination.with_workers()[: 1 if examination.settings.quick else 2]:
        expected, by_ids = batches, False
        if workers:
            by_ids = examination.capability("exact_augmentations", **workers)[0] is False
            with_workers = examination.head_with("num_workers", workers["num_workers"])
            expected = [seen for part in with_workers.passes[:2] for seen in part.batches]
        for commit in commits:
            options = examination.options(**workers)
            done = examination.investigate(_commit_and_roll_back, commit, 2, options=options, refusal=_STATE_ERROR)
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


def _commit_and_roll_back(settings: Settings, options: Mapping[str, Any], commit: int, lost: int) -> list[Seen]:
    """All batches given until the first epoch ends: `commit` of them, `lost` more, and after a rollback the rest."""
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
        for _ in range(lost):
            take()
            state_is(committed, "batches that are not committed: the committed state")
        loader.rollback()
        state_is(committed, "after a rollback: the committed state")
        rest = [see(settings, batch) for batch in batches]
        return [*got, *(rest or [see(settings, batch) for batch in loader])]  # that pass may have ended before
