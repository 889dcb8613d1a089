"""What a loader's promises rest on: what each resume proves, what has been tried, what is believed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import MidepochError
from ..state.witness import Witness
from .examine import Examination
from .laws import LAWS
from .record import CAPABILITIES
from .report import LawError, Promise, Verdict
from .trials import TRIALS

__all__ = ["stand"]


def stand(examination: Examination, trials: Sequence[Verdict], laws: Sequence[Verdict]) -> tuple[Promise, ...]:
    """What each promise of a loader rests on, after its trials and laws. Empty if an uninterrupted run fails."""
    examination.begin()
    try:
        states = [each for part in examination.observed().passes[:1] for each in part.states[1:2]]
        return (*map(_of_the_data, states), *(_of(examination, name, trials, laws) for name in CAPABILITIES))
    except LawError:
        return ()


def _of_the_data(state: Mapping[str, Any]) -> Promise:
    """What a resume compares before it goes on."""
    detail = str(state.get("detail", ""))
    proofs = []
    with contextlib.suppress(MidepochError):
        if (witness := Witness.parse(state.get("witness", ""))) is not None and witness.told:
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
    of = [each.name for each in (*TRIALS, *LAWS.values()) if name in each.of]
    known = [each for each in (*trials, *laws) if each.law in of]
    broken = [each for each in known if each.status == "failed"]
    if broken:
        return Promise(name, "not kept", f"{broken[0].law}: {broken[0].reason}")
    ranks, workers = len(examination.worlds) > 1, bool(examination.most_workers)
    askable = {"elastic_workers": workers, "elastic_world": ranks, "rank_independent": ranks}.get(name, True)
    tried = [each for each in known if askable and each.status == "holds"]
    if tried:
        return Promise(name, "tried", f"by {', '.join(each.law for each in tried)}; {reason}")
    return Promise(name, "believed", reason)
