"""Writes the table of attacks in docs/guarantees.md from the results beside it: ``python docs/attacks.py``.

A test compares them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "guarantees.md"
BEGIN, END = "<!-- attacks -->\n", "<!-- end of attacks -->"
FILES = ("snapshot files", "tar archives", "webdataset index caches", "beton files")


def results(name: str) -> list[dict[str, Any]]:
    """The rows of one kind of attack."""
    rows: list[dict[str, Any]] = json.loads((DOCS / f"reliability-{name}.json").read_text(encoding="utf-8"))
    return rows


def total(rows: Iterable[dict[str, Any]], *names: str) -> Counter[str]:
    """Numbers added up; of a list or a dict of numbers, their own sum."""
    counts: Counter[str] = Counter()
    for row, name in ((row, name) for row in rows for name in names):
        value = row[name]
        counts[name] += sum(value.values()) if isinstance(value, dict) else len(value) if type(value) is list else value
    return counts


def lines() -> list[list[Any]]:
    """The table, from its head on."""
    found: list[list[Any]] = [["attack", "how often", "in", "lost", "repeated", "wrong"]]
    for backend in sorted({row["backend"] for row in results("chaos")}):
        jobs = [row for row in results("chaos") if row["backend"] == backend]
        counts = total(jobs, "kills", "jobs", "samples", "lost", "repeated", "different")
        done = f"{counts['jobs']} jobs, {counts['samples']:,} samples"
        found.append(
            [f"kill, {backend}", f"{counts['kills']:,}", done, counts["lost"], counts["repeated"], counts["different"]]
        )
    for whose, groups in (
        ("`feed`", [row for row in results("torchft") if "sampler" not in row]),
        ("torchft's own sampler", [row for row in results("torchft") if "sampler" in row]),
    ):
        counts = total(groups, "kills", "jobs", "steps", "lost", "repeated", "wrong weights")
        done = f"{counts['jobs']} jobs, {counts['steps']:,} steps"
        # Only of `feed` does the job know what each weight should be.
        wrong = counts["wrong weights"] if whose == "`feed`" else "-"
        kills, lost = (f"{counts[name]:,}" for name in ("kills", "lost"))
        found.append([f"kill of a replica group, {whose}", kills, done, lost, counts["repeated"], wrong])
    fuzzed = results("fuzz")
    states = [row for row in fuzzed if row["target"] not in FILES]
    for what, rows in ((f"mutated state, {len(states)} kinds of source", states), *(
        (f"damage, {name}", [row for row in fuzzed if row["target"] == name]) for name in FILES
    )):  # fmt: skip
        counts = total(rows, "mutations", "refused", "continued", "wrong", "crashed", "hung")
        done = f"{counts['refused']:,} refused, {counts['continued']:,} exact"
        wrong = counts["wrong"] + counts["crashed"] + counts["hung"]
        found.append([what, f"{counts['mutations']:,}", done, "-", "-", wrong])
    return found


def table() -> str:
    """The same as Markdown."""
    head, *rows = lines()
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (head, ["---"] * len(head), *rows))


def written() -> str:
    """The page with this table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
