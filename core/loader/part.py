"""The internal interface to a loader for combinations, trainer callbacks and the trials of `midepoch check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import StateError, UnsupportedSourceError
from ..state.format import State
from ..world import World
from .adapter import Adapter, Reach, Samples
from .context import RunContext
from .loader import Loader
from .place import Place

__all__ = ["Part"]


class Part:
    """A loader that a combination or a trainer's callback drives. `name`: for messages."""

    def __init__(self, name: str, loader: Loader) -> None:
        self.name, self.loader = name, loader
        self.taken = 0  # batches of this part that the combination has handed out; the combination counts them
        self.progress = loader._progress
        self.context: RunContext = self.progress.context
        self.adapter: Adapter = self.context.adapter
        self.pending: list[Any] = []  # at most one batch, read but not handed out because another part failed
        self._pass: Iterator[Any] = iter(loader)

    @property
    def options(self) -> dict[str, Any]:
        """The keywords with which it was wrapped."""
        stated = dict(vars(self.context.options))
        settings: Mapping[str, Any] = stated.pop("settings")
        return {**stated, **settings}

    def check_reshard(self, world: World) -> None:
        """Raise an UnsupportedSourceError if the loader cannot be shared by another world while it is read."""
        self.refuse_uneven(world)
        self.context.check_reshard(world, self.loader.epoch)

    def refuse_uneven(self, world: World) -> None:
        """Raise an UnsupportedSourceError if the ranks could read different parts at one step."""
        if world.world_size > 1 and self.adapter.tail_in_use == "uneven":
            raise UnsupportedSourceError(
                f"part {self.name} has tail='uneven', so that ranks may have unequal numbers of batches, and would "
                "read different parts at one step: wrap it with tail='pad' or 'drop'"
            )

    def reshard(self, world: World) -> None:
        """As `Loader.reshard`. A pending batch is read again, and one that could not be read is tried again."""
        self.pending.clear()
        self.progress.failed.clear()
        self.loader.reshard(world)

    # --- how much there is ---

    def length(self, epoch: int) -> int | None:
        """Batches of one full epoch on this rank; None if unknown."""
        return self._steps(self.loader.seed, Place(epoch, 0))

    def anyone_has_more(self) -> bool:
        """Whether any rank has a batch left in this epoch, as far as is known."""
        share = self.progress.share(self.loader.world, self.loader.epoch, self.loader.position)
        return share is None or share.global_steps > 0

    def left_at(self, state: State) -> int | None:
        """The batches left, for a loader that is at `state`."""
        return self._steps(state["seed"], self.progress.states.place(state, self.loader.world))

    def _steps(self, seed: int, place: Place) -> int | None:
        self.adapter.prepare(place, seed, "measured")
        share = self.adapter.share(seed, place.epoch, place.position, self.loader.world, place.detail)
        return None if share is None else share.steps

    def samples(self, epoch: int) -> Samples | None:
        """The samples of an epoch, if they can be read one by one."""
        self.adapter.prepare(Place(epoch, 0), self.loader.seed, "measured")
        return self.adapter.samples(self.loader.seed, epoch)

    # --- where it stands ---

    def state(self, in_flight: int = 0) -> State:
        """As `Loader.state_dict`; a pending batch counts as not handed out."""
        return self.loader.state_dict(in_flight + len(self.pending))

    def check(self, state: State) -> None:
        """Raise a StateError that names the part unless it can continue from `state`."""
        try:
            self.progress.check(state)
        except StateError as error:
            raise type(error)(f"part {self.name}: {error}") from error

    def state_at(self, state: State, epoch: int) -> State:
        """The state at the beginning of `epoch`, for a loader that stands at `state`.

        Raises:
            StateError: its source can reach only the places of its own checkpoints.
        """
        if (state["epoch"], state["position"]) == (epoch, 0):
            return state
        adapter = self.adapter
        if adapter.reach is Reach.STATES and epoch != state["epoch"] + 1:
            raise StateError("this source can only go where its own checkpoints lead: load a state instead of seeking")
        here = self.progress.states.place(state, self.loader.world).after()
        if here[:2] != (epoch, 0):
            here = Place(epoch, 0, adapter.detail_at(here, (epoch, 0), state["seed"], self.loader.world))
        return self.progress.states.build(here, state["seed"], self.loader.world, state.get("witness", ""))

    def leave_epoch(self) -> None:
        """Go to the beginning of the next epoch, unless this one has not begun."""
        if self.loader.position:
            self.loader.load_state_dict(self.state_at(self.state(), self.loader.epoch + 1))

    # --- reading ---

    def following(self) -> Callable[[], Any]:
        """A function that returns the next batch, and raises StopIteration at the end of the epoch."""
        return self._pending_first if self.pending else self._pass.__next__

    def _pending_first(self) -> Any:
        return self.pending.pop() if self.pending else next(self._pass)

    def go_to(self, state: State) -> None:
        """Make the batch that follows `state` the next one."""
        loader = self.loader
        if loader.position and (state["epoch"], state["position"]) == (loader.epoch + 1, 0):
            self.pending.clear()
            self.progress.end_epoch()  # unlike a load, it keeps the history of batches in flight
        if self._is_at(state):
            # A new pass over a loader in the middle of an epoch would begin another one.
            if not loader.position and not self.pending:
                self._new_pass()
            if self.pending or not loader.position or self._pass is self.progress.latest():
                return
        self.pending.clear()
        loader.load_state_dict(state)
        self._new_pass()

    def begin_epoch(self) -> None:
        """Make an epoch's first batch the next one: that of the next epoch if this one has begun."""
        if self.loader.position:
            self.progress.end_epoch()
        self._new_pass()

    def _new_pass(self) -> None:
        """One that has been given its last batch need not be told: a look at the next batch is of the next epoch."""
        self.progress.finish()
        self._pass = iter(self.loader)

    def _is_at(self, state: State) -> bool:
        try:
            return self.state() == state
        except StateError:
            return False
