"""How loaders of third-party packages run wrapped, and resume: two epochs, cut in three places, continued elsewhere.

Run ``make wild``, which installs the packages into folders of their own first. Writes docs/sources.json, and from it
the table in docs/sources.md. Each verdict follows from the run: another process, under other global seeds, must give
the rest of each epoch bit for bit. With ``--only``, rows whose name has one of its words in it are run again, and the
others stay as docs/sources.json has them. With ``--undisturbed``, only the field of that name is made again.
Both files are written after each row, so that what was found stays where a run is ended.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from wild_row import Row
from wild_rows import ROWS

ROOT = Path(__file__).parents[1]
FOLDERS = ROOT / ".venv" / "wild"
KEPT = ROOT / "docs" / "sources.json"
PAGE = ROOT / "docs" / "sources.md"
BEGIN, END = "<!-- loaders -->\n", "<!-- end of loaders -->"
LIMIT = 240  # seconds of one process


class Verdict(NamedTuple):
    """What came of one row.

    Attributes:
        kind: in words; WRONG where a resume gave something else and nobody was told.
        why: the words of a refusal or a warning, or the answer of `capabilities`.
        samples: whether an epoch has the samples of the bare loader.
        ranks: whether two ranks continued what one had begun.
        undisturbed: whether three epochs without a resume are those of the bare loader.
        difference: from it.
    """

    kind: str
    why: str = ""
    samples: str = "-"
    ranks: str = "-"
    wrapping: float = 0.0  # seconds
    undisturbed: str = "-"
    difference: str = ""


WRONG = "**silently wrong**"
DIFFERS = "**differs**"


def folder_of(row: Row) -> Path | None:
    folder = FOLDERS / row.packages[0] if row.packages else None
    return folder if folder is not None and folder.is_dir() else None


def run(job: str, name: str, row: Row, scratch: Path, *more: Path) -> dict[str, Any]:
    """What one process does with a row."""
    file = scratch / f"{job}.json"
    folder = folder_of(row)
    path = os.pathsep.join([*([str(folder)] if folder else []), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("wild_rows.py")), job, name, str(file), *map(str, more)]
    with (scratch / f"{job}.log").open("w") as log:
        try:
            ended = subprocess.run(
                command, cwd=scratch, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log, timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"nothing came within {LIMIT} s", "told": []}
    if not file.exists():
        return {"error": f"the process ended with {ended.returncode}", "told": []}
    return dict(json.loads(file.read_text()))


def judge(name: str) -> Verdict:
    """Run one row."""
    row = ROWS[name]
    if row.tests:
        return tested(row)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        alone = row.identify is not None and not row.drawn  # there is something to compare
        bare = run("bare", name, row, scratch) if alone else {}
        saved = run("save", name, row, scratch)
        if "error" in bare and not ours(saved.get("error", "")):
            return Verdict("could not run", bare["error"])
        if "error" in saved:
            return Verdict("refused" if ours(saved["error"]) else "could not run", saved["error"])
        resumed = run("resume", name, row, scratch, scratch / "save.json")
    return verdict(row, bare, saved, resumed)._replace(wrapping=saved["wrapping"])


def compare(name: str) -> tuple[str, str]:
    """Of a row that is not cut: `Verdict.undisturbed` and `Verdict.difference`."""
    if ROWS[name].tests:
        return "-", "its tests compare it"
    if "world" in ROWS[name].options:
        return "-", "one rank of many has no plain loader to itself"
    with tempfile.TemporaryDirectory() as folder:
        found = run("undisturbed", name, ROWS[name], Path(folder))
    words = {"holds": "same", "failed": DIFFERS, "refused clearly": "refused"}
    why = found.get("why", "") or found.get("error", "")
    return words.get(found.get("status", ""), "-"), why


def with_comparison(former: Verdict, name: str) -> Verdict:
    """What came of a row, with what comes of it undisturbed."""
    undisturbed, difference = compare(name)
    return former._replace(undisturbed=undisturbed, difference=difference)


def both(name: str) -> Verdict:
    """All of a row."""
    return with_comparison(judge(name), name)


def tested(row: Row) -> Verdict:
    """Run tests of the repository, which cut and continue by themselves."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", row.tests]
    environment = {**os.environ, "PYTHONPATH": str(folder_of(row) or "")}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout
    passed, failed = (re.search(rf"(\d+) {word}", said) for word in ("passed", "failed"))
    if failed is None and passed is None and "skipped" in said:
        return Verdict("could not run", f"{row.tests}: {said[-200:]}")
    if passed is None or failed is not None:
        return Verdict(WRONG, f"{row.tests}: {said[-200:]}")
    return Verdict(f"exact, in {passed[1]} test{'s' if passed[1] != '1' else ''} of its own", row.tests)


def ours(error: str) -> bool:
    kinds = ("UnsupportedSourceError", "SourceError", "MidepochError", "StateError", "StateMismatchError")
    return error.partition(":")[0] in kinds


def verdict(row: Row, bare: dict[str, Any], saved: dict[str, Any], resumed: dict[str, Any]) -> Verdict:
    if "error" in resumed:
        return Verdict("could not run", resumed["error"])
    rest, following, told = resumed["rest"], saved["following"], saved["capabilities"]
    words = told_once(each for each in (*saved["told"], *resumed["told"]) if costs(each))
    wrong = [place for place in following if rest[place] != following[place]]
    samples = compared(row, bare.get("samples"), saved["samples"])
    ranks = "-"
    if resumed["ranks"] is not None:
        # What was left, and at the end a few again so that both ranks have as many batches.
        kept = saved["left"][: len(saved["left"]) - saved["dropped"]]
        missing = Counter(kept) - Counter(resumed["ranks"])
        others = set(resumed["ranks"]) - set(saved["samples"])
        ranks = "no" if missing or others else "yes"
    if wrong:
        refusals = [rest[place] for place in wrong if isinstance(rest[place], str)]
        if len(refusals) == len(wrong):
            return Verdict("refused at the resume", refusals[0], samples, ranks)
        if words or not (told["exact_order"][0] and told["exact_augmentations"][0]):
            return Verdict("reported as not exact", words or told["exact_order"][1], samples, ranks)
        reasons = (told[name][1] for name in ("exact_order", "exact_augmentations"))
        if believed := next((each for each in reasons if each.startswith("believed")), ""):
            return Verdict("believed, and not exact", believed, samples, ranks)
        return Verdict(WRONG, f"at {', '.join(wrong)}", samples, ranks)
    if samples == "no" or ranks == "no":
        return Verdict(WRONG if not words else "reported as not exact", words, samples, ranks)
    if not (told["exact_order"][0] and told["exact_augmentations"][0]):
        unkept = next(told[name][1] for name in ("exact_order", "exact_augmentations") if not told[name][0])
        return Verdict("exact here, reported as not exact", words or unkept, samples, ranks)
    if saved["adapter"] in ("torchdata", "datasets", "grain", "stateful"):
        return Verdict("exact, carried by its own state", told["constant_time_resume"][1], samples, ranks)
    how = "exact, in constant time" if told["constant_time_resume"][0] else "exact, by replay"
    return Verdict(how, told["constant_time_resume"][1], samples, ranks)


def told_once(warnings: Iterable[str]) -> str:
    """Each warning once: those that differ in numbers alone, as of a thread or an epoch, are the same."""
    found: dict[str, str] = {}
    for each in warnings:
        found.setdefault(re.sub(r"\d+", "", each), each)
    return " / ".join(found.values())


def costs(warning: str) -> bool:
    """Whether a warning says more than what a replay costs."""
    return "is read again from its start" not in warning


def compared(row: Row, bare: list[int] | None, given: list[int] | None) -> str:
    if bare is None or given is None or row.drawn:
        return "-"
    if row.in_order:
        return "yes, in its order" if bare == given else "no"
    if row.batches is not None:  # rounds: no sample twice more often than another
        size = len(set(bare))
        return "yes" if Counter(given[:size]) == Counter(range(size)) else "no"
    return "yes" if len(bare) == len(given) and set(bare) == set(given) else "no"


def versions(rows: dict[str, Row]) -> tuple[list[str], list[str]]:
    """The packages with their versions, and those that are not installed."""
    found: dict[str, str] = {"torch": importlib.metadata.version("torch")}
    missing: set[str] = set()
    for row in rows.values():
        for package in row.packages:
            path = [str(FOLDERS / package), *sys.path]
            named = {each.metadata["Name"].lower().replace("-", "_"): each.version for each in
                     importlib.metadata.distributions(path=path[:1])}  # fmt: skip
            aliases = {"energon": "megatron_energon", "open_clip": "open_clip_torch"}
            known = aliases.get(package, package.replace("-", "_"))
            if known in named:
                found[package] = named[known]
            else:
                try:
                    found[package] = importlib.metadata.version(package)
                except importlib.metadata.PackageNotFoundError:
                    missing.add(package)
    return [f"{name} {version}" for name, version in sorted(found.items())], sorted(missing)


MEANINGS = {
    "exact, in constant time": "bit for bit, and the resume jumps to its place",
    "exact, by replay": "bit for bit, and the resume reads again what comes before its place",
    "exact, carried by its own state": "bit for bit, from the state that the loader keeps by itself",
    "exact, in tests of its own": "bit for bit, in tests of this repository that cut and continue it",
    "exact here, reported as not exact": "bit for bit in this run, and `capabilities` says that this is not promised",
    "reported as not exact": "other numbers or samples, and a warning or `capabilities` said so",
    "believed, and not exact": "other numbers or samples, where `capabilities` said that they are believed",
    "refused at the resume": "an error in place of other data",
    "refused": "an error that says what to write instead",
    "could not run": "the loader itself failed, or is not installed",
    WRONG: "other data, without a warning",
}


def table(kept: dict[str, Any]) -> str:
    """The rows of the page. The last one is there even if it counts nothing."""
    run, loaders = kept["run"], kept["loaders"]
    counts = Counter(re.sub(r"in \d+ tests?", "in tests", each["kind"]) for each in loaders.values())
    shown = [(kind, counts[kind], means) for kind, means in MEANINGS.items() if counts[kind] or kind == WRONG]
    rows = [f"| {kind} | {count} | {means} |\n" for kind, count, means in shown]
    head = f"| outcome, {run['date']} | of {len(loaders)} loaders | means |\n|---|---:|---|\n"
    return head + "".join(rows)


def page(kept: dict[str, Any]) -> str:
    """The page with this table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{table(kept)}{END}{rest.partition(END)[2]}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", nargs="+", default=[], help="rows whose name has one of these words in it")
    arguments.add_argument("--processes", type=int, default=2, help="at a time")
    arguments.add_argument("--undisturbed", action="store_true", help="only compare them with the bare loaders")
    options = arguments.parse_args()
    names = [name for name in ROWS if not options.only or any(word.lower() in name.lower() for word in options.only)]
    # A part of the rows takes the place of what came of them before.
    former = json.loads(KEPT.read_text())["loaders"] if (options.only or options.undisturbed) and KEPT.exists() else {}
    found = {name: Verdict(**each) for name, each in former.items()}
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        running = {
            pool.submit(with_comparison, found.get(name, Verdict("could not run")), name)
            if options.undisturbed
            else pool.submit(both, name): name
            for name in names
        }
        for each in concurrent.futures.as_completed(running):
            name, came = running[each], each.result()
            found[name] = came
            write({name: found[name] for name in ROWS if name in found})
            told = f"undisturbed {came.undisturbed} {came.difference:.300}; samples {came.samples}; ranks {came.ranks}"
            print(f"{name}: {came.kind}; {told}; {came.why:.300}", flush=True)
    return any(each.kind == WRONG or each.undisturbed == DIFFERS for each in found.values())


def write(found: dict[str, Verdict]) -> None:
    named, rebuilt = versions({name: ROWS[name] for name in found})
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "machine": platform.machine()}
    run = {"date": time.strftime("%Y-%m-%d"), **machine, "versions": named, "rebuilt here": rebuilt}
    kept = {"run": run, "loaders": {name: each._asdict() for name, each in found.items()}}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
