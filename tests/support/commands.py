"""The command line in this process, which has imported everything already."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from midepoch.tools.cli import main


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(*arguments: str | Path, folder: Path | None = None, terminal: bool = False) -> Done:
    """`midepoch ARGUMENTS` in a folder; with errors on a terminal, or not."""
    stdout, stderr = io.StringIO(), Terminal() if terminal else io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder or Path.cwd())
        patch.setenv("COLUMNS", "160")
        patch.setattr(sys, "argv", ["midepoch", *map(str, arguments)])
        patch.setattr(sys, "path", list(sys.path))
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                main()
                status: Any = 0
            except SystemExit as end:
                status = end.code or 0
    return Done(status, stdout.getvalue(), stderr.getvalue())


def script(path: Path, *arguments: str | Path) -> str:
    """What a script prints, which is run as the main program."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            assert not end.code, printed.getvalue()
    return printed.getvalue()
