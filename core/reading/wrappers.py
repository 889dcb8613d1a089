"""Wrappers: objects that pass on the batches of one DataLoader, one for one, such as those that move them to a device.

midepoch reads a copy of the wrapper in which a `Feed` stands for the DataLoader. It gives the batches of a session of
the DataLoader's own adapter, which jumps. While the wrapper works on a batch, the global generators are seeded with
that batch's key. So what it makes of a batch follows from the batch alone, also where it works ahead.

Nothing but a trial can tell whether a wrapper does pass batches on one for one and keeps nothing from one to the next.
So its second batch in a row must be what it makes first after a jump to it, and it must keep the same then. Modules are
the user's own in every copy: a trial begins with what they hold, and gives it back.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from ..errors import SourceError
from ..loader.adapter import Adapter, Run, Seen, Session
from ..order.keys import derive_key, extend_key
from ..randomness.owned import find_generators
from ..randomness.streams import Purpose
from ..state.witness import Look, look_at
from .copies import NotOneForOneError, Reading, copy_of
from .inside import Inside
from .keeping import Modules
from .trials import started_threads

__all__ = ["Through"]

_MOST_AHEAD = 2  # batches inside that a wrapper has asked for and not yet handed out


class Through:
    """Reads a wrapper by the DataLoader inside.

    Attributes:
        inside: as found by `inside_of` or `held_in`.
        name: of the wrapper's class, for messages.
        lead: batches inside that the wrapper asks for ahead; None if that has not been proved yet.
        statistics: names of what its modules change as it makes batches.
        shares: what its code uses that copies share; empty if nothing is known.
    """

    def __init__(self, inside: Inside) -> None:
        self.inside = inside
        self.name = type(inside.chain[0][0]).__name__
        self.lead: int | None = None
        self.statistics: tuple[str, ...] = ()
        self.shares = ""

    def around(self, session: Session, run: Run, adapter: Adapter) -> Session:
        """A session of the wrapper's batches. `session`: of `adapter`, that of the DataLoader inside, opened for `run`.

        Raises:
            NotOneForOneError: a first trial shows that they do not follow, one for one, from those inside.
        """
        return _WrapperSession(self, session, run, adapter)


class _WrapperSession(Session):
    """A session of a wrapper's batches."""

    def __init__(self, through: Through, inner: Session, run: Run, adapter: Adapter) -> None:
        self._through, self._inner, self._run, self._adapter = through, inner, run, adapter
        self._key = derive_key(Purpose.WRAPPER, run.seed, run.epoch)
        self._global_batch = adapter.units_per_step(run.world)
        self._offset = adapter.sharing(run.world).rank * adapter.batch_size  # of this rank's part of a global batch
        self._seen: Seen | None = None
        self._made: deque[Any] = deque()  # batches that the trial has made
        self.marks = inner.marks
        try:
            self._reading = self._read_from(0)
        except NotOneForOneError:
            inner.close()
            raise
        try:
            if through.lead is None:
                self._try()
        except BaseException:
            self.close()
            raise

    # --- the inner session's answers ---

    @property
    def seen(self) -> Seen | None:  # type: ignore[override]
        """The inner session's."""
        return self._seen or self._inner.seen

    @property
    def raises(self) -> Exception | None:
        """The inner session's."""
        return self._inner.raises

    def mark(self) -> Any:
        """The inner session's, before the batch that is to be handed out."""
        if not self.marks:
            return None
        reading = self._reading
        number = reading.handed - len(self._made)
        while (oldest := next(iter(reading.marks), number)) < number:
            del reading.marks[oldest]
        return reading.marks[number] if number in reading.marks else self._inner.mark()

    def detail(self, mark: Any) -> str:
        """The inner session's. Without marks, it does not depend on the place."""
        return self._inner.detail(mark)

    def following(self) -> str:
        """The inner session's."""
        return self._inner.following()

    def close(self) -> None:
        """Drop the copy, and close the inner session."""
        self._made.clear()
        self._reading.close()
        self._inner.close()

    # --- batches ---

    def take(self) -> Any:
        """The wrapper's next batch. Before the last one is handed out, the wrapper is asked for one more."""
        batch = self._made.popleft() if self._made else self._next()
        share, reading = self._run.share, self._reading
        if share is not None and reading.handed - len(self._made) == share.steps and not reading.ends():
            raise SourceError(f"{self._name} gave a batch after those of the DataLoader inside{_INSTEAD}")
        return batch

    def _next(self) -> Any:
        reading = self._reading
        if not reading.ready:
            reading.fetch()
            if not reading.ready and reading.asked == reading.handed:
                raise reading.error or StopIteration
        try:
            batch = reading.give()
            if reading.handed == reading.first + 1:
                reading.late()
        except StopIteration:
            raise self._early_end(reading) from None
        except NotOneForOneError as error:
            raise SourceError(f"{self._name} is no longer one for one: {error}{_INSTEAD}") from None
        if reading.asked - reading.handed != self._through.lead:
            self._check(reading)
        return batch

    def _early_end(self, reading: Reading) -> Exception:
        """What the end of the wrapper's iterator means while there are batches inside."""
        if reading.error is not None:
            return reading.error
        return SourceError(
            f"{self._name} ended after {reading.handed} batches, while the DataLoader inside had given it "
            f"{reading.asked} and had more{_INSTEAD}"
        )

    def _check(self, reading: Reading) -> None:
        """Raise a SourceError if the wrapper is not one for one any more."""
        reading.fetch()  # it may know by their number that there are no more
        ahead, lead = reading.asked - reading.handed, self._through.lead
        ends = reading.ended or reading.error is not None
        if lead is None or (ends and 0 <= ahead <= lead):
            return
        raise SourceError(
            f"{self._name} passed on the batches of the DataLoader inside one for one, {lead} ahead; after "
            f"{reading.handed} batches it has asked for {reading.asked}{_INSTEAD}"
        )

    @property
    def _name(self) -> str:
        return self._through.name

    def _key_of(self, number: int) -> int:
        return extend_key(self._key, self._run.position + number * self._global_batch + self._offset)

    def _read_from(self, number: int) -> Reading:
        left = None if self._run.share is None else self._run.share.steps - number
        mark = self._inner.mark if self.marks else None
        return Reading(copy_of(self._through.inside, left), self._inner.take, number, self._key_of, mark)

    def _restart(self, number: int) -> None:
        """Read on with another copy, from this batch of the session on."""
        run, adapter = self._run, self._adapter
        self._seen = self.seen
        detail = self._inner.detail(self._reading.marks.get(number)) if self.marks and number else run.detail
        self._made.clear()
        self._reading.close()
        self._inner.close()
        position = run.position + number * self._global_batch
        share = adapter.share(run.seed, run.epoch, position, run.world, detail)
        self._inner = adapter.open(Run(run.epoch, position, run.seed, run.world, share, run.tail, detail))
        self._reading = self._read_from(number)

    # --- the trial ---

    def _try(self) -> None:
        """Make the first two batches, and the second one again after a jump to it.

        Nothing is proved where the epoch has a single batch left, or where one inside cannot be read.

        Raises:
            NotOneForOneError: they show that this wrapper has to be read from its start.
        """
        start = self._reading.modules()
        try:
            self._try_from(start)
        except NotOneForOneError:
            start.put_back()
            raise

    def _try_from(self, start: Modules) -> None:
        if not self._make():
            return
        reading = self._reading
        if reading.late():
            start.put_back()
            self._restart(0)  # it drew from generators that did not exist yet
            if not self._make():
                return
            reading = self._reading
        lead, look = reading.asked - reading.handed, look_at(self._made[0])
        if not self._make():
            if reading.ended and reading.asked == reading.handed and not reading.ends():
                raise NotOneForOneError(reading.trouble or _GOES_ON)
            return
        reading.fetch()  # it may know by their number that there are no more
        if not 0 <= lead <= _MOST_AHEAD or (lead != reading.asked - reading.handed and not reading.ended):
            raise NotOneForOneError(f"for {len(self._made)} batches it asks for {reading.asked}")
        self._through.statistics = start.statistics()
        looks = start.looks()
        start.put_back()
        self._jump(reading, (reading.kept or [])[: reading.asked - 1], start, looks)
        self._through.lead, self._through.shares = lead, reading.shares()
        start.put_back()
        # It hands out one and the same object each time, or statistics would be ahead of what is handed out.
        if self._through.statistics or look_at(self._made[0]).differing(look):
            self._restart(0)
        reading.kept = None

    def _make(self) -> bool:
        """Make one more batch. False if there is none, or one inside cannot be read."""
        reading = self._reading
        if reading.kept is None:
            reading.kept = []
        reading.fetch()
        if reading.error is not None or (not reading.ready and reading.asked == reading.handed):
            return False
        try:
            self._made.append(reading.give())
        except StopIteration:
            if reading.error is not None:
                return False
            raise NotOneForOneError(reading.trouble or "it ends before the batches inside do") from None
        except NotOneForOneError:
            raise
        except Exception as error:  # noqa: BLE001  # read from its start, it will raise it again
            raise NotOneForOneError(f"a copy of it raised {type(error).__name__}: {error!s:.200}") from None
        return reading.error is None

    def _jump(self, reading: Reading, batches: list[Any], start: Modules, looks: dict[tuple[int, str], Look]) -> None:
        """Compare what another copy makes first of these batches with what was made of them in a row.

        `start`, `looks`: the modules before the first batch, and what they have kept of the batches in a row.
        """
        other, batch = self._made_of(copy.deepcopy(batches))
        kept, others = other.keeps(), start.looks()
        made, jumped = look_at(self._made[1]), look_at(batch)
        if differing := made.differing(jumped):
            raise NotOneForOneError(f"after a jump it makes something else of a batch ({made.names(differing)})")
        for name, value in reading.keeps().items():
            again = kept.get(name)
            if value is not again and look_at(value).differing(look_at(again)):
                raise NotOneForOneError(f"it keeps something of earlier batches, in {name}")
        for key, look in looks.items():
            if key not in others or look.differing(others[key]):
                raise NotOneForOneError(f"it keeps something of earlier batches, in {key[1]}")
        known = {id(each.generator) for each in find_generators(*other.own().values())[0]}
        if any(id(each.generator) not in known for each in find_generators(*kept.values())[0]):
            raise NotOneForOneError("it makes a generator of random numbers in each pass")
        self._to_the_end(other, len(batches) - 1)
        other.close()
        start.put_back()
        self._pass_again(other, batches, jumped)
        if reading.asked > len(self._made):
            self._made_of(batches[:1])[0].close()  # it has to notice the end

    def _pass_again(self, reading: Reading, batches: list[Any], look: Look) -> None:
        """Compare what a copy makes first in another pass: each pass of midepoch's reads a new copy, which forgets."""
        again = reading.again(iter(copy.deepcopy(batches)).__next__)
        try:
            batch = again.give()
        except Exception as error:  # noqa: BLE001  # it may be meant for one pass
            raise NotOneForOneError(f"another pass of it raised {type(error).__name__}: {error!s:.200}") from None
        if look.differing(look_at(batch)):
            raise NotOneForOneError("it makes something else of a batch in each pass")
        again.close()

    def _to_the_end(self, reading: Reading, left: int) -> None:
        """Read a copy that has given its first batch, and has so many left, to its end."""
        try:
            for _ in range(left):
                reading.give()
        except Exception as error:  # noqa: BLE001  # the first copy has been read without
            why = f"after a jump, a copy of it raised {type(error).__name__}: {error!s:.200}"
            raise NotOneForOneError(why) from None
        if not reading.ends():
            raise NotOneForOneError(reading.trouble or _GOES_ON)

    def _made_of(self, batches: list[Any]) -> tuple[Reading, Any]:
        """What another copy makes first of these batches, after which there is no other."""
        other = Reading(copy_of(self._through.inside, len(batches)), iter(batches).__next__, 1, self._key_of)
        try:
            with started_threads() as threads:
                batch = other.give()
        except Exception as error:  # noqa: BLE001  # the first copy has been read without
            why = f"after a jump, a copy of it raised {type(error).__name__}: {error!s:.200}"
            raise NotOneForOneError(why) from None
        if threads:
            raise NotOneForOneError(f"it works in threads of its own ({', '.join(threads[:4])})")
        return other, batch


_GOES_ON = "it goes on after the last batch inside"
_INSTEAD = (
    "; wrap that DataLoader itself, and pass what is done with its batches as then=, or wrap a generator function that "
    "reads this one"
)
