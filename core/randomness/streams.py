"""One random stream for each sample. The caller's generators are left unchanged.

Code inside a dataset draws from generators that know nothing of resuming: the global ones of python, numpy and torch,
or some that it owns. Before a sample is read, all of them are seeded for that sample, with a key of (seed, epoch,
position). So the sample's augmentation does not depend on which process reads it, after which others, or whether the
epoch was interrupted before.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ..errors import MidepochError, warn
from ..order.keys import TORCH_KEYS, derive_key
from .devices import LentDevices
from .globals import LentGlobals, Touched
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


_UNKNOWN = (True, True, True)
_NOTHING: Any = ()

# `streams`: those under which this thread reads; None outside.
_current = threading.local()


def process_seed() -> int:
    """torch's initial seed, read and not consumed: the default seed of a single process."""
    streams: Streams | None = getattr(_current, "streams", None)
    if streams is not None:
        streams.asked = True  # a sample that depends on it has to be read under its key
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
    if streams is None or not (streams.watches or streams.key is not None):
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

    ::

        with streams as start:          # the generators are ours from here on
            for key, index in ...:
                start(key)
                samples.append(dataset[index])

    After the block the caller's generators are restored. In a worker process of a DataLoader there is no caller, so
    nothing is saved. Use `begin` and `end` if a ``with`` block is not possible. Not thread-safe, as the global
    generators are not.

    Seeding takes six microseconds a sample, which is wasted if the code draws nothing. So while `unused` is true, a
    reader reads a batch without seeding and only watches: ``look()``, read, ``leave()``. If `leave` returns True, it
    reads the batch again, with seeding.

    Args:
        roots: objects to search for their own generators (a dataset, a collate_fn): at each `begin_pass`, and once more
            after the first batch of the pass, when `made_late` is called.
        devices: the code may draw from the global generators of devices, too.

    Attributes:
        unused: no code has drawn in this process, and there are no generators but the global ones.
        watches: `look` was called, and `leave` was not.
        asked: `sample_generator` was called, or the seed was asked for, since `begin` or `look`.
        key: of the current sample; None if there is none.
        generator: that of `sample_generator` for this key; None if none was made.
    """

    def __init__(self, *roots: object, devices: bool = False) -> None:
        self._roots = roots
        self._owned: list[OwnedGenerator] | None = None
        self._first = False  # no batch of this pass has been read
        self._warned: set[str] = set()  # paths
        self._devices = LentDevices() if devices else None
        self._globals = lent = LentGlobals()
        # Looked up once: these are called for every sample.
        self._python: Any = lent.python
        self._seed_python, self._seed_numpy, self._seed_torch = lent.seed_python, lent.seed_numpy, lent.seed_torch
        self._saved: list[Any] | None = None
        self._lent = False  # True in a worker process, for good
        self._outer: Streams | None = None
        self._drawn = False
        self._used: Touched = _UNKNOWN  # by this code; as far as it is known
        self.unused = self.asked = self.watches = False
        self.key: int | None = None
        self.generator: np.random.Generator | None = None

    # --- looking for generators ---

    def begin_pass(self, *more: object) -> None:
        """Look for generators, in `more` too, before the first sample of a pass is read in this process."""
        self._search(more)
        self._first, self.unused = True, False

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

        They were not seeded. If so, read the batch again; they are seeded from now on. Call it after every batch.
        """
        if not self._first:
            return False
        self._first = False
        before, late = self._owned or [], []
        self._search(more)
        if self._owned:
            known = {id(each.generator) for each in before}
            late = [each for each in self._owned if id(each.generator) not in known]
        # Known generators keep their path for this pass, even if samples have moved them.
        self._owned = [*before, *late]
        self.unused = not self._drawn and not self._owned
        return bool(late) or (self._devices is not None and self._devices.late)

    def warn_of_late(self) -> None:
        """Warn if `made_late` has found something and the batch cannot be read again."""
        warn(
            "code of the source has made a random generator while the first batch was read, and that batch cannot be "
            "read again; its random numbers may differ after a resume: make the generator in __init__, or use "
            "midepoch.sample_generator()",
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
        """Whether any code has drawn under a key, or may have drawn from generators of the source's own."""
        return self._drawn or bool(self._owned)

    # --- seeding ---

    def begin(self, notes: bool = False) -> Callable[[int], None]:
        """Take over the generators.

        Args:
            notes: `noted` is to tell after each seeding whether code has drawn since.

        Returns:
            A function that seeds all of them with a 64-bit key.
        """
        if self._owned is None:
            self._search(())
        self._enter(borrows=not self._lent)
        if not self._lent:
            self._lent = get_worker_info() is not None
            self._saved = [each.save() for each in self._owned] if self._owned and not self._lent else []
        else:
            self._saved = [] if self._saved is None else self._saved
        if (self._drawn or self._owned) and not notes:  # `unused` will be false
            return self.start
        return self._start_watched

    def start(self, key: int) -> None:
        """Seed every generator with `key`."""
        self.key, self.generator = key, None
        self._seed_python(key)
        self._python.gauss_next = None
        self._seed_numpy(key >> 32)
        self._seed_torch(key & TORCH_KEYS)
        if self._devices is not None:
            self._devices.start(key)
        if self._owned:
            for each in self._owned:
                each.start(derive_key(key, each.salt))

    def _start_watched(self, key: int) -> None:
        devices, touched = self._devices, self._globals.seed_watched(key)
        if devices is not None:
            touched = touched or devices.touched()
            devices.start(key)
            devices.watch()
        self._drawn = self._drawn or self.asked or touched
        self.key, self.generator = key, None
        if self._owned:
            for each in self._owned:
                each.start(derive_key(key, each.salt))

    def end(self, *error: object) -> None:
        """Restore the caller's generators as `begin` found them. May be called twice."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        if not (self._drawn or self._owned):
            devices = self._devices
            self._drawn = self.asked or self._globals.touched() or (devices is not None and devices.touched())
            self.unused = self.unused and not self._drawn
            if self._drawn:
                self._used = self._globals.touched_each()
        if not self._lent:
            self._globals.give_back()
            if self._devices is not None:
                self._devices.give_back()
            if saved:
                self._restore(saved)
        _current.streams = self._outer

    def _restore(self, saved: list[Any]) -> None:
        for each, state in zip(self._owned or (), saved, strict=False):
            each.restore(state)

    __enter__, __exit__ = begin, end

    def begin_used(self, key: int) -> None:
        """Take over the generators, and seed those with `key` that the code has used before. Then call `end_used`."""
        if self._lent:
            self.begin()(key)
            return
        self._enter()
        self._saved = [each.save() for each in self._owned] if self._owned else _NOTHING
        self.key = key
        python, numpy, of_torch = self._used
        if python:
            self._seed_python(key)
            self._python.gauss_next = None
        if numpy:
            self._seed_numpy(key >> 32)
        if of_torch:
            self._seed_torch(key & TORCH_KEYS)
        if self._devices is not None and self._devices.held:
            self._devices.start(key)
        if self._owned:
            for each in self._owned:
                each.start(derive_key(key, each.salt))
        if self._used is _UNKNOWN:
            self._globals.watch()

    def end_used(self) -> bool:
        """As `end`. Returns whether a generator was used that `begin_used` has spared: do again what was done."""
        if self._lent:
            self.end()
            return False
        saved, self._saved = self._saved, None
        drawn, before = self._globals.touched_each() if self._used is _UNKNOWN else None, self._used
        used = self._globals.give_back()
        if self._devices is not None:
            self._devices.give_back()
        if saved:
            self._restore(saved)
        _current.streams = self._outer
        if drawn is not None:
            self._used = drawn
            return False
        if used == before:
            return False
        self._used = before[0] or used[0], before[1] or used[1], before[2] or used[2]
        return self._used != before

    @contextlib.contextmanager
    def under(self, key: int) -> Iterator[None]:
        """All generators seeded with one key, for code outside the path of a batch."""
        with self:
            self.start(key)
            yield

    def note(self) -> None:
        """From now on, `noted` tells whether code has drawn. Call it after seeding."""
        self._globals.watch()
        if self._devices is not None:
            self._devices.watch()

    def noted(self) -> bool:
        """Whether code has drawn from the global generators, or by `sample_generator`, since `note`."""
        if self.asked or self._globals.touched():
            return True
        return self._devices is not None and self._devices.touched()

    def start_noted(self, key: int) -> None:
        """`start`, then `note`; nothing if the last call had the same key, and no code has drawn since."""
        drawn = self.key is not None and self.noted()
        self._drawn = self._drawn or drawn
        if self.key == key and not drawn and not self._owned:
            return
        self.start(key)
        self.note()

    # --- watching, without seeding ---

    def look(self) -> None:
        """Start watching for draws. Only while `unused`."""
        self._enter(borrows=not self._lent)
        self.watches = True

    def leave(self) -> bool:
        """Stop watching. Returns whether any generator was used since `look`. The caller's generators are restored."""
        devices = self._devices
        drawn = self.asked or self._globals.touched() or (devices is not None and devices.touched())
        if not self._lent:
            self._globals.give_back(drawn)
            if devices is not None:
                devices.give_back()
                drawn = drawn or devices.late
        self.unused, self.watches = not drawn, False
        _current.streams = self._outer
        return drawn

    def watched(self, call: Callable[[], Any], drew: Callable[[Any], Any]) -> Callable[[], Any]:
        """A function that calls `call` between `look` and `leave`, for the path of a batch. Only while `unused`.

        Args:
            call: returns a batch.
            drew: gets the batch if a generator was used after all, and returns what takes its place.
        """
        if self._lent or self._devices is not None:
            return functools.partial(self._watch, call, drew)

        def drew_after_all(batch: Any) -> Any:
            self.unused = self.watches = False
            return drew(batch)

        self.key, self.generator, self.asked, self.watches = None, None, False, True
        read: Callable[[], Any] = self._globals.watched(call, drew_after_all, self, _current)
        return read

    def _watch(self, call: Callable[[], Any], drew: Callable[[Any], Any]) -> Any:
        self.look()
        try:
            batch = call()
        except BaseException:
            self.leave()
            raise
        return drew(batch) if self.leave() else batch

    def warn_of_kept(self, reader: object, what: object) -> None:
        """Warn if a batch drew random numbers when it was read unseeded, and none when it was read again with seeding.

        Its code caches what it drew.
        """
        if not self._drawn:
            warn(
                f"{type(reader).__name__} drew random numbers for {what} when it was first read, and none when it was "
                "read again: it caches random numbers, which will differ after a resume; use "
                "midepoch.sample_generator(), or draw new numbers for every sample",
            )

    def _enter(self, borrows: bool = True) -> None:
        self._outer = getattr(_current, "streams", None)
        _current.streams, self.key, self.generator, self.asked, self.watches = self, None, None, False, False
        if borrows:
            self._globals.borrow()
            if self._devices is not None:
                self._devices.borrow()
        else:
            self._globals.retake()
            if self._devices is not None:
                self._devices.watch()

    def __reduce__(self) -> tuple[Callable[..., Streams], tuple[object, ...]]:
        # A worker process looks for the generators of its own copy.
        return functools.partial(Streams, devices=self._devices is not None), self._roots
