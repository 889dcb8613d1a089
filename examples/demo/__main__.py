"""The command ``python -m demo``, in the folder above this one; ``make demo`` runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midepoch.tools.command import DIFFERENT, INTERRUPTED, fail, integers, require, sigterm_unwinds


def demo(
    output: Annotated[Path, typer.Option(help="Folder for images, logs, snapshots, result.json and loss.png.")] = Path(
        "demo-output"
    ),
    backend: Annotated[str, typer.Option(help="Reads the images: torch, dali, ffcv or webdataset.")] = "torch",
    kills: Annotated[int, typer.Option(help="Number of kills in each interrupted run.")] = 3,
    world_sizes: Annotated[
        str,
        typer.Option(help="Processes before the first kill, after it, after the next, ..., repeated in a cycle."),
    ] = "2,3,1",
    epochs: Annotated[int, typer.Option(help="Epochs to train.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of order, augmentations, weights and kills.")] = 0,
    num_workers: Annotated[int, typer.Option(help="Worker processes of each loader.")] = 2,
    every: Annotated[int, typer.Option(help="Batches between snapshots.")] = 4,
    images: Annotated[int, typer.Option(help="Number of handwritten digits, up to 1797.")] = 1440,
    loader_state: Annotated[
        bool,
        typer.Option(
            "--loader-state/--no-loader-state",
            help="Whether to load the loader's state after a kill. Without it, the table shows what goes wrong.",
        ),
    ] = True,
) -> None:
    """Kill a real training job in mid-epoch, and show that it resumes exactly, even on another number of processes.

    Exit status: 0 exact; 1 something was lost, repeated or different; 2 the demonstration could not be carried out.
    """
    require("demo", "matplotlib", "PIL", "rich", "sklearn")
    from .backends import BACKENDS
    from .orchestrate import DemoError, Settings
    from .report import demonstrate

    if backend not in BACKENDS:
        message = f"there is no {backend!r}: choose one of {', '.join(BACKENDS)}"
        raise typer.BadParameter(message, param_hint="--backend")
    if backend != "torch":
        require(backend, *BACKENDS[backend].needs)
    try:
        settings = Settings(
            output=output,
            backend=backend,
            kills=kills,
            world_sizes=integers(world_sizes),
            epochs=epochs,
            seed=seed,
            num_workers=num_workers,
            every=every,
            images=images,
            loader_state=loader_state,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with sigterm_unwinds():
            exact = demonstrate(settings)
    except DemoError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; all processes that were started have ended", INTERRUPTED)
    if not exact:
        raise typer.Exit(DIFFERENT)


def main() -> None:
    """Run the command."""
    app = typer.Typer(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(demo)
    app(prog_name="demo")


if __name__ == "__main__":
    main()
