"""The adapter of a combination: the length of its epochs, and the places of its parts between sessions."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from ..errors import MidepochError, StateCorruptError, UnsupportedSourceError
from ..loader.adapter import Adapter, Facts, Options, Reach, Run, Session
from ..loader.capabilities import Capabilities, Capability
from ..loader.loader import Loader
from ..loader.part import Part
from ..loader.place import Place
from ..state.format import State
from ..state.parts import parts_in, unseal_detail
from ..world import Share, World
from .draws import Draws, Until
from .standings import Standings
from .steps import OneAtATime, Together

__all__ = ["CombinedAdapter", "Mode", "names_and_parts"]

Mode = Literal["min_size", "max_size", "max_size_cycle", "sequential", "weighted"]
"""Which parts are read at a step."""

_LARGEST_NAMES = 2000  # characters; a fingerprint has 4096


def names_and_parts(loaders: Any) -> tuple[list[str], list[Loader], list[Any]]:
    """The parts' names for messages, the parts, and their keys."""
    if isinstance(loaders, Mapping):
        keys = list(loaders)
        return [repr(key) for key in keys], list(loaders.values()), keys
    if isinstance(loaders, list | tuple):
        return [str(place) for place in range(len(loaders))], list(loaders), list(range(len(loaders)))
    raise TypeError(f"combine needs a dict, a list or a tuple of loaders, got {type(loaders).__name__}")


class CombinedAdapter(Adapter):
    """Several loaders as one source. Its unit is a step of all ranks."""

    name: ClassVar[str] = "combined"
    facts = Facts("step")
    reach = Reach.EPOCHS  # within an epoch, the parts' places follow only from reading

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        names, loaders, self.keys = names_and_parts(source)
        self.members = [Part(name, loader) for name, loader in zip(names, loaders, strict=True)]
        for part in self.members:
            if (together := part.context.options.global_batch) is not None:
                raise UnsupportedSourceError(
                    f"part {part.name} has global_batch={together}, and a combination counts single batches: "
                    "wrap it without, and accumulate over the combination's batches"
                )
            if not part.adapter.facts.remembers:
                raise UnsupportedSourceError(
                    f"part {part.name} keeps its own state, and a combination has to know where each part was some "
                    "batches ago: mix with what its package has for that, or wrap a torch DataLoader of its data"
                )
            if part.context.omit.text(part.loader.epoch):
                raise UnsupportedSourceError(f"part {part.name} skips, and a combination cannot: wrap it anew")
            part.context.is_part = True
        self.mode: Mode = options.settings["mode"]
        self.until: Until = options.settings["until"]
        self.steps: int | None = options.settings["steps"]
        self.weights: list[float] = options.settings["weights"] or [1.0] * len(self.members)
        self.cycles = self.mode == "max_size_cycle" or (
            self.mode == "weighted" and (self.steps is not None or self.until == "cycle")
        )

    @classmethod
    def recognises(cls, source: object) -> bool:
        """`combine` makes this adapter itself."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # the parts' passes are not copied

    def packing(self) -> Callable[[list[Any]], Any]:
        """A function that arranges the parts' values as the parts were given."""
        source, keys = self.source, self.keys
        if isinstance(source, Mapping):
            return lambda values: dict(zip(keys, values, strict=True))
        if isinstance(source, tuple):
            return getattr(type(source), "_make", tuple)
        return lambda values: values

    # --- what it is ---

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> None:
        """Unknown: the number of steps depends on the world."""

    def share(self, seed: int, epoch: int, position: int, world: World, detail: str) -> Share | None:
        """The steps that are left, if each part knows its own length."""
        self._check_world(world)
        standings = Standings.read(detail or self.upcoming(epoch), len(self.members))
        if position == 0:
            ended = [False] * len(self.members)
            lefts = [part.length(base) for part, base in zip(self.members, standings.bases, strict=True)]
        else:
            ended = [standings.has_ended(number) for number in range(len(self.members))]
            lefts = [part.left_at(state) for part, state in zip(self.members, standings.states, strict=True)]
        left = self._steps_left(lefts, ended, seed, epoch, position)
        return None if left is None else Share(position + left, position, 1, World(), "pad", False)

    def _check_world(self, world: World) -> None:
        for part in self.members:
            theirs = part.loader.world
            if (theirs.rank, theirs.world_size) != (world.rank, world.world_size):
                raise MidepochError(
                    f"part {part.name} is rank {theirs.rank} of {theirs.world_size}, but the combination is rank "
                    f"{world.rank} of {world.world_size}: give both the same world, or none"
                )
            part.refuse_uneven(world)

    def _steps_left(
        self, lefts: list[int | None], ended: list[bool], seed: int, epoch: int, position: int
    ) -> int | None:
        """Steps until the epoch ends, from the batches left in each part (None: unknown) and which parts have ended."""
        if self.mode == "weighted" and self.steps is not None:
            return max(0, self.steps - position)
        # With a part of unknown length, only reading finds the end, even if the part is known to have ended.
        rest = [0 if over and left is not None else left for left, over in zip(lefts, ended, strict=True)]
        # A part that is never drawn does not matter.
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
        return Draws(seed, epoch, self.weights).steps_until(position, known, self.until)

    def describe(self) -> dict[str, str]:
        """How the parts are combined, and their names. Each part's own state says what it is."""
        mode = self.mode
        if mode == "weighted":
            mode += f" until {self.until}" if self.steps is None else " for a number of steps"  # type: ignore[assignment]
        names = str(len(self.members))
        if isinstance(self.source, Mapping):
            names = ",".join(part.name for part in self.members)
        if len(names) > _LARGEST_NAMES:
            names = f"{len(self.members)} parts:{zlib.crc32(names.encode()):08x}"
        return {"mode": mode, "parts": names}

    def capabilities(self) -> Capabilities:
        """What every part promises."""

        def every(question: str) -> Capability:
            answers = [(part.name, getattr(part.loader.capabilities, question)) for part in self.members]
            for name, answer in answers:
                if not answer:
                    return Capability(False, f"part {name}: {answer.reason}")
            # One that is only believed makes the whole so.
            name, answer = next((each for each in answers if each[1].believed), answers[0])
            return Capability(True, f"as every part, for instance {name}: {answer.reason}", answer.believed)

        asked = [each for each in Capabilities.__dataclass_fields__ if each != "skips"]
        skips = Capability(False, "a combination counts the batches of its parts")
        return replace(Capabilities(*map(every, asked)), skips=skips)

    # --- states ---

    def parts(self, state: State | None = None) -> list[tuple[Part, State | None]]:
        """The parts, and their states in that of the combination."""
        detail = "" if state is None else unseal_detail(state, self.rank_independent)
        if detail and not self.rank_independent:
            (detail,) = parts_in(detail).values()
        states: list[Any] = Standings.read(detail, len(self.members)).states if detail else [None] * len(self.members)
        return list(zip(self.members, states, strict=True))

    def upcoming(self, epoch: int) -> str:
        """The detail at the beginning of an epoch. Parts in the middle of an epoch begin their next one."""
        saved = [(part, part.state()) for part in self.members]
        return Standings.beginning(epoch, [part.state_at(each, _next_epoch(each)) for part, each in saved]).as_text()

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check that it is complete and of this place, and that each part accepts its own state."""
        if not detail:
            raise StateCorruptError("the state of a combination lacks those of its parts: use an undamaged state")
        standings = Standings.read(detail, len(self.members))
        for part, state in zip(self.members, standings.states, strict=True):
            part.check(state)

    def detail_at(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """To the beginning of an epoch."""
        here, (epoch, _) = here.known(), there
        if not here.detail and there == here[:2]:
            return self.upcoming(epoch)
        standings = Standings.read(here.detail or self.upcoming(here.epoch), len(self.members))
        bases = [*standings.bases] if epoch == here.epoch else [epoch] * len(self.members)
        if epoch == here.epoch + 1:  # parts in the middle of an epoch leave it
            bases = [*map(_next_epoch, standings.states)]
        of_parts = zip(self.members, standings.states, bases, strict=True)
        return Standings.beginning(epoch, [part.state_at(state, base) for part, state, base in of_parts]).as_text()

    # --- sessions ---

    def open(self, run: Run) -> Session:
        """Steps from the position on."""
        mixture = self.members, Standings.read(run.detail, len(self.members)), self.cycles, self.upcoming, run
        if self.mode not in ("sequential", "weighted"):
            return Together(*mixture, shortest=self.mode == "min_size", pack=self.packing())
        draws = Draws(run.seed, run.epoch, self.weights) if self.mode == "weighted" else None
        labels = self.keys if self.options.settings["labelled"] else None
        weights, until, steps = self.weights, self.until, self.steps
        return OneAtATime(*mixture, draws=draws, weights=weights, until=until, steps=steps, labels=labels)

    def close(self) -> None:
        """Close the parts."""
        for part in self.members:
            part.loader.close()


def _next_epoch(state: State) -> int:
    """The epoch that a part at `state` begins next: this one, if nothing of it was handed out."""
    return int(state["epoch"] + (state["position"] > 0))
