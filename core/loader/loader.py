"""The wrapped loader, as users see it: its state, where it goes, and what it says of itself."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Self, TypeVar

from ..backends import COUNTING_TRAINERS
from ..errors import MidepochError, StateError, UnsupportedSourceError, warn
from ..order.holes import Holes
from ..sharding import length_of
from ..state.codec import decode
from ..state.format import State
from ..state.parts import part_of
from ..world import MicroShare, Share, World
from .adapter import Adapter, Options, Reach
from .body import ALONE, RUNNING, Body, check_epochs, warn_of_done
from .capabilities import Capabilities, Capability
from .context import RunContext
from .place import Place, Unknown
from .progress import Pass, Progress
from .reading import check_in_flight
from .source_attributes import SourceAttribute, SourceDataset, SourceSampler
from .states import States
from .tickets import Ticket

__all__ = ["Loader"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault  # Python has it from 3.13 on

    Batch = TypeVarWithDefault("Batch", covariant=True, default=Any)
else:
    Batch = TypeVar("Batch", covariant=True)


def _check_user(loader: Loader, frame: FrameType | None) -> None:
    if frame is not None and (path := COUNTING_TRAINERS.get(frame.f_globals.get("__name__", ""))) is not None:
        pkgutil.resolve_name(path)(loader, frame)


class Loader(Generic[Batch]):
    """What `midepoch.wrap` returns: the source's batches, and a state.

    Iterate it as often as you like; each pass is one epoch. Not thread-safe: one thread iterates and saves. A type
    checker knows the batches of a ``Loader[Tensor]``; `wrap` returns a ``Loader[Any]``, which fits any annotation.
    """

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self._adapter, self._options = adapter, options
        self._context = RunContext(adapter, options)
        self._progress = Progress(self._context, States(self._context))
        self._ahead = 0  # by how much the caller's numbers of epochs are greater than the loader's
        if options.on_error == "next" and not adapter.jumps:
            raise UnsupportedSourceError(
                f"on_error='next': this source ({adapter.name}) is read from its start, or from a state of its own, so "
                "the batch after a bad one cannot be reached: leave on_error out, and let the source pass over bad ones"
            )
        if options.global_batch is not None and not adapter.facts.reads_any_span:
            raise UnsupportedSourceError(
                f"global_batch={options.global_batch}: the batches of a {adapter.name} source cannot be cut to parts "
                "of a global batch: use a source that can be indexed, or accumulate whole batches"
            )

    # --- what it is ---

    @property
    def source(self) -> Any:
        """What was wrapped."""
        around = self._adapter.around
        return self._adapter.source if around is None else around.source

    @property
    def capabilities(self) -> Capabilities:
        """What this loader promises, each answer with its reason, as far as is known now. Reads no data."""
        promises = self._adapter.promises
        if self._adapter.rank_independent and not self.is_rank_independent:
            why = "each rank knows which of its own tickets are finished: use midepoch.gather(loader)"
            promises = replace(promises, rank_independent=Capability(False, why))
        return promises

    @property
    def is_rank_independent(self) -> bool:
        """Whether the state is the same on every rank; `capabilities` has the reason."""
        in_parts = self._context.tickets.taken and self._context.world().world_size > 1
        return self._adapter.rank_independent and not in_parts

    def witnesses_in(self, state: State) -> dict[str, str]:
        """The witnesses in a state of any rank, by the part of a combination: "1.0" is the first of the second part."""
        found = {"": state["witness"]} if state["witness"] else {}
        for number, (part, inside) in enumerate(self._adapter.parts(state)):
            for name, witness in ({} if inside is None else part.loader.witnesses_in(inside)).items():
                found[f"{number}.{name}" if name else str(number)] = witness
        return found

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self._progress.epoch

    @property
    def position(self) -> int:
        """Units of this epoch that all ranks together have received: samples, or batches of no constant size."""
        return self._progress.position

    @property
    def seed(self) -> int:
        """Of the order and of the random streams, in [0, 2**64). A loaded state may have brought it.

        Raises:
            MidepochError: the source drew its own seed, and other ranks may have drawn others.
        """
        return self._context.seed(self.world)

    @property
    def world(self) -> World:
        """The ranks that share the data now."""
        return self._context.world()

    @property
    def unit(self) -> Literal["sample", "batch"]:
        """What positions count."""
        return "sample" if self._adapter.facts.unit == "sample" else "batch"

    @property
    def global_batch(self) -> int | None:
        """Units of all ranks in one step of the optimizer, as given to `wrap`; None if each batch is a step."""
        return self._options.global_batch

    # A DataLoader's attributes, read from the source.
    dataset = SourceDataset()
    batch_size, drop_last, collate_fn, generator = (SourceAttribute() for _ in range(4))
    num_workers, persistent_workers, prefetch_factor, worker_init_fn = (SourceAttribute() for _ in range(4))
    pin_memory, timeout, multiprocessing_context = (SourceAttribute() for _ in range(3))
    # Trainers call ``set_epoch`` on them. Other attributes are the sampler's own; set between two passes, they count
    # from the next one on.
    sampler, batch_sampler = SourceSampler(), SourceSampler()

    @property
    def reset(self) -> NoReturn:
        """There is none, as ``hasattr`` says: code that calls it at an epoch's end, if there is one, has nothing to do.

        Raises:
            AttributeError: always; it says what to do in the place of the call, which DALI's iterators need.
        """
        raise AttributeError(
            "a wrapped loader has no reset(): each pass begins the next epoch by itself, so leave the call out; to go "
            "back, call loader.seek(epoch=0)"
        )

    def _samples(self) -> int:
        world = self.world
        size = self._adapter.size(self.seed, self.epoch, world) if self.unit == "sample" else None
        if size is None:
            raise self._no_length("its number of samples is unknown; use loader.unit and loader.position")
        return Share(size, 0, 1, self._adapter.sharing(world), self._adapter.tail_in_use, False).steps

    def __repr__(self) -> str:
        return f"<midepoch {self._adapter.name} loader at epoch {self.epoch}, position {self.position}>"

    # --- how much there is ---

    def _no_length(self, instead: str) -> TypeError:
        return TypeError(f"this {self._adapter.name} source has no length: {instead}")

    def __len__(self) -> int:
        """Batches of one full epoch on this rank; of a source that divides itself, what its own ``__len__`` says.

        A sampler's own ``__len__`` holds as in a plain loader, whatever it gives: the same before its first index and
        in a run that resumes.

        Raises:
            TypeError: the source's length is not known.
        """
        world = self._context.world()
        share = self._progress.share(world, self.epoch, 0, whole=True)
        if share is not None:
            stated, skips = self._adapter.facts.stated_size, self.epoch in self._context.omit.skips
            size = None if stated is None or skips else stated(self.epoch, world)
            return share.steps if size is None else replace(share, size=size).steps
        # As the source itself says. Nothing is built on it: the epoch ends where the source does.
        length = None if self._adapter.parts() else length_of(self._adapter.source)
        if length is None:
            raise self._no_length("iterate it to its end")
        return length

    def __bool__(self) -> bool:
        """As of any iterable: False only if its length is known to be 0."""
        try:
            return len(self) > 0
        except TypeError:
            return True

    @property
    def batches_left(self) -> int:
        """Batches left in this epoch on this rank, at this world size. Raises TypeError if unknown."""
        left = self._progress.steps_left()
        if left is None:
            raise self._no_length("use loader.position")
        return left

    @property
    def batches_done(self) -> int:
        """Where a progress bar starts: ``tqdm(loader, initial=loader.batches_done)``.

        The number of this epoch's batches that came before, computed for this world size; a lower bound if the length
        is unknown. It is 0 if this rank has none left, because the next pass then begins the next epoch (except in the
        body of `epochs`, where that pass is empty). After a `break` it still refers to the abandoned epoch.
        """
        progress = self._progress
        if progress.next_is_empty and not progress.is_at_end:
            return 0  # the place is that of a later pass
        share, left = progress.share(self._context.world(), self.epoch, 0, whole=True), progress.steps_left()
        # Whether the next pass is empty, because the body of its epoch goes on after its last batch.
        continues = progress.body is not None and not progress.new_epoch and self.position > 0
        if left == 0 and not (continues or progress.next_is_empty):
            return 0
        if share is not None and left is not None:
            return share.steps - left
        return -(-self.position // self._adapter.units_per_step(self._context.world()))

    @property
    def weight(self) -> float:
        """A factor for the loss of the batch handed out last: it turns a mean over ranks into the mean over samples.

        For the mean loss of n samples here, of N in the global batch, on W ranks: n * W / N; before the first batch,
        1.0. With ``global_batch=``, sum the losses of all its batches, as their gradients are summed; a batch given to
        a rank without samples has weight 0.0. A sample that `tail` repeats counts like any other.

        Raises:
            UnsupportedSourceError: only reading tells how many samples the source's batches have.
        """
        share, steps = self._progress.last_given()
        if not steps:
            return 1.0
        if share is None:
            raise UnsupportedSourceError(
                f"weight: only reading tells how many samples the batches of this {self._adapter.name} source have: "
                "divide by their sum over the ranks"
            )
        return share.weight(steps - 1)

    @property
    def step_due(self) -> bool:
        """Whether the batch handed out last was the last of its global batch: step the optimizer, then `commit`.

        Always, unless ``global_batch=`` was given.
        """
        share, steps = self._progress.last_given()
        return not isinstance(share, MicroShare) or (steps > 0 and share.is_whole(steps))

    # --- state ---

    def state_dict(self, in_flight: int = 0) -> State:
        """The training loop's position: built-in types only, a few hundred bytes.

        Args:
            in_flight: batches taken from the loader but not yet trained on, by a prefetcher or a trainer that reads
                ahead. The state describes the position that many batches ago.

        Raises:
            ValueError: `in_flight` is not an int of at least 0.
            StateError: fewer batches than `in_flight` have been handed out since the start or the last load.
        """
        if in_flight or type(in_flight) is not int:
            check_in_flight(in_flight)
        committed = self._progress.committed
        if committed is not None:
            if in_flight:
                raise MidepochError("commit() says which batches were trained on: leave in_flight out")
            return dict(committed)
        if in_flight and self._context.tickets.taken:
            raise MidepochError("finish() says which batches were trained on: leave in_flight out")
        return self._progress.state(in_flight)

    def load_state_dict(self, state: State) -> None:
        """Continue from `state` at the next ``next()``, wherever the loader stands now.

        The world size, the batch size and the number of workers may differ if `capabilities` says so.

        Raises:
            StateError: the state is damaged, of another version, or of another source. The loader is unchanged.
        """
        self._progress.load(state)

    # --- going elsewhere ---

    def seek(self, epoch: int | None = None, position: int | None = None) -> None:
        """Go to another place, to skip bad data or to go back. Takes effect at the next ``next()``.

        Args:
            epoch: None for the current one.
            position: units of all ranks together. None stands for the epoch's start, or, if `epoch` is None too, for
                the current position.

        Raises:
            ValueError: a number is negative, or the position is beyond the epoch's size.
            StateError: the source can reach only the places of its own checkpoints, or only beginnings of epochs.
        """
        if position is None:
            position = self.position if epoch is None else 0
        epoch = self.epoch if epoch is None else epoch
        for name, value in (("epoch", epoch), ("position", position)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be an int of at least 0, got {value!r}")
        size = None
        if position:
            self._adapter.prepare(Place(epoch, position), self.seed, "measured")
            size = self._adapter.size(self.seed, epoch, self.world)
        if size is not None and position > size:
            raise ValueError(f"position must be at most the epoch's size {size}, got {position}")
        ends = self._progress.is_at_end and (epoch, position) == (self.epoch + 1, 0)  # where the source has led already
        reach = self._adapter.reach
        if position and reach is Reach.EPOCHS and (epoch, position) != (self.epoch, self.position):
            raise StateError("within an epoch, only states lead to a place of this source: load one, or seek an epoch")
        if reach is Reach.STATES and not ends:
            raise StateError("this source can only go where its own checkpoints lead: load a state instead of seeking")
        at_end = size is not None and position == size
        place = self._progress.place_at(*((epoch + 1, 0) if at_end else (epoch, position)))
        self._progress.move(place.before(position) if at_end else place)
        self._ahead = 0

    def set_epoch(self, epoch: int) -> None:
        """Trainers call this before each epoch. The current epoch changes nothing; a later one ends this one.

        After a load or the first batch, the loader ignores an earlier epoch, because trainers often pass the epoch of
        a checkpoint.

        In an epoch that was loaded, another number is ignored with a warning, so that its rest is not dropped. The
        difference is subtracted from later numbers, until one equals `epoch`.
        """
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be an int of at least 0, got {epoch!r}")
        _check_user(self, sys._getframe().f_back)
        progress = self._progress
        if epoch == self.epoch:
            self._ahead = 0
        if epoch == self.epoch or isinstance(progress.place.detail, Unknown):
            return
        if (loaded := progress.is_unfinished) or (progress.body is not None and progress.body.alone):
            if self._ahead != epoch - self.epoch:
                self._ahead = epoch - self.epoch
                warn(
                    f"set_epoch({epoch}) is not followed: "
                    f"{'the loaded state is within' if loaded else 'this is the body of'} epoch {self.epoch}, whose "
                    f"rest would be lost. Later numbers are taken to be {abs(self._ahead)} too "
                    f"{'high' if self._ahead > 0 else 'low'}, until they agree with loader.epoch. To leave this epoch, "
                    f"call loader.seek(epoch={epoch})",
                )
            return
        epoch, is_fresh = max(epoch - self._ahead, 0), progress.origin is None
        if epoch > self.epoch or (epoch < self.epoch and is_fresh):
            progress.check_left(epoch)
            there = progress.place_at(epoch, 0)  # before anything changes: it may be refused
            if progress.new_epoch:
                progress.end_pass()
            progress.move(there)
            if is_fresh:
                progress.origin = None

    # --- what is left out ---

    def skip(self, start: int, stop: int, epoch: int | None = None) -> None:
        """Leave positions out of an epoch, now or ahead of time: the data after a loss spike, for example.

        Batches that were handed out stay; what is left is divided anew, from the next batch on. Each sample keeps its
        random numbers. Every rank calls this after the same batch.

        Args:
            start, stop: positions [start, stop) of all ranks together. For a state's, see ``state["position"]``.
            epoch: None for the current one; or a later one.

        Raises:
            ValueError: the range is empty or reversed, beyond the epoch, or in an epoch that has ended.
            UnsupportedSourceError: `capabilities.skips` says no.
            StateError: no state could hold so many ranges.
            MidepochError: within a global batch, or after a batch that could not be read. The loader is unchanged, as
                after each of these errors.
        """
        progress, context, epoch = self._progress, self._context, self.epoch if epoch is None else epoch
        if not all(type(each) is int for each in (start, stop, epoch)):
            raise TypeError(f"skip takes ints, got {start!r:.80}, {stop!r:.80} and {epoch!r:.80}")
        if not (can := context.skips):
            raise UnsupportedSourceError(f"skip: {can.reason}; let the dataset leave samples out instead")
        size, now = self._adapter.size(self.seed, epoch, self.world), self.epoch + progress.is_at_end
        omit = context.omit.with_skip(start, stop, epoch, now, size)
        if epoch == self.epoch and (progress.within or progress.skipped):
            raise MidepochError("skip() within a global batch, or after a batch that failed: take the next batch first")
        progress.leave_out(omit, anew=epoch == self.epoch)

    @property
    def skipped(self) -> dict[int, list[tuple[int, int]]]:
        """The positions that this epoch and later ones leave out, as ranges [start, stop), by epoch."""
        return {each: list(holes) for each, holes in sorted(self._context.omit.skips.items()) if each >= self.epoch}

    # --- batches that are finished in any order ---

    @property
    def ticket(self) -> Ticket:
        """Of the batch handed out last: small and hashable, for queues and pickle. `finish` takes it, once, here.

        From the first ticket on, a batch counts when it is finished. What is not comes again after a resume, in order,
        on any number of ranks; an epoch cannot be left before. Every rank takes tickets, from the same batch on, and
        finishes its own; in a larger world `midepoch.gather` or a `Snapshot` unites what they have finished.

        Raises:
            MidepochError: no batch was handed out since the last load, or `commit` is used.
            UnsupportedSourceError: `capabilities.skips` says no, or ``global_batch=`` was given.
        """
        if not self._context.tickets.taken:
            if not (can := self._context.skips):
                raise UnsupportedSourceError(f"ticket: {can.reason}; finish batches in order instead, with commit()")
            if self._options.global_batch is not None:
                raise UnsupportedSourceError("ticket: steps of a global batch end together; leave global_batch= out")
            if self._progress.committed is not None:
                raise MidepochError("ticket: commit() says which batches were trained on; leave commit() out")
        return self._progress.take_ticket()

    def finish(self, ticket: Ticket) -> None:
        """Declare that a batch was trained on. In any order, from any thread of the process that handed it out.

        Raises:
            StateError: the ticket is finished already, or of another run, or of a place that was left by a load, a
                seek or a rollback. Nothing is changed.
        """
        if type(ticket) is not Ticket:
            raise TypeError(f"finish takes what loader.ticket returned, got {ticket!r:.80}")
        self._context.tickets.finish(ticket)
        self._progress.looked = None

    @property
    def frontier(self) -> tuple[int, int]:
        """The epoch and the position before which all batches are finished, as far as this rank knows.

        Without tickets, where the next batch is.
        """
        progress, tickets = self._progress, self._context.tickets
        return (self.epoch, self.position) if tickets.epoch is None else progress.frontier([tickets.open()])[0][:2]

    def united(self, states: list[State]) -> State | None:
        """One state, from those of all ranks of which each knows its own tickets; None if tickets are not the reason.

        Raises:
            MidepochError: some ranks take tickets, and some do not.
        """
        if not self._adapter.rank_independent:
            return None
        taken = [state["detail"].startswith("{") for state in states]
        if not any(taken):
            return states[0]
        if not all(taken):
            raise MidepochError(f"rank {taken.index(False)} takes no tickets, and others do: take them on every rank")
        parts = [part_of(each["detail"], rank, len(states)) for rank, each in enumerate(states)]
        return self._progress.state_at(*self._progress.frontier(Holes.parse(str(decode(part))) for part in parts))

    # --- ranks that leave and join while training goes on ---

    def reshard(self, world: World) -> None:
        """Share the rest of the epoch among another world, from the next batch on.

        Every rank that stays calls it after the same batch, with its rank in the new world. A rank that joins loads a
        state of that place. Worker processes start anew, but for those of ``persistent_workers=True``.

        Raises:
            TypeError: `world` is not a World.
            UnsupportedSourceError: `capabilities.elastic_world` says no.
            StateError: the source cannot say where it stands.
            MidepochError: this rank is about to pass over a batch that could not be read. The loader is unchanged, as
                after each of these errors.
        """
        if not isinstance(world, World):
            raise TypeError(f"reshard takes a midepoch.World, got {world!r:.80}")
        self._context.check_reshard(world, self.epoch)
        if self._progress.skipped:
            raise MidepochError(
                f"reshard() after a batch that could not be read, at position {self.position} of epoch {self.epoch}: "
                "other ranks cannot know that this one passes over it; take its next batch first, or call rollback(), "
                "after which the batch is tried again in the new world"
            )
        if self._progress.reading is not None:
            self._progress.here()  # raises if it is not known
        self._progress.divide_anew()
        for part, _ in self._adapter.parts():
            part.reshard(world)
        self._context.resharded, self._context.last = world, None

    def commit(self) -> None:
        """Declare that the batches handed out so far were trained on. From now on, states say what is committed.

        After a later `load_state_dict` or `seek`, that place counts as committed. The state is built here, so another
        thread may call `state_dict` at any time.

        Raises:
            MidepochError: no batch was handed out since the last commit or load, or only a part of a global batch.
            StateError: the source cannot say where it stands.
        """
        progress = self._progress
        if self._context.tickets.taken:
            raise MidepochError("commit() with tickets, which say what was trained on: leave commit() out")
        place, origin = progress.here(), progress.origin
        if progress.within:
            raise MidepochError(
                f"commit() within the global batch at position {place.position} of epoch {place.epoch}: call it when "
                "loader.step_due"
            )
        if origin is None or place[:2] == origin[:2]:
            raise MidepochError(
                f"nothing to commit: no batch was handed out since epoch {place.epoch}, position {place.position}; "
                "call commit() once after each step"
            )
        progress.origin, progress.committed, progress.looked = place, progress.state_at(place), None

    def rollback(self) -> None:
        """Give again the batches handed out since the last commit, or since the last load if there was no commit.

        The same samples come, each with its random numbers, shared among the loader's present world. The running pass,
        or else the next one, continues with them.

        Raises:
            MidepochError: in the body of `epochs`, which counts its passes. The loader is unchanged.
        """
        if self._progress.body is not None:
            raise MidepochError(
                "rollback() in the body of epochs(), which counts its passes: read in a loop of your own, as "
                "docs/trainers.md shows"
            )
        self._progress.roll_back()

    # --- iteration ---

    def __iter__(self) -> Iterator[Batch]:
        _check_user(self, sys._getframe().f_back)
        return Pass(self._progress)

    def peek(self) -> Batch:
        """Return the next batch at the current place without taking it: the state does not move.

        The running pass, or the one that continues from here, returns the same batch next. A pass begun after a `break`
        starts with the next epoch's first batch.

        Raises:
            StopIteration: nothing is left of this epoch, and its pass, or its body, has not ended.
        """
        batch: Batch = self._progress.peek()
        return batch

    def close(self) -> None:
        """Stop worker processes and threads. The state stays; iterating again starts them again."""
        self._progress.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "a loader cannot be copied, since the copy would share its worker processes: wrap the source again, and "
            "load this loader's state_dict()"
        )

    # --- the body of an epoch ---

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs from the loader's own up to `n`, each of which ends with the body of your loop:

            for epoch in loader.epochs(90):
                for batch in loader:
                    ...
                validate(model)
                schedule.step()

        In the body, a state saved after the last batch is still at the end of that epoch: a run that resumes there gets
        the same epoch again, with an empty pass, and runs the rest of the body. Before a state is saved as the last
        thing in the body, call ``loader.seek(epoch=epoch + 1)``. `Snapshot.epochs` is the same for several loaders.

        Args:
            n: the number of epochs in all, those before a resume included.

        Raises:
            TypeError, ValueError: n is not an int of at least 0.
            MidepochError: such a loop is running already; when the first epoch is asked for.
        """
        check_epochs(n)
        return self._each_epoch(n)

    def _each_epoch(self, n: int) -> Iterator[int]:
        progress = self._progress
        if progress.body is not None:
            raise MidepochError(RUNNING)
        if (epoch := self.epoch) > n:
            warn_of_done(n, epoch)
        if progress.looked is not None:
            began, here = progress.looked[0], (epoch, self.position)
            # A pass that finishes a loaded epoch is no look.
            if here not in (began[:2], (began.epoch + (began.position > 0), 0)):
                warn(
                    f"batches were read before loader.epochs, which continues after them, at position {self.position} "
                    f"of epoch {epoch}: to look at some, wrap the source once more, or call loader.peek()"
                )
        continues: bool | None = True  # also if an earlier loop was left
        body: Body | None = None
        try:
            while epoch < n:
                body = Body({ALONE: progress}, before=body)
                progress.enter_body(body, continues)
                yield epoch
                body.leave()
                progress.leave_body(epoch)
                epoch = epoch + 1 if body.passes > 1 else self.epoch
                continues = None
        finally:
            if progress.body is body:  # not that of a loop which began before this one was freed
                progress.body = None
