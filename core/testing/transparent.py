"""The law of the wrapper: undisturbed, a wrapped loader gives what the loader in it gives by itself.

Three passes of the plain loader stand beside three of the wrapped one. The plain loader is read twice, the second time
under other global seeds: what then differs is drawn, and is not compared. That the ranks together give what one process
gives is the law `partition`.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ..loader.loader import Loader
from ..loader.part import Part
from ..randomness.streams import without_keys
from ..reading.driven import exposed_samplers
from . import record
from .examine import Examination
from .law import law
from .record import Failure, Pass, Recording, Seen, Settings, capture_failure, from_midepoch, open_loader, see
from .report import HOLDS, InapplicableError, LawError, Outcome, combined
from .subjects import rebuilt
from .together import GlobalBatches
from .worlds import contents_of, count, some

__all__ = ["transparent"]

_PASSES = 3
_MOST_UNKNOWN = 1000  # batches of a pass whose length is unknown
_USUAL = frozenset({"order"})
_FEW = 32  # items of a container that are compared one by one
_ERRORS = "midepoch.errors"
_OURS = f"{_ERRORS}.MidepochError"

Side = Literal["plain", "wrapped"]


@law(
    "transparent",
    cause="the loader in it is read, ended, divided or counted in another way than by itself",
    cure="read both with a plain for loop and compare; where midepoch.wrap made the difference, report it",
)
def transparent(examination: Examination) -> Outcome:
    """Undisturbed, it gives the plain loader's samples, batches, length and end, and leaves no other trace."""
    outcomes: dict[str, Outcome] = {}
    read: dict[_Way, tuple[Any, Any, Any]] = {}
    for way in _ways(examination):
        plain, again, wrapped = read[way] = _read_both(examination, way, read.get(_Way()))
        if isinstance(plain, str):
            return Outcome("not applicable", plain)
        outcomes[str(way)] = _Pair(examination, way, plain, again, wrapped).compare()
    if isinstance(wrapped, _Reading) and all(each.status == "holds" for each in outcomes.values()):
        outcomes["ranks"] = _compare_ranks(examination, wrapped.departs)
    return combined(outcomes)


# --- reading one side -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """How both sides are read: with so many workers (None: as make_loader does), kept or not, started by `method`."""

    num_workers: int | None = None
    kept: bool = False
    method: str | None = None

    def __str__(self) -> str:
        told = [f"num_workers={self.num_workers}"] if self.num_workers else ["alone"]
        return ", ".join([*told, *["kept"] * self.kept, *([f"by {self.method}"] if self.method else [])])


def _ways(examination: Examination) -> list[_Way]:
    workers, ways = examination.most_workers, [_Way()]
    if workers and examination.settings.quick:
        return [*ways, _Way(workers)]  # as the platform starts processes
    return [*ways, *(_Way(workers, kept, "spawn") for kept in (False, True) if workers)]


@dataclass
class _Reading:
    """What one side did.

    Attributes:
        length: of a fresh loader, or the `Failure` that `len` raised.
        passes: the batches of each pass.
        raised: what ended the last pass, if it did not end by itself.
        endless: the last pass was longer than it should be, and was left.
        views: what the program can see of its sampler and dataset, before the first pass and after each.
        epochs: the names of what `set_epoch` changes in them.
        departs: as of `Adapter`; None if the loader does not say.
        unsure: after the last pass, the loader says no length any more.
    """

    length: int | Failure = 0
    passes: list[Pass] = field(default_factory=list)
    raised: Failure | None = None
    endless: bool = False
    views: list[dict[str, Hashable]] = field(default_factory=list)
    epochs: set[str] = field(default_factory=set)
    departs: frozenset[str] | None = None
    unsure: bool = False


@dataclass
class _Opened:
    """One side, freshly made: what is iterated, the user's own object in it, what is done with each batch."""

    loader: Any
    source: Any
    work: Callable[[Any], Any] | None = None
    departs: frozenset[str] | None = None


def _read_both(
    examination: Examination, way: _Way, alone: tuple[Any, Any, Any] | None
) -> tuple[Any, Any, _Reading | Failure]:
    """The plain loader, the same under other global seeds, and the wrapped one, as `_read_side` reads them.

    `alone`: the same without workers. A loader that promises the same samples for any number of workers is compared
    with the plain loader without them, since starting them takes seconds.
    """
    options = examination.options()
    calls: list[tuple[int, Side, bool]] = [(0, "plain", False), (0, "plain", True), (1, "wrapped", False)]
    same = (
        alone is not None
        and isinstance(alone[2], _Reading)
        and alone[2].raised is None  # what is refused alone may be read by workers, as plain ones read it
        and examination.capability("elastic_workers")[0]
    )
    results = examination.run(
        [
            (process, _read_side, (examination.named, options, way, side, later))
            for process, side, later in calls[2 if same else 0 :]
        ]
    )
    plain, again, wrapped = (*alone[:2], *results) if alone is not None and same else results
    return plain, again, wrapped


def _read_side(
    settings: Settings, options: Mapping[str, Any], way: _Way, side: Side, later: bool
) -> _Reading | Failure | str:
    """What one side does. A text says why there is nothing to compare with, a `Failure` that none could be made."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(way.method or before, force=True)
    reading = _Reading()
    try:
        with _opened(settings, options, way, side, later) as opened:
            reading.length = _length_of(opened.loader)
        with _opened(settings, options, way, side, later) as opened:
            _read(settings, opened, side, reading)
    except InapplicableError as reason:
        return str(reason)
    except Exception as error:  # noqa: BLE001 - the law judges it
        return capture_failure(error, "making the loader")
    finally:
        multiprocessing.set_start_method(before, force=True)
    return reading


@contextlib.contextmanager
def _opened(settings: Settings, options: Mapping[str, Any], way: _Way, side: Side, later: bool) -> Iterator[_Opened]:
    given = options if way.num_workers is None else {**options, "num_workers": way.num_workers}
    if side == "plain" and settings.plain is not None:
        with open_loader(replace(settings, make_loader=settings.plain), given, later=later) as source:
            yield _Opened(source, source)
        return
    with open_loader(settings, given, later=later) as made:
        loader = made._loader if isinstance(made, GlobalBatches) else made
        if not isinstance(loader, Loader):
            if side == "plain":
                raise InapplicableError("no plain loader is known: give plain=, a function that makes it")
            yield _Opened(loader, getattr(loader, "source", None), departs=getattr(loader, "departs", None))
            return
        source, part = loader.source, Part("", loader)
        if way.kept and type(source) is DataLoader:
            source = rebuilt(source, source.num_workers, persistent_workers=True)
            loader = from_midepoch("wrap")(source, **part.options)
        if side == "wrapped":
            whole = frozenset() if part.global_batch is None else frozenset({"tail"})
            yield _Opened(loader, source, departs=(part.departs or frozenset()) | whole)
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
    if part.departs is None:
        return "the source is read by midepoch alone"
    if "mode" in part.options:
        return "a combination has no plain loader"
    if _is_function(source):
        try:
            inspect.signature(source).bind()
        except TypeError:
            return "the function that was wrapped needs arguments"
    return ""


def _is_iterator(source: Any) -> bool:
    return hasattr(type(source), "__next__")


def _is_function(source: Any) -> bool:
    return callable(source) and not hasattr(type(source), "__iter__")


def _length_of(loader: Any) -> int | Failure:
    try:
        return len(loader)
    except Exception as error:  # noqa: BLE001 - it is compared
        return capture_failure(error, "len()")


def _read(settings: Settings, opened: _Opened, side: Side, reading: _Reading) -> None:
    reading.departs = opened.departs
    known = reading.length if isinstance(reading.length, int) else None
    bound = min(record.MOST_BATCHES, _MOST_UNKNOWN if known is None else 4 * known + 100)
    reading.views.append(_visible(opened.source))
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
        if side == "plain" and epoch and not batches and reading.raised is None and _is_iterator(opened.loader):
            reading.passes.pop()  # it can be read once, and only midepoch begins it again
            return
        if reading.endless or reading.raised is not None:
            return
        reading.views.append(_visible(opened.source))


def _begun(loader: Any) -> Iterator[Any]:
    """A pass. A function is called for each; an iterator that ends for good is reset, as its users do."""
    if _is_function(loader):
        loader = loader()
    batches = iter(loader)
    yield from batches
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

_PARTS = ("sampler", "batch_sampler", "dataset")


def _parts(source: Any) -> dict[str, Any]:
    """The user's own objects: a loader's sampler, batch sampler and dataset; of another source, itself."""
    held = _attributes(source)
    found = {name: held[name] for name in _PARTS if held.get(name) is not None}
    return found or {"source": source}


def _attributes(thing: Any) -> dict[str, Any]:
    """What lies in an object, without running code of its class; {} if nothing does."""
    try:
        held = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return held if type(held) is dict else {}


def _visible(source: Any) -> dict[str, Hashable]:
    """Path -> value of the plain attributes of the user's own objects, and of the objects in these."""
    found: dict[str, Hashable] = {}
    for place, part in _parts(source).items() if source is not None else ():
        for name, value in _public(part):
            found.update(_plain(f"{place}.{name}", value))
            for inner, value_inside in _public(value):
                found.update(_plain(f"{place}.{name}.{inner}", value_inside))
    return found


def _public(thing: Any) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in list(_attributes(thing).items()) if not str(name).startswith("_")]


def _plain(path: str, value: Any) -> dict[str, Hashable]:
    """A number, a text or a bool, by its path; of a container its length, and its items if they are few and plain."""
    if value is None or type(value) in (bool, int, str):
        return {path: value}
    if type(value) is float:
        return {path: repr(value)}
    if type(value) in (torch.Tensor, np.ndarray):
        return {f"{path}.shape": tuple(value.shape)}
    if type(value) not in (list, tuple, dict, set):
        return {}
    found: dict[str, Hashable] = {f"len({path})": len(value)}
    items = list(value.items()) if type(value) is dict else [*value]
    if len(items) <= _FEW and type(value) is not set:
        parts = [part for item in items for part in (item if type(item) is tuple else (item,))]
        if all(part is None or type(part) in (bool, int, str, float) for part in parts):
            found[path] = repr(value)
    return found


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass
class _Pair:
    """The plain loader, the same under other global seeds, and the wrapped one."""

    examination: Examination
    way: _Way
    plain: _Reading | Failure
    again: _Reading | Failure
    wrapped: _Reading | Failure
    drawn: dict[str, None] = field(default_factory=dict)

    def compare(self) -> Outcome:
        """Raise the law's error at the first difference."""
        one, two, got = self.plain, self.again, self.wrapped
        if isinstance(got, Failure):
            if _OURS in got.kinds:
                return Outcome("refused clearly", got.message)
            raise self.error("a loader", f"{got}\n{got.trace}")
        if isinstance(one, Failure) or isinstance(two, Failure):
            raise self.error("a plain loader", f"{one}")
        if one.raised is not None and self.way.num_workers and not any(part.batches for part in one.passes):
            return Outcome("not applicable", f"the plain loader raises {one.raised}")
        refused = got.raised is not None and _OURS in got.raised.kinds
        departs = _USUAL if got.departs is None else got.departs
        if not refused:
            self.lengths(one, got, departs)
        for epoch, (first, second, mine) in enumerate(zip(one.passes, two.passes, got.passes, strict=False)):
            last = epoch == len(got.passes) - 1
            if refused and last:
                break
            ended = not (one.endless or one.raised is not None) or epoch < len(one.passes) - 1
            if not (ended and (not last or not (got.endless or got.raised is not None))):
                self.unusual_end(epoch, one, two, got, departs)
                break
            self.batches(epoch, first, second, mine, departs)
            self.views(epoch + 1, one, two, got)
        if refused and got.raised is not None:
            return Outcome("refused clearly", got.raised.message)
        self.contents(one, two, got)
        return Outcome("holds", f"drawn, and so not compared: {', '.join(self.drawn)}" if self.drawn else "")

    def error(self, expected: str, got: str, epoch: int | None = None, batch: int | None = None) -> LawError:
        """The law's, in words of both sides."""
        where = "" if self.way == _Way() else f", {self.way}"
        return self.examination.error(f"as the plain loader{where}: {expected}", got, epoch=epoch, batch=batch)

    def lengths(self, one: _Reading, got: _Reading, departs: frozenset[str]) -> None:
        """`len`, of fresh loaders. One that the plain loader does not know is the number of batches, or taken back."""
        if "tail" in departs or one.length == got.length:
            return
        plain, mine = one.length, got.length
        if isinstance(plain, Failure):
            if isinstance(mine, Failure):
                same = plain.kinds[0] == mine.kinds[0] or _OURS in mine.kinds
            else:
                unknown = plain.kinds[0] in ("builtins.TypeError", "builtins.NotImplementedError")
                ended = mine == len(got.passes[0].batches) and not got.endless
                same = unknown and (ended or got.unsure)
            if same:
                return
        elif isinstance(mine, Failure) and _OURS in mine.kinds:
            return
        raise self.error(f"len() {_told(plain)}", f"{_told(mine)}", epoch=0)

    def unusual_end(self, epoch: int, one: _Reading, two: _Reading, got: _Reading, departs: frozenset[str]) -> None:
        """A pass that has raised, or has not ended, on one side or on both."""
        first, mine = one.passes[epoch], got.passes[epoch]
        at = len(mine.batches)
        ends = [_end(each, epoch) for each in (one, two, got)]
        if ends[0] != ends[2] and not (ends[0] != ends[1] and ends[0][0] == ends[2][0]):
            texts = [_told_end(each, epoch) for each in (one, got)]
            raise self.error(texts[0], texts[1], epoch, at)
        common = min(len(first.batches), at)
        ours, theirs = mine.ids[:common], first.ids[:common]
        if one.endless:
            self.sets(epoch, first, two.passes[epoch], mine)
            return
        expected = len(first.batches)
        comparable = ours == theirs or self.keeps_order(departs)  # another order comes to the same end elsewhere
        if comparable and expected == len(two.passes[epoch].batches) != at:
            raise self.error(f"{expected} batches before it ends so", f"{at} batches", epoch, at)

    def sets(self, epoch: int, first: Pass, second: Pass, mine: Pass) -> None:
        """Of passes without an end, which samples come at all."""
        one, two, got = (set(count(part.ids)) for part in (first, second, mine))
        if one == two and one != got and not self.blind:
            raise self.error(f"samples {some(one - got) or 'and no other'}", f"others: {some(got - one)}", epoch, 0)

    @property
    def blind(self) -> bool:
        """Whether samples have no names."""
        return self.examination.naming is not None and self.examination.naming.blind

    def batches(self, epoch: int, first: Pass, second: Pass, mine: Pass, departs: frozenset[str]) -> None:
        """The samples of a pass, its batches, and where the source's own order is kept, that."""
        named = [_names(part, self.blind) for part in (first, second, mine)]
        one, two, got = (count(each) for each in named)
        if one == two:
            for names, what in ((one - got, "lost"), (got - one, "too often")):
                if names:
                    sample = next(iter(names))
                    at = next((n for n, ids in enumerate(named[2]) if sample in ids), len(named[2]))
                    words = f"{_times(got[sample])}; {what}: {some(names)}"
                    raise self.error(f"sample {sample} {_times(one[sample])}", words, epoch, at)
        else:
            self.drawn["which samples come"] = None
            if one.total() == two.total() != got.total():
                raise self.error(f"{one.total()} samples", f"{got.total()} samples", epoch)
        if "tail" not in departs:
            one_sizes, two_sizes, sizes = ([len(ids) for ids in part.ids] for part in (first, second, mine))
            self.sizes(epoch, one_sizes, two_sizes, sizes, departs)
            self.shapes(epoch, first, second, mine)
        if named[0] != named[1] or not self.keeps_order(departs):
            return
        place = _first_difference(named[0], named[2])
        if place is not None:
            raise self.error(f"in its own order {named[0][place]}", f"{named[2][place]}", epoch, place)

    def keeps_order(self, departs: frozenset[str]) -> bool:
        """Whether the plain loader's order has to be kept: it is stated, or is not drawn, since each pass has it."""
        if "order" not in departs:
            return True
        if "tail" in departs or not isinstance(self.plain, _Reading) or not isinstance(self.again, _Reading):
            return False
        first, *others = [part.ids for part in (*self.plain.passes, *self.again.passes)]
        return not self.blind and len(others) > 1 and all(other == first for other in others)

    def sizes(self, epoch: int, one: list[int], two: list[int], got: list[int], departs: frozenset[str]) -> None:
        """The number of batches and their sizes, in their order where that does not follow from the samples'."""
        expected, found = one, got
        if sorted(one) != sorted(two):
            self.drawn["sizes of batches"] = None
            if len(one) != len(two) or len(one) == len(got):
                return
        elif one != two or ("order" in departs and len(set(one[:-1])) > 1):
            expected, found = sorted(one), sorted(got)
        if expected != found:
            place = _first_difference(one, got)
            at = min(len(one), len(got)) if place is None else place
            raise self.error(f"{len(one)} batches of {some(one)}", f"{len(got)} of {some(got)}", epoch, at)

    def shapes(self, epoch: int, first: Pass, second: Pass, mine: Pass) -> None:
        """The kinds and shapes of the tensors in batches, whichever batches have them."""
        one, two, got = (Counter(_kinds(seen) for seen in part.batches) for part in (first, second, mine))
        if one == two and one != got:
            here, there = next(iter(one - got), ()), next(iter(got - one), ())
            raise self.error(f"batches of {some(here)}: {one[here]}", f"{got[here]}; of {some(there)}", epoch)

    def views(self, number: int, one: _Reading, two: _Reading, got: _Reading) -> None:
        """What is left in the sampler and the dataset. Counters of reads may be a little higher."""
        if not one.views[0] or not got.views[0] or "traces" in (got.departs or ()):
            return
        before, plain, other, mine = one.views[0], one.views[number], two.views[number], got.views[number]
        batches = sum(len(part.batches) for part in one.passes[:number])
        largest = max((len(ids) for part in one.passes[:number] for ids in part.ids), default=0)
        for name in plain:
            if name in one.epochs or plain[name] != other.get(name) or plain[name] == mine.get(name):
                continue
            if self.way.num_workers and not re.fullmatch(r"(batch_)?sampler\.\w+", name):
                continue  # workers have datasets of their own
            begun, there, here = before.get(name), plain[name], mine.get(name)
            if isinstance(begun, int) and isinstance(there, int) and isinstance(here, int):
                # Documented re-reads: one sample twice more in each epoch, and the first batch, if it is found to draw.
                counts_reads = there - begun >= batches > number
                if counts_reads and 0 <= here - there <= 2 * number + largest:
                    continue
            raise self.error(f"after the pass, {name} is {there!r}", f"{here!r}", number - 1)

    def contents(self, one: _Reading, two: _Reading, got: _Reading) -> None:
        """Where no sample has two contents in six plain passes, nothing is drawn; each has that content here.

        A draw that is rare may show here alone, so a sample must differ in every pass.
        """
        passes = [*one.passes, *two.passes]
        fixed, found = contents_of(passes), contents_of(got.passes)
        repeated = count(ids for part in passes for ids in part.ids).total() >= 2 * len(fixed)
        if self.blind or not repeated or any(len(each) > 1 for each in fixed.values()):
            return
        for number, seen in enumerate(got.passes[0].batches):
            for sample in seen.ids:
                if sample in fixed and sample in found and found[sample].isdisjoint(fixed[sample]):
                    raise self.error(f"sample {sample} with the same content", "another content", 0, number)


def _names(part: Pass, blind: bool) -> list[tuple[Hashable, ...]]:
    """The samples of each batch; where they have no names, its kinds and shapes."""
    if not blind:
        return part.ids
    return [_kinds(seen) for seen in part.batches]


def _kinds(seen: Seen) -> tuple[str, ...]:
    return tuple(f"{leaf.path} {leaf.kind}".strip() for leaf in seen.leaves)


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    return next((number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def _times(number: int) -> str:
    return ("never", "once", "twice")[number] if number < 3 else f"{number} times"


def _end(reading: _Reading, epoch: int) -> tuple[str, str]:
    """How a pass ended: by an exception with these words, never, or by itself."""
    if epoch < len(reading.passes) - 1 or not (reading.endless or reading.raised):
        return "ended", ""
    if reading.raised is None:
        return "endless", ""
    # A DataLoader's worker sends a traceback, whose last line has the class before the words.
    kind, words = reading.raised.kinds[0], reading.raised.message.rstrip().rpartition("\n")[2]
    return kind, words.rpartition(f"{kind.rpartition('.')[2]}: ")[2]


def _told_end(reading: _Reading, epoch: int) -> str:
    kind, words = _end(reading, epoch)
    number = len(reading.passes[epoch].batches)
    if kind == "ended":
        return f"the pass ends after {number} batches"
    return f"no end within {number} batches" if kind == "endless" else f"after {number} batches {kind}: {words}"


def _told(length: int | Failure) -> str:
    return f"raises {length}" if isinstance(length, Failure) else str(length)


# --- several ranks ----------------------------------------------------------------------------------------------------


def _compare_ranks(examination: Examination, departs: frozenset[str] | None) -> Outcome:
    """Ranks have as much as where the source itself divides; joined, their batches are one rank's.

    The latter only of a loader that says what it does in another way than the source, and does not name its ranks.
    """
    for world_size in examination.worlds[1:]:
        calls = [
            (rank, _read_side, (examination.named, examination.options(rank, size), _Way(), "plain", False))
            for size in (1, world_size)
            for rank in range(size)
        ]
        alone, *plain = examination.run(calls)
        try:
            wrapped = examination.heads(world_size)
        except LawError as error:
            if f"\n{_ERRORS}." not in error.got:
                raise
            return Outcome("refused clearly", error.got.splitlines()[0])
        if not all(isinstance(each, _Reading) for each in (alone, *plain)):
            return Outcome("not applicable", "the plain loader cannot be made for several ranks")
        _same_shares(examination, alone, plain, wrapped)
        ours = departs is not None and departs.isdisjoint({"tail", "ranks"})
        if ours and all(examination.capability(name)[0] for name in ("rank_independent", "elastic_world")):
            _same_global_batches(examination, wrapped)
    return HOLDS


def _same_shares(
    examination: Examination, alone: _Reading, plain: Sequence[_Reading], wrapped: Sequence[Recording]
) -> None:
    for rank, (one, got) in enumerate(zip(plain, wrapped, strict=True)):
        for epoch, (whole, part, mine) in enumerate(zip(alone.passes, one.passes, got.passes, strict=False)):
            counts = [sum(map(len, each.ids)) for each in (whole, part, mine)]
            if counts[1] < counts[0] and counts[1] != counts[2]:
                raise examination.error(
                    f"on rank {rank} of {len(plain)}, as the plain loader: {counts[1]} samples",
                    f"{counts[2]} samples",
                    epoch=epoch,
                    cause="the source divides its samples over the ranks itself, and they are divided otherwise here",
                    cure="state shard=, or the tail rule (tail=) that the source has",
                )


def _same_global_batches(examination: Examination, wrapped: Sequence[Recording]) -> None:
    """In rank order the ranks' batches are the global batch, so joined they are the batches of one rank."""
    alone = examination.observed()
    for epoch, one in enumerate(alone.passes):
        steps = zip(*(recording.passes[epoch].ids for recording in wrapped), strict=False)
        joined = [sample for step in steps for ids in step for sample in ids]
        at = _first_difference([sample for ids in one.ids for sample in ids], joined)
        if at is not None:
            raise examination.error(
                f"the batches of {len(wrapped)} ranks, joined in rank order, are those of one rank",
                f"place {at} is sample {joined[at]}",
                epoch=epoch,
                cause="ranks do not take contiguous blocks of each global batch",
                cure="let rank r of n take the r-th block of each global batch",
            )
