"""What ``midepoch check`` and ``midepoch inspect`` show on a terminal."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from rich import box
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from ..testing.diagnosis import UNINTERRUPTED, Diagnosis, diagnose
from ..testing.examine import Examination
from ..testing.laws import LAWS, judge
from ..testing.naming import Naming
from ..testing.page import Picture, make_page, take_pictures
from ..testing.record import Settings, experiment
from ..testing.report import LawError, Report, Verdict, legend
from ..testing.sides import Comparison, answer_all
from ..testing.standing import stand
from ..testing.subjects import Nature, Subject, possible_variations, recognise
from ..testing.trials import TRIALS, try_promises
from .inspection import Contents, FoundState
from .targets import TargetError

__all__ = ["as_json", "examine", "printable", "show_contents"]

_HEADINGS = {"bare": "without midepoch", "wrapped": "with midepoch.wrap(..., seed=0)", "given": "as it is"}
_OF_OURS = "with midepoch"  # the heading of what is wrapped already
_SHOWN = 240  # characters of a fact on a terminal


def examine(
    settings: Settings,
    target: str,
    laws: list[str] | None,
    page: Path | None,
    trials: float = 0.0,
    seconds: float = 0.0,
    verbose: bool = False,
    tail_is_stated: bool = True,
    lenient: bool = False,
) -> bool:
    """Examine a loader, wrapped and bare, and show progress. Print the finding first, and write the page if asked.

    Args:
        settings: of the examination.
        target: the loader's name.
        laws: to be examined; None for all. Trials belong to the law 'honesty'.
        page: where to write the page; None for none.
        trials: seconds that trials may take; 0 for no trials.
        seconds: after which no other trial or law is begun; 0 for no limit.
        verbose: print each law's verdict and error too.
        tail_is_stated: the user says how ranks share the last samples, whatever the loader does.
        lenient: it suffices that a loader which is not exact says so.

    Returns:
        Whether the loader passes.

    Raises:
        ValueError: a law is unknown, or the loader has no batch.
        TargetError: the function builds no loader.
        OSError: the page cannot be written.
    """
    console = _console()
    names = [name for name in LAWS if laws is None or name in laws]
    tries = [each.name for each in TRIALS] if trials > 0 and "honesty" in names else []
    if laws is not None:
        judge(Examination(settings), laws)  # names an unknown law
    with _draft(page) as draft:  # find out before the long examination whether it can be written
        pictures: dict[str, list[list[Picture]]] = {}
        with _Bar(4 + len(tries) + len(names) + (page is not None)) as bar:
            bar.begin("what it is")
            nature = _recognise(settings, target)
            if not tail_is_stated and nature.tail is not None:
                settings = replace(settings, tail=nature.tail)
            settings = replace(settings, drop_last=settings.drop_last or nature.drop_last)
            if nature.works_on_batches and settings.identify is None:
                settings = replace(settings, identify=Naming(blind=True), elastic_content=False)
            sides = _sides(settings, nature)
            if nature.refusal and nature.side == "bare":
                report = Report((_refused(nature),))
                bar.begin("how it is resumed today")
                comparison = Comparison.of({heading: answer_all(each) for heading, each in sides.items()})
                diagnosis = Diagnosis(f"midepoch.wrap refuses it: {nature.refusal}", "bad")
            else:
                report, comparison = _examine(sides, names, tries, trials, seconds, bar)
                bar.begin("which cause")
                diagnosis = diagnose(next(iter(sides.values())), report)
            if page is not None:
                bar.begin("pictures of each cut")
                # Of the other side, one picture is enough to see what is lost.
                for number, (heading, each) in enumerate(sides.items()):
                    pictures[heading] = take_pictures(each, few=number > 0)
        for part in _told(target, nature, diagnosis, comparison, report, verbose):
            console.print(part, soft_wrap=isinstance(part, Text))
        if page is not None and draft is not None:
            text = make_page(target, diagnosis, comparison, report, pictures, _versions())
            draft.write_text(text, encoding="utf-8", errors="backslashreplace")
            draft.replace(page)
            told = f"The laws, and which samples each rank received around each cut: {page}"
            console.print(_text(told), soft_wrap=True)
    return report.holds and (lenient or diagnosis.tone == "good")


def _is_late(verdict: Verdict) -> bool:
    return verdict.reason.startswith(_NOT_REACHED)


class _Bar:
    """What is being tried, on stderr: as a progress bar on a terminal, as a line every ten seconds elsewhere."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, disable=None, leave=False, bar_format="{desc:<24} {bar} {n_fmt}/{total_fmt}")
        self._total = total
        self._stage = ""
        self._number = 0
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._write_lines, args=(sys.stderr,), daemon=True)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        self._ended.set()
        if self._lines.is_alive():
            self._lines.join()

    def begin(self, name: str) -> None:
        """Name what is tried now; what was tried before is done."""
        if self._number:
            self._bar.update()
        self._number += 1
        self._stage = name
        self._bar.set_description_str(name)
        if self._bar.disable and self._number == 1:
            self._lines.start()

    def _write_lines(self, stderr: TextIO) -> None:
        # A thread, since one stage can take longer than ten seconds: a log shows at any time what is being tried.
        begun = time.monotonic()
        while True:
            seconds = time.monotonic() - begun
            print(f"{seconds:4.0f} s: {self._stage} ({self._number} of {self._total})", file=stderr, flush=True)
            if self._ended.wait(_BETWEEN_LINES):
                return


_BETWEEN_LINES = 10.0  # seconds between two lines of progress where there is no terminal


def _recognise(settings: Settings, target: str) -> Nature:
    examination = Examination(settings)
    examination.begin("", "", "")
    try:
        nature: Nature = examination.run([(0, recognise, (settings, examination.options()))])[0]
    except LawError as error:
        raise TargetError(f"{target} builds no loader: fix it, or give its parameters defaults\n{error.got}") from None
    return nature


def _sides(settings: Settings, nature: Nature) -> dict[str, Examination]:
    """Heading -> examination; the side whose laws are examined comes first."""
    sides = [side for side in (nature.side, nature.other) if side is not None]
    subjects = [Subject(settings.make_loader, side, nature.derived, nature.samples) for side in sides]
    calls = [(process, experiment, (possible_variations, (settings, each))) for process, each in enumerate(subjects)]
    examination = Examination(settings)
    examination.begin("", "", "")
    found: dict[str, Examination] = {}
    for side, subject, possible in zip(sides, subjects, examination.run(calls), strict=True):
        # What fails altogether is told by an uninterrupted run.
        subject = possible if isinstance(possible, Subject) else replace(subject, derived=())
        own = replace(settings, make_loader=subject)
        if len(found):
            own = replace(own, quick=True, epochs=1)
            if isinstance(own.identify, Naming):  # without `then`, the samples may have names
                own = replace(own, identify=None)
        heading = _OF_OURS if side == "given" and nature.other == "bare" else _HEADINGS[side]
        found[heading] = Examination(own)
    return found


def _examine(
    sides: dict[str, Examination], names: list[str], tries: list[str], trials: float, seconds: float, bar: _Bar
) -> tuple[Report, Comparison]:
    """The verdicts of trials and laws about the first side, and what happens on each side."""
    examination = next(iter(sides.values()))
    begun = time.monotonic()
    bar.begin("an uninterrupted run")
    failed = _run_through(examination, seconds)
    bar.begin("cut, and continued")
    answers = {heading: answer_all(each) for heading, each in sides.items()}
    # The table reads from the left to the right: today, and with midepoch.
    comparison = Comparison.of(dict(sorted(answers.items(), key=lambda side: side[0].startswith("with midepoch"))))
    if failed is not None:
        return Report((failed,)), comparison
    tried: list[Verdict] = []
    verdicts: list[Verdict] = []
    reached, trying = judge(examination, names), try_promises(examination, trials)
    for group, source, into in ((tries, trying, tried), (names, reached, verdicts)):
        for name in group:
            if seconds and time.monotonic() - begun > seconds:
                into.append(Verdict(name, "not applicable", f"{_NOT_REACHED} {seconds:g} s", None, 0.0))
                continue
            bar.begin(name)
            into.append(next(source))
    promises = stand(examination, tried, verdicts) if tried else ()
    return Report(tuple(verdicts), tuple(tried), promises), comparison


_NOT_REACHED = "not reached within"


@contextlib.contextmanager
def _draft(page: Path | None) -> Iterator[Path | None]:
    """A temporary file beside the page, which shows that the page can be written. None for no page."""
    if page is None:
        yield None
        return
    if page.is_dir():
        raise TargetError(f"{page} is a folder: name a file for the page, such as {page / 'report.html'}")
    draft = page.with_name(f".{page.name}.draft")
    draft.touch()
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _run_through(examination: Examination, seconds: float) -> Verdict | None:
    """None, unless the loader fails in an uninterrupted run: then every law would fail in the same way.

    If cutting its epochs everywhere would take more than an eighth of the time, one is cut at three places.
    """
    begun = time.perf_counter()
    examination.begin(
        UNINTERRUPTED,
        "an error of the loader or of its dataset, which has nothing to do with resuming",
        "fix it until whole epochs run, also with a state_dict() after each batch; then check again",
    )
    try:
        examination.whole()
        asked = time.perf_counter()
        head = examination.observed()
    except LawError as error:
        return Verdict(UNINTERRUPTED, "failed", error.got.splitlines()[0], error, time.perf_counter() - begun)
    cuts = sum(len(part.batches) + 1 for part in head.passes[:-1])
    if seconds and cuts * (time.perf_counter() - asked) / len(head.passes) > seconds / 8:
        examination.settings = replace(examination.settings, quick=True, epochs=1)
    return None


def _refused(nature: Nature) -> Verdict:
    error = LawError(
        UNINTERRUPTED, None, None, "a source that can be wrapped", nature.refusal, "of what kind it is", "see above"
    )
    return Verdict(UNINTERRUPTED, "failed", nature.refusal, error, 0.0)


# --- what is printed ----------------------------------------------------------------------------------------------


_TONES = {"good": "green", "warn": "bold yellow", "bad": "bold red", "other": ""}
_COLOURS = {
    "holds": "green", "failed": "bold red", "proved at each resume": "green", "tried": "green", "not kept": "bold red",
}  # fmt: skip


def _told(
    target: str, nature: Nature, diagnosis: Diagnosis, comparison: Comparison, report: Report, verbose: bool
) -> list[Text | Table]:
    """The finding, the table of both sides, and in a few lines what the verdict rests on."""
    parts: list[Text | Table] = [
        _text(f"{target} ({nature.kind})"), _text(diagnosis.title, _TONES[diagnosis.tone])
    ]  # fmt: skip
    if diagnosis.facts:
        parts.append(_facts_table(diagnosis))
    if diagnosis.together:
        parts.append(_text(f"{diagnosis.together}. Mend this first, then check again."))
    parts += [_text(_briefly(error)) for error in diagnosis.others]
    parts.append(_comparison_table(comparison))
    parts += [_text(line) for line in _summary(report)]
    if verbose:
        if report.promises:
            parts.append(_promises_table(report))
        parts.append(_verdicts_table([*report.trials, *report.verdicts]))
        if meaning := legend([*report.trials, *report.verdicts]):
            parts.append(_text(meaning))
        parts += [_text(str(error)) for error in report.failures]
    return parts


def _briefly(error: LawError) -> str:
    where = f" at {error.place}" if error.place else ""
    return f"Also: the law '{error.law}' is broken{where}: {error.got.splitlines()[0]}; {error.cure}"[: 2 * _SHOWN]


def _facts_table(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, text in diagnosis.facts:
        table.add_row(label, _text(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."))
    return table


def _table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], fixed: int = 0) -> Table:
    """A table in which the first ``fixed`` columns are not wrapped."""
    table = Table(box=box.SIMPLE)
    for number, heading in enumerate(headings):
        table.add_column(_text(heading), no_wrap=number < fixed)
    for row in rows:
        table.add_row(*(each if isinstance(each, Text) else _text(each) for each in row))
    return table


def _comparison_table(comparison: Comparison) -> Table:
    rows: list[list[str | Text]] = [
        [question, *(_text(each.text, _TONES[each.tone]) for each in answers)] for question, answers in comparison.rows
    ]
    return _table(("", *comparison.headings), rows)


def _summary(report: Report) -> list[str]:
    """How many laws hold, and what the promises rest on."""
    told = []
    by_status: dict[str, list[str]] = {}
    for verdict in (*report.trials, *report.verdicts):
        late = _is_late(verdict)
        by_status.setdefault("not reached" if late else verdict.status, []).append(verdict.law)
    counts = [
        f"{len(found)} {words}{'' if status in ('holds', 'failed') else f' ({_listed(found)})'}"
        for status, words in _WORDS.items()
        if (found := by_status.get(status))
    ]
    if UNINTERRUPTED not in by_status.get("failed", ()):
        told.append(f"Laws and trials: {'; '.join(counts)}.")
    if "not reached" in by_status:
        told.append("Give more time (--seconds 300, or 0 for no limit) to have the others examined.")
    standings: dict[str, list[str]] = {}
    for promise in report.promises:
        standings.setdefault(promise.standing, []).append(promise.name)
    if standings:
        told.append("Promises: " + "; ".join(f"{each}: {_listed(of)}" for each, of in standings.items()) + ".")
    if told or report.failures:
        told.append("--verbose shows each law with its reason, and tracebacks; --report FILE.html draws them.")
    return told


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


_WORDS = {
    "holds": "hold", "failed": "fail", "refused clearly": "refused clearly", "not promised": "not promised",
    "not applicable": "do not apply", "not reached": "not reached",
}  # fmt: skip


def _promises_table(report: Report) -> Table:
    rows = [(each.name, _coloured(each.standing), each.reason) for each in report.promises]
    return _table(("promise", "rests on", ""), rows, fixed=2)


def _verdicts_table(verdicts: Iterable[Verdict]) -> Table:
    rows: list[list[str | Text]] = []
    for each in verdicts:
        place = (None, None) if each.error is None else (each.error.epoch, each.error.batch)
        where = ("" if number is None else str(number) for number in place)
        rows.append([each.law, _coloured(each.status), *where, each.reason])
    return _table(("law or trial", "verdict", "epoch", "batch", ""), rows, fixed=2)


def _coloured(word: str) -> Text:
    return Text(word, _COLOURS.get(word, ""))


def _versions() -> str:
    from importlib.metadata import version

    return f"midepoch {version('midepoch')}, torch {torch.__version__}, Python {platform.python_version()}"


# --- inspect ----------------------------------------------------------------------------------------------------


def show_contents(contents: Contents) -> None:
    """Print a table for each state, and what is damaged."""
    console = _console()
    facts = "".join(
        f", {name} {value if not isinstance(value, list) else ' '.join(value)}"
        for name, value in contents.facts.items()
    )
    console.print(_text(f"{contents.path}: {contents.kind}, saved {_ago(contents.saved)}{facts}"), soft_wrap=True)
    for problem in contents.problems:
        console.print(_text(f"damaged: {problem}", "bold red"), soft_wrap=True)
    for entry in contents.states:
        console.print(_state_table(entry, contents.path))
    if not contents.states:
        console.print("It contains no state of a loader that midepoch wrapped.")


def _state_table(entry: FoundState, path: Path) -> Table:
    state = entry.state
    inside = "" if entry.file == path else f"{entry.file.relative_to(path)} "
    table = Table(
        title=_text(f"{inside}{entry.name}" or "state"), box=box.SIMPLE, show_header=False, title_justify="left"
    )
    table.add_column(style="dim")
    table.add_column()
    position, size = state.get("position"), state.get("size")
    rows: list[tuple[str, Any]] = [("backend", _short(state.get("adapter"))), ("epoch", _short(state.get("epoch")))]
    if not entry.problem and size and isinstance(position, int):
        rows.append(("", ProgressBar(total=size, completed=position, width=40)))
        rows.append(("position", f"{position:,} of {size:,} ({position / size:.1%})"))
    else:
        rows.append(("position", _short(position)))
    rows += [
        ("saved on", f"{_short(state.get('world_size'))} ranks, batch size {_short(state.get('batch_size'))} each"),
        ("seed", _short(state.get("seed"))),
    ]
    rows += [(f"  {name}", value) for name, value in _fingerprint(state.get("fingerprint")).items()]
    detail = state.get("detail")
    if detail:
        rows.append(("detail", f"{len(str(detail)):,} characters of the backend's own"))
    rows.append(("checksum", Text("holds", "green") if not entry.problem else _text(entry.problem, "bold red")))
    for name, value in rows:
        table.add_row(_text(name), _text(value) if isinstance(value, str) else value)
    return table


def _fingerprint(text: Any) -> dict[str, str]:
    try:
        parsed = json.loads(text)
        return {str(name)[:40]: _short(value) for name, value in parsed.items()}
    except (TypeError, ValueError, AttributeError, RecursionError):
        return {"fingerprint": _short(text)}


def _short(value: Any) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 1 << 128 else "an impossibly large number"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _ago(moment: float) -> str:
    if not 0 <= moment < 1 << 40:
        return "at an unknown time"
    seconds = time.time() - moment
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{date}, {count} {name}{'s' if count > 1 else ''} ago"
    return f"{date}, {'just now' if seconds >= 0 else 'in the future'}"


def as_json(contents: Contents) -> str:
    """The same as JSON, for programs."""
    return json.dumps(
        {
            "path": str(contents.path),
            "kind": contents.kind,
            "saved": contents.saved,
            **contents.facts,
            "problems": list(contents.problems),
            "states": [
                {
                    "file": str(entry.file),
                    "keys": list(entry.keys),
                    "problem": entry.problem,
                    "state": {str(name): _plain(value) for name, value in entry.state.items()},
                }
                for entry in contents.states
            ],
        },
        indent=1,
    )


def printable(text: str) -> str:
    """Escape what a terminal would interpret or an encoding cannot write: the text may come from anyone's file."""
    shown = "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | bool | int | float) else repr(value)[:200]


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)  # rich would use 80, and break the table's lines
    return console
