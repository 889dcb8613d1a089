"""One random stream for each sample; the caller's generators are left as they were found.

Code inside a dataset draws from generators that it did not choose with resuming in mind: the global ones of python,
numpy and torch, or some that it owns. While a sample is read, all of them are put under a stream of that sample alone,
keyed by (seed, epoch, position). So the sample's augmentation does not depend on which process reads it, after which
others, or whether the epoch was interrupted before.
"""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from midepoch.errors import MidepochError, MidepochWarning
from midepoch.order.keys import derive_key

from .globals import LentGlobals
from .owned import OwnedGenerator, find_generators

__all__ = ["Purpose", "Streams", "process_seed", "sample_generator"]


class Purpose:
    """The first word of every key, so that no two uses of one (seed, epoch) share a stream."""

    SAMPLE = 1  # reading the sample at one position
    BATCH = 2  # __getitems__ and collate_fn
    LISTING = 3  # a torch Sampler giving one epoch's list
    OPENING = 4  # iter(dataset), and the base seed of worker processes
    MIXING = 5  # which of several loaders is read at a step


# What `sample_generator` reads: the key of the sample that is being read, or the Streams that look on meanwhile; the
# generator that was made of the key; whether either was asked for.
_current = threading.local()


def process_seed() -> int:
    """torch's initial seed, read and not consumed: what a world of one uses where nobody states a seed."""
    key = getattr(_current, "key", None)
    if isinstance(key, Streams):
        key.asked = True  # a sample that depends on it has to be read under its key
    _current.used = True
    return torch.initial_seed() % (1 << 64)


def sample_generator() -> np.random.Generator:
    """The numpy Generator of the sample that is being read: the way to random numbers that needs no global generator.

    Call it inside ``__getitem__``, ``__next__``, ``__getitems__`` or ``collate_fn`` of what midepoch reads. Two calls
    for one sample return the same Generator, which goes on; it belongs to this sample, so do not keep it.

    Raises:
        MidepochError: no sample is being read in this thread.
    """
    key = getattr(_current, "key", None)
    if key is None:
        raise MidepochError(
            "no sample is being read here: call midepoch.sample_generator() inside the dataset or collate_fn of a "
            "loader made by midepoch.wrap, with randomness='sample'"
        )
    if isinstance(key, Streams):
        key.asked = True  # so that the batch will be read again, under its keys
        return np.random.Generator(np.random.Philox(0))
    _current.used = True
    made: tuple[int, np.random.Generator] | None = _current.generator
    if made is None or made[0] != key:
        made = _current.generator = key, np.random.Generator(np.random.Philox(key=[key, Purpose.SAMPLE]))
    return made[1]


class Streams:
    """Every generator that reading a sample can draw from, put under one key at a time.

    ::

        with streams as start:          # the generators are ours from here on
            for key, index in ...:
                start(key)
                samples.append(dataset[index])

    Behind the block the caller's generators are as they were; in a worker process of a DataLoader there is no caller,
    and nothing is put aside. `begin` and `end` do the same where a block cannot. Not thread-safe, as the global
    generators are not.

    Seeding them takes six microseconds, which is a lot where nobody draws. So a reader may look on while a batch is
    read under no key, once `unused` says that nobody has drawn so far: ``look()``, read, then ``leave()``, which tells
    whether anybody has. That batch is read again, under its keys.

    Args:
        roots: objects whose own generators are looked for (a dataset, a collate_fn): at each `begin_pass`, and once
            more behind the first batch of the pass, where `made_late` is asked.

    Attributes:
        unused: nobody has drawn in this process, and there is no generator but the global ones.
        asked: `sample_generator` was called since `look`.
    """

    def __init__(self, *roots: object) -> None:
        self._roots = roots
        self._owned: list[OwnedGenerator] | None = None
        self._first = False  # no batch of this pass has been read
        self._told: set[str] = set()
        self._globals = LentGlobals()
        # Looked up once: this is done for every sample. python's without the argument handling of random.seed.
        self._python_generator: Any = random._inst
        self._seed_python = super(random.Random, self._python_generator).seed
        self._start_numpy = np.random.seed
        self._start_torch = torch.default_generator.manual_seed
        self._saved: list[Any] | None = None
        self._lent = False  # in a worker process, for good
        self._outer: tuple[Any, ...] = (None, None, None)
        self._drawn = False
        self.unused = self.asked = False

    # --- looking for generators ---

    def begin_pass(self, *more: object) -> None:
        """Look for generators, behind `more` too, before the first sample of a pass is read in this process."""
        self._search(more)
        self._first, self.unused = True, False

    def begin_replay(self) -> None:
        """In place of `begin_pass`, for a source that is always read from its start, and never again.

        A generator that it makes while it is read has no key in that pass, so it has none in the next one either.
        """
        before = self._owned
        self._search(())
        if before is not None and self._owned is not None:
            known = {id(each.generator) for each in before} | {each.path for each in before}
            self._owned = [each for each in self._owned if {id(each.generator), each.path} & known]

    def made_late(self, *more: object) -> bool:
        """Whether the first batch of a pass has made generators, from which it drew without a key.

        They are known from now on, and the batch has to be read once more. Asked after each batch.
        """
        if not self._first:
            return False
        self._first = False
        before = self._owned or []
        self._search(more)
        known = {id(each.generator) for each in before}
        late = [each for each in self._owned or () if id(each.generator) not in known]
        # Those that were known keep the name that they have in this pass, wherever samples have put them.
        self._owned = [*before, *late]
        self.unused = not self._drawn and not self._owned
        return bool(late)

    def warn_of_late(self) -> None:
        """Warn where `made_late` has found something and the batch cannot be read again."""
        warnings.warn(
            "code of the source has made a random generator while the first batch was read, which cannot be read "
            "again, so that batch may not be drawn alike after a resume: make the generator in __init__, or use "
            "midepoch.sample_generator()",
            MidepochWarning,
            stacklevel=3,
        )

    def _search(self, more: tuple[object, ...]) -> None:
        self._owned, hopeless = find_generators(*self._roots, *more)
        for path in hopeless:
            if path not in self._told:
                self._told.add(path)
                warnings.warn(
                    f"{path} cannot be put under a stream, so what it draws will be another after a resume: use a "
                    "generator that can be seeded, or midepoch.sample_generator()",
                    MidepochWarning,
                    stacklevel=5,
                )

    @property
    def drawn(self) -> bool:
        """Whether anybody has drawn under keys, or may have drawn from generators of the source's own."""
        return self._drawn or bool(self._owned)

    # --- under keys ---

    def begin(self) -> Callable[[int], None]:
        """Make the generators ours. Returns what puts them at the beginning of the stream of a 64-bit key."""
        if self._owned is None:
            self._search(())
        self._enter(None)
        if not self._lent:
            self._globals.borrow()
            self._lent = get_worker_info() is not None
            self._saved = [each.save() for each in self._owned] if self._owned and not self._lent else []
        elif self._saved is None:
            self._saved = []
        if self._drawn or self._owned:  # nobody will look on
            return self.start
        self._globals.watch()
        return self._start_watched

    def start(self, key: int) -> None:
        """Put every generator at the beginning of the stream of `key`."""
        _current.key = key
        self._seed_python(key)
        self._python_generator.gauss_next = None
        # The upper half, since torch takes the lower one for a generator of the same kind: its words would be equal.
        self._start_numpy(key >> 32)
        self._start_torch(key)
        if self._owned:
            for each in self._owned:
                each.start(derive_key(key, each.salt))

    def _start_watched(self, key: int) -> None:
        self._drawn = self._drawn or _current.used or self._globals.touched()
        self.start(key)
        self._globals.watch()

    def end(self) -> None:
        """Give the caller's generators back as `begin` found them. May be called twice."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        if not self._drawn and not self._owned:
            self._drawn = _current.used or self._globals.touched()
            self.unused = self.unused and not self._drawn
        if not self._lent:
            self._globals.give_back()
            for each, state in zip(self._owned or (), saved, strict=False):
                each.restore(state)
        _current.key, _current.generator, _current.used = self._outer

    def __enter__(self) -> Callable[[int], None]:
        return self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()

    @contextlib.contextmanager
    def under(self, key: int) -> Iterator[None]:
        """All generators under one key, for code outside the path of a batch."""
        with self:
            self.start(key)
            yield

    # --- looking on ---

    def look(self) -> None:
        """See from here on whether anybody draws. Only while `unused`."""
        self._enter(self)
        self.asked = False
        if self._lent:
            self._globals.watch()
        else:
            self._globals.borrow()

    def leave(self) -> bool:
        """Whether anybody has drawn since `look`. The generators are as `look` found them."""
        drawn = self.asked or self._globals.touched()
        self.unused = not drawn
        if not self._lent:
            self._globals.give_back()
        _current.key, _current.generator, _current.used = self._outer
        return drawn

    def warn_of_kept(self, reader: object, what: object) -> None:
        """Warn unless somebody has drawn under keys, too, what drew before when a batch was read under none."""
        if not self._drawn:
            warnings.warn(
                f"{type(reader).__name__} drew random numbers for {what} when it was first read, and none when it was "
                "read again: it keeps what it drew, which will not be the same after a resume; draw with "
                "midepoch.sample_generator(), or draw a number for every sample",
                MidepochWarning,
                stacklevel=3,
            )

    def _enter(self, key: object) -> None:
        outer = _current.__dict__
        self._outer = outer.get("key"), outer.get("generator"), outer.get("used")
        _current.key, _current.generator, _current.used = key, None, False

    def __reduce__(self) -> tuple[type[Streams], tuple[object, ...]]:
        # A worker process looks for the generators of its own copy.
        return Streams, self._roots
