"""Rows whose loaders read shards, files of a format of their own, or streams. Their data lie in the current folder."""

from __future__ import annotations

import functools
import io
import os
import random
import tarfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, get_worker_info
from wild_row import BATCH, SEED, SIZE, Row

import midepoch
from support.sources import Noisy

# --- webdataset -------------------------------------------------------------------------------------------------------


def archive(path: Path, files: dict[str, bytes]) -> Path:
    """A tar archive of these files, written by the first process that asks."""
    if path.exists():
        return path
    draft = path.with_suffix(f".{os.getpid()}")
    with tarfile.open(draft, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    draft.replace(path)
    return path


@functools.cache
def shards(compressed: bool = False, size: int = SIZE, count: int = 4) -> list[str]:
    """Some shards of so many samples together, numbered through."""
    from support import webdataset_sources

    os.environ["MIDEPOCH_CACHE"] = str(Path.cwd() / "cache")
    counts = [size // count + (shard < size % count) for shard in range(count)]
    folder = Path.cwd() / f"shards{size}"
    if not folder.exists():
        webdataset_sources.compress(webdataset_sources.make_shards(folder, counts))
    return sorted(map(str, folder.glob("*.gz" if compressed else "*.tar")))


def sample(of: dict[str, Any]) -> Any:
    """Its number, and one that is drawn."""
    return torch.tensor([float(of["cls"]), random.random()], dtype=torch.float64)


def as_it_is(batch: Any) -> Any:
    """Has no batch dimension to add."""
    return batch


def web(urls: Callable[[], list[str]] = shards, **keywords: Any) -> Any:
    import webdataset as wds

    dataset = wds.WebDataset(urls(), shardshuffle=9, nodesplitter=wds.split_by_node).shuffle(9).map(sample)
    return dataset.batched(BATCH, collation_fn=torch.stack, **keywords)


def web_stages() -> Any:
    """Stages in a list, one of them a function that was not called."""
    import webdataset as wds

    stages = (
        wds.SimpleShardList(shards()),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_samples,
        wds.map(sample),
    )
    return wds.DataPipeline(*stages, wds.batched(BATCH, collation_fn=torch.stack))


def web_again() -> Any:
    """In a function, with all seeds drawn from python's random: read again from its start."""
    import webdataset as wds

    dataset = wds.WebDataset(shards(), shardshuffle=9, seed=random.getrandbits(32))
    dataset = dataset.shuffle(9, seed=random.getrandbits(32)).map(sample)
    return dataset.batched(BATCH, collation_fn=torch.stack)


def web_drawn() -> Any:
    import webdataset as wds

    dataset = wds.WebDataset(shards(), resampled=True).map(sample).batched(BATCH, collation_fn=torch.stack)
    return dataset.with_epoch(7)


def web_of_many_ranks() -> Any:
    import webdataset as wds

    dataset = web(functools.partial(shards, True, 2000)).with_epoch(1)
    return wds.WebLoader(dataset, batch_size=None, num_workers=8, collate_fn=as_it_is)


class ChunkedSampler(Sampler[int]):
    """As wids has it: chunks of indices, shuffled within and among themselves by seed and epoch."""

    def __init__(self, dataset: Any, chunksize: int = 8, seed: int = 0, shuffle: bool = True) -> None:
        low, high = 0, len(dataset)
        self.ranges = [(start, min(start + chunksize, high)) for start in range(low, high, chunksize)]
        self.seed, self.shuffle, self.length = seed, shuffle, high - low
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = random.Random(self.seed + 1289738273 * self.epoch)
        ranges = generator.sample(self.ranges, len(self.ranges)) if self.shuffle else self.ranges
        for start, stop in ranges:
            indices = list(range(start, stop))
            if self.shuffle:
                generator.shuffle(indices)
            yield from indices
        self.epoch += 1


# --- open_clip's training pipeline ------------------------------------------------------------------------------------


def pixel(image: Any) -> Any:
    """An image's number, and one that is drawn."""
    return torch.tensor([float(image.getpixel((0, 0))[0]), random.random()])


def length_of_text(text: str) -> Any:
    return torch.tensor([[len(text)]])


def open_clip(mended: bool, resampled: bool = False, workers: int = 0) -> Any:
    """As ``open_clip_train.main`` makes it.

    Args:
        mended: the one stage that webdataset 1.0 cannot run is replaced, and two others say how they draw.
        resampled: shards are drawn by weights.
        workers: that read.
    """
    import cpu_torchvision  # noqa: F401  # the real package; only the operators of its compiled part are missing
    import PIL.Image
    import webdataset as wds
    from open_clip_train import data

    os.environ["MIDEPOCH_CACHE"] = str(Path.cwd() / "cache")
    paths = []
    for shard in range(4):
        files: dict[str, bytes] = {}
        for number in range(shard, SIZE, 4):
            content = io.BytesIO()
            PIL.Image.new("RGB", (2, 2), (number, 0, 0)).save(content, "png")
            files |= {f"{number:03}.png": content.getvalue(), f"{number:03}.txt": b"a caption"}
        paths.append(str(archive(Path.cwd() / f"pictures{shard}.tar", files)))
    if mended:
        data.tarfile_to_samples_nothrow = wds.tarfile_to_samples(handler=data.log_and_continue)
        data.detshuffle2.draws = "once"
        data.ResampledShards2.draws = "with replacement"
    arguments = Namespace(
        train_data="::".join(paths), train_data_upsampling_factors="1::1::2::1" if resampled else None,
        dataset_resampled=resampled, train_num_samples=SIZE, seed=0, batch_size=BATCH, workers=workers, world_size=1,
    )  # fmt: skip
    return data.get_wds_dataset(arguments, pixel, is_train=True, epoch=0, tokenizer=length_of_text).dataloader


# --- torchdata, datasets, grain ---------------------------------------------------------------------------------------


def bare_nodes() -> Any:
    from torchdata import nodes as blocks

    def made() -> Any:
        source = blocks.SamplerWrapper(RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(1)))
        return blocks.Batcher(blocks.Mapper(source, lambda index: torch.tensor([float(index)])), BATCH, drop_last=False)

    return made


def stateful_rows(**keywords: Any) -> Any:
    from support import own_state_sources

    return own_state_sources.rows_inside(**keywords)


class KeepsCount(IterableDataset[Any]):
    """As in torchdata's test_state_dict.py: where it stands is its own state, and workers divide it."""

    def __init__(self, size: int) -> None:
        self.size, self.given, self.resumes = size, 0, False

    def __iter__(self) -> Iterator[Any]:
        if not self.resumes:
            self.given = 0
        self.resumes = False
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        own = range(first, self.size, step)
        while self.given < len(own):
            self.given += 1
            yield torch.tensor([own[self.given - 1], random.random()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.resumes = state["given"], True


def elastic_grain() -> Any:
    import grain
    import grain.experimental

    rows = grain.MapDataset.range(SIZE).shuffle(seed=SEED).map(float)
    return grain.experimental.ElasticIterator(rows, BATCH, grain.sharding.ShardOptions(0, 1))


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in batch]


def own_numbers(batch: Any) -> list[int]:
    from support import own_state_sources

    return list(own_state_sources.identify(batch))


# --- tables, pipelines of threads -------------------------------------------------------------------------------------


def arrow() -> Any:
    import pyarrow
    import pyarrow.parquet

    path = Path.cwd() / f"numbers{os.getpid()}.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"number": list(range(SIZE))}), path)
    return lambda: pyarrow.parquet.ParquetFile(path).iter_batches(BATCH)


def spdl(draws: bool) -> Any:
    from spdl.pipeline import PipelineBuilder

    def step(number: int) -> float:
        return number + random.random() / 2 if draws else float(number)

    def batches() -> Iterator[Any]:
        built = PipelineBuilder().add_source(range(SIZE)).pipe(step).aggregate(BATCH).add_sink(2)
        pipeline = built.build(num_threads=1)
        with pipeline.auto_stop():
            for given in pipeline.get_iterator(timeout=30):
                yield torch.tensor(given)[:, None]

    return batches


# --- megatron-energon -------------------------------------------------------------------------------------------------


def energon(length: int = 0, workers: int = 0) -> Any:
    """A prepared folder of texts. `length`: batches of an epoch; 0: without an end, as it comes."""
    from support import energon_sources

    folder = energon_sources.prepared(Path.cwd() / "prepared", SIZE)
    return energon_sources.training(folder, num_workers=workers, batch_size=BATCH, length=length)


def texts(batch: Any) -> list[int]:
    return [int(text) for text in batch.text]


# --- DALI, FFCV -------------------------------------------------------------------------------------------------------


def dali(function: str = "native", **keywords: Any) -> Any:
    from support import dali_sources

    root = str(Path.cwd())
    if not (Path.cwd() / "npy").exists():
        dali_sources.write_images(Path.cwd())
    return getattr(dali_sources, function)(root=root, size=SIZE, batch_size=BATCH, reader="numpy", **keywords)


def dali_then() -> Any:
    from support import dali_sources

    return dali(then=dali_sources.noisy)


def dali_labels(batch: Any) -> list[int]:
    from support import dali_sources

    return list(dali_sources.identify(batch))


def dali_factory() -> Any:
    """An external source that ends by StopIteration, in an iterator that resets itself."""
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    from midepoch.adapters.dali import factory
    from support import dali_sources

    def made(checkpointing: dict[str, Any]) -> Any:
        pipeline = dali_sources.callback_pipeline("external", "", **checkpointing)
        return DALIGenericIterator([pipeline], ["label", "random"], auto_reset=True)

    return factory(made)


def dali_jax() -> Any:
    import jax  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    from nvidia.dali import fn
    from nvidia.dali.plugin.jax import data_iterator

    @data_iterator(output_map=["label", "random"], reader_name="Reader")  # type: ignore[untyped-decorator]
    def made(files: list[str]) -> Any:
        label = fn.readers.numpy(files=files, name="Reader", random_shuffle=True, initial_fill=7, seed=SEED)
        return label, fn.random.uniform(shape=[2])

    dali()
    files = [str(Path.cwd() / "npy" / f"{number:03}.npy") for number in range(SIZE)]
    return made(files, batch_size=BATCH, device_id=None, num_threads=1, seed=SEED)


def dali_dynamic() -> Any:
    import nvidia.dali.experimental.dynamic as ndd

    dali()
    files = [str(Path.cwd() / "npy" / f"{number:03}.npy") for number in range(SIZE)]
    reader = ndd.readers.Numpy(files=files, random_shuffle=True, initial_fill=7)

    class Epochs:
        """A reader gives one epoch in each call."""

        def __iter__(self) -> Iterator[Any]:
            for batch in reader.next_epoch(batch_size=BATCH):
                (label,) = batch if isinstance(batch, tuple) else (batch,)
                yield label.torch()

    return Epochs()


def ffcv() -> Any:
    os.environ.setdefault("MIDEPOCH_FFCV_FILES", str(Path.cwd()))
    from support import ffcv_sources

    return ffcv_sources.load(pipelines="light", kind="raw", seed=SEED)


def ffcv_labels(batch: Any) -> list[int]:
    from support import ffcv_sources

    return list(ffcv_sources.identify(batch))


def tested(tests: str, package: str) -> Row:
    """A row of tests of the repository, which drive a trainer."""
    return Row(lambda: None, (package,), identify=None, tests=tests)


WEBDATASET, STREAMED = ("webdataset",), functools.partial(shards, True)

BACKENDS: dict[str, Row] = {
    "webdataset WebDataset, shuffled": Row(web, WEBDATASET),
    "webdataset WebDataset, shuffled, shards read as streams": Row(
        lambda: web(STREAMED), WEBDATASET, {"tail": "uneven"}
    ),
    "webdataset batched(partial=False), shards read as streams": Row(
        lambda: web(STREAMED, partial=False), WEBDATASET, identify=None
    ),  # how many samples each stream leaves out is said by `capabilities`
    "webdataset WebDataset, shuffled, in a function": Row(lambda: web_again, WEBDATASET),
    "webdataset DataPipeline with the function wds.tarfile_samples": Row(web_stages, WEBDATASET, in_order=True),
    "webdataset resampled, with_epoch": Row(web_drawn, WEBDATASET, drawn=True),
    "webdataset, one of 64 ranks with 8 workers, shards read as streams": Row(
        web_of_many_ranks, WEBDATASET, {"world": midepoch.World(5, 64)}, identify=None
    ),
    "wids ChunkedSampler": Row(
        lambda: DataLoader(Noisy(SIZE), BATCH, sampler=ChunkedSampler(range(SIZE), seed=SEED)), ("wids",)
    ),
    "open_clip's training pipeline": Row(lambda: open_clip(False), ("open_clip",), drawn=True),
    "open_clip's training pipeline, with the lines that refusals name": Row(
        lambda: open_clip(True), ("open_clip",), drawn=True
    ),
    "open_clip's training pipeline, with the lines that refusals name, two workers": Row(
        lambda: open_clip(True, workers=2), ("open_clip",), drawn=True
    ),
    "open_clip's training pipeline, with the lines that refusals name, shards drawn by weights": Row(
        lambda: open_clip(True, resampled=True), ("open_clip",), drawn=True
    ),
    "torchdata.nodes without a Loader, in a function": Row(bare_nodes, ("torchdata",)),
    "torchdata StatefulDataLoader over a Hugging Face IterableDataset": Row(
        lambda: stateful_rows(buffer=False), ("torchdata", "datasets"), identify=own_numbers
    ),
    "torchdata StatefulDataLoader over a Hugging Face IterableDataset, shuffled": Row(
        lambda: stateful_rows(buffer=True), ("torchdata", "datasets"), identify=own_numbers
    ),
    "torchdata StatefulDataLoader over a Hugging Face IterableDataset, two workers": Row(
        lambda: stateful_rows(buffer=False, num_workers=2), ("torchdata", "datasets"), identify=own_numbers
    ),
    "torchdata's test_state_dict.py: IterableDataset with a state of its own, in a DataLoader": Row(
        lambda: DataLoader(KeepsCount(SIZE), BATCH), ("torchdata",), in_order=True
    ),
    "torchdata's test_state_dict.py: the same, two workers": Row(
        lambda: DataLoader(KeepsCount(SIZE), BATCH, num_workers=2), ("torchdata",), {"shard": False}
    ),
    "Grain ElasticIterator": Row(elastic_grain, ("grain",), identify=numbers),
    "pyarrow ParquetFile.iter_batches, in a function": Row(
        arrow, ("pyarrow",), identify=lambda batch: numbers(batch.column(0).to_pylist()), in_order=True
    ),
    "SPDL pipeline without randomness, in a function": Row(lambda: spdl(False), ("spdl",), in_order=True),
    "SPDL pipeline with random steps, in a function": Row(lambda: spdl(True), ("spdl",), in_order=True),
    "megatron-energon get_savable_loader": Row(energon, ("energon",), identify=texts, batches=14, drawn=True),
    "megatron-energon get_savable_loader, virtual epochs": Row(
        lambda: energon(7), ("energon",), identify=texts, drawn=True
    ),
    "DALI DALIGenericIterator": Row(dali, ("nvidia-dali-cuda120",), identify=dali_labels, drawn=True),
    "DALI DALIGenericIterator with midepoch's readers": Row(
        lambda: dali("sampled"), ("nvidia-dali-cuda120",), identify=dali_labels, drawn=True
    ),  # there is no such reader without midepoch
    "DALI factory with an external source that ends by StopIteration, auto_reset": Row(
        dali_factory, ("nvidia-dali-cuda120",), identify=None
    ),
    "DALI DALIGenericIterator, then= draws for its batches": Row(
        dali_then, ("nvidia-dali-cuda120",), identify=dali_labels, drawn=True
    ),
    "DALI jax data_iterator": Row(dali_jax, ("jax", "nvidia-dali-cuda120"), identify=None),
    "DALI ndd reader, in an object": Row(dali_dynamic, ("nvidia-dali-cuda120",), drawn=True),
    "FFCV Loader": Row(ffcv, ("ffcv",), identify=ffcv_labels),
    "Grain's assert_equal_output_after_checkpoint": tested(
        "tests/backends/test_own_states.py::test_grains_own_test_of_checkpoints_passes", "grain"
    ),
    "ignite Engine": tested(
        "tests/trainers/test_skipping.py::test_what_does_not_skip_is_exact", "pytorch-ignite"
    ),
    "torchdata, states of an older version of it": tested(
        "tests/backends/test_own_states.py::test_states_of_an_older_torchdata_are_refused_or_told",
        "torchdata",
    ),
    "megatron-energon, its laws": tested("tests/backends/test_energon.py", "energon"),
    "DALI jax data_iterator, its laws": tested(
        "tests/backends/test_dali_fronts.py::test_the_laws_hold_for_jax_s_iterator", "jax"
    ),
    "Lightning with ExactResume": tested("tests/trainers/test_lightning.py::test_every_batch", "lightning"),
}
