"""The parts of FFCV that midepoch uses and FFCV does not promise. They are checked on import.

FFCV has no interface for three things midepoch needs: starting in mid-epoch, calling its compiled operations, and
seeing errors of its thread. So midepoch uses its parts one by one, as they are in version 1.0.2. That is the code on
PyPI; the repository differs, and ``ffcv.__version__`` is different again.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

from midepoch.packages import Package

__all__ = ["FROM_THE_FILE", "Kind", "check_loader", "kind_of", "parts", "requirements"]

_FFCV = Package("FFCV", ("ffcv",), ("1.0.2", "1.0.2"))

_PARTS = {
    "Loader": "ffcv.loader.loader:Loader",
    "Compiler": "ffcv.pipeline.compiler:Compiler",  # generate_code() calls its num_threads and get_iterator
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

# The parts of a Loader, besides its arguments, that `check_loader` looks for.
_OF_A_LOADER = (
    "batch_size", "batches_ahead", "distributed", "drop_last", "fname", "graph.adjacency_list",
    "graph.collect_requirements", "graph.fieldname_to_fix", "graph.leaf_nodes", "graph.memory_read", "indices",
    "memory_manager.schedule_epoch", "num_workers", "reader.alloc_table", "reader.field_descriptors", "reader.handlers",
    "reader.header", "reader.metadata", "reader.num_samples", "reader.page_size", "recompile", "seed",
    "traversal_order",
)  # fmt: skip

FROM_THE_FILE = ("metadata", "memory_read", "field")
"""Attributes in which an operation keeps what FFCV told it about the file."""

Kind = Literal["nothing", "sample", "image", "bytes", "mix", "module", "unknown"]
"""What an operation draws. "nothing" and "sample" are as in `declare`. "image" is an image decoder, which draws for
each sample if it crops. "bytes" draws nothing, but leaves old bytes after a shorter sample. "mix" mixes samples.
"module" is a torch module, which may draw anything."""

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


_FOUND = SimpleNamespace(**{name: _FFCV.part(path) for name, path in _PARTS.items()})
_FOUND_KINDS: dict[Any, Kind] = {_FFCV.part(path): kind for path, kind in _KINDS.items()}


def parts() -> Any:
    """The parts of FFCV, by name."""
    return _FOUND


def check_loader(loader: Any) -> None:
    """Raise UnsupportedSourceError unless `loader` has all parts that midepoch uses."""
    _FFCV.check(loader, *_OF_A_LOADER)


def kind_of(operation: type) -> Kind:
    """What the operations of a class draw. It depends on the class that defines its ``generate_code``."""
    for kind in operation.__mro__:
        if "generate_code" in vars(kind):
            return _FOUND_KINDS.get(kind, "unknown")
    return "unknown"


def requirements(loader: Any) -> tuple[Any, Any]:
    """The memory that a Loader's operations request, and the functions that they generate."""
    with _as_many_threads(loader.num_workers), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # shown already when the Loader was made
        allocations, functions = loader.graph.collect_requirements()
    return allocations, functions


@contextlib.contextmanager
def _as_many_threads(number: int) -> Iterator[None]:
    """In generate_code(), operations ask FFCV's compiler whether to be parallel. Another Loader may have set it."""
    compiler = _FOUND.Compiler
    before = compiler.num_threads
    compiler.num_threads = number
    try:
        yield
    finally:
        compiler.num_threads = before
