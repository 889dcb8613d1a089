"""Laws of the program around a loader: what it has in flight, what it pays, its random numbers, what it is promised."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import random
import tempfile
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import MidepochError, StateError
from . import items
from .examine import Examination
from .record import CAPABILITIES, Pass, Settings, open_loader, see, violation
from .report import HOLDS, LawError, Outcome, combined, law

__all__ = ["cost", "delivery", "guest", "honesty"]

_PAUSE = 0.25  # seconds that a slow training loop waits, so that a prefetcher can run ahead
_READ_AHEAD = 2  # batches in flight in the delivery law


@law(
    "delivery",
    cause="the position moves when a batch is fetched, not when it is handed over",
    cure="move the position in the consumer's next(), and go back in_flight batches when asked",
)
def delivery(examination: Examination) -> Outcome:
    """Prefetched batches do not count, nor do those that the caller still has in flight."""
    outcomes = {}
    variants = examination.with_workers()
    if len(variants) == 1:
        none = f"num_workers={examination.settings.num_workers} names none"
        reason = none if examination.takes("num_workers") else "the factory takes no num_workers"
        outcomes["workers"] = Outcome("not applicable", reason)
    examination.compares_by_ids()  # which needs names
    for variant in variants:
        options = examination.options(**variant)
        slow: _Slow = examination.investigate(_take_slowly, options=options)
        _resume_in_flight(examination, options, slow)
        if slow.refused:
            outcomes["in flight"] = Outcome("refused clearly", slow.refused)
        else:
            untold = Outcome("not applicable", "state_dict takes no in_flight")
            outcomes["in flight"] = HOLDS if slow.in_flight else untold
    for each in examination.resumes_with_workers():  # they prefetch before and after the cut
        examination.same_rest(each, by_ids=True)
    return combined({"prefetched": HOLDS, **outcomes})


@dataclasses.dataclass
class _Slow:
    """What a slow training loop saw."""

    ids: list[list[tuple[Hashable, ...]]]  # of its batches, by epoch
    in_flight: bool  # whether the loader knows this parameter
    # (epoch, batches taken, those in flight, state) for each state that differs from the one given then
    other: list[tuple[int, int, int, dict[str, Any]]]
    refused: str = ""  # why a backend refused a state for an earlier batch, if it has only its current one


def _take_slowly(settings: Settings, options: Mapping[str, Any]) -> _Slow:
    with open_loader(settings, options) as loader:
        slow = _Slow([], "in_flight" in inspect.signature(loader.state_dict).parameters, [])
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
                    raise violation(expected, "it has moved on", epoch, number)
                # If 'finished' has two spellings, the first state of a later epoch may be either.
                oldest = number if epoch == 0 else number - 1
                for held in range(1, min(oldest, _READ_AHEAD) + 1 if slow.in_flight else 1):
                    try:
                        state = copy.deepcopy(loader.state_dict(in_flight=held))
                    except StateError as error:
                        if getattr(getattr(loader, "capabilities", None), "rank_independent", True):
                            raise
                        slow.refused = str(error)
                        break
                    if items.digest(state) != notes[number - held]:
                        slow.other.append((epoch, number, held, state))
    return slow


def _resume_in_flight(examination: Examination, options: Mapping[str, Any], slow: _Slow) -> None:
    """A state that counts batches in flight may be written differently, but must resume at the same batch."""
    longest = max(map(len, slow.ids)) + 1
    trials = [examination.trial(options, state=state, limit=longest) for _, _, _, state in slow.other]
    for (epoch, number, held, state), recording in zip(slow.other, examination.resume(trials), strict=True):
        if recording.failure is None and recording.passes[0].ids == slow.ids[epoch][number - held :]:
            continue
        raise examination.error(
            f"with in_flight={held} after {number} batches, a state that resumes at batch {number - held}",
            f"{state}: {recording.failure or f'resumes with samples {recording.passes[0].ids[:1]}'}", epoch, number,
            "the positions that were handed over are not kept, or not long enough", "keep the last few of them",
        )  # fmt: skip


@law(
    "cost", "constant_time_resume",
    cause="the resume reads and discards what was consumed before",
    cure="start the order at the position; if the source cannot be started there, declare constant_time_resume as no",
)
def cost(examination: Examination) -> Outcome:
    """A resume reads no sample that it skips, except the witness's."""
    examination.need_promise("constant_time_resume")
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
        told = "make_loader takes read_log, but its dataset wrote nothing to it; append one line for each sample"
        raise ValueError(f"{told} that is read, leave the parameter out, or leave read_log out of options=")
    # Do not count what a fresh loader, too, reads beyond its batches, such as a first look at the dataset.
    needed = [sum(map(len, recording.passes[0].ids)) if recording.passes else 0 for recording in recordings]
    # That includes another look at the epoch's first sample. A resume looks twice, since its first batch does not begin
    # with that sample; at a boundary, it looks at the last epoch's, too. A jump may read the sample before its place.
    surplus = max(1, 2 * (reads[0] - needed[0]))
    for (epoch, cut), recording, read, need in zip(places, recordings[1:], reads[1:], needed[1:], strict=True):
        examination.sound(recording, "a resume", epoch, cut)
        if read > need + surplus:
            wanted = f"a resume after {cut} batches reads the {need} samples that are left"
            raise examination.error(wanted, f"it reads {read}", epoch, cut)
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
    try:
        examination.investigate(_watch_generators, state)
    except LawError:
        examination.need_promise("exact_augmentations")
        raise
    passes = examination.investigate(_draw_between, len(whole.passes))
    examination.same_passes(whole.passes, passes, "although the caller draws random numbers, the same batch")
    return HOLDS


def _generators() -> dict[str, bytes]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python's random": repr(random.getstate()).encode(),
        "numpy.random": f"{kind}{rest}".encode() + np.asarray(keys).tobytes(),
        "torch's default generator": torch.get_rng_state().numpy().tobytes(),
    }


def _watch_generators(settings: Settings, options: Mapping[str, Any], state: dict[str, Any], passes: int = 2) -> None:
    """Passes, and a load after them. A loader that takes no state then has a load alone."""
    with open_loader(settings, options) as loader:
        before = _generators()

        def check(during: str, epoch: int, number: int | None) -> None:
            after = _generators()
            for name in before:
                if before[name] != after[name]:
                    raise violation(f"{name} as the caller left it", f"{during} changed it", epoch, number)

        loader.state_dict()
        check("state_dict()", 0, 0)
        for epoch in range(passes):
            iterator = iter(loader)
            check("iter()", epoch, 0)
            for number, _ in enumerate(iterator):
                check("next()", epoch, number)
                loader.state_dict()
                check("state_dict()", epoch, number)
            check("the end of a pass", epoch, None)
        try:
            loader.load_state_dict(copy.deepcopy(state))
        except StateError:
            check("load_state_dict() that refuses", 0, None)
            if passes:
                _watch_generators(settings, options, state, passes=0)
            return
        check("load_state_dict()", 0, None)
        for number, _ in enumerate(loader):
            check("next() after a load", 0, number)


def _draw_between(settings: Settings, options: Mapping[str, Any], passes: int) -> list[Pass]:
    done = [Pass() for _ in range(passes)]
    with open_loader(settings, options) as loader:
        random.seed(1)
        np.random.seed(1)
        for each in done:
            _draw()
            for batch in loader:
                each.batches.append(see(settings, batch))
                _draw()
                loader.state_dict()
    return done


def _draw() -> None:
    random.random()
    np.random.random(3)
    torch.rand(5)  # not seeded: a loader may take torch's initial seed as its own


@law(
    "honesty",
    cause="a promise is tried too late, or only when it has already been broken",
    cure="try it when reading begins, and say in capabilities what does not hold before the first state can be saved",
)
def honesty(examination: Examination) -> Outcome:
    """What a loader promises with its first state, after its first batch, it still promises after two epochs."""
    reason = examination.investigate(_promises_kept)
    return Outcome("not promised", reason) if reason else HOLDS


def _promises_kept(settings: Settings, options: Mapping[str, Any]) -> str:
    """What was taken back in time. What is taken back too late breaks the law."""
    with open_loader(settings, options) as loader:
        if getattr(loader, "capabilities", None) is None:
            return ""
        stated = _promises(loader)
        batches = 0
        first: dict[str, bool] = {}
        for epoch in range(2):
            # Another law judges an epoch that fails.
            with contextlib.suppress(MidepochError):
                for _ in loader:
                    batches += 1
                    if not first:
                        with contextlib.suppress(Exception):  # a source may have no state here
                            loader.state_dict()
                    promised = _promises(loader)
                    first = first or promised
                    for name in CAPABILITIES:
                        if first[name] and not promised[name]:
                            got = f"after {batches} batches it is no: {getattr(loader.capabilities, name).reason}"
                            raise violation(f"{name} as it was promised with the first state", got, epoch, batches)
        taken_back = [name for name in CAPABILITIES if first and stated[name] and not first[name]]
        return "; ".join(f"{name} is no: {getattr(loader.capabilities, name).reason}" for name in taken_back)


def _promises(loader: Any) -> dict[str, bool]:
    return {name: bool(getattr(loader.capabilities, name, False)) for name in CAPABILITIES}
