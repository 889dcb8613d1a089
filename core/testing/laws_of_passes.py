"""Laws of what a loader gives: the same in each process, resumed and not, at every cut, also at an epoch's end."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from . import items
from .examine import Examination
from .law import law
from .naming import UNNAMED
from .record import Finding, Pass, Recording, Seen, Settings, Trial, open_loader, see, state_of
from .report import HOLDS, LawError, Outcome, combined

__all__ = ["any_item", "boundary", "determinism", "next_epoch", "tail"]


@law(
    "determinism",
    cause="a seed taken from the clock, the process or the operating system; an epoch that is not part of the key",
    cure="key every order and every random stream by (seed, epoch, position), as midepoch.wrap(source, seed=...) does",
)
def determinism(examination: Examination) -> Outcome:
    """Two fresh loaders agree, also in another process; if shuffled, two epochs differ; random columns vary."""
    inexact = examination.inexact()
    if inexact:
        return inexact
    whole = examination.whole()
    twin = examination.trial(examination.options(), passes=len(whole.passes))
    for process in (0, 1):
        other = examination.sound(examination.record([twin], process)[0], "a second fresh loader")
        for epoch, (expected, got) in enumerate(zip(whole.passes, other.passes, strict=True)):
            where = "in the same process" if process == 0 else "in another process"
            examination.same(expected.batches, got.batches, f"the same batch from a fresh loader {where}", epoch=epoch)
    _check_draws(examination, whole.passes)
    unsaid = [name for name in ("shuffled", "draws") if getattr(examination.settings, name) is None]
    told = [f"not examined because not given: {', '.join(unsaid)}"] if unsaid else []
    if examination.naming is None or examination.naming.columns:
        _compare_epochs(examination, whole.passes)
    elif examination.settings.shuffled is not None:
        told.append(f"shuffled={examination.settings.shuffled} not examined: {UNNAMED}")
    return Outcome("holds", "; ".join(told))


def _compare_epochs(examination: Examination, passes: Sequence[Pass]) -> None:
    shuffled = examination.settings.shuffled
    first, second = ([sample for ids in part.ids for sample in ids] for part in passes[:2])
    if shuffled is True and first == second:
        raise examination.error(
            "another order in the next epoch",
            f"epochs 0 and 1 both begin with samples {first[:8]}",
            epoch=1,
            cause="the epoch is not part of the key of the order, or set_epoch is never called",
            cure="let the order be a function of the seed and the epoch",
        )
    if shuffled is False and first != second:
        raise examination.error(
            f"the same order in each epoch: samples {first[:8]}",
            f"samples {second[:8]}",
            epoch=1,
            cause="the source shuffles although shuffled=False was stated",
            cure="pass shuffled=True, or stop shuffling",
        )


def _check_draws(examination: Examination, passes: Sequence[Pass]) -> None:
    found: dict[Hashable, tuple[int, int]] = {}
    for epoch, part in enumerate(passes):
        for number, seen in enumerate(part.batches):
            for value in seen.draws or ():
                if value in found:
                    raise examination.error(
                        "random numbers that no other sample and no other epoch has drawn",
                        f"{value!r} again, first drawn in epoch {found[value][0]}, batch {found[value][1]}",
                        epoch=epoch,
                        batch=number,
                        cause="the random stream is keyed by the worker, the rank or the epoch alone",
                        cure="key it by (seed, epoch, position)",
                    )
                found[value] = (epoch, number)


@law(
    "tail",
    cause="the state counts what was prefetched, lacks the seed, or a random stream restarts in the resumed process",
    cure="count what the training loop has received, and key each sample's stream by (seed, epoch, position)",
)
def tail(examination: Examination) -> Outcome:
    """Head and resumed tail together are the whole epoch, bit for bit, at every cut, on each rank, with workers."""
    inexact = examination.inexact()
    if inexact:
        return inexact
    head = examination.observed()
    cuts = 0
    for (epoch, cut), recording in examination.resumed().items():
        batches = head.passes[epoch].batches
        if 0 < cut < len(batches):
            _same_rest(examination, batches, recording, epoch, cut, "the batch of the uninterrupted run")
            cuts += 1
    for world_size in examination.worlds[1:]:
        heads = examination.heads(world_size)
        for (epoch, cut), recordings in examination.resumed_world(world_size).items():
            if cut == len(heads[0].passes[epoch].batches):
                continue  # for the boundary law
            for rank, recording in enumerate(recordings):
                what = f"on rank {rank} of {world_size}, the batch of the uninterrupted run"
                _same_rest(examination, heads[rank].passes[epoch].batches, recording, epoch, cut, what)
            cuts += 1
    if not cuts:
        return Outcome("not applicable", "an epoch has no more than one batch, so nothing can be cut; make it longer")

    def compare(head: Recording, recording: Recording, epoch: int, cut: int, where: str, by_ids: bool) -> None:
        what = f"{where}, the batch of the uninterrupted run"
        _same_rest(examination, head.passes[epoch].batches, recording, epoch, cut, what, by_ids)

    return combined({"cuts": HOLDS, "workers": _with_workers(examination, compare)})


def _same_rest(
    examination: Examination,
    batches: Sequence[Seen],
    recording: Recording,
    epoch: int,
    cut: int,
    what: str,
    by_ids: bool = False,
) -> None:
    """Compare the first pass of a resume after ``cut`` batches with the rest of an epoch's ``batches``."""
    examination.sound(recording, f"a resume after {cut} batches", epoch=epoch, batch=cut)
    examination.same(
        batches[cut:],
        recording.passes[0].batches,
        f"after a cut at batch {cut}, {what}",
        epoch=epoch,
        first=cut,
        by_ids=by_ids,
    )


def _with_workers(
    examination: Examination, compare: Callable[[Recording, Recording, int, int, str, bool], None]
) -> Outcome:
    """Compare each resume with as many workers as the uninterrupted run had, if such runs agree with each other.

    If they do not, the law 'delivery' still checks that the samples are the right ones.
    """
    workers = examination.most_workers
    if not workers:
        return HOLDS  # the laws 'delivery' and 'topology' say why
    by_ids = examination.capability("exact_augmentations", num_workers=workers)[0] is False
    try:
        for (epoch, cut), recording in examination.resumed_with_workers().items():
            head = examination.head_with("num_workers", workers)
            compare(head, recording, epoch, cut, f"with num_workers={workers}", by_ids)
    except LawError:
        if examination.repeats_with_workers():
            raise
        return Outcome("not applicable", f"two uninterrupted runs with num_workers={workers} differ")
    return HOLDS


@law(
    "next epoch",
    cause="the epoch is not part of the state, or the end of a resumed epoch does not count as an end",
    cure="move the state to (epoch + 1, 0) with the last batch, also in a resumed epoch",
)
def next_epoch(examination: Examination) -> Outcome:
    """After a resumed epoch, the next epoch is the one that would have followed, on every rank and with workers."""
    inexact = examination.inexact()
    if inexact:
        return inexact
    head = examination.observed()
    for (epoch, cut), recording in examination.resumed().items():
        if not 0 < cut < len(head.passes[epoch].batches):
            continue  # the boundary law checks where a pass from such a state begins
        _same_next(examination, head, recording, epoch, cut)
    for world_size in examination.worlds[1:]:
        heads = examination.heads(world_size)
        for (epoch, cut), recordings in examination.resumed_world(world_size).items():
            for rank, recording in enumerate(recordings):
                _same_next(examination, heads[rank], recording, epoch, cut, f" on rank {rank} of {world_size}")

    def compare(head: Recording, recording: Recording, epoch: int, cut: int, where: str, by_ids: bool) -> None:
        _same_next(examination, head, recording, epoch, cut, f" {where}", by_ids)

    return combined({"resumes": HOLDS, "workers": _with_workers(examination, compare)})


def _same_next(
    examination: Examination,
    head: Recording,
    recording: Recording,
    epoch: int,
    cut: int,
    where: str = "",
    by_ids: bool = False,
) -> None:
    """Compare the second pass of a resume, if it has one, with the epoch that followed in ``head``."""
    examination.sound(recording, f"a resume after {cut} batches{where}", epoch=epoch, batch=cut)
    what = f"resumed in epoch {epoch} after {cut} batches{where}, in the next epoch"
    for got in recording.passes[1:]:
        examination.same(head.passes[epoch + 1].batches, got.batches, what, epoch=epoch + 1, by_ids=by_ids)


@law(
    "boundary",
    cause="'finished' is saved as a full position of the old epoch, or the first state lacks what later ones have",
    cure="let the last batch move the state to (epoch + 1, 0), and give every state the same keys",
)
def boundary(examination: Examination) -> Outcome:
    """The state after the last batch starts the next epoch, or ends a body; that before the first equals fresh."""
    inexact = examination.inexact()
    if inexact:
        return inexact
    head = examination.observed()
    keys = sorted(head.passes[0].states[0])
    for epoch, part in enumerate(head.passes):
        for number, state in enumerate(part.states):
            if sorted(state) != keys:
                raise examination.error(
                    f"the keys of the first state: {keys}", f"{sorted(state)}", epoch=epoch, batch=number
                )
    for epoch in range(examination.settings.epochs):
        count = len(head.passes[epoch].batches)
        for cut, expected in ((0, head.passes[epoch]), (count, head.passes[epoch + 1])):
            recording = examination.sound(examination.resumed()[epoch, cut], "a resume", epoch=epoch, batch=cut)
            when = "before the first batch" if cut == 0 else "after the last batch"
            examination.same(
                expected.batches,
                recording.passes[0].batches,
                f"from the state {when} of epoch {epoch}",
                epoch=epoch + (cut > 0),
            )
    for world_size in examination.worlds[1:]:
        heads = examination.heads(world_size)
        for (epoch, cut), recordings in examination.resumed_world(world_size).items():
            if cut < len(heads[0].passes[epoch].batches):
                continue
            for rank, recording in enumerate(recordings):
                examination.sound(recording, f"a resume on rank {rank} of {world_size}", epoch=epoch, batch=cut)
                examination.same(
                    heads[rank].passes[epoch + 1].batches,
                    recording.passes[0].batches,
                    f"from the state after the last batch of epoch {epoch}, on rank {rank} of {world_size}",
                    epoch=epoch + 1,
                )
    examination.raise_first(examination.investigate(_start_quietly, examination.options()))
    behind = examination.investigate(_behind_the_last_batch, examination.options())
    if behind is not None:
        recording = examination.sound(
            examination.resume([examination.trial(examination.options(), state=behind)])[0], "a resume", epoch=0
        )
        what = "from the state after the last batch, in the body of epochs()"
        examination.same(head.passes[1].batches, recording.passes[0].batches, what, epoch=1)
        left, following = examination.investigate(_resume_in_the_body, examination.options(), behind)
        if left:
            raise examination.error("an empty pass in the body of the epoch that is over", f"{left} batches", epoch=0)
        examination.same(head.passes[1].batches, following, f"{what}, once that body has ended", epoch=1)
    return HOLDS


def _behind_the_last_batch(settings: Settings, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state in the body of `epochs`, after the pass; None for a loader without such loops."""
    with open_loader(settings, options) as loader:
        if not hasattr(loader, "epochs"):
            return None
        state: dict[str, Any] = {}
        for _ in loader.epochs(1):
            for _ in loader:
                pass
            state = state_of(settings, loader)
    return state


def _resume_in_the_body(
    settings: Settings, options: Mapping[str, Any], state: dict[str, Any]
) -> tuple[int, list[Seen]]:
    """The batches left of the epoch in whose body the state was saved, and those of the next epoch."""
    with open_loader(settings, options, later=True) as loader:
        loader.load_state_dict(state)
        passes = [[see(settings, batch) for batch in loader] for _ in loader.epochs(2)]
    return len(passes[0]), passes[1]


def _start_quietly(settings: Settings, options: Mapping[str, Any]) -> list[Finding]:
    with open_loader(settings, options) as loader:
        before = items.digest(loader.state_dict())
        iterator = iter(loader)
        after = items.digest(loader.state_dict())
        del iterator
    if before == after:
        return []
    return [
        Finding(
            "the same state before and after iter()",
            "another state",
            0,
            0,
            "the pass begins in __iter__",
            "begin it at the first next()",
        )
    ]


ANY_ITEMS: tuple[Any, ...] = (
    None,
    (),
    [],
    {},
    "",
    b"",
    0,
    False,
    math.nan,
    None,
    torch.empty(0),
    torch.empty(0, 3),
    np.empty((0, 2)),
    (None,),
)


"""The items that the law 'any item' asks a source to deliver, one a batch."""


@law(
    "any item",
    cause="an item is tested for its truth value, or None is used for 'nothing there'",
    cure="mark 'nothing there' with an object of your own, and end a pass only by StopIteration",
)
def any_item(examination: Examination) -> Outcome:
    """None, empty containers and empty tensors pass through like anything else."""
    if not examination.takes("items"):
        return Outcome("not applicable", "the factory takes no items")
    settings = dataclasses.replace(examination.settings, identify=_whole_item, draws=None)
    options = examination.options(items=list(ANY_ITEMS))
    trial = Trial(settings, options, passes=2, states=True, limit=2 * len(ANY_ITEMS))
    head = examination.sound(examination.record([trial])[0], "a source of odd items")
    expected = Counter(identity for item in ANY_ITEMS for identity in _whole_item(item))
    for epoch, part in enumerate(head.passes):
        got = Counter(identity for ids in part.ids for identity in ids)
        if got != expected:
            lost = ", ".join(repr(item) for item in ANY_ITEMS if _whole_item(item)[0] in expected - got)
            raise examination.error(
                f"{len(ANY_ITEMS)} items, each once",
                f"{len(part.batches)} items" + (f"; lost: {lost}" if lost else ""),
                epoch=epoch,
                batch=len(part.batches),
            )
    trials = [Trial(settings, options, state=state, limit=2 * len(ANY_ITEMS)) for state in head.passes[0].states[:-1]]
    for cut, recording in enumerate(examination.resume(trials)):
        examination.sound(recording, f"a resume after {cut} odd items", epoch=0, batch=cut)
        examination.same(
            head.passes[0].batches[cut:],
            recording.passes[0].batches,
            f"after a cut at item {cut}, the item",
            epoch=0,
            first=cut,
        )
    return HOLDS


def _whole_item(item: Any) -> list[Hashable]:
    """An item's identity. Tuples become lists and arrays become tensors, as in torch's own conversion."""
    return [items.digest(_converted(item))]


def _converted(item: Any) -> Any:
    if isinstance(item, np.ndarray):
        return torch.from_numpy(item)
    return [_converted(part) for part in item] if isinstance(item, (tuple, list)) else item
