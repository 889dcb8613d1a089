"""What a job tries once, on one sample, unit or state, is tried here at length: for `midepoch check`.

A trial that disproves a promise says what it rests on: this sample, this list, this state. A law that is broken for the
same reason only says that batches differ. So trials come before the laws.

Each trial ends when its share of the time is used up. It keeps checksums, never samples: at most some 20 MB.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset

from ..attributes import directly_held
from ..errors import MidepochError
from ..loader.lending import loader_of
from ..loader.part import Part
from ..reading.replay import ReplayReader
from ..state.witness import SampleSummary, Witness
from .examine import Examination
from .laws import LAWS
from .record import CAPABILITIES, Seen, Settings, open_loader, see, violation
from .report import InapplicableError, Law, LawError, Outcome, Promise, Verdict, law, reach

__all__ = ["TRIALS", "stand", "try_promises"]

_MOST_SAMPLES = 4096
_MOST_STATES = 512
_MOST_BATCHES = 10_000
_CHUNK = 16  # states that are tried between two looks at the clock
_FIRST_EPOCHS = 8  # whose first samples are looked at
_LISTED_EPOCHS = 5


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
        verdict = reach(trial.name, partial(_try, trial, examination, share))
        left = max(left - verdict.seconds, 0.0)
        yield verdict


def _try(trial: Law, examination: Examination, seconds: float) -> Outcome:
    """Try it if one of its capabilities is promised, or none declared. Otherwise there is nothing to disprove."""
    declared = [(name, *examination.capability(name)) for name in trial.of]
    if all(holds is False for _, holds, _ in declared):
        raise InapplicableError(f"{declared[0][0]} is declared no: {declared[0][2]}", "not promised")
    return trial.examine(examination, seconds)


# --- lists ------------------------------------------------------------------------------------------------------------


@law(
    "lists", "exact_order",
    cause="the sampler's order depends on the process, on earlier passes, or on a generator that midepoch cannot seed",
    cure="derive it from the epoch (set_epoch) or from torch's, numpy's or python's generators, and sort what comes "
    "from sets",
)  # fmt: skip
def lists(examination: Examination, seconds: float) -> Outcome:
    """A sampler's lists of several epochs, from five samplers made anew in two processes, in other orders of epochs."""
    listed: list[dict[int, tuple[str, str]]] = []
    deadline = time.monotonic() + seconds
    for process, step in ((0, 1), (1, -1), (0, -1), (1, 1), (0, 1)):
        epochs = list(range(_LISTED_EPOCHS))[::step]
        listed.append(examination.investigate(_list, epochs, process > 0, process=process))
        if not listed[0]:
            return Outcome("not applicable", "no sampler lists its order")
        if time.monotonic() > deadline:
            break
    for other in listed[1:]:
        for epoch, (crc, first) in listed[0].items():
            if other[epoch][0] != crc:
                wanted = f"the same list of epoch {epoch} from each sampler: {first}"
                raise examination.error(wanted, other[epoch][1], epoch)
    processes = min(len(listed), 2)
    return Outcome("holds", f"{len(listed[0])} epochs, each listed {len(listed)} times in {processes} processes")


def _list(settings: Settings, options: Mapping[str, Any], epochs: list[int], later: bool) -> dict[int, tuple[str, str]]:
    """Epoch -> the CRC of its list, and how it begins."""
    found = {}
    with open_loader(settings, options, later=later) as loader:
        wrapped = loader_of(loader)
        for epoch in epochs:
            samples = None if wrapped is None else Part("", wrapped).samples(epoch)
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
    """What was seen of samples in one process."""

    looks: dict[_Where, SampleSummary]
    indices: dict[_Where, str]  # of these samples, as text
    reads: int
    finding: tuple[_Where, str] | None  # a place, and what differed between two reads


@law(
    "samples", "exact_order", "exact_augmentations",
    cause="the item depends on more than its index: on what was read before it, on the process, or on random numbers "
    "that midepoch cannot seed",
    cure="make each sample a function of its index and of python's, numpy's or torch's generators, or of "
    "midepoch.sample_generator()",
)  # fmt: skip
def samples(examination: Examination, seconds: float) -> Outcome:
    """Every sample is read alone, several times: in order, in reverse, shuffled among two epochs, in two processes."""
    only_most = examination.capability("exact_augmentations")[0] is False
    here: _Looked | None = examination.investigate(_look, 0.6 * seconds, only_most, {})
    if here is None:
        return Outcome("not applicable", "its samples cannot be read one by one")
    last: _Looked = here
    if here.finding is None:
        last = examination.investigate(_look, 0.4 * seconds, only_most, here.looks, process=1)
    if last.finding is not None:
        where, differs = last.finding
        between, index = last is not here, here.indices.get(where, "?")
        raise examination.error(
            f"the sample at position {where.unit} (index {index}), the same at each read under its stream",
            f"two reads of sample {index} differ in {differs}{', between processes' * between}", where.epoch,
            cause="what depends on the process: the order of a set, hash() of a text, the host" if between else None,
            cure="sort what comes from sets and folders, and derive nothing from the process" if between else None,
        )  # fmt: skip
    epochs, reads = len({where.epoch for where in here.looks}), here.reads + last.reads
    return Outcome("holds", f"{len(here.looks)} samples of {epochs} epochs, {reads} reads in 2 processes")


def _look(
    settings: Settings, options: Mapping[str, Any], seconds: float, only_most: bool, known: dict[_Where, SampleSummary]
) -> _Looked | None:
    """Look at samples: at those `known`, as a process that resumes; or choose them, and read them in three orders."""
    deadline = time.monotonic() + seconds
    looks, indices, reads = dict(known), dict[_Where, str](), 0
    with open_loader(settings, options, later=bool(known)) as loader:
        if (wrapped := loader_of(loader)) is None:
            return None
        found = ((epoch, Part("", wrapped).samples(epoch)) for epoch in range(_FIRST_EPOCHS))
        epochs = {epoch: samples for epoch, samples in found if samples is not None}
        if 0 not in epochs:
            return None
        chosen = list(known) or [
            _Where(epoch, unit, place)
            for epoch, samples in epochs.items() if samples.units
            for unit in (_spread(samples.units, _MOST_SAMPLES // 2) if epoch < 2 else [0])
            for place in range(len(samples.indices(unit)))
        ][: 2 * _MOST_SAMPLES]  # fmt: skip
        shuffled = random.Random(0).sample(chosen, len(chosen))
        orders = [shuffled] if known else [chosen, chosen[::-1], shuffled]
        for where in itertools.chain(*orders):
            samples = epochs[where.epoch]
            look = samples.look(where.unit, where.place)
            if look is None:
                continue  # a sample that cannot be read fails an uninterrupted run
            reads += 1
            indices[where] = f"{samples.indices(where.unit)[where.place]!r:.80}"
            before = looks.setdefault(where, look)
            differing = before.differing(look)
            if differing and (not only_most or before.holds_most(differing)):  # else it is the same sample
                return _Looked(looks, indices, reads, (where, before.names(differing)))
            if time.monotonic() > deadline:
                break
    return _Looked(looks, indices, reads, None)


def _spread(count: int, most: int) -> range:
    """At most so many numbers below `count`, evenly spaced."""
    return range(0, count, -(-count // most))


# --- passes -----------------------------------------------------------------------------------------------------------


@law(
    "passes", "exact_order", "exact_augmentations",
    cause="the source keeps something from one pass to the next: a counter, a generator, a cache, an order",
    cure="let order and content follow from the epoch or the random generators alone, and begin each pass anew",
)  # fmt: skip
def passes(examination: Examination, seconds: float) -> Outcome:
    """The second and third pass over one object, under the same streams, are the first one, over their whole length."""
    epochs = min(examination.settings.epochs, 2)
    first, later, refused = examination.investigate(_repeat, epochs, seconds)
    for number, epoch, again in later:
        what = f"in pass {number} over epoch {epoch}, the batch of the first pass"
        examination.same(first[epoch], again, what, epoch)
    if refused:
        return Outcome("refused clearly", refused)
    return Outcome("holds", f"{len(later)} later passes, {sum(len(again) for *_, again in later)} batches")


def _repeat(
    settings: Settings, options: Mapping[str, Any], epochs: int, seconds: float
) -> tuple[list[list[Seen]], list[tuple[int, int, list[Seen]]], str]:
    """The first pass over each epoch, later ones with their numbers and epochs, and why the loader does not go back."""
    deadline = time.monotonic() + seconds
    starts, first, later = [], [], []
    with open_loader(settings, options) as loader:
        for _ in range(epochs):
            starts.append(copy.deepcopy(loader.state_dict()))
            first.append([see(settings, batch) for batch in itertools.islice(loader, _MOST_BATCHES)])
        try:
            for number, epoch in itertools.product((2, 3), range(epochs)):
                loader.load_state_dict(copy.deepcopy(starts[epoch]))
                again = [see(settings, batch) for batch in itertools.islice(loader, _MOST_BATCHES)]
                later.append((number, epoch, again))
                if time.monotonic() > deadline:
                    break
        except Exception as error:  # noqa: BLE001  # the law 'round trip' judges it
            return first, later, f"{type(error).__name__}: {error}"
    return first, later, ""


# --- states -----------------------------------------------------------------------------------------------------------


@law(
    "states", "exact_order", "exact_augmentations",
    cause="the state does not cover all that the source needs to go on: what a buffer holds, what was read ahead, a "
    "generator, a counter",
    cure="let the state cover it; or wrap a function that makes the source, as in midepoch.wrap(lambda: make()), to "
    "have it read again from its start",
)  # fmt: skip
def states(examination: Examination, seconds: float) -> Outcome:
    """Each state of two epochs, loaded by a new loader in another process, gives the batch that comes next."""
    examination.need_promise()
    deadline = time.monotonic() + seconds
    head = examination.observed()
    epochs = min(examination.settings.epochs, 2)
    every = [(epoch, cut) for epoch in range(epochs) for cut in range(len(head.passes[epoch].states))]
    places = [every[number] for number in _spread(len(every), _MOST_STATES)]
    random.Random(0).shuffle(places)
    tried = 0
    for start in range(0, len(places), _CHUNK):
        chunk = places[start : start + _CHUNK]
        states = [head.passes[epoch].states[cut] for epoch, cut in chunk]
        resumed = examination.resume([examination.trial(state=each, limit=1) for each in states])
        for (epoch, cut), recording in zip(chunk, resumed, strict=True):
            examination.sound(recording, f"the batch after the state of batch {cut}", epoch, cut)
            batches = head.passes[epoch].batches[cut : cut + 1] or head.passes[epoch + 1].batches[:1]
            what = f"the state after {cut} batches of epoch {epoch} leads a loader made anew to the batch that follows"
            examination.same(batches, recording.passes[0].batches, what, epoch, cut)
        tried += len(chunk)
        if time.monotonic() > deadline:
            break
    return Outcome("holds", f"{tried} of {len(every)} states, each in a loader made anew")


# --- threads ----------------------------------------------------------------------------------------------------------


@law(
    "threads", "exact_augmentations",
    cause="a thread of the source's own draws from the generators of whatever sample is being read",
    cure="read ahead in worker processes (num_workers), or draw from midepoch.sample_generator() in the thread that "
    "iterates",
)  # fmt: skip
def threads(examination: Examination, seconds: float) -> Outcome:
    """After each batch of two epochs, no thread of the source's goes on reading, if any random numbers are drawn."""
    batches = examination.investigate(_watch, seconds)
    if not batches:
        return Outcome("not applicable", "it is not read as a stream in this process")
    return Outcome("holds", f"looked for after each of {batches} batches")


def _watch(settings: Settings, options: Mapping[str, Any], seconds: float) -> int:
    """The number of batches after which a stream's threads were looked for."""
    deadline = time.monotonic() + seconds
    before, others = threading.enumerate(), _replays()
    batches = 0
    with open_loader(settings, options) as loader:
        for epoch in range(2):
            replays: list[ReplayReader] = []
            for number, _ in enumerate(itertools.islice(loader, _MOST_BATCHES)):
                replays = replays or [each for each in _replays() if all(each is not other for other in others)]
                if not replays or time.monotonic() > deadline:
                    return batches
                batches += 1
                names = [each.name for each in threading.enumerate() if each not in before and _reads(each)]
                if names and any(each.drawn for each in replays):
                    wanted = "no thread that goes on reading while random numbers are drawn"
                    raise violation(wanted, f"threads go on reading: {', '.join(names[:4])}", epoch, number)
    return batches


def _reads(thread: threading.Thread) -> bool:
    """Whether its function, or an argument, refers to a loader or an iterator; others move batches, or only wait."""
    held = [*vars(thread).values(), *vars(thread).get("_args", ())]
    held += [inner for each in held for inner in directly_held(each).values()]
    kinds = (Dataset, DataLoader, Iterator)
    return any(isinstance(each, kinds) and not isinstance(each, io.IOBase) for each in held)


def _replays() -> list[ReplayReader]:
    """The readers of streams in this process. The adapters hold them, each in its own way."""
    return [each for each in gc.get_objects() if type(each) is ReplayReader]  # no `isinstance`, which asks proxies


TRIALS = (lists, samples, passes, states, threads)
"""All trials, in the order in which they are made: the most telling first."""


# --- what promises rest on ---


def stand(examination: Examination, trials: Sequence[Verdict], laws: Sequence[Verdict]) -> tuple[Promise, ...]:
    """What each promise of a loader rests on, after its trials and laws. Empty if an uninterrupted run fails."""
    examination.begin()
    try:
        states = [each for part in examination.observed().passes[:1] for each in part.states[1:2]]
        return (*map(_of_the_data, states), *(_of(examination, name, trials, laws) for name in CAPABILITIES))
    except LawError:
        return ()


def _of_the_data(state: Mapping[str, Any]) -> Promise:
    """What a resume compares before it goes on."""
    detail = str(state.get("detail", ""))
    proofs = []
    with contextlib.suppress(MidepochError):
        if (witness := Witness.parse(state.get("witness", ""))) is not None and witness.told:
            proofs.append("the first sample of the epoch, its content and its bits")
    if re.search(r"\bcrc=[0-9a-f]{8}", detail):
        proofs.append("the sampler's list of the epoch")
    if re.search(r"\bchain=[0-9a-f]{8}", detail):
        proofs.append("a chain of what is read again up to the position")
    if proofs:
        return Promise("same data", "proved at each resume", f"compared with the state: {'; '.join(proofs)}")
    return Promise("same data", "believed", "the state holds nothing that tells other data")


def _of(examination: Examination, name: str, trials: Sequence[Verdict], laws: Sequence[Verdict]) -> Promise:
    holds, reason = examination.capability(name)
    if holds is None:
        return Promise(name, "not declared", reason)
    if not holds:
        return Promise(name, "no", reason)
    of = [each.name for each in (*TRIALS, *LAWS.values()) if name in each.of]
    known = [each for each in (*trials, *laws) if each.law in of]
    broken = [each for each in known if each.status == "failed"]
    if broken:
        return Promise(name, "not kept", f"{broken[0].law}: {broken[0].reason}")
    ranks, workers = len(examination.worlds) > 1, bool(examination.most_workers)
    askable = {"elastic_workers": workers, "elastic_world": ranks, "rank_independent": ranks}.get(name, True)
    tried = [each for each in known if askable and each.status == "holds"]
    if tried:
        return Promise(name, "tried", f"by {', '.join(each.law for each in tried)}; {reason}")
    return Promise(name, "believed", reason)
