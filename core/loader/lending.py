"""Which loader an object is, or has been lent."""

from __future__ import annotations

from .loader import Loader

__all__ = ["LENDS", "loader_of"]

LENDS = "_midepoch_lends"  # a method of classes whose objects are lent a loader: it returns that


def loader_of(source: object) -> Loader | None:
    """The loader that `source` is, or that `StatefulIterable` lends it; None where it has not been wrapped."""
    if isinstance(source, Loader):
        return source
    lend = getattr(type(source), LENDS, None)
    lent: Loader | None = None if lend is None else lend(source)
    return lent
