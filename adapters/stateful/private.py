"""The parts of sources with their own state that midepoch inspects and their packages do not promise.

They are read to identify how a source is made. If a part is missing, the description is shorter, and nothing is
refused: a Hugging Face dataset that cannot be inspected is replayed, which is exact. One is written: see `forget_end`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from midepoch.packages import Package
from midepoch.samplers import length_of

__all__ = [
    "begin_sampler", "begin_samplers", "counts_only", "elastic_iterator", "elastic_parts", "elastic_steps",
    "forget_end", "gives_out_of_order", "go_to_the_end", "grain_divides", "grain_names_an_address", "grain_steps",
    "has_shuffle_buffer", "has_workers", "held_by_nodes", "hugging_face_divides", "hugging_face_steps",
    "litdata_chunks", "litdata_rank", "litdata_saved", "nodes_in", "not_restarting", "own_samplers", "reads_ahead",
    "without_iterator",
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


def forget_end(iterator: Any) -> None:
    """Let an iterator of torchdata.nodes.Loader that began anew say its state again.

    Loaded with the state of a pass that had ended, it begins the next one, but keeps that state as its own for good
    (torchdata 0.11).
    """
    if getattr(iterator, "_cached_item", True) is None and hasattr(iterator, "_cached_state_dict"):
        iterator._cached_state_dict = None


def without_iterator(loader: Any) -> Any:
    """A shallow copy of a StatefulDataLoader that is not being iterated."""
    other = copy.copy(loader)
    other.__dict__["_iterator"] = None
    return other


# --- torchdata.nodes ---


def nodes_in(loader: Any) -> list[Any]:
    """The nodes below a Loader of torchdata.nodes."""
    kind = sys.modules["torchdata.nodes"].BaseNode
    found: dict[int, Any] = {}
    queue = [loader.root]
    while queue:
        each = queue.pop()
        if isinstance(each, kind) and id(each) not in found:
            found[id(each)] = each
            queue += vars(each).values()
        elif isinstance(each, dict | list | tuple):
            queue += each.values() if isinstance(each, dict) else each
    return list(found.values())


def reads_ahead(nodes: list[Any]) -> str:
    """The names of the nodes whose threads or processes read; empty if there are none."""
    ahead = [node for node in nodes if type(node).__name__ in ("ParallelMapper", "Prefetcher", "PinMemory")]
    # A Mapper is a ParallelMapper without workers.
    return " and ".join(sorted({type(node).__name__ for node in ahead if getattr(node, "num_workers", 1) > 0}))


def held_by_nodes(nodes: list[Any]) -> list[Any]:
    """What nodes hold and call, except other nodes and samplers."""
    kind = sys.modules["torchdata.nodes"].BaseNode
    held = [value for node in nodes for name, value in vars(node).items() if name not in ("sampler", "_it")]
    return [value for value in held if not isinstance(value, kind) and (callable(value) or hasattr(value, "__iter__"))]


def own_samplers(samplers: list[Any]) -> list[Any]:
    """Those that are not torch's. torch's draw their order at once, from a generator or with a seed that they draw."""
    return [each for each in samplers if each is not None and not _is_torchs(each)]


def _is_torchs(sampler: Any) -> bool:
    inner = getattr(sampler, "sampler", None)
    known = type(sampler).__module__.startswith(("torch.", "torchdata."))
    return known and (inner is None or inner is sampler or _is_torchs(inner))


def begin_samplers(loader: Any) -> None:
    """Let the samplers of a torchdata.nodes.Loader draw their order now, and not while batches are read."""
    for node in nodes_in(loader):
        sampler = getattr(node, "sampler", None)
        inside = getattr(node, "iterable", None) if sampler is None else sampler
        if inside is not None and not hasattr(inside, "load_state_dict") and getattr(node, "_it", None) is not None:
            node._it = _drawn_now(node._it, sampler, node._num_yielded)


def begin_sampler(iterator: Any, seed: Callable[[], None]) -> None:
    """The same for the iterator of a StatefulDataLoader without worker processes.

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


def gives_out_of_order(nodes: list[Any]) -> bool:
    """Whether a node gives what its workers have made as it comes."""
    return any(getattr(node, "num_workers", 0) and getattr(node, "in_order", True) is False for node in nodes)


def go_to_the_end(loader: Any) -> None:
    """Let a Loader that was given the state of a pass that had ended stand there: its next pass is the next epoch."""
    if getattr(loader, "_next_iter_state_dict", None) is not None:
        with not_restarting(loader):
            iter(loader).has_next()


@contextlib.contextmanager
def not_restarting(loader: Any) -> Iterator[None]:
    """A Loader that may restart reads its first batch when it is asked for an iterator, under no stream of its own."""
    restarts = loader.restart_on_stop_iteration
    loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        loader.restart_on_stop_iteration = restarts
