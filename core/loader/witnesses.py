"""What the first sample of an epoch looks like: compared with a loaded state's witness, kept for states to come."""

from __future__ import annotations

import copy
from typing import Any, Literal

from ..errors import StateMismatchError, warn
from ..state.witness import SampleSummary, Witness
from ..trying import Finding
from .adapter import Adapter, Options, WitnessReport
from .reading import Reading

__all__ = ["Verify", "Witnesses", "tell_of_another"]

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


class Witnesses:
    """The witnesses of one loader.

    Attributes:
        expected: of the loaded state, until it has been compared.
    """

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self._adapter, self._options = adapter, options
        self.expected: Witness | None = None
        # By epoch, of the last two from which was read. A text is made when a state asks for it.
        self._known: dict[int, str | tuple[Any, SampleSummary, frozenset[str]]] = {}
        # Names of parts that differ from one read to the next.
        self._left_out: frozenset[str] = frozenset()
        self._tried = False  # whether a sample that is read twice stays the same

    def of_twin(self, adapter: Adapter) -> Witnesses:
        """The same for another adapter of the same source."""
        twin = copy.copy(self)
        twin._adapter = adapter
        return twin

    def text(self, epoch: int) -> str:
        """The witness of an epoch, for a state; empty if it is not known."""
        known = self._known.get(epoch, "")
        if isinstance(known, tuple):
            known = self._known[epoch] = str(Witness.of(epoch, *known))
        return known

    def load(self, text: str) -> None:
        """Expect a loaded state's witness."""
        self.expected = Witness.parse(text) if self._options.verify != "off" else None
        self._known = {} if self.expected is None else {self.expected.epoch: text}

    def looks(self, epoch: int) -> int:
        """How often the first sample of an epoch is to be looked at."""
        options = self._options
        if options.verify == "off" or not options.streams or options.shard is False:
            return 0
        return 2 if not self._tried else int(self.expected is not None or epoch not in self._known)

    def see(self, reading: Reading) -> None:
        """Compare what the reader of a session's first batch saw with the loaded state's witness, and keep it.

        Raises:
            StateMismatchError: the data differ from those that the state was saved with.
        """
        epoch = reading.run.epoch
        if not reading.run.reports:
            return
        (seen,) = reading.run.reports
        if self.expected is not None:
            _compare(self.expected, seen, epoch, self._options.verify)
            self.expected = None
        look = seen.look
        if look is None:
            return
        if look.unseen:
            self._adapter.note(Finding(unseen=look.unseen))
        if seen.again is not None:
            self._tried = True
            if differing := look.differing(seen.again):
                self._left_out = frozenset(differing)
                why = f"two reads of sample {seen.index!r:.80} differ in {look.names(differing)}"
                self._adapter.note(Finding(why, look.holds_most(differing), _OF_SAMPLES))
            elif seen.keeps:
                why = f"sample {seen.index!r:.80} drew random numbers when it was first read, and none when read again"
                self._adapter.note(Finding(why, cure=_OF_KEPT))
        if seen.collate is not None:
            self._adapter.note(seen.collate)
        known, before = {}, self._known.get(epoch - 1)
        if before is not None:
            known[epoch - 1] = before
        known[epoch] = seen.index, look, self._left_out
        self._known = known


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
