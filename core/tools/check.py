"""``midepoch check``: examines a loader, wrapped and bare, and says what it found."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..testing.diagnosis import UNINTERRUPTED, Diagnosis, diagnose
from ..testing.examine import Examination
from ..testing.laws import LAWS, judge
from ..testing.naming import Naming
from ..testing.pictures import take_pictures
from ..testing.record import Settings, experiment
from ..testing.report import HOLDS, LawError, Outcome, Report, Verdict, reach
from ..testing.sides import answer_all
from ..testing.subjects import Nature, Subject, possible_variations, recognise
from ..testing.trials import TRIALS, stand, try_promises
from . import shown
from .targets import TargetError

__all__ = ["examine"]

_HEADINGS = {"bare": "without midepoch", "wrapped": "with midepoch.wrap(..., seed=0)", "given": "as it is"}
_OF_OURS = "with midepoch"  # the heading of what is wrapped already


def examine(
    settings: Settings, target: str, laws: list[str] | None, page: Path | None, trials: float, seconds: float,
    verbose: bool, tail_is_stated: bool, lenient: bool,
) -> bool:  # fmt: skip
    """Examine a loader, wrapped and bare, and show progress. Print the finding first, and write the page if asked.

    Args are those of the command, which also says their units. ``tail_is_stated``: the user says how ranks share the
    last samples, whatever the loader does. Returns whether the loader passes.

    Raises:
        ValueError: a law is unknown, or the loader has no batch.
        TargetError: the function builds no loader.
        OSError: the page cannot be written.
    """
    names = [name for name in LAWS if laws is None or name in laws]
    tries = [each.name for each in TRIALS] if trials > 0 and "honesty" in names else []
    asking = Examination(settings)
    judge(asking, laws)  # names an unknown law
    if page is not None and (page.is_dir() or not os.access(page.parent, os.W_OK)):
        raise TargetError(f"{page} cannot be written: name a file for the page in a folder that can be")
    with _progress(4 + len(tries) + len(names) + (page is not None)) as begin:
        begin("what it is")
        try:
            nature: Nature = asking.run([(0, recognise, (settings, asking.options()))])[0]
        except LawError as error:
            told = f"{target} builds no loader: fix it, or give its parameters defaults\n{error.got}"
            raise TargetError(told) from None
        sides = _sides(_fitted(settings, nature, tail_is_stated), nature)
        examination, begun = next(iter(sides.values())), time.monotonic()
        refused = bool(nature.refusal) and nature.side == "bare"
        begin("an uninterrupted run")
        through = reach(UNINTERRUPTED, partial(_run_through, examination, nature.refusal if refused else "", seconds))
        begin("cut, and continued")
        answers = {heading: answer_all(each) for heading, each in sides.items()}
        # The table reads from the left to the right: today, and with midepoch.
        comparison = dict(sorted(answers.items(), key=lambda side: side[0].startswith("with midepoch")))
        report = Report((through,))
        if through.error is None:
            report = _examine(examination, names, tries, trials, begun, seconds, begin)
        begin("which cause")
        title = f"midepoch.wrap refuses it: {nature.refusal}"
        diagnosis = Diagnosis(title, "bad") if refused else diagnose(examination, report)
        found = list(shown.finding(target, nature.kind, diagnosis, comparison))
        if page is not None:
            begin("pictures of each cut")
            # Of the other side, one picture is enough to see what is lost.
            pictures = {name: take_pictures(each, few=number > 0) for number, (name, each) in enumerate(sides.items())}
            text = shown.make_page(found, pictures, shown.grounds(report, verbose=True))
            page.write_text(text, encoding="utf-8", errors="backslashreplace")
    shown.show([*found, *shown.grounds(report, verbose)])
    if page is not None:
        shown.show([shown.as_text(f"The laws, and which samples the ranks received around each cut: {page}")])
    return report.holds and (lenient or diagnosis.tone == "good")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function that says on stderr what is tried now: each in a line, on a terminal in one that is wiped out."""
    begun, numbers, terminal = time.monotonic(), itertools.count(1), sys.stderr.isatty()

    def begin(name: str) -> None:
        told = f"{time.monotonic() - begun:4.0f} s: {name} ({next(numbers)} of {total})"
        print(f"{told:<50}" if terminal else told, end="\r" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield begin
    finally:
        if terminal:
            print(" " * 50, end="\r", file=sys.stderr, flush=True)


def _fitted(settings: Settings, nature: Nature, tail_is_stated: bool) -> Settings:
    """The settings, as the loader shares and names its samples."""
    settings = replace(settings, drop_last=settings.drop_last or nature.drop_last)
    if not tail_is_stated and nature.tail is not None:
        settings = replace(settings, tail=nature.tail)
    if nature.works_on_batches and settings.identify is None:
        settings = replace(settings, identify=Naming(blind=True), elastic_content=False)
    return settings


def _sides(settings: Settings, nature: Nature) -> dict[str, Examination]:
    """Heading -> examination; the side whose laws are examined comes first."""
    sides = [side for side in (nature.side, nature.other) if side is not None]
    subjects = [Subject(settings.make_loader, side, nature.derived, nature.samples) for side in sides]
    calls = [(process, experiment, (possible_variations, (settings, each))) for process, each in enumerate(subjects)]
    found: dict[str, Examination] = {}
    for side, subject, possible in zip(sides, subjects, Examination(settings).run(calls), strict=True):
        # What fails altogether is told by an uninterrupted run.
        subject = possible if isinstance(possible, Subject) else replace(subject, derived=())
        own = replace(settings, make_loader=subject)
        if found:
            own = replace(own, quick=True, epochs=1)
            if isinstance(own.identify, Naming):  # without `then`, the samples may have names
                own = replace(own, identify=None)
        heading = _OF_OURS if side == "given" and nature.other == "bare" else _HEADINGS[side]
        found[heading] = Examination(own)
    return found


def _examine(
    examination: Examination, names: list[str], tries: list[str], trials: float, begun: float, seconds: float,
    begin: Callable[[str], None],
) -> Report:  # fmt: skip
    """The verdicts of trials and laws."""
    tried: list[Verdict] = []
    verdicts: list[Verdict] = []
    reached, trying = judge(examination, names), try_promises(examination, trials)
    for group, source, into in ((tries, trying, tried), (names, reached, verdicts)):
        for name in group:
            if seconds and time.monotonic() - begun > seconds:
                into.append(Verdict(name, "not applicable", f"{shown.NOT_REACHED} {seconds:g} s", None, 0.0))
                continue
            begin(name)
            into.append(next(source))
    promises = stand(examination, tried, verdicts) if tried else ()
    return Report(tuple(verdicts), tuple(tried), promises)


def _run_through(examination: Examination, refusal: str, seconds: float) -> Outcome:
    """An uninterrupted run: if it fails, or midepoch refuses the source, every law would fail in the same way.

    If cutting its epochs everywhere would take more than an eighth of the time, one is cut at three places.
    """
    if refusal:
        raise LawError(
            UNINTERRUPTED, None, None, "a source that can be wrapped", refusal, "of what kind it is", "see above"
        )
    examination.begin(
        UNINTERRUPTED,
        "an error of the loader or of its dataset, which has nothing to do with resuming",
        "fix it until whole epochs run, also with a state_dict() after each batch; then check again",
    )
    examination.whole()
    asked = time.perf_counter()
    head = examination.observed()
    cuts = sum(len(part.batches) + 1 for part in head.passes[:-1])
    if seconds and cuts * (time.perf_counter() - asked) / len(head.passes) > seconds / 8:
        examination.settings = replace(examination.settings, quick=True, epochs=1)
    return HOLDS


