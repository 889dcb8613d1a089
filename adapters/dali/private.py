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
import warnings
from collections.abc import Iterator
from typing import Any

from nvidia.dali import backend as dali_backend
from nvidia.dali import types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, DALIRaggedIterator

from midepoch.attributes import directly_held
from midepoch.errors import UnsupportedSourceError
from midepoch.packages import Package, Replacement

__all__ = [
    "add_thread", "allow_empty", "calls_python", "check", "check_unused", "drain", "drop_first_batch", "given_size",
    "has_run", "in_containers", "is_dynamic_reader", "is_iterator", "is_padded", "keeps_checkpoints", "last_batch",
    "leave_unread", "left_unread", "named_in", "pipelines_of", "reader_name", "refuse_own_code", "refuse_reader_name",
    "serialize", "sources_of", "stop", "survive_forks", "with_pipelines",
]  # fmt: skip

_DALI = Package(
    "DALI",
    ("nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-dali-cuda110", "nvidia-dali-cuda90", "nvidia-dali"),
    ("2.4", "2.4"),
)

_Base = _DALI.part("nvidia.dali.plugin.base_iterator:_DaliBaseIterator")
for _name in ("_check_api_type_scope", "_generate_build_args", "_get_params", "_shutdown"):
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
            pipeline, "_input_callbacks", "_is_restored_from_checkpoint", "_num_threads", "_ops",
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


def is_dynamic_reader(source: object) -> bool:
    """Whether it is a reader of DALI's dynamic mode."""
    used = "nvidia.dali.experimental.dynamic" in sys.modules
    return used and isinstance(source, _DALI.part("nvidia.dali.experimental.dynamic._ops:Reader"))


def in_containers(source: Any) -> list[Any]:
    """What an object holds in short lists and dicts."""
    found: list[Any] = []
    for each in list(getattr(source, "__dict__", {}).values()):
        members = each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else ()
        found += itertools.islice(members, _MOST_MEMBERS)
    return found


_MOST_MEMBERS = 64  # of a list or dict: longer ones hold data


def named_in(source: Any) -> dict[str, Any]:
    """What an object holds and a function uses, and what the object's iteration uses, by the names there."""
    return directly_held(getattr(type(source), "__iter__", None)) | directly_held(source)  # whose attributes come first


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


def keeps_checkpoints(iterator: Any) -> bool:
    """Whether its pipelines were built to keep checkpoints."""
    return bool(iterator._enable_checkpointing)


def leave_unread(iterator: Any) -> None:
    """Let an iterator read nothing before it is asked, and raise StopIteration where an epoch ends."""
    iterator._auto_reset = "no"
    iterator._prepare_first_batch = False


_init = _Base.__init__


@functools.wraps(_init)
def _init_unread(self: Any, *arguments: Any, **keywords: Any) -> None:
    _init(self, *arguments, **keywords)
    leave_unread(self)


_UNREAD = Replacement(_Base, "__init__", _init_unread)


@contextlib.contextmanager
def left_unread() -> Iterator[None]:
    """Iterators that are made meanwhile read nothing by themselves.

    One that is restored at an epoch's end, and prepares its first batch, would begin the next epoch while it is made.
    """
    need = _UNREAD.needed()
    try:
        yield
    finally:
        need.close()


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

