"""The global random generators of python, numpy and torch: saved before a batch and restored after it.

Public calls save and restore, and nothing is ever written into memory that is not ours. numpy's calls are the slowest:
saving takes 40 microseconds and restoring 55, a tenth of a training step of a millisecond. So numpy's global bit
generator is replaced by one of ours instead, which takes 0.2.

For each batch we must also know whether any generator was used, and whether numpy has cached the second of a pair of
normal numbers, which the replacement would lose. No cheap public call tells. The generators' memory does, in 0.2
microseconds each. It is read only if a test on generators of the same types confirms its layout. Otherwise the public
calls are used, at 220 microseconds a batch instead of 1 (2 cores, 2026-11-24, torch 2.13, numpy 2.1). This module
assumes one process and one thread.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from ..order.keys import TORCH_KEYS

__all__ = ["LentGlobals", "Touched"]

_WORDS = 624  # of the state of a Mersenne Twister, which all three are
_NO_PAIR = bytes(4)
_TORCH_STATE = 5056  # bytes of `get_state` of a torch generator that is one


Touched = tuple[bool, bool, bool]
"""Whether python's, numpy's and torch's generator were used."""
_NONE = (False, False, False)
_NUMPY = (False, True, False)

_Stamps = tuple[bytes, float | None, bytes, bytes]
"""Of python's generator: its own, and the cached normal number; of torch's: its own, and that of such numbers."""


class LentGlobals:
    """`borrow` the global generators, seed them as often as needed, then `give_back`.

    Args:
        by_memory: False: use only public calls.

    Attributes:
        python: python's generator.
        seed_python, seed_numpy, seed_torch: seed one of them. numpy's takes 32 bits: give it the upper half of a key,
            because torch seeds a generator of the same kind with the lower one, and the numbers would be equal. Mask
            torch's with `TORCH_KEYS`.
    """

    def __init__(self, by_memory: bool = True) -> None:
        self._python_stamp: _Stamp
        self._numpy_stamp: _Stamp
        self._pair_stamp: _Stamp
        self._torch_stamp: _Stamp
        self._torch_pair_stamp: _Stamp
        # Looked up once: the path of every batch leads through here.
        self._get_numpy, self._set_numpy = np.random.get_bit_generator, np.random.set_bit_generator
        self.python: Any = random._inst
        self._set_python = super(random.Random, self.python).setstate  # without what is done for old versions
        self.seed_python = super(random.Random, self.python).seed  # without the argument handling of random.seed
        self.seed_numpy: Callable[[int], None] = np.random.mtrand._rand.seed
        self._torch = torch.default_generator
        self.seed_torch = self._torch.manual_seed
        # In place of the caller's, so that a seed gives the same numbers whichever bit generator the caller has.
        self._ours = np.random.MT19937(0)
        self._python_stamp, self._numpy_stamp, self._pair_stamp = _PythonState(), _NumpyState(self._ours), _Pair()
        self._torch_stamp, self._torch_pair_stamp = _TorchState(self._torch), memoryview(b"")
        pair, engine = _offset_of_pair(), _offset_of_engine()
        if by_memory and _python_is_known():
            self._python_stamp = _python_stamp(self.python)
        if by_memory and _numpy_is_known():
            self._numpy_stamp = _numpy_stamp(self._ours)
        if by_memory and pair is not None:
            self._pair_stamp = _memory(id(np.random.mtrand._rand) + pair, 4)
        if by_memory and engine is not None:
            self._torch_stamp, self._torch_pair_stamp = _torch_stamps(self._torch, engine)
        self._python_saved: Any = None
        self._numpy_saved: Any = None
        self._pair_saved: Any = None
        self._torch_saved: Any = None
        self._saved_at: _Stamps | None = None  # of python's and torch's generator, when their states were saved
        self._stamps: _Stamps | None = None  # and at the last `borrow` or `watch`
        self._numpy_at = b""  # the stamp of ours then

    def borrow(self) -> None:
        """Save the caller's states. From now on, `touched` reports whether a generator was used."""
        self._stamps = stamps = (
            self._python_stamp.tobytes(),
            self.python.gauss_next,
            self._torch_stamp.tobytes(),
            self._torch_pair_stamp.tobytes(),
        )
        if stamps != self._saved_at:
            self._save(stamps)
        self._pair_saved = np.random.get_state(legacy=False) if self._pair_stamp.tobytes() != _NO_PAIR else None
        self._numpy_saved = self._get_numpy()
        self._set_numpy(self._ours)
        self._numpy_at = self._numpy_stamp.tobytes()

    def _save(self, stamps: _Stamps) -> None:
        before = self._saved_at
        if before is None or stamps[:2] != before[:2]:
            self._python_saved = random.getstate()
        if before is None or stamps[2:] != before[2:]:
            self._torch_saved = self._torch.get_state()
        self._saved_at = stamps

    def give_back(self, touched: bool = True) -> Touched:
        """Restore the caller's states.

        Args:
            touched: whether a generator was used since `borrow`.

        Returns:
            Which of them were; of numpy's, whether it was used since `borrow` or `watch`.
        """
        numpy = touched and self._numpy_stamp.tobytes() != self._numpy_at
        self._set_numpy(self._numpy_saved)
        if self._pair_saved is not None:
            np.random.set_state(self._pair_saved)
        if not touched:
            return _NONE
        saved, stamps = self._saved_at, (  # as `_look`: written out where batches lead through
            self._python_stamp.tobytes(),
            self.python.gauss_next,
            self._torch_stamp.tobytes(),
            self._torch_pair_stamp.tobytes(),
        )  # fmt: skip
        if stamps == saved:
            return _NUMPY if numpy else _NONE
        assert saved is not None  # borrow has saved
        python, engine = stamps[:2] != saved[:2], stamps[2:] != saved[2:]
        if python:
            _, words, self.python.gauss_next = self._python_saved
            self._set_python(words)
        if engine:
            self._torch.set_state(self._torch_saved)
        return python, numpy, engine

    def watched(self, call: Callable[[], Any], drew: Callable[[Any], Any], reader: Any, current: Any) -> Any:
        """A function that does as `borrow`, `call` and `give_back`, written out: a batch may cost two microseconds.

        Args:
            call: draws nothing, as far as is known.
            drew: called with what `call` returned if a generator was used after all; its result is returned.
            reader: is ``current.streams`` meanwhile. Its `asked` counts as a use.
            current: of each thread.
        """
        python, engine, normals = self._python_stamp.tobytes, self._torch_stamp.tobytes, self._torch_pair_stamp.tobytes
        pair, numpy, generator = self._pair_stamp.tobytes, self._numpy_stamp.tobytes, self.python
        get_numpy, set_numpy, ours = self._get_numpy, self._set_numpy, self._ours
        untouched = numpy()  # for good: nobody else has ours

        def read() -> Any:
            first, gauss, second, third = stamps = python(), generator.gauss_next, engine(), normals()
            if stamps != self._saved_at:
                self._save(stamps)
            kept = None if pair() == _NO_PAIR else np.random.get_state(legacy=False)
            callers, outer = get_numpy(), getattr(current, "streams", None)
            set_numpy(ours)
            current.streams = reader
            try:
                batch = call()
            except BaseException:
                current.streams = outer
                self._give_back_of(callers, kept)
                raise
            current.streams = outer
            if (
                python() != first or generator.gauss_next is not gauss or engine() != second or normals() != third
                or numpy() != untouched or reader.asked
            ):  # fmt: skip
                self._give_back_of(callers, kept)
                return drew(batch)
            set_numpy(callers)
            if kept is not None:
                np.random.set_state(kept)
            return batch

        return read

    def _give_back_of(self, numpy: Any, pair: Any) -> None:
        self._numpy_saved, self._pair_saved = numpy, pair
        self.give_back()

    def retake(self) -> None:
        """Use it instead of `borrow` where nothing is given back. Others may have borrowed since."""
        self._set_numpy(self._ours)
        self._numpy_at = self._numpy_stamp.tobytes()
        self._stamps = (  # as `watch`: written out where batches lead through
            self._python_stamp.tobytes(),
            self.python.gauss_next,
            self._torch_stamp.tobytes(),
            self._torch_pair_stamp.tobytes(),
        )

    def watch(self) -> None:
        """From now on, `touched` reports whether a generator was used."""
        self._numpy_at = self._numpy_stamp.tobytes()
        self._stamps = (
            self._python_stamp.tobytes(),
            self.python.gauss_next,
            self._torch_stamp.tobytes(),
            self._torch_pair_stamp.tobytes(),
        )

    def seed_watched(self, key: int) -> bool:
        """Seed all with `key`, then `watch`. Returns what `touched` would have returned before.

        Each sample of a pass's first batch leads through it, so it is written out.
        """
        touched = self._numpy_stamp.tobytes() != self._numpy_at or self._stamps != (
            self._python_stamp.tobytes(),
            self.python.gauss_next,
            self._torch_stamp.tobytes(),
            self._torch_pair_stamp.tobytes(),
        )
        self.seed_python(key)
        self.python.gauss_next = None
        self.seed_numpy(key >> 32)
        self.seed_torch(key & TORCH_KEYS)
        self._numpy_at = self._numpy_stamp.tobytes()
        self._stamps = (
            self._python_stamp.tobytes(),
            None,
            self._torch_stamp.tobytes(),
            self._torch_pair_stamp.tobytes(),
        )
        return touched

    def touched_each(self) -> Touched:
        """As `touched`, for each generator."""
        stamps, before = self._look(), self._stamps
        assert before is not None  # a `borrow` or `watch` came first
        return stamps[:2] != before[:2], self._numpy_stamp.tobytes() != self._numpy_at, stamps[2:] != before[2:]

    def touched(self) -> bool:
        """Whether a generator was used or seeded since `borrow` or `watch`."""
        return self._numpy_stamp.tobytes() != self._numpy_at or self._stamps != (
            self._python_stamp.tobytes(),
            self.python.gauss_next,
            self._torch_stamp.tobytes(),
            self._torch_pair_stamp.tobytes(),
        )

    def _look(self) -> _Stamps:  # written out where samples lead through
        return (
            self._python_stamp.tobytes(),
            self.python.gauss_next,
            self._torch_stamp.tobytes(),
            self._torch_pair_stamp.tobytes(),
        )


# --- stamps: they change when a generator is used ---------------------------------------------------------------------
# A Mersenne Twister's index returns to the same value after 624 words, but by then all words of its state are new. So a
# stamp in memory holds the index and at least a few words. torch's has another one for the cached second of a pair of
# normal numbers, because a draw that takes it leaves the engine as it is.


class _Stamp(Protocol):
    def tobytes(self) -> bytes:
        """Bytes that change when the generator is used."""


class _PythonState:
    def tobytes(self) -> bytes:
        return repr(random.getstate()).encode()


class _NumpyState:
    def __init__(self, bits: np.random.MT19937) -> None:
        self._bits = bits

    def tobytes(self) -> bytes:
        state: Any = self._bits.state["state"]
        return bytes(state["key"]) + struct.pack("i", state["pos"])


class _Pair:
    def tobytes(self) -> bytes:
        state: Any = np.random.get_state(legacy=False)
        return struct.pack("i", state["has_gauss"])


class _TorchState:
    def __init__(self, generator: torch.Generator) -> None:
        self.python = generator

    def tobytes(self) -> bytes:
        return bytes(self.python.get_state().numpy().tobytes())


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _python_stamp(generator: Any) -> memoryview:
    """In CPython: ``struct { PyObject_HEAD int index; uint32_t state[624]; }``."""
    return _memory(id(generator) + object.__basicsize__, 32)


def _numpy_stamp(bits: Any) -> memoryview:
    """In its bit generator: ``struct { uint32_t key[624]; int pos; }``."""
    return _memory(bits.ctypes.state_address + 4 * (_WORDS - 4), 20)


def _torch_state(generator: Any, engine: int) -> memoryview:
    """In its implementation, from `engine` on.

    ``struct { uint64_t seed; int left; bool seeded; uint32_t next; uint32_t state[624]; }``, then
    ``optional<float>, optional<double>``: the cached normal numbers. All of it, with what lies between.
    """
    return _memory(generator._cdata + engine, _NORMAL + 9)


def _torch_stamps(generator: Any, engine: int) -> tuple[memoryview, memoryview]:
    """Of that, the first words and what is before them; and the cached normal numbers."""
    state = _torch_state(generator, engine)
    return state[: _STATE + 16], state[_STATE + 4 * _WORDS :]


_STATE = 20  # offset in `_torch_state` of the words
_NORMAL = _STATE + 4 * _WORDS + 12  # and of the cached normal number: a double, then whether there is one


@functools.cache
def _python_is_known() -> bool:
    """True if a generator's state is where `_python_stamp` reads it."""
    generator = random.Random(1)
    if sys.implementation.name != "cpython" or type(generator).__basicsize__ < object.__basicsize__ + 4 * (_WORDS + 1):
        return False
    *words, index = generator.getstate()[1]
    return _python_stamp(generator).tobytes() == struct.pack("8I", index, *words[:7])


@functools.cache
def _numpy_is_known() -> bool:
    """True if a bit generator's state is where `_numpy_stamp` reads it."""
    bits = np.random.MT19937(1)
    state: Any = bits.state["state"]
    return _numpy_stamp(bits).tobytes() == struct.pack("5I", *state["key"][-4:].tolist(), state["pos"])


@functools.cache
def _offset_of_pair() -> int | None:
    """The offset of a RandomState's cached normal number: ``struct { int has_gauss; double gauss; }``.

    Returns:
        Bytes from its beginning; None if it is not certain.
    """
    if sys.implementation.name != "cpython":
        return None
    state = np.random.RandomState(1)
    size = type(state).__basicsize__
    state.standard_normal()
    with_pair = ctypes.string_at(id(state), size)
    kept: Any = state.get_state(legacy=False)
    second = struct.pack("d", kept["gauss"])
    offsets = [at - 8 for at in range(8, size - 7, 8) if with_pair[at : at + 8] == second]
    state.standard_normal()
    without = ctypes.string_at(id(state), size)
    if len(offsets) != 1 or [struct.unpack_from("i", each, offsets[0])[0] for each in (with_pair, without)] != [1, 0]:
        return None
    return offsets[0]


@functools.cache
def _offset_of_engine() -> int | None:
    """The offset of the Mersenne Twister in the implementation of a torch generator.

    Returns:
        Bytes from its beginning; None if it is not certain.
    """
    generator = torch.Generator().manual_seed(0x123456789ABCDEF)
    legacy = generator.get_state().numpy().tobytes()
    if sys.implementation.name != "cpython" or len(legacy) != _TORCH_STATE or not hasattr(generator, "_cdata"):
        return None
    words = struct.unpack_from(f"={_WORDS}Q", legacy, 24)
    # The implementation is larger than its words, so this much can be read.
    beginning = ctypes.string_at(generator._cdata, 4 * _WORDS)
    at = beginning.find(struct.pack("=8I", *words[:8]))
    engine = at - _STATE
    if at < _STATE or (generator._cdata + engine + _NORMAL) % 8:
        return None
    for count in (3, 1):  # caches a normal number, takes it
        torch.empty(count, dtype=torch.float64).normal_(generator=generator)
        legacy = generator.get_state().numpy().tobytes()
        seed, left, seeded, following, *words_now = struct.unpack_from(f"=Qii{_WORDS + 1}Q", legacy)
        normal, valid = struct.unpack_from("=d8xi", legacy, 24 + 8 * _WORDS + 8)
        state = _torch_state(generator, engine).tobytes()
        found = struct.unpack_from(f"=Qi?3x{_WORDS + 1}I", state)
        cached = struct.unpack_from("=d?", state, _NORMAL)
        if found != (seed, left, bool(seeded), following, *words_now) or cached[1] != bool(valid):
            return None
        if valid and cached[0] != normal:
            return None
    return engine
