"""What the commands share: parsing lists, exit statuses, and how they end."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

from ..errors import SnapshotError

__all__ = ["DIFFERENT", "INTERRUPTED", "UNABLE", "fail", "integers", "names", "require", "sigterm_unwinds", "write_new"]

DIFFERENT, UNABLE, INTERRUPTED = 1, 2, 130  # exit statuses


def names(text: str) -> list[str]:
    """The names in a list separated by commas."""
    return [part.strip() for part in text.split(",")]


def integers(text: str) -> tuple[int, ...]:
    """The integers in a list separated by commas.

    Raises:
        typer.BadParameter: one of them is not an integer.
    """
    import typer  # `main` has checked that it is installed

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"give numbers separated by commas, such as 2,3,1; got {text!r}") from None


def require(extra: str, *modules: str) -> None:
    """Exit unless these modules are installed. The message names the extra to install."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"this command needs {', '.join(missing)}: pip install 'midepoch[{extra}]'")


def fail(message: str, status: int = UNABLE) -> NoReturn:
    """Print the message to standard error, and exit with the status."""
    print(f"midepoch: {message}", file=sys.stderr)
    raise SystemExit(status)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Make SIGTERM (from `kill` or `timeout`) raise SystemExit inside, so that the command ends what it has started."""

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_new(out: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file that does not exist yet. Raises SnapshotError if it does, or cannot be written."""
    try:
        with out.open("xb") as file:
            write(file)
    except FileExistsError:
        raise SnapshotError(f"{out} exists already: name a file that does not") from None
    except Exception as error:
        out.unlink(missing_ok=True)
        raise SnapshotError(f"{out} cannot be written ({str(error)[:200]}): name another place") from error
