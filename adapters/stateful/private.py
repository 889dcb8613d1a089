"""The parts of sources with their own state that midepoch inspects and their packages do not promise.

They are read to identify how a source is made. If a part is missing, the description is shorter, and nothing is
refused: a Hugging Face dataset that cannot be inspected is replayed, which is exact.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from midepoch.packages import Package
from midepoch.samplers import length_of

__all__ = [
    "begin_sampler", "counts_only", "elastic_iterator", "elastic_parts", "elastic_steps", "grain_divides",
    "grain_names_an_address", "grain_steps", "has_shuffle_buffer", "has_workers", "hugging_face_divides",
    "hugging_face_steps", "litdata_chunks", "litdata_rank", "litdata_saved", "own_samplers", "without_iterator",
]  # fmt: skip


@functools.cache
def _hugging_face() -> Package:
    return Package("Hugging Face datasets", ("datasets",), ("5.2", "5.2"))


@functools.cache
def _grain() -> Package:
    return Package("Grain", ("grain",), ("0.2.18", "0.2.18"))


def has_shuffle_buffer(dataset: Any) -> bool | None:
    """Whether a Hugging Face IterableDataset has a shuffle buffer; None if that cannot be determined."""
    _hugging_face()  # warns of an untested version
    steps = _examples(dataset)
    return any("BufferShuffled" in type(each).__name__ for each in steps) if steps else None


def hugging_face_steps(dataset: Any) -> str:
    """The classes that a dataset's examples pass through, and the sizes of the tables or lists they come from."""
    steps = []
    for each in _examples(dataset):
        given = getattr(each, "kwargs", None)
        shards = given.get("shards", ()) if isinstance(given, dict) else ()
        steps += [type(each).__name__, *(shard if isinstance(shard, str) else length_of(shard) for shard in shards)]
    return " ".join(map(str, steps))


def _examples(dataset: Any) -> list[Any]:
    """What a dataset's examples pass through, from the last step to the first."""
    found, waiting = [], [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        each = waiting.pop()
        if each is not None:
            found.append(each)
            waiting += [getattr(each, "ex_iterable", None), *(getattr(each, "ex_iterables", None) or ())]
    return found


def hugging_face_divides(dataset: Any) -> bool:
    """Whether a Hugging Face IterableDataset is one rank's part."""
    return getattr(dataset, "_distributed", None) is not None


def grain_divides(source: Any) -> bool:
    """Whether a Grain dataset, a parent of it or a loader's sampler reads every n-th sample only."""
    options = [getattr(each, "_shard_options", None) for each in (source, getattr(source, "_sampler", None))]
    if getattr(source, "_step", 1) > 1 or any(getattr(each, "shard_count", 1) > 1 for each in options):
        return True
    return any(map(grain_divides, getattr(source, "_parents", ())))


def grain_names_an_address(source: Any) -> str:
    """What a Grain DataLoader's states describe by an address: its data source or its sampler; empty if neither."""
    if not hasattr(source, "_data_source") or getattr(source, "_use_native_dataset_checkpointing", False):
        return ""
    for each in (source._data_source, getattr(source, "_sampler", None)):
        if not isinstance(each, list | tuple | np.ndarray) and re.search(r" at 0x[0-9a-f]+", repr(each)):
            return type(each).__name__
    return ""


def grain_steps(source: Any) -> str:
    """The classes, lengths and seeds of a Grain dataset and its parents, and how much a loader reads."""
    _grain()  # warns of an untested version
    return f"{_transformations(source)} {length_of(getattr(source, '_data_source', None))}"


def _transformations(dataset: Any, lengths: bool = True) -> str:
    length, seed = f":{length_of(dataset)}" if lengths else "", getattr(dataset, "_seed", None)
    named = f"{type(dataset).__name__}{length}" + ("" if seed is None else f":{seed}")
    return " ".join([named, *(_transformations(each, lengths) for each in getattr(dataset, "_parents", ()))])


def elastic_steps(source: Any) -> str:
    """The classes and seeds of the datasets that an ElasticIterator reads. Their size is in the state by itself."""
    return _transformations(source._ds, lengths=False)


def elastic_parts(source: Any) -> tuple[int, tuple[int, int], int]:
    """An ElasticIterator's global batch, its shard's number and the number of shards, and its samples."""
    _grain().check(source, "_global_batch_size", "_shard_options.shard_index", "_shard_options.shard_count", "_ds")
    shard = source._shard_options
    return source._global_batch_size, (shard.shard_index, shard.shard_count), len(source._ds)


def elastic_iterator(source: Any, position: int) -> Any:
    """An ElasticIterator's iterator, which is one and the same each time, moved to a sample."""
    iterator = iter(source)
    iterator.set_state({**iterator.get_state(), "global_next_index": position})
    return iterator


def litdata_chunks(loader: Any) -> tuple[int, str]:
    """The number of samples, the names of their chunks, and which part of each is read."""
    dataset = loader.dataset
    files, parts = getattr(dataset, "subsampled_files", ()), getattr(dataset, "region_of_interest", ())
    return sum(stop - start for start, stop in parts), repr((files, parts))


def litdata_rank(loader: Any) -> tuple[int, int]:
    """The rank and the world size for which LitData takes this process."""
    found = loader.dataset.distributed_env
    return found.global_rank, found.world_size


def litdata_saved(state: Any) -> dict[str, Any]:
    """What the state of a StreamingDataLoader has of its dataset; empty before the dataset was read."""
    saved = state.get("dataset") if isinstance(state, dict) else None
    return saved if isinstance(saved, dict) else {}


def has_workers(source: Any) -> bool:
    """Whether a source starts worker processes, as far as can be determined."""
    options = getattr(source, "_multiprocessing_options", source)  # a Grain DataLoader's
    workers = getattr(options, "num_workers", 0)
    return isinstance(workers, int) and workers > 0


def counts_only(state: Any) -> bool:
    """Whether a StatefulDataLoader's state has nothing of an iterable dataset's own: it counts batches, and skips."""
    found = _values_of(state, ("dataset_state", "dataset_iter_state"))
    return "dataset_iter_state" in found and set(found.values()) == {None}


def _values_of(state: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in state.items() if isinstance(state, dict) else ():
        if name in names:
            found[name] = None if value is None else True
        else:
            for inner, kept in _values_of(value, names).items():
                found[inner] = found.get(inner) or kept
    return found


def without_iterator(loader: Any) -> Any:
    """A shallow copy of a StatefulDataLoader that is not being iterated."""
    other = copy.copy(loader)
    other.__dict__["_iterator"] = None
    return other


def own_samplers(samplers: list[Any]) -> list[Any]:
    """Those that are not torch's. torch's draw their order at once, from a generator or with a seed that they draw."""
    return [each for each in samplers if each is not None and not _is_torchs(each)]


def _is_torchs(sampler: Any) -> bool:
    inner = getattr(sampler, "sampler", None)
    known = type(sampler).__module__.startswith(("torch.", "torchdata."))
    return known and (inner is None or inner is sampler or _is_torchs(inner))


def begin_sampler(iterator: Any, seed: Callable[[], None]) -> None:
    """Let the sampler of a StatefulDataLoader without worker processes draw its order now, not while batches are read.

    torchdata asks a sampler for an iterator twice where it loads a state. One that draws its order at once, and not
    when it is first read, gives the second order then. So it is asked once more in each case, after `seed`.
    """
    holder, name = iterator, "_sampler_iter"
    sampler: Any = getattr(iterator, "_index_sampler", None)
    yielded = getattr(iterator, "_sampler_iter_yielded", 0)
    if hasattr(getattr(iterator, name, None), "sampler_iter"):  # torchdata's own, of batches
        holder, name = iterator._sampler_iter, "sampler_iter"
        sampler, yielded = holder.sampler, holder.samples_yielded
    indices = getattr(holder, name, None)
    if indices is not None and not hasattr(indices, "state_dict") and not hasattr(sampler, "load_state_dict"):
        begins: Any = getattr(type(sampler), "__iter__", None)
        if own_samplers([sampler]) and begins is not None and not inspect.isgeneratorfunction(begins):
            seed()
            again = iter(sampler)
            indices = indices if again is sampler else itertools.islice(again, yielded, None)
        setattr(holder, name, _drawn_now(indices, sampler, yielded))


def _drawn_now(indices: Iterator[Any], sampler: Any, yielded: int) -> Iterator[Any]:
    """The same iterator. What draws, draws now: a sampler of the user's own for each index, others for the first one.

    So a resumed run, for which torchdata passes over indices here, draws the same numbers for the same indices.
    """
    length = length_of(sampler) if own_samplers([sampler]) else None
    count = max(length - yielded, 0) if length is not None else int(not yielded or sampler is not None)
    drawn = list(itertools.islice(indices, count))
    return iter(drawn) if len(drawn) < count else itertools.chain(drawn, indices)
