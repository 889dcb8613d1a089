"""A Loader's pipelines as a list of steps, each with its own random stream.

FFCV groups its operations into stages and generates a function for each stage. Here the operations are called one by
one, at the same cost, so that each can be treated by what it draws. An operation that draws for each sample runs in a
kernel that sets each sample's stream. One that mixes samples runs under the batch's stream. Torch modules draw from
the process's only generator, so they are deferred to the consumer's thread, where that generator can be borrowed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.adapters.ffcv import kernels
from midepoch.adapters.ffcv.private import Kind, kind_of, parts, requirements
from midepoch.errors import SourceError, UnsupportedSourceError

__all__ = ["Batch", "Damage", "Step", "StepGraph", "build_graph", "declare"]

_declared: dict[type, Kind] = {}


def declare(operation: type, draws: Literal["nothing", "sample", "batch"]) -> type:
    """Declare what an Operation of your own draws. Call it before you wrap a Loader that uses the operation.

    Args:
        operation: the class, a subclass of ``ffcv.pipeline.operation.Operation``.
        draws: "sample": random numbers for each sample separately. The operation is then called with one sample at a
            time, in arrays of length 1, and must return its input or its memory. "nothing": no random numbers.
            "batch": numbers for the whole batch, or it mixes samples. It then runs on one thread, and the loader
            cannot resume on another number of processes.

    Returns:
        `operation`, so that this can be used as a decorator.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    if not (isinstance(operation, type) and issubclass(operation, parts().Operation)):
        raise TypeError(f"declare takes a subclass of ffcv's Operation, got {operation!r}")
    kinds: dict[str, Kind] = {"nothing": "nothing", "sample": "sample", "batch": "mix"}
    if draws not in kinds:
        raise ValueError(f"draws must be one of {', '.join(map(repr, kinds))}, got {draws!r}")
    _declared[operation] = kinds[draws]
    return operation


@dataclass(slots=True)
class Batch:
    """One batch on its way through the steps.

    Attributes:
        indices: the samples' numbers in the file, uint64.
        keys: one 64-bit key for each sample, which seeds its streams.
        key: the same for the batch as a whole.
        first, stop: its positions in the epoch are `first` to `stop` - 1.
        storage: where FFCV's memory manager has put the file.
        values: the result of each step so far, by its node number.
    """

    indices: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint64]
    key: int
    first: int
    stop: int
    storage: Any
    values: dict[int, Any]


class Damage(Exception):  # noqa: N818  # it is turned into a SourceError that says where
    """A sample of the batch cannot be read."""

    def __init__(self, place: int, what: str) -> None:
        super().__init__(place, what)
        self.place, self.what = place, what


class Step(NamedTuple):
    """One operation of a pipeline.

    Attributes:
        node: its number in FFCV's graph.
        parent: the number of the step whose value it takes; None for a decoder.
        name: for messages.
        deferred: whether it runs in the consumer's thread.
        call: from (batch, value, memory, shared memory) to the step's value.
        allocation, shared: FFCV's requests for memory.
        start: initialises the shared memory before each batch, or None.
        scratch: the second part of its memory has a row for each thread, and is not used after the call.
    """

    node: int
    parent: int | None
    name: str
    deferred: bool
    call: Callable[[Batch, Any, Any, Any], Any]
    allocation: Any
    shared: Any
    start: Callable[[Any], Any] | None
    scratch: bool


class StepGraph(NamedTuple):
    """All steps, parents first, and the nodes whose values make up a batch."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


def kind_in_use(operation: Any) -> Kind:
    """What `operation` draws: as declared, or as known for FFCV's own."""
    return _declared.get(type(operation)) or kind_of(type(operation))


def draws(operation: Any) -> bool:
    """Whether `operation` may draw random numbers."""
    kind = kind_in_use(operation)
    if kind == "image":
        crops = hasattr(operation, "get_crop_generator")
        return crops and not isinstance(operation, parts().CenterCropRGBImageDecoder)
    return kind not in ("nothing", "bytes")


def chains(loader: Any) -> dict[str, list[Any]]:
    """The nodes of each output, from its decoder on, with references resolved."""
    found: dict[str, list[Any]] = {}
    for output, leaf in loader.graph.leaf_nodes.items():
        chain, node = [], leaf
        while node is not None:
            if not isinstance(node, parts().RefNode):
                chain.append(node)
            node = node.parent
        found[output] = chain[::-1]
    return found


def operation_of(node: Any) -> Any:
    """The Operation behind a node of FFCV's graph."""
    return node.decoder if isinstance(node, parts().DecoderNode) else node.operation


def build_graph(loader: Any, streams: bool, before: StepGraph | None = None) -> StepGraph:
    """Build the steps of `loader` in its current state.

    Args:
        loader: FFCV's.
        streams: whether random numbers come from streams. Otherwise everything runs in FFCV's way, in its thread.
        before: an earlier graph, whose compiled operations are kept; None compiles the current ones. They are asked
            again which memory they need, as for images that grow with the epochs.
    """
    allocations, functions = requirements(loader)
    if before is not None:
        memory = zip(before.steps, _memory_of(allocations, [step.node for step in before.steps]), strict=True)
        steps_now = tuple(step._replace(allocation=one, shared=two) for step, (one, two) in memory)
        return before._replace(steps=steps_now)
    steps: dict[int, Step] = {}
    started: set[int] = set()
    for output, chain in chains(loader).items():
        for place, node in enumerate(chain):
            if node.id in steps:
                continue
            operation = operation_of(node)
            path = f"{output}/{place}/{type(operation).__name__}"
            maker = _StepBuilder(loader, node, operation, functions["operation"][node.id], path)
            parent = chain[place - 1].id if place else None
            kind = kind_in_use(operation)
            apart = kind in ("module", "mix", "unknown", "sample") and not maker.jitted
            steps[node.id] = Step(
                node.id,
                parent,
                f"{type(operation).__name__} of {output!r}",
                streams and (apart or (parent is not None and steps[parent].deferred)),
                maker.call(kind, streams),
                *_memory_of(allocations, [node.id])[0],
                None if id(operation) in started else functions["shared"][node.id],
                kind == "image" and isinstance(allocations["operation"][node.id], tuple),
            )
            started.add(id(operation))
    return StepGraph(tuple(steps.values()), tuple(chain[-1].id for chain in chains(loader).values()))


def _memory_of(allocations: Any, nodes: list[int]) -> list[tuple[Any, Any]]:
    return [(allocations["operation"][node], allocations["shared"][node]) for node in nodes]


class _StepBuilder:
    """Makes the call of one step."""

    def __init__(self, loader: Any, node: Any, operation: Any, function: Any, path: str) -> None:
        self._loader, self._operation, self._function = loader, operation, function
        self._is_decoder = isinstance(node, parts().DecoderNode)
        self.jitted = self._is_decoder or node.is_jitted
        self._metadata = None
        if self._is_decoder:
            self._metadata = loader.reader.metadata[f"f{loader.graph.fieldname_to_fix[node.field_name]}"]
        self._with_indices = bool(getattr(function, "with_indices", False))
        self._parallel = bool(getattr(function, "is_parallel", False)) and loader.num_workers > 1
        self._salt = np.uint64(zlib.crc32(path.encode()))

    def call(self, kind: Kind, streams: bool) -> Callable[[Batch, Any, Any, Any], Any]:
        if kind == "image":
            return self._image()
        if not self.jitted:
            return self._transform(self._function)
        if streams and kind == "sample":
            return self._samplewise()
        if streams and kind in ("mix", "unknown"):
            return self._batchwise(known=type(self._operation) not in _declared and kind == "mix")
        kernel = kernels.compiled(self._function, self._parallel)
        if self._is_decoder:
            return self._decoder(kernel, clear=kind == "bytes")
        return self._transform(kernel)

    def _transform(self, function: Callable[..., Any]) -> Callable[[Batch, Any, Any, Any], Any]:
        if self._with_indices:
            return lambda batch, value, memory, shared: function(value, memory, batch.indices, *shared)
        return lambda batch, value, memory, shared: function(value, memory, *shared)

    def _decoder(self, kernel: Any, clear: bool) -> Callable[[Batch, Any, Any, Any], Any]:
        metadata = self._metadata

        def decode(batch: Batch, value: Any, memory: Any, shared: Any) -> Any:
            if clear:
                # Samples may be shorter than their row. Clear what an earlier batch left after them.
                memory.fill(0)
            return kernel(batch.indices, memory, metadata, batch.storage, *shared)

        return decode

    def _batchwise(self, known: bool) -> Callable[[Batch, Any, Any, Any], Any]:
        kernel, salt = kernels.batchwise(self._function, loops=known and self._parallel), int(self._salt)
        metadata, with_indices, is_decoder = self._metadata, self._with_indices, self._is_decoder

        def whole(batch: Batch, value: Any, memory: Any, shared: Any) -> Any:
            key = np.uint64(batch.key if known else batch.key ^ salt)
            if is_decoder:
                return kernel(key, batch.indices, memory, (metadata, batch.storage, *shared))
            if not with_indices:
                return kernel(key, value, memory, shared)
            # FFCV's mixups seed their generator with the last index. With the batch's key in its place, images and
            # labels still draw the same numbers, and each epoch draws different ones.
            indices = np.array([batch.key & 0xFFFFFFFF], dtype=np.uint64) if known else batch.indices
            return kernel(key, value, memory, (indices, *shared))

        return whole

    def _samplewise(self) -> Callable[[Batch, Any, Any, Any], Any]:
        operation, salt = self._operation, self._salt
        if self._is_decoder:
            raise UnsupportedSourceError(
                f"{type(operation).__name__} is a decoder and was declared to draw for each sample: derive it from "
                'ResizedCropRGBImageDecoder, or declare "batch"'
            )
        own = type(operation) in _declared
        kernel = kernels.samplewise(self._function, self._parallel, self._with_indices, python=own)

        def each(batch: Batch, value: Any, memory: Any, shared: Any) -> Any:
            places = np.empty(len(batch.keys), dtype=np.int64)
            kernel(batch.keys, salt, places, value, memory, batch.indices, shared)
            for buffer in (value, *(memory if isinstance(memory, tuple) else (memory,))):
                if buffer is not None and _is_at(places, buffer):
                    return buffer[: len(places)]
            raise SourceError(
                f"{type(operation).__name__} returned neither its input nor its memory: make it return one of them, or "
                'declare it as "batch"'
            )

        return each

    def _image(self) -> Callable[[Batch, Any, Any, Any], Any]:
        operation, private = self._operation, parts()
        crop = getattr(operation, "get_crop_generator", None)
        scale, ratio = (_as_array(getattr(operation, name, None)) for name in ("scale", "ratio"))
        metadata, jpeg = self._metadata, int(private.IMAGE_MODES["jpg"])
        assert metadata is not None  # an image's step is a decoder
        kernel = kernels.decoder(
            operation.memory_read,
            private.imdecode,
            private.resize_crop,
            private.memcpy,
            jpeg if bool((metadata["mode"] == jpeg).any()) else None,
            crop,
            scale,
            ratio,
            draws(operation),
            self._loader.num_workers > 1,
        )
        salt = self._salt

        def decode(batch: Batch, value: Any, memory: Any, shared: Any) -> Any:
            found = np.empty(len(batch.keys), dtype=np.int64)
            kernel(batch.keys, salt, found, batch.indices, memory, metadata, batch.storage)
            if found.any():
                place = int(found.nonzero()[0][0])
                raise Damage(place, kernels.DAMAGES[int(found[place])])
            images = memory if crop is None else memory[0]
            return images[: len(found)]

        return decode


def _as_array(value: Any) -> Any:
    return np.array(value, dtype=np.float64) if isinstance(value, tuple | list) else value


def _is_at(places: npt.NDArray[np.int64], buffer: Any) -> bool:
    """Whether sample i of `buffer` begins at ``places[i]``. Only the first and the last are checked."""
    first = buffer.__array_interface__["data"][0]
    return bool(places[0] == first and places[-1] == first + (len(places) - 1) * buffer.strides[0])
