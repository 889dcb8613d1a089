"""From a place to a state, and back: what is built, what is refused."""

from __future__ import annotations

import json
from typing import NoReturn

from ..errors import StateMismatchError, warn
from ..state import format as states
from ..state import parts
from ..state.format import State
from ..state.witness import Witness
from ..world import World
from .adapter import Adapter, Options
from .place import Place

__all__ = ["States"]


class States:
    """The states of one source."""

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self._adapter, self._options = adapter, options
        self._own = {} if options.fingerprint is None else {"fingerprint": options.fingerprint}
        self._describe()

    def _describe(self) -> None:
        described = {**self._adapter.describe(), **self._own}
        self._fingerprint = json.dumps(described, separators=(",", ":"), sort_keys=True)
        self._redescribed = self._adapter.redescribed

    def build(self, place: Place, seed: int, world: World, witness: str = "") -> State:
        """The state at a place."""
        adapter, detail = self._adapter, place.detail
        if not detail and (place.at_end or not place.position):
            begins = place.after() if place.at_end else place
            detail = adapter.detail_at(begins, begins[:2], seed, world)
        if not place.at_end:
            adapter.expect(seed, place.epoch)
        if adapter.redescribed != self._redescribed:
            self._describe()
        own, size = not adapter.rank_independent, place.position if place.at_end else None
        if not (place.at_end or (own and world.world_size > 1)):  # ranks with parts of their own may have other sizes
            size = adapter.size(seed, place.epoch, world, detail)
        fields = {
            "adapter": adapter.name,
            "epoch": place.epoch,
            "position": place.position,
            "seed": seed,
            "size": size,
            "world_size": world.world_size,
            "batch_size": adapter.facts.batch_size,
            "fingerprint": self._fingerprint,
        }
        if detail:
            detail = parts.seal_detail(detail, world.rank if own else 0, fields)
            detail = parts.single_part(world.rank, detail) if own else detail
        return states.build(**fields, detail=detail, witness=witness)

    def _warn_of_package(self, fingerprint: str) -> None:
        """Warn where a source's package is of another version than the one that has made the state."""
        saved, here = (states.piece_of(each, "package") for each in (fingerprint, self._fingerprint))
        if saved and here and saved != here:
            warn(
                f"the state was saved with {saved!r:.80}, and {here!r} is installed: another version may read it "
                "differently; install that version, or compare the first batches"
            )

    def check(self, state: State, world: World) -> tuple[State, Place]:
        """A copy of `state`, if this source can continue from it, and its place.

        Raises:
            StateError: it cannot. The message says what differs and what to do.
        """
        checked = states.check(state)
        adapter = self._adapter
        if checked["adapter"] != adapter.name:
            _mismatch("the adapter", checked["adapter"], adapter.name, "wrap the kind of source that was saved")
        if self._options.seed is not None and checked["seed"] != self._options.seed:
            _mismatch(
                "the seed", checked["seed"], self._options.seed, "pass that seed, or none to take over the saved one"
            )
        inside = checked["position"] > 0 or checked["detail"]
        # Of what each rank knows for itself, `rank_part` says which worlds can share it.
        if inside and adapter.rank_independent and not adapter.elastic and checked["world_size"] != world.world_size:
            adapter.refuse_world(checked["world_size"], world)
        adapter.refresh()
        if adapter.redescribed != self._redescribed:
            self._describe()
        states.compare_fingerprints(checked["fingerprint"], self._fingerprint)
        self._warn_of_package(checked["fingerprint"])
        place = self.place(checked, world)
        adapter.expect(checked["seed"], place.epoch)
        size = adapter.size(checked["seed"], place.epoch, world, place.detail)
        if size is not None and place.position > size:
            _mismatch("the size", f"position {place.position}", size, "use the data that it was saved with")
        if None not in (size, checked["size"]) and checked["size"] != size:
            cure = "use the data and the sampler that it was saved with, or start over with these"
            _mismatch("the size", checked["size"], size, cure)
        begins = place.after() if place.at_end else place
        adapter.check_detail(place.detail, checked["seed"], begins.epoch, begins.position, world)
        Witness.parse(checked["witness"])
        return checked, place

    def place(self, state: State, world: World) -> Place:
        """The place of a state, with this rank's detail."""
        adapter = self._adapter
        detail = parts.unseal_detail(state, adapter.rank_independent)
        if detail and not adapter.rank_independent:
            detail = adapter.rank_part(detail, state["world_size"], world)
        # Only a body of `epochs` saves the end of an epoch; otherwise the state is that of the next one's beginning.
        over = bool(state["size"] and state["position"] == state["size"])
        return Place(state["epoch"], state["position"], str(detail), over)


def _mismatch(what: str, saved: object, current: object, cure: str) -> NoReturn:
    raise StateMismatchError(f"{what} differs: the state was saved with {saved!r}, this loader has {current!r}; {cure}")
