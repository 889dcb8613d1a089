"""A wrapped loader where programs and trainers expect a DataLoader."""

from __future__ import annotations

import copy
import pickle
from typing import Any, assert_type

import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
from midepoch import UnsupportedSourceError, World
from support import sources


class Rows(sources.Indices):
    def __getitem__(self, index: int) -> Any:
        return {"input_ids": torch.tensor([float(super().__getitem__(index))]), "labels": torch.tensor([0.0])}


def source(**keywords: Any) -> DataLoader[Any]:
    return DataLoader(Rows(20), batch_size=4, shuffle=True, **keywords)


def streamed() -> DataLoader[Any]:
    return DataLoader(sources.Stream(8), batch_size=2)


@pytest.mark.parametrize("name", [
    "dataset", "batch_size", "num_workers", "drop_last", "collate_fn", "pin_memory", "generator", "timeout",
    "prefetch_factor", "worker_init_fn", "persistent_workers", "multiprocessing_context",
])  # fmt: skip
def test_reads_go_to_the_source_and_assignments_are_refused(name: str) -> None:
    theirs = source()
    loader = midepoch.wrap(theirs, seed=1)
    assert getattr(loader, name) is getattr(theirs, name)
    with pytest.raises(AttributeError, match=rf"wrap\(DataLoader\(dataset, {name}=\.\.\.\)\)"):
        setattr(loader, name, getattr(theirs, name))
    with pytest.raises(AttributeError, match=f"the wrapped list has no {name}"):
        getattr(midepoch.wrap([1, 2]), name)
    assert not hasattr(midepoch.wrap([1, 2]), name)
    assert hasattr(pickle.loads(pickle.dumps(loader)), name)


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_another_sampler_is_refused_with_the_cure(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"wrap\(DataLoader\(dataset, {name}=\.\.\.\)\)"):
        setattr(midepoch.wrap(source(), seed=1), name, None)


def test_what_programs_print_in_their_first_lines() -> None:
    loader = midepoch.wrap(source(), seed=1)
    assert (len(loader.dataset), len(loader.sampler), len(loader), loader.batch_size) == (20, 20, 5, 4)
    assert len(loader.batch_sampler) == 5
    second = midepoch.wrap(source(), seed=1, world=World(1, 3))
    assert (len(second.dataset), len(second.sampler), len(second)) == (20, 7, 2)
    with pytest.raises(TypeError, match=r"loader\.unit"):
        len(midepoch.wrap([1, 2]).sampler)


def test_units() -> None:
    assert midepoch.wrap(source()).unit == "sample"
    assert midepoch.wrap(streamed(), shard=True).unit == "sample"
    listed = DataLoader(Rows(20), batch_sampler=[[0, 1], [2]])
    batches = [midepoch.wrap([1, 2]), midepoch.wrap(lambda: iter([1])), midepoch.wrap(listed)]
    batches += [midepoch.wrap(streamed(), shard=False), midepoch.combine([midepoch.wrap([1])])]
    assert [loader.unit for loader in batches] == ["batch"] * 5


def test_the_length_follows_a_dataset_that_grows_between_epochs() -> None:
    theirs = source()
    loader = midepoch.wrap(theirs, seed=1)
    first = list(loader)
    theirs.dataset.size += 4  # type: ignore[attr-defined]
    assert (len(first), len(loader), loader.batches_left, len(loader.sampler)) == (5, 6, 6, 24)
    state = loader.state_dict()
    assert state["size"] == 24
    resumed = midepoch.wrap(DataLoader(Rows(24), batch_size=4, shuffle=True), seed=1)
    resumed.load_state_dict(state)
    assert sources.taken(resumed) == sources.taken(loader)


def test_accelerate_leaves_it_as_it_is_and_skips_no_batches() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the extra trainers")
    loader = midepoch.wrap(source(), seed=1)
    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader
    with pytest.raises(UnsupportedSourceError, match="iterate the wrapped loader itself"):
        list(accelerate.skip_first_batches(loader, 2))
    stream = midepoch.wrap(streamed(), shard=True)
    with pytest.raises(AttributeError, match=r"loader\.source\.dataset"):
        accelerate.skip_first_batches(stream, 2)
    assert stream.source.dataset is not None


def test_fabric_refuses_it() -> None:
    lightning = pytest.importorskip("lightning", reason="needs the extra trainers")
    with pytest.raises(TypeError, match="DataLoader"):
        lightning.Fabric(accelerator="cpu").setup_dataloaders(midepoch.wrap(source(), seed=1))


def test_a_shard_that_a_source_has_no_use_for_is_refused() -> None:
    for source in ([1, 2, 3], Rows(4)):
        with pytest.raises(UnsupportedSourceError, match="shard=False"):
            midepoch.wrap(source, shard=False)
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    with pytest.raises(UnsupportedSourceError, match="shard=True"):
        midepoch.wrap(stateful.StatefulDataLoader(Rows(4)), shard=True)


def test_a_loader_is_not_copied() -> None:
    with pytest.raises(TypeError, match=r"wrap the source again, and load this loader's state_dict\(\)"):
        copy.copy(midepoch.wrap(source()))


# --- as typed users and people at a prompt meet it ---


def test_a_loader_is_generic_in_its_batch() -> None:
    loader: midepoch.Loader[dict[str, torch.Tensor]] = midepoch.wrap(DataLoader(Rows(20), batch_size=5), seed=0)
    for batch in loader:
        assert_type(batch, dict[str, torch.Tensor])
        assert len(batch["labels"]) == 5
    untyped: midepoch.Loader = loader  # without a parameter, strict type checkers take Any
    assert_type(next(iter(untyped)), Any)


def test_the_seed_and_the_world_that_are_in_use() -> None:
    loader = midepoch.wrap(DataLoader(Rows(20), batch_size=5, shuffle=True), seed=7, world=World(1, 2))
    assert loader.seed == loader.state_dict()["seed"] == 7 and loader.world == World(1, 2)
    resumed = midepoch.wrap(DataLoader(Rows(20), batch_size=5, shuffle=True))
    resumed.load_state_dict(loader.state_dict())
    assert resumed.seed == 7 and resumed.world.world_size == 1
    loader.reshard(World(0, 3))
    assert loader.world == World(0, 3)


def test_help_begins_with_an_example() -> None:
    first = (midepoch.wrap.__doc__ or "").partition("Args:")[0]
    assert "loader = midepoch.wrap(DataLoader(" in first and "loader.load_state_dict(" in first
