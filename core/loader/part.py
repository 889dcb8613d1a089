"""A loader as combinations and trainers see it: what others than its user have to know of it, and ask of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from midepoch.errors import StateError
from midepoch.state.format import State
from midepoch.world import Share, Tail, World

from .capabilities import Capabilities
from .loader import Loader
from .place import Place

__all__ = ["Part"]


class Part:
    """A loader that somebody else drives: a combination, or a trainer's callback.

    Attributes:
        name: for messages.
        loader: the user's.
        taken: batches that the combination has ever handed out; it counts them itself.
        pending: the batch, if any, that was read and could not be handed out, since another part failed.
    """

    def __init__(self, name: str, loader: Loader) -> None:
        self.name, self.loader, self.taken = name, loader, 0
        self.pending: list[Any] = []
        self._pass: Iterator[Any] = iter(loader)

    @property
    def remembers(self) -> bool:
        """Its states of some batches ago are known."""
        return self.loader._adapter.remembers

    @property
    def promises(self) -> Capabilities:
        """What it is capable of."""
        return self.loader.capabilities

    @property
    def stated_world(self) -> World | None:
        """As given to `wrap`."""
        return self.loader._options.world

    @property
    def world(self) -> World:
        """As it is now."""
        return self.loader._current_world()

    @property
    def batch_size(self) -> int:
        """Units in a batch of one rank."""
        return self.loader._adapter.batch_size

    @property
    def tail(self) -> Tail:
        """How what does not divide is shared."""
        return self.loader._adapter.tail_in_use

    # --- how much there is ---

    def length(self, epoch: int) -> int | None:
        """Batches of one full epoch; None where nobody knows."""
        return self._steps(self.loader._current_seed(self.world), Place(epoch, 0))

    def left(self) -> int | None:
        """Batches that are left in its epoch; None where nobody knows."""
        return self.loader._steps_left()

    def left_at(self, state: State) -> int | None:
        """The same if it stood at `state`."""
        return self._steps(state["seed"], self._place_in(state))

    def _steps(self, seed: int, place: Place) -> int | None:
        adapter = self.loader._adapter
        share: Share | None = adapter.share(seed, place.epoch, place.position, self.world, place.detail)
        return None if share is None else share.steps

    # --- where it stands ---

    def _place_in(self, state: State) -> Place:
        return Place(state["epoch"], state["position"], self.loader._detail_in(state, self.world))

    @property
    def position(self) -> int:
        """Units of its epoch that lie behind."""
        return self.loader.position

    @property
    def epoch(self) -> int:
        """Of its next batch."""
        return self.loader.epoch

    def state(self, in_flight: int = 0) -> State:
        """As `Loader.state_dict`; a pending batch does not count."""
        return self.loader.state_dict(in_flight + len(self.pending))

    def check(self, state: State) -> None:
        """Raise StateError, naming the part, if it could not go on from `state`."""
        try:
            self.loader._check_state(state)
        except StateError as error:
            raise type(error)(f"part {self.name}: {error}") from error

    def state_at(self, state: State, epoch: int) -> State:
        """The state at the beginning of an epoch, if it stood at `state`.

        Raises:
            StateError: its source can only go where its own checkpoints lead.
        """
        if (state["epoch"], state["position"]) == (epoch, 0):
            return state
        adapter = self.loader._adapter
        if not adapter.can_seek and epoch != state["epoch"] + 1:
            raise StateError("this source can only go where its own checkpoints lead: load a state instead of seeking")
        detail = adapter.lead(self._place_in(state), (epoch, 0), state["seed"], self.world)
        return self.loader._built(Place(epoch, 0, detail), state["seed"], self.world)

    def leave_epoch(self) -> None:
        """Go to the next epoch's beginning, where a trainer gives up the rest of one that has begun."""
        if self.position:
            self.loader.load_state_dict(self.state_at(self.state(), self.epoch + 1))

    # --- reading ---

    def following(self) -> Callable[[], Any]:
        """What gives the next batch of its pass, and StopIteration at the end of its epoch."""
        return self._pending_first if self.pending else self._pass.__next__

    def _pending_first(self) -> Any:
        return self.pending.pop() if self.pending else next(self._pass)

    def peek(self) -> Any:
        """As `Loader.peek`."""
        return self.loader.peek()

    @property
    def is_open(self) -> bool:
        """Something is open at its place, so that its end is seen when it comes."""
        return self.loader._cursor.session is not None

    def go_to(self, state: State) -> None:
        """Let the next batch be the one that follows `state`."""
        loader = self.loader
        if loader.position and (state["epoch"], state["position"]) == (loader.epoch + 1, 0) and self.remembers:
            self.pending.clear()
            loader._end_epoch()  # which leaves the batches in flight remembered
        if self._is_at(state):
            # A new pass over a loader in the middle of an epoch would begin another one.
            if not loader.position and not self.pending:
                self._pass = iter(loader)
            if self.pending or not loader.position or getattr(self._pass, "cursor", None) is loader._cursor:
                return
        self.pending.clear()
        loader.load_state_dict(state)
        self._pass = iter(loader)

    def begin_epoch(self) -> None:
        """Let the next batch be an epoch's first: of its next epoch, if it is in the middle of one."""
        if self.loader.position:
            if not self.is_open and not self.remembers:
                # Only the source can lead to its next epoch, from where it stands.
                with contextlib.suppress(StopIteration):
                    self.loader.peek()
            self.loader._end_epoch()
        self._pass = iter(self.loader)

    def _is_at(self, state: State) -> bool:
        try:
            return self.state() == state
        except StateError:
            return False

    def close(self) -> None:
        """Stop what it has open."""
        self.loader.close()
