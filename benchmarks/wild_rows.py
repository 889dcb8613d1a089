"""Loaders of third-party packages, each as its users write it, and what one process does with one of them.

Run by ``wild.py``, with the folder of the row's package on the path: ``python wild_rows.py JOB ROW FILE``.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)
from wild_backends import BACKENDS
from wild_row import BATCH, CUT, KEPT, SEED, SIZE, Row, first_column, loader, text
from wild_states import STATES

import midepoch
from midepoch.order import Endless, Sequential, Shuffled
from midepoch.testing import check_resumable
from midepoch.testing.naming import Naming
from support import wild_sources as wild
from support.sources import Noisy

# --- packages ---------------------------------------------------------------------------------------------------------


def pyg() -> Any:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as PyG

    class Graphs(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Any:
            return Data(x=torch.tensor([[float(index), random.random(), float(torch.rand(()))]]))

    return PyG(Graphs(), batch_size=BATCH, shuffle=True)


def neighbours(**keywords: Any) -> Any:
    """A loader of subgraphs, with a sampler of its own: torch_geometric's are compiled, in other packages."""
    import wild_graphs

    return wild_graphs.loader(SIZE, BATCH, **keywords)


def roots(batch: Any) -> list[int]:
    """The nodes whose neighbours a subgraph has."""
    return [int(node) for node in batch.input_id]


class Pictures(Dataset[Any]):
    """As timm's datasets give them to its collate functions."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return np.full((3, 16, 16), index, dtype=np.uint8) + np.random.randint(0, 3, dtype=np.uint8), index


def timm(prefetch: bool, keeps: bool, mixup: bool, **keywords: Any) -> Any:
    import cpu_torchvision  # noqa: F401  # the real package; only the operators of its compiled part are missing
    from timm.data.loader import MultiEpochsDataLoader, PrefetchLoader, fast_collate
    from timm.data.mixup import FastCollateMixup

    collate: Any = FastCollateMixup(mixup_alpha=1.0, cutmix_alpha=1.0, num_classes=SIZE) if mixup else fast_collate
    kind: Any = MultiEpochsDataLoader if keeps else DataLoader
    inside = kind(Pictures(), batch_size=BATCH, shuffle=True, collate_fn=collate, **keywords)
    if not prefetch:
        return inside
    return PrefetchLoader(inside, device=torch.device("cpu"), re_prob=0.5, re_mode="pixel")


def second(batch: Any) -> list[int]:
    return [int(target) for target in batch[1]]


def timm_repeated() -> Any:
    import cpu_torchvision  # noqa: F401
    from timm.data.distributed_sampler import RepeatAugSampler

    sampler: Any = RepeatAugSampler(Noisy(SIZE), num_replicas=1, rank=0, selected_round=0)
    return DataLoader(Noisy(SIZE), BATCH, sampler=sampler)


def ultralytics(**keywords: Any) -> Any:
    import cpu_torchvision  # noqa: F401
    from ultralytics.data.build import InfiniteDataLoader

    return loader(InfiniteDataLoader, **keywords)


def fastai() -> Any:
    import cpu_torchvision  # noqa: F401
    from fastai.data.load import DataLoader as Fast

    return Fast([torch.tensor([float(index)]) for index in range(SIZE)], bs=BATCH, shuffle=True)


class Cuts(Dataset[Any]):
    """Says which cuts a batch has."""

    def __getitem__(self, cuts: Any) -> Any:
        return torch.tensor([[float(cut.id.split("-")[-1]), random.random()] for cut in cuts])


def lhotse(kind: str, wrapped: bool = False, shuffle: bool = True) -> Any:
    from lhotse import CutSet
    from lhotse.dataset import IterableDatasetWrapper, sampling
    from lhotse.testing.dummies import dummy_cut

    cuts = CutSet.from_cuts(dummy_cut(index, duration=1.0 + index % 3) for index in range(SIZE))
    options = {"num_buckets": 2, "buffer_size": 20} if "Bucketing" in kind else {}
    sampler = getattr(sampling, kind)(cuts, max_duration=8.0, shuffle=shuffle, world_size=1, rank=0, **options)
    if wrapped:
        return DataLoader(IterableDatasetWrapper(Cuts(), sampler), batch_size=None)
    return DataLoader(Cuts(), sampler=sampler, batch_size=None)


def mmengine(kind: str, **keywords: Any) -> Any:
    from mmengine.dataset import sampler

    data = Noisy(SIZE)
    return DataLoader(data, BATCH, sampler=getattr(sampler, kind)(data, seed=SEED, **keywords))


def metric_learning() -> Any:
    from pytorch_metric_learning.samplers import MPerClassSampler

    labels = [index % 4 for index in range(SIZE)]
    return DataLoader(Noisy(SIZE), 8, sampler=MPerClassSampler(labels, m=2, batch_size=8, length_before_new_iter=24))


def sentence_transformers() -> Any:
    from datasets import Dataset as Table
    from sentence_transformers.base.sampler import NoDuplicatesBatchSampler

    rows = Table.from_dict({"number": list(range(SIZE)), "text": [f"text {index % 20}" for index in range(SIZE)]})
    sampler = NoDuplicatesBatchSampler(rows, batch_size=BATCH, drop_last=False, generator=torch.Generator(), seed=1)
    return DataLoader(rows.with_format("torch"), batch_sampler=sampler)


def kornia() -> Any:
    import cpu_torchvision  # noqa: F401
    from kornia.augmentation import RandomGaussianNoise

    noise = RandomGaussianNoise(std=0.001, p=1.0)

    class Tensors(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Any:
            return torch.tensor([float(index)]), noise(torch.ones(1, 3, 4, 4))[0]

    return DataLoader(Tensors(), BATCH, shuffle=True)


def formatted() -> Any:
    from datasets import Dataset as Table

    return DataLoader(Table.from_dict({"number": list(range(SIZE))}).with_format("torch"), BATCH, shuffle=True)


def formatted_numbers(batch: Any) -> list[int]:
    return [int(number) for number in batch["number"]]


def imbalanced() -> Any:
    import cpu_torchvision  # noqa: F401
    from torchsampler import ImbalancedDatasetSampler

    labels = [int(index > 19) for index in range(SIZE)]
    return DataLoader(Noisy(SIZE), BATCH, sampler=ImbalancedDatasetSampler(Noisy(SIZE), labels=labels))


def huggingface(**keywords: Any) -> Any:
    from datasets import Dataset as Table

    rows = Table.from_dict({"number": list(range(SIZE))})
    rows.set_transform(lambda batch: {"number": [torch.tensor([n, random.random()]) for n in batch["number"]]})
    return DataLoader(rows, BATCH, shuffle=True, **keywords)


def open_clip() -> Any:
    import cpu_torchvision  # noqa: F401
    import PIL.Image
    from open_clip_train.data import CsvDataset

    folder = Path.cwd()
    for index in range(SIZE):
        PIL.Image.new("L", (2, 2), index).save(folder / f"{index}.png")
    rows = "".join(f"{folder}/{index}.png\tcaption {index}\n" for index in range(SIZE))
    (folder / "captions.csv").write_text(f"file\tcaption\n{rows}")
    table = str(folder / "captions.csv")
    rows_of = CsvDataset(table, noisy_pixel, "file", "caption", tokenizer=lambda texts: torch.tensor([[len(texts)]]))
    return DataLoader(rows_of, batch_size=BATCH, shuffle=True, num_workers=1, drop_last=False)


def noisy_pixel(image: Any) -> Any:
    return torch.tensor([float(image.getpixel((0, 0))), random.random()])


def nodes() -> Any:
    from torchdata import nodes as blocks

    source = blocks.SamplerWrapper(RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(1)))
    numbers = blocks.Mapper(source, lambda index: torch.tensor([float(index)]))
    return blocks.Loader(blocks.Mapper(blocks.Batcher(numbers, BATCH, drop_last=False), torch.stack))


def own(name: str) -> Any:
    from support import own_state_sources

    return own_state_sources.WRAPPED[name]()


def streaming() -> Any:
    from support import streaming_sources

    return streaming_sources.make_loader(0, SEED, SIZE)


def identify_own(batch: Any) -> list[int]:
    from support import own_state_sources

    return list(own_state_sources.identify(batch))


# --- written after published sources that cannot be installed here ----------------------------------------------------


class InferenceSampler(torch.utils.data.Sampler[int]):
    """Each rank's part in order, fixed when it is made. It asks torch.distributed for the rank, as `ranks` here."""

    def __init__(self, size: int, ranks: tuple[int, int] = (0, 1)) -> None:
        self._size = size
        self._rank, self._world_size = rank, world_size = ranks
        share, left = divmod(size, world_size)
        sizes = [share + int(each < left) for each in range(world_size)]
        self._local_indices = range(sum(sizes[:rank]), min(sum(sizes[: rank + 1]), size))

    def __iter__(self) -> Iterator[int]:
        yield from self._local_indices

    def __len__(self) -> int:
        return len(self._local_indices)


class Batches(torch.utils.data.Sampler[list[int]]):
    """Of the indices of another sampler, which has a name of its own."""

    def __init__(self, source: Any) -> None:
        self.index_source = source

    def __iter__(self) -> Iterator[list[int]]:
        yield from BatchSampler(self.index_source, BATCH, drop_last=False)

    def __len__(self) -> int:
        return -(-len(self.index_source) // BATCH)


class Buckets(torch.utils.data.Sampler[list[int]]):
    """Of samples of equal length; shuffles its own list of batches."""

    def __init__(self, lengths: list[int]) -> None:
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class AspectRatioGroupedDataset(torch.utils.data.IterableDataset[Any]):
    """Groups what another dataset gives in two buckets."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size

    def __iter__(self) -> Iterator[Any]:
        buckets: list[list[Any]] = [[], []]
        for sample in self.dataset:
            bucket = buckets[int(sample[0]) % 2]
            bucket.append(sample)
            if len(bucket) == self.batch_size:
                yield torch.stack(bucket)
                bucket.clear()


class DataPrefetcher:
    """Reads the next batch when it gives one, as prefetchers to a device do."""

    def __init__(self, inside: Any) -> None:
        self.loader = inside

    def __iter__(self) -> DataPrefetcher:
        self.batches = iter(self.loader)
        self.preload()
        return self

    def preload(self) -> None:
        self.following = next(self.batches, None)

    def __next__(self) -> Any:
        batch = self.following
        if batch is None:
            raise StopIteration
        self.preload()
        return batch.float().sub_(0.0)


class DataLoaderX(DataLoader[Any]):
    """A subclass whose iterator a thread reads ahead."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(wild.InAThread(DataLoader.__iter__(self)))


def grouped(sampler: Any) -> Any:
    groups = [index % 2 for index in range(SIZE)]
    return DataLoader(Noisy(SIZE), batch_sampler=wild.GroupedBatchSampler(sampler, groups, BATCH))


def function_around(**keywords: Any) -> Any:
    inside = loader(**keywords)
    return lambda: enumerate(inside)


def numbered(batch: Any) -> list[int]:
    return first_column(batch[1])


def rare() -> Any:
    return lambda: noisy(sampler=wild.RepeatFactorTrainingSampler(SIZE, [1 + index % 2 for index in range(SIZE)]))


def halved(batch: Any) -> list[int]:
    return [index // 2 for index in first_column(batch)]


def noisy(**keywords: Any) -> Any:
    return DataLoader(Noisy(SIZE), BATCH, **keywords)


def declared(kind: type[Sequential | Shuffled]) -> Any:
    """As the refusal of an endless sampler says."""
    return noisy(sampler=midepoch.ResumableSampler(SIZE, shuffle=Endless(kind(SIZE)), seed=SEED))


def pretraining(kind: Any, **keywords: Any) -> Any:
    """A DataLoader over one of the samplers that language-model trainers bring."""
    return DataLoader(Noisy(SIZE), batch_sampler=kind(SIZE, 0, BATCH, **keywords))


DETECTRON2 = ("detectron2",)

ROWS: dict[str, Row] = {
    "torch WeightedRandomSampler": Row(
        lambda: noisy(sampler=WeightedRandomSampler([1.0 + index % 3 for index in range(SIZE)], SIZE)), drawn=True
    ),
    "torch RandomSampler with replacement": Row(
        lambda: noisy(sampler=RandomSampler(range(SIZE), replacement=True, num_samples=SIZE)), drawn=True
    ),
    "torch ConcatDataset of Subsets": Row(
        lambda: DataLoader(
            ConcatDataset([Subset(Noisy(SIZE), range(13)), Subset(Noisy(SIZE), range(13, SIZE))]), BATCH, shuffle=True
        )
    ),
    "torchsampler ImbalancedDatasetSampler": Row(imbalanced, ("torchsampler",), drawn=True),
    "a bucketing batch sampler that shuffles its own list": Row(
        lambda: DataLoader(Noisy(SIZE), batch_sampler=Buckets([index % 5 for index in range(SIZE)]))
    ),
    "a batch sampler over a DistributedSampler under another name": Row(
        lambda: DataLoader(Noisy(SIZE), batch_sampler=Batches(DistributedSampler(Noisy(SIZE), 2, 1)))
    ),
    "the same, built for one process": Row(
        lambda: DataLoader(Noisy(SIZE), batch_sampler=Batches(DistributedSampler(Noisy(SIZE), 1, 0)))
    ),
    "torch_geometric DataLoader": Row(pyg, ("torch_geometric",), identify=lambda batch: first_column(batch.x)),
    "torch_geometric NodeLoader": Row(neighbours, ("torch_geometric",), {"inside": ""}, identify=roots),
    "torch_geometric NodeLoader, kept workers": Row(
        lambda: neighbours(**KEPT), ("torch_geometric",), {"inside": ""}, identify=roots
    ),
    "torch_geometric NodeLoader, not declared": Row(neighbours, ("torch_geometric",), identify=roots),
    "torch_geometric NodeLoader, kept workers, not declared": Row(
        lambda: neighbours(**KEPT), ("torch_geometric",), identify=roots
    ),
    "timm loader with mixup and cutmix": Row(lambda: timm(False, False, True), ("timm",), identify=None),
    "timm MultiEpochsDataLoader": Row(
        lambda: timm(False, True, False), ("timm",), {"inside": ""}, identify=second
    ),
    "timm MultiEpochsDataLoader, workers": Row(
        lambda: timm(False, True, False, num_workers=1), ("timm",), {"inside": ""}, identify=second
    ),
    "timm PrefetchLoader, random erasing": Row(
        lambda: timm(True, False, False), ("timm",), {"inside": "loader"}, identify=second
    ),
    "timm PrefetchLoader over MultiEpochsDataLoader, random erasing, mixup and cutmix, kept workers": Row(
        lambda: timm(True, True, True, **KEPT), ("timm",), {"inside": "loader"}, identify=None
    ),
    "timm RepeatAugSampler, built for one process": Row(timm_repeated, ("timm",)),
    "ultralytics InfiniteDataLoader": Row(ultralytics, ("ultralytics",), {"inside": ""}),
    "ultralytics InfiniteDataLoader, kept workers": Row(
        lambda: ultralytics(**KEPT), ("ultralytics",), {"inside": ""}
    ),
    "fastai DataLoader": Row(fastai, ("fastai",)),
    "lhotse SimpleCutSampler": Row(lambda: lhotse("SimpleCutSampler"), ("lhotse",)),
    "lhotse DynamicCutSampler": Row(lambda: lhotse("DynamicCutSampler"), ("lhotse",)),
    "lhotse DynamicBucketingSampler": Row(lambda: lhotse("DynamicBucketingSampler"), ("lhotse",)),
    "lhotse IterableDatasetWrapper": Row(lambda: lhotse("DynamicBucketingSampler", wrapped=True), ("lhotse",)),
    "mmengine DefaultSampler": Row(lambda: mmengine("DefaultSampler"), ("mmengine",)),
    "mmengine InfiniteSampler": Row(lambda: mmengine("InfiniteSampler"), ("mmengine",), batches=14),
    "mmengine InfiniteSampler, in order": Row(
        lambda: mmengine("InfiniteSampler", shuffle=False), ("mmengine",), batches=14, in_order=True
    ),
    "ResumableSampler with Endless, in place of an endless sampler": Row(lambda: declared(Shuffled), batches=14),
    "ResumableSampler with Endless, in place of an endless sampler in order": Row(
        lambda: declared(Sequential), batches=14, in_order=True
    ),
    "pytorch-metric-learning MPerClassSampler": Row(metric_learning, ("pytorch_metric_learning",), drawn=True),
    "sentence-transformers NoDuplicatesBatchSampler": Row(sentence_transformers, ("sentence_transformers", "datasets")),
    "kornia augmentation in a dataset": Row(kornia, ("kornia",)),
    "Hugging Face Dataset, with_format": Row(formatted, ("datasets",), identify=formatted_numbers),
    "Hugging Face Dataset, set_transform": Row(huggingface, ("datasets",)),
    "Hugging Face Dataset, set_transform, kept workers": Row(lambda: huggingface(**KEPT), ("datasets",)),
    **{
        f"{name}, wrapped": Row(lambda name=name: own(name), (package,), identify=identify_own)  # type: ignore[misc]
        for name, package in {
            "torchdata StatefulDataLoader": "torchdata",
            "Hugging Face IterableDataset": "datasets",
            "Grain DataLoader": "grain",
            "Grain IterDataset": "grain",
            "LitData StreamingDataLoader": "litdata",
        }.items()
    },
    "mosaicml-streaming StreamingDataLoader": Row(streaming, ("mosaicml-streaming",), identify=identify_own),
    "torchdata.nodes Loader": Row(nodes, ("torchdata",)),
    "open_clip CsvDataset": Row(open_clip, ("open_clip",)),
    "detectron2 TrainingSampler": Row(
        lambda: DataLoader(Noisy(SIZE), BATCH, sampler=wild.TrainingSampler(SIZE)), DETECTRON2, batches=14
    ),
    "detectron2 TrainingSampler, in order": Row(
        lambda: noisy(sampler=wild.TrainingSampler(SIZE, False)), DETECTRON2, batches=14, in_order=True
    ),
    "detectron2 RepeatFactorTrainingSampler": Row(lambda: rare()(), DETECTRON2, batches=14),
    "detectron2 RepeatFactorTrainingSampler, in a function": Row(rare, DETECTRON2, batches=14, drawn=True),
    "detectron2 InferenceSampler, one of two ranks": Row(
        lambda: DataLoader(Noisy(SIZE), BATCH, sampler=InferenceSampler(SIZE, (1, 2))), DETECTRON2
    ),
    "detectron2 InferenceSampler, one process": Row(
        lambda: DataLoader(Noisy(SIZE), BATCH, sampler=InferenceSampler(SIZE)), DETECTRON2, in_order=True
    ),
    "detectron2 GroupedBatchSampler over RandomSampler": Row(
        lambda: grouped(RandomSampler(range(SIZE))), DETECTRON2, drawn=True
    ),
    "detectron2 GroupedBatchSampler over TrainingSampler": Row(
        lambda: grouped(wild.TrainingSampler(SIZE)), DETECTRON2, batches=14, identify=None
    ),
    "detectron2 GroupedBatchSampler over TrainingSampler, in a function": Row(
        lambda: lambda: grouped(wild.TrainingSampler(SIZE)), DETECTRON2, batches=14, identify=None
    ),
    "detectron2 AspectRatioGroupedDataset over a DataLoader": Row(
        lambda: AspectRatioGroupedDataset(DataLoader(Noisy(SIZE), batch_size=None, shuffle=True), BATCH), DETECTRON2,
        identify=None,
    ),  # which samples do not fill a last batch depends on the order
    "a pretraining sampler as Megatron-LM's, one process": Row(lambda: pretraining(wild.Pretraining)),
    "a pretraining sampler that counts what it consumes, as Megatron-LM's, one process": Row(
        lambda: pretraining(wild.PretrainingAtRandom)
    ),
    "a pretraining sampler that pads with index -1, as NeMo's, one process": Row(
        lambda: pretraining(wild.Pretraining, pad=True)
    ),
    "a pretraining sampler as Megatron-LM's, one of two ranks": Row(
        lambda: pretraining(wild.Pretraining, data_parallel_size=2)
    ),
    "apex data_prefetcher": Row(lambda: DataPrefetcher(loader()), ("apex",), {"inside": "loader"}),
    "apex data_prefetcher, kept workers": Row(lambda: DataPrefetcher(loader(**KEPT)), ("apex",), {"inside": "loader"}),
    "prefetch_generator's DataLoaderX": Row(lambda: loader(DataLoaderX), ("prefetch_generator",)),
    "to a device, kept workers": Row(lambda: wild.OnDevice(loader(**KEPT)), (), {"inside": "loader"}),
    "to a device, not declared": Row(lambda: wild.OnDevice(loader())),
    "to a device, kept workers, not declared": Row(lambda: wild.OnDevice(loader(**KEPT))),
    "lambda: enumerate(loader)": Row(function_around, identify=numbered),
    "lambda: enumerate(loader), kept workers": Row(lambda: function_around(**KEPT), identify=numbered),
    "a DataLoader subclass with an __iter__ of its own": Row(
        lambda: loader(wild.Doubling), (), {"inside": ""}, identify=halved
    ),
    "an object that holds an iterator of a DataLoader": Row(lambda: wild.OnDevice(iter(loader()))),
    "older YOLOv5: an iterator made in __init__": Row(lambda: loader(wild.KeepsFromTheStart), (), {"inside": ""}),
    **BACKENDS,
    **STATES,
}


# --- one process ------------------------------------------------------------------------------------------------------


def wrapped(row: Row, **options: Any) -> Any:
    made = row.make()
    if isinstance(made, midepoch.Loader):
        return made
    return midepoch.wrap(made, **{"seed": SEED, **row.options, **options})


def samples(row: Row, batches: Iterable[Any]) -> list[list[int]] | None:
    """The samples of each batch. Batches are looked at as they come: some loaders fill one buffer with all of them."""
    found = [row.identify(batch) if row.identify else [] for batch in batches]
    return found if row.identify else None


def flat(batches: list[list[int]] | None) -> list[int] | None:
    return None if batches is None else list(itertools.chain.from_iterable(batches))


def passes(row: Row, source: Any, epochs: int, note: Callable[[int, int], None]) -> list[list[str]]:
    found: list[list[str]] = []
    for epoch in range(epochs):
        found.append([])
        for batch in itertools.islice(source, row.batches):
            found[-1].append(text(batch))
            note(epoch, len(found[-1]))
        note(epoch, -1)
    return found


def bare(row: Row) -> dict[str, Any]:
    """An epoch of the loader by itself."""
    made = row.make()
    if isinstance(made, midepoch.Loader):
        made = made.source
    source = made() if callable(made) and not hasattr(made, "__iter__") else made
    return {"samples": flat(samples(row, itertools.islice(iter(source), row.batches)))}


def save(row: Row) -> dict[str, Any]:
    """Two epochs, saved in the middle, at the boundary and in the middle of the second."""
    states: dict[str, Any] = {}
    loader = wrapped(row)
    made = row.make()
    took = []
    for _ in range(3):
        since = time.perf_counter()
        midepoch.wrap(made, **({} if isinstance(made, midepoch.Loader) else row.options))
        took.append(time.perf_counter() - since)

    def note(epoch: int, batch: int) -> None:
        if (batch == CUT) or (batch == -1 and epoch == 0 and row.batches is None):
            states[f"{epoch} {batch}"] = loader.state_dict()

    epochs = passes(row, loader, 1 if row.batches else 2, note)
    following = {"0 2": epochs[0][CUT:]}
    if not row.batches:
        following |= {"0 -1": epochs[1], "1 2": epochs[1][CUT:]}
    told = loader.capabilities
    names = ("exact_order", "exact_augmentations", "constant_time_resume", "elastic_world", "elastic_workers")
    again = wrapped(row)
    batches = samples(row, itertools.islice(again, row.batches))
    # Of what is left, two ranks leave out what does not fill a batch for each, if the loader leaves such a batch out.
    left = flat(batches and batches[CUT:])
    size = again._adapter.facts.batch_size
    dropped = len(left) % (2 * size) if left and again._adapter.facts.drop_last else 0
    return {
        "states": states, "following": following, "adapter": loader._adapter.name,
        "capabilities": {name: [bool(getattr(told, name)), str(getattr(told, name))] for name in names},
        "samples": flat(batches), "left": left, "wrapping": min(took), "dropped": dropped,
    }  # fmt: skip


def made(name: str) -> Any:
    return wrapped(ROWS[name])


def identified(name: str, batch: Any) -> list[int]:
    identify = ROWS[name].identify
    return identify(batch) if identify else []


def undisturbed(name: str) -> dict[str, Any]:
    """Three passes beside three of the loader by itself."""
    told = Naming(blind=True) if ROWS[name].identify is None else functools.partial(identified, name)
    report = check_resumable(
        functools.partial(made, name), laws=["transparent"], world_sizes=(1,), quick=True, options=(), identify=told,
        raise_on_failure=False,
    )  # fmt: skip
    found = report["transparent"]
    why = found.reason if found.error is None else f"{found.error.expected}; {found.error.got.splitlines()[0]}"
    return {"status": found.status, "why": f"{found.error.place}: {why}" if found.error and found.error.place else why}


def resume(row: Row, saved: dict[str, Any]) -> dict[str, Any]:
    """Under other global seeds: the rest of each epoch, and on two ranks where that is claimed."""
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    found: dict[str, Any] = {}
    for place, state in saved["states"].items():
        loader = wrapped(row)
        try:
            loader.load_state_dict(state)
            expected = len(saved["following"][place])
            found[place] = [text(batch) for batch in itertools.islice(loader, expected if row.batches else None)]
        except midepoch.MidepochError as error:
            found[place] = f"{type(error).__name__}: {error}"
    ranks: Any = None
    if saved["capabilities"]["elastic_world"][0] and row.identify is not None and not row.batches:
        ranks = []
        for rank in range(2):
            loader = wrapped(row, world=midepoch.World(rank, 2))
            try:
                loader.load_state_dict(saved["states"]["0 2"])
                ranks += flat(samples(row, loader)) or []
            except midepoch.UnsupportedSourceError:  # it divides its data itself, and knows of no other rank
                ranks = None
                break
    return {"rest": found, "ranks": ranks}


def main() -> None:
    job, name, path = sys.argv[1:4]
    row = ROWS[name]
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if job == "resume":
                found = resume(row, json.loads(Path(sys.argv[4]).read_text()))
            elif job == "undisturbed":
                found = undisturbed(name)
            else:
                found = {"bare": bare, "save": save}[job](row)
        except Exception as error:  # noqa: BLE001  # it is a verdict
            found = {"error": f"{type(error).__name__}: {error}"}
    found["told"] = [str(each.message) for each in caught if issubclass(each.category, midepoch.MidepochWarning)]
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
