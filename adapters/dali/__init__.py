"""NVIDIA DALI: iterators as they are, and pipelines fed by midepoch, which resume on any number of processes.

from midepoch.adapters import dali

@pipeline_def(batch_size=32, num_threads=4, device_id=dali.device_id())
def train():
    encoded, labels = dali.readers.file(file_root="train", random_shuffle=True)
    images = fn.decoders.image_slice(encoded, *dali.random.crop_window(encoded), axis_names="HW")
    return fn.crop_mirror_normalize(fn.resize(images, size=224), mirror=dali.random.coin_flip()), labels

loader = midepoch.wrap(DALIGenericIterator([train()], ["data", "label"]), seed=0)
"""

from __future__ import annotations

try:
    import nvidia.dali  # noqa: F401
except ImportError as error:
    raise ImportError(
        "midepoch.adapters.dali needs NVIDIA DALI: pip install nvidia-dali-cuda120 (or -cuda130)"
    ) from error

from midepoch.adapters.dali import random, readers
from midepoch.adapters.dali.native import factory
from midepoch.world import World

__all__ = ["device_id", "factory", "random", "readers"]


def device_id(world: World | None = None) -> int | None:
    """The GPU of this process, for ``pipeline_def(device_id=...)``: the one of its local rank, or None without a GPU.

    Args:
        world: None reads the current world. Call this where the pipeline is built, in the process that uses it.
    """
    device = (world or World.current()).device
    return device.index if device.type == "cuda" else None
