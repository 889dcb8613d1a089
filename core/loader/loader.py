"""The wrapped loader: one cursor, and the rules of iteration, once for all adapters.

Rules (docs/design.md tells why):

* `iter()` has no side effect; the first `next()` starts. The first pass after a load goes on from it, every later pass
  is a new epoch.
* The position moves when a batch is handed over, not when it is prefetched. Handing over an epoch's last batch moves
  the state to (epoch + 1, 0), so that 'finished' has one spelling.
* `load_state_dict` checks everything before it changes anything, and takes effect at the next `next()`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Self

from midepoch.errors import MidepochError, MidepochWarning, SourceError, StateError, StateMismatchError
from midepoch.randomness.streams import process_seed
from midepoch.state import format as states
from midepoch.state import parts
from midepoch.state.format import State
from midepoch.world import Share, Tail, World

from .adapter import Adapter, Options, Run, Session
from .capabilities import Capabilities

__all__ = ["Loader"]

# Modules whose call of load_state_dict means that a count of batches was restored beside it. Here, since no adapter is
# loaded where the callback that mends the count is missing.
_COUNT_BATCHES = (
    "lightning.pytorch.utilities.combined_loader",
    "pytorch_lightning.utilities.combined_loader",
)
_REMEMBERED_PASSES = 4  # for in_flight batches that were taken before an epoch rolled over
_REMEMBERED_DETAILS = 4  # of each, where a place has one that arithmetic does not give


class Loader:
    """What `midepoch.wrap` returns: the source's batches, and a state.

    Iterate it as often as you like; each pass is one epoch. Not thread-safe: one thread iterates and saves.

    Attributes:
        source: what was wrapped, as it was.
        epoch: the epoch of the next batch, counted from 0.
        position: units (samples, or batches where these have no constant size) that all ranks together have been
            handed in this epoch.
    """

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self._adapter = adapter
        self._options = options
        # Read, never consumed; used in a world of one if nobody states a seed.
        self._process_seed = process_seed()
        self._seed = options.seed if options.seed is not None else adapter.seed
        self._seed_is_private = options.seed is None and not adapter.seed_is_shared
        self._fingerprint = json.dumps(
            {**adapter.describe(), **({"fingerprint": options.fingerprint} if options.fingerprint is not None else {})},
            separators=(",", ":"),
            sort_keys=True,
        )
        self._epoch = 0
        self._first = 0  # position at which the session was opened
        self._fresh = True  # nothing was handed out, loaded or sought yet
        self._begun = False  # a batch has been handed out since the last start, load or seek
        self._resumed = False  # the pass that runs went on from a load
        self._loaded: State | None = None  # what was loaded, until a batch is handed out
        self._detail = ""  # of the position, while no session is open
        self._lost = ""  # why it is not known
        self._world: World | None = None  # of the last pass
        self._reset_runtime()

    def _reset_runtime(self) -> None:
        self._session: Session | None = None
        self._next: Callable[[], Any] = self._no_session
        self._step = 0  # batches handed out by the session
        self._last: int | None = None  # step whose batch ends the epoch
        self._own_steps = 0  # batches of this rank in the session, where their number is known
        self._global_batch = 1
        self._peeked: list[Any] = []
        self._unmoved = (0, "")  # what the session said before it was peeked: units missing, detail
        self._active: _Mark | None = None  # the pass that owns the cursor
        self._running: _Mark | None = None  # the same, while the session is open and nothing else is to be done
        self._trail: deque[_Passed] = deque(maxlen=_REMEMBERED_PASSES)

    # --- what it is ---

    @property
    def source(self) -> Any:
        """What was wrapped."""
        return self._adapter.source

    @property
    def capabilities(self) -> Capabilities:
        """What this loader promises, each answer with its reason."""
        return self._adapter.capabilities()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    @property
    def position(self) -> int:
        """Units of this epoch that all ranks together have been handed."""
        return self._first + self._step * self._global_batch - self._missing_before(0)

    def _missing_before(self, back: int) -> int:
        """The session's `missing`, as it was so many batches ago."""
        if self._session is None or self._last == 0:
            return 0  # an epoch that has ended says nothing of the next
        if self._peeked:
            return self._session.missing_before(back + 1) if back else self._unmoved[0]
        return self._session.missing_before(back)

    # Lightning looks for it where there is a sampler.
    batch_sampler: None = None

    @property
    def sampler(self) -> _EpochSetter:
        """Where trainers look for ``set_epoch``."""
        return _EpochSetter(self)

    def __repr__(self) -> str:
        return f"<midepoch {self._adapter.name} loader at epoch {self.epoch}, position {self.position}>"

    # --- the world, the seed, the share ---

    def _current_world(self) -> World:
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
                f"the source's sampler is rank {by_source.rank} of {by_source.world_size}, the world is rank "
                f"{world.rank} of {world.world_size}: make the sampler for this world, or leave it out (midepoch "
                "shards)"
            )
        return world

    def _current_seed(self, world: World) -> int:
        if self._seed_is_private and world.world_size > 1:
            raise MidepochError(
                f"the source's seed is {self._seed} here, and each of the {world.world_size} processes may have drawn "
                "another: pass seed= to midepoch.wrap, the same on every rank"
            )
        if self._seed is not None:
            return self._seed
        return self._process_seed if world.world_size == 1 else 0

    @property
    def _tail(self) -> Tail:
        return self._adapter.tail_in_use

    def _share(self, world: World, epoch: int, position: int) -> Share | None:
        detail = self._detail if self._session is None else self._unmoved[1] if self._peeked else ""
        return self._adapter.share(self._current_seed(world), epoch, position, world, detail)

    def __len__(self) -> int:
        """Batches of one full epoch on this rank.

        Raises:
            TypeError: the source's length is not known.
        """
        share = self._share(self._current_world(), self._epoch, 0)
        if share is None:
            raise TypeError(f"this {self._adapter.name} source has no length: iterate it to its end")
        return share.steps

    @property
    def batches_left(self) -> int:
        """Batches that this epoch still has for this rank, on this world size. TypeError where it cannot be known."""
        share = self._share(self._current_world(), self._epoch, self.position)
        if share is None:
            raise TypeError(f"this {self._adapter.name} source has no length: use loader.position")
        return share.steps

    @property
    def batches_done(self) -> int:
        """Where a progress bar begins: ``tqdm(loader, initial=loader.batches_done)``.

        Batches of this epoch that lie behind, counted on this world size; 0 where none is left for this rank, since the
        next pass is one of the next epoch then. Where the source's length is not known, as many as there are at least.
        After a `break` it is that of the epoch that was left, and the next pass begins at 0.
        """
        world = self._current_world()
        share = self._share(world, self._epoch, self.position)
        if share is None:
            over = self._active is not None and self._active.exhausted
            return 0 if over else -(-self.position // self._adapter.units_per_step(world))
        return len(self) - share.steps if share.steps else 0

    # --- state ---

    def state_dict(self, in_flight: int = 0) -> State:
        """Where the training loop stands: built-in types only, a few hundred bytes.

        Args:
            in_flight: batches taken from the loader but not yet trained on (a prefetcher, a trainer that reads ahead):
                the state is that of so many batches ago.

        Raises:
            StateError: fewer batches than `in_flight` have been handed out since the start or the last load.
        """
        if type(in_flight) is not int or in_flight < 0:
            raise ValueError(f"in_flight must be an int of at least 0, got {in_flight!r}")
        if self._loaded is not None and not in_flight:
            return dict(self._loaded)
        epoch, position, detail = self._place(in_flight)
        world = self._world if self._session is not None and self._world is not None else self._current_world()
        return self._built(epoch, position, detail, self._current_seed(world), world)

    def _built(self, epoch: int, position: int, detail: str, seed: int, world: World) -> State:
        adapter = self._adapter
        if not detail and not position:
            detail = adapter.beginning(epoch, world)
        fields = {
            "adapter": adapter.name,
            "epoch": epoch,
            "position": position,
            "seed": seed,
            "size": adapter.size(seed, epoch, world, detail),
            "world_size": world.world_size,
            "batch_size": adapter.batch_size,
            "fingerprint": self._fingerprint,
        }
        own = not adapter.rank_independent
        if adapter.seals_detail:
            detail = parts.seal_detail(detail, world.rank if own else 0, fields)
        return states.build(**fields, detail=parts.single_part(world.rank, detail) if detail and own else detail)

    def _place(self, in_flight: int) -> tuple[int, int, str]:
        """Epoch, position and detail of so many batches ago."""
        session, ended = self._session, self._last == 0
        if in_flight <= self._step:
            position = self._first + (self._step - in_flight) * self._global_batch - self._missing_before(in_flight)
            return self._epoch, position, self._session_detail(in_flight)
        back = in_flight - self._step
        for passed in reversed(self._trail):
            if back <= passed.steps:
                position = passed.first + (passed.steps - back) * passed.global_batch
                if session is not None and ended and back == in_flight:
                    return passed.epoch, position - session.missing_before(back), session.detail(in_flight, False)
                if passed.details is None:
                    return passed.epoch, position, self._adapter.bare_detail() if position else ""
                if back > len(passed.details):
                    break
                return passed.epoch, *passed.details[back - 1]
            back -= passed.steps
        raise StateError(
            f"in_flight={in_flight}, but fewer batches are remembered since the start or the last load: pass the "
            "number of batches that were taken and not yet trained on"
        )

    def _session_detail(self, back: int) -> str:
        session = self._session
        if session is None:
            if self._lost:
                raise StateError(self._lost)
            return self._detail
        if self._peeked:
            return session.detail(back + 1, False) if back else self._unmoved[1]
        return session.detail(back, self._last == 0)

    def load_state_dict(self, state: State) -> None:
        """Go on from `state` at the next ``next()``, whatever was going on.

        Another world size, batch size or number of workers is fine where `capabilities` says so.

        Raises:
            StateError: the state is damaged, of another version, or of something else; the message says what differs
                and what to do. The loader is as it was.
        """
        checked, detail = self._check_state(state)
        self._warn_a_trainer_that_counts(checked)
        self._move(checked["epoch"], checked["position"])
        self._seed, self._seed_is_private = checked["seed"], False
        self._detail = detail
        self._loaded = checked
        self._world = None
        self._resumed = True

    def _warn_a_trainer_that_counts(self, state: State) -> None:
        world_size, caller = self._current_world().world_size, sys._getframe(2).f_globals.get("__name__", "")
        if caller not in _COUNT_BATCHES or not state["position"]:
            return
        if (world_size, self._adapter.batch_size) != (state["world_size"], state["batch_size"]):
            warnings.warn(
                f"the checkpoint is of {state['world_size']} processes with batches of {state['batch_size']}, these "
                f"are {world_size} with {self._adapter.batch_size}. Lightning counts batches, and ends this epoch too "
                "early or too late: add midepoch.adapters.trainers.lightning.ExactResume() to the trainer's callbacks",
                MidepochWarning,
                stacklevel=3,
            )

    def _check_state(self, state: State) -> tuple[State, str]:
        """A copy of a state that this loader could go on from, and this rank's detail in it."""
        checked = states.check(state)
        adapter = self._adapter
        if checked["adapter"] != adapter.name:
            _mismatch("the adapter", checked["adapter"], adapter.name, "wrap the kind of source that was saved")
        if self._options.seed is not None and checked["seed"] != self._options.seed:
            _mismatch(
                "the seed", checked["seed"], self._options.seed, "pass that seed, or none: the saved one is adopted"
            )
        states.compare_fingerprints(checked["fingerprint"], self._fingerprint)
        world = self._current_world()
        inside = checked["position"] > 0 or checked["detail"]
        if inside and not adapter.elastic and checked["world_size"] != world.world_size:
            _mismatch(
                "the world size",
                checked["world_size"],
                world.world_size,
                f"run on {checked['world_size']} processes ({adapter.capabilities().elastic_world.reason})",
            )
        detail = self._detail_in(checked, world)
        adapter.prepare(checked["seed"], checked["epoch"])
        size = adapter.size(checked["seed"], checked["epoch"], world, detail)
        if checked["size"] != size:
            _mismatch("the size", checked["size"], size, "use the same data, or start this data anew")
        adapter.check_detail(detail, checked["seed"], checked["epoch"], checked["position"], world)
        return checked, detail

    # --- for combinations: where this loader would stand, and leaving an epoch behind ---

    def _detail_in(self, state: State, world: World) -> str:
        adapter, detail = self._adapter, state["detail"]
        if adapter.seals_detail:
            detail = parts.unseal_detail(state, adapter.rank_independent)
        if detail and not adapter.rank_independent:
            return adapter.part(detail, state["world_size"], world)
        return str(detail)

    def _batches_left_at(self, state: State) -> int | None:
        """`batches_left` of a loader that stands at `state`; None where it cannot be known."""
        world = self._current_world()
        detail = self._detail_in(state, world)
        share = self._adapter.share(state["seed"], state["epoch"], state["position"], world, detail)
        return None if share is None else share.steps

    def _state_at(self, state: State, epoch: int) -> State:
        """The state at the beginning of an epoch, of a loader that stands at `state`."""
        here, there = (state["epoch"], state["position"]), (epoch, 0)
        if here == there:
            return state
        adapter, world, seed = self._adapter, self._current_world(), state["seed"]
        if adapter.jumps:
            detail = adapter.jump(here, self._detail_in(state, world), there, seed, world)
        elif epoch == state["epoch"] + 1:
            detail = adapter.following(self._detail_in(state, world), state["epoch"], world)
        elif adapter.rank_independent:
            detail = ""
        else:
            raise StateError("this source can only go where its own checkpoints lead: load a state instead of seeking")
        return self._built(epoch, 0, detail, seed, world)

    def _leave_epoch(self) -> None:
        """Go to the next epoch's beginning, where a trainer gives up the rest of one that has begun."""
        if self.position:
            self.load_state_dict(self._state_at(self.state_dict(), self.epoch + 1))

    def _end_epoch(self) -> None:
        """Give up the rest of this epoch."""
        adapter, world = self._adapter, self._current_world()
        detail = self._detail_of_next_epoch(world) if adapter.jumps else ""
        self._close_session(keep_detail=adapter.continuous)
        self._detail = detail if adapter.jumps else self._detail_of_next_epoch(world)
        self._epoch, self._first, self._lost = self._epoch + 1, 0, ""
        self._loaded, self._resumed = None, False

    def _detail_at(self, epoch: int, position: int) -> str:
        """The detail for a place that iterating has not led to."""
        if not self._adapter.jumps and not position:
            return ""
        here_epoch, here_position, detail = self._place(0)
        if (here_epoch, here_position) == (epoch, position):
            return detail
        if not self._adapter.jumps:
            return self._adapter.bare_detail()
        world = self._current_world()
        seed = self._current_seed(world)
        return self._adapter.jump((here_epoch, here_position), detail, (epoch, position), seed, world)

    def _detail_of_next_epoch(self, world: World) -> str:
        """The detail with which the next epoch begins where the rest of this one is given up, or there is none."""
        if self._adapter.jumps:
            return self._detail_at(self._epoch + 1, 0)
        return self._adapter.following(self._detail, self._epoch, world)

    def _move(self, epoch: int, position: int, detail: str = "") -> None:
        """Put the cursor somewhere by hand; the next pass, or the one that runs, goes on from there."""
        self._close_session(keep_detail=False)
        self._epoch, self._first, self._step = epoch, position, 0
        self._begun = self._resumed = self._fresh = False
        self._loaded = None
        self._detail, self._lost = detail, ""
        self._trail.clear()
        if self._active is not None:
            self._active.ended = False

    def seek(self, epoch: int | None = None, position: int | None = None) -> None:
        """Go elsewhere by hand: skip bad data, or go back. Takes effect at the next ``next()``.

        Args:
            epoch: None for the current one.
            position: in units of the order, of all ranks together; None for the epoch's start, or, where `epoch` is
                None too, for the current position.

        Raises:
            ValueError: negative, or beyond the epoch's size.
            StateError: the source can only go where its own checkpoints lead.
        """
        if position is None:
            position = self.position if epoch is None else 0
        epoch = self._epoch if epoch is None else epoch
        for name, value in (("epoch", epoch), ("position", position)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be an int of at least 0, got {value!r}")
        world = self._current_world()
        size = self._adapter.size(self._current_seed(world), epoch, world)
        if size is not None and position > size:
            raise ValueError(f"position must be at most the epoch's size {size}, got {position}")
        if not (self._adapter.rank_independent or self._adapter.jumps):
            raise StateError("this source can only go where its own checkpoints lead: load a state instead of seeking")
        self._move(epoch, position, self._detail_at(epoch, position))

    def set_epoch(self, epoch: int) -> None:
        """What trainers call before each epoch. The current epoch changes nothing; a later one ends what was begun.

        An earlier one is ignored once a state was loaded or an epoch begun: trainers repeat the epoch of a checkpoint.
        """
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be an int of at least 0, got {epoch!r}")
        if epoch > self._epoch or (epoch < self._epoch and self._fresh):
            fresh, running = self._fresh, self._active if self._begun else None
            self._move(epoch, 0, self._detail_at(epoch, 0))
            self._fresh = fresh
            if running is not None:
                running.ended = True  # its epoch is over

    # --- iteration ---

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self)

    def peek(self) -> Any:
        """The next batch at the current place, without taking it: the state does not move.

        The pass that runs, or the one that goes on from here, returns it next. A pass that is begun after a `break` is
        a new epoch, and begins with that epoch's first batch.

        Raises:
            StopIteration: this epoch's data has ended (only where its length is unknown).
        """
        if not self._peeked:
            if self._last == 0:
                self._close_session()  # the epoch that ended; the next batch is the next epoch's first
            if self._session is None:
                self._open()  # which may find that this epoch is over
                detail = self._detail
                if not detail and not self.position:
                    detail = self._adapter.beginning(self._epoch, self._current_world())
            else:
                detail = self._session_detail(0)
            missing = 0 if self._session is None else self._session.missing
            try:
                self._peeked.append(self._next())
            except StopIteration:
                raise
            except BaseException:
                self._close_session(keep_detail=self._step > 0)
                raise
            self._unmoved = missing, detail
            self._running = None
        return self._peeked[0]

    def close(self) -> None:
        """Stop worker processes and threads. The state stays; iterating again starts them anew."""
        if self._active is not None:
            self._active.closed = True
            self._active = None
        self._close_session()
        self._adapter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """For trainers that start processes: everything but what is open."""
        attributes = self.__dict__.copy()
        attributes["_detail"] = self._place(0)[2]
        attributes["_first"] = self.position
        attributes["_world"] = None
        opened = ("_session", "_next", "_step", "_last", "_own_steps", "_peeked", "_unmoved")
        for name in (*opened, "_active", "_running", "_trail"):
            del attributes[name]
        return attributes

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self._reset_runtime()
        self.__dict__.update(attributes)

    def __copy__(self) -> Self:
        # With an adapter of its own: worker processes are not to be shared.
        twin = type(self)(self._adapter.twin(), self._options)
        attributes = self.__getstate__()
        del attributes["_adapter"]
        twin.__dict__.update(attributes)
        return twin

    def _no_session(self) -> NoReturn:
        raise RuntimeError("midepoch: no session is open")  # pragma: no cover  # _start opens one

    def _open(self) -> None:
        """Open a session at the cursor, in the world as it is now."""
        world = self._current_world()
        if self._world is not None and (self._world.rank, self._world.world_size) != (world.rank, world.world_size):
            raise MidepochError(
                f"the world was rank {self._world.rank} of {self._world.world_size} in the pass before and is rank "
                f"{world.rank} of {world.world_size} now: keep torch.distributed initialised while the loader is in "
                "use, or load a state to go on in another world"
            )
        if self._lost:
            raise StateError(self._lost)
        seed, position, adapter = self._current_seed(world), self.position, self._adapter
        adapter.prepare(seed, self._epoch)
        share = self._share(world, self._epoch, position)
        if share is not None and share.global_steps == 0 and position > 0:
            # Less is left than one global batch: the epoch was over.
            self._detail = self._detail_of_next_epoch(world)
            self._epoch, position = self._epoch + 1, 0
            adapter.prepare(seed, self._epoch)
            share = self._share(world, self._epoch, 0)
        run = Run(self._epoch, position, seed, world, share, self._tail, self._detail)
        self._session = adapter.open(run)
        self._next = self._session.take
        self._seed, self._world = seed, world
        self._first, self._step = position, 0
        self._global_batch = adapter.units_per_step(world)
        # An epoch of no batches is not over before StopIteration says so: -1 is never reached.
        self._last = None if share is None else share.global_steps or -1
        self._own_steps = 0 if share is None else share.steps

    def _close_session(self, keep_detail: bool = True) -> None:
        session = self._session
        self._running = None
        if session is None:
            return
        try:
            if keep_detail:
                self._detail = self._session_detail(0)
        except StateError as error:
            self._lost = str(error)
        finally:
            if self._step:
                self._remember(session)
            self._first, self._step = self.position, 0
            self._peeked.clear()
            self._session, self._next, self._last = None, self._no_session, None
            session.close()

    def _start(self, current: _Mark) -> Any:
        """The next batch where something has to be done first."""
        if current.exhausted or (current.ended and (current.superseded or current.closed)):
            raise StopIteration
        if current.closed:
            raise MidepochError("the loader was closed while this pass ran: iterate it anew")
        if current.superseded:
            raise MidepochError(
                "another pass over this loader was started, which ended this one: keep one iterator at a time, or wrap "
                "the source twice"
            )
        if current.ended:
            current.exhausted = True
            if self._last == 0:
                self._close_session()
            raise StopIteration
        if self._active is not current:
            self._begin(current)
        while True:
            if self._session is None:
                self._open()
            try:
                batch = self._peeked.pop() if self._peeked else self._next()
            except BaseException as error:
                if not self._goes_on(current, error):
                    raise
                continue
            break
        self._begun, self._fresh = True, False
        self._loaded = None
        self._running = current
        self._step += 1
        if self._step == self._last:
            self._roll()
        return batch

    def _begin(self, current: _Mark) -> None:
        """A pass that has not been running asks for its first batch."""
        previous, self._active = self._active, current
        if previous is not None:
            previous.superseded = True
        if self._begun and self.position > 0:
            if self._resumed and not (previous is not None and previous.exhausted):
                warnings.warn(
                    f"a new pass gives up the rest of epoch {self._epoch}, which a loaded state had continued, at "
                    f"position {self.position}: to go on instead, keep the iterator, or load loader.state_dict()",
                    MidepochWarning,
                    stacklevel=4,
                )
            self._end_epoch()
        elif self._last == 0:
            self._close_session()
        if self._begun:
            self._resumed = False

    def _goes_on(self, current: _Mark, error: BaseException) -> bool:
        """The session ended or failed. True if the same pass goes on with the next epoch, False if the error stands."""
        session = self._session
        if session is None:
            return False
        if not isinstance(error, StopIteration):
            # The cursor stays behind the last good batch; the next `next()` tries this one again.
            self._close_session(keep_detail=self._step > 0)
            return False
        if self._last is not None:
            if self._step < self._own_steps and not session.varies:
                given, expected = self._step, self._own_steps
                self._close_session(keep_detail=self._step > 0)
                raise SourceError(
                    f"the source ended after {given} of the {expected} batches that were left: mend its __len__, or "
                    "the StopIteration that its code raises or lets through"
                ) from None
            # An epoch of no batches, a rank without a part in the last global batch, or last steps that gave none.
            current.exhausted = not (self._step == 0 and self._first > 0 and session.missing < 0)
            self._roll()
            current.ended = current.exhausted
            self._close_session()
            return not current.exhausted
        resumed_at_the_end = self._step == 0 and self._first > 0
        nothing, batches_before = self.position == 0, self._trail[-1].steps if self._trail else 0
        self._close_session()
        if resumed_at_the_end:
            self._detail = self._detail_of_next_epoch(self._current_world())
            self._epoch, self._first = self._epoch + 1, 0
            current.exhausted = session.others_go_on
            return not current.exhausted
        current.exhausted = True
        if nothing and batches_before:
            raise SourceError(
                f"the source gave nothing in epoch {self._epoch}, after {batches_before} batches in the one before: it "
                "cannot be iterated twice; wrap a function that makes it anew, as in midepoch.wrap(lambda: "
                "make_source())"
            ) from None
        return False

    def _remember(self, session: Session | None) -> None:
        adapter, details = self._adapter, None
        if session is not None and (session.varies or adapter.jumps or not adapter.rank_independent):
            details = []
            with contextlib.suppress(StateError):  # it is not known so far back
                for back in range(1, min(self._step, _REMEMBERED_DETAILS) + 1):
                    position = self._first + (self._step - back) * self._global_batch - self._missing_before(back)
                    details.append((position, session.detail(back + len(self._peeked), False)))
        self._trail.append(_Passed(self._epoch, self._first, self._step, self._global_batch, details))

    def _roll(self) -> None:
        """The epoch's last batch has been handed out: the state is the next epoch's beginning."""
        self._remember(self._session)
        self._loaded = None
        self._begun, self._fresh = True, False
        self._epoch += 1
        self._first = self._step = self._last = 0
        self._detail = ""
        self._running = None
        if self._active is not None:
            self._active.ended = True


class _Passed(NamedTuple):
    """A session that is over.

    Attributes:
        epoch, first: where it began.
        steps: batches that it handed out.
        global_batch: units of each.
        details: position and detail of one batch ago, two, and so on, where these cannot be computed.
    """

    epoch: int
    first: int
    steps: int
    global_batch: int
    details: list[tuple[int, str]] | None


class _Mark:
    """What a loader knows of a pass over it.

    Not the pass itself, so that what a ``break`` leaves is no cycle: in garbage that is collected, worker processes may
    be waited for before they are told to end.
    """

    __slots__ = ("closed", "ended", "exhausted", "superseded")

    def __init__(self) -> None:
        self.ended = False  # the last batch has been handed out
        self.exhausted = False  # StopIteration has been raised
        self.superseded = False
        self.closed = False


class _Pass:
    """One pass over a loader. Several may exist; the one whose `next` was called last owns the cursor."""

    __slots__ = ("_loader", "mark")

    def __init__(self, loader: Loader) -> None:
        self._loader, self.mark = loader, _Mark()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if loader._running is not self.mark:
            return loader._start(self.mark)
        try:
            batch = loader._next()
        except BaseException as error:
            loader._goes_on(self.mark, error)
            raise
        loader._step += 1
        if loader._step == loader._last:
            loader._roll()
        return batch


class _EpochSetter:
    """Stands where trainers look for a sampler."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)


def _mismatch(what: str, saved: object, current: object, cure: str) -> NoReturn:
    raise StateMismatchError(f"{what} differs: the state was saved with {saved!r}, this loader has {current!r}; {cure}")
