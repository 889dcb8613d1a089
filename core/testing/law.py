"""The definition of a law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .report import Outcome

__all__ = ["Law", "law"]


@dataclass(frozen=True)
class Law:
    """A property of resumable loaders, or a trial of what one promises.

    Attributes:
        name: in reports.
        sentence: the property, in one sentence.
        examine: takes an `Examination`, and a trial also seconds; returns an `Outcome` or raises a `LawError`.
        cause: the usual reason for a failure.
        cure: what to do about it.
        of: the capabilities that are promised wrongly if it does not hold.
    """

    name: str
    sentence: str
    examine: Callable[..., Outcome]
    cause: str
    cure: str
    of: tuple[str, ...] = ()


def law(name: str, *of: str, cause: str, cure: str) -> Callable[[Callable[..., Outcome]], Law]:
    """Make a `Law` from a function. Its docstring is the law's sentence."""

    def define(function: Callable[..., Outcome]) -> Law:
        return Law(name, (function.__doc__ or "").strip(), function, cause, cure, of)

    return define
