"""What docs/howto.md says: what moves the global generators, and what a Snapshot keeps of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
from support.sources import Noisy


def moves(loader: Any) -> list[bool]:
    """Whether each of three passes moves torch's global generator."""
    found = []
    for _ in range(3):
        before = torch.get_rng_state()
        list(loader)
        found.append(not torch.equal(torch.get_rng_state(), before))
    return found


@pytest.mark.parametrize(
    ("settings", "plain"),
    [({}, [True] * 3), ({"num_workers": 1}, [True] * 3),
     ({"num_workers": 1, "persistent_workers": True}, [True, False, False])],
)  # fmt: skip
def test_a_plain_loader_draws_and_a_wrapped_one_never(
    settings: dict[str, Any], plain: list[bool]
) -> None:
    assert moves(DataLoader(range(8), batch_size=4, **settings)) == plain  # type: ignore[arg-type]
    with midepoch.wrap(DataLoader(Noisy(8), batch_size=4, **settings)) as loader:
        assert moves(loader) == [False] * 3


class LeftError(Exception):
    pass


def program(path: Path, kind: str, limit: int | None) -> list[Any]:
    """What a training loop draws and sees in its validations, from where it is resumed until `limit` batches."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    train = midepoch.wrap(DataLoader(range(12), batch_size=2, shuffle=True), seed=1)  # type: ignore[arg-type]
    settings: dict[str, Any] = {} if "no workers" in kind else {"num_workers": 1}
    if "persistent" in kind:
        settings["persistent_workers"] = True
    validation: Any = DataLoader(Noisy(8), batch_size=4, shuffle=True, **settings)
    parts = {"data": train}
    if "wrapped" in kind:
        validation = midepoch.wrap(validation, seed=2)
        parts |= {"validation": validation} if "as a part" in kind else {}
    snapshot = midepoch.Snapshot(path, every=2, signals=(), parts=parts)
    seen: list[Any] = []
    for epoch in snapshot.epochs(3):
        for _ in train:
            seen.append((float(torch.rand(())), random.random(), float(np.random.rand())))
            if limit is not None and len(seen) > limit:
                raise LeftError
            snapshot.step()
        seen.append((epoch, [batch.tolist() for batch in validation]))
    return seen


@pytest.mark.parametrize(
    ("kind", "exact"),
    [
        ("plain, no workers", True),
        ("plain", True),
        ("plain, persistent", False),
        ("wrapped, persistent", False),  # it shuffles, and begins with epoch 0
        ("wrapped, persistent, as a part", True),
    ],
)
def test_a_resume_with_evaluation_loaders(kind: str, exact: bool, tmp_path: Path) -> None:
    whole = program(tmp_path / "whole.pt", kind, None)
    with pytest.raises(LeftError):
        program(tmp_path / "cut.pt", kind, 10)  # in the second epoch, the seventh line being the first validation
    rest = program(tmp_path / "cut.pt", kind, None)
    assert len(rest) == len(whole) - 9
    assert (rest == whole[9:]) == exact
    # Wrapped, it leaves all that the training loop draws alone.
    drawn = [[line for line in lines if len(line) == 3] for lines in (rest, whole[9:])]
    assert (drawn[0] == drawn[1]) == (kind != "plain, persistent")


def test_a_generator_of_the_programs_own_is_not_kept(tmp_path: Path) -> None:
    """The docs have a part that keeps it."""
    own, loader = torch.Generator().manual_seed(1), midepoch.wrap([[1], [2]])
    with midepoch.Snapshot(tmp_path / "snapshot.pt", data=loader) as snapshot:
        snapshot.save()
        drawn = [float(torch.rand((), generator=own)), float(torch.rand(()))]
        snapshot.load()
        again = [float(torch.rand((), generator=own)), float(torch.rand(()))]
    assert again[0] != drawn[0] and again[1] == drawn[1]
