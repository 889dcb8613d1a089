"""What a law is, how it ends, in one of the words of `MEANINGS`, and the report of all laws."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "HOLDS", "MEANINGS", "InapplicableError", "Law", "LawError", "Outcome", "Promise", "Report", "Verdict", "combined",
    "law", "legend", "names_all", "reach",
]  # fmt: skip

Ending = Literal["holds", "refused clearly", "not promised", "not applicable"]
Status = Ending | Literal["failed"]

MEANINGS: Mapping[Status, str] = {
    "holds": "tried, and true",
    "failed": "tried, and not true",
    "refused clearly": "tried: the loader raises an error that names the cause",
    "not promised": "the loader's capabilities say no, so there is no promise to try",
    "not applicable": "it could not be tried, for the reason given",
}
"""Status of a law or trial -> what that means. Whoever shows statuses shows these words."""


@dataclass(eq=False)
class LawError(AssertionError):
    """A loader breaks a law.

    Attributes:
        law: the name of the law.
        epoch: the epoch with the failure, or None if that is not meaningful.
        batch: the number of the batch in that epoch, or of batches taken before the cut; None as above.
        expected: what the law requires, as text.
        got: what the loader did.
        cause: what usually causes this.
        cure: what to do about it.
        report: the whole report, if `check_resumable` raised this.
    """

    law: str
    epoch: int | None
    batch: int | None
    expected: str
    got: str
    cause: str
    cure: str
    report: Report | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # Exceptions are pickled by their arguments.
        super().__init__(self.law, self.epoch, self.batch, self.expected, self.got, self.cause, self.cure)

    @property
    def place(self) -> str:
        """Where it happened, such as ``epoch 1, batch 3``; '' if that is not meaningful."""
        places = (("epoch", self.epoch), ("batch", self.batch))
        return ", ".join(f"{name} {value}" for name, value in places if value is not None)

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return (
            f"the law '{self.law}' is broken{where}\n  expected: {self.expected}\n  got:      {self.got}\n"
            f"  usually:  {self.cause}\n  cure:     {self.cure}"
        )


class InapplicableError(Exception):
    """A law cannot be examined further, and ends in this status; the message says why."""

    def __init__(self, reason: str, status: Ending = "not applicable") -> None:
        super().__init__(reason)
        self.status: Ending = status


@dataclass(frozen=True)
class Outcome:
    """What a law found when it did not raise. ``reason`` is a sentence, empty if the law simply holds."""

    status: Ending
    reason: str = ""


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


@dataclass(frozen=True)
class Verdict:
    """One line of a `Report`. ``error`` is set if and only if ``status`` is ``"failed"``. It took ``seconds``."""

    law: str
    status: Status
    reason: str
    error: LawError | None
    seconds: float


@dataclass(frozen=True)
class Promise:
    """What a promise of a loader rests on. "not kept": a trial or a law shows that it is promised wrongly."""

    name: str  # a capability, or "same data"
    standing: Literal["proved at each resume", "tried", "believed", "no", "not kept", "not declared"]
    reason: str  # in a sentence


@dataclass(frozen=True, repr=False)
class Report:
    """The result of an examination.

    Attributes:
        verdicts: one for each examined law, in the order of the laws.
        trials: one for each trial; empty from `check_resumable`, which makes none.
        promises: what each promise rests on; empty without trials.
    """

    verdicts: tuple[Verdict, ...]
    trials: tuple[Verdict, ...] = ()
    promises: tuple[Promise, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether no law and no trial failed. Read ``str(report)`` for those that were not applicable."""
        return not self.failures

    @property
    def failures(self) -> tuple[LawError, ...]:
        """The errors of the trials and laws that failed. A trial names the cause, so trials come first."""
        return tuple(verdict.error for verdict in (*self.trials, *self.verdicts) if verdict.error is not None)

    def __getitem__(self, law: str) -> Verdict:
        return {verdict.law: verdict for verdict in self.verdicts}[law]

    def __repr__(self) -> str:
        lines = []
        for verdict in self.verdicts:
            lines.append(f"{verdict.law:<14} {verdict.status:<16} {verdict.seconds:6.2f} s  {verdict.reason}".rstrip())
            if verdict.error is not None:
                lines.append(str(verdict.error))
        return "\n".join(lines)


def legend(verdicts: Iterable[Verdict]) -> str:
    """What the words in a table of verdicts mean, to stand below it; '' if all of them explain themselves."""
    present = {verdict.status for verdict in verdicts}
    return "; ".join(f"{each}: {MEANINGS[each]}" for each in MEANINGS if each in present - {"holds", "failed"})


def reach(name: str, examine: Callable[[], Outcome]) -> Verdict:
    """The verdict of a law or trial of this name."""
    begun = time.perf_counter()
    try:
        outcome = examine()
    except InapplicableError as ended:
        outcome = Outcome(ended.status, str(ended))
    except LawError as error:
        return Verdict(name, "failed", error.got.splitlines()[0], error, time.perf_counter() - begun)
    return Verdict(name, outcome.status, outcome.reason, None, time.perf_counter() - begun)


HOLDS = Outcome("holds")


def combined(outcomes: Mapping[str, Outcome]) -> Outcome:
    """One outcome for the named parts of a law. The reason names the parts that do not simply hold."""
    told = []
    for name, outcome in outcomes.items():
        if outcome.reason:
            status = "" if outcome.status == "holds" else f" {outcome.status}"
            told.append(f"{name}{status}: {outcome.reason}")
    statuses = {outcome.status for outcome in outcomes.values()}
    first: tuple[Ending, ...] = ("refused clearly", "not promised", "holds", "not applicable")
    return Outcome(next((each for each in first if each in statuses), "not applicable"), "; ".join(told))


def names_all(message: str, values: Iterable[Any]) -> bool:
    """Whether a message contains every value: numbers as whole numbers, texts as they are."""
    numbers = re.findall(r"-?\d+", message.replace(",", ""))
    return all(str(value) in numbers if isinstance(value, int) else str(value) in message for value in values)
