"""What a loader's promises rest on: what each resume proves, what has been tried, what is believed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import MidepochError
from ..state.witness import Witness
from .examine import Examination
from .record import CAPABILITIES
from .report import LawError, Promise, Verdict
from .trials import TRIALS

__all__ = ["stand"]

# The laws that would be broken if a promise were not kept.
_LAWS: Mapping[str, tuple[str, ...]] = {
    "exact_order": ("tail", "next epoch", "boundary"),
    "exact_augmentations": ("tail", "next epoch"),
    "constant_time_resume": ("cost",),
    "elastic_world": ("topology",),
    "elastic_workers": ("topology",),
    "rank_independent": ("topology",),
    "skips": ("holes",),
}


def stand(examination: Examination, trials: Sequence[Verdict], laws: Sequence[Verdict]) -> tuple[Promise, ...]:
    """What each promise of a loader rests on, after its trials and laws. Empty if an uninterrupted run fails."""
    examination.begin("", "", "")
    try:
        states = [each for part in examination.observed().passes[:1] for each in part.states[1:2]]
        rows = [_of_the_data(state) for state in states]
        for name in CAPABILITIES:
            rows.append(_of(examination, name, trials, laws))
    except LawError:
        return ()
    return tuple(rows)


def _of_the_data(state: Mapping[str, Any]) -> Promise:
    """What a resume compares before it goes on."""
    detail = str(state.get("detail", ""))
    proofs = []
    try:
        witness = Witness.parse(state.get("witness", ""))
    except MidepochError:
        witness = None
    if witness is not None and witness.told:
        proofs.append("the first sample of the epoch, its content and its bits")
    if re.search(r"\bcrc=[0-9a-f]{8}", detail):
        proofs.append("the sampler's list of the epoch")
    if re.search(r"\bchain=[0-9a-f]{8}", detail):
        proofs.append("a chain of what is read again up to the position")
    if proofs:
        return Promise("same data", "proved at each resume", f"compared with the state: {'; '.join(proofs)}")
    return Promise("same data", "believed", "the state holds nothing that tells other data")


def _of(examination: Examination, name: str, trials: Sequence[Verdict], laws: Sequence[Verdict]) -> Promise:
    holds, reason = examination.capability(name)
    if holds is None:
        return Promise(name, "not declared", reason)
    if not holds:
        return Promise(name, "no", reason)
    of = [each.name for each in TRIALS if name in each.of]
    known = [*(each for each in trials if each.law in of), *(each for each in laws if each.law in _LAWS[name])]
    broken = [each for each in known if each.status == "failed"]
    if broken:
        return Promise(name, "not kept", f"{broken[0].law}: {broken[0].reason}")
    tried = [each for each in known if each.status == "holds"] if _examined(examination, name) else []
    if tried:
        return Promise(name, "tried", f"by {', '.join(each.law for each in tried)}; {reason}")
    return Promise(name, "believed", reason)


def _examined(examination: Examination, name: str) -> bool:
    """Whether make_loader can be asked for what the promise is about."""
    if name == "elastic_workers":
        return bool(examination.most_workers)
    return len(examination.worlds) > 1 if name in ("elastic_world", "rank_independent") else True
