"""Which process this is, and that each rank's batches are those of torch's DistributedSampler and DataLoader."""

from __future__ import annotations

import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

import midepoch
from midepoch import MidepochError, World
from midepoch.world import Share, Tail
from support import sources

TAILS: list[Tail] = ["pad", "drop", "uneven"]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def _outside_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


# --- the world ---


# RANK, WORLD_SIZE and LOCAL_RANK, as far as they are set.
@pytest.mark.parametrize(("values", "expected"), [
    ((), World()), (("3", "8", "1"), World(3, 8, 1)), (("3", "8"), World(3, 8, 0)), ((None, "1"), World()),
    (("1",), "WORLD_SIZE"), ((None, "2"), "RANK"), ((None, "2", "0"), "RANK"), (("one", "2"), "RANK='one'"),
    (("5", "2"), r"RANK=5, WORLD_SIZE=2.*\[0, 2\)"),
], ids=str)  # fmt: skip
def test_the_environment_names_the_world_or_is_refused(values: Any, expected: Any, monkeypatch: Any) -> None:
    for name, value in zip(VARIABLES, values, strict=False):
        if value:
            monkeypatch.setenv(name, value)
    if isinstance(expected, World):
        assert World.current() == expected
    else:
        with pytest.raises(MidepochError, match=expected):
            World.current()


@pytest.mark.parametrize("values", [(-1, 2), (2, 2), (0, 0), (0, 1, -1), ("0", 2), (0, 2.0), (True, 2)], ids=str)
def test_a_world_checks_its_values(values: tuple[Any, ...]) -> None:
    integers = all(type(value) is int for value in values)
    with pytest.raises(ValueError if integers else TypeError, match="World"):
        World(*values)


def test_the_device_follows_from_the_local_rank() -> None:
    expected = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    assert World(5, 8, 0).device == expected


def _worlds(rank: int) -> dict[str, Any]:
    """What one of four ranks sees: alone, in a group of two, in a mesh of two by two, against the environment."""
    every_group = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    own = every_group[rank % 2]
    before: Any = torch.utils.data.DataLoader(range(8), batch_size=1)  # type: ignore[arg-type]

    def told_by(world: World | None) -> tuple[list[str], list[Any]]:
        with warnings.catch_warnings(record=True, action="always") as told:
            loader = midepoch.wrap(before, seed=0, world=world)
            taken = [batch.tolist() for _ in range(2) for batch in loader]
        return [str(each.message) for each in told if "DeviceMesh" in str(each.message)], taken

    init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))  # no rank shares a batch with another
    alone = told_by(None)[0]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    seen: dict[str, Any] = {"current": World.current(), "group": World.from_group(own), "alone": alone}
    seen |= {"dp": World.from_mesh(mesh["dp"]), "tp": World.from_mesh(mesh["tp"])}
    for name, world in (("silent", World.current()), ("shared", seen["dp"]), ("unstated", None)):
        seen[name] = told_by(world)
    refused: dict[str, Callable[[], World]] = {
        "another's group": lambda: World.from_group(every_group[1 - rank % 2]),
        "two dimensions": lambda: World.from_mesh(mesh),
    }
    for name, make in refused.items():
        try:
            make()
        except (MidepochError, ValueError) as error:
            seen[name] = f"{type(error).__name__}: {error}"
    os.environ["WORLD_SIZE"] = "3"
    try:
        World.current()
    except MidepochError as error:
        seen["disagreement"] = str(error)
    finally:
        del os.environ["WORLD_SIZE"]
    return seen


def test_groups_and_meshes_of_real_processes() -> None:
    for rank, seen in enumerate(sources.in_gloo_world(_worlds, 4)):
        assert (seen["current"], seen["tp"]) == (World(rank, 4), World(rank % 2, 2))
        assert seen["group"] == seen["dp"] == World(rank // 2, 2)
        assert seen["another's group"].startswith("MidepochError: this process is not in the group")
        assert seen["two dimensions"].startswith("ValueError: World.from_mesh needs one dimension, got 2")
        assert "world_size 4" in seen["disagreement"] and "WORLD_SIZE=3" in seen["disagreement"]
        assert seen["alone"] == seen["silent"][0] == seen["shared"][0] == []
        (warned,) = seen["unstated"][0]  # once, not in each epoch
        assert "a DeviceMesh with dimensions dp, tp is in use" in warned
        assert "World.from_mesh(mesh['dp'])" in warned and "World.current()" in warned
        assert seen["unstated"][1] == seen["silent"][1]


# --- the share ---


def positions(share: Share) -> list[list[int]]:
    """The positions of each batch, repeats as the positions they repeat."""
    return [[place % share.size for place in range(*share.span(step))] for step in range(share.steps)]


@pytest.mark.parametrize("drop_last", [False, True], ids=["all", "drop_last"])
@pytest.mark.parametrize("even", [False, True], ids=["pad", "drop"])
def test_every_rank_gets_as_many_as_from_distributed_sampler(even: bool, drop_last: bool) -> None:
    for batch_size, world_size, size in itertools.product(range(1, 4), range(1, 5), range(1, 26)):
        ranks = range(world_size)
        tail: Tail = "drop" if even else "pad"
        theirs = [sources.torch_batches(rank, world_size, size, batch_size, drop_last, even) for rank in ranks]
        shares = [Share(size, 0, batch_size, World(rank, world_size), tail, drop_last) for rank in ranks]
        ours = [positions(share) for share in shares]
        place = f"size {size}, batch {batch_size}, world {world_size}"
        assert [list(map(len, rank)) for rank in ours] == [list(map(len, rank)) for rank in theirs], place
        assert [share.steps for share in shares] == [len(rank) for rank in theirs], place
        if not drop_last:
            # The same repeats, too; where batches are dropped, torch's strides drop others than our blocks.
            counted = Counter(sources.flat(sources.flat(ours)))
            assert counted == Counter(sources.flat(sources.flat(theirs))), place
