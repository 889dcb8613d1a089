"""Several wrapped loaders as one, with one state.

The parts stay what they are: each has its own cursor, and moves by being read. The combination adds which of them is
read at each step, which is a function of its mode, its seed and the step, and where each part began in this epoch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import math
import zlib
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from midepoch.errors import MidepochError, SourceError, StateCorruptError, StateError, UnsupportedSourceError
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.loader import Loader
from midepoch.order.keys import derive_key, derive_keys
from midepoch.randomness.streams import Purpose
from midepoch.state.format import State, from_values, values_of
from midepoch.world import Share, World

__all__ = ["CombinedAdapter", "Mode", "Until", "combine"]

Mode = Literal["min_size", "max_size", "max_size_cycle", "sequential", "weighted"]
"""Which parts are read at a step."""

Until = Literal["all", "first", "cycle"]
"""What ends an epoch of weighted mixing."""

_REMEMBERED_STEPS = 1024  # for in_flight
_DRAWN_TOGETHER = 256  # parts for as many steps, since numpy's calls cost more than its work
_LARGEST_NAMES = 2000  # characters of a fingerprint's, which has 4096


def combine(
    loaders: Mapping[str, Loader] | Sequence[Loader],
    mode: Mode = "min_size",
    *,
    weights: Mapping[str, float] | Sequence[float] | None = None,
    until: Until | None = None,
    steps: int | None = None,
    labelled: bool = False,
    seed: int | None = None,
    world: World | None = None,
    fingerprint: str | None = None,
) -> Loader:
    """Several loaders as one: ``combine({"text": loader_a, "image": loader_b}, "max_size_cycle")``.

    A batch of the first three modes is a dict, list or tuple as `loaders` is, with a batch of each part; of the others
    it is the batch of one part.

    ================  =================================================================================
    mode              an epoch
    ================  =================================================================================
    min_size          until the shortest part ends
    max_size          until the longest part ends; None in place of one that has ended before
    max_size_cycle    until the longest part ends; one that has ended before begins its next epoch
    sequential        one part after the other
    weighted          a part is drawn for each step, by its weight
    ================  =================================================================================

    A part that an epoch leaves unfinished begins its own next epoch with the combination's next.

    Args:
        loaders: what `wrap` or `combine` returned, each another object.
        mode: see above.
        weights: for "weighted", how often each part is drawn, relative to the others; at least 0. Not part of a state:
            other weights go on from the same place.
        until: for "weighted": "all" (None means that too) draws from the parts that are not finished, so that each
            sample comes once; "first" ends the epoch with the first part that does; "cycle" lets a part that ends begin
            its next epoch, until each has ended once.
        steps: for "weighted", in place of `until`: an epoch has so many steps; parts that end begin their next epoch.
        labelled: for "sequential" and "weighted", hand out (name, batch), where the name is a dict's key or a list's
            index.
        seed: of the draws; see `wrap`.
        world: see `wrap`; None for that of the parts.
        fingerprint: see `wrap`.

    Raises:
        TypeError, ValueError: an argument is out of range; a part has not been wrapped, or is there twice.
    """
    names, parts, _ = _taken_apart(loaders)
    if not parts:
        raise ValueError("combine needs at least one loader")
    for name, part in zip(names, parts, strict=True):
        if not isinstance(part, Loader):
            raise TypeError(f"part {name} is a {type(part).__name__}: wrap it first, midepoch.wrap(...)")
    if len({id(part) for part in parts}) < len(parts):
        raise ValueError("one loader cannot be two parts, since it stands at one place: wrap its source twice")
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, got {mode!r}")
    if mode != "weighted" and (weights is not None or until is not None or steps is not None):
        raise ValueError(f"weights, until and steps are for mode='weighted', got them with {mode!r}")
    if labelled and mode not in ("sequential", "weighted"):
        raise ValueError(f"labelled is for modes that hand out one part's batch at a time, not for {mode!r}")
    if until is not None and (until not in get_args(Until) or steps is not None):
        raise ValueError(f"until must be one of {', '.join(map(repr, get_args(Until)))}, without steps; got {until!r}")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"steps must be an int of at least 1 or None, got {steps!r}")
    settings = {
        "mode": mode,
        "weights": _checked_weights(loaders, weights) if mode == "weighted" else None,
        "until": until or "all",
        "steps": steps,
        "labelled": labelled,
    }
    options = Options(seed=seed, world=world or _common_world(names, parts), fingerprint=fingerprint, settings=settings)
    return Loader(CombinedAdapter(loaders, options), options)


def _taken_apart(loaders: Any) -> tuple[list[str], list[Loader], list[Any]]:
    """The parts' names for messages, the parts, and their keys."""
    if isinstance(loaders, Mapping):
        keys = list(loaders)
        return [repr(key) for key in keys], list(loaders.values()), keys
    if isinstance(loaders, list | tuple):
        return [str(place) for place in range(len(loaders))], list(loaders), list(range(len(loaders)))
    raise TypeError(f"combine needs a dict, a list or a tuple of loaders, got {type(loaders).__name__}")


def _checked_weights(loaders: Any, weights: Any) -> list[float]:
    _, parts, keys = _taken_apart(loaders)
    if weights is None:
        return [1.0] * len(parts)
    if isinstance(loaders, Mapping) != isinstance(weights, Mapping):
        raise TypeError("weights must be a dict for a dict of loaders, and a list for a list")
    if isinstance(weights, Mapping):
        if weights.keys() != set(keys):
            raise ValueError(f"weights must name the parts {keys}, got {list(weights)}")
        weights = [weights[key] for key in keys]
    try:
        numbers = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise TypeError(f"weights must be numbers, got {weights!r}") from error
    if len(numbers) != len(parts):
        raise ValueError(f"weights must have one number for each of the {len(parts)} parts, got {len(numbers)}")
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or not 0 < sum(numbers) < math.inf:
        raise ValueError(f"weights must be finite, at least 0 and not all 0, got {weights!r}")
    return numbers


def _common_world(names: list[str], parts: list[Loader]) -> World | None:
    worlds = {part._options.world for part in parts}
    if len(worlds) > 1:
        told = ", ".join(f"part {name} has {part._options.world}" for name, part in zip(names, parts, strict=True))
        raise ValueError(f"the parts must share one world, but {told}: give all of them the same, or none")
    return worlds.pop()


# --- where the parts stand ------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """What the detail of a combination's state holds.

    Attributes:
        at: the combination's own (epoch, position).
        bases: the parts' epochs when the combination's epoch began.
        ended: bits of the parts that are known to have ended since.
        leaving: bits of the parts that begin their next epoch when they are next read, and not sooner, because only
            their source can lead there.
        states: the parts' own.
    """

    at: tuple[int, int]
    bases: list[int]
    ended: int
    leaving: int
    states: list[State]

    @classmethod
    def beginning(cls, epoch: int, states: list[State]) -> _Place:
        """Of an epoch. Parts that stand within one of theirs leave it behind."""
        within = [state["position"] > 0 for state in states]
        bases = [state["epoch"] + inside for state, inside in zip(states, within, strict=True)]
        return cls((epoch, 0), bases, 0, sum(inside << number for number, inside in enumerate(within)), states)

    def has_ended(self, number: int) -> bool:
        """Whether a part has ended in the combination's epoch."""
        return bool(self.ended >> number & 1) or self.states[number]["epoch"] > self.bases[number]

    def as_text(self) -> str:
        """What `read` takes."""
        values = [values_of(state) for state in self.states]
        return json.dumps([*self.at, self.bases, self.ended, self.leaving, values], separators=(",", ":"))

    @classmethod
    def read(cls, detail: str, parts: int) -> _Place:
        """What `as_text` gave.

        Raises:
            StateCorruptError: it is something else, or is of another number of parts.
        """
        try:
            epoch, position, bases, ended, leaving, values = json.loads(detail)
            states, numbers = [from_values(each) for each in values], [*bases, ended, leaving]
        except (ValueError, TypeError, RecursionError) as error:
            raise StateCorruptError(f"the parts' states cannot be read ({error}): use an undamaged state") from error
        if not len(bases) == len(states) == parts or not all(type(each) is int and each >= 0 for each in numbers):
            raise StateCorruptError(f"the state holds {len(states)} parts of {parts}: use an undamaged state")
        return cls((epoch, position), bases, ended, leaving, states)


class CombinedAdapter(Adapter):
    """Several loaders. The unit is a step, of all ranks together."""

    name: ClassVar[str] = "combined"
    jumps: ClassVar[bool] = True
    seals_detail = True

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        self.names, self.parts, self.keys = _taken_apart(source)
        self.elastic = all(part._adapter.elastic for part in self.parts)
        self.rank_independent = all(part._adapter.rank_independent for part in self.parts)
        self.remembers = all(part._adapter.remembers for part in self.parts)
        self.mode: Mode = options.settings["mode"]
        self.until: Until = options.settings["until"]
        self.steps: int | None = options.settings["steps"]
        self.weights: list[float] = options.settings["weights"] or [1.0] * len(self.parts)
        self.cycles = self.mode == "max_size_cycle" or (
            self.mode == "weighted" and (self.steps is not None or self.until == "cycle")
        )
        self.bases, self.ended = [0] * len(self.parts), 0
        self.arrived: int | None = None  # the epoch that `bases` are of
        self.passes: list[Any] = [None] * len(self.parts)
        # The states of parts that begin their next epoch when they are next read.
        self.leaving: dict[int, State] = {}
        # Batches of a step that another part failed, which were received and not handed out.
        self.pending: dict[int, Any] = {}

    @classmethod
    def recognises(cls, source: object) -> bool:
        """`combine` makes this adapter itself."""
        return False

    def twin(self) -> CombinedAdapter:
        """With parts of its own."""
        parts = [copy.copy(part) for part in self.parts]
        return type(self)(self.packing()(parts), self.options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "passes": [None] * len(self.parts), "pending": {}, "leaving": {}}

    def packing(self) -> Callable[[list[Any]], Any]:
        """What brings the parts' values into the form in which the parts were given."""
        source, keys = self.source, self.keys
        if isinstance(source, Mapping):
            return lambda values: dict(zip(keys, values, strict=True))
        if isinstance(source, tuple):
            return getattr(type(source), "_make", tuple)
        return lambda values: values

    # --- what it is ---

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> None:
        """How many steps an epoch has depends on the world."""

    def units_per_step(self, world: World) -> int:
        """A step is one step of all ranks."""
        return 1

    def share(self, seed: int, epoch: int, position: int, world: World, detail: str) -> Share | None:
        """The steps that are left, where each part knows its own."""
        self._check_world(world)
        place = _Place.read(detail, len(self.parts)) if detail else None
        if position == 0:
            if place is not None and place.at[0] == epoch:
                epochs = place.bases
            elif place is None and self.arrived == epoch:
                epochs = self.bases
            else:  # parts within an epoch will leave it behind
                epochs = [part.epoch + (part.position > 0) for part in self.parts]
            lengths = [_length(part, base) for part, base in zip(self.parts, epochs, strict=True)]
            left = self._steps_left(lengths, [False] * len(self.parts), seed, epoch, 0)
        elif place is None:
            ended = [bool(self.ended >> n & 1) or part.epoch > self.bases[n] for n, part in enumerate(self.parts)]
            left = self._steps_left([self.left(n) for n in range(len(self.parts))], ended, seed, epoch, position)
        else:
            ended = [place.has_ended(number) for number in range(len(self.parts))]
            lefts = [
                _length(part, state["epoch"] + 1) if place.leaving >> number & 1 else part._batches_left_at(state)
                for number, (part, state) in enumerate(zip(self.parts, place.states, strict=True))
            ]
            left = self._steps_left(lefts, ended, seed, epoch, position)
        return None if left is None else Share(position + left, position, 1, World(), "pad", False)

    def _check_world(self, world: World) -> None:
        for name, part in zip(self.names, self.parts, strict=True):
            theirs = part._current_world()
            if (theirs.rank, theirs.world_size) != (world.rank, world.world_size):
                raise MidepochError(
                    f"part {name} is rank {theirs.rank} of {theirs.world_size}, the combination is rank {world.rank} "
                    f"of {world.world_size}: give both the same world, or none"
                )
            if world.world_size > 1 and part._tail == "uneven":
                raise UnsupportedSourceError(
                    f"part {name} has tail='uneven', so that ranks may have unequal numbers of batches, and would read "
                    "different parts at one step: wrap it with tail='pad' or 'drop'"
                )

    def _steps_left(
        self, lefts: list[int | None], ended: list[bool], seed: int, epoch: int, position: int
    ) -> int | None:
        """Steps until the epoch ends, from the parts' batches (None: unknown) and whether they have ended once."""
        if self.mode == "weighted" and self.steps is not None:
            return max(0, self.steps - position)
        # With a part of unknown length the end is always found by reading, even where it is known to have ended.
        rest = [0 if over and left is not None else left for left, over in zip(lefts, ended, strict=True)]
        if self.mode == "weighted":
            # A part that is never drawn is waited for by nobody.
            rest = [left for left, weight in zip(rest, self.weights, strict=True) if weight]
        known = [left for left in rest if left is not None]
        if len(known) < len(rest):
            return None
        if self.mode == "min_size":
            return min(known)
        if self.mode in ("max_size", "max_size_cycle"):
            return max(known)
        if self.mode == "sequential" or self.until == "all":
            return sum(known)
        return self.draws(seed, epoch).steps_until(position, known, self.until)

    def draws(self, seed: int, epoch: int) -> _Draws:
        """Which part is drawn at each step of an epoch."""
        return _Draws(seed, epoch, self.weights)

    def describe(self) -> dict[str, str]:
        """How the parts are combined, and what they are called; what each of them is, its own state says."""
        mode = self.mode
        if mode == "weighted":
            mode += f" until {self.until}" if self.steps is None else " for a number of steps"  # type: ignore[assignment]
        names = ",".join(self.names) if isinstance(self.source, Mapping) else str(len(self.names))
        if len(names) > _LARGEST_NAMES:
            names = f"{len(self.names)} parts:{zlib.crc32(names.encode()):08x}"
        return {"mode": mode, "parts": names}

    def capabilities(self) -> Capabilities:
        """What all parts promise."""

        def every(question: str) -> Capability:
            answers = [getattr(part.capabilities, question) for part in self.parts]
            for name, answer in zip(self.names, answers, strict=True):
                if not answer:
                    return Capability(False, f"part {name}: {answer.reason}")
            return Capability(True, f"as every part, for instance {self.names[0]}: {answers[0].reason}")

        return Capabilities(*map(every, Capabilities.__dataclass_fields__))

    # --- states ---

    def live_state(self, number: int, in_flight: int = 0) -> State:
        """Of a part; batches that were received and not handed out do not count."""
        if number in self.leaving and not in_flight:
            return self.leaving[number]
        return self.parts[number].state_dict(in_flight + (number in self.pending))

    def left(self, number: int) -> int | None:
        """Batches that a part has left in its epoch; None where it cannot be known."""
        part = self.parts[number]
        return _length(part, part.epoch + (part.position > 0)) if number in self.leaving else _left(part)

    def upcoming(self, epoch: int) -> str:
        """The detail at the beginning of an epoch: parts that are in the middle of one of theirs begin their next."""
        states = [self._moved_on(number, self.live_state(number)) for number in range(len(self.parts))]
        return _Place.beginning(epoch, states).as_text()

    def _moved_on(self, number: int, state: State, epoch: int | None = None) -> State:
        """A part's state at the beginning of an epoch, by default the next one if this one has begun."""
        part = self.parts[number]
        if epoch is None:
            epoch = state["epoch"] + (state["position"] > 0)
        if not part._adapter.remembers and epoch == state["epoch"] + 1:
            return state  # only its source can lead there, from here
        return part._state_at(state, epoch)

    def beginning(self, epoch: int, world: World) -> str:
        """Where the parts stand."""
        return self.upcoming(epoch)

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """It is whole, belongs to this place, and each part accepts its own state."""
        if not detail:
            raise StateCorruptError("the state of a combination lacks those of its parts: use an undamaged state")
        place = _Place.read(detail, len(self.parts))
        for name, part, state in zip(self.names, self.parts, place.states, strict=True):
            try:
                part._check_state(state)
            except StateError as error:
                raise type(error)(f"part {name}: {error}") from error

    def jump(self, here: tuple[int, int], detail: str, there: tuple[int, int], seed: int, world: World) -> str:
        """Only to beginnings of epochs; within one, the parts stand where reading has led them."""
        epoch, position = there
        if position:
            raise StateError(
                "within an epoch a combination stands where its parts stand: seek the parts before they are combined, "
                "or load a state"
            )
        place = _Place.read(detail or self.upcoming(here[0]), len(self.parts))
        states = []
        for number, (base, state) in enumerate(zip(place.bases, place.states, strict=True)):
            if epoch == here[0] + 1:
                states.append(self._moved_on(number, state))
            elif epoch == here[0]:
                states.append(self._moved_on(number, state, base))
            else:
                states.append(self._moved_on(number, state, epoch))
        return _Place.beginning(epoch, states).as_text()

    # --- sessions ---

    def open(self, run: Run) -> Session:
        """Steps from the position on."""
        self._arrive(run)
        return (_Picked if self.mode in ("sequential", "weighted") else _Zipped)(self, run)

    def _arrive(self, run: Run) -> None:
        """Let the parts stand where the run begins, and have a pass of each."""
        place = _Place.read(run.detail, len(self.parts)) if run.detail else None
        for number, part in enumerate(self.parts):
            if place is not None:
                state, leaving = place.states[number], bool(place.leaving >> number & 1)
                if leaving != (number in self.leaving) or not self._stands(number, state):
                    self.pending.pop(number, None)
                    self.leaving.pop(number, None)
                    part.load_state_dict(state)
                    self.passes[number] = None
                if leaving:
                    self.leaving[number] = state
            if number in self.leaving:
                self.passes[number] = self.passes[number] or iter(part)
            elif run.position == 0 and self.live_state(number)["position"]:
                self.pending.pop(number, None)
                self.begin(number)
            elif self.passes[number] is None or not part.position:
                self.passes[number] = iter(part)
        self.arrived = run.epoch
        if place is None or run.position == 0:
            epochs = [self.live_state(number)["epoch"] for number in range(len(self.parts))]
            self.bases, self.ended = [epoch + (number in self.leaving) for number, epoch in enumerate(epochs)], 0
        else:
            self.bases, self.ended = place.bases, place.ended

    def _stands(self, number: int, state: State) -> bool:
        """Whether a part stands there, and would go on from there."""
        part, current = self.parts[number], self.passes[number]
        if part.position and (current is None or part._active is not current.mark):
            return False
        try:
            return self.live_state(number) == state
        except StateError:
            return False

    def begin(self, number: int, lazily: bool = False) -> None:
        """Have a part begin an epoch, its next one if it is in the middle of one; `lazily` when it is next read."""
        part = self.parts[number]
        if part.position and (lazily or not part._adapter.remembers):
            self.leaving[number] = self.live_state(number)
        elif part.position:
            part._end_epoch()
        self.passes[number] = iter(part)

    def next_of(self, number: int) -> Callable[[], Any]:
        """What gives the next batch of a part's pass."""
        current = self.passes[number]
        assert current is not None  # _arrive has made it
        following: Callable[[], Any] = current.__next__
        return following

    def leave(self, number: int) -> None:
        """Have a part that is leaving an epoch do so."""
        part = self.parts[number]
        if part.position:
            if part._session is None and not part._adapter.remembers:
                # Only the source can lead to its next epoch, from where it stands.
                with contextlib.suppress(StopIteration):
                    part.peek()
            part._end_epoch()
            self.passes[number] = iter(part)

    def close(self) -> None:
        """The parts' own."""
        for part in self.parts:
            part.close()
        self.passes = [None] * len(self.parts)


def _length(part: Loader, epoch: int) -> int | None:
    """Batches of one full epoch of a part; None where it cannot be known."""
    world = part._current_world()
    share = part._adapter.share(part._current_seed(world), epoch, 0, world, "")
    return None if share is None else share.steps


def _left(part: Loader) -> int | None:
    try:
        return part.batches_left
    except TypeError:
        return None


# --- steps -----------------------------------------------------------------------------------------------------------


class _CombinedSession(Session):
    """Remembers for each of the last steps, as bits, which parts gave a batch and which were known to have ended."""

    def __init__(self, adapter: CombinedAdapter, run: Run) -> None:
        self._adapter, self._run = adapter, run
        self._step = run.position
        self._log: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED_STEPS)
        self._began: dict[int, int] = {}  # epochs that parts have begun again in
        self._ended = [self._has_ended(number) for number in range(len(adapter.parts))]
        self._first_marks = self._marks()

    def _has_ended(self, number: int) -> bool:
        adapter, part = self._adapter, self._adapter.parts[number]
        if number in adapter.pending:  # it stands one batch further than it counts
            state = adapter.live_state(number)
            return bool(adapter.ended >> number & 1) or state["epoch"] > adapter.bases[number]
        return bool(adapter.ended >> number & 1) or part.epoch > adapter.bases[number] or adapter.left(number) == 0

    def _marks(self) -> int:
        """What is remembered of now: the parts that have ended, and those that are leaving an epoch."""
        leaving = sum(1 << number for number in self._adapter.leaving) if self._adapter.leaving else 0
        return self._adapter.ended | leaving << len(self._adapter.parts)

    def _note_end(self, number: int) -> None:
        self._ended[number] = True
        self._adapter.ended |= 1 << number

    def _advance_of(self, number: int) -> Callable[[], Any]:
        """What gives a part's next batch, and StopIteration at its end.

        A loaded state may stand at the end of an epoch of unknown length, and its loader would go on with the next one.
        """
        adapter, part = self._adapter, self._adapter.parts[number]
        look: Callable[[], Any] = part.peek
        if number in adapter.leaving:
            look = functools.partial(adapter.leave, number)
        elif self._ended[number] or part._session is not None or part.position == 0 or _left(part) is not None:
            return adapter.next_of(number)
        begun: Callable[[], Any] | None = None

        def advance() -> Any:
            nonlocal begun
            if begun is not None:
                return begun()
            look()
            first = adapter.next_of(number)
            batch = first()
            adapter.leaving.pop(number, None)
            begun = first
            return batch

        return advance

    @abstractmethod
    def take(self) -> Any:
        """The next step's batch."""

    def detail(self, back: int, finished: bool) -> str:
        """The parts' states, as they were so many steps ago."""
        adapter = self._adapter
        if finished:
            return adapter.upcoming(self._run.epoch + 1)
        if not back and self._step == self._run.position and self._run.detail:
            return self._run.detail
        if back > len(self._log):
            raise StateError(
                f"{len(self._log)} steps are remembered since the epoch's start or the last load: pass a smaller "
                "in_flight"
            )
        given = [bits for bits, _ in itertools.islice(reversed(self._log), back)]
        states = [
            adapter.live_state(number, sum(bits >> number & 1 for bits in given))
            for number in range(len(adapter.parts))
        ]
        # As they were after that step: what was found out since is found out again.
        marks = self._log[-back - 1][1] if back < len(self._log) else self._first_marks
        ended, leaving = marks & (1 << len(states)) - 1, marks >> len(states)
        return _Place((self._run.epoch, self._step - back), adapter.bases, ended, leaving, states).as_text()

    def _begin_again(self, number: int) -> None:
        """Have a part that has ended begin its next epoch."""
        adapter, part = self._adapter, self._adapter.parts[number]
        following = part.epoch + (part.position > 0)
        if (self._began.get(number) == part.epoch and part.position == 0) or _length(part, following) == 0:
            raise SourceError(
                f"part {adapter.names[number]} has no batches, so it cannot begin again: leave it out, or give it data"
            )
        # Not before it is read: until then it may be that the epoch ends, or that batches in flight are asked for.
        adapter.begin(number, lazily=True)
        self._began[number] = following


class _Zipped(_CombinedSession):
    """A batch of every part at each step."""

    def __init__(self, adapter: CombinedAdapter, run: Run) -> None:
        super().__init__(adapter, run)
        self._pack = adapter.packing()
        self._blank: list[Any] = [None] * len(adapter.parts)
        self._arrange()

    def _arrange(self) -> None:
        """Which parts are read at a step, in which order, and which of them has to be looked at before."""
        adapter = self._adapter
        reading = [n for n in range(len(adapter.parts)) if adapter.cycles or not self._ended[n]]
        # Those last whose states of a batch ago nobody knows: when they are read nothing else can fail.
        reading.sort(key=lambda number: adapter.parts[number]._adapter.remembers, reverse=True)
        forgetful = [number for number in reading if not adapter.parts[number]._adapter.remembers]
        self._first_peeked = [adapter.parts[number] for number in forgetful] if len(forgetful) > 1 else []
        self._advances = [(number, self._advance_of(number)) for number in reading]
        self._mask = sum(1 << number for number in reading)
        if any(self._ended) if adapter.mode == "min_size" else all(self._ended):
            self._advances = [(-1, _raise_stop)]

    def take(self) -> Any:
        """A batch of each part."""
        adapter = self._adapter
        if adapter.pending or self._first_peeked:
            return self._take_with_care()
        values = self._blank[:]
        number = 0
        try:
            for number, advance in self._advances:
                values[number] = advance()
        except BaseException as error:  # noqa: BLE001  # raised again, unless a part has ended
            return self._interrupted(number, values, error)
        return self._completed(values)

    def _interrupted(self, number: int, values: list[Any], error: BaseException) -> Any:
        """A part has failed or ended: keep what the others gave, and go on if it ended and that is no matter."""
        for before, _ in self._advances:
            if before == number:
                break
            self._adapter.pending[before] = values[before]
        if not isinstance(error, StopIteration) or number < 0:
            raise error
        return self._go_on_without(number)

    def _go_on_without(self, number: int) -> Any:
        adapter = self._adapter
        self._note_end(number)
        if adapter.cycles and not all(self._ended):
            self._begin_again(number)
        self._arrange()
        return self._take_with_care()

    def _take_with_care(self) -> Any:
        """With what is pending, and with parts that are to be looked at before anything is taken."""
        adapter = self._adapter
        for part in self._first_peeked:
            part.peek()
        values = self._blank[:]
        number = 0
        try:
            for number, advance in self._advances:
                values[number] = adapter.pending.pop(number) if number in adapter.pending else advance()
        except BaseException as error:  # noqa: BLE001  # raised again, unless a part has ended
            return self._interrupted(number, values, error)
        return self._completed(values)

    def _completed(self, values: list[Any]) -> Any:
        self._step += 1
        self._log.append((self._mask, self._marks()))
        return self._pack(values)


class _Picked(_CombinedSession):
    """The batch of one part at each step."""

    def __init__(self, adapter: CombinedAdapter, run: Run) -> None:
        super().__init__(adapter, run)
        reading = [adapter.cycles or not over for over in self._ended]
        self._left = [adapter.left(number) if still else None for number, still in enumerate(reading)]
        self._advances = [self._advance_of(number) for number in range(len(adapter.parts))]
        self._labels = adapter.keys if adapter.options.settings["labelled"] else None
        self._draws = adapter.draws(run.seed, run.epoch) if adapter.mode == "weighted" else None
        self._choices: list[int] = []
        self._chosen = 0  # of the choices, how many have been used
        for number, left in enumerate(self._left):
            if left == 0:
                self._end(number)

    def take(self) -> Any:
        """A batch of the part whose turn it is."""
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
        self._chosen += 1
        self._step += 1
        self._log.append((1 << number, self._marks()))
        left = self._left[number]
        if left is not None:
            self._left[number] = left - 1
            if left == 1:
                self._end(number)
        return batch if self._labels is None else (self._labels[number], batch)

    def _choose(self) -> None:
        """Choices from this step on; StopIteration if the epoch is over."""
        adapter, ended = self._adapter, self._ended
        alive = [number for number, over in enumerate(ended) if adapter.cycles or not over]
        self._chosen = 0
        if self._draws is None:
            self._choices = alive[:1] * _DRAWN_TOGETHER
        else:
            alive = [number for number in alive if adapter.weights[number]]
            waited_for = [number for number in range(len(ended)) if adapter.weights[number]]
            enough = any if adapter.until == "first" else all
            over = enough(ended[number] for number in waited_for)
            if adapter.steps is not None:
                over = self._step >= adapter.steps
            self._choices = [] if over else self._draws.block(self._step, alive)
        if not self._choices:
            raise StopIteration

    def _end(self, number: int) -> None:
        """A part has no more batches in its epoch."""
        adapter = self._adapter
        self._choices, self._chosen = [], 0
        self._note_end(number)
        if adapter.cycles:
            self._begin_again(number)
            self._advances[number] = self._advance_of(number)
            self._left[number] = adapter.left(number)


def _raise_stop() -> NoReturn:
    raise StopIteration


class _Draws:
    """The part drawn at each step of one epoch: a function of seed, epoch, step, weights, and which parts are left."""

    def __init__(self, seed: int, epoch: int, weights: list[float]) -> None:
        self._key, self._weights = derive_key(Purpose.MIXING, seed, epoch), weights

    def _drawn(self, first: int, count: int, alive: list[int]) -> npt.NDArray[np.int64]:
        """Places in `alive`."""
        keys = derive_keys(self._key, np.arange(first, first + count))
        numbers = (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53
        bounds = np.cumsum([self._weights[number] for number in alive])
        places: npt.NDArray[np.int64] = np.searchsorted(bounds, numbers * bounds[-1], side="right")
        return np.minimum(places, len(alive) - 1)  # rounding may reach the upper end

    def block(self, first: int, alive: list[int]) -> list[int]:
        """The parts drawn at the steps from `first` on, of those that are left."""
        drawn: list[int] = np.array(alive)[self._drawn(first, _DRAWN_TOGETHER, alive)].tolist()
        return drawn

    def steps_until(self, first: int, lefts: list[int], until: Until) -> int:
        """Steps until the first of the parts with a weight, or each of them, has been drawn so often."""
        alive = [number for number, weight in enumerate(self._weights) if weight]
        wanted = np.array(lefts)
        enough = np.any if until == "first" else np.all
        counts, step, length = np.zeros(len(alive), np.int64), first, _DRAWN_TOGETHER
        while not enough(counts >= wanted):
            drawn = self._drawn(step, length, alive)
            more = counts + np.bincount(drawn, minlength=len(alive))
            if enough(more >= wanted):
                # It happens among these: at the first or the last of the places at which a part has its fill.
                within = counts[:, np.newaxis] + np.cumsum(drawn == np.arange(len(alive))[:, np.newaxis], axis=1)
                return step + 1 + int(np.argmax(enough(within >= wanted[:, np.newaxis], axis=0))) - first
            counts, step, length = more, step + length, min(2 * length, 1 << 16)
        return 0
