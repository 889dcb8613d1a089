"""What a law is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .examine import Examination
from .report import Outcome

__all__ = ["Law", "law"]


@dataclass(frozen=True)
class Law:
    """A property of resumable loaders.

    Attributes:
        name: as in reports.
        sentence: what it says.
        examine: takes an `Examination`; returns an `Outcome` or raises a `LawError`.
        cause: what usually breaks it.
        cure: what to do about that.
    """

    name: str
    sentence: str
    examine: Callable[[Examination], Outcome]
    cause: str
    cure: str


def law(name: str, *, cause: str, cure: str) -> Callable[[Callable[[Examination], Outcome]], Law]:
    """Make a `Law` of a function; its docstring is the law's sentence."""

    def define(function: Callable[[Examination], Outcome]) -> Law:
        return Law(name, (function.__doc__ or "").strip(), function, cause, cure)

    return define
