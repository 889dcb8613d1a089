"""The parts of DALI that midepoch uses and DALI does not promise. They are checked on import.

DALI has no interface for three things midepoch needs: an iterator over other pipelines, restoring a pipeline after it
was built, and the graph of a pipeline with Python functions in it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from nvidia.dali import Pipeline, types
from nvidia.dali import backend as dali_backend
from nvidia.dali.plugin.pytorch import DALIGenericIterator, DALIRaggedIterator

from midepoch.attributes import directly_held
from midepoch.errors import UnsupportedSourceError
from midepoch.packages import Package, Replacement

__all__ = [
    "DynamicState",
    "TakenOver",
    "add_thread",
    "allow_empty",
    "calls_python",
    "check",
    "check_unused",
    "disable_auto_reset",
    "drain",
    "drop_first_batch",
    "dynamic_readers",
    "given_size",
    "has_run",
    "in_containers",
    "is_iterator",
    "is_new",
    "is_padded",
    "keeps_checkpoints",
    "last_batch",
    "named_in",
    "pipelines_of",
    "read_by",
    "reader_name",
    "refuse_own_code",
    "refuse_reader_name",
    "restore",
    "serialize",
    "sources_of",
    "stop",
    "survive_forks",
    "take_pipelines",
    "with_pipelines",
    "without_auto_reset",
]

_DALI = Package(
    "DALI",
    ("nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-dali-cuda110", "nvidia-dali-cuda90", "nvidia-dali"),
    ("2.4", "2.4"),
)

_Base = _DALI.part("nvidia.dali.plugin.base_iterator:_DaliBaseIterator")
for _name in (
    "_check_api_type_scope", "_generate_build_args", "_get_params", "_restore_state_from_checkpoint", "_shutdown",
):  # fmt: skip
    _DALI.part(f"nvidia.dali:Pipeline.{_name}")
for _name in ("AddOperator", "SerializeToProtobuf", "SetOutputDescs"):
    _DALI.part(f"nvidia.dali.backend:Pipeline.{_name}")


def check(iterator: Any) -> None:
    """Raise UnsupportedSourceError unless an iterator and its pipelines have the parts that midepoch uses."""
    _DALI.check(
        iterator, "_auto_reset", "_counter", "_enable_checkpointing", "_ever_consumed", "_ever_scheduled",
        "_first_batch", "_last_batch_padded", "_last_batch_policy.name", "_num_gpus", "_pipes", "_reader_name", "_size",
    )  # fmt: skip
    for pipeline in iterator._pipes:
        _DALI.check(
            pipeline, "_checkpoint", "_epoch_idx", "_first_iter", "_input_callbacks", "_is_restored_from_checkpoint",
            "_num_threads", "_ops",
        )  # fmt: skip


# --- forks ------------------------------------------------------------------------------------------------------------


@functools.cache
def survive_forks() -> None:
    """Keep forked processes away from this process's pipelines. Done once for a process, and permanent.

    A pipeline has threads, which do not exist in a forked process. If a DataLoader's worker is forked while a pipeline
    is garbage, and collects it, the pipeline's ``__del__`` waits for its threads forever or ends the worker. So objects
    that exist at a fork are frozen, and nothing is collected while the fork hooks of others run.
    """
    collects = False

    def before() -> None:
        nonlocal collects
        collects = gc.isenabled()
        gc.disable()

    def after() -> None:
        if collects:
            gc.enable()

    def in_the_child() -> None:
        gc.freeze()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_the_child)


# --- iterators --------------------------------------------------------------------------------------------------------


def is_iterator(source: object) -> bool:
    """Whether it is one of DALI's iterators for torch or jax."""
    if isinstance(source, DALIGenericIterator | DALIRaggedIterator):
        return True
    jax = sys.modules.get("nvidia.dali.plugin.jax.iterator")
    return jax is not None and isinstance(source, jax.DALIGenericIterator)


def read_by(source: Any) -> list[Any]:
    """What an object holds and a function uses, and what the object's iteration uses."""
    return list(named_in(source).values())


def in_containers(source: Any) -> list[Any]:
    """What an object holds in short lists and dicts."""
    found: list[Any] = []
    for each in list(getattr(source, "__dict__", {}).values()):
        members = each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else ()
        found += itertools.islice(members, _MOST_MEMBERS)
    return found


_MOST_MEMBERS = 64  # of a list or dict: longer ones hold data


def named_in(source: Any) -> dict[str, Any]:
    """The same by the names of attributes and variables."""
    return directly_held(source) | directly_held(getattr(type(source), "__iter__", None))


def refuse_own_code(iterator: Any) -> None:
    """Raise UnsupportedSourceError if the iterator's class changes what an iteration gives.

    DALI's place would be that of the training loop only if it read one batch of DALI for each of its own.
    """
    for kind in type(iterator).__mro__:
        own = {"__next__", "__iter__", "next"} & vars(kind).keys()
        if own and not kind.__module__.startswith("nvidia.dali."):
            raise UnsupportedSourceError(
                f"{kind.__name__} has a {min(own)} of its own, and midepoch cannot see which batches it reads. Wrap a "
                "DALI iterator as it is, and move what is done with a batch to then=: "
                "midepoch.wrap(iterator, then=work)"
            )
        if kind.__module__.startswith("nvidia.dali."):
            return


def pipelines_of(iterator: Any) -> list[Any]:
    """The pipelines that an iterator reads from."""
    pipelines: list[Any] = iterator._pipes
    return pipelines


def take_pipelines(iterator: Any) -> list[Any]:
    """Take an iterator's pipelines for a loader. From then on, using the iterator raises an error that says so."""
    pipelines = pipelines_of(iterator)
    iterator._pipes = [TakenOver() for _ in pipelines]
    return pipelines


def keeps_checkpoints(iterator: Any) -> bool:
    """Whether its pipelines were built to keep checkpoints."""
    return bool(iterator._enable_checkpointing)


def disable_auto_reset(iterator: Any) -> None:
    """Make it raise StopIteration at the end of an epoch instead of starting the next one."""
    iterator._auto_reset = "no"


_init = _Base.__init__


@functools.wraps(_init)
def _init_without_auto_reset(
    self: Any, pipelines: Any, size: int = -1, reader_name: str | None = None, auto_reset: Any = False,
    *arguments: Any, **keywords: Any,
) -> None:  # fmt: skip
    _init(self, pipelines, size, reader_name, False, *arguments, **keywords)


_WITHOUT_AUTO_RESET = Replacement(_Base, "__init__", _init_without_auto_reset)


@contextlib.contextmanager
def without_auto_reset() -> Iterator[None]:
    """Iterators that are made meanwhile do not begin an epoch by themselves.

    One that is restored at an epoch's end, and prepares its first batch, would do so while it is made: if a source
    tells the end, an epoch would be lost.
    """
    need = _WITHOUT_AUTO_RESET.needed()
    try:
        yield
    finally:
        need.end()


def last_batch(iterator: Any) -> str:
    """The name of its policy for a last batch that is not full."""
    return str(iterator._last_batch_policy.name)


def is_padded(iterator: Any) -> bool:
    """Whether its user has said that the reader repeats the last sample."""
    return bool(iterator._last_batch_padded)


def reader_name(iterator: Any) -> str | None:
    """The reader that determines its size, if any."""
    name: str | None = iterator._reader_name
    return name


def given_size(iterator: Any) -> int:
    """The size it was given; -1 if none."""
    return int(iterator._size)


def has_run(iterator: Any) -> bool:
    """Whether its pipelines have been asked for a batch."""
    return bool(iterator._ever_scheduled)


def drop_first_batch(iterator: Any) -> None:
    """Discard the batch that was read when the iterator was made."""
    iterator._first_batch = None


def check_unused(iterator: Any) -> None:
    """Raise UnsupportedSourceError unless an iterator is at its very beginning."""
    if iterator._ever_consumed:
        raise UnsupportedSourceError(
            "this DALI iterator has already given batches, and no record of them exists: wrap it before its first batch"
        )
    if any(pipeline.is_restored_from_checkpoint for pipeline in iterator._pipes):
        raise UnsupportedSourceError(
            "this DALI iterator was restored from a checkpoint, and midepoch cannot tell its position: build it "
            "without checkpoint=, and load midepoch's state"
        )


def is_new(iterator: Any) -> bool:
    """Whether DALI can still restore a checkpoint into its pipelines: they are built, and nothing has run."""
    return not iterator._ever_scheduled and all(
        not isinstance(pipeline, TakenOver)
        and pipeline._first_iter
        and pipeline._epoch_idx == 0
        and not pipeline.is_restored_from_checkpoint
        for pipeline in iterator._pipes
    )


class TakenOver:
    """Replaces the pipelines in an iterator after a loader took them: its user would take that loader's batches."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedSourceError(
            "the pipelines of this DALI iterator belong to the loader that midepoch.wrap made of it: take batches from "
            "that loader, or make another iterator"
        )


def with_pipelines(template: Any, pipelines: list[Any]) -> Any:
    """An iterator like `template`, of the same class, over other pipelines."""
    iterator = copy.copy(template)
    by_reader = bool(template._reader_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DALI's advice against size=, which the user has already seen
        _Base.__init__(
            iterator,
            pipelines,
            -1 if by_reader else template._size,
            template._reader_name,
            auto_reset=False,
            last_batch_padded=False if by_reader else template._last_batch_padded,
            last_batch_policy=template._last_batch_policy,
            # A restored iterator would skip the end of an epoch, and raise the first batch's errors here.
            prepare_first_batch=False,
        )
    iterator._first_batch = None
    return iterator


# --- dynamic mode -----------------------------------------------------------------------------------------------------


def dynamic_readers() -> Any:
    """The class of the readers of dynamic mode, which somebody has imported."""
    return _DALI.part("nvidia.dali.experimental.dynamic._ops:Reader")


class DynamicState:
    """The state of a dynamic reader, by DALI's own Checkpoint.

    Raises:
        UnsupportedSourceError: the reader was read before, without checkpoints.

    Attributes:
        shard: the reader's own shard, and the number of shards.
    """

    def __init__(self, reader: Any, batch_size: int) -> None:
        _DALI.check(
            reader, "_advance_shard", "_init_args", "_max_batch_size", "_num_shards", "_op_backend", "_shard_id"
        )
        _DALI.check(reader, "_stick_to_shard", "get_metadata")
        if reader._op_backend is not None:
            raise UnsupportedSourceError(
                "this reader has already been read, and no record of that exists: wrap it before its first batch"
            )
        self._template, self._batch_size = copy.copy(reader), batch_size
        self._running: tuple[Any, Any] | None = None
        self.shard: tuple[int, int] = (reader._shard_id, reader._num_shards)

    @property
    def reader(self) -> Any:
        """The reader that runs, a copy of the one that was given."""
        return self._made()[0]

    def _made(self) -> tuple[Any, Any]:
        """The reader, and its Checkpoint. Made anew, the reader lists its files."""
        if self._running is None:
            reader = copy.copy(self._template)
            reader._lock, reader._init_args = threading.Lock(), dict(reader._init_args)
            reader._max_batch_size = self._batch_size
            checkpoint = _DALI.part("nvidia.dali.experimental.dynamic.checkpoint:Checkpoint")()
            checkpoint.register(reader, "reader")
            self._running = reader, checkpoint
        return self._running

    @functools.cached_property
    def _padded(self) -> int:
        return int(self.reader.get_metadata(self._batch_size)["epoch_size_padded"])

    def _shard_in(self, epoch: int) -> int:
        """A reader's shard moves from epoch to epoch."""
        shard, shards = self.shard
        return shard if self._template._stick_to_shard else (shard + epoch) % shards

    def samples(self, epoch: int) -> int:
        """Of this reader in an epoch."""
        shard, shards = self._shard_in(epoch), self.shard[1]
        return (shard + 1) * self._padded // shards - shard * self._padded // shards

    @property
    def arguments(self) -> dict[str, Any]:
        """With which the reader was made."""
        found = {name: value for name, value in self._template._init_args.items() if value is not None}
        if "features" in found:  # of TFRecord: what python shows of one is its address
            found["features"] = {name: _stored(feature) for name, feature in found["features"].items()}
        return found

    def texts(self, name: str) -> list[str]:
        """A string argument, or the elements of a list of strings."""
        value = self.arguments.get(name, ())
        return [value] if isinstance(value, str) else [str(each) for each in value]

    def text(self) -> str:
        """Where the reader stands."""
        self._padded  # noqa: B018  # it has no state before it is set up
        checkpoint = self._made()[1]
        checkpoint.collect()
        return str(checkpoint.serialize())

    def load(self, text: str, epoch: int) -> None:
        """Go there, within `epoch` or at its beginning; to the very beginning if `text` is empty."""
        self._running = None  # DALI sets the state of a reader that has not been read
        reader, checkpoint = self._made()
        if text:
            checkpoint.deserialize(text)
            checkpoint.restore()
        reader._shard_id = self._shard_in(epoch)

    def next_shard(self) -> None:
        """Count an epoch that was not read from its beginning."""
        self.reader._advance_shard()


def _stored(feature: Any) -> bytes:
    """A feature of TFRecord, as DALI stores it with its reader."""
    backend = dali_backend.Pipeline(Pipeline(batch_size=1, num_threads=1, device_id=None)._get_params())
    reader = dali_backend.OpSpec("readers___TFRecord")
    for name, value in (("features", [feature]), ("feature_names", ["feature"]), ("path", [""]), ("index_path", [""])):
        reader.AddArg(name, value)
    reader.AddArg("device", "cpu")
    reader.AddOutput("feature", "cpu")
    backend.AddOperator(reader, "reader")
    stored: bytes = backend.SerializeToProtobuf()
    return stored


# --- pipelines --------------------------------------------------------------------------------------------------------


def sources_of(pipeline: Any) -> list[Any]:
    """The groups of its external sources."""
    return list(pipeline._input_callbacks or ())


def allow_empty(pipeline: Any) -> None:
    """Allow an iterator to be made over a pipeline that has no data yet.

    DALI's iterators run a batch when they are made, and raise if there is none. Restored pipelines are exempt, because
    they may be at the end of an epoch.
    """
    pipeline._is_restored_from_checkpoint = True


def refuse_reader_name(pipeline: Any) -> None:
    """Answer an iterator that asks the pipeline for a reader by name, which it does when it is made."""

    def reader_meta(name: str | None = None) -> dict[str, Any]:
        if name is None:
            return {}
        raise UnsupportedSourceError(
            f"reader_name={name!r}: midepoch's readers tell the length of an epoch themselves, so leave reader_name= "
            "(and size=) out of the iterator"
        )

    pipeline.reader_meta = reader_meta


def add_thread(pipeline: Any) -> None:
    """Add a thread to a pipeline that is being defined, if its number of threads is set."""
    if pipeline._num_threads:
        pipeline._num_threads += 1


def stop(pipeline: Any) -> None:
    """Stop its threads now.

    If the graph calls Python, one of these threads may otherwise garbage-collect its own pipeline. A thread cannot wait
    for its own end, so the process would abort ("Resource deadlock avoided").
    """
    pipeline._shutdown()


def drain(pipeline: Any) -> bool:
    """Run a pipeline that has no more data until it is empty. False if a batch could not be read."""
    sound = True
    with pipeline._check_api_type_scope(types.PipelineAPIType.ITERATOR):
        pipeline.schedule_run()
        while not pipeline.empty():
            try:
                pipeline.share_outputs()
            except RuntimeError:
                sound = False
            pipeline.release_outputs()
    return sound


def serialize(pipeline: Any) -> bytes:
    """The graph of a pipeline, with external sources in place of the operators that DALI cannot serialize."""
    try:
        serialized: bytes = pipeline.serialize()
    except RuntimeError:
        if not pipeline._ops:
            raise
    else:
        return serialized
    # This pipeline is never built, only serialized.
    backend = dali_backend.Pipeline(pipeline._get_params())
    for operator in pipeline._ops:
        if not calls_python(operator._op.schema.Name()):
            backend.AddOperator(operator.spec, operator.name)
            continue
        for number in range(operator.spec.NumOutput()):
            source = dali_backend.OpSpec("ExternalSource")
            device = operator.spec.OutputDevice(number)
            source.AddArg("device", device)
            source.AddOutput(operator.spec.OutputName(number), device)
            backend.AddOperator(source, f"{operator.name}[{number}]")
    backend.SetOutputDescs(pipeline._generate_build_args())
    found: bytes = backend.SerializeToProtobuf()
    return found


def calls_python(schema: str) -> bool:
    """Whether operators of this schema call Python, which a serialized graph cannot contain."""
    return schema == "ExternalSource" or "PythonFunction" in schema or "Numba" in schema


def restore(pipeline: Any, checkpoint: bytes) -> None:
    """Restore a pipeline that is built and has not run. DALI does the same as the last step of building it."""
    pipeline._checkpoint = checkpoint
    pipeline._restore_state_from_checkpoint()
