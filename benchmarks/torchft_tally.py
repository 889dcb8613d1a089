"""Kills groups under torchft many times.

``torchft_tally.py --kills 100 --seed 1 --asynchronous --ranks 2 --workers 2`` adds a row to
docs/reliability-torchft.json, and prints it. With ``--sampler``, torchft's own sampler trains, under the same kills.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "trainers")]

from torchft_kills import POINTS, Outcome, run_job

from support import jobs

TALLY = ROOT / "docs" / "reliability-torchft.json"


def draw(folder: Path, batch: int, path: Path) -> None:
    """Which group trained on which positions of the epoch when, and where it was killed. Groups of one rank."""
    from matplotlib import pyplot

    rows = []
    for log in folder.glob("log-*"):
        rows += [(int(log.name.split("-")[1]), *step) for step in jobs.noted(log)]
    began = min(row[-1] for row in rows)
    ends = {row[1]: row[4][1] for row in rows if row[2] and row[4][0] == 0}
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for group in sorted({row[0] for row in rows}):
        color, bars = f"C{group}", []
        for _, step, done, (rank, _), _, when in (row for row in rows if row[0] == group):
            if done and rank is not None and step in ends:
                start = ends.get(step - 1, 0) + rank * batch
                bars.append((when - began, min(start, ends[step]), min(start + batch, ends[step])))
        times, lows, highs = zip(*bars, strict=True)
        axes.vlines(times, lows, highs, colors=color, linewidth=5, label=f"group {group}")
        pids = {log.name.split("-")[3] for log in folder.glob(f"log-{group}-*")}
        deaths = [each.stat().st_mtime - began for each in folder.glob("died-*") if each.name[5:] in pids]
        axes.plot(deaths, [-12 - 12 * group] * len(deaths), "x", color=color, markersize=9, markeredgewidth=2)
    axes.set_xlabel("seconds; a cross is a SIGKILL")
    axes.set_ylabel("positions of the epoch trained on")
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--size", type=int, default=1200, help="samples of an epoch")
    parser.add_argument("--together", type=int, help="global_batch=")
    parser.add_argument("--point", action="append", choices=POINTS)
    parser.add_argument("--each", type=int, default=10, help="kills in one job")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one job")
    parser.add_argument("--sampler", action="store_true", help="torchft's own, in place of midepoch")
    parser.add_argument("--draw", type=Path, help="a picture of the first job, and no row")
    given = parser.parse_args()
    total, jobs, errors = Outcome(), 0, list[str]()
    while not jobs or total.kills.total() < given.kills:
        jobs += 1
        with tempfile.TemporaryDirectory(prefix="midepoch-torchft-") as folder:
            outcome = run_job(
                Path(folder), given.each, given.seed * 1000 + jobs, groups=given.groups, ranks=given.ranks,
                workers=given.workers, asynchronous=given.asynchronous, size=given.size, together=given.together,
                points=tuple(given.point or POINTS), limit=given.limit, sampler=given.sampler,
            )  # fmt: skip
            if given.draw is not None:
                draw(Path(folder), 4, given.draw)
                return
        expected = given.groups * given.ranks
        found = () if given.sampler else (outcome.lost, outcome.repeated, outcome.wrong)
        if outcome.errors or outcome.finished != expected or any(found):
            errors.append(f"job {jobs}: {outcome}")
        total.kills += outcome.kills
        for name in ("steps", "failed", "launches", "lost", "repeated", "wrong", "finished", "ended", "seconds"):
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
        print(jobs, outcome, flush=True)
    row = {
        "quorum": "asynchronous" if given.asynchronous else "synchronous", "ranks": given.ranks,
        "workers": given.workers, "steps of": "a batch each" if given.together is None else f"{given.together} samples",
        "kills": dict(total.kills), "jobs": jobs, "launches": total.launches, "steps": total.steps,
        "failed": total.failed, "ended": total.ended, "lost": total.lost, "repeated": total.repeated,
        "wrong weights": total.wrong,
        "seconds": round(total.seconds), "seed": given.seed, "groups": given.groups, "size": given.size,
        "errors": errors, **({"sampler": "torchft"} if given.sampler else {}),
    }  # fmt: skip
    rows = json.loads(TALLY.read_text()) if TALLY.exists() else []
    rows.append(row)
    TALLY.write_text("[\n" + ",\n".join(json.dumps(each) for each in rows) + "\n]\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
