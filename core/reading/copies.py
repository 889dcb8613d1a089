"""A copy of a wrapper, and the batches that it makes of those it is fed."""

from __future__ import annotations

import contextlib
import copy
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from ..copying import copy_with, shared_modules, what_code_shares
from ..randomness.owned import global_generators
from ..randomness.streams import Streams
from .inside import Feed, Inside, Length, beginning_again
from .keeping import Modules, kept_by
from .private import attributes_of_torch, is_iterator, iterates_with

__all__ = ["Copied", "NotOneForOneError", "Reading", "copy_of"]


class NotOneForOneError(Exception):
    """Why a wrapper's batches do not follow, one for one, from those inside."""


class Copied(NamedTuple):
    """A copy of a wrapper.

    Attributes:
        wrapper: the copy.
        holders: it and the wrappers in it, each with the names of attributes that are not its own.
        feed: that stands for the DataLoader inside.
    """

    wrapper: Any
    holders: tuple[tuple[Any, frozenset[str]], ...]
    feed: Feed

    def own(self) -> dict[str, Any]:
        """What the wrappers hold themselves now, by name."""
        return {
            f"{type(each).__name__}.{name}": value
            for each, others in self.holders
            for name, value in vars(each).items()
            if name not in others and type(value) is not Feed
        }


def copy_of(inside: Inside, batches: int | None) -> Copied:
    """A new copy of the wrapper around `inside`. `batches`: that it will be given; None if nobody knows.

    Raises:
        NotOneForOneError: there is none.
    """
    chain = inside.chain
    theirs, last = chain[-1]
    loader = getattr(theirs, last) if last else theirs
    feed = Feed(loader, inside.idle)
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
                for attribute, sampler, repeats in beginning_again(original):
                    counted[attribute] = copy.copy(sampler)
                    counted[attribute].__dict__.update(dict.fromkeys(vars(sampler), Length(repeats, batches)))
            iterates_with(each, feed, **counted)
            others |= attributes_of_torch()
        holders.append((each, frozenset(others)))
        each = getattr(each, name) if name else None
    return Copied(wrapper, tuple(holders), feed)


class Reading:
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
        self, copied: Copied, take: Callable[[], Any], first: int, key_of: Callable[[int], int],
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
                self.kept.append(_copied(batch))
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
        self._start()  # the end has a stream, too
        if not self.ready:
            raise StopIteration
        self.asked += 1
        return self.ready.popleft()

    def _start(self) -> None:
        """Put the generators under the stream of the batch inside that comes next."""
        if self._key[0] != self.asked:
            self._key = self.asked, self._key_of(self.asked)
        self.streams.start(self._key[1])

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

    def _first(self) -> Any:
        self._iterator = iter(self._copied.wrapper)
        self._next = self._iterator.__next__
        return self._next()

    def modules(self) -> Modules:
        """The modules that the wrapper holds, as they are now."""
        return Modules(shared_modules(self._copied.wrapper))

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
        kept |= kept_by(self._iterator, list(kept.values()), wrappers)
        return {name: value for name, value in kept.items() if id(value) not in wrappers and type(value) is not Feed}

    def shares(self) -> str:
        """What code of the wrapper, and of what it holds, uses that a copy shares with the original; empty if none."""
        return what_code_shares(self._copied.wrapper, (DataLoader, Feed))

    def again(self, take: Callable[[], Any]) -> Reading:
        """Another pass over this copy. `take`: returns the next batch inside, from the first one on."""
        return Reading(self._copied, take, self.first, self._key_of)

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


def _copied(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception as error:  # noqa: BLE001  # of any library
        raise NotOneForOneError(f"its batches cannot be copied ({type(error).__name__}: {error!s:.100})") from None


def _at_its_end() -> Any:
    raise StopIteration
