"""Objects that pass on, one for one, the batches of a loader inside them, as ``wrap(..., inside=)`` declares.

While such an object makes a batch, an `InnerIterator` stands for the loader inside. It gives the batches of a session
of that loader's own adapter, which jumps, and the random generators are under the stream of the batch that is asked
for. In between, the object is as the user has made it.

That it is one for one is not tried but watched: what it has asked for less what it has handed out stays the same within
a pass until the loader inside ends, and then it hands out the rest.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import SourceError, UnsupportedSourceError
from ..loader.adapter import Adapter, Run, Session
from ..loader.capabilities import Capabilities
from ..order.keys import derive_key, extend_key
from ..randomness.streams import Purpose, Streams
from ..samplers import length_of
from ..world import MicroShare
from .private import attributes_of_torch, end_early_workers, gives_its_own, is_iterator, iterating_by, plain_loader

__all__ = ["Around", "loaders_in"]

_DEEPEST = 4  # attributes of attributes


def loaders_in(source: Any, is_loader: Callable[[Any], bool], depth: int = 1) -> dict[str, Any]:
    """The loaders in an object's attributes, and in those of iterables there, by the path that `inside` takes."""
    found: dict[str, Any] = {}
    if is_loader(source) and _is_own(source):
        found[""] = source
    for name, each in _attributes(source).items():
        if is_loader(each):
            found[name] = each
        elif depth < _DEEPEST and hasattr(type(each), "__iter__") and not isinstance(each, Dataset | torch.nn.Module):
            found |= {f"{name}.{path}": inner for path, inner in loaders_in(each, is_loader, depth + 1).items()}
    return found


def _attributes(value: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):  # an object may refuse to show them
        return dict(vars(value))
    return {}


def _is_own(loader: Any) -> bool:
    """Whether it is a DataLoader that creates its iterators in a way of its own."""
    return issubclass(type(loader), DataLoader) and gives_its_own(loader)


class Around:
    """An object that passes on the batches of a loader inside it.

    Args:
        source: the object.
        path: the names of the attributes that lead to the loader, with dots; empty for a DataLoader subclass with an
            ``__iter__`` or a ``_get_iterator`` of its own.
        is_loader: whether an attribute may be meant.

    Attributes:
        source, path: as given.
        name: of the object's class, for messages.
        inside: the loader. A DataLoader with a way of its own as torch's class would iterate it.

    Raises:
        UnsupportedSourceError: there is no such loader, or not as many batches in it.
    """

    def __init__(self, source: Any, path: str, is_loader: Callable[[Any], bool]) -> None:
        self.source, self.path, self.name = source, path, type(source).__name__
        holders = [source]
        for name in path.split(".") if path else ():
            holders.append(_attributes(holders[-1]).get(name))
        self._loader = self.inside = holders[-1]
        if _is_own(self._loader):
            end_early_workers(self._loader)
            self.inside = plain_loader(self._loader, **_once(self._loader))
        elif not path or not is_loader(holders.pop()):
            raise UnsupportedSourceError(self._nothing_there(is_loader))
        if not hasattr(type(source), "__iter__"):
            raise UnsupportedSourceError(f"a {self.name} cannot be iterated: give it an __iter__")
        self._holders = holders
        self._names = [frozenset(vars(each)) for each in holders]
        own, inner = length_of(source), length_of(self.inside)
        if own is not None and inner is not None and own != inner:
            raise UnsupportedSourceError(
                f"inside={path!r}: len() of this {self.name} is {own}, and that of the loader inside {inner}. It does "
                "not pass batches on one for one: leave inside= out, and it is read again from its start"
            )

    def _nothing_there(self, is_loader: Callable[[Any], bool]) -> str:
        there = [f"inside={path!r}" for path in loaders_in(self.source, is_loader)]
        cure = f"write {' or '.join(there)}" if there else "leave inside= out: it holds none"
        if not self.path:
            return f"inside='' is for a DataLoader subclass with iterators of its own, not for a {self.name}: {cure}"
        return f"inside={self.path!r}: this {self.name} has no loader there: {cure}"

    def session(self, inner: Session, run: Run, adapter: Adapter) -> Session:
        """A session of the object's batches. `inner`: of `adapter`, that of the loader inside, opened for `run`."""
        return _AroundSession(self, inner, run, adapter)

    def drawing(self) -> tuple[object, ...]:
        """The objects' classes, and what they hold besides the loader."""
        loaders = {id(each) for each in (*self._holders, self._loader)}
        held = [
            value
            for each in self._holders
            for name, value in vars(each).items()
            if not (isinstance(each, DataLoader) and name in attributes_of_torch())
        ]
        kept = (each for each in held if id(each) not in loaders and not isinstance(each, InnerIterator))
        return *map(type, self._holders), *(each for each in kept if not is_iterator(each))

    def promises(self, inner: Capabilities) -> Capabilities:
        """Those of the loader inside, in the object's name."""
        jumps, exact = inner.constant_time_resume, inner.exact_augmentations
        jumps = replace(jumps, reason=f"{jumps.reason}; inside={self.path!r} is declared, and watched")
        if exact:
            exact = replace(exact, reason=f"{exact.reason}; numbers drawn in {self.name} are the batch's")
        return replace(inner, constant_time_resume=jumps, exact_augmentations=exact)

    def stand_ins(self, feed: _InnerLoader) -> list[tuple[dict[str, Any], str, Any]]:
        """The attributes in which something else stands while a batch is made, and what."""
        found: list[tuple[dict[str, Any], str, Any]] = []
        for each in self._holders:
            held = each.__dict__
            found += ((held, name, feed) for name, value in held.items() if value is self._loader)
            iterators = [name for name, value in held.items() if is_iterator(value) or isinstance(value, InnerIterator)]
            found += ((held, name, feed.iterator) for name in iterators)
        if self._holders[-1] is self._loader:  # its class calls torch's methods, which use these
            begins = iterating_by(feed._midepoch_begin, self._loader)
            found += ((vars(self._loader), name, value) for name, value in begins.items())
        return found

    def leave(self) -> None:
        """Take feeds that the object has kept for later passes out of it."""
        for each, names in zip(self._holders, self._names, strict=True):
            for name in [name for name, value in vars(each).items() if isinstance(value, InnerIterator)]:
                if name in names:
                    vars(each)[name] = None
                else:
                    del vars(each)[name]


def _once(loader: DataLoader[Any]) -> dict[str, Any]:
    """What the samplers of a DataLoader give again and again: a pass of midepoch's is over one round.

    Subclasses that keep one iterator for all passes have such samplers. They hold another sampler, and have no length.
    """
    found: dict[str, Any] = {}
    for attribute in ("sampler", "batch_sampler"):
        sampler = vars(loader)[attribute]
        held = list(getattr(sampler, "__dict__", {}).values())
        if len(held) == 1 and isinstance(held[0], Sampler) and length_of(sampler) is None:
            found[attribute] = held[0]
    return found


class InnerIterator:
    """Stands for an iterator of the loader inside.

    Its attributes begin with `_midepoch`: an object may keep it, and nobody looks for random generators there.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._midepoch_ask = ask

    def __iter__(self) -> InnerIterator:
        return self

    def __next__(self) -> Any:
        return self._midepoch_ask()

    next = __next__  # as DALI's iterators have it

    def reset(self) -> None:
        """Nothing: the adapter of the loader inside begins epochs."""

    def __reduce__(self) -> Any:
        # In another process no session is open. The next one there puts a feed of its own in this one's place.
        return InnerIterator, (_ended,)


def _ended() -> Any:
    raise StopIteration


class _InnerLoader(InnerIterator):
    """Stands for the loader itself. What it has besides batches is that loader's.

    Attributes:
        iterator: of it.
    """

    def __init__(
        self, ask: Callable[[], Any], begin: Callable[[], InnerIterator], loader: Any, batches: int | None
    ) -> None:
        super().__init__(ask)
        self._midepoch_begin, self.iterator, self._loader, self._batches = begin, InnerIterator(ask), loader, batches

    def __iter__(self) -> InnerIterator:
        return self._midepoch_begin()

    def __len__(self) -> int:
        """Batches of this session, for objects that count them."""
        return len(self._loader) if self._batches is None else self._batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _AroundSession(Session):
    """A session of the object's batches.

    Where the session inside has bookmarks, that from before each batch is kept until the object has handed it out.
    """

    def __init__(self, around: Around, inner: Session, run: Run, adapter: Adapter) -> None:
        self._around, self._inner, self._run = around, inner, run
        self._remembers = adapter.facts.remembers
        self._marked = inner.bookmark is not None and self._remembers  # before each batch
        self._keeps = self._marked or not self._remembers
        # By a batch's number: the bookmark and position_correction from before it.
        self._kept: dict[int, tuple[Any, int]] = {}
        self._steps = None if run.share is None else run.share.steps
        self._micro = run.share if isinstance(run.share, MicroShare) else None
        self._key = derive_key(Purpose.WRAPPER, run.seed, run.epoch)
        self._global_batch = adapter.units_per_step(run.world)
        # Of this rank's part of a global batch.
        self._offset = adapter.sharing(run.world).rank * adapter.facts.batch_size
        self._feed = _InnerLoader(self._ask, self._begin, around.inside, self._steps)
        self._places = around.stand_ins(self._feed)
        self._asked = self._handed = self._begun = 0
        self._ahead: int | None = None
        self._ready: deque[Any] = deque()  # at most one batch, read before the object asks for it
        self._inside_end: Exception | None = None  # StopIteration, or an error, raised after the batches before it
        self._broken: SourceError | None = None  # what it does that is not one for one
        self._late: Exception | None = None  # of the object's own, behind its last batch
        self._end: Exception | None = None  # what follows the batches
        self._stop: StopIteration | None = None  # raised by the feed
        self._thread = threading.get_ident()
        self._iterator: Any = None
        self._streams: Streams | None = None
        self._start: Callable[[int], None] | None = None
        if adapter.options.streams:
            self._streams = Streams(*around.drawing(), devices=True)
            self._streams.begin_pass()

    # --- the inner session's answers, as they are after the batch that was handed out last ---

    @property
    def varies(self) -> bool:  # type: ignore[override]
        return self._late is not None or self._inner.varies

    @property
    def position_correction(self) -> int:  # type: ignore[override]
        if self._handed in self._kept:
            return self._kept[self._handed][1]
        share = self._run.share
        if self._late is None or self._marked or share is None:
            return self._inner.position_correction
        moved = self._handed * self._global_batch if self._micro is None else self._micro.moved(self._handed)
        return min(0, share.size - self._run.position - moved)  # by which the last batch was short

    def bookmark(self) -> Any:
        return self._kept[self._handed][0] if self._handed in self._kept else self._bookmark_inside()

    def _bookmark_inside(self) -> Any:
        return None if self._inner.bookmark is None else self._inner.bookmark()

    def detail(self, bookmark: Any) -> str:
        return self._inner.detail(bookmark)

    def next_epoch_detail(self) -> str:
        return self._inner.next_epoch_detail()

    def close(self) -> None:
        """Leave the object as it was, and close the inner session."""
        self._end = self._end or StopIteration()
        self._ready.clear()
        self._iterator = None
        self._around.leave()
        self._inner.close()

    # --- batches ---

    def take(self) -> Any:
        """The object's next batch. Before the last one is handed out, the object is asked for one more."""
        if self._end is not None:
            raise self._end
        self._fetch()
        try:
            if not (self._handed or self._ready):
                raise StopIteration  # nothing is left inside
            batch = self._give()
        except StopIteration:
            self._end = self._what_follows(None)
            raise self._end from None
        self._handed += 1
        self._watch()
        if self._handed == self._steps and not self._inner.varies:
            self._end = self._see_end()
            if self._end is self._broken or (self._late is not None and not self._remembers):
                raise self._end
        return batch

    def _give(self) -> Any:
        """What the object gives next. Raises what it raises."""
        self._fetch()
        if self._streams is None:
            return self._next()
        try:
            with self._streams as self._start:
                self._start(self._key_of(self._asked))  # for what is drawn before a batch is asked for
                return self._next()
        finally:
            if self._streams.first:
                self._streams.warn_if_late(*self._around.drawing())

    def _next(self) -> Any:
        before = [(held, name, value, held.get(name, _ABSENT)) for held, name, value in self._places]
        for held, name, value, _ in before:
            held[name] = value
        try:
            if self._iterator is None:
                self._iterator = iter(self._around.source)
            return next(self._iterator)
        except RuntimeError as error:
            # A generator that counts to the end of a whole pass has asked for more than was left of it.
            if self._stop is not None and error.__cause__ is self._stop and (self._failed or self._run.position):
                raise StopIteration from None
            raise
        finally:
            for held, name, value, former in before:
                if held.get(name, _ABSENT) is value:  # otherwise the object has assigned another one
                    if former is _ABSENT:
                        del held[name]
                    else:
                        held[name] = former
            if self._broken is not None:
                raise self._broken

    def _fetch(self) -> None:
        """Have the next batch inside ready, if there is one."""
        if self._ready or self._inside_end is not None:
            return
        if self._keeps:
            self._kept[self._asked] = self._bookmark_inside() if self._asked else None, self._inner.position_correction
        try:
            self._ready.append(self._inner.take())
        except Exception as end:  # noqa: BLE001  # raised after what the object still hands out
            self._inside_end = end
            if not self._failed:
                self._kept.pop(self._asked, None)

    @property
    def _failed(self) -> bool:
        """Whether the session inside has raised an error."""
        return self._inside_end is not None and not isinstance(self._inside_end, StopIteration)

    def _begin(self) -> InnerIterator:
        """The object begins to iterate the loader inside."""
        self._begun += 1
        if self._begun > 1:  # one that never ends would ask for ever
            raise self._break("begins to iterate the loader inside more than once in a pass")
        return self._feed.iterator

    def _ask(self) -> Any:
        """The next batch inside, for the object. From here on, the generators are at this batch's stream."""
        if threading.get_ident() != self._thread:
            self._break("reads the loader inside in a thread of its own")
            raise StopIteration
        if self._end is not None:
            raise StopIteration
        self._fetch()
        if self._start is not None:
            self._start(self._key_of(self._asked))  # the end has a stream, too
        if not self._ready:
            self._stop = StopIteration()
            raise self._stop
        self._asked += 1
        return self._ready.popleft()

    def _key_of(self, number: int) -> int:
        micro = self._micro
        if micro is not None:
            return extend_key(self._key, micro.span(number)[0] if number < micro.steps else micro.size)
        return extend_key(self._key, self._run.position + number * self._global_batch + self._offset)

    # --- one for one ---

    def _watch(self) -> None:
        ahead = self._asked - self._handed
        if self._ahead is None:
            self._ahead = ahead
            self._keeps = self._marked or (self._keeps and ahead > 0)
        if ahead != self._ahead:
            self._fetch()  # it may know by their number that there are no more
        if ahead < 0 or ahead > self._ahead or (ahead < self._ahead and self._inside_end is None):
            raise self._break(f"has handed out {self._handed} batches, and asked for {self._asked} inside")
        for number in [number for number in self._kept if number < self._handed]:
            del self._kept[number]

    def _see_end(self) -> Exception:
        """What follows the last batch."""
        try:
            self._give()
        except StopIteration:
            return self._what_follows(None)
        except Exception as error:  # noqa: BLE001  # it follows the last batch
            return self._what_follows(error)
        return self._break("gives a batch behind those of the loader inside")

    def _what_follows(self, error: Exception | None) -> Exception:
        """What its end means. `error`: with which it ended."""
        self._fetch()
        if self._broken is not None or self._failed:
            return self._broken or self._inside_end or StopIteration()
        if self._ready:
            return self._break(f"ended after {self._handed} batches, and the loader inside has more")
        if self._asked != self._handed:
            return self._break(f"has asked for {self._asked} batches inside, and handed out {self._handed}")
        self._late = error
        return error or StopIteration()

    def _break(self, what: str) -> SourceError:
        around = self._around
        self._broken = SourceError(
            f"{around.name} {what}, and inside={around.path!r} declares that it passes batches on one for one. Leave "
            "inside= out, and it is read again from its start; or wrap the loader inside, and pass what is done with "
            "its batches as then="
        )
        return self._broken


_ABSENT = object()
