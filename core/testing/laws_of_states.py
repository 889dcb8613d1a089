"""Laws of states: one is what it was loaded from, asking for it changes nothing, and it survives transport."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import items
from .examine import Examination
from .record import Pass, Recording, Seen, Settings, length_of, open_loader, see, see_rest, violation
from .report import HOLDS, Outcome, combined, law

__all__ = ["chain", "isolation", "observer", "round_trip", "transport"]


@law(
    "round trip",
    cause="the loaded state is used only when iteration starts, and the state until then is that of a fresh loader",
    cure="let state_dict() right after load_state_dict(state) return what was loaded",
)
def round_trip(examination: Examination) -> Outcome:
    """A loaded state is returned, equal, before anything else happens; a loader in use can load one too."""
    head = examination.observed()
    for (epoch, cut), recording in examination.resumed().items():
        examination.sound(recording, "a state to load", epoch, cut)
        examination.same_state(head.passes[epoch].states[cut], recording.loaded, "the loaded state", epoch, cut)
    if examination.capability("exact_order")[0] is False:
        return HOLDS
    in_use = _load_while_running(examination, head)
    return combined({"given back": HOLDS, "a loader in use": in_use})


def _load_while_running(examination: Examination, head: Recording) -> Outcome:
    """Load states, one after another, into a loader that is being iterated; if it refuses, between two passes."""
    blame = ("the earlier load or the running pass is not dropped", "let load_state_dict() set everything")
    places = sorted(examination.followed(examination.places(head)), reverse=True)
    states = [head.passes[epoch].states[cut] for epoch, cut in places]
    longest = max(len(part.batches) for part in head.passes) + 1
    outcome = HOLDS
    for running in (True, False):
        legs, refused = examination.investigate(_load_in_use, states, longest, running, process=1)
        for (epoch, cut), state, (loaded, batches) in zip(places, states, legs, strict=False):
            examination.same_state(state, loaded, "the state that was loaded into a loader in use", epoch, cut, *blame)
            fresh = examination.sound(examination.resumed()[epoch, cut], "a resume", epoch, cut)
            what = f"after a state of {cut} batches was loaded into a loader in use, the batch of one that was not"
            examination.same(fresh.passes[0].batches, batches, what, epoch, cut, *blame)
        if not refused:
            break
        outcome = Outcome("refused clearly", refused)
    return outcome


def _load_in_use(
    settings: Settings, options: Mapping[str, Any], states: Sequence[dict[str, Any]], longest: int, running: bool
) -> tuple[list[tuple[dict[str, Any], list[Seen]]], str]:
    """([(the state returned right after a load, the batches that followed)], why a load was refused).

    ``running``: within a pass; otherwise between two passes.
    """
    legs: list[tuple[dict[str, Any], list[Seen]]] = []
    with open_loader(settings, options, later=True) as loader:
        for state in states:
            iterator = iter(loader)
            for _ in itertools.islice(iterator, 1 if running else longest):
                pass
            try:
                for _ in range(2):  # the second time, nothing has been read since the first
                    loader.load_state_dict(copy.deepcopy(state))
            except Exception as error:  # noqa: BLE001 - any refusal is acceptable here, as long as it is an error
                return legs, f"{type(error).__name__}: {error}"
            loaded = copy.deepcopy(loader.state_dict())
            del iterator
            legs.append((loaded, [see(settings, batch) for batch in itertools.islice(loader, longest)]))
    return legs, ""


@law(
    "observer",
    cause="state_dict() or peek() takes a batch, draws a random number or starts a pass",
    cure="compute the state from the cursor alone; keep a peeked batch to be handed out next",
)
def observer(examination: Examination) -> Outcome:
    """Asking for states, lengths or the next batch changes nothing."""
    examination.need_promise()
    whole = examination.whole()
    counts = [len(part.batches) for part in whole.passes]
    passes: list[_Asked] = examination.investigate(_ask_always, counts)
    for epoch, (expected, asked) in enumerate(zip(whole.passes, passes, strict=True)):
        if asked.peeks:
            rest = expected.batches[asked.first :]
            examination.same(rest, asked.shown, "peek() shows the batch to come", epoch, asked.first)
        what = "with states and the next batch asked for, the batch of the run without"
        examination.same(expected.batches, asked.taken, what, epoch)
    return HOLDS if passes[0].peeks else Outcome("holds", "the loader has no peek()")


class _Asked(NamedTuple):
    """What peek() showed in a pass, and what was taken. ``first``: the batch that it showed first."""

    peeks: bool
    first: int
    shown: list[Seen]
    taken: list[Seen]


def _ask_always(settings: Settings, options: Mapping[str, Any], counts: Sequence[int]) -> list[_Asked]:
    passes: list[_Asked] = []
    with open_loader(settings, options) as loader:
        peeks = callable(getattr(loader, "peek", None))
        # If the length is unknown, an epoch that was read to its end may still be the current one.
        unknown = length_of(loader) is None
        for count in counts:
            asked = _Asked(peeks, int(unknown and bool(passes)), [], [])
            _ask(loader)
            if peeks and not asked.first:
                asked.shown.append(see(settings, loader.peek()))
            iterator = iter(loader)
            _ask(loader)
            for batch in itertools.islice(iterator, count + 1):
                asked.taken.append(see(settings, batch))
                _ask(loader)
                if peeks and len(asked.taken) < count:  # after an epoch's last batch, the pass must end by itself
                    asked.shown.append(see(settings, loader.peek()))
                    _ask(loader)
            passes.append(asked)
    return passes


def _ask(loader: Any) -> None:
    loader.state_dict()
    loader.state_dict()
    for name in ("batches_done", "batches_left", "epoch", "position", "capabilities"):
        # A loader of unknown length raises a TypeError here, as len() does.
        with contextlib.suppress(TypeError):
            getattr(loader, name, None)
    length_of(loader)


@law(
    "isolation",
    cause="the state shares a dict or list with the loader, or load_state_dict pops keys from its argument",
    cure="build a new state each time, and copy what is taken from a loaded one",
)
def isolation(examination: Examination) -> Outcome:
    """A state never changes later, and loading leaves its argument unchanged."""
    by_ids = examination.compares_by_ids()
    head = examination.observed()
    for epoch, cut in [(0, 0), *examination.places(head)]:
        state = head.passes[epoch].states[cut]
        examination.investigate(_share_states, state, epoch, cut, by_ids)
    return HOLDS


def _share_states(
    settings: Settings, options: Mapping[str, Any], state: dict[str, Any], epoch: int, cut: int, by_ids: bool
) -> None:
    def note(batch: Any) -> Any:
        seen = see(settings, batch)
        return seen.ids if by_ids else seen.digest

    with open_loader(settings, options, later=True) as loader:
        given = copy.deepcopy(state)
        loader.load_state_dict(given)
        untouched = items.digest(given) == items.digest(state)
        kept = [loader.state_dict()]
        notes = [items.digest(kept[0])]
        delivered = []
        for batch in loader:
            delivered.append(note(batch))
            kept.append(loader.state_dict())
            notes.append(items.digest(kept[-1]))
        if not untouched or items.digest(given) != items.digest(state):
            raise violation("load_state_dict leaves its argument unchanged", str(given), epoch, cut)
        for number, (later, before) in enumerate(zip(kept, notes, strict=True)):
            if items.digest(later) != before:
                raise violation("a state that never changes later", f"it became {later}", epoch, cut + number)
    with open_loader(settings, options, later=True) as loader:
        given = copy.deepcopy(state)
        loader.load_state_dict(given)
        _spoil(given)
        returned = loader.state_dict()
        before = items.digest(returned)
        _spoil(returned)
        wanted = "a state that belongs to the caller, who may clear it"
        if items.digest(loader.state_dict()) != before:
            raise violation(wanted, "clearing it changed the loader's next state", epoch, cut)
        if [note(batch) for batch in loader] != delivered:
            raise violation(wanted, "clearing it changed what the loader delivers", epoch, cut)


def _spoil(value: Any) -> None:
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            _spoil(part)
        value.clear()


@law(
    "transport",
    cause="the state holds tuples, numpy numbers, tensors or objects, which JSON changes or cannot carry",
    cure="use only dict, list, str, int, float, bool and None in the state",
)
def transport(examination: Examination) -> Outcome:
    """A state passes through JSON (and torch.load with weights_only) into another process unchanged."""
    examination.need_promise()
    head = examination.observed()
    resumed = examination.resumed()
    places = [(0, 0), *examination.places(head)]
    states = [_through_json(examination, head.passes[epoch].states[cut], epoch, cut) for epoch, cut in places]
    longest = max(len(part.batches) for part in head.passes) + 1
    trials = [examination.trial(state=state, passes=2, limit=longest) for state in states]
    for (epoch, cut), recording in zip(places, examination.resume(trials), strict=True):
        examination.sound(recording, "a resume from a state that went through JSON", epoch, cut)
        direct = examination.sound(resumed[epoch, cut], "a resume", epoch, cut)
        for expected, got in zip(direct.passes, recording.passes, strict=True):
            examination.same(expected.batches, got.batches, "the batch of a resume without JSON", epoch, cut)
    return HOLDS


def _through_json(examination: Examination, state: dict[str, Any], epoch: int, cut: int) -> dict[str, Any]:
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise examination.error("a state that JSON can carry", str(error), epoch, cut) from error
    through: dict[str, Any] = json.loads(text)
    examination.same_state(state, through, "the same state after JSON", epoch, cut)
    limit, size = examination.settings.state_bytes, len(text.encode())
    if size > limit:
        raise examination.error(
            f"at most {limit} bytes of JSON", f"{size} bytes", epoch, cut,
            "the state grows with the dataset or the progress", "save the loop's position, not how it got there",
        )  # fmt: skip
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    examination.same_state(state, loaded, "the same state after torch.load(weights_only=True)", epoch, cut)
    return through


@law(
    "chain",
    cause="after a resume, the state counts from the resume and not from the start of the epoch",
    cure="continue the position from the loaded one",
)
def chain(examination: Examination) -> Outcome:
    """A run that is interrupted twice, or three times, in one epoch continues like one that is interrupted once."""
    examination.need_promise()
    head = examination.observed()
    places = examination.places(head)
    at = [head.passes[epoch].states[cut] for epoch, cut in places]
    seconds = examination.resume([examination.trial(state=each, states=True) for each in at])
    compared = False
    for (epoch, cut), second in zip(places, seconds, strict=True):
        done = examination.sound(second, f"a resume after {cut} batches that asks for states", epoch, cut).passes[0]
        trials = [examination.trial(state=each, states=True) for each in done.states[1:-1]]
        thirds = examination.record(trials)
        for more, third in enumerate(thirds, start=1):
            what = f"cut after {cut} and again after {cut + more} batches, the batch of the run cut once"
            examination.sound(third, "a resume of a resume", epoch, cut + more)
            examination.same(done.batches[more:], third.passes[0].batches, what, epoch, cut + more)
            compared = True
        if thirds and len(thirds[0].passes[0].states) > 2:
            fourth: Pass = examination.investigate(see_rest, thirds[0].passes[0].states[1])
            what = f"cut after {cut}, {cut + 1} and {cut + 2} batches, the batch of the run cut once"
            examination.same(done.batches[2:], fourth.batches, what, epoch, cut + 2)
    if not compared:
        return Outcome("not applicable", "an epoch has fewer than three batches, so it cannot be cut twice")
    return HOLDS
