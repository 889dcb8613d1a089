"""Compiled code, shared: one kernel for all Loaders whose operations have the same code.

Compiling takes seconds for each operation, and FFCV compiles again for each Loader. Here compiled code is cached. The
key consists of the bytecode, the values it encloses, the module-level values it names, and the compiler's options. So a
second Loader with the same pipeline starts at once, and one with ``recompile=True`` compiles only what has changed.

Nothing is compiled with ``fastmath``, which FFCV uses. It lets the compiler round differently in the single-threaded
and multi-threaded variants, but a pixel must not depend on the number of workers.
"""

from __future__ import annotations

import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import prange
from numba.extending import is_jitted, overload
from numba.np.ufunc.parallel import get_thread_id

from midepoch.adapters.ffcv.random_streams import restart, restart_python

__all__ = ["DAMAGES", "batchwise", "compiled", "decoder", "identity", "samplewise"]

_MOST_KEPT = 256
_GAMMA = np.uint64(0x9E3779B97F4A7C15)

_kept: OrderedDict[Any, Any] = OrderedDict()
_lock = threading.Lock()


# --- cache of kernels -----------------------------------------------------------------------------------------------


class _ByIdentity:
    """Wraps an object, compares by identity, and keeps the object alive."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def identity(value: Any, _inside: tuple[types.FunctionType, ...] = ()) -> Any:
    """A hashable key. It is equal for two values only if compiled code cannot distinguish them."""
    if isinstance(value, types.FunctionType):
        return _function_identity(value, _inside)
    if is_jitted(value):
        return "jitted", repr(sorted(value.targetoptions.items())), identity(value.py_func, _inside)
    if isinstance(value, tuple):
        return tuple(identity(part, _inside) for part in value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return "array", value.dtype.str, value.shape, value.flags.c_contiguous, value.tobytes()
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return type(value), repr(value)
    return _ByIdentity(value)


def _function_identity(function: types.FunctionType, inside: tuple[types.FunctionType, ...]) -> Any:
    if function in inside:
        return "recursive", inside.index(function)
    code, inside = function.__code__, (*inside, function)
    named = {name: function.__globals__[name] for name in sorted(_names(code)) if name in function.__globals__}
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]

    def known(value: Any) -> Any:
        if not isinstance(value, types.ModuleType) or value.__name__.partition(".")[0] in _UNCHANGING:
            return identity(value, inside)
        # Attributes of modules are compiled in with their current value.
        taken = {name: vars(value)[name] for name in sorted(_names(code)) if name in vars(value)}
        return "module", value.__name__, tuple((name, identity(each, inside)) for name, each in taken.items())

    return (
        code,
        tuple(known(value) for value in enclosed),
        tuple((name, known(value)) for name, value in named.items()),
        identity(function.__defaults__, inside),
    )


_UNCHANGING = {"numpy", "math", "numba", "ffcv", "torch", "ctypes"}
"""Modules whose content is known and does not change."""


def _names(code: types.CodeType) -> set[str]:
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _shared(key: Any, make: Callable[[], Any]) -> Any:
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
        while len(_kept) >= _MOST_KEPT:
            _kept.popitem(last=False)
        return _kept.setdefault(key, make())


def _jit(function: Callable[..., Any], parallel: Any = False) -> Any:
    return numba.njit(nogil=True, error_model="numpy", parallel=parallel)(function)


# --- kernels --------------------------------------------------------------------------------------------------------


def compiled(function: types.FunctionType, parallel: bool) -> Any:
    """`function` itself, for an operation that draws nothing."""
    return _shared(("compiled", identity(function), parallel), lambda: _jit(function, parallel))


def batchwise(function: types.FunctionType, loops: bool) -> Any:
    """An operation on a whole batch, under one random stream: ``kernel(key, inputs, memory, more)``.

    It returns what `function` returns. With `loops`, the threads share its loops. The loops must not draw, and outside
    of them it may use only ``np.random.seed`` and ``np.random.beta``, as FFCV's mixups do.
    """

    def make() -> Any:
        inner = _jit(_drawing_on_one_thread(function), True) if loops else _jit(function)

        def kernel(key: Any, inputs: Any, memory: Any, more: Any) -> Any:
            restart(key)
            restart_python(key)
            return inner(inputs, memory, *more)

        return _jit(kernel)

    return _shared(("batchwise", identity(function), loops), make)


def _drawing_on_one_thread(function: types.FunctionType) -> types.FunctionType:
    """Copy `function` with another ``np``. Otherwise threads would share the draw of an array, each from its own state.

    The new functions are not numpy's, so numba does not parallelise them.
    """
    numpy, random = types.ModuleType("midepoch_numpy"), types.ModuleType("midepoch_numpy.random")
    numpy.random, random.seed, random.beta = random, _seed, _beta  # type: ignore[attr-defined]
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, "np": numpy},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


@_jit
def _seed(seed: Any) -> None:
    np.random.seed(seed)


def _beta(a: Any, b: Any, size: Any = None) -> Any:
    raise NotImplementedError("compiled code only")


@overload(_beta, strict=False)
def _compile_beta(a: Any, b: Any, size: Any = None) -> Any:
    if isinstance(size, numba.types.Integer):
        return lambda a, b, size=None: np.random.beta(a, b, size)
    return lambda a, b, size=None: np.random.beta(a, b)


def samplewise(function: types.FunctionType, parallel: bool, with_indices: bool, python: bool) -> Any:
    """An operation called for one sample at a time: ``kernel(keys, salt, places, inputs, memory, indices, more)``.

    `keys`, `places` and `indices` have one number for each sample. The kernel writes the address of each sample's
    result to `places`. With `python`, python's ``random`` gets a stream too.
    """

    def make() -> Any:
        inner = _jit(function)

        def kernel(keys: Any, salt: Any, places: Any, inputs: Any, memory: Any, indices: Any, more: Any) -> None:
            for i in prange(keys.shape[0]):
                key = _salted(keys[i], salt)
                restart(key)
                if python:
                    restart_python(key)
                if with_indices:
                    result = inner(inputs[i : i + 1], _rows(memory, i), indices[i : i + 1], *more)
                else:
                    result = inner(inputs[i : i + 1], _rows(memory, i), *more)
                places[i] = result.ctypes.data

        return _jit(kernel, parallel)

    return _shared(("samplewise", identity(function), parallel, with_indices, python), make)


@_jit
def _salted(key: Any, salt: Any) -> Any:
    word = key ^ (salt * _GAMMA)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def _rows(memory: Any, i: Any) -> Any:
    """One sample's part of an operation's memory, which may be None, an array, or a tuple of arrays."""
    raise NotImplementedError("compiled code only")


@overload(_rows, strict=False)
def _compile_rows(memory: Any, i: Any) -> Any:
    if isinstance(memory, numba.types.NoneType):
        return lambda memory, i: None
    if isinstance(memory, numba.types.Array):
        return lambda memory, i: memory[i : i + 1]
    if isinstance(memory, numba.types.BaseTuple) and len(memory) == 1:
        return lambda memory, i: (memory[0][i : i + 1],)
    if isinstance(memory, numba.types.BaseTuple) and len(memory) == 2:
        return lambda memory, i: (memory[0][i : i + 1], memory[1][i : i + 1])
    if isinstance(memory, numba.types.BaseTuple) and len(memory) == 3:
        return lambda memory, i: (memory[0][i : i + 1], memory[1][i : i + 1], memory[2][i : i + 1])
    return None


# --- images ---------------------------------------------------------------------------------------------------------


def decoder(
    read: Any,
    decode_jpeg: Any,
    resize: Any,
    copy: Any,
    jpeg: int | None,
    crop: Any,
    scale: Any,
    ratio: Any,
    draws: bool,
    parallel: bool,
) -> Any:
    """FFCV's image decoder, with checks that FFCV leaves out.

    ``kernel(keys, salt, found, indices, memory, metadata, storage)``. `found` gets one number for each sample: 0 for a
    sound image, otherwise a key of `DAMAGES`.

    Args:
        read, decode_jpeg, resize, copy: FFCV's own.
        jpeg: FFCV's number for the mode of a compressed image; None if the file has no such image. Even unused code
            would cost 50 ns an image, as much as the check of its size.
        crop: FFCV's function from (height, width, scale, ratio) to a part of the image; None for the whole image.
        scale, ratio: arguments of `crop`.
        draws: whether `crop` draws random numbers.
        parallel: whether the threads share the samples.
    """

    def make() -> Any:
        decodes, resizes, copies, sized = _jit(decode_jpeg), _jit(resize), _jit(copy), _jit(_has_size)

        # numba drops branches behind a condition that is False at compile time.
        compressed, mode = jpeg is not None, jpeg or 0
        numbered = parallel and compressed and crop is not None  # each thread has its own buffer to decode into

        if crop is None:

            @_jit
            def decode(field: Any, data: Any, memory: Any, i: Any, thread: Any) -> Any:
                target = memory[i]
                if compressed:  # noqa: SIM102  # numba prunes this branch as a whole
                    if field["mode"] == mode:
                        height, width = field["height"], field["width"]
                        if not sized(data, height, width):
                            return 3
                        failed = decodes(data, target, height, width, height, width, 0, 0, 1, 1, False, False) != 0
                        return 1 if failed else 0
                if data.size != target.size:
                    return 2
                copies(data, target)
                return 0
        else:
            crops = _jit(crop)

            @_jit
            def decode(field: Any, data: Any, memory: Any, i: Any, thread: Any) -> Any:
                height, width = np.int64(field["height"]), np.int64(field["width"])
                size = 3 * height * width
                image = data
                if compressed:  # noqa: SIM102  # numba prunes this branch as a whole
                    if field["mode"] == mode:
                        if not sized(data, height, width):
                            return 3
                        space = memory[1][thread]
                        if decodes(data, space, height, width, height, width, 0, 0, 1, 1, False, False) != 0:
                            return 1
                        image = space[:size]
                if image.size != size:
                    return 2
                top, left, rows, columns = crops(height, width, scale, ratio)
                resizes(image.reshape(height, width, 3), top, top + rows, left, left + columns, memory[0][i])
                return 0

        def kernel(keys: Any, salt: Any, found: Any, indices: Any, memory: Any, metadata: Any, storage: Any) -> None:
            for i in prange(keys.shape[0]):
                if draws:
                    restart(_salted(keys[i], salt))
                field = metadata[indices[i]]
                thread = get_thread_id() if numbered else 0  # type: ignore[no-untyped-call]
                found[i] = decode(field, read(field["data_ptr"], storage), memory, i, thread)

        return _jit(kernel, parallel)

    parts = (read, decode_jpeg, resize, copy, jpeg, crop, scale, ratio, draws)
    return _shared(("decoder", identity(parts), parallel), make)


def _has_size(data: Any, height: Any, width: Any) -> bool:
    """Whether a JPEG's frame header has this size. A smaller image would leave old bytes around it.

    The markers are those of ITU-T T.81, annex B. The decoder reports a missing frame header.
    """
    place = np.int64(2)
    while place + 9 <= data.size and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF or marker == 0x01 or 0xD0 <= marker <= 0xD8:
            place += 1 if marker == 0xFF else 2
        elif 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
            rows = np.int64(data[place + 5]) * 256 + np.int64(data[place + 6])
            columns = np.int64(data[place + 7]) * 256 + np.int64(data[place + 8])
            return bool(rows == np.int64(height) and columns == np.int64(width))
        else:
            place += 2 + np.int64(data[place + 2]) * 256 + np.int64(data[place + 3])
    return True


DAMAGES = {
    1: "its JPEG data is damaged",
    2: "its data has another length than its height and width say",
    3: "its JPEG data has another height or width than the file says",
}
