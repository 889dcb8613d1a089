"""A loader's progress: its place, the session that is open there, and the passes over it.

The rules of iteration for all adapters (docs/decisions.md tells why):

* `iter()` has no side effect; the first `next()` starts the pass. The first pass after a load continues from the state;
  every later pass is a new epoch.
* The position moves when a batch is handed out, not when it is prefetched. Handing out an epoch's last batch moves the
  state to (epoch + 1, 0), so 'finished' has one spelling. If the length is unknown, the pass's StopIteration does.

Five transitions move it: `put` (a load, a seek, a rollback), `open`, handing out a batch (`Pass.__next__`), `suspend`
(a reshard, an error, `close`) and `end_epoch`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import weakref
from typing import Any, NoReturn, Self

from ..errors import MidepochError, SourceError, StateError, warn
from ..state.format import State
from ..world import Share, World
from .adapter import Adapter, Options, Reach, Run
from .body import Body, Interval
from .place import Place, Unknown
from .reading import History, Reading, new_history
from .setting import Setting
from .whole_batches import Then
from .witnesses import Witnesses

__all__ = ["Pass", "Phase", "Progress"]

_logger = logging.getLogger("midepoch")


class Phase(enum.Enum):
    """The life of a pass. A running one that is not the loader's latest has been replaced: its `next()` is an error."""

    NEW = "nothing was asked for"
    RUNNING = "its next() is the next batch; its end, once the epoch's last batch was handed out"
    ENDED = "its end, again and again"


def _none() -> None:
    """Stands for the reference to a pass where none has begun, or the loader was closed since."""


def _ended() -> None:
    """Stands for the reference to a pass that has been told that it has ended."""


class Progress:
    """The progress of one loader.

    Attributes:
        place: where the next batch is, while no session is open.
        reading: the open session; None while none is open, and after an epoch's last batch.
        spent: the session of a pass that was given its epoch's last batch, and has not been told that it has ended.
        latest: a reference to the latest pass.
        made_outside: a reference to the latest pass whose iterator was made outside of a body.
        new_epoch: a new pass begins a new epoch, because batches of this one were handed out. After a load or a seek it
            continues at the place.
        fresh: nothing has been loaded, sought or handed out.
        loaded: the loaded state, until a batch is handed out.
        origin, committed: where a rollback leads; the committed state, None before the first commit.
        history: the places before the latest batches.
        unfinished: the loaded epoch, until the next one begins.
        failed: why the batches after the place are to be passed over.
        ends_early: the running pass was resharded, and ends with this epoch.
        is_part: of a combination, or of a loop that counts steps: a batch that fails is given again, where nothing was
            stated, and the place stays at the end of an epoch of unknown length, until the next one begins.
        refusal: the error, and its words, with which batches are refused until a state is loaded or a place is sought.
        body: that of an `epochs` loop; None outside.
        name: of this loader in the body.
        given: of the batch that was handed out last: its session's share, and the batches up to this one. The share is
            None if it is unknown.
    """

    def __init__(self, adapter: Adapter, options: Options, setting: Setting, witnesses: Witnesses) -> None:
        self.adapter, self.options, self.setting, self._witnesses = adapter, options, setting, witnesses
        self.place = self.origin = Place(0, 0)
        self.committed: State | None = None
        self.loaded: State | None = None
        self.unfinished: int | None = None
        self.new_epoch, self.fresh = False, True
        self.ends_early = self.is_part = self._warned_of_one = False
        self.stuck: tuple[int, int] | None = None  # where a batch failed last that cannot be passed over
        self.refusal: tuple[type[BaseException], str] | None = None
        self.given: tuple[Share | None, int] = (None, 0)
        self.name = ""
        self._begin_apart()

    def _begin_apart(self) -> None:
        """What a copy of this process's loader does not share."""
        self.reading: Reading | None = None
        self.spent: Reading | None = None
        self.latest: Any = _none
        self.made_outside: Any = _none
        self.body: Body | None = None
        self.failed: list[str] = []
        self.history: History = self._new_history()
        self._then = Then.of(self.options)

    def __getstate__(self) -> dict[str, Any]:
        # For trainers that start processes: everything except the open session.
        apart = ("reading", "spent", "latest", "made_outside", "body", "failed", "history", "_then")
        return {name: each for name, each in vars(self).items() if name not in apart} | {"place": self.here()}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._begin_apart()

    def start_as(self, other: Progress) -> None:
        """Be where another loader of the same source is."""
        own = {name: vars(self)[name] for name in ("adapter", "options", "setting", "_witnesses")}
        self.__setstate__(other.__getstate__() | own)

    def _new_history(self) -> History:
        remembered = 0 if self.adapter.facts.remembers else self.options.remember
        return new_history(remembered) if remembered else new_history()

    # --- where it is ---

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.place.epoch if self.reading is None else self.reading.run.epoch

    @property
    def position(self) -> int:
        """Units of this epoch that all ranks together have received."""
        return self.place.position if self.reading is None else self.reading.position

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
        return isinstance(self.latest, weakref.ref) and self.latest() is None

    @property
    def has_session(self) -> bool:
        """Whether a session is open, if only because its pass has not been told that it has ended."""
        return self.reading is not None or self.spent is not None

    @property
    def is_awaited(self) -> bool:
        """Whether an iterator that was made outside of a body exists, and was not asked for anything."""
        made = self.made_outside()
        return made is not None and made.phase is Phase.NEW

    @property
    def has_pass(self) -> bool:
        """Whether a pass has begun, and has not been told that it has ended."""
        return isinstance(self.latest, weakref.ref)

    @property
    def has_ended(self) -> bool:
        """Whether the latest pass has been told that it has ended."""
        return self.latest is _ended

    @property
    def next_is_empty(self) -> bool:
        """Whether the next pass gives nothing, because it had ended before the body was begun again."""
        return self.body is not None and self.body.next_is_empty(self.name)

    @property
    def within(self) -> bool:
        """Whether a part of a global batch was handed out, and the rest of it was not."""
        return self.reading is not None and self.reading.within

    @property
    def has_begun(self) -> bool:
        """Whether batches of this epoch were handed out, the first of a global batch included."""
        return self.position > 0 or self.within

    def last_given(self) -> tuple[Share | None, int]:
        """What `given` says, of the open session too."""
        reading = self.reading
        return self.given if reading is None or not reading.steps else (reading.share, reading.steps)

    def here(self) -> Place:
        """The place. Raises StateError if the source cannot say."""
        if self.reading is not None:
            return self.reading.place()
        if self.spent is not None:
            self._settle()
        if isinstance(self.place.detail, Unknown):
            raise StateError(str(self.place.detail))
        return self.place

    def share(self, world: World, epoch: int, position: int) -> Share | None:
        """This rank's batches from (epoch, position) on; None if the length is unknown."""
        self.refresh()
        detail = self.place.detail if self.reading is None else self.reading.run.detail
        if isinstance(detail, Unknown) or (self.reading is None and (self.is_at_end or self.spent is not None)):
            detail = ""  # that of the place is not known, or is the next epoch's
        return self.adapter.share(self.setting.seed(world), epoch, position, world, detail)

    def refresh(self) -> None:
        """Take over a new length of the dataset, unless an epoch is being read."""
        if self.reading is None and not self.position:
            self.adapter.refresh()

    def steps_left(self) -> int | None:
        """Batches left in this epoch on this rank; None if unknown."""
        if self.is_at_end:
            return 0
        reading = self.reading
        if reading is not None and not reading.session.position_correction:
            return reading.steps_left
        share = self.share(self.setting.world(), self.epoch, self.position)
        return None if share is None else share.steps

    # --- going elsewhere ---

    def place_at(self, epoch: int, position: int) -> Place:
        """The place at (epoch, position), which no session need have reached."""
        adapter, there = self.adapter, (epoch, position)
        here, must = Place(self.epoch, self.position), self.is_at_end
        if adapter.facts.remembers or self.reading is None or must or here[:2] == there:
            try:
                here = self.here()
            except StateError as error:
                if must or here[:2] == there:
                    raise
                here = here._replace(detail=Unknown(str(error)))
        if here[:2] == there:
            return here
        if here.at_end:
            here = here.after()
            if here[:2] == there:
                return here
        world = self.setting.world()
        return Place(epoch, position, adapter.detail_at(here, there, self.setting.seed(world), world))

    def put(self, place: Place, ends_early: bool = False) -> None:
        """Be at `place`. The running pass, or else the next one, continues there."""
        self._close(self.spent)
        self.spent = None
        self._close(self._without_reading())
        self.place = place
        self.latest = _none if self.has_ended else self.latest
        self.new_epoch = self.fresh = False
        self.loaded, self.unfinished, self.ends_early = None, None, ends_early
        self.history.clear()
        self.failed.clear()

    def keep(self, place: Place, committed: State | None) -> None:
        """Let a rollback lead to `place`, where the loader is."""
        self.origin, self.committed = place, committed

    def roll_back(self) -> None:
        """Give again what was handed out since the origin. The pass that came from there continues, or the next one."""
        is_over = self.has_ended or self.spent is not None
        if is_over and (self.epoch, self.position) == self.origin[:2]:
            if self.reading is not None:
                self.suspend()  # `peek` has opened it, beyond the pass's end
        elif self.reading is None and self.place == self.origin and not self.failed:
            self.new_epoch = False  # the next pass continues this epoch too
        else:
            self.put(self.origin, self.ends_early)

    def begin_again(self, error: type[BaseException], words: str) -> None:
        """What the training loop had is gone: refuse batches until a state is loaded or a place is sought."""
        self.suspend()
        self.failed.clear()
        self.body, self.refusal, self.setting.last = None, (error, words), None

    def end_epoch(self) -> None:
        """Give up the rest of this epoch."""
        following = self.place_at(self.epoch + 1, 0)
        nothing_since = (self.epoch, self.position) == self.origin[:2] and not self.within
        self.finish()
        self._close(self._without_reading())
        self.place, self.loaded, self.unfinished = following, None, None
        if nothing_since:
            # What comes next is to be given again, not the rest that is given up.
            self.keep(following, self.committed)
        self.failed.clear()

    # --- sessions ---

    def open(self) -> bool:
        """Open a session at the place, in the world as it is now.

        Returns:
            False if the epoch has no batches left and continues all the same, in the body of `epochs`.
        """
        if self.refusal is not None:
            error, words = self.refusal
            raise error(words)
        world = self.setting.enter()
        adapter, seed, place = self.adapter, self.setting.seed(world), self.here()
        before: Place | None = None
        if self.failed:
            before, passed_over = place, len(self.failed) * adapter.units_per_step(world)
            place = self.place_at(place.epoch, place.position + passed_over)
        share: Share | None = None
        if not place.at_end:
            adapter.prepare(seed, place.epoch)
            share = adapter.share(seed, place.epoch, place.position, world, place.detail)
        if place.at_end or (share is not None and share.global_steps == 0 and place.position > 0):
            # Less than one global batch is left.
            if self.body is not None or before is not None or self.ends_early:
                return False
            place = self.place = self.place_at(place.epoch + 1, 0)
            self.unfinished = None
            adapter.prepare(seed, place.epoch)
            share = adapter.share(seed, place.epoch, 0, world, place.detail)
        detail = place.detail
        if not detail and not place.position:
            detail = adapter.detail_at(place, place[:2], seed, world)
        if place == self.origin:
            # As the source says it now, which reading changes.
            self.origin = place._replace(detail=detail)
        looks, expects = self._witnesses.looks(place.epoch), self._witnesses.expected
        run = Run(place.epoch, place.position, seed, world, share, adapter.tail_in_use, detail, looks, expects)
        session = adapter.session(run)
        if self._then is not None:
            session = self._then.around(session, run, adapter)
        if before is None:
            before = Place(place.epoch, place.position, detail)
        bookmarks = self.options.remember > 0 or adapter.facts.remembers
        self.reading = Reading(
            session, run, adapter.units_per_step(world), before, bookmarks, resumed=self.loaded is not None
        )
        self.setting.settle(seed, world)
        return True

    def suspend(self, bookmark: Any = None) -> None:
        """Close the open session, and keep its place. `bookmark`: taken before a batch that failed."""
        here = self.epoch, self.position
        self._settle()
        self._close(self.spent)
        reading = self._without_reading()
        if reading is None:
            return
        self.place = Place(*here)  # all there is if the source cannot say more
        try:
            self.place = reading.place(bookmark)
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001  # a source that cannot say its state is read all the same
            self.place = Place(*here, Unknown(str(error)))
        finally:
            reading.close()

    def _without_reading(self) -> Reading | None:
        """The session that was open. From now on none is."""
        self.given = self.last_given()
        reading, self.reading = self.reading, None
        return reading

    @staticmethod
    def _close(reading: Reading | None) -> None:
        if reading is not None:
            reading.close()

    def peek(self) -> Any:
        """As `Loader.peek`."""
        reading = self.reading
        if reading is not None and reading.peeked:
            return reading.peeked[0][0]
        latest = self.latest()
        if self.spent is not None and latest is not None:
            raise StopIteration  # the pass has given its last batch, and has not been told so
        self.finish()
        if self.reading is None and not self.open():
            raise StopIteration
        reading = self.reading
        assert reading is not None  # `open` has made it
        bookmark = reading.bookmark_now() if reading.steps else None
        try:
            batch = reading.take()
            if not reading.steps:
                self._witnesses.see(reading)
        except StopIteration:
            raise
        except BaseException:
            self.suspend(bookmark)
            raise
        reading.peeked.append((batch, bookmark))
        if latest is not None:
            latest.reading = None
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
            self.latest = _ended
            reading.close()

    def close(self) -> None:
        """Stop worker processes and threads. The place stays; iterating again starts them again."""
        self.finish()
        self.suspend()
        latest = self.latest()
        if latest is not None and latest.interval is not None and self.body is not None:
            self.body.end(latest.interval, exhausted=False)
        self.latest = _ended if self.has_ended else _none
        self.adapter.close()

    # --- passes ---

    def next_batch(self, this: Pass) -> Any:
        """The next batch, where the pass has to be checked or a session opened first."""
        if this.phase is Phase.NEW:
            self._begin(this)
        if this.phase is Phase.ENDED:
            raise StopIteration
        if self.latest() is not this:
            self._refuse()
        if self.spent is not None:
            self.finish()
            self.new_epoch = True
            raise StopIteration
        while True:
            if self.reading is None and not self.open():
                self._leave_empty(this)
                raise StopIteration
            reading = self.reading
            assert reading is not None  # `open` has made it
            bookmark = None
            try:
                if reading.peeked:
                    batch, bookmark = reading.peeked.pop()
                else:
                    bookmark = reading.bookmark()
                    batch = reading.take()
                    if not reading.steps:
                        self._witnesses.see(reading)
            except StopIteration:
                if not self.source_ended(this, reading):
                    raise
                continue
            except BaseException as error:
                self.source_failed(this, reading, error, bookmark)
                raise
            break
        self.loaded, self.new_epoch, self.fresh, self.ends_early = None, True, False, False
        if self.failed:
            self._warn_of_failed(reading.run.epoch, reading.before.position, reading.run.position)
        this.reading = reading
        reading.count(self.history, bookmark)
        if self.body is not None and this.interval is not None:
            self.body.take(this.interval)
        if reading.steps == reading.last_step:
            self.last_given_out(this, reading)
        return batch

    def last_given_out(self, this: Pass, reading: Reading) -> None:
        """The epoch's last batch was handed out: be at the next epoch's beginning, in a body right before it."""
        self.given = self.last_given()
        self.place = Place(reading.run.epoch + 1, 0)
        if self.body is not None:
            run = reading.run
            size = self.adapter.size(run.seed, run.epoch, run.world, run.detail)
            self.place = self.place.before(reading.position if size is None else size)
        else:
            self.unfinished = None
        self.loaded, self.new_epoch = None, True
        self.reading, self.spent, this.reading = None, reading, None

    def _settle(self) -> None:
        """Ask the source for the next epoch's detail, once: to find its state, it may have to be read past its end."""
        reading = self.spent
        if reading is None or reading.closed or reading.settled:
            return
        reading.settled = True
        try:
            detail = reading.session.next_epoch_detail()
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001  # a source that cannot say its state is read all the same
            detail = Unknown(str(error))
        self.place = self.place._replace(detail=detail)

    def _refuse(self) -> NoReturn:
        """What a pass answers that another one has replaced."""
        raise MidepochError(
            "this pass ended when another pass over the loader started, or the loader was closed: use one iterator at "
            "a time, or wrap the source twice"
        )

    def _begin(self, this: Pass) -> None:
        """A pass asks for its first batch."""
        body = self.body
        if body is not None:
            if body.gives_nothing(self.name):
                self._log("a pass that had ended before gives nothing: going on with what followed it")
                this.phase = Phase.ENDED
                return
            body.before_begin(self.name)
        if self.spent is not None:
            self.finish()
        if self.new_epoch and (self.has_begun or self.is_at_end):
            if not self.has_ended and self.reading is not None:
                self._warn_of_dropped(self.reading)
            self.end_epoch()
        self.failed.clear()  # only who asks the same iterator again continues after a batch that failed
        this.phase = Phase.RUNNING
        if body is None:
            self.latest = weakref.ref(this)
        else:
            this.interval, self.latest = body.begin(
                self.name, this, older=this.made_in is not body, outlived=this.made_in not in (None, body)
            )

    def _end(self, this: Pass) -> None:
        """A pass is told that it has no more batches."""
        this.phase, this.reading, self.latest = Phase.ENDED, None, _ended
        if this.interval is not None and self.body is not None:
            self.body.end(this.interval, exhausted=True)

    def _warn_of_dropped(self, before: Reading) -> None:
        """Warn of a new pass that drops what was hardly meant to be dropped."""
        # In a body, a pass may be left on purpose, and the next one may be that of a later line.
        if before.resumed and before.run.position and (self.body is None or before.steps == 1):
            warn(
                f"a new pass drops the rest of the resumed epoch {self.epoch}, from position {self.position} on: "
                "to continue instead, keep the iterator, or load loader.state_dict()",
            )
        elif before.steps == 1:
            self._warn_of_one(f"a new pass begins epoch {self.epoch + 1}")

    def _warn_of_one(self, follows: str) -> None:
        """Warn once of what `next(iter(loader))` takes."""
        if not self._warned_of_one:
            self._warned_of_one = True
            warn(
                f"a pass over epoch {self.epoch} was given up after its first batch, and {follows}: to look at a "
                "batch, use loader.peek(), which gives nothing up",
            )

    # --- the end of the source, and its errors ---

    def source_failed(self, this: Pass, reading: Reading, error: BaseException, bookmark: Any) -> None:
        """Handle an error that will be raised: the loader stays after the last good batch."""
        if reading is not self.reading:
            return
        self.suspend(bookmark)
        this.reading = None
        share, own = reading.run.share, isinstance(error, Exception) and not isinstance(error, MidepochError)
        if own and share is not None and reading.steps == share.steps:  # behind the last batch, as in a plain pass
            self.new_epoch = True
            self._end(this)
        elif self._passes_over(error):
            # A worker's error has its whole traceback in its message; the last line says what it was.
            self.failed.append(str(error).strip().rpartition("\n")[2] or type(error).__name__)
        elif own and not self.adapter.jumps:
            self._warn_of_stuck()

    def source_ended(self, this: Pass, reading: Reading) -> bool:
        """Handle the source's StopIteration. True if the pass continues, False if it is to be raised."""
        if reading is not self.reading:
            return False
        this.reading = None
        session, run = reading.session, reading.run
        resumed = not reading.steps and reading.run.position > 0
        reading.correct()
        if reading.last_step is not None:
            if run.share is not None and reading.steps < run.share.steps and not session.varies:
                self.suspend()
                raise SourceError(
                    f"the source ended after {reading.steps} of the {run.share.steps} batches that were left: correct "
                    "its __len__, or find where its code raises StopIteration"
                ) from None
            # An empty epoch, a rank without a part of the last global batch, or last steps without batches.
            continues = resumed and session.position_correction > 0
            self.last_given_out(this, reading)
            if not continues:
                self.finish()
                return False
            self._settle()
            self.spent = None
            reading.close()
            return True
        before = sum(each == run.epoch - 1 for _, each, _, _ in self.history)
        if reading.position == 0 and before and not self.adapter.facts.drop_last:  # which may have left out all of it
            self.suspend()
            self._end(this)
            raise SourceError(
                f"the source was empty in epoch {run.epoch}, after {before} batches in the last one: "
                "it can be iterated only once; wrap a function that makes it, as in midepoch.wrap(lambda: make_it())"
            ) from None
        self._unknown_length_ended(reading, resumed)
        if resumed and self.body is not None:
            self._log_empty()
        elif resumed and not self.ends_early and (run.tail != "uneven" or run.world.world_size == 1):
            return True
        self.ends_early = False
        self._end(this)
        return False

    def _unknown_length_ended(self, reading: Reading, resumed: bool) -> None:
        """Be at the next epoch's beginning; in a body, right before it. `resumed`: nothing was left of this one."""
        epoch, position = reading.run.epoch, reading.position
        following: Place | None = None
        if self.adapter.reach is Reach.STATES:
            with contextlib.suppress(Exception):  # a source that cannot say its state is read all the same
                following = Place(epoch + 1, 0, reading.session.next_epoch_detail())
        self.suspend()
        if following is None and not (isinstance(self.place.detail, Unknown) and self.body is not None):
            with contextlib.suppress(StateError):  # likewise: the next pass begins the next epoch
                following = self.place_at(epoch + 1, 0)
        self.new_epoch = True
        if following is None:
            return
        if self.body is not None:
            self.place = following.before(position)
        elif resumed or not self.is_part:
            nothing_since = self.place[:2] == self.origin[:2]
            self.place, self.loaded, self.unfinished = following, None, None
            if nothing_since:
                self.keep(following, self.committed)

    def _leave_empty(self, this: Pass) -> None:
        """End a pass without a batch: only the body of its epoch is left, or the epoch's last batches failed."""
        place = self.place
        unexpected = not (self.failed or self.ends_early)
        if place.at_end or unexpected:
            self._log_empty()
        if not (place.at_end or (unexpected and self.adapter.reach is Reach.STATES)):
            # Less than a global batch is left. The epoch ends where it does on a rank that was given its last batch.
            world = self.setting.world()
            size = self.adapter.size(self.setting.seed(world), place.epoch, world, self.here().detail)
            if self.failed:
                self._warn_of_failed(place.epoch, place.position, place.position if size is None else size)
            following = self.place_at(place.epoch + 1, 0)
            if self.body is not None and size is not None:
                self.place = following.before(size)
            else:
                self.place, self.unfinished = following, None
            self.loaded = None
        self.new_epoch, self.ends_early = True, False
        self._end(this)

    def end_pass(self) -> None:
        """Let the latest pass end."""
        if (latest := self.latest()) is not None:
            self._end(latest)

    def _log_empty(self) -> None:
        name = self.adapter.name
        self._log(f"all batches of epoch {self.epoch} of a loader ({name}) are done: a pass over it is empty")

    def _log(self, what: str) -> None:
        if self.setting.world().rank == 0:
            _logger.warning("%s", what)

    # --- errors that are passed over ---

    def _passes_over(self, error: BaseException) -> bool:
        """Whether the caller who goes on after an error gets the next batch. Not if a worker died or memory ran out."""
        if not isinstance(error, Exception) or isinstance(error, MidepochError | MemoryError):
            return False
        if not self.adapter.jumps:
            return False
        stated = self.options.on_error
        return stated == "next" or (stated is None and not self.is_part and self.setting.world().world_size == 1)

    def _warn_of_stuck(self) -> None:
        """Warn the caller who asks again for a batch that has failed, and will each time."""
        here = self.epoch, self.position
        if here == self.stuck:
            warn(
                f"the batch at position {self.position} of epoch {self.epoch} has failed again, and what follows it "
                "cannot be reached, because this source is read from its start, or from a state of its own: leave the "
                "loop, or let the source pass over bad samples",
            )
        self.stuck = here

    def _warn_of_failed(self, epoch: int, start: int, stop: int) -> None:
        """Name the positions that were passed over, now that the caller has gone on after them."""
        failed = "; ".join(dict.fromkeys(self.failed))
        self.failed.clear()
        warn(
            f"positions {start} to {stop - 1} of epoch {epoch} were passed over, because reading them failed "
            f"({failed:.300}): repair the data, or pass on_error='retry' to midepoch.wrap to have them tried again",
        )

    # --- the body of an epoch ---

    def enter_body(self, body: Body, name: str, continues: bool | None = None) -> None:
        """An epoch has been yielded.

        Args:
            body: the new one.
            name: of this loader in it.
            continues: whether its first pass continues where the loader is; None: as if there were no body.
        """
        first, self.body, self.name = not self.name, body, name
        if continues is False:
            self.new_epoch = True
        elif continues and self.new_epoch:
            self.new_epoch, reading = False, self.reading
            if first and self._abandoned and reading is not None and reading.steps == 1 and not reading.run.position:
                self._warn_of_one(f"the body of epochs goes on after it, at position {self.position}")
        latest = self.latest()
        if latest is not None and not body.knows(latest.interval):
            latest.interval, self.latest = body.begin(name, latest, older=True)

    def leave_body(self, epoch: int | None = None) -> bool:
        """End the epoch with its body.

        Args:
            epoch: the one that has ended, whatever was read, if the loop is over the epochs of this loader.

        Returns:
            Whether an iterator that was first read in this body is kept at its end, in the middle of an epoch.
        """
        body, latest = self.body, self.latest()
        if body is None:
            return False
        left = self.new_epoch and self.has_begun and not self.is_at_end
        going_on = epoch is None and latest is not None and not self.is_at_end
        left = left and self.adapter.reach is not Reach.STATES  # otherwise only reading leads to the next epoch
        if not going_on and (self.is_at_end or self.epoch == epoch or left):
            self.end_epoch()
            self.new_epoch = True
            if latest is not None:
                self._end(latest)  # one that is kept has ended
        self.body = None
        return going_on and latest is not None and latest.interval is not None and not latest.interval.older


class Pass:
    """One pass over a loader. Several may exist; the one that was started last is the loader's.

    The loader holds no reference to the pass, so a ``break`` leaves no cycle. Inside a cycle, the garbage collector may
    wait for worker processes before anything has told them to end.

    Attributes:
        phase: what its `next()` returns.
        reading: the open session, if the next batch can be taken from it without a check.
        made_in: the body in which its iterator was made.
        interval: for the record of a body.
    """

    __slots__ = ("__weakref__", "_progress", "interval", "made_in", "phase", "reading")

    def __init__(self, progress: Progress) -> None:
        self._progress, self.phase, self.made_in = progress, Phase.NEW, progress.body
        if progress.body is None:
            progress.made_outside = weakref.ref(self)
        self.reading: Reading | None = None
        self.interval: Interval | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        progress, reading = self._progress, self.reading
        if reading is None or reading is not progress.reading:
            return progress.next_batch(self)
        bookmark = reading.bookmark() if reading.bookmarks else None
        try:
            batch = reading.take()
        except StopIteration:
            progress.source_ended(self, reading)
            raise
        except BaseException as error:
            progress.source_failed(self, reading, error, bookmark)
            raise
        reading.count(progress.history, bookmark)
        if self.interval is not None and progress.body is not None:
            progress.body.take(self.interval)
        if reading.steps == reading.last_step:
            progress.last_given_out(self, reading)
        return batch
