"""An undisturbed wrapped run is the plain one: each kind of source that test_sources has not.

Broken ones are in test_bad_sources. Sources of DALI, FFCV, webdataset, Streaming and packages with a state of their own
have this law in their own files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import midepoch
from midepoch.testing import check_resumable
from support import sources
from support.transparent_sources import SOUND, identify

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")

REFUSED = {
    "exposes its sampler, three samples for some", "exposes its sampler, none for some", "exposes its sampler, flushes",
    "its own iterator with a state, in a DataLoader",
}  # fmt: skip
"""With two workers, `wrap` asks for shard=, which the message names."""


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_source(name: str) -> None:
    """With and without workers as the platform starts them, on one rank and on two."""
    report = check_resumable(
        SOUND[name], laws=["transparent"], identify=identify, quick=True, world_sizes=(1, 2), timeout=240,
        raise_on_failure=False,
    )  # fmt: skip
    assert report["transparent"].status == ("refused clearly" if name in REFUSED else "holds"), str(report)


NEVER_EXACT = REFUSED | {"a batch sampler as sampler"}
"""The last one raises from its first batch on, as without midepoch."""


@pytest.mark.parametrize("name", [name for name in SOUND if name not in NEVER_EXACT])
def test_a_sound_source_goes_on_at_every_place(name: str) -> None:
    first, second = sources.every_place(SOUND[name])
    assert first and second


# --- a loop that changes its dataset ----------------------------------------------------------------------------------


class Scaled(sources.Indices):
    """What the loop changes between two passes."""

    scale = 1

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), index * self.scale


class ScaledStream(Scaled, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, sources.part_of_worker(self.size))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Scaled, ScaledStream])
def test_a_loop_that_changes_its_dataset(kind: type[Scaled], workers: int) -> None:
    """Its own loader and the wrapped one read what the dataset is when a pass begins."""

    def make() -> DataLoader[Any]:
        return DataLoader(kind(11), batch_size=2, shuffle=kind is Scaled, num_workers=workers)

    def rows(loader: Any, dataset: Any) -> list[list[Any]]:
        found = []
        for epoch in range(3):
            dataset.scale, dataset.size = 10**epoch, 11 + epoch
            batches = [torch.stack(batch, 1).tolist() for batch in loader]
            found.append(sorted(sources.flat(batches)) + sorted(map(len, batches)))
        return found

    plain = make()
    with midepoch.wrap(make(), seed=0, shard=None if kind is Scaled else False) as loader:
        assert rows(loader, loader.source.dataset) == rows(plain, plain.dataset)
