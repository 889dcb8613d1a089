"""A loader's progress: its place, the session that is open there, and the passes over it.

What the next `next()` gives, for all adapters (docs/decisions.md says why):

* A new pass begins at the place. If a batch of that epoch was handed out since the last load or seek (`new_epoch`), as
  after a `break`, it drops the rest, and begins the next epoch.
* The pass that runs gives the batch at the place. After the epoch's last batch it ends. One that another pass has
  replaced, or during which the loader was closed, is an error.
* `iter()` has no side effect; the first `next()` starts the pass. The place moves when a batch is handed out, not when
  it is prefetched. Handing out an epoch's last batch moves it to (epoch + 1, 0), so 'finished' has one spelling. If the
  length is unknown, the pass's StopIteration does. In the body of `epochs`, the epoch ends with the body.

Five transitions move it: `put` (a load, a seek, a rollback), `open`, handing out a batch (`Pass.__next__`), `suspend`
(a reshard, an error, `close`) and the end of an epoch (`end_epoch`, `last_given_out`, `_leave_empty`).
"""

from __future__ import annotations

import contextlib
import enum
import logging
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

from ..errors import MidepochError, SourceError, StateError, warn
from ..order.holes import NO_HOLES, Holes, Omit
from ..state.codec import encode
from ..state.format import State, reseal
from ..state.parts import single_part
from ..world import Share, World
from .adapter import MOST_IN_FLIGHT, Reach, Run
from .body import Body, Interval
from .context import RunContext
from .place import LATER, Place, Unknown
from .reading import History, Reading, place_before
from .states import States
from .tickets import Ticket, Tickets

__all__ = ["Pass", "Phase", "Progress"]

_logger = logging.getLogger("midepoch")


def _none() -> None:
    """The latest pass, where there is none."""


def _around(holes: Holes, share: Share | None) -> Share | None:
    """A share of positions as one of the places around holes."""
    if share is None:
        return None
    return replace(share, size=holes.place_of(share.size), start=holes.place_of(share.start))


class Phase(enum.Enum):
    """The life of a pass. A running one that is not the loader's latest has been replaced: its `next()` is an error."""

    NEW = "nothing was asked for"
    RUNNING = "its next() is the next batch; its end, once the epoch's last batch was handed out"
    ENDED = "its end, again and again"


class Pass:
    """One pass over a loader. Several may exist; the one that was started last is the loader's.

    The loader holds no reference to the pass, so a ``break`` leaves no cycle, in which the garbage collector might wait
    for worker processes that nothing has told to end.
    """

    __slots__ = ("__weakref__", "_progress", "interval", "made_in", "phase", "reading", "resharded")

    def __init__(self, progress: Progress) -> None:
        self._progress, self.phase, self.made_in = progress, Phase.NEW, progress.body
        if progress.body is None:
            progress.waiting = weakref.ref(self)
        self.reading: Reading | None = None  # the open session, if the next batch can be taken from it without a check
        self.interval: Interval | None = None  # for the record of a body
        self.resharded = False  # the rest of its epoch was divided anew

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        progress, reading = self._progress, self.reading
        if reading is None or reading is not progress.reading:
            reading, batch, bookmark = progress.checked_batch(self)
        else:
            bookmark = reading.bookmark() if reading.bookmarks else None
            try:
                batch = reading.session.take()
            except StopIteration:
                progress.source_ended(reading)
                raise
            except BaseException as error:
                progress.source_failed(reading, error, bookmark)
                raise
        progress.history.append((reading, reading.position, bookmark))
        reading.steps += 1
        reading.position += reading.global_batch
        if reading.bookmarks:
            reading.correct()
        if self.interval is not None and (body := progress.body) is not None:
            body.clock += 1
            self.interval.took = body.clock
        if reading.steps == reading.last_step:
            progress.last_given_out(reading)
        return batch


class Progress:
    """The progress of one loader."""

    def __init__(self, context: RunContext, states: States) -> None:
        self.context, self.states = context, states
        self.place = Place(0, 0)  # of the next batch; while a session is open, of its first one
        self.origin: Place | None = None  # where a rollback leads; None if nothing was loaded, sought or read
        self.loaded: State | None = None  # until another place is sought, or its epoch is given up
        self.committed: State | None = None  # None before the first commit
        # A new pass begins a new epoch, as batches of this one were handed out. After a load or a seek it continues.
        self.new_epoch = False
        self._start()

    def _start(self) -> None:
        """Of this process alone."""
        adapter, remember = self.context.adapter, self.context.options.remember
        self.reading: Reading | None = None  # the open session; None after an epoch's last batch, too
        self.spent: Reading | None = None  # of a pass that was given its last batch, and was not told that it has ended
        self.latest: Any = _none  # a reference to the latest pass, until that has been told that it has ended
        self.waiting: Any = _none  # likewise, to the latest pass whose iterator was made outside of a body
        # The place, and `new_epoch`, before the first pass outside of a body since a load, a seek or a body.
        self.looked: tuple[Place, bool] | None = None
        self.failed: list[str] = []  # why the batches after the place could not be read, since a batch was handed out
        # The places before the latest batches.
        self.history: History = deque(maxlen=(0 if adapter.facts.remembers else remember) or MOST_IN_FLIGHT)
        self.body: Body | None = None  # of an `epochs` loop; None outside

    def __getstate__(self) -> dict[str, Any]:
        # For trainers that start processes.
        shared = ("context", "states", "origin", "loaded", "committed", "new_epoch")
        return {"place": self.here(), **{name: getattr(self, name) for name in shared}}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._start()

    # --- where it is ---

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.place.epoch

    @property
    def position(self) -> int:
        """Units of this epoch that all ranks together have received."""
        reading = self.reading
        return self.place.position if reading is None or not reading.steps else reading.original(reading.position)

    @property
    def is_at_end(self) -> bool:
        """Whether this epoch's last batch was handed out, and its body has not ended."""
        return self.reading is None and self.place.at_end

    @property
    def is_reading(self) -> bool:
        """Whether a pass reads this epoch, or `peek` has begun one, and somebody may continue it."""
        return self.reading is not None and not self._abandoned

    @property
    def _abandoned(self) -> bool:
        """Whether the latest pass was freed before its end."""
        return self.latest is not _none and self.latest() is None

    @property
    def _is_resharded(self) -> bool:
        """Whether the latest pass ends with its epoch, also where another world leaves it nothing more."""
        return getattr(self.latest(), "resharded", False)

    @property
    def has_session(self) -> bool:
        """Whether a session is open, if only because its pass has not been told that it has ended."""
        return self.reading is not None or self.spent is not None

    @property
    def is_awaited(self) -> bool:
        """Whether an iterator that was made outside of a body exists, and was not asked for anything."""
        made = self.waiting()
        return made is not None and made.phase is Phase.NEW

    @property
    def next_is_empty(self) -> bool:
        """Whether the next pass gives nothing, because it had ended before the body was begun again."""
        return self.body is not None and self.body.next_is_empty(self._name)

    @property
    def _name(self) -> str:
        """Of this loader in its body."""
        loaders = {} if self.body is None else self.body.loaders
        return next(name for name, each in loaders.items() if each is self)

    @property
    def within(self) -> bool:
        """Whether a part of a global batch was handed out, and the rest of it was not."""
        return self.reading is not None and self.reading.within

    @property
    def has_begun(self) -> bool:
        """Whether batches of this epoch were handed out, the first of a global batch included."""
        return self.position > 0 or self.within

    @property
    def is_unfinished(self) -> bool:
        """Whether this is the epoch of a loaded state, which was saved within it."""
        loaded = self.loaded
        return loaded is not None and loaded["epoch"] == self.epoch and self._has_done(self.epoch, loaded["position"])

    def _has_done(self, epoch: int, position: int) -> bool:
        """Whether something of an epoch was done at a place."""
        return position > 0 or epoch in self.context.omit.done

    def last_given(self) -> tuple[Share | None, int]:
        """Of the batch handed out last: its session's share, None if unknown, and the batches up to this one."""
        reading = self.history[-1][0] if self.history else None
        return (None, 0) if reading is None else (reading.share, reading.steps)

    def where(self) -> Place:
        """The place. Its detail is `Unknown` if the source cannot say."""
        reading = self.reading
        if reading is not None and reading.steps:
            try:
                return reading.place()
            except StateError as error:
                return Place(self.epoch, self.position, Unknown(error, type(error)))
        if self.place.detail is LATER:
            self._settle()
        return self.place

    def here(self) -> Place:
        """The place. Raises StateError if the source cannot say."""
        return self.where().known()

    def share(self, world: World, epoch: int, position: int, whole: bool = False) -> Share | None:
        """This rank's batches from (epoch, position) on; None if the length is unknown. `whole`: of all the epoch."""
        detail = self.place.detail if self.reading is None else self.reading.run.detail
        if isinstance(detail, Unknown) or detail is LATER or self.is_at_end:
            detail = ""  # that of the place is not known, or is the next epoch's
        share = self.context.adapter.share(self.context.seed(world), epoch, position, world, detail)
        omit = self.context.omit
        return _around(omit.skips.get(epoch, NO_HOLES) if whole else omit.of(epoch), share)

    def steps_left(self) -> int | None:
        """Batches left in this epoch on this rank; None if unknown."""
        if self.is_at_end:
            return 0
        reading = self.reading
        if reading is not None and not reading.session.position_correction:
            return None if reading.share is None else reading.share.steps - reading.steps
        share = self.share(self.context.world(), self.epoch, self.position)
        return None if share is None else share.steps

    # --- its state ---

    def state(self, in_flight: int = 0) -> State:
        """As `Loader.state_dict`, where nothing was committed."""
        if in_flight:
            return self.state_at(place_before(self.history, in_flight))
        if self.context.tickets.epoch is not None:
            return self._state_of(self.context.tickets)
        loaded, here = self.loaded, (self.epoch, self.position)
        if loaded is not None and not self.history and here == (loaded["epoch"], loaded["position"]):
            return dict(loaded)
        return self.state_at(self.here())

    def state_at(self, place: Place, omit: Omit | None = None) -> State:
        """The state at a place. `omit`: if not as it was loaded."""
        context, reading = self.context, self.reading
        omit = context.omit if omit is None else omit
        world = context.world() if reading is None else reading.run.world
        if why := context.adapter.unreachable(place):
            warn(f"{why}. Save after a batch: no other loader can load this state")
        last_read = place.epoch if place.position or omit.done.get(place.epoch) else place.epoch - 1
        witness = self.states.witness(last_read)
        text = omit.text(place.epoch, place.position)
        return self.states.build(place, context.seed(world), world, witness, text)

    # --- tickets ---

    def take_ticket(self) -> Ticket:
        """As `Loader.ticket`, if this loader can have any."""
        if not self.history:
            raise MidepochError("no batch was handed out since the start or the last load: take one, then its ticket")
        reading, context = self.history[-1][0], self.context
        if not context.tickets.taken:
            if self.reading is not reading:
                self.suspend()  # a look at the next epoch's first batch, which has no ticket yet
            context.tickets.begin(reading, context.adapter.share_of(reading.run), reading.steps - 1)
        return Ticket(reading.run.session, reading.run.epoch, reading.run.world.rank, reading.steps - 1)

    def check_left(self, epoch: int) -> None:
        """Raise a MidepochError if the loader would go on to an epoch, and tickets of the one before are open."""
        tickets = self.context.tickets
        if tickets.epoch not in (None, epoch) and (still := tickets.open()):
            what = f"epoch {tickets.epoch} cannot be left: the batch at position {still.starts[0]} is not finished"
            raise MidepochError(f"{what}; finish all, or load midepoch.gather(loader), which gives the rest again")

    def _state_of(self, tickets: Tickets) -> State:
        """The state where batches are finished one by one: in a larger world, this rank's part of it."""
        reading, still = tickets.last.reading, tickets.open()
        if reading.run.world.world_size == 1:
            return self.state_at(*self.frontier([still]))
        taken = tickets.size if self._is_past(tickets) else self.position
        state = self.state_at(Place(reading.run.epoch, taken, reading.session.detail(None)))
        return reseal({**state, "detail": single_part(reading.run.world.rank, encode(still.text()))})

    def _is_past(self, tickets: Tickets) -> bool:
        """Whether all batches of their epoch were handed out."""
        return self.epoch != tickets.epoch or self.is_at_end

    def frontier(self, parts: Iterable[Holes]) -> tuple[Place, Omit]:
        """The place before which all is finished, and what is left out from there on, from what each rank has open."""
        tickets, omit = self.context.tickets, self.context.omit
        reading, size, still = tickets.last.reading, tickets.size, Holes(each for part in parts for each in part)
        epoch, taken = reading.run.epoch, size if self._is_past(tickets) else self.position
        # Where nothing is open, what was handed out is finished, and what was when the state was loaded.
        known = Holes([(0, taken), *omit.done.get(epoch, ())])
        done = Holes(span for ends in known for span in still.spans(*map(still.place_of, ends)))
        frontier = Holes([*done, *omit.skips.get(epoch, ())]).position_of(0)
        if frontier < size:
            return Place(epoch, frontier, reading.session.detail(None)), replace(omit, done={epoch: done})
        if self._is_past(tickets):
            return self.here(), omit
        following = self.place_at(epoch + 1, 0)  # of which this rank has not been told
        return following if self.body is None else following.before(size), omit

    def check(self, state: State) -> tuple[State, Place]:
        """A copy of `state`, if this loader can continue from it, and its place. Raises StateError if it cannot."""
        return self.states.check(state, self.context.world())

    def load(self, state: State) -> None:
        """As `Loader.load_state_dict`."""
        checked, place = self.check(state)
        self.move(place, checked)
        self.loaded = checked
        self.context.take_seed(checked["seed"])
        self.context.omit = Omit.parse(checked["omit"], place.epoch)
        self.states.expect(checked)

    # --- what is left out ---

    def leave_out(self, omit: Omit, anew: bool) -> None:
        """Leave out more from now on. `anew`: in this epoch, so that what is left is divided anew."""
        omit.text(self.epoch)  # raises if no state can hold it
        if anew and self.reading is not None:
            self.divide_anew()  # what was handed out is where it was
        self.context.omit = omit
        self.loaded, self.committed = (
            state and reseal({**state, "omit": omit.text(state["epoch"], state["position"])})
            for state in (self.loaded, self.committed)
        )

    # --- going elsewhere ---

    def place_at(self, epoch: int, position: int) -> Place:
        """The place at (epoch, position), which no session need have reached."""
        adapter, there = self.context.adapter, (epoch, position)
        here = Place(self.epoch, self.position)
        if adapter.facts.remembers or self.reading is None or here[:2] == there:
            here = self.where()
        if here[:2] != there:
            here = here.after()
        if here[:2] == there and not isinstance(here.detail, Unknown):
            return here
        world = self.context.world()
        return Place(epoch, position, adapter.detail_at(here, there, self.context.seed(world), world))

    def move(self, place: Place, state: State | None = None) -> None:
        """Be at `place`, which counts as committed where commits are used. `state`: its state, if that is known."""
        seed = self.context.seed(self.context.world()) if state is None else state["seed"]
        self.context.omit = replace(self.context.omit, done={})
        self.put(place)
        self.context.adapter.prepare(place, seed, "moved")
        self.origin = place
        if self.committed is not None:
            self.committed = state or self.state_at(place)

    def put(self, place: Place) -> None:
        """Be at `place`. The running pass, or else the next one, continues there."""
        for reading in (self.spent, self.reading):
            if reading is not None:
                reading.close()
        self.spent = self.reading = None
        self.place, self.loaded, self.new_epoch, self.looked = place, None, False, None
        self.context.tickets.clear()
        self.history.clear()
        self.failed.clear()

    def roll_back(self) -> None:
        """Give again what was handed out since the origin. The pass that came from there continues, or the next one."""
        origin = self.origin
        if origin is None or (self.spent is not None and (self.epoch, self.position) == origin[:2]):
            return
        self.put(origin)

    def begin_again(self, error: type[BaseException], words: str) -> None:
        """What the training loop had is gone: refuse batches until a state is loaded or a place is sought."""
        self.put(Place(self.epoch, self.position, Unknown(words, error)))
        self.origin = self.body = self.context.last = None

    def end_epoch(self) -> None:
        """Give up the rest of this epoch."""
        self.check_left(self.epoch + 1)
        following = self.place_at(self.epoch + 1, 0)
        nothing_since = self.origin is not None and (self.epoch, self.position) == self.origin[:2] and not self.within
        self.finish()
        if self.reading is not None:
            self.reading.close()
        self.reading, self.place, self.loaded = None, following, None
        if nothing_since:
            self.origin = following  # what comes next is to be given again, not the rest that is given up
        self.failed.clear()

    # --- sessions ---

    def open(self) -> Reading | None:
        """Open a session at the place, in the world as it is now. None if only the epoch's end is left."""
        context, adapter = self.context, self.context.adapter
        world = context.enter()
        seed, place, skipped = context.seed(world), self.place.known(), self.skipped if self.failed else 0
        if skipped:
            holes = context.omit.of(place.epoch)
            after = holes.place_of(place.position) + skipped * adapter.units_per_step(world)
            place = self.place_at(place.epoch, holes.position_of(after))
        omit = context.omit
        while True:
            share, holes = None, omit.of(place.epoch) if omit.skips or omit.done else NO_HOLES
            if not place.at_end:
                adapter.prepare(place, seed, "opened")
                share = adapter.share(seed, place.epoch, place.position, world, place.detail)
                share = _around(holes, share) if holes.total else share
                if share is None or share.global_steps or not self._has_done(place.epoch, place.position):
                    break
            # Less than one global batch is left.
            if self.body is not None or skipped or self._is_resharded:
                return None
            place = self.place_at(place.epoch + 1, 0)
        if context.tickets.taken:
            self.check_left(place.epoch)
        detail = place.detail
        if not detail and not place.position:
            detail = adapter.detail_at(place, place[:2], seed, world)
        if not skipped:
            if self.origin is None or place == self.origin:
                self.origin = place._replace(detail=detail)  # as the source says it now, which reading changes
            self.place = place._replace(detail=detail)
        looks, expects = self.states.looks(place.epoch), self.states.expected
        tail, skips = adapter.tail_in_use if share is None else share.tail, omit.skips.get(place.epoch, NO_HOLES)
        run = Run(place.epoch, place.position, seed, world, share, tail, detail, looks, expects, [], holes, skips)
        remembers = context.options.remember > 0 or adapter.facts.remembers
        step = adapter.units_per_step(world) if share is None else share.global_batch
        self.reading = reading = Reading(context.session(run), run, step, remembers)
        if context.tickets.taken:
            context.tickets.begin(reading, adapter.share_of(run))
        self.states.changes.opened(place.position > 0 or place.epoch in omit.done)
        return reading

    def suspend(self, bookmark: Any = None) -> None:
        """Close the open session, and keep its place. `bookmark`: taken before a batch that failed."""
        self._settle()
        if self.spent is not None:
            self.spent.close()
        reading, position = self.reading, self.position
        self.reading = None
        if reading is None:
            return
        try:
            if reading.steps:
                self.place = reading.place(bookmark)
        except Exception as error:
            self.place = Place(reading.run.epoch, position, Unknown(error))
            if isinstance(error, SourceError):
                raise
            # A source that cannot say its state is read all the same.
        finally:
            reading.close()

    def divide_anew(self) -> None:
        """Close the open session. What is left of its epoch is divided anew, and its pass ends with it."""
        self.suspend()
        if (latest := self.latest()) is not None:
            latest.resharded = True

    def _settle(self) -> None:
        """Ask the source for the next epoch's detail, once: to find its state, it may have to be read past its end."""
        spent = self.spent
        if self.place.detail is not LATER or spent is None:
            return
        try:
            detail = spent.session.next_epoch_detail()
        except Exception as error:
            self.place = self.place._replace(detail=Unknown(error))
            if isinstance(error, SourceError):
                raise
            return  # a source that cannot say its state is read all the same
        self.place = self.place._replace(detail=detail)

    def peek(self) -> Any:
        """As `Loader.peek`."""
        latest = self.latest()
        if self.spent is not None and latest is not None:
            raise StopIteration  # the pass has given its last batch, and has not been told so
        self.finish()
        reading = self.reading or self.open()
        if reading is None:
            raise StopIteration
        if not reading.peeked:
            bookmark = reading.bookmark() if reading.steps else None
            try:
                batch = self._take(reading)
            except StopIteration:
                raise
            except BaseException:
                self.suspend(bookmark)
                raise
            reading.peeked.append((batch, bookmark))
            if latest is not None:
                latest.reading = None
        return reading.peeked[0][0]

    def _take(self, reading: Reading) -> Any:
        """A batch of the session. With the first one, what its reader saw is compared with the expected witness."""
        batch = reading.session.take()
        if not reading.steps:
            if reading.run.reports:
                self.states.see(reading.run.reports[0], reading.run.epoch)
            self.states.changes.first_batch()
        return batch

    def finish(self) -> None:
        """A pass that was given its epoch's last batch has ended."""
        reading = self.spent
        if reading is None:
            return
        try:
            self._settle()
        finally:
            self.spent = None
            self.end_pass()
            reading.close()
            self.states.changes.rest()

    def close(self) -> None:
        """Stop worker processes and threads. The place stays; iterating again starts them again."""
        self.finish()
        self.suspend()
        latest = self.latest()
        if latest is not None and latest.interval is not None and self.body is not None:
            self.body.end(latest.interval, exhausted=False)
        self.latest = _none
        self.context.adapter.close()

    # --- passes ---

    def checked_batch(self, this: Pass) -> tuple[Reading, Any, Any]:
        """The next batch, where the pass has to be checked or a session opened first: the reading, it, the bookmark."""
        if this.phase is Phase.NEW:
            self._begin(this)
        if this.phase is Phase.ENDED:
            raise StopIteration
        if self.latest() is not this:
            raise MidepochError(
                "this pass ended when another pass over the loader started, or the loader was closed: use one iterator "
                "at a time, or wrap the source twice"
            )
        if self.spent is not None:
            self.finish()
            self.new_epoch = True
            raise StopIteration
        while True:
            reading = self.reading or self.open()
            if reading is None:
                self._leave_empty()
                raise StopIteration
            bookmark = reading.bookmark() if reading.steps and (reading.bookmarks or reading.peeked) else None
            try:
                batch = reading.peeked.pop()[0] if reading.peeked else self._take(reading)
                break
            except StopIteration:
                if not self.source_ended(reading):
                    raise
            except BaseException as error:
                self.source_failed(reading, error, bookmark)
                raise
        if self.failed:
            if self.skipped:
                self._warn_of_skipped(reading.run.epoch, self.place.position, reading.run.position)
            self.failed.clear()
        self.new_epoch, this.reading = True, reading
        return reading, batch, bookmark if reading.steps else self.place

    def last_given_out(self, reading: Reading) -> None:
        """The epoch's last batch was handed out: be at the next epoch's beginning, in a body right before it."""
        run = reading.run
        self.place = Place(run.epoch + 1, 0, LATER)
        if self.body is not None:
            size = self.context.adapter.size(run.seed, run.epoch, run.world, run.detail)
            self.place = self.place.before(reading.position if size is None else size)
        self.new_epoch = True
        self.reading, self.spent = None, reading

    def _begin(self, this: Pass) -> None:
        """A pass asks for its first batch."""
        body = self.body
        if body is not None:
            if self.looked is not None:
                latest = self.latest()
                if latest is not None and not latest.interval.took:  # the body has not gone on with what was held
                    self.latest = _none
                    self.take_back_look()
                self.looked = None
            if body.next_is_empty(self._name):
                body.pass_empty(self._name)
                self._log_empty()
                this.phase = Phase.ENDED
                return
            body.before_begin(self._name)
        if self.spent is not None:
            self.finish()
        if body is None and self.looked is None:
            self.looked = self.place if self.reading is None else self.where(), self.new_epoch
        if self.new_epoch and (self.has_begun or self.is_at_end):
            steps = 0 if self.reading is None else self.reading.steps
            # In a body, a pass may be left on purpose, and the next one may be that of a later line.
            if self.is_unfinished and steps and (body is None or steps == 1):
                warn(
                    f"a new pass drops the rest of the resumed epoch {self.epoch}, from position {self.position} on: "
                    "to continue instead, keep the iterator, or load loader.state_dict()",
                )
            elif steps == 1:
                warn(
                    "a pass was given up after its first batch, and the next one begins another epoch: to look at a "
                    "batch, use loader.peek(), which gives nothing up"
                )
            self.end_epoch()
        self.failed.clear()  # only who asks the same iterator again continues after a batch that failed
        this.phase = Phase.RUNNING
        if body is None:
            self.latest = self.waiting if self.waiting() is this else weakref.ref(this)
        else:
            older, outlived = this.made_in is not body, this.made_in not in (None, body)
            if this.made_in is None:
                body.awaited[self._name] = True
            this.interval = body.begin(self._name, this, older or body.awaited.get(self._name, False), outlived)
            self.latest = this.interval.user

    def end_pass(self) -> None:
        """Let the latest pass end: it has no more batches."""
        latest, self.latest = self.latest(), _none
        if latest is not None:
            latest.phase, latest.reading = Phase.ENDED, None
            if latest.interval is not None and self.body is not None:
                self.body.end(latest.interval, exhausted=True)

    # --- the end of the source, and its errors ---

    def source_ended(self, reading: Reading) -> bool:
        """Handle the source's StopIteration. True if the pass continues, False if it is to be raised."""
        if reading is not self.reading:
            return False
        run, share = reading.run, reading.share
        nothing_left = not reading.steps and self._has_done(run.epoch, run.position)
        reading.correct()
        if reading.last_step is None:
            before = sum(each.run.epoch == run.epoch - 1 for each, _, _ in self.history)
            left_out = self.context.adapter.facts.drop_last  # all of it, perhaps
            if self.position == 0 and before and not left_out:
                self.suspend()
                self.end_pass()
                raise SourceError(
                    f"the source was empty in epoch {run.epoch}, after {before} batches in the last one: it can be "
                    "iterated only once; wrap a function that makes it, as in midepoch.wrap(lambda: make_it())"
                ) from None
        elif share is not None and reading.steps < share.steps:
            self.suspend()
            raise SourceError(
                f"the source ended after {reading.steps} of the {share.steps} batches that its len() had left: wrap a "
                "function that reads it, as in midepoch.wrap(lambda: iter(loader)), or correct its __len__ if that is "
                "your own"
            ) from None
        if reading.last_step is None and self.context.is_part and not nothing_left:
            self.suspend()  # a combination's states of some batches ago need the place at the end
            self.new_epoch = True
            self.end_pass()
            return False
        # The end of an unknown length, an empty epoch, or last steps of which only other ranks have batches.
        nothing_since = self.origin is not None and (self.epoch, self.position) == self.origin[:2]
        self.last_given_out(reading)
        if nothing_since and reading.last_step is None and self.body is None:
            self._settle()
            self.origin = self.place  # what comes next is to be given again
        if nothing_left and self.body is not None:
            self._log_empty()
        # Another rank may have batches left where this one has none.
        uneven = run.world.world_size > 1 and run.tail == "uneven" and reading.session.position_correction <= 0
        others = uneven and (not self.context.adapter.rank_independent or reading.last_step is not None)
        if nothing_left and self.body is None and not (self._is_resharded or others):
            self._settle()  # the pass goes on with the next epoch
            self.spent = None
            reading.close()
            return True
        self.finish()
        return False

    def _leave_empty(self) -> None:
        """End a pass without a batch: only the body of its epoch is left, or the epoch's last batches failed."""
        place, skipped, adapter = self.place, self.skipped, self.context.adapter
        unexpected = not (skipped or self._is_resharded)
        if place.at_end or unexpected:
            self._log_empty()
        if not (place.at_end or (unexpected and adapter.reach is Reach.STATES)):
            # Less than a global batch is left. The epoch ends where it does on a rank that was given its last batch.
            world = self.context.world()
            size = adapter.size(self.context.seed(world), place.epoch, world, self.here().detail)
            if skipped:
                self._warn_of_skipped(place.epoch, place.position, place.position if size is None else size)
                self.failed.clear()
            following = self.place_at(place.epoch + 1, 0)
            self.place = following if self.body is None or size is None else following.before(size)
        self.new_epoch = True
        self.end_pass()

    def _log_empty(self) -> None:
        if self.context.world().rank == 0:
            name = self.context.adapter.name
            _logger.warning("a pass over a loader (%s) is empty: its batches were handed out before", name)

    def source_failed(self, reading: Reading, error: BaseException, bookmark: Any) -> None:
        """Handle an error that will be raised: the loader stays after the last good batch."""
        if reading is not self.reading:
            return
        self.suspend(bookmark)
        if not isinstance(error, Exception) or isinstance(error, MidepochError | MemoryError):
            return
        share = reading.run.share
        if share is not None and reading.steps == share.steps:  # it ends the pass, as in a plain one
            self.new_epoch = True
            self.end_pass()
        else:
            if self.failed and not self.context.adapter.jumps:
                warn(
                    f"the batch at position {self.position} of epoch {self.epoch} has failed again, and what follows "
                    "it cannot be reached, because this source is read from its start, or from a state of its own: "
                    "leave the loop, or let the source pass over bad samples",
                )
            # A worker's error has its whole traceback in its message; the last line says what it was.
            self.failed.append(str(error).strip().rpartition("\n")[2] or type(error).__name__)

    @property
    def skipped(self) -> int:
        """How many batches after the place are passed over by whoever asks for the next one after an error.

        0 if the source cannot jump, with ``on_error="retry"``, and by default if other ranks or parts would wait.
        Workers that died, or memory that ran out, say nothing of a batch.
        """
        if not self.failed or not self.context.adapter.jumps:
            return 0
        stated, alone = self.context.options.on_error, not self.context.is_part and self.context.world().world_size == 1
        return len(self.failed) if stated == "next" or (stated is None and alone) else 0

    def _warn_of_skipped(self, epoch: int, start: int, stop: int) -> None:
        """Name the positions that were passed over, now that the caller has gone on after them."""
        failed = "; ".join(dict.fromkeys(self.failed))
        warn(
            f"positions {start} to {stop - 1} of epoch {epoch} were passed over, because reading them failed "
            f"({failed:.300}): repair the data, or pass on_error='retry' to midepoch.wrap to have them tried again",
        )

    # --- the body of an epoch ---

    def take_back_look(self) -> Place | None:
        """A loop over epochs begins: what was read outside of one since the last counts for nothing.

        If the pass is still held, it goes on where it is, or, once another one begins, that one begins where it did.

        Returns:
            Where that began; None if there is nothing of the kind.
        """
        if self.looked is None:
            return None
        (place, new_epoch), origin, loaded = self.looked, self.origin, self.loaded
        if origin is not None and origin[:2] == place[:2]:
            place = origin  # with the detail that its first session was opened with
        if self.latest() is None and not isinstance(place.detail, Unknown):
            self.put(place)
            self.origin, self.loaded, self.new_epoch = origin, loaded, new_epoch
        return place

    def enter_body(self, body: Body, continues: bool | None = None) -> None:
        """An epoch has been yielded.

        Args:
            body: the new one.
            continues: whether its first pass continues where the loader is; None: as if there were no body.
        """
        latest, self.body, looked = self.latest(), body, self.looked
        if looked is not None and latest is not None:  # what was read outside is still held
            self.looked = None if body.alone else (looked[0], looked[1] if continues is None else not continues)
        else:
            self.looked = None
            if continues is not None:
                self.new_epoch = not continues
        if latest is not None and (latest.interval is None or latest.interval.body is not body):
            latest.interval = body.begin(self._name, latest, older=True)
            self.latest = latest.interval.user

    def leave_body(self, epoch: int | None = None) -> bool:
        """End the epoch with its body.

        Args:
            epoch: the one that has ended, whatever was read, if the loop is over the epochs of this loader.

        Returns:
            Whether an iterator that was first read in this body is kept at its end, in the middle of an epoch.
        """
        latest, committed = self.latest(), self.committed
        if latest is None or latest.interval is None or latest.interval.took:
            self.looked = None
        left = self.new_epoch and self.has_begun and not self.is_at_end
        going_on = epoch is None and latest is not None and not self.is_at_end
        left = left and self.context.adapter.reach is not Reach.STATES  # otherwise only reading leads to the next epoch
        if not going_on and (self.is_at_end or self.epoch == epoch or left):
            self.end_epoch()
            self.new_epoch = True
            self.end_pass()  # one that is kept has ended
        self.body = None
        if committed is not None and committed["position"] == committed["size"] and not self.position:
            # What was committed at the end of its epoch is now the next one's beginning.
            with contextlib.suppress(StateError):  # the source cannot say: the committed state stays
                here = self.here()
                self.origin, self.committed = here, self.state_at(here)
        return going_on and latest is not None and latest.interval is not None and not latest.interval.older
