"""What a job tries once, on one sample, unit or state, is tried here at length: for `midepoch check`.

A trial that disproves a promise says what it rests on: this sample, this list, this state. A law that is broken for the
same reason only says that batches differ. So trials come before the laws.

Each trial ends when its share of the time is used up. It keeps checksums, never samples: at most some 20 MB.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset

from ..attributes import directly_held
from ..loader.lending import loader_of
from ..loader.part import Part
from ..reading.replay import ReplayReader
from ..state.witness import SampleSummary
from . import items
from .examine import Examination
from .record import Finding, Recording, Seen, Settings, open_loader, see
from .report import InapplicableError, LawError, Outcome, Verdict, combined, reach

__all__ = ["TRIALS", "TriedPromise", "try_promises"]

_MOST_SAMPLES = 4096
_MOST_STATES = 512
_MOST_BATCHES = 10_000
_WITH_WORKERS = 8  # states, since each starts processes
_CHUNK = 16  # states that are tried between two looks at the clock
_FIRST_EPOCHS = 8  # whose first samples are looked at
_LISTED_EPOCHS = 5
_BETWEEN = ", between processes"


@dataclass(frozen=True)
class TriedPromise:
    """A trial of what a loader promises.

    Attributes:
        name: in reports.
        sentence: what is tried.
        of: the capabilities that rest on it.
        examine: takes an `Examination` and seconds; returns an `Outcome` whose reason says how much was tried, or
            raises a `LawError`.
        cause, cure: as those of a law.
    """

    name: str
    sentence: str
    of: tuple[str, ...]
    examine: Callable[[Examination, float], Outcome]
    cause: str
    cure: str


def try_promises(examination: Examination, seconds: float) -> Iterator[Verdict]:
    """Yield the verdict of each trial of `TRIALS`, as they are reached.

    Args:
        examination: of the loader.
        seconds: for all trials together. Each may use what the ones before have left of their shares. A single read of
            the source is never interrupted.
    """
    left = seconds
    for number, trial in enumerate(TRIALS):
        examination.begin("honesty", trial.cause, trial.cure)
        share = min(left / (len(TRIALS) - number), examination.settings.timeout / 2)
        verdict = reach(trial.name, partial(trial.examine, examination, share))
        left = max(left - verdict.seconds, 0.0)
        yield verdict


TRIALS: list[TriedPromise] = []
"""All trials, in the order in which they are made: the most telling first."""


def _trial(name: str, *of: str, cause: str, cure: str) -> Callable[[Callable[[Examination, float], Outcome]], None]:
    def define(function: Callable[[Examination, float], Outcome]) -> None:
        TRIALS.append(TriedPromise(name, (function.__doc__ or "").strip(), of, function, cause, cure))

    return define


def _promised(examination: Examination, *names: str) -> None:
    """Go on if one of these capabilities is promised, or none declared. Otherwise there is nothing to disprove."""
    declared = [(name, *examination.capability(name)) for name in names]
    if all(holds is False for _, holds, _ in declared):
        raise InapplicableError(f"{declared[0][0]} is declared no: {declared[0][2]}", "not promised")


# --- lists ------------------------------------------------------------------------------------------------------------


@_trial(
    "lists", "exact_order",
    cause="the sampler's order depends on the process, on earlier passes, or on a generator that midepoch cannot seed",
    cure="derive it from the epoch (set_epoch) or from torch's, numpy's or python's generators, and sort what comes "
    "from sets",
)  # fmt: skip
def _lists(examination: Examination, seconds: float) -> Outcome:
    """A sampler's lists of several epochs, from five samplers made anew in two processes, in other orders of epochs."""
    _promised(examination, "exact_order")
    lists: list[dict[int, tuple[str, str]]] = []
    deadline = time.monotonic() + seconds
    for process, epochs in ((0, 1), (1, -1), (0, -1), (1, 1), (0, 1)):
        asked = list(range(_LISTED_EPOCHS))[::epochs]
        lists.append(examination.investigate(_list, examination.options(), asked, process > 0, process=process))
        if not lists[0]:
            return Outcome("not applicable", "no sampler lists its order")
        if time.monotonic() > deadline:
            break
    for other in lists[1:]:
        for epoch, (crc, first) in lists[0].items():
            if other[epoch][0] != crc:
                raise examination.error(
                    f"the same list of epoch {epoch} from each sampler: {first}", other[epoch][1], epoch=epoch
                )
    return Outcome("holds", f"{len(lists[0])} epochs, each listed {len(lists)} times in {min(len(lists), 2)} processes")


def _list(settings: Settings, options: Mapping[str, Any], epochs: list[int], later: bool) -> dict[int, tuple[str, str]]:
    """Epoch -> the CRC of its list, and how it begins."""
    found = {}
    with open_loader(settings, options, later=later) as loader:
        wrapped = loader_of(loader)
        for epoch in epochs if wrapped is not None else ():
            samples = Part("", wrapped).samples(epoch) if wrapped is not None else None
            if samples is not None and samples.listed:
                first = [samples.indices(unit) for unit in range(min(samples.units, 6))]
                found[epoch] = samples.listed, f"it begins with {', '.join(map(str, itertools.chain(*first)))!s:.200}"
    return found


# --- samples ----------------------------------------------------------------------------------------------------------


class _Where(NamedTuple):
    """A sample's place: the unit's number in its epoch, and the sample's in the unit."""

    epoch: int
    unit: int
    place: int


class _Looked(NamedTuple):
    """What was seen of samples in one process.

    Attributes:
        looks: by place.
        indices: of these samples, as text.
        reads: how often samples were read.
        finding: a place, and what differed between two reads.
    """

    looks: dict[_Where, SampleSummary]
    indices: dict[_Where, str]
    reads: int
    finding: tuple[_Where, str] | None


@_trial(
    "samples", "exact_order", "exact_augmentations",
    cause="the item depends on more than its index: on what was read before it, on the process, or on random numbers "
    "that midepoch cannot seed",
    cure="make each sample a function of its index and of python's, numpy's or torch's generators, or of "
    "midepoch.sample_generator()",
)  # fmt: skip
def _samples(examination: Examination, seconds: float) -> Outcome:
    """Every sample is read alone, several times: in order, in reverse, shuffled among two epochs, in two processes."""
    _promised(examination, "exact_order", "exact_augmentations")
    only_most = examination.capability("exact_augmentations")[0] is False
    here: _Looked | None = examination.investigate(_look_here, examination.options(), 0.6 * seconds, only_most)
    if here is None:
        return Outcome("not applicable", "its samples cannot be read one by one")
    if here.finding is None:
        there: _Looked = examination.investigate(
            _look_there, examination.options(), 0.4 * seconds, only_most, list(here.looks), process=1
        )
        here = _merged(here, there, only_most)
    if here.finding is not None:
        where, differs = here.finding
        between = differs.endswith(_BETWEEN)
        raise examination.error(
            f"the sample at position {where.unit} (index {here.indices.get(where, '?')}), the same at each read under "
            "its stream",
            f"two reads of sample {here.indices.get(where, '?')} differ in {differs}",
            epoch=where.epoch,
            cause="what depends on the process: the order of a set, hash() of a text, the host" if between else None,
            cure="sort what comes from sets and folders, and derive nothing from the process" if between else None,
        )
    epochs = len({where.epoch for where in here.looks})
    return Outcome("holds", f"{len(here.looks)} samples of {epochs} epochs, {here.reads} reads in 2 processes")


def _look_here(settings: Settings, options: Mapping[str, Any], seconds: float, only_most: bool) -> _Looked | None:
    return _look(settings, options, seconds, only_most, None)


def _look_there(
    settings: Settings, options: Mapping[str, Any], seconds: float, only_most: bool, wanted: list[_Where]
) -> _Looked | None:
    return _look(settings, options, seconds, only_most, wanted)


def _look(
    settings: Settings, options: Mapping[str, Any], seconds: float, only_most: bool, wanted: list[_Where] | None
) -> _Looked | None:
    """Look at samples: at those `wanted`, as a process that resumes; or choose them, and read them in three orders."""
    deadline = time.monotonic() + seconds
    looks: dict[_Where, SampleSummary] = {}
    indices: dict[_Where, str] = {}
    reads = 0
    with open_loader(settings, options, later=wanted is not None) as loader:
        wrapped = loader_of(loader)
        part = None if wrapped is None else Part("", wrapped)
        epochs = {} if part is None else {epoch: part.samples(epoch) for epoch in range(_FIRST_EPOCHS)}
        if part is None or epochs[0] is None:
            return None
        chosen = wanted
        if chosen is None:
            chosen = [
                _Where(epoch, unit, place)
                for epoch, samples in epochs.items() if samples is not None and samples.units
                for unit in (_spread(samples.units, _MOST_SAMPLES // 2) if epoch < 2 else [0])
                for place in range(len(samples.indices(unit)))
            ][: 2 * _MOST_SAMPLES]  # fmt: skip
        shuffled = random.Random(0).sample(chosen, len(chosen))
        orders = [shuffled] if wanted is not None else [chosen, chosen[::-1], shuffled]
        for where in itertools.chain(*orders):
            samples = epochs[where.epoch]
            look = None if samples is None else samples.look(where.unit, where.place)
            if look is None or samples is None:
                continue  # a sample that cannot be read fails an uninterrupted run
            reads += 1
            indices[where] = f"{samples.indices(where.unit)[where.place]!r:.80}"
            before = looks.setdefault(where, look)
            if differs := _differs(before, look, only_most):
                return _Looked(looks, indices, reads, (where, differs))
            if time.monotonic() > deadline:
                break
    return _Looked(looks, indices, reads, None)


def _merged(here: _Looked, there: _Looked, only_most: bool) -> _Looked:
    finding = there.finding
    for where, look in there.looks.items():
        differs = _differs(here.looks[where], look, only_most) if where in here.looks else ""
        if differs and finding is None:
            finding = where, f"{differs}{_BETWEEN}"
    return _Looked(here.looks, here.indices, here.reads + there.reads, finding)


def _differs(one: SampleSummary, other: SampleSummary, only_most: bool) -> str:
    """The parts that differ; empty if none do, or with `only_most` if it is the same sample all the same."""
    differing = one.differing(other)
    return one.names(differing) if differing and (not only_most or one.holds_most(differing)) else ""


def _spread(count: int, most: int) -> range:
    """At most so many numbers below `count`, evenly spaced."""
    return range(0, count, -(-count // most))


# --- passes -----------------------------------------------------------------------------------------------------------


@_trial(
    "passes", "exact_order", "exact_augmentations",
    cause="the source keeps something from one pass to the next: a counter, a generator, a cache, an order",
    cure="let order and content follow from the epoch or the random generators alone, and begin each pass anew",
)  # fmt: skip
def _passes(examination: Examination, seconds: float) -> Outcome:
    """The second and third pass over one object, under the same streams, are the first one, over their whole length."""
    _promised(examination, "exact_order", "exact_augmentations")
    by_ids = examination.compares_by_ids()
    findings, passes, batches, refused = examination.investigate(
        _repeat, examination.options(), min(examination.settings.epochs, 2), seconds, by_ids
    )
    examination.raise_first(findings)
    if refused:
        return Outcome("refused clearly", refused)
    return Outcome("holds", f"{passes} later passes, {batches} batches")


def _repeat(
    settings: Settings, options: Mapping[str, Any], epochs: int, seconds: float, by_ids: bool
) -> tuple[list[Finding], int, int, str]:
    """Findings, passes and batches that were compared, and why the loader does not go back."""
    deadline = time.monotonic() + seconds
    passes = batches = 0
    with open_loader(settings, options) as loader:
        starts, firsts = [], []
        for _ in range(epochs):
            starts.append(copy.deepcopy(loader.state_dict()))
            firsts.append([see(settings, batch) for batch in itertools.islice(loader, _MOST_BATCHES)])
        for number in (2, 3):
            for epoch in range(epochs):
                try:
                    loader.load_state_dict(copy.deepcopy(starts[epoch]))
                except Exception as error:  # noqa: BLE001  # the law 'round trip' judges it
                    return [], passes, batches, f"{type(error).__name__}: {error}"
                passes += 1
                count = 0
                what = f"in pass {number} over epoch {epoch}, batch"
                for batch in _told(loader, _MOST_BATCHES):
                    if isinstance(batch, Exception):
                        return [], passes, batches, f"{type(batch).__name__}: {batch}"
                    first = firsts[epoch][count] if count < len(firsts[epoch]) else None
                    if finding := _compared(first, see(settings, batch), by_ids, what, epoch, count):
                        return [finding], passes, batches, ""
                    count, batches = count + 1, batches + 1
                    if time.monotonic() > deadline:
                        return [], passes, batches, ""
                if count < len(firsts[epoch]):
                    got = f"{count} batches"
                    wanted = f"in pass {number} over epoch {epoch}, {len(firsts[epoch])} batches"
                    return [Finding(wanted, got, epoch, count)], passes, batches, ""
    return [], passes, batches, ""


def _told(loader: Any, most: int) -> Iterator[Any]:
    """The batches of a pass over a loader that was used before. An error is given as the last one: it is no silence."""
    try:
        yield from itertools.islice(loader, most)
    except Exception as error:  # noqa: BLE001  # of the source
        yield error


def _compared(first: Seen | None, again: Seen, by_ids: bool, what: str, epoch: int, count: int) -> Finding | None:
    if first is None:
        return Finding(f"{what} {count}: the pass has ended", f"samples {again.ids}", epoch, count)
    if (first.ids == again.ids) if by_ids else (first.digest == again.digest):
        return None
    texts = (f"samples {first.ids}", f"samples {again.ids}")
    texts = texts if by_ids else items.first_difference(first.leaves, again.leaves)
    return Finding(f"{what} {count} as in the first pass: {texts[0]}", texts[1], epoch, count)


# --- states -----------------------------------------------------------------------------------------------------------


@_trial(
    "states", "exact_order", "exact_augmentations",
    cause="the state does not cover all that the source needs to go on: what a buffer holds, what was read ahead, a "
    "generator, a counter",
    cure="let the state cover it; or wrap a function that makes the source, as in midepoch.wrap(lambda: make()), to "
    "have it read again from its start",
)  # fmt: skip
def _states(examination: Examination, seconds: float) -> Outcome:
    """Each state of two epochs, loaded by a new loader in another process, gives the batch that comes next.

    One loader is also moved between states at random, and a few states are tried with workers.
    """
    examination.need_exact()
    deadline = time.monotonic() + seconds
    head = examination.observed()
    epochs = min(examination.settings.epochs, 2)
    every = [(epoch, cut) for epoch in range(epochs) for cut in range(len(head.passes[epoch].states))]
    places = [every[number] for number in _spread(len(every), _MOST_STATES)]
    random.Random(0).shuffle(places)
    tried = 0
    for start in range(0, len(places), _CHUNK):
        tried += _resume_at(examination, head, places[start : start + _CHUNK], {})
        if time.monotonic() > deadline:
            break
    outcome = Outcome("holds", f"{tried} of {len(every)} states, each in a loader made anew")
    jumps = _jumps(examination, places, max(deadline - time.monotonic(), 0.0))
    outcomes = {"anew": outcome, "one loader": jumps}
    workers = examination.most_workers
    if workers and time.monotonic() < deadline:
        outcomes["with workers"] = _workers(examination, places[:_WITH_WORKERS], workers)
    return combined(outcomes)


def _following(head: Recording, place: tuple[int, int]) -> Sequence[Seen]:
    """The batch that follows a place in an uninterrupted run, in a list; empty at its end."""
    epoch, cut = place
    batches = head.passes[epoch].batches
    if cut >= len(batches):
        batches, cut = head.passes[epoch + 1].batches, 0
    return batches[cut : cut + 1]


def _resume_at(
    examination: Examination, head: Recording, places: Sequence[tuple[int, int]], options: Mapping[str, int]
) -> int:
    trials = [
        examination.trial(examination.options(**options), state=head.passes[epoch].states[cut], limit=1)
        for epoch, cut in places
    ]
    by_ids = examination.capability("exact_augmentations", **options)[0] is False
    for place, recording in zip(places, examination.resume(trials), strict=True):
        epoch, cut = place
        examination.sound(recording, f"the batch after the state of batch {cut}", epoch=epoch, batch=cut)
        expected, got = _following(head, place), recording.passes[0].batches
        what = f"the state after {cut} batches of epoch {epoch} leads a loader made anew to the batch that follows"
        examination.same(expected, got, what, epoch=epoch, first=cut, by_ids=by_ids)
    return len(trials)


def _workers(examination: Examination, places: Sequence[tuple[int, int]], workers: int) -> Outcome:
    try:
        head = examination.head_with("num_workers", workers)
        known = [(epoch, cut) for epoch, cut in places if cut < len(head.passes[epoch].states)]
        tried = _resume_at(examination, head, known, {"num_workers": workers})
    except LawError:
        if examination.repeats_with_workers():
            raise
        return Outcome("not applicable", f"two uninterrupted runs with num_workers={workers} differ")
    return Outcome("holds", f"{tried} states with num_workers={workers}")


def _jumps(examination: Examination, places: Sequence[tuple[int, int]], seconds: float) -> Outcome:
    head = examination.observed()
    states = [head.passes[epoch].states[cut] for epoch, cut in places]
    expected = [_following(head, place) for place in places]
    by_ids = examination.capability("exact_augmentations")[0] is False
    arguments = (examination.options(), states, expected, seconds, by_ids)
    findings, jumps, refused = examination.investigate(_jump, *arguments, process=1)
    for number, finding in findings:
        epoch, cut = places[number]
        raise examination.error(
            f"{finding.expected} (the state after {cut} batches of epoch {epoch})", finding.got, epoch=epoch, batch=cut
        )
    return Outcome("refused clearly", refused) if refused else Outcome("holds", f"{jumps} jumps of one loader")


def _jump(
    settings: Settings, options: Mapping[str, Any], states: Sequence[dict[str, Any]],
    expected: Sequence[Sequence[Seen]], seconds: float, by_ids: bool,
) -> tuple[list[tuple[int, Finding]], int, str]:  # fmt: skip
    """(Number of a state, finding), jumps that were made, and why the loader does not jump."""
    deadline = time.monotonic() + seconds
    with open_loader(settings, options, later=True) as loader:
        for number, (state, following) in enumerate(zip(states, expected, strict=True)):
            try:
                loader.load_state_dict(copy.deepcopy(state))
            except Exception as error:  # noqa: BLE001  # the law 'round trip' judges it
                return [], number, f"{type(error).__name__}: {error}"
            for batch in _told(loader, 1):
                if isinstance(batch, Exception):
                    return [], number, f"{type(batch).__name__}: {batch}"
                first = following[0] if following else None
                what = "a loader that was led from place to place gives the batch"
                if finding := _compared(first, see(settings, batch), by_ids, what, 0, 0):
                    return [(number, finding)], number, ""
            if time.monotonic() > deadline:
                return [], number + 1, ""
    return [], len(states), ""


# --- threads ----------------------------------------------------------------------------------------------------------


@_trial(
    "threads", "exact_augmentations",
    cause="a thread of the source's own draws from the generators of whatever sample is being read",
    cure="read ahead in worker processes (num_workers), or draw from midepoch.sample_generator() in the thread that "
    "iterates",
)  # fmt: skip
def _threads(examination: Examination, seconds: float) -> Outcome:
    """After each batch of two epochs, no thread of the source's goes on reading, if any random numbers are drawn."""
    _promised(examination, "exact_augmentations")
    findings, batches = examination.investigate(_watch, examination.options(), seconds)
    examination.raise_first(findings)
    if not batches:
        return Outcome("not applicable", "it is not read as a stream in this process")
    return Outcome("holds", f"looked for after each of {batches} batches")


def _watch(settings: Settings, options: Mapping[str, Any], seconds: float) -> tuple[list[Finding], int]:
    """Findings, and batches after which a stream's threads were looked for."""
    deadline = time.monotonic() + seconds
    before, others = threading.enumerate(), _replays()
    batches = 0
    with open_loader(settings, options) as loader:
        for epoch in range(2):
            replays: list[ReplayReader] = []
            for number, _ in enumerate(itertools.islice(loader, _MOST_BATCHES)):
                replays = replays or [each for each in _replays() if all(each is not other for other in others)]
                if not replays or time.monotonic() > deadline:
                    return [], batches
                batches += 1
                names = [each.name for each in threading.enumerate() if each not in before and _reads(each)]
                if names and any(each.drawn for each in replays):
                    wanted = "no thread that goes on reading while random numbers are drawn"
                    return [Finding(wanted, f"threads go on reading: {', '.join(names[:4])}", epoch, number)], batches
    return [], batches


def _reads(thread: threading.Thread) -> bool:
    """Whether its function, or an argument, refers to a loader or an iterator; others move batches, or only wait."""
    held = [*vars(thread).values(), *vars(thread).get("_args", ())]
    held += [inner for each in held for inner in directly_held(each).values()]
    kinds = (Dataset, DataLoader, Iterator)
    return any(isinstance(each, kinds) and not isinstance(each, io.IOBase) for each in held)


def _replays() -> list[ReplayReader]:
    """The readers of streams in this process. The adapters hold them, each in its own way."""
    return [each for each in gc.get_objects() if type(each) is ReplayReader]  # no `isinstance`, which asks proxies
