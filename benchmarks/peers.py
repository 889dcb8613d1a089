"""midepoch and its peers behind one interface, each in a process of its own.

``python benchmarks/peers.py NAME`` is a server: one command a line on its standard input, one answer a line on its
standard output, both JSON. benchmarks/compare.py starts several and asks them. A world of more than one comes from the
environment, as under torchrun.
"""

from __future__ import annotations

import argparse
import base64
import functools
import gc
import hashlib
import io
import json
import logging
import os
import pickle
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for cpu_torchvision
CACHE = Path(tempfile.gettempdir()) / f"midepoch-benchmarks-{os.getuid()}"
os.environ.setdefault("MIDEPOCH_CACHE", str(CACHE / "indexes"))
os.environ.setdefault("NUMBA_NUM_THREADS", "4")  # before numba is imported, which refuses more threads later

import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

import midepoch

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SCRATCH = Path(os.environ.get("MIDEPOCH_BENCHMARKS_SCRATCH") or tempfile.mkdtemp())  # the same for all servers
SHARDS = 12  # of a WebDataset, so that 2 and 3 processes have the same number


# --- the data --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """What a loader is to do: integers, integers with draws, or JPEGs; how many; in batches of how many."""

    work: str = "integers"
    size: int = 192
    batch_size: int = 32
    workers: int = 0


@functools.cache
def pictures() -> list[bytes]:
    """A few dozen JPEGs of 256 x 256."""
    generator, encoded = np.random.default_rng(0), []
    for _ in range(24):
        buffer = io.BytesIO()
        noise = Image.fromarray(generator.integers(0, 256, (24, 24, 3), np.uint8))
        noise.resize((256, 256), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    return encoded


def record(work: str, number: int) -> dict[str, Any]:
    """A sample as it lies in a file."""
    return {"number": number} | ({"jpeg": pictures()[number % 24]} if work == "jpeg" else {})


def sample(work: str, record: dict[str, Any]) -> Any:
    """A sample as it comes out of a data set."""
    number = int(record["number"])
    if work == "draws":
        return torch.tensor([number, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)
    if work == "jpeg":
        left, top = random.randrange(33), random.randrange(33)
        image = Image.open(io.BytesIO(record["jpeg"])).crop((left, top, left + 224, top + 224))
        return number, np.array(image)
    return number


@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """In memory; a dataclass, since Grain compares what data sets print as."""

    work: str
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return sample(self.work, record(self.work, index))


def samples_in_memory(spec: Spec) -> Any:
    return range(spec.size) if spec.work == "integers" else Samples(spec.work, spec.size)


def seed_everything(seed: int) -> None:
    """As a training script does when it starts."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --- the interface ---------------------------------------------------------------------------------------------------


@dataclass
class Held:
    """A loader, and what its user keeps beside it.

    Attributes:
        epoch: of the next pass.
        start: where the next pass begins, in the peer's own terms; None at its beginning.
    """

    source: Any
    epoch: int = 0
    start: Any = None


class Peer:
    """A loader with the two methods `state_dict` and `load_state_dict`; others override what they do differently.

    Attributes:
        name: in commands and in results.json.
        label: of the row in tables, where that is not the name.
        by: how it is resumed, where it has no resume of its own, or several.
        settings: that are not its defaults, where it was measured without them before.
        base: the row that this one is compared with; None if no other reads its samples as this one does.
        limit: the largest data set it can be asked about: files of a larger one are not written.
        files: whether it needs files.
        workers: whether it has worker processes.
        hoards: whether a process gives back what its loaders took only when it ends.
        slow: whether a batch takes milliseconds, whatever is in it, so that few of them are timed.
        compiles: whether a loader compiles, and is therefore used again.
        varying: keys of a state that are not a matter of the position.
    """

    name: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]] = ("torch",)
    label: ClassVar[str] = ""
    by: ClassVar[str] = ""
    settings: ClassVar[str] = ""
    base: ClassVar[str | None] = "plain DataLoader"
    limit: ClassVar[int] = 10**9
    files: ClassVar[bool] = False
    workers: ClassVar[bool] = True
    hoards: ClassVar[bool] = False
    slow: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    varying: ClassVar[tuple[str, ...]] = ()

    def source(self, spec: Spec) -> Any:
        raise NotImplementedError

    def write(self, folder: Path, spec: Spec) -> None:
        """The files that `spec` needs, into an empty folder."""

    def folder(self, spec: Spec) -> Path:
        """Files are written once, by a process of its own: some writers fork."""
        folder = CACHE / self.distributions[0] / f"{spec.work}-{spec.size}"
        if self.files and not folder.exists():
            from filelock import FileLock

            folder.parent.mkdir(parents=True, exist_ok=True)
            # Processes of several peers that read the same files come here at once.
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    draft = Path(tempfile.mkdtemp(dir=CACHE))
                    command = [sys.executable, __file__, self.name, "--write", str(draft), json.dumps(asdict(spec))]
                    subprocess.run(command, check=True, capture_output=True, timeout=600)
                    draft.rename(folder)
        return folder

    def build(self, spec: Spec) -> Any:
        seed_everything(0)
        return self.source(spec)

    def iterate(self, loader: Any) -> Iterator[Any]:
        return iter(loader)

    def ids(self, batch: Any) -> list[int]:
        """The numbers of a batch's samples."""
        first = batch[0] if isinstance(batch, list | tuple) else batch
        found = np.asarray(first["number"] if isinstance(first, dict) else first)
        return [int(number) for number in (found[:, 0] if found.ndim == 2 else found)]

    def save(self, loader: Any, iterator: Any, batches: int) -> Any:
        return loader.state_dict()

    def load(self, spec: Spec, state: Any) -> Any:
        loader = self.build(spec)
        loader.load_state_dict(state)
        return loader

    def forge(self, spec: Spec, batches: int) -> Any:
        """The state after so many batches in a world of one, without running them; None where there is no way."""
        return None

    def first_state(self, spec: Spec) -> Any:
        """A real state, after one batch, to be edited."""
        loader = self.build(spec)
        iterator = self.iterate(loader)
        next(iterator)
        return self.save(loader, iterator, 1)


class ByHand(Peer):
    """Skipped by hand: what a user keeps is the epoch and the number of batches, seeding everything for each epoch."""

    by = "skipped by hand"

    def begin(self, source: Any, epoch: int) -> Any:
        """The loader of an epoch."""
        return source

    def build(self, spec: Spec) -> Held:
        return Held(super().build(spec))

    def iterate(self, loader: Held) -> Iterator[Any]:
        start, loader.start = loader.start, None
        seed_everything(loader.epoch)
        loader.epoch += 1
        return islice(self.begin(loader.source, loader.epoch - 1), start, None)

    def save(self, loader: Held, iterator: Any, batches: int) -> Any:
        return {"epoch": loader.epoch - 1, "batches": batches}

    def load(self, spec: Spec, state: Any) -> Held:
        loader = self.build(spec)
        loader.epoch, loader.start = state["epoch"], state["batches"]
        return loader

    def forge(self, spec: Spec, batches: int) -> Any:
        return {"epoch": 0, "batches": batches}


class Plain(ByHand):
    name = "plain DataLoader"

    def source(self, spec: Spec) -> Any:
        samples = samples_in_memory(spec)
        sharded: dict[str, Any] = {"shuffle": True}
        if WORLD_SIZE > 1:
            sharded = {"sampler": DistributedSampler(samples, WORLD_SIZE, RANK)}
        return DataLoader(samples, spec.batch_size, num_workers=spec.workers, **sharded)

    def begin(self, source: Any, epoch: int) -> Any:
        if isinstance(source.sampler, DistributedSampler):
            source.sampler.set_epoch(epoch)
        return source


class Torchdata(Peer):
    name, label = "torchdata", "torchdata StatefulDataLoader"
    distributions = ("torchdata",)

    def source(self, spec: Spec) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        samples, sharded = samples_in_memory(spec), {"shuffle": True}
        if WORLD_SIZE > 1:
            sharded = {"sampler": StatefulDistributedSampler(samples, WORLD_SIZE, RANK)}
        generator = torch.Generator().manual_seed(0)
        return StatefulDataLoader(samples, spec.batch_size, num_workers=spec.workers, generator=generator, **sharded)

    def forge(self, spec: Spec, batches: int) -> Any:
        state = self.first_state(spec)
        state["_num_yielded"] = state["_sampler_iter_yielded"] = batches
        sampler = state["_sampler_iter_state"]
        sampler["samples_yielded"] = sampler["sampler_iter_state"]["yielded"] = batches * spec.batch_size
        return state


class Accelerate(ByHand):
    name, by = "Accelerate", "skip_first_batches"
    distributions = ("accelerate",)
    varying = ("files",)

    def source(self, spec: Spec) -> Any:
        from accelerate import Accelerator, DataLoaderConfiguration

        configuration = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        loader = DataLoader(samples_in_memory(spec), spec.batch_size, shuffle=True, num_workers=spec.workers)
        return accelerator, accelerator.prepare(loader)

    def iterate(self, loader: Held) -> Iterator[Any]:
        accelerator, prepared = loader.source
        start, loader.start = loader.start, None
        prepared.set_epoch(loader.epoch)
        loader.epoch += 1
        return iter(prepared if start is None else accelerator.skip_first_batches(prepared, start))

    def save(self, loader: Held, iterator: Any, batches: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            loader.source[0].save_state(folder)
            files = {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*.*")}
        return {**super().save(loader, iterator, batches), "files": files}

    def load(self, spec: Spec, state: Any) -> Held:
        loader = super().load(spec, state)
        with tempfile.TemporaryDirectory() as folder:
            for name, content in state["files"].items():
                Path(folder, name).write_bytes(content)
            loader.source[0].load_state(folder)
        return loader

    def forge(self, spec: Spec, batches: int) -> Any:
        return {**self.first_state(spec), "batches": batches}


class Streaming(Peer):
    name, label = "Streaming", "mosaicml-streaming"
    base: ClassVar[str | None] = None
    distributions = ("mosaicml-streaming",)
    files, limit, hoards, slow = True, 10**6, True, True
    links = count()

    def write(self, folder: Path, spec: Spec) -> None:
        import cpu_torchvision  # noqa: F401  # before streaming, which imports torchvision
        from streaming import MDSWriter

        columns = {"number": "int"} | ({"jpeg": "bytes"} if spec.work == "jpeg" else {})
        with MDSWriter(out=str(folder / "data"), columns=columns, size_limit=1 << 24) as writer:
            for number in range(spec.size):
                writer.write(record(spec.work, number))

    def source(self, spec: Spec) -> Any:
        import cpu_torchvision  # noqa: F401  # before streaming, which imports torchvision
        from filelock import FileLock
        from streaming import StreamingDataLoader, StreamingDataset

        class Records(StreamingDataset):  # type: ignore[misc]
            def __getitem__(self, at: Any) -> Any:
                return sample(spec.work, super().__getitem__(at))

        # Streaming takes two data sets in one folder for a mistake, and all ranks must name the same folder.
        link = SCRATCH / f"streaming-{os.environ.get('MASTER_PORT', os.getpid())}-{next(self.links)}"
        with suppress(FileExistsError):
            link.symlink_to(self.folder(spec) / "data")
        # It looks for a free name of shared memory and then takes it; in a world, its ranks wait for each other.
        with FileLock(CACHE / "streaming.lock") if WORLD_SIZE == 1 else nullcontext():
            dataset = Records(local=str(link), batch_size=spec.batch_size, shuffle=True, shuffle_seed=0)
        return StreamingDataLoader(dataset, batch_size=spec.batch_size, num_workers=spec.workers)

    def forge(self, spec: Spec, batches: int) -> Any:
        return {**self.first_state(spec), "sample_in_epoch": batches * spec.batch_size}


class LitData(Peer):
    name = "LitData"
    base: ClassVar[str | None] = None
    distributions = ("litdata",)
    files, limit = True, 10**6

    def write(self, folder: Path, spec: Spec) -> None:
        import cpu_torchvision  # noqa: F401  # before litdata, which imports torchvision
        import litdata

        made = functools.partial(record, spec.work)
        litdata.optimize(made, list(range(spec.size)), str(folder), chunk_bytes="16MB", num_workers=1)

    def folder(self, spec: Spec) -> Path:
        """Always the same, since states name it: a data set that has grown lies where the smaller one lay."""
        from filelock import FileLock

        written, folder, marker = super().folder(spec), SCRATCH / "litdata", SCRATCH / "litdata.holds"
        with FileLock(SCRATCH / "litdata.lock"):
            if not marker.exists() or marker.read_text() != written.name:
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(written, folder, copy_function=os.link)
                marker.write_text(written.name)
        return folder

    def source(self, spec: Spec) -> Any:
        import cpu_torchvision  # noqa: F401  # before litdata, which imports torchvision
        import litdata

        made = functools.partial(sample, spec.work)
        dataset = litdata.StreamingDataset(str(self.folder(spec)), shuffle=True, seed=0, transform=made)
        return litdata.StreamingDataLoader(dataset, batch_size=spec.batch_size, num_workers=spec.workers)

    def forge(self, spec: Spec, batches: int) -> Any:
        state, samples = self.first_state(spec), batches * spec.batch_size
        state["num_samples_yielded"] = samples
        state["dataset"] |= {"num_samples_yielded": samples, "sample_in_epoch": samples}
        return state


class GrainDataset(ByHand):
    """Grain's iterators keep the state."""

    name, by = "Grain MapDataset", ""
    settings = "num_threads=0 but for jpeg"
    distributions = ("grain",)

    def source(self, spec: Spec) -> Any:
        import grain

        dataset = grain.MapDataset.source(self.samples(spec)).shuffle(seed=0)
        if spec.work == "draws":
            dataset = dataset.seed(0).random_map(self.draws())
        batches = dataset[RANK::WORLD_SIZE].batch(spec.batch_size).to_iter_dataset(self.reading(spec))
        if spec.workers:
            batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=spec.workers))
        return batches

    def reading(self, spec: Spec) -> Any:
        """Without threads for what lies in memory, as its documentation recommends; pictures are decoded in threads."""
        import grain

        return grain.ReadOptions() if spec.work == "jpeg" else grain.ReadOptions(num_threads=0)

    def samples(self, spec: Spec) -> Any:
        return range(spec.size) if spec.work == "draws" else samples_in_memory(spec)

    def draws(self) -> Any:
        """Random numbers are drawn as its documentation says, from the generator that it gives for each sample."""
        import grain

        class Draws(grain.transforms.RandomMap):  # type: ignore[misc]
            def random_map(self, number: int, generator: np.random.Generator) -> Any:
                return torch.tensor([number, *generator.random(3)], dtype=torch.float64)

        return Draws()

    def iterate(self, loader: Held) -> Iterator[Any]:
        iterator: Any = iter(loader.source)
        if loader.start is not None:
            iterator.set_state(loader.start)
            loader.start = None
        return iter(iterator)

    def save(self, loader: Held, iterator: Any, batches: int) -> Any:
        return iterator.get_state()

    def load(self, spec: Spec, state: Any) -> Held:
        loader = self.build(spec)
        loader.start = state
        return loader

    def forge(self, spec: Spec, batches: int) -> Any:
        return {"next_index": batches}


class GrainLoader(GrainDataset):
    name, slow = "Grain DataLoader", True

    def source(self, spec: Spec) -> Any:
        import grain

        sampler = grain.samplers.IndexSampler(
            spec.size, shuffle=True, seed=0, num_epochs=1, shard_options=grain.sharding.ShardOptions(RANK, WORLD_SIZE)
        )
        return grain.DataLoader(
            data_source=self.samples(spec), sampler=sampler, worker_count=spec.workers, read_options=self.reading(spec),
            operations=[*([self.draws()] if spec.work == "draws" else []), grain.transforms.Batch(spec.batch_size)],
        )  # fmt: skip

    def forge(self, spec: Spec, batches: int) -> Any:
        state = json.loads(self.first_state(spec))
        state["last_seen_indices"]["0"] = batches * spec.batch_size - 1
        return json.dumps(state, indent=4).encode()


class Dali(ByHand):
    """DALI's own checkpoint."""

    name, by = "DALI", ""
    base: ClassVar[str | None] = None
    distributions = ("nvidia-dali-cuda120",)
    files, limit, workers = True, 10**6, False

    def write(self, folder: Path, spec: Spec) -> None:
        for number, picture in enumerate(pictures()):
            (folder / f"{number}.jpg").write_bytes(picture)
        Image.new("RGB", (8, 8)).save(folder / "tiny.jpg")
        names = [f"{number}.jpg" for number in range(24)] if spec.work == "jpeg" else ["tiny.jpg"]
        lines = (f"{names[number % len(names)]} {number}\n" for number in range(spec.size))
        (folder / "list.txt").write_text("".join(lines))

    def iterator(self, spec: Spec, **keywords: Any) -> Any:
        from nvidia.dali import fn, pipeline_def
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        folder = self.folder(spec)

        @pipeline_def(batch_size=spec.batch_size, num_threads=2, device_id=None, seed=0)
        def pipeline() -> Any:
            encoded, numbers = fn.readers.file(
                file_root=str(folder), file_list=str(folder / "list.txt"), random_shuffle=True, name="Reader",
                shard_id=RANK, num_shards=WORLD_SIZE,
            )  # fmt: skip
            if spec.work == "draws":
                return numbers, fn.random.uniform(shape=[3])
            if spec.work == "jpeg":
                place = {f"crop_pos_{axis}": fn.random.uniform(range=[0.0, 1.0]) for axis in "xy"}
                return numbers, fn.crop(fn.decoders.image(encoded), crop=(224, 224), **place)
            return numbers, encoded

        return DALIGenericIterator(
            [pipeline(**keywords)], ["number", "data"], reader_name="Reader", auto_reset=True, prepare_first_batch=False
        )

    def source(self, spec: Spec) -> Any:
        return self.iterator(spec)

    def build(self, spec: Spec) -> Held:
        return Held(self.iterator(spec, enable_checkpointing=True))

    def iterate(self, loader: Held) -> Iterator[Any]:
        return iter(loader.source)

    def save(self, loader: Held, iterator: Any, batches: int) -> Any:
        return loader.source.checkpoints()[0]

    def load(self, spec: Spec, state: Any) -> Held:
        return Held(self.iterator(spec, enable_checkpointing=True, checkpoint=state))

    def forge(self, spec: Spec, batches: int) -> Any:
        return None


class Ffcv(ByHand):
    name = "FFCV"
    base: ClassVar[str | None] = None
    distributions = ("ffcv",)
    files, limit, workers, compiles = True, 10**6, False, True

    def write(self, folder: Path, spec: Spec) -> None:
        from ffcv.fields import IntField, RGBImageField
        from ffcv.writer import DatasetWriter

        fields = {"number": IntField()}
        if spec.work == "draws":
            fields["image"] = RGBImageField(write_mode="raw")
        if spec.work == "jpeg":
            fields["image"] = RGBImageField(write_mode="jpg")
        DatasetWriter(str(folder / "data.beton"), fields, num_workers=1).from_indexed_dataset(FfcvSamples(spec))

    def source(self, spec: Spec) -> Any:
        return self.compiled(spec)

    @functools.cache  # noqa: B019  # the server has one peer
    def compiled(self, spec: Spec) -> Any:
        from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import RandomHorizontalFlip, ToTensor

        pipelines: dict[str, Any] = {"number": [IntDecoder(), ToTensor()]}
        if spec.work == "draws":
            pipelines["image"] = [SimpleRGBImageDecoder(), RandomHorizontalFlip(), ToTensor()]
        if spec.work == "jpeg":
            area = (224 / 256) ** 2
            crop = RandomResizedCropRGBImageDecoder((224, 224), scale=(area, area), ratio=(1, 1))
            pipelines["image"] = [crop, ToTensor()]
        return Loader(
            str(self.folder(spec) / "data.beton"), spec.batch_size, num_workers=1, order=OrderOption.RANDOM, seed=0,
            distributed=WORLD_SIZE > 1, pipelines=pipelines,
        )  # fmt: skip

    def begin(self, source: Any, epoch: int) -> Any:
        source.next_epoch = epoch
        return source


@dataclass(frozen=True)
class FfcvSamples:
    """What FFCV's writer reads."""

    spec: Spec

    def __len__(self) -> int:
        return self.spec.size

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        if self.spec.work == "draws":
            return number, np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        if self.spec.work == "jpeg":
            return number, np.array(Image.open(io.BytesIO(pictures()[number % 24])))
        return (number,)


class WebDataset(ByHand):
    name = "WebDataset"
    base: ClassVar[str | None] = None
    distributions = ("webdataset",)
    files, limit, slow = True, 10**6, True

    def write(self, folder: Path, spec: Spec) -> None:
        import webdataset as wds

        for shard, numbers in enumerate(np.array_split(np.arange(spec.size), SHARDS)):
            with wds.TarWriter(str(folder / f"{shard:02}.tar")) as writer:
                for number in map(int, numbers):
                    jpeg = {"jpeg": pictures()[number % 24]} if spec.work == "jpeg" else {}
                    writer.write({"__key__": f"{number:07}", "number": str(number).encode(), **jpeg})

    def pipeline(self, spec: Spec, epoch: int | None) -> Any:
        """Shuffled again in each epoch, or as the seed of the process says."""
        import webdataset as wds

        urls = [str(self.folder(spec) / f"{shard:02}.tar") for shard in range(SHARDS)]
        seeds = {} if epoch is None else {"detshuffle": True, "seed": epoch}
        dataset = wds.WebDataset(urls, shardshuffle=100, nodesplitter=wds.split_by_node, **seeds)
        dataset = dataset.shuffle(1000) if epoch is None else dataset.compose(wds.detshuffle(1000, seed=epoch))
        dataset = dataset.map(functools.partial(sample, spec.work)).batched(
            spec.batch_size, collation_fn=default_collate
        )
        return wds.WebLoader(dataset, batch_size=None, num_workers=spec.workers)

    def source(self, spec: Spec) -> Any:
        return functools.partial(self.pipeline, spec)

    def begin(self, source: Any, epoch: int) -> Any:
        return source(epoch)


# --- midepoch over some of them ---------------------------------------------------------------------------------------


class Wrapped(Peer):
    """Comes before the peer that it wraps, and takes none of its ways of resuming."""

    label = by = ""
    seed: ClassVar[int | None] = 0

    def bare(self, spec: Spec) -> Any:
        return super().source(spec)

    def source(self, spec: Spec) -> Any:
        return midepoch.wrap(self.bare(spec), seed=self.seed)

    def build(self, spec: Spec) -> Any:
        return Peer.build(self, spec)

    def iterate(self, loader: Any) -> Iterator[Any]:
        return iter(loader)

    def save(self, loader: Any, iterator: Any, batches: int) -> Any:
        return loader.state_dict() if WORLD_SIZE == 1 else midepoch.gather(loader)

    def load(self, spec: Spec, state: Any) -> Any:
        return Peer.load(self, spec, state)

    def forge(self, spec: Spec, batches: int) -> Any:
        loader = self.source(spec)
        units = -(-loader.state_dict()["size"] // len(loader))  # of the position, in a batch
        if batches:
            loader.seek(position=(batches - 1) * units)
            next(iter(loader))
        state = loader.state_dict()
        close(loader)
        return state


class WrappedPlain(Wrapped, Plain):
    name = "midepoch DataLoader"


class WrappedStreaming(Wrapped, Streaming):
    name, base = "midepoch Streaming", "Streaming"
    seed = None  # Streaming's own


class WrappedDali(Wrapped, Dali):
    name, base = "midepoch DALI", "DALI"
    seed = None  # the pipeline's

    def bare(self, spec: Spec) -> Any:
        return self.iterator(spec, enable_checkpointing=True)  # so that midepoch need not build it once more

    def forge(self, spec: Spec, batches: int) -> Any:
        loader = self.source(spec)
        for _ in zip(range(batches), loader, strict=False):  # only reading leads DALI's own readers there
            pass
        state = loader.state_dict()
        close(loader)
        return state


class WrappedFfcv(Wrapped, Ffcv):
    name, base = "midepoch FFCV", "FFCV"
    seed = None  # the Loader's


class WrappedWebDataset(Wrapped, WebDataset):
    name, base = "midepoch WebDataset", "WebDataset"

    def bare(self, spec: Spec) -> Any:
        return self.pipeline(spec, None)


ALL: tuple[type[Peer], ...] = (
    Plain, WrappedPlain, Torchdata, Accelerate, GrainLoader, GrainDataset, LitData, Streaming, WrappedStreaming, Dali,
    WrappedDali, Ffcv, WrappedFfcv, WebDataset, WrappedWebDataset,
)  # fmt: skip
PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in ALL}


# --- the server ------------------------------------------------------------------------------------------------------


def encode(state: Any) -> str:
    return base64.b64encode(pickle.dumps(state)).decode()


def decode(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def as_saved(state: Any) -> tuple[str, bytes]:
    """A state as its user would save it, and how."""
    if isinstance(state, bytes):
        return "bytes", state
    try:
        return "JSON", json.dumps(state).encode()
    except TypeError:
        return "pickle", pickle.dumps(state)


def digest(batch: Any) -> str:
    """Equal where all that is in two batches is."""
    content = hashlib.sha256()
    for leaf in tree_leaves(batch):
        content.update(np.asarray(leaf).tobytes())
    return content.hexdigest()


def comparable(state: Any, varying: tuple[str, ...]) -> str:
    kept = {key: value for key, value in state.items() if key not in varying} if varying else state
    return json.dumps(
        kept, sort_keys=True, default=lambda value: value.decode() if isinstance(value, bytes) else value.tolist()
    )


def close(loader: Any) -> None:
    """Worker processes and threads end with the objects that own them, or when told to."""
    if hasattr(loader, "close"):
        loader.close()
    gc.collect()


class Server:
    """What can be asked of a peer: every public method is a command."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.live: tuple[Spec, Any] | None = None

    def prepare(self, spec: Spec) -> None:
        self.peer.folder(spec)

    def run(self, spec: Spec, state: str | None = None, save_at: int = 0, passes: int = 1) -> dict[str, Any]:
        """The numbers and the digests of all batches of so many passes, and the state after `save_at` batches."""
        given: list[list[Any]] = []
        answer: dict[str, Any] = {"passes": given}
        try:
            loader = self.peer.build(spec) if state is None else self.peer.load(spec, decode(state))
            for number in range(passes):
                iterator = self.peer.iterate(loader)
                given.append([])
                while (batch := next(iterator, None)) is not None:
                    given[-1].append((self.peer.ids(batch), digest(batch)))
                    if not number and len(given[0]) == save_at:
                        answer["state"] = encode(self.peer.save(loader, iterator, save_at))
            del iterator
            close(loader)
        except Exception as error:  # noqa: BLE001  # what is raised is the answer
            answer |= {"error": type(error).__name__, "message": str(error)[:300]}
        return answer

    def forge(self, spec: Spec, batches: int) -> str | None:
        """A state there: made up where the peer has a way, else a real one; with workers always a real one."""
        forged = None if spec.workers else self.peer.forge(spec, batches)
        return encode(self._real(spec, batches) if forged is None else forged)

    def check_forged(self, spec: Spec, batches: int) -> bool:
        """Whether a made-up state equals a real one and leads to the same samples; False where there is none."""
        forged, real = self.peer.forge(spec, batches), self._real(spec, batches)
        if forged is None:
            return False
        mine, theirs = (comparable(state, self.peer.varying) for state in (forged, real))
        rests = [[numbers for numbers, _ in self.run(spec, encode(state))["passes"][0]] for state in (forged, real)]
        if mine != theirs or rests[0] != rests[1] or not rests[0]:
            raise AssertionError(f"the forged state is not what a real one is: {mine} {theirs}")
        return True

    def _real(self, spec: Spec, batches: int) -> Any:
        loader = self.peer.build(spec)
        iterator = self.peer.iterate(loader)
        for _ in range(batches):
            next(iterator)
        state = self.peer.save(loader, iterator, batches)
        del iterator
        close(loader)
        return state

    def first_batch(self, spec: Spec, state: str) -> float:
        """Seconds from nothing to the first batch after a resume."""
        loaded = decode(state)
        self.prepare(spec)
        if self.peer.compiles:
            next(self.peer.iterate(self.peer.build(spec)))
        gc.collect()
        start = time.perf_counter()
        loader = self.peer.load(spec, loaded)
        iterator = self.peer.iterate(loader)
        next(iterator)
        seconds = time.perf_counter() - start
        del iterator
        close(loader)
        return seconds

    def stretch(self, spec: Spec, apart: int) -> float:
        """Microseconds a batch, so many batches from an epoch's beginning and its end; the loader stays for the next.

        The clock stops while there is still as much to read ahead as when it started, and nothing comes between the
        batches before it and those that count: a pause would fill what a loader has ready. As in a training loop, a
        batch is held while the next one is made.
        """
        if self.live is None or self.live[0] != spec:
            if self.live is not None:
                close(self.live[1])
            self.live = spec, self.peer.build(spec)
        timed = spec.size // spec.batch_size - 2 * apart
        gc.collect()
        iterator = self.peer.iterate(self.live[1])
        for _ in range(apart):
            batch = next(iterator)
        start = time.perf_counter()
        for _ in range(timed):
            batch = next(iterator)
        seconds = time.perf_counter() - start
        del batch
        for _ in iterator:
            pass
        return seconds / timed * 1e6

    def measure_state(self, spec: Spec) -> dict[str, Any]:
        """Of a loader that has run for a while: the bytes of a state, what it takes, and the process's peak memory."""
        batches = min(200, spec.size // spec.batch_size // 2)
        loader = self.peer.build(spec)
        iterator = self.peer.iterate(loader)
        for _ in range(batches):
            next(iterator)
        form, content = as_saved(self.peer.save(loader, iterator, batches))
        times: list[float] = []
        while len(times) < 200 and sum(times) < 0.5:
            start = time.perf_counter()
            self.peer.save(loader, iterator, batches)
            times.append(time.perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        del iterator
        close(loader)
        return {
            "bytes": len(content), "form": form, "microseconds": statistics.median(times) * 1e6, "peak_mib": peak
        }  # fmt: skip

    def warm_up(self) -> None:
        """Everything once, so that nothing is imported or compiled later."""
        spec = Spec()
        self.prepare(spec)
        state = self.run(spec, save_at=2)["state"]
        answer = self.run(spec, state=state)
        if "error" in answer:
            raise RuntimeError(f"{self.peer.name} does not run: {answer['error']}: {answer['message']}")


def serve(peer: Peer, memory: float) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what peers print
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory * 2**30),) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)  # for Streaming
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")
    server = Server(peer)
    if WORLD_SIZE == 1:
        server.warm_up()

    def answer(content: Any) -> None:
        print(json.dumps(content), file=answers, flush=True)

    answer({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        spec = Spec(**command.pop("spec"))
        try:
            answer({"value": getattr(server, command.pop("do"))(spec, **command)})
        except Exception as error:  # noqa: BLE001  # the orchestrator tells it
            answer({"error": type(error).__name__, "message": str(error)[:500]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--memory", type=float, default=8, help="GiB of data that the process may have")
    parser.add_argument("--write", nargs=2, metavar=("FOLDER", "SPEC"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    peer = PEERS[arguments.name]()
    if arguments.write:
        peer.write(Path(arguments.write[0]), Spec(**json.loads(arguments.write[1])))
    else:
        serve(peer, arguments.memory)


if __name__ == "__main__":
    main()
