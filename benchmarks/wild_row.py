"""What a row of the matrix of third-party loaders is, and small data for rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from torch.utils.data import DataLoader

from support.resuming import text_of
from support.sources import Noisy

SIZE, BATCH, SEED, CUT = 26, 4, 3, 2


def first_column(batch: Any) -> list[int]:
    """The samples of a batch whose first number is the sample's own."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return [int(row) for row in batch.reshape(len(batch), -1)[:, 0]]


def text(batch: Any) -> str:
    """A batch's content, the same in each process. A graph's objects refer to one another."""
    if hasattr(batch, "to_pydict"):
        return text_of(batch.to_pydict())
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
        drawn: which samples an epoch has follows from random numbers.
        tests: tests of the repository that run it, in place of a source.
    """

    make: Callable[[], Any]
    packages: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed
    identify: Callable[[Any], list[int]] | None = first_column
    batches: int | None = None
    in_order: bool = False
    drawn: bool = False
    tests: str = ""


def loader(kind: Any = DataLoader, **keywords: Any) -> Any:
    """A DataLoader of this class over samples that draw from all global generators."""
    return kind(Noisy(SIZE), batch_size=BATCH, shuffle=True, **keywords)


KEPT = {"num_workers": 1, "persistent_workers": True}
