"""What an iterable promises is tried when reading begins: that it repeats itself, and that no thread of its own draws.

The first is tried on a copy that shares nothing that changes: a resumed process begins an epoch with the first pass
over a new object, so a second pass over one object must begin alike under the same random streams. Where the first pass
that is read to its end changes what the source keeps, such as a count of passes, it is tried once more, on a copy of it
as it then is.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import DataLoader, Dataset, get_worker_info

from ..copying import Apart, directly_held, private_copy
from ..order.keys import derive_key, extend_key
from ..randomness.streams import Purpose, Streams
from ..state.digest import checksum_of
from ..state.witness import Look, is_inert, look_at
from ..trying import Finding
from .private import let_go

__all__ = [
    "Beginning", "Outcome", "Trial", "compare", "keeps_workers", "of_kept_workers", "passes_differ",
    "reading_threads", "reads_a_loader", "standing", "started_threads", "undisturbed", "used_differs",
]  # fmt: skip

_LARGEST_BATCH = 256 << 20  # bytes that are copied

_Read = TypeVar("_Read")


class Trial(NamedTuple):
    """What came of trying a source.

    Attributes:
        untried: why passes could not be compared; empty if they were.
        differs: in what two passes begin differently; empty if they do not.
        threads: the names of threads that go on reading.
    """

    untried: str = ""
    differs: str = ""
    threads: tuple[str, ...] = ()


class Beginning(NamedTuple):
    """How a pass over a source that has not been read yet begins.

    Attributes:
        seed, epoch, own: of its streams.
        look: at its first unit.
        kept: what the source keeps after that unit.
    """

    seed: int
    epoch: int
    own: tuple[int, ...]
    look: Look
    kept: str


def passes_differ(
    copied: Apart, open_source: Callable[[], Iterator[Any]], seed: int, epoch: int, own: tuple[int, ...]
) -> tuple[Trial, Beginning | None]:
    """Compare the first units of two passes over a copy, under the same streams.

    Args:
        copied: the copy.
        open_source: begins a pass over it.
        seed, epoch, own: of the streams of the pass that is being read.

    Returns:
        What came of it, and how the first pass began if both were equal.
    """
    try:
        (one, kept), (other, _) = _beginnings(copied, open_source, seed, epoch, own, 2)
    except Exception as error:  # noqa: BLE001  # the original has been read without
        return Trial(untried=f"a copy of it raised {type(error).__name__}: {error!s:.200}"), None
    if one is None or other is None:
        return Trial(differs="" if one is other else "one of them is empty"), None
    differing = one.differing(other)
    if differing:
        return Trial(differs=f"they differ in {one.names(differing)}"), None
    return Trial(), Beginning(seed, epoch, own, one, kept)


def used_differs(copied: Apart, open_source: Callable[[], Iterator[Any]], beginning: Beginning, unread: str) -> Trial:
    """Compare how a pass begins over a copy of a source that was read to its end with how its first pass began.

    Args:
        copied: the copy.
        open_source: begins a pass over it.
        beginning: of the first pass.
        unread: `standing` of the source before that pass.
    """
    seed, epoch, own, one, kept_at_first = beginning
    try:
        ((other, kept),) = _beginnings(copied, open_source, seed, epoch, own, 1)
    except Exception:  # noqa: BLE001  # so would the original, if it is read again
        return Trial()
    differs = "the later one is empty" if other is None else ""
    if other is not None and (differing := one.differing(other)):
        differs = f"they differ in {one.names(differing)}"
    counts = unread != kept_at_first != kept  # it changes with the units of a pass, and goes on in the next one
    return Trial(_COUNTS if counts and not differs else "", differs)


_COUNTS = "it counts its units through all passes, or keeps them, and of a later pass only the first was compared"


def _beginnings(
    copied: Apart, open_source: Callable[[], Iterator[Any]], seed: int, epoch: int, own: tuple[int, ...], passes: int
) -> list[tuple[Look | None, str]]:
    """The first units of so many passes over a copy, each under the same streams, and what it keeps after them."""
    for loader in copied.loaders:
        loader.num_workers = min(loader.num_workers, 1)  # one starts sooner; all passes have as many
    streams = Streams(copied.value)
    looks: list[tuple[Look | None, str]] = []
    try:
        with warnings.catch_warnings(action="ignore"):  # the original has its own
            for _ in range(passes):
                streams.begin_replay()
                with streams as start:
                    start(derive_key(Purpose.OPENING, seed, epoch))
                    tell = getattr(copied.value, "set_epoch", None)
                    if callable(tell) and get_worker_info() is None:
                        tell(epoch)
                    iterator = iter(open_source())
                    start(extend_key(derive_key(Purpose.SAMPLE, seed, epoch, *own), 0))
                    look = _first(iterator)
                looks.append((look, standing(copied.value)))
                if isinstance(iterator, types.GeneratorType):
                    iterator.close()
                del iterator
    finally:
        for loader in copied.loaders:
            let_go(loader)
    return looks


def standing(source: Any) -> str:
    """A checksum of what a source keeps in its attributes and in closures: a bounded part of it."""
    if isinstance(source, types.FunctionType):
        return checksum_of(_closed_over(source), held=True)
    functions = [each for each in getattr(source, "__dict__", {}).values() if isinstance(each, types.FunctionType)]
    return checksum_of([source, *map(_closed_over, functions)], held=True)


_DEEPEST_FUNCTION = 4  # in closures of one another


def _closed_over(function: types.FunctionType, depth: int = 0) -> list[Any]:
    kept: list[Any] = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            held = cell.cell_contents
            inner = isinstance(held, types.FunctionType) and depth < _DEEPEST_FUNCTION
            kept.append(_closed_over(held, depth + 1) if inner else held)
    return kept


def _first(iterator: Iterator[Any]) -> Look | None:
    for unit in iterator:
        return look_at(unit)
    return None


def undisturbed(batch: Any, read: Callable[[], _Read]) -> tuple[Any, _Read]:
    """The batch as it is now, and what `read` returns: a source may fill one buffer at each read, and hand that out."""
    kept = private_copy(batch, _LARGEST_BATCH) if is_inert(batch) else None
    result = read()
    if kept is not None and look_at(kept).differing(look_at(batch)):
        batch = kept
    return batch, result


# --- a state, tried on a copy -----------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a read gave.

    Attributes:
        batch: None if there was none.
        error: that ended it; StopIteration at the source's end; None if there was a batch.
    """

    batch: Any = None
    error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing was left."""
        return isinstance(self.error, StopIteration)


def compare(of_copy: Outcome, expected: Look) -> Finding:
    """Compare what a copy gave with how the source's own batch looked."""
    if of_copy.ended:
        return Finding("the copy ended where another batch was left", True)
    if of_copy.error is not None:
        error = of_copy.error.__cause__ or of_copy.error  # the source's own
        return Finding(f"the copy raised {type(error).__name__}: {error!s:.200}", True)
    given = look_at(of_copy.batch)
    differing = expected.differing(given)
    if not differing:
        return Finding(unseen=expected.unseen)
    if expected.holds_most(differing):
        return Finding(f"the copy gave another batch ({expected.names(differing)})", True)
    return Finding(f"the copy gave the same samples with other numbers ({expected.names(differing)})")


# --- DataLoaders inside -----------------------------------------------------------------------------------------------


def reads_a_loader(source: Any) -> bool:
    """Whether it holds a DataLoader, or is a function that uses one."""
    return any(isinstance(each, DataLoader) for each in directly_held(source).values())


def keeps_workers(source: Any) -> bool:
    """Whether it reads a DataLoader with persistent workers."""
    return any(isinstance(each, DataLoader) and each.persistent_workers for each in directly_held(source).values())


def of_kept_workers(source: Any) -> str:
    """What to write in place of a source that reads a DataLoader, whose workers may be kept; empty for others."""
    if not reads_a_loader(source):
        return ""
    return (
        "; a DataLoader inside that keeps its workers draws other seeds in later passes: wrap that DataLoader itself, "
        "with what is done to its batches as then=, or leave out persistent_workers"
    )


# --- threads ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started_threads() -> Iterator[list[str]]:
    """The names of the threads that python starts in this block, also of those that have ended; first started, first.

    They may draw from the generators that are under a stream, in an order that depends on timing. Threads may be in
    such blocks at the same time, and leave them in any order.
    """
    note = _Note()
    threading.setprofile(note)
    try:
        yield note.names
    finally:
        note.ended = True
        installed: object = threading.getprofile()
        if installed is note:  # otherwise that of a later block, which restores what was before both
            before = note.before
            while isinstance(before, _Note) and before.ended:
                before = before.before
            threading.setprofile(before)


class _Note:
    """A profile function that notes the thread in which it is called, once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ended = False
        self.before: Any = threading.getprofile()

    def __call__(self, frame: types.FrameType, event: str, argument: object) -> None:
        self.names.append(threading.current_thread().name)
        sys.setprofile(self.before)


_MOST_OBJECTS = 5000  # to be looked at for each thread


def reading_threads(before: Iterable[threading.Thread]) -> tuple[str, ...]:
    """The names of running threads that are not among those `before`, and read data.

    A thread that only moves batches or waits (of a queue, of pinned memory, of a progress bar, of an event loop) refers
    to no dataset, loader or iterator.
    """
    known = set(before)
    return tuple(each.name for each in threading.enumerate() if each not in known and each.is_alive() and _reads(each))


def _reads(thread: threading.Thread) -> bool:
    queue: deque[Any] = deque(thread.__dict__.values())
    seen: dict[int, Any] = {}
    while queue and len(seen) < _MOST_OBJECTS:
        each = queue.popleft()
        if id(each) in seen or isinstance(each, _ATOMS):
            continue
        seen[id(each)] = each
        if isinstance(each, Dataset | DataLoader | types.GeneratorType) or hasattr(type(each), "__next__"):
            return True
        queue.extend(_held_by(each))
    return False


_ATOMS = (
    str, bytes, int, float, type(None), type, types.ModuleType, types.CodeType, types.FrameType, threading.Thread,
    io.IOBase,
)  # fmt: skip


def _held_by(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from list(value)
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue
    yield from list(getattr(value, "__dict__", {}).values())
