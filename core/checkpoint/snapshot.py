"""`Snapshot`: a training run in one file, on any number of processes.

For scripts under torchrun, whose processes may at any time be killed, preempted by a signal, or restarted with another
number of ranks. Rank 0 writes, all ranks read.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from torch.distributed import ProcessGroup

from ..errors import MidepochError, SnapshotError, warn
from ..loader.body import RUNNING, check_epochs, warn_of_done
from ..loader.options import MOST_IN_FLIGHT
from ..loader.reading import check_in_flight
from ..order.keys import derive_key
from .content import apply, contribute, joined, read_fitting
from .epoch_loop import EpochLoop
from .files import Found, SnapshotFile, cure_of, find, release_files
from .fitting import merge
from .generators import seed_generators, set_generators
from .ledger import Ledger, trained_loaders
from .ranks import NEVER, Agreement, Ranks
from .signals import Signals, end_process
from .unfollowed import Unfollowed

__all__ = ["Snapshot"]

_KEY = 0x534E4150  # no other keys begin with this word
_SECONDS_FOR_AN_AGENT_TO_SIGNAL = 30.0
_logger = logging.getLogger("midepoch")
_SIGNALS = tuple(each for each in signal.Signals if each.name in ("SIGTERM", "SIGUSR1"))  # Windows has no SIGUSR1


class Snapshot:
    """Saves and restores a training run, on any number of processes, so that it continues as if uninterrupted:

        snapshot = midepoch.Snapshot("run/snapshot.pt", every=1000, model=model, optimizer=optimizer, data=loader)
        for epoch in snapshot.epochs(90):
            for batch in loader:
                ...
                snapshot.step()
            validate(model)

    Every process makes one, and calls its methods at the same points: the processes communicate there.

    A name that is a keyword of Snapshot itself goes into `parts`:

        midepoch.Snapshot("run/snapshot.pt", data=loader, parts={"keep": ema, "every": schedule})

    When any process receives SIGTERM or SIGUSR1, all processes save after the same batch and raise SystemExit. With
    several processes this takes a small exchange twice a second; with one it is free.

    The file is what ``torch.save`` writes: ``torch.load(path, weights_only=True)["parts"]["model"]`` is the model's
    state. The previous snapshot is kept as ``snapshot.pt.1`` and is loaded if the newest one is damaged.

    Attributes:
        path: of the newest snapshot.
        steps: how often `step` was called in this run, before restarts too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int = 2,
        signals: Iterable[signal.Signals] = _SIGNALS,
        exit_status: int = 0,
        ledger: bool | str | Iterable[str] = False,
        group: ProcessGroup | None = None,
        parts: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        """
        Args:
            path: of the file, on storage that all processes see.
            every: batches between saves by `step`, at least 1; None to save on a signal only.
            keep: snapshots to keep, the newest included; at least 1.
            signals: on which `step` saves and exits, SIGTERM and SIGUSR1 by default; empty to install no handlers.
            exit_status: of the SystemExit that follows. torchrun takes 0 for success. Pass another status if your
                scheduler restarts the job on it.
            ledger: True to keep what each step was trained on, in the folder ``snapshot.pt.ledger``: half a kilobyte an
                epoch. `midepoch trace` reads it. Where not all loaders are trained on: the names of those that are.
            group: the processes that train together; None for all. It must support CPU tensors. If the default group
                does not (NCCL only), a gloo group is made.
            parts: what to save, by name, as in `keywords`; for names that are arguments of Snapshot themselves.
            keywords: what to save, by name: anything with ``state_dict`` and ``load_state_dict``. A model in
                DistributedDataParallel or compiled is saved as the module inside, so it can be loaded either way. For a
                loader, all ranks' states are saved; for everything else, rank 0's.

        Raises:
            TypeError: there is nothing to save, a part has no state, or a name is both in `parts` and a keyword.
            ValueError: an argument is out of range, or `ledger` does not say which of several loaders are trained on.
            MidepochError: signals are wanted, but this is not the main thread.
        """
        self.path = Path.cwd() / path  # also after a change of the working directory
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"every must be an int of at least 1 or None, got {every!r}")
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep must be an int of at least 1, got {keep!r}")
        self.steps = 0
        self._parts = merge(parts, keywords)
        self._every, self._exit_status = every, exit_status
        self._file = SnapshotFile(self.path, keep)
        trained = trained_loaders(ledger, self._parts)
        self._ledger = Ledger(self.path, trained) if trained else None
        self._agreement = Agreement(group)
        self._loop = EpochLoop(self._parts)
        self._unfollowed = Unfollowed()
        self._told_of_witnesses: set[str] = set()  # loaders whose ranks do not see the same data
        self._due = 0  # the step at which `step` does more than count
        self._in_flight = 0  # as the latest step had it, which was checked
        self._was_loaded = False
        self._steps_before = 0  # `steps` when the last loop ended, or at the load; -1 after a save
        self._owes_a_save = False  # to the end of the body
        # A whole run may be in an `except` clause. The exception's attributes stand for it: unlike itself they keep no
        # frame alive, and as long as they exist no other exception has the same.
        outer = sys.exception()
        self._made_in = None if outer is None else vars(outer)
        self._signals = Signals(signals, self._signalled)
        weakref.finalize(self, self._signals.drop).atexit = False

    # --- signals ---

    def _signalled(self) -> None:
        # With several ranks, the next agreement handles it at the same step on all of them.
        if self._agreement.next_step == NEVER:
            self._due = 0

    def close(self) -> None:
        """Restore the previous signal handlers, as deleting this object does. May be called twice."""
        self._signals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._signals.drop()

    # --- in the training loop ---

    def step(self, in_flight: int = 0) -> None:
        """Count a batch that has been trained on; save, and exit, if it is time.

        Args:
            in_flight: batches that were taken from the loaders but not trained on (a prefetcher holds them), at most
                1024. In a body of `epochs`, this applies to the loaders that are being read, not to a validation that
                has ended.

        Raises:
            ValueError: `in_flight` is not an int in [0, 1024].
            SystemExit: a signal was received, by some process, and the snapshot was saved.
            SnapshotError: it could not be saved, or nobody knows whose batches are in flight. The previous snapshot is
                intact.
        """
        if in_flight is not self._in_flight:  # now, not when a signal comes and nothing could be saved
            check_in_flight(in_flight)
            if in_flight > MOST_IN_FLIGHT:
                raise ValueError(f"in_flight must be at most {MOST_IN_FLIGHT}, got {in_flight}")
            self._in_flight = in_flight
        self.steps += 1
        body = self._loop.body
        if body is not None:
            body.clock += 1
            body.steps = body.steps[1], (body.clock, in_flight)
            if in_flight or body.kept.ahead or body.intervals[1:]:
                body.look()
        if self._ledger is not None:
            self._ledger.look(self._loop.loaders(), self.steps, in_flight, body)
        if self.steps >= self._due:
            self._act(in_flight)

    def _act(self, in_flight: int) -> None:
        ranks, agreement, body = self._agreement.ranks(), self._agreement, self._loop.body
        if body is None and self._loop.resumed is not None:
            self._tell_of_missing_body()
        if not ranks.rank:
            loaders = self._loop.loaders()
            if self._unfollowed.is_first and body is None and any(each._progress.body for each in loaders.values()):
                warn(
                    "loader.epochs beside a Snapshot ends an epoch without it: write `for epoch in "
                    "snapshot.epochs(n):`, which also loads, and saves the end of each body"
                )
            self._unfollowed.look(loaders, in_flight, body)
        stop = bool(self._signals.received)
        if ranks.size > 1:
            stop = agreement.should_stop(ranks, self.steps, stop, f"calls step() for step {self.steps}")
        is_due = self._owes_a_save or (self._every is not None and self.steps % self._every == 0)
        if is_due and not (stop or in_flight) and body is not None and body.only_the_rest_is_left:
            # A run that resumed here would have nothing to train on in this epoch. The body's end is a better place.
            self._owes_a_save = True
        elif stop or is_due:
            self._save(in_flight, by_step=True)
        if stop:
            self._leave(ranks, f"saved {self.path} after step {self.steps}")
        next_save = NEVER if self._every is None else self.steps - self.steps % self._every + self._every
        self._due = 0 if self._owes_a_save or self._unfollowed.is_due else min(next_save, agreement.next_step)
        if ranks.size == 1 and self._signals.received:  # a signal that arrived after the check above
            self._due = 0

    def poll(self) -> None:
        """Leave if a signal was received. The existing snapshot stays: not even `save` writes on the way out.

        Call it in long work between two passes, such as a validation, which `step` does not see. Every process must
        call it equally often: several processes exchange a number in each call.

        Raises:
            SystemExit: a signal was received by some process.
        """
        ranks, where = self._agreement.ranks(), f"calls poll() after step {self.steps}"
        if self._agreement.meet(ranks, where, float(bool(self._signals.received)))[0]:
            self._leave(ranks, f"{self.path} stays as it was saved last")

    def _leave(self, ranks: Ranks, what: str) -> None:
        """Raise SystemExit. `what` has become of the snapshot: nothing may stop this process from leaving."""
        if ranks.rank == 0:
            _logger.warning("a signal was received: %s; leaving", what)
        self._signals.kept = True  # this process is leaving, whatever signals follow
        for loader in self._loop.loaders().values():
            with contextlib.suppress(Exception):
                loader.close()  # or multiprocessing would end its workers, which torch reports as an error
        if ranks.size > 1:
            if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # several agents of torchrun
                # When a machine joins, each agent signals its own ranks as soon as it notices. If ranks left earlier,
                # on another rank's signal, their agent would believe that they had finished, and the job would
                # continue without them.
                self._signals.wait(_SECONDS_FOR_AN_AGENT_TO_SIGNAL)
            atexit.register(end_process, self._exit_status)
        raise SystemExit(self._exit_status)

    # --- epochs ---

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs of the run up to `n`. The first time, load the newest snapshot and continue from it:

            for epoch in snapshot.epochs(90):
                for batch in loader:
                    ...
                    snapshot.step()
                validate(model)
                schedule.step()

        An epoch ends with the loop's body, not with the last batch of a pass. So a run that is killed in `validate`
        resumes in the same epoch, and runs what follows the pass. Passes that had ended are then empty. The body may
        make any passes over any of the loaders, in the same order each time. What was read outside of such a loop, for
        a sanity check or a mean, counts for nothing if no `step`, `save`, `commit` or `finish` followed.

        Args:
            n: the number of epochs in all, those before a resume included.

        Raises:
            TypeError, ValueError: n is not an int of at least 0.
            MidepochError: such a loop is running already, or as `load`; when the first epoch is asked for.
        """
        check_epochs(n)
        return self._each_epoch(n)

    def _each_epoch(self, n: int) -> Iterator[int]:
        loop = self._loop
        if loop.body is not None:
            raise MidepochError(RUNNING)
        if not self._was_loaded:
            self._load()
        if loop.resumed is not None and loop.resumed.unknown:
            raise SnapshotError(
                f"the body that was left cannot be resumed: {loop.resumed.unknown}. Start this process again, "
                "which resumes from the snapshot, and read the loaders as one, with midepoch.combine"
            )
        first = loop.start(is_trained=self.steps != self._steps_before)
        if first > n:
            warn_of_done(n, first)
        try:
            for epoch in range(first, n):
                self._tell_of_left_body("going on")
                loop.begin(epoch, first=epoch == first)
                if epoch == first:
                    self._unfollowed.begin(loop.loaders())
                    self._due = 0  # its first step is to be looked at
                yield epoch
                self._end_body(epoch)
        finally:
            if loop.body is not None and self._owes_a_save and not self._signals.kept:
                what = "the body of epoch %s was left before its end, to which a save was put off: %s is unchanged"
                _logger.warning(what, loop.epoch, self.path)
            loop.leave()
            self._steps_before = self.steps

    def _end_body(self, epoch: int) -> None:
        """The body of an epoch has ended. Save what was put off, and leave if a signal was received."""
        loop, ranks = self._loop, self._agreement.ranks()
        body = loop.body
        assert body is not None  # that of the loop which calls this
        loop.finish(body)
        where = f"is at the end of the body, after step {self.steps}, {loop.record()}"
        # An abandoned iterator may be freed later on one rank than on another.
        stop, continues = self._agreement.meet(ranks, where, float(bool(self._signals.received)), float(loop.end(body)))
        if continues:
            # Nobody knows whether the next body goes on with that pass or begins another one; its first step will.
            self._owes_a_save = self._owes_a_save or bool(stop)
            self._due, self._agreement.next_step = 0, NEVER
        elif stop or self._owes_a_save:
            self._save(0)
            if stop:
                self._leave(ranks, f"saved {self.path} after epoch {epoch}")

    def _tell_of_left_body(self, what: str) -> None:
        """Say what becomes of a body that the loop has left. `what`: who goes on."""
        loop = self._loop
        # Whoever leaves on a signal has saved after that batch.
        if loop.was_left and loop.resumed is not None and not self._signals.kept and not self._agreement.ranks().rank:
            going = " and ".join(loop.resumed.open)  # which may have been left on purpose
            passes = f"what is left of the passes over {going}, and with " if going else ""
            told = "the body of epoch %s was left before its end: %s with %sthe rest of the body from its beginning"
            _logger.warning(told, loop.epoch, what, passes)

    # --- saving ---

    def save(self, in_flight: int = 0) -> None:
        """Save now. Every process must call it, after the same batch.

        In the body of an `epochs` loop it saves at once while a pass is being read. At the last batch of a pass, after
        the pass, or when the pass was left, it saves at the end of the body instead, and says so. If that end does not
        come, it does not save.

        While an exception is being handled (in `except`, in `finally`), nothing takes the place of that exception: if
        the state of `in_flight` batches ago is not known, a warning says that the present state is saved; if the save
        fails, a warning says why. Once `poll` or, on a signal, `step` has raised SystemExit, it saves nothing.

        Args:
            in_flight: as in `step`.

        Raises:
            SnapshotError: it could not be saved. Raised on every process, with the reason. The previous one is intact.
        """
        handled = self._handled()
        if self._signals.kept:
            return  # this process is leaving, from the place that the snapshot has
        try:
            if (body := self._loop.body) is not None:
                # An abandoned iterator may be freed later on one rank than on another.
                ranks, where = self._agreement.ranks(), f"calls save() after step {self.steps}"
                if self._agreement.meet(ranks, where, float(body.waits_for_the_end(in_flight)))[0]:
                    self._owes_a_save = True
                    on_the_way_out = "; or, on the way out, call it around the step, or after the loop over epochs"
                    warn(
                        "save() was called after the passes of a body, so the snapshot is written when the body of "
                        "snapshot.epochs ends, and is not written if an exception leaves the body: call save() before "
                        f"the last batch, or leave save() out and pass every={on_the_way_out if handled else ''}"
                    )
                    return
                if body.lead is not None:
                    self._loop.read_at_save = body.lead.name, body.lead.took
            self._tell_of_left_body("a run that resumes from this snapshot goes on")
            self._save(in_flight)
        except Exception as error:
            if handled is None:
                raise
            told = f"{self.path} was not saved after the {type(handled).__name__}"
            warn(f"{told}, and the previous snapshot is unchanged: {error}")

    def _handled(self) -> BaseException | None:
        """The exception that is being handled, if it came up after this object was made."""
        handled = sys.exception()
        return None if handled is None or vars(handled) is self._made_in else handled

    def _save(self, in_flight: int, by_step: bool = False) -> None:
        ranks = self._agreement.ranks()
        self._agreement.meet(ranks, f"saves after step {self.steps}")
        self._owes_a_save = False
        states, mine = contribute(self._parts, self._loop, in_flight, by_step, is_exact=self._handled() is None)
        offers = ranks.share(mine)
        problem = ""
        if ranks.rank == 0:
            try:
                content = joined(self._parts, states, offers, self.steps, self._told_of_witnesses)
                if self._ledger is not None:
                    self._file.check_owner()
                    content["ledger"] = self._ledger.write()
                self._file.write(content)
            except Exception as error:  # noqa: BLE001  # the other ranks wait for this one, and must hear of it
                problem = str(error)
                if not isinstance(error, MidepochError):
                    problem = f"{type(error).__name__}: {error}; {cure_of(error, self.path.parent)}"
                release_files(error)
                cause = error
        if self._agreement.meet(ranks, "has saved", float(bool(problem)))[0]:
            problem = ranks.share(problem)[0]
            raise SnapshotError(f"{self.path} was not saved, and the previous snapshot is unchanged: {problem}") from (
                cause if ranks.rank == 0 else None
            )
        self._file.claimed, self._steps_before = True, -1

    # --- loading ---

    def load(self) -> bool:
        """Load the newest sound snapshot. Every process must call it, with newly made parts. `epochs` does it itself.

        Returns:
            True if a snapshot was loaded; False if there is none. Then nothing is changed.

        Raises:
            SnapshotError: all snapshots are damaged, or some process cannot read what rank 0 reads, or a part does not
                fit. A loader, a model or an optimizer that does not fit is found before anything is changed.
            StateError: a loader does not fit. The parts are unchanged.
            MidepochError: this is the body of an `epochs` loop, which would go on with another epoch.

        Warns with MidepochWarning if the snapshot was saved after an epoch's last batch, outside `epochs`.
        """
        if self._loop.body is not None:
            raise MidepochError(
                "load() in the body of snapshot.epochs: leave the loop, call load(), and begin the loop again, which "
                "goes on where the snapshot stands"
            )
        loaded, resumed = self._load(), self._loop.resumed
        if resumed is not None and resumed.epoch is None and resumed.ends:
            self._tell_of_missing_body()
        return loaded

    def _tell_of_missing_body(self) -> None:
        """Warn that the program may leave out what followed the last batch of an epoch."""
        resumed, self._loop.resumed = self._loop.resumed, None
        if resumed is not None and (resumed.ends or any(resumed.empty.values())):
            warn(
                f"{self.path} was saved after the last batch of an epoch. If your loop did more in that epoch (a "
                "validation, schedule.step()), the resumed run leaves it out: write `for epoch in snapshot.epochs(n):` "
                "around it, which ends an epoch with its body",
            )

    def _load(self) -> bool:
        self._was_loaded = True
        ranks = self._agreement.ranks()
        found: Found | SnapshotError | None = None
        if ranks.rank == 0:
            try:
                found = find(self.path)
            except SnapshotError as error:
                found = error
        found = ranks.share(found)[0]
        if isinstance(found, SnapshotError):
            raise found
        if found is None:
            self._file.claimed = True
            return False
        if ranks.rank == 0 and found.damaged:
            warn(f"{'; '.join(found.damaged)}: loading the previous snapshot, {found.path}")
        content: dict[str, Any] = {}
        failed: Exception | None = None
        try:
            content = read_fitting(found, self._parts, ranks.rank)
        except MidepochError as error:
            failed = error
        except Exception as error:  # noqa: BLE001  # the other ranks must hear of it
            failed = SnapshotError(
                f"{found.path} does not fit ({type(error).__name__}: {error}): make the parts as in the run that saved "
                "it, or restore a copy that was not edited"
            )
        problems = ranks.share(failed and str(failed))
        if failed is not None:
            raise failed
        for rank, told in enumerate(problems):
            if told is not None:
                raise SnapshotError(f"rank {rank} could not load {found.path}: {told}")
        apply(content, self._parts)
        self._loop.load(content["body"])
        if content["generators"] is not None:
            set_generators(content["generators"])
        else:
            # The snapshot does not know this rank. The key depends on the step, so its generators differ from those of
            # any process that had this rank before.
            seed_generators(derive_key(_KEY, content["seed"], ranks.rank, content["steps"]))
        self.steps = self._steps_before = content["steps"]
        self._agreement.next_step, self._due = NEVER, 0
        self._owes_a_save = False
        if self._ledger is not None:
            self._ledger.begin(content["ledger"], self.steps)
        elif content["ledger"] and not ranks.rank:
            warn(f"the ledger of {self.path} ends here: pass ledger=True to midepoch.Snapshot to go on with it")
        self._unfollowed.begin({})
        self._file.take_over(found)
        return True
