"""Programs that read on a device, each run in a process of its own: ``gpu_programs.py DEVICE FOLDER NAME [STATES]``.

Without states, a program reads three epochs and prints digests of its batches and states on the way. With them, it
prints for each, under other global seeds, what is left of that epoch and the next.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import midepoch
from midepoch.testing import digest


def square(number: int, height: int, width: int, side: int) -> np.ndarray[Any, Any]:
    coarse = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    return np.kron(coarse, np.ones((side, side, 1), np.uint8))


def write_images(folder: Path, count: int = 48) -> None:
    from PIL import Image

    for number in range(count):
        path = folder / "images" / str(number % 4) / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(square(number, 6 + number % 3, 8, 12)).save(path, quality=90)


# --- loaders ----------------------------------------------------------------------------------------------------------


def dali(folder: str, device: torch.device, fed: bool) -> Any:
    """The file reader, a random crop, a resize, and a random mirror; by DALI, or fed by midepoch."""
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    from midepoch.adapters import dali

    on_gpu = device.type == "cuda"
    decode = {"device": "mixed" if on_gpu else "cpu"}

    @pipeline_def(batch_size=8, num_threads=2, device_id=device.index if on_gpu else None, seed=7)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        root = f"{folder}/images"
        if fed:
            encoded, label = dali.readers.file(root, random_shuffle=True)
            image = fn.decoders.image_slice(encoded, *dali.random.crop_window(encoded), axis_names="HW", **decode)
            mirror = dali.random.coin_flip()
        else:
            encoded, label = fn.readers.file(file_root=root, random_shuffle=True, name="Reader")
            image, mirror = fn.decoders.image_random_crop(encoded, **decode), fn.random.coin_flip()
        image = fn.crop_mirror_normalize(fn.resize(image, resize_x=32, resize_y=32), crop=(28, 28), mirror=mirror)
        return image, label.gpu() if on_gpu else label

    options = {} if fed else {"reader_name": "Reader"}
    return midepoch.wrap(DALIGenericIterator([pipeline()], ["data", "label"], **options), seed=7)


def ffcv(folder: str, device: torch.device) -> Any:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Cutout, RandomHorizontalFlip, Squeeze, ToDevice, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    path = f"{folder}/images.beton"
    if not os.path.exists(path):  # noqa: PTH110
        writer = DatasetWriter(path, {"image": RGBImageField(write_mode="jpg"), "label": IntField()}, num_workers=1)
        writer.from_indexed_dataset([(square(number, 4, 5, 16), number) for number in range(60)])
    cut = [RandomResizedCropRGBImageDecoder((24, 24)), RandomHorizontalFlip(), Cutout(8)]
    image = [*cut, ToTensor(), ToDevice(device, non_blocking=True), ToTorchImage()]
    label = [IntDecoder(), ToTensor(), ToDevice(device), Squeeze()]
    pipelines = {"image": image, "label": label}
    source = Loader(path, 8, num_workers=2, order=OrderOption.RANDOM, pipelines=pipelines, drop_last=False, seed=4)
    return midepoch.wrap(source, seed=4)


class Drawing(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        image = torch.rand(3, 8, 8)
        return (image.flip(-1) if random.random() < 0.5 else image) + float(np.random.rand()), number


class Mixing(torch.nn.Module):
    """Mixup, noise from a generator of its own, and dropout, on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.dropout = device, torch.nn.Dropout(0.2)
        self.generator = torch.Generator(device).manual_seed(5)

    def forward(self, batch: Any) -> Any:
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        share, others = torch.rand((), device=self.device), torch.randperm(len(images), device=self.device)
        images = share * images + (1 - share) * images[others]
        noise = torch.randn(images.shape, device=self.device, generator=self.generator)
        return self.dropout(images + noise * 0.01), labels


def loader(device: torch.device, workers: int = 0, **options: Any) -> Any:
    source = DataLoader(Drawing(), 8, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda")
    return midepoch.wrap(source, seed=3, **options)


LOADERS: dict[str, Callable[[str, torch.device], Any]] = {
    "dali": functools.partial(dali, fed=False),
    "dali-fed": functools.partial(dali, fed=True),
    "ffcv": ffcv,
    "then": lambda folder, device: loader(device, then=Mixing(device)),
    "then-workers": lambda folder, device: loader(device, 2, then=Mixing(device)),
}


def seed(number: int, device: torch.device) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    torch.rand(number, device=device)


def devices_of(batch: Any) -> set[str]:
    parts = batch[0].values() if isinstance(batch, list) and isinstance(batch[0], dict) else batch
    return {str(part.device) for part in parts}


def read_whole(folder: str, device: torch.device, name: str) -> dict[str, Any]:
    seed(1, device)
    before = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    made = LOADERS[name](folder, device)
    epochs, states, devices = [], {}, set()
    for epoch in range(3):
        batches = []
        for number, batch in enumerate(made):
            batches.append(digest(batch))
            devices |= devices_of(batch)
            if epoch < 2 and number in (1, 4):
                states[f"{epoch},{number}"] = made.state_dict()
        epochs.append(batches)
        if epoch == 0:
            states[f"0,{len(batches) - 1}"] = made.state_dict()
    after = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    return {"epochs": epochs, "states": states, "devices": sorted(devices), "untouched": torch.equal(before, after)}


def read_rest(folder: str, device: torch.device, name: str, states: list[dict[str, Any]]) -> list[list[list[str]]]:
    found = []
    for number, state in enumerate(states, 7):
        seed(number, device)
        made = LOADERS[name](folder, device)
        made.load_state_dict(state)
        found.append([[digest(batch) for batch in made] for _ in range(2)])
    return found


# --- loops ------------------------------------------------------------------------------------------------------------


def ahead(made: Any, device: torch.device, count: int = 2) -> Iterator[tuple[Any, int]]:
    """Batches copied on a stream of their own, `count` ahead of the loop, each with how many are in flight."""
    stream: Any = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    waiting: deque[Any] = deque()
    batches = iter(made)

    def fetch() -> None:
        for batch in batches:
            with torch.cuda.stream(stream):
                waiting.append([part.to(device, non_blocking=True) for part in batch])
            return

    for _ in range(count):
        fetch()
    while waiting:
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        batch = waiting.popleft()
        fetch()
        yield batch, len(waiting)


def prefetched(device: torch.device) -> tuple[list[str], list[str]]:
    """Digests of an epoch, and of one that was cut at batch 5 and went on in another loader."""
    whole = [digest(batch) for batch, _ in ahead(loader(device, 2), device)]
    cut, state = [], {}
    first = loader(device, 2)
    for batch, in_flight in ahead(first, device):
        cut.append(digest(batch))
        if len(cut) == 5:
            state = first.state_dict(in_flight=in_flight)
            break
    first.close()
    second = loader(device, 2)
    second.load_state_dict(state)
    return whole, cut + [digest(batch) for batch, _ in ahead(second, device)]


def train(folder: str, device: torch.device, name: str, die_at: int) -> dict[str, Any]:
    """Two epochs with a snapshot every five steps. Dies after a step, or returns losses and a digest of the weights."""
    seed(die_at, device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 7), torch.nn.Dropout(0.3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    made, losses, steps = loader(device, 2), [], 0
    snapshot = midepoch.Snapshot(f"{folder}/{name}.pt", every=5, model=model, optimizer=optimizer, data=made)
    for _ in snapshot.epochs(2):
        for images, labels in made:
            loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device) % 7)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            snapshot.step()
            steps += 1
            if steps == die_at:
                os._exit(9)
    return {"losses": losses, "weights": digest(list(model.parameters()))}


def share(folder: str, device: torch.device, backend: str, cut: bool) -> None:
    """One of the ranks that share an epoch; the first prints what all have read."""
    import torch.distributed as dist

    dist.init_process_group(backend)
    made = midepoch.wrap(DataLoader(Drawing(), 4, shuffle=True), seed=2)
    path = Path(folder, "shared.pt")
    if path.exists():
        made.load_state_dict(torch.load(path))
    read: list[int] = []
    for number, (images, labels) in enumerate(made):
        total = images.to(device).sum().reshape(1)
        dist.all_reduce(total if backend == "nccl" else total.cpu())
        read += labels.tolist()
        if cut and number == 2:
            break
    state = midepoch.gather(made)
    all_read: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(all_read, read)
    if dist.get_rank() == 0:
        torch.save(state, path)
        print(json.dumps([number for each in all_read for number in each]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    on, where, what, *rest = sys.argv[1:]
    chosen = torch.device(on)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if what == "prefetch":
        print(json.dumps(prefetched(chosen)))
    elif what == "train":
        print(json.dumps(train(where, chosen, rest[0], int(rest[1]))))
    elif what == "share":
        share(where, chosen, rest[0], rest[1] == "cut")
    else:
        print(
            json.dumps(read_rest(where, chosen, what, json.loads(rest[0])) if rest else read_whole(where, chosen, what))
        )
