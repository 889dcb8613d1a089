"""The laws about several ranks: they share an epoch, and another world can share the rest of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from .examine import Examination, Place
from .record import Failure, Pass, Recording, Settings, length_of, open_loader
from .report import HOLDS, Outcome, combined, law, names_all

__all__ = [
    "UNNAMED_VALUES", "check_content", "check_cover", "contents_of", "count", "largest_batch", "no_world", "partition",
    "some", "starts_next_epoch", "topology",
]  # fmt: skip

UNNAMED_VALUES = (
    "the message does not give the saved and the current value",
    "put the saved value beside the current one in the message",
)
"""Cause and cure where a refusal says too little."""

_STATE_ERROR = "midepoch.errors.StateError"
_CAPABILITY = {"world_size": "elastic_world", "num_workers": "elastic_workers", "batch_size": "elastic_world"}


@law(
    "partition",
    cause="every rank reads everything, or the tail is dropped, repeated or handed to one rank",
    cure="let rank r of n take its own part of each global batch, and state the tail rule (tail=, drop_last=)",
)
def partition(examination: Examination) -> Outcome:
    """The ranks together cover each epoch by the declared tail rule, in equal counts."""
    _check_lengths(examination, 1)
    if len(examination.worlds) == 1:
        return Outcome("not applicable", no_world(examination))
    alone = examination.heads()
    for world_size in examination.worlds[1:]:
        for epoch in range(examination.settings.epochs + 1):
            parts = [recording.passes[epoch] for recording in examination.heads(world_size)]
            _check_counts(examination, parts, epoch)
            expected = count(alone[0].passes[epoch].ids)
            got = count(ids for part in parts for ids in part.ids)
            who = f"{world_size} ranks together"
            check_cover(examination, expected, got, world_size, largest_batch(alone), epoch, None, who)
        _check_lengths(examination, world_size)
    return HOLDS


def no_world(examination: Examination) -> str:
    """Why there is no world of several ranks to examine."""
    if not (examination.takes("rank") and examination.takes("world_size")):
        return "the factory takes no rank and world_size"
    return f"world_sizes={examination.settings.world_sizes} names no world of more than one rank"


def count(batches: Iterable[Sequence[Hashable]]) -> Counter[Hashable]:
    """How often each sample is in these batches."""
    return Counter(sample for ids in batches for sample in ids)


def largest_batch(heads: Iterable[Recording]) -> int:
    """The largest number of samples in a batch."""
    return max(len(ids) for head in heads for ids in head.passes[0].ids)


def _unit(examination: Examination) -> int:
    """The largest number of samples in the smallest thing that a rank can be given: 1, or those of a whole batch."""
    part = examination.observed().passes[0]
    whole_batches = part.states[0].get("size") == len(part.ids) != sum(map(len, part.ids))
    return max(map(len, part.ids)) if whole_batches else 1


def _check_counts(examination: Examination, parts: Sequence[Pass], epoch: int) -> None:
    allowed = 1 if examination.settings.tail == "uneven" else 0
    found = {"batches": [len(part.batches) for part in parts]}
    if _unit(examination) == 1:  # else whole batches are shared, whatever their size
        found["samples"] = [sum(map(len, part.ids)) for part in parts]
    for name, counts in found.items():
        if max(counts) - min(counts) > allowed:
            raise examination.error(
                f"as many {name} on each rank" + (" (one more or less)" if allowed else ""),
                ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts)), epoch,
                cause="the last incomplete global batch is not shared out; collective calls would wait forever",
                cure="pad or drop the tail, or set tail='uneven' if the training loop allows it",
            )  # fmt: skip


def check_cover(
    examination: Examination, expected: Counter[Hashable], got: Counter[Hashable], world_size: int, batch: int,
    epoch: int, cut: int | None, who: str,
) -> None:  # fmt: skip
    """Raise unless ``got`` is ``expected``, except for what the tail rule allows a world of this size.

    ``batch`` is the largest number of samples in a batch, which determines what ``drop_last`` leaves over.
    """
    examination.need_names()
    settings = examination.settings
    unit = _unit(examination)
    left_over = batch if unit == 1 else unit
    at_the_tail = (world_size - 1) * unit * settings.parts
    may_repeat, may_lose = (at_the_tail if settings.tail == rule else 0 for rule in ("pad", "drop"))
    if settings.drop_last:
        # The size of the global batch determines which samples are left over.
        may_lose += world_size * left_over - 1
        may_repeat += left_over - 1
    lost, repeated = expected - got, got - expected
    rule = f"tail='{settings.tail}', drop_last={settings.drop_last}"
    for name, found, allowed in (("lost", lost, may_lose), ("repeated", repeated, may_repeat)):
        if found.total() > allowed:
            wanted = f"{who}: at most {allowed} samples {name} ({rule})"
            raise examination.error(wanted, f"{found.total()} {name}: {some(found)}", epoch, cut)


def some(names: Iterable[Any]) -> str:
    """The first ten of these, as often as they are there."""
    listed = [str(each) for each in (names.elements() if isinstance(names, Counter) else names)]
    return ", ".join(listed[:10]) + (", ..." if len(listed) > 10 else "")


def _check_lengths(examination: Examination, world_size: int) -> None:
    for rank, recording in enumerate(examination.heads(world_size)):
        options = examination.options(rank, world_size)
        length = examination.investigate(_measured, options=options, process=rank)
        if length is None:
            return
        for epoch, part in enumerate(recording.passes):
            if len(part.batches) != length:
                raise examination.error(
                    f"len() batches on rank {rank} of {world_size}: {length}", f"{len(part.batches)} batches", epoch,
                    cause="len() does not follow the tail rule",
                    cure="compute it from the size, the batch size and the world size",
                )  # fmt: skip


def _measured(settings: Settings, options: Mapping[str, Any]) -> int | None:
    with open_loader(settings, options) as loader:
        return length_of(loader)


@law(
    "topology", "elastic_world", "elastic_workers", "rank_independent",
    cause="the position counts one rank's or one worker's share, so it means something else in another world",
    cure="count the samples of all ranks together, or refuse with an error that names the saved and current values",
)
def topology(examination: Examination) -> Outcome:
    """With another world size, number of workers or batch size, the rest comes exactly once, or is refused."""
    outcomes = {
        "world": _other_world(examination),
        "workers": _other_option(examination, "num_workers"),
        "batch size": _other_option(examination, "batch_size"),
    }
    if HOLDS in outcomes.values() and (law := _also_unchanged(examination)):
        told = f"not compared, because the law '{law}' is broken"
        outcomes["content and next epoch"] = Outcome("not applicable", told)
    return combined(outcomes)


def _also_unchanged(examination: Examination) -> str:
    """A law that is broken even without a change, or ''. If there is one, contents and later epochs prove nothing."""
    return next((law for law in ("determinism", "tail", "next epoch", "partition") if law in examination.broken), "")


def _other_world(examination: Examination) -> Outcome:
    worlds = examination.worlds
    if len(worlds) == 1:
        return Outcome("not applicable", no_world(examination))
    if examination.capability("rank_independent")[0]:
        for world_size in worlds[1:]:
            _check_equal_states(examination, world_size)
    if examination.gathers():
        _check_single(examination, worlds[-1])
    outcomes = _each_change(examination, "world_size", worlds)
    if HOLDS in outcomes:
        for world_size in worlds[1:]:
            parts = [head.passes[0] for head in examination.heads(world_size)]
            check_content(examination, parts, 0, f"on {world_size} ranks")
    return _agreement(outcomes)


def _each_change(examination: Examination, option: str, values: Sequence[int]) -> list[Outcome]:
    """The outcomes of every change from one value to another; num_workers and batch_size in a world of one."""
    of_ranks, outcomes = option == "world_size", []
    for old in values:
        heads = examination.heads(old) if of_ranks else [examination.head_with(option, old)]
        if option == "num_workers":
            check_content(examination, [heads[0].passes[0]], 0, f"with num_workers={old}")
        places = examination.places(heads[0])
        followed = examination.followed(places)
        for new in values if places else ():
            if new == old:
                continue
            if of_ranks:
                resumed = examination.resume_world(heads, places, new, followed)
            else:
                resumed = [examination.resume_from(heads[0], places, followed, **{option: new})]
            outcomes.append(_judge_change(examination, heads, places, resumed, option, (old, new)))
    return outcomes


def _agreement(outcomes: Sequence[Outcome]) -> Outcome:
    if not outcomes:
        return Outcome("not applicable", "an epoch has no more than one batch, so nothing can be cut; make it longer")
    by_status = {outcome.status: outcome for outcome in reversed(outcomes)}
    return by_status.get("refused clearly") or by_status.get("holds") or outcomes[0]


def _check_equal_states(examination: Examination, world_size: int) -> None:
    first, *others = examination.heads(world_size)
    for rank, other in enumerate(others, start=1):
        for epoch, (one, two) in enumerate(zip(first.passes, other.passes, strict=True)):
            for cut, (state, same) in enumerate(zip(one.states, two.states, strict=False)):
                examination.same_state(state, same, f"the same state on ranks 0 and {rank}", epoch, cut)


def _check_single(examination: Examination, world_size: int) -> None:
    """If each rank knows only its part, another rank must refuse it, unless it leads to that rank's own batches."""
    trial = examination.trial(examination.options(0, world_size), states=True)
    state = examination.sound(examination.record([trial])[0], f"a run on rank 0 of {world_size}").passes[0].states[1]
    loaded = examination.record([examination.trial(examination.options(1, world_size), state=state)], process=1)[0]
    change = f"the state of rank 0 alone, loaded on rank 1 of {world_size}"
    whole = examination.heads(world_size)[1].passes[0]
    if loaded.failure is None and loaded.passes[0].ids == whole.ids[1:]:
        return
    _check_refused(examination, loaded.failure, change, (0,), 0, 1)


def _judge_change(
    examination: Examination, heads: Sequence[Recording], places: Sequence[Place],
    resumed: Sequence[Sequence[Recording]], option: str, values: tuple[int, ...],
) -> Outcome:  # fmt: skip
    """Whether the resumes on all new ranks hold or are refused, as the capability declares."""
    declared, reason = examination.capability(_CAPABILITY[option])
    failures = [recording.failure for recordings in resumed for recording in recordings]
    change = f"{option} {values[0]} -> {values[1]}"
    if declared is False or (declared is None and all(failures)):
        for (epoch, cut), failure in zip(list(places) * len(resumed), failures, strict=True):
            _check_refused(examination, failure, change, values, epoch, cut)
        return Outcome("refused clearly", reason)
    world_size = len(resumed)
    batch = max(largest_batch([*heads, examination.observed()]), values[-1] if option == "batch_size" else 0)
    compared, whole = False, examination.observed().passes
    for number, (epoch, cut) in enumerate(places):
        told = f"a resume with {change}"
        parts = [examination.sound(recordings[number], told, epoch, cut).passes for recordings in resumed]
        consumed = count(ids for head in heads for ids in head.passes[epoch].ids[:cut])
        rest = count(whole[epoch].ids) - consumed
        if starts_next_epoch(examination, rest, world_size, batch):
            continue
        who = f"the rest of the epoch with {change}"
        got = count(ids for part in parts for ids in part[0].ids)
        check_cover(examination, rest, got, world_size, batch, epoch, cut, who)
        compared = True
        if _also_unchanged(examination):
            continue
        check_content(examination, [part[0] for part in parts], epoch, f"in {who}")
        if following := [part[1] for part in parts if len(part) > 1]:
            who = f"the epoch after a resume with {change}"
            _check_counts(examination, following, epoch + 1)
            got = count(ids for part in following for ids in part.ids)
            check_cover(examination, count(whole[epoch + 1].ids), got, world_size, batch, epoch + 1, None, who)
            check_content(examination, following, epoch + 1, f"in {who}")
    return HOLDS if compared else Outcome("not applicable", f"too little is left after each cut for {change}")


def starts_next_epoch(examination: Examination, rest: Counter[Hashable], world_size: int, batch: int) -> bool:
    """Whether so little may be left that a loader which drops its tail must start the next epoch."""
    settings = examination.settings
    if settings.drop_last:
        return rest.total() < world_size * batch
    return settings.tail == "drop" and rest.total() < world_size * _unit(examination)


def _check_refused(
    examination: Examination, failure: Failure | None, change: str, values: tuple[int, ...], epoch: int, cut: int
) -> None:
    asked = f"a StateError naming the saved and the current value: {change}"
    if failure is None:
        raise examination.error(
            asked, "the state was loaded", epoch, cut,
            "load_state_dict does not check what the loader declares it cannot do",
            "compare the saved value with the current one in load_state_dict",
        )  # fmt: skip
    if _STATE_ERROR not in failure.kinds or failure.during != "loading a state":
        raise examination.error(asked, failure.whole, epoch, cut)
    if not names_all(failure.message, values):
        raise examination.error(asked, str(failure), epoch, cut, *UNNAMED_VALUES)


def _other_option(examination: Examination, option: str) -> Outcome:
    if not examination.takes(option):
        return Outcome("not applicable", f"the factory takes no {option}")
    default = examination.default(option) or 0
    values = [default, default + 1, 2 * default + 1] if default > 0 else []
    if option == "num_workers":
        values = sorted(set(examination.settings.num_workers))
    if len(values) < 2:
        return Outcome("not applicable", f"only one {option} is known: {values}; give another or a default")
    return _agreement(_each_change(examination, option, values))


def check_content(examination: Examination, parts: Sequence[Pass], epoch: int, where: str) -> None:
    """A sample's content in an epoch must not depend on the topology."""
    if not examination.settings.elastic_content or examination.capability("exact_augmentations")[0] is False:
        return
    alone = contents_of([examination.observed().passes[epoch]])
    for sample, contents in contents_of(parts).items():
        if sample in alone and len(alone[sample]) == 1 and not contents <= alone[sample]:
            raise examination.error(
                f"sample {sample} with the content it has in a world of one", f"another content {where}", epoch,
                cause="random streams are keyed by rank or worker, or randomness belongs to whole batches",
                cure="key them by (seed, epoch, position); set elastic_content=False for mixup and the like",
            )  # fmt: skip


def contents_of(parts: Iterable[Pass]) -> dict[Hashable, set[str]]:
    """Each sample's digests. Empty if batches cannot be split."""
    found: dict[Hashable, set[str]] = {}
    for part in parts:
        for seen in part.batches:
            for sample, content in zip(seen.ids, seen.samples or (), strict=False):
                found.setdefault(sample, set()).add(content)
    return found
