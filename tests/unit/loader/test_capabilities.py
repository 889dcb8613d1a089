"""What each loader says of itself is the table of the design: a 'no' where it says yes is a defect."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from support import sources, wild_sources

PROMISES = ["exact_order", "exact_augmentations", "constant_time_resume", "elastic_world", "elastic_workers",
            "rank_independent", "skips"]  # fmt: skip
ALL_YES = "yes yes yes yes yes yes"
REPLAY = "yes yes no no no yes"
REPLAY_SHARED = "yes yes no yes yes yes"

DATA, NOISY = sources.Noisy(8), sources.noisy_loader
TABLE: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "in order": (ALL_YES, DataLoader(DATA), {}),
    "shuffled, in workers": (ALL_YES, NOISY(num_workers=2), {}),
    "DistributedSampler": (ALL_YES, DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 1)), {}),
    "collate that draws": (ALL_YES, NOISY(collate_fn=sources.noisy_collate), {}),
    "listed order": (ALL_YES, DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 8, 8)), {}),
    "own batch sampler": (ALL_YES, DataLoader(DATA, batch_sampler=sources.Buckets(8)), {}),
    "object around, declared": (ALL_YES, wild_sources.OneAhead(NOISY()), {"inside": "loader"}),
    "DataLoader subclass, declared": (ALL_YES, wild_sources.KeepsWorkers(DATA, 2), {"inside": ""}),
    "object around, not declared": (REPLAY, wild_sources.OneAhead(NOISY()), {}),
    "exposed sampler": (ALL_YES, sources.Exposing(8), {}),
    "exposed samplers, in workers": (ALL_YES, DataLoader(sources.Pairs(8), num_workers=2), {}),
    "list of batches": (ALL_YES, [1, 2, 3], {}),
    "tuple of batches": (ALL_YES, (1, 2, 3), {}),
    "generator function": (REPLAY, sources.numbers, {}),
    "re-iterable": (REPLAY, sources.Restartable(8), {}),
    "stream": (REPLAY, sources.Stream(8), {}),
    "stream, divided by itself in workers": (REPLAY, DataLoader(sources.Stream(8), num_workers=2), {"shard": False}),
    "generator function, divided": (REPLAY_SHARED, sources.numbers, {"shard": True}),
    "stream, divided, in workers": (REPLAY_SHARED, DataLoader(sources.Stream(8), num_workers=2), {"shard": True}),
    "drawn from unequally": (REPLAY_SHARED, sources.Rejecting(8, [0, 1, 3, 4, 6]), {"shard": True}),
    "StatefulDataLoader": ("yes yes no no no no", StatefulDataLoader(sources.Indices(8)), {}),
    "own state": ("yes yes yes no no no", sources.Counter(), {}),  # which knows neither ranks nor workers
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_capabilities_are_those_of_the_table_before_and_after(name: str) -> None:
    expected, source, options = TABLE[name]
    with midepoch.wrap(source, **options) as loader:
        for _ in range(2):
            told = vars(loader.capabilities)
            assert list(told) == PROMISES
            assert " ".join("yes" if told[promise] else "no" for promise in PROMISES[:-1]) == expected
            for capability in told.values():
                assert len(capability.reason.split()) >= 3, "each answer has its reason in a sentence"
                assert capability.reason in str(loader.capabilities)
            sources.taken(loader, 2)
