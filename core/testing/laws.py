"""The laws that every resumable loader must satisfy, and `check_resumable`, which examines them all.

A loader's declared capabilities switch a law between 'holds' and 'is refused clearly'. A law that cannot be examined
says why.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import itertools
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from . import items
from .examine import Examination
from .law import Law, law
from .live import reshard, rollback
from .naming import UNNAMED
from .proofs import honesty, witness
from .record import (
    Finding,
    Pass,
    Recording,
    Seen,
    Settings,
    Trial,
    from_midepoch,
    length_of,
    open_loader,
    see,
    state_of,
)
from .refusal import refusal
from .report import HOLDS, InapplicableError, LawError, Outcome, Report, Verdict, combined
from .worlds import partition, topology

__all__ = ["LAWS", "Law", "check_resumable", "examine_law", "judge"]


_PAUSE = 0.25  # seconds that a slow training loop waits, so that a prefetcher can run ahead


_READ_AHEAD = 2  # batches in flight in the delivery law


def check_resumable(
    make_loader: Callable[..., Any],
    *,
    world_sizes: Sequence[int] = (1, 2, 3),
    num_workers: Sequence[int] | None = None,
    epochs: int = 2,
    cuts: Sequence[int] | None = None,
    laws: Iterable[str] | None = None,
    quick: bool = False,
    shuffled: bool | None = None,
    tail: Literal["pad", "drop", "uneven"] = "pad",
    drop_last: bool = False,
    elastic_content: bool = True,
    parts: int = 1,
    identify: Callable[[Any], Sequence[Hashable]] | None = None,
    draws: Callable[[Any], Sequence[Hashable]] | None = None,
    gather: Callable[[Any], dict[str, Any]] | None = None,
    reseal: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    state_bytes: int = 16384,
    timeout: float = 120.0,
    options: Sequence[str] | None = None,
    raise_on_failure: bool = True,
) -> Report:
    """Examine the loaders that ``make_loader`` builds against the laws, resuming them in spawned processes.

    Args:
        make_loader: a picklable function (module-level, or a `functools.partial` of one) that builds a fresh loader
            each time. It may take ``rank`` and ``world_size``, and variations: ``num_workers``, ``batch_size``,
            ``seed``, ``size`` (of the dataset), ``read_log`` (a path to which the dataset appends a line for each
            sample it reads) and ``items`` (a list for the source to deliver, one item a batch). A law that needs a
            missing parameter is reported as not applicable.
        world_sizes: numbers of ranks to examine, each rank in its own process; 1 is always included.
        num_workers: numbers of workers to change between; None: 0 and 2.
        epochs: the number of epochs, from the first, in which to cut.
        cuts: where to cut, in batches taken; None: everywhere.
        laws: names of the laws to examine; None: all of `LAWS`.
        quick: cut each epoch at three places only.
        shuffled: whether two epochs must differ in their order (True) or agree (False); None: not examined.
        tail: how the ranks share the last samples.
        drop_last: whether an incomplete last batch is left out.
        elastic_content: whether a sample's content must be the same on any topology; False if it depends on the batch
            it is in (mixup).
        parts: the number of loaders that make_loader combines. Each of them has its own last samples.
        identify: batch -> the identities of its samples (ids of a dataset without repetition are best). None: derived
            from the columns of the batch whose rows occur again in other batches. If there are none, laws that need
            names are not applicable.
        draws: batch -> for each sample the random numbers it drew, as one hashable value that two samples never
            share by chance. If given, they must differ between samples and between epochs.
        gather: loader -> the state of all ranks, called by all ranks in a gloo process group; None:
            ``midepoch.gather``. Used if the loader declares that its state is not rank-independent.
        reseal: state -> the state with a new checksum; None: ``midepoch.reseal``.
        state_bytes: the largest size of a state as JSON.
        timeout: seconds that one request to a spawned process may take.
        options: which of make_loader's parameters have the meaning above; None: all that have one of these names. Pass
            it if ``size``, for example, is the size of an image.
        raise_on_failure: raise if laws fail. Otherwise read `Report.failures`.

    Raises:
        LawError: the first law that failed, with ``report`` set and the other failures as notes.
        ValueError: for an unknown law, or a loader without a batch.
        TypeError: for a make_loader that cannot be pickled.
    """
    settings = Settings(
        make_loader=make_loader,
        world_sizes=tuple(world_sizes),
        num_workers=(0, 2) if num_workers is None else tuple(num_workers),
        epochs=epochs,
        cuts=None if cuts is None else tuple(cuts),
        quick=quick,
        shuffled=shuffled,
        tail=tail,
        drop_last=drop_last,
        elastic_content=elastic_content,
        parts=parts,
        identify=identify,
        draws=draws,
        gather=gather,
        reseal=reseal,
        state_bytes=state_bytes,
        timeout=timeout,
        options=None if options is None else tuple(options),
    )
    report = Report(tuple(judge(Examination(settings), laws)))
    if raise_on_failure and report.failures:
        first, *others = report.failures
        first.report = report
        for other in others:
            first.add_note(str(other))
        raise first
    return report


def examine_law(examination: Examination, name: str) -> Outcome:
    """Examine one law. Raises `LawError` if it is broken."""
    law = LAWS[name]
    examination.begin(law.name, law.cause, law.cure)
    try:
        return law.examine(examination)
    except InapplicableError as reason:
        return Outcome("not applicable", str(reason))
    except LawError as error:
        examination.broken.append(name)
        raise examination.explained(error) from None


def judge(examination: Examination, laws: Iterable[str] | None = None) -> Iterator[Verdict]:
    """Yield the verdicts of the named laws, or of all, in the order of `LAWS`, as they are reached.

    Raises:
        ValueError: there is no such law, at once; or the loader has no batch.
    """
    names = list(LAWS) if laws is None else list(laws)
    unknown = [name for name in names if name not in LAWS]
    if unknown:
        raise ValueError(f"there is no law {unknown[0]!r}; the laws are {', '.join(LAWS)}")
    return (_judge(examination, name) for name in LAWS if name in names)


def _judge(examination: Examination, name: str) -> Verdict:
    start = time.perf_counter()
    try:
        outcome = examine_law(examination, name)
    except LawError as error:
        return Verdict(name, "failed", error.got.splitlines()[0], error, time.perf_counter() - start)
    return Verdict(name, outcome.status, outcome.reason, None, time.perf_counter() - start)


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


@law(
    "round trip",
    cause="the loaded state is used only when iteration starts, and the state until then is that of a fresh loader",
    cure="let state_dict() right after load_state_dict(state) return what was loaded",
)
def round_trip(examination: Examination) -> Outcome:
    """A loaded state is returned, equal, before anything else happens; a loader in use can load one too."""
    head = examination.observed()
    for (epoch, cut), recording in examination.resumed().items():
        examination.sound(recording, "a state to load", epoch=epoch, batch=cut)
        expected = head.passes[epoch].states[cut]
        if items.digest(expected) != items.digest(recording.loaded):
            texts = items.first_difference(items.leaves(expected), items.leaves(recording.loaded))
            raise examination.error(f"the loaded state: {texts[0]}", texts[1], epoch=epoch, batch=cut)
    if examination.inexact():
        return HOLDS
    refused = _roll_back(examination, head)
    return combined({"given back": HOLDS, "a loader in use": Outcome("refused clearly", refused) if refused else HOLDS})


def _roll_back(examination: Examination, head: Recording) -> str:
    """Load states, one after another, into a loader that is being iterated. Returns why it refuses, if it does."""
    places = sorted(examination.followed(examination.places(head)), reverse=True)
    states = [head.passes[epoch].states[cut] for epoch, cut in places]
    longest = max(len(part.batches) for part in head.passes) + 1
    reason = ""
    for running in (True, False):
        arguments = (examination.options(), states, longest, running)
        legs, refused = examination.investigate(_load_in_use, *arguments, process=1)
        _compare_legs(examination, list(zip(places, states, legs, strict=False)))
        if not refused:
            break
        reason = refused
    return reason


def _compare_legs(
    examination: Examination,
    legs: Sequence[tuple[tuple[int, int], dict[str, Any], tuple[dict[str, Any], list[Seen]]]],
) -> None:
    lost = ("the earlier load or the running pass is not dropped", "let load_state_dict() set everything")
    for (epoch, cut), state, (loaded, batches) in legs:
        if items.digest(state) != items.digest(loaded):
            texts = items.first_difference(items.leaves(state), items.leaves(loaded))
            what = f"the state that was loaded into a loader in use: {texts[0]}"
            raise examination.error(what, texts[1], epoch=epoch, batch=cut, cause=lost[0], cure=lost[1])
        fresh = examination.sound(examination.resumed()[epoch, cut], "a resume", epoch=epoch, batch=cut)
        what = f"after a state of {cut} batches was loaded into a loader in use, the batch of one that was not"
        examination.same(fresh.passes[0].batches, batches, what, epoch=epoch, first=cut, blame=lost)


def _load_in_use(
    settings: Settings, options: Mapping[str, Any], states: Sequence[dict[str, Any]], longest: int, running: bool
) -> tuple[list[tuple[dict[str, Any], list[Seen]]], str]:
    """([(the state returned right after a load, the batches that followed)], why a load was refused).

    ``running``: within a pass; otherwise between two passes.
    """
    legs: list[tuple[dict[str, Any], list[Seen]]] = []
    with open_loader(settings, options, later=True) as loader:
        for state in states:
            iterator = iter(loader)
            for _ in itertools.islice(iterator, 1 if running else longest):
                pass
            try:
                for _ in range(2):  # the second time, nothing has been read since the first
                    loader.load_state_dict(copy.deepcopy(state))
            except Exception as error:  # noqa: BLE001 - any refusal is acceptable here, as long as it is an error
                return legs, f"{type(error).__name__}: {error}"
            loaded = copy.deepcopy(loader.state_dict())
            del iterator
            legs.append((loaded, [see(settings, batch) for batch in itertools.islice(loader, longest)]))
    return legs, ""


@law(
    "observer",
    cause="state_dict() or peek() takes a batch, draws a random number or starts a pass",
    cure="compute the state from the cursor alone; keep a peeked batch to be handed out next",
)
def observer(examination: Examination) -> Outcome:
    """Asking for states, lengths or the next batch changes nothing."""
    inexact = examination.inexact()
    if inexact:
        return inexact
    whole = examination.whole()
    counts = [len(part.batches) for part in whole.passes]
    passes: list[list[Seen]] = examination.investigate(_ask_everything, examination.options(), counts)
    for epoch, (expected, got) in enumerate(zip(whole.passes, passes, strict=True)):
        examination.same(expected.batches, got, "with states asked for, the batch of the run without", epoch=epoch)
    peeked: _Peeked | None = examination.investigate(_peek_always, examination.options(), counts)
    if peeked is None:
        return Outcome("holds", "the loader has no peek()")
    for epoch, (expected, shown, got) in enumerate(zip(whole.passes, peeked.shown, peeked.taken, strict=True)):
        first = int(peeked.skips and epoch > 0)
        examination.same(expected.batches[first:], shown, "peek() shows the batch to come", epoch=epoch, first=first)
        examination.same(expected.batches, got, "after peek(), the batch of the run without", epoch=epoch)
    return HOLDS


def _ask(loader: Any) -> None:
    loader.state_dict()
    loader.state_dict()
    for name in ("batches_done", "batches_left", "epoch", "position", "capabilities"):
        # A loader of unknown length raises a TypeError here, as len() does.
        with contextlib.suppress(TypeError):
            getattr(loader, name, None)
    length_of(loader)


def _ask_everything(settings: Settings, options: Mapping[str, Any], counts: Sequence[int]) -> list[list[Seen]]:
    passes: list[list[Seen]] = []
    with open_loader(settings, options) as loader:
        for count in counts:
            passes.append([])
            _ask(loader)
            iterator = iter(loader)
            _ask(loader)
            for batch in iterator:
                passes[-1].append(see(settings, batch))
                _ask(loader)
                if len(passes[-1]) > count:
                    break
    return passes


@dataclasses.dataclass
class _Peeked:
    """What peek() showed and what was taken, for each pass. ``skips``: peek() was not called between two passes."""

    shown: list[list[Seen]]
    taken: list[list[Seen]]
    skips: bool


def _peek_always(settings: Settings, options: Mapping[str, Any], counts: Sequence[int]) -> _Peeked | None:
    shown: list[list[Seen]] = []
    taken: list[list[Seen]] = []
    with open_loader(settings, options) as loader:
        if not callable(getattr(loader, "peek", None)):
            return None
        # If the length is unknown, an epoch that was read to its end may still be the current one.
        skips = length_of(loader) is None
        for count in counts:
            shown.append([] if skips and shown else [see(settings, loader.peek())])
            taken.append([])
            iterator = iter(loader)
            for batch in iterator:
                taken[-1].append(see(settings, batch))
                if len(taken[-1]) >= count:
                    break
                shown[-1].append(see(settings, loader.peek()))
            # After an epoch's last batch, peek() must not decide what comes: the pass must end by itself.
            surplus = next(iterator, _END) if len(taken[-1]) >= count else _END
            if surplus is not _END:
                taken[-1].append(see(settings, surplus))
    return _Peeked(shown, taken, skips)


_END = object()


@law(
    "isolation",
    cause="the state shares a dict or list with the loader, or load_state_dict pops keys from its argument",
    cure="build a new state each time, and copy what is taken from a loaded one",
)
def isolation(examination: Examination) -> Outcome:
    """A state never changes later, and loading leaves its argument unchanged."""
    head = examination.observed()
    for epoch, cut in [(0, 0), *examination.places(head)]:
        state = head.passes[epoch].states[cut]
        found = examination.investigate(_share_states, examination.options(), state, epoch, cut)
        examination.raise_first(found)
    return HOLDS


def _share_states(
    settings: Settings, options: Mapping[str, Any], state: dict[str, Any], epoch: int, cut: int
) -> list[Finding]:
    findings: list[Finding] = []
    with open_loader(settings, options, later=True) as loader:
        given = copy.deepcopy(state)
        loader.load_state_dict(given)
        untouched = items.digest(given) == items.digest(state)
        kept = [(0, loader.state_dict())]
        notes = [items.digest(kept[0][1])]
        digests = []
        for number, batch in enumerate(loader, start=1):
            digests.append(items.digest(batch))
            kept.append((number, loader.state_dict()))
            notes.append(items.digest(kept[-1][1]))
        if not untouched or items.digest(given) != items.digest(state):
            findings.append(Finding("load_state_dict leaves its argument unchanged", f"{given}", epoch, cut))
        for (number, later), note in zip(kept, notes, strict=True):
            if items.digest(later) != note:
                findings.append(
                    Finding("a state that never changes later", f"it became {later}", epoch, cut + number)
                )
    with open_loader(settings, options, later=True) as loader:
        given = copy.deepcopy(state)
        loader.load_state_dict(given)
        _spoil(given)
        if _spoil_given(loader):
            findings.append(
                Finding(
                    "a state that belongs to the caller",
                    "clearing it changed the loader's next state",
                    epoch,
                    cut,
                )
            )
        if [items.digest(batch) for batch in loader] != digests:
            findings.append(
                Finding(
                    "a loaded state that may be cleared afterwards",
                    "clearing it changed what the loader delivers",
                    epoch,
                    cut,
                )
            )
    return findings


def _spoil_given(loader: Any) -> bool:
    """Whether clearing the state that ``loader`` returned changes its next one."""
    given = loader.state_dict()
    note = items.digest(given)
    _spoil(given)
    return items.digest(loader.state_dict()) != note


def _spoil(value: Any) -> None:
    if isinstance(value, dict):
        for part in value.values():
            _spoil(part)
        value.clear()
    elif isinstance(value, list):
        for part in value:
            _spoil(part)
        value.clear()


@law(
    "transport",
    cause="the state holds tuples, numpy numbers, tensors or objects, which JSON changes or cannot carry",
    cure="use only dict, list, str, int, float, bool and None in the state",
)
def transport(examination: Examination) -> Outcome:
    """A state passes through JSON (and torch.load with weights_only) into another process unchanged."""
    inexact = examination.inexact()
    if inexact:
        return inexact
    head = examination.observed()
    resumed = examination.resumed()
    places = [(0, 0), *examination.places(head)]
    states = [_through_json(examination, head.passes[epoch].states[cut], epoch, cut) for epoch, cut in places]
    longest = max(len(part.batches) for part in head.passes) + 1
    trials = [examination.trial(examination.options(), state=state, passes=2, limit=longest) for state in states]
    for (epoch, cut), recording in zip(places, examination.resume(trials), strict=True):
        examination.sound(recording, "a resume from a state that went through JSON", epoch=epoch, batch=cut)
        direct = examination.sound(resumed[epoch, cut], "a resume", epoch=epoch, batch=cut)
        for expected, got in zip(direct.passes, recording.passes, strict=True):
            examination.same(
                expected.batches, got.batches, "the batch of a resume without JSON", epoch=epoch, first=cut
            )
    return HOLDS


def _through_json(examination: Examination, state: dict[str, Any], epoch: int, cut: int) -> dict[str, Any]:
    wrong = _foreign_types(state, "state")
    if wrong:
        raise examination.error("built-in types only", wrong, epoch=epoch, batch=cut)
    try:
        text = json.dumps(state, allow_nan=False)
    except ValueError as error:
        raise examination.error("a state that JSON can carry", str(error), epoch=epoch, batch=cut) from error
    through: dict[str, Any] = json.loads(text)
    if items.digest(through) != items.digest(state):
        texts = items.first_difference(items.leaves(state), items.leaves(through))
        raise examination.error(f"the same state after JSON: {texts[0]}", texts[1], epoch=epoch, batch=cut)
    limit = examination.settings.state_bytes
    if len(text.encode()) > limit:
        raise examination.error(
            f"at most {limit} bytes of JSON",
            f"{len(text.encode())} bytes",
            epoch=epoch,
            batch=cut,
            cause="the state grows with the dataset or the progress",
            cure="save the loop's position, not how it got there",
        )
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    if items.digest(torch.load(file, weights_only=True)) != items.digest(state):
        raise examination.error("the same state after torch.load(weights_only=True)", "another", epoch=epoch, batch=cut)
    return through


def _foreign_types(value: Any, path: str) -> str:
    """Where ``value`` holds something other than JSON's own types; empty if nowhere."""
    if type(value) is dict:
        for key, part in value.items():
            if type(key) is not str:
                return f"{path} has the key {key!r} of type {type(key).__name__}"
            wrong = _foreign_types(part, f"{path}[{key!r}]")
            if wrong:
                return wrong
        return ""
    if type(value) is list:
        return next(filter(None, (_foreign_types(part, f"{path}[{n}]") for n, part in enumerate(value))), "")
    known = value is None or type(value) in (str, int, float, bool)
    return "" if known else f"{path} is a {type(value).__module__}.{type(value).__qualname__}"


@law(
    "chain",
    cause="after a resume, the state counts from the resume and not from the start of the epoch",
    cure="continue the position from the loaded one",
)
def chain(examination: Examination) -> Outcome:
    """A run that is interrupted twice continues like one that is interrupted once."""
    inexact = examination.inexact()
    if inexact:
        return inexact
    head = examination.observed()
    places = examination.places(head)
    seconds = examination.resume(
        [
            examination.trial(examination.options(), state=head.passes[epoch].states[cut], states=True)
            for epoch, cut in places
        ]
    )
    links: list[tuple[int, int, int, list[Seen], Trial]] = []
    for (epoch, cut), second in zip(places, seconds, strict=True):
        examination.sound(second, f"a resume after {cut} batches that asks for states", epoch=epoch, batch=cut)
        batches, states = second.passes[0].batches, second.passes[0].states
        for more in range(1, len(batches)):
            trial = examination.trial(examination.options(), state=states[more])
            links.append((epoch, cut, cut + more, batches[more:], trial))
    if not links:
        return Outcome("not applicable", "an epoch has fewer than three batches, so it cannot be cut twice")
    thirds = examination.record([link[-1] for link in links])
    for (epoch, cut, again, expected, _), third in zip(links, thirds, strict=True):
        what = f"cut after {cut} and again after {again} batches, the batch of the run cut once"
        examination.sound(third, "a resume of a resume", epoch=epoch, batch=again)
        examination.same(expected, third.passes[0].batches, what, epoch=epoch, first=again)
    return HOLDS


@law(
    "delivery",
    cause="the position moves when a batch is fetched, not when it is handed over",
    cure="move the position in the consumer's next(), and go back in_flight batches when asked",
)
def delivery(examination: Examination) -> Outcome:
    """Prefetched batches do not count, nor do those that the caller still has in flight."""
    workers = max(examination.settings.num_workers, default=0)
    outcomes = {}
    variants = [examination.options()]
    if not examination.takes("num_workers"):
        outcomes["workers"] = Outcome("not applicable", "the factory takes no num_workers")
    elif not workers:
        reason = f"num_workers={examination.settings.num_workers} names none"
        outcomes["workers"] = Outcome("not applicable", reason)
    else:
        variants.append(examination.options(num_workers=workers))
    if examination.capability("exact_augmentations")[0] is False:
        examination.need_names()
    found: list[_Slow] = examination.investigate_each(_take_slowly, variants)
    for options, slow in zip(variants, found, strict=True):
        examination.raise_first(slow.findings)
        _resume_in_flight(examination, options, slow)
        if slow.refused:
            outcomes["in flight"] = Outcome("refused clearly", slow.refused)
        else:
            told = "" if slow.in_flight else "state_dict takes no in_flight"
            outcomes["in flight"] = Outcome("not applicable", told) if told else HOLDS
    if len(variants) == 2:
        _resume_with_workers(examination, workers)
    return combined({"prefetched": HOLDS, **outcomes})


@dataclasses.dataclass
class _Slow:
    """What a slow training loop saw.

    Attributes:
        ids: of its batches, by epoch.
        findings: changes of the state while no batch was taken.
        in_flight: whether the loader knows ``in_flight``.
        other: (epoch, batches taken, those in flight, state) for each state that differs from the one given then.
        refused: why a backend refused a state for an earlier batch, if it has only its current one.
    """

    ids: list[list[tuple[Hashable, ...]]]
    findings: list[Finding]
    in_flight: bool
    other: list[tuple[int, int, int, dict[str, Any]]]
    refused: str = ""


def _take_slowly(settings: Settings, options: Mapping[str, Any]) -> _Slow:
    with open_loader(settings, options) as loader:
        slow = _Slow([], [], "in_flight" in inspect.signature(loader.state_dict).parameters, [])
        for epoch in range(2):
            notes = [items.digest(loader.state_dict())]
            slow.ids.append([])
            for number, batch in enumerate(loader, start=1):
                slow.ids[-1].append(see(settings, batch).ids)
                notes.append(items.digest(loader.state_dict()))
                if number == 1 and epoch == 0:
                    time.sleep(_PAUSE)
                if items.digest(loader.state_dict()) != notes[-1]:
                    expected = f"the same state {_PAUSE} s after a batch was taken"
                    slow.findings.append(Finding(expected, "it has moved on", epoch, number))
                    return slow
                # If 'finished' has two spellings, the first state of a later epoch may be either.
                oldest = number if epoch == 0 else number - 1
                for held in range(1, min(oldest, _READ_AHEAD) + 1 if slow.in_flight else 1):
                    try:
                        state = copy.deepcopy(loader.state_dict(in_flight=held))
                    except from_midepoch("StateError") as error:  # type: ignore[misc]
                        if getattr(getattr(loader, "capabilities", None), "rank_independent", True):
                            raise
                        slow.refused = str(error)
                        break
                    if items.digest(state) != notes[number - held]:
                        slow.other.append((epoch, number, held, state))
    return slow


def _resume_in_flight(examination: Examination, options: Mapping[str, Any], slow: _Slow) -> None:
    """A state that counts batches in flight may be written differently, but must resume at the same batch."""
    trials = [
        examination.trial(options, state=state, limit=len(slow.ids[epoch]) + 1) for epoch, _, _, state in slow.other
    ]
    for (epoch, number, held, state), recording in zip(slow.other, examination.resume(trials), strict=True):
        expected = slow.ids[epoch][number - held :]
        if recording.failure is None and recording.passes[0].ids == expected:
            continue
        raise examination.error(
            f"with in_flight={held} after {number} batches, a state that resumes at batch {number - held}",
            f"{state}: {recording.failure or f'resumes with samples {recording.passes[0].ids[:1]}'}",
            epoch=epoch,
            batch=number,
            cause="the positions that were handed over are not kept, or not long enough",
            cure="keep the last few of them",
        )


def _resume_with_workers(examination: Examination, workers: int) -> None:
    """Check the order of the resumed samples, with workers that prefetch before and after the cut."""
    head = examination.head_with("num_workers", workers)
    for (epoch, cut), recording in examination.resumed_with_workers().items():
        examination.sound(recording, f"a resume with num_workers={workers}", epoch=epoch, batch=cut)
        examination.same(
            head.passes[epoch].batches[cut:],
            recording.passes[0].batches,
            f"with num_workers={workers}, the samples that were not yet handed over",
            epoch=epoch,
            first=cut,
            by_ids=True,
        )


@law(
    "cost",
    cause="the resume reads and discards what was consumed before",
    cure="start the order at the position; if the source cannot be started there, declare constant_time_resume as no",
)
def cost(examination: Examination) -> Outcome:
    """A resume reads no sample that it skips, except the witness's."""
    declared, reason = examination.capability("constant_time_resume")
    if declared is False:
        return Outcome("refused clearly", f"constant_time_resume is declared no: {reason}")
    if not examination.takes("read_log"):
        return Outcome("not applicable", "the factory takes no read_log")
    head = examination.observed()
    places = [(0, 0), *examination.places(head)]
    with tempfile.TemporaryDirectory(prefix="midepoch-") as folder:
        logs = [Path(folder) / str(number) for number in range(len(places) + 1)]
        states = [None, *(head.passes[epoch].states[cut] for epoch, cut in places)]
        trials = [
            examination.trial(examination.options(read_log=str(log)), state=state)
            for log, state in zip(logs, states, strict=True)
        ]
        recordings = examination.resume(trials)
        reads = [len(log.read_text().splitlines()) if log.exists() else 0 for log in logs]
    if not reads[0]:
        raise ValueError(
            "make_loader takes read_log, but its dataset wrote nothing to it; append one line for each "
            "sample that is read, leave the parameter out, or leave read_log out of options="
        )
    # Do not count what a fresh loader, too, reads beyond its batches, such as a first look at the dataset.
    needed = [sum(map(len, recording.passes[0].ids)) if recording.passes else 0 for recording in recordings]
    # That includes two looks at the first sample of the epoch. A resume at a boundary looks at the last epoch's, too.
    surplus = max(0, reads[0] - needed[0]) * 3 // 2
    for (epoch, cut), recording, read, need in zip(places, recordings[1:], reads[1:], needed[1:], strict=True):
        examination.sound(recording, "a resume", epoch=epoch, batch=cut)
        if read > need + surplus:
            raise examination.error(
                f"a resume after {cut} batches reads the {need} samples that are left",
                f"it reads {read}",
                epoch=epoch,
                batch=cut,
            )
    return HOLDS


@law(
    "guest",
    cause="the loader seeds or draws from the global generators (a torch DataLoader draws its base seed at each iter)",
    cure="save the caller's generators around every step and restore them, or use generators of your own",
)
def guest(examination: Examination) -> Outcome:
    """The caller's random generators are left unchanged, and what the caller draws changes nothing."""
    whole = examination.whole()
    state = examination.observed().passes[0].states[len(whole.passes[0].batches) // 2]
    findings = examination.investigate(_watch_generators, examination.options(), state)
    declared, reason = examination.capability("exact_augmentations")
    if findings and declared is False:
        return Outcome("refused clearly", f"exact_augmentations is declared no: {reason}")
    examination.raise_first(findings)
    passes = examination.investigate(_draw_between, examination.options(), len(whole.passes))
    for epoch, (expected, got) in enumerate(zip(whole.passes, passes, strict=True)):
        examination.same(expected.batches, got, "although the caller draws random numbers, the same batch", epoch=epoch)
    return HOLDS


def _generators() -> dict[str, bytes]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python's random": repr(random.getstate()).encode(),
        "numpy.random": f"{kind}{rest}".encode() + np.asarray(keys).tobytes(),
        "torch's default generator": torch.get_rng_state().numpy().tobytes(),
    }


def _watch_generators(
    settings: Settings, options: Mapping[str, Any], state: dict[str, Any], passes: int = 2
) -> list[Finding]:
    """What moved the generators: the passes, and a load after them. One that takes no state then has a load alone."""
    with open_loader(settings, options) as loader:
        before = _generators()

        def moved(during: str, epoch: int, number: int | None) -> list[Finding]:
            after = _generators()
            return [
                Finding(f"{name} as the caller left it", f"{during} changed it", epoch, number)
                for name in before
                if before[name] != after[name]
            ]

        findings = moved("state_dict()", 0, 0) if loader.state_dict() is not None else []
        for epoch in range(passes):
            iterator = iter(loader)
            findings += moved("iter()", epoch, 0)
            for number, _ in enumerate(iterator):
                findings += moved("next()", epoch, number)
                loader.state_dict()
                findings += moved("state_dict()", epoch, number)
                if findings:
                    return findings
            findings += moved("the end of a pass", epoch, None)
        try:
            loader.load_state_dict(copy.deepcopy(state))
        except from_midepoch("StateError"):  # type: ignore[misc]
            findings += moved("load_state_dict() that refuses", 0, None)
            return findings or _watch_generators(settings, options, state, passes=0)
        findings += moved("load_state_dict()", 0, None)
        for number, _ in enumerate(loader):
            findings += moved("next() after a load", 0, number)
        return findings


def _draw_between(settings: Settings, options: Mapping[str, Any], passes: int) -> list[list[Seen]]:
    seen: list[list[Seen]] = []
    with open_loader(settings, options) as loader:
        random.seed(1)
        np.random.seed(1)
        for _ in range(passes):
            _draw()
            seen.append([])
            for batch in loader:
                seen[-1].append(see(settings, batch))
                _draw()
                loader.state_dict()
    return seen


def _draw() -> None:
    random.random()
    np.random.random(3)
    # Do not seed them: a loader may take torch's initial seed as its own.
    torch.rand(5)


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


_ALL = (
    determinism,
    tail,
    next_epoch,
    boundary,
    round_trip,
    observer,
    isolation,
    transport,
    chain,
    partition,
    topology,
    refusal,
    delivery,
    cost,
    guest,
    any_item,
    witness,
    honesty,
    reshard,
    rollback,
)
LAWS: dict[str, Law] = {each.name: each for each in _ALL}
"""All laws by name, in a good order to read them."""
