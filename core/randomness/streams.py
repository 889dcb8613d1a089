"""One random stream for each sample. The caller's generators are left unchanged.

Code inside a dataset draws from generators that know nothing of resuming: the global ones of python, numpy and torch,
or some that it owns. Before a sample is read, all of them are seeded for that sample, with a key of (seed, epoch,
position). So the sample's augmentation does not depend on which process reads it, after which others, or whether the
epoch was interrupted before.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ..errors import MidepochError, warn
from ..order.keys import TORCH_KEYS, derive_key
from .devices import DeviceGenerators
from .globals import GlobalGenerators, Stamp
from .owned import OwnedGenerator, find_generators

__all__ = ["Purpose", "Streams", "process_seed", "sample_generator", "without_keys"]


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


class _Each(NamedTuple):
    """Something for each global generator, for those of devices together, and for `sample_generator`."""

    python: bool
    numpy: bool
    torch: bool
    devices: bool
    sample: bool


_NONE, _ALL = _Each(*[False] * 5), _Each(*[True] * 5)
_NOTHING: Any = ()

# `streams`: those under which this thread reads; None outside.
_current = threading.local()

# The generators are the process's. A thread that reads waits for its turn, but not for ever: another one may wait for
# what this one reads.
_turn, _owner, _process = threading.Lock(), 0, os.getpid()
_SECONDS_TO_WAIT = 1.0


def _wait() -> threading.Lock | None:
    """The turn, once the thread that has it ends it; None if that takes too long."""
    global _turn, _process
    # Nobody would end it if this process was forked meanwhile, or an interrupt came between in this very thread.
    if os.getpid() != _process or _owner == threading.get_ident():
        _turn, _process = threading.Lock(), os.getpid()
    turn = _turn
    return turn if turn.acquire(timeout=_SECONDS_TO_WAIT) else None


def process_seed() -> int:
    """torch's initial seed, read and not consumed: the default seed of a single process."""
    streams: Streams | None = getattr(_current, "streams", None)
    if streams is not None:
        streams.asked = streams.asked_seed = True  # a sample that depends on it has to be read under its key
    return torch.initial_seed() % (1 << 64)


def sample_generator() -> np.random.Generator:
    """The numpy Generator of the sample that is being read: the way to random numbers that needs no global generator.

    Call it inside ``__getitem__``, ``__next__``, ``__getitems__`` or ``collate_fn`` of what midepoch reads, or inside
    the function passed to `wrap` as `then`; in the last three it is the batch's. Calls for the same sample return the
    same Generator, which continues its sequence. It is for this sample only: do not keep it.

    Raises:
        MidepochError: no sample is being read in this thread.
    """
    streams: Streams | None = getattr(_current, "streams", None)
    if streams is None or not (streams.keyless or streams.key is not None):
        raise MidepochError(
            "no sample is being read here: call midepoch.sample_generator() inside the dataset, collate_fn or then= of "
            "a loader made by midepoch.wrap, with randomness='sample'"
        )
    streams.asked = True
    if streams.key is None:
        return np.random.Generator(np.random.Philox(0))  # the batch will be read again, under its keys
    if streams.generator is None:
        streams.generator = np.random.Generator(np.random.Philox(key=[streams.key, Purpose.SAMPLE]))
    return streams.generator


@contextlib.contextmanager
def without_keys() -> Iterator[None]:
    """Let `sample_generator` give one generator for all samples, where a source is read without a loader of ours."""
    streams = Streams()
    streams.key, outer = 0, getattr(_current, "streams", None)
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

    Both restore the caller's generators. In a worker process of a DataLoader there is no caller, so nothing is saved.
    Use `begin` and `end` if a ``with`` block is not possible. Not thread-safe, as the global generators are not.

    Args:
        roots: objects to search for their own generators (a dataset, a collate_fn): at each `begin_pass`, and once more
            after the first batch of the pass. Those found are always seeded.
        devices: the code may draw from the global generators of devices, too.

    Attributes:
        first: no batch of this pass has been read. Generators that the next one creates are looked for after it.
        key: of the current sample; None if there is none.
        generator: that of `sample_generator` for this key; None if none was made.
        keyless: this batch is read without keys.
        asked: `sample_generator` was called in this batch, or the seed of the process was asked for.
        asked_seed: the latter.
        kept: a batch used a generator when it was first read, and not when it was read again.
    """

    def __init__(self, *roots: object, devices: bool = False) -> None:
        self._roots = roots
        self._owned: list[OwnedGenerator] | None = None
        self._warned: set[str] = set()  # paths
        self._globals = lent = GlobalGenerators()
        self._devices = DeviceGenerators() if devices else None
        # Looked up once: these are called for every sample.
        self._python: Any = lent.python
        self._seed_python, self._seed_numpy, self._seed_torch = lent.seed_python, lent.seed_numpy, lent.seed_torch
        self._rest_key = 0
        self._used, self._known = _NONE, False  # by this code; and whether a first batch has shown it
        self._seeds = _ALL  # what `start` seeds
        self._noted: _Each | None = None  # used in this batch before the last `start`; None if that is not noted
        self._saved: Sequence[Any] | None = None  # the states of the source's own; None between batches
        self._stays = False  # nothing is restored
        self._outer: Streams | None = None
        self._turn: threading.Lock | None = None  # while this thread has it
        self._late: list[str] = []  # the paths of generators that the first batch has made
        self.first = self.keyless = self.asked = self.asked_seed = self.kept = False
        self.key: int | None = None
        self.generator: np.random.Generator | None = None

    # --- looking for generators ---

    def begin_pass(self, *more: object, rest: int = 0) -> None:
        """Look for generators, in `more` too, before the first sample of a pass is read in this process.

        Args:
            more: objects to search besides the roots.
            rest: the key of generators that are not used in this pass.
        """
        self._search(more)
        self.first = True
        if rest != self._rest_key:
            self._rest_key = rest
            self._globals.rest_at(rest)

    def begin_replay(self) -> None:
        """Use this instead of `begin_pass` for a replayed source, whose first batch cannot be read again.

        Generators that the source creates while it is read are not seeded in that pass, so they are not in later ones.
        """
        before = self._owned
        self._search(())
        if before is not None and self._owned is not None:
            known = {id(each.generator) for each in before} | {each.path for each in before}
            self._owned = [each for each in self._owned if {id(each.generator), each.path} & known]

    def made_late(self, *more: object) -> bool:
        """Whether the first batch of the pass created generators, or drew from those of a device that it started.

        They were not seeded; they are from now on. Call it after every batch that `read` has not read.
        """
        if not self.first:
            return False
        self.first = False
        before, late = self._owned or [], []
        self._search(more)
        if self._owned:
            known = {id(each.generator) for each in before}
            late = [each for each in self._owned if id(each.generator) not in known]
        # Known generators keep their path for this pass, even if samples have moved them.
        self._owned, self._late = [*before, *late], [each.path for each in late]
        return bool(late) or (self._devices is not None and self._devices.late)

    def warn_of_late(self) -> None:
        """Warn if `made_late` has found something and the batch cannot be read again."""
        warn(
            f"code of the source has made a random generator ({', '.join(self._late)}) while the first batch was read, "
            "and that batch cannot be read again; its random numbers may differ after a resume: make the generator in "
            "__init__, or use midepoch.sample_generator()",
        )

    def _search(self, more: tuple[object, ...]) -> None:
        self._owned, hopeless = find_generators(*self._roots, *more)
        for path in hopeless:
            if path not in self._warned:
                self._warned.add(path)
                warn(
                    f"{path} cannot be seeded, so its random numbers will differ after a resume: use a generator that "
                    "can be seeded, or midepoch.sample_generator()",
                )

    @property
    def drawn(self) -> bool:
        """Whether code has drawn, as far as was noted, or may have drawn from generators of the source's own."""
        return any(self._used) or bool(self._owned)

    # --- reading what can be read again ---

    def read(
        self,
        call: Callable[[Callable[[int], None] | None], Any],
        again: Callable[[], Callable[[Callable[[int], None] | None], Any]] | None = None,
        notes: bool = False,
    ) -> Any:
        """What `call` returns, or raises, when each generator that it uses is seeded.

        Args:
            call: reads the batch. Its argument is to be called with each sample's key; None if no code needs that.
            again: called before the batch is read again; returns what reads it then. None if `call` does.
            notes: `drew` is to tell of each sample.
        """
        joined = _NONE
        while True:
            start = self._enter(self._used if self._known else _ALL, notes or not self._known or joined is not _NONE)
            try:
                batch = call(start)
            except Exception:
                used, more = self._leave()
                if more is _NONE:
                    raise
            except BaseException:
                self._leave()
                raise
            else:
                used, more = self._leave()
                if joined is not _NONE and not any(map(operator.and_, joined, used)):
                    self.kept = True
                if more is _NONE and not (self.first and self.made_late()):
                    return batch
            joined = more
            if again is not None:
                call = again()

    def warn_of_kept(self, reader: object, what: object) -> None:
        """Warn if the last batch has `kept` what it drew."""
        self.kept = False
        warn(
            f"{type(reader).__name__} drew random numbers for {what} when it was first read, and none when it was "
            "read again: it caches random numbers, which will differ after a resume; use "
            "midepoch.sample_generator(), or draw new numbers for every sample",
        )

    def drew(self) -> bool:
        """Whether code has drawn since the last sample was begun, in a batch that `notes`."""
        devices = self._devices
        drew = self.asked or self._globals.stamp() != self._globals.at
        return drew or (devices is not None and devices.used())

    # --- reading what can be read once ---

    def begin(self, notes: bool = False) -> Callable[[int], None]:
        """Take over the generators. Returns a function that seeds all of them with a 64-bit key.

        `notes`: `drawn` is to tell of what is read.
        """
        if self._owned is None:
            self._search(())
        return cast(Callable[[int], None], self._enter(_ALL, notes and not self.drawn))

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

    # --- both ---

    def start(self, key: int) -> None:
        """Seed the generators with `key`."""
        self.key, self.generator = key, None
        python, numpy, engine, devices, _ = self._seeds
        if python:
            self._seed_python(key)
            self._python.gauss_next = None
        if numpy:
            self._seed_numpy(key >> 32)
        if engine:
            self._seed_torch(key & TORCH_KEYS)
        if devices and self._devices is not None:
            self._devices.seed(key)
        if self._owned:
            for each in self._owned:
                each.start(derive_key(key, each.salt))

    def _start_noting(self, key: int) -> None:
        lent, devices, noted = self._globals, self._devices, self._noted
        assert noted is not None
        stamp = lent.stamp()
        if stamp != lent.at or self.asked or (devices is not None and devices.used()):
            self._noted, self.asked, self.asked_seed = _either(noted, self._moved(stamp)), False, False
        self.start(key)
        lent.at = lent.stamp()

    def _enter(self, seeds: _Each, notes: bool) -> Callable[[int], None] | None:
        """Take over the generators, to seed these; the others are at rest. Returns what seeds, if anything is to be."""
        global _owner
        outer = getattr(_current, "streams", None)
        self._outer = outer = None if outer is self else outer  # which an interrupt may have left there
        _current.streams, self.key, self.generator = self, None, None
        self.asked = self.asked_seed = False
        self._seeds, self._noted = seeds, _NONE if notes else None
        self._stays = outer is None and get_worker_info() is not None
        self._turn = None
        if self._stays:
            self._globals.stay(seeds)
            self._saved = _NOTHING
        else:
            if outer is None:
                self._turn = turn = _turn if _turn.acquire(blocking=False) else _wait()
                if turn is not None:
                    _owner = threading.get_ident()
            self._globals.take_over(seeds)
            self._saved = [each.save() for each in self._owned] if self._owned else _NOTHING
        if self._devices is not None:
            self._devices.take_over(self._rest_key)
        if notes:
            self.keyless = False
            return self._start_noting
        self.keyless = not (self._owned or True in seeds)
        return None if self.keyless else self.start

    def _leave(self) -> tuple[_Each, _Each]:
        """Restore the caller's generators. Returns what the batch has used, and what of it was not seeded."""
        global _owner
        lent, devices, noted, seeds = self._globals, self._devices, self._noted, self._seeds
        at = lent.at
        stamp = at if noted is None and seeds is _ALL else lent.stamp()
        same = stamp == at or (  # but for what was seeded, unless that is noted
            noted is None
            and (seeds[0] or stamp[0] == at[0])
            and (seeds[1] or stamp[1] == at[1])
            and (seeds[2] or stamp[2] == at[2])
        )
        quiet = same and not self.asked and (devices is None or not devices.used())
        used = _NONE if quiet else self._moved(stamp)
        if not self._stays:
            lent.restore()
            if self._saved:
                for each, state in zip(self._owned or (), self._saved, strict=False):
                    each.restore(state)
        if devices is not None:
            devices.restore()
        if self._turn is not None:
            _owner = 0  # first: the next thread says whose it is after it has it
            self._turn.release()
            self._turn = None
        self._saved, _current.streams = None, self._outer
        if noted is not None:
            used, self._known = _either(noted, used) if used is not _NONE else noted, True
        if used is _NONE:
            return used, used
        more = _Each(*map(operator.gt, used, seeds))
        if more.sample and not self.keyless:  # all samples had a key
            more = more._replace(sample=False)
        if devices is not None and devices.late:  # they were not seeded
            more = more._replace(devices=True)
        if noted is not None or any(more):
            self._used = _either(self._used, used)
        return used, more if any(more) else _NONE

    def _moved(self, stamp: Stamp) -> _Each:
        """What was used since the batch or, if that is noted, the sample was begun."""
        at, devices = self._globals.at, self._devices
        return _Each(
            stamp[0] != at[0],
            stamp[1] != at[1],
            stamp[2] != at[2] or self.asked_seed,
            devices is not None and devices.used(),
            self.asked,
        )

    def __reduce__(self) -> tuple[Callable[..., Streams], tuple[object, ...]]:
        # A worker process looks for the generators of its own copy.
        return functools.partial(Streams, devices=self._devices is not None), self._roots


def _either(one: _Each, other: _Each) -> _Each:
    return _Each(*map(operator.or_, one, other))
