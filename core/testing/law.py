"""The definition of a law."""

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
        name: in reports.
        sentence: the property, in one sentence.
        examine: takes an `Examination`; returns an `Outcome` or raises a `LawError`.
        cause: the usual reason for a failure.
        cure: what to do about it.
    """

    name: str
    sentence: str
    examine: Callable[[Examination], Outcome]
    cause: str
    cure: str


def law(name: str, *, cause: str, cure: str) -> Callable[[Callable[[Examination], Outcome]], Law]:
    """Make a `Law` from a function. Its docstring is the law's sentence."""

    def define(function: Callable[[Examination], Outcome]) -> Law:
        return Law(name, (function.__doc__ or "").strip(), function, cause, cure)

    return define
