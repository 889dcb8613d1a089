"""What happens to the samples of a job that is cut: a few answers for each side of a loader, to be shown in a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .examine import Examination
from .record import Pass, Recording
from .report import LawError
from .worlds import contents_of, count, starts_next_epoch

__all__ = ["Answer", "Comparison", "answer_all"]

Place = tuple[int, int]


@dataclass(frozen=True)
class Answer:
    """One cell of the table: a few words, and whether that is good."""

    text: str
    tone: Literal["good", "bad", "other"]


@dataclass(frozen=True)
class Comparison:
    """The table: for each side its heading, and for each question the answers.

    Attributes:
        headings: of the sides, such as "without midepoch".
        rows: question, and an answer for each side.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Answer, ...]], ...]

    @classmethod
    def of(cls, sides: Mapping[str, Mapping[str, Answer]]) -> Comparison:
        """The table of ``heading -> question -> answer``. What one side only answers is open on the others."""
        questions = dict.fromkeys(question for answers in sides.values() for question in answers)
        rows = [
            (each, tuple(answers.get(each, Answer("-", "other")) for answers in sides.values()))
            for each in questions
        ]
        return cls(tuple(sides), tuple(rows))


EXACT = Answer("exact", "good")


def answer_all(examination: Examination) -> dict[str, Answer]:
    """Question -> answer. If not even an uninterrupted run succeeds, one answer says so."""
    examination.begin("sides", "", "")
    try:
        head = examination.observed()
        places = examination.places(head)
    except LawError as error:
        return {_REST: _failing(error)}
    if not places:
        return {_REST: Answer("an epoch is one batch: nothing to cut", "other")}
    return {question: answer for ask in (_unchanged, _world, _options, _costs)
            for question, answer in _asked(ask, examination, head, places).items()}  # fmt: skip


def _asked(
    ask: Callable[[Examination, Recording, Sequence[Place]], dict[str, Answer]],
    examination: Examination,
    head: Recording,
    places: Sequence[Place],
) -> dict[str, Answer]:
    try:
        return ask(examination, head, places)
    except LawError as error:
        return {_QUESTIONS[ask.__name__]: _failing(error)}


def _failing(error: LawError) -> Answer:
    return Answer(f"fails: {error.got.splitlines()[0].partition(' ')[0]}", "bad")


_REST = "rest of an epoch that was cut"
_QUESTIONS = {
    "_unchanged": _REST, "_world": "continued on other ranks", "_options": "continued with other workers",
    "_costs": "its state",
}  # fmt: skip


def _unchanged(examination: Examination, head: Recording, places: Sequence[Place]) -> dict[str, Answer]:
    rest, following = [], []
    for (epoch, cut), recording in zip(places, examination.resume_from(head, places, places), strict=True):
        whole, after = head.passes[epoch], head.passes[epoch + 1]
        rest.append(_answer(examination, whole, cut, [whole], [recording], 0))
        following.append(_answer(examination, after, 0, [after], [recording], 1))
    return {_REST: _worst(rest), "the epoch after it": _worst(following)}


def _world(examination: Examination, head: Recording, places: Sequence[Place]) -> dict[str, Answer]:
    found = {}
    for world_size in examination.worlds[1:2]:
        resumed = examination.resume_world([head], places, world_size)
        found[f"continued on {world_size} ranks"] = _worst(
            [
                _answer(examination, head.passes[epoch], cut, [head.passes[epoch]],
                        [recordings[number] for recordings in resumed], 0, world_size)
                for number, (epoch, cut) in enumerate(places)
                if _is_enough(examination, head.passes[epoch], cut, world_size)
            ]
        )  # fmt: skip
    return found


def _options(examination: Examination, head: Recording, places: Sequence[Place]) -> dict[str, Answer]:
    changes: list[tuple[str, dict[str, int]]] = []
    if examination.most_workers:
        workers = examination.most_workers
        changes.append((f"continued with {workers} workers", {"num_workers": workers}))
    if examination.takes("batch_size") and type(examination.default("batch_size")) is int:
        size = examination.default("batch_size") + 1
        changes.append((f"continued with batches of {size}", {"batch_size": size}))
    found = {}
    for question, options in changes:
        resumed = examination.resume_from(head, places[:2], (), **options)  # each starts processes
        found[question] = _worst(
            [
                _answer(examination, head.passes[epoch], cut, [head.passes[epoch]], [recording], 0, elastic=True)
                for (epoch, cut), recording in zip(places, resumed, strict=False)
                if _is_enough(examination, head.passes[epoch], cut, 1, options.get("batch_size", 0))
            ]
        )
    return found


def _costs(examination: Examination, head: Recording, places: Sequence[Place]) -> dict[str, Answer]:
    state = head.passes[0].states[1]
    if set(state) == {"epoch", "batches"}:
        return {"its state": Answer("a number of batches, which are read again", "other")}
    declared, _ = examination.capability("constant_time_resume")
    read = {True: ", nothing is read again", False: ", what was read is read again", None: ""}[declared]
    try:
        size = f"{len(json.dumps(state))} bytes"
    except (TypeError, ValueError):  # a state of another library, with tensors for example
        size = "not JSON"
    return {"its state": Answer(f"{size}{read}", "good" if declared else "other")}


def _answer(
    examination: Examination,
    whole: Pass,
    cut: int,
    before: Sequence[Pass],
    resumed: Sequence[Recording],
    number: int,
    world_size: int = 1,
    elastic: bool = False,
) -> Answer:
    """What became of an epoch of which ``before`` gave ``cut`` batches, and pass ``number`` of each resume the rest."""
    for recording in resumed:
        if recording.failure is not None:
            if "midepoch.errors.StateError" in recording.failure.kinds:
                return Answer("refused", "other")
            return Answer(f"fails: {str(recording.failure).partition(' ')[0]}", "bad")
    parts = [recording.passes[number] for recording in resumed]
    if len(parts) == 1 and parts[0].digests == whole.digests[cut:]:
        return EXACT
    if examination.naming is not None and examination.naming.blind:
        if len(parts) == 1 and not elastic:
            return Answer("other batches", "bad")
        return Answer("not known: nothing names the samples", "other")
    order = count(whole.ids)
    got = count(ids for part in before for ids in part.ids[:cut]) + count(ids for part in parts for ids in part.ids)
    lost, twice = (order - got).total(), (got - order).total()
    settings = examination.settings
    # Which samples an uninterrupted run leaves out depends on the batch size: they are neither lost nor surplus.
    padding = world_size - 1 if settings.tail == "pad" else 0
    dropped = world_size - 1 if settings.tail == "drop" else 0
    if settings.drop_last:
        twice = (Counter({name: number for name, number in got.items() if name in order}) - order).total()
        dropped = world_size * max(len(ids) for part in (whole, *parts) for ids in part.ids) - 1
    if lost > dropped or twice > padding:
        # Samples that are named by their content have another name where they draw other random numbers.
        strangers = sum(number for name, number in got.items() if name not in order)
        if strangers:
            again = f", {twice - strangers} twice" if twice > strangers else ""
            return Answer(f"{lost} of {order.total()} samples not the same{again}", "bad")
        return Answer(f"{lost} of {order.total()} samples lost, {twice} twice", "bad")
    if (
        len(parts) == 1
        and not elastic
        and [each for ids in parts[0].ids for each in ids] != [each for ids in whole.ids[cut:] for each in ids]
    ):
        return Answer("the same samples in another order", "bad")
    known = contents_of([whole])
    if any(not content <= known[name] for name, content in contents_of(parts).items() if name in known):
        return Answer("the same samples, with other content", "bad")
    return EXACT


def _worst(answers: Sequence[Answer]) -> Answer:
    """The answer to show: the first bad one at the cut in the middle, else any that is not good."""
    middle = [*answers[len(answers) // 2 :], *answers]
    bad = (each for tone in ("bad", "other") for each in middle if each.tone == tone)
    return next(bad, answers[0] if answers else Answer("too little is left", "other"))


def _is_enough(examination: Examination, whole: Pass, cut: int, world_size: int, batch: int = 0) -> bool:
    """Whether so much is left that no loader which drops its tail starts the next epoch instead."""
    batch = max([batch, *map(len, whole.ids)])
    return not starts_next_epoch(examination, count(whole.ids[cut:]), world_size, batch)
