"""Loaders of third-party packages, each as its users write it, and what one process does with one of them.

Run by ``wild.py``, with the folder of the row's package on the path: ``python wild_rows.py JOB ROW FILE``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import random
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import torch
import wild_sources as wild
from resuming import text_of
from sources import Noisy
from torch.utils.data import DataLoader, Dataset, RandomSampler

import midepoch

SIZE, BATCH, SEED, CUT = 26, 4, 3, 2


def first_column(batch: Any) -> list[int]:
    """The samples of a batch whose first number is the sample's own."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return [int(row) for row in batch.reshape(len(batch), -1)[:, 0]]


def text(batch: Any) -> str:
    """A batch's content, the same in each process. A graph's objects refer to one another."""
    return text_of(batch.to_dict() if hasattr(batch, "edge_index") else batch)


class Row(NamedTuple):
    """One loader.

    Attributes:
        make: the source, or what is wrapped already.
        packages: whose code it is; the first one names its folder below .venv/wild, if it has one. None: written here
            after a published source that cannot be installed.
        options: for `midepoch.wrap`.
        identify: the samples of a batch; None if they cannot be told.
        batches: of one pass, if it does not end.
        in_order: the bare loader gives the same order.
    """

    make: Callable[[], Any]
    packages: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed
    identify: Callable[[Any], list[int]] | None = first_column
    batches: int | None = None
    in_order: bool = False


def loader(kind: Any = DataLoader, **keywords: Any) -> Any:
    """A DataLoader of this class over samples that draw from all global generators."""
    return kind(Noisy(SIZE), batch_size=BATCH, shuffle=True, **keywords)


KEPT = {"num_workers": 1, "persistent_workers": True}

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


def huggingface(**keywords: Any) -> Any:
    from datasets import Dataset as Table

    rows = Table.from_dict({"number": list(range(SIZE))})
    rows.set_transform(lambda batch: {"number": [torch.tensor([n, random.random()]) for n in batch["number"]]})
    return DataLoader(rows, BATCH, shuffle=True, **keywords)


def open_clip() -> Any:
    import cpu_torchvision  # noqa: F401
    import PIL.Image
    from open_clip_train.data import CsvDataset

    folder = Path(tempfile.mkdtemp())
    for index in range(SIZE):
        PIL.Image.new("L", (2, 2), index).save(folder / f"{index}.png")
    rows = "".join(f"{folder}/{index}.png\tcaption {index}\n" for index in range(SIZE))
    (folder / "captions.csv").write_text(f"file\tcaption\n{rows}")
    table = str(folder / "captions.csv")
    rows_of = CsvDataset(table, noisy_pixel, "file", "caption", tokenizer=lambda texts: torch.tensor([[len(texts)]]))
    return DataLoader(rows_of, batch_size=BATCH, shuffle=True, num_workers=1, drop_last=False)


def noisy_pixel(image: Any) -> Any:
    return torch.tensor([float(image.getpixel((0, 0))), random.random()])


def spdl() -> Any:
    from spdl.pipeline import PipelineBuilder

    def batches() -> Iterator[Any]:
        built = PipelineBuilder().add_source(range(SIZE)).pipe(float).aggregate(BATCH).add_sink(2)
        pipeline = built.build(num_threads=1)
        with pipeline.auto_stop():
            for numbers in pipeline.get_iterator(timeout=30):
                yield torch.tensor(numbers)[:, None]

    return batches


def nodes() -> Any:
    from torchdata import nodes as blocks

    source = blocks.SamplerWrapper(RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(1)))
    numbers = blocks.Mapper(source, lambda index: torch.tensor([float(index)]))
    return blocks.Loader(blocks.Mapper(blocks.Batcher(numbers, BATCH, drop_last=False), torch.stack))


def energon(num_workers: int = 0) -> Any:
    from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

    workers = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, seed_offset=SEED)
    options: dict[str, Any] = {"shuffle_buffer_size": 5, "max_samples_per_sequence": None}
    return get_savable_loader(
        get_train_dataset(written_for_energon(), worker_config=workers, batch_size=2, **options)
    )


def written_for_energon() -> Path:
    """A folder in Energon's format, kept on disk."""
    from megatron.energon.flavors import BaseWebdatasetFactory

    folder = Path(tempfile.gettempdir()) / f"midepoch-energon-{os.getuid()}-{SIZE}"
    if not (folder / ".nv-meta" / "dataset.yaml").exists():
        (folder / "parts").mkdir(parents=True, exist_ok=True)
        for shard in range(4):
            with tarfile.open(folder / "parts" / f"data-{shard}.tar", "w") as tar:
                for number in range(shard, SIZE, 4):
                    member = tarfile.TarInfo(f"{number:06d}.txt")
                    member.size = len(str(number))
                    tar.addfile(member, io.BytesIO(str(number).encode()))
        with contextlib.redirect_stdout(io.StringIO()):
            BaseWebdatasetFactory.prepare_dataset(
                folder, ["parts/data-{0..3}.tar"], split_parts_ratio=[("train", 1.0)], shuffle_seed=None
            )
        kind = "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
        (folder / ".nv-meta" / "dataset.yaml").write_text(kind)
    return folder


def texts(batch: Any) -> list[int]:
    return [int(each) for each in batch.text]


def own(name: str) -> Any:
    import own_state_sources

    return own_state_sources.WRAPPED[name]()


def streaming() -> Any:
    import streaming_sources

    return streaming_sources.make_loader(0, SEED, SIZE)


def identify_own(batch: Any) -> list[int]:
    import own_state_sources

    return list(own_state_sources.identify(batch))


# --- sources with a state of their own, and DALI ----------------------------------------------------------------------


def drawing_nodes(sampler: bool = True, prefetch: bool = False) -> Any:
    from torchdata import nodes as blocks

    generator = torch.Generator().manual_seed(1) if sampler else None
    node: Any = blocks.SamplerWrapper(RandomSampler(range(SIZE), generator=generator))
    node = blocks.Mapper(blocks.Batcher(blocks.Mapper(node, noisy_number), BATCH, drop_last=False), torch.stack)
    return blocks.Loader(blocks.Prefetcher(node, 2) if prefetch else node)


def noisy_number(index: int) -> Any:
    return torch.tensor([float(index), random.random(), float(torch.rand(()))])


def rows_in_torchdata(buffer: bool) -> Any:
    import own_state_sources

    return own_state_sources.rows_inside(buffer)


def grain_elastic() -> Any:
    import own_state_sources

    return own_state_sources.grain_elastic(size=SIZE - 2, together=BATCH)


def jax_iterator() -> Any:
    from nvidia.dali import fn
    from nvidia.dali.plugin.jax import data_iterator

    root = str(written_for_dali())

    def graph() -> Any:
        number = fn.readers.numpy(file_root=root, name="Reader", random_shuffle=True, seed=3, pad_last_batch=True)
        return number, fn.random.uniform(seed=4)

    define = data_iterator(graph, output_map=["number", "drawn"], reader_name="Reader")
    return define(batch_size=BATCH, device_id=None)


def written_for_dali() -> Path:
    """Arrays of one number each, kept on disk."""
    folder = Path(tempfile.gettempdir()) / f"midepoch-dali-{os.getuid()}-{SIZE}"
    folder.mkdir(exist_ok=True)
    for number in range(SIZE):
        np.save(folder / f"{number:03}.npy", np.array([number], np.int32))
    return folder


class Reshapes:
    """As DALIWrapper of NVIDIA's examples, and it draws."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inside:
            yield batch[0]["number"], batch[0]["drawn"] + random.random()
        self.inside.reset()


def dali_wrapper() -> Any:
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    root = str(written_for_dali())

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=3)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        number = fn.readers.numpy(file_root=root, name="Reader", random_shuffle=True, pad_last_batch=True)
        return number, fn.random.uniform()

    return Reshapes(DALIGenericIterator([pipeline()], ["number", "drawn"], reader_name="Reader"))


def dali_dynamic() -> Any:
    import nvidia.dali.experimental.dynamic as ndd

    reader = ndd.readers.Numpy(file_root=str(written_for_dali()), random_shuffle=True, seed=3, pad_last_batch=True)
    return functools.partial(reader.next_epoch, batch_size=BATCH)


def arrays(batch: Any) -> list[int]:
    number = batch["number"] if isinstance(batch, dict) else batch[0]
    return [int(np.asarray(each).flatten()[0]) for each in number]


def numbers_in(batch: Any) -> list[int]:
    return batch if isinstance(batch, list) else arrays(batch)


OWN_STATES: dict[str, Row] = {
    "torchdata.nodes Loader, a sampler's generator and draws in a Mapper": Row(drawing_nodes, ("torchdata",)),
    "torchdata.nodes Loader, a sampler without a generator": Row(lambda: drawing_nodes(False), ("torchdata",)),
    "torchdata.nodes Loader, draws in a Prefetcher's thread": Row(
        lambda: drawing_nodes(prefetch=True), ("torchdata",)
    ),
    "StatefulDataLoader of Hugging Face rows": Row(
        lambda: rows_in_torchdata(False), ("torchdata", "datasets"), identify=identify_own
    ),
    "StatefulDataLoader of shuffled Hugging Face rows": Row(
        lambda: rows_in_torchdata(True), ("torchdata", "datasets"), identify=identify_own
    ),
    "Grain ElasticIterator": Row(grain_elastic, ("grain",), identify=identify_own),
    "megatron-energon get_savable_loader, training": Row(energon, ("energon",), identify=None, batches=20),
    "megatron-energon get_savable_loader, training, workers": Row(
        lambda: energon(2), ("energon",), identify=None, batches=20
    ),
    "DALI's iterator for jax": Row(jax_iterator, ("jax", "nvidia-dali-cuda120"), identify=arrays),
    "DALIWrapper of NVIDIA's examples": Row(dali_wrapper, ("nvidia-dali-cuda120",), identify=arrays),
    "DALI's dynamic mode, a reader's epochs": Row(
        dali_dynamic, ("nvidia-dali-cuda120",), {"then": arrays}, identify=numbers_in
    ),
}


# --- written after published sources that cannot be installed here ----------------------------------------------------


class Inference(torch.utils.data.Sampler[int]):
    """Each rank's part in order, fixed when it is made."""

    def __init__(self, size: int, rank: int = 0, world_size: int = 1) -> None:
        self._size, self._rank, self._world_size = size, rank, world_size
        share, left = divmod(size, world_size)
        sizes = [share + int(each < left) for each in range(world_size)]
        self._local_indices = range(sum(sizes[:rank]), min(sum(sizes[: rank + 1]), size))

    def __iter__(self) -> Iterator[int]:
        yield from self._local_indices

    def __len__(self) -> int:
        return len(self._local_indices)


class ByRatio(torch.utils.data.IterableDataset[Any]):
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


class Apex:
    """Reads the next batch when it gives one, as prefetchers to a device do."""

    def __init__(self, inside: Any) -> None:
        self.loader = inside

    def __iter__(self) -> Apex:
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


class InBackground(DataLoader[Any]):
    """A subclass whose iterator a thread reads ahead."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(wild.InAThread(DataLoader.__iter__(self)))


def grouped(sampler: Any) -> Any:
    return DataLoader(Noisy(SIZE), batch_sampler=wild.Grouped(sampler, [index % 2 for index in range(SIZE)], BATCH))


def function_around(**keywords: Any) -> Any:
    inside = loader(**keywords)
    return lambda: enumerate(inside)


def numbered(batch: Any) -> list[int]:
    return first_column(batch[1])


DETECTRON2 = ("detectron2",)

ROWS: dict[str, Row] = {
    "torch_geometric DataLoader": Row(pyg, ("torch_geometric",), identify=lambda batch: first_column(batch.x)),
    "timm loader with mixup and cutmix": Row(lambda: timm(False, False, True), ("timm",), identify=None),
    "timm MultiEpochsDataLoader": Row(lambda: timm(False, True, False), ("timm",), identify=second),
    "timm MultiEpochsDataLoader, workers": Row(
        lambda: timm(False, True, False, num_workers=1), ("timm",), identify=second
    ),
    "timm PrefetchLoader, random erasing": Row(lambda: timm(True, False, False), ("timm",), identify=second),
    "timm PrefetchLoader over MultiEpochsDataLoader, random erasing, mixup and cutmix, kept workers": Row(
        lambda: timm(True, True, True, **KEPT), ("timm",), identify=None
    ),
    "timm RepeatAugSampler, built for one process": Row(timm_repeated, ("timm",)),
    "ultralytics InfiniteDataLoader": Row(ultralytics, ("ultralytics",)),
    "ultralytics InfiniteDataLoader, kept workers": Row(lambda: ultralytics(**KEPT), ("ultralytics",)),
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
    "pytorch-metric-learning MPerClassSampler": Row(metric_learning, ("pytorch_metric_learning",), identify=None),
    "sentence-transformers NoDuplicatesBatchSampler": Row(sentence_transformers, ("sentence_transformers", "datasets")),
    "kornia augmentation in a dataset": Row(kornia, ("kornia",)),
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
    "SPDL pipeline without randomness, in a function": Row(spdl, ("spdl",), in_order=True),
    **OWN_STATES,
    "detectron2 TrainingSampler": Row(
        lambda: DataLoader(Noisy(SIZE), BATCH, sampler=wild.Rounds(SIZE)), DETECTRON2, batches=14
    ),
    "detectron2 TrainingSampler, in order": Row(
        lambda: DataLoader(Noisy(SIZE), BATCH, sampler=wild.Rounds(SIZE, False)), DETECTRON2, batches=14, in_order=True
    ),
    "detectron2 RepeatFactorTrainingSampler": Row(
        lambda: DataLoader(Noisy(SIZE), BATCH, sampler=wild.Rare(SIZE, [1 + index % 2 for index in range(SIZE)])),
        DETECTRON2, batches=14,
    ),
    "detectron2 InferenceSampler, one of two ranks": Row(
        lambda: DataLoader(Noisy(SIZE), BATCH, sampler=Inference(SIZE, 1, 2)), DETECTRON2
    ),
    "detectron2 InferenceSampler, one process": Row(
        lambda: DataLoader(Noisy(SIZE), BATCH, sampler=Inference(SIZE)), DETECTRON2, in_order=True
    ),
    "detectron2 GroupedBatchSampler over RandomSampler": Row(
        lambda: grouped(RandomSampler(range(SIZE))), DETECTRON2, identify=None
    ),
    "detectron2 GroupedBatchSampler over TrainingSampler": Row(
        lambda: grouped(wild.Rounds(SIZE)), DETECTRON2, batches=14, identify=None
    ),
    "detectron2 AspectRatioGroupedDataset over a DataLoader": Row(
        lambda: ByRatio(DataLoader(Noisy(SIZE), batch_size=None, shuffle=True), BATCH), DETECTRON2, identify=None
    ),  # which samples do not fill a last batch depends on the order
    "apex data_prefetcher": Row(lambda: Apex(loader()), ("apex",)),
    "apex data_prefetcher, kept workers": Row(lambda: Apex(loader(**KEPT)), ("apex",)),
    "prefetch_generator's DataLoaderX": Row(lambda: loader(InBackground), ("prefetch_generator",)),
    "to a device, kept workers": Row(lambda: wild.OnDevice(loader(**KEPT))),
    "lambda: enumerate(loader)": Row(function_around, identify=numbered),
    "lambda: enumerate(loader), kept workers": Row(lambda: function_around(**KEPT), identify=numbered),
    "older YOLOv5: an iterator made in __init__": Row(lambda: loader(wild.KeepsFromTheStart)),
}


# --- one process ------------------------------------------------------------------------------------------------------


def wrapped(row: Row, **options: Any) -> Any:
    made = row.make()
    if isinstance(made, midepoch.Loader):
        return made
    return midepoch.wrap(made, **{"seed": SEED, **row.options, **options})


def samples(row: Row, batches: list[Any]) -> list[int] | None:
    return None if row.identify is None else [index for batch in batches for index in row.identify(batch)]


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
    return {"samples": samples(row, list(itertools.islice(iter(source), row.batches)))}


def save(row: Row) -> dict[str, Any]:
    """Two epochs, saved in the middle, at the boundary and in the middle of the second."""
    states: dict[str, Any] = {}
    loader = wrapped(row)
    made = row.make()
    since = time.perf_counter()
    midepoch.wrap(made, **({} if isinstance(made, midepoch.Loader) else row.options))
    wrapping = time.perf_counter() - since

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
    batches = list(itertools.islice(again, row.batches))
    return {
        "states": states, "following": following, "adapter": loader._adapter.name,
        "capabilities": {name: [bool(getattr(told, name)), str(getattr(told, name))] for name in names},
        "samples": samples(row, batches), "left": samples(row, batches[CUT:]), "wrapping": wrapping,
    }  # fmt: skip


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
            loader.load_state_dict(saved["states"]["0 2"])
            try:
                ranks += samples(row, list(loader)) or []
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
            else:
                found = {"bare": bare, "save": save}[job](row)
        except Exception as error:  # noqa: BLE001  # it is a verdict
            found = {"error": f"{type(error).__name__}: {error}"}
    found["told"] = [str(each.message) for each in caught if issubclass(each.category, midepoch.MidepochWarning)]
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
