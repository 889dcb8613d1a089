"""torchdata, Hugging Face datasets, Grain, LitData: carried through the uniform calls, their faults mended or told."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))  # the spawned processes take the import path over

import own_state_sources as own
import sources
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import StateError, wrap
from midepoch.loader.loader import Loader
from midepoch.testing import ResumableTests

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")

NEEDED = {
    "torchdata StatefulDataLoader": "torchdata",
    "Hugging Face IterableDataset": "datasets",
    "Hugging Face IterableDataset with a shuffle buffer": "datasets",
    "Grain DataLoader": "grain",
    "Grain IterDataset": "grain",
    "LitData StreamingDataLoader": "litdata",
}


def made(name: str) -> Callable[..., Loader]:
    if NEEDED[name] == "litdata":
        import cpu_torchvision  # noqa: F401
    pytest.importorskip(NEEDED[name], reason=f"{NEEDED[name]} is not installed (pip install midepoch[{NEEDED[name]}])")
    make: Callable[..., Loader] = own.WRAPPED[name]
    return make


def taken(loader: Loader, count: int | None = None) -> list[list[int]]:
    return [own.identify(batch) for batch in itertools.islice(iter(loader), count)]


@pytest.mark.parametrize("name", own.WRAPPED)
def test_every_place_of_two_epochs_is_gone_on_from(name: str) -> None:
    make = made(name)
    loader = make()
    states, epochs = [loader.state_dict()], []
    for _ in range(3):
        epoch = []
        for batch in loader:
            epoch.append(own.identify(batch))
            states.append(loader.state_dict())
        epochs.append(epoch)
    loader.close()
    assert all(sorted(sources.flat(epoch)) == list(range(own.SIZE)) for epoch in epochs)
    whole = sources.flat(epochs)
    for cut in range(2 * len(epochs[0]) + 1):
        torch.manual_seed(1000 + cut), random.seed(cut), np.random.seed(cut)
        fresh = make()
        fresh.load_state_dict(json.loads(json.dumps(states[cut])))
        rest = taken(fresh) + taken(fresh)
        compared = min(len(rest), len(whole) - cut)
        assert compared >= 5
        assert rest[:compared] == whole[cut : cut + compared], f"cut at {cut}"
        fresh.close()
    live = make()
    taken(live)
    for cut in (3, 0, 7, 2, 5, 1, 6, 0):
        live.load_state_dict(states[cut])
        rest = taken(live) + taken(live)
        compared = min(len(rest), len(whole) - cut)
        assert rest[:compared] == whole[cut : cut + compared], f"live, cut at {cut}"


@pytest.mark.parametrize("name", own.WRAPPED)
def test_other_data_is_refused(name: str) -> None:
    make = made(name)
    loader = make()
    taken(loader, 2)
    state = loader.state_dict()
    with pytest.raises(midepoch.MidepochError, match=r"refused its own state|differs"):
        other = make(size=own.SIZE - 5)
        other.load_state_dict(state)
        taken(other)


# exact order, exact augmentations, constant-time resume, elastic world, elastic workers, rank-independent
TOLD = {
    "torchdata StatefulDataLoader": "yes yes no no no no",
    "Hugging Face IterableDataset": "yes no yes no no no",
    "Hugging Face IterableDataset with a shuffle buffer": "yes yes no no no yes",
    "Grain DataLoader": "yes no yes no no no",
    "Grain IterDataset": "yes no yes no no no",
    "LitData StreamingDataLoader": "yes no yes no no no",
}


@pytest.mark.parametrize("name", own.WRAPPED)
def test_capabilities_are_told_truthfully(name: str) -> None:
    told = made(name)().capabilities
    assert " ".join("yes" if answer else "no" for answer in vars(told).values()) == TOLD[name], str(told)


def test_torchdata_s_augmentations_are_exact_in_this_process_and_not_promised_in_workers() -> None:
    def make(num_workers: int = 0) -> Loader:
        source = StatefulDataLoader(sources.Noisy(14), 3, shuffle=True, num_workers=num_workers)
        return wrap(source, seed=5)

    whole = sources.taken(make())
    for cut in range(5):
        state = sources.heads(make, cut)[1]
        torch.manual_seed(cut), random.seed(cut), np.random.seed(cut)
        assert sources.resumed(make, state) == whole[cut:]
    assert not make(2).capabilities.exact_augmentations
    assert "num_workers" in _refusal(make(2), sources.heads(make, 2)[1])


def _refusal(loader: Loader, state: dict[str, Any]) -> str:
    with pytest.raises(StateError) as raised:
        loader.load_state_dict(state)
    return str(raised.value)


def test_hugging_face_rows_go_on_on_any_number_of_ranks_and_workers() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (pip install midepoch[datasets])")
    rows = datasets.Dataset.from_dict({"number": list(range(24))}).with_format("torch")

    def make(rank: int, world_size: int, num_workers: int = 0) -> Loader:
        loader = DataLoader(rows, batch_size=2, shuffle=True, num_workers=num_workers)
        return wrap(loader, seed=1, world=midepoch.World(rank, world_size))

    assert all(vars(make(0, 1).capabilities).values())
    two = [make(rank, 2) for rank in range(2)]
    head = [taken(loader, 3) for loader in two]
    state = two[1].state_dict()
    rest = []
    for rank in range(3):
        loader = make(rank, 3, num_workers=rank)
        loader.load_state_dict(state)
        rest.append(taken(loader))
        loader.close()
    assert Counter(sources.flat(sources.flat(head + rest))) == Counter(range(24))


def test_an_iterable_of_hugging_face_is_told_of_the_epoch() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (pip install midepoch[datasets])")

    def make() -> Loader:
        rows = datasets.Dataset.from_dict({"number": list(range(24))}).to_iterable_dataset(num_shards=6)
        return wrap(rows.shuffle(seed=2, buffer_size=4))

    loader = make()
    epochs = [taken(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    fresh = make()
    fresh.set_epoch(2)
    assert taken(fresh) == epochs[2]


class _Own(ResumableTests):
    identify: ClassVar[Any] = staticmethod(own.identify)
    world_sizes = (1,)  # they divide themselves, by what each takes for the world
    quick = True


class TestTorchdata(_Own):
    make_loader = staticmethod(own.wrapped_torchdata)
    shuffled = True
    elastic_content = False  # numbers are those of the batch, and of the worker


class TestDatasets(_Own):
    make_loader = staticmethod(own.wrapped_datasets_stream)


class TestDatasetsBuffered(_Own):
    make_loader = staticmethod(own.wrapped_datasets_buffered)
    shuffled = True


class TestGrainLoader(_Own):
    make_loader = staticmethod(own.wrapped_grain_loader)


class TestGrainDataset(_Own):
    make_loader = staticmethod(own.wrapped_grain_dataset)


class TestLitData(_Own):
    make_loader = staticmethod(own.wrapped_litdata_loader)
    shuffled = True
