"""The demonstration's output: a progress bar while it runs, then a table, a plot and a JSON file."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .compare import Segment
from .orchestrate import Kill, Result, Scenario, Settings, Watch, execute, make_scenarios, prepare

__all__ = ["demonstrate", "make_tables", "write_json", "write_plot"]


def demonstrate(settings: Settings) -> bool:
    """Run the demonstration and show it on standard output. True if nothing was lost, repeated or different.

    Raises:
        DemoError: it could not be carried out.
    """
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=110)  # rich would use 80, and break the table's lines
    prepare(settings)
    scenarios = make_scenarios(settings)
    console.print(f"{settings.image_count} JPEG files in {settings.output / 'images'}; seed {settings.seed}")
    for scenario in scenarios:
        console.print(f"  {scenario}", soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {each: progress.add_task(each.name, total=settings.steps, start=False) for each in scenarios}

        def show(scenario: Scenario, step: int) -> None:
            progress.start_task(tasks[scenario])
            progress.update(tasks[scenario], completed=step + 1)

        results = execute(settings, scenarios, Watch(show, functools.partial(console.print, soft_wrap=True)))
    write_json(settings.output / "result.json", settings, results)
    write_plot(settings.output / "loss.png", settings, results)
    for table in make_tables(settings, results):
        console.print(table)
    console.print(f"Both loss curves: {settings.output / 'loss.png'}; all figures: {settings.output / 'result.json'}")
    problems = {result.scenario.name: result.comparison.problems for result in results if result.comparison.problems}
    for name, found in problems.items():
        console.print(f"[red]{name}: {'; '.join(found)}")
    return not problems


def make_tables(settings: Settings, results: Sequence[Result]) -> list[Table]:
    """Tables of each run's outcome against the uninterrupted run's, and of each restart."""
    tables = [_make_outcomes(settings, results)]
    if any(result.scenario.kills for result in results):
        tables.append(_make_restarts(results))
    return tables


def _make_outcomes(settings: Settings, results: Sequence[Result]) -> Table:
    images, batches = settings.image_count, settings.image_count // settings.global_batch
    epochs = f"{settings.epochs} epoch{'s' if settings.epochs > 1 else ''}"
    table = Table(title=f"{epochs} of {images} images in {batches} global batches of {settings.global_batch}")
    table.add_column("")
    for result in results:
        table.add_column(result.scenario.name, justify="right")
    rows: dict[str, Callable[[Result], str]] = {
        "processes": lambda result: " → ".join(map(str, result.scenario.world_sizes)),
        "killed with SIGKILL": lambda result: _times(len(result.scenario.kills)),
        "samples trained on": lambda result: str(result.run.counts.total()),
        "samples lost": lambda result: _zero(result.comparison.lost),
        "samples repeated": lambda result: _zero(result.comparison.repeated),
        "global batches bit-equal": lambda result: _share(
            result, result.comparison.equal_batches, result.comparison.steps
        ),
        "batches done again¹": _again,
        "losses bit-equal²": lambda result: _share(
            result, result.comparison.equal_losses, result.comparison.comparable_losses
        ),
        "largest difference of losses": lambda result: _versus(
            result, f"{result.comparison.largest_loss_difference:.1g}"
        ),
        "final weights bit-equal²": _weights,
        "last loss": lambda result: f"{_losses(result)[-1]:.4f}" if _losses(result) else "none",
        "outcome": lambda result: "[green]exact" if not result.comparison.problems else "[red]NOT EXACT",
    }
    for name, cell in rows.items():
        table.add_row(name, *map(cell, results))
    table.caption = (
        "A batch is the same samples in the same order, with the same augmented pixels, bit for bit. "
        "¹ They came after the last snapshot before a kill, so the final model does not contain the first try. "
        "² While the number of processes is that of the uninterrupted run: other numbers round sums differently."
    )
    table.caption_justify = "left"
    return table


def _make_restarts(results: Sequence[Result]) -> Table:
    table = Table(title="Every start", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("run")
    for name in ("processes", "from\nbatch", "epoch,\nsample", "SIGKILL\nat batch", "to"):
        table.add_column(name, justify="right")
    table.add_column("loader to\nfirst batch", justify="right")
    table.add_column("command to\nfirst batch", justify="right")
    for result in results:
        for place, (segment, kill) in enumerate(_segments(result)):
            table.add_row(
                "" if place else result.scenario.name,
                str(segment.world_size),
                str(segment.first_step),
                f"{segment.epoch}, {segment.position}",
                "" if kill is None else str(segment.reached),
                "" if kill is None else "all" if kill.rank is None else kill.whom,
                "none" if segment.loader_seconds is None else f"{segment.loader_seconds * 1000:.0f} ms",
                "none" if segment.start_seconds is None else f"{segment.start_seconds:.1f} s",
                end_section=segment is result.run.segments[-1],
            )
    return table


def _segments(result: Result) -> list[tuple[Segment, Kill | None]]:
    """Each segment with the kill that ended it."""
    kills = [*result.scenario.kills, None]
    return list(zip(result.run.segments, kills, strict=True))


def _losses(result: Result) -> list[float]:
    return [batch.loss for batch in result.run.trained.values()]


def _times(count: int) -> str:
    return "never" if count == 0 else "once" if count == 1 else f"{count} times"


def _zero(count: int) -> str:
    return f"[red]{count}" if count else "[green]0"


def _versus(result: Result, text: str) -> str:
    """The text, except for the reference, which is not compared with itself."""
    return "" if result.comparison.run is result.comparison.reference else text


def _share(result: Result, equal: int, all_: int) -> str:
    return _versus(result, f"[{'green' if equal == all_ else 'red'}]{equal} of {all_}")


def _again(result: Result) -> str:
    count, differing = len(result.run.done_again), result.comparison.differing_again
    if not result.scenario.kills:
        return ""
    return f"[red]{count}, {differing} differ" if differing else f"{count}, bit-equal"


def _weights(result: Result) -> str:
    comparison = result.comparison
    if not comparison.one_world:
        return _versus(result, "other sums")
    return _versus(result, "[green]yes" if comparison.equal_weights else "[red]no")


def write_plot(path: Path, settings: Settings, results: Sequence[Result]) -> None:
    """A PNG of the losses of each killed run over those of the uninterrupted one, with the kills marked."""
    reference, killed = results[0], results[1:] or results
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 0.6 + 3.2 * len(killed)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(killed), 1, sharex=True, squeeze=False)[:, 0]
        for axes, result in zip(panels, killed, strict=True):
            sizes = " → ".join(map(str, result.scenario.world_sizes))
            axes.set_title(
                f"{result.scenario.name}: {sizes} processes, killed {_times(len(result.scenario.kills))}", loc="left"
            )
            axes.set_ylabel("loss of the global batch")
            theirs, ours = reference.run.trained, result.run.trained
            axes.plot(
                list(theirs),
                [batch.loss for batch in theirs.values()],
                color="0.75",
                linewidth=5,
                solid_capstyle="round",
                label=f"uninterrupted, {reference.scenario.world_sizes[0]} processes",
            )
            if result is not reference:
                axes.plot(
                    list(ours),
                    [batch.loss for batch in ours.values()],
                    color="C0",
                    linewidth=1.2,
                    label=result.scenario.name,
                )
            _mark_kills(axes, result)
            axes.set_ylim(0, axes.get_ylim()[1] * 1.15)  # room for the first label above the curve
            axes.margins(x=0.01)
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, borderaxespad=0)
        panels[-1].set_xlabel(f"batch ({settings.image_count // settings.global_batch} in an epoch)")
        figure.savefig(path, dpi=130)


def _mark_kills(axes: Any, result: Result) -> None:
    top = axes.get_xaxis_transform()
    segments = _segments(result)
    labelled = False
    for place, (segment, kill) in enumerate(segments):
        if kill is None:
            continue
        following = segments[place + 1][0]
        axes.axvline(segment.reached, color="C3", linewidth=1, linestyle="--", label=None if place else "SIGKILL")
        axes.annotate(
            f"SIGKILL to {kill.whom}\non with {following.world_size} from {following.first_step}",
            # The labels of neighbouring kills would overlap at the same height.
            (segment.reached, 0.98 - 0.17 * (place % 3)),
            xycoords=top,
            xytext=(4, 0),
            textcoords="offset points",
            color="C3",
            fontsize=7,
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
        if following.first_step <= segment.reached:
            span = axes.axvspan(following.first_step - 0.5, segment.reached + 0.5, color="C3", alpha=0.15, linewidth=0)
            if not labelled:
                span.set_label("done again")
            labelled = True


def write_json(path: Path, settings: Settings, results: Sequence[Result]) -> None:
    """The table's figures and the losses, for programs."""
    content = {
        "exact": not any(result.comparison.problems for result in results),
        "settings": {
            **{name: value for name, value in dataclasses.asdict(settings).items() if name != "output"},
            "global_batch": settings.global_batch,
            "image_count": settings.image_count,
            "steps": settings.steps,
        },
        "runs": [_as_json(result) for result in results],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _as_json(result: Result) -> dict[str, Any]:
    comparison = result.comparison
    return {
        "name": result.scenario.name,
        "problems": comparison.problems,
        "samples_lost": comparison.lost,
        "samples_repeated": comparison.repeated,
        "batches": comparison.steps,
        "batches_equal": comparison.equal_batches,
        "batches_done_again": len(result.run.done_again),
        "batches_done_again_differing": comparison.differing_again,
        "losses_comparable": comparison.comparable_losses,
        "losses_equal": comparison.equal_losses,
        "largest_loss_difference": comparison.largest_loss_difference,
        "one_world": comparison.one_world,
        "weights_equal": comparison.equal_weights,
        "segments": [
            {
                "world_size": segment.world_size,
                "first_step": segment.first_step,
                "epoch": segment.epoch,
                "position": segment.position,
                "loader_seconds": segment.loader_seconds,
                "start_seconds": segment.start_seconds,
                "kill": None
                if kill is None
                else {"planned_step": kill.step, "rank": kill.rank, "reached_step": segment.reached},
            }
            for segment, kill in _segments(result)
        ],
        "losses": _losses(result),
    }
