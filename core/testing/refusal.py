"""The laws that a state which does not fit, or is of other data, is refused without side effects."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import MidepochError
from ..state.format import FIELDS, reseal
from ..state.witness import Witness, of_another_sample
from . import items
from .examine import Examination
from .record import Settings, capture_failure, open_loader, see, violation
from .report import HOLDS, Outcome, combined, law, names_all
from .worlds import UNNAMED_VALUES

__all__ = ["refusal", "witness"]

_STATE_ERROR = "midepoch.errors.StateError"
_MISMATCH = "midepoch.errors.StateMismatchError"
_VERSION = "midepoch.errors.StateVersionError"
_CORRUPT = "midepoch.errors.StateCorruptError"
_NONSENSE: dict[str, tuple[Any, ...]] = {
    "position": (-1, 10**30, math.nan, math.inf, True, "3", 1.5, 1.0, None, [1]),
    "epoch": (-1, 10**30, math.nan, True, "0", 0.5, 0.0, None),
    "seed": ("0", None, 1.5, True, math.nan, [0]),
    "size": (-1, "20", True, math.nan, 20.0),
    "world_size": (-1, "1", 1.5, math.nan),
    "batch_size": (-1, "4", 1.5, math.nan),
    "detail": (None, 0, {}, "!!!"),
    "version": (None, "1", True, 1.0),
    "adapter": (None, 0, True),
    "fingerprint": (None, 0, True),
    "witness": (None, 0, True, "!!!"),
    "changed": (None, 0, True, "!!!"),
    "omit": (None, 0, True, "!!!"),
}


@law(
    "refusal",
    cause="load_state_dict trusts its argument, or changes the loader before it has checked everything",
    cure="check keys, types, ranges, checksum and fingerprint first, raise a StateError, and only then change anything",
)
def refusal(examination: Examination) -> Outcome:
    """What does not fit is refused with a typed error, and the loader continues as before."""
    head = examination.observed()
    cut = len(head.passes[0].batches) // 2
    good = head.passes[0].states[cut]
    ours = good.keys() >= set(FIELDS)
    cases = _damaged(examination, good) if ours else _senseless(good)
    outcomes = {}
    if ours:
        for option in ("seed", "size"):
            outcomes[option] = _add_variation(cases, examination, option, cut, good)
    else:
        told = "the state is not midepoch's, so only missing keys, wrong types and None were tried, for any exception"
        outcomes["fixed keys"] = Outcome("holds", told)
    # The good state has the factory's own seed, so a loader that states another one cannot load it first.
    fresh, used = _Moment("before the first batch"), _Moment(f"after {cut} batches", cut)
    for moment in (fresh, used, _Moment("after a load", 0, good)):
        for seed in {case.stated_seed for case in cases}:
            if seed is None or moment.loaded is None:
                options = examination.options(**{} if seed is None else {"seed": seed})
                _offer_all(examination, options, [case for case in cases if case.stated_seed == seed], moment)
    return combined({"damage": HOLDS, **outcomes})


class _Moment(NamedTuple):
    """When states are offered to a loader: so many batches after it is made, or after a load."""

    words: str
    taken: int = 0
    loaded: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class _Case:
    """A state that must be refused: by which error, and with which values in its message."""

    name: str
    state: Any
    kind: str = _STATE_ERROR
    names: tuple[Any, ...] = ()
    stated_seed: int | None = None


def _damaged(examination: Examination, good: dict[str, Any]) -> list[_Case]:
    seal = examination.settings.reseal or reseal

    def resealed(key: str, value: Any, kind: str = _STATE_ERROR, names: tuple[Any, ...] = ()) -> _Case:
        return _Case(f"{key}={value!r}, resealed", _sealed(seal, good | {key: value}), kind, names)

    version = good["version"]
    cases = [
        resealed("version", version + 1, _VERSION, (version + 1, version)),
        resealed("adapter", "another", _MISMATCH, ("another", good["adapter"])),
        _Case("checksum='0'", good | {"checksum": "0"}),
        _Case("checksum=None", good | {"checksum": None}),
    ]
    if isinstance(good["fingerprint"], str):
        cases.append(resealed("fingerprint", _flip(good["fingerprint"]), _MISMATCH))
    if type(size := good["size"]) is int and size >= 0:
        cases += [resealed("size", other, _MISMATCH, (other, size)) for other in (size + 1, size * 2 + 1)]
        cases.append(resealed("position", size + 1))
    cases += [resealed(key, value) for key, values in _NONSENSE.items() for value in values]
    cases += [_Case(f"{key} flipped, not resealed", good | {key: _flip(value)}) for key, value in good.items()]
    for key in good:
        if key != "checksum":
            cases.append(_Case(f"without {key}, resealed", _sealed(seal, _without(good, key)), _CORRUPT))
    cases.append(_Case("an extra key, resealed", _sealed(seal, good | {"extra": 1}), _CORRUPT))
    return cases + _senseless(good, _CORRUPT)


def _senseless(good: dict[str, Any], kind: str = "builtins.Exception") -> list[_Case]:
    shapeless: tuple[Any, ...] = (None, [], "", "state", 3, b"state", {})
    cases = [_Case(repr(value), value, kind) for value in shapeless]
    return cases + [_Case(f"without {key}", _without(good, key), kind) for key in good]


def _sealed(seal: Callable[[dict[str, Any]], dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
    """``state`` resealed; unchanged if it cannot even be sealed, which must be refused as well."""
    try:
        return seal(dict(state))
    except (TypeError, ValueError, KeyError, OverflowError, MidepochError):
        return state


def _without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


def _flip(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value ^ 1
    if isinstance(value, str) and value:
        return value[:-1] + chr(ord(value[-1]) ^ 1)
    return "x"


def _add_variation(
    cases: list[_Case], examination: Examination, option: str, cut: int, good: dict[str, Any]
) -> Outcome:
    """Add the case of a state from a loader with another stated seed or another size of the dataset."""
    if not examination.takes(option):
        return Outcome("not applicable", f"the factory takes no {option}")
    default = examination.default(option)
    if option == "size" and type(good["size"]) is not int:
        return Outcome("not applicable", "the loader does not know its size")
    if option == "size" and default is None:
        return Outcome("not applicable", "the factory's size has no default to vary")
    default = default or 0
    states = examination.head_with(option, default + 1).passes[0].states
    name = f"a state of {option}={default + 1}, loaded with {option}={default}"
    seed = default if option == "seed" else None
    cases.append(_Case(name, states[min(cut, len(states) - 1)], _MISMATCH, (default + 1, default), seed))
    return HOLDS


def _offer_all(examination: Examination, options: Mapping[str, Any], cases: Sequence[_Case], moment: _Moment) -> None:
    by_ids = examination.compares_by_ids()

    def offer(some: Sequence[_Case]) -> Any:
        return examination.investigate(_offer, some, moment, by_ids, options=options)

    rest, kept = offer(cases)
    quiet, _ = offer([])
    if kept and rest == quiet:
        return
    culprits = [case.name for case in cases if offer([case]) != (quiet, True)]
    raise examination.error(
        "after a refused state the loader continues as before",
        f"{moment.words}: not so after the state '{culprits[0] if culprits else 'of several together'}' was refused",
        0, moment.taken, "the loader was changed before everything was checked",
        "check the whole state first, and only then change the loader",
    )  # fmt: skip


def _offer(
    settings: Settings, options: Mapping[str, Any], cases: Sequence[_Case], moment: _Moment, by_ids: bool
) -> tuple[list[Any], bool]:
    """(the batches that follow, whether the state stayed)."""
    with open_loader(settings, options, later=moment.loaded is not None) as loader:
        if moment.loaded is not None:
            loader.load_state_dict(copy.deepcopy(moment.loaded))
        iterator: Iterator[Any] = iter(loader) if moment.taken else iter(())
        for _ in range(moment.taken):
            next(iterator)
        before = items.digest(loader.state_dict())
        for case in cases:
            _check_refused(loader, case, moment.words)
        kept = items.digest(loader.state_dict()) == before
        seen = [see(settings, batch) for batch in (iterator if moment.taken else loader)]
        return [each.ids if by_ids else each.digest for each in seen], kept


def _check_refused(loader: Any, case: _Case, when: str) -> None:
    kind = case.kind.rpartition(".")[2]
    expected = f"{kind} for a state with {case.name}"
    try:
        loader.load_state_dict(copy.deepcopy(case.state))
    except Exception as error:  # noqa: BLE001 - the law examines the kind of exception
        failure = capture_failure(error, "loading a state", traced=False)
    else:
        raise violation(expected, f"{when}: it was loaded", 0)
    if case.kind not in failure.kinds:
        cause = "the error is not of the kind that callers can catch"
        raise violation(expected, f"{when}: {failure}", 0, None, cause, f"raise {kind}")
    if not names_all(failure.message, case.names):
        expected += f", its message naming {' and '.join(map(str, case.names))}"
        raise violation(expected, f"{when}: {failure}", 0, None, *UNNAMED_VALUES)


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
