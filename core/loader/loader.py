"""The wrapped loader: its place, and the rules of iteration for all adapters.

Rules (docs/design.md tells why):

* `iter()` has no side effect; the first `next()` starts the pass. The first pass after a load continues from the state;
  every later pass is a new epoch.
* The position moves when a batch is handed out, not when it is prefetched. Handing out an epoch's last batch moves the
  state to (epoch + 1, 0), so 'finished' has one spelling.
* `load_state_dict` checks everything before it changes anything, and takes effect at the next `next()`.
"""

from __future__ import annotations

import enum
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, NoReturn, Self

from midepoch.errors import MidepochError, MidepochWarning, SourceError, StateError, StateMismatchError
from midepoch.randomness.streams import process_seed
from midepoch.state import format as states
from midepoch.state import parts
from midepoch.state.format import State
from midepoch.state.witness import Witness
from midepoch.world import Share, World, mesh_in_use

from .adapter import Adapter, Options, Run
from .capabilities import Capabilities
from .cursor import Cursor, Phase, new_history, place_before
from .place import Place
from .source_attributes import BatchesOfOurs, Sampler, SourceAttribute, SourceDataset
from .verify import verify

__all__ = ["Loader", "when_loaded_by"]

_loading: dict[str, Callable[[Any, State], None]] = {}


def when_loaded_by(module: str, tell: Callable[[Loader, State], None]) -> None:
    """Call `tell(loader, checked_state)` whenever code of `module` loads a state.

    For trainers that also restore their own batch counter, which may not match the loader's place.
    """
    _loading[module] = tell



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
        # Read, never consumed; used in a single process if no seed is given.
        self._process_seed = process_seed()
        self._seed = options.seed if options.seed is not None else adapter.seed
        self._seed_is_private = options.seed is None and not adapter.seed_is_shared
        self._fingerprint = json.dumps(
            {**adapter.describe(), **({"fingerprint": options.fingerprint} if options.fingerprint is not None else {})},
            separators=(",", ":"),
            sort_keys=True,
        )
        self._place = Place(0, 0)  # valid while no session is open
        self._lost = ""  # why the place's detail is unknown; empty if it is known
        self._came = _Came.FRESH
        self._loaded: State | None = None  # the loaded state, until a batch is handed out
        self._witnesses: dict[int, str] = {}  # by epoch: of the last two from which was read
        self._expects: Witness | None = None  # of the loaded state, until it has been compared
        self._left_out: frozenset[int] = frozenset()  # parts of samples that differ from one read to the next
        self._tried = False  # whether a sample that is read twice stays the same
        self._world: World | None = None  # of the last pass
        self._mesh_checked = False
        self._cursor = Cursor()
        self._history = new_history()

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
        return cursor.epoch + (cursor.phase is Phase.GIVEN)

    @property
    def position(self) -> int:
        """Units of this epoch that all ranks together have received."""
        cursor = self._cursor
        if cursor.session is None:
            return self._place.position
        return 0 if cursor.phase is Phase.GIVEN else cursor.position

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
        none left, because the next pass then begins the next epoch. If the source's length is unknown, it is a lower
        bound. After a `break` it still refers to the abandoned epoch; the next pass starts at 0.
        """
        left = self._steps_left()
        if left is not None:
            return len(self) - left if left else 0
        if self._cursor.phase is Phase.EXHAUSTED:
            return 0
        return -(-self.position // self._adapter.units_per_step(self._current_world()))

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
        if self._loaded is not None and not in_flight:
            return dict(self._loaded)
        place = place_before(self._history, in_flight) if in_flight else self._here()
        world = self._cursor.world if self._cursor.session is not None else None
        world = world or self._current_world()
        return self._built(place, self._current_seed(world), world)

    def _here(self) -> Place:
        """Where the loader stands. Raises StateError if the source cannot say."""
        if self._cursor.session is not None:
            return self._cursor.place()
        if self._lost:
            raise StateError(self._lost)
        return self._place

    def _built(self, place: Place, seed: int, world: World) -> State:
        adapter, detail = self._adapter, place.detail
        self._refresh()
        if not detail and not place.position:
            detail = adapter.beginning(place.epoch, world)
        fields = {
            "adapter": adapter.name,
            "epoch": place.epoch,
            "position": place.position,
            "seed": seed,
            "size": adapter.size(seed, place.epoch, world, detail),
            "world_size": world.world_size,
            "batch_size": adapter.batch_size,
            "fingerprint": self._fingerprint,
        }
        own = not adapter.rank_independent
        if adapter.seals_detail:
            detail = parts.seal_detail(detail, world.rank if own else 0, fields)
        detail = parts.single_part(world.rank, detail) if detail and own else detail
        last_read = place.epoch if place.position else place.epoch - 1
        return states.build(**fields, detail=detail, witness=self._witnesses.get(last_read, ""))

    def load_state_dict(self, state: State) -> None:
        """Continue from `state` at the next ``next()``, wherever the loader stands now.

        The world size, the batch size and the number of workers may differ if `capabilities` says so.

        Raises:
            StateError: the state is damaged, of another version, or of another source. The message says what differs
                and what to do. The loader is unchanged.
        """
        checked, detail = self._check_state(state)
        if (tell := _loading.get(sys._getframe(1).f_globals.get("__name__", ""))) is not None:
            tell(self, checked)
        self._move(Place(checked["epoch"], checked["position"], detail))
        self._seed, self._seed_is_private = checked["seed"], False
        self._loaded = checked
        self._world = None
        self._expects = Witness.parse(checked["witness"]) if self._options.verify != "off" else None
        self._witnesses = {} if self._expects is None else {self._expects.epoch: checked["witness"]}

    def _check_state(self, state: State) -> tuple[State, str]:
        """A copy of `state`, if this loader can continue from it, and this rank's detail."""
        checked = states.check(state)
        adapter = self._adapter
        if checked["adapter"] != adapter.name:
            _mismatch("the adapter", checked["adapter"], adapter.name, "wrap the kind of source that was saved")
        if self._options.seed is not None and checked["seed"] != self._options.seed:
            _mismatch(
                "the seed", checked["seed"], self._options.seed, "pass that seed, or none to take over the saved one"
            )
        states.compare_fingerprints(checked["fingerprint"], self._fingerprint)
        world = self._current_world()
        inside = checked["position"] > 0 or checked["detail"]
        if inside and not adapter.elastic and checked["world_size"] != world.world_size:
            _mismatch(
                "the world size",
                checked["world_size"],
                world.world_size,
                f"run on {checked['world_size']} processes ({adapter.promises.elastic_world.reason})",
            )
        detail = self._detail_in(checked, world)
        adapter.prepare(checked["seed"], checked["epoch"])
        size = adapter.size(checked["seed"], checked["epoch"], world, detail)
        if checked["size"] != size:
            _mismatch("the size", checked["size"], size, "use the same data, or start over with this data")
        adapter.check_detail(detail, checked["seed"], checked["epoch"], checked["position"], world)
        Witness.parse(checked["witness"])
        return checked, detail

    def _detail_in(self, state: State, world: World) -> str:
        """This rank's detail in a state."""
        adapter, detail = self._adapter, state["detail"]
        if adapter.seals_detail:
            detail = parts.unseal_detail(state, adapter.rank_independent)
        if detail and not adapter.rank_independent:
            return adapter.part(detail, state["world_size"], world)
        return str(detail)

    # --- going elsewhere ---

    def _lead(self, epoch: int, position: int) -> Place:
        """The place at (epoch, position), which no session need have reached."""
        adapter, there = self._adapter, (epoch, position)
        here = Place(self.epoch, self.position)
        if adapter.leads or here[:2] == there:
            here = self._here()
        if here[:2] == there:
            return here
        world = self._current_world()
        return Place(epoch, position, adapter.lead(here, there, self._current_seed(world), world))

    def _end_epoch(self) -> None:
        """Give up the rest of this epoch."""
        following = self._lead(self.epoch + 1, 0)
        self._close_session(keep=False)
        self._place, self._lost, self._loaded = following, "", None

    def _move(self, place: Place) -> None:
        """Stand at `place`. The running pass, or else the next one, continues from there."""
        cursor = self._cursor
        self._close_session(keep=False)
        self._place, self._lost = place, ""
        self._came, self._loaded = _Came.PUT, None
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
        self._move(self._lead(epoch, position))

    def set_epoch(self, epoch: int) -> None:
        """Trainers call this before each epoch. The current epoch has no effect; a later one ends this one.

        An earlier epoch is ignored after a load or after the first batch, because trainers often pass the epoch of a
        checkpoint.
        """
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be an int of at least 0, got {epoch!r}")
        came, cursor = self._came, self._cursor
        if epoch > self.epoch or (epoch < self.epoch and came is _Came.FRESH):
            self._move(self._lead(epoch, 0))
            if came is _Came.FRESH:
                self._came = came
            if came is _Came.READ and cursor.owned and cursor.phase is Phase.RUNNING:
                cursor.phase = Phase.GIVEN  # its epoch is over

    # --- iteration ---

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self)

    def peek(self) -> Any:
        """Return the next batch at the current place without taking it: the state does not move.

        The running pass, or the one that continues from here, returns the same batch next. A pass begun after a `break`
        is a new epoch, and starts with that epoch's first batch.

        Raises:
            StopIteration: this epoch has ended (only if its length is unknown).
        """
        cursor = self._cursor
        if cursor.peeked:
            return cursor.peeked[0][0]
        if cursor.phase is not Phase.RUNNING:
            self._close_session()  # its epoch has ended; the next batch is the next epoch's first
            cursor = self._cursor = Cursor()
        if cursor.session is None:
            self._open(cursor)  # may find that this epoch is over
        session = cursor.session
        assert session is not None  # _open has opened it
        mark = session.mark() if cursor.steps else None
        try:
            batch = cursor.take()
            if not cursor.steps:
                self._see(cursor)
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
        attributes = {**self.__dict__, "_place": self._here(), "_world": None}
        del attributes["_cursor"], attributes["_history"]
        return attributes

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._cursor, self._history = Cursor(), new_history()

    def __copy__(self) -> Self:
        # With an adapter of its own, because worker processes cannot be shared.
        twin = type(self)(self._adapter.twin(), self._options)
        attributes = self.__getstate__()
        del attributes["_adapter"]
        twin.__dict__.update(attributes)
        return twin

    def _open(self, cursor: Cursor) -> None:
        """Open a session at the loader's place, in the world as it is now."""
        world = self._current_world()
        if self._world is not None and (self._world.rank, self._world.world_size) != (world.rank, world.world_size):
            raise MidepochError(
                f"this process was rank {self._world.rank} of {self._world.world_size} in the previous pass and is "
                f"rank {world.rank} of {world.world_size} now: keep torch.distributed initialised while the loader is "
                "in use, or load a state to continue in another world"
            )
        if self._world is None and not self._mesh_checked and world.world_size > 1:
            self._check_mesh()
        adapter, seed, place = self._adapter, self._current_seed(world), self._here()
        adapter.prepare(seed, place.epoch)
        share = adapter.share(seed, place.epoch, place.position, world, place.detail)
        if share is not None and share.global_steps == 0 and place.position > 0:
            # Less than one global batch is left: the epoch is over.
            place = self._place = self._lead(place.epoch + 1, 0)
            adapter.prepare(seed, place.epoch)
            share = adapter.share(seed, place.epoch, 0, world, place.detail)
        detail = place.detail or ("" if place.position else adapter.beginning(place.epoch, world))
        looks = self._looks(place.epoch)
        run = Run(place.epoch, place.position, seed, world, share, adapter.tail_in_use, detail, looks, self._expects)
        cursor.open(adapter.open(run), run, adapter.units_per_step(world))
        cursor.resumed = cursor.resumed or self._loaded is not None
        self._seed, self._world = seed, world

    # --- what the first sample of an epoch looks like ---

    def _looks(self, epoch: int) -> int:
        """How often the first sample of an epoch is to be looked at."""
        options = self._options
        if options.verify == "off" or not options.streams or options.shard is False:
            return 0
        return 2 if not self._tried else int(self._expects is not None or epoch not in self._witnesses)

    def _see(self, cursor: Cursor) -> None:
        """Compare what was seen with the loaded state's witness, and keep it for states to come.

        Raises:
            StateMismatchError: the data differ from those that the state was saved with.
        """
        seen, epoch = None if cursor.session is None else cursor.session.seen, cursor.opened.epoch
        if seen is None:
            return
        if self._expects is not None:
            verify(self._expects, seen, epoch, strict=self._options.verify)
            self._expects = None
        look = seen.look
        if look is None:
            return
        if look.unseen:
            self._adapter.cannot_see(look.unseen)
        if seen.again is not None:
            self._tried = True
            self._left_out = look.differing(seen.again)
            if self._left_out:
                why = f"two reads of sample {seen.index!r:.80} differ in {look.names(self._left_out)}"
                self._adapter.found(why, look.holds_most(self._left_out))
                warnings.warn(
                    f"{why}, so a resumed run does not get the same data: make each sample a function of its index and "
                    "of python's, numpy's or torch's generators, or of midepoch.sample_generator(). "
                    "loader.capabilities says what still holds",
                    MidepochWarning,
                    stacklevel=6,
                )
        self._witnesses = {
            **{each: text for each, text in self._witnesses.items() if each == epoch - 1},
            epoch: str(Witness.of(epoch, seen.index, look, self._left_out)),
        }

    def _check_mesh(self) -> None:
        """Warn if tensor-parallel peers would receive different batches because no `world` was given."""
        self._mesh_checked = True
        if self._options.world is not None or self._adapter.world is not None:
            return
        mesh = mesh_in_use()
        if mesh is not None:
            names = mesh.mesh_dim_names or ("dp", "...")
            warnings.warn(
                f"a DeviceMesh of shape {tuple(mesh.mesh.shape)} with dimensions {', '.join(names)} is in use, and "
                "this loader gives every rank other batches. Where ranks share a batch (tensor, pipeline or context "
                f"parallelism), pass world=midepoch.World.from_mesh(mesh[{names[0]!r}]) to midepoch.wrap; where all "
                "dimensions are data-parallel, pass world=midepoch.World.current()",
                MidepochWarning,
                stacklevel=5,
            )

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
            cursor = current.cursor = self._begin()
        elif cursor.phase is Phase.EXHAUSTED:
            raise StopIteration
        elif cursor.phase is Phase.CLOSED:
            raise MidepochError("the loader was closed while this pass ran: start a new pass")
        elif cursor.phase is Phase.GIVEN:
            if cursor is self._cursor:
                self._close_session()
            cursor.phase = Phase.EXHAUSTED
            raise StopIteration
        elif cursor is not self._cursor:
            raise MidepochError(
                "this pass ended when another pass over the loader started: use one iterator at a time, or wrap the "
                "source twice"
            )
        while True:
            if cursor.session is None:
                self._open(cursor)
            mark = None
            try:
                if cursor.peeked:
                    batch, mark = cursor.peeked.pop()
                else:
                    mark = cursor.mark()
                    batch = cursor.take()
                    if not cursor.steps:
                        self._see(cursor)
            except BaseException as error:
                if not self._goes_on(cursor, error, mark):
                    raise
                continue
            break
        self._loaded, self._came = None, _Came.READ
        cursor.steady = True
        cursor.handed_out(self._history, mark)
        if cursor.steps == cursor.last_step:
            self._roll(cursor)
        return batch

    def _begin(self) -> Cursor:
        """The cursor of a pass that asks for its first batch."""
        before = self._cursor
        if self._came is _Came.READ and self.position > 0:
            if before.resumed and before.phase is not Phase.EXHAUSTED:
                warnings.warn(
                    f"a new pass drops the rest of the resumed epoch {self.epoch}, from position {self.position} on: "
                    "to continue instead, keep the iterator, or load loader.state_dict()",
                    MidepochWarning,
                    stacklevel=4,
                )
            self._end_epoch()
        elif before.phase is Phase.GIVEN:
            self._close_session()
        if before.owned:
            self._cursor = before.taken_over()
            self._cursor.resumed = before.resumed and self._came is not _Came.READ
        self._cursor.owned = True
        return self._cursor

    def _goes_on(self, cursor: Cursor, error: BaseException, mark: Any) -> bool:
        """Handle a session that ended or failed. True if the pass continues, False if the error is to be raised."""
        session, resumed = cursor.session, cursor.steps == 0 and cursor.opened.position > 0
        if session is None:
            return False
        if not isinstance(error, StopIteration):
            # The loader stays after the last good batch; the next `next()` tries this one again.
            self._close_session(mark)
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
        self._close_session()
        if resumed:
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
        cursor.phase, cursor.steady = Phase.GIVEN, False


class _Pass:
    """One pass over a loader. Several may exist; the one that was started last has the loader's cursor.

    The loader holds no reference to the pass, so a ``break`` leaves no cycle. Inside a cycle, the garbage collector may
    wait for worker processes before anything has told them to end.
    """

    __slots__ = ("_loader", "cursor")

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


def _mismatch(what: str, saved: object, current: object, cure: str) -> NoReturn:
    raise StateMismatchError(f"{what} differs: the state was saved with {saved!r}, this loader has {current!r}; {cure}")
