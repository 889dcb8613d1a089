"""What each loader says of itself is the table of the design: a 'no' where it says yes is a defect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import Capabilities
from midepoch.loader.loader import Loader
from support import sources, wild_sources

# exact order, exact augmentations, constant-time resume, elastic world, elastic workers, rank-independent
ALL_YES = "yes yes yes yes yes yes"
REPLAY = "yes yes no no no yes"
REPLAY_SHARED = "yes yes no yes no yes"
OWN_STATE = "yes yes yes no no no"  # as the source's own; its own state knows neither ranks nor workers

TABLE: dict[str, tuple[str, Callable[[], Loader]]] = {
    "DataLoader, map-style, sequential": (ALL_YES, lambda: midepoch.wrap(DataLoader(sources.Noisy(8)))),
    "DataLoader, map-style, shuffled": (ALL_YES, lambda: midepoch.wrap(sources.noisy_loader())),
    "DataLoader, map-style, in workers": (ALL_YES, lambda: midepoch.wrap(sources.noisy_loader(num_workers=2))),
    "DataLoader, DistributedSampler": (
        ALL_YES,
        lambda: midepoch.wrap(
            DataLoader(sources.Noisy(8), sampler=DistributedSampler(sources.Noisy(8), 2, 1)),
        ),
    ),
    "DataLoader, collate that draws": (
        ALL_YES, lambda: midepoch.wrap(sources.noisy_loader(collate_fn=sources.noisy_collate))
    ),
    "DataLoader, listed order": (
        ALL_YES,
        lambda: midepoch.wrap(DataLoader(sources.Noisy(8), sampler=WeightedRandomSampler([1.0] * 8, 8))),
    ),
    "DataLoader, own batch sampler": (
        ALL_YES, lambda: midepoch.wrap(DataLoader(sources.Noisy(8), batch_sampler=sources.Buckets(8)))
    ),
    "object around a DataLoader, with inside=": (
        ALL_YES, lambda: midepoch.wrap(wild_sources.OneAhead(sources.noisy_loader()), inside="loader")
    ),
    "DataLoader subclass, with inside=": (
        ALL_YES, lambda: midepoch.wrap(wild_sources.KeepsWorkers(sources.Noisy(8), 2), inside="")
    ),
    "object around a DataLoader, not declared": (
        REPLAY, lambda: midepoch.wrap(wild_sources.OneAhead(sources.noisy_loader()))
    ),
    "iterable exposing samplers": (ALL_YES, lambda: midepoch.wrap(sources.Exposing(8))),
    "iterable exposing several": (ALL_YES, lambda: midepoch.wrap(sources.Pairs(8))),
    "iterable exposing samplers, in workers": (
        ALL_YES, lambda: midepoch.wrap(DataLoader(sources.Exposing(8), num_workers=2))
    ),
    "list of batches": (ALL_YES, lambda: midepoch.wrap([1, 2, 3])),
    "tuple of batches": (ALL_YES, lambda: midepoch.wrap((1, 2, 3))),
    "generator function": (REPLAY, lambda: midepoch.wrap(sources.numbers)),
    "re-iterable": (REPLAY, lambda: midepoch.wrap(sources.Restartable(8))),
    "IterableDataset without samplers": (REPLAY, lambda: midepoch.wrap(sources.Stream(8))),
    "IterableDataset in a loader": (REPLAY, lambda: midepoch.wrap(DataLoader(sources.Stream(8)))),
    "IterableDataset that shards itself, in workers": (
        REPLAY, lambda: midepoch.wrap(DataLoader(sources.Stream(8), num_workers=2), shard=False)
    ),
    "generator function, shard=True": (REPLAY_SHARED, lambda: midepoch.wrap(sources.numbers, shard=True)),
    "IterableDataset, shard=True, in workers": (
        REPLAY_SHARED, lambda: midepoch.wrap(DataLoader(sources.Stream(8), num_workers=2), shard=True)
    ),
    "samplers that are drawn from unequally": (
        REPLAY_SHARED, lambda: midepoch.wrap(sources.Rejecting(8, [0, 1, 3, 4, 6]), shard=True)
    ),
    "StatefulDataLoader": ("yes yes no no no no", lambda: midepoch.wrap(StatefulDataLoader(sources.Indices(8)))),
    "source with its own state": (OWN_STATE, lambda: midepoch.wrap(sources.Counter())),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_capabilities_are_those_of_the_table(name: str) -> None:
    expected, make = TABLE[name]
    with make() as loader:
        told = loader.capabilities
    assert list(vars(told)) == [
        "exact_order", "exact_augmentations", "constant_time_resume", "elastic_world", "elastic_workers",
        "rank_independent", "skips",
    ]  # fmt: skip
    of_table = list(vars(told).values())[:-1]
    assert " ".join("yes" if capability else "no" for capability in of_table) == expected, str(told)
    for capability in vars(told).values():
        assert len(capability.reason.split()) >= 3, "each answer has its reason in a sentence"
        assert capability.reason in str(told)


@pytest.mark.parametrize("name", TABLE)
def test_capabilities_do_not_change_with_use(name: str) -> None:
    make = TABLE[name][1]
    with make() as loader:
        before = answers(loader.capabilities)
        sources.taken(loader, 2)
        assert answers(loader.capabilities) == before


def answers(told: Capabilities) -> dict[str, bool]:
    return {field.name: bool(getattr(told, field.name)) for field in fields(told)}
