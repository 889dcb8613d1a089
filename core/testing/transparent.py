"""The law of the wrapper: undisturbed, a wrapped loader gives what the loader in it gives by itself.

Three passes of the plain loader stand beside three of the wrapped one. The plain loader is read twice, the second time
under other global seeds: what then differs is drawn, and is not compared. That the ranks together give what one process
gives is the law `partition`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ..loader.loader import Loader
from ..loader.part import Part
from ..randomness.streams import without_keys
from ..reading.exposed import exposed_samplers
from ..reading.private import shut_down
from ..wrapping import wrap
from .examine import Examination
from .record import MOST_BATCHES, Failure, Pass, Recording, Seen, Settings, capture_failure, open_loader, see
from .report import HOLDS, InapplicableError, LawError, Outcome, combined, law
from .subjects import rebuilt
from .worlds import contents_of, count, some

__all__ = ["transparent"]

_PASSES = 3
_MOST_UNKNOWN = 1000  # batches of a pass whose length is unknown
_FEW = 32  # items of a container that are compared one by one
_ERRORS = "midepoch.errors"
_OURS = f"{_ERRORS}.MidepochError"

Side = Literal["plain", "wrapped"]
Kinds = Counter[tuple[str, ...]]


@law(
    "transparent",
    cause="the loader in it is read, ended, divided or counted in another way than by itself",
    cure="read both with a plain for loop and compare; where midepoch.wrap made the difference, report it",
)
def transparent(examination: Examination) -> Outcome:
    """Undisturbed, it gives the plain loader's samples, batches, length and end, and leaves no other trace."""
    outcomes: dict[str, Outcome] = {}
    alone: list[Any] | None = None
    workers = examination.most_workers
    ways = [_Way(), _Way(workers), _Way(workers, kept=True)] if workers else [_Way()]
    for way in ways[:2] if examination.settings.quick else ways:
        sides = _read_sides(examination, way, alone)
        alone = alone or sides
        if isinstance(sides[0], str):
            return Outcome("not applicable", sides[0])
        outcomes[str(way)] = _judge(examination, way, *sides)
    if isinstance(sides[2], _Reading) and all(each.status == "holds" for each in outcomes.values()):
        outcomes["ranks"] = _compare_ranks(examination, sides[2].departs)
    return combined(outcomes)


# --- reading one side -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """How both sides are read: with so many workers (None: as make_loader does), kept from pass to pass or not."""

    num_workers: int | None = None
    kept: bool = False

    def __str__(self) -> str:
        workers = f"num_workers={self.num_workers}" if self.num_workers else "alone"
        return f"{workers}, kept" if self.kept else workers


@dataclass
class _Reading:
    """What one side did.

    ``views`` are what the program can see of its sampler and dataset, before the first pass and after each.
    """

    length: int | Failure = 0  # of a fresh loader, or what `len` raised
    passes: list[Pass] = field(default_factory=list)
    raised: Failure | None = None  # what ended the last pass, if it did not end by itself
    endless: bool = False  # the last pass was longer than it should be, and was left
    views: list[dict[str, Hashable]] = field(default_factory=list)
    epochs: set[str] = field(default_factory=set)  # the names in views of what `set_epoch` changes
    departs: frozenset[str] | None = None  # as of `Adapter`; None if the loader does not say
    unsure: bool = False  # after the last pass, the loader says no length any more

    def end(self, epoch: int) -> tuple[str, str]:
        """How a pass ended: "ended" by itself, "endless", or by the exception of this class, with its words."""
        if epoch < len(self.passes) - 1 or self.raised is None:
            return "endless" if self.endless and epoch == len(self.passes) - 1 else "ended", ""
        # A DataLoader's worker sends a traceback, whose last line has the class before the words.
        kind, words = self.raised.kinds[0], self.raised.message.rstrip().rpartition("\n")[2]
        return kind, words.rpartition(f"{kind.rpartition('.')[2]}: ")[2]

    def ending(self, epoch: int) -> str:
        """The same in words."""
        (kind, words), number = self.end(epoch), len(self.passes[epoch].batches)
        if kind == "ended":
            return f"the pass ends after {number} batches"
        return f"no end within {number} batches" if kind == "endless" else f"after {number} batches {kind}: {words}"


class _Opened(NamedTuple):
    """One side, freshly made: what is iterated, the user's own object in it, what is done with each batch."""

    loader: Any
    source: Any
    work: Callable[[Any], Any] | None = None
    departs: frozenset[str] | None = None


def _read_sides(examination: Examination, way: _Way, alone: list[Any] | None) -> list[Any]:
    """The plain loader, the same under other global seeds, and the wrapped one, as `_read_side` reads them.

    `alone`: the same without workers. A loader that promises the same samples for any number of workers is compared
    with that plain loader, since starting workers takes time. What is refused alone may be read by workers.
    """
    options = examination.options()
    wrapped = None if alone is None else alone[2]
    same = isinstance(wrapped, _Reading) and not wrapped.raised and examination.capability("elastic_workers")[0]
    sides: list[tuple[int, Side, bool]] = [(0, "plain", False), (0, "plain", True), (1, "wrapped", False)]
    asked = [(process, _read_side, (examination.named, options, way, *side)) for process, *side in sides]
    return [*alone[:2], *examination.run(asked[2:])] if alone and same else examination.run(asked)


def _read_side(
    settings: Settings, options: Mapping[str, Any], way: _Way, side: Side, later: bool
) -> _Reading | Failure | str:
    """A text says why there is nothing to compare with, a `Failure` that none could be made."""
    try:
        with _opened(settings, options, way, side, later) as opened:
            return _read(settings, opened, side)
    except InapplicableError as reason:
        return str(reason)
    except Exception as error:  # noqa: BLE001 - the law judges it
        return capture_failure(error, "making the loader")


@contextlib.contextmanager
def _opened(settings: Settings, options: Mapping[str, Any], way: _Way, side: Side, later: bool) -> Iterator[_Opened]:
    given = options if way.num_workers is None else {**options, "num_workers": way.num_workers}
    if side == "plain" and settings.plain is not None:
        with open_loader(replace(settings, make_loader=settings.plain), given, later=later) as source:
            yield _Opened(source, source)
        return
    with open_loader(settings, given, later=later) as loader:
        if not isinstance(loader, Loader):
            if side == "plain":
                raise InapplicableError("no plain loader is known: give plain=, a function that makes it")
            yield _Opened(loader, getattr(loader, "source", None), departs=getattr(loader, "departs", None))
            return
        source, part = loader.source, Part("", loader)
        if way.kept and type(source) is DataLoader:
            source = rebuilt(source, source.num_workers, persistent_workers=True)
            loader = wrap(source, **part.options)
        if side == "wrapped":
            yield _Opened(loader, source, departs=part.adapter.facts.departs or frozenset())
            return
        if why := _no_plain(source, part):
            raise InapplicableError(f"{why}: give plain=, a function that makes the plain loader")
        divided = part.options["shard"] or loader.capabilities.elastic_workers
        if type(source) is DataLoader and isinstance(source.dataset, IterableDataset) and divided:
            source = rebuilt(source, 0)  # plain workers would each read all of it
        with without_keys():
            yield _Opened(source, source, part.options["then"])


def _no_plain(source: Any, part: Part) -> str:
    """Why the source of a loader cannot be read by itself; '' if it can."""
    if part.adapter.facts.departs is None:
        return "the source is read by midepoch alone"
    if "mode" in part.options:
        return "a combination has no plain loader"
    if _is_function(source):
        try:
            inspect.signature(source).bind()
        except TypeError:
            return "the function that was wrapped needs arguments"
    return ""


def _is_function(source: Any) -> bool:
    return callable(source) and not hasattr(type(source), "__iter__")


def _length_of(loader: Any) -> int | Failure:
    try:
        return len(loader)
    except Exception as error:  # noqa: BLE001 - it is compared
        return capture_failure(error, "len()")


def _read(settings: Settings, opened: _Opened, side: Side) -> _Reading:
    reading = _Reading(_length_of(opened.loader), views=[_visible(opened.source)], departs=opened.departs)
    known = reading.length if isinstance(reading.length, int) else None
    bound = min(MOST_BATCHES, _MOST_UNKNOWN if known is None else 4 * known + 100)
    for epoch in range(_PASSES):
        if side == "plain":
            reading.epochs |= _set_epoch(opened.source, epoch)
        reading.passes.append(Pass())
        batches = reading.passes[-1].batches
        try:
            for batch in _begun(opened.loader):
                if len(batches) >= bound:
                    reading.endless = True
                    break
                batches.append(see(settings, batch if opened.work is None else opened.work(batch)))
        except Exception as error:  # noqa: BLE001 - it is compared
            reading.raised = capture_failure(error, f"iterating, pass {epoch}")
        reading.unsure = isinstance(_length_of(opened.loader), Failure)
        is_iterator = hasattr(type(opened.loader), "__next__")
        if side == "plain" and epoch and not batches and reading.raised is None and is_iterator:
            reading.passes.pop()  # it can be read once, and only midepoch begins it again
            break
        if reading.endless or reading.raised is not None:
            break
        reading.views.append(_visible(opened.source))
    return reading


def _begun(loader: Any) -> Iterator[Any]:
    """A pass. A function is called for each; an iterator that ends for good is reset, as its users do."""
    if _is_function(loader):
        loader = loader()
    batches = iter(loader)
    try:
        yield from batches
    finally:
        if isinstance(loader, DataLoader) and not loader.persistent_workers:
            shut_down(batches)  # left to the garbage, torch may wait five seconds for each
    if batches is loader and callable(reset := getattr(loader, "reset", None)):
        reset()


def _set_epoch(source: Any, epoch: int) -> set[str]:
    """Tell the source and its parts the epoch, as a torch program does. Returns what this has changed in them."""
    before = _visible(source)
    parts = _parts(source)
    for part in (*parts.values(), *exposed_samplers(parts.get("dataset", source)).values()):
        if callable(tell := getattr(part, "set_epoch", None)):
            tell(epoch)
    after = _visible(source)
    return {name for name in after if after[name] != before.get(name)}


# --- what the program can see -----------------------------------------------------------------------------------------


def _parts(source: Any) -> dict[str, Any]:
    """The user's own objects: a loader's sampler, batch sampler and dataset; of another source, itself."""
    held = _attributes(source)
    found = {name: held[name] for name in ("sampler", "batch_sampler", "dataset") if held.get(name) is not None}
    return found or {"source": source}


def _attributes(thing: Any) -> dict[str, Any]:
    """What lies in an object, without running code of its class; {} if nothing does."""
    try:
        held = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return dict(held) if type(held) is dict else {}


def _visible(source: Any) -> dict[str, Hashable]:
    """Path -> value of the plain attributes of the user's own objects, and of the objects in these."""
    found: dict[str, Hashable] = {}
    waiting = [] if source is None else [(place, part, 0) for place, part in _parts(source).items()]
    while waiting:
        path, thing, depth = waiting.pop()
        for name, value in _attributes(thing).items():
            if not str(name).startswith("_"):
                found.update(_plain(f"{path}.{name}", value))
                if depth == 0:
                    waiting.append((f"{path}.{name}", value, 1))
    return found


_PLAIN = (bool, int, str, float, type(None))


def _plain(path: str, value: Any) -> dict[str, Hashable]:
    """A number, a text or a bool, by its path; of a container its length, and its items if they are few and plain."""
    if type(value) in _PLAIN:
        return {path: repr(value) if type(value) is float else value}
    if type(value) in (torch.Tensor, np.ndarray):
        return {f"{path}.shape": tuple(value.shape)}
    if type(value) not in (list, tuple, dict, set):
        return {}
    found: dict[str, Hashable] = {f"len({path})": len(value)}
    members = list(value.items()) if type(value) is dict else list(value)
    parts = [part for each in members for part in (each if type(each) is tuple else (each,))]
    if len(members) <= _FEW and type(value) is not set and all(type(part) in _PLAIN for part in parts):
        found[path] = repr(value)
    return found


# --- comparing --------------------------------------------------------------------------------------------------------


def _judge(examination: Examination, way: _Way, plain: Any, again: Any, wrapped: Any) -> Outcome:
    if isinstance(wrapped, Failure) and _OURS in wrapped.kinds:
        return Outcome("refused clearly", wrapped.message)
    for side, what in ((wrapped, "a loader"), (plain, "a plain loader"), (again, "a plain loader")):
        if isinstance(side, Failure):
            raise examination.error(f"{what}, {way}", side.whole)
    if plain.raised is not None and way.num_workers and not any(part.batches for part in plain.passes):
        return Outcome("not applicable", f"the plain loader raises {plain.raised}")
    return _Comparison(examination, way, plain, again, wrapped).judge()


@dataclass
class _Comparison:
    """The plain loader, the same under other global seeds, and the wrapped one."""

    examination: Examination
    way: _Way
    plain: _Reading
    again: _Reading
    wrapped: _Reading
    drawn: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.departs = frozenset({"order"}) if self.wrapped.departs is None else self.wrapped.departs
        naming = self.examination.naming
        self.blind = naming is not None and naming.blind  # samples have no names

    def judge(self) -> Outcome:
        plain, wrapped = self.plain, self.wrapped
        refused = wrapped.raised if wrapped.raised is not None and _OURS in wrapped.raised.kinds else None
        if refused is None:
            self.lengths()
        for epoch, passes in enumerate(zip(plain.passes, self.again.passes, wrapped.passes, strict=False)):
            if refused is not None and epoch == len(wrapped.passes) - 1:
                break
            if {plain.end(epoch)[0], wrapped.end(epoch)[0]} != {"ended"}:
                self.unusual_end(epoch, *passes)
                break
            self.batches(epoch, *passes)
            self.views(epoch + 1)
        if refused is not None:
            return Outcome("refused clearly", refused.message)
        self.contents()
        return Outcome("holds", f"drawn, and so not compared: {', '.join(self.drawn)}" if self.drawn else "")

    def error(self, expected: str, got: str, epoch: int | None = None, batch: int | None = None) -> LawError:
        """The law's, in words of both sides."""
        where = "" if self.way == _Way() else f", {self.way}"
        return self.examination.error(f"as the plain loader{where}: {expected}", got, epoch, batch)

    def lengths(self) -> None:
        """`len`, of fresh loaders. One that the plain loader does not know is the number of batches, or taken back."""
        plain, mine, wrapped = self.plain.length, self.wrapped.length, self.wrapped
        if "tail" in self.departs or plain == mine or (isinstance(mine, Failure) and _OURS in mine.kinds):
            return
        if isinstance(plain, Failure):
            unknown = plain.kinds[0] in ("builtins.TypeError", "builtins.NotImplementedError")
            known = wrapped.unsure or (mine == len(wrapped.passes[0].batches) and not wrapped.endless)
            if plain.kinds[0] == mine.kinds[0] if isinstance(mine, Failure) else unknown and known:
                return
        texts = [f"raises {each}" if isinstance(each, Failure) else str(each) for each in (plain, mine)]
        raise self.error(f"len() {texts[0]}", texts[1], 0)

    def unusual_end(self, epoch: int, first: Pass, second: Pass, mine: Pass) -> None:
        """A pass that has raised, or has not ended, on one side or on both."""
        at, expected = len(mine.batches), len(first.batches)
        plain, again, ours = (each.end(epoch) for each in (self.plain, self.again, self.wrapped))
        if plain != ours and not (plain != again and plain[0] == ours[0]):
            raise self.error(self.plain.ending(epoch), self.wrapped.ending(epoch), epoch, at)
        if self.plain.endless:
            self.sets(epoch, first, second, mine)
            return
        common = min(expected, at)
        comparable = mine.ids[:common] == first.ids[:common] or self.keeps_order()
        if comparable and expected == len(second.batches) != at:  # else the end comes at another place
            raise self.error(f"{expected} batches before it ends so", f"{at} batches", epoch, at)

    def sets(self, epoch: int, first: Pass, second: Pass, mine: Pass) -> None:
        """Of passes without an end, which samples come at all."""
        one, two, got = (set(count(part.ids)) for part in (first, second, mine))
        if one == two and one != got and not self.blind:
            raise self.error(f"samples {some(one - got) or 'and no other'}", f"others: {some(got - one)}", epoch, 0)

    def batches(self, epoch: int, first: Pass, second: Pass, mine: Pass) -> None:
        """The samples of a pass, its batches, and where the source's own order is kept, that."""
        named = [list(map(_kinds, part.batches)) if self.blind else part.ids for part in (first, second, mine)]
        one, two, got = (count(each) for each in named)
        if one == two:
            for names, what in ((one - got, "lost"), (got - one, "too often")):
                for sample in names:
                    at = next((n for n, ids in enumerate(named[2]) if sample in ids), len(named[2]))
                    words = f"{_times(got[sample])}; {what}: {some(names)}"
                    raise self.error(f"sample {sample} {_times(one[sample])}", words, epoch, at)
        else:
            self.drawn["which samples come"] = None
            if one.total() == two.total() != got.total():
                raise self.error(f"{one.total()} samples", f"{got.total()} samples", epoch)
        if "tail" not in self.departs:
            self.sizes(epoch, *([len(ids) for ids in part.ids] for part in (first, second, mine)))
            self.shapes(epoch, *(Counter(map(_kinds, part.batches)) for part in (first, second, mine)))
        if named[0] == named[1] and self.keeps_order():
            place = _first_difference(named[0], named[2])
            if place is not None:
                raise self.error(f"in its own order {named[0][place]}", f"{named[2][place]}", epoch, place)

    def keeps_order(self) -> bool:
        """Whether the plain loader's order has to be kept: it is stated, or is not drawn, since each pass has it."""
        if "order" not in self.departs:
            return True
        first, *others = [part.ids for part in (*self.plain.passes, *self.again.passes)]
        same = len(others) > 1 and all(other == first for other in others)
        return same and not self.blind and "tail" not in self.departs

    def sizes(self, epoch: int, one: list[int], two: list[int], got: list[int]) -> None:
        """The number of batches and their sizes, in their order where that does not follow from the samples'."""
        expected, found = one, got
        if sorted(one) != sorted(two):
            self.drawn["sizes of batches"] = None
            if len(one) != len(two) or len(one) == len(got):
                return
        elif one != two or ("order" in self.departs and len(set(one[:-1])) > 1):
            expected, found = sorted(one), sorted(got)
        if expected != found:
            place = _first_difference(one, got)
            at = min(len(one), len(got)) if place is None else place
            raise self.error(f"{len(one)} batches of {some(one)}", f"{len(got)} of {some(got)}", epoch, at)

    def shapes(self, epoch: int, one: Kinds, two: Kinds, got: Kinds) -> None:
        """The kinds and shapes of the tensors in batches, whichever batches have them."""
        if one == two and one != got:
            here, there = next(iter(one - got), ()), next(iter(got - one), ())
            raise self.error(f"batches of {some(here)}: {one[here]}", f"{got[here]}; of {some(there)}", epoch)

    def views(self, number: int) -> None:
        """What is left in the sampler and the dataset. Counters of reads may be a little higher."""
        before, plain = self.plain.views[0], self.plain.views[number]
        again, mine = self.again.views[number], self.wrapped.views[number]
        if not before or not self.wrapped.views[0] or "traces" in self.departs:
            return
        batches = sum(len(part.batches) for part in self.plain.passes[:number])
        largest = max((len(ids) for part in self.plain.passes[:number] for ids in part.ids), default=0)
        for name, there in plain.items():
            here = mine.get(name)
            if name in self.plain.epochs or there != again.get(name) or there == here:
                continue
            if self.way.num_workers and not re.fullmatch(r"(batch_)?sampler\.\w+", name):
                continue  # workers have datasets of their own
            begun = before.get(name)
            if isinstance(begun, int) and isinstance(there, int) and isinstance(here, int):
                # Documented re-reads: one sample twice more in each epoch, and the first batch, if it is found to draw.
                counts_reads = there - begun >= batches > number
                if counts_reads and 0 <= here - there <= 2 * number + largest:
                    continue
            raise self.error(f"after the pass, {name} is {there!r}", f"{here!r}", number - 1)

    def contents(self) -> None:
        """Where no sample has two contents in six plain passes, nothing is drawn; each has that content here.

        A draw that is rare may show here alone, so a sample must differ in every pass.
        """
        passes = [*self.plain.passes, *self.again.passes]
        fixed, found = contents_of(passes), contents_of(self.wrapped.passes)
        repeated = count(ids for part in passes for ids in part.ids).total() >= 2 * len(fixed)
        if self.blind or not repeated or any(len(each) > 1 for each in fixed.values()):
            return
        for number, ids in enumerate(self.wrapped.passes[0].ids):
            for sample in ids:
                if sample in fixed and sample in found and found[sample].isdisjoint(fixed[sample]):
                    raise self.error(f"sample {sample} with the same content", "another content", 0, number)


def _kinds(seen: Seen) -> tuple[str, ...]:
    return tuple(f"{leaf.path} {leaf.kind}".strip() for leaf in seen.leaves)


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    return next((number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def _times(number: int) -> str:
    return ("never", "once", "twice")[number] if number < 3 else f"{number} times"


# --- several ranks ----------------------------------------------------------------------------------------------------


def _compare_ranks(examination: Examination, departs: frozenset[str] | None) -> Outcome:
    """Ranks have as much as where the source itself divides; joined, their batches are one rank's."""
    for world_size in examination.worlds[1:]:
        calls = []
        for rank, size in [(0, 1), *((rank, world_size) for rank in range(world_size))]:
            options = examination.options(rank, size)
            calls.append((rank, _read_side, (examination.named, options, _Way(), "plain", False)))
        alone, *plain = examination.run(calls)
        try:
            wrapped = examination.heads(world_size)
        except LawError as error:
            if f"\n{_ERRORS}." not in error.got:
                raise
            return Outcome("refused clearly", error.got.splitlines()[0])
        if not all(isinstance(each, _Reading) for each in (alone, *plain)):
            return Outcome("not applicable", "the plain loader cannot be made for several ranks")
        for rank, (one, got) in enumerate(zip(plain, wrapped, strict=True)):
            _same_share(examination, f"on rank {rank} of {world_size}", alone, one, got)
        # Of a loader that says what it does in another way than the source, and does not name its ranks.
        ours = departs is not None and departs.isdisjoint({"tail", "ranks"})
        if ours and all(examination.capability(name)[0] for name in ("rank_independent", "elastic_world")):
            _same_global_batches(examination, wrapped)
    return HOLDS


def _same_share(examination: Examination, where: str, alone: _Reading, plain: _Reading, wrapped: Recording) -> None:
    for epoch, parts in enumerate(zip(alone.passes, plain.passes, wrapped.passes, strict=False)):
        whole, expected, got = (sum(map(len, part.ids)) for part in parts)
        if expected < whole and expected != got:
            raise examination.error(
                f"{where}, as the plain loader: {expected} samples", f"{got} samples", epoch,
                cause="the source divides its samples over the ranks itself, and they are divided otherwise here",
                cure="state shard=, or the tail rule (tail=) that the source has",
            )  # fmt: skip


def _same_global_batches(examination: Examination, wrapped: Sequence[Recording]) -> None:
    """In rank order the ranks' batches are the global batch, so joined they are the batches of one rank."""
    for epoch, one in enumerate(examination.observed().passes):
        steps = zip(*(recording.passes[epoch].ids for recording in wrapped), strict=False)
        joined = [sample for step in steps for ids in step for sample in ids]
        at = _first_difference([sample for ids in one.ids for sample in ids], joined)
        if at is not None:
            raise examination.error(
                f"the batches of {len(wrapped)} ranks, joined in rank order, are those of one rank",
                f"place {at} is sample {joined[at]}", epoch,
                cause="ranks do not take contiguous blocks of each global batch",
                cure="let rank r of n take the r-th block of each global batch",
            )  # fmt: skip
