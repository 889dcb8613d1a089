"""From a place to a state, and back: what a state says, and what follows if it does not fit.

A state's `witness` says what the first sample of an epoch looks like. The one of a loaded state is compared when a
session's first batch is read, and that of each epoch is kept for states to come.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NoReturn

from ..errors import StateMismatchError, warn
from ..order.holes import Omit
from ..state import format as states
from ..state import parts
from ..state.changed import parse_changed
from ..state.format import State
from ..state.witness import SampleSummary, Witness
from ..trying import Finding
from ..world import World
from .adapter import WitnessReport
from .context import RunContext
from .loop_changes import LoopChanges
from .place import Place

__all__ = ["States", "Verify", "tell_of_another"]

Verify = Literal["sample", "strict", "warn", "off"]
"""`wrap`'s setting of this name."""

_CURE = "restore it, or pass verify='warn' to midepoch.wrap to continue all the same"

_OF_SAMPLES = (
    "make each sample a function of its index and of python's, numpy's or torch's generators, or of "
    "midepoch.sample_generator()"
)
_OF_KEPT = (
    "it keeps what it drew; draw anew for every sample, or make what is kept a function of the index, as "
    "np.random.default_rng(index) does"
)


class States:
    """The states of one loader."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._describe()
        self.expected: Witness | None = None  # of the loaded state, until it has been compared
        self.changes = LoopChanges(context.adapter, watches=context.options.verify != "off")
        # By epoch, of the last two from which was read. A text is made when a state asks for it.
        self._known: dict[int, str | tuple[Any, SampleSummary]] = {}
        self._varies = False  # a sample differed from one read to the next, so that no later read can be compared
        self._tried: int | None = None  # the latest epoch in which a sample was read twice
        self._differed = False  # and it was not the same

    @property
    def fingerprint(self) -> str:
        """What a position means, as JSON text; with what the adapter has learned since it was last asked."""
        if self._context.adapter.changes != self._described_at:
            self._describe()
        return self._fingerprint

    def _describe(self) -> None:
        adapter, stated = self._context.adapter, self._context.options.fingerprint
        described = adapter.describe() | ({} if stated is None else {"fingerprint": stated})
        self._fingerprint = json.dumps(described, separators=(",", ":"), sort_keys=True)
        self._described_at = adapter.changes

    # --- building and checking ---

    def build(self, place: Place, seed: int, world: World, witness: str = "", omit: str = "") -> State:
        """The state at a place. `omit`: what this epoch and later ones leave out."""
        adapter, detail = self._context.adapter, place.detail
        if not detail and (place.at_end or not place.position):
            begins = place.after()
            detail = adapter.detail_at(begins, begins[:2], seed, world)
        if not place.at_end:
            adapter.prepare(place, seed, "measured")
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
            "fingerprint": self.fingerprint,
        }
        if detail:
            detail = parts.seal_detail(detail, world.rank if own else 0, fields)
            detail = parts.single_part(world.rank, detail) if own else detail
        changed = self.changes.text(place.position > 0 and not place.at_end)
        return states.build(**fields, detail=detail, witness=witness, changed=changed, omit=omit)

    def check(self, state: State, world: World) -> tuple[State, Place]:
        """A copy of `state`, if this source can continue from it, and its place.

        Raises:
            StateError: it cannot. The message says what differs and what to do.
        """
        checked = states.check(state)
        adapter, stated_seed = self._context.adapter, self._context.options.seed
        if checked["adapter"] != adapter.name:
            _mismatch("the adapter", checked["adapter"], adapter.name, "wrap the kind of source that was saved")
        if stated_seed is not None and checked["seed"] != stated_seed:
            _mismatch("the seed", checked["seed"], stated_seed, "pass that seed, or none to take over the saved one")
        if adapter.rank_independent and checked["detail"].startswith("{"):
            rank = next(iter(parts.parts_in(checked["detail"], checked["world_size"])))
            raise StateMismatchError(
                f"this state says only which batches of rank {rank} of {checked['world_size']} are finished: save what "
                "midepoch.gather(loader) returns (call it on every rank)"
            )
        inside = checked["position"] > 0 or checked["detail"] or checked["omit"].startswith("done")
        # Of what each rank knows for itself, `rank_part` says which worlds can share it.
        if inside and adapter.rank_independent and not adapter.elastic and checked["world_size"] != world.world_size:
            adapter.refuse_world(checked["world_size"], world)
        adapter.prepare(Place(checked["epoch"], checked["position"]), checked["seed"], "measured")
        states.compare_fingerprints(checked["fingerprint"], self.fingerprint)
        saved, here = (states.piece_of(each, "package") for each in (checked["fingerprint"], self.fingerprint))
        if saved and here and saved != here:
            warn(
                f"the state was saved with {saved!r:.80}, and {here!r} is installed: another version may read it "
                "differently; install that version, or compare the first batches"
            )
        place = self.place(checked, world)
        size = adapter.size(checked["seed"], place.epoch, world, place.detail)
        if size is not None and place.position > size:
            _mismatch("the size", f"position {place.position}", size, "use the data that it was saved with")
        if None not in (size, checked["size"]) and checked["size"] != size:
            cure = "use the data and the sampler that it was saved with, or start over with these; if the length "
            _mismatch("the size", checked["size"], size, f"{cure}follows the epoch, set that before you load")
        begins = place.after()
        adapter.check_detail(place.detail, checked["seed"], begins.epoch, begins.position, world)
        Witness.parse(checked["witness"])
        parse_changed(checked["changed"])
        Omit.parse(checked["omit"], place.epoch, place.position, size)
        if checked["omit"] and not (can := self._context.skips):
            raise StateMismatchError(f"the state skips positions, and this source cannot ({can.reason}): load another")
        return checked, place

    def place(self, state: State, world: World) -> Place:
        """The place of a state, with this rank's detail."""
        adapter = self._context.adapter
        detail = parts.unseal_detail(state, adapter.rank_independent)
        if detail and not adapter.rank_independent:
            detail = adapter.rank_part(detail, state["world_size"], world)
        # Only a body of `epochs` saves the end of an epoch; otherwise the state is that of the next one's beginning.
        at_end = bool(state["size"] and state["position"] == state["size"])
        return Place(state["epoch"], state["position"], str(detail), at_end)

    # --- witnesses ---

    def witness(self, epoch: int) -> str:
        """The witness of an epoch, for a state; empty if it is not known."""
        known = self._known.get(epoch, "")
        if isinstance(known, tuple):
            known = self._known[epoch] = str(Witness.of(epoch, *known))
        return known

    def expect(self, state: State) -> None:
        """Expect what a loaded state says of the data."""
        self.expected = Witness.parse(state["witness"]) if self._context.options.verify != "off" else None
        self._known = {} if self.expected is None else {self.expected.epoch: state["witness"]}
        self.changes.expect(state["changed"])

    def looks(self, epoch: int) -> int:
        """How often the first sample of an epoch is to be looked at: `Run.looks`."""
        options = self._context.options
        if options.verify == "off" or not options.streams or options.shard is False:
            return 0
        if self._tried is None:
            return 3
        # Another sample in each epoch: what is true of some of them alone is found by luck.
        if self._tried != epoch and not self._differed:
            return 2
        return int(self.expected is not None or epoch not in self._known)

    def see(self, seen: WitnessReport, epoch: int) -> None:
        """Compare what the reader of a session's first batch saw with the loaded state's witness, and keep it.

        Raises:
            StateMismatchError: the data differ from those that the state was saved with.
        """
        if self.expected is not None:
            # If the loop has changed something, other data are to be expected at a boundary.
            if self.expected.epoch == epoch or not self.changes.since_saved:
                _compare(self.expected, seen, epoch, self._context.options.verify)
            self.expected = None
        look, note = seen.look, self._context.adapter.note
        if look is None:
            return
        if look.unseen:
            note(Finding(unseen=look.unseen))
        if seen.again is not None:
            self._tried = epoch
            if differing := look.differing(seen.again):
                self._varies = self._differed = True
                why = f"two reads of sample {seen.index!r:.80} differ in {look.names(differing)}"
                note(Finding(why, look.holds_most(differing), _OF_SAMPLES))
            elif seen.keeps:
                self._differed = True
                why = f"sample {seen.index!r:.80} drew random numbers when it was first read, and none when read again"
                note(Finding(why, cure=_OF_KEPT))
        if seen.collate is not None:
            note(seen.collate)
        before = {epoch - 1: self._known[epoch - 1]} if epoch - 1 in self._known else {}
        self._known = {**before, epoch: "" if self._varies else (seen.index, look)}


def tell_of_another(which: str, verify: Verify) -> None:
    """What follows when the data that `which` names are not those that the state was saved with."""
    _tell(f"{which} has another content than when the state was saved: {_CURE}", verify in ("sample", "strict"))


def _compare(witness: Witness, seen: WitnessReport, epoch: int, verify: Verify) -> None:
    """Compare a sample with a loaded state's witness. At an epoch's boundary, what differs may be meant to."""
    strict, at_boundary = verify == "strict", witness.epoch != epoch
    if at_boundary and witness.index is None and not seen.what:
        return  # only that epoch's order knows which sample it was
    index = seen.index if witness.index is None else witness.index
    which = seen.what or f"sample {index!r:.80}, the first of epoch {witness.epoch},"
    error = strict or (verify == "sample" and not at_boundary)
    if seen.expected is None:
        if seen.missing:
            _tell(f"{which} is not there now: the data have changed; {_CURE}", error)
        else:
            why = seen.error or "it raises an error"
            _tell(f"{which} cannot be compared with the state's witness ({why})", strict)
    elif differing := witness.differs(seen.expected):
        names = f" ({seen.expected.names(differing)})" if any(differing) else ""
        expected = "; if your code gives each epoch other data, nothing is wrong" if at_boundary else ""
        _tell(
            f"{which} is another one than when the state was saved{names}: sort the list of files (glob and "
            f"os.listdir do not), restore the data, or pass verify='warn' to midepoch.wrap{expected}",
            error,
        )
    elif witness.has_other_bits(seen.expected):
        _tell(
            f"{which} is not bit for bit what it was when the state was saved: the augmentation, a decoder, a library "
            "or the data have changed, and the samples to come may differ as much",
            strict,
        )


def _tell(message: str, error: bool) -> None:
    if error:
        raise StateMismatchError(message)
    warn(message)


def _mismatch(what: str, saved: object, current: object, cure: str) -> NoReturn:
    raise StateMismatchError(f"{what} differs: the state was saved with {saved!r}, this loader has {current!r}; {cure}")
