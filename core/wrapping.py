"""`wrap`: choose the adapter of a source. Tries the most specific first, and imports adapters only when needed."""

from __future__ import annotations

import functools
import itertools
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any, Literal, TypedDict, Unpack, cast

import torch
from torch.utils.data import DataLoader

from .attributes import directly_held
from .backends import BACKENDS, PREPARED_BY, Backend
from .errors import UnsupportedSourceError
from .loader.adapter import Adapter, Options
from .loader.loader import Loader
from .loader.progress import Pass
from .reading.around import Around
from .reading.private import end_early_workers, is_iterator
from .world import Tail, World

__all__ = ["wrap"]


_ENTRY_POINTS = "midepoch.adapters"


class Settings(TypedDict, total=False):
    """Keywords of `wrap` that only some sources know.

    Attributes:
        index_cache: webdataset: the folder for indexes of shards; None for the user's cache folder.
        progress: webdataset: show a progress bar while shards are indexed or read again; None: only on a terminal.
        refill: webdataset: refill batches whose samples were dropped, so that all have the same size.
        streams: webdataset, streamed shards: the number of streams, in [1, 4096]; keep it the same for this data. None:
            as many as the world needs in which an epoch begins.
    """

    index_cache: str | os.PathLike[str] | None
    progress: bool | None
    refill: bool
    streams: int | None


def wrap(
    source: Any,
    *,
    seed: int | None = None,
    world: World | None = None,
    shard: bool | None = None,
    randomness: Literal["sample", "none"] = "sample",
    tail: Tail | None = None,
    fingerprint: str | None = None,
    verify: Literal["sample", "strict", "warn", "off"] = "sample",
    then: Callable[[Any], Any] | None = None,
    on_error: Literal["next", "retry"] | None = None,
    remember: int = 0,
    global_batch: int | None = None,
    inside: str | None = None,
    **settings: Unpack[Settings],
) -> Loader:
    """Make `source` resume in the middle of an epoch:

        loader = midepoch.wrap(DataLoader(dataset, batch_size=32, shuffle=True), seed=0)
        loader.load_state_dict(checkpoint["data"])       # after a crash; otherwise leave it out
        for batch in loader:
            ...
            checkpoint["data"] = loader.state_dict()     # a few hundred bytes, at any time

    Args:
        source: a torch DataLoader, a dataset that exposes a sampler, a list of batches, a generator function, anything
            that can be iterated more than once. A loader that is wrapped already is returned as it is.
        seed: of the order and of the random streams, in [0, 2**64). None: the source's own seed; without one, torch's
            initial seed in a single process, and 0 with several. If you pass none, a loaded state's seed replaces it.
        world: which ranks share the data. None: torch.distributed if it is initialized when iteration starts, otherwise
            RANK, WORLD_SIZE and LOCAL_RANK, otherwise a single process.
        shard: whether midepoch shards the data over ranks and workers (True) or the source does so itself (False).
            None: midepoch shards sources that can be indexed, and iterables that take the same number of indices from
            the samplers that they expose for every sample. For others, you must pass it if there are several ranks or
            workers.
        randomness: "sample" gives each sample its own random stream; "none" lets the source use the caller's
            generators, so its augmentations are not repeated after a resume.
        tail: what to do with the last samples if the number of samples is not divisible by the world size: "pad"
            repeats at most world_size - 1 of them, "drop" leaves them out, "uneven" gives ranks unequal numbers. None:
            as the source's DistributedSampler; without one, "pad".
        fingerprint: your own identity of the data's content, compared when a state is loaded; at most 64 characters.
        verify: what happens if the first sample of the epoch is not the one that the loaded state describes. "sample":
            an error if it is another sample, a warning if only its bits differ. "strict": both are errors; "warn": both
            are warnings. "off": midepoch neither compares that sample nor reads it for the state.
        then: work on whole batches, in the main process: to the device, mixup, erasing. midepoch calls it with each
            batch, under the batch's random stream, and hands out what it returns. It may be a torch Module.
        on_error: which batch the caller gets after one that could not be made. "next": the batch after it, with a
            warning, as from a DataLoader. "retry": the same batch again. None: "next" in a single process if the source
            can be read from any position; otherwise "retry", so that ranks stay together.
        remember: how many states to keep of a source with a state of its own, in [0, 1024]: those before its last
            batches. ``state_dict(in_flight=...)`` needs them. Each batch costs one call of the source's ``state_dict``.
        global_batch: units of all ranks from one step of the optimizer to the next, for gradient accumulation; at least
            1. The source's batch size is then that of a micro-batch: each rank gets equally many of them for one global
            batch, the last short, or with weight 0 if the rank has no samples for it. `Loader.weight` weighs their
            losses, `Loader.step_due` says when to step. States count whole global batches, also while one is being
            read. For sources that can be indexed. None: each batch is a step.
        inside: `source` passes on, one for one, the batches of the DataLoader in its attribute of this name, as objects
            do that move batches to a device; "" for a DataLoader subclass with iterators of its own. The name may have
            dots. midepoch takes your word for it, watches the number of batches, and jumps. Without it, such an object
            is read again from its start.
        settings: keywords that only some sources know, such as ``refill=True`` for webdataset: see `Settings`.

    Raises:
        UnsupportedSourceError: it cannot be resumed as it is; the message says what to pass instead.
        ValueError, TypeError: an argument is out of range.
    """
    options = Options(
        seed=seed, world=world, shard=shard, randomness=randomness, tail=tail, fingerprint=fingerprint, verify=verify,
        then=then, on_error=on_error, remember=remember, global_batch=global_batch, inside=inside,
        settings=cast(dict[str, Any], settings),
    )  # fmt: skip
    if isinstance(source, Loader):
        if options != Options(settings={}):
            raise TypeError("this loader is wrapped already: pass the options where it is wrapped for the first time")
        return source
    if inside is None:
        return Loader(_adapter_for(source, options), options)
    around = Around(source, inside, _is_loader)
    adapter = _adapter_for(around.inside, replace(options, inside=None))
    adapter.around = around
    return Loader(adapter, options)


def _is_loader(value: Any) -> bool:
    """Whether it is a DataLoader, or a loader of a package that midepoch has an adapter for."""
    packages = (each for each in BACKENDS if each.package is not None and not each.holds and _may_be_of(each, value))
    adapters = (pkgutil.resolve_name(each.adapter) for each in packages)
    return issubclass(type(value), DataLoader) or any(each.recognises(value) for each in adapters)


def _adapter_for(source: Any, options: Options) -> Adapter:
    if isinstance(source, torch.nn.Module | torch.optim.Optimizer | type):
        raise UnsupportedSourceError(
            f"{source!r:.80} is not a source of batches: pass a loader, a dataset, a list of batches or a generator "
            "function"
        )
    if is_iterator(source) or type(source) is Pass:
        cure = "iterate the wrapped loader itself" if type(source) is Pass else "wrap the DataLoader itself"
        raise UnsupportedSourceError(f"an iterator of a loader ({type(source).__name__}) gives one pass only: {cure}")
    if (trainers := PREPARED_BY.get(type(source).__module__)) is not None:
        call, device = trainers
        raise UnsupportedSourceError(
            f"this DataLoader has been through {call}, which has divided it already: leave that out, and wrap the "
            f"DataLoader before, as in midepoch.wrap(DataLoader(...), then={device})"
        )
    for each in (source, *directly_held(source).values()):
        if issubclass(type(each), DataLoader):
            end_early_workers(each)
    none: frozenset[str] = frozenset()
    ours = ((pkgutil.resolve_name(each.adapter), each.settings) for each in BACKENDS if _may_be_of(each, source))
    for adapter, settings in itertools.chain(((each, none) for each in _registered()), ours):
        if not adapter.recognises(source):
            continue
        unknown = options.settings.keys() - settings
        if unknown:
            known = ", ".join(sorted(settings)) or "none"
            raise TypeError(
                f"wrap() got {', '.join(map(repr, sorted(unknown)))}, which does not apply to a "
                f"{type(source).__name__} (it accepts: {known}): leave it out"
            )
        chosen = adapter.choose(source, options)
        if chosen is not None:
            return cast(Adapter, chosen)
    raise UnsupportedSourceError(
        f"a {type(source).__name__} cannot be iterated: pass a loader, a dataset, a list of batches or a generator "
        "function"
    )


def _may_be_of(backend: Backend, source: Any) -> bool:
    if backend.package is None:
        return True
    if backend.package not in sys.modules or backend.holds:
        return backend.holds and backend.package in sys.modules
    # Compare whole package names: many are called nvidia.something. A DataLoader has its dataset's backend.
    kinds = (*type(source).__mro__, *type(getattr(source, "dataset", None)).__mro__)
    return any(f"{kind.__module__}.".startswith(f"{backend.package}.") for kind in kinds)


@functools.cache
def _registered() -> tuple[type[Adapter], ...]:
    """Adapters of other packages, by entry point; tried before ours, because they are more specific."""
    return tuple(entry.load() for entry in sorted(entry_points(group=_ENTRY_POINTS), key=lambda entry: entry.name))
