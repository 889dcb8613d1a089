"""The command line: ``midepoch`` and ``python -m midepoch``.

A command is a function whose signature says what it takes; `main` lists them. What a command needs is imported when it
is called, so that the others work without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

try:
    import typer
except ModuleNotFoundError:  # `main` says how to get it
    _has_typer = False
else:
    _has_typer = True

__all__ = ["demo", "main"]

_DIFFERENT, _UNABLE, _INTERRUPTED = 1, 2, 130  # exit statuses


def main() -> None:
    """Run the command that the arguments name."""
    if not _has_typer:
        _fail("the command line needs typer: pip install 'midepoch[demo]'")
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def midepoch() -> None:
        """Makes any data iterable resume in the middle of an epoch."""
        # Without it typer makes a program of a single command.

    for command in (demo,):
        app.command()(command)
    app(prog_name="midepoch")


def demo(
    output: Annotated[Path, typer.Option(help="Folder for images, logs, snapshots, result.json and loss.png.")] = Path(
        "demo-output"
    ),
    backend: Annotated[str, typer.Option(help="What reads the images: torch, dali, ffcv or webdataset.")] = "torch",
    kills: Annotated[int, typer.Option(help="How often a run is killed.")] = 3,
    world_sizes: Annotated[
        str,
        typer.Option(help="Processes before the first kill, after it, after the next, ..., over and over."),
    ] = "2,3,1",
    epochs: Annotated[int, typer.Option(help="To train for.")] = 2,
    seed: Annotated[int, typer.Option(help="Of order, augmentations, weights and kills.")] = 0,
    num_workers: Annotated[int, typer.Option(help="Worker processes of each loader.")] = 2,
    every: Annotated[int, typer.Option(help="Batches between snapshots.")] = 4,
    images: Annotated[int, typer.Option(help="Handwritten digits, up to 1797.")] = 1440,
    loader_state: Annotated[
        bool,
        typer.Option(
            "--loader-state/--no-loader-state",
            help="Whether the loader's state is loaded after a kill; without it, see what is found.",
        ),
    ] = True,
) -> None:
    """Kill a real training job in mid-epoch, and show that it goes on exactly, on another number of processes too.

    Exit status: 0 exact; 1 something was lost, repeated or different; 2 it could not be carried out.
    """
    _require("demo", "matplotlib", "PIL", "rich", "sklearn")
    from .demo.backends import BACKENDS
    from .demo.orchestrate import DemoError, Settings
    from .demo.report import demonstrate

    if backend not in BACKENDS:
        message = f"there is no {backend!r}: choose one of {', '.join(BACKENDS)}"
        raise typer.BadParameter(message, param_hint="--backend")
    if backend != "torch":
        _require(backend, *BACKENDS[backend].needs)
    try:
        settings = Settings(
            output=output,
            backend=backend,
            kills=kills,
            world_sizes=_integers(world_sizes),
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
        with _sigterm_unwinds():
            exact = demonstrate(settings)
    except DemoError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; all processes that were started are gone", _INTERRUPTED)
    if not exact:
        raise typer.Exit(_DIFFERENT)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"numbers with commas between them, such as 2,3,1; got {text!r}") from None


def _require(extra: str, *modules: str) -> None:
    """Fail with the cure unless all modules of an extra are there."""
    missing = [name for name in modules if not _is_installed(name)]
    if missing:
        _fail(f"midepoch demo needs {', '.join(missing)}: pip install 'midepoch[{extra}]'")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _fail(message: str, status: int = _UNABLE) -> NoReturn:
    print(f"midepoch: {message}", file=sys.stderr)
    raise SystemExit(status)


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """`kill` and `timeout` end the command as Ctrl-C does, so that it takes what it started with it."""

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
