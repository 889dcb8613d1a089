"""The wrapped loader: its place, and the rules of iteration for all adapters.

Rules (docs/design.md tells why):

* `iter()` has no side effect; the first `next()` starts the pass. The first pass after a load continues from the state;
  every later pass is a new epoch.
* The position moves when a batch is handed out, not when it is prefetched. Handing out an epoch's last batch moves the
  state to (epoch + 1, 0), so 'finished' has one spelling.
* `load_state_dict` checks everything before it changes anything, and takes effect at the next `next()`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, Literal, NoReturn, Self

from midepoch.errors import (
    MidepochError,
    MidepochWarning,
    SourceError,
    StateError,
    UnsupportedSourceError,
)
from midepoch.randomness.streams import process_seed
from midepoch.state.format import State
from midepoch.world import Share, World, warn_of_mesh

from .adapter import Adapter, Options, Run, Session
from .bodies import RUNNING, Passes, check_epochs, tell_of_done
from .capabilities import Capabilities
from .cursor import Cursor, History, Phase, new_history, place_before
from .place import Place
from .source_attributes import BatchesOfOurs, Sampler, SourceAttribute, SourceDataset
from .states import States
from .whole_batches import Then
from .witnesses import Witnesses

__all__ = ["Loader", "when_used_by"]

_logger = logging.getLogger("midepoch")
_users: dict[str, Callable[[Any, FrameType], None]] = {}


def when_used_by(module: str, check: Callable[[Loader, FrameType], None]) -> None:
    """Call `check(loader, frame)` whenever code of `module` asks a loader for an iterator, or tells it the epoch.

    For trainers that count or skip batches by themselves, which may not match the loader's place. `frame` is that of
    the calling code. `check` may warn or raise an error; it must not keep the frame.
    """
    _users[module] = check


def _check_user(loader: Loader, frame: FrameType | None) -> None:
    if frame is not None and (check := _users.get(frame.f_globals.get("__name__", ""))) is not None:
        check(loader, frame)


class _Came(enum.Enum):
    """How the loader got to its place, which decides where a new pass begins. docs/design.md has a table."""

    FRESH = "nothing has happened yet"
    PUT = "by a load or a seek: the next pass continues from here"
    READ = "by handing out batches: the next pass begins a new epoch"


class Loader:
    """What `midepoch.wrap` returns: the source's batches, and a state.

    Iterate it as often as you like; each pass is one epoch. Not thread-safe: one thread iterates and saves.

    Attributes:
        source: the object that was wrapped.
        epoch: the epoch of the next batch, counted from 0.
        position: units (samples, or batches if these have no constant size) that all ranks together have received in
            this epoch.
    """

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self._adapter = adapter
        self._options = options
        self._then = Then.of(options)
        # Read, never consumed; used in a single process if no seed is given.
        self._process_seed = process_seed()
        self._seed = options.seed if options.seed is not None else adapter.seed
        self._seed_is_private = options.seed is None and not adapter.seed_is_shared
        self._states = States(adapter, options)
        self._place = Place(0, 0)  # valid while no session is open
        self._lost = ""  # why the place's detail is unknown; empty if it is known
        self._came = _Came.FRESH
        self._loaded: State | None = None  # the loaded state, until a batch is handed out
        self._unfinished: int | None = None  # the loaded epoch, until the next one begins
        self._ahead = 0  # by how much the caller's numbers of epochs are greater than the loader's
        self._failed: list[str] = []  # why the batches behind the place are to be passed over
        self._ends_early = False  # the running pass was resharded, and ends with this epoch
        self._retries = False  # a batch that fails is given again, where nothing was stated
        self._passes: Passes | None = None  # in the body of an `epochs` loop
        self._witnesses = Witnesses(adapter, options)
        self._told_of_one = False
        self._world: World | None = None  # of the last pass
        self._resharded: World | None = None  # the last one given to `reshard`
        self._origin = Place(0, 0)  # where `rollback` leads before the first commit
        self._committed: State | None = None
        self._mesh_checked = False
        self._cursor = Cursor()
        self._history = self._new_history()
        if options.on_error == "next" and not adapter.jumps:
            raise UnsupportedSourceError(
                f"on_error='next': a {adapter.name} source is read from its start, or from a state of its own, so the "
                "batch behind a bad one cannot be reached: leave on_error out, and let the source pass over bad samples"
            )

    # --- what it is ---

    @property
    def source(self) -> Any:
        """What was wrapped."""
        return self._adapter.source

    @property
    def capabilities(self) -> Capabilities:
        """What this loader promises, each answer with its reason, as far as is known now. Reads no data."""
        return self._adapter.promises

    @property
    def is_rank_independent(self) -> bool:
        """Whether the state is the same on every rank; `capabilities` has the reason."""
        return self._adapter.rank_independent

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        cursor = self._cursor
        if cursor.session is None:
            return self._place.epoch
        return cursor.epoch + (cursor.phase is Phase.GIVEN and cursor.over is None)

    @property
    def position(self) -> int:
        """Units of this epoch that all ranks together have received."""
        cursor = self._cursor
        if cursor.session is None:
            return self._place.position
        return (cursor.over or 0) if cursor.phase is Phase.GIVEN else cursor.position

    @property
    def _is_over(self) -> bool:
        """Whether this epoch's last batch was handed out, and its body has not ended."""
        cursor = self._cursor
        return self._place.over if cursor.session is None else cursor.phase is Phase.GIVEN and cursor.over is not None

    @property
    def unit(self) -> Literal["sample", "batch"]:
        """What positions count."""
        return self._adapter.unit

    # A DataLoader's attributes, read from the source.
    dataset = SourceDataset()
    batch_size, drop_last, collate_fn, generator = (SourceAttribute() for _ in range(4))
    num_workers, persistent_workers, prefetch_factor, worker_init_fn = (SourceAttribute() for _ in range(4))
    pin_memory, timeout, multiprocessing_context = (SourceAttribute() for _ in range(3))

    @property
    def batch_sampler(self) -> BatchesOfOurs:
        """Raises when it is iterated: a loader rebuilt from this one's parts would not resume."""
        return BatchesOfOurs()

    @property
    def sampler(self) -> Sampler:
        """Has the ``set_epoch`` that trainers call, and as its length the samples of an epoch on this rank."""
        return Sampler(self.set_epoch, self._samples)

    def _samples(self) -> int:
        world = self._current_world()
        size = self._adapter.size(self._current_seed(world), self.epoch, world) if self.unit == "sample" else None
        if size is None:
            raise self._no_length("its number of samples is unknown; use loader.unit and loader.position")
        return Share(size, 0, 1, self._adapter.sharing(world), self._adapter.tail_in_use, False).steps

    def __repr__(self) -> str:
        return f"<midepoch {self._adapter.name} loader at epoch {self.epoch}, position {self.position}>"

    # --- the world, the seed, the share ---

    def _current_world(self) -> World:
        if self._resharded is not None:
            return self._resharded
        stated, by_source = self._options.world, self._adapter.world
        if stated is None and by_source is None:
            return World.current()
        world = stated if stated is not None else World.current()
        if by_source is None:
            return world
        if stated is None and world.world_size == 1:
            return replace(by_source, local_rank=world.local_rank)
        if (world.rank, world.world_size) != (by_source.rank, by_source.world_size):
            raise MidepochError(
                f"the source's sampler is for rank {by_source.rank} of {by_source.world_size}, but the world is rank "
                f"{world.rank} of {world.world_size}: make the sampler for this world, or leave it out (midepoch "
                "shards)"
            )
        return world

    def _current_seed(self, world: World) -> int:
        if self._seed_is_private and world.world_size > 1:
            raise MidepochError(
                f"the source drew its own seed, {self._seed} on this rank, and other ranks may have drawn others: "
                "pass seed= to midepoch.wrap, the same on every rank"
            )
        if self._seed is not None:
            return self._seed
        return self._process_seed if world.world_size == 1 else 0

    def _share(self, world: World, epoch: int, position: int) -> Share | None:
        cursor = self._cursor
        opened = cursor.session is not None
        self._refresh()
        detail = self._place.detail if not opened else "" if cursor.phase is Phase.GIVEN else cursor.opened.detail
        return self._adapter.share(self._current_seed(world), epoch, position, world, detail)

    def _refresh(self) -> None:
        """Take over a new length of the dataset, unless an epoch is being read."""
        if not self.position and (self._cursor.session is None or self._cursor.phase is Phase.GIVEN):
            self._adapter.refresh()

    def _no_length(self, instead: str) -> TypeError:
        return TypeError(f"this {self._adapter.name} source has no length: {instead}")

    def __len__(self) -> int:
        """Batches of one full epoch on this rank.

        Raises:
            TypeError: the source's length is not known.
        """
        share = self._share(self._current_world(), self.epoch, 0)
        if share is None:
            raise self._no_length("iterate it to its end")
        return share.steps

    def _steps_left(self) -> int | None:
        """Batches left in this epoch on this rank; None if unknown."""
        cursor = self._cursor
        if self._is_over:
            return 0
        if cursor.session is not None and cursor.phase is Phase.RUNNING and not cursor.session.drift:
            return None if cursor.own_steps is None else cursor.own_steps - cursor.steps
        share = self._share(self._current_world(), self.epoch, self.position)
        return None if share is None else share.steps

    @property
    def batches_left(self) -> int:
        """Batches left in this epoch on this rank, at this world size. Raises TypeError if unknown."""
        left = self._steps_left()
        if left is None:
            raise self._no_length("use loader.position")
        return left

    @property
    def batches_done(self) -> int:
        """Where a progress bar starts: ``tqdm(loader, initial=loader.batches_done)``.

        The batches of this epoch that were delivered before, computed for this world size. It is 0 if this rank has
        none left, because the next pass then begins the next epoch (not in the body of `epochs`: a pass that continues
        there is empty). If the source's length is unknown, it is a lower
        bound. After a `break` it still refers to the abandoned epoch; the next pass starts at 0.
        """
        left = self._steps_left()
        if left is not None:
            return len(self) - left if left or self._continues_over else 0
        if self._cursor.phase is Phase.EXHAUSTED:
            return 0
        return -(-self.position // self._adapter.units_per_step(self._current_world()))

    @property
    def _continues_over(self) -> bool:
        """Whether the next pass is empty, because the body of its epoch goes on behind its last batch."""
        return self._passes is not None and self._came is _Came.PUT and self.position > 0

    # --- state ---

    def state_dict(self, in_flight: int = 0) -> State:
        """The training loop's position: built-in types only, a few hundred bytes.

        Args:
            in_flight: batches taken from the loader but not yet trained on, by a prefetcher or a trainer that reads
                ahead. The state describes the position that many batches ago.

        Raises:
            StateError: fewer batches than `in_flight` have been handed out since the start or the last load.
        """
        if type(in_flight) is not int or in_flight < 0:
            raise ValueError(f"in_flight must be an int of at least 0, got {in_flight!r}")
        committed = self._committed
        if committed is not None:
            if in_flight:
                raise MidepochError("commit() says which batches were trained on: leave in_flight out")
            return dict(committed)
        if self._loaded is not None and not in_flight:
            return dict(self._loaded)
        return self._state_at(place_before(self._history, in_flight) if in_flight else self._here())

    def _state_at(self, place: Place) -> State:
        world = self._cursor.world if self._cursor.session is not None else None
        world = world or self._current_world()
        self._refresh()
        last_read = place.epoch if place.position else place.epoch - 1
        return self._states.build(place, self._current_seed(world), world, self._witnesses.text(last_read))

    def _here(self) -> Place:
        """Where the loader stands. Raises StateError if the source cannot say."""
        if self._cursor.session is not None:
            return self._cursor.place()
        if self._lost:
            raise StateError(self._lost)
        return self._place

    def load_state_dict(self, state: State) -> None:
        """Continue from `state` at the next ``next()``, wherever the loader stands now.

        The world size, the batch size and the number of workers may differ if `capabilities` says so.

        Raises:
            StateError: the state is damaged, of another version, or of another source. The message says what differs
                and what to do. The loader is unchanged.
        """
        checked, place = self._check_state(state)
        self._move(place)
        self._unfinished = checked["epoch"] if checked["position"] else None
        self._seed, self._seed_is_private = checked["seed"], False
        self._loaded = checked
        self._world = None
        self._witnesses.load(checked["witness"])

    def _check_state(self, state: State) -> tuple[State, Place]:
        """A copy of `state`, if this loader can continue from it, and its place."""
        return self._states.check(state, self._current_world())

    # --- going elsewhere ---

    def _lead(self, epoch: int, position: int) -> Place:
        """The place at (epoch, position), which no session need have reached."""
        adapter, there = self._adapter, (epoch, position)
        here = Place(self.epoch, self.position)
        if adapter.leads or here[:2] == there or self._is_over:
            here = self._here()
        if here[:2] == there:
            return here
        if here.over:
            here = here.after()
            if here[:2] == there:
                return here
        world = self._current_world()
        return Place(epoch, position, adapter.lead(here, there, self._current_seed(world), world))

    def _end_epoch(self) -> None:
        """Give up the rest of this epoch."""
        following = self._lead(self.epoch + 1, 0)
        self._close_session(keep=False)
        self._place, self._lost, self._loaded, self._unfinished = following, "", None, None
        self._failed.clear()

    def _move(self, place: Place) -> None:
        """Stand at `place`. The running pass, or else the next one, continues from there."""
        cursor = self._cursor
        self._close_session(keep=False)
        self._place, self._lost = place, ""
        self._came, self._loaded, self._unfinished = _Came.PUT, None, None
        self._origin, self._committed, self._ends_early = place, None, False
        self._failed.clear()
        self._history.clear()
        cursor.resumed = False
        if cursor.phase is Phase.GIVEN:
            cursor.phase = Phase.RUNNING

    def seek(self, epoch: int | None = None, position: int | None = None) -> None:
        """Go to another place, to skip bad data or to go back. Takes effect at the next ``next()``.

        Args:
            epoch: None for the current one.
            position: units of all ranks together. None stands for the epoch's start, or, if `epoch` is None too, for
                the current position.

        Raises:
            ValueError: a number is negative, or the position is beyond the epoch's size.
            StateError: the source can reach only the places of its own checkpoints.
        """
        if position is None:
            position = self.position if epoch is None else 0
        epoch = self.epoch if epoch is None else epoch
        for name, value in (("epoch", epoch), ("position", position)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be an int of at least 0, got {value!r}")
        world = self._current_world()
        size = self._adapter.size(self._current_seed(world), epoch, world)
        if size is not None and position > size:
            raise ValueError(f"position must be at most the epoch's size {size}, got {position}")
        if not self._adapter.can_seek:
            raise StateError("this source can only go where its own checkpoints lead: load a state instead of seeking")
        if size and position == size:
            self._move(self._lead(epoch + 1, 0).before(size))
        else:
            self._move(self._lead(epoch, position))
        self._ahead = 0

    def set_epoch(self, epoch: int) -> None:
        """Trainers call this before each epoch. The current epoch has no effect; a later one ends this one.

        An earlier epoch is ignored after a load or after the first batch, because trainers often pass the epoch of a
        checkpoint.

        What is left of a loaded epoch is never given up: until the next epoch begins, another number only causes a
        warning. Later numbers are taken to be apart from the loader's by as much, until the two agree.
        """
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be an int of at least 0, got {epoch!r}")
        _check_user(self, sys._getframe().f_back)
        came, cursor = self._came, self._cursor
        if epoch == self.epoch:
            self._ahead = 0
        elif self._unfinished == self.epoch:
            if self._ahead != epoch - self.epoch:
                self._ahead = epoch - self.epoch
                warnings.warn(
                    f"set_epoch({epoch}) is not followed: the loaded state is within epoch {self.epoch}, whose rest "
                    f"would be lost. Later numbers are taken to be {abs(self._ahead)} too "
                    f"{'high' if self._ahead > 0 else 'low'}, until they agree with loader.epoch. To leave this epoch, "
                    f"call loader.seek(epoch={epoch})",
                    MidepochWarning,
                    stacklevel=2,
                )
            return
        epoch = max(epoch - self._ahead, 0)
        if epoch > self.epoch or (epoch < self.epoch and came is _Came.FRESH):
            self._move(self._lead(epoch, 0))
            if came is _Came.FRESH:
                self._came = came
            if came is _Came.READ and cursor.owned and cursor.phase is Phase.RUNNING:
                cursor.phase = Phase.GIVEN  # its epoch is over

    # --- ranks that leave and join while training goes on ---

    def reshard(self, world: World) -> None:
        """Share the rest of the epoch among another world, from the next batch on.

        Every rank that stays calls it after the same batch, with its rank in the new world; a rank that joins loads a
        state of that place. Worker processes go on; what they have read ahead is dropped.

        Raises:
            TypeError: it is no World.
            UnsupportedSourceError: `capabilities.elastic_world` says no. The loader is unchanged.
            StateError: the source cannot say where it stands. The loader is unchanged.
        """
        if not isinstance(world, World):
            raise TypeError(f"reshard takes a midepoch.World, got {world!r:.80}")
        adapter = self._adapter
        if not adapter.elastic:
            raise UnsupportedSourceError(
                f"this source cannot be shared by another number of ranks ({adapter.promises.elastic_world.reason}): "
                "stop all ranks, and start them again in a world that it supports"
            )
        if not adapter.rank_independent and self._current_world().world_size > 1:
            raise UnsupportedSourceError(
                f"each rank knows only its own part of this source ({adapter.promises.rank_independent.reason}): save "
                "midepoch.gather(loader), and load it on all ranks of the new world"
            )
        if adapter.world is not None:
            raise UnsupportedSourceError(
                f"the source's sampler is for rank {adapter.world.rank} of {adapter.world.world_size}: make it for one "
                "process (num_replicas=1, rank=0), and let midepoch shard"
            )
        self._here()  # raises if it is not known
        with adapter.holding():
            self._close_session()
            adapter.reshard(world)
        self._resharded, self._world = world, None
        self._ends_early = self._cursor.phase is Phase.RUNNING and self._cursor.owned and self.position > 0

    def commit(self) -> None:
        """Declare that the batches handed out so far were trained on. From now on, states say what is committed.

        The state is built here, so another thread may call `state_dict` at any time.

        Raises:
            MidepochError: no batch was handed out since the last commit or load.
            StateError: the source cannot say where it stands.
        """
        place = self._here()
        if place[:2] == self._origin[:2]:
            raise MidepochError(
                f"nothing to commit: no batch was handed out since epoch {place.epoch}, position {place.position}; "
                "call commit() once after each step"
            )
        self._committed, self._origin = self._state_at(place), place

    def rollback(self) -> None:
        """Give the batches again that were handed out since the last commit (without one: since the last load).

        They come in the world that there is then: the same samples, each with its random numbers. The running pass, or
        else the next one, continues with them.
        """
        origin, committed, ahead = self._origin, self._committed, self._ahead
        if self._here()[:2] != origin[:2]:
            with self._adapter.holding():
                self._move(origin)
            self._committed, self._ahead = committed, ahead

    # --- iteration ---

    def __iter__(self) -> Iterator[Any]:
        _check_user(self, sys._getframe().f_back)
        return _Pass(self)

    def peek(self) -> Any:
        """Return the next batch at the current place without taking it: the state does not move.

        The running pass, or the one that continues from here, returns the same batch next. A pass begun after a `break`
        is a new epoch, and starts with that epoch's first batch.

        Raises:
            StopIteration: this epoch has ended: if its length is unknown, or in the body of `epochs`.
        """
        cursor = self._cursor
        if cursor.peeked:
            return cursor.peeked[0][0]
        if cursor.phase is not Phase.RUNNING:
            self._close_session()  # its epoch has ended; the next batch is the next epoch's first
            cursor = self._cursor = Cursor()
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
            self._close_session(mark)
            raise
        cursor.peeked.append((batch, mark))
        cursor.steady = False
        return batch

    def close(self) -> None:
        """Stop worker processes and threads. The state stays; iterating again starts them again."""
        cursor = self._cursor
        self._close_session()
        if cursor.phase is Phase.RUNNING:
            cursor.phase = Phase.CLOSED
        self._cursor = Cursor()
        self._cursor.resumed = cursor.resumed and cursor.phase is not Phase.EXHAUSTED
        self._adapter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # For trainers that start processes: everything except the open session.
        attributes = {**self.__dict__, "_place": self._here(), "_world": None, "_passes": None, "_failed": []}
        del attributes["_cursor"], attributes["_history"], attributes["_then"]
        return attributes

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._cursor, self._history, self._then = Cursor(), self._new_history(), Then.of(self._options)

    def __copy__(self) -> Self:
        # With an adapter of its own, because worker processes cannot be shared.
        twin = type(self)(self._adapter.twin(), self._options)
        attributes = self.__getstate__()
        del attributes["_adapter"], attributes["_states"]
        twin.__dict__.update(attributes)
        twin._witnesses = self._witnesses.of_twin(twin._adapter)
        return twin

    def _new_history(self) -> History:
        remembered = 0 if self._adapter.remembers else self._options.remember
        return new_history(remembered) if remembered else new_history()

    def _open(self, cursor: Cursor) -> bool:
        """Open a session at the loader's place, in the world as it is now.

        Returns:
            False if the epoch has no batches left and goes on all the same, in the body of `epochs`.
        """
        world = self._current_world()
        if self._world is not None and (self._world.rank, self._world.world_size) != (world.rank, world.world_size):
            raise MidepochError(
                f"this process was rank {self._world.rank} of {self._world.world_size} in the previous pass and is "
                f"rank {world.rank} of {world.world_size} now: keep torch.distributed initialised while the loader is "
                "in use, or load a state to continue in another world"
            )
        if self._world is None and not self._mesh_checked and world.world_size > 1:
            self._mesh_checked = True
            if self._options.world is None and self._adapter.world is None:
                warn_of_mesh()
        adapter, seed, place = self._adapter, self._current_seed(world), self._here()
        before: Place | None = None
        if self._failed:
            before, passed_over = place, len(self._failed) * adapter.units_per_step(world)
            place = self._lead(place.epoch, place.position + passed_over)
        share: Share | None = None
        if not place.over:
            adapter.prepare(seed, place.epoch)
            share = adapter.share(seed, place.epoch, place.position, world, place.detail)
        if place.over or (share is not None and share.global_steps == 0 and place.position > 0):
            # Less than one global batch is left.
            if self._passes is not None or before is not None or self._ends_early:
                return False
            place = self._place = self._lead(place.epoch + 1, 0)
            self._unfinished = None
            adapter.prepare(seed, place.epoch)
            share = adapter.share(seed, place.epoch, 0, world, place.detail)
        detail = place.detail or ("" if place.position else adapter.beginning(place.epoch, world))
        looks, expects = self._witnesses.looks(place.epoch), self._witnesses.expected
        run = Run(place.epoch, place.position, seed, world, share, adapter.tail_in_use, detail, looks, expects)
        session = adapter.open(run)
        if self._then is not None:
            session = self._then.around(session, run, adapter)
        marks = self._options.remember > 0 and not adapter.remembers
        cursor.open(session, run, adapter.units_per_step(world), before, marks)
        cursor.resumed = cursor.resumed or self._loaded is not None
        self._seed, self._world = seed, world
        return True

    def _close_session(self, mark: Any = None, keep: bool = True) -> None:
        """Close the open session. `mark`: taken before a batch that failed. `keep`: keep the session's place."""
        cursor = self._cursor
        if cursor.session is None:
            return
        try:
            if keep:
                self._place = Place(self.epoch, self.position)  # all there is if the source cannot say more
                self._place = cursor.place() if mark is None else cursor.place_of(mark)
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001  # a source that cannot say its state is read all the same
            self._lost = str(error)
        finally:
            cursor.close()

    def _next(self, current: _Pass) -> Any:
        """The next batch, where the pass has to be checked or a session opened first."""
        cursor = current.cursor
        if cursor is None:
            cursor = current.cursor = self._begin(current)
        if cursor.phase is not Phase.RUNNING or cursor is not self._cursor:
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
                if not self._goes_on(cursor, error, mark):
                    raise
                continue
            break
        self._loaded, self._came, self._ends_early = None, _Came.READ, False
        if self._failed:
            self._tell_of_failed(cursor.epoch, cursor.before.position, cursor.opened.position)
        cursor.steady = True
        cursor.handed_out(self._history, mark)
        if cursor.steps == cursor.last_step:
            self._roll(cursor)
        return batch

    def _refuse(self, cursor: Cursor) -> NoReturn:
        """What a pass answers that has no next batch."""
        if cursor.phase is Phase.EXHAUSTED:
            raise StopIteration
        if cursor.phase is Phase.CLOSED:
            raise MidepochError("the loader was closed while this pass ran: start a new pass")
        if cursor.phase is Phase.GIVEN:
            if cursor is self._cursor:
                self._close_session()
            cursor.phase = Phase.EXHAUSTED
            raise StopIteration
        raise MidepochError(
            "this pass ended when another pass over the loader started: use one iterator at a time, or wrap the source "
            "twice"
        )

    def _begin(self, current: _Pass) -> Cursor:
        """The cursor of a pass that asks for its first batch."""
        before, passes = self._cursor, self._passes
        if passes is not None and passes.leave_empty():
            ended = Cursor()
            ended.phase = Phase.EXHAUSTED
            return ended
        if self._came is _Came.READ and (self.position > 0 or self._is_over):
            if before.phase is Phase.RUNNING:
                self._tell_of_dropped(before)
            self._end_epoch()
        elif before.phase is Phase.GIVEN:
            self._close_session()
        if before.owned:
            self._cursor = before.taken_over()
            self._cursor.resumed = before.resumed and self._came is not _Came.READ
        self._cursor.user = weakref.ref(current)
        if passes is not None:
            passes.begin(self._cursor)
        return self._cursor

    def _tell_of_dropped(self, before: Cursor) -> None:
        """Warn of a new pass that drops what was hardly meant to be dropped."""
        if before.resumed:
            warnings.warn(
                f"a new pass drops the rest of the resumed epoch {self.epoch}, from position {self.position} on: "
                "to continue instead, keep the iterator, or load loader.state_dict()",
                MidepochWarning,
                stacklevel=5,
            )
        elif before.steps == 1 and not self._told_of_one:
            self._told_of_one = True
            warnings.warn(
                f"a pass over epoch {self.epoch} was given up after its first batch, and a new pass begins epoch "
                f"{self.epoch + 1}: to look at a batch, use loader.peek(), which gives nothing up",
                MidepochWarning,
                stacklevel=5,
            )

    def _goes_on(self, cursor: Cursor, error: BaseException, mark: Any) -> bool:
        """Handle a session that ended or failed. True if the pass continues, False if the error is to be raised."""
        session, resumed = cursor.session, cursor.steps == 0 and cursor.opened.position > 0
        if session is None:
            return False
        if not isinstance(error, StopIteration):
            # The loader stays after the last good batch, whether the next `next()` tries this one again or not.
            self._close_session(mark)
            if self._passes_over(error):
                # A worker's error has its whole traceback in its message; the last line says what it was.
                self._failed.append(str(error).strip().rpartition("\n")[2] or type(error).__name__)
            return False
        cursor.catch_up()
        if cursor.last_step is not None:
            given, expected = cursor.steps, cursor.own_steps
            if expected is not None and given < expected and not session.varies:
                self._close_session()
                raise SourceError(
                    f"the source ended after {given} of the {expected} batches that were left: correct its __len__, or "
                    "find where its code raises StopIteration"
                ) from None
            # An empty epoch, a rank without a part of the last global batch, or last steps without batches.
            goes_on = resumed and session.drift > 0
            self._roll(cursor)
            self._close_session()
            cursor.phase = Phase.RUNNING if goes_on else Phase.EXHAUSTED
            return goes_on
        nothing = cursor.position == 0
        if self._passes is not None:
            self._end_pass(cursor, session, self._passes)
            if resumed:
                self._tell_of_empty()
        else:
            self._close_session()
        if resumed and self._passes is None:
            self._unfinished = None
            self._place = self._lead(self._place.epoch + 1, 0)
            if not session.others_go_on:
                return True
        cursor.phase = Phase.EXHAUSTED
        before = sum(epoch == self._place.epoch - 1 for _, epoch, _, _ in self._history)
        if nothing and before:
            raise SourceError(
                f"the source was empty in epoch {self._place.epoch}, after {before} batches in the last one: "
                "it can be iterated only once; wrap a function that makes it, as in midepoch.wrap(lambda: make_it())"
            ) from None
        return False

    def _roll(self, cursor: Cursor) -> None:
        """Note that the epoch's last batch was handed out: the state is now the next epoch's beginning."""
        self._loaded, self._came = None, _Came.READ
        if self._passes is not None and self._passes.end():
            assert cursor.world is not None  # it is open
            size = self._adapter.size(cursor.seed, cursor.epoch, cursor.world, cursor.opened.detail)
            cursor.over = cursor.position if size is None else size
        else:
            self._unfinished = None
        cursor.phase, cursor.steady = Phase.GIVEN, False

    # --- errors that are passed over ---

    def _passes_over(self, error: BaseException) -> bool:
        """Whether the caller who goes on after an error gets the next batch. Not if a worker died or memory ran out."""
        if not isinstance(error, Exception) or isinstance(error, MidepochError | MemoryError):
            return False
        if not self._adapter.jumps:
            return False
        stated = self._options.on_error
        return stated == "next" or (stated is None and not self._retries and self._current_world().world_size == 1)

    def _tell_of_failed(self, epoch: int, start: int, stop: int) -> None:
        """Name the positions that were passed over, now that the caller has gone on behind them."""
        failed = "; ".join(dict.fromkeys(self._failed))
        self._failed.clear()
        warnings.warn(
            f"positions {start} to {stop - 1} of epoch {epoch} were passed over, because reading them failed "
            f"({failed:.300}): mend the data, or pass on_error='retry' to midepoch.wrap to have them tried again",
            MidepochWarning,
            stacklevel=4,
        )

    # --- the body of an epoch ---

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs from the loader's own up to `n`, each of which ends with the body of your loop::

            for epoch in loader.epochs(90):
                for batch in loader:
                    ...
                validate(model)
                schedule.step()

        In the body, a state saved after the last batch still stands at the end of that epoch. A run that resumes there
        gets the same epoch again, with an empty pass over the loader, and runs the rest of the body.
        `Snapshot.epochs` is the same for several loaders.

        Args:
            n: the number of epochs in all, those before a resume included.

        Raises:
            TypeError, ValueError: n is not an int of at least 0.
            MidepochError: such a loop is running already.
        """
        check_epochs(n)
        if self._passes is not None:
            raise MidepochError(RUNNING)
        return self._each_epoch(n)

    def _each_epoch(self, n: int) -> Iterator[int]:
        if self._passes is not None:
            raise MidepochError(RUNNING)
        if self.epoch > n:
            tell_of_done(n, self.epoch)
        continues: bool | None = True  # also if an earlier loop was left
        try:
            while self.epoch < n:
                self._enter_body(Passes(alone=True), continues)
                yield self.epoch
                self._leave_body(alone=True)
                continues = None
        finally:
            self._passes = None

    def _enter_body(self, passes: Passes, continues: bool | None = None) -> None:
        """An epoch has been yielded.

        `continues`: whether its first pass continues where the loader stands; None: as if there were no body.
        """
        self._passes = passes
        if continues is False:
            self._came = _Came.READ
        elif continues and self._came is _Came.READ:
            self._came = _Came.PUT

    def _leave_body(self, alone: bool = False) -> bool:
        """End the epoch with its body.

        Args:
            alone: the loop is over the epochs of this loader, so its epoch ends whatever was read.

        Returns:
            Whether a pass is in the middle of its epoch, and may go on in the next body.
        """
        passes, self._passes = self._passes, None
        if passes is None:
            return False
        cursor = self._cursor
        if passes.going_on and not alone:
            return True
        ended = self._is_over or (self._came is _Came.READ and self.position > 0 and cursor.phase is Phase.EXHAUSTED)
        if ended or (passes.left and self._adapter.can_seek) or (alone and not (passes.begun and not self.position)):
            self._end_epoch()
            self._came = _Came.READ
            if cursor.phase is Phase.RUNNING and cursor.owned:
                cursor.phase = Phase.GIVEN  # a pass that is kept has ended
        return False

    def _end_pass(self, cursor: Cursor, session: Session, passes: Passes) -> None:
        """Note where the next epoch begins, now that the source has ended this one."""
        following: Place | None = None
        if not self._adapter.can_seek:
            with contextlib.suppress(Exception):  # a source that cannot say its state is read all the same
                following = Place(cursor.epoch + 1, 0, session.following())
        self._close_session()
        if following is None and not self._lost:
            following = self._lead(cursor.epoch + 1, 0)
        held = passes.end()
        if held:
            cursor.over = cursor.position
        if following is not None:
            self._place = following.before(cursor.position) if held else following
        self._came = _Came.READ

    def _leave_empty(self, cursor: Cursor) -> None:
        """End a pass without a batch: only the body of its epoch is left, or the epoch's last batches failed."""
        passes = self._passes
        if self._failed or (self._ends_early and not self._place.over):
            place, world = self._place, self._current_world()
            size = self._adapter.size(self._current_seed(world), place.epoch, world, place.detail)
            if self._failed:
                self._tell_of_failed(place.epoch, place.position, place.position if size is None else size)
            following = self._lead(place.epoch + 1, 0)
            if passes is not None and passes.end() and size is not None:
                cursor.over = size
                self._place = following.before(size)
            else:
                self._place, self._unfinished = following, None
            self._loaded = None
        else:
            if passes is not None and passes.end():
                cursor.over = self.position
            self._tell_of_empty()
        self._came, self._ends_early, cursor.phase = _Came.READ, False, Phase.EXHAUSTED

    def _tell_of_empty(self) -> None:
        if self._current_world().rank == 0:
            _logger.warning("all batches of epoch %d are done: going on with the rest of its body", self.epoch)


class _Pass:
    """One pass over a loader. Several may exist; the one that was started last has the loader's cursor.

    The loader holds no reference to the pass, so a ``break`` leaves no cycle. Inside a cycle, the garbage collector may
    wait for worker processes before anything has told them to end.
    """

    __slots__ = ("__weakref__", "_loader", "cursor")

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.cursor: Cursor | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        loader, cursor = self._loader, self.cursor
        if cursor is None or not cursor.steady or cursor is not loader._cursor:
            return loader._next(self)
        mark = cursor.mark()
        try:
            batch = cursor.take()
        except BaseException as error:
            loader._goes_on(cursor, error, mark)
            raise
        cursor.handed_out(loader._history, mark)
        if cursor.steps == cursor.last_step:
            loader._roll(cursor)
        return batch
