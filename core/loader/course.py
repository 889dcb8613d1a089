"""A loader's way through its data: where it stands, the session that is open there, and the passes over it.

The rules of iteration for all adapters (docs/design.md tells why):

* `iter()` has no side effect; the first `next()` starts the pass. The first pass after a load continues from the state;
  every later pass is a new epoch.
* The position moves when a batch is handed out, not when it is prefetched. Handing out an epoch's last batch moves the
  state to (epoch + 1, 0), so 'finished' has one spelling. If the length is unknown, the pass's StopIteration does.
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
from .adapter import Adapter, Options, Run, Session
from .bodies import Passes
from .cursor import Cursor, History, Phase, new_history
from .place import Place
from .setting import Setting
from .whole_batches import Then
from .witnesses import Witnesses

__all__ = ["Came", "Course", "Pass"]

_logger = logging.getLogger("midepoch")


class Came(enum.Enum):
    """How the loader got to its place, which decides where a new pass begins. docs/design.md has a table."""

    FRESH = "nothing has happened yet"
    PUT = "by a load or a seek: the next pass continues from here"
    READ = "by handing out batches: the next pass begins a new epoch"


class Course:
    """Where one loader stands, and what moves it.

    Attributes:
        place: valid while no session is open.
        came: how it got there.
        cursor: of the latest pass.
        history: the places before the latest batches.
        loaded: the loaded state, until a batch is handed out.
        unfinished: the loaded epoch, until the next one begins.
        lost: why the place's detail is unknown; empty if it is known.
        failed: why the batches after the place are to be passed over.
        ends_early: the running pass was resharded, and ends with this epoch.
        retries: a batch that fails is given again, where nothing was stated.
        stays: at the end of an epoch of unknown length, until the next one begins: a combination's state of some steps
            ago may have to find it there.
        refusal: the error, and its words, with which batches are refused until a state is loaded or a place is sought.
        passes: those of the body of an `epochs` loop; None outside.
        origin: where a rollback leads.
        committed: the committed state; None before the first commit.
        given: of the batch that was handed out last, if its session is not the one that is open: that session's share,
            and the batches up to this one. The share is None if it is unknown.
    """

    def __init__(self, adapter: Adapter, options: Options, setting: Setting, witnesses: Witnesses) -> None:
        self.adapter, self.options, self.setting, self._witnesses = adapter, options, setting, witnesses
        self._then = Then.of(options)
        self.place = Place(0, 0)
        self.origin = self.place
        self.committed: State | None = None
        self.came = Came.FRESH
        self.cursor, self.history = Cursor(), self._new_history()
        self.loaded: State | None = None
        self.unfinished: int | None = None
        self.lost = ""
        self.failed: list[str] = []
        self.stuck: tuple[int, int] | None = None  # where a batch failed last that cannot be passed over
        self.ends_early = self.retries = self.stays = False
        self.refusal: tuple[type[BaseException], str] | None = None
        self.passes: Passes | None = None
        self.given: tuple[Share | None, int] = (None, 0)
        self._told_of_one = self._had_bodies = False
        self._kept: weakref.WeakSet[Any] | None = None  # as in Passes, of a body that had read none of them

    def __getstate__(self) -> dict[str, Any]:
        # For trainers that start processes: everything except the open session.
        attributes = {**self.__dict__, "place": self.here(), "passes": None, "failed": [], "_kept": None}
        del attributes["cursor"], attributes["history"], attributes["_then"]
        return attributes

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self.cursor, self.history, self._then = Cursor(), self._new_history(), Then.of(self.options)

    def start_as(self, other: Course) -> None:
        """Stand where another loader of the same source stands."""
        names = ("came", "origin", "committed", "loaded", "unfinished", "lost", "ends_early", "retries", "stays")
        self.place = other.here()
        for name in (*names, "refusal", "_told_of_one"):
            setattr(self, name, getattr(other, name))

    def _new_history(self) -> History:
        remembered = 0 if self.adapter.remembers else self.options.remember
        return new_history(remembered) if remembered else new_history()

    # --- where it stands ---

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        cursor = self.cursor
        if cursor.session is None:
            return self.place.epoch
        return cursor.epoch + (cursor.phase is Phase.GIVEN and cursor.over is None)

    @property
    def position(self) -> int:
        """Units of this epoch that all ranks together have received."""
        cursor = self.cursor
        if cursor.session is None:
            return self.place.position
        return (cursor.over or 0) if cursor.phase is Phase.GIVEN else cursor.position

    @property
    def is_over(self) -> bool:
        """Whether this epoch's last batch was handed out, and its body has not ended."""
        cursor = self.cursor
        return self.place.over if cursor.session is None else cursor.phase is Phase.GIVEN and cursor.over is not None

    @property
    def is_reading(self) -> bool:
        """Whether a pass reads this epoch, or `peek` has begun one, and somebody may go on with it."""
        cursor = self.cursor
        return cursor.session is not None and cursor.phase is Phase.RUNNING and (cursor.in_use or not cursor.owned)

    @property
    def next_is_empty(self) -> bool:
        """Whether the next pass gives nothing, because it had ended before the body was begun again."""
        return self.passes is not None and self.passes.empty > 0

    @property
    def has_begun(self) -> bool:
        """Whether batches of this epoch were handed out, the first of a global batch included."""
        return self.position > 0 or (self.cursor.phase is Phase.RUNNING and self.cursor.within)

    @property
    def cursor_of_pass(self) -> Cursor:
        """The cursor of the latest pass, even if `peek` has looked beyond its end with another one."""
        return self.cursor.ended or self.cursor

    def last_given(self) -> tuple[Share | None, int]:
        """What `given` says, of the open session too."""
        cursor = self.cursor
        return (cursor.share, cursor.steps) if cursor.steps else self.given

    def here(self) -> Place:
        """Where the loader stands. Raises StateError if the source cannot say."""
        if self.cursor.session is not None:
            return self.cursor.place()
        if self.lost:
            raise StateError(self.lost)
        return self.place

    def share(self, world: World, epoch: int, position: int) -> Share | None:
        """This rank's batches from (epoch, position) on; None if the length is unknown."""
        cursor = self.cursor
        opened = cursor.session is not None
        self.refresh()
        detail = self.place.detail if not opened else "" if cursor.phase is Phase.GIVEN else cursor.opened.detail
        return self.adapter.share(self.setting.seed(world), epoch, position, world, detail)

    def refresh(self) -> None:
        """Take over a new length of the dataset, unless an epoch is being read."""
        if not self.position and (self.cursor.session is None or self.cursor.phase is Phase.GIVEN):
            self.adapter.refresh()

    def steps_left(self) -> int | None:
        """Batches left in this epoch on this rank; None if unknown."""
        cursor = self.cursor
        if self.is_over:
            return 0
        if cursor.session is not None and cursor.phase is Phase.RUNNING and not cursor.session.drift:
            return None if cursor.own_steps is None else cursor.own_steps - cursor.steps
        share = self.share(self.setting.world(), self.epoch, self.position)
        return None if share is None else share.steps

    # --- going elsewhere ---

    def lead(self, epoch: int, position: int) -> Place:
        """The place at (epoch, position), which no session need have reached."""
        adapter, there = self.adapter, (epoch, position)
        here = Place(self.epoch, self.position)
        if adapter.leads or here[:2] == there or self.is_over:
            here = self.here()
        if here[:2] == there:
            return here
        if here.over:
            here = here.after()
            if here[:2] == there:
                return here
        world = self.setting.world()
        return Place(epoch, position, adapter.lead(here, there, self.setting.seed(world), world))

    def move(self, place: Place, ends_early: bool = False) -> None:
        """Stand at `place`. The running pass, or else the next one, continues there. `ends_early`: as it is then."""
        cursor = self.cursor_of_pass
        if cursor is not self.cursor:
            self.close_session()  # of `peek`, beyond the pass's end: it is not needed any more
            self.cursor = cursor
        self.place, self.lost = place, ""
        if cursor.phase is Phase.GIVEN:
            cursor.phase = Phase.RUNNING
        cursor.resumed = False
        self.came, self.loaded, self.unfinished = Came.PUT, None, None
        self.ends_early, self._kept = ends_early, None
        self.history.clear()
        self.failed.clear()
        self.close_session(keep=False)

    def keep(self, place: Place, committed: State | None) -> None:
        """Let a rollback lead to `place`, where the loader stands."""
        self.origin, self.committed = place, committed

    def roll_back(self) -> None:
        """Give again what was handed out since the origin. The pass that came from there goes on, or the next one."""
        cursor = self.cursor
        # Before an exception came between, a session may have given a batch that was not counted. So one that is open
        # is closed, and a place is compared with its detail.
        ended = (self.epoch, self.position) == self.origin[:2] and self.cursor_of_pass.phase is not Phase.RUNNING
        if ended or (cursor.session is None and self.place == self.origin and not (self.failed or self.lost)):
            if cursor.ended is not None:
                self.close_session()
            if self.came is Came.READ and self.cursor.phase is Phase.RUNNING and self.has_begun:
                self.came = Came.PUT  # the next pass continues this epoch too
            return
        self.move(self.origin, self.ends_early)

    def begin_again(self, error: type[BaseException], words: str) -> None:
        """What the training loop had is gone: refuse batches until a state is loaded or a place is sought."""
        self.close_session()
        self.failed.clear()
        self.passes, self.refusal, self.setting.last = None, (error, words), None

    def end_epoch(self) -> None:
        """Give up the rest of this epoch."""
        following = self.lead(self.epoch + 1, 0)
        nothing_since = (self.epoch, self.position) == self.origin[:2] and not self.cursor.within
        self.place, self.lost, self.loaded, self.unfinished, self._kept = following, "", None, None, None
        if nothing_since:
            # What comes next is to be given again, not the rest that is given up.
            self.keep(following, self.committed)
        self.failed.clear()
        self.close_session(keep=False)

    # --- sessions ---

    def _open(self, cursor: Cursor) -> bool:
        """Open a session at the loader's place, in the world as it is now.

        Returns:
            False if the epoch has no batches left and goes on all the same, in the body of `epochs`.
        """
        if self.refusal is not None:
            error, words = self.refusal
            raise error(words)
        self.given = self.last_given()
        world = self.setting.enter()
        adapter, seed, place = self.adapter, self.setting.seed(world), self.here()
        before: Place | None = None
        if self.failed:
            before, passed_over = place, len(self.failed) * adapter.units_per_step(world)
            place = self.lead(place.epoch, place.position + passed_over)
        share: Share | None = None
        if not place.over:
            adapter.prepare(seed, place.epoch)
            share = adapter.share(seed, place.epoch, place.position, world, place.detail)
        if place.over or (share is not None and share.global_steps == 0 and place.position > 0):
            # Less than one global batch is left.
            if self.passes is not None or before is not None or self.ends_early:
                return False
            place = self.place = self.lead(place.epoch + 1, 0)
            self.unfinished = None
            adapter.prepare(seed, place.epoch)
            share = adapter.share(seed, place.epoch, 0, world, place.detail)
        detail = place.detail or ("" if place.position else adapter.beginning(place.epoch, world))
        if place == self.origin:
            # As the source says it now, which reading changes.
            self.origin = place._replace(detail=detail)
        looks, expects = self._witnesses.looks(place.epoch), self._witnesses.expected
        run = Run(place.epoch, place.position, seed, world, share, adapter.tail_in_use, detail, looks, expects)
        session = adapter.session(run)
        if self._then is not None:
            session = self._then.around(session, run, adapter)
        marks = self.options.remember > 0 and not adapter.remembers
        cursor.open(session, run, adapter.units_per_step(world), before, marks)
        cursor.resumed = cursor.resumed or self.loaded is not None
        self.setting.settle(seed, world)
        return True

    def close_session(self, mark: Any = None, keep: bool = True) -> None:
        """Close the open session. `mark`: taken before a batch that failed. `keep`: keep the session's place."""
        cursor = self.cursor
        if cursor.session is None:
            return
        if keep:
            self.place = Place(self.epoch, self.position)  # all there is if the source cannot say more
        try:
            if keep:
                self.place = cursor.place() if mark is None else cursor.place_of(mark)
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001  # a source that cannot say its state is read all the same
            self.lost = str(error)
        finally:
            cursor.close()

    def peek(self) -> Any:
        """Return the next batch at the current place without taking it: the state does not move.

        The running pass, or the one that continues from here, returns the same batch next. A pass begun after a `break`
        is a new epoch, and starts with that epoch's first batch.

        Raises:
            StopIteration: nothing is left of this epoch, and its pass has not been told so (its length is unknown), or
                its body has not ended.
        """
        cursor = self.cursor
        if cursor.peeked:
            return cursor.peeked[0][0]
        if cursor.phase is not Phase.RUNNING:
            self.close_session()  # its epoch has ended; the next batch is the next epoch's first
            self.given = self.last_given()
            beyond = Cursor()
            beyond.ended = cursor
            self.cursor = cursor = beyond
        if cursor.session is None and not self._open(cursor):
            raise StopIteration
        session = cursor.session
        assert session is not None  # _open has opened it
        mark = session.mark() if cursor.steps else None
        try:
            batch = cursor.take()
            if not cursor.steps:
                self._witnesses.see(cursor)
        except StopIteration:
            raise
        except BaseException:
            self.close_session(mark)
            raise
        cursor.peeked.append((batch, mark))
        cursor.steady = False
        return batch

    def close(self) -> None:
        """Stop worker processes and threads. The state stays; iterating again starts them again."""
        cursor = self.cursor
        self.close_session()
        self.given = self.last_given()
        if cursor.phase is Phase.RUNNING:
            cursor.phase = Phase.CLOSED
        self.cursor = Cursor()
        self.cursor.resumed = cursor.resumed and cursor.phase is not Phase.EXHAUSTED
        self.adapter.close()

    # --- passes ---

    def next_batch(self, current: Pass) -> Any:
        """The next batch, where the pass has to be checked or a session opened first."""
        cursor = current.cursor
        if cursor is None:
            cursor = current.cursor = self._begin(current)
        if cursor.phase is not Phase.RUNNING or cursor is not self.cursor:
            self._refuse(cursor)
        while True:
            if cursor.session is None and not self._open(cursor):
                self._leave_empty(cursor)
                raise StopIteration
            mark = None
            try:
                if cursor.peeked:
                    batch, mark = cursor.peeked.pop()
                else:
                    mark = cursor.mark()
                    batch = cursor.take()
                    if not cursor.steps:
                        self._witnesses.see(cursor)
            except BaseException as error:
                if not self.goes_on(cursor, error, mark):
                    raise
                continue
            break
        self.loaded, self.came, self.ends_early = None, Came.READ, False
        if self.failed:
            self._tell_of_failed(cursor.epoch, cursor.before.position, cursor.opened.position)
        cursor.steady = True
        cursor.handed_out(self.history, mark)
        if cursor.steps == cursor.last_step:
            self.roll(cursor)
        return batch

    def _refuse(self, cursor: Cursor) -> NoReturn:
        """What a pass answers that has no next batch."""
        if cursor.phase is Phase.EXHAUSTED:
            raise StopIteration
        if cursor.phase is Phase.CLOSED:
            raise MidepochError("the loader was closed while this pass ran: start a new pass")
        if cursor.phase is Phase.GIVEN:
            if cursor is self.cursor:
                self.close_session()
                self.came = Came.READ
            self._exhaust(cursor)
            raise StopIteration
        raise MidepochError(
            "this pass ended when another pass over the loader started: use one iterator at a time, or wrap the source "
            "twice"
        )

    def _begin(self, current: Pass) -> Cursor:
        """The cursor of a pass that asks for its first batch."""
        before, passes = self.cursor, self.passes
        if passes is not None and passes.leave_empty():
            if passes.whole == 1:
                self._tell("a pass that had ended before gives nothing: going on with what followed it")
            ended = Cursor()
            ended.phase = Phase.EXHAUSTED
            return ended
        if self._kept is not None:
            # The latest body but one had read nothing of an interrupted pass. Its own iterators go on with it.
            self.came = self.came if current in self._kept else Came.READ
            self._kept = None
        continues = self.came is Came.PUT and (self.has_begun or self.is_over)
        if self.came is Came.READ and (self.has_begun or self.is_over):
            if before.phase is Phase.RUNNING:
                self._tell_of_dropped(before)
            self.end_epoch()
        elif before.phase is Phase.GIVEN:
            self.close_session()
        self.failed.clear()  # only who asks the same iterator again goes on after a batch that failed
        before.ended = None
        if before.owned:
            self.cursor = before.taken_over()
            self.cursor.resumed = before.resumed and self.came is not Came.READ
        self.cursor.user = weakref.ref(current) if passes is None else passes.watched(current)
        if passes is not None:
            passes.begin(self.cursor, continues, current.body is not passes)
        return self.cursor

    def _exhaust(self, cursor: Cursor) -> None:
        """A pass is told that it has no more batches."""
        cursor.phase = Phase.EXHAUSTED
        if self.passes is not None and self.passes.cursor is cursor:
            self.passes.end()

    def _tell_of_dropped(self, before: Cursor) -> None:
        """Warn of a new pass that drops what was hardly meant to be dropped."""
        # In a body, a pass may be left on purpose, and the next one may be that of a later line.
        if before.resumed and before.opened.position and (self.passes is None or before.steps == 1):
            warn(
                f"a new pass drops the rest of the resumed epoch {self.epoch}, from position {self.position} on: "
                "to continue instead, keep the iterator, or load loader.state_dict()",
            )
        elif before.steps == 1:
            self._tell_of_one(f"a new pass begins epoch {self.epoch + 1}")

    def _tell_of_one(self, follows: str) -> None:
        """Warn once of what `next(iter(loader))` takes."""
        if not self._told_of_one:
            self._told_of_one = True
            warn(
                f"a pass over epoch {self.epoch} was given up after its first batch, and {follows}: to look at a "
                "batch, use loader.peek(), which gives nothing up",
            )

    def goes_on(self, cursor: Cursor, error: BaseException, mark: Any) -> bool:
        """Handle a session that ended or failed. True if the pass continues, False if the error is to be raised."""
        session, resumed = cursor.session, cursor.steps == 0 and cursor.opened.position > 0
        if session is None:
            return False
        if not isinstance(error, StopIteration):
            # The loader stays after the last good batch, whether the next `next()` tries this one again or not.
            self.close_session(mark)
            if error is session.raises:  # it ends the pass, as in a plain one
                self.came = Came.READ
                self._exhaust(cursor)
                return False
            if self._passes_over(error):
                # A worker's error has its whole traceback in its message; the last line says what it was.
                self.failed.append(str(error).strip().rpartition("\n")[2] or type(error).__name__)
            elif not self.adapter.jumps and isinstance(error, Exception) and not isinstance(error, MidepochError):
                self._tell_of_stuck()
            return False
        cursor.catch_up()
        if cursor.last_step is not None:
            given, expected = cursor.steps, cursor.own_steps
            if expected is not None and given < expected and not session.varies:
                self.close_session()
                raise SourceError(
                    f"the source ended after {given} of the {expected} batches that were left: correct its __len__, or "
                    "find where its code raises StopIteration"
                ) from None
            # An empty epoch, a rank without a part of the last global batch, or last steps without batches.
            goes_on = resumed and session.drift > 0
            self.roll(cursor)
            self.close_session()
            if goes_on:
                cursor.phase = Phase.RUNNING
            else:
                self._exhaust(cursor)
            return goes_on
        before = sum(epoch == cursor.epoch - 1 for _, epoch, _, _ in self.history)
        if cursor.position == 0 and before and not self.adapter.drop_last:  # which may have left out all of it
            self.close_session()
            self._exhaust(cursor)
            raise SourceError(
                f"the source was empty in epoch {cursor.epoch}, after {before} batches in the last one: "
                "it can be iterated only once; wrap a function that makes it, as in midepoch.wrap(lambda: make_it())"
            ) from None
        self._end_pass(cursor, session, resumed)
        if resumed and self.passes is not None:
            self._tell_of_empty()
        elif resumed and not (session.others_go_on or self.ends_early):
            return True
        self.ends_early = False
        self._exhaust(cursor)
        return False

    def roll(self, cursor: Cursor) -> None:
        """Note that the epoch's last batch was handed out: the state is now the next epoch's beginning."""
        self.loaded, self.came = None, Came.READ
        if self.passes is not None:
            assert cursor.world is not None  # it is open
            size = self.adapter.size(cursor.seed, cursor.epoch, cursor.world, cursor.opened.detail)
            cursor.over = cursor.position if size is None else size
        else:
            self.unfinished = None
        cursor.phase, cursor.steady = Phase.GIVEN, False

    # --- errors that are passed over ---

    def _passes_over(self, error: BaseException) -> bool:
        """Whether the caller who goes on after an error gets the next batch. Not if a worker died or memory ran out."""
        if not isinstance(error, Exception) or isinstance(error, MidepochError | MemoryError):
            return False
        if not self.adapter.jumps:
            return False
        stated = self.options.on_error
        return stated == "next" or (stated is None and not self.retries and self.setting.world().world_size == 1)

    def _tell_of_stuck(self) -> None:
        """Warn the caller who asks again for a batch that has failed, and will each time."""
        here = self.epoch, self.position
        if here == self.stuck:
            warn(
                f"the batch at position {self.position} of epoch {self.epoch} has failed again, and what follows it "
                "cannot be reached, because this source is read from its start, or from a state of its own: leave the "
                "loop, or let the source pass over bad samples",
            )
        self.stuck = here

    def _tell_of_failed(self, epoch: int, start: int, stop: int) -> None:
        """Name the positions that were passed over, now that the caller has gone on after them."""
        failed = "; ".join(dict.fromkeys(self.failed))
        self.failed.clear()
        warn(
            f"positions {start} to {stop - 1} of epoch {epoch} were passed over, because reading them failed "
            f"({failed:.300}): repair the data, or pass on_error='retry' to midepoch.wrap to have them tried again",
        )

    # --- the body of an epoch ---

    def enter_body(self, passes: Passes, continues: bool | None = None) -> None:
        """An epoch has been yielded.

        `continues`: whether its first pass continues where the loader stands; None: as if there were no body.
        """
        self.passes = passes
        passes.enter(self.cursor)
        if continues is False:
            self.came = Came.READ
        elif continues and self.came is Came.READ:
            self.came = Came.PUT
            cursor = self.cursor
            fresh = cursor.phase is Phase.RUNNING and not (cursor.in_use or cursor.opened.position)
            if cursor.steps == 1 and fresh and not self._had_bodies:
                self._tell_of_one(f"the body of epochs goes on after it, at position {self.position}")
        self._had_bodies = True

    def leave_body(self, epoch: int | None = None) -> bool:
        """End the epoch with its body.

        Args:
            epoch: the one that has ended, whatever was read, if the loop is over the epochs of this loader.

        Returns:
            Whether a pass is in the middle of its epoch, and may go on in the next body.
        """
        passes, self.passes = self.passes, None
        if passes is None:
            return False
        cursor = self.cursor
        if epoch is None and (passes.going_on or (passes.spans and not passes.ended)):
            return not passes.spans
        left = passes.ended and self.has_begun and not self.is_over
        if left and epoch is None and self.came is Came.PUT and passes.kept:
            self._kept = passes.kept
            return False
        if left and epoch is None and not self.adapter.can_seek:
            self.came, passes.stays = Came.READ, True  # only reading leads to the next epoch
        elif self.is_over or left or self.epoch == epoch:
            self.end_epoch()
            self.came = Came.READ
            if cursor.phase is Phase.RUNNING and cursor.owned:
                cursor.phase = Phase.GIVEN  # a pass that is kept has ended
        return False

    def _end_pass(self, cursor: Cursor, session: Session, resumed: bool) -> None:
        """Stand at the next epoch's beginning, now that the source has ended this one; in a body, right before it.

        `resumed`: there was nothing left of it.
        """
        following: Place | None = None
        if not self.adapter.can_seek:
            with contextlib.suppress(Exception):  # a source that cannot say its state is read all the same
                following = Place(cursor.epoch + 1, 0, session.following())
        self.close_session()
        if following is None and not (self.lost and self.passes is not None):
            with contextlib.suppress(StateError):  # likewise: the next pass begins the next epoch
                following = self.lead(cursor.epoch + 1, 0)
        self.came = Came.READ
        if self.passes is not None:
            cursor.over = cursor.position
            self.place = self.place if following is None else following.before(cursor.position)
        elif following is not None and (resumed or not self.stays):
            nothing_since = self.place[:2] == self.origin[:2]
            self.place, self.lost, self.loaded, self.unfinished = following, "", None, None
            if nothing_since:
                self.keep(following, self.committed)

    def _leave_empty(self, cursor: Cursor) -> None:
        """End a pass without a batch: only the body of its epoch is left, or the epoch's last batches failed."""
        in_body, place = self.passes is not None, self.place
        unexpected = not (self.failed or self.ends_early)
        if place.over or unexpected:
            self._tell_of_empty()
        if place.over or (unexpected and not self.adapter.can_seek):
            if in_body:
                cursor.over = place.position
        else:
            # Less than a global batch is left. The epoch ends where it does on a rank that was given its last batch.
            world = self.setting.world()
            size = self.adapter.size(self.setting.seed(world), place.epoch, world, place.detail)
            if self.failed:
                self._tell_of_failed(place.epoch, place.position, place.position if size is None else size)
            following = self.lead(place.epoch + 1, 0)
            if in_body and size is not None:
                cursor.over = size
                self.place = following.before(size)
            else:
                self.place, self.unfinished = following, None
            self.loaded = None
        self.came, self.ends_early = Came.READ, False
        self._exhaust(cursor)

    def _tell_of_empty(self) -> None:
        name = self.adapter.name
        self._tell(f"all batches of epoch {self.epoch} of a loader ({name}) are done: a pass over it is empty")

    def _tell(self, what: str) -> None:
        if self.setting.world().rank == 0:
            _logger.warning("%s", what)


class Pass:
    """One pass over a loader. Several may exist; the one that was started last has the loader's cursor.

    The loader holds no reference to the pass, so a ``break`` leaves no cycle. Inside a cycle, the garbage collector may
    wait for worker processes before anything has told them to end.
    """

    __slots__ = ("__weakref__", "_course", "body", "cursor")

    def __init__(self, course: Course) -> None:
        self._course, self.body = course, course.passes
        self.cursor: Cursor | None = None
        if self.body is not None:
            self.body.made(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        course, cursor = self._course, self.cursor
        if cursor is None or not cursor.steady or cursor is not course.cursor:
            return course.next_batch(self)
        mark = cursor.mark() if cursor.marks else None
        try:
            batch = cursor.take()
        except BaseException as error:
            course.goes_on(cursor, error, mark)
            raise
        cursor.handed_out(course.history, mark)
        if cursor.steps == cursor.last_step:
            course.roll(cursor)
        return batch
