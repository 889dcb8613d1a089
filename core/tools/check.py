"""What ``midepoch check`` and ``midepoch inspect`` show on a terminal."""

from __future__ import annotations

import atexit
import importlib
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from midepoch.testing.examine import Examination
from midepoch.testing.laws import LAWS, judge
from midepoch.testing.page import make_page, take_pictures
from midepoch.testing.record import Settings, open_loader
from midepoch.testing.report import LawError, Report, Verdict
from midepoch.testing.standing import stand
from midepoch.testing.trials import TRIALS, try_promises

from .inspection import Contents, FoundState

__all__ = ["TargetError", "as_json", "examine", "find_target", "printable", "show_contents"]


class TargetError(Exception):
    """The function to check cannot be loaded. The message says why, and what to name instead."""


def find_target(target: str) -> Callable[..., Any]:
    """Find the function of ``package.module:name`` or ``folder/file.py:name``, seen from the current folder.

    Raises:
        TargetError: it does not exist, it cannot be called, or its module fails.
    """
    module_name, colon, name = target.rpartition(":")
    if not (colon and module_name and name):
        raise TargetError(f"{target!r} names no function: write package.module:make_loader, or file.py:make_loader")
    file = None
    folder = Path.cwd()
    if module_name.endswith(".py"):
        file = Path(module_name).resolve()
        if not file.is_file():
            raise TargetError(f"there is no file {module_name}: name one, or package.module:make_loader")
        folder, module_name = file.parent, file.stem
    # The spawned processes also import it by this name and path, so the folder must come first there.
    sys.path[:] = [str(folder), *(path for path in sys.path if path != str(folder))]
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise TargetError(
            f"{target!r} cannot be imported ({error}): run this in the module's folder, or install the module"
        ) from error
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"{module_name} fails when it is imported: {type(error).__name__}: {error}; fix it, and put what a script "
            'does under `if __name__ == "__main__":`'
        ) from error
    imported = getattr(found, "__file__", None)
    if file is not None and (imported is None or Path(imported).resolve() != file):
        raise TargetError(
            f"there is another module {module_name!r} ({imported or 'of Python itself'}), which Python imports instead "
            f"of {file}: give the file another name"
        )
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise TargetError(f"{module_name} has no function {name!r}: name one that builds a new loader at each call")
    function: Callable[..., Any] = found
    return function


def examine(
    settings: Settings, target: str, laws: list[str] | None, page: Path | None, seconds: float = 0.0
) -> Report:
    """Examine a loader, with a progress bar and tables. Write the page if one is asked for.

    Args:
        settings: of the examination.
        target: the loader's name.
        laws: to be examined; None for all. Trials belong to the law 'honesty'.
        page: where to write the page; None for none.
        seconds: that trials may take; 0 for no trials.

    Raises:
        ValueError: a law is unknown, or the loader has no batch.
        TargetError: the function builds no loader, or one without a state.
        OSError: the page cannot be written.
    """
    console = _console()
    examination = Examination(settings)
    _try_out(examination, target)
    draft = None if page is None else _draft(page)  # find out before the long examination whether it can be written
    verdicts: list[Verdict] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    trials: list[Verdict] = []
    names = [name for name in LAWS if laws is None or name in laws]
    tries = [each.name for each in TRIALS] if seconds > 0 and "honesty" in names else []
    reached = judge(examination, laws)
    trying = try_promises(examination, seconds)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(_WHOLE, total=1 + len(tries) + len(names))
        failed = _run_through(examination)
        progress.advance(task)
        if failed is not None:
            verdicts, names, tries = [failed], [], []
        for group, source, into in ((tries, trying, trials), (names, reached, verdicts)):
            for name in group:
                progress.update(task, description=name)
                into.append(next(source))
                progress.advance(task)
        promises = stand(examination, trials, verdicts) if trials else ()
        report = Report(tuple(verdicts), tuple(trials), promises)
    for verdict in [each for each in report.trials if each.error is not None][:1]:  # others follow from the first
        console.print(_text(f"{target} does not keep what it promises ({verdict.law})", "bold red"), soft_wrap=True)
        console.print(_text(str(verdict.error)), soft_wrap=True)
    if report.promises:
        console.print(_promises_table(target, report))
        console.print(_verdicts_table("", "trial", report.trials))
    console.print(_verdicts_table("" if report.promises else target, "law", report.verdicts))
    for verdict in report.verdicts:
        if verdict.error is not None:
            console.print(_text(str(verdict.error)), soft_wrap=True)
    if page is not None and draft is not None:
        with console.status("drawing what each rank received"):
            text = make_page(target, report, take_pictures(examination), _versions())
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(page)
        told = f"The laws, and which samples each rank received around each cut: {page}"
        console.print(_text(told), soft_wrap=True)
    return report


def _draft(page: Path) -> Path:
    """A temporary file beside the page, which shows that the page can be written."""
    if page.is_dir():
        raise TargetError(f"{page} is a folder: name a file for the page, such as {page / 'report.html'}")
    draft = page.with_name(f".{page.name}.draft")
    draft.touch()
    atexit.register(draft.unlink, missing_ok=True)
    return draft


def _try_out(examination: Examination, target: str) -> None:
    examination.begin("", "", "")
    try:
        kind, lacks = examination.run([(0, _methods_lacking, (examination.settings, examination.options()))])[0]
    except LawError as error:
        raise TargetError(f"{target} builds no loader: fix it, or give its parameters defaults\n{error.got}") from None
    if lacks:
        raise TargetError(
            f"{target} builds a {kind}, which has no {' and no '.join(lacks)}: return midepoch.wrap(loader, seed=0), "
            "or a loader with its own state"
        )


_WHOLE = "uninterrupted"


def _run_through(examination: Examination) -> Verdict | None:
    """None, unless the loader fails in an uninterrupted run: then every law would fail in the same way."""
    begun = time.perf_counter()
    examination.begin(
        _WHOLE,
        "an error of the loader or of its dataset, which has nothing to do with resuming",
        "fix it until whole epochs run, also with a state_dict() after each batch; then check again",
    )
    try:
        examination.whole()
        examination.observed()
    except LawError as error:
        return Verdict(_WHOLE, "failed", error.got.splitlines()[0], error, time.perf_counter() - begun)
    return None


def _methods_lacking(settings: Settings, options: dict[str, Any]) -> tuple[str, list[str]]:
    with open_loader(settings, options) as loader:
        methods = ("__iter__", "state_dict", "load_state_dict")
        return type(loader).__name__, [name for name in methods if not callable(getattr(loader, name, None))]


_COLOURS = {
    "holds": "green", "failed": "bold red", "proved at each resume": "green", "tried": "green", "not kept": "bold red",
}  # fmt: skip


def _promises_table(target: str, report: Report) -> Table:
    table = Table(title=_text(target), box=box.SIMPLE, title_justify="left")
    for name in ("promise", "rests on", ""):
        table.add_column(name, no_wrap=bool(name))
    for promise in report.promises:
        table.add_row(
            promise.name, Text(promise.standing, _COLOURS.get(promise.standing, "")), _text(promise.reason)
        )
    return table


def _verdicts_table(title: str, kind: str, verdicts: Sequence[Verdict]) -> Table:
    table = Table(title=_text(title) if title else None, box=box.SIMPLE, title_justify="left")
    for name in (kind, "verdict", "epoch", "batch", ""):
        table.add_column(name, no_wrap=name in (kind, "verdict"))
    for verdict in verdicts:
        error = verdict.error
        table.add_row(
            verdict.law,
            Text(verdict.status, _COLOURS.get(verdict.status, "")),
            "" if error is None or error.epoch is None else str(error.epoch),
            "" if error is None or error.batch is None else str(error.batch),
            _text(verdict.reason),
        )
    return table


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
