"""The command line: ``midepoch`` and ``python -m midepoch``.

A command is a function whose signature declares its arguments. `main` lists the commands. A command's own dependencies
are imported when it is called, so that the others work without them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path
from typing import Annotated, Any

from .command import DIFFERENT, INTERRUPTED, UNABLE, fail, integers, names, require, sigterm_unwinds

with contextlib.suppress(ModuleNotFoundError):  # `main` says how to install it
    import typer

__all__ = ["check", "inspect", "main", "trace"]


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


def main() -> None:
    """Run the command named on the command line."""
    require("cli", "rich", "typer")
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=settings)

    # A callback's docstring is the help of the whole program.
    @app.callback()
    def midepoch(
        version: Annotated[
            bool, _option("Print the version.", "--version", is_eager=True, callback=_print_version)
        ] = False,
    ) -> None:
        """Makes any data iterable resume in the middle of an epoch."""

    for command in (check, inspect, trace):
        app.command()(command)
    app(prog_name="midepoch")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"midepoch {importlib.metadata.version('midepoch')}")
        raise typer.Exit


def check(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:name or file.py:name, of a loader or of a function that builds one; or file.py alone."
        ),
    ],
    world_sizes: Annotated[str, _option("Numbers of ranks to examine.")] = "1,2,3",
    num_workers: Annotated[str, _option("Numbers of workers to change between.")] = "0,2",
    epochs: Annotated[int, _option("In how many epochs to cut.")] = 2,
    quick: Annotated[bool, _option("Cut each epoch at three places only.", "--quick")] = False,
    shuffled: Annotated[
        bool | None, _option("Whether epochs must differ in their order, or agree.", "--shuffled/--sequential")
    ] = None,
    tail: Annotated[
        str | None, _option("How ranks share the last samples: pad, drop or uneven; default: as midepoch shares them.")
    ] = None,
    drop_last: Annotated[bool, _option("Leave out an incomplete last batch.", "--drop-last")] = False,
    cuts: Annotated[str | None, _option("Batches before each cut, such as 1,7; default: all.")] = None,
    identify: Annotated[
        str | None, _option("package.module:function that returns the identities of a batch's samples.")
    ] = None,
    elastic_content: Annotated[
        bool,
        _option(
            "Whether a sample's content must be the same on any number of ranks and workers and with any batch "
            "size. Use --fixed-content if collate_fn draws random numbers.", "--elastic-content/--fixed-content",
        ),
    ] = True,
    laws: Annotated[str | None, _option("Names of laws, separated by commas; default: all.")] = None,
    trials: Annotated[
        float, _option("Seconds that trials of the promises may take; 0: none. They belong to the law 'honesty'.")
    ] = 15.0,
    seconds: Annotated[float, _option("Seconds after which no other trial or law is begun; 0: no limit.")] = 60.0,
    timeout: Annotated[float, _option("Seconds that one answer of the loader may take.")] = 120.0,
    options: Annotated[
        str | None, _option("The parameters of make_loader that may be used, separated by commas; default: all known.")
    ] = None,
    report: Annotated[Path | None, _option("Write the findings as an HTML page.")] = None,
    verbose: Annotated[bool, _option("Show each law with its reason, and tracebacks.", "--verbose")] = False,
    lenient: Annotated[bool, _option("Pass a loader that is not exact, if it says so itself.", "--lenient")] = False,
) -> None:
    """Examine your own loader: is it resumed exactly, wherever it is cut, on any number of processes?

    Name a loader of a small dataset, or a function that builds one anew at each call; wrapped by midepoch or not. It is
    examined as it is resumed today, and with midepoch, side by side. What is found comes first: one cause, where it
    showed first, and what to write instead. Ranks, workers and batch sizes are derived from a DataLoader. A function
    may take rank and world_size, num_workers, batch_size, seed, size, and others listed in docs/check.md.

    Exit status: 0 if it continues exactly, and all laws that were reached and apply hold; 1 if not, or if an
    uninterrupted epoch fails; 2 if the loader could not be examined. CI wants --seconds 0, so that all are reached.
    """
    from ..testing.record import Settings
    from .check import examine
    from .shown import printable
    from .targets import TargetError, find_target

    try:
        settings = Settings(
            make_loader=find_target(target), world_sizes=integers(world_sizes), num_workers=integers(num_workers),
            epochs=epochs, quick=quick, shuffled=shuffled, drop_last=drop_last, elastic_content=elastic_content,
            tail=tail or "pad",  # type: ignore[arg-type]  # Settings checks it
            cuts=None if cuts is None else integers(cuts), timeout=timeout,
            identify=None if identify is None else find_target(identify, loader=False),
            options=None if options is None else tuple(names(options)),
        )  # fmt: skip
        with sigterm_unwinds():
            chosen = None if laws is None else names(laws)
            passes = examine(settings, target, chosen, report, trials, seconds, verbose, tail is not None, lenient)
    except (TargetError, TypeError, ValueError, OSError) as error:
        fail(printable(str(error)))
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    if not passes:
        raise typer.Exit(DIFFERENT)


def inspect(
    path: Annotated[Path, typer.Argument(help="A snapshot, a checkpoint (a file or a folder), or a state as JSON.")],
    out: Annotated[
        Path | None, typer.Argument(help="With --skip: the copy to write, which does not exist yet.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        _option(
            "Positions that the copy's loader leaves out, as after loader.skip; may be given several times.",
            metavar="EPOCH:START..STOP",
        ),
    ] = None,
    state: Annotated[
        str | None, _option("With --skip: the loader's state, where a file has several; such as parts.data.")
    ] = None,
    as_json: Annotated[bool, _option("Print JSON.", "--json")] = False,
) -> None:
    """Show the positions of the loaders in a checkpoint, or write a copy that leaves some out.

    No code in the file is run: what weights_only=True refuses is refused.

    Exit status: 0; 1 if a state or the file is damaged; 2 if it could not be read or written.
    """
    from ..errors import MidepochError
    from . import inspection, shown

    if (out is None) != (not skip):
        fail("--skip and the file to write belong together: midepoch inspect --skip EPOCH:START..STOP CHECKPOINT OUT")
    try:
        if out is not None and skip:
            inspection.skip(path, skip, out, state)
        contents = inspection.look(out or path)
    except (MidepochError, ValueError, OSError) as error:
        damaged = isinstance(error, inspection.DamagedError)
        fail(shown.printable(str(error)), DIFFERENT if damaged else UNABLE)
    if as_json:
        print(shown.as_json(contents))
    else:
        shown.show_contents(contents)
    if contents.problems or any(entry.problem for entry in contents.states):
        raise typer.Exit(DIFFERENT)


def trace(
    path: Annotated[Path, typer.Argument(help="A snapshot of Snapshot(..., ledger=True), or its folder.")],
    step: Annotated[int | None, _option("What this step was trained on; counted from 1.")] = None,
    rank: Annotated[int | None, _option("Of this rank only.")] = None,
    sample: Annotated[int | None, _option("The steps and ranks that this index was given to.")] = None,
    loader: Annotated[str | None, _option("Of this loader only, by its name in the snapshot.")] = None,
    source: Annotated[str | None, _option("package.module:name or file.py:name of the loader, as for check.")] = None,
    out: Annotated[Path | None, _option("With --step and --source: a file to write its batches to, by rank.")] = None,
    as_json: Annotated[bool, _option("Print JSON.", "--json")] = False,
) -> None:
    """Show which samples a step of a run was trained on, or which steps were given a sample.

    It is computed from the ledger beside the snapshot; a sampler's own order needs --source too. Steps that were taken
    back count as they were made again.
    Without --step and --sample, the ledger's entries are shown. What --out writes is bit-equal to what the ranks were
    given, random augmentations included: `torch.load(out, weights_only=False)[rank]` is a list of batches.

    Exit status: 0; 1 if the ledger is damaged (what is sound is shown), or no step was given the sample; 2 if it does
    not say, or cannot be read.
    """
    import json

    from ..errors import MidepochError
    from . import trace as tracing
    from .shown import printable
    from .targets import TargetError

    if None not in (step, sample) or (out is not None and None in (step, source)):
        fail("--step and --sample are two questions: ask one of them; --out needs --step and --source")
    try:
        answer = tracing.trace(path, step, rank, sample, loader, source, out)
    except (MidepochError, TargetError, TypeError, ValueError, OSError) as error:
        fail(printable(str(error)))
    for line in [json.dumps(answer, default=repr)] if as_json else map(printable, tracing.as_text(answer)):
        print(line)
    if sample is not None and not answer["rows"]:
        fail(f"no step that the ledger knows was given sample {sample}: name another one", DIFFERENT)
    if answer["problems"]:
        raise typer.Exit(DIFFERENT)
