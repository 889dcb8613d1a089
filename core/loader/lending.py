"""From an object to its loader: the object itself, or the one that `StatefulIterable` made for it."""

from __future__ import annotations

from .loader import Loader

__all__ = ["LENDS", "lends", "loader_of"]

LENDS = "_midepoch_lends"  # the method by which a StatefulIterable returns its loader


def loader_of(source: object) -> Loader | None:
    """The loader that `source` is, or that its class made for it; None if it has not been wrapped."""
    if isinstance(source, Loader):
        return source
    lend = getattr(type(source), LENDS, None)
    lent: Loader | None = None if lend is None else lend(source)
    return lent


def lends(source: object) -> bool:
    """Whether `loader_of` gives its loader, perhaps only later."""
    return isinstance(source, Loader) or hasattr(type(source), LENDS)
