"""What the commands share: reading lists of arguments, exit statuses, and how they end."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

__all__ = ["DIFFERENT", "INTERRUPTED", "UNABLE", "fail", "integers", "names", "require", "sigterm_unwinds"]

DIFFERENT, UNABLE, INTERRUPTED = 1, 2, 130  # exit statuses


def names(text: str) -> list[str]:
    """The names in a list with commas."""
    return [part.strip() for part in text.split(",")]


def integers(text: str) -> tuple[int, ...]:
    """The integers in a list with commas.

    Raises:
        typer.BadParameter: one of them is no integer.
    """
    import typer  # `main` has made sure that it is there

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"numbers with commas between them, such as 2,3,1; got {text!r}") from None


def require(extra: str, *modules: str) -> None:
    """Fail unless these modules are installed; the message names the extra that brings them."""
    missing = [name for name in modules if not _is_installed(name)]
    if missing:
        fail(f"this command needs {', '.join(missing)}: pip install 'midepoch[{extra}]'")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def fail(message: str, status: int = UNABLE) -> NoReturn:
    """Print the message to standard error, and exit with the status."""
    print(f"midepoch: {message}", file=sys.stderr)
    raise SystemExit(status)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Inside, SIGTERM (from `kill` or `timeout`) raises SystemExit, so that the command ends what it has started."""

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
