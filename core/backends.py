"""The names of packages and trainers that midepoch knows, as data: nothing is imported before it is needed."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "BACKENDS", "COUNTING_TRAINERS", "DRAWLESS_COLLATES", "PREPARED_BY", "SAMPLERS_LIKE_THEIR_PARENT", "Backend",
]  # fmt: skip


class Backend(NamedTuple):
    """The import path of an adapter, and the package that defines its sources' classes or their base classes.

    Attributes:
        holds: its sources may be of any class, and hold objects of that package.
        settings: names of the keywords of `wrap` that only its sources have. The adapter checks their values.
    """

    adapter: str
    package: str | None = None
    holds: bool = False
    settings: frozenset[str] = frozenset()


# The most specific first: StatefulDataLoader subclasses DataLoader, and everything is iterable.
BACKENDS = (
    Backend("midepoch.adapters.dali.sampled:SampledAdapter", "nvidia.dali"),
    Backend("midepoch.adapters.dali.native:NativeAdapter", "nvidia.dali"),
    Backend("midepoch.adapters.dali.native:NativeAdapter", "midepoch.adapters.dali"),  # a factory
    Backend("midepoch.adapters.dali.holder:HolderAdapter", "nvidia.dali.plugin", holds=True),
    Backend("midepoch.adapters.dali.holder:HolderAdapter", "nvidia.dali.experimental.dynamic", holds=True),
    Backend("midepoch.adapters.ffcv:FFCVAdapter", "ffcv"),
    Backend(
        "midepoch.adapters.webdataset:WebDatasetAdapter",
        "webdataset",
        settings=frozenset({"index_cache", "progress", "refill", "streams"}),
    ),
    Backend("midepoch.adapters.streaming:StreamingAdapter", "streaming"),
    Backend("midepoch.adapters.dataloader:MapDataLoaderAdapter"),
    Backend("midepoch.adapters.stateful:StreamAdapter"),
    Backend("midepoch.adapters.dataloader:IterableDataLoaderAdapter"),
    Backend("midepoch.adapters.stateful:TorchdataAdapter", "torchdata"),
    Backend("midepoch.adapters.stateful:DatasetsAdapter", "datasets"),
    Backend("midepoch.adapters.stateful:ElasticGrainAdapter", "grain"),
    Backend("midepoch.adapters.stateful:GrainAdapter", "grain"),
    Backend("midepoch.adapters.stateful:LitDataAdapter", "litdata"),
    Backend("midepoch.adapters.stateful:EnergonAdapter", "megatron.energon"),
    Backend("midepoch.adapters.stateful:StatefulAdapter"),
    Backend("midepoch.adapters.iterable:SequenceAdapter"),
    Backend("midepoch.adapters.iterable:PlainIterableAdapter"),
)

# Trainers that count or skip batches by themselves: the module that asks a loader for an iterator, or tells it the
# epoch, and a function of the loader and the calling frame, which compares this with the loader's place. It may warn or
# raise an error, and must not keep the frame.
COUNTING_TRAINERS = {
    "ignite.engine.deterministic": "midepoch.trainers.ignite:refuse_to_be_skipped",
    "lightning.fabric.utilities.data": "midepoch.trainers.lightning_alone:warn_unless_exact",
    "lightning.pytorch.utilities.combined_loader": "midepoch.trainers.lightning_alone:warn_unless_exact",
    "lightning_fabric.utilities.data": "midepoch.trainers.lightning_alone:warn_unless_exact",
    "pytorch_lightning.utilities.combined_loader": "midepoch.trainers.lightning_alone:warn_unless_exact",
    "transformers.trainer": "midepoch.trainers.transformers_alone:warn_unless_exact",
}

# Modules of the loaders that a trainer returns for one that it was given: the call, and what moves a batch to a device.
PREPARED_BY = {
    "accelerate.data_loader": (
        "accelerator.prepare", "lambda batch: accelerate.utils.send_to_device(batch, accelerator.device)",
    ),
    "lightning.fabric.wrappers": ("fabric.setup_dataloaders", "fabric.to_device"),
    "lightning_fabric.wrappers": ("fabric.setup_dataloaders", "fabric.to_device"),
}  # fmt: skip

# Modules that register collate functions with torch's default_collate when they are imported. These draw nothing. With
# any other, every loader of the process seeds all generators for each batch.
DRAWLESS_COLLATES = frozenset({"nvidia.dali.plugin.pytorch.experimental.proxy"})

# Subclasses of torch's samplers that have the order of their parent, and add a state.
SAMPLERS_LIKE_THEIR_PARENT = frozenset({("torchdata.stateful_dataloader.sampler", "StatefulDistributedSampler")})
