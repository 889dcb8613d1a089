"""What is said of a source, and where: one table, of sources that are not what they seem and of those that are."""

from __future__ import annotations

import importlib
import importlib.util
import os
import queue
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import midepoch
from support import own_state_sources as own
from support import resuming, sources, witness_sources

SIZE, BATCH = 32, 4


# --- samples ----------------------------------------------------------------------------------------------------------


class Drawn(sources.Indices):
    """Sample i is (i, a random number)."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "value": random.random()}


class Popped(sources.Indices):
    """What comes depends on what has been read."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.queue = deque(range(1000))

    def __getitem__(self, index: int) -> int:
        return self.queue.popleft()


class OfTheSeed(Drawn):
    """Derives a generator for each sample from the seed of the process, and draws from no other."""

    def __getitem__(self, index: int) -> Any:
        return index, float(np.random.default_rng(torch.initial_seed() + index).random())


class Entropy(Drawn):
    """Noise from a generator that the operating system seeds, as those in C++ libraries are."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((64,), float(index)), np.random.default_rng().normal(size=3)


class SometimesEntropy(Drawn):
    """A few samples, never the first of an epoch that is read in order, draw from the operating system."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        return {**item, "value": int.from_bytes(os.urandom(6))} if index % 7 == 5 else item


class MixesNeighbours(Drawn):
    """Each sample holds something of the one before, if they are neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.before = -1

    def __getitem__(self, index: int) -> Any:
        mixed = index + (self.before if self.before == index - 1 and index % 5 == 4 else 0)
        self.before = index
        return {"index": index, "value": mixed}


class KeepsAugmentations(Drawn):
    """Keeps what was drawn when a sample was first read, in whichever epoch that was."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        return self.kept.setdefault(index, super().__getitem__(index))


class KnowsItsProcess(Drawn):
    """Looks like a function of its index within one process."""

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "value": os.getpid()}


class Files(Drawn):
    """Pictures in a folder. What differs in the process that resumes is in its environment.

    MIDEPOCH_LISTED: the names come in another order, as ``glob`` without ``sorted`` has them on another machine.
    MIDEPOCH_CHANGED: the augmentation ("code"), or what the files hold ("files").
    """

    def __init__(self) -> None:
        super().__init__()
        self.names = list(range(SIZE))
        if "MIDEPOCH_LISTED" in os.environ:
            random.Random(1).shuffle(self.names)

    def __getitem__(self, index: int) -> Any:
        number, changed = self.names[index], os.environ.get("MIDEPOCH_CHANGED", "")
        drawn = np.random.default_rng(number + 999 * (changed == "files")).integers(0, 256, (8, 8))
        picture = torch.from_numpy(drawn.astype(np.uint8)).float()
        return picture / 255 + random.random() * (0.11 if changed == "code" else 0.1)


class NamedFiles(Files):
    """The same with the files' names, and with other names where the files are others."""

    def __getitem__(self, index: int) -> Any:
        number = self.names[index] + SIZE * (os.environ.get("MIDEPOCH_CHANGED") == "files")
        return super().__getitem__(index), f"/data/{number:05d}.png"


class Beside(Drawn):
    """What differs between two processes or machines stands beside what matters."""

    def __init__(self, what: Callable[[], Any]) -> None:
        super().__init__()
        self.what = what

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.from_numpy(witness_sources.image_of(index)), "beside": self.what()}


class Graph:
    """An object without equality, with tensors as attributes."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Graphs(Drawn):
    def __getitem__(self, index: int) -> Any:
        nodes = index % 5 + 1
        return Graph(x=torch.rand(nodes, 2), edges=torch.arange(nodes).repeat(2, 1), y=index)


class Together:
    """A collate function that is an object, which makes one graph of many."""

    def __call__(self, graphs: list[Any]) -> Any:
        return Graph(x=torch.cat([each.x for each in graphs]), y=torch.tensor([each.y for each in graphs]))


class Augmentation(torch.nn.Module):
    """Keeps the parameters that it drew last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.params: dict[str, torch.Tensor] = {}

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.params = {"angle": torch.rand(1), "applied": torch.bernoulli(torch.tensor([0.5]))}
        return image * self.scale + self.params["angle"] * self.params["applied"]


class Pictures(Drawn):
    """Pictures from a list of files, with a transform that can be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = [(f"/data/class{number % 3}/{number}.jpg", number % 3) for number in range(SIZE)]
        self.transform = torch.nn.Sequential(Augmentation(), Augmentation())

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        return self.transform(torch.full((3, 8, 8), float(index))), target, path


class Cuts(Dataset[Any]):
    def __getitem__(self, cuts: list[str]) -> Any:
        return {"cuts": cuts, "noise": torch.rand(len(cuts))}


# --- orders -----------------------------------------------------------------------------------------------------------


class Private(Sampler[int]):
    """One rank's list, under names of its own."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return SIZE // self._world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._rank, SIZE, self._world_size))


class Holding(Sampler[list[int]]):
    """A batch sampler that holds a sampler under another name than ``sampler``."""

    def __init__(self, inner: Any) -> None:
        self.order = inner

    def __len__(self) -> int:
        return len(self.order) // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self.order, BATCH, True))


def rank_and_world() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "2"))


def private_names() -> Any:
    return DataLoader(sources.Indices(SIZE), BATCH, sampler=Private(*rank_and_world()))


def distributed_inside() -> Any:
    rank, world_size = rank_and_world()
    inner: Any = DistributedSampler(range(SIZE), world_size, rank)  # type: ignore[arg-type]
    return DataLoader(sources.Indices(SIZE), batch_sampler=Holding(inner))


def built_for_one() -> Any:
    """The cure that the message names."""
    inner: Any = DistributedSampler(range(SIZE), num_replicas=1, rank=0)  # type: ignore[arg-type]
    return DataLoader(sources.Indices(SIZE), batch_sampler=Holding(inner))


class WandersLater(Sampler[int]):
    """Its list repeats in the first epoch, which is tried, and not in later ones."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.Random(0 if not self.epoch else os.urandom(8)).shuffle(order)
        return iter(order)


class InHashOrder(Sampler[int]):
    """Its list follows a set of names, whose order is another one in each process."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return (int(name) for name in {str(index) for index in range(SIZE)})


class Buckets(Sampler[Any]):
    """Gives whole batches of cuts, filled by their duration, to a dataset that reads batches."""

    def __init__(self) -> None:
        self.durations = {f"cut-{number}": 1 + number % 4 for number in range(SIZE)}
        self.rank, self.world_size, self.epoch = 0, 1, 0
        self.rng: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.rng = random.Random(self.epoch)
        cuts = list(self.durations)
        self.rng.shuffle(cuts)
        batch: list[str] = []
        for cut in cuts:
            batch.append(cut)
            if sum(self.durations[each] for each in batch) >= 8:
                yield batch
                batch = []
        if batch:
            yield batch


# --- streams ----------------------------------------------------------------------------------------------------------


class SeededAnew:
    """Shuffles by a counter of its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        order = random.Random(self.passes)
        for _ in range(SIZE):
            yield order.randrange(1 << 30)


class SameLast:
    """Another order in each process, but each fourth unit, the last before a state, is always the same.

    Args:
        alike: how many units are always the same at the beginning.
    """

    def __init__(self, alike: int) -> None:
        self.alike = alike

    def __iter__(self) -> Iterator[int]:
        entropy = int.from_bytes(os.urandom(4))
        for number in range(SIZE):
            yield number if number < self.alike or number % 4 == 3 else entropy + number


class ReadsAhead:
    """A thread reads ahead of the one that iterates, and draws meanwhile: from a unit on.

    Args:
        alone: how many units come before it.
        paced: it waits a little behind each.
    """

    def __init__(self, alone: int = 0, paced: bool = False) -> None:
        self.alone, self.paced = alone, paced

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.alone):
            yield number, random.random()
        items: queue.Queue[Any] = queue.Queue(1 if self.paced else 2)

        def fill(numbers: Iterator[Any]) -> None:
            for each in numbers:
                items.put(each)
                threading.Event().wait(0.001 * self.paced)
            items.put(None)

        numbers = ((number, random.random()) for number in range(self.alone, SIZE))
        threading.Thread(target=fill, args=(numbers,), daemon=True).start()
        while (item := items.get()) is not None:
            yield item


class Unlike:
    """Batches of a kind, whose content is another one in each pass and process."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        entropy = int.from_bytes(os.urandom(2))
        for number in range(12):
            yield self.make(entropy + number)


def image(number: int) -> Any:
    from PIL import Image

    pixels = np.full((4, 4), number % 251, np.uint8)
    pixels[0, 0] = number // 251 % 251  # so that two numbers hardly ever give the same image
    return Image.fromarray(pixels)


class RepeatsItsBeginning:
    """Each pass begins alike; behind the fourth unit it follows a counter of passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        for number in range(12):
            yield number if number < 4 else 100 * self.passes + number


class CountsAtTheEnd(IterableDataset[int]):
    """Shuffles by a count of its passes, which it raises at the end of each."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.epoch).permutation(SIZE).tolist()
        self.epoch += 1


class CountsBesidesItsSampler(IterableDataset[Any]):
    """Grows harder with every tenth sample, by a count of its own, which no jump moves."""

    def __init__(self) -> None:
        self.sampler = RandomSampler(range(SIZE))

    def __iter__(self) -> Iterator[Any]:
        return ((index, place // 10) for place, index in enumerate(self.sampler))


class WrongLater(own.Stream):
    """Its state is right after the first batch, which is tried, and too far on after the fifth."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self.given != 5 else {**state, "given": 6}


# --- collate functions, and objects around ----------------------------------------------------------------------------


class BatchBefore:
    """Adds half of the batch before, as some mixups do."""

    def __init__(self) -> None:
        self.before: Any = None

    def __call__(self, batch: Any) -> Any:
        batch = batch if isinstance(batch, torch.Tensor) else torch.tensor(batch, dtype=torch.float64)
        before, self.before = self.before, batch
        return batch if before is None or len(before) != len(batch) else (batch + before) / 2


def from_entropy(samples: list[int]) -> Any:
    return torch.tensor(samples) + torch.from_numpy(np.random.default_rng().normal(size=len(samples)))


class Around:
    """An object around a loader, such as one that moves batches to a device."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


def around() -> Any:
    return Around(DataLoader(sources.Indices(SIZE), BATCH, shuffle=True, num_workers=1, persistent_workers=True))


def rows_with_a_transform() -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"number": list(range(SIZE))})
    rows.set_transform(with_noise)
    return DataLoader(rows, BATCH, shuffle=True)


def with_noise(rows: Any) -> Any:
    return {"number": rows["number"], "noise": [random.random() for _ in rows["number"]]}


# --- the table --------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A source, and what is expected of it.

    Attributes:
        make: the source.
        outcome: "exact"; "told", by a warning before the first state can be used; "refused" by `wrap`; "believed":
            capabilities say so, and `midepoch check` finds it; "found": promised, and `midepoch check` finds it; or
            what comes of a resume: "mismatch" (an error) or "warned"; "chain": an error of the replay.
        no: the capability that answers no where it is told.
        changed: environment of the process that resumes.
        wraps: `make` gives a wrapped loader, and takes other keywords of `wrap`.
        trial, words: of what is found.
    """

    make: Callable[..., Any]
    outcome: str
    no: str = ""
    changed: dict[str, str] = {}  # noqa: RUF012
    wraps: bool = False
    trial: str = ""
    words: str = ""


def over(dataset: Callable[[], Any], sampler: Callable[[], Any] | None = None, **more: Any) -> Callable[[], Any]:
    return lambda: DataLoader(dataset(), BATCH, sampler=None if sampler is None else sampler(), **more)


def beside(what: Callable[[], Any], outcome: str, **changed: str) -> Row:
    collate = witness_sources.as_it_is
    return Row(over(lambda: Beside(what), shuffle=True, collate_fn=collate), outcome, changed=changed)


def found(make: Callable[[], Any], trial: str, words: str) -> Row:
    return Row(make, "found", trial=trial, words=words)


def collated_by(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: DataLoader(range(SIZE), BATCH, shuffle=True, collate_fn=make())  # type: ignore[arg-type]


def wrapped(source: Callable[[], Any], **options: Any) -> Callable[..., Any]:
    return lambda **more: midepoch.wrap(source(), **({"seed": 3} | options | more))


def worked_on_by(make: Callable[[], Any]) -> Callable[..., Any]:
    data: Any = range(SIZE)
    return lambda **more: midepoch.wrap(DataLoader(data, BATCH, shuffle=True), seed=3, then=make(), **more)


def enumerated() -> Any:
    loader = DataLoader(Drawn(), BATCH, shuffle=True)
    return lambda: enumerate(loader)


def sound() -> Any:
    """Keeps everything: two epochs of augmented samples under a sampler of its own."""
    return midepoch.wrap(over(lambda: Drawn(24), lambda: WeightedRandomSampler([1.0] * 24, 24))(), seed=5)


ORDER, AUGMENTATIONS = "exact_order", "exact_augmentations"
ROWS: dict[str, Row] = {
    "a queue that is popped": Row(over(Popped), "told", ORDER),
    "generators made from entropy": Row(over(Entropy), "told", AUGMENTATIONS),
    "generators made from the seed of the process": Row(over(OfTheSeed), "told", AUGMENTATIONS),
    "a sampler that divides under private names": Row(private_names, "refused"),
    "a batch sampler that holds a DistributedSampler": Row(distributed_inside, "refused"),
    "a sampler built for one process": Row(built_for_one, "exact"),
    "around workers that are kept": Row(wrapped(around, inside="loader"), "exact", wraps=True),
    "shuffles seeded anew in each pass": Row(SeededAnew, "told", ORDER),
    "a thread that reads ahead": Row(ReadsAhead, "believed"),
    "a replay with the same last unit": Row(lambda: SameLast(0), "told", ORDER),
    "a replay that begins and ends alike": Row(lambda: SameLast(2), "chain"),
    "a collate function that adds the batch before": Row(collated_by(BatchBefore), "told", AUGMENTATIONS),
    "a collate function seeded by the system": Row(collated_by(lambda: from_entropy), "believed"),
    "work on batches that adds the batch before": Row(worked_on_by(BatchBefore), "told", AUGMENTATIONS, wraps=True),
    "images": Row(lambda: Unlike(image), "told", ORDER),
    "files as glob lists them": Row(over(NamedFiles), "mismatch", changed={"MIDEPOCH_LISTED": "1"}),
    "other augmentation code": Row(over(Files), "warned", changed={"MIDEPOCH_CHANGED": "code"}),
    "other files": Row(over(NamedFiles), "mismatch", changed={"MIDEPOCH_CHANGED": "files"}),
    # What stands beside a sample is compared only where it is a number or a text that stays.
    "paths on another mount": beside(
        lambda: f"{os.environ.get('AS_MOUNT', '/mnt/a')}/pictures/1.png", "exact", AS_MOUNT="/other/place"
    ),
    "host names": beside(
        lambda: os.environ.get("AS_HOST", socket.gethostname()), "mismatch", AS_HOST="a-node-of-another-name"
    ),
    "objects without equality": beside(witness_sources.Nothing, "exact"),
    # As widely used loaders of other people are built.
    "graphs with a loader of their own": Row(over(Graphs, shuffle=True, collate_fn=Together()), "exact"),
    "modules that augment, in workers": Row(over(Pictures, shuffle=True, num_workers=2), "exact"),
    "rows with a transform": Row(rows_with_a_transform, "exact"),
    "buckets": Row(
        wrapped(lambda: DataLoader(Cuts(), batch_size=None, sampler=Buckets()), shard=False), "exact", wraps=True
    ),
    "a loader in a function": Row(enumerated, "exact"),
    # What a job does not try.
    "a few samples draw entropy": found(over(SometimesEntropy), "samples", r"two reads of sample \d+ differ"),
    "samples mix with their neighbours": found(over(MixesNeighbours), "samples", r"\['value'\]"),
    "augmentations are kept": found(over(KeepsAugmentations), "samples", "between processes"),
    "samples know their process": found(over(KnowsItsProcess), "samples", "between processes"),
    "a list wanders later": found(over(Drawn, WandersLater), "lists", "does not repeat itself"),
    "a list follows a set": found(over(Drawn, InHashOrder), "lists", "begins with"),
    "passes differ after their beginning": found(RepeatsItsBeginning, "passes", "pass 2 over epoch 0"),
    "the end of a pass changes a count": found(CountsAtTheEnd, "passes", "pass 2 over epoch 0"),
    "samples count besides their sampler": found(CountsBesidesItsSampler, "states", "after 1[0-9] batches"),
    "a state is wrong in the middle": found(WrongLater, "states", "after 5 batches"),
    "threads begin to read later": found(lambda: ReadsAhead(4, paced=True), "threads", "threads go on reading"),
}
for _name, _package in (("images", "PIL"), ("rows with a transform", "datasets")):
    if importlib.util.find_spec(_package) is None:
        del ROWS[_name]
FOUND = [name for name, row in ROWS.items() if row.outcome == "found"]


def make(name: str) -> Any:
    """A row's source, wrapped."""
    np.random.seed(0)
    row = ROWS[name]
    return row.make() if row.wraps else midepoch.wrap(row.make(), seed=5)


def save(name: str) -> resuming.Saved:
    """What this process saves of a row."""
    return resuming.save(ROWS[name].make, 4)


def resume_all(saved: dict[str, list[dict[str, Any]]], seed: int) -> dict[str, list[resuming.Resumed]]:
    """What comes of the states of each row, in this process."""
    return {name: resuming.resume(ROWS[name].make, states, seed, ROWS[name].changed) for name, states in saved.items()}


def refusals(name: str, rank: int) -> str:
    """What `wrap` says on a rank of two."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)})
    try:
        midepoch.wrap(ROWS[name].make(), seed=3)
    except midepoch.UnsupportedSourceError as error:
        return str(error)
    finally:
        for each in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[each]
    return ""
