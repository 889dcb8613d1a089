"""Laws of what a loader gives: the same in each process, resumed and not, at every cut, also at an epoch's end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from . import items
from .examine import Examination, Resume
from .naming import UNNAMED
from .record import Pass, Seen, Settings, Trial, open_loader, see, see_rest, state_of, violation
from .report import HOLDS, LawError, Outcome, combined, law
from .worlds import count

__all__ = ["any_item", "boundary", "determinism", "next_epoch", "tail"]


@law(
    "determinism",
    cause="a seed taken from the clock, the process or the operating system; an epoch that is not part of the key",
    cure="key every order and every random stream by (seed, epoch, position), as midepoch.wrap(source, seed=...) does",
)
def determinism(examination: Examination) -> Outcome:
    """Two fresh loaders agree, also in another process; if shuffled, two epochs differ; random columns vary."""
    examination.need_promise()
    whole = examination.whole()
    clone = examination.trial(passes=len(whole.passes))
    for process, where in enumerate(("in the same process", "in another process")):
        other = examination.sound(examination.record([clone], process)[0], "a second fresh loader")
        examination.same_passes(whole.passes, other.passes, f"the same batch from a fresh loader {where}")
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
    if shuffled is None or shuffled == (first != second):
        return
    raise examination.error(
        f"{'another' if shuffled else 'the same'} order in each epoch: samples {first[:8]}", f"samples {second[:8]}", 1,
        cause="the epoch is not part of the order's key" if shuffled else "shuffled=False was stated, and it shuffles",
        cure="let the order be a function of the seed and the epoch, or state shuffled= as it is",
    )  # fmt: skip


def _check_draws(examination: Examination, passes: Sequence[Pass]) -> None:
    found: dict[Hashable, tuple[int, int]] = {}
    for epoch, part in enumerate(passes):
        for number, seen in enumerate(part.batches):
            for value in seen.draws or ():
                if value in found:
                    again = f"{value!r} again, first drawn in epoch {found[value][0]}, batch {found[value][1]}"
                    raise examination.error(
                        "random numbers that no other sample and no other epoch has drawn", again, epoch, number,
                        "the random stream is keyed by the worker, the rank or the epoch alone",
                        "key it by (seed, epoch, position)",
                    )  # fmt: skip
                found[value] = (epoch, number)


@law(
    "tail", "exact_order", "exact_augmentations",
    cause="the state counts what was prefetched, lacks the seed, or a random stream restarts in the resumed process",
    cure="count what the training loop has received, and key each sample's stream by (seed, epoch, position)",
)
def tail(examination: Examination) -> Outcome:
    """Head and resumed tail together are the whole epoch, bit for bit, at every cut, on each rank, with workers."""
    examination.need_promise()
    compared = False
    for each in examination.resumes():
        if each.inside:
            examination.same_rest(each)
            compared = True
    if not compared:
        return Outcome("not applicable", "an epoch has no more than one batch, so nothing can be cut; make it longer")
    return combined({"cuts": HOLDS, "workers": _with_workers(examination, Examination.same_rest)})


def _with_workers(examination: Examination, compare: Callable[[Examination, Resume, bool], None]) -> Outcome:
    """Compare each resume with as many workers as the uninterrupted run had, if such runs agree with each other.

    If they do not, the law 'delivery' still checks that the samples are the right ones.
    """
    workers = examination.most_workers
    if not workers:
        return HOLDS  # the laws 'delivery' and 'topology' say why
    by_ids = examination.capability("exact_augmentations", num_workers=workers)[0] is False
    try:
        for each in examination.resumes_with_workers():
            compare(examination, each, by_ids)
    except LawError:
        if examination.repeats_with_workers():
            raise
        return Outcome("not applicable", f"two uninterrupted runs with num_workers={workers} differ")
    return HOLDS


@law(
    "next epoch", "exact_order", "exact_augmentations",
    cause="the epoch is not part of the state, or the end of a resumed epoch does not count as an end",
    cure="move the state to (epoch + 1, 0) with the last batch, also in a resumed epoch",
)
def next_epoch(examination: Examination) -> Outcome:
    """After a resumed epoch, the next epoch is the one that would have followed, on every rank and with workers."""
    examination.need_promise()
    for each in examination.resumes():
        if each.inside:  # the boundary law checks where a pass from another state begins
            _same_next(examination, each)
    return combined({"resumes": HOLDS, "workers": _with_workers(examination, _same_next)})


def _same_next(examination: Examination, resume: Resume, by_ids: bool = False) -> None:
    """Compare the second pass of a resume, if it has one, with the epoch that followed in the uninterrupted run."""
    epoch, cut = resume.epoch, resume.cut
    after = f"{cut} batches{resume.where}"
    examination.sound(resume.recording, f"a resume after {after}", epoch, cut)
    what = f"resumed in epoch {epoch} after {after}, in the next epoch"
    for got in resume.recording.passes[1:]:
        examination.same(resume.head.passes[epoch + 1].batches, got.batches, what, epoch + 1, by_ids=by_ids)


@law(
    "boundary", "exact_order",
    cause="'finished' is saved as a full position of the old epoch, or the first state lacks what later ones have",
    cure="let the last batch move the state to (epoch + 1, 0), and give every state the same keys",
)
def boundary(examination: Examination) -> Outcome:
    """The state after the last batch starts the next epoch, or ends a body; that before the first equals fresh."""
    examination.need_promise()
    head = examination.observed()
    keys = sorted(head.passes[0].states[0])
    for epoch, part in enumerate(head.passes):
        for number, state in enumerate(part.states):
            if sorted(state) != keys:
                raise examination.error(f"the keys of the first state: {keys}", f"{sorted(state)}", epoch, number)
    for each in examination.resumes():
        if each.inside:
            continue
        ended = each.cut > 0
        passes = examination.sound(each.recording, f"a resume{each.where}", each.epoch, each.cut).passes
        when = "after the last batch" if ended else "before the first batch"
        what = f"from the state {when} of epoch {each.epoch}{each.where}"
        expected = each.head.passes[each.epoch + ended].batches
        apart = ended and bool(each.where) and examination.ranks_end_apart and not passes[0].batches
        examination.same(expected, passes[apart].batches, what, each.epoch + ended)
    examination.investigate(_start_quietly)
    behind = examination.investigate(_behind_the_last_batch)
    if behind is not None:
        resumed: Pass = examination.investigate(see_rest, behind, process=1)
        what = "from the state after the last batch, in the body of epochs()"
        examination.same(head.passes[1].batches, resumed.batches, what, 1)
        left, following = examination.investigate(_resume_in_the_body, behind)
        if left:
            raise examination.error("an empty pass in the body of the epoch that is over", f"{left} batches", 0)
        examination.same(head.passes[1].batches, following, f"{what}, once that body has ended", 1)
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


def _start_quietly(settings: Settings, options: Mapping[str, Any]) -> None:
    with open_loader(settings, options) as loader:
        before = items.digest(loader.state_dict())
        iterator = iter(loader)
        after = items.digest(loader.state_dict())
        del iterator
    if before != after:
        blame = ("the pass begins in __iter__", "begin it at the first next()")
        raise violation("the same state before and after iter()", "another state", 0, 0, *blame)


_ANY_ITEMS: tuple[Any, ...] = (
    None, (), [], {}, "", b"", 0, False, math.nan, None, torch.empty(0), torch.empty(0, 3), np.empty((0, 2)), (None,),
)  # fmt: skip
"""What a source is asked to deliver, one a batch."""


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
    options = examination.options(items=list(_ANY_ITEMS))
    trial = Trial(settings, options, passes=2, states=True, limit=2 * len(_ANY_ITEMS))
    head = examination.sound(examination.record([trial])[0], "a source of odd items")
    expected = count(map(_whole_item, _ANY_ITEMS))
    for epoch, part in enumerate(head.passes):
        got = count(part.ids)
        if got != expected:
            lost = ", ".join(repr(item) for item in _ANY_ITEMS if _whole_item(item)[0] in expected - got)
            told, number = f"; lost: {lost}" if lost else "", len(part.batches)
            raise examination.error(f"{len(_ANY_ITEMS)} items, each once", f"{number} items{told}", epoch, number)
    trials = [Trial(settings, options, state=state, limit=2 * len(_ANY_ITEMS)) for state in head.passes[0].states[:-1]]
    for cut, recording in enumerate(examination.resume(trials)):
        examination.same_rest(Resume(head, recording, 0, cut, True))
    return HOLDS


def _whole_item(item: Any) -> list[Hashable]:
    """An item's identity. Tuples become lists and arrays become tensors, as in torch's own conversion."""
    return [items.digest(_converted(item))]


def _converted(item: Any) -> Any:
    if isinstance(item, np.ndarray):
        return torch.from_numpy(item)
    return [_converted(part) for part in item] if isinstance(item, (tuple, list)) else item
