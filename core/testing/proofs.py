"""The laws about what a loader promises: its states prove which data they are of, and what fails is said at once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ..errors import MidepochError
from ..state.format import reseal
from ..state.witness import Witness, of_another_sample
from .examine import Examination
from .law import law
from .record import CAPABILITIES, Settings, open_loader, violation
from .report import HOLDS, Outcome

__all__ = ["honesty", "witness"]

_MISMATCH = "midepoch.errors.StateMismatchError"


@law(
    "witness",
    cause="the first sample of the epoch is not compared with what the state says of it",
    cure="read it before the first batch, and raise a StateMismatchError if it is another sample",
)
def witness(examination: Examination) -> Outcome:
    """A state of other data is refused before the first batch."""
    head = examination.observed()
    cut = max(1, len(head.passes[0].batches) // 2)
    state = head.passes[0].states[cut]
    try:
        found = Witness.parse(state.get("witness", ""))
    except MidepochError:
        return Outcome("not applicable", "the state's witness is not midepoch's")
    if found is None or not found.told:
        return Outcome("not applicable", "the state has no witness: nothing of the data is compared at a resume")
    if found.epoch != state["epoch"]:
        return Outcome("not applicable", "an epoch has one batch: what differs at its end may be meant to")
    seal = examination.settings.reseal or reseal
    other = seal({**state, "witness": str(of_another_sample(found))})
    trials = [examination.trial(state=each) for each in (state, other)]
    same, changed = examination.resume(trials)
    examination.sound(same, "a resume over the same data", 0, cut)
    if changed.failure is None or _MISMATCH not in changed.failure.kinds:
        wanted = "a StateMismatchError where the first sample of the epoch is another one"
        raise examination.error(wanted, str(changed.failure or "it continues"), 0, cut)
    return HOLDS


@law(
    "honesty",
    cause="a promise is tried too late, or only when it has already been broken",
    cure="try it when reading begins, and say in capabilities what does not hold before the first state can be saved",
)
def honesty(examination: Examination) -> Outcome:
    """What a loader promises with its first state, after its first batch, it still promises after two epochs."""
    reason = examination.investigate(_promises_kept)
    return Outcome("not promised", reason) if reason else HOLDS


def _promises_kept(settings: Settings, options: Mapping[str, Any]) -> str:
    """What was taken back in time. What is taken back too late breaks the law."""
    with open_loader(settings, options) as loader:
        if getattr(loader, "capabilities", None) is None:
            return ""
        stated = _promises(loader)
        batches = 0
        first: dict[str, bool] = {}
        for epoch in range(2):
            # Another law judges an epoch that fails.
            with contextlib.suppress(MidepochError):
                for _ in loader:
                    batches += 1
                    if not first:
                        with contextlib.suppress(Exception):  # a source may have no state here
                            loader.state_dict()
                    promised = _promises(loader)
                    first = first or promised
                    for name in CAPABILITIES:
                        if first[name] and not promised[name]:
                            got = f"after {batches} batches it is no: {getattr(loader.capabilities, name).reason}"
                            raise violation(f"{name} as it was promised with the first state", got, epoch, batches)
        taken_back = [name for name in CAPABILITIES if first and stated[name] and not first[name]]
        return "; ".join(f"{name} is no: {getattr(loader.capabilities, name).reason}" for name in taken_back)


def _promises(loader: Any) -> dict[str, bool]:
    return {name: bool(getattr(loader.capabilities, name, False)) for name in CAPABILITIES}
