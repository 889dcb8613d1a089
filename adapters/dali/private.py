"""What midepoch uses of DALI that DALI does not promise, checked when it is imported.

DALI has no interface for what is needed here: an iterator over other pipelines, its counting without pipelines, a
pipeline that is restored after it was built, the graph of one with Python functions in it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import os
import warnings
from typing import Any

import numpy as np
from nvidia.dali import backend as dali_backend
from nvidia.dali import types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator, DALIRaggedIterator

from midepoch.errors import UnsupportedSourceError
from midepoch.packages import Package

__all__ = [
    "Epochs",
    "TakenOver",
    "add_a_thread",
    "calls_python",
    "check",
    "check_unused",
    "drain",
    "drop_first_batch",
    "given_size",
    "has_run",
    "is_iterator",
    "is_new",
    "keeps_checkpoints",
    "last_batch",
    "leave_resets_to_us",
    "let_be_empty",
    "pipelines_of",
    "reader_name",
    "restore",
    "serialize",
    "sources_of",
    "stop",
    "survive_forks",
    "take_pipelines",
    "with_pipelines",
]

_DALI = Package(
    "DALI",
    ("nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-dali-cuda110", "nvidia-dali-cuda90", "nvidia-dali"),
    ("2.4", "2.4"),
)

_Base = _DALI.part("nvidia.dali.plugin.base_iterator:_DaliBaseIterator")
for _name in ("_extract_from_reader_and_validate", "_save_state"):
    _DALI.part(f"nvidia.dali.plugin.base_iterator:_DaliBaseIterator.{_name}")
for _name in (
    "_check_api_type_scope", "_generate_build_args", "_get_params", "_restore_state_from_checkpoint", "_shutdown",
):  # fmt: skip
    _DALI.part(f"nvidia.dali:Pipeline.{_name}")
for _name in ("AddOperator", "SerializeToProtobuf", "SetOutputDescs"):
    _DALI.part(f"nvidia.dali.backend:Pipeline.{_name}")


def check(iterator: Any) -> None:
    """Raise UnsupportedSourceError unless an iterator and its pipelines have what is used of them."""
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
    """Leave pipelines alone in processes that are forked from here on. Once for a process, and not to be undone.

    A pipeline has threads, which a forked process has not: where one is garbage when a DataLoader's workers are forked,
    and is collected there, its ``__del__`` waits for them for ever or ends the worker. So what is there at a fork
    stays, and nothing is collected while others see to their forks.
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
    """Whether it is one of DALI's iterators for torch."""
    return isinstance(source, DALIGenericIterator | DALIRaggedIterator)


def pipelines_of(iterator: Any) -> list[Any]:
    """The pipelines that an iterator reads from."""
    pipelines: list[Any] = iterator._pipes
    return pipelines


def take_pipelines(iterator: Any) -> list[Any]:
    """Its pipelines, for a loader to use; the iterator's user is told so from then on."""
    pipelines = pipelines_of(iterator)
    iterator._pipes = [TakenOver() for _ in pipelines]
    return pipelines


def keeps_checkpoints(iterator: Any) -> bool:
    """Whether its pipelines were built so that they can give checkpoints."""
    return bool(iterator._enable_checkpointing)


def leave_resets_to_us(iterator: Any) -> None:
    """Let it raise StopIteration at the end of an epoch, and not begin the next."""
    iterator._auto_reset = "no"


def last_batch(iterator: Any) -> str:
    """The name of its policy for a last batch that is not full."""
    return str(iterator._last_batch_policy.name)


def reader_name(iterator: Any) -> str | None:
    """The reader by which it counts, if any."""
    name: str | None = iterator._reader_name
    return name


def given_size(iterator: Any) -> int:
    """The size by which it counts; -1 where it was given none."""
    return int(iterator._size)


def has_run(iterator: Any) -> bool:
    """Whether its pipelines have been asked for a batch."""
    return bool(iterator._ever_scheduled)


def drop_first_batch(iterator: Any) -> None:
    """Forget the batch that was read when the iterator was made."""
    iterator._first_batch = None


def check_unused(iterator: Any) -> None:
    """Raise UnsupportedSourceError if an iterator does not stand at its very beginning."""
    if iterator._ever_consumed:
        raise UnsupportedSourceError(
            "this DALI iterator has given out batches, of which nothing was kept: wrap it before its first batch"
        )
    if any(pipeline.is_restored_from_checkpoint for pipeline in iterator._pipes):
        raise UnsupportedSourceError(
            "this DALI iterator was restored from a checkpoint, which midepoch cannot place in an epoch: build it "
            "without checkpoint=, and load midepoch's state"
        )


def is_new(iterator: Any) -> bool:
    """Whether its pipelines stand where DALI restores a checkpoint: they are built, and nothing has run."""
    return not iterator._ever_scheduled and all(
        not isinstance(pipeline, TakenOver)
        and pipeline._first_iter
        and pipeline._epoch_idx == 0
        and not pipeline.is_restored_from_checkpoint
        for pipeline in iterator._pipes
    )


class TakenOver:
    """In an iterator whose pipelines a loader has taken: its user would take batches from that loader."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedSourceError(
            "the pipelines of this DALI iterator belong to the loader that midepoch.wrap made of it: take batches from "
            "that one, or make another iterator"
        )


def with_pipelines(template: Any, pipelines: list[Any]) -> Any:
    """An iterator like `template`, of the same class, over other pipelines."""
    iterator = copy.copy(template)
    by_reader = bool(template._reader_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DALI's advice against size=, which the user has seen
        _Base.__init__(
            iterator,
            pipelines,
            -1 if by_reader else template._size,
            template._reader_name,
            auto_reset=False,
            last_batch_padded=False if by_reader else template._last_batch_padded,
            last_batch_policy=template._last_batch_policy,
            # A restored iterator would swallow the end of an epoch, and raise here what the first batch raises.
            prepare_first_batch=False,
        )
    iterator._first_batch = None
    return iterator


class _Still:
    """Stands in for a pipeline where only the iterator's counting is wanted."""

    def __init__(self, meta: dict[str, Any]) -> None:
        self._meta = meta

    def reader_meta(self, name: str) -> dict[str, Any]:
        return self._meta

    def _check_api_type_scope(self, kind: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def share_outputs(self) -> list[Any]:
        return []

    def release_outputs(self) -> None:
        pass

    schedule_run = reset = release_outputs

    def empty(self) -> bool:
        return False


class Epochs:
    """Batches in each epoch: DALI's own counting, carried out by an iterator without pipelines.

    Where DALI fills the last batch from the next epoch, epochs differ in length.
    """

    def __init__(self, template: Any, metas: list[dict[str, Any]]) -> None:
        iterator = self._iterator = copy.copy(template)
        iterator._pipes = [_Still(meta) for meta in metas]
        iterator._counter, iterator._ever_scheduled, iterator._auto_reset = 0, True, "no"
        if iterator._reader_name:
            iterator._extract_from_reader_and_validate()
        self._found: list[int] = []
        self._seen: dict[str, int] = {}
        self._period: tuple[int, int] | None = None  # (first epoch, number of epochs)

    def batches(self, epoch: int) -> int | None:
        """Batches of one process in this epoch; None where DALI does not know before it ends."""
        if self._iterator._size < 0:
            return None
        while epoch >= len(self._found) and self._period is None:
            self._count()
        if self._period is not None and epoch >= len(self._found):
            first, number = self._period
            epoch = first + (epoch - first) % number
        return self._found[epoch]

    def _count(self) -> None:
        iterator = self._iterator
        state = iterator._save_state()
        if state in self._seen:
            self._period = (self._seen[state], len(self._found) - self._seen[state])
            return
        self._seen[state] = len(self._found)
        drops = iterator._last_batch_policy == LastBatchPolicy.DROP
        step = iterator.batch_size * (1 if iterator._reader_name else iterator._num_gpus)
        left = iterator._size - iterator._counter
        batches = math.ceil(left / step)
        if drops and iterator._reader_name:
            in_shards = iterator._shard_sizes_per_gpu - iterator._counter_per_gpu - iterator._counter
            batches = min(batches, int(np.min(in_shards)) // step)
        elif drops:
            batches = left // step
        batches = max(0, batches)
        self._found.append(batches)
        iterator._counter += batches * step
        iterator.reset()


# --- pipelines --------------------------------------------------------------------------------------------------------


def sources_of(pipeline: Any) -> list[Any]:
    """The groups of its external sources."""
    return list(pipeline._input_callbacks or ())


def let_be_empty(pipeline: Any) -> None:
    """Let an iterator be made over a pipeline that has nothing to give yet.

    DALI's iterators run a batch when they are made, and raise if they find none, but for restored pipelines, which may
    stand at the end of an epoch.
    """
    pipeline._is_restored_from_checkpoint = True


def add_a_thread(pipeline: Any) -> None:
    """One more for a pipeline that is being defined, if it has any."""
    if pipeline._num_threads:
        pipeline._num_threads += 1


def stop(pipeline: Any) -> None:
    """Stop its threads, here and now.

    Of a graph that calls Python, one of these threads may else collect the garbage that its pipeline has become. It
    cannot wait for its own end, and the process is aborted ("Resource deadlock avoided").
    """
    pipeline._shutdown()


def drain(pipeline: Any) -> bool:
    """Run a pipeline that finds nothing more to give, until it is empty. False: a batch could not be read."""
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
    """The graph of a pipeline, with external sources in the place of operators that DALI cannot serialize."""
    try:
        serialized: bytes = pipeline.serialize()
    except RuntimeError:
        if not pipeline._ops:
            raise
    else:
        return serialized
    # Never built, only written down.
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
    """Whether operators of this schema call Python, which a serialized graph cannot hold."""
    return schema == "ExternalSource" or "PythonFunction" in schema or "Numba" in schema


def restore(pipeline: Any, checkpoint: bytes) -> None:
    """Let a pipeline that is built and has not run go on from a checkpoint: DALI's own last step in building it."""
    pipeline._checkpoint = checkpoint
    pipeline._restore_state_from_checkpoint()
