"""The sessions of a combination: which parts are read at each step, and what happens when one ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from ..errors import SourceError
from ..loader.adapter import Run, Session
from ..loader.part import Part
from .draws import DRAWN_TOGETHER, Draws, Until
from .standings import Standings

__all__ = ["OneAtATime", "Together"]


class _Bookmark(NamedTuple):
    """Where a combination stood."""

    step: int
    taken: tuple[int, ...]  # batches ever taken of each part
    ended: int  # bits, as of `Standings`


class _Mixture(Session):
    """The parts during one epoch of the combination: how far they are, and which have ended.

    `cycles`: a part that ends begins its next epoch. `upcoming`: the detail at the beginning of an epoch.
    """

    def __init__(
        self, parts: Sequence[Part], standings: Standings, cycles: bool, upcoming: Callable[[int], str], run: Run
    ) -> None:
        self._parts, self._cycles, self._upcoming = parts, cycles, upcoming
        self._epoch, self._step = run.epoch, run.position
        self._bases, self._noted = standings.bases, standings.ended  # bits of parts that were seen to end
        self._began: dict[int, int] = {}  # the epochs in which parts have begun again
        for part, state in zip(parts, standings.states, strict=True):
            part.go_to(state)
        self._ended = [self._has_ended(number, part) for number, part in enumerate(parts)]

    def left(self, number: int) -> int | None:
        """Batches left in a part's epoch; None if unknown."""
        return self._parts[number].progress.steps_left()

    def _has_ended(self, number: int, part: Part) -> bool:
        """Whether a part has ended in this epoch, or has nothing left."""
        noted = bool(self._noted >> number & 1)
        if part.pending:  # the loader is one batch ahead
            return noted or part.state()["epoch"] > self._bases[number]
        return noted or part.loader.epoch > self._bases[number] or self.left(number) == 0

    def note_end(self, number: int) -> None:
        """A part has no more batches in its epoch."""
        self._ended[number] = True
        self._noted |= 1 << number

    def begin_again(self, number: int) -> None:
        """Let a part that has ended begin its next epoch."""
        part = self._parts[number]
        following = part.loader.epoch + (part.loader.position > 0)
        if self._began.get(number) == following == part.loader.epoch or part.length(following) == 0:
            raise SourceError(
                f"part {part.name} has no batches, so it cannot start again: leave it out, or give it data"
            )
        part.begin_epoch()
        self._began[number] = following

    def advance_of(self, number: int, over: bool) -> Callable[[], Any]:
        """A function that returns a part's next batch, or raises StopIteration. `over`: the part has ended once."""
        part = self._parts[number]
        at_end = not (over or part.pending or part.progress.has_session) and part.loader.position > 0
        if not at_end or part.progress.steps_left() is not None:
            return part.following()
        # A loaded state may be at the end of an epoch of unknown length. The loader alone would continue.
        begun: Callable[[], Any] | None = None

        def advance() -> Any:
            nonlocal begun
            if begun is not None:
                return begun()
            part.loader.peek()
            begun = part.following()
            return begun()

        return advance

    def bookmark(self) -> _Bookmark:
        """Where the parts stand."""
        return _Bookmark(self._step, tuple([part.taken for part in self._parts]), self._noted)

    def detail(self, bookmark: _Bookmark) -> str:
        """The parts' states at the bookmark. Raises StateError if a part does not know it any more."""
        states = [part.state(part.taken - taken) for part, taken in zip(self._parts, bookmark.taken, strict=True)]
        return Standings((self._epoch, bookmark.step), self._bases, bookmark.ended, states).as_text()

    def next_epoch_detail(self) -> str:
        """The parts at the beginning of the next epoch."""
        return self._upcoming(self._epoch + 1)


class Together(_Mixture):
    """A batch of every part at each step, in the form that `pack` makes.

    `shortest`: the epoch ends when the first part ends.
    """

    def __init__(self, *mixture: Any, shortest: bool, pack: Callable[[list[Any]], Any]) -> None:
        super().__init__(*mixture)
        self._shortest, self._pack = shortest, pack
        self._blank: list[Any] = [None] * len(self._parts)
        self._arrange()

    def _arrange(self) -> None:
        """Decide which parts a step reads."""
        parts = self._parts
        reading = [n for n in range(len(parts)) if self._cycles or not self._ended[n]]
        self._advances = [(n, parts[n], self.advance_of(n, self._ended[n])) for n in reading]
        if any(self._ended) if self._shortest else all(self._ended):
            self._advances = [(-1, parts[0], _raise_stop)]

    def take(self) -> Any:
        """A batch of each part."""
        while True:
            values, number = self._blank[:], -1
            try:
                for number, _, advance in self._advances:
                    values[number] = advance()
                break
            except BaseException as error:  # raised again unless a part has ended
                # Keep the batches read so far for the step's next attempt.
                for before, part, _ in self._advances:
                    if before == number:
                        break
                    part.pending.append(values[before])
                if not isinstance(error, StopIteration) or number < 0:
                    raise error
                self.note_end(number)
                if self._cycles and not all(self._ended):
                    self.begin_again(number)
                self._arrange()
        for _, part, _ in self._advances:
            part.taken += 1
        self._step += 1
        return self._pack(values)


class OneAtATime(_Mixture):
    """The batch of one part at each step."""

    def __init__(
        self,
        *mixture: Any,
        draws: Draws | None,  # which part at which step; None for one part after the other
        weights: Sequence[float],  # those with weight 0 do not keep the epoch open
        until: Until,  # what ends the epoch, if `steps` is None
        steps: int | None,  # of an epoch
        labels: Sequence[Any] | None,  # names to hand out with the batches
    ) -> None:
        super().__init__(*mixture)
        self._draws, self._weights, self._until, self._steps, self._labels = draws, weights, until, steps, labels
        ended = list(enumerate(self._ended))
        self._left = [self.left(number) if self._cycles or not over else None for number, over in ended]
        self._advances = [self.advance_of(number, over) for number, over in ended]
        self._choices: list[int] = []
        self._chosen = 0  # the number of choices used
        for number, left in enumerate(self._left):
            if left == 0:
                self._end(number)

    def take(self) -> Any:
        """A batch of the part chosen for this step."""
        while True:
            if self._chosen == len(self._choices):
                self._choose()
            number = self._choices[self._chosen]
            try:
                batch = self._advances[number]()
            except StopIteration:
                self._end(number)
                continue
            break
        self._parts[number].taken += 1
        self._chosen += 1
        self._step += 1
        left = self._left[number]
        if left is not None:
            self._left[number] = left - 1
            if left == 1:
                self._end(number)
        return batch if self._labels is None else (self._labels[number], batch)

    def _choose(self) -> None:
        """Choose parts from this step on. Raises StopIteration if the epoch is over."""
        ended = self._ended
        alive = [number for number, over in enumerate(ended) if self._cycles or not over]
        self._chosen = 0
        if self._draws is None:
            self._choices = alive[:1] * DRAWN_TOGETHER
        else:
            alive = [number for number in alive if self._weights[number]]
            waited_for = [number for number in range(len(ended)) if self._weights[number]]
            enough = any if self._until == "first" else all
            over = enough(ended[number] for number in waited_for)
            if self._steps is not None:
                over = self._step >= self._steps
            self._choices = [] if over else self._draws.block(self._step, alive)
        if not self._choices:
            raise StopIteration

    def _end(self, number: int) -> None:
        """Handle a part that has no more batches in its epoch."""
        self._choices, self._chosen = [], 0
        self.note_end(number)
        if self._cycles:
            self.begin_again(number)
            self._advances[number] = self.advance_of(number, True)
            self._left[number] = self.left(number)


def _raise_stop() -> NoReturn:
    raise StopIteration
