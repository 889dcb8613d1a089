"""The places of a combination's parts, as its state has them."""

from __future__ import annotations

import json
from typing import NamedTuple

from ..errors import StateCorruptError
from ..state.format import FIELDS, State

__all__ = ["Standings"]


class Standings(NamedTuple):
    """The places of all parts: the detail of a combination's state."""

    at: tuple[int, int]  # the combination's own (epoch, position)
    bases: list[int]  # the parts' epochs when the combination's epoch began
    ended: int  # bits of the parts that are known to have ended since
    states: list[State]  # the parts' own

    @classmethod
    def beginning(cls, epoch: int, states: list[State]) -> Standings:
        """Those at the beginning of an epoch, of which each part is at the beginning of one of its own."""
        return cls((epoch, 0), [state["epoch"] for state in states], 0, states)

    def has_ended(self, number: int) -> bool:
        """Whether a part has ended in the combination's epoch."""
        return bool(self.ended >> number & 1) or self.states[number]["epoch"] > self.bases[number]

    def as_text(self) -> str:
        """The text that `read` takes."""
        values = [[state[name] for name in FIELDS] for state in self.states]
        return json.dumps([*self.at, self.bases, self.ended, values], separators=(",", ":"))

    @classmethod
    def read(cls, detail: str, parts: int) -> Standings:
        """The standings that `as_text` returned as text.

        Raises:
            StateCorruptError: it is something else, or is of another number of parts.
        """
        try:
            epoch, position, bases, ended, values = json.loads(detail)
            states = [dict(zip(FIELDS, each, strict=True)) for each in values]
            numbers = [*bases, ended]
        except (ValueError, TypeError, RecursionError) as error:
            raise StateCorruptError(f"the parts' states cannot be read ({error}): use an undamaged state") from error
        if not len(bases) == len(states) == parts or not all(type(each) is int and each >= 0 for each in numbers):
            raise StateCorruptError(f"the state has {len(states)} parts instead of {parts}: use an undamaged state")
        return cls((epoch, position), bases, ended, states)
