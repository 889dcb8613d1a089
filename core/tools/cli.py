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

__all__ = ["check", "demo", "inspect", "main"]

_DIFFERENT, _UNABLE, _INTERRUPTED = 1, 2, 130  # exit statuses


def main() -> None:
    """Run the command that the arguments name."""
    if not _has_typer:
        _fail("the command line needs typer: pip install 'midepoch[cli]'")
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def midepoch() -> None:
        """Makes any data iterable resume in the middle of an epoch."""
        # Without it typer makes a program of a single command.

    for command in (demo, check, inspect):
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


def check(
    target: Annotated[str, typer.Argument(help="package.module:make_loader, or file.py:make_loader.")],
    world_sizes: Annotated[str, typer.Option(help="Numbers of ranks to examine.")] = "1,2,3",
    num_workers: Annotated[str, typer.Option(help="Numbers of workers to change between.")] = "0,2",
    epochs: Annotated[int, typer.Option(help="In how many epochs to cut.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Cut each epoch at three places only.")] = False,
    shuffled: Annotated[
        bool | None,
        typer.Option("--shuffled/--sequential", help="Whether epochs must differ in their order, or agree."),
    ] = None,
    tail: Annotated[str, typer.Option(help="How ranks share the last samples: pad, drop or uneven.")] = "pad",
    drop_last: Annotated[bool, typer.Option("--drop-last", help="The last batch is left out if incomplete.")] = False,
    cuts: Annotated[str | None, typer.Option(help="Cut after so many batches, such as 1,7; else all.")] = None,
    identify: Annotated[
        str | None,
        typer.Option(help="package.module:function that lists what names each sample of a batch, such as its number."),
    ] = None,
    elastic_content: Annotated[
        bool,
        typer.Option(
            "--elastic-content/--fixed-content",
            help="Whether a sample's content is the same on any split; not with random numbers in a collate_fn.",
        ),
    ] = True,
    laws: Annotated[str | None, typer.Option(help="Names of laws with commas between them; else all.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one answer of the loader may take.")] = 120.0,
    options: Annotated[
        str | None,
        typer.Option(help="Which of make_loader's parameters may be used, with commas; else all known ones."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the findings as an HTML page.")] = None,
) -> None:
    """Examine your own loader: is it resumed exactly, wherever it is cut, on any number of processes?

    make_loader builds a fresh loader at each call, of a small data set. It may take rank and world_size, and then is
    examined on several ranks; also num_workers, batch_size, seed, size, and more that docs/testing.md lists.

    Exit status: 0 all laws that apply hold; 1 one is broken, or whole epochs do not run through; 2 it could not be
    examined.
    """
    _require("cli", "rich")
    from midepoch.testing.record import Settings

    from .check import TargetError, examine, find_target, printable

    try:
        settings = Settings(
            make_loader=find_target(target),
            world_sizes=_integers(world_sizes),
            num_workers=_integers(num_workers),
            epochs=epochs,
            quick=quick,
            shuffled=shuffled,
            tail=tail,  # type: ignore[arg-type]  # which checks it
            drop_last=drop_last,
            cuts=None if cuts is None else _integers(cuts),
            identify=None if identify is None else find_target(identify),
            elastic_content=elastic_content,
            timeout=timeout,
            options=None if options is None else tuple(_names(options)),
        )
        with _sigterm_unwinds():
            found = examine(settings, target, None if laws is None else _names(laws), report)
    except (TargetError, TypeError, ValueError, OSError) as error:
        _fail(printable(str(error)))
    except KeyboardInterrupt:
        _fail("interrupted", _INTERRUPTED)
    if not found.holds:
        raise typer.Exit(_DIFFERENT)


def inspect(
    path: Annotated[Path, typer.Argument(help="A snapshot, a checkpoint (a file or a folder), or a state as JSON.")],
    out: Annotated[Path | None, typer.Argument(help="With --seek: where the edited copy goes.")] = None,
    seek: Annotated[
        str | None, typer.Option(help="Move a loader: epoch=2,position=100000 (units of the epoch), or one of them.")
    ] = None,
    state: Annotated[str | None, typer.Option(help="Which state to move, where there are several.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show where the loaders in a checkpoint stand, or write a copy in which one stands elsewhere.

    Nothing in the file is run: what weights_only=True refuses is refused.

    Exit status: 0; 1 a state or the file is damaged; 2 it could not be read, or not be moved.
    """
    _require("cli", "rich")
    from midepoch.errors import MidepochError

    from . import check as checking
    from . import inspection

    if (seek is None) != (out is None):
        raise typer.BadParameter("--seek and the path of the copy belong together", param_hint="--seek")
    try:
        with inspection.modest(path):
            if seek is not None and out is not None:
                inspection.seek(path, out, name=state, **_places(seek))
            contents = inspection.look(path if out is None else out)
    except (MidepochError, ValueError, OSError) as error:
        _fail(checking.printable(str(error)))
    if as_json:
        print(checking.as_json(contents))
    else:
        checking.show_contents(contents)
    if contents.problems or any(place.problem for place in contents.places):
        raise typer.Exit(_DIFFERENT)


def _places(text: str) -> dict[str, int]:
    parts = text.split(",")
    found = dict(part.partition("=")[::2] for part in parts)
    try:
        if not found.keys() <= {"epoch", "position"} or len(found) < len(parts):
            raise ValueError
        return {name: int(value) for name, value in found.items()}
    except ValueError:
        raise typer.BadParameter(
            f"epoch=2,position=100000, or one of them; got {text!r}", param_hint="--seek"
        ) from None


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"numbers with commas between them, such as 2,3,1; got {text!r}") from None


def _require(extra: str, *modules: str) -> None:
    """Fail with the cure unless all modules of an extra are there."""
    missing = [name for name in modules if not _is_installed(name)]
    if missing:
        _fail(f"this command needs {', '.join(missing)}: pip install 'midepoch[{extra}]'")


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
