"""Everything midepoch relies on that FFCV does not promise, in one place, and checked before it is used.

FFCV has no interface for what is needed here: to start in the middle of an epoch, to reach its compiled operations, to
hear of errors in its thread. So its parts are used one by one, as they are in version 1.0.2 (the code on PyPI; its
repository differs, and ``ffcv.__version__`` says something else again).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from types import SimpleNamespace
from typing import Any, Literal

from midepoch.errors import UnsupportedSourceError

__all__ = ["VERSION", "Kind", "check_loader", "kind_of", "parts"]

VERSION = "1.0.2"

_PARTS = {
    "Loader": "ffcv.loader.loader:Loader",
    "Compiler": "ffcv.pipeline.compiler:Compiler",  # num_threads and get_iterator, which generate_code() asks
    "Operation": "ffcv.pipeline.operation:Operation",
    "DecoderNode": "ffcv.pipeline.graph:DecoderNode",
    "RefNode": "ffcv.pipeline.graph:RefNode",
    "PipelineSpec": "ffcv.pipeline.pipeline_spec:PipelineSpec",
    "allocate_query": "ffcv.pipeline.allocation_query:allocate_query",
    "AllocationQuery": "ffcv.pipeline.allocation_query:AllocationQuery",
    "ProcessCacheManager": "ffcv.memory_managers:ProcessCacheManager",
    "compute_schedule": "ffcv.memory_managers.process_cache.schedule:compute_schedule",
    "Random": "ffcv.traversal_order:Random",
    "Sequential": "ffcv.traversal_order:Sequential",
    "QuasiRandom": "ffcv.traversal_order:QuasiRandom",
    "RGBImageField": "ffcv.fields:RGBImageField",
    "BytesField": "ffcv.fields:BytesField",
    "NDArrayField": "ffcv.fields:NDArrayField",
    "Reader": "ffcv.reader:Reader",
    "HeaderType": "ffcv.types:HeaderType",
    "ALLOC_TABLE_TYPE": "ffcv.types:ALLOC_TABLE_TYPE",
    "ToDevice": "ffcv.transforms.ops:ToDevice",
    "SimpleRGBImageDecoder": "ffcv.fields.rgb_image:SimpleRGBImageDecoder",
    "CenterCropRGBImageDecoder": "ffcv.fields.rgb_image:CenterCropRGBImageDecoder",
    "IMAGE_MODES": "ffcv.fields.rgb_image:IMAGE_MODES",
    "imdecode": "ffcv.libffcv:imdecode",
    "resize_crop": "ffcv.libffcv:resize_crop",
    "memcpy": "ffcv.libffcv:memcpy",
}

# Of a Loader, beside its arguments: what `check_loader` looks for.
_OF_A_LOADER = (
    "batch_size", "batches_ahead", "distributed", "drop_last", "fname", "graph.adjacency_list",
    "graph.collect_requirements", "graph.fieldname_to_fix", "graph.leaf_nodes", "graph.memory_read", "indices",
    "memory_manager.schedule_epoch", "num_workers", "reader.alloc_table", "reader.field_descriptors", "reader.handlers",
    "reader.header", "reader.metadata", "reader.num_samples", "reader.page_size", "recompile", "seed",
    "traversal_order",
)  # fmt: skip

FROM_THE_FILE = ("metadata", "memory_read", "field")
"""Attributes in which an operation has what FFCV told it of the file."""

Kind = Literal["nothing", "sample", "image", "bytes", "mix", "module", "unknown"]
"""What an operation draws: nothing; for each sample; as a decoder of images; nothing, but it leaves old bytes behind;
one sample mixed with another; whatever a torch module draws."""

_KINDS: dict[str, Kind] = {
    "ffcv.fields.basics:BasicDecoder": "nothing",
    "ffcv.fields.ndarray:NDArrayDecoder": "nothing",
    "ffcv.fields.bytes:BytesDecoder": "bytes",
    "ffcv.fields.rgb_image:SimpleRGBImageDecoder": "image",
    "ffcv.fields.rgb_image:ResizedCropRGBImageDecoder": "image",
    "ffcv.transforms.common:Squeeze": "nothing",
    "ffcv.transforms.normalize:NormalizeImage": "nothing",
    "ffcv.transforms.ops:Convert": "nothing",
    "ffcv.transforms.ops:ToDevice": "nothing",
    "ffcv.transforms.ops:ToTensor": "nothing",
    "ffcv.transforms.ops:ToTorchImage": "nothing",
    "ffcv.transforms.ops:View": "nothing",
    "ffcv.transforms.poisoning:Poison": "nothing",
    "ffcv.transforms.replace_label:ReplaceLabel": "nothing",
    "ffcv.transforms.mixup:MixupToOneHot": "nothing",
    "ffcv.transforms.color_jitter:RandomBrightness": "sample",
    "ffcv.transforms.color_jitter:RandomContrast": "sample",
    "ffcv.transforms.color_jitter:RandomSaturation": "sample",
    "ffcv.transforms.cutout:Cutout": "sample",
    "ffcv.transforms.flip:RandomHorizontalFlip": "sample",
    "ffcv.transforms.random_resized_crop:RandomResizedCrop": "sample",
    "ffcv.transforms.translate:RandomTranslate": "sample",
    "ffcv.transforms.mixup:ImageMixup": "mix",
    "ffcv.transforms.mixup:LabelMixup": "mix",
    "ffcv.transforms.module:ModuleWrapper": "module",
}


@functools.cache
def parts() -> Any:
    """The parts of FFCV, by name.

    Raises:
        UnsupportedSourceError: another version is installed, or a part is not where it was.
    """
    installed = importlib.metadata.version("ffcv")
    if installed != VERSION:
        raise UnsupportedSourceError(
            f"FFCV {installed} is installed, and midepoch relies on private parts of FFCV {VERSION}: "
            f"pip install ffcv=={VERSION}"
        )
    return SimpleNamespace(**{name: _load(path) for name, path in _PARTS.items()})


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedSourceError(
            f"FFCV has no {path}, which midepoch relies on ({error}): pip install --force-reinstall ffcv=={VERSION}"
        ) from error


def check_loader(loader: Any) -> None:
    """Raise UnsupportedSourceError unless `loader` has all that is used of it."""
    for path in _OF_A_LOADER:
        found = loader
        for name in path.split("."):
            if not hasattr(found, name):
                raise UnsupportedSourceError(
                    f"this {type(loader).__name__} has no {path}, which a Loader of FFCV {VERSION} has: "
                    f"pip install --force-reinstall ffcv=={VERSION}"
                )
            found = getattr(found, name)


@functools.cache
def _kinds() -> dict[Any, Kind]:
    return {_load(path): kind for path, kind in _KINDS.items()}


def kind_of(operation: type) -> Kind:
    """What the operations of a class draw, by the class in which its ``generate_code`` is written."""
    for kind in operation.__mro__:
        if "generate_code" in vars(kind):
            return _kinds().get(kind, "unknown")
    return "unknown"
