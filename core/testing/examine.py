"""The examination of one loader: where it is run, what it is asked to do, and how results are compared."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from . import items, record
from .naming import UNNAMED, Column, Naming, View, choose, with_contents
from .pool import Call, ProcessError, ProcessPool, shared_pool
from .record import Failure, Pass, Recording, Seen, Settings, Trial
from .report import InapplicableError, LawError

__all__ = ["Examination", "Place", "Resume"]

Method = TypeVar("Method", bound=Callable[..., Any])
Place = tuple[int, int]
"""An epoch, and the batches taken of it."""


def _once(method: Method) -> Method:
    """Keep what a method of `Examination` returns, for each choice of arguments: several laws use the same runs."""

    @functools.wraps(method)
    def kept(self: Examination, *asked: Any, **named: Any) -> Any:
        key = (method.__name__, *asked, *sorted(named.items()))
        if key not in self._memory:
            self._memory[key] = method(self, *asked, **named)
        return self._memory[key]

    return cast(Method, kept)


@dataclasses.dataclass(frozen=True)
class Resume:
    """A resume of the uninterrupted run ``head``. ``inside``: not at an epoch's end; ``where``: " on" a rank, or so."""

    head: Recording
    recording: Recording
    epoch: int
    cut: int
    inside: bool
    where: str = ""


class Examination:
    """The examination of one loader: runs it where a law asks, and keeps the runs that several laws use.

    Process 0 plays the process that is interrupted: it makes the uninterrupted runs and the states to resume from.
    Single-process resumes run in the other processes. Rank r of a world runs in process r.
    """

    def __init__(self, settings: Settings, pool: ProcessPool | None = None) -> None:
        self.settings = settings
        self.pool = pool or shared_pool()
        self._parameters = inspect.signature(settings.make_loader).parameters
        self.broken: list[str] = []  # the laws found broken so far, but `transparent`
        self._varied: dict[str, Any] = {}  # options of make_loader that the law has set
        self._memory: dict[Hashable, Any] = {}
        self._law = self._cause = self._cure = ""

    # What make_loader can do.

    def takes(self, option: str) -> bool:
        """Whether make_loader has a parameter of this name that may be used. ``**keywords`` does not count."""
        allowed = self.settings.options is None or option in self.settings.options
        return allowed and option in self._parameters

    def default(self, option: str) -> Any:
        """The default of a parameter of make_loader; None if it has no integer as one."""
        value = self._parameters[option].default
        return value if type(value) is int else None

    def options(self, rank: int = 0, world_size: int = 1, **more: Any) -> dict[str, Any]:
        """The keywords for make_loader."""
        place = {"rank": rank, "world_size": world_size}
        self._varied.update(more)
        return {name: value for name, value in place.items() if self.takes(name)} | more

    @property
    def worlds(self) -> tuple[int, ...]:
        """The world sizes that can be examined, always with 1."""
        if not (self.takes("rank") and self.takes("world_size")):
            return (1,)
        return tuple(sorted({1, *self.settings.world_sizes}))

    @property
    def ranks_end_apart(self) -> bool:
        """Whether a rank of several that finds nothing left ends its pass, since others may have batches left."""
        return self.settings.tail == "uneven" and self.capability("rank_independent")[0] is False

    def capability(self, name: str, **options: Any) -> tuple[bool | None, str]:
        """(yes or no, reason) as a loader with these options declares it; (None, ...) if it declares nothing."""
        declared = self._declared(**options)
        return (None, "the loader declares no capabilities") if declared is None else declared[name]

    @_once
    def _declared(self, **options: Any) -> dict[str, tuple[bool, str]] | None:
        found: dict[str, tuple[bool, str]] | None
        (found,) = self.run([(0, record.read_capabilities, (self.settings, self.options(**options)))])
        return found

    # Judging.

    @property
    def named(self) -> Settings:
        """The settings, with a function that names samples: the one given, or one derived from batches."""
        return self.settings if self.settings.identify is not None else self._with_names()

    @property
    def naming(self) -> Naming | None:
        """The derived way to name samples; None if one was given."""
        return self.named.identify if isinstance(self.named.identify, Naming) else None

    def need_names(self) -> None:
        """Raise `InapplicableError` if samples have no names, because then no law can tell which are there."""
        if self.naming is not None and self.naming.blind:
            raise InapplicableError(UNNAMED)

    def compares_by_ids(self) -> bool:
        """Whether batches are compared by the samples they hold alone, since random numbers are declared to be lost.

        Raises:
            InapplicableError: they are, and samples have no names.
        """
        if self.capability("exact_augmentations")[0] is not False:
            return False
        self.need_names()
        return True

    @_once
    def _with_names(self) -> Settings:
        found = self.run([(0, record.experiment, (record.read_views, (self.settings, self.options(), 2, ())))])[0]
        naming: Naming | None = Naming()
        if not isinstance(found, Failure):  # the law itself will fail the same way
            (first, second), paddings, ragged = found
            random = self.capability("exact_augmentations")[0] is False
            other: View | None = None
            naming = choose(first, second, None, random)
            if naming is None:
                other = self._shared_otherwise(paddings)
                naming = choose(first, second, other, random)
            naming = with_contents(naming or Naming(), paddings, ragged, first, other or second)
        return dataclasses.replace(self.settings, identify=naming)

    def _shared_otherwise(self, paddings: Sequence[Column]) -> View:
        """The first epoch on more ranks, or with another batch size, or with workers; empty if none is possible."""
        variants = [self.options(rank, self.worlds[-1]) for rank in range(self.worlds[-1])]
        if len(variants) == 1 and self.takes("batch_size") and self.default("batch_size") is not None:
            variants = [self.options(batch_size=self.default("batch_size") + 1)]
        elif len(variants) == 1:
            variants = [self.options(num_workers=self.most_workers)] if self.most_workers else []
        asked = [(record.read_views, (self.settings, each, 1, paddings)) for each in variants]
        shared: View = {}
        for found in self.run([(rank, record.experiment, each) for rank, each in enumerate(asked)]):
            if not isinstance(found, Failure):
                for column, batches in found[0][0].items():
                    shared[column] = shared.get(column, []) + batches
        return shared

    def begin(self, law: str = "", cause: str = "", cure: str = "") -> None:
        """Attribute later failures to ``law``."""
        self._law, self._cause, self._cure = law, cause, cure
        self._varied.clear()

    def error(
        self, expected: str, got: str, epoch: int | None = None, batch: int | None = None,
        cause: str | None = None, cure: str | None = None,
    ) -> LawError:  # fmt: skip
        """The error to raise, with the law's own cause and cure unless others are given."""
        return LawError(self._law, epoch, batch, expected, got, cause or self._cause, cure or self._cure)

    def explained(self, error: LawError) -> LawError:
        """``error``, with a note on how make_loader's parameters were understood, and on the process's seeds."""
        taken = "; ".join(f"{name} for {record.OPTIONS[name]}" for name in self._varied)
        if taken:
            note = f"The laws used these parameters of make_loader: {taken}. If one means something else"
            error = dataclasses.replace(error, cure=f"{error.cure}. {note}, pass options= without it")
        if ("_heads", 1, False) not in self._memory:
            return error
        try:
            head, other = self.observed(), self._under_later_seeds()
        except LawError:
            return error
        if other.failure is not None or other.passes[0].batches == head.passes[0].batches:
            return error
        cause = f"{error.cause}. This loader depends on the global seeds of its process, and a resume has others"
        cure = f"{error.cure}. Keep the seed in the state, and let make_loader make random data with a fixed seed"
        return dataclasses.replace(error, cause=cause, cure=cure)

    @_once
    def _under_later_seeds(self) -> Recording:
        return self.record([self.trial(later=True)], process=1)[0]

    def sound(
        self, recording: Recording, expected: str, epoch: int | None = None, batch: int | None = None
    ) -> Recording:
        """Return ``recording`` if the loader did not fail; otherwise raise the law's error."""
        if recording.failure is not None:
            if epoch is None and recording.passes:
                epoch, batch = len(recording.passes) - 1, len(recording.passes[-1].batches)
            raise self.error(expected, recording.failure.whole, epoch, batch)
        return recording

    def same(
        self, expected: Sequence[Seen], got: Sequence[Seen], what: str, epoch: int | None = None, first: int = 0,
        *blame: str, by_ids: bool = False,
    ) -> None:  # fmt: skip
        """Raise the law's error unless both are equal: bit for bit, or ``by_ids`` in the samples they hold.

        ``first`` is the number in its epoch of the first batch in ``expected``. If the loader declares that its
        augmentations are not exact, only the samples are compared. ``blame``: a cause and a cure other than the law's.
        """
        if by_ids:
            self.need_names()
        by_ids = by_ids or self.compares_by_ids()
        for offset, (one, other) in enumerate(zip(expected, got, strict=False)):
            if (one.ids != other.ids) if by_ids else (one.digest != other.digest):
                differs = items.first_difference(one.leaves, other.leaves)
                texts = (f"samples {one.ids}", f"samples {other.ids}") if by_ids else differs
                raise self.error(f"{what}: {texts[0]}", texts[1], epoch, first + offset, *blame)
        if len(expected) != len(got):
            at = min(len(expected), len(got))
            surplus = f", the first surplus one: samples {got[at].ids}" if len(got) > at else ""
            wrong = f"{what}: {len(expected)} batches", f"{len(got)} batches{surplus}"
            raise self.error(*wrong, epoch, first + at, *blame)

    def same_passes(self, expected: Sequence[Pass], got: Sequence[Pass], what: str) -> None:
        """`same` for each of the epochs from the first on."""
        for epoch, (one, other) in enumerate(zip(expected, got, strict=True)):
            self.same(one.batches, other.batches, what, epoch)

    def same_rest(self, resume: Resume, by_ids: bool = False) -> None:
        """Raise the law's error unless a resume succeeds, and its first pass is the rest of the epoch that was cut."""
        epoch, cut = resume.epoch, resume.cut
        got = self.sound(resume.recording, f"a resume after {cut} batches", epoch, cut).passes[0].batches
        what = f"after a cut at batch {cut}{resume.where}, the batch of the uninterrupted run"
        self.same(resume.head.passes[epoch].batches[cut:], got, what, epoch, cut, by_ids=by_ids)

    def same_state(self, expected: Any, got: Any, what: str, epoch: int, batch: int, *blame: str) -> None:
        """Raise the law's error unless both states are equal. ``blame`` as for `same`."""
        if items.digest(expected) != items.digest(got):
            texts = items.first_difference(items.leaves(expected), items.leaves(got))
            raise self.error(f"{what}: {texts[0]}", texts[1], epoch, batch, *blame)

    # Running.

    def start(self) -> None:
        """Start the first process. Every law would fail without it.

        Raises:
            ProcessError: it did not start, as in a script without ``if __name__ == "__main__":``.
        """
        self.pool.run([Call(0, dict)], timeout=self.settings.timeout)

    def run(self, calls: Sequence[tuple[int, Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
        """The results of (process, function, arguments). A crash, a hang or an unexpected error is the law's error."""
        try:
            return self.pool.run([Call(*call) for call in calls], timeout=self.settings.timeout)
        except ProcessError as error:
            raise self.error("the loader to answer", str(error)) from error

    def trial(self, options: Mapping[str, Any] | None = None, **more: Any) -> Trial:
        """A `Trial` with these settings, in a world of one unless there are options."""
        return Trial(self.named, self.options() if options is None else options, **more)

    def record(self, trials: Sequence[Trial], process: int = 0) -> list[Recording]:
        """Run trials one after another in one process."""
        return cast("list[Recording]", self.run([(process, record.record_many, (trials,))])[0])

    def resume(self, trials: Sequence[Trial]) -> list[Recording]:
        """Run trials in processes other than 0, in parallel. The results keep their order."""
        processes = (1, 2) if self.worlds[-1] > 2 else (1,)
        shares = [trials[number :: len(processes)] for number in range(len(processes))]
        calls = [(process, record.record_many, (share,)) for process, share in zip(processes, shares, strict=True)]
        results: list[Recording] = [Recording()] * len(trials)
        for number, recordings in enumerate(self.run(calls)):
            results[number :: len(processes)] = recordings
        return results

    def resume_from(
        self, head: Recording, places: Sequence[Place], followed: Collection[Place], **options: Any
    ) -> list[Recording]:
        """A resume from each of ``places`` in a run: one pass; for the places in ``followed``, two."""
        longest = 2 * sum(sum(map(len, part.ids)) for part in head.passes) + 1
        trials = []
        for epoch, cut in places:
            state, passes = head.passes[epoch].states[cut], 1 + ((epoch, cut) in followed)
            trials.append(self.trial(self.options(**options), state=state, passes=passes, limit=longest))
        return self.resume(trials)

    def on_ranks(self, world_size: int, trials: Callable[[int], Sequence[Trial]], group: bool) -> list[list[Recording]]:
        """Run ``trials(rank)`` on every rank at once, each in its own process; with ``group``, in a process group."""
        with tempfile.TemporaryDirectory(prefix="midepoch-") as folder:
            meeting = str(Path(folder) / "meeting") if group else ""
            calls = [(rank, record.in_group, (meeting, rank, world_size, trials(rank))) for rank in range(world_size)]
            return self.run(calls)

    def investigate(
        self, function: Callable[..., Any], *arguments: Any, options: Mapping[str, Any] | None = None, process: int = 0,
        refusal: str = "",
    ) -> Any:  # fmt: skip
        """The result of ``function(settings, options, *arguments)`` in a process. An exception is the law's error.

        One of the class named ``refusal`` is returned as a `Failure`.
        """
        asked = (function, (self.named, self.options() if options is None else options, *arguments))
        (result,) = self.run([(process, record.experiment, asked)])
        if isinstance(result, LawError):
            raise self.error(result.expected, result.got, result.epoch, result.batch, result.cause, result.cure)
        if isinstance(result, Failure) and refusal not in result.kinds:
            raise self.error("no exception", result.whole)
        return result

    # --- runs that several laws use ---

    def whole(self) -> Recording:
        """An uninterrupted run in process 0, without asking for states: one epoch more than are cut."""
        recording = self.sound(self._whole(), "an uninterrupted run")
        if not recording.passes[0].batches:
            raise ValueError("make_loader gives a loader without a single batch, so nothing can be cut; make it larger")
        return recording

    @_once
    def _whole(self) -> Recording:
        return self.record([self.trial(passes=self.settings.epochs + 1)])[0]

    def heads(self, world_size: int = 1) -> list[Recording]:
        """The run of `whole` on each rank of a world, with a state after every batch."""
        recordings = self._heads(world_size, world_size > 1 and self.gathers())
        for rank, recording in enumerate(recordings):
            self.sound(recording, f"an uninterrupted run that asks for states, on rank {rank} of {world_size}")
        return recordings

    @_once
    def _heads(self, world_size: int, group: bool) -> list[Recording]:
        def head(rank: int) -> list[Trial]:
            return [self.trial(self.options(rank, world_size), passes=self.settings.epochs + 1, states=True)]

        return [recordings[0] for recordings in self.on_ranks(world_size, head, group)]

    def gathers(self) -> bool:
        """Whether the ranks' states must be gathered, because each rank declares to know only its part."""
        return self.capability("rank_independent")[0] is False

    def observed(self) -> Recording:
        """The run of `whole` in a world of one, with a state after every batch."""
        return self.heads()[0]

    def interior(self, recording: Recording, epoch: int, *, few: bool = False) -> list[int]:
        """The cuts strictly inside an epoch, in batches taken: all of them, the given ones, or three."""
        count = len(recording.passes[epoch].batches)
        cuts = [cut for cut in self.settings.cuts or range(1, count) if 0 < cut < count]
        if (few or self.settings.quick) and len(cuts) > 3:
            cuts = [cuts[0], cuts[len(cuts) // 2], cuts[-1]]
        return cuts

    def places(self, head: Recording) -> list[Place]:
        """A few (epoch, cut) inside each epoch."""
        return [(epoch, cut) for epoch in range(self.settings.epochs) for cut in self.interior(head, epoch, few=True)]

    def followed(self, places: Sequence[Place]) -> set[Place]:
        """Those of `places` after which the next epoch is checked too: one in each epoch, to save time."""
        by_epoch: dict[int, list[Place]] = {}
        for place in places:
            by_epoch.setdefault(place[0], []).append(place)
        return {cuts[len(cuts) // 2] for cuts in by_epoch.values()}

    def resume_world(
        self, heads: Sequence[Recording], places: Sequence[Place], world_size: int, followed: Collection[Place] = ()
    ) -> list[list[Recording]]:
        """`resume_from` on each rank of a new world, from ``places`` in the run of an old world."""
        independent = self.capability("rank_independent")[0]  # where nothing is declared, each rank's own state
        longest = sum(len(part.batches) for part in heads[0].passes) * len(heads) + 1

        def trials(rank: int) -> list[Trial]:
            result = []
            for epoch, cut in places:
                # If ranks are independent, any rank's state must do, so they take turns. At the end of an epoch in
                # which ranks have unequal counts, only the state after the rank's last batch is the epoch's end.
                able = [head for head in heads if len(head.passes[epoch].batches) >= cut]
                source = able[(epoch + cut) % len(able)] if independent else heads[rank % len(heads)]
                state = source.passes[epoch].states[cut]
                passes = 1 + ((epoch, cut) in followed)
                result.append(self.trial(self.options(rank, world_size), state=state, passes=passes, limit=longest))
            return result

        return self.on_ranks(world_size, trials, group=world_size > 1 and self.gathers())

    @_once
    def _resumes_in_world(self, world_size: int) -> list[Resume]:
        """A resume on each rank, from a few places, and from the ends of epochs in which ranks have equal counts."""
        heads = self.heads(world_size)
        places = inside = self.places(heads[0])
        for epoch in range(self.settings.epochs):
            counts = {len(head.passes[epoch].batches) for head in heads}
            if len(counts) == 1:
                places = [*places, (epoch, counts.pop())]
        followed = places if self.ranks_end_apart else self.followed(inside)
        ranks = self.resume_world(heads, places, world_size, followed)
        return [
            Resume(heads[rank], recordings[number], *place, place in inside, f" on rank {rank} of {world_size}")
            for number, place in enumerate(places) for rank, recordings in enumerate(ranks)
        ]  # fmt: skip

    def head_with(self, option: str, value: int) -> Recording:
        """The run of `observed` with another value of an option, such as the number of workers."""
        return self.sound(self._head_with(option, value), f"a run with {option}={value}")

    @_once
    def _head_with(self, option: str, value: int, process: int = 0) -> Recording:
        trial = self.trial(self.options(**{option: value}), passes=self.settings.epochs + 1, states=True)
        return self.record([trial], process)[0]

    @_once
    def resumes_with_workers(self) -> list[Resume]:
        """A resume at a few places of a run with workers, each with as many; none without workers."""
        workers = self.most_workers
        if not workers:
            return []
        head = self.head_with("num_workers", workers)
        places = self.places(head)
        recordings = self.resume_from(head, places, self.followed(places), num_workers=workers)
        where = f" with num_workers={workers}"
        return [Resume(head, each, *place, True, where) for place, each in zip(places, recordings, strict=True)]

    def resumes(self) -> Iterator[Resume]:
        """All of `resumed`, and then those on each rank of each world."""
        head = self.observed()
        for (epoch, cut), recording in self.resumed().items():
            yield Resume(head, recording, epoch, cut, 0 < cut < len(head.passes[epoch].batches))
        for world_size in self.worlds[1:]:
            yield from self._resumes_in_world(world_size)

    @property
    def most_workers(self) -> int:
        """The largest number of workers to examine; 0 for none."""
        return max(self.settings.num_workers, default=0) if self.takes("num_workers") else 0

    def repeats_with_workers(self) -> bool:
        """Whether two uninterrupted runs with workers agree bit for bit. Examined only if a resume does not."""
        one, other = (self._head_with("num_workers", self.most_workers, process) for process in (0, 1))
        return [part.batches for part in one.passes] == [part.batches for part in other.passes]

    def with_workers(self, *, quick: bool = False) -> list[dict[str, int]]:
        """Options: none, and unless ``quick`` the largest number of workers if there are any to examine."""
        return [{}, {"num_workers": self.most_workers}] if self.most_workers and not quick else [{}]

    def need_promise(self, name: str = "exact_order") -> None:
        """Raise `InapplicableError` for a loader that declares this capability no."""
        declared, reason = self.capability(name)
        if declared is False:
            raise InapplicableError(f"{name} is declared no: {reason}", "not promised")

    @_once
    def resumed(self) -> dict[Place, Recording]:
        """Place -> the rest of that epoch and the next one, from the states of `observed`.

        The cuts include 0 and the number of batches. The calling law judges failures.
        """
        head, places = self.observed(), []
        for epoch in range(self.settings.epochs):
            places += [(epoch, cut) for cut in (0, *self.interior(head, epoch), len(head.passes[epoch].batches))]
        return dict(zip(places, self.resume_from(head, places, places), strict=True))
