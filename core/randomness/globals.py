"""The global random generators of python, numpy and torch: taken over for a batch, and restored after it.

Public calls save and restore the states of python's and torch's. numpy's calls take 40 and 55 microseconds, so its
global bit generator is replaced by one of ours instead. That loses the second of a pair of normal numbers, which is
saved apart.

A stamp tells whether a generator was used: it is its state, or a part that each use changes. Saving python's state
takes 9 microseconds, so 32 bytes are read from where CPython keeps it, and as many of numpy's. This and the way to save
numpy's pair are tried once in a process, on other generators of these types. If that fails, public calls alone are
used. It assumes that one thread uses it at a time.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import random
import struct
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from ..order.keys import TORCH_KEYS

__all__ = ["NAMES", "GlobalGenerators"]

NAMES = ("python", "numpy", "torch")
_NONE: frozenset[str] = frozenset()

_WORDS = 624  # of the state of a Mersenne Twister, which all three are
# Where the end of numpy's begins, at the address that numpy states: ``struct { uint32_t key[624]; int pos; }``.
_LAST_WORDS = 4 * (_WORDS - 7)
_words_at: Any = (ctypes.c_char * 32).from_address


class GlobalGenerators:
    """`take_over` the generators, seed them as often as needed, then `restore` them.

    numpy's and torch's are at rest until they are seeded: in a state that follows from the key given to `rest_at`.
    python's is left as it is, because to put it at rest and back would take as long as a batch that draws nothing.
    """

    def __init__(self) -> None:
        self._python: Any = random._inst
        parent: Any = super(random.Random, self._python)  # without what is done about arguments and old versions
        self._seed_python, self._set_python = parent.seed, parent.setstate
        self._numpy: Any = np.random.mtrand._rand
        self._get_numpy, self._set_numpy = np.random.get_bit_generator, np.random.set_bit_generator
        self._torch = torch.default_generator
        self._light = _is_known()
        self._python_words: Any = _python_words(self._python) if self._light else random.getstate
        self._no_engine = _no_engine() if self._light else None
        self._bytes_at: Any = (ctypes.c_char * len(self._torch.get_state())).from_address
        self.rest_at(0)
        # In place of the caller's, so that a seed gives the same numbers whichever bit generator the caller has.
        self._ours = self._numpy_rest
        self._numpy_words: Any = self._ours[1]
        self._at: tuple[Any, Any, Any] = (None, None, None)  # their stamps, as they were last looked at
        self._python_saved: Any = None  # the caller's state
        self._python_at: Any = None  # the stamp with which it was saved
        self._saved: tuple[Any, Any, Any] = (None, None, None)  # the caller's: numpy's, its pair, torch's

    def rest_at(self, key: int) -> None:
        """Take this key for the state at rest, from the next `take_over` on."""
        self._rest = torch.Generator().manual_seed(key & TORCH_KEYS).get_state()
        self._torch_rest = self._bytes_at(self._rest.data_ptr()).raw
        bits = np.random.MT19937(key)
        words: Any = functools.partial(_state_of, bits)
        if self._light:
            words = functools.partial(getattr, _words_at(bits.ctypes.state_address + _LAST_WORDS), "raw")
        self._numpy_rest = bits, words

    def seeding(self, seeded: Collection[str]) -> Callable[[int], None]:
        """What seeds some of them with a 64-bit key. It is called for each sample."""
        python, seed_python = self._python, self._seed_python
        seed_numpy, seed_torch = self._numpy.seed, self._torch.manual_seed
        seeds_python, seeds_numpy, seeds_torch = "python" in seeded, "numpy" in seeded, "torch" in seeded

        def start(key: int) -> None:
            if seeds_python:
                seed_python(key)
                python.gauss_next = None
            if seeds_numpy:
                seed_numpy(key >> 32)  # torch seeds a generator of its kind with the lower half
            if seeds_torch:
                seed_torch(key & TORCH_KEYS)

        return start

    def moved(self, besides: frozenset[str] = _NONE) -> frozenset[str]:
        """Which have moved since they were taken over, or since this was last asked; some are not looked at."""
        python, numpy, torch = before = self._at
        if "python" not in besides:
            python = self._python_words(), self._python.gauss_next
        if "numpy" not in besides:
            numpy = self._numpy_words()
        if "torch" not in besides:
            engine = self._torch.get_state()
            torch = self._bytes_at(engine.data_ptr()).raw
        after = self._at = python, numpy, torch
        return _NONE if after == before else frozenset(itertools.compress(NAMES, map(operator.ne, after, before)))

    def take_over(self, seeded: Collection[str]) -> None:
        """Save the caller's states, and put numpy's and torch's generator at rest that will not be `seeded`."""
        python = self._python_words(), self._python.gauss_next
        if python != self._python_at:
            self._python_saved, self._python_at = random.getstate(), python
        callers = self._get_numpy()
        ours, self._numpy_words = self._ours if "numpy" in seeded else self._numpy_rest
        self._numpy._bit_generator = self._no_engine or callers  # else most of the time goes for its words
        try:
            self._saved = callers, self._numpy.get_state(False), self._torch.get_state()
        finally:
            self._set_numpy(ours)
        self._torch.set_state(self._rest)
        self._at = python, self._numpy_words(), self._torch_rest

    def restore(self, besides: frozenset[str] = _NONE) -> frozenset[str]:
        """Put the caller's states back. Returns what has moved, as `moved` does."""
        moved = _NONE if besides.issuperset(NAMES) else self.moved(besides)
        numpy, pair, engine = self._saved
        self._set_numpy(numpy)
        if pair["has_gauss"]:
            _apart(self._numpy, self._no_engine, self._numpy.set_state, pair)
        self._torch.set_state(engine)
        if "python" in besides or self._at[0] != self._python_at:
            _, words, self._python.gauss_next = self._python_saved
            self._set_python(words)
        return moved


# A Mersenne Twister's index returns to the same value after 624 words, but by then all words of its state are new.


def _python_words(generator: Any) -> Callable[[], bytes]:
    """In CPython: ``struct { PyObject_HEAD int index; uint32_t state[624]; }``."""
    return functools.partial(getattr, _words_at(id(generator) + object.__basicsize__), "raw")


def _state_of(bits: Any) -> Any:
    return bytes(bits.state["state"]["key"]), bits.state["state"]["pos"]


def _no_engine() -> Any:
    """Stands in for a bit generator whose state is of no interest."""
    return types.SimpleNamespace(state={"bit_generator": "MT19937", "state": None})


def _apart(of: Any, without: Any, call: Callable[[Any], Any], argument: Any) -> Any:
    """Call a method of a RandomState without its bit generator, whose words would take most of the time."""
    if without is None:
        return call(argument)
    engine, of._bit_generator = of._bit_generator, without
    try:
        return call(argument)
    finally:
        of._bit_generator = engine


@functools.cache
def _is_known() -> bool:
    """Whether other generators have their words where these are read, and give half a pair alone."""
    python, bits = random.Random(1), np.random.MT19937(1)
    *words, index = python.getstate()[1]
    state: Any = bits.state["state"]
    last_words = state["key"][-7:].tobytes() + struct.pack("i", state["pos"])
    one: Any = np.random.RandomState(1)
    second, none = float(np.random.RandomState(1).standard_normal(2)[1]), _no_engine()
    try:
        one.standard_normal()
        pair: Any = dict(_apart(one, none, one.get_state, False))
        one.standard_normal()
        other: Any = _apart(one, none, one.get_state, False)
        _apart(one, none, one.set_state, pair)
        keeps_pairs = pair["has_gauss"] and not other["has_gauss"] and float(one.standard_normal()) == second
    except Exception:  # noqa: BLE001  # of another version of numpy
        return False
    return bool(
        keeps_pairs
        and sys.implementation.name == "cpython"
        and type(python).__basicsize__ >= object.__basicsize__ + 4 * (_WORDS + 1)
        and _python_words(python)() == struct.pack("8I", index, *words[:7])
        and _words_at(bits.ctypes.state_address + _LAST_WORDS).raw == last_words
    )
