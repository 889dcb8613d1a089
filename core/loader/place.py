"""The place of a loader in its data."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import StateError

__all__ = ["LATER", "Place", "Unknown"]


class Unknown(str):
    """In place of a detail that nobody knows: why not. What needs the detail raises `error`, with these words."""

    error: type[BaseException]

    def __new__(cls, why: object, error: type[BaseException] = StateError) -> Unknown:
        """`why`: the words of the source's error, or what the caller has to do."""
        unknown = super().__new__(cls, why)
        unknown.error = error
        return unknown


LATER = "later"
"""In place of a detail, compared by identity: that of the next epoch, for which its session was not asked yet."""


class Place(NamedTuple):
    """One place in the data. It is replaced, never changed."""

    epoch: int  # counted from 0
    position: int  # units of this epoch that all ranks together have received
    # The adapter's own part, if these two numbers do not say all; empty for most sources. Or `Unknown`.
    detail: str = ""
    # The epoch's last batch was handed out, but the epoch has not ended. The detail is that of the next one.
    at_end: bool = False

    def known(self) -> Place:
        """This place. Raises the error of an `Unknown` detail."""
        if isinstance(self.detail, Unknown):
            raise self.detail.error(str(self.detail))
        return self

    def before(self, size: int) -> Place:
        """The end of the epoch before, if this is the beginning of one."""
        return Place(self.epoch - 1, size, self.detail, at_end=True)

    def after(self) -> Place:
        """Where the next batch is: here or, `at_end`, at the beginning of the next epoch."""
        return Place(self.epoch + 1, 0, self.detail) if self.at_end else self
