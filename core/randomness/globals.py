"""The global random generators of python, numpy and torch: borrowed, put under a key, and given back as they were.

This is done around every batch. By public calls (`getstate`, `set_state`, ...) it takes 157 microseconds, a sixth of a
training step of a millisecond, such as Lightning's BoringModel takes; by copies of the memory that holds the same words
1.3, and a look at whether anybody has drawn 0.8, for which there is no public call (2 cores, 2026-11-23, torch 2.13,
numpy 2.1). So memory is copied wherever test objects of the same types prove where the words stand; elsewhere the
public calls do. Everything here is of one process and one thread.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from typing import Any

import numpy as np
import torch

__all__ = ["LentGlobals", "SlowlyLentGlobals", "lend_globals"]

_WORDS = 624  # of the state of a Mersenne Twister, which all three are
_LARGEST = 1 << 14  # bytes; a torch generator has some 2600


def lend_globals() -> LentGlobals | SlowlyLentGlobals:
    """The global generators, to be borrowed in the fastest way that is proved to be right here."""
    known = (_python_is_memory(), _numpy_is_memory(), _offset_of_pair() is not None, _span_of_torch() is not None)
    return LentGlobals() if all(known) else SlowlyLentGlobals()


class SlowlyLentGlobals:
    """The global generators by their own methods. `borrow`, seed them as often as needed, then `give_back`."""

    rests = False

    def __init__(self) -> None:
        # numpy's RandomState is lent a bit generator of ours: seeding it means the same whatever the caller's is.
        self._ours = np.random.MT19937(0)
        self._python: Any = None
        self._numpy: Any = None
        self._pair: Any = None
        self._torch: Any = None

    def borrow(self) -> None:
        """Remember the caller's states."""
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        # The second of a pair of normal numbers is lost with the bit generator.
        self._numpy, self._pair = np.random.get_bit_generator(), np.random.get_state(legacy=False)
        np.random.set_bit_generator(self._ours)

    def give_back(self) -> None:
        """Put the caller's states back."""
        np.random.set_bit_generator(self._numpy)
        np.random.set_state(self._pair)
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)

    def look(self) -> None:
        """Not to be called."""

    def watch(self) -> None:
        """Not to be called."""

    def touched(self) -> bool:
        """Not to be called."""
        return True


class _Memory:
    """A part of another object, as bytes and as words of 32 bits, and room for a copy of it."""

    def __init__(self, address: int, size: int) -> None:
        self.bytes = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        self.words = self.bytes.cast("I")
        self.saved = memoryview(bytearray(size))
        self.mark = self.bytes[-20:]


class LentGlobals:
    """The global generators by copies of their memory. `borrow`, then seed them, then `give_back`.

    Or `look`, and `touched` says whether anybody has drawn since; then `give_back` puts back what was drawn. Looking
    copies nothing as long as nobody draws.

    In CPython python's is ``struct { PyObject_HEAD int index; uint32_t state[624]; }`` and one attribute. numpy's is
    ``struct { uint32_t key[624]; int pos; }`` in its bit generator, in whose place one of ours is lent; the second of a
    pair of normal numbers is in the RandomState itself, ``struct { int has_gauss; double gauss; }``, and lost with the
    bit generator. torch's is ``struct { uint64_t seed; int left; bool seeded; uint32_t next; uint32_t state[624]; }``
    and what it keeps of pairs, to the end of the object.
    """

    rests = True

    def __init__(self) -> None:
        # All in one object, written out: the path of every batch leads through here.
        self._generator: Any = random._inst
        self._ours = np.random.MT19937(0)
        self._theirs: Any = None
        self._gauss_next: float | None = None
        span, pair = _span_of_torch(), _offset_of_pair()
        assert span is not None and pair is not None  # see `lend_globals`
        self._python = _python_memory(self._generator)
        self._our_numpy = self._their_numpy = self._numpy = _numpy_memory(self._ours)
        self._pair = _Memory(id(np.random.mtrand._rand) + pair, 16)
        self._torch = _Memory(_address(torch.default_generator) + span[0], span[1])
        # What tells one state from another: the count of numbers drawn, which comes back to itself after 624, when all
        # words have been made anew; some of these words; and what is kept of a pair of normal numbers.
        self._python_mark = self._python.bytes[:32]
        self._torch_mark, self._torch_pairs = self._torch.bytes[:40], self._torch.bytes[_AFTER_WORDS:]
        self._marks: tuple[Any, ...] = ()
        self._kept: tuple[Any, ...] = ()
        self._lent = False

    def look(self) -> None:
        """Remember the caller's states, and let `touched` tell whether they change."""
        theirs = np.random.get_bit_generator()
        if theirs is not self._theirs:
            self._theirs = theirs
            known = type(theirs) is np.random.MT19937
            self._their_numpy = _numpy_memory(theirs) if known else self._our_numpy
            self._numpy, self._kept = self._their_numpy, ()
        self._marks = self._now()
        if self._marks != self._kept:
            self._keep()
        if self._their_numpy is self._our_numpy:  # a generator of another kind, of which nobody but its owner may draw
            self._lend()
            self._marks = self._now()

    def borrow(self) -> None:
        """Remember the caller's states, and make the generators ours."""
        self.look()
        self._lend()

    def watch(self) -> None:
        """Let `touched` tell what happens from here on."""
        self._marks = self._now()

    def touched(self) -> bool:
        """Whether a number has been drawn since `look` or `watch`, or a seed set."""
        return self._now() != self._marks

    def give_back(self) -> None:
        """Put the caller's states back."""
        if self._lent:
            np.random.set_bit_generator(self._theirs)
            self._numpy, self._lent = self._their_numpy, False
            self._restore()
        elif self.touched():
            self._restore()

    def _lend(self) -> None:
        np.random.set_bit_generator(self._ours)
        self._numpy, self._lent = self._our_numpy, True

    def _keep(self) -> None:
        python, numpy, pair, memory = self._python, self._their_numpy, self._pair, self._torch
        python.saved[:] = python.bytes
        numpy.saved[:] = numpy.bytes
        pair.saved[:] = pair.bytes
        memory.saved[:] = memory.bytes
        self._gauss_next = self._generator.gauss_next
        self._kept = self._marks

    def _restore(self) -> None:
        python, numpy, pair, memory = self._python, self._their_numpy, self._pair, self._torch
        python.bytes[:] = python.saved
        numpy.bytes[:] = numpy.saved
        pair.bytes[:] = pair.saved
        memory.bytes[:] = memory.saved
        self._generator.gauss_next = self._gauss_next

    def _now(self) -> tuple[Any, ...]:
        return (
            self._python_mark.tobytes(),
            self._generator.gauss_next,
            self._numpy.mark.tobytes(),
            self._pair.bytes.tobytes(),
            self._torch_mark.tobytes(),
            self._torch_pairs.tobytes(),
        )


_BEFORE = 20  # bytes in front of a torch generator's words
_AFTER_WORDS = _BEFORE + 4 * _WORDS
_LEFT, _FIRST = 2, 5  # of what is copied of a torch generator, in words


def _python_memory(generator: Any) -> _Memory:
    return _Memory(id(generator) + object.__basicsize__, 4 * (1 + _WORDS))


def _numpy_memory(generator: Any) -> _Memory:
    return _Memory(generator.ctypes.state_address, 4 * (_WORDS + 1))


def _address(generator: Any) -> int:
    address: int = generator._cdata
    return address


# --- proofs ---------------------------------------------------------------------------------------------------------


@functools.cache
def _python_is_memory() -> bool:
    """True if a generator's state stands where `LentGlobals` would read and write it."""
    generator = random.Random(1)
    if sys.implementation.name != "cpython" or type(generator).__basicsize__ < object.__basicsize__ + 4 * 625:
        return False
    words = (ctypes.c_uint32 * 625).from_address(id(generator) + object.__basicsize__)
    *state, index = generator.getstate()[1]
    return [index, *state] == list(words)


@functools.cache
def _numpy_is_memory() -> bool:
    """True if a bit generator's state stands where `LentGlobals` would read and write it."""
    generator = np.random.MT19937(1)
    if sys.implementation.name != "cpython":
        return False
    state: Any = generator.state["state"]
    words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(generator.ctypes.state_address)
    return list(words) == [*state["key"].tolist(), state["pos"]]


@functools.cache
def _offset_of_pair() -> int | None:
    """Where in a RandomState `LentGlobals` finds the second normal number; None if that cannot be told."""
    if sys.implementation.name != "cpython":
        return None
    state = np.random.RandomState(1)
    size = type(state).__basicsize__

    def memory() -> bytes:
        return ctypes.string_at(id(state), size)

    state.standard_normal()
    with_pair = memory()
    kept = state.get_state(legacy=False)
    assert isinstance(kept, dict)  # what legacy=False is for
    second = struct.pack("d", kept["gauss"])
    offsets = [place - 8 for place in range(8, size - 7, 8) if with_pair[place : place + 8] == second]
    state.standard_normal()
    without = memory()
    if len(offsets) != 1 or [struct.unpack_from("i", each, offsets[0])[0] for each in (with_pair, without)] != [1, 0]:
        return None
    return offsets[0]


@functools.cache
def _span_of_torch() -> tuple[int, int] | None:
    """First byte in a torch generator, and number of bytes, that `LentGlobals` copies; None if that cannot be told.

    An object's size is asked of the C library: what is read belongs to it. Then a copy has to bring back a generator
    that has drawn an odd number of normal ones, which is all that such a generator remembers.
    """
    try:
        usable: Any = ctypes.CDLL(None).malloc_usable_size
    except (AttributeError, OSError, TypeError):
        return None
    usable.restype, usable.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    generator = torch.Generator().manual_seed(1)
    size = int(usable(_address(generator)))
    if size != int(usable(_address(torch.default_generator))) or not 0 < size < _LARGEST:
        return None
    for kind in (torch.float32, torch.float64):
        torch.randn(1, generator=generator, dtype=kind)
    before = generator.get_state()
    # The saved form has a head of 24 bytes and 8 for each word.
    words = before[24 : 24 + 8 * _WORDS].numpy().view(np.uint64).astype(np.uint32).tobytes()
    place = ctypes.string_at(_address(generator), size).find(words) - _BEFORE
    if place < 0:
        return None
    memory = _Memory(_address(generator) + place, (size - place) // 4 * 4)
    memory.saved[:] = memory.bytes
    generator.manual_seed(2)
    fresh = [memory.words[mark] for mark in (_LEFT, _FIRST)]
    torch.randn(700, generator=generator)
    drawn = [memory.words[mark] for mark in (_LEFT, _FIRST)]
    memory.bytes[:] = memory.saved
    if fresh != [1, 2] or fresh == drawn or not torch.equal(before, generator.get_state()):
        return None
    return place, (size - place) // 4 * 4
