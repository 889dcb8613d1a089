"""The command line: ``midepoch`` and ``python -m midepoch``.

A command is a function whose signature says what it takes; `main` lists them. What a command needs is imported when it
is called, so that the others work without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from .command import DIFFERENT, INTERRUPTED, fail, integers, names, require, sigterm_unwinds

try:
    import typer
except ModuleNotFoundError:  # `main` says how to get it
    _has_typer = False
else:
    _has_typer = True

__all__ = ["check", "inspect", "main"]


def main() -> None:
    """Run the command that the arguments name."""
    if not _has_typer:
        fail("the command line needs typer: pip install 'midepoch[cli]'")
    from .demo.command import demo

    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    # A callback's docstring is the help of the whole program.
    @app.callback()
    def midepoch() -> None:
        """Makes any data iterable resume in the middle of an epoch."""

    for command in (demo, check, inspect):
        app.command()(command)
    app(prog_name="midepoch")


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
    require("cli", "jinja2", "rich")
    from midepoch.testing.record import Settings

    from .check import TargetError, examine, find_target, printable

    try:
        settings = Settings(
            make_loader=find_target(target),
            world_sizes=integers(world_sizes),
            num_workers=integers(num_workers),
            epochs=epochs,
            quick=quick,
            shuffled=shuffled,
            tail=tail,  # type: ignore[arg-type]  # which checks it
            drop_last=drop_last,
            cuts=None if cuts is None else integers(cuts),
            identify=None if identify is None else find_target(identify),
            elastic_content=elastic_content,
            timeout=timeout,
            options=None if options is None else tuple(names(options)),
        )
        with sigterm_unwinds():
            found = examine(settings, target, None if laws is None else names(laws), report)
    except (TargetError, TypeError, ValueError, OSError) as error:
        fail(printable(str(error)))
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    if not found.holds:
        raise typer.Exit(DIFFERENT)


def inspect(
    path: Annotated[Path, typer.Argument(help="A snapshot, a checkpoint (a file or a folder), or a state as JSON.")],
    out: Annotated[Path | None, typer.Argument(help="With --seek: where the edited copy goes.")] = None,
    seek: Annotated[
        str | None,
        typer.Option(
            help="Move a loader: epoch=2,position=100000 (units of the epoch), or one of them. Where its source cannot "
            "begin there, loading the copy is refused."
        ),
    ] = None,
    state: Annotated[str | None, typer.Option(help="Which state to move, where there are several.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show where the loaders in a checkpoint stand, or write a copy in which one stands elsewhere.

    Nothing in the file is run: what weights_only=True refuses is refused.

    Exit status: 0; 1 a state or the file is damaged; 2 it could not be read, or not be moved.
    """
    require("cli", "jinja2", "rich")
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
        fail(checking.printable(str(error)))
    if as_json:
        print(checking.as_json(contents))
    else:
        checking.show_contents(contents)
    if contents.problems or any(place.problem for place in contents.found):
        raise typer.Exit(DIFFERENT)


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
