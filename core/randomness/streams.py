"""One random stream for each sample. The caller's generators are left unchanged.

Code inside a dataset draws from generators that know nothing of resuming: the global ones of python, numpy and torch,
or some that it owns. Before a sample is read, all of them are seeded for that sample, with a key of (seed, epoch,
position). So the sample's augmentation does not depend on which process reads it, after which others, or whether the
epoch was interrupted before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from ..errors import MidepochError, warn
from .devices import DeviceGenerators
from .globals import NAMES, GlobalGenerators
from .owned import OwnedGenerator, find_generators

__all__ = ["Purpose", "Start", "Streams", "no_other_reads", "process_seed", "sample_generator", "without_keys"]


class Purpose:
    """The first word of every key, so that no two uses of one (seed, epoch) share a stream."""

    SAMPLE = 1  # reading the sample at one position
    BATCH = 2  # __getitems__ and collate_fn
    LISTING = 3  # a torch Sampler giving one epoch's list
    OPENING = 4  # iter(dataset), and the base seed of worker processes
    MIXING = 5  # which of several loaders is read at a step
    TRIAL = 6  # where a copy of a source is read, which stands for another process
    WHOLE = 7  # the user's work on whole batches
    WRAPPER = 8  # what an object around a DataLoader does with a batch
    REST = 9  # generators that no code uses


Start: TypeAlias = Callable[[int], Any]
"""Seeds generators with a 64-bit key."""

Read: TypeAlias = Callable[[Start | None], Any]
"""Reads a batch: calls its argument with each sample's key, if there is one."""

_NONE: frozenset[str] = frozenset()
_ALL = frozenset((*NAMES, "sample"))
"""The global generators, and that of `sample_generator`."""

_LOOKED_AFTER = frozenset(4**power for power in range(1, 20))  # batches of a pass, once more for generators


class _Current(threading.local):
    streams: Streams | None = None  # under which this thread reads


_current = _Current()

# The generators are the process's. A thread that reads waits for its turn, but not for ever: another one may wait for
# what this one reads. By process: one that was forked lacks the thread that would end the turn.
_turns = defaultdict[int, Any](threading.RLock)
_SECONDS_TO_WAIT = 1.0


@contextlib.contextmanager
def no_other_reads() -> Iterator[None]:
    """Keep other threads from the generators: a process that is forked has them as they are at that moment."""
    turn = _turns[os.getpid()]
    has_it = turn.acquire(timeout=_SECONDS_TO_WAIT)
    try:
        yield
    finally:
        if has_it:
            turn.release()


def process_seed() -> int:
    """torch's initial seed, read and not consumed: the default seed of a single process."""
    streams = _current.streams
    if streams is not None:
        streams.asked |= {"torch"}  # a sample that depends on it has to be read under its key
    return torch.initial_seed() % (1 << 64)


def sample_generator() -> np.random.Generator:
    """The numpy Generator of the sample that is being read: the way to random numbers that needs no global generator.

    Call it inside ``__getitem__``, ``__next__``, ``__getitems__`` or ``collate_fn`` of what midepoch reads, or inside
    the function passed to `wrap` as `then`; in the last three it is the batch's. Calls for the same sample return the
    same Generator, which continues its sequence. It is for this sample only: do not keep it.

    Raises:
        MidepochError: no sample is being read in this thread.
    """
    streams = _current.streams
    if streams is None or (streams.key is None and "sample" in streams.seeds):
        raise MidepochError(
            "no sample is being read here: call midepoch.sample_generator() inside the dataset, collate_fn or then= of "
            "a loader made by midepoch.wrap, with randomness='sample'"
        )
    streams.asked |= {"sample"}
    if streams.key is None:
        return np.random.Generator(np.random.Philox(0))  # the batch will be read again, under its keys
    if streams.generator is None:
        streams.generator = np.random.Generator(np.random.Philox(key=[streams.key, Purpose.SAMPLE]))
    return streams.generator


@contextlib.contextmanager
def without_keys() -> Iterator[None]:
    """Let `sample_generator` give one generator for all samples, where a source is read without a loader of ours."""
    streams = Streams()
    streams.key, outer = 0, _current.streams
    _current.streams = streams
    try:
        yield
    finally:
        _current.streams = outer


class Streams:
    """Every generator that reading a sample can draw from, seeded with one key at a time.

    `read` reads what can be read again, and seeds only the generators that its code uses. A process reads its first
    batch with all of them seeded, which shows which these are. Later the others are at rest, and a stamp tells after
    each batch whether one was used after all. Then the batch is read again, and that generator is always seeded.

    What can be read only once is read with all of them seeded::

        with streams as start:          # the generators are ours from here on
            for key in ...:
                start(key)
                samples.append(next(source))

    Both restore the caller's generators. Use `begin` and `end` if a ``with`` block is not possible. Not thread-safe, as
    the global generators are not.

    Args:
        roots: objects to search for their own generators (a dataset, a collate_fn): at each `begin_pass`, and once more
            after the first batch of the pass. Those found are always seeded.
        devices: the code may draw from the global generators of devices, too. It can be read only once.
    """

    def __init__(self, *roots: object, devices: bool = False) -> None:
        self._roots = roots
        self._owned: list[OwnedGenerator] | None = None
        self._warned: set[str] = set()  # paths
        self._batches: int | None = None  # of this pass that were read; None before the first pass
        self._globals = GlobalGenerators()
        self._devices = DeviceGenerators() if devices else None
        self._rest_key = 0
        self._used: frozenset[str] | None = None  # by this code; None until a first batch has shown it
        self._starts: list[Start] = []  # seed what is seeded, and
        self._start: Start | None = None  # all of it; None if that is nothing
        self._start_is_known = False
        self._noted: frozenset[str] | None = None  # used in this batch before the last key; None if that is not noted
        self._saved: Sequence[Any] | None = None  # the states of the source's own; None between batches
        self._outer: Streams | None = None
        self._turn: Any = None  # while this thread has it
        self.first = False  # no batch of this pass has been read; what generators the next one makes is looked for
        self.seeds = _NONE  # the generators that are seeded in this batch
        self.asked = _NONE  # used in this batch without another trace: `sample_generator`, and torch's seed
        self.key: int | None = None  # of the current sample; None also if no code uses `sample_generator`
        self.generator: np.random.Generator | None = None  # that of `sample_generator` for this key

    # --- looking for generators ---

    def begin_pass(self, *more: object, rest: int = 0) -> None:
        """Look for generators, in `more` objects too, before the first sample of a pass is read in this process.

        `rest` is the key of generators that are not used in this pass.
        """
        new = self._look(*more)
        if self._batches is not None:  # else what has come since may be of a list that was made before the first pass
            self._warn_of_later(new)
        self.first, self._batches = True, 0
        if rest != self._rest_key:
            self._rest_key = rest
            self._globals.rest_at(rest)

    def begin_replay(self) -> None:
        """In place of `begin_pass`, for a replayed source, whose first batch cannot be read again.

        Generators that the source creates while it is read are not seeded in that pass, so they are not in later ones.
        One that it makes anew where another has been is.
        """
        new = self._look()
        self._owned = [each for each in self._owned or () if each not in new]

    def made_late(self, *more: object) -> str:
        """What the first batch of the pass did to draw from generators that were not seeded; empty if nothing.

        It may have made them, or have started a device. They are seeded from now on. Call it after every batch that
        `read` has not read.
        """
        if not self.first:
            return ""
        self.first = False
        if late := self._look(*more, adds=True, remade=True):
            return f"made a random generator ({', '.join(each.path for each in late)})"
        return "first drew on a device" if self._devices is not None and self._devices.late else ""

    def warn_if_late(self, *more: object) -> None:
        """Call this in place of `made_late` if a batch cannot be read again."""
        if late := self.made_late(*more):
            warn(
                f"your code {late} for a batch that is read once; its numbers will differ after a resume: make "
                "generators in __init__, use a device before the loader is iterated, or use "
                "midepoch.sample_generator()"
            )

    def _warn_of_later(self, later: list[OwnedGenerator]) -> None:
        """Warn of generators that were made after a pass's first batch: those before cannot be read again."""
        paths = [each.path for each in later if each.path not in self._warned]
        self._warned.update(paths)
        if paths:
            warn(
                f"a random generator ({', '.join(paths)}) was made after a pass had begun, and was not seeded in it; "
                "its numbers may differ after a resume: make the generator in __init__, or use "
                "midepoch.sample_generator()"
            )

    def _look(self, *more: object, adds: bool = False, remade: bool = False) -> list[OwnedGenerator]:
        """Look for generators. Returns those that are new; none at the first look.

        Args:
            more: objects to search, too.
            adds: those that are known stay, by their paths, even if samples have moved them.
            remade: what is made anew at a known path is new. If not, its maker has seeded it.
        """
        before, (found, hopeless) = self._owned, find_generators(*self._roots, *more)
        for path in hopeless:
            if path not in self._warned:
                self._warned.add(path)
                warn(
                    f"{path} cannot be seeded, so its random numbers will differ after a resume: use a generator that "
                    "can be seeded, or midepoch.sample_generator()",
                )
        new: list[OwnedGenerator] = []
        if found and before is not None:
            known = {id(each.generator) for each in before}
            paths = set() if remade else {each.path for each in before}
            new = [each for each in found if id(each.generator) not in known and each.path not in paths]
        if before is None or not adds:
            self._owned, self._start_is_known = found, False
        elif new:
            self._owned, self._start_is_known = [*before, *new], False
        return new

    @property
    def drawn(self) -> bool:
        """Whether code has drawn, as far as was noted, or may have drawn from generators of the source's own."""
        return bool(self._used or self._owned)

    # --- reading what can be read again ---

    def read(self, call: Read, notes: bool = False) -> Any:
        """What `call` returns, or raises, when each generator that it uses is seeded.

        Args:
            call: reads the batch. Its argument is None if no code needs keys.
            notes: `drew` is to tell of each sample.
        """
        missed = _NONE
        while True:
            known = self._used
            start = self._enter(_ALL if known is None else known, notes or known is None or bool(missed))
            try:
                batch = call(start)
            except BaseException as error:
                missed = self._leave() - self.seeds
                if missed and isinstance(error, Exception):  # perhaps of numbers that were not seeded
                    continue
                raise
            used = self._leave()
            if missed and not missed & used:
                warn(
                    "code of the source drew random numbers for a batch when it was first read, and none when it was "
                    "read again: it caches random numbers, which will differ after a resume; use "
                    "midepoch.sample_generator(), or draw new numbers for every sample"
                )
            missed = used - self.seeds
            if missed or (self.first and self.made_late()):
                continue
            if not notes:  # a sample that is looked at is no batch
                self._batches = (self._batches or 0) + 1
                if self._batches in _LOOKED_AFTER:
                    self._warn_of_later(self._look(adds=True))
            return batch

    def drew(self) -> bool:
        """Whether code has drawn since the last sample was begun, in a batch that `notes`. Ask once a sample."""
        assert self._noted is not None
        drawn = self._globals.moved() | self.asked
        self._noted |= drawn
        return bool(drawn)

    # --- reading what can be read once ---

    def begin(self, notes: bool = False) -> Start:
        """Take over the generators. Returns a function that seeds all of them with a 64-bit key.

        `notes`: `drawn` is to tell of what is read.
        """
        if self._owned is None:
            self._look()
        return cast(Start, self._enter(_ALL, notes and not self.drawn))

    def end(self, *error: object) -> None:
        """Restore the caller's generators as `begin` found them. May be called twice."""
        if self._saved is not None:
            self._leave()

    __enter__, __exit__ = begin, end

    @contextlib.contextmanager
    def under(self, key: int) -> Iterator[None]:
        """All generators seeded with one key, for code outside the path of a batch."""
        with self as start:
            start(key)
            yield

    def drawn_by(self, call: Callable[[], object]) -> bool:
        """Whether `call` draws, from global generators or the source's own. Use it between `begin` and `end`."""
        self._globals.moved()  # before
        before = [pickle.dumps(each.save()) for each in self._owned or ()]
        call()
        after = [pickle.dumps(each.save()) for each in self._owned or ()]
        return bool(self._globals.moved() or self.asked or after != before)

    # --- both ---

    def _start_noting(self, key: int) -> None:
        assert self._noted is not None
        self._noted |= self._globals.moved() | self.asked
        self.key, self.generator, self.asked = key, None, _NONE
        for start in self._starts:
            start(key)
        self._globals.moved()  # by us

    def _enter(self, seeds: frozenset[str], notes: bool) -> Start | None:
        """Take over the generators, to seed these; the others are at rest. Returns what seeds, if anything is to be."""
        outer = _current.streams
        self._outer = None if outer is self else outer  # itself, if an interrupt has left it there
        _current.streams, self.key, self.asked = self, None, _NONE
        self._noted = _NONE if notes else None
        devices = self._devices
        if devices is not None and devices.find():
            devices.take_over()
            self._start_is_known = False
        if not (self._start_is_known and self.seeds is seeds):
            self.seeds, self._start_is_known = seeds, True
            # They refer to no Streams, which would be a cycle.
            starts = self._starts = [self._globals.seeding(seeds)] if seeds else []
            if devices is not None and devices.held:
                starts.append(devices.seed)
            if self._owned:
                starts += [each.start for each in self._owned]
            alone = len(starts) == 1 and "sample" not in seeds
            self._start = starts[0] if alone else functools.partial(_start_all, starts) if starts else None
        turn = _turns[os.getpid()]
        if self._turn is None or not turn._is_owned():  # else an interrupt has left it there, in this very thread
            self._turn = turn if turn.acquire(False) or turn.acquire(True, _SECONDS_TO_WAIT) else None
        self._globals.take_over(seeds)
        self._saved = [each.save() for each in self._owned] if self._owned else ()
        return self._start_noting if notes else self._start

    def _leave(self) -> frozenset[str]:
        """Restore the caller's generators. Returns what was used: all of it if noted, else what was not seeded."""
        devices, noted = self._devices, self._noted
        used = self._globals.restore(self.seeds if noted is None else _NONE) | self.asked
        if self._saved:
            for each, state in zip(self._owned or (), self._saved, strict=False):
                each.restore(state)
        if devices is not None and devices.find():
            devices.restore()
            self.first |= devices.late  # `made_late` says so
        if self._turn is not None:
            self._turn.release()
            self._turn = None
        self._saved, _current.streams = None, self._outer
        if noted is not None:
            used |= noted
        if noted is not None or not used <= self.seeds:  # else `_enter` would make anew what seeds
            self._used = used if self._used is None else used | self._used
        return used

    def __reduce__(self) -> tuple[Callable[..., Streams], tuple[object, ...]]:
        # A worker process looks for the generators of its own copy.
        return functools.partial(Streams, devices=self._devices is not None), self._roots


def _start_all(starts: list[Start], key: int) -> None:
    if (streams := _current.streams) is not None:
        streams.key, streams.generator = key, None
    for start in starts:
        start(key)
