"""What a job tries of a user's code, once, on a copy of it: whether it gives the same when it is called again.

A process that resumes has not seen what came before. So whatever an object keeps from one call to the next (the batch
before, a count of its passes) makes a resumed run another one. The copy is made by pickling, since a deep copy has no
bound; what cannot be pickled is not tried, and the promise that rests on it is believed.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .randomness.streams import Streams
from .state.witness import SampleSummary, summary_of

__all__ = ["LARGEST_COPY", "CallTrial", "Copied", "Finding", "copy_of", "tried_on_copy"]

LARGEST_COPY = 64 << 20
"""Bytes. A larger object is not copied."""

_OF_CALLS = (
    "let it keep nothing from one batch to the next, and draw its numbers from python's, numpy's or torch's "
    "generators, or from midepoch.sample_generator()"
)
_OF_LOADS = (
    "what it reads again has other numbers than when it was saved; put the samples themselves into the state, or make "
    "their numbers a function of their index"
)
_MOST_SAMPLES = 8  # that a collate function is tried with


@dataclass(frozen=True)
class Finding:
    """What a trial, or reading, has shown of a source: `Adapter.note` takes it over.

    Attributes:
        differs: how the source breaks a promise, in a sentence; empty if it does not.
        order: it gives, or may give, other samples, not only other numbers.
        cure: what to write instead. With it, the user is warned.
        untried: why a promise is believed, in a sentence; empty if it was tried.
        unseen: names of types whose content could not be compared.
    """

    differs: str = ""
    order: bool = False
    cure: str = ""
    untried: str = ""
    unseen: tuple[str, ...] = ()

    @classmethod
    def of_load(cls, keeper: object) -> Finding:
        """Of a source whose `load_state_dict` draws."""
        return cls(f"load_state_dict of this {type(keeper).__name__} draws random numbers", cure=_OF_LOADS)

    def of_calls(self, what: str, argument: str) -> Finding:
        """The same in sentences, with a cure: of `what`, called twice for `argument`."""
        differs = f"two calls of {what} for {argument} differ in {self.differs}" if self.differs else ""
        untried = f"{what} was not tried: {self.untried}" if self.untried else ""
        return replace(self, differs=differs, untried=untried, cure=_OF_CALLS)


@dataclass(frozen=True)
class Copied:
    """An object as it was when `copy_of` copied it.

    Attributes:
        data: its pickle.
        why: there is none; otherwise empty.
        shared: what it shares with the original.
    """

    data: bytes = b""
    why: str = ""
    shared: tuple[Any, ...] = ()

    def open(self) -> Any:
        """A new object, which shares what has a name in a module besides: functions, and attributes of classes."""
        return _Unpickler(self.data, self.shared).load()


def copy_of(value: Any, shares: type | None = None) -> Copied:
    """A copy of an object, or why there is none. It shares objects of the type `shares`."""
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return Copied(why="a function cannot be copied")
    sink = _Sink()
    pickler = _Pickler(sink, value, shares or ())
    try:
        pickler.dump(value)
    except _TooLargeError:
        return Copied(why=f"it holds more than {LARGEST_COPY >> 20} MB")
    except Exception as error:  # noqa: BLE001  # of the user's code, too
        return Copied(why=f"it cannot be pickled ({type(error).__name__}: {error!s:.100})")
    return Copied(sink.getvalue(), shared=tuple(pickler.shared))


class _TooLargeError(Exception):
    pass


def _check(size: int) -> None:
    if size > LARGEST_COPY:
        raise _TooLargeError


class _Sink(io.BytesIO):
    def write(self, data: Any) -> int:
        _check(self.tell() + memoryview(data).nbytes)
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Refuses a large array before it is turned into bytes, and leaves out what a copy is to share."""

    def __init__(self, sink: io.BytesIO, whole: Any, shares: type | tuple[()]) -> None:
        super().__init__(sink, protocol=5)
        self._whole, self._shares = whole, shares
        self.shared: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            _check(value.untyped_storage().nbytes())  # of a view, too, all of it is pickled
        elif isinstance(value, np.ndarray):
            _check(value.nbytes)
        return NotImplemented

    def persistent_id(self, value: Any) -> int | None:
        if value is self._whole or not isinstance(value, self._shares):
            return None
        self.shared.append(value)
        return len(self.shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, shared: tuple[Any, ...]) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = shared

    def persistent_load(self, number: int) -> Any:
        return self._shared[number]


def tried_on_copy(
    value: Any,
    call: Callable[[Any], Any],
    key: int,
    *,
    first: SampleSummary | None = None,
    rereads: bool = True,
    devices: bool = False,
) -> Finding:
    """Call a function of one copy twice, under the same random streams, and compare what it returns.

    Args:
        value: the object, or what `copy_of` made of it before it was used.
        call: is given the copy.
        key: of the random stream of each call.
        first: what the first call is to return; None to call twice.
        rereads: generators that the first call makes are seeded, too, as by a reader that can read a batch again. If
            not, each call is a pass.
        devices: the code may draw from the generators of devices, too.
    """
    copied = value if isinstance(value, Copied) else copy_of(value)
    if copied.why:
        return Finding(untried=copied.why)
    try:
        with warnings.catch_warnings(action="ignore"):  # the original has its own
            copy = copied.open()
            streams = Streams(copy, devices=devices)
            streams.begin_pass()
            one = _looked(streams, call, copy, key) if first is None else first
            if not rereads:
                streams.begin_pass()  # which may find others: some objects make a new generator in each pass
            other = _looked(streams, call, copy, key)
            if rereads and first is None and streams.made_late():
                one, other = _looked(streams, call, copy, key), _looked(streams, call, copy, key)
    except Exception as error:  # noqa: BLE001  # the original has been called without
        return Finding(untried=f"a copy of it raised {type(error).__name__}: {error!s:.200}")
    if one.parts and not any(part.size for part in one.parts):
        return Finding(untried=f"what it returns cannot be seen: {', '.join(one.unseen)}", unseen=one.unseen)
    differing = one.differing(other)
    if not differing:
        return Finding(unseen=one.unseen)
    return Finding(one.names(differing), one.holds_most(differing), unseen=one.unseen)


def _looked(streams: Streams, call: Callable[[Any], Any], copy: Any, key: int) -> SampleSummary:
    with streams as start:
        start(key)
        return summary_of(call(copy))


class CallTrial:
    """Tries a function of the user's with the first argument that it gets. Made before the function is called.

    Args:
        function: the user's.
        listed: its argument is a list of samples, of which some are enough.
        devices: it may draw from the generators of devices, too.
    """

    def __init__(self, function: Callable[[Any], Any], listed: bool = False, devices: bool = False) -> None:
        self._function, self._listed, self._devices = function, listed, devices
        self._copied, self._argument = copy_of(function), Copied()

    def __call__(self, argument: Any) -> Any:
        """What the function itself returns."""
        self.keep(argument)
        return self._function(argument)

    def keep(self, argument: Any) -> None:
        """Keep a copy of the argument, before the function may change it in place."""
        if not self._copied.why:
            self._argument = copy_of(argument[:_MOST_SAMPLES] if self._listed and type(argument) is list else argument)

    def finding(self, key: int) -> Finding:
        """Call a copy of the function for the argument, for another one of the same form, and for both again."""
        if self._argument.why:
            return Finding(untried=f"of its argument, {self._argument.why}")

        def call(function: Callable[[Any], Any]) -> Any:
            result = function(self._argument.open())
            with contextlib.suppress(Exception):  # it stands in for a batch, and need not be a good one
                another = self._argument.open()
                function(another[::-1] if self._listed else _with_rows_reversed(another))
            return result

        return tried_on_copy(self._copied, call, key, devices=self._devices)


def _with_rows_reversed(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.flip(0)
    if isinstance(batch, np.ndarray):
        return batch[::-1].copy()
    if type(batch) in (list, tuple):
        return type(batch)(map(_with_rows_reversed, batch))
    if type(batch) is dict:
        return {key: _with_rows_reversed(value) for key, value in batch.items()}
    return batch
