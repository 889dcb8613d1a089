"""The errors and warnings of midepoch. Each message ends in what to do.

Wrong arguments raise Python's own ``TypeError`` and ``ValueError``.
"""

from __future__ import annotations

import sys
import warnings

__all__ = [
    "MidepochError",
    "MidepochWarning",
    "SnapshotError",
    "SourceError",
    "StateCorruptError",
    "StateError",
    "StateMismatchError",
    "StateVersionError",
    "UnsupportedSourceError",
    "warn",
]


class MidepochError(Exception):
    """The base class of all errors of this package."""


class StateError(MidepochError):
    """A state could not be saved or loaded. The loader is unchanged."""


class StateVersionError(StateError):
    """The state was written in a format that this version of midepoch does not read."""


class StateMismatchError(StateError):
    """The state is intact but does not fit: another size, seed, order, adapter or world."""


class StateCorruptError(StateError):
    """The state was damaged, or edited without `midepoch.reseal`: a key, a type, a range or the checksum is wrong."""


class SourceError(MidepochError):
    """The data is at fault: it changed, ended early, does not repeat itself, or could not be read."""


class SnapshotError(MidepochError):
    """At least one process could not write or read a snapshot: a full disk, a damaged file, another run's file."""


class UnsupportedSourceError(MidepochError, TypeError):
    """`midepoch.wrap` cannot resume this source as it is; the message says what to pass instead."""


class MidepochWarning(UserWarning):
    """Warns about something that works but has a cost or a limit, such as a replay."""


def warn(message: str) -> None:
    """Warn, as from the line outside of this package that called into it, however deep the call is."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and (module := frame.f_globals.get("__name__", "")).partition(".")[0] in _PASSED:
        level += "._bootstrap" not in module  # warnings does not count the frames of an import
        frame = frame.f_back
    warnings.warn(message, MidepochWarning, stacklevel=level)


_PASSED = (__name__.partition(".")[0], "contextlib", "importlib")  # a package may be entered through the last two
