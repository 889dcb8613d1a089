"""An undisturbed wrapped run is the plain one: each kind of source that test_sources has not.

Broken ones are in test_bad_sources. Sources of DALI, FFCV, webdataset, Streaming and packages with a state of their own
have this law in their own files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import midepoch
from midepoch.testing import check_resumable
from support import transparent_sources as sources
from support.sources import every_place

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")

REFUSED = {
    "exposes its sampler, three samples for some",
    "exposes its sampler, none for some",
    "exposes its sampler, flushes",
    "its own iterator with a state, in a DataLoader",
}
"""With two workers, `wrap` asks for shard=, which the message names."""


def examine(make: Callable[..., Any], **how: Any) -> tuple[str, str]:
    report = check_resumable(
        make, laws=["transparent"], identify=sources.identify, timeout=240, raise_on_failure=False, **how
    )
    return report["transparent"].status, str(report)


@pytest.mark.parametrize("name", sources.SOUND)
def test_a_sound_source(name: str) -> None:
    """With and without workers as the platform starts them, on one rank and on two."""
    status, report = examine(sources.SOUND[name], quick=True, world_sizes=(1, 2))
    assert status == ("refused clearly" if name in REFUSED else "holds"), report


NEVER_EXACT = REFUSED | {"a batch sampler as sampler"}
"""The last one raises from its first batch on, as without midepoch."""


@pytest.mark.parametrize("name", [name for name in sources.SOUND if name not in NEVER_EXACT])
def test_a_sound_source_goes_on_at_every_place(name: str) -> None:
    first, second = every_place(sources.SOUND[name])
    assert first and second


# --- a loop that changes its dataset ----------------------------------------------------------------------------------


class Scaled(Dataset[tuple[int, int]]):
    """What the loop changes between two passes."""

    def __init__(self) -> None:
        self.rows, self.scale = list(range(11)), 1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.rows[index] * self.scale


class ScaledStream(Scaled, IterableDataset[tuple[int, int]]):
    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.__getitem__, range(first, len(self), step))


def changes(dataset: Scaled, epoch: int) -> None:
    """Rescales, renews, grows."""
    dataset.scale = 10**epoch
    dataset.rows = [100 * epoch + row for row in range(11 + epoch)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Scaled, ScaledStream])
def test_a_loop_that_changes_its_dataset(kind: type[Scaled], workers: int) -> None:
    """Its own loader and the wrapped one read what the dataset is when a pass begins."""

    def make() -> DataLoader[Any]:
        return DataLoader(kind(), batch_size=2, shuffle=kind is Scaled, num_workers=workers)

    def rows(loader: Any, dataset: Any) -> list[list[Any]]:
        found = []
        for epoch in range(3):
            changes(dataset, epoch)
            batches = [torch.stack(batch, 1).tolist() for batch in loader]
            found.append(sorted(row for batch in batches for row in batch) + sorted(map(len, batches)))
        return found

    plain = make()
    with midepoch.wrap(make(), seed=0, shard=None if kind is Scaled else False) as loader:
        assert rows(loader, loader.source.dataset) == rows(plain, plain.dataset)
