"""Every error that midepoch raises on purpose. Each message ends in what to do.

Wrong arguments raise Python's own ``TypeError`` and ``ValueError``.
"""

from __future__ import annotations

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
]


class MidepochError(Exception):
    """The root of all errors of this package."""


class StateError(MidepochError):
    """A state cannot be given or cannot be loaded. The loader is as it was before the call."""


class StateVersionError(StateError):
    """The state was written in a format that this version of midepoch does not read."""


class StateMismatchError(StateError):
    """The state is sound but belongs to something else: another size, seed, order, adapter or world."""


class StateCorruptError(StateError):
    """The state was damaged, or edited without `midepoch.reseal`: a key, a type, a range or the checksum is wrong."""


class SourceError(MidepochError):
    """The data itself is at fault: it changed, ended early, does not repeat itself, or could not be read."""


class SnapshotError(MidepochError):
    """A snapshot could not be written or read, on any process: the disk, a damaged file, somebody else's file."""


class UnsupportedSourceError(MidepochError, TypeError):
    """`midepoch.wrap` cannot resume this source as it is; the message says what to pass instead."""


class MidepochWarning(UserWarning):
    """Something that works but that its user should know: a replay's cost, a position given up."""
