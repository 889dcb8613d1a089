"""Rows of sources that keep their own state, and of DALI through other fronts. Their data lie in the current folder."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler
from wild_backends import dali, energon, texts
from wild_row import BATCH, SIZE, Row


def drawing_nodes(sampler: bool = True, prefetch: bool = False) -> Any:
    from torchdata import nodes as blocks

    generator = torch.Generator().manual_seed(1) if sampler else None
    node: Any = blocks.SamplerWrapper(RandomSampler(range(SIZE), generator=generator))
    node = blocks.Mapper(blocks.Batcher(blocks.Mapper(node, noisy_number), BATCH, drop_last=False), torch.stack)
    return blocks.Loader(blocks.Prefetcher(node, 2) if prefetch else node)


def read_again(**options: Any) -> Any:
    """In a function that makes the loader anew."""
    return lambda: functools.partial(drawing_nodes, **options)


def noisy_number(index: int) -> Any:
    return torch.tensor([float(index), random.random(), float(torch.rand(()))])


def rows_in_torchdata(buffer: bool) -> Any:
    from support import own_state_sources

    return own_state_sources.rows_inside(buffer)


def identify_own(batch: Any) -> list[int]:
    from support import own_state_sources

    return list(own_state_sources.identify(batch))


class Reshapes:
    """As DALIWrapper of NVIDIA's examples, and it draws."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inside:
            yield batch[0]["number"], batch[0]["drawn"] + random.random()
        self.inside.reset()


def arrays() -> list[str]:
    """Files of one number each."""
    dali()
    return [str(Path.cwd() / "npy" / f"{number:03}.npy") for number in range(SIZE)]


def dali_wrapper() -> Any:
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    files = arrays()

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=3)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        number = fn.readers.numpy(files=files, name="Reader", random_shuffle=True, pad_last_batch=True)
        return number, fn.random.uniform()

    names, policy = ["number", "drawn"], LastBatchPolicy.PARTIAL
    return Reshapes(DALIGenericIterator([pipeline()], names, reader_name="Reader", last_batch_policy=policy))


def dali_epochs() -> Any:
    import nvidia.dali.experimental.dynamic as ndd

    files = arrays()

    def batches() -> Any:
        reader = ndd.readers.Numpy(files=files, random_shuffle=True, seed=random.getrandbits(31))
        return reader.next_epoch(batch_size=BATCH)

    return batches


def numbers_of(batch: Any) -> list[int]:
    """Of what a dynamic reader gives, or of what `then=` has made of it."""
    return batch if isinstance(batch, list) else [int(np.asarray(each).flatten()[0]) for each in batch[0]]


STATES: dict[str, Row] = {
    "torchdata.nodes Loader, a sampler's generator and draws in a Mapper, in a function": Row(
        read_again(), ("torchdata",)
    ),
    "torchdata.nodes Loader, a sampler without a generator, in a function": Row(
        read_again(sampler=False), ("torchdata",)
    ),
    "torchdata.nodes Loader, draws in a Prefetcher's thread, in a function": Row(
        read_again(prefetch=True), ("torchdata",)
    ),
    "StatefulDataLoader of Hugging Face rows": Row(
        lambda: rows_in_torchdata(False), ("torchdata", "datasets"), identify=identify_own
    ),
    "StatefulDataLoader of shuffled Hugging Face rows": Row(
        lambda: rows_in_torchdata(True), ("torchdata", "datasets"), identify=identify_own
    ),
    "megatron-energon get_savable_loader, two workers, one pass without an end": Row(
        lambda: energon(workers=2), ("energon",), identify=texts, batches=14, drawn=True
    ),
    "DALIWrapper of NVIDIA's examples": Row(
        dali_wrapper, ("nvidia-dali-cuda120",), {"inside": "inside"},
        identify=lambda batch: [int(each) for each in batch[0].flatten()]
    ),
    "DALI ndd reader, made in a function": Row(
        dali_epochs, ("nvidia-dali-cuda120",), {"then": numbers_of}, identify=numbers_of, drawn=True
    ),  # a last batch is filled from the next epoch
}
