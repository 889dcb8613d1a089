"""Wrappers: objects that pass on the batches of one DataLoader, one for one, such as those that move them to a device.

midepoch reads a copy of the wrapper in which a `_Feed` stands for the DataLoader. It gives the batches of a session of
the DataLoader's own adapter, which jumps. While the wrapper works on a batch, the global generators are seeded with
that batch's key. So what it makes of a batch follows from the batch alone, also where it works ahead.

Nothing but a trial can tell whether a wrapper does pass batches on one for one and keeps nothing from one to the next.
So its second batch in a row must be what it makes first after a jump to it, and it must keep the same then. Modules are
the user's own in every copy: a trial begins with what they hold, and gives it back.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import gc
import itertools
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midepoch.copying import copy_with, reached, shared_modules, what_code_shares
from midepoch.dividing import attributes_of
from midepoch.errors import SourceError
from midepoch.loader.adapter import Adapter, Run, Seen, Session
from midepoch.order.keys import derive_key, extend_key
from midepoch.randomness.owned import find_generators, global_generators
from midepoch.randomness.streams import Purpose, Streams
from midepoch.samplers import length_of, repeated
from midepoch.state.witness import Look, look_at

from .private import (
    attributes_of_torch,
    gives_its_own,
    is_iterator,
    iterates_as_torch,
    iterates_with,
    not_saved,
    plain_loader,
)
from .trials import started_threads

__all__ = ["Inside", "NotOneForOneError", "Through", "held_in", "inside_of"]

_DEEPEST = 8  # wrappers in one another
_MOST_AHEAD = 2  # batches inside that a wrapper has asked for and not yet handed out
_LARGEST_BUFFER = 1 << 20  # bytes; a larger one of a module is a table that does not change


class NotOneForOneError(Exception):
    """Why a wrapper's batches do not follow, one for one, from those inside."""


class Inside(NamedTuple):
    """The DataLoader, or the iterator of another backend, inside a wrapper.

    Attributes:
        loader: as torch's own class would iterate it; or that iterator.
        chain: the wrapper, the one in it, and so on, each with the name of the attribute that leads on; the last name
            is empty if the wrapper itself is a DataLoader, with an ``__iter__`` of its own.
        idle: names of methods that do nothing while midepoch gives the batches, such as a reset at an epoch's end.
    """

    loader: Any
    chain: tuple[tuple[Any, str], ...]
    idle: frozenset[str] = frozenset()


def held_in(
    source: Any, is_wanted: Callable[[Any], bool], idle: frozenset[str] = frozenset(), depth: int = 0
) -> Inside | None:
    """The one object that `is_wanted` in an attribute of `source`, or of an object there; None if there is not one.

    `depth`: wrappers around this one.
    """
    attributes = getattr(source, "__dict__", {})
    if not attributes or depth == _DEEPEST or not callable(getattr(type(source), "__iter__", None)):
        return None
    found: dict[int, tuple[str, Inside]] = {}
    for name, each in attributes.items():
        if is_wanted(each):
            found[id(each)] = name, Inside(each, (), idle)
        elif not isinstance(each, type | Dataset | torch.nn.Module):
            further = held_in(each, is_wanted, idle, depth + 1)
            if further is not None:
                found[id(each)] = name, further
    if len(found) != 1:
        return None
    ((name, further),) = found.values()
    return further._replace(chain=((source, name), *further.chain))


def inside_of(source: Any, depth: int = 0) -> Inside | None:
    """The one DataLoader over a map-style dataset in an attribute of `source`, or `source` itself; None if none is.

    `depth`: wrappers around this one.
    """
    kind, attributes = type(source), getattr(source, "__dict__", {})
    if not attributes or depth == _DEEPEST or not callable(getattr(kind, "__iter__", None)):
        return None
    found: dict[int, tuple[str, Inside | None]] = {}
    for name, each in attributes.items():
        if iterates_as_torch(each):
            found[id(each)] = name, Inside(each, ()) if _is_mapped(each) else None
        elif isinstance(each, DataLoader) or not isinstance(each, type | Dataset | torch.nn.Module):
            further = inside_of(each, depth + 1)
            if further is not None or isinstance(each, DataLoader):
                found[id(each)] = name, further
    if isinstance(source, DataLoader) and "dataset" in attributes:
        seen = gives_its_own(source) and not found and _is_mapped(source)
        return Inside(_as_torch(source), ((source, ""),)) if seen else None
    if len(found) != 1:
        return None
    ((name, further),) = found.values()
    if further is None or length_of(source) not in (None, length_of(attributes[name])):
        return None
    return Inside(further.loader, ((source, name), *further.chain))


def _is_mapped(loader: DataLoader[Any]) -> bool:
    return not isinstance(loader.dataset, IterableDataset)


def _as_torch(loader: DataLoader[Any]) -> DataLoader[Any]:
    """`loader` as torch's own class would iterate it, over the samplers in those that begin again."""
    return plain_loader(loader, **{name: inside for name, _, inside in _beginning_again(loader)})


def _beginning_again(loader: DataLoader[Any]) -> list[tuple[str, Any, Any]]:
    """The attributes of a DataLoader with a sampler that begins again, that sampler, and the one in it."""
    samplers = ((name, vars(loader)[name]) for name in ("sampler", "batch_sampler"))
    found = ((name, sampler, repeated(sampler)) for name, sampler in samplers)
    return [(name, sampler, inside) for name, sampler, inside in found if inside is not None]


class _Feed:
    """Stands for the DataLoader inside, or for an iterator of it.

    It refers weakly to all that it uses: whoever searches the wrapper for random generators finds nothing in it.
    """

    __slots__ = ("__weakref__", "_idle", "_loader", "iterator", "reading")

    def __init__(self, loader: Any = None, idle: frozenset[str] = frozenset()) -> None:
        self._loader, self._idle = None if loader is None else weakref.ref(loader), idle
        self.iterator = self if loader is None else _Feed()
        self.reading: Callable[[], _Reading | None] = _nothing

    def __iter__(self) -> _Feed:
        reading = self.reading()
        if reading is not None and self._loader is not None:
            reading.begin()
        return self.iterator

    def serve(self, reading: _Reading) -> None:
        """Give the batches of `reading`."""
        self.reading = self.iterator.reading = weakref.ref(reading)

    def __next__(self) -> Any:
        reading = self.reading()
        if reading is None:
            raise StopIteration
        return reading.ask()

    def __len__(self) -> int:
        return len(self._theirs())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing if name in self._idle else getattr(self._theirs(), name)

    def _theirs(self) -> Any:
        loader = None if self._loader is None else self._loader()
        if loader is None:
            raise AttributeError("an iterator of a DataLoader has batches only")
        return loader


class _Length:
    """Stands for the sampler in a sampler that begins again: as long as what is left.

    Subclasses that keep one iterator for all passes ask for so many batches in each.
    """

    def __init__(self, original: Any, batches: int) -> None:
        self._original, self._batches = original, batches

    def __len__(self) -> int:
        return self._batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._original, name)


class _Copied(NamedTuple):
    """A copy of a wrapper.

    Attributes:
        wrapper: the copy.
        holders: it and the wrappers in it, each with the names of attributes that are not its own.
        feed: that stands for the DataLoader inside.
    """

    wrapper: Any
    holders: tuple[tuple[Any, frozenset[str]], ...]
    feed: _Feed

    def own(self) -> dict[str, Any]:
        """What the wrappers hold themselves now, by name."""
        return {
            f"{type(each).__name__}.{name}": value
            for each, others in self.holders
            for name, value in vars(each).items()
            if name not in others and type(value) is not _Feed
        }


class Through:
    """Reads a wrapper by the DataLoader inside.

    Attributes:
        name: of the wrapper's class, for messages.
        lead: batches inside that the wrapper asks for ahead; None if that has not been proved yet.
        statistics: names of what its modules change as it makes batches.
        shares: what its code uses that copies share; empty if nothing is known.
    """

    def __init__(self, inside: Inside) -> None:
        self._inside = inside
        self.name = type(inside.chain[0][0]).__name__
        self.lead: int | None = None
        self.statistics: tuple[str, ...] = ()
        self.shares = ""

    def copied(self, batches: int | None) -> _Copied:
        """A new copy of the wrapper. `batches`: that it will be given; None if nobody knows.

        Raises:
            NotOneForOneError: there is none.
        """
        chain = self._inside.chain
        theirs, last = chain[-1]
        loader = getattr(theirs, last) if last else theirs
        feed = _Feed(loader, self._inside.idle)
        instead: dict[int, Any] = {id(loader): feed} if last else {}
        shared: list[Any] = []
        for each, _ in chain:
            of_torch = attributes_of_torch() if isinstance(each, DataLoader) else ()
            shared += [value for name, value in vars(each).items() if name in of_torch]
            instead |= {id(value): feed.iterator for value in vars(each).values() if is_iterator(value)}
        shared += global_generators()  # a method of one leads to it, and it is seeded without being searched for
        wrapper, why = copy_with(chain[0][0], [each for each, _ in chain], instead, shared)
        if wrapper is None:
            raise NotOneForOneError(f"it cannot be read through a copy: {why}")
        holders, each = [], wrapper
        for original, name in chain:
            others = {name}
            if isinstance(original, DataLoader):
                counted = {}
                if batches is not None:
                    for attribute, sampler, inside in _beginning_again(original):
                        counted[attribute] = copy.copy(sampler)
                        counted[attribute].__dict__.update(dict.fromkeys(vars(sampler), _Length(inside, batches)))
                iterates_with(each, feed, **counted)
                others |= attributes_of_torch()
            holders.append((each, frozenset(others)))
            each = getattr(each, name) if name else None
        return _Copied(wrapper, tuple(holders), feed)

    def around(self, session: Session, run: Run, adapter: Adapter) -> Session:
        """A session of the wrapper's batches. `session`: of `adapter`, that of the DataLoader inside, opened for `run`.

        Raises:
            NotOneForOneError: a first trial shows that they do not follow, one for one, from those inside.
        """
        return _WrapperSession(self, session, run, adapter)


class _Reading:
    """A copy of a wrapper that is being read, and the batches inside that it asks for.

    Args:
        copied: the copy.
        take: returns the next batch inside.
        first: the number of that batch in the session.
        key_of: from a batch's number to the key of its stream.
        mark: called before each batch inside; None where no marks are kept.

    Attributes:
        first: the number of the first batch.
        asked, handed: numbers of the batches that come next, inside and outside.
        ready: at most one batch, which was read before the wrapper asks for it.
        ended, error: how the batches inside have ended.
        kept: copies of the batches inside after the first; None if none are kept.
        marks: of the batches inside that are still to be handed out, by number.
        begins: how often the wrapper has begun to iterate the DataLoader inside.
        trouble: what shows that it is not one for one; empty if nothing does.
    """

    def __init__(
        self, copied: _Copied, take: Callable[[], Any], first: int, key_of: Callable[[int], int],
        mark: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        self._take, self._key_of, self._mark = take, key_of, mark
        self.marks: dict[int, Any] = {}
        self._key = -1, 0  # a batch's number, and the key of its stream
        self.first = self.asked = self.handed = first
        self.ready: deque[Any] = deque()
        self.ended = False
        self.error: Exception | None = None
        self.kept: list[Any] | None = None
        self.begins = 0
        self.trouble = ""
        self._thread = threading.get_ident()
        self._copied = copied
        copied.feed.serve(self)
        roots = (*(type(each) for each, _ in copied.holders), *copied.own().values())
        self.streams = Streams(*roots, devices=torch.cuda.is_available())
        self.streams.begin_pass()
        self._next: Callable[[], Any] = self._first
        self._iterator: Any = None

    def fetch(self) -> None:
        """Have the next batch inside ready, if there is one."""
        if self.ready or self.ended or self.error is not None:
            return
        try:
            if self._mark is not None:
                self.marks[self.asked] = self._mark()
            batch = self._take()
        except StopIteration:
            self.ended = True
        except Exception as error:  # noqa: BLE001  # it is raised where this batch is asked for
            self.error = error
        else:
            if self.kept is not None and self.asked:
                self.kept.append(_copy_of(batch))
            self.ready.append(batch)

    def begin(self) -> None:
        """Count that the wrapper begins to iterate the DataLoader inside.

        Raises:
            NotOneForOneError: it does so again. One that never ends would ask for ever.
        """
        self.begins += 1
        if self.begins > 1:
            self.trouble = "it begins to iterate the DataLoader inside more than once"
            raise NotOneForOneError(self.trouble)

    def ask(self) -> Any:
        """The next batch inside, for the wrapper. From here on, the generators stand at this batch's stream."""
        if threading.get_ident() != self._thread:
            self.trouble = "it reads in a thread of its own"
            raise StopIteration
        if not self.ready:
            self.fetch()
        if not self.streams.unused:
            self._start()  # the end has a stream, too
        if not self.ready:
            raise StopIteration
        self.asked += 1
        return self.ready.popleft()

    def _start(self) -> None:
        """Put the generators under the stream of the batch inside that comes next."""
        if self._key[0] != self.asked:
            self._key = self.asked, self._key_of(self.asked)
        self.streams.start_noted(self._key[1])

    def give(self) -> Any:
        """The wrapper's next batch. Raises what the wrapper raises."""
        if not self.ready:
            self.fetch()
        self.streams.begin()
        try:
            self._start()  # for what is drawn before a batch is asked for
            batch = self._next()
        finally:
            self.streams.end()
        self.handed += 1
        return batch

    def watched(self) -> tuple[bool, Any]:
        """The same without seeding. False if random numbers were drawn after all; then the copy is of no use any more.

        Only while the streams are `unused`.
        """
        if not self.ready:
            self.fetch()
        streams = self.streams
        streams.look()
        try:
            batch = self._next()
        except BaseException:
            if streams.leave():
                return False, None
            raise
        if streams.leave():
            return False, None
        self.handed += 1
        return True, batch

    def _first(self) -> Any:
        self._iterator = iter(self._copied.wrapper)
        self._next = self._iterator.__next__
        return self._next()

    def modules(self) -> _Modules:
        """The modules that the wrapper holds, as they are now."""
        return _Modules(shared_modules(self._copied.wrapper))

    def late(self) -> bool:
        """Whether the first batch made generators, or used those of a device for the first time. They had no stream."""
        return self.streams.made_late(*self._copied.own().values())

    def own(self) -> dict[str, Any]:
        """What the wrappers hold themselves now, by name."""
        return self._copied.own()

    def keeps(self) -> dict[str, Any]:
        """What the wrapper, and its iterator, keep between two batches and may read again."""
        wrappers = {id(each) for each, _ in self._copied.holders}
        kept = self._copied.own()
        kept |= _kept_by(self._iterator, list(kept.values()), wrappers)
        return {name: value for name, value in kept.items() if id(value) not in wrappers and type(value) is not _Feed}

    def shares(self) -> str:
        """What code of the wrapper, and of what it holds, uses that a copy shares with the original; empty if none."""
        return what_code_shares(self._copied.wrapper, (DataLoader, _Feed))

    def again(self, take: Callable[[], Any]) -> _Reading:
        """Another pass over this copy. `take`: returns the next batch inside, from the first one on."""
        return _Reading(self._copied, take, self.first, self._key_of)

    def ends(self) -> bool:
        """Whether the wrapper gives no more. What it raises at its end is no concern: nobody would have asked."""
        try:
            self.give()
        except Exception:  # noqa: BLE001  # by its length, it may have expected more
            return not self.trouble
        return False

    def close(self) -> None:
        """Drop the copy."""
        self.ended = True
        self.ready.clear()
        iterator, self._iterator, self._next = self._iterator, None, _at_its_end
        if isinstance(iterator, types.GeneratorType):
            with contextlib.suppress(Exception):  # what a user's clean-up raises has no place to go
                iterator.close()


class _Modules:
    """What modules hold besides their parameters, such as the running statistics of a BatchNorm, at one moment."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        own = [part for part in parts.values() if not isinstance(part, torch.jit.ScriptModule)]
        self._held = [(part, {**vars(part), "_buffers": dict(part._buffers)}) for part in own]
        self._containers = [
            (each, copy.copy(each))
            for part in own
            for name, each in vars(part).items()
            if name not in _of_torch() and type(each) in (list, dict, set, deque)
        ]
        self._buffers = [
            (f"{type(part).__name__}.{name}", buffer, buffer.detach().clone())
            for part in parts.values()
            for name, buffer in part.named_buffers(recurse=False)
            if buffer.nbytes <= _LARGEST_BUFFER
        ]

    def put_back(self) -> None:
        """Make them hold this again."""
        for part, held in self._held:
            vars(part).clear()
            vars(part).update({**held, "_buffers": dict(held["_buffers"])})
        for container, former in self._containers:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(former)
        with torch.no_grad():
            for _, buffer, value in self._buffers:
                buffer.copy_(value)

    def statistics(self) -> tuple[str, ...]:
        """The names of buffers that hold something else now. They are saved with a model."""
        names = dict.fromkeys(name for name, buffer, value in self._buffers if not torch.equal(buffer, value))
        for part, held in self._held:
            others = (name for name, buffer in held["_buffers"].items() if part._buffers.get(name) is not buffer)
            names.update(dict.fromkeys(f"{type(part).__name__}.{name}" for name in others))
        return tuple(names)

    def looks(self) -> dict[tuple[int, str], Look]:
        """What they hold now that is not saved with a model, by part and name."""
        return {
            (number, f"{type(part).__name__}.{name}"): look_at(each)
            for number, (part, _) in enumerate(self._held)
            for name, each in (*vars(part).items(), *part._buffers.items())
            if name not in (not_saved(part) ^ part._buffers.keys()) | _of_torch()
        }


@functools.cache
def _of_torch() -> frozenset[str]:
    """The attributes of every module."""
    return frozenset(vars(torch.nn.Module()))


def _copy_of(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception as error:  # noqa: BLE001  # of any library
        raise NotOneForOneError(f"its batches cannot be copied ({type(error).__name__}: {error!s:.100})") from None


def _kept_by(iterator: Any, values: list[Any], wrappers: set[int]) -> dict[str, Any]:
    """What an iterator, and those that it reads, keep, and what counts in other values, by name.

    That are variables, attributes, counts of iterators, and what functions close over or have as default arguments.
    """
    kept: dict[str, Any] = {}

    def counting(value: Any) -> list[tuple[Any, bool]]:
        found = reached(value, lambda each: id(each) in wrappers or isinstance(each, DataLoader | _Feed))
        return [(each, True) for each in found if isinstance(each, Iterator | types.FunctionType)]

    queue: deque[tuple[Any, bool]] = deque([(iterator, True)])
    for value in values:
        queue.extend(counting(value))
    seen: dict[int, Any] = {}
    while queue:
        each, counts = queue.popleft()
        if id(each) in seen or id(each) in wrappers or type(each) is _Feed:
            continue
        seen[id(each)] = each
        frame = getattr(each, "gi_frame", None)
        if frame is not None:
            read = _read_by(frame.f_code)
            before = "" if each is iterator else f"{frame.f_code.co_qualname}."
            here = {f"{before}{name}": value for name, value in frame.f_locals.items() if name in read}
        elif isinstance(each, types.FunctionType):
            here = _held_in_function(each)
        else:
            here = {f"{type(each).__name__}.{name}": value for name, value in attributes_of(each)}
            if counts:
                here[type(each).__name__] = _counts_of(each)
        for name, value in here.items():
            if not isinstance(value, Iterator | types.FunctionType):
                while name in kept:
                    name += "'"  # of another object of the class
                kept[name] = value
            queue.extend(counting(value))
        # What a loop itself reads counts only in variables, which have been looked at.
        held = gc.get_referents(each)
        held += [member for value in held if type(value) is tuple for member in value]  # as map and zip hold theirs
        queue.extend(
            (value, frame is None or type(value) is itertools.islice)
            for value in held
            if isinstance(value, Iterator | types.FunctionType)
        )
    return kept


def _held_in_function(function: types.FunctionType) -> dict[str, Any]:
    """What a function closes over, and its default arguments."""
    code, defaults = function.__code__, function.__defaults__ or ()
    held = dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
    held |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            held[name] = cell.cell_contents
    return {f"{function.__qualname__}.{name}": value for name, value in held.items()}


def _counts_of(iterator: Any) -> list[int]:
    """The numbers in one of python's own iterators, such as enumerate."""
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return []
    try:
        with warnings.catch_warnings(action="ignore"):
            parts = iterator.__reduce__()[1:]
    except Exception:  # noqa: BLE001  # it has no numbers, or does not show them
        return []
    return [each for part in parts for each in (part if isinstance(part, tuple) else (part,)) if type(each) is int]


def _read_by(code: types.CodeType) -> set[str]:
    """The local variables that code reads. One with which a loop only counts says nothing of what follows."""
    read: set[str] = set()
    for each in dis.get_instructions(code):
        if "LOAD_" in each.opname and any(kind in each.opname for kind in ("FAST", "DEREF", "CLOSURE")):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            read.update(names[1:] if each.opname.startswith("STORE_") else names)
    return read


class _WrapperSession(Session):
    """A session of a wrapper's batches.

    A wrapper that drew nothing for the first one is only watched from then on. If it draws all the same, another copy
    continues at the batch that is to be handed out, with seeding.
    """

    def __init__(self, through: Through, inner: Session, run: Run, adapter: Adapter) -> None:
        self._through, self._inner, self._run, self._adapter = through, inner, run, adapter
        self._key = derive_key(Purpose.WRAPPER, run.seed, run.epoch)
        self._global_batch = adapter.units_per_step(run.world)
        self._offset = adapter.sharing(run.world).rank * adapter.batch_size  # of this rank's part of a global batch
        self._seen: Seen | None = None
        self._made: deque[Any] = deque()  # batches that the trial has made
        self._watches = False
        self.marks = inner.marks
        try:
            self._reading = self._read_from(0)
        except NotOneForOneError:
            inner.close()
            raise
        try:
            if through.lead is None:
                self._try()
            self._watches = self._may_watch()
        except BaseException:
            self.close()
            raise

    # --- the inner session's answers ---

    @property
    def seen(self) -> Seen | None:  # type: ignore[override]
        """The inner session's."""
        return self._seen or self._inner.seen

    def mark(self) -> Any:
        """The inner session's, before the batch that is to be handed out."""
        if not self.marks:
            return None
        reading = self._reading
        number = reading.handed - len(self._made)
        while (oldest := next(iter(reading.marks), number)) < number:
            del reading.marks[oldest]
        return reading.marks[number] if number in reading.marks else self._inner.mark()

    def detail(self, mark: Any) -> str:
        """The inner session's. Without marks, it does not depend on the place."""
        return self._inner.detail(mark)

    def following(self) -> str:
        """The inner session's."""
        return self._inner.following()

    def close(self) -> None:
        """Drop the copy, and close the inner session."""
        self._made.clear()
        self._reading.close()
        self._inner.close()

    # --- batches ---

    def take(self) -> Any:
        """The wrapper's next batch."""
        if self._made:
            return self._made.popleft()
        reading = self._reading
        if not reading.ready:
            reading.fetch()
            if not reading.ready and reading.asked == reading.handed:
                raise reading.error or StopIteration
        try:
            if self._watches:
                sound, batch = reading.watched()
                if not sound:
                    self._restart(reading.handed)
                    return self.take()
            else:
                batch = reading.give()
                if reading.handed == reading.first + 1:
                    reading.late()
                    self._watches = self._may_watch()
        except StopIteration:
            raise self._early_end(reading) from None
        except NotOneForOneError as error:
            raise SourceError(f"{self._name} is no longer one for one: {error}{_INSTEAD}") from None
        if reading.asked - reading.handed != self._through.lead:
            self._check(reading)
        return batch

    def _may_watch(self) -> bool:
        """A batch that is only watched may have to be made again, which statistics would count twice."""
        return self._reading.streams.unused and not self._through.statistics

    def _early_end(self, reading: _Reading) -> Exception:
        """What the end of the wrapper's iterator means while there are batches inside."""
        if reading.error is not None:
            return reading.error
        return SourceError(
            f"{self._name} ended after {reading.handed} batches, while the DataLoader inside had given it "
            f"{reading.asked} and had more{_INSTEAD}"
        )

    def _check(self, reading: _Reading) -> None:
        """Raise a SourceError if the wrapper is not one for one any more."""
        reading.fetch()  # it may know by their number that there are no more
        ahead, lead = reading.asked - reading.handed, self._through.lead
        ends = reading.ended or reading.error is not None
        if lead is None or (ends and 0 <= ahead <= lead):
            return
        raise SourceError(
            f"{self._name} passed on the batches of the DataLoader inside one for one, {lead} ahead; after "
            f"{reading.handed} batches it has asked for {reading.asked}{_INSTEAD}"
        )

    @property
    def _name(self) -> str:
        return self._through.name

    def _key_of(self, number: int) -> int:
        return extend_key(self._key, self._run.position + number * self._global_batch + self._offset)

    def _read_from(self, number: int) -> _Reading:
        left = None if self._run.share is None else self._run.share.steps - number
        mark = self._inner.mark if self.marks else None
        return _Reading(self._through.copied(left), self._inner.take, number, self._key_of, mark)

    def _restart(self, number: int) -> None:
        """Read on with another copy, from this batch of the session on."""
        run, adapter = self._run, self._adapter
        self._seen, self._watches = self.seen, False
        detail = self._inner.detail(self._reading.marks.get(number)) if self.marks and number else run.detail
        self._made.clear()
        self._reading.close()
        with adapter.holding():
            self._inner.close()
        position = run.position + number * self._global_batch
        share = adapter.share(run.seed, run.epoch, position, run.world, detail)
        self._inner = adapter.open(Run(run.epoch, position, run.seed, run.world, share, run.tail, detail))
        self._reading = self._read_from(number)

    # --- the trial ---

    def _try(self) -> None:
        """Make the first two batches, and the second one again after a jump to it.

        Nothing is proved where the epoch has a single batch left, or where one inside cannot be read.

        Raises:
            NotOneForOneError: they show that this wrapper has to be read from its start.
        """
        start = self._reading.modules()
        try:
            self._try_from(start)
        except NotOneForOneError:
            start.put_back()
            raise

    def _try_from(self, start: _Modules) -> None:
        if not self._make():
            return
        reading = self._reading
        if reading.late():
            start.put_back()
            self._restart(0)  # it drew from generators that did not exist yet
            if not self._make():
                return
            reading = self._reading
        lead, look = reading.asked - reading.handed, look_at(self._made[0])
        if not self._make():
            if reading.ended and reading.asked == reading.handed and not reading.ends():
                raise NotOneForOneError(reading.trouble or _GOES_ON)
            return
        reading.fetch()  # it may know by their number that there are no more
        if not 0 <= lead <= _MOST_AHEAD or (lead != reading.asked - reading.handed and not reading.ended):
            raise NotOneForOneError(f"for {len(self._made)} batches it asks for {reading.asked}")
        self._through.statistics = start.statistics()
        looks = start.looks()
        start.put_back()
        self._jump(reading, (reading.kept or [])[: reading.asked - 1], start, looks)
        self._through.lead, self._through.shares = lead, reading.shares()
        start.put_back()
        # It hands out one and the same object each time, or statistics would be ahead of what is handed out.
        if self._through.statistics or look_at(self._made[0]).differing(look):
            self._restart(0)
        reading.kept = None

    def _make(self) -> bool:
        """Make one more batch. False if there is none, or one inside cannot be read."""
        reading = self._reading
        if reading.kept is None:
            reading.kept = []
        reading.fetch()
        if reading.error is not None or (not reading.ready and reading.asked == reading.handed):
            return False
        try:
            self._made.append(reading.give())
        except StopIteration:
            if reading.error is not None:
                return False
            raise NotOneForOneError(reading.trouble or "it ends before the batches inside do") from None
        except NotOneForOneError:
            raise
        except Exception as error:  # noqa: BLE001  # read from its start, it will raise it again
            raise NotOneForOneError(f"a copy of it raised {type(error).__name__}: {error!s:.200}") from None
        return reading.error is None

    def _jump(
        self, reading: _Reading, batches: list[Any], start: _Modules, looks: dict[tuple[int, str], Look]
    ) -> None:
        """Compare what another copy makes first of these batches with what was made of them in a row.

        `start`, `looks`: the modules before the first batch, and what they have kept of the batches in a row.
        """
        other, batch = self._made_of(copy.deepcopy(batches))
        kept, others = other.keeps(), start.looks()
        made, jumped = look_at(self._made[1]), look_at(batch)
        if differing := made.differing(jumped):
            raise NotOneForOneError(f"after a jump it makes something else of a batch ({made.names(differing)})")
        for name, value in reading.keeps().items():
            again = kept.get(name)
            if value is not again and look_at(value).differing(look_at(again)):
                raise NotOneForOneError(f"it keeps something of earlier batches, in {name}")
        for key, look in looks.items():
            if key not in others or look.differing(others[key]):
                raise NotOneForOneError(f"it keeps something of earlier batches, in {key[1]}")
        known = {id(each.generator) for each in find_generators(*other.own().values())[0]}
        if any(id(each.generator) not in known for each in find_generators(*kept.values())[0]):
            raise NotOneForOneError("it makes a generator of random numbers in each pass")
        self._to_the_end(other, len(batches) - 1)
        other.close()
        start.put_back()
        self._pass_again(other, batches, jumped)
        if reading.asked > len(self._made):
            self._made_of(batches[:1])[0].close()  # it has to notice the end

    def _pass_again(self, reading: _Reading, batches: list[Any], look: Look) -> None:
        """Compare what a copy makes first in another pass: each pass of midepoch's reads a new copy, which forgets."""
        again = reading.again(iter(copy.deepcopy(batches)).__next__)
        try:
            batch = again.give()
        except Exception as error:  # noqa: BLE001  # it may be meant for one pass
            raise NotOneForOneError(f"another pass of it raised {type(error).__name__}: {error!s:.200}") from None
        if look.differing(look_at(batch)):
            raise NotOneForOneError("it makes something else of a batch in each pass")
        again.close()

    def _to_the_end(self, reading: _Reading, left: int) -> None:
        """Read a copy that has given its first batch, and has so many left, to its end."""
        try:
            for _ in range(left):
                reading.give()
        except Exception as error:  # noqa: BLE001  # the first copy has been read without
            why = f"after a jump, a copy of it raised {type(error).__name__}: {error!s:.200}"
            raise NotOneForOneError(why) from None
        if not reading.ends():
            raise NotOneForOneError(reading.trouble or _GOES_ON)

    def _made_of(self, batches: list[Any]) -> tuple[_Reading, Any]:
        """What another copy makes first of these batches, after which there is no other."""
        other = _Reading(self._through.copied(len(batches)), iter(batches).__next__, 1, self._key_of)
        try:
            with started_threads() as threads:
                batch = other.give()
        except Exception as error:  # noqa: BLE001  # the first copy has been read without
            why = f"after a jump, a copy of it raised {type(error).__name__}: {error!s:.200}"
            raise NotOneForOneError(why) from None
        if threads:
            raise NotOneForOneError(f"it works in threads of its own ({', '.join(threads[:4])})")
        return other, batch


_GOES_ON = "it goes on after the last batch inside"
_INSTEAD = (
    "; wrap that DataLoader itself, and pass what is done with its batches as then=, or wrap a generator function that "
    "reads this one"
)


def _nothing() -> None:
    return None


def _at_its_end() -> Any:
    raise StopIteration
