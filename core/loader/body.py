"""The body of an `epochs` loop, in which an epoch ends with the body, not with the last batch of a pass.

What a run that resumes must know of the body that it runs again is a function of intervals: each pass lasts from its
first batch to its end on one clock, which ticks when a pass begins, takes a batch or ends, and at each step. Six rules:

1. The first pass begun in a body is a *lead*; the next lead is the first one begun after that one's life. All others
   are inner. Passes begun in an earlier body are neither, nor are those of an iterator for the whole run: one that was
   made before the loop and first read in a body, and those that are begun where it ends.
2. A pass lives until it ends. If batches were in flight when it was read to its end, it lives until a step reports
   none, or no fewer than the step before. If no step came before its end, and no other pass, the first one tells.
3. At a resume, leads whose life is over are empty; inner passes are not counted.
4. All open passes continue; the living lead starts as many batches earlier as are in flight.
5. A saved pass that the body, run again, has not continued is dropped: an inner one when the lead ends, any other at
   the body's end. If the first pass that is not empty is not the lead's, all these are dropped at once. But the rest
   of a loader whose iterator was made before the body, and waits, is that iterator's.
6. What intervals cannot tell is a warning, and a record that says so: only loading it is refused.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..errors import warn

__all__ = ["ALONE", "RUNNING", "Body", "Interval", "Record", "check_epochs", "warn_of_done"]

ALONE = "the loader"
"""The name of a loader in a body of its own loop."""
RUNNING = (
    "a loop over epochs is running already: leave it before the next one. If `break` or an exception has left it, "
    "something still holds its iterator (a variable, a progress bar): call close() on what epochs() has returned"
)


@dataclass(eq=False)
class Interval:
    """A pass over a loader."""

    name: str  # of the loader
    began: int  # the clock, as in the next two
    took: int = 0  # its latest batch
    ended: int | None = None  # None while it is open
    exhausted: bool = False  # it ended by StopIteration, not because its iterator was freed
    older: bool = False  # begun in an earlier body, or by an iterator made before the body: no body makes it again
    outlived: bool = False  # its iterator was made in an earlier body
    stepped: int = 0  # the latest step before its end
    in_flight: bool = False  # batches were in flight at that step
    settled: int | None = None  # the first step after its end at which none was in flight
    resumed: bool = False  # it took up the rest of a pass that was open when the resumed snapshot was saved
    user: weakref.ref[Any] | None = None  # the pass; it notices when that is freed
    body: Body | None = None  # that hears of its end; None from then on

    @property
    def life(self) -> float:
        """Until when it lasts for the body, by rule 2."""
        if self.ended is None:
            return math.inf
        if not (self.exhausted and self.in_flight):
            return self.ended
        return math.inf if self.settled is None else self.settled


@dataclass
class Record:
    """What a snapshot keeps of the loop over epochs in which it is saved. Loaders are named."""

    epoch: int | None = None  # whose body is running, or will be next; None without such a loop
    ends: bool = False  # without such a loop: saved after an epoch's last batch, by `Snapshot.step`
    empty: dict[str, int] = field(default_factory=dict)  # passes that the body makes again, and that give nothing
    open: list[str] = field(default_factory=list)  # loaders whose passes continue
    left: list[str] = field(default_factory=list)  # whose passes have all ended, so the next one begins an epoch
    lead: str | None = None  # the loader of the pass that the body is in
    within: list[str] = field(default_factory=list)  # loaders with open passes that began within it
    ahead: list[str] = field(default_factory=list)  # that are read ahead, perhaps before the first step after a resume
    unknown: str = ""  # why a run cannot resume here; empty if it can

    @property
    def rests(self) -> set[str]:
        """The loaders with open passes that began in the body."""
        return {*self.within, *([] if self.lead is None else [self.lead])}

    @property
    def begun(self) -> dict[str, int]:
        """By loader, how many passes that the body makes one after the other have begun."""
        names = sorted({*self.open, *self.left})
        return {name: self.empty.get(name, 0) + (name == self.lead) for name in names}

    def __str__(self) -> str:
        """For messages."""
        if self.epoch is None:
            return "outside a loop over epochs"
        begun = ", ".join(f"{name} ({count})" for name, count in self.begun.items())
        return f"in epoch {self.epoch}, {f'with passes over {begun}' if begun else 'before any pass'}"


class _Progress(Protocol):
    """What a body asks of a loader."""

    new_epoch: bool

    @property
    def is_at_end(self) -> bool: ...

    @property
    def is_awaited(self) -> bool: ...


class Body:
    """The passes over the loaders of one body."""

    def __init__(
        self,
        loaders: Mapping[str, _Progress],
        resumed: Record | None = None,  # of the snapshot from which the body is run again
        before: Body | None = None,  # the body before this one: passes that are still open continue
        awaited: dict[str, bool] | None = None,  # of earlier loops
        left: bool = False,  # the record is of a body that this process has left, perhaps its passes on purpose
    ) -> None:
        self.loaders, self.left = loaders, left
        # What a record has besides: what the resumed body had open, and this one has not come to yet; the loaders that
        # are read ahead; those over which passes have ended; what intervals could not tell.
        self.kept = Record() if resumed is None else copy.deepcopy(resumed)
        # By loader, in this body or before it: True if an iterator for the whole run reads it, False if such
        # passes were not taken up.
        self.awaited: dict[str, bool] = ({} if before is None else before.awaited) if awaited is None else awaited
        self.clock = 0
        self.steps = (0, 0), (0, 0)  # the latest two: the clock, and how many batches were in flight
        # In the order of their beginnings; of the inner ones, those that are open.
        self.intervals: list[Interval] = []
        for each in [] if before is None else before.intervals:
            if each.ended is None:
                each.outlived, each.older = each.outlived or not each.older, True
                each.began, each.took, each.body = 0, 0, self
                self.intervals.append(each)

    # --- what happens ---

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def next_is_empty(self, name: str) -> bool:
        """Whether the pass over this loader that begins next had ended before the resume, and gives nothing."""
        return self.kept.empty.get(name, 0) > 0

    def pass_empty(self, name: str) -> None:
        """A pass has begun that gives nothing."""
        self.kept.empty[name] -= 1
        self._add(Interval(name, self._tick(), self.clock, self._tick(), exhausted=True))

    def before_begin(self, name: str) -> None:
        """A pass is about to begin: by rule 5, what the body has gone past is left."""
        kept = self.kept
        if kept.lead not in (None, name) and (name in kept.rests or name not in kept.open):
            self._leave_rests()

    def begin(self, name: str, user: Any, older: bool, outlived: bool = False) -> Interval:
        """A pass takes its first batch.

        Args:
            name: of the loader.
            user: the pass.
            older: its iterator was made before the body began.
            outlived: it was made in an earlier body.
        """
        kept, is_rest = self.kept, name in self.kept.rests
        older = older or (name in kept.open and not is_rest)
        interval = Interval(name, self._tick(), older=older, outlived=outlived, resumed=is_rest and not self.left)
        kept.open = [each for each in kept.open if each != name]
        kept.within = [each for each in kept.within if each != name]
        kept.lead = None if kept.lead == name else kept.lead
        self._add(interval)

        def freed(_: weakref.ref[Any]) -> None:
            if interval.body is not None:
                interval.body.end(interval, exhausted=False)

        interval.user = weakref.ref(user, freed)
        return interval

    def _add(self, interval: Interval) -> None:
        self.intervals.append(interval)
        interval.body = self if interval.ended is None else None
        if self.alone and not interval.older and sum(not each.older for each in self.intervals) == 2:
            warn(
                "this is a second pass over the loader in one body of loader.epochs, and a state does not say in "
                "which pass it was saved: use midepoch.Snapshot and snapshot.epochs, or one pass an epoch",
            )

    @property
    def alone(self) -> bool:
        """Whether there is no record: a state knows of one pass only."""
        return ALONE in self.loaders

    @property
    def passes(self) -> int:
        """How many have given a batch in it, where it is alone."""
        return sum(each.took > 0 for each in self.intervals)

    def end(self, interval: Interval, exhausted: bool) -> None:
        """A pass was told that it has no more batches, or was closed or freed."""
        if interval.ended is not None:
            return
        if self.lead is interval:
            self._leave_rests()
        now, in_flight = self.steps[1]
        ahead = in_flight > 0 if now > interval.began else interval.name in self.kept.ahead
        interval.exhausted, interval.in_flight = exhausted, exhausted and not interval.older and ahead
        interval.ended, interval.stepped = self._tick(), now
        interval.body = None  # a cycle would keep worker processes of a loader that is dropped

    def look(self) -> None:
        """See what the latest step shows."""
        (previous, before), (now, in_flight) = self.steps
        for each in self.intervals:
            if each.in_flight and each.settled is None:
                # If another pass is read, or they do not become fewer, those in flight of this one were dropped.
                others = any(
                    one.ended is None and not one.older and one.began > (each.ended or 0) for one in self.intervals
                )
                if not in_flight:
                    each.settled = now
                elif others or 0 < before <= in_flight:
                    each.settled = each.ended
        (leads, lead), kept = _leads_of(self.intervals), self.kept
        if in_flight and lead is None and leads == self.intervals and len(leads) == 1:
            only = leads[0]
            if only.exhausted and previous < only.began < only.took:  # all of it was read before its first step
                only.in_flight, lead = True, only
        if in_flight and lead is not None and lead.name not in kept.ahead:
            kept.ahead.append(lead.name)
        if not kept.unknown:
            kept.unknown = _unknown_from(self.intervals, previous, in_flight)
            if kept.unknown:
                warn(
                    f"a snapshot saved in this body cannot be resumed: {kept.unknown}. Read the loaders as one, with "
                    "midepoch.combine"
                )
        # By now it is known what an inner pass has been; that it ended says nothing later.
        over = [each for each in self.intervals if each.ended is not None and all(each is not one for one in leads)]
        for each in (each for each in over if not each.older):  # `read_on` and `leave` ask for those
            self.intervals.remove(each)
            kept.left.append(each.name)

    def leave(self) -> None:
        """The body has ended."""
        if self.steps[1][0]:
            self.steps = self.steps[1], (self._tick(), 0)
            self.look()
        self._leave_rests()
        last = {each.name: each.ended for each in self.intervals if each.older}
        for name, ended in last.items():
            if ended is not None and self.awaited.get(name):  # it was told that it has ended, and nothing follows it
                del self.awaited[name]

    def _leave_rests(self) -> None:
        """By rule 5: the next passes over these loaders begin new epochs."""
        kept = self.kept
        gone = {name for name in kept.rests if not self.loaders[name].is_awaited}
        for name in gone:
            self.loaders[name].new_epoch = True
        kept.open, kept.left = [each for each in kept.open if each not in gone], [*kept.left, *gone]
        kept.lead, kept.within = None, []
        for name in gone:
            if not self.loaders[name].is_at_end:  # otherwise nothing was left of it
                self.awaited.setdefault(name, False)

    # --- what follows from it ---

    @property
    def lead(self) -> Interval | None:
        """The pass that the body is in."""
        return _leads_of(self.intervals)[1]

    def in_flight_of(self, name: str, in_flight: int) -> int:
        """How many of the batches in flight are of this loader: they are the lead's."""
        lead = self.lead
        if lead is None:
            return in_flight if any(each.older and each.name == name for each in self.intervals) else 0
        return in_flight if lead.name == name else 0

    @property
    def read_on(self) -> list[str]:
        """The loaders whose iterators were made in an earlier body and were asked for more in this one.

        Or were made in this one and outlive it, and their rest was dropped when the run was resumed. Not those of an
        iterator for the whole run: a run that resumes makes it again, and it takes up the rest.
        """
        own = [each for each in self.intervals if each.ended is None and not each.older]
        outlived = [each.name for each in self.intervals if each.outlived and each.took]
        names = [*outlived, *(each.name for each in own if each.name in self.awaited)]
        return [name for name in names if not self.awaited.get(name)]

    @property
    def is_read(self) -> bool:
        """Whether a pass of this body is in the middle of its epoch."""
        lead = self.lead
        return lead is not None and lead.ended is None and not self.loaders[lead.name].is_at_end

    @property
    def only_the_rest_is_left(self) -> bool:
        """Whether a pass of this body has come to its last batch, and none is in the middle of its epoch."""
        names = {*(each.name for each in self.intervals), *self.kept.left}
        return not self.is_read and any(self.loaders[name].is_at_end for name in names)

    def waits_for_the_end(self, in_flight: int) -> bool:
        """Whether the passes of this body have ended or come to their last batches. Not if none has begun.

        When an abandoned iterator is freed, so that its pass has ended, differs from rank to rank.
        """
        if self.is_read or not any(not each.older for each in self.intervals):
            return False
        return not in_flight or self.lead is None

    def record(self, interrupted: bool = False) -> Record:
        """By rules 3 and 4, of a snapshot that is saved now.

        `interrupted`: passes that were left with the body continue in the next.
        """
        kept, intervals = self.kept, self.intervals
        if interrupted:
            happened = [max(each.began, each.took, (each.ended or 0) * each.exhausted) for each in intervals]
            latest = max([self.steps[1][0], *happened])
            freed = [each for each in intervals if not each.exhausted and (each.ended or 0) > latest]
            intervals = [replace(each, ended=None) if each in freed else each for each in intervals]
        leads, lead = _leads_of(intervals)
        empty = Counter({name: count for name, count in kept.empty.items() if count})
        empty.update(each.name for each in leads if each is not lead)
        going_on = [each for each in intervals if each.ended is None or each is lead]
        opened = {*(each.name for each in going_on), *kept.open}
        inner = [] if lead is None else [each for each in going_on if not each.older and each.began > lead.began]
        name = lead.name if kept.lead is None and lead is not None else kept.lead
        return Record(
            empty=dict(empty),
            open=sorted(opened),
            left=sorted({*(each.name for each in self.intervals), *kept.left} - opened),
            lead=name,
            within=sorted({*(each.name for each in inner), *kept.rests} - {name}),
            ahead=sorted(kept.ahead),
            unknown=kept.unknown or _unknown_from(self.intervals, self.steps[1][0], 0),
        )


def _leads_of(intervals: Sequence[Interval]) -> tuple[list[Interval], Interval | None]:
    """By rule 1, the passes that a body makes one after the other, and the one that lives.

    `intervals`: in the order of their beginnings.
    """
    leads: list[Interval] = []
    for each in intervals:
        if not each.older and (not leads or each.began > leads[-1].life):
            leads.append(each)
    return leads, leads[-1] if leads and math.isinf(leads[-1].life) else None


def _unknown_from(intervals: Sequence[Interval], previous: int, in_flight: int) -> str:
    """Why nobody can tell what the body would make again, by rule 6; empty if it can be told.

    Args:
        intervals: in the order of their beginnings.
        previous: the step before the latest.
        in_flight: batches, at the latest step.
    """
    leads, lead = _leads_of(intervals)
    inner = [each for each in intervals if not each.older and all(each is not one for one in leads)]
    opened = [each for each in inner if each.ended is None]
    if in_flight and lead is None and not any(each.older and each.ended is None for each in intervals):
        of_any = "these batches may be of any that has ended (it is known if less than an epoch is read ahead)"
        return f"in_flight={in_flight}, but no pass is read: {of_any}"
    if in_flight and lead is not None and opened:
        return f"in_flight={in_flight} while {lead.name} and {opened[0].name} are both read"
    for each in inner:
        outer = [one for one in leads if one.began < each.began][-1]
        end = outer.life
        if end < math.inf and (each.took > end or (each.exhausted and each.ended is not None and each.ended > end)):
            return f"{each.name} was read on after the end of the pass over {outer.name} in which it began"
        was_open = each.ended is not None and (each.resumed or each.stepped > each.began)
        if was_open and outer is lead and outer.ended is None and all(each.name != one.name for one in opened):
            return f"a pass over {each.name} ended within one over {lead.name} that continues, as in zip_longest"
    if lead is not None and lead.took < previous and any(each.took > previous > each.began for each in inner):
        return f"step() was called in a loop within the pass over {lead.name}, and counts only outside of it"
    for each in leads:
        left_after_step = each.ended is not None and not each.exhausted and each.stepped > each.took
        if left_after_step and any(one.name == each.name and one.began > (each.ended or 0) for one in intervals):
            return f"a pass over {each.name} was left right after a step, and {each.name} is read again"
    return ""


def check_epochs(n: object) -> None:
    """Raise TypeError or ValueError unless `n` is a number of epochs."""
    if type(n) is not int:
        raise TypeError(f"epochs takes the number of epochs in all, an int, got {n!r}")
    if n < 0:
        raise ValueError(f"epochs takes the number of epochs in all, at least 0, got {n}")


def warn_of_done(n: int, done: int) -> None:
    """Warn that more epochs are done than were asked for."""
    warn(f"epochs({n}) runs nothing, because {done} epochs are done: pass the number of epochs in all")
