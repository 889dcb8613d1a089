"""A DALI pipeline's graph: its operators, and what a state depends on."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvidia.dali import Pipeline
from nvidia.dali import backend as dali_backend

from midepoch.adapters.dali import private
from midepoch.adapters.dali.wire import Field, unpack

__all__ = ["Graph", "Operator", "build", "cure_with_our_reader", "identity", "settings_of"]

# Field numbers of PipelineDef, OpDef and Argument.
_PIPELINE_OPERATORS, _PIPELINE_OUTPUTS = 5, 7
_SCHEMA, _INPUTS, _OUTPUTS, _ARGUMENTS, _NAME = 1, 2, 3, 4, 5
_ARGUMENT_NAME, _INTEGER, _TEXT, _BOOLEAN, _ELEMENTS = 1, 4, 5, 6, 7

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
        return next((field.value for field in self.arguments.get(name, ()) if field.number == _INTEGER), default)

    def flag(self, name: str) -> bool:
        """A boolean argument, False by default."""
        return any(field.value for field in self.arguments.get(name, ()) if field.number == _BOOLEAN)

    def texts(self, name: str) -> list[str]:
        """A string argument, or the elements of a list of strings."""
        found = self.arguments.get(name, ())
        own = [field.text for field in found if field.number == _TEXT]
        inner = [unpack(field.value) for field in found if field.number == _ELEMENTS]
        return own + [field.text for element in inner for field in element if field.number == _TEXT]

    @property
    def shard(self) -> tuple[int, int]:
        """A reader's number of shards, and the shard that it reads."""
        return self.integer("num_shards", 1), self.integer("shard_id", 0)

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

    def described(self) -> list[Any]:
        """What results depend on, except the data that the operator reads."""
        wires = [(field.number, field.value) for field in self.fields if field.number in (_INPUTS, _OUTPUTS)]
        hidden = _IMMATERIAL | _PATHS if self.is_reader else _IMMATERIAL
        kept = sorted((name, tuple(fields)) for name, fields in self.arguments.items() if name not in hidden)
        return [self.schema, wires, kept]


class Graph:
    """A pipeline's graph, from the result of `Pipeline.serialize`.

    Attributes:
        operators: its nodes.
        readers: the nodes that read a data set by themselves.
    """

    def __init__(self, serialized: bytes) -> None:
        self.serialized = serialized
        self._fields = unpack(serialized)
        self.operators = [_operator(field.value) for field in self._fields if field.number == _PIPELINE_OPERATORS]
        self.readers = [operator for operator in self.operators if operator.is_reader]

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits: a hash of all that results depend on, except the data and the shard."""
        described = [operator.described() for operator in self.operators]
        outputs = [field.value for field in self._fields if field.number == _PIPELINE_OUTPUTS]
        return hashlib.blake2b(repr((described, outputs)).encode(), digest_size=8).hexdigest()

    @property
    def pieces(self) -> str:
        """Each kind of operator with a short hash of the settings of all of its kind; empty if there are too many."""
        kinds: dict[str, list[str]] = {}
        for operator in self.operators:
            schema, _, arguments = operator.described()
            kinds.setdefault(schema.replace("__", ".").lstrip("_."), []).append(repr(arguments))
        told = [f"{kind}={_short(repr(sorted(each)))}" for kind, each in sorted(kinds.items())]
        return " ".join(told) if len(told) <= _MOST_KINDS else ""


def _short(text: str) -> str:
    """A hash of six hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def _operator(message: bytes) -> Operator:
    fields = unpack(message)
    arguments = {}
    for field in fields:
        if field.number == _ARGUMENTS:
            inner = unpack(field.value)
            arguments[next(each.text for each in inner if each.number == _ARGUMENT_NAME)] = inner
    named = {field.number: field.text for field in fields if field.number in (_SCHEMA, _NAME)}
    return Operator(named.get(_SCHEMA, ""), named.get(_NAME, ""), arguments, tuple(fields))


# --- the data of a reader ---------------------------------------------------------------------------------------------


def identity(reader: Operator, size: int) -> str:
    """The number of samples, and a CRC of the list of files that a reader reads, as eight hexadecimal digits.

    A folder or file is identified by its own name and content, not by its location; an explicit list by its text.
    """
    crc = 0
    for name in sorted(_PATHS & reader.arguments.keys()):
        if name in ("files", "filenames", "labels"):
            crc = zlib.crc32(repr(reader.arguments[name]).encode(), crc)
            continue
        for path in reader.texts(name):
            for line in _content(Path(path)):
                crc = zlib.crc32(line, crc)
    return f"{size} samples:{crc:08x}"


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
