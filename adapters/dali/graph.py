"""A DALI pipeline's graph: its operators, what a state depends on, and the same graph on another shard."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvidia.dali import Pipeline
from nvidia.dali import backend as dali_backend

from midepoch.adapters.dali import private
from midepoch.adapters.dali.wire import Field, pack, unpack

__all__ = [
    "Graph", "Operator", "build", "crc_of_data", "cure_with_our_reader", "identity", "material", "settings_of", "short",
]  # fmt: skip

# Field numbers of PipelineDef, OpDef and Argument.
_PIPELINE_OPERATORS, _PIPELINE_OUTPUTS = 5, 7
_SCHEMA, _INPUTS, _OUTPUTS, _ARGUMENTS, _NAME = 1, 2, 3, 4, 5
_WIRE_NAME = 1
_ARGUMENT_NAME, _ARGUMENT_TYPE, _INTEGER, _TEXT, _BOOLEAN, _ELEMENTS, _IS_VECTOR = 1, 2, 4, 5, 6, 7, 8

# Where the graph was defined, how fast it runs, and which part of the data it reads. A state depends on none of these.
_IMMATERIAL = {
    "_display_name", "_module", "_origin_stack_filename", "_origin_stack_line", "_origin_stack_lineno",
    "_origin_stack_name", "bytes_per_sample_hint", "cache_header_information", "checkpointing", "device_memory_padding",
    "device_memory_padding_jpeg2k", "dont_use_mmap", "host_memory_padding", "host_memory_padding_jpeg2k",
    "hw_decoder_load", "lazy_init", "memory_stats", "no_copy", "num_shards", "prefetch_queue_depth", "preserve",
    "preserve_name", "read_ahead", "register_buffers", "seed", "shard_id", "tensor_init_bytes", "use_o_direct",
}  # fmt: skip
# A reader's paths. They are compared by content, not by text.
_PATHS = {
    "annotations_file", "db_folder", "file_list", "file_root", "filenames", "files", "index_path", "index_paths",
    "labels", "manifest_filepaths", "meta_files_path", "path", "paths",
}  # fmt: skip
_MOST_KINDS = 60  # of operators that a state names, some 30 bytes each
_LARGEST_LIST = 16 << 20  # bytes; larger files are compared by size, not by content


@dataclass(frozen=True)
class Operator:
    """One node of a graph."""

    schema: str
    name: str
    arguments: dict[str, list[Field]]
    fields: tuple[Field, ...]

    def integer(self, name: str, default: int) -> int:
        """An integer argument."""
        return next((field.integer for field in self.arguments.get(name, ()) if field.number == _INTEGER), default)

    def flag(self, name: str) -> bool:
        """A boolean argument, False by default."""
        return any(field.integer for field in self.arguments.get(name, ()) if field.number == _BOOLEAN)

    def texts(self, name: str) -> list[str]:
        """A string argument, or the elements of a list of strings."""
        found = self.arguments.get(name, ())
        own = [field.text for field in found if field.number == _TEXT]
        inner = [unpack(field.data) for field in found if field.number == _ELEMENTS]
        return own + [field.text for element in inner for field in element if field.number == _TEXT]

    @property
    def is_reader(self) -> bool:
        """Whether it reads a data set by itself, in its own order."""
        schema = dali_backend.TryGetSchema(self.schema)
        return schema is not None and schema.HasArgument("num_shards")

    @property
    def is_random(self) -> bool:
        """Whether it draws from a random generator of its own."""
        schema = dali_backend.TryGetSchema(self.schema)
        return schema is not None and schema.HasRandomStateArg()

    @property
    def has_callback(self) -> bool:
        """Whether it calls python, which a serialized graph cannot hold."""
        return private.calls_python(self.schema)

    def wires(self, number: int) -> list[tuple[str, list[Field]]]:
        """The names of its inputs or outputs, each with its other properties."""
        found = []
        for wire in (unpack(field.data) for field in self.fields if field.number == number):
            name = next((each.text for each in wire if each.number == _WIRE_NAME), "")
            found.append((name, [each for each in wire if each.number != _WIRE_NAME]))
        return found

    def described(self) -> list[Any]:
        """What results depend on, except the data that the operator reads."""
        wires = [(field.number, field.data) for field in self.fields if field.number in (_INPUTS, _OUTPUTS)]
        kept = material(self.arguments, self.is_reader)
        return [self.schema, wires, [(name, tuple(fields)) for name, fields in kept]]


def material(arguments: Mapping[str, Any], is_reader: bool) -> list[tuple[str, Any]]:
    """The arguments of an operator that results depend on, in order, without the paths of a reader's data."""
    hidden = _IMMATERIAL | _PATHS if is_reader else _IMMATERIAL
    return sorted((name, value) for name, value in arguments.items() if name not in hidden)


class Graph:
    """A pipeline's graph, from the result of `Pipeline.serialize`.

    Attributes:
        operators: its nodes.
        readers: the nodes that read a data set by themselves.
    """

    def __init__(self, serialized: bytes) -> None:
        self.serialized = serialized
        self._fields = unpack(serialized)
        self.operators = [_operator(field.data) for field in self._fields if field.number == _PIPELINE_OPERATORS]
        self.readers = [operator for operator in self.operators if operator.is_reader]

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits: a hash of all that results depend on, except the data and the shard."""
        described = [operator.described() for operator in self.operators]
        outputs = [field.data for field in self._fields if field.number == _PIPELINE_OUTPUTS]
        return hashlib.blake2b(repr((described, outputs)).encode(), digest_size=8).hexdigest()

    @property
    def pieces(self) -> str:
        """The operators, each kind with a short hash of the settings and inputs of all of its kind.

        An input is told by what it comes from. Empty if there are too many kinds.
        """
        kinds: dict[str, list[str]] = {}
        come_from: dict[str, str] = {}
        for operator in self.operators:
            schema, _, arguments = operator.described()
            inputs = [(come_from.get(name, ""), rest) for name, rest in operator.wires(_INPUTS)]
            come_from |= {name: schema for name, _ in operator.wires(_OUTPUTS)}
            kinds.setdefault(schema.replace("__", ".").lstrip("_."), []).append(repr((inputs, arguments)))
        told = [f"{kind}={short(repr(sorted(each)))}" for kind, each in sorted(kinds.items())]
        return " ".join(told) if len(told) <= _MOST_KINDS else ""

    def on_shard(self, shard: int, shards: int) -> bytes:
        """The serialized graph with every reader on this shard."""
        fields = []
        for field in self._fields:
            if field.number == _PIPELINE_OPERATORS and _operator(field.data).is_reader:
                fields.append(Field.of(field.number, _with_integers(field.data, num_shards=shards, shard_id=shard)))
            else:
                fields.append(field)
        return pack(fields)


def short(text: str) -> str:
    """A hash of six hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def _operator(message: bytes) -> Operator:
    fields = unpack(message)
    arguments = {}
    for field in fields:
        if field.number == _ARGUMENTS:
            inner = unpack(field.data)
            arguments[next(each.text for each in inner if each.number == _ARGUMENT_NAME)] = inner
    named = {field.number: field.text for field in fields if field.number in (_SCHEMA, _NAME)}
    return Operator(named.get(_SCHEMA, ""), named.get(_NAME, ""), arguments, tuple(fields))


def _with_integers(message: bytes, **integers: int) -> bytes:
    def is_replaced(field: Field) -> bool:
        return field.number == _ARGUMENTS and any(
            each.number == _ARGUMENT_NAME and each.text in integers for each in unpack(field.data)
        )

    fields = [field for field in unpack(message) if not is_replaced(field)]
    for name, value in integers.items():
        argument = [
            Field.of(_ARGUMENT_NAME, name), Field.of(_ARGUMENT_TYPE, "int64"), Field.of(_INTEGER, value),
            Field.of(_IS_VECTOR, 0),
        ]  # fmt: skip
        fields.append(Field.of(_ARGUMENTS, pack(argument)))
    return pack(fields)


# --- the data of a reader ---------------------------------------------------------------------------------------------


def identity(reader: Operator, size: int) -> str:
    """The number of samples, and a CRC of the list of files that a reader reads, as eight hexadecimal digits.

    A folder or file is identified by its own name and content, not by its location; an explicit list by its text.
    """
    return f"{size} samples:{crc_of_data(reader.arguments, reader.texts):08x}"


def crc_of_data(arguments: Mapping[str, Any], texts: Callable[[str], Sequence[str]]) -> int:
    """A CRC of the files that a reader reads. `texts`: from an argument's name to the paths in it."""
    crc = 0
    for name in sorted(_PATHS & arguments.keys()):
        if name in ("files", "filenames", "labels"):
            crc = zlib.crc32(repr(arguments[name]).encode(), crc)
            continue
        for path in texts(name):
            for line in _content(Path(path)):
                crc = zlib.crc32(line, crc)
    return crc


def _content(path: Path) -> Iterator[bytes]:
    yield os.fsencode(path.name)
    if path.is_dir():
        root = os.fsencode(path)
        for folder, folders, names in os.walk(root, followlinks=True):
            folders.sort()
            yield b"\n".join([folder.removeprefix(root), *sorted(names)])  # at once: there may be a million
    elif path.is_file():
        size = path.stat().st_size
        yield b"%d" % size
        if size <= _LARGEST_LIST and path.suffix.lower() in (".txt", ".lst", ".json", ".idx", ".csv", ".tsv", ""):
            yield path.read_bytes()


# --- another reader ---------------------------------------------------------------------------------------------------

_OURS = {
    "FileReader": "file", "readers.File": "file", "NumpyReader": "numpy", "readers.Numpy": "numpy",
    "readers.Webdataset": "webdataset",
}  # fmt: skip


def cure_with_our_reader(graph: Graph) -> str:
    """What to change in a pipeline so that midepoch feeds it, for a message; empty if there is no such reader."""
    ours = [_OURS.get(reader.schema.replace("__", ".")) for reader in graph.readers]
    if len(ours) != 1 or ours[0] is None:
        return ""
    return (
        f", or let midepoch feed it, which any number of processes can continue: dali.readers.{ours[0]}(...) of "
        f"midepoch.adapters in place of fn.readers.{ours[0]}(...), dali.random in place of fn.random, and no "
        "reader_name="
    )


# --- building --------------------------------------------------------------------------------------------------------


def settings_of(pipeline: Any) -> dict[str, Any]:
    """The keyword arguments for a `Pipeline` like this one."""
    return {
        "batch_size": pipeline.max_batch_size,
        "num_threads": pipeline.num_threads,
        "device_id": pipeline.device_id,
        "seed": pipeline.seed,
        "prefetch_queue_depth": pipeline.prefetch_queue_depth,
        "exec_pipelined": pipeline.exec_pipelined,
        "exec_async": pipeline.exec_async,
        "exec_dynamic": pipeline.exec_dynamic,
        "set_affinity": pipeline.set_affinity,
        "enable_memory_stats": pipeline.enable_memory_stats,
    }


def build(serialized: bytes, checkpoint: bytes | None, settings: dict[str, Any]) -> Any:
    """Build a pipeline from this graph, with checkpoints enabled, and restore it from one if given."""
    # Pipeline.deserialize(..., checkpoint=...) silently ignores the checkpoint.
    pipeline = Pipeline(enable_checkpointing=True, checkpoint=checkpoint, **settings)
    pipeline.deserialize_and_build(serialized)
    return pipeline
