"""What a loader promises, each answer with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from ..trying import Finding

__all__ = ["Capabilities", "Capability", "with_findings", "with_then"]


@dataclass(frozen=True)
class Capability:
    """Yes or no, and why. Its truth value is the yes or no.

    Attributes:
        holds: whether the loader promises it.
        reason: in a sentence.
        believed: it was neither proved nor tried; the promise rests on what the source says of itself.
    """

    holds: bool
    reason: str
    believed: bool = False

    def __bool__(self) -> bool:
        return self.holds

    @property
    def answer(self) -> str:
        """One word: yes, no or believed."""
        return "no" if not self.holds else "believed" if self.believed else "yes"

    def __str__(self) -> str:
        return f"{self.answer}: {self.reason}"


@dataclass(frozen=True, repr=False)
class Capabilities:
    """What a wrapped loader promises; each answer comes with its reason in a sentence, a line each as text.

    Attributes:
        exact_order: a resumed epoch continues with exactly the samples that were left, in the same order.
        exact_augmentations: the random augmentations of these samples are the same, bit for bit.
        constant_time_resume: a resume costs the same whatever the progress.
        elastic_world: a run may continue on another number of processes.
        elastic_workers: a run may continue with another number of worker processes.
        rank_independent: the state is the same on every rank, so one rank's state is enough.
        skips: positions can be left out of an epoch: `Loader.skip`.
    """

    exact_order: Capability
    exact_augmentations: Capability
    constant_time_resume: Capability
    elastic_world: Capability
    elastic_workers: Capability
    rank_independent: Capability
    skips: Capability = Capability(False, "only what is read by index, in an order of midepoch or a list, can skip")

    def __repr__(self) -> str:
        return "\n".join(f"{field.name}: {getattr(self, field.name)}" for field in fields(self))


def with_then(exact: Capability, streams: bool) -> Capability:
    """The answer about augmentations where a function passed as ``then=`` may draw, too."""
    if not exact:
        return exact
    if not streams:
        return Capability(False, "randomness='none': then= draws from the caller's generators, which are not restored")
    return replace(exact, reason=f"{exact.reason}; numbers drawn in then= are the batch's: exact on the same split")


def with_findings(promises: Capabilities, findings: Iterable[Finding]) -> Capabilities:
    """What is left of promises after trials and reading: what was not tried is believed, what was broken is no."""
    order, drawn = promises.exact_order, promises.exact_augmentations
    broken: list[str] = []
    for finding in findings:
        if finding.unseen:
            unseen = f"never compared, since unknown: {', '.join(finding.unseen)}"
            order = replace(order, reason=f"{order.reason}; {unseen}")
        if finding.untried and finding.order:
            order = _believed(order, finding.untried)
        elif finding.untried:
            drawn = _believed(drawn, finding.untried)
        if finding.differs:
            broken.append(finding.differs)
            drawn = Capability(False, "; ".join(broken))
            order = drawn if finding.order else order
    return replace(promises, exact_order=order, exact_augmentations=drawn)


def _believed(said: Capability, why: str) -> Capability:
    return replace(said, reason=f"{said.reason}; {why}", believed=True) if said.holds else said
