"""A random stream for each sample, inside FFCV's compiled code.

Compiled code draws from numba's generators: one Mersenne Twister for each thread, in memory that only compiled code can
reach. FFCV never seeds them, and thread scheduling decides which thread gets which sample. Here the calling thread's
generator is set to the start of a sample's stream, by writing its 624 words. ``np.random.seed`` takes microseconds for
this, as long as a cheap augmentation itself.

The first 64 words that are drawn come from SplitMix64, which is more than any augmentation of FFCV uses. The other 560
are a fixed table plus 256 bits that belong to the stream. After them the twister continues by itself. No earlier state
of the thread's generator is left.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.cpython import randomimpl as untyped_randomimpl
from numba.extending import intrinsic

from midepoch.order.keys import derive_key, derive_keys

__all__ = ["restart", "restart_python"]

_FRESH = 64  # words from SplitMix64
_REST = 624 - _FRESH
_LANES = 8  # words added to at once
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB

cgutils: Any = untyped_cgutils
randomimpl: Any = untyped_randomimpl
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _signature(key: Any, name: Literal["np", "py"]) -> Any:
    if key != types.uint64:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _write(context, builder, name, arguments[0])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


def _table() -> npt.NDArray[np.uint32]:
    words: npt.NDArray[np.uint32] = derive_keys(derive_key(_FRESH, _REST), np.arange(_REST // 2)).view(np.uint32)
    return words


def _write(context: Any, builder: Any, name: str, key: Any) -> None:
    """Fill {i32 index, [624 x i32] words, i32 has_gauss, double gauss, i32 is_initialized}: numba's layout."""
    state = randomimpl.get_state_ptr(context, builder, name)
    # At index 0 the words are used as they are. The twist follows after the last one.
    builder.store(ir.Constant(_I32, 0), cgutils.gep_inbounds(builder, state, 0, 0))
    builder.store(ir.Constant(_I32, 0), cgutils.gep_inbounds(builder, state, 0, 2))
    builder.store(ir.Constant(_I32, 1), cgutils.gep_inbounds(builder, state, 0, 4))
    pairs = builder.bitcast(cgutils.gep_inbounds(builder, state, 0, 1, 0), _I64.as_pointer())
    with cgutils.for_range(builder, ir.Constant(_I64, _FRESH // 2)) as loop:
        builder.store(_word(builder, key, loop.index), builder.gep(pairs, [loop.index], inbounds=True), align=4)
    added: Any = ir.Constant(ir.VectorType(_I64, _LANES // 2), ir.Undefined)
    for lane in range(_LANES // 2):
        word = _word(builder, key, ir.Constant(_I64, _FRESH // 2 + lane))
        added = builder.insert_element(added, word, ir.Constant(_I32, lane))
    vector = ir.VectorType(_I32, _LANES)
    added = builder.bitcast(added, vector)
    content = ir.Constant(ir.ArrayType(_I32, _REST), [int(word) for word in _table()])
    table = cgutils.global_constant(builder, "midepoch_words", content)
    first = cgutils.gep_inbounds(builder, state, 0, 1, _FRESH)
    with cgutils.for_range(builder, ir.Constant(_I64, _REST // _LANES)) as loop:
        place = builder.mul(loop.index, ir.Constant(_I64, _LANES))
        source = builder.bitcast(builder.gep(table, [ir.Constant(_I64, 0), place], inbounds=True), vector.as_pointer())
        target = builder.bitcast(builder.gep(first, [place], inbounds=True), vector.as_pointer())
        builder.store(builder.add(builder.load(source, align=4), added), target, align=4)


def _word(builder: Any, key: Any, number: Any) -> Any:
    """Word `number` of SplitMix64: ``mix(key + (number + 1) * gamma)``, as in `midepoch.order.keys`."""
    step = builder.mul(builder.add(number, ir.Constant(_I64, 1)), ir.Constant(_I64, _GAMMA))
    word = builder.add(key, step)
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2)):
        word = builder.xor(word, builder.lshr(word, ir.Constant(_I64, shift)))
        word = builder.mul(word, ir.Constant(_I64, multiplier))
    return builder.xor(word, builder.lshr(word, ir.Constant(_I64, 31)))


def _restart(typing_context: Any, key: Any) -> Any:
    """``restart(key)`` in compiled code: set this thread's ``np.random`` to the start of the stream of a uint64 key."""
    return _signature(key, "np")


def _restart_python(typing_context: Any, key: Any) -> Any:
    """``restart_python(key)`` in compiled code: the same for python's ``random``, which has its own state."""
    return _signature(key, "py")


restart: Any = intrinsic(_restart)
restart_python: Any = intrinsic(_restart_python)
