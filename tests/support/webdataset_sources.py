"""Shards, and factories of wrapped webdataset pipelines for the laws. Each sample says who it is and what it drew."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import DataLoader

import midepoch
from support import law_sources
from support.law_sources import log_read
from support.law_sources import sample as drawn_for

SEED = 7
_UNEQUAL, _EQUAL = [4, 0, 5, 1, 3], [4] * 12  # samples in each shard


def write_shard(path: Path, numbers: range, size: int = 0) -> None:
    """A shard of samples ``{number}.cls`` (its number) and ``.bin`` (`size` bytes that follow from it)."""
    with wds.TarWriter(str(path)) as writer:
        for number in numbers:
            content = np.random.default_rng(number).bytes(size) if size else b"-"
            writer.write({"__key__": f"sample{number:06d}", "cls": str(number).encode(), "bin": content})


def make_shards(folder: Path, counts: list[int], size: int = 0) -> list[str]:
    """Shards of so many samples each, numbered through."""
    folder.mkdir(parents=True, exist_ok=True)
    first, urls = 0, []
    for shard, count in enumerate(counts):
        path = folder / f"shard-{shard:04d}.tar"
        write_shard(path, range(first, first + count), size)
        urls.append(str(path))
        first += count
    return urls


def compress(urls: list[str]) -> list[str]:
    for url in urls:
        Path(url + ".gz").write_bytes(gzip.compress(Path(url).read_bytes(), mtime=0))
    return [url + ".gz" for url in urls]


_FOLDER = Path(tempfile.gettempdir()) / f"midepoch-webdataset-{os.getuid()}"
# Indexes of the laws' shards are kept apart from the user's own, and from one law to the next.
os.environ.setdefault("MIDEPOCH_CACHE", str(_FOLDER / "c"))


def law_shards(name: str, counts: list[int]) -> list[str]:
    """Shards that all processes of a law find at one place; made by the first."""
    folder = _FOLDER / f"{name}-{'-'.join(map(str, counts))}"
    urls = [str(folder / f"shard-{shard:04d}.tar") for shard in range(len(counts))]
    if not folder.exists():
        made = _new_folder()
        compress(make_shards(made, counts))
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return urls


def _new_folder() -> Path:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=_FOLDER))


identify, draws, as_it_is = law_sources.identify, law_sources.draws, law_sources.as_it_is


def number(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def plain(urls: list[str] | str, **arguments: Any) -> Any:
    return wds.WebDataset(urls, **{"shardshuffle": False, **arguments})


def numbers(urls: list[str] | str, batch: int = 2, **arguments: Any) -> Any:
    """Batches of sample numbers, in order."""
    return plain(urls, **arguments).map(number).batched(batch, collation_fn=list)


def in_workers(dataset: Any, workers: int) -> Any:
    return DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=as_it_is)


class Reading:
    """A user's stage: the sample's number, and a number from every generator that code in a stage draws from."""

    def __init__(self, read_log: str | None = None) -> None:
        self.read_log, self.generator = read_log, np.random.default_rng(1)

    def __call__(self, sample: dict[str, Any]) -> torch.Tensor:
        log_read(self.read_log, number(sample))
        return drawn_for(number(sample), self.generator)


def stack(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


def indexed(
    *, rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = 2, seed: int = SEED,
    read_log: str | None = None, size: int = 13, items: list[Any] | None = None,
) -> midepoch.StatefulIterable:  # fmt: skip
    """13 samples in shards of unequal sizes, one of them empty, in a DataLoader."""
    if items is not None:
        return pickled(items, num_workers)
    urls = law_shards("indexed", [*_UNEQUAL, *([size - 13] if size > 13 else [])])
    dataset = wds.WebDataset(urls, shardshuffle=10, nodesplitter=wds.split_by_node).shuffle(100)
    dataset = dataset.map(Reading(read_log)).batched(batch_size, collation_fn=stack)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    return midepoch.wrap(loader, seed=seed, world=midepoch.World(rank, world_size))


def pickled(items: list[Any], num_workers: int) -> midepoch.StatefulIterable:
    folder = _new_folder()
    with wds.TarWriter(str(folder / "items.tar"), mtime=1) as writer:
        for number, item in enumerate(items):
            writer.write({"__key__": f"item{number:04d}", "item": pickle.dumps(item)})
    dataset = wds.WebDataset(str(folder / "items.tar"), shardshuffle=False).to_tuple("item").map_tuple(pickle.loads)
    dataset = dataset.batched(1, collation_fn=only)
    return midepoch.wrap(DataLoader(dataset, batch_size=None, num_workers=num_workers, collate_fn=as_it_is))


def only(samples: list[tuple[Any]]) -> Any:
    return samples[0][0]


def indexed_sequential(
    *, rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = 3, read_log: str | None = None
) -> midepoch.StatefulIterable:
    """In order, with the DataLoader's own batches, the last one left out."""
    urls = law_shards("indexed", _UNEQUAL)
    dataset = wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node).map(Reading(read_log))
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, drop_last=True)
    return midepoch.wrap(loader, seed=SEED, world=midepoch.World(rank, world_size), tail="drop")


def indexed_rebatched(
    *, rank: int = 0, world_size: int = 1, num_workers: int = 0, read_log: str | None = None
) -> midepoch.StatefulIterable:
    """A WebLoader that takes batches apart, shuffles across workers and batches again."""
    urls = law_shards("indexed", _UNEQUAL)
    dataset = wds.WebDataset(urls, shardshuffle=10, nodesplitter=wds.split_by_node).shuffle(5)
    dataset = dataset.map(Reading(read_log)).map(tuple_of).batched(4)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=num_workers)
    loader = loader.unbatched().shuffle(10).map(drawn_again).batched(3).map(first_of)
    return midepoch.wrap(loader, seed=SEED, world=midepoch.World(rank, world_size))


def tuple_of(sample: torch.Tensor) -> tuple[torch.Tensor]:
    return (sample,)


def drawn_again(sample: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (row,) = sample
    return (torch.cat([row[:1], row[1:] + random.random()]),)


def first_of(batch: tuple[torch.Tensor]) -> torch.Tensor:
    return batch[0]


def streamed(
    *, rank: int = 0, world_size: int = 1, num_workers: int = 0, batch_size: int = 2, seed: int = SEED,
    read_log: str | None = None,
) -> midepoch.StatefulIterable:  # fmt: skip
    """12 compressed shards; the training loop can bear that some ranks end earlier, though here none does."""
    urls = [url + ".gz" for url in law_shards("streamed", _EQUAL)]
    dataset = wds.WebDataset(urls, shardshuffle=100, nodesplitter=wds.split_by_node).shuffle(10)
    dataset = dataset.map(Reading(read_log)).batched(batch_size, collation_fn=stack)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    return midepoch.wrap(loader, seed=seed, world=midepoch.World(rank, world_size), tail="uneven")


def encoded(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()
