"""From many broken laws to one cause: what is wrong, where it showed first, and what to write instead."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import random
import re
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from .examine import Examination
from .laws import LAWS
from .record import Settings, open_loader
from .report import LawError, Report

__all__ = ["UNINTERRUPTED", "Diagnosis", "diagnose", "entropy"]

_READ = 64  # batches that are read to find where random numbers come from
_SHOWN = 3  # lines of the user's that are shown


@dataclass(frozen=True)
class Diagnosis:
    """The one cause that explains most."""

    title: str  # what is wrong, in a sentence
    tone: Literal["good", "warn", "bad"]  # "warn": no law is broken, but something is not exact
    facts: tuple[tuple[str, str], ...] = ()  # (label, text) to be shown below the title
    counted: tuple[str, ...] = ()  # the laws and trials that fail for the same cause
    others: tuple[LawError, ...] = ()  # of laws that fail for another one


UNINTERRUPTED = "uninterrupted"
# What fails together. A loader that does not repeat itself fails in every comparison; one that does not continue where
# it was cut cannot share the rest either.
_REPEATS = frozenset({"determinism", "lists", "samples", "passes", "threads"})
_CONTINUES = frozenset(
    {"tail", "next epoch", "boundary", "round trip", "isolation", "transport", "chain", "delivery", "states"}
)
_DIFFERS = frozenset({"transparent"})
_SHARES = frozenset({"partition", "topology", "reshard", "rollback"})
_GROUPS = (
    (_REPEATS, "It does not repeat itself, so no state can lead back to the same batches"),
    (_DIFFERS, "Without any resume, it does not give what the plain loader gives"),
    (_CONTINUES, "A resumed run is not the run that was cut"),
    (_SHARES, "Several ranks do not share an epoch as stated"),
)


def diagnose(examination: Examination, report: Report) -> Diagnosis:
    """The one cause that explains most of what failed; or that nothing failed."""
    failed = {each.law: each.error for each in (*report.trials, *report.verdicts) if each.error is not None}
    if UNINTERRUPTED in failed:
        return _unreadable(examination, failed[UNINTERRUPTED])
    lost = _declined(examination, "exact_order")
    if not failed:
        if (reason := lost or _declined(examination, "exact_augmentations")) is not None:
            drawn = _drawn(examination)
            facts = (*drawn, ("instead", _SEEDED)) if drawn else ()
            return Diagnosis(f"It does not continue exactly, and says so: {reason}", "warn", facts)
        continues = any(each.law == "tail" and each.status == "holds" for each in report.verdicts)
        title = "It continues exactly where it was cut" if continues else "No law that was examined is broken"
        return Diagnosis(title, "good")
    lead = next((name for group, _ in _GROUPS for name in failed if name in group), next(iter(failed)))
    repeats = lead in _REPEATS or (lost is not None and lead not in _DIFFERS)
    error = failed[lead]
    title = next((title for group, title in _GROUPS if lead in group), "")
    if repeats and lead not in _REPEATS:
        title = f"{_GROUPS[0][1]}: {lost}"
    drawn = _drawn(examination) if repeats else ()
    facts = (
        ("first seen", error.place or "before the first batch"),
        ("expected", error.expected),
        ("got", error.got.splitlines()[0]),
        *(drawn or [("usually", error.cause)]),
        ("instead", _SEEDED if drawn else error.cure),
    )
    same = tuple(name for name in failed if name != lead and (repeats or _together(lead, name)))
    others = tuple(each for name, each in failed.items() if name not in (lead, *same))
    return Diagnosis(title or f"The law '{lead}' is broken: {LAWS[lead].sentence}", "bad", facts, same, others)


def _unreadable(examination: Examination, error: LawError) -> Diagnosis:
    """Not even an uninterrupted run succeeds. What midepoch raises says what to write instead."""
    title, ours = error.got.splitlines()[0], "\nmidepoch.errors." in error.got
    if ours:
        title = title.partition(": ")[2]
    facts = (("first seen", f"{error.place or 'when it is made'}, in a run that nothing interrupts"),)
    raised = [("raised at", line) for line in _raised_at(error.got)]
    return Diagnosis(title, "bad", (*facts, *(_drawn(examination) if ours else [*raised, ("instead", error.cure)])))


_SEEDED = (
    "draw from the global generators of random, numpy or torch, or from midepoch.sample_generator(): they are seeded "
    "for each sample; a sampler derives its order from the epoch that set_epoch gives"
)


def _declined(examination: Examination, capability: str) -> str | None:
    """Why the loader declares a capability no; None if it does not."""
    with contextlib.suppress(LawError):
        holds, reason = examination.capability(capability)
        if holds is False:
            return reason
    return None


def _together(lead: str, name: str) -> bool:
    """Whether both are of one group. What is not continued cannot be shared either."""
    return any(lead in group and (name in group or (group is _CONTINUES and name in _SHARES)) for group, _ in _GROUPS)


# --- where random numbers come from -----------------------------------------------------------------------------------


def _drawn(examination: Examination) -> tuple[tuple[str, str], ...]:
    examination.begin("entropy")
    with contextlib.suppress(LawError):
        lines: list[str] = examination.investigate(entropy)
        return tuple(("drawn at", line) for line in lines)
    return ()


def entropy(settings: Settings, options: Mapping[str, Any]) -> list[str]:
    """The lines of the user's own files that ask the operating system for random numbers, in two passes."""
    found: dict[str, None] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        drawn = event == "c_call" and argument is os.urandom
        unseeded = event == "call" and frame.f_code is random.Random.seed.__code__ and frame.f_locals.get("a") is None
        if (drawn or unseeded) and (line := _users_line(frame)):
            found[line] = None

    with contextlib.suppress(Exception), open_loader(settings, options) as loader:  # the laws report what fails
        sys.setprofile(watch)
        try:
            for _ in range(2):
                for _ in itertools.islice(loader, _READ):
                    pass
        finally:
            sys.setprofile(None)
    return list(found)[:_SHOWN]


def _folder_of(package: str) -> str:
    """The folder in which a package's files are, which may be imported through links from elsewhere."""
    found = importlib.util.find_spec(package)
    return str(Path(os.path.realpath(found.origin)).parent) if found is not None and found.origin else ""


_LIBRARIES = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
_PASSED_OVER = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (*_LIBRARIES, *map(_folder_of, ("midepoch", "midepoch.adapters"))) if folder
)  # fmt: skip


def _raised_at(trace: str) -> list[str]:
    """The innermost line of the user's own files in a traceback, in a list; empty if there is none."""
    lines = re.findall(r'File "(.*?)", line (\d+), in .*\n +(.*)', trace)
    own = [(file, number, line) for file, number, line in lines if _is_users(file)]
    return [f"{Path(file).name}:{number}: {line}" for file, number, line in own[-1:]]


def _is_users(file: str) -> bool:
    return not os.path.realpath(file).startswith(_PASSED_OVER) and Path(file).is_file()


def _users_line(frame: FrameType | None) -> str:
    """File, number and text of the innermost line that is neither a library's nor midepoch's; '' if there is none."""
    own = (each for each in reversed(traceback.extract_stack(frame)) if _is_users(each.filename))
    return next((f"{Path(each.filename).name}:{each.lineno}: {each.line}" for each in own), "")
