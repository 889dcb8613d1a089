"""What the first sample of an epoch looks like: compared with a loaded state's witness, kept for states to come."""

from __future__ import annotations

import copy
from typing import Any

from ..state.witness import LONGEST, Look, Witness
from ..trying import Finding
from .adapter import Adapter, Options
from .cursor import Cursor
from .verify import verify

__all__ = ["Witnesses"]

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
        self._known: dict[int, str | tuple[Any, Look, frozenset[str]]] = {}
        # Names of parts that differ from one read to the next. Their numbers vary where samples have lists in them.
        self._left_out: frozenset[str] = frozenset()
        # A state with an identity of the user's own stays below 512 bytes, too.
        self._longest = LONGEST - (24 + len(options.fingerprint) if options.fingerprint else 0)
        self._tried = False  # whether a sample that is read twice stays the same

    def of_twin(self, adapter: Adapter) -> Witnesses:
        """The same for another adapter of the same source."""
        twin = copy.copy(self)
        twin._adapter = adapter
        return twin

    def text(self, epoch: int) -> str:
        """The witness of an epoch, for a state; empty if it is not known."""
        every = self._known
        known = every.get(epoch, "")
        if isinstance(known, tuple):
            index, look, left_out = known
            known = every[epoch] = Witness.of(epoch, index, look, look.numbers(left_out)).text(self._longest)
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

    def see(self, cursor: Cursor) -> None:
        """Compare what the reader of a session's first batch saw with the loaded state's witness, and keep it.

        Raises:
            StateMismatchError: the data differ from those that the state was saved with.
        """
        seen, epoch = None if cursor.session is None else cursor.session.seen, cursor.opened.epoch
        if seen is None:
            return
        if self.expected is not None:
            verify(self.expected, seen, epoch, strict=self._options.verify)
            self.expected = None
        look = seen.look
        if look is None:
            return
        if look.unseen:
            self._adapter.note(Finding(unseen=look.unseen))
        if seen.again is not None:
            self._tried = True
            if differing := look.differing(seen.again):
                self._left_out = look.named(differing)
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
