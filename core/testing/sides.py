"""What happens to the samples of a job that is cut: a few answers for each side of a loader, to be shown in a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from .examine import Examination, Place
from .record import Pass, Recording
from .report import LawError
from .worlds import contents_of, count, starts_next_epoch

__all__ = ["Answer", "Comparison", "answer_all"]


@dataclass(frozen=True)
class Answer:
    """One cell of the table: a few words, and whether that is good."""

    text: str
    tone: Literal["good", "bad", "other"]


Comparison = Mapping[str, Mapping[str, Answer]]
"""The table: heading of a side, such as "without midepoch" -> question -> answer."""

Ask = Callable[[Examination, str, Recording, Sequence[Place]], dict[str, Answer]]
_EXACT = Answer("exact", "good")
_REST = "rest of an epoch that was cut"


def answer_all(examination: Examination) -> dict[str, Answer]:
    """Question -> answer. If not even an uninterrupted run succeeds, one answer says so."""
    examination.begin("sides")
    try:
        head = examination.observed()
        places = examination.places(head)
    except LawError as error:
        return {_REST: _failing(error)}
    if not places:
        return {_REST: Answer("an epoch is one batch: nothing to cut", "other")}
    answers: dict[str, Answer] = {}
    asks: dict[str, Ask] = {_REST: _unchanged}
    for world_size in examination.worlds[1:2]:
        asks[f"continued on {world_size} ranks"] = partial(_changed, world_size=world_size)
    if workers := examination.most_workers:
        asks[f"continued with {workers} workers"] = partial(_changed, num_workers=workers)
    if examination.takes("batch_size") and (size := examination.default("batch_size")) is not None:
        asks[f"continued with batches of {size + 1}"] = partial(_changed, batch_size=size + 1)
    asks["its state"] = _state
    for question, ask in asks.items():
        try:
            answers |= ask(examination, question, head, places)
        except LawError as error:
            answers[question] = _failing(error)
    return answers


def _failing(error: LawError) -> Answer:
    return Answer(f"fails: {error.got.splitlines()[0].partition(' ')[0]}", "bad")


def _unchanged(examination: Examination, question: str, head: Recording, places: Sequence[Place]) -> dict[str, Answer]:
    rest, following = [], []
    for (epoch, cut), recording in zip(places, examination.resume_from(head, places, places), strict=True):
        rest.append(_answer(examination, head.passes[epoch], cut, [recording], 0))
        following.append(_answer(examination, head.passes[epoch + 1], 0, [recording], 1))
    return {question: _worst(rest), "the epoch after it": _worst(following)}


def _changed(
    examination: Examination, question: str, head: Recording, places: Sequence[Place], world_size: int = 1,
    **options: int,
) -> dict[str, Answer]:  # fmt: skip
    """On so many ranks, or with another option of the loader."""
    if options:
        places = places[:2]  # each may start processes
        resumed = [examination.resume_from(head, places, (), **options)]
    else:
        resumed = examination.resume_world([head], places, world_size)
    answers = []
    for number, (epoch, cut) in enumerate(places):
        whole = head.passes[epoch]
        batch = max([options.get("batch_size", 0), *map(len, whole.ids)])
        # So much must be left that no loader which drops its tail starts the next epoch instead.
        if not starts_next_epoch(examination, count(whole.ids[cut:]), world_size, batch):
            answers.append(_answer(examination, whole, cut, [each[number] for each in resumed], 0, bool(options)))
    return {question: _worst(answers)}


def _state(examination: Examination, question: str, head: Recording, places: Sequence[Place]) -> dict[str, Answer]:
    state = head.passes[0].states[1]
    if set(state) == {"epoch", "batches"}:
        return {question: Answer("a number of batches, which are read again", "other")}
    declared, _ = examination.capability("constant_time_resume")
    read = {True: ", nothing is read again", False: ", what was read is read again", None: ""}[declared]
    try:
        size = f"{len(json.dumps(state))} bytes"
    except (TypeError, ValueError):  # a state of another library, with tensors for example
        size = "not JSON"
    return {question: Answer(f"{size}{read}", "good" if declared else "other")}


def _answer(
    examination: Examination, whole: Pass, cut: int, resumed: Sequence[Recording], number: int, elastic: bool = False
) -> Answer:
    """What became of an epoch, of which ``cut`` batches were given, and the rest by pass ``number`` of each resume."""
    for recording in resumed:
        if (failure := recording.failure) is not None:
            refused = "midepoch.errors.StateError" in failure.kinds
            return Answer("refused", "other") if refused else Answer(f"fails: {str(failure).partition(' ')[0]}", "bad")
    parts = [recording.passes[number] for recording in resumed]
    unchanged = len(parts) == 1 and not elastic
    if len(parts) == 1 and parts[0].batches == whole.batches[cut:]:
        return _EXACT
    if examination.naming is not None and examination.naming.blind:
        untold = Answer("not known: nothing names the samples", "other")
        return Answer("other batches", "bad") if unchanged else untold
    order = count(whole.ids)
    got = count(whole.ids[:cut]) + count(ids for part in parts for ids in part.ids)
    lost, twice = (order - got).total(), (got - order).total()
    settings, world_size = examination.settings, len(parts)
    padding, dropped = (world_size - 1 if settings.tail == rule else 0 for rule in ("pad", "drop"))
    if settings.drop_last:
        # Which samples an uninterrupted run leaves out depends on the batch size: they are neither lost nor surplus.
        twice = (Counter({name: number for name, number in got.items() if name in order}) - order).total()
        dropped = world_size * max(len(ids) for part in (whole, *parts) for ids in part.ids) - 1
    if lost > dropped or twice > padding:
        # Samples that are named by their content have another name where they draw other random numbers.
        strangers = sum(number for name, number in got.items() if name not in order)
        told = f"{lost} of {order.total()} samples {'not the same' if strangers else 'lost'}"
        again = f", {twice - strangers} twice" if twice > strangers or not strangers else ""
        return Answer(f"{told}{again}", "bad")
    rest, given = ([sample for ids in each for sample in ids] for each in (whole.ids[cut:], parts[0].ids))
    if unchanged and rest != given:
        return Answer("the same samples in another order", "bad")
    known = contents_of([whole])
    if any(not content <= known[name] for name, content in contents_of(parts).items() if name in known):
        return Answer("the same samples, with other content", "bad")
    return _EXACT


def _worst(answers: Sequence[Answer]) -> Answer:
    """The answer to show: the first bad one at the cut in the middle, else any that is not good."""
    middle = [*answers[len(answers) // 2 :], *answers]
    bad = (each for tone in ("bad", "other") for each in middle if each.tone == tone)
    return next(bad, answers[0] if answers else Answer("too little is left", "other"))
