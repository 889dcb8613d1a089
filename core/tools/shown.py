"""What ``midepoch check`` and ``midepoch inspect`` show: on a terminal, or as a page."""

from __future__ import annotations

import io
import json
import platform
import sys
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..testing import items
from ..testing.diagnosis import UNINTERRUPTED, Diagnosis
from ..testing.pictures import Picture
from ..testing.report import Report, legend
from ..testing.sides import Answer, Comparison
from ..testing.worlds import some
from .inspection import Contents, FoundState

__all__ = [
    "NOT_REACHED", "as_json", "as_text", "finding", "grounds", "make_page", "printable", "show", "show_contents",
]  # fmt: skip

Part = Text | Table
NOT_REACHED = "not reached within"
"""How the reason of a trial or law begins that the time did not suffice for."""
_SHOWN = 240  # characters of a fact
_WIDTH = 140  # of a page, and where there is no terminal: rich would use 80, and break the tables' lines


def show(parts: Iterable[Part], console: Console | None = None) -> None:
    """Print these below each other."""
    if console is None:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(highlight=False, width=_WIDTH)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def printable(text: str) -> str:
    """Escape what a terminal would interpret or an encoding cannot write: the text may come from anyone's file."""
    shown = "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def as_text(words: str, style: str = "") -> Text:
    """The words as they are, without rich's markup."""
    return Text(printable(words), style)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], fixed: int = 0) -> Table:
    """A table in which the first ``fixed`` columns are not wrapped."""
    table = Table(box=box.SIMPLE)
    for number, heading in enumerate(headings):
        table.add_column(as_text(heading), no_wrap=number < fixed)
    for row in rows:
        table.add_row(*(each if isinstance(each, Text) else as_text(each) for each in row))
    return table


# --- check --------------------------------------------------------------------------------------------------------

_TONES = {"good": "green", "warn": "bold yellow", "bad": "bold red", "other": ""}
_WORDS = {
    "holds": "hold", "failed": "fail", "refused clearly": "refused clearly", "not promised": "not promised",
    "not applicable": "do not apply", "not reached": "not reached",
}  # fmt: skip
_COLOURS = {
    "holds": "green", "failed": "bold red", "proved at each resume": "green", "tried": "green", "not kept": "bold red",
}  # fmt: skip


def finding(target: str, kind: str, diagnosis: Diagnosis, comparison: Comparison) -> Iterator[Part]:
    """What is wrong, and the table of both sides."""
    yield as_text(f"{target} ({kind})")
    yield as_text(diagnosis.title, _TONES[diagnosis.tone])
    for label, text in diagnosis.facts:
        yield as_text(f"  {label:<10} {text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'}")
    if counted := diagnosis.counted:
        yield as_text(f"{len(counted)} more fail with it: {', '.join(counted)}. Mend this first, then check again.")
    for error in diagnosis.others:
        where = f" at {error.place}" if error.place else ""
        told = f"Also: the law '{error.law}' is broken{where}: {error.got.splitlines()[0]}; {error.cure}"
        yield as_text(told[: 2 * _SHOWN])
    untold = Answer("-", "other")  # what one side only answers is open on the others
    questions = dict.fromkeys(question for answers in comparison.values() for question in answers)
    rows: list[list[str | Text]] = []
    for each in questions:
        answers = [answers.get(each, untold) for answers in comparison.values()]
        rows.append([each, *(as_text(answer.text, _TONES[answer.tone]) for answer in answers)])
    yield _table(("", *comparison), rows)


def grounds(report: Report, verbose: bool) -> Iterator[Part]:
    """What the finding rests on: in a few lines, or each promise, trial and law with its reason, and tracebacks."""
    verdicts = [*report.trials, *report.verdicts]
    by_status = _grouped(
        ("not reached" if each.reason.startswith(NOT_REACHED) else each.status, each.law) for each in verdicts
    )
    if UNINTERRUPTED not in by_status.get("failed", ()):
        counts = []
        for status in (each for each in _WORDS if each in by_status):
            named = "" if status in ("holds", "failed") else f" ({', '.join(by_status[status])})"
            counts.append(f"{len(by_status[status])} {_WORDS[status]}{named}")
        yield as_text(f"Laws and trials: {'; '.join(counts)}.")
    if "not reached" in by_status:
        yield as_text("Give more time (--seconds 300, or 0 for no limit) to have the others examined.")
    if report.promises:
        standings = _grouped((each.standing, each.name) for each in report.promises)
        yield as_text("Promises: " + "; ".join(f"{each}: {', '.join(of)}" for each, of in standings.items()) + ".")
    if not verbose:
        yield as_text("--verbose shows each law with its reason, and tracebacks; --report FILE.html draws them.")
        return
    if report.promises:
        promises = [(each.name, _coloured(each.standing), each.reason) for each in report.promises]
        yield _table(("promise", "rests on", ""), promises, fixed=2)
    rows = [
        (each.law, _coloured(each.status), each.error.place if each.error else "", each.reason, f"{each.seconds:.2f}")
        for each in verdicts
    ]
    yield _table(("law or trial", "verdict", "where", "", "seconds"), rows, fixed=2)
    if meaning := legend(verdicts):
        yield as_text(meaning)
    for error in report.failures:
        yield as_text(str(error))


def _coloured(word: str) -> Text:
    return Text(word, _COLOURS.get(word, ""))


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, name in pairs:
        found.setdefault(key, []).append(name)
    return found


# --- the page -----------------------------------------------------------------------------------------------------

_COLUMNS = """\
Each column is a sample, in the order of a run on one rank; of a long epoch, it is several. Dark blue: before the cut;
light blue: after it; red: never; orange: too often. If other numbers of ranks have another order, dark and light are
mixed. If all ranks must have equally many batches, some samples are repeated at an epoch's end (tail="pad")."""
_KINDS = {"": "", "before": "#3b6fb6", "after": "#7fb3e6", "repeated": "#e39a1c", "lost": "#d0202b"}
"""What became of a sample -> its colour. If a column is several samples, the last of these kinds is shown."""
_MOST_COLUMNS = 110


def make_page(
    found: Iterable[Part], pictures: Mapping[str, Iterable[Sequence[Picture]]], rests_on: Iterable[Part]
) -> str:
    """One HTML file without script or link, of `finding`, of the `take_pictures` of each side, and of `grounds`."""
    console = Console(record=True, file=io.StringIO(), width=_WIDTH, highlight=False)
    show(found, console)
    show([as_text("Which samples the ranks received", "bold"), as_text(_COLUMNS)], console)
    for heading, taken in pictures.items():
        show([Text(), as_text(heading, "bold")], console)
        drawings = [line for cuts in taken for line in _drawing(cuts)]
        show(drawings or [as_text("Nothing to draw: no uninterrupted run, or no place to cut.")], console)
    versions = f"midepoch {version('midepoch')}, torch {torch.__version__}, Python {platform.python_version()}"
    show([Text(), as_text("What it rests on", "bold")], console)
    show([*rests_on, as_text(f"{versions}; {time.strftime('%Y-%m-%d %H:%M')}")], console)
    return console.export_html(inline_styles=True)


def _drawing(cuts: Sequence[Picture]) -> Iterator[Text]:
    """Every cut as a row, below what became of the samples at the worst of them."""
    before, after = ("1 rank" if count == 1 else f"{count} ranks" for count in cuts[0].worlds)
    yield Text()
    title = f"epoch {cuts[0].epoch}, {before} before and {after} after"
    for problem, where in _grouped((each.problem, str(each.cut)) for each in cuts if each.problem).items():
        yield as_text(f"{title}, cut after {', '.join(where)} batches: {problem[:1000]}")
    drawn = [picture for picture in cuts if not picture.problem]
    if not drawn:
        return
    lost, repeated = (max((getattr(each, name) for each in drawn), key=len) for name in ("lost", "repeated"))
    worst = f"at worst {len(lost)} lost{_named(lost)} and {len(repeated)} repeated{_named(repeated)}"
    told = f"{title}: {len(drawn)} cuts of {len(drawn[0].order)} samples: {worst}"
    yield as_text(told, _TONES["bad" if lost else "warn" if repeated else "good"])
    severity = list(_KINDS)
    for each in drawn:
        kinds = dict.fromkeys(each.after, "after") | dict.fromkeys(each.before, "before")
        kinds |= dict.fromkeys(each.repeated, "repeated") | dict.fromkeys(each.lost, "lost")
        row = Text(f"after {each.cut:<12}")
        step = -(-len(each.order) // _MOST_COLUMNS)
        for start in range(0, len(each.order), step):
            kind = max((kinds.get(sample, "") for sample in each.order[start : start + step]), key=severity.index)
            row.append("█" if kind else " ", _KINDS[kind])
        yield row


def _named(samples: Sequence[Hashable]) -> str:
    """Their names. Of a sample that nothing but its content names there is a digest, which says nothing to anyone."""
    return f" ({some(samples)})" if samples and not any(map(items.is_digest, samples)) else ""


# --- inspect ------------------------------------------------------------------------------------------------------


def show_contents(contents: Contents) -> None:
    """Print the states, and what is damaged."""
    facts = [f", {name} {' '.join(of) if isinstance(of, list) else of}" for name, of in contents.facts.items()]
    told = f"{contents.path}: {contents.kind}, saved {_date(contents.saved)}{''.join(facts)}"
    parts: list[Part] = [as_text(told)]
    parts += [as_text(f"damaged: {problem}", "bold red") for problem in contents.problems]
    for entry in contents.states:
        parts += _state_lines(entry, contents.path)
    if not contents.states:
        parts.append(as_text("It contains no state of a loader that midepoch wrapped."))
    show(parts)


def _state_lines(entry: FoundState, path: Path) -> Iterator[Text]:
    state = entry.state
    inside = "" if entry.file == path else f"{entry.file.relative_to(path)} "
    yield as_text(f"{inside}{entry.name}" or "state", "bold")
    position, size = state.get("position"), state.get("size")
    told = _short(position)
    if not entry.problem and size and isinstance(position, int):
        told = f"{position:,} of {size:,} ({position / size:.1%})"
    rows = {
        "backend": _short(state.get("adapter")),
        "epoch": _short(state.get("epoch")),
        "position": told,
        "saved on": f"{_short(state.get('world_size'))} ranks, batch size {_short(state.get('batch_size'))} each",
        "seed": _short(state.get("seed")),
    }
    try:
        rows |= {f"  {str(name)[:40]}": _short(value) for name, value in json.loads(state["fingerprint"]).items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        rows["  fingerprint"] = _short(state.get("fingerprint"))
    if detail := state.get("detail"):
        rows["detail"] = f"{len(str(detail)):,} characters of the backend's own"
    for name, value in rows.items():
        yield as_text(f"  {name:<14} {value}")
    yield as_text(f"  {'checksum':<14} {entry.problem or 'holds'}", "bold red" if entry.problem else "green")


def _short(value: Any) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 1 << 128 else "an impossibly large number"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _date(moment: float) -> str:
    known = 0 <= moment < 1 << 40  # what a damaged file says may be any number
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if known else "at an unknown time"


def as_json(contents: Contents) -> str:
    """The same as JSON, for programs."""
    states = []
    for entry in contents.states:
        state = {
            str(name): value if value is None or isinstance(value, str | bool | int | float) else repr(value)[:200]
            for name, value in entry.state.items()
        }
        keys = list(entry.keys)
        states.append({"file": str(entry.file), "keys": keys, "problem": entry.problem, "state": state})
    told = {"path": str(contents.path), "kind": contents.kind, "saved": contents.saved, **contents.facts}
    return json.dumps({**told, "problems": list(contents.problems), "states": states}, indent=1)


